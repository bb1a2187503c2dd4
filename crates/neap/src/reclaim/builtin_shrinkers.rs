//! neap's own caches as shrinkers. A pass of reclaim asks them for objects together with the
//! program's caches, and computes their shares in the same way.
//!
//! # Design
//! These shrinkers are the first in the registry. They know no groups, because free memory is
//! charged to no group. `Groups::drain` uncharges objects that are cached and still charged to a
//! group.
//!
//! Cached objects and page lists cost little to refill, and have 0 seeks. At each priority, a pass
//! asks for half of the remaining objects, so these caches are nearly empty before the pass asks a
//! program's cache for many objects. To release memory and use it again costs a system call and a
//! page fault. So caches whose scan releases memory have more seeks than a program's cache
//! ([`RELEASE`]).
//!
//! A callback allocates nothing, stops when a fork waits, and releases nothing while that would
//! interrupt an isolated CPU. It reports no freed bytes, because the pass measures the usage
//! itself.
//!
//! # Locking
//! A callback enters the [fork gate](neap_base::gate), so it waits for a fork. It holds each lock
//! of a cache for one batch. No thread that runs passes holds any of these locks.

use crate::mm::{Core, Mm};
use core::cell::Cell;
use core::ffi::c_void;
use neap_base::gate::Inside;
use neap_base::{Platform, listed_enum};
use neap_objects::objects::Punched;
use neap_objects::size_class::{CLASSES, Class};
use neap_os::stack;
use neap_pages::{Drain, Effort};
use neap_reclaim::{Asked, CountFn, DEFAULT_SEEKS, Host, ScanFn, ShrinkerError, Shrinkers, Spec, share};

/// Seeks of memory that is released to the OS.
const RELEASE: u32 = 4 * DEFAULT_SEEKS;

listed_enum! {
    /// A cache of neap's own.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Cache {
        /// Objects in barns and in the stacks of CPUs near the node.
        Sheaves,
        /// Pages in the page lists of CPUs.
        Lists,
        /// Slabs that may have pages without objects.
        Holes,
        /// Free pages that are resident.
        Free,
        /// Populated pages of per-CPU data that hold no data.
        PerCpu,
    }
}

/// Result of a scan.
#[derive(Clone, Copy, Debug, Default)]
struct Scanned {
    objects: u64,
    freed: u64,
}

impl Cache {
    /// Returns name, seeks and batch, and whether an allocation that needs room may scan the cache.
    fn nature(self) -> (&'static str, u32, u64, bool) {
        match self {
            Cache::Sheaves => ("neap:sheaves", 0, 64, true),
            Cache::Lists => ("neap:lists", 0, 16, true),
            Cache::Holes => ("neap:holes", RELEASE, 32, true),
            Cache::Free => ("neap:free", RELEASE, 64, false),
            Cache::PerCpu => ("neap:per-cpu", RELEASE, 16, false),
        }
    }

    /// Returns the number of objects on a node.
    fn count<P: Platform>(self, _: &Inside<'_>, core: &Core<P>, node: usize) -> u64 {
        match self {
            Cache::Sheaves => {
                let in_barns: u64 = core.in_barns(node).iter().sum();
                let near = core.cpus_near(node).map(|cpu| core.in_stacks(cpu));
                in_barns + near.sum::<u64>()
            }
            Cache::Lists => core.objects.pages.node(node).listed().into(),
            Cache::Holes => core.objects.punchable_on(node),
            Cache::Free => core.objects.pages.node(node).backed_free_pages().into(),
            Cache::PerCpu => core.per_cpu.get().map_or(0, |data| data.spare_pages()),
        }
    }

    /// Frees about `wanted` objects.
    fn scan<P: Platform>(
        self,
        _: &Inside<'_>,
        core: &Core<P>,
        node: usize,
        wanted: u64,
        stop: &dyn Fn() -> bool,
    ) -> Scanned {
        let (platform, pages) = (&core.objects.platform, core.objects.pages.node(node));
        let held = || stop() || core.objects.is_isolated_cpu_in_use();
        match self {
            Cache::Sheaves => {
                let objects = core.put_back(node, wanted, stop);
                Scanned { objects, freed: objects }
            }
            Cache::Lists => {
                let mut drained = 0;
                for cpu in core.cpus() {
                    if drained < wanted
                        && !stop()
                        && let Drain::Drained(more) = pages.drain_cpu(platform, cpu)
                    {
                        drained += u64::from(more);
                    }
                }
                Scanned { objects: drained, freed: drained }
            }
            Cache::Holes if !held() => {
                let Punched { slabs, report } = core.objects.punch_on(node, Effort::Full, wanted as usize, &held);
                Scanned { objects: slabs as u64, freed: report.released.into() }
            }
            Cache::Free if !held() => {
                let most = u32::try_from(wanted).unwrap_or(u32::MAX);
                let freed = pages.release(platform, most, Effort::Sparing, &held).released.into();
                Scanned { objects: if freed > 0 { wanted.max(freed) } else { 0 }, freed }
            }
            Cache::PerCpu if !held() => {
                let freed = core.per_cpu.get().map_or(0, |data| data.give_back(platform, wanted, &held).released);
                Scanned { objects: if freed > 0 { wanted.max(freed) } else { 0 }, freed }
            }
            _ => Scanned::default(),
        }
    }
}

