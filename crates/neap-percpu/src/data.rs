//! The allocator: per-CPU data is made, found and freed here.
//!
//! Sits between the state and the worker (below) and the typed API or a composition (above); the platform is passed to
//! every call that acts. Locks: `turn`, then the state's. The turn is held while pages come and go, over system calls that
//! may block, by callers that said they can wait and by the worker, for one pass each; the state's lock is held for
//! a few hundred instructions, never over a system call. [`PerCpuData::free`], and [`PerCpuData::allocate`] with
//! [`Wait::Never`], take the state's lock alone. No owner is charged while either is held, so charging may come back here.

use crate::chunk::NONE;
use crate::geometry::{GRANULE, Geometry, LARGEST};
use crate::rows::Owner;
use crate::state::{Freed, Place, Request, State};
use crate::work::Work;
use core::fmt;
use core::num::NonZeroU64;
use core::sync::atomic::{AtomicBool, Ordering};
use neap_base::mutex::Guard;
use neap_base::platform::Errno;
use neap_base::{Mutex, Platform, bitmap};

const ADDRESS_BITS: u32 = 48;

/// An allocation: the address of its first copy, and the class of its row. Good for one instance.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle(NonZeroU64);

impl Handle {
    pub(crate) fn new(address: usize, class: usize) -> Handle {
        // Addresses of processes are neither 0 nor as long as 48 bits.
        let word = (class as u64) << ADDRESS_BITS | address as u64;
        Handle(NonZeroU64::new(word).unwrap_or(NonZeroU64::MIN))
    }

    pub(crate) fn address(self) -> usize {
        (self.0.get() & ((1 << ADDRESS_BITS) - 1)) as usize
    }

    pub(crate) fn class(self) -> usize {
        (self.0.get() >> ADDRESS_BITS) as usize
    }

    /// As a number, not 0.
    pub fn to_bits(self) -> NonZeroU64 {
        self.0
    }

    /// The handle of which [`Handle::to_bits`] made this.
    pub fn from_bits(bits: NonZeroU64) -> Handle {
        Handle(bits)
    }
}

/// How long a caller can wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Not at all: no system call is made. Only memory that is populated already will do.
    Never,
    /// Until the platform's clock, [`Platform::now`], says so.
    Until(u64),
    /// As long as it takes.
    Long,
}

/// Why there is no allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// The size is 0 or above [`LARGEST`], or the alignment is no power of two or above a page.
    BadRequest,
    /// The owner is closed.
    UnknownOwner,
    /// The owner may not have it.
    Charge,
    /// It would take waiting, for longer than the caller can.
    WouldWait,
    /// The address space of the instance is in use.
    Full,
    /// The system gave no memory.
    Memory(Errno),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refused::BadRequest => "the size is 0 or above 32 KiB, or the alignment is no power of two up to a page",
            Refused::UnknownOwner => "the owner is closed",
            Refused::Charge => "the owner may not have more",
            Refused::WouldWait => "it would take waiting",
            Refused::Full => "the instance's address space is in use",
            Refused::Memory(error) => return write!(f, "the system gave no memory: error {}", error.raw_os_error()),
        })
    }
}

impl core::error::Error for Refused {}

/// Why a handle was not freed; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Invalid {
    /// It is not of this instance.
    Foreign,
    /// No allocation begins there: it was freed before, or the handle was made up.
    NotAllocated,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Invalid::Foreign => "the handle is of another instance",
            Invalid::NotAllocated => "no allocation begins there: freed before?",
        })
    }
}

impl core::error::Error for Invalid {}

/// Who pays. Called without a lock; may allocate and free here. [`Owner::NOBODY`] is not charged.
pub trait Charge: Sync {
    /// Asks that an owner have so many bytes more, all copies together.
    fn charge(&self, owner: Owner, bytes: usize) -> bool;

    /// Takes that back.
    fn uncharge(&self, owner: Owner, bytes: usize);
}

/// Nobody pays.
impl Charge for () {
    fn charge(&self, _owner: Owner, _bytes: usize) -> bool {
        true
    }

    fn uncharge(&self, _owner: Owner, _bytes: usize) {}
}

