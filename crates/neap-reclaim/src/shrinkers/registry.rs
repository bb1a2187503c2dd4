//! Registry of shrinkers. A visit does not wait while a shrinker is registered or unregistered.
//!
//! # Design
//!
//! A visitor looks a shrinker up by index and takes a per-CPU reference. It gets no reference once
//! the shrinker is being unregistered. With restartable sequences, neither step writes a cache line
//! that visitors on other CPUs read. [`Shrinkers::unregister`] takes these steps:
//!
//! 1. The caller sets the state to ending, under the mutex. Only one caller gets past this step.
//! 2. It kills the reference count, with one fence. No new call begins after that.
//! 3. The thread that puts the last reference, the caller or a visitor, calls `gone`, frees the
//!    index and wakes the caller.
//! 4. The caller waits for step 3. Inside a callback it returns at once, perhaps before step 3.
//!
//! The caller thus waits for running calls of that shrinker alone, and never for itself.
//! [`Shrinkers::synchronize`] waits for the calls of all shrinkers that run when it begins. Each
//! call runs within a read of an RCU domain.
//!
//! # Invariants
//!
//! The *kind* of a shrinker says whether it is inline, and whether it is the host's own. An index
//! keeps its kind for ever. A visitor that may call only some kinds checks the kind before it takes
//! a reference. With the last reference it would have to call `gone`, which it may call only for
//! these kinds. If kinds could change:
//!
//! 1. V, which holds a lock, sees that A, of index 7, is inline.
//! 2. A is unregistered. B gets index 7; it is not inline, and its `gone` takes that lock.
//! 3. V takes a reference, to B, and calls it.
//! 4. B is unregistered. V puts the last reference, and waits for itself.
//!
//! # Locking
//!
//! One mutex protects the lists of free indexes, and changes of state. It is taken inside the
//! host's fork gate. Fences run inside the gate, but without the mutex. Callbacks and waits run
//! outside of both. The registry must not be moved while a callback runs.

use super::call_depth::{depth, is_calling};
use super::lifecycle::{ENDING, LIVE, PREPARED};
use super::shrinker::{KINDS, Shrinker, ShrinkerId, Spec, Total, kind};
use super::shrinker_info::{BLOCK, BLOCKS, ShrinkerInfos, UNIT};
use crate::host::Host;
use crate::shrinkers::lifecycle::Ending;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{self, AtomicPtr, AtomicU32, Ordering};
use neap_base::gate::Inside;
use neap_base::platform::Errno;
use neap_base::{Mutex, Platform, Rcu};
use neap_groups::table::{Entry, Table};
use neap_groups::{GroupId, Name, is_name};
use neap_percpu::reference::fence;
use neap_percpu::{Owner, PerCpuWords, Refused, Wait};

/// Maximum number of shrinkers at a time. It is lower for a kind if shrinkers of other kinds have
/// used indexes, since an index keeps its kind.
pub const MOST_SHRINKERS: u32 = BLOCK * BLOCKS as u32;

/// Number of polls after which [`Shrinkers::synchronize`] sleeps between polls instead of yielding,
/// and the length of that sleep in nanoseconds.
const POLL_YIELDS_MAX: u32 = 20;
const POLL_SLEEP_NS: u64 = 50_000;

/// Reason for which a shrinker was not registered or unregistered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShrinkerError {
    /// There is no such shrinker, or it was unregistered.
    NoSuchShrinker,
    /// There is no such group, or it was deleted.
    NoSuchGroup,
    /// The name is invalid. A valid one has 1 to 56 bytes, is printable, has no `/`, and does not
    /// begin with `neap:`.
    BadName,
    /// The maximum number of shrinkers is reached.
    Full,
    /// There is no memory for the shrinker.
    NoMemory,
    /// The caller is inside a callback, and would wait for itself.
    InCallback,
    /// The system refused the required fence.
    Fence(Errno),
}

