//! Settings that change while the pages are in use: the budget, and the bounds of CPU lists.
//!
//! Method: virtual machines with one node and with two, and real threads. After each change the
//! verification proves that the nodes' parts and the reserve sum up to the budget. Random tests
//! print their seed.

use crate::machine::shape;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use neap_base::{Linux, Order, Pfn};
use neap_pages::{BATCH_SCALE, NodePages, Settings, Shape};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::Virtual;

const ONE: &[usize] = &[0, 0];
const TWO: &[usize] = &[0, 0, 1, 1];

fn machine_with(nodes: &[usize]) -> Virtual {
    let machine = Virtual::new(4096, nodes.len());
    if nodes.contains(&1) { machine.with_nodes(nodes) } else { machine }
}

fn budget_only(budget: Option<u32>) -> Settings {
    Settings { budget, list_high: None, batch_scale: BATCH_SCALE }
}

fn budget(pages: u32) -> Settings {
    Settings { list_high: Some(0), ..budget_only(Some(pages)) }
}

/// Takes pages, one by one on each CPU in turn, until there is no more.
fn fill(machine: &Virtual, pages: &NodePages<Virtual>, cpus: usize) -> Vec<Pfn> {
    let take = |turn: usize| {
        Virtual::run_on(turn % cpus);
        pages.allocate_block(machine, Order(0)).map(|block| block.pfn).ok()
    };
    (0..).map_while(take).collect()
}

fn end(machine: &Virtual, pages: &NodePages<Virtual>, held: Vec<Pfn>) {
    held.into_iter().for_each(|pfn| pages.free_block(machine, pfn, Order(0)));
    pages.verify().unwrap();
    // SAFETY: the test is over, and no other thread uses the pages.
    unsafe { pages.close(machine) };
}

#[test]
fn budget_cut_below_use_refuses_until_as_much_was_freed() {
    for nodes in [ONE, TWO] {
        let machine = machine_with(nodes);
        let pages = NodePages::open(&machine, &Shape { list_high: Some(0), ..shape(Some(3000)) }).unwrap();
        let mut held = fill(&machine, &pages, nodes.len());
        let all = held.len();
        pages.change(&budget(1000));
        pages.verify().unwrap();
        // Tables count as well, and stay.
        let tables = 3000 - all;
        assert_eq!((pages.beyond_budget(), pages.statistics().budget), (2000, Some(1000)));
        for left in (1..=2000).rev() {
            assert!(pages.allocate_block(&machine, Order(0)).is_err(), "{left} pages beyond the budget");
            pages.free_block(&machine, held.swap_remove(left % held.len()), Order(0));
        }
        assert_eq!((pages.beyond_budget(), held.len()), (0, 1000 - tables));
        assert!(pages.allocate_block(&machine, Order(0)).is_err(), "all of the new budget is in use");
        pages.free_block(&machine, held.swap_remove(0), Order(0));
        let more = fill(&machine, &pages, nodes.len());
        assert_eq!(more.len(), 1, "a page for a page");
        held.extend(more);
        pages.verify().unwrap();
        pages.change(&budget(2500));
        held.extend(fill(&machine, &pages, nodes.len()));
        assert_eq!(held.len(), 2500 - tables, "all of the raised budget");
        end(&machine, &pages, held);
    }
}

/// Opens pages with a budget, takes all of it, and frees all but 500 pages.
fn mostly_freed(machine: &Virtual, budget: u32, nodes: usize) -> (NodePages<Virtual>, Vec<Pfn>) {
    let pages = NodePages::open(machine, &shape(Some(budget))).unwrap();
    let mut held = fill(machine, &pages, nodes);
    held.drain(500..).for_each(|pfn| pages.free_block(machine, pfn, Order(0)));
    (pages, held)
}

#[test]
fn memory_beyond_a_cut_budget_is_released() {
    for nodes in [ONE, TWO] {
        let machine = machine_with(nodes);
        let (pages, held) = mostly_freed(&machine, 3000, nodes.len());
        let released = pages.statistics().released;
        pages.change(&budget_only(Some(1000)));
        assert_eq!(pages.beyond_budget(), 0);
        pages.shed(&machine, &|| true);
        assert_eq!(pages.statistics().released, released, "stopped at once");
        pages.shed(&machine, &|| false);
        assert!(pages.counted() <= 1000, "{} pages", pages.counted());
        assert!(pages.statistics().released > released);
        end(&machine, &pages, held);
    }
}

