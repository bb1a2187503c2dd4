//! A value that is made when it is first asked for, and stays where it is.
//!
//! Sits in a manager, for parts that most programs never ask for. Without it: one load for each
//! look. One mutex, for making it; whoever may fork meanwhile keeps forks away.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, Ordering};
use neap_base::Mutex;

/// The value, or room for it.
#[derive(Debug)]
pub(crate) struct Lazy<T> {
    made: AtomicBool,
    making: Mutex<()>,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: `value` is written once, before `made` says so.
unsafe impl<T: Send + Sync> Sync for Lazy<T> {}

impl<T> Lazy<T> {
    pub(crate) const fn new() -> Lazy<T> {
        Lazy { made: AtomicBool::new(false), making: Mutex::new(()), value: UnsafeCell::new(MaybeUninit::uninit()) }
    }

    /// The value, if there is one.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        // Acquire pairs with the Release in `get_or_make`. SAFETY: the flag says that it is
        // initialised.
        self.made.load(Ordering::Acquire).then(|| unsafe { (*self.value.get()).assume_init_ref() })
    }

    /// The value, which is made where there is none.
    ///
    /// # Errors
    /// That of `make`; the next call tries again.
    pub(crate) fn get_or_make<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        let _making = self.making.lock();
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let value = make()?;
        // SAFETY: only whoever has the mutex writes it, once, and nobody reads it before the flag
        // says so.
        let value = unsafe { (*self.value.get()).write(value) };
        self.made.store(true, Ordering::Release); // Pairs with the Acquire in `get`.
        Ok(value)
    }
}