impl fmt::Display for ShrinkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ShrinkerError::NoSuchShrinker => "there is no such shrinker, or it is unregistered already",
            ShrinkerError::NoSuchGroup => "there is no such group",
            ShrinkerError::BadName => {
                "a name has 1 to 56 bytes, all printable, without '/', and does not begin with \"neap:\""
            }
            ShrinkerError::Full => "the maximum number of shrinkers is reached",
            ShrinkerError::NoMemory => "there is no memory for the shrinker",
            ShrinkerError::InCallback => "the caller is inside a callback, and would wait for itself",
            ShrinkerError::Fence(error) => return write!(f, "membarrier answered error {}", error.raw_os_error()),
        })
    }
}

impl core::error::Error for ShrinkerError {}

impl From<Errno> for ShrinkerError {
    fn from(_: Errno) -> ShrinkerError {
        ShrinkerError::NoMemory
    }
}

impl From<Refused> for ShrinkerError {
    fn from(_: Refused) -> ShrinkerError {
        ShrinkerError::NoMemory
    }
}

/// Result of unregistering a shrinker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unregistered {
    /// No callback of the shrinker runs, and none will run again.
    Gone,
    /// The caller is inside a callback, and does not wait. Callbacks of the shrinker may still run,
    /// but none begins. `gone` is called when the last one ends.
    Later,
}

/// Description of a shrinker, as registered, with its counts.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Report {
    /// Its id.
    pub id: ShrinkerId,
    /// Its name.
    pub name: Name,
    /// Cost of recreating one object, relative to [`DEFAULT_SEEKS`](crate::DEFAULT_SEEKS).
    pub seeks: u32,
    /// Objects for each scan call; 0 for the default.
    pub batch: u64,
    /// Whether it is called for each node.
    pub by_node: bool,
    /// Whether it is called for each group.
    pub by_group: bool,
    /// Whether threads that charge may call it.
    pub inline: bool,
    /// Whether it is the host's own.
    pub own: bool,
    /// Number of calls of its callbacks.
    pub calls: u64,
    /// Objects that were scanned.
    pub scanned: u64,
    /// Objects that were freed.
    pub freed: u64,
    /// Nanoseconds spent in callbacks. Calls that the caller did not measure count as 0.
    pub nanoseconds: u64,
    /// Total number of references that threads have taken in the shared count, a cache line that
    /// all CPUs write, since registration. Threads on isolated CPUs use it; without restartable
    /// sequences all threads do.
    pub shared: u64,
}

/// A pointer to a shrinker; null until the index is first used.
#[derive(Debug)]
#[repr(transparent)]
struct Link(AtomicPtr<Shrinker>);

// SAFETY: an atomic pointer is valid if its memory is zeroed.
unsafe impl Entry for Link {}

#[derive(Debug)]
struct ShrinkerLists {
    /// The first free index of each kind, plus one.
    free: [u32; KINDS],
}

/// All shrinkers, and the groups and nodes where they may have objects.
pub struct Shrinkers {
    table: Table<Link>,
    /// Number of indexes that were ever used.
    used: AtomicU32,
    lists: Mutex<ShrinkerLists>,
    pub(crate) infos: ShrinkerInfos,
    /// RCU domain. Each call of callbacks runs within a read of it.
    pub(crate) running: Rcu,
    /// [`Owner`] of the per-CPU words of all shrinkers.
    owner: Owner,
}

impl fmt::Debug for Shrinkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shrinkers").field("used", &self.used.load(Ordering::Relaxed)).finish_non_exhaustive()
    }
}

