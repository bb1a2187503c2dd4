//! A snapshot of a manager's memory by state. A program gets its own by [`stats`] in Rust, and by
//! `neap_stats_get` in C.
//!
//! # Design
//! The numbers are those of [`statistics`](super::statistics). They have the names that other
//! allocators use. A snapshot allocates nothing and releases nothing.
//!
//! # Invariants
//! While no thread allocates or frees:
//!
//! * `mapped` = `active` + `cached.page_lists` + `free` + `retained`;
//! * `active` = `allocated` + `cached.objects()`.

use crate::mm::{Core, Mm};
use crate::options::settings::page_price;
use crate::process::PROCESS;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::gate::Inside;

/// Memory of a manager at one moment. All sizes are bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Stats {
    /// In use by the program: objects by the size of their class, the ends of their slabs, and runs
    /// of pages.
    pub allocated: u64,
    /// Pages with memory in use: those of slabs, without holes, and of runs.
    pub active: u64,
    /// Resident memory of the heap, as the option `limit` counts it: active, cached and free pages,
    /// and metadata. Pages of runs that the program has not touched count, too. Per-CPU data does
    /// not.
    pub resident: u64,
    /// Address space from which neap has handed out memory so far.
    pub mapped: u64,
    /// Part of `mapped` without memory: released, or never touched.
    pub retained: u64,
    /// Tables beside the heap, as the option `limit` counts them: state bytes of objects, frames,
    /// the kind map, and descriptors of slabs.
    pub metadata: u64,
    /// Free memory in caches.
    pub cached: Cached,
    /// Free pages with memory, outside of page lists. Ticks release them.
    pub free: u64,
    /// Populated pages of per-CPU data that hold data.
    pub per_cpu: u64,
    /// The limit in force. With `limit:auto`, neap adjusts it to the container.
    pub limit: Option<u64>,
    /// NUMA nodes on which memory is kept apart.
    pub nodes: u32,
    /// Bytes of a page.
    pub page_size: u32,
    /// Whether neap has a thread, which releases memory while all threads of the program are idle.
    pub has_thread: bool,
    /// Allocations that were refused so far: the limit, the `max` of a group with `refuse:on`, or
    /// the system left no memory. Sizes that no allocation can have do not count.
    pub refused: u64,
    /// Bytes between two samples of allocations, on average, by the option `profile`; `None` while
    /// allocations are not sampled.
    pub sampled_every: Option<u64>,
}

/// Free memory in caches, by kind. All sizes are bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Cached {
    /// Objects on the stacks of CPUs.
    pub stacks: u64,
    /// Objects in barns, which all CPUs of a node share.
    pub barns: u64,
    /// Objects in slabs that are partly used.
    pub slabs: u64,
    /// Pages in the page lists of CPUs.
    pub page_lists: u64,
    /// Populated pages of per-CPU data without data.
    pub per_cpu: u64,
}

impl Cached {
    /// Objects of all caches.
    pub fn objects(&self) -> u64 {
        self.stacks + self.barns + self.slabs
    }

    /// Memory of all caches.
    pub fn total(&self) -> u64 {
        self.objects() + self.page_lists + self.per_cpu
    }
}

impl<P: Platform> Core<P> {
    /// Returns the snapshot, without the number of the option `profile`.
    fn stats(&self, _: &Inside<'_>) -> Stats {
        let (objects, pages) = (&self.objects, self.objects.pages.statistics());
        let usage = self.usage_with(&pages);
        let page = objects.pages.page_size() as u64;
        let bytes = |pages: u32| u64::from(pages) * page;
        let with_memory = u64::from(pages.used) + u64::from(pages.backed_free);
        let metadata = bytes(pages.table_pages) + with_memory * (page_price(page as usize) - page);
        // Pages on their way from or to the OS are mostly without memory.
        let without_memory = pages.free.saturating_sub(pages.backed_free);
        let retained = bytes(without_memory) + bytes(pages.holes) + bytes(pages.releasing);
        Stats {
            allocated: usage.used_bytes,
            active: bytes(pages.used.saturating_sub(pages.listed)),
            resident: with_memory * page + metadata,
            mapped: usage.mapped_bytes,
            retained,
            metadata,
            cached: Cached {
                stacks: usage.stack_bytes,
                barns: usage.barn_bytes,
                slabs: usage.cached_bytes.saturating_sub(usage.stack_bytes + usage.barn_bytes),
                page_lists: bytes(pages.listed),
                per_cpu: usage.per_cpu_free_bytes,
            },
            free: bytes(pages.backed_free),
            per_cpu: usage.per_cpu_bytes,
            limit: Some(self.settings.limit()).filter(|&limit| limit > 0),
            nodes: objects.pages.nodes() as u32,
            page_size: page as u32,
            has_thread: self.background.has_thread(),
            // Relaxed: statistics.
            refused: self.refused.load(Ordering::Relaxed),
            sampled_every: None,
        }
    }
}

impl<P: Platform> Mm<P> {
    /// Returns a snapshot of the memory by state, as [`stats`] does for the process. All numbers
    /// are 0 before the first allocation.
    pub fn stats(&self) -> Stats {
        let Some(core) = self.core_if_open() else { return Stats::default() };
        let stats = core.stats(&self.gate.enter(core.objects.platform.cpu()));
        Stats { sampled_every: self.profile.recorded_every(), ..stats }
    }
}