/// An allocator of per-CPU data.
#[derive(Debug)]
pub struct PerCpuData<C: Charge = ()> {
    pub(crate) geometry: Geometry,
    /// All address space, address and length: memory, then tables.
    pub(crate) mappings: [(usize, usize); 2],
    /// The first group's memory.
    pub(crate) base: usize,
    /// By class and CPU: what to add to the address of the first copy. Those of class 0 are where the CPU's group begins; those
    /// of any other are there from its first use on.
    pub(crate) offsets: *mut usize,
    /// The same, but `usize::MAX` for isolated CPUs, where there are any.
    pub(crate) fenced: *mut usize,
    /// By CPU: which of its group's copies is its own.
    pub(crate) columns: *const usize,
    /// By CPU: whether it is isolated.
    pub(crate) isolated: *const bool,
    pub(crate) state: Mutex<State>,
    pub(crate) turn: Mutex<Work>,
    pub(crate) wanted: AtomicBool,
    pub(crate) charge: C,
}

// SAFETY: an offset is written under the lock before there is a handle that leads to it, the columns before anybody else has
// the instance, and everything else is behind a mutex.
unsafe impl<C: Charge + Send> Send for PerCpuData<C> {}
// SAFETY: as above.
unsafe impl<C: Charge> Sync for PerCpuData<C> {}

impl<C: Charge> PerCpuData<C> {
    /// A new owner. May wait for the worker, and make a system call.
    ///
    /// # Errors
    /// [`Refused::Full`] with four million of them, or with as many as there can be rows; [`Refused::Memory`].
    pub fn open_owner<P: Platform>(&self, platform: &P) -> Result<Owner, Refused> {
        self.open_owner_for(platform, 0)
    }

    /// The same with a word that says who pays, not 0, for whoever composes this: it is told again when something comes back.
    ///
    /// # Errors
    /// As for [`PerCpuData::open_owner`].
    pub fn open_owner_for<P: Platform>(&self, platform: &P, payer: u64) -> Result<Owner, Refused> {
        loop {
            let mut state = self.state.lock();
            if let Some(owner) = state.rows.open(payer) {
                return Ok(owner);
            }
            let opened = state.rows.owners.opened();
            drop(state);
            self.open_owners(platform, opened)?;
        }
    }

    /// Who pays for what an owner has; 0 if nobody does, or there is no such owner.
    pub fn payer(&self, owner: Owner) -> u64 {
        self.state.lock().rows.record(owner).map_or(0, |record| record.payer)
    }

    /// What an allocation of so many bytes takes of an owner: all copies together.
    pub fn price(&self, size: usize) -> u64 {
        self.bytes(size.min(LARGEST).div_ceil(GRANULE)) as u64
    }

    /// Frees all that an owner has, and ends it; answers the bytes of all copies.
    ///
    /// # Errors
    /// [`Refused::UnknownOwner`] if it was closed before; for [`Owner::NOBODY`], which has no end, [`Refused::BadRequest`].
    ///
    /// # Safety
    /// Nobody uses what the owner had any more, or allocates for it meanwhile.
    pub unsafe fn close_owner(&self, owner: Owner) -> Result<usize, Refused> {
        if owner == Owner::NOBODY {
            return Err(Refused::BadRequest);
        }
        let mut bytes = 0;
        loop {
            // A row at a time, so that nobody waits long for the lock.
            let mut state = self.settled();
            let row = state.rows.record(owner).ok_or(Refused::UnknownOwner)?.head;
            if row == NONE {
                state.rows.close(owner);
                break;
            }
            bytes += self.bytes(state.free_all(row).granules);
            self.tell(&state);
        }
        self.charge.uncharge(owner, bytes);
        Ok(bytes)
    }

    /// Whether there can be such an allocation.
    ///
    /// # Errors
    /// [`Refused::BadRequest`].
    pub fn check(&self, size: usize, align: usize) -> Result<(), Refused> {
        let is_one = (1..=LARGEST).contains(&size) && align.is_power_of_two() && align <= self.geometry.page;
        if is_one { Ok(()) } else { Err(Refused::BadRequest) }
    }

