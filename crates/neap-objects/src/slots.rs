//! Slots: for every CPU and class, two stacks of free objects that the CPU's threads push to and pop from.
//!
//! Sits between `malloc` and `free` and the class caches. One stack of the two is for objects of pages that are at
//! [home](crate::hot::KindEntry) on this CPU; the other is for guests, which are never popped one by one. All stacks of a
//! CPU lie in one *region*; a table holds one pointer per CPU to its region, also for every CPU that the kernel could name
//! and for the ids -1 and -2 of threads that are not registered. A CPU gets its region when a stack of it first gets room
//! ([`Slots::widen`]); until then its entry is DUMMY, its lock holds 0, nothing of its own was ever written, and no walk
//! over CPUs looks at it. Two kinds, one per CPU:
//!
//! * **Rseq**: worked on by the restartable sequences of `neap_os::rseq`, with no lock and no locked instruction.
//! * **Atomic**: the same stacks under the CPU's lock, for machines without rseq or fences and for isolated CPUs.
//!
//! How anybody takes what is in an Rseq CPU's stacks, and why nothing is lost:
//! 1. replace the table's pointer by DUMMY, a region without room or objects: every sequence that starts now is refused;
//! 2. fence the CPU: a sequence that had read the old pointer has been aborted, or had committed and is visible;
//! 3. the old region is the taker's alone; stacks that are not wanted are copied to a spare region, and the table gets that;
//! 4. what is wanted is dissolved while the CPU works on, and the old region, empty again, is the next spare.
//!
//! If the fence fails nothing is known, and the table gets its old pointer back. Takers exclude each other by a mutex: they
//! share the spare region, and DUMMY in the table is always their own. A stack that was taken has no room, so the
//! next operation on it goes the slow way, which is also what wakes maintenance: nothing is stranded.
//!
//! There is no owner's lock and so nobody to wait for. The exhaustive explorer in `tests/rseq_explorer` plays this with
//! preemption, migration, signals and store buffers, and finds what breaks when a step is left out.

use crate::progression::Progression;
use crate::region::{DUMMY, REGION, StackId, at, clear, keep, make_dummy, objects, stack};
use crate::size_class::Class;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use neap_base::platform::{Errno, Platform};
use neap_base::{CpuLock, Mutex};
use neap_os::rseq::{self, MOST_CPUS, Outcome, Stack, Table, UNREGISTERED, has_instructions};
use neap_os::topology::{CpuSet, MAX_CPUS};
use neap_os::used_cpus::UsedCpus;

/// Aborts in a row after which an operation goes the shared way: a debugger that steps would abort for ever.
const ATTEMPTS: u32 = 3;

/// Tries at another CPU's lock before it is skipped.
const REMOTE_TRIES: u32 = 1000;

/// The kind of a CPU's slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Restartable sequences.
    Rseq,
    /// A lock taken by compare-and-swap.
    Atomic,
}

/// What an operation came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attempt<T> {
    /// It happened.
    Done(T),
    /// The stack is full, empty, or has no capacity.
    Refused,
    /// The slot is not to be had now: take the shared path.
    Busy,
}

/// The slots of all CPUs.
#[derive(Debug)]
pub struct Slots {
    cpus: usize,
    /// CPUs that the kernel could name and the table has entries for.
    pub(crate) named: usize,
    /// The address of the table that the sequences start from.
    table: usize,
    /// One mapping: DUMMY, locks with the regions that CPUs own, the regions themselves, the first spare.
    memory: usize,
    length: usize,
    offset: Option<isize>,
    /// CPUs that have a region.
    used: UsedCpus,
    /// The region that the next taker leaves behind, empty; 0 before the first one.
    pub(crate) spare: Mutex<usize>,
    /// Whether the locks of Atomic CPUs are held by [`Slots::close_table`].
    closed: AtomicBool,
    /// Whether the table is closed for fork: no CPU gets a region.
    shut: AtomicBool,
    skipped: AtomicU32,
    fences: AtomicU32,
}

