//! Explores the mutex, the CPU lock, the gate, and RCU without sequences in every interleaving, by
//! loom. Empty unless built with `--cfg loom` (`cargo xtask loom`).
#![cfg(loom)]

mod deferral;

use deferral::Deferral;
use loom::sync::Arc;
use loom::thread;
use neap_base::gate::{Gate, Inside};
use neap_base::sync::Ordering;
use neap_base::{CpuLock, Mutex};
use neap_testing::virtual_platform::Virtual;

#[test]
fn the_mutex_excludes_and_loses_nothing() {
    loom::model(|| {
        let mutex = Arc::new(Mutex::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let mutex = mutex.clone();
                thread::spawn(move || *mutex.lock() += 1)
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*mutex.lock(), 2);
    });
}

#[test]
fn the_cpu_lock_excludes_and_hands_the_value_on() {
    loom::model(|| {
        let lock = Arc::new(CpuLock::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let lock = lock.clone();
                thread::spawn(move || lock.try_lock().map(|mut value| *value += 1).is_some())
            })
            .collect();
        let taken = threads.into_iter().map(|thread| thread.join().unwrap()).filter(|got| *got).count();
        assert!(taken >= 1);
        assert_eq!(*lock.try_lock().unwrap(), taken);
    });
}

/// Pages in a CPU's list, and in the zone behind it.
type Places = (CpuLock<usize>, Mutex<usize>);

/// Plays a drain: empties the list into the zone, unless the list stays locked.
fn drain((list, zone): &Places) {
    let Some(mut held) = list.lock_bounded(2) else { return };
    let pages = std::mem::take(&mut *held);
    drop(held);
    *zone.lock() += pages;
}

/// Plays an owner: puts a page into the list, or into the zone if the list is locked.
fn put((list, zone): &Places) {
    match list.try_lock() {
        Some(mut held) => *held += 1,
        None => *zone.lock() += 1,
    }
}

#[test]
fn an_owner_a_drain_and_an_exit_lose_nothing() {
    loom::model(|| {
        let places: Arc<Places> = Arc::new((CpuLock::new(0), Mutex::new(0)));
        let owner = {
            let places = places.clone();
            // It ends with pages in the list, and no thread runs on that CPU again.
            thread::spawn(move || (0..2).for_each(|_| put(&places)))
        };
        let drainer = {
            let places = places.clone();
            thread::spawn(move || drain(&places))
        };
        drain(&places);
        owner.join().unwrap();
        drainer.join().unwrap();
        drain(&places);
        assert_eq!((*places.0.try_lock().unwrap(), *places.1.lock()), (0, 2));
    });
}

#[test]
fn a_forgotten_guard_excludes_until_the_unlock() {
    loom::model(|| {
        let places: Arc<Places> = Arc::new((CpuLock::new(0), Mutex::new(0)));
        let owner = {
            let places = places.clone();
            thread::spawn(move || put(&places))
        };
        // Plays fork: the value does not change between these steps.
        if let Some(guard) = places.0.lock_bounded(2) {
            let copied = *guard;
            std::mem::forget(guard);
            thread::yield_now();
            // SAFETY: this thread took the lock above and forgot the guard, so no other thread
            // changes the value.
            unsafe {
                assert_eq!(places.0.peek(), copied);
                places.0.unlock();
            }
        }
        owner.join().unwrap();
        assert_eq!(*places.0.try_lock().unwrap() + *places.1.lock(), 1);
    });
}

#[test]
fn closed_gate_excludes_threads() {
    loom::model(|| {
        let (gate, value) = (Arc::new(Gate::new()), Arc::new(loom::cell::UnsafeCell::new(0)));
        let thread = {
            let (gate, value) = (gate.clone(), value.clone());
            thread::spawn(move || {
                let _inside = gate.enter(0);
                // SAFETY: the closer waits until this thread has left, so this is the only access.
                // loom checks that.
                value.with_mut(|value| unsafe { *value += 1 });
            })
        };
        // loom reports an error if the two accesses to the cell are not ordered.
        if gate.close(|| {
            thread::yield_now();
            true
        }) {
            // SAFETY: no thread is inside, so this is the only access. loom checks that.
            value.with_mut(|value| unsafe { *value += 1 });
        }
        gate.open();
        thread.join().unwrap();
    });
}

/// Freed objects: a bit for each object's number.
type Freed = loom::sync::atomic::AtomicUsize;

struct Object {
    number: loom::cell::UnsafeCell<usize>,
}

fn object(number: usize) -> *mut Object {
    Box::into_raw(Box::new(Object { number: loom::cell::UnsafeCell::new(number) }))
}

