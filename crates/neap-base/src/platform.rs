//! What differs between a Linux process and a simulated machine.
//!
//! Sits between `neap-os` (or a virtual machine in a test) and every structure that acts: it is the `P` in `Zone<P>`,
//! `Mm<P>` and their like. Policies never see it; they are functions of numbers. Memory is named by address because an
//! arena computes addresses; the contracts of the unsafe functions are those of [`neap_os::memory`].

use crate::Pfn;
use core::fmt;
use core::sync::atomic::{AtomicUsize, Ordering, compiler_fence};
use neap_os::clock::Clock;
use neap_os::memory::Range;
use neap_os::topology::{CpuSet, Topology};
pub use neap_os::{Errno, memory, nodes};
use nodes::{MAX_NODES, Nodes};

/// A block or run of pages that is handed out or comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// Its first page.
    pub pfn: Pfn,
    /// How many pages it has.
    pub pages: u32,
    /// It comes back.
    pub freed: bool,
}

/// Who wants to know of every [`Handover`].
pub trait Recorder: Sync + fmt::Debug {
    /// Notes one, which happens on `cpu`. Must neither allocate nor wait.
    fn note(&self, cpu: usize, handover: Handover);
}

/// The machine below an allocator.
pub trait Platform: Send + Sync {
    /// Bytes of a page: a power of two, at least 4096.
    fn page_size(&self) -> usize;

    /// An address to aim a new arena of up to `span` bytes at; `attempt` counts from 0, `None` ends the attempts.
    fn address_hint(&self, attempt: u32, span: usize) -> Option<usize>;

    /// Whether mapped but unused address space costs the program something (`RLIMIT_AS`, `RLIMIT_DATA`, strict overcommit): then
    /// address space is taken in small steps.
    fn address_space_is_scarce(&self) -> bool;

    /// The most address space that the process may have at the moment, in bytes.
    fn most_address_space(&self) -> usize {
        usize::MAX
    }

    /// Whether a program could use `length` bytes more.
    fn is_grantable(&self, length: usize) -> bool;

    /// Maps zeroes at exactly `address`, over nothing.
    ///
    /// # Errors
    /// `EXIST` where something is mapped there; otherwise a limit.
    fn map_at(&self, address: usize, length: usize) -> Result<(), Errno>;

    /// Maps zeroes anywhere.
    ///
    /// # Errors
    /// A limit.
    fn map(&self, length: usize) -> Result<usize, Errno>;

    /// Keeps address space anywhere, which nobody may touch before it is [opened](Platform::open). It is nothing that the system would have to fill, whatever
    /// becomes of the process's memory: neither where all of it is locked, nor in a dump.
    ///
    /// # Errors
    /// A limit.
    fn reserve(&self, length: usize) -> Result<usize, Errno>;

    /// Lets a part of such address space be touched: zeroes. What is open already stays as it is.
    ///
    /// # Errors
    /// A limit; some of it may be open.
    ///
    /// # Safety
    /// The range lies in what [`Platform::reserve`] answered the caller.
    unsafe fn open(&self, address: usize, length: usize) -> Result<(), Errno>;

    /// Takes a mapping away.
    ///
    /// # Safety
    /// Nobody uses the range any more.
    unsafe fn unmap(&self, address: usize, length: usize);

    /// Gives memory back; the range reads as zeroes once this answered `Ok`.
    ///
    /// # Errors
    /// The range is as it was.
    ///
    /// # Safety
    /// The contents are no longer needed.
    unsafe fn release(&self, address: usize, length: usize) -> Result<(), Errno>;

    /// Gives memory back that the program has not locked ([`memory::release_unless_locked`]); the range reads as zeroes once this answered `Ok`.
    ///
    /// # Errors
    /// The range is not known to be zero.
    ///
    /// # Safety
    /// The contents are no longer needed.
    unsafe fn release_unless_locked(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: the caller promises what this asks for.
        unsafe { self.release(address, length) }
    }

