//! Sums of samples by stack, memory group and thread name.
//!
//! A sample of a size is taken with the probability `p = 1 - exp(-size / mean)`, so it stands for
//! `1 / p` allocations. The sums are unbiased. The variance of a sum of bytes is estimated by the
//! sum of `size² (1 - p) / p²`.
//!
//! The peak is the moment at which the sum of the live bytes was highest. A cell keeps its value of
//! that moment when it first changes afterwards, so a new peak costs nothing.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::area::SampledAllocation;
use super::limits::ProfileLimits;
use super::unwind::{Callers, CodePlace};

/// Name of threads beyond those whose names are kept.
const OTHER_THREADS: &str = "(other threads)";

/// Estimated objects and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Amount {
    pub(crate) samples: u64,
    pub(crate) objects: f64,
    pub(crate) bytes: f64,
    /// Estimated variance of the bytes.
    variance: f64,
}

impl Amount {
    /// Estimates the allocations that a sample stands for: their number, bytes and variance.
    pub(crate) fn of(sample: &SampledAllocation) -> Amount {
        Amount::of_size(sample.size, sample.mean)
    }

    /// Estimates the allocations that a sample of `bytes` bytes stands for. `mean` is the average
    /// number of bytes between two samples.
    fn of_size(bytes: u64, mean: u64) -> Amount {
        let size = bytes.max(1) as f64;
        // A mean of 0 is damage, and one byte means that every allocation is sampled.
        let taken = -(-size / mean.max(1) as f64).exp_m1();
        let objects = 1.0 / taken;
        Amount {
            samples: 1,
            objects,
            bytes: bytes as f64 * objects,
            variance: size * size * (1.0 - taken) / taken / taken,
        }
    }

    /// An estimate of `objects` objects with `bytes` bytes, whose samples are no longer known.
    /// The error is that of objects of one size.
    pub(crate) fn of_sum(objects: f64, bytes: f64, mean: u64) -> Amount {
        if objects < 1.0 {
            return Amount::default();
        }
        let size = bytes / objects;
        let taken = -(-size.max(1.0) / mean.max(1) as f64).exp_m1();
        let variance = objects * size * size * (1.0 - taken) / taken;
        Amount { samples: (objects * taken).round().max(1.0) as u64, objects, bytes, variance }
    }

    pub(crate) fn add(&mut self, other: Amount) {
        self.samples += other.samples;
        self.objects += other.objects;
        self.bytes += other.bytes;
        self.variance += other.variance;
    }

    fn remove(&mut self, other: Amount) {
        self.samples = self.samples.saturating_sub(other.samples);
        if self.samples == 0 {
            *self = Amount::default();
            return;
        }
        self.objects = (self.objects - other.objects).max(0.0);
        self.bytes = (self.bytes - other.bytes).max(0.0);
        self.variance = (self.variance - other.variance).max(0.0);
    }

    /// Standard error of the bytes.
    pub(crate) fn error(self) -> f64 {
        self.variance.sqrt()
    }
}

/// What samples are summed by. Names and stacks are numbers of [`Collector`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) stack: u32,
    pub(crate) group: u64,
    pub(crate) thread: u32,
}

/// The sums of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumCell {
    pub(crate) key: Key,
    /// Live now.
    pub(crate) live: Amount,
    /// Allocated since the profile began.
    pub(crate) allocated: Amount,
    peak: Amount,
    /// Number of the peak at which `peak` was stored. If [`Collector::peaks`] is higher, `live` has
    /// not changed since the last peak, and is the value at that peak.
    peak_of: u64,
}

/// A stack of frames, the innermost first.
#[derive(Debug)]
pub(crate) struct SeenStack {
    pub(crate) frames: Rc<[CodePlace]>,
    pub(crate) samples: u64,
    /// Number of the samples whose callers were not found up to the start of the thread.
    pub(crate) incomplete: u64,
}

