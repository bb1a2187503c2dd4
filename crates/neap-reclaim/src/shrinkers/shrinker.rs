//! One shrinker: its callbacks, its reference count, and its counts of work.
//!
//! Shrinkers lie in a table that never moves, so an index that was once used can always be looked
//! up, without a lock or a grace period. A shrinker's data is written while no thread has a
//! reference, and read with a reference. A shrinker is *prepared* (it has an id, and is not
//! called), then *live*, then *ending* (no new calls), then the index is free. The next shrinker of
//! the index has another generation. Each CPU counts work in its own words, so visitors on two CPUs
//! do not write the same cache line.

use super::lifecycle::{FREE, Life};
use super::work::ShrinkerFilter;
use core::ffi::c_void;
use core::fmt;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use neap_groups::{GroupId, Name, SharedName};
use neap_percpu::PerCpuWords;

/// Answer of `count`: there are no objects, and none come without a mark.
pub const EMPTY: u64 = u64::MAX - 1;
/// Answer of a `count` that cannot tell at the moment, or of a `scan` that can do nothing at the
/// moment.
pub const STOP: u64 = u64::MAX;
/// Answer of a `scan` that has examined its objects, and frees no more in this visit.
pub const DONE: u64 = u64::MAX - 2;

/// Id of a shrinker: an index and a generation, so an id that outlived its shrinker names nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[repr(transparent)]
pub struct ShrinkerId(u64);

impl ShrinkerId {
    pub(crate) const fn new(index: u32, generation: u32) -> ShrinkerId {
        ShrinkerId((generation as u64) << 32 | index as u64)
    }

    /// Returns the index. No two shrinkers have the same index at the same time.
    pub const fn index(self) -> u32 {
        self.0 as u32
    }

    pub(crate) const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Returns the id as a number, never 0.
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns the id with these bits. Accepts every number; the id may name no shrinker.
    pub const fn from_bits(bits: u64) -> ShrinkerId {
        ShrinkerId(bits)
    }
}

impl fmt::Debug for ShrinkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index(), self.generation())
    }
}

/// Request to a callback, with fields for its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Asked {
    /// The group of the objects, as a number ([`GroupId::to_bits`]); the root for a shrinker that
    /// knows no groups.
    pub group: u64,
    /// The node of the objects; 0 for a shrinker that knows no nodes.
    pub node: u32,
    /// Answer: not 0 if a scan that freed nothing cannot say whether it examined objects. 0 by
    /// default.
    pub unsure: u32,
    /// Number of objects to scan; 0 for a count.
    pub to_scan: u64,
    /// Answer: number of scanned objects, `to_scan` by default. After an answer of 0 the visit does
    /// not call the scan again.
    pub scanned: u64,
    /// Answer: number of freed bytes, 0 by default.
    pub freed_bytes: u64,
    /// Bytes that the pass still needs; `u64::MAX` if it takes all objects.
    pub need: u64,
    /// Time at which the pass ends, in nanoseconds of the monotonic clock; `u64::MAX` for no end.
    pub deadline: u64,
    /// How hard the pass presses: from [`FIRST_PRIORITY`](crate::FIRST_PRIORITY) down to 0.
    pub priority: u32,
    /// Reserved; 0.
    pub reserved: u32,
}

impl Asked {
    /// Returns a request for a group's objects on a node, in a pass that takes all of them and has
    /// no deadline.
    pub const fn of(group: GroupId, node: u32) -> Asked {
        Asked {
            group: group.to_bits(),
            node,
            unsure: 0,
            to_scan: 0,
            scanned: 0,
            freed_bytes: 0,
            need: u64::MAX,
            deadline: u64::MAX,
            priority: 0,
            reserved: 0,
        }
    }

    /// Returns the group.
    pub fn group(&self) -> GroupId {
        GroupId::from_bits(self.group)
    }
}

