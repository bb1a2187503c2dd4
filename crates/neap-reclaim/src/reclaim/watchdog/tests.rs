//! Tests of the watchdog.

use super::*;
use crate::reclaim::inside;
use std::format;
use std::vec::Vec;

const SECOND: u64 = 1_000_000_000;

fn named(name: &str) -> Option<Name> {
    let shared = neap_groups::SharedName::default();
    shared.set(name);
    Some(shared.get())
}

/// Returns all callbacks that are written off now.
fn overdue(watchdog: &Watchdog, now: u64) -> Vec<Overdue> {
    let mut all = Vec::new();
    watchdog.write_off(&inside(), now, Some(0), |_| named("seven"), |overdue| all.push(overdue));
    all
}

fn culprits(watchdog: &Watchdog) -> Vec<Culprit> {
    let mut all = Vec::new();
    watchdog.each_culprit(|culprit| all.push(culprit));
    all
}

#[test]
fn overlong_callback_is_written_off_once_and_bars_until_return() {
    let watchdog = Watchdog::default();
    let running = watchdog.enter(1).unwrap();
    assert!(running.began(7, 1000, BUDGET));
    assert_eq!(overdue(&watchdog, 1000 + BUDGET), []);
    assert_eq!(overdue(&watchdog, 1001 + BUDGET), [Overdue { shrinker: 7, reclaimer: 1 }]);
    assert_eq!(overdue(&watchdog, SECOND), [], "once");
    assert!(watchdog.is_barred(7, u64::MAX - 1) && !watchdog.is_barred(8, 0));
    assert!(!watchdog.enter(0).unwrap().began(7, SECOND, BUDGET));
    assert_eq!(running.ended(3 * SECOND), EndedCallback { nanoseconds: 3 * SECOND - 1000, is_written_off: true });
    running.is_back(&inside(), 3 * SECOND, Excess::Busy);
    assert!(watchdog.is_barred(7, 4 * SECOND - 1) && !watchdog.is_barred(7, 4 * SECOND));
    assert!(running.began(7, 4 * SECOND, BUDGET));
    assert_eq!(running.ended(4 * SECOND + 5), EndedCallback { nanoseconds: 5, is_written_off: false });
    let [culprit] = culprits(&watchdog)[..] else { panic!("one culprit") };
    assert_eq!((culprit.name(), culprit.counts, watchdog.counts()), ("seven", [1, 0, 0], [1, 0, 0]));
}

#[test]
fn repeated_blame_doubles_the_bar_up_to_64_seconds() {
    let watchdog = Watchdog::default();
    let barred = [1, 2, 4, 8, 16, 32, 64, 64].map(|seconds| seconds * SECOND);
    for seconds in barred {
        watchdog.blame(&inside(), 1, named("one"), Misbehaviour::Lied, 0);
        assert!(watchdog.is_barred(1, seconds - 1) && !watchdog.is_barred(1, seconds));
    }
}

/// The number of doublings falls by one for each half minute.
#[test]
fn penalties_are_forgotten_in_time() {
    let watchdog = Watchdog::default();
    let barred_at = |now: u64, seconds: u64| {
        watchdog.overran(&inside(), 1, named("one"), Excess::Busy, now);
        assert!(watchdog.is_barred(1, now + seconds * SECOND - 1) && !watchdog.is_barred(1, now + seconds * SECOND));
    };
    [1, 2, 4, 8].into_iter().for_each(|seconds| barred_at(0, seconds));
    barred_at(DECAY, 8);
    barred_at(3 * DECAY, 4);
    barred_at(20 * DECAY, 1);
}

#[test]
fn waited_excess_bars_on_third_in_a_row_and_starved_never() {
    let watchdog = Watchdog::default();
    for excess in [Excess::Waited, Excess::Starved, Excess::Waited, Excess::Starved] {
        watchdog.overran(&inside(), 1, named("one"), excess, 0);
        assert!(!watchdog.is_barred(1, 0), "{excess:?}");
    }
    watchdog.overran(&inside(), 1, named("one"), Excess::Waited, 0);
    assert!(watchdog.is_barred(1, SECOND - 1) && !watchdog.is_barred(1, SECOND));
    // A callback that is in time ends the row.
    let running = watchdog.enter(1).unwrap();
    for _ in 0..ROW {
        (1..ROW).for_each(|_| watchdog.overran(&inside(), 1, named("one"), Excess::Waited, SECOND));
        assert!(running.began(1, SECOND, BUDGET));
        assert_eq!(running.ended(SECOND + BUDGET), EndedCallback { nanoseconds: BUDGET, is_written_off: false });
    }
}

#[test]
fn written_off_starved_callback_bars_only_while_it_runs() {
    let watchdog = Watchdog::default();
    let running = watchdog.enter(1).unwrap();
    assert!(running.began(7, 0, BUDGET));
    assert_eq!(overdue(&watchdog, SECOND).len(), 1);
    assert!(watchdog.is_barred(7, u64::MAX - 1));
    assert!(running.ended(SECOND).is_written_off);
    running.is_back(&inside(), SECOND, Excess::Starved);
    assert!(!watchdog.is_barred(7, SECOND));
}

