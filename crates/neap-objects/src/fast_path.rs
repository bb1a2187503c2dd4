//! The fast path: the data and code that every `malloc` and `free` of a small object uses.
//!
//! # Design
//!
//! If this CPU's stack cannot serve a call, the call is refused, and the caller takes the slow path
//! in [`Objects`](crate::objects::Objects). malloc and free here take no lock, execute no locked
//! instruction, make no system call and count nothing. A [`FastPath`] refuses every call while its
//! size limits and its `bytes` are 0. So the code needs no extra test for an allocator that is not
//! open yet or has no Rseq slots.
//!
//! [`FastPath::allocate`] and [`FastPath::free`] are one block of assembly each. The block begins
//! with the size or the pointer and ends with the commit of a restartable sequence. So each fits
//! into two cache lines (docs/design/fast-path.md).

use crate::object_state::{ACCOUNTED, ALLOCATED, BEHIND, CACHED, PAID, States};
use crate::region::STACKS_END;
use crate::size_class::{Class, GRAIN, LARGEST, OF_GRAINS};
use crate::uncharger::Uncharger;
use core::arch::asm;
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use neap_base::Platform;
use neap_os::rseq::{self, SequenceResult, SequenceTable};
use neap_pages::{Frame, NodePages};

/// An entry of the kind map, which describes 4 KiB of the arena. Bits 0 to 15 are the home CPU.
/// Bits 16 to 31 are the [place](Class::place) of the class's stack in a region; 0 if the range
/// holds no objects.
///
/// The home is the CPU that the objects were last handed to in bulk. A whole
/// [part](Class::home_bytes) of a slab has one home. An object that is freed on another CPU is a
/// guest there. Guests return to the barn in batches, and malloc does not pop them. Otherwise
/// different CPUs would use neighbouring objects, and the cache lines of objects and state bytes
/// would move between these CPUs. The home is a hint: a wrong one costs time only.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct KindEntry(AtomicU32);

impl KindEntry {
    /// Bytes of the arena that an entry describes, on every page size, as a power of two.
    pub const SHIFT: u32 = 12;

    /// Binary logarithm of the bytes of arena for a byte of the kind map. An entry has four bytes.
    pub const TABLE_SHIFT: u8 = 10;

    /// The class of the objects in the range; [`Class::NONE`] if there are none.
    pub fn class(&self) -> Class {
        PageKind(self.0.load(Ordering::Relaxed)).class()
    }

    /// Sets the class of the range; [`Class::NONE`] for no objects. The home becomes 0.
    pub fn set(&self, class: Class) {
        self.0.store(u32::from(class.place()) << HOME_BITS, Ordering::Relaxed);
    }

    /// The range's home CPU, cut to 16 bits. No kernel supports more CPUs than fit.
    pub fn home(&self) -> u16 {
        PageKind(self.0.load(Ordering::Relaxed)).home()
    }

    /// Makes a CPU the home of the range. The caller has an object of the slab, so the class does
    /// not change meanwhile.
    pub fn set_home(&self, cpu: u16) {
        let entry = self.0.load(Ordering::Relaxed);
        let new = entry >> HOME_BITS << HOME_BITS | u32::from(cpu);
        // Every free reads the entry, so it is written only if its value changes.
        if entry != new {
            self.0.store(new, Ordering::Relaxed);
        }
    }
}

const HOME_BITS: u32 = u16::BITS;
const GRAIN_SHIFT: u32 = GRAIN.trailing_zeros();

/// The value of an entry of the kind map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct PageKind(u32);

