//! Objects of a test that wait until all readers of a domain have left that may have found them.

use neap_base::Rcu;
use neap_base::gate::Inside;
use neap_base::platform::{Errno, Platform};
use neap_base::rcu::Mark;
use std::sync::Mutex;

/// A domain, and the objects that wait for its readers.
pub(crate) struct Deferral<T> {
    pub(crate) rcu: Rcu,
    /// Each object, with a mark that is later than its removal.
    waiting: Mutex<Vec<(Mark, T)>>,
}

impl<T> Deferral<T> {
    pub(crate) fn new() -> Deferral<T> {
        Deferral { rcu: Rcu::new(), waiting: Mutex::default() }
    }

    /// Defers an object that no new reader finds.
    pub(crate) fn defer(&self, object: T) {
        let mark = self.rcu.mark();
        self.waiting.lock().unwrap().push((mark, object));
    }

    /// Makes a step for the object that waits longest. Passes the objects whose readers have left
    /// to `free`. Returns whether any object waits.
    pub(crate) fn advance<P: Platform>(&self, platform: &P, free: impl FnMut(T)) -> Result<bool, Errno> {
        let oldest = self.waiting.lock().unwrap().iter().map(|(mark, _)| *mark).min();
        let Some(oldest) = oldest else { return Ok(false) };
        if Inside::assume(|inside| self.rcu.advance_past(inside, platform, oldest))? {
            self.free_until(oldest, free);
        }
        Ok(!self.waiting.lock().unwrap().is_empty())
    }

    /// Makes steps until the readers of this moment have left. Passes the objects that were
    /// deferred before to `free`, unless another thread does.
    pub(crate) fn wait<P: Platform>(&self, platform: &P, free: impl FnMut(T)) -> Result<(), Errno> {
        let mark = self.rcu.mark();
        while !Inside::assume(|inside| self.rcu.advance_past(inside, platform, mark))? {
            // In a model this runs another thread.
            neap_base::sync::spin();
            platform.pause();
        }
        self.free_until(mark, free);
        Ok(())
    }

    fn free_until(&self, mark: Mark, free: impl FnMut(T)) {
        let over: Vec<_> = self.waiting.lock().unwrap().extract_if(.., |(of, _)| *of <= mark).collect();
        over.into_iter().map(|(_, object)| object).for_each(free);
    }
}
