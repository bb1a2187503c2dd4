//! Known bugs of earlier page allocators, each with a test that reproduces its conditions.
//!
//! A test's name begins with the bug's id. The tests take the locks themselves, to stop a holder at
//! any place. Bugs of parts that the page layer does not have are left out: sheaves allocated from
//! the cache they serve (B4), barns of nodes (B5 in part), objects in sheaves (B2 in part), strides
//! (B7).

use crate::machine::{Held, Opened, give, shape, take_block, take_run};
use crate::page_lists::Why;
use crate::trim::{Drain, DrainSum};
use crate::units::Exhausted;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use neap_base::{Order, Pfn};
use neap_testing::probe::{Probe, at_call};
use neap_testing::virtual_platform::{Call, Virtual};
use std::boxed::Box;
use std::vec::Vec;

fn listed<P: neap_base::Platform>(o: &Opened<'_, P>, cpu: usize, order: u8, count: u64) {
    Virtual::run_on(cpu);
    let held: Vec<Held> = (0..count).map(|stamp| take_block(o, order, stamp).unwrap()).collect();
    held.into_iter().for_each(|held| give(o, held));
}

/// D1: An interrupt inside a drain allocated and freed through the lists that were being drained.
#[test]
fn d1_signal_handler_under_list_lock_bypasses_the_lists() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    listed(&o, 0, 0, 50);
    let guard = o.pages.lists.own(0).unwrap();
    let before = o.pages.statistics().zone_locks;
    // On the holder's own thread, like a signal handler. It must neither deadlock nor access the
    // lists.
    let held: Vec<Held> = (0..20).map(|n| take_block(&o, (n % 4) as u8, n).unwrap()).collect();
    held.into_iter().for_each(|held| give(&o, held));
    assert_eq!(o.pages.drain_cpu(&machine, 0), Drain::Skipped);
    drop(guard);
    let statistics = o.pages.statistics();
    assert_eq!((statistics.list_busy, statistics.zone_locks - before), (40, 40 + 1));
    o.pages.verify().unwrap();
}

/// D2: A thread that unlocked in the middle went on with the lists of its previous CPU.
#[test]
fn d2_thread_migrating_at_every_step_uses_the_right_lists() {
    for wander in [1, 2, 3] {
        let machine = Probe { wander, ..Probe::new(Virtual::new(4096, 5)) };
        let o = Opened::new(&machine, &shape(None)).unwrap();
        let mut held = Vec::new();
        for round in 0..400 {
            held.push(take_block(&o, (round % 4) as u8, round).unwrap());
            if round % 3 == 2 {
                give(&o, held.swap_remove(round as usize % held.len()));
            }
            if round % 20 == 0 {
                o.pages.verify().unwrap();
            }
        }
        assert!((0..5).filter(|cpu| o.pages.listed_on(*cpu).unwrap() > 0).count() > 1);
        held.into_iter().for_each(|held| give(&o, held));
        o.pages.verify().unwrap();
    }
}

/// D3: Two thousand pages were freed under one hold of the zone's mutex.
#[test]
fn d3_no_hold_of_the_zone_moves_more_than_a_batch() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    listed(&o, 0, 0, 500);
    let (before, batch) = (o.pages.statistics(), o.pages.lists.limits.now().fixed.batch);
    assert_eq!(o.pages.drain_cpu(&machine, 0), Drain::Drained(before.listed));
    let after = o.pages.statistics();
    assert_eq!(after.zone_locks - before.zone_locks - 1, u64::from(before.listed.div_ceil(batch)));
}

/// D4: A count did not match its lists, so a bulk free searched for pages for ever.
#[test]
fn d4_counts_follow_the_lists_after_every_operation() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let mut held = Vec::new();
    for round in 0..1500_u64 {
        match round % 7 {
            0..4 => held.push(take_block(&o, (round % 4) as u8, round).unwrap()),
            4 if round % 70 == 4 => drop(o.pages.drain_cpu(&machine, 0)),
            _ if !held.is_empty() => give(&o, held.swap_remove(round as usize * 31 % held.len())),
            _ => {}
        }
        o.pages.lists.verify(o.pages.frames()).unwrap();
    }
    held.into_iter().for_each(|held| give(&o, held));
    assert_eq!(o.pages.lists.verify(o.pages.frames()), Ok(o.pages.statistics().listed));
}

