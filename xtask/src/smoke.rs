//! `cargo xtask smoke`: programs that know nothing of neap, run on its malloc.
//!
//! Each real program runs once without the library and once per mode under it. Standard output and
//! exit status must be equal, and neither the loader nor neap may complain. Programs that are not
//! installed are counted as skipped. The real programs are listed in installed.rs; the
//! self-checking ones of `tests/programs` follow (programs.rs). The first check asks the loader
//! which `malloc` a preloaded program gets: without it, all later ones could pass on the system's
//! malloc.

use core::time::Duration;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail, ensure};

use crate::installed::{INSTALLED, NOT_ALL_THERE, Program};
use crate::process::{self, Outcome, capture, need, observe, which};
use crate::report::Report;
use crate::target::Target;
use crate::{lanes, layout, programs};

/// A mode of the runs.
pub(crate) struct Mode {
    pub(crate) name: &'static str,
    /// Environment variables of the mode.
    pub(crate) variables: &'static [(&'static str, &'static str)],
    /// The C file of `tests/programs`, without `.c`, of a library that is preloaded as well, if
    /// any.
    pub(crate) beside: Option<&'static str>,
}

const fn mode(name: &'static str, variables: &'static [(&'static str, &'static str)]) -> Mode {
    Mode { name, variables, beside: None }
}

const NO_RSEQ: &[(&str, &str)] = &[("GLIBC_TUNABLES", "glibc.pthread.rseq=0")];

pub(crate) const DEFAULT: Mode = mode("default", &[]);

pub(crate) const MODES: &[Mode] = &[
    DEFAULT,
    mode("rseq off", &[("NEAP", "rseq:off")]),
    mode("background off", &[("NEAP", "background:off")]),
    mode("two nodes", &[("NEAP", "nodes:2")]),
    mode("glibc without rseq", NO_RSEQ),
    Mode { beside: Some("rseq_in_front"), ..mode("rseq in front", NO_RSEQ) },
];

/// `smoke [--library FILE] [NAME...]`.
pub(crate) fn command(arguments: &[String]) -> Result<()> {
    let (library, names) = match arguments {
        [option, file, names @ ..] if option == "--library" => {
            (fs::canonicalize(file).with_context(|| file.clone())?, names)
        }
        [option] if option == "--library" => bail!("--library needs the name of a file"),
        names => (layout::built_library()?, names),
    };
    let mut report = Report::default();
    into(&mut report, &library, names)?;
    report.close("smoke")
}

/// All programs whose name contains one of `names`, or all, counted in `report`.
pub(crate) fn into(report: &mut Report, library: &Path, names: &[String]) -> Result<()> {
    need("gcc", &["gcc", "libc6-dev"])?;
    need("g++", &["g++"])?;
    let scratch = layout::target().join("smoke");
    fs::create_dir_all(&scratch)?;
    for name in MODES.iter().filter_map(|mode| mode.beside) {
        // The library starts before the first malloc, as the C library does.
        let source = layout::root().join("tests/programs").join(name).with_extension("c");
        programs::compile_shared(Target::Native, &source, &beside(name), &["-Wl,-z,initfirst"])?;
    }
    println!("programs under {}", library.display());
    report.check("malloc is the library's", preload_takes_effect(library, &scratch));
    let chosen = |name: &str| names.is_empty() || names.iter().any(|wanted| name.contains(wanted.as_str()));
    compare_all(report, library, &scratch.join("work"), &chosen)?;
    programs::into(report, library, &scratch, &chosen)
}

/// Checks that preloading takes effect: a program without the library would pass every comparison.
fn preload_takes_effect(library: &Path, scratch: &Path) -> Result<()> {
    let source = layout::root().join("tests/programs/whose_malloc.c");
    let program = programs::compile(Target::Native, &source, &["-fno-builtin"], scratch)?;
    let mut ask = Command::new(program);
    preload(&mut ask, library, &DEFAULT);
    let answer = capture(ask)?;
    for line in answer.lines() {
        let from = line.rsplit(' ').next().unwrap_or_default();
        ensure!(fs::canonicalize(from).ok() == fs::canonicalize(library).ok(), "{line}");
    }
    Ok(())
}

/// Sets the environment of a preloaded program. Variables that cargo sets for xtask do not reach
/// it.
pub(crate) fn preload(command: &mut Command, library: &Path, mode: &Mode) {
    preload_all(command, &[library], mode);
}

