//! The allocator: per-CPU data is made, found and freed here.
//!
//! Sits between the state and the worker (below) and the typed API or a composition (above); the platform is passed to
//! every call that acts. Locks: `turn`, then the state's. The turn is held while pages come and go, over system calls that
//! may block, by callers that said they can wait and by the worker, for one pass each; the state's lock is held for
//! a few hundred instructions, never over a system call. [`PerCpuData::free`], and [`PerCpuData::allocate`] with
//! [`Wait::Never`], take the state's lock alone. No owner is charged while either is held, so charging may come back here.

use crate::chunk::{Chunks, NONE, Parts};
use crate::geometry::{GRANULE, Geometry, LARGEST, Layout, Shape};
use crate::pool::Pool;
use crate::rows::{Owner, Record, Row, Rows};
use crate::state::{Freed, Place, Request, State};
use crate::work::Work;
use core::fmt;
use core::num::NonZeroU64;
use core::sync::atomic::{AtomicBool, Ordering};
use neap_base::mutex::Guard;
use neap_base::platform::Errno;
use neap_base::platform::memory::{Range, SCATTERED_RANGES};
use neap_base::platform::nodes::MAX_NODES;
use neap_base::{Mutex, Platform, bitmap};

/// The most owners at a time, however many rows there can be.
const OWNERS: u32 = 1 << 22;
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
    /// Everything that is mapped, address and length: memory, then tables.
    pub(crate) mappings: [(usize, usize); 2],
    /// The first group's memory.
    pub(crate) base: usize,
    /// By class and CPU: what to add to the address of the first copy. Those of class 0 are where the CPU's group begins; those
    /// of any other are there from its first use on.
    offsets: *mut usize,
    /// The same, but `usize::MAX` for isolated CPUs, where there are any.
    fenced: *mut usize,
    /// By CPU: which of its group's copies is its own.
    columns: *const usize,
    /// By CPU: whether it is isolated.
    isolated: *const bool,
    pub(crate) state: Mutex<State>,
    pub(crate) turn: Mutex<Work>,
    pub(crate) wanted: AtomicBool,
    charge: C,
}

// SAFETY: an offset is written under the lock before there is a handle that leads to it, the columns before anybody else has
// the instance, and everything else is behind a mutex.
unsafe impl<C: Charge + Send> Send for PerCpuData<C> {}
// SAFETY: as above.
unsafe impl<C: Charge> Sync for PerCpuData<C> {}

/// Takes pieces of a mapping, or only counts them.
struct Carver(usize);

impl Carver {
    fn piece(&mut self, bytes: usize, align: usize) -> usize {
        let start = self.0.next_multiple_of(align);
        self.0 = start + bytes;
        start
    }
}