impl Slots {
    /// Maps the regions, and fills a table for them. With `use_rseq` false
    /// every CPU gets the Atomic kind.
    ///
    /// # Errors
    /// What the mapping answered.
    ///
    /// # Safety
    /// The table is no other slots', stays where it is, and lives as long as these are used.
    pub unsafe fn open<P: Platform>(platform: &P, use_rseq: bool, table: &Table) -> Result<Slots, Errno> {
        let (cpus, named) = (platform.cpus().min(MAX_CPUS), platform.nameable_cpus().max(platform.cpus()));
        let length = Slots::regions_at(cpus) + (cpus + 1) * REGION;
        let length = length.next_multiple_of(platform.page_size());
        let memory = platform.map(length)?;
        let slots = Slots {
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
        make_dummy(slots.dummy());
        (0..slots.named + UNREGISTERED)
            .for_each(|entry| slots.entry(entry).store(at(slots.dummy()), Ordering::Relaxed));
        table.offset.store(slots.offset.unwrap_or(0), Ordering::Relaxed);
        Ok(slots)
    }

    /// Unmaps the regions.
    ///
    /// # Safety
    /// Nobody uses the slots any more, and no table points to them.
    pub unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: as the caller promises.
        unsafe { platform.unmap(self.memory, self.length) };
    }

    /// The mapping, and its length.
    pub(crate) fn mapping(&self) -> (usize, usize) {
        (self.memory, self.length)
    }

    const fn regions_at(cpus: usize) -> usize {
        (DUMMY + cpus * size_of::<CpuLock<usize>>()).next_multiple_of(4096)
    }

    pub(crate) fn first_region(&self) -> usize {
        self.memory + Slots::regions_at(self.cpus)
    }

    /// The region that nobody writes to: its mark says so, and no stack in it has objects or room.
    pub(crate) fn dummy(&self) -> usize {
        self.memory
    }

    /// Makes the region of that number, empty. It is the caller's alone.
    fn make_region(&self, number: usize) -> usize {
        let region = self.first_region() + number * REGION;
        StackId::all().for_each(|stack| clear(region, stack));
        // SAFETY: a region begins with its mark; only the caller has this one.
        unsafe { at::<u64>(region).write(1) };
        region
    }

    /// Gives a CPU its region if it has none. The caller is inside the fork gate. Nothing happens while another thread
    /// holds the CPU's lock, or the table is closed: the CPU's operations are refused for the moment.
    ///
    /// Threads that do this at once on one CPU, and takers, exclude each other by the CPU's lock:
    /// 1. A finds no region, and makes it. 2. B waits for nothing and is refused, or comes later and finds it.
    /// 3. A taker that does not see the CPU among the used ones takes nothing, as if it had come before A.
    pub(crate) fn begin<P: Platform>(&self, platform: &P, cpu: usize) {
        let cpu = cpu.min(self.cpus - 1);
        // Relaxed: the table is closed and opened by a thread that has the gate alone.
        if self.used.contains(cpu) || self.shut.load(Ordering::Relaxed) {
            return;
        }
        let Some(mut region) = self.lock(cpu).try_lock() else { return };
        if *region != 0 {
            return;
        }
        *region = self.make_region(cpu);
        self.used.insert(cpu);
        if self.kind(platform, cpu) == Kind::Rseq {
            self.pointer(cpu).store(at(*region), Ordering::Release); // Pairs with the loads of the sequences.
        }
    }

    /// CPUs that have a region, at this moment: no other has anything to walk over.
    pub fn used(&self) -> CpuSet {
        self.used.now()
    }

    fn is_used(&self, cpu: usize) -> bool {
        self.used.contains(cpu.min(self.cpus - 1))
    }

    fn table(&self) -> &Table {
        // SAFETY: it lives as long as these slots, and stays where it is.
        unsafe { &*at::<Table>(self.table) }
    }

