//! State of the container's headroom: the looks so far.

use neap_base::platform::{LimitedBy, Pressure, Room, Sample, Series};

/// Room below the nearest limit of the container and the machine, at the last look.
///
/// The nearest limit is the one that leaves the least room, of the limits of the kernel's groups
/// and the machine. A `memory.high` counts as a limit, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Headroom {
    /// Level of pressure, with hysteresis.
    pub pressure: Pressure,
    /// Kind of the level that has the nearest limit.
    pub limited_by: LimitedBy,
    /// The nearest limit in bytes.
    pub limit: u64,
    /// Bytes of the limit that are used by all processes that share it.
    pub used: u64,
    /// Milliseconds until the limit is reached at the observed growth; `None` without growth.
    pub ms_to_wall: Option<u64>,
    /// Number of times that the limit changed, or another became the nearest.
    pub limit_changes: u64,
}

impl Headroom {
    /// Bytes until the limit.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// Looks so far.
#[derive(Debug)]
pub(crate) struct Looks {
    series: Series,
    /// The result of the last look; `None` if no limit was visible.
    pub(crate) last: Option<Headroom>,
    /// Whether a look has ended.
    pub(crate) has_any: bool,
}

impl Looks {
    pub(crate) const fn new() -> Looks {
        Looks { series: Series::new(), last: None, has_any: false }
    }

    /// Adds a look at time `now` in nanoseconds. Returns whether level or limit changed.
    pub(crate) fn add(&mut self, now: u64, room: Option<&Room>) -> bool {
        self.has_any = true;
        let before = self.last.take();
        let Some(&Room { owner, limit, used, .. }) = room else { return before.is_some() };
        let sample = Sample { at_ms: now / 1_000_000, headroom: limit.saturating_sub(used), limit };
        let step = self.series.add(sample);
        let limit_changes = before.map_or(0, |before| before.limit_changes) + u64::from(step.limit_changed);
        let (pressure, ms_to_wall) = (step.pressure, step.ms_to_wall);
        self.last = Some(Headroom { pressure, limited_by: owner, limit, used, ms_to_wall, limit_changes });
        before.is_none() || step.level_changed || step.limit_changed
    }
}
