//! A cache with a shrinker, whose blocks come from neap in this executable or from the C library.
//!
//! # Design
//! Keys are small numbers. Blocks leave in the order in which they came. The cache's tables are on
//! the C library's heap, so neap's heap holds only blocks.
//!
//! # Locking
//! The cache has one mutex. No thread allocates a block while it holds the mutex, and the shrinker
//! only tries it.

use std::alloc::{GlobalAlloc, Layout};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use neap::Neap;
use neap::process::PROCESS;
use neap::reclaim::{Context, Count, Scan, Shrink, Shrinker};

/// Bytes of a page: touching a block writes one byte of each.
const PAGE: usize = 4096;

/// A source of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Heap {
    /// neap in this executable
    Neap,
    /// The C library's malloc
    System,
}

/// A touched block, which is freed when it is dropped.
pub(super) struct CachedBlock {
    heap: Heap,
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block owns its memory alone, and both heaps let any thread free it.
unsafe impl Send for CachedBlock {}

impl Heap {
    /// Prepares the heap: starts neap's thread.
    pub(super) fn open(self) {
        if self == Heap::Neap {
            PROCESS.start_background();
        }
    }

    /// Allocates and touches a block of at least one byte. `None` if the heap refuses.
    pub(super) fn take(self, size: usize) -> Option<CachedBlock> {
        let layout = Layout::from_size_align(size.max(1), 16).ok()?;
        let base = match self {
            // SAFETY: the size is not 0.
            Heap::Neap => unsafe { Neap.alloc(layout) },
            // SAFETY: malloc may be called with any size.
            Heap::System => unsafe { libc::malloc(layout.size()) }.cast(),
        };
        let base = NonNull::new(base)?;
        for offset in (0..layout.size()).step_by(PAGE) {
            // SAFETY: the offset is inside the new block.
            unsafe { base.add(offset).write_volatile(1) };
        }
        Some(CachedBlock { heap: self, base, layout })
    }
}

impl CachedBlock {
    /// Sum of one byte of each page.
    fn sum(&self) -> u64 {
        // SAFETY: the block is allocated, and the offsets lie inside it. Allocation initialised the
        // bytes at these offsets, and only they are read.
        (0..self.layout.size()).step_by(PAGE).map(|at| u64::from(unsafe { self.base.add(at).read_volatile() })).sum()
    }

    /// Writes every byte.
    pub(super) fn fill(&mut self, byte: u8) {
        // SAFETY: the block has this many bytes, and is borrowed mutably.
        unsafe {
            slice::from_raw_parts_mut(self.base.as_ptr().cast::<std::mem::MaybeUninit<u8>>(), self.layout.size())
        }
        .fill(std::mem::MaybeUninit::new(byte));
    }
}

impl Drop for CachedBlock {
    fn drop(&mut self) {
        match self.heap {
            // SAFETY: the block came from this allocator with this layout, and is freed once.
            Heap::Neap => unsafe { Neap.dealloc(self.base.as_ptr(), self.layout) },
            // SAFETY: the block came from malloc, and is freed once.
            Heap::System => unsafe { libc::free(self.base.as_ptr().cast()) },
        }
    }
}

#[derive(Default)]
struct Blocks {
    by_key: Vec<Option<CachedBlock>>,
    /// Keys of the cached blocks, the oldest first.
    order: VecDeque<usize>,
}

/// Blocks of one size by key.
pub(super) struct BlockCache {
    size: usize,
    blocks: Mutex<Blocks>,
    /// Statistics: cached blocks, their lowest number, and evicted blocks. They publish no other
    /// data.
    count: AtomicU64,
    lowest: AtomicU64,
    evicted: AtomicU64,
}

impl BlockCache {
    /// Makes an empty cache for blocks of `size` bytes with keys below `keys`.
    pub(super) fn new(size: usize, keys: usize) -> BlockCache {
        let blocks = Blocks { by_key: (0..keys).map(|_| None).collect(), order: VecDeque::with_capacity(keys) };
        let [count, lowest, evicted] = [const { AtomicU64::new(0) }; 3];
        BlockCache { size, blocks: Mutex::new(blocks), count, lowest, evicted }
    }

