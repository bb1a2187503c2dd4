//! A group: its limits, what it is charged for, and its links.
//!
//! Sits in a table of slots, between the tree, which links groups under its mutex, and charges, which only read the parent and
//! change the counters. What is charged to a group is charged to all above it. A counter is raised by compare-and-exchange, so that it
//! never exceeds `max`, not for a moment. Takes no lock.

use crate::charge::HOLDERS;
use crate::id::GroupId;
use crate::table::Entry;
use core::fmt;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;

/// No slot.
pub(crate) const NONE: u32 = u32::MAX;
/// The root's slot.
pub(crate) const ROOT: u32 = 0;
/// Bytes of a name.
pub const LONGEST_NAME: usize = 56;
/// Groups above each other, the root counted: what a charge goes up at most.
pub const DEEPEST: u32 = 32;
/// A limit that is none.
pub const UNLIMITED: u64 = u64::MAX;
/// More than this nobody can be charged for: counts by kind are signed, and an id's entry counts who refers to it besides.
const COUNTABLE: u64 = i64::MAX as u64;

/// What bounds a group's memory, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Bound {
    /// Never more than this: reclaim, then refuse. [`UNLIMITED`] for none.
    Max = 0,
    /// From here on reclaim, and slow down who charges. [`UNLIMITED`] for none.
    High = 1,
    /// Below this, memory is taken only if there is none elsewhere; 0 for no protection.
    Low = 2,
    /// Below this, no memory is taken; 0 for no protection.
    Min = 3,
}

impl Bound {
    /// All of them, in the order of their numbers.
    pub const ALL: [Bound; 4] = [Bound::Max, Bound::High, Bound::Low, Bound::Min];

    /// Those that protect what a group has.
    pub(crate) const CLAIMS: [Bound; 2] = [Bound::Low, Bound::Min];

    /// As it is called in reports.
    pub const fn name(self) -> &'static str {
        ["max", "high", "low", "min"][self as usize]
    }

    /// What a new group has.
    pub const fn default(self) -> u64 {
        [UNLIMITED, UNLIMITED, 0, 0][self as usize]
    }
}

/// What can happen to a group, as counted and told. Those of a group are also those of all above it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Event {
    /// Memory was taken below its `low`.
    Low = 0,
    /// It was above its `high`, and who charged was slowed down.
    High = 1,
    /// It was at its `max`, and memory was looked for.
    Max = 2,
    /// A charge was refused.
    Refused = 3,
    /// It went above its `max` for somebody who must not fail.
    Overcharged = 4,
    /// A limit was changed.
    LimitChanged = 5,
    /// Memory was looked for, and there was enough of it.
    PressureLow = 6,
    /// Of what was looked at, less than two fifths was given.
    PressureMedium = 7,
    /// Nearly nothing was given.
    PressureCritical = 8,
}

impl Event {
    /// All of them, in the order of their numbers.
    pub const ALL: [Event; 9] = [
        Event::Low,
        Event::High,
        Event::Max,
        Event::Refused,
        Event::Overcharged,
        Event::LimitChanged,
        Event::PressureLow,
        Event::PressureMedium,
        Event::PressureCritical,
    ];

    /// As it is called in reports.
    pub const fn name(self) -> &'static str {
        [
            "low",
            "high",
            "max",
            "refused",
            "overcharged",
            "limit_changed",
            "pressure_low",
            "pressure_medium",
            "pressure_critical",
        ][self as usize]
    }
}

