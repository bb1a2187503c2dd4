//! Shared parts of tests of lists: a host with a limited memory and a gate that is not entered
//! twice, and objects with an item inside.

#![allow(dead_code)]

use core::alloc::Layout;
use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use neap_base::gate::Inside;
use neap_groups::{GroupId, GroupSlot, Groups, Reclaimer};
use neap_percpu::{PerCpuData, Shape};
use neap_reclaim::lru::{Item, LruList, LruRegistry, LruStatus, Site, Walked};
use neap_testing::virtual_platform::Virtual;
use std::alloc::{alloc_zeroed, dealloc};
use std::sync::Mutex;

/// Number of the shrinker of the lists under test.
pub(crate) const SHRINKER: u64 = 7;

/// State that all hosts of a test share.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) lists: LruRegistry,
    /// Bytes that were requested and not given back.
    pub(crate) bytes: AtomicUsize,
    /// Number of times that the gate was entered.
    pub(crate) passages: AtomicUsize,
    /// Whether requests for memory fail.
    pub(crate) is_exhausted: AtomicBool,
    /// Every mark: the group with its slot, and the node.
    pub(crate) marks: Mutex<Vec<(GroupSlot, usize)>>,
    /// Called at the beginning of a deletion's hook, once.
    pub(crate) before_offline: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A host for tests.
pub(crate) struct Host<'a> {
    pub(crate) machine: &'a Virtual,
    pub(crate) data: &'a PerCpuData,
    pub(crate) state: &'a State,
}

impl Clone for Host<'_> {
    fn clone(&self) -> Self {
        *self
    }
}

impl Copy for Host<'_> {}

impl neap_percpu::Host for Host<'_> {
    type Platform = Virtual;
    type Charge = ();

    fn platform(&self) -> &Virtual {
        self.machine
    }

    fn data(&self) -> &PerCpuData {
        self.data
    }

    fn inside<R>(&self, body: impl FnOnce(&Inside<'_>) -> R) -> R {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                INSIDE.with(|inside| inside.set(false));
            }
        }
        assert!(!INSIDE.with(|inside| inside.replace(true)), "the gate is passed twice");
        let _leave = Leave;
        self.state.passages.fetch_add(1, Relaxed);
        Inside::assume(body)
    }
}

impl Reclaimer for Host<'_> {
    fn offline(&self, inside: &Inside<'_>, groups: &Groups, child: GroupSlot, parent: GroupSlot) {
        let before = self.state.before_offline.lock().unwrap().take();
        if let Some(before) = before {
            before();
        }
        Site { host: self, groups, lists: &self.state.lists }.offline(inside, child, parent);
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 64).unwrap()
}

impl neap_reclaim::Host for Host<'_> {
    fn memory(&self, _: &Inside<'_>, bytes: usize) -> Option<NonNull<u8>> {
        assert!(INSIDE.with(Cell::get), "memory is asked for inside the gate");
        if self.state.is_exhausted.load(Relaxed) {
            return None;
        }
        self.state.bytes.fetch_add(bytes, Relaxed);
        // SAFETY: the layout has a size, since no caller requests 0 bytes.
        NonNull::new(unsafe { alloc_zeroed(layout(bytes)) })
    }

    unsafe fn give_back(&self, _: &Inside<'_>, memory: NonNull<u8>, bytes: usize) {
        self.state.bytes.fetch_sub(bytes, Relaxed);
        // SAFETY: `memory` allocated it with this layout, and no thread uses it any more.
        unsafe { dealloc(memory.as_ptr(), layout(bytes)) };
    }

    fn mark(&self, _: &Inside<'_>, shrinker: u64, seat: GroupSlot, node: usize) {
        assert_eq!(shrinker, SHRINKER);
        self.state.marks.lock().unwrap().push((seat, node));
    }
}

/// An object to be cached.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Thing {
    pub(crate) item: Item,
    pub(crate) number: usize,
    pub(crate) freed: AtomicBool,
}

impl Thing {
    pub(crate) fn new(number: usize) -> Thing {
        Thing { number, ..Thing::default() }
    }

    pub(crate) fn item(&self) -> NonNull<Item> {
        // The address of the whole thing, so that `around` can get it back.
        NonNull::from(self).cast()
    }

    /// Returns the thing around an item.
    pub(crate) fn around<'a>(item: NonNull<Item>) -> &'a Thing {
        // SAFETY: tests' items are in things, at the beginning, which outlive the lists.
        let thing = unsafe { item.cast::<Thing>().as_ref() };
        assert!(!thing.freed.load(Relaxed), "a freed thing is looked at");
        thing
    }
}

