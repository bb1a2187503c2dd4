//! Release: the pages that go, those that stay, the calls for it, and the state afterwards.

use crate::machine::{Held, Opened, PAGE_SIZES, give, resident, shape, take_block, take_run};
use neap_base::{Order, Platform};
use neap_pages::{Pages, Report, Shape};
use neap_testing::probe::{Probe, at_call, stop_once};
use neap_testing::virtual_platform::{Call, Virtual};

/// Ticks until nothing is left to do. Returns the sum of the reports.
fn settle<P: Platform>(pages: &Pages<P>, platform: &P) -> Report {
    let mut sum = Report { left: true, ..Report::default() };
    for _ in 0..2000 {
        let report = pages.tick(platform);
        pages.verify().unwrap();
        sum.released += report.released;
        sum.calls += report.calls;
        sum.failed += report.failed;
        sum.drained += report.drained;
        sum.left = report.left;
        if !report.left {
            break;
        }
    }
    sum
}

#[test]
fn burst_is_released_in_three_ticks_and_the_next_is_idle() {
    for size in PAGE_SIZES {
        for scarce in [false, true] {
            let machine = Virtual::new(size, 2);
            let machine = if scarce { machine.with_scarce_address_space() } else { machine };
            let o = Opened::new(&machine, &shape(None)).unwrap();
            let blocks: Vec<Held> = (0..300).map(|n| take_block(&o, (n % 6) as u8, n).unwrap()).collect();
            let runs: Vec<Held> = (1..30).map(|n| take_run(&o, n * 7, 1, n.into()).unwrap()).collect();
            blocks.into_iter().chain(runs).for_each(|held| give(&o, held));
            assert!(resident(o.pages.base(), o.pages.limit().min(256 << 20)) > 300 * 4096);
            let reports: Vec<Report> = (0..3).map(|_| o.pages.tick(&machine)).collect();
            assert!(reports[0].left && reports[1].left && !reports[2].left, "{reports:?}");
            assert_eq!(resident(o.pages.base(), o.pages.limit().min(256 << 20)), 0);
            let statistics = o.pages.statistics();
            assert_eq!((statistics.backed_free, statistics.listed, statistics.used), (0, 0, 0));
            let report = o.pages.tick(&machine);
            assert_eq!(report, Report::default());
            o.pages.verify().unwrap();
        }
    }
}

/// A block is taken and freed whenever the release asks whether to stop.
#[test]
fn a_release_of_everything_ends_while_others_free() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let held: Vec<Held> = (0..60).map(|n| take_run(&o, 100, 1, n).unwrap()).collect();
    let (go, stay): (Vec<_>, Vec<_>) = held.into_iter().enumerate().partition(|(n, _)| n % 2 == 0);
    go.into_iter().for_each(|(_, held)| give(&o, held));
    let (looks, before) = (core::cell::Cell::new(0), o.pages.statistics().backed_free);
    let report = o.pages.release_all_until(&machine, &|| {
        let again = take_run(&o, 100, 1, 7).unwrap();
        give(&o, again);
        looks.set(looks.get() + 1);
        looks.get() == 1000
    });
    assert!(
        looks.get() < 1000 && report.released > 0 && report.released <= before + report.drained,
        "{looks:?} {before} {report:?}"
    );
    stay.into_iter().for_each(|(_, held)| give(&o, held));
    assert!(!o.pages.release_all(&machine).left);
    o.pages.verify().unwrap();
}

/// Needs by chunks and by blocks both count.
#[test]
fn what_a_program_reuses_every_interval_stays() {
    for lengths in [&[1500, 500][..], &[400; 5]] {
        let machine = Probe::new(Virtual::new(4096, 1));
        let o = Opened::new(&machine, &shape(None)).unwrap();
        let burst = take_run(&o, 6000, 1, 1).unwrap();
        give(&o, burst);
        for interval in 0..10 {
            // The same 2000 pages are needed in every interval, for a while.
            let held: Vec<Held> = lengths.iter().map(|pages| take_run(&o, *pages, 1, interval).unwrap()).collect();
            held.into_iter().for_each(|held| give(&o, held));
            let report = o.pages.tick(&machine);
            assert!(interval < 3 || report.calls == 0, "{report:?} in interval {interval}");
            assert!(o.pages.statistics().backed_free >= 2000);
            o.pages.verify().unwrap();
        }
        assert!(o.pages.statistics().backed_free < 2000 + 112 + 512, "{:?}", o.pages.statistics());
        settle(&o.pages, &machine);
        assert_eq!(o.pages.statistics().backed_free, 0);
    }
}

