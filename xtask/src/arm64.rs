//! `cargo xtask test --target aarch64-unknown-linux-gnu`: the unit tests of the shipped crates,
//! built for arm64, the programs of `tests/programs` under the preload library, and a Rust program
//! with the packaged crate. Some programs are also linked statically, with `libneap_malloc.a`.
//! `qemu-aarch64` runs each.
//!
//! The emulator passes system calls on to this machine's kernel. It has no rseq, so neap's fallback
//! runs; `cargo xtask vm --target` runs the sequences, and with `--suite` everything. It reorders
//! no memory access.

use anyhow::{Context, Result};

use crate::library::fast_path;
use crate::library::sequences;
use crate::library::symbols;
use crate::process::run;
use crate::programs::{self, Left};
use crate::report::Report;
use crate::smoke::DEFAULT;
use crate::source_rules::tidy;
use crate::target::{ARM64, Target};
use crate::{build, dependent, layout, static_programs};

/// Tests that cannot pass under the emulator, by a part of their name.
const LEFT_TESTS: &[Left] = &[
    ("a_limit_of_data_is_one_of_address_space", "fails under the emulator; `vm --target --suite` runs it"),
    ("what_is_several_mappings_is_not_moved", "fails under the emulator; `vm --target --suite` runs it"),
    ("what_cannot_be_read_ends_it", "fails under the emulator; `vm --target --suite` runs it"),
    ("store_into_a_file_that_was_cut_short_fails", "fails under the emulator; `vm --target --suite` runs it"),
    ("either_word_ends_the_wait", "fails under the emulator; `vm --target --suite` runs it"),
    ("signals_of_the_c_library_and_of_sandboxes_are_not_blocked", "the emulator keeps two signals for itself"),
    ("descriptor_is_high_and_cloexec", "the emulator drops advice about children and core files"),
    ("later_part_maps_separately", "the emulator drops advice about children and core files"),
    ("arenas_begin_anywhere", "the emulator has tables for each reserved page, which fill the memory"),
];

/// Crates whose tests are not run.
const LEFT_CRATES: &[Left] =
    &[("neap", "`vm --target --suite` runs its tests"), ("neap-c", "`vm --target --suite` runs its tests")];

/// Programs that cannot run under the emulator.
const LEFT_PROGRAMS: &[Left] = &[
    ("family.c", "the emulator takes pages that mremap leaves mapped for unmapped"),
    ("misuse.c", "an emulated program cannot execute another one"),
    ("guard.c", "an emulated program cannot execute another one"),
    ("checked.cpp", "an emulated program cannot execute another one"),
    ("fork_storm.c", "the emulator aborts in children of processes with threads"),
    ("fork_race.c", "the emulator aborts in children of processes with threads"),
    ("fork_in_fork.c", "an emulated program cannot execute another one"),
    ("fork_stopped.c", "an emulated program cannot execute another one"),
    ("children.c", "an emulated program cannot execute another one"),
    ("outer_interposer.cpp", "an emulated program cannot execute another one"),
    ("one_thread.c", "an emulated program cannot execute another one"),
    ("address_limit.c", "an emulated program cannot execute another one"),
    ("limit_resident.c", "an emulated program cannot execute another one"),
    ("realloc_ladder.c", "the emulator takes pages that mremap leaves mapped for unmapped"),
    ("own_area.c", "the emulator has no rseq"),
    ("own_thread.c", "the emulator has a thread of its own"),
    ("stack_cache.c", "takes minutes"),
    ("thread_storm.c", "takes minutes"),
    ("clone_children.c", "the emulator makes CLONE_VM without threads a fork"),
    ("vfork_children.c", "the emulator makes vfork a fork"),
    ("unwind_steps.c", "single-steps by a flag of x86-64"),
    ("unwind_signals.c", "fails without neap, too; the virtual machine runs it"),
    ("system_calls.c", "the emulator has no seccomp"),
    ("sandbox.c", "the emulator has no seccomp"),
    ("table_hole.c", "addresses are those of the emulator"),
    ("large_tls.c", "resident memory is counted with the emulator's"),
];

/// Runs all tests that the emulator can run.
pub(crate) fn test() -> Result<()> {
    let target = Target::Arm64;
    target.is_there(true)?;
    let mut report = Report::default();
    report.skip("tests in files of their own", "`vm --target --suite` runs them");
    let mut arguments = vec!["test", "--no-fail-fast", "--lib"];
    for name in tidy::tested() {
        match LEFT_CRATES.iter().find(|(left, _)| *left == name) {
            Some((_, reason)) => report.skip(name, reason),
            None => arguments.extend(["--package", name]),
        }
    }
    arguments.push("--");
    for (name, reason) in LEFT_TESTS {
        report.skip(name, reason);
        arguments.extend(["--skip", name]);
    }
    report.check("unit tests of what ships", run(target.cargo(&arguments)));
    run(target.cargo_of_library()?)?;
    symbols::preloaded(&mut report, target)?;
    fast_path::into(&mut report, target)?;
    sequences::into(&mut report, target)?;
    let scratch = layout::target().join("smoke-arm64");
    std::fs::create_dir_all(&scratch)?;
    programs::elsewhere(&mut report, target, LEFT_PROGRAMS, &scratch, &DEFAULT)?;
    run(build::archive(ARM64))?;
    let archive = layout::malloc_archive_for(ARM64);
    let folder = archive.parent().context("a folder")?;
    static_programs::into(&mut report, target, folder, &scratch, LEFT_PROGRAMS);
    dependent::for_target(&mut report, target)?;
    report.close("test for arm64")
}
