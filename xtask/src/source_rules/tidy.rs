//! `cargo xtask tidy`: rules about the sources that no compiler checks.
//!
//! Each rule reads lines of text, so it can be fooled and errs on the strict side. Exceptions stand
//! beside their rule.

use std::fs;

use anyhow::{Result, bail};

use crate::layout;
use crate::source_rules::cycles;
use crate::source_rules::names::Names;
use crate::source_rules::prose;
use crate::source_rules::sources::{self, Source};

/// Crates of ring 0. All but two are linked into the preload library: `neap-pressure`, which keeps
/// the rules of ring 0 and only the command uses, and `neap-mallctl`, a library of its own.
pub(crate) const RING_0: &[&str] = &[
    "neap-pressure",
    "neap-os",
    "neap-base",
    "neap-pages",
    "neap-percpu",
    "neap-groups",
    "neap-reclaim",
    "neap-objects",
    "neap",
    "neap-c",
    "neap-malloc",
    "neap-mallctl",
];

/// Crates of ring 0 that are libraries with a panic handler of their own, so without unit tests.
pub(crate) const LOADED: &[&str] = &["neap-malloc", "neap-mallctl"];

/// The crates of ring 0 that have unit tests.
pub(crate) fn tested() -> impl Iterator<Item = &'static str> {
    RING_0.iter().copied().filter(|name| !LOADED.contains(name))
}

/// The crates of [`tested`], as arguments of cargo.
pub(crate) fn tested_packages() -> impl Iterator<Item = &'static str> {
    tested().flat_map(|name| ["--package", name])
}

/// The crates that hold mutable statics, and the one file that may name loom.
const STATIC_CRATES: &[&str] = &["crates/neap-malloc/src/", "crates/neap-mallctl/src/"];
const LOOM_FILE: &str = "crates/neap-base/src/sync.rs";

/// Statics of a type that could change, but which nothing writes.
const NEVER_WRITTEN: &[(&str, &str)] = &[("crates/neap-objects/src/object_state.rs", "static NOTHING: AtomicU8")];

const MAX_LINES: usize = 700;
/// Most lines of a comment from its SAFETY on.
const SAFETY_LINES: usize = 3;

impl Source<'_> {
    fn in_crate_source(&self) -> bool {
        self.path.starts_with("crates/") && self.path.contains("/src/")
    }

    fn in_ring_0(&self) -> bool {
        let inside = |name: &&str| self.path.starts_with(&format!("crates/{name}/src/"));
        RING_0.iter().any(inside)
    }
}

/// Words that mark unfinished work. Written in two parts so that this file does not break its own
/// rule.
fn unfinished() -> [String; 6] {
    [("TO", "DO"), ("FIX", "ME"), ("XX", "X:"), ("HA", "CK:"), ("todo", "!("), ("unimplemented", "!(")]
        .map(|(a, b)| format!("{a}{b}"))
}

/// Every line that breaks a rule, as `path:line: what`.
fn findings(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let mut say = |line: usize, what: String| found.push(format!("{}:{line}: {what}", source.path));
    let rust = source.path.ends_with(".rs");

    for (at, line) in source.lines.iter().enumerate() {
        for word in unfinished().iter().filter(|word| line.contains(word.as_str())) {
            say(at + 1, format!("`{word}` marks unfinished work"));
        }
    }
    if !rust {
        return found;
    }
    if source.lines.len() > MAX_LINES {
        say(MAX_LINES + 1, format!("{} lines; {MAX_LINES} are the most", source.lines.len()));
    }
    for (at, _) in source.lines.iter().enumerate().filter(|(_, line)| line.trim_start().starts_with("// SAFETY:")) {
        let length = source.lines[at..].iter().take_while(|line| line.trim_start().starts_with("//")).count();
        if length > SAFETY_LINES {
            say(at + 1, format!("{length} lines of SAFETY; {SAFETY_LINES} are the most: state facts before it"));
        }
    }
    if source.in_crate_source() && !source.lines.first().is_some_and(|line| line.starts_with("//!")) {
        say(1, "a source file opens with a `//!` paragraph that says what it is".into());
    }
    if source.in_crate_source() && source.path != LOOM_FILE {
        for (line, text) in source.code().filter(|(_, text)| text.contains("cfg") && text.contains("loom")) {
            say(line, format!("only {LOOM_FILE} may depend on loom: {}", text.trim()));
        }
    }
    if source.in_ring_0() {
        for (line, text) in source.code() {
            for call in [".unwrap()", ".expect(", "panic!("] {
                if text.contains(call) {
                    say(line, format!("`{call}` inside the allocator"));
                }
            }
            let never_written =
                NEVER_WRITTEN.iter().any(|(path, start)| source.path == *path && text.starts_with(start));
            let may_hold = STATIC_CRATES.iter().any(|folder| source.path.starts_with(folder));
            if is_mutable_static(text) && !never_written && !may_hold {
                say(line, format!("a mutable static outside {}: {}", STATIC_CRATES.join(" and "), text.trim()));
            }
        }
    }
    found
}

