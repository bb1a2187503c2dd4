//! A thread that is stopped with pages in its hands, near the limit: other threads wait for them,
//! and their allocations do not fail.
//!
//! Method: a virtual machine on which one thread is stopped at each of its questions for the CPU in
//! turn, until another waits for it or is done.

use crate::program::{OPTIONS, Opened};
use core::cell::Cell;
use core::ops::Deref;
use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use core::time::Duration;
use neap::drain::Scope;
use neap::options::Options;
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_base::platform::memory::{HugePages, Range};
use neap_testing::virtual_platform::Virtual;
use std::sync::Arc;

const LIMIT: usize = 1 << 20;
const SIZE: usize = 4096;
/// Objects that can be allocated besides those in use.
const ROOM: usize = 64;

thread_local! {
    /// Questions for the CPU until this thread is stopped.
    static QUESTIONS: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// A virtual machine, and the thread that is stopped on it.
struct Stops {
    machine: Virtual,
    is_stopped: AtomicBool,
    goes_on: AtomicBool,
}

/// A shared handle of the machine.
#[derive(Clone)]
struct Machine(Arc<Stops>);

impl Deref for Machine {
    type Target = Stops;

    fn deref(&self) -> &Stops {
        &self.0
    }
}

impl Stops {
    fn go_on(&self) {
        self.goes_on.store(true, SeqCst);
        std::thread::yield_now();
    }
}

impl Platform for Machine {
    neap_testing::hand_on!(machine);

    fn map_at(&self, address: usize, length: usize) -> Result<(), Errno> {
        self.machine.map_at(address, length)
    }

    unsafe fn release(&self, address: usize, length: usize) -> Result<(), Errno> {
        // SAFETY: the range fulfils the conditions of `Platform::release` (the caller's promise).
        unsafe { self.machine.release(address, length) }
    }

    unsafe fn release_scattered(&self, ranges: &[Range]) -> Result<usize, Errno> {
        // SAFETY: the ranges fulfil the conditions of `Platform::release_scattered` (the caller's
        // promise).
        unsafe { self.machine.release_scattered(ranges) }
    }

    fn populate(&self, address: usize, length: usize) -> Result<(), Errno> {
        self.machine.populate(address, length)
    }

    fn huge_pages(&self, address: usize, length: usize, huge: HugePages) -> Result<(), Errno> {
        self.machine.huge_pages(address, length, huge)
    }

    fn cpus(&self) -> usize {
        self.machine.cpus()
    }

    fn cpu(&self) -> usize {
        let left = QUESTIONS.get();
        QUESTIONS.set(left.wrapping_sub(1));
        if left == 0 {
            self.is_stopped.store(true, SeqCst);
            while !self.goes_on.load(SeqCst) {
                std::thread::yield_now();
            }
        }
        self.machine.cpu()
    }

    fn fence(&self, cpu: usize) -> Result<(), Errno> {
        self.machine.fence(cpu)
    }

    fn fence_all(&self) -> Result<(), Errno> {
        self.machine.fence_all()
    }

    fn pause(&self) {
        self.go_on();
        self.machine.pause();
    }

    fn sleep(&self, nanoseconds: u64) {
        self.go_on();
        self.machine.sleep(nanoseconds);
        // The stopped thread needs time to go on.
        std::thread::sleep(Duration::from_nanos(nanoseconds));
    }
}

/// One thread allocates an object, and is stopped after `questions` questions; then another
/// allocates as many as there are. Returns whether the first was stopped, and how many objects both
/// have.
fn stop_after(questions: usize) -> (bool, usize) {
    let machine = Virtual::new(4096, 2);
    let machine =
        Machine(Arc::new(Stops { machine, is_stopped: AtomicBool::new(false), goes_on: AtomicBool::new(false) }));
    let mm = Opened::new(machine.clone(), &Options { limit: LIMIT as u64, ..OPTIONS }).unwrap();
    let allocate = || Some(mm.allocate(SIZE).expose_provenance()).filter(|&object| object != 0);
    // SAFETY: freed memory came from `allocate`, and no thread uses it.
    let free = |object: usize| unsafe { mm.free(core::ptr::with_exposed_provenance_mut(object)) };
    let mut held: Vec<usize> = core::iter::from_fn(&allocate).collect();
    held.sort_unstable();
    held.drain(..ROOM).for_each(free);
    assert_eq!(mm.drain(&Scope::ALL).map(|drained| drained.skipped), Ok(0));
    machine.goes_on.store(false, SeqCst);
    let got = std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            Virtual::run_on(1);
            QUESTIONS.set(questions);
            allocate()
        });
        while !machine.is_stopped.load(SeqCst) && !first.is_finished() {
            std::thread::yield_now();
        }
        let mut got: Vec<usize> = core::iter::from_fn(&allocate).collect();
        machine.go_on();
        got.extend(first.join().unwrap());
        got
    });
    let count = got.len();
    held.into_iter().chain(got).for_each(free);
    mm.verify(0).unwrap();
    (machine.is_stopped.load(SeqCst), count)
}

#[test]
fn allocation_at_limit_waits_for_pages_held_by_stopped_thread() {
    for questions in 0.. {
        let (was_stopped, count) = stop_after(questions);
        assert_eq!(count, ROOM, "stopped after {questions} questions");
        if !was_stopped {
            assert!(questions > 3, "it was never stopped with anything in its hands");
            break;
        }
    }
}
