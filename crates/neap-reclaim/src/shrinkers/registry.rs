//! The registry: shrinkers come and go, at any moment and from anywhere, without anybody's visit being in their way.
//!
//! Sits between whoever caches and the visits. A visitor looks a shrinker up by index and takes a per-CPU reference, which fails from the moment when it
//! is unregistered; it writes no line that another visitor looks at. Unregistering, in numbered steps:
//! 1. the state says so, under the mutex, so that one caller does it; 2. the reference is killed, with one fence: no new call begins;
//! 3. whoever puts the last reference, the caller or the visitor whose call ends last, tells `gone`, frees the index and wakes the caller;
//! 4. the caller waits for that, unless it is inside a callback itself: then it returns, and step 3 is the visitor's.
//!
//! So it waits for running calls of that shrinker alone, never for another's, and never for itself. [`Shrinkers::synchronize`] waits for all
//! calls that run now: each counts itself in and out of a domain of grace periods.
//!
//! Who may call only some kinds (those that are inline, or the host's own) looks at the kind before it takes a reference, since with the last one `gone` would be its to
//! tell. So an index is of one kind for ever. Otherwise:
//! 1. V, which holds a lock, sees that A, of index 7, is inline; 2. A is unregistered, and B, which is not, and whose `gone` wants that lock, gets
//!    index 7; 3. V takes a reference, to B, and calls it; 4. B is unregistered: V puts the last reference, and waits for itself.
//!
//! Lock: one mutex for the lists of free indexes, held for a few links; inside the host's gate. Fences, callbacks and waits are outside of both.
//! The registry must not be moved while a callback runs.

use super::calling::{depth, is_calling};
use super::life::{ENDING, LIVE, PREPARED};
use super::places::{BLOCK, BLOCKS, Places, UNIT};
use super::shrinker::{KINDS, Shrinker, ShrinkerId, Spec, Total, kind};
use crate::host::Host;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{self, AtomicPtr, AtomicU32, Ordering};
use neap_base::platform::Errno;
use neap_base::{Mutex, Platform, Rcu};
use neap_groups::table::{Entry, Table};
use neap_groups::{GroupId, Name, is_name};
use neap_percpu::reference::fence;
use neap_percpu::{LentWords, Owner, Refused, Wait};

/// How the names of the host's own begin, and nobody else's.
const OWN: &str = "neap:";

/// Most shrinkers at a time; fewer of a kind where others of another kind had their indexes once.
pub const MOST_SHRINKERS: u32 = BLOCK * BLOCKS as u32;

/// Looks of [`Shrinkers::synchronize`] with a mere yield in between, before naps of so many nanoseconds.
const YIELDS: u32 = 20;
const NAP: u64 = 50_000;

/// Why a shrinker is not registered or unregistered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotDone {
    /// There is no such shrinker, or somebody has unregistered it.
    NoSuchShrinker,
    /// There is no such group, or it was deleted.
    NoSuchGroup,
    /// A name has 1 to 56 bytes, no `/` and nothing that does not print, and does not begin with `neap:`.
    BadName,
    /// There are as many as there can be.
    Full,
    /// There is no memory for it.
    NoMemory,
    /// The caller is inside a callback, and would wait for itself.
    InCallback,
    /// The system forbids the fence that it takes.
    Fence(Errno),
}

impl fmt::Display for NotDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotDone::NoSuchShrinker => "there is no such shrinker, or it is unregistered already",
            NotDone::NoSuchGroup => "there is no such group",
            NotDone::BadName => {
                "a name has 1 to 56 bytes, no '/' and nothing that does not print, and does not begin with \"neap:\""
            }
            NotDone::Full => "there are as many shrinkers as there can be",
            NotDone::NoMemory => "there is no memory for it",
            NotDone::InCallback => "a callback would wait for itself",
            NotDone::Fence(error) => return write!(f, "membarrier answered error {}", error.raw_os_error()),
        })
    }
}

impl core::error::Error for NotDone {}

impl From<Errno> for NotDone {
    fn from(_: Errno) -> NotDone {
        NotDone::NoMemory
    }
}

impl From<Refused> for NotDone {
    fn from(_: Refused) -> NotDone {
        NotDone::NoMemory
    }
}

/// What became of a shrinker that was unregistered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unregistered {
    /// No callback of it runs, or ever will.
    Gone,
    /// The same as soon as those that run now have ended: the caller is inside a callback, and does not wait. `gone` is told.
    Later,
}

