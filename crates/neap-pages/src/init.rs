//! Opening and closing the pages of a node: the arena, and the mappings beside it.
//!
//! The first node makes the arena and keeps it in a mapping of its own. The other nodes use that
//! arena. There are no locks, since no other thread uses pages while they are opened or closed.

use crate::arena::{Arena, Grown, Shared};
use crate::buddy::Buddy;
use crate::page_lists::PageLists;
use crate::pages::Pages;
use crate::policy::Policy;
use crate::purge::Release;
use crate::settings::Settings;
use crate::shape::Shape;
use crate::statistics::Needs;
use crate::tables::{BACKED, BACKED_CHUNKS, FRAMES, FREE_CHUNKS, LAZY_CHUNKS, MappingKind};
use crate::units::{CHUNK, UNLIMITED};
use crate::zone::Zone;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;
use neap_base::Platform;
use neap_base::platform::{Errno, HugePageSupply};

/// The mapping of a node's lists and release data, and of the arena or the node's chunk maps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    start: usize,
    length: usize,
    /// The arena or the chunk maps, at the start, so that their touched part and the lists of the
    /// first CPUs share a page.
    rest: usize,
    lists: usize,
    release: usize,
}

impl Own {
    fn map<P: Platform, T: Policy>(platform: &P, rest: usize) -> Result<Own, Errno> {
        // A list is aligned to 128 bytes, and its size is a multiple of that. The release data
        // need 8 bytes. So both offsets below are aligned.
        let rest = rest.next_multiple_of(128);
        let lists = PageLists::<T>::bytes(platform.cpus());
        let length = (rest + lists + Release::BYTES).next_multiple_of(platform.page_size());
        let start = platform.map(length)?;
        Ok(Own { start, length, rest: start, lists: start + rest, release: start + rest + lists })
    }
}

impl<P: Platform> Pages<P> {
    /// Finds address space and maps the first segment. All memory belongs to one node, however many
    /// the machine has.
    ///
    /// # Errors
    /// The platform's error. Nothing stays mapped then.
    pub fn open(platform: &P, shape: &Shape) -> Result<Pages<P>, Errno> {
        Pages::open_tuned(platform, shape)
    }
}

impl<P: Platform, T: Policy> Pages<P, T> {
    /// Opens pages with lists of any policy, for one node.
    pub(crate) fn open_tuned(platform: &P, shape: &Shape) -> Result<Pages<P, T>, Errno> {
        Pages::open_first(platform, shape, 1)
    }

    /// Opens the pages of the first of `nodes` nodes, which share the arena.
    ///
    /// # Errors
    /// The platform's error. Nothing stays mapped then.
    pub(crate) fn open_first(platform: &P, shape: &Shape, nodes: usize) -> Result<Pages<P, T>, Errno> {
        let (arena, grown) = Arena::open(platform, shape, nodes)?;
        let maps = [FREE_CHUNKS, BACKED_CHUNKS, LAZY_CHUNKS].map(|table| arena.table(table).start);
        let own = Own::map::<P, T>(platform, size_of::<Arena>()).inspect_err(|_| {
            // SAFETY: the arena was just opened, and no other thread uses it.
            unsafe { arena.close(platform) }
        })?;
        let place = NonNull::new(core::ptr::with_exposed_provenance_mut::<Arena>(own.rest)).ok_or(Errno::NOMEM)?;
        // SAFETY: the new mapping has room for the arena at its start, aligned to a page and for
        // the arena alone. The mapping stays until `close`.
        let arena = unsafe {
            place.write(arena);
            Shared::at(place)
        };
        Ok(Pages::make(platform, shape, arena, 0, maps, own, Some(grown)))
    }

    /// Opens the pages of another node in the same arena. The node has no memory yet.
    ///
    /// # Errors
    /// The platform's error. Nothing of this node stays mapped then.
    ///
    /// # Safety
    /// The result is closed before the first node's pages are.
    pub(crate) unsafe fn open_beside(&self, platform: &P, shape: &Shape, node: usize) -> Result<Pages<P, T>, Errno> {
        let map = self.arena.chunk_map();
        let own = Own::map::<P, T>(platform, 3 * map)?;
        Ok(Pages::make(platform, shape, self.arena, node, [0, 1, 2].map(|n| own.rest + n * map), own, None))
    }

