//! What typed values live in: an instance, its machine, and what a composition puts around calls that take locks.
//!
//! Sits between counters, references and the like (below: their words) and whoever has an instance. A composition whose process
//! may fork lets nobody into these calls while it does, and wakes its worker after them; an instance by itself, [`Alone`], does
//! neither. No locks of its own.

use crate::data::{Charge, Handle, Invalid, PerCpuData, Refused, Wait};
use crate::rows::Owner;
use neap_base::Platform;

/// An instance and what is around it. A value of it is a few references, which every typed value keeps.
pub trait Host: Copy + Send + Sync {
    /// The machine.
    type Platform: Platform;
    /// Who pays.
    type Charge: Charge;

    /// The machine.
    fn platform(&self) -> &Self::Platform;

    /// The instance.
    fn data(&self) -> &PerCpuData<Self::Charge>;

    /// Runs `body`, which may take locks, at a time when no fork copies them held. `body` comes back neither here nor to the
    /// two functions below.
    fn inside<R>(&self, body: impl FnOnce() -> R) -> R {
        body()
    }

    /// The same, unless it would take waiting.
    fn try_inside<R>(&self, body: impl FnOnce() -> R) -> Option<R> {
        Some(body())
    }

    /// [`PerCpuData::allocate`].
    ///
    /// # Errors
    /// As there.
    fn allocate(&self, owner: Owner, size: usize, align: usize, wait: Wait) -> Result<Handle, Refused> {
        self.data().allocate(self.platform(), owner, size, align, wait)
    }

    /// [`PerCpuData::free`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    unsafe fn free(&self, handle: Handle) -> Result<usize, Invalid> {
        // SAFETY: as the caller promises.
        unsafe { self.data().free(handle) }
    }
}

/// An instance by itself: its owner ticks, and keeps forks away.
#[derive(Debug)]
pub struct Alone<'a, P: Platform, C: Charge = ()> {
    /// The instance.
    pub data: &'a PerCpuData<C>,
    /// The machine.
    pub platform: &'a P,
}

impl<P: Platform, C: Charge> Clone for Alone<'_, P, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform, C: Charge> Copy for Alone<'_, P, C> {}

impl<P: Platform, C: Charge> Host for Alone<'_, P, C> {
    type Platform = P;
    type Charge = C;

    fn platform(&self) -> &P {
        self.platform
    }

    fn data(&self) -> &PerCpuData<C> {
        self.data
    }
}
