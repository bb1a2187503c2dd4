//! State that only the process's manager uses. Managers that a program makes do not use it.

use crate::once::Once;
use core::sync::atomic::{AtomicBool, AtomicU32};
use neap_os::own_thread::Functions;
use neap_os::signal::Action;
use neap_os::stdio_lock::StreamsLock;

/// State of the process's manager alone.
#[derive(Debug)]
pub(crate) struct OfProcess {
    /// The C library's functions for threads.
    pub(crate) functions: Functions,
    /// One more than the key of the [main thread's end](crate::main_thread); 0: no key.
    pub(crate) key: AtomicU32,
    /// The lock that a fork takes before it closes the gate.
    pub(crate) streams: StreamsLock,
    /// The action for SIGSEGV that was set before the handler of guarded samples.
    pub(crate) at_faults: Once<Action>,
    /// Whether a thread has begun to report a misuse of guarded memory.
    pub(crate) has_reported: AtomicBool,
}

impl OfProcess {
    pub(crate) const fn new() -> OfProcess {
        OfProcess {
            functions: Functions::new(),
            key: AtomicU32::new(0),
            streams: StreamsLock::new(),
            at_faults: Once::new(),
            has_reported: AtomicBool::new(false),
        }
    }
}
