//! The frame table: sixteen bytes about every page, beside the memory and never in it.
//!
//! Sits between the arena, which maps it, and everybody who asks what a page is. A frame says what state its page is in,
//! and carries two links, or a word in their place, and an owner for whoever has the page. All accesses of this layer's
//! are single relaxed atomics: who may write a frame follows from its state (the zone's lock for free blocks, a CPU's list
//! lock for listed ones, the holder of the block for the rest), and a reader without a lock gets an answer that was true
//! once. Takes no lock itself.

use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use neap_base::{Order, Pfn};

/// What a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Never used, or a page of a free chunk; what fresh zeroes say.
    Absent = 0,
    /// Part of a block, not its first page.
    Inside = 1,
    /// First page of a free block on a buddy list. (Whole free chunks are known by the chunk map alone.)
    Free = 2,
    /// First page of a block in a CPU's list.
    Listed = 3,
    /// First page of a block that was handed out.
    Allocated = 4,
    /// First page of a run that was handed out; `owner` holds its number of pages.
    Run = 5,
    /// Page of a slab, every one of them; `owner` is the object layer's.
    Slab = 6,
    /// First page of a block that is detached while its memory goes back to the system, or comes from it.
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

/// What is known about one page.
///
/// While a block is handed out, `next`, `prev`, `spare` and (except for a run) `owner` of all its frames belong to
/// whoever holds it. The two links may be one [word](Frame::word) instead; that of every page of a slab, and of the first page
/// of a run, is 0 at first.
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
    /// What the page is.
    #[inline]
    pub fn state(&self) -> State {
        State::from_byte(self.state.load(Relaxed))
    }

    /// Says what the page is.
    #[inline]
    pub fn set_state(&self, state: State) {
        self.state.store(state as u8, Relaxed);
    }

    /// Makes the first page of a run that was handed out one of a cached run. `false`, and nothing
    /// changed, if it is none: of two threads that free a run one gets `true`.
    #[inline]
    pub(crate) fn cache_run(&self) -> bool {
        // Relaxed: the state alone decides; the lock of the cache orders everything else.
        self.state.compare_exchange(State::Run as u8, State::Cached as u8, Relaxed, Relaxed).is_ok()
    }

    /// The order of the block whose first page this is.
    #[inline]
    pub fn order(&self) -> Order {
        Order(self.order.load(Relaxed))
    }

    /// Says of which order the block is.
    #[inline]
    pub fn set_order(&self, order: Order) {
        self.order.store(order.0, Relaxed);
    }

    /// State and order at once, as of a block's first page.
    #[inline]
    pub fn set_head(&self, state: State, order: Order) {
        self.set_order(order);
        self.set_state(state);
    }

    /// The owner's number; for [`State::Run`] its pages.
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

    /// What takes the place of both links while a page that was handed out has a use for it.
    #[inline(always)]
    pub fn word(&self) -> &AtomicU64 {
        // SAFETY: the links are the first eight bytes of an aligned frame. Who has the page uses either them or the word, and
        // a page changes hands under a lock, so the two are never used at once.
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

/// All frames of an arena, as far as it has grown.
#[derive(Debug)]
pub struct Frames {
    start: *const Frame,
    pages: AtomicU32,
}

// SAFETY: frames are atomics; the pointer itself never changes.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

impl Frames {
    /// A table that starts at `address` and holds nothing yet.
    pub(crate) fn at(address: usize) -> Frames {
        Frames { start: core::ptr::with_exposed_provenance(address), pages: AtomicU32::new(0) }
    }

    /// Lets the table hold `pages` frames from now on.
    ///
    /// # Safety
    /// That much of it is mapped, readable and writable, and stays so while this value is used.
    pub(crate) unsafe fn grow(&self, pages: u32) {
        self.pages.store(pages, Relaxed);
    }

    /// The frame of page 0; that of every other follows.
    pub fn first(&self) -> *const Frame {
        self.start
    }

    /// Frames there are.
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
        // SAFETY: below `pages`, which `grow` was promised is mapped; a frame is atomics, so sharing it is sound.
        unsafe { &*self.start.add(pfn.index()) }
    }

    /// Who pays for a run that is handed out; 0: nobody, as at first.
    #[inline]
    pub fn run_owner(&self, pfn: Pfn) -> u64 {
        self.frame(pfn).word().load(Relaxed)
    }

    /// Says who pays for a run as long as it is handed out, however long it becomes; 0: nobody.
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
    neap_os::write::die(format_args!("page {} is outside the arena of {pages} pages", pfn.0));
}