/// D5: A drain looked at the lists without their lock and missed one that was being filled.
#[test]
fn d5_draining_visits_lists_that_look_empty() {
    let machine = Virtual::new(4096, 4);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    (0..4).for_each(|cpu| listed(&o, cpu, 0, 1));
    let all: u32 = (0..4).map(|cpu| o.pages.listed_on(cpu).unwrap()).sum();
    assert_eq!(o.pages.drain_all(&machine), DrainSum { pages: all, held: 0 });
    o.pages.verify().unwrap();
}

/// D6: Lists were told to keep less and drained in the wrong order. A CPU that had read the old
/// size went on filling its list.
#[test]
fn d6_no_list_is_over_its_new_size_once_it_was_told() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let fixed = o.pages.lists.limits.now().fixed.high;
    for round in 0..20 {
        o.pages.set_reclaiming(false);
        let mut rounds = 0;
        while o.pages.statistics().list_high < 2 * fixed {
            listed(&o, 0, 0, 3000);
            listed(&o, 1, 0, 3000);
            rounds += 1;
            assert!(rounds < 1000, "bursts make lists larger");
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for cpu in 0..2 {
                let (o, stop) = (&o, &stop);
                scope.spawn(move || {
                    while !stop.load(Relaxed) {
                        listed(o, cpu, 0, 900 + round);
                    }
                });
            }
            std::thread::yield_now();
            o.pages.set_reclaiming(true);
            std::thread::yield_now();
            stop.store(true, Relaxed);
        });
        // If its owner held a list at that moment, the next tick tells the list.
        o.pages.tick(&machine);
        assert!((0..2).all(|cpu| o.pages.listed_on(cpu).unwrap() <= fixed + 7));
    }
    o.pages.verify().unwrap();
}

/// D8: A property of a page was recorded when the page was put into a list. It was wrong when the
/// page was taken out.
#[test]
fn d8_page_state_is_read_again_when_it_leaves_the_list() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    // The refill lists a batch of fresh pages. One of them is handed out and written to.
    let block = take_block(&o, 0, 1).unwrap();
    assert!(o.pages.listed_on(0).unwrap() > 1);
    give(&o, block);
    assert!(matches!(o.pages.drain_cpu(&machine, 0), Drain::Drained(2..)));
    assert_eq!(o.pages.statistics().backed_free, 1, "the others are as fresh as they were");
    let one = o.pages.allocate_block(&machine, Order(0)).unwrap();
    let next = o.pages.allocate_block(&machine, Order(0)).unwrap();
    assert!(!one.zero && next.zero, "the one that was written to comes first");
    o.pages.free_block(&machine, one.pfn, Order(0));
    o.pages.free_block(&machine, next.pfn, Order(0));
    // Released while it is in no list, so it is fresh again.
    assert_eq!(o.pages.release_all(&machine).released, 2);
    assert!(o.pages.allocate_block(&machine, Order(0)).unwrap().zero);
}

/// D9: Large blocks stayed, cold, with the CPU that freed them, while the CPU that allocates them
/// went to the zone each time.
#[test]
fn d9_blocks_of_order_3_that_cross_cpus_do_not_pile_up() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let exchange = |bursts: u64| {
        let before = o.pages.statistics().zone_locks;
        for stamp in 0..bursts {
            Virtual::run_on(0);
            let held: Vec<Held> = (0..16).map(|_| take_block(&o, 3, stamp).unwrap()).collect();
            Virtual::run_on(1);
            held.into_iter().for_each(|held| give(&o, held));
        }
        o.pages.statistics().zone_locks - before - 1
    };
    exchange(500);
    let (pages, locks) = (16 * 8 * 1000, exchange(1000));
    let largest = u64::from(o.pages.lists.limits.now().largest());
    assert!(locks <= 2 * (pages / largest + 1), "{locks} holds for {pages} pages");
    // A second after the stream has stopped, its pages are gone from the lists.
    (0..5).for_each(|_| {
        machine.advance(250_000_000);
        o.pages.tick(&machine);
    });
    assert_eq!((o.pages.listed_on(0), o.pages.listed_on(1)), (Some(0), Some(0)));
    o.pages.verify().unwrap();
}

