//! `cargo xtask test --target aarch64-unknown-linux-gnu`: the tests of what ships, built for arm64,
//! and the programs of `tests/programs` under the preload library, each run by `qemu-aarch64`.
//!
//! The emulator passes system calls on to this machine's kernel. It has no rseq, so neap's fallback
//! runs; `cargo xtask vm --target` runs the sequences. It reorders no memory access.

use anyhow::Result;

use crate::process::run;
use crate::programs::{self, Left};
use crate::report::Report;
use crate::target::Target;
use crate::{fast_path, layout, symbols, tidy};

/// Tests that cannot pass under the emulator, by a part of their name.
const LEFT_TESTS: &[Left] = &[];

/// Programs that cannot.
const LEFT_PROGRAMS: &[Left] = &[];

/// Runs all of it.
pub(crate) fn test() -> Result<()> {
    let target = Target::Arm64;
    target.is_there(true)?;
    let mut report = Report::default();
    let mut arguments = vec!["test", "--no-fail-fast", "--tests"];
    for name in tidy::RING_0.iter().filter(|name| !tidy::LOADED.contains(name)) {
        arguments.extend(["--package", *name]);
    }
    arguments.push("--");
    for (name, reason) in LEFT_TESTS {
        report.skip(name, reason);
        arguments.extend(["--skip", name]);
    }
    report.check("cargo test of what ships", run(target.cargo(&arguments)));
    run(target.cargo(&["build", "--release", "--package", "neap-malloc"]))?;
    symbols::preloaded(&mut report, target)?;
    fast_path::into(&mut report, target)?;
    let scratch = layout::target().join("smoke-arm64");
    std::fs::create_dir_all(&scratch)?;
    programs::emulated(&mut report, target, LEFT_PROGRAMS, &scratch)?;
    report.close("test for arm64")
}
