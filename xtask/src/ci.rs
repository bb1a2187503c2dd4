//! `cargo xtask test` and `cargo xtask ci`: the checks in their order.
//!
//! `test` is for readers of the README. `ci` adds formatting, lints, source rules and the model
//! checkers; with `--full` also tests that take long. All steps run even when one fails. The
//! summary at the end names each with its time.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::library::fast_path;
use crate::library::sequences;
use crate::library::symbols;
use crate::packages::container;
use crate::packages::deb;
use crate::packages::old_glibc;
use crate::process::{capture, cargo, command, run};
use crate::report::Report;
use crate::source_rules::tidy;
use crate::target::Target;
use crate::test_programs::Tests;
use crate::{
    Skipped, arm64, audit, build, c_api, compilers, dependent, docs, fuzz, lanes, layout, models, musl, prometheus,
    report, smoke, target, vm,
};

/// Features of the crate `neap` that are off by default.
const OPTIONAL: &str = "neap/allocator-api2,neap/stream,neap/serde";

fn cargo_step(arguments: &[&str]) -> Result<()> {
    let mut cargo = cargo(arguments);
    cargo.current_dir(layout::root());
    run(cargo)
}

/// Runs tests without debug assertions, which may hide errors.
fn without_checks(arguments: &[&str]) -> Result<()> {
    let mut cargo = cargo(arguments);
    build::without_lto(&mut cargo);
    cargo.current_dir(layout::root());
    run(cargo)
}

/// Tests that take minutes or, with ten million mutated inputs, hours.
const LONG: [&[&str]; 4] = [
    &["test", "--release", "--package", "neap", "--test", "drift", "--", "--ignored"],
    &["test", "--release", "--package", "neap-pressure", "--test", "random", "--", "--ignored"],
    &["test", "--release", "--package", "neap-cli", "--bin", "neap", "--", "--ignored", "many_mutated"],
    &["test", "--release", "--package", "neap-cli", "--test", "hostile_profile", "--", "--ignored", "every_role"],
];

/// Builds the command and the libraries, and runs the crates' own tests. The shipped crates are
/// tested apart: in one invocation with the simulator they would be built with the feature `lab`.
/// The additions of that feature are tested once more.
fn units(report: &mut Report) -> Result<()> {
    let tests = |what, arguments| Tests { what, target: Target::Native, arguments };
    let shipped: Vec<_> = ["--features", OPTIONAL].into_iter().chain(tidy::tested_packages()).collect();
    let others = tidy::RING_0.iter().flat_map(|name| ["--exclude", *name]);
    let others: Vec<_> = ["--workspace", "--exclude", "neap-book"].into_iter().chain(others).collect();
    let shipped = tests("what ships", &shipped);
    // Optimisation at link time takes one CPU. The profiles have folders of their own, so neither
    // cargo waits for the other.
    let ((), programs) = lanes::both(build::build, || Ok(shipped.build()))?;
    shipped.run_built(report, programs)?;
    // These use the command and the libraries.
    tests("the rest", &others).run(report)?;
    tests("the laboratory's pages", &["--package", "neap-pages", "--features", "lab", "--lib"]).run(report)
}

/// `test [--target NAME]`.
pub(crate) fn test_command(arguments: &[String]) -> Result<()> {
    match Target::parse(arguments)? {
        (Target::Native, []) => test(),
        (Target::Arm64, []) => arm64::test(),
        (Target::Musl, []) => musl::test(),
        (_, [extra, ..]) => bail!("`test` takes no argument but --target, and got `{extra}`"),
    }
}

/// Everything that tests behaviour: the crates' own tests, then the built library from outside.
pub(crate) fn test() -> Result<()> {
    let mut report = Report::default();
    units(&mut report)?;
    symbols::into(&mut report)?;
    fast_path::into(&mut report, Target::Native)?;
    sequences::into(&mut report, Target::Native)?;
    smoke::into(&mut report, &layout::built_library()?, &[])?;
    c_api::into(&mut report)?;
    dependent::into(&mut report)?;
    report.close("test")
}

