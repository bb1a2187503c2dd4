//! The allocators that neap is measured against, as pinned sources.
//!
//! This package holds no code. Its manifest and lock file name the crates whose archives carry the C and C++ sources of
//! jemalloc, mimalloc (2.x and 3.x), snmalloc and Google's tcmalloc. `cargo xtask peers` asks cargo where those archives
//! were unpacked and compiles each allocator, with its own project's flags, into one shared library that can be
//! preloaded. The crates' Rust parts are never compiled and nothing here is linked into neap.
