//! The frame table: sixteen bytes for every page, beside the memory and never in it.
//!
//! # Design
//!
//! A frame has the state of its page, two links or a word in their place, and an owner number for
//! the thread or layer that has the page.
//!
//! # Concurrency
//!
//! All accesses of this layer are relaxed atomics. The page's state determines the frame's writer:
//! the holder of the zone's mutex for free blocks, the holder of a CPU's list lock for listed ones,
//! and the holder of the block otherwise. A reader without a lock gets a value that may be
//! outdated.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use neap_base::{Order, Pfn};

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Never used, or a page of a free chunk. Fresh zeroes have this state.
    Absent = 0,
    /// Part of a block, but not its first page.
    Inside = 1,
    /// First page of a free block on a buddy list. Whole free chunks are in the chunk map only.
    Free = 2,
    /// First page of a block in a CPU's list.
    Listed = 3,
    /// First page of a block that was handed out.
    Allocated = 4,
    /// First page of a run that was handed out; `owner` holds its number of pages.
    Run = 5,
    /// Page of a slab, every one of them; `owner` is the slab's number.
    Slab = 6,
    /// First page of a block that is detached while its memory is released or populated.
    Releasing = 7,
    /// First page of a run in a CPU's cache; `owner` holds its number of pages.
    Cached = 8,
}

impl State {
    #[inline]
    fn from_byte(byte: u8) -> State {
        match byte {
            0 => State::Absent,
            1 => State::Inside,
            2 => State::Free,
            3 => State::Listed,
            4 => State::Allocated,
            5 => State::Run,
            6 => State::Slab,
            7 => State::Releasing,
            _ => State::Cached,
        }
    }
}

/// The metadata of one page.
///
/// While a block is handed out, its holder uses `next`, `prev`, `spare` and, except for a run,
/// `owner` of all its frames. The two links may be one [word](Frame::word) instead. The word of
/// every page of a slab, and of the first page of a run, is 0 at first.
#[derive(Debug)]
#[repr(C, align(16))]
pub struct Frame {
    next: AtomicU32,
    prev: AtomicU32,
    owner: AtomicU32,
    state: AtomicU8,
    order: AtomicU8,
    spare: AtomicU16,
}

const _: () = assert!(size_of::<Frame>() == 16);

impl Frame {
    /// Offset of the [word](Frame::word), for readers of this process's memory.
    pub const WORD_AT: usize = offset_of!(Frame, next);

    /// The page's state.
    #[inline]
    pub fn state(&self) -> State {
        State::from_byte(self.state.load(Relaxed))
    }

    /// Sets the page's state.
    #[inline]
    pub fn set_state(&self, state: State) {
        self.state.store(state as u8, Relaxed);
    }

    /// Turns the state of a run's first page from handed out to cached. Returns `false` and changes
    /// nothing if it is in another state. Of two threads that free a run, one gets `true`.
    #[inline]
    pub(crate) fn cache_run(&self) -> bool {
        // Relaxed: the state alone decides. The lock of the cache orders everything else.
        self.state.compare_exchange(State::Run as u8, State::Cached as u8, Relaxed, Relaxed).is_ok()
    }

    /// The order of the block whose first page this is.
    #[inline]
    pub fn order(&self) -> Order {
        Order(self.order.load(Relaxed))
    }

    /// Sets the order of the block.
    #[inline]
    pub fn set_order(&self, order: Order) {
        self.order.store(order.0, Relaxed);
    }

    /// Sets state and order of a block's first page.
    #[inline]
    pub fn set_head(&self, state: State, order: Order) {
        self.set_order(order);
        self.set_state(state);
    }

    /// The owner's number; for [`State::Run`] the run's number of pages.
    #[inline]
    pub fn owner(&self) -> u32 {
        self.owner.load(Relaxed)
    }

    /// Sets the owner's number.
    #[inline]
    pub fn set_owner(&self, owner: u32) {
        self.owner.store(owner, Relaxed);
    }

    /// The next frame of a list, [`Pfn::NONE`] at its end.
    #[inline]
    pub fn next(&self) -> Pfn {
        Pfn(self.next.load(Relaxed))
    }

