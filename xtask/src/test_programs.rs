//! The crates' test programs: cargo builds them, and they run two at a time.
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
use crate::target::Target;
use crate::{lanes, layout};

/// Most time of one program, against a hang.
const LIMIT: Duration = Duration::from_secs(1800);

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

/// Builds the test programs of `cargo test ARGUMENTS` and runs them, then the examples in these
/// packages' documentation.
pub(crate) fn run(report: &mut Report, what: &str, target: Target, arguments: &[&str]) -> Result<()> {
    let cargo = |more: &[&'static str]| target.cargo(&[&["test", "--no-fail-fast"], arguments, more].concat());
    let programs = match build(cargo(&[])) {
        Ok(programs) => programs,
        Err(error) => {
            report.check(what, Err(error));
            return Ok(());
        }
    };
    let report = Mutex::new(report);
    let check = |name: &str, result| report.lock().unwrap_or_else(|e| e.into_inner()).check(name, result);
    lanes::each(&programs, |program| {
        let start = Instant::now();
        let mut command = program.command();
        if target == Target::Native {
            // `test` has built it. Otherwise a test would build one, which takes minutes.
            command.env("NEAP_LIBRARY", layout::library());
        }
        let found = process::observe(command, LIMIT)?;
        let (tests, result) = verdict(&found);
        check(&format!("{} ({tests}, {:.1} s)", program.name, start.elapsed().as_secs_f64()), result);
        Ok(())
    })?;
    // Cargo takes no choice of programs beside the examples.
    if !arguments.contains(&"--lib") {
        check(&format!("examples of {what}"), process::run(cargo(&["--doc"])));
    }
    Ok(())
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
