//! Detached blocks: free blocks taken out of the buddy while their memory is released or populated.
//!
//! # Design
//!
//! A detached block is in the state `Releasing`. It is on no list, no allocation finds it, and
//! `verify` counts it. This module chooses the order of releases. The highest chunks come first,
//! since allocation prefers low ones. Large blocks come before small ones. Of equally large blocks,
//! those freed longest ago come first.
//!
//! # Locking
//!
//! The lock of the zone protects every call.

use crate::buddy::{BACKED, Buddy, FoundBlock, LIST_ORDERS, Memory, PARTLY, UNBACKED};
use crate::frames::State;
use crate::units::{CHUNK, CHUNK_ORDER, HUGE};
use neap_base::{Order, Pfn, bitmap};

/// The most blocks of a list that one search examines.
const EXAMINED_BLOCKS_MAX: usize = 32;

/// Adjacent chunks that were detached.
pub(crate) struct DetachedChunks {
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// Their backed pages.
    pub(crate) backed: u32,
}

/// A block that was detached.
pub(crate) struct DetachedBlock {
    pub(crate) pfn: Pfn,
    pub(crate) order: Order,
    /// Its backed pages.
    pub(crate) backed: u32,
}

impl Buddy {
    /// Detaches the highest backed chunk below chunk `below` that has at most `pages` backed pages,
    /// and the adjacent backed chunks under it. Detaches at most `most` chunks with together at
    /// most `pages` backed pages.
    pub(crate) fn detach_chunks(&mut self, below: u32, most: u32, pages: u32) -> Option<DetachedChunks> {
        let (mut top, mut sum) = (below, 0);
        while sum == 0 {
            top = self.backed_chunk_below(top)?;
            sum = Some(self.count_backed(Pfn(top * CHUNK), CHUNK)).filter(|count| *count <= pages).unwrap_or(0);
        }
        let mut first = top;
        while first > 0 && top - first + 1 < most && bitmap::get(self.backed_chunks.get(), first as usize - 1) {
            let more = self.count_backed(Pfn((first - 1) * CHUNK), CHUNK);
            if sum + more > pages {
                break;
            }
            first -= 1;
            sum += more;
        }
        for chunk in first..=top {
            self.detach(Pfn(chunk * CHUNK), CHUNK_ORDER, PARTLY);
        }
        Some(DetachedChunks { first, count: top - first + 1, backed: sum })
    }

    /// Detaches one block of at least order `least` with at most `pages` backed pages. Leaves
    /// blocks of less than 2 MiB for whose first page `stays` returns true.
    pub(crate) fn detach_block(
        &mut self,
        pages: u32,
        least: Order,
        stays: &dyn Fn(Pfn) -> bool,
    ) -> Option<DetachedBlock> {
        let FoundBlock { pfn, order, class } = self.oldest_backed(least, pages, stays)?;
        let backed = self.count_backed(pfn, order.pages());
        self.detach(pfn, order, class);
        Some(DetachedBlock { pfn, order, backed })
    }

    /// Detaches a part with at most `pages` backed pages of a chunk or block that has more. Halves
    /// it until the rest fits, and keeps the upper half if that has memory. Returns `None` if the
    /// part would be smaller than `least`.
    pub(crate) fn detach_part(&mut self, pages: u32, least: Order) -> Option<DetachedBlock> {
        let chunk = self.backed_chunk_below(u32::MAX).map(|chunk| Pfn(chunk * CHUNK));
        let chunk = chunk.map(|pfn| FoundBlock { pfn, order: CHUNK_ORDER, class: PARTLY });
        let FoundBlock { mut pfn, order: mut size, class } =
            chunk.or_else(|| self.oldest_backed(Order(least.0 + 1), u32::MAX, &|_| false))?;
        if size <= least || pages < least.pages() {
            return None;
        }
        self.remove(pfn, size, class);
        while self.count_backed(pfn, size.pages()) > pages {
            size.0 -= 1;
            let upper = pfn.plus(size.pages());
            let (lower_class, upper_class) = (self.class(pfn, size), self.class(upper, size));
            if upper_class != UNBACKED {
                self.insert(pfn, size, lower_class);
                pfn = upper;
            } else {
                self.insert(upper, size, upper_class);
            }
        }
        let (class, backed) = (self.class(pfn, size), self.count_backed(pfn, size.pages()));
        self.insert(pfn, size, class);
        self.detach(pfn, size, class);
        Some(DetachedBlock { pfn, order: size, backed })
    }

