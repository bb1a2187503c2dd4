//! `cargo xtask old-glibc`: the preload library under an older C library, in a root of an older
//! Debian.
//!
//! The programs of `tests/programs` are compiled in that root, since programs of this machine ask
//! for its own C library. They run in the default mode. A program that an old compiler or C library
//! cannot have is named with its reason.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::process::{capture, command, need};
use crate::{Skipped, build, layout, programs};

/// A release of Debian with glibc 2.31, which has threads and the dynamic linker in libraries of
/// their own, and registers no thread for rseq.
const SUITE: &str = "bullseye";

/// Programs that cannot run there, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    ("family.c", "mallinfo2 is of glibc 2.33"),
    ("fork_stopped.c", "before glibc 2.36, a second fork in another thread waits in the C library"),
    ("unwind_steps.c", "__builtin_thread_pointer is of GCC 11"),
];

/// Runs the programs.
pub(crate) fn check() -> Result<()> {
    need("mmdebstrap", &["mmdebstrap"])?;
    build::build()?;
    let stage = layout::target().join("old_glibc");
    if stage.exists() {
        fs::remove_dir_all(&stage)?;
    }
    let programs = stage.join("programs");
    fs::create_dir_all(&programs)?;
    for entry in fs::read_dir(layout::root().join("tests/programs"))? {
        let entry = entry?;
        fs::copy(entry.path(), programs.join(entry.file_name()))?;
    }
    fs::copy(layout::library(), programs.join("libneap_malloc.so"))?;
    let is_left_out = |line: &str| LEFT_OUT.iter().any(|(file, _)| line.split(' ').next() == Some(file));
    let list: Vec<String> = programs::lines().into_iter().filter(|line| !is_left_out(line)).collect();
    fs::write(programs.join("list"), list.join("\n") + "\n")?;
    let stage = fs::canonicalize(&stage)?;
    let mut root = command("mmdebstrap", ["--quiet", "--variant=apt", "--include=gcc,g++,libc6-dev", "--format=null"]);
    root.args([SUITE, "/dev/null"]);
    root.arg(format!("--customize-hook=copy-in {}/programs /tmp", stage.display()));
    // The script's status is read from its output, so a failure of this command is one of the root.
    let script = "/tmp/programs/old_root.sh /tmp/programs/libneap_malloc.so </tmp/programs/list";
    root.arg(format!(
        "--customize-hook=chroot \"$1\" sh -c '{{ {script}; echo status $?; }} >/tmp/result 2>&1; \
         /lib/*/libc.so.6 | head -1 >>/tmp/result'"
    ));
    root.arg(format!("--customize-hook=copy-out /tmp/result {}", stage.display()));
    // Without a mirror there is no root.
    if let Err(error) = capture(root) {
        return Err(Skipped(format!("cannot make a root file system of {SUITE}: {error:#}")).into());
    }
    let result = fs::read_to_string(stage.join("result")).context("the programs did not run")?;
    print!("{result}");
    for (file, reason) in LEFT_OUT {
        println!("  skipped  {file}: {reason}");
    }
    ensure!(result.lines().any(|line| line == "status 0"), "programs failed with the C library of {SUITE}");
    let passed = result.lines().filter(|line| line.starts_with("  ok ")).count();
    ensure!(passed == list.len(), "{passed} of {} programs passed", list.len());
    Ok(())
}
