//! Slots: for every CPU and class, a stack of free objects that the CPU's threads push to and pop from.
//!
//! Sits between `malloc` and `free` and the class caches. All stacks of a CPU lie in one *region* at fixed places; a table
//! holds one pointer per CPU to its region, also for every CPU that the kernel could name and for the ids -1 and -2 of
//! threads that are not registered. Two kinds, one per CPU:
//!
//! * **Rseq**: worked on by the restartable sequences of `neap_os::rseq`, with no lock and no locked instruction.
//! * **Atomic**: the same stacks under the CPU's lock, for machines without rseq or fences and for isolated CPUs.
//!
//! How anybody takes what is in an Rseq CPU's stacks, and why nothing is lost:
//! 1. replace the table's pointer by DUMMY, a region without room or objects: every sequence that starts now is refused;
//! 2. fence the CPU: a sequence that had read the old pointer has been aborted, or had committed and is visible;
//! 3. the old region is the taker's alone; stacks that are not wanted are copied to a spare region, and the table gets that;
//! 4. what is wanted is dissolved while the CPU works on, and the old region, all zeroes again, is the next spare.
//!
//! If the fence fails nothing is known, and the table gets its old pointer back. Takers exclude each other by a mutex: they
//! share the spare region, and DUMMY in the table is always their own. A stack that was taken has no room, so the
//! next operation on it goes the slow way, which is also what wakes maintenance: nothing is stranded.
//!
//! There is no owner's lock and so nobody to wait for. The exhaustive explorer in `tests/rseq_explorer` plays this with
//! preemption, migration, signals and store buffers, and finds what breaks when a step is left out.

use crate::size_class::{CLASSES, Class};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use neap_base::platform::{Errno, Platform};
use neap_base::{CpuLock, Mutex};
use neap_os::rseq::{self, Outcome, Stack, Table};

/// Aborts in a row after which an operation goes the shared way: a debugger that steps would abort for ever.
const ATTEMPTS: u32 = 3;

/// Tries at another CPU's lock before it is skipped.
const REMOTE_TRIES: u32 = 1000;

/// Entries of the table below CPU 0: for the ids -1 and -2.
pub(crate) const UNREGISTERED: usize = 2;

/// Where the cells of each class begin in a region, in bytes; after the stacks of all classes.
pub(crate) const CELLS: [usize; CLASSES] = layout().0;

/// Bytes of a region.
pub(crate) const REGION: usize = layout().1.next_multiple_of(4096);

const fn layout() -> ([usize; CLASSES], usize) {
    let mut cells = [0; CLASSES];
    let mut next = (Class((CLASSES - 1) as u8).place() as usize) * size_of::<usize>() + size_of::<Stack>();
    let mut class = 1;
    while class < CLASSES {
        cells[class] = next;
        next += Class(class as u8).stack_capacity() as usize * size_of::<usize>();
        class += 1;
    }
    (cells, next)
}

/// Places from one class's stack to the next.
const PLACES: u16 = (size_of::<Stack>() / size_of::<usize>()) as u16;

impl Class {
    /// Where the class's stack lies in a region, in units of 8 bytes; 0 for [`Class::NONE`], since that is where the region's
    /// mark is: whether it may be written to.
    #[inline(always)]
    pub const fn place(self) -> u16 {
        if self.0 == 0 { 0 } else { 1 + (self.0 as u16 - 1) * PLACES }
    }

    /// The class of a place.
    pub const fn of_place(place: u16) -> Class {
        if place == 0 { Class::NONE } else { Class(((place - 1) / PLACES + 1) as u8) }
    }
}

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
    /// CPUs that the kernel could name.
    pub(crate) named: usize,
    /// One mapping: the table, locks with the regions that CPUs own, the regions themselves, the first spare, DUMMY.
    memory: usize,
    length: usize,
    offset: Option<u32>,
    /// The region that the next taker leaves behind, all zeroes.
    pub(crate) spare: Mutex<usize>,
    skipped: AtomicU32,
    fences: AtomicU32,
}

