//! Writes memory groups as a tree with bars. The names in it were escaped when they were read.

use core::fmt::Write as _;
use std::collections::BTreeMap;
use std::io::{self, Write};

use neap::groups::{Bound, Event, UNLIMITED};

use super::{ReadGroups, ReportedGroup};
use crate::colours::Colours;
use crate::look::stat_reader::ProcessStatus;
use crate::look::totals::is_near;
use crate::report::{human, number};

/// Cells of a bar.
const BAR: u64 = 20;

/// Writes a tree of a process's groups.
pub(super) fn write(
    output: &mut dyn Write,
    process: &ProcessStatus,
    seen: &ReadGroups,
    colours: Colours,
) -> io::Result<()> {
    let name = |group: &ReportedGroup| match group.depth {
        0 => "(all)".to_string(),
        depth => format!("{}{}", "  ".repeat(depth - 1), group.name),
    };
    let width = seen.groups.iter().map(|group| name(group).chars().count()).chain([5]).max().unwrap_or(5);
    writeln!(
        output,
        "Process {} ({}): {} groups, {} for them besides their per-CPU data\n",
        process.pid,
        process.name,
        seen.groups.len().saturating_sub(1),
        human(seen.metadata)
    )?;
    let head = format!("{:width$}  {:>10} {:>10} {:>10}  of its limit, or of all", "group", "used", "peak", "max");
    writeln!(output, "{}", colours.heading(&head))?;
    let all = seen.groups.first().map_or(0, |root| root.used);
    for group in &seen.groups {
        let (used, name) = (group.used, name(group));
        let max = group.bounds[Bound::Max as usize];
        let (of, mark) = if max == UNLIMITED { (all, '-') } else { (max, '#') };
        let limit = if max == UNLIMITED { "none".into() } else { human(max) };
        let is_near = max != UNLIMITED && is_near(max, max.saturating_sub(used));
        let shown = colours.warning_if(is_near, &format!("{:>10}", human(used)));
        let (peak, bar) = (human(group.peak), bar(used, of, mark));
        writeln!(output, "{name:width$}  {shown} {peak:>10} {limit:>10}  {bar}{}", remarks(group, colours))?;
    }
    writeln!(output, "\n#: part of the group's own limit; -: part of all groups' memory. Peaks include caches.")?;
    if seen.raised > 0 {
        writeln!(
            output,
            "Groups changed while they were counted; {} of them are shown with the sum of the groups below them.",
            seen.raised
        )?;
    }
    if seen.is_from_memory {
        writeln!(
            output,
            "No thread of the process answered, so its memory was read. While the process runs, the numbers are of \
             different moments."
        )?;
    }
    write_waiting(output, seen)
}

/// The path of a group for people.
fn shown(group: Option<&ReportedGroup>) -> &str {
    match group.map(|group| group.path.as_str()) {
        None => "?",
        Some("") => "(all)",
        Some(path) => path,
    }
}

/// Writes the number of deleted groups, and the charges under their ids.
pub(super) fn write_dead(output: &mut dyn Write, seen: &ReadGroups) -> io::Result<()> {
    writeln!(output, "\nDeleted groups that wait for a grace period: {}.", seen.dying)?;
    match seen.gone.len() {
        0 => writeln!(output, "No id of a deleted group is in use.")?,
        count => writeln!(
            output,
            "Ids of deleted groups that are still in use: {count}. Charged bytes, and the group that owns them:"
        )?,
    }
    let groups: BTreeMap<u64, &ReportedGroup> = seen.groups.iter().map(|group| (group.id, group)).collect();
    for gone in &seen.gone {
        writeln!(output, "  {:>10} now of {}", human(gone.bytes), shown(groups.get(&gone.heir).copied()))?;
    }
    Ok(())
}

