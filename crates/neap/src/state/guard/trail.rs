//! The thread that allocated or freed a guarded sample, and the bytes of its stack.
//!
//! The bytes are copied as they are, since no unwinder may run in malloc. A report finds the
//! addresses of calls among them.

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use neap_os::call_stack::{self, Registers};
use neap_os::{memory, thread};

/// The most bytes of a stack that are kept.
const STACK_BYTES: usize = 8 << 10;
const WORD: usize = size_of::<usize>();

/// The calling thread, and its stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    pub(crate) thread: u32,
    pub(crate) stack_pointer: usize,
    /// Bytes of the stack that can be read.
    pub(crate) bytes: usize,
}

impl Caller {
    /// Returns the thread and stack of the function that calls this one.
    #[inline(always)]
    pub(crate) fn here() -> Caller {
        let Registers { stack_pointer, .. } = call_stack::registers();
        Caller::with(stack_pointer)
    }

    /// Returns the calling thread, and its stack from `stack_pointer` upward.
    pub(crate) fn with(stack_pointer: usize) -> Caller {
        // The page of the stack pointer can be read, even if the system cannot tell about other
        // pages.
        let page = memory::page_size();
        let mut bytes = (page - stack_pointer % page).min(STACK_BYTES);
        // `readable` may return as little as half of the readable bytes, so the loop calls it
        // again.
        while bytes < STACK_BYTES {
            match call_stack::readable(stack_pointer + bytes, STACK_BYTES - bytes) {
                0 => break,
                more => bytes += more,
            }
        }
        Caller { thread: thread::id(), stack_pointer, bytes: bytes / WORD * WORD }
    }

    /// Calls `each` with every word of the stack, from the stack pointer on.
    ///
    /// # Safety
    /// The functions that were on the stack when this value was made have not returned, and do not
    /// run meanwhile.
    pub(crate) unsafe fn each_word(&self, each: &mut dyn FnMut(usize)) {
        for at in (self.stack_pointer..self.stack_pointer + self.bytes).step_by(WORD) {
            // SAFETY: the word could be read when this value was made, and the functions on the
            // stack have not returned. They do not change their variables meanwhile (the caller's
            // promise).
            each(unsafe { core::ptr::with_exposed_provenance::<usize>(at).read_volatile() });
        }
    }
}

/// A copy of a stack.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Trail {
    thread: AtomicU32,
    /// Number of words.
    words: AtomicU32,
    stack: [AtomicUsize; STACK_BYTES / WORD],
}

impl Trail {
    /// Copies the stack of a thread.
    ///
    /// # Safety
    /// No other thread calls this for the trail meanwhile. The stack of `caller` can be read. It is
    /// the calling thread's, above the stack pointer.
    pub(crate) unsafe fn take(&self, caller: &Caller) {
        self.words.store(0, Ordering::Relaxed);
        self.thread.store(caller.thread, Ordering::Relaxed);
        let to = self.stack.as_ptr().cast_mut().cast::<u8>();
        // SAFETY: the bytes lie above this thread's stack pointer, and can be read (the caller's
        // promise). The array has room for them. No other thread writes to it meanwhile, and its
        // words are atomic.
        unsafe { call_stack::copy(caller.stack_pointer, to, caller.bytes) };
        self.words.store((caller.bytes / WORD) as u32, Ordering::Relaxed);
    }

    /// The system's number of the thread.
    pub(crate) fn thread(&self) -> u32 {
        self.thread.load(Ordering::Relaxed)
    }

    /// Calls `each` with every word, from the stack pointer on.
    pub(crate) fn each_word(&self, each: &mut dyn FnMut(usize)) {
        let words = self.stack.iter().take(self.words.load(Ordering::Relaxed) as usize);
        words.for_each(|word| each(word.load(Ordering::Relaxed)));
    }
}
