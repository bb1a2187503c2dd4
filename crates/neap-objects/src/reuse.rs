//! Reuse before growth: free objects of any cache serve an allocation before fresh memory does.
//!
//! # Design
//!
//! Caches keep free objects by class and CPU. Other classes cannot use the memory of a class's free
//! objects until slabs are wholly free. neap counts the pages that it takes from the system
//! ("growth"). A *sweep* begins when growth since the last sweep has passed a quantum, and at least
//! a sixteenth of the resident memory is not in use. The more a sweep will return, the smaller is
//! the quantum (`Objects::quantum`). A sweep empties:
//!
//! 1. barns, the fullest first;
//! 2. the stacks of every CPU, since a few objects there keep many slabs from being wholly free;
//! 3. the page lists of every CPU.
//!
//! The threads that need memory take the steps. Before a new slab or run, a thread works until the
//! pages can serve it from wholly resident memory. It also works until the sweep has returned
//! `RETURNED_BYTES_PER_GROWN_BYTE` bytes to slabs for each byte grown since the sweep began. In one
//! call it returns no more than about `OBJECTS_PER_CALL_MAX` objects. A program that allocates
//! again what it freed grows nothing, so it never sweeps. If free pages are still too scattered at
//! the end of a sweep, the thread releases some of them, so that growth replaces them.
//!
//! A step that takes stacks needs a fence, which is a system call if the process has several
//! threads. The step then [asks](crate::helper) a thread that may fence, for all CPUs at once, and
//! waits at most `HELPER_WAIT_NS`. Without such a thread a sweep leaves other CPUs' stacks alone.
//!
//! # Locking
//!
//! A thread holds no lock between two steps. A step takes the locks that draining takes. Several
//! threads may sweep at once. They pop sheaves of one barn under its lock, and only one of them
//! takes the step that drains a CPU.

use crate::objects::Objects;
use crate::size_class::Class;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_pages::Effort;

/// The most objects that one call returns to slabs; its last step may exceed that.
const OBJECTS_PER_CALL_MAX: u64 = 1 << 16;

/// Objects that a call returns to slabs in addition, for each page that it asks for.
const OBJECTS_PER_PAGE: u64 = 32;

/// Bytes returned to slabs for each byte that is taken from the system during a sweep.
const RETURNED_BYTES_PER_GROWN_BYTE: u64 = 16;

/// Pages that a sweep leaves in the list of its CPU.
const LISTED_PAGES_MAX: u32 = 64;

/// The most sheaves taken from a barn before the fullest one is determined again.
const QUOTA_SHEAVES_MAX: u64 = 64;

/// The least growth from one check for a sweep to the next, and the least release of scattered
/// pages, in bytes.
const STEP_BYTES_MIN: u64 = 2 << 20;

/// Pages of growth before the first check for a sweep.
const FIRST_CHECK_PAGES: u64 = 512;

/// Unused bytes below which no sweep begins. New slabs of many classes have as much.
const UNUSED_BYTES_MIN: u64 = 4 << 20;

/// Bytes of the longest request that is no longer than the largest slab.
const SHORT_BYTES_MAX: u64 = 256 << 10;

/// The most bytes that a call releases.
const RELEASED_BYTES_MAX: u64 = 16 << 20;

/// Bytes of the longest request that may grow the process without a check, if the process has not
/// grown since the last check.
const UNCHECKED_BYTES_MAX: u64 = 16 << 20;

/// Nanoseconds that a sweep waits for the thread that drains CPUs for it.
const HELPER_WAIT_NS: u64 = 1_000_000;

/// No sweep is under way.
const IDLE: u32 = 0;
/// Barns are emptied. The stages that follow drain the CPUs' stacks, from CPU 0 on.
const BARNS: u32 = 1;

