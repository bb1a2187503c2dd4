//! Pages from neap's own page lists. Threads allocate and free them over and over as in
//! will-it-scale's page_fault1, or touch each page once as in pft.
//!
//! The workload calls the page layer directly, so it measures no malloc. Each thread has a table of
//! its own, and waits at a barrier for the others. Besides time, it counts locks of the zone, and
//! blocks that bypassed a list because another thread held it.

use std::sync::Barrier;
use std::thread;

use anyhow::{Result, anyhow};
use clap::Args;
use neap_base::{Linux, Order, Pfn, Platform};
use neap_pages::policy::{Policy, Unlocked};
use neap_pages::{BATCH_SCALE, Pages, Shape, SideTable, Statistics, TABLES};

use super::Outcome;
use super::meter::{Meter, cpus, pin_to};

#[derive(Args)]
pub(super) struct FaultOptions {
    /// Threads, spread over the CPUs in turn (default: one for each CPU)
    #[arg(long)]
    threads: Option<usize>,
    /// Live memory of each thread at the peak of a round, in MiB
    #[arg(long, default_value_t = 128)]
    mib: usize,
    /// Rounds; each allocates all blocks, then frees them
    #[arg(long, default_value_t = 10)]
    repeats: usize,
    /// Lists of the size that they have without tuning
    #[arg(long)]
    fixed: bool,
}

#[derive(Args)]
pub(super) struct TouchOptions {
    /// Threads for every CPU; if more than one, they are not pinned
    #[arg(long, default_value_t = 1)]
    per_cpu: usize,
    /// Memory that each CPU's threads touch
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// Leave the lock of the lists out
    #[arg(long)]
    unlocked: bool,
}

/// Ways in which pages get memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    /// As in the library, which populates several pages at once.
    AsInLibrary,
    /// One page fault populates one page.
    EachPage,
}

fn shape(faults: Faults, list_high: Option<u32>) -> Shape {
    let (tables, huge) = ([SideTable::default(); TABLES], faults == Faults::AsInLibrary);
    Shape { span: 1 << 40, budget: None, tables, huge, list_high, batch_scale: BATCH_SCALE }
}

/// Writes to a page.
fn touch(address: usize) {
    // SAFETY: every address here is that of a page that this thread has just allocated, so the byte
    // is writable and no other thread uses it.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).write_volatile(1) };
}

fn refused(error: impl std::fmt::Debug) -> anyhow::Error {
    anyhow!("the page layer was refused memory: {error:?}")
}

/// Runs `work` on `threads` threads at once, pinned in turn to `places` if there are any. Returns
/// the cost of `operations` operations.
fn together(
    threads: usize,
    places: &[usize],
    operations: u64,
    work: impl Fn() -> Result<()> + Sync,
) -> Result<Outcome> {
    let step = Barrier::new(threads + 1);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|number| {
                let (step, work) = (&step, &work);
                scope.spawn(move || {
                    let pinned = places.get(number % places.len().max(1)).map_or(Ok(()), |&cpu| pin_to(cpu));
                    step.wait();
                    pinned.and_then(|()| work())
                })
            })
            .collect();
        let meter = Meter::start();
        step.wait();
        for worker in workers {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(meter.stop().outcome(operations))
    })
}

/// Adds the page layer's counts since `before`.
fn counted(mut outcome: Outcome, before: &Statistics, after: &Statistics) -> Outcome {
    let counts = [
        ("zone_locks", after.zone_locks - before.zone_locks),
        ("zone_waits", after.zone_waits.wrapping_sub(before.zone_waits).into()),
        ("list_busy", after.list_busy - before.list_busy),
        ("list_batch", after.list_batch.into()),
    ];
    outcome.counts = counts.iter().map(|&(name, count)| (name.to_string(), count as f64)).collect();
    outcome
}

fn up<P: Platform, T: Policy>(platform: &P, pages: &Pages<P, T>, held: &mut Vec<Pfn>, count: usize) -> Result<()> {
    for _ in 0..count {
        let block = pages.allocate_block(platform, Order(0)).map_err(refused)?;
        touch(pages.address(block.pfn));
        held.push(block.pfn);
    }
    Ok(())
}

