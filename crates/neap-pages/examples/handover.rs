//! Blocks that one CPU frees and another allocates: how warm they are, by the size of CPU lists.
//!
//! `taskset -c 0,1 cargo run --release -p neap-pages --example handover`
//!
//! One thread allocates blocks, writes them, and passes them on. The other thread, on another CPU,
//! reads and frees them. So every block goes from the list of one CPU to that of the other. The
//! more pages lie between, the longer a block was not used when it is written again. Printed are
//! medians: of the time to write a KiB of a fresh block, and of the time for a whole block.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use neap_base::{Linux, Order, Pfn};
use neap_pages::{BATCH_SCALE, Pages, Shape, SideTable, TABLES};
use std::time::Instant;

/// Blocks between the two threads.
const RING: usize = 4;
/// Pages that are passed on in each measurement.
const PAGES: usize = 200_000;

fn pin(cpu: usize) {
    // SAFETY: zeroes are an empty set, and the kernel reads it only.
    unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0, "CPU {cpu}");
    }
}

fn words(address: usize, bytes: usize) -> impl Iterator<Item = *mut u64> {
    (address..address + bytes).step_by(64).map(core::ptr::with_exposed_provenance_mut)
}

fn median(mut numbers: Vec<u64>) -> u64 {
    numbers.sort_unstable();
    numbers[numbers.len() / 2]
}

/// Passes blocks on. Returns nanoseconds for a KiB written, and for a block.
fn measure(order: u8, list_high: Option<u32>, batch_scale: u32) -> (f64, u64) {
    let platform = Linux::probe();
    let tables = [SideTable::default(); TABLES];
    let shape = Shape { span: 1 << 40, budget: None, tables, huge: false, list_high, batch_scale };
    let pages: Pages<Linux> = Pages::open(&platform, &shape).expect("address space");
    let (order, bytes) = (Order(order), 4096 << order);
    let ring: [AtomicU32; RING] = [const { AtomicU32::new(u32::MAX) }; RING];
    let (is_over, sum) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (mut writes, mut wholes) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(0);
            for place in ring.iter().cycle() {
                // Acquire pairs with the Release of the writer: the block's contents are visible.
                let mut block = place.swap(u32::MAX, Ordering::Acquire);
                while block == u32::MAX {
                    if is_over.load(Ordering::Acquire) {
                        return;
                    }
                    core::hint::spin_loop();
                    block = place.swap(u32::MAX, Ordering::Acquire);
                }
                // SAFETY: the block is this thread's until it frees it.
                let read = |word: *mut u64| unsafe { word.read_volatile() } as usize;
                sum.fetch_add(words(pages.address(Pfn(block)), bytes).map(read).sum(), Ordering::Relaxed);
                pages.free_block(&platform, Pfn(block), order);
            }
        });
        pin(1);
        for (turn, place) in ring.iter().cycle().take(PAGES >> order.0).enumerate() {
            let start = Instant::now();
            let block = pages.allocate_block(&platform, order).expect("a block").pfn;
            let begun = Instant::now();
            // SAFETY: the block is this thread's until it passes it on.
            words(pages.address(block), bytes).for_each(|word| unsafe { word.write_volatile(turn as u64) });
            if turn > (PAGES >> order.0) / 4 {
                writes.push(begun.elapsed().as_nanos() as u64);
                wholes.push(start.elapsed().as_nanos() as u64);
            }
            // Release pairs with the Acquire of the reader.
            while place.compare_exchange(u32::MAX, block.0, Ordering::Release, Ordering::Relaxed).is_err() {
                core::hint::spin_loop();
            }
        }
        is_over.store(true, Ordering::Release);
    });
    // SAFETY: both threads are done with the pages.
    unsafe { pages.close(&platform) };
    (median(writes) as f64 * 1024.0 / bytes as f64, median(wholes))
}

fn main() {
    let kinds = [("no lists", Some(0), BATCH_SCALE), ("63 pages", Some(63), 0), ("643 pages", Some(643), 0)];
    let kinds = kinds.into_iter().chain([("tuned, scale 0", None, 0), ("tuned", None, BATCH_SCALE)]);
    for order in [0, 1, 3] {
        for (name, list_high, scale) in kinds.clone() {
            let rounds = (0..5).map(|_| measure(order, list_high, scale));
            let (write, whole) = rounds.fold((f64::MAX, u64::MAX), |best, now| (best.0.min(now.0), best.1.min(now.1)));
            println!("order {order}, {name:14} {write:7.1} ns for a KiB, {whole:6} ns for a block");
        }
    }
}
