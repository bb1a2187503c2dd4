//! Runs: exact numbers of pages, for large allocations.
//!
//! # Design
//!
//! A run of up to a chunk comes from the smallest block that holds it and its alignment; the rest
//! is freed at once. If free pages lie directly in front of that block, the run begins in them. If
//! the run would take memory from the system, the buddy first tries smaller backed blocks that lie
//! side by side. So later runs use the remainders of earlier ones.
//!
//! A longer run takes adjacent whole chunks, the lowest ones that fit, and frees the rest of the
//! last one. A freed run becomes the largest aligned blocks in it. While a run is handed out, the
//! word of its first frame is the run's owner.
//!
//! # Locking
//!
//! The lock of the zone protects every call.

use crate::buddy::{BACKED, Buddy, FoundBlock, Map, Memory, PARTLY, UNBACKED, not_handed_out};
use crate::frames::State;
use crate::units::{Block, CHUNK, CHUNK_ORDER};
use neap_base::{Order, Pfn, bitmap};

impl Buddy {
    /// Allocates `pages` pages in a row. The first is a multiple of `align`, which is a power of
    /// two.
    pub(crate) fn allocate_run(&mut self, pages: u32, align: u32) -> Option<Block> {
        let pfn = if pages.max(align) <= CHUNK {
            self.take_joined(pages, align).or_else(|| self.take_within_chunk(pages, align))?
        } else {
            self.take_chunks(pages, align)?
        };
        Some(self.make_run(pfn, pages))
    }

    /// Allocates a run as [`Buddy::allocate_run`] does, but only in a wholly backed block or in
    /// adjacent blocks with memory. A run longer than a chunk must lie in chunks with memory.
    pub(crate) fn allocate_backed_run(&mut self, pages: u32, align: u32) -> Option<Block> {
        let is_backed = match pages.max(align) <= CHUNK {
            true => self.has_backed(Order::holding(pages.max(align))),
            false => self.backed_row(pages, align).is_some(),
        };
        if is_backed {
            return self.allocate_run(pages, align);
        }
        self.take_joined(pages, align).map(|pfn| self.make_run(pfn, pages))
    }

    /// Makes a run of pages that were removed from the free ones.
    fn make_run(&mut self, pfn: Pfn, pages: u32) -> Block {
        let frame = self.frames.frame(pfn);
        frame.set_owner(pages);
        frame.set_spare(0);
        frame.set_head(State::Run, Order(0));
        self.frames.set_run_owner(pfn, 0);
        Block { pfn, zero: !self.backed.any(pfn, pages) }
    }

    /// Removes `pages` pages in a row from the free ones. A run has at most a chunk here.
    fn take_within_chunk(&mut self, pages: u32, align: u32) -> Option<Pfn> {
        let order = Order::holding(pages.max(align));
        let FoundBlock { pfn: block, class, .. } = self.take(order)?;
        let start = if align > 1 { block } else { self.free_before(block, order, |other| other == class) };
        self.take_at(start, block.0 - start.0);
        let (end, block_end) = (start.0 + pages, block.0 + order.pages());
        // All but the last page of the run may lie in front of the block.
        self.give_range(Pfn(end), block_end - end, Memory::AsRecorded);
        Some(start)
    }

    /// The start of the row of free blocks that ends at `end`, in the chunk of `end`. Each block in
    /// the row is smaller than `order` and has a wanted class.
    fn free_before(&self, end: Pfn, order: Order, is_wanted: impl Fn(usize) -> bool) -> Pfn {
        let mut start = end;
        while !start.0.is_multiple_of(CHUNK)
            && let Some(before) = (0..order.0).map(Order).find(|&order| {
                let before = Pfn(start.0.wrapping_sub(order.pages()));
                let is_it = |found: FoundBlock| found.order == order && is_wanted(found.class);
                start.0.is_multiple_of(order.pages()) && self.free_block_at(before).is_some_and(is_it)
            })
        {
            start.0 -= before.pages();
        }
        start
    }

    /// Removes `pages` pages in a row, at most a chunk. The row consists of blocks with memory that
    /// are smaller than the run. Does so only if no wholly backed block holds the run. One of the
    /// row's blocks must be among the first free blocks of half the size.
    fn take_joined(&mut self, pages: u32, align: u32) -> Option<Pfn> {
        /// Number of blocks examined. With 8, programs that allocate runs of random lengths took a
        /// tenth more memory; with 2000, they took no less.
        const EXAMINED_BLOCKS_MAX: usize = 64;
        let order = Order::holding(pages);
        if align > 1 || pages > CHUNK || order.0 < 2 || self.backed_free < pages || self.has_backed(order) {
            return None;
        }
        let half = Order(order.0 - 1);
        let first = |class: usize| self.lists[class][half.index()].head.some();
        let (mut next, mut rest) = (first(BACKED), first(PARTLY));
        for _ in 0..EXAMINED_BLOCKS_MAX {
            let block = next.or_else(|| rest.take())?;
            let start = self.free_before(block, half, |class| class != UNBACKED);
            let chunk_end = ((block.0 / CHUNK + 1) * CHUNK).min(self.frames.pages());
            let mut end = block.0 + half.pages();
            while end < chunk_end
                && end - start.0 < pages
                && let Some(FoundBlock { order, class: PARTLY | BACKED, .. }) = self.free_block_at(Pfn(end))
            {
                end += order.pages();
            }
            if end - start.0 >= pages {
                // The rest of the last block stays free.
                return self.take_at(start, pages).then_some(start);
            }
            next = self.frames.frame(block).next().some();
        }
        None
    }

    /// Frees a run.
    pub(crate) fn free_run(&mut self, pfn: Pfn, pages: u32, memory: Memory) {
        self.check_run(pfn, pages);
        self.frames.frame(pfn).set_state(State::Inside);
        self.give_range(pfn, pages, memory);
    }

