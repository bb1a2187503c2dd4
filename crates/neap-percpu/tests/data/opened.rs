//! Address space of an instance that is not needed yet cannot be accessed, so nothing can fill it.
//!
//! Method: the kernel's list of mappings shows the writable part, its count of page faults the
//! accesses without memory. The virtual machine refuses steps.

use crate::machine::{end, open, shape, take, verify};
use neap_base::Linux;
use neap_base::platform::memory::Range;
use neap_percpu::{Layout, Owner, PerCpuData, Refused, Shape, Wait};
use neap_testing::virtual_platform::{Call, Virtual};

/// Writable bytes of an instance, and the number of their runs.
fn writable(data: &PerCpuData) -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let (mut bytes, mut runs) = (0, 0);
    for line in maps.lines() {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
        for Range { start: address, length } in data.mappings() {
            let here = end.min(address + length).saturating_sub(start.max(address));
            if rest.starts_with("rw") && here > 0 {
                (bytes, runs) = (bytes + here, runs + 1);
            }
        }
    }
    (bytes, runs)
}

#[test]
fn what_may_be_touched_follows_what_is_needed() {
    let linux = Linux::probe();
    let data = PerCpuData::open(&linux, &Shape::usual(2), |_| 0, ()).unwrap();
    let reserved: usize = data.mappings().iter().map(|mapping| mapping.length).sum();
    let (first, _) = writable(&data);
    assert!(reserved > 2 << 30 && first < 2 << 20, "{first} of {reserved} bytes before the first allocation");
    let held: Vec<_> = (0..30_000)
        .map(|stamp| {
            let owner = data.open_owner(&linux).unwrap();
            take(&data, &linux, owner, (8, 8), Wait::Long, stamp).unwrap()
        })
        .collect();
    let (bytes, runs) = writable(&data);
    let populated = data.populated_bytes().used as usize;
    assert!(populated > 3 << 20 && bytes < 3 * populated, "{bytes} bytes for {populated} in use");
    assert!(runs <= 6, "the kernel has {runs} mappings of it");
    end(&data, &linux, held);
}

#[test]
fn a_step_that_is_refused_is_taken_later() {
    let machine = Virtual::new(4096, 2);
    let data = open(&machine, &shape(Layout::Rows, 2, 4096));
    machine.fail(Call::Open, 0, 2);
    for _ in 0..2 {
        let answer = data.allocate(&machine, Owner::NONE, 8, 8, Wait::Long);
        assert!(matches!(answer, Err(Refused::Memory(_))), "{answer:?}");
        data.verify().unwrap();
    }
    let mut held = vec![take(&data, &machine, Owner::NONE, (8, 8), Wait::Long, 1).unwrap()];
    let opened = machine.made(Call::Open);
    // The first step of owners is opened from the start.
    let mut owners = Vec::new();
    while machine.made(Call::Open) == opened {
        owners.push(data.open_owner(&machine).unwrap());
    }
    machine.fail(Call::Open, 0, 1);
    let refused = loop {
        match data.open_owner(&machine) {
            Ok(owner) => owners.push(owner),
            Err(refused) => break refused,
        }
    };
    assert!(matches!(refused, Refused::Memory(_)), "{refused:?}");
    owners.push(data.open_owner(&machine).unwrap());
    assert!(owners.len() > 1 << 14);
    let last = owners[owners.len() - 1];
    held.push(take(&data, &machine, last, (8, 8), Wait::Long, 2).unwrap());
    data.verify().unwrap();
    end(&data, &machine, held);
}

/// Page faults of this thread so far.
fn faults() -> i64 {
    let mut usage = core::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills the structure, for which zeroes are valid, too.
    unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init().ru_minflt
    }
}

/// The bug: a page fault may wait for memory under the lock that every free needs.
#[test]
fn no_wait_allocation_does_not_fault_in_table_pages() {
    // Many sizes need many chunks; sizes of one cache line need many rows for each chunk.
    for (most, pages) in [(32, 40), (1, 400)] {
        let linux = Linux::probe();
        let data = open(&linux, &shape(Layout::Rows, 2, 0));
        let size = |stamp: u64| 8 + (stamp % most) as usize * 64;
        // The worker fills the reserve before the first allocation. Offsets of a class are written
        // at its first use.
        data.tick(&linux);
        let reserve = |stamp| data.allocate(&linux, data.open_owner(&linux).unwrap(), size(stamp), 8, Wait::Long);
        (0..most).for_each(|stamp| _ = reserve(stamp).unwrap());
        let (mut granted, mut faulted, mut refused) = (0, 0, 0);
        // Enough rows to fill `pages` pages of 4 KiB of their table.
        while granted < pages * 4096 / 36 {
            let owner = data.open_owner(&linux).unwrap();
            let before = faults();
            let answer = data.allocate(&linux, owner, size(granted), 8, Wait::Never);
            faulted += faults() - before;
            granted += u64::from(answer.is_ok());
            refused += u64::from(answer.is_err());
            if answer.is_err() {
                data.tick(&linux);
            }
        }
        assert!(refused < granted, "{refused} refused");
        // The kernel may fault some pages for its own reasons.
        assert!(faulted < 10, "{faulted} page faults in {granted} allocations of up to {} bytes", size(most - 1));
        verify(&data);
        // SAFETY: no code uses it any more.
        unsafe { data.close(&linux) };
    }
}
