//! The buddy allocator: the free pages, their blocks, and which of them have memory.
//!
//! # Design
//!
//! Blocks of order 0 to 9 are on index-linked lists, three per order: wholly, partly and not
//! backed. Allocations take wholly backed blocks first, however large, since the missing pages of a
//! partly backed block would come from the system. Whole free chunks (order 10) are bits of a map.
//! A bit per page says whether the page is backed. The bit is set when a block that was in use is
//! freed, and cleared when the system has taken the memory. The bits of a block's pages determine
//! its list.
//!
//! Runs are in `runs`, chains for the CPU lists in `block_batch`, and detached blocks in `isolate`.
//! This module makes no system call and knows neither budget nor time.
//!
//! # Locking
//!
//! The lock of the zone protects every call.

use crate::frames::{Frames, State};
use crate::units::{Block, CHUNK, CHUNK_ORDER};
use core::ops::Range;
use core::ptr::NonNull;
use neap_base::{Order, Pfn, bitmap};

/// Number of orders with lists.
pub(crate) const LIST_ORDERS: usize = CHUNK_ORDER.index();

/// The class of blocks without memory, and of free chunks without memory.
pub(crate) const UNBACKED: usize = 0;
/// The class of blocks with memory behind some of their pages, and of free chunks with any memory.
pub(crate) const PARTLY: usize = 1;
/// The class of blocks with memory behind all of their pages.
pub(crate) const BACKED: usize = 2;

/// The memory of pages that are freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// All pages may have memory: they were in use.
    All,
    /// No page has memory: it was moved away.
    None,
    /// As the map of backed pages says.
    AsRecorded,
}

/// The class of a block of `pages` pages, of which `backed` are backed.
const fn class_of(backed: u32, pages: u32) -> usize {
    if backed == 0 {
        UNBACKED
    } else if backed < pages {
        PARTLY
    } else {
        BACKED
    }
}

/// A map in a table of the arena.
#[derive(Debug)]
pub(crate) struct Map {
    start: *mut u64,
    words: usize,
}

impl Map {
    #[inline]
    pub(crate) fn get(&self) -> &[u64] {
        // SAFETY: the caller of `Buddy::add` said that these words are mapped and that only this
        // map uses them. The map begins at a page. `self` is borrowed shared.
        unsafe { core::slice::from_raw_parts(self.start, self.words) }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self) -> &mut [u64] {
        // SAFETY: the caller of `Buddy::add` said that these words are mapped and that only this
        // map uses them. The map begins at a page. `self` is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.start, self.words) }
    }
}

/// The map of backed pages in a table of the arena. The buddies of several nodes share it. A
/// chunk's part is whole words, and each buddy makes slices of words of its own chunks only.
#[derive(Debug)]
pub(crate) struct PageMap {
    start: *mut u64,
    words: usize,
}

impl PageMap {
    /// The words of a range of pages, and the pages' bits in them.
    #[inline]
    fn words(&self, pfn: Pfn, pages: u32) -> (NonNull<[u64]>, Range<usize>) {
        let (start, end) = (pfn.index(), pfn.index() + pages as usize);
        let (first, last) = (start / 64, end.div_ceil(64));
        assert!(last <= self.words, "pages {start} to {end} of {}", self.words * 64);
        // SAFETY: `first` is at most `words`, so the pointer stays in the mapped table, whose
        // address is not null.
        let words = unsafe { NonNull::new_unchecked(self.start.add(first)) };
        (NonNull::slice_from_raw_parts(words, last - first), start - first * 64..end - first * 64)
    }

    /// Sets for every page of a range whether it is backed.
    pub(crate) fn set(&mut self, pfn: Pfn, pages: u32, backed: bool) {
        let (mut words, range) = self.words(pfn, pages);
        // SAFETY: the caller of `Buddy::add` said that only this buddy uses the words of its
        // chunks. `self` is borrowed exclusively.
        let words = unsafe { words.as_mut() };
        let write = if backed { bitmap::set_range } else { bitmap::clear_range };
        write(words, range.start, range.end);
    }

