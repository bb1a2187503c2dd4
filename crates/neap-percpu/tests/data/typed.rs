//! Values, counters, histograms and references: on the real machine, with restartable sequences,
//! and on a virtual machine, with atomic additions.

use crate::machine::{end, open, shape, verify};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use neap_base::{Linux, Platform};
use neap_os::topology::CpuSet;
use neap_percpu::{Layout, Owner, PerCpu, PerCpuCounter, PerCpuHistogram, PerCpuRef, Shape, Standalone, Wait};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::{Call, Virtual};

fn here() -> (Linux, Shape) {
    let linux = Linux::probe();
    let cpus = linux.cpus();
    (linux, shape(Layout::Rows, cpus, 0))
}

/// Runs `work` in threads on all CPUs, each with its number.
fn threads(count: u64, work: impl Fn(u64) + Sync) {
    let work = &work;
    std::thread::scope(|scope| {
        for thread in 0..count {
            scope.spawn(move || work(thread));
        }
    });
}

/// Runs `work` on one CPU after the other: real ones, as far as this process may use them, and
/// virtual ones.
fn on_each_cpu(cpus: usize, work: impl Fn() + Sync) {
    let on = |cpu: usize| {
        Virtual::run_on(cpu);
        // SAFETY: the set is a local, and a zeroed set is valid.
        unsafe {
            let mut set: libc::cpu_set_t = core::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
        }
        work();
    };
    (0..cpus).for_each(|cpu| threads(1, |_| on(cpu)));
}

/// Counts its drop.
struct Dropped<'a>(u64, &'a AtomicUsize);

impl Drop for Dropped<'_> {
    fn drop(&mut self) {
        self.1.fetch_add(1, Relaxed);
    }
}

fn values<P: Platform>(platform: &P, shape: &Shape) {
    let (data, dropped) = (open(platform, shape), AtomicUsize::new(0));
    let (host, owner) = (Standalone { data: &data, platform }, data.open_owner(platform).unwrap());
    let value = PerCpu::new(host, owner, Wait::Long, |cpu| Dropped(cpu as u64 * 1000, &dropped)).unwrap();
    let mine = value.on(1 % shape.cpus);
    assert!(mine.0 == 1000 % (shape.cpus as u64 * 1000));
    drop(mine);
    threads(4, |_| (0..20_000).for_each(|_| value.here().0 += 1));
    let start: u64 = (0..shape.cpus as u64).map(|cpu| cpu * 1000).sum();
    assert_eq!(value.fold(0, |sum, value| sum + value.0), start + 80_000);
    // If this CPU's copy is locked, `here` locks another one, and `try_here` returns `None`.
    let held: Vec<_> = (1..shape.cpus).map(|cpu| value.on(cpu)).collect();
    value.here().0 += 1;
    drop(held);
    let all: Vec<_> = (0..shape.cpus).map(|cpu| value.on(cpu)).collect();
    assert!(value.try_here().is_none());
    drop(all);
    assert!(value.try_here().is_some());
    drop(value);
    assert_eq!(dropped.into_inner(), shape.cpus);
    end(&data, platform, Vec::new());
}

#[test]
fn values_that_cannot_all_be_made_are_dropped_and_freed() {
    let (machine, dropped) = (Virtual::new(4096, 3), AtomicUsize::new(0));
    let data = open(&machine, &shape(Layout::Rows, 3, 4096));
    let host = Standalone { data: &data, platform: &machine };
    let make = |cpu: usize| if cpu == 2 { panic!("meant") } else { Dropped(cpu as u64, &dropped) };
    let made = || PerCpu::new(host, Owner::NONE, Wait::Long, make).map(drop);
    assert!(std::panic::catch_unwind(core::panic::AssertUnwindSafe(made)).is_err());
    assert_eq!((dropped.load(Relaxed), data.statistics().allocations), (2, 0));
    end(&data, &machine, Vec::new());
}

#[test]
fn values_are_one_for_each_cpu() {
    let (linux, shape) = here();
    values(&linux, &shape);
    values(&Virtual::new(4096, 3), &crate::machine::shape(Layout::Rows, 3, 4096));
}

