//! A mutex that fork finds free.

use neap_base::Mutex;
use neap_base::gate::Inside;
use neap_base::mutex::Guard;

/// A mutex that threads take only inside the fork gate. Fork waits until no thread is inside, so a
/// child inherits the mutex unlocked.
#[derive(Debug)]
pub(crate) struct GatedMutex<T>(Mutex<T>);

impl<T> GatedMutex<T> {
    pub(crate) const fn new(value: T) -> GatedMutex<T> {
        GatedMutex(Mutex::new(value))
    }

    /// Locks the mutex until the thread leaves the gate, or earlier.
    #[inline]
    pub(crate) fn lock<'a>(&'a self, _: &'a Inside<'_>) -> Guard<'a, T> {
        self.0.lock()
    }

    /// Locks the mutex as [`GatedMutex::lock`] does, unless another thread holds it.
    #[inline]
    pub(crate) fn try_lock<'a>(&'a self, _: &'a Inside<'_>) -> Option<Guard<'a, T>> {
        self.0.try_lock()
    }
}