    /// Zeroes of `size` bytes, for each CPU, every copy at a multiple of `align`; copies of different CPUs, and of different
    /// owners, share no cache line.
    ///
    /// # Errors
    /// See [`Refused`]; nothing has changed then.
    pub fn allocate<P: Platform>(
        &self,
        platform: &P,
        owner: Owner,
        size: usize,
        align: usize,
        wait: Wait,
    ) -> Result<Handle, Refused> {
        self.check(size, align)?;
        let request = Request { owner, granules: size.div_ceil(GRANULE), align: align.max(GRANULE) };
        let bytes = self.bytes(request.granules);
        let charged = owner != Owner::NOBODY;
        if charged && !self.charge.charge(owner, bytes) {
            return Err(Refused::Charge);
        }
        let placed = self.place(platform, &request, wait).inspect_err(|_| {
            if charged {
                self.charge.uncharge(owner, bytes);
            }
        })?;
        for cpu in 0..self.geometry.cpus {
            // SAFETY: the copies are populated, and nobody else knows of them yet.
            unsafe { self.address(placed, cpu).write_bytes(0, request.granules * GRANULE) };
        }
        Ok(placed)
    }

    /// Frees an allocation; answers the bytes of one copy. Waits for nothing but a short lock.
    ///
    /// # Errors
    /// See [`Invalid`].
    ///
    /// # Safety
    /// Nobody uses the allocation any more.
    pub unsafe fn free(&self, handle: Handle) -> Result<usize, Invalid> {
        // SAFETY: as the caller promises.
        unsafe { self.take_back(handle) }.map(|(bytes, _)| bytes)
    }

    /// The same, which answers who pays for it as well, 0 if nobody does.
    ///
    /// # Errors
    /// See [`Invalid`].
    ///
    /// # Safety
    /// As for [`PerCpuData::free`].
    pub unsafe fn take_back(&self, handle: Handle) -> Result<(usize, u64), Invalid> {
        let mut state = self.state.lock();
        let Freed { owner, granules } = state.free_later(self.base, handle)?;
        let payer = state.rows.record(owner).map_or(0, |record| record.payer);
        self.tell(&state);
        drop(state);
        if owner != Owner::NOBODY {
            self.charge.uncharge(owner, self.bytes(granules));
        }
        Ok((granules * GRANULE, payer))
    }

    /// A CPU's copy. Any CPU of the shape will do, whether it exists or not.
    ///
    /// # Panics
    /// Never; a CPU that the shape does not have is met by a debug assertion.
    #[inline]
    pub fn address(&self, handle: Handle, cpu: usize) -> *mut u8 {
        debug_assert!(cpu < self.geometry.cpus);
        // SAFETY: handles come from `state.handle`, whose classes the table has, and so it has the CPU.
        let offset = unsafe { *self.offsets.add(handle.class() * self.geometry.cpus + cpu) };
        core::ptr::with_exposed_provenance_mut(handle.address() + offset)
    }

    /// The same for a handle and a CPU that may be made up: `None` unless there could be such a copy.
    pub fn copy(&self, handle: Handle, cpu: usize) -> Option<*mut u8> {
        let (address, end) = (handle.address(), self.base + self.geometry.group_span());
        let could_be =
            cpu < self.geometry.cpus && handle.class() < self.geometry.classes() && (self.base..end).contains(&address);
        could_be.then(|| self.address(handle, cpu))
    }

    /// The table of an allocation's offsets by CPU, for restartable sequences; `fenced`: for those that are ended by fences, so
    /// that isolated CPUs have none.
    pub(crate) fn offsets(&self, handle: Handle, fenced: bool) -> usize {
        let table = if fenced { self.fenced } else { self.offsets };
        table.wrapping_add(handle.class() * self.geometry.cpus).expose_provenance()
    }

    /// CPUs that have copies.
    #[inline]
    pub fn cpus(&self) -> usize {
        self.geometry.cpus
    }

    /// Whether [`PerCpuData::tick`] has something to do now, rather than whenever it is next called.
    pub fn is_work_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Bytes of all copies.
    fn bytes(&self, granules: usize) -> usize {
        granules * GRANULE * self.geometry.cpus
    }