/// D11: A free that could not lock its list put the page where neither allocations nor drains found
/// it.
#[test]
fn d11_what_is_freed_past_a_held_list_is_free_at_once() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(Some(2048))).unwrap();
    let held: Vec<Held> = core::iter::from_fn(|| take_block(&o, 0, 2).ok()).collect();
    assert_eq!(held.len(), 2048);
    let guard = o.pages.lists.own(0).unwrap();
    held.into_iter().for_each(|held| give(&o, held));
    assert_eq!(o.pages.drain_all(&machine), DrainSum { pages: 0, held: 1 }, "the list is held, and empty");
    let all = take_run(&o, 2048, 1, 3).expect("every page, though the list is still held");
    drop(guard);
    give(&o, all);
    o.pages.verify().unwrap();
}

/// D10: A drain waited for an owner that was preempted.
#[test]
fn d10_a_holder_that_does_not_run_is_skipped_and_reported() {
    let machine = Virtual::new(4096, 3);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    (0..3).for_each(|cpu| listed(&o, cpu, 0, 40));
    let guard = o.pages.lists.own(1).unwrap();
    assert_eq!(o.pages.drain_cpu(&machine, 1), Drain::Skipped);
    let DrainSum { pages: drained, held: skipped } = o.pages.drain_all(&machine);
    assert!(drained > 0 && skipped == 1);
    let report = o.pages.tick(&machine);
    assert!(report.skipped == 1 && report.left, "what was skipped is not forgotten: {report:?}");
    assert!(o.pages.release_all(&machine).left);
    drop(guard);
    assert!(!o.pages.release_all(&machine).left);
    o.pages.verify().unwrap();
}

/// B1: Allocating on one CPU and freeing on another took the shared lock every time.
#[test]
fn b1_pages_that_cross_cpus_use_the_zone_once_a_batch() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let exchange = |rounds| {
        let before = o.pages.statistics().zone_locks;
        for stamp in 0..rounds {
            Virtual::run_on(0);
            let block = take_block(&o, 0, stamp).unwrap();
            Virtual::run_on(1);
            give(&o, block);
        }
        o.pages.statistics().zone_locks - before - 1
    };
    // Until the batches have grown and fresh memory is used up.
    exchange(10_000);
    let (rounds, largest) = (30_000, o.pages.lists.limits.now().largest());
    let locks = exchange(rounds);
    assert_eq!(o.pages.statistics().list_batch, largest);
    assert!(locks <= 2 * (rounds / u64::from(largest) + 1), "{locks} holds of the zone");
    o.pages.verify().unwrap();
}

/// B2: A refill that failed half-way lost its pages.
#[test]
fn b2_a_refill_of_any_size_loses_nothing() {
    let machine = Virtual::new(4096, 1);
    for budget in [9000, 9001, 9040, 9062] {
        let o = Opened::new(&machine, &shape(Some(budget))).unwrap();
        let first = take_run(&o, 8990, 1, 1).unwrap();
        let held: Vec<Held> = core::iter::from_fn(|| take_block(&o, 0, 2).ok()).collect();
        assert_eq!(held.len() as u32, budget - 8990);
        held.into_iter().for_each(|held| give(&o, held));
        give(&o, first);
        o.pages.verify().unwrap();
    }
}

/// B3: A flush was skipped silently because it only tried the lock.
#[test]
fn b3_what_a_flush_could_not_take_is_told() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    (0..2).for_each(|cpu| listed(&o, cpu, 1, 30));
    let kept = o.pages.listed_on(1).unwrap();
    let guard = o.pages.lists.own(1).unwrap();
    let report = o.pages.release_all(&machine);
    assert_eq!((report.skipped, report.left), (1, true));
    assert!(report.drained > 0 && report.released > 0);
    drop(guard);
    let report = o.pages.release_all(&machine);
    assert_eq!((report.skipped, report.drained, report.left), (0, kept, false));
    o.pages.verify().unwrap();
}

