//! Tests the C API as programs use it: installed, found by pkg-config and CMake, linked in every
//! way, run in every mode. The other installed files are checked before they are uninstalled.
//!
//! The programs of `tests/c_api` check themselves and print `ok`; the examples of `examples` have
//! any output and status 0. Each is linked with the shared library, with the static one, and fully
//! statically. Programs that are not fully static also run under the preload library. It then
//! provides neap's functions to those that are linked with the shared library.

use core::time::Duration;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::packages::install::{DebugInfo, VERSION, install};
use crate::packages::install_check;
use crate::packages::places::Places;
use crate::process::{capture, command, need, observe, which};
use crate::report::Report;
use crate::smoke::{DEFAULT, MODES, complaints, plain, preload};
use crate::target::Target;
use crate::{layout, static_programs};

/// A program: its file, and whether it prints only `ok`.
const PROGRAMS: &[(&str, bool)] = &[
    ("tests/c_api/everything.c", true),
    ("tests/c_api/groups.c", true),
    ("tests/c_api/fork_lock.c", true),
    ("tests/c_api/cxx.cpp", true),
    ("examples/tenants.c", false),
    ("examples/caches.c", false),
    ("examples/waiting.c", false),
    ("examples/headroom.c", false),
    ("examples/shrinking.c", false),
    ("examples/lists.c", false),
];

/// Ways to link: the name of the way, the replacement of `-lneap`, and more flags.
const LINKS: &[(&str, &str, &[&str])] =
    &[("shared", "-lneap", &[]), ("static library", "-l:libneap.a", &[]), ("all static", "-lneap", &["-static"])];

/// Installs the built files, builds the programs and runs them.
pub(crate) fn check() -> Result<()> {
    let mut report = Report::default();
    into(&mut report)?;
    report.close("c-api")
}

/// Runs the checks, counted in `report`.
pub(crate) fn into(report: &mut Report) -> Result<()> {
    layout::built_library()?;
    need("pkg-config", &["pkg-config"])?;
    let folder = layout::target().join("c_api");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let prefix = fs::canonicalize(layout::target())?.join("c_api/prefix");
    println!("programs with neap.h, installed in {}", prefix.display());
    let places = Places::below(&prefix);
    install(&places, DebugInfo::Split)?;
    let version = pkg_config(&prefix, &["--modversion"])?;
    report.check("pkg-config's version", {
        let header = fs::read_to_string(layout::header())?;
        let defined = format!("#define NEAP_VERSION \"{}\"", version.trim());
        (|| -> Result<()> {
            ensure!(header.contains(&defined), "the header lacks `{defined}`");
            Ok(())
        })()
    });
    for (way, library, more) in LINKS {
        for (file, says_ok) in PROGRAMS {
            match build(&prefix, &folder, file, library, more) {
                Ok(program) => run_everywhere(report, &prefix, &program, (file, way, *says_ok)),
                Err(error) => report.check(&format!("{file} ({way})"), Err(error)),
            }
        }
    }
    static_programs::into(report, Target::Native, &prefix.join("lib"), &folder, &[]);
    report.check("whose functions these are", whose(&prefix, &folder));
    if which("cmake").is_some() {
        report.check("find_package(neap) of CMake", cmake(&prefix, &folder));
    } else {
        report.skip("find_package(neap) of CMake", "install it with `apt-get install cmake`");
    }
    install_check::into(report, &places);
    Ok(())
}

/// Builds the project of `tests/c_api/cmake` against the installed package, and runs its programs.
/// A request for a later version must fail.
fn cmake(prefix: &Path, folder: &Path) -> Result<()> {
    let built = folder.join("cmake");
    let configure = |version: &str| {
        let mut cmake = command("cmake", ["-S"]);
        cmake.arg(layout::root().join("tests/c_api/cmake")).arg("-B").arg(&built);
        cmake.args([format!("-DNEAP_WANTED={version}"), format!("-DCMAKE_PREFIX_PATH={}", prefix.display())]);
        capture(cmake)
    };
    let number = |text: &str| text.parse::<u32>();
    let (major, minor) = (number(env!("CARGO_PKG_VERSION_MAJOR"))?, number(env!("CARGO_PKG_VERSION_MINOR"))?);
    let versions = [
        (VERSION.to_string(), true),
        (format!("{major}.{minor}"), true),
        ("0.0.9".to_string(), false),
        (format!("{major}.{}", minor + 1), false),
        (format!("{}", major + 1), false),
    ];
    for (version, expected) in &versions {
        let found = configure(version);
        ensure!(found.is_ok() == *expected, "find_package(neap {version}): {found:?}");
    }
    configure(VERSION)?;
    capture(command("cmake", ["--build", &built.to_string_lossy()]))?;
    for (program, library) in [("shared", "libneap.so"), ("static", "static"), ("cxx", "")] {
        let mut line = Command::new(built.join(program));
        plain(&mut line);
        line.args((!library.is_empty()).then_some(library));
        let found = observe(line, Duration::from_secs(120))?;
        complaints(&found)?;
        ensure!(found.success(), "{program}: {}", found.summary());
    }
    Ok(())
}

