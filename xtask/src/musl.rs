//! `cargo xtask test --target x86_64-unknown-linux-musl`: tests with musl.
//!
//! The crates' tests as static programs, the programs of `tests/programs` under a preload library
//! for musl, and static Rust programs with the packaged crate.

use anyhow::Result;

use crate::library::fast_path;
use crate::library::sequences;
use crate::library::symbols;
use crate::process::run;
use crate::programs::{self, Left};
use crate::report::Report;
use crate::smoke::MODES;
use crate::source_rules::tidy;
use crate::target::Target;
use crate::test_programs::Tests;
use crate::{dependent, layout};

/// Programs that are for another C library, or fail with musl's own malloc.
const LEFT_PROGRAMS: &[Left] = &[
    ("operator_new.cpp", "musl-gcc has no C++"),
    ("replaced_new.cpp", "musl-gcc has no C++"),
    ("replaced_arrays.cpp", "musl-gcc has no C++"),
    ("linked_new.cpp", "musl-gcc has no C++"),
    ("dlopen_new.c", "its library is C++, which musl-gcc does not have"),
    ("outer_interposer.cpp", "musl-gcc has no C++"),
    ("coroutine_stack.c", "musl has no getcontext"),
    ("exit_handlers.c", "musl has no on_exit"),
    ("deep_bind.c", "musl has no RTLD_DEEPBIND"),
    ("unwind_signals.c", "musl-gcc links the unwinder of glibc"),
    ("unwind_steps.c", "musl-gcc links the unwinder of glibc"),
    (
        "main_thread_ends.c",
        "hangs with musl's own malloc: before 1.2.4 a forked child keeps its list of threads locked",
    ),
    ("fork_stopped.c", "musl's fork holds a lock while handlers run, so one in a signal handler waits for another one"),
];

/// Runs all tests with musl.
pub(crate) fn test() -> Result<()> {
    let target = Target::Musl;
    target.is_there(false)?;
    let mut report = Report::default();
    let arguments: Vec<_> = tidy::tested_packages().collect();
    Tests { what: "what ships", target, arguments: &arguments }.run(&mut report)?;
    run(target.cargo_of_library()?)?;
    symbols::preloaded(&mut report, target)?;
    fast_path::into(&mut report, target)?;
    sequences::into(&mut report, target)?;
    let scratch = layout::target().join("smoke-musl");
    std::fs::create_dir_all(&scratch)?;
    for mode in MODES.iter().filter(|mode| mode.variables.iter().all(|(name, _)| *name == "NEAP")) {
        programs::elsewhere(&mut report, target, LEFT_PROGRAMS, &scratch, mode)?;
    }
    dependent::for_target(&mut report, target)?;
    report.close("test for musl")
}
