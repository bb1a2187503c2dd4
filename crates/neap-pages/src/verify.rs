//! Verification of the pages: proves that every page is in exactly one state.
//!
//! It runs under the zone's mutex while no other thread uses the pages. It walks the arena from
//! block to block by the frames and the chunk map, then follows every list, and compares all sums.
//! It changes nothing.

use crate::buddy::{Buddy, FoundBlock, LIST_ORDERS, PARTLY, UNBACKED};
use crate::frames::State;
use crate::units::{CHUNK, CHUNK_ORDER};
use neap_base::{Finding, Order, Pfn, bitmap};

/// Pages by state.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) free: u32,
    pub(crate) backed_free: u32,
    pub(crate) listed: u32,
    pub(crate) used: u32,
    pub(crate) releasing: u32,
    pub(crate) backed_detached: u32,
}

impl Buddy {
    /// Walks all pages and lists, except for chunks that are not `mine`.
    pub(crate) fn verify(&self, mine: impl Fn(Pfn) -> bool) -> Result<Sums, Finding> {
        let (mut sums, mut blocks, mut managed) = (Sums::default(), [[0_u32; LIST_ORDERS]; 3], 0);
        let mut at = Pfn(0);
        while at.0 < self.frames.pages() {
            if !mine(at) {
                at = Pfn((at.0 / CHUNK + 1) * CHUNK);
                continue;
            }
            let frame = self.frames.frame(at);
            let (mut pages, state) = (frame.order().pages(), frame.state());
            if let Some(FoundBlock { order, class, .. }) = self.free_block_at(at) {
                pages = order.pages();
                sums.free += pages;
                sums.backed_free += self.count_backed(at, pages);
                let truth = self.class(at, order);
                let truth = if order == CHUNK_ORDER { truth.min(PARTLY) } else { truth };
                Finding::unless_equal("class of a free block", at, truth as u64, class as u64)?;
                if order < CHUNK_ORDER {
                    blocks[class][order.index()] += 1;
                    let buddy = Pfn(at.0 ^ pages);
                    let apart = buddy.0 + pages > self.frames.pages()
                        || self.free_block_at(buddy).is_none_or(|b| b.order != order);
                    Finding::unless_equal("free buddies that did not merge", at, 1, u64::from(apart))?;
                }
            } else {
                match state {
                    State::Listed => sums.listed += pages,
                    State::Allocated | State::Slab => sums.used += pages,
                    State::Releasing => {
                        sums.releasing += pages;
                        sums.backed_detached += self.count_backed(at, pages);
                    }
                    State::Run => {
                        pages = frame.owner();
                        sums.used += pages;
                    }
                    State::Cached => {
                        pages = frame.owner();
                        sums.listed += pages;
                    }
                    other => {
                        return Err(Finding::new("page in no block", at, 2, other as u64));
                    }
                }
                if pages == 0 {
                    return Err(Finding::new("block without pages", at, 1, 0));
                }
            }
            self.verify_inside(at, pages, state)?;
            managed += pages;
            at = at.plus(pages);
        }
        Finding::unless_equal("sum of all states", Pfn::NONE, self.managed.into(), managed.into())?;
        Finding::unless_equal("free pages", Pfn::NONE, sums.free.into(), self.free.into())?;
        Finding::unless_equal("backed free pages", Pfn::NONE, sums.backed_free.into(), self.backed_free.into())?;
        let (detached, counted) = (sums.backed_detached.into(), self.backed_detached.into());
        Finding::unless_equal("detached pages with memory", Pfn::NONE, detached, counted)?;
        self.verify_lists(&blocks)?;
        self.verify_chunks()?;
        Ok(sums)
    }

    /// Verifies that no page after the first of a block looks like a block's first page.
    fn verify_inside(&self, head: Pfn, pages: u32, state: State) -> Result<(), Finding> {
        for page in head.0 + 1..head.0 + pages {
            let inside = self.frames.frame(Pfn(page)).state();
            let right =
                matches!(inside, State::Inside | State::Absent) || (inside == State::Slab && state == State::Slab);
            Finding::unless_equal("page inside a block that looks like a head", Pfn(page), 1, u64::from(right))?;
        }
        Ok(())
    }

    fn verify_lists(&self, blocks: &[[u32; LIST_ORDERS]; 3]) -> Result<(), Finding> {
        for (class, orders) in blocks.iter().enumerate() {
            for (order, count) in orders.iter().enumerate() {
                let ends = self.lists[class][order];
                let (mut at, mut before, mut length) = (ends.head, Pfn::NONE, 0);
                while let Some(pfn) = at.some() {
                    Finding::unless_equal("length of a free list", pfn, 1, u64::from(length < *count))?;
                    let frame = self.frames.frame(pfn);
                    let right = self.free_block_at(pfn) == Some(FoundBlock { pfn, order: Order(order as u8), class });
                    Finding::unless_equal("block on the free list of another", pfn, 1, u64::from(right))?;
                    Finding::unless_equal("back link of a free block", pfn, before.0.into(), frame.prev().0.into())?;
                    (before, at, length) = (pfn, frame.next(), length + 1);
                }
                Finding::unless_equal("blocks on a free list", Pfn::NONE, (*count).into(), length.into())?;
                Finding::unless_equal("tail of a free list", Pfn::NONE, before.0.into(), ends.tail.0.into())?;
                let filled = u64::from(self.filled[class] >> order & 1);
                Finding::unless_equal("map of free lists", Pfn::NONE, u64::from(length > 0), filled)?;
            }
        }
        Ok(())
    }

    fn verify_chunks(&self) -> Result<(), Finding> {
        let (map, mut lazy_pages) = (self.free_chunks.get(), 0);
        for chunk in 0..map.len() * 64 {
            let (free, backed) = (bitmap::get(map, chunk), bitmap::get(self.backed_chunks.get(), chunk));
            let pfn = Pfn(chunk as u32 * CHUNK);
            let truth = free && self.class(pfn, CHUNK_ORDER) != UNBACKED;
            Finding::unless_equal("map of backed chunks", pfn, truth.into(), backed.into())?;
            let lazy = bitmap::get(self.lazy_chunks.get(), chunk);
            Finding::unless_equal("lazily free chunk that is not backed", pfn, 0, u64::from(lazy && !backed))?;
            lazy_pages += if lazy { self.count_backed(pfn, CHUNK) } else { 0 };
            let hint = free && chunk < self.chunk_hint as usize;
            Finding::unless_equal("free chunk below the lowest", pfn, 0, hint.into())?;
        }
        Finding::unless_equal("lazily free pages", Pfn::NONE, lazy_pages.into(), self.lazy.into())
    }
}
