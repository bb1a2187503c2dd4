//! A value that the first use makes, and that stays in place.
//!
//! It is for parts of a manager that most programs never use. Reading it costs one load. A thread
//! makes the value under a mutex. The caller must prevent forks meanwhile.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, Ordering};
use neap_base::Mutex;

/// The value, or memory for it.
#[derive(Debug)]
pub(crate) struct Once<T> {
    made: AtomicBool,
    making: Mutex<()>,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: one thread writes `value` once, under `making`, before it sets `made`. From then on
// threads only share it.
unsafe impl<T: Send + Sync> Sync for Once<T> {}

impl<T> Once<T> {
    pub(crate) const fn new() -> Once<T> {
        Once { made: AtomicBool::new(false), making: Mutex::new(()), value: UnsafeCell::new(MaybeUninit::uninit()) }
    }

    /// Returns the value, if it was made.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        // Acquire pairs with the Release in `get_or_make`.
        // SAFETY: `made` is set only after the value was initialised.
        self.made.load(Ordering::Acquire).then(|| unsafe { (*self.value.get()).assume_init_ref() })
    }

    /// Returns the value. Makes it if need be.
    ///
    /// # Errors
    /// Returns the error of `make`. The value is not made then, and the next call tries again.
    pub(crate) fn get_or_make<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        let _making = self.making.lock();
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let value = make()?;
        // SAFETY: this thread holds the mutex, and `made` is not set. So the value was not written
        // before, and no other thread uses it.
        let value = unsafe { (*self.value.get()).write(value) };
        self.made.store(true, Ordering::Release); // Pairs with the Acquire in `get`.
        Ok(value)
    }
}