impl<C: Charge> PerCpuData<C> {
    /// Makes an instance. `node_of` says which node a CPU is nearest to, also for CPUs that do not exist yet: their copies are
    /// made with all others, so nothing changes when they come.
    ///
    /// # Errors
    /// `INVAL` for a shape that makes no sense, `NOMEM` where the address space is refused.
    pub fn open<P: Platform>(
        platform: &P,
        shape: &Shape,
        node_of: impl Fn(usize) -> usize,
        charge: C,
    ) -> Result<PerCpuData<C>, Errno> {
        let cpu_major = shape.layout == Layout::CpuMajor;
        // Nodes without a CPU have no copies, so they are no groups.
        let (mut group_of, mut sizes, mut groups) = ([usize::MAX; MAX_NODES], [0; MAX_NODES], 0);
        for cpu in 0..shape.cpus {
            let node = node_of(cpu).min(MAX_NODES - 1);
            if group_of[node] == usize::MAX {
                group_of[node] = groups;
                groups += 1;
            }
            sizes[group_of[node]] += 1;
        }
        let columns = if cpu_major { 1 } else { sizes.iter().max().copied().unwrap_or(0) };
        let groups = if cpu_major { shape.cpus } else { groups };
        let geometry = Geometry::new(shape, platform.page_size(), groups, columns).ok_or(Errno::INVAL)?;

        let length = groups.checked_mul(geometry.group_span()).ok_or(Errno::NOMEM)?;
        let memory = (platform.map(length + geometry.page)?, length + geometry.page);
        let base = memory.0.next_multiple_of(geometry.page);
        let parts = Parts::new(&geometry, platform.page_size());
        let most_rows = (geometry.chunks * geometry.grains) as u32;
        let most_owners = OWNERS.min(most_rows) + 1;
        let carve = |from: usize| {
            let mut carver = Carver(from);
            let chunks = carver.piece(parts.length * geometry.chunks, platform.page_size());
            let rows = carver.piece(Pool::<Row>::bytes(most_rows), 64);
            let owners = carver.piece(Pool::<Record>::bytes(most_owners), 64);
            let ranges = carver.piece(SCATTERED_RANGES * size_of::<Range>(), 64);
            let stack = carver.piece(geometry.chunks * size_of::<u32>(), 64);
            let columns = carver.piece(geometry.cpus * size_of::<usize>(), 64);
            let isolated = carver.piece(geometry.cpus, 1);
            let [offsets, fenced] =
                [(); 2].map(|()| carver.piece(geometry.classes() * geometry.cpus * size_of::<usize>(), 64));
            (
                [chunks, rows, owners, ranges, stack, columns, isolated, offsets, fenced],
                carver.0.next_multiple_of(platform.page_size()),
            )
        };
        let tables_length = carve(0).1;
        let tables = platform.map(tables_length).inspect_err(|_| {
            // SAFETY: mapped above, and nobody has seen it.
            unsafe { platform.unmap(memory.0, memory.1) };
        })?;
        let ([chunks, rows, owners, ranges, stack, columns, isolated, offsets, fenced], _) = carve(tables);
        // A huge page would put memory behind pages that count as empty.
        let _ = platform.huge_pages(base, length, false);

        // SAFETY: each has its piece of fresh zeroes, as long as it needs; rows and records are valid as zeroes.
        let (chunks, mut rows, work) = unsafe {
            let rows =
                Rows { rows: Pool::at(rows, most_rows), owners: Pool::at(owners, most_owners), grain: geometry.grain };
            (Chunks::at(geometry.clone(), parts, chunks, stack), rows, Work::at(ranges))
        };
        rows.open(0); // Nobody.
        let is_isolated = |cpu: usize| cpu < platform.cpus() && platform.is_isolated(cpu);
        let any_isolated = (0..shape.cpus).any(is_isolated);
        let data = PerCpuData {
            geometry,
            mappings: [memory, (tables, tables_length)],
            base,
            offsets: core::ptr::with_exposed_provenance_mut(offsets),
            fenced: core::ptr::with_exposed_provenance_mut(if any_isolated { fenced } else { offsets }),
            columns: core::ptr::with_exposed_provenance(columns),
            isolated: core::ptr::with_exposed_provenance(isolated),
            state: Mutex::new(State::new(chunks, rows)),
            turn: Mutex::new(work),
            wanted: AtomicBool::new(true),
            charge,
        };
        let mut columns_used = [0; MAX_NODES];
        for cpu in 0..shape.cpus {
            let node = node_of(cpu).min(MAX_NODES - 1);
            let group = if cpu_major { cpu } else { group_of[node] };
            let column = if cpu_major { 0 } else { columns_used[group] };
            if !cpu_major {
                columns_used[group] += 1;
            }
            if platform.nodes() > 1 && column == 0 {
                // A preference: memory comes from elsewhere rather than not at all.
                let _ = platform.bind(base + group * data.geometry.group_span(), data.geometry.group_span(), node);
            }
            // SAFETY: the tables have an entry for every CPU, and nobody else has them yet.
            unsafe {
                data.offsets.add(cpu).write(group * data.geometry.group_span());
                data.columns.cast_mut().add(cpu).write(column);
                data.isolated.cast_mut().add(cpu).write(is_isolated(cpu));
            }
        }
        Ok(data)
    }

    /// Gives everything back.
    ///
    /// # Safety
    /// Nobody uses the instance or anything that was allocated in it any more.
    pub unsafe fn close<P: Platform>(&self, platform: &P) {
        for (address, length) in self.mappings {
            // SAFETY: mapped by `open`, and unused as the caller promises.
            unsafe { platform.unmap(address, length) };
        }
    }

    /// A new owner.
    ///
    /// # Errors
    /// [`Refused::Full`] with four million of them, or with as many as there can be rows.
    pub fn open_owner(&self) -> Result<Owner, Refused> {
        self.open_owner_for(0)
    }

    /// The same with a word that says who pays, not 0, for whoever composes this: it is told again when something comes back.
    ///
    /// # Errors
    /// As for [`PerCpuData::open_owner`].
    pub fn open_owner_for(&self, payer: u64) -> Result<Owner, Refused> {
        self.state.lock().rows.open(payer).ok_or(Refused::Full)
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
                None if state.recall().is_some() || state.grow() => {}
                None => return Err(Refused::Full),
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
