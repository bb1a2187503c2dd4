//! A simulated machine for tests: any page size, any number of CPUs, its own time, and failing
//! calls.
//!
//! It takes the place of [`Linux`](neap_base::Linux). Memory is real memory of this process, so
//! tests can check contents. All else is a number that the test sets. A thread-local of the test
//! holds the virtual CPU of a thread. Restartable sequences need a real CPU, so a virtual machine
//! has Atomic stacks only, unless a test requests sequences.

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use neap_base::listed_enum;
use neap_base::platform::{HugePageSupply, Platform, Room};
#[cfg(not(miri))]
use neap_os::memory;
use neap_os::memory::{HugePages, Range};
use neap_os::nodes::{LOCAL, NearestNode};
use neap_os::topology::CpuSet;
use neap_os::{Errno, fence};
use std::sync::Mutex;

#[cfg(miri)]
mod memory;

listed_enum! {
    /// Calls that a test can make fail.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(usize)]
    pub enum Call {
        /// [`Platform::map_at`].
        MapAt,
        /// [`Platform::map`].
        Map,
        /// [`Platform::reserve`].
        Reserve,
        /// [`Platform::open`].
        Open,
        /// [`Platform::release`].
        Release,
        /// [`Platform::release_scattered`].
        ReleaseScattered,
        /// [`Platform::populate`].
        Populate,
        /// [`Platform::move_pages`].
        MovePages,
        /// [`Platform::fence`].
        Fence,
        /// [`Platform::bind`].
        Bind,
        /// [`Platform::huge_pages`].
        HugePages,
        /// [`Platform::release_lazily`].
        ReleaseLazily,
        /// [`Platform::room`].
        Room,
    }
}

const CALLS: usize = Call::ALL.len();

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

/// A virtual machine.
#[derive(Debug)]
pub struct Virtual {
    page_size: usize,
    cpus: usize,
    scarce: bool,
    /// Bytes of the largest gap in the address space.
    address_space: usize,
    /// The nearest node of each CPU.
    nearest: Vec<usize>,
    /// Ranges that were bound, or unmapped (`None`): address, length, node.
    bound: Mutex<Vec<(usize, usize, Option<usize>)>>,
    /// Whether a refused move has unmapped its destination.
    moves_unmap: AtomicBool,
    /// Whether huge pages are used wherever a program does not refuse them.
    huge_page_supply: HugePageSupply,
    /// Calls about huge pages: address, length, allowed.
    advice: Mutex<Vec<(usize, usize, bool)>>,
    /// See [`Virtual::splits`].
    splits: AtomicU64,
    isolated: CpuSet,
    isolated_in_use: AtomicBool,
    /// Whether all memory is locked.
    locked: AtomicBool,
    sequences: Option<isize>,
    now: AtomicU64,
    made: [AtomicUsize; CALLS],
    /// Calls that succeed before `failures` calls fail in a row. Without failures, all succeed.
    countdown: [AtomicUsize; CALLS],
    failures: [AtomicUsize; CALLS],
    released: AtomicU64,
    /// Bytes released lazily.
    offered: AtomicU64,
    /// Bytes mapped and not unmapped.
    mapped: AtomicUsize,
    room: Mutex<RoomSource>,
    /// See [`Virtual::set_resident`]; `u64::MAX` if it was not called.
    resident: AtomicU64,
}

/// A test's answer to [`Platform::room`].
struct RoomSource(Option<std::sync::Arc<dyn Fn() -> Room + Send + Sync>>);

impl core::fmt::Debug for RoomSource {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("RoomSource").field(&self.0.is_some()).finish()
    }
}

