//! Groups for people: a tree with bars. Names were escaped where they were read.

use core::fmt::Write;

use neap::group_report::REASONS;
use neap::groups::{Bound, Event, UNLIMITED};

use super::{ReadGroups, ReportedGroup};
use crate::published::ProcessStatus;
use crate::report::{human, number};

/// Cells of a bar.
const BAR: u64 = 20;

/// Returns a tree of a process's groups; with `dead`, also the remains of deleted ones.
pub(super) fn report(process: &ProcessStatus, seen: &ReadGroups, dead: bool) -> String {
    let sorted = seen.sorted();
    let mut text = String::new();
    let name = |path: &str, depth: usize| match depth {
        0 => "(all)".to_string(),
        depth => format!("{}{}", "  ".repeat(depth - 1), path.rsplit('/').next().unwrap_or_default()),
    };
    let names: Vec<String> = sorted.iter().map(|(path, depth, _)| name(path, *depth)).collect();
    let width = names.iter().map(|name| name.chars().count()).chain([5]).max().unwrap_or(5);
    let _ = writeln!(
        text,
        "Process {} ({}): {} groups, {} for them besides their per-CPU data",
        process.pid,
        process.name.escape_debug(),
        sorted.len().saturating_sub(1),
        human(seen.metadata)
    );
    let _ = writeln!(text);
    let _ = writeln!(text, "{:width$}  {:>10} {:>10} {:>10}  of its limit, or of all", "group", "used", "peak", "max");
    let all = sorted.first().map_or(0, |(.., root)| root.used);
    for ((_, _, group), name) in sorted.iter().zip(names) {
        let used = group.used;
        let max = group.bounds[Bound::Max as usize];
        let (of, mark) = if max == UNLIMITED { (all, '-') } else { (max, '#') };
        let limit = if max == UNLIMITED { "none".into() } else { human(max) };
        let _ = write!(
            text,
            "{name:width$}  {:>10} {:>10} {limit:>10}  {}",
            human(used),
            human(group.peak),
            bar(used, of, mark)
        );
        let _ = writeln!(text, "{}", remarks(group));
    }
    let _ = writeln!(text);
    let _ = writeln!(text, "# of its own limit, - of what all use. Peaks count what CPUs and caches kept, too.");
    text += &waiting(seen);
    if dead {
        let _ = writeln!(text);
        let _ = writeln!(text, "Deleted groups on their way out: {}.", seen.dying);
        match seen.gone.len() {
            0 => _ = writeln!(text, "Nothing is booked under the id of a group that is gone."),
            count => _ = writeln!(text, "Ids of groups that are gone, and what is booked under them: {count}."),
        }
        for gone in &seen.gone {
            let heir = sorted.iter().find(|(.., group)| group.id == gone.heir).map_or("?", |(path, ..)| path);
            let heir = if heir.is_empty() { "(all)" } else { heir };
            let _ = writeln!(text, "  {:>10} now of {heir}", human(gone.bytes));
        }
    }
    text
}

/// Returns a line for the charges that wait at each group for each reason.
fn waiting(seen: &ReadGroups) -> String {
    let mut text = String::new();
    for (path, _, group) in seen.sorted() {
        for reason in REASONS {
            let all: Vec<_> = seen.waiting.iter().filter(|it| it.at == group.id && it.reason == reason).collect();
            let longest = all.iter().map(|it| it.waited).max().unwrap_or_default();
            if !all.is_empty() {
                let endless = all.iter().filter(|it| it.left.is_none()).count();
                let _ = write!(text, "{} charges wait at {}", all.len(), if path.is_empty() { "(all)" } else { &path });
                let bytes = human(all.iter().map(|it| it.bytes).fold(0, u64::saturating_add));
                let seconds = number(longest as f64 / 1e9, 1);
                let _ = writeln!(text, " for {bytes}, {seconds} s so far, {endless} without a deadline: {reason}");
            }
        }
    }
    if text.is_empty() { text } else { format!("\n{text}") }
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
fn remarks(group: &ReportedGroup) -> String {
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
            let _ = write!(text, "  {} x {count}", event.name());
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
        seen.groups[2].bounds = [8000, UNLIMITED, 1 << 20, 0];
        (seen.groups[2].events, seen.groups[2].local_events) = ([0; 9], [0; 9]);
        seen.groups[2].stalled_us = 0;
        seen.groups[2].events[Event::Refused as usize] = 7;
        seen.groups[2].local_events[Event::Refused as usize] = 7;
        let text = report(&crate::published::tests::nobody(), &seen, true);
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
