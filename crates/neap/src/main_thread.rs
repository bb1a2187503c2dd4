//! The end of the main thread while the process goes on.
//!
//! # Design
//! A process ends with the last of its threads when the main thread has ended by `pthread_exit`,
//! `thrd_exit` or cancellation. The C library counts neap's threads like all others. So they end
//! with the main thread, for good:
//! 1. The main thread has a value of a key whose destructor the C library calls in all three cases,
//!    and not at `exit`.
//! 2. The destructor has neap's thread end, and waits for it.
//! 3. Reclaimers end after the callback that they are in; they are not waited for.
//!
//! The value is set when the main thread makes neap's thread, as it does where it makes the
//! program's first thread.

use crate::process::PROCESS;
use core::ffi::c_void;
use core::sync::atomic::Ordering;
use neap_os::own_thread;
use neap_os::thread;

/// Has neap's threads end with the calling thread, if that is the main thread. One call at a time.
pub(crate) fn notice_end() {
    if thread::id() != thread::process_id() {
        return;
    }
    let (known, functions) = (&PROCESS.of_process.key, &PROCESS.of_process.functions);
    // Relaxed: written by the thread that makes neap's thread.
    if known.load(Ordering::Relaxed) == 0 {
        // If all 1024 keys of the process are used, the end of the main thread goes unnoticed.
        let Some(key) = own_thread::make_key(functions, ended) else { return };
        known.store(key + 1, Ordering::Relaxed);
    }
    // The destructor is called for values that are not null.
    own_thread::set_value(functions, known.load(Ordering::Relaxed) - 1, core::ptr::from_ref(known).cast());
}

extern "C" fn ended(_: *mut c_void) {
    if let Some(reclaiming) = PROCESS.reclaiming_if_made() {
        reclaiming.dismiss();
    }
    PROCESS.end_background(|id| {
        // SAFETY: `spawn` made it as one that is joined, in this process: a child forgets it.
        unsafe { own_thread::join(&PROCESS.of_process.functions, id as _) };
    });
}
