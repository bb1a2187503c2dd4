//! Pages as a whole on virtual machines: allocation and free, every page size, scarce address
//! space, budgets.

use crate::machine::{Held, Opened, PAGE_SIZES, give, resident, shape, take_block, take_run};
use neap_base::platform::memory;
use neap_base::{Order, Pfn, Platform};
use neap_pages::{Drain, DrainSum, Exhausted, MappingKind, Shape};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::{Call, Virtual};

fn machines() -> Vec<Virtual> {
    let usual = PAGE_SIZES.map(|size| Virtual::new(size, 3));
    let scarce = PAGE_SIZES.map(|size| Virtual::new(size, 3).with_scarce_address_space());
    usual.into_iter().chain(scarce).collect()
}

/// Random blocks and runs, half of them freed again, from several CPUs. Contents and sums are right
/// all the time.
#[test]
fn a_random_program_keeps_its_contents_on_every_machine() {
    let seed = seed();
    for machine in machines() {
        let o = Opened::new(&machine, &shape(None)).unwrap();
        let (mut random, mut held) = (Random(seed), Vec::<Held>::new());
        let most = (24 << 20) / machine.page_size();
        for step in 0..1500 {
            Virtual::run_on(random.below(3));
            match random.below(10) {
                0..4 => held.push(take_block(&o, random.below(4) as u8, step).unwrap()),
                4 => held.push(take_block(&o, 4 + random.below(6) as u8, step).unwrap()),
                5 => held.push(take_run(&o, 1 + random.below(most / 32) as u32, 1 << random.below(4), step).unwrap()),
                6 if !held.is_empty() => {
                    let index = random.below(held.len());
                    let new = 1 + random.below(20) as u32;
                    let old = held[index];
                    if old.order.is_none() && o.pages.resize_run(&machine, old.pfn, old.pages, new) {
                        Held { pages: old.pages.min(new), ..old }.check(&o.pages);
                        held[index] = Held::stamp(&o.pages, old.pfn, new, None, false, old.stamp);
                    }
                }
                _ if !held.is_empty() => give(&o, held.swap_remove(random.below(held.len()))),
                _ => {}
            }
            while held.iter().map(|held| held.pages as usize).sum::<usize>() > most {
                give(&o, held.swap_remove(random.below(held.len())));
            }
            if step % 100 == 0 {
                o.pages.tick(&machine);
                o.pages.verify().unwrap();
            }
        }
        held.into_iter().for_each(|held| give(&o, held));
        o.pages.release_all(&machine);
        o.pages.verify().unwrap();
        let statistics = o.pages.statistics();
        assert_eq!((statistics.used, statistics.backed_free, statistics.free), (0, 0, statistics.managed));
    }
}

#[test]
fn the_window_and_its_tables_are_where_the_arithmetic_says() {
    for (machine, lead) in
        [0, 63].into_iter().flat_map(|lead| machines().into_iter().map(move |machine| (machine, lead)))
    {
        let mut shape = shape(None);
        shape.tables[3].lead = lead;
        let o = Opened::new(&machine, &shape).unwrap();
        let pages = &o.pages;
        assert_eq!(pages.base() % (1024 * machine.page_size()), 0, "a chunk");
        let last = pages.base() + pages.limit() - 1;
        assert_eq!(pages.address(pages.pfn(last)), last + 1 - machine.page_size());
        for (index, table) in crate::machine::tables().iter().enumerate().filter(|(_, table)| table.shift > 0) {
            for address in [pages.base(), last] {
                let byte = pages.side_table(index) + ((address - pages.base()) >> table.shift);
                let byte = core::ptr::with_exposed_provenance_mut::<u8>(byte);
                // SAFETY: a byte of a table that is mapped as far as the arena, and that only this
                // test uses.
                unsafe {
                    assert_eq!(byte.read(), 0);
                    byte.write(index as u8);
                }
            }
        }
        assert_eq!(pages.frames().pages() as usize * machine.page_size(), pages.limit());
        pages.verify().unwrap();
    }
}