/// Queries the installed pkg-config file.
fn pkg_config(prefix: &Path, arguments: &[&str]) -> Result<String> {
    let mut ask = command("pkg-config", arguments);
    ask.arg("neap").env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    capture(ask)
}

/// Compiles and links a program with the flags of pkg-config, with every warning an error.
fn build(prefix: &Path, folder: &Path, file: &str, library: &str, more: &[&str]) -> Result<PathBuf> {
    let source = layout::root().join(file);
    let cxx = file.ends_with(".cpp");
    let program = folder.join(source.file_stem().unwrap_or_default());
    let flags = pkg_config(
        prefix,
        if more.is_empty() { &["--cflags", "--libs"] } else { &["--cflags", "--libs", "--static"] },
    )?;
    let flags = flags.split_whitespace().map(|flag| if flag == "-lneap" { library } else { flag });
    let strict = ["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic", "-pthread", "-D_GNU_SOURCE"];
    let mut compiler = command(if cxx { "g++" } else { "gcc" }, strict);
    compiler
        .arg(if cxx { "-std=c++17" } else { "-std=c11" })
        .args(more)
        .arg("-o")
        .arg(&program)
        .arg(source)
        .args(flags);
    capture(compiler)?;
    Ok(program)
}

/// Runs a program in every mode, and also under the preload library unless it is fully static. The
/// examples, one of which takes long, run as their readers would run them.
fn run_everywhere(report: &mut Report, prefix: &Path, program: &Path, (file, way, says_ok): (&str, &str, bool)) {
    let malloc = prefix.join("lib/libneap_malloc.so");
    for mode in MODES.iter().filter(|mode| mode.beside.is_none() && (says_ok || mode.name == DEFAULT.name)) {
        let alone = |line: &mut Command| {
            plain(line);
            line.envs(mode.variables.iter().copied());
        };
        let name = mode.name;
        report.check(&format!("{file} ({way}, {name})"), run_once(prefix, program, name, says_ok, &alone));
        if way != "all static" {
            let under = |line: &mut Command| preload(line, &malloc, mode);
            report
                .check(&format!("{file} ({way}, preloaded, {name})"), run_once(prefix, program, name, says_ok, &under));
        }
    }
}

fn run_once(
    prefix: &Path,
    program: &Path,
    mode: &str,
    says_ok: bool,
    environment: &dyn Fn(&mut Command),
) -> Result<()> {
    let mut line = Command::new(program);
    // Without neap's thread the program has to tick.
    if mode == "background off" {
        line.arg("ticks");
    }
    environment(&mut line);
    line.env("LD_LIBRARY_PATH", prefix.join("lib"));
    let found = observe(line, Duration::from_secs(120))?;
    complaints(&found)?;
    ensure!(found.success() && (!says_ok || found.stdout == b"ok\n"), "{}", found.summary());
    Ok(())
}

/// Checks where the functions come from: alone from libneap, preloaded from the preload library, in
/// a static program from itself.
fn whose(prefix: &Path, folder: &Path) -> Result<()> {
    let malloc = prefix.join("lib/libneap_malloc.so");
    for (library, alone, preloaded) in
        [("-lneap", "libneap.so", "libneap_malloc.so"), ("-l:libneap.a", "whose", "whose")]
    {
        let program = build(prefix, folder, "tests/c_api/whose.c", library, &[])?;
        for (expected, under) in [(alone, false), (preloaded, true)] {
            let mut line = Command::new(&program);
            if under {
                preload(&mut line, &malloc, &DEFAULT)
            } else {
                plain(&mut line)
            }
            line.arg(expected).env("LD_LIBRARY_PATH", prefix.join("lib"));
            let found = observe(line, Duration::from_secs(60))?;
            ensure!(found.success(), "{library}, {expected}: {}", found.summary());
        }
    }
    Ok(())
}
