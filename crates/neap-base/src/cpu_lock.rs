//! The CPU lock protects the state of one CPU. A thread takes it by one compare-and-swap.
//!
//! It protects page lists, and object stacks where restartable sequences are missing. Two sides
//! take it: the thread on that CPU, and any thread that drains the CPU. Neither side sleeps until
//! the lock is free. A draining thread retries a bounded number of times. A thread that does not
//! get the lock uses the shared path, or counts the CPU as skipped. A thread may migrate after it
//! has read its CPU id, so only the lock protects the state. A holder detaches objects or pages,
//! and unlocks. It never sleeps and makes no system call.

use crate::constructor;
use crate::sync::{AtomicU32, Ordering, UnsafeCell};
use core::mem::offset_of;
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
        /// Creates a free lock around `value`.
        pub fn new(value: T) -> CpuLock<T> {
            CpuLock { held: AtomicU32::new(0), value: UnsafeCell::new(value) }
        }
    }

    /// Offset of the value, for readers of this process's memory.
    pub const VALUE_AT: usize = offset_of!(CpuLock<T>, value);

    /// Takes the lock if it is free. May be called on the CPU itself and on any other.
    #[inline]
    pub fn try_lock(&self) -> Option<CpuGuard<'_, T>> {
        // Acquire pairs with the Release in CpuGuard::drop: the last holder's stores are visible.
        let taken = self.held.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| CpuGuard { lock: self })
    }

    /// Returns a copy of the value without taking the lock.
    ///
    /// # Safety
    /// No thread holds the lock except the caller by a forgotten guard, and no thread takes it
    /// meanwhile.
    pub unsafe fn peek(&self) -> T
    where
        T: Copy,
    {
        // SAFETY: the caller promises that no other thread holds the lock or takes it, so the value
        // does not change.
        self.value.with_mut(|value| unsafe { *value })
    }

    /// Returns a guard without taking the lock, to measure the cost of taking it.
    ///
    /// # Safety
    /// No thread holds the lock, and no thread takes it before the guard is dropped.
    pub unsafe fn assume(&self) -> CpuGuard<'_, T> {
        CpuGuard { lock: self }
    }

    /// Frees a lock whose guard was forgotten.
    ///
    /// # Safety
    /// The caller, or the process that forked it, took the lock and forgot the guard.
    pub unsafe fn unlock(&self) {
        drop(CpuGuard { lock: self });
    }

    /// Takes the lock in at most `tries` attempts. Threads on other CPUs use this as a bounded
    /// wait.
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

/// Access to a CPU's value. Its drop frees the lock.
#[derive(Debug)]
pub struct CpuGuard<'a, T> {
    lock: &'a CpuLock<T>,
}

impl<T> Deref for CpuGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: while the guard exists, no other thread has one: this thread holds the lock, or
        // `assume` made the guard. So no other thread accesses the value.
        self.lock.value.with_mut(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for CpuGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: while the guard exists, no other thread has one: this thread holds the lock, or
        // `assume` made the guard. The guard itself is borrowed exclusively.
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
        // SAFETY: this thread took the lock above, and forgot the guard.
        unsafe { lock.unlock() };
        assert_eq!(*lock.lock_bounded(1).unwrap(), 2);
    }
}