/// B5: A CPU that came online late had no lists, and the code did not check.
#[test]
fn b5_a_cpu_beyond_the_table_shares_the_last_lists() {
    let machine = Probe { shift: 1000, ..Probe::new(Virtual::new(4096, 2)) };
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let held: Vec<Held> = (0..100).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
    held.into_iter().for_each(|held| give(&o, held));
    assert_eq!(o.pages.listed_on(0), Some(0));
    assert!(o.pages.listed_on(1).unwrap() > 0);
    o.pages.verify().unwrap();
}

/// B6: A sheaf on its way was seen neither by the flush nor by a thread that waited for it.
#[test]
fn b6_allocation_about_to_fail_waits_for_chains_in_flight() {
    let machine = Box::leak(Box::new(Probe::new(Virtual::new(4096, 1))));
    let o = Box::leak(Box::new(Opened::new(machine, &shape(Some(40_000))).unwrap()));
    let o: &'static Opened<'static, Probe> = o;
    listed(o, 0, 0, 50);
    let listed_pages = o.pages.listed_on(0).unwrap();
    let rest = take_run(o, 40_000 - listed_pages, 1, 1).unwrap();
    // The pages are cut off the lists, and not in the zone yet.
    let detached = o.pages.lists.detach(o.pages.frames(), &o.pages.zone, 0, Why::Wanted).unwrap();
    assert_eq!(detached.pages, listed_pages);
    let chain = detached.chains[0];
    *machine.on_pause.lock().unwrap() = Some(at_call(3, move || {
        o.pages.zone.give_chain(chain, Order(0), 63);
        o.pages.zone.arrive(listed_pages);
    }));
    let run = take_run(o, listed_pages, 1, 2).expect("the pages that were under way");
    assert_eq!(machine.pauses.load(Relaxed), 3);
    // If no pages travel, there is no reason to wait.
    assert_eq!(o.pages.allocate_run(machine, 1, 1), Err(Exhausted));
    assert_eq!(machine.pauses.load(Relaxed), 3);
    [run, rest].into_iter().for_each(|held| give(o, held));
    o.pages.verify().unwrap();
    // SAFETY: the test is over, and nothing of the pages is used any more.
    unsafe { o.pages.close(machine) };
}

/// B8: A container filled for one CPU was installed on another without a check.
#[test]
fn b8_a_refill_that_migrates_lands_where_the_thread_is_now() {
    // Every second query of the CPU returns the other one: the refill begins on one and ends on the
    // other.
    let machine = Probe { wander: 1, ..Probe::new(Virtual::new(4096, 2)) };
    let o = Opened::new(&machine, &shape(None)).unwrap();
    Virtual::run_on(0);
    let block = take_block(&o, 0, 1).unwrap();
    let batch = o.pages.lists.limits.now().fixed.batch;
    assert_eq!((o.pages.listed_on(0), o.pages.listed_on(1)), (Some(0), Some(batch - 1)));
    give(&o, block);
    o.pages.verify().unwrap();
}

/// B9: A failed try of the lock was repeated in a context that may not wait.
#[test]
fn b9_a_free_that_finds_its_list_taken_does_not_wait() {
    let machine = Probe::new(Virtual::new(4096, 1));
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let held: Vec<Held> = (0..30).map(|stamp| take_block(&o, 2, stamp).unwrap()).collect();
    let guard = o.pages.lists.own(0).unwrap();
    let (before, free) = (o.pages.statistics().list_busy, o.pages.statistics().free);
    held.into_iter().for_each(|held| give(&o, held));
    // The statistics try the list's lock as well, so only the frees are counted.
    assert_eq!(machine.pauses.load(Relaxed), 0);
    assert_eq!(o.pages.statistics().list_busy - before, 30);
    assert_eq!(o.pages.statistics().free - free, 120);
    drop(guard);
    o.pages.verify().unwrap();
}