/// A slot of the table.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Group {
    pub(crate) counters: CachePadded<Counters>,
    /// [`GroupId`]; 0 in a slot that nobody has.
    pub(crate) id: AtomicU64,
    bounds: [AtomicU64; Bound::ALL.len()],
    pub(crate) parent: AtomicU32,
    pub(crate) depth: AtomicU32,
    // Written under the tree's mutex, down to the name, and but for the bucket's read without it.
    pub(crate) first_child: AtomicU32,
    /// The next child of the same parent, or the next slot of a list of those that nobody has.
    pub(crate) next: AtomicU32,
    pub(crate) previous: AtomicU32,
    /// The next slot with the same bucket, plus one, or the next slot of a list of deleted groups.
    pub(crate) bucket_next: AtomicU32,
    pub(crate) children: AtomicU32,
    /// Under the waiters' mutex: the oldest that waits for room here, plus one.
    pub(crate) first_waiter: AtomicU32,
    /// Under the subscriptions' mutex: the first of those who subscribed, plus one.
    pub(crate) first_subscriber: AtomicU32,
    /// The events that they want to hear of.
    pub(crate) heard: AtomicU32,
    /// The slot, plus one, of the group right below that the next refusal looks at first.
    pub(crate) looked_at: AtomicU32,
    /// The thread that it was made for, as whoever did that says; 0 for none.
    pub(crate) made_for: AtomicU32,
    /// Bytes charged to it alone that nobody uses, when somebody last added them up.
    pub(crate) unused: AtomicU64,
    /// Not 0 from the moment on that what hangs on it goes to its parent.
    pub(crate) is_leaving: AtomicU32,
    name: SharedName,
    /// [`Owner`](neap_percpu::Owner) of the per-CPU data, and the [`Handle`](neap_percpu::Handle) of its counts.
    pub(crate) per_cpu: AtomicU64,
    pub(crate) counts: AtomicU64,
    pub(crate) events: [AtomicU64; Event::ALL.len()],
}

/// What charges write, with the group's request for memory, and behind it, where its cache line
/// would have a neighbour without a use, what passes of reclaim add up.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Bytes charged, those of the groups below included.
    pub(crate) usage: AtomicU64,
    pub(crate) peak: AtomicU64,
    /// The fewest bytes that somebody waits for here; 0: nobody waits. Changed under the waiters' mutex.
    pub(crate) wanted: AtomicU64,
    // Under the waiters' mutex, down to `asks_once`, and rarely changed; see `asking.rs`.
    /// The next slot in the ring of groups that ask for memory, plus one; 0 for one that is not
    /// there.
    pub(crate) next_asking: AtomicU32,
    /// The server that runs a pass for it; 0: none.
    pub(crate) server: AtomicU32,
    /// When it is served next, and for how many microseconds it rests after its last pass.
    pub(crate) ask_at: AtomicU64,
    pub(crate) rest: AtomicU32,
    /// What a charge needs that does not wait for it.
    pub(crate) asks_once: AtomicU64,
    /// Slots, plus one, of the groups right below that held most when a refusal named them.
    pub(crate) holders: [AtomicU32; HOLDERS],
    claims: ClaimsBelow,
}

/// By [`Bound::CLAIMS`].
#[derive(Debug, Default)]
#[repr(align(64))]
struct ClaimsBelow([Claims; Bound::CLAIMS.len()]);

/// What the groups right below one claim of it: their `low`, or their `min`. How many do is written
/// under the tree's mutex.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// How many claim anything.
    pub(crate) claimants: AtomicU32,
    /// For how many looks more the sum counts, and in which pass.
    pub(crate) looks: AtomicU32,
    pub(crate) pass: AtomicU64,
    /// What all of them together used of their claims, when that was added up.
    pub(crate) sum: AtomicU64,
}

/// With tables that have just grown, and the entry of its id, less than 1 KiB for each.
const _: () = assert!(size_of::<Group>() <= 384);

// SAFETY: atomic numbers, of which 0 is one.
unsafe impl Entry for Group {}

impl Group {
    pub(crate) fn id(&self) -> GroupId {
        GroupId::from_bits(self.id.load(Ordering::Acquire)) // Pairs with the Release in `Tree::add`.
    }

    pub(crate) fn usage(&self) -> u64 {
        self.counters.usage.load(Ordering::Relaxed)
    }

