//! Slots: for every CPU and class, the sheaf that the CPU's threads push to and pop from.
//!
//! Sits between `malloc` and `free` and the class caches. Two kinds, one per CPU:
//!
//! * **Rseq**: a row of pointers to sheaves, worked on by the restartable sequences of `neap_os::rseq`, with no lock and no
//!   locked instruction. Ownership of a sheaf changes only by a locked exchange of the row's entry.
//! * **Atomic**: a row under a [`CpuLock`], for machines without rseq or fences and for isolated CPUs.
//!
//! How anybody takes a sheaf out of another CPU's Rseq row, and why nothing is lost:
//! 1. exchange the entry for DUMMY, a stack without cells: every sequence that starts now fails its own check;
//! 2. fence the CPU: a sequence that had read the old entry has been aborted, or had committed and is visible;
//! 3. the old sheaf is the taker's alone; the entry becomes EMPTY, also without cells: the next operation goes the slow
//!    way, installs a sheaf, and so nothing is stranded.
//!
//! If the fence fails, nothing is known, and the entry gets its old value back. That is safe because [`Slots::install`]
//! refuses to replace DUMMY, so it is still there. Two takers: the second finds DUMMY and goes away.
//!
//! There is no owner's lock and so nobody to wait for. The exhaustive explorer in `tests/rseq_explorer` plays this with
//! preemption, migration, signals and store buffers, and finds what breaks when a step is left out.

use crate::sheaf::Sheaf;
use crate::size_class::{CLASSES, Class};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use neap_base::platform::{Errno, Platform};
use neap_base::{CpuLock, Mutex};
use neap_os::rseq::{self, Outcome, ROW_LENGTH, Stack, Table};

const _: () = assert!(CLASSES <= ROW_LENGTH, "a row has an entry for every class");

/// Aborts in a row after which an operation goes the shared way: a debugger that steps would abort for ever.
const ATTEMPTS: u32 = 3;

/// Tries at another CPU's row lock before it is skipped.
const REMOTE_TRIES: u32 = 1000;

/// The kind of a CPU's slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Restartable sequences.
    Rseq,
    /// A lock taken by compare-and-swap.
    Atomic,
}

/// What a push or a pop came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attempt<T> {
    /// It happened.
    Done(T),
    /// The sheaf is full or empty, or there is none: install another one.
    Exhausted,
    /// The slot is not to be had now: take the shared path.
    Busy,
}

/// A row of the Atomic kind.
type LockedRow = CpuLock<[*mut Stack; ROW_LENGTH]>;

/// What a taker leaves in a row, and what it starts with: stacks without cells.
#[repr(C, align(64))]
struct Sentinels {
    empty: Stack,
    dummy: Stack,
}

/// The slots of all CPUs.
#[derive(Debug)]
pub struct Slots {
    cpus: usize,
    /// One mapping: sentinels, Rseq rows, Atomic rows, spares.
    memory: usize,
    length: usize,
    offset: Option<u32>,
    /// Serialises takers and fork; not needed for safety, but one fence at a time is enough.
    takers: Mutex<()>,
    skipped: AtomicU32,
    fences: AtomicU32,
}

/// Sheaves that were taken and not yet given back, by class.
pub type Taken = [Option<Sheaf>; CLASSES];

impl Slots {
    const SENTINELS: usize = 4096;
    const ROW: usize = 1 << rseq::ROW_SHIFT;

    /// Maps and fills the rows. With `use_rseq` false every CPU gets the Atomic kind.
    ///
    /// # Errors
    /// What the mapping answered.
    pub fn open<P: Platform>(platform: &P, use_rseq: bool) -> Result<Slots, Errno> {
        let cpus = platform.cpus();
        let length = Slots::SENTINELS + cpus * (2 * Slots::ROW + size_of::<LockedRow>());
        let length = length.next_multiple_of(platform.page_size());
        let memory = platform.map(length)?;
        let slots = Slots {
            cpus,
            memory,
            length,
            offset: platform.rseq_offset().filter(|_| use_rseq),
            takers: Mutex::new(()),
            skipped: AtomicU32::new(0),
            fences: AtomicU32::new(0),
        };
        // SAFETY: the mapping is fresh, nobody else's, and long enough for all three areas.
        unsafe {
            let none = || Stack { next: AtomicPtr::default(), count: AtomicU32::new(0), capacity: AtomicU32::new(0) };
            at::<Sentinels>(memory).write(Sentinels { empty: none(), dummy: none() });
            let (empty, dummy) = (slots.empty(), slots.dummy());
            for cpu in 0..cpus {
                let fill = if slots.kind(platform, cpu) == Kind::Rseq { empty } else { dummy };
                let row = slots.rows().add(cpu * ROW_LENGTH);
                (0..ROW_LENGTH).for_each(|class| row.add(class).write(AtomicPtr::new(fill)));
                slots.locked_rows().add(cpu).write(CpuLock::new([empty; ROW_LENGTH]));
            }
        }
        Ok(slots)
    }

