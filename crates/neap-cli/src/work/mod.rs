//! Workloads of measured processes, and their own measurements.
//!
//! A benchmark starts `neap work …` under the variant's library. The workload calls the C functions
//! `malloc` and `free` as any C program would. A measured loop allocates only what it measures: its
//! tables come from mmap, and its readings go to the stack. The result is one line of JSON on
//! standard output.

mod block_cache;
mod burst;
mod churn;
mod cross;
mod grouped;
mod holes;
pub(crate) mod idle;
pub(crate) mod idle_hour;
pub(crate) mod metadata;
pub(crate) mod meter;
mod paced;
mod page;
mod page_lists;
mod pair;
pub(crate) mod phases;
mod pool;
pub(crate) mod sites;
mod steady;
mod wall;

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use crate::process;
use crate::variant::Variant;

/// Longest time of any workload. It is many times the time of the slowest allocator.
const LIMIT: Duration = Duration::from_secs(120);

/// Run one workload on the malloc of this process.
#[derive(Args)]
pub(crate) struct WorkOptions {
    /// Start the release thread that Google's tcmalloc leaves to the program
    #[arg(long, global = true)]
    release_thread: bool,
    #[command(subcommand)]
    workload: Workload,
}

#[derive(Subcommand)]
enum Workload {
    /// Only report which library's malloc this is
    Which,
    Idle(idle::IdleOptions),
    /// A load with a live set that stays, and then nothing to do
    IdleHour(idle_hour::IdleHourOptions),
    Holes(holes::HolesOptions),
    /// Blocks replaced at a rate by one thread
    Paced(paced::PacedOptions),
    Pair(pair::PairOptions),
    Batch(pair::BatchOptions),
    Page(page::PageOptions),
    /// Live sets of one block size after another
    Phases(phases::PhasesOptions),
    /// Blocks of many sizes replaced at random by eight threads
    Steady(steady::SteadyOptions),
    Larson(cross::LarsonOptions),
    Xmalloc(cross::XmallocOptions),
    PageFault(page_lists::FaultOptions),
    FirstTouch(page_lists::TouchOptions),
    /// Blocks kept in a memory group, or in none
    Grouped(grouped::GroupedOptions),
    /// Memory groups that come and go
    Churn(churn::ChurnOptions),
    /// A cache of file metadata at a memory limit
    Metadata(metadata::MetadataOptions),
    /// Growth at a rate beside a cache
    Burst(burst::BurstOptions),
    /// A server with a cache whose limit is cut
    Wall(wall::WallOptions),
    /// librseq's memory pool
    Pool(pool::PoolOptions),
    /// Memory that 50 functions hold
    Sites(sites::SitesOptions),
}

/// Measurements of one run of a workload or program. The JSON omits a field that is an empty
/// string, an empty collection or `None`. Other fields that a workload does not measure are 0.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Outcome {
    /// Round of the benchmark; set by the benchmark.
    pub(crate) round: usize,
    /// File whose `malloc` answered.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) malloc_from: String,
    /// Number of operations. Each workload defines its operation.
    pub(crate) operations: u64,
    pub(crate) wall_ns: u64,
    /// Processor time of all threads, user and system.
    pub(crate) cpu_ns: u64,
    pub(crate) minor_faults: u64,
    pub(crate) voluntary_switches: u64,
    pub(crate) involuntary_switches: u64,
    /// Resident memory at the times that the workload names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) rss_kib: Vec<u64>,
    /// Processor time while the program only waited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle_cpu_ns: Option<u64>,
    /// Largest resident set of a program and its children.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak_rss_kib: Option<u64>,
    /// How a program ended, with the length and a hash of its standard output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) output: Option<String>,
    /// Other counts of the workload, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) counts: BTreeMap<String, f64>,
}

impl Outcome {
    /// Nanoseconds of wall time per operation.
    pub(crate) fn ns_each(&self) -> f64 {
        self.wall_ns as f64 / self.operations.max(1) as f64
    }

    /// Nanoseconds of processor time per operation.
    pub(crate) fn cpu_ns_each(&self) -> f64 {
        self.cpu_ns as f64 / self.operations.max(1) as f64
    }

    pub(crate) fn wall_seconds(&self) -> f64 {
        self.wall_ns as f64 / 1e9
    }

    /// Returns a count by name; 0 if the workload has no such count.
    pub(crate) fn count(&self, name: &str) -> f64 {
        self.counts.get(name).copied().unwrap_or(0.0)
    }
}

