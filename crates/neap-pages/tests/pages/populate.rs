//! Memory that comes as huge pages: when it comes, what is known about it, and what it leaves
//! behind.

use crate::machine::{Held, Opened, give, resident, shape, take_block, take_run};
use neap_base::platform::{HugePageSupply, memory::HugePages};
use neap_base::{Linux, Order, Pfn, Platform};
use neap_pages::{EarlyTables, NodePages, Shape};
use neap_testing::again::{case, succeeds};
use neap_testing::probe::{Probe, at_call, stop_once};
use neap_testing::virtual_platform::{Call, Virtual};

/// Number of calls for the tables with a page or two for a block: the frames, and one of those
/// released with a chunk.
const FEW: usize = 2;

/// Number of calls for a block for small blocks: the block, its part of those tables, and its part
/// of the early table.
const CALLS: usize = 1 + FEW + 1;

fn huge() -> Shape {
    Shape { huge: true, ..shape(None) }
}

#[test]
fn small_zones_and_other_pages_never_populate() {
    let none = Virtual::new(4096, 1).with_huge_page_supply(HugePageSupply::None);
    let sized = |size| Virtual::new(size, 1).with_huge_pages_for_all();
    for (machine, count) in [(Virtual::new(4096, 1), 1000), (sized(16384), 6000), (sized(65536), 5000), (none, 6000)] {
        let o = Opened::new(&machine, &huge()).unwrap();
        for _ in 0..count {
            o.pages.allocate_block(&machine, Order(0)).unwrap();
        }
        assert_eq!((machine.made(Call::Populate), o.pages.statistics().populated), (0, 0));
        let step = machine.page_size() * 16;
        let mut addresses = (o.pages.base()..o.pages.base() + o.pages.limit()).step_by(step);
        assert!(!addresses.any(|address| machine.allows_huge_pages(address)));
        o.pages.verify().unwrap();
    }
}

#[test]
fn huge_pages_are_in_use_if_wanted_and_supplied() {
    use HugePageSupply::{Everywhere, None, OnRequest};
    for (supply, wanted, expected) in
        [(Everywhere, true, true), (OnRequest, true, true), (None, true, false), (Everywhere, false, false)]
    {
        let machine = Virtual::new(4096, 1).with_huge_page_supply(supply);
        let pages = NodePages::open(&machine, &Shape { huge: wanted, ..huge() }).unwrap();
        assert_eq!(pages.uses_huge_pages(), expected, "{supply:?}, wanted: {wanted}");
        // SAFETY: the test is over, and nothing of the pages is used any more.
        unsafe { pages.close(&machine) };
    }
}

