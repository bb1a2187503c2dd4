//! `neap bench`: runs a workload under each allocator, round by round.
//!
//! The file of each benchmark states its workload and its figures. Each run under an allocator is a
//! separate process. In a round every variant runs once. The order of the variants changes from
//! round to round, so a temporary disturbance of the machine affects all of them. Runs follow one
//! another, except that the loaded processes of `idle-hour` are idle at the same time.

mod accounting;
mod burst;
mod cgroup;
mod charge;
mod churn;
mod contained;
mod counter;
mod cross;
mod drain;
mod holes;
mod idle;
mod idle_hour;
mod metadata;
mod page;
mod page_fault;
mod pair;
mod percpu;
mod pft;
mod phases;
mod profile;
mod programs;
mod publish;
mod register;
mod shrink;
mod start;
mod steady;
mod wall;
mod warm;
mod workers;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use crate::library;
use crate::look::subject::SCHEMA;
use crate::machine::Machine;
use crate::report::{JsonReport, Ratio, Results, cell, rounded};
use crate::statistics::{Measured, Summary, paired_ratios, summary};
use crate::variant::{self, AllocatorKind, Choice, Failure, Found, Missing, Variant};
use crate::work::{self, Outcome};

/// Exit status of a benchmark that lacks the rights it needs.
const NOT_MEASURED: u8 = 77;

const EXAMPLES: &str = "\
Examples:
  neap bench pair                            malloc + free, one block at a time and 1000 at a time
  neap bench idle --sizes 64                 memory kept after a burst of 64-byte blocks
  neap bench idle-hour                       memory kept for ten idle minutes after ten seconds of load
  neap bench idle-hour --load 3 --idle 60    the same for a minute
  neap bench holes                           memory kept where one block in twenty survives a burst
  neap bench page --pairs 40                 40 rounds instead of the default
  neap bench cross --against mimalloc2,glibc compare with these only
  neap bench start --quick                   a rough answer in seconds
  neap bench phases                          peak memory where one block size follows another
  neap bench phases --limit --live 100       the smallest container in which such a program survives
  neap bench steady --against jemalloc       a server's steady state
  neap bench profile                         what samples of allocations cost, and how right they are
  neap bench programs --json                 one JSON object on standard output
  neap bench drain                           neap's parts alone: what a drain does to the owner of a list
  neap bench percpu --cpus 32 --page 65536   per-CPU data on a machine that is not there
  neap bench charge                          memory groups: what a charge costs
  neap bench shrink                          shrinkers: what a visit of theirs costs, and a pass
  neap bench burst --limit=1024              growth beside a cache, towards a limit of 1024 MiB
  neap bench wall                            a server whose container's limit is cut to a quarter
  neap bench wall --full                     from 4 GiB to 1 GiB, 100 times
  neap bench workers                         four servers in one container whose limit is halved
  neap bench boxed                           real programs in a container of 512 MiB
  neap bench metadata                        a cache of file metadata of /usr at a memory limit
  neap bench metadata --directory ~/src      the same of another directory

Peers are looked for in ../peers beside the folder of this executable (`cargo xtask peers` makes
them). One that is missing is named and its figures are left out. Progress goes to standard error.
Ratios are medians of the ratios of paired rounds: neap's result over the peer's, so below 1 neap
is better. Allocators: glibc, jemalloc, mimalloc2, mimalloc3, snmalloc, tcmalloc in their defaults;
jemalloc-tuned, mimalloc2-tuned, mimalloc3-tuned, tcmalloc-tuned with settings that return memory;
tcmalloc-percpu with glibc's restartable sequences switched off, so that tcmalloc registers its own.
`page-fault`, `pft`, `drain`, `percpu`, `counter`, `charge`, `churn`, `shrink`, `register`, `metadata`, `burst`, `wall` and `workers` use neap's parts
inside this executable, and no peers. Before each run of `idle`, `page`, `page-fault`, `holes`, `phases`, `steady` and `programs` neap touches as
much memory as the run needs, and releases it. So no run pays for pages that the host of a virtual machine took before.
`phases --limit`, `burst`, `wall`, `workers` and `boxed` end with status 77, and say why, where they may not make memory groups.";