impl Shrinkers {
    /// Makes a registry without shrinkers.
    ///
    /// # Errors
    /// [`ShrinkerError::NoMemory`]: there is no memory for the registry.
    pub fn open<H: Host>(host: &H) -> Result<Shrinkers, ShrinkerError> {
        host.inside(|inside| {
            let owner = host.data().open_owner(host.platform())?;
            let nodes = host.platform().nodes().max(1) as u32;
            let infos = ShrinkerInfos::open(inside, host, nodes).inspect_err(|_| {
                // SAFETY: the owner was opened above. No other thread knows it, so none uses an
                // allocation of it or allocates for it.
                let _ = unsafe { host.data().close_owner(owner) };
            })?;
            let running = Rcu::new();
            // `open` fails if there is no memory for sequences. Then readers count by locked
            // instructions.
            let _ = running.open(host.platform());
            let lists = Mutex::new(ShrinkerLists { free: [0; KINDS] });
            Ok(Shrinkers { table: Table::new(), used: AtomicU32::new(0), lists, infos, running, owner })
        })
    }

    /// Frees the registry. `gone` is not called for shrinkers that are still registered.
    ///
    /// # Safety
    /// No thread uses the registry any more, no callback runs, and `host` is the one that it was
    /// opened with.
    pub unsafe fn close<H: Host>(&self, host: &H) {
        host.inside(|inside| {
            for index in 0..self.table.len() {
                let clear = |Link(link): &Link| link.swap(core::ptr::null_mut(), Ordering::Relaxed);
                if let Some(shrinker) = self.table.get(index).map(clear).and_then(NonNull::new) {
                    // SAFETY: `fresh` got the memory from the host with this size. By this
                    // function's contract no thread uses it.
                    unsafe { host.give_back(inside, shrinker.cast(), size_of::<Shrinker>()) };
                }
            }
            // SAFETY: by this function's contract no thread uses the registry or its parts, and no
            // callback runs, so no thread reads. `host` is the one that they were opened with. The
            // owner's allocations are words of shrinkers, which no thread uses or makes.
            unsafe {
                self.table.close(host.platform());
                self.infos.close(inside, host);
                self.running.close(host.platform());
                // It was opened in `open`, so there is no error.
                let _ = host.data().close_owner(self.owner);
            }
        });
    }

