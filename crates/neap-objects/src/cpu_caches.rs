//! The slots of the CPUs. A slot is two stacks of free objects of one class. The threads on the
//! slot's CPU push objects onto the stacks and pop them.
//!
//! # Design
//!
//! One of the two stacks is for *local* objects, whose [home](crate::kind_map::KindEntry) is this
//! CPU. The other is for *remote* objects, which have another home. Threads take remote objects off
//! their stack in batches only. All stacks of a CPU lie in one *region*. A table holds one pointer
//! to a region for every CPU that the kernel could name, and for the ids -1 and -2 of threads that
//! are not registered for rseq. A CPU gets its region when one of its stacks first gets room
//! ([`CpuCaches::raise_capacity`]). Until then the CPU's table entry points to the *closed region*,
//! which has neither room nor objects. The CPU's lock holds 0, no thread writes to the memory of
//! the region, and walks over CPUs skip the CPU. A CPU's slots are of one of two kinds:
//!
//! * **Rseq**: the restartable sequences of `neap_os::rseq` work on the stacks, without a lock or a
//!   locked instruction.
//! * **Atomic**: threads work on the stacks under the CPU's lock, on machines without rseq or
//!   fences and on isolated CPUs.
//!
//! # Concurrency
//!
//! To drain an Rseq CPU's stacks from any thread:
//! 1. Replace the table's pointer by one to the closed region. Every sequence that starts now is
//!    refused.
//! 2. Fence the CPU. A sequence that read the old pointer has been aborted, or has committed and is
//!    visible.
//! 3. Now only this thread, the *taker*, accesses the old region. Copy the stacks that are not
//!    wanted to the spare region, and store the spare's address in the table.
//! 4. Free the wanted objects while the CPU's threads use their stacks again. The old region, empty
//!    now, becomes the next spare.
//!
//! If the fence fails, the taker stores the old pointer in the table again and takes nothing. A
//! taker holds the mutex of the spare region, so two takers never replace pointers at once. A stack
//! that was taken has no room, so the next operation on it takes the slow path, which also wakes
//! maintenance.
//!
//! No thread owns a region's stacks, so a taker waits for no thread of an Rseq CPU. The exhaustive
//! explorer in `tests/rseq_explorer` runs this protocol with preemption, migration, signals and
//! store buffers, and finds a failure for each step that is left out.

use crate::region::{CLOSED_REGION_BYTES, REGION, StackId, at, clear, keep, make_closed_region, objects, stack};
use crate::size_class::Class;
use crate::strided_run::StridedRun;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use neap_base::gate::Inside;
use neap_base::platform::{Errno, Platform, memory};
use neap_base::{CpuLock, Mutex};
use neap_os::rseq::{self, MOST_CPUS, SequenceResult, SequenceTable, Stack, UNREGISTERED, has_instructions};
use neap_os::topology::{CpuSet, MAX_CPUS};
use neap_os::used_cpus::UsedCpus;

/// Aborts in a row after which an operation returns [`Attempt::Busy`]. Under a debugger that
/// single-steps, every sequence is aborted.
const ATTEMPTS_MAX: u32 = 3;

/// Attempts to take another CPU's lock before the CPU is skipped.
const REMOTE_LOCK_TRIES_MAX: u32 = 1000;

/// The kind of a CPU's slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheMode {
    /// Restartable sequences.
    Rseq,
    /// A lock taken by compare-and-swap.
    Atomic,
}

/// The result of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attempt<T> {
    /// The operation succeeded.
    Done(T),
    /// The stack is full, empty, or has no capacity.
    Refused,
    /// The slot is not available now. The caller uses the class cache.
    Busy,
}

/// The slots of all CPUs.
#[derive(Debug)]
pub struct CpuCaches {
    cpus: usize,
    /// Number of CPUs that the kernel could name and the table has entries for.
    pub(crate) named: usize,
    /// Address of the table that the sequences start from.
    table: usize,
    /// Start of the mapping. It contains the closed region, a lock for each CPU, the CPUs' regions,
    /// and the first spare region. A lock holds the address of the CPU's region.
    memory: usize,
    length: usize,
    offset: Option<isize>,
    /// CPUs that have a region.
    used: UsedCpus,
    /// The empty region that the next taker exchanges for a CPU's; 0 before the first take.
    pub(crate) spare: Mutex<usize>,
    /// Whether [`CpuCaches::close_table`] holds the locks of Atomic CPUs.
    closed: AtomicBool,
    /// Whether the table is closed for fork. No CPU gets a region meanwhile.
    shut: AtomicBool,
    skipped: AtomicU32,
    fences: AtomicU32,
}

