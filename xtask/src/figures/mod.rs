//! `cargo xtask figures`: the results of README and of the book, from `neap bench`.
//!
//! # Design
//!
//! 1. Without files, the command builds the tools, runs the benchmarks of `MEASURED` and keeps each
//!    object in `target/figures`. With files, it reads those instead.
//! 2. It draws `docs/figures/*.svg`.
//! 3. It writes the table of README between the markers, and `docs/performance-results.md`.
//!
//! The best value of a row is bold, whichever allocator has it. The last column shows losses.

mod plot;
mod results;

use core::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::process::{capture, command};
use crate::{build, layout};
use plot::{Bars, Line};
use results::{Bench, Reading};

const USAGE: &str = "usage: cargo xtask figures [--pairs N] [FILE...]";

/// Benchmarks with their arguments.
const MEASURED: &[(&str, &[&str])] =
    &[("pair", &[]), ("cross", &[]), ("page", &[]), ("steady", &[]), ("idle", &["--sizes", "64,32768"])];

/// Allocators with default settings, neap first.
const ALLOCATORS: &[&str] = &["neap", "glibc", "jemalloc", "mimalloc2", "mimalloc3", "snmalloc", "tcmalloc"];

/// Variants with settings that return memory, and the allocator of each.
const TUNED: &[(&str, &str)] = &[
    ("jemalloc-tuned", "jemalloc"),
    ("mimalloc2-tuned", "mimalloc2"),
    ("mimalloc3-tuned", "mimalloc3"),
    ("tcmalloc-tuned", "tcmalloc"),
];

/// Seconds after the burst at which `neap bench idle` reads resident memory.
const SAMPLES: [f64; 4] = [0.0, 0.5, 1.0, 2.0];

const BEGIN: &str = "<!-- figures: begin -->";
const END: &str = "<!-- figures: end -->";

/// A row of the table. A lower value is better in each.
struct Row {
    text: &'static str,
    /// The name below the bars; empty for rows without bars.
    short: &'static str,
    bench: &'static str,
    workload: &'static str,
    reading: Reading,
}

const ROWS: &[Row] = &[
    Row { text: "64 B, one at a time, ns", short: "64 B", bench: "pair", workload: "pair", reading: Reading::NsEach },
    Row {
        text: "64 B, 1000 at a time, ns",
        short: "64 B x 1000",
        bench: "pair",
        workload: "batch",
        reading: Reading::NsEach,
    },
    Row { text: "larson, ns", short: "larson", bench: "cross", workload: "larson", reading: Reading::NsEach },
    Row { text: "xmalloc, ns", short: "xmalloc", bench: "cross", workload: "xmalloc", reading: Reading::NsEach },
    Row { text: "4 KiB, ns", short: "4 KiB", bench: "page", workload: "page", reading: Reading::NsEach },
    Row { text: "server, ns", short: "server", bench: "steady", workload: "steady", reading: Reading::NsEach },
    Row { text: "server, peak MiB", short: "", bench: "steady", workload: "steady", reading: Reading::Peak },
    Row { text: "burst of 64 B, s", short: "burst of 64 B", bench: "idle", workload: "64", reading: Reading::Seconds },
    Row { text: "2 s after it, MiB", short: "", bench: "idle", workload: "64", reading: Reading::Resident(3) },
    Row { text: "2 s after 32 KiB, MiB", short: "", bench: "idle", workload: "32768", reading: Reading::Resident(3) },
];

const LEGEND: &str = "\
Lower is better; bold is best. `÷ best`: neap over the best other, paired; above 1, neap loses.";

/// All benchmarks, and the day of the newest.
struct Figures {
    benches: Vec<Bench>,
    date: String,
}

