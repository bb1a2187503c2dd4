//! Lists without a lock, to measure the cost of the lock of a CPU's list.
//!
//! [`Adaptive`] is the policy. Two threads on one CPU, or a drain, would corrupt such lists, so
//! their opener must exclude both.

use super::{Adaptive, Limits, List, Policy, ZoneState};
use crate::pages::Pages;
use crate::shape::Shape;
use neap_base::Platform;
use neap_base::platform::Errno;

/// [`Adaptive`] for lists that their owners do not lock.
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
    fn put<'a>(&mut self, list: List, order: u8, supply: impl FnOnce() -> ZoneState<'a>) -> u32 {
        self.0.put(list, order, supply)
    }

    fn refill(&mut self, list: List, order: u8, supply: &ZoneState<'_>) -> u32 {
        self.0.refill(list, order, supply)
    }

    fn contended(&mut self, supply: &ZoneState<'_>) {
        self.0.contended(supply);
    }

    fn decay(&mut self, list: List, supply: &ZoneState<'_>, quarters: u32) -> u32 {
        self.0.decay(list, supply, quarters)
    }

    fn pressure(&mut self, list: List, supply: &ZoneState<'_>) -> u32 {
        self.0.pressure(list, supply)
    }

    fn is_settled(&self, limits: &Limits) -> bool {
        self.0.is_settled(limits)
    }
}

impl<P: Platform> Pages<P, Unlocked> {
    /// Opens pages whose lists are not locked.
    ///
    /// # Errors
    /// The platform's error.
    ///
    /// # Safety
    /// Threads that allocate and free blocks stay on CPUs of their own, one on each, and no thread
    /// drains or ticks.
    pub unsafe fn open_unlocked(platform: &P, shape: &Shape) -> Result<Pages<P, Unlocked>, Errno> {
        Pages::open_tuned(platform, shape)
    }
}
