//! Differences between two profiles: growth by function, group and thread.
//!
//! # Design
//! The bytes of a stack count for the function that the profile's table shows for the stack. If
//! both profiles are of one build of the function's file, its lines are compared. Otherwise lines
//! may have moved, so only the function and its source are compared.
//!
//! The largest growth comes first. The standard error of a difference is that of two independent
//! estimates.

use core::hash::Hash;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Write};

use serde_json::{Value, json};

use super::folded;
use super::resolved::{Profile, ProfileRow};
use super::sums::Amount;
use super::symbols::SourceLine;
use super::top_table::{amount, headline, line, losses, named, size};
use crate::look::subject::SCHEMA;
use crate::report::{number, write_table};

/// Rows of a table, and of a list in the JSON object, at most.
const MOST_ROWS: usize = 30;
const MOST_CHANGES: usize = 1000;

/// An estimate in both profiles.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Growth {
    pub(crate) before: Amount,
    pub(crate) now: Amount,
}

impl Growth {
    /// Returns the bytes of growth. Negative if there are fewer bytes than before.
    pub(crate) fn bytes(&self) -> f64 {
        self.now.bytes - self.before.bytes
    }

    /// Standard error of the growth. `f64::hypot` would ask for glibc 2.35.
    pub(crate) fn error(&self) -> f64 {
        (self.before.error().powi(2) + self.now.error().powi(2)).sqrt()
    }
}

/// Two profiles, of which the view of the later one is compared.
pub(crate) struct Comparison<'a> {
    pub(crate) before: &'a Profile,
    pub(crate) now: &'a Profile,
}

impl Comparison<'_> {
    /// The growth of all.
    pub(crate) fn total(&self) -> Growth {
        let view = self.now.view;
        Growth { before: self.before.total().of(view), now: self.now.total().of(view) }
    }

    /// Returns the changes by a key of the rows, the largest growth first. Leaves out changes of
    /// less than a byte.
    fn by<K: Hash + Ord + Clone>(&self, key: impl Fn(&Profile, &ProfileRow) -> K) -> Vec<(K, Growth)> {
        let mut changes: HashMap<K, Growth> = HashMap::new();
        for row in &self.before.rows {
            changes.entry(key(self.before, row)).or_default().before.add(row.sums.of(self.now.view));
        }
        for row in &self.now.rows {
            changes.entry(key(self.now, row)).or_default().now.add(row.sums.of(self.now.view));
        }
        let mut changes: Vec<_> = changes.into_iter().filter(|(_, change)| change.bytes().abs() >= 1.0).collect();
        changes.sort_by(|(name, one), (other_name, other)| {
            other.bytes().total_cmp(&one.bytes()).then_with(|| name.cmp(other_name))
        });
        changes
    }

    /// Changes by function.
    pub(crate) fn sites(&self) -> Vec<(SourceLine, Growth)> {
        let builds = |profile: &Profile| -> HashSet<String> {
            profile.files.iter().map(|file| file.build_id.clone()).filter(|id| !id.is_empty()).collect()
        };
        let common: HashSet<String> = builds(self.before).intersection(&builds(self.now)).cloned().collect();
        self.by(|profile, row| {
            let file = profile.place_of_site(row).and_then(|(place, _)| profile.files.get(place.frame.file? as usize));
            let site = profile.site(row);
            if file.is_some_and(|file| common.contains(&file.build_id)) {
                return site;
            }
            SourceLine { line: 0, system_name: "".into(), ..site }
        })
    }

    /// Returns the changes by group and those by thread, each with the word for its key.
    pub(crate) fn names(&self) -> [(&'static str, Vec<(String, Growth)>); 2] {
        [("group", self.by(|_, row| row.group.to_string())), ("thread", self.by(|_, row| row.thread.to_string()))]
    }

    /// Describes the two profiles, their losses and the change, in a sentence each.
    pub(crate) fn summary(&self) -> Vec<String> {
        let (view, total) = (self.now.view, self.total());
        let mut lines = Vec::new();
        for (word, profile, amount) in [("Before", self.before, total.before), ("Now", self.now, total.now)] {
            let (bytes, error) = (size(amount.bytes), size(amount.error()));
            lines.push(format!("{word}: {}: {bytes} {} (standard error {error})", headline(profile), view.name()));
            lines.extend(losses(profile).iter().map(|lack| format!("{word}: {lack}")));
        }
        lines.push(format!("Change: {} (standard error {})", signed(total.bytes()), size(total.error())));
        lines
    }

    /// Returns folded stacks with the bytes before and now, the format for differential flame
    /// graphs.
    pub(crate) fn folded(&self) -> Vec<String> {
        let mut lines: BTreeMap<String, [u64; 2]> = BTreeMap::new();
        for (at, profile) in [self.before, self.now].into_iter().enumerate() {
            for (stack, bytes) in folded::stacks(profile, self.now.view) {
                lines.entry(stack).or_default()[at] += bytes;
            }
        }
        lines.iter().map(|(stack, [before, now])| format!("{stack} {before} {now}")).collect()
    }
}

