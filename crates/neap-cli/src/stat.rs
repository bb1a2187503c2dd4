//! `neap stat`: the published numbers of a process under neap, as a report or as one JSON object.
//!
//! The command writes nothing into the process, unless an option requests a report.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use neap_pressure::Pressure;

use crate::colours::Colours;
use crate::look::fresh;
use crate::look::page_bytes::page_bytes;
use crate::look::stat_model::{
    Class, ContainerNumbers, Cpu, GuardNumbers, HeapProfiles, Node, Numbers, PerCpuNumbers, Watermarks,
};
use crate::look::stat_reader::{ProcessStatus, monotonic};
use crate::look::subject::{SCHEMA, Subject, print, print_json};
use crate::look::totals::{headroom, is_near};
use crate::pressure::wall_in;
use crate::report::{number, table};
use crate::{chunks, groups, reconcile, shrinkers};

const EXAMPLES: &str = "\
Examples:
  neap stat 1234          memory of process 1234 in use, in caches and returned to the system
  neap stat 1234 --json   all numbers, as one JSON object
  neap stat 1234 --percpu --html chunks.html
                          the chunks of its per-CPU data, and a page that draws them
  neap stat 1234 --groups --dead
                          its memory groups, and the charges that deleted groups have left
  neap stat 1234 --reconcile
                          resident memory by source, beside neap's own counters
  neap stat 1234 --shrinkers
                          caches that can shrink, the objects that they freed, and their faults

Only the process's own user and root may read the numbers. The numbers of memory, pages, nodes and
classes are current, even if the process sleeps or is stopped. CPUs' caches and the container are
at most about a second old, where the memory of the process may be read. All other numbers are as of
its last tick. The parts are counted one after the other, so the sums of a
busy process agree only approximately.

--percpu, --groups, --shrinkers and --reconcile send requests to the process, as `neap drain` does.
A process with many groups or chunks answers in several reports. --reconcile stops a process with
memory groups for some milliseconds if it has at most 64 MiB in slabs. If it has more, --reconcile
does not tell how much of the charged memory exists.

With --percpu --json, the map of a chunk is a list of page counts, each with a letter: u used, e
populated and empty, - not populated.";

/// Show the numbers of a running process.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StatOptions {
    #[command(flatten)]
    subject: Subject,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Show the chunks of its per-CPU data instead
    #[arg(long)]
    percpu: bool,
    /// Show its memory groups instead, as a tree with the use of each
    #[arg(long, conflicts_with = "percpu")]
    groups: bool,
    /// Show its shrinkers instead: caches that give memory back
    #[arg(long, conflicts_with_all = ["percpu", "groups"])]
    shrinkers: bool,

    /// Show resident memory by source instead, beside neap's counters and group charges
    #[arg(long, conflicts_with_all = ["percpu", "groups", "shrinkers"])]
    reconcile: bool,
    /// Also count deleted groups, and list their ids that are still in use
    #[arg(long, requires = "groups")]
    dead: bool,
    /// Write a page with the chunks' maps
    #[arg(long, value_name = "FILE", requires = "percpu")]
    html: Option<PathBuf>,
}

pub(crate) fn main(options: &StatOptions) -> Result<ExitCode> {
    let StatOptions { subject, json, .. } = options;
    if options.percpu {
        return chunks::show(subject, *json, options.html.as_deref());
    }
    if options.groups {
        return groups::show(subject, *json, options.dead);
    }
    if options.reconcile {
        return reconcile::show(subject, *json);
    }
    if options.shrinkers {
        return shrinkers::show(subject, *json);
    }
    let (process, (mut page, age)) = subject.look(|process| {
        let page = fresh::page(process)?;
        let age = page.is_written.then(|| monotonic().saturating_sub(page.published) / 1_000_000);
        Ok((page, age))
    })?;
    let numbers = Numbers::read(&process, &page)?;
    if !json {
        let colours = Colours::of_output();
        return print(|output| write!(output, "{}", numbers.report(&process, age, colours)));
    }
    // Inside a container the process has another id.
    for (key, value) in [
        ("schema", SCHEMA.into()),
        ("page_bytes", page_bytes(&numbers)),
        ("pid", process.pid.into()),
        ("name", process.name.into()),
        ("resident_bytes", (process.resident_kib << 10).into()),
        ("age_ms", age.into()),
        ("read_by", page.way.into()),
    ] {
        page.object.insert(key.to_string(), value);
    }
    print_json(&page.object)
}