    /// Number of backed pages of a range.
    #[inline]
    pub(crate) fn count(&self, pfn: Pfn, pages: u32) -> u32 {
        let (words, range) = self.words(pfn, pages);
        // SAFETY: the caller of `Buddy::add` said that only this buddy uses the words of its
        // chunks. `self` is borrowed shared.
        bitmap::count_range(unsafe { words.as_ref() }, range.start, range.end) as u32
    }

    /// The first adjacent backed pages of a range; `None` if there are none.
    pub(crate) fn next_part(&self, pfn: Pfn, pages: u32) -> Option<Range<u32>> {
        let (words, range) = self.words(pfn, pages);
        // SAFETY: the caller of `Buddy::add` said that only this buddy uses the words of its
        // chunks. `self` is borrowed shared.
        let words = unsafe { words.as_ref() };
        let start = bitmap::next_set(words, range.start, range.end)?;
        let end = bitmap::next_clear(words, start, range.end).unwrap_or(range.end);
        let page = |bit: usize| pfn.0 + (bit - range.start) as u32;
        Some(page(start)..page(end))
    }

    /// Whether any page of a range is backed.
    #[inline]
    pub(crate) fn any(&self, pfn: Pfn, pages: u32) -> bool {
        let (words, range) = self.words(pfn, pages);
        // SAFETY: the caller of `Buddy::add` said that only this buddy uses the words of its
        // chunks. `self` is borrowed shared.
        bitmap::next_set(unsafe { words.as_ref() }, range.start, range.end).is_some()
    }
}

/// A block and its class. [`Buddy::find`] finds it among the free ones; [`Buddy::carve`] returns
/// the one that it cut out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoundBlock {
    pub(crate) pfn: Pfn,
    pub(crate) order: Order,
    pub(crate) class: usize,
}

/// Both ends of a list of free blocks. The head was freed last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) head: Pfn,
    pub(crate) tail: Pfn,
}

#[derive(Debug)]
pub(crate) struct Buddy {
    pub(crate) frames: Frames,
    /// A bit per page, set if the page may have memory, with any contents.
    pub(crate) backed: PageMap,
    /// A bit per chunk, set if all of it is free.
    pub(crate) free_chunks: Map,
    /// A bit per chunk, set if all of it is free and some of it is backed.
    pub(crate) backed_chunks: Map,
    /// A bit per chunk, set if the chunk is lazily free: it is backed, and the system may take its
    /// memory when the system is short of memory.
    pub(crate) lazy_chunks: Map,
    /// Number of backed pages of lazily free chunks.
    pub(crate) lazy: u32,
    /// No chunk below this one is free.
    pub(crate) chunk_hint: u32,
    pub(crate) lists: [[Ends; LIST_ORDERS]; 3],
    /// By class: a bit per order, set if the list is not empty.
    pub(crate) filled: [u16; 3],
    pub(crate) managed: u32,
    pub(crate) free: u32,
    pub(crate) backed_free: u32,
    /// Pages with memory of blocks that are [detached](crate::isolate).
    pub(crate) backed_detached: u32,
    /// The least `backed_free` since its last reset.
    pub(crate) backed_low: u32,
    /// Number of chunks from address 0 to the base. Page numbers count from the base, alignments
    /// from address 0.
    pub(crate) base_chunks: usize,
    /// Whether free chunks are cut only if no smaller free block is large enough, with memory or
    /// without. The chunks then serve their previous use again.
    pub(crate) keeps_chunks: bool,
}

// SAFETY: the pointers lead to tables, or parts of one, that belong to this value alone; frames are
// atomics.
unsafe impl Send for Buddy {}

impl Buddy {
    /// Creates a buddy without pages. The arguments are the addresses of its frame table and of its
    /// maps. All of these tables must be zero.
    pub(crate) fn new(frames: usize, backed: usize, [free, some, lazy]: [usize; 3]) -> Buddy {
        let map = |start| Map { start: core::ptr::with_exposed_provenance_mut(start), words: 0 };
        Buddy {
            frames: Frames::at(frames),
            backed: PageMap { start: core::ptr::with_exposed_provenance_mut(backed), words: 0 },
            free_chunks: map(free),
            backed_chunks: map(some),
            lazy_chunks: map(lazy),
            lazy: 0,
            chunk_hint: 0,
            lists: [[Ends { head: Pfn::NONE, tail: Pfn::NONE }; LIST_ORDERS]; 3],
            filled: [0; 3],
            managed: 0,
            free: 0,
            backed_free: 0,
            backed_detached: 0,
            backed_low: 0,
            base_chunks: 0,
            keeps_chunks: false,
        }
    }

