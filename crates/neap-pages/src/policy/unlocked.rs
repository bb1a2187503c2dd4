//! Lists without a lock: what the lock of a CPU's list costs, by leaving it out.
//!
//! Sits between a benchmark and [`Adaptive`], which does all the work. Two threads on one CPU, or a drain, would break such
//! lists, so only who can rule both out may open them.

use super::{Adaptive, Limits, List, Policy, Supply};
use crate::pages::{Pages, Shape};
use neap_base::Platform;
use neap_base::platform::Errno;

/// [`Adaptive`], of lists that are not locked by their owners.
#[derive(Clone, Copy, Debug)]
pub struct Unlocked(Adaptive);

impl Policy for Unlocked {
    const LOCKED: bool = false;

    fn new(limits: &Limits) -> Unlocked {
        Unlocked(Adaptive::new(limits))
    }

    fn high(&self) -> u32 {
        self.0.high()
    }

    fn batch(&self, limits: &Limits) -> u32 {
        self.0.batch(limits)
    }

    #[inline]
    fn asked(&mut self, list: List, order: u8) {
        self.0.asked(list, order);
    }

    #[inline]
    fn put<'a>(&mut self, list: List, order: u8, supply: impl FnOnce() -> Supply<'a>) -> u32 {
        self.0.put(list, order, supply)
    }

    fn refill(&mut self, list: List, order: u8, supply: &Supply<'_>) -> u32 {
        self.0.refill(list, order, supply)
    }

    fn contended(&mut self, supply: &Supply<'_>) {
        self.0.contended(supply);
    }

    fn decay(&mut self, list: List, supply: &Supply<'_>, quarters: u32) -> u32 {
        self.0.decay(list, supply, quarters)
    }

    fn pressure(&mut self, list: List, supply: &Supply<'_>) -> u32 {
        self.0.pressure(list, supply)
    }

    fn is_settled(&self, limits: &Limits) -> bool {
        self.0.is_settled(limits)
    }
}

impl<P: Platform> Pages<P, Unlocked> {
    /// Pages whose lists are not locked.
    ///
    /// # Errors
    /// As for [`Pages::open`].
    ///
    /// # Safety
    /// Threads that allocate and free blocks stay on CPUs of their own, one on each, and nobody drains or ticks.
    pub unsafe fn open_unlocked(platform: &P, shape: &Shape) -> Result<Pages<P, Unlocked>, Errno> {
        Pages::open_tuned(platform, shape)
    }
}
