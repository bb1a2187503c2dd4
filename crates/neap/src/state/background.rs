//! The state of neap's own thread.
//!
//! # Design
//!
//! An atomic word holds a [`ThreadState`]. These changes are possible:
//!
//! | from | to | by | when |
//! |---|---|---|---|
//! | `Absent` | `Running` | a call that makes the thread | before it makes the thread |
//! | `Running` | `Absent` | that call | too many threads exist at the moment |
//! | `Running` | `Disabled` | that call | the system refuses a thread otherwise |
//! | `Running` | `GoingToSleep` | the thread | before each tick |
//! | `GoingToSleep` | `Running` | a call | it has cached memory, or requests a tick |
//! | `GoingToSleep` | `Running` | the thread | the tick left work |
//! | `GoingToSleep` | `Sleeping` | the thread | the tick left no work |
//! | `Sleeping` | `Running` | a call, which wakes it | it has cached memory, or requests a tick |
//! | `Sleeping` | `Running` | the thread | it was woken without a change of the state |
//! | `Running` | `Ended` | the thread | it is to end |
//! | `Absent` | `Ended` | [`Mm::end_background`](crate::mm::Mm) | the main thread ends |
//! | all but `Disabled` | `Absent` | the child of a fork | it has no thread |
//!
//! # Concurrency
//! There is no lock. A comment at each change names the partner of its ordering.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// What neap's thread does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum ThreadState {
    /// There is no thread; one may be made.
    Absent,
    /// The thread ticks.
    Running,
    /// The thread ticks, and then sleeps unless a call caches memory meanwhile.
    GoingToSleep,
    /// The thread sleeps until it is woken.
    Sleeping,
    /// No thread can be made, for example in a sandbox, or the options forbid one.
    Disabled,
    /// The thread has ended, and no other one is made.
    Ended,
}

use ThreadState::{Absent, Disabled, Ended, GoingToSleep, Running, Sleeping};

/// State shared by the thread and the calls that wake it.
#[derive(Debug)]
pub(crate) struct Background {
    /// A [`ThreadState`].
    state: AtomicU32,
    /// A call has requested a tick.
    pub(crate) tick_requested: AtomicBool,
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
            state: AtomicU32::new(if wanted { Absent } else { Disabled } as u32),
            tick_requested: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            id: AtomicUsize::new(0),
        }
    }

    fn state(&self, order: Ordering) -> ThreadState {
        let word = self.state.load(order);
        let states = [Absent, Running, GoingToSleep, Sleeping, Disabled];
        states.into_iter().find(|state| *state as u32 == word).unwrap_or(Ended)
    }

    /// Sets the state, whatever it is.
    pub(crate) fn set(&self, state: ThreadState, order: Ordering) {
        self.state.store(state as u32, order);
    }

    /// Changes the state if it is `from`. Returns whether it did. `order` is that of a success.
    pub(crate) fn change(&self, from: ThreadState, to: ThreadState, order: Ordering) -> bool {
        self.state.compare_exchange(from as u32, to as u32, order, Ordering::Relaxed).is_ok()
    }

    /// Forgets the thread, in a forked child; another one may be made.
    pub(crate) fn forget(&self) {
        if self.state(Ordering::Relaxed) != Disabled {
            self.set(Absent, Ordering::Relaxed);
        }
        self.ending.store(false, Ordering::Relaxed);
        self.id.store(0, Ordering::Relaxed);
    }

    /// Whether there is a thread that ticks or can be woken.
    pub(crate) fn has_thread(&self) -> bool {
        matches!(self.state(Ordering::Relaxed), Running | GoingToSleep | Sleeping)
    }

    /// Whether the thread ticks, and will see memory that is cached from now on.
    #[inline]
    pub(crate) fn is_awake(&self) -> bool {
        // Either the thread's looks see the memory that the caller has cached, or this load sees
        // GoingToSleep. The caller made an atomic exchange before this, when it left a lock or the
        // gate.
        fence_unless_exchanged();
        self.state.load(Ordering::Relaxed) == Running as u32
    }

    /// Lets the thread tick once more if it is about to sleep. Returns whether it sleeps and has to
    /// be woken.
    pub(crate) fn keep_awake(&self) -> bool {
        // Release pairs with the Acquire of the change in `Mm::background`, and with that of the
        // thread's next look: the thread looks once more.
        !self.change(GoingToSleep, Running, Ordering::Release) && self.change(Sleeping, Running, Ordering::Release)
    }

    /// Whether the thread is to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire) // Pairs with the Release in `end_background`.
    }

    /// Whether the thread sleeps until it is woken.
    pub(crate) fn is_asleep(&self) -> bool {
        // Acquire pairs with the Release in `keep_awake`, by the thread that wakes it.
        self.state(Ordering::Acquire) == Sleeping
    }

    /// Whether a tick was requested since the last call.
    pub(crate) fn take_tick_request(&self) -> bool {
        // Acquire pairs with the Release in `request_tick`.
        self.tick_requested.swap(false, Ordering::Acquire)
    }

    /// The state as a word.
    pub(crate) fn state_name(&self) -> &'static str {
        match self.state(Ordering::Relaxed) {
            Running | GoingToSleep => "awake",
            Sleeping => "asleep",
            Disabled => "off",
            Absent | Ended => "absent",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_awake_changes_only_states_before_and_in_sleep() {
        for (state, name, has_thread, after, is_woken) in [
            (Absent, "absent", false, Absent, false),
            (Running, "awake", true, Running, false),
            (GoingToSleep, "awake", true, Running, false),
            (Sleeping, "asleep", true, Running, true),
            (Disabled, "off", false, Disabled, false),
            (Ended, "absent", false, Ended, false),
        ] {
            let background = Background::new(true);
            background.set(state, Ordering::Relaxed);
            assert_eq!((background.state_name(), background.has_thread()), (name, has_thread));
            assert_eq!(background.is_awake(), state == Running);
            assert_eq!((background.keep_awake(), background.state(Ordering::Relaxed)), (is_woken, after), "{state:?}");
        }
    }

    #[test]
    fn forked_child_may_make_a_thread_unless_the_options_forbid_one() {
        for (wanted, after) in [(true, Absent), (false, Disabled)] {
            let background = Background::new(wanted);
            background.change(Absent, Running, Ordering::Relaxed);
            background.forget();
            assert_eq!(background.state(Ordering::Relaxed), after);
        }
    }
}