/// Pages of two zones of this process, populated and in runs with huge pages: one opened as usual,
/// and one opened after the process gave up huge pages.
#[test]
fn process_without_huge_pages_asks_for_none() {
    if case().is_none() {
        return succeeds("populate::process_without_huge_pages_asks_for_none", "of its own", "");
    }
    let used = || {
        let platform = Linux::probe();
        let o = Opened::new(&platform, &huge()).unwrap();
        let blocks: Vec<Held> = (0..6000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
        let run = take_run(&o, 2048, 1, 1).unwrap();
        let used = (o.pages.statistics().populated > 0, o.pages.huge_runs());
        blocks.into_iter().chain([run]).for_each(|held| give(&o, held));
        o.pages.verify().unwrap();
        assert!(platform.huge_page_supply() != HugePageSupply::None || !huge_pages_are_given(&platform));
        (platform.huge_page_supply(), used)
    };
    let (supply, before) = used();
    assert_eq!(before, if supply == HugePageSupply::None { (false, 0) } else { (true, 1) });
    // SAFETY: the call has no pointers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }, 0);
    assert_eq!(used(), (HugePageSupply::None, (false, 0)));
}

#[test]
fn what_lists_keep_does_not_make_a_zone_large() {
    for cpus in [1, 2, 8] {
        let machine = Virtual::new(4096, cpus);
        let o = Opened::new(&machine, &huge()).unwrap();
        // Pages in lists count as used, touched or not.
        let listed = o.pages.statistics().list_highs;
        assert!(listed > 100);
        let mut used = 0;
        while o.pages.statistics().populated == 0 {
            used = o.pages.statistics().used;
            o.pages.allocate_block(&machine, Order(0)).unwrap();
        }
        assert!(
            (768 + listed..768 + listed + 512).contains(&used),
            "{cpus} CPUs: at {used} used pages, {listed} listed"
        );
        o.pages.verify().unwrap();
    }
}

#[test]
fn a_large_zone_populates_ahead_by_one_huge_page_at_most() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &huge()).unwrap();
    let held: Vec<Held> = (0..20_000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
    let statistics = o.pages.statistics();
    assert!(statistics.populated >= 15_000 && statistics.populated.is_multiple_of(512), "{statistics:?}");
    assert_eq!(machine.made(Call::Populate), statistics.populated as usize / 512 * CALLS);
    let bytes = resident(o.pages.base(), 256 << 20);
    assert!((20_000..=20_000 + 512 + 64).contains(&(bytes / 4096)), "{bytes} bytes");
    o.pages.verify().unwrap();
    // Populated pages that were not used are released like all others.
    o.pages.drain_all(&machine);
    (0..6).for_each(|_| _ = o.pages.tick(&machine));
    assert_eq!(o.pages.statistics().backed_free, 0);
    assert!(resident(o.pages.base(), 256 << 20) <= (20_000 + 64) * 4096);
    held.into_iter().for_each(|held| give(&o, held));
    o.pages.verify().unwrap();
}

#[test]
fn runs_that_may_not_be_touched_are_not_populated() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &huge()).unwrap();
    for _ in 0..60 {
        assert!(o.pages.allocate_run(&machine, 300, 1).unwrap().zero);
        assert!(o.pages.allocate_run(&machine, 3000, 1).unwrap().zero);
    }
    assert_eq!(machine.made(Call::Populate), 0);
    // Short runs are populated after a few out of the remainders of the long ones. Populated pages
    // count as backed. The tables for small blocks are not populated for them.
    let short = (0..1000).find(|_| !o.pages.allocate_run(&machine, 60, 1).unwrap().zero);
    assert!(short.is_some() && machine.made(Call::Populate) == 1 + FEW);
    o.pages.verify().unwrap();
}

#[test]
fn a_system_that_cannot_populate_is_asked_rarely() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &huge()).unwrap();
    machine.fail(Call::Populate, 3 * CALLS, usize::MAX);
    let held: Vec<Held> = (0..30_000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
    assert_eq!(o.pages.statistics().populated, 3 * 512);
    let refused = machine.made(Call::Populate) - 3 * CALLS;
    assert!((1..7).contains(&refused), "{refused} calls");
    o.pages.verify().unwrap();
    held.into_iter().for_each(|held| give(&o, held));
    assert!(!o.pages.release_all(&machine).left);
    o.pages.verify().unwrap();
}

