//! The allocators that benchmarks compare: neap, the C library's own, and the peers, some of them
//! also with settings of their own.
//!
//! A variant is a preload library and an environment. [`find`] tries each variant once. It reports
//! a variant as missing if its library does not exist. It reports a variant as failed if it does
//! not work, or if the loader ignores its library. It builds and downloads nothing.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::{library, work};

/// Variables that steer an allocator. A measured program inherits none of them.
const STEERING: [&str; 5] = ["LD_PRELOAD", "NEAP", "MALLOC_CONF", "GLIBC_TUNABLES", "PYTHONMALLOC"];
const STEERING_PREFIXES: [&str; 4] = ["MALLOC_", "MIMALLOC_", "TCMALLOC_", "SNMALLOC_"];

/// Keeps glibc from registering restartable sequences for each thread. If glibc registers them,
/// Google's tcmalloc falls back to caches per thread.
const TCMALLOC_PER_CPU: (&str, &str) = ("GLIBC_TUNABLES", "glibc.pthread.rseq=0");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllocatorKind {
    /// neap as it is installed.
    Neap,
    /// neap with its restartable sequences switched off.
    NeapNoRseq,
    /// A peer with its default settings. The C library's malloc is one.
    Peer,
    /// A peer with settings that return memory, or in another mode.
    Tuned,
}

/// The variants that a benchmark compares.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// neap and the peers in their defaults.
    Defaults,
    /// Also neap without restartable sequences and tcmalloc's per-CPU mode.
    Speed,
    /// Also the peers' settings that return memory.
    Return,
}

/// An allocator, and the way a program gets it.
#[derive(Clone, Debug)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) kind: AllocatorKind,
    /// The library to preload; `None` for the C library's malloc.
    pub(crate) library: Option<PathBuf>,
    pub(crate) environment: Vec<(&'static str, &'static str)>,
    /// Asks the workload to start the release thread that Google's tcmalloc leaves to the program.
    pub(crate) release_thread: bool,
}

/// A variant or program that could not be measured, and the reason.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Missing {
    pub(crate) name: String,
    pub(crate) reason: String,
}

/// A run that failed. The variant has no figures in that workload.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Failure {
    pub(crate) variant: &'static str,
    pub(crate) workload: String,
    pub(crate) round: usize,
    pub(crate) reason: String,
}

/// The variants of a benchmark.
pub(crate) struct Found {
    pub(crate) variants: Vec<Variant>,
    /// Variants whose library cannot be found.
    pub(crate) missing: Vec<Missing>,
    /// Variants whose library exists, but whose trial failed.
    pub(crate) failed: Vec<Failure>,
    pub(crate) versions: BTreeMap<String, String>,
}

