//! The [`Host`] of typed values: an instance, its platform, and a frame for calls that take locks.
//!
//! Counters, references and other typed values keep a host. In a process that may fork, the host
//! keeps threads out of these calls during a fork. After such a call it wakes its worker.
//! [`Standalone`] has only an instance, and does neither. This module has no lock.

use crate::data::{Charge, PerCpuData, Refused, Wait};
use crate::handle::{Handle, Invalid};
use crate::rows::Owner;
use neap_base::Platform;
use neap_base::gate::Inside;

/// An instance and its surroundings. A host consists of a few references, and every typed value
/// keeps a copy of it.
pub trait Host: Copy + Send + Sync {
    /// The platform's type.
    type Platform: Platform;
    /// The type that charges owners.
    type Charge: Charge;

    /// The platform.
    fn platform(&self) -> &Self::Platform;

    /// The instance.
    fn data(&self) -> &PerCpuData<Self::Charge>;

    /// Runs `body`, which may take locks. A fork waits meanwhile, so no child gets a copy of a held
    /// lock. `body` must not call `inside`, `try_inside`, `allocate` or `free` of the host. It gets
    /// the proof that functions for callers inside the fork gate require.
    #[inline]
    fn inside<R>(&self, body: impl FnOnce(&Inside<'_>) -> R) -> R {
        Inside::assume(body)
    }

    /// Runs `body` as [`Host::inside`] does, or returns `None` if that would wait.
    #[inline]
    fn try_inside<R>(&self, body: impl FnOnce(&Inside<'_>) -> R) -> Option<R> {
        Some(Inside::assume(body))
    }

    /// Calls [`PerCpuData::allocate`].
    ///
    /// # Errors
    /// See [`Refused`].
    fn allocate(&self, owner: Owner, size: usize, align: usize, wait: Wait) -> Result<Handle, Refused> {
        self.data().allocate(self.platform(), owner, size, align, wait)
    }

    /// Calls [`PerCpuData::free`].
    ///
    /// # Errors
    /// See [`Invalid`].
    ///
    /// # Safety
    /// No thread uses the allocation any more.
    unsafe fn free(&self, handle: Handle) -> Result<usize, Invalid> {
        // SAFETY: the caller promises that no thread uses the allocation any more.
        unsafe { self.data().free(handle) }
    }
}

/// A host with only an instance. The program calls [`PerCpuData::tick`], and ensures that no thread
/// forks during calls.
#[derive(Debug)]
pub struct Standalone<'a, P: Platform, C: Charge = ()> {
    /// The instance.
    pub data: &'a PerCpuData<C>,
    /// The platform.
    pub platform: &'a P,
}

impl<P: Platform, C: Charge> Clone for Standalone<'_, P, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform, C: Charge> Copy for Standalone<'_, P, C> {}

impl<P: Platform, C: Charge> Host for Standalone<'_, P, C> {
    type Platform = P;
    type Charge = C;

    fn platform(&self) -> &P {
        self.platform
    }

    fn data(&self) -> &PerCpuData<C> {
        self.data
    }
}
