//! Several nodes: memory is near, no page is lost between them, and far memory comes last.
//!
//! Method: virtual machines whose CPUs belong to nodes, on real memory. A test in which a node runs
//! out takes all of the address space. Tests with random steps print their seed.

use crate::machine::{Held, Opened, shape};
use core::ops::Deref;
use neap_base::Order;
use neap_base::platform::memory;
use neap_pages::{Exhausted, NodePages, Shape, Statistics, Watermarks};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::{Call, Virtual};

struct Nodes<'p> {
    machine: &'p Virtual,
    pages: NodePages<Virtual>,
}

impl<'p> Nodes<'p> {
    fn new(machine: &'p Virtual, shape: &Shape) -> Nodes<'p> {
        Nodes { machine, pages: NodePages::open(machine, shape).unwrap() }
    }

    fn take(&self, cpu: usize, order: u8) -> Result<Held, Exhausted> {
        Virtual::run_on(cpu);
        let block = self.pages.allocate_block(self.machine, Order(order))?;
        Ok(Held::stamp(
            self.pages.node(0),
            block.pfn,
            1 << order,
            Some(Order(order)),
            block.zero,
            u64::from(block.pfn.0),
        ))
    }

    fn take_run(&self, cpu: usize, pages: u32) -> Result<Held, Exhausted> {
        Virtual::run_on(cpu);
        let block = self.pages.allocate_run(self.machine, pages, 1)?;
        Ok(Held::stamp(self.pages.node(0), block.pfn, pages, None, block.zero, u64::from(block.pfn.0)))
    }

    fn give(&self, cpu: usize, held: Held) {
        Virtual::run_on(cpu);
        held.check(self.pages.node(0));
        match held.order {
            Some(order) => self.pages.free_block(self.machine, held.pfn, order),
            None => self.pages.free_run(self.machine, held.pfn, held.pages),
        }
    }

    fn node_of(&self, held: &Held) -> usize {
        self.pages.node_of(held.pfn)
    }

    fn used(&self, node: usize) -> u32 {
        self.pages.node(node).statistics().used
    }

    /// Checks that no page is used or resident on any node.
    fn is_empty(&self) {
        self.pages.release_all(self.machine);
        self.pages.verify().unwrap();
        let numbers = self.pages.statistics();
        assert_eq!((numbers.used, numbers.listed, numbers.backed_free), (0, 0, 0), "{numbers:?}");
    }
}

impl Deref for Nodes<'_> {
    type Target = NodePages<Virtual>;

    fn deref(&self) -> &NodePages<Virtual> {
        &self.pages
    }
}

impl Drop for Nodes<'_> {
    fn drop(&mut self) {
        // SAFETY: the test is over, and nothing of the pages is used after this.
        unsafe { self.pages.close(self.machine) };
    }
}

/// Two CPUs on each of two nodes.
fn two_by_two() -> Virtual {
    Virtual::new(4096, 4).with_nodes(&[0, 0, 1, 1])
}

#[test]
fn memory_is_of_the_nearest_node_and_bound_to_it() {
    let machine = two_by_two();
    let o = Nodes::new(&machine, &shape(None));
    let mut held = Vec::new();
    for round in 0..200 {
        for cpu in 0..4 {
            let taken =
                if round % 10 == 0 { o.take_run(cpu, 3 + round) } else { o.take(cpu, (round % 5) as u8) }.unwrap();
            assert_eq!((o.node_of(&taken), machine.bound_to(o.address(taken.pfn))), (cpu / 2, Some(cpu / 2)));
            held.push(taken);
        }
    }
    // Longer than any segment so far.
    let run = o.take_run(3, 20_000).unwrap();
    assert_eq!((o.node_of(&run), machine.bound_to(o.address(run.pfn.plus(19_999)))), (1, Some(1)));
    held.push(run);
    o.pages.verify().unwrap();
    held.into_iter().for_each(|held| o.give(0, held));
    assert_eq!(o.statistics().node_misses, 0);
    o.is_empty();
}

