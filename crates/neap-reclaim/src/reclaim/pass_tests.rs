//! Tests of passes, on a model of groups and caches.
//!
//! The model is a [`Domain`] of plain numbers. Each group is one cache, which frees objects by the
//! published arithmetic. The tests use one thread and no locks.

use super::inside;
use super::pass::{Ask, Domain, GOAL, Given, PassResult, Passes, UsedBytes, goal};
use super::pressure::{Level, Levels};
use crate::shrinkers::{FIRST_PRIORITY, ScanPressure, WHOLE};
use core::cell::{Cell, RefCell};
use neap_groups::protection::GroupUsage;
use neap_groups::{Event, GroupId};
use proptest::prelude::*;
use std::vec::Vec;

const SIZE: u64 = 1000;
const BATCH: u64 = 16;

/// A group right below the top.
#[derive(Clone, Debug, Default)]
struct Cache {
    objects: Cell<u64>,
    deferred: Cell<u64>,
    /// Further bytes that it is charged for.
    fixed: u64,
    min: u64,
    low: u64,
    /// It reports freed bytes, and frees none.
    lies: bool,
}

impl Cache {
    fn usage(&self) -> u64 {
        self.objects.get() * SIZE + self.fixed
    }
}

#[derive(Debug, Default)]
struct Model {
    caches: Vec<Cache>,
    now: Cell<u64>,
    told: RefCell<Vec<(GroupId, Event)>>,
    visits: RefCell<Vec<u32>>,
    enough: Cell<bool>,
    /// Its thread is written off in the first callback.
    sticks: bool,
    /// Readings of used bytes.
    looks: Cell<u32>,
    /// Callbacks report no bytes.
    is_mute: bool,
    /// Priorities that are skipped.
    skipped: u32,
}

fn id(slot: u32) -> GroupId {
    GroupId::from_bits(GroupId::ROOT.to_bits() + u64::from(slot) + 1)
}

impl Domain for Model {
    fn nodes(&self) -> usize {
        1
    }

    fn now(&self) -> u64 {
        self.now.replace(self.now.get() + 1)
    }

    fn next(&self, _top: GroupId, _node: usize, from: u32) -> Option<u32> {
        (from..self.caches.len() as u32).find(|&slot| self.caches[slot as usize].objects.get() > 0)
    }

    fn first_priority(&self) -> u32 {
        FIRST_PRIORITY - self.skipped
    }

    fn group_usage(&self, slot: u32, _top: GroupId) -> Option<GroupUsage> {
        let cache = &self.caches[slot as usize];
        let (usage, min, low) = (cache.usage(), cache.min.min(cache.usage()), cache.low.min(cache.usage()));
        Some(GroupUsage { id: id(slot), usage, min, low })
    }

    fn give(&self, group: GroupId, slot: u32, _node: usize, pressure: ScanPressure) -> Given {
        assert_eq!(group, id(slot));
        self.visits.borrow_mut().push(slot);
        let cache = &self.caches[slot as usize];
        let freeable = cache.objects.get();
        let delta = (freeable >> pressure.priority) * 2 * u64::from(pressure.share) / u64::from(WHOLE);
        let wanted = cache.deferred.get() + delta;
        let mut total = ((cache.deferred.get() >> pressure.priority) + delta).min(2 * freeable);
        total = if pressure.least { total.max(BATCH.min(freeable)) } else { total };
        let mut given = Given::default();
        while total >= BATCH || total >= freeable && total > 0 {
            let part = total.min(BATCH);
            let freed = part.min(cache.objects.get());
            if !cache.lies {
                cache.objects.set(cache.objects.get() - freed);
            }
            given.scanned += part;
            given.freed += freed;
            given.bytes += if self.is_mute { 0 } else { freed * SIZE };
            total -= part;
        }
        cache.deferred.set(wanted.saturating_sub(given.scanned).min(2 * freeable));
        given
    }

    fn used(&self, _top: GroupId) -> UsedBytes {
        self.looks.set(self.looks.get() + 1);
        UsedBytes { in_group: self.caches.iter().map(Cache::usage).sum(), in_pages: 0 }
    }

    /// All freed bytes are cached at first.
    fn charged(&self, _top: GroupId) -> UsedBytes {
        UsedBytes { in_group: u64::MAX, in_pages: u64::MAX }
    }

    fn tell(&self, group: GroupId, event: Event) {
        self.told.borrow_mut().push((group, event));
    }

    fn note(&self, levels: &Levels, group: GroupId, scanned: u64, freed: u64) -> Option<Level> {
        levels.note(&inside(), group, scanned, freed)
    }

    fn has_enough(&self) -> bool {
        self.enough.get()
    }

    fn is_called_off(&self) -> bool {
        self.sticks && !self.visits.borrow().is_empty()
    }
}

