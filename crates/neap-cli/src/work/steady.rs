//! Steady state of a server: threads replace blocks at random in a bounded live set whose mix of
//! sizes drifts.
//!
//! # Design
//!
//! Sizes are log-uniform from 16 bytes to 64 KiB: half of them over the whole range, half within a
//! window of four octaves. The window moves up and down through the range four times in a run. A
//! thread empties places of its table until the new block fits the thread's bound, so the live
//! bytes stay the same while the number of blocks changes.
//!
//! # Concurrency
//!
//! A block that another thread is to free goes through the exchange, an array of addresses that all
//! threads share. The freeing thread swaps its block with the block in a random place, and frees
//! that block instead.

use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::thread;

use anyhow::Result;
use clap::Args;

use super::Outcome;
use super::meter::{BlockTable, Meter, Random, give, own_peak_kib, own_rss_kib, take};

const SMALLEST: usize = 16;
/// From 16 bytes to 64 KiB.
const OCTAVES: usize = 12;
/// Octaves of the window.
const WINDOW: usize = 4;
/// Number of times that the window moves up and down in a run.
const DRIFTS: u64 = 4;
/// Places of a thread's table.
pub(super) const PLACES: usize = 32 << 10;
/// Places of the exchange.
const EXCHANGE: usize = 512;
/// Of this many frees, `EXCHANGED` go through the exchange. With eight threads, seven in eight of
/// these free a block of another thread. They are a tenth of all frees.
const FREES: usize = 35;
const EXCHANGED: usize = 4;

#[derive(Args)]
pub(super) struct SteadyOptions {
    /// Where the random numbers begin
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=512))]
    threads: u16,
    /// MiB that are live at most, over all threads
    #[arg(long, default_value_t = 192)]
    live: usize,
    /// Blocks that each thread allocates
    #[arg(long, default_value_t = 1_000_000)]
    blocks: u64,
}

/// One thread's blocks.
pub(super) struct Live {
    blocks: BlockTable,
    /// Size of each block, 0 for an empty place.
    sizes: BlockTable,
    bytes: usize,
    bound: usize,
    random: Random,
}

/// The exchange of blocks between threads. Each place is null or holds the address of a block that
/// is in no table.
pub(super) struct Exchange {
    places: [AtomicPtr<u8>; EXCHANGE],
    /// Number of frees that went through here.
    frees: AtomicUsize,
}

impl Live {
    /// A table without blocks, for at most `bound` bytes.
    pub(super) fn new(bound: usize, random: Random) -> Result<Live> {
        Ok(Live { blocks: BlockTable::new(PLACES)?, sizes: BlockTable::new(PLACES)?, bytes: 0, bound, random })
    }

    /// The table of a thread of the workload.
    fn of_thread(number: u64, options: &SteadyOptions) -> Result<Live> {
        let bound = (options.live << 20) / usize::from(options.threads);
        Live::new(bound, Random::new(options.seed.wrapping_mul(1000) + number))
    }

    /// Allocates `count` blocks, each in a random place.
    fn run(&mut self, count: u64, exchange: &Exchange) {
        for number in 0..count {
            self.replace(window(number, count), exchange);
        }
    }

    /// Allocates a block in a random place, with a size as [`draw`] has it.
    pub(super) fn replace(&mut self, window: usize, exchange: &Exchange) {
        let size = draw(&mut self.random, window);
        let place = self.random.below(PLACES);
        self.clear(place, exchange);
        while self.bytes > 0 && self.bytes + size > self.bound {
            let other = self.random.below(PLACES);
            self.clear_from(other, exchange);
        }
        self.put(place, size);
    }

    /// Allocates blocks of all sizes until the next one would not fit. Returns their number.
    pub(super) fn fill(&mut self) -> u64 {
        for number in 0.. {
            let size = draw(&mut self.random, window(self.bytes as u64, self.bound as u64));
            let start = self.random.below(PLACES);
            let mut places = (start..PLACES).chain(0..start);
            let place = places.find(|&place| self.blocks[place].is_null());
            match place.filter(|_| self.bytes + size <= self.bound) {
                Some(place) => self.put(place, size),
                None => return number,
            }
        }
        0
    }

    /// Allocates a block for an empty place.
    fn put(&mut self, place: usize, size: usize) {
        self.blocks[place] = take(size);
        self.sizes[place] = without_provenance_mut(size);
        self.bytes += size;
    }

    /// All blocks with their sizes.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        let all = self.blocks.iter().zip(self.sizes.iter());
        all.filter(|(block, _)| !block.is_null()).map(|(&block, size)| (block, size.addr()))
    }

    /// Empties the first place from `start` on, wrapping round, that has a block.
    fn clear_from(&mut self, start: usize, exchange: &Exchange) {
        let places = (start..PLACES).chain(0..start);
        if let Some(place) = places.into_iter().find(|&place| !self.blocks[place].is_null()) {
            self.clear(place, exchange);
        }
    }

    /// Frees the block in a place, or another thread's instead.
    fn clear(&mut self, place: usize, exchange: &Exchange) {
        let block = std::mem::replace(&mut self.blocks[place], null_mut());
        if block.is_null() {
            return;
        }
        self.bytes -= self.sizes[place].addr();
        let freed = if self.random.below(FREES) < EXCHANGED {
            exchange.swap(block, self.random.below(EXCHANGE))
        } else {
            block
        };
        // SAFETY: the block came from `take`, or is null. The swap or the replacement above removed
        // it from the only place that had it, so it is freed once.
        unsafe { give(freed) };
    }
}

