//! Sums of samples by stack, memory group and thread name.
//!
//! The peak is the moment at which the sum of the live bytes was highest. A new peak changes no
//! cell. A cell saves its value at the peak only before its first change afterwards.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::area::SampledAllocation;
use super::limits::ProfileLimits;
use super::sums::{Amount, Lifetimes, SampleSums};
use super::unwind::{Callers, CodePlace};

/// Name of threads beyond those whose names are kept.
const OTHER_THREADS: &str = "(other threads)";

/// The key of a sum of samples. Stacks and names are numbers that [`Collector`] gives.
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
    allocated: Amount,
    peak: Amount,
    freed: Lifetimes,
    /// Number of the peak whose value `peak` has. If [`Collector::peaks`] is higher, `live` has not
    /// changed since the last peak, so `live` is the value at that peak.
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
    /// The first entry is for samples without a stack.
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
    /// Samples that were left out because a limit was reached.
    pub(crate) left_out: u64,
}

impl Collector {
    /// Makes empty sums. Allocations count as allocated from the time `began` on.
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

    /// Returns the number of a stack. 0 if there is no room for another stack.
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
        let freed = Lifetimes::default();
        self.cells.push(SumCell { key, live, allocated, peak, freed, peak_of: self.peaks });
        self.by_key.insert(key, cell);
        Some(cell)
    }

    /// Adds a sampled allocation as a live one.
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

    /// Removes a sample from the live ones. `time` is that of its free, if known.
    pub(crate) fn freed(&mut self, number: u64, time: Option<u64>) {
        if let Some(sample) = self.live.remove(&number) {
            self.before_change(sample.cell);
            let cell = &mut self.cells[sample.cell as usize];
            cell.live.remove(sample.amount());
            if let Some(time) = time {
                cell.freed.add(Lifetimes::of(sample.amount().objects, sample.time, time));
            }
            self.total.remove(sample.amount());
        }
    }

    fn before_change(&mut self, cell: u32) {
        let cell = &mut self.cells[cell as usize];
        if cell.peak_of != self.peaks {
            (cell.peak, cell.peak_of) = (cell.live, self.peaks);
        }
    }

    /// Compares the live samples with the process's slots. Removes live samples that have no slot
    /// and were allocated before `until`. Returns the samples in slots that are not live here, if
    /// their number is at most `read`.
    ///
    /// # Errors
    /// Returns the error of `slots`. Nothing is removed then. `slots` must call its argument with
    /// each slot.
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
        gone.into_iter().for_each(|number| self.freed(number, None));
        Ok(unknown)
    }

    /// The sums, by key.
    pub(crate) fn cells(&self) -> &[SumCell] {
        &self.cells
    }

    /// The sums of a cell. Its peak is the value at which the live bytes of all were highest.
    pub(crate) fn sums(&self, cell: &SumCell) -> SampleSums {
        let SumCell { live, allocated, freed, .. } = *cell;
        SampleSums { live, allocated, peak: if cell.peak_of == self.peaks { cell.peak } else { live }, freed }
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
    fn peak_has_the_values_of_its_moment() {
        let mut collector = Collector::new(0, ProfileLimits::OWN);
        let bytes = |collector: &Collector, at: usize, peak: bool| {
            let cell = &collector.cells()[at];
            let of = if peak { collector.sums(cell).peak } else { cell.live };
            of.samples
        };
        collector.allocated(&sample(1, 9000, 1), &callers(1), "a");
        collector.allocated(&sample(2, 9000, 2), &callers(2), "a");
        collector.freed(1, Some(10));
        collector.allocated(&sample(3, 10, 3), &callers(3), "a");
        assert_eq!([0, 1, 2].map(|at| bytes(&collector, at, true)), [1, 1, 0], "the first peak");
        collector.allocated(&sample(4, 90_000, 4), &callers(2), "a");
        collector.freed(2, Some(10));
        collector.freed(3, Some(10));
        collector.freed(4, Some(10));
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
