//! The crates' test programs: cargo builds them, and they run side by side.
//!
//! Cargo runs one program after the other, and many of them wait or use one CPU. Examples in the
//! documentation have no program of their own: cargo runs those.

use core::time::Duration;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::process::{self, Outcome};
use crate::report::Report;
use crate::smoke::locked;
use crate::target::Target;
use crate::{lanes, layout};

/// Most time of one program, against a hang.
const LIMIT: Duration = Duration::from_secs(1800);

/// The programs that take longest, which start first: one that starts last runs alone.
const LONGEST: &[&str] = &[
    "neap-cli-hostile_profile",
    "neap-objects-objects",
    "neap-cli (neap)",
    "neap-managers",
    "neap-cli-top",
    "neap-pages-pages",
    "neap-cli-hostile",
    "neap-cli-cli",
    "neap-sim-machine",
    "neap-objects-rseq_explorer",
    "neap-cli-profile",
    "neap-fork",
    "neap-cli-profile_at_limit",
];

/// A test program that is built.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TestProgram {
    /// `neap-stress` of `neap/tests/stress.rs`, `neap` of `neap/src/lib.rs`, `neap-cli (neap)` of
    /// the command `neap`.
    pub(crate) name: String,
    /// The file to run.
    pub(crate) file: PathBuf,
    /// The folder of its crate, where cargo would run it.
    folder: PathBuf,
}

/// Builds the test programs that `cargo`, a `cargo test` without `--no-run`, would run.
pub(crate) fn build(mut cargo: Command) -> Result<Vec<TestProgram>> {
    cargo.args(["--no-run", "--message-format", "json-render-diagnostics"]).stderr(Stdio::inherit());
    let output = cargo.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "the tests cannot be built");
    let programs: Vec<_> = String::from_utf8_lossy(&output.stdout).lines().filter_map(program_in).collect();
    ensure!(!programs.is_empty(), "cargo named no test program");
    Ok(programs)
}

/// The test program in a message of cargo.
fn program_in(message: &str) -> Option<TestProgram> {
    let message: Value = serde_json::from_str(message).ok()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let package = folder.file_name()?.to_str()?;
    let target = &message["target"];
    let kind = target["kind"][0].as_str()?;
    let name = match (kind, target["name"].as_str()?) {
        ("test", name) => format!("{package}-{name}"),
        ("bin", name) => format!("{package} ({name})"),
        _ => package.to_string(),
    };
    Some(TestProgram { name, file: message["executable"].as_str()?.into(), folder: folder.into() })
}

/// Tests of `cargo test ARGUMENTS` for a target.
pub(crate) struct Tests<'a> {
    pub(crate) what: &'a str,
    pub(crate) target: Target,
    pub(crate) arguments: &'a [&'a str],
}

impl Tests<'_> {
    /// Builds the programs and runs them, then the examples in these packages' documentation.
    pub(crate) fn run(&self, report: &mut Report) -> Result<()> {
        let programs = self.build();
        self.run_built(report, programs)
    }

    /// Builds the programs.
    pub(crate) fn build(&self) -> Result<Vec<TestProgram>> {
        build(self.cargo(&[]))
    }

    /// Runs built programs, then the examples in these packages' documentation.
    pub(crate) fn run_built(&self, report: &mut Report, programs: Result<Vec<TestProgram>>) -> Result<()> {
        let programs = match programs {
            Ok(programs) => programs,
            Err(error) => {
                report.check(self.what, Err(error));
                return Ok(());
            }
        };
        run_all(report, programs, |command| {
            if self.target == Target::Native {
                // `test` has built it. Otherwise a test would build one, which takes minutes.
                command.env("NEAP_LIBRARY", layout::library());
            }
        })?;
        // Cargo takes no choice of programs beside the examples.
        if !self.arguments.contains(&"--lib") {
            report.check(&format!("examples of {}", self.what), process::run(self.cargo(&["--doc"])));
        }
        Ok(())
    }

    fn cargo(&self, more: &[&'static str]) -> Command {
        self.target.cargo(&[&["test", "--no-fail-fast"], self.arguments, more].concat())
    }
}