/// Sets the environment of a program with several preloaded libraries.
pub(crate) fn preload_all(command: &mut Command, libraries: &[&Path], mode: &Mode) {
    plain(command);
    let beside = mode.beside.map(beside);
    let names: Vec<&OsStr> = libraries.iter().copied().chain(beside.as_deref()).map(Path::as_os_str).collect();
    command.env("LD_PRELOAD", names.join(OsStr::new(" "))).envs(mode.variables.iter().copied());
}

/// The file of a library that is preloaded beside neap's.
fn beside(name: &str) -> PathBuf {
    layout::target().join("smoke").join(name).with_extension("so")
}

/// Sets the environment of a program without the library.
pub(crate) fn plain(command: &mut Command) {
    for variable in ["LD_LIBRARY_PATH", "NEAP", "GLIBC_TUNABLES", "LD_PRELOAD"] {
        command.env_remove(variable);
    }
    command.env("LC_ALL", "C");
}

/// Compares the chosen programs, side by side.
fn compare_all(report: &mut Report, library: &Path, work: &Path, chosen: &dyn Fn(&str) -> bool) -> Result<()> {
    let programs: Vec<&Program> = INSTALLED.iter().filter(|program| chosen(program.name)).collect();
    let report = Mutex::new(report);
    lanes::each(lanes::WAITING, &programs, |program| {
        match program.needs.iter().find(|needed| which(needed).is_none()) {
            Some(missing) => locked(&report).skip(program.name, &format!("{missing} is not installed")),
            None => compare(&report, program, library, &work.join(program.name.replace([' ', '\''], "-")))?,
        }
        Ok(())
    })
}

/// The report, also after a panic of another thread: that fails the run anyway.
pub(crate) fn locked<'a, 'b>(report: &'a Mutex<&'b mut Report>) -> MutexGuard<'a, &'b mut Report> {
    report.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one program without the library and in every mode, each in a fresh `folder`, and compares.
fn compare(report: &Mutex<&mut Report>, program: &Program, library: &Path, folder: &Path) -> Result<()> {
    let limit = Duration::from_secs(300);
    let fresh = || -> Result<Command> {
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        fs::create_dir_all(folder)?;
        for (file, text) in program.files {
            fs::write(folder.join(file), text)?;
        }
        let (first, rest) = program.line.split_first().context("an empty command line")?;
        let mut line = process::command(first, rest);
        line.current_dir(folder);
        Ok(line)
    };
    let mut line = fresh()?;
    plain(&mut line);
    let expected = observe(line, limit)?;
    if expected.status.and_then(|status| status.code()) == Some(NOT_ALL_THERE) {
        locked(report).skip(program.name, String::from_utf8_lossy(&expected.stderr).trim());
        return Ok(());
    }
    for mode in MODES {
        let mut line = fresh()?;
        preload(&mut line, library, mode);
        let found = observe(line, limit)?;
        locked(report).check(&format!("{} ({})", program.name, mode.name), same(&expected, &found));
    }
    Ok(())
}

/// Whether both runs gave the same, and neither the loader nor neap complained in the preloaded
/// one.
fn same(expected: &Outcome, found: &Outcome) -> Result<()> {
    ensure!(expected.status.is_some(), "without the library it was stopped by the time limit");
    complaints(found)?;
    ensure!(
        expected.status == found.status,
        "without the library: {}; with it: {}",
        expected.summary(),
        found.summary()
    );
    if expected.stdout != found.stdout {
        let differ = first_difference(&expected.stdout, &found.stdout);
        bail!("its output differs, first in line {differ}");
    }
    Ok(())
}

/// Lines on standard error that come from the loader (not preloaded) or from neap (an abort, a bad
/// option).
pub(crate) fn complaints(found: &Outcome) -> Result<()> {
    let text = String::from_utf8_lossy(&found.stderr);
    let bad = text.lines().find(|line| line.starts_with("neap: ") || line.contains("ld.so: object"));
    match bad {
        Some(line) => bail!("{line}"),
        None => Ok(()),
    }
}

fn first_difference(expected: &[u8], found: &[u8]) -> String {
    let (expected, found) = (String::from_utf8_lossy(expected), String::from_utf8_lossy(found));
    let (mut a, mut b) = (expected.lines(), found.lines());
    let mut number = 1;
    loop {
        match (a.next(), b.next()) {
            (Some(x), Some(y)) if x == y => number += 1,
            (x, y) => {
                return format!("{number}: `{}` became `{}`", x.unwrap_or(""), y.unwrap_or(""));
            }
        }
    }
}