#[test]
fn opening_and_long_runs_touch_few_pages_of_the_tables() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let frames = core::ptr::from_ref(o.pages.frames().frame(Pfn(0))).addr();
    let length = o.pages.frames().pages() as usize * 16;
    assert_eq!(crate::machine::resident(frames, length), 0);
    let run = o.pages.allocate_run(&machine, 100_000, 1).unwrap();
    assert!(o.pages.resize_run(&machine, run.pfn, 100_000, 200_000));
    o.pages.free_run(&machine, run.pfn, 200_000);
    let touched = crate::machine::resident(frames, length) / 4096;
    assert!(touched <= 16, "{touched} pages of frames; one of each chunk would be 195");
    o.pages.verify().unwrap();
}

#[test]
fn scarce_address_space_is_taken_in_small_steps() {
    let machine = Virtual::new(4096, 2).with_scarce_address_space();
    let o = Opened::new(&machine, &shape(None)).unwrap();
    assert_eq!(o.pages.statistics().mapped_bytes, 4 << 20);
    assert!(o.pages.statistics().table_bytes < 1 << 20);
    let run = take_run(&o, 2500, 1, 1).unwrap();
    assert_eq!(o.pages.statistics().mapped_bytes, 12 << 20, "the free end of the arena counts");
    give(&o, run);
    o.pages.verify().unwrap();
    let plenty = Virtual::new(4096, 2);
    assert_eq!(Opened::new(&plenty, &shape(None)).unwrap().pages.statistics().mapped_bytes, 32 << 20);
}

#[test]
fn a_system_that_refuses_much_at_once_is_asked_for_little() {
    let machine = Virtual::new(4096, 2);
    // The last of the tables with mappings of their own, after the segment.
    machine.fail(Call::MapAt, 7, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    assert_eq!(o.pages.statistics().mapped_bytes, 4 << 20);
    o.pages.verify().unwrap();
}

#[test]
fn the_arena_grows_around_what_is_in_its_way() {
    for size in PAGE_SIZES {
        let machine = Virtual::new(size, 2).with_scarce_address_space();
        let o = Opened::new(&machine, &shape(None)).unwrap();
        let foreign = o.pages.base() + o.pages.limit() + 3 * size;
        memory::map_at(foreign, 2 * size).unwrap();
        let foreign_byte = core::ptr::with_exposed_provenance_mut::<u8>(foreign);
        // SAFETY: mapped above.
        unsafe { foreign_byte.write(77) };
        let held: Vec<Held> = (0..7).map(|stamp| take_run(&o, 700, 1, stamp).unwrap()).collect();
        o.pages.verify().unwrap();
        for run in &held {
            let (start, end) = (o.pages.address(run.pfn), o.pages.address(run.pfn.plus(run.pages)));
            assert!(end <= foreign || start >= foreign + 2 * size);
        }
        assert!(held.iter().any(|run| o.pages.address(run.pfn) > foreign));
        held.into_iter().for_each(|held| give(&o, held));
        o.pages.verify().unwrap();
        drop(o);
        // SAFETY: mapped above; closing the arena unmapped only its own mappings.
        unsafe {
            assert_eq!(foreign_byte.read(), 77);
            memory::unmap(foreign, 2 * size).unwrap();
        }
    }
}

/// A foreign page behind each table in turn.
#[test]
fn the_arena_grows_around_what_is_behind_a_table() {
    for (size, scarce) in PAGE_SIZES.into_iter().flat_map(|size| [(size, false), (size, true)]) {
        for table in 0.. {
            let machine = Virtual::new(size, 2);
            let machine = if scarce { machine.with_scarce_address_space() } else { machine };
            let o = Opened::new(&machine, &shape(None)).unwrap();
            let ends = mappings(&o)
                .into_iter()
                .filter(|(part, ..)| matches!(part, MappingKind::Table(_) | MappingKind::OwnTables));
            let Some((_, start, length)) = ends.into_iter().nth(table) else { break };
            // The address space reserved for the tables by the chunk does not grow, so there may be
            // no room behind it.
            let Ok(()) = memory::map_at(start + length, size) else { continue };
            let foreign_byte = core::ptr::with_exposed_provenance_mut::<u8>(start + length);
            // SAFETY: mapped above.
            unsafe { foreign_byte.write(77) };
            // Two gibibytes, so that every table must grow.
            let mut held: Vec<Held> = (0..2).map(|stamp| take_block(&o, 3, stamp).unwrap()).collect();
            let mut runs = Vec::new();
            for _ in 0..8 {
                let pages = ((256 << 20) / size) as u32;
                runs.push((o.pages.allocate_run(&machine, pages, 1).unwrap().pfn, pages));
                held.push(take_block(&o, 3, runs.len() as u64 + 7).unwrap());
            }
            for mapping in mappings(&o) {
                let (from, to) = (mapping.1, mapping.1 + mapping.2);
                assert!(to <= start + length || from >= start + length + size, "table {table}: {mapping:x?}");
            }
            o.pages.verify().unwrap();
            runs.into_iter().for_each(|(pfn, pages)| o.pages.free_run(&machine, pfn, pages));
            held.into_iter().for_each(|held| give(&o, held));
            assert!(!o.pages.release_all(&machine).left);
            o.pages.verify().unwrap();
            // SAFETY: mapped above; the arena writes and unmaps only its own memory.
            unsafe { assert_eq!(foreign_byte.read(), 77, "table {table}") };
            drop(o);
            // SAFETY: mapped above; closing the arena unmapped only its own mappings.
            unsafe {
                assert_eq!(foreign_byte.read(), 77, "table {table}");
                memory::unmap(start + length, size).unwrap();
            }
            assert_eq!(machine.mapped_bytes(), 0, "table {table}");
        }
    }
}

fn mappings(o: &Opened<'_, Virtual>) -> Vec<(MappingKind, usize, usize)> {
    let mut all = Vec::new();
    o.pages.each_mapping(&mut |part, start, length| all.push((part, start, length)));
    all
}

#[test]
fn tables_by_the_chunk_have_memory_where_something_is_said() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let (.., start, length) = mappings(&o).into_iter().find(|mapping| mapping.0 == MappingKind::OwnTables).unwrap();
    let block = o.pages.allocate_block(&machine, Order(0)).unwrap();
    assert_eq!(resident(start, length), 2 * 4096, "whose chunks are, and which are free; none of those has memory");
    o.pages.free_block(&machine, block.pfn, Order(0));
}