impl Virtual {
    /// Creates a machine with pages of `page_size` bytes and `cpus` CPUs. The page size must be a
    /// multiple of the real one.
    pub fn new(page_size: usize, cpus: usize) -> Virtual {
        assert!(page_size.is_power_of_two() && page_size.is_multiple_of(memory::page_size()) && cpus > 0);
        let zeros = || [const { AtomicUsize::new(0) }; CALLS];
        Virtual {
            page_size,
            cpus,
            scarce: false,
            address_space: usize::MAX,
            nearest: Vec::new(),
            bound: Mutex::new(Vec::new()),
            moves_unmap: AtomicBool::new(false),
            huge_page_supply: HugePageSupply::OnRequest,
            advice: Mutex::new(Vec::new()),
            splits: AtomicU64::new(0),
            isolated: CpuSet::EMPTY,
            isolated_in_use: AtomicBool::new(false),
            locked: AtomicBool::new(false),
            sequences: None,
            now: AtomicU64::new(1_000_000_000),
            made: zeros(),
            countdown: zeros(),
            failures: zeros(),
            released: AtomicU64::new(0),
            offered: AtomicU64::new(0),
            mapped: AtomicUsize::new(0),
            room: Mutex::new(RoomSource(None)),
            resident: AtomicU64::new(u64::MAX),
        }
    }

    /// Makes address space scarce.
    pub fn with_scarce_address_space(self) -> Virtual {
        Virtual { scarce: true, ..self }
    }

    /// Makes the address space so small that its largest gap has `bytes`. The addresses of the
    /// first eight hints do not exist then.
    pub fn with_address_space(self, bytes: usize) -> Virtual {
        Virtual { address_space: bytes, ..self }
    }

    /// Adds nodes; `nearest` holds the nearest node of every CPU. The nodes lie in a row: distance
    /// grows with the difference of their numbers.
    pub fn with_nodes(self, nearest: &[usize]) -> Virtual {
        assert_eq!(nearest.len(), self.cpus);
        Virtual { nearest: nearest.to_vec(), ..self }
    }

    /// The node that an address was bound to; `None` if it was not, or was unmapped since.
    pub fn bound_to(&self, address: usize) -> Option<usize> {
        let bound = self.bound.lock().expect("no thread panics with it");
        bound.iter().rev().find(|(start, length, _)| (*start..start + length).contains(&address))?.2
    }

    fn note_advice(&self, address: usize, length: usize, allowed: bool) {
        self.advice.lock().expect("no thread panics with it").push((address, length, allowed));
    }

    fn note_bound(&self, address: usize, length: usize, node: Option<usize>) {
        self.bound.lock().expect("no thread panics with it").push((address, length, node));
    }

    /// Lets a refused move leave its destination unmapped, as Linux does before 6.17.
    pub fn let_refused_moves_unmap(&self) {
        self.moves_unmap.store(true, Ordering::Relaxed);
    }

    /// Uses huge pages wherever a program does not refuse them. As Linux before 6.17, it refuses to
    /// move pages of a range that allows huge pages in parts only, which is several mappings.
    pub fn with_huge_pages_for_all(self) -> Virtual {
        self.with_huge_page_supply(HugePageSupply::Everywhere)
    }

    /// Sets what the system does with huge pages.
    pub fn with_huge_page_supply(self, huge_page_supply: HugePageSupply) -> Virtual {
        Virtual { huge_page_supply, ..self }
    }

    /// Whether huge pages may back an address, by the latest call about it.
    pub fn allows_huge_pages(&self, address: usize) -> bool {
        let advice = self.advice.lock().expect("no thread panics with it");
        advice
            .iter()
            .rev()
            .find(|(start, length, _)| (*start..start + length).contains(&address))
            .is_some_and(|last| last.2)
    }

    /// Number of calls that split a huge page so far.
    pub fn splits(&self) -> u64 {
        self.splits.load(Ordering::Relaxed)
    }

    /// Isolates CPUs.
    pub fn with_isolated(self, isolated: CpuSet) -> Virtual {
        Virtual { isolated, ..self }
    }

    /// Uses the restartable sequences and fences of the real machine, if it has them. They go by
    /// the real CPU of a thread.
    pub fn with_sequences(self) -> Virtual {
        let sequences = fence::register().ok().and_then(|()| neap_os::rseq::registered_offset());
        Virtual { sequences, ..self }
    }