    /// Registers a shrinker, by which neap asks this cache for memory until the shrinker is
    /// dropped.
    pub(super) fn shrinks(self: &Arc<Self>, name: &str) -> Result<Shrinker> {
        let builder = Shrinker::named(name).object_bytes(self.size as u64);
        builder.register_shrink(self.clone()).context("cannot register the shrinker")
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the block of a key. `None` if it is not cached.
    pub(super) fn look_up(&self, key: usize) -> Option<u64> {
        self.lock().by_key[key].as_ref().map(CachedBlock::sum)
    }

    /// Caches a block, unless the key has one.
    pub(super) fn insert(&self, key: usize, block: CachedBlock) {
        let mut blocks = self.lock();
        if blocks.by_key[key].is_none() {
            blocks.by_key[key] = Some(block);
            blocks.order.push_back(key);
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Frees up to `most` of the oldest blocks. Returns the number of freed blocks.
    pub(super) fn evict(&self, most: usize) -> usize {
        self.evict_from(&mut self.lock(), most)
    }

    fn evict_from(&self, blocks: &mut Blocks, most: usize) -> usize {
        let freed = most.min(blocks.order.len());
        for key in blocks.order.drain(..freed) {
            blocks.by_key[key] = None;
        }
        let count = self.count.fetch_sub(freed as u64, Ordering::Relaxed) - freed as u64;
        self.lowest.fetch_min(count, Ordering::Relaxed);
        self.evicted.fetch_add(freed as u64, Ordering::Relaxed);
        freed
    }

    /// Number of cached blocks.
    pub(super) fn cached(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Starts a new search for the lowest count.
    pub(super) fn reset_lowest(&self) {
        self.lowest.store(self.cached(), Ordering::Relaxed);
    }

    /// The lowest count since the last reset.
    pub(super) fn lowest(&self) -> u64 {
        self.lowest.load(Ordering::Relaxed)
    }

    /// Number of blocks that were evicted.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }
}

impl Shrink for BlockCache {
    fn count(&self, _: &Context) -> Count {
        Count::Objects(self.cached())
    }

    fn scan(&self, _: &Context, objects: usize) -> Scan {
        let Ok(mut blocks) = self.blocks.try_lock() else { return Scan::Busy };
        Scan::Freed(self.evict_from(&mut blocks, objects) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap::groups::Group;
    use neap::reclaim::reclaim;
    use std::time::Duration;

    #[test]
    fn oldest_blocks_leave_first_and_counts_follow() {
        for heap in [Heap::Neap, Heap::System] {
            let cache = BlockCache::new(10_000, 8);
            for key in [3, 1, 7] {
                cache.insert(key, heap.take(10_000).unwrap());
            }
            cache.insert(3, heap.take(10_000).unwrap());
            assert_eq!((cache.cached(), cache.look_up(1), cache.look_up(0)), (3, Some(3), None));
            cache.reset_lowest();
            assert_eq!((cache.evict(2), cache.lowest(), cache.evicted()), (2, 1, 2));
            let mut block = heap.take(5000).unwrap();
            block.fill(4);
            assert_eq!(block.sum(), 8);
            cache.insert(3, block);
            assert_eq!((cache.look_up(3), cache.look_up(7)), (Some(8), Some(3)));
            assert_eq!((cache.evict(9), cache.cached(), cache.lowest()), (2, 0, 0));
        }
    }

    #[test]
    fn reclaim_evicts_blocks_of_the_cache() {
        let cache = Arc::new(BlockCache::new(100_000, 64));
        let shrinker = cache.shrinks("blocks").unwrap();
        (0..64).for_each(|key| cache.insert(key, Heap::Neap.take(100_000).unwrap()));
        // neap's own caches give first.
        let asked = (0..100).find(|_| {
            reclaim(Group::ROOT, 1 << 20, Duration::from_secs(10));
            cache.evicted() > 0
        });
        assert!(asked.is_some() && cache.cached() + cache.evicted() == 64);
        drop(shrinker);
    }
}
