//! The pane of memory groups: a tree that can be folded, or a list sorted by a column.
//!
//! Its rows come from reports of groups ([`asking`](super::asking)). If a request for a report
//! fails, the pane keeps the last report. The title shows the age of an old report.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use neap::groups::{Bound, Event, UNLIMITED};

use super::listing::{Cell, Listing};
use crate::groups::{ReadGroups, ReportedGroup};

/// A report's age is shown if it exceeds the interval of readings by more than this.
const OLD: Duration = Duration::from_secs(1);

/// The last report of a process's groups, and the groups that the user has folded.
#[derive(Default)]
pub(super) struct Known {
    /// Bytes in use by group, in the report before `current`.
    previous: Option<BTreeMap<u64, u64>>,
    current: Option<ReadGroups>,
    /// Time of the last report, by the clock of readings.
    at: u64,
    /// The reason why no later report came.
    pub(super) failed: Option<String>,
    /// Ids of groups whose children are not shown.
    folded: BTreeSet<u64>,
}

/// A group in the pane.
struct PaneRow<'a> {
    group: &'a ReportedGroup,
    /// Number of groups below it that the fold hides.
    hidden: usize,
}

impl Known {
    /// Takes the result of a request at the time `at`. If it failed and the request before did not,
    /// returns the error.
    pub(super) fn follow(&mut self, asked: Result<Option<ReadGroups>>, at: u64) -> Option<&str> {
        match asked {
            Ok(Some(seen)) => {
                let used = |seen: ReadGroups| seen.groups.iter().map(|group| (group.id, group.used)).collect();
                self.previous = self.current.replace(seen).map(used);
                (self.at, self.failed) = (at, None);
            }
            Ok(None) => *self = Known::default(),
            Err(error) => {
                let is_new = self.failed.is_none();
                let failed = self.failed.insert(format!("{error:#}"));
                return is_new.then_some(failed);
            }
        }
        None
    }

    /// Age of the last report at a moment; `None` if none came yet.
    pub(super) fn age(&self, now: u64) -> Option<Duration> {
        self.current.as_ref().map(|_| Duration::from_nanos(now.saturating_sub(self.at)))
    }

    /// Returns the path of a group, as the user sees it.
    pub(super) fn path(&self, id: u64) -> Option<String> {
        let group = self.current.as_ref()?.groups.iter().find(|group| group.id == id);
        group.map(|group| readable(&group.path))
    }

    /// Shows or hides the children of a group.
    pub(super) fn fold(&mut self, id: u64) {
        let has_children = self.current.as_ref().is_some_and(|seen| seen.groups.iter().any(|it| it.parent == id));
        if !self.folded.remove(&id) && has_children {
            self.folded.insert(id);
        }
    }