#[derive(Clone, Copy, Debug)]
struct LiveSample {
    cell: u32,
    size: u64,
    mean: u64,
    time: u64,
}

impl LiveSample {
    fn amount(&self) -> Amount {
        Amount::of_size(self.size, self.mean)
    }
}

/// The sums.
#[derive(Debug)]
pub(crate) struct Collector {
    limits: ProfileLimits,
    /// The first is that of samples without one.
    pub(crate) stacks: Vec<SeenStack>,
    by_stack: HashMap<Rc<[CodePlace]>, u32>,
    frames: usize,
    pub(crate) threads: Vec<Rc<str>>,
    by_thread: HashMap<Rc<str>, u32>,
    cells: Vec<SumCell>,
    by_key: HashMap<Key, u32>,
    live: HashMap<u64, LiveSample>,
    total: Amount,
    highest: f64,
    peaks: u64,
    /// Time from which allocations count as allocated.
    began: u64,
    /// Samples without a stack.
    pub(crate) without_stack: u64,
    /// Samples that found no room here.
    pub(crate) left_out: u64,
}

impl Collector {
    /// Sums of allocations from a time on, and of the samples that are live then.
    pub(crate) fn new(began: u64, limits: ProfileLimits) -> Collector {
        let mut collector = Collector {
            limits,
            stacks: Vec::new(),
            by_stack: HashMap::new(),
            frames: 0,
            threads: Vec::new(),
            by_thread: HashMap::new(),
            cells: Vec::new(),
            by_key: HashMap::new(),
            live: HashMap::new(),
            total: Amount::default(),
            highest: 0.0,
            peaks: 0,
            began,
            without_stack: 0,
            left_out: 0,
        };
        collector.stack(&Callers::default());
        collector.without_stack = 0;
        collector
    }

    /// The number of a stack; 0 if there is no room for another.
    fn stack(&mut self, callers: &Callers) -> u32 {
        if callers.frames.is_empty() {
            self.without_stack += 1;
        }
        let incomplete = u64::from(!callers.is_complete);
        if let Some(&stack) = self.by_stack.get(&callers.frames[..]) {
            self.stacks[stack as usize].samples += 1;
            self.stacks[stack as usize].incomplete += incomplete;
            return stack;
        }
        if self.stacks.len() >= self.limits.stacks || self.frames + callers.frames.len() > self.limits.frames {
            self.left_out += 1;
            return 0;
        }
        let (stack, frames) = (self.stacks.len() as u32, Rc::<[CodePlace]>::from(&callers.frames[..]));
        self.frames += frames.len();
        self.stacks.push(SeenStack { frames: frames.clone(), samples: 1, incomplete });
        self.by_stack.insert(frames, stack);
        stack
    }

    fn thread(&mut self, name: &str) -> u32 {
        if let Some(&thread) = self.by_thread.get(name) {
            return thread;
        }
        if self.threads.len() >= self.limits.threads && name != OTHER_THREADS {
            return self.thread(OTHER_THREADS);
        }
        let (thread, name) = (self.threads.len() as u32, Rc::<str>::from(name));
        self.threads.push(Rc::clone(&name));
        self.by_thread.insert(name, thread);
        thread
    }

    fn cell(&mut self, key: Key) -> Option<u32> {
        if let Some(&cell) = self.by_key.get(&key) {
            return Some(cell);
        }
        if self.cells.len() >= self.limits.cells {
            return None;
        }
        let cell = self.cells.len() as u32;
        let (live, allocated, peak) = (Amount::default(), Amount::default(), Amount::default());
        self.cells.push(SumCell { key, live, allocated, peak, peak_of: self.peaks });
        self.by_key.insert(key, cell);
        Some(cell)
    }

