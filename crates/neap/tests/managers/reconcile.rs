//! neap's counters and the kernel's view, in processes with memory known to the test.
//!
//! Goal: every resident byte has a source, neap's counters agree, and each difference has a name.
//! Method: managers of their own on the real system, each with allocations of which some pages are
//! touched. The kernel's view is compared with that to the page.

use crate::program::{Opened, linux};
use core::ptr::with_exposed_provenance_mut;
use neap::groups::Kind;
use neap::mm::Mm;
use neap::reconcile::{Held, Reconciliation, Source};
use neap_base::Platform;
use neap_groups::{GroupId, OnLimit};

const MIB: usize = 1 << 20;

/// Writes to every page.
fn touch(block: *mut u8, size: usize) {
    // SAFETY: the block is the caller's and has that many bytes.
    (0..size).step_by(4096).for_each(|at| unsafe { block.add(at).write(1) });
}

fn look<P: Platform>(mm: &Mm<P>) -> Reconciliation {
    let seen = mm.reconcile().unwrap();
    let all: u64 = Source::ALL.iter().map(|&source| seen.resident_of(source)).sum();
    // Other threads of the test program run while the pages are looked at one by one.
    assert!(all.abs_diff(seen.resident) < MIB as u64, "sources have {all} bytes\n{seen}");
    seen
}

fn agrees(seen: &Reconciliation, source: Source, bytes: usize) {
    let both = (seen.resident_of(source), seen.believed_of(source));
    assert_eq!(both, (bytes as u64, Some(bytes as u64)), "{source:?}\n{seen}");
}

#[test]
fn reconciliation_counts_touched_pages_and_names_drift() {
    for rseq in [true, false] {
        let (linux, options) = linux(rseq);
        let mm = Opened::new(linux, &options).unwrap();
        let page = mm.page_size();
        let run = mm.allocate(20 * MIB);
        touch(run, 12 * MIB);
        let seen = look(&mm);
        assert_eq!(seen.resident_of(Source::Runs), 12 * MIB as u64, "{seen}");
        assert_eq!(seen.believed_of(Source::Runs), Some(20 * MIB as u64), "{seen}");
        assert!(seen.explained() as f64 > 0.99 * seen.resident as f64, "{seen}");
        // A second run, freed: its pages are kept, and then released.
        let second = mm.allocate(8 * MIB);
        touch(second, 8 * MIB);
        // SAFETY: allocated above.
        unsafe { mm.free(second) };
        agrees(&look(&mm), Source::FreeBacked, 8 * MIB);
        mm.release_all();
        let seen = look(&mm);
        agrees(&seen, Source::FreeBacked, 0);
        agrees(&seen, Source::Free, 0);
        // Free memory, which a wild write makes resident.
        for wild in 0..5 {
            // SAFETY: free pages of the arena, which stay mapped; no code relies on their contents.
            unsafe { second.add(wild * page).write(1) };
        }
        let seen = look(&mm);
        assert_eq!(seen.unexplained_of(Source::Free), 5 * page as u64, "{seen}");
        assert!(seen.explained() + 5 * page as u64 <= seen.resident, "{seen}");
        assert!(seen.to_string().lines().any(|line| line.starts_with(Source::Free.name())), "{seen}");
        // SAFETY: allocated above.
        unsafe { mm.free(run) };
    }
}

#[test]
fn slabs_hold_what_the_program_has_and_what_is_cached() {
    let (linux, options) = linux(true);
    let mm = Opened::new(linux, &options).unwrap();
    let objects: Vec<*mut u8> = (0..8192).map(|_| mm.allocate(512)).collect();
    objects.iter().for_each(|&object| touch(object, 512));
    let seen = look(&mm);
    assert_eq!(seen.held(Held::InUse), 8192 * 512, "{seen}");
    let all: u64 = Held::ALL.iter().filter(|held| **held != Held::Holes).map(|&held| seen.held(held)).sum();
    assert_eq!(seen.believed_of(Source::Slabs), Some(all - seen.held(Held::Holes)), "{seen}");
    assert_eq!(seen.unexplained_of(Source::Slabs), 0, "{seen}");
    // SAFETY: allocated above, once each.
    objects.iter().skip(4096).for_each(|&object| unsafe { mm.free(object) });
    let seen = look(&mm);
    let cached = [Held::InStacks, Held::InBarns, Held::InSlabs].map(|held| seen.held(held)).iter().sum::<u64>();
    assert!(seen.held(Held::InUse) == 4096 * 512 && cached >= 4096 * 512, "{seen}");
    // SAFETY: allocated above, and freed here once each.
    objects.iter().take(4096).for_each(|&object| unsafe { mm.free(object) });
    mm.release_all();
    let seen = look(&mm);
    assert_eq!([Source::Slabs, Source::Runs, Source::Listed].map(|source| seen.resident_of(source)), [0; 3], "{seen}");
}

