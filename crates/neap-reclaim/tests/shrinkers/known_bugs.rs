//! Bugs of other projects (S1 to S10, L10, L11), each with the test that would find it here.

use crate::ROOT;
use crate::host::{Cache, Made, On, Stage, with};
use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use neap_base::gate::Inside;
use neap_base::{Linux, Platform};
use neap_groups::GroupId;
use neap_reclaim::{
    Asked, Caller, DONE, EMPTY, STOP, ScanPressure, ShrinkerError, ShrinkerFilter, ShrinkerId, Shrinkers, Spec,
    Unregistered, Visited, is_calling,
};
use neap_testing::virtual_platform::Virtual;
use std::collections::HashSet;
use std::sync::{Barrier, Mutex, OnceLock, mpsc};
use std::thread;

fn visit(shrinkers: &Shrinkers, host: &On<'_, Virtual>, slot: u32, node: u32, priority: u32) -> Visited {
    shrinkers.visit(host, &(), group(slot), slot, node, ScanPressure::of(priority))
}

/// Returns a group for a slot, in tests without a tree.
fn group(slot: u32) -> GroupId {
    GroupId::from_bits(GroupId::ROOT.to_bits() + u64::from(slot))
}

fn register(shrinkers: &Shrinkers, host: &On<'_, Virtual>, spec: &Spec<'_>) -> ShrinkerId {
    // SAFETY: shrinkers of tests outlive their visits.
    unsafe { shrinkers.register(host, spec) }.unwrap()
}

/// Runs `f` while another thread is in a callback of the shrinker that `f` gets, until `f` lets
/// that go on.
fn while_called(shrinkers: &Shrinkers, host: &On<'_, Virtual>, f: impl FnOnce(ShrinkerId, &dyn Fn())) {
    let (inside, go_on) = (Barrier::new(2), Barrier::new(2));
    let made = Made::of(
        |_| {
            inside.wait();
            go_on.wait();
            0
        },
        |_| STOP,
    );
    let id = register(shrinkers, host, &made.spec());
    thread::scope(|scope| {
        scope.spawn(|| visit(shrinkers, host, 0, 0, 0));
        inside.wait();
        f(id, &|| _ = go_on.wait());
    });
    let _ = shrinkers.unregister(host, id);
}

#[test]
fn s1_unregister_does_not_wait_for_other_callbacks() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        while_called(shrinkers, host, |_, go_on| {
            let cache = Cache::of(1);
            let id = register(shrinkers, host, &cache.spec());
            assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
            go_on();
        });
    });
}

#[test]
fn s2_reports_block_no_unregistration_and_take_no_lock() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let caches = [Cache::of(1), Cache::of(2)];
        let ids = [0, 1].map(|at| register(shrinkers, host, &caches[at].spec()));
        let mut seen = Vec::new();
        shrinkers.each(|report| {
            // Like a reader that is delayed at its first line.
            if seen.is_empty() {
                for id in ids {
                    assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
                }
            }
            seen.push((report.id, report.name.as_str().to_string()));
        });
        assert_eq!(seen, [(ids[0], "cache".to_string())]);
        // A thread is in a callback, and another waits for that to end: reports go on.
        while_called(shrinkers, host, |id, go_on| {
            thread::scope(|scope| {
                let waiting = scope.spawn(|| shrinkers.unregister(host, id));
                while shrinkers.is_there(id) {
                    thread::yield_now();
                }
                shrinkers.each(|report| assert_ne!(report.id, id, "it is going"));
                go_on();
                assert_eq!(waiting.join().unwrap(), Ok(Unregistered::Gone));
            });
        });
    });
}

/// Refuses from that question on.
struct Until(AtomicU32);

impl Caller for Until {
    fn began(&self, _: ShrinkerId, _: bool) -> bool {
        self.0.try_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok()
    }
}