    pub(crate) fn bound(&self, bound: Bound) -> u64 {
        self.bounds[bound as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn set_bound(&self, bound: Bound, bytes: u64) {
        self.bounds[bound as usize].store(bytes, Ordering::SeqCst); // As in `is_waited_for`.
    }

    /// What those right below claim.
    pub(crate) fn claims(&self, claim: Bound) -> &Claims {
        &self.counters.claims.0[usize::from(claim == Bound::Min)]
    }

    /// What it uses of what it claims.
    pub(crate) fn claimed(&self, claim: Bound) -> u64 {
        self.bound(claim).min(self.usage())
    }

    /// Raises what is charged, up to `most`; answers whether.
    pub(crate) fn raise(&self, bytes: u64, most: u64) -> bool {
        let room = |usage: u64| usage.checked_add(bytes).filter(|&sum| sum <= most.min(COUNTABLE));
        // SeqCst: as in `is_waited_for`. What memory stands behind the number is ordered by who hands it on.
        let Ok(before) = self.counters.usage.fetch_update(Ordering::SeqCst, Ordering::SeqCst, room) else {
            return false;
        };
        if before + bytes > self.counters.peak.load(Ordering::Relaxed) {
            self.counters.peak.fetch_max(before + bytes, Ordering::Relaxed);
        }
        true
    }

    /// Takes back what was raised; answers whether somebody waits for that.
    #[must_use]
    pub(crate) fn lower(&self, bytes: u64) -> bool {
        self.counters.usage.fetch_sub(bytes, Ordering::SeqCst); // As in `is_waited_for`.
        self.is_waited_for()
    }

    /// Whether there is room that somebody waits for.
    pub(crate) fn is_waited_for(&self) -> bool {
        // SeqCst, here, below, and where the three are changed: either who makes room sees who waits, or who waits sees the room:
        // 1. A lowers `usage` or raises a bound, B stores `wanted`. 2. A reads `wanted`, B reads `usage` and the bound.
        let wanted = self.counters.wanted.load(Ordering::SeqCst);
        wanted != 0 && self.has_room(wanted)
    }

    /// Whether so much more can be charged at this moment.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let max = self.bounds[Bound::Max as usize].load(Ordering::SeqCst); // As in `is_waited_for`, and so is the next.
        self.counters.usage.load(Ordering::SeqCst).checked_add(bytes).is_some_and(|sum| sum <= max.min(COUNTABLE))
    }

    /// Says what is waited for from now on, 0 for nothing; answers whether there is room for that already.
    pub(crate) fn want(&self, bytes: u64) -> bool {
        self.counters.wanted.store(bytes, Ordering::SeqCst); // As in `is_waited_for`.
        self.is_waited_for()
    }

    /// Whether anybody waits for room here.
    pub(crate) fn has_waiters(&self) -> bool {
        self.counters.wanted.load(Ordering::Relaxed) != 0
    }

    /// For how many nanoseconds it rests after a pass.
    pub(crate) fn rest(&self) -> u64 {
        u64::from(self.counters.rest.load(Ordering::Relaxed)) * 1000
    }

    pub(crate) fn set_rest(&self, nanoseconds: u64) {
        let microseconds = u32::try_from(nanoseconds / 1000).unwrap_or(u32::MAX);
        self.counters.rest.store(microseconds, Ordering::Relaxed);
    }

    pub(crate) fn set_name(&self, name: &str) {
        self.name.set(name);
    }

    pub(crate) fn name(&self) -> Name {
        self.name.get()
    }
}

/// A name that others may read while it is set: then they read a mixture, but a name. Zeroes are the empty one.
#[derive(Debug, Default)]
pub struct SharedName {
    length: AtomicU32,
    words: [AtomicU64; LONGEST_NAME / 8],
}

impl SharedName {
    /// Sets it; what is longer than [`LONGEST_NAME`] is cut off.
    pub fn set(&self, name: &str) {
        self.length.store(name.len().min(LONGEST_NAME) as u32, Ordering::Relaxed);
        for (word, bytes) in self.words.iter().zip(name.as_bytes().chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
    }

    /// What it is.
    pub fn get(&self) -> Name {
        let mut bytes = [0; LONGEST_NAME];
        for (word, bytes) in self.words.iter().zip(bytes.chunks_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        Name { bytes, length: (self.length.load(Ordering::Relaxed) as usize).min(LONGEST_NAME) }
    }
}

/// A name: of a group below its parent, or of a shrinker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; LONGEST_NAME],
    length: usize,
}

impl Name {
    /// As text.
    pub fn as_str(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.length]).unwrap_or("?")
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether a name is one: 1 to [`LONGEST_NAME`] bytes, no `/`, nothing that does not print.
pub fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= LONGEST_NAME
        && name != "."
        && name != ".."
        && name.chars().all(|c| c != '/' && !c.is_control())
}
