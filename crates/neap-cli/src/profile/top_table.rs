//! A profile as plain tables, and as one JSON object.

use std::io::{self, Write};
use std::rc::Rc;

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Value, json};

use super::resolved::{Profile, ProfileRow};
use super::sums::{Amount, Lifetimes, ProfileView, SampleSums};
use super::symbols::SourceLine;
use crate::look::subject::{Rows, SCHEMA};
use crate::report::{human, number, write_table};

/// Sites, groups and threads in a table, at most.
const MOST_ROWS: usize = 30;
/// Stacks in the JSON object, at most.
const MOST_STACKS: usize = 1000;

/// Bytes with a unit.
pub(crate) fn size(bytes: f64) -> String {
    human(bytes.max(0.0) as u64)
}

/// Characters of a function's name in a table.
const LONGEST: usize = 80;

/// A function with its place in the source, both shortened.
pub(crate) fn named(line: &SourceLine) -> String {
    named_place(&line.function, &line.source, line.line)
}

/// Formats a function with its place in the source. `source` is empty, and `line` 0, if unknown.
pub(crate) fn named_place(function: &str, source: &str, line: u32) -> String {
    let function = match function.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &function[..end]),
        None => function.to_string(),
    };
    match (source, line) {
        ("", _) => function,
        (source, 0) => format!("{function} ({})", shortened(source)),
        (source, number) => format!("{function} ({}:{number})", shortened(source)),
    }
}

/// The last two parts of a path.
fn shortened(path: &str) -> &str {
    path.rmatch_indices('/').nth(1).map_or(path, |(at, _)| &path[at + 1..])
}

/// Sums by site.
pub(crate) fn sites(profile: &Profile) -> Vec<(SourceLine, SampleSums)> {
    profile.by(|row| profile.site(row))
}

/// Writes the tables.
pub(crate) fn write(output: &mut dyn Write, profile: &Profile) -> io::Result<()> {
    writeln!(output, "{}\n", summary(profile).join("\n"))?;
    let rows: Vec<(String, SampleSums)> = sites(profile).iter().map(|(line, sums)| (named(line), *sums)).collect();
    table(output, profile, "function", &rows)?;
    for (head, rows) in [("group", by_name(profile, |row| &row.group)), ("thread", by_name(profile, |row| &row.thread))]
    {
        if rows.len() > 1 || rows.iter().any(|(name, _)| head == "group" && !name.is_empty()) {
            writeln!(output)?;
            table(output, profile, head, &rows)?;
        }
    }
    Ok(())
}

/// Sums by a name of the rows.
pub(crate) fn by_name(profile: &Profile, name: fn(&ProfileRow) -> &Rc<str>) -> Vec<(String, SampleSums)> {
    profile.by(|row| Rc::clone(name(row))).into_iter().map(|(name, sums)| (name.to_string(), sums)).collect()
}

/// Describes the subject of a profile, its total and its missing parts, in a sentence each.
pub(crate) fn summary(profile: &Profile) -> Vec<String> {
    let (of, total) = (&profile.of, profile.total().of(profile.view));
    let mut lines = vec![
        headline(profile),
        format!(
            "{} {} (standard error {}), by {} samples",
            size(total.bytes),
            profile.view.name(),
            size(total.error()),
            total.samples
        ),
    ];
    if let Some(in_use) = of.in_use.filter(|_| profile.view == ProfileView::Live) {
        let unsampled = in_use as f64 - total.bytes;
        lines.push(match unsampled > total.error() {
            true => {
                format!("{} in use; about {} of it is in no sample: allocated before", human(in_use), size(unsampled))
            }
            false => format!("{} in use", human(in_use)),
        });
    }
    lines.extend(losses(profile));
    if !profile.limits.has_lines {
        lines.push("functions only: --trust adds source lines for a process of another user".to_string());
    }
    lines
}

/// The process of a profile, its time, and the distance of its samples.
pub(crate) fn headline(profile: &Profile) -> String {
    let of = &profile.of;
    let process = if of.pid == 0 { of.name.clone() } else { format!("Process {} ({})", of.pid, of.name) };
    format!("{process}, {} s, a sample every {}", number(of.seconds, 1), human(profile.every))
}

/// The losses of a profile, a sentence each. Empty if the profile lacks nothing.
pub(crate) fn losses(profile: &Profile) -> Vec<String> {
    let mut lines = profile.notes.clone();
    let stacks = profile.complete + profile.incomplete;
    if stacks > 0 && profile.incomplete > 0 {
        let share = 100.0 * profile.complete as f64 / stacks as f64;
        lines.push(format!("{} % of {stacks} stacks reach main or the start of their thread", number(share, 1)));
    }
    let losses = &profile.losses;
    for (count, text) in [
        (profile.without_stack, "samples have no stack"),
        (losses.not_kept, "of these are live, and their process had no room to keep their stack"),
        (losses.overwritten, "samples were overwritten before they were read"),
        (losses.without_slot, "samples found no slot, and their frees are not seen"),
        (losses.left_out, "samples are beyond what this command keeps"),
        (losses.damaged, "blocks of samples were damaged"),
    ] {
        if count > 0 {
            lines.push(format!("{count} {text}"));
        }
    }
    lines
}