/// Three significant digits.
fn number(value: f64) -> String {
    match value {
        _ if value >= 100.0 => format!("{value:.0}"),
        _ if value >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

impl Figures {
    fn bench(&self, name: &str) -> Result<&Bench> {
        let found = self.benches.iter().find(|bench| bench.name == name);
        found.with_context(|| format!("figures: no results of `neap bench {name}`; add its --json file"))
    }

    /// Medians of a row for each of some variants.
    fn values<'a>(&self, row: &Row, variants: impl Iterator<Item = &'a str>) -> Result<Vec<Option<f64>>> {
        let bench = self.bench(row.bench)?;
        Ok(variants.map(|variant| bench.median(variant, row.workload, row.reading)).collect())
    }

    /// The rows as a Markdown table, without rows that only neap ran. The best value is bold.
    /// The last column compares with the best of the others.
    fn table(&self, variants: &[&str]) -> Result<String> {
        let columns = variants.len() + 1;
        let mut text = format!("| | {} | ÷ best |\n|---|{}\n", variants.join(" | "), "---:|".repeat(columns));
        for row in ROWS {
            let values = self.values(row, variants.iter().copied())?;
            let Some(loss) = self.against_best(row, &variants[1..])? else {
                continue;
            };
            let best = values.iter().flatten().copied().fold(f64::INFINITY, f64::min);
            let cell = |value: &Option<f64>| match value {
                None => "—".to_string(),
                Some(value) if *value <= best => format!("**{}**", number(*value)),
                Some(value) => number(*value),
            };
            let cells: Vec<_> = values.iter().map(cell).collect();
            let _ = writeln!(text, "| {} | {} | {loss:.2} |", row.text, cells.join(" | "));
        }
        Ok(text)
    }

    /// neap's value over the best of some others, in paired rounds; `None` if none of them ran.
    fn against_best(&self, row: &Row, others: &[&str]) -> Result<Option<f64>> {
        let bench = self.bench(row.bench)?;
        let ratios = others.iter().filter_map(|other| bench.ratio("neap", other, row.workload, row.reading));
        Ok(ratios.max_by(f64::total_cmp))
    }

    /// The number of rounds, or its range over the benchmarks.
    fn rounds(&self) -> Result<String> {
        let mut rounds = Vec::new();
        for (name, _) in MEASURED {
            let row = ROWS.iter().find(|row| row.bench == *name).context("a benchmark without a row")?;
            let found = self.bench(name)?.rounds("neap", row.workload, row.reading).len();
            ensure!(found > 0, "figures: `neap bench {name}` has no results of neap; repeat it");
            rounds.push(found);
        }
        let (least, most) = (rounds.iter().min().unwrap_or(&0), rounds.iter().max().unwrap_or(&0));
        Ok(if least == most { format!("{least}") } else { format!("{least} to {most}") })
    }

    /// True if other programs ran on the machine when a benchmark began.
    fn was_shared(&self) -> bool {
        self.benches.iter().any(|bench| bench.machine("load").parse::<f64>().is_ok_and(|load| load >= 1.0))
    }

    /// Machine, date and the quality of the figures.
    fn caption(&self) -> Result<String> {
        let bench = self.bench(MEASURED[0].0)?;
        let shared = if self.was_shared() { ", shared with other programs" } else { "" };
        Ok(format!(
            "{} x {}{shared}; {}; medians of {} rounds.",
            bench.machine("cpus"),
            bench.machine("model").replace("(R)", ""),
            self.date,
            self.rounds()?
        ))
    }

    /// README's part between the markers.
    fn section(&self) -> Result<String> {
        let table = self.table(ALLOCATORS)?;
        Ok(format!("{table}\n{LEGEND}\n{}\n", self.caption()?))
    }

    /// The page of the book.
    fn page(&self) -> Result<String> {
        let bench = self.bench(MEASURED[0].0)?;
        let tuned: Vec<&str> = ["neap"].into_iter().chain(TUNED.iter().map(|(name, _)| *name)).collect();
        let versions: Vec<_> =
            bench.versions().into_iter().map(|(name, version)| format!("{name} {version}")).collect();
        let mut text = format!(
            "# Results\n\n`cargo xtask figures` writes this page and its plots.\n\
             [Benchmarks](guide/benchmarks.md) describes the method.\n\n\
             ![Time relative to neap by workload](figures/speed.svg)\n\n\
             ![Resident memory after a burst](figures/memory.svg)\n\n\
             ## Default settings\n\n{LEGEND}\n\n{}\n## Settings that return memory\n\n\
             Only `idle` runs these variants.\n\n{}\n## Machine\n\n{}\n\n",
            self.table(ALLOCATORS)?,
            self.table(&tuned)?,
            self.caption()?
        );
        text += "| quantity | value |\n|---|---|\n";
        for field in ["kernel", "glibc", "memory", "thp"] {
            let unit = if field == "memory" { " MiB" } else { "" };
            let _ = writeln!(text, "| {field} | {}{unit} |", bench.machine(field));
        }
        let _ = writeln!(text, "| versions | {} |", versions.join(", "));
        let loads: Vec<_> =
            self.benches.iter().map(|bench| format!("{} {}", bench.name, bench.machine("load"))).collect();
        let _ = writeln!(text, "| run queue when the benchmark began | {} |", loads.join(", "));
        Ok(text)
    }

    fn draw(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder)?;
        let rows: Vec<&Row> = ROWS.iter().filter(|row| !row.short.is_empty()).collect();
        let mut series = Vec::new();
        for peer in &ALLOCATORS[1..] {
            let ratio = |row: &&Row| Ok(self.bench(row.bench)?.ratio(peer, "neap", row.workload, row.reading));
            series.push(Bars { name: (*peer).into(), values: rows.iter().map(ratio).collect::<Result<_>>()? });
        }
        let groups: Vec<&str> = rows.iter().map(|row| row.short).collect();
        let title = "Time by workload, relative to neap (below 1: faster than neap)";
        plot::bars(&folder.join("speed.svg"), title, "time / neap's time (log scale)", &groups, &series)?;

        let idle = self.bench("idle")?;
        let tuned = TUNED.iter().map(|(name, of)| (*name, ALLOCATORS.iter().position(|allocator| allocator == of)));
        let variants = ALLOCATORS.iter().map(|name| (*name, None)).chain(tuned);
        let line = |(name, dashed): (&str, Option<usize>)| {
            let at = |(sample, seconds): (usize, &f64)| {
                Some((*seconds, idle.median(name, "64", Reading::Resident(sample))?))
            };
            Line { name: name.into(), points: SAMPLES.iter().enumerate().filter_map(at).collect(), dashed }
        };
        let series: Vec<_> = variants.map(line).filter(|line| !line.points.is_empty()).collect();
        let title = "Resident memory after a burst of 16 threads (64 B blocks, all freed)";
        plot::lines(&folder.join("memory.svg"), title, "time after the last free (s)", "resident memory (MiB)", &series)
    }
}

