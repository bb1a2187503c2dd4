//! The CPU lock, Atomic kind: one compare-and-swap, never a wait.
//!
//! Sits between per-CPU state (page lists; the object slots where restartable sequences are missing) and the two sides
//! that want it: the thread on that CPU, and anybody who drains it. Both try; whoever finds the lock taken goes another
//! way (the shared path, or "skipped"). The CPU id is a hint, the lock is the truth. A holder only detaches what it
//! wants, splices it out, and unlocks; it never sleeps and makes no system call while it holds one.

use crate::constructor;
use crate::sync::{AtomicU32, Ordering, UnsafeCell};
use core::ops::{Deref, DerefMut};

/// A value of one CPU, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub struct CpuLock<T> {
    held: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock hands the value to one thread at a time.
unsafe impl<T: Send> Sync for CpuLock<T> {}

impl<T> CpuLock<T> {
    constructor! {
        /// A free lock around `value`.
        pub fn new(value: T) -> CpuLock<T> {
            CpuLock { held: AtomicU32::new(0), value: UnsafeCell::new(value) }
        }
    }

    /// Takes the lock if it is free: from the CPU itself or from any other.
    #[inline]
    pub fn try_lock(&self) -> Option<CpuGuard<'_, T>> {
        // Acquire pairs with the Release in CpuGuard::drop: what the last holder wrote is visible.
        let taken = self.held.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| CpuGuard { lock: self })
    }

    /// The value, without taking the lock.
    ///
    /// # Safety
    /// Nobody holds the lock, and nobody takes it meanwhile.
    pub unsafe fn peek(&self) -> T
    where
        T: Copy,
    {
        // SAFETY: as the caller promises.
        self.value.with_mut(|value| unsafe { *value })
    }

    /// Takes the lock without a look at it: for measuring what the look costs.
    ///
    /// # Safety
    /// Nobody holds the lock, and nobody takes it before the guard is dropped.
    pub unsafe fn assume(&self) -> CpuGuard<'_, T> {
        CpuGuard { lock: self }
    }

    /// Gives the lock back whose guard was forgotten.
    ///
    /// # Safety
    /// The caller, or the process that forked it, took the lock and has forgotten the guard.
    pub unsafe fn unlock(&self) {
        drop(CpuGuard { lock: self });
    }

    /// Takes the lock, at most `tries` times; a remote side's bounded wait.
    pub fn lock_bounded(&self, tries: u32) -> Option<CpuGuard<'_, T>> {
        (0..tries).find_map(|_| {
            let guard = self.try_lock();
            if guard.is_none() {
                crate::sync::spin();
            }
            guard
        })
    }
}

/// The right to reach one CPU's value; gives the lock back when dropped.
#[derive(Debug)]
pub struct CpuGuard<'a, T> {
    lock: &'a CpuLock<T>,
}

impl<T> Deref for CpuGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard stands for the held lock, so nobody else reaches the value.
        self.lock.value.with_mut(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for CpuGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard itself is borrowed exclusively.
        self.lock.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> Drop for CpuGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the Acquire in try_lock.
        self.lock.held.store(0, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_taken_lock_answers_busy_and_the_next_try_gets_it() {
        let lock = CpuLock::new(1);
        let mut guard = lock.try_lock().unwrap();
        assert!(lock.try_lock().is_none() && lock.lock_bounded(3).is_none());
        *guard += 1;
        drop(guard);
        core::mem::forget(lock.lock_bounded(1).unwrap());
        assert!(lock.try_lock().is_none());
        // SAFETY: taken and forgotten above.
        unsafe { lock.unlock() };
        assert_eq!(*lock.lock_bounded(1).unwrap(), 2);
    }
}