/// What is known of a shrinker.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Which.
    pub id: ShrinkerId,
    /// As it was registered.
    pub name: Name,
    /// As it was registered.
    pub seeks: u32,
    /// As it was registered.
    pub batch: u64,
    /// As it was registered.
    pub by_node: bool,
    /// As it was registered.
    pub by_group: bool,
    /// As it was registered.
    pub inline: bool,
    /// It is the host's own.
    pub own: bool,
    /// Callbacks that were called.
    pub calls: u64,
    /// Objects that scans looked at.
    pub scanned: u64,
    /// Objects that they freed.
    pub freed: u64,
    /// What callbacks took, where whoever called them measured it.
    pub nanoseconds: u64,
    /// References that visitors took in a line that others write: on isolated CPUs, and where there are no restartable sequences.
    pub shared: u64,
}

/// A pointer to a shrinker; null before the first one of the index.
#[derive(Debug)]
#[repr(transparent)]
struct Link(AtomicPtr<Shrinker>);

// SAFETY: an atomic pointer, of which 0 is one.
unsafe impl Entry for Link {}

#[derive(Debug)]
struct Lists {
    /// The first free one of each kind, plus one.
    free: [u32; KINDS],
}

/// All shrinkers, and where they may have something.
pub struct Shrinkers {
    table: Table<Link>,
    /// Indexes that there ever were.
    used: AtomicU32,
    lists: Mutex<Lists>,
    pub(crate) places: Places,
    /// Who is in a callback.
    pub(crate) running: Rcu,
    /// [`Owner`] of the words of all shrinkers.
    owner: Owner,
}

impl fmt::Debug for Shrinkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shrinkers").field("used", &self.used.load(Ordering::Relaxed)).finish_non_exhaustive()
    }
}

impl Shrinkers {
    /// A registry without shrinkers.
    ///
    /// # Errors
    /// [`NotDone::NoMemory`].
    pub fn open<H: Host>(host: &H) -> Result<Shrinkers, NotDone> {
        host.inside(|| {
            let owner = host.data().open_owner(host.platform())?;
            let nodes = host.platform().nodes().max(1) as u32;
            let places = Places::open(host, nodes).inspect_err(|_| {
                // SAFETY: nobody has heard of it.
                let _ = unsafe { host.data().close_owner(owner) };
            })?;
            let running = Rcu::new();
            // Without memory for sequences readers do without.
            let _ = running.open(host.platform());
            let lists = Mutex::new(Lists { free: [0; KINDS] });
            Ok(Shrinkers { table: Table::new(), used: AtomicU32::new(0), lists, places, running, owner })
        })
    }

    /// Gives everything back. Shrinkers that are still registered are not told.
    ///
    /// # Safety
    /// Nobody uses the registry any more, and no callback runs.
    pub unsafe fn close<H: Host>(&self, host: &H) {
        for index in 0..self.table.len() {
            let shrinker = self.table.get(index).map(|Link(link)| link.swap(core::ptr::null_mut(), Ordering::Relaxed));
            if let Some(shrinker) = shrinker.and_then(NonNull::new) {
                // SAFETY: made by `fresh`; nobody uses it, as the caller promises.
                unsafe { host.give_back(shrinker.cast(), size_of::<Shrinker>()) };
            }
        }
        // SAFETY: as the caller promises.
        unsafe {
            self.table.close(host.platform());
            self.places.close(host);
            self.running.close(host.platform());
            // It was opened above, so there is no error.
            let _ = host.inside(|| host.data().close_owner(self.owner));
        }
    }

    pub(crate) fn at(&self, index: u32) -> Option<&Shrinker> {
        let Link(link) = self.table.get(index)?;
        // SAFETY: Acquire pairs with the Release in `fresh`: it is whole, and stays.
        unsafe { link.load(Ordering::Acquire).as_ref() }
    }

    /// Indexes that there ever were.
    pub(crate) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Blocks of these.
    pub(crate) fn blocks(&self) -> usize {
        self.used().div_ceil(BLOCK) as usize
    }

    fn of(&self, id: ShrinkerId) -> Option<&Shrinker> {
        self.at(id.index()).filter(|shrinker| shrinker.is(id))
    }

    /// Whether a shrinker is there, prepared or live, at this moment. Takes no lock.
    pub fn is_there(&self, id: ShrinkerId) -> bool {
        self.of(id).is_some_and(|shrinker| shrinker.life.state() != ENDING)
    }