/// The text with the part between the markers replaced.
fn replaced(text: &str, section: &str) -> Result<String> {
    let missing =
        || format!("README.md: the lines `{BEGIN}` and `{END}` are missing; add them where the table belongs");
    let (before, rest) = text.split_once(BEGIN).with_context(missing)?;
    let (_, after) = rest.split_once(END).with_context(missing)?;
    Ok(format!("{before}{BEGIN}\n{section}{END}{after}"))
}

/// Runs the benchmarks; the files with their objects.
fn measure(pairs: Option<&str>) -> Result<Vec<PathBuf>> {
    build::build()?;
    let folder = layout::target().join("figures");
    fs::create_dir_all(&folder)?;
    let mut files = Vec::new();
    for (name, arguments) in MEASURED {
        println!("neap bench {name}");
        let mut bench = command(&layout::tool().to_string_lossy(), ["bench", name, "--json"]);
        bench.args(*arguments).args(pairs.into_iter().flat_map(|pairs| ["--pairs", pairs]));
        let file = folder.join(format!("{name}.json"));
        fs::write(&file, capture(bench)?).with_context(|| format!("cannot write {}", file.display()))?;
        files.push(file);
    }
    Ok(files)
}

/// The day of the newest file.
fn day(files: &[PathBuf]) -> Result<String> {
    let mut newest = None;
    for file in files {
        let modified = fs::metadata(file)?.modified()?;
        newest = newest.max(Some((modified, file)));
    }
    let (_, file) = newest.context("no files")?;
    let day = capture(command("date", ["-u".as_ref(), "-r".as_ref(), file.as_os_str(), "+%F".as_ref()]))?;
    Ok(day.trim().to_string())
}