#[test]
fn chunks_go_in_few_large_calls() {
    let machine = Probe::new(Virtual::new(4096, 1));
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let run = take_run(&o, 40 * 1024, 1, 1).unwrap();
    give(&o, run);
    let report = o.pages.release_all(&machine);
    assert_eq!((report.released, report.failed, report.left), (40 * 1024, 0, false));
    let calls = machine.released.lock().unwrap();
    assert_eq!(calls.iter().filter(|length| **length == 32 << 20).count(), 5, "{calls:?}");
    // One more for each chunk: the frames of free chunks hold no information.
    assert_eq!((calls.len(), report.calls), (10, 10));
    assert!(machine.scattered.lock().unwrap().is_empty());
}

#[test]
fn no_call_is_longer_than_its_bound_on_large_pages() {
    let machine = Probe::new(Virtual::new(65536, 1));
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let block = take_block(&o, 10, 1).unwrap();
    give(&o, block);
    assert_eq!(o.pages.release_all(&machine).released, 1024);
    assert!(machine.released.lock().unwrap().iter().all(|length| *length <= 32 << 20));
    o.pages.verify().unwrap();
}

/// Holds every second page, so that the others are free and alone.
fn riddled<P: Platform>(o: &Opened<'_, P>, count: u64) -> Vec<Held> {
    let held: Vec<Held> = (0..count).map(|n| take_block(o, 0, n).unwrap()).collect();
    let (keep, go): (Vec<Held>, Vec<Held>) = held.into_iter().partition(|held| held.pfn.0 % 2 == 1);
    go.into_iter().for_each(|held| give(o, held));
    keep
}

#[test]
fn scattered_pages_go_many_by_one_call() {
    let machine = Probe::new(Virtual::new(4096, 1));
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let held = riddled(&o, 4000);
    let before = resident(o.pages.base(), 32 << 20);
    let report = o.pages.release_all(&machine);
    assert!(report.released >= 1990 && report.calls <= 5, "{report:?}");
    let ranges: usize = machine.scattered.lock().unwrap().iter().map(Vec::len).sum();
    assert!(ranges >= 1990 && machine.scattered.lock().unwrap().iter().all(|call| call.len() <= 512));
    assert_eq!(before - resident(o.pages.base(), 32 << 20), report.released as usize * 4096);
    o.pages.verify().unwrap();
    held.into_iter().for_each(|held| give(&o, held));
    o.pages.verify().unwrap();
}

#[test]
fn without_scattered_calls_pages_go_one_by_one_and_rationed() {
    let machine = Probe::new(Virtual::new(4096, 1));
    machine.machine.fail(Call::ReleaseScattered, 0, usize::MAX);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let held = riddled(&o, 4000);
    o.pages.drain_all(&machine);
    o.pages.tick(&machine);
    let report = o.pages.tick(&machine);
    assert_eq!((report.released, report.calls, report.failed, report.left), (64, 65, 1, true));
    let report = o.pages.tick(&machine);
    assert_eq!((report.released, report.calls, report.failed), (64, 64, 0), "the refused way was tried again at once");
    let report = settle(&o.pages, &machine);
    assert!(!report.left && report.failed <= 2, "{report:?}");
    assert_eq!(o.pages.statistics().backed_free, 0);
    held.into_iter().for_each(|held| give(&o, held));
    let report = o.pages.release_all(&machine);
    assert!(!report.left, "an explicit call is not rationed: {report:?}");
    o.pages.verify().unwrap();
}

#[test]
fn p3_a_system_that_takes_nothing_back_is_left_in_peace() {
    let machine = Probe::new(Virtual::new(4096, 1));
    machine.machine.fail(Call::Release, 0, usize::MAX);
    machine.machine.fail(Call::ReleaseScattered, 0, usize::MAX);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let held = riddled(&o, 9000);
    let run = take_run(&o, 9000, 1, 1).unwrap();
    give(&o, run);
    let mut calls = 0;
    for tick in 0..200 {
        let report = o.pages.tick(&machine);
        assert_eq!(report.released, 0);
        assert!(tick < 3 || !report.left, "the maintenance thread would never sleep");
        calls += report.calls;
        o.pages.verify().unwrap();
    }
    assert!(calls > 0 && calls < 50, "{calls} calls");
    let backed = o.pages.statistics().backed_free;
    assert!(backed >= 9000 + 4000);
    // None of its memory may count as zero.
    let run = o.pages.allocate_run(&machine, 1000, 1).unwrap();
    assert!(!run.zero);
    o.pages.free_run(&machine, run.pfn, 1000);
    // Once the system accepts releases again, all of it goes.
    machine.machine.fail(Call::Release, 0, 0);
    machine.machine.fail(Call::ReleaseScattered, 0, 0);
    assert!(!o.pages.release_all(&machine).left);
    assert_eq!(o.pages.statistics().backed_free, 0);
    held.into_iter().for_each(|held| give(&o, held));
    o.pages.verify().unwrap();
}

