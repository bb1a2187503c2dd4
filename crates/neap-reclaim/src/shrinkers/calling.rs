//! Which callbacks a thread is in.
//!
//! Sits on the thread's [word](neap_os::entered): a chain of frames on its stack, the latest first. So a callback that allocates begins no
//! second reclaim, one that unregisters does not wait for itself, and a forked child knows which references are its own. No locks.

use core::marker::PhantomPinned;
use core::pin::{Pin, pin};
use neap_os::entered::{calling, set_calling};

/// A callback that this thread is in.
#[derive(Debug)]
pub(crate) struct Frame {
    /// Whose it is, and the index of the shrinker there.
    registry: usize,
    index: u32,
    before: usize,
    _pinned: PhantomPinned,
}

impl Frame {
    pub(crate) fn new(registry: usize, index: u32) -> Frame {
        Frame { registry, index, before: 0, _pinned: PhantomPinned }
    }

    /// The thread is in it until the answer is dropped.
    pub(crate) fn enter(self: Pin<&mut Frame>) -> Inside<'_> {
        // SAFETY: nothing is moved.
        let frame = unsafe { self.get_unchecked_mut() };
        frame.before = calling();
        set_calling(core::ptr::from_ref(frame).expose_provenance());
        Inside(frame)
    }
}

/// Being in a callback.
pub(crate) struct Inside<'f>(&'f Frame);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        set_calling(self.0.before);
    }
}

/// Whether this thread is inside a callback of a shrinker, of any registry.
#[inline]
pub fn is_calling() -> bool {
    calling() != 0
}

/// Calls `f` as if it were a callback: nothing of reclaim begins in it, and what it charges goes beyond limits. For what neap itself has to do in a thread that may
/// be waited for.
pub fn without_reclaim<R>(f: impl FnOnce() -> R) -> R {
    // No registry is at 0.
    let frame = pin!(Frame::new(0, 0));
    let _inside = frame.enter();
    f()
}

/// How many calls of a shrinker this thread is in.
pub(crate) fn depth(registry: usize, index: u32) -> usize {
    let frame = |word: usize| {
        // SAFETY: the frames of this thread's chain are on its stack, further up.
        unsafe { core::ptr::with_exposed_provenance::<Frame>(word).as_ref() }
    };
    let frames = core::iter::successors(frame(calling()), |inner| frame(inner.before));
    frames.filter(|frame| frame.registry == registry && frame.index == index).count()
}