pub(crate) fn things(count: usize) -> Vec<Thing> {
    (0..count).map(Thing::new).collect()
}

/// Runs `test` on a machine of that many nodes, with groups and lists. They are closed after it,
/// and must have given everything back.
pub(crate) fn with_site(nodes: usize, test: impl FnOnce(&Site<'_, Host<'_>>)) {
    let cpus = nodes.max(2);
    let homes: Vec<_> = (0..cpus).map(|cpu| cpu % nodes).collect();
    let machine = Virtual::new(4096, cpus).with_nodes(&homes);
    let data = PerCpuData::open(&machine, &Shape { span: 16 << 20, ..Shape::usual(cpus) }, |_| 0, ()).unwrap();
    let state = State::default();
    let host = Host { machine: &machine, data: &data, state: &state };
    let groups = Groups::open(&host).unwrap();
    let site = Site { host: &host, groups: &groups, lists: &state.lists };
    test(&site);
    verify(&site);
    // SAFETY: no thread uses them any more.
    unsafe {
        site.close();
        groups.close(&host);
        data.close(&machine);
    }
    assert_eq!(state.bytes.load(Relaxed), 0, "memory is left");
}

/// Returns the group that items of a group are attached to, and its slot.
pub(crate) fn target(site: &Site<'_, Host<'_>>, group: GroupId) -> GroupSlot {
    Inside::assume(|inside| site.groups.attach_target(inside, &site.groups.reading(), group)).unwrap()
}

pub(crate) fn verify(site: &Site<'_, Host<'_>>) {
    site.verify().unwrap_or_else(|finding| panic!("{finding:?}"));
}

/// The calls as tests use them: things outlive lists.
pub(crate) struct On<'a, 's>(pub(crate) &'a Site<'s, Host<'s>>, pub(crate) LruList);

impl On<'_, '_> {
    pub(crate) fn add(&self, group: GroupId, node: usize, thing: &Thing) -> bool {
        // SAFETY: it outlives the list.
        unsafe { self.1.add(self.0, group, node, thing.item()) }.unwrap()
    }

    pub(crate) fn del(&self, thing: &Thing) -> bool {
        // SAFETY: the thing exists: it outlives the list.
        unsafe { self.1.del(self.0, thing.item()) }
    }

    pub(crate) fn count(&self, group: GroupId, node: usize) -> usize {
        self.1.count(self.0, group, node)
    }

    /// Number of items of all groups on a node, for a list by group. While groups are deleted,
    /// items may be counted twice or not at all.
    pub(crate) fn count_node(&self, node: usize) -> usize {
        self.0.groups.online_slots().map(|seat| self.count(seat.group, node)).sum()
    }

    /// Walks; returns the numbers of the items that were handed out, too.
    pub(crate) fn walk(
        &self,
        group: GroupId,
        node: usize,
        most: usize,
        mut isolate: impl FnMut(&Thing) -> LruStatus,
    ) -> (Walked, Vec<usize>) {
        let mut out = Vec::new();
        let dispose = |item: NonNull<Item>| {
            let thing = Thing::around(item);
            assert!(thing.item.is_linked() && thing.item.leave_hands());
            out.push(thing.number);
        };
        // SAFETY: closures of tests neither wait, allocate in the manager, nor call the list.
        let walked = unsafe { self.1.walk(self.0, group, node, most, |item| isolate(Thing::around(item)), dispose) };
        assert_eq!(walked.removed, out.len());
        (walked, out)
    }

    /// Returns the numbers of a group's items, oldest first.
    pub(crate) fn all(&self, group: GroupId, node: usize) -> Vec<usize> {
        let mut all = Vec::new();
        let (walked, out) = self.walk(group, node, usize::MAX, |thing| {
            all.push(thing.number);
            LruStatus::Skip
        });
        assert!(out.is_empty() && !walked.stopped && walked.scanned == all.len());
        all
    }

    /// Closes the list.
    pub(crate) fn close(self) {
        // SAFETY: no thread uses it any more.
        unsafe { self.0.close_list(self.1) };
    }
}

/// Ticks until nothing of deleted groups is left.
pub(crate) fn settle(site: &Site<'_, Host<'_>>) {
    assert!((0..10_000).any(|_| !site.tick()), "what was deleted stays");
    assert!(!site.groups.end_deleted(site.host), "a thread is on the way through groups");
}