    /// The state, for who looks at allocations, rows or pages: with nothing in it that is kept though it was freed.
    pub(crate) fn settled(&self) -> Guard<'_, State> {
        let mut state = self.state.lock();
        state.settle();
        self.tell(&state);
        state
    }

    /// Lets the worker's owner know that there is work.
    pub(crate) fn tell(&self, state: &State) {
        // Relaxed: a hint. It is written with the lock held, so the last one to write it is right.
        if state.wanted != self.wanted.load(Ordering::Relaxed) {
            self.wanted.store(state.wanted, Ordering::Relaxed);
        }
    }

    fn place<P: Platform>(&self, platform: &P, request: &Request, wait: Wait) -> Result<Handle, Refused> {
        let mut state = self.state.lock();
        if let Some(handle) = state.again(request) {
            return Ok(handle);
        }
        state.settle();
        self.tell(&state);
        if state.rows.record(request.owner).is_none() {
            return Err(Refused::UnknownOwner);
        }
        if let Some(handle) = self.at_once(&mut state, request, wait == Wait::Never) {
            return Ok(handle);
        }
        if wait == Wait::Never {
            (state.starved, state.wanted) = (true, true);
            self.tell(&state);
            return Err(Refused::WouldWait);
        }
        drop(state);
        let mut turn = self.wait_for_turn(platform, wait)?;
        self.place_and_populate(platform, &mut turn, request)
    }

    /// Where pages are populated already: in the owner's rows, or in the place that a new one would have; for those who may not
    /// wait anywhere.
    fn at_once(&self, state: &mut State, request: &Request, anywhere: bool) -> Option<Handle> {
        if let Some(place) = state.share(request) {
            return Some(self.handle(state, place));
        }
        let spot = state.find(request, anywhere)?;
        if !anywhere && !state.is_populated(spot) {
            return None;
        }
        let place = state.commit(spot, request)?;
        state.publish(place.row);
        self.tell(state);
        Some(self.handle(state, place))
    }

    /// The handle of an allocation, for whose class there are offsets from now on.
    fn handle(&self, state: &mut State, place: Place) -> Handle {
        let handle = state.handle(self.base, place);
        let (class, cpus) = (handle.class(), self.geometry.cpus);
        if !bitmap::set(&mut state.known, class) {
            for cpu in 0..cpus {
                // SAFETY: the tables have an entry for every class and CPU, and nobody reads those of a class before there is a
                // handle of it. Class 0 is there from the start, and written again as it is.
                unsafe {
                    let column = *self.columns.add(cpu);
                    let offset = *self.offsets.add(cpu) + column * class * self.geometry.grain;
                    self.offsets.add(class * cpus + cpu).write(offset);
                    if self.fenced != self.offsets {
                        let masked = if *self.isolated.add(cpu) { usize::MAX } else { offset };
                        self.fenced.add(class * cpus + cpu).write(masked);
                    }
                }
            }
        }
        handle
    }

    fn wait_for_turn<P: Platform>(&self, platform: &P, wait: Wait) -> Result<Guard<'_, Work>, Refused> {
        let Wait::Until(deadline) = wait else { return Ok(self.turn.lock()) };
        loop {
            if let Some(turn) = self.turn.try_lock() {
                return Ok(turn);
            }
            if platform.now() >= deadline {
                return Err(Refused::WouldWait);
            }
            platform.pause();
        }
    }

    /// The way of those who can wait: a row wherever one fits best, and then memory behind it.
    fn place_and_populate<P: Platform>(
        &self,
        platform: &P,
        work: &mut Work,
        request: &Request,
    ) -> Result<Handle, Refused> {
        self.ready_rows(platform)?;
        let mut state = self.settled();
        // Somebody else may have made room while this thread waited for its turn.
        if let Some(place) = state.share(request) {
            return Ok(self.handle(&mut state, place));
        }
        if state.rows.record(request.owner).is_none() {
            return Err(Refused::UnknownOwner);
        }
        let spot = loop {
            match state.find(request, false) {
                Some(spot) => break spot,
                None if state.recall().is_some() => {}
                None => state = self.grow(platform, state)?,
            }
        };
        let place = state.commit(spot, request).ok_or(Refused::Full)?;
        loop {
            let (chunk, pages) = state.holes(place.row);
            if pages.is_empty() {
                break;
            }
            drop(state);
            let answer = self.populate(platform, work, chunk, &pages);
            state = self.state.lock();
            match answer {
                Ok(()) => state.add_pages(chunk, pages),
                Err(error) => {
                    state.free(place);
                    self.tell(&state);
                    return Err(Refused::Memory(error));
                }
            }
        }
        state.publish(place.row);
        let handle = self.handle(&mut state, place);
        let low = state.empty < self.geometry.low;
        self.tell(&state);
        drop(state);
        if low {
            self.replenish(platform, work);
        }
        Ok(handle)
    }
}