    /// Has `room` answer how much memory the container leaves.
    pub fn set_room(&self, room: impl Fn() -> Room + Send + Sync + 'static) {
        *self.room.lock().expect("no holder panics") = RoomSource(Some(std::sync::Arc::new(room)));
    }

    /// Sets how many bytes of the process are resident.
    pub fn set_resident(&self, bytes: u64) {
        self.resident.store(bytes, Ordering::Relaxed);
    }

    /// Sets whether a thread runs on an isolated CPU.
    pub fn use_isolated_cpu(&self, in_use: bool) {
        self.isolated_in_use.store(in_use, Ordering::Relaxed);
    }

    /// Sets whether all memory of the process is locked.
    pub fn lock_memory(&self, locked: bool) {
        self.locked.store(locked, Ordering::Relaxed);
    }

    /// Puts the calling thread on a CPU, for every virtual machine.
    pub fn run_on(cpu: usize) {
        CPU.set(cpu);
    }

    /// Lets time pass.
    pub fn advance(&self, nanoseconds: u64) {
        self.now.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Lets `call` succeed `successes` more times, then fail `failures` times, then succeed again.
    pub fn fail(&self, call: Call, successes: usize, failures: usize) {
        self.countdown[call as usize].store(successes, Ordering::Relaxed);
        self.failures[call as usize].store(failures, Ordering::Relaxed);
    }

    /// Number of times that `call` was made.
    pub fn made(&self, call: Call) -> usize {
        self.made[call as usize].load(Ordering::Relaxed)
    }

    /// Bytes released so far.
    pub fn released_bytes(&self) -> u64 {
        self.released.load(Ordering::Relaxed)
    }

    /// Bytes released lazily so far.
    pub fn offered_bytes(&self) -> u64 {
        self.offered.load(Ordering::Relaxed)
    }

    /// Bytes that are mapped at the moment.
    pub fn mapped_bytes(&self) -> usize {
        self.mapped.load(Ordering::Relaxed)
    }

    fn attempt(&self, call: Call) -> Result<(), Errno> {
        let call = call as usize;
        self.made[call].fetch_add(1, Ordering::Relaxed);
        let less =
            |counter: &AtomicUsize| counter.try_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        if self.failures[call].load(Ordering::Relaxed) == 0 || less(&self.countdown[call]).is_ok() {
            return Ok(());
        }
        if less(&self.failures[call]).is_ok() { Err(Errno::NOMEM) } else { Ok(()) }
    }
}

impl Platform for Virtual {
    fn page_size(&self) -> usize {
        self.page_size
    }

    fn address_hint(&self, attempt: u32, span: usize) -> Result<usize, Errno> {
        // Each machine of the process gets the next part of 16 TiB. Parts overlap only after all 16
        // TiB were used.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let chunk = self.page_size << 10;
        // The caller aligns the address to a chunk.
        let part = span.next_multiple_of(1 << 30) + chunk;
        match attempt {
            0..8 if self.address_space < usize::MAX => Ok(1 << 62),
            _ if part > self.address_space => Err(Errno::NOMEM),
            _ => Ok(0x1800_0000_0000 + NEXT.fetch_add(part, Ordering::Relaxed) % (1 << 44)),
        }
    }

    fn address_space_is_scarce(&self) -> bool {
        self.scarce
    }

    fn is_grantable(&self, length: usize) -> bool {
        memory::is_grantable(length)
    }

    fn map_at(&self, address: usize, length: usize) -> Result<(), Errno> {
        self.attempt(Call::MapAt)?;
        memory::map_at(address, length)?;
        self.mapped.fetch_add(length, Ordering::Relaxed);
        // Independent of the system's setting: tests count resident memory by the page.
        let _ = memory::huge_pages(address, length, HugePages::Forbidden);
        Ok(())
    }