    /// Whether a shrinker is there and the host's own.
    pub fn is_own(&self, id: ShrinkerId) -> bool {
        self.of(id).is_some_and(Shrinker::own)
    }

    /// Whether there ever was one that is not.
    pub fn has_others(&self) -> bool {
        (0..self.used()).filter_map(|index| self.at(index)).any(|shrinker| !shrinker.own())
    }

    /// Names a shrinker that is not called yet: marks are kept, so that lists can be made that need the id. [`Shrinkers::start`] is to follow, or
    /// [`Shrinkers::unregister`].
    ///
    /// # Errors
    /// See [`NotDone`]; nothing has changed then.
    ///
    /// # Safety
    /// From `start` on the callbacks may be called with `data`, by any thread, also several at a time, until `unregister` has answered
    /// [`Unregistered::Gone`], or `gone` was called. They do not unwind.
    pub unsafe fn prepare<H: Host>(&self, host: &H, spec: &Spec<'_>) -> Result<ShrinkerId, NotDone> {
        // SAFETY: as the caller promises.
        unsafe { self.prepare_for(host, spec, false) }
    }

    /// The same and [`Shrinkers::start`] for a shrinker of the host's own, whose name begins with `neap:`. Its callbacks may run in any thread that
    /// holds nothing of the host's.
    ///
    /// # Errors
    /// As for these.
    ///
    /// # Safety
    /// As for these.
    pub unsafe fn register_own<H: Host>(&self, host: &H, spec: &Spec<'_>) -> Result<ShrinkerId, NotDone> {
        // SAFETY: as the caller promises.
        let id = unsafe { self.prepare_for(host, spec, true) }?;
        self.start(host, id).map(|()| id)
    }

    /// # Safety
    /// As for [`Shrinkers::prepare`].
    unsafe fn prepare_for<H: Host>(&self, host: &H, spec: &Spec<'_>, own: bool) -> Result<ShrinkerId, NotDone> {
        if !is_name(spec.name) || spec.name.starts_with(OWN) != own {
            return Err(NotDone::BadName);
        }
        let kind = kind(spec.inline, own);
        loop {
            if let Some(id) = host.inside(|| self.begin(spec, own)) {
                return Ok(id);
            }
            // Not inside the gate, which this passes itself.
            let mut words = Some(LentWords::new(host, self.owner, Total::Words as usize, Wait::Long)?);
            let made = host.inside(|| self.fresh(host, kind, &mut words));
            // SAFETY: nobody else has seen what is left.
            words.into_iter().for_each(|words| unsafe { words.free(host) });
            made?;
        }
    }

    /// Begins a life of a free index.
    fn begin(&self, spec: &Spec<'_>, own: bool) -> Option<ShrinkerId> {
        let mut lists = self.lists.lock();
        let free = &mut lists.free[kind(spec.inline, own)];
        let index = free.checked_sub(1)?;
        let shrinker = self.at(index)?;
        *free = shrinker.next.load(Ordering::Relaxed);
        Some(ShrinkerId::new(index, shrinker.begin(spec, own)))
    }

    /// One more index of a kind, which is free; takes the words for it.
    fn fresh<H: Host>(&self, host: &H, kind: usize, words: &mut Option<LentWords>) -> Result<(), NotDone> {
        let mut lists = self.lists.lock();
        let index = self.used();
        if index == MOST_SHRINKERS {
            return Err(NotDone::Full);
        }
        if index == self.table.len() {
            self.table.grow(host.platform())?;
        }
        let Link(link) = self.table.get(index).ok_or(NotDone::NoMemory)?;
        let memory = host.memory(size_of::<Shrinker>()).ok_or(NotDone::NoMemory)?.cast::<Shrinker>();
        let words = words.take().ok_or(NotDone::NoMemory)?;
        // SAFETY: so many bytes, from where a line begins, that nobody else has.
        unsafe { memory.write(Shrinker::new(words)) };
        // SAFETY: written above.
        unsafe { memory.as_ref() }.next.store(lists.free[kind], Ordering::Relaxed);
        link.store(memory.as_ptr(), Ordering::Release); // Pairs with the Acquire in `at`.
        lists.free[kind] = index + 1;
        self.used.store(index + 1, Ordering::Relaxed);
        Ok(())
    }

    /// Lets all that a prepared shrinker has be a group's, or its heir's: it is asked for no other, whatever is marked.
    pub fn belongs_to(&self, id: ShrinkerId, group: GroupId) {
        self.of(id).inspect(|shrinker| shrinker.set_of(group));
    }

