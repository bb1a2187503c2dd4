//! A counter that is added to on every CPU.
//!
//! Sits on words of per-CPU data. An addition goes to this CPU's word; a word that has grown beyond the batch is moved to the
//! shared part, which alone is the approximate value: off by at most about the batch for each CPU. The exact value is the shared part
//! and all words, read under the mutex that words are moved under: every addition that has returned is in it once.

use crate::copies::Site;
use crate::data::{Charge, Refused, Wait};
use crate::words::Words;
use core::sync::atomic::{AtomicI64, Ordering};
use neap_base::{Mutex, Platform};

/// A counter. Frees itself; where its owner is closed instead, it must be forgotten.
#[derive(Debug)]
pub struct PerCpuCounter<'a, P: Platform, C: Charge = ()> {
    words: Words<'a, P, C>,
    batch: i64,
    shared: AtomicI64,
    moving: Mutex<()>,
}

impl<'a, P: Platform, C: Charge> PerCpuCounter<'a, P, C> {
    /// A counter at 0. `batch`: what a CPU's part may be before it counts in the approximate value, from 1 to 2^62.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new(site: Site<'a, P, C>, batch: i64, wait: Wait) -> Result<Self, Refused> {
        let words = Words::new(site, 1, false, wait)?;
        Ok(PerCpuCounter { words, batch: batch.clamp(1, 1 << 62), shared: AtomicI64::new(0), moving: Mutex::new(()) })
    }

    /// Adds. Never waits; signal-safe.
    #[inline]
    pub fn add(&self, value: i64) {
        match self.words.add(&raw const self.words.offsets, 0, value) {
            Some(part) if part.wrapping_add(self.batch) as u64 <= 2 * self.batch as u64 => {}
            Some(part) => self.move_part(part),
            // No sequence on this CPU, or a debugger that interrupts every one.
            None => _ = self.shared.fetch_add(value, Ordering::Relaxed),
        }
    }

    #[cold]
    fn move_part(&self, part: i64) {
        // Somebody who moves or reads is there: the next addition tries again.
        let Some(_moving) = self.moving.try_lock() else { return };
        // From the word of the CPU that the thread is on by now: its sum with the shared part is what counts.
        if self.words.add(&raw const self.words.offsets, 0, part.wrapping_neg()).is_some() {
            self.shared.fetch_add(part, Ordering::Relaxed);
        }
    }

    /// Roughly the value: what was moved so far.
    #[inline]
    pub fn approximate(&self) -> i64 {
        self.shared.load(Ordering::Relaxed)
    }

    /// The value: additions that have returned are in it, others may be.
    pub fn exact(&self) -> i64 {
        let _moving = self.moving.lock();
        self.shared.load(Ordering::Relaxed).wrapping_add(self.words.sum(0))
    }
}
