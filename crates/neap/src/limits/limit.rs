//! The option `limit`, and the state of a limit that [follows](crate::limits::following) the
//! container. The option is a number of bytes, or a rule by which the manager follows the
//! container.

use crate::options::AUTO;
use crate::state::gated::GatedMutex;
use crate::state::headroom::{Headroom, Looks};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_base::gate::Inside;
use neap_base::platform::Room;

/// A value of the option `limit`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Limit {
    None,
    Bytes(u64),
    /// The room that the nearest limit of the container or machine leaves.
    Auto,
    /// As [`Limit::Auto`], but at most so many hundredths of the smallest limit.
    Percent(u8),
}

/// Bit of the number of a [`Limit::Percent`]. No number of bytes has this bit.
pub(crate) const PERCENT: u64 = 1 << 63;

impl Limit {
    /// Returns the limit for which a setting's number stands.
    pub(crate) fn of_number(number: u64) -> Limit {
        match number {
            0 => Limit::None,
            AUTO => Limit::Auto,
            _ if number & PERCENT > 0 => Limit::Percent((number & 0xff) as u8),
            bytes => Limit::Bytes(bytes),
        }
    }

    /// Returns the bytes of a [`Limit::Bytes`], or of a [`Limit::Percent`] of `whole` bytes.
    /// Returns `None` for other limits.
    pub(crate) fn of(self, whole: u64) -> Option<u64> {
        match self {
            Limit::None | Limit::Auto => None,
            Limit::Bytes(bytes) => Some(bytes),
            Limit::Percent(percent) => Some((u128::from(whole) * u128::from(percent) / 100) as u64),
        }
    }
}

/// The limit until the first look, in bytes. Programs below it make no look before their first
/// tick.
pub(crate) const FIRST: u64 = 16 << 20;
/// Nanoseconds from one look to the next.
pub(crate) const PERIOD: u64 = 1_000_000_000;
/// Nanoseconds between two looks of a thread that ticks.
pub(crate) const TICKING: u64 = 250_000_000;
/// Nanoseconds between looks while the container has too little room or its room falls.
const HURRY: u64 = 50_000_000;
/// Looks in a row that found too little room, since the heap last shrank. After more of them looks
/// are no longer frequent.
const STUCK: u32 = 16;
/// Looks without a finding after which frequent looks end. They take a second.
const CALM: u32 = 20;
/// Nanoseconds for which neap expects a fall to go on. They last until the next look and its
/// reclaim.
const AHEAD: u64 = 2 * HURRY;
/// A limit that falls is expected to fall by at most one in so many bytes. So neap gives back
/// little in vain if the fall ends.
const MOST_CUT_AHEAD: u64 = 64;
/// Other memory is expected to grow by at most one in so many bytes of the limit. This is more,
/// since the kernel refuses or delays a cut, but kills if other processes grow up to the wall.
const MOST_GROWTH_AHEAD: u64 = 4;
/// A fall by fewer than this many bytes in [`AHEAD`] does not count.
const LEAST_FALL: u64 = 1 << 20;
/// A change of the container's used memory by fewer bytes, or by less than a 64th of its limit, is
/// not published at once.
const LEAST_NEWS: u64 = 1 << 20;
/// Milliseconds to the wall below which the start and the end of growth are published at once.
const NEAR_WALL_MS: u64 = 600_000;
/// Looks are frequent if a fall would end the room within so many times [`AHEAD`], which is 10 s.
const NEAR: u64 = 100;