    /// Lets the system take a range when it is short of memory: until then it counts as resident,
    /// and each page of it holds what it held or zeroes.
    ///
    /// # Errors
    /// The range is as it was: memory is locked, or the system knows no such thing.
    ///
    /// # Safety
    /// The contents are no longer needed.
    unsafe fn release_lazily(&self, _address: usize, _length: usize) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }

    /// Gives up to [`memory::SCATTERED_RANGES`] ranges back at once and answers how many bytes from the start of the
    /// list are done.
    ///
    /// # Errors
    /// Where there is no such call; nothing is known about the ranges then.
    ///
    /// # Safety
    /// The contents are no longer needed.
    unsafe fn release_scattered(&self, ranges: &[Range]) -> Result<usize, Errno>;

    /// Whether this thread may release several ranges by one call.
    fn may_scatter(&self) -> bool {
        true
    }

    /// Puts memory behind a range.
    ///
    /// # Errors
    /// Some of the range may be done.
    fn populate(&self, address: usize, length: usize) -> Result<(), Errno>;

    /// Whether huge pages may stand behind a range. Where there are none this does nothing.
    ///
    /// # Errors
    /// It is as it was: there are as many mappings as there can be.
    fn huge_pages(&self, address: usize, length: usize, allowed: bool) -> Result<(), Errno>;

    /// Whether the system gives huge pages to everybody who does not refuse them.
    fn gives_huge_pages(&self) -> bool {
        false
    }

    /// Makes small pages of the huge page that a page is part of, so that the system has what is given back of it at once. Where
    /// there are no huge pages this does nothing. Nobody needs the page's contents.
    fn split(&self, _address: usize) {}

    /// Moves pages; the old range stays mapped and reads as zeroes.
    ///
    /// # Errors
    /// Nothing has moved.
    ///
    /// # Safety
    /// As for [`memory::move_pages`].
    unsafe fn move_pages(&self, from: usize, to: usize, length: usize) -> Result<(), Errno>;

    /// Entries of a table with one per CPU.
    fn cpus(&self) -> usize;

    /// Entries of a table that the CPU id of any thread is within.
    fn nameable_cpus(&self) -> usize;

    /// Whether `cpu` must never be interrupted.
    fn is_isolated(&self, cpu: usize) -> bool;

    /// Whether a thread of this process may be running on an isolated CPU: then nothing may be done that makes the kernel
    /// flush address translations, which interrupts every CPU that runs the process.
    fn is_isolated_cpu_in_use(&self) -> bool {
        false
    }

    /// The CPU this thread is on; a hint, below [`Platform::cpus`].
    fn cpu(&self) -> usize;

    /// Nodes of memory: at least 1, at most [`nodes::MAX_NODES`].
    fn nodes(&self) -> usize {
        1
    }

    /// The node nearest to this thread, below [`Platform::nodes`]; and whether it is that of every thread for which
    /// [`Platform::cpu`] answers `cpu`, for good. May be a system call.
    fn node(&self, _cpu: usize) -> (usize, bool) {
        (0, true)
    }

    /// Calls `each` with every CPU that is near a node other than the first, as far as that is known, and that node; perhaps with
    /// others as well. May be several system calls.
    fn each_home(&self, each: &mut dyn FnMut(usize, usize)) {
        (0..self.cpus()).for_each(|cpu| each(cpu, self.node(cpu).0));
    }

    /// How far the memory of node `to` is from node `from`.
    fn distance(&self, _from: usize, _to: usize) -> u8 {
        nodes::LOCAL
    }

    /// Asks that fresh memory of a range come from a node.
    ///
    /// # Errors
    /// It comes from wherever the kernel likes.
    fn bind(&self, _address: usize, _length: usize, _node: usize) -> Result<(), Errno> {
        Ok(())
    }

    /// Where the thread's rseq area lies from the thread pointer, where restartable sequences and fences work; never 0.
    fn rseq_offset(&self) -> Option<isize>;

    /// Whether a call that allocates or frees may fence. Calls that do something else always may.
    fn may_fence(&self) -> bool {
        true
    }

    /// Aborts the sequences in progress on `cpu`.
    ///
    /// # Errors
    /// Nothing is known; the caller has acquired nothing.
    fn fence(&self, cpu: usize) -> Result<(), Errno>;

    /// The same for every CPU that is not isolated.
    ///
    /// # Errors
    /// Nothing is known.
    fn fence_all(&self) -> Result<(), Errno>;

    /// Is told of every block or run, after it is handed out and before it comes back: so nobody is seen to get a page that
    /// somebody else has.
    #[inline]
    fn note(&self, _handover: Handover) {}

    /// Nanoseconds, monotonic; may be coarse.
    fn now(&self) -> u64;

    /// Lets others run, in a bounded wait.
    fn pause(&self);

    /// Sleeps about so many nanoseconds.
    fn sleep(&self, nanoseconds: u64);
}

