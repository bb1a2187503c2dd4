//! The room for resident memory below the nearest limit. All functions are pure arithmetic.
//!
//! A [`Room`] differs from headroom in two ways. It keeps a margin below the limit, and it is
//! negative if the margin is used. Limits on address space do not count, since memory that the
//! process never touched uses them up, too.

use crate::level::{LimitedBy, MemoryLevel, Swap};
use crate::wall::margin;

/// A limit on resident memory, and the memory used below it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// Kind of the level that has the limit.
    pub owner: LimitedBy,
    /// The limit in bytes: a hard one, or one above which the kernel throttles.
    pub limit: u64,
    /// Used bytes, by all processes that share the limit.
    pub used: u64,
    /// The smallest limit of all levels. `limit` may be larger, since it belongs to the level that
    /// leaves the least room.
    pub smallest: u64,
}

impl Room {
    /// Bytes that may still be used before only the [margin] is left; negative if less is left.
    #[must_use]
    pub fn spare(&self) -> i64 {
        self.spare_above(margin(self.limit))
    }

    /// Bytes that may still be used before only `reserve` bytes are left; negative if less is left.
    #[must_use]
    pub fn spare_above(&self, reserve: u64) -> i64 {
        let target = self.limit.saturating_sub(reserve);
        // Limits and uses from 2^63 on do not exist: they are counts of bytes in memory.
        i64::try_from(target).unwrap_or(i64::MAX).saturating_sub_unsigned(self.used)
    }

    /// Bytes to free until seven eighths of the margin are left. Because of the missing eighth, a
    /// use that varies a little around the margin requires nothing.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.missing_above(margin(self.limit))
    }

    /// Bytes to free until seven eighths of `reserve` bytes are left.
    #[must_use]
    pub fn missing_above(&self, reserve: u64) -> u64 {
        self.spare_above(reserve).min(0).unsigned_abs().saturating_sub(reserve / 8)
    }

    /// Returns the room below the limit of `level` that leaves the least room. `None` without a
    /// limit or usage, and for limits on address space or data.
    pub(crate) fn of(level: &MemoryLevel) -> Option<Room> {
        if matches!(level.owner, LimitedBy::AddressSpace | LimitedBy::Data) {
            return None;
        }
        let used = level.used();
        let both = match level.swap {
            Swap::Together { limit, usage } => Some((limit, usage.saturating_sub(level.reclaimable))),
            _ => None,
        };
        let limits = [level.limit.zip(used), level.high.zip(used), both.filter(|_| level.limit.is_some())];
        let room = |(limit, used)| Room { owner: level.owner, limit, used, smallest: limit };
        limits.into_iter().flatten().map(room).reduce(Room::nearer)
    }

    /// Returns the one of two that leaves less room, with the smallest limit of both.
    pub(crate) fn nearer(self, other: Room) -> Room {
        let nearer = if other.spare() < self.spare() { other } else { self };
        Room { smallest: self.smallest.min(other.smallest), ..nearer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const LEVEL: MemoryLevel = MemoryLevel {
        limit: Some(1000 * MIB),
        usage: Some(700 * MIB),
        reclaimable: 100 * MIB,
        ..MemoryLevel::new(LimitedBy::Group)
    };

    fn spare(level: MemoryLevel) -> Option<i64> {
        Room::of(&level).map(|room| room.spare() >> 20)
    }

    #[test]
    fn a_margin_stays_and_use_beyond_it_counts() {
        let (owner, limit) = (LimitedBy::Group, 1000 * MIB);
        assert_eq!(Room::of(&LEVEL), Some(Room { owner, limit, used: 600 * MIB, smallest: limit }));
        assert_eq!(spare(LEVEL), Some(336));
        assert_eq!(spare(MemoryLevel { limit: Some(100 * MIB), ..LEVEL }), Some(-510), "a tenth of a small limit");
        assert_eq!(spare(MemoryLevel { limit: None, ..LEVEL }), None);
        assert_eq!(spare(MemoryLevel { usage: None, ..LEVEL }), None);
    }

    #[test]
    fn an_eighth_of_the_margin_may_be_used() {
        let missing =
            |used| Room { owner: LimitedBy::Group, limit: 1064 * MIB, used: used * MIB, smallest: 0 }.missing();
        assert_eq!([900, 1000, 1008, 1009, 1100].map(missing), [0, 0, 0, MIB, 92 * MIB]);
    }

    #[test]
    fn a_reserve_takes_the_place_of_the_margin() {
        let room = Room { owner: LimitedBy::Group, limit: 1000 * MIB, used: 900 * MIB, smallest: 0 };
        let above = |reserve: u64| (room.spare_above(reserve * MIB) >> 20, room.missing_above(reserve * MIB) >> 20);
        assert_eq!([0, 40, 100, 160].map(above), [(100, 0), (60, 0), (0, 0), (-60, 40)]);
        assert_eq!(room.spare_above(u64::MAX), -i64::try_from(900 * MIB).unwrap());
    }

    #[test]
    fn the_nearest_limit_of_a_level_counts() {
        assert_eq!(spare(MemoryLevel { high: Some(664 * MIB), ..LEVEL }), Some(0));
        let swap = Swap::Together { limit: 1100 * MIB, usage: 1164 * MIB };
        assert_eq!(spare(MemoryLevel { swap, ..LEVEL }), Some(-28));
        assert_eq!(spare(MemoryLevel { swap, limit: None, ..LEVEL }), None);
    }

    #[test]
    fn the_nearest_limit_need_not_be_the_smallest() {
        let machine =
            MemoryLevel { owner: LimitedBy::Machine, limit: Some(9000 * MIB), usage: Some(9000 * MIB), ..LEVEL };
        let [group, machine] = [LEVEL, machine].map(|level| Room::of(&level).unwrap());
        for room in [group.nearer(machine), machine.nearer(group)] {
            assert_eq!((room.owner, room.limit >> 20, room.smallest >> 20), (LimitedBy::Machine, 9000, 1000));
        }
    }

    #[test]
    fn untouched_memory_is_not_resident() {
        for owner in [LimitedBy::AddressSpace, LimitedBy::Data] {
            assert_eq!(spare(MemoryLevel { owner, ..LEVEL }), None);
        }
        assert!(spare(MemoryLevel { owner: LimitedBy::Machine, ..LEVEL }).is_some());
    }
}
