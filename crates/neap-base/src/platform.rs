//! The interface to the machine: a Linux process, or a simulated machine in a test.
//!
//! [`Platform`] is the type parameter `P` of `Zone<P>`, `Mm<P>` and similar types. Policies do not
//! use this trait, since they are functions of numbers. The functions take addresses as numbers,
//! because an arena computes them. The contracts of the unsafe functions are those of
//! [`neap_os::memory`].

use crate::Pfn;
use core::fmt;
use core::sync::atomic::{AtomicUsize, Ordering, compiler_fence};
use neap_os::clock::Clock;
use neap_os::memory::{HugePages, Range};
use neap_os::topology::{CpuSet, Topology};
pub use neap_os::{Errno, huge_pages::HugePageSupply, memory, nodes};
use neap_os::{rseq::OwnAreas, stack};
pub use neap_pressure::{LimitedBy, Pressure, Room, Sample, Series, margin};
use neap_pressure::{Sensor, Subject, System};
use nodes::{MAX_NODES, NearestNode, Nodes, Whereabouts};

/// A block or run of pages that is handed out or freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// Its first page.
    pub pfn: Pfn,
    /// Its number of pages.
    pub pages: u32,
    /// Whether the allocator frees it; otherwise it hands it out.
    pub freed: bool,
}

/// Receiver of every [`Handover`].
pub trait Recorder: Sync + fmt::Debug {
    /// Records one handover on `cpu`. Must neither allocate nor wait.
    fn note(&self, cpu: usize, handover: Handover);
}

/// The machine below an allocator.
pub trait Platform: Send + Sync {
    /// Bytes of a page: a power of two, at least 4096.
    fn page_size(&self) -> usize;

    /// Returns an address at which to try a new arena of up to `span` bytes. The caller counts
    /// `attempt` from 0.
    ///
    /// # Errors
    /// `NOMEM` if no gap of `span` bytes was found. The caller tries a smaller span.
    fn address_hint(&self, attempt: u32, span: usize) -> Result<usize, Errno>;

    /// Whether mapped but unused address space counts against a limit of the program (`RLIMIT_AS`,
    /// `RLIMIT_DATA`, strict overcommit). Address space is then taken in small steps.
    fn address_space_is_scarce(&self) -> bool;

    /// The maximum address space of the process, in bytes.
    fn most_address_space(&self) -> usize {
        usize::MAX
    }

    /// Whether the system would grant the program `length` more bytes.
    fn is_grantable(&self, length: usize) -> bool;

    /// Maps zeroes at exactly `address`. Never replaces an existing mapping.
    ///
    /// # Errors
    /// `EXIST` if the range overlaps a mapping; otherwise the system's error at a limit. Nothing is
    /// mapped.
    fn map_at(&self, address: usize, length: usize) -> Result<(), Errno>;

    /// Maps zeroes at any address, and returns the address.
    ///
    /// # Errors
    /// A limit.
    fn map(&self, length: usize) -> Result<usize, Errno>;

    /// Reserves address space, and returns its address. The caller must not access it before it
    /// [opens](Platform::open) it. Until then the system allocates no memory for it, even if the
    /// program locks its memory or dumps core.
    ///
    /// # Errors
    /// A limit.
    fn reserve(&self, length: usize) -> Result<usize, Errno>;

    /// Makes a part of reserved address space accessible. It reads as zeroes. Parts that are
    /// already open keep their contents.
    ///
    /// # Errors
    /// The system's error at a limit. A part of the range may be open then.
    ///
    /// # Safety
    /// The range lies in address space that [`Platform::reserve`] returned to the caller.
    unsafe fn open(&self, address: usize, length: usize) -> Result<(), Errno>;

    /// Removes a mapping.
    ///
    /// # Safety
    /// No code uses the range any more.
    unsafe fn unmap(&self, address: usize, length: usize);

    /// Releases memory to the system; the range reads as zeroes after `Ok`.
    ///
    /// # Errors
    /// The range is not known to be zero.
    ///
    /// # Safety
    /// The contents are no longer needed.
    unsafe fn release(&self, address: usize, length: usize) -> Result<(), Errno>;

    /// Releases memory that the program has not locked ([`memory::release_unless_locked`]). The
    /// range reads as zeroes after `Ok`.
    ///
    /// # Errors
    /// The range is not known to be zero.
    ///
    /// # Safety
    /// The contents are no longer needed.
    unsafe fn release_unless_locked(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: `release` requires that the contents are not needed, which the caller promises.
        unsafe { self.release(address, length) }
    }