/// A Linux process: everything answered by the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Linux {
    page_size: usize,
    cpus: usize,
    topology: neap_os::topology::Topology,
    nodes: Nodes,
    /// Nodes that are made up, if any: CPUs are dealt out to them.
    simulated: usize,
    gives_huge_pages: bool,
    scarce: bool,
    most_address_space: usize,
    rseq_offset: Result<isize, NoSequences>,
    recorder: Option<&'static dyn Recorder>,
    /// CPUs that the process was allowed when it was probed.
    allowed: CpuSet,
    clock: Clock,
    /// Where the control block of neap's thread is noted; 0 there for none.
    own_thread: Option<&'static AtomicUsize>,
}

/// Why restartable sequences cannot be used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSequences {
    /// The C library has registered none: it is too old, was told not to, or the kernel refused.
    Unregistered,
    /// It has, but the first thread has no CPU id.
    NoCpu,
    /// `membarrier` answered this.
    NoFence(Errno),
}

impl fmt::Display for NoSequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoSequences::Unregistered => f.write_str("the C library registered no rseq"),
            NoSequences::NoCpu => f.write_str("the C library's rseq has no CPU id"),
            NoSequences::NoFence(Errno::NOSYS) => f.write_str("membarrier answered ENOSYS"),
            NoSequences::NoFence(Errno::PERM) => f.write_str("membarrier answered EPERM"),
            NoSequences::NoFence(Errno::INVAL) => f.write_str("membarrier answered EINVAL"),
            NoSequences::NoFence(error) => write!(f, "membarrier answered error {}", error.raw_os_error()),
        }
    }
}

impl Linux {
    /// Asks the kernel what there is: `/sys`, limits, and whether rseq and fences answer. Registers this process for fences.
    pub fn probe() -> Linux {
        let fences = neap_os::fence::register().map_err(NoSequences::NoFence);
        let registered = neap_os::rseq::registered_offset().ok_or(NoSequences::Unregistered);
        // A thread that the C library could not register has no CPU id: then no other thread will have one either.
        let working =
            registered.and_then(|offset| neap_os::rseq::cpu_at(offset).map(|_| offset).ok_or(NoSequences::NoCpu));
        let topology = neap_os::topology::Topology::read();
        let most = memory::address_space_limit();
        Linux {
            page_size: memory::page_size(),
            cpus: topology.table_length(),
            topology,
            nodes: Nodes::read(),
            simulated: 0,
            gives_huge_pages: memory::gives_huge_pages(),
            scarce: most.is_some() || memory::overcommit_refused(),
            most_address_space: most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX)),
            rseq_offset: working.and_then(|offset| fences.map(|()| offset)),
            recorder: None,
            allowed: neap_os::thread::allowed(),
            clock: Clock::find(),
            own_thread: None,
        }
    }

    /// The same machine, with somebody who is told of every block and run.
    pub fn with_recorder(self, recorder: &'static dyn Recorder) -> Linux {
        Linux { recorder: Some(recorder), ..self }
    }

    /// The same machine with more isolated CPUs than the kernel lists.
    pub fn with_isolated(mut self, more: &CpuSet) -> Linux {
        self.topology.isolated.insert_all(more);
        self
    }

    /// The machine of a process whose calls make harmless system calls only. `own_thread` holds the
    /// [control block](neap_os::thread::pointer) of the thread that may make others, or 0.
    pub fn with_own_thread(self, own_thread: &'static AtomicUsize) -> Linux {
        Linux { own_thread: Some(own_thread), ..self }
    }

    /// The CPUs for threads of neap's own: those that the process was allowed when it was probed,
    /// less isolated ones if that leaves any.
    pub fn own_cpus(&self) -> CpuSet {
        let mut cpus = self.allowed;
        self.topology.isolated.iter().for_each(|cpu| cpus.remove(cpu));
        if cpus.count() > 0 { cpus } else { self.allowed }
    }

    /// Answers `true` where the process has one thread, which needs no other fence.
    ///
    /// No other registered thread exists: this one is in no sequence, and a handler that interrupts
    /// it between the caller's store and this look, or later, sees the store in program order. A
    /// thread that is made from here on sees it, since the kernel's making of a thread is a full
    /// barrier. A thread of the bare system call that is not registered for rseq runs no sequence,
    /// and its readers use fences of their own.
    fn fence_alone(&self) -> bool {
        // The caller's store comes before the look in program order, which is what a handler sees.
        compiler_fence(Ordering::SeqCst);
        neap_os::thread::is_alone()
    }

    /// Whether this thread may make any system call.
    fn may_call(&self) -> bool {
        // Relaxed: only the thread itself finds its own control block there.
        self.own_thread.is_none_or(|thread| thread.load(Ordering::Relaxed) == neap_os::thread::pointer())
    }

    /// What stands in the way of restartable sequences, if anything.
    pub fn no_sequences(&self) -> Option<NoSequences> {
        self.rseq_offset.err()
    }

    /// The same machine with `count` nodes that are made up, at most [`nodes::MAX_NODES`], whose CPUs are dealt out to them
    /// in turn; with one node it makes no difference between its memory. None of this binds memory.
    pub fn with_nodes(self, count: usize) -> Linux {
        Linux { nodes: Nodes::ONE, simulated: count.clamp(1, MAX_NODES), ..self }
    }

    /// A place to hold the result of [`Linux::probe`] before it is known.
    pub const fn unprobed() -> Linux {
        Linux {
            page_size: 4096,
            cpus: 1,
            topology: Topology { possible: CpuSet::EMPTY, isolated: CpuSet::EMPTY },
            nodes: Nodes::ONE,
            simulated: 0,
            gives_huge_pages: false,
            scarce: false,
            most_address_space: usize::MAX,
            rseq_offset: Err(NoSequences::Unregistered),
            recorder: None,
            allowed: CpuSet::EMPTY,
            clock: Clock::CALL,
            own_thread: None,
        }
    }
}