/// The state of reuse. All fields are heuristics: no other data depends on them.
#[derive(Debug)]
pub(crate) struct Reuse {
    /// The growth from which on a call sweeps, or checks for a sweep; 0 during a sweep.
    next: AtomicU64,
    stage: AtomicU32,
    /// The barn that is emptied: the class in the low byte, the node above.
    victim: AtomicU32,
    /// Sheaves to take from that barn before the fullest is looked for again.
    quota: AtomicU32,
    /// The growth when the sweep began.
    began: AtomicU64,
    /// The growth when the last sweep ended.
    ended: AtomicU64,
    /// Bytes returned to slabs by the sweep so far.
    done: AtomicU64,
    /// The first fields of [`ReuseNumbers`].
    counters: [AtomicU64; 5],
    /// The growth up to the last release of scattered pages.
    replaced: AtomicU64,
    /// The growth up to the last check.
    checked: AtomicU64,
    /// Pages of the request for which the last check began no sweep. Until the process grows,
    /// requests as long or shorter need no check. 0 if the request was longer than
    /// [`UNCHECKED_BYTES_MAX`].
    refused: AtomicU64,
    /// The fields of [`GrowthBeside`].
    beside: [AtomicU64; 3],
}

/// Statistics of reuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReuseNumbers {
    /// Number of sweeps that began.
    pub sweeps: u64,
    /// Objects that sweeps returned to slabs.
    pub objects: u64,
    /// Pages taken from the system during sweeps.
    pub grown: u64,
    /// Free pages released since they lay too scattered to serve.
    pub released: u64,
    /// Number of checks for a sweep. Each locks all class caches.
    pub checks: u64,
    /// Growth although much memory was unused.
    pub beside: GrowthBeside,
}

/// Pages taken from the system while more than a tenth of the resident memory, and more than 4 MiB,
/// was unused. Growth between two checks for a sweep counts as growth beside the largest kind of
/// unused memory that the second one found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrowthBeside {
    /// Most unused memory lay in free pages, too scattered to serve.
    pub free_pages: u64,
    /// Most unused memory lay in barns.
    pub barns: u64,
    /// Most unused memory lay in slabs beside objects in use.
    pub slabs: u64,
}

/// Bytes of free objects in slabs and barns, without the stacks of CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeObjects {
    /// Bytes of objects in barns.
    pub in_barns: u64,
    /// Resident bytes of objects in barns and slabs.
    pub resident: u64,
    /// Upper bound of the bytes in use that keep free objects' slabs from being freed. It is the
    /// sum over all class caches of the smaller number: bytes not free, or free bytes.
    pub pinning: u64,
}

impl Reuse {
    pub(crate) const fn new() -> Reuse {
        Reuse {
            next: AtomicU64::new(FIRST_CHECK_PAGES),
            stage: AtomicU32::new(IDLE),
            victim: AtomicU32::new(0),
            quota: AtomicU32::new(0),
            began: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            done: AtomicU64::new(0),
            counters: [const { AtomicU64::new(0) }; 5],
            replaced: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            beside: [const { AtomicU64::new(0) }; 3],
        }
    }
}

/// Bytes that are resident and not in use, but for those on the stacks of CPUs.
struct Unused {
    /// All resident bytes, in use or not.
    resident: u64,
    free_pages: u64,
    in_barns: u64,
    in_slabs: u64,
}

impl Unused {
    fn all(&self) -> u64 {
        self.free_pages + self.in_barns + self.in_slabs
    }
}

/// A barn and the bytes of the objects that its sheaves hold or have room for.
struct FullestBarn {
    bytes: u64,
    node: usize,
    class: Class,
}

impl<P: Platform> Objects<P> {
    /// Turns free objects into free pages until `take` gets `pages` pages in a row without growth.
    /// Does nothing before growth has passed the quantum. The caller holds no lock.
    #[inline]
    pub fn reuse_before_growth<T>(&self, _: &Inside<'_>, pages: u32, mut take: impl FnMut() -> Option<T>) -> Option<T> {
        let is_due = self.pages.grown() + u64::from(pages) >= self.reuse.next.load(Relaxed);
        if is_due { self.reuse(pages, &mut take) } else { None }
    }

