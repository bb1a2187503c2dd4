//! `cargo xtask audit`: the crates of other projects, the public interfaces since the last release,
//! and the oldest compiler.
//!
//! | check | tool |
//! |---|---|
//! | licences, sources, duplicates and wildcards, by `deny.toml` | cargo-deny |
//! | known security holes | cargo-deny, with RustSec's list |
//! | the version against changes of the packaged crates' interfaces | cargo-semver-checks |
//! | `rust-version` | that compiler (compilers.rs) |
//!
//! The tools are installed into `target/tools` when they are missing. A check that cannot be made
//! here is skipped with its reason. Without cargo-deny, or where RustSec's list is asked for and
//! cannot be had, the whole command counts as skipped.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::process::{capture, cargo, command, last_line, run, which};
use crate::report::Report;
use crate::{Skipped, compilers, dependent, layout};

/// The version of cargo-deny that is installed. A later one may read `deny.toml` in another way.
const DENY: &str = "cargo-deny@0.20.2";

/// The version of cargo-semver-checks that is installed. A later one may know other changes, and
/// need a later compiler than the one in use.
const SEMVER_CHECKS: &str = "cargo-semver-checks@0.51.0";

/// Runs the checks whose results depend on the tree alone: those without RustSec's list.
///
/// # Errors
/// [`Skipped`] if cargo-deny cannot be had and all other checks passed.
pub(crate) fn check() -> Result<()> {
    checks(false)
}

/// Runs all checks.
///
/// # Errors
/// [`Skipped`] if cargo-deny or RustSec's list cannot be had and all other checks passed.
pub(crate) fn full() -> Result<()> {
    checks(true)
}

fn checks(with_advisories: bool) -> Result<()> {
    let mut report = Report::default();
    let judged = match tool(DENY) {
        Ok(deny) => crates(&mut report, &deny, with_advisories),
        Err(error) => {
            let rest = "the crates of other projects were not judged";
            Err(Skipped(format!("audit: SKIPPED, {rest}: cargo-deny cannot be had: {}", last_line(&error))).into())
        }
    };
    interfaces(&mut report)?;
    compilers::oldest(&mut report)?;
    if judged.is_ok() || !report.is_empty() {
        report.close("audit")?;
    }
    judged
}

/// Judges the crates of other projects with cargo-deny.
///
/// # Errors
/// [`Skipped`] if RustSec's list is asked for and cannot be had.
fn crates(report: &mut Report, deny: &Path, with_advisories: bool) -> Result<()> {
    let deny = |arguments: &[&str]| {
        let mut line = command(&deny.to_string_lossy(), arguments);
        line.current_dir(layout::root());
        line
    };
    for what in ["licenses", "sources", "bans"] {
        report.check(&format!("cargo-deny: {what}"), run(deny(&["check", "--hide-inclusion-graph", what])));
    }
    if with_advisories {
        let why = "no known security hole was looked for: RustSec's list cannot be had";
        capture(deny(&["fetch", "db"]))
            .map_err(|error| Skipped(format!("audit: SKIPPED, {why}: {}", last_line(&error))))?;
        report.check("cargo-deny: advisories", run(deny(&["check", "--disable-fetch", "advisories"])));
    }
    Ok(())
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
    let tool = match tool(SEMVER_CHECKS) {
        Ok(tool) => tool,
        Err(error) => {
            report.skip(name, &format!("it cannot be had: {}", last_line(&error)));
            return Ok(());
        }
    };
    report.check(&format!("{name} against {tag}"), run(comparison(&tool, tag)));
    Ok(())
}

/// Compares every packaged crate: programs reach types of the others through the crate `neap`, and
/// one released `neap` runs with any later release of them in its series.
fn comparison(tool: &Path, tag: &str) -> Command {
    let mut line = Command::new(tool);
    line.args(["semver-checks", "--baseline-rev", tag]).current_dir(layout::root());
    line.args(dependent::packaged().flat_map(|package| ["--package", package]));
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// A tool that fails if its arguments begin with `word`.
    fn failing(name: &str, word: &str) -> PathBuf {
        let file = std::env::temp_dir().join(format!("neap-audit-{name}-{}", std::process::id()));
        fs::write(&file, format!("#!/bin/sh\n[ \"$1\" != {word} ] || {{ echo 'no network' >&2; exit 1; }}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        file
    }

    #[test]
    fn list_of_advisories_that_cannot_be_had_is_no_success() {
        let deny = failing("fetch", "fetch");
        let mut report = Report::default();
        assert!(crates(&mut report, &deny, false).is_ok(), "no list is asked for");
        let error = crates(&mut report, &deny, true).unwrap_err();
        assert!(error.is::<Skipped>() && error.to_string().ends_with("had: no network"), "{error}");
        fs::remove_file(deny).unwrap();
        report.close("made up").unwrap();
    }

    #[test]
    fn interfaces_are_those_of_all_packaged_crates() {
        let line = comparison(Path::new("tool"), "v1.2.3");
        let words: Vec<&str> = line.get_args().filter_map(|word| word.to_str()).collect();
        assert_eq!(words[..3], ["semver-checks", "--baseline-rev", "v1.2.3"]);
        for name in ["neap", "neap-pressure", "neap-groups", "neap-os"] {
            assert!(words.windows(2).any(|pair| pair == ["--package", name]), "{name}: {words:?}");
        }
        assert!(!words.contains(&"neap-malloc"), "{words:?}");
    }

    #[test]
    fn crate_that_is_refused_is_a_failure() {
        let deny = failing("check", "check");
        let mut report = Report::default();
        assert!(crates(&mut report, &deny, true).is_ok(), "the report has the failures");
        assert!(report.close("made up").is_err());
        fs::remove_file(deny).unwrap();
    }
}
