//! A value that is made at first use, and stays in place.
//!
//! It is for parts of a manager that most programs never use. A look at it costs one load. The
//! value is made under a mutex. The caller keeps forks away meanwhile.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, Ordering};
use neap_base::Mutex;

/// The value, or room for it.
#[derive(Debug)]
pub(crate) struct Once<T> {
    made: AtomicBool,
    making: Mutex<()>,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: `value` is written once, under `making`, before `made` is set; from then on it is only
// shared.
unsafe impl<T: Send + Sync> Sync for Once<T> {}

impl<T> Once<T> {
    pub(crate) const fn new() -> Once<T> {
        Once { made: AtomicBool::new(false), making: Mutex::new(()), value: UnsafeCell::new(MaybeUninit::uninit()) }
    }

    /// Returns the value, if it was made.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        // Acquire pairs with the Release in `get_or_make`.
        // SAFETY: `made` is set after the value was initialised.
        self.made.load(Ordering::Acquire).then(|| unsafe { (*self.value.get()).assume_init_ref() })
    }

    /// Returns the value. Makes it if need be.
    ///
    /// # Errors
    /// The error of `make`. The next call tries again.
    pub(crate) fn get_or_make<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        let _making = self.making.lock();
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let value = make()?;
        // SAFETY: the thread holds the mutex, and `made` is not set, so the value was not written
        // and no other thread reads it.
        let value = unsafe { (*self.value.get()).write(value) };
        self.made.store(true, Ordering::Release); // Pairs with the Acquire in `get`.
        Ok(value)
    }
}
