//! A group: its bounds, its charged bytes, and its links.
//!
//! Groups lie in a table of slots. The tree changes their links under its mutex. A charge only
//! reads the parent's slot, and changes counters. Bytes charged to a group are charged to all its
//! ancestors. The usage is raised by compare-and-exchange, so a charge within `max` never lets it
//! exceed `max`, not even for a moment. This module takes no lock.

use crate::id::GroupId;
use crate::table::Entry;
use core::fmt;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;
use neap_base::listed_enum;

/// No slot.
pub(crate) const NONE: u32 = u32::MAX;
/// The root's slot.
pub(crate) const ROOT: u32 = 0;
/// Number of groups that a refusal names.
pub(crate) const HOLDERS: usize = 3;
/// Maximum bytes of a name.
pub const LONGEST_NAME: usize = 56;
/// Maximum depth of the tree, the root included. A charge goes up at most this many levels.
pub const DEEPEST: u32 = 32;
/// Value of a bound that does not limit.
pub const UNLIMITED: u64 = u64::MAX;
/// Maximum usage of a group in bytes. Two smaller ranges must hold it: the counts by kind are
/// signed, and an id's entry counts its other references in the word that counts bytes.
const COUNTABLE: u64 = i64::MAX as u64;

/// A group and its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupSlot {
    /// The group.
    pub group: GroupId,
    /// Below [`GroupCount::slots`](crate::GroupCount::slots); 0 for the root.
    pub slot: u32,
}

impl GroupSlot {
    /// The root and its slot.
    pub const ROOT: GroupSlot = GroupSlot { group: GroupId::ROOT, slot: ROOT };
}

listed_enum! {
    /// Bounds of a group's memory, in bytes.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u8)]
    pub enum Bound {
        /// Limit: reclaim, then refuse. [`UNLIMITED`] for none.
        Max = "max",
        /// Threshold from which to reclaim and to delay charging threads. [`UNLIMITED`] for none.
        High = "high",
        /// Usage below which reclaim takes memory only if there is none elsewhere; 0 for no
        /// protection.
        Low = "low",
        /// Usage below which reclaim takes no memory; 0 for no protection.
        Min = "min",
    }
}

impl Bound {
    /// The bounds that protect a group's memory.
    pub(crate) const CLAIMS: [Bound; 2] = [Bound::Low, Bound::Min];

    /// Returns the value in a new group.
    pub const fn default(self) -> u64 {
        [UNLIMITED, UNLIMITED, 0, 0][self as usize]
    }
}

listed_enum! {
    /// Events of a group that are counted, and that subscribers are told. An event of a group is
    /// also an event of all its ancestors.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize))]
    #[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
    #[repr(u8)]
    pub enum Event {
        /// Reclaim freed objects of the group while its usage was within its protection by `low`.
        Low = "low",
        /// The group was above its `high` after a charge.
        High = "high",
        /// A charge did not fit below the group's `max`, so the thread flushed caches or the host
        /// reclaimed.
        Max = "max",
        /// A charge was refused.
        Refused = "refused",
        /// The group went above its `max` for a caller that must not fail.
        Overcharged = "overcharged",
        /// A bound was set.
        LimitChanged = "limit_changed",
        /// Reclaim freed more than two fifths of the objects that it scanned.
        PressureLow = "pressure_low",
        /// Reclaim freed at most two fifths of the objects that it scanned.
        PressureMedium = "pressure_medium",
        /// Reclaim freed at most 5 % of the objects that it scanned, or a pass came to one of its
        /// last priorities.
        PressureCritical = "pressure_critical",
        /// Of the root alone: the container's level of pressure or its limit changed, or a listener
        /// was subscribed to this event.
        Container = "container",
    }
}