#[test]
fn a_window_that_is_full_is_exhausted_and_usable() {
    let machine = Virtual::new(4096, 2).with_scarce_address_space();
    let o = Opened::new(&machine, &Shape { span: 12 << 20, ..shape(None) }).unwrap();
    assert_eq!(o.pages.allocate_run(&machine, 4000, 1), Err(Exhausted));
    let run = take_run(&o, 3 * 1024, 1, 5).unwrap();
    assert_eq!(o.pages.allocate_block(&machine, Order(0)), Err(Exhausted));
    assert_eq!(o.pages.allocate_run(&machine, u32::MAX, 1 << 31), Err(Exhausted));
    assert!(o.pages.resize_run(&machine, run.pfn, 3 * 1024, 3 * 1024 - 5));
    assert_eq!((0..9).filter(|_| o.pages.allocate_block(&machine, Order(0)).is_ok()).count(), 5);
    o.pages.verify().unwrap();
}

#[test]
fn strict_alignment_is_kept() {
    for machine in machines() {
        let o = Opened::new(&machine, &shape(None)).unwrap();
        let mut held = Vec::new();
        for align in 0..13 {
            held.push(take_run(&o, 3, 1 << align, align).unwrap());
            held.push(take_run(&o, 1 << align, 1 << align, align).unwrap());
        }
        o.pages.verify().unwrap();
        held.into_iter().for_each(|held| give(&o, held));
        o.pages.verify().unwrap();
    }
}

#[test]
fn a_budget_counts_what_is_used_and_what_lists_keep() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(Some(20_000))).unwrap();
    let mut held = Vec::new();
    while let Ok(block) = take_block(&o, 0, held.len() as u64) {
        held.push(block);
    }
    assert_eq!(held.len(), 20_000);
    assert_eq!(o.pages.allocate_run(&machine, 1, 1), Err(Exhausted));
    let more = held.split_off(19_900);
    more.into_iter().for_each(|held| give(&o, held));
    let statistics = o.pages.statistics();
    assert_eq!((statistics.used, statistics.listed), (20_000, 100));
    assert_eq!(o.pages.allocate_run(&machine, 100, 1), Err(Exhausted), "no reclaim and no draining of its own");
    assert_eq!(o.pages.drain_all(&machine), DrainSum { pages: 100, held: 0 });
    let run = take_run(&o, 60, 1, 1).unwrap();
    assert!(!o.pages.resize_run(&machine, run.pfn, 60, 101), "over the budget");
    let marks = o.pages.statistics().watermarks;
    assert!(0 < marks.min && marks.min < marks.low && marks.low < marks.high && marks.high < 20_000 / 8);
    give(&o, run);
    held.into_iter().for_each(|held| give(&o, held));
    o.pages.verify().unwrap();
}

