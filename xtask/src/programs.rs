//! The self-checking programs of `tests/programs`, compiled and run under the preload library in
//! every mode.
//!
//! Each is one C or C++ file that prints only `ok` and exits with status 0 on success, and
//! otherwise reports the error on standard error. Programs that do not test behaviour of neap's own
//! run under the system's malloc first: if they pass there, a failure is neap's.

use core::time::Duration;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Result, ensure};

use crate::process::{capture, command, observe, which};
use crate::report::Report;
use crate::smoke::{DEFAULT, MODES, Mode, complaints, locked, plain, preload, preload_all};
use crate::target::Target;
use crate::{contained, lanes, layout};

/// One program of `tests/programs`.
struct SelfCheck {
    file: &'static str,
    arguments: &'static [&'static str],
    /// The program tests behaviour of neap alone, or prints `neap: ` lines of its children.
    only_neap: bool,
}

const fn both(file: &'static str, arguments: &'static [&'static str]) -> SelfCheck {
    SelfCheck { file, arguments, only_neap: false }
}

const fn neap(file: &'static str, arguments: &'static [&'static str]) -> SelfCheck {
    SelfCheck { file, arguments, only_neap: true }
}

/// Those that take longest come first.
const PROGRAMS: &[SelfCheck] = &[
    neap("guard.c", &[]),
    both("address_limit.c", &[]),
    both("sandbox.c", &[]),
    both("table_hole.c", &[]),
    neap("fork_stopped.c", &[]),
    neap("burst_idle.c", &["16", "32", "64"]),
    both("fork_race.c", &["100"]),
    both("system_calls.c", &[]),
    neap("unwind_steps.c", &[]),
    neap("large_tls.c", &[]),
    both("realloc_ladder.c", &[]),
    neap("kept_memory.c", &[]),
    neap("limit_resident.c", &[]),
    neap("one_thread.c", &[]),
    both("signals_and_migration.c", &["2"]),
    both("thread_storm.c", &["10000"]),
    both("linker_lock.c", &["20"]),
    neap("clone_children.c", &[]),
    both("family.c", &[]),
    both("own_malloc.c", &[]),
    both("libc_names.c", &[]),
    both("wrapped_malloc.c", &[]),
    neap("jemalloc.c", &[]),
    neap("misuse.c", &[]),
    neap("checked.cpp", &[]),
    both("fork_storm.c", &["20"]),
    both("fork_handlers.c", &[]),
    both("fork_streams.c", &[]),
    both("fork_in_fork.c", &[]),
    both("stack_cache.c", &[]),
    both("own_thread.c", &[]),
    both("main_thread_ends.c", &[]),
    both("wrapped_threads.c", &[]),
    both("namespaces.c", &[]),
    both("own_area.c", &[]),
    both("small_stack.c", &[]),
    both("coroutine_stack.c", &[]),
    both("dlopen_constructor.c", &[]),
    both("exit_handlers.c", &[]),
    both("operator_new.cpp", &[]),
    both("replaced_new.cpp", &[]),
    both("replaced_arrays.cpp", &[]),
    both("linked_new.cpp", &[]),
    both("dlopen_new.c", &[]),
    both("outer_interposer.cpp", &[]),
    both("deep_bind.c", &[]),
    both("children.c", &[]),
    both("vfork_children.c", &[]),
    both("unwind_signals.c", &[]),
    both("producer_consumer.c", &["4", "200000"]),
];

/// Each program with its arguments, as a line.
pub(crate) fn lines() -> Vec<String> {
    let line = |check: &SelfCheck| [&[check.file], check.arguments].concat().join(" ");
    PROGRAMS.iter().map(line).collect()
}

/// A program for another C library, and that library's compiler.
const MUSL: (&str, &str) = ("musl.c", "musl-gcc");

/// Compiles and runs the program for musl in the modes that preload no other library. Skips it
/// without a compiler.
pub(crate) fn musl(report: &mut Report, library: &Path, scratch: &Path) {
    let (file, compiler) = MUSL;
    if which(compiler).is_none() {
        return report.skip(file, &format!("{compiler} is not installed (apt-get install musl-tools)"));
    }
    let (source, program) = (layout::root().join("tests/programs").join(file), scratch.join("musl"));
    let mut line = command(compiler, ["-O1", "-g", "-Wall", "-fno-builtin", "-pthread", "-o"]);
    line.arg(&program).arg(&source);
    if let Err(error) = capture(line) {
        return report.check(file, Err(error));
    }
    let start = |environment: &dyn Fn(&mut Command)| passes(Command::new(&program), environment);
    report.check(&format!("{file} (musl's malloc)"), start(&plain));
    for mode in MODES.iter().filter(|mode| mode.beside.is_none()) {
        report.check(&format!("{file} ({})", mode.name), start(&|line| preload(line, library, mode)));
    }
}

/// The program for `mallctl`, which takes that library beside neap's malloc.
const MALLCTL: &str = "mallctl.c";

/// Compiles and runs the program for `mallctl` in every mode, and without neap's malloc.
fn mallctl(report: &mut Report, library: &Path, scratch: &Path) {
    let program =
        match compile(Target::Native, &layout::root().join("tests/programs").join(MALLCTL), &["-fno-builtin"], scratch)
        {
            Ok(program) => program,
            Err(error) => return report.check(MALLCTL, Err(error)),
        };
    let controls = layout::mallctl();
    for mode in MODES {
        let both = |line: &mut Command| preload_all(line, &[library, &controls], mode);
        report.check(&format!("{MALLCTL} ({})", mode.name), passes(Command::new(&program), &both));
    }
    let mut line = Command::new(&program);
    line.arg("absent");
    let alone = |line: &mut Command| preload(line, &controls, &DEFAULT);
    report.check(&format!("{MALLCTL} (system's malloc)"), passes(line, &alone));
}

/// Runs a program in an environment: it must print `ok` and succeed, without complaints.
fn passes(mut line: Command, environment: &dyn Fn(&mut Command)) -> Result<()> {
    environment(&mut line);
    let found = observe(line, Duration::from_secs(300))?;
    complaints(&found)?;
    ensure!(found.success() && found.stdout == b"ok\n", "{}", found.summary());
    Ok(())
}

/// Compiles and runs the programs with file names that pass `chosen`, side by side.
pub(crate) fn into(report: &mut Report, library: &Path, scratch: &Path, chosen: &dyn Fn(&str) -> bool) -> Result<()> {
    let checks: Vec<&SelfCheck> = PROGRAMS.iter().filter(|check| chosen(check.file)).collect();
    let shared = Mutex::new(&mut *report);
    lanes::each(lanes::WAITING, &checks, |check| {
        check_one(&shared, check, library, scratch);
        Ok(())
    })?;
    if chosen(MALLCTL) {
        mallctl(report, library, scratch);
    }
    if chosen(contained::FILE) {
        let source = layout::root().join("tests/programs").join(contained::FILE);
        let program = compile(Target::Native, &source, &["-fno-builtin"], scratch)?;
        contained::into(report, library, &program, scratch, &|line| passes(line, &plain))?;
    }
    if chosen(MUSL.0) {
        musl(report, library, scratch);
    }
    Ok(())
}

/// A check that cannot be made for a target, and the reason.
pub(crate) type Left = (&'static str, &'static str);

/// Compiles the programs for another target and runs them in one mode. Skips those of `left`.
pub(crate) fn elsewhere(report: &mut Report, target: Target, left: &[Left], scratch: &Path, mode: &Mode) -> Result<()> {
    let shared = Mutex::new(report);
    let library = target.library();
    lanes::each(lanes::WAITING, PROGRAMS, |check| {
        if let Some((_, reason)) = left.iter().find(|(file, _)| *file == check.file) {
            locked(&shared).skip(check.file, reason);
            return Ok(());
        }
        let source = layout::root().join("tests/programs").join(check.file);
        let answer = compile_with_libraries(target, &source, scratch).and_then(|(program, _)| {
            let mut line = target.start(&program);
            line.args(check.arguments).current_dir(scratch);
            passes(line, &|line| {
                let (variable, before) = target.preload();
                plain(line);
                line.env(variable, format!("{before}{}", library.display())).envs(mode.variables.iter().copied());
            })
        });
        locked(&shared).check(&format!("{} ({})", check.file, mode.name), answer);
        Ok(())
    })
}

/// Compiles one program and runs it in every mode.
fn check_one(report: &Mutex<&mut Report>, check: &SelfCheck, library: &Path, scratch: &Path) {
    let source = layout::root().join("tests/programs").join(check.file);
    let program = match compile_with_libraries(Target::Native, &source, scratch) {
        Ok((program, _)) => program,
        Err(error) => return locked(report).check(check.file, Err(error)),
    };
    let start = |mode: &str, environment: &dyn Fn(&mut Command)| {
        let mut line = Command::new(&program);
        line.args(check.arguments).current_dir(scratch);
        let answer = passes(line, environment);
        locked(report).check(&format!("{} ({mode})", check.file), answer);
    };
    if !check.only_neap {
        start("system's malloc", &plain);
    }
    for mode in MODES {
        start(mode.name, &|line| preload(line, library, mode));
    }
}

/// Compiles a program and its companions: `<name>_library` is a shared object that it loads,
/// `<name>_linked` one that it is linked with. Returns the program and the companions.
pub(crate) fn compile_with_libraries(target: Target, source: &Path, scratch: &Path) -> Result<(PathBuf, Vec<PathBuf>)> {
    let stem = source.file_stem().unwrap_or_default().to_string_lossy();
    // Without -fno-builtin the compiler removes pairs of malloc and free that it sees through.
    let (mut flags, mut companions) = (vec!["-fno-builtin".to_string()], Vec::new());
    for (kind, linked) in [("library", false), ("linked", true)] {
        for library in ["c", "cpp"].map(|language| source.with_file_name(format!("{stem}_{kind}.{language}"))) {
            let object = scratch.join(format!("{stem}_{kind}.so"));
            if library.exists() {
                compile_shared(target, &library, &object, &[])?;
                flags.extend(linked.then(|| object.display().to_string()));
                companions.push(object.clone());
            }
        }
    }
    let program = compile(target, source, &flags.iter().map(String::as_str).collect::<Vec<_>>(), scratch)?;
    Ok((program, companions))
}

/// Compiles a shared object.
pub(crate) fn compile_shared(target: Target, source: &Path, object: &Path, flags: &[&str]) -> Result<()> {
    let mut compiler = compiler(target, source);
    compiler.args(["-fno-builtin", "-fPIC", "-shared", "-o"]).arg(object).arg(source).args(flags);
    capture(compiler)?;
    Ok(())
}

/// The compiler of a file's language.
fn compiler(target: Target, source: &Path) -> Command {
    let cxx = source.extension().is_some_and(|extension| extension == "cpp");
    let mut compiler = command(&target.tool(if cxx { "g++" } else { "gcc" }), ["-O1", "-g", "-Wall"]);
    if target == Target::Musl {
        // The kernel's headers, which Debian has among those of glibc.
        compiler.args(["-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu"]);
    }
    compiler
}

/// Compiles one source file into `scratch` and returns the program.
pub(crate) fn compile(target: Target, source: &Path, flags: &[&str], scratch: &Path) -> Result<PathBuf> {
    let program = scratch.join(source.file_stem().unwrap_or_default());
    let mut compiler = compiler(target, source);
    compiler.args(["-pthread", "-o"]).arg(&program).arg(source).args(flags);
    capture(compiler)?;
    Ok(program)
}
