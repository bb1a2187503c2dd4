//! One shrinker: its callbacks, its reference count, and what it has done.
//!
//! Sits in a table that never moves, so an index that was once a shrinker's can always be looked at, without a lock and without a grace period. What
//! is said of a shrinker is written while nobody has a reference, and read by those who have one. A shrinker is *prepared* (its id is known, it
//! is not called), then *live*, then *ending* (no new calls), then the index is free; the next shrinker of the index has another generation.
//! What it does is counted in words of the CPU's, so that no two visitors write the same line.

use super::life::{FREE, Life};
use super::work::Whom;
use core::ffi::c_void;
use core::fmt;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use neap_groups::{GroupId, Name, SharedName};
use neap_percpu::LentWords;

/// What `count` answers where there is nothing, and nothing will be until a mark says so.
pub const EMPTY: u64 = u64::MAX - 1;
/// The answer of a `count` that cannot say, or a `scan` that can do nothing, at the moment.
pub const STOP: u64 = u64::MAX;
/// The answer of a `scan` that has looked at its objects, and gives no more in this visit.
pub const DONE: u64 = u64::MAX - 2;

/// A shrinker, for as long as it is there: an index and a generation, so an id that outlived its shrinker names nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct ShrinkerId(u64);

impl ShrinkerId {
    pub(crate) const fn new(index: u32, generation: u32) -> ShrinkerId {
        ShrinkerId((generation as u64) << 32 | index as u64)
    }

    /// Which of those that are there at a time.
    pub const fn index(self) -> u32 {
        self.0 as u32
    }

    pub(crate) const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The id as a number, never 0.
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// The id that [`ShrinkerId::to_bits`] is of; any number is some id, which may name nothing.
    pub const fn from_bits(bits: u64) -> ShrinkerId {
        ShrinkerId(bits)
    }
}

impl fmt::Debug for ShrinkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index(), self.generation())
    }
}

/// What a callback is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Asked {
    /// The group whose objects are meant, as a number ([`GroupId::to_bits`]); the root's for a shrinker that knows no groups.
    pub group: u64,
    /// The node whose objects are meant; 0 for a shrinker that knows no nodes.
    pub node: u32,
    /// Not 0 where a scan that frees nothing cannot say whether it has looked at anything. 0 unless
    /// it says otherwise.
    pub unsure: u32,
    /// How many objects a scan is to look at; 0 for a count.
    pub to_scan: u64,
    /// How many it has looked at: `to_scan`, unless it says otherwise. A scan that has looked at none is not called again for now.
    pub scanned: u64,
    /// How many bytes it has freed, if it says so.
    pub freed_bytes: u64,
    /// Bytes that the pass still needs; `u64::MAX` where it takes all that there are.
    pub need: u64,
    /// When the pass is over, in nanoseconds of the monotonic clock; `u64::MAX`: it has no end.
    pub deadline: u64,
    /// How hard the pass presses: from [`FIRST_PRIORITY`](crate::FIRST_PRIORITY) down to 0.
    pub priority: u32,
    /// 0.
    pub reserved: u32,
}

impl Asked {
    /// A question about a group's objects on a node, for a pass without an end that takes all.
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

    /// The group.
    pub fn group(&self) -> GroupId {
        GroupId::from_bits(self.group)
    }
}

/// Says about how many objects there are, in no time: 0 (none to be had now), [`EMPTY`] (none, until
/// a mark) or [`STOP`] (busy).
pub type CountFn = unsafe extern "C" fn(data: *mut c_void, asked: *const Asked) -> u64;
/// Looks at `to_scan` objects and frees those that nobody needs; answers how many it freed, [`STOP`],
/// [`EMPTY`] or [`DONE`].
pub type ScanFn = unsafe extern "C" fn(data: *mut c_void, asked: *mut Asked) -> u64;
/// Is called once, after the last call of the others has ended for good: by who unregisters, or by the thread that made that call.
pub type GoneFn = unsafe extern "C" fn(data: *mut c_void);