impl Platform for Linux {
    fn page_size(&self) -> usize {
        self.page_size
    }

    fn address_hint(&self, attempt: u32, span: usize) -> Option<usize> {
        /// Far above where programs and small heaps lie, far below stacks and libraries, and low enough for valgrind.
        const LOW: usize = 0x0800_0000_0000;
        const RANGE: usize = 7 << 40;
        const LEAST: usize = 1 << 30;
        let somewhere = |range: usize| (neap_os::environment::random() % range as u64) as usize;
        match attempt {
            // Somewhere else in every process, so that no address can be guessed.
            0..8 => Some(LOW + somewhere(RANGE)),
            // A machine with a small or crowded address space: wherever the kernel sees a gap.
            8..24 => {
                let span = span >> (attempt - 8);
                // The kernel's own choice differs in few bits where addresses are short.
                let room = (span / 8).clamp(LEAST, 1 << 34);
                let gap = memory::reserve(span + room).ok()?;
                // SAFETY: made a moment ago, used by nobody.
                unsafe { self.unmap(gap, span + room) };
                Some(gap + somewhere(room - LEAST / 2))
            }
            _ => None,
        }
    }

    fn address_space_is_scarce(&self) -> bool {
        self.scarce
    }

    fn most_address_space(&self) -> usize {
        self.most_address_space
    }

    fn is_grantable(&self, length: usize) -> bool {
        memory::is_grantable(length)
    }

    fn map_at(&self, address: usize, length: usize) -> Result<(), Errno> {
        memory::map_at(address, length)
    }

    fn map(&self, length: usize) -> Result<usize, Errno> {
        memory::map(length)
    }

    fn reserve(&self, length: usize) -> Result<usize, Errno> {
        memory::reserve(length)
    }

    unsafe fn open(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: as the caller promises.
        unsafe { memory::open(address, length) }
    }

    unsafe fn unmap(&self, address: usize, length: usize) {
        // SAFETY: as the caller promises. It fails only where it would have to split a mapping at the limit of them.
        let _ = unsafe { memory::unmap(address, length) };
    }

    unsafe fn release(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: as the caller promises.
        unsafe { memory::release(address, length) }
    }

    unsafe fn release_unless_locked(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: the caller promises what this asks for.
        unsafe { memory::release_unless_locked(address, length) }
    }

    unsafe fn release_lazily(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: the caller promises what this asks for.
        unsafe { memory::release_lazily(address, length) }
    }

    unsafe fn release_scattered(&self, ranges: &[Range]) -> Result<usize, Errno> {
        // SAFETY: as the caller promises.
        unsafe { memory::release_scattered(ranges) }
    }

    fn may_scatter(&self) -> bool {
        self.may_call()
    }

    fn populate(&self, address: usize, length: usize) -> Result<(), Errno> {
        memory::populate(address, length)
    }

    fn huge_pages(&self, address: usize, length: usize, allowed: bool) -> Result<(), Errno> {
        match memory::huge_pages(address, length, allowed) {
            // There are none.
            Err(Errno::INVAL) => Ok(()),
            answer => answer,
        }
    }

    fn gives_huge_pages(&self) -> bool {
        self.gives_huge_pages
    }

    fn split(&self, address: usize) {
        let _ = memory::split(address);
    }

