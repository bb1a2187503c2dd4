//! Installation, packages and releases, and their tests.

pub(crate) mod artefacts;
pub(crate) mod container;
pub(crate) mod contents;
pub(crate) mod crates;
pub(crate) mod deb;
pub(crate) mod install;
pub(crate) mod install_check;
pub(crate) mod manifest;
pub(crate) mod old_glibc;
pub(crate) mod places;
pub(crate) mod release;
pub(crate) mod systemd;
pub(crate) mod versions;
