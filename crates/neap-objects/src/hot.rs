//! The hot part: what every `malloc` and `free` of a small object touches, and nothing else.
//!
//! Sits between the entry points and the restartable sequences. A call that cannot be served by this CPU's sheaf alone
//! answers "no" and has changed nothing that matters; the caller then goes to [`Objects`](crate::objects::Objects). No
//! lock, no locked instruction, no system call, no statistics. All zeroes is a valid state in which everything is
//! answered "no", so an allocator that is not set up yet, or has no Rseq slots, needs no test of its own here.

use crate::size_class::{CLASSES, Class, GRAIN};
use crate::state::{ALLOCATED, CACHED, StateMap};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};
use neap_os::rseq::{self, Outcome, Table};

/// Bytes that one entry of the kind map stands for, in grains, as a power of two: 4 KiB on every page size.
const KIND_SHIFT: u32 = 12 - GRAIN.trailing_zeros();

/// Tables and addresses, on cache lines that are only read.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Hot {
    /// What the sequences start from.
    pub table: Table,
    /// Sizes up to this are served here; 0: none.
    limit: AtomicUsize,
    base: AtomicUsize,
    /// Grains of the arena that may hold objects.
    grains: AtomicUsize,
    kinds: AtomicPtr<AtomicU8>,
    maps: UnsafeCell<[StateMap; CLASSES]>,
}

// SAFETY: the maps are written once, before `limit` and `grains` let anybody read them.
unsafe impl Sync for Hot {}

/// What became of a `free`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Freed {
    /// The object is in this CPU's sheaf.
    Done,
    /// The object is marked as cached and belongs to the caller, who has to put it somewhere.
    Homeless(Class),
    /// Not an allocated small object, or not one that this part knows: nothing has changed.
    Unknown,
}

impl Hot {
    /// Everything is answered "no".
    pub const fn closed() -> Hot {
        Hot {
            table: Table::closed(),
            limit: AtomicUsize::new(0),
            base: AtomicUsize::new(0),
            grains: AtomicUsize::new(0),
            kinds: AtomicPtr::new(core::ptr::null_mut()),
            maps: UnsafeCell::new([StateMap::NOTHING; CLASSES]),
        }
    }

    /// Lets the fast paths work on an arena whose tables are mapped. Called once, after [`Slots::publish`]
    /// (crate::slots::Slots::publish).
    ///
    /// # Safety
    /// The tables belong to the arena at `base`, and no other thread has used this value before.
    pub unsafe fn open(&self, base: usize, kinds: usize, maps: &[StateMap; CLASSES], largest: usize) {
        // SAFETY: nobody reads the maps while `limit` and `grains` are 0.
        unsafe { *self.maps.get() = *maps };
        self.base.store(base, Ordering::Relaxed);
        self.kinds.store(core::ptr::with_exposed_provenance_mut(kinds), Ordering::Relaxed);
        // Release: who sees the limit sees the rest; pairs with the dependent loads of the fast paths (x86-64 keeps them
        // in order), as does the store in `cover`.
        self.limit.store(largest, Ordering::Release);
    }

    /// Lets `free` know that the arena reaches up to `bytes` from its base. Called before an object there is handed out.
    pub fn cover(&self, bytes: usize) {
        if self.grains.load(Ordering::Relaxed) < bytes / GRAIN && self.limit.load(Ordering::Relaxed) > 0 {
            self.grains.fetch_max(bytes / GRAIN, Ordering::Release); // Pairs as in `open`.
        }
    }

    /// An object of at least `size` bytes, or null: ask [`Objects`](crate::objects::Objects).
    #[inline(always)]
    pub fn allocate(&self, size: usize) -> *mut u8 {
        // A size of 0 wraps around and goes the slow way.
        if size.wrapping_sub(1) >= self.limit.load(Ordering::Relaxed) {
            return core::ptr::null_mut();
        }
        // SAFETY: the limit is at most the largest size.
        let class = unsafe { Class::of_size_unchecked(size) };
        // SAFETY: the limit is not 0, so the slots have been published.
        let (object, outcome) = unsafe { rseq::pop(&self.table, class.index()) };
        if outcome != Outcome::Committed {
            return core::ptr::null_mut();
        }
        let grains = object.addr().wrapping_sub(self.base.load(Ordering::Relaxed)) / GRAIN;
        // SAFETY: objects in sheaves lie in the arena; the maps were written before the limit.
        let cached =
            unsafe { (*self.maps.get().cast::<StateMap>().add(class.index())).change(grains, CACHED, ALLOCATED) };
        if cached { object } else { corrupt(object, class) }
    }

    /// Takes an object back.
    #[inline(always)]
    pub fn free(&self, pointer: *mut u8) -> Freed {
        let offset = pointer.addr().wrapping_sub(self.base.load(Ordering::Relaxed));
        // The rotation moves the low bits of an unaligned pointer to the top: one compare finds those, null, and all
        // that is not ours.
        let grains = offset.rotate_right(GRAIN.trailing_zeros());
        if grains >= self.grains.load(Ordering::Relaxed) {
            return Freed::Unknown;
        }
        // SAFETY: the kind map has an entry for every 4 KiB of the arena, and the maps one for every class; class 0's leads
        // to a byte that is never "allocated".
        unsafe {
            let class = Class((*self.kinds.load(Ordering::Relaxed).add(grains >> KIND_SHIFT)).load(Ordering::Relaxed));
            let map = &*self.maps.get().cast::<StateMap>().add(class.index());
            if !map.change(grains, ALLOCATED, CACHED) {
                return Freed::Unknown;
            }
            if rseq::push(&self.table, class.index(), pointer) == Outcome::Committed {
                return Freed::Done;
            }
            Freed::Homeless(class)
        }
    }
}

/// A sheaf gave out an object that was not cached: it was freed twice at the very same moment, or a state table was
/// overwritten.
///
/// Never returns; it has the type of an object so that the fast path can end in it without a frame on the stack.
#[cold]
#[inline(never)]
pub fn corrupt(object: *mut u8, class: Class) -> *mut u8 {
    neap_os::write::die(format_args!(
        "double free: {object:p} ({} bytes) was freed by two threads at once; found before it was handed out again",
        class.size()
    ))
}
