//! The answers of `Adaptive` to single events, as tables.
//!
//! The tests call only functions that a list calls. If the policy must have learned first, it runs
//! in the model before.

use super::fixed::Still;
use super::model_tests::{Model, Random, SECOND};
use super::program_tests::{AMPLE, measure, swing};
use super::tests::{limits, list, supply};
use super::{Adaptive, List, Policy, ZoneState};
use std::vec;
use std::vec::Vec;

const EMPTY: List = List { count: 0, moved: 0 };

#[test]
fn the_state_of_a_list_is_less_than_a_cache_line() {
    assert!(size_of::<Adaptive>() <= 64);
}

#[test]
fn a11_refill_streak_doubles_batch_and_mixed_traffic_halves_it() {
    let bounds = limits(1 << 18, 2);
    let plenty = supply(&bounds, u32::MAX);
    let mut adaptive = Adaptive::new(&bounds);
    let (mut moved, mut refills) = (0, Vec::new());
    for _ in 0..7 {
        refills.push(adaptive.refill(list(0, moved), 0, &plenty));
        moved += refills.last().unwrap() - 1;
    }
    assert_eq!(refills, [63, 126, 252, 504, 1008, 2016, 2016]);
    assert_eq!(adaptive.high(), 2016, "room for one batch, and no more is kept");
    let mut both_ways = || {
        moved += 10_000;
        adaptive.refill(list(0, moved), 0, &plenty)
    };
    assert_eq!([(); 7].map(|()| both_ways()), [1008, 504, 252, 126, 63, 63, 63]);
}

#[test]
fn free_streak_doubles_batch_then_collects_it_before_spilling() {
    let bounds = limits(1 << 18, 2);
    let plenty = supply(&bounds, u32::MAX);
    let mut adaptive = Adaptive::new(&bounds);
    let (mut count, mut gives) = (0, Vec::new());
    for moved in 1..=20_000 {
        count += 1;
        let give = adaptive.put(list(count, moved), 0, || plenty);
        count -= give;
        if give > 0 {
            gives.push(give);
        }
    }
    assert_eq!(gives[..8], [63, 126, 252, 504, 2016, 2016, 2016, 2016]);
}

#[test]
fn idle_blocks_of_another_order_do_not_prevent_list_growth() {
    let bounds = limits(1 << 20, 2);
    let plenty = supply(&bounds, u32::MAX);
    let mut adaptive = Adaptive::new(&bounds);
    // Blocks that stay in the list: more than half of the first size.
    let others = bounds.fixed.high / 2 + 100;
    let (mut count, mut moved) = (others, 0);
    while moved < 20_000 || count < others {
        (count, moved) = (count + 1, moved + 1);
        count -= adaptive.put(list(count, moved), 0, || plenty);
    }
    moved += count - others;
    for _ in 0..10 {
        moved += adaptive.refill(list(others, moved), 0, &plenty);
    }
    assert!(adaptive.high() > 5000, "{}", adaptive.high());
}

#[test]
fn other_order_refill_is_small_and_keeps_the_refill_streak() {
    let bounds = limits(1 << 20, 2);
    let plenty = supply(&bounds, u32::MAX);
    let mut adaptive = Adaptive::new(&bounds);
    let mut moved = 0;
    for _ in 0..5 {
        moved += adaptive.refill(list(0, moved), 0, &plenty);
    }
    assert_eq!(adaptive.refill(list(100, moved), 3, &plenty), (2 * bounds.fixed.batch) >> 3);
    assert_eq!(adaptive.refill(list(0, moved + 100), 0, &plenty), 2016);
}

#[test]
fn a_batch_of_an_order_fits_into_a_list_that_is_full_of_others() {
    let bounds = limits(1 << 20, 2);
    let mut adaptive = Adaptive::new(&bounds);
    let full = list(bounds.fixed.high, 5000);
    assert_eq!(adaptive.refill(full, 3, &supply(&bounds, u32::MAX)), bounds.fixed.batch >> 3);
    assert!(adaptive.high() <= bounds.fixed.high + bounds.fixed.batch);
    let mut adaptive = Adaptive::new(&bounds);
    assert_eq!(adaptive.refill(full, 3, &supply(&bounds, bounds.watermarks.high)), 1, "but not where memory is short");
}

#[test]
fn late_refill_grows_high_for_longer_under_contention() {
    let bounds = limits(1 << 20, 2);
    let plenty = supply(&bounds, u32::MAX);
    let after = |busy: bool, ticks: u32| {
        let (mut adaptive, mut moved, mut left) = (Adaptive::new(&bounds), 0, 0);
        for _ in 0..20 {
            if busy {
                adaptive.contended(&plenty);
            }
            moved += bounds.fixed.high;
            let count = adaptive.high() + 1;
            left = count - adaptive.put(list(count, moved), 0, || plenty);
        }
        for _ in 0..ticks {
            adaptive.decay(list(left, moved), &plenty, 1);
            (left, moved) = (left - 1, moved + 1);
        }
        let before = adaptive.high();
        adaptive.refill(list(0, moved + left), 0, &plenty);
        adaptive.high() > before
    };
    let busy_and_not = |ticks| (after(true, ticks), after(false, ticks));
    assert_eq!([0, 1, 3, 4].map(busy_and_not), [(true, true), (true, false), (true, false), (false, false)]);
}