/// What is said of a shrinker when it is registered.
#[derive(Clone, Copy, Debug)]
pub struct Spec<'a> {
    /// 1 to 56 bytes, nothing that does not print, no `/`.
    pub name: &'a str,
    /// Counts.
    pub count: CountFn,
    /// Frees.
    pub scan: ScanFn,
    /// What these get.
    pub data: *mut c_void,
    /// Is told when `data` can go.
    pub gone: Option<GoneFn>,
    /// What an object costs to make again; [`DEFAULT_SEEKS`](crate::DEFAULT_SEEKS); 0: nothing.
    pub seeks: u32,
    /// Objects of a scan; 0: [`DEFAULT_BATCH`](crate::DEFAULT_BATCH).
    pub batch: u64,
    /// It knows nodes: otherwise any node's pass calls it, for node 0.
    pub by_node: bool,
    /// It knows groups, and marks those that have something: otherwise it is called for the root, always.
    pub by_group: bool,
    /// Its callbacks, `gone` among them, take no lock that a thread which charges may hold: they may run in one.
    pub inline: bool,
}

const BY_NODE: u32 = 1;
const BY_GROUP: u32 = 2;
const INLINE: u32 = 4;
/// The host's own.
const OWN: u32 = 8;

/// How many kinds there are.
pub(crate) const KINDS: usize = 4;

/// Which kind one is of: what [`Shrinker::is_for`] asks. An index stays with one, so who has seen an index's knows it of whichever has that later.
pub(crate) fn kind(inline: bool, own: bool) -> usize {
    usize::from(inline) + 2 * usize::from(own)
}

/// What is counted of a shrinker, in words behind the references'.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub(crate) enum Total {
    /// Callbacks that were called, less one for each reference that was taken: nothing is added for a visit that only counts.
    Calls = LentWords::FIRST,
    Scanned,
    Freed,
    Nanoseconds,
    /// How many words there are.
    Words,
}

/// Something on cache lines of its own: what a host's memory is aligned to.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Lines<T>(pub(crate) T);

/// An entry of the table.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Shrinker {
    /// Read by every visitor like what follows, and written by none but where there are no sequences.
    pub(crate) life: Life<LentWords>,
    generation: AtomicU32,
    flags: AtomicU32,
    /// The group that it belongs to; 0: none, or several.
    of: AtomicU64,
    count: AtomicPtr<()>,
    data: AtomicPtr<c_void>,
    // Up to here, two lines: what a visit reads that only counts.
    scan: AtomicPtr<()>,
    gone: AtomicPtr<()>,
    batch: AtomicU64,
    seeks: AtomicU32,
    /// How long one callback may take, in nanoseconds; 0: as long as any.
    budget: AtomicU64,
    /// In the list of free ones, plus one. Under the registry's mutex.
    pub(crate) next: AtomicU32,
    name: SharedName,
    /// What CPUs without words have counted; first, how many references they took.
    elsewhere: Lines<[AtomicU64; Total::Words as usize]>,
}

const _: () = assert!(core::mem::offset_of!(Shrinker, scan) <= 128);