/// State of a limit that follows the container. Its atomics are counters and times, and publish no
/// other data.
#[derive(Debug)]
pub(crate) struct Following {
    /// Time of the last look, or 0 before the first.
    pub(crate) last: AtomicU64,
    /// The fewest bytes that an allocation needs which waits for a look; 0 if none waits.
    pub(crate) wanted: AtomicU64,
    pub(crate) looks: AtomicU64,
    /// Part of `looks` that allocations at the limit have requested.
    pub(crate) looks_for_allocations: AtomicU64,
    /// Looks in a row that found too little room, since the heap last shrank.
    short: AtomicU32,
    /// Looks in a row that found enough room and no fall.
    calm: AtomicU32,
    /// Time of a look, and the container's limit, used memory and other memory then. `fall` is the
    /// fall that neap expected then.
    fell_at: AtomicU64,
    limit: AtomicU64,
    used: AtomicU64,
    others: AtomicU64,
    fall: AtomicU64,
    /// Bytes of the heap at the last look.
    own: AtomicU64,
    /// How often neap raised the limit beyond the container's room for an allocation.
    pub(crate) passed: AtomicU64,
    /// Nearest limit and level of pressure at the looks.
    pub(crate) headroom: GatedMutex<Looks>,
}

impl Following {
    pub(crate) fn new() -> Following {
        let [last, wanted, looks, looks_for_allocations] = [const { AtomicU64::new(0) }; 4];
        let [own, passed, fell_at, limit, used, others, fall] = [const { AtomicU64::new(0) }; 7];
        Following {
            last,
            wanted,
            looks,
            looks_for_allocations,
            short: AtomicU32::new(0),
            calm: AtomicU32::new(CALM),
            fell_at,
            limit,
            used,
            others,
            fall,
            own,
            passed,
            headroom: GatedMutex::new(Looks::new()),
        }
    }

    /// Records the container's limit and its memory besides `touched` bytes of the heap at time
    /// `now`. Returns by how many bytes neap expects the difference, the most bytes that the heap
    /// could have, to fall until a later look has had its effect.
    ///
    /// The difference falls if the limit does, or if other memory in the container grows. neap
    /// expects a fall to go on at the rate since the last look. If half of the previously expected
    /// fall is more, neap expects that.
    ///
    /// Growth counts in full only if the used memory grows, too, by at least [`LEAST_FALL`]. The
    /// container may go on counting parts of huge pages that the heap has released, as if others
    /// had taken them.
    ///
    /// # Errors
    /// Returns the last answer if the last look was less than 25 ms ago. Nothing is recorded then.
    pub(crate) fn expected_fall(&self, now: u64, touched: u64, room: &Room) -> Result<u64, u64> {
        let others = room.used.saturating_sub(touched);
        let last = self.fell_at.load(Ordering::Relaxed);
        let (is_first, elapsed) = (last == 0, now.saturating_sub(last));
        // Allocations at the limit look again soon, too soon for a slope.
        if !is_first && elapsed < HURRY / 2 {
            return Err(self.fall.load(Ordering::Relaxed));
        }
        self.fell_at.store(now.max(1), Ordering::Relaxed);
        let limit_before = self.limit.swap(room.limit, Ordering::Relaxed);
        let others_before = self.others.swap(others, Ordering::Relaxed);
        let has_grown = self.used.swap(room.used, Ordering::Relaxed).saturating_add(LEAST_FALL) <= room.used;
        let ceiling = |limit: u64, others| limit.saturating_sub(others);
        let fell = ceiling(limit_before, others_before).saturating_sub(ceiling(room.limit, others));
        let ahead = |bytes: u64| {
            let bytes = u128::from(bytes) * u128::from(AHEAD) / u128::from(elapsed.max(1));
            u64::try_from(bytes).unwrap_or(u64::MAX)
        };
        let growth = if has_grown { ahead(others.saturating_sub(others_before)) } else { 0 };
        let most = growth.min(room.limit / MOST_GROWTH_AHEAD).max(room.limit / MOST_CUT_AHEAD);
        let going_on = ahead(fell).min(most);
        let expected = going_on.max(self.fall.load(Ordering::Relaxed) / 2);
        let expected = if is_first || expected < LEAST_FALL { 0 } else { expected };
        self.fall.store(expected, Ordering::Relaxed);
        Ok(expected)
    }

