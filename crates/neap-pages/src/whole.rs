//! What keeps huge pages whole, on all nodes.
//!
//! A garbage collector frees most of its heap again and again. If the huge pages of a small heap
//! were broken the first time, the heap would keep small pages: it would be slower, and hardly
//! smaller. So neither growth nor the program's frees break them. Ticks, limits and requests do.
//!
//! A run that grows out of its place moves by its page tables, or is copied. A move keeps small
//! pages small, and breaks the huge pages of which it takes or replaces a part.

use crate::node_pages::NodePages;
use neap_base::{Pfn, Platform};

/// Bytes of the largest small heap. With its program and its libraries, a process should have at
/// most 32 MiB after a burst.
const SMALL_HEAP_BYTES: u64 = 24 << 20;

impl<P: Platform> NodePages<P> {
    /// Resident pages beyond those of the largest small heap. Growth replaces at most as many parts
    /// of huge pages that are whole.
    pub fn beyond_small(&self) -> u64 {
        self.resident().saturating_sub(self.small())
    }

    /// Whether the heap has huge pages and was never larger than a small heap.
    pub fn was_always_small(&self) -> bool {
        self.all().map(|pages| u64::from(pages.zone.peak())).sum::<u64>() <= self.small()
    }

    /// Allows huge pages in a run again, if it is worth them. The caller has moved the pages of
    /// another run into it ([`Platform::move_pages`]), or the system refused to move its own.
    pub fn allow_huge(&self, platform: &P, pfn: Pfn, pages: u32) {
        self.node(self.node_of(pfn)).allow_huge(platform, pfn, pages);
    }

    /// Forbids huge pages in a run that has them for its length alone. The caller owns the run,
    /// which is to have zeroes: the program may never touch most of it.
    pub fn expect_sparse(&self, platform: &P, pfn: Pfn, pages: u32) {
        self.node(self.node_of(pfn)).expect_sparse(platform, pfn, pages);
    }

    /// Whether a run of `old` pages that grows to `new` pages elsewhere is better copied than moved
    /// ([`Platform::move_pages`]), for the sake of huge pages. The caller owns the run.
    pub fn is_better_copied(&self, pfn: Pfn, old: u32, new: u32) -> bool {
        self.node(self.node_of(pfn)).is_better_copied(pfn, old, new)
    }

    /// Whether a run has pages of a huge page that a move to its place would break.
    pub fn is_part_of_huge(&self, pfn: Pfn, pages: u32) -> bool {
        self.node(self.node_of(pfn)).arena.is_part_of_huge(pfn, pages)
    }

    /// Forbids huge pages in a run before its pages are moved ([`Platform::move_pages`]). The move
    /// needs a run that lies in a single mapping.
    pub fn forbid_huge(&self, platform: &P, pfn: Pfn, pages: u32) {
        self.node(self.node_of(pfn)).forbid_huge(platform, pfn, pages, 0);
    }

    fn small(&self) -> u64 {
        if self.uses_huge_pages() { SMALL_HEAP_BYTES >> self.page_shift() } else { 0 }
    }
}
