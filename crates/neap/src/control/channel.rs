//! The part of the page of numbers for requests (see [`control`](crate::control)).

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The part of the page of numbers for requests. A word with all bits set means that the asker
/// gives no number there.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ControlChannel {
    pub(crate) ticket: AtomicU32,
    pub(crate) cpu: AtomicU32,
    pub(crate) node: AtomicU32,
    pub(crate) zone: AtomicU32,
    /// Bytes, or another number that [`control`](crate::control) defines for the request.
    pub(crate) until: AtomicU64,
    pub(crate) answered: AtomicU32,
    /// The answer to the request. 0 means that it is done. 1, 2 and 3 mean that there is no such
    /// CPU, node or zone. [`control`](crate::control) defines the other numbers.
    pub(crate) refusal: AtomicU32,
    pub(crate) cpus: AtomicU32,
    pub(crate) skipped: AtomicU32,
    pub(crate) retried: AtomicU32,
    pub(crate) page_size: AtomicU32,
    pub(crate) pages: AtomicU64,
    pub(crate) objects: AtomicU64,
    pub(crate) free: AtomicU64,
    pub(crate) what: AtomicU32,
    pub(crate) from: AtomicU32,
    pub(crate) group: AtomicU64,
}

impl ControlChannel {
    #[inline]
    pub(crate) fn ticket(&self) -> u32 {
        // Acquire pairs with the asker's last store. A thread that reads the ticket sees the
        // request.
        self.ticket.load(Ordering::Acquire)
    }

    pub(crate) fn answer(&self, ticket: u32, refusal: u32) {
        self.refusal.store(refusal, Ordering::Relaxed);
        // Release pairs with the asker's load. An asker that reads the ticket sees the answer.
        self.answered.store(ticket, Ordering::Release);
    }
}
