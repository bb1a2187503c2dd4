//! Units of memory in pages, and the results of an allocation.

use neap_base::platform::HugePageSupply;
use neap_base::{Order, Pfn, Platform};

/// Pages of a chunk: the unit of growth, and the largest block of the buddy allocator.
pub(crate) const CHUNK: u32 = 1024;
/// The order of a chunk.
pub(crate) const CHUNK_ORDER: Order = Order(CHUNK.trailing_zeros() as u8);

/// Order of 2 MiB of small pages.
pub const HUGE: Order = Order(9);
/// Size of the huge pages that neap uses, in bytes.
pub const HUGE_BYTES: usize = 2 << 20;

/// The supply of huge pages for an arena that has a use for them if they are `wanted`. With pages
/// of 16 and 64 KiB, the kernel's huge pages have 32 and 512 MiB. The arena then uses none, since
/// one fault would make more resident than a program may need.
pub(crate) fn huge_page_supply<P: Platform>(platform: &P, wanted: bool) -> HugePageSupply {
    // A huge page takes the place of one table of the page tables, whose entries have eight bytes.
    let page = platform.page_size();
    if wanted && page * (page / 8) == HUGE_BYTES { platform.huge_page_supply() } else { HugePageSupply::None }
}

/// The rule by which blocks and runs have huge pages. `others` are the resident pages without
/// `pages`. Even if the program touches one byte in each huge page, the resident memory at most
/// doubles.
pub(crate) const fn at_most_doubles(pages: u32, others: u32) -> bool {
    pages <= others
}

/// Orders that have lists: 0 to 3.
pub(crate) const LISTED_ORDERS: usize = 4;

/// The number of pages that stands for no budget. Arenas are smaller.
pub(crate) const UNLIMITED: u32 = u32::MAX;

/// A block or run that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its first page.
    pub pfn: Pfn,
    /// Whether all bytes are zero. Otherwise the contents are undefined.
    pub zero: bool,
}

/// No memory is left: the budget is used up, or the system or the address space refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted;