    /// Sets the next frame of a list.
    #[inline]
    pub fn set_next(&self, next: Pfn) {
        self.next.store(next.0, Relaxed);
    }

    /// The frame before this one in a list, [`Pfn::NONE`] at its start.
    #[inline]
    pub fn prev(&self) -> Pfn {
        Pfn(self.prev.load(Relaxed))
    }

    /// Sets the frame before this one.
    #[inline]
    pub fn set_prev(&self, prev: Pfn) {
        self.prev.store(prev.0, Relaxed);
    }

    /// A word in the place of both links, for the holder of a page that was handed out.
    #[inline(always)]
    pub fn word(&self) -> &AtomicU64 {
        // SAFETY: the links are the first eight bytes of an aligned frame. The holder of a page
        // uses either the links or the word, and a page changes hands under a lock, so the two are
        // never accessed at once.
        unsafe { &*core::ptr::from_ref(self).cast() }
    }

    /// Sixteen bits for the holder of the page.
    #[inline]
    pub fn spare(&self) -> u16 {
        self.spare.load(Relaxed)
    }

    /// Sets the sixteen bits.
    #[inline]
    pub fn set_spare(&self, spare: u16) {
        self.spare.store(spare, Relaxed);
    }
}

/// The frames of all pages of an arena, up to the arena's present end.
#[derive(Debug)]
pub struct Frames {
    start: *const Frame,
    pages: AtomicU32,
}

// SAFETY: frames are atomics, and the pointer never changes.
unsafe impl Send for Frames {}
// SAFETY: frames are atomics, and the pointer never changes.
unsafe impl Sync for Frames {}

impl Frames {
    /// An empty table that starts at `address`.
    pub(crate) fn at(address: usize) -> Frames {
        Frames { start: core::ptr::with_exposed_provenance(address), pages: AtomicU32::new(0) }
    }

    /// Address of the number of frames, for readers of this process's memory.
    pub fn pages_word(&self) -> *const u32 {
        self.pages.as_ptr()
    }

    /// Sets the number of frames.
    ///
    /// # Safety
    /// The memory of that many frames is mapped, readable and writable, and stays so while this
    /// value is used. It need not be mapped for pages in holes of the arena. Those frames are never
    /// accessed.
    pub(crate) unsafe fn grow(&self, pages: u32) {
        self.pages.store(pages, Relaxed);
    }

    /// The frame of page 0. Those of the other pages follow.
    pub fn first(&self) -> *const Frame {
        self.start
    }

    /// Number of frames.
    #[inline]
    pub fn pages(&self) -> u32 {
        self.pages.load(Relaxed)
    }

    /// The frame of a page of the arena.
    #[inline]
    pub fn frame(&self, pfn: Pfn) -> &Frame {
        if pfn.0 >= self.pages() {
            outside(pfn, self.pages());
        }
        // SAFETY: the page is below `pages`, and the caller of `grow` said that as many frames are
        // mapped. No code accesses frames in holes. A frame consists of atomics, so threads may
        // share it.
        unsafe { &*self.start.add(pfn.index()) }
    }

    /// The owner of a run that is handed out. The initial value 0 means that no owner is charged.
    #[inline]
    pub fn run_owner(&self, pfn: Pfn) -> u64 {
        self.frame(pfn).word().load(Relaxed)
    }

    /// Sets the owner of a run while it is handed out; 0 means not charged. A resize keeps the
    /// owner.
    #[inline]
    pub fn set_run_owner(&self, pfn: Pfn, owner: u64) {
        self.frame(pfn).word().store(owner, Relaxed);
    }

    /// Makes every page of an allocated block a slab's page with this owner.
    #[inline]
    pub fn mark_slab(&self, pfn: Pfn, order: Order, owner: u32) {
        for page in pfn.0..pfn.0 + order.pages() {
            let frame = self.frame(Pfn(page));
            frame.set_owner(owner);
            frame.word().store(0, Relaxed);
            frame.set_state(State::Slab);
        }
    }
}

#[cold]
#[inline(never)]
fn outside(pfn: Pfn, pages: u32) -> ! {
    neap_os::fatal::die(format_args!("page {} is outside the arena of {pages} pages", pfn.0));
}
