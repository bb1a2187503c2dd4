//! A mutex that sleeps in the kernel and needs no memory but its own word.
//!
//! std's mutex may allocate, and needs std. The crate `lock_api` requires each lock type to have a
//! constant, which loom's atomics do not allow. Therefore this module has a guard of its own. The
//! mutex is not fair and not recursive. It has no poisoning, since neap's code does not unwind. No
//! mutex is held across a system call that can block, except the turn of per-CPU data.
//!
//! Source: U. Drepper, "Futexes Are Tricky", 2011, mutex 2.

use crate::constructor;
use crate::sync::{AtomicU32, Ordering, SPINS_MAX, UnsafeCell, spin, wait, wake};
use core::mem::offset_of;
use core::ops::{Deref, DerefMut};

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and a thread may sleep.
const CONTENDED: u32 = 2;

/// A value that one thread at a time can access.
#[derive(Debug)]
pub struct Mutex<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock hands the value to one thread at a time.
unsafe impl<T: Send> Sync for Mutex<T> {}
// SAFETY: moving the mutex moves the value.
unsafe impl<T: Send> Send for Mutex<T> {}

impl<T> Mutex<T> {
    constructor! {
        /// Creates a free mutex around `value`.
        pub fn new(value: T) -> Mutex<T> {
            Mutex { state: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
        }
    }

    /// Offset of the value, for readers of this process's memory.
    pub const VALUE_AT: usize = offset_of!(Mutex<T>, value);

    /// Waits until the mutex is free and takes it.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        self.try_lock().unwrap_or_else(|| self.lock_contended())
    }

    /// Takes the mutex if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        // Acquire pairs with the Release in Guard::drop: the last holder's stores are visible.
        let taken = self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| Guard { mutex: self })
    }

    /// Returns the value without a store; `None` if the mutex is held.
    ///
    /// # Safety
    /// While the reference is used, no thread takes the mutex, this one included.
    pub unsafe fn peek(&self) -> Option<&T> {
        // Acquire pairs with the Release in Guard::drop: the last holder's stores are visible.
        let is_free = self.state.load(Ordering::Acquire) == FREE;
        // SAFETY: the mutex is free, and the caller promises that no thread takes it while the
        // reference is used. So no code changes the value.
        is_free.then(|| self.value.with_mut(|value| unsafe { &*value }))
    }

    #[cold]
    fn lock_contended(&self) -> Guard<'_, T> {
        for _ in 0..SPINS_MAX {
            spin();
            if self.state.load(Ordering::Relaxed) == FREE
                && let Some(guard) = self.try_lock()
            {
                return guard;
            }
        }
        // Acquire pairs with the Release in Guard::drop. A lock taken as CONTENDED without a
        // sleeper costs one needless wake-up. A lock taken as HELD with a sleeper would lose the
        // sleeper's wake-up.
        while self.state.swap(CONTENDED, Ordering::Acquire) != FREE {
            wait(&self.state, CONTENDED);
        }
        Guard { mutex: self }
    }
}

/// Access to the value. Its drop frees the mutex.
#[derive(Debug)]
pub struct Guard<'a, T> {
    mutex: &'a Mutex<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists only while the lock is held, so no other thread accesses the
        // value.
        self.mutex.value.with_mut(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists only while the lock is held, and is itself borrowed exclusively.
        self.mutex.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the Acquire of the next holder in try_lock and lock_contended.
        let state = self.mutex.state.swap(FREE, Ordering::Release);
        debug_assert!(state != FREE, "a mutex is freed that was not held");
        if state == CONTENDED {
            wake(&self.mutex.state, 1);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn four_threads_count_without_losing_one() {
        let mutex = Mutex::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50_000).for_each(|_| *mutex.lock() += 1));
            }
        });
        assert_eq!(*mutex.lock(), 200_000);
    }

    #[test]
    fn a_held_mutex_is_not_taken_twice() {
        let mutex = Mutex::new(());
        let guard = mutex.lock();
        assert!(mutex.try_lock().is_none());
        // SAFETY: no other thread has the mutex.
        assert_eq!(unsafe { mutex.peek() }, None);
        drop(guard);
        // SAFETY: no other thread has the mutex.
        assert_eq!(unsafe { mutex.peek() }, Some(&()));
        assert!(mutex.try_lock().is_some());
    }
}