/// A block that has memory in part takes the rest from the system.
#[test]
fn a_budget_bounds_what_is_resident_when_free_memory_is_reused() {
    const BUDGET: u32 = 3000;
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &Shape { list_high: Some(0), ..shape(Some(BUDGET)) }).unwrap();
    let mut random = Random(seed());
    let (mut runs, mut blocks, mut reused) = (Vec::new(), Vec::new(), [0, 0]);
    for _ in 0..10_000 {
        let (pages, order) = (1 + random.below(600) as u32, Order(random.below(9) as u8));
        match random.below(8) {
            0 | 1 if !runs.is_empty() => {
                let (pfn, pages) = runs.swap_remove(random.below(runs.len()));
                o.pages.free_run(&machine, pfn, pages);
            }
            2 | 3 if !blocks.is_empty() => {
                let (pfn, order) = blocks.swap_remove(random.below(blocks.len()));
                o.pages.free_block(&machine, pfn, order);
            }
            4 => _ = o.pages.release(&machine, pages, neap_pages::Effort::Sparing, &|| false),
            5 => runs.extend(o.pages.allocate_run(&machine, pages, 1).map(|run| (run.pfn, pages))),
            6 => {
                let run = o.pages.allocate_resident_run(&machine, pages, 1);
                reused[0] += u32::from(run.is_some());
                runs.extend(run.map(|run| (run.pfn, pages)));
            }
            _ => {
                let block = o.pages.allocate_resident_block(&machine, order);
                reused[1] += u32::from(block.is_some());
                blocks.extend(block.map(|block| (block.pfn, order)));
            }
        }
        let now = o.pages.statistics();
        let resident = now.used + now.backed_free;
        assert!(resident <= BUDGET, "{resident} pages of {BUDGET}");
    }
    assert!(reused.iter().all(|&times| times > 100), "{reused:?}");
    o.pages.verify().unwrap();
}

#[test]
fn a_tiny_budget_works_without_lists() {
    let machine = Virtual::new(4096, 4);
    for budget in [1, 2, 7, 31] {
        let o = Opened::new(&machine, &shape(Some(budget))).unwrap();
        let held: Vec<Held> = core::iter::from_fn(|| take_block(&o, 0, 3).ok()).collect();
        assert_eq!(held.len(), budget as usize);
        held.into_iter().for_each(|held| give(&o, held));
        assert_eq!((o.pages.statistics().listed, o.pages.statistics().list_high), (0, 0));
        o.pages.verify().unwrap();
    }
}

#[test]
fn a_size_that_was_asked_for_stays_and_0_means_no_lists() {
    let machine = Virtual::new(4096, 2);
    for size in [0, 5, 100] {
        let o = Opened::new(&machine, &Shape { list_high: Some(size), ..shape(None) }).unwrap();
        for round in 0..5 {
            let held: Vec<Held> = (0..3000).map(|stamp| take_block(&o, 0, stamp + round).unwrap()).collect();
            held.into_iter().for_each(|held| give(&o, held));
            let statistics = o.pages.statistics();
            assert_eq!((statistics.list_high, statistics.list_highs), (size, 2 * size));
            assert!(statistics.listed <= size);
            machine.advance(250_000_000);
        }
        o.pages.verify().unwrap();
    }
}

