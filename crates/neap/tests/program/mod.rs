//! A program that uses a manager, and knows the contents of its memory.
//!
//! Every byte that the program may use has a pattern made from its address and a stamp. Blocks are
//! kept in order, so that an overlap is found at once.
#![allow(dead_code, reason = "not every test file uses every piece")]

use core::ops::Deref;
use neap::mm::{Hooks, Mm};
use neap::options::Options;
use neap_base::platform::Errno;
use neap_base::{Linux, Platform};
use neap_objects::size_class::Class;
use neap_testing::shared::Shared;
use std::collections::BTreeMap;

/// A manager that is opened with the value, and closed with it. It has no thread of its own.
pub(crate) struct Opened<P: Platform>(pub(crate) Box<Mm<P>>);

impl<P: Platform> Opened<P> {
    pub(crate) fn new(platform: P, options: &Options) -> Result<Opened<P>, Errno> {
        Opened::with_hooks(platform, options, Hooks { open: |_| (), spawn: None, ticked: None })
    }

    pub(crate) fn with_hooks(platform: P, options: &Options, hooks: Hooks<P>) -> Result<Opened<P>, Errno> {
        let mm = Box::new(Mm::new(hooks));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(platform, options) }.map(|_| Opened(mm))
    }
}

impl<P: Platform> Deref for Opened<P> {
    type Target = Mm<P>;

    fn deref(&self) -> &Mm<P> {
        &self.0
    }
}

impl<P: Platform> Drop for Opened<P> {
    fn drop(&mut self) {
        // SAFETY: the test is over, and uses no memory of the manager after this.
        unsafe { self.0.close() };
    }
}

/// The real system, for tests that run with both kinds of slots.
pub(crate) fn linux(rseq: bool) -> (Shared<Linux>, Options) {
    (Shared::new(Linux::probe()), Options { rseq, ..OPTIONS })
}

/// Options that do not depend on the process.
pub(crate) const OPTIONS: Options = Options { stat: false, ..Options::DEFAULT };

/// The arguments of an allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) size: usize,
    pub(crate) align: usize,
    pub(crate) zeroed: bool,
}

/// The program's record of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    size: usize,
    usable: usize,
    align: usize,
    stamp: usize,
}

fn word(address: usize) -> *mut usize {
    core::ptr::with_exposed_provenance_mut(address)
}

fn pointer(address: usize) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(address)
}

/// Returns the expected word at an address.
fn pattern(address: usize, stamp: usize) -> usize {
    (address ^ stamp).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Writes the pattern to all words of a range; both ends are multiples of eight.
pub(crate) fn fill(start: usize, length: usize, stamp: usize) {
    for at in (start..start + length).step_by(8) {
        // SAFETY: the memory is the caller's.
        unsafe { word(at).write(pattern(at, stamp)) };
    }
}

/// Whether `start` still has the pattern that was written for `from`.
pub(crate) fn check(start: usize, length: usize, from: usize, stamp: usize) {
    for at in (0..length).step_by(8) {
        // SAFETY: the memory is the caller's.
        let found = unsafe { word(start + at).read() };
        assert_eq!(found, pattern(from + at, stamp), "{:#x} ({at} bytes into its block) lost its contents", start + at);
    }
}

/// The program and its blocks.
pub(crate) struct Program<'m, P: Platform> {
    pub(crate) mm: &'m Mm<P>,
    pub(crate) blocks: BTreeMap<usize, Block>,
    stamps: usize,
}

