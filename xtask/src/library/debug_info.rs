//! Splits debug information off installed programs and libraries.
//!
//! The file for debuggers has the place by which gdb and perf look for it:
//! `.build-id/<two digits>/<the others>.debug` in their folder for such files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::packages::manifest::{Installation, set_mode};
use crate::process::{capture, command};

/// Installs `from` without debug information as `place`, and the information in a file of its own.
pub(crate) fn split(installation: &mut Installation, from: &Path, place: &Path) -> Result<()> {
    let debug = installation.places.debugdir.join(file_for(&build_id(from)?));
    let debug = installation.make_room(&debug)?;
    objcopy(&["--only-keep-debug"], from, &debug)?;
    // The file is data for debuggers, not a program.
    set_mode(&debug, 0o644)?;
    let file = installation.make_room(place)?;
    let link = format!("--add-gnu-debuglink={}", debug.display());
    objcopy(&["--strip-unneeded", &link], from, &file)?;
    set_mode(&file, 0o755)
}

/// Runs objcopy of binutils, or the program that the variable `OBJCOPY` names: another target may
/// need its own.
pub(crate) fn objcopy(options: &[&str], from: &Path, to: &Path) -> Result<()> {
    let program = std::env::var("OBJCOPY").unwrap_or_else(|_| "objcopy".to_string());
    let mut objcopy = command(&program, options);
    objcopy.args([from, to]);
    capture(objcopy).map(|_| ())
}

/// The place of the debug information of a build, in a folder for such files.
pub(crate) fn file_for(build_id: &str) -> PathBuf {
    let (folder, name) = build_id.split_at(2.min(build_id.len()));
    [".build-id", folder, &format!("{name}.debug")].iter().collect()
}

/// The build id of a program or library, in hexadecimal.
pub(crate) fn build_id(file: &Path) -> Result<String> {
    let notes = capture(command("readelf", ["-nW", &file.to_string_lossy()]))?;
    let id = notes.lines().find_map(|line| Some(line.split_once("Build ID: ")?.1));
    Ok(id.with_context(|| format!("{} has no build id", file.display()))?.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_file_lies_where_debuggers_look() {
        assert_eq!(file_for("abcdef"), Path::new(".build-id/ab/cdef.debug"));
    }
}
