//! `cargo xtask audit`: the crates of other projects, the public interfaces since the last release,
//! and the oldest compiler.
//!
//! | check | tool |
//! |---|---|
//! | licences, sources, duplicates and wildcards, by `deny.toml` | cargo-deny |
//! | known security holes | cargo-deny, with RustSec's list |
//! | the version against changes of public interfaces | cargo-semver-checks |
//! | `rust-version` | that compiler |
//!
//! The tools are installed into `target/tools` when they are missing. A check that cannot be made
//! here is skipped with its reason: without network that of security holes, and all checks of a
//! tool or a compiler that is missing.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::process::{capture, cargo, command, run, which};
use crate::report::Report;
use crate::source_rules::tidy;
use crate::{Skipped, layout};

/// Crates whose public interfaces other programs use.
const PUBLIC: &[&str] = &["neap", "neap-pressure"];

/// The version of cargo-deny that is installed. A later one may read `deny.toml` in another way.
const DENY: &str = "cargo-deny@0.20.2";

/// Runs the checks whose results depend on the tree alone: those without RustSec's list.
///
/// # Errors
/// [`Skipped`] if all checks passed but those of cargo-deny, which is not to be had.
pub(crate) fn check() -> Result<()> {
    checks(false)
}

/// Runs all checks.
///
/// # Errors
/// As [`check`].
pub(crate) fn full() -> Result<()> {
    checks(true)
}

fn checks(with_advisories: bool) -> Result<()> {
    let mut report = Report::default();
    let deny = tool(DENY);
    if let Ok(deny) = &deny {
        crates(&mut report, deny, with_advisories);
    }
    interfaces(&mut report)?;
    oldest_compiler(&mut report)?;
    let judged = deny.map(drop).map_err(|error| {
        let rest = "the crates of other projects were not judged";
        Skipped(format!("audit: SKIPPED, {rest}: cargo-deny cannot be had: {}", last(&error))).into()
    });
    if judged.is_ok() || !report.is_empty() {
        report.close("audit")?;
    }
    judged
}

/// Judges the crates of other projects.
fn crates(report: &mut Report, deny: &Path, with_advisories: bool) {
    let deny = |arguments: &[&str]| {
        let mut line = command(&deny.to_string_lossy(), arguments);
        line.current_dir(layout::root());
        line
    };
    for what in ["licenses", "sources", "bans"] {
        report.check(&format!("cargo-deny: {what}"), run(deny(&["check", "--hide-inclusion-graph", what])));
    }
    if !with_advisories {
        return;
    }
    match capture(deny(&["fetch", "db"])) {
        Ok(_) => report.check("cargo-deny: advisories", run(deny(&["check", "--disable-fetch", "advisories"]))),
        Err(error) => report.skip("cargo-deny: advisories", &format!("RustSec's list cannot be had: {}", last(&error))),
    }
}

/// The last line of an error that is not empty.
fn last(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_string()
}

/// A cargo tool, perhaps with `@` and a version: that on `PATH`, or one that is installed into
/// `target/tools` first.
fn tool(wanted: &str) -> Result<PathBuf> {
    let name = wanted.split('@').next().unwrap_or_default();
    let folder = layout::target().join("tools");
    let installed = folder.join("bin").join(name);
    if let Some(found) = which(name).or_else(|| installed.exists().then_some(installed.clone())) {
        return Ok(found);
    }
    println!("installing {wanted} into {}", folder.display());
    // Compilation takes far longer than the work of the tool.
    let mut install = cargo(["install", wanted, "--locked", "--quiet", "--debug", "--root"]);
    install.env("CARGO_PROFILE_DEV_DEBUG", "false");
    // cargo runs outside the checkout, whose settings would hold for the tool, too.
    install.arg(&folder).current_dir(std::env::temp_dir());
    run(install)?;
    Ok(installed)
}

/// Compares public interfaces with those of the last tag.
fn interfaces(report: &mut Report) -> Result<()> {
    let name = "cargo-semver-checks";
    let root = layout::root();
    let tags = ["-C", &root.to_string_lossy(), "tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname"];
    let tags = capture(command("git", tags))?;
    let Some(tag) = tags.lines().next() else {
        report.skip(name, "no release has a tag yet, so there is nothing to compare with");
        return Ok(());
    };
    let tool = match tool(name) {
        Ok(tool) => tool,
        Err(error) => {
            report.skip(name, &format!("it cannot be had: {}", last(&error)));
            return Ok(());
        }
    };
    let mut line = Command::new(tool);
    line.args(["semver-checks", "--baseline-rev", tag]).current_dir(&root);
    line.args(PUBLIC.iter().flat_map(|package| ["--package", *package]));
    report.check(&format!("{name} against {tag}"), run(line));
    Ok(())
}

/// The version of Rust that the workspace promises, as its manifest states it.
const PROMISED: &str = env!("CARGO_PKG_RUST_VERSION");

/// Whether a compiler's own line, such as `rustc 1.95.0 (…)`, is of a version such as `1.95`.
fn is_of(line: &str, version: &str) -> bool {
    let own = line.split_whitespace().nth(1).unwrap_or_default();
    own.strip_prefix(version).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Checks the shipped crates with the oldest compiler. If this is the compiler in use, all other
/// checks have done so.
fn oldest_compiler(report: &mut Report) -> Result<()> {
    let name = "rust-version";
    let used = layout::rustc(["--version"])?;
    if is_of(&used, PROMISED) {
        println!("the compiler in use is the oldest one: {used}");
        report.check(name, Ok(()));
        return Ok(());
    }
    let is_there = || capture(command("rustup", ["run", PROMISED, "rustc", "--version"]));
    let installed = is_there().or_else(|_| {
        run(command("rustup", ["toolchain", "install", "--profile", "minimal", PROMISED]))?;
        is_there()
    });
    if let Err(error) = installed {
        report.skip(name, &format!("a compiler of version {PROMISED} cannot be had: {}", last(&error)));
        return Ok(());
    }
    let mut check = command("rustup", ["run", PROMISED, "cargo", "check", "--locked"]);
    check.args(tidy::tested_packages().chain(["--package", "neap-cli"]));
    for variable in ["RUSTC", "CARGO", "RUSTUP_TOOLCHAIN"] {
        check.env_remove(variable);
    }
    check.env("CARGO_TARGET_DIR", layout::target().join("oldest")).current_dir(layout::root());
    report.check(name, run(check));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiler_of_another_version_is_told_apart() {
        for line in ["rustc 1.95.0 (59807616e 2026-04-14)", "rustc 1.95"] {
            assert!(is_of(line, "1.95"), "{line}");
        }
        for line in ["rustc 1.96.0", "rustc 1.950.0", "rustc 1.9.5", "1.95"] {
            assert!(!is_of(line, "1.95"), "{line}");
        }
    }
}