#[test]
fn pages_that_were_released_are_zero_and_known_to_be() {
    for fails in [0, 1, 2, 3, 5, 8] {
        for size in PAGE_SIZES {
            let machine = Virtual::new(size, 1);
            let o = Opened::new(&machine, &shape(None)).unwrap();
            for round in 0..4 {
                machine.fail(Call::Release, fails, round);
                machine.fail(Call::ReleaseScattered, fails / 2, round);
                // `stamp` reads all of each page that comes as zero.
                let runs: Vec<Held> = (0..20).map(|n| take_run(&o, 1 + 37 * n as u32, 1, n).unwrap()).collect();
                let held = riddled(&o, 500);
                runs.into_iter().for_each(|held| give(&o, held));
                o.pages.release_all(&machine);
                o.pages.verify().unwrap();
                held.into_iter().for_each(|held| give(&o, held));
            }
            machine.fail(Call::Release, 0, 0);
            machine.fail(Call::ReleaseScattered, 0, 0);
            assert!(!o.pages.release_all(&machine).left);
            assert!(take_run(&o, 3000, 1, 1).is_ok());
            assert!(o.pages.allocate_run(&machine, 512, 1).unwrap().zero);
        }
    }
}

#[test]
fn side_tables_of_free_chunks_go_where_they_were_used() {
    for size in PAGE_SIZES {
        let machine = Virtual::new(size, 1);
        let o = Opened::new(&machine, &shape(None)).unwrap();
        let run = take_run(&o, 4096, 1024, 1).unwrap();
        let part = |table: usize| {
            let shift = crate::machine::tables()[table].shift;
            let start = o.pages.side_table(table) + ((o.pages.address(run.pfn) - o.pages.base()) >> shift);
            (start, (4096 * size) >> shift)
        };
        for table in 0..5 {
            let (start, length) = part(table);
            for at in (start..start + length).step_by(4096) {
                // SAFETY: the bytes lie in this run's part of a table that only the test uses.
                unsafe { core::ptr::with_exposed_provenance_mut::<u8>(at).write(0) };
            }
            assert_eq!(resident(start, length.next_multiple_of(4096)), length.next_multiple_of(4096));
        }
        // Table 0 is not to be dropped, 1 and 4 are marked, 2 and 3 are not.
        for chunk in 0..4 {
            [0, 1, 4].into_iter().for_each(|table| o.pages.mark_side_table(run.pfn.plus(chunk * 1024 + 5), table));
        }
        give(&o, run);
        o.pages.release_all(&machine);
        let left = [0, 1, 2, 3, 4].map(|table| resident(part(table).0, part(table).1) > 0);
        assert_eq!(left, [true, false, true, true, false]);
        o.pages.verify().unwrap();
    }
}

#[test]
fn a_page_with_bytes_of_other_chunks_stays() {
    const TABLE: usize = 3;
    for size in PAGE_SIZES {
        let machine = Virtual::new(size, 1);
        let mut shape = shape(None);
        shape.tables[TABLE].lead = 9;
        let o = Opened::new(&machine, &shape).unwrap();
        let chunks = [1, 2, 3].map(|stamp| take_run(&o, 1024, 1024, stamp).unwrap());
        let length = (1024 * size) >> shape.tables[TABLE].shift;
        let start = o.pages.side_table(TABLE);
        assert_eq!(start % size, 9);
        let byte = |at: usize| core::ptr::with_exposed_provenance_mut::<u8>(start + at);
        // SAFETY: the bytes lie in a table that only the test uses, which is mapped as far as the
        // chunks.
        (0..3 * length).for_each(|at| unsafe { byte(at).write(1) });
        (0..3).for_each(|chunk| o.pages.mark_side_table(chunks[chunk].pfn, TABLE));
        assert_eq!(chunks.each_ref().map(|chunk| chunk.pfn.0), [0, 1024, 2048]);
        let [first, middle, last] = chunks;
        // The bytes of a free chunk hold no information. SAFETY: the bytes lie in a table that only
        // the test uses, which is mapped as far as the chunks.
        (length..2 * length).for_each(|at| unsafe { byte(at).write(0) });
        give(&o, middle);
        o.pages.release_all(&machine);
        // SAFETY: the bytes lie in a table that only the test uses, which is mapped as far as the
        // chunks.
        let kept = |at: usize| unsafe { byte(at).read() } == 1;
        assert!((0..length).chain(2 * length..3 * length).all(kept), "of the chunks beside it");
        let page = start - 9;
        assert_eq!(resident(page + length + size, length - size), 0, "whole pages of it are gone");
        // SAFETY: the bytes lie in a table that only the test uses, which is mapped as far as the
        // chunks.
        (0..length).chain(2 * length..3 * length).for_each(|at| unsafe { byte(at).write(0) });
        [first, last].into_iter().for_each(|chunk| give(&o, chunk));
        o.pages.release_all(&machine);
        let left = resident(page, 3 * length + size);
        assert!(left <= 4 * size, "{left}, but those where each part that went alone begins and ends");
        o.pages.verify().unwrap();
    }
}

