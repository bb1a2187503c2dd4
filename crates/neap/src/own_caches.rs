//! neap's own caches as shrinkers: what is free is given up in the same walk as what programs
//! cache, by the same arithmetic.
//!
//! Sits between the registry of shrinkers, in which these are the first, and objects, pages and
//! per-CPU data. They know nodes and no groups: what is free is charged to nobody, but for what
//! caches keep for those who paid, which is put back before a group is asked (`Groups::drain`).
//! What costs nothing to have again says so by 0 seeks, and gives half of what is left at each
//! priority, so it is nearly gone before a program's cache is asked for much; what takes a system
//! call and a page fault is dearer than an object of a program's.
//!
//! A callback enters the gate, so it waits for a fork, and holds the locks of what it empties for a
//! batch at a time; nobody who runs passes holds any of these. It allocates nothing, stops where a
//! fork waits, and releases nothing while an isolated CPU would be interrupted. What came back is
//! seen by what the process uses: nothing is said of bytes.

use crate::mm::{Core, Mm};
use core::cell::Cell;
use core::ffi::c_void;
use neap_base::Platform;
use neap_objects::size_class::{CLASSES, Class};
use neap_os::stack;
use neap_pages::Drain;
use neap_reclaim::{Asked, CountFn, DEFAULT_SEEKS, Host, NotDone, ScanFn, Shrinkers, Spec, share};

/// Seeks of what goes back to the system.
const RELEASE: u32 = 4 * DEFAULT_SEEKS;

/// A cache of neap's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cache {
    /// Objects in barns and in the stacks of CPUs near the node.
    Sheaves,
    /// Pages in lists.
    Lists,
    /// Slabs that may have pages without objects.
    Holes,
    /// Free pages that are resident.
    Free,
    /// Pages of per-CPU data without anything in them.
    PerCpu,
}

impl Cache {
    const ALL: [Cache; 5] = [Cache::Sheaves, Cache::Lists, Cache::Holes, Cache::Free, Cache::PerCpu];

    /// What is registered for it: name, seeks, batch, and whether it makes room for an allocation,
    /// within which it may be asked then.
    fn nature(self) -> (&'static str, u32, u64, bool) {
        match self {
            Cache::Sheaves => ("neap:sheaves", 0, 64, true),
            Cache::Lists => ("neap:lists", 0, 16, true),
            Cache::Holes => ("neap:holes", RELEASE, 32, true),
            Cache::Free => ("neap:free", RELEASE, 64, false),
            Cache::PerCpu => ("neap:per-cpu", RELEASE, 16, false),
        }
    }

    /// How much there is on a node. Inside the gate.
    fn count<P: Platform>(self, core: &Core<P>, node: usize) -> u64 {
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

    /// Gives up about so many; answers how many were looked at, and gone. Inside the gate.
    fn scan<P: Platform>(self, core: &Core<P>, node: usize, wanted: u64, stop: &dyn Fn() -> bool) -> (u64, u64) {
        let (platform, pages) = (&core.objects.platform, core.objects.pages.node(node));
        let held = || stop() || core.objects.is_isolated_cpu_in_use();
        match self {
            Cache::Sheaves => {
                let objects = core.put_back(node, wanted, stop);
                (objects, objects)
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
                (drained, drained)
            }
            Cache::Holes if !held() => {
                let (slabs, report) = core.objects.punch_on(node, true, wanted as usize, &held);
                (slabs as u64, report.released.into())
            }
            Cache::Free if !held() => {
                let released = pages.release(platform, wanted.min(u32::MAX.into()) as u32, &held).released.into();
                (if released > 0 { wanted.max(released) } else { 0 }, released)
            }
            Cache::PerCpu if !held() => {
                let released = core.per_cpu.get().map_or(0, |data| data.give_back(platform, wanted, &held).released);
                (if released > 0 { wanted.max(released) } else { 0 }, released)
            }
            _ => (0, 0),
        }
    }
}

impl<P: Platform> Core<P> {
    /// All CPUs that may cache something, this one last: it may need what it has again at once.
    fn cpus(&self) -> impl Iterator<Item = usize> {
        let (cpus, here) = (self.objects.slots.cpus(), self.objects.platform.cpu());
        let used = self.used_cpus();
        (1..=cpus).map(move |step| (here + step) % cpus).filter(move |&cpu| used.contains(cpu))
    }