/// Classes that the report shows.
const SHOWN: usize = 10;

impl Numbers {
    fn report(&self, process: &ProcessStatus, age: Option<u64>, colours: Colours) -> String {
        let Numbers { mode, bytes, pages, lists, released, holes, reuse, .. } = self;
        let mib = |bytes: u64| number(bytes as f64 / f64::from(1 << 20), 2);
        let isolated: Vec<String> = mode.isolated_cpus.iter().map(u32::to_string).collect();
        let rows = |cells: &[(&str, String)]| -> Vec<Vec<String>> {
            cells.iter().map(|(name, value)| vec![(*name).to_string(), value.clone()]).collect()
        };
        let moment = if self.settled { "now" } else { "now, while they changed" };
        let counters = if self.cpus_read_now { "memory counters and CPU caches" } else { "memory counters" };
        let title = colours.heading(&format!("Process {} ({})", process.pid, process.name));
        let (is_near, count) = (self.is_near_limit(), |count: u64| colours.warning_if(count > 0, &count.to_string()));
        let mut text = match age {
            Some(age) => format!(
                "{title}: neap {}, {counters} read {moment}, other numbers {age} ms old\n\
                 CpuCaches: {} ({}); isolated CPUs: {}\n\
                 Settings: {}\n\
                 {}\
                 Maintenance: thread {}, every {} ms; {} ticks, {} drains, {} fences, {} skipped, {} around busy slots\n\
                 Given back: {} pages by {} calls, {} of them failed; huge pages {}\n\
                 Growth: {} pages from the system, {} of them during {} sweeps that put {} objects back; \
                 {} scattered pages released\n\
                 Growth beside unused memory: {} pages beside free pages, {} beside barns, {} beside slabs; \
                 {} waits in vain\n{}\n",
                self.version,
                mode.slots,
                mode.why,
                if isolated.is_empty() { "none".to_string() } else { isolated.join(", ") },
                self.shown_settings(),
                self.container.as_ref().map(|container| container.shown(colours)).unwrap_or_default()
                    + &self.heap_profiles.as_ref().map(|profiles| profiles.shown(colours)).unwrap_or_default(),
                mode.background,
                mode.interval_ms,
                self.ticks,
                self.drains,
                self.fences,
                self.skipped,
                self.busy,
                released.pages,
                released.calls,
                count(released.failures),
                if mode.huge { "allowed" } else { "off" },
                reuse.grown,
                reuse.grown_in_sweeps,
                reuse.sweeps,
                reuse.objects,
                reuse.released,
                reuse.beside_free_pages,
                reuse.beside_barns,
                reuse.beside_slabs,
                reuse.waits_in_vain,
                self.guard.as_ref().map(GuardNumbers::shown).unwrap_or_default(),
            ),
            None => format!(
                "{title}: memory counters read {moment}; the process has not written other numbers yet, like a child \
                 of fork before its first tick\n\n"
            ),
        };
        let has_text = age.is_some();
        let mut memory = vec![
            ("resident, the whole process", mib(process.resident_kib << 10)),
            ("in use", colours.warning_if(is_near, &mib(bytes.used))),
            ("free objects in slabs and caches", mib(bytes.cached)),
            ("of these on CPUs' stacks, when last counted", mib(bytes.on_stacks)),
            ("free pages, resident", mib(bytes.free_resident)),
            ("address space of the arena", mib(bytes.mapped)),
            ("address space of its tables", mib(bytes.tables)),
        ];
        if has_text {
            memory.push(("unaccounted, exact when idle", mib_signed(bytes.unaccounted)));
        }
        if let Some(PerCpuNumbers { used, free }) = self.per_cpu {
            memory.push(("per-CPU data, pages in use", mib(used)));
            memory.push(("per-CPU data, empty pages", mib(free)));
        }
        text += &table(&["memory", "MiB"], &rows(&memory));
        let mut zone = vec![
            ("managed", pages.managed.to_string()),
            ("free", pages.free.to_string()),
            ("free and resident", pages.backed_free.to_string()),
            ("used, with those in CPUs' lists", pages.used.to_string()),
            ("in CPUs' lists", pages.listed.to_string()),
            ("holes in slabs", holes.pages.to_string()),
            ("releasing", pages.releasing.to_string()),
        ];
        if has_text {
            zone.push(("draining", pages.draining.to_string()));
            zone.push(("released in holes so far", holes.released.to_string()));
            zone.push(("holes refilled so far", holes.refilled.to_string()));
            zone.push(("most that lists may keep", lists.highs.to_string()));
            zone.push(("taken from lists for allocations", lists.need_pages.to_string()));
            zone.push(("times that allocations needed that", lists.need_drains.to_string()));
        }
        zone.push(("allocations refused so far", count(self.refused)));
        zone.push(("objects that shrinkers freed so far", self.shrunk.to_string()));
        if let Some(budget) = pages.budget {
            zone.push(("budget", colours.warning_if(is_near, &budget.to_string())));
            if has_text {
                let Watermarks { min, low, high } = pages.watermarks;
                zone.push(("watermarks min, low, high", format!("{min}, {low}, {high}")));
            }
        }
        text += "\n";
        text += &table(&[&format!("pages of {} B", mode.page_size), "count"], &rows(&zone));
        text += &self.report_nodes();
        text += &self.report_classes();
        text += &if has_text { self.report_cpus() } else { String::new() };
        if self.truncated {
            text += "Lists were cut off where they did not fit into the page.\n";
        }
        text
    }

