//! Callbacks that the current thread is in: a chain of frames on its stack, the latest first.
//!
//! The thread's [word](neap_os::thread_state) leads to the chain. So a callback that allocates
//! begins no second reclaim. A callback that unregisters its shrinker does not wait for itself. A
//! forked child knows which references its thread holds. This module has no lock.

use core::marker::PhantomPinned;
use core::pin::{Pin, pin};
use neap_os::thread_state::{calling, set_calling};

/// A callback that this thread is in.
#[derive(Debug)]
pub(crate) struct CallFrame {
    /// Address of the registry, and the index of the shrinker there.
    registry: usize,
    index: u32,
    before: usize,
    _pinned: PhantomPinned,
}

impl CallFrame {
    pub(crate) fn new(registry: usize, index: u32) -> CallFrame {
        CallFrame { registry, index, before: 0, _pinned: PhantomPinned }
    }

    /// Adds the frame to this thread's chain until the returned [`Inside`] is dropped.
    pub(crate) fn enter(self: Pin<&mut CallFrame>) -> Inside<'_> {
        // SAFETY: the reference is used to write a field, and nothing is moved out of it.
        let frame = unsafe { self.get_unchecked_mut() };
        frame.before = calling();
        set_calling(core::ptr::from_ref(frame).expose_provenance());
        Inside(frame)
    }
}

/// Presence of a frame in the thread's chain.
pub(crate) struct Inside<'f>(&'f CallFrame);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        set_calling(self.0.before);
    }
}

/// Returns whether this thread is inside a callback of a shrinker, of any registry.
#[inline]
pub fn is_calling() -> bool {
    calling() != 0
}

/// Calls `f` as if it were a callback: no reclaim begins in it, and its charges may exceed limits.
/// neap uses this for its own work in a thread that other threads may wait for.
pub fn without_reclaim<R>(f: impl FnOnce() -> R) -> R {
    // No registry is at address 0.
    let frame = pin!(CallFrame::new(0, 0));
    let _inside = frame.enter();
    f()
}

/// Returns how many calls of a shrinker this thread is in.
pub(crate) fn depth(registry: usize, index: u32) -> usize {
    let frame = |word: usize| {
        // SAFETY: the word is 0, or leads to a frame of this thread's chain. Frames are pinned on
        // its stack further up, and leave the chain (`Inside::drop`) before they end.
        unsafe { core::ptr::with_exposed_provenance::<CallFrame>(word).as_ref() }
    };
    let frames = core::iter::successors(frame(calling()), |inner| frame(inner.before));
    frames.filter(|frame| frame.registry == registry && frame.index == index).count()
}