pub(crate) fn main(options: &WorkOptions) -> Result<ExitCode> {
    if options.release_thread {
        start_release_thread()?;
    }
    let mut outcome = match &options.workload {
        Workload::Which => Outcome::default(),
        Workload::Idle(options) => idle::run(options)?,
        Workload::IdleHour(options) => idle_hour::run(options)?,
        Workload::Holes(options) => holes::run(options)?,
        Workload::Paced(options) => paced::run(options)?,
        Workload::Pair(options) => pair::run(options)?,
        Workload::Batch(options) => pair::run_batch(options)?,
        Workload::Page(options) => page::run(options)?,
        Workload::Phases(options) => phases::run(options)?,
        Workload::Steady(options) => steady::run(options)?,
        Workload::Larson(options) => cross::larson(options)?,
        Workload::Xmalloc(options) => cross::xmalloc(options)?,
        Workload::PageFault(options) => page_lists::page_fault(options)?,
        Workload::FirstTouch(options) => page_lists::first_touch(options)?,
        Workload::Grouped(options) => grouped::run(options)?,
        Workload::Churn(options) => churn::run(options)?,
        Workload::Metadata(options) => metadata::run(options)?,
        Workload::Burst(options) => burst::run(options)?,
        Workload::Wall(options) => wall::run(options)?,
        Workload::Pool(options) => pool::run(options)?,
        Workload::Sites(options) => sites::run(options)?,
    };
    outcome.malloc_from = malloc_origin();
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(ExitCode::SUCCESS)
}

/// Returns the command `neap work ARGUMENTS` on a variant.
pub(crate) fn command(executable: &Path, variant: &Variant, arguments: &[&str]) -> Command {
    let mut command = Command::new(executable);
    variant.apply(&mut command);
    command.arg("work").args(arguments).stdin(Stdio::null());
    if variant.release_thread {
        command.arg("--release-thread");
    }
    command
}

/// Runs `neap work ARGUMENTS` under a variant and parses its result. The process inherits the
/// caller's standard error.
pub(crate) fn measure(executable: &Path, variant: &Variant, arguments: &[&str]) -> Result<Outcome> {
    let command = command(executable, variant, arguments);
    let mut output = Vec::new();
    let finished = process::run(command, LIMIT, |bytes| output.extend_from_slice(bytes))?;
    let workload = arguments.first().copied().unwrap_or_default();
    if !finished.status.success() {
        bail!("workload `{workload}` on {} failed: {}", variant.name, finished.status);
    }
    let outcome: Outcome = serde_json::from_slice(&output)
        .with_context(|| format!("workload `{workload}` on {}: no result", variant.name))?;
    Ok(Outcome { peak_rss_kib: Some(finished.usage.ru_maxrss as u64), ..outcome })
}

/// The file that holds the `malloc` of this process.
fn malloc_origin() -> String {
    // SAFETY: all-zero bytes are a valid Dl_info.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr accepts any address, and writes its answer to a live local.
    let known = unsafe { libc::dladdr(libc::malloc as *const libc::c_void, &mut found) } != 0;
    if !known || found.dli_fname.is_null() {
        return "unknown".to_string();
    }
    // SAFETY: dladdr succeeded, so the name is a C string that lives as long as the object is
    // loaded.
    unsafe { CStr::from_ptr(found.dli_fname) }.to_string_lossy().into_owned()
}

/// Starts the release thread of Google's tcmalloc. tcmalloc releases memory only if the program
/// lends it a thread and sets a release rate.
fn start_release_thread() -> Result<()> {
    let find = |name: &CStr| {
        // SAFETY: the name is a C string. The address is only compared with null here.
        let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        if address.is_null() {
            bail!("this malloc has no {}", name.to_string_lossy())
        }
        Ok(address)
    };
    let set_rate = find(c"MallocExtension_Internal_SetBackgroundReleaseRate")?;
    let background = find(c"MallocExtension_Internal_ProcessBackgroundActions")?;
    // SAFETY: tcmalloc declares it as taking a number of bytes per second and returning nothing.
    let set_rate: extern "C" fn(usize) = unsafe { std::mem::transmute(set_rate) };
    // SAFETY: tcmalloc declares it as taking and returning nothing.
    let background: extern "C" fn() = unsafe { std::mem::transmute(background) };
    set_rate(1 << 30);
    std::thread::Builder::new().spawn(move || background()).context("cannot start the release thread")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_of_malloc_is_a_file() {
        assert!(Path::new(&malloc_origin()).is_file(), "{}", malloc_origin());
    }

    #[test]
    fn an_outcome_survives_its_json_line() {
        let outcome = Outcome { operations: 4, wall_ns: 10, rss_kib: vec![7, 8], ..Outcome::default() };
        let text = serde_json::to_string(&outcome).unwrap();
        assert!(!text.contains("peak_rss_kib"), "{text}");
        let back: Outcome = serde_json::from_str(&text).unwrap();
        assert_eq!((back.ns_each(), back.rss_kib), (2.5, vec![7, 8]));
    }
}
