//! Burst, then idle: threads allocate much, free it all and stay alive, blocked.
//!
//! Each round all threads hold all their blocks at once. The tables of addresses are unmapped
//! before resident memory is first read, so only the allocator's memory counts. The threads wait on
//! a condition variable; the main thread sleeps and reads.

use std::sync::{Barrier, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use super::Outcome;
use super::meter::{BlockTable, Meter, give, own_rss_kib, take};

/// When resident memory is read, in milliseconds after the last block was freed.
pub(crate) const READ_AT_MS: [u64; 4] = [0, 500, 1000, 2000];

#[derive(Args)]
pub(super) struct IdleOptions {
    #[arg(long, default_value_t = 16)]
    threads: usize,
    /// Live memory per thread
    #[arg(long, default_value_t = 32)]
    mib: usize,
    /// Block size in bytes
    #[arg(long, default_value_t = 512)]
    size: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only measure the busy part
    #[arg(long)]
    no_wait: bool,
    /// Say on standard error what happens
    #[arg(long)]
    progress: bool,
}

/// A gate that opens once. Until then, threads wait in `pass`.
#[derive(Default)]
pub(super) struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub(super) fn open(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }

    pub(super) fn pass(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.opened.wait_while(open, |open| !*open));
    }
}

pub(super) fn run(options: &IdleOptions) -> Result<Outcome> {
    let blocks = (options.mib << 20) / options.size.max(1);
    let step = Barrier::new(options.threads + 1);
    let gate = Gate::default();
    thread::scope(|scope| {
        let mut mapped = Vec::with_capacity(options.threads);
        for _ in 0..options.threads {
            mapped.push(BlockTable::new(blocks)?);
        }
        for table in mapped {
            let (step, gate) = (&step, &gate);
            scope.spawn(move || burst(table, options, step, gate));
        }
        // All threads wait for this one at the barrier, so the meter starts before they run.
        step.wait();
        let meter = Meter::start();
        step.wait();
        for _ in 0..options.rounds {
            step.wait();
            step.wait();
        }
        let spent = meter.stop();
        step.wait();
        let mut outcome = spent.outcome((options.rounds * options.threads * blocks) as u64);
        let idle = watch(options, spent.wall());
        gate.open();
        (outcome.rss_kib, outcome.idle_cpu_ns) = idle?;
        Ok(outcome)
    })
}

/// Body of a thread: in each round allocates all blocks, then frees them. Afterwards waits for the
/// gate.
fn burst(mut table: BlockTable, options: &IdleOptions, step: &Barrier, gate: &Gate) {
    step.wait();
    step.wait();
    for _ in 0..options.rounds {
        for entry in table.iter_mut() {
            *entry = take(options.size);
        }
        step.wait();
        for &entry in table.iter() {
            // SAFETY: each entry came from `take` above, is freed once, and is not used again.
            unsafe { give(entry) };
        }
        step.wait();
    }
    drop(table);
    step.wait();
    gate.pass();
}

/// Reads resident memory at each time, and the processor time that passed while the threads only
/// waited.
fn watch(options: &IdleOptions, busy: Duration) -> Result<(Vec<u64>, Option<u64>)> {
    let ended = Instant::now();
    let mut readings = Vec::with_capacity(READ_AT_MS.len());
    let mut idle_cpu_ns = 0;
    for at in READ_AT_MS.into_iter().take(if options.no_wait { 1 } else { READ_AT_MS.len() }) {
        let meter = Meter::start();
        thread::sleep((ended + Duration::from_millis(at)).saturating_duration_since(Instant::now()));
        idle_cpu_ns += meter.stop().cpu_ns();
        let resident = own_rss_kib()?;
        readings.push(resident);
        match at {
            _ if !options.progress => {}
            0 => eprintln!("  burst over after {:.2} s: {} MiB resident", busy.as_secs_f64(), resident / 1024),
            _ => eprintln!("  {:.1} s later: {} MiB resident", at as f64 / 1000.0, resident / 1024),
        }
    }
    Ok((readings, (!options.no_wait).then_some(idle_cpu_ns)))
}
