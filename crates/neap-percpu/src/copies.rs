//! A value for each CPU, under a lock that is only tried.
//!
//! Sits between the allocator and a program's own per-CPU state. A thread may move to another CPU at any time, so a copy is
//! reached under its [`CpuLock`]: the CPU's number is a hint, the lock is the truth. Never waits for a preempted holder
//! where any copy will do.

use crate::data::{Charge, Handle, PerCpuData, Refused, Wait};
use crate::rows::Owner;
use core::marker::PhantomData;
use neap_base::cpu_lock::CpuGuard;
use neap_base::{CpuLock, Platform};

/// Turns of a wait between pauses.
const TURNS: u32 = 100;

/// Where a typed value lives: an instance, its platform, and who owns the memory.
#[derive(Debug)]
pub struct Site<'a, P: Platform, C: Charge = ()> {
    /// The instance.
    pub data: &'a PerCpuData<C>,
    /// The machine.
    pub platform: &'a P,
    /// The owner.
    pub owner: Owner,
}

impl<P: Platform, C: Charge> Clone for Site<'_, P, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform, C: Charge> Copy for Site<'_, P, C> {}

/// A value for each CPU. Frees itself; where its owner is closed instead, it must be forgotten.
#[derive(Debug)]
pub struct PerCpu<'a, T, P: Platform, C: Charge = ()> {
    site: Site<'a, P, C>,
    handle: Handle,
    value: PhantomData<T>,
}

// SAFETY: values are behind locks, as in a mutex, and are made and dropped by whoever has this one.
unsafe impl<T: Send, P: Platform, C: Charge> Send for PerCpu<'_, T, P, C> {}
// SAFETY: as above.
unsafe impl<T: Send, P: Platform, C: Charge> Sync for PerCpu<'_, T, P, C> {}

impl<'a, T: Send, P: Platform, C: Charge> PerCpu<'a, T, P, C> {
    /// A value for each CPU, whether it exists or not; `make` is told which. With its lock a value takes at least 128 bytes.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`].
    pub fn new(site: Site<'a, P, C>, wait: Wait, mut make: impl FnMut(usize) -> T) -> Result<Self, Refused> {
        let (size, align) = (size_of::<CpuLock<T>>(), align_of::<CpuLock<T>>());
        let handle = site.data.allocate(site.platform, site.owner, size, align, wait)?;
        for cpu in 0..site.data.cpus() {
            // SAFETY: the copy is as large and aligned as asked for, and nobody else's.
            unsafe { site.data.address(handle, cpu).cast::<CpuLock<T>>().write(CpuLock::new(make(cpu))) };
        }
        Ok(PerCpu { site, handle, value: PhantomData })
    }

    fn copy(&self, cpu: usize) -> &CpuLock<T> {
        // SAFETY: written by `new`, dropped with this value.
        unsafe { &*self.site.data.address(self.handle, cpu % self.site.data.cpus()).cast() }
    }

    /// The copy of the CPU that this thread is on, unless somebody has it.
    pub fn try_here(&self) -> Option<CpuGuard<'_, T>> {
        self.copy(self.site.platform.cpu()).try_lock()
    }

    /// The copy of this CPU, or of another one where that is taken.
    pub fn here(&self) -> CpuGuard<'_, T> {
        loop {
            let (first, cpus) = (self.site.platform.cpu(), self.site.data.cpus());
            if let Some(guard) = (first..first + cpus).find_map(|cpu| self.copy(cpu).try_lock()) {
                return guard;
            }
            self.site.platform.pause();
        }
    }

    /// The copy of a CPU; waits for whoever has it.
    pub fn on(&self, cpu: usize) -> CpuGuard<'_, T> {
        loop {
            if let Some(guard) = self.copy(cpu).lock_bounded(TURNS) {
                return guard;
            }
            self.site.platform.pause();
        }
    }

    /// All copies, one after the other.
    pub fn fold<R>(&self, start: R, mut each: impl FnMut(R, &T) -> R) -> R {
        (0..self.site.data.cpus()).fold(start, |result, cpu| each(result, &self.on(cpu)))
    }
}

impl<T, P: Platform, C: Charge> Drop for PerCpu<'_, T, P, C> {
    fn drop(&mut self) {
        for cpu in 0..self.site.data.cpus() {
            // SAFETY: written by `new`, and used by nobody any more.
            unsafe { self.site.data.address(self.handle, cpu).cast::<CpuLock<T>>().drop_in_place() };
        }
        // SAFETY: as above. The handle is as it was given, so there is no error.
        let _ = unsafe { self.site.data.free(self.handle) };
    }
}