    fn is_near_limit(&self) -> bool {
        let limit = self.pages.budget.map(|pages| pages.saturating_mul(self.mode.page_size));
        limit.is_some_and(|limit| is_near(limit, headroom(limit, self.bytes.used, self.bytes.tables)))
    }

    /// The options that may change, with the values in force.
    fn shown_settings(&self) -> String {
        let shown = |(key, value): (&String, &String)| format!("{} {}", key, value);
        if self.settings.is_empty() {
            return "unknown".to_string();
        }
        self.settings.iter().map(shown).collect::<Vec<_>>().join(", ")
    }

    /// Returns the numbers by node. The text is empty on a machine with one node.
    fn report_nodes(&self) -> String {
        if self.nodes.len() < 2 {
            return String::new();
        }
        let row = |node: &Node| {
            let counts = [node.managed, node.free, node.backed_free, node.used, node.listed, node.misses];
            [node.node.to_string()].into_iter().chain(counts.iter().map(u64::to_string)).collect()
        };
        let rows: Vec<Vec<String>> = self.nodes.iter().map(row).collect();
        let header = ["node", "pages", "free", "free and resident", "used", "in CPUs' lists", "came from elsewhere"];
        let refused = match self.unbound_segments {
            0 => String::new(),
            refused => format!("The system bound {refused} segments to no node.\n"),
        };
        format!("\n{}{refused}", table(&header, &rows))
    }

    fn report_classes(&self) -> String {
        let mut classes = self.classes.clone();
        classes.sort_by_key(|class| core::cmp::Reverse(class.cached_bytes()));
        let row = |class: &Class| {
            let counts = [class.slabs, class.holes, class.objects, class.in_slabs, class.in_barn, class.in_slots];
            let free = number(class.cached_bytes() as f64 / 1024.0, 1);
            let counts = counts.iter().map(u64::to_string);
            [class.size.to_string()].into_iter().chain(counts).chain([free]).collect()
        };
        let rows: Vec<Vec<String>> = classes.iter().take(SHOWN).map(row).collect();
        if rows.is_empty() {
            return String::new();
        }
        let header =
            ["objects of B", "slabs", "holes", "objects", "free in slabs", "in the barn", "in CPUs", "free KiB"];
        let more = match classes.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!("{more} more classes with less free; --json has all.\n"),
        };
        format!("\n{}{more}", table(&header, &rows))
    }

    fn report_cpus(&self) -> String {
        let row = |cpu: &Cpu| {
            let cached = number(cpu.cached_bytes as f64 / 1024.0, 1);
            let kind = cpu.kind.clone();
            vec![cpu.cpu.to_string(), kind, cached, cpu.stacks.to_string(), cpu.page_list.to_string()]
        };
        let rows: Vec<Vec<String>> = self.cpus.iter().map(row).collect();
        if rows.is_empty() {
            return "\nNo CPU holds anything.\n".to_string();
        }
        format!("\n{}", table(&["CPU", "slots", "objects KiB", "stacks", "pages"], &rows))
    }
}

