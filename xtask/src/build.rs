//! `cargo xtask build` and `cargo xtask demo`: the command line tool, the preload library, the
//! library with `mallctl` and the C API's libraries.
//!
//! A cargo run for each, not one: the libraries are `no_std` with their own panic handler, and
//! cargo would give them the features that the tool switches on in shared dependencies.

use anyhow::{Result, bail};

use crate::layout;
use crate::process::{cargo, command, need, run};

/// The name that programs linked with the C API request from the loader. It changes when they would
/// no longer run.
pub(crate) const SONAME: &str = "libneap.so.0";

/// The preload library's name for the loader, which `crates/neap-malloc/build.rs` sets.
pub(crate) const MALLOC_SONAME: &str = "libneap_malloc.so.0";

/// The loader's name for the library with `mallctl`, which `crates/neap-mallctl/build.rs` sets.
pub(crate) const MALLCTL_SONAME: &str = "libneap_mallctl.so.0";

/// Builds all, optimised.
pub(crate) fn build() -> Result<()> {
    need("cc", &["gcc", "libc6-dev"])?;
    for package in ["neap-cli", "neap-malloc", "neap-mallctl"] {
        let mut cargo = cargo(["build", "--release", "--package", package]);
        cargo.args(other_target()).current_dir(layout::root());
        run(cargo)?;
    }
    // Not in the manifest: a package with a panic handler in each of its libraries could not be
    // tested.
    let mut c_api = cargo(["rustc", "--release", "--package", "neap-c", "--lib", "--features", "runtime"]);
    c_api.args(other_target());
    c_api.args(["--crate-type", "cdylib,staticlib", "--", "-C", "link-args=-nostartfiles -Wl,-z,nodelete", "-C"]);
    c_api.arg(format!("link-arg=-Wl,-soname,{SONAME}"));
    c_api.current_dir(layout::root());
    run(c_api)?;
    let [shared, archive] = layout::c_libraries();
    for file in [layout::tool(), layout::library(), layout::mallctl(), shared, archive] {
        if !file.exists() {
            bail!("cargo succeeded, but {} is not there", file.display());
        }
    }
    Ok(())
}

/// Cargo's arguments for another target than this machine's.
fn other_target() -> Vec<String> {
    layout::other_target().map_or(Vec::new(), |target| vec!["--target".to_string(), target])
}

/// Builds and shows: the arguments go to `neap demo`.
pub(crate) fn demo(arguments: &[String]) -> Result<()> {
    build()?;
    let mut demo = command(&layout::tool().to_string_lossy(), ["demo"]);
    demo.args(arguments);
    run(demo)
}
