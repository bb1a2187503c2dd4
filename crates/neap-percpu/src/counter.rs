//! A counter that is added to on every CPU.
//!
//! Sits on words of per-CPU data. An addition goes to this CPU's word; what a word has beyond the batch is moved to the
//! shared part, which alone is the approximate value: off by at most about the batch for each CPU, and by what is added while
//! somebody else moves or reads (the next addition there moves it). The exact value is the shared part and all words, read under
//! the mutex that words are moved under: every addition that has returned is in it once. Words begin at the batch, a power of
//! two, so that one look at a word's high bits says whether it is still within it, above and below.

use crate::data::{Refused, Wait};
use crate::host::Host;
use crate::rows::Owner;
use crate::words::{Counted, Words};
use core::sync::atomic::{AtomicI64, Ordering};
use neap_base::Mutex;

/// A counter. Frees itself; where its owner is closed instead, it must be forgotten.
#[derive(Debug)]
pub struct PerCpuCounter<H: Host> {
    words: Words<H>,
    /// What words begin at, and the bits that they do not have from 0 to below twice that.
    start: i64,
    mask: i64,
    shared: AtomicI64,
    moving: Mutex<()>,
}

impl<H: Host> PerCpuCounter<H> {
    /// A counter at 0. `batch`: what a CPU's part may be before it counts in the approximate value, from 1 to 2^61, rounded
    /// down to a power of two.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new(host: H, owner: Owner, batch: i64, wait: Wait) -> Result<Self, Refused> {
        let words = Words::new(host, owner, 1, false, wait)?;
        let start = 1 << batch.clamp(1, 1 << 61).ilog2();
        // Relaxed: nobody else has the counter yet.
        (0..words.cpus()).for_each(|cpu| words.word(0, cpu).store(start, Ordering::Relaxed));
        let mask = !(2 * start - 1);
        Ok(PerCpuCounter { words, start, mask, shared: AtomicI64::new(0), moving: Mutex::new(()) })
    }

    /// Adds. Never waits; signal-safe.
    #[inline]
    pub fn add(&self, value: i64) {
        match self.words.count(value, self.mask) {
            Counted::Within => {}
            Counted::Beyond => self.move_part(),
            Counted::Refused => self.add_elsewhere(value),
        }
    }

    /// No sequences, none on this CPU, or one that was interrupted.
    #[cold]
    fn add_elsewhere(&self, value: i64) {
        if !self.words.add(&raw const self.words.offsets, 0, value) {
            self.shared.fetch_add(value, Ordering::Relaxed);
        } else if self.words.here(0) & self.mask != 0 {
            self.move_part();
        }
    }

    #[cold]
    fn move_part(&self) {
        self.words.host.try_inside(|| {
            // Somebody who moves or reads is there: the next addition tries again.
            let Some(_moving) = self.moving.try_lock() else { return };
            // Perhaps from another CPU's word by now: its sum with the shared part is what counts.
            let part = self.words.here(0).wrapping_sub(self.start);
            if self.words.add(&raw const self.words.offsets, 0, part.wrapping_neg()) {
                self.shared.fetch_add(part, Ordering::Relaxed);
            }
        });
    }

    /// Roughly the value: what was moved so far.
    #[inline]
    pub fn approximate(&self) -> i64 {
        self.shared.load(Ordering::Relaxed)
    }

    /// The value: additions that have returned are in it, others may be.
    pub fn exact(&self) -> i64 {
        let start = self.start.wrapping_mul(self.words.cpus() as i64);
        self.words.host.inside(|| {
            let _moving = self.moving.lock();
            self.shared.load(Ordering::Relaxed).wrapping_add(self.words.sum(0)).wrapping_sub(start)
        })
    }
}
