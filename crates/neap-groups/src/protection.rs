//! Effective protection of a group, and the delay of charges above `high`: arithmetic without state
//! or locks.
//!
//! A group's ancestors bound the protection that its `low` and `min` give it. If the children claim
//! more than their parent's protection, that protection is divided in proportion to their claims.
//! If they claim less, the rest is divided among those that use more than they claim.
//!
//! Source: Linux `mm/page_counter.c` (effective protection) and `mm/memcontrol.c` (the delay above
//! `high`), by description.

use crate::id::GroupId;

/// Usage and protection of a group, relative to the target of reclaim, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupUsage {
    /// The group.
    pub id: GroupId,
    /// Bytes charged to it and its descendants.
    pub usage: u64,
    /// Bytes that must not be taken.
    pub min: u64,
    /// Bytes that are taken only if there are none elsewhere.
    pub low: u64,
}

/// Protected bytes of a group, within the protection of its ancestors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Protection {
    /// Bytes protected by `min`.
    pub min: u64,
    /// Bytes protected by `low`.
    pub low: u64,
}

/// Values that decide the protection of one child, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// Usage of the child.
    pub usage: u64,
    /// Its claim: its `low` or `min`.
    pub claim: u64,
    /// Usage of its parent.
    pub parent_usage: u64,
    /// Effective protection of its parent.
    pub parent_protection: u64,
    /// Sum over all children of the part of their claim that they use.
    pub children_claimed: u64,
}

impl Claim {
    /// Returns the protected bytes of the child.
    pub fn protection(self) -> u64 {
        let claimed = self.usage.min(self.claim);
        if self.children_claimed > self.parent_protection {
            return share(self.parent_protection, claimed, self.children_claimed);
        }
        let rest = self.parent_protection - self.children_claimed;
        let beyond = self.parent_usage.saturating_sub(self.children_claimed);
        claimed + share(rest, self.usage - claimed, beyond).min(self.usage - claimed)
    }
}

/// Returns `whole * part / of`; 0 if `of` is 0.
fn share(whole: u64, part: u64, of: u64) -> u64 {
    if of == 0 { 0 } else { (u128::from(whole) * u128::from(part) / u128::from(of)).min(u64::MAX.into()) as u64 }
}

/// Maximum delay of one charge.
pub const DELAY_NS_MAX: u64 = 2_000_000_000;
/// A shorter delay counts as none.
const DELAY_NS_MIN: u64 = 10_000_000;
/// Bytes of a charge that gets the whole delay. The delay is proportional to the charged bytes.
const FULL_DELAY_BYTES: u64 = 256 << 10;

/// Returns the delay in nanoseconds of a thread that has charged `bytes` to a group above its
/// `high`. It grows with the square of the excess. At 1.1 times `high`, it is about 0.6 s for 256
/// KiB.
pub fn delay(usage: u64, high: u64, bytes: u64) -> u64 {
    let above = usage.saturating_sub(high);
    // In units of 2^-20 of `high`.
    let above = share(1 << 20, above, high.max(4096)).min(1 << 30);
    let whole = share(above * above, 1_000_000_000, 1 << 34);
    let delay = share(whole, bytes, FULL_DELAY_BYTES).min(DELAY_NS_MAX);
    if delay < DELAY_NS_MIN { 0 } else { delay }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn protection(usage: u64, claim: u64, parent: (u64, u64), children_claimed: u64) -> u64 {
        let (parent_usage, parent_protection) = parent;
        Claim { usage, claim, parent_usage, parent_protection, children_claimed }.protection()
    }

    /// The example of the kernel's selftest of `memory.low`: a parent with 50 of 148 protected, and
    /// children that use 50 each and claim 75, 25 and 0.
    #[test]
    fn claims_beyond_what_a_parent_has_are_shared() {
        let claimed = 50 + 25;
        let of = |claim: u64| protection(50 * MIB, claim * MIB, (148 * MIB, 50 * MIB), claimed * MIB) / MIB;
        assert_eq!([of(75), of(25), of(0)], [33, 16, 0]);
    }

    #[test]
    fn unclaimed_protection_goes_to_usage_above_claims() {
        assert_eq!(protection(30 * MIB, 10 * MIB, (60 * MIB, 40 * MIB), 20 * MIB), 20 * MIB);
        assert_eq!(protection(10 * MIB, 10 * MIB, (60 * MIB, 40 * MIB), 20 * MIB), 10 * MIB);
        assert_eq!(protection(20 * MIB, 0, (60 * MIB, 40 * MIB), 20 * MIB), 10 * MIB);
        assert_eq!(protection(0, 10 * MIB, (0, 40 * MIB), 0), 0);
    }

    #[test]
    fn protection_never_exceeds_usage_or_parent_share() {
        for usage in [0, 1, 3 * MIB, 1 << 50, u64::MAX / 4] {
            for claim in [0, 1, 2 * MIB, u64::MAX] {
                for other in [0, 5 * MIB, u64::MAX / 4] {
                    for given in [0, 1, 4 * MIB, u64::MAX] {
                        let claimed = usage.min(claim) + other;
                        let share = protection(usage, claim, (usage + other, given), claimed);
                        assert!(share <= usage && share <= given, "{usage} {claim} {other} {given}: {share}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_delay_grows_with_the_square_and_is_bounded() {
        let at = |percent: u64| delay(100 * MIB + percent * MIB, 100 * MIB, FULL_DELAY_BYTES);
        assert_eq!((at(0), at(1)), (0, 0));
        assert!((550_000_000..700_000_000).contains(&at(10)), "{}", at(10));
        assert!(at(3) > 0 && at(6).abs_diff(4 * at(3)) < at(3) / 100);
        assert_eq!((at(90), delay(u64::MAX, 0, u64::MAX)), (DELAY_NS_MAX, DELAY_NS_MAX));
        assert_eq!(delay(110 * MIB, 100 * MIB, FULL_DELAY_BYTES / 4), at(10) / 4);
        assert_eq!(delay(110 * MIB, 100 * MIB, 64), 0);
        assert_eq!(delay(5, u64::MAX, 5), 0);
    }
}
