//! `cargo xtask COMMAND`: the project's own build, test and check commands.
//!
//! This file is the table of commands; each has a file of its own. xtask uses the workspace's
//! crates only through cargo and their programs, so it builds even when they do not.

use std::process::ExitCode;

use anyhow::{Result, bail};

mod arm64;
mod audit;
mod build;
mod c_api;
mod ci;
mod compilers;
mod contained;
mod dependent;
mod docs;
mod figures;
mod fuzz;
mod installed;
mod kernel_percpu;
mod lanes;
mod layout;
mod library;
mod librseq;
mod models;
mod musl;
mod packages;
mod peers;
mod process;
mod programs;
mod prometheus;
mod report;
mod smoke;
mod source_rules;
mod static_programs;
mod target;
mod test_programs;
mod vm;

const USAGE: &str = "\
usage: cargo xtask COMMAND [arguments]

  build                       target/release/neap, libneap_malloc.so, libneap_mallctl.so, and the C API's libneap_c.so and .a
  install --prefix FOLDER [--libdir FOLDER] [--debugdir FOLDER] [--destdir FOLDER]
                              build, then: program, man pages, completions, libraries, neap.h, files for pkg-config and
                              CMake into a prefix such as /usr/local; debug information into lib/debug
  uninstall, with the same arguments
                              removes the files that install wrote
  deb [--target aarch64-unknown-linux-gnu] [--test [noble]]
                              Debian packages in target/deb, judged by lintian; also used in a fresh root, perhaps of Ubuntu
  container                   the image of contrib/container, built by buildah on bases made here, and used
  release X.Y.Z [--dry-run] [--unchecked] [--without STEP]... [--once] [--target TRIPLE]...
                              `ci --full`, commit, tag and all files of a release in target/release-X.Y.Z, built twice and
                              compared; refused if `ci` skips a step that no --without names
  artefacts --to FOLDER [--target TRIPLE]...
                              the files of a release from this tree, without checks
  demo [arguments]            build, then `neap demo`: the same burst under the system's malloc and under neap
  test [--target aarch64-unknown-linux-gnu|x86_64-unknown-linux-musl]
                              cargo test, then build, symbols, smoke and c-api; or tests for arm64 under qemu-aarch64, or for musl
  loom                        exhaustive interleavings of the lock protocols
  miri                        the listed tests under the interpreter that finds undefined behaviour
  fuzz [--inputs N] [TARGET...]
                              libFuzzer chooses what the command reads of other processes: pages, reports, samples, profiles, traces
  symbols                     what the libraries import and export, and whether that is what neap.h declares
  sequences [--target aarch64-unknown-linux-gnu|x86_64-unknown-linux-musl]
                              each restartable sequence of the built library is one that the explorer proves
  smoke [--library FILE] [NAME...]
                              real programs and tests/programs under the preload library (or another one)
  old-glibc                   the programs of tests/programs under the preload library, in a root with glibc 2.31
  dependent [--target aarch64-unknown-linux-gnu|x86_64-unknown-linux-musl]
                              each crate's package by itself; a Rust program that depends on the packaged crate, with ordinary
                              settings, also for musl and arm64; with --target that program for this target alone
  c-api                       C and C++ programs with neap.h: installed, linked in every way, run in every mode; then uninstalled
  prometheus                  Prometheus scrapes a program under neap; the rules and the dashboard of contrib
  audit                       licences, sources, duplicates and known holes of other projects' crates; public interfaces against
                              the last release; the oldest compiler
  newest-rust                 unit tests of the libraries' crates with the newest stable compiler, which must not warn
  tidy                        rules about the sources that no compiler checks
  cycles                      files that import each other in a circle; `tidy` allows two files, not more
  prose                       comments that break the rules for text; `tidy` holds their number
  figures [--pairs N] [FILE...]
                              plots and tables of README and the book, from `neap bench` or its --json files
  docs                        checks every link of the documentation, and renders the book into target/book
  peers [NAME...]             builds the allocators that the benchmarks compare with, into target/peers/
  kernel-percpu               what the kernel's per-CPU allocator gives back when 10 000 of 11 000 memory cgroups go
  vm [--target aarch64-unknown-linux-gnu] [--suite] [NAME...]
                              tests on a virtual machine with 4 CPUs, 2 nodes and an isolated CPU;
                              with --suite all tests of the libraries and programs
  ci [--full]                 everything that .ci/run runs; all tests that take long as well
";

/// Error of a command that cannot run on this machine, with the reason. xtask then ends with a
/// status that means neither passed nor failed.
#[derive(Debug)]
struct Skipped(String);

impl core::fmt::Display for Skipped {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for Skipped {}

fn dispatch(arguments: &[String]) -> Result<()> {
    let Some((name, rest)) = arguments.split_first() else {
        bail!("no command given\n{USAGE}");
    };
    let alone = |command: fn() -> Result<()>| match rest.first() {
        None => command(),
        Some(extra) => bail!("`{name}` takes no arguments, but got `{extra}`"),
    };
    match name.as_str() {
        "build" => alone(build::build),
        "demo" => build::demo(rest),
        "test" => ci::test_command(rest),
        "loom" => alone(models::loom),
        "miri" => alone(models::miri),
        "install" => packages::install::command_line(rest),
        "audit" => alone(audit::full),
        "newest-rust" => alone(compilers::newest),
        "container" => alone(packages::container::check),
        "deb" => packages::deb::command_line(rest),
        "release" => packages::release::command_line(rest),
        "artefacts" => packages::artefacts::command_line(rest),
        "uninstall" => packages::install::uninstall(rest),
        "fuzz" => fuzz::command_line(rest),
        "symbols" => alone(library::symbols::check),
        "sequences" => library::sequences::command_line(rest),
        "smoke" => smoke::command(rest),
        "old-glibc" => alone(packages::old_glibc::check),
        "c-api" => alone(c_api::check),
        "prometheus" => alone(prometheus::command_alone),
        "dependent" => dependent::command_line(rest),
        "tidy" => alone(source_rules::tidy::check),
        "cycles" => alone(source_rules::cycles::check),
        "docs" => alone(docs::build),
        "prose" => alone(source_rules::prose::list),
        "figures" => figures::command_line(rest),
        "peers" => peers::build(rest),
        "kernel-percpu" => alone(kernel_percpu::measure),
        "vm" => vm::command(rest),
        "ci" => ci::command_line(rest),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(())
        }
        unknown => bail!("there is no command `{unknown}`\n{USAGE}"),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            if error.is::<Skipped>() { ExitCode::from(installed::NOT_ALL_THERE as u8) } else { ExitCode::FAILURE }
        }
    }
}
