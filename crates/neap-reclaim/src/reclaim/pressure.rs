//! Pressure levels of reclaim, from the scanned and freed objects.
//!
//! A level is computed once for each *window*, a number of scanned objects, so one small walk gives
//! no level. A table has windows for groups that were reclaimed from lately. Groups may displace
//! each other there; a displaced group loses its part of a window. Each window has a mutex, under
//! which no other lock is taken.
//!
//! Source: Linux `mm/vmpressure.c`, by description.

use neap_base::Mutex;
use neap_base::gate::Inside;
use neap_groups::{Event, GroupId};

/// Scanned objects in a window.
const WINDOW: u64 = 512;
/// Percentages of scanned objects that were not freed. From the first one on the level is medium,
/// from the second one on critical.
const MEDIUM: u64 = 60;
const CRITICAL: u64 = 95;
/// Groups with an open window.
const ENTRIES: usize = 64;

/// Pressure on memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// More than two fifths of the scanned objects are freed.
    Low,
    /// At most two fifths are freed.
    Medium,
    /// At most 5 % are freed.
    Critical,
}

impl Level {
    /// Returns the level for these numbers of objects. More freed than scanned objects, as with
    /// whole slabs, are no pressure.
    pub fn of(scanned: u64, reclaimed: u64) -> Level {
        let missing = scanned.saturating_sub(reclaimed);
        let percent = if scanned == 0 { 0 } else { (u128::from(missing) * 100 / u128::from(scanned)) as u64 };
        match percent {
            CRITICAL.. => Level::Critical,
            MEDIUM.. => Level::Medium,
            _ => Level::Low,
        }
    }

    /// Returns the event that subscribers are told.
    pub const fn event(self) -> Event {
        match self {
            Level::Low => Event::PressureLow,
            Level::Medium => Event::PressureMedium,
            Level::Critical => Event::PressureCritical,
        }
    }
}

/// Objects that were scanned and freed since the last level.
#[derive(Clone, Copy, Default, Debug)]
struct Window {
    /// [`GroupId`] as bits; 0: no group.
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
    /// Adds the result of a walk to a group's window. Returns the level if that fills the window.
    pub fn note(&self, _: &Inside<'_>, group: GroupId, scanned: u64, reclaimed: u64) -> Option<Level> {
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
    use crate::reclaim::inside;
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
        assert_eq!(levels.note(&inside(), GroupId::ROOT, 10, 40), None);
        assert_eq!(levels.note(&inside(), GroupId::ROOT, 502, 2000), Some(Level::Low));
    }

    #[test]
    fn a_level_is_found_once_a_window_and_for_each_group() {
        let (levels, other) = (Levels::default(), GroupId::from_bits(GroupId::ROOT.to_bits() + 1));
        assert_eq!(levels.note(&inside(), GroupId::ROOT, 0, 100), None);
        for _ in 0..3 {
            assert_eq!(levels.note(&inside(), GroupId::ROOT, 511, 511), None);
            assert_eq!(levels.note(&inside(), other, 511, 0), None);
            assert_eq!(levels.note(&inside(), GroupId::ROOT, 1, 0), Some(Level::Low));
            assert_eq!(levels.note(&inside(), other, u64::MAX, 0), Some(Level::Critical));
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