    fn make(
        platform: &P,
        shape: &Shape,
        arena: Shared,
        node: usize,
        chunk_maps: [usize; 3],
        own: Own,
        grown: Option<Grown>,
    ) -> Pages<P, T> {
        let (page_shift, nodes) = (arena.page_shift(), arena.nodes as u32);
        let settings = Settings { budget: shape.budget, list_high: shape.list_high, batch_scale: shape.batch_scale };
        let limits = settings.limits(nodes, platform.cpus(), page_shift);
        // SAFETY: `Own::map` mapped zeroed memory for exactly these two, aligned to 128 and to 8
        // bytes. No other code uses it before `close` unmaps it.
        let (lists, release) = unsafe { (PageLists::at(own.lists, limits), Release::at(own.release)) };
        let table = |table: usize| arena.table(table).start;
        let mut buddy = Buddy::new(table(FRAMES), table(BACKED), chunk_maps);
        buddy.base_chunks = (arena.base() >> page_shift) / CHUNK as usize;
        // The first node has the whole budget until other nodes need some of it.
        let budget = arena.budget().map_or(UNLIMITED, |pages| if node == 0 { pages } else { 0 });
        let huge = arena.huge_runs.supply != HugePageSupply::None;
        let zone = Zone::new(buddy, node, budget, limits.all_fixed(), huge);
        grown.into_iter().for_each(|grown| zone.add(grown));
        let (misses, needs) = (AtomicU64::new(0), Needs::default());
        Pages { arena, node, zone, lists, release, misses, needs, own, platform: PhantomData }
    }

    /// Calls `each` with the mappings of this node; those of the arena belong to the first node.
    pub fn each_mapping(&self, each: &mut dyn FnMut(MappingKind, usize, usize)) {
        if self.node == 0 {
            self.arena.each_mapping(each);
        }
        each(MappingKind::Lists, self.own.start, self.own.length);
    }

    /// Unmaps everything.
    ///
    /// # Safety
    /// No thread uses these pages or their memory any more. If they are the first node's, no thread
    /// uses the other nodes' pages either.
    pub unsafe fn close(&self, platform: &P) {
        // SAFETY: the caller says that no thread uses the memory any more. The arena lies in the
        // mapping unmapped last.
        unsafe {
            if self.node == 0 {
                self.arena.close(platform);
            }
            platform.unmap(self.own.start, self.own.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::machine::{Opened, give, resident, shape, take_block};
    use crate::trim::DrainSum;
    use neap_testing::virtual_platform::Virtual;

    #[test]
    fn lists_of_unused_cpus_have_no_memory() {
        let resident_with = |cpus| {
            let machine = Virtual::new(4096, cpus);
            let o = Opened::new(&machine, &shape(None)).unwrap();
            let opened = resident(o.pages.own.start, o.pages.own.length);
            Virtual::run_on(0);
            let held = take_block(&o, 0, 1).unwrap();
            give(&o, held);
            let numbers = o.pages.statistics();
            assert!(numbers.listed > 0 && numbers.list_highs as usize == cpus * numbers.list_high as usize);
            o.pages.verify().unwrap();
            assert_eq!(o.pages.listed_on(cpus - 1), Some(0));
            assert_eq!(o.pages.list_high_on(cpus - 1), Some(numbers.list_high));
            assert_eq!(o.pages.drain_all(&machine), DrainSum { pages: numbers.listed, held: 0 });
            (0..cpus).for_each(|cpu| _ = o.pages.drain_cpu(&machine, cpu));
            o.pages.tick(&machine);
            (opened, resident(o.pages.own.start, o.pages.own.length))
        };
        assert_eq!(resident_with(1024), resident_with(2));
    }
}
