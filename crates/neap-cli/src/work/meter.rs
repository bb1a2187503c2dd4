//! Clock, processor time, faults, resident memory and tables. Nothing here uses the heap, since a
//! measurement must not call the measured `malloc`. This module has no lock.

use std::ffi::CStr;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Outcome;
use crate::process;

/// A running measurement.
pub(super) struct Meter {
    started: Instant,
    usage: libc::rusage,
}

/// Resources used since a meter started.
#[derive(Clone, Copy)]
pub(super) struct Spent {
    wall: Duration,
    cpu_ns: u64,
    system_ns: u64,
    minor_faults: u64,
    voluntary_switches: u64,
    involuntary_switches: u64,
}

impl Meter {
    pub(super) fn start() -> Meter {
        let usage = own_usage();
        Meter { started: Instant::now(), usage }
    }

    pub(super) fn stop(&self) -> Spent {
        let wall = self.started.elapsed();
        let usage = own_usage();
        let difference = |after: i64, before: i64| (after - before).max(0) as u64;
        Spent {
            wall,
            cpu_ns: process::cpu_ns(&usage).saturating_sub(process::cpu_ns(&self.usage)),
            system_ns: process::system_ns(&usage).saturating_sub(process::system_ns(&self.usage)),
            minor_faults: difference(usage.ru_minflt, self.usage.ru_minflt),
            voluntary_switches: difference(usage.ru_nvcsw, self.usage.ru_nvcsw),
            involuntary_switches: difference(usage.ru_nivcsw, self.usage.ru_nivcsw),
        }
    }
}

impl Spent {
    pub(super) fn cpu_ns(&self) -> u64 {
        self.cpu_ns
    }

    /// The part of `cpu_ns` that the kernel took.
    pub(super) fn system_ns(&self) -> u64 {
        self.system_ns
    }

    /// Returns the sum of `self` and `other`.
    pub(super) fn and(self, other: Spent) -> Spent {
        Spent {
            wall: self.wall + other.wall,
            cpu_ns: self.cpu_ns + other.cpu_ns,
            system_ns: self.system_ns + other.system_ns,
            minor_faults: self.minor_faults + other.minor_faults,
            voluntary_switches: self.voluntary_switches + other.voluntary_switches,
            involuntary_switches: self.involuntary_switches + other.involuntary_switches,
        }
    }

    pub(super) fn wall(&self) -> Duration {
        self.wall
    }

    pub(super) fn outcome(&self, operations: u64) -> Outcome {
        Outcome {
            operations,
            wall_ns: self.wall.as_nanos() as u64,
            cpu_ns: self.cpu_ns,
            minor_faults: self.minor_faults,
            voluntary_switches: self.voluntary_switches,
            involuntary_switches: self.involuntary_switches,
            ..Outcome::default()
        }
    }
}

fn own_usage() -> libc::rusage {
    // SAFETY: all-zero bytes are a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live local; RUSAGE_SELF cannot fail.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    usage
}

/// Processor time of the calling thread.
pub(crate) fn thread_cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live local; every thread has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Resident memory of this process in KiB.
pub(super) fn own_rss_kib() -> Result<u64> {
    own_kib(c"/proc/self/smaps_rollup", b"Rss:")
}

/// Largest resident memory of this process so far in KiB.
pub(super) fn own_peak_kib() -> Result<u64> {
    own_kib(c"/proc/self/status", b"VmHWM:")
}

/// The number of the line of `path` that begins with `name`.
fn own_kib(path: &CStr, name: &[u8]) -> Result<u64> {
    let mut text = [0u8; 4096];
    // SAFETY: the path is a string.
    let file = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if file < 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("cannot open {}", path.to_string_lossy()));
    }
    // SAFETY: the buffer is a live local of this length.
    let length = unsafe { libc::read(file, text.as_mut_ptr().cast(), text.len()) };
    // SAFETY: the descriptor was opened above, and is used nowhere else.
    unsafe { libc::close(file) };
    let found = process::parse_kib(&text[..length.max(0) as usize], name);
    found.with_context(|| format!("{} has no line {}", path.to_string_lossy(), String::from_utf8_lossy(name)))
}

/// The CPUs that this thread may use, lowest first.
pub(crate) fn cpus() -> Result<Vec<usize>> {
    // SAFETY: all-zero bytes are an empty CPU set.
    let mut allowed: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the size is that of the live local.
    let answer = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut allowed) };
    if answer != 0 {
        return Err(io::Error::last_os_error()).context("sched_getaffinity");
    }
    // SAFETY: the set is initialised and the numbers are below CPU_SETSIZE.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &allowed) }).collect())
}

/// Keeps this thread on one CPU.
pub(crate) fn pin_to(cpu: usize) -> Result<()> {
    // SAFETY: all-zero bytes are an empty CPU set.
    let mut only: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: CPU numbers come from `cpus`, so this one is below CPU_SETSIZE.
    unsafe { libc::CPU_SET(cpu, &mut only) };
    // SAFETY: the size is that of the live local.
    if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &only) } != 0 {
        return Err(io::Error::last_os_error()).context("sched_setaffinity");
    }
    Ok(())
}