impl Exchange {
    pub(super) fn new() -> Exchange {
        Exchange { places: [const { AtomicPtr::new(null_mut()) }; EXCHANGE], frees: AtomicUsize::new(0) }
    }

    /// Puts a block in a place and returns the address that was there.
    fn swap(&self, block: *mut u8, place: usize) -> *mut u8 {
        // Relaxed: a statistic, read after the threads were joined.
        self.frees.fetch_add(1, Ordering::Relaxed);
        // AcqRel: the partner is this swap in other threads. It publishes the writes to the block
        // before another thread frees it.
        self.places[place].swap(block, Ordering::AcqRel)
    }

    /// Frees all blocks that are here.
    pub(super) fn empty(&self) {
        for place in &self.places {
            // Acquire: the partner is the threads' swap in `swap`, which publishes the writes to
            // the block.
            let block = place.swap(null_mut(), Ordering::Acquire);
            // SAFETY: the block came from `take`, or is null. The swap removed it from its only
            // place, so it is freed once.
            unsafe { give(block) };
        }
    }
}

/// Returns the lowest size of the window at step `number` of `count`, in hundredths of an octave
/// above the smallest size.
pub(super) fn window(number: u64, count: u64) -> usize {
    let top = ((OCTAVES - WINDOW) * 100) as u64;
    let moved = number * 2 * top * DRIFTS / count.max(1) % (2 * top);
    moved.min(2 * top - moved) as usize
}

/// Draws a size, with equal probability from the whole range or from the window.
pub(super) fn draw(random: &mut Random, window: usize) -> usize {
    let (from, width) = if random.below(2) == 0 { (0, OCTAVES) } else { (window, WINDOW) };
    let octaves = (from + random.below(width * 100 + 1)) as f64 / 100.0;
    (SMALLEST as f64 * octaves.exp2()) as usize
}

pub(super) fn run(options: &SteadyOptions) -> Result<Outcome> {
    let mut threads = Vec::with_capacity(usize::from(options.threads));
    for number in 0..options.threads {
        threads.push(Live::of_thread(u64::from(number), options)?);
    }
    let exchange = Exchange::new();
    let before = own_rss_kib()?;
    let meter = Meter::start();
    thread::scope(|scope| {
        for live in &mut threads {
            let exchange = &exchange;
            scope.spawn(move || live.run(options.blocks, exchange));
        }
    });
    let spent = meter.stop();
    let mut outcome = spent.outcome(options.blocks * u64::from(options.threads));
    outcome.rss_kib = vec![before, own_rss_kib()?];
    let counts = [
        ("peak_kib", own_peak_kib()?.saturating_sub(before) as f64),
        ("live_kib", (options.live << 10) as f64),
        ("seed", options.seed as f64),
        ("exchanged", exchange.frees.into_inner() as f64),
    ];
    outcome.counts.extend(counts.map(|(name, count)| (name.to_string(), count)));
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_range_and_the_window_moves_them() {
        let mean = |window| {
            let mut random = Random::new(1);
            let sizes: Vec<usize> = (0..10_000).map(|_| draw(&mut random, window)).collect();
            assert!(sizes.iter().all(|size| (SMALLEST..=SMALLEST << OCTAVES).contains(size)));
            sizes.iter().sum::<usize>() / sizes.len()
        };
        assert!(mean(0) * 2 < mean((OCTAVES - WINDOW) * 100));
    }

    #[test]
    fn window_moves_up_and_down_and_ends_where_it_began() {
        let count = 8000;
        let top = (OCTAVES - WINDOW) * 100;
        let at = |number| window(number, count);
        assert_eq!([at(0), at(500), at(1000), at(1500), at(2000), at(3000)], [0, top / 2, top, top / 2, 0, top]);
        assert_eq!(window(0, 0), 0);
    }

    #[test]
    fn live_bytes_stay_within_the_bound_and_a_tenth_changes_hands() {
        let options = SteadyOptions { seed: 7, threads: 8, live: 8, blocks: 20_000 };
        let exchange = Exchange::new();
        let mut live = Live::of_thread(0, &options).unwrap();
        live.run(options.blocks, &exchange);
        let held: usize = live.blocks().map(|(_, size)| size).sum();
        assert_eq!(held, live.bytes);
        assert!((512 << 10..=1 << 20).contains(&held), "{held} bytes");
        let outcome = run(&options).unwrap();
        let share = outcome.count("exchanged") / outcome.operations as f64;
        assert!((0.08..0.13).contains(&share), "seed 7: {share}");
    }
}