fn counters<P: Platform>(platform: &P, shape: &Shape) {
    let data = open(platform, shape);
    let host = Standalone { data: &data, platform };
    for batch in [1, 50, i64::MAX] {
        let (counter, seed) = (PerCpuCounter::new(host, Owner::NONE, batch, Wait::Long).unwrap(), seed());
        let sum = core::sync::atomic::AtomicI64::new(0);
        threads(6, |thread| {
            Virtual::run_on(thread as usize);
            let mut random = Random(seed + thread);
            let mut own = 0;
            for step in 0..40_000 {
                let value = random.below(200) as i64 - 90;
                counter.add(value);
                own += value;
                if step % 5000 == 0 {
                    // The result contains all earlier additions, and possibly concurrent ones.
                    counter.exact();
                }
            }
            sum.fetch_add(own, Relaxed);
        });
        assert_eq!(counter.exact(), sum.load(Relaxed), "batch {batch}");
        // A part that a CPU could not move, because another thread moved or read, is moved by its
        // next addition.
        on_each_cpu(platform.cpus(), || counter.add(0));
        let off = (counter.approximate() - counter.exact()).unsigned_abs();
        assert!(off <= (batch as u64 + 110).saturating_mul(2 * shape.cpus as u64), "batch {batch}: off by {off}");
        if batch == i64::MAX {
            // The batch is clamped, but never reached: no part was moved.
            counter.add(5);
            assert_eq!(counter.exact(), sum.load(Relaxed) + 5);
        }
    }
    end(&data, platform, Vec::new());
}

#[test]
fn exact_counters_are_exact() {
    let (linux, shape) = here();
    counters(&linux, &shape);
    counters(&Virtual::new(4096, 3), &crate::machine::shape(Layout::Rows, 3, 4096));
    counters(&linux, &crate::machine::shape(Layout::CpuMajor, linux.cpus(), 0));
    // Fewer copies than CPUs: a thread on another CPU adds to the shared part.
    counters(&linux, &crate::machine::shape(Layout::Rows, 1, 0));
}

/// One thread reads while the others only move parts: the value stays within its bounds.
#[test]
fn moving_a_part_is_not_seen_by_an_exact_reader() {
    let (linux, shape) = here();
    let data = open(&linux, &shape);
    let counter = PerCpuCounter::new(Standalone { data: &data, platform: &linux }, Owner::NONE, 1, Wait::Long).unwrap();
    counter.add(1_000_000);
    let left = AtomicUsize::new(2);
    threads(3, |thread| {
        if thread < 2 {
            // Up by a hundred and back: parts move all the time, and the value stays within two
            // hundred.
            (0..100_000).for_each(|_| [100, -100].iter().for_each(|value| counter.add(*value)));
            left.fetch_sub(1, Relaxed);
        } else {
            while left.load(Relaxed) > 0 {
                let value = counter.exact();
                assert!((1_000_000 - 200..=1_000_000 + 200).contains(&value), "{value}");
            }
        }
    });
    assert_eq!(counter.exact(), 1_000_000);
    drop(counter);
    end(&data, &linux, Vec::new());
}

#[test]
fn histograms_count_every_value() {
    let (linux, shape) = here();
    let data = open(&linux, &shape);
    let histogram =
        PerCpuHistogram::new(Standalone { data: &data, platform: &linux }, Owner::NONE, Wait::Long).unwrap();
    assert_eq!((histogram.count(), histogram.quantile(500_000)), (0, None));
    threads(4, |thread| (0..25_000).for_each(|value| histogram.record(value * 4 + thread)));
    assert_eq!(histogram.count(), 100_000);
    for (millionths, exact) in [(10_000, 1000_f64), (500_000, 50_000.0), (999_000, 99_900.0)] {
        let value = histogram.quantile(millionths).unwrap() as f64;
        assert!(value <= exact && value >= exact * 7.0 / 8.0, "{millionths}: {value}");
    }
    histogram.record(u64::MAX);
    assert!(histogram.quantile(1_000_000).unwrap() > u64::MAX / 16 * 15);
    drop(histogram);
    end(&data, &linux, Vec::new());
}