    /// Lets the system take the memory of a range when the system is short of memory. Until then
    /// the range counts as resident, and each page of it holds its contents or zeroes.
    ///
    /// # Errors
    /// The system's error if a page of the range is locked, or the system lacks this call. The
    /// system may take the pages in front of a locked page.
    ///
    /// # Safety
    /// The contents are no longer needed.
    unsafe fn release_lazily(&self, _address: usize, _length: usize) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }

    /// Releases up to [`memory::SCATTERED_RANGES`] ranges by one call. Returns how many bytes are
    /// released, counted from the start of the list.
    ///
    /// # Errors
    /// The system's error, for example if it lacks the call. Each page of the ranges holds its
    /// contents or zeroes.
    ///
    /// # Safety
    /// The contents are no longer needed.
    unsafe fn release_scattered(&self, ranges: &[Range]) -> Result<usize, Errno>;

    /// Whether this thread may release several ranges by one call.
    fn may_scatter(&self) -> bool {
        true
    }

    /// Allocates memory for a range before it is accessed.
    ///
    /// # Errors
    /// The system's error. A part of the range may be populated.
    fn populate(&self, address: usize, length: usize) -> Result<(), Errno>;

    /// Sets whether huge pages may back a range. Without huge pages in the system this does
    /// nothing.
    ///
    /// # Errors
    /// The system's error at the limit of mappings. The range's setting is unchanged.
    fn huge_pages(&self, address: usize, length: usize, huge: HugePages) -> Result<(), Errno>;

    /// What the system does with huge pages, of the size that its page tables give.
    fn huge_page_supply(&self) -> HugePageSupply;

    /// Splits the huge page that contains `address` into small pages, so that parts of it can be
    /// released at once. Without huge pages this does nothing. The page's contents must not be
    /// needed.
    fn split(&self, _address: usize) {}

    /// Moves pages. The old range stays mapped and reads as zeroes.
    ///
    /// # Errors
    /// The system's error. No page has moved, and `to` may be unmapped.
    ///
    /// # Safety
    /// As for [`memory::move_pages`].
    unsafe fn move_pages(&self, from: usize, to: usize, length: usize) -> Result<(), Errno>;

    /// Length of a table with one entry per CPU.
    fn cpus(&self) -> usize;

    /// Length of a table that has an entry for every CPU id that a thread can have.
    fn nameable_cpus(&self) -> usize;

    /// Whether `cpu` must never be interrupted.
    fn is_isolated(&self, cpu: usize) -> bool;

    /// Whether a thread of this process may run on an isolated CPU. If so, callers avoid system
    /// calls that flush address translations, which interrupt every CPU that runs the process.
    fn is_isolated_cpu_in_use(&self) -> bool {
        false
    }

    /// The CPU that this thread is on; a hint, below [`Platform::cpus`].
    fn cpu(&self) -> usize;

    /// Number of memory nodes: 1 to [`nodes::MAX_NODES`].
    fn nodes(&self) -> usize {
        1
    }

    /// Returns the node nearest to this thread. `cpu` is the result of [`Platform::cpu`]. May make
    /// a system call.
    fn node(&self, _cpu: usize) -> NearestNode {
        NearestNode { node: 0, is_of_cpu: true }
    }

    /// Calls `each` with a CPU and its nearest node. Does so for every CPU that the system reports
    /// near a node other than node 0, and possibly for others. May make several system calls.
    fn each_home(&self, each: &mut dyn FnMut(usize, usize)) {
        (0..self.cpus()).for_each(|cpu| each(cpu, self.node(cpu).node));
    }

    /// Distance of node `to`'s memory from node `from`.
    fn distance(&self, _from: usize, _to: usize) -> u8 {
        nodes::LOCAL
    }

    /// Requests that new memory of a range come from a node.
    ///
    /// # Errors
    /// The system's error. The policy of the range has not changed. If the range was not bound
    /// before, the kernel chooses the node.
    fn bind(&self, _address: usize, _length: usize, _node: usize) -> Result<(), Errno> {
        Ok(())
    }

    /// Offset of the thread's rseq area from the thread pointer, never 0. `None` if restartable
    /// sequences or fences do not work.
    fn rseq_offset(&self) -> Option<isize>;

    /// Whether calls that allocate or free may fence. Other calls always may.
    fn may_fence(&self) -> bool {
        true
    }

    /// Aborts the sequences in progress on `cpu`.
    ///
    /// # Errors
    /// The system's error. Sequences may still be in progress on `cpu`, and the caller may not see
    /// their stores.
    fn fence(&self, cpu: usize) -> Result<(), Errno>;

    /// Aborts the sequences in progress on every CPU that is not isolated.
    ///
    /// # Errors
    /// The system's error. Sequences may still be in progress on any of these CPUs.
    fn fence_all(&self) -> Result<(), Errno>;

    /// The allocator calls this for every block or run, after it hands it out and before it frees
    /// it. In this order, no page appears to have two owners.
    #[inline]
    fn note(&self, _handover: Handover) {}

    /// Monotonic time in nanoseconds; may be coarse.
    fn now(&self) -> u64;

    /// Time of the clock of [`Platform::now`], with its full precision. Callers use it for
    /// deadlines. `now` may lag behind it.
    fn precise(&self) -> u64 {
        self.now()
    }

    /// Reads how much memory the process can still use below the limits of its containers and the
    /// machine. `None` if no limit is visible. [`Linux`] opens, reads and closes files of `/proc`
    /// and of control groups.
    fn room(&self) -> Option<Room> {
        None
    }

    /// Reads how many bytes of anonymous memory of the process are resident or swapped out. `None`
    /// if the system does not say. [`Linux`] opens, reads and closes a file of `/proc`.
    fn resident(&self) -> Option<u64> {
        None
    }

    /// Gives up the CPU for a moment. Loops that wait for another thread call it.
    fn pause(&self);

    /// Sleeps for about `nanoseconds`.
    fn sleep(&self, nanoseconds: u64);
}