    /// Unmaps the rows.
    ///
    /// # Safety
    /// Nobody uses the slots any more, and no table points to the rows.
    pub unsafe fn close<P: Platform>(&self, platform: &P) {
        // SAFETY: as the caller promises.
        unsafe { platform.unmap(self.memory, self.length) };
    }

    fn empty(&self) -> *mut Stack {
        // SAFETY: the sentinels are initialised and never written again.
        unsafe { (&raw const (*at::<Sentinels>(self.memory)).empty).cast_mut() }
    }

    fn dummy(&self) -> *mut Stack {
        // SAFETY: as above.
        unsafe { (&raw const (*at::<Sentinels>(self.memory)).dummy).cast_mut() }
    }

    fn rows(&self) -> *mut AtomicPtr<Stack> {
        at(self.memory + Slots::SENTINELS)
    }

    fn locked_rows(&self) -> *mut LockedRow {
        at(self.memory + Slots::SENTINELS + self.cpus * Slots::ROW)
    }

    fn entry(&self, cpu: usize, class: Class) -> &AtomicPtr<Stack> {
        // SAFETY: CPU ids are below `cpus`, classes below the length of a row.
        unsafe { &*self.rows().add(cpu.min(self.cpus - 1) * ROW_LENGTH + class.index()) }
    }

    fn locked_row(&self, cpu: usize) -> &LockedRow {
        // SAFETY: CPU ids are below `cpus`.
        unsafe { &*self.locked_rows().add(cpu.min(self.cpus - 1)) }
    }

    fn spare(&self, cpu: usize, class: Class) -> &AtomicPtr<Stack> {
        let spares = self.memory + Slots::SENTINELS + self.cpus * (Slots::ROW + size_of::<LockedRow>());
        // SAFETY: as for `entry`; zeroes are null pointers.
        unsafe { &*at::<AtomicPtr<Stack>>(spares).add(cpu.min(self.cpus - 1) * ROW_LENGTH + class.index()) }
    }

    /// The kind of a CPU's slots.
    pub fn kind<P: Platform>(&self, platform: &P, cpu: usize) -> Kind {
        if self.offset.is_some() && !platform.is_isolated(cpu) { Kind::Rseq } else { Kind::Atomic }
    }

    /// Whether any CPU may have Rseq slots.
    pub fn has_rseq(&self) -> bool {
        self.offset.is_some()
    }

    /// Fills in the table that the sequences start from, and opens it if any CPU has Rseq slots.
    pub fn publish(&self, table: &Table) {
        let Some(offset) = self.offset else { return };
        table.offset.store(offset, Ordering::Relaxed);
        table.rows.store(self.rows(), Ordering::Relaxed);
        // Release: a thread that sees the table open sees the rows; on x86-64 the sequences' plain loads pair with it.
        table.cpus.store(self.cpus as u32, Ordering::Release);
    }

    /// Closes the table for fork: when this returns `Ok`, no sequence is in progress and none starts.
    ///
    /// # Errors
    /// The fence failed: sequences may still commit.
    pub fn unpublish<P: Platform>(&self, platform: &P, table: &Table) -> Result<(), Errno> {
        if self.offset.is_none() {
            return Ok(());
        }
        table.cpus.store(0, Ordering::SeqCst); // Pairs with the fence: a sequence that starts after it sees the 0.
        self.fences.fetch_add(1, Ordering::Relaxed);
        platform.fence_all()
    }

    /// Takes an object from this CPU's sheaf of `class`.
    pub fn pop<P: Platform>(&self, platform: &P, table: &Table, class: Class) -> Attempt<*mut u8> {
        let cpu = platform.cpu();
        if self.kind(platform, cpu) == Kind::Atomic {
            let Some(row) = self.locked_row(cpu).try_lock() else { return Attempt::Busy };
            // SAFETY: what is in a locked row belongs to who holds the lock; EMPTY has no objects.
            let sheaf = unsafe { Sheaf::from_slot(row[class.index()]) };
            return sheaf.and_then(Sheaf::pop).map_or(Attempt::Exhausted, Attempt::Done);
        }
        for _ in 0..ATTEMPTS {
            // SAFETY: the table was published over these rows.
            match unsafe { rseq::pop(table, class.index()) } {
                (object, Outcome::Committed) => return Attempt::Done(object),
                (_, Outcome::Refused) => return Attempt::Exhausted,
                (_, Outcome::Aborted) => {}
            }
        }
        Attempt::Busy
    }