impl CpuCaches {
    /// Maps the regions, and fills a table for them. With `use_rseq` false every CPU gets the
    /// Atomic kind.
    ///
    /// # Errors
    /// Returns the error of the mapping. Nothing is mapped then.
    ///
    /// # Safety
    /// The table belongs to no other slots, does not move, and lives as long as these slots are
    /// used.
    pub unsafe fn open<P: Platform>(platform: &P, use_rseq: bool, table: &SequenceTable) -> Result<CpuCaches, Errno> {
        let (cpus, named) = (platform.cpus().min(MAX_CPUS), platform.nameable_cpus().max(platform.cpus()));
        let length = CpuCaches::regions_at(cpus) + (cpus + 1) * REGION;
        let length = length.next_multiple_of(platform.page_size());
        let memory = platform.map(length)?;
        let cpu_caches = CpuCaches {
            cpus,
            named: named.min(MOST_CPUS),
            table: core::ptr::from_ref(table).expose_provenance(),
            memory,
            length,
            offset: platform.rseq_offset().filter(|_| use_rseq && named <= MOST_CPUS && has_instructions()),
            used: UsedCpus::new(),
            spare: Mutex::new(0),
            closed: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            skipped: AtomicU32::new(0),
            fences: AtomicU32::new(0),
        };
        make_closed_region(cpu_caches.closed_region());
        (0..cpu_caches.named + UNREGISTERED)
            .for_each(|entry| cpu_caches.entry(entry).store(at(cpu_caches.closed_region()), Ordering::Relaxed));
        table.offset.store(cpu_caches.offset.unwrap_or(0), Ordering::Relaxed);
        Ok(cpu_caches)
    }

