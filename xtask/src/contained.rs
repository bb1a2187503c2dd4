//! `tests/programs/container.c` in memory groups of cgroup version 1 on this machine, as part of
//! `cargo xtask smoke`. On version 2 `cargo xtask vm` runs the program.
//!
//! The groups are children of this process's memory group, and are removed at the end. Without the
//! right to make them, all checks are skipped.

use core::time::Duration;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, sleep};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use neap_pressure::{Sensor, Subject, System, Version, Visibility};

use crate::process::command;
use crate::report::Report;

/// The program that runs in the groups.
pub(crate) const FILE: &str = "container.c";
/// Longest time of one check, against a hang.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time between two steps of a limit that is lowered.
const STEP: Duration = Duration::from_millis(50);
/// MiB that a lowered limit stays above the use.
const ABOVE: u64 = 2;

/// A memory group with a limit. It is removed when it is dropped.
struct Group(PathBuf);

impl Group {
    /// Makes a group in `parent` with a limit in MiB, also of memory and swap together.
    fn make(parent: &Path, name: &str, limit: u64) -> Result<Group> {
        let group = Group(parent.join(format!("neap-check-{name}-{}", std::process::id())));
        fs::create_dir(&group.0).with_context(|| format!("cannot make {}", group.0.display()))?;
        // Linux before 5.11 counts groups below only on request.
        let _ = fs::write(group.0.join("memory.use_hierarchy"), "1");
        group.set(limit).with_context(|| format!("{}: no limit can be set", group.0.display()))?;
        // The file is absent where swap is not accounted.
        let _ = fs::write(group.0.join("memory.memsw.limit_in_bytes"), (limit << 20).to_string());
        Ok(group)
    }

    /// Sets the limit in MiB. The kernel refuses one below the use.
    fn set(&self, limit: u64) -> Result<()> {
        Ok(fs::write(self.0.join("memory.limit_in_bytes"), (limit << 20).to_string())?)
    }

    /// Used MiB, rounded up.
    fn used(&self) -> Result<u64> {
        let text = fs::read_to_string(self.0.join("memory.usage_in_bytes"))?;
        Ok(text.trim().parse::<u64>()?.div_ceil(1 << 20))
    }

    /// Lowers the limit to `target` MiB, in steps to little above the use.
    fn lower(&self, target: u64) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let limit = target.max(self.used()? + ABOVE);
            let is_set = self.set(limit).is_ok();
            if is_set && limit == target {
                return Ok(());
            }
            ensure!(Instant::now() < end, "{} MiB are in use, so the limit cannot be {target} MiB", self.used()?);
            sleep(STEP);
        }
    }

    /// Checks that the kernel has killed no process of the group. Old kernels do not count.
    fn has_killed_none(&self) -> Result<()> {
        let text = fs::read_to_string(self.0.join("memory.oom_control"))?;
        let killed = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        ensure!(
            killed.is_none_or(|killed| killed == "0"),
            "the kernel killed {} processes",
            killed.unwrap_or_default()
        );
        Ok(())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let end = Instant::now() + Duration::from_secs(10);
        while let Err(error) = fs::remove_dir(&self.0) {
            if Instant::now() >= end {
                eprintln!("cannot remove {}: {error}", self.0.display());
                return;
            }
            sleep(Duration::from_millis(10));
        }
    }
}

/// Returns the folder of this process's memory group of version 1. `None` if version 2 has the
/// memory controller, or if no mount shows the group.
fn own_group() -> Option<PathBuf> {
    let mut sensor = Sensor::new(Subject::Own);
    let report = sensor.survey(&System::new());
    let is_shown = report.version() == Some(Version::V1) && report.view() == Visibility::Own;
    is_shown.then(|| PathBuf::from(OsStr::from_bytes(report.directory())))
}

/// The library, the program, a folder for its file, and how a command line is run.
struct Check<'a> {
    library: &'a Path,
    program: &'a Path,
    scratch: &'a Path,
    passes: &'a dyn Fn(Command) -> Result<()>,
}

impl Check<'_> {
    /// Runs the program in a group until its end, and checks that the kernel killed nothing.
    fn passes_in(&self, group: &Group, options: &str, arguments: &[&str]) -> Result<()> {
        // The shell enters the group, and becomes the program.
        let script = "echo 0 >\"$1\"/cgroup.procs && shift && exec env LD_PRELOAD=\"$1\" NEAP=\"$2\" \"${@:3}\"";
        let mut line = command("bash", ["-c", script, "bash"]);
        line.arg(&group.0).arg(self.library).arg(options).arg(self.program).args(arguments);
        let passed = (self.passes)(line);
        group.has_killed_none().and(passed)
    }

    /// Memory that the program keeps free is given back while its limit is lowered to 100 MiB: the
    /// heap may have 90, and pages of files are resident beside it.
    fn shrinks(&self, group: &Group) -> Result<()> {
        let keeps = self.scratch.join("keeps");
        let _ = fs::remove_file(&keeps);
        let lower = || {
            let end = Instant::now() + PATIENCE;
            while !keeps.exists() {
                ensure!(Instant::now() < end, "the program does not keep memory");
                sleep(STEP);
            }
            group.lower(100)
        };
        thread::scope(|scope| {
            let lowered = scope.spawn(lower);
            let passed = self.passes_in(group, "limit:auto", &["keep", "300", "80", "94", &keeps.to_string_lossy()]);
            passed.and(lowered.join().unwrap_or_else(|_| Err(anyhow!("the limit's thread panicked"))))
        })
    }
}

/// Runs each case of the program in groups of its own. `passes` runs a command line, and checks
/// that it prints `ok`.
pub(crate) fn into(
    report: &mut Report,
    library: &Path,
    program: &Path,
    scratch: &Path,
    passes: &dyn Fn(Command) -> Result<()>,
) -> Result<()> {
    let Some(own) = own_group() else {
        report.skip(FILE, "no memory group of version 1 has this process; `cargo xtask vm` tests version 2");
        return Ok(());
    };
    if let Err(error) = Group::make(&own, "try", 64) {
        report.skip(FILE, &format!("{error:#}"));
        return Ok(());
    }
    let check = Check { library, program, scratch, passes };
    for threads in ["1", "2"] {
        let group = Group::make(&own, "full", 200)?;
        let answer = check.passes_in(&group, "limit:auto,refuse:on", &["fill", threads, "120", "185"]);
        report.check(&format!("{FILE} (full, threads: {threads})"), answer);
    }
    let group = Group::make(&own, "less", 400)?;
    report.check(&format!("{FILE} (limit that is lowered)"), check.shrinks(&group));
    let outer = Group::make(&own, "outer", 150)?;
    let inner = Group::make(&outer.0, "inner", 1024)?;
    let answer = check.passes_in(&inner, "limit:auto,refuse:on", &["fill", "1", "80", "140"]);
    report.check(&format!("{FILE} (limit of the group above)"), outer.has_killed_none().and(answer));
    Ok(())
}
