//! The atomics and cells of everything that a model checker explores.
//!
//! Sits between `core` (or loom, under `--cfg loom`) and the mutex, the CPU lock, the gate and RCU. The only file of the
//! workspace that asks for `cfg(loom)`. loom's atomics cannot be made in a constant, so constructors go through
//! [`constructor!`](crate::constructor), and its threads do not sleep on a futex, so waiting goes through here as well.

#[cfg(loom)]
mod imp {
    extern crate std;

    pub use loom::cell::UnsafeCell;
    pub use loom::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};

    /// A number of this thread's own, not 0.
    pub fn me() -> usize {
        use core::hash::{Hash, Hasher};
        let mut hasher = std::hash::DefaultHasher::new();
        loom::thread::current().id().hash(&mut hasher);
        hasher.finish() as usize | 1
    }

    /// One place for all threads: every further atomic is states to explore.
    pub fn spread() -> usize {
        0
    }

    /// A model is one process.
    pub fn process() -> u32 {
        1
    }

    /// No model has a child.
    pub fn is_alone() -> bool {
        true
    }

    /// No thread of a model forks while it is inside.
    pub fn inside() -> usize {
        0
    }

    /// Nobody asks.
    pub fn set_inside(_word: usize) {}

    /// loom takes SeqCst accesses for AcqRel ones, but knows SeqCst fences: this one stands where the accesses around it
    /// need their order.
    pub fn model_fence() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    type Sleepers = loom::sync::Mutex<std::vec::Vec<(usize, std::sync::Arc<loom::sync::Condvar>)>>;

    loom::lazy_static! {
        /// Who sleeps on the word of which address, the first first.
        static ref SLEEPERS: Sleepers = Sleepers::default();
    }

    /// Sleeps until somebody wakes it: the model stops where nobody does, so a wake-up that is lost is found.
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

    /// The same: no deadline comes, so a wake-up that one would make up for is found as well.
    pub fn wait_for(word: &AtomicU32, expected: u32, _nanoseconds: u64) {
        wait(word, expected);
    }

    /// Wakes up to `count` who sleep on `word`.
    pub fn wake(word: &AtomicU32, count: u32) {
        let Ok(mut sleepers) = SLEEPERS.lock() else { return };
        for _ in 0..count {
            let first = sleepers.iter().position(|&(address, _)| address == core::ptr::from_ref(word).addr());
            let Some(first) = first else { return };
            sleepers.remove(first).1.notify_one();
        }
    }

    /// One turn of a short wait.
    pub fn spin() {
        loom::thread::yield_now();
    }

    /// Turns to spin before sleeping: none, each is a state to explore.
    pub const SPINS: u32 = 0;
}

#[cfg(not(loom))]
mod imp {
    pub use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};
    use neap_os::futex::{self, Scope};
    pub use neap_os::thread::pointer as me;

    /// The number of this process.
    pub fn process() -> u32 {
        if cfg!(miri) { 1 } else { neap_os::thread::process_id() }
    }

    /// Whether this thread is the only one of its process, as far as `/proc` says.
    pub fn is_alone() -> bool {
        neap_os::thread::count() == Some(1)
    }

    /// What this thread is inside; nothing under Miri, which knows no assembly.
    #[inline(always)]
    pub fn inside() -> usize {
        if cfg!(miri) { 0 } else { neap_os::entered::inside() }
    }

    /// Says what this thread is inside.
    #[inline(always)]
    pub fn set_inside(word: usize) {
        if !cfg!(miri) {
            neap_os::entered::set_inside(word);
        }
    }

    /// A number to spread threads by, where it does not matter which CPU they are on.
    pub fn spread() -> usize {
        // Miri knows no assembly, which the thread's number is read by.
        if cfg!(miri) { 0 } else { neap_os::thread::number() }
    }

    /// Nothing: the SeqCst accesses around it do it.
    #[inline(always)]
    pub fn model_fence() {}

    /// `core`'s cell with loom's way of reaching into it.
    #[derive(Debug)]
    #[repr(transparent)]
    pub struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// A cell that holds `value`.
        pub const fn new(value: T) -> UnsafeCell<T> {
            UnsafeCell(core::cell::UnsafeCell::new(value))
        }

        /// Calls `f` with the cell's address.
        #[inline(always)]
        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    /// Sleeps while `word` holds `expected`; may return for no reason.
    pub fn wait(word: &AtomicU32, expected: u32) {
        futex::wait(word, expected, None, Scope::Process);
    }

    /// The same, for so many nanoseconds at most.
    pub fn wait_for(word: &AtomicU32, expected: u32, nanoseconds: u64) {
        futex::wait(word, expected, Some(nanoseconds), Scope::Process);
    }

    /// Wakes up to `count` sleepers on `word`.
    pub fn wake(word: &AtomicU32, count: u32) {
        futex::wake(word, count, Scope::Process);
    }

    /// One turn of a short wait.
    #[inline(always)]
    pub fn spin() {
        core::hint::spin_loop();
    }

    /// Turns to spin before sleeping, some 20 us: a mutex here is held for a batch of pages or objects, which takes up to
    /// 5 us where another CPU used them last, and a sleep interrupts the CPU that is to go on.
    pub const SPINS: u32 = 1000;
}

pub use imp::*;

/// A `const fn` where atomics can be made in constants, a plain `fn` under loom.
#[cfg(not(loom))]
#[macro_export]
macro_rules! constructor {
    ($(#[$attribute:meta])* $visibility:vis fn $($rest:tt)*) => { $(#[$attribute])* $visibility const fn $($rest)* };
}

/// A `const fn` where atomics can be made in constants, a plain `fn` under loom.
#[cfg(loom)]
#[macro_export]
macro_rules! constructor {
    ($(#[$attribute:meta])* $visibility:vis fn $($rest:tt)*) => { $(#[$attribute])* $visibility fn $($rest)* };
}
