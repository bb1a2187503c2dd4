//! `neap lab`: runs the policies of page lists on simulated machines (`neap-sim`).
//!
//! The output depends on the seed and the size only, not on this machine. The JSON object names the
//! machine because every object does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand};
use neap_sim::compare::{self, Comparison};
use neap_sim::scenarios::{self, Scenario, Size};
use neap_sim::trace::Trace;
use neap_sim::{cost, page, policies};
use serde_json::{Value, json};

use crate::look::subject::SCHEMA;
use crate::machine::Machine;
use crate::report::{number, rounded, table};

const EXAMPLES: &str = "\
Examples:
  neap lab compare                          every policy in every scenario; takes minutes
  neap lab compare --quick --html lab.html  fewer and shorter runs, and a page with plots
  neap lab compare --seed 7 --json          one JSON object on standard output
  neap lab show 'kernel build'              one scenario
  neap lab replay program.trace             every policy on a recording

CPUs, time and the wait for the zone's lock are simulated. Page lists, policies and the zone are the
library's own code. Equal seeds and sizes give equal numbers on every machine.";

/// Run the page lists' policies on simulated machines.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LabOptions {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Run every policy in every scenario; print published beside simulated values, and figures
    Compare {
        #[command(flatten)]
        how: How,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
        /// Write a page with tables and plots
        #[arg(long, value_name = "FILE")]
        html: Option<PathBuf>,
    },
    /// Run every policy on a recording of `neap run --trace` (its format: crates/neap/src/trace.rs)
    Replay {
        /// The recording
        file: PathBuf,
    },
    /// Run every policy in one scenario
    Show {
        /// Name of the scenario, as `compare` prints it
        scenario: String,
        #[command(flatten)]
        how: How,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
struct How {
    /// Seed of the random programs
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Fewer and shorter runs
    #[arg(long)]
    quick: bool,
}

impl How {
    fn size(&self) -> Size {
        if self.quick { Size::Quick } else { Size::Full }
    }
}

pub(crate) fn main(options: &LabOptions) -> Result<ExitCode> {
    let tell = |what: &str| eprintln!("neap lab: {what}");
    match &options.what {
        What::Compare { how, json, html } => {
            let comparison = compare::compare(how.seed, how.size(), &tell);
            if let Some(path) = html {
                let page = page::html(&comparison, &scenarios::compared(how.size()));
                std::fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))?;
            }
            if *json {
                println!("{}", object("lab compare", &comparison, how))
            } else {
                print(&comparison, how.size())
            }
            let refused = |run: &policies::Run| {
                let counts = &run.outcome.counts;
                counts.failures_with_pages_listed + counts.misses_with_pages_listed > 0
            };
            if let Some(((_, policy), (scenario, _))) = comparison.runs.iter().find(|(_, (_, run))| refused(run)) {
                let (policy, scenario) = (policy.text(), scenario.name());
                bail!(
                    "{scenario}, {policy}, seed {}: an allocation failed, or went to another node, while pages sat in lists",
                    how.seed
                );
            }
        }
        What::Replay { file } => replay(file)?,
        What::Show { scenario, how, json } => {
            let known = scenarios::compared(how.size());
            let Some(&found) = known.iter().find(|known| known.name() == *scenario) else {
                let names: Vec<String> = known.iter().map(|scenario| scenario.name()).collect();
                bail!("there is no scenario `{scenario}`; there are: {}", names.join(", "));
            };
            let comparison = compare::only(how.seed, how.size(), found, &tell);
            if *json {
                println!("{}", object("lab show", &comparison, how));
                return Ok(ExitCode::SUCCESS);
            }
            println!("{}", table(&page::COLUMNS, &page::rows(&comparison, found)));
            println!("{}", bound(&comparison, found));
            print_figures(&comparison);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn replay(file: &Path) -> Result<()> {
    let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let trace = Trace::read(&bytes).map_err(|error| anyhow!("{}: {error}", file.display()))?;
    let (mut rows, mut late, taken) = (Vec::new(), Vec::new(), trace.taken());
    for policy in policies::ALL {
        let setup = trace.setup().map_err(|error| anyhow!("{}: {error}", file.display()))?;
        let run = policies::run(policy, setup);
        if run.costs.taken < taken {
            late.push(format!("{}: the machine was too slow for {} pages", policy.text(), taken - run.costs.taken));
        }
        rows.push(page::row(policy, &run.outcome));
    }
    println!("{}", table(&page::COLUMNS, &rows));
    late.iter().for_each(|late| println!("{late} of {taken}"));
    let end = if trace.cut_off { "; the file was full before the program ended" } else { "" };
    println!("{} events of {} CPUs, pages of {} bytes{end}", trace.events.len(), trace.cpus, 1_u64 << trace.page_shift);
    Ok(())
}

fn print(comparison: &Comparison, size: Size) {
    for scenario in scenarios::compared(size) {
        println!("{}\n\n{}", scenario.name(), table(&page::COLUMNS, &page::rows(comparison, scenario)));
        println!("{}\n", bound(comparison, scenario));
    }
    println!("pft: seconds until all CPUs have touched their part\n\n{}", first_touch(comparison, size));
    println!("{}", table(&page::CHECK_COLUMNS, &page::check_rows(comparison)));
    let costs = cost::table();
    let costs: Vec<Vec<String>> =
        costs.iter().map(|cost| vec![cost.name.into(), number(cost.value, 1), cost.source.into()]).collect();
    println!("{}", table(&["cost", "ns", "source"], &costs));
    print_figures(comparison);
    println!("\nSeed {}. Pages of 4 KiB; a policy's row is one run.", comparison.seed);
}

/// Returns a sentence on the best that any policy could reach in a scenario.
fn bound(comparison: &Comparison, scenario: Scenario) -> String {
    let share = comparison.run(scenario, policies::Name::Adaptive).map_or(1.0, |run| run.outcome.zone_share.min(1.0));
    match comparison.least_listed(scenario, share) {
        Some(pages) => format!(
            "A policy that knew the future could take {:.1} % from the zone, as adaptive does, with {pages:.0} pages listed.",
            share * 100.0
        ),
        None => {
            "Of the pages that adaptive did not take from the zone, some were in its lists from before.".to_string()
        }
    }
}

fn print_figures(comparison: &Comparison) {
    for violation in comparison.violations() {
        println!("violation: {violation}");
    }
    for (name, value) in &comparison.figures {
        println!("{name}: {}", number(*value, 4));
    }
}

/// Returns a table of the scenario "pft", with a row for each number of CPUs.
fn first_touch(comparison: &Comparison, size: Size) -> String {
    use neap_sim::machine::ListLock::{Blocking, None, Try};
    use policies::Name::{Adaptive, Fixed};
    let rows = scenarios::first_touch_cpus(size).iter().map(|&cpus| {
        let ended = |lock, name| {
            let run = comparison.run(Scenario::FirstTouch(cpus, lock), name);
            run.map_or(0.0, |run| run.outcome.counts.ended as f64 / 1e9)
        };
        let base = ended(None, Fixed);
        let cell = |seconds: f64| format!("{seconds:.4} ({:+.1} %)", (seconds / base - 1.0) * 100.0);
        let cells = [ended(Blocking, Fixed), ended(Try, Fixed), ended(Try, Adaptive)].map(cell);
        [vec![cpus.to_string(), format!("{base:.4}")], cells.to_vec()].concat()
    });
    table(&["CPUs", "no lock", "spin lock", "trylock", "trylock, adaptive"], &rows.collect::<Vec<_>>())
}

/// The JSON object, in the shape of every benchmark's.
fn object(bench: &str, comparison: &Comparison, how: &How) -> Value {
    let figures: BTreeMap<&str, f64> =
        comparison.figures.iter().map(|(name, value)| (name.as_str(), rounded(*value))).collect();
    let mut variants: BTreeMap<&str, BTreeMap<String, Value>> = BTreeMap::new();
    for ((_, policy), (scenario, run)) in &comparison.runs {
        variants.entry(policy.text()).or_default().insert(scenario.name(), json!(run.outcome));
    }
    json!({
        "schema": SCHEMA,
        "bench": bench,
        "figures": figures,
        "seed": how.seed,
        "quick": how.quick,
        "validation": comparison.checks,
        "violations": comparison.violations().collect::<Vec<_>>(),
        "machine": Machine::look(),
        "versions": { "neap": env!("CARGO_PKG_VERSION") },
        "variants": variants,
        "missing": [],
        "failed": [],
    })
}