    /// Unmaps the regions.
    ///
    /// # Safety
    /// No thread uses the slots any more, and no table points to them.
    pub unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: `open` mapped this memory, and the caller says that no thread and no table uses
        // it any more.
        unsafe { platform.unmap(self.memory, self.length) };
    }

    /// The mapping of the regions.
    pub(crate) fn mapping(&self) -> memory::Range {
        memory::Range { start: self.memory, length: self.length }
    }

    const fn regions_at(cpus: usize) -> usize {
        (CLOSED_REGION_BYTES + cpus * size_of::<CpuLock<usize>>()).next_multiple_of(4096)
    }

    pub(crate) fn first_region(&self) -> usize {
        self.memory + CpuCaches::regions_at(self.cpus)
    }

    /// The region that no thread writes to after `open`. Its mark is 0, and no stack in it has
    /// objects or room.
    pub(crate) fn closed_region(&self) -> usize {
        self.memory
    }

    /// Makes an empty region with the index `number` in the mapping. No other thread accesses it.
    fn make_region(&self, number: usize) -> usize {
        let region = self.first_region() + number * REGION;
        StackId::all().for_each(|stack| clear(region, stack));
        // SAFETY: a region begins with its mark, and the caller has the region alone.
        unsafe { at::<u64>(region).write(1) };
        region
    }

    /// Gives a CPU its region if it has none. While another thread holds the CPU's lock, or the
    /// table is closed, the call changes nothing. The CPU's stacks then refuse operations until a
    /// later call makes the region.
    ///
    /// The CPU's lock excludes other callers on this CPU, and takers:
    ///
    /// | thread A | thread B |
    /// |---|---|
    /// | 1. takes the lock, finds no region | |
    /// | | 2. cannot lock: its operation is refused |
    /// | 3. makes the region, unlocks | |
    /// | | 4. locks, finds the region |
    ///
    /// A taker that does not yet see the CPU among the used ones takes nothing, as if it had come
    /// before A.
    pub(crate) fn begin<P: Platform>(&self, _: &Inside<'_>, platform: &P, cpu: usize) {
        let cpu = cpu.min(self.cpus - 1);
        // Relaxed: a thread closes and opens the table only while it is alone in the gate.
        if self.used.contains(cpu) || self.shut.load(Ordering::Relaxed) {
            return;
        }
        let Some(mut region) = self.lock(cpu).try_lock() else { return };
        if *region != 0 {
            return;
        }
        *region = self.make_region(cpu);
        self.used.insert(cpu);
        if self.kind(platform, cpu) == CacheMode::Rseq {
            self.pointer(cpu).store(at(*region), Ordering::Release); // Pairs with the loads of the sequences.
        }
    }

    /// CPUs that have a region now. Other CPUs have no objects, so walks skip them.
    pub fn used(&self) -> CpuSet {
        self.used.now()
    }

    fn is_used(&self, cpu: usize) -> bool {
        self.used.contains(cpu.min(self.cpus - 1))
    }

    fn table(&self) -> &SequenceTable {
        // SAFETY: `open` requires that the table lives as long as these slots and does not move.
        unsafe { &*at::<SequenceTable>(self.table) }
    }

    pub(crate) fn entry(&self, entry: usize) -> &AtomicPtr<u8> {
        &self.table().regions[entry]
    }

    /// The table's entry of a CPU.
    fn pointer(&self, cpu: usize) -> &AtomicPtr<u8> {
        self.entry(cpu.min(self.cpus - 1) + UNREGISTERED)
    }

    pub(crate) fn locks(&self) -> *mut CpuLock<usize> {
        at(self.memory + CLOSED_REGION_BYTES)
    }

    pub(crate) fn lock(&self, cpu: usize) -> &CpuLock<usize> {
        // SAFETY: the mapping has a lock for each CPU. The zeroes of a fresh mapping are a free
        // lock that holds 0.
        unsafe { &*self.locks().add(cpu.min(self.cpus - 1)) }
    }

    /// Whether any CPU may have Rseq slots.
    pub fn has_rseq(&self) -> bool {
        self.offset.is_some()
    }

    /// The kind of a CPU's slots. The table entry of an isolated CPU always points to the closed
    /// region. So sequences on that CPU are refused, and the slow path works on the Atomic slots.
    pub fn kind<P: Platform>(&self, platform: &P, cpu: usize) -> CacheMode {
        if self.offset.is_some() && !platform.is_isolated(cpu) { CacheMode::Rseq } else { CacheMode::Atomic }
    }

    /// Whether draining a CPU's stacks takes a fence.
    pub fn takes_fence<P: Platform>(&self, platform: &P, cpu: usize) -> bool {
        self.kind(platform, cpu) == CacheMode::Rseq
    }

    /// Used CPUs of one kind.
    fn of_kind<P: Platform>(&self, platform: &P, kind: CacheMode) -> impl Iterator<Item = usize> {
        self.used.now().iter().filter(move |&cpu| self.kind(platform, cpu) == kind)
    }

    /// Opens the table after fork: stores the regions of used Rseq CPUs, and unlocks the used
    /// Atomic CPUs. These are the CPUs that [`CpuCaches::close_table`] found, since no CPU gets a
    /// region while the table is closed.
    pub fn open_table<P: Platform>(&self, platform: &P) {
        // Relaxed: the thread that closed the table opens it, or its copy in the child does.
        // Closers of the gate queue, so no other thread writes the flag meanwhile.
        if self.closed.swap(false, Ordering::Relaxed) {
            // SAFETY: `closed` is true only after `close_table` has locked every used Atomic CPU
            // and forgotten the guards, in this process or its parent. No CPU was added since.
            self.of_kind(platform, CacheMode::Atomic).for_each(|cpu| unsafe { self.lock(cpu).unlock() });
        }
        for cpu in self.of_kind(platform, CacheMode::Rseq) {
            // SAFETY: the caller has closed the fork gate, or is the child's only thread. So no
            // thread holds or takes the lock of an Rseq CPU meanwhile.
            let region = unsafe { self.lock(cpu).peek() };
            self.pointer(cpu).store(at(region), Ordering::Release); // Pairs with the loads of the sequences.
        }
        self.shut.store(false, Ordering::Relaxed);
    }

    /// Closes the table for fork. After `Ok`, no sequence runs or starts, and no thread works on a
    /// stack of an Atomic CPU. After an error, new sequences are refused all the same. While
    /// another thread holds a CPU's lock, `wait` says whether to try again. A lock is held for a
    /// few instructions, unless its holder is preempted.
    ///
    /// # Errors
    /// Returns the error of the fence, or [`Errno::BUSY`] if `wait` gave up on a lock that another
    /// thread holds. Operations may still be in progress then.
    pub fn close_table<P: Platform>(&self, platform: &P, mut wait: impl FnMut() -> bool) -> Result<(), Errno> {
        self.shut.store(true, Ordering::Relaxed);
        let mut held = false;
        for (taken, cpu) in self.of_kind(platform, CacheMode::Atomic).enumerate() {
            let guard = loop {
                match self.lock(cpu).lock_bounded(REMOTE_LOCK_TRIES_MAX) {
                    None if wait() => {}
                    guard => break guard,
                }
            };
            let Some(guard) = guard else {
                // SAFETY: this loop has locked the first `taken` CPUs and forgotten their guards.
                self.of_kind(platform, CacheMode::Atomic)
                    .take(taken)
                    .for_each(|cpu| unsafe { self.lock(cpu).unlock() });
                held = true;
                break;
            };
            core::mem::forget(guard);
        }
        self.closed.store(!held, Ordering::Relaxed);
        let mut any = false;
        for cpu in self.of_kind(platform, CacheMode::Rseq) {
            // SeqCst: pairs with the fence, after which every sequence has ended or reads the
            // closed region.
            self.pointer(cpu).store(at(self.closed_region()), Ordering::SeqCst);
            any = true;
        }
        if any {
            self.fences.fetch_add(1, Ordering::Relaxed);
            platform.fence_all()?;
        }
        if held { Err(Errno::BUSY) } else { Ok(()) }
    }

    /// Runs `sequence` on a stack of this CPU if the CPU has Rseq slots, or `locked` if it has
    /// Atomic slots.
    fn attempt<P: Platform, T>(
        &self,
        platform: &P,
        stack: StackId,
        mut sequence: impl FnMut(usize) -> (T, SequenceResult),
        locked: impl FnOnce(&mut LockedStack) -> Option<T>,
    ) -> Attempt<T> {
        let cpu = platform.cpu();
        if self.kind(platform, cpu) == CacheMode::Atomic {
            if !self.is_used(cpu) {
                return Attempt::Refused;
            }
            let Some(region) = self.lock(cpu).try_lock() else { return Attempt::Busy };
            return locked(&mut LockedStack(self::stack(*region, stack))).map_or(Attempt::Refused, Attempt::Done);
        }
        for _ in 0..ATTEMPTS_MAX {
            match sequence(usize::from(stack.offset())) {
                (value, SequenceResult::Committed) => return Attempt::Done(value),
                (_, SequenceResult::Refused) => return Attempt::Refused,
                (_, SequenceResult::Aborted) => {}
            }
        }
        Attempt::Busy
    }

    /// Runs `work` on a stack of this CPU if the CPU has Atomic slots and its lock is free. Rseq
    /// CPUs use [`FastPath`](crate::fast_path::FastPath) instead.
    #[inline]
    fn at_once<P: Platform, T>(
        &self,
        platform: &P,
        stack: impl FnOnce(usize) -> StackId,
        work: impl FnOnce(LockedStack) -> Option<T>,
    ) -> Option<T> {
        let cpu = platform.cpu();
        // This code is outside the gate, so a fork may happen at any point. Fork takes the locks of
        // used CPUs only, so this thread must not take the lock of a CPU without a region.
        if self.kind(platform, cpu) == CacheMode::Rseq || !self.is_used(cpu) {
            return None;
        }
        let region = self.lock(cpu).try_lock()?;
        work(LockedStack(self::stack(*region, stack(cpu))))
    }

    /// Pops a local object of a class, if this CPU has Atomic slots and an object is there.
    #[inline]
    pub fn pop_at_once<P: Platform>(&self, platform: &P, class: Class) -> Option<*mut u8> {
        self.at_once(platform, |_| StackId::local(class), |mut stack| stack.pop())
    }

    /// Pushes an object with the home `home` onto a stack of this CPU, if it has Atomic slots and
    /// room.
    #[inline]
    pub fn push_at_once<P: Platform>(&self, platform: &P, class: Class, home: u16, object: *mut u8) -> bool {
        let stack = |cpu| if home == cpu as u16 { StackId::local(class) } else { StackId::remote(class) };
        self.at_once(platform, stack, |mut stack| stack.push_each(1, |_| object)).is_some()
    }

    /// Pops a local object of a class from this CPU's stack.
    pub fn pop<P: Platform>(&self, platform: &P, class: Class) -> Attempt<*mut u8> {
        let sequence = |place| {
            // SAFETY: on Rseq CPUs the table holds the registered offset. Its entries are regions
            // or the closed region, which have a stack at `place` until `close`.
            let object = unsafe { rseq::pop(self.table(), place) };
            // An aborted pop looks like a refused one. The refill that follows handles both.
            (object, if object.is_null() { SequenceResult::Refused } else { SequenceResult::Committed })
        };
        self.attempt(platform, StackId::local(class), sequence, LockedStack::pop)
    }

    /// Pushes an object onto a stack of this CPU.
    pub fn push<P: Platform>(&self, platform: &P, stack: StackId, object: *mut u8) -> Attempt<()> {
        self.push_many(platform, stack, &[object])
    }

    /// Pushes all of `objects` onto a stack of this CPU, or none.
    pub fn push_many<P: Platform>(&self, platform: &P, stack: StackId, objects: &[*mut u8]) -> Attempt<()> {
        // SAFETY: on Rseq CPUs the table holds the registered offset. Its entries are regions or
        // the closed region, which have a stack at `place` until `close`. No object is at null.
        let sequence = |place| ((), unsafe { rseq::push_many(self.table(), place, objects) });
        self.attempt(platform, stack, sequence, |stack| stack.push_each(objects.len(), |n| objects[n]))
    }

    /// Pushes all objects of a strided run onto a stack of this CPU, or none.
    pub fn push_strided_run<P: Platform>(&self, platform: &P, stack: StackId, objects: &StridedRun) -> Attempt<()> {
        let (step, count) = (objects.step as isize, objects.length as usize);
        if count == 0 {
            return Attempt::Done(());
        }
        // SAFETY: on Rseq CPUs the table holds the registered offset. Its entries are regions or
        // the closed region, which have a stack at `place` until `close`. The run has at least one
        // object, and no object is at null.
        let sequence = |place| ((), unsafe { rseq::push_strided_run(self.table(), place, objects.first, step, count) });
        self.attempt(platform, stack, sequence, |stack| stack.push_each(count, |n| objects.at(n)))
    }

    /// Fills `objects` from the top of a stack of this CPU, or changes nothing.
    pub fn pop_many<P: Platform>(&self, platform: &P, stack: StackId, objects: &mut [*mut u8]) -> Attempt<()> {
        // Both closures write to `objects`, but only one of them runs.
        let objects = core::cell::RefCell::new(objects);
        // SAFETY: on Rseq CPUs the table holds the registered offset. Its entries are regions or
        // the closed region, which have a stack at `place` until `close`.
        let sequence = |place| ((), unsafe { rseq::pop_many(self.table(), place, &mut objects.borrow_mut()) });
        self.attempt(platform, stack, sequence, |stack| stack.pop_many(&mut objects.borrow_mut()))
    }

    /// Gives a stack of this CPU room for `objects` objects if it has less. A stack has no room
    /// before its first use, and after a taker has taken it. The first call on a CPU makes the
    /// CPU's region.
    pub fn raise_capacity<P: Platform>(
        &self,
        inside: &Inside<'_>,
        platform: &P,
        stack: StackId,
        objects: u32,
    ) -> Attempt<()> {
        self.begin(inside, platform, platform.cpu());
        let capacity = objects.min(stack.capacity());
        // SAFETY: on Rseq CPUs the table holds the registered offset. Its entries are regions or
        // the closed region, which have a stack at `place` until `close`. A region has
        // `stack.capacity()` cells for the stack, and the closed region's mark refuses.
        let sequence = |place| ((), unsafe { rseq::raise_capacity(self.table(), place, capacity) });
        self.attempt(platform, stack, sequence, |stack| {
            let end = stack.0.bottom.load(Ordering::Relaxed).wrapping_add(capacity as usize);
            stack.0.end.store(end.max(stack.0.end.load(Ordering::Relaxed)), Ordering::Relaxed);
            Some(())
        })
    }

    /// Takes the objects of the `wanted` classes from `cpu`'s stacks, and passes them to `each` by
    /// class. Any thread may call this. The call issues at most one fence. Returns `false` and
    /// changes nothing if the CPU was skipped.
    pub fn drain_cpu<P: Platform>(
        &self,
        platform: &P,
        cpu: usize,
        wanted: impl Fn(Class) -> bool,
        mut each: impl FnMut(Class, &[*mut u8]),
    ) -> bool {
        if !self.is_used(cpu) {
            return true;
        }
        let mut spare = self.spare.lock();
        if *spare == 0 {
            *spare = self.make_region(self.cpus);
        }
        // Threads of an Atomic CPU take this lock. For an Rseq CPU it guards only the address of
        // the CPU's region.
        let Some(mut region) = self.lock(cpu).lock_bounded(REMOTE_LOCK_TRIES_MAX) else { return self.skip() };
        if self.kind(platform, cpu) == CacheMode::Rseq {
            let pointer = self.pointer(cpu);
            // SeqCst: ordered before the fence. Through the fence it pairs with the loads of the
            // sequences.
            pointer.store(at(self.closed_region()), Ordering::SeqCst);
            self.fences.fetch_add(1, Ordering::Relaxed);
            if platform.fence(cpu).is_err() {
                // The taker takes nothing. No other thread replaces the entry, since this thread
                // holds the mutex of the spare.
                pointer.store(at(*region), Ordering::Release); // Pairs with the loads of the sequences.
                return self.skip();
            }
            keep(*region, *spare, &wanted);
            pointer.store(at(*spare), Ordering::Release); // Pairs with the sequences' loads; publishes the kept objects.
        } else {
            keep(*region, *spare, &wanted);
        }
        let old = core::mem::replace(&mut *region, *spare);
        drop(region);
        for id in StackId::all() {
            let (objects, class) = (objects(stack(old, id)), id.class());
            if wanted(class) && !objects.is_empty() {
                each(class, objects);
            }
            clear(old, id);
        }
        *spare = old;
        true
    }

    fn skip(&self) -> bool {
        self.skipped.fetch_add(1, Ordering::Relaxed);
        false
    }

    /// Reads the state of a CPU's stacks of a class while the CPU's threads may change them. The
    /// result is for statistics, and for comparison with a later result.
    pub fn snapshot<P: Platform>(&self, platform: &P, cpu: usize, class: Class) -> StackSnapshot {
        let Some(region) = self.region(platform, cpu) else {
            return StackSnapshot { active: true, ..StackSnapshot::default() };
        };
        let [local, remote] =
            [StackId::local(class), StackId::remote(class)].map(|id| CpuCaches::snapshot_stack(stack(region, id), id));
        StackSnapshot {
            count: local.count + remote.count,
            active: local.active || remote.active,
            top: local.top ^ remote.top.rotate_left(1),
        }
    }

    /// Address of a CPU's region, for reads only; that of the closed region if the CPU has no
    /// region. `None` if another thread holds an Atomic CPU's lock.
    fn region<P: Platform>(&self, platform: &P, cpu: usize) -> Option<usize> {
        if !self.is_used(cpu) {
            return Some(self.closed_region());
        }
        if self.kind(platform, cpu) == CacheMode::Atomic {
            return self.lock(cpu).try_lock().map(|region| *region);
        }
        Some(self.pointer(cpu).load(Ordering::Acquire).addr()) // Pairs with the Release in `drain_cpu` and `begin`.
    }

    /// A stack of a CPU, for reads only; a stack of the closed region if the CPU's region is not
    /// available.
    fn stack<P: Platform>(&self, platform: &P, cpu: usize, id: StackId) -> &Stack {
        stack(self.region(platform, cpu).unwrap_or_else(|| self.closed_region()), id)
    }

    /// Number of objects that a stack of `cpu` has room for, those in it included. The number is a
    /// hint, since the CPU's threads may change it.
    pub fn room<P: Platform>(&self, platform: &P, cpu: usize, id: StackId) -> u32 {
        let stack = self.stack(platform, cpu, id);
        let [bottom, end] = [&stack.bottom, &stack.end].map(|pointer| pointer.load(Ordering::Relaxed).addr());
        (end.saturating_sub(bottom) / size_of::<usize>()) as u32
    }

    fn snapshot_stack(stack: &Stack, id: StackId) -> StackSnapshot {
        let (head, bottom) = (stack.head.load(Ordering::Relaxed), stack.bottom.load(Ordering::Relaxed));
        let count = head.addr().saturating_sub(bottom.addr()) / size_of::<usize>();
        let top = (if count == 0 { bottom } else { head.wrapping_sub(1) }).cast::<AtomicPtr<u8>>();
        let active = stack.end.load(Ordering::Relaxed) != bottom;
        // The cells of a stack without room may have no memory, so they are not read.
        // SAFETY: `bottom` and the cell below `head` lie in a region, and regions stay mapped until
        // `close`. Any value of a cell will do.
        let top = if active { unsafe { (*top).load(Ordering::Relaxed) }.addr() } else { 0 };
        StackSnapshot { count: (count as u32).min(id.capacity()), active, top }
    }

    /// Estimates the number of objects in a stack of `cpu`, which the CPU's threads may change.
    pub fn count<P: Platform>(&self, platform: &P, cpu: usize, id: StackId) -> usize {
        CpuCaches::snapshot_stack(self.stack(platform, cpu, id), id).count as usize
    }

    /// Calls `each` with the objects in cells of a stack of `cpu`. The CPU's threads may change the
    /// stack meanwhile. So the call may report an object that has left, and miss another.
    pub fn each_seen<P: Platform>(
        &self,
        platform: &P,
        cpu: usize,
        id: StackId,
        cells: Range<usize>,
        each: &mut dyn FnMut(*mut u8),
    ) {
        let stack = self.stack(platform, cpu, id);
        let (head, bottom) = (stack.head.load(Ordering::Relaxed), stack.bottom.load(Ordering::Relaxed));
        let count = head.addr().saturating_sub(bottom.addr()) / size_of::<usize>();
        for cell in cells.start..cells.end.min(count).min(id.capacity() as usize) {
            // SAFETY: `bottom` is the lowest cell of a stack, and `cell` is below the stack's
            // capacity. Regions stay mapped until `close`. Any value of a cell will do.
            each(unsafe { (*bottom.wrapping_add(cell).cast::<AtomicPtr<u8>>()).load(Ordering::Relaxed) });
        }
    }

    /// Number of CPUs with slots.
    pub fn cpus(&self) -> usize {
        self.cpus
    }

    /// Counts of fences and of skipped takes.
    pub fn counters(&self) -> FenceCounts {
        let [fences, skipped] = [&self.fences, &self.skipped].map(|count| count.load(Ordering::Relaxed));
        FenceCounts { fences, skipped }
    }
}

