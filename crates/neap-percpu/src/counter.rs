//! A counter that threads add to on every CPU.
//!
//! # Design
//!
//! An addition goes to this CPU's word. If the word leaves its batch, the thread moves the word's
//! part to the shared part. A word's start value is the batch, a power of two. So one check of the
//! word's high bits shows whether its part is within the batch in both directions.
//!
//! The approximate value is the shared part. It lacks about one batch for each CPU, and additions
//! made while another thread moves parts or reads the exact value. The next addition on that CPU
//! moves those.
//!
//! The exact value is the shared part plus all words. It is read under the mutex under which parts
//! are moved. It contains each addition that has returned, exactly once.

use crate::data::{OffsetsOf, Refused, Wait};
use crate::embedder::Host;
use crate::rows::Owner;
use crate::words::{Counted, Words};
use core::sync::atomic::{AtomicI64, Ordering};
use neap_base::Mutex;

/// A counter. Dropping it frees its memory. If its owner was closed before, the caller must forget
/// the counter instead of dropping it.
#[derive(Debug)]
pub struct PerCpuCounter<H: Host> {
    words: Words<H>,
    /// Start value of words. The next field, `mask`, has the bits that no word within its batch
    /// has.
    start: i64,
    mask: i64,
    shared: AtomicI64,
    moving: Mutex<()>,
}

impl<H: Host> PerCpuCounter<H> {
    /// Creates a counter at 0. `batch` is the largest part of a CPU that may be missing in the
    /// approximate value. It is from 1 to 2^61, and is rounded down to a power of two.
    ///
    /// # Errors
    /// As for [`PerCpuData::allocate`](crate::PerCpuData::allocate).
    pub fn new(host: H, owner: Owner, batch: i64, wait: Wait) -> Result<Self, Refused> {
        let words = Words::new(host, owner, 1, OffsetsOf::AllCpus, wait)?;
        let start = 1 << batch.clamp(1, 1 << 61).ilog2();
        // Relaxed: no other thread has the counter yet.
        (0..words.cpus()).for_each(|cpu| words.word(0, cpu).store(start, Ordering::Relaxed));
        let mask = !(2 * start - 1);
        Ok(PerCpuCounter { words, start, mask, shared: AtomicI64::new(0), moving: Mutex::new(()) })
    }

    /// Adds `value`. Never waits; signal-safe.
    #[inline]
    pub fn add(&self, value: i64) {
        match self.words.count(value, self.mask) {
            Counted::Within => {}
            Counted::Beyond => self.move_part(),
            Counted::Refused => self.add_elsewhere(value),
        }
    }

    /// Adds a value that the fast sequence did not add. Either the platform or the CPU has no
    /// sequences, or the sequence was interrupted.
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
        self.words.host.try_inside(|_| {
            // If another thread moves a part or reads, the next addition tries again.
            let Some(_moving) = self.moving.try_lock() else { return };
            // The thread may be on another CPU by now; only the sum of word and shared part
            // matters.
            let part = self.words.here(0).wrapping_sub(self.start);
            if self.words.add(&raw const self.words.offsets, 0, part.wrapping_neg()) {
                self.shared.fetch_add(part, Ordering::Relaxed);
            }
        });
    }

    /// The approximate value: the parts that were moved so far.
    #[inline]
    pub fn approximate(&self) -> i64 {
        self.shared.load(Ordering::Relaxed)
    }

    /// The exact value. Contains every addition that has returned; may contain additions in
    /// progress.
    pub fn exact(&self) -> i64 {
        let start = self.start.wrapping_mul(self.words.cpus() as i64);
        self.words.host.inside(|_| {
            let _moving = self.moving.lock();
            self.shared.load(Ordering::Relaxed).wrapping_add(self.words.sum(0)).wrapping_sub(start)
        })
    }
}
