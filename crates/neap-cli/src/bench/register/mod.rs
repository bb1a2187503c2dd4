//! `neap bench register`: shrinkers that nine threads register and unregister as fast as they can,
//! with and without concurrent reclaim.
//!
//! Each thread registers a shrinker, visits it once and unregisters it, in a loop, like file
//! systems that are mounted and unmounted. Workloads:
//!
//! * `quiet`: nothing else runs;
//! * `reclaim`: two threads visit all shrinkers meanwhile, eight of which sleep a millisecond in
//!   each call, like those that write to a disk;
//! * `held`: the two threads stay inside a callback. The workload counts the cycles of other
//!   threads that wait for them;
//! * `virtual`: more threads, in virtual time, which passes only while threads sleep (see
//!   `waits.rs`).
//!
//! Variants: `neap`; `srcu`, where walks are readers as in SRCU, and unregistering waits for all of
//! them. In virtual time there is also `rwlock`, a registry under a read-write lock.
//!
//! Figures:
//!
//! * `reclaim_ratio`, `srcu_ratio`: cycles a second of neap, and of the SRCU-like one, with reclaim
//!   over without;
//! * `foreign_waits`, `foreign_waits.srcu`: unregistrations that still waited after a second, while
//!   only the held threads were in a callback;
//! * `register_us`: a cycle of neap without reclaim, by wall time, of nine threads at once;
//! * `beyond_own_us`, `beyond_own_us.rwlock`: the longest virtual time from the return of a
//!   shrinker's own last callback to the end of its unregistration;
//! * `own_waits`: unregistrations of neap that waited for a callback of their own shrinker.

mod clock;
mod waits;

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::process::ExitCode;
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use neap_base::gate::Inside;
use neap_reclaim::{Asked, ScanPressure, Shrinkers, Spec};

use super::shrink::old::{Guarding, Old, counted};
use super::shrink::stage::{self, Here, count_nothing, group};
use super::{Options, Session, Workload};
use crate::report::{cell, number, table};
use crate::statistics::{Summary, paired_ratios, summary};
use crate::work::Outcome;

const THREADS: usize = 9;
const RECLAIMERS: usize = 2;
const SLEEPERS: usize = 8;
const SLEEP: Duration = Duration::from_millis(1);
/// Slot of the group of the sleeping shrinkers. The shrinkers of the threads have the slots below
/// this number.
const SLEEPING: usize = THREADS;
const GROUPS: usize = THREADS + 1;
/// Longest time of cycles while other threads are held, and the number of cycles of each thread.
const PATIENCE: Duration = Duration::from_secs(1);
const HELD_CYCLES: u64 = 100;

const NEAP: &str = "neap";
const SRCU: &str = "srcu";
const RWLOCK: &str = "rwlock";
const QUIET: &str = "quiet";
const RECLAIM: &str = "reclaim";
const HELD: &str = "held";
const VIRTUAL: &str = "virtual";

/// A registry of either kind.
#[derive(Clone, Copy)]
enum Registry<'a> {
    Neap(Here<'a>, &'a Shrinkers),
    Old(Here<'a>, &'a Old),
}

/// The name of a shrinker in a registry.
#[derive(Clone, Copy)]
enum Id {
    Neap(neap_reclaim::ShrinkerId),
    Old(usize),
}

impl Registry<'_> {
    fn register(self, spec: Spec<'static>, slot: usize) -> Result<Id> {
        match self {
            Registry::Neap(host, shrinkers) => {
                // SAFETY: the callbacks use only data that outlives the registry. They may run in
                // several threads at a time, and do not unwind.
                let id = unsafe { shrinkers.register(&host, &spec) }?;
                Inside::assume(|inside| shrinkers.mark(inside, &host, id, slot as u32, 0));
                Ok(Id::Neap(id))
            }
            Registry::Old(_, old) => old.register(spec, slot).map(Id::Old).ok_or_else(|| anyhow!("it is full")),
        }
    }

    fn unregister(self, id: Id) -> Result<()> {
        match (self, id) {
            (Registry::Neap(host, shrinkers), Id::Neap(id)) => _ = shrinkers.unregister(&host, id)?,
            (Registry::Old(host, old), Id::Old(index)) => old.unregister(host.0.platform, index),
            _ => {}
        }
        Ok(())
    }

    fn visit(self, slot: usize) {
        match self {
            Registry::Neap(host, shrinkers) => {
                _ = shrinkers.visit(&host, &(), group(slot), slot as u32, 0, ScanPressure::of(12));
            }
            Registry::Old(_, old) => _ = old.visit(slot),
        }
    }

    /// Registers, visits and unregisters.
    fn cycle(self, slot: usize) -> Result<()> {
        let id = self.register(counted(count_nothing, core::ptr::null_mut()), slot)?;
        self.visit(slot);
        self.unregister(id)
    }
}