/// The snapshot in one call agrees with the kernel, for a heap of which all is touched.
#[test]
fn resident_memory_of_the_snapshot_is_that_of_the_kernel() {
    let (linux, options) = linux(true);
    let mm = Opened::new(linux, &options).unwrap();
    let run = mm.allocate(32 * MIB);
    touch(run, 32 * MIB);
    let objects: Vec<*mut u8> = (0..65_536).map(|_| mm.allocate(512)).collect();
    objects.iter().for_each(|&object| touch(object, 512));
    let agrees = || {
        let (seen, now) = (look(&mm), mm.stats());
        let heap = [Source::Slabs, Source::Runs, Source::Blocks, Source::Listed, Source::FreeBacked, Source::Free];
        let tables = [Source::Travelling, Source::PageTables, Source::States, Source::SlabTables];
        let resident: u64 = heap.iter().chain(&tables).map(|&source| seen.resident_of(source)).sum();
        assert!(now.resident.abs_diff(resident) < MIB as u64, "{resident} and {now:?}\n{seen}");
        now
    };
    let full = agrees();
    assert!(full.allocated >= 64 * MIB as u64 && full.allocated < 66 * MIB as u64, "{full:?}");
    // SAFETY: allocated above, once each.
    unsafe {
        mm.free(run);
        objects.into_iter().for_each(|object| mm.free(object));
    }
    let freed = agrees();
    assert!(freed.allocated < MIB as u64, "{freed:?}");
    mm.release_all();
    assert!(agrees().resident < 2 * MIB as u64);
}

#[test]
fn pages_that_were_only_read_are_no_memory() {
    let (linux, options) = linux(true);
    let mm = Opened::new(linux, &options).unwrap();
    // Shorter than runs with huge pages, where the system gives them to all memory.
    let run = mm.allocate(3 * MIB);
    touch(run, MIB);
    // SAFETY: the run is this test's; fresh memory is zeroes.
    let read: u64 = (MIB..3 * MIB).step_by(4096).map(|at| u64::from(unsafe { run.add(at).read_volatile() })).sum();
    let seen = look(&mm);
    assert_eq!((read, seen.only_read, seen.resident_of(Source::Runs)), (0, 2 * MIB as u64, MIB as u64), "{seen}");
    // SAFETY: allocated above.
    unsafe { mm.free(run) };
}

#[test]
fn what_is_charged_is_what_is_there() {
    let (linux, options) = linux(true);
    let mm = Opened::new(linux, &options).unwrap();
    let groups = mm.groups().unwrap();
    let group = groups.create(GroupId::ROOT, "tenant").unwrap();
    let before = mm.enter(Some(group));
    let kept: Vec<*mut u8> = [100; 500].into_iter().chain([MIB; 3]).map(|size| mm.allocate(size)).collect();
    mm.leave(before);
    let seen = look(&mm);
    for (kind, bytes) in [(Kind::Objects, 500 * 112), (Kind::Pages, 3 * MIB as u64)] {
        assert_eq!((seen.charged(kind), seen.payable(kind)), (bytes, Some(bytes)), "{kind:?}\n{seen}");
    }
    assert_eq!(seen.held(Held::InUse), 500 * 112, "what stacks and barns have is not in use\n{seen}");
    // A charge for an object that does not exist shows.
    let payer = group.payer(Kind::Objects, 0);
    groups.charge(payer, 1000, OnLimit::Refuse).unwrap();
    let seen = look(&mm);
    assert_eq!(seen.charged(Kind::Objects) - seen.payable(Kind::Objects).unwrap(), 1000, "{seen}");
    groups.uncharge(payer, 1000);
    // SAFETY: allocated above, once each.
    kept.into_iter().for_each(|memory| unsafe { mm.free(memory) });
    // Cached objects are still charged.
    mm.release_all();
    assert_eq!(look(&mm).charged(Kind::Objects), 0);
    mm.verify(0).unwrap();
}

#[test]
fn memory_that_is_not_neaps_is_put_to_what_it_is_of() {
    let (linux, options) = linux(true);
    let mm = Opened::new(linux, &options).unwrap();
    let map = |flags| {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let (length, flags) = (16 * MIB + 2 * 4096, libc::MAP_ANONYMOUS | flags);
        // SAFETY: a new mapping at a place of the kernel's choice. A page without access above and
        // a read-only page below keep it from merging with other mappings, and from looking like a
        // stack.
        let memory = unsafe {
            let base = libc::mmap(core::ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(base.wrapping_byte_add(4096), 16 * MIB, rights), 0);
            assert_eq!(libc::mprotect(base, 4096, libc::PROT_READ), 0);
            base.wrapping_byte_add(4096)
        };
        touch(memory.cast(), 16 * MIB);
        memory
    };
    let (private, shared) = (map(libc::MAP_PRIVATE), map(libc::MAP_SHARED));
    let thread = std::thread::Builder::new().stack_size(32 * MIB).spawn(|| {
        let deep = core::hint::black_box([1_u8; 16 * MIB]);
        std::thread::park();
        deep[5]
    });
    let thread = thread.unwrap();
    let seen = loop {
        let seen = look(&mm);
        if seen.resident_of(Source::ThreadStacks) >= 16 * MIB as u64 {
            break seen;
        }
        std::thread::yield_now();
    };
    // Not the growth: other tests may free memory meanwhile.
    assert!(seen.resident_of(Source::Anonymous) >= 16 * MIB as u64, "{seen}");
    assert!(seen.resident_of(Source::Shared) >= 16 * MIB as u64, "{seen}");
    assert!(seen.resident_of(Source::Program) > 100_000 && seen.resident_of(Source::Stack) > 4096, "{seen}");
    assert!(seen.explained() as f64 > 0.99 * seen.resident as f64, "{seen}");
    thread.thread().unpark();
    assert_eq!(thread.join().unwrap(), 1);
    for memory in [private, shared] {
        // SAFETY: mapped above, and not used any more.
        unsafe { libc::munmap(with_exposed_provenance_mut(memory.expose_provenance()), 16 * MIB) };
    }
}