    /// Of these, those whose nearest node that is.
    fn cpus_near(&self, node: usize) -> impl Iterator<Item = usize> {
        self.cpus().filter(move |&cpu| self.objects.pages.nearest_to(&self.objects.platform, cpu) == node)
    }

    /// Objects in the barns of a node, by class.
    fn in_barns(&self, node: usize) -> [u64; CLASSES] {
        let mut objects = [0; CLASSES];
        Class::all().for_each(|class| objects[class.index()] = self.objects.cache(node, class).lock().full.objects());
        objects
    }

    /// Objects in the stacks of a CPU, about.
    fn in_stacks(&self, cpu: usize) -> u64 {
        let count = |class| u64::from(self.objects.slots.peek(&self.objects.platform, cpu, class).count);
        Class::all().map(count).sum()
    }

    /// Puts about so many objects back into their slabs: from barns, of each class its part, and
    /// where these do not have as many from stacks, CPU by CPU. Answers how many.
    fn put_back(&self, node: usize, wanted: u64, stop: &dyn Fn() -> bool) -> u64 {
        let (in_barns, mut done) = (self.in_barns(node), 0);
        let all: u64 = in_barns.iter().sum();
        for class in Class::all().filter(|class| in_barns[class.index()] > 0) {
            let part = share(wanted.min(all), in_barns[class.index()], all);
            let (sheaf, taken) = (u64::from(class.sheaf_capacity()), Cell::new(0));
            // Before each sheaf.
            let enough = || taken.replace(taken.get() + sheaf) >= part || stop();
            done += self.objects.trim_barn_on(node, class, true, &enough).0;
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
    // SAFETY: registered with a manager that stays; what is asked is the caller's, for the time of
    // the call.
    let (mm, node) = unsafe { (&*data.cast::<Mm<P>>(), (*asked).node as usize) };
    mm.core_if_open().map_or(0, |core| {
        let _inside = mm.gate.enter(core.objects.platform.cpu());
        // Neap's own code alone, below calls that may have come far already.
        stack::apart(|| Cache::ALL[CACHE].count(core, node)).unwrap_or(0)
    })
}

unsafe extern "C" fn scan<P: Platform, const CACHE: usize>(data: *mut c_void, asked: *mut Asked) -> u64 {
    // SAFETY: as above.
    let (mm, asked) = unsafe { (&*data.cast::<Mm<P>>(), &mut *asked) };
    let (looked, gone) = mm.core_if_open().map_or((0, 0), |core| {
        let _inside = mm.gate.enter(core.objects.platform.cpu());
        let scan = || Cache::ALL[CACHE].scan(core, asked.node as usize, asked.to_scan, &|| mm.gate.is_closed());
        stack::apart(scan).unwrap_or((0, 0))
    });
    asked.scanned = looked;
    gone
}

/// Registers all of them in a registry that nobody else has seen.
///
/// # Errors
/// As for [`Shrinkers::register_own`]: the registry is of no use then.
///
/// # Safety
/// The manager neither moves nor goes before the registry is closed.
pub(crate) unsafe fn register<P: Platform>(mm: &Mm<P>, host: &impl Host, shrinkers: &Shrinkers) -> Result<(), NotDone> {
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
        // SAFETY: the functions only read the manager, which is there as long as they may be
        // called.
        unsafe { shrinkers.register_own(host, &spec) }?;
    }
    Ok(())
}
