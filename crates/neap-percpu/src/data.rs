//! The allocator's entry points: allocating, finding and freeing per-CPU data.
//!
//! # Locking
//!
//! A thread populates or releases pages only while it holds *the turn*, the mutex of the worker's
//! data. It takes the turn before the state's lock, and holds it over system calls that may block.
//! Callers that can wait take the turn, and the worker takes it for each pass. A thread holds the
//! state's lock for a few hundred instructions, never over a system call. [`PerCpuData::free`], and
//! [`PerCpuData::allocate`] with [`Wait::Never`], take the state's lock only. The instance charges
//! owners under neither lock, so a [`Charge`] may call the instance.

use crate::chunk::NONE;
use crate::depopulate::Work;
use crate::geometry::{GRANULE, Geometry, LARGEST};
use crate::handle::{Handle, Invalid};
use crate::rows::Owner;
use crate::state::{Among, ChunkPages, Freed, Request, RowAllocation, State};
use crate::tables::Tables;
use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};
use neap_base::mutex::Guard;
use neap_base::platform::Errno;
use neap_base::platform::memory::Range;
use neap_base::{Mutex, Platform, bitmap};

/// How long a caller can wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Not at all, and no system call: only populated memory is used.
    Never,
    /// Until this time of the platform's clock, [`Platform::now`].
    Until(u64),
    /// Without limit.
    Long,
}

/// Why an allocation failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// The size is 0 or above [`LARGEST`], or the alignment is not a power of two or exceeds a
    /// page.
    BadRequest,
    /// The owner is closed.
    UnknownOwner,
    /// The owner's charge was refused.
    Charge,
    /// The operation would wait longer than the caller can.
    WouldWait,
    /// The instance's address space is used up.
    Full,
    /// The system refused memory.
    Memory(Errno),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refused::BadRequest => "the size is 0 or above 32 KiB, or the alignment is no power of two or too large",
            Refused::UnknownOwner => "the owner is closed",
            Refused::Charge => "the owner's charge was refused",
            Refused::WouldWait => "operation would block",
            Refused::Full => "the instance's address space is used up",
            Refused::Memory(error) => return write!(f, "the system gave no memory: error {}", error.raw_os_error()),
        })
    }
}

impl core::error::Error for Refused {}

/// The CPUs with an offset in a table of offsets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OffsetsOf {
    AllCpus,
    /// All CPUs but isolated ones. A fence ends the sequences that use these offsets.
    FencedCpus,
}

/// Charges owners for their allocations. The instance calls it without a lock, so it may allocate
/// and free in the instance. The instance does not charge [`Owner::NONE`].
pub trait Charge: Sync {
    /// Charges an owner for `bytes`, all copies together. Returns `false` if the charge is refused.
    fn charge(&self, owner: Owner, bytes: usize) -> bool;

    /// Reverses a charge.
    fn uncharge(&self, owner: Owner, bytes: usize);
}

/// Charges no owner.
impl Charge for () {
    fn charge(&self, _owner: Owner, _bytes: usize) -> bool {
        true
    }

    fn uncharge(&self, _owner: Owner, _bytes: usize) {}
}

/// An allocation that was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenBack {
    /// Bytes of one copy.
    pub bytes: usize,
    /// Word of the owner's payer; 0 if the owner has none.
    pub payer: u64,
}

/// An allocator of per-CPU data.
#[derive(Debug)]
pub struct PerCpuData<C: Charge = ()> {
    pub(crate) geometry: Geometry,
    /// Address and length of the two reservations: memory, then tables.
    pub(crate) mappings: [Range; 2],
    /// Address of the first group's memory.
    pub(crate) base: usize,
    pub(crate) tables: Tables,
    pub(crate) state: Mutex<State>,
    pub(crate) turn: Mutex<Work>,
    pub(crate) wanted: AtomicBool,
    pub(crate) charge: C,
}

// SAFETY: an offset is written under the state's lock before a handle that leads to it exists. The
// other tables are written before another thread has the instance. The rest is in mutexes.
unsafe impl<C: Charge + Send> Send for PerCpuData<C> {}
// SAFETY: offsets are written under the state's lock before a handle leads to them, and the other
// tables before the instance is shared. All else is in mutexes or atomics.
unsafe impl<C: Charge> Sync for PerCpuData<C> {}

impl<C: Charge> PerCpuData<C> {
    /// Creates an owner. May wait for the worker, and make a system call.
    ///
    /// # Errors
    /// [`Refused::Full`] if there are four million owners, or as many owners as rows are possible.
    /// [`Refused::Memory`] if the system refuses memory.
    pub fn open_owner<P: Platform>(&self, platform: &P) -> Result<Owner, Refused> {
        self.open_owner_for(platform, 0)
    }

