//! Charges at a limit: the workloads `direct-N` of `neap bench shrink`.
//!
//! The charges use the process's own manager. 4000 groups lie below a group that is full to its
//! `max`. Each has a cache with one batch of 128 objects of 64 bytes, and pays for them. N threads
//! charge 128 KiB at that limit, in a loop. The measured thread CPU time covers four steps: the
//! check of the limit, the drain of stocks, the pass, and the second try. The pass computes
//! protection and shares, walks, counts, and frees objects of sixteen caches or more.
//!
//! Callbacks run in the charging thread ([`inline`](neap::groups::ChargeRequest::inline)), since a
//! thread that waits for reclaimers uses no CPU time. Caches are refilled in between, which is not
//! measured. Each cache has a lock. A callback only tries it.

use core::cell::Cell;
use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;

use anyhow::{Result, anyhow, ensure};
use neap::groups::{Bound, Charge, Group};
use neap::process::PROCESS;
use neap::reclaim::{self, Asked, EMPTY, STOP, ShrinkerId, Spec};

use super::stage::{BATCH, OBJECT};
use super::{GOAL, GROUPS};
use crate::work::Outcome;
use crate::work::meter::{pin_to, thread_cpu_ns};

const BYTES: u64 = (BATCH * OBJECT) as u64;
/// Bytes charged to all groups together.
const FULL: u64 = GROUPS as u64 * BYTES;

/// Objects, each from malloc, and their charge.
type Objects = (Vec<Box<[u8; OBJECT]>>, Option<Charge>);

/// A cache of one group.
struct DirectCache {
    objects: Mutex<Objects>,
    length: AtomicU64,
    group: Group,
    /// Caches that were emptied and are to be refilled.
    emptied: &'static Mutex<Vec<usize>>,
    index: usize,
}

impl DirectCache {
    /// Fills the cache, if its group can be charged. Returns whether it is filled and marked.
    fn fill(&self, id: ShrinkerId) -> bool {
        let Ok(charge) = self.group.request(BYTES).inline().now() else { return false };
        let objects: Vec<Box<[u8; OBJECT]>> = (0..BATCH).map(|_| Box::new([1; OBJECT])).collect();
        // A callback meanwhile only tries the lock. The former objects are freed outside the lock.
        let before = self.objects.lock().map(|mut place| core::mem::replace(&mut *place, (objects, Some(charge))));
        self.length.store(BATCH as u64, Ordering::Relaxed);
        drop(before);
        reclaim::mark(id, self.group, 0)
    }

    fn spec(&self) -> Spec<'static> {
        unsafe extern "C" fn count(data: *mut c_void, _: *const Asked) -> u64 {
            // SAFETY: the shrinker's data is a cache that stays until the process ends.
            match unsafe { &*data.cast::<DirectCache>() }.length.load(Ordering::Relaxed) {
                0 => EMPTY,
                length => length,
            }
        }
        unsafe extern "C" fn scan(data: *mut c_void, asked: *mut Asked) -> u64 {
            // SAFETY: the shrinker's data is a cache that stays until the process ends. `asked` is
            // valid for the time of the call, and this callback alone has it.
            let (cache, asked) = unsafe { (&*data.cast::<DirectCache>(), &mut *asked) };
            let Ok(mut place) = cache.objects.try_lock() else { return STOP };
            let (objects, charge) = core::mem::take(&mut *place);
            cache.length.store(0, Ordering::Relaxed);
            drop(place);
            let freed = objects.len();
            drop((objects, charge));
            GAVE.set(GAVE.get() + 1);
            asked.freed_bytes = (freed * OBJECT) as u64;
            if freed > 0
                && let Ok(mut emptied) = cache.emptied.lock()
            {
                emptied.push(cache.index);
            }
            freed as u64
        }
        Spec {
            name: "cache",
            count,
            scan,
            data: core::ptr::from_ref(self).cast_mut().cast(),
            gone: None,
            seeks: neap_reclaim::DEFAULT_SEEKS,
            batch: BATCH as u64,
            by_node: false,
            by_group: true,
            inline: true,
        }
    }
}

/// The groups and their caches. They exist until the process ends.
pub(super) struct Direct {
    all: Group,
    asker: Group,
    caches: &'static [DirectCache],
    ids: Vec<ShrinkerId>,
}

thread_local! {
    /// Number of caches that freed objects in a charge of this thread.
    static GAVE: Cell<u64> = const { Cell::new(0) };
}

/// Costs of charges that needed a pass. Each entry has the thread CPU nanoseconds of a charge, and
/// the number of caches that freed objects for it.
type Took = Vec<(u64, u64)>;

