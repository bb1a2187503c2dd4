//! `neap bench counter`: what adding to a counter costs, on one thread and on one for each CPU, and what reading it costs.
//!
//! Counters: neap's `PerCpuCounter`, one atomic, an atomic for each CPU chosen by the thread's number, and a plain word of the
//! thread's own, which nobody else can read. Figures, of one thread: `add_ns` and `add_ratio_thread_local` (neap over the
//! plain word), `add_ratio_atomic`, `add_ratio_sharded`; `add_ratio_atomic_crowd` and `add_ratio_sharded_crowd` with a thread on
//! each CPU; `read_ns` (neap's exact value). All in this process.

use core::cell::Cell;
use core::hint::black_box;
use core::sync::atomic::{AtomicI64, Ordering};
use std::process::ExitCode;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow};
use neap_base::{Linux, Platform};
use neap_percpu::{Alone, Owner, PerCpuCounter, PerCpuData, Shape, Wait};

use super::{Options, Session, Workload};
use crate::report::{cell, table};
use crate::work::Outcome;
use crate::work::meter::{cpus, pin_to};

const ATOMIC: &str = "atomic";
const SHARDED: &str = "sharded";
const PLAIN: &str = "thread-local";
const ONE: &str = "add";
const CROWD: &str = "add-crowd";
const READ: &str = "read";

/// A word on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Shard(AtomicI64);

thread_local! {
    static OWN: Cell<i64> = const { Cell::new(0) };
}

/// Parts of a run: the median one counts, so that who is preempted for a moment is not measured.
const PARTS: u64 = 25;

/// `add` so often on each of some CPUs at once; the slowest thread's time counts.
fn timed(on: &[usize], times: u64, add: impl Fn(usize) + Sync) -> Result<Outcome> {
    let barrier = Barrier::new(on.len());
    let run = |thread: usize, cpu: usize| -> Result<u64> {
        pin_to(cpu)?;
        barrier.wait();
        let part = || {
            let start = Instant::now();
            for _ in 0..times / PARTS {
                add(thread);
            }
            start.elapsed().as_nanos() as u64
        };
        let mut parts: Vec<u64> = (0..PARTS).map(|_| part()).collect();
        parts.sort_unstable();
        Ok(parts[parts.len() / 2] * PARTS)
    };
    let run = &run;
    let took: Result<Vec<u64>> = thread::scope(|scope| {
        let threads: Vec<_> =
            on.iter().enumerate().map(|(thread, &cpu)| scope.spawn(move || run(thread, cpu))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    });
    let wall_ns = took?.into_iter().max().unwrap_or(0);
    Ok(Outcome { operations: times / PARTS * PARTS, wall_ns, ..Outcome::default() })
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("counter", &["neap", ATOMIC, SHARDED, PLAIN])?;
    let (linux, on) = (Linux::probe(), cpus()?);
    let data =
        PerCpuData::open(&linux, &Shape::usual(linux.cpus()), |_| 0, ()).map_err(|error| anyhow!("{error:?}"))?;
    let host = Alone { data: &data, platform: &linux };
    // A part is moved once in 4096 additions of 1.
    let counter = PerCpuCounter::new(host, Owner::NOBODY, 4096, Wait::Long).map_err(|refused| anyhow!("{refused}"))?;
    let (atomic, shards) = (Shard::default(), on.iter().map(|_| Shard::default()).collect::<Vec<_>>());
    let times = options.amount(10_000_000);
    let rounds = options.rounds(30);
    let workloads =
        [Workload::timed(ONE, rounds, &[]), Workload::timed(CROWD, rounds, &[]), Workload::timed(READ, rounds, &[])];
    session.measure(&workloads, |variant, workload, _| {
        let on = if workload.name == CROWD { &on[..] } else { &on[..1] };
        if workload.name == READ {
            return (variant.name == "neap").then(|| timed(on, times / 100, |_| _ = black_box(counter.exact())));
        }
        Some(match variant.name {
            ATOMIC => timed(on, times, |_| _ = atomic.0.fetch_add(black_box(1), Ordering::Relaxed)),
            SHARDED => timed(on, times, |thread| _ = shards[thread].0.fetch_add(black_box(1), Ordering::Relaxed)),
            PLAIN => timed(on, times, |_| {
                // In memory each time: others would read it there, if they could.
                OWN.with(|own| {
                    own.set(own.get() + black_box(1));
                    black_box(own);
                });
            }),
            _ => timed(on, times, |_| counter.add(black_box(1))),
        })
    });
    session.figure("add_ns", session.summary("neap", ONE).map(|summary| summary.median));
    session.figure("read_ns", session.summary("neap", READ).map(|summary| summary.median));
    for (name, against, workload) in [
        ("add_ratio_thread_local", PLAIN, ONE),
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
        cells.extend([ONE, CROWD, READ].map(|workload| cell(session.summary(name, workload), 2)));
        cells
    };
    let rows: Vec<Vec<String>> = ["neap", ATOMIC, SHARDED, PLAIN].iter().map(row).collect();
    let tables = table(&["counter", "ns per addition", "a thread on each CPU", "ns per exact read"], &rows);
    drop(counter);
    // SAFETY: nobody uses anything in it.
    unsafe { data.close(&linux) };
    session.finish(options.json, &tables)
}
