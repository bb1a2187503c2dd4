//! The oldest and the newest compiler. `cargo xtask audit` checks the crates of the libraries and
//! the command with the version that the workspace promises. `cargo xtask newest-rust` runs the
//! unit tests of the libraries' crates with the newest stable version, which must not warn.
//!
//! If the oldest is the compiler in use, all other checks have been made with it. rustup installs a
//! missing one by its number, so the toolchain `stable` of this machine stays as it is.

use core::time::Duration;
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::{capture, command, last_line, observe, run};
use crate::report::Report;
use crate::source_rules::tidy;
use crate::{Skipped, layout};

/// The version of Rust that the workspace promises, as its manifest states it.
const PROMISED: &str = env!("CARGO_PKG_RUST_VERSION");

/// Whether a compiler's own line, such as `rustc 1.95.0 (…)`, is of a version such as `1.95`.
fn is_of(line: &str, version: &str) -> bool {
    let own = line.split_whitespace().nth(1).unwrap_or_default();
    own.strip_prefix(version).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The newest stable version in the text of `rustup check`.
fn newest_stable(text: &str) -> Option<&str> {
    let line = text.lines().find(|line| line.starts_with("stable-"))?;
    // Behind an arrow if an update can be had, else behind the colon.
    let (_, version) = line.rsplit_once(" -> ").or_else(|| line.rsplit_once(": "))?;
    version.split_whitespace().next().filter(|version| version.starts_with(|c: char| c.is_ascii_digit()))
}

/// The newest stable version that rustup can install.
fn newest_version() -> Result<String> {
    // Its status is not 0 if an update can be had.
    let check = observe(command("rustup", ["check"]), Duration::from_secs(120)).context("install Rust with rustup")?;
    let said = String::from_utf8_lossy(&check.stdout);
    let version = newest_stable(&said).with_context(|| {
        let how = check.summary().replace('\n', " ");
        format!("`rustup check` names no stable version ({how}): run `rustup toolchain install stable` with a network")
    })?;
    Ok(version.to_string())
}

/// Whether the compiler in use is of a version.
fn is_in_use(version: &str) -> Result<bool> {
    let used = layout::rustc(["--version"])?;
    let is_used = is_of(&used, version);
    if is_used {
        println!("the compiler in use is that of {version}: {used}");
    }
    Ok(is_used)
}

/// Installs a compiler if it is missing. Returns cargo with it, and with its own target folder.
fn cargo(version: &str, folder: &str, arguments: &[&str]) -> Result<Command> {
    let is_there = || capture(command("rustup", ["run", version, "rustc", "--version"]));
    is_there().or_else(|_| {
        run(command("rustup", ["toolchain", "install", "--profile", "minimal", version]))?;
        is_there()
    })?;
    let mut cargo = command("rustup", ["run", version, "cargo"]);
    cargo.args(arguments);
    for variable in ["RUSTC", "CARGO", "RUSTUP_TOOLCHAIN"] {
        cargo.env_remove(variable);
    }
    cargo.env("CARGO_TARGET_DIR", layout::target().join(folder)).current_dir(layout::root());
    Ok(cargo)
}

/// Checks the crates of the libraries and the command with the oldest compiler.
pub(crate) fn oldest(report: &mut Report) -> Result<()> {
    let name = "rust-version";
    if is_in_use(PROMISED)? {
        report.check(name, Ok(()));
        return Ok(());
    }
    match cargo(PROMISED, "oldest", &["check", "--locked"]) {
        Ok(mut check) => {
            check.args(tidy::tested_packages().chain(["--package", "neap-cli"]));
            report.check(name, run(check));
        }
        Err(error) => {
            report.skip(name, &format!("a compiler of version {PROMISED} cannot be had: {}", last_line(&error)));
        }
    }
    Ok(())
}

/// Runs the unit tests of the libraries' crates with the newest stable compiler.
///
/// # Errors
/// [`Skipped`] if this compiler cannot be had.
pub(crate) fn newest() -> Result<()> {
    let skipped =
        |error: &anyhow::Error| Skipped(format!("newest-rust: SKIPPED, nothing was tested: {}", last_line(error)));
    let version = newest_version().map_err(|error| skipped(&error))?;
    let mut test = cargo(&version, "newest", &["test", "--locked", "--lib"]).map_err(|error| skipped(&error))?;
    test.args(tidy::tested_packages()).env("RUSTFLAGS", "-D warnings");
    run(test)?;
    println!("newest-rust: unit tests of the libraries' crates passed with {version}, without a warning");
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

    #[test]
    fn newest_stable_version_is_that_of_an_update() {
        let nightly = "nightly-x86_64-unknown-linux-gnu - up to date: 1.101.0-nightly (92b5b8c87 2026-10-29)\n";
        for line in [
            "stable-x86_64-unknown-linux-gnu - update available: 1.95.0 (59807616e 2026-04-14) -> 1.99.1 (58cf8f9c3 2026-10-13)",
            "stable-x86_64-unknown-linux-gnu - up to date: 1.99.1 (58cf8f9c3 2026-10-13)",
            "stable-x86_64-unknown-linux-gnu - Update available : 1.95.0 (59807616e 2026-04-14) -> 1.99.1 (58cf8f9c3)",
        ] {
            assert_eq!(
                newest_stable(&format!("{nightly}{line}\nrustup - up to date: 1.29.0\n")),
                Some("1.99.1"),
                "{line}"
            );
        }
        assert_eq!(newest_stable(nightly), None);
        assert_eq!(newest_stable("stable-x86_64-unknown-linux-gnu - error: no network\n"), None);
    }
}
