//! The crates whose products a release has, and the lists of other projects' crates in them.

use std::collections::BTreeSet;

use anyhow::Result;

use crate::layout;
use crate::process::{capture, cargo};

/// The crate of the command.
pub(crate) const COMMAND: &[&str] = &["neap-cli"];

/// The crate of the preload library.
pub(crate) const PRELOADED: &[&str] = &["neap-malloc"];

/// The crates of the libraries that a release has.
pub(crate) const LIBRARIES: &[&str] = &["neap-malloc", "neap-mallctl", "neap-c"];

/// The crates of all that a release has.
pub(crate) const SHIPPED: &[&str] = &["neap-cli", "neap-malloc", "neap-mallctl", "neap-c"];

/// The crates of other projects whose code some of ours contain, with their licences. Macros, and
/// crates that only these need, run in the compiler and are left out. `other` is the target if that
/// is not this machine's.
pub(crate) fn crates(ours: &[&str], other: Option<&str>) -> Result<String> {
    let mut tree =
        cargo(["tree", "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}: {l}", "--no-dedupe"]);
    tree.args(ours.iter().flat_map(|name| ["--package", name]));
    if let Some(target) = other {
        tree.args(["--target", target]);
    }
    tree.current_dir(layout::root());
    Ok(others(&capture(tree)?))
}

/// The list for a text of `cargo tree`, whose last part of a line is the licence.
fn others(tree: &str) -> String {
    // A crate of the workspace has its folder beside its version.
    let other = |line: &&str| !line.is_empty() && !line.contains("(/");
    let others: BTreeSet<&str> = tree.lines().filter(other).collect();
    let mut text = String::from("This package contains code of these Rust crates, under the licences named.\n\n");
    others.iter().for_each(|line| text.extend([line, "\n"]));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::{ARM64, MUSL};

    #[test]
    fn crates_of_the_libraries_are_named_without_the_command() {
        let text = crates(LIBRARIES, None).unwrap();
        assert!(text.contains("\nrustix v1.") && text.contains("\nlibc v0."), "{text}");
        assert!(!text.contains("\nclap v") && !text.contains("neap-os"), "{text}");
        let text = crates(SHIPPED, None).unwrap();
        assert!(text.contains("\nclap v") && !text.contains("\nsyn v"), "{text}");
        let tree = "neap v0.1.0 (/a): MIT\nlibc v0.2.1: MIT\n\nlibc v0.2.1: MIT\n";
        assert!(others(tree).ends_with("named.\n\nlibc v0.2.1: MIT\n"));
    }

    #[test]
    fn crates_of_what_ships_are_those_of_its_parts() {
        assert_eq!(SHIPPED, [COMMAND, LIBRARIES].concat());
        assert!(PRELOADED.iter().all(|name| LIBRARIES.contains(name)));
    }

    #[test]
    fn list_of_the_libraries_is_equal_for_each_processor() {
        // Debian's `Multi-Arch: same` asks for it: both packages install this file.
        assert_eq!(crates(LIBRARIES, None).unwrap(), crates(LIBRARIES, Some(ARM64)).unwrap());
    }

    #[test]
    fn list_for_musl_has_the_preload_library_alone() {
        let text = crates(PRELOADED, Some(MUSL)).unwrap();
        assert!(text.contains("\nrustix v1.") && !text.contains("\nclap v"), "{text}");
    }
}