/// Frees an object and returns its number.
///
/// # Safety
/// [`object`] made it, and no thread uses it any more.
unsafe fn bury(object: *mut Object) -> usize {
    // SAFETY: the caller promises that `object` made the box, and that no thread uses it any more.
    let object = unsafe { Box::from_raw(object) };
    // SAFETY: the box is this function's own, so this is the only access. loom checks that.
    object.number.with_mut(|number| unsafe { std::mem::replace(&mut *number, usize::MAX) })
}

/// A deferred object.
struct Retired(*mut Object);

// SAFETY: a deferred object belongs to the thread that takes it out of the list. loom checks that.
unsafe impl Send for Retired {}

/// A domain, and a cell that points to an object, at first to number 0.
struct World {
    deferral: Deferral<Retired>,
    cell: loom::sync::atomic::AtomicPtr<Object>,
    freed: Freed,
    machine: Virtual,
}

impl World {
    fn read(&self) {
        let _reading = self.deferral.rcu.enter();
        // Acquire pairs with the AcqRel in `replace`.
        let object = self.cell.load(Ordering::Acquire);
        thread::yield_now();
        // SAFETY: the object is not freed before the read section ends; loom checks that.
        unsafe { (*object).number.with(|number| assert_ne!(*number, usize::MAX)) };
    }

    /// Puts an object with this number into the cell, and defers the previous one.
    fn replace(&self, number: usize) {
        // AcqRel pairs with itself and with the Acquire in `read`.
        self.defer(self.cell.swap(object(number), Ordering::AcqRel));
    }

    fn defer(&self, object: *mut Object) {
        self.deferral.defer(Retired(object));
    }

    fn advance(&self) -> bool {
        self.deferral.advance(&self.machine, |object| self.free(object)).unwrap()
    }

    fn free(&self, Retired(object): Retired) {
        // SAFETY: every deferred object is from `object`, and no reader is left.
        let number = unsafe { bury(object) };
        self.freed.fetch_add(1 << number, Ordering::Relaxed);
    }

    fn freed(&self) -> usize {
        self.freed.load(Ordering::Relaxed)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // SAFETY: `drop` has the only reference to the world, so no other thread uses the object.
        unsafe { bury(self.cell.load(Ordering::Relaxed)) };
    }
}

/// Runs two threads on a domain, without a bound on preemptions: some errors need four.
fn two(one: fn(&World), other: fn(&World), at_the_end: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = None;
    model.check(move || {
        let cell = loom::sync::atomic::AtomicPtr::new(object(0));
        let world =
            Arc::new(World { deferral: Deferral::new(), cell, freed: Freed::new(0), machine: Virtual::new(4096, 1) });
        let thread = {
            let world = world.clone();
            thread::spawn(move || other(&world))
        };
        one(&world);
        thread.join().unwrap();
        while world.advance() {}
        assert_eq!(world.freed(), at_the_end);
    });
}

#[test]
fn nothing_is_freed_under_a_reader() {
    fn writer(world: &World) {
        thread::yield_now();
        world.replace(1);
        world.advance();
        thread::yield_now();
        world.advance();
    }
    two(writer, World::read, 0b1);
}

/// The reader may read the phase before the first period and enter during the second. It may enter
/// and leave while counts are summed.
#[test]
fn a_reader_of_any_phase_is_waited_for() {
    fn writer(world: &World) {
        let own = world.deferral.rcu.enter();
        world.replace(1);
        world.advance();
        assert_eq!(world.freed(), 0);
        drop(own);
        world.advance();
        world.replace(2);
        world.advance();
    }
    two(writer, World::read, 0b11);
}

#[test]
fn of_what_two_threads_defer_and_free_nothing_is_lost() {
    fn one(world: &World) {
        world.replace(1);
        world.advance();
    }
    fn other(world: &World) {
        world.defer(object(3));
        world.advance();
    }
    two(one, other, 0b1001);
}

/// The other thread makes steps at the same time, but frees nothing.
#[test]
fn after_a_grace_period_what_was_deferred_before_is_freed() {
    fn one(world: &World) {
        world.replace(1);
        world.deferral.wait(&world.machine, |object| world.free(object)).unwrap();
        assert_eq!(world.freed() & 1, 1);
    }
    fn other(world: &World) {
        world.defer(object(3));
        let mark = world.deferral.rcu.mark();
        _ = Inside::assume(|inside| world.deferral.rcu.advance_past(inside, &world.machine, mark));
    }
    two(one, other, 0b1001);
}