fn references<P: Platform>(platform: &P, shape: &Shape) {
    let data = open(platform, shape);
    let host = Standalone { data: &data, platform };
    for round in 0..20 {
        let references: Vec<_> = (0..10).map(|_| PerCpuRef::new(host, Owner::NONE, Wait::Long).unwrap()).collect();
        let released: Vec<AtomicUsize> = (0..10).map(|_| AtomicUsize::new(0)).collect();
        threads(4, |thread| {
            Virtual::run_on(thread as usize);
            if thread == 3 || thread == 2 && round % 2 == 0 {
                // One or two references, killed together.
                let count = |at: usize| _ = released[at].fetch_add(1, Relaxed);
                while !references.iter().all(PerCpuRef::is_dead) {
                    PerCpuRef::kill_all(&host, references.iter(), count).unwrap();
                }
                return;
            }
            let mut random = Random(seed() + thread + round);
            for _ in 0..30_000 {
                let at = random.below(10);
                if references[at].try_get() {
                    assert_eq!(released[at].load(Relaxed), 0, "alive while it is referred to");
                    references[at].get();
                    for _ in 0..2 {
                        if references[at].put() {
                            released[at].fetch_add(1, Relaxed);
                        }
                    }
                }
            }
        });
        let released: Vec<usize> = released.into_iter().map(AtomicUsize::into_inner).collect();
        assert_eq!(released, [1; 10], "each is released once");
        assert!(references.iter().all(|reference| !reference.try_get() && reference.references() == Some(0)));
        verify(&data);
    }
    verify(&data);
    assert_eq!(data.statistics().allocations, 0);
    // SAFETY: no code uses it any more.
    unsafe { data.close(platform) };
}

#[test]
fn last_reference_callback_may_kill_the_same_set_again() {
    let (linux, shape) = here();
    let data = open(&linux, &shape);
    let host = Standalone { data: &data, platform: &linux };
    let both = [(); 2].map(|()| PerCpuRef::new(host, Owner::NONE, Wait::Long).unwrap());
    let mut told = Vec::new();
    let last = |at| {
        told.push(at);
        let inner = PerCpuRef::kill_all(&host, both.iter(), |at| panic!("{at} is told to the inner call"));
        assert_eq!(inner, Ok(0));
    };
    assert_eq!(PerCpuRef::kill_all(&host, both.iter(), last), Ok(2));
    assert_eq!(told, [0, 1]);
    drop(both);
    end(&data, &linux, Vec::new());
}

#[test]
fn a_killed_reference_is_released_once_when_the_last_is_put() {
    let (linux, shape) = here();
    references(&linux, &shape);
    references(&Virtual::new(4096, 3), &crate::machine::shape(Layout::Rows, 3, 4096));
    // Isolated CPUs are not fenced, so they have no words.
    let mut isolated = CpuSet::EMPTY;
    isolated.insert(0);
    references(&Linux::probe().with_isolated(&isolated), &shape);
}

#[test]
fn kill_all_without_sequences_makes_no_fence_call() {
    let machine = neap_testing::probe::Probe::new(Virtual::new(4096, 2));
    let data = open(&machine, &shape(Layout::Rows, 2, 4096));
    let host = Standalone { data: &data, platform: &machine };
    let references: Vec<_> = (0..100).map(|_| PerCpuRef::new(host, Owner::NONE, Wait::Long).unwrap()).collect();
    // A machine without sequences does not fence, so failing fences do not matter.
    machine.machine.fail(Call::Fence, 0, usize::MAX);
    references[3].get();
    let mut last = Vec::new();
    assert_eq!(PerCpuRef::kill_all(&host, references.iter(), |at| last.push(at)), Ok(100));
    assert_eq!((last.len(), last.contains(&3), references[3].references()), (99, false, Some(1)));
    assert_eq!(PerCpuRef::kill_all(&host, references.iter(), |_| panic!("killed twice")), Ok(0));
    assert!(references[3].put());
    assert_eq!(machine.machine.made(Call::Fence), 0);
    drop(references);
    end(&data, &machine, Vec::new());
}
