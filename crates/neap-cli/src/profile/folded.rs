//! Writes a profile, or the comparison of two, as folded stacks and as a flame graph.

use std::io::{self, Write};

use inferno::flamegraph::{self, Direction};

use super::compare::Comparison;
use super::resolved::{Profile, ProfileRow};
use super::sums::ProfileView;
use super::top_table::{headline, size};

/// Most bytes of all stacks together. Larger sums are wrong, and could overflow in a reader.
const MOST_BYTES: u64 = 1 << 62;

/// Returns the stacks that have bytes in a view: their frames, the outermost first, and the bytes.
/// Stacks with more bytes take precedence. Stacks that exceed the profile's limits are summed in
/// one entry.
pub(crate) fn stacks(profile: &Profile, view: ProfileView) -> Vec<(String, u64)> {
    let plain = |name: &str| name.replace(';', ":");
    let mut rows: Vec<&ProfileRow> = profile.rows.iter().collect();
    rows.sort_by(|one, other| other.sums.of(view).bytes.total_cmp(&one.sums.of(view).bytes));
    let (mut text, mut frames) = (profile.limits.folded_bytes, profile.limits.folded_frames);
    let (mut left_out, mut room): (u64, u64) = (0, MOST_BYTES);
    let mut stacks: Vec<(String, u64)> = rows
        .into_iter()
        .filter_map(|row| {
            let bytes = (row.sums.of(view).bytes.round() as u64).min(room);
            room -= bytes;
            let lines = || profile.stacks[row.stack].iter().flat_map(|place| place.lines.iter());
            let (length, count) = (lines().map(|line| line.function.len()).sum(), lines().count());
            let rest = (usize::checked_sub(text, length), frames.checked_sub(count));
            let (Some(rest_of_text), Some(rest_of_frames)) = rest else {
                left_out += bytes;
                return None;
            };
            (text, frames) = (rest_of_text, rest_of_frames);
            let mut frames = vec![plain(if row.thread.is_empty() { "[thread]" } else { &row.thread })];
            if !row.group.is_empty() {
                frames.insert(0, plain(&row.group));
            }
            let places = profile.stacks[row.stack].iter().rev();
            frames.extend(places.flat_map(|place| place.lines.iter().rev()).map(|line| plain(&line.function)));
            if profile.stacks[row.stack].is_empty() {
                frames.push("[no stack]".to_string());
            }
            (bytes > 0).then(|| (frames.join(";"), bytes))
        })
        .collect();
    if left_out > 0 {
        stacks.push(("[left out]".to_string(), left_out));
    }
    stacks
}

/// Returns a line for each stack: its frames and its bytes.
pub(crate) fn lines(profile: &Profile) -> Vec<String> {
    let stacks = stacks(profile, profile.view).into_iter();
    let mut lines: Vec<String> = stacks.map(|(stack, bytes)| format!("{stack} {bytes}")).collect();
    lines.sort_unstable();
    lines
}

/// Writes folded stacks.
pub(crate) fn write(output: &mut dyn Write, lines: &[String]) -> io::Result<()> {
    lines.iter().try_for_each(|line| writeln!(output, "{line}"))
}

/// Writes the flame graph of a profile.
pub(crate) fn flame_graph(output: &mut dyn Write, profile: &Profile) -> io::Result<()> {
    let title = format!("{} {}", size(profile.total().of(profile.view).bytes), profile.view.name());
    draw(output, &lines(profile), title, headline(profile))
}

/// Writes the flame graph of the later profile. Functions that have grown are red, and those that
/// have shrunk are blue.
pub(crate) fn difference_graph(output: &mut dyn Write, comparison: &Comparison<'_>) -> io::Result<()> {
    let (total, view) = (comparison.total(), comparison.now.view);
    let title = format!("{} {}, {} than before", size(total.now.bytes), view.name(), more(total.bytes()));
    draw(output, &comparison.folded(), title, headline(comparison.now))
}

fn more(bytes: f64) -> String {
    format!("{} {}", size(bytes.abs()), if bytes < 0.0 { "less" } else { "more" })
}

/// Draws folded stacks. Without any there is no graph.
fn draw(output: &mut dyn Write, lines: &[String], title: String, subtitle: String) -> io::Result<()> {
    if lines.is_empty() {
        return writeln!(
            output,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"600\" height=\"40\"><text x=\"10\" y=\"25\">There are no \
             samples.</text></svg>"
        );
    }
    let mut options = flamegraph::Options::default();
    options.title = title;
    options.subtitle = Some(subtitle);
    options.count_name = "bytes".to_string();
    options.direction = Direction::Straight;
    options.deterministic = true;
    options.min_width = 0.1;
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::area::SampledAllocation;
    use crate::profile::sums::{Amount, SampleSums};

    #[test]
    fn sizes_that_are_no_truth_add_up_to_a_number() {
        let endless = SampledAllocation { size: u64::MAX, mean: 1, ..SampledAllocation::default() };
        let row = |thread: &str| ProfileRow {
            stack: 0,
            group: "".into(),
            thread: thread.into(),
            sums: SampleSums { live: Amount::of(&endless), ..SampleSums::default() },
        };
        let profile = Profile { stacks: vec![Vec::new()], rows: ["a", "b"].map(row).to_vec(), ..Profile::default() };
        assert_eq!(lines(&profile), [format!("a;[no stack] {MOST_BYTES}")]);
        flame_graph(&mut Vec::new(), &profile).unwrap();
    }

    #[test]
    fn stacks_beyond_the_bounds_are_one_line() {
        let row = |size: u64| ProfileRow {
            stack: 0,
            group: "".into(),
            thread: format!("{size}").into(),
            sums: SampleSums {
                live: Amount::of(&SampledAllocation { size, mean: 1, ..SampledAllocation::default() }),
                ..SampleSums::default()
            },
        };
        let line = crate::profile::symbols::SourceLine { function: "main".into(), ..Default::default() };
        let frame = crate::profile::unwind::CodePlace { file: None, address: 1 };
        let place = crate::profile::resolved::Place { frame, lines: [line].into() };
        let mut profile =
            Profile { stacks: vec![vec![place]], rows: [100, 900, 200].map(row).to_vec(), ..Profile::default() };
        assert_eq!(lines(&profile), ["100;main 100", "200;main 200", "900;main 900"]);
        profile.limits.folded_frames = 1;
        assert_eq!(lines(&profile), ["900;main 900", "[left out] 300"]);
        profile.limits.folded_bytes = 3;
        assert_eq!(lines(&profile), ["[left out] 1200"]);
    }
}
