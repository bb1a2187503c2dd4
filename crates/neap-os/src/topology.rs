//! The machine's CPUs, from `/sys/devices/system`.
//!
//! CPU ids may be sparse, and more may be possible than online. Tables with one entry per CPU are
//! therefore sized by the highest possible id. Without a readable `/sys`, all CPUs up to the
//! highest that this thread may run on count as possible. Files are read at start-up only. This
//! module keeps no state.

use crate::cpuset;
use crate::environment::read_file;
use core::ffi::CStr;

/// Maximum number of CPUs in neap's tables. Threads on higher ids use the shared paths.
pub const MAX_CPUS: usize = 1024;

/// A set of CPU ids below [`MAX_CPUS`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuSet {
    words: [u64; MAX_CPUS / 64],
}

impl CpuSet {
    /// A set without members.
    pub const EMPTY: CpuSet = CpuSet { words: [0; MAX_CPUS / 64] };

    /// Adds `cpu`; ids from [`MAX_CPUS`] on are ignored.
    pub fn insert(&mut self, cpu: usize) {
        if let Some(word) = self.words.get_mut(cpu / 64) {
            *word |= 1 << (cpu % 64);
        }
    }

    /// Adds all CPUs of `more`.
    pub fn insert_all(&mut self, more: &CpuSet) {
        self.words.iter_mut().zip(more.words).for_each(|(word, more)| *word |= more);
    }

    /// Removes `cpu`.
    pub fn remove(&mut self, cpu: usize) {
        if let Some(word) = self.words.get_mut(cpu / 64) {
            *word &= !(1 << (cpu % 64));
        }
    }

    /// Whether `cpu` is in the set.
    pub fn contains(&self, cpu: usize) -> bool {
        self.words.get(cpu / 64).is_some_and(|word| word >> (cpu % 64) & 1 == 1)
    }

    /// Removes the CPUs that are not in `other`.
    pub fn intersect(&mut self, other: &CpuSet) {
        self.words.iter_mut().zip(other.words).for_each(|(word, other)| *word &= other);
    }

    /// The CPUs of the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + use<> {
        let words = self.words;
        let mut rest = (0, words[0]);
        core::iter::from_fn(move || {
            while rest.1 == 0 {
                rest = (rest.0 + 1, *words.get(rest.0 + 1)?);
            }
            let bit = rest.1.trailing_zeros() as usize;
            rest.1 &= rest.1 - 1;
            Some(rest.0 * 64 + bit)
        })
    }

    pub(crate) fn words_mut(&mut self) -> &mut [u64; MAX_CPUS / 64] {
        &mut self.words
    }

    /// Number of CPUs in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The highest id in the set; `None` if it is empty.
    pub fn last(&self) -> Option<usize> {
        let word = self.words.iter().rposition(|&word| word != 0)?;
        Some(word * 64 + 63 - self.words[word].leading_zeros() as usize)
    }

    /// Parses the kernel's list `text`; `None` if it is not a list.
    pub fn parse(text: &[u8]) -> Option<CpuSet> {
        let mut set = CpuSet::EMPTY;
        let parsed = cpuset::parse(text, |low, high| {
            for cpu in low as usize..=(high as usize).min(MAX_CPUS - 1) {
                set.insert(cpu);
            }
        });
        parsed.ok().map(|()| set)
    }

    /// Reads and parses a file; `None` if it cannot be read or is not a list.
    ///
    /// Not inlined, so that the stack of a process's first `malloc` holds one buffer, and not one
    /// for each file.
    #[inline(never)]
    fn read(path: &CStr) -> Option<CpuSet> {
        let mut text = [0; 4096];
        CpuSet::parse(read_file(path, &mut text).ok()?)
    }
}

/// The machine's CPUs.
#[derive(Clone, Copy, Debug)]
pub struct Topology {
    /// CPUs that may come online.
    pub possible: CpuSet,
    /// CPUs that the administrator removed from general scheduling (`isolcpus`, `nohz_full`), or
    /// that the user named by an option. neap neither fences nor interrupts them.
    pub isolated: CpuSet,
}

impl Topology {
    /// Reads `/sys`.
    pub fn read() -> Topology {
        let possible = CpuSet::read(c"/sys/devices/system/cpu/possible").filter(|set| set.count() > 0);
        let mut isolated = CpuSet::read(c"/sys/devices/system/cpu/isolated").unwrap_or(CpuSet::EMPTY);
        if let Some(full) = CpuSet::read(c"/sys/devices/system/cpu/nohz_full") {
            isolated.insert_all(&full);
        }
        Topology { possible: possible.unwrap_or_else(allowed), isolated }
    }

    /// Length of a table with one entry per CPU.
    pub fn table_length(&self) -> usize {
        self.possible.last().map_or(1, |last| last + 1)
    }
}

/// Upper bound of the kernel's CPU ids. The CPU id of each thread is below it. `sched_getaffinity`
/// provides it, even without `/sys`.
pub fn nameable() -> usize {
    // Room for the largest kernels: 8192 CPUs.
    let mut mask = [0_u64; 128];
    let number = linux_raw_sys::general::__NR_sched_getaffinity as usize;
    // SAFETY: the call states the mask's length, and the kernel writes no more bytes than that.
    let bytes =
        unsafe { crate::syscall::syscall5(number, 0, size_of_val(&mask), mask.as_mut_ptr().expose_provenance(), 0, 0) };
    // The kernel returns the size of its own masks, which have a bit for every id.
    bytes.map_or(8192, |bytes| bytes * 8)
}

/// All CPUs up to the highest that this thread may run on.
fn allowed() -> CpuSet {
    let mut set = CpuSet::EMPTY;
    let mask = rustix::thread::sched_getaffinity(None);
    let last = (0..MAX_CPUS)
        .rev()
        .find(|&cpu| mask.as_ref().is_ok_and(|mask| cpu < rustix::thread::CpuSet::MAX_CPU && mask.is_set(cpu)));
    for cpu in 0..=last.unwrap_or(0) {
        set.insert(cpu);
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_ids_size_the_tables_by_the_highest() {
        let possible = CpuSet::parse(b"0-1,64,127\n").unwrap();
        let topology = Topology { possible, isolated: CpuSet::EMPTY };
        assert_eq!((possible.count(), topology.table_length()), (4, 128));
        assert!(possible.contains(64) && !possible.contains(2) && !possible.contains(MAX_CPUS));
    }

    #[test]
    fn ids_beyond_the_tables_are_left_out() {
        let set = CpuSet::parse(b"1020-5000").unwrap();
        assert_eq!((set.count(), set.last()), (4, Some(MAX_CPUS - 1)));
    }

    #[test]
    fn this_machine_has_a_cpu() {
        let topology = Topology::read();
        assert!(topology.table_length() >= 1 && topology.possible.count() >= 1);
        assert!(allowed().count() >= 1);
        assert!(nameable() >= topology.table_length() && nameable() <= 8192);
    }
}
