//! A value for each CPU, each under its own lock.
//!
//! A thread may move to another CPU at any time. Therefore a thread accesses a copy only under the
//! copy's [`CpuLock`], and the CPU's number is a hint. [`PerCpu::here`] takes another copy if the
//! first is locked, so it does not wait for one preempted holder.

use crate::data::{Refused, Wait};
use crate::embedder::Host;
use crate::handle::Handle;
use crate::rows::Owner;
use core::marker::PhantomData;
use neap_base::cpu_lock::CpuGuard;
use neap_base::{CpuLock, Platform};

/// Attempts to take a lock between pauses.
const LOCK_TRIES_MAX: u32 = 100;

/// A value for each CPU. Dropping it frees its memory. If its owner was closed before, the caller
/// must forget this value instead of dropping it.
#[derive(Debug)]
pub struct PerCpu<T, H: Host> {
    host: H,
    handle: Handle,
    /// Number of CPUs, from the first, that have a value. After construction all have one.
    made: usize,
    value: PhantomData<T>,
}

// SAFETY: each value is `Send` and behind its lock, and is made and dropped by this value's owner.
unsafe impl<T: Send, H: Host> Send for PerCpu<T, H> {}
// SAFETY: each value is `Send` and behind its lock, which hands it to one thread at a time.
unsafe impl<T: Send, H: Host> Sync for PerCpu<T, H> {}

impl<T: Send, H: Host> PerCpu<T, H> {
    /// Creates a value for each CPU, whether the CPU exists or not. `make` receives the CPU. A
    /// value with its lock takes at least 128 bytes.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new(host: H, owner: Owner, wait: Wait, mut make: impl FnMut(usize) -> T) -> Result<Self, Refused> {
        let (size, align) = (size_of::<CpuLock<T>>(), align_of::<CpuLock<T>>());
        // If `make` panics, this value's drop drops the values made so far, and frees the memory.
        let mut made = PerCpu { host, handle: host.allocate(owner, size, align, wait)?, made: 0, value: PhantomData };
        for cpu in 0..host.data().cpus() {
            let copy = host.data().address(made.handle, cpu).cast::<CpuLock<T>>();
            // SAFETY: the copy has the requested size and alignment, and no other code uses it yet.
            unsafe { copy.write(CpuLock::new(make(cpu))) };
            made.made += 1;
        }
        Ok(made)
    }

    fn copy(&self, cpu: usize) -> &CpuLock<T> {
        // SAFETY: `new` wrote a lock into every copy, which is dropped with this value.
        unsafe { &*self.host.data().address(self.handle, cpu % self.host.data().cpus()).cast() }
    }

    /// Locks the copy of the CPU that this thread is on; `None` if it is locked.
    pub fn try_here(&self) -> Option<CpuGuard<'_, T>> {
        self.copy(self.host.platform().cpu()).try_lock()
    }

    /// Locks the copy of this CPU, or another one if it is locked.
    pub fn here(&self) -> CpuGuard<'_, T> {
        loop {
            let (first, cpus) = (self.host.platform().cpu(), self.host.data().cpus());
            if let Some(guard) = (first..first + cpus).find_map(|cpu| self.copy(cpu).try_lock()) {
                return guard;
            }
            self.host.platform().pause();
        }
    }

    /// Locks the copy of a CPU; waits for its holder.
    pub fn on(&self, cpu: usize) -> CpuGuard<'_, T> {
        loop {
            if let Some(guard) = self.copy(cpu).lock_bounded(LOCK_TRIES_MAX) {
                return guard;
            }
            self.host.platform().pause();
        }
    }

    /// Folds over all copies, and locks one at a time.
    pub fn fold<R>(&self, start: R, mut each: impl FnMut(R, &T) -> R) -> R {
        (0..self.host.data().cpus()).fold(start, |result, cpu| each(result, &self.on(cpu)))
    }
}

impl<T, H: Host> Drop for PerCpu<T, H> {
    fn drop(&mut self) {
        for cpu in 0..self.made {
            // SAFETY: `new` wrote these values, and `self` is borrowed exclusively.
            unsafe { self.host.data().address(self.handle, cpu).cast::<CpuLock<T>>().drop_in_place() };
        }
        // SAFETY: the values are dropped, and no other code uses the memory. The handle is from
        // `allocate`, so there is no error.
        let _ = unsafe { self.host.free(self.handle) };
    }
}
