//! Small heaps, whose huge pages stay whole.
//!
//! A garbage collector frees most of its heap again and again. If the huge pages of a small heap
//! were broken the first time, the heap would keep small pages: it would be slower, and hardly
//! smaller. So neither growth nor the program's frees break them. Ticks, limits and requests do.

use crate::node_pages::NodePages;
use neap_base::Platform;

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

    fn small(&self) -> u64 {
        if self.uses_huge_pages() { SMALL_HEAP_BYTES >> self.page_shift() } else { 0 }
    }
}
