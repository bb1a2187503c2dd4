//! The lines of `neap top` about a whole process, or their JSON object. All functions are pure
//! functions of two readings.

use serde_json::{Map, Value};

use super::listing::Cell;
use super::reading::Pair;
use crate::look::stat_model::{Numbers, PerCpuNumbers};

/// A number with its name for people and its name in JSON.
struct Fact {
    label: &'static str,
    name: &'static str,
    cell: Cell,
}

fn fact(label: &'static str, name: &'static str, cell: Cell) -> Fact {
    Fact { label, name, cell }
}

/// The start of a line, and the line's facts.
type Facts = (&'static str, Vec<Fact>);

fn facts(pair: Pair<'_>) -> [Facts; 4] {
    let (now, numbers) = (pair.current, &pair.current.numbers);
    let mut memory = vec![
        fact("resident", "resident_bytes", Cell::Bytes(now.resident)),
        fact("# in use", "used_bytes", Cell::Bytes(numbers.bytes.used)),
    ];
    if let Some(budget) = numbers.pages.budget {
        memory.push(fact("limit", "limit_bytes", Cell::Bytes(now.bytes(budget))));
        memory.push(fact("counted", "counted_bytes", Cell::Bytes(now.bytes(numbers.pages.used))));
    }
    if let Some(container) = numbers.container
        && let (Some(pressure), Some(limited_by)) = (container.pressure, container.limited_by)
    {
        memory.push(fact("pressure", "pressure", Cell::Text(pressure.name().to_string())));
        memory.push(fact("by", "limited_by", Cell::Text(limited_by.name().to_string())));
        memory.push(fact("wall in", "ms_to_wall", Cell::Wall(container.ms_to_wall)));
    }
    let mut cached = vec![
        fact("o objects", "cached_object_bytes", Cell::Bytes(numbers.bytes.cached)),
        fact("l page lists", "listed_bytes", Cell::Bytes(now.bytes(numbers.pages.listed))),
        fact(". free pages", "free_resident_bytes", Cell::Bytes(now.bytes(numbers.pages.backed_free))),
    ];
    if let Some(PerCpuNumbers { used, free }) = numbers.per_cpu {
        memory.push(fact("p per-CPU data", "per_cpu_bytes", Cell::Bytes(used.saturating_add(free))));
        cached.push(fact("empty per-CPU", "per_cpu_free_bytes", Cell::Bytes(free)));
    }
    let rate = |counter: fn(&Numbers) -> u64| pair.rate(pair.grown(|reading| counter(&reading.numbers)));
    let flow = |counter| rate(counter).map(|pages| pages * numbers.mode.page_size as f64);
    let faults = pair.rate_of_kernel(|reading| reading.kernel.minor.saturating_add(reading.kernel.major));
    let rates = vec![
        fact("faults", "faults_per_s", Cell::Rate(faults)),
        fact("populated", "populated_bytes_per_s", Cell::Flow(flow(|numbers| numbers.pages.populated))),
        fact("released", "released_bytes_per_s", Cell::Flow(flow(|numbers| numbers.released.pages))),
        fact("fences", "fences_per_s", Cell::Rate(rate(|numbers| numbers.fences))),
        fact("ticks", "ticks_per_s", Cell::Rate(rate(|numbers| numbers.ticks))),
    ];
    let mode = &numbers.mode;
    let text = |text: &str| Cell::Text(text.to_string());
    let way = vec![
        fact("slots", "slots", text(&mode.slots)),
        fact("thread", "thread", text(&mode.background)),
        fact("holes", "hole_bytes", Cell::Bytes(now.bytes(numbers.holes.pages))),
        fact("skipped", "skipped", Cell::Number(numbers.skipped)),
        fact("unaccounted", "unaccounted_bytes", Cell::Change(numbers.bytes.unaccounted)),
    ];
    [("memory", memory), ("cached", cached), ("a second", rates), ("neap", way)]
}

/// A line for each kind of number. Numbers that do not fit into `width` characters are left out.
pub(super) fn lines(pair: Pair<'_>, width: usize) -> Vec<String> {
    let line = |(head, facts): &Facts| {
        let mut line = format!("{head:<8}");
        for fact in facts {
            let more = format!(" {} {} ", fact.label, fact.cell.text());
            if line.len() + more.trim_end().len() > width {
                break;
            }
            line += &more;
        }
        line.trim_end().to_string()
    };
    facts(pair).iter().map(line).collect()
}

/// All facts by their names in JSON.
pub(super) fn json(pair: Pair<'_>) -> Map<String, Value> {
    let facts = facts(pair).into_iter().flat_map(|(_, facts)| facts);
    facts.map(|fact| (fact.name.to_string(), fact.cell.json())).collect()
}

/// Returns the resident bytes of each letter of the bar: in use, per-CPU data, free objects, pages
/// in lists, free pages, and all other memory.
pub(super) fn parts(pair: Pair<'_>) -> [(char, u64); 6] {
    let (now, numbers) = (pair.current, &pair.current.numbers);
    let known = [
        ('#', numbers.bytes.used),
        ('p', numbers.per_cpu.map_or(0, |per_cpu| per_cpu.used.saturating_add(per_cpu.free))),
        ('o', numbers.bytes.cached),
        ('l', now.bytes(numbers.pages.listed)),
        ('.', now.bytes(numbers.pages.backed_free)),
    ];
    let sum = known.iter().fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let [used, per_cpu, objects, lists, free] = known;
    [used, per_cpu, objects, lists, free, (' ', now.resident.saturating_sub(sum))]
}

/// Returns the lengths of the parts of a bar of `width` characters. The sum is never longer than
/// the bar. A part with bytes gets at least one character, if one is left.
pub(super) fn bar(parts: &[(char, u64)], width: usize) -> Vec<(char, usize)> {
    let sum = parts.iter().fold(0_u128, |sum, (_, bytes)| sum + u128::from(*bytes)).max(1);
    let mut end = 0_u128;
    let mut drawn = 0;
    let mut lengths = Vec::new();
    for &(letter, bytes) in parts {
        end += u128::from(bytes);
        // Each end is rounded, so that the lengths add up.
        let to = ((end * width as u128 + sum / 2) / sum) as usize;
        let to = if bytes > 0 { to.max(drawn + 1) } else { to.max(drawn) }.min(width);
        lengths.push((letter, to - drawn));
        drawn = to;
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::reading::tests::readings;

    #[test]
    fn summary_lines_drop_last_items_when_narrow() {
        let [previous, current] = &readings();
        let pair = Pair { previous, current };
        let expected = [
            "memory   resident 100.0M  # in use 60.0M  limit 256.0M  counted 93.8M  p per-CPU data 5.0M",
            "cached   o objects 10.0M  l page lists 2.3M  . free pages 7.8M  empty per-CPU 1.0M",
            "a second faults 3000  populated 7.8M  released 5.9M  fences 20.0  ticks 10.0",
            "neap     slots rseq  thread asleep  holes 308.0K  skipped 1  unaccounted 0",
        ];
        assert_eq!(lines(pair, 100), expected);
        assert_eq!(lines(pair, 80)[0], "memory   resident 100.0M  # in use 60.0M  limit 256.0M  counted 93.8M");
        assert_eq!(lines(pair, 76)[2], expected[2]);
        assert_eq!(lines(pair, 75)[2], "a second faults 3000  populated 7.8M  released 5.9M  fences 20.0");
        let object = json(pair);
        for (name, value) in [("limit_bytes", 256 << 20), ("per_cpu_bytes", 5 << 20), ("hole_bytes", 77 << 12)] {
            assert_eq!(object[name], value, "{name}");
        }
        assert_eq!((object["fences_per_s"].as_f64(), &object["thread"]), (Some(20.0), &"asleep".into()));
    }

    #[test]
    fn pressure_of_followed_container_has_cause_and_time() {
        let [previous, mut current] = readings();
        let container = serde_json::json!({"pressure": "low", "limited_by": "group", "ms_to_wall": 9500});
        current.numbers.container = Some(serde_json::from_value(container).unwrap());
        let pair = Pair { previous: &previous, current: &current };
        assert!(
            lines(pair, 150)[0].contains("  pressure low  by group  wall in 9.5 s  p per-CPU"),
            "{:?}",
            lines(pair, 150)
        );
        let object = json(pair);
        assert_eq!(
            (&object["pressure"], &object["limited_by"], &object["ms_to_wall"]),
            (&"low".into(), &"group".into(), &9500.into())
        );
        assert!(!json(Pair { previous: &previous, current: &previous }).contains_key("pressure"), "no container");
    }

    #[test]
    fn one_reading_has_no_rates() {
        let [_, only] = &readings();
        let pair = Pair { previous: only, current: only };
        assert_eq!(lines(pair, 100)[2], "a second faults -  populated -  released -  fences -  ticks -");
        assert_eq!(json(pair)["faults_per_s"], Value::Null);
    }

    #[test]
    fn a_bar_is_as_long_as_it_should_be_and_shows_what_there_is() {
        let parts = |bytes: [u64; 4]| [('a', bytes[0]), ('b', bytes[1]), ('c', bytes[2]), (' ', bytes[3])];
        let drawn = |bytes, width| {
            let bar = bar(&parts(bytes), width).into_iter();
            bar.map(|(letter, length)| String::from(letter).repeat(length)).collect::<String>()
        };
        assert_eq!(drawn([50, 25, 0, 25], 8), "aaaabb  ");
        assert_eq!(drawn([1, 1, 1000, 1], 10), "abcccccccc");
        assert_eq!(drawn([1000, 0, 1, 0], 10), "aaaaaaaaaa");
        assert_eq!(drawn([0, 0, 0, 0], 3), "");
        assert_eq!(drawn([u64::MAX, u64::MAX, 0, u64::MAX], 9), "aaabbb   ");
        for seed in 0..2000_u64 {
            let bytes = [3, 5, 7, 11].map(|step| (seed * step).pow(2) % 1013);
            let width = (seed % 40) as usize;
            let sum: usize = bar(&parts(bytes), width).iter().map(|(_, length)| length).sum();
            assert_eq!(sum, if bytes == [0; 4] { 0 } else { width }, "{bytes:?} in {width}");
        }
    }
}