#[test]
fn huge_pages_are_allowed_per_batch_until_the_next_tick() {
    let machine = Probe::new(Virtual::new(4096, 1));
    let o = Opened::new(&machine, &huge()).unwrap();
    let held: Vec<Held> = (0..20_000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
    let blocks = o.pages.statistics().populated / 512;
    let arena = o.pages.base()..o.pages.base() + o.pages.limit();
    let advice = || {
        let mut advice = core::mem::take(&mut *machine.huge.lock().unwrap());
        advice.retain(|(start, ..)| arena.contains(start));
        advice
    };
    let before = advice();
    let allowed = before.iter().filter(|(_, _, allowed)| *allowed);
    assert!((1..=4).contains(&allowed.clone().count()) && blocks > 30, "{blocks} blocks: {before:?}");
    assert!(allowed.clone().map(|(_, length, _)| *length as u64).sum::<u64>() >= blocks << 21);
    let first = allowed.clone().map(|(start, ..)| *start).min().unwrap();
    let end = allowed.map(|(start, length, _)| start + length).max().unwrap();
    // Some blocks wait for population: free for the budget, but in no list.
    let waiting = o.pages.statistics();
    assert!(waiting.releasing >= 512 && waiting.releasing.is_multiple_of(512), "{waiting:?}");
    o.pages.verify().unwrap();
    o.pages.tick(&machine);
    let statistics = o.pages.statistics();
    assert_eq!((statistics.releasing, statistics.free), (0, waiting.free + waiting.releasing));
    assert_eq!(advice(), [(first, end - first, false)], "all that was allowed, at once");
    o.pages.tick(&machine);
    assert_eq!(advice(), []);
    held.into_iter().for_each(|held| give(&o, held));
    o.pages.verify().unwrap();
}

#[test]
fn one_more_of_many_blocks_is_populated_in_a_smaller_zone() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &huge()).unwrap();
    for _ in 0..500 {
        o.pages.allocate_block(&machine, Order(0)).unwrap();
    }
    assert_eq!(o.pages.statistics().populated, 0);
    for _ in 0..600 {
        o.pages.allocate_one_more_block(&machine, Order(0), EarlyTables::Written).unwrap();
    }
    let populated = o.pages.statistics().populated;
    assert!((512..=1024).contains(&populated), "{populated}");
    o.pages.verify().unwrap();
    // One mebibyte in use is too little for them, too.
    let o = Opened::new(&machine, &huge()).unwrap();
    for _ in 0..500 {
        o.pages.allocate_one_more_block(&machine, Order(0), EarlyTables::Written).unwrap();
    }
    assert_eq!(o.pages.statistics().populated, 0);
}

/// Memory of a table that came with a block is released with the pages that it describes, though it
/// was not written to.
#[test]
fn what_the_tables_say_about_a_block_goes_back_with_it() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &huge()).unwrap();
    let table = || resident(o.pages.side_table(4), (256 << 20) >> 10);
    let held: Vec<Held> = (0..20_000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
    assert!(table() >= 4096 * 15, "{}", table());
    held.into_iter().for_each(|held| give(&o, held));
    o.pages.tick(&machine);
    assert!(!o.pages.release_all(&machine).left);
    assert_eq!((o.pages.statistics().backed_free, table()), (0, 0));
    o.pages.verify().unwrap();
}

#[test]
fn early_table_is_populated_with_many_written_large_blocks() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &huge()).unwrap();
    (0..200).for_each(|_| _ = o.pages.allocate_one_more_block(&machine, Order(5), EarlyTables::Written).unwrap());
    let populated = o.pages.statistics().populated as usize;
    assert!(populated >= 5 * 512, "{populated} pages");
    assert_eq!(machine.made(Call::Populate), populated / 512 * CALLS);
    // Not if nothing will be written there.
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &huge()).unwrap();
    (0..200).for_each(|_| _ = o.pages.allocate_one_more_block(&machine, Order(5), EarlyTables::Untouched).unwrap());
    assert_eq!(machine.made(Call::Populate), o.pages.statistics().populated as usize / 512 * (CALLS - 1));
}

/// The number of an early table with a byte for sixteen of the arena: 2 MiB of it describe 32 MiB.
/// The first 64 MiB have small pages.
const EARLY: usize = 1;
const EARLY_PART: usize = (32 << 20) / 4096;

fn early_part<P: Platform>(o: &Opened<'_, P>, part: usize) -> usize {
    o.pages.side_table(EARLY) + (part << 21)
}

fn take_early_parts<P: Platform>(o: &Opened<'_, P>, parts: core::ops::Range<usize>) -> Vec<Held> {
    (parts.start * EARLY_PART..parts.end * EARLY_PART).map(|stamp| take_block(o, 0, stamp as u64).unwrap()).collect()
}

