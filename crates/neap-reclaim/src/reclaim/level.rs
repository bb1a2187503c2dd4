//! How hard memory is to get: levels of pressure, from what was looked at and what was given.
//!
//! Sits between passes, which tell what a walk came to, and those who subscribed to a group's [`Event`]s. A level is found once for every
//! window of objects that were looked at, so that one walk that found little is no news. Sums are kept for groups that reclaim was asked for lately: a table
//! in which groups may displace each other, which costs a group the part of its window that it had. One mutex an entry, a leaf.
//!
//! Source: Linux `mm/vmpressure.c`, by description.

use neap_base::Mutex;
use neap_groups::{Event, GroupId};

/// Objects that are looked at before anything is said about them.
const WINDOW: u64 = 512;
/// Percent of what was looked at that was not given, from which on the level is medium, and critical.
const MEDIUM: u64 = 60;
const CRITICAL: u64 = 95;
/// Groups whose windows are open at a time.
const ENTRIES: usize = 64;

/// How hard memory is to get.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// Most of what is looked at is given.
    Low,
    /// Less than two fifths is.
    Medium,
    /// Nearly nothing is.
    Critical,
}

impl Level {
    /// The level at which so many objects were looked at, and so many given. What gives more than was looked at, as whole slabs do, is
    /// no pressure.
    pub fn of(scanned: u64, reclaimed: u64) -> Level {
        let missing = scanned.saturating_sub(reclaimed);
        let percent = if scanned == 0 { 0 } else { (u128::from(missing) * 100 / u128::from(scanned)) as u64 };
        match percent {
            CRITICAL.. => Level::Critical,
            MEDIUM.. => Level::Medium,
            _ => Level::Low,
        }
    }

    /// The event that subscribers hear of.
    pub const fn event(self) -> Event {
        match self {
            Level::Low => Event::PressureLow,
            Level::Medium => Event::PressureMedium,
            Level::Critical => Event::PressureCritical,
        }
    }
}

/// What was looked at and given since the last level.
#[derive(Clone, Copy, Default, Debug)]
struct Window {
    /// [`GroupId`]; 0: nobody's.
    group: u64,
    scanned: u64,
    reclaimed: u64,
}

/// The windows of all groups.
#[derive(Debug)]
pub struct Levels {
    windows: [Mutex<Window>; ENTRIES],
}

impl Default for Levels {
    fn default() -> Levels {
        Levels { windows: core::array::from_fn(|_| Mutex::new(Window::default())) }
    }
}

impl Levels {
    /// Adds what a walk of a group and those below it came to; answers the level where that fills the window. Inside the gate.
    pub fn note(&self, group: GroupId, scanned: u64, reclaimed: u64) -> Option<Level> {
        if scanned == 0 {
            return None;
        }
        // Fibonacci hashing: ids differ in their low bits.
        let place = group.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - ENTRIES.ilog2());
        let mut window = self.windows[place as usize].lock();
        if window.group != group.to_bits() {
            *window = Window { group: group.to_bits(), ..Window::default() };
        }
        window.scanned = window.scanned.saturating_add(scanned);
        window.reclaimed = window.reclaimed.saturating_add(reclaimed);
        if window.scanned < WINDOW {
            return None;
        }
        let Window { scanned, reclaimed, .. } = core::mem::take(&mut *window);
        Some(Level::of(scanned, reclaimed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn levels_are_those_of_the_published_percentages() {
        let expected =
            [(100, 100, Level::Low), (100, 41, Level::Low), (100, 40, Level::Medium), (100, 6, Level::Medium)];
        for (scanned, reclaimed, level) in expected {
            assert_eq!(Level::of(scanned, reclaimed), level, "{scanned} {reclaimed}");
        }
        assert_eq!(
            [Level::of(100, 5), Level::of(512, 0), Level::of(0, 0)],
            [Level::Critical, Level::Critical, Level::Low]
        );
        assert_eq!(Level::of(u64::MAX, 0), Level::Critical);
    }

    #[test]
    fn l12_more_given_than_looked_at_is_no_pressure() {
        assert_eq!(Level::of(10, 40), Level::Low);
        let levels = Levels::default();
        assert_eq!(levels.note(GroupId::ROOT, 10, 40), None);
        assert_eq!(levels.note(GroupId::ROOT, 502, 2000), Some(Level::Low));
    }

    #[test]
    fn a_level_is_found_once_a_window_and_for_each_group() {
        let (levels, other) = (Levels::default(), GroupId::from_bits(GroupId::ROOT.to_bits() + 1));
        assert_eq!(levels.note(GroupId::ROOT, 0, 100), None);
        for _ in 0..3 {
            assert_eq!(levels.note(GroupId::ROOT, 511, 511), None);
            assert_eq!(levels.note(other, 511, 0), None);
            assert_eq!(levels.note(GroupId::ROOT, 1, 0), Some(Level::Low));
            assert_eq!(levels.note(other, u64::MAX, 0), Some(Level::Critical));
        }
    }

    proptest! {
        #[test]
        fn the_level_does_not_fall_as_less_is_given(scanned in 1..u64::MAX, given: u64, less: u64) {
            let (more, less) = (given.max(less), given.min(less));
            prop_assert!(Level::of(scanned, less) >= Level::of(scanned, more));
        }
    }
}