    pub(crate) fn entry(&self, entry: usize) -> &AtomicPtr<u8> {
        &self.table().regions[entry]
    }

    /// The table's entry of a CPU.
    fn pointer(&self, cpu: usize) -> &AtomicPtr<u8> {
        self.entry(cpu.min(self.cpus - 1) + UNREGISTERED)
    }

    fn locks(&self) -> *mut CpuLock<usize> {
        at(self.memory + DUMMY)
    }

    pub(crate) fn lock(&self, cpu: usize) -> &CpuLock<usize> {
        // SAFETY: there is a lock per CPU, and the zeroes of a fresh mapping are a free one around 0.
        unsafe { &*self.locks().add(cpu.min(self.cpus - 1)) }
    }

    /// Whether any CPU may have Rseq slots.
    pub fn has_rseq(&self) -> bool {
        self.offset.is_some()
    }

    /// The kind of a CPU's slots. An isolated CPU's entry of the table is DUMMY for good: its threads' sequences are
    /// refused, no slower than those of other CPUs would be otherwise, and the slow way leads to the Atomic slot.
    pub fn kind<P: Platform>(&self, platform: &P, cpu: usize) -> Kind {
        if self.offset.is_some() && !platform.is_isolated(cpu) { Kind::Rseq } else { Kind::Atomic }
    }

    /// Whether a thread that takes what is in a CPU's stacks has to fence.
    pub fn takes_fence<P: Platform>(&self, platform: &P, cpu: usize) -> bool {
        self.kind(platform, cpu) == Kind::Rseq
    }

    /// Used CPUs of a kind.
    fn of_kind<P: Platform>(&self, platform: &P, kind: Kind) -> impl Iterator<Item = usize> {
        self.used.now().iter().filter(move |&cpu| self.kind(platform, cpu) == kind)
    }

    /// Lets the used CPUs with Rseq slots have their regions and the others their locks, again after fork. Used are those
    /// that [`Slots::close_table`] found: none is added while the table is closed.
    pub fn open_table<P: Platform>(&self, platform: &P) {
        // Relaxed: who closes is who opens, or a copy of it, because closers of the gate queue.
        if self.closed.swap(false, Ordering::Relaxed) {
            // SAFETY: `close_table` took them all and forgot the guards.
            self.of_kind(platform, Kind::Atomic).for_each(|cpu| unsafe { self.lock(cpu).unlock() });
        }
        for cpu in self.of_kind(platform, Kind::Rseq) {
            // SAFETY: the child of fork has one thread, and the parent holds the gate.
            let region = unsafe { self.lock(cpu).peek() };
            self.pointer(cpu).store(at(region), Ordering::Release); // Pairs with the loads of the sequences.
        }
        self.shut.store(false, Ordering::Relaxed);
    }

    /// Closes the table for fork: when this returns `Ok`, no sequence is in progress and none starts, and no stack of an
    /// Atomic CPU is being worked on. An error leaves as much of that true as can be had. For each lock that somebody holds, a few instructions long unless the holder does not
    /// run, `wait` is asked whether to look again.
    ///
    /// # Errors
    /// The fence failed, or a lock stayed held: operations may still be in progress.
    pub fn close_table<P: Platform>(&self, platform: &P, mut wait: impl FnMut() -> bool) -> Result<(), Errno> {
        self.shut.store(true, Ordering::Relaxed);
        let mut held = false;
        for (taken, cpu) in self.of_kind(platform, Kind::Atomic).enumerate() {
            let guard = loop {
                match self.lock(cpu).lock_bounded(REMOTE_TRIES) {
                    None if wait() => {}
                    guard => break guard,
                }
            };
            let Some(guard) = guard else {
                // SAFETY: the first ones were taken in this loop.
                self.of_kind(platform, Kind::Atomic).take(taken).for_each(|cpu| unsafe { self.lock(cpu).unlock() });
                held = true;
                break;
            };
            core::mem::forget(guard);
        }
        self.closed.store(!held, Ordering::Relaxed);
        let mut any = false;
        for cpu in self.of_kind(platform, Kind::Rseq) {
            // SeqCst: pairs with the fence, after which every sequence has seen DUMMY or is over.
            self.pointer(cpu).store(at(self.dummy()), Ordering::SeqCst);
            any = true;
        }
        if any {
            self.fences.fetch_add(1, Ordering::Relaxed);
            platform.fence_all()?;
        }
        if held { Err(Errno::BUSY) } else { Ok(()) }
    }

