//! `cargo xtask vm --suite`: the tests of all shipped crates and programs, on the machine. Each
//! test program of the crates and each program of `tests/programs` is one test there.
//!
//! The suite is for arm64. Outside the machine, an emulator runs arm64's programs one by one,
//! without restartable sequences and without children.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{Guest, tests};
use crate::layout;
use crate::process::{capture, command};
use crate::programs::{self, Left};
use crate::report::Report;
use crate::source_rules::tidy;
use crate::target::Target;
use crate::vm::machine::Shape;

/// Tests of one machine. Its file system, in memory, holds them.
pub(super) const BATCH: usize = 12;

/// Most seconds of one test.
const LIMIT: u32 = 900;

/// Tests that are left out, by the name of a crate's test program or of a C program's file.
const LEFT: &[Left] = &[("unwind_steps.c", "single-steps by a flag of x86-64")];

/// The tests whose names pass `chosen`. `scratch` takes their files.
pub(super) fn guests(
    report: &mut Report,
    target: Target,
    scratch: &Path,
    chosen: &dyn Fn(&str) -> bool,
) -> Result<Vec<Guest>> {
    let mut is_there = |name: &str| {
        if !chosen(name) {
            return false;
        }
        let left = LEFT.iter().find(|(left, _)| *left == name);
        left.inspect(|(name, reason)| report.skip(name, reason)).is_none()
    };
    let one = |name: &str, line: String, files: Vec<PathBuf>| {
        // Each file has the path that it has here, since some programs name a companion by it.
        let place = |path: &Path| path.to_string_lossy().trim_start_matches('/').to_string();
        let files = files.into_iter().map(|path| (place(&path), path)).collect();
        let name = Cow::Owned(name.to_string());
        Guest { name, shape: Shape::TwoNodes, line: Cow::Owned(line), limit: LIMIT, files }
    };
    let mut all = Vec::new();
    let crates: Vec<&str> = tidy::tested().collect();
    for (name, program) in tests(target, &crates)?.iter().filter(|(name, _)| is_there(name)) {
        let stripped = scratch.join(name);
        let mut strip = command(&target.tool("strip"), ["--strip-debug", "-o"]);
        strip.arg(&stripped).arg(program);
        capture(strip)?;
        all.push(one(name, format!("'{}'", stripped.display()), vec![stripped]));
    }
    for line in programs::lines() {
        let (file, arguments) = line.split_once(' ').unwrap_or((&line, ""));
        if !is_there(file) {
            continue;
        }
        let source = layout::root().join("tests/programs").join(file);
        let (program, mut files) = programs::compile_with_libraries(target, &source, scratch)?;
        let line = format!("cd '{}' && LD_PRELOAD=$PRELOAD '{}' {arguments}", scratch.display(), program.display());
        files.push(program);
        all.push(one(file, line, files));
    }
    Ok(all)
}