/// Counts of [`CpuCaches`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FenceCounts {
    /// Fences issued.
    pub fences: u32,
    /// Calls of [`CpuCaches::drain_cpu`] that skipped the CPU: its lock was held, or the fence
    /// failed.
    pub skipped: u32,
}

/// The state of one stack of a CPU, or of both stacks of a class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StackSnapshot {
    /// Number of objects in the stacks.
    pub count: u32,
    /// Whether a stack has room for objects.
    pub active: bool,
    /// Combines the addresses of the topmost objects. It changes even if the count of a stack went
    /// up and down to the same number.
    pub top: usize,
}

/// A stack of an Atomic CPU whose lock is held.
struct LockedStack(&'static Stack);

impl LockedStack {
    fn pop(&mut self) -> Option<*mut u8> {
        let mut one = [core::ptr::null_mut()];
        self.pop_many(&mut one).map(|()| one[0])
    }

    fn pop_many(&mut self, to: &mut [*mut u8]) -> Option<()> {
        let objects = objects(self.0);
        let rest = objects.len().checked_sub(to.len())?;
        to.copy_from_slice(&objects[rest..]);
        self.0.head.store(self.0.bottom.load(Ordering::Relaxed).wrapping_add(rest), Ordering::Relaxed);
        Some(())
    }

    fn push_each(&mut self, count: usize, object: impl Fn(usize) -> *mut u8) -> Option<()> {
        let (head, end) = (self.0.head.load(Ordering::Relaxed), self.0.end.load(Ordering::Relaxed));
        if (end.addr() - head.addr()) / size_of::<usize>() < count {
            return None;
        }
        // SAFETY: the CPU's lock is held, so no other thread writes to the stack's cells. At least
        // `count` cells lie between head and end.
        (0..count).for_each(|n| unsafe { head.add(n).write(object(n)) });
        self.0.head.store(head.wrapping_add(count), Ordering::Relaxed);
        Some(())
    }
}