/// A Linux process. System calls, `/proc` and `/sys` provide the answers.
#[derive(Clone, Copy, Debug)]
pub struct Linux {
    page_size: usize,
    cpus: usize,
    topology: neap_os::topology::Topology,
    nodes: Nodes,
    /// Number of simulated nodes; 0 if the nodes are real. The CPUs are assigned to simulated nodes
    /// in turn.
    simulated: usize,
    huge_page_supply: HugePageSupply,
    scarce: bool,
    most_address_space: usize,
    rseq_offset: Result<isize, NoSequences>,
    /// Registers a thread that has no CPU id; `None` if only the C library registers threads.
    own_areas: Option<OwnAreas>,
    recorder: Option<&'static dyn Recorder>,
    /// The CPUs that the process was allowed when it was probed.
    allowed: CpuSet,
    clock: Clock,
    /// See `with_own_thread`. If it is `None`, every thread may make any system call.
    own_thread: Option<&'static AtomicUsize>,
}

/// Why restartable sequences cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSequences {
    /// The C library registers no thread: it is too old, a tunable forbids it, or the kernel
    /// refused. neap's own areas ([`OwnAreas`]) are not in use either.
    Unregistered,
    /// The C library registers threads, but the thread that ran [`Linux::probe`] has no CPU id.
    NoCpu,
    /// `membarrier` returned this error.
    NoFence(Errno),
}

impl fmt::Display for NoSequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoSequences::Unregistered => f.write_str("the C library registered no rseq"),
            NoSequences::NoCpu => f.write_str("rseq is registered, but the kernel stored no CPU id"),
            NoSequences::NoFence(Errno::NOSYS) => f.write_str("membarrier answered ENOSYS"),
            NoSequences::NoFence(Errno::PERM) => f.write_str("membarrier answered EPERM"),
            NoSequences::NoFence(Errno::INVAL) => f.write_str("membarrier answered EINVAL"),
            NoSequences::NoFence(error) => write!(f, "membarrier answered error {}", error.raw_os_error()),
        }
    }
}

impl Linux {
    /// Reads `/sys` and limits, and checks whether rseq and fences work. Registers the process for
    /// fences. If the C library registers no thread for rseq, registers this one.
    pub fn probe() -> Linux {
        Linux::probe_with(OwnAreas::open())
    }

    /// Does what [`Linux::probe`] does, but registers no thread for rseq.
    pub fn probe_unregistered() -> Linux {
        Linux::probe_with(None)
    }