impl PageKind {
    /// The class of the objects in the range.
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

/// Tables and addresses that malloc and free only read, followed by the table of the sequences,
/// which takers write to.
///
/// # Layout
///
/// malloc and free hold the address of `table` in a register. Most fields that they use lie in the
/// 128 bytes before it, in reach of a one-byte displacement.
///
/// The value is placed at the start of a page. The hot fields avoid two ranges of page offsets.
/// Programs write to the first cache line of every page that they get, and these lines compete for
/// a few cache sets. A load may wait for an earlier store to an equal offset of another page (4K
/// aliasing), such as a store into the stacks of a region. So the hot fields lie behind both
/// ranges. There is no room there for the words of `states`. They lie at the offsets of the stacks
/// of large classes.
#[derive(Debug)]
#[repr(C)]
pub struct FastPath {
    apart: [u64; APART],
    /// The state tables.
    pub(crate) states: States,
    /// [`FastPath::allocate`] serves sizes below this, without reading the thread's
    /// [word](neap_os::thread_state). If it is 0, `allocate` serves no size.
    limit: AtomicUsize,
    /// [`FastPath::allocate_outside`] serves sizes below this, to threads that have entered no
    /// group.
    limit_outside: AtomicUsize,
    /// [`FastPath::allocate_owned`] serves sizes below this; 0 if no fast path is open.
    pub(crate) served: AtomicUsize,
    /// The arena's base.
    base: AtomicUsize,
    /// Bytes of the arena that may hold objects.
    bytes: AtomicUsize,
    /// The kind map.
    kinds: AtomicPtr<KindEntry>,
    /// Address that the frame of address 0 would have. This field and the three after it are for
    /// charged objects: see [`payers`](crate::payers).
    pub(crate) frames: AtomicPtr<Frame>,
    /// The page size as a power of two.
    pub(crate) page_shift: AtomicU32,
    /// Mask of the bits of an address that are its offset on a page.
    pub(crate) page_mask: AtomicUsize,
    /// The callback that pays back owners.
    pub(crate) uncharger: AtomicPtr<Uncharger>,
    /// The table of the sequences: offset of the thread's control block, and regions by CPU.
    pub(crate) table: SequenceTable,
    /// The place of the class's stack, by size in grains, the largest first.
    places: [u16; PLACES],
    /// [`FastPath::counts`] returns `true` for sizes below this; 0 once a thread has entered a
    /// group.
    limit_counted: AtomicUsize,
    /// Whether a thread has ever entered a group.
    was_entered: AtomicBool,
}

/// Padding words that move the hot fields to page offsets used neither by page-start writes nor by
/// the stacks of a region.
const APART: usize = 389;

/// Entries of `places`: sizes in grains, from 0 to the largest.
const PLACES: usize = LARGEST / GRAIN + 1;

/// Offset of a field from `table`, in bytes.
macro_rules! from_table {
    ($field:ident) => {
        offset_of!(FastPath, $field) as isize - offset_of!(FastPath, table) as isize
    };
}

/// Offset of the entry of size 0 in `places` from `table`, in bytes.
const NO_SIZE: isize = from_table!(places) + (PLACES as isize - 1) * size_of::<u16>() as isize;

// The macros `take_top` and `free`, behind those that they use.
#[cfg(target_arch = "aarch64")]
#[macro_use]
mod aarch64;
#[cfg(target_arch = "x86_64")]
#[macro_use]
mod x86_64;

const fn places() -> [u16; PLACES] {
    let mut places = [0; PLACES];
    let mut grains = 0;
    while grains < PLACES {
        places[PLACES - 1 - grains] = Class(OF_GRAINS[grains]).place();
        grains += 1;
    }
    places
}

const _: () = {
    assert!(offset_of!(FastPath, table) <= offset_of!(FastPath, limit) + 128 && align_of::<SequenceTable>() >= 64);
    // `limit` and `table` lie at page offsets behind the stacks of a region.
    assert!(offset_of!(FastPath, limit) % 4096 >= STACKS_END && offset_of!(FastPath, table) % 4096 >= STACKS_END);
    // `states`, and the entries in `places` for sizes of whole pages, do not lie at page starts.
    assert!(offset_of!(FastPath, states) >= 64 && offset_of!(FastPath, states) + size_of::<States>() <= 4096);
    let mut size = 4096;
    while size <= LARGEST {
        assert!((offset_of!(FastPath, places) + (PLACES - 1 - size / GRAIN) * size_of::<u16>()) % 4096 >= 64);
        size += 4096;
    }
};

/// The result of [`FastPath::free`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FreeOutcome {
    /// The object is on a stack of this CPU.
    Cached,
    /// The object is marked as cached and belongs to the caller, which must cache it elsewhere.
    CacheFull,
    /// The pointer is not that of an object that the fast path frees. Nothing has changed.
    NotFastPath,
}