/// Runs programs side by side, in an environment that `prepare` sets, and counts each in a report.
pub(crate) fn run_all(
    report: &mut Report,
    mut programs: Vec<TestProgram>,
    prepare: impl Fn(&mut Command) + Sync,
) -> Result<()> {
    longest_first(&mut programs);
    let report = Mutex::new(report);
    lanes::each(lanes::BUSY, &programs, |program| {
        let start = Instant::now();
        let mut command = program.command();
        prepare(&mut command);
        let found = process::observe(command, LIMIT)?;
        let (tests, result) = verdict(&found);
        let name = format!("{} ({tests}, {:.1} s)", program.name, start.elapsed().as_secs_f64());
        locked(&report).check(&name, result);
        Ok(())
    })
}

/// Sorts programs by [`LONGEST`]. Others stay in their order.
fn longest_first(programs: &mut [TestProgram]) {
    let rank = |program: &TestProgram| LONGEST.iter().position(|name| *name == program.name).unwrap_or(LONGEST.len());
    programs.sort_by_key(rank);
}

impl TestProgram {
    /// Runs it as cargo would.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }
}

/// The counts in a program's last line, and all of its output as an error if it failed.
fn verdict(found: &Outcome) -> (String, Result<()>) {
    let text = String::from_utf8_lossy(&found.stdout);
    let counts = text.lines().rev().find_map(|line| line.strip_prefix("test result: "));
    // `ok. 3 passed; 0 failed; …`
    let passed = counts.and_then(|counts| counts.split(';').next()).unwrap_or("no result");
    let passed = passed.trim_start_matches("ok. ").to_string();
    let result = match found.success() && counts.is_some() {
        true => Ok(()),
        false => Err(anyhow::anyhow!("{}\n{text}{}", found.summary(), String::from_utf8_lossy(&found.stderr))),
    };
    (passed, result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_named_by_crate_and_file() {
        let message = |kind: &str, name: &str, is_test: bool| {
            let target = serde_json::json!({"kind": [kind], "name": name});
            let message = serde_json::json!({"reason": "compiler-artifact", "manifest_path": "/a/crates/neap/Cargo.toml",
                "target": target, "profile": {"test": is_test}, "executable": "/target/x"});
            program_in(&message.to_string())
        };
        let name = |kind, name| message(kind, name, true).unwrap().name;
        assert_eq!(name("test", "stress"), "neap-stress");
        assert_eq!(name("lib", "neap"), "neap");
        assert_eq!(name("bin", "tool"), "neap (tool)");
        assert_eq!(message("bin", "tool", false), None, "a program that tests only use");
        assert_eq!(program_in("{\"reason\":\"build-finished\",\"success\":true}"), None);
        assert_eq!(program_in("no message"), None);
    }

    #[test]
    fn programs_that_take_longest_start_first() {
        let program = |name: &str| TestProgram { name: name.into(), file: PathBuf::new(), folder: PathBuf::new() };
        let mut programs = ["b", LONGEST[1], "a", LONGEST[0]].map(program);
        longest_first(&mut programs);
        assert_eq!(programs.map(|program| program.name), [LONGEST[0], LONGEST[1], "b", "a"]);
    }

    #[test]
    fn programs_that_take_longest_exist() {
        let mut names = Vec::new();
        for package in std::fs::read_dir(layout::root().join("crates")).unwrap() {
            let (folder, package) = package.map(|entry| (entry.path(), entry.file_name())).unwrap();
            let package = package.to_str().unwrap();
            let tests = std::fs::read_dir(folder.join("tests")).into_iter().flatten().flatten();
            names.extend(tests.filter_map(|test| {
                let is_program = test.path().is_file() || test.path().join("main.rs").exists();
                is_program.then(|| format!("{package}-{}", test.path().file_stem().unwrap().display()))
            }));
        }
        // The command's own tests.
        names.push("neap-cli (neap)".into());
        let gone: Vec<_> = LONGEST.iter().filter(|name| !names.iter().any(|known| known == *name)).collect();
        assert!(gone.is_empty(), "{gone:?} are no test programs");
    }

    #[test]
    fn a_failure_shows_the_whole_output() {
        let run = |script: &str| {
            verdict(&process::observe(process::command("sh", ["-c", script]), Duration::from_secs(60)).unwrap())
        };
        let (passed, result) = run("echo 'test result: ok. 3 passed; 0 failed; 1 ignored'");
        assert!(result.is_ok());
        assert_eq!(passed, "3 passed");
        assert!(run("exit 0").1.is_err(), "no test was run");
        let (_, result) = run("echo first; echo 'test result: FAILED. 1 passed; 1 failed'; echo why >&2; exit 101");
        let error = result.unwrap_err().to_string();
        assert!(error.contains("first\n") && error.contains("why"), "{error}");
    }
}
