//! Walks of the groups below a root, shared by threads: each takes the next group that no other
//! thread has taken.
//!
//! # Design
//!
//! If each thread at a limit walked for itself, all would start with the same groups and stop
//! there. A place keeps, for a root and a node, the slot up to which the groups were asked, and the
//! number of the round. A walk joins the round that is under way, and stops when that is over.
//!
//! A place stores the number of a slot, not a reference, so a group may be deleted meanwhile. The
//! table has places for roots that were walked lately. If another root takes a place, the round
//! begins anew, and the walk is less fair. This module has no lock, and frees nothing.
//!
//! Source: Linux `mm/memcontrol.c` (`mem_cgroup_iter` with a reclaim cookie), by description.

use core::sync::atomic::{AtomicU64, Ordering};
use neap_groups::GroupId;

/// Number of places.
const ENTRIES: usize = 256;

/// Position of a round in one word: the next slot, the round, and a part of the hash of root and
/// node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct RoundPosition(u64);

const SLOT_BITS: u32 = 32;
const ROUND_BITS: u32 = 16;

impl RoundPosition {
    fn new(tag: u16, round: u16, slot: u32) -> RoundPosition {
        RoundPosition(u64::from(tag) << (SLOT_BITS + ROUND_BITS) | u64::from(round) << SLOT_BITS | u64::from(slot))
    }

    fn slot(self) -> u32 {
        self.0 as u32
    }

    fn round(self) -> u16 {
        (self.0 >> SLOT_BITS) as u16
    }

    fn tag(self) -> u16 {
        (self.0 >> (SLOT_BITS + ROUND_BITS)) as u16
    }
}

/// The places of all walks.
#[derive(Debug)]
pub struct Walks {
    places: [AtomicU64; ENTRIES],
}

