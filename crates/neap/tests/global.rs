//! neap as Rust's global allocator.
//!
//! Goal: a program of std's collections runs on `neap::Neap`, on several threads, with right
//! contents and sums. Threads that come and go leave no more than a few leave. Alignment and zeroes
//! are as `GlobalAlloc` requires. Method: this test program, harness included, has `Neap` as its
//! allocator, and queries the process's manager.

use core::alloc::Layout;
use neap::process::PROCESS;
use neap_testing::again::{self, succeeds};
use std::alloc::{alloc, alloc_zeroed, dealloc, realloc};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::sync::{Arc, mpsc};

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

const THREADS: u64 = 4;

fn proves() {
    // Other tests of this program run meanwhile.
    PROCESS.verify(64).unwrap_or_else(|finding| panic!("{finding}"));
}

/// Puts the same words into many collections. Returns the number of different ones.
fn collections(seed: u64) -> usize {
    let numbers: Vec<u64> = (0..20_000_u64).map(|n| (n ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50).collect();
    let words: Vec<String> = numbers.iter().map(|n| format!("word {n} {}", "x".repeat(*n as usize % 300))).collect();
    let tree: BTreeMap<&str, u64> = words.iter().map(String::as_str).zip(numbers.iter().copied()).collect();
    let map: HashMap<String, Vec<u64>> = numbers.iter().fold(HashMap::new(), |mut map, n| {
        map.entry(words[*n as usize].clone()).or_insert_with(Vec::new).push(*n);
        map
    });
    assert_eq!(map.values().map(Vec::len).sum::<usize>(), numbers.len());
    assert!(map.iter().all(|(word, ns)| ns.iter().all(|n| words[*n as usize] == *word)));
    let mut heap: BinaryHeap<u64> = numbers.iter().copied().collect();
    let sorted: BTreeSet<u64> = core::iter::from_fn(|| heap.pop()).collect();
    assert_eq!(sorted.len(), tree.len());
    let queue: VecDeque<Box<u64>> = numbers.iter().map(|n| Box::new(*n)).collect();
    assert!(queue.iter().map(|n| **n).eq(numbers.iter().copied()));
    tree.len()
}

#[test]
fn collections_on_several_threads() {
    let (send, receive) = mpsc::channel::<Arc<Vec<String>>>();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|seed| {
                let send = send.clone();
                scope.spawn(move || {
                    (0..3).for_each(|round| assert!(collections(seed + round) > 1000));
                    (0..200).for_each(|n| send.send(Arc::new(vec![format!("{seed} {n}"); n])).unwrap());
                })
            })
            .collect();
        drop(send);
        // Memory of one thread is freed by another.
        let received: usize = receive.iter().map(|words| words.len()).sum();
        assert_eq!(received, THREADS as usize * 199 * 100);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    proves();
}

#[test]
fn layouts_of_every_alignment() {
    for align in (0..=21).map(|shift| 1_usize << shift) {
        for size in [1, align / 2 + 1, align, 3 * align, 70_000] {
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: the layout is not empty, and each block is used within its size and freed
            // once with its layout.
            unsafe {
                let (dirty, zeroed) = (alloc(layout), alloc_zeroed(layout));
                dirty.write_bytes(0xaa, size);
                assert!(dirty.addr().is_multiple_of(align) && zeroed.addr().is_multiple_of(align));
                assert!((0..size).all(|n| zeroed.add(n).read() == 0));
                let larger = realloc(dirty, layout, size * 2 + 100);
                assert!(larger.addr().is_multiple_of(align) && (0..size).all(|n| larger.add(n).read() == 0xaa));
                let smaller =
                    realloc(larger, Layout::from_size_align(size * 2 + 100, align).unwrap(), size.div_ceil(2));
                assert!(smaller.addr().is_multiple_of(align) && smaller.read() == 0xaa);
                dealloc(smaller, Layout::from_size_align(size.div_ceil(2), align).unwrap());
                dealloc(zeroed, layout);
            }
        }
    }
    proves();
}

/// A small thread: some blocks of its own, some that it leaves to other threads.
fn small_thread(number: usize) -> Vec<Box<[u8]>> {
    let mut held: Vec<Box<[u8]>> = (0..200).map(|n| vec![number as u8; 1 + n * 13 % 900].into_boxed_slice()).collect();
    assert!(held.iter().all(|bytes| bytes.iter().all(|byte| *byte == number as u8)));
    held.truncate(100);
    held
}

fn threads(count: usize) -> u64 {
    for number in 0..count {
        let left = std::thread::spawn(move || small_thread(number)).join().unwrap();
        assert!(left.iter().all(|bytes| bytes.iter().all(|byte| *byte == number as u8)));
    }
    let usage = PROCESS.usage();
    usage.used_bytes + usage.cached_bytes + usage.free_bytes
}

/// A test of a process of its own: runs only if told to.
#[test]
fn many_threads() {
    if again::case().is_some() {
        let few = threads(8);
        let many = threads(1000);
        println!("{few} bytes after 8 threads, {many} after 1000 more");
        // A leak of one block a thread would be 90 MB; one more CPU with stacks in use is about 1
        // MB.
        assert!(many <= few + (4 << 20), "{many} bytes after 1000 threads, {few} after 8");
        proves();
    }
}

#[test]
fn a_thousand_threads_leave_the_footprint_of_few() {
    ["rseq:on", "rseq:off", "isolated:1"].iter().for_each(|options| succeeds("many_threads", "threads", options));
}
