//! Waits of unregistering, in virtual time: the workload `virtual` of `neap bench register`.
//!
//! Each owner registers a shrinker, leaves it registered for a while, and unregisters it, in a
//! loop. Visitors go through all groups meanwhile. A callback of an owner's shrinker takes up to
//! [`OWN`], and a callback of another shrinker up to [`FOREIGN`]. Besides, only the visitors' and
//! owners' own sleeps take time. So any time between the end of a shrinker's own last callback and
//! the return of `unregister` was a wait for other shrinkers' callbacks.

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use anyhow::{Result, anyhow, ensure};
use neap_reclaim::{Asked, EMPTY};

use super::super::shrink::{old::counted, stage::group};
use super::clock::Clock;
use super::{Id, Registry};
use crate::work::Outcome;

/// Threads with a shrinker, and threads that visit.
pub(super) const OWNERS: usize = 24;
const VISITORS: usize = 8;
/// Foreign shrinkers, in the group after the owners'.
const OTHERS: usize = 4;
/// Virtual nanoseconds: the longest callback of an owner's shrinker, the callback of a foreign one,
/// the visit of a group, and the longest time that a shrinker stays registered.
const OWN: u64 = 2_000_000;
const FOREIGN: u64 = 50_000_000;
const VISIT: u64 = 10_000;
const STAY: u64 = 500_000;

/// Data of a callback.
struct Takes<'c> {
    clock: &'c Clock,
    slot: usize,
    nanoseconds: u64,
    /// Time at which the last call returned.
    returned: AtomicU64,
}

impl<'c> Takes<'c> {
    fn new(clock: &'c Clock, slot: usize, nanoseconds: u64) -> Takes<'c> {
        Takes { clock, slot, nanoseconds, returned: AtomicU64::new(0) }
    }

    fn register(&self, registry: Registry<'_>) -> Result<Id> {
        unsafe extern "C" fn count(data: *mut c_void, asked: *const Asked) -> u64 {
            // SAFETY: `register` passed a `Takes` as the data. It lives until the shrinker is
            // unregistered. `asked` is valid for the time of the call.
            let (takes, asked) = unsafe { (&*data.cast::<Takes<'_>>(), &*asked) };
            // The group's bit may be left from an earlier shrinker with the same index.
            if asked.group() != group(takes.slot) {
                return EMPTY;
            }
            takes.clock.sleep(takes.nanoseconds);
            takes.returned.fetch_max(takes.clock.now(), Ordering::Relaxed);
            0
        }
        registry.register(counted(count, core::ptr::from_ref(self).cast_mut().cast()), self.slot)
    }
}

/// Results of an owner's cycles.
#[derive(Default)]
struct Waits {
    beyond: AtomicU64,
    for_own: AtomicU64,
}

fn own(registry: Registry<'_>, clock: &Clock, slot: usize, cycles: u64, waits: &Waits) -> Result<()> {
    for cycle in 0..cycles {
        // A scattered number below `most`.
        let spread = |most: u64| (cycle * OWNERS as u64 + slot as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) % most;
        let takes = Takes::new(clock, slot, spread(OWN));
        let id = clock.waiting(|| takes.register(registry))?;
        clock.sleep(spread(STAY));
        let begun = clock.now();
        clock.waiting(|| registry.unregister(id))?;
        let returned = takes.returned.load(Ordering::Relaxed);
        waits.for_own.fetch_add(u64::from(returned > begun), Ordering::Relaxed);
        waits.beyond.fetch_max(clock.now() - begun.max(returned), Ordering::Relaxed);
    }
    Ok(())
}

/// Makes `cycles` cycles of each owner. Counts `beyond_ns`, the longest wait for others, and
/// `own_waits`.
pub(super) fn measure(registry: Registry<'_>, cycles: u64) -> Result<Outcome> {
    let (clock, waits, done) = (Clock::default(), Waits::default(), AtomicBool::new(false));
    let others: Vec<Takes<'_>> = (0..OTHERS).map(|_| Takes::new(&clock, OWNERS, FOREIGN)).collect();
    let ids: Vec<Id> = others.iter().map(|takes| takes.register(registry)).collect::<Result<_>>()?;
    clock.await_threads(OWNERS + VISITORS);
    let left = AtomicU64::new(OWNERS as u64);
    let visits = || {
        while !done.load(Ordering::Relaxed) {
            for slot in 0..=OWNERS {
                registry.visit(slot);
                clock.sleep(VISIT);
            }
        }
    };
    let owns = |slot| {
        let answer = own(registry, &clock, slot, cycles, &waits);
        done.fetch_or(left.fetch_sub(1, Ordering::Relaxed) == 1, Ordering::Relaxed);
        answer
    };
    let (clock, owns) = (&clock, &owns);
    let result = thread::scope(|scope| {
        for _ in 0..VISITORS {
            scope.spawn(|| clock.take_part(visits));
        }
        let owners: Vec<_> = (0..OWNERS).map(|slot| scope.spawn(move || clock.take_part(|| owns(slot)))).collect();
        if let Err(error) = clock.run() {
            // The threads cannot be joined.
            eprintln!("neap bench register: the simulation of waits stopped: {error:#}");
            std::process::exit(1);
        }
        owners.into_iter().try_for_each(|owner| owner.join().map_err(|_| anyhow!("an owner panicked"))?)
    });
    ids.into_iter().try_for_each(|id| registry.unregister(id))?;
    result?;
    let (beyond, for_own) = (waits.beyond.into_inner(), waits.for_own.into_inner());
    ensure!(
        for_own > 0,
        "no call of `unregister` began during a callback of its own shrinker, so this run measured no such wait: run it without `--quick`"
    );
    let counts = [("beyond_ns".to_string(), beyond as f64), ("own_waits".to_string(), for_own as f64)].into();
    Ok(Outcome { operations: cycles * OWNERS as u64, counts, ..Outcome::default() })
}
