//! Random histories of lists against a sequential model: the items of each group, in order, at any
//! moment.

use crate::site::{Host, On, SHRINKER, Thing, settle, things, verify, with_site};
use core::sync::atomic::Ordering::Relaxed;
use neap_groups::GroupId;
use neap_reclaim::lru::{By, End, LruStatus, Site, Walked};
use neap_testing::random::{Random, number, seed};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const NODES: usize = 2;

#[derive(Clone, Default)]
struct Part {
    /// Whether the group has a block of the list: there was memory for it.
    there: bool,
    items: [VecDeque<usize>; NODES],
}

struct Model {
    /// The parent of every group.
    parents: BTreeMap<GroupId, Option<GroupId>>,
    /// The groups' parts of each list.
    parts: Vec<BTreeMap<GroupId, Part>>,
    /// The list, group and node of every thing.
    places: Vec<Option<(usize, GroupId, usize)>>,
}

impl Model {
    fn any(&self, random: &mut Random) -> GroupId {
        *self.parents.keys().nth(random.below(self.parents.len())).unwrap()
    }

    /// Returns the group that gets an item added for `group`.
    fn receiver(&mut self, list: usize, by: By, group: GroupId, is_exhausted: bool) -> GroupId {
        if by == By::RootAlone {
            return GroupId::ROOT;
        }
        let parts = &mut self.parts[list];
        if parts[&group].there || !is_exhausted {
            parts.get_mut(&group).unwrap().there = true;
            return group;
        }
        let mut upwards = core::iter::successors(Some(group), |group| self.parents[group]);
        upwards.find(|group| parts[group].there).unwrap()
    }

    fn items(&mut self, list: usize, group: GroupId, node: usize) -> &mut VecDeque<usize> {
        &mut self.parts[list].get_mut(&group).unwrap().items[node]
    }

    fn delete(&mut self, group: GroupId) {
        let parent = self.parents.remove(&group).unwrap().unwrap();
        for parts in &mut self.parts {
            let part = parts.remove(&group).unwrap();
            let heir = parts.get_mut(&parent).unwrap();
            heir.there |= part.there;
            for (mut items, heirs) in part.items.into_iter().zip(&mut heir.items) {
                items.append(heirs);
                *heirs = items;
            }
        }
        let of = self.places.iter_mut().flatten().filter(|place| place.1 == group);
        of.for_each(|place| place.1 = parent);
    }
}

fn check(lists: &[(On<'_, '_>, By)], model: &mut Model) {
    let groups: Vec<_> = model.parents.keys().copied().collect();
    for (at, (list, by)) in lists.iter().enumerate() {
        for node in 0..NODES {
            for &group in groups.iter().filter(|&&group| *by == By::Group || group == GroupId::ROOT) {
                let expected = model.items(at, group, node).clone();
                assert_eq!(VecDeque::from(list.all(group, node)), expected, "list {at}, group {group:?}, node {node}");
                assert_eq!(list.count(group, node), expected.len());
            }
            if *by == By::Group {
                let all = model.parts[at].values().map(|part| part.items[node].len()).sum::<usize>();
                assert_eq!(list.count_node(node), all);
            }
        }
    }
}

/// Checks that each group with items in the first list was marked since it had none.
fn check_marks(site: &Site<'_, Host<'_>>, model: &mut Model, marked: &mut BTreeSet<(GroupId, usize)>) {
    let marks = core::mem::take(&mut *site.host.state.marks.lock().unwrap());
    marked.extend(marks.into_iter().map(|(seat, node)| (seat.group, node)));
    for (&group, part) in &model.parts[0] {
        for (node, items) in part.items.iter().enumerate() {
            assert!(items.is_empty() || marked.contains(&(group, node)), "group {group:?}, node {node}");
            // As a visitor does that finds no objects.
            if items.is_empty() {
                marked.remove(&(group, node));
            }
        }
    }
}