    #[cold]
    fn reuse<T>(&self, pages: u32, take: &mut dyn FnMut() -> Option<T>) -> Option<T> {
        if self.reuse.stage.load(Relaxed) == IDLE {
            // A request longer than a step is due even if nothing has grown since the last check.
            let has_grown = self.pages.grown() != self.reuse.checked.load(Relaxed);
            if !has_grown && u64::from(pages) <= self.reuse.refused.load(Relaxed) || !self.begin_sweep(pages) {
                return None;
            }
        }
        let (mut objects, most) = (0, OBJECTS_PER_CALL_MAX + OBJECTS_PER_PAGE * u64::from(pages));
        let mut taken = None;
        while objects < most {
            if !self.owes() {
                taken = take();
                if taken.is_some() {
                    break;
                }
            }
            let Some(more) = self.sweep() else {
                taken = take();
                if taken.is_none() {
                    self.release_scattered(pages);
                }
                break;
            };
            objects += more;
        }
        self.reuse.counters[1].fetch_add(objects, Relaxed);
        taken.or_else(take)
    }

    /// Begins a sweep for `pages` pages if growth has passed the quantum; otherwise puts the next
    /// check off.
    fn begin_sweep(&self, pages: u32) -> bool {
        let (reuse, grown) = (&self.reuse, self.pages.grown());
        let since = grown.saturating_sub(reuse.ended.load(Relaxed)) << self.pages.page_shift();
        reuse.counters[4].fetch_add(1, Relaxed);
        let unused = self.unused();
        // A program that keeps free chunks wants its memory to stay where it is.
        if self.pages.keeps_chunks() || self.quantum(&unused).is_none_or(|quantum| since < quantum) {
            self.put_off(&unused);
            let is_short = u64::from(pages) <= UNCHECKED_BYTES_MAX >> self.pages.page_shift();
            reuse.refused.store(if is_short { pages.into() } else { 0 }, Relaxed);
            return false;
        }
        reuse.began.store(grown, Relaxed);
        reuse.done.store(0, Relaxed);
        reuse.quota.store(0, Relaxed);
        if reuse.stage.compare_exchange(IDLE, BARNS, Relaxed, Relaxed).is_ok() {
            reuse.next.store(0, Relaxed);
            reuse.counters[0].fetch_add(1, Relaxed);
        }
        true
    }

    /// Growth since the last sweep, in bytes, from which on another sweep is worth its work. It is
    /// smaller the more the sweep will return. `None` if too little memory is unused.
    fn quantum(&self, unused: &Unused) -> Option<u64> {
        let &Unused { resident, in_barns, .. } = unused;
        if unused.all() < (resident / 16).max(UNUSED_BYTES_MIN) {
            return None;
        }
        // Each sweep releases some of the scattered free pages.
        Some(if self.is_scattered() || in_barns >= resident / 8 {
            0
        } else if in_barns >= resident / 32 {
            resident / 32
        } else {
            resident / 8
        })
    }

    fn end_sweep(&self) {
        let (reuse, grown) = (&self.reuse, self.pages.grown());
        reuse.counters[2].fetch_add(grown.saturating_sub(reuse.began.load(Relaxed)), Relaxed);
        reuse.ended.store(grown, Relaxed);
        self.put_off(&self.unused());
    }

    /// Puts the next check off, and records beside what memory the process has grown since the last
    /// one. A check locks all class caches, so checks are rarer the more memory is resident.
    fn put_off(&self, unused: &Unused) {
        let (reuse, grown) = (&self.reuse, self.pages.grown());
        let more = grown.saturating_sub(reuse.checked.fetch_max(grown, Relaxed));
        if unused.all() > (unused.resident / 10).max(UNUSED_BYTES_MIN) {
            let kinds = [unused.free_pages, unused.in_barns, unused.in_slabs];
            let largest = kinds.iter().zip(&reuse.beside).max_by_key(|(bytes, _)| **bytes);
            largest.inspect(|(_, pages)| _ = pages.fetch_add(more, Relaxed));
        }
        let step = (unused.resident / 512).max(STEP_BYTES_MIN) >> self.pages.page_shift();
        reuse.next.store(grown + step, Relaxed);
    }

    fn unused(&self) -> Unused {
        let FreeObjects { in_barns, resident, .. } = self.free_objects();
        Unused {
            resident: self.resident_bytes(),
            free_pages: self.free_page_bytes(),
            in_barns,
            in_slabs: resident.saturating_sub(in_barns),
        }
    }

    /// Whether the sweep has returned fewer bytes than growth since its beginning asks for.
    fn owes(&self) -> bool {
        let grown = self.pages.grown().saturating_sub(self.reuse.began.load(Relaxed));
        self.reuse.done.load(Relaxed) < (grown << self.pages.page_shift()) * RETURNED_BYTES_PER_GROWN_BYTE
    }

