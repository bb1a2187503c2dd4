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

use crate::kind_map::{HOME_BITS, KindEntry, PageKind};
use crate::object_state::{ACCOUNTED, ALLOCATED, BEHIND, CACHED, PAID, States};
use crate::size_class::{Class, LARGEST};
use crate::uncharger::Uncharger;
use core::arch::asm;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use layout::{GRAIN_SHIFT, NO_SIZE, PADDING, SIZES, entry_of, stack_offsets};
use neap_base::Platform;
use neap_os::rseq::{self, SequenceResult, SequenceTable};
use neap_pages::{Frame, NodePages};

/// Tables and addresses that malloc and free only read, followed by the table of the sequences,
/// which takers write to.
///
/// The module `layout` says where each field lies, and why.
#[derive(Debug)]
#[repr(C)]
pub struct FastPath {
    padding: [u64; PADDING],
    /// The state tables.
    pub(crate) states: States,
    /// [`FastPath::allocate`] serves sizes below this, without reading the thread's
    /// [word](neap_os::thread_state). If it is 0, `allocate` serves no size.
    limit: AtomicUsize,
    /// [`FastPath::allocate_ungrouped`] serves sizes below this, to threads that have entered no
    /// group.
    limit_outside: AtomicUsize,
    /// [`FastPath::allocate_grouped`] serves sizes below this; 0 if no fast path is open.
    pub(crate) served: AtomicUsize,
    /// The arena's base.
    pub(crate) base: AtomicUsize,
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
    /// The [offset](Class::stack_offset) of the class's stack, by size in grains, the largest
    /// first.
    stack_offsets: [u16; SIZES],
    /// [`FastPath::counts`] returns `true` for sizes below this; 0 once a thread has entered a
    /// group.
    limit_counted: AtomicUsize,
    /// Whether a thread has ever entered a group.
    was_entered: AtomicBool,
}

#[macro_use]
mod layout;
// The macros `take_top` and `free`, behind those that they use.
#[cfg(target_arch = "aarch64")]
#[macro_use]
mod aarch64;
#[cfg(target_arch = "x86_64")]
#[macro_use]
mod x86_64;

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
            padding: [0; PADDING],
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
            stack_offsets: stack_offsets(),
            limit_counted: AtomicUsize::new(0),
            was_entered: AtomicBool::new(false),
        }
    }

    /// Stores the addresses of an arena's tables. An instance calls this once. Objects may have
    /// owners from then on; the fast paths of malloc and free need [`FastPath::enable`].
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
    pub(crate) fn enable(&self) {
        // Release publishes the tables. It pairs with the load in `take_top`, and with the Acquire
        // in `allocate_grouped` and `put`.
        for limit in [&self.served, &self.limit_outside, &self.limit] {
            limit.store(LARGEST + 1, Ordering::Release);
        }
    }

    /// Makes [`FastPath::allocate`] refuse every size, so that callers look at the thread's word
    /// first. A thread calls this before it enters a group. The thread sees its own store. Other
    /// threads may see the store late; those that have entered no group need not see it.
    pub fn enable_group_check(&self) {
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

    /// Opens a limit, unless a thread has entered a group or [`FastPath::allocate_ungrouped`]
    /// serves nothing.
    fn unless_entered(&self, limit: &AtomicUsize) {
        if self.limit_outside.load(Ordering::Relaxed) > 0 && !self.was_entered.load(Ordering::Relaxed) {
            limit.store(LARGEST + 1, Ordering::SeqCst);
            if self.was_entered.load(Ordering::SeqCst) {
                limit.store(0, Ordering::SeqCst);
            }
        }
    }

    /// Whether an allocation of `size` bytes is to be counted, and no thread has entered a group.
    /// The caller goes on in [`FastPath::allocate_ungrouped`].
    #[inline(always)]
    pub fn counts(&self, size: usize) -> bool {
        size < self.limit_counted.load(Ordering::Relaxed)
    }

    /// Makes [`FastPath::allocate_ungrouped`] refuse every size as well, so that threads outside
    /// all groups take the slow path.
    pub fn disable_ungrouped_fast_path(&self) {
        self.enable_group_check();
        self.limit_outside.store(0, Ordering::Relaxed);
    }

    /// Extends the range that `free` accepts to `bytes` from the arena's base. The caller does this
    /// before a thread gets an object of the new part.
    pub(crate) fn extend_covered_range(&self, bytes: usize) {
        if self.bytes.load(Ordering::Relaxed) < bytes && self.served.load(Ordering::Relaxed) > 0 {
            self.bytes.fetch_max(bytes, Ordering::Release); // Pairs with the load in `free`.
        }
    }

    /// Whether [`FastPath::allocate`] serves anything. It does not once a thread has entered a
    /// group, or while all allocations are counted.
    pub fn serves_unchecked(&self) -> bool {
        self.limit.load(Ordering::Relaxed) > 0
    }

    /// Whether [`FastPath::allocate_ungrouped`] serves anything.
    pub fn serves_ungrouped(&self) -> bool {
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
    pub fn allocate_ungrouped(&self, size: usize) -> Option<NonNull<u8>> {
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
        // SAFETY: the size is below a limit that is not 0, so the slots are open and the size has
        // an entry. Objects on stacks lie in the arena, which the state tables cover. The only
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
    /// `size` is at most [`LARGEST`], and [`FastPath::enable`] was called.
    #[inline(always)]
    pub(crate) unsafe fn pop(&self, size: usize) -> Option<NonNull<u8>> {
        // SAFETY: the size is at most the largest, so it has an entry.
        let offset = unsafe { *self.stack_offsets.get_unchecked(entry_of(size)) };
        // SAFETY: `enable` was called, so the table holds the registered offset, and a region or
        // the closed region for each entry. Both have a stack at every offset in `stack_offsets`,
        // and stay mapped while the instance is used.
        NonNull::new(unsafe { rseq::pop(&self.table, usize::from(offset)) })
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
        entry.kind()
    }

    /// The class of an object that the program has. `None` for other pointers, and while no fast
    /// path is open.
    #[inline]
    pub fn class_of(&self, pointer: *const u8) -> Option<Class> {
        let offset = pointer.addr().wrapping_sub(self.base.load(Ordering::Relaxed));
        // Acquire pairs with the Release in `extend_covered_range`.
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
        // Acquire pairs with the Release in `enable`. Before that there are no stacks to push to.
        // While `served` is not 0, the table has the registered offset, and a region or the closed
        // region in each entry.
        // SAFETY: `kind` has a class (the caller's promise), so that class's stack lies at its
        // offset, and its remote stack behind it. The object is the caller's (its promise).
        let push = || unsafe { rseq::push(&self.table, kind.stack_offset().into(), kind.home(), object) };
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
