//! The files of `contrib/systemd`, checked by `systemd-analyze` and by a program that runs as the
//! drop-in says: part of `cargo xtask prometheus`.
//!
//! `systemd-analyze verify` reads a unit, and the drop-ins in the folder beside it. It asks for the
//! files that the unit executes, so copies name the built command. systemd itself need not run.

use core::time::Duration;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::build::MALLOC_SONAME;
use crate::layout;
use crate::process::{command, observe, which};
use crate::report::Report;

/// The folder, from the root of the sources.
const FOLDER: &str = "contrib/systemd";

/// The unit of the server of metrics, and the command that it executes.
const UNIT: &str = "neap-metrics.service";
const INSTALLED: &str = "/usr/local/bin/neap";

/// The drop-in.
const DROP_IN: &str = "neap.conf";

/// A service that the drop-in changes.
const SERVICE: &str = "[Service]\nExecStart=COMMAND --version\n";

/// Checks the files, counted in a report with other checks.
pub(crate) fn into(report: &mut Report) -> Result<()> {
    let read = |name: &str| {
        let file = layout::root().join(FOLDER).join(name);
        fs::read_to_string(&file).with_context(|| file.display().to_string())
    };
    let (unit, drop_in) = (read(UNIT)?, read(DROP_IN)?);
    report.check(&format!("a program with the variables of {DROP_IN} has the library"), preloads(&drop_in));
    let folder = layout::target().join("systemd");
    let tool = fs::canonicalize(layout::tool()).context("run `cargo xtask build`")?;
    let tool = tool.to_string_lossy();
    for (name, unit, drop_in) in [
        (UNIT, unit.replace(INSTALLED, &tool), None),
        (DROP_IN, SERVICE.replace("COMMAND", &tool), Some(drop_in.as_str())),
    ] {
        let name = format!("systemd-analyze verify {name}");
        if which("systemd-analyze").is_none() {
            report.skip(&name, "install it with `apt-get install systemd`");
            continue;
        }
        report.check(&name, verified(&folder, &unit, drop_in));
    }
    Ok(())
}

/// Lets systemd read a unit with a drop-in, of which it must say nothing: an unknown setting is a
/// warning.
fn verified(folder: &Path, unit: &str, drop_in: Option<&str>) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    let beside = folder.join("server.service.d");
    fs::create_dir_all(&beside)?;
    let file = folder.join("server.service");
    fs::write(&file, unit)?;
    if let Some(text) = drop_in {
        fs::write(beside.join(DROP_IN), text)?;
    }
    let mut verify = command("systemd-analyze", ["verify", "--man=no"]);
    verify.arg(&file);
    let found = observe(verify, Duration::from_secs(60))?;
    let said = String::from_utf8_lossy(&found.stderr);
    ensure!(found.success() && said.trim().is_empty(), "systemd-analyze says: {}: {}", found.summary(), said.trim());
    Ok(())
}

/// The variables that a unit sets for its program.
fn variables(text: &str) -> Vec<(&str, &str)> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("Environment="));
    lines.filter_map(|pair| pair.trim_matches('"').split_once('=')).collect()
}

/// Runs a program with the variables of the drop-in, which name the built library.
fn preloads(drop_in: &str) -> Result<()> {
    let variables = variables(drop_in);
    let value = |wanted: &str| variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| *value);
    ensure!(value("LD_PRELOAD") == Some(MALLOC_SONAME), "{DROP_IN} does not preload {MALLOC_SONAME}: {variables:?}");
    ensure!(value("NEAP").is_some(), "{DROP_IN} does not set NEAP: {variables:?}");
    let library = fs::canonicalize(layout::library()).context("run `cargo xtask build`")?;
    let mut program = command("cat", ["/proc/self/maps"]);
    program.envs(variables.iter().copied()).env("LD_PRELOAD", &library);
    let found = observe(program, Duration::from_secs(60))?;
    let maps = String::from_utf8_lossy(&found.stdout);
    // An unknown option is a message of neap's.
    ensure!(found.success() && found.stderr.is_empty(), "the program: {}", found.summary());
    ensure!(maps.contains(&*library.to_string_lossy()), "the program has no {}", library.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_those_of_lines_with_environment() {
        let text =
            "# Environment=A=1\n[Service]\nEnvironment=NEAP=limit:auto,background:on\nEnvironment=\"B=c d\"\nX=y\n";
        assert_eq!(variables(text), [("NEAP", "limit:auto,background:on"), ("B", "c d")]);
    }

    #[test]
    fn systemd_finds_an_unknown_setting_of_a_drop_in() {
        if which("systemd-analyze").is_none() {
            return;
        }
        let folder = std::env::temp_dir().join(format!("neap-systemd-{}", std::process::id()));
        let unit = SERVICE.replace("COMMAND", "/bin/true");
        verified(&folder, &unit, Some("[Service]\nEnvironment=A=b\n")).unwrap();
        let error = verified(&folder, &unit, Some("[Service]\nEnvirnment=A=b\n")).unwrap_err().to_string();
        assert!(error.contains("Unknown key"), "{error}");
        assert!(verified(&folder, &SERVICE.replace("COMMAND", "/no/such/program"), None).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
