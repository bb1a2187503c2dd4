//! The lock of the C library's list of streams, which its `fork` takes after the fork handlers.
//!
//! A fork handler that keeps other threads from allocating must take this lock first. Otherwise
//! three threads can wait for each other:
//!
//! | reader | flusher | forking thread |
//! |---|---|---|
//! | 1. locks a stream | | |
//! | | 2. locks the list, waits for the stream | |
//! | | | 3. stops allocations, waits for the list |
//! | 4. needs a longer buffer, waits for the forking thread | | |
//!
//! If the forking thread takes the list's lock first, it waits before it stops allocations. The
//! lock is recursive.
//!
//! glibc has functions for this lock, which [`StreamsLock`] calls. musl has no such functions. With
//! musl, [`StreamsLock`] is a lock of neap's own. The preload library's `fflush` takes it around a
//! flush of all streams. Apart from such a flush, only musl's `exit` waits for a stream while it
//! holds the list's lock. With other C libraries, [`StreamsLock`] does nothing.

pub use of_c_library::StreamsLock;

#[cfg(not(target_env = "musl"))]
mod of_c_library {
    /// The lock of a process.
    #[derive(Debug, Default)]
    pub struct StreamsLock;

    macro_rules! call {
        ($name:literal) => {
            let function = crate::weak_variable!($name, address);
            if function != 0 {
                // SAFETY: glibc's functions of these names take no argument and return nothing.
                unsafe { core::mem::transmute::<usize, extern "C" fn()>(function)() };
            }
        };
    }

    impl StreamsLock {
        /// Returns a value that stands for the C library's lock.
        pub const fn new() -> StreamsLock {
            StreamsLock
        }

        /// Takes the lock; it is recursive. Waits for a thread that flushes all streams, as `fork`
        /// does.
        pub fn lock(&self) {
            call!("_IO_list_lock");
        }

        /// Undoes one [`lock`](StreamsLock::lock).
        pub fn unlock(&self) {
            call!("_IO_list_unlock");
        }

        /// Resets the lock in a forked child. glibc's `fork` has done so already if the parent had
        /// several threads.
        pub fn forget(&self) {
            call!("_IO_list_resetlock");
        }
    }
}

#[cfg(target_env = "musl")]
mod of_c_library {
    use crate::futex::{self, Sharing};
    use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

    /// The lock of a process.
    #[derive(Debug, Default)]
    pub struct StreamsLock {
        state: AtomicU32,
        /// The thread pointer of the holder; 0: none.
        holder: AtomicUsize,
        /// How often the holder has taken the lock again while it held it.
        again: AtomicU32,
    }

    const FREE: u32 = 0;
    const HELD: u32 = 1;
    /// Held, and a thread may sleep until it is free.
    const AWAITED: u32 = 2;

    impl StreamsLock {
        /// Creates a free lock.
        pub const fn new() -> StreamsLock {
            StreamsLock { state: AtomicU32::new(FREE), holder: AtomicUsize::new(0), again: AtomicU32::new(0) }
        }

        /// Takes the lock; it is recursive. Waits for a thread that flushes all streams.
        pub fn lock(&self) {
            let own = crate::thread::pointer();
            // Relaxed: the holder equals this thread's pointer only if this thread has stored it.
            if self.holder.load(Ordering::Relaxed) == own {
                // Relaxed: only the holder uses `again`.
                self.again.fetch_add(1, Ordering::Relaxed);
                return;
            }
            // Acquire, here and in the swap: pairs with the Release in `unlock`.
            if self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
                while self.state.swap(AWAITED, Ordering::Acquire) != FREE {
                    futex::wait(&self.state, AWAITED, None, Sharing::Process);
                }
            }
            self.holder.store(own, Ordering::Relaxed);
        }

        /// Undoes one [`lock`](StreamsLock::lock).
        pub fn unlock(&self) {
            // Relaxed: only the holder uses `again`, and this thread is the holder.
            let again = self.again.load(Ordering::Relaxed);
            if again > 0 {
                self.again.store(again - 1, Ordering::Relaxed);
                return;
            }
            self.holder.store(0, Ordering::Relaxed);
            // Release: pairs with the Acquire of the next `lock`.
            if self.state.swap(FREE, Ordering::Release) == AWAITED {
                futex::wake(&self.state, 1, Sharing::Process);
            }
        }

        /// Undoes the parent's [`lock`](StreamsLock::lock) in a forked child.
        pub fn forget(&self) {
            self.unlock();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    #[test]
    fn one_thread_at_a_time_holds_it_as_often_as_it_likes() {
        let (lock, inside) = (StreamsLock::new(), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        lock.lock();
                        lock.lock();
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        lock.unlock();
                        thread::yield_now();
                        assert_eq!(inside.fetch_sub(1, Ordering::Relaxed), 1);
                        lock.unlock();
                    }
                });
            }
        });
    }
}