impl FastPath {
    /// A value that refuses every call.
    pub const fn closed() -> FastPath {
        FastPath {
            apart: [0; APART],
            states: States::none(),
            limit: AtomicUsize::new(0),
            limit_outside: AtomicUsize::new(0),
            served: AtomicUsize::new(0),
            base: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            kinds: AtomicPtr::new(core::ptr::null_mut()),
            frames: AtomicPtr::new(core::ptr::null_mut()),
            page_shift: AtomicU32::new(0),
            page_mask: AtomicUsize::new(0),
            uncharger: AtomicPtr::new(core::ptr::null_mut()),
            table: SequenceTable::unopened(),
            places: places(),
            limit_counted: AtomicUsize::new(0),
            was_entered: AtomicBool::new(false),
        }
    }

    /// Stores the addresses of an arena's tables. An instance calls this once. Objects may have
    /// owners from then on; the fast paths of malloc and free need [`FastPath::serve`].
    ///
    /// # Safety
    /// The tables and `uncharger` belong to the instance that `pages` is of, and no other thread
    /// has used this value before.
    pub(crate) unsafe fn open<P: Platform>(
        &self,
        pages: &NodePages<P>,
        kinds: usize,
        states: &States,
        uncharger: &Uncharger,
    ) {
        let base = pages.base();
        self.base.store(base, Ordering::Relaxed);
        self.kinds.store(core::ptr::with_exposed_provenance_mut(kinds), Ordering::Relaxed);
        self.states.copy(states);
        let frames = pages.frames().first().wrapping_sub(base >> pages.page_shift());
        self.frames.store(frames.cast_mut(), Ordering::Relaxed);
        self.page_shift.store(pages.page_shift(), Ordering::Relaxed);
        self.page_mask.store(pages.page_size() - 1, Ordering::Relaxed);
        self.uncharger.store(core::ptr::from_ref(uncharger).cast_mut(), Ordering::Relaxed);
    }

    /// Opens the fast paths, after [`FastPath::open`].
    pub(crate) fn serve(&self) {
        // Release publishes the tables. It pairs with the load in `take_top`, and with the Acquire
        // in `allocate_owned` and `put`.
        for limit in [&self.served, &self.limit_outside, &self.limit] {
            limit.store(LARGEST + 1, Ordering::Release);
        }
    }

    /// Makes [`FastPath::allocate`] refuse every size, so that callers look at the thread's word
    /// first. A thread calls this before it enters a group. The thread sees its own store. Other
    /// threads may see the store late; those that have entered no group need not see it.
    pub fn look_at_entered(&self) {
        // Every malloc reads the line of the limits, so each is written only if its value changes.
        if !self.was_entered.load(Ordering::Relaxed) {
            // SeqCst pairs with that in `unless_entered`: one of the two threads sees the other's
            // store, and stores the limit 0.
            self.was_entered.store(true, Ordering::SeqCst);
        }
        self.refuse(&self.limit_counted);
        self.refuse(&self.limit);
    }

    /// Makes [`FastPath::allocate`] refuse every size, so that callers count all allocations.
    /// Threads may see the store late.
    pub fn count_all(&self) {
        self.unless_entered(&self.limit_counted);
        self.refuse(&self.limit);
    }

    /// Ends [`FastPath::count_all`]. A thread that enters its first group during this call may get
    /// a few objects uncharged.
    pub fn count_none(&self) {
        self.refuse(&self.limit_counted);
        self.unless_entered(&self.limit);
    }

    /// Sets a limit to 0, so that the calls that compare with it refuse every size.
    fn refuse(&self, limit: &AtomicUsize) {
        if limit.load(Ordering::SeqCst) > 0 {
            limit.store(0, Ordering::SeqCst);
        }
    }

