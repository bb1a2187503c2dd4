//! Barns keep free objects in sheaves, between the stacks of the CPUs and the slabs.
//!
//! # Design
//!
//! A class has a barn on every node, with objects of that node only. A barn keeps objects for the
//! next burst. A sweep before growth may empty it ([`reuse`](crate::reuse)). A trim dissolves the
//! sheaves that no thread needed since the last trim. A barn takes no objects from slabs, except
//! for the memory of its sheaves.
//!
//! # Locking
//!
//! A thread holds one class's mutex at a time, while it moves a few sheaves.

use crate::class_cache::{ClassCache, Direction, FLUSH_BATCH, NodeCache, SharedCache};
use crate::objects::Objects;
use crate::other_nodes::Others;
use crate::sheaf::{Sheaf, SheafKind, SheafList};
use crate::size_class::{CLASSES, Class};
use crate::strided_run::StridedRun;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_pages::Effort;

/// Frees may make sheaves in any case while the cells of all sheaves take at most this many bytes.
const CELL_BYTES_MIN: u64 = 1 << 20;

/// Result of trimming barns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrimmedBarn {
    /// Objects of the dissolved sheaves.
    pub objects: u64,
    /// Whether sheaves are left.
    pub has_sheaves: bool,
}

impl<P: Platform> Objects<P> {
    /// The class cache of a class on a node.
    #[inline]
    pub fn cache(&self, node: usize, class: Class) -> NodeCache<'_> {
        NodeCache::new(self.shared(node, class), &self.live, node * CLASSES + class.index())
    }

    /// The class cache of a class on a node, for callers that change no counter.
    #[inline]
    pub(crate) fn shared(&self, node: usize, class: Class) -> &SharedCache {
        &self.node(node).map_or(&self.caches, |others| &others.caches)[class.index()]
    }

    /// The class caches of a class, node by node, for callers that change no counter.
    pub fn caches_of(&self, class: Class) -> impl Iterator<Item = &SharedCache> {
        (0..self.pages.nodes()).map(move |node| self.shared(node, class))
    }

    pub(crate) fn node(&self, node: usize) -> Option<&Others> {
        // SAFETY: `open` made class caches for every node but the first, and they live as long as
        // the instance.
        node.checked_sub(1).map(|other| unsafe { &*self.others.add(other) })
    }

    /// The class cache of a class on the node nearest to this thread.
    #[inline]
    pub(crate) fn near(&self, class: Class) -> NodeCache<'_> {
        self.cache(self.pages.nearest(&self.platform), class)
    }

    /// The node of an object's page.
    #[inline]
    pub fn node_of(&self, object: *const u8) -> usize {
        if self.pages.nodes() == 1 { 0 } else { self.pages.node_of(self.pages.pfn(object.addr())) }
    }

    /// Puts sheaves into the barns of their objects' nodes. A spill also takes surplus sheaves out
    /// of the barns, and returns their objects to slabs.
    pub(crate) fn stow(&self, class: Class, mut sheaves: SheafList, direction: Direction) {
        let cpu = self.platform.cpu() as u16;
        let put = |cache: &mut ClassCache, sheaf: Sheaf| {
            let is_filled = !sheaf.is_empty();
            if is_filled && sheaf.home() != cpu {
                cache.shorten_streak();
            }
            cache.stow(sheaf);
            u32::from(is_filled)
        };
        while let Some(mut sheaf) = sheaves.pop() {
            let mut node = 0;
            if self.pages.nodes() > 1 {
                node = match sheaf.objects().next() {
                    Some(first) => self.node_of(first),
                    None => self.pages.nearest(&self.platform),
                };
                if !sheaf.is_bound() {
                    // Few programs mix nodes in one stack. Objects of other nodes return to their
                    // slabs.
                    let own = sheaf.partition(|object| self.node_of(object) == node);
                    self.flush(class, &sheaf.cells()[own..]);
                    sheaf.truncate(own);
                }
            }
            let barn = self.cache(node, class);
            let mut cache = barn.lock();
            let mut filled = put(&mut cache, sheaf);
            if self.pages.nodes() == 1 {
                while let Some(sheaf) = sheaves.pop() {
                    filled += put(&mut cache, sheaf);
                }
            }
            // Takes more sheaves than were put in. Otherwise a barn with too many would keep them.
            let most = if direction == Direction::Spill { 2 * filled } else { 0 };
            let mut surplus = cache.take_surplus(most);
            drop(cache);
            while let Some(sheaf) = surplus.pop() {
                self.recycle(barn, class, sheaf);
            }
        }
    }

    /// Makes an empty sheaf. `None` if there is no memory for it.
    pub(crate) fn new_sheaf(&self, class: Class, kind: SheafKind) -> Option<Sheaf> {
        let memory = self.private_memory(kind.memory(class))?;
        self.count_cells(class, kind, 1);
        // SAFETY: `private_memory` gave an object of the sheaf's size to this thread alone. Objects
        // are aligned to 16 bytes, and the sheaf capacity of every class fits 16 bits.
        Some(unsafe { Sheaf::make(memory, class, kind.cells(class)) })
    }

    /// Returns the memory of an empty sheaf to its slab.
    fn drop_sheaf(&self, class: Class, sheaf: Sheaf) {
        let memory = sheaf.kind().memory(class);
        self.count_cells(class, sheaf.kind(), -1);
        self.flush_private(memory, sheaf.into_memory().as_ptr());
    }

    fn count_cells(&self, class: Class, kind: SheafKind, sheaves: i64) {
        if kind == SheafKind::Plain {
            let bytes = kind.memory(class).size() as i64 * sheaves;
            // Relaxed: heuristic; it publishes no other data. Additions of negative numbers wrap.
            self.cell_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Returns an empty sheaf with cells, for freed objects. If cells already take more than a 64th
    /// of the resident memory, new ones would make a burst of frees take memory from the system.
    /// The call then takes a plain sheaf with objects out of the near barn, if it finds one, and
    /// returns the objects to slabs.
    pub(crate) fn sheaf_for_frees(&self, class: Class) -> Option<Sheaf> {
        let resident = self.pages.resident() << self.pages.page_shift();
        // Relaxed: heuristic; it publishes no other data.
        if self.cell_bytes.load(Ordering::Relaxed) <= (resident / 64).max(CELL_BYTES_MIN) {
            return self.new_sheaf(class, SheafKind::Plain);
        }
        let sheaf = self.near(class).lock().full.pop_plain();
        match sheaf {
            Some(mut sheaf) => {
                self.empty(class, &mut sheaf);
                Some(sheaf)
            }
            None => self.new_sheaf(class, SheafKind::Plain),
        }
    }

    /// Returns the objects of a sheaf, and its memory, to slabs.
    pub(crate) fn dissolve(&self, class: Class, mut sheaf: Sheaf) {
        self.empty(class, &mut sheaf);
        self.drop_sheaf(class, sheaf);
    }

    /// Returns the objects of a sheaf to slabs. It is not inlined, since its stack frame is large.
    #[inline(never)]
    fn empty(&self, class: Class, sheaf: &mut Sheaf) {
        self.flush(class, sheaf.cells());
        let mut cells = [core::ptr::null_mut(); FLUSH_BATCH];
        let mut bound = sheaf.strided_runs().flat_map(StridedRun::objects).fuse();
        loop {
            let count = cells.iter_mut().zip(&mut bound).map(|(cell, object)| *cell = object).count();
            if count == 0 {
                break;
            }
            self.flush(class, &cells[..count]);
        }
        drop(bound);
        sheaf.clear();
    }

    /// Dissolves the sheaves of a class's barns: all of them with [`Effort::Full`], otherwise those
    /// that no thread needed since the last call. Ends early once `stop` returns `true`.
    pub fn trim_barn(&self, class: Class, effort: Effort, stop: &dyn Fn() -> bool) -> TrimmedBarn {
        (0..self.pages.nodes()).fold(TrimmedBarn::default(), |sum, node| {
            let TrimmedBarn { objects, has_sheaves } = self.trim_barn_on(node, class, effort, stop);
            TrimmedBarn { objects: sum.objects + objects, has_sheaves: sum.has_sheaves | has_sheaves }
        })
    }

    /// Dissolves the sheaves of a class's barn on one node: all of them with [`Effort::Full`],
    /// otherwise those that no thread needed since the last call. Ends early once `stop` returns
    /// `true`.
    pub fn trim_barn_on(&self, node: usize, class: Class, effort: Effort, stop: &dyn Fn() -> bool) -> TrimmedBarn {
        let cache = self.cache(node, class);
        let (unneeded, mut has_sheaves) = {
            let mut cache = cache.lock();
            let unneeded = cache.sheaf_lists().map(|list| {
                let idle = list.working_set();
                if effort == Effort::Full { list.length() } else { idle }
            });
            let left = cache.sheaf_lists().into_iter().zip(unneeded).any(|(list, unneeded)| list.length() > unneeded);
            (unneeded, left)
        };
        let mut objects = 0;
        for list in unneeded.into_iter().enumerate().flat_map(|(list, count)| (0..count).map(move |_| list)) {
            if stop() {
                return TrimmedBarn { objects, has_sheaves: true };
            }
            let sheaf = cache.lock().sheaf_lists()[list].pop();
            match sheaf {
                Some(sheaf) => {
                    objects += sheaf.length() as u64;
                    self.dissolve(class, sheaf);
                }
                None => has_sheaves = true,
            }
        }
        TrimmedBarn { objects, has_sheaves }
    }
}

impl<P: Platform> Objects<P> {
    /// Returns about `bytes` bytes of the fullest barn's objects to slabs, and not many more than
    /// `most` objects. Ends early once `stop` returns `true`. Returns the number of objects; `None`
    /// if all barns are empty. The barn keeps a few empty sheaves for later frees.
    pub fn shrink_fullest_barn(&self, bytes: u64, most: u64, stop: &dyn Fn() -> bool) -> Option<u64> {
        let barns = (0..self.pages.nodes()).flat_map(|node| Class::all().map(move |class| (node, class)));
        let in_barn = |(node, class): (usize, Class)| {
            let objects = u64::from(self.shared(node, class).lock().full.length()) * u64::from(class.sheaf_capacity());
            (objects * class.size() as u64, node, class)
        };
        let (.., node, class) = barns.map(in_barn).max_by_key(|(bytes, ..)| *bytes).filter(|(bytes, ..)| *bytes > 0)?;
        let (mut objects, wanted) = (0, (bytes / class.size() as u64).clamp(1, most.max(1)));
        while objects < wanted && !stop() {
            let Some(sheaf) = self.cache(node, class).lock().full.pop() else { break };
            objects += sheaf.length() as u64;
            self.recycle(self.cache(node, class), class, sheaf);
        }
        Some(objects)
    }

    /// Returns the objects of a sheaf to slabs. Returns the sheaf to the barn, or frees it if the
    /// barn has enough empty sheaves.
    fn recycle(&self, barn: NodeCache<'_>, class: Class, mut sheaf: Sheaf) {
        /// Sheaves without objects that a barn keeps.
        const EMPTY_SHEAVES_MAX: u32 = 16;
        self.empty(class, &mut sheaf);
        let mut cache = barn.lock();
        if cache.empty.length() + cache.empty_bound.length() < EMPTY_SHEAVES_MAX {
            cache.stow(sheaf);
        } else {
            drop(cache);
            self.drop_sheaf(class, sheaf);
        }
    }
}