    /// Adds new pages without memory. They must lie above all pages added so far.
    ///
    /// # Safety
    /// * Frame table and maps are mapped for all these pages, and for all added before, as long as
    ///   this value lives.
    /// * No other code uses the maps of chunks, or the words of the map of backed pages for these
    ///   chunks.
    /// * Frames are accessed by the rules of the module `frames`.
    pub(crate) unsafe fn add(&mut self, start: Pfn, pages: u32) {
        let end = start.0 + pages;
        // SAFETY: the caller says that the frame table is mapped for all pages that are used.
        unsafe { self.frames.grow(end) };
        self.backed.words = end.div_ceil(64) as usize;
        let chunks = end.div_ceil(CHUNK);
        self.free_chunks.words = chunks.div_ceil(64) as usize;
        self.backed_chunks.words = self.free_chunks.words;
        self.lazy_chunks.words = self.free_chunks.words;
        self.managed += pages;
        if !(start.0 | pages).is_multiple_of(CHUNK) {
            return self.give_range(start, pages, Memory::AsRecorded);
        }
        // For fresh whole chunks, only the map is written.
        let first = start.0 / CHUNK;
        bitmap::set_range(self.free_chunks.get_mut(), first as usize, chunks as usize);
        self.chunk_hint = self.chunk_hint.min(first);
        self.free += pages;
    }

    /// Allocates a block, backed if possible.
    pub(crate) fn allocate_block(&mut self, order: Order) -> Option<Block> {
        let FoundBlock { pfn, class, .. } = self.take(order)?;
        self.frames.frame(pfn).set_head(State::Allocated, order);
        Some(Block { pfn, zero: class == UNBACKED })
    }

    /// Allocates a block with memory behind all of its pages, if there is one.
    pub(crate) fn allocate_backed_block(&mut self, order: Order) -> Option<Block> {
        if self.has_backed(order) { self.allocate_block(order) } else { None }
    }

    /// Removes a block of exactly this order from the free ones.
    pub(crate) fn take(&mut self, order: Order) -> Option<FoundBlock> {
        let found = self.find(order)?;
        Some(self.carve(found, order))
    }

    /// The free block to cut for a block of this order: one with as much memory as possible, and
    /// the smallest of these.
    pub(crate) fn find(&self, order: Order) -> Option<FoundBlock> {
        let listed = |class: usize| {
            let filled = u32::from(self.filled[class]) >> order.0;
            let size = (filled != 0).then(|| Order(order.0 + filled.trailing_zeros() as u8))?;
            Some(FoundBlock { pfn: self.lists[class][size.index()].head, order: size, class })
        };
        let chunk = |class| Some(FoundBlock { pfn: Pfn(self.first_chunk(class)? * CHUNK), order: CHUNK_ORDER, class });
        let cuts_whole = |found: &FoundBlock| self.cuts_whole(*found, order);
        let larger = || {
            (order.index() + 1..LIST_ORDERS).filter_map(|size| {
                let pfn = self.lists[PARTLY][size].head.some()?;
                Some(FoundBlock { pfn, order: Order(size as u8), class: PARTLY })
            })
        };
        if let Some(whole) = listed(BACKED).or_else(|| larger().find(cuts_whole)) {
            return Some(whole);
        }
        if self.keeps_chunks {
            // Chunks without memory are cut first while fewer pages are used than half of the free
            // backed ones. After that, kept chunks with memory are cut first.
            let fresh = self.managed - self.free < self.backed_free / 2;
            let [first, second] = if fresh { [UNBACKED, PARTLY] } else { [PARTLY, UNBACKED] };
            let listed = listed(PARTLY).or_else(|| listed(UNBACKED));
            return listed.or_else(|| chunk(first)).or_else(|| chunk(second));
        }
        let partly = chunk(PARTLY);
        let fresh = || listed(UNBACKED).or_else(|| chunk(UNBACKED));
        partly.filter(cuts_whole).or_else(|| listed(PARTLY)).or(partly).or_else(fresh)
    }

