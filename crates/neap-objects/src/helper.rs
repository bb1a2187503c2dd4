//! Draining of other CPUs' stacks by neap's thread, on behalf of an allocation.
//!
//! # Design
//!
//! Draining another CPU's stacks needs a fence, which is a system call (`membarrier`). In a process
//! with several threads an allocation makes only system calls for memory, since a sandbox of the
//! program may forbid others. So the allocating thread asks neap's thread, and waits for a bounded
//! time:
//! 1. The allocating thread takes a ticket, and wakes neap's thread, which sleeps on a futex (the
//!    bell).
//! 2. neap's thread drains the stacks of all CPUs, and stores up to which ticket it has done so.
//! 3. The allocating thread sees that its ticket is done, or goes on without the drain.
//!
//! # Locking
//!
//! This module has no lock. neap's thread only tries to enter the fork gate, and never waits for
//! it. The allocating thread may be inside the gate, and a fork may wait for that thread.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use neap_os::clock;
use neap_os::futex::{self, Sharing};

/// State shared by threads that need memory and the thread that drains for them.
#[derive(Debug, Default)]
pub struct Helper {
    present: AtomicBool,
    bell: AtomicU32,
    asked: AtomicU32,
    done: AtomicU32,
    late: AtomicU32,
}

impl Helper {
    pub(crate) const fn new() -> Helper {
        let [bell, asked, done, late] = [const { AtomicU32::new(0) }; 4];
        Helper { present: AtomicBool::new(false), bell, asked, done, late }
    }

    /// Sets whether neap's thread exists, which sleeps on the bell.
    pub fn set_present(&self, present: bool) {
        // Relaxed: heuristic; nothing depends on it.
        self.present.store(present, Ordering::Relaxed);
    }

    /// Wakes the thread that sleeps on the bell.
    pub fn ring(&self) {
        self.bell.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `rung`.
        futex::wake(&self.bell, 1, Sharing::Process);
    }

    /// Returns the value of the futex word, which counts calls of [`Helper::ring`].
    ///
    /// neap's thread reads this value before it looks for work. If it finds none, it sleeps on
    /// [`Helper::bell`] only while the word still has this value. So it misses no call of `ring`.
    pub fn rung(&self) -> u32 {
        self.bell.load(Ordering::Acquire) // Pairs with the Release in `ring`.
    }

    /// The futex word on which neap's thread sleeps.
    pub fn bell(&self) -> &AtomicU32 {
        &self.bell
    }

    /// Asks for a drain of all CPUs' stacks, and waits at most `nanoseconds` for it. Returns
    /// whether it happened.
    pub fn ask(&self, nanoseconds: u64) -> bool {
        if !self.present.load(Ordering::Relaxed) {
            return false;
        }
        let ticket = self.asked.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        self.ring();
        let end = clock::precise().saturating_add(nanoseconds);
        loop {
            // Acquire pairs with the Release in `serve`, which publishes the objects returned to
            // slabs.
            let done = self.done.load(Ordering::Acquire);
            if done.wrapping_sub(ticket) < u32::MAX / 2 {
                return true;
            }
            let left = end.saturating_sub(clock::precise());
            if left == 0 {
                self.late.fetch_add(1, Ordering::Relaxed);
                return false;
            }
            // A wait also ends when an earlier ticket is done, and at a signal.
            futex::wait(&self.done, done, Some(left), Sharing::Process);
        }
    }

    /// Runs `work` if an allocation asks for it. `work` returns whether it drained.
    pub fn serve(&self, work: impl FnOnce() -> bool) {
        // Relaxed: the bell's Release and Acquire order it.
        let asked = self.asked.load(Ordering::Relaxed);
        if asked != self.done.load(Ordering::Relaxed) && work() {
            self.done.store(asked, Ordering::Release); // Pairs with the Acquire loads in `ask`.
            futex::wake(&self.done, i32::MAX as u32, Sharing::Process);
        }
    }

    /// Number of allocations whose wait ended without a drain.
    pub fn late(&self) -> u32 {
        self.late.load(Ordering::Relaxed)
    }

    /// Resets the state in a forked child: neap's thread does not exist, and no allocation waits.
    pub fn forget(&self) {
        self.set_present(false);
        self.done.store(self.asked.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_served_or_given_up() {
        let helper = Helper::new();
        assert!(!helper.ask(1_000_000) && helper.late() == 0, "there is no thread to ask");
        helper.set_present(true);
        assert!(!helper.ask(1_000_000) && helper.late() == 1, "the thread does not come");
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| helper.ask(u64::MAX >> 2));
            while !asks.is_finished() {
                let rung = helper.rung();
                let mut served = false;
                helper.serve(|| {
                    served = true;
                    true
                });
                if !served {
                    futex::wait(helper.bell(), rung, Some(1_000_000), Sharing::Process);
                }
            }
            assert!(asks.join().unwrap());
        });
        helper.serve(|| panic!("nothing is asked for"));
        // A request that comes during another's work waits for its own.
        helper.asked.fetch_add(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let (asked, mut asks) = (helper.asked.load(Ordering::Relaxed), None);
            helper.serve(|| {
                asks = Some(scope.spawn(|| helper.ask(u64::MAX >> 2)));
                while helper.asked.load(Ordering::Relaxed) == asked {
                    std::thread::yield_now();
                }
                true
            });
            let mut served = false;
            std::thread::sleep(core::time::Duration::from_millis(20));
            helper.serve(|| {
                served = true;
                true
            });
            assert!(served && asks.unwrap().join().unwrap());
        });
        helper.asked.fetch_add(1, Ordering::Relaxed);
        helper.serve(|| false);
        helper.forget();
        helper.serve(|| panic!("a child's parent asked for it"));
    }
}