    /// Puts an object on this CPU's sheaf of `class`.
    pub fn push<P: Platform>(&self, platform: &P, table: &Table, class: Class, object: *mut u8) -> Attempt<()> {
        let cpu = platform.cpu();
        if self.kind(platform, cpu) == Kind::Atomic {
            let Some(row) = self.locked_row(cpu).try_lock() else { return Attempt::Busy };
            // SAFETY: as in `pop`; EMPTY has no room.
            let pushed = unsafe { Sheaf::from_slot(row[class.index()]) }.is_some_and(|sheaf| sheaf.push(object));
            return if pushed { Attempt::Done(()) } else { Attempt::Exhausted };
        }
        for _ in 0..ATTEMPTS {
            // SAFETY: the table was published over these rows.
            match unsafe { rseq::push(table, class.index(), object) } {
                Outcome::Committed => return Attempt::Done(()),
                Outcome::Refused => return Attempt::Exhausted,
                Outcome::Aborted => {}
            }
        }
        Attempt::Busy
    }

    /// Installs `new` in this CPU's slot of `class` and answers what was there, which the caller owns now; or gives `new`
    /// back where the slot is not to be had.
    ///
    /// # Errors
    /// `new`, when the thread was moved or interrupted, or somebody is taking this very sheaf.
    pub fn install<P: Platform>(
        &self,
        platform: &P,
        table: &Table,
        class: Class,
        new: Sheaf,
    ) -> Result<Option<Sheaf>, Sheaf> {
        let cpu = platform.cpu();
        if self.kind(platform, cpu) == Kind::Atomic {
            let Some(mut row) = self.locked_row(cpu).try_lock() else { return Err(new) };
            let old = core::mem::replace(&mut row[class.index()], new.into_slot());
            return Ok(self.owned(old));
        }
        for _ in 0..ATTEMPTS {
            // Acquire pairs with the Release in `take` that leaves EMPTY; a sheaf's contents come with the exchange below.
            let expected = self.entry(platform.cpu(), class).load(Ordering::Acquire);
            if expected == self.dummy() {
                return Err(new);
            }
            // SAFETY: the table was published over these rows; the caller owns `new`.
            match unsafe { rseq::exchange(table, class.index(), expected, new.into_slot()) } {
                Outcome::Committed => return Ok(self.owned(expected)),
                Outcome::Refused | Outcome::Aborted => {}
            }
        }
        Err(new)
    }

    /// The sheaf behind what was in a row; none behind EMPTY.
    fn owned(&self, old: *mut Stack) -> Option<Sheaf> {
        // SAFETY: the caller has just taken it out of a row.
        if old == self.empty() { None } else { unsafe { Sheaf::from_slot(old) } }
    }

    /// Exchanges the spare sheaf of this CPU: a second one, so that a program which goes up and down around the edge of a
    /// sheaf stays off the class cache's lock. Whoever exchanges it owns it.
    pub fn exchange_spare<P: Platform>(&self, platform: &P, class: Class, new: Option<Sheaf>) -> Option<Sheaf> {
        self.exchange_spare_of(platform.cpu(), class, new)
    }

    fn exchange_spare_of(&self, cpu: usize, class: Class, new: Option<Sheaf>) -> Option<Sheaf> {
        let spare = self.spare(cpu, class);
        if new.is_none() && spare.load(Ordering::Relaxed).is_null() {
            return None;
        }
        // AcqRel: hands what is inside the new sheaf on, and receives the old one's; pairs with itself.
        let old = spare.swap(new.map_or(core::ptr::null_mut(), Sheaf::into_slot), Ordering::AcqRel);
        // SAFETY: the exchange made the caller its owner.
        unsafe { Sheaf::from_slot(old) }
    }

