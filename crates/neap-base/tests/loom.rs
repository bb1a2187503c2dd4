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
