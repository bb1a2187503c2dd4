//! `cargo xtask symbols`: imports and exports of the libraries, and imports of the command `neap`.
//!
//! An import that allocates would recurse, and one that an old C library lacks would stop every
//! program. An export beyond the malloc family and the declarations of `neap.h` could replace a
//! program's own function. Every library has all functions of the header. `nm` and `readelf` of
//! binutils read the files; each symbol that breaks a rule is named.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::build::{MALLCTL_SONAME, MALLOC_SONAME, SONAME};
use crate::layout;
use crate::library::depth;
use crate::library::listing::Listing;
use crate::library::probes;
use crate::library::stub_libc::{REQUIRED, VARIABLES};
use crate::library::unwind;
use crate::process::{capture, command, need};
use crate::report::Report;
use crate::target::Target;

/// The latest version of glibc whose symbols libraries may ask for: its first one for aarch64.
const LATEST_GLIBC: [u32; 2] = [2, 17];

/// The latest version of glibc whose symbols the command may ask for, as the guide to installation
/// states. It is linked with the C library of the building machine, not with the stub. Rust's
/// standard library asks for threads, which are in `libc.so.6` since this version.
const LATEST_GLIBC_OF_COMMAND: [u32; 2] = [2, 34];

/// Imports that must be weak:
///
/// * `malloc_info` writes to the caller's `FILE`; only the program calls it.
/// * `operator new` without memory uses the C++ library's own.
/// * neap's thread uses the C library's functions for threads, which `dlsym` finds, or an older
///   glibc's functions that find `dlsym`.
/// * The C library says whether there is one thread, and where it registers threads for rseq.
/// * Threads of musl say when they end, where neap registers them itself.
/// * Fork takes the streams' lock before the gate is closed, and registers handlers by the C
///   library's own name.
const WEAK_IMPORTS: &[&str] = &[
    "__register_atfork",
    "pthread_atfork",
    "fwrite",
    "dlopen",
    "dlsym",
    "__libc_dlopen_mode",
    "__libc_dlsym",
    "_rtld_global",
    "__rseq_offset",
    "__rseq_size",
    "_IO_list_lock",
    "_IO_list_unlock",
    "_IO_list_resetlock",
    "__libc_single_threaded",
    "gnu_get_libc_version",
    "pthread_key_create",
    "pthread_setspecific",
    "pthread_setcancelstate",
];

/// Required exports: a program with neap's `free` and another `reallocarray` would crash.
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
    "mallocx",
    "rallocx",
    "xallocx",
    "sallocx",
    "nallocx",
    "dallocx",
    "sdallocx",
    // The GNU C library's own names.
    "__libc_malloc",
    "__libc_calloc",
    "__libc_realloc",
    "__libc_free",
    "__libc_memalign",
    "__libc_valloc",
    "__libc_pvalloc",
    // Children of vfork may allocate.
    "vfork",
    "__vfork",
    // neap's own opens libraries without RTLD_DEEPBIND.
    "dlopen",
    // Functions that make threads; here neap makes its own, too.
    "pthread_create",
    "thrd_create",
    // C++'s operators new and delete, of one and of arrays.
    "_Znwm",
    "_Znam",
    "_ZnwmSt11align_val_t",
    "_ZnamSt11align_val_t",
    "_ZnwmRKSt9nothrow_t",
    "_ZnamRKSt9nothrow_t",
    "_ZnwmSt11align_val_tRKSt9nothrow_t",
    "_ZnamSt11align_val_tRKSt9nothrow_t",
    "_ZdlPv",
    "_ZdaPv",
    "_ZdlPvm",
    "_ZdaPvm",
    "_ZdlPvSt11align_val_t",
    "_ZdaPvSt11align_val_t",
    "_ZdlPvmSt11align_val_t",
    "_ZdaPvmSt11align_val_t",
    "_ZdlPvRKSt9nothrow_t",
    "_ZdaPvRKSt9nothrow_t",
    "_ZdlPvSt11align_val_tRKSt9nothrow_t",
    "_ZdaPvSt11align_val_tRKSt9nothrow_t",
];

/// Exports of the library with jemalloc's `mallctl`.
const MALLCTL: &[&str] = &["mallctl", "mallctlbymib", "mallctlnametomib"];

/// Functions of `neap.h` that this library imports, all weak: it loads without neap, too.
const MALLCTL_IMPORTS: &[&str] = &["neap_profile_dump", "neap_release", "neap_stats_get", "neap_tick"];

/// Shared objects that the library may need: the C library and the loader, which belongs to it.
const NEEDED_PREFIXES: &[&str] = &["libc.so.", "ld-linux"];

