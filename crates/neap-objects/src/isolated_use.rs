//! Whether a thread of the process runs on an isolated CPU, cached for calls that allocate or free.
//!
//! # Design
//!
//! To ask the system, a thread reads a file for each thread of the process. A tick asks, and stores
//! the answer in a word. Calls that allocate or free read the word. Such a call asks the system
//! itself only if the answer is older than an interval. Then no tick ran, or none was due since
//! nothing is cached.
//!
//! # Concurrency
//!
//! One word holds the time and the answer. Two callers that find it too old both ask the system.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap_base::Platform;

/// Nanoseconds for which an answer is valid: the default interval between ticks.
const VALID_NS: u64 = 250_000_000;

/// The bit of the answer. The other bits are those of the time.
const IN_USE: u64 = 1;

/// The last answer and its time; 0 before the first answer.
#[derive(Debug)]
pub(crate) struct IsolatedUse(AtomicU64);

impl IsolatedUse {
    pub(crate) const fn unknown() -> IsolatedUse {
        IsolatedUse(AtomicU64::new(0))
    }

    /// Asks the system, and stores the answer for the calls that follow.
    pub(crate) fn look<P: Platform>(&self, platform: &P) -> bool {
        let in_use = platform.is_isolated_cpu_in_use();
        // Relaxed: heuristic; it publishes no other data.
        self.0.store(platform.now() & !IN_USE | u64::from(in_use), Relaxed);
        in_use
    }

    /// The last answer, or a new one if that is too old.
    pub(crate) fn is_known<P: Platform>(&self, platform: &P) -> bool {
        let word = self.0.load(Relaxed);
        if word != 0 && platform.now().saturating_sub(word & !IN_USE) < VALID_NS {
            return word & IN_USE != 0;
        }
        self.look(platform)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_testing::virtual_platform::Virtual;

    #[test]
    fn an_answer_lasts_until_the_next_look_or_an_interval() {
        let machine = Virtual::new(4096, 2);
        let word = IsolatedUse::unknown();
        assert!(!word.is_known(&machine), "the first call: it looks");
        machine.use_isolated_cpu(true);
        assert!(!word.is_known(&machine), "the answer is kept");
        assert!(word.look(&machine) && word.is_known(&machine), "a tick looks");
        machine.use_isolated_cpu(false);
        machine.advance(VALID_NS - 2);
        assert!(word.is_known(&machine), "for an interval");
        machine.advance(2);
        assert!(!word.is_known(&machine), "and no longer");
    }
}
