//! `neap bench counter`: cost of adding to a counter, on one thread and on one for each CPU, and of
//! reading it.
//!
//! Counters: neap's `PerCpuCounter`; one atomic; an array of atomics, one for each CPU, of which a
//! thread uses the one with its number; and a plain word of the thread, which no other thread can
//! read (`OWN.set(OWN.get() + value)`). The benchmark adds the constant 1 to each, and then a
//! number in a register whose value the compiler cannot know.
//!
//! The comparison is fair in three ways:
//!
//! * The plain word's address escapes once, so that the compiler stores the word after each
//!   addition. One instruction adds to it in memory, as for the atomics but without the lock
//!   prefix.
//! * A barrier for the compiler, which costs no instruction, ends each addition.
//! * Each thread has its own copy of the closure, so no addition loads the address of its counter.
//!
//! An addition of a number to the plain word mostly waits for the previous addition. Processors
//! avoid this wait for constants.
//!
//! Figures, of one thread: `add_ns`, `add_ratio_thread_local` (neap over the plain word, of a
//! constant), `add_ratio_thread_local_number` (of a number), `add_ratio_atomic`,
//! `add_ratio_sharded` (of a constant); `add_ratio_atomic_crowd` and `add_ratio_sharded_crowd` with
//! a thread on each CPU; `read_ns` (neap's exact value). Everything runs in this process.

use core::cell::Cell;
use core::hint::black_box;
use core::sync::atomic::{AtomicI64, Ordering};
use std::process::ExitCode;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow};
use neap_base::{Linux, Platform};
use neap_percpu::{Owner, PerCpuCounter, PerCpuData, Shape, Standalone, Wait};

use super::{Options, Session, Workload};
use crate::report::{cell, table};
use crate::work::Outcome;
use crate::work::meter::{cpus, pin_to};

const ATOMIC: &str = "atomic";
const SHARDED: &str = "sharded";
const PLAIN: &str = "thread-local";
const COUNTERS: [&str; 4] = ["neap", ATOMIC, SHARDED, PLAIN];
const ONE: &str = "add";
const NUMBER: &str = "add-number";
const CROWD: &str = "add-crowd";
const READ: &str = "read";

/// A word on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Shard(AtomicI64);

thread_local! {
    static OWN: Cell<i64> = const { Cell::new(0) };
}

/// Number of parts of a run. The median part counts, so that a short preemption is not measured.
const PARTS: u64 = 25;

/// Calls `add` the given number of times on each CPU of `on`, at once. Returns the time of the
/// slowest thread.
pub(super) fn timed(on: &[usize], times: u64, add: impl Fn(usize) + Copy + Send) -> Result<Outcome> {
    let barrier = &Barrier::new(on.len());
    let run = move |thread: usize, cpu: usize| -> Result<u64> {
        pin_to(cpu)?;
        OWN.with(|own| _ = black_box(own));
        barrier.wait();
        let part = || {
            let start = Instant::now();
            for _ in 0..times / PARTS {
                add(thread);
                black_box(());
            }
            start.elapsed().as_nanos() as u64
        };
        let mut parts: Vec<u64> = (0..PARTS).map(|_| part()).collect();
        parts.sort_unstable();
        Ok(parts[parts.len() / 2] * PARTS)
    };
    let took: Result<Vec<u64>> = thread::scope(|scope| {
        let threads: Vec<_> =
            on.iter().enumerate().map(|(thread, &cpu)| scope.spawn(move || run(thread, cpu))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    });
    let wall_ns = took?.into_iter().max().unwrap_or(0);
    Ok(Outcome { operations: times / PARTS * PARTS, wall_ns, ..Outcome::default() })
}

/// The counters, without the thread's own word.
#[derive(Clone, Copy)]
struct Counters<'a> {
    neap: &'a PerCpuCounter<Standalone<'a, Linux>>,
    atomic: &'a AtomicI64,
    shards: &'a [Shard],
}

impl Counters<'_> {
    /// Adds the result of `value` to the counter with that name.
    fn add(self, name: &str, on: &[usize], times: u64, value: impl Fn() -> i64 + Copy + Send) -> Result<Outcome> {
        let Counters { neap, atomic, shards } = self;
        match name {
            ATOMIC => timed(on, times, move |_| _ = atomic.fetch_add(value(), Ordering::Relaxed)),
            SHARDED => timed(on, times, move |thread| _ = shards[thread].0.fetch_add(value(), Ordering::Relaxed)),
            PLAIN => timed(on, times, move |_| OWN.set(OWN.get() + value())),
            _ => timed(on, times, move |_| neap.add(value())),
        }
    }
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("counter", &COUNTERS)?;
    let (linux, on) = (Linux::probe(), cpus()?);
    let data =
        PerCpuData::open(&linux, &Shape::usual(linux.cpus()), |_| 0, ()).map_err(|error| anyhow!("{error:?}"))?;
    let host = Standalone { data: &data, platform: &linux };
    // A part is moved once in 4096 additions of 1.
    let counter = PerCpuCounter::new(host, Owner::NONE, 4096, Wait::Long).map_err(|refused| anyhow!("{refused}"))?;
    let (atomic, shards) = (Shard::default(), on.iter().map(|_| Shard::default()).collect::<Vec<_>>());
    let times = options.amount(10_000_000);
    let rounds = options.rounds(30);
    let workloads = [ONE, NUMBER, CROWD, READ].map(|name| Workload::timed(name, rounds, &[]));
    let number = black_box(1);
    let counters = Counters { neap: &counter, atomic: &atomic.0, shards: &shards };
    session.measure(&workloads, |variant, workload, _| match workload.name.as_str() {
        READ if variant.name != "neap" => None,
        READ => Some(timed(&on[..1], times / 100, |_| _ = black_box(counters.neap.exact()))),
        CROWD => Some(counters.add(variant.name, &on, times, || 1)),
        NUMBER => Some(counters.add(variant.name, &on[..1], times, move || number)),
        _ => Some(counters.add(variant.name, &on[..1], times, || 1)),
    });
    session.figure("add_ns", session.summary("neap", ONE).map(|summary| summary.median));
    session.figure("read_ns", session.summary("neap", READ).map(|summary| summary.median));
    for (name, against, workload) in [
        ("add_ratio_thread_local", PLAIN, ONE),
        ("add_ratio_thread_local_number", PLAIN, NUMBER),
        ("add_ratio_atomic", ATOMIC, ONE),
        ("add_ratio_sharded", SHARDED, ONE),
        ("add_ratio_atomic_crowd", ATOMIC, CROWD),
        ("add_ratio_sharded_crowd", SHARDED, CROWD),
    ] {
        let ratio = session.ratio("neap", against, workload);
        session.figure_of_ratio(name, ratio);
    }
    let row = |name: &&'static str| {
        let mut cells = vec![name.to_string()];
        cells.extend([ONE, NUMBER, CROWD, READ].map(|workload| cell(session.summary(name, workload), 2)));
        cells
    };
    let rows: Vec<Vec<String>> = COUNTERS.iter().map(row).collect();
    let header = ["counter", "ns per addition of 1", "of a number", "a thread on each CPU", "ns per exact read"];
    let tables = table(&header, &rows);
    drop(counter);
    // SAFETY: no thread uses `data` or an allocation of it any more.
    unsafe { data.close(&linux) };
    session.finish(options.json, &tables)
}
