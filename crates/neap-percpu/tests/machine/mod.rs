//! Shared parts of the tests: an instance, allocations with contents, random numbers.

#![allow(dead_code, reason = "no test uses all of it")]

#[path = "../../../neap-pages/tests/machine/probe.rs"]
pub(crate) mod probe;

use neap_base::Platform;
use neap_percpu::{GRANULE, Handle, Layout, Owner, PerCpuData, Refused, Shape, Wait};
use std::println;
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
            assert!(copy.iter().all(|byte| *byte == self.byte(cpu)), "stamp {} on CPU {cpu}", self.stamp);
        }
    }
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
        assert!(copy.iter().all(|byte| *byte == 0), "stamp {stamp}: not zeroes on CPU {cpu}");
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

/// Random number generator (SplitMix64); a test prints its seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// Seed of a random test: `NEAP_SEED`, or a fixed one. It is printed, so that a run can be
/// repeated.
pub(crate) fn seed() -> u64 {
    let seed = std::env::var("NEAP_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("NEAP_SEED={seed} repeats this run");
    seed
}