/// Nanoseconds of one `pair`: the median of many short parts, so that a short preemption is not
/// measured.
pub(crate) fn median_of_pairs(mut pair: impl FnMut() -> Result<()>) -> Result<f64> {
    const PARTS: usize = 500;
    const PAIRS: u32 = 200;
    let mut parts = [0.0; PARTS];
    // The first `PARTS` parts warm up.
    for part in [0; PARTS].into_iter().chain(0..PARTS) {
        let start = Instant::now();
        for _ in 0..PAIRS {
            pair()?;
        }
        parts[part] = start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS);
    }
    parts.sort_unstable_by(f64::total_cmp);
    Ok(parts[PARTS / 2])
}

/// Keeps this thread on the last CPU it may use.
pub(super) fn pin() -> Result<()> {
    pin_to(*cpus()?.last().context("this thread may run on no CPU")?)
}

/// Addresses of blocks, in populated memory that is unmapped when this is dropped.
pub(super) struct BlockTable {
    base: NonNull<*mut u8>,
    length: usize,
}

// SAFETY: the table owns its mapping, and never dereferences the addresses in it.
unsafe impl Send for BlockTable {}

impl BlockTable {
    pub(super) fn new(length: usize) -> Result<BlockTable> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let bytes = length.max(1) * size_of::<*mut u8>();
        // SAFETY: the call creates a new mapping at an address that the kernel chooses, so it
        // replaces none.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).with_context(|| format!("cannot map a table of {bytes} bytes"));
        }
        let base = NonNull::new(base.cast()).context("mmap gave address 0")?;
        Ok(BlockTable { base, length })
    }
}

impl Deref for BlockTable {
    type Target = [*mut u8];

    fn deref(&self) -> &[*mut u8] {
        // SAFETY: the mapping has this many zero-initialised words and lives as long as self.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }
}

impl DerefMut for BlockTable {
    fn deref_mut(&mut self) -> &mut [*mut u8] {
        // SAFETY: the mapping has this many zero-initialised words, lives as long as self, and self
        // is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.length) }
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length.max(1) * size_of::<*mut u8>()) };
    }
}

/// A block of `size` bytes whose first byte, and one byte of each further page, is written.
pub(super) fn take(size: usize) -> *mut u8 {
    // SAFETY: malloc may be called with any size.
    let block = unsafe { libc::malloc(std::hint::black_box(size)) }.cast::<u8>();
    assert!(!block.is_null(), "malloc({size}) failed");
    let mut offset = 0;
    while offset < size {
        // SAFETY: the offset is inside the block.
        unsafe { block.add(offset).write_volatile(1) };
        offset += 4096;
    }
    block
}

/// Frees a block.
///
/// # Safety
/// `block` came from [`take`] or is null, is not used again, and is freed once.
pub(super) unsafe fn give(block: *mut u8) {
    // SAFETY: `take` got the block from malloc, and it is freed once (the caller's promise).
    unsafe { libc::free(block.cast()) };
}

/// Returns the number of pages with bytes of blocks, of which there are at most `most`. Each block
/// has an address and a size that is not 0.
pub(super) fn pages_of(most: usize, blocks: impl Iterator<Item = (*mut u8, usize)>) -> Result<usize> {
    // SAFETY: sysconf takes a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    // `touched` has the first and the last page of each block. `between` counts the pages between
    // them. No block has page 0.
    let mut touched = BlockTable::new(2 * most)?;
    let mut between = 0;
    for (ends, (block, size)) in touched.chunks_exact_mut(2).zip(blocks) {
        let (first, last) = (block.addr() / page, (block.addr() + size - 1) / page);
        ends.copy_from_slice(&[first, last].map(std::ptr::without_provenance_mut));
        between += (last - first).saturating_sub(1);
    }
    touched.sort_unstable();
    let pairs = touched.iter().zip(touched.iter().skip(1));
    let ends = pairs.filter(|(one, next)| one != next).count() + usize::from(!touched[0].is_null());
    Ok(ends + between)
}

/// A xorshift generator. A seed gives every allocator the same sequence of sizes and places.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number of 64 bits, not 0.
    pub(crate) fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (((self.draw() >> 32) * bound as u64) >> 32) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_holds_what_is_put_in_and_goes_back() {
        let mut table = BlockTable::new(8 << 20).unwrap();
        assert!(table.iter().all(|entry| entry.is_null()));
        let with_table = own_rss_kib().unwrap();
        table[5] = 77 as *mut u8;
        assert_eq!(table[5] as usize, 77);
        drop(table);
        assert!(own_rss_kib().unwrap() < with_table);
        assert!(own_peak_kib().unwrap() >= 64 << 10, "the table was part of the peak");
    }

    #[test]
    fn random_numbers_are_in_range_and_repeatable() {
        let (mut one, mut two) = (Random::new(7), Random::new(7));
        let drawn: Vec<usize> = (0..1000).map(|_| one.below(10)).collect();
        assert!(drawn.iter().all(|&number| number < 10) && (0..10).all(|number| drawn.contains(&number)));
        assert!(drawn.iter().all(|&number| number == two.below(10)));
    }

    #[test]
    fn blocks_are_written_and_the_meter_sees_the_faults() {
        let meter = Meter::start();
        // From 32 MiB on the C library maps each block anew, whatever other tests have freed.
        let block = take(33 << 20);
        // SAFETY: the block came from `take`, and is freed once.
        unsafe { give(block) };
        assert!(meter.stop().outcome(1).minor_faults > 0);
    }
}
