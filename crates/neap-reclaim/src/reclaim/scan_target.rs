//! Share of a group's objects that a pass asks for: arithmetic on its usage and protection.
//!
//! A pass skips a group within its `min`. It skips a group within its `low` unless nothing else is
//! left. It asks other groups in proportion to their unprotected bytes. This module has no state
//! and no lock.
//!
//! Source: Linux `mm/vmscan.c` (`shrink_node_memcgs`, `get_scan_count`), by description.

use crate::shrinkers::{ScanPressure, ShrinkerFilter, WHOLE};
use neap_groups::protection::GroupUsage;

/// Protection that a pass ignores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LowProtection {
    /// The pass ignores no protection.
    Fair,
    /// The pass ignores the protection of `low`.
    TakesLow,
}

/// The bound that protects a group from a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProtectedBy {
    /// `min`: no pass reclaims there.
    Min,
    /// `low`: [`LowProtection::TakesLow`] would reclaim there.
    Low,
}

/// Returns the pressure on a group for a pass that needs `need` bytes. The pass asks a group that
/// uses at most that many bytes for at least one batch.
///
/// # Errors
/// [`ProtectedBy`]: the bound that protects the group from this pass.
pub fn scan_pressure(
    group: &GroupUsage,
    need: u64,
    priority: u32,
    grip: LowProtection,
) -> Result<ScanPressure, ProtectedBy> {
    let &GroupUsage { usage, min, low, .. } = group;
    let is_below = |protection: u64| protection > 0 && protection >= usage;
    if is_below(min) {
        return Err(ProtectedBy::Min);
    }
    if grip == LowProtection::Fair && is_below(low) {
        return Err(ProtectedBy::Low);
    }
    let protected = if grip == LowProtection::Fair { min.max(low) } else { min };
    // A pass asks a group that is not wholly protected for at least the least share.
    let share = u128::from(WHOLE) * u128::from(usage.saturating_sub(protected)) / u128::from(usage.max(1));
    let share = if usage == 0 { WHOLE } else { (share as u32).max(1) };
    Ok(ScanPressure { priority, share, least: usage > 0 && usage <= need, filter: ShrinkerFilter::All, need, usage })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shrinkers::FIRST_PRIORITY;
    use neap_groups::GroupId;
    use proptest::prelude::*;

    fn of(usage: u64, min: u64, low: u64, grip: LowProtection) -> Result<u32, ProtectedBy> {
        let group = GroupUsage { id: GroupId::ROOT, usage, min, low };
        scan_pressure(&group, 99, 7, grip).map(|pressure| pressure.share)
    }

    #[test]
    fn what_is_protected_is_passed_by_or_does_not_count() {
        assert_eq!(of(100, 0, 0, LowProtection::Fair), Ok(WHOLE));
        assert_eq!(of(100, 0, 50, LowProtection::Fair), Ok(512));
        assert_eq!(of(100, 0, 50, LowProtection::TakesLow), Ok(WHOLE));
        assert_eq!(of(100, 25, 50, LowProtection::TakesLow), Ok(768));
        assert_eq!(
            (of(100, 100, 0, LowProtection::TakesLow), of(100, 100, 200, LowProtection::Fair)),
            (Err(ProtectedBy::Min), Err(ProtectedBy::Min))
        );
        assert_eq!(
            (of(100, 50, 100, LowProtection::Fair), of(100, 50, 100, LowProtection::TakesLow)),
            (Err(ProtectedBy::Low), Ok(512))
        );
    }

    /// Cached objects there may be charged to no group.
    #[test]
    fn a_group_that_uses_nothing_is_asked_like_any_other() {
        assert_eq!(of(0, 0, 0, LowProtection::Fair), Ok(WHOLE));
    }

    #[test]
    fn group_with_usage_up_to_the_need_gives_at_least_a_batch() {
        let least = |usage, need| {
            let group = GroupUsage { id: GroupId::ROOT, usage, min: 0, low: 0 };
            scan_pressure(&group, need, FIRST_PRIORITY, LowProtection::Fair).unwrap().least
        };
        assert_eq!([least(0, 5), least(5, 5), least(6, 5)], [false, true, false]);
    }

    proptest! {
        #[test]
        fn more_protection_is_never_less_share_for_others(usage: u64, min: u64, low: u64, more: u64) {
            for grip in [LowProtection::Fair, LowProtection::TakesLow] {
                let (before, after) = (of(usage, min, low, grip), of(usage, min, low.saturating_add(more), grip));
                prop_assert!(after.unwrap_or(0) <= before.unwrap_or(0));
                prop_assert!(before.is_err() || (1..=WHOLE).contains(&before.unwrap_or(0)));
            }
        }
    }
}