/// Bytes with a unit and a sign.
pub(crate) fn signed(bytes: f64) -> String {
    let sign = if bytes < 0.0 { "-" } else { "+" };
    format!("{sign}{}", size(bytes.abs()))
}

/// Returns the changes to show and the bytes of the others. The shown ones have the most bytes, and
/// keep their order.
pub(crate) fn shown<K>(changes: &[(K, Growth)], most: usize) -> (Vec<&(K, Growth)>, f64) {
    let mut sizes: Vec<f64> = changes.iter().map(|(_, change)| change.bytes().abs()).collect();
    sizes.sort_by(|one, other| other.total_cmp(one));
    let least = if most < sizes.len() { sizes[most - 1] } else { 0.0 };
    let (shown, rest): (Vec<_>, Vec<_>) = changes.iter().partition(|(_, change)| change.bytes().abs() >= least);
    (shown, rest.iter().map(|(_, change)| change.bytes()).sum())
}

/// Writes the tables.
pub(crate) fn write(output: &mut dyn Write, comparison: &Comparison<'_>) -> io::Result<()> {
    writeln!(output, "{}\n", comparison.summary().join("\n"))?;
    let sites: Vec<_> = comparison.sites().iter().map(|(line, change)| (named(line), *change)).collect();
    table(output, "function", &sites)?;
    for (head, changes) in comparison.names() {
        if changes.len() > 1 || changes.iter().any(|(name, _)| head == "group" && !name.is_empty()) {
            writeln!(output)?;
            table(output, head, &changes)?;
        }
    }
    Ok(())
}

fn table(output: &mut dyn Write, head: &str, changes: &[(String, Growth)]) -> io::Result<()> {
    let (shown, rest) = shown(changes, MOST_ROWS);
    write_table(output, &[head, "change", "+-", "before", "now", "objects"], &shown, &|(name, change)| {
        let objects = change.now.objects - change.before.objects;
        vec![
            if name.is_empty() { "-".to_string() } else { name.clone() },
            signed(change.bytes()),
            size(change.error()),
            size(change.before.bytes),
            size(change.now.bytes),
            format!("{}{}", if objects < 0.0 { "-" } else { "+" }, number(objects.abs(), 0)),
        ]
    })?;
    match changes.len() - shown.len() {
        0 => Ok(()),
        more => writeln!(output, "and {more} more with {}", signed(rest)),
    }
}

/// The differences as an object.
pub(crate) fn object(comparison: &Comparison<'_>) -> Value {
    let (total, sites) = (comparison.total(), comparison.sites());
    let profile = |profile: &Profile, total: Amount| {
        json!({
            "pid": profile.of.pid, "name": profile.of.name,
            "seconds": crate::report::rounded(profile.of.seconds), "every_bytes": profile.every,
            "total": amount(total), "notes": losses(profile),
        })
    };
    let of = |change: &Growth| {
        json!({
            "before": amount(change.before), "now": amount(change.now), "change_bytes": change.bytes().round() as i64,
            "standard_error_bytes": change.error().round() as u64,
        })
    };
    let list = |changes: &[(Value, Growth)]| {
        let (shown, _) = shown(changes, MOST_CHANGES);
        let entry = |(of_what, change): &&(Value, Growth)| json!({"of": of_what, "change": of(change)});
        shown.iter().map(entry).collect::<Vec<_>>()
    };
    let sites: Vec<(Value, Growth)> = sites.iter().map(|(site, change)| (line(site), *change)).collect();
    let [groups, threads] = comparison.names().map(|(_, changes)| {
        let changes = changes.into_iter().map(|(name, change)| (Value::from(name), change));
        list(&changes.collect::<Vec<_>>())
    });
    let listed = list(&sites);
    json!({
        "schema": SCHEMA, "view": comparison.now.view.option(), "before": profile(comparison.before, total.before),
        "now": profile(comparison.now, total.now), "change": of(&total), "sites_left_out": sites.len() - listed.len(),
        "sites": listed, "groups": groups, "threads": threads,
    })
}