#[test]
fn excess_is_classified_by_cpu_time_and_watcher_timeliness() {
    let watchdog = Watchdog::default();
    let excess = |busy| watchdog.excess_of(100, busy, BUDGET);
    assert_eq!([excess(BUDGET), excess(BUDGET + SLACK + 1)], [Excess::Starved, Excess::Busy], "no thread watched");
    watchdog.looked(200, LATE);
    assert_eq!(excess(0), Excess::Waited);
    watchdog.looked(300, LATE + 1);
    assert_eq!([excess(0), watchdog.excess_of(400, 0, BUDGET)], [Excess::Starved; 2]);
    watchdog.looked(500, 0);
    assert_eq!([excess(0), watchdog.excess_of(400, 0, BUDGET)], [Excess::Starved, Excess::Waited]);
}

#[test]
fn a_budget_is_its_shrinkers_own() {
    let watchdog = Watchdog::default();
    let [short, long] = [1, 2].map(|reclaimer| watchdog.enter(reclaimer).unwrap());
    assert!(short.began(6, 0, 10) && long.began(7, 0, SECOND));
    assert_eq!(overdue(&watchdog, 11), [Overdue { shrinker: 6, reclaimer: 1 }]);
    assert_eq!(overdue(&watchdog, SECOND), []);
    assert_eq!(overdue(&watchdog, SECOND + 1), [Overdue { shrinker: 7, reclaimer: 2 }]);
}

#[test]
fn reclaimers_have_lanes_however_many_threads_run_callbacks() {
    let watchdog = Watchdog::default();
    let all: Vec<_> = (0..PROGRAM_SLOTS).map(|_| watchdog.enter(0).unwrap()).collect();
    assert!(watchdog.enter(0).is_none());
    let others: Vec<_> = (1..=RECLAIMERS as u32).map(|reclaimer| watchdog.enter(reclaimer).unwrap()).collect();
    drop((all, others));
}

#[test]
fn a_name_is_cut_between_characters() {
    let watchdog = Watchdog::default();
    watchdog.blame(&inside(), 1, named(&"ä".repeat(28)), Misbehaviour::Panicked, 0);
    watchdog.blame(&inside(), 2, named(&format!("x{}", "ä".repeat(27))), Misbehaviour::Panicked, 0);
    let names: Vec<_> = culprits(&watchdog).iter().map(|culprit| culprit.name().len()).collect();
    assert_eq!(names, [48, 47]);
}

#[test]
fn full_culprit_table_reuses_a_record_with_expired_bar() {
    let watchdog = Watchdog::default();
    (1..=CULPRITS as u64).for_each(|id| watchdog.blame(&inside(), id, named("old"), Misbehaviour::Lied, id));
    watchdog.blame(&inside(), 99, named("new"), Misbehaviour::Lied, 1);
    assert!(!watchdog.is_barred(99, 1), "all others are barred");
    watchdog.blame(&inside(), 99, named("new"), Misbehaviour::Lied, 1 + SECOND);
    assert!(watchdog.is_barred(99, 1 + SECOND) && !watchdog.is_barred(1, 0));
    assert_eq!((culprits(&watchdog).len(), watchdog.counts()[1]), (CULPRITS, CULPRITS as u32 + 2));
}

#[test]
fn one_that_is_gone_gives_its_record_first() {
    let watchdog = Watchdog::default();
    (1..=CULPRITS as u64).for_each(|id| watchdog.blame(&inside(), id, named("old"), Misbehaviour::Lied, id));
    watchdog.forget(7);
    assert_eq!(culprits(&watchdog).iter().filter(|culprit| culprit.shrinker == 7).count(), 1, "it is still known");
    watchdog.blame(&inside(), 99, named("new"), Misbehaviour::Lied, 1);
    assert_eq!(culprits(&watchdog)[6].shrinker, 99);
}

#[test]
fn lanes_are_given_back_and_a_child_forgets_all_but_its_own() {
    let watchdog = Watchdog::default();
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let mut all: Vec<_> = (1..PROGRAM_SLOTS).map(|_| watchdog.enter(0).unwrap()).collect();
            assert!(all[0].began(6, 0, BUDGET));
            assert_eq!(overdue(&watchdog, SECOND).len(), 1);
            drop(all.pop());
            all.push(watchdog.enter(0).unwrap());
            // These slots stay taken, like those of other threads of a parent that forks.
            all.into_iter().for_each(core::mem::forget);
        });
        others.join().unwrap();
    });
    let own = watchdog.enter(0).unwrap();
    assert!(own.began(5, 0, BUDGET) && watchdog.enter(0).is_none() && watchdog.is_barred(6, 0));
    watchdog.forget_others();
    assert!(!watchdog.is_barred(6, 0));
    assert_eq!(overdue(&watchdog, SECOND), [Overdue { shrinker: 5, reclaimer: 0 }]);
    assert!(watchdog.enter(0).is_some() && watchdog.is_barred(5, u64::MAX - 1));
    watchdog.forget_others();
    assert!(watchdog.is_barred(5, u64::MAX - 1), "its own is as stuck there");
    assert!(own.ended(SECOND).is_written_off);
    own.is_back(&inside(), SECOND, Excess::Busy);
    assert!(watchdog.is_barred(5, SECOND) && !watchdog.is_barred(5, 3 * SECOND));
}