#[test]
fn a_page_freed_elsewhere_goes_back_to_its_own_node() {
    let machine = two_by_two();
    let o = Nodes::new(&machine, &shape(None));
    let near: Vec<Held> = (0..500).map(|n| o.take(0, (n % 4) as u8).unwrap()).collect();
    let pages: u32 = near.iter().map(|held| held.pages).sum();
    assert!(o.used(0) >= pages && o.used(1) == 0);
    // By the lists of a CPU of the other node. That CPU takes none of these pages from them.
    for held in near {
        o.give(2, held);
        let own = o.take(2, 0).unwrap();
        assert_eq!(o.node_of(&own), 1);
        o.give(2, own);
    }
    o.pages.verify().unwrap();
    assert!(o.pages.listed_on(2).unwrap() > 0, "some are in the lists of CPU 2");
    o.pages.drain_cpu(&machine, 2);
    o.pages.drain_cpu(&machine, 0);
    assert_eq!((o.used(0), o.used(1), o.pages.listed_on(2)), (0, 0, Some(0)));
    o.is_empty();
}

/// All address space in small segments: the first one of each node, and the rest of node 0. No node
/// can grow any more.
fn full(machine: &Virtual, nodes: usize) -> (Nodes<'_>, Vec<Held>) {
    let o = Nodes::new(machine, &Shape { span: 64 << 20, ..shape(None) });
    let mut held: Vec<Held> = (0..nodes).map(|cpu| o.take(cpu, 0).unwrap()).collect();
    while o.limit() < 64 << 20 {
        held.push(o.take(0, 10).unwrap());
    }
    (o, held)
}

#[test]
fn far_nodes_are_used_by_distance_after_nearer_lists_are_empty() {
    let machine = Virtual::new(4096, 3).with_nodes(&[0, 1, 2]).with_scarce_address_space();
    for cpu in [0, 2] {
        let (o, held) = full(&machine, 3);
        // Into the lists of a third CPU, which is nearest to the other node.
        held.into_iter().for_each(|held| o.give(1, held));
        for _ in 0..40 {
            let some: Vec<Held> = (0..3).map(|cpu| o.take(cpu, 0).unwrap()).collect();
            some.into_iter().for_each(|held| o.give(1, held));
        }
        let mut order = Vec::new();
        let mut held = Vec::new();
        while let Ok(taken) = o.take(cpu, 0) {
            let node = o.node_of(&taken);
            if order.last() != Some(&node) {
                let nearer = order.iter().map(|&node: &usize| o.node(node).statistics());
                nearer.for_each(|near| assert_eq!((near.free, near.listed), (0, 0), "node {node} after {order:?}"));
                order.push(node);
            }
            held.push(taken);
        }
        assert_eq!(order, if cpu == 0 { [0, 1, 2] } else { [2, 1, 0] });
        let numbers = o.statistics();
        assert_eq!((numbers.used, numbers.free, numbers.listed), (numbers.managed, 0, 0));
        let far = held.iter().filter(|held| o.node_of(held) != cpu).count() as u64;
        // A refill brings more than one block.
        let misses = o.node(cpu).statistics().node_misses;
        assert!(misses > 0 && misses <= far && misses == numbers.node_misses, "{misses} of {far}");
        o.pages.verify().unwrap();
        held.into_iter().for_each(|held| o.give(0, held));
        o.is_empty();
    }
}

#[test]
fn a_run_that_no_near_node_has_in_a_row_comes_from_afar() {
    let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]).with_scarce_address_space();
    let (o, held) = full(&machine, 2);
    held.into_iter().for_each(|held| o.give(0, held));
    let run = o.take_run(1, 2000).unwrap();
    let (near, far) = (o.node(1).statistics(), o.node(0).statistics());
    assert_eq!((o.node_of(&run), near.node_misses, near.need_drains, far.need_drains), (0, 1, 1, 0));
    assert!(matches!(o.take_run(1, 1 << 20), Err(Exhausted)));
    o.give(1, run);
    o.is_empty();
}

