//! What the process's manager has beside those that a program makes.

use core::sync::atomic::AtomicU32;
use neap_os::own_thread::Functions;

/// State of the process's manager alone.
#[derive(Debug)]
pub(crate) struct OfProcess {
    /// The C library's functions for threads.
    pub(crate) functions: Functions,
    /// The key plus one; 0 for none.
    pub(crate) key: AtomicU32,
}

impl OfProcess {
    pub(crate) const fn new() -> OfProcess {
        OfProcess { functions: Functions::new(), key: AtomicU32::new(0) }
    }
}
