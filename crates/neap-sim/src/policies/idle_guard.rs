//! `IdleGuard`: Linux's policy with a guard against the decay of a size that the program needed
//! recently.
//!
//! For comparison only. Each allocation tracks the least count since the last decay. If that count
//! was less than a batch, the pages were in use, and the size does not decay. The guard was posted
//! for Linux, but not merged, since no benchmark showed a gain.

use neap_pages::policy::{Limits, List, Policy, ZoneState};

use super::upstream::Upstream;

/// The numbers of one list.
#[derive(Clone, Copy, Debug)]
pub struct IdleGuard {
    upstream: Upstream,
    count_min_since_decay: u32,
}

impl Policy for IdleGuard {
    fn new(limits: &Limits) -> IdleGuard {
        IdleGuard { upstream: Upstream::new(limits), count_min_since_decay: u32::MAX }
    }

    fn high(&self) -> u32 {
        self.upstream.high()
    }

    fn batch(&self, limits: &Limits) -> u32 {
        self.upstream.batch(limits)
    }

    fn asked(&mut self, list: List, order: u8) {
        self.count_min_since_decay = self.count_min_since_decay.min(list.count.saturating_sub(1 << order));
        self.upstream.asked(list, order);
    }

    fn put<'a>(&mut self, list: List, order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        self.upstream.put(list, order, supply)
    }

    fn refill(&mut self, list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        self.upstream.refill(list, order, supply)
    }

    fn decay(&mut self, list: List, supply: &ZoneState<'_>, quarters: u32) -> u32 {
        if !self.upstream.is_second(quarters) {
            return 0;
        }
        let count_min_since_decay = core::mem::replace(&mut self.count_min_since_decay, list.count);
        if count_min_since_decay < supply.limits.fixed.batch {
            return list.count.saturating_sub(self.upstream.high());
        }
        self.upstream.second(list.count, supply.limits)
    }

    fn is_settled(&self, limits: &Limits) -> bool {
        self.upstream.is_settled(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::test_inputs::{limits, supply};

    #[test]
    fn idle_guard_keeps_size_of_emptied_list_and_decays_others() {
        let bounds = limits(1 << 18, 2);
        let plenty = supply(&bounds, u32::MAX);
        let mut policy = IdleGuard::new(&bounds);
        (0..6).for_each(|_| _ = policy.refill(List { count: 0, moved: 0 }, 0, &plenty));
        let high = policy.high();
        policy.asked(List { count: 64, moved: 0 }, 1);
        assert_eq!((policy.decay(List { count: 3000, moved: 0 }, &plenty, 4), policy.high()), (0, high));
        policy.asked(List { count: 64, moved: 0 }, 0);
        policy.decay(List { count: 3000, moved: 0 }, &plenty, 4);
        assert_eq!(policy.high(), high - high / 8);
    }
}