impl<P: Platform> Core<P> {
    /// Returns all CPUs that may cache memory. The current CPU is the last, because it may need its
    /// caches again at once.
    fn cpus(&self) -> impl Iterator<Item = usize> {
        let (cpus, here) = (self.objects.cpu_caches.cpus(), self.objects.platform.cpu());
        let used = self.used_cpus();
        (1..=cpus).map(move |step| (here + step) % cpus).filter(move |&cpu| used.contains(cpu))
    }

    /// The CPUs of [`Core::cpus`] whose nearest node is `node`.
    fn cpus_near(&self, node: usize) -> impl Iterator<Item = usize> {
        self.cpus().filter(move |&cpu| self.objects.pages.nearest_to(&self.objects.platform, cpu) == node)
    }

    /// Objects in the barns of a node, by class.
    fn in_barns(&self, node: usize) -> [u64; CLASSES] {
        let mut objects = [0; CLASSES];
        Class::all().for_each(|class| objects[class.index()] = self.objects.cache(node, class).lock().full.objects());
        objects
    }

    /// Approximate number of objects in the stacks of a CPU.
    fn in_stacks(&self, cpu: usize) -> u64 {
        let count = |class| u64::from(self.objects.cpu_caches.snapshot(&self.objects.platform, cpu, class).count);
        Class::all().map(count).sum()
    }

    /// Moves about `wanted` objects to their slabs, and returns the number of moved objects. Takes
    /// objects from barns first, from each class in proportion to its objects. Takes the rest from
    /// stacks, one CPU at a time.
    fn put_back(&self, node: usize, wanted: u64, stop: &dyn Fn() -> bool) -> u64 {
        let (in_barns, mut done) = (self.in_barns(node), 0);
        let all: u64 = in_barns.iter().sum();
        for class in Class::all().filter(|class| in_barns[class.index()] > 0) {
            let part = share(wanted.min(all), in_barns[class.index()], all);
            let (sheaf, taken) = (u64::from(class.sheaf_capacity()), Cell::new(0));
            // `trim_barn_on` calls this before each sheaf.
            let enough = || taken.replace(taken.get() + sheaf) >= part || stop();
            done += self.objects.trim_barn_on(node, class, Effort::Full, &enough).objects;
        }
        for cpu in self.cpus_near(node) {
            if done < wanted && !stop() && self.in_stacks(cpu) > 0 {
                done += self.objects.drain_cpu(cpu, |_| true).unwrap_or(0);
            }
        }
        done
    }
}

unsafe extern "C" fn count<P: Platform, const CACHE: usize>(data: *mut c_void, asked: *const Asked) -> u64 {
    // SAFETY: `data` is the manager that `register` was given. It neither moves nor ends before the
    // registry is closed. The caller keeps `asked` valid during the call, and no other code writes
    // to it.
    let (mm, node) = unsafe { (&*data.cast::<Mm<P>>(), (*asked).node as usize) };
    mm.core_if_open().map_or(0, |core| {
        let inside = mm.gate.enter(core.objects.platform.cpu());
        // Runs on a separate stack, because little may be left of the calling thread's stack.
        stack::apart(|| Cache::ALL[CACHE].count(&inside, core, node)).unwrap_or(0)
    })
}

unsafe extern "C" fn scan<P: Platform, const CACHE: usize>(data: *mut c_void, asked: *mut Asked) -> u64 {
    // SAFETY: `data` is the manager that `register` was given. It neither moves nor ends before the
    // registry is closed. The caller keeps `asked` valid during the call, and no other code writes
    // to it.
    let (mm, asked) = unsafe { (&*data.cast::<Mm<P>>(), &mut *asked) };
    let scan = mm.core_if_open().map_or(Scanned::default(), |core| {
        let inside = mm.gate.enter(core.objects.platform.cpu());
        let stop = || mm.gate.is_closed();
        let scan = || Cache::ALL[CACHE].scan(&inside, core, asked.node as usize, asked.to_scan, &stop);
        stack::apart(scan).unwrap_or_default()
    });
    asked.scanned = scan.objects;
    scan.freed
}

/// Registers neap's own caches in a registry that no other thread knows yet.
///
/// # Errors
/// Those of [`Shrinkers::register_own`]. The caller must then close the registry.
///
/// # Safety
/// The manager neither moves nor ends before the registry is closed.
pub(crate) unsafe fn register<P: Platform>(
    mm: &Mm<P>,
    host: &impl Host,
    shrinkers: &Shrinkers,
) -> Result<(), ShrinkerError> {
    let data = core::ptr::from_ref(mm).cast_mut().cast();
    let calls: [(CountFn, ScanFn); Cache::ALL.len()] = [
        (count::<P, 0>, scan::<P, 0>),
        (count::<P, 1>, scan::<P, 1>),
        (count::<P, 2>, scan::<P, 2>),
        (count::<P, 3>, scan::<P, 3>),
        (count::<P, 4>, scan::<P, 4>),
    ];
    for (cache, (count, scan)) in Cache::ALL.into_iter().zip(calls) {
        let (name, seeks, batch, inline) = cache.nature();
        let by_node = cache != Cache::PerCpu;
        let spec = Spec { name, count, scan, data, gone: None, seeks, batch, by_node, by_group: false, inline };
        // SAFETY: `data` is the manager, which outlives the registry (the caller's promise). The
        // functions only read it, so several threads may call them at once. An `extern "C"`
        // function does not unwind.
        unsafe { shrinkers.register_own(host, &spec) }?;
    }
    Ok(())
}