    /// Whether a block of this order with memory behind all of its pages is free or can be cut.
    pub(crate) fn has_backed(&self, order: Order) -> bool {
        self.find(order).is_some_and(|found| self.cuts_whole(found, order))
    }

    /// Whether [`Buddy::carve`] cuts a wholly backed block out of a free one.
    fn cuts_whole(&self, found: FoundBlock, order: Order) -> bool {
        let FoundBlock { mut pfn, order: mut size, .. } = found;
        let mut backed = self.count_backed(pfn, size.pages());
        while size > order && backed < size.pages() {
            size.0 -= 1;
            let lower = self.count_backed(pfn, size.pages());
            if lower < backed - lower {
                pfn = pfn.plus(size.pages());
            }
            backed = lower.max(backed - lower);
        }
        backed == size.pages()
    }

    /// Removes the free block that [`Buddy::find`] found and cuts it down to `order`. The parts cut
    /// off stay free.
    pub(crate) fn carve(&mut self, found: FoundBlock, order: Order) -> FoundBlock {
        let FoundBlock { mut pfn, order: mut size, class } = found;
        self.remove(pfn, size, class);
        let mut backed = if class == UNBACKED { 0 } else { self.count_backed(pfn, size.pages()) };
        while size > order {
            size.0 -= 1;
            let (half, right) = (size.pages(), pfn.plus(size.pages()));
            let lower = match backed {
                0 => 0,
                _ if backed == 2 * half => half,
                _ => self.count_backed(pfn, half),
            };
            let upper = backed - lower;
            // Keeps the half with more memory, or the lower half if both have as much.
            let (kept, left, rest) = if lower >= upper { (pfn, right, upper) } else { (right, pfn, lower) };
            self.insert(left, size, class_of(rest, half));
            (pfn, backed) = (kept, backed - rest);
        }
        self.free -= order.pages();
        if backed > 0 {
            self.backed_free -= backed;
            self.backed_low = self.backed_low.min(self.backed_free);
        }
        debug_assert!(size == order && pfn.0.is_multiple_of(order.pages()), "a block lies at a multiple of its size");
        debug_assert!(backed <= order.pages());
        FoundBlock { pfn, order, class: class_of(backed, order.pages()) }
    }

    /// Frees a block and merges it with its buddies. The caller has reset the states of the block's
    /// frames. This function does not read them all, since most frames of a long run were never
    /// written.
    pub(crate) fn give(&mut self, pfn: Pfn, order: Order, memory: Memory) {
        let pages = order.pages();
        let backed = match memory {
            Memory::All => pages,
            Memory::None => 0,
            Memory::AsRecorded => self.count_backed(pfn, pages),
        };
        if memory != Memory::AsRecorded {
            self.backed.set(pfn, pages, memory == Memory::All);
        }
        self.free += pages;
        self.backed_free += backed;
        let (mut pfn, mut order, mut class) = (pfn, order, class_of(backed, pages));
        while order < CHUNK_ORDER {
            let buddy = Pfn(pfn.0 ^ order.pages());
            if buddy.0 >= self.frames.pages() {
                break;
            }
            let frame = self.frames.frame(buddy);
            if frame.state() != State::Free || frame.order() != order {
                break;
            }
            let other = usize::from(frame.spare());
            self.remove(buddy, order, other);
            class = if class == other { class } else { PARTLY };
            pfn = Pfn(pfn.0 & buddy.0);
            order.0 += 1;
        }
        self.insert(pfn, order, class);
    }

    /// Puts a block on its list, or a chunk into the map. Changes no counts.
    pub(crate) fn insert(&mut self, pfn: Pfn, order: Order, class: usize) {
        if order == CHUNK_ORDER {
            let chunk = pfn.0 / CHUNK;
            bitmap::set(self.free_chunks.get_mut(), chunk as usize);
            if class != UNBACKED {
                bitmap::set(self.backed_chunks.get_mut(), chunk as usize);
            }
            self.chunk_hint = self.chunk_hint.min(chunk);
            return;
        }
        let ends = &mut self.lists[class][order.index()];
        let (frame, next) = (self.frames.frame(pfn), ends.head);
        frame.set_head(State::Free, order);
        frame.set_spare(class as u16);
        frame.set_prev(Pfn::NONE);
        frame.set_next(next);
        ends.head = pfn;
        match next.some() {
            Some(next) => self.frames.frame(next).set_prev(pfn),
            None => {
                ends.tail = pfn;
                self.filled[class] |= 1 << order.0;
            }
        }
    }

