//! Places of files: the root of the sources, the target folder and its products. So a target folder
//! named by `CARGO_TARGET_DIR` holds for all steps.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::process::{capture, command};

/// The variable that names the target of the built files; without it, that of this machine.
pub(crate) const TARGET: &str = "NEAP_TARGET";

/// The folder of the workspace: the parent of xtask's own, which cargo names when it runs xtask.
pub(crate) fn root() -> PathBuf {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    match xtask.as_deref().and_then(|folder| folder.parent()) {
        Some(root) => root.to_path_buf(),
        None => PathBuf::from("."),
    }
}

/// Cargo's target folder.
pub(crate) fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// The target triple that files are built for, if it is not this machine's.
pub(crate) fn other_target() -> Option<String> {
    std::env::var(TARGET).ok()
}

/// Cargo's variable for a setting of a target, such as its linker.
pub(crate) fn cargo_variable(target: &str, setting: &str) -> String {
    format!("CARGO_TARGET_{}_{setting}", target.to_uppercase().replace('-', "_"))
}

/// The output of the compiler in use.
pub(crate) fn rustc<const N: usize>(arguments: [&str; N]) -> Result<String> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_string());
    Ok(capture(command(&rustc, arguments))?.trim().to_string())
}

/// This machine's target triple.
pub(crate) fn host() -> Result<String> {
    let said = rustc(["-vV"])?;
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc names no host")?.to_string())
}

/// The folder of optimised products.
fn products() -> PathBuf {
    target().join(other_target().unwrap_or_default()).join("release")
}

/// The preload library.
pub(crate) fn library() -> PathBuf {
    products().join("libneap_malloc.so")
}

/// The preload library, or an error that names the command which builds it.
pub(crate) fn built_library() -> Result<PathBuf> {
    built(library())
}

/// A file that `build` makes.
fn built(file: PathBuf) -> Result<PathBuf> {
    ensure!(file.exists(), "{} is not there: run `cargo xtask build`", file.display());
    Ok(file)
}

/// The library with jemalloc's `mallctl`.
pub(crate) fn mallctl() -> PathBuf {
    products().join("libneap_mallctl.so")
}

/// The C API's library, shared and static, by cargo's names.
pub(crate) fn c_libraries() -> [PathBuf; 2] {
    ["libneap_c.so", "libneap_c.a"].map(|file| products().join(file))
}

/// The target folder of files that are built for static programs.
pub(crate) fn of_static() -> PathBuf {
    target().join("static")
}

/// The malloc family as an archive for static programs.
pub(crate) fn malloc_archive() -> Result<PathBuf> {
    Ok(malloc_archive_for(&other_target().map_or_else(host, Ok)?))
}

/// The malloc family as an archive for static programs of a target.
pub(crate) fn malloc_archive_for(target: &str) -> PathBuf {
    of_static().join(target).join("release/libneap_malloc.a")
}

/// The C API's header.
pub(crate) fn header() -> PathBuf {
    root().join("crates/neap-c/include/neap.h")
}

/// The command line tool.
pub(crate) fn tool() -> PathBuf {
    products().join("neap")
}

/// The command line tool for this machine.
pub(crate) fn host_tool() -> PathBuf {
    target().join("release/neap")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_product_names_the_command_that_builds_it() {
        let error = built(PathBuf::from("/no/libneap_malloc.so")).unwrap_err().to_string();
        assert_eq!(error, "/no/libneap_malloc.so is not there: run `cargo xtask build`");
        assert_eq!(built(header()).unwrap(), header());
    }
}