#[test]
fn s3_every_early_end_of_a_visit_puts_its_reference() {
    let scans: [fn(&mut Asked) -> u64; 4] = [
        |_| STOP,
        |asked| {
            asked.scanned = 0;
            0
        },
        |_| 0,
        |asked| asked.to_scan,
    ];
    for (count, scan) in [0, EMPTY, u64::MAX, 1, 1000].into_iter().flat_map(|count| scans.map(|scan| (count, scan))) {
        for (by_group, sequences) in [(false, false), (true, false), (false, true), (true, true)] {
            let machine = if sequences {
                Virtual::new(4096, Linux::probe().cpus()).with_sequences()
            } else {
                Virtual::new(4096, 1)
            };
            with(&Stage::on(machine), |host, shrinkers| {
                let called = AtomicU64::new(0);
                let call = || _ = called.fetch_add(1, Relaxed);
                let counted = |_: &Asked| (call(), count).1;
                let made = Made::of(counted, |asked| (call(), scan(asked)).1);
                let id = register(shrinkers, host, &Spec { by_group, ..made.spec() });
                Inside::assume(|inside| shrinkers.mark(inside, host, id, 0, 0));
                for questions in 0..6 {
                    shrinkers.visit(host, &Until(questions.into()), ROOT, 0, 0, ScanPressure::of(0));
                    shrinkers.count(host, &Until(questions.into()), id, ROOT, 0);
                    shrinkers.scan(host, &Until(questions.into()), id, ROOT, 0, 300);
                }
                shrinkers.visit(
                    host,
                    &(),
                    ROOT,
                    0,
                    0,
                    ScanPressure { filter: ShrinkerFilter::Inline, ..ScanPressure::of(0) },
                );
                shrinkers.visit(host, &(), group(1), 1, 0, ScanPressure::of(0));
                // A reference counts as a call, and one without a call does not.
                shrinkers.each(|report| assert_eq!(report.calls, called.load(Relaxed), "count {count}"));
                // A reference that was not put would be waited for.
                assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone), "count {count}");
                // The next life of the index begins with no calls.
                let id = register(shrinkers, host, &made.spec());
                shrinkers.each(|report| assert_eq!(report.calls, 0, "count {count}"));
                assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
            });
        }
    }
}

/// A shrinker that must not be called after it was unregistered.
struct Mortal {
    alive: AtomicBool,
    calls: AtomicU64,
    late: AtomicU64,
}

impl Mortal {
    const fn new() -> Mortal {
        Mortal { alive: AtomicBool::new(false), calls: AtomicU64::new(0), late: AtomicU64::new(0) }
    }

    fn spec(&self) -> Spec<'static> {
        unsafe extern "C" fn count(data: *mut c_void, _: *const Asked) -> u64 {
            // SAFETY: shrinkers of the test outlive their registry.
            let mortal = unsafe { &*data.cast::<Mortal>() };
            mortal.late.fetch_add(u64::from(!mortal.alive.load(SeqCst)), Relaxed);
            mortal.calls.fetch_add(1, Relaxed);
            thread::yield_now();
            mortal.late.fetch_add(u64::from(!mortal.alive.load(SeqCst)), Relaxed);
            0
        }
        Spec { count, data: core::ptr::from_ref(self).cast_mut().cast(), ..Cache::of(0).spec() }
    }
}

fn flood<P: neap_base::Platform>(stage: &Stage<P>) {
    with(stage, |host, shrinkers| {
        let mortals = [const { Mortal::new() }; 4];
        let done = AtomicBool::new(false);
        let visits = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Relaxed) {
                        visits.fetch_add(shrinkers.visit(host, &(), ROOT, 0, 0, ScanPressure::of(0)).calls, Relaxed);
                    }
                });
            }
            let owners: Vec<_> = mortals
                .iter()
                .map(|mortal| {
                    scope.spawn(|| {
                        for round in 0..300 {
                            mortal.alive.store(true, SeqCst);
                            // SAFETY: it outlives the registry.
                            let id = unsafe { shrinkers.register(host, &mortal.spec()) }.unwrap();
                            if round % 8 == 0 {
                                thread::yield_now();
                            }
                            assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
                            mortal.alive.store(false, SeqCst);
                        }
                    })
                })
                .collect();
            owners.into_iter().for_each(|owner| owner.join().unwrap());
            done.store(true, Relaxed);
        });
        for mortal in &mortals {
            assert_eq!(mortal.late.load(Relaxed), 0, "called after it was unregistered");
        }
        let calls: u64 = mortals.iter().map(|mortal| mortal.calls.load(Relaxed)).sum();
        assert_eq!(calls, visits.load(Relaxed));
    });
}

