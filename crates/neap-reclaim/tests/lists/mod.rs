//! What tests of lists share: a host whose memory can run out and whose gate nobody passes twice, and objects with an item inside.

#![allow(dead_code)]

use core::alloc::Layout;
use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use neap_base::virtual_platform::Virtual;
use neap_groups::{GroupId, Groups, Reclaimer, Seat};
use neap_percpu::{PerCpuData, Shape};
use neap_reclaim::lru::{Item, Lists, LruList, Site, Verdict, Walked};
use std::alloc::{alloc_zeroed, dealloc};
use std::sync::Mutex;

/// The shrinker that lists under test are of.
pub(crate) const SHRINKER: u64 = 7;

/// What all of a test's hosts share.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) lists: Lists,
    /// Bytes that are out.
    pub(crate) bytes: AtomicUsize,
    /// How often the gate was passed.
    pub(crate) passages: AtomicUsize,
    /// There is no memory.
    pub(crate) is_exhausted: AtomicBool,
    /// Every mark: the group, its slot, the node.
    pub(crate) marks: Mutex<Vec<(Seat, usize)>>,
    /// Called at the beginning of a deletion's hook, once.
    pub(crate) before_offline: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The host.
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

    fn inside<R>(&self, body: impl FnOnce() -> R) -> R {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                INSIDE.with(|inside| inside.set(false));
            }
        }
        assert!(!INSIDE.with(|inside| inside.replace(true)), "the gate is passed twice");
        let _leave = Leave;
        self.state.passages.fetch_add(1, Relaxed);
        body()
    }
}

impl Reclaimer for Host<'_> {
    fn offline(&self, groups: &Groups, child: Seat, parent: Seat) {
        let before = self.state.before_offline.lock().unwrap().take();
        if let Some(before) = before {
            before();
        }
        Site { host: self, groups, lists: &self.state.lists }.offline(child, parent);
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 64).unwrap()
}

impl neap_reclaim::Host for Host<'_> {
    fn memory(&self, bytes: usize) -> Option<NonNull<u8>> {
        assert!(INSIDE.with(Cell::get), "memory is asked for inside the gate");
        if self.state.is_exhausted.load(Relaxed) {
            return None;
        }
        self.state.bytes.fetch_add(bytes, Relaxed);
        // SAFETY: nobody asks for nothing.
        NonNull::new(unsafe { alloc_zeroed(layout(bytes)) })
    }

    unsafe fn give_back(&self, memory: NonNull<u8>, bytes: usize) {
        self.state.bytes.fetch_sub(bytes, Relaxed);
        // SAFETY: from above, as the caller promises.
        unsafe { dealloc(memory.as_ptr(), layout(bytes)) };
    }

    fn mark(&self, shrinker: u64, seat: Seat, node: usize) {
        assert_eq!(shrinker, SHRINKER);
        self.state.marks.lock().unwrap().push((seat, node));
    }
}

/// Something to be cached.
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
        // The address of all of it, so that there is a way back.
        NonNull::from(self).cast()
    }

    /// The thing around an item.
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

/// A machine of so many CPUs and nodes, with groups and lists, which are closed after the test and have given everything back.
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
    // SAFETY: nobody uses them any more.
    unsafe {
        site.close();
        groups.close(&host);
        data.close(&machine);
    }
    assert_eq!(state.bytes.load(Relaxed), 0, "memory is left");
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
        // SAFETY: as above.
        unsafe { self.1.del(self.0, thing.item()) }
    }

    pub(crate) fn count(&self, group: GroupId, node: usize) -> usize {
        self.1.count(self.0, group, node)
    }

    /// A walk; the numbers of those that were handed out.
    pub(crate) fn walk(
        &self,
        group: GroupId,
        node: usize,
        most: usize,
        mut isolate: impl FnMut(&Thing) -> Verdict,
    ) -> (Walked, Vec<usize>) {
        let mut out = Vec::new();
        let dispose = |item: NonNull<Item>| {
            let thing = Thing::around(item);
            assert!(thing.item.is_linked() && thing.item.leave_hands());
            out.push(thing.number);
        };
        // SAFETY: tests' functions do what they may.
        let walked = unsafe { self.1.walk(self.0, group, node, most, |item| isolate(Thing::around(item)), dispose) };
        assert_eq!(walked.removed, out.len());
        (walked, out)
    }

    /// The numbers of a group's items, oldest first.
    pub(crate) fn all(&self, group: GroupId, node: usize) -> Vec<usize> {
        let mut all = Vec::new();
        let (walked, out) = self.walk(group, node, usize::MAX, |thing| {
            all.push(thing.number);
            Verdict::Skip
        });
        assert!(out.is_empty() && !walked.stopped && walked.scanned == all.len());
        all
    }

    /// Closes the list.
    pub(crate) fn close(self) {
        // SAFETY: nobody uses it any more.
        unsafe { self.0.close_list(self.1) };
    }
}

/// Ticks until nothing is left of what was deleted.
pub(crate) fn settle(site: &Site<'_, Host<'_>>) {
    assert!((0..10_000).any(|_| !site.tick()), "what was deleted stays");
    assert!(!site.groups.end_deleted(site.host), "somebody is on the way through groups");
}