    fn probe_with(own_areas: Option<OwnAreas>) -> Linux {
        let fences = neap_os::fence::register().map_err(NoSequences::NoFence);
        let registered = neap_os::rseq::registered_offset().or(own_areas.map(|areas| areas.offset()));
        let registered = registered.ok_or(NoSequences::Unregistered);
        // If this thread has no CPU id, no other thread will have one.
        let working =
            registered.and_then(|offset| neap_os::rseq::cpu_at(offset).map(|_| offset).ok_or(NoSequences::NoCpu));
        let rseq_offset = working.and_then(|offset| fences.map(|()| offset));
        let topology = neap_os::topology::Topology::read();
        let most = memory::address_space_limit();
        Linux {
            page_size: memory::page_size(),
            cpus: topology.table_length(),
            topology,
            nodes: Nodes::read(),
            simulated: 0,
            huge_page_supply: neap_os::huge_pages::supply(),
            scarce: most.is_some() || memory::overcommit_refused(),
            most_address_space: most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX)),
            rseq_offset,
            own_areas: own_areas.filter(|_| rseq_offset.is_ok()),
            recorder: None,
            allowed: neap_os::thread::allowed(),
            clock: Clock::find(),
            own_thread: None,
        }
    }

    /// Adds a recorder, which receives every block and run.
    pub fn with_recorder(self, recorder: &'static dyn Recorder) -> Linux {
        Linux { recorder: Some(recorder), ..self }
    }

    /// Treats more CPUs as isolated than the kernel lists.
    pub fn with_isolated(mut self, more: &CpuSet) -> Linux {
        self.topology.isolated.insert_all(more);
        self
    }

    /// Limits threads to system calls that sandboxes usually allow. `own_thread` holds the [control
    /// block](neap_os::thread::pointer) of neap's thread, or 0. Only that thread releases several
    /// ranges by one call, and yields. In calls that allocate or free, only that thread fences by a
    /// system call.
    pub fn with_own_thread(self, own_thread: &'static AtomicUsize) -> Linux {
        Linux { own_thread: Some(own_thread), ..self }
    }

    /// The CPUs for neap's own threads: those that the process was allowed when it was probed,
    /// without isolated ones. If none is left, isolated ones are included.
    pub fn own_cpus(&self) -> CpuSet {
        let mut cpus = self.allowed;
        self.topology.isolated.iter().for_each(|cpu| cpus.remove(cpu));
        if cpus.count() > 0 { cpus } else { self.allowed }
    }

    /// Fences without a system call if the process has one thread; otherwise returns `false`.
    ///
    /// This thread runs no sequence now, and no other registered thread exists. A signal handler on
    /// this thread sees the caller's store in program order. A thread created later sees it, since
    /// its creation by the kernel is a full barrier. The check does not count threads that the bare
    /// system call `clone` made. Such a thread runs no sequence unless it is registered for rseq,
    /// and its RCU readers use fences of their own.
    fn fence_alone(&self) -> bool {
        // Keeps the caller's store before the check, in the order that a signal handler sees.
        compiler_fence(Ordering::SeqCst);
        neap_os::thread::is_alone()
    }

    /// Whether this thread may make any system call.
    fn may_call(&self) -> bool {
        // Relaxed: only the thread itself finds its own control block there.
        self.own_thread.is_none_or(|thread| thread.load(Ordering::Relaxed) == neap_os::thread::pointer())
    }

    /// The obstacle to restartable sequences, if any.
    pub fn no_sequences(&self) -> Option<NoSequences> {
        self.rseq_offset.err()
    }

    /// Simulates `count` nodes, at most [`nodes::MAX_NODES`], and assigns CPUs to them in turn. No
    /// memory is bound to a node then.
    pub fn with_nodes(self, count: usize) -> Linux {
        Linux { nodes: Nodes::ONE, simulated: count.clamp(1, MAX_NODES), ..self }
    }
}

impl Platform for Linux {
    fn page_size(&self) -> usize {
        self.page_size
    }