    /// Creates an owner. `payer` is a word that names its payer, and is not 0.
    /// [`PerCpuData::take_back`] returns the word when an allocation is freed.
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

    /// The word of an owner's payer; 0 if there is none, or no such owner.
    pub fn payer(&self, owner: Owner) -> u64 {
        self.state.lock().rows.record(owner).map_or(0, |record| record.payer)
    }

    /// Bytes that an allocation of `size` costs its owner: all copies together.
    pub fn price(&self, size: usize) -> u64 {
        self.bytes(size.min(LARGEST).div_ceil(GRANULE)) as u64
    }

    /// Frees all allocations of an owner, and ends it. Returns the bytes of all copies.
    ///
    /// # Errors
    /// [`Refused::UnknownOwner`] if it was closed before; [`Refused::BadRequest`] for
    /// [`Owner::NONE`], which never ends.
    ///
    /// # Safety
    /// No thread uses the owner's allocations any more, or allocates for the owner meanwhile.
    pub unsafe fn close_owner(&self, owner: Owner) -> Result<usize, Refused> {
        if owner == Owner::NONE {
            return Err(Refused::BadRequest);
        }
        let mut bytes = 0;
        loop {
            // One row at a time, to hold the lock for a short time only.
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

    /// Checks size and alignment of a request.
    ///
    /// # Errors
    /// [`Refused::BadRequest`] if the size or the alignment is invalid.
    pub fn check(&self, size: usize, align: usize) -> Result<(), Refused> {
        let is_one = (1..=LARGEST).contains(&size) && align.is_power_of_two() && align <= self.geometry.page;
        if is_one { Ok(()) } else { Err(Refused::BadRequest) }
    }

    /// Allocates `size` zeroed bytes for each CPU. Every copy begins at a multiple of `align`.
    /// Copies of different CPUs share no cache line. In the layout
    /// [`Layout::Rows`](crate::Layout::Rows), neither do copies of different owners.
    ///
    /// # Errors
    /// See [`Refused`]. No allocation exists then, and the owner is not charged for it.
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
        let charged = owner != Owner::NONE;
        if charged && !self.charge.charge(owner, bytes) {
            return Err(Refused::Charge);
        }
        let placed = self.place(platform, &request, wait).inspect_err(|_| {
            if charged {
                self.charge.uncharge(owner, bytes);
            }
        })?;
        for cpu in 0..self.geometry.cpus {
            // SAFETY: `place` returned populated copies of at least this length. No other thread
            // knows the handle yet.
            unsafe { self.address(placed, cpu).write_bytes(0, request.granules * GRANULE) };
        }
        Ok(placed)
    }

    /// Frees an allocation. Returns the bytes of one copy. Waits only for the state's lock.
    ///
    /// # Errors
    /// See [`Invalid`].
    ///
    /// # Safety
    /// No thread uses the allocation any more.
    pub unsafe fn free(&self, handle: Handle) -> Result<usize, Invalid> {
        // SAFETY: the caller promises that no thread uses the allocation any more.
        unsafe { self.take_back(handle) }.map(|freed| freed.bytes)
    }

    /// Frees an allocation.
    ///
    /// # Errors
    /// See [`Invalid`].
    ///
    /// # Safety
    /// No thread uses the allocation any more.
    pub unsafe fn take_back(&self, handle: Handle) -> Result<TakenBack, Invalid> {
        let mut state = self.state.lock();
        let Freed { owner, granules } = state.free_later(self.base, handle)?;
        let payer = state.rows.record(owner).map_or(0, |record| record.payer);
        self.tell(&state);
        drop(state);
        if owner != Owner::NONE {
            self.charge.uncharge(owner, self.bytes(granules));
        }
        Ok(TakenBack { bytes: granules * GRANULE, payer })
    }

    /// The address of a CPU's copy. The CPU must be below [`PerCpuData::cpus`]; it need not exist.
    ///
    /// # Panics
    /// With debug assertions, if the CPU is not below [`PerCpuData::cpus`].
    #[inline]
    pub fn address(&self, handle: Handle, cpu: usize) -> *mut u8 {
        debug_assert!(cpu < self.geometry.cpus);
        // SAFETY: handles come from `State::handle`, so the table has their classes, with an entry
        // for each CPU of the shape.
        let offset = unsafe { *self.tables.offsets.add(handle.class() * self.geometry.cpus + cpu) };
        core::ptr::with_exposed_provenance_mut(handle.address() + offset)
    }

    /// The address of a CPU's copy, for a handle and a CPU that may be invalid. `None` if there
    /// cannot be such a copy.
    pub fn copy(&self, handle: Handle, cpu: usize) -> Option<*mut u8> {
        let (address, end) = (handle.address(), self.base + self.geometry.group_span());
        let could_be =
            cpu < self.geometry.cpus && handle.class() < self.geometry.classes() && (self.base..end).contains(&address);
        could_be.then(|| self.address(handle, cpu))
    }

    /// Address of an allocation's table of offsets by CPU, for restartable sequences.
    pub(crate) fn offsets(&self, handle: Handle, of: OffsetsOf) -> usize {
        let table = match of {
            OffsetsOf::AllCpus => self.tables.offsets,
            OffsetsOf::FencedCpus => self.tables.fenced,
        };
        table.wrapping_add(handle.class() * self.geometry.cpus).expose_provenance()
    }

    /// Number of CPUs that have copies.
    #[inline]
    pub fn cpus(&self) -> usize {
        self.geometry.cpus
    }

    /// Whether [`PerCpuData::tick`] has work now, and should not wait for its next regular call.
    pub fn is_work_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Bytes of all copies.
    fn bytes(&self, granules: usize) -> usize {
        granules * GRANULE * self.geometry.cpus
    }

    /// Locks the state and frees the kept allocation, for callers that inspect allocations, rows or
    /// pages.
    pub(crate) fn settled(&self) -> Guard<'_, State> {
        let mut state = self.state.lock();
        state.settle();
        self.tell(&state);
        state
    }