/// The simulator, with another seed for each commit; `test` has built the tool.
fn lab(size: &[&str]) -> Result<()> {
    let commit = capture(command("git", ["-C", &layout::root().to_string_lossy(), "rev-parse", "HEAD"]));
    let seed = commit.ok().and_then(|commit| u64::from_str_radix(commit.get(..12)?, 16).ok()).unwrap_or(1);
    let seed = seed.to_string();
    let arguments = [&["lab", "compare", "--seed", &seed], size].concat();
    println!("neap {}", arguments.join(" "));
    run(command(&layout::tool().to_string_lossy(), arguments))
}

/// One step of `ci`: its name and what it runs, or why it cannot run here.
type Step = (&'static str, fn() -> Result<Option<String>>);

const STEPS: &[Step] = &[
    ("fmt", || cargo_step(&["fmt", "--all", "--check"]).map(|()| None)),
    ("tidy", || tidy::check().map(|()| None)),
    ("docs", || docs::build().map(|()| None)),
    ("clippy", || {
        cargo_step(&["clippy", "--all-targets", "--features", OPTIONAL, "--", "-D", "warnings"]).map(|()| None)
    }),
    // No default member, so a bare `cargo build` needs no web server.
    ("clippy of the example server", || {
        let arguments = ["clippy", "--all-targets", "--package", "tenant-server", "--", "-D", "warnings"];
        cargo_step(&arguments).map(|()| None)
    }),
    // By itself and optimised for the reasons given in build.rs: one set of features, and a panic
    // that aborts.
    ("clippy of the libraries", || {
        let packages = tidy::LOADED.iter().flat_map(|name| ["--package", *name]);
        let arguments: Vec<&str> =
            ["clippy", "--release"].into_iter().chain(packages).chain(["--", "-D", "warnings"]).collect();
        cargo_step(&arguments).map(|()| None)
    }),
    ("check of the fuzz targets", || fuzz::check().map(|()| None)),
    ("audit", || audit::check().map(|()| None)),
    ("doc", || {
        let mut doc = cargo(["doc", "--no-deps", "--lib", "--features", OPTIONAL]);
        doc.env("RUSTDOCFLAGS", "-D warnings").current_dir(layout::root());
        run(doc).map(|()| None)
    }),
    ("test", || test().map(|()| None)),
    // Builds nothing: the step `test` has built the command `neap` and the preload library.
    ("prometheus", || prometheus::check().map(|()| None)),
    ("lab", || lab(&["--quick"]).map(|()| None)),
    ("loom", || models::loom().map(|()| None)),
    ("miri", || match models::miri_missing() {
        Some(reason) => Ok(Some(reason)),
        None => models::miri().map(|()| None),
    }),
];

/// Steps of `--full` alone.
const MORE: &[Step] = &[
    ("tests without checks", || {
        let arguments = ["test", "--release", "--features", OPTIONAL].into_iter().chain(tidy::tested_packages());
        without_checks(&arguments.collect::<Vec<_>>()).map(|()| None)
    }),
    ("audit, with RustSec's list", || audit::full().map(|()| None)),
    ("newest Rust", || compilers::newest().map(|()| None)),
    ("lab, whole", || lab(&[]).map(|()| None)),
    ("long tests", || LONG.iter().try_for_each(|line| without_checks(line)).map(|()| None)),
    ("deb", || deb::command_line(&["--test".to_string()]).map(|()| None)),
    ("deb, Ubuntu", || deb::command_line(&["--test".to_string(), deb::UBUNTU.to_string()]).map(|()| None)),
    ("deb, arm64", || deb::command_line(&["--target".into(), target::ARM64.into(), "--test".into()]).map(|()| None)),
    ("container", || container::check().map(|()| None)),
    ("old glibc", || old_glibc::check().map(|()| None)),
    ("arm64", || arm64::test().map(|()| None)),
    ("musl", || musl::test().map(|()| None)),
    ("vm", || vm::command(&[]).map(|()| None)),
    ("vm, arm64", || vm::command(&["--target".into(), target::ARM64.into()]).map(|()| None)),
    ("vm, arm64, suite", || vm::command(&["--target".into(), target::ARM64.into(), "--suite".into()]).map(|()| None)),
];

/// A step that could not run here.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SkippedStep {
    pub(crate) name: &'static str,
    pub(crate) reason: String,
}

/// What a run left out.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// Whole steps.
    pub(crate) steps: Vec<SkippedStep>,
    /// Steps that passed without some of their checks, or were skipped after some, each with the
    /// names of the checks.
    pub(crate) parts: Vec<(&'static str, String)>,
}

