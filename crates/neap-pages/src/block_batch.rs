//! Chains: blocks of one order, linked through their frames, on the way between the buddy and a
//! CPU's list.
//!
//! A batch is cut out of the largest blocks that it fills, so its pages lie in a row and cost few
//! list operations. Every block of a chain is `Listed`, is on no list, and belongs to the thread
//! that carries it.

use crate::buddy::{BACKED, Buddy, FoundBlock, Memory, PARTLY, UNBACKED};
use crate::frames::State;
use crate::units::HUGE;
use neap_base::{Order, Pfn};

/// In the `spare` of a listed block's first frame: some of the block was backed when it was listed,
/// so its contents are undefined.
pub(crate) const DIRTY: u16 = 1;
/// In the `spare` of a listed block's first frame: the block was handed out, so its contents are
/// undefined. All of it counts as backed.
pub(crate) const TOUCHED: u16 = 2;

/// Blocks linked by `next` (and `prev`) from `head` to `tail`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) head: Pfn,
    pub(crate) tail: Pfn,
    pub(crate) blocks: u32,
}

impl Chain {
    pub(crate) const EMPTY: Chain = Chain { head: Pfn::NONE, tail: Pfn::NONE, blocks: 0 };
}

impl Buddy {
    /// Cuts up to `blocks` blocks out of the free ones, backed ones first. The chain is empty if
    /// there is none. The chain ends early if the next block would be cut from an unbacked block of
    /// 2 MiB or more, which may be populated first.
    pub(crate) fn take_chain(&mut self, order: Order, blocks: u32) -> Chain {
        let mut chain = Chain::EMPTY;
        while chain.blocks < blocks {
            let Some(found) = self.find(order) else { break };
            if chain.blocks > 0 && found.class == UNBACKED && found.order >= HUGE {
                break;
            }
            // Cuts the whole block, or its largest part that has no more than the missing blocks.
            // Cuts at most a huge page: the rest of a larger block may be populated before it is
            // needed.
            let cut = found.order.0.min(order.0 + (blocks - chain.blocks).ilog2() as u8).min(HUGE.0.max(order.0));
            let carved = self.carve(found, Order(cut));
            let class = carved.class;
            let FoundBlock { pfn, order: cut, .. } =
                if class == PARTLY { self.shrink_to_backed(carved, order) } else { carved };
            for index in 0..1 << (cut.0 - order.0) {
                let block = pfn.plus(index << order.0);
                let class = if class == PARTLY { self.class(block, order) } else { class };
                self.append(&mut chain, block, order, class);
            }
        }
        chain
    }

    /// Frees the less backed half of a carved block until the rest is wholly backed or of `order`.
    /// So no memory comes from the system while free blocks have some.
    fn shrink_to_backed(&mut self, mut block: FoundBlock, order: Order) -> FoundBlock {
        while block.order > order && self.class(block.pfn, block.order) != BACKED {
            block.order.0 -= 1;
            let (pages, left) = (block.order.pages(), block.pfn);
            let right = left.plus(pages);
            let keeps_lower = self.count_backed(left, pages) >= self.count_backed(right, pages);
            let (kept, rest) = if keeps_lower { (left, right) } else { (right, left) };
            self.give(rest, block.order, Memory::AsRecorded);
            block.pfn = kept;
        }
        block
    }

    fn append(&self, chain: &mut Chain, block: Pfn, order: Order, class: usize) {
        let frame = self.frames.frame(block);
        frame.set_head(State::Listed, order);
        frame.set_spare(if class == UNBACKED { 0 } else { DIRTY });
        frame.set_prev(chain.tail);
        frame.set_next(Pfn::NONE);
        match chain.tail.some() {
            Some(tail) => self.frames.frame(tail).set_next(block),
            None => chain.head = block,
        }
        chain.tail = block;
        chain.blocks += 1;
    }

    /// Frees up to `blocks` blocks from the head of a chain, and leaves the rest in `chain`.
    /// Returns the number of freed blocks.
    pub(crate) fn give_chain(&mut self, chain: &mut Chain, order: Order, blocks: u32) -> u32 {
        let count = blocks.min(chain.blocks);
        for _ in 0..count {
            let (pfn, frame) = (chain.head, self.frames.frame(chain.head));
            if frame.state() != State::Listed || frame.order() != order {
                crate::buddy::not_handed_out("listed block", &self.frames, pfn, order.pages());
            }
            chain.head = frame.next();
            frame.set_state(State::Inside);
            let memory = if frame.spare() == TOUCHED { Memory::All } else { Memory::AsRecorded };
            self.give(pfn, order, memory);
        }
        chain.blocks -= count;
        count
    }
}
