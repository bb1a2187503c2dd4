//! A value for each CPU, under a lock that is only tried.
//!
//! Sits between the allocator and a program's own per-CPU state. A thread may move to another CPU at any time, so a copy is
//! reached under its [`CpuLock`]: the CPU's number is a hint, the lock is the truth. Never waits for a preempted holder
//! where any copy will do.

use crate::data::{Handle, Refused, Wait};
use crate::host::Host;
use crate::rows::Owner;
use core::marker::PhantomData;
use neap_base::cpu_lock::CpuGuard;
use neap_base::{CpuLock, Platform};

/// Turns of a wait between pauses.
const TURNS: u32 = 100;

/// A value for each CPU. Frees itself; where its owner is closed instead, it must be forgotten.
#[derive(Debug)]
pub struct PerCpu<T, H: Host> {
    host: H,
    handle: Handle,
    /// CPUs, from the first, that have a value: all of them, once it is made.
    made: usize,
    value: PhantomData<T>,
}

// SAFETY: values are behind locks, as in a mutex, and are made and dropped by whoever has this one.
unsafe impl<T: Send, H: Host> Send for PerCpu<T, H> {}
// SAFETY: as above.
unsafe impl<T: Send, H: Host> Sync for PerCpu<T, H> {}

impl<T: Send, H: Host> PerCpu<T, H> {
    /// A value for each CPU, whether it exists or not; `make` is told which. With its lock a value takes at least 128 bytes.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new(host: H, owner: Owner, wait: Wait, mut make: impl FnMut(usize) -> T) -> Result<Self, Refused> {
        let (size, align) = (size_of::<CpuLock<T>>(), align_of::<CpuLock<T>>());
        // Its drop drops the values that there are, and frees: also if `make` panics.
        let mut made = PerCpu { host, handle: host.allocate(owner, size, align, wait)?, made: 0, value: PhantomData };
        for cpu in 0..host.data().cpus() {
            let copy = host.data().address(made.handle, cpu).cast::<CpuLock<T>>();
            // SAFETY: the copy is as large and aligned as asked for, and nobody else's.
            unsafe { copy.write(CpuLock::new(make(cpu))) };
            made.made += 1;
        }
        Ok(made)
    }

    fn copy(&self, cpu: usize) -> &CpuLock<T> {
        // SAFETY: written by `new`, dropped with this value.
        unsafe { &*self.host.data().address(self.handle, cpu % self.host.data().cpus()).cast() }
    }

    /// The copy of the CPU that this thread is on, unless somebody has it.
    pub fn try_here(&self) -> Option<CpuGuard<'_, T>> {
        self.copy(self.host.platform().cpu()).try_lock()
    }

    /// The copy of this CPU, or of another one where that is taken.
    pub fn here(&self) -> CpuGuard<'_, T> {
        loop {
            let (first, cpus) = (self.host.platform().cpu(), self.host.data().cpus());
            if let Some(guard) = (first..first + cpus).find_map(|cpu| self.copy(cpu).try_lock()) {
                return guard;
            }
            self.host.platform().pause();
        }
    }

    /// The copy of a CPU; waits for whoever has it.
    pub fn on(&self, cpu: usize) -> CpuGuard<'_, T> {
        loop {
            if let Some(guard) = self.copy(cpu).lock_bounded(TURNS) {
                return guard;
            }
            self.host.platform().pause();
        }
    }

    /// All copies, one after the other.
    pub fn fold<R>(&self, start: R, mut each: impl FnMut(R, &T) -> R) -> R {
        (0..self.host.data().cpus()).fold(start, |result, cpu| each(result, &self.on(cpu)))
    }
}

impl<T, H: Host> Drop for PerCpu<T, H> {
    fn drop(&mut self) {
        for cpu in 0..self.made {
            // SAFETY: written by `new`, and used by nobody any more.
            unsafe { self.host.data().address(self.handle, cpu).cast::<CpuLock<T>>().drop_in_place() };
        }
        // SAFETY: as above. The handle is as it was given, so there is no error.
        let _ = unsafe { self.host.free(self.handle) };
    }
}
