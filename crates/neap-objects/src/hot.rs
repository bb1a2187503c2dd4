//! The hot part: what every `malloc` and `free` of a small object touches, and nothing else.
//!
//! Sits between the entry points and the restartable sequences. A call that cannot be served by this CPU's stack alone
//! answers "no" and has changed nothing that matters; the caller then goes to [`Objects`](crate::objects::Objects). No
//! lock, no locked instruction, no system call, no statistics. All zeroes is a valid state in which everything is
//! answered "no", so an allocator that is not set up yet, or has no Rseq slots, needs no test of its own here.

use crate::paid::Payback;
use crate::size_class::{Class, GRAIN, LARGEST};
use crate::state::States;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use neap_base::Platform;
use neap_os::rseq::{self, Outcome, Table};
use neap_pages::{Frame, NodePages};

/// What lies in 4 KiB of the arena: an entry of the kind map, the page's home in the low 16 bits, which a comparison can look at where
/// they are, and above it the place of the class's stack ([`Class::place`]). A place of zero: no objects.
///
/// The home is the CPU that its objects were last handed to in bulk. An object that is freed elsewhere is a guest there and
/// goes back by way of the barn instead of being allocated again on the spot. Otherwise objects that lie side by side come
/// to be used by different CPUs, and every allocation and free of one takes the cache line of its state byte, and perhaps
/// its own, from the others': a program whose threads exchange objects is then half as fast. A hint: a wrong home costs time only.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct KindEntry(AtomicU32);

impl KindEntry {
    /// Bytes of the arena that an entry stands for, on every page size, as a power of two.
    pub const SHIFT: u32 = 12;

    /// The shift of the kind map as a side table.
    pub const TABLE_SHIFT: u8 = 10;

    /// What lies there.
    pub fn class(&self) -> Class {
        Kind(self.0.load(Ordering::Relaxed)).class()
    }

    /// Says what lies there from now on; [`Class::NONE`] for no objects.
    pub fn set(&self, class: Class) {
        self.0.store(u32::from(class.place()) << HOME_BITS, Ordering::Relaxed);
    }

    /// The CPU where the page is at home; cut to 16 bits, more than any kernel has.
    pub fn home(&self) -> u16 {
        Kind(self.0.load(Ordering::Relaxed)).home()
    }

    /// Makes a CPU the home of the page. The caller has an object there, so what lies there does not change meanwhile.
    pub fn set_home(&self, cpu: u16) {
        let entry = self.0.load(Ordering::Relaxed);
        let new = entry >> HOME_BITS << HOME_BITS | u32::from(cpu);
        // Every free reads the entry: it is written only if that says something new.
        if entry != new {
            self.0.store(new, Ordering::Relaxed);
        }
    }
}

const HOME_BITS: u32 = u16::BITS;

/// What an entry of the kind map said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Kind(u32);

impl Kind {
    /// The class of what lies there.
    #[inline]
    pub fn class(self) -> Class {
        Class::of_place(self.place())
    }

    #[inline(always)]
    pub(crate) fn place(self) -> u16 {
        (self.0 >> HOME_BITS) as u16
    }

    #[inline(always)]
    fn home(self) -> u16 {
        self.0 as u16
    }
}

/// Tables and addresses, on cache lines that are only read, but for the table's, which takers write to.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Hot {
    /// What the sequences start from.
    pub(crate) table: Table,
    /// Sizes below this are served here for threads that have entered nothing; 0: none.
    limit: AtomicUsize,
    /// The same for others, and whether anything is.
    pub(crate) served: AtomicUsize,
    /// The arena's base in grains of 16 bytes.
    base: AtomicUsize,
    /// Grains of the arena that may hold objects.
    grains: AtomicUsize,
    /// The kind map; the entry of address 0, so that an address needs no subtraction.
    kinds: AtomicPtr<KindEntry>,
    /// The state tables.
    pub(crate) states: States,
    /// For every size in grains, rounded up: the place of its class's stack.
    places: [u16; LARGEST / GRAIN + 1],
    /// The frame of address 0. This and what follows are for objects that somebody pays for: see [`owners`](crate::owners).
    pub(crate) frames: AtomicPtr<Frame>,
    /// The page size as a power of two.
    pub(crate) page_shift: AtomicU32,
    /// The bits of an address that say where on a page it is.
    pub(crate) page_mask: AtomicUsize,
    /// Where who paid for an object is paid back.
    pub(crate) payback: AtomicPtr<Payback>,
}

