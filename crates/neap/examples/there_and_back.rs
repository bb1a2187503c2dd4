//! Time of malloc and free in a Rust program with neap as its global allocator: 64 bytes allocated
//! and freed, and 1000 blocks at a time.
//!
//! Run by `cargo run --release -p neap --example there_and_back`. The compiler inlines both into
//! the loop, unlike calls of a preloaded library. Prints the least time of several runs each, so
//! that other work on the machine does not count.

use core::alloc::{GlobalAlloc, Layout};
use core::hint::black_box;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

const HELD: usize = 1000;
const TIMES: usize = 10_000;
const RUNS: usize = 5;

/// Returns the least time of the runs, for each of the `HELD * TIMES` pairs of one.
fn least(run: impl Fn()) -> f64 {
    let timed = |_| {
        let start = Instant::now();
        (0..TIMES).for_each(|_| run());
        start.elapsed().as_nanos() as f64 / (TIMES * HELD) as f64
    };
    (0..RUNS).map(timed).fold(f64::INFINITY, f64::min)
}

fn main() {
    let layout = Layout::new::<[u64; 8]>();
    // SAFETY: the layout is not empty. The block is freed once, with its layout.
    let one =
        least(|| (0..HELD).for_each(|_| unsafe { ALLOCATOR.dealloc(black_box(ALLOCATOR.alloc(layout)), layout) }));
    let many = least(|| {
        let mut held = [core::ptr::null_mut(); HELD];
        // SAFETY: the layout is not empty.
        held.iter_mut().for_each(|block| *block = unsafe { ALLOCATOR.alloc(layout) });
        // SAFETY: each block was allocated above with this layout, and is freed once.
        black_box(&held).iter().rev().for_each(|&block| unsafe { ALLOCATOR.dealloc(block, layout) });
    });
    println!("64 bytes there and back: {one:.2} ns; {HELD} at a time: {many:.2} ns");
}