    /// Says how long one callback of a prepared shrinker may take, in nanoseconds; 0: as long as
    /// any.
    pub fn set_budget(&self, id: ShrinkerId, nanoseconds: u64) {
        self.of(id).inspect(|shrinker| shrinker.set_budget(nanoseconds));
    }

    /// How long one callback of a shrinker may take, in nanoseconds; 0: as long as any.
    pub fn budget_of(&self, id: ShrinkerId) -> u64 {
        self.of(id).map_or(0, |shrinker| shrinker.budget())
    }

    /// Lets a prepared shrinker be called.
    ///
    /// # Errors
    /// [`NotDone::NoSuchShrinker`].
    pub fn start<H: Host>(&self, host: &H, id: ShrinkerId) -> Result<(), NotDone> {
        host.inside(|| {
            let _lists = self.lists.lock();
            let shrinker = self.of(id).filter(|shrinker| shrinker.life.state() == PREPARED);
            let shrinker = shrinker.ok_or(NotDone::NoSuchShrinker)?;
            shrinker.life.start();
            if !shrinker.by_group() {
                (0..self.places.nodes()).for_each(|node| self.places.mark(host, id.index(), 0, node));
            }
            Ok(())
        })
    }

    /// [`Shrinkers::prepare`] and [`Shrinkers::start`].
    ///
    /// # Errors
    /// As for these.
    ///
    /// # Safety
    /// As for these.
    pub unsafe fn register<H: Host>(&self, host: &H, spec: &Spec<'_>) -> Result<ShrinkerId, NotDone> {
        // SAFETY: as the caller promises.
        let id = unsafe { self.prepare(host, spec) }?;
        self.start(host, id).map(|()| id)
    }