#[test]
fn a_budget_is_one_whatever_node_uses_it() {
    let machine = two_by_two();
    const BUDGET: u32 = 10_000;
    let o = Nodes::new(&machine, &shape(Some(BUDGET)));
    for (cpus, pages) in [([2, 2], 1), ([0, 2], 8), ([0, 0], 4), ([3, 1], 1)] {
        let (mut held, mut turn) = (Vec::new(), 0);
        while let Ok(taken) = o.take(cpus[turn % 2], pages as u8 / 4) {
            assert_eq!(o.node_of(&taken), cpus[turn % 2] / 2, "there is room for all near");
            held.push(taken);
            turn += 1;
        }
        let sum: u32 = held.iter().map(|held| held.pages).sum();
        let largest = held.iter().map(|held| held.pages).max().unwrap();
        assert!(sum <= BUDGET && sum + largest > BUDGET, "{sum} pages of {BUDGET}");
        o.pages.verify().unwrap();
        held.into_iter().for_each(|held| o.give(1, held));
    }
    // Nearly all of the budget in one run, which the other node had before.
    let run = o.take_run(0, BUDGET - 10).unwrap();
    assert_eq!(o.node_of(&run), 0);
    assert!(o.resize_run(&machine, run.pfn, run.pages, BUDGET), "the rest was the other node's");
    assert!(!o.resize_run(&machine, run.pfn, BUDGET, BUDGET + 1));
    Virtual::run_on(0);
    o.free_run(&machine, run.pfn, BUDGET);
    o.is_empty();
}

#[test]
fn a_run_grows_in_place_unless_another_node_lies_behind_it() {
    let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]).with_scarce_address_space();
    let o = Nodes::new(&machine, &shape(None));
    let run = o.take_run(0, 1000).unwrap();
    assert!(o.resize_run(&machine, run.pfn, 1000, 5000), "no block is behind");
    let wall = o.take(1, 0).unwrap();
    let limit = o.limit();
    assert!(!o.resize_run(&machine, run.pfn, 5000, 50_000));
    assert_eq!(o.limit(), limit, "no segment was mapped in vain");
    o.free_run(&machine, run.pfn, 5000);
    o.give(0, wall);
    o.is_empty();
}

#[test]
fn memory_that_may_not_be_bound_is_used_all_the_same() {
    let machine = two_by_two();
    machine.fail(Call::Bind, 1, usize::MAX);
    let o = Nodes::new(&machine, &shape(None));
    let held: Vec<Held> = (0..4).map(|cpu| o.take_run(cpu, 3000).unwrap()).collect();
    let nodes: Vec<usize> = held.iter().map(|held| o.node_of(held)).collect();
    assert_eq!((nodes, o.statistics().unbound_segments), (vec![0, 0, 1, 1], machine.made(Call::Bind) as u32 - 1));
    held.into_iter().for_each(|held| o.give(3, held));
    o.is_empty();
}

#[test]
fn opening_fails_at_every_call_and_leaves_nothing_behind() {
    for call in [Call::Map, Call::MapAt] {
        let machine = two_by_two();
        for position in 0.. {
            machine.fail(call, position, usize::MAX);
            let opened = NodePages::open(&machine, &shape(None));
            machine.fail(call, 0, 0);
            if let Ok(pages) = opened {
                assert!(position > 2 && machine.mapped_bytes() > 0, "{call:?} is made {position} times");
                // SAFETY: the pages were just opened, and no other thread uses them.
                unsafe { pages.close(&machine) };
                assert_eq!(machine.mapped_bytes(), 0);
                break;
            }
            assert_eq!(machine.mapped_bytes(), 0, "{call:?} failed from call {position} on");
        }
    }
}