/// Callback that returns the approximate number of objects, without waiting. Special answers are 0
/// (none can be freed now), [`EMPTY`] (none until a mark) and [`STOP`] (busy).
pub type CountFn = unsafe extern "C" fn(data: *mut c_void, asked: *const Asked) -> u64;
/// Callback that scans `to_scan` objects and frees those not in use. It returns the number of freed
/// objects, [`STOP`], [`EMPTY`] or [`DONE`].
pub type ScanFn = unsafe extern "C" fn(data: *mut c_void, asked: *mut Asked) -> u64;
/// Callback that is called once, after the last call of `count` and `scan` has ended. The thread
/// that unregisters the shrinker calls it, or the thread that puts the last reference.
pub type GoneFn = unsafe extern "C" fn(data: *mut c_void);

/// Description of a shrinker to be registered.
#[derive(Clone, Copy, Debug)]
pub struct Spec<'a> {
    /// Name: 1 to 56 bytes, printable, without `/`.
    pub name: &'a str,
    /// Counts objects.
    pub count: CountFn,
    /// Frees objects.
    pub scan: ScanFn,
    /// Argument of the callbacks.
    pub data: *mut c_void,
    /// Callback for the time when no thread uses `data` any more.
    pub gone: Option<GoneFn>,
    /// Cost of recreating one object, relative to [`DEFAULT_SEEKS`](crate::DEFAULT_SEEKS); 0 if
    /// that costs nothing.
    pub seeks: u32,
    /// Objects for each scan call; 0: [`DEFAULT_BATCH`](crate::DEFAULT_BATCH).
    pub batch: u64,
    /// Whether it knows the nodes of its objects. If not, a visit on any node asks it for node 0.
    pub by_node: bool,
    /// Whether it knows the groups of its objects, and marks groups that have some. If not, visits
    /// of the root ask it for all objects.
    pub by_group: bool,
    /// Whether its callbacks, `gone` included, may run in a thread that charges. They must then
    /// take no lock that such a thread may hold.
    pub inline: bool,
}

impl Spec<'_> {
    /// Whether it is for a shrinker of the host's own.
    pub(crate) fn is_own(&self) -> bool {
        self.name.starts_with(OWN_PREFIX)
    }
}

const BY_NODE: u32 = 1;
const BY_GROUP: u32 = 2;
const INLINE: u32 = 4;
/// It is the host's own.
const OWN: u32 = 8;

/// Prefix of names, reserved for the host's own shrinkers.
const OWN_PREFIX: &str = "neap:";

/// Number of kinds.
pub(crate) const KINDS: usize = 4;

/// Returns the number of a kind, by which [`Shrinker::is_for`] decides. An index keeps its kind, so
/// all later shrinkers of the index have it.
pub(crate) fn kind(inline: bool, own: bool) -> usize {
    usize::from(inline) + 2 * usize::from(own)
}

/// Counts of a shrinker, in words behind those of its references.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub(crate) enum Total {
    /// Calls of callbacks, less one for each reference taken. So a visit with a single call adds
    /// nothing.
    Calls = PerCpuWords::FIRST,
    Scanned,
    Freed,
    Nanoseconds,
    /// Number of words.
    Words,
}

/// A value on its own cache lines. Memory of [`Host::memory`](crate::Host::memory) is aligned to
/// these.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Lines<T>(pub(crate) T);

/// A shrinker, in memory that is never freed before the registry.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Shrinker {
    /// Visitors read this field and the fields down to `data`. With sequences, no visitor writes
    /// them.
    pub(crate) life: Life<PerCpuWords>,
    generation: AtomicU32,
    flags: AtomicU32,
    /// The group that it belongs to; 0 if it belongs to none or to several.
    of: AtomicU64,
    count: AtomicPtr<()>,
    data: AtomicPtr<c_void>,
    // The fields above take two cache lines. A visit that only counts reads no others.
    scan: AtomicPtr<()>,
    gone: AtomicPtr<()>,
    batch: AtomicU64,
    seeks: AtomicU32,
    /// Time that one callback may take, in nanoseconds; 0: the default.
    budget: AtomicU64,
    /// The next free index of the kind, plus one. Protected by the registry's mutex.
    pub(crate) next: AtomicU32,
    name: SharedName,
    /// Counts by CPUs without words. The first one is the number of references that these CPUs
    /// took.
    elsewhere: Lines<[AtomicU64; Total::Words as usize]>,
}