#[test]
fn s4_nothing_is_called_once_it_is_unregistered() {
    flood(&Stage::with_nodes(&[0, 0]));
    // With sequences and fences, where there are any.
    flood(&Stage::on(Linux::probe()));
}

static GONE: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn gone(_: *mut c_void) {
    GONE.fetch_add(1, Relaxed);
}

#[test]
fn s5_unregister_inside_a_callback_does_not_wait() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let own = Mutex::new(None);
        let made = Made::of(
            |_| 100,
            |_| {
                let id = own.lock().unwrap().take().unwrap();
                assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Later));
                assert_eq!(shrinkers.unregister(host, id), Err(ShrinkerError::NoSuchShrinker));
                assert_eq!(GONE.load(Relaxed), 0, "gone while it is called");
                assert!(is_calling());
                STOP
            },
        );
        let id = register(shrinkers, host, &Spec { gone: Some(gone), ..made.spec() });
        *own.lock().unwrap() = Some(id);
        visit(shrinkers, host, 0, 0, 0);
        assert_eq!((GONE.load(Relaxed), shrinkers.is_there(id), is_calling()), (1, false, false));
        assert_eq!(visit(shrinkers, host, 0, 0, 0).calls, 0);
        // A shrinker that was never started is not called.
        // SAFETY: the callbacks may be called at any time until it is unregistered.
        let id = unsafe { shrinkers.prepare(host, &Spec { gone: Some(gone), ..made.spec() }) }.unwrap();
        assert_eq!((shrinkers.unregister(host, id), GONE.load(Relaxed)), (Ok(Unregistered::Gone), 2));
        assert_eq!(shrinkers.start(host, id), Err(ShrinkerError::NoSuchShrinker));
    });
}

#[test]
fn s5_two_that_unregister_each_other_go_both() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        for _ in 0..50 {
            let (inside, ids) = (Barrier::new(2), Mutex::new(Vec::new()));
            let gone = AtomicU32::new(0);
            let made = [0, 1].map(|own: usize| {
                let (inside, ids, gone) = (&inside, &ids, &gone);
                Made::of(
                    move |_| {
                        inside.wait();
                        let other: ShrinkerId = ids.lock().unwrap()[1 - own];
                        gone.fetch_add(u32::from(shrinkers.unregister(host, other).is_ok()), Relaxed);
                        0
                    },
                    |_| STOP,
                )
            });
            ids.lock().unwrap().extend(made.each_ref().map(|made| register(shrinkers, host, &made.spec())));
            let both = ids.lock().unwrap().clone();
            thread::scope(|scope| {
                for id in both.clone() {
                    scope.spawn(move || shrinkers.count(host, &(), id, ROOT, 0));
                }
            });
            assert_eq!(gone.load(Relaxed), 2);
            assert!(both.iter().all(|&id| !shrinkers.is_there(id)));
        }
    });
}

/// Marked and seen objects, by shrinker and group.
#[derive(Default)]
struct Pairs(Mutex<HashSet<(usize, u64)>>);