    fn address_hint(&self, attempt: u32, span: usize) -> Result<usize, Errno> {
        /// Far above programs and small heaps, far below stacks and libraries, and low enough for
        /// valgrind.
        const LOW: usize = 0x0800_0000_0000;
        const RANGE: usize = 7 << 40;
        const LEAST: usize = 1 << 30;
        let somewhere = |range: usize| (neap_os::environment::random() % range as u64) as usize;
        match attempt {
            // The address is random in every process, so that an attacker cannot guess it.
            0..8 => Ok(LOW + somewhere(RANGE)),
            // If the address space is small or crowded, try a gap that the kernel selects.
            _ => {
                // On a machine with few address bits, the kernel's choice has few random bits. A
                // random offset adds more.
                let room = (span / 8).clamp(LEAST, 1 << 34);
                let gap = memory::reserve(span + room)?;
                // SAFETY: `reserve` returned this range just now, and no code has accessed it.
                unsafe { self.unmap(gap, span + room) };
                Ok(gap + somewhere(room - LEAST / 2))
            }
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
        // SAFETY: the caller promises that the range lies in address space from `reserve`, which is
        // what `memory::open` requires.
        unsafe { memory::open(address, length) }
    }

    unsafe fn unmap(&self, address: usize, length: usize) {
        // SAFETY: the caller promises that no code uses the range any more. The call fails only
        // where it would split a mapping at the limit of mappings.
        let _ = unsafe { memory::unmap(address, length) };
    }

    unsafe fn release(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: the caller promises that the contents are not needed.
        unsafe { memory::release(address, length) }
    }

    unsafe fn release_unless_locked(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: the caller promises that the contents are not needed.
        unsafe { memory::release_unless_locked(address, length) }
    }

    unsafe fn release_lazily(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: the caller promises that the contents are not needed.
        unsafe { memory::release_lazily(address, length) }
    }

    unsafe fn release_scattered(&self, ranges: &[Range]) -> Result<usize, Errno> {
        // SAFETY: the caller promises that it needs no contents, and at most `SCATTERED_RANGES`
        // ranges.
        unsafe { memory::release_scattered(ranges) }
    }

    fn may_scatter(&self) -> bool {
        self.may_call()
    }

    fn populate(&self, address: usize, length: usize) -> Result<(), Errno> {
        memory::populate(address, length)
    }

    fn huge_pages(&self, address: usize, length: usize, huge: HugePages) -> Result<(), Errno> {
        match memory::huge_pages(address, length, huge) {
            // The kernel has no huge pages.
            Err(Errno::INVAL) => Ok(()),
            answer => answer,
        }
    }

    fn huge_page_supply(&self) -> HugePageSupply {
        self.huge_page_supply
    }

    fn split(&self, address: usize) {
        let _ = memory::split(address);
    }

    unsafe fn move_pages(&self, from: usize, to: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: the caller promises the contract of `memory::move_pages`.
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
        // If the kernel does not answer, assume that such a CPU is in use.
        isolated.count() > 0 && neap_os::thread::any_on(isolated) != Some(false)
    }

    #[inline]
    fn cpu(&self) -> usize {
        let cpu = match self.rseq_offset {
            Ok(offset) => neap_os::rseq::cpu_at(offset)
                .or_else(|| self.own_areas?.register_for_cpu())
                .unwrap_or_else(neap_os::thread::number),
            Err(_) => neap_os::thread::number(),
        };
        // Without a CPU id, threads are spread over all CPUs by their number.
        if cpu < self.cpus { cpu } else { cpu % self.cpus }
    }

    fn nodes(&self) -> usize {
        self.nodes.count().max(self.simulated)
    }

    fn node(&self, cpu: usize) -> NearestNode {
        if self.simulated > 0 {
            return NearestNode { node: cpu % self.simulated, is_of_cpu: true };
        }
        match nodes::whereabouts() {
            // Without sequences `cpu` is derived from the thread's number, and may equal a CPU id
            // by chance.
            Ok(Whereabouts { cpu: here, node }) => {
                NearestNode { node: self.nodes.nearest(node), is_of_cpu: here == cpu && self.rseq_offset.is_ok() }
            }
            Err(_) => NearestNode { node: 0, is_of_cpu: true },
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
        // A fence of a process with one thread makes no system call.
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

    fn precise(&self) -> u64 {
        self.clock.precise()
    }

    fn room(&self) -> Option<Room> {
        // A sensor has buffers of 36 KiB, which are too large for a stack frame.
        static FRESH: Sensor = Sensor::new(Subject::Own);
        let length = size_of::<Sensor>().next_multiple_of(self.page_size);
        let address = memory::map(length).ok()?;
        let place = core::ptr::with_exposed_provenance_mut::<Sensor>(address);
        // SAFETY: `map` returned this memory for this call alone, so nothing else refers to it, and
        // it does not overlap `FRESH`. It is at least as long as a sensor and aligned to a page.
        // The copy of `FRESH` initialises it before it is borrowed.
        let sensor = unsafe {
            place.copy_from_nonoverlapping(&raw const FRESH, 1);
            &mut *place
        };
        let room = stack::apart(|| sensor.look(&System::new()).room().copied());
        // SAFETY: no code uses the mapping any more, since `Room` holds only numbers.
        let _ = unsafe { memory::unmap(address, length) };
        room.flatten()
    }

    fn resident(&self) -> Option<u64> {
        // The text is too large for a frame on a thread's own stack.
        stack::apart(neap_os::environment::anonymous_bytes).flatten()
    }

    fn pause(&self) {
        if self.may_call() {
            neap_os::thread::yield_now();
        } else {
            // Sleeps by the futex call, which sandboxes allow, for the shortest time that the
            // kernel supports.
            neap_os::thread::sleep(1);
        }
    }

    fn sleep(&self, nanoseconds: u64) {
        neap_os::thread::sleep(nanoseconds);
    }
}

#[cfg(test)]
#[path = "platform_tests.rs"]
mod tests;
