//! Shared parts of the tests: an instance, and allocations with contents.

#![allow(dead_code, reason = "no test uses all of it")]

use neap_base::Platform;
use neap_percpu::{GRANULE, Handle, Layout, Owner, PerCpuData, Refused, Shape, Wait};
use std::vec::Vec;

/// An allocation whose copies are filled with a byte made from its stamp and the CPU.
pub(crate) struct Held {
    pub(crate) handle: Handle,
    pub(crate) owner: Owner,
    pub(crate) size: usize,
    stamp: u64,
}

impl Held {
    fn byte(&self, cpu: usize) -> u8 {
        (self.stamp.wrapping_mul(31) + cpu as u64 * 7 + 1) as u8
    }

    /// Every copy with all of its `size` bytes.
    fn copies<'a>(&'a self, data: &'a PerCpuData) -> impl Iterator<Item = (usize, &'a mut [u8])> {
        // SAFETY: only this value uses the allocation, and copies do not overlap.
        (0..data.cpus())
            .map(|cpu| (cpu, unsafe { core::slice::from_raw_parts_mut(data.address(self.handle, cpu), self.size) }))
    }

    pub(crate) fn check(&self, data: &PerCpuData) {
        for (cpu, copy) in self.copies(data) {
            assert!(is_all(copy, self.byte(cpu)), "stamp {} on CPU {cpu}", self.stamp);
        }
    }
}

/// Whether all bytes have this value. Miri compares slices at once, and would interpret a loop.
fn is_all(copy: &[u8], byte: u8) -> bool {
    copy == vec![byte; copy.len()]
}

/// Allocates, checks zeroes and alignment, and fills the copies.
pub(crate) fn take<P: Platform>(
    data: &PerCpuData,
    platform: &P,
    owner: Owner,
    (size, align): (usize, usize),
    wait: Wait,
    stamp: u64,
) -> Result<Held, Refused> {
    let handle = data.allocate(platform, owner, size, align, wait)?;
    let held = Held { handle, owner, size, stamp };
    for (cpu, copy) in held.copies(data) {
        assert!(is_all(copy, 0), "stamp {stamp}: not zeroes on CPU {cpu}");
        assert!(copy.as_ptr().addr().is_multiple_of(align.max(GRANULE)), "stamp {stamp}: not aligned to {align}");
        copy.fill(held.byte(cpu));
    }
    Ok(held)
}

pub(crate) fn give(data: &PerCpuData, held: Held) {
    held.check(data);
    let rounded = held.size.next_multiple_of(GRANULE);
    // SAFETY: no code uses it any more.
    assert_eq!(unsafe { data.free(held.handle) }, Ok(rounded));
}

/// Shape of a small instance.
pub(crate) fn shape(layout: Layout, cpus: usize, page: usize) -> Shape {
    Shape { layout, page, span: 16 << 20, ..Shape::usual(cpus) }
}

pub(crate) fn open<P: Platform>(platform: &P, shape: &Shape) -> PerCpuData {
    PerCpuData::open(platform, shape, |_| 0, ()).expect("there is address space")
}

/// Ticks until no work is left, and verifies.
pub(crate) fn settle<P: Platform>(data: &PerCpuData, platform: &P) {
    // More ticks than the worker waits after the system refused.
    let ticks = (0..100).take_while(|_| data.tick(platform).more).count();
    assert!(ticks < 100, "there is always more to do");
    verify(data);
}

pub(crate) fn verify(data: &PerCpuData) {
    data.verify().unwrap_or_else(|finding| panic!("{finding}"));
}

/// Frees everything, and closes an instance that has released all but its reserve.
pub(crate) fn end<P: Platform>(data: &PerCpuData, platform: &P, held: Vec<Held>) {
    held.into_iter().for_each(|held| give(data, held));
    settle(data, platform);
    let left = data.statistics();
    assert_eq!((left.populated, left.empty, left.isolated_empty), (left.reserve, left.reserve, 0));
    assert_eq!((left.allocated_bytes, left.row_bytes, left.allocations, left.rows), (0, 0, 0, 0));
    assert_eq!((left.chunks, left.free_chunks), (1, 1));
    // SAFETY: no code uses it any more.
    unsafe { data.close(platform) };
}

/// Calls `each` with address and length of every populated page, in every group.
pub(crate) fn populated_ranges(data: &PerCpuData, mut each: impl FnMut(usize, usize)) {
    let (of, mut parts) = (data.dimensions(), Vec::new());
    data.reach(|start, _| parts.push(start));
    for number in 0..data.chunk_numbers() {
        let mut words = Vec::new();
        _ = data.chunk(number, |word| words.push(word), |_| ());
        let is_populated = |page: &usize| words.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 == 1);
        for page in (0..of.pages).filter(is_populated) {
            let offset = (number as usize * of.pages + page) * of.page;
            parts.iter().for_each(|start| each(start + offset, of.page));
        }
    }
}
