//! The set of CPUs on which a structure was used.
//!
//! Per-CPU state is made when a thread first uses it on a CPU. With this set, walks skip CPUs that
//! have no state, and their memory stays untouched. The set has no lock. CPUs are never removed
//! from it, since the state of a CPU is never removed.

use crate::topology::{CpuSet, MAX_CPUS};
use core::sync::atomic::{AtomicU64, Ordering};

/// A set of CPU ids below [`MAX_CPUS`] that threads add to at any time.
#[derive(Debug)]
pub struct UsedCpus {
    words: [AtomicU64; MAX_CPUS / 64],
}

impl UsedCpus {
    /// A set without members.
    pub const fn new() -> UsedCpus {
        UsedCpus { words: [const { AtomicU64::new(0) }; MAX_CPUS / 64] }
    }

    /// Adds `cpu`; ids from [`MAX_CPUS`] on are ignored.
    pub fn insert(&self, cpu: usize) {
        if let Some(word) = self.words.get(cpu / 64) {
            // Release pairs with the Acquire loads below: a thread that finds the CPU finds its
            // state.
            word.fetch_or(1 << (cpu % 64), Ordering::Release);
        }
    }

    /// Whether `cpu` is in the set.
    #[inline]
    pub fn contains(&self, cpu: usize) -> bool {
        // Acquire pairs with the Release in `insert`.
        self.words.get(cpu / 64).is_some_and(|word| word.load(Ordering::Acquire) >> (cpu % 64) & 1 == 1)
    }

    /// A copy of the set at this moment.
    pub fn now(&self) -> CpuSet {
        let mut set = CpuSet::EMPTY;
        // Acquire pairs with the Release in `insert`.
        let words = self.words.iter().map(|word| word.load(Ordering::Acquire));
        set.words_mut().iter_mut().zip(words).for_each(|(word, now)| *word = now);
        set
    }
}

impl Default for UsedCpus {
    fn default() -> Self {
        UsedCpus::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn set_has_the_cpus_that_were_added() {
        let used = UsedCpus::new();
        assert_eq!(used.now(), CpuSet::EMPTY);
        [1023, 64, 0, 63, 64, MAX_CPUS, usize::MAX].into_iter().for_each(|cpu| used.insert(cpu));
        assert_eq!(used.now().iter().collect::<Vec<_>>(), [0, 63, 64, 1023]);
        assert!([0, 63, 64, 1023].iter().all(|&cpu| used.contains(cpu)));
        assert!(![1, 62, 65, 1022, MAX_CPUS, usize::MAX].iter().any(|&cpu| used.contains(cpu)));
    }
}