    /// Ends a shrinker: no call of it begins from now on. Waits for those that run, and for nothing else; inside a callback, of any shrinker, it does
    /// not wait, see [`Unregistered::Later`]. Fences.
    ///
    /// # Errors
    /// [`NotDone::NoSuchShrinker`], also if another caller is about it, and for the host's own, which stay; [`NotDone::Fence`]: it goes on.
    pub fn unregister<H: Host>(&self, host: &H, id: ShrinkerId) -> Result<Unregistered, NotDone> {
        let ending = || {
            let _lists = self.lists.lock();
            let shrinker = self.of(id).filter(|shrinker| !shrinker.own())?;
            Some((shrinker, shrinker.life.end()?))
        };
        let (shrinker, (before, ended)) = host.inside(ending).ok_or(NotDone::NoSuchShrinker)?;
        let close = || shrinker.life.close(|| fence(host.platform()));
        if before == PREPARED || host.inside(close).map_err(NotDone::Fence)? {
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

    /// What follows the last reference. Outside the gate.
    pub(crate) fn finish<H: Host>(&self, host: &H, index: u32, shrinker: &Shrinker) {
        shrinker.call_gone();
        host.inside(|| self.free(index, shrinker));
    }

    fn free(&self, index: u32, shrinker: &Shrinker) {
        let mut lists = self.lists.lock();
        let free = &mut lists.free[shrinker.kind()];
        shrinker.next.store(*free, Ordering::Relaxed);
        *free = index + 1;
        shrinker.life.free();
    }

    /// Waits until every callback that runs now has ended, whichever shrinker's.
    ///
    /// # Errors
    /// [`NotDone::InCallback`]; [`NotDone::Fence`].
    pub fn synchronize<H: Host>(&self, host: &H) -> Result<(), NotDone> {
        if is_calling() {
            return Err(NotDone::InCallback);
        }
        let (mark, mut looks) = (self.running.mark(), 0);
        while !host.inside(|| self.running.advance_past(host.platform(), &(), mark)).map_err(NotDone::Fence)? {
            looks += 1;
            if looks < YIELDS { host.platform().pause() } else { host.platform().sleep(NAP) }
        }
        Ok(())
    }

    /// Says that a shrinker by group may have something of the group in `slot`, on a node; to be called whenever the first object came there, after it
    /// is visible to `count`, by [`Groups::hang_on`](neap_groups::Groups::hang_on). Takes no lock where that was known, and perhaps one for growing. Inside
    /// the gate.
    pub fn mark<H: Host>(&self, host: &H, id: ShrinkerId, slot: u32, node: u32) {
        let Some(shrinker) = self.of(id).filter(|shrinker| shrinker.by_group()) else { return };
        if shrinker.by_node() {
            self.places.mark(host, id.index(), slot, node);
        } else {
            (0..self.places.nodes()).for_each(|node| self.places.mark(host, id.index(), slot, node));
        }
    }

    /// A number that changes whenever something is marked that was not: who reads it, looks, and finds nothing below a group, need not look again while it is the
    /// same.
    pub fn marks(&self) -> u64 {
        self.places.marks()
    }

    /// The first group, by slot from `from` on, that may have anything on a node, or whose memory for saying so there was none.
    pub fn next_with_anything(&self, node: u32, from: u32) -> Option<u32> {
        self.places.next_with_anything(node, from)
    }

    /// Whether the group in a slot is one of them.
    pub fn has_anything(&self, node: u32, slot: u32) -> bool {
        self.places.has_anything(node, slot)
    }

    /// Calls `each` with the slots of all of them.
    pub fn each_group_with_anything(&self, node: u32, mut each: impl FnMut(u32)) {
        let next = |slot: u32| self.next_with_anything(node, slot);
        core::iter::successors(next(0), |&slot| next(slot.checked_add(1)?)).for_each(&mut each);
    }

    /// Hands what was deferred for the group in a slot, and what it may have, to its heir. It is leaving ([`Host::is_seat`]), and the slot nobody
    /// else's yet; inside the gate.
    pub fn offline<H: Host>(&self, host: &H, slot: u32, heir: u32) {
        self.places.offline(host, || self.used(), slot, heir);
    }

    /// What is deferred for a shrinker in a group's slot on a node. Nothing is for an id that was never one.
    pub fn deferred(&self, id: ShrinkerId, slot: u32, node: u32) -> u64 {
        let (block, unit) = ((id.index() / BLOCK) as usize, id.index() % BLOCK / UNIT);
        let unit = self.places.place(block, slot, node).and_then(|place| place.unit(unit));
        unit.map_or(0, |unit| unit.deferred(id.index(), id.generation()))
    }

    /// Whether a shrinker may have something of the group in a slot, on a node. One whose id was never one has nothing.
    pub fn is_marked(&self, id: ShrinkerId, slot: u32, node: u32) -> bool {
        let (block, unit) = ((id.index() / BLOCK) as usize, id.index() % BLOCK / UNIT);
        match self.places.spot(block, slot, node, unit) {
            Some(spot) => match spot.memory() {
                Some(unit) => unit.bits.load(Ordering::Relaxed) >> (id.index() % UNIT) & 1 != 0,
                // Where there was no memory for saying so, all may.
                None => spot.is_raised(),
            },
            None => id.index() < self.used() && self.places.is_blind(slot),
        }
    }

    /// Calls `each` with what is known of every shrinker. Takes no lock and no reference, and keeps nobody from unregistering: what `each` is given is a copy.
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

    /// The name of a shrinker, also of one that ends.
    pub fn name_of(&self, id: ShrinkerId) -> Option<Name> {
        self.read(id, Shrinker::name)
    }

    /// Reads what is said of a shrinker, if it is there all the while. Takes no reference, so who reads is never the one to tell `gone`, which may want a lock
    /// that it holds.
    fn read<R>(&self, id: ShrinkerId, read: impl FnOnce(&Shrinker) -> R) -> Option<R> {
        let answer = read(self.of(id)?);
        // 1. The index is free. 2. Its next life begins, and writes. 3. That is prepared, with another generation. Who has read any of 2 sees 1 or 3.
        atomic::fence(Ordering::Acquire); // Pairs with the one in `Shrinker::begin`.
        self.of(id).map(|_| answer)
    }

    /// Puts a reference.
    pub(crate) fn put<H: Host>(&self, host: &H, index: u32, shrinker: &Shrinker) {
        if shrinker.life.put() {
            self.finish(host, index, shrinker);
        }
    }

    /// In a forked child: calls of other threads do not run here. A shrinker that one of them was about to unregister is gone, without its
    /// `gone` being told, or lives on, if it could still be called.
    ///
    /// # Safety
    /// As for [`Rcu::forget_others`].
    pub unsafe fn forget_others<H: Host>(&self, host: &H) {
        // SAFETY: as the caller promises.
        unsafe { self.running.forget_others() };
        let registry = core::ptr::from_ref(self).addr();
        host.inside(|| {
            for index in 0..self.used() {
                let Some(shrinker) = self.at(index) else { continue };
                if shrinker.life.forget_others(depth(registry, index)) {
                    self.free(index, shrinker);
                }
            }
        });
    }
}