/// Measure neap against other allocators.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// What to measure
    #[arg(value_enum)]
    which: Which,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Rounds, each one run of every allocator
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pairs: Option<u16>,
    /// Fewer rounds and less work in each: a rough answer
    #[arg(long)]
    quick: bool,
    /// Only these other allocators
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    against: Vec<String>,
    /// Block sizes for `idle`
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_values_t = idle::SIZES)]
    sizes: Vec<usize>,
    /// Only these programs of `programs`, `boxed` and `profile`
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    programs: Vec<String>,
    /// Live set of `phases` in MiB (default 300, with --quick 100)
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u16).range(1..))]
    live: Option<u16>,
    /// Of `phases`: find the smallest memory limit in which the program survives, instead of peaks.
    /// Of `burst`, `wall`, `workers`, `boxed`: the limit in MiB (default 512, 1024, 1024, 512)
    #[arg(long, value_name = "MIB", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    limit: Option<u32>,
    /// Seconds of load of `idle-hour` (default 10, with --quick 2)
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..))]
    load: Option<u16>,
    /// Seconds of `idle-hour` after the load (default 600, with --quick 10)
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..))]
    idle: Option<u16>,
    /// Of `wall`: a limit of 4 GiB and 100 runs
    #[arg(long)]
    full: bool,
    /// CPUs of the machine that `percpu` simulates
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    cpus: Option<u16>,
    /// Bytes of a page for `percpu`: 4096, 16384 or 65536
    #[arg(long, value_name = "BYTES")]
    page: Option<usize>,
    /// Only this layout of `percpu`
    #[arg(long, value_enum)]
    layout: Option<percpu::Chosen>,
    /// An older libneap_malloc.so that `accounting` compares with
    #[arg(long, value_name = "FILE")]
    old: Option<PathBuf>,
    /// Directory whose files `metadata` caches (default /usr)
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Memory kept two seconds after a burst by 16 threads, and the time the burst took
    Idle,
    /// Memory kept in ten idle minutes after ten seconds of load, beside the live bytes, and the
    /// processor time meanwhile
    IdleHour,
    /// Cost of malloc and free of 64 bytes, singly and 1000 at a time
    Pair,
    /// Cost of 4 KiB blocks, 128 MiB up and down
    Page,
    /// Cost of blocks freed on another thread than the one that allocated them
    Cross,
    /// Memory kept ten seconds after a burst of which one block in twenty survives, and the time
    /// the burst took
    Holes,
    /// Peak memory where live sets of one block size after another are allocated and freed
    Phases,
    /// Operations a second and peak memory of a server's steady state: blocks of drifting sizes,
    /// replaced at random
    Steady,
    /// Time to start and end a program that does nothing
    Start,
    /// Page lists that tune themselves against lists of a fixed size: 128 MiB up and down on every
    /// CPU
    PageFault,
    /// First touch of every page, with the lock of the page lists and without
    Pft,
    /// An owner whose lists are drained a thousand times a second, against quiet
    Drain,
    /// Per-CPU data: memory released when objects are freed, in rows and in the kernel's layout
    Percpu,
    /// Per-CPU counters against one atomic, one atomic for each CPU, and a word of each thread
    Counter,
    /// Charging and uncharging a page of a memory group: against atomics, by depth of the tree, by
    /// number of threads, and on simulated CPUs
    Charge,
    /// Memory groups created and deleted by the thousand while others are charged: times, and
    /// memory left behind
    Churn,
    /// Visits of the shrinkers of 4000 groups: against a read-write lock, by threads, and passes by
    /// how many have anything
    Shrink,
    /// Registering and removing shrinkers while others are called: against a registry that waits
    /// for every walk
    Register,
    /// A cache of file metadata at a memory limit: with one LRU list, one per node, one per memory
    /// group, and without shrinking; each with and without a tenant that floods the cache
    Metadata,
    /// malloc and free of a thread in a memory group, of one in none, and of an older library
    Accounting,
    /// Growth at 0.25 to 4 GB/s towards the limit of a container, beside a cache that shrinks
    Burst,
    /// A server with a cache that shrinks while the limit of its container is cut to a quarter
    Wall,
    /// Four servers with caches of different sizes in one container whose limit is halved
    Workers,
    /// Real programs in a container whose limit memory of changing sizes almost fills
    Boxed,
    /// Samples of allocations: what they cost, and how much of the memory they attribute
    Profile,
    /// What a process pays for its numbers at 10,000 allocations a second, read and unread
    Publish,
    /// Real programs: same output, peak memory, memory kept, time
    Programs,
}

