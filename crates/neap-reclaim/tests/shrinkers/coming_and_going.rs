//! Waiting, fences that fail, forks, and a lack of memory.

use crate::ROOT;
use crate::host::{Cache, Made, On, Stage, with};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::Relaxed};
use neap_base::gate::Inside;
use neap_base::{Linux, Platform};
use neap_groups::GroupId;
use neap_percpu::Host as _;
use neap_reclaim::{MOST_SHRINKERS, STOP, ScanPressure, ShrinkerError, ShrinkerId, Shrinkers, Spec, Unregistered};
use neap_testing::child::{exit_code_of, status_of};
use neap_testing::virtual_platform::{Call, Virtual};
use std::sync::{Barrier, mpsc};
use std::thread;

fn register<P: Platform>(
    shrinkers: &Shrinkers,
    host: &On<'_, P>,
    spec: &Spec<'_>,
) -> Result<ShrinkerId, ShrinkerError> {
    // SAFETY: shrinkers of tests outlive their visits.
    unsafe { shrinkers.register(host, spec) }
}

#[test]
fn to_synchronize_is_to_wait_for_all_that_run() {
    with(&Stage::on(Linux::probe()), |host, shrinkers| {
        assert_eq!(shrinkers.synchronize(host), Ok(()));
        let (inside, (go_on, wait)) = (Barrier::new(2), mpsc::channel::<()>());
        let (wait, done) = (std::sync::Mutex::new(wait), AtomicBool::new(false));
        let made = Made::of(
            |_| {
                inside.wait();
                wait.lock().unwrap().recv().unwrap();
                done.store(true, Relaxed);
                0
            },
            |_| STOP,
        );
        register(shrinkers, host, &made.spec()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| shrinkers.visit(host, &(), ROOT, 0, 0, ScanPressure::of(0)));
            inside.wait();
            let waiting = scope.spawn(|| {
                let answer = shrinkers.synchronize(host);
                (answer, done.load(Relaxed))
            });
            go_on.send(()).unwrap();
            assert_eq!(waiting.join().unwrap(), (Ok(()), true));
        });
    });
}

/// By the machine's own time, which only the callback lets pass.
#[test]
fn unregister_waits_for_its_own_callback_and_no_longer() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let (inside, machine) = (Barrier::new(2), &host.0.platform);
        let ended = AtomicUsize::new(0);
        let made = Made::of(
            |_| {
                inside.wait();
                while shrinkers.is_there(ShrinkerId::from_bits(1 << 32)) {
                    thread::yield_now();
                }
                machine.advance(5_000_000);
                ended.store(machine.now() as usize, Relaxed);
                0
            },
            |_| STOP,
        );
        let id = register(shrinkers, host, &made.spec()).unwrap();
        assert_eq!(id.to_bits(), 1 << 32, "the first one of all");
        thread::scope(|scope| {
            scope.spawn(|| shrinkers.visit(host, &(), ROOT, 0, 0, ScanPressure::of(0)));
            inside.wait();
            assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
            assert_eq!(machine.now() as usize, ended.load(Relaxed));
        });
    });
}

#[test]
fn without_a_fence_nothing_ends() {
    let machine = Virtual::new(4096, Linux::probe().cpus()).with_sequences();
    if machine.rseq_offset().is_none() {
        return; // References are exact then.
    }
    with(&Stage::on(machine), |host, shrinkers| {
        let cache = Cache::of(10);
        let id = register(shrinkers, host, &cache.spec()).unwrap();
        host.0.platform.fail(Call::Fence, 0, 2);
        for _ in 0..2 {
            assert!(matches!(shrinkers.unregister(host, id), Err(ShrinkerError::Fence(_))));
            assert_eq!(shrinkers.visit(host, &(), ROOT, 0, 0, ScanPressure::of(12)).calls, 1);
        }
        assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
    });
}