#[test]
fn s6_marks_are_kept_while_everything_grows() {
    const SHRINKERS: usize = 200;
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let (seen, marked) = (&Pairs::default(), &Pairs::default());
        let made: Vec<_> = (0..SHRINKERS)
            .map(|at| {
                let count = move |asked: &Asked| {
                    seen.0.lock().unwrap().insert((at, asked.group));
                    0
                };
                Made::of(count, |_| STOP)
            })
            .collect();
        let (tell, told) = mpsc::channel::<(usize, ShrinkerId)>();
        let told = &Mutex::new(told);
        thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    loop {
                        let Ok((at, id)) = told.lock().unwrap().recv() else { break };
                        for step in 0..20 {
                            // Slots in no order, further and further up.
                            let slot = (at as u32 * 7919 + step * 104_729 + thread) % (16 << (at / 20));
                            marked.0.lock().unwrap().insert((at, group(slot).to_bits()));
                            Inside::assume(|inside| shrinkers.mark(inside, host, id, slot, 0));
                        }
                    }
                });
            }
            for (at, made) in made.iter().enumerate() {
                tell.send((at, register(shrinkers, host, &Spec { by_group: true, ..made.spec() }))).unwrap();
            }
            drop(tell);
        });
        shrinkers.each_group_with_anything(0, |slot| _ = visit(shrinkers, host, slot, 0, 12));
        let (seen, marked) = (seen.0.lock().unwrap(), marked.0.lock().unwrap());
        assert!(marked.len() > 3000);
        // A shrinker without a mark may be asked: two threads that mark the first of a unit at once
        // take each other for one without memory.
        let missed: Vec<_> = marked.difference(&seen).take(5).collect();
        assert!(missed.is_empty(), "{missed:?}");
    });
}

#[test]
fn s7_reused_index_inherits_nothing_and_loses_no_mark() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let (first, second) = (Cache::of(50), Cache::of(50));
        let id = register(shrinkers, host, &Spec { seeks: 0, ..first.by_group() });
        Inside::assume(|inside| shrinkers.mark(inside, host, id, 3, 0));
        // With 0 seeks: half of the objects, which is less than a batch.
        visit(shrinkers, host, 3, 0, 12);
        assert_eq!(shrinkers.deferred(id, 3, 0), 25);
        shrinkers.unregister(host, id).unwrap();
        // SAFETY: it outlives its registration.
        let next = unsafe { shrinkers.prepare(host, &Spec { seeks: 0, ..second.by_group() }) }.unwrap();
        assert_eq!((next.index(), next == id), (id.index(), false));
        assert_eq!(shrinkers.deferred(next, 3, 0), 0);
        // Marked between its id and its first call: a visit that meets it meanwhile leaves the bit.
        Inside::assume(|inside| shrinkers.mark(inside, host, next, 4, 0));
        for _ in 0..2 {
            assert_eq!((visit(shrinkers, host, 3, 0, 0).calls, visit(shrinkers, host, 4, 0, 0).calls), (0, 0));
        }
        // A stale id marks nothing, and is not called.
        Inside::assume(|inside| shrinkers.mark(inside, host, id, 5, 0));
        assert_eq!(shrinkers.count(host, &(), id, ROOT, 0), None);
        shrinkers.start(host, next).unwrap();
        assert_eq!(visit(shrinkers, host, 5, 0, 12).calls, 0);
        assert_eq!(visit(shrinkers, host, 4, 0, 12).calls, 1);
        assert_eq!(shrinkers.deferred(next, 4, 0), 25);
        // The index is free: bits that are left are cleared.
        shrinkers.unregister(host, next).unwrap();
        visit(shrinkers, host, 4, 0, 12);
        visit(shrinkers, host, 3, 0, 12);
        assert_eq!(shrinkers.next_with_anything(0, 0), None);
    });
}