#[test]
fn lists_relearn_their_size_and_reset_when_idle() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    Virtual::run_on(1);
    let least = o.pages.statistics();
    let swing = || {
        let before = o.pages.statistics().zone_locks;
        let held: Vec<Held> = (0..5000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
        held.into_iter().for_each(|held| give(&o, held));
        o.pages.statistics().zone_locks - before - 1
    };
    let locks: Vec<u64> = (0..4).map(|_| swing()).collect();
    assert!(locks[0] > 10 && locks[3] == 0, "{locks:?}");
    let learned = o.pages.statistics();
    assert!((5000..7000).contains(&learned.list_high) && learned.listed >= 5000, "{learned:?}");
    // Background reclaim takes it at once. Afterwards the list learns it again.
    o.pages.set_reclaiming(true);
    let short = o.pages.statistics();
    assert_eq!((short.list_high, short.list_batch), (least.list_high, least.list_batch));
    assert!(short.listed <= short.list_high && swing() > 100);
    o.pages.set_reclaiming(false);
    let locks: Vec<u64> = (0..4).map(|_| swing()).collect();
    assert!(locks[3] == 0, "{locks:?}");
    // Nothing is used any more: the second tick empties the list, and later ones reset it.
    for _ in 0..2 {
        machine.advance(250_000_000);
        o.pages.tick(&machine);
    }
    assert!(o.pages.statistics().listed == 0);
    for _ in 0..8 {
        machine.advance(250_000_000);
        o.pages.tick(&machine);
    }
    let forgotten = o.pages.statistics();
    assert_eq!((forgotten.list_highs, forgotten.list_batch), (least.list_highs, least.list_batch));
    o.pages.verify().unwrap();
}

#[test]
fn a_budget_that_runs_out_takes_from_the_lists_of_other_cpus() {
    let (machine, budget) = (Virtual::new(4096, 2), 1 << 16);
    let o = Opened::new(&machine, &shape(Some(budget))).unwrap();
    Virtual::run_on(0);
    for _ in 0..4 {
        let held: Vec<Held> = (0..4000).map(|stamp| take_block(&o, 0, stamp).unwrap()).collect();
        held.into_iter().for_each(|held| give(&o, held));
    }
    let learned = o.pages.listed_on(0).unwrap();
    assert!(learned >= 3900 && learned <= budget / 16, "{learned}");
    Virtual::run_on(1);
    let low = o.pages.statistics().watermarks.low;
    let mut held = Vec::new();
    while held.len() as u32 + o.pages.statistics().listed < budget - low {
        held.push(take_block(&o, 0, 1).unwrap());
    }
    let statistics = o.pages.statistics();
    assert!(statistics.list_highs <= low && statistics.listed <= low, "{statistics:?}");
    held.into_iter().for_each(|held| give(&o, held));
    o.pages.verify().unwrap();
}

#[test]
fn runs_are_cached_under_a_budget_until_memory_is_short() {
    let (machine, budget) = (Virtual::new(4096, 2), 1 << 14);
    let o = Opened::new(&machine, &shape(Some(budget))).unwrap();
    let listed = || [0, 1].map(|cpu| o.pages.listed_on(cpu).unwrap());
    let cycle = |cpu, pages| {
        Virtual::run_on(cpu);
        let run = o.pages.allocate_run(&machine, pages, 1).unwrap();
        o.pages.free_run(&machine, run.pfn, pages);
    };
    cycle(0, 100);
    cycle(1, 200);
    assert_eq!(listed(), [100, 200]);
    // All but a few pages are used up, by runs that are too long for the caches.
    let high = o.pages.statistics().watermarks.high;
    let mut held = Vec::new();
    while o.pages.statistics().used < budget - high {
        held.push(o.pages.allocate_run(&machine, 300, 1).unwrap());
    }
    assert_eq!(listed(), [0, 0], "each CPU has returned its runs");
    cycle(1, 20);
    assert_eq!(listed(), [0, 0]);
    held.into_iter().for_each(|run| o.pages.free_run(&machine, run.pfn, 300));
    o.pages.verify().unwrap();
}

#[test]
fn lists_stay_below_their_high_mark_whatever_is_freed() {
    let machine = Virtual::new(4096, 3);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let mut random = Random(seed());
    let mut held = Vec::new();
    for _ in 0..40 {
        Virtual::run_on(random.below(3));
        let order = random.below(4) as u8;
        (0..400 >> order).for_each(|stamp| held.push(take_block(&o, order, stamp).unwrap()));
        Virtual::run_on(random.below(3));
        for _ in 0..held.len() / 2 {
            give(&o, held.swap_remove(random.below(held.len())));
            let high = o.pages.statistics().list_high;
            assert!((0..3).all(|cpu| o.pages.listed_on(cpu).unwrap() <= high));
        }
        o.pages.verify().unwrap();
    }
    assert!(o.pages.statistics().list_spills > 10);
    held.into_iter().for_each(|held| give(&o, held));
    let listed: u32 = (0..3).map(|cpu| o.pages.listed_on(cpu).unwrap()).sum();
    assert!(listed > 0);
    let Drain::Drained(first) = o.pages.drain_cpu(&machine, 0) else { panic!("no thread holds it") };
    assert_eq!(o.pages.listed_on(0), Some(0));
    assert_eq!(o.pages.drain_all(&machine), DrainSum { pages: listed - first, held: 0 });
    assert_eq!(o.pages.statistics().used, 0);
    o.pages.verify().unwrap();
}

