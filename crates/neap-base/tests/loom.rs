//! Every interleaving of the mutex, the CPU lock and the gate, by loom. Empty unless built with `--cfg loom`
//! (`cargo xtask loom`).
#![cfg(loom)]

use loom::sync::Arc;
use loom::thread;
use neap_base::gate::Gate;
use neap_base::{CpuLock, Mutex};

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

/// What a CPU's list holds, and what the zone behind it has.
type Places = (CpuLock<usize>, Mutex<usize>);

/// Empties the list into the zone, if nobody holds it: a drain.
fn drain((list, zone): &Places) {
    let Some(mut held) = list.lock_bounded(2) else { return };
    let pages = std::mem::take(&mut *held);
    drop(held);
    *zone.lock() += pages;
}

/// Puts a page into the list, or past it into the zone: an owner.
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
            // It ends with something in the list, and nobody ever runs on that CPU again.
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
        // Fork: what is copied between these does not change.
        if let Some(guard) = places.0.lock_bounded(2) {
            let copied = *guard;
            std::mem::forget(guard);
            thread::yield_now();
            // SAFETY: taken and forgotten above; held, so the value is not being changed.
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
fn nobody_is_inside_a_closed_gate() {
    loom::model(|| {
        let (gate, value) = (Arc::new(Gate::new()), Arc::new(loom::cell::UnsafeCell::new(0)));
        let thread = {
            let (gate, value) = (gate.clone(), value.clone());
            thread::spawn(move || {
                let _inside = gate.enter(0);
                // SAFETY: who is inside has the cell alone; loom checks that.
                value.with_mut(|value| unsafe { *value += 1 });
            })
        };
        // loom reports it if the two accesses to the cell are not ordered.
        if gate.close(2, thread::yield_now) {
            // SAFETY: nobody is inside, so the closer has the cell alone; loom checks that.
            value.with_mut(|value| unsafe { *value += 1 });
        }
        gate.open();
        thread.join().unwrap();
    });
}