    /// Whether more than a sixteenth of the resident memory lies in free pages. A sweep should not
    /// leave that much.
    fn is_scattered(&self) -> bool {
        self.pages.backed_free_pages() > self.pages.resident() / 16
    }

    /// Releases free pages that the sweep has not joined to `pages` pages in a row. The growth that
    /// follows replaces them. Does nothing if this would interrupt an isolated CPU.
    ///
    /// For a long run, releases at most half as many as the process has grown since the last such
    /// release. A program that allocates runs of random lengths soon needs some of these pages
    /// again. It would grow for ever if releases made up for all growth.
    fn release_scattered(&self, pages: u32) {
        let (free, resident) = (self.pages.backed_free_pages(), self.pages.resident());
        // A run longer than all free pages may use these itself.
        if free < u64::from(pages) || !self.is_scattered() {
            return;
        }
        let mut most = RELEASED_BYTES_MAX >> self.pages.page_shift();
        if u64::from(pages) > SHORT_BYTES_MAX >> self.pages.page_shift() {
            let grown = self.pages.grown();
            most = most.min(grown.saturating_sub(self.reuse.replaced.load(Relaxed)) / 2);
            if most < STEP_BYTES_MIN >> self.pages.page_shift() {
                return;
            }
            self.reuse.replaced.store(grown, Relaxed);
        }
        if !self.is_isolated_cpu_in_use() {
            let near = self.pages.node(self.pages.nearest(&self.platform));
            let release = |kept: u64, most: u64, effort| {
                let wanted = free.saturating_sub(kept).min(most) as u32;
                u64::from(near.release(&self.platform, wanted, effort, &|| false).released)
            };
            let whole = release(resident / 32, most, Effort::Whole);
            // Parts of whole huge pages go last, and few of a heap that is hardly larger than a
            // small one.
            let kept = (resident / 32).max(UNUSED_BYTES_MIN >> self.pages.page_shift());
            let parts = most.saturating_sub(whole).min(self.pages.beyond_small());
            let released = whole + release(kept + whole, parts, Effort::Sparing);
            self.reuse.counters[3].fetch_add(released, Relaxed);
        }
    }

    /// Takes a step of the sweep. Returns the number of objects returned to slabs; `None` if the
    /// sweep is over.
    fn sweep(&self) -> Option<u64> {
        let reuse = &self.reuse;
        let stage = reuse.stage.load(Relaxed);
        let advance = |to| reuse.stage.compare_exchange(stage, to, Relaxed, Relaxed).is_ok();
        match stage {
            IDLE => None,
            BARNS => Some(self.empty_barn().unwrap_or_else(|| {
                advance(BARNS + 1);
                0
            })),
            _ => {
                let next = (stage - BARNS - 1) as usize;
                if let Some(cpu) = self.cpu_caches.used().iter().find(|&cpu| cpu >= next) {
                    let is_mine = advance(BARNS + 2 + cpu as u32);
                    return Some(if is_mine { self.take_stacks(cpu) } else { 0 });
                }
                self.pages.drain_all(&self.platform);
                // The program may have freed more since the barns were emptied.
                let more = self.fullest_barn().is_some_and(|barn| barn.bytes > self.resident_bytes() / 32);
                if advance(if more { BARNS } else { IDLE }) && !more {
                    self.end_sweep();
                }
                more.then_some(0)
            }
        }
    }

    /// Drains a CPU's stacks. If this thread may not fence, the step for the first CPU that needs a
    /// fence asks the helper to drain all CPUs. The steps for other such CPUs do nothing. Returns
    /// the number of objects that this thread itself returned to slabs.
    fn take_stacks(&self, cpu: usize) -> u64 {
        if !self.cpu_caches.takes_fence(&self.platform, cpu) || self.platform.may_fence() {
            return self.drain_cpu(cpu, |_| true).unwrap_or(0);
        }
        let mut fenced = self.cpu_caches.used().iter().filter(|&cpu| self.cpu_caches.takes_fence(&self.platform, cpu));
        if fenced.next() == Some(cpu) {
            self.helper.ask(HELPER_WAIT_NS);
        }
        0
    }