/// A slot of the table of groups.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Group {
    pub(crate) counters: CachePadded<Counters>,
    /// [`GroupId`]; 0 in a free slot.
    pub(crate) id: AtomicU64,
    pub(crate) bounds: [AtomicU64; Bound::ALL.len()],
    pub(crate) parent: AtomicU32,
    pub(crate) depth: AtomicU32,
    // The links below and the name are written under the tree's mutex. All but `bucket_next` are
    // read without it.
    pub(crate) first_child: AtomicU32,
    /// The next child of the same parent, or the next slot of the list of free slots.
    pub(crate) next: AtomicU32,
    pub(crate) previous: AtomicU32,
    /// The next slot with the same bucket, plus one, or the next slot of a list of deleted groups.
    pub(crate) bucket_next: AtomicU32,
    pub(crate) children: AtomicU32,
    /// The oldest waiter for room here, plus one. Protected by the waiters' mutex.
    pub(crate) first_waiter: AtomicU32,
    /// The first subscription of the group, plus one. Protected by the subscriptions' mutex.
    pub(crate) first_subscriber: AtomicU32,
    /// The events that its subscribers want.
    pub(crate) heard: AtomicU32,
    /// The slot, plus one, of the child that the next refusal visits first.
    pub(crate) looked_at: AtomicU32,
    /// The thread that it was made for ([`Groups::note_thread`](crate::Groups::note_thread)); 0 for
    /// none.
    pub(crate) made_for: AtomicU32,
    /// Unused bytes charged to it alone, at the last
    /// [`Groups::add_up_unused`](crate::Groups::add_up_unused).
    pub(crate) unused: AtomicU64,
    /// Not 0 once the group is being deleted and its items are about to move to its parent.
    pub(crate) is_leaving: AtomicU32,
    pub(crate) name: SharedName,
    /// [`Owner`](neap_percpu::Owner) of the per-CPU data, and the [`Handle`](neap_percpu::Handle)
    /// of its counts.
    pub(crate) per_cpu: AtomicU64,
    pub(crate) counts: AtomicU64,
    // The fields down to `stalled` are used under the waiters' mutex; see `stall.rs`.
    /// Number of stalls of it and its descendants at this moment.
    pub(crate) stalls: AtomicU32,
    /// Time at which the first of these stalls began, and nanoseconds of all stalls that have
    /// ended.
    pub(crate) stalled_since: AtomicU64,
    pub(crate) stalled: AtomicU64,
    /// Events at the group itself, by [`Event`].
    pub(crate) local_events: [AtomicU64; Event::ALL.len()],
    /// Events of its descendants, also of deleted ones, by [`Event`].
    pub(crate) events_below: [AtomicU64; Event::ALL.len()],
}

/// Counters that charges write, and the group's request for memory. Sums of reclaim passes follow
/// on separate cache lines.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Charged bytes, those of the descendants included.
    pub(crate) usage: AtomicU64,
    pub(crate) peak: AtomicU64,
    /// The least number of bytes that lets a waiter here be admitted; 0 without waiters. Changed
    /// under the waiters' mutex.
    pub(crate) wanted: AtomicU64,
    // The fields down to `asks_once` change rarely, under the waiters' mutex; see `requests.rs`.
    /// The next slot in the ring of groups that ask for memory, plus one; 0 for one that is not in
    /// the ring.
    pub(crate) next_asking: AtomicU32,
    /// The server (a thread that reclaims) that runs a pass for it; 0 for none.
    pub(crate) server: AtomicU32,
    /// Time at which a server may take the request, and microseconds of rest after the last pass.
    pub(crate) ask_at: AtomicU64,
    pub(crate) rest: AtomicU32,
    /// Bytes requested by [`Groups::ask_for`](crate::Groups::ask_for), for charges that do not
    /// wait.
    pub(crate) asks_once: AtomicU64,
    /// Slots, plus one, of the children that held most when a refusal named them.
    pub(crate) holders: [AtomicU32; HOLDERS],
    claims: ClaimsBelow,
}

/// Sums by [`Bound::CLAIMS`].
#[derive(Debug, Default)]
#[repr(align(64))]
struct ClaimsBelow([Claims; Bound::CLAIMS.len()]);

/// Sum of the claims of a group's children: of their `low`, or of their `min`. The number of
/// claimants is written under the tree's mutex.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// Number of children with a claim.
    pub(crate) claimants: AtomicU32,
    /// Number of further reads that may use `sum`, and the pass that computed `sum`.
    pub(crate) reads_left: AtomicU32,
    pub(crate) pass: AtomicU64,
    /// Sum over the children of the part of their claim that they use, when it was computed.
    pub(crate) sum: AtomicU64,
}

/// With its share of a table that has just grown, and the entry of its id, a group takes little
/// more than 1 KiB.
const _: () = assert!(size_of::<Group>() <= 512);

// SAFETY: all fields are atomic integers. Zeroed memory is valid for these, and they change only
// atomically.
unsafe impl Entry for Group {}