/// Runs so many steps with so many things and groups.
fn run(steps: u64, most_things: usize, most_groups: usize) {
    let (mut random, mut made) = (Random(seed()), 0);
    with_site(NODES, |site| {
        let open = |by, shrinker| (On(site, site.open(by, shrinker).unwrap()), by);
        let lists = [open(By::Group, Some(SHRINKER)), open(By::RootAlone, None), open(By::Group, None)];
        let mut marked = BTreeSet::new();
        let all = things(most_things);
        let root = Part { there: true, ..Part::default() };
        let mut model = Model {
            parents: BTreeMap::from([(GroupId::ROOT, None)]),
            parts: vec![BTreeMap::from([(GroupId::ROOT, root)]); lists.len()],
            places: vec![None; all.len()],
        };
        for step in 0..steps {
            let (at, node) = (random.below(lists.len()), random.below(NODES));
            let (list, by) = &lists[at];
            let group = model.any(&mut random);
            // The group with the items that a walk finds.
            let whose = if *by == By::Group { group } else { GroupId::ROOT };
            match random.below(20) {
                0 if model.parents.len() < most_groups => {
                    made += 1;
                    // Only requests by lists are to fail here.
                    let id = site.groups.create(site.host, group, &format!("g{made}"));
                    let Ok(id) = id else { continue };
                    model.parents.insert(id, Some(group));
                    model.parts.iter_mut().for_each(|parts| _ = parts.insert(id, Part::default()));
                }
                1 | 2 if group != GroupId::ROOT && !model.parents.values().any(|&parent| parent == Some(group)) => {
                    site.groups.delete(site.host, group).unwrap();
                    model.delete(group);
                }
                3..9 => {
                    let thing = &all[random.below(all.len())];
                    let is_free = model.places[thing.number].is_none();
                    assert_eq!(thing.item.is_linked(), !is_free);
                    // An item that is on a list may let a block be made, and is not put there.
                    let is_exhausted = site.host.state.is_exhausted.load(Relaxed);
                    let receiver = model.receiver(at, *by, group, is_exhausted);
                    assert_eq!(list.add(group, node, thing), is_free);
                    if is_free {
                        model.items(at, receiver, node).push_back(thing.number);
                        model.places[thing.number] = Some((at, receiver, node));
                    }
                }
                9..12 => {
                    let thing = &all[random.below(all.len())];
                    let place = model.places[thing.number];
                    assert_eq!(list.del(thing), place.is_some_and(|place| place.0 == at), "step {step}");
                    if let Some((_, group, node)) = place.filter(|place| place.0 == at) {
                        model.items(at, group, node).retain(|&number| number != thing.number);
                        model.places[thing.number] = None;
                    }
                }
                12..16 => {
                    let most = random.below(12);
                    walk(list, &mut model, (at, whose, node), most, &mut random);
                }
                16 => in_hands(list, &mut model, (at, whose, node), &all, &mut random),
                17 => _ = site.tick(),
                18 => site.host.state.is_exhausted.store(random.below(2) == 0, Relaxed),
                _ => {
                    verify(site);
                    check(&lists, &mut model);
                    check_marks(site, &mut model, &mut marked);
                }
            }
        }
        check_marks(site, &mut model, &mut marked);
        check(&lists, &mut model);
        while let Some(&group) = model.parents.keys().next_back().filter(|&&group| group != GroupId::ROOT) {
            let leaf = core::iter::successors(Some(group), |&group| {
                model.parents.iter().find(|(_, parent)| **parent == Some(group)).map(|(child, _)| *child)
            });
            let leaf = leaf.last().unwrap();
            site.groups.delete(site.host, leaf).unwrap();
            model.delete(leaf);
        }
        check(&lists, &mut model);
        settle(site);
        verify(site);
        lists.into_iter().for_each(|(list, _)| list.close());
    });
}

/// Walks with random verdicts, and does the same in the model.
fn walk(
    list: &On<'_, '_>,
    model: &mut Model,
    (at, group, node): (usize, GroupId, usize),
    most: usize,
    random: &mut Random,
) {
    let (mut items, mut expected, mut out) = (model.items(at, group, node).clone(), Walked::default(), Vec::new());
    let mut script = Vec::new();
    // The model walks first.
    'again: loop {
        let mut skipped = VecDeque::new();
        let (mut rest, mut rotated) = (core::mem::take(&mut items), VecDeque::new());
        let mut ends = true;
        while expected.scanned < most
            && let Some(number) = rest.pop_front()
        {
            expected.scanned += 1;
            let verdict = [LruStatus::Removed, LruStatus::Rotate, LruStatus::Skip, LruStatus::Retry, LruStatus::Stop]
                [[0, 0, 1, 1, 2, 2, 2, 3, 4][random.below(9)]];
            script.push((number, verdict));
            match verdict {
                LruStatus::Removed => out.push(number),
                LruStatus::Rotate => rotated.push_back(number),
                _ => skipped.push_back(number),
            }
            expected.stopped |= verdict == LruStatus::Stop;
            if verdict == LruStatus::Retry {
                ends = false;
            }
            if matches!(verdict, LruStatus::Retry | LruStatus::Stop) {
                break;
            }
        }
        // Items beyond the budget follow those that were skipped.
        items.extend(skipped);
        items.extend(rest);
        items.extend(rotated);
        if ends || expected.scanned == most {
            break 'again;
        }
    }
    expected.removed = out.len();
    let mut script = script.into_iter();
    let answer = list.walk(group, node, most, |thing: &Thing| {
        let (number, verdict) = script.next().unwrap();
        assert_eq!(thing.number, number);
        verdict
    });
    assert_eq!(answer, (expected, out.clone()));
    out.iter().for_each(|&number| model.places[number] = None);
    *model.items(at, group, node) = items;
}

/// Takes some of the oldest items in hands, and puts most of them back.
fn in_hands(
    list: &On<'_, '_>,
    model: &mut Model,
    (at, group, node): (usize, GroupId, usize),
    all: &[Thing],
    random: &mut Random,
) {
    let most = 1 + random.below(6);
    let mut numbers = Vec::new();
    // SAFETY: things outlive the list.
    let hands = unsafe { list.1.take(list.0, group, node, most, |item| numbers.push(Thing::around(item).number)) };
    let items = model.items(at, group, node);
    assert_eq!(hands.is_none(), items.is_empty());
    assert_eq!(numbers, items.drain(..most.min(items.len())).collect::<Vec<_>>());
    let Some(hands) = hands else { return };
    for number in numbers {
        let thing = &all[number];
        assert!(!list.del(thing) && thing.item.is_linked());
        let end = match random.below(3) {
            0 => {
                assert!(thing.item.leave_hands() && !thing.item.leave_hands());
                model.places[number] = None;
                None
            }
            1 => Some(End::Oldest),
            _ => Some(End::Newest),
        };
        // SAFETY: the item was handed out with `hands`, and is in a thing, which outlives the list.
        let put = unsafe { hands.put_back(thing.item(), end.unwrap_or(End::Oldest)) };
        assert_eq!(put, end.is_some());
        let items = model.items(at, group, node);
        match end {
            Some(End::Oldest) => items.push_front(number),
            Some(End::Newest) => items.push_back(number),
            None => {}
        }
    }
}

#[test]
fn every_item_is_where_the_model_says() {
    run(number("NEAP_STEPS", 60_000), 200, 40);
}

/// A small history, for Miri.
#[test]
fn a_small_history_is_as_the_model_says() {
    run(if cfg!(miri) { 80 } else { 400 }, 20, 8);
}