const _: () = assert!(core::mem::offset_of!(Shrinker, scan) <= 128);

impl Shrinker {
    pub(crate) fn new(words: PerCpuWords) -> Shrinker {
        let null = || AtomicPtr::new(core::ptr::null_mut());
        Shrinker {
            life: Life::new(words),
            generation: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            of: AtomicU64::new(0),
            count: null(),
            data: AtomicPtr::new(core::ptr::null_mut()),
            scan: null(),
            gone: null(),
            batch: AtomicU64::new(0),
            seeks: AtomicU32::new(0),
            budget: AtomicU64::new(0),
            next: AtomicU32::new(0),
            name: SharedName::default(),
            elsewhere: Lines([const { AtomicU64::new(0) }; Total::Words as usize]),
        }
    }

    /// Begins another life of a free index, of the same kind. Returns its generation. The caller
    /// holds the registry's mutex.
    pub(crate) fn begin(&self, spec: &Spec<'_>) -> u32 {
        // Pairs with the fence in `Shrinkers::read`: a reader of any write below sees that the life
        // before is over.
        fence(Ordering::Release);
        self.life.words().clear_all(Total::Words as usize);
        self.elsewhere.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.name.set(spec.name);
        self.of.store(0, Ordering::Relaxed);
        for (place, function) in [(&self.count, spec.count as *mut ()), (&self.scan, spec.scan as *mut ())] {
            place.store(function, Ordering::Relaxed);
        }
        self.gone.store(spec.gone.map_or(core::ptr::null_mut(), |gone| gone as *mut ()), Ordering::Relaxed);
        self.data.store(spec.data, Ordering::Relaxed);
        self.batch.store(spec.batch, Ordering::Relaxed);
        self.seeks.store(spec.seeks, Ordering::Relaxed);
        self.budget.store(0, Ordering::Relaxed);
        let flag = |is, flag| if is { flag } else { 0 };
        let flags = flag(spec.by_node, BY_NODE)
            | flag(spec.by_group, BY_GROUP)
            | flag(spec.inline, INLINE)
            | flag(spec.is_own(), OWN);
        self.flags.store(flags, Ordering::Relaxed);
        // No id is 0.
        let generation = self.generation.load(Ordering::Relaxed).wrapping_add(1).max(1);
        self.generation.store(generation, Ordering::Relaxed);
        self.life.prepare();
        generation
    }

    pub(crate) fn is(&self, id: ShrinkerId) -> bool {
        // The state is read first: a thread that sees the state of a later life sees its
        // generation.
        self.life.state() != FREE && self.generation.load(Ordering::Relaxed) == id.generation()
    }

    /// Returns the id of the current life.
    pub(crate) fn id(&self, index: u32) -> ShrinkerId {
        ShrinkerId::new(index, self.generation.load(Ordering::Relaxed))
    }

    /// Assigns a prepared shrinker to a group.
    pub(crate) fn set_of(&self, group: GroupId) {
        self.of.store(group.to_bits(), Ordering::Relaxed);
    }

    /// Sets the time that one of its callbacks may take, in nanoseconds.
    pub(crate) fn set_budget(&self, nanoseconds: u64) {
        self.budget.store(nanoseconds, Ordering::Relaxed);
    }

    /// Returns the time that one of its callbacks may take, in nanoseconds; 0: the default.
    pub(crate) fn budget(&self) -> u64 {
        self.budget.load(Ordering::Relaxed)
    }

    /// Returns the group that it belongs to, if it belongs to one.
    pub(crate) fn of(&self) -> Option<GroupId> {
        Some(self.of.load(Ordering::Relaxed)).filter(|of| *of != 0).map(GroupId::from_bits)
    }