/// B10: A loop around a failed try took a fresh slab and threw it away in every pass.
#[test]
fn b10_refill_into_a_locked_list_returns_its_chain_once() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let before = o.pages.statistics();
    let chain = o.pages.zone.lock().buddy.take_chain(Order(0), 63);
    let guard = o.pages.lists.own(0).unwrap();
    let Err(back) = o.pages.lists.fill(o.pages.frames(), 0, chain, Order(0), false) else {
        panic!("the list is taken")
    };
    assert_eq!(back, chain);
    o.pages.zone.give_chain(back, Order(0), 63);
    // The bypass takes exactly one block, under one hold of the zone's mutex.
    let locks = o.pages.zone.lock().locks;
    let block = take_block(&o, 0, 1).unwrap();
    assert_eq!(o.pages.zone.lock().locks - locks, 2);
    drop(guard);
    assert_eq!(o.pages.statistics().used, 1);
    give(&o, block);
    assert_eq!(o.pages.statistics().backed_free + o.pages.statistics().listed, before.backed_free + 1);
    o.pages.verify().unwrap();
}

/// A6: Time wrote a list's state without its lock and lost its owner's changes.
#[test]
fn a6_decay_and_owners_lose_nothing_to_each_other() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for cpu in 0..2 {
            let (o, stop) = (&o, &stop);
            scope.spawn(move || {
                Virtual::run_on(cpu);
                for round in 0..3000_u64 {
                    let held: Vec<Held> =
                        (0..round % 40).map(|n| take_block(o, (n % 4) as u8, round).unwrap()).collect();
                    held.into_iter().for_each(|held| give(o, held));
                }
                stop.store(true, Relaxed);
            });
        }
        while !stop.load(Relaxed) {
            o.pages.tick(&machine);
        }
    });
    o.pages.verify().unwrap();
    assert_eq!(o.pages.statistics().used, o.pages.statistics().listed);
}

/// A7: Pages that were not used for a whole interval are released; pages in use stay.
#[test]
fn a7_lists_of_idle_cpus_decay_from_afar() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    (0..2).for_each(|cpu| listed(&o, cpu, 0, 60));
    assert_eq!(o.pages.tick(&machine).drained, 0);
    listed(&o, 0, 0, 1);
    let report = o.pages.tick(&machine);
    assert!(report.drained > 0 && report.left);
    assert!(o.pages.listed_on(0).unwrap() > 0 && o.pages.listed_on(1) == Some(0));
    assert!(o.pages.tick(&machine).drained > 0);
    assert_eq!(o.pages.listed_on(0), Some(0));
}

/// P9: After growth that fails in the middle of mapping its tables, the next one succeeds.
#[test]
fn p9_a_growth_that_fails_anywhere_leaves_nothing_half_done() {
    for fails in 0..14 {
        let machine = Virtual::new(4096, 1).with_scarce_address_space();
        let o = Opened::new(&machine, &shape(None)).unwrap();
        let first = take_run(&o, 1024, 1, 1).unwrap();
        machine.fail(Call::MapAt, fails, 1);
        let refused = o.pages.allocate_run(&machine, 200_000, 1);
        machine.fail(Call::MapAt, 0, 0);
        o.pages.verify().unwrap();
        let second = take_run(&o, 1024, 1, 2).unwrap();
        assert!(refused.is_ok() || fails < 11, "the growth makes at most eleven calls");
        if let Ok(run) = refused {
            assert!(run.zero && run.pfn != Pfn(0));
        }
        [first, second].into_iter().for_each(|held| give(&o, held));
        o.pages.verify().unwrap();
    }
}

/// Two threads that found the arena too small both extended it.
#[test]
fn late_growth_request_does_not_extend_the_arena_again() {
    let machine = Virtual::new(4096, 1).with_scarce_address_space();
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let seen = o.pages.frames().pages();
    for _ in 0..2 {
        o.pages.arena.grow(&machine, 0, 1, seen, |grown| o.pages.zone.add(grown)).unwrap();
        assert_eq!(o.pages.frames().pages(), seen + 1024);
        o.pages.verify().unwrap();
    }
}
