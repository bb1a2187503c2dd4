//! Tests of closing and opening the slots for a fork. `close_table` closes as much as possible, and
//! `open_table` opens exactly what it closed.
//!
//! The tests access the locks and the table, so that a test can hold an Atomic CPU's stack for any
//! time. The Atomic kind alone is tested on a virtual machine. Both kinds together need the real
//! system with restartable sequences and two CPUs.

use crate::cpu_caches::{CpuCaches, StackSnapshot};
use crate::instance::{CONFIG, Opened, machine};
use crate::region::{StackId, at, closed_region_cell};
use crate::size_class::Class;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::gate::Inside;
use neap_base::platform::Errno;
use neap_base::{Linux, Platform};
use neap_os::rseq::{SequenceTable, UNREGISTERED};
use neap_os::topology::CpuSet;
use neap_testing::shared::Shared;
use std::boxed::Box;
use std::vec::Vec;

/// Slots that the drop of the value unmaps.
struct Own<P: Platform>(P, CpuCaches, #[expect(dead_code, reason = "the cpu_caches are in it")] Box<SequenceTable>);

impl<P: Platform> Own<P> {
    fn open(platform: P) -> Own<P> {
        let table = Box::new(SequenceTable::unopened());
        // SAFETY: the table is for these slots alone, and both live in one value.
        let cpu_caches = unsafe { CpuCaches::open(&platform, true, &table) }.unwrap();
        Own(platform, cpu_caches, table)
    }

    /// Gives every CPU its region, as its first use would.
    fn begin_all(self) -> Own<P> {
        (0..self.1.cpus()).for_each(|cpu| Inside::assume(|inside| self.1.begin(inside, &self.0, cpu)));
        self
    }

    /// Closes the table, and tries a held lock `looks` times.
    fn close(&self, looks: u32) -> Result<(), Errno> {
        let mut looked = 0;
        let closed = self.1.close_table(&self.0, || {
            looked += 1;
            looked < looks
        });
        assert!(closed != Err(Errno::BUSY) || looked == looks, "looked {looked} times of {looks}");
        closed
    }

    /// Whether each CPU's lock is free.
    fn free(&self) -> Vec<bool> {
        (0..self.1.cpus()).map(|cpu| self.1.lock(cpu).try_lock().is_some()).collect()
    }

    /// The table's entry of every id, those of threads that are not registered included.
    fn regions(&self) -> Vec<usize> {
        (0..self.1.named + UNREGISTERED).map(|entry| self.1.entry(entry).load(Relaxed).addr()).collect()
    }
}

impl<P: Platform> Drop for Own<P> {
    fn drop(&mut self) {
        // SAFETY: the test is over, and no table but this value's points to the slots.
        unsafe { self.1.close(&self.0) };
    }
}

#[test]
fn close_with_a_held_atomic_stack_is_busy_and_unlocks_the_rest() {
    let o = Own::open(machine(4)).begin_all();
    for _ in 0..2 {
        let holder = o.1.lock(2).try_lock().unwrap();
        assert_eq!(o.close(3), Err(Errno::BUSY));
        assert_eq!(o.free(), [true, true, false, true], "what was taken before is given back");
        o.1.open_table(&o.0);
        assert_eq!(o.free(), [true, true, false, true], "opening takes nothing from the holder");
        drop(holder);
        assert_eq!(o.close(1), Ok(()));
        assert_eq!(o.free(), [false; 4], "no thread works on a stack now");
        o.1.open_table(&o.0);
        assert_eq!(o.free(), [true; 4]);
    }
}

#[test]
fn sequences_are_closed_though_an_atomic_stack_stays_held() {
    let isolated = CpuSet::parse(b"1-1023").unwrap();
    let o = Own::open(Shared::new(Linux::probe().with_isolated(&isolated))).begin_all();
    if !o.1.has_rseq() || o.1.cpus() < 2 || o.0.is_isolated(0) {
        return;
    }
    let (open, closed) = (o.regions(), std::vec![o.1.closed_region(); o.1.named + UNREGISTERED]);
    assert_eq!(open.iter().filter(|region| **region != o.1.closed_region()).count(), 1, "CPU 0 alone has sequences");
    let holder = o.1.lock(1).try_lock().unwrap();
    let fences = o.0.fences.load(Relaxed);
    assert_eq!((o.close(3), o.regions()), (Err(Errno::BUSY), closed.clone()));
    assert_eq!(o.0.fences.load(Relaxed) - fences, 1, "sequences that had begun before have ended");
    o.1.open_table(&o.0);
    assert_eq!((o.regions(), o.1.lock(1).try_lock().is_none()), (open.clone(), true));
    drop(holder);
    // A fence that fails leaves as much closed.
    for answer in [Ok(()), Err(Errno::PERM)] {
        o.0.failing_fences.store(answer.is_err().into(), Relaxed);
        assert_eq!((o.close(1), o.regions(), o.free()[1]), (answer, closed.clone(), false));
        o.1.open_table(&o.0);
        assert_eq!((o.regions(), o.free()[1]), (open.clone(), true));
    }
}

/// A pop that reads the cell below a stack takes its null for "no object".
#[test]
fn what_is_not_null_below_a_stack_is_found() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    Inside::assume(|inside| o.cpu_caches.begin(inside, &o.platform, 1));
    assert!(o.cpu_caches.drain_cpu(&o.platform, 1, |_| true, |_, _| unreachable!("nothing is in it")));
    // SAFETY: the test has one thread.
    let regions = [*o.cpu_caches.spare.lock(), unsafe { o.cpu_caches.lock(1).peek() }];
    let cells = regions.into_iter().flat_map(|region| StackId::all().map(move |id| (id, id.cells(region))));
    let closed = StackId::all().map(|id| (id, closed_region_cell(o.cpu_caches.closed_region())));
    for (id, cell) in cells.chain(closed) {
        o.prove();
        let below = at::<usize>(cell - size_of::<usize>());
        // SAFETY: each stack's cells have another cell below, which belongs to no other stack. The
        // test has one thread.
        unsafe { below.write(16) };
        assert_eq!(o.verify(0).expect_err("null below a stack").what, "null below a stack", "{id:?}");
        // SAFETY: each stack's cells have another cell below, which belongs to no other stack. The
        // test has one thread.
        unsafe { below.write(0) };
    }
}