impl ContainerNumbers {
    /// Lines of text.
    pub(crate) fn shown(&self, colours: Colours) -> String {
        let mib = |bytes: u64| format!("{} MiB", number(bytes as f64 / f64::from(1 << 20), 1));
        let ContainerNumbers { limit, used, heap_limit, looks, passed, read_now, .. } = *self;
        if looks == 0 && !read_now {
            return format!("Container: not looked at yet; the heap may have {}\n", mib(heap_limit));
        }
        if limit == 0 {
            return "Container: no limit is visible to the process, so the heap has none\n".to_string();
        }
        let passed = match passed {
            0 => String::new(),
            passed => format!(", {}", colours.warning(&format!("which it had to pass {passed} times"))),
        };
        let moment = if read_now { "now".to_string() } else { format!("at the last of {looks} looks") };
        // As for the alert `NeapContainerNearLimit`.
        let is_near = used > limit / 20 * 19;
        format!(
            "Container: {} of {} used {moment}; the heap may have {}{passed}\n{}",
            colours.warning_if(is_near, &mib(used)),
            mib(limit),
            mib(heap_limit),
            self.shown_pressure(colours),
        )
    }

    /// A line about the level of pressure. It is empty if the level is not known.
    fn shown_pressure(&self, colours: Colours) -> String {
        let (Some(pressure), Some(limited_by)) = (self.pressure, self.limited_by) else { return String::new() };
        let growth = match self.ms_to_wall {
            Some(ms) => format!("at its growth it is reached in {}", wall_in(ms)),
            None if self.read_now => "its growth was not observed".to_string(),
            None => "no growth".to_string(),
        };
        // As for the alert `NeapContainerFull`.
        let level = colours.warning_if(pressure == Pressure::Imminent, pressure.name());
        format!("Pressure: {level}, by the limit of the {}; {growth}\n", limited_by.name())
    }
}

impl HeapProfiles {
    /// Returns a line of text. It is empty if no file was written or failed.
    fn shown(&self, colours: Colours) -> String {
        match (self.written, self.failed) {
            (0, 0) => String::new(),
            (written, 0) => format!("Heap profiles at a limit: {written} written\n"),
            (written, failed) => {
                let failed = colours.warning(&format!("{failed} could not be"));
                format!("Heap profiles at a limit: {written} written, {failed}\n")
            }
        }
    }
}