    /// Takes the sheaves of the `wanted` classes from `cpu`, from any thread, with at most one fence, and hands them
    /// over by class. `false` if the CPU was skipped: nothing has changed then.
    pub fn take<P: Platform>(
        &self,
        platform: &P,
        cpu: usize,
        wanted: impl Fn(Class) -> bool,
        each: &mut dyn FnMut(Class, Sheaf),
    ) -> bool {
        let _one_at_a_time = self.takers.lock();
        let done = if self.kind(platform, cpu) == Kind::Atomic {
            self.take_locked(cpu, &wanted, each)
        } else {
            self.take_fenced(platform, cpu, &wanted, each)
        };
        if !done {
            self.skipped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        for class in Class::all().filter(|&class| wanted(class)) {
            if let Some(spare) = self.exchange_spare_of(cpu, class, None) {
                each(class, spare);
            }
        }
        true
    }

    fn take_locked(&self, cpu: usize, wanted: &impl Fn(Class) -> bool, each: &mut dyn FnMut(Class, Sheaf)) -> bool {
        let mut taken: Taken = [None; CLASSES];
        {
            // Only detach under the lock: what is done with the sheaves comes after.
            let Some(mut row) = self.locked_row(cpu).lock_bounded(REMOTE_TRIES) else { return false };
            for class in Class::all().filter(|&class| wanted(class)) {
                taken[class.index()] = self.owned(core::mem::replace(&mut row[class.index()], self.empty()));
            }
        }
        hand_over(&taken, each);
        true
    }

    fn take_fenced<P: Platform>(
        &self,
        platform: &P,
        cpu: usize,
        wanted: &impl Fn(Class) -> bool,
        each: &mut dyn FnMut(Class, Sheaf),
    ) -> bool {
        let mut taken: Taken = [None; CLASSES];
        let mut any = false;
        for class in Class::all().filter(|&class| wanted(class)) {
            let entry = self.entry(cpu, class);
            // Nothing to take: no exchange, and perhaps no fence.
            let seen = entry.load(Ordering::Relaxed);
            if seen == self.empty() || seen == self.dummy() {
                continue;
            }
            // SeqCst: before the fence in every order; pairs with the loads of the sequences, by way of the fence.
            let old = entry.swap(self.dummy(), Ordering::SeqCst);
            if old == self.empty() {
                entry.store(old, Ordering::Release); // Pairs with the Acquire in `install`.
                continue;
            }
            taken[class.index()] = self.owned(old);
            any = true;
        }
        if !any {
            return true;
        }
        self.fences.fetch_add(1, Ordering::Relaxed);
        let fenced = platform.fence(cpu).is_ok();
        for class in Class::all() {
            if let Some(sheaf) = taken[class.index()] {
                // A failed fence means not acquired: put back what was there. It still is DUMMY, see `install`.
                let left = if fenced { self.empty() } else { sheaf.into_slot() };
                self.entry(cpu, class).store(left, Ordering::Release); // Pairs with the Acquire in `install`.
            }
        }
        if fenced {
            hand_over(&taken, each);
        }
        fenced
    }

    /// What is in a slot right now: which sheaf and how many objects. Only good for comparing with itself later, and for
    /// statistics: the owner goes on working.
    pub fn peek<P: Platform>(&self, platform: &P, cpu: usize, class: Class) -> Peek {
        let stack = if self.kind(platform, cpu) == Kind::Atomic {
            self.locked_row(cpu).try_lock().map_or(core::ptr::null_mut(), |row| row[class.index()])
        } else {
            self.entry(cpu, class).load(Ordering::Acquire) // Pairs with the Release in `take`.
        };
        let spare = self.spare(cpu, class).load(Ordering::Relaxed);
        // SAFETY: sheaves are objects of slabs; memory of the arena stays mapped (at worst it reads as zeroes), so a stale
        // pointer gives a stale number.
        let count =
            |stack: *mut Stack| if stack.is_null() { 0 } else { unsafe { (*stack).count.load(Ordering::Relaxed) } };
        let main = if stack == self.empty() || stack == self.dummy() { core::ptr::null_mut() } else { stack };
        Peek { sheaf: main.addr(), main: count(main), has_spare: !spare.is_null(), spare: count(spare) }
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

/// A glance at a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Peek {
    /// Which sheaf: an address, 0 for none.
    pub sheaf: usize,
    /// Objects in it.
    pub main: u32,
    /// Whether there is a spare sheaf.
    pub has_spare: bool,
    /// Objects in the spare.
    pub spare: u32,
}

impl Peek {
    /// Whether the slot holds any sheaf.
    pub fn holds_any(&self) -> bool {
        self.sheaf != 0 || self.has_spare
    }
}

fn hand_over(taken: &Taken, each: &mut dyn FnMut(Class, Sheaf)) {
    for class in Class::all() {
        if let Some(sheaf) = taken[class.index()] {
            each(class, sheaf);
        }
    }
}

fn at<T>(address: usize) -> *mut T {
    core::ptr::with_exposed_provenance_mut(address)
}