    /// Runs an operation in this CPU's way: `sequence` on Rseq slots, `locked` on the stack of an Atomic CPU.
    fn attempt<P: Platform, T>(
        &self,
        platform: &P,
        stack: StackId,
        mut sequence: impl FnMut(usize) -> (T, Outcome),
        locked: impl FnOnce(&mut LockedStack) -> Option<T>,
    ) -> Attempt<T> {
        let cpu = platform.cpu();
        if self.kind(platform, cpu) == Kind::Atomic {
            if !self.is_used(cpu) {
                return Attempt::Refused;
            }
            let Some(region) = self.lock(cpu).try_lock() else { return Attempt::Busy };
            return locked(&mut LockedStack(self::stack(*region, stack))).map_or(Attempt::Refused, Attempt::Done);
        }
        for _ in 0..ATTEMPTS {
            match sequence(usize::from(stack.place())) {
                (value, Outcome::Committed) => return Attempt::Done(value),
                (_, Outcome::Refused) => return Attempt::Refused,
                (_, Outcome::Aborted) => {}
            }
        }
        Attempt::Busy
    }

    /// Runs `work` on a stack of this CPU if the CPU has Atomic slots and nobody holds them: what
    /// [`Hot`](crate::hot::Hot) does on the others.
    #[inline]
    fn at_once<P: Platform, T>(
        &self,
        platform: &P,
        stack: impl FnOnce(usize) -> StackId,
        work: impl FnOnce(LockedStack) -> Option<T>,
    ) -> Option<T> {
        let cpu = platform.cpu();
        // Not even the lock of a CPU without a region is taken: fork takes those of used CPUs only, and this is outside the gate.
        if self.kind(platform, cpu) == Kind::Rseq || !self.is_used(cpu) {
            return None;
        }
        let region = self.lock(cpu).try_lock()?;
        work(LockedStack(self::stack(*region, stack(cpu))))
    }

    /// Takes an object of a class that is at home here, if this CPU has Atomic slots and an object is there.
    #[inline]
    pub fn pop_at_once<P: Platform>(&self, platform: &P, class: Class) -> Option<*mut u8> {
        self.at_once(platform, |_| StackId::home(class), |mut stack| stack.pop())
    }

    /// Puts an object that is at home on `home` on a stack of this CPU, if it has Atomic slots and room.
    #[inline]
    pub fn push_at_once<P: Platform>(&self, platform: &P, class: Class, home: u16, object: *mut u8) -> bool {
        let stack = |cpu| if home == cpu as u16 { StackId::home(class) } else { StackId::guests(class) };
        self.at_once(platform, stack, |mut stack| stack.push_each(1, |_| object)).is_some()
    }

    /// Takes an object of a class that is at home here.
    pub fn pop<P: Platform>(&self, platform: &P, class: Class) -> Attempt<*mut u8> {
        let sequence = |place| {
            // SAFETY: the table is that of these regions.
            let object = unsafe { rseq::pop(self.table(), place) };
            // An aborted pop looks like a refused one; the refill that follows finds out.
            (object, if object.is_null() { Outcome::Refused } else { Outcome::Committed })
        };
        self.attempt(platform, StackId::home(class), sequence, LockedStack::pop)
    }

    /// Puts an object on a stack of this CPU.
    pub fn push<P: Platform>(&self, platform: &P, stack: StackId, object: *mut u8) -> Attempt<()> {
        self.push_many(platform, stack, &[object])
    }

