//! The lock of the C library's list of streams, which its `fork` takes when the handlers have run.
//!
//! Sits between fork handlers and stdio, for who keeps others from allocating from a handler on: 1. A thread reads a line, and has the stream's lock. 2. Another
//! flushes all streams: it has the list's lock, and waits for the stream's. 3. A third forks: allocations wait for it from its handler on, and it waits for the
//! list's. 4. The first needs a longer buffer, and waits for the third. With the list's lock taken first the third is still before its handler. The
//! lock counts how often its thread has taken it. C libraries that have no such lock under these names are left alone.

use crate::rseq::weak_variable;

macro_rules! call {
    ($name:literal) => {
        let function = weak_variable!($name, "");
        if function != 0 {
            // SAFETY: glibc's function of this name takes nothing and answers nothing.
            unsafe { core::mem::transmute::<usize, extern "C" fn()>(function)() };
        }
    };
}

/// Takes it, once more where the thread has it. Waits for who flushes all streams, as `fork` does.
pub fn lock() {
    call!("_IO_list_lock");
}

/// Takes one [`lock`] back.
pub fn unlock() {
    call!("_IO_list_unlock");
}

/// In a forked child: nobody has it, which `fork` has seen to already where there were several threads.
pub fn forget() {
    call!("_IO_list_resetlock");
}