    /// Returns the rows in the order of the tree, without the groups below folded ones.
    fn rows(&self) -> Vec<PaneRow<'_>> {
        let mut rows: Vec<PaneRow<'_>> = Vec::new();
        for group in self.current.iter().flat_map(|seen| &seen.groups) {
            match rows.last_mut() {
                Some(last) if group.depth > last.group.depth && self.folded.contains(&last.group.id) => {
                    last.hidden += 1;
                }
                _ => rows.push(PaneRow { group, hidden: 0 }),
            }
        }
        rows
    }

    /// Returns the pane at the time `now`, for an interval of readings. Rows in the order of the
    /// tree have names, and other rows have whole paths.
    pub(super) fn listing(&self, now: u64, interval: Duration, is_tree: bool) -> Listing {
        let title = match self.age(now) {
            Some(age) if age > interval + OLD => format!("Groups, {} s old", age.as_secs()),
            _ if self.current.as_ref().is_some_and(|seen| seen.is_from_memory) => "Groups, from memory".to_string(),
            _ => "Groups".to_string(),
        };
        let empty = self.failed.as_deref().unwrap_or("No report of its groups has come yet.");
        let change = |row: &PaneRow<'_>| {
            let before = self.previous.as_ref().map(|before| before.get(&row.group.id).copied().unwrap_or_default());
            row.group.used.wrapping_sub(before.unwrap_or(row.group.used)) as i64
        };
        let name = |row: &PaneRow<'_>| {
            let (ReportedGroup { path, depth, name, .. }, mut shown) = (row.group, String::new());
            match *depth {
                1.. if is_tree => shown += &format!("{}{name}", "  ".repeat(depth - 1)),
                _ => shown += &readable(path),
            }
            if row.hidden > 0 {
                shown += &format!(" +{}", row.hidden);
            }
            Cell::Path(shown, path.clone())
        };
        let rows = self.rows();
        let limit = |bound: Bound| move |row: &PaneRow<'_>| Cell::Limit(some(row.group.bounds[bound as usize]));
        let bytes = |bound: Bound| move |row: &PaneRow<'_>| Cell::Bytes(row.group.bounds[bound as usize]);
        let count = |event: Event| move |row: &PaneRow<'_>| Cell::Number(row.group.events[event as usize]);
        let mut listing = Listing::of(title, empty, &rows, |row| row.group.id.to_string())
            .column("group", "path", name)
            .column("used", "used_bytes", |row| Cell::Bytes(row.group.used))
            .column("change", "change_bytes", |row| Cell::Change(change(row)))
            .column("charged", "charged_bytes", |row| Cell::Bytes(row.group.charged))
            .column("peak", "peak_bytes", |row| Cell::Bytes(row.group.peak))
            .column("max", "max_bytes", limit(Bound::Max))
            .column("high", "high_bytes", limit(Bound::High))
            .column("refused", "refused", count(Event::Refused))
            .column("at max", "at_max", count(Event::Max))
            .column("at high", "at_high", count(Event::High))
            .column("over", "overcharged", count(Event::Overcharged));
        if rows.iter().any(|row| row.group.waiting > 0) {
            listing = listing.column("waiting", "waiting", |row| Cell::Number(row.group.waiting));
        }
        let press = |row: &PaneRow<'_>| {
            let [medium, critical] =
                [Event::PressureMedium, Event::PressureCritical].map(|event| row.group.events[event as usize]);
            medium.saturating_add(critical)
        };
        if rows.iter().any(|row| press(row) > 0) {
            listing = listing.column("pressed", "pressed", move |row| Cell::Number(press(row)));
        }
        if rows.iter().any(|row| row.group.stalled_us > 0) {
            listing = listing.column("stalled ms", "stalled_ms", |row| Cell::Number(row.group.stalled_us / 1000));
        }
        for bound in [Bound::Low, Bound::Min] {
            let (head, json) = if bound == Bound::Low { ("low", "low_bytes") } else { ("min", "min_bytes") };
            if rows.iter().any(|row| row.group.bounds[bound as usize] > 0) {
                listing = listing.column(head, json, bytes(bound));
            }
        }
        listing.listing
    }
}

/// Returns a limit; `None` if it is [`UNLIMITED`].
fn some(bytes: u64) -> Option<u64> {
    (bytes != UNLIMITED).then_some(bytes)
}