pub(crate) fn main(options: &Options) -> Result<ExitCode> {
    match options.which {
        Which::Idle => idle::main(options),
        Which::IdleHour => idle_hour::main(options),
        Which::Pair => pair::main(options),
        Which::Page => page::main(options),
        Which::Cross => cross::main(options),
        Which::Holes => holes::main(options),
        Which::Phases => phases::main(options),
        Which::Steady => steady::main(options),
        Which::Start => start::main(options),
        Which::PageFault => page_fault::main(options),
        Which::Pft => pft::main(options),
        Which::Drain => drain::main(options),
        Which::Percpu => percpu::main(options),
        Which::Counter => counter::main(options),
        Which::Accounting => accounting::main(options),
        Which::Charge => charge::main(options),
        Which::Churn => churn::main(options),
        Which::Shrink => shrink::main(options),
        Which::Register => register::main(options),
        Which::Metadata => metadata::main(options),
        Which::Burst => burst::main(options),
        Which::Wall => wall::main(options),
        Which::Workers => workers::main(options),
        Which::Boxed => programs::boxed::main(options),
        Which::Profile => profile::main(options),
        Which::Publish => publish::main(options),
        Which::Programs => programs::main(options),
    }
}

/// One number of an outcome.
pub(crate) type Reading = fn(&Outcome) -> f64;

/// A workload, measured under every variant.
pub(crate) struct Workload {
    pub(crate) name: String,
    /// Arguments of `neap work`.
    pub(crate) arguments: Vec<String>,
    pub(crate) rounds: usize,
    /// Bytes of memory that must be available before each run. For a workload that uses much
    /// memory, it is the most that any variant uses.
    pub(crate) memory: usize,
    pub(crate) unit: &'static str,
    /// The reading that ratios are made of.
    pub(crate) metric: Reading,
}

impl Workload {
    /// A workload of `neap work`, measured in nanoseconds of wall time per operation.
    pub(crate) fn timed(name: &str, rounds: usize, arguments: &[&str]) -> Workload {
        Workload {
            name: name.to_string(),
            arguments: arguments.iter().map(ToString::to_string).collect(),
            rounds,
            memory: 0,
            unit: "ns",
            metric: Outcome::ns_each,
        }
    }
}

/// A benchmark under way: the variants, and all results so far.
pub(crate) struct Session {
    pub(crate) executable: PathBuf,
    pub(crate) found: Found,
    machine: Machine,
    bench: &'static str,
    /// The command, for messages.
    label: String,
    series: Vec<Series>,
    pub(crate) failed: Vec<Failure>,
    pub(crate) figures: BTreeMap<String, f64>,
    pub(crate) ratios: Vec<Ratio>,
}

/// The results of one variant in one workload.
struct Series {
    variant: &'static str,
    workload: String,
    unit: &'static str,
    metric: Reading,
    raw: Vec<Outcome>,
}