fn starts_with_any(name: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| name.starts_with(prefix))
}

/// Whether the stub of the C library has a symbol, so that any C library must.
fn is_required(name: &str) -> bool {
    REQUIRED.iter().chain(VARIABLES).any(|(required, _)| *required == name)
}

fn import_allowed(name: &str, weak: bool) -> bool {
    is_required(name) || (weak && WEAK_IMPORTS.contains(&name))
}

/// Exports in musl alone: its flush of all streams must exclude a fork.
const OF_MUSL: &[&str] = &["fflush"];

fn of_malloc(name: &str) -> bool {
    FAMILY.contains(&name)
}

/// The functions that a C header declares: names of neap's followed by a parenthesis, outside
/// comments and macros.
fn declared(header: &str) -> BTreeSet<&str> {
    let (mut names, mut rest) = (BTreeSet::new(), header);
    while let Some((code, comment)) = rest.split_once("/*").or((!rest.is_empty()).then_some((rest, ""))) {
        for line in code.lines().filter(|line| !line.starts_with('#')) {
            let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let calls = line.match_indices('(').map(|(at, _)| line[..at].rsplit(|c| !is_name(c)).next().unwrap_or(""));
            names.extend(calls.filter(|name| name.starts_with("neap_")));
        }
        rest = comment.split_once("*/").map_or("", |(_, rest)| rest);
    }
    names
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

/// The version of glibc that a line of `nm` asks for.
fn glibc(line: &str) -> Option<Vec<u32>> {
    let (_, version) = line.rsplit_once("@GLIBC_")?;
    Some(version.split('.').map(|number| number.parse().unwrap_or(u32::MAX)).collect())
}

/// An error that names symbols of a later glibc than is promised.
fn glibc_is_old(undefined: &str, latest: [u32; 2]) -> Result<()> {
    let later = undefined.lines().filter(|line| glibc(line).is_some_and(|version| version[..] > latest[..]));
    none(later.map(str::trim), &format!("of a later glibc than {}.{}", latest[0], latest[1]))
}

/// An error that names functions with a wrong version. With a SONAME, each must have its version.
/// The preload library stands before the C library, where a symbol with a version would not be
/// chosen.
fn versions(defined: &str, soname: Option<&str>) -> Result<()> {
    let version = soname.and_then(|name| name.rsplit('.').next()).map(|number| format!("@@NEAP_{number}"));
    let is_right = |line: &&str| match &version {
        // The version itself is listed as an absolute symbol.
        Some(version) => line.ends_with(version.as_str()) || line.contains(" A "),
        None => !line.contains('@'),
    };
    none(defined.lines().filter(|line| !is_right(line)), "with a wrong version")
}

/// Checks the built library.
pub(crate) fn check() -> Result<()> {
    let mut report = Report::default();
    into(&mut report)?;
    report.close("symbols")
}

/// Checks the built library, counted in a report with other checks.
pub(crate) fn into(report: &mut Report) -> Result<()> {
    let library = layout::built_library()?;
    need("nm", &["binutils"])?;
    let header = layout::header();
    let header = fs::read_to_string(&header).with_context(|| header.display().to_string())?;
    let functions = declared(&header);
    let [shared, archive] = layout::c_libraries();
    loaded(report, Target::Native, &library, true, &functions)?;
    loaded(report, Target::Native, &shared, false, &functions)?;
    mallctl(report, &layout::mallctl(), &functions)?;
    println!("symbols of {}", archive.display());
    let defined = capture(command("nm", ["--defined-only", "--extern-only", "--quiet", &archive.to_string_lossy()]))?;
    let names: BTreeSet<&str> = listed(&defined).into_iter().map(|(_, name)| name).collect();
    report.check(
        "functions of the header",
        same(&functions, names.iter().copied().filter(|n| n.starts_with("neap_")).collect()),
    );
    report.check("exports", none(names.into_iter().filter(|name| of_malloc(name)), "replaces the C library's"));
    println!("symbols of {}", layout::tool().display());
    let undefined = capture(command("nm", ["-D", "--undefined-only", &layout::tool().to_string_lossy()]))?;
    report.check("versions of the C library", glibc_is_old(&undefined, LATEST_GLIBC_OF_COMMAND));
    probes::into(report)
}

/// An error that names all items, if there are any.
fn none<'n>(names: impl Iterator<Item = &'n str>, what: &str) -> Result<()> {
    let names: Vec<&str> = names.collect();
    ensure!(names.is_empty(), "{what}: {}", names.join(", "));
    Ok(())
}

