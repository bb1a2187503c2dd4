//! A program that locks its memory has of neap's tables what is in use, and not the address space they are in.
//!
//! Method: this process locks all that it has and will have, makes per-CPU data, and looks at what became resident and at what goes back.

use core::time::Duration;
use neap::percpu::PerCpuCounter;
use neap::process::PROCESS;
use std::time::Instant;

/// More than everything here takes, and less than the address space of one CPU's data.
const LITTLE: u64 = 128 << 20;

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * neap_base::platform::memory::page_size() as u64
}

#[test]
fn what_is_locked_is_what_was_touched() {
    // SAFETY: has no preconditions.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        eprintln!("skipped: this process may not lock its memory ({})", std::io::Error::last_os_error());
        return;
    }
    let before = resident();
    let counters: Vec<_> = (0..20_000).map(|_| PerCpuCounter::new(1).unwrap()).collect();
    counters.iter().for_each(|counter| counter.add(1));
    let full = resident() - before;
    assert!(full < LITTLE, "{full} bytes for 20 000 counters");
    drop(counters);
    // neap's own thread may be at it.
    let end = Instant::now() + Duration::from_secs(20);
    while resident() + (1 << 20) > before + full {
        assert!(Instant::now() < end, "what is locked goes back, too");
        PROCESS.release_all();
    }
}
