//! The cost of a page: nanoseconds for pairs, batches and fresh memory, on this machine.
//!
//! `cargo run --release -p neap-pages --example speed`

use neap_base::{Linux, Order, Pfn, Platform};
use neap_pages::{BATCH_SCALE, Pages, Shape, SideTable, TABLES};
use std::time::Instant;

const COUNT: u32 = 32768;

fn measure(what: &str, operations: u32, mut body: impl FnMut()) {
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        body();
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(operations));
    }
    println!("{what:44} {best:8.1} ns");
}

fn touch(address: usize) {
    // SAFETY: every address passed here is that of a page that was just handed out.
    unsafe { core::ptr::with_exposed_provenance_mut::<u8>(address).write_volatile(1) };
}

/// Page faults of this process so far.
fn faults() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    text.split(' ').nth(9).and_then(|count| count.parse().ok()).unwrap_or(0)
}

fn main() {
    let platform = Linux::probe();
    let huge = std::env::args().any(|argument| argument == "huge");
    // The size of a list without tuning on two CPUs, for comparison.
    let list_high = std::env::args().any(|argument| argument == "fixed").then_some(643);
    let tables = [SideTable::default(); TABLES];
    let shape = Shape { span: 1 << 40, budget: None, tables, huge, list_high, batch_scale: BATCH_SCALE };
    let (start, before) = (Instant::now(), faults());
    let pages = Pages::open(&platform, &shape).expect("address space");
    pages.allocate_block(&platform, Order(0)).expect("a block");
    println!("opened, and a first block: {} us, {} faults", start.elapsed().as_micros(), faults() - before);
    let mut held = Vec::with_capacity(COUNT as usize);
    for order in [0, 3, 4, 9] {
        measure(&format!("block of order {order}, there and back"), 1000, || {
            for _ in 0..1000 {
                let block = pages.allocate_block(&platform, Order(order)).expect("a block");
                pages.free_block(&platform, block.pfn, Order(order));
            }
        });
    }
    for count in [5, 16, 300, 5000] {
        measure(&format!("run of {count}, there and back"), 1000, || {
            for _ in 0..1000 {
                let block = pages.allocate_run(&platform, count, 1).expect("a run");
                pages.free_run(&platform, block.pfn, count);
            }
        });
    }
    let mut up_and_down = |what: &str, order: u8, fresh: bool, touched: bool| {
        measure(what, COUNT >> order, || {
            if fresh {
                pages.release_all(&platform);
            }
            for _ in 0..COUNT >> order {
                let block = pages.allocate_block(&platform, Order(order)).expect("a block");
                if touched {
                    touch(pages.address(block.pfn));
                }
                held.push(block.pfn);
            }
            held.drain(..).for_each(|pfn: Pfn| pages.free_block(&platform, pfn, Order(order)));
        });
    };
    up_and_down("order 0, 128 MiB up and down", 0, false, false);
    up_and_down("order 0, 128 MiB up and down, touched", 0, false, true);
    up_and_down("order 0, 128 MiB, released, touched", 0, true, true);
    up_and_down("order 3, 128 MiB up and down", 3, false, false);
    let maps = std::fs::read_to_string("/proc/self/maps").map_or(0, |text| text.lines().count());
    println!("{maps} mappings, {} zone locks, {:?}", pages.statistics().zone_locks, pages.statistics().populated);
    let start = platform.now();
    let report = pages.release_all(&platform);
    println!("{report:?} in {} ms", (platform.now() - start) / 1_000_000);
}