impl Default for Walks {
    fn default() -> Walks {
        Walks { places: core::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

/// One thread's part in a walk.
#[derive(Debug)]
pub struct Walk<'w> {
    place: &'w AtomicU64,
    tag: u16,
    round: u16,
    /// Number of groups that this thread has taken.
    seen: u32,
}

impl Walks {
    /// Joins the walk of the groups below a root, on a node.
    pub fn join(&self, root: GroupId, node: usize) -> Walk<'_> {
        let hash = (root.to_bits() ^ (node as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // Never 0, the tag of a place that was never used.
        let (place, tag) = (&self.places[(hash >> 56) as usize % ENTRIES], (hash >> 32) as u16 | 1);
        let now = RoundPosition(place.load(Ordering::Relaxed));
        let round = if now.tag() == tag { now.round() } else { 0 };
        if now.tag() != tag {
            // Another thread that does this begins the same round.
            let _ =
                place.compare_exchange(now.0, RoundPosition::new(tag, 0, 0).0, Ordering::Relaxed, Ordering::Relaxed);
        }
        Walk { place, tag, round, seen: 0 }
    }

    /// Returns the slot up to which the groups below a root were asked on a node in the current
    /// round.
    pub fn place_of(&self, root: GroupId, node: usize) -> u32 {
        let walk = self.join(root, node);
        let now = RoundPosition(walk.place.load(Ordering::Relaxed));
        if now.tag() == walk.tag { now.slot() } else { 0 }
    }
}

/// A walk of one thread, once round, from any slot on.
#[derive(Clone, Copy, Debug)]
pub struct Generation {
    first: u32,
    next: u32,
    /// The walk has come to the last slot, and continues from the first.
    wrapped: bool,
}

impl Generation {
    /// Begins with the first group from a slot on.
    pub const fn from(slot: u32) -> Generation {
        Generation { first: slot, next: slot, wrapped: false }
    }

    /// Returns the slot of the next group; `None` after one round. `next` finds the first slot from
    /// the given one on.
    pub fn next(&mut self, mut next: impl FnMut(u32) -> Option<u32>) -> Option<u32> {
        let mut found = next(self.next);
        if found.is_none() && !self.wrapped {
            self.wrapped = true;
            found = next(0);
        }
        let slot = found.filter(|&slot| !self.wrapped || slot < self.first)?;
        self.next = slot + 1;
        Some(slot)
    }
}

impl Walk<'_> {
    /// Returns the slot of the next group that no thread has taken in this round; `None` when the
    /// round is over.
    ///
    /// `next` finds the first slot from the given one on. A walk that has taken nothing at the end
    /// of its round begins another one, once.
    pub fn next(&mut self, mut next: impl FnMut(u32) -> Option<u32>) -> Option<u32> {
        loop {
            // Relaxed, and below: the lookup of the group in a slot has its own ordering.
            let now = RoundPosition(self.place.load(Ordering::Relaxed));
            if now.tag() != self.tag || now.round() != self.round {
                return None;
            }
            let found = next(now.slot());
            let then = match found {
                Some(slot) => RoundPosition::new(self.tag, self.round, slot + 1),
                None => RoundPosition::new(self.tag, self.round.wrapping_add(1), 0),
            };
            if self.place.compare_exchange(now.0, then.0, Ordering::Relaxed, Ordering::Relaxed).is_err() {
                continue;
            }
            match found {
                Some(slot) => {
                    self.seen += 1;
                    return Some(slot);
                }
                // It joined a round that was nearly over.
                None if self.seen == 0 && now.slot() > 0 => self.round = then.round(),
                None => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;
    use std::vec::Vec;

    fn among(slots: &[u32]) -> impl FnMut(u32) -> Option<u32> {
        move |from| slots.iter().copied().find(|&slot| slot >= from)
    }

    fn all(walk: &mut Walk<'_>, slots: &[u32]) -> Vec<u32> {
        core::iter::from_fn(|| walk.next(among(slots))).collect()
    }

    #[test]
    fn walk_resumes_at_the_shared_cursor_and_ends_with_its_round() {
        let walks = Walks::default();
        let mut first = walks.join(GroupId::ROOT, 0);
        assert_eq!((first.next(among(&[1, 4, 9])), first.next(among(&[1, 4, 9]))), (Some(1), Some(4)));
        let mut second = walks.join(GroupId::ROOT, 0);
        assert_eq!(all(&mut second, &[1, 4, 9]), [9]);
        assert_eq!(all(&mut first, &[1, 4, 9]), [], "its round is over");
        assert_eq!(all(&mut walks.join(GroupId::ROOT, 0), &[1, 4, 9]), [1, 4, 9]);
        assert_eq!(all(&mut walks.join(GroupId::ROOT, 1), &[2]), [2], "another node's place is its own");
    }

    #[test]
    fn walk_that_joins_at_the_end_begins_exactly_one_new_round() {
        let walks = Walks::default();
        let mut first = walks.join(GroupId::ROOT, 0);
        assert_eq!((first.next(among(&[3])), all(&mut walks.join(GroupId::ROOT, 0), &[3])), (Some(3), Vec::from([3])));
        assert_eq!(all(&mut walks.join(GroupId::ROOT, 0), &[]), [], "nothing is found twice and that is all");
    }

    #[test]
    fn a_lap_goes_once_round_from_anywhere() {
        let lap = |from, slots: &[u32]| {
            let mut lap = Generation::from(from);
            core::iter::from_fn(|| lap.next(among(slots))).take(9).collect::<Vec<_>>()
        };
        assert_eq!([lap(0, &[1, 4, 9]), lap(4, &[1, 4, 9]), lap(5, &[1, 4, 9])], [[1, 4, 9], [4, 9, 1], [9, 1, 4]]);
        assert_eq!([lap(10, &[1, 4, 9]), lap(9, &[1, 4, 9])], [[1, 4, 9], [9, 1, 4]]);
        assert_eq!((lap(3, &[]), lap(3, &[3])), (Vec::new(), Vec::from([3])));
    }

    #[test]
    fn a_group_that_goes_or_comes_is_no_matter() {
        let walks = Walks::default();
        let mut walk = walks.join(GroupId::ROOT, 0);
        assert_eq!(walk.next(among(&[1, 2, 3])), Some(1));
        assert_eq!(
            (walk.next(among(&[0, 1, 3])), walk.next(among(&[0, 9])), walk.next(among(&[0, 1]))),
            (Some(3), Some(9), None)
        );
    }

    #[test]
    fn a_root_that_displaces_another_only_begins_anew() {
        let walks = Walks::default();
        let place = |walk: &Walk<'_>| core::ptr::from_ref(walk.place);
        let mut first = walks.join(GroupId::ROOT, 0);
        assert_eq!(first.next(among(&[5, 6])), Some(5));
        let same = |id: &GroupId| place(&walks.join(*id, 0)) == place(&first);
        let other = (2..).map(GroupId::from_bits).find(same).unwrap();
        let mut second = walks.join(other, 0);
        assert_eq!(first.next(among(&[5, 6])), None);
        assert_eq!(all(&mut second, &[5, 6]), [5, 6]);
        assert_eq!(all(&mut walks.join(GroupId::ROOT, 0), &[5, 6]), [5, 6]);
    }

    /// A walk stops when the round is over. Together they take each group once; a walk that joined
    /// late takes groups a second time.
    #[test]
    fn threads_share_a_round() {
        let (walks, slots) = (Walks::default(), Vec::from_iter(0..1000));
        let taken: Vec<AtomicU32> = (0..1000).map(|_| AtomicU32::new(0)).collect();
        let mut walkers: Vec<_> = (0..4).map(|_| walks.join(GroupId::ROOT, 0)).collect();
        std::thread::scope(|scope| {
            for walk in &mut walkers {
                scope.spawn(|| {
                    while let Some(slot) = walk.next(among(&slots)) {
                        taken[slot as usize].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        // Twice, if a walk came when the first round was about to end.
        assert!(taken.iter().all(|times| (1..=2).contains(&times.load(Ordering::Relaxed))));
    }
}
