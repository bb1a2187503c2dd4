//! What `Adaptive` promises: tables for single events, bounds for any events, and the model for what takes time.
//!
//! Sits beside the policy and calls only what a list calls. Numbers that depend on the model's costs are compared with
//! those of `Fixed` under the same program, printed by `--nocapture`, never asserted exactly.

use super::fixed::Still;
use super::model_tests::{Costs, Model, Op, Program, Random, SECOND, TICK};
use super::tests::{limits, supply};
use super::{Adaptive, Limits, List, Policy, Supply};
use proptest::prelude::*;
use std::boxed::Box;
use std::vec;
use std::vec::Vec;

/// 64 GiB of pages: memory to spare.
const AMPLE: u32 = 1 << 24;
const EMPTY: List = List { count: 0, moved: 0 };

fn list(count: u32, moved: u32) -> List {
    List { count, moved }
}

/// Takes and gives back `pages` pages, over and over, resting after each round.
fn swing(pages: u32, order: u8, rest: u64) -> Program {
    let (mut step, blocks) = (0, pages >> order);
    Box::new(move || {
        step = (step + 1) % (2 * blocks + 1);
        match step {
            0 => Op::Rest(rest),
            step if step <= blocks => Op::Take(order),
            _ => Op::Give(order),
        }
    })
}

/// Goes up to `most` blocks and down to none, three steps back for seven ahead.
fn mix(most: u32, order: u8, seed: u64) -> Program {
    let (mut random, mut held, mut up) = (Random(seed), 0, true);
    Box::new(move || {
        up = if up { held < most } else { held == 0 };
        let take = held == 0 || held < most && up == (random.below(10) < 7);
        held = if take { held + 1 } else { held - 1 };
        if take { Op::Take(order) } else { Op::Give(order) }
    })
}

/// `first` for so many operations, then something else.
fn then(mut first: Program, operations: u32, mut second: Program) -> Program {
    let mut left = operations;
    Box::new(move || {
        left = left.saturating_sub(1);
        if left > 0 { first() } else { second() }
    })
}

fn only(op: Op) -> Program {
    Box::new(move || op)
}

/// Warm-up, then what the given time costs.
fn measure<T: Policy>(bounds: Limits, programs: Vec<Program>, warm: u64, time: u64) -> (Costs, Model<T>) {
    let mut model = Model::new(bounds, AMPLE, programs);
    model.run(warm).costs();
    let costs = model.run(time).costs();
    (costs, model)
}

/// The same programs under `Fixed` and `Adaptive`; prints both.
fn compare(name: &str, bounds: Limits, programs: impl Fn() -> Vec<Program>, warm: u64, time: u64) -> (Costs, Costs) {
    let (fixed, _) = measure::<Still>(bounds, programs(), warm, time);
    let (adaptive, _) = measure::<Adaptive>(bounds, programs(), warm, time);
    for (policy, costs) in [("fixed", fixed), ("adaptive", adaptive)] {
        std::println!(
            "{name:24} {policy:9} {:6} locks/M  {:7} ms waited  {:6} pages held  {:5} in one call",
            costs.per_million(),
            costs.waited / 1_000_000,
            costs.average_held(),
            costs.most_moved
        );
    }
    (fixed, adaptive)
}

#[test]
fn the_state_of_a_list_is_less_than_a_cache_line() {
    assert!(size_of::<Adaptive>() <= 64);
    assert!(size_of::<super::Upstream>() <= 64 && size_of::<super::Depth>() <= 64);
}