fn forks<P: Platform>(stage: &Stage<P>) {
    with(stage, |host, shrinkers| {
        let (inside, go_on) = (Barrier::new(2), Barrier::new(2));
        let blocked = Made::of(
            |_| {
                inside.wait();
                go_on.wait();
                0
            },
            |_| STOP,
        );
        let blocked_id = register(shrinkers, host, &blocked.spec()).unwrap();
        let own = AtomicUsize::new(0);
        // In the child no other thread is in a callback. This thread is in one, which ends there as
        // well.
        let forking = Made::of(
            |_| {
                let id = ShrinkerId::from_bits(own.load(Relaxed) as u64);
                let code = exit_code_of(|| {
                    let _ = host.0.platform.rseq_offset().map(|_| neap_os::fence::register());
                    // SAFETY: this is the only thread of the child.
                    unsafe { shrinkers.forget_others(host) };
                    assert_eq!(shrinkers.unregister(host, blocked_id), Ok(Unregistered::Gone));
                    assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Later));
                    assert!(!shrinkers.is_there(id));
                    7
                });
                u64::from(code == 7)
            },
            |_| STOP,
        );
        let id = register(shrinkers, host, &forking.spec()).unwrap();
        own.store(id.to_bits() as usize, Relaxed);
        thread::scope(|scope| {
            scope.spawn(|| shrinkers.count(host, &(), blocked_id, ROOT, 0));
            inside.wait();
            assert_eq!(shrinkers.count(host, &(), id, ROOT, 0), Some(1), "what the child found");
            go_on.wait();
        });
        // A fork outside of callbacks: everything can be ended in the child, and in the parent.
        let code = exit_code_of(|| {
            let _ = host.0.platform.rseq_offset().map(|_| neap_os::fence::register());
            // SAFETY: this is the only thread of the child.
            unsafe { shrinkers.forget_others(host) };
            let ids = [blocked_id, id];
            i32::from(ids.map(|id| shrinkers.unregister(host, id)) == [Ok(Unregistered::Gone); 2])
        });
        assert_eq!(code, 1);
        assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
        assert_eq!(shrinkers.unregister(host, blocked_id), Ok(Unregistered::Gone));
    });
}

#[test]
fn after_a_fork_none_counts_as_running() {
    forks(&Stage::with_nodes(&[0]));
    forks(&Stage::on(Linux::probe()));
}

/// A callback that continues in a child returns into the visit, which puts the one reference that
/// is left there.
#[test]
fn a_visit_goes_on_in_the_child_that_a_callback_makes() {
    with(&Stage::on(Linux::probe()), |host, shrinkers| {
        // 0 in the child.
        let child = AtomicI32::new(-1);
        let made = Made::of(
            |_| {
                // SAFETY: the child goes on with the visit, and ends below.
                child.store(unsafe { libc::fork() }, Relaxed);
                if child.load(Relaxed) == 0 {
                    let _ = neap_os::fence::register();
                    // SAFETY: this is the only thread of the child.
                    unsafe { shrinkers.forget_others(host) };
                }
                0
            },
            |_| STOP,
        );
        let id = register(shrinkers, host, &made.spec()).unwrap();
        shrinkers.visit(host, &(), ROOT, 0, 0, ScanPressure::of(0));
        let gone = shrinkers.unregister(host, id) == Ok(Unregistered::Gone);
        if child.load(Relaxed) == 0 {
            // SAFETY: it ends the child, and runs nothing of the parent.
            unsafe { libc::_exit(if gone { 7 } else { 8 }) };
        }
        let status = status_of(child.load(Relaxed));
        assert_eq!((gone, libc::WEXITSTATUS(status)), (true, 7));
    });
}

#[test]
fn a_name_is_one() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let cache = Cache::of(0);
        for name in ["", "a/b", "a\n", "123456789012345678901234567890123456789012345678901234567"] {
            assert_eq!(
                register(shrinkers, host, &Spec { name, ..cache.spec() }),
                Err(ShrinkerError::BadName),
                "{name}"
            );
        }
    });
}

#[test]
fn register_and_open_without_memory_fail_and_change_nothing() {
    let stage = Stage::with_nodes(&[0, 1]);
    with(&stage, |host, shrinkers| {
        let cache = Cache::of(5);
        let allocations = || host.data().statistics().allocations;
        let before = allocations();
        stage.platform.fail(Call::Map, 0, 1);
        assert_eq!(register(shrinkers, host, &cache.spec()), Err(ShrinkerError::NoMemory), "no table");
        stage.left.store(0, Relaxed);
        assert_eq!(register(shrinkers, host, &cache.spec()), Err(ShrinkerError::NoMemory));
        assert_eq!(allocations(), before, "words that no shrinker has");
        stage.left.store(usize::MAX, Relaxed);
        let id = register(shrinkers, host, &cache.spec()).unwrap();
        assert_eq!(shrinkers.visit(host, &(), ROOT, 0, 0, ScanPressure::of(12)).calls, 1);
        shrinkers.unregister(host, id).unwrap();
    });
    for successes in 0..8 {
        let stage = Stage::with_nodes(&[0]);
        stage.platform.fail(Call::Map, successes, 1);
        let host = On(&stage);
        match Shrinkers::open(&host) {
            Err(error) => assert_eq!(error, ShrinkerError::NoMemory),
            // SAFETY: no thread uses it any more.
            Ok(shrinkers) => unsafe { shrinkers.close(&host) },
        }
        assert_eq!(stage.bytes.load(Relaxed), 0);
    }
}