#[cfg(test)]
mod tests {
    use super::super::saved::tests::{TestRow, profile};
    use super::*;

    const MIB: f64 = (1 << 20) as f64;

    #[test]
    fn growth_comes_first_and_what_stayed_is_left_out() {
        let before =
            profile("ab", &[(&[("f", 3)], "a", 5.0 * MIB), (&[("g", 7)], "a", MIB), (&[("h", 1)], "", 3.0 * MIB)]);
        let now = profile(
            "ab",
            &[
                (&[("g", 7)], "a", MIB),
                (&[("h", 1)], "", MIB),
                (&[("f", 3)], "b", 4.0 * MIB),
                (&[("f", 3)], "a", 5.0 * MIB),
                (&[("f", 4)], "b", MIB / 2.0),
            ],
        );
        let comparison = Comparison { before: &before, now: &now };
        let changes: Vec<(String, f64)> =
            comparison.sites().iter().map(|(site, change)| (named(site), change.bytes() / MIB)).collect();
        let expected = [("f (x.c:3)", 4.0), ("f (x.c:4)", 0.5), ("h (x.c:1)", -2.0)];
        assert_eq!(changes, expected.map(|(name, bytes)| (name.to_string(), bytes)));
        let [(_, groups), (_, threads)] = comparison.names();
        let groups: Vec<(&str, f64)> = groups.iter().map(|(name, change)| (&**name, change.bytes() / MIB)).collect();
        assert_eq!(groups, [("b", 4.5), ("", -2.0)]);
        assert_eq!((threads.len(), comparison.total().bytes()), (1, 2.5 * MIB));
        let error = comparison.total().error();
        let sum = before.total().of(now.view).error().powi(2) + now.total().of(now.view).error().powi(2);
        assert!((error * error / sum - 1.0).abs() < 1e-9);
        assert!(comparison.folded().contains(&"a;t;f 5242880 5242880".to_string()), "{:?}", comparison.folded());
        assert!(comparison.folded().contains(&"b;t;f 0 4718592".to_string()), "{:?}", comparison.folded());
    }

    #[test]
    fn lines_of_another_build_are_of_the_function() {
        let before = profile("ab", &[(&[("f", 3)], "", 5.0 * MIB), (&[("f", 4)], "", 5.0 * MIB)]);
        let now = profile("cd", &[(&[("f", 9)], "", 11.0 * MIB)]);
        let changes = Comparison { before: &before, now: &now }.sites();
        assert_eq!(changes.len(), 1, "{changes:?}");
        assert_eq!((named(&changes[0].0), changes[0].1.bytes()), ("f (x.c)".to_string(), MIB));
    }

    #[test]
    fn table_shows_the_largest_changes_of_both_directions() {
        let names: Vec<String> = (0..100).map(|at| format!("f{at}")).collect();
        let stacks: Vec<[(&str, u32); 1]> = names.iter().map(|name| [(&**name, 1)]).collect();
        let rows = |growing: bool| -> Vec<TestRow<'_>> {
            let bytes = |at: usize| MIB * if (at < 50) == growing { 1.0 + at as f64 } else { 0.5 };
            stacks.iter().enumerate().map(|(at, stack)| (&stack[..], "", bytes(at))).collect()
        };
        let (before, now) = (profile("ab", &rows(false)), profile("ab", &rows(true)));
        let mut text = Vec::new();
        write(&mut text, &Comparison { before: &before, now: &now }).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("| f99 (x.c:1) | -99.5 MiB |") && !text.contains("f0 "), "{text}");
        assert!(text.contains("and 70 more with "), "{text}");
        let sites = Comparison { before: &before, now: &now }.sites();
        let (shown, rest) = shown(&sites, 30);
        assert!(shown.iter().all(|(_, change)| change.bytes() < 0.0) && rest > 0.0);
        assert_eq!(object(&Comparison { before: &before, now: &now })["sites"].as_array().unwrap().len(), 100);
    }
}
