//! `cargo xtask build` and `cargo xtask demo`: the command line tool, the preload library, the
//! library with `mallctl`, the malloc family for static programs and the C API's libraries.
//!
//! Each has its own run of cargo. The libraries are `no_std` with their own panic handler, and in
//! one run cargo would give them the features that the tool switches on in shared dependencies.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::layout;
use crate::library::stub_libc;
use crate::process::{cargo, command, need, run};

/// The name that programs linked with the C API request from the loader. It changes when they would
/// no longer run.
pub(crate) const SONAME: &str = "libneap.so.0";

/// The preload library's name for the loader, which `crates/neap-malloc/build.rs` sets.
pub(crate) const MALLOC_SONAME: &str = "libneap_malloc.so.0";

/// The loader's name for the library with `mallctl`, which `crates/neap-mallctl/build.rs` sets.
pub(crate) const MALLCTL_SONAME: &str = "libneap_mallctl.so.0";

/// The variable by which the build scripts of libraries learn the folder of the stub of the C
/// library.
pub(crate) const STUB: &str = "NEAP_STUB_LIBC";

/// Leaves out of a build with `--release` the parts that take minutes: optimisation at link time,
/// and compilation as one unit. Not for the tool, since many of its benchmarks measure code of the
/// tool.
pub(crate) fn without_lto(cargo: &mut Command) {
    cargo.env("CARGO_PROFILE_RELEASE_LTO", "off").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
}

/// Makes the stub of the C library for a target.
pub(crate) fn stub_of(target: &str, linker: &str) -> Result<PathBuf> {
    stub_libc::make(&fs::canonicalize(layout::target())?.join("stub_libc").join(target), target, linker)
}

/// Builds all, optimised.
pub(crate) fn build() -> Result<()> {
    need("cc", &["gcc", "libc6-dev"])?;
    let target = layout::other_target().map_or_else(layout::host, Ok)?;
    let linker = std::env::var(layout::cargo_variable(&target, "LINKER")).unwrap_or_else(|_| "cc".to_string());
    let stub = stub_of(&target, &linker)?;
    for package in ["neap-cli", "neap-malloc", "neap-mallctl"] {
        let mut cargo = cargo(["build", "--release", "--package", package]);
        cargo.args(other_target()).env(STUB, &stub).current_dir(layout::root());
        run(cargo)?;
    }
    let mut c_api = cargo(["rustc", "--release", "--package", "neap-c", "--lib", "--features", "runtime"]);
    c_api.args(other_target()).args(["--crate-type", "staticlib"]).current_dir(layout::root());
    run(c_api)?;
    link_c_api(&linker, &stub)?;
    run(archive(&target))?;
    let [shared, archive] = layout::c_libraries();
    for file in [layout::tool(), layout::library(), layout::mallctl(), shared, archive, layout::malloc_archive()?] {
        if !file.exists() {
            bail!("cargo succeeded, but {} is not there", file.display());
        }
    }
    Ok(())
}

/// Cargo for the malloc family as an archive for static programs. All crates get other flags than
/// for the libraries, so they have a folder of their own.
pub(crate) fn archive(target: &str) -> Command {
    let mut cargo = cargo(["rustc", "--release", "--package", "neap-malloc", "--lib", "--crate-type", "staticlib"]);
    cargo.args(["--target", target, "--target-dir"]).arg(layout::of_static());
    let variable = layout::cargo_variable(target, "RUSTFLAGS");
    // `cargo xtask release` names folders in this variable.
    let given = std::env::var(&variable).unwrap_or_default();
    cargo.env(variable, format!("{given} -C target-feature=+crt-static").trim_start());
    cargo.current_dir(layout::root());
    cargo
}

/// Cargo's arguments for another target than this machine's.
fn other_target() -> Vec<String> {
    layout::other_target().map_or(Vec::new(), |target| vec!["--target".to_string(), target])
}

/// Links the shared library for C of the static one, since rustc's own would have no versions of
/// its symbols. The library is never unloaded (`nodelete`), and needs no start files.
fn link_c_api(linker: &str, stub: &Path) -> Result<()> {
    let [shared, archive] = layout::c_libraries();
    let mut link = command(linker, ["-shared", "-nostartfiles", "-nodefaultlibs"]);
    link.arg("-o").arg(&shared);
    link.arg(format!("-Wl,-soname,{SONAME},--build-id,--gc-sections,--as-needed,--eh-frame-hdr,-O1"));
    link.arg("-Wl,-z,nodelete,-z,relro,-z,now,-z,defs,-z,noexecstack");
    link.arg(format!("-Wl,--version-script={}", layout::root().join("crates/neap-c/neap.map").display()));
    link.arg("-Wl,--whole-archive").arg(&archive).arg("-Wl,--no-whole-archive").arg("-L").arg(stub).arg("-lc");
    run(link)
}

/// Builds everything, and runs `neap demo` with the arguments.
pub(crate) fn demo(arguments: &[String]) -> Result<()> {
    build()?;
    let mut demo = command(&layout::tool().to_string_lossy(), ["demo"]);
    demo.args(arguments);
    run(demo)
}
