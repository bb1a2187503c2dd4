//! Live sets of one block size after another, without a pause between them.
//!
//! Goal: memory that one size freed serves the next, whatever the order of the frees. So what is
//! resident never exceeds the live set by much.
//!
//! Method: the eight sizes of `neap bench phases` on a virtual machine, whose thread never runs: no
//! tick and no call gives memory back. The resident bytes are read after every few allocations.

use crate::program::{OPTIONS, Opened};
use neap::mm::Hooks;
use neap::options::{Background, Options};
use neap_testing::orders::{Order, reorder};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::Virtual;

const LIVE: usize = 300 << 20;
/// Small objects, slabs of up to 256 KiB, and runs whose ends leave gaps.
const SIZES: [usize; 8] = [64, 4096, 300, 32_768, 1000, 200_000, 128, 2048];

/// The most resident bytes that are in use, cached or free, over the live set.
fn peak(order: Order, random: &mut Random) -> f64 {
    let options = Options { background: Background::Always, ..OPTIONS };
    let hooks = Hooks { open: |_| (), spawn: Some(|_, _| Ok(1)), ticked: None };
    let mm = Opened::with_hooks(Virtual::new(4096, 1), &options, hooks).unwrap();
    let mut peak = 0;
    for size in SIZES {
        let count = LIVE / size;
        let mut blocks = Vec::with_capacity(count);
        for n in 0..count {
            blocks.push(mm.allocate(size));
            if n % (count / 64).max(1) == 0 {
                let usage = mm.usage();
                peak = peak.max(usage.used_bytes + usage.cached_bytes + usage.free_bytes);
            }
        }
        reorder(&mut blocks, order, random);
        for block in blocks {
            // SAFETY: allocated above, and freed once.
            unsafe { mm.free(block) };
        }
    }
    assert_eq!(mm.verify(0).map(|_| ()), Ok(()));
    peak as f64 / LIVE as f64
}

#[test]
fn one_size_takes_the_memory_of_another() {
    let mut random = Random(seed());
    for order in Order::ALL {
        let peak = peak(order, &mut random);
        assert!(peak < 1.15, "{order:?}: {peak:.2} of the live set");
    }
}