#[test]
fn early_table_huge_page_is_requested_with_its_first_block() {
    let machine = Probe::new(Virtual::new(4096, 1));
    let o = Opened::new(&machine, &huge()).unwrap();
    let refused = |(start, _, allowed): &(usize, usize, bool)| *start == early_part(&o, 0) && !*allowed;
    assert!(
        machine.huge.lock().unwrap().iter().any(refused),
        "or a system that gives them to everybody gives one to each small program"
    );
    let mut held = take_early_parts(&o, 0..1);
    let asked = || {
        let advice = machine.huge.lock().unwrap();
        let table = early_part(&o, 0)..early_part(&o, 9);
        let asked = advice.iter().filter(|(start, _, allowed)| *allowed && table.contains(start));
        asked.map(|(start, length, _)| (*start, *length)).collect::<Vec<_>>()
    };
    assert_eq!(asked(), [], "nothing yet");
    held.extend(take_early_parts(&o, 1..4));
    assert_eq!(asked(), [2, 3].map(|part| (early_part(&o, part), 2 << 20)));
    let allowed = (0..4).any(|part| machine.machine.allows_huge_pages(early_part(&o, part)));
    assert!(!allowed, "not any more");
    held.into_iter().for_each(|held| give(&o, held));
    assert!(!o.pages.release_all(&machine).left);
    // The parts released from a huge page go at once.
    let split = machine.split.lock().unwrap().clone();
    let cut = |part| split.iter().any(|page| (early_part(&o, part)..early_part(&o, part + 1)).contains(page));
    assert_eq!([0, 1, 2, 3].map(cut), [false, false, true, true], "{split:x?}");
    o.pages.verify().unwrap();
}

#[test]
fn early_table_skips_huge_pages_if_scarce_or_multi_node() {
    for machine in [Virtual::new(4096, 1).with_scarce_address_space(), Virtual::new(4096, 2).with_nodes(&[0, 1])] {
        let machine = Probe::new(machine);
        let pages = NodePages::open(&machine, &huge()).unwrap();
        let held: Vec<Pfn> = (0..EARLY_PART * 3)
            .map(|page| {
                Virtual::run_on(page / 5000 % machine.machine.cpus());
                pages.allocate_block(&machine, Order(0)).unwrap().pfn
            })
            .collect();
        let end = pages.base() + pages.limit();
        assert!(machine.huge.lock().unwrap().iter().all(|(start, _, allowed)| *start < end || !*allowed));
        held.into_iter().for_each(|pfn| pages.free_block(&machine, pfn, Order(0)));
        pages.verify().unwrap();
        // SAFETY: the test is over, and nothing of the pages is used any more.
        unsafe { pages.close(&machine) };
    }
}

/// Whether memory that may be huge is huge. A system that gives huge pages on request may have
/// none.
fn huge_pages_are_given(platform: &Linux) -> bool {
    let (start, length) = (platform.map(4 << 20).unwrap(), 2 << 20);
    let huge = start.next_multiple_of(length);
    platform.huge_pages(huge, length, HugePages::Allowed).unwrap();
    // SAFETY: mapped above, for this function alone.
    unsafe { core::ptr::with_exposed_provenance_mut::<u8>(huge).write_volatile(1) };
    let given = resident(huge, length) == length;
    // SAFETY: mapped above, and not used after this.
    unsafe { platform.unmap(start, 4 << 20) };
    given
}

