//! Programs of `tests/programs` that are linked statically, with `libneap_malloc.a` as their
//! malloc.

use core::time::Duration;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::layout;
use crate::process::{capture, command, observe};
use crate::programs::Left;
use crate::report::Report;
use crate::smoke::{complaints, plain};
use crate::target::Target;

/// The programs and their arguments.
const PROGRAMS: &[(&str, &[&str])] = &[
    ("family.c", &[]),
    ("realloc_ladder.c", &[]),
    ("fork_storm.c", &["20"]),
    ("fork_streams.c", &[]),
    ("stack_cache.c", &[]),
    ("thread_storm.c", &["10000"]),
    ("own_area.c", &[]),
    ("small_stack.c", &[]),
    ("signals_and_migration.c", &["2"]),
    ("producer_consumer.c", &["4", "200000"]),
    ("vfork_children.c", &[]),
    ("operator_new.cpp", &[]),
    ("replaced_new.cpp", &[]),
];

/// Links each program for `target` with the archive in `archive`, and runs it. Skips those of
/// `left`.
pub(crate) fn into(report: &mut Report, target: Target, archive: &Path, scratch: &Path, left: &[Left]) {
    for (file, arguments) in PROGRAMS {
        let name = format!("{file} (libneap_malloc.a)");
        match left.iter().find(|(left, _)| left == file) {
            Some((_, reason)) => report.skip(&name, reason),
            None => report.check(&name, one(target, archive, scratch, file, arguments)),
        }
    }
}

fn one(target: Target, archive: &Path, scratch: &Path, file: &str, arguments: &[&str]) -> Result<()> {
    let source = layout::root().join("tests/programs").join(file);
    let program = scratch.join(format!("static_{}", source.file_stem().unwrap_or_default().display()));
    let compiler = target.tool(if file.ends_with(".cpp") { "g++" } else { "gcc" });
    let mut compiler = command(&compiler, ["-O1", "-g", "-Wall"]);
    compiler.args(["-fno-builtin", "-pthread", "-static", "-o"]).arg(&program).arg(&source);
    compiler.arg("-L").arg(archive).arg("-lneap_malloc");
    capture(compiler)?;
    let mut line = target.start(&program);
    line.args(arguments);
    plain(&mut line);
    let found = observe(line, Duration::from_secs(120))?;
    complaints(&found)?;
    ensure!(found.success() && found.stdout == b"ok\n", "{}", found.summary());
    Ok(())
}