    /// Adds a sampled allocation, which is live.
    pub(crate) fn allocated(&mut self, sample: &SampledAllocation, callers: &Callers, thread: &str) {
        if self.live.contains_key(&sample.number) {
            return;
        }
        let (stack, thread) = (self.stack(callers), self.thread(thread));
        let Some(cell) = self.cell(Key { stack, group: sample.group, thread }) else {
            self.left_out += 1;
            return;
        };
        let amount = Amount::of(sample);
        self.before_change(cell);
        let of = &mut self.cells[cell as usize];
        if sample.time >= self.began {
            of.allocated.add(amount);
        }
        if self.live.len() >= self.limits.live {
            self.left_out += 1;
            return;
        }
        of.live.add(amount);
        let SampledAllocation { size, mean, time, .. } = *sample;
        self.live.insert(sample.number, LiveSample { cell, size, mean, time });
        self.total.add(amount);
        if self.total.bytes > self.highest {
            self.highest = self.total.bytes;
            self.peaks += 1;
        }
    }

    /// Removes a sample from the live ones.
    pub(crate) fn freed(&mut self, number: u64) {
        if let Some(sample) = self.live.remove(&number) {
            self.before_change(sample.cell);
            self.cells[sample.cell as usize].live.remove(sample.amount());
            self.total.remove(sample.amount());
        }
    }

    fn before_change(&mut self, cell: u32) {
        let cell = &mut self.cells[cell as usize];
        if cell.peak_of != self.peaks {
            (cell.peak, cell.peak_of) = (cell.live, self.peaks);
        }
    }

    /// Compares the live samples with those that the process has in slots. Removes those without a
    /// slot that were allocated before `until`, and returns the slots that are not known and whose
    /// number is at most `read`.
    ///
    /// # Errors
    /// The error of `slots`, which calls its argument with each slot.
    pub(crate) fn reconcile<E>(
        &mut self,
        slots: impl FnOnce(&mut dyn FnMut(SampledAllocation)) -> Result<(), E>,
        until: u64,
        read: u64,
    ) -> Result<Vec<SampledAllocation>, E> {
        let (mut numbers, mut unknown) = (HashSet::new(), Vec::new());
        slots(&mut |slot| {
            if self.live.contains_key(&slot.number) {
                numbers.insert(slot.number);
            } else if slot.number <= read {
                unknown.push(slot);
            }
        })?;
        let gone = self.live.iter().filter(|(number, sample)| sample.time < until && !numbers.contains(number));
        let gone: Vec<u64> = gone.map(|(&number, _)| number).collect();
        gone.into_iter().for_each(|number| self.freed(number));
        Ok(unknown)
    }

    /// The sums, by key.
    pub(crate) fn cells(&self) -> &[SumCell] {
        &self.cells
    }

    /// The value of a cell when the live bytes were highest.
    pub(crate) fn peak(&self, cell: &SumCell) -> Amount {
        if cell.peak_of == self.peaks { cell.peak } else { cell.live }
    }

    /// The live samples that were allocated before a time, by key.
    pub(crate) fn older_than(&self, time: u64) -> HashMap<Key, Amount> {
        let mut old: HashMap<Key, Amount> = HashMap::new();
        for sample in self.live.values().filter(|sample| sample.time < time) {
            old.entry(self.cells[sample.cell as usize].key).or_default().add(sample.amount());
        }
        old
    }