#[test]
fn one_node_binds_nothing_and_asks_for_no_node() {
    let machine = Virtual::new(4096, 2);
    let o = Nodes::new(&machine, &shape(None));
    let held: Vec<Held> = (0..100).map(|n| o.take(n % 2, 0).unwrap()).collect();
    assert_eq!((o.nodes(), machine.made(Call::Bind), machine.bound_to(o.base())), (1, 0, None));
    held.into_iter().for_each(|held| o.give(0, held));
    o.is_empty();
}

/// A node's lists and watermarks are for its part of the budget. Pages opened alone have all of it,
/// and no node.
#[test]
fn nodes_divide_lists_and_watermarks_and_pages_alone_do_not() {
    const BUDGET: u32 = 100_000;
    let machine = two_by_two();
    let alone = |machine, budget| Opened::new(machine, &shape(Some(budget))).unwrap().pages.statistics();
    let plain = Virtual::new(4096, 4);
    let bounds = |numbers: Statistics| (numbers.watermarks, numbers.list_highs, numbers.budget);
    assert_eq!(bounds(alone(&machine, BUDGET)), bounds(alone(&plain, BUDGET)));
    assert_eq!(machine.made(Call::Bind), 0);
    let o = Nodes::new(&machine, &shape(Some(BUDGET)));
    let half = alone(&plain, BUDGET / 2);
    for node in 0..2 {
        let numbers = o.node(node).statistics();
        assert_eq!((numbers.watermarks, numbers.list_highs), (half.watermarks, half.list_highs));
    }
    let Watermarks { min, low, high } = half.watermarks;
    let both = Watermarks { min: 2 * min, low: 2 * low, high: 2 * high };
    assert_eq!(bounds(o.statistics()), (both, 2 * half.list_highs, Some(BUDGET)));
    assert!(min > 0 && half.list_highs > 0);
}

#[test]
fn random_steps_on_three_nodes_lose_nothing() {
    let mut random = Random(seed());
    for budget in [None, Some(3000)] {
        let machine = Virtual::new(4096, 5).with_nodes(&[0, 0, 1, 2, 2]);
        let o = Nodes::new(&machine, &shape(budget));
        let mut held: Vec<Held> = Vec::new();
        for step in 0..6000 {
            let cpu = random.below(5);
            match random.below(8) {
                0..4 => held.extend(o.take(cpu, random.below(6) as u8)),
                4 => held.extend(o.take_run(cpu, 1 + random.below(300) as u32)),
                _ if held.is_empty() => {}
                _ => {
                    let one = held.swap_remove(random.below(held.len()));
                    o.give(cpu, one);
                }
            }
            if random.below(100) == 0 {
                machine.advance(300_000_000);
                o.pages.tick(&machine);
            }
            if step % 500 == 0 {
                o.pages.verify().unwrap_or_else(|finding| panic!("step {step}: {finding}"));
            }
        }
        held.into_iter().for_each(|held| o.give(random.below(5), held));
        o.is_empty();
    }
}

#[test]
fn threads_on_all_nodes_exchange_pages() {
    let machine = Virtual::new(4096, 4).with_nodes(&[0, 1, 2, 1]);
    let seed = seed();
    for budget in [None, Some(4000)] {
        let o = Nodes::new(&machine, &shape(budget));
        let pool = std::sync::Mutex::new(Vec::<Held>::new());
        std::thread::scope(|scope| {
            for cpu in 0..4 {
                let (o, pool) = (&o, &pool);
                scope.spawn(move || {
                    let mut random = Random(seed + cpu as u64);
                    for _ in 0..4000 {
                        if random.below(2) == 0
                            && let Ok(taken) = o.take(cpu, random.below(5) as u8)
                        {
                            pool.lock().unwrap().push(taken);
                        }
                        let mut pool = pool.lock().unwrap();
                        let count = pool.len();
                        if count > 0 && random.below(2) == 0 {
                            let one = pool.swap_remove(random.below(count));
                            drop(pool);
                            o.give(cpu, one);
                        }
                    }
                });
            }
            scope.spawn(|| (0..300).for_each(|_| _ = o.pages.tick(&machine)));
        });
        pool.into_inner().unwrap().into_iter().for_each(|held| o.give(0, held));
        o.is_empty();
    }
}