    /// Opens a limit, unless a thread has entered a group or [`FastPath::allocate_outside`] serves
    /// nothing.
    fn unless_entered(&self, limit: &AtomicUsize) {
        if self.limit_outside.load(Ordering::Relaxed) > 0 && !self.was_entered.load(Ordering::Relaxed) {
            limit.store(LARGEST + 1, Ordering::SeqCst);
            if self.was_entered.load(Ordering::SeqCst) {
                limit.store(0, Ordering::SeqCst);
            }
        }
    }

    /// Whether an allocation of `size` bytes is to be counted, and no thread has entered a group.
    /// The caller goes on in [`FastPath::allocate_outside`].
    #[inline(always)]
    pub fn counts(&self, size: usize) -> bool {
        size < self.limit_counted.load(Ordering::Relaxed)
    }

    /// Makes [`FastPath::allocate_outside`] refuse every size as well, so that threads outside all
    /// groups take the slow path.
    pub fn serve_entered_alone(&self) {
        self.look_at_entered();
        self.limit_outside.store(0, Ordering::Relaxed);
    }

    /// Extends the range that `free` accepts to `bytes` from the arena's base. The caller does this
    /// before a thread gets an object of the new part.
    pub(crate) fn cover(&self, bytes: usize) {
        if self.bytes.load(Ordering::Relaxed) < bytes && self.served.load(Ordering::Relaxed) > 0 {
            self.bytes.fetch_max(bytes, Ordering::Release); // Pairs with the load in `free`.
        }
    }

    /// Whether [`FastPath::allocate`] serves anything. It does not once a thread has entered a
    /// group, or while all allocations are counted.
    pub fn serves_unasked(&self) -> bool {
        self.limit.load(Ordering::Relaxed) > 0
    }

    /// Whether [`FastPath::allocate_outside`] serves anything.
    pub fn serves_all(&self) -> bool {
        self.limit_outside.load(Ordering::Relaxed) > 0
    }

    /// Takes an object of at least `size` bytes from this CPU's stack. Returns `None` if the
    /// topmost object is charged, if there is none, or if some thread has
    /// [entered](neap_os::thread_state) a group of this manager. The caller then reads this
    /// thread's word.
    #[inline(always)]
    pub fn allocate(&self, size: usize) -> Option<NonNull<u8>> {
        self.take_top::<{ from_table!(limit) }>(size)
    }

    /// Takes an object of at least `size` bytes from this CPU's stack, for a thread that is in no
    /// group. `None`: the caller goes on in [`Objects`](crate::objects::Objects).
    #[inline(always)]
    pub fn allocate_outside(&self, size: usize) -> Option<NonNull<u8>> {
        self.take_top::<{ from_table!(limit_outside) }>(size)
    }

    /// Takes the topmost object of this CPU's stack for `size` bytes. The limit of sizes lies
    /// `LIMIT` bytes from the table. The state byte is checked before the object is taken, so there
    /// is one exit for all refusals.
    #[inline(always)]
    fn take_top<const LIMIT: isize>(&self, size: usize) -> Option<NonNull<u8>> {
        if cfg!(miri) {
            return None; // Miri has no sequences.
        }
        // SAFETY: the size is below a limit that is not 0, so the slots are open and `places` has
        // its entry. Objects on stacks lie in the arena, which the state tables cover. The only
        // stores are the commit and the state byte of the object, which is this thread's then.
        let object = unsafe { take_top!(self, size, LIMIT) };
        if object.is_null() {
            // SAFETY: the block has no instruction. It keeps the branch's code behind the function,
            // where a short jump reaches it.
            unsafe { asm!("", options(nomem, nostack, preserves_flags)) };
        }
        NonNull::new(object)
    }