impl Direct {
    pub(super) fn open() -> Result<Direct> {
        let all = Group::create("bench")?;
        let asker = Group::create("bench/asker")?;
        let emptied: &'static Mutex<Vec<usize>> = Box::leak(Box::default());
        let cache = |index: usize| -> Result<DirectCache> {
            let group = Group::create(&format!("bench/{index}"))?;
            Ok(DirectCache { objects: Mutex::default(), length: AtomicU64::new(0), group, emptied, index })
        };
        let caches: Vec<DirectCache> = (0..GROUPS).map(cache).collect::<Result<_>>()?;
        let caches: &'static [DirectCache] = caches.leak();
        // SAFETY: the callbacks may run with their caches in any thread, several at a time: the
        // caches stay until the process ends, and have locks. The callbacks do not unwind.
        let register = |cache: &DirectCache| Ok(unsafe { reclaim::register(&cache.spec(), Some(cache.group)) }?);
        let ids = caches.iter().map(register).collect::<Result<Vec<_>>>()?;
        all.set(Bound::Max, FULL)?;
        Ok(Direct { all, asker, caches, ids })
    }

    /// Refills up to `most` emptied caches.
    fn refill(&self, most: usize) {
        let Some(first) = self.caches.first() else { return };
        let taken: Vec<usize> = first.emptied.lock().map_or(Vec::new(), |mut emptied| {
            let left = emptied.len().saturating_sub(most);
            emptied.split_off(left)
        });
        for index in taken {
            if !self.caches[index].fill(self.ids[index])
                && let Ok(mut emptied) = first.emptied.lock()
            {
                emptied.push(index);
            }
        }
    }

    /// Refills all caches, or nearly all.
    fn fill(&self) -> Result<()> {
        let empty = |cache: &&DirectCache| cache.length.load(Ordering::Relaxed) == 0;
        for cache in self.caches.iter().filter(empty) {
            cache.fill(self.ids[cache.index]);
        }
        self.caches[0].emptied.lock().map_err(|_| anyhow!("a thread panicked"))?.clear();
        let charged = self.all.used()?;
        ensure!(charged > FULL - FULL / 8, "{charged} of {FULL} are cached");
        Ok(())
    }

    /// Starts a thread on each CPU of `on`. Each thread charges `times` times.
    pub(super) fn run(&self, on: &[usize], times: u64) -> Result<Outcome> {
        self.fill()?;
        let (barrier, refused) = (Barrier::new(on.len()), AtomicU64::new(0));
        let before = PROCESS.reclaiming()?.reclaim.passes.counts()[0];
        let run = |cpu: usize| -> Result<Took> {
            pin_to(cpu)?;
            let mut took = Took::new();
            barrier.wait();
            for _ in 0..times {
                GAVE.set(0);
                let start = thread_cpu_ns();
                let charge = self.asker.request(GOAL).inline().now();
                let spent = thread_cpu_ns() - start;
                // Passes of other threads may have made the room.
                took.extend((GAVE.get() > 0).then(|| (spent, GAVE.get())));
                refused.fetch_add(u64::from(charge.is_err()), Ordering::Relaxed);
                drop(charge);
                self.refill((GOAL / BYTES) as usize * 2);
            }
            Ok(took)
        };
        let run = &run;
        let mut took: Took = Vec::new();
        thread::scope(|scope| {
            let threads: Vec<_> = on.iter().map(|&cpu| scope.spawn(move || run(cpu))).collect();
            threads.into_iter().try_for_each(|thread| {
                took.extend(thread.join().map_err(|_| anyhow!("a thread panicked"))??);
                Ok::<(), anyhow::Error>(())
            })
        })?;
        took.sort_unstable();
        let after = PROCESS.reclaiming()?.reclaim.passes.counts()[0];
        let [passes, visits, _, _, bytes] = core::array::from_fn(|at| (after[at] - before[at]) as f64);
        let at = |percent: usize| took.get(took.len() * percent / 100).map_or(0.0, |&(spent, _)| spent as f64 / 1e3);
        let counts = [
            ("p50_us", at(50)),
            ("p99_us", at(99)),
            ("passes", passes),
            ("visits", visits),
            ("most_caches", took.iter().map(|&(_, gave)| gave).max().unwrap_or(0) as f64),
            ("freed_bytes", bytes),
            ("refused", refused.load(Ordering::Relaxed) as f64),
        ];
        let sum = took.iter().map(|&(spent, _)| spent).sum();
        Ok(Outcome {
            operations: took.len() as u64,
            cpu_ns: sum,
            wall_ns: sum,
            counts: counts.map(|(name, count)| (name.to_string(), count)).into(),
            ..Outcome::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_at_the_limit_go_through_passes_and_are_granted() {
        let direct = Direct::open().unwrap();
        for threads in [1, 4] {
            let outcome = direct.run(&vec![0; threads], 20).unwrap();
            assert!(outcome.operations > 0 && outcome.count("refused") == 0.0, "{outcome:?}");
            assert!(outcome.count("passes") > 0.0 && outcome.count("freed_bytes") >= GOAL as f64, "{outcome:?}");
            assert!(direct.all.used().unwrap() <= FULL);
        }
    }
}