    /// Records a look. `own` is the number of bytes of the heap. `is_short` means that the
    /// container has too little room. `is_falling` means that its limit has fallen, or that an
    /// expected fall would soon end its room.
    pub(crate) fn note(&self, own: u64, is_short: bool, is_falling: bool) {
        let has_shrunk = self.own.swap(own, Ordering::Relaxed) > own + (1 << 20);
        let before = if has_shrunk { 0 } else { self.short.load(Ordering::Relaxed) };
        let short = if is_short { before.saturating_add(1) } else { 0 };
        self.short.store(short, Ordering::Relaxed);
        let calm = if is_short || is_falling { 0 } else { self.calm.load(Ordering::Relaxed).saturating_add(1) };
        self.calm.store(calm, Ordering::Relaxed);
    }

    /// Returns the container's numbers at the last look; `None` if no limit was visible.
    pub(crate) fn seen(&self, inside: &Inside<'_>) -> Option<Headroom> {
        self.headroom.lock(inside).last
    }

    /// Whether looks follow each other every 50 ms.
    pub(crate) fn is_hurrying(&self) -> bool {
        self.short.load(Ordering::Relaxed) <= STUCK && self.calm.load(Ordering::Relaxed) < CALM
    }

    /// Returns the nanoseconds from the last look to the next, at most `most`.
    pub(crate) fn period(&self, most: u64) -> u64 {
        if self.is_hurrying() { HURRY } else { most }
    }
}

/// Whether the numbers of the last look differ from the published ones by so much that they should
/// be published, too.
pub(crate) fn is_news(last: Option<Headroom>, published: Option<Headroom>) -> bool {
    let (Some(last), Some(published)) = (last, published) else { return last.is_some() != published.is_some() };
    let is_wall_near = |at: Headroom| at.ms_to_wall.is_some_and(|ms| ms < NEAR_WALL_MS);
    last.limit != published.limit
        || last.limited_by != published.limited_by
        || last.pressure != published.pressure
        || is_wall_near(last) != is_wall_near(published)
        || last.used.abs_diff(published.used) >= LEAST_NEWS.max(last.limit / 64)
}

/// Whether an expected fall would end `room` soon.
pub(crate) fn is_near(room: &Room, fall: u64) -> bool {
    fall > 0 && i128::from(room.spare()) < i128::from(fall) * i128::from(NEAR)
}