/// Writes a line for the charges that wait at each group for each reason.
fn write_waiting(output: &mut dyn Write, seen: &ReadGroups) -> io::Result<()> {
    let mut gap = "\n";
    for group in &seen.groups {
        for waits in seen.waiting_at(group).chunk_by(|one, other| one.reason == other.reason) {
            let (charges, path, reason) = (waits.len(), shown(Some(group)), waits[0].reason);
            let bytes = human(waits.iter().fold(0, |sum: u64, waiting| sum.saturating_add(waiting.bytes)));
            let longest = waits.iter().map(|waiting| waiting.waited).max().unwrap_or_default();
            let (seconds, endless) =
                (number(longest as f64 / 1e9, 1), waits.iter().filter(|it| it.left.is_none()).count());
            write!(output, "{gap}{charges} charges wait at {path} for {bytes}, {seconds} s so far, ")?;
            writeln!(output, "{endless} without a deadline: {reason}")?;
            gap = "";
        }
    }
    Ok(())
}

fn bar(part: u64, of: u64, mark: char) -> String {
    let cells = if of == 0 { 0 } else { (u128::from(part) * u128::from(BAR)).div_ceil(u128::from(of)) };
    let cells = (cells as u64).min(BAR) as usize;
    let bar: String =
        core::iter::repeat_n(mark, cells).chain(core::iter::repeat_n('.', BAR as usize - cells)).collect();
    let percent = if of == 0 { 0 } else { u128::from(part) * 100 / u128::from(of) };
    format!("{bar} {percent:>3} %")
}

/// Bounds besides the `max`, and events.
fn remarks(group: &ReportedGroup, colours: Colours) -> String {
    let mut text = String::new();
    for bound in [Bound::High, Bound::Low, Bound::Min] {
        let bytes = group.bounds[bound as usize];
        if bytes != bound.default() {
            let _ = write!(text, "  {} {}", bound.name(), human(bytes));
        }
    }
    for event in [Event::Low, Event::High, Event::Max, Event::Refused, Event::Overcharged] {
        let (count, local) = (group.events[event as usize], group.local_events[event as usize]);
        if count > 0 {
            let is_bad = matches!(event, Event::Refused | Event::Overcharged);
            let shown = colours.warning_if(is_bad, &format!("{} x {count}", event.name()));
            let _ = write!(text, "  {shown}");
        }
        // Without events below, both counts are equal.
        if local < count {
            let _ = write!(text, " ({local} here)");
        }
    }
    if group.stalled_us > 0 {
        let _ = write!(text, "  stalled {} s", number(group.stalled_us as f64 / 1e6, 2));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_every_group_once() {
        let mut seen = super::super::tests::seen();
        seen.groups[3].bounds = [8000, UNLIMITED, 1 << 20, 0];
        (seen.groups[3].events, seen.groups[3].local_events) = ([0; 10], [0; 10]);
        seen.groups[3].stalled_us = 0;
        seen.groups[3].events[Event::Refused as usize] = 7;
        seen.groups[3].local_events[Event::Refused as usize] = 7;
        let mut text = Vec::new();
        write(&mut text, &crate::look::stat_reader::tests::ended(), &seen, Colours::NONE).unwrap();
        write_dead(&mut text, &seen).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let row = |name: &str| *lines.iter().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{text}"));
        assert!(row("  beta").contains("##########.......... ") && row("  beta").ends_with("refused x 7"), "{text}");
        assert!(
            row("tenant").contains("refused x 2 (0 here)") && row("tenant").ends_with("  stalled 0.12 s"),
            "{text}"
        );
        assert!(row("  beta").contains("low 1.0 MiB") && !row("  acme").contains("low"), "{text}");
        assert!(row("(all)").contains("--------------------"), "{text}");
        assert!(text.contains("77 B now of tenant"), "{text}");
        let waits = "1 charges wait at tenant for 100 B, 2.5 s so far, 1 without a deadline: barred";
        assert!(text.contains(waits) && text.contains("50 B, 0.0 s so far, 0 without a deadline: turn"), "{text}");
        assert_eq!(bar(0, 0, '#'), "....................   0 %");
        assert_eq!(bar(u64::MAX, 1, '#').chars().filter(|cell| *cell == '#').count(), 20);
    }
}