/// A huge page of an early table describes runs as well as slabs, and only slabs record that they
/// have written there. Its memory for runs stayed.
#[test]
fn early_table_huge_page_is_released_with_runs_and_slabs() {
    let platform = Linux::probe();
    let o = Opened::new(&platform, &huge()).unwrap();
    let given = huge_pages_are_given(&platform);
    let mut held = take_early_parts(&o, 0..2);
    held.extend((0..300).map(|stamp| take_block(&o, 0, stamp).unwrap()));
    assert_eq!(resident(early_part(&o, 2), 2 << 20) == 2 << 20, given);
    o.pages.tick(&platform);
    held.push(take_run(&o, EARLY_PART as u32, 1, 1).unwrap());
    held.extend(take_early_parts(&o, 3..5));
    // The upper half is released, and with it the table's part for it.
    let middle = held.iter().map(|held| held.pfn.0).max().unwrap() / 2;
    let (low, high): (Vec<Held>, Vec<Held>) = held.into_iter().partition(|held| held.pfn.0 < middle);
    let table = || [0, 1, 2, 3, 4].map(|part| resident(early_part(&o, part), 2 << 20));
    let before = table().iter().sum::<usize>();
    high.into_iter().for_each(|held| give(&o, held));
    assert!(!o.pages.release_all(&platform).left);
    assert!(table().iter().sum::<usize>() < before * 2 / 3, "{:?} of {before}", table());
    low.into_iter().for_each(|held| give(&o, held));
    assert!(!o.pages.release_all(&platform).left);
    // The next huge page may be there for a block that was populated ahead.
    assert_eq!(table(), [0; 5]);
    o.pages.verify().unwrap();
}