/// Whether an expected fall is larger than a cut counts, so that other memory grows.
pub(crate) fn is_growth(room: &Room, fall: u64) -> bool {
    fall > room.limit / MOST_CUT_AHEAD
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_base::platform::{LimitedBy, Pressure};
    use std::vec::Vec;

    const MIB: u64 = 1 << 20;

    fn room(limit: u64, used: u64) -> Room {
        Room { owner: LimitedBy::Group, limit, used, smallest: limit }
    }

    #[test]
    fn looks_follow_each_other_fast_while_room_is_short_or_falls() {
        let following = Following::new();
        let periods = |looks: &[(u64, bool, bool)]| -> Vec<u64> {
            looks
                .iter()
                .map(|&(own, is_short, is_falling)| {
                    following.note(own * MIB, is_short, is_falling);
                    following.period(PERIOD) / 1_000_000
                })
                .collect()
        };
        assert_eq!(periods(&[(900, false, false), (900, true, false), (890, true, false)]), [1000, 50, 50]);
        let calm = periods(&[(890, false, false); 21]);
        assert_eq!(calm, [[50; 19].as_slice(), &[1000; 2]].concat(), "a second later");
        let stuck = periods(&[(500, true, false); 18]);
        assert_eq!(stuck, [[50; 16].as_slice(), &[1000; 2]].concat(), "nothing can be given back");
        assert_eq!(periods(&[(400, true, false), (400, false, false)]), [50; 2]);
        assert_eq!(periods(&[(400, false, false); 20])[19], 1000);
        assert_eq!(periods(&[(400, false, true), (400, false, false)]), [50; 2]);
    }

    #[test]
    fn a_fall_of_limit_or_room_is_expected_to_go_on_and_then_to_end() {
        const TICK: u64 = 50_000_000;
        let following = Following::new();
        let mut now = TICK;
        let mut expect = |ticks, limit, used| {
            now += ticks * TICK;
            following.expected_fall(now, 100 * MIB, &room(limit * MIB, used * MIB)).unwrap_or_else(|last| last + MIB)
                / MIB
        };
        assert_eq!(expect(0, 3200, 500), 0, "the first look");
        assert_eq!(expect(1, 3190, 500), 20, "10 MiB in 50 ms, for 100 ms");
        assert_eq!(expect(1, 3190, 510), 20, "others grew");
        assert_eq!(expect(0, 3000, 510), 21, "too soon after the last look");
        assert_eq!(expect(1, 2990, 510), 46, "a cut counts a 64th of the limit at most");
        assert_eq!([expect(1, 2990, 510), expect(1, 2990, 510)], [23, 11], "half of it after the end");
        assert_eq!(expect(20, 2900, 510), 9, "90 MiB in a second");
        assert_eq!([expect(1, 9000, 100), expect(1, 9000, 100), expect(1, 9000, 100)], [4, 2, 1]);
        assert_eq!(expect(1, 9000, 100), 0);
        assert_eq!(expect(1, 8000, 300), 400, "a cut beside growth of 200 MiB");
        assert_eq!(expect(1, 8000, 3300), 2000, "growth counts a quarter of the limit at most");
        assert_eq!(expect(1, 9000, 3400), 1000, "a raised limit makes up for growth");
        assert!(is_near(&room(1064 * MIB, 900 * MIB), 2 * MIB) && !is_near(&room(1064 * MIB, 700 * MIB), 2 * MIB));
        assert!(!is_near(&room(1064 * MIB, 2000 * MIB), 0));
    }

    #[test]
    fn released_memory_that_still_counts_is_no_growth() {
        for (used, expected) in [(3400 * MIB, 140), (3401 * MIB - 1, 140), (3401 * MIB, 1002)] {
            let following = Following::new();
            let look =
                |at, touched: u64, used| following.expected_fall(at * HURRY, touched * MIB, &room(9000 * MIB, used));
            assert_eq!(look(1, 1000, 3400 * MIB), Ok(0));
            assert_eq!(look(2, 500, used).map(|fall| fall / MIB), Ok(expected), "500 MiB released");
        }
    }

    #[test]
    fn changes_of_the_container_are_news_if_they_matter() {
        let published = Headroom {
            pressure: Pressure::Roomy,
            limited_by: LimitedBy::Group,
            limit: 1 << 30,
            used: 100 << 20,
            ms_to_wall: None,
            limit_changes: 0,
        };
        let news = |last: Headroom| is_news(Some(last), Some(published));
        assert!(!news(published));
        assert!(!news(Headroom { used: 115 << 20, ..published }));
        assert!(news(Headroom { used: 84 << 20, ..published }));
        assert!(news(Headroom { limit: 1 << 29, ..published }));
        assert!(news(Headroom { pressure: Pressure::Steady, ..published }));
        assert!(news(Headroom { limited_by: LimitedBy::Machine, ..published }));
        assert!(news(Headroom { ms_to_wall: Some(599_999), ..published }), "growth begins");
        assert!(!news(Headroom { ms_to_wall: Some(600_000), ..published }), "other processes grow a little");
        let growing = Headroom { ms_to_wall: Some(400_000), ..published };
        assert!(is_news(Some(published), Some(growing)), "growth ends");
        assert!(!is_news(Some(Headroom { ms_to_wall: Some(300_000), ..published }), Some(growing)));
        assert!(is_news(Some(published), None) && is_news(None, Some(published)) && !is_news(None, None));
    }
}