fn mib_signed(bytes: i64) -> String {
    number(bytes as f64 / f64::from(1 << 20), 2)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::look::stat_reader::tests::ended;
    use serde::Deserialize;

    /// Reads a page, and shows its numbers.
    pub(crate) fn show_page(bytes: Vec<u8>) -> Result<[String; 2]> {
        let (process, page) = (ended(), crate::look::stat_reader::tests::read_in_turn(&[bytes])?);
        let text = Numbers::read(&process, &page)?.report(&process, Some(0), Colours::NONE);
        Ok([text, serde_json::to_string(&page.object)?])
    }

    #[test]
    fn a_container_is_shown_with_what_it_leaves() {
        let shown = |limit: u64, looks, passed| {
            let mib = |count: u64| count << 20;
            let (limit, used, heap_limit) = (mib(limit), mib(512), mib(300));
            ContainerNumbers { limit, used, heap_limit, looks, passed, ..ContainerNumbers::default() }
                .shown(Colours::NONE)
        };
        assert_eq!(shown(0, 0, 0), "Container: not looked at yet; the heap may have 300.0 MiB\n");
        assert_eq!(shown(0, 1, 0), "Container: no limit is visible to the process, so the heap has none\n");
        let used = "Container: 512.0 MiB of 768.0 MiB used at the last of 7 looks; the heap may have 300.0 MiB";
        assert_eq!(shown(768, 7, 0), format!("{used}\n"));
        assert_eq!(shown(768, 7, 3), format!("{used}, which it had to pass 3 times\n"));
    }

    #[test]
    fn pressure_is_shown_with_its_cause_and_growth() {
        let shown = |numbers: serde_json::Value, colours| {
            let text = ContainerNumbers::deserialize(&numbers).unwrap().shown(colours);
            text.split_once('\n').unwrap().1.to_string()
        };
        let of = |pressure: &str, limited_by: &str, ms: Option<u64>| {
            serde_json::json!({
                "limit": 9, "used": 8, "looks": 1, "pressure": pressure, "limited_by": limited_by, "ms_to_wall": ms,
            })
        };
        assert_eq!(
            shown(of("low", "hidden ancestor", Some(12_345)), Colours::ALL),
            "Pressure: low, by the limit of the hidden ancestor; at its growth it is reached in 12 s\n"
        );
        let imminent = of("imminent", "machine", None);
        let expected = "Pressure: imminent, by the limit of the machine; no growth\n";
        assert_eq!(shown(imminent.clone(), Colours::NONE), expected);
        assert_eq!(shown(imminent, Colours::ALL), expected.replace("imminent", "\u{1b}[1;33mimminent\u{1b}[0m"));
        // A library before or after this command's.
        assert_eq!(shown(serde_json::json!({"limit": 9, "used": 8, "looks": 1}), Colours::NONE), "");
        assert_eq!(shown(of("dreadful", "group", None), Colours::NONE), "");
    }

    #[test]
    fn refusals_failures_and_a_near_limit_are_marked() {
        let warned = |numbers: serde_json::Value| {
            let text = Numbers::deserialize(&numbers).unwrap().report(&ended(), Some(0), Colours::ALL);
            let marked =
                text.split("\u{1b}[1;33m").skip(1).map(|rest| rest.split('\u{1b}').next().unwrap().to_string());
            marked.collect::<Vec<_>>()
        };
        let of = |used: u64, bad: u64| {
            serde_json::json!({
                "mode": {"page_size": 4096}, "pages": {"budget": 2560}, "bytes": {"used": used, "tables": 1 << 20},
                "container": {"limit": 100 << 20, "used": (95 + bad) << 20, "looks": 1, "passed": bad},
                "refused": bad * 138, "released": {"failures": bad * 7}, "heap_profiles": {"written": 1, "failed": bad},
            })
        };
        // A limit of 10 MiB, of which a tenth is left.
        assert!(warned(of(8 << 20, 0)).is_empty());
        assert_eq!(warned(of((8 << 20) + 1, 0)), ["8.00", "2560"]);
        let bad = ["96.0 MiB", "which it had to pass 1 times", "1 could not be", "7", "138"];
        assert_eq!(warned(of(0, 1)), bad);
    }

    /// The labels of a report: the starts of lines, the first cells of the tables of memory and
    /// pages, and the headings of other tables. Numbers are `N`.
    fn labels(report: &str) -> Vec<String> {
        let cells = |line: &str| -> Vec<String> { line.split('|').map(|cell| cell.trim().to_string()).collect() };
        let (mut labels, mut is_list, lines) = (Vec::new(), false, report.lines().collect::<Vec<_>>());
        for (at, line) in lines.iter().enumerate() {
            if line.starts_with("| -") || line.is_empty() {
                continue;
            }
            let is_head = lines.get(at + 1).is_some_and(|next| next.starts_with("| -"));
            match (line.starts_with("| "), is_head) {
                (true, true) => {
                    let head = cells(line);
                    is_list = head[1] == "memory" || head[1].starts_with("pages of ");
                    labels.extend(head.into_iter().filter(|cell| !is_list && !cell.is_empty()));
                }
                (true, false) if is_list => labels.push(cells(line)[1].clone()),
                (true, false) => {}
                (false, _) => {
                    let start = line.split([':', ';', '(', '.']).next().unwrap().trim();
                    let words = start.split(' ').map(|word| if word.parse::<u64>().is_ok() { "N" } else { word });
                    labels.push(words.collect::<Vec<_>>().join(" "));
                }
            }
        }
        labels
    }

    #[test]
    fn guide_explains_every_label_of_a_report() {
        let guide = format!("{}/../../docs/guide/stat.md", env!("CARGO_MANIFEST_DIR"));
        let guide = std::fs::read_to_string(guide).unwrap();
        let (_, section) = guide.split_once("\n## `neap stat PID`\n").unwrap();
        let section = section.split("\n## ").next().unwrap();
        let all = serde_json::json!({
            "per_cpu": {}, "pages": {"budget": 500}, "settings": {"limit": "1g"}, "guard": {"live": 1},
            "container": {"limit": 9, "used": 8, "looks": 1, "pressure": "low", "limited_by": "group"},
            "heap_profiles": {"written": 1}, "nodes": [{"node": 0}, {"node": 1}], "unbound_segments": 4,
            "classes": (1..=12).map(|n| serde_json::json!({"size": 16 * n})).collect::<Vec<_>>(),
            "cpus": [{"cpu": 1}], "truncated": true,
        });
        let none = serde_json::json!({});
        let mut found = Vec::new();
        for (numbers, age) in [(&all, Some(1)), (&none, Some(1)), (&none, None)] {
            found.extend(labels(&Numbers::deserialize(numbers).unwrap().report(&ended(), age, Colours::NONE)));
        }
        assert!(found.len() > 70 && found.iter().any(|label| label == "Heap profiles at a limit"), "{found:?}");
        let unknown: Vec<&String> = found.iter().filter(|label| !section.contains(&format!("`{label}`"))).collect();
        assert!(unknown.is_empty(), "not in the guide: {unknown:?}");
    }

    #[test]
    fn a_report_has_every_part_and_no_control_characters() {
        let object = serde_json::json!({
            "version": "9.9", "mode": {"slots": "rseq", "why": "it works\u{1b}[2J", "isolated_cpus": [3, 4]},
            "bytes": {"used": 3 << 20, "unaccounted": -(1 << 20)},
            "per_cpu": {"used": 5 << 20, "free": 6 << 20}, "pages": {"budget": 500, "watermarks": {"low": 21}},
            "holes": {"pages": 61, "released": 62, "refilled": 63},
            "lists": {"highs": 808, "need_drains": 41, "need_pages": 4242},
            "nodes": [{"node": 0, "used": 70}, {"node": 1, "misses": 17}], "unbound_segments": 4,
            "classes": (1..=12).map(|n| serde_json::json!({"size": 16 * n, "in_barn": n})).collect::<Vec<_>>(),
            "cpus": [{"cpu": 1, "kind": "rseq", "cached_bytes": 2048}], "truncated": true, "settled": true, "of a later version": 1,
            "refused": 138, "shrunk": 21,
        });
        let object = crate::look::foreign::escaped_value(object);
        let text = Numbers::deserialize(&object).unwrap().report(&ended(), Some(345), Colours::NONE);
        for part in [
            "Process 12 (ended): neap 9.9, memory counters read now, other numbers 345 ms old",
            "it works\\u{1b}[2J",
            "isolated CPUs: 3, 4",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        for row in [
            ["in use", "3.00"],
            ["unaccounted, exact when idle", "-1.00"],
            ["per-CPU data, pages in use", "5.00"],
            ["per-CPU data, empty pages", "6.00"],
            ["budget", "500"],
            ["most that lists may keep", "808"],
            ["taken from lists for allocations", "4242"],
            ["times that allocations needed that", "41"],
            ["holes in slabs", "61"],
            ["allocations refused so far", "138"],
            ["objects that shrinkers freed so far", "21"],
            ["released in holes so far", "62"],
            ["holes refilled so far", "63"],
            ["192", "2.2"],
            ["1", "2.0"],
            ["0", "70"],
            ["1", "17"],
        ] {
            let found = text.lines().any(|line| line.starts_with(&format!("| {} ", row[0])) && line.contains(row[1]));
            assert!(found, "{row:?} is not in\n{text}");
        }
        assert!(text.contains("bound 4 segments to no node"), "{text}");
        assert!(text.contains("2 more classes") && text.contains("cut off"), "{text}");
        assert!(!text.chars().any(|each| each.is_control() && each != '\n'));
    }
}