/// Pages that leave the lists, or are freed, after a cut are free pages beyond the budget.
#[test]
fn pages_freed_after_a_cut_are_shed() {
    for nodes in [ONE, TWO] {
        let machine = machine_with(nodes);
        let pages = NodePages::open(&machine, &shape(Some(3000))).unwrap();
        let mut held = fill(&machine, &pages, nodes.len());
        pages.change(&budget_only(Some(1000)));
        held.drain(500..).for_each(|pfn| pages.free_block(&machine, pfn, Order(0)));
        assert_eq!(pages.beyond_budget(), 0);
        pages.shed(&machine, &|| false);
        assert!(pages.counted() <= 1000, "{} pages", pages.counted());
        end(&machine, &pages, held);
    }
}

/// A budget that is lifted leaves nothing to shed.
#[test]
fn without_a_budget_nothing_is_shed() {
    let machine = machine_with(ONE);
    let (pages, held) = mostly_freed(&machine, 3000, 1);
    pages.change(&budget_only(Some(1000)));
    pages.change(&budget_only(None));
    let released = pages.statistics().released;
    let block = pages.allocate_block(&machine, Order(5)).unwrap().pfn;
    pages.shed(&machine, &|| false);
    assert_eq!(pages.statistics().released, released);
    pages.free_block(&machine, block, Order(5));
    end(&machine, &pages, held);
}

#[test]
fn an_allocation_that_fails_releases_what_is_beyond_the_budget() {
    let machine = machine_with(ONE);
    let (pages, held) = mostly_freed(&machine, 3000, 1);
    pages.change(&budget_only(Some(1000)));
    assert!(pages.allocate_run(&machine, 900, 1).is_err());
    assert!(pages.counted() <= 1000, "{} pages", pages.counted());
    end(&machine, &pages, held);
}

/// A release takes 2 MiB at least, so at most as much less stays.
#[test]
fn free_memory_that_fits_a_cut_budget_stays() {
    for nodes in [ONE, TWO] {
        let machine = machine_with(nodes);
        let (pages, mut held) = mostly_freed(&machine, 30_000, nodes.len());
        pages.change(&budget_only(Some(20_000)));
        pages.shed(&machine, &|| false);
        // The next allocation sheds as well.
        held.push(pages.allocate_block(&machine, Order(0)).unwrap().pfn);
        let counted = pages.counted();
        assert!((20_000 - 1024..=20_000).contains(&counted), "{counted} pages");
        end(&machine, &pages, held);
    }
}

#[test]
fn budget_can_be_set_and_lifted_while_memory_is_in_use() {
    for nodes in [ONE, TWO] {
        let machine = machine_with(nodes);
        let pages = NodePages::open(&machine, &Shape { list_high: Some(0), ..shape(None) }).unwrap();
        let take = |turn: usize| {
            Virtual::run_on(turn % nodes.len());
            pages.allocate_block(&machine, Order(0)).unwrap().pfn
        };
        let mut held: Vec<Pfn> = (0..2000).map(take).collect();
        pages.change(&budget(1500));
        pages.verify().unwrap();
        let tables = u64::from(pages.statistics().table_pages);
        assert_eq!(pages.beyond_budget(), 500 + tables);
        assert!(pages.allocate_block(&machine, Order(0)).is_err());
        pages.change(&budget(2100 + tables as u32));
        held.extend(fill(&machine, &pages, nodes.len()));
        assert_eq!((held.len(), pages.beyond_budget()), (2100, 0));
        pages.change(&Settings { list_high: Some(0), ..budget_only(None) });
        held.extend((0..3000).map(take));
        pages.verify().unwrap();
        assert_eq!((pages.beyond_budget(), pages.statistics().budget), (0, None));
        end(&machine, &pages, held);
    }
}

