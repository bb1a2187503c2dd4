//! The lock of the C library's list of streams, which its `fork` takes after the fork handlers.
//!
//! A fork handler that keeps other threads from allocating must take this lock first. Otherwise:
//!
//! | reader | flusher | forking thread |
//! |---|---|---|
//! | 1. locks a stream | | |
//! | | 2. locks the list, waits for the stream | |
//! | | | 3. stops allocations, waits for the list |
//! | 4. needs a longer buffer, waits for the forking thread | | |
//!
//! With the list's lock taken first, the forking thread waits before it stops allocations. The lock
//! is recursive. In C libraries without these functions, all calls do nothing.

macro_rules! call {
    ($name:literal) => {
        let function = crate::weak_variable!($name, address);
        if function != 0 {
            // SAFETY: glibc's functions of these names take no argument and return nothing.
            unsafe { core::mem::transmute::<usize, extern "C" fn()>(function)() };
        }
    };
}

/// Takes the lock; it is recursive. Waits for a thread that flushes all streams, as `fork` does.
pub fn lock() {
    call!("_IO_list_lock");
}

/// Undoes one [`lock`].
pub fn unlock() {
    call!("_IO_list_unlock");
}

/// Resets the lock in a forked child. `fork` has done so already if the parent had several threads.
pub fn forget() {
    call!("_IO_list_resetlock");
}
