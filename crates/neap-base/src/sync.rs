//! Atomics, cells and waiting, for code that the model checker loom explores.
//!
//! Under `--cfg loom` the types are loom's, otherwise those of `core`. The users are the mutex, the
//! CPU lock, the gate and RCU. loom's atomics cannot be made in a constant, so constructors use
//! [`constructor!`](crate::constructor). loom's threads do not sleep on a futex, so waiting is here
//! as well. Apart from tests, only this file of the workspace selects code by `cfg(loom)`.

#[cfg(loom)]
mod imp {
    extern crate std;

    pub use loom::cell::UnsafeCell;
    pub use loom::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};

    /// A number that identifies this thread, not 0.
    pub fn me() -> usize {
        use core::hash::{Hash, Hasher};
        let mut hasher = std::hash::DefaultHasher::new();
        loom::thread::current().id().hash(&mut hasher);
        hasher.finish() as usize | 1
    }

    /// Returns one lane for all threads, since every further atomic adds states to explore.
    pub fn spread() -> usize {
        0
    }

    /// Number of the process, which is constant, since a model is one process.
    pub fn process() -> u32 {
        1
    }

    /// A model has no child, so each process counts as having one thread.
    pub fn is_alone() -> bool {
        true
    }

    /// Returns 0, which stands for no gate, since no thread of a model forks inside one.
    pub fn inside() -> usize {
        0
    }

    /// Does nothing, since [`inside`] always returns 0.
    pub fn set_inside(_word: usize) {}

    /// Makes a full fence between accesses that need SeqCst order. loom treats SeqCst accesses as
    /// AcqRel, but supports SeqCst fences.
    pub fn model_fence() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    type Sleepers = loom::sync::Mutex<std::vec::Vec<(usize, std::sync::Arc<loom::sync::Condvar>)>>;

    loom::lazy_static! {
        /// Sleeping threads with the addresses of their words, in order of arrival.
        static ref SLEEPERS: Sleepers = Sleepers::default();
    }

    /// Sleeps until another thread wakes it. Without a wake-up the model stops, so lost wake-ups
    /// are found.
    pub fn wait(word: &AtomicU32, expected: u32) {
        let own = std::sync::Arc::new(loom::sync::Condvar::new());
        let Ok(mut sleepers) = SLEEPERS.lock() else { return };
        if word.load(Ordering::Relaxed) == expected {
            sleepers.push((core::ptr::from_ref(word).addr(), own.clone()));
        }
        while sleepers.iter().any(|(_, other)| std::sync::Arc::ptr_eq(other, &own)) {
            let Ok(again) = own.wait(sleepers) else { return };
            sleepers = again;
        }
    }

    /// Sleeps as [`wait`] does, and ignores the deadline, since a deadline would hide lost
    /// wake-ups.
    pub fn wait_for(word: &AtomicU32, expected: u32, _nanoseconds: u64) {
        wait(word, expected);
    }

    /// Wakes up to `count` threads that sleep on `word`.
    pub fn wake(word: &AtomicU32, count: u32) {
        let Ok(mut sleepers) = SLEEPERS.lock() else { return };
        for _ in 0..count {
            let first = sleepers.iter().position(|&(address, _)| address == core::ptr::from_ref(word).addr());
            let Some(first) = first else { return };
            sleepers.remove(first).1.notify_one();
        }
    }

    /// One iteration of a short wait.
    pub fn spin() {
        loom::thread::yield_now();
    }

    /// Iterations before a sleep. None, since each iteration adds states to explore.
    pub const SPINS_MAX: u32 = 0;
}

#[cfg(not(loom))]
mod imp {
    pub use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};
    use neap_os::futex::{self, Sharing};
    pub use neap_os::thread::pointer as me;

    /// The number of this process.
    pub fn process() -> u32 {
        if cfg!(miri) { 1 } else { neap_os::thread::process_id() }
    }

    /// Whether `/proc` lists this thread as the only one of its process.
    pub fn is_alone() -> bool {
        neap_os::thread::count() == Some(1)
    }

    /// Word of the gate that this thread is inside; 0 under Miri, which does not run assembly.
    #[inline(always)]
    pub fn inside() -> usize {
        if cfg!(miri) { 0 } else { neap_os::thread_state::inside() }
    }

    /// Sets the word of the gate that this thread is inside.
    #[inline(always)]
    pub fn set_inside(word: usize) {
        if !cfg!(miri) {
            neap_os::thread_state::set_inside(word);
        }
    }

    /// A number derived from this thread, by which threads spread over counters.
    pub fn spread() -> usize {
        // Miri does not run the assembly that reads the thread's number.
        if cfg!(miri) { 0 } else { neap_os::thread::number() }
    }

    /// Does nothing: the SeqCst accesses around it suffice.
    #[inline(always)]
    pub fn model_fence() {}

    /// `core`'s cell with loom's interface.
    #[derive(Debug)]
    #[repr(transparent)]
    pub struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// Creates a cell that holds `value`.
        pub const fn new(value: T) -> UnsafeCell<T> {
            UnsafeCell(core::cell::UnsafeCell::new(value))
        }

        /// Calls `f` with the cell's address.
        #[inline(always)]
        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    /// Sleeps while `word` holds `expected`. Spurious returns happen.
    pub fn wait(word: &AtomicU32, expected: u32) {
        futex::wait(word, expected, None, Sharing::Process);
    }

    /// Sleeps while `word` holds `expected`, for `nanoseconds` at most. Spurious returns happen.
    pub fn wait_for(word: &AtomicU32, expected: u32, nanoseconds: u64) {
        futex::wait(word, expected, Some(nanoseconds), Sharing::Process);
    }

    /// Wakes up to `count` sleepers on `word`.
    pub fn wake(word: &AtomicU32, count: u32) {
        futex::wake(word, count, Sharing::Process);
    }

    /// One iteration of a short wait.
    #[inline(always)]
    pub fn spin() {
        core::hint::spin_loop();
    }

    /// Iterations before a sleep, about 20 us. A thread holds a mutex for one batch of pages or
    /// objects, some microseconds. A wake-up would interrupt the CPU of the sleeping thread.
    pub const SPINS_MAX: u32 = 1000;
}

pub use imp::*;

/// A `const fn`; a plain `fn` under loom, where atomics cannot be made in constants.
#[cfg(not(loom))]
#[macro_export]
macro_rules! constructor {
    ($(#[$attribute:meta])* $visibility:vis fn $($rest:tt)*) => { $(#[$attribute])* $visibility const fn $($rest)* };
}

/// A plain `fn` under loom, where atomics cannot be made in constants; otherwise a `const fn`.
#[cfg(loom)]
#[macro_export]
macro_rules! constructor {
    ($(#[$attribute:meta])* $visibility:vis fn $($rest:tt)*) => { $(#[$attribute])* $visibility fn $($rest)* };
}