    unsafe fn move_pages(&self, from: usize, to: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: as the caller promises.
        unsafe { memory::move_pages(from, to, length) }
    }

    #[inline]
    fn cpus(&self) -> usize {
        self.cpus
    }

    fn nameable_cpus(&self) -> usize {
        neap_os::topology::nameable().max(self.cpus())
    }

    #[inline]
    fn is_isolated(&self, cpu: usize) -> bool {
        self.topology.isolated.contains(cpu)
    }

    fn is_isolated_cpu_in_use(&self) -> bool {
        let isolated = &self.topology.isolated;
        // Where the kernel does not say, it may be.
        isolated.count() > 0 && neap_os::thread::any_on(isolated) != Some(false)
    }

    #[inline]
    fn cpu(&self) -> usize {
        let cpu = match self.rseq_offset {
            Ok(offset) => neap_os::rseq::cpu_at(offset).unwrap_or_else(neap_os::thread::number),
            Err(_) => neap_os::thread::number(),
        };
        // Where nobody says which CPU it is, threads are spread over all.
        if cpu < self.cpus { cpu } else { cpu % self.cpus }
    }

    fn nodes(&self) -> usize {
        self.nodes.count().max(self.simulated)
    }

    fn node(&self, cpu: usize) -> (usize, bool) {
        if self.simulated > 0 {
            return (cpu % self.simulated, true);
        }
        match nodes::whereabouts() {
            // Without sequences `cpu` is a number of the thread's, which may be that of a CPU by chance.
            Ok((here, id)) => (self.nodes.nearest(id), here == cpu && self.rseq_offset.is_ok()),
            Err(_) => (0, true),
        }
    }

    fn each_home(&self, each: &mut dyn FnMut(usize, usize)) {
        match self.simulated {
            0 => self.nodes.each_cpu(each),
            simulated => (0..self.cpus).for_each(|cpu| each(cpu, cpu % simulated)),
        }
    }

    fn distance(&self, from: usize, to: usize) -> u8 {
        self.nodes.distance(from, to)
    }

    fn bind(&self, address: usize, length: usize, node: usize) -> Result<(), Errno> {
        if self.simulated > 0 { Ok(()) } else { self.nodes.prefer(address, length, node) }
    }

    fn rseq_offset(&self) -> Option<isize> {
        self.rseq_offset.ok()
    }

    fn may_fence(&self) -> bool {
        // A fence of a process with one thread is no system call.
        neap_os::thread::is_alone() || self.may_call()
    }

    fn fence(&self, cpu: usize) -> Result<(), Errno> {
        if self.fence_alone() { Ok(()) } else { neap_os::fence::cpu(cpu) }
    }

    fn fence_all(&self) -> Result<(), Errno> {
        if self.fence_alone() {
            return Ok(());
        }
        let Topology { possible, isolated } = &self.topology;
        if isolated.count() == 0 {
            return neap_os::fence::all();
        }
        let fenced = |cpu: &usize| possible.contains(*cpu) && !isolated.contains(*cpu);
        (0..self.cpus).filter(fenced).try_for_each(neap_os::fence::cpu)
    }

    #[inline]
    fn note(&self, handover: Handover) {
        if let Some(recorder) = self.recorder {
            recorder.note(self.cpu(), handover);
        }
    }

    fn now(&self) -> u64 {
        self.clock.coarse()
    }

    fn pause(&self) {
        if self.may_call() {
            neap_os::thread::yield_now();
        } else {
            // By the futex, which sandboxes let through, for as short as the kernel can.
            neap_os::thread::sleep(1);
        }
    }

    fn sleep(&self, nanoseconds: u64) {
        neap_os::thread::sleep(nanoseconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What differs between a thousand arenas' bases, in multiples of a chunk of 4 MiB.
    fn differing_bits(attempt: u32, span: usize) -> u32 {
        let machine = Linux::probe();
        let bases = (0..1000)
            .map_while(|_| machine.address_hint(attempt, span))
            .map(|hint| hint.next_multiple_of(4 << 20) >> 22);
        let (all, any) = bases.fold((usize::MAX, 0), |(all, any), base| (all & base, any | base));
        (any & !all).count_ones()
    }

    #[test]
    fn arenas_begin_anywhere() {
        assert!(differing_bits(0, 16 << 40) >= 20, "{} bits", differing_bits(0, 16 << 40));
        // What a machine with 39 bits has room for: a gap that the kernel names.
        assert!(differing_bits(8, 128 << 30) >= 12, "{} bits", differing_bits(8, 128 << 30));
    }
}