    fn has(&self, flag: u32) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }

    pub(crate) fn by_node(&self) -> bool {
        self.has(BY_NODE)
    }

    pub(crate) fn by_group(&self) -> bool {
        self.has(BY_GROUP)
    }

    pub(crate) fn inline(&self) -> bool {
        self.has(INLINE)
    }

    pub(crate) fn own(&self) -> bool {
        self.has(OWN)
    }

    pub(crate) fn kind(&self) -> usize {
        kind(self.inline(), self.own())
    }

    /// Returns whether a pass may call it. The answer also holds for any later shrinker of the
    /// index.
    pub(crate) fn is_for(&self, filter: ShrinkerFilter) -> bool {
        (filter < ShrinkerFilter::Inline || self.inline()) && (filter < ShrinkerFilter::Own || self.own())
    }

    pub(crate) fn seeks(&self) -> u32 {
        self.seeks.load(Ordering::Relaxed)
    }

    pub(crate) fn batch(&self) -> u64 {
        self.batch.load(Ordering::Relaxed)
    }

    pub(crate) fn name(&self) -> Name {
        self.name.get()
    }

    /// Calls `count`. The caller has a reference, and holds no lock.
    pub(crate) fn call_count(&self, asked: &Asked) -> u64 {
        let data = self.data.load(Ordering::Relaxed);
        // SAFETY: `begin` stored a `CountFn` here before the first reference could be taken, and
        // the caller's reference keeps this life. By the contract of `Shrinkers::prepare` the
        // function may be called with `data` until the life is over.
        unsafe {
            let count = core::mem::transmute::<*mut (), CountFn>(self.count.load(Ordering::Relaxed));
            count(data, asked)
        }
    }

    /// Calls `scan`. The caller has a reference, and holds no lock.
    pub(crate) fn call_scan(&self, asked: &mut Asked) -> u64 {
        let data = self.data.load(Ordering::Relaxed);
        // SAFETY: `begin` stored a `ScanFn` here before the first reference could be taken, and the
        // caller's reference keeps this life. By the contract of `Shrinkers::prepare` the function
        // may be called with `data` until the life is over.
        unsafe {
            let scan = core::mem::transmute::<*mut (), ScanFn>(self.scan.load(Ordering::Relaxed));
            scan(data, asked)
        }
    }

    /// Calls `gone`, after the last reference was put and before the index is freed.
    pub(crate) fn call_gone(&self) {
        let (gone, data) = (self.gone.load(Ordering::Relaxed), self.data.load(Ordering::Relaxed));
        if !gone.is_null() {
            // SAFETY: `begin` stored a `GoneFn` here, and the index is not free yet, so the words
            // are of this life. By the contract of `Shrinkers::prepare` it may be called with
            // `data`; `Shrinkers::finish` does so once for each life.
            unsafe { core::mem::transmute::<*mut (), GoneFn>(gone)(data) }
        }
    }

    /// Takes a reference, if it is live.
    #[inline]
    pub(crate) fn try_get(&self) -> bool {
        self.life.try_get(|| _ = self.elsewhere.0[0].fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the number of references that were taken in a cache line that all CPUs write.
    pub(crate) fn taken_elsewhere(&self) -> u64 {
        self.elsewhere.0[0].load(Ordering::Relaxed)
    }

    /// Adds to a count.
    #[inline]
    pub(crate) fn add(&self, total: Total, number: u64) {
        if number != 0 && !self.life.words().add(total as usize, number as i64) {
            self.elsewhere.0[total as usize].fetch_add(number, Ordering::Relaxed);
        }
    }

    /// Returns a count.
    pub(crate) fn total(&self, total: Total) -> u64 {
        let elsewhere = self.elsewhere.0[total as usize].load(Ordering::Relaxed);
        (self.life.words().sum(total as usize) as u64).wrapping_add(elsewhere)
    }

    /// Returns the number of calls so far. A call that runs now may be included.
    pub(crate) fn calls(&self) -> u64 {
        let references = self.life.words().taken().wrapping_add(self.taken_elsewhere());
        references.wrapping_add(self.total(Total::Calls))
    }
}