fn table(output: &mut dyn Write, profile: &Profile, head: &str, rows: &[(String, SampleSums)]) -> io::Result<()> {
    let total = profile.total().of(profile.view).bytes.max(1.0);
    let view = profile.view;
    let header = [
        head,
        view.name(),
        "share",
        "+-",
        "objects",
        if view == ProfileView::Allocated { "live" } else { "allocated" },
        "lifetime",
    ];
    let other = if view == ProfileView::Allocated { ProfileView::Live } else { ProfileView::Allocated };
    let shown = &rows[..rows.len().min(MOST_ROWS)];
    write_table(output, &header, shown, &|(name, sums): &(String, SampleSums)| {
        let of = sums.of(view);
        vec![
            if name.is_empty() { "-".to_string() } else { name.clone() },
            size(of.bytes),
            format!("{} %", number(100.0 * of.bytes / total, 1)),
            size(of.error()),
            number(of.objects, 0),
            size_of(profile, sums, other),
            sums.freed.shown(),
        ]
    })?;
    if rows.len() > shown.len() {
        let rest: f64 = rows[shown.len()..].iter().map(|(_, sums)| sums.of(view).bytes).sum();
        writeln!(output, "and {} more with {}", rows.len() - shown.len(), size(rest))?;
    }
    Ok(())
}

/// Bytes of a view with a unit, unless the profile lacks the view.
pub(crate) fn size_of(profile: &Profile, sums: &SampleSums, view: ProfileView) -> String {
    if profile.lacks.contains(&view) { "-".to_string() } else { size(sums.of(view).bytes) }
}

/// An estimate as a JSON object.
pub(crate) fn amount(amount: Amount) -> Value {
    let round = |value: f64| (value.max(0.0).round()) as u64;
    json!({
        "samples": amount.samples, "objects": round(amount.objects), "bytes": round(amount.bytes),
        "standard_error_bytes": round(amount.error()),
    })
}

/// Returns the objects that were freed while the profile was taken, as a JSON object.
fn freed(freed: Lifetimes) -> Value {
    json!({
        "objects": freed.objects.max(0.0).round() as u64,
        "mean_lifetime_seconds": freed.mean(),
    })
}

/// A function as a JSON object.
pub(crate) fn line(line: &SourceLine) -> Value {
    json!({"function": &*line.function, "file": &*line.source, "line": line.line})
}

/// A profile as an object: its stacks with the most bytes, and its missing parts.
///
/// The serialiser makes the stacks one by one while it writes.
pub(crate) struct ProfileObject<'a>(pub(crate) &'a Profile);

impl Serialize for ProfileObject<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let profile = self.0;
        let mut rows: Vec<&ProfileRow> =
            profile.rows.iter().filter(|row| row.sums.of(profile.view).samples > 0).collect();
        rows.sort_by(|one, other| other.sums.of(profile.view).bytes.total_cmp(&one.sums.of(profile.view).bytes));
        let left_out = rows.len().saturating_sub(MOST_STACKS);
        rows.truncate(MOST_STACKS);
        let of = |view, sum: Amount| if profile.lacks.contains(&view) { Value::Null } else { amount(sum) };
        let stack = |row: &&ProfileRow| {
            let frames = profile.stacks[row.stack].iter().flat_map(|place| place.lines.iter()).map(line);
            json!({
                "group": &*row.group, "thread": &*row.thread, "live": of(ProfileView::Live, row.sums.live),
                "allocated": of(ProfileView::Allocated, row.sums.allocated),
                "peak": of(ProfileView::Peak, row.sums.peak), "freed": freed(row.sums.freed),
                "site": line(&profile.site(row)), "frames": frames.collect::<Vec<_>>(),
            })
        };
        let (losses, total) = (&profile.losses, profile.total());
        let mut object = serializer.serialize_map(None)?;
        object.serialize_entry("schema", &SCHEMA)?;
        object.serialize_entry("pid", &profile.of.pid)?;
        object.serialize_entry("name", &profile.of.name)?;
        object.serialize_entry("seconds", &crate::report::rounded(profile.of.seconds))?;
        object.serialize_entry("in_use_bytes", &profile.of.in_use)?;
        for (name, view) in
            [("live", ProfileView::Live), ("allocated", ProfileView::Allocated), ("peak", ProfileView::Peak)]
        {
            object.serialize_entry(name, &of(view, total.of(view)))?;
        }
        object.serialize_entry("freed", &freed(total.freed))?;
        for (name, number) in [
            ("every_bytes", profile.every),
            ("stacks_complete", profile.complete),
            ("stacks_incomplete", profile.incomplete),
            ("samples_without_stack", profile.without_stack),
            ("samples_not_kept", losses.not_kept),
            ("samples_overwritten", losses.overwritten),
            ("samples_without_slot", losses.without_slot),
            ("samples_left_out", losses.left_out),
            ("damaged_blocks", losses.damaged),
            ("rows_left_out", left_out as u64),
        ] {
            object.serialize_entry(name, &number)?;
        }
        object.serialize_entry("notes", &profile.notes)?;
        object.serialize_entry("stacks", &Rows(&rows, stack))?;
        object.end()
    }
}