/// A `static mut`, or a `static` whose type can change behind a shared reference.
fn is_mutable_static(line: &str) -> bool {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub") {
        Some(rest) => rest.trim_start_matches(|c| c != ' ').trim_start(),
        None => line,
    };
    let Some(rest) = line.strip_prefix("static ") else {
        return false;
    };
    let kind = rest.split_once(':').map_or("", |(_, kind)| kind.split('=').next().unwrap_or(kind));
    rest.starts_with("mut ") || ["Atomic", "Cell", "Mutex", "Once", "Lock"].iter().any(|shared| kind.contains(shared))
}

/// The most bytes of pages that are read first.
const FIRST_PAGES: [(&str, usize); 2] = [("README.md", 8000), ("ARCHITECTURE.md", 12_000)];

fn too_long(path: &str, text: &str) -> Option<String> {
    let (_, most) = FIRST_PAGES.into_iter().find(|(page, most)| *page == path && text.len() > *most)?;
    Some(format!("{path}: {} bytes, and may have {most}: move what few readers need into docs", text.len()))
}

/// Checks every file of the project.
pub(crate) fn check() -> Result<()> {
    let root = layout::root();
    let mut found = Vec::new();
    let (mut read, mut names) = (0, Names::default());
    for file in &sources::files(&root)? {
        // A file that is not text has no lines to judge.
        let Ok(text) = fs::read_to_string(file) else {
            continue;
        };
        let path = file.strip_prefix(&root)?.to_string_lossy();
        let source = Source::new(&path, &text);
        found.extend(findings(&source));
        found.extend(too_long(&path, &text));
        if source.in_crate_source() && path.ends_with(".rs") {
            names.add(&source);
        }
        read += 1;
    }
    found.extend(names.findings());
    found.extend(cycles::findings()?);
    found.extend(prose::findings()?);
    for line in &found {
        println!("{line}");
    }
    if !found.is_empty() {
        bail!("tidy: {} findings in {read} files", found.len());
    }
    println!("tidy: {read} files, no findings");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(path: &str, text: &str) -> Vec<String> {
        findings(&Source { path, lines: text.lines().collect() })
    }

    #[test]
    fn a_clean_file_has_no_findings() {
        let text = "//! A file.\n\nfn f() -> u32 {\n    // never .unwrap()\n    1\n}\n\n#[cfg(test)]\nmod tests {\n    fn g() { None::<u8>.unwrap(); }\n}\n";
        assert_eq!(judge("crates/neap-base/src/a.rs", text), [""; 0]);
    }

    #[test]
    fn pages_that_are_read_first_are_short() {
        assert_eq!(too_long("README.md", &"x".repeat(8000)), None);
        assert!(too_long("README.md", &"x".repeat(8001)).unwrap().starts_with("README.md: 8001 bytes"));
        assert_eq!(too_long("docs/glossary.md", &"x".repeat(100_000)), None);
    }

    #[test]
    fn each_rule_finds_what_breaks_it() {
        let breaks = [
            ("crates/neap-os/src/a.rs", "use x;\n", "opens with"),
            ("crates/neap-os/src/a.rs", "//! A.\nfn f() { a.unwrap(); }\n", ".unwrap()"),
            ("crates/neap/src/a.rs", "//! A.\nfn f() { panic!(\"no\"); }\n", "panic!("),
            ("crates/neap/src/a.rs", "//! A.\nstatic mut A: u8 = 0;\n", "mutable static"),
            ("crates/neap/src/a.rs", "//! A.\npub(crate) static A: AtomicU64 = AtomicU64::new(0);\n", "mutable static"),
            ("crates/neap/src/a.rs", "//! A.\n#[cfg(not(loom))]\nuse core;\n", "loom"),
            ("xtask/src/a.rs", "//! A.\n// SAFETY: a\n// b\n// c\n// d\nunsafe { f() }\n", "4 lines of SAFETY"),
        ];
        for (path, text, expected) in breaks {
            let found = judge(path, text);
            assert!(found.len() == 1 && found[0].contains(expected), "{text:?} gave {found:?}");
        }
        let word = unfinished()[0].clone();
        assert_eq!(judge("README.md", &word).len(), 1);
        assert_eq!(judge("xtask/src/a.rs", &"\n".repeat(MAX_LINES + 1)).len(), 1);
    }

    #[test]
    fn constant_statics_and_the_one_mutable_static_are_allowed() {
        assert!(!is_mutable_static("static NAMES: [&str; 2] = [\"a\", \"b\"];"));
        assert!(!is_mutable_static("let x: &'static AtomicU64 = y;"));
        assert_eq!(judge("crates/neap-malloc/src/global.rs", "//! A.\nstatic A: OnceCell<u8> = x;\n"), [""; 0]);
    }
}