    /// Puts all of `objects` on a stack of this CPU, or none.
    pub fn push_many<P: Platform>(&self, platform: &P, stack: StackId, objects: &[*mut u8]) -> Attempt<()> {
        // SAFETY: as above.
        let sequence = |place| ((), unsafe { rseq::push_many(self.table(), place, objects) });
        self.attempt(platform, stack, sequence, |stack| stack.push_each(objects.len(), |n| objects[n]))
    }

    /// Puts all objects of a progression on a stack of this CPU, or none.
    pub fn push_progression<P: Platform>(&self, platform: &P, stack: StackId, objects: &Progression) -> Attempt<()> {
        let (step, count) = (objects.step as isize, objects.length as usize);
        if count == 0 {
            return Attempt::Done(());
        }
        // SAFETY: as above.
        let sequence = |place| ((), unsafe { rseq::push_progression(self.table(), place, objects.first, step, count) });
        self.attempt(platform, stack, sequence, |stack| stack.push_each(count, |n| objects.at(n)))
    }

    /// Fills `objects` from the top of a stack of this CPU, or leaves everything as it is.
    pub fn pop_many<P: Platform>(&self, platform: &P, stack: StackId, objects: &mut [*mut u8]) -> Attempt<()> {
        // Both closures write to it, but only one of them runs.
        let objects = core::cell::RefCell::new(objects);
        // SAFETY: as above.
        let sequence = |place| ((), unsafe { rseq::pop_many(self.table(), place, &mut objects.borrow_mut()) });
        self.attempt(platform, stack, sequence, |stack| stack.pop_many(&mut objects.borrow_mut()))
    }

    /// Gives a stack of this CPU room for `objects` if it has less. It has none before it is first used, and after it was
    /// taken. What is the first use of the CPU makes its region.
    pub fn widen<P: Platform>(&self, platform: &P, stack: StackId, objects: u32) -> Attempt<()> {
        self.begin(platform, platform.cpu());
        let capacity = objects.min(stack.capacity());
        // SAFETY: as above; every region has that many cells there.
        let sequence = |place| ((), unsafe { rseq::widen(self.table(), place, capacity) });
        self.attempt(platform, stack, sequence, |stack| {
            let end = stack.0.bottom.load(Ordering::Relaxed).wrapping_add(capacity as usize);
            stack.0.end.store(end.max(stack.0.end.load(Ordering::Relaxed)), Ordering::Relaxed);
            Some(())
        })
    }