#[test]
fn lists_of_a_small_zone_stay_below_their_high_mark_too() {
    let machine = Virtual::new(4096, 1);
    for budget in [64, 300, 8191] {
        let o = Opened::new(&machine, &shape(Some(budget))).unwrap();
        let mut random = Random(seed());
        for _ in 0..20 {
            let held = core::iter::from_fn(|| take_block(&o, random.below(4) as u8, 1).ok()).collect::<Vec<Held>>();
            for held in held {
                give(&o, held);
                let (listed, high) = (o.pages.listed_on(0).unwrap(), o.pages.statistics().list_high);
                assert!(high > 0 && listed <= high + 7, "{listed} pages over {high} of {budget}");
            }
            o.pages.verify().unwrap();
        }
    }
}

#[test]
fn a_run_grows_over_free_pages_only() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let first = take_run(&o, 5, 1, 1).unwrap();
    assert!(o.pages.resize_run(&machine, first.pfn, 5, 3000));
    let first = Held::stamp(&o.pages, first.pfn, 3000, None, false, 9);
    let second = take_run(&o, 1, 1, 2).unwrap();
    let gap = second.pfn.0 - first.pfn.0;
    assert!(gap >= 3000 && !o.pages.resize_run(&machine, first.pfn, 3000, gap + 1));
    o.pages.verify().unwrap();
    first.check(&o.pages);
    assert!(o.pages.resize_run(&machine, first.pfn, 3000, gap));
    assert!(o.pages.resize_run(&machine, first.pfn, gap, 1));
    o.pages.verify().unwrap();
    o.pages.free_run(&machine, first.pfn, 1);
    give(&o, second);
    o.pages.verify().unwrap();
}

#[test]
fn short_run_that_is_freed_is_taken_again_without_the_zone() {
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    Virtual::run_on(0);
    let runs: Vec<Pfn> = [10, 16, 256].map(|pages| o.pages.allocate_run(&machine, pages, 1).unwrap().pfn).into();
    let locks = o.pages.statistics().zone_locks;
    for (&run, pages) in runs.iter().zip([10, 16, 256]) {
        o.pages.free_run(&machine, run, pages);
        let again = o.pages.allocate_run(&machine, pages, 1).unwrap();
        assert_eq!((again.pfn, again.zero), (run, false));
        assert_eq!(o.pages.backed_part(run, run.0..run.0 + pages), Some(run.0..run.0 + pages), "it may hold data");
    }
    // Each query of the statistics takes it once.
    assert_eq!(o.pages.statistics().zone_locks, locks + 1, "the zone's lock was not taken");
    for (&run, pages) in runs.iter().zip([10, 16, 256]) {
        o.pages.free_run(&machine, run, pages);
    }
    assert_eq!((o.pages.statistics().listed, o.pages.listed_on(0)), (282, Some(282)));
    o.pages.verify().unwrap();
    // Another CPU, another length, a stricter alignment.
    Virtual::run_on(1);
    let other = o.pages.allocate_run(&machine, 16, 1).unwrap().pfn;
    Virtual::run_on(0);
    let longer = o.pages.allocate_run(&machine, 11, 1).unwrap().pfn;
    assert!(!runs.contains(&other) && !runs.contains(&longer));
    // Two ticks later they are free pages.
    (0..2).for_each(|_| _ = o.pages.tick(&machine));
    assert_eq!(o.pages.statistics().listed, 0);
    for (run, pages) in [(other, 16), (longer, 11)] {
        o.pages.free_run(&machine, run, pages);
    }
    o.pages.verify().unwrap();
    assert_eq!(o.pages.drain_all(&machine), DrainSum { pages: 27, held: 0 });
    assert_eq!(o.pages.statistics().used, 0);
    o.pages.verify().unwrap();
}