    /// Takes the topmost object of this CPU's stack for `size` bytes. The object stays marked as
    /// cached and belongs to the caller. `None` if the pop was refused or aborted.
    ///
    /// # Safety
    /// `size` is at most [`LARGEST`], and [`FastPath::serve`] was called.
    #[inline(always)]
    pub(crate) unsafe fn pop(&self, size: usize) -> Option<NonNull<u8>> {
        #[expect(clippy::manual_div_ceil, reason = "two instructions instead of five")]
        // SAFETY: the size is at most the largest, so its number of grains is below `PLACES`.
        let place = unsafe { *self.places.get_unchecked(PLACES - 1 - (size + GRAIN - 1) / GRAIN) };
        // SAFETY: `serve` was called, so the table holds the registered offset, and a region or
        // DUMMY for each entry. Both have a stack at every place in `places`, and stay mapped while
        // the instance is used.
        NonNull::new(unsafe { rseq::pop(&self.table, usize::from(place)) })
    }

    /// Frees an object: marks it as cached and pushes it onto a stack of this CPU.
    #[inline(always)]
    pub fn free(&self, pointer: *mut u8) -> FreeOutcome {
        if cfg!(miri) {
            return FreeOutcome::NotFastPath; // Miri has no sequences.
        }
        // SAFETY: `bytes` is 0 until the slots are open. For addresses below it, the kind map and
        // the state tables have entries. The only stores are those of a push, and the state byte of
        // an object that the program frees and that is this thread's then.
        unsafe { free!(self, pointer) }
    }

    /// The kind of the range that an address lies in.
    ///
    /// # Safety
    /// The address lies in the arena that this [`FastPath`] was opened for.
    #[inline]
    pub unsafe fn kind(&self, pointer: *const u8) -> PageKind {
        let offset = pointer.addr().wrapping_sub(self.base.load(Ordering::Relaxed));
        // SAFETY: the address lies in the arena, and the kind map has an entry for each 4 KiB of
        // it.
        let entry = unsafe { &*self.kinds.load(Ordering::Relaxed).wrapping_add(offset >> KindEntry::SHIFT) };
        PageKind(entry.0.load(Ordering::Relaxed))
    }

    /// The class of an object that the program has. `None` for other pointers, and while no fast
    /// path is open.
    #[inline]
    pub fn class_of(&self, pointer: *const u8) -> Option<Class> {
        let offset = pointer.addr().wrapping_sub(self.base.load(Ordering::Relaxed));
        // Acquire pairs with the Release in `cover`.
        if offset >= self.bytes.load(Ordering::Acquire) {
            return None;
        }
        let is = |state| {
            // SAFETY: below `bytes`, the state tables cover the arena.
            unsafe { self.states.is(pointer.addr(), state) }
        };
        // SAFETY: below `bytes`, the kind map covers the arena.
        (is(ALLOCATED) || is(ACCOUNTED)).then(|| unsafe { self.kind(pointer) }.class())
    }

    /// Pushes an object that is marked as cached and belongs to the caller onto a stack of this
    /// CPU. Returns `false` if the caller still has it.
    ///
    /// # Safety
    /// `object` belongs to the instance that this [`FastPath`] was opened for, and `kind` is its
    /// kind, not [`Class::NONE`].
    #[inline(always)]
    pub unsafe fn put(&self, kind: PageKind, object: *mut u8) -> bool {
        // Acquire pairs with the Release in `serve`. Before that there are no stacks to push to.
        // While `served` is not 0, the table has the registered offset, and a region or DUMMY in
        // each entry.
        // SAFETY: `kind` has a class (the caller's promise), so that class's stack lies at its
        // place, and the stack of guests behind it. The object is the caller's (its promise).
        let push = || unsafe { rseq::push(&self.table, kind.place().into(), kind.home(), object) };
        self.served.load(Ordering::Acquire) > 0 && push() == SequenceResult::Committed
    }
}

/// Ends the process: a stack gave out an object that was not cached. Two threads freed it at the
/// same moment, or a state table was overwritten.
///
/// Never returns. The return type lets a caller that hands out an object end in a tail call,
/// without a stack frame.
#[cold]
#[inline(never)]
pub fn corrupt(object: NonNull<u8>) -> Option<NonNull<u8>> {
    neap_os::fatal::die(format_args!(
        "double free: {object:p} was freed by two threads at once; found before it was handed out again"
    ))
}