    /// Tells the worker whether there is work.
    pub(crate) fn tell(&self, state: &State) {
        // Relaxed: a hint. It is written under the lock, so the last value is right.
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
        // A caller that may not wait takes any place whose pages are populated.
        let among = if wait == Wait::Never { Among::PopulatedPages } else { Among::AllPages };
        if let Some(handle) = self.at_once(&mut state, request, among) {
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

    /// Places a request on populated pages: in the owner's rows, or at the best place of a new row
    /// if that is populated.
    fn at_once(&self, state: &mut State, request: &Request, among: Among) -> Option<Handle> {
        if let Some(place) = state.share(request) {
            return Some(self.handle(state, place));
        }
        let spot = state.find(request, among)?;
        if among == Among::AllPages && !state.is_populated(spot) {
            return None;
        }
        let place = state.commit(spot, request)?;
        state.publish(place.row);
        self.tell(state);
        Some(self.handle(state, place))
    }

    /// Returns the handle of an allocation, and writes its class's offsets if it is the first.
    fn handle(&self, state: &mut State, place: RowAllocation) -> Handle {
        let handle = state.handle(self.base, place);
        let (class, cpus) = (handle.class(), self.geometry.cpus);
        let Tables { columns, offsets, fenced, .. } = self.tables;
        if !bitmap::set(&mut state.known, class) {
            for cpu in 0..cpus {
                // SAFETY: the tables have an entry for every class and CPU. No thread reads a
                // class's entries before it has a handle of the class. Class 0 is rewritten with
                // equal values.
                unsafe {
                    let offset = *offsets.add(cpu) + *columns.add(cpu) * class * self.geometry.grain;
                    offsets.add(class * cpus + cpu).write(offset);
                    if fenced != offsets {
                        let is_isolated = *fenced.add(cpu) == usize::MAX;
                        let masked = if is_isolated { usize::MAX } else { offset };
                        fenced.add(class * cpus + cpu).write(masked);
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

    /// Places a request for a caller that can wait: in the best place, then populates its pages.
    fn place_and_populate<P: Platform>(
        &self,
        platform: &P,
        work: &mut Work,
        request: &Request,
    ) -> Result<Handle, Refused> {
        self.ready_rows(platform)?;
        let mut state = self.settled();
        // Another thread may have made room while this thread waited for its turn.
        if let Some(place) = state.share(request) {
            return Ok(self.handle(&mut state, place));
        }
        if state.rows.record(request.owner).is_none() {
            return Err(Refused::UnknownOwner);
        }
        let spot = loop {
            match state.find(request, Among::AllPages) {
                Some(spot) => break spot,
                None if state.recall().is_some() => {}
                None => state = self.grow(platform, state)?,
            }
        };
        let place = state.commit(spot, request).ok_or(Refused::Full)?;
        loop {
            let ChunkPages { chunk, pages } = state.holes(place.row);
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