impl Session {
    /// Finds and tries the variants, and names missing ones on standard error.
    pub(crate) fn new(bench: &'static str, choice: Choice, against: &[String]) -> Result<Session> {
        let executable = library::executable()?;
        let machine = Machine::look();
        let found = variant::find(&executable, choice, against)?;
        let label = if bench == "demo" { "neap demo".to_string() } else { format!("neap bench {bench}") };
        for Missing { name, reason } in &found.missing {
            eprintln!("{label}: without {name}: {reason}");
        }
        for Failure { variant, reason, .. } in &found.failed {
            eprintln!("{label}: {variant} does not work: {reason}");
        }
        let failed = found.failed.clone();
        let mut session = Session {
            executable,
            found,
            machine,
            bench,
            label,
            series: Vec::new(),
            failed,
            figures: BTreeMap::new(),
            ratios: Vec::new(),
        };
        session.found.versions.insert("glibc".to_string(), session.machine.glibc.clone());
        Ok(session)
    }

    /// Makes a session over the preload library beside this executable. Each variant has a name and
    /// a value of the variable `NEAP`. There are no peers.
    pub(crate) fn of_settings(bench: &'static str, variants: &[(&'static str, &'static str)]) -> Result<Session> {
        let names: Vec<_> = variants.iter().map(|(name, _)| *name).collect();
        let mut session = Session::of_parts(bench, &names)?;
        let library = library::find(&session.executable)?;
        let library = library.canonicalize().with_context(|| format!("cannot resolve {}", library.display()))?;
        library::check_preloadable(&library)?;
        for (variant, (_, value)) in session.found.variants.iter_mut().zip(variants) {
            variant.library = Some(library.clone());
            variant.environment = vec![("NEAP", value)];
        }
        Ok(session)
    }