/// If maintenance took a held stack for one without room, it would sleep while the holder fills the
/// stack.
#[test]
fn a_held_atomic_stack_counts_as_in_use() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    let looks = || Class::all().map(|class| o.cpu_caches.snapshot(&o.platform, 1, class)).collect::<Vec<_>>();
    let nothing = looks().iter().map(|_| StackSnapshot::default()).collect::<Vec<_>>();
    assert_eq!(looks(), nothing, "never used");
    Inside::assume(|inside| o.cpu_caches.begin(inside, &o.platform, 1));
    assert_eq!(looks(), nothing, "without room");
    let holder = o.cpu_caches.lock(1).try_lock().unwrap();
    assert!(looks().iter().all(|seen| seen.active && seen.count == 0));
    assert!(!o.cpu_caches.snapshot(&o.platform, 0, Class(1)).active, "of another CPU");
    drop(holder);
    assert!(looks().iter().all(|seen| !seen.active));
}

/// Resident bytes of the slots' mapping.
fn resident(cpu_caches: &CpuCaches) -> usize {
    let mapping = cpu_caches.mapping();
    crate::instance::resident(mapping.start, mapping.length)
}

/// CPUs that never ran a thread add no cost to opening, draining, forking and verifying.
#[test]
fn unused_cpus_have_no_memory_and_no_part_in_fork() {
    let resident_after = |cpus| {
        let o = Opened::new(machine(cpus), &CONFIG).unwrap();
        let opened = resident(&o.cpu_caches);
        let class = Class::of_size(64);
        let object = o.take(class).unwrap();
        assert_eq!(o.cpu_caches.used().iter().count(), 1);
        o.cpu_caches.close_table(&o.platform, || unreachable!("no lock is held")).unwrap();
        o.cpu_caches.open_table(&o.platform);
        o.give(class, object);
        (0..cpus).for_each(|cpu| assert!(o.drain_cpu(cpu, |_| true).is_some()));
        Class::all().for_each(|class| (0..cpus).for_each(|cpu| _ = o.cpu_caches.snapshot(&o.platform, cpu, class)));
        o.prove();
        (opened, resident(&o.cpu_caches))
    };
    let few = resident_after(2);
    assert_eq!(few.0, 4096, "the closed region");
    // Verification reads the lock of each CPU. Only the pages of the locks are resident in
    // addition.
    let locks = |cpus: usize| (cpus * size_of::<neap_base::CpuLock<usize>>()).div_ceil(4096) * 4096;
    let many = resident_after(1024);
    assert_eq!(many.0, 4096, "the closed region");
    assert!(many.1 <= few.1 + locks(1024), "{few:?} {many:?}");
}

/// A CPU that began while the table is closed would be open to sequences, or be unlocked without
/// having been locked.
#[test]
fn no_cpu_begins_while_the_table_is_closed() {
    let o = Own::open(machine(4));
    Inside::assume(|inside| o.1.begin(inside, &o.0, 0));
    assert_eq!(o.close(1), Ok(()));
    Inside::assume(|inside| o.1.begin(inside, &o.0, 1));
    assert_eq!((o.1.used().iter().collect::<Vec<_>>(), o.free()), (std::vec![0], std::vec![false, true, true, true]));
    o.1.open_table(&o.0);
    Inside::assume(|inside| o.1.begin(inside, &o.0, 1));
    assert_eq!((o.1.used().iter().collect::<Vec<_>>(), o.free()), (std::vec![0, 1], std::vec![true; 4]));
}

/// A lock that a thread outside the gate holds while its process forks stays held in the child.
#[test]
fn the_lock_of_an_unused_cpu_is_not_touched_outside_the_gate() {
    let o = Opened::new(machine(2), &CONFIG).unwrap();
    let class = Class::of_size(64);
    let holder = o.cpu_caches.lock(0).try_lock().unwrap();
    Inside::assume(|inside| o.cpu_caches.begin(inside, &o.platform, 0));
    assert_eq!(o.cpu_caches.pop_at_once(&o.platform, class), None);
    assert!(matches!(o.cpu_caches.pop(&o.platform, class), crate::cpu_caches::Attempt::Refused));
    drop(holder);
    assert_eq!(o.cpu_caches.used().iter().count(), 0, "the lock was held");
}