    /// Whether all pages from `start` to the end of the arena are free.
    pub(crate) fn is_free_to_end(&self, start: Pfn) -> bool {
        let mut at = start.0;
        while at < self.frames.pages() {
            let Some(found) = self.free_block_at(Pfn(at)) else { return false };
            at += found.order.pages();
        }
        true
    }

    /// Makes a run longer or shorter in place. Returns `false` if it cannot grow there. Gained
    /// pages keep their contents.
    pub(crate) fn resize_run(&mut self, pfn: Pfn, old: u32, new: u32) -> bool {
        self.check_run(pfn, old);
        if new > old && !self.take_at(pfn.plus(old), new - old) {
            return false;
        }
        self.frames.frame(pfn).set_owner(new);
        if new < old {
            self.give_range(pfn.plus(new), old - new, Memory::All);
        }
        true
    }

    fn check_run(&self, pfn: Pfn, pages: u32) {
        let frame = self.frames.frame(pfn);
        if frame.state() != State::Run || frame.owner() != pages {
            not_handed_out("run", &self.frames, pfn, pages);
        }
    }

    /// Frees a range as the largest aligned blocks in it.
    pub(crate) fn give_range(&mut self, start: Pfn, pages: u32, memory: Memory) {
        let (mut at, end) = (start.0, start.0 + pages);
        while at < end {
            let order = at.trailing_zeros().min((end - at).ilog2()).min(u32::from(CHUNK_ORDER.0));
            self.give(Pfn(at), Order(order as u8), memory);
            at += 1 << order;
        }
    }

    /// Removes as many adjacent free chunks as hold `pages`, and frees the surplus pages.
    fn take_chunks(&mut self, pages: u32, align: u32) -> Option<Pfn> {
        let (count, align) = (pages.div_ceil(CHUNK) as usize, (align / CHUNK).max(1) as usize);
        let first = self
            .backed_row(pages, align as u32 * CHUNK)
            .or_else(|| self.chunks_in_a_row(&self.free_chunks, count, align))?;
        let (pfn, taken) = (Pfn(first as u32 * CHUNK), count as u32 * CHUNK);
        (first..first + count).for_each(|chunk| self.remove(Pfn(chunk as u32 * CHUNK), CHUNK_ORDER, PARTLY));
        self.free -= taken;
        self.backed_free -= self.count_backed(pfn, taken);
        self.give_range(pfn.plus(pages), taken - pages, Memory::AsRecorded);
        self.backed_low = self.backed_low.min(self.backed_free);
        Some(pfn)
    }

    /// The first of the lowest adjacent free chunks that hold a run of more than a chunk. Each of
    /// these chunks has some backed pages.
    pub(crate) fn backed_row(&self, pages: u32, align: u32) -> Option<usize> {
        let (count, align) = (pages.div_ceil(CHUNK) as usize, (align / CHUNK).max(1) as usize);
        if self.backed_free < pages { None } else { self.chunks_in_a_row(&self.backed_chunks, count, align) }
    }

    /// The first of the lowest `count` adjacent chunks of a map. Its address is a multiple of
    /// `align` chunks.
    fn chunks_in_a_row(&self, map: &Map, count: usize, align: usize) -> Option<usize> {
        let map = map.get();
        let end = map.len() * 64;
        let mut from = self.chunk_hint as usize;
        while let Some(free) = bitmap::next_set(map, from, end) {
            let first = (free + self.base_chunks).next_multiple_of(align) - self.base_chunks;
            from = bitmap::next_clear(map, free, end).unwrap_or(end);
            if first + count <= from {
                return Some(first);
            }
        }
        None
    }

    /// Pages of free chunks at the end of the arena, which new pages would follow.
    pub(crate) fn free_tail(&self) -> u32 {
        let (map, end) = (self.free_chunks.get(), self.frames.pages() / CHUNK);
        (0..end).rev().take_while(|chunk| bitmap::get(map, *chunk as usize)).count() as u32 * CHUNK
    }

    /// Removes exactly these pages from the free ones, if all of them are free.
    fn take_at(&mut self, start: Pfn, pages: u32) -> bool {
        let Some(end) = start.0.checked_add(pages).filter(|end| *end <= self.frames.pages()) else { return false };
        let mut at = start.0;
        while at < end {
            // The page before `start` is in use, so no free block begins before `start`.
            let Some(found) = self.free_block_at(Pfn(at)) else { return false };
            at += found.order.pages();
        }
        at = start.0;
        while at < end {
            let Some(FoundBlock { order, class, .. }) = self.free_block_at(Pfn(at)) else { break };
            self.remove(Pfn(at), order, class);
            self.free -= order.pages();
            self.backed_free -= self.count_backed(Pfn(at), order.pages());
            at += order.pages();
        }
        self.give_range(Pfn(end), at - end, Memory::AsRecorded);
        self.backed_low = self.backed_low.min(self.backed_free);
        true
    }

    /// The free block that begins at a page; `None` if none does.
    pub(crate) fn free_block_at(&self, pfn: Pfn) -> Option<FoundBlock> {
        let chunk = pfn.index() / CHUNK as usize;
        if pfn.0.is_multiple_of(CHUNK) && bitmap::get(self.free_chunks.get(), chunk) {
            let class = usize::from(bitmap::get(self.backed_chunks.get(), chunk));
            return Some(FoundBlock { pfn, order: CHUNK_ORDER, class });
        }
        let frame = self.frames.frame(pfn);
        (frame.state() == State::Free).then(|| FoundBlock {
            pfn,
            order: frame.order(),
            class: usize::from(frame.spare()),
        })
    }
}