    fn map(&self, length: usize) -> Result<usize, Errno> {
        self.attempt(Call::Map)?;
        memory::map(length).inspect(|_| _ = self.mapped.fetch_add(length, Ordering::Relaxed))
    }

    fn reserve(&self, length: usize) -> Result<usize, Errno> {
        self.attempt(Call::Reserve)?;
        if length > self.address_space {
            return Err(Errno::NOMEM);
        }
        memory::reserve(length).inspect(|_| _ = self.mapped.fetch_add(length, Ordering::Relaxed))
    }

    unsafe fn open(&self, address: usize, length: usize) -> Result<(), Errno> {
        self.attempt(Call::Open)?;
        // SAFETY: the caller promises that the range lies in address space from `reserve`.
        unsafe { memory::open(address, length) }
    }

    unsafe fn unmap(&self, address: usize, length: usize) {
        // SAFETY: the caller promises that no code uses the range any more.
        unsafe { memory::unmap(address, length) }.expect("a mapping of the test's own goes away");
        self.note_bound(address, length, None);
        self.mapped.fetch_sub(length, Ordering::Relaxed);
    }

    unsafe fn release(&self, address: usize, length: usize) -> Result<(), Errno> {
        assert!(
            address.is_multiple_of(self.page_size) && length.is_multiple_of(self.page_size),
            "release of a part of a page"
        );
        self.attempt(Call::Release)?;
        // SAFETY: the caller promises that the contents are not needed.
        unsafe { memory::release(address, length)? };
        self.released.fetch_add(length as u64, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn release_unless_locked(&self, address: usize, length: usize) -> Result<(), Errno> {
        if self.locked.load(Ordering::Relaxed) {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller promises that the contents are not needed.
        unsafe { self.release(address, length) }
    }

    /// The simulated system takes every second page at once, and never the others.
    unsafe fn release_lazily(&self, address: usize, length: usize) -> Result<(), Errno> {
        assert!(
            address.is_multiple_of(self.page_size) && length.is_multiple_of(self.page_size),
            "release of a part of a page"
        );
        self.attempt(Call::ReleaseLazily)?;
        if self.locked.load(Ordering::Relaxed) {
            return Err(Errno::INVAL);
        }
        for page in (address..address + length).step_by(2 * self.page_size) {
            // SAFETY: the caller promises that the contents of the whole range are not needed.
            unsafe { memory::release(page, self.page_size)? };
        }
        self.offered.fetch_add(length as u64, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn release_scattered(&self, ranges: &[Range]) -> Result<usize, Errno> {
        assert!(ranges.len() <= memory::SCATTERED_RANGES, "more ranges than one call takes");
        self.attempt(Call::ReleaseScattered)?;
        if self.locked.load(Ordering::Relaxed) {
            return Err(Errno::INVAL);
        }
        for range in ranges {
            assert!(
                range.start.is_multiple_of(self.page_size) && range.length.is_multiple_of(self.page_size),
                "a part of a page"
            );
            // SAFETY: the caller promises that the contents of all ranges are not needed.
            unsafe { memory::release(range.start, range.length)? };
        }
        let bytes = ranges.iter().map(|range| range.length).sum();
        self.released.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    fn populate(&self, address: usize, length: usize) -> Result<(), Errno> {
        self.attempt(Call::Populate)?;
        memory::populate(address, length)
    }

    fn huge_pages(&self, address: usize, length: usize, huge: HugePages) -> Result<(), Errno> {
        self.attempt(Call::HugePages)?;
        self.note_advice(address, length, huge == HugePages::Allowed);
        Ok(())
    }

    fn huge_page_supply(&self) -> HugePageSupply {
        self.huge_page_supply
    }

    fn split(&self, _address: usize) {
        self.splits.fetch_add(1, Ordering::Relaxed);
    }

    unsafe fn move_pages(&self, from: usize, to: usize, length: usize) -> Result<(), Errno> {
        if let Err(error) = self.attempt(Call::MovePages) {
            if self.moves_unmap.load(Ordering::Relaxed) {
                // SAFETY: the caller promises that no code uses the memory behind the destination.
                unsafe { self.unmap(to, length) };
            }
            return Err(error);
        }
        let allows = |address| self.allows_huge_pages(address);
        let mut pages = (from..from + length).step_by(self.page_size);
        if self.huge_page_supply == HugePageSupply::Everywhere && pages.any(|address| allows(address) != allows(from)) {
            return Err(Errno::FAULT);
        }
        // The setting of huge pages moves with the mapping.
        self.note_advice(to, length, allows(from));
        // SAFETY: the caller promises the contract of `memory::move_pages`.
        unsafe { memory::move_pages(from, to, length) }
    }

    fn cpus(&self) -> usize {
        self.cpus
    }

    fn nameable_cpus(&self) -> usize {
        self.cpus
    }

    fn is_isolated(&self, cpu: usize) -> bool {
        self.isolated.contains(cpu)
    }

    fn is_isolated_cpu_in_use(&self) -> bool {
        self.isolated_in_use.load(Ordering::Relaxed)
    }

    fn cpu(&self) -> usize {
        CPU.get() % self.cpus
    }

    fn nodes(&self) -> usize {
        self.nearest.iter().max().map_or(1, |last| last + 1)
    }

    fn node(&self, cpu: usize) -> NearestNode {
        NearestNode { node: self.nearest.get(cpu).copied().unwrap_or(0), is_of_cpu: true }
    }

    fn distance(&self, from: usize, to: usize) -> u8 {
        LOCAL + from.abs_diff(to) as u8
    }

    fn bind(&self, address: usize, length: usize, node: usize) -> Result<(), Errno> {
        self.attempt(Call::Bind)?;
        self.note_bound(address, length, Some(node));
        Ok(())
    }

    fn rseq_offset(&self) -> Option<isize> {
        self.sequences
    }

    fn fence(&self, _cpu: usize) -> Result<(), Errno> {
        self.attempt(Call::Fence)?;
        fence::all()
    }

    fn fence_all(&self) -> Result<(), Errno> {
        self.attempt(Call::Fence)?;
        fence::all()
    }

    fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    fn room(&self) -> Option<Room> {
        self.attempt(Call::Room).ok()?;
        // Without the lock: a test's answer may ask in turn.
        let room = self.room.lock().expect("no holder panics").0.clone();
        room.map(|room| room())
    }

    fn resident(&self) -> Option<u64> {
        Some(self.resident.load(Ordering::Relaxed)).filter(|&bytes| bytes < u64::MAX)
    }

    fn pause(&self) {
        std::thread::yield_now();
    }

    fn sleep(&self, nanoseconds: u64) {
        self.advance(nanoseconds);
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_of_different_spans_get_places_that_do_not_overlap() {
        let spans = [1 << 30, 16 << 30, 100 << 20];
        let place = |machine: usize| {
            let (machine, span) = (Virtual::new([4096, 65536][machine % 2], 1), spans[machine % 3]);
            let start = machine.address_hint(0, span).unwrap().next_multiple_of(machine.page_size << 10);
            (start, start + span)
        };
        let mut places: std::vec::Vec<_> = (0..300).map(place).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{places:x?}");
    }

    #[test]
    fn a_call_fails_when_told_and_only_then() {
        let machine = Virtual::new(65536, 64);
        machine.fail(Call::Map, 1, 2);
        let answers: std::vec::Vec<bool> = (0..4).map(|_| machine.map(65536).is_ok()).collect();
        assert_eq!(answers, [true, false, false, true]);
        assert_eq!(machine.made(Call::Map), 4);
    }

    #[test]
    fn threads_are_where_they_were_put() {
        let machine = Virtual::new(4096, 4);
        Virtual::run_on(3);
        assert_eq!(machine.cpu(), 3);
        std::thread::scope(|scope| _ = scope.spawn(|| assert_eq!(machine.cpu(), 0)));
    }
}