    /// All live samples.
    pub(crate) fn live_total(&self) -> Amount {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(number: u64, size: u64, time: u64) -> SampledAllocation {
        SampledAllocation { number, time, size, mean: 1000, ..SampledAllocation::default() }
    }

    fn callers(address: u64) -> Callers {
        Callers { frames: vec![CodePlace { file: None, address }], is_complete: true }
    }

    #[test]
    fn sums_of_samples_are_unbiased() {
        // A generator of numbers (xorshift).
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        for size in [8, 100, 1000, 5000, 100_000] {
            let (mut sum, count) = (Amount::default(), 200_000);
            for _ in 0..count {
                if uniform() < 1.0 - (-(size as f64) / 1000.0).exp() {
                    sum.add(Amount::of(&sample(1, size, 0)));
                }
            }
            let (objects, bytes) = (f64::from(count), f64::from(count) * size as f64);
            let errors = (sum.bytes - bytes).abs() / sum.error().max(bytes * 1e-9);
            assert!(errors < 4.5, "size {size}: {} for {bytes}, {errors} standard errors", sum.bytes);
            assert!((sum.objects / objects - sum.bytes / bytes).abs() < 1e-6);
        }
        assert!(
            Amount::of(&SampledAllocation { size: 0, mean: 0, ..SampledAllocation::default() }).objects.is_finite()
        );
        assert!(
            Amount::of(&SampledAllocation { size: 1, mean: u64::MAX, ..SampledAllocation::default() })
                .objects
                .is_finite()
        );
    }

    #[test]
    fn sums_without_samples_have_their_error() {
        let (mut sum, each) = (Amount::default(), sample(1, 300, 0));
        (0..40).for_each(|_| sum.add(Amount::of(&each)));
        let again = Amount::of_sum(sum.objects, sum.bytes, 1000);
        assert_eq!(again.samples, 40);
        assert!((again.error() / sum.error() - 1.0).abs() < 1e-9, "{} {}", again.error(), sum.error());
        assert_eq!(Amount::of_sum(0.0, 0.0, 1000), Amount::default());
        assert!(Amount::of_sum(7.0, 0.0, 0).error().is_finite());
    }

    #[test]
    fn peak_has_the_values_of_its_moment() {
        let mut collector = Collector::new(0, ProfileLimits::OWN);
        let bytes = |collector: &Collector, at: usize, peak: bool| {
            let cell = &collector.cells()[at];
            let of = if peak { collector.peak(cell) } else { cell.live };
            of.samples
        };
        collector.allocated(&sample(1, 9000, 1), &callers(1), "a");
        collector.allocated(&sample(2, 9000, 2), &callers(2), "a");
        collector.freed(1);
        collector.allocated(&sample(3, 10, 3), &callers(3), "a");
        assert_eq!([0, 1, 2].map(|at| bytes(&collector, at, true)), [1, 1, 0], "the first peak");
        collector.allocated(&sample(4, 90_000, 4), &callers(2), "a");
        collector.freed(2);
        collector.freed(3);
        collector.freed(4);
        assert_eq!([0, 1, 2].map(|at| bytes(&collector, at, true)), [0, 2, 1], "a higher one");
        assert_eq!([0, 1, 2].map(|at| bytes(&collector, at, false)), [0, 0, 0]);
        assert_eq!(collector.live_total(), Amount::default());
        let allocated: Vec<u64> = collector.cells().iter().map(|cell| cell.allocated.samples).collect();
        assert_eq!(allocated, [1, 2, 1]);
    }

    #[test]
    fn live_samples_are_compared_with_the_slots() {
        let mut collector = Collector::new(2, ProfileLimits::OWN);
        collector.allocated(&sample(1, 100, 1), &callers(1), "a");
        collector.allocated(&sample(2, 100, 5), &callers(1), "a");
        collector.allocated(&sample(3, 100, 9), &callers(1), "a");
        assert_eq!(collector.cells()[0].allocated.samples, 2, "the first is older than the profile");
        let slots = [sample(1, 100, 1), sample(7, 50, 3), sample(9, 50, 8)];
        let each = |to: &mut dyn FnMut(SampledAllocation)| {
            slots.into_iter().for_each(to);
            Ok::<_, ()>(())
        };
        let missing = collector.reconcile(each, 8, 8).unwrap();
        assert_eq!(missing.iter().map(|sample| sample.number).collect::<Vec<_>>(), [7]);
        assert_eq!(collector.live_total().samples, 2, "2 is gone, and 3 is too young to be missed");
        assert_eq!(collector.older_than(5).values().map(|amount| amount.samples).sum::<u64>(), 1);
    }
}