fn cache(objects: u64) -> Cache {
    Cache { objects: Cell::new(objects), ..Cache::default() }
}

fn model(caches: &[Cache]) -> Model {
    Model { caches: caches.to_vec(), ..Model::default() }
}

fn left(model: &Model) -> Vec<u64> {
    model.caches.iter().map(|cache| cache.objects.get()).collect()
}

fn ask(bytes: u64) -> Ask {
    Ask { top: GroupId::ROOT, bytes, deadline: u64::MAX, node: None, ahead: false }
}

fn run(model: &Model, bytes: u64) -> PassResult {
    Passes::default().run(model, &ask(bytes))
}

#[test]
fn a_pass_brings_what_is_asked_for_and_not_much_more() {
    for is_mute in [false, true] {
        let model = Model { is_mute, ..model(&[cache(100_000)]) };
        let got = run(&model, 50 * SIZE);
        assert!((50..200).contains(&(got.bytes / SIZE)), "{got:?}");
        assert_eq!((got.freed, got.bytes), (100_000 - left(&model)[0], got.freed * SIZE));
    }
}

#[test]
fn groups_give_in_proportion_to_unprotected_usage() {
    let protected = Cache { low: 30_000 * SIZE, ..cache(40_000) };
    let model = model(&[cache(30_000), cache(10_000), protected]);
    let background = Ask { node: Some(0), ..ask(4000 * SIZE) };
    Passes::default().run(&model, &background);
    let given: Vec<_> = left(&model).iter().zip([30_000, 10_000, 40_000]).map(|(left, had)| had - left).collect();
    assert!(given[0].abs_diff(3 * given[1]) <= given[0] / 20, "{given:?}");
    assert!(given[2].abs_diff(given[1]) <= 2 * BATCH, "a quarter of it counts: {given:?}");
}

#[test]
fn min_is_never_reclaimed_and_low_only_as_last_resort() {
    let (min, low) = (Cache { min: u64::MAX, ..cache(500) }, Cache { low: u64::MAX, ..cache(500) });
    let both = model(&[min.clone(), low.clone(), cache(500)]);
    let passes = Passes::default();
    assert!(passes.run(&both, &ask(500 * SIZE)).bytes >= 500 * SIZE);
    assert_eq!(
        (left(&both), both.told.borrow().iter().any(|(_, event)| *event == Event::Low)),
        (Vec::from([500, 500, 0]), false)
    );
    assert!(passes.run(&both, &ask(100 * SIZE)).is_something());
    assert!(left(&both)[1] < 500 && left(&both)[0] == 500);
    assert!(both.told.borrow().contains(&(id(1), Event::Low)));
    assert_eq!(run(&model(&[min]), SIZE), PassResult { priority: 12, ..PassResult::default() });
}

#[test]
fn l16_what_one_try_was_allowed_the_next_pass_is_not() {
    let passes = Passes::default();
    let alone = model(&[Cache { low: u64::MAX, ..cache(5000) }]);
    assert!(passes.run(&alone, &ask(SIZE)).is_something());
    let beside = model(&[Cache { low: u64::MAX, ..cache(5000) }, cache(5000)]);
    assert!(passes.run(&beside, &ask(SIZE)).is_something());
    assert_eq!(left(&beside)[0], 5000);
}

/// In this number of visits, other passes take the objects that a pass finds. They also take all
/// other groups of the round that it joined.
struct Raced<'a>(&'a Model, &'a Passes, Cell<u32>);

impl Domain for Raced<'_> {
    fn nodes(&self) -> usize {
        1
    }
    fn now(&self) -> u64 {
        0
    }
    fn next(&self, top: GroupId, node: usize, from: u32) -> Option<u32> {
        self.0.next(top, node, from)
    }
    fn group_usage(&self, slot: u32, top: GroupId) -> Option<GroupUsage> {
        self.0.group_usage(slot, top)
    }
    fn give(&self, group: GroupId, slot: u32, node: usize, pressure: ScanPressure) -> Given {
        if self.2.get() > 0 {
            self.2.set(self.2.get() - 1);
            self.1.end_round(GroupId::ROOT, node, self.0.caches.len() as u32 / 2);
            return Given { scanned: 1, ..Given::default() };
        }
        self.0.give(group, slot, node, pressure)
    }
    fn used(&self, top: GroupId) -> UsedBytes {
        self.0.used(top)
    }
    fn charged(&self, top: GroupId) -> UsedBytes {
        self.0.charged(top)
    }
    fn tell(&self, _: GroupId, _: Event) {}
    fn note(&self, _: &Levels, _: GroupId, _: u64, _: u64) -> Option<Level> {
        None
    }
}
#[test]
fn l17_a_pass_that_finds_nothing_in_shared_walks_makes_its_own() {
    let (model, passes) = (model(&[cache(100), cache(100)]), Passes::default());
    // No shared walk frees anything; there is one for each priority.
    let got = passes.run(&Raced(&model, &passes, Cell::new(13)), &ask(SIZE));
    assert!(got.is_something() && left(&model).iter().sum::<u64>() == 200 - got.freed, "{got:?}");
}