#[test]
fn s8_what_is_deferred_for_a_deleted_group_is_its_parents_once() {
    with(&Stage::with_nodes(&[0, 1]), |host, shrinkers| {
        let cache = Cache::of(50);
        let id = register(shrinkers, host, &Spec { seeks: 0, ..cache.by_group() });
        for (slot, times) in [(7, 2), (1, 1)] {
            Inside::assume(|inside| shrinkers.mark(inside, host, id, slot, 1));
            (0..times).for_each(|_| _ = visit(shrinkers, host, slot, 1, 12));
        }
        let before = [7, 1].map(|slot| shrinkers.deferred(id, slot, 1));
        assert_eq!(before, [50, 25]);
        host.delete(shrinkers, group(7), 7, 1);
        assert_eq!([7, 1].map(|slot| shrinkers.deferred(id, slot, 1)), [0, 75]);
        assert_eq!(visit(shrinkers, host, 7, 1, 0).calls, 0, "a group that is gone");
        host.delete(shrinkers, group(7), 7, 1);
        assert_eq!([7, 1].map(|slot| shrinkers.deferred(id, slot, 1)), [0, 75]);
        // The parent may have all objects that the child had.
        Inside::assume(|inside| shrinkers.mark(inside, host, id, 8, 0));
        host.delete(shrinkers, group(8), 8, 2);
        assert_eq!((shrinkers.next_with_anything(0, 0), visit(shrinkers, host, 2, 0, 12).calls), (Some(2), 1));
    });
}

#[test]
fn s8_work_deferred_after_group_deletion_goes_to_the_parent() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let ends = AtomicBool::new(false);
        let made = Made::of(
            |_| {
                if ends.swap(false, Relaxed) {
                    host.delete(shrinkers, group(9), 9, 4);
                }
                100
            },
            |_| STOP,
        );
        let id = register(shrinkers, host, &Spec { seeks: 0, batch: 10, by_group: true, ..made.spec() });
        [9, 4].into_iter().for_each(|slot| Inside::assume(|inside| shrinkers.mark(inside, host, id, slot, 0)));
        visit(shrinkers, host, 9, 0, 12);
        assert_eq!(shrinkers.deferred(id, 9, 0), 50);
        ends.store(true, Relaxed);
        visit(shrinkers, host, 9, 0, 12);
        // 50 that were moved, and 50 of the pass that was under way.
        assert_eq!([9, 4].map(|slot| shrinkers.deferred(id, slot, 0)), [0, 100]);
        // The next group of that slot has its own deferred work.
        let next = GroupId::from_bits(group(9).to_bits() | 1 << 30);
        Inside::assume(|inside| shrinkers.mark(inside, host, id, 9, 0));
        shrinkers.visit(host, &(), next, 9, 0, ScanPressure::of(12));
        assert_eq!([9, 4].map(|slot| shrinkers.deferred(id, slot, 0)), [50, 100]);
    });
}

#[test]
fn s9_the_rest_of_a_walk_may_go_away_under_it() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let ids = Mutex::new(Vec::new());
        let caches: Vec<Cache> = (0..300).map(|_| Cache::of(1)).collect();
        let made = Made::of(
            |_| {
                // All but every third. The memory of the unregistered ones is freed then.
                for (at, id) in ids.lock().unwrap().drain(..).enumerate() {
                    if at % 3 != 0 {
                        assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
                    }
                }
                0
            },
            |_| STOP,
        );
        register(shrinkers, host, &made.spec());
        let registered = caches.iter().map(|cache| register(shrinkers, host, &cache.spec()));
        ids.lock().unwrap().extend(registered);
        visit(shrinkers, host, 0, 0, 12);
        for (at, cache) in caches.iter().enumerate() {
            assert_eq!(cache.counts.load(Relaxed), u64::from(at % 3 == 0), "shrinker {at}");
        }
    });
}

#[test]
fn s10_a_callback_begins_no_second_visit() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let other = Cache::of(1000);
        let nested = Mutex::new(Vec::new());
        let again = || {
            nested.lock().unwrap().push(visit(shrinkers, host, 0, 0, 0));
            assert_eq!(shrinkers.synchronize(host), Err(ShrinkerError::InCallback));
        };
        let made = Made::of(
            |_| {
                again();
                1000
            },
            |_| {
                again();
                STOP
            },
        );
        register(shrinkers, host, &made.spec());
        let id = register(shrinkers, host, &other.spec());
        let visited = visit(shrinkers, host, 0, 0, 0);
        assert_eq!(*nested.lock().unwrap(), [Visited::default(); 2]);
        assert_eq!((visited.calls, other.counts.load(Relaxed), other.objects.load(Relaxed)), (2 + 1 + 15, 1, 0));
        shrinkers.unregister(host, id).unwrap();
    });
}