impl Shrinker {
    pub(crate) fn new(words: LentWords) -> Shrinker {
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

    /// Begins another life, of the same kind. Under the registry's mutex, of one that is free.
    pub(crate) fn begin(&self, spec: &Spec<'_>, own: bool) -> u32 {
        // Pairs with the fence in `Shrinkers::read`: who reads any of what follows sees that the life before is over.
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
        let flags =
            flag(spec.by_node, BY_NODE) | flag(spec.by_group, BY_GROUP) | flag(spec.inline, INLINE) | flag(own, OWN);
        self.flags.store(flags, Ordering::Relaxed);
        // No id is 0.
        let generation = self.generation.load(Ordering::Relaxed).wrapping_add(1).max(1);
        self.generation.store(generation, Ordering::Relaxed);
        self.life.prepare();
        generation
    }

    pub(crate) fn is(&self, id: ShrinkerId) -> bool {
        // The state first: who sees that of a later life sees its generation.
        self.life.state() != FREE && self.generation.load(Ordering::Relaxed) == id.generation()
    }

    /// Whose it is at the moment.
    pub(crate) fn id(&self, index: u32) -> ShrinkerId {
        ShrinkerId::new(index, self.generation.load(Ordering::Relaxed))
    }

    /// Lets a prepared one belong to a group.
    pub(crate) fn set_of(&self, group: GroupId) {
        self.of.store(group.to_bits(), Ordering::Relaxed);
    }

    /// Says how long one of its callbacks may take, in nanoseconds.
    pub(crate) fn set_budget(&self, nanoseconds: u64) {
        self.budget.store(nanoseconds, Ordering::Relaxed);
    }

    /// How long one of its callbacks may take, in nanoseconds; 0: as long as any.
    pub(crate) fn budget(&self) -> u64 {
        self.budget.load(Ordering::Relaxed)
    }

    /// The group that it belongs to, if it does to one.
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

    /// Whether it is one of those that a pass may call. So is any later one of the index then.
    pub(crate) fn is_for(&self, whom: Whom) -> bool {
        (whom < Whom::Inline || self.inline()) && (whom < Whom::Own || self.own())
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

    /// Calls `count`, by one who has a reference. No lock is held.
    pub(crate) fn call_count(&self, asked: &Asked) -> u64 {
        let data = self.data.load(Ordering::Relaxed);
        // SAFETY: whoever registered it promised that it can be called until it is gone, which the reference prevents; the pointer was
        // made of such a function before the first reference could be taken.
        unsafe {
            let count = core::mem::transmute::<*mut (), CountFn>(self.count.load(Ordering::Relaxed));
            count(data, asked)
        }
    }

    /// Calls `scan`, likewise.
    pub(crate) fn call_scan(&self, asked: &mut Asked) -> u64 {
        let data = self.data.load(Ordering::Relaxed);
        // SAFETY: as for `call_count`.
        unsafe {
            let scan = core::mem::transmute::<*mut (), ScanFn>(self.scan.load(Ordering::Relaxed));
            scan(data, asked)
        }
    }

    /// Tells that it is gone, by the one who has seen the last reference go.
    pub(crate) fn call_gone(&self) {
        let (gone, data) = (self.gone.load(Ordering::Relaxed), self.data.load(Ordering::Relaxed));
        if !gone.is_null() {
            // SAFETY: as for `call_count`; it is called once for each life.
            unsafe { core::mem::transmute::<*mut (), GoneFn>(gone)(data) }
        }
    }

    /// Takes a reference, if it is live.
    #[inline]
    pub(crate) fn try_get(&self) -> bool {
        self.life.try_get(|| _ = self.elsewhere.0[0].fetch_add(1, Ordering::Relaxed))
    }

    /// References that were taken in a line that all CPUs write.
    pub(crate) fn taken_elsewhere(&self) -> u64 {
        self.elsewhere.0[0].load(Ordering::Relaxed)
    }

    /// Adds to what is counted.
    #[inline]
    pub(crate) fn add(&self, total: Total, number: u64) {
        if number != 0 && !self.life.words().add(total as usize, number as i64) {
            self.elsewhere.0[total as usize].fetch_add(number, Ordering::Relaxed);
        }
    }

    /// What was counted so far.
    pub(crate) fn total(&self, total: Total) -> u64 {
        let elsewhere = self.elsewhere.0[total as usize].load(Ordering::Relaxed);
        (self.life.words().sum(total as usize) as u64).wrapping_add(elsewhere)
    }

    /// Callbacks that were called so far; one that runs now may count already.
    pub(crate) fn calls(&self) -> u64 {
        let references = self.life.words().taken().wrapping_add(self.taken_elsewhere());
        references.wrapping_add(self.total(Total::Calls))
    }
}
