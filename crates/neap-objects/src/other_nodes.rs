//! The class caches of every node but the first, in one mapping.

use crate::class_cache::{ClassCache, SharedCache};
use crate::size_class::CLASSES;
use neap_base::platform::memory::Range;
use neap_base::platform::{Errno, Platform};

/// The class caches of one node other than the first.
#[derive(Debug)]
pub(crate) struct Others {
    pub(crate) caches: [SharedCache; CLASSES],
}

impl Others {
    /// Bytes of a mapping for `count` nodes.
    fn bytes<P: Platform>(platform: &P, count: usize) -> usize {
        (count * size_of::<Others>()).next_multiple_of(platform.page_size())
    }

    pub(crate) fn open<P: Platform>(platform: &P, count: usize) -> Result<*const Others, Errno> {
        if count == 0 {
            return Ok(core::ptr::null());
        }
        let start = core::ptr::with_exposed_provenance_mut::<Others>(platform.map(Others::bytes(platform, count))?);
        for node in 0..count {
            // Writes the caches one by one. An array value would lie on the stack of the process's
            // first `malloc`.
            for class in 0..CLASSES {
                // SAFETY: `node` and `class` are in range, so the place lies inside the mapping,
                // which is aligned to a page.
                unsafe { (&raw mut (*start.add(node)).caches[class]).write(SharedCache::new(ClassCache::new())) };
            }
        }
        Ok(start)
    }

    /// The mapping of [`Others::open`].
    pub(crate) fn mapping<P: Platform>(others: *const Others, platform: &P, count: usize) -> Range {
        Range { start: others.addr(), length: Others::bytes(platform, count) }
    }

    /// # Safety
    /// `others` is a result of [`Others::open`] for as many nodes, and no thread uses it any more.
    pub(crate) unsafe fn close<P: Platform>(others: *const Others, platform: &P, count: usize) {
        if count > 0 {
            // SAFETY: `open` mapped as many bytes there, and the caller says that no thread uses
            // them any more.
            unsafe { platform.unmap(others.addr(), Others::bytes(platform, count)) };
        }
    }
}