/// What became of a `free`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Freed {
    /// The object is in a stack of this CPU.
    Done,
    /// The object is marked as cached and belongs to the caller, who has to put it somewhere.
    Unplaced(Class),
    /// Not a small object, or not one that this part knows, or not one that the program has: nothing has changed.
    Unknown,
}

impl Hot {
    /// Everything is answered "no".
    pub const fn closed() -> Hot {
        Hot {
            table: Table::unopened(),
            limit: AtomicUsize::new(0),
            served: AtomicUsize::new(0),
            base: AtomicUsize::new(0),
            grains: AtomicUsize::new(0),
            kinds: AtomicPtr::new(core::ptr::null_mut()),
            states: States::none(),
            places: crate::size_class::places(),
            frames: AtomicPtr::new(core::ptr::null_mut()),
            page_shift: AtomicU32::new(0),
            page_mask: AtomicUsize::new(0),
            payback: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    /// Says where the tables of an arena are. Called once; alone, it is enough for objects that somebody pays for.
    ///
    /// # Safety
    /// The tables belong to the arena of `pages`, which `payback` is of, and no other thread has used this value before.
    pub(crate) unsafe fn open<P: Platform>(
        &self,
        pages: &NodePages<P>,
        kinds: usize,
        states: &States,
        payback: &Payback,
    ) {
        let base = pages.base();
        self.base.store(base / GRAIN, Ordering::Relaxed);
        let kinds = core::ptr::with_exposed_provenance_mut::<KindEntry>(kinds);
        self.kinds.store(kinds.wrapping_sub(base >> KindEntry::SHIFT), Ordering::Relaxed);
        self.states.copy(states);
        let frames = pages.frames().first().wrapping_sub(base >> pages.page_shift());
        self.frames.store(frames.cast_mut(), Ordering::Relaxed);
        self.page_shift.store(pages.page_shift(), Ordering::Relaxed);
        self.page_mask.store(pages.page_size() - 1, Ordering::Relaxed);
        self.payback.store(core::ptr::from_ref(payback).cast_mut(), Ordering::Relaxed);
    }

    /// Lets the fast paths work, after [`Hot::open`].
    pub(crate) fn serve(&self) {
        // Release: who sees them sees the rest; pairs with the Acquire in `allocate`, `allocate_owned` and `put`.
        self.served.store(LARGEST + 1, Ordering::Release);
        self.limit.store(LARGEST + 1, Ordering::Release);
    }

    /// Lets [`Hot::allocate`] answer "no" from now on, so that threads that have entered nothing are seen by the slow way.
    pub fn serve_entered_alone(&self) {
        self.limit.store(0, Ordering::Relaxed);
    }

    /// Lets `free` know that the arena reaches up to `bytes` from its base. Called before an object there is handed out.
    pub(crate) fn cover(&self, bytes: usize) {
        if self.grains.load(Ordering::Relaxed) < bytes / GRAIN && self.served.load(Ordering::Relaxed) > 0 {
            self.grains.fetch_max(bytes / GRAIN, Ordering::Release); // Pairs with the Acquire in `free`.
        }
    }

    /// An object of at least `size` bytes for a thread that has not [`entered`](neap_os::entered) anything, which is what its word says;
    /// `None`: it has, or ask [`Objects`](crate::objects::Objects).
    #[inline(always)]
    pub fn allocate(&self, size: usize, entered: usize) -> Option<NonNull<u8>> {
        // One comparison: a word other than 0 is beyond any size. Acquire pairs with the Release in `serve`; a plain load on x86-64.
        if size | entered >= self.limit.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: the limit is at most the largest size and one, and not 0.
        let object = unsafe { self.pop(size)? };
        // SAFETY: objects in stacks are cached ones, and this one is this thread's now.
        unsafe { self.hand_out(object, false) }
    }

    /// The topmost object of this CPU's stack for `size` bytes. It is marked as cached, and in the caller's hands.
    ///
    /// # Safety
    /// The size is no larger than the largest, and [`Hot::serve`] was called.
    #[inline(always)]
    pub(crate) unsafe fn pop(&self, size: usize) -> Option<NonNull<u8>> {
        #[expect(clippy::manual_div_ceil, reason = "two instructions instead of five")]
        // SAFETY: as the caller promises.
        let place = unsafe { *self.places.get_unchecked((size + GRAIN - 1) / GRAIN) };
        // SAFETY: the slots have been opened.
        NonNull::new(unsafe { rseq::pop(&self.table, usize::from(place)) })
    }

    /// Takes an object back.
    #[inline(always)]
    pub fn free(&self, pointer: *mut u8) -> Freed {
        // The rotation moves the low bits of an unaligned pointer to the top: one compare finds those, null, and all
        // that is not ours.
        let grain = pointer.addr().rotate_right(GRAIN.trailing_zeros());
        // Acquire pairs with the Release in `cover`: what that was called for is visible.
        let grains = self.grains.load(Ordering::Acquire);
        if grain.wrapping_sub(self.base.load(Ordering::Relaxed)) >= grains {
            return Freed::Unknown;
        }
        // SAFETY: the kind map has an entry, and the state tables have bytes, for every part of the arena.
        unsafe {
            let kinds = self.kinds.load(Ordering::Relaxed);
            let entry = &*kinds.wrapping_add(grain >> (KindEntry::SHIFT - GRAIN.trailing_zeros()));
            let kind = Kind(entry.0.load(Ordering::Relaxed));
            if kind.place() == 0 {
                return Freed::Unknown;
            }
            if !self.states.release(grain) {
                core::hint::cold_path();
                return Freed::Unknown;
            }
            if self.push(kind, pointer) == Outcome::Committed { Freed::Done } else { Freed::Unplaced(kind.class()) }
        }
    }

    /// What lies at an address.
    ///
    /// # Safety
    /// The address is in the arena that this was opened for.
    #[inline]
    pub unsafe fn kind(&self, pointer: *const u8) -> Kind {
        // SAFETY: the kind map has an entry for every part of the arena.
        let entry = unsafe { &*self.kinds.load(Ordering::Relaxed).wrapping_add(pointer.addr() >> KindEntry::SHIFT) };
        Kind(entry.0.load(Ordering::Relaxed))
    }

    /// Puts an object that is marked as cached, and in the caller's hands, on a stack of this CPU; `false`: the caller still
    /// has it.
    ///
    /// # Safety
    /// `kind` is what lies at `object`, no [`Class::NONE`], in the instance that this was opened for.
    #[inline(always)]
    pub unsafe fn put(&self, kind: Kind, object: *mut u8) -> bool {
        // Acquire pairs with the Release in `serve`. Where that was not called there is nothing to put the object on.
        // SAFETY: that is not 0, so the slots have been opened.
        self.served.load(Ordering::Acquire) > 0 && unsafe { self.push(kind, object) } == Outcome::Committed
    }

    /// # Safety
    /// As for [`Hot::put`]; the slots have been opened.
    #[inline(always)]
    unsafe fn push(&self, kind: Kind, object: *mut u8) -> Outcome {
        // SAFETY: as the caller promises.
        unsafe { rseq::push(&self.table, usize::from(kind.place()), kind.home(), object) }
    }
}

/// A stack gave out an object that was not cached: it was freed twice at the very same moment, or a state table was
/// overwritten.
///
/// Never returns; it has the type of an answer so that the fast path can end in it without a frame on the stack.
#[cold]
#[inline(never)]
pub fn corrupt(object: NonNull<u8>) -> Option<NonNull<u8>> {
    neap_os::write::die(format_args!(
        "double free: {object:p} was freed by two threads at once; found before it was handed out again"
    ))
}