#[test]
fn marks_for_which_there_is_no_memory_are_kept() {
    let stage = Stage::with_nodes(&[0]);
    with(&stage, |host, shrinkers| {
        let cache = Cache::of(1);
        // Of two units, and one that was there before.
        let ids: Vec<_> = (0..70).map(|_| register(shrinkers, host, &cache.by_group()).unwrap()).collect();
        let visit = |slot| shrinkers.visit(host, &(), GroupId::from_bits(77), slot, 0, ScanPressure::of(12)).calls;
        // No unit: all of the 64 may have objects.
        stage.left.store(0, Relaxed);
        Inside::assume(|inside| shrinkers.mark(inside, host, ids[3], 9, 0));
        assert_eq!((shrinkers.next_with_anything(0, 0), visit(9), visit(9)), (Some(9), 64, 64));
        // There is memory for another shrinker's mark: the first mark is kept.
        stage.left.store(usize::MAX, Relaxed);
        Inside::assume(|inside| shrinkers.mark(inside, host, ids[5], 9, 0));
        assert_eq!(visit(9), 64);
        cache.objects.store(0, Relaxed);
        // No objects are left, and that is known in the end.
        assert_eq!((visit(9), visit(9), shrinkers.next_with_anything(0, 0)), (128, 0, None));
        // Neither place nor word.
        cache.objects.store(1, Relaxed);
        stage.platform.fail(Call::Map, 0, usize::MAX >> 1);
        Inside::assume(|inside| shrinkers.mark(inside, host, ids[69], 5000, 0));
        assert_eq!(visit(5000), 70);
        let mut found = Vec::new();
        shrinkers.each_group_with_anything(0, |slot| found.push(slot));
        assert!(found.contains(&5000) && !found.contains(&5001) && !found.contains(&9), "{found:?}");
        // There is memory again: no mark is forgotten, and shrinkers without objects lose theirs
        // again.
        stage.platform.fail(Call::Map, 0, 0);
        Inside::assume(|inside| shrinkers.mark(inside, host, ids[0], 6000, 0));
        assert_eq!((visit(5000), visit(6000)), (70, 1));
        cache.objects.store(0, Relaxed);
        for _ in 0..2 {
            shrinkers.each_group_with_anything(0, |slot| _ = visit(slot));
        }
        assert_eq!((shrinkers.next_with_anything(0, 0), visit(5000)), (None, 0));
    });
}

#[test]
fn any_number_can_be_asked_about() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        for bits in [0, 5, MOST_SHRINKERS.into(), u32::MAX.into(), u64::MAX] {
            let id = ShrinkerId::from_bits(bits);
            Inside::assume(|inside| shrinkers.mark(inside, host, id, 0, 0));
            assert!(!shrinkers.is_there(id) && !shrinkers.is_marked(id, 0, 0) && shrinkers.deferred(id, 0, 0) == 0);
            assert_eq!(shrinkers.count(host, &(), id, ROOT, 0), None);
            assert_eq!(shrinkers.unregister(host, id), Err(ShrinkerError::NoSuchShrinker));
        }
    });
}

#[test]
fn there_are_no_more_than_there_can_be() {
    with(&Stage::on(Virtual::new(4096, 1)), |host, shrinkers| {
        let cache = Cache::of(0);
        let ids: Vec<_> = (0..MOST_SHRINKERS).map(|_| register(shrinkers, host, &cache.by_group()).unwrap()).collect();
        assert_eq!(register(shrinkers, host, &cache.spec()), Err(ShrinkerError::Full));
        // The last one of all is found like the first.
        let last = *ids.last().unwrap();
        Inside::assume(|inside| shrinkers.mark(inside, host, last, 2, 0));
        assert_eq!(shrinkers.visit(host, &(), ROOT, 2, 0, ScanPressure::of(0)).calls, 2);
        assert_eq!(shrinkers.next_with_anything(0, 0), None);
        assert_eq!(shrinkers.unregister(host, ids[77]), Ok(Unregistered::Gone));
        assert_eq!(register(shrinkers, host, &cache.spec()).unwrap().index(), 77);
    });
}