#[test]
fn l10_a_scan_that_looks_at_nothing_is_not_called_again_at_once() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let scans = AtomicU64::new(0);
        let made = Made::of(
            |_| 10_000,
            |asked| {
                scans.fetch_add(1, Relaxed);
                asked.scanned = 0;
                0
            },
        );
        let id = register(shrinkers, host, &made.spec());
        visit(shrinkers, host, 0, 0, 0);
        assert_eq!((scans.load(Relaxed), shrinkers.deferred(id, 0, 0)), (1, 20_000));
        assert_eq!(shrinkers.scan(host, &(), id, ROOT, 0, 1000).unwrap().calls, 1);
    });
}

#[test]
fn l11_a_count_of_0_keeps_its_bit_and_an_empty_one_does_not() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let answer = AtomicU64::new(0);
        let made = Made::of(|_| answer.load(Relaxed), |_| STOP);
        let id = register(shrinkers, host, &Spec { by_group: true, ..made.spec() });
        Inside::assume(|inside| shrinkers.mark(inside, host, id, 70, 0));
        assert_eq!([0; 3].map(|_| visit(shrinkers, host, 70, 0, 12).calls), [1; 3]);
        answer.store(EMPTY, Relaxed);
        assert_eq!([0; 3].map(|_| visit(shrinkers, host, 70, 0, 12).calls), [2, 0, 0]);
        assert_eq!(shrinkers.next_with_anything(0, 0), None);
        Inside::assume(|inside| shrinkers.mark(inside, host, id, 70, 0));
        assert_eq!(shrinkers.next_with_anything(0, 0), Some(70));
    });
}

#[test]
fn a_scan_may_say_that_there_is_nothing_or_nothing_more() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let (answer, objects) = (AtomicU64::new(DONE), AtomicU64::new(1000));
        let made = Made::of(
            |_| objects.load(Relaxed),
            |asked| {
                assert_eq!((asked.need, asked.priority), (u64::MAX, 0));
                objects.store(if answer.load(Relaxed) == EMPTY { EMPTY } else { 1000 }, Relaxed);
                answer.load(Relaxed)
            },
        );
        let id = register(shrinkers, host, &Spec { by_group: true, ..made.spec() });
        Inside::assume(|inside| shrinkers.mark(inside, host, id, 70, 0));
        let visited = visit(shrinkers, host, 70, 0, 0);
        assert_eq!((visited.calls, visited.scanned, visited.freed, visited.stops), (2, 128, 0, 0));
        answer.store(EMPTY, Relaxed);
        // Counted and scanned, and counted once more after the bit went.
        assert_eq!([0; 2].map(|_| visit(shrinkers, host, 70, 0, 0).calls), [3, 0]);
        // A count that is busy keeps the bit, and is told from an empty one.
        objects.store(STOP, Relaxed);
        Inside::assume(|inside| shrinkers.mark(inside, host, id, 70, 0));
        assert_eq!([0; 2].map(|_| visit(shrinkers, host, 70, 0, 0).stops), [1; 2]);
    });
}

#[test]
fn lies_about_numbers_are_bounded() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let made = Made::of(
            |_| 1000,
            |asked| {
                asked.scanned = u64::MAX;
                u64::MAX / 2
            },
        );
        let id = register(shrinkers, host, &made.spec());
        let visited = visit(shrinkers, host, 0, 0, 0);
        assert_eq!((visited.calls, visited.scanned, visited.freed), (3, 2000, 2000));
        let asked = shrinkers.scan(host, &(), id, ROOT, 0, 500).unwrap();
        assert_eq!((asked.calls, asked.scanned), (1, 500));
    });
}