#[test]
fn contention_grows_high_but_not_for_one_way_streams() {
    let bounds = limits(1 << 20, 2);
    let plenty = supply(&bounds, u32::MAX);
    let mut adaptive = Adaptive::new(&bounds);
    let before = adaptive.high();
    adaptive.refill(EMPTY, 0, &plenty);
    adaptive.contended(&plenty);
    assert_eq!(adaptive.high(), before + bounds.fixed.batch);
    for time in 1..1000 {
        let blocks = adaptive.refill(list(0, time * 2016), 0, &plenty);
        assert!(blocks <= bounds.largest());
        adaptive.contended(&plenty);
    }
    assert!(adaptive.high() <= 2 * before + bounds.largest(), "{}", adaptive.high());
}

#[test]
fn decay_trims_a_quarter_of_idle_pages_of_slow_lists_only() {
    let bounds = limits(1 << 20, 2);
    let plenty = supply(&bounds, u32::MAX);
    let mut learned = Model::<Adaptive>::new(bounds, AMPLE, vec![swing(20_000, 0, 0)]);
    learned.run(SECOND);
    let after_a_second = |moves: u32, least: u32| {
        let (mut adaptive, mut moved) = (learned.cpus[0].policy, learned.cpus[0].list.moved);
        adaptive.decay(list(0, moved), &plenty, 1);
        for count in [16_000, 12_000, least, 14_000, 16_000, 12_000, least] {
            moved = moved.wrapping_add(moves);
            adaptive.decay(list(count, moved), &plenty, 1);
        }
        adaptive.high()
    };
    let (empty, idle, fast) = (after_a_second(5000, 0), after_a_second(5000, 8000), after_a_second(90_000, 8000));
    assert!(empty - idle >= 1250 && fast == empty, "{empty} {idle} {fast}");
}

#[test]
fn what_a_tick_takes_does_not_depend_on_how_often_it_comes() {
    let bounds = limits(1 << 20, 2);
    let plenty = supply(&bounds, u32::MAX);
    let mut often = Model::<Adaptive>::new(bounds, AMPLE, vec![swing(20_000, 0, 0)]);
    often.run(2 * SECOND);
    let mut often = often.cpus[0].policy;
    let mut seldom = often;
    (0..200).for_each(|_| _ = often.decay(list(0, 1), &plenty, 0));
    assert_eq!(often.high(), seldom.high());
    (0..5).for_each(|_| _ = often.decay(list(0, 1), &plenty, 1));
    seldom.decay(list(0, 1), &plenty, 0);
    seldom.decay(list(0, 1), &plenty, 5);
    assert_eq!(often.high(), seldom.high());
    seldom.decay(list(0, 1), &plenty, 1000);
    assert!(seldom.is_settled(&bounds));
}

#[test]
fn under_lasting_pressure_it_is_fixed() {
    let bounds = limits(1 << 18, 2);
    let marks = bounds.watermarks;
    let mut random = Random(11);
    for free in [marks.low, marks.low + 1, marks.high, u32::MAX] {
        let short = ZoneState { reclaiming: free > marks.high, ..supply(&bounds, free) };
        let mut learned = Model::<Adaptive>::new(bounds, AMPLE, vec![swing(10_000, 0, 0)]);
        learned.run(SECOND);
        let (mut adaptive, mut fixed) = (learned.cpus[0].policy, Still::new(&bounds));
        adaptive.pressure(EMPTY, &short);
        let (mut count, mut moved) = (0_u32, 0_u32);
        for _ in 0..50_000 {
            let up = random.below(1000) > (moved / 5000 % 2) * 400 + 300;
            moved += 1;
            if up {
                count += 1;
                let give = fixed.put(list(count, moved), 0, || short);
                assert_eq!(give, adaptive.put(list(count, moved), 0, || short));
                count -= give;
            } else if count == 0 {
                let blocks = fixed.refill(list(0, moved), 0, &short);
                assert_eq!(blocks, adaptive.refill(list(0, moved), 0, &short));
                adaptive.contended(&short);
                count = blocks - 1;
            } else {
                count -= 1;
            }
            assert_eq!((adaptive.high(), adaptive.batch(&bounds)), (fixed.high(), fixed.batch(&bounds)));
        }
    }
}

#[test]
fn other_orders_are_tuned_as_pages_are() {
    let bounds = limits(1 << 22, 2);
    let plenty = supply(&bounds, u32::MAX);
    for (order, first) in [(0, 63), (1, 31), (2, 15), (3, 7), (9, 1)] {
        let mut adaptive = Adaptive::new(&bounds);
        let (mut moved, mut refills) = (0_u32, Vec::new());
        for _ in 0..8 {
            refills.push(adaptive.refill(list(0, moved), order, &plenty));
            moved += (refills.last().unwrap() - 1) << order;
        }
        assert!(refills[0] == first.max(2).min(bounds.fixed.high >> order), "{refills:?}");
        assert!(refills.is_sorted() && refills[7] == (bounds.largest() >> order).max(2), "{refills:?}");
        let (_, model) = measure::<Adaptive>(bounds, vec![swing(20_480, order, 0)], SECOND, SECOND);
        let high = model.cpus[0].policy.high();
        assert!((17_000..24_000).contains(&high), "order {order}: {high}");
    }
}