/// With thousands of groups, a complete walk would take milliseconds, and all cached objects.
#[test]
fn private_walk_ends_at_its_goal_and_starts_at_shared_cursor() {
    let (model, passes) = (model(&std::vec![cache(100); 1000]), Passes::default());
    let got = passes.run(&Raced(&model, &passes, Cell::new(13)), &ask(150 * SIZE));
    assert!(got.bytes >= 150 * SIZE && got.visits <= 13 + 20, "{got:?}");
    assert_eq!(model.visits.borrow().first(), Some(&501));
}

#[test]
fn l15_only_enough_ends_a_row_of_failures() {
    let (passes, nothing) = (Passes::default(), model(&[]));
    let background = Ask { node: Some(0), ..ask(u64::MAX) };
    let something = model(&[cache(10_000)]);
    (0..15).for_each(|_| _ = passes.run(&nothing, &background));
    assert!(!passes.is_hopeless(0));
    assert!(passes.run(&something, &Ask { node: Some(0), ..ask(SIZE) }).is_something());
    assert!(passes.run(&something, &ask(SIZE)).is_something());
    passes.run(&nothing, &background);
    assert!(passes.is_hopeless(0), "what little came in between is no reason to go on");
    nothing.enough.set(true);
    passes.run(&nothing, &background);
    assert!(!passes.is_hopeless(0));
}

/// Another pass continues its work. Its end means neither enough memory nor the lack of it.
#[test]
fn written_off_pass_leaves_the_failure_row_unchanged() {
    let (passes, nothing) = (Passes::default(), model(&[]));
    let background = Ask { node: Some(0), ..ask(u64::MAX) };
    (0..15).for_each(|_| _ = passes.run(&nothing, &background));
    let stuck = || Model { sticks: true, ..model(&[Cache { fixed: SIZE, ..cache(1) }, cache(5000)]) };
    for ask in [Ask { node: Some(0), ..ask(SIZE) }, ask(SIZE)] {
        let model = stuck();
        let got = passes.run(&model, &ask);
        assert_eq!(
            (got, left(&model)),
            (PassResult { visits: 1, priority: 12, ..PassResult::default() }, Vec::from([1, 5000]))
        );
    }
    assert!(!passes.is_hopeless(0));
    passes.run(&nothing, &background);
    assert!(passes.is_hopeless(0));
}

/// A reading of used bytes takes as long as a look at all caches.
#[test]
fn what_is_used_is_not_looked_at_for_every_visit() {
    let caches = std::vec![cache(20_000); 1000];
    let many = Model { is_mute: true, ..model(&caches) };
    let got = run(&many, 30_000 * SIZE);
    assert!(got.visits > 500 && (30_000..31_000).contains(&(got.bytes / SIZE)), "{got:?}");
    assert!(many.looks.get() < 60, "{} looks, {got:?}", many.looks.get());
    let background = Model { is_mute: true, ..model(&caches) };
    let got = Passes::default().run(&background, &Ask { node: Some(0), ..ask(100_000 * SIZE) });
    assert!(got.visits >= 1000 && got.bytes >= 100_000 * SIZE && background.looks.get() < 60, "{got:?}");
}

#[test]
fn pass_ends_at_its_deadline_and_when_groups_are_empty() {
    let model_of = || model(&[cache(1000), cache(1000)]);
    let late = Passes::default().run(&model_of(), &Ask { deadline: 0, ..ask(u64::MAX) });
    assert_eq!((late.late, late.visits), (true, 0));
    let some = Passes::default().run(&model_of(), &Ask { deadline: 8, ..ask(u64::MAX) });
    assert!(some.late && (1..20).contains(&some.visits), "{some:?}");
    assert_eq!(run(&model(&[]), SIZE), PassResult { priority: 12, ..PassResult::default() });
}

/// A shrinker with false reports ends passes too early, but the next pass begins behind it. The
/// first priorities ask a small cache for nothing.
#[test]
fn pass_with_skipped_priorities_reaches_small_caches_in_time() {
    let freed = [0, FIRST_PRIORITY].map(|skipped| {
        let model = Model { skipped, ..model(&[cache(8)]) };
        Passes::default().run(&model, &Ask { deadline: 8, ..ask(SIZE) }).freed > 0
    });
    assert_eq!(freed, [false, true]);
}

