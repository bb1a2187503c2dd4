//! `Adaptive` over time, by the model.
//!
//! Numbers that depend on the model's costs are not asserted exactly. They are compared with the
//! numbers of `Fixed` under the same program. `--nocapture` prints them.

use super::model_tests::{Model, Op, Program, SECOND, TICK};
use super::program_tests::{AMPLE, compare, measure, mix, only, swing, then};
use super::tests::limits;
use super::{Adaptive, Policy};
use std::boxed::Box;
use std::vec;
use std::vec::Vec;

#[test]
fn what_was_given_and_asked_for_again_is_kept_the_next_time() {
    let bounds = limits(1 << 20, 1);
    let programs = || vec![swing(20_000, 0, 0)];
    let mut model = Model::<Adaptive>::new(bounds, AMPLE, programs());
    // After two swings of 20 ms, the third one needs nothing.
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
    // Tries with less are rare and cost little.
    assert!(costs.locks < 20, "{costs:?}");
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
fn mixed_load_settles_with_few_zone_locks_and_bounded_high() {
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
fn producer_and_consumer_lock_zone_twice_per_largest_batch() {
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
fn bursts_3_s_apart_need_few_zone_locks_and_hold_few_pages() {
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
fn memory_that_runs_out_takes_the_lists_back_before_it_is_gone() {
    let budget = 1 << 18;
    let bounds = limits(budget, 4);
    let marks = bounds.watermarks;
    // Three CPUs learn for a fifth of a second and rest with full lists. Then the fourth takes the
    // free pages.
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
fn order_0_frees_with_order_3_allocations_do_not_fill_list() {
    let bounds = limits(1 << 20, 2);
    let mut step = 0_u32;
    let program = Box::new(move || {
        step += 1;
        if step.is_multiple_of(9) { Op::Take(3) } else { Op::Give(0) }
    });
    let (_, model) = measure::<Adaptive>(bounds, vec![program], SECOND, SECOND);
    assert!(model.held() <= bounds.largest(), "{}", model.held());
}