/// The callback returns, and in two cases another one begins, between the watcher's look and
/// its exchange.
#[test]
fn callback_that_returns_during_the_check_is_not_written_off() {
    for again in [None, Some(7), Some(8)] {
        let watchdog = Watchdog::default();
        let running = watchdog.enter(1).unwrap();
        assert!(running.began(7, 1000, BUDGET));
        let name = |shrinker| {
            assert_eq!(
                (shrinker, running.ended(SECOND)),
                (7, EndedCallback { nanoseconds: SECOND - 1000, is_written_off: false })
            );
            assert!(again.is_none_or(|again| running.began(again, 1000, BUDGET)));
            named("seven")
        };
        watchdog.write_off(&inside(), SECOND, Some(0), name, |overdue| panic!("{overdue:?}"));
        assert!(!watchdog.is_barred(7, 0) && culprits(&watchdog).is_empty());
        assert!(again.is_none() || !running.ended(SECOND).is_written_off);
    }
}

#[test]
fn shrinker_stays_barred_until_its_last_stuck_callback_returns() {
    let watchdog = Watchdog::default();
    let [first, second] = [1, 2].map(|reclaimer| watchdog.enter(reclaimer).unwrap());
    assert!(first.began(7, 0, BUDGET) && second.began(7, 0, BUDGET));
    assert_eq!(overdue(&watchdog, SECOND).len(), 2);
    watchdog.blame(&inside(), 7, named("seven"), Misbehaviour::Panicked, SECOND);
    assert!(watchdog.is_barred(7, u64::MAX - 1), "both are stuck");
    assert!(first.ended(SECOND).is_written_off);
    first.is_back(&inside(), SECOND, Excess::Busy);
    assert!(watchdog.is_barred(7, u64::MAX - 1), "one is");
    assert!(second.ended(SECOND).is_written_off);
    second.is_back(&inside(), SECOND, Excess::Busy);
    assert!(watchdog.is_barred(7, SECOND) && !watchdog.is_barred(7, 5 * SECOND), "three penalties: four seconds");
}

#[test]
fn stuck_callback_without_a_culprit_record_leaves_no_bar() {
    let watchdog = Watchdog::default();
    let running = watchdog.enter(1).unwrap();
    assert!(running.began(99, 0, BUDGET));
    (1..=CULPRITS as u64).for_each(|id| watchdog.blame(&inside(), id, named("old"), Misbehaviour::Lied, SECOND));
    assert_eq!(overdue(&watchdog, SECOND).len(), 1);
    watchdog.blame(&inside(), 99, named("new"), Misbehaviour::Lied, 3 * SECOND);
    assert!(running.ended(3 * SECOND).is_written_off);
    running.is_back(&inside(), 3 * SECOND, Excess::Busy);
    assert!(watchdog.is_barred(99, 3 * SECOND) && !watchdog.is_barred(99, 4 * SECOND));
}

/// 1. A callback begins. 2. The process is stopped for longer than the callback's budget. 3. A
///    watching thread comes late, or has not seen when the budget was used up.
#[test]
fn late_watcher_gives_a_callback_its_budget_once_more() {
    let watchdog = Watchdog::default();
    let running = watchdog.enter(1).unwrap();
    let look = |now, seen_from| {
        let mut count = 0;
        watchdog.write_off(&inside(), now, seen_from, |_| None, |_| count += 1);
        count
    };
    for seen_from in [None, Some(SECOND / 2)] {
        assert!(running.began(7, 0, BUDGET));
        assert_eq!([look(SECOND, seen_from), look(SECOND + BUDGET - 1, Some(SECOND))], [0, 0]);
        assert_eq!(
            running.ended(SECOND + BUDGET),
            EndedCallback { nanoseconds: SECOND + BUDGET, is_written_off: false }
        );
        // The doubt ends with the callback.
        assert!(running.began(7, SECOND, BUDGET));
        assert_eq!([look(2 * SECOND, None), look(2 * SECOND + BUDGET, None)], [0, 1]);
        assert!(running.ended(3 * SECOND).is_written_off);
        running.is_back(&inside(), 3 * SECOND, Excess::Starved);
    }
    assert!(running.began(7, 0, BUDGET));
    assert_eq!(look(BUDGET + 1, Some(BUDGET)), 1, "it was watched when its time was over");
}
