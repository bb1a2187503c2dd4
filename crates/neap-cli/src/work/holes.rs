//! A burst with survivors: the program allocates many small blocks of three sizes, frees all but
//! one in twenty, and waits.
//!
//! There is one thread. No call asks the allocator to release memory. The table of addresses exists
//! before and after, so it counts in no difference. The upper bound of released memory is computed
//! from the addresses: a page with a byte of a survivor cannot be released.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::Outcome;
use super::meter::{BlockTable, Meter, Random, cpus, give, own_rss_kib, pages_of, pin_to, take};

/// Number and size of the blocks.
const BLOCKS: [(usize, usize); 3] = [(150_000, 512), (100_000, 1 << 10), (50_000, 2 << 10)];
/// One block in this many survives, on average.
const ONE_IN: usize = 20;

#[derive(Args)]
pub(super) struct HolesOptions {
    /// Chooses the survivors
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Milliseconds from the last free to the last look at resident memory
    #[arg(long, default_value_t = 10_000)]
    idle_ms: u64,
    /// Only measure the busy part
    #[arg(long)]
    no_wait: bool,
    /// Let a thread run meanwhile, for address translations to be flushed on its CPU
    #[arg(long)]
    spin: bool,
}

/// Returns the size of the block with this number.
fn size_of_block(number: usize) -> usize {
    let ends = BLOCKS.iter().scan(0, |sum, &(count, size)| {
        *sum += count;
        Some((*sum, size))
    });
    ends.into_iter().find(|&(end, _)| number < end).map_or(0, |(_, size)| size)
}

pub(super) fn run(options: &HolesOptions) -> Result<Outcome> {
    let count = BLOCKS.iter().map(|(count, _)| count).sum();
    let mut blocks = BlockTable::new(count)?;
    let mut stays = BlockTable::new(count)?;
    let mut random = Random::new(options.seed);
    for entry in stays.iter_mut() {
        *entry = std::ptr::without_provenance_mut(usize::from(random.below(ONE_IN) == 0));
    }
    let before = own_rss_kib()?;
    let meter = Meter::start();
    for (number, block) in blocks.iter_mut().enumerate() {
        *block = take(size_of_block(number));
    }
    let allocated = meter.stop();
    let burst = own_rss_kib()?;
    let meter = Meter::start();
    for (&block, _) in blocks.iter().zip(stays.iter()).filter(|(_, stays)| stays.is_null()) {
        // SAFETY: the block came from `take`, is freed once, and is not used again.
        unsafe { give(block) };
    }
    let spent = allocated.and(meter.stop());
    let mut outcome = spent.outcome(count as u64);
    outcome.rss_kib = vec![before, burst, own_rss_kib()?];
    if !options.no_wait {
        wait(options, &mut outcome)?;
    }
    for (&block, _) in blocks.iter().zip(stays.iter()).filter(|(_, stays)| !stays.is_null()) {
        // SAFETY: the block is a survivor, which is not freed yet. Its first byte was written when
        // it was allocated.
        if unsafe { block.read_volatile() } != 1 {
            bail!("a survivor at {block:p} lost its contents");
        }
    }
    let all = pages(&blocks, |_| true)?;
    let live = pages(&blocks, |number| !stays[number].is_null())?;
    outcome.counts.insert("pages".to_string(), all as f64);
    outcome.counts.insert("pages_with_survivors".to_string(), live as f64);
    Ok(outcome)
}

/// Waits, reads resident memory at the end, and counts the cost of the wait.
fn wait(options: &HolesOptions, outcome: &mut Outcome) -> Result<()> {
    let (over, running) = (AtomicBool::new(false), AtomicBool::new(false));
    let allowed = cpus()?;
    let (first, last) = (*allowed.first().context("no CPU")?, *allowed.last().context("no CPU")?);
    if options.spin && first == last {
        bail!("a second thread needs a second CPU");
    }
    let end = Instant::now() + Duration::from_millis(options.idle_ms);
    let meter = Meter::start();
    let flushes = thread::scope(|scope| -> Result<Option<u64>> {
        let spinner = options.spin.then(|| {
            scope.spawn(|| {
                pin_to(last)?;
                running.store(true, Ordering::Relaxed);
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                anyhow::Ok(())
            })
        });
        let Some(spinner) = spinner else {
            thread::sleep(end.saturating_duration_since(Instant::now()));
            return Ok(None);
        };
        while !running.load(Ordering::Relaxed) && !spinner.is_finished() {
            thread::yield_now();
        }
        let before = flushes_on(last);
        thread::sleep(end.saturating_duration_since(Instant::now()));
        let after = flushes_on(last);
        over.store(true, Ordering::Relaxed);
        spinner.join().map_err(|_| anyhow::anyhow!("the second thread panicked"))??;
        Ok(before.zip(after).map(|(before, after)| after - before))
    })?;
    outcome.idle_cpu_ns = (!options.spin).then(|| meter.stop().cpu_ns());
    outcome.rss_kib.push(own_rss_kib()?);
    if let Some(flushes) = flushes {
        outcome.counts.insert("flushes".to_string(), flushes as f64);
    }
    Ok(())
}

/// Returns the interrupts that flushed address translations on a CPU so far, as x86 counts them.
/// `None` if they are not counted. The function uses the heap, which does not disturb this
/// measurement.
fn flushes_on(cpu: usize) -> Option<u64> {
    parse_flushes(&std::fs::read_to_string("/proc/interrupts").ok()?, cpu)
}

/// Returns the number in the line `TLB:` and the column of a CPU. The first line names the columns.
/// Offline CPUs have no column.
fn parse_flushes(text: &str, cpu: usize) -> Option<u64> {
    let column = text.lines().next()?.split_whitespace().position(|name| name == format!("CPU{cpu}"))?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("TLB:"))?;
    line.split_whitespace().nth(column)?.parse().ok()
}

/// Returns the number of pages with bytes of the wanted blocks.
fn pages(blocks: &[*mut u8], wanted: impl Fn(usize) -> bool) -> Result<usize> {
    let wanted = blocks.iter().enumerate().filter(|&(number, _)| wanted(number));
    pages_of(blocks.len(), wanted.map(|(number, &block)| (block, size_of_block(number))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_size_by_size() {
        let sizes = [0, 149_999, 150_000, 249_999, 250_000, 299_999, 300_000].map(size_of_block);
        assert_eq!(sizes, [512, 512, 1024, 1024, 2048, 2048, 0]);
    }

    #[test]
    fn flushes_are_read_by_the_name_of_the_cpu() {
        let text = "           CPU0       CPU2\n  0:  5  6  timer\nTLB:      17      42   TLB shootdowns\n";
        assert_eq!([0, 1, 2].map(|cpu| parse_flushes(text, cpu)), [Some(17), None, Some(42)]);
        assert_eq!(parse_flushes("           CPU0\n  0:  5  timer\n", 0), None);
    }

    #[test]
    fn a_page_counts_once_however_many_blocks_lie_in_it() {
        let mut blocks = vec![std::ptr::null_mut(); 6];
        // The last reaches into the next page.
        for (block, address) in blocks.iter_mut().zip([65_536, 66_048, 131_072, 131_584, 196_608, 262_000]) {
            *block = std::ptr::without_provenance_mut(address);
        }
        assert_eq!(pages(&blocks, |number| number < 5).unwrap(), 3);
        assert_eq!(pages(&blocks, |number| number == 1).unwrap(), 1);
        assert_eq!(pages(&blocks, |_| false).unwrap(), 0);
        assert_eq!(pages(&blocks, |number| number == 5).unwrap(), 2);
    }
}
