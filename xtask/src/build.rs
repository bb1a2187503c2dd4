//! `cargo xtask build` and `cargo xtask demo`: the command line tool and the preload library.
//!
//! Two cargo runs, not one: the library is `no_std` with its own panic handler, and cargo would give it the features that
//! the tool switches on in shared dependencies.

use anyhow::{Result, bail};

use crate::layout;
use crate::process::{cargo, command, need, run};

/// Builds both, optimised.
pub(crate) fn build() -> Result<()> {
    need("cc", &["gcc", "libc6-dev"])?;
    for package in ["neap-cli", "neap-malloc"] {
        let mut cargo = cargo(["build", "--release", "--package", package]);
        cargo.current_dir(layout::root());
        run(cargo)?;
    }
    for file in [layout::tool(), layout::library()] {
        if !file.exists() {
            bail!("cargo succeeded, but {} is not there", file.display());
        }
    }
    Ok(())
}

/// Builds and shows: the arguments go to `neap demo`.
pub(crate) fn demo(arguments: &[String]) -> Result<()> {
    build()?;
    let mut demo = command(&layout::tool().to_string_lossy(), ["demo"]);
    demo.args(arguments);
    run(demo)
}
