//! The memory groups that have metrics: the largest groups of all processes. For each process, one
//! sum stands for its other groups.
//!
//! A group's usage includes the groups below it. So a group is never larger than its parent, and if
//! a group is kept, so are its ancestors. The sum adds the usage of each left-out group whose
//! parent is kept. That usage includes all groups below it, so each byte counts once.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use neap::groups::{Bound, Event, UNLIMITED};

use crate::groups::{ReadGroups, ReportedGroup};

/// Groups with metrics, of all processes.
pub(super) const MOST_GROUPS: usize = 500;
/// Characters of a path that are kept.
const LONGEST: usize = 1000;
/// Path of the root group. No other group has it, since names have no slashes.
pub(super) const ROOT: &str = "/";
/// Name of the sum of the groups that are left out.
pub(super) const OTHER: &str = "(other)";

/// A group with metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupShare {
    pub(super) path: String,
    /// Used bytes, including those of the groups below it.
    pub(super) used: u64,
    pub(super) limit: Option<u64>,
    pub(super) refused: u64,
    pub(super) at_limit: u64,
    pub(super) stalled_us: u64,
    /// Index of the parent in [`GroupShares::groups`].
    parent: Option<usize>,
    /// Used bytes of groups directly below it that are left out.
    rest: u64,
}

/// The groups of a process, parents before their children.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupShares {
    pub(super) groups: Vec<GroupShare>,
    /// Used bytes of groups that are left out and have no parent.
    rest: u64,
}

impl GroupShares {
    /// The largest groups of a process.
    pub(super) fn of(read: &ReadGroups) -> GroupShares {
        // Places of the last group and its ancestors, from the root on.
        let mut above: Vec<usize> = Vec::new();
        let mut names = BTreeSet::from([OTHER.to_string()]);
        let mut shares = GroupShares::default();
        for (place, group) in read.groups.iter().enumerate() {
            above.truncate(group.depth);
            shares.groups.push(GroupShare { parent: above.last().copied(), ..GroupShare::of(group) });
            above.push(place);
        }
        let mut order: Vec<usize> = (0..shares.groups.len()).collect();
        order.sort_by_key(|&place| Reverse(shares.groups[place].used));
        let mut is_kept = vec![false; order.len()];
        order.iter().take(MOST_GROUPS).for_each(|&place| is_kept[place] = true);
        // A genuine report has neither two groups with one path nor a group with the name of the
        // sum. Such groups are left out, since two metrics may not have the same labels.
        shares.keep(|place, group| is_kept[place] && names.insert(group.path.clone()));
        shares
    }

    /// Leaves out the groups that `is_kept` refuses, and all groups below them.
    fn keep(&mut self, mut is_kept: impl FnMut(usize, &GroupShare) -> bool) {
        let all = core::mem::take(&mut self.groups);
        let mut places: Vec<Option<usize>> = Vec::with_capacity(all.len());
        for (place, group) in all.into_iter().enumerate() {
            let parent = group.parent.map(|parent| places[parent]);
            // An ancestor of this group is left out.
            let is_covered = parent == Some(None);
            let parent = parent.flatten();
            let keeps = !is_covered && is_kept(place, &group);
            places.push(keeps.then_some(self.groups.len()));
            if keeps {
                self.groups.push(GroupShare { parent, ..group });
            } else if !is_covered {
                let rest = parent.map_or(&mut self.rest, |parent| &mut self.groups[parent].rest);
                *rest = rest.saturating_add(group.used);
            }
        }
    }

    /// Used bytes of the groups that are left out.
    pub(super) fn other(&self) -> u64 {
        self.groups.iter().fold(self.rest, |sum, group| sum.saturating_add(group.rest))
    }

    /// Bytes of this value in memory.
    pub(super) fn size(&self) -> usize {
        self.groups.iter().map(|group| size_of::<GroupShare>() + group.path.len()).sum()
    }
}

impl GroupShare {
    fn of(group: &ReportedGroup) -> GroupShare {
        let path = match group.path.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}...", &group.path[..end]),
            None if group.path.is_empty() => ROOT.to_string(),
            None => group.path.clone(),
        };
        GroupShare {
            path,
            used: group.used,
            limit: Some(group.bounds[Bound::Max as usize]).filter(|&limit| limit != UNLIMITED),
            refused: group.events[Event::Refused as usize],
            at_limit: group.events[Event::Max as usize],
            stalled_us: group.stalled_us,
            parent: None,
            rest: 0,
        }
    }
}