/// Free pages are released as others come from the system, whatever sizes are wanted in turn.
#[test]
fn resident_pages_never_pass_the_budget() {
    let (mut random, budget) = (Random(seed()), 8192);
    let machine = Virtual::new(4096, 2);
    let o = Opened::new(&machine, &Shape { huge: true, ..shape(Some(budget)) }).unwrap();
    let mut held = Vec::<Held>::new();
    for round in 0..12 {
        let (order, pages) = ([0, 3, 5, 9][random.below(4)], [74, 9, 300, 1500][random.below(4)]);
        loop {
            Virtual::run_on(random.below(2));
            let next = if round % 2 == 0 { take_block(&o, order, round) } else { take_run(&o, pages, 1, round) };
            let Ok(next) = next else { break };
            held.push(next);
            let numbers = o.pages.statistics();
            assert!(numbers.used + numbers.backed_free <= budget, "round {round}: {numbers:?}");
        }
        let used = held.iter().map(|held| held.pages).sum::<u32>();
        assert!(used > budget / 2, "round {round}: {used} pages of {budget}");
        while !held.is_empty() && (held.len() > 20 || round % 4 != 0) {
            give(&o, held.swap_remove(random.below(held.len())));
        }
        let resident = resident(o.pages.base(), o.pages.limit()) / machine.page_size();
        assert!(resident <= budget as usize, "round {round}: {resident} pages");
        o.pages.verify().unwrap();
    }
    held.into_iter().for_each(|held| give(&o, held));
}

#[test]
fn runs_are_not_cached_under_a_small_limit() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(Some(600))).unwrap();
    let run = o.pages.allocate_run(&machine, 200, 1).unwrap().pfn;
    o.pages.free_run(&machine, run, 200);
    assert_eq!(o.pages.statistics().listed, 0);
    let run = o.pages.allocate_run(&machine, 590, 1).unwrap().pfn;
    o.pages.free_run(&machine, run, 590);
    o.pages.verify().unwrap();
}

#[test]
fn slab_frames_store_holder_data_and_lose_slab_state_on_free() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let frames = o.pages.frames();
    for order in [0, 2, 3, 6] {
        let block = o.pages.allocate_block(&machine, Order(order)).unwrap();
        frames.mark_slab(block.pfn, Order(order), 41);
        let inside = |n: u32| frames.frame(block.pfn.plus(n));
        assert!((0..1 << order).all(|n| inside(n).owner() == 41 && inside(n).state() == neap_pages::State::Slab));
        inside(0).set_next(Pfn(7));
        inside(0).set_spare(9);
        o.pages.verify().unwrap();
        o.pages.free_block(&machine, block.pfn, Order(order));
        o.pages.verify().unwrap();
        assert!((0..1 << order).all(|n| inside(n).state() != neap_pages::State::Slab));
    }
}

#[test]
fn many_instances_of_different_shape_live_in_one_process_and_go() {
    let machines: Vec<Virtual> = (0..24).map(|n| Virtual::new(PAGE_SIZES[n % 3], 1 + n % 5)).collect();
    let mut bases = Vec::new();
    {
        let opened: Vec<Opened<'_, Virtual>> = machines
            .iter()
            .enumerate()
            .map(|(n, machine)| Opened::new(machine, &shape((n % 2 == 1).then_some(500 * n as u32))).unwrap())
            .collect();
        let mut held = Vec::new();
        for round in 0..50 {
            for (n, o) in opened.iter().enumerate() {
                held.push((n, take_block(o, (round % 4) as u8, round * 100 + n as u64).unwrap()));
            }
        }
        held.into_iter().for_each(|(n, held)| give(&opened[n], held));
        for o in &opened {
            o.pages.verify().unwrap();
            bases.push((o.pages.base(), o.pages.limit()));
            bases.extend((0..5).map(|table| (o.pages.side_table(table), 1)));
        }
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines() {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let (start, end) = (usize::from_str_radix(start, 16).unwrap(), usize::from_str_radix(end, 16).unwrap());
        assert!(bases.iter().all(|(base, length)| end <= *base || start >= base + length), "{line} is left over");
    }
}
