//! `cargo xtask symbols`: what the preload library imports from and exports to the programs it is loaded into.
//!
//! An import that allocates would recurse and one that an old C library lacks would stop every program; an export beyond
//! the malloc family could replace a program's own function. `nm` and `readelf` of binutils read the file; each symbol
//! that breaks a rule is named.

use anyhow::Result;

use crate::layout;
use crate::process::{capture, command, need};
use crate::report::Report;

/// Imports that the library may have. None of them allocates.
const IMPORTS: &[&str] = &[
    "memcpy",
    "memmove",
    "memset",
    "memcmp",
    "bcmp",
    "strlen",
    "__register_atfork",
    "__errno_location",
    "environ",
    "__environ",
    "getauxval",
];
const IMPORT_PREFIXES: &[&str] = &["pthread_", "__rseq_"];

/// Imports that may be there if they are weak: the compiler's start-up files put the first four into every shared object;
/// `malloc_info` writes to the caller's `FILE` by the last, and is never called by anything but the program.
const WEAK_IMPORTS: &[&str] =
    &["__cxa_finalize", "__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "fwrite"];

/// Exports that must be there: a program whose `free` is ours and whose `reallocarray` is not would crash.
const FAMILY: &[&str] = &[
    "malloc",
    "calloc",
    "realloc",
    "reallocarray",
    "free",
    "cfree",
    "memalign",
    "posix_memalign",
    "aligned_alloc",
    "valloc",
    "pvalloc",
    "malloc_usable_size",
    "malloc_trim",
    "mallopt",
    "mallinfo",
    "mallinfo2",
    "malloc_info",
    "malloc_stats",
    "free_sized",
    "free_aligned_sized",
];

/// C++ `operator delete` and `operator delete[]` in all their forms.
const DELETE_PREFIXES: &[&str] = &["_ZdlPv", "_ZdaPv"];

/// Shared objects that the library may ask for: the C library and the loader, which is its other half.
const NEEDED_PREFIXES: &[&str] = &["libc.so.", "ld-linux"];

fn starts_with_any(name: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| name.starts_with(prefix))
}

fn import_allowed(name: &str, weak: bool) -> bool {
    IMPORTS.contains(&name) || starts_with_any(name, IMPORT_PREFIXES) || (weak && WEAK_IMPORTS.contains(&name))
}

fn export_allowed(name: &str) -> bool {
    FAMILY.contains(&name) || starts_with_any(name, DELETE_PREFIXES)
}

/// Kind letter and name, without version, of each line of `nm -D`.
fn listed(nm: &str) -> Vec<(char, &str)> {
    nm.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().rev();
            let name = words.next()?.split('@').next()?;
            let kind = words.next()?.chars().next()?;
            Some((kind, name))
        })
        .collect()
}

/// Checks the built library.
pub(crate) fn check() -> Result<()> {
    let mut report = Report::default();
    into(&mut report)?;
    report.close("symbols")
}

/// The same checks, counted in a report that has others in it.
pub(crate) fn into(report: &mut Report) -> Result<()> {
    need("nm", &["binutils"])?;
    let library = layout::library();
    let path = library.to_string_lossy();
    println!("symbols of {path}");
    let undefined = capture(command("nm", ["-D", "--undefined-only", &path]))?;
    let defined = capture(command("nm", ["-D", "--defined-only", &path]))?;
    let dynamic = capture(command("readelf", ["-dW", &path]))?;

    let join = |names: Vec<&str>| names.join(", ");
    let complain = |names: Vec<&str>, what: &str| -> Result<()> {
        anyhow::ensure!(names.is_empty(), "{what}: {}", join(names));
        Ok(())
    };
    let imports = listed(&undefined)
        .into_iter()
        .filter(|(kind, name)| !import_allowed(name, matches!(kind, 'w' | 'v')))
        .map(|(_, name)| name)
        .collect();
    report.check("imports", complain(imports, "imported and not allowed"));
    let exports = listed(&defined).into_iter().map(|(_, name)| name).filter(|name| !export_allowed(name)).collect();
    report.check("exports", complain(exports, "exported and not of the malloc family"));
    let present = listed(&defined);
    let missing = FAMILY.iter().copied().filter(|wanted| present.iter().all(|(_, name)| name != wanted)).collect();
    report.check("family", complain(missing, "of the malloc family and not exported"));
    let needed = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| line.split(['[', ']']).nth(1))
        .filter(|name| !starts_with_any(name, NEEDED_PREFIXES))
        .collect();
    report.check("needed", complain(needed, "asks for a shared object other than the C library"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nm_lines_lose_address_and_version() {
        let lines =
            "                 U memcpy@GLIBC_2.14\n0000000000001130 T malloc\n                 w __gmon_start__\n";
        assert_eq!(listed(lines), [('U', "memcpy"), ('T', "malloc"), ('w', "__gmon_start__")]);
    }

    #[test]
    fn an_import_that_may_allocate_is_refused() {
        assert!(import_allowed("pthread_create", false));
        assert!(import_allowed("__cxa_finalize", true));
        for name in ["__cxa_finalize", "__tls_get_addr", "dlsym", "fopen", "__pthread_key_create"] {
            assert!(!import_allowed(name, false), "{name}");
        }
    }

    #[test]
    fn only_the_family_and_delete_may_be_exported() {
        assert!(export_allowed("_ZdlPvmSt11align_val_t"));
        for name in ["_Znwm", "rust_eh_personality", "neap_stats", "memcpy"] {
            assert!(!export_allowed(name), "{name}");
        }
    }
}
