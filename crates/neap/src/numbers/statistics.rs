//! Statistics of a manager, for mallinfo, tests and `neap stat`.
//!
//! The functions read the parts of a manager one after the other. If other threads allocate or free
//! meanwhile, the numbers belong to slightly different moments. A few functions store totals in the
//! page of numbers.

use crate::mm::{Core, Mm};
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_objects::cpu_caches::CacheMode;
use neap_objects::size_class::{CLASSES, Class};
use neap_os::topology::CpuSet;

/// Contents of a CPU's stacks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CachedOn {
    /// Bytes of objects.
    pub(crate) bytes: u64,
    /// Stacks in use.
    pub(crate) stacks: u32,
}

/// Bytes of a manager by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Usage {
    /// Address space from which neap has handed out memory so far.
    pub mapped_bytes: u64,
    /// Used by the program: objects by the size of their class, and runs of pages.
    pub used_bytes: u64,
    /// Free objects: on stacks, in barns, and in slabs that are partly used, without holes.
    pub cached_bytes: u64,
    /// Part of the cached bytes: objects on the stacks of CPUs.
    pub stack_bytes: u64,
    /// Part of the cached bytes: objects in barns.
    pub barn_bytes: u64,
    /// Free pages that are resident.
    pub free_bytes: u64,
    /// Pages of per-CPU data that hold data.
    pub per_cpu_bytes: u64,
    /// Populated pages of per-CPU data without data: the reserve, and pages about to be released.
    pub per_cpu_free_bytes: u64,
    /// Part of the used bytes: vectors of owners.
    pub owner_vectors: u64,
    /// Bytes of pages that are neither free, in a CPU's list, under way, in a slab nor in a run. 0
    /// unless pages were lost. While other threads allocate, parts are read at different moments,
    /// so the sum may differ from 0 a little.
    pub unaccounted_bytes: i64,
}

/// One class's objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ClassNumbers {
    /// Bytes of an object.
    pub size: u32,
    /// Slabs.
    pub slabs: u32,
    /// Pages of these slabs.
    pub pages: u64,
    /// Holes: pages of these slabs without objects, which were released.
    pub holes: u64,
    /// Objects that these slabs have room for.
    pub objects: u64,
    /// Free objects in slabs.
    pub in_slabs: u64,
    /// Free objects in barns.
    pub in_barn: u64,
    /// Free objects on the stacks of CPUs.
    pub in_slots: u64,
}

impl<P: Platform> Core<P> {
    /// Counts a run of `new` bytes that replaces a run of `old` bytes. 0 means no run.
    pub(crate) fn count_run(&self, new: usize, old: usize) {
        let new = new.next_multiple_of(self.objects.pages.page_size());
        // Relaxed: statistics. It wraps below zero if the free is counted first.
        let difference = new.wrapping_sub(old) as u64;
        let bytes = self.run_bytes.fetch_add(difference, Ordering::Relaxed).wrapping_add(difference);
        // This is a store, because a second locked addition would cost as much as the first. If
        // another thread counts at the same moment, the older sum may stay there until the next run
        // or tick.
        self.page.head().inspect(|head| head.run_bytes.store(bytes, Ordering::Relaxed));
    }

    /// Counts an allocation for which there is no memory: the limit, the `max` of a group or the
    /// system refuses it. Sizes that no allocation can have do not count.
    #[cold]
    pub(crate) fn count_refusal(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.note_events();
    }

    /// Counts objects that a shrinker of the program has freed.
    pub(crate) fn count_shrunk(&self, objects: u64) {
        self.shrunk.fetch_add(objects, Ordering::Relaxed);
        self.note_events();
    }