    /// The largest block of at least order `least` that has 1 to `pages` backed pages. Of each
    /// list, examines only the block that was freed longest ago among those that need not stay. Of
    /// one order, examines the partly backed block first.
    fn oldest_backed(&self, least: Order, pages: u32, stays: &dyn Fn(Pfn) -> bool) -> Option<FoundBlock> {
        for order in (least.index()..LIST_ORDERS).rev() {
            for class in [PARTLY, BACKED] {
                let order = Order(order as u8);
                let tail = self.lists[class][order.index()].tail.some();
                let blocks = core::iter::successors(tail, |&pfn| self.frames.frame(pfn).prev().some());
                let mut blocks = blocks.take(EXAMINED_BLOCKS_MAX);
                let Some(pfn) = blocks.find(|&pfn| order >= HUGE || !stays(pfn)) else { continue };
                if self.count_backed(pfn, order.pages()) <= pages {
                    return Some(FoundBlock { pfn, order, class });
                }
            }
        }
        None
    }

    /// Detaches a free block.
    pub(crate) fn detach(&mut self, pfn: Pfn, order: Order, class: usize) {
        self.remove(pfn, order, class);
        self.free -= order.pages();
        let backed = self.count_backed(pfn, order.pages());
        self.backed_free -= backed;
        self.backed_detached += backed;
        self.frames.frame(pfn).set_head(State::Releasing, order);
    }

    /// Puts detached pages back. The first `emptied` of them have no memory any more.
    pub(crate) fn attach(&mut self, pfn: Pfn, pages: u32, emptied: u32) {
        for head in (pfn.0..pfn.0 + pages).step_by(CHUNK as usize) {
            // The frames of chunks may have been released by now.
            let frame = self.frames.frame(Pfn(head));
            if frame.state() == State::Releasing {
                frame.set_state(State::Inside);
            }
        }
        self.backed_detached -= self.count_backed(pfn, pages);
        self.backed.set(pfn, emptied, false);
        self.give_range(pfn, pages, Memory::AsRecorded);
    }

    /// Detaches the highest backed chunk that is not lazily free yet.
    pub(crate) fn detach_eager_chunk(&mut self) -> Option<Pfn> {
        let (backed, lazy) = (self.backed_chunks.get(), self.lazy_chunks.get());
        let chunk = backed.iter().zip(lazy).enumerate().rev().find_map(|(word, (backed, lazy))| {
            let bits = backed & !lazy;
            (bits != 0).then(|| word as u32 * 64 + 63 - bits.leading_zeros())
        })?;
        let pfn = Pfn(chunk * CHUNK);
        self.detach(pfn, CHUNK_ORDER, PARTLY);
        Some(pfn)
    }

    /// Puts a chunk of [`Buddy::detach_eager_chunk`] back. `lazy` says that the system may take its
    /// memory from now on.
    pub(crate) fn attach_lazy_chunk(&mut self, pfn: Pfn, lazy: bool) {
        self.attach(pfn, CHUNK, 0);
        if lazy {
            bitmap::set(self.lazy_chunks.get_mut(), pfn.index() / CHUNK as usize);
            self.lazy += self.count_backed(pfn, CHUNK);
        }
    }

    fn backed_chunk_below(&self, below: u32) -> Option<u32> {
        let map = self.backed_chunks.get();
        let below = (below as usize).min(map.len() * 64);
        (0..below.div_ceil(64)).rev().find_map(|word| {
            let above = (below - word * 64).min(64);
            let bits = map[word] & (u64::MAX >> (64 - above));
            (bits != 0).then(|| word as u32 * 64 + 63 - bits.leading_zeros())
        })
    }
}
