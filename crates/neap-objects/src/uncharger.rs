//! The callback that pays owners back: it uncharges an owner for objects that the owner no longer
//! pays for.
//!
//! [`Uncharger::open`] sets the callback once. Callers of it hold no lock of this crate.

use crate::size_class::Class;
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The side of the fork gate that a caller is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GateSide {
    /// Inside the gate, in a slow path.
    Inside,
    /// Outside the gate.
    Outside,
}

/// Uncharges an owner for a number of objects of a class. The caller holds no lock of this crate.
pub type UnchargeFn = unsafe fn(context: *const (), owner: u64, class: Class, objects: u32, side: GateSide);

/// The callback that pays back owners.
#[derive(Debug)]
pub struct Uncharger {
    run: AtomicPtr<()>,
    context: AtomicPtr<()>,
}

impl Uncharger {
    pub(crate) const fn closed() -> Uncharger {
        Uncharger { run: AtomicPtr::new(null_mut()), context: AtomicPtr::new(null_mut()) }
    }

    /// Sets the callback, before any object has an owner. Later calls pass the same callback.
    ///
    /// # Safety
    /// `repay` can be called with `context` from any thread for as long as objects are used.
    pub unsafe fn open(&self, repay: UnchargeFn, context: *const ()) {
        self.context.store(context.cast_mut(), Relaxed);
        self.run.store(repay as *mut (), Release); // Pairs with the Acquire in `pay`.
    }

    pub(crate) fn pay(&self, owner: u64, class: Class, objects: u32, side: GateSide) {
        let run = self.run.load(Acquire); // Pairs with the Release in `open`.
        if !run.is_null() {
            // SAFETY: only `open` writes `run`, with a `UnchargeFn`; its caller said that it can be
            // called with `context` from any thread.
            unsafe {
                core::mem::transmute::<*mut (), UnchargeFn>(run)(
                    self.context.load(Relaxed),
                    owner,
                    class,
                    objects,
                    side,
                )
            };
        }
    }
}
