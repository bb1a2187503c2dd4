//! The end of the main thread while the process goes on.
//!
//! # Design
//! If the main thread ends by `pthread_exit`, `thrd_exit` or cancellation, the process goes on
//! until its last thread ends. The C library counts neap's threads like all others. So neap's
//! threads must end when the main thread ends:
//! 1. The main thread has a value for a key of thread-specific data. The C library calls the key's
//!    destructor in all three cases, and not at `exit`.
//! 2. The destructor makes each reclaimer end after the callback that it runs, and does not wait
//!    for it.
//! 3. The destructor makes neap's thread end, and waits for it.
//!
//! neap sets the value when the main thread makes neap's thread. That usually happens when the main
//! thread makes the program's first thread. If another thread makes neap's thread, neap sets no
//! value.

use crate::process::PROCESS;
use core::ffi::c_void;
use core::sync::atomic::Ordering;
use neap_os::own_thread;
use neap_os::thread;

/// Makes neap's threads end with the calling thread, if that is the main thread. Two threads must
/// not call this at the same time.
pub(crate) fn notice_end() {
    if thread::id() != thread::process_id() {
        return;
    }
    let (known, functions) = (&PROCESS.of_process.key, &PROCESS.of_process.functions);
    // Relaxed: only the thread that makes neap's thread writes this word.
    if known.load(Ordering::Relaxed) == 0 {
        // If all 1024 keys of the process are used, the end of the main thread goes unnoticed.
        let Some(key) = own_thread::make_key(functions, ended) else { return };
        known.store(key + 1, Ordering::Relaxed);
    }
    // The C library calls the destructor only for values that are not null.
    own_thread::set_value(functions, known.load(Ordering::Relaxed) - 1, core::ptr::from_ref(known).cast());
}

extern "C" fn ended(_: *mut c_void) {
    if let Some(reclaiming) = PROCESS.reclaiming_if_made() {
        reclaiming.reclaim.jobs.dismiss(&reclaiming.source.enter());
    }
    PROCESS.end_background(|id| {
        // SAFETY: `spawn` made the thread as `End::Joined`, in this process, since a forked child
        // forgets the id. `end_background` passes each id only once, so the thread was not joined
        // yet.
        unsafe { own_thread::join(&PROCESS.of_process.functions, id as _) };
    });
}