unsafe extern "C" fn sleep(_: *mut c_void, _: *const Asked) -> u64 {
    thread::sleep(SLEEP);
    0
}

/// A place where callbacks are held.
#[derive(Default)]
struct CallbackGate {
    /// Number of callbacks inside, and whether they may go on.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl CallbackGate {
    unsafe extern "C" fn count(data: *mut c_void, _: *const Asked) -> u64 {
        // SAFETY: the shrinker's data is a gate, which outlives the shrinker.
        let gate = unsafe { &*data.cast::<CallbackGate>() };
        gate.change(|(inside, _)| *inside += 1);
        gate.wait_until(|(_, open)| *open);
        0
    }

    fn change(&self, f: impl Fn(&mut (usize, bool))) {
        self.state.lock().into_iter().for_each(|mut state| f(&mut state));
        self.changed.notify_all();
    }

    fn wait_until(&self, is_so: impl Fn(&(usize, bool)) -> bool) {
        if let Ok(state) = self.state.lock() {
            drop(self.changed.wait_while(state, |state| !is_so(state)));
        }
    }
}

/// Runs cycles on all threads for a time, beside threads that reclaim.
fn cycles(registry: Registry<'_>, reclaimers: usize, time: Duration) -> Result<Outcome> {
    let (done, count, passes) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let sleepers: Vec<Id> = (0..SLEEPERS)
        .map(|_| registry.register(counted(sleep, core::ptr::null_mut()), SLEEPING))
        .collect::<Result<_>>()?;
    let run = |slot: usize| {
        while !done.load(Ordering::Relaxed) {
            registry.cycle(slot)?;
            count.fetch_add(1, Ordering::Relaxed);
        }
        anyhow::Ok(())
    };
    let (run, start) = (&run, Instant::now());
    let result = thread::scope(|scope| {
        for _ in 0..reclaimers {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    (0..GROUPS).for_each(|slot| registry.visit(slot));
                    passes.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let threads: Vec<_> = (0..THREADS).map(|slot| scope.spawn(move || run(slot))).collect();
        thread::sleep(time);
        done.store(true, Ordering::Relaxed);
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
    });
    let wall_ns = start.elapsed().as_nanos() as u64;
    sleepers.into_iter().try_for_each(|id| registry.unregister(id))?;
    result?;
    let counts = [("passes".to_string(), passes.into_inner() as f64)].into();
    Ok(Outcome { operations: count.into_inner(), wall_ns, counts, ..Outcome::default() })
}

/// Runs cycles while other threads are inside a callback that does not end. Counts the
/// unregistrations that wait for the callback.
fn held(registry: Registry<'_>) -> Result<Outcome> {
    let gate = CallbackGate::default();
    let id = registry.register(counted(CallbackGate::count, core::ptr::from_ref(&gate).cast_mut().cast()), SLEEPING)?;
    let (begun, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    let finished = CallbackGate::default();
    let mut waiting = 0;
    let run = |slot: usize| {
        for _ in 0..HELD_CYCLES {
            let id = registry.register(counted(count_nothing, core::ptr::null_mut()), slot)?;
            registry.visit(slot);
            begun.fetch_add(1, Ordering::Relaxed);
            registry.unregister(id)?;
            ended.fetch_add(1, Ordering::Relaxed);
        }
        finished.change(|(threads, _)| *threads += 1);
        anyhow::Ok(())
    };
    let run = &run;
    let result = thread::scope(|scope| {
        for _ in 0..RECLAIMERS {
            scope.spawn(|| registry.visit(SLEEPING));
        }
        gate.wait_until(|(inside, _)| *inside == RECLAIMERS);
        let threads: Vec<_> = (0..THREADS).map(|slot| scope.spawn(move || run(slot))).collect();
        if let Ok(state) = finished.state.lock() {
            drop(finished.changed.wait_timeout_while(state, PATIENCE, |(threads, _)| *threads < THREADS));
        }
        let over = ended.load(Ordering::Relaxed);
        waiting = begun.load(Ordering::Relaxed) - over;
        gate.change(|(_, open)| *open = true);
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
    });
    registry.unregister(id)?;
    result?;
    let counts = [("waiting".to_string(), waiting as f64)].into();
    Ok(Outcome { operations: HELD_CYCLES * THREADS as u64, counts, ..Outcome::default() })
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("register", &[NEAP, SRCU, RWLOCK])?;
    let rounds = options.rounds(10);
    let time = Duration::from_millis(options.amount(1000));
    let timed = |name| Workload {
        unit: "us for a cycle",
        metric: |outcome| outcome.ns_each() / 1e3,
        ..Workload::timed(name, rounds, &[])
    };
    let held_once =
        Workload { unit: "that wait", metric: |outcome| outcome.count("waiting"), ..Workload::timed(HELD, 1, &[]) };
    let in_virtual_time = Workload {
        unit: "us beyond its own",
        metric: |outcome| outcome.count("beyond_ns") / 1e3,
        ..Workload::timed(VIRTUAL, 1, &[])
    };
    let workloads = [timed(QUIET), timed(RECLAIM), held_once, in_virtual_time];
    let cycles_each = options.amount(400);
    stage::with(|host, shrinkers| {
        let old = |guarding| Old::new(guarding, host.0.platform, waits::OWNERS.max(THREADS) + 1);
        let (srcu, rwlock) = (old(Guarding::Srcu), old(Guarding::ReadWriteLock));
        session.measure(&workloads, |variant, workload, _| {
            let registry = match variant.name {
                SRCU => Registry::Old(host, &srcu),
                RWLOCK => Registry::Old(host, &rwlock),
                _ => Registry::Neap(host, shrinkers),
            };
            Some(match (workload.name.as_str(), variant.name) {
                // The naps of the SRCU-like registry are not virtual.
                (VIRTUAL, SRCU) => return None,
                (VIRTUAL, _) => waits::measure(registry, cycles_each),
                (_, RWLOCK) => return None,
                (HELD, _) => held(registry),
                (RECLAIM, _) => cycles(registry, RECLAIMERS, time),
                _ => cycles(registry, 0, time),
            })
        });
        [srcu, rwlock].into_iter().for_each(|old| old.close(host.0.platform));
        Ok(())
    })?;
    let ratios = [NEAP, SRCU].map(|variant| ratio(&session, variant));
    for (name, ratio) in [("reclaim_ratio", ratios[0]), ("srcu_ratio", ratios[1])] {
        session.figure(name, ratio.map(|ratio| ratio.median));
    }
    let medians = [
        ("foreign_waits", NEAP, HELD),
        ("foreign_waits.srcu", SRCU, HELD),
        ("register_us", NEAP, QUIET),
        ("beyond_own_us", NEAP, VIRTUAL),
        ("beyond_own_us.rwlock", RWLOCK, VIRTUAL),
    ];
    for (name, variant, workload) in medians {
        session.figure(name, session.summary(variant, workload).map(|summary| summary.median));
    }
    let own_waits = session.outcomes(NEAP, VIRTUAL).first().map(|outcome| outcome.count("own_waits"));
    session.figure("own_waits", own_waits);
    let row = |(name, variant, ratio): (&str, &'static str, Option<Summary>)| {
        let of = |workload| cell(session.summary(variant, workload), 1);
        let ratio = ratio.map_or("-".into(), |ratio| number(ratio.median, 3));
        vec![name.to_string(), of(QUIET), of(RECLAIM), ratio, of(HELD), of(VIRTUAL)]
    };
    let rows = [(NEAP, NEAP, ratios[0]), ("SRCU-like", SRCU, ratios[1]), ("read-write lock", RWLOCK, None)].map(row);
    let header = [
        "registry",
        "us for a cycle",
        "with reclaim",
        "times the throughput",
        "that wait for held callbacks",
        "virtual us beyond its own",
    ];
    let tables = table(&header, &rows);
    session.finish(options.json, &tables)
}

/// Cycles a second with reclaim over those without, round by round.
fn ratio(session: &Session, variant: &str) -> Option<Summary> {
    let measured = |name| session.outcomes(variant, name).iter().map(|outcome| (outcome.round, outcome.ns_each()));
    summary(paired_ratios(&measured(QUIET).collect::<Vec<_>>(), &measured(RECLAIM).collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unregister_waits_for_foreign_callback_only_with_srcu() {
        stage::with(|host, shrinkers| {
            let old = Old::new(Guarding::Srcu, host.0.platform, GROUPS);
            let neap = held(Registry::Neap(host, shrinkers))?;
            let srcu = held(Registry::Old(host, &old))?;
            assert_eq!(neap.count("waiting"), 0.0);
            assert!(srcu.count("waiting") > 0.0);
            let cycles = cycles(Registry::Neap(host, shrinkers), RECLAIMERS, Duration::from_millis(20))?;
            assert!(cycles.operations > 0);
            old.close(host.0.platform);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn unregister_in_virtual_time_waits_only_for_own_callback() {
        stage::with(|host, shrinkers| {
            let old = Old::new(Guarding::ReadWriteLock, host.0.platform, waits::OWNERS + 1);
            let neap = waits::measure(Registry::Neap(host, shrinkers), 20)?;
            let rwlock = waits::measure(Registry::Old(host, &old), 20)?;
            assert_eq!(neap.count("beyond_ns"), 0.0);
            assert!(rwlock.count("beyond_ns") >= 50e6, "as long as another's callback takes");
            old.close(host.0.platform);
            Ok(())
        })
        .unwrap();
    }
}