/// The command.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    match arguments {
        [] => steps(STEPS).map(|_| ()),
        [option] if option == "--full" => full().map(|_| ()),
        _ => bail!("ci takes no argument but --full"),
    }
}

/// The steps of `ci --full`.
fn all() -> impl Iterator<Item = &'static Step> {
    STEPS.iter().chain(MORE)
}

/// Runs the steps of `ci --full`, and returns what was left out.
pub(crate) fn full() -> Result<LeftOut> {
    steps(all())
}

/// Names of the steps of `ci --full`.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    all().map(|(name, _)| *name)
}

/// Runs every step and sums up. Returns what was left out.
///
/// # Errors
/// The number of steps that failed. All steps run even then.
fn steps<'s>(steps: impl IntoIterator<Item = &'s Step>) -> Result<LeftOut> {
    let (mut lines, mut left) = (Vec::new(), LeftOut::default());
    let (mut passed, mut failed) = (0, 0);
    for (name, step) in steps {
        println!("\n==== {name}");
        let start = Instant::now();
        let result = step().or_else(|error| match error.downcast::<Skipped>() {
            Ok(skipped) => Ok(Some(skipped.to_string())),
            Err(error) => Err(error),
        });
        let seconds = start.elapsed().as_secs();
        let without = report::take_skipped();
        lines.push(match result {
            Ok(None) if without.is_empty() => {
                passed += 1;
                format!("{seconds:>5} s  ok       {name}")
            }
            Ok(None) => {
                passed += 1;
                let without = without.join(", ");
                let line = format!("{seconds:>5} s  ok       {name}, without {without}");
                left.parts.push((name, without));
                line
            }
            Ok(Some(reason)) => {
                let line = format!("{seconds:>5} s  skipped  {name}: {reason}");
                if !without.is_empty() {
                    left.parts.push((name, without.join(", ")));
                }
                left.steps.push(SkippedStep { name, reason });
                line
            }
            Err(error) => {
                failed += 1;
                format!("{seconds:>5} s  FAILED   {name}: {error:#}")
            }
        });
        println!("{}", lines[lines.len() - 1]);
    }
    println!("\n==== summary");
    for line in &lines {
        println!("{line}");
    }
    println!("ci: {passed} passed, {failed} failed, {} skipped", left.steps.len());
    if failed > 0 {
        bail!("{failed} of {} steps failed", passed + failed + left.steps.len());
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_steps_have_reasons_and_skipped_checks_names() {
        const MADE_UP: &[Step] = &[
            ("passes", || Ok(None)),
            ("says why", || Ok(Some("no tool".to_string()))),
            ("cannot run", || Err(Skipped("no root".to_string()).into())),
            ("in part", || {
                let mut report = Report::default();
                report.check("one", Ok(()));
                report.skip("another", "no kernel");
                report.close("in part").map(|()| None)
            }),
            ("ends early", || {
                Report::default().skip("a third", "no tool");
                Err(Skipped("no network".to_string()).into())
            }),
        ];
        let skipped = |name, reason: &str| SkippedStep { name, reason: reason.to_string() };
        let left = steps(MADE_UP).unwrap();
        assert_eq!(
            left.steps,
            [skipped("says why", "no tool"), skipped("cannot run", "no root"), skipped("ends early", "no network")]
        );
        for (step, check) in [("in part", "another"), ("ends early", "a third")] {
            let parts: Vec<_> = left.parts.iter().filter(|(name, _)| *name == step).collect();
            assert!(parts.len() == 1 && parts[0].1.contains(check), "{step}: {parts:?}");
        }
        const FAILS: &[Step] = &[("fails", || bail!("it is broken")), ("passes", || Ok(None))];
        assert_eq!(steps(FAILS).unwrap_err().to_string(), "1 of 2 steps failed");
    }

    #[test]
    fn short_gate_judges_the_crates_of_others() {
        assert!(STEPS.iter().any(|(name, _)| *name == "audit"));
    }

    #[test]
    fn each_step_has_a_name_of_its_own() {
        let mut all: Vec<&str> = names().collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert!(all.len() == count && all.contains(&"vm"), "{all:?}");
    }
}