/// Returns a snapshot of the process's memory in neap, by state.
///
/// All sizes are bytes. All numbers are 0 before the first allocation. The call cannot fail. Each
/// number is exact at some moment of the call. The sums agree while no thread allocates or frees.
///
/// The call allocates nothing and reclaims nothing. It takes the lock of each class and zone for a
/// moment, and waits for a fork in progress. It reads all classes on all CPUs, which takes some
/// microseconds with few CPUs, so a program may call it every second. Must not be called from a
/// signal handler.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: neap::Neap = neap::Neap;
///
/// let before = neap::stats();
/// let block = vec![1_u8; 64 << 20];
/// let now = neap::stats();
/// assert!(now.allocated - before.allocated >= block.len() as u64);
/// assert!(now.active >= now.allocated && now.resident >= now.active);
/// println!("{} MiB in use, {} MiB cached", now.allocated >> 20, now.cached.total() >> 20);
/// ```
pub fn stats() -> Stats {
    PROCESS.stats()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use neap_groups::{Bound, GroupId};
    use neap_percpu::{Host, Owner, Wait};
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::vec::Vec;

    const MIB: u64 = 1 << 20;

    /// Returns the snapshot of a manager that no thread uses, after the checks that hold always.
    fn consistent(mm: &Mm<Virtual>) -> Stats {
        let now = mm.stats();
        assert_eq!(now.mapped, now.active + now.cached.page_lists + now.free + now.retained, "{now:?}");
        assert_eq!(now.active, now.allocated + now.cached.objects(), "{now:?}");
        assert_eq!(now.resident, now.active + now.cached.page_lists + now.free + now.metadata, "{now:?}");
        let usage = mm.usage();
        assert_eq!(now.cached.objects(), usage.cached_bytes);
        assert_eq!((now.allocated, now.free + now.cached.page_lists), (usage.used_bytes, usage.free_bytes));
        now
    }

    #[test]
    fn refusals_are_counted_once_whatever_refuses() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let options = Options { limit: 64 * MIB, refuse: true, stat: false, ..Options::DEFAULT };
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(Virtual::new(4096, 1), &options) }.unwrap();
        let block = mm.allocate(MIB as usize);
        assert!(!block.is_null() && mm.stats().refused == 0);
        // The limit refuses these, and the block stays as it is.
        assert!(mm.allocate(100 << 20).is_null() && mm.allocate_zeroed_aligned(100 << 20, 4096).is_null());
        // SAFETY: the block is this test's.
        assert!(unsafe { mm.reallocate(block, 100 << 20) }.is_null());
        assert_eq!(mm.stats().refused, 3);
        let groups = mm.groups().unwrap();
        let group = groups.create(GroupId::ROOT, "full").unwrap();
        groups.set_bound(group, Bound::Max, MIB).unwrap();
        let before = mm.enter(Some(group));
        assert!(mm.allocate(2 << 20).is_null());
        mm.leave(before);
        assert_eq!(mm.stats().refused, 4);
        // No allocation can have this size.
        assert!(mm.allocate(usize::MAX).is_null() && mm.stats().refused == 4);
        // SAFETY: allocated above, and no thread uses the manager any more.
        unsafe {
            mm.free(block);
            mm.close();
        }
    }

    #[test]
    fn every_byte_has_one_state() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        assert_eq!(mm.stats(), Stats::default());
        let options = Options { limit: 256 * MIB, stat: false, ..Options::DEFAULT };
        let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]);
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(machine, &options) }.unwrap();
        let fresh = consistent(&mm);
        assert_eq!((fresh.allocated, fresh.limit), (0, Some(256 * MIB)));
        assert_eq!((fresh.nodes, fresh.page_size, fresh.has_thread), (2, 4096, false));

        let blocks: Vec<*mut u8> = (0..40_000).map(|_| mm.allocate(128)).collect();
        let run = mm.allocate(20 << 20);
        let full = consistent(&mm);
        let asked = 40_000 * 128 + 20 * MIB;
        assert!((asked..asked + MIB).contains(&full.allocated), "{full:?}");
        assert!(full.metadata > 0 && full.resident < 30 * MIB && full.mapped > full.resident, "{full:?}");

        // SAFETY: allocated above, once each.
        unsafe {
            mm.free(run);
            blocks.iter().skip(100).for_each(|&block| mm.free(block));
        }
        let freed = consistent(&mm);
        assert!(freed.allocated < MIB && freed.free > MIB, "{freed:?}");
        let Cached { stacks, barns, slabs, page_lists, per_cpu } = freed.cached;
        assert!(stacks > 0 && barns > 0 && slabs + page_lists > 0 && per_cpu == 0, "{freed:?}");

        mm.release_all();
        let released = consistent(&mm);
        assert_eq!((released.free, released.cached.stacks, released.cached.barns), (0, 0, 0), "{released:?}");
        assert!(released.retained > freed.retained + freed.free && released.resident < 2 * MIB, "{released:?}");
        assert_eq!(released.mapped, freed.mapped);

        mm.per_cpu(Wait::Long).unwrap().allocate(Owner::NONE, 64, 64, Wait::Long).unwrap();
        assert!(consistent(&mm).per_cpu > 0);
        // SAFETY: allocated above, and not freed yet.
        blocks.iter().take(100).for_each(|&block| unsafe { mm.free(block) });
        // SAFETY: all memory was freed, and no thread uses the manager any more.
        unsafe { mm.close() };
    }
}