/// Measures or reads, then writes plots, table and page.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    let (pairs, files) = match arguments {
        [option, number, rest @ ..] if option == "--pairs" => {
            ensure!(
                number.parse::<u16>().is_ok_and(|pairs| pairs > 0),
                "--pairs {number}: not a number above 0\n{USAGE}"
            );
            (Some(number.as_str()), rest)
        }
        rest => (None, rest),
    };
    if let Some(option) = files.iter().find(|file| file.starts_with('-')) {
        bail!("`{option}` is no option of `figures`\n{USAGE}");
    }
    let files = match files {
        [] => measure(pairs)?,
        _ => files.iter().map(PathBuf::from).collect(),
    };
    let benches = files.iter().map(|file| Bench::read(file)).collect::<Result<Vec<_>>>()?;
    let figures = Figures { benches, date: day(&files)? };
    let root = layout::root();
    figures.draw(&root.join("docs/figures"))?;
    fs::write(root.join("docs/performance-results.md"), figures.page()?)?;
    let readme = root.join("README.md");
    fs::write(&readme, replaced(&fs::read_to_string(&readme)?, &figures.section()?)?)?;
    println!("figures: wrote README.md, docs/performance-results.md and docs/figures/*.svg");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Results in which an allocator takes a nanosecond for each letter of its name. mimalloc3
    /// failed.
    fn figures() -> Figures {
        let run = |name: &str| {
            let letters = name.len();
            format!(
                r#"{{"raw": [{{"round": 0, "wall_ns": {letters}, "operations": 1,
                "rss_kib": [4096, 3072, 2048, {}], "counts": {{"peak_kib": 1024}}}}]}}"#,
                letters * 1024
            )
        };
        let bench = |name: &str| {
            let workloads = ROWS.iter().filter(|row| row.bench == name).map(|row| row.workload);
            let workloads: Vec<_> = workloads.collect();
            let variants = ALLOCATORS.iter().filter(|allocator| **allocator != "mimalloc3").map(|allocator| {
                let runs: Vec<_> = workloads.iter().map(|work| format!(r#""{work}": {}"#, run(allocator))).collect();
                format!(r#""{allocator}": {{{}}}"#, runs.join(","))
            });
            let variants = variants.collect::<Vec<_>>().join(",");
            let text = format!(
                r#"{{"bench": "{name}", "machine": {{"cpus": 2, "model": "M(R) C", "load": "3.5"}},
                "variants": {{{variants}}}}}"#
            );
            Bench::parsed(&text).unwrap()
        };
        Figures { benches: MEASURED.iter().map(|(name, _)| bench(name)).collect(), date: "2026-01-02".into() }
    }

    #[test]
    fn table_marks_the_best_and_shows_losses() {
        let mut figures = figures();
        let table = figures.table(&["neap", "glibc", "mimalloc3"]).unwrap();
        assert!(table.contains("| 64 B, one at a time, ns | **4.00** | 5.00 | — | 0.80 |"), "{table}");
        figures.benches[0] = Bench::parsed(
            r#"{"bench": "pair", "variants": {
            "neap": {"pair": {"raw": [{"round": 0, "wall_ns": 10, "operations": 1}]},
                "batch": {"raw": [{"round": 0, "wall_ns": 10, "operations": 1}]}},
            "glibc": {"pair": {"raw": [{"round": 0, "wall_ns": 5, "operations": 1}]}}}}"#,
        )
        .unwrap();
        let table = figures.table(&["neap", "glibc", "mimalloc3"]).unwrap();
        assert!(table.contains("| 64 B, one at a time, ns | 10.0 | **5.00** | — | 2.00 |"), "{table}");
        assert!(!table.contains("1000 at a time"), "{table}");
    }

    #[test]
    fn caption_names_machine_date_and_load() {
        let expected = "2 x M C, shared with other programs; 2026-01-02; medians of 1 rounds.";
        assert_eq!(figures().caption().unwrap(), expected);
    }

    #[test]
    fn missing_benchmark_is_named() {
        let mut figures = figures();
        figures.benches.retain(|bench| bench.name != "steady");
        let error = figures.section().unwrap_err().to_string();
        assert!(error.contains("`neap bench steady`"), "{error}");
    }

    #[test]
    fn only_the_marked_part_is_replaced() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        assert_eq!(replaced(&text, "new\n").unwrap(), format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert!(replaced("a", "new").is_err());
    }
}