/// An error that names items of one set only, if there are any.
fn same(declared: &BTreeSet<&str>, defined: BTreeSet<&str>) -> Result<()> {
    ensure!(!declared.is_empty(), "no function is expected");
    none(declared.difference(&defined).copied(), "expected and not in the library")?;
    none(defined.difference(declared).copied(), "in the library and not expected")
}

/// Checks the names by which the loader knows a shared object and those that it asks for.
fn links(report: &mut Report, dynamic: &str, soname: &str) {
    let named = dynamic.lines().any(|line| line.contains("(SONAME)") && line.contains(&format!("[{soname}]")));
    report.check("soname", if named { Ok(()) } else { Err(anyhow::anyhow!("it is not {soname}")) });
    let needed = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| line.split(['[', ']']).nth(1))
        .filter(|name| !starts_with_any(name, NEEDED_PREFIXES));
    report.check("needed", none(needed, "asks for a shared object other than the C library"));
}

/// Checks the library with `mallctl`, which has no instance of neap: it imports functions of the
/// header, and exports none.
fn mallctl(report: &mut Report, library: &Path, functions: &BTreeSet<&str>) -> Result<()> {
    let path = library.to_string_lossy();
    println!("symbols of {path}");
    let undefined = capture(command("nm", ["-D", "--undefined-only", &path]))?;
    let defined = capture(command("nm", ["-D", "--defined-only", &path]))?;
    report.check("versions of the C library", glibc_is_old(&undefined, LATEST_GLIBC));
    let (of_neap, others): (Vec<_>, Vec<_>) =
        listed(&undefined).into_iter().partition(|(kind, name)| *kind == 'w' && functions.contains(name));
    let others = others.iter().filter(|(_, name)| !is_required(name)).map(|(_, name)| *name);
    report.check("imports", none(others, "imported and not allowed"));
    let of_neap: BTreeSet<&str> = of_neap.into_iter().map(|(_, name)| name).collect();
    report.check("functions of the header", same(&BTreeSet::from_iter(MALLCTL_IMPORTS.iter().copied()), of_neap));
    let exports = listed(&defined).into_iter().map(|(_, name)| name).collect();
    report.check("exports", same(&BTreeSet::from_iter(MALLCTL.iter().copied()), exports));
    links(report, &capture(command("readelf", ["-dW", &path]))?, MALLCTL_SONAME);
    Ok(())
}

/// Checks the preload library for another processor, without the checks that read x86-64
/// instructions.
pub(crate) fn preloaded(report: &mut Report, target: Target) -> Result<()> {
    let header = fs::read_to_string(layout::header())?;
    loaded(report, target, &target.library(), true, &declared(&header))
}

