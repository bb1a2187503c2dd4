//! `cargo xtask loom` and `cargo xtask miri`: tests under another engine than the machine.
//!
//! loom runs the files `tests/loom.rs` of the crates with every interleaving up to two preemptions,
//! or as many as a test says; the crates are compiled with `--cfg loom` in a target folder of their
//! own. Miri interprets the tests listed below and reports undefined behaviour; it needs a nightly
//! toolchain, which rustup installs if it is missing.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::process::{capture, cargo, command, run, which};
use crate::report::Report;
use crate::{build, lanes, layout, test_programs};

/// Tests that miri interprets: crate, test programs, arguments.
type Interpreted = (&'static str, &'static [&'static str], &'static [&'static str]);

/// The longest first. Miri knows no inline assembly and few system calls, so these tests use plain
/// memory. It is some hundred times slower than the machine, so they are small.
const MIRI: &[Interpreted] = &[
    ("neap-reclaim", &["--test", "lists"], &["a_small_history"]),
    ("neap-objects", &["--lib"], &["strided_run::", "sheaf::", "slab::", "holes::"]),
    ("neap-base", &["--lib"], &["bitmap", "cpu_lock", "a_held", "units"]),
    ("neap-reclaim", &["--lib"], &["shrinkers::shrinker_info"]),
    ("neap-percpu", &["--test", "plain_memory"], &[]),
    ("neap-base", &["--test", "rcu_phases"], &[]),
    ("neap-groups", &["--lib"], &["id::", "table::"]),
];

/// Runs every crate's loom tests.
pub(crate) fn loom() -> Result<()> {
    let mut crates: Vec<String> = Vec::new();
    for entry in fs::read_dir(layout::root().join("crates"))? {
        let entry = entry?;
        if entry.path().join("tests/loom.rs").exists() {
            crates.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    crates.sort();
    if crates.is_empty() {
        bail!("no crate has a file tests/loom.rs");
    }
    let preemptions = std::env::var("LOOM_MAX_PREEMPTIONS").unwrap_or_else(|_| "2".into());
    println!("loom: {}, at most {preemptions} preemptions", crates.join(", "));
    let mut test = cargo(["test", "--release", "--test", "loom"]);
    test.args(crates.iter().flat_map(|name| ["--package", name]))
        .current_dir(layout::root())
        .env("CARGO_TARGET_DIR", layout::target().join("loom"))
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
    build::without_lto(&mut test);
    let mut report = Report::default();
    test_programs::run_all(&mut report, test_programs::build(test)?, |program| {
        program.env("LOOM_MAX_PREEMPTIONS", &preemptions);
    })?;
    report.close("loom")
}

/// Why miri cannot run here, after trying to install it; `None` if it can.
pub(crate) fn miri_missing() -> Option<String> {
    if which("rustup").is_none() {
        return Some("there is no rustup to install the nightly toolchain with".into());
    }
    let ready = || capture(command("rustup", ["run", "nightly", "cargo", "miri", "--version"])).is_ok();
    let sources = || {
        capture(command("rustup", ["component", "list", "--toolchain", "nightly", "--installed"]))
            .is_ok_and(|list| list.lines().any(|line| line == "rust-src"))
    };
    if ready() && sources() {
        return None;
    }
    println!("installing the nightly toolchain's miri and rust-src");
    // Components are added to an existing toolchain, which keeps its version.
    let add = ["component", "add", "--toolchain", "nightly", "miri", "rust-src"];
    if run(command("rustup", add)).is_ok() {
        return None;
    }
    let install = "toolchain install nightly --profile minimal --component miri --component rust-src";
    match run(command("rustup", install.split(' '))) {
        Ok(()) => None,
        Err(error) => Some(format!("rustup could not install miri: {error:#}")),
    }
}

/// Runs the listed tests under miri, which uses one CPU for each, side by side.
pub(crate) fn miri() -> Result<()> {
    if let Some(reason) = miri_missing() {
        bail!("{reason}");
    }
    lanes::each(lanes::BUSY, MIRI, interpret)
}

/// Whether a line of output is of a test that a filter chooses.
fn is_test(line: &str, filter: &str) -> bool {
    line.strip_prefix("test ").and_then(|line| line.split(" ... ").next()).is_some_and(|name| name.contains(filter))
}

/// Runs one line of the list, and prints its results once it has ended.
fn interpret((name, program, arguments): &Interpreted) -> Result<()> {
    let mut test = command("rustup", ["run", "nightly", "cargo", "miri", "test", "--package", name]);
    test.args(*program)
        .arg("--")
        .args(*arguments)
        .current_dir(layout::root())
        .env("CARGO_TARGET_DIR", layout::target().join("miri"))
        // The arena is addressed by number. Property tests run few cases, and read a file of
        // earlier failures.
        .env("MIRIFLAGS", "-Zmiri-permissive-provenance -Zmiri-disable-isolation")
        .env("PROPTEST_CASES", "8");
    // These name the stable toolchain that runs xtask.
    for variable in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS"] {
        test.env_remove(variable);
    }
    let said = capture(test).with_context(|| format!("miri on {name}"))?;
    if let Some(filter) = arguments.iter().find(|filter| !said.lines().any(|line| is_test(line, filter))) {
        bail!("miri on {name}: no test has `{filter}` in its name");
    }
    println!("miri: {name} {}\n{said}", arguments.join(" "));
    Ok(())
}