impl Group {
    pub(crate) fn id(&self) -> GroupId {
        // Pairs with the Release in `Tree::add`.
        GroupId::from_bits(self.id.load(Ordering::Acquire))
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

    /// Counts an event at the group itself, or of a descendant.
    pub(crate) fn count_event(&self, event: Event, is_local: bool) {
        let counts = if is_local { &self.local_events } else { &self.events_below };
        // Relaxed: statistics. `Subscribers::mark` publishes them to the thread that delivers.
        counts[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of events at the group itself.
    pub(crate) fn local_events(&self, event: Event) -> u64 {
        self.local_events[event as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of events at the group and its descendants.
    pub(crate) fn events(&self, event: Event) -> u64 {
        self.local_events(event).wrapping_add(self.events_below[event as usize].load(Ordering::Relaxed))
    }

    /// Returns the claims of its children.
    pub(crate) fn claims(&self, claim: Bound) -> &Claims {
        &self.counters.claims.0[usize::from(claim == Bound::Min)]
    }

    /// Returns the part of its claim that the group uses.
    pub(crate) fn claimed(&self, claim: Bound) -> u64 {
        self.bound(claim).min(self.usage())
    }

    /// Adds charged bytes, up to `most`. Returns false, and adds nothing, if the sum would
    /// exceed `most`.
    pub(crate) fn try_add_usage(&self, bytes: u64, most: u64) -> bool {
        let room = |usage: u64| usage.checked_add(bytes).filter(|&sum| sum <= most.min(COUNTABLE));
        // SeqCst: as in `is_waited_for`. The transfer of the memory that the bytes stand for has
        // its own ordering.
        let Ok(before) = self.counters.usage.try_update(Ordering::SeqCst, Ordering::SeqCst, room) else {
            return false;
        };
        if before + bytes > self.counters.peak.load(Ordering::Relaxed) {
            self.counters.peak.fetch_max(before + bytes, Ordering::Relaxed);
        }
        true
    }

    /// Subtracts uncharged bytes. Returns whether a waiter has room now.
    #[must_use]
    pub(crate) fn sub_usage(&self, bytes: u64) -> bool {
        let before = self.counters.usage.fetch_sub(bytes, Ordering::SeqCst); // As in `is_waited_for`.
        debug_assert!(before >= bytes, "{bytes} bytes are uncharged, and {before} were charged");
        self.is_waited_for()
    }

    /// Returns whether there is room that a waiter needs.
    pub(crate) fn is_waited_for(&self) -> bool {
        // SeqCst, here, below, and where the three values are changed:
        //
        // | A makes room | B waits |
        // |---|---|
        // | 1. lowers `usage` or raises a bound | 1. stores `wanted` |
        // | 2. reads `wanted` | 2. reads `usage` and the bound |
        //
        // Either A reads the value of B, or B sees the room.
        let wanted = self.counters.wanted.load(Ordering::SeqCst);
        wanted != 0 && self.has_room(wanted)
    }

    /// Returns whether that many more bytes can be charged at this moment.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        // SeqCst for both loads: see `is_waited_for`.
        let max = self.bounds[Bound::Max as usize].load(Ordering::SeqCst);
        self.counters.usage.load(Ordering::SeqCst).checked_add(bytes).is_some_and(|sum| sum <= max.min(COUNTABLE))
    }

    /// Sets the bytes that waiters here need, 0 for none. Returns whether there is room for them.
    pub(crate) fn want(&self, bytes: u64) -> bool {
        self.counters.wanted.store(bytes, Ordering::SeqCst); // As in `is_waited_for`.
        self.is_waited_for()
    }

    /// Returns whether a request waits for room here.
    pub(crate) fn has_waiters(&self) -> bool {
        self.counters.wanted.load(Ordering::Relaxed) != 0
    }

    /// Returns the nanoseconds for which it rests after a pass.
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

/// A name that one thread may read while another one sets it. The reader may then get a mixture of
/// both names. Zeroed memory is the empty name.
#[derive(Debug, Default)]
pub struct SharedName {
    pub(crate) length: AtomicU32,
    pub(crate) words: [AtomicU64; LONGEST_NAME / 8],
}

impl SharedName {
    /// Sets the name; bytes beyond [`LONGEST_NAME`] are cut off.
    pub fn set(&self, name: &str) {
        self.length.store(name.len().min(LONGEST_NAME) as u32, Ordering::Relaxed);
        for (word, bytes) in self.words.iter().zip(name.as_bytes().chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
    }

    /// Returns the name.
    pub fn get(&self) -> Name {
        let mut bytes = [0; LONGEST_NAME];
        for (word, bytes) in self.words.iter().zip(bytes.chunks_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        Name { bytes, length: (self.length.load(Ordering::Relaxed) as usize).min(LONGEST_NAME) }
    }
}

/// Name of a group below its parent, or of a shrinker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; LONGEST_NAME],
    length: usize,
}

impl Name {
    /// Returns the name as text; `?` if it is not UTF-8.
    pub fn as_str(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.length]).unwrap_or("?")
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Name {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Returns whether a name is valid: 1 to [`LONGEST_NAME`] bytes, printable, without `/`, and not
/// `.` or `..`.
pub fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= LONGEST_NAME
        && name != "."
        && name != ".."
        && name.chars().all(|c| c != '/' && !c.is_control())
}