/// Checks imports and exports of a shared object. `malloc`: whether it must have the malloc family.
fn loaded(report: &mut Report, target: Target, library: &Path, malloc: bool, functions: &BTreeSet<&str>) -> Result<()> {
    let path = library.to_string_lossy();
    println!("symbols of {path}");
    let (nm, readelf) = (target.tool("nm"), target.tool("readelf"));
    let undefined = capture(command(&nm, ["-D", "--undefined-only", &path]))?;
    let defined = capture(command(&nm, ["-D", "--defined-only", &path]))?;
    let dynamic = capture(command(&readelf, ["-dW", &path]))?;

    report.check("versions of the C library", glibc_is_old(&undefined, LATEST_GLIBC));
    report.check("versions of functions", versions(&defined, (!malloc).then_some(SONAME)));
    let imports = listed(&undefined);
    let imports = imports.iter().filter(|(kind, name)| !import_allowed(name, matches!(kind, 'w' | 'v')));
    report.check("imports", none(imports.map(|(_, name)| *name), "imported and not allowed"));
    let (ours, others): (BTreeSet<&str>, BTreeSet<&str>) = listed(&defined)
        .into_iter()
        .filter(|(kind, _)| *kind != 'A')
        .map(|(_, name)| name)
        .partition(|name| name.starts_with("neap_"));
    report.check("functions of the header", same(functions, ours));
    let is_musl = target == Target::Musl;
    let exports =
        others.iter().copied().filter(|name| !(malloc && (of_malloc(name) || is_musl && OF_MUSL.contains(name))));
    report.check("exports", none(exports, "exported and of no header"));
    if malloc {
        let missing = FAMILY.iter().copied().filter(|wanted| !others.contains(wanted));
        report.check("family", none(missing, "of the malloc family and not exported"));
        let sections = capture(command(&readelf, ["-SW", &path]))?;
        let zeroes = sections.contains(" .bss ").then_some("put its statics into .data");
        if target.is_of_this_processor() {
            report.check("no .bss", none(zeroes.into_iter(), "every process that loads it has a mapping more"));
        } else {
            report.skip("no .bss", "Rust's runtime for arm64 keeps there which atomic instructions the processor has");
        }
    }
    let notes = capture(command(&readelf, ["-nW", &path]))?;
    let notes = notes.split_once("Provider: otel_memory").map_or("", |(_, notes)| notes);
    let has = |probe: &str| notes.lines().any(|line| line.trim().strip_prefix("Name: ") == Some(probe));
    let missing = ["alloc", "free"].into_iter().filter(|probe| !has(probe));
    report.check("probes", none(missing, "of the probes of otel_memory and not in the notes"));
    links(report, &dynamic, if malloc { MALLOC_SONAME } else { SONAME });
    // After a `dlclose` its thread and its fork handlers would run in unmapped code.
    let stays = dynamic.lines().any(|line| line.contains("(FLAGS_1)") && line.contains("NODELETE"));
    report.check("stays loaded", if stays { Ok(()) } else { Err(anyhow::anyhow!("dlclose unloads it")) });
    if !target.is_of_this_processor() {
        report.skip("unwind information, stack depths", "these checks read instructions of x86-64");
        return Ok(());
    }
    let listing = Listing::of(library)?;
    unwind::into(report, library, &listing)?;
    if is_musl {
        report.skip("stack depths", "the sources are those for glibc, but inlined otherwise");
        return Ok(());
    }
    if malloc { depth::into(report, library, &listing) } else { Ok(()) }
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
        assert!(import_allowed("pthread_attr_init", false) && import_allowed("environ", false));
        assert!(import_allowed("fwrite", true) && import_allowed("dlsym", true));
        for name in [
            "fwrite",
            "__register_atfork",
            "__cxa_finalize",
            "__tls_get_addr",
            "dlsym",
            "fopen",
            "pthread_create",
            "__rseq_offset",
        ] {
            assert!(!import_allowed(name, false), "{name}");
        }
    }

    #[test]
    fn a_later_glibc_and_a_wrong_version_are_named() {
        let old = "         U memcpy@GLIBC_2.14\n         w dlsym\n         U getauxval@GLIBC_2.2.5\n";
        assert!(glibc_is_old(old, LATEST_GLIBC).is_ok());
        let late = old.to_string() + "         w dlsym@GLIBC_2.34\n";
        let error = glibc_is_old(&late, LATEST_GLIBC).unwrap_err().to_string();
        assert_eq!(error, "of a later glibc than 2.17: w dlsym@GLIBC_2.34");
        assert!(glibc_is_old(&late, LATEST_GLIBC_OF_COMMAND).is_ok());
        let later = late + "         U hypot@GLIBC_2.35\n";
        assert!(glibc_is_old(&later, LATEST_GLIBC_OF_COMMAND).unwrap_err().to_string().ends_with("U hypot@GLIBC_2.35"));
        let (plain, versioned) = ("01 T malloc\n01 T neap_a\n", "00 A NEAP_0\n01 T neap_a@@NEAP_0\n");
        assert!(versions(plain, None).is_ok() && versions(versioned, None).is_err());
        assert!(versions(versioned, Some("libneap.so.0")).is_ok() && versions(plain, Some("libneap.so.0")).is_err());
        assert!(versions(versioned, Some("libneap.so.1")).is_err());
    }

    #[test]
    fn the_family_is_that_of_malloc_new_and_delete() {
        assert!(of_malloc("_Znwm") && of_malloc("_ZdlPvmSt11align_val_t"));
        for name in ["_ZnwmPv", "rust_eh_personality", "neap_stats", "memcpy"] {
            assert!(!of_malloc(name), "{name}");
        }
    }

    #[test]
    fn a_header_declares_functions_and_no_more() {
        let header = "/* Call neap_a(). */\n#define neap_b(x) neap_c(x)\nint neap_d(int (*neap_e)(void *f));\n\
                      typedef void (*neap_g)(int); /* see\n neap_h() */ const char *neap_i(\n    void);\n";
        assert_eq!(declared(header), BTreeSet::from(["neap_d", "neap_i"]));
        assert!(same(&BTreeSet::from(["a"]), BTreeSet::from(["a"])).is_ok());
        for (declared, defined) in [("a", "b"), ("a", "")] {
            assert!(same(&BTreeSet::from([declared]), BTreeSet::from([defined])).is_err());
        }
        assert!(same(&BTreeSet::new(), BTreeSet::new()).is_err(), "a header that could not be read");
    }
}