    /// Stores the counts of refused allocations and of freed objects for other processes. With
    /// `fetch_max`, a reader never sees a count fall, since several threads may store one at once.
    fn note_events(&self) {
        let Some(head) = self.page.head() else { return };
        // Relaxed: statistics.
        for (place, count) in [(&head.refused, &self.refused), (&head.shrunk, &self.shrunk)] {
            place.fetch_max(count.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Stores the live counters in a page that was just made, and lets the layers below store them
    /// from now on. Must be called before the first allocation.
    ///
    /// # Safety
    /// The process has one thread.
    pub(crate) unsafe fn attach_live(&self) {
        let Some((zones, classes)) = self.page.links() else { return };
        // SAFETY: the links stay mapped, and have cells for all nodes of this instance.
        unsafe { self.objects.attach_live(zones, classes) };
        // SAFETY: there is no other thread (the caller's promise).
        unsafe { self.objects.pages.store_live() };
        self.note_limit();
    }

    /// Stores all live counters, in a child that has just made its page.
    ///
    /// # Safety
    /// The process has one thread.
    pub(crate) unsafe fn store_live(&self) {
        self.note_limit();
        self.note_totals();
        self.note_events();
        // SAFETY: there is no other thread (the caller's promise).
        unsafe { self.objects.store_live() };
    }

    /// Stores the limit in force for other processes.
    pub(crate) fn note_limit(&self) {
        self.page.head().inspect(|head| head.limit.store(self.settings.limit(), Ordering::Relaxed));
    }

    /// Stores the bytes of runs and of objects on the stacks of CPUs for other processes.
    pub(crate) fn note_totals(&self) {
        let Some(head) = self.page.head() else { return };
        // Relaxed: statistics.
        head.run_bytes.store(self.run_bytes.load(Ordering::Relaxed), Ordering::Relaxed);
        let bytes = self.objects.cpu_caches.used().iter().map(|cpu| self.cached_on(cpu).bytes).sum();
        head.stacked_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Counts the objects on a CPU's stacks.
    pub(crate) fn cached_on(&self, cpu: usize) -> CachedOn {
        let mut cached = CachedOn::default();
        for class in Class::all() {
            let snapshot = self.objects.cpu_caches.snapshot(&self.objects.platform, cpu, class);
            cached.bytes += u64::from(snapshot.count) * class.size() as u64;
            cached.stacks += u32::from(snapshot.active);
        }
        cached
    }

    /// Returns the numbers of one class.
    pub(crate) fn class_numbers(&self, class: Class) -> ClassNumbers {
        let objects = &self.objects;
        let mut in_slots = 0;
        for cpu in objects.cpu_caches.used().iter() {
            in_slots += u64::from(objects.cpu_caches.snapshot(&objects.platform, cpu, class).count);
        }
        let (mut slabs, mut holes, mut in_slabs, mut in_barn) = (0, 0, 0, 0);
        for cache in objects.caches_of(class) {
            let cache = cache.lock();
            slabs += cache.slabs;
            holes += cache.holes;
            in_slabs += cache.free;
            in_barn += cache.full.objects();
        }
        let shape = class.slab_shape(objects.pages.page_size());
        ClassNumbers {
            size: class.size() as u32,
            slabs,
            pages: u64::from(slabs) << shape.order,
            holes,
            objects: u64::from(slabs) * u64::from(shape.objects),
            in_slabs,
            in_barn,
            in_slots,
        }
    }

    /// Classes that may have slabs: none if no page is handed out. So before the first allocation
    /// the numbers are written without reading any class.
    pub(crate) fn classes_with_slabs(&self) -> impl Iterator<Item = Class> {
        let any = (0..self.objects.pages.nodes()).any(|node| self.objects.pages.node(node).used() > 0);
        Class::all().filter(move |_| any)
    }

    /// CPUs that have stacks or page lists. No other CPU caches anything.
    pub(crate) fn used_cpus(&self) -> CpuSet {
        let mut used = self.objects.cpu_caches.used();
        used.insert_all(&self.objects.pages.listed_cpus());
        used
    }

    /// Returns the bytes by state.
    pub(crate) fn usage(&self) -> Usage {
        self.usage_with(&self.objects.pages.statistics())
    }

    /// Returns the bytes by state. Takes the numbers of pages from `pages`.
    pub(crate) fn usage_with(&self, pages: &neap_pages::Statistics) -> Usage {
        let page = self.objects.pages.page_size() as u64;
        let (mut cached, mut in_slabs, mut slab_pages) = (0, 0, 0);
        let (mut stack_bytes, mut barn_bytes) = (0, 0);
        for class in self.classes_with_slabs() {
            let numbers = self.class_numbers(class);
            let free = numbers.in_slabs + numbers.in_barn + numbers.in_slots;
            let holes = numbers.holes * page;
            stack_bytes += numbers.in_slots * u64::from(numbers.size);
            barn_bytes += numbers.in_barn * u64::from(numbers.size);
            cached += (free.min(numbers.objects) * u64::from(numbers.size)).saturating_sub(holes);
            in_slabs += (numbers.objects * u64::from(numbers.size)).saturating_sub(holes);
            slab_pages += numbers.pages - numbers.holes.min(numbers.pages);
        }
        let handed_out = u64::from(pages.used.saturating_sub(pages.listed)) * page;
        let draining = pages.travelling.saturating_sub(pages.releasing);
        // Relaxed: statistics.
        let owned = (slab_pages + u64::from(draining)) * page + self.run_bytes.load(Ordering::Relaxed);
        let per_cpu = self.per_cpu.bytes();
        Usage {
            mapped_bytes: pages.mapped_bytes as u64,
            used_bytes: handed_out.max(in_slabs) - cached.min(handed_out.max(in_slabs)),
            cached_bytes: cached,
            stack_bytes,
            barn_bytes,
            free_bytes: u64::from(pages.backed_free + pages.listed) * page,
            per_cpu_bytes: per_cpu.used,
            per_cpu_free_bytes: per_cpu.free,
            owner_vectors: self.objects.vector_bytes(),
            unaccounted_bytes: handed_out.wrapping_sub(owned) as i64,
        }
    }
}

impl<P: Platform> Mm<P> {
    /// Returns the bytes by state; zeroes before the first allocation.
    pub fn usage(&self) -> Usage {
        let Some(core) = self.core_if_open() else { return Usage::default() };
        let _inside = self.gate.enter(core.objects.platform.cpu());
        core.usage()
    }

    /// Returns the numbers of every class. Class 0 does not exist.
    pub fn classes(&self) -> [ClassNumbers; CLASSES] {
        let mut numbers = [ClassNumbers::default(); CLASSES];
        if let Some(core) = self.core_if_open() {
            let _inside = self.gate.enter(core.objects.platform.cpu());
            Class::all().for_each(|class| numbers[class.index()] = core.class_numbers(class));
        }
        numbers
    }

    /// Returns the node of memory of this manager; `None` for other memory.
    pub fn node_of(&self, memory: *const u8) -> Option<usize> {
        let objects = &self.core_if_open()?.objects;
        objects.class_at(memory).map(|_| objects.node_of(memory))
    }

    /// Returns the statistics of a node's pages; `None` if there is no such node.
    pub fn node(&self, node: usize) -> Option<neap_pages::Statistics> {
        let core = self.core_if_open().filter(|core| node < core.objects.pages.nodes())?;
        let _inside = self.gate.enter(core.objects.platform.cpu());
        Some(core.objects.pages.node(node).statistics())
    }

    /// Returns the kind of CPU 0's slot. If CPU 0 is not isolated, all CPUs that are not isolated
    /// have this kind. `None` before the first allocation.
    pub fn kind(&self) -> Option<CacheMode> {
        self.core_if_open().map(|core| core.objects.cpu_caches.kind(&core.objects.platform, 0))
    }

    /// Number of fences so far. A fence interrupts its CPUs if they run the process.
    pub fn fences(&self) -> u32 {
        self.core_if_open().map_or(0, |core| core.objects.cpu_caches.counters().fences)
    }

    /// Bytes of a page.
    pub fn page_size(&self) -> usize {
        self.core().map_or(4096, |core| core.objects.pages.page_size())
    }
}

#[cfg(test)]
mod tests {
    use crate::mm::{Hooks, Mm};
    use crate::options::Options;
    use neap_base::{Linux, Platform};
    use neap_objects::size_class::Class;
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::vec::Vec;

    /// Checks the counter of vectors over the life of objects with owners, for each way of freeing
    /// them.
    fn vectors_are_counted<P: Platform + Send>(platform: P) {
        const SIZE: usize = 1000;
        let mut mm: Box<Mm<P>> = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(platform, &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
        let (core, class) = (mm.core().unwrap(), Class::of_size(SIZE));
        let objects: Vec<*mut u8> = (0..1000).map(|_| mm.allocate(SIZE)).collect();
        assert_eq!(mm.usage().owner_vectors, 0);
        // SAFETY: the objects are this test's.
        let own = |object, owner| assert!(unsafe { core.objects.own_slowly(class, object, owner) });
        objects.iter().for_each(|&object| own(object, 5));
        assert_eq!(mm.usage().owner_vectors, 0, "one owner of all");
        objects.iter().for_each(|&object| own(object, 6));
        assert!((8000..9000).contains(&mm.usage().owner_vectors), "{:?}", mm.usage());
        assert_eq!(mm.verify(0).unwrap().accounted, 1000);
        for &object in &objects {
            assert_eq!(mm.usable_size(object), class.size());
            // SAFETY: the object is this test's. The first call leaves it in place. The second
            // one moves it, and only the moved object is used and freed after that.
            unsafe {
                assert_eq!(mm.reallocate(object, class.size()), object, "the payer stays");
                let moved = mm.reallocate(object, 5000);
                assert_eq!(mm.fast_path.payer(moved), None, "no payer was named");
                mm.free(moved);
            }
        }
        let census = mm.verify(0).unwrap();
        assert_eq!((census.allocated, census.accounted), (0, 0));
        mm.release_all();
        assert_eq!(mm.usage().owner_vectors, 0);
        // SAFETY: all memory was freed, and no thread uses the manager any more.
        unsafe { mm.close() };
    }

    #[test]
    fn vectors_of_owners_are_counted() {
        vectors_are_counted(Virtual::new(4096, 1));
        vectors_are_counted(Linux::probe());
    }
}