    /// Makes a session over parts of neap in this executable. It preloads nothing, and has no
    /// peers.
    pub(crate) fn of_parts(bench: &'static str, names: &[&'static str]) -> Result<Session> {
        let variant = |&name: &&'static str| Variant {
            name,
            kind: AllocatorKind::Neap,
            library: None,
            environment: Vec::new(),
            release_thread: false,
        };
        let machine = Machine::look();
        let version = |name: &str, version: &str| (name.to_string(), version.to_string());
        let versions = [version("neap", env!("CARGO_PKG_VERSION")), version("glibc", &machine.glibc)];
        Ok(Session {
            executable: library::executable()?,
            found: Found {
                variants: names.iter().map(variant).collect(),
                missing: Vec::new(),
                failed: Vec::new(),
                versions: versions.into(),
            },
            machine,
            bench,
            label: format!("neap bench {bench}"),
            series: Vec::new(),
            failed: Vec::new(),
            figures: BTreeMap::new(),
            ratios: Vec::new(),
        })
    }

    /// Runs workloads of `neap work`, interleaved.
    pub(crate) fn measure_workloads(&mut self, workloads: &[Workload]) {
        let executable = self.executable.clone();
        self.measure(workloads, |variant, workload, _| {
            let arguments: Vec<&str> = workload.arguments.iter().map(String::as_str).collect();
            Some(work::measure(&executable, variant, &arguments))
        });
    }

    /// Runs `run` for each round, workload and variant, in an order that changes with the round.
    /// `run` may leave a variant out of a round. A failure ends the variant's part in that
    /// workload.
    pub(crate) fn measure(
        &mut self,
        workloads: &[Workload],
        mut run: impl FnMut(&Variant, &Workload, usize) -> Option<Result<Outcome>>,
    ) {
        let variants = self.found.variants.clone();
        let rounds = workloads.iter().map(|workload| workload.rounds).max().unwrap_or(0);
        for round in 0..rounds {
            if rounds > 1 {
                eprintln!("{}: round {} of {rounds}", self.label, round + 1);
            }
            for workload in workloads.iter().filter(|workload| round < workload.rounds) {
                for variant in order(&variants, round) {
                    if self.has_failed(variant.name, &workload.name) {
                        continue;
                    }
                    warm::touch(workload.memory);
                    match run(variant, workload, round) {
                        None => {}
                        Some(Ok(outcome)) => self.add(variant, workload, Outcome { round, ..outcome }),
                        Some(Err(error)) => self.fail(variant, &workload.name, round, format!("{error:#}")),
                    }
                }
            }
        }
    }

    fn add(&mut self, variant: &Variant, workload: &Workload, outcome: Outcome) {
        let known = |series: &&mut Series| series.variant == variant.name && series.workload == workload.name;
        match self.series.iter_mut().find(known) {
            Some(series) => series.raw.push(outcome),
            None => self.series.push(Series {
                variant: variant.name,
                workload: workload.name.clone(),
                unit: workload.unit,
                metric: workload.metric,
                raw: vec![outcome],
            }),
        }
    }

    fn fail(&mut self, variant: &Variant, workload: &str, round: usize, reason: String) {
        eprintln!("{}: {}: {workload}: {reason}", self.label, variant.name);
        self.series.retain(|series| series.variant != variant.name || series.workload != workload);
        self.failed.push(Failure { variant: variant.name, workload: workload.to_string(), round, reason });
    }

    fn has_failed(&self, variant: &str, workload: &str) -> bool {
        self.failed.iter().any(|failure| failure.variant == variant && failure.workload == workload)
    }

    /// Returns all results of a variant in a workload. The slice is empty if the variant was not
    /// measured.
    pub(crate) fn outcomes(&self, variant: &str, workload: &str) -> &[Outcome] {
        let found = self.series.iter().find(|series| series.variant == variant && series.workload == workload);
        found.map_or(&[], |series| &series.raw)
    }

    /// Returns a reading of a workload, round by round: `reading`, or the workload's own one if
    /// that is `None`.
    fn measured(&self, variant: &str, workload: &str, reading: Option<Reading>) -> Vec<Measured> {
        let found = self.series.iter().find(|series| series.variant == variant && series.workload == workload);
        let values = |series: &Series| {
            let reading = reading.unwrap_or(series.metric);
            series.raw.iter().map(|raw| (raw.round, reading(raw))).collect()
        };
        found.map_or(Vec::new(), values)
    }

    /// Median and spread of the workload's reading.
    pub(crate) fn summary(&self, variant: &str, workload: &str) -> Option<Summary> {
        summary(self.measured(variant, workload, None).into_iter().map(|(_, value)| value))
    }

    /// Median and spread of another reading.
    pub(crate) fn summary_of(&self, variant: &str, workload: &str, reading: Reading) -> Option<Summary> {
        summary(self.measured(variant, workload, Some(reading)).into_iter().map(|(_, value)| value))
    }

    /// The ratio of two variants in a workload, if both were measured.
    pub(crate) fn ratio(&self, variant: &'static str, against: &'static str, workload: &str) -> Option<Ratio> {
        self.ratio_of(variant, against, workload, None)
    }

    /// The ratio of two variants in a workload by another reading, if both were measured.
    pub(crate) fn ratio_of(
        &self,
        variant: &'static str,
        against: &'static str,
        workload: &str,
        reading: Option<Reading>,
    ) -> Option<Ratio> {
        let measured = |name| self.measured(name, workload, reading);
        let ratios = paired_ratios(&measured(variant), &measured(against));
        let pairs = ratios.len();
        let summary = summary(ratios)?;
        Some(Ratio { figure: None, workload: workload.to_string(), variant, against, summary, pairs })
    }

    /// The ratio to the fastest of `among`, by the smallest median.
    pub(crate) fn ratio_to_fastest(
        &self,
        variant: &'static str,
        workload: &str,
        reading: Option<Reading>,
        among: impl Fn(&Variant) -> bool,
    ) -> Option<Ratio> {
        let candidates = self.found.variants.iter().filter(|variant| among(variant)).map(|variant| variant.name);
        let medians = candidates.filter_map(|name| {
            let values = self.measured(name, workload, reading).into_iter().map(|(_, value)| value);
            Some((summary(values)?.median, name))
        });
        let (_, fastest) = medians.min_by(|a, b| a.0.total_cmp(&b.0))?;
        self.ratio_of(variant, fastest, workload, reading)
    }

    /// Adds a ratio as a figure. Without a ratio it adds nothing.
    pub(crate) fn figure_of_ratio(&mut self, name: &str, ratio: Option<Ratio>) {
        if let Some(ratio) = ratio {
            self.figure(name, Some(ratio.summary.median));
            self.ratios.push(Ratio { figure: Some(name.to_string()), ..ratio });
        }
    }

    pub(crate) fn figure(&mut self, name: &str, value: Option<f64>) {
        if let Some(value) = value {
            self.figures.insert(name.to_string(), rounded(value));
        }
    }

    /// Returns the cell of neap's ratio to a variant, or "-" for neap itself.
    pub(crate) fn ratio_cell(&self, variant: &Variant, workload: &str) -> String {
        if variant.kind == AllocatorKind::Neap {
            return "-".to_string();
        }
        cell(self.ratio("neap", variant.name, workload).map(|ratio| ratio.summary), 2)
    }

    /// Prints the report. Fails if neap was measured and failed.
    pub(crate) fn finish(mut self, json: bool, tables: &str) -> Result<ExitCode> {
        self.add_shown_ratios();
        let neap_failed = self.failed.iter().any(|failure| failure.variant.starts_with("neap"));
        let mut variants: BTreeMap<&'static str, BTreeMap<String, Results>> = BTreeMap::new();
        for series in self.series {
            let Some(summary) = summary(series.raw.iter().map(series.metric)) else { continue };
            let results = Results { unit: series.unit, summary, raw: series.raw };
            variants.entry(series.variant).or_default().insert(series.workload, results);
        }
        let report = JsonReport {
            schema: SCHEMA,
            bench: self.bench,
            figures: self.figures,
            ratios: self.ratios,
            machine: self.machine,
            versions: self.found.versions,
            variants,
            missing: self.found.missing.iter().map(|missing| missing.name.clone()).collect(),
            failed: self.failed,
        };
        report.print(json, tables, &self.found.missing)?;
        Ok(if neap_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    /// Adds neap's ratio to every other variant in every workload, so that a reader can compare
    /// with other peers than the figures do.
    fn add_shown_ratios(&mut self) {
        let others = self.series.iter().filter(|series| series.variant != "neap");
        let shown: Vec<Ratio> =
            others.filter_map(|series| self.ratio("neap", series.variant, &series.workload)).collect();
        let stated = |ratio: &Ratio| {
            self.ratios.iter().any(|known| {
                (known.variant, known.against, &known.workload) == (ratio.variant, ratio.against, &ratio.workload)
            })
        };
        let new: Vec<Ratio> = shown.into_iter().filter(|ratio| !stated(ratio)).collect();
        self.ratios.extend(new);
    }
}

impl Options {
    /// Returns the number of rounds: the requested one, or two in a quick run, or else `usual`.
    fn rounds(&self, usual: usize) -> usize {
        self.pairs.map_or(if self.quick { usual.min(2) } else { usual }, usize::from)
    }

    /// The limit of a memory group in MiB.
    fn limit_mib(&self, usual: u64) -> u64 {
        self.limit.map(u64::from).filter(|&limit| limit > 0).unwrap_or(usual)
    }

    /// Returns an amount of work: `usual`, or a tenth of it in a quick run.
    fn amount(&self, usual: u64) -> u64 {
        if self.quick { (usual / 10).max(1) } else { usual }
    }
}

/// The peers in their defaults.
fn default_peers(variant: &Variant) -> bool {
    variant.kind == AllocatorKind::Peer
}

/// All variants, starting with another one each round and going backwards in every second one.
fn order(variants: &[Variant], round: usize) -> Vec<&Variant> {
    let mut turn: Vec<&Variant> = variants.iter().collect();
    if !turn.is_empty() {
        let first = (round / 2) % turn.len();
        turn.rotate_left(first);
    }
    if round % 2 == 1 {
        turn.reverse();
    }
    turn
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn variant(name: &'static str, kind: AllocatorKind) -> Variant {
        Variant { name, kind, library: None, environment: Vec::new(), release_thread: false }
    }

    /// A session over these variants without results.
    pub(crate) fn session(variants: Vec<Variant>) -> Session {
        Session {
            executable: PathBuf::from("/nowhere"),
            found: Found { variants, missing: Vec::new(), failed: Vec::new(), versions: BTreeMap::new() },
            machine: Machine::look(),
            bench: "pair",
            label: "neap bench pair".to_string(),
            series: Vec::new(),
            failed: Vec::new(),
            figures: BTreeMap::new(),
            ratios: Vec::new(),
        }
    }

    /// neap takes 3 ns, `slow` 6 and `fast` 2, in each of four rounds whose clock speeds differ.
    fn measured() -> Session {
        let variants = vec![
            variant("neap", AllocatorKind::Neap),
            variant("slow", AllocatorKind::Peer),
            variant("fast", AllocatorKind::Peer),
        ];
        let mut session = session(variants);
        session.measure(&[Workload::timed("pair", 4, &[])], |variant, _, round| {
            let cost = match variant.name {
                "neap" => 3,
                "slow" => 6,
                _ => 2,
            };
            Some(Ok(Outcome { operations: 10, wall_ns: cost * 10 * (round as u64 + 1), ..Outcome::default() }))
        });
        session
    }

    #[test]
    fn every_variant_is_first_and_last_in_turn() {
        let variants =
            [variant("a", AllocatorKind::Neap), variant("b", AllocatorKind::Peer), variant("c", AllocatorKind::Peer)];
        let rounds: Vec<String> =
            (0..6).map(|round| order(&variants, round).iter().map(|variant| variant.name).collect()).collect();
        assert_eq!(rounds, ["abc", "cba", "bca", "acb", "cab", "bac"]);
        assert!(order(&[], 3).is_empty());
    }

    #[test]
    fn the_figure_is_the_paired_ratio_to_the_fastest_peer() {
        let mut session = measured();
        let ratio = session.ratio_to_fastest("neap", "pair", None, default_peers);
        session.figure_of_ratio("pair_ratio", ratio);
        assert_eq!(session.figures["pair_ratio"], 1.5);
        assert_eq!((session.ratios[0].against, session.ratios[0].pairs), ("fast", 4));
    }

    #[test]
    fn without_a_peer_there_is_no_figure() {
        let mut session = measured();
        let ratio = session.ratio_to_fastest("neap", "pair", None, |variant| variant.name == "absent");
        session.figure_of_ratio("pair_ratio", ratio);
        assert!(session.figures.is_empty() && session.ratios.is_empty());
    }

    #[test]
    fn a_failing_variant_loses_its_figures_and_is_not_run_again() {
        let mut session = session(vec![variant("neap", AllocatorKind::Neap), variant("broken", AllocatorKind::Peer)]);
        let mut runs = 0;
        session.measure(&[Workload::timed("pair", 3, &[])], |variant, _, round| {
            if variant.name == "neap" {
                return Some(Ok(Outcome { operations: 1, wall_ns: 1, ..Outcome::default() }));
            }
            runs += 1;
            Some(if round == 1 { Err(anyhow::anyhow!("signal 11")) } else { Ok(Outcome::default()) })
        });
        assert_eq!(runs, 2);
        assert_eq!(session.summary("broken", "pair"), None);
        assert_eq!((session.failed[0].variant, session.failed[0].round), ("broken", 1));
        assert_eq!(session.outcomes("neap", "pair").len(), 3);
    }
}