#[test]
fn a_liar_does_not_keep_others_from_being_asked() {
    let (passes, model) = (Passes::default(), model(&[Cache { lies: true, ..cache(5000) }, cache(5000)]));
    let before = model.used(GroupId::ROOT);
    let enough = |_: &u32| {
        passes.run(&model, &ask(20 * SIZE));
        before.fall_to(model.used(GroupId::ROOT)) >= 20 * SIZE
    };
    assert!((0..16).any(|round| enough(&round)), "as often as a charge asks");
}

#[test]
fn pressure_is_told_of_the_group_that_was_asked() {
    let rich = model(&[cache(1_000_000)]);
    run(&rich, 2000 * SIZE);
    let told = rich.told.borrow();
    assert!(!told.is_empty() && told.iter().all(|told| *told == (GroupId::ROOT, Event::PressureLow)), "{told:?}");
    let poor = model(&[Cache { fixed: 1 << 40, ..cache(200) }]);
    run(&poor, u64::MAX);
    // At each of the last four priorities, though all scanned objects were freed.
    assert_eq!(poor.told.take(), [(GroupId::ROOT, Event::PressureCritical); 4]);
    // A request ahead of need is told of freed objects alone.
    let poor = model(&[Cache { fixed: 1 << 40, ..cache(200) }]);
    Passes::default().run(&poor, &Ask { ahead: true, ..ask(u64::MAX) });
    assert!(left(&poor) == [0] && poor.told.borrow().is_empty());
    // One object of many bytes is not asked for before the last priority.
    let small = model(&[Cache { fixed: 1 << 40, ..cache(1) }]);
    let got = run(&small, SIZE);
    assert_eq!((got.priority, got.freed, small.told.take()), (0, 1, Vec::new()));
    let small = model(&[Cache { fixed: 1 << 40, ..cache(1) }]);
    run(&small, 2 * SIZE);
    assert_eq!(small.told.take(), [(GroupId::ROOT, Event::PressureCritical)], "it did not suffice");
}

#[test]
fn goal_is_need_or_a_capped_eighth_of_usage_if_larger() {
    assert_eq!([goal(1, 1 << 30), goal(1, 80 << 10), goal(1 << 20, 1 << 30), goal(5, 0)], [GOAL, 10 << 10, 1 << 20, 5]);
}

/// A pass asks for whole batches. What it defers is requested by later passes.
#[test]
fn group_with_few_unprotected_objects_gives_in_a_later_pass() {
    let (passes, model) = (Passes::default(), model(&[Cache { low: 1119 * SIZE, ..cache(1122) }]));
    assert_eq!(passes.run(&model, &ask(SIZE)).freed, 0);
    assert!((0..16).any(|_| passes.run(&model, &ask(SIZE)).freed > 0), "as often as a charge asks");
}

proptest! {
    /// Of the unprotected bytes, a pass takes all or as many as requested, and little more. It
    /// takes none that `min` protects. It may defer the request to a group with less than half a
    /// batch of unprotected objects.
    #[test]
    fn a_pass_takes_what_it_may(
        caches in prop::collection::vec((0..5000_u64, 0..3000_u64, 0..3000_u64, 0..2_u64), 1..8),
        wanted in 1..20_000_u64,
        is_mute: bool,
        background: bool,
    ) {
        let caches: Vec<_> = caches
            .into_iter()
            .map(|(objects, min, low, fixed)| Cache { min: min * SIZE, low: low * SIZE, fixed: fixed * SIZE, ..cache(objects) })
            .collect();
        let model = Model { is_mute, ..model(&caches) };
        let got = Passes::default().run(&model, &Ask { node: background.then_some(0), ..ask(wanted * SIZE) });
        let mut freed = 0;
        for (before, after) in caches.iter().zip(&model.caches) {
            freed += before.objects.get() - after.objects.get();
            let is_min = before.min > 0 && before.min >= before.usage();
            prop_assert!(!is_min || after.objects.get() == before.objects.get());
        }
        prop_assert_eq!((got.freed, got.bytes), (freed, freed * SIZE));
        // Two objects are requested at the last priority for each one that is unprotected.
        let is_asked = |cache: &Cache| {
            let (objects, usage) = (cache.objects.get(), cache.usage().max(1));
            let protected = if cache.low < usage { cache.min.max(cache.low) } else { cache.min };
            let share = usage.saturating_sub(protected) * u64::from(WHOLE) / usage;
            objects > 0 && objects * 2 * share / u64::from(WHOLE) >= BATCH.min(objects)
        };
        prop_assert!(background || freed > 0 || !caches.iter().any(is_asked), "{:?}", got);
        let unprotected: u64 = caches.iter().filter(|cache| cache.min == 0 && cache.low == 0).map(|cache| cache.objects.get()).sum();
        prop_assert!(background || freed >= wanted.min(unprotected), "{} of {}", freed, unprotected);
    }
}