/// Returns a path as the user sees it. The root's path is empty, and becomes "(all)".
pub(super) fn readable(path: &str) -> String {
    if path.is_empty() { "(all)".to_string() } else { path.to_string() }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use anyhow::anyhow;
    use serde_json::{Value, json};

    /// Groups with an id, a parent, a name and bytes in use.
    fn seen(groups: &[(u64, u64, &str, u64)]) -> ReadGroups {
        let group = |&(id, parent, name, used): &(u64, u64, &str, u64)| ReportedGroup {
            id,
            parent,
            name: name.to_string(),
            used,
            charged: used + 4096,
            peak: used * 2,
            bounds: [UNLIMITED, UNLIMITED, 0, 0],
            ..ReportedGroup::default()
        };
        ReadGroups::of_groups(groups.iter().map(group).collect())
    }

    /// The groups of two reports a second apart. The last report came at 10.5 s.
    pub(in crate::top) fn known() -> Known {
        let mut known = Known::default();
        let before = seen(&[(1, 0, "", 9 << 20), (2, 1, "tenant", 8 << 20), (3, 2, "acme", 6 << 20), (9, 1, "old", 7)]);
        let mut after = seen(&[
            (1, 0, "", 10 << 20),
            (2, 1, "tenant", 8 << 20),
            (3, 2, "acme", 5 << 20),
            (4, 2, "beta", 3 << 20),
            (5, 1, "cache", 2 << 20),
        ]);
        after.groups[4].bounds = [4 << 20, 3 << 20, 1 << 20, 0];
        after.groups[4].events = [0, 12, 34, 5, 1, 2, 0, 0, 0, 0];
        assert_eq!(known.follow(Ok(Some(before)), 9_500_000_000), None);
        assert_eq!(known.follow(Ok(Some(after)), 10_500_000_000), None);
        known
    }

    const NOW: u64 = 11_000_000_000;

    fn lines(known: &Known, is_tree: bool) -> Vec<String> {
        let (heads, rows) = known.listing(NOW, Duration::from_secs(1), is_tree).lines(200);
        [vec![heads], rows].concat()
    }

    #[test]
    fn a_tree_has_names_in_their_places_and_a_list_has_paths() {
        let known = known();
        let expected = [
            "group    used  change  charged   peak   max  high  refused  at max  at high  over   low",
            "(all)   10.0M   +1.0M    10.0M  20.0M  none  none        0       0        0     0     0",
            "cache    2.0M   +2.0M     2.0M   4.0M  none  none        0       0        0     0     0",
            "tenant   8.0M       0     8.0M  16.0M  none  none        0       0        0     0     0",
            "  acme   5.0M   -1.0M     5.0M  10.0M  none  none        0       0        0     0     0",
            "  beta   3.0M   +3.0M     3.0M   6.0M  4.0M  3.0M        5      34       12     1  1.0M",
        ];
        assert_eq!(lines(&known, true), expected);
        assert!(lines(&known, false)[5].starts_with("tenant/beta   3.0M"));
        let object = known.listing(NOW, Duration::ZERO, true).json();
        let expected = json!({
            "path": "tenant/beta", "used_bytes": 3 << 20, "change_bytes": 3 << 20, "charged_bytes": (3 << 20) + 4096,
            "peak_bytes": 6 << 20, "max_bytes": 4 << 20, "high_bytes": 3 << 20, "refused": 5, "at_max": 34, "at_high": 12,
            "overcharged": 1, "low_bytes": 1 << 20,
        });
        assert_eq!((&object[4], &object[0]["path"], &object[0]["max_bytes"]), (&expected, &json!(""), &Value::Null));
    }

    #[test]
    fn pressure_is_shown_where_there_was_any() {
        let mut known = known();
        assert!(!lines(&known, true)[0].contains("pressed"));
        let group = &mut known.current.as_mut().unwrap().groups[4];
        group.events[Event::PressureMedium as usize] = 3;
        group.events[Event::PressureCritical as usize] = 4;
        assert!(lines(&known, true)[0].contains("pressed"));
        assert_eq!(known.listing(NOW, Duration::from_secs(1), true).json()[4]["pressed"], 7);
    }

    #[test]
    fn stalled_time_is_shown_where_there_was_any() {
        let mut known = known();
        assert!(!lines(&known, true)[0].contains("stalled"));
        known.current.as_mut().unwrap().groups[4].stalled_us = 2_345_678;
        let shown = lines(&known, true);
        assert!(shown[0].contains("stalled ms") && shown[5].contains("2345"), "{shown:?}");
        assert_eq!(known.listing(NOW, Duration::from_secs(1), true).json()[4]["stalled_ms"], 2345);
    }

    #[test]
    fn the_first_report_has_no_changes() {
        let mut known = Known::default();
        known.follow(Ok(Some(seen(&[(1, 0, "", 500)]))), 1);
        assert_eq!(known.listing(NOW, Duration::ZERO, true).json()[0]["change_bytes"], 0);
    }

    #[test]
    fn what_is_folded_is_counted_and_opens_again() {
        let mut known = known();
        known.fold(3);
        assert_eq!(lines(&known, true).len(), 6, "it has no children");
        known.fold(2);
        let rows = lines(&known, true);
        assert!(rows.len() == 4 && rows[3].starts_with("tenant +2   8.0M"), "{rows:?}");
        known.fold(1);
        let rows = lines(&known, false);
        assert!(rows.len() == 2 && rows[1].starts_with("(all) +4  10.0M"), "{rows:?}");
        known.fold(1);
        assert_eq!(lines(&known, true).len(), 4, "what is below is folded still");
        known.fold(2);
        assert_eq!(lines(&known, true).len(), 6);
        assert_eq!((known.path(1).as_deref(), known.path(4).as_deref()), (Some("(all)"), Some("tenant/beta")));
        assert_eq!(known.path(9), None);
    }

    #[test]
    fn a_process_that_does_not_answer_has_old_groups_or_a_reason() {
        let mut known = known();
        let old = lines(&known, true);
        assert_eq!(known.follow(Err(anyhow!("stopped")), 20_000_000_000), Some("stopped"));
        assert_eq!(known.follow(Err(anyhow!("stopped")), 25_000_000_000), None, "it was said before");
        assert_eq!(lines(&known, true), old);
        let title = |known: &Known, now| known.listing(now, Duration::from_secs(2), true).title;
        assert_eq!((title(&known, NOW), title(&known, 13_500_000_000)), ("Groups".into(), "Groups".into()));
        assert_eq!(title(&known, 26_700_000_000), "Groups, 16 s old");
        assert_eq!(known.age(NOW), Some(Duration::from_millis(500)));
        let mut never = Known::default();
        assert!(lines(&never, true)[0].contains("No report"));
        never.follow(Err(anyhow!("stopped")), 1);
        assert_eq!((lines(&never, true), never.age(NOW)), (vec!["stopped".to_string()], None));
        never.follow(Ok(Some(seen(&[(1, 0, "", 500)]))), 2);
        assert_eq!((never.failed, known.follow(Ok(None), 3)), (None, None));
        assert!(known.rows().is_empty(), "another program");
    }
}