/// While one thread allows huge pages for a batch, the other threads wait for that instead of
/// allowing them block by block.
#[test]
fn threads_that_need_a_batch_wait_for_the_one_that_makes_it() {
    let machine = Probe::new(Virtual::new(4096, 4));
    let o = Opened::new(&machine, &huge()).unwrap();
    let first: Vec<Held> = (0..3000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
    let pause = || std::thread::sleep(core::time::Duration::from_millis(5));
    *machine.on_huge.lock().unwrap() = Some(Box::new(pause));
    let start = std::sync::Barrier::new(4);
    let held = std::thread::scope(|scope| {
        let taking: Vec<_> = (0..4)
            .map(|thread| {
                let (o, start) = (&o, &start);
                scope.spawn(move || {
                    Virtual::run_on(thread);
                    start.wait();
                    (0..3000).map(|stamp| take_block(o, 0, stamp).unwrap()).collect::<Vec<Held>>()
                })
            })
            .collect();
        taking.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<Held>>()
    });
    let advice = machine.huge.lock().unwrap().clone();
    let allowed: Vec<usize> =
        advice.iter().filter(|(.., allowed)| *allowed).map(|(_, length, _)| length >> 21).collect();
    let blocks = o.pages.statistics().populated / 512;
    assert!(blocks >= 20 && (2..=6).contains(&allowed.len()), "{blocks} blocks: {allowed:?}");
    o.pages.verify().unwrap();
    first.into_iter().chain(held).for_each(|held| give(&o, held));
    o.pages.verify().unwrap();
}

/// All threads asked for the same huge page of a table, and forbade it again. Each time all threads
/// that fault wait.
#[test]
fn early_table_huge_page_is_requested_by_one_thread_only() {
    let machine = Probe::new(Virtual::new(4096, 4));
    let o = Opened::new(&machine, &huge()).unwrap();
    let first = take_early_parts(&o, 0..2);
    let pause = || std::thread::sleep(core::time::Duration::from_millis(5));
    *machine.on_huge.lock().unwrap() = Some(Box::new(pause));
    let held = std::thread::scope(|scope| {
        let take = |thread: usize| {
            Virtual::run_on(thread);
            (0..4000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect::<Vec<Held>>()
        };
        let taking: Vec<_> = (0..4).map(|thread| scope.spawn(move || take(thread))).collect();
        taking.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<Held>>()
    });
    let advice = machine.huge.lock().unwrap().clone();
    let asked = |part| advice.iter().filter(|&&(start, _, allowed)| allowed && start == early_part(&o, part)).count();
    assert_eq!([2, 3].map(asked), [1, 1], "{advice:x?}");
    first.into_iter().chain(held).for_each(|held| give(&o, held));
    assert!(!o.pages.release_all(&machine).left);
    o.pages.verify().unwrap();
}

/// A thread that finds the last memory under population waits for it instead of failing.
#[test]
fn memory_under_population_is_waited_for() {
    let machine = Probe::new(Virtual::new(4096, 2).with_scarce_address_space());
    let o = Opened::new(&machine, &Shape { span: 24 << 20, ..huge() }).unwrap();
    let first = take_run(&o, 5 * 1024, 1, 1).unwrap();
    let (stop, entered, go_on) = stop_once();
    *machine.on_populate.lock().unwrap() = Some(stop);
    *machine.on_pause.lock().unwrap() = Some(at_call(4, move || go_on.send(()).unwrap()));
    std::thread::scope(|scope| {
        let populating = scope.spawn(|| take_run(&o, 64, 1, 2).unwrap());
        entered.recv().unwrap();
        // One half of the last free chunk is being populated; the other half is there, and then
        // nothing.
        let half = take_run(&o, 512, 1, 3).unwrap();
        let rest = take_run(&o, 256, 1, 4).expect("a part of what is being populated");
        [half, rest, populating.join().unwrap()].into_iter().for_each(|held| give(&o, held));
    });
    give(&o, first);
    assert_eq!(o.pages.statistics().populated, 512);
    o.pages.verify().unwrap();
}

/// Memory that allows huge pages is a mapping of its own until the next tick. None may stay one.
#[test]
fn mappings_do_not_grow_with_what_is_populated() {
    let platform = Linux::probe();
    let o = Opened::new(&platform, &huge()).unwrap();
    for round in 0..4 {
        let held: Vec<Held> = (0..16_000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
        let (keep, go): (Vec<Held>, Vec<Held>) = held.into_iter().partition(|held| held.pfn.0 % 1500 == round);
        go.into_iter().for_each(|held| give(&o, held));
        o.pages.release_all(&platform);
        keep.into_iter().for_each(|held| give(&o, held));
    }
    o.pages.verify().unwrap();
    let (base, end) = (o.pages.base(), o.pages.base() + o.pages.limit());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| {
        let start = usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        (base..end).contains(&start)
    });
    assert!(ours.count() <= 3, "{maps}");
}

/// A tick of one node took the huge pages from blocks that other nodes were about to populate.
#[test]
fn a_tick_forbids_huge_pages_on_its_own_node_alone() {
    let machine = Probe::new(Virtual::new(4096, 2).with_nodes(&[0, 1]));
    let pages = NodePages::open(&machine, &huge()).unwrap();
    let take = |cpu, count| {
        Virtual::run_on(cpu);
        (0..count).map(|_| pages.allocate_block(&machine, Order(0)).unwrap().pfn).collect::<Vec<Pfn>>()
    };
    // In turns, so that memory of each node lies between memory of the other.
    let held: Vec<Pfn> = (0..6).flat_map(|turn| take(turn % 2, 10_000)).collect();
    let allowed = |node: usize| {
        let all = (0..pages.frames().pages()).step_by(512).map(Pfn).filter(|pfn| pages.node_of(*pfn) == node);
        all.filter(|pfn| machine.machine.allows_huge_pages(pages.address(*pfn))).count()
    };
    let waiting = |node: usize| pages.node(node).statistics().releasing / 512;
    assert!((0..2).all(|node| waiting(node) > 0 && allowed(node) > waiting(node) as usize + 30));
    let before = (allowed(1), waiting(1));
    pages.node(0).tick(&machine);
    assert_eq!((allowed(0), waiting(0), (allowed(1), waiting(1))), (0, 0, before));
    // Waiting blocks still come as huge pages, without another call. When four are left, the next
    // batch is allowed.
    let advice = machine.huge.lock().unwrap().len();
    let more = take(1, 512 * (before.1 as usize - 5));
    assert_eq!((waiting(1), machine.huge.lock().unwrap().len()), (5, advice));
    pages.node(1).tick(&machine);
    assert_eq!(allowed(1), 0);
    held.into_iter().chain(more).for_each(|pfn| pages.free_block(&machine, pfn, Order(0)));
    pages.verify().unwrap();
    // SAFETY: the test is over, and nothing of the pages is used any more.
    unsafe { pages.close(&machine) };
}