pub(super) fn page_fault(options: &FaultOptions) -> Result<Outcome> {
    let (platform, places) = (Linux::probe(), cpus()?);
    let mut pages = Pages::open(&platform, &shape(Faults::AsInLibrary, None)).map_err(refused)?;
    if options.fixed {
        // The size that a list starts with is the one without tuning.
        let high = pages.statistics().list_high;
        // SAFETY: these are the only node's pages. No thread uses them, or memory of them.
        unsafe { pages.close(&platform) };
        pages = Pages::open(&platform, &shape(Faults::AsInLibrary, Some(high))).map_err(refused)?;
    }
    let threads = options.threads.unwrap_or(places.len());
    let count = (options.mib << 20) / pages.page_size();
    let before = pages.statistics();
    let operations = 2 * (threads * options.repeats * count) as u64;
    let outcome = together(threads, &places, operations, || {
        let mut held = Vec::with_capacity(count);
        for _ in 0..options.repeats {
            up(&platform, &pages, &mut held, count)?;
            held.drain(..).for_each(|pfn| pages.free_block(&platform, pfn, Order(0)));
        }
        Ok(())
    })?;
    let outcome = counted(outcome, &before, &pages.statistics());
    // SAFETY: the threads have ended, and no other code uses the pages or their memory.
    unsafe { pages.close(&platform) };
    Ok(outcome)
}

pub(super) fn first_touch(options: &TouchOptions) -> Result<Outcome> {
    let platform = Linux::probe();
    if options.unlocked {
        anyhow::ensure!(
            options.per_cpu == 1,
            "--unlocked needs --per-cpu 1: without the lock, only one thread of a CPU may use its list"
        );
        // SAFETY: `touch_once` starts one thread for each CPU and pins it there, since `per_cpu` is
        // 1. No thread drains or ticks.
        let pages = unsafe { Pages::<Linux, Unlocked>::open_unlocked(&platform, &shape(Faults::EachPage, None)) };
        return touch_once(options, &platform, pages.map_err(refused)?);
    }
    touch_once(options, &platform, Pages::open(&platform, &shape(Faults::EachPage, None)).map_err(refused)?)
}

fn touch_once<T: Policy + Send + Sync>(
    options: &TouchOptions,
    platform: &Linux,
    pages: Pages<Linux, T>,
) -> Result<Outcome> {
    let places = cpus()?;
    let threads = places.len() * options.per_cpu;
    let count = (options.mib << 20) / pages.page_size() / options.per_cpu;
    let pinned = if options.per_cpu == 1 { &places[..] } else { &[] };
    let before = pages.statistics();
    let outcome = together(threads, pinned, (threads * count) as u64, || {
        let mut held = Vec::with_capacity(count);
        up(platform, &pages, &mut held, count)
    })?;
    let outcome = counted(outcome, &before, &pages.statistics());
    // SAFETY: the threads have ended, and no other code uses the pages or their memory.
    unsafe { pages.close(platform) };
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_counted_up_and_down() {
        let options = FaultOptions { threads: Some(2), mib: 2, repeats: 3, fixed: false };
        let tuned = page_fault(&options).unwrap();
        let fixed = page_fault(&FaultOptions { fixed: true, ..options }).unwrap();
        assert_eq!((tuned.operations, fixed.operations), (2 * 2 * 3 * 512, 2 * 2 * 3 * 512));
        assert!(tuned.count("zone_locks") > 0.0 && fixed.count("zone_locks") > 10.0, "{fixed:?}");
        assert!(tuned.minor_faults > 0);
    }

    #[test]
    fn first_touches_are_faults_with_the_lock_and_without() {
        let options = TouchOptions { per_cpu: 1, mib: 2, unlocked: true };
        let pages = 512 * cpus().unwrap().len() as u64;
        for options in
            [TouchOptions { unlocked: false, ..options }, TouchOptions { per_cpu: 4, unlocked: false, ..options }]
        {
            let outcome = first_touch(&options).unwrap();
            assert!(outcome.operations == pages && outcome.minor_faults >= pages, "{outcome:?}");
        }
        let outcome = first_touch(&options).unwrap();
        assert_eq!((outcome.operations, outcome.count("list_busy")), (pages, 0.0));
        assert!(first_touch(&TouchOptions { per_cpu: 2, ..options }).is_err());
    }
}