    /// Takes the objects of the `wanted` classes from `cpu`, from any thread, with at most one fence, and hands them over
    /// by class. `false` if the CPU was skipped: nothing has changed then.
    pub fn take<P: Platform>(
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
        // For an Atomic CPU this is the lock that its owner takes; for an Rseq one it says which region is whose.
        let Some(mut region) = self.lock(cpu).lock_bounded(REMOTE_TRIES) else { return self.skip() };
        if self.kind(platform, cpu) == Kind::Rseq {
            let pointer = self.pointer(cpu);
            // SeqCst: before the fence in every order; pairs with the loads of the sequences, by way of the fence.
            pointer.store(at(self.dummy()), Ordering::SeqCst);
            self.fences.fetch_add(1, Ordering::Relaxed);
            if platform.fence(cpu).is_err() {
                // Not acquired. Nobody else replaces DUMMY: the mutex is held.
                pointer.store(at(*region), Ordering::Release); // Pairs with the loads of the sequences.
                return self.skip();
            }
            keep(*region, *spare, &wanted);
            pointer.store(at(*spare), Ordering::Release); // As above: who sees the region sees what was kept.
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

    /// What a CPU's stacks of a class look like right now: only good for comparing with themselves later, and for statistics,
    /// because the owner goes on working.
    pub fn peek<P: Platform>(&self, platform: &P, cpu: usize, class: Class) -> Peek {
        let Some(region) = self.region(platform, cpu) else {
            return Peek { active: true, ..Peek::default() };
        };
        let [home, guests] =
            [StackId::home(class), StackId::guests(class)].map(|id| Slots::glance(stack(region, id), id));
        Peek {
            count: home.count + guests.count,
            active: home.active || guests.active,
            top: home.top ^ guests.top.rotate_left(1),
        }
    }

    /// The region of a CPU, to look at; DUMMY where it has none. `None`: another thread works on an Atomic CPU's right now.
    fn region<P: Platform>(&self, platform: &P, cpu: usize) -> Option<usize> {
        if !self.is_used(cpu) {
            return Some(self.dummy());
        }
        if self.kind(platform, cpu) == Kind::Atomic {
            return self.lock(cpu).try_lock().map(|region| *region);
        }
        Some(self.pointer(cpu).load(Ordering::Acquire).addr()) // Pairs with the Release in `take` and `begin`.
    }

    /// A stack of a CPU, to look at; one without objects and room where the CPU's are not to be had.
    fn stack<P: Platform>(&self, platform: &P, cpu: usize, id: StackId) -> &Stack {
        stack(self.region(platform, cpu).unwrap_or_else(|| self.dummy()), id)
    }

    /// Objects that a stack of `cpu` has room for, those in it included; a hint, because the owner goes on working.
    pub fn room<P: Platform>(&self, platform: &P, cpu: usize, id: StackId) -> u32 {
        let stack = self.stack(platform, cpu, id);
        let [bottom, end] = [&stack.bottom, &stack.end].map(|pointer| pointer.load(Ordering::Relaxed).addr());
        (end.saturating_sub(bottom) / size_of::<usize>()) as u32
    }

    fn glance(stack: &Stack, id: StackId) -> Peek {
        let (head, bottom) = (stack.head.load(Ordering::Relaxed), stack.bottom.load(Ordering::Relaxed));
        let count = head.addr().saturating_sub(bottom.addr()) / size_of::<usize>();
        let top = (if count == 0 { bottom } else { head.wrapping_sub(1) }).cast::<AtomicPtr<u8>>();
        let active = stack.end.load(Ordering::Relaxed) != bottom;
        // Where nothing was ever put there is no memory to look at.
        // SAFETY: cells lie in regions, which stay mapped; a value that the owner is changing is as good as any.
        let top = if active { unsafe { (*top).load(Ordering::Relaxed) }.addr() } else { 0 };
        Peek { count: (count as u32).min(id.capacity()), active, top }
    }

    /// Objects in a stack of `cpu`, as far as can be seen from here while the owner goes on working.
    pub fn count<P: Platform>(&self, platform: &P, cpu: usize, id: StackId) -> usize {
        Slots::glance(self.stack(platform, cpu, id), id).count as usize
    }

    /// Calls `each` with what is in cells of a stack of `cpu`, likewise: an object may be met that has left, or missed.
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
            // SAFETY: the bottom is that of the region's cells, which stay mapped; a value that the owner is changing is as good as any.
            each(unsafe { (*bottom.wrapping_add(cell).cast::<AtomicPtr<u8>>()).load(Ordering::Relaxed) });
        }
    }

    /// CPUs there are slots for.
    pub fn cpus(&self) -> usize {
        self.cpus
    }

    /// Fences issued, and takes that were skipped.
    pub fn counters(&self) -> (u32, u32) {
        (self.fences.load(Ordering::Relaxed), self.skipped.load(Ordering::Relaxed))
    }
}

/// A glance at a CPU's stacks of a class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Peek {
    /// Objects in them.
    pub count: u32,
    /// Whether they have room for any.
    pub active: bool,
    /// Changes with the topmost objects: tells a stack that rests from one that went up and down.
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
        // SAFETY: there is room between head and end, and the lock is held.
        (0..count).for_each(|n| unsafe { head.add(n).write(object(n)) });
        self.0.head.store(head.wrapping_add(count), Ordering::Relaxed);
        Some(())
    }
}