impl Slots {
    /// Maps the regions. With `use_rseq` false every CPU gets the Atomic kind.
    ///
    /// # Errors
    /// What the mapping answered.
    pub fn open<P: Platform>(platform: &P, use_rseq: bool) -> Result<Slots, Errno> {
        let (cpus, named) = (platform.cpus(), platform.nameable_cpus().max(platform.cpus()));
        let length = Slots::regions_at(cpus, named) + (cpus + 2) * REGION;
        let length = length.next_multiple_of(platform.page_size());
        let memory = platform.map(length)?;
        let slots = Slots {
            cpus,
            named,
            memory,
            length,
            offset: platform.rseq_offset().filter(|_| use_rseq),
            spare: Mutex::new(memory + Slots::regions_at(cpus, named) + cpus * REGION),
            skipped: AtomicU32::new(0),
            fences: AtomicU32::new(0),
        };
        for cpu in 0..=cpus {
            let region = slots.first_region() + cpu * REGION;
            // SAFETY: the mapping is fresh, and nobody else's; the last of these is the spare, which has no lock.
            unsafe {
                at::<u64>(region).write(1);
                Class::all().for_each(|class| clear(region, class));
                if cpu < cpus {
                    slots.locks().add(cpu).write(CpuLock::new(region));
                }
            }
        }
        (0..slots.named + UNREGISTERED)
            .for_each(|entry| slots.entry(entry).store(at(slots.dummy()), Ordering::Relaxed));
        slots.open_table(platform);
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

    const fn locks_at(named: usize) -> usize {
        ((named + UNREGISTERED) * size_of::<usize>()).next_multiple_of(align_of::<CpuLock<usize>>())
    }

    const fn regions_at(cpus: usize, named: usize) -> usize {
        (Slots::locks_at(named) + cpus * size_of::<CpuLock<usize>>()).next_multiple_of(4096)
    }

    pub(crate) fn first_region(&self) -> usize {
        self.memory + Slots::regions_at(self.cpus, self.named)
    }

    /// The region that nobody writes to: zeroes, so no stack in it has objects or room.
    pub(crate) fn dummy(&self) -> usize {
        self.first_region() + (self.cpus + 1) * REGION
    }

    pub(crate) fn entry(&self, entry: usize) -> &AtomicPtr<u8> {
        // SAFETY: the mapping begins with an entry for every CPU that could be named, and two more.
        unsafe { &*at::<AtomicPtr<u8>>(self.memory).add(entry) }
    }

    /// The table's entry of a CPU.
    fn pointer(&self, cpu: usize) -> &AtomicPtr<u8> {
        self.entry(cpu.min(self.cpus - 1) + UNREGISTERED)
    }

    fn locks(&self) -> *mut CpuLock<usize> {
        at(self.memory + Slots::locks_at(self.named))
    }

    pub(crate) fn lock(&self, cpu: usize) -> &CpuLock<usize> {
        // SAFETY: there is a lock per CPU.
        unsafe { &*self.locks().add(cpu.min(self.cpus - 1)) }
    }

    /// Whether any CPU may have Rseq slots.
    pub fn has_rseq(&self) -> bool {
        self.offset.is_some()
    }

    /// The kind of a CPU's slots.
    pub fn kind<P: Platform>(&self, platform: &P, cpu: usize) -> Kind {
        if self.offset.is_some() && !platform.is_isolated(cpu) { Kind::Rseq } else { Kind::Atomic }
    }

    /// Tells the sequences where the table is.
    pub fn publish(&self, table: &Table) {
        let Some(offset) = self.offset else { return };
        table.offset.store(offset, Ordering::Relaxed);
        table.regions.store(core::ptr::from_ref(self.entry(UNREGISTERED)).cast_mut(), Ordering::Relaxed);
    }

    /// Lets the CPUs with Rseq slots have their regions, at the start and again after fork.
    pub fn open_table<P: Platform>(&self, platform: &P) {
        for cpu in (0..self.cpus).filter(|&cpu| self.kind(platform, cpu) == Kind::Rseq) {
            // SAFETY: at the start and after fork nobody else is here.
            let region = unsafe { self.lock(cpu).peek() };
            self.pointer(cpu).store(at(region), Ordering::Release); // Pairs with the loads of the sequences.
        }
    }

    /// Closes the table for fork: when this returns `Ok`, no sequence is in progress and none starts.
    ///
    /// # Errors
    /// The fence failed: sequences may still commit.
    pub fn close_table<P: Platform>(&self, platform: &P) -> Result<(), Errno> {
        if self.offset.is_none() {
            return Ok(());
        }
        for cpu in 0..self.cpus {
            // SeqCst: pairs with the fence, after which every sequence has seen DUMMY or is over.
            self.pointer(cpu).store(at(self.dummy()), Ordering::SeqCst);
        }
        self.fences.fetch_add(1, Ordering::Relaxed);
        platform.fence_all()
    }

    /// Runs an operation in this CPU's way: `sequence` on Rseq slots, `locked` on the stack of an Atomic CPU.
    fn attempt<P: Platform, T>(
        &self,
        platform: &P,
        class: Class,
        mut sequence: impl FnMut(usize) -> (T, Outcome),
        locked: impl FnOnce(&mut LockedStack) -> Option<T>,
    ) -> Attempt<T> {
        let cpu = platform.cpu();
        if self.kind(platform, cpu) == Kind::Atomic {
            let Some(region) = self.lock(cpu).try_lock() else { return Attempt::Busy };
            return locked(&mut LockedStack(stack(*region, class))).map_or(Attempt::Refused, Attempt::Done);
        }
        for _ in 0..ATTEMPTS {
            match sequence(usize::from(class.place())) {
                (value, Outcome::Committed) => return Attempt::Done(value),
                (_, Outcome::Refused) => return Attempt::Refused,
                (_, Outcome::Aborted) => {}
            }
        }
        Attempt::Busy
    }

    /// Takes an object from this CPU's stack of `class`.
    pub fn pop<P: Platform>(&self, platform: &P, table: &Table, class: Class) -> Attempt<*mut u8> {
        let sequence = |place| {
            // SAFETY: the table was published over these regions.
            let object = unsafe { rseq::pop(table, place) };
            // An aborted pop looks like a refused one; the refill that follows finds out.
            (object, if object.is_null() { Outcome::Refused } else { Outcome::Committed })
        };
        self.attempt(platform, class, sequence, LockedStack::pop)
    }

    /// Puts an object on this CPU's stack of `class`.
    pub fn push<P: Platform>(&self, platform: &P, table: &Table, class: Class, object: *mut u8) -> Attempt<()> {
        self.push_many(platform, table, class, &[object])
    }

    /// Puts all of `objects` on this CPU's stack of `class`, or none.
    pub fn push_many<P: Platform>(
        &self,
        platform: &P,
        table: &Table,
        class: Class,
        objects: &[*mut u8],
    ) -> Attempt<()> {
        // SAFETY: as above.
        let sequence = |place| ((), unsafe { rseq::push_many(table, place, objects) });
        self.attempt(platform, class, sequence, |stack| stack.push_many(objects))
    }

    /// Fills `objects` from the top of this CPU's stack of `class`, or leaves everything as it is.
    pub fn pop_many<P: Platform>(
        &self,
        platform: &P,
        table: &Table,
        class: Class,
        objects: &mut [*mut u8],
    ) -> Attempt<()> {
        // Both closures write to it, but only one of them runs.
        let objects = core::cell::RefCell::new(objects);
        // SAFETY: as above.
        let sequence = |place| ((), unsafe { rseq::pop_many(table, place, &mut objects.borrow_mut()) });
        self.attempt(platform, class, sequence, |stack| stack.pop_many(&mut objects.borrow_mut()))
    }

    /// Gives this CPU's stack of `class` its room, which it has not had yet or not since it was taken.
    pub fn activate<P: Platform>(&self, platform: &P, table: &Table, class: Class) -> Attempt<()> {
        let capacity = class.stack_capacity();
        // SAFETY: as above; every region has that many cells there.
        let sequence = |place| ((), unsafe { rseq::set_capacity(table, place, capacity) });
        self.attempt(platform, class, sequence, |stack| {
            let bottom = stack.0.bottom.load(Ordering::Relaxed);
            stack.0.end.store(bottom.wrapping_add(capacity as usize), Ordering::Relaxed);
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
        let mut spare = self.spare.lock();
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
        for class in Class::all() {
            let objects = objects(stack(old, class));
            if wanted(class) && !objects.is_empty() {
                each(class, objects);
            }
            clear(old, class);
        }
        *spare = old;
        true
    }

    fn skip(&self) -> bool {
        self.skipped.fetch_add(1, Ordering::Relaxed);
        false
    }

    /// What a stack looks like right now: only good for comparing with itself later, and for statistics, because the owner
    /// goes on working.
    pub fn peek<P: Platform>(&self, platform: &P, cpu: usize, class: Class) -> Peek {
        let region = if self.kind(platform, cpu) == Kind::Atomic {
            self.lock(cpu).try_lock().map_or(self.dummy(), |region| *region)
        } else {
            self.pointer(cpu).load(Ordering::Acquire).addr() // Pairs with the Release in `take`.
        };
        let stack = stack(region, class);
        let (head, bottom) = (stack.head.load(Ordering::Relaxed), stack.bottom.load(Ordering::Relaxed));
        let count = head.addr().saturating_sub(bottom.addr()) / size_of::<usize>();
        let top = (if count == 0 { bottom } else { head.wrapping_sub(1) }).cast::<AtomicPtr<u8>>();
        // SAFETY: cells lie in regions, which stay mapped; a value that the owner is changing is as good as any.
        let top = if top.is_null() { 0 } else { unsafe { (*top).load(Ordering::Relaxed) }.addr() };
        let active = stack.end.load(Ordering::Relaxed) != bottom;
        Peek { count: (count as u32).min(class.stack_capacity()), active, top }
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

/// A glance at a stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Peek {
    /// Objects in it.
    pub count: u32,
    /// Whether it has room for any.
    pub active: bool,
    /// The topmost object's address, to tell a stack that rests from one that went up and down.
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

    fn push_many(&mut self, from: &[*mut u8]) -> Option<()> {
        let (head, end) = (self.0.head.load(Ordering::Relaxed), self.0.end.load(Ordering::Relaxed));
        if (end.addr() - head.addr()) / size_of::<usize>() < from.len() {
            return None;
        }
        // SAFETY: there is room between head and end, and the lock is held.
        unsafe { head.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        self.0.head.store(head.wrapping_add(from.len()), Ordering::Relaxed);
        Some(())
    }
}

/// The objects of a stack that the caller has alone.
pub(crate) fn objects(stack: &Stack) -> &[*mut u8] {
    let (head, bottom) = (stack.head.load(Ordering::Relaxed), stack.bottom.load(Ordering::Relaxed));
    // SAFETY: the cells from bottom to head are objects.
    unsafe { core::slice::from_raw_parts(bottom, (head.addr() - bottom.addr()) / size_of::<usize>()) }
}

/// Makes a stack of a region that the caller has alone empty and without room.
fn clear(region: usize, class: Class) {
    let (stack, cells) = (stack(region, class), at(region + CELLS[class.index()]));
    stack.head.store(cells, Ordering::Relaxed);
    stack.bottom.store(cells, Ordering::Relaxed);
    stack.end.store(cells, Ordering::Relaxed);
}

/// Copies the stacks that are not wanted to a region whose stacks are empty; both are the caller's alone.
fn keep(from: usize, to: usize, wanted: &impl Fn(Class) -> bool) {
    for class in Class::all().filter(|&class| !wanted(class)) {
        let (from, to) = (stack(from, class), stack(to, class));
        let (old, new) = (from.bottom.load(Ordering::Relaxed), to.bottom.load(Ordering::Relaxed));
        // SAFETY: every region has the same cells.
        unsafe { new.copy_from_nonoverlapping(old, objects(from).len()) };
        // As far from the new bottom as it was from the old one.
        let moved = |pointer: *mut *mut u8| new.wrapping_byte_add(pointer.addr() - old.addr());
        to.head.store(moved(from.head.load(Ordering::Relaxed)), Ordering::Relaxed);
        to.end.store(moved(from.end.load(Ordering::Relaxed)), Ordering::Relaxed);
    }
}

pub(crate) fn stack(region: usize, class: Class) -> &'static Stack {
    // SAFETY: every region has a stack there, regions stay mapped as long as the slots, and a stack is atomics. The lifetime
    // is longer than that of the slots; no function here lets it out.
    unsafe { &*at::<Stack>(region + usize::from(class.place()) * size_of::<usize>()) }
}

fn at<T>(address: usize) -> *mut T {
    core::ptr::with_exposed_provenance_mut(address)
}
