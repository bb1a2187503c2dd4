//! The maintenance thread of the process's manager.
//!
//! Goal: no call that allocates or frees makes a thread. The thread that the program requests
//! releases all memory, and then sleeps. Any call that caches memory afterwards wakes it, even if
//! it comes while the thread falls asleep. The thread takes no signal of the program's. A forked
//! child has none before it requests one.
//!
//! Method: the process's manager is used directly, with short intervals, in bursts that hit all
//! phases of the thread. After each burst the test waits until nothing is cached, and fails if that
//! takes too long.

use core::time::Duration;
use neap::process::PROCESS;
use neap_testing::again::{self, succeeds};
use neap_testing::child::in_child;
use neap_testing::random::{Random, number, seed};
use std::time::Instant;

/// Longest wait: longer means never.
const NEVER: Duration = Duration::from_secs(20);

/// The directories of neap's own threads.
fn tasks() -> Vec<std::path::PathBuf> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let is_ours =
        |task: &std::path::PathBuf| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "neap\n");
    tasks.filter(is_ours).collect()
}

fn kept() -> u64 {
    let usage = PROCESS.usage();
    usage.cached_bytes + usage.free_bytes
}

/// Waits until nothing is cached.
fn waits_until_all_is_back(after: &str) {
    let start = Instant::now();
    while kept() > 0 {
        assert!(start.elapsed() < NEVER, "after {after}: {} bytes never go back: {:?}", kept(), PROCESS.usage());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Allocates `count` blocks of a size, touches and frees them.
fn burst(size: usize, count: usize) {
    let blocks: Vec<*mut u8> = (0..count).map(|_| PROCESS.allocate(size)).collect();
    for block in blocks {
        // SAFETY: allocated above.
        unsafe {
            block.write_bytes(1, size);
            PROCESS.free(block);
        }
    }
}

/// A test of a process of its own: runs only if told to.
#[test]
fn a_process() {
    if again::case().is_none() {
        return;
    }
    let mut random = Random(seed());
    burst(100_000, 400);
    assert_eq!(tasks().len(), 0, "a call has made a thread");
    assert!(PROCESS.start_background() && PROCESS.start_background());
    burst(100_000, 400);
    waits_until_all_is_back("the first burst");
    assert_eq!(tasks().len(), 1);
    let status = std::fs::read_to_string(tasks()[0].join("status")).unwrap();
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
    // All but KILL, STOP and SYS, and those that the C library keeps for itself.
    let its_own = if cfg!(target_env = "musl") { 7 << 31 } else { 3 << 31 };
    assert_eq!(u64::from_str_radix(blocked, 16).unwrap(), !(1 << 8 | 1 << 18 | 1 << 30 | its_own), "{blocked}");
    for round in 0..number("NEAP_ROUNDS", 60) {
        let (size, count) =
            [(64, 1), (64, 3000), (5000, 200), (30_000, 50), (3 << 20, 2), (100_000, 1)][random.below(6)];
        // Hits every phase of ticking, falling asleep and sleeping.
        std::thread::sleep(Duration::from_micros(random.below(30_000) as u64));
        burst(size, count);
        waits_until_all_is_back(&format!("round {round}, {count} blocks of {size}"));
    }
    for round in 0..number("NEAP_ROUNDS", 60) / 4 {
        let memory = PROCESS.allocate(3 << 20);
        // SAFETY: allocated just now.
        unsafe { memory.write_bytes(1, 3 << 20) };
        waits_until_all_is_back("a block that stays");
        std::thread::sleep(Duration::from_micros(random.below(30_000) as u64));
        // SAFETY: allocated above, and freed below only.
        let shrunk = unsafe { PROCESS.reallocate(memory, 100_000) };
        assert_eq!(shrunk, memory, "in place");
        waits_until_all_is_back(&format!("shrinking round {round}"));
        // SAFETY: reallocated above, and freed once.
        unsafe { PROCESS.free(shrunk) };
        waits_until_all_is_back("what was left of it");
    }
    assert_eq!(tasks().len(), 1, "the same thread all the time");
    // A child has no thread until it requests one.
    let child = || {
        burst(100_000, 400);
        assert_eq!(tasks().len(), 0);
        assert!(PROCESS.start_background());
        waits_until_all_is_back("a burst in a child");
        assert_eq!(tasks().len(), 1);
    };
    in_child(child);
    PROCESS.verify(3).unwrap_or_else(|finding| panic!("{finding}"));
}

#[test]
fn what_is_cached_is_returned_whenever_it_comes() {
    ["rseq:on,interval:10", "rseq:off,interval:10"]
        .iter()
        .for_each(|options| succeeds("a_process", "process", options));
}