    /// Returns the objects of a sheaf of the fullest barn to slabs. Returns their number; `None` if
    /// all barns are empty.
    fn empty_barn(&self) -> Option<u64> {
        let reuse = &self.reuse;
        let quota = reuse.quota.load(Relaxed);
        if quota == 0 {
            let FullestBarn { bytes, node, class } = self.fullest_barn()?;
            reuse.victim.store(u32::from(class.0) | (node as u32) << 8, Relaxed);
            let sheaf = class.size() * class.sheaf_capacity() as usize;
            reuse.quota.store((bytes / 2 / sheaf as u64).clamp(1, QUOTA_SHEAVES_MAX) as u32, Relaxed);
            return Some(0);
        }
        reuse.quota.store(quota - 1, Relaxed);
        let victim = reuse.victim.load(Relaxed);
        let (node, class) = ((victim >> 8) as usize, Class(victim as u8));
        let Some(sheaf) = self.cache(node, class).lock().pop_sheaf() else {
            reuse.quota.store(0, Relaxed);
            return Some(0);
        };
        let objects = sheaf.length() as u64;
        self.dissolve(class, sheaf);
        // Pages of freed slabs lie in this CPU's page list now, which serves no larger blocks.
        self.pages.trim_list(&self.platform, LISTED_PAGES_MAX);
        reuse.done.fetch_add(objects * class.size() as u64, Relaxed);
        // An empty sheaf takes some time as well.
        Some(objects.max(1))
    }

    /// The fullest barn; `None` if all barns are empty.
    fn fullest_barn(&self) -> Option<FullestBarn> {
        let barns = (0..self.pages.nodes()).flat_map(|node| Class::all().map(move |class| (node, class)));
        let fullest = barns.map(|(node, class)| {
            let sheaves = self.shared(node, class).lock().all_sheaves();
            let bytes = u64::from(sheaves) * u64::from(class.sheaf_capacity()) * class.size() as u64;
            FullestBarn { bytes, node, class }
        });
        fullest.max_by_key(|barn| barn.bytes).filter(|barn| barn.bytes > 0)
    }

    fn resident_bytes(&self) -> u64 {
        self.pages.resident() << self.pages.page_shift()
    }

    /// Resident bytes that are free as pages, in CPUs' lists or not.
    pub fn free_page_bytes(&self) -> u64 {
        (self.pages.listed() + self.pages.backed_free_pages()) << self.pages.page_shift()
    }

    /// Adds up the free objects of all classes.
    pub fn free_objects(&self) -> FreeObjects {
        let page_size = self.pages.page_size();
        let caches = Class::all().flat_map(|class| self.caches_of(class).map(move |cache| (class, cache)));
        caches.fold(FreeObjects::default(), |sums, (class, cache)| {
            let (cache, size) = (cache.lock(), class.size() as u64);
            let in_barn = u64::from(cache.full.length()) * u64::from(class.sheaf_capacity()) * size;
            let free = in_barn + cache.free * size;
            let all = u64::from(cache.slabs) * u64::from(class.slab_shape(page_size).objects) * size;
            FreeObjects {
                in_barns: sums.in_barns + in_barn,
                resident: sums.resident + free.saturating_sub(cache.holes * page_size as u64),
                pinning: sums.pinning + all.saturating_sub(free).min(free),
            }
        })
    }

    /// Bytes of slabs that no object can have.
    pub fn slab_waste(&self) -> u64 {
        let page_size = self.pages.page_size();
        let caches = Class::all().flat_map(|class| self.caches_of(class).map(move |cache| (class, cache)));
        let waste = |class: Class| class.slab_shape(page_size).waste as u64;
        caches.map(|(class, cache)| u64::from(cache.lock().slabs) * waste(class)).sum()
    }

    /// The statistics of reuse so far.
    pub fn reuse_numbers(&self) -> ReuseNumbers {
        let counters = self.reuse.counters.each_ref().map(|counter| counter.load(Relaxed));
        let [sweeps, objects, grown, released, checks] = counters;
        let [free_pages, barns, slabs] = self.reuse.beside.each_ref().map(|pages| pages.load(Relaxed));
        ReuseNumbers { sweeps, objects, grown, released, checks, beside: GrowthBeside { free_pages, barns, slabs } }
    }
}