    /// Takes a block off its list, or a chunk out of the map. Changes no counts but `lazy`.
    pub(crate) fn remove(&mut self, pfn: Pfn, order: Order, class: usize) {
        if order == CHUNK_ORDER {
            let chunk = pfn.index() / CHUNK as usize;
            bitmap::clear(self.free_chunks.get_mut(), chunk);
            if class != UNBACKED {
                bitmap::clear(self.backed_chunks.get_mut(), chunk);
                if bitmap::get(self.lazy_chunks.get(), chunk) {
                    bitmap::clear(self.lazy_chunks.get_mut(), chunk);
                    self.lazy -= self.count_backed(pfn, CHUNK);
                }
            }
            if chunk == self.chunk_hint as usize {
                let map = self.free_chunks.get();
                self.chunk_hint = bitmap::next_set(map, chunk, map.len() * 64).unwrap_or(map.len() * 64) as u32;
            }
            return;
        }
        let frame = self.frames.frame(pfn);
        let (next, prev) = (frame.next(), frame.prev());
        frame.set_state(State::Inside);
        let ends = &mut self.lists[class][order.index()];
        match prev.some() {
            Some(prev) => self.frames.frame(prev).set_next(next),
            None => ends.head = next,
        }
        match next.some() {
            Some(next) => self.frames.frame(next).set_prev(prev),
            None => ends.tail = prev,
        }
        if ends.head == Pfn::NONE {
            self.filled[class] &= !(1 << order.0);
        }
    }

    /// The lowest free chunk without memory if `class` is [`UNBACKED`]. Otherwise the lowest free
    /// chunk with some memory.
    fn first_chunk(&self, class: usize) -> Option<u32> {
        // The map of backed chunks is not read without need: at first it has no memory itself.
        if class != UNBACKED && self.backed_free == 0 {
            return None;
        }
        let (free, backed) = (self.free_chunks.get(), self.backed_chunks.get());
        let from = self.chunk_hint as usize / 64;
        free.iter().zip(backed).enumerate().skip(from).find_map(|(word, (free, backed))| {
            let bits = match class {
                UNBACKED if self.backed_free == 0 => *free,
                UNBACKED => free & !backed,
                _ => *backed,
            };
            (bits != 0).then(|| (word * 64) as u32 + bits.trailing_zeros())
        })
    }

    /// The class of a block by the bits of its pages.
    #[inline]
    pub(crate) fn class(&self, pfn: Pfn, order: Order) -> usize {
        class_of(self.backed.count(pfn, order.pages()), order.pages())
    }

    /// Number of backed pages in a range.
    #[inline]
    pub(crate) fn count_backed(&self, pfn: Pfn, pages: u32) -> u32 {
        self.backed.count(pfn, pages)
    }
}

/// Checks that a block is handed out and of this order, and resets its frames' states. Otherwise
/// ends the process.
#[inline]
pub(crate) fn take_out(frames: &Frames, pfn: Pfn, order: Order) {
    let frame = frames.frame(pfn);
    let state = frame.state();
    if !matches!(state, State::Allocated | State::Slab) || frame.order() != order {
        not_handed_out("block", frames, pfn, order.pages());
    }
    frame.set_state(State::Inside);
    if state == State::Slab {
        (1..order.pages()).for_each(|page| frames.frame(pfn.plus(page)).set_state(State::Inside));
    }
}

/// Ends the process, since the program frees pages that are not handed out.
#[cold]
#[inline(never)]
pub(crate) fn not_handed_out(what: &str, frames: &Frames, pfn: Pfn, pages: u32) -> ! {
    let frame = frames.frame(pfn);
    neap_os::fatal::die(format_args!(
        "free of a {what} of {pages} pages that is not handed out: page {} is {:?}, order {}, owner {}; it was freed twice, or overwritten",
        pfn.0,
        frame.state(),
        frame.order().0,
        frame.owner(),
    ));
}