/// Leaves out all but the largest groups of all processes.
pub(super) fn bound(mut processes: Vec<&mut GroupShares>) {
    let mut sizes: Vec<(u64, usize, usize)> = Vec::new();
    for (at, shares) in processes.iter().enumerate() {
        sizes.extend(shares.groups.iter().enumerate().map(|(place, group)| (group.used, at, place)));
    }
    if sizes.len() <= MOST_GROUPS {
        return;
    }
    // If a parent and its child have the same size, the parent comes first.
    sizes.sort_unstable_by_key(|&(used, at, place)| (Reverse(used), at, place));
    let kept: BTreeSet<(usize, usize)> =
        sizes.into_iter().take(MOST_GROUPS).map(|(_, at, place)| (at, place)).collect();
    for (at, shares) in processes.iter_mut().enumerate() {
        shares.keep(|place, _| kept.contains(&(at, place)));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Groups by id, parent, name and used bytes.
    pub(crate) fn shares(groups: &[(u64, u64, &str, u64)]) -> GroupShares {
        let group = |&(id, parent, name, used): &(u64, u64, &str, u64)| ReportedGroup {
            id,
            parent,
            name: name.into(),
            used,
            bounds: [if id == 2 { 1000 } else { UNLIMITED }, 0, 0, 0],
            events: [0, 0, id, 2 * id, 0, 0, 0, 0, 0, 0],
            stalled_us: 500_000 * id,
            ..ReportedGroup::default()
        };
        GroupShares::of(&ReadGroups::of_groups(groups.iter().map(group).collect()))
    }

    fn paths(shares: &GroupShares) -> Vec<&str> {
        shares.groups.iter().map(|group| group.path.as_str()).collect()
    }

    #[test]
    fn groups_are_read_with_their_paths_and_counts() {
        let shares = shares(&[(1, 0, "", 90), (2, 1, "a", 50), (3, 2, "b", 40)]);
        assert_eq!((paths(&shares), shares.other()), (vec!["/", "a", "a/b"], 0));
        let group = &shares.groups[1];
        assert_eq!((group.limit, shares.groups[0].limit), (Some(1000), None));
        assert_eq!((group.at_limit, group.refused, group.stalled_us), (2, 4, 1_000_000));
    }

    #[test]
    fn groups_left_out_are_counted_once_with_those_below_them() {
        // A chain below each of many groups of one size.
        let names: Vec<String> = (0..600).map(|at| format!("{at:04}")).collect();
        let mut all = vec![(1, 0, "", 600 * 7)];
        for (at, name) in (0..).zip(&names) {
            all.push((2 + 2 * at, 1, name.as_str(), 7));
            all.push((3 + 2 * at, 2 + 2 * at, "below", 5));
        }
        let shares = shares(&all);
        assert_eq!((shares.groups.len(), shares.other()), (MOST_GROUPS, 101 * 7 + 499 * 5));
        assert!(shares.groups.iter().all(|group| !group.path.ends_with("below")));
    }

    #[test]
    fn largest_groups_of_all_processes_are_kept() {
        let names: Vec<String> = (0..400).map(|at| at.to_string()).collect();
        let process = |size: u64| {
            let groups = (0..).zip(&names).map(|(at, name)| (2 + at, 1, name.as_str(), size));
            shares(&[(1, 0, "", 400 * size)].into_iter().chain(groups).collect::<Vec<_>>())
        };
        let [mut large, mut small, mut smallest] = [process(10), process(9), shares(&[(1, 0, "", 3), (2, 1, "a", 2)])];
        bound(vec![&mut large, &mut small, &mut smallest]);
        assert_eq!((large.groups.len(), large.other()), (401, 0));
        assert_eq!((small.groups.len(), small.other()), (99, 302 * 9));
        assert_eq!((smallest.groups.len(), smallest.other()), (0, 3), "without its root a process is a sum");
    }

    #[test]
    fn group_that_is_left_out_later_takes_its_rest_along() {
        let mut shares = shares(&[(1, 0, "", 100), (2, 1, "a", 50), (3, 2, "b", 20), (4, 2, "c", 10)]);
        shares.keep(|_, group| group.path != "a/c");
        assert_eq!((paths(&shares), shares.other()), (vec!["/", "a", "a/b"], 10));
        shares.keep(|_, group| group.path == "/");
        assert_eq!((paths(&shares), shares.other()), (vec!["/"], 50));
    }

    #[test]
    fn no_two_groups_of_a_process_have_one_name() {
        let long = "n".repeat(2 * LONGEST);
        let shares = shares(&[(1, 0, "", 90), (2, 1, "a", 9), (3, 1, "a", 8), (4, 1, OTHER, 7), (5, 1, &long, 6)]);
        let expected = format!("{}...", "n".repeat(LONGEST));
        assert_eq!((paths(&shares), shares.other()), (vec!["/", "a", &expected], 15));
    }
}
