//! stand-in
use core::sync::atomic::{AtomicU64, Ordering};
#[derive(Debug)]
pub(crate) struct Grace {
    phase: AtomicU64,
    inside: [AtomicU64; 2],
}
pub(crate) struct Reading<'g>(&'g AtomicU64);
impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
impl Grace {
    pub(crate) const fn new() -> Grace {
        Grace { phase: AtomicU64::new(0), inside: [const { AtomicU64::new(0) }; 2] }
    }
    pub(crate) fn read(&self) -> Reading<'_> {
        loop {
            let phase = self.phase.load(Ordering::SeqCst);
            let word = &self.inside[phase as usize & 1];
            word.fetch_add(1, Ordering::SeqCst);
            if self.phase.load(Ordering::SeqCst) == phase {
                return Reading(word);
            }
            word.fetch_sub(1, Ordering::SeqCst);
        }
    }
    pub(crate) fn begin(&self) {
        self.phase.fetch_add(1, Ordering::SeqCst);
    }
    pub(crate) fn has_ended(&self) -> bool {
        self.inside[(self.phase.load(Ordering::SeqCst) as usize & 1) ^ 1].load(Ordering::SeqCst) == 0
    }
}