/// Chunks of several nodes alternate, so free pages behind a run may be another node's.
#[test]
fn a_run_does_not_grow_into_what_another_node_has_free() {
    let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]).with_scarce_address_space();
    let o = Nodes::new(&machine, &shape(None));
    let run = o.take_run(0, 1024).unwrap();
    let [one, two] = [o.take(1, 9).unwrap(), o.take(1, 9).unwrap()];
    let (lower, upper) = if one.pfn.0 < two.pfn.0 { (one, two) } else { (two, one) };
    assert_eq!(lower.pfn.0, run.pfn.0 + 1024, "the test needs them side by side");
    o.give(1, lower);
    let behind = o.take_run(0, 1024).unwrap();
    Virtual::run_on(0);
    assert!(!o.pages.resize_run(&machine, run.pfn, 1024, 1100));
    o.pages.verify().unwrap();
    o.give(0, run);
    o.give(1, upper);
    o.give(0, behind);
    o.pages.verify().unwrap();
}

/// A run may grow by the part of the budget that other nodes were granted and do not use.
#[test]
fn a_run_grows_by_what_other_nodes_do_not_use_of_the_budget() {
    let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]);
    let o = Nodes::new(&machine, &shape(Some(10_000)));
    let hog = o.take_run(1, 8000).unwrap();
    let run = o.take_run(0, 1100).unwrap();
    o.give(1, hog);
    Virtual::run_on(0);
    assert!(o.pages.resize_run(&machine, run.pfn, 1100, 5600));
    assert!(!o.pages.resize_run(&machine, run.pfn, 5600, 10_001));
    o.pages.free_run(&machine, run.pfn, 5600);
    o.pages.verify().unwrap();
}

/// Freed pages that the system does not take back stay resident, so their part of the budget stays
/// with their node.
#[test]
fn other_nodes_do_not_get_the_room_of_resident_pages() {
    let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]);
    let o = Nodes::new(&machine, &shape(Some(10_000)));
    let hog = o.take_run(1, 8000).unwrap();
    o.give(1, hog);
    machine.fail(Call::Release, 0, usize::MAX);
    let mut runs = Vec::new();
    while let Ok(run) = o.take_run(0, 100) {
        runs.push(run);
    }
    assert!(o.pages.resident() <= 10_000, "{} pages are resident", o.pages.resident());
    machine.fail(Call::Release, 0, 0);
    runs.into_iter().for_each(|run| o.give(0, run));
    o.pages.verify().unwrap();
}

/// If the maps with a bit per chunk fill whole pages, the next chunks have a part of another page.
#[test]
fn the_last_chunks_of_an_arena_have_their_places_in_the_maps() {
    const FULL: usize = 128 << 30;
    const CHUNK: usize = 4 << 20;
    if memory::address_space_limit().is_some() || memory::overcommit_refused() {
        return;
    }
    for cpu in 0..2 {
        let machine = Virtual::new(4096, 2).with_nodes(&[0, 1]);
        let o = Nodes::new(&machine, &Shape { span: FULL + CHUNK, ..shape(None) });
        let mut runs = Vec::new();
        let mut take = |cpu, pages| {
            Virtual::run_on(cpu);
            runs.push((o.pages.allocate_run(&machine, pages, 1).unwrap().pfn, pages));
        };
        // The test touches none of it.
        while o.limit() < FULL {
            take(0, 8192);
        }
        while o.limit() < FULL + CHUNK {
            take(cpu, 1024);
        }
        let last = runs.last().unwrap().0;
        assert_eq!((last.index() << 12, o.pages.node_of(last)), (FULL, cpu));
        o.pages.verify().unwrap();
        runs.into_iter().for_each(|(pfn, pages)| o.pages.free_run(&machine, pfn, pages));
        o.is_empty();
    }
}
