//! A program that locks its memory locks the used part of neap's tables, and not their whole
//! address space.
//!
//! Method: this process makes per-CPU data, locks all present memory, and later all future memory.
//! It makes more data, and checks how much becomes resident and how much is released.

use neap::percpu::PerCpuCounter;
use neap_base::Linux;
use neap_percpu::{Owner, PerCpuData, Shape, Wait};

/// More than this test uses, and less than the address space of one CPU's data.
const LITTLE: u64 = 128 << 20;

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * neap_base::platform::memory::page_size() as u64
}

/// Returns how many bytes more are resident after `work`.
fn grown(work: impl FnOnce()) -> u64 {
    let before = resident();
    work();
    resident().saturating_sub(before)
}

#[test]
fn what_is_locked_is_what_was_touched() {
    let counters: Vec<_> = (0..20_000).map(|_| PerCpuCounter::new(1).unwrap()).collect();
    counters.iter().for_each(|counter| counter.add(1));
    let lock = |which| {
        // SAFETY: has no preconditions.
        let locked = unsafe { libc::mlockall(which) } == 0;
        if !locked {
            eprintln!("skipped: this process may not lock its memory ({})", std::io::Error::last_os_error());
        }
        locked
    };
    let mut locked = true;
    let filled = grown(|| locked = lock(libc::MCL_CURRENT));
    assert!(filled < LITTLE, "{filled} bytes filled");
    // Before the reserved address space is used.
    if !locked || !lock(libc::MCL_CURRENT | libc::MCL_FUTURE) {
        return;
    }
    let linux = Linux::probe();
    let mut data = None;
    let opened = grown(|| data = PerCpuData::open(&linux, &Shape::usual(2), |_| 0, ()).ok());
    let Some(data) = data else {
        eprintln!("skipped: this process may not lock as much address space as an instance reserves");
        return;
    };
    let mut handles = Vec::new();
    let full = grown(|| {
        handles.extend((0..20_000).map(|_| data.allocate(&linux, Owner::NONE, 64, 8, Wait::Long).unwrap()));
    });
    assert!(opened + full < LITTLE, "{opened} and {full} bytes for 20 000 allocations");
    // SAFETY: no thread uses them any more.
    handles.into_iter().for_each(|handle| _ = unsafe { data.free(handle) }.unwrap());
    let before = resident();
    for _ in 0..100 {
        let tick = data.release_all(&linux, &|| false);
        if tick.failed > 0 && tick.released == 0 {
            eprintln!("skipped: the system does not take back what is locked");
            return;
        }
    }
    let gone = before.saturating_sub(resident());
    assert!(gone + (1 << 20) > 20_000 * 2 * 64, "what is locked goes back, too: {gone} of {full} bytes did");
}
