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
/// An expected fall is at most one in so many bytes of the limit. So neap gives back little in vain
/// if the fall ends.
const MOST_AHEAD: u64 = 64;
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
    /// Time of a look, and the most bytes that the heap could have then. `fall` is the fall that
    /// neap expected then.
    ceiling: [AtomicU64; 2],
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
        let [own, passed, at, ceiling, fall] = [const { AtomicU64::new(0) }; 5];
        Following {
            last,
            wanted,
            looks,
            looks_for_allocations,
            short: AtomicU32::new(0),
            calm: AtomicU32::new(CALM),
            ceiling: [at, ceiling],
            fall,
            own,
            passed,
            headroom: GatedMutex::new(Looks::new()),
        }
    }

    /// Records the most bytes that the heap could have at time `now`. Computes this number from the
    /// container's `room` and the heap's `own` bytes. Returns by how many bytes neap expects the
    /// number to fall until a later look has had its effect.
    ///
    /// The number falls if the limit does, or if other memory in the container grows. neap expects
    /// a fall to go on at the rate since the last look. If half of the previously expected fall is
    /// more, neap expects that.
    ///
    /// # Errors
    /// Returns the last answer if the last look was less than 25 ms ago. Nothing is recorded then.
    pub(crate) fn expected_fall(&self, now: u64, own: u64, room: &Room) -> Result<u64, u64> {
        let ceiling = room.limit.saturating_sub(room.used.saturating_sub(own));
        let [at, before] = &self.ceiling;
        let last = at.load(Ordering::Relaxed);
        let (is_first, elapsed) = (last == 0, now.saturating_sub(last));
        // Allocations at the limit look again soon. The heap counts their memory at once, but the
        // container counts it when they touch it. That is no fall.
        if !is_first && elapsed < HURRY / 2 {
            return Err(self.fall.load(Ordering::Relaxed));
        }
        at.store(now.max(1), Ordering::Relaxed);
        let fell = before.swap(ceiling, Ordering::Relaxed).saturating_sub(ceiling);
        let going_on = u128::from(fell) * u128::from(AHEAD) / u128::from(elapsed.max(1));
        let going_on = u64::try_from(going_on).unwrap_or(u64::MAX).min(room.limit / MOST_AHEAD);
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

#[cfg(test)]
mod tests {
    use super::*;
    use neap_base::platform::{LimitedBy, Pressure};

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
