//! Every state that one class can get into with few objects, on two CPUs.
//!
//! Goal: no order of allocations, frees, drains and trims, from either CPU, loses an object or a
//! sheaf, or brings counts and lists out of step.
//!
//! Method: the largest class has stacks of 32 objects, sheaves of 14 and slabs of 8. Objects are
//! taken and freed nine at a time, so its states, seen as counts, are few. A breadth-first search
//! runs every operation in each state that is a few steps away. It reaches a state again by
//! repeating the shortest way on a fresh instance. After each operation the instance is verified,
//! and from each state everything can be freed.

use crate::instance::{CONFIG, Opened, machine};
use neap_objects::size_class::Class;
use neap_objects::verify::Census;
use neap_pages::Effort;
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use std::collections::{BTreeSet, VecDeque};

/// The class with the smallest stacks.
const CLASS: Class = Class(72);
/// Objects that a step takes or frees. The capacities of stacks and sheaves are no multiples of it.
const STRIDE: usize = 9;
/// The most objects the program has at a time: more than a stack or a slab holds.
const MOST: usize = 5 * STRIDE;
/// Steps from the beginning up to which every state is tried.
const LONGEST: usize = 12;

#[derive(Clone, Copy, Debug)]
enum Step {
    Take(usize),
    GiveOldest(usize),
    GiveNewest(usize),
    Drain(usize),
    TrimIdle,
    TrimAll,
}

const STEPS: [Step; 10] = [
    Step::Take(0),
    Step::Take(1),
    Step::GiveOldest(0),
    Step::GiveOldest(1),
    Step::GiveNewest(0),
    Step::GiveNewest(1),
    Step::Drain(0),
    Step::Drain(1),
    Step::TrimIdle,
    Step::TrimAll,
];

struct World {
    o: Opened<Shared<Virtual>>,
    held: VecDeque<*mut u8>,
}

impl World {
    fn after(way: &[Step]) -> World {
        let mut world = World { o: Opened::new(machine(2), &CONFIG).unwrap(), held: VecDeque::new() };
        way.iter().for_each(|step| assert!(world.step(*step)));
        world
    }

    /// Runs a step; `false` if there are no objects for it.
    fn step(&mut self, step: Step) -> bool {
        let o = &self.o;
        match step {
            Step::Take(_) if self.held.len() == MOST => return false,
            Step::Take(cpu) => {
                Virtual::run_on(cpu);
                self.held.extend(o.take_many(CLASS, STRIDE));
            }
            Step::GiveOldest(cpu) | Step::GiveNewest(cpu) => {
                if self.held.is_empty() {
                    return false;
                }
                Virtual::run_on(cpu);
                for _ in 0..STRIDE {
                    let oldest = matches!(step, Step::GiveOldest(_));
                    let object = if oldest { self.held.pop_front() } else { self.held.pop_back() };
                    o.give(CLASS, object.unwrap());
                }
            }
            Step::Drain(cpu) => assert!(o.drain_cpu(cpu, |class| class == CLASS).is_some()),
            Step::TrimIdle => _ = o.trim_barn(CLASS, Effort::Sparing, &|| false),
            Step::TrimAll => assert!(!o.trim_barn(CLASS, Effort::Full, &|| false).has_sheaves),
        }
        true
    }

    /// The state, as counts.
    fn state(&self) -> [u64; 9] {
        let (o, census) = (&self.o, self.o.prove());
        let snapshot = |cpu| o.cpu_caches.snapshot(&o.platform, cpu, CLASS);
        let (full, empty) = o.barn(CLASS);
        let in_barn = o.caches[CLASS.index()].lock().full.objects();
        assert_eq!(census.allocated as usize, self.held.len());
        assert_eq!(census.sheaves, u64::from(full + empty));
        [
            self.held.len() as u64,
            snapshot(0).count.into(),
            snapshot(1).count.into(),
            snapshot(0).active.into(),
            snapshot(1).active.into(),
            full.into(),
            in_barn,
            empty.into(),
            o.slabs_of(CLASS).0.into(),
        ]
    }

    /// Frees everything.
    fn end(mut self) {
        while self.step(Step::GiveOldest(0)) {}
        self.o.drain();
        assert_eq!(self.o.prove(), Census::default());
        self.o.pages.release_all(&self.o.platform);
        let pages = self.o.pages.statistics();
        assert_eq!((pages.used, pages.backed_free), (0, 0));
    }
}

#[test]
fn every_state_of_the_largest_class() {
    assert_eq!((CLASS.stack_capacity(), CLASS.sheaf_capacity()), (32, 14), "what makes the search small");
    let mut seen = BTreeSet::from([World::after(&[]).state()]);
    let mut ways: VecDeque<Vec<Step>> = VecDeque::from([Vec::new()]);
    let (mut steps, mut longest) = (0, 0);
    while let Some(way) = ways.pop_front().filter(|way| way.len() < LONGEST) {
        longest = longest.max(way.len());
        for step in STEPS {
            let mut world = World::after(&way);
            if !world.step(step) {
                continue;
            }
            steps += 1;
            if seen.insert(world.state()) {
                ways.push_back([&way[..], &[step]].concat());
                world.end();
            }
        }
    }
    println!("{} states, {steps} steps, the longest way {longest}", seen.len());
    assert!(seen.len() > 1000, "{} states: the search did not get anywhere", seen.len());
}