#[test]
fn a11_straight_refills_double_the_batch_and_traffic_both_ways_halves_it() {
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
fn straight_frees_double_the_batch_and_then_collect_it_before_they_give_it() {
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
fn what_was_given_and_asked_for_again_is_kept_the_next_time() {
    let bounds = limits(1 << 20, 1);
    let programs = || vec![swing(20_000, 0, 0)];
    let mut model = Model::<Adaptive>::new(bounds, AMPLE, programs());
    // Two swings of 20 ms teach it, the third needs nothing.
    model.run(TICK);
    let high = model.cpus[0].policy.high();
    assert!((19_000..22_000).contains(&high), "{high}");
    model.costs();
    model.run(TICK);
    let costs = model.costs();
    assert!(costs.locks < 30, "{costs:?}");
}

#[test]
fn a_list_learns_what_a_swing_needs_and_no_more() {
    let bounds = limits(1 << 20, 1);
    let (costs, model) = measure::<Adaptive>(bounds, vec![swing(20_000, 0, 0)], 4 * SECOND, 4 * SECOND);
    let high = model.cpus[0].policy.high();
    assert!((20_000 - bounds.fixed.batch..20_000 + 2 * bounds.fixed.batch).contains(&high), "{high}");
    // Less is tried seldom, and costs little.
    assert!(costs.locks < 20, "{costs:?}");
}

#[test]
fn blocks_of_another_order_that_lie_in_a_small_list_do_not_keep_it_from_learning() {
    let bounds = limits(1 << 20, 2);
    let plenty = supply(&bounds, u32::MAX);
    let mut adaptive = Adaptive::new(&bounds);
    // In the list for good: more than half of what is kept at first.
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
fn a_block_of_another_order_beside_a_run_of_pages_comes_in_a_small_batch_and_does_not_end_the_run() {
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
fn pages_that_come_back_late_are_kept_where_the_lock_is_busy_and_where_it_is_not_cost_a_visit() {
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
fn only_taking_and_only_giving_without_waiting_teach_nothing() {
    let bounds = limits(1 << 20, 2);
    for op in [Op::Take(0), Op::Give(0)] {
        let (costs, model) = measure::<Adaptive>(bounds, vec![only(op)], TICK, 4 * TICK);
        let high = model.cpus[0].policy.high();
        assert!(high <= bounds.largest().max(bounds.fixed.high), "{high}");
        assert!(costs.operations / costs.locks >= u64::from(bounds.largest()) - 1, "{costs:?}");
    }
}

#[test]
fn a_busy_lock_makes_it_grow_where_that_helps_and_not_for_one_way_streams() {
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
fn a_run_of_frees_longer_than_the_list_makes_it_small_again() {
    let bounds = limits(1 << 20, 2);
    let program = then(swing(20_000, 0, 0), 600_000, only(Op::Give(0)));
    let mut model = Model::<Adaptive>::new(bounds, AMPLE, vec![program]);
    model.run(TICK);
    assert!(model.cpus[0].policy.high() > 15_000, "the swings end a little later: {:?}", model.cpus[0].policy);
    model.run(TICK);
    assert!(model.held() <= bounds.largest().max(bounds.fixed.high), "{}", model.held());
}

#[test]
fn fault_up_and_free_down_on_many_cpus() {
    let bounds = limits(AMPLE, 24);
    let programs = || (0..24).map(|_| swing(32_768, 0, 0)).collect();
    let (fixed, adaptive) = compare("fault up, free down x24", bounds, programs, SECOND, SECOND);
    assert!(adaptive.per_million() * 20 <= fixed.per_million());
    assert!(adaptive.operations > fixed.operations && adaptive.waited * 100 <= fixed.waited);
}

#[test]
fn swings_of_twice_what_a_list_may_keep() {
    let bounds = limits(1 << 18, 2);
    for pages in [bounds.ceiling * 3 / 2, bounds.ceiling * 2, bounds.ceiling * 5] {
        let programs = || vec![swing(pages, 0, 0), swing(pages + 5000, 0, 0)];
        let (fixed, adaptive) = compare("swings over the cap", bounds, programs, SECOND, SECOND);
        assert!(adaptive.per_million() * 20 <= fixed.per_million(), "{pages}");
    }
}

#[test]
fn an_oscillation_about_once_a_second_as_of_a_kernel_build() {
    let bounds = limits(1 << 21, 4);
    let slowly = |mut first: Program, pages: u64| -> Program {
        let mut rest = false;
        Box::new(move || {
            rest = !rest;
            if rest { Op::Rest(SECOND / pages / 2 - 500) } else { first() }
        })
    };
    let programs = || (0..4).map(|cpu| slowly(swing(26_000 + 3000 * cpu, 0, 0), 30_000)).collect();
    let (fixed, adaptive) = compare("an oscillation a second", bounds, programs, 6 * SECOND, 20 * SECOND);
    assert!(adaptive.per_million() * 10 <= fixed.per_million());
}

#[test]
fn a_mix_settles_where_the_zone_is_hardly_needed_and_not_far_above() {
    let bounds = limits(1 << 20, 2);
    for (most, order) in [(3000, 0), (1500, 1), (800, 3)] {
        let programs = || vec![mix(most, order, 7)];
        let (fixed, adaptive) = compare("mix", bounds, programs, 4 * SECOND, 2 * SECOND);
        assert!(adaptive.per_million() * 20 <= fixed.per_million(), "{most} of order {order}");
        let (_, model) = measure::<Adaptive>(bounds, programs(), 6 * SECOND, TICK);
        let high = model.cpus[0].policy.high();
        assert!(high <= (most << order) * 3 / 2, "{high} for a swing of {}", most << order);
    }
}

#[test]
fn a_small_mix_stays_at_the_fixed_size_and_its_batch() {
    let bounds = limits(1 << 20, 2);
    let (costs, model) = measure::<Adaptive>(bounds, vec![mix(200, 0, 3)], SECOND, 5 * SECOND);
    assert!(
        model.cpus[0].policy.high() == bounds.fixed.high && costs.most_moved <= 2 * bounds.fixed.batch,
        "{costs:?}"
    );
    assert!(costs.locks < 20, "{costs:?}");
}

#[test]
fn a_producer_and_a_consumer_visit_the_zone_twice_per_largest_batch() {
    let bounds = limits(1 << 20, 2);
    let stream = |op| then(only(op), 4_000_000, only(Op::Rest(SECOND)));
    let programs = || vec![stream(Op::Give(0)), stream(Op::Take(0))];
    let (fixed, adaptive) = compare("producer and consumer", bounds, programs, TICK, SECOND);
    let batches = adaptive.operations / 2 / u64::from(bounds.largest());
    assert!(adaptive.locks + adaptive.tick_locks <= 2 * batches + 4, "{adaptive:?} {batches}");
    assert!(fixed.per_million() > 10 * adaptive.per_million());
    let (_, mut model) = measure::<Adaptive>(bounds, programs(), SECOND, TICK);
    assert!(model.cpus[0].list.count > 0);
    let end = 4_000_000 * 500 / SECOND * SECOND + SECOND / 2;
    model.run(end - model.now);
    model.run(SECOND);
    assert_eq!(model.held(), 0, "a second after the stream's end");
}

#[test]
fn bursts_three_seconds_apart_are_served_and_leave_nothing_in_between() {
    let bounds = limits(1 << 20, 2);
    let programs = || vec![swing(50_000, 0, 3 * SECOND), swing(9_000, 3, 3 * SECOND)];
    let (fixed, adaptive) = compare("bursts 3 s apart", bounds, programs, 4 * SECOND, 12 * SECOND);
    assert!(adaptive.per_million() * 10 <= fixed.per_million());
    assert!(adaptive.average_held() <= fixed.average_held() * 4);
}

#[test]
fn five_seconds_after_the_last_use_nothing_is_remembered() {
    let bounds = limits(1 << 20, 2);
    for program in [swing(20_000, 0, 0), mix(9_000, 0, 5), only(Op::Give(0)), only(Op::Take(2)), mix(500, 3, 1)] {
        let programs = vec![then(program, 3_000_000, only(Op::End))];
        let mut model = Model::<Adaptive>::new(bounds, AMPLE, programs);
        model.run(2 * SECOND);
        let end = model.cpus[0].policy;
        while model.cpus[0].list.moved != 0 && model.held() > 0 || model.now < 4 * SECOND {
            model.run(TICK);
        }
        model.run(3 * SECOND);
        let policy = model.cpus[0].policy;
        assert!(policy.is_settled(&bounds), "{end:?} became {policy:?}");
        assert_eq!((policy.high(), policy.batch(&bounds)), (bounds.fixed.high, bounds.fixed.batch));
    }
}

#[test]
fn a_slow_list_gives_up_a_quarter_of_what_lies_idle_and_one_that_ticks_cannot_see_gives_nothing_of_it() {
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
        let short = Supply { reclaiming: free > marks.high, ..supply(&bounds, free) };
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
fn memory_that_runs_out_takes_the_lists_back_before_it_is_gone() {
    let budget = 1 << 18;
    let bounds = limits(budget, 4);
    let marks = bounds.watermarks;
    // Three CPUs learn, for a fifth of a second, and rest with full lists; then the fourth takes what there is.
    let swings = [9000_u32, 9500, 10_000];
    let learn = |pages| then(swing(pages, 0, 0), 10 * (2 * pages + 1) + 1, only(Op::Rest(SECOND)));
    let (mut left, mut rested) = (budget - marks.low + 186, false);
    let hoard = Box::new(move || match left {
        _ if !rested => {
            rested = true;
            Op::Rest(SECOND / 5)
        }
        0 => Op::End,
        _ => {
            left -= 1;
            Op::Take(0)
        }
    });
    let mut programs: Vec<Program> = swings.iter().map(|&pages| learn(pages)).collect();
    programs.push(hoard);
    let mut model = Model::<Adaptive>::new(bounds, budget, programs);
    let most = (0..6).map(|_| model.run(TICK).highs()).max().unwrap();
    let costs = model.costs();
    std::println!(
        "memory runs out: sizes up to {most}, at the low watermark ({}) up to {}",
        marks.low,
        costs.highs_at_low
    );
    assert!(most > 20_000 && most <= u64::from(budget / 8));
    assert!(0 < costs.highs_at_low && costs.highs_at_low <= u64::from(marks.low));
}

#[test]
fn a_size_that_the_user_chose_stays_and_0_keeps_nothing() {
    for size in [0, 1, 100, 3000] {
        let bounds = limits(1 << 20, 2).with_size(size);
        let (costs, model) = measure::<Adaptive>(bounds, vec![swing(20_000, 0, 0), mix(5000, 0, 9)], SECOND, SECOND);
        assert!(model.cpus.iter().all(|cpu| cpu.policy.high() == size && cpu.list.count <= size));
        assert!(costs.most_moved <= bounds.fixed.batch.max(1));
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

#[test]
fn frees_of_one_order_and_allocations_of_another_do_not_fill_the_list() {
    let bounds = limits(1 << 20, 2);
    let mut step = 0_u32;
    let program = Box::new(move || {
        step += 1;
        if step.is_multiple_of(9) { Op::Take(3) } else { Op::Give(0) }
    });
    let (_, model) = measure::<Adaptive>(bounds, vec![program], SECOND, SECOND);
    assert!(model.held() <= bounds.largest(), "{}", model.held());
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Take(u8),
    Give(u8),
    Contended,
    Decay(u32),
    Pressure,
    Free(u32),
    Reclaim(bool),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        12 => (0..4_u8).prop_map(Event::Take),
        12 => (0..4_u8).prop_map(Event::Give),
        2 => Just(Event::Contended),
        2 => (0..9_u32).prop_map(Event::Decay),
        1 => Just(Event::Pressure),
        1 => prop_oneof![0..3000_u32, 0..600_000_u32, Just(u32::MAX)].prop_map(Event::Free),
        1 => any::<bool>().prop_map(Event::Reclaim),
    ]
}

/// Bounds that hold whatever happens. Every event is repeated `times`, so that runs are long enough to mean something.
fn holds<T: Policy>(bounds: Limits, events: &[(Event, u16)], strict: bool) -> Result<(), TestCaseError> {
    let mut policy = T::new(&bounds);
    let mut now = supply(&bounds, u32::MAX);
    let (mut count, mut moved) = (0_u32, u32::MAX - 5000);
    let mut lengths = [0_u32; 4];
    let largest = if strict { bounds.largest() } else { bounds.fixed.batch << super::DOUBLINGS };
    for &(event, times) in events {
        for _ in 0..times {
            let mut give = 0;
            match event {
                Event::Take(order) => {
                    policy.asked(list(count, moved), order);
                    if let Some(less) = lengths[order as usize].checked_sub(1) {
                        lengths[order as usize] = less;
                        count -= 1 << order;
                        moved = moved.wrapping_add(1 << order);
                    } else {
                        let blocks = policy.refill(list(count, moved), order, &now);
                        prop_assert!(blocks >= 1 && blocks <= largest.max(2));
                        if strict && (now.reclaiming || now.free <= bounds.watermarks.high) {
                            prop_assert!(blocks << order <= bounds.fixed.batch.max(2 << order));
                        }
                        // As the list does: what it has no room for goes back.
                        let more = (blocks - 1) << order;
                        prop_assert!(!strict || count > policy.high() || count + more <= policy.high());
                        if count + more <= policy.high() {
                            lengths[order as usize] += blocks - 1;
                            count += more;
                        }
                    }
                }
                Event::Give(order) => {
                    lengths[order as usize] += 1;
                    count += 1 << order;
                    moved = moved.wrapping_add(1 << order);
                    give = policy.put(list(count, moved), order, || now);
                    prop_assert!(give <= count && (!strict || give <= bounds.largest().max(count)));
                }
                Event::Contended => policy.contended(&now),
                Event::Decay(quarters) => give = policy.decay(list(count, moved), &now, quarters),
                Event::Pressure => give = policy.pressure(list(count, moved), &now),
                Event::Free(free) => now.free = free,
                Event::Reclaim(on) => now.reclaiming = on,
            }
            prop_assert!(give <= count);
            let until = count - give;
            while count > until {
                let order = (0..4).max_by_key(|&order| lengths[order] << order).unwrap();
                lengths[order] -= 1;
                count -= 1 << order;
            }
            let told = !matches!(event, Event::Free(_) | Event::Reclaim(_));
            prop_assert!(policy.high() <= bounds.ceiling.max(bounds.fixed.high));
            if strict {
                prop_assert!(policy.batch(&bounds) <= bounds.largest());
                let acted = matches!(event, Event::Decay(_) | Event::Pressure) || give > 0;
                prop_assert!(!(told && acted) || policy.high() <= bounds.cap(&now));
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    #[test]
    fn bounds_hold_for_any_events(
        events in proptest::collection::vec((event(), 1..3000_u16), 1..60),
        managed in prop_oneof![0..3000_u32, 0..(1_u32 << 22), Just(u32::MAX)],
        cpus in prop_oneof![1..4_usize, 1..300_usize],
        size in proptest::option::weighted(0.2, 0..100_000_u32),
    ) {
        let bounds = limits(managed, cpus);
        let bounds = size.map_or(bounds, |size| bounds.with_size(size));
        holds::<Adaptive>(bounds, &events, true)?;
        holds::<Still>(bounds, &events, false)?;
        holds::<super::Upstream>(bounds, &events, false)?;
        holds::<super::Depth>(bounds, &events, false)?;
        holds::<super::hocko::Hocko>(bounds, &events, false)?;
        holds::<super::huang::Huang>(bounds, &events, false)?;
        holds::<super::gorman::Gorman>(bounds, &events, false)?;
    }
}