    pub(crate) fn at(&self, index: u32) -> Option<&Shrinker> {
        let Link(link) = self.table.get(index)?;
        // SAFETY: the pointer is null, or leads to memory in which `fresh` wrote a shrinker before
        // it stored the pointer, and that stays until `close`. Acquire pairs with that Release.
        unsafe { link.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the number of indexes that were ever used.
    pub(crate) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the number of blocks of these indexes.
    pub(crate) fn blocks(&self) -> usize {
        self.used().div_ceil(BLOCK) as usize
    }

    fn of(&self, id: ShrinkerId) -> Option<&Shrinker> {
        self.at(id.index()).filter(|shrinker| shrinker.is(id))
    }

    /// Returns whether a shrinker exists at this moment, prepared or live. Takes no lock.
    pub fn is_there(&self, id: ShrinkerId) -> bool {
        self.of(id).is_some_and(|shrinker| shrinker.life.state() != ENDING)
    }

    /// Returns whether a shrinker exists and is the host's own.
    pub fn is_own(&self, id: ShrinkerId) -> bool {
        self.of(id).is_some_and(Shrinker::own)
    }

    /// Returns whether an index was ever used for a shrinker that is not the host's own.
    pub fn has_others(&self) -> bool {
        (0..self.used()).filter_map(|index| self.at(index)).any(|shrinker| !shrinker.own())
    }

    /// Registers a shrinker that visitors do not call yet. It has an id and keeps its marks, so the
    /// caller can make lists that need the id. [`Shrinkers::start`] or [`Shrinkers::unregister`]
    /// must follow.
    ///
    /// # Errors
    /// [`ShrinkerError::BadName`], [`ShrinkerError::Full`] or [`ShrinkerError::NoMemory`]. No
    /// shrinker is registered then.
    ///
    /// # Safety
    /// Any thread, and several threads at a time, may call the callbacks with `data`. This holds
    /// from `start` on, until `unregister` has returned [`Unregistered::Gone`] or `gone` was
    /// called. The callbacks do not unwind.
    pub unsafe fn prepare<H: Host>(&self, host: &H, spec: &Spec<'_>) -> Result<ShrinkerId, ShrinkerError> {
        if spec.is_own() {
            return Err(ShrinkerError::BadName);
        }
        // SAFETY: this function has the contract of `prepare_any`.
        unsafe { self.prepare_any(host, spec) }
    }

    /// Registers and starts a shrinker of the host's own, with a name that begins with `neap:`. Its
    /// callbacks may run in any thread that holds no lock of the host.
    ///
    /// # Errors
    /// As for [`Shrinkers::prepare`].
    ///
    /// # Safety
    /// As for [`Shrinkers::prepare`]. The callbacks may be called from this call on.
    pub unsafe fn register_own<H: Host>(&self, host: &H, spec: &Spec<'_>) -> Result<ShrinkerId, ShrinkerError> {
        if !spec.is_own() {
            return Err(ShrinkerError::BadName);
        }
        // SAFETY: this function has the contract of `prepare_any`.
        let id = unsafe { self.prepare_any(host, spec) }?;
        self.start(host, id).map(|()| id)
    }

    /// Prepares a shrinker, of the program or of the host.
    ///
    /// # Safety
    /// As for [`Shrinkers::prepare`].
    unsafe fn prepare_any<H: Host>(&self, host: &H, spec: &Spec<'_>) -> Result<ShrinkerId, ShrinkerError> {
        if !is_name(spec.name) {
            return Err(ShrinkerError::BadName);
        }
        let kind = kind(spec.inline, spec.is_own());
        loop {
            if let Some(id) = host.inside(|_| self.begin(spec)) {
                return Ok(id);
            }
            // This thread is outside the fork gate here, since `PerCpuWords::new` enters the gate
            // itself.
            let mut words = Some(PerCpuWords::new(host, self.owner, Total::Words as usize, Wait::Long)?);
            let made = host.inside(|inside| self.fresh(inside, host, kind, &mut words));
            // SAFETY: words that `fresh` did not take were made above, and no other thread has seen
            // them.
            words.into_iter().for_each(|words| unsafe { words.free(host) });
            made?;
        }
    }

    /// Begins a life of a free index of the kind. Returns `None` if no index of the kind is free.
    fn begin(&self, spec: &Spec<'_>) -> Option<ShrinkerId> {
        let mut lists = self.lists.lock();
        let free = &mut lists.free[kind(spec.inline, spec.is_own())];
        let index = free.checked_sub(1)?;
        let shrinker = self.at(index)?;
        *free = shrinker.next.load(Ordering::Relaxed);
        Some(ShrinkerId::new(index, shrinker.begin(spec)))
    }

    /// Adds a free index of a kind, and takes the words for it.
    fn fresh<H: Host>(
        &self,
        inside: &Inside<'_>,
        host: &H,
        kind: usize,
        words: &mut Option<PerCpuWords>,
    ) -> Result<(), ShrinkerError> {
        let mut lists = self.lists.lock();
        let index = self.used();
        if index == MOST_SHRINKERS {
            return Err(ShrinkerError::Full);
        }
        if index == self.table.len() {
            self.table.grow(host.platform())?;
        }
        let Link(link) = self.table.get(index).ok_or(ShrinkerError::NoMemory)?;
        let memory = host.memory(inside, size_of::<Shrinker>()).ok_or(ShrinkerError::NoMemory)?.cast::<Shrinker>();
        let words = words.take().ok_or(ShrinkerError::NoMemory)?;
        // SAFETY: `Host::memory` returned memory of this size, aligned to a cache line, which is
        // the alignment of `Shrinker`. No other thread knows of it.
        unsafe { memory.write(Shrinker::new(words)) };
        // SAFETY: written above.
        unsafe { memory.as_ref() }.next.store(lists.free[kind], Ordering::Relaxed);
        link.store(memory.as_ptr(), Ordering::Release); // Pairs with the Acquire in `at`.
        lists.free[kind] = index + 1;
        self.used.store(index + 1, Ordering::Relaxed);
        Ok(())
    }

    /// Declares that all objects of a prepared shrinker belong to one group, or to its heir.
    /// Visitors do not ask the shrinker for objects of other groups, even if those are marked.
    pub fn belongs_to(&self, id: ShrinkerId, group: GroupId) {
        self.of(id).inspect(|shrinker| shrinker.set_of(group));
    }

    /// Sets the time that one callback of a prepared shrinker may take, in nanoseconds; 0 for the
    /// default.
    pub fn set_budget(&self, id: ShrinkerId, nanoseconds: u64) {
        self.of(id).inspect(|shrinker| shrinker.set_budget(nanoseconds));
    }

    /// Returns the time that one callback of a shrinker may take, in nanoseconds; 0 for the
    /// default.
    pub fn budget_of(&self, id: ShrinkerId) -> u64 {
        self.of(id).map_or(0, |shrinker| shrinker.budget())
    }

    /// Starts a prepared shrinker, which may be called from now on.
    ///
    /// # Errors
    /// [`ShrinkerError::NoSuchShrinker`]: the id names no prepared shrinker.
    pub fn start<H: Host>(&self, host: &H, id: ShrinkerId) -> Result<(), ShrinkerError> {
        host.inside(|inside| {
            let _lists = self.lists.lock();
            let shrinker = self.of(id).filter(|shrinker| shrinker.life.state() == PREPARED);
            let shrinker = shrinker.ok_or(ShrinkerError::NoSuchShrinker)?;
            shrinker.life.start();
            if !shrinker.by_group() {
                (0..self.infos.nodes()).for_each(|node| self.infos.mark(inside, host, id.index(), 0, node));
            }
            Ok(())
        })
    }

    /// Prepares and starts a shrinker.
    ///
    /// # Errors
    /// As for [`Shrinkers::prepare`].
    ///
    /// # Safety
    /// As for [`Shrinkers::prepare`]. The callbacks may be called from this call on.
    pub unsafe fn register<H: Host>(&self, host: &H, spec: &Spec<'_>) -> Result<ShrinkerId, ShrinkerError> {
        // SAFETY: this function has the contract of `prepare`.
        let id = unsafe { self.prepare(host, spec) }?;
        self.start(host, id).map(|()| id)
    }

    /// Unregisters a shrinker. No call of it begins after that. Fences CPUs.
    ///
    /// Waits until its running calls have ended. Inside a callback, of any shrinker, it does not
    /// wait; see [`Unregistered::Later`].
    ///
    /// # Errors
    /// [`ShrinkerError::NoSuchShrinker`]: there is none, another caller is unregistering it, or it
    /// is the host's own.
    /// [`ShrinkerError::Fence`]: the system refused the fence. The shrinker stays registered.
    pub fn unregister<H: Host>(&self, host: &H, id: ShrinkerId) -> Result<Unregistered, ShrinkerError> {
        let ending = |_: &Inside<'_>| {
            let _lists = self.lists.lock();
            let shrinker = self.of(id).filter(|shrinker| !shrinker.own())?;
            Some((shrinker, shrinker.life.end()?))
        };
        let (shrinker, Ending { before, ended }) = host.inside(ending).ok_or(ShrinkerError::NoSuchShrinker)?;
        let close = |_: &Inside<'_>| shrinker.life.close(|| fence(host.platform()));
        if before == PREPARED || host.inside(close).map_err(ShrinkerError::Fence)? {
            self.finish(host, id.index(), shrinker);
        }
        while !shrinker.life.is_over(ended) {
            if is_calling() {
                return Ok(Unregistered::Later);
            }
            shrinker.life.wait(ended);
        }
        Ok(Unregistered::Gone)
    }

    /// Calls `gone` and frees the index, after the last reference was put. The caller must be
    /// outside the fork gate.
    pub(crate) fn finish<H: Host>(&self, host: &H, index: u32, shrinker: &Shrinker) {
        shrinker.call_gone();
        host.inside(|_| self.free(index, shrinker));
    }

    fn free(&self, index: u32, shrinker: &Shrinker) {
        let mut lists = self.lists.lock();
        let free = &mut lists.free[shrinker.kind()];
        shrinker.next.store(*free, Ordering::Relaxed);
        *free = index + 1;
        shrinker.life.free();
    }

    /// Waits until every callback, of any shrinker, that runs at the time of the call has ended.
    ///
    /// # Errors
    /// [`ShrinkerError::InCallback`]: the caller is inside a callback. [`ShrinkerError::Fence`]:
    /// the system refused a fence. In both cases callbacks may still run.
    pub fn synchronize<H: Host>(&self, host: &H) -> Result<(), ShrinkerError> {
        if is_calling() {
            return Err(ShrinkerError::InCallback);
        }
        let (mark, mut looks) = (self.running.mark(), 0);
        let advance = |inside: &Inside<'_>| self.running.advance_past(inside, host.platform(), mark);
        while !host.inside(advance).map_err(ShrinkerError::Fence)? {
            looks += 1;
            if looks < POLL_YIELDS_MAX { host.platform().pause() } else { host.platform().sleep(POLL_SLEEP_NS) }
        }
        Ok(())
    }

    /// Marks that a shrinker that knows groups may have objects of the group in `slot` on a node.
    ///
    /// The caller has added the first object of a group on a node, and `count` can see that object.
    /// It calls this within [`Groups::attach`](neap_groups::Groups::attach). Takes no lock if the
    /// mark exists already. Otherwise it may take one to grow tables.
    pub fn mark<H: Host>(&self, inside: &Inside<'_>, host: &H, id: ShrinkerId, slot: u32, node: u32) {
        let Some(shrinker) = self.of(id).filter(|shrinker| shrinker.by_group()) else { return };
        if shrinker.by_node() {
            self.infos.mark(inside, host, id.index(), slot, node);
        } else {
            (0..self.infos.nodes()).for_each(|node| self.infos.mark(inside, host, id.index(), slot, node));
        }
    }

    /// Returns a number that changes with each new mark. A thread reads the number first, and then
    /// finds no mark below a group. It need not look there again while the number is unchanged.
    pub fn marks(&self) -> u64 {
        self.infos.marks()
    }

    /// Returns the first slot from `from` on whose group may have objects on a node. Includes
    /// groups whose marks could not be stored for lack of memory.
    pub fn next_with_anything(&self, node: u32, from: u32) -> Option<u32> {
        self.infos.next_with_anything(node, from)
    }

    /// Returns whether the group in a slot may have objects on a node. Also true if its marks could
    /// not be stored for lack of memory.
    pub fn has_anything(&self, node: u32, slot: u32) -> bool {
        self.infos.has_anything(node, slot)
    }

    /// Calls `each` with the slots of all groups that may have objects on a node.
    pub fn each_group_with_anything(&self, node: u32, mut each: impl FnMut(u32)) {
        let next = |slot: u32| self.next_with_anything(node, slot);
        core::iter::successors(next(0), |&slot| next(slot.checked_add(1)?)).for_each(&mut each);
    }

    /// Moves deferred work and marks of the group in a slot to its heir.
    ///
    /// [`Host::is_online`] returns false for the group already, and its slot is not reused yet.
    pub fn offline<H: Host>(&self, inside: &Inside<'_>, host: &H, slot: u32, heir: u32) {
        self.infos.offline(inside, host, || self.used(), slot, heir);
    }

    /// Returns the deferred objects of a shrinker in a group's slot on a node; 0 for an id that was
    /// never used.
    pub fn deferred(&self, id: ShrinkerId, slot: u32, node: u32) -> u64 {
        let (block, unit) = ((id.index() / BLOCK) as usize, id.index() % BLOCK / UNIT);
        let unit = self.infos.info(block, slot, node).and_then(|info| info.unit(unit));
        unit.map_or(0, |unit| unit.deferred(id.index(), id.generation()))
    }

    /// Returns whether a shrinker may have objects of the group in a slot on a node; false for an
    /// id that was never used.
    pub fn is_marked(&self, id: ShrinkerId, slot: u32, node: u32) -> bool {
        let (block, unit) = ((id.index() / BLOCK) as usize, id.index() % BLOCK / UNIT);
        match self.infos.unit_ref(block, slot, node, unit) {
            Some(unit_ref) => match unit_ref.memory() {
                Some(unit) => unit.bits.load(Ordering::Relaxed) >> (id.index() % UNIT) & 1 != 0,
                // Without a unit, the summary bit stands for all its shrinkers.
                None => unit_ref.is_set(),
            },
            None => id.index() < self.used() && self.infos.is_untracked(slot),
        }
    }

    /// Calls `each` with a description of every live shrinker. Takes no lock and no reference, so
    /// no unregistration waits for it. `each` gets a copy.
    pub fn each(&self, mut each: impl FnMut(&Report)) {
        for index in 0..self.used() {
            let is_live = |shrinker: &&Shrinker| shrinker.life.state() == LIVE;
            let Some(shrinker) = self.at(index).filter(is_live) else { continue };
            let id = shrinker.id(index);
            let read = |shrinker: &Shrinker| Report {
                id,
                name: shrinker.name(),
                seeks: shrinker.seeks(),
                batch: shrinker.batch(),
                by_node: shrinker.by_node(),
                by_group: shrinker.by_group(),
                inline: shrinker.inline(),
                own: shrinker.own(),
                calls: shrinker.calls(),
                scanned: shrinker.total(Total::Scanned),
                freed: shrinker.total(Total::Freed),
                nanoseconds: shrinker.total(Total::Nanoseconds),
                shared: shrinker.taken_elsewhere(),
            };
            if let Some(report) = self.read(id, read).filter(|_| is_live(&shrinker)) {
                each(&report);
            }
        }
    }

    /// Returns the name of a shrinker that exists, also of one that ends.
    pub fn name_of(&self, id: ShrinkerId) -> Option<Name> {
        self.read(id, Shrinker::name)
    }

    /// Reads the data of a shrinker. Returns `None` unless it exists before and after the read.
    /// Takes no reference. With the last reference the caller would have to call `gone`, which may
    /// take a lock that the caller holds.
    fn read<R>(&self, id: ShrinkerId, read: impl FnOnce(&Shrinker) -> R) -> Option<R> {
        let answer = read(self.of(id)?);
        // A reader that saw a write of the next life, which begins after the index was free, sees
        // its new state or generation below.
        atomic::fence(Ordering::Acquire); // Pairs with the one in `Shrinker::begin`.
        self.of(id).map(|_| answer)
    }

    /// Puts a reference. If it was the last one of a shrinker that ends, calls `gone` and frees the
    /// index.
    pub(crate) fn put<H: Host>(&self, host: &H, index: u32, shrinker: &Shrinker) {
        if shrinker.life.put() {
            self.finish(host, index, shrinker);
        }
    }

    /// Forgets calls of the parent's other threads, in a forked child.
    ///
    /// If one of them was unregistering a shrinker and had killed its references, the shrinker is
    /// gone, without a call of `gone`. If it had not killed them yet, the shrinker stays
    /// registered.
    ///
    /// # Safety
    /// The caller is the only thread of the child. It does not rely on a read of `running` that it
    /// began before the fork.
    pub unsafe fn forget_others<H: Host>(&self, host: &H) {
        // SAFETY: by this function's contract the caller is the only thread of the child, and needs
        // no protection of an earlier read.
        unsafe { self.running.forget_others() };
        let registry = core::ptr::from_ref(self).addr();
        host.inside(|_| {
            for index in 0..self.used() {
                let Some(shrinker) = self.at(index) else { continue };
                if shrinker.life.forget_others(depth(registry, index)) {
                    self.free(index, shrinker);
                }
            }
        });
    }
}
