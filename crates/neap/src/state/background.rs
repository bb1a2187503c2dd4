//! The state of neap's own thread.
//!
//! # Concurrency
//! An atomic word says what the thread does next; `background.rs` changes it. There is no lock.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// There is no thread; one may be made.
pub(crate) const ABSENT: u32 = 0;
/// The thread ticks.
pub(crate) const AWAKE: u32 = 2;
/// The thread sleeps until it is woken.
pub(crate) const ASLEEP: u32 = 3;
/// No thread can be made, for example in a sandbox, or the options forbid one.
pub(crate) const NEVER: u32 = 4;
/// The thread ticks, and then sleeps unless a call caches memory meanwhile.
pub(crate) const DROWSY: u32 = 5;
/// The thread has ended, and no other one is made.
pub(crate) const ENDED: u32 = 6;

/// State shared by the thread and the calls that wake it.
#[derive(Debug)]
pub(crate) struct Background {
    pub(crate) state: AtomicU32,
    /// A call has requested a tick.
    pub(crate) soon: AtomicBool,
    /// The thread is to end.
    pub(crate) ending: AtomicBool,
    /// The handle by which the thread is joined; 0 for none.
    pub(crate) id: AtomicUsize,
}

/// A full fence, to be called after an atomic exchange, addition or SeqCst store. On x86-64, each
/// of these is a full fence itself, so this function has no instruction.
#[inline(always)]
pub(crate) fn fence_unless_exchanged() {
    #[cfg(not(target_arch = "x86_64"))]
    core::sync::atomic::fence(Ordering::SeqCst); // SeqCst pairs with the fence of the other thread.
}

impl Background {
    pub(crate) const fn new(wanted: bool) -> Background {
        Background {
            state: AtomicU32::new(if wanted { ABSENT } else { NEVER }),
            soon: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            id: AtomicUsize::new(0),
        }
    }

    /// Forgets the thread, in a forked child; another one may be made.
    pub(crate) fn forget(&self) {
        if self.state.load(Ordering::Relaxed) != NEVER {
            self.state.store(ABSENT, Ordering::Relaxed);
        }
        self.ending.store(false, Ordering::Relaxed);
        self.id.store(0, Ordering::Relaxed);
    }

    /// Whether there is a thread that ticks or can be woken.
    pub(crate) fn has_thread(&self) -> bool {
        matches!(self.state.load(Ordering::Relaxed), AWAKE | ASLEEP | DROWSY)
    }

    /// Whether the thread ticks, and will see memory that is cached from now on.
    #[inline]
    pub(crate) fn is_awake(&self) -> bool {
        // Either the thread's looks see the memory that the caller has cached, or this load sees
        // DROWSY. The caller made an atomic exchange before this, when it left a lock or the gate.
        fence_unless_exchanged();
        self.state.load(Ordering::Relaxed) == AWAKE
    }

    /// Lets the thread tick once more if it is about to sleep. Returns whether it sleeps and has to
    /// be woken.
    pub(crate) fn keep_awake(&self) -> bool {
        // Release pairs with the Acquire of the exchange in `background`: the thread looks once
        // more.
        self.state.compare_exchange(DROWSY, AWAKE, Ordering::Release, Ordering::Relaxed) == Err(ASLEEP)
            // Release pairs with the Acquire of the thread's next look.
            && self.state.compare_exchange(ASLEEP, AWAKE, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Whether the thread is to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire) // Pairs with the Release in `end_background`.
    }

    /// Whether the thread sleeps until it is woken.
    pub(crate) fn is_asleep(&self) -> bool {
        // Acquire pairs with the Release in `keep_awake`, by the thread that wakes it.
        self.state.load(Ordering::Acquire) == ASLEEP
    }

    /// Whether a tick was requested since the last call.
    pub(crate) fn is_wanted_soon(&self) -> bool {
        // Acquire pairs with the Release in `come_soon`.
        self.soon.swap(false, Ordering::Acquire)
    }

    /// The state as a word.
    pub(crate) fn state(&self) -> &'static str {
        match self.state.load(Ordering::Relaxed) {
            AWAKE | DROWSY => "awake",
            ASLEEP => "asleep",
            NEVER => "off",
            _ => "absent",
        }
    }
}