impl<'m, P: Platform> Program<'m, P> {
    pub(crate) fn new(mm: &'m Mm<P>) -> Program<'m, P> {
        Program { mm, blocks: BTreeMap::new(), stamps: 0 }
    }

    /// Allocates a block. Returns `false` if there is no memory.
    pub(crate) fn allocate(&mut self, request: Request) -> bool {
        let Request { size, align, zeroed } = request;
        let memory = match (align > 16, zeroed) {
            (false, false) => self.mm.allocate(size),
            (false, true) => self.mm.allocate_zeroed(size),
            (true, false) => self.mm.allocate_aligned(size, align),
            (true, true) => self.mm.allocate_zeroed_aligned(size, align),
        };
        if memory.is_null() {
            return false;
        }
        let start = memory.expose_provenance();
        if zeroed {
            // SAFETY: the block has at least that many bytes.
            let bytes = unsafe { core::slice::from_raw_parts(pointer(start), size) };
            let (words, rest) = bytes.as_chunks::<8>();
            let zero = words.iter().all(|word| u64::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0);
            assert!(zero, "{request:?} at {start:#x} is not zero");
        }
        self.keep(start, size, align);
        true
    }

    /// Records a block that was just handed out.
    fn keep(&mut self, start: usize, size: usize, align: usize) {
        let usable = self.mm.usable_size(pointer(start));
        assert!(usable >= size.max(1) && usable.is_multiple_of(8), "{usable} usable bytes of {size}");
        assert!(start.is_multiple_of(align.max(16)), "{start:#x} is not aligned to {align}");
        let before = self.blocks.range(..start + usable).next_back();
        assert!(before.is_none_or(|(at, block)| at + block.usable <= start), "{start:#x} overlaps {before:x?}");
        self.stamps += 1;
        fill(start, usable, self.stamps);
        self.blocks.insert(start, Block { size, usable, align, stamp: self.stamps });
    }

    /// Returns the start of one of the blocks.
    pub(crate) fn choose(&self, number: usize) -> Option<usize> {
        let from =
            self.blocks.keys().next()? + number % (self.blocks.keys().next_back()? - self.blocks.keys().next()? + 1);
        self.blocks.range(from..).next().map(|(start, _)| *start)
    }

    /// Frees a block.
    pub(crate) fn free(&mut self, start: usize) {
        let block = self.blocks.remove(&start).expect("a block of the program's");
        check(start, block.usable, start, block.stamp);
        // SAFETY: the block is removed from the record, so it is freed once and not used again.
        unsafe { self.mm.free(pointer(start)) };
    }

    /// Removes a block from the record, for another program to adopt.
    pub(crate) fn give_away(&mut self, start: usize) -> (usize, Block) {
        (start, self.blocks.remove(&start).expect("a block of the program's"))
    }

    /// Adopts a block.
    pub(crate) fn adopt(&mut self, (start, block): (usize, Block)) {
        check(start, block.usable, start, block.stamp);
        self.blocks.insert(start, block);
    }

    /// Resizes a block. Returns `false`, with the block unchanged, if there is no memory.
    pub(crate) fn reallocate(&mut self, start: usize, size: usize) -> bool {
        let block = self.blocks.remove(&start).expect("a block of the program's");
        check(start, block.usable, start, block.stamp);
        // SAFETY: the block is the program's.
        let memory = unsafe {
            if block.align > 16 {
                self.mm.reallocate_aligned(pointer(start), size, block.align)
            } else {
                self.mm.reallocate(pointer(start), size)
            }
        };
        if memory.is_null() {
            assert_eq!(self.mm.usable_size(pointer(start)), block.usable, "a failed realloc changes nothing");
            check(start, block.usable, start, block.stamp);
            self.blocks.insert(start, block);
            return false;
        }
        let moved = memory.expose_provenance();
        check(moved, block.usable.min(size) / 8 * 8, start, block.stamp);
        self.keep(moved, size, block.align);
        true
    }

    /// Number of blocks that are objects of slabs, not runs of pages.
    pub(crate) fn small(&self) -> u64 {
        let small = |block: &&Block| Class::of_layout(block.size, block.align, self.mm.page_size()).is_some();
        self.blocks.values().filter(small).count() as u64
    }

    /// Verifies the manager against the program's record.
    pub(crate) fn verify(&self) {
        self.blocks.iter().for_each(|(start, block)| check(*start, block.usable.min(256), *start, block.stamp));
        let census = self.mm.verify(0).unwrap_or_else(|finding| panic!("{finding}"));
        assert_eq!(census.allocated, self.small(), "{census:?}");
        let used: usize = self.blocks.values().map(|block| block.usable).sum();
        assert!(self.mm.usage().used_bytes >= used as u64, "{:?} with {used} bytes in use", self.mm.usage());
    }

    /// Frees everything and verifies that nothing is kept: no object, slab, sheaf or page.
    pub(crate) fn end(mut self) {
        while let Some((start, _)) = self.blocks.first_key_value() {
            self.free(*start);
        }
        self.verify();
        self.mm.release_all();
        nothing_is_kept(self.mm);
    }
}

/// Checks that nothing is kept after everything was freed and released: no object, slab, sheaf or
/// run, and no page used, cached or resident.
pub(crate) fn nothing_is_kept<P: Platform>(mm: &Mm<P>) {
    let census = mm.verify(0).unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(census, neap::verify::Census::default());
    let usage = mm.usage();
    assert_eq!((usage.used_bytes, usage.cached_bytes, usage.free_bytes), (0, 0, 0), "{usage:?}");
}