#[test]
fn lists_follow_a_changed_bound_at_once() {
    let machine = machine_with(ONE);
    let pages = NodePages::open(&machine, &shape(None)).unwrap();
    let highs = || (pages.statistics().list_high, pages.statistics().listed);
    Virtual::run_on(0);
    let swing = |blocks: usize| {
        let take = |_| pages.allocate_block(&machine, Order(0)).unwrap().pfn;
        let held: Vec<Pfn> = (0..blocks).map(take).collect();
        held.into_iter().for_each(|pfn| pages.free_block(&machine, pfn, Order(0)));
    };
    let tuned = highs().0;
    swing(2000);
    assert!(highs().1 > 100, "pages are listed: {:?}", highs());
    let set = |list_high| pages.change(&Settings { list_high, ..budget_only(None) });
    set(Some(20));
    assert!(highs().0 == 20 && highs().1 <= 20, "{:?}", highs());
    swing(2000);
    assert!(highs().0 == 20 && highs().1 <= 27, "{:?}", highs());
    set(Some(0));
    assert_eq!(highs(), (0, 0));
    let locks = pages.statistics().zone_locks;
    swing(100);
    assert!(highs() == (0, 0) && pages.statistics().zone_locks >= locks + 200, "each block is the zone's");
    set(Some(5000));
    swing(6000);
    assert!(highs().0 == 5000 && (4000..=5007).contains(&highs().1), "{:?}", highs());
    set(None);
    assert!(highs().0 == tuned && highs().1 <= tuned, "{:?}", highs());
    end(&machine, &pages, Vec::new());
}

#[test]
fn batches_follow_a_changed_scale() {
    // An eighth of what one CPU's list may keep holds the largest batch.
    let machine = machine_with(&[0]);
    let pages = NodePages::open(&machine, &Shape { batch_scale: 0, ..shape(None) }).unwrap();
    Virtual::run_on(0);
    let mut held = Vec::new();
    let mut batch_of = |scale| {
        pages.change(&Settings { batch_scale: scale, ..budget_only(None) });
        held.extend((0..20_000).map(|_| pages.allocate_block(&machine, Order(0)).unwrap().pfn));
        pages.statistics().list_batch
    };
    assert_eq!([0, 5, 2, 6].map(&mut batch_of), [63, 2016, 252, 4032]);
    end(&machine, &pages, held);
}

#[test]
fn changes_while_threads_allocate_lose_no_page() {
    const THREADS: usize = 4;
    let machine = Linux::probe().with_nodes(2);
    let pages = NodePages::open(&machine, &shape(None)).unwrap();
    let (seed, is_over) = (seed(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let work = |mut random: Random| {
            let mut held: Vec<(Pfn, Order)> = Vec::new();
            while !is_over.load(Relaxed) {
                let order = Order(random.below(5) as u8);
                if held.len() < 1000
                    && random.below(2) == 0
                    && let Ok(block) = pages.allocate_block(&machine, order)
                {
                    held.push((block.pfn, order));
                } else if !held.is_empty() {
                    let (pfn, order) = held.swap_remove(random.below(held.len()));
                    pages.free_block(&machine, pfn, order);
                }
            }
            held.into_iter().for_each(|(pfn, order)| pages.free_block(&machine, pfn, order));
        };
        (0..THREADS).for_each(|thread| _ = scope.spawn(move || work(Random(seed + thread as u64))));
        let mut random = Random(seed + 100);
        for _ in 0..300 {
            let budget = [None, Some(200), Some(3000), Some(30_000)][random.below(4)];
            let list_high = [None, Some(0), Some(7), Some(2000)][random.below(4)];
            let batch_scale = random.below(7) as u32;
            pages.change(&Settings { budget, list_high, batch_scale });
            pages.shed(&machine, &|| false);
            if random.below(8) == 0 {
                pages.tick(&machine);
            }
            std::thread::yield_now();
        }
        is_over.store(true, Relaxed);
    });
    pages.change(&budget(400));
    pages.release_all(&machine);
    pages.verify().unwrap();
    let numbers = pages.statistics();
    assert_eq!((numbers.used, numbers.backed_free, numbers.listed, pages.beyond_budget()), (0, 0, 0, 0));
    // SAFETY: the test is over, and no other thread uses the pages.
    unsafe { pages.close(&machine) };
}
