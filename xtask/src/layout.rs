//! Places of files: the root of the sources, the target folder and its products. So a target folder
//! named by `CARGO_TARGET_DIR` holds for all steps. Nothing here touches the disk.

use std::path::PathBuf;

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

/// The preload library.
pub(crate) fn library() -> PathBuf {
    target().join("release/libneap_malloc.so")
}

/// The library with jemalloc's `mallctl`.
pub(crate) fn mallctl() -> PathBuf {
    target().join("release/libneap_mallctl.so")
}

/// The C API's library, shared and static, by cargo's names.
pub(crate) fn c_libraries() -> [PathBuf; 2] {
    ["release/libneap_c.so", "release/libneap_c.a"].map(|file| target().join(file))
}

/// The C API's header.
pub(crate) fn header() -> PathBuf {
    root().join("crates/neap-c/include/neap.h")
}

/// The command line tool.
pub(crate) fn tool() -> PathBuf {
    target().join("release/neap")
}