#[test]
fn a_table_that_was_refused_is_tried_again() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    for fails in [1, 0] {
        let run = take_run(&o, 1024, 1024, 1).unwrap();
        assert_eq!(run.pfn.0, 0);
        // SAFETY: the first byte of a table that only the test uses.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(o.pages.side_table(1)).write(0) };
        if fails == 1 {
            o.pages.mark_side_table(run.pfn, 1);
        }
        give(&o, run);
        machine.fail(Call::Release, 1, fails);
        let report = o.pages.release_all(&machine);
        assert_eq!(report.failed as usize, fails);
        assert_eq!(resident(o.pages.side_table(1), 4096) > 0, fails == 1);
    }
}

#[test]
fn an_allocation_that_would_fail_waits_for_pages_under_release() {
    let machine = Probe::new(Virtual::new(4096, 1).with_scarce_address_space());
    let o = Opened::new(&machine, &Shape { span: 16 << 20, ..shape(None) }).unwrap();
    let run = take_run(&o, 4096, 1, 1).unwrap();
    give(&o, run);
    std::thread::scope(|scope| {
        // The first call of the release stops until the other thread has waited a little.
        let (stop, entered, go_on) = stop_once();
        *machine.on_release.lock().unwrap() = Some(stop);
        *machine.on_pause.lock().unwrap() = Some(at_call(5, move || go_on.send(()).unwrap()));
        let release = scope.spawn(|| o.pages.release_all(&machine));
        entered.recv().unwrap();
        let run = o.pages.allocate_run(&machine, 4096, 1).expect("the pages that are under release");
        assert!(run.zero);
        assert!(!release.join().unwrap().left);
        o.pages.free_run(&machine, run.pfn, 4096);
    });
    *machine.on_release.lock().unwrap() = None;
    *machine.on_pause.lock().unwrap() = None;
    o.pages.verify().unwrap();
}

#[test]
fn a_second_thread_neither_waits_for_a_tick_nor_repeats_it() {
    let machine = Probe::new(Virtual::new(4096, 1));
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let run = take_run(&o, 4096, 1, 1).unwrap();
    give(&o, run);
    o.pages.tick(&machine);
    let (stop, entered, go_on) = stop_once();
    *machine.on_release.lock().unwrap() = Some(stop);
    std::thread::scope(|scope| {
        let tick = scope.spawn(|| o.pages.tick(&machine));
        entered.recv().unwrap();
        assert_eq!(o.pages.tick(&machine), Report { left: true, ..Report::default() });
        go_on.send(()).unwrap();
        assert_eq!(tick.join().unwrap().released, 4096);
    });
    *machine.on_release.lock().unwrap() = None;
    o.pages.verify().unwrap();
}

#[test]
fn blocks_of_every_order_keep_their_neighbours_intact() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let held: Vec<Held> = (0..900).map(|n| take_block(&o, (n % 10) as u8, n).unwrap()).collect();
    let (keep, go): (Vec<Held>, Vec<Held>) = held.into_iter().partition(|held| held.stamp % 3 == 0);
    go.into_iter().for_each(|held| give(&o, held));
    let report = settle(&o.pages, &machine);
    assert!(report.released > 10_000 && report.failed == 0 && !report.left, "{report:?}");
    keep.iter().for_each(|held| held.check(&o.pages));
    assert_eq!(o.pages.allocate_block(&machine, Order(9)).map(|block| block.zero), Ok(true));
    keep.into_iter().for_each(|held| give(&o, held));
    o.pages.verify().unwrap();
}