/// A row of the table of all allocators: name, kind, library's name, environment, release thread.
type Row = (&'static str, AllocatorKind, &'static str, &'static [(&'static str, &'static str)], bool);

const TABLE: [Row; 13] = [
    ("neap", AllocatorKind::Neap, "neap", &[], false),
    ("neap-no-rseq", AllocatorKind::NeapNoRseq, "neap", &[("NEAP", "rseq:off")], false),
    ("glibc", AllocatorKind::Peer, "", &[], false),
    ("jemalloc", AllocatorKind::Peer, "jemalloc", &[], false),
    ("mimalloc2", AllocatorKind::Peer, "mimalloc2", &[], false),
    ("mimalloc3", AllocatorKind::Peer, "mimalloc3", &[], false),
    ("snmalloc", AllocatorKind::Peer, "snmalloc", &[], false),
    ("tcmalloc", AllocatorKind::Peer, "tcmalloc", &[], false),
    ("tcmalloc-percpu", AllocatorKind::Tuned, "tcmalloc", &[TCMALLOC_PER_CPU], false),
    ("jemalloc-tuned", AllocatorKind::Tuned, "jemalloc", &[("MALLOC_CONF", JEMALLOC_RETURN)], false),
    ("mimalloc2-tuned", AllocatorKind::Tuned, "mimalloc2", &[("MIMALLOC_PURGE_DELAY", "0")], false),
    ("mimalloc3-tuned", AllocatorKind::Tuned, "mimalloc3", &[("MIMALLOC_PURGE_DELAY", "0")], false),
    ("tcmalloc-tuned", AllocatorKind::Tuned, "tcmalloc", &[TCMALLOC_PER_CPU], true),
];

const JEMALLOC_RETURN: &str = "background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0";

impl Variant {
    /// Makes `command` run on this variant, without inherited settings. Variables that the caller
    /// has set in `command` stay.
    pub(crate) fn apply(&self, command: &mut Command) {
        self.replace(command, std::env::vars_os().map(|(name, _)| name));
    }

    /// Removes inherited variables that steer an allocator, and sets this variant's.
    fn replace(&self, command: &mut Command, inherited: impl Iterator<Item = OsString>) {
        for name in inherited.filter(|name| steers(name)) {
            if command.get_envs().all(|(set, _)| set != name) {
                command.env_remove(name);
            }
        }
        command.envs(self.variables());
    }

    /// The variables that select this variant.
    pub(crate) fn variables(&self) -> Vec<(&'static str, &OsStr)> {
        let preload = self.library.iter().map(|library| ("LD_PRELOAD", library.as_os_str()));
        preload.chain(self.environment.iter().map(|&(name, value)| (name, OsStr::new(value)))).collect()
    }

    pub(crate) fn is_neap(&self) -> bool {
        matches!(self.kind, AllocatorKind::Neap | AllocatorKind::NeapNoRseq)
    }

    /// Runs a program that allocates little, and checks which `malloc` it used.
    fn check(&self, executable: &Path) -> Result<()> {
        let outcome = work::measure(executable, self, &["which"])?;
        let Some(library) = &self.library else { return Ok(()) };
        let same = fs::canonicalize(&outcome.malloc_from).is_ok_and(|path| path == *library);
        if !same {
            bail!("the loader did not take {}: malloc came from {}", library.display(), outcome.malloc_from);
        }
        Ok(())
    }
}

fn steers(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    STEERING.contains(&&*name) || STEERING_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Finds and tries the variants of `choice`. If `against` is not empty, tries the peers that it
/// names instead of those of `choice`.
pub(crate) fn find(executable: &Path, choice: Choice, against: &[String]) -> Result<Found> {
    if let Some(unknown) = against.iter().find(|name| !TABLE.iter().any(|row| row.0 == **name)) {
        let known: Vec<&str> = TABLE.iter().filter(|row| is_peer(row.1)).map(|row| row.0).collect();
        bail!("--against: no allocator is called `{unknown}`; there are {}", known.join(", "));
    }
    let mut found =
        Found { variants: Vec::new(), missing: Vec::new(), failed: Vec::new(), versions: versions(executable) };
    for &(name, kind, file, environment, release_thread) in &TABLE {
        let asked = !is_peer(kind) || against.is_empty() || against.iter().any(|wanted| wanted == name);
        if !asked || !(belongs(name, kind, choice) || against.iter().any(|wanted| wanted == name)) {
            continue;
        }
        let library = match locate(executable, file) {
            Ok(library) => library,
            Err(error) => {
                found.missing.push(Missing { name: name.to_string(), reason: format!("{error:#}") });
                continue;
            }
        };
        let variant = Variant { name, kind, library, environment: environment.to_vec(), release_thread };
        match variant.check(executable) {
            Ok(()) => found.variants.push(variant),
            Err(error) => found.failed.push(Failure {
                variant: name,
                workload: "which".to_string(),
                round: 0,
                reason: format!("{error:#}"),
            }),
        }
    }
    Ok(found)
}

fn is_peer(kind: AllocatorKind) -> bool {
    matches!(kind, AllocatorKind::Peer | AllocatorKind::Tuned)
}

fn belongs(name: &str, kind: AllocatorKind, choice: Choice) -> bool {
    match kind {
        AllocatorKind::Neap | AllocatorKind::Peer => true,
        AllocatorKind::NeapNoRseq => choice == Choice::Speed,
        AllocatorKind::Tuned if name == "tcmalloc-percpu" => choice == Choice::Speed,
        AllocatorKind::Tuned => choice == Choice::Return,
    }
}

/// Returns the path of neap's library or a peer's; `None` for the C library, whose `file` is empty.
pub(crate) fn locate(executable: &Path, file: &str) -> Result<Option<PathBuf>> {
    let path = match file {
        "" => return Ok(None),
        "neap" => library::find(executable)?,
        peer => {
            let folder = library::peers_folder(executable).context("the executable lies in no folder")?;
            let names = [format!("{peer}.so"), format!("lib{peer}.so")];
            let path = names.iter().map(|name| folder.join(name)).find(|path| path.is_file());
            path.with_context(|| {
                format!("{} does not exist; `cargo xtask peers` makes it", folder.join(&names[0]).display())
            })?
        }
    };
    library::check_preloadable(&path)?;
    Ok(Some(path.canonicalize().with_context(|| format!("cannot resolve {}", path.display()))?))
}

/// Versions from `versions.json` beside the peers, with neap's own.
fn versions(executable: &Path) -> BTreeMap<String, String> {
    let stated = library::peers_folder(executable)
        .and_then(|folder| fs::read(folder.join("versions.json")).ok())
        .and_then(|text| serde_json::from_slice::<BTreeMap<String, serde_json::Value>>(&text).ok());
    let mut versions: BTreeMap<String, String> = stated
        .into_iter()
        .flatten()
        .map(|(name, version)| {
            let text = version.as_str().or_else(|| version.get("version")?.as_str()).map(str::to_string);
            (name, text.unwrap_or_else(|| version.to_string()))
        })
        .collect();
    versions.insert("neap".to_string(), env!("CARGO_PKG_VERSION").to_string());
    versions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_peer_is_named_with_the_known_ones() {
        let error = find(Path::new("/nowhere/bin/neap"), Choice::Defaults, &["hoard".to_string()]).err().unwrap();
        let message = error.to_string();
        assert!(message.contains("`hoard`") && message.contains("jemalloc") && !message.contains("neap"), "{message}");
    }

    #[test]
    fn a_variant_replaces_what_is_inherited() {
        let variant = Variant {
            name: "neap-no-rseq",
            kind: AllocatorKind::NeapNoRseq,
            library: Some(PathBuf::from("/x/libneap_malloc.so")),
            environment: vec![("NEAP", "rseq:off")],
            release_thread: false,
        };
        let mut command = Command::new("/usr/bin/env");
        command.env("PYTHONMALLOC", "malloc");
        let inherited = ["PYTHONMALLOC", "MALLOC_CONF", "NEAP", "HOME"];
        variant.replace(&mut command, inherited.into_iter().map(OsString::from));
        let set: BTreeMap<_, _> = command.get_envs().collect();
        assert_eq!(set.get(OsStr::new("PYTHONMALLOC")), Some(&Some(OsStr::new("malloc"))), "set for the command alone");
        assert_eq!((set.get(OsStr::new("MALLOC_CONF")), set.get(OsStr::new("HOME"))), (Some(&None), None));
        assert_eq!(set.get(OsStr::new("LD_PRELOAD")), Some(&Some(OsStr::new("/x/libneap_malloc.so"))));
        assert_eq!(set.get(OsStr::new("NEAP")), Some(&Some(OsStr::new("rseq:off"))));
    }

    #[test]
    fn variables_that_steer_an_allocator_are_known() {
        for name in ["LD_PRELOAD", "MALLOC_ARENA_MAX", "MIMALLOC_VERBOSE", "GLIBC_TUNABLES", "NEAP"] {
            assert!(steers(OsStr::new(name)), "{name}");
        }
        assert!(!steers(OsStr::new("PATH")));
    }
}