/// A thread with a reference may put the last one, and then calls `gone`, which may want a lock
/// that a thread holds which reports, blames or charges. References that a CPU's sequence does not
/// take are counted.
#[test]
fn operations_without_callbacks_take_no_shrinker_reference() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let cache = Cache::of(1000);
        let id = register(shrinkers, host, &cache.spec());
        let references = || {
            let mut taken = None;
            shrinkers.each(|report| taken = Some(report.shared));
            taken.unwrap()
        };
        visit(shrinkers, host, 0, 0, 0);
        let before = references();
        assert!(before > 0, "they are not counted");
        assert_eq!(shrinkers.name_of(id).unwrap().as_str(), "cache");
        let inline_only = ScanPressure { filter: ShrinkerFilter::Inline, ..ScanPressure::of(0) };
        assert_eq!(shrinkers.visit(host, &(), ROOT, 0, 0, inline_only).calls, 0);
        assert_eq!(references(), before);
        assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
        assert_eq!(shrinkers.name_of(id), None);
        let other = register(shrinkers, host, &Spec { name: "other", ..cache.spec() });
        assert_eq!((other.index(), shrinkers.name_of(id)), (id.index(), None), "another one's name");
        // A shrinker that is ending is named until it has ended.
        while_called(shrinkers, host, |id, go_on| {
            thread::scope(|scope| {
                let waiting = scope.spawn(|| shrinkers.unregister(host, id));
                while shrinkers.is_there(id) {
                    thread::yield_now();
                }
                assert!(shrinkers.name_of(id).is_some());
                go_on();
                assert_eq!(waiting.join().unwrap(), Ok(Unregistered::Gone));
            });
        });
    });
}

/// Names are written while other threads read them.
#[test]
fn what_is_read_without_a_reference_is_of_one_life() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let (cache, stop) = (Cache::of(1), AtomicBool::new(false));
        // The longest names, so that a mixture would be seen.
        let names = ["a".repeat(56), "b".repeat(56)];
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        shrinkers.each(|report| {
                            assert_eq!(report.name.as_str(), names[(report.batch - 1) as usize]);
                            if let Some(name) = shrinkers.name_of(report.id) {
                                assert_eq!(name, report.name);
                            }
                        });
                    }
                });
            }
            for round in 0..if cfg!(miri) { 50 } else { 20_000 } {
                let at = round % 2;
                let spec = Spec { name: &names[at], batch: at as u64 + 1, ..cache.spec() };
                // SAFETY: the cache outlives it.
                let id = unsafe { shrinkers.register(host, &spec) }.unwrap();
                assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
            }
            stop.store(true, Relaxed);
        });
    });
}

/// A thread that may call inline shrinkers only checks that first, and takes a reference then. In
/// between the index may get another shrinker.
#[test]
fn an_index_is_of_one_kind_for_ever() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let (visitor, stop, wrong) = (OnceLock::new(), AtomicBool::new(false), AtomicU64::new(0));
        let me = || thread::current().id();
        let called = |_: &Asked| {
            wrong.fetch_add(u64::from(visitor.get() == Some(&me())), Relaxed);
            0
        };
        let (outside, inside) = (Made::of(called, |_| STOP), Made::of(|_| 0, |_| STOP));
        let inside = Spec { inline: true, ..inside.spec() };
        thread::scope(|scope| {
            scope.spawn(|| {
                visitor.set(me()).unwrap();
                while !stop.load(Relaxed) {
                    shrinkers.visit(
                        host,
                        &(),
                        ROOT,
                        0,
                        0,
                        ScanPressure { filter: ShrinkerFilter::Inline, ..ScanPressure::of(0) },
                    );
                }
            });
            let mut indexes = [HashSet::new(), HashSet::new()];
            for round in 0..if cfg!(miri) { 50 } else { 100_000 } {
                let at = round % 2;
                let id = register(shrinkers, host, &[inside, outside.spec()][at]);
                indexes[at].insert(id.index());
                assert_eq!(shrinkers.unregister(host, id), Ok(Unregistered::Gone));
            }
            stop.store(true, Relaxed);
            assert!(indexes.each_ref().map(HashSet::len) == [1, 1] && indexes[0] != indexes[1], "{indexes:?}");
        });
        assert_eq!(wrong.load(Relaxed), 0, "calls by a thread that may hold what they take");
    });
}
