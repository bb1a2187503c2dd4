//! `cargo xtask dependent [--target NAME]`: each crate's package built by itself, and a Rust
//! program outside the workspace that depends on the packaged crate, built with ordinary settings,
//! and run: with each profile, also for musl, as a static-pie, and, under `qemu-aarch64`, for
//! arm64. With a target, the program alone.
//!
//! `cargo package` makes each crate's package, with the files and the manifest that a registry
//! would have. So a file, a version or a feature that a package lacks is found here. Cargo's own
//! verification of several packages is left out: it keeps unpacked packages in cargo's home by
//! their version, so a second run may build those of the first.
//!
//! The workspace's own profile joins all code into one object file, where one declaration makes a
//! symbol weak for all of it; a program with ordinary settings has many object files. A strong
//! reference to a symbol that only some C libraries have breaks the program: at its start if the
//! GNU C library is older than 2.35, and in the linker for musl.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Result, bail, ensure};

use crate::packages::install::VERSION;
use crate::process::{capture, cargo, command, need};
use crate::report::Report;
use crate::smoke::locked;
use crate::source_rules::tidy;
use crate::target::{MUSL, Target, standard_library};
use crate::{lanes, layout};

/// Symbols that a C library may lack.
const OPTIONAL: &[&str] = &["__rseq_offset", "__rseq_size", "_IO_list_lock", "_IO_list_unlock", "_IO_list_resetlock"];

const MANIFEST: &str = r#"
[package]
name = "dependent"
version = "0.0.0"
edition = "2024"

[dependencies]
neap = { path = "PACKAGES/neap-VERSION" }

[profile.apart]
inherits = "release"
lto = "off"
codegen-units = 16

[workspace]
members = ["packages/*"]

[patch.crates-io]
"#;

/// Crates that cannot be packaged: they are built with flags of their own, as libraries for C.
const NOT_PACKAGED: &[&str] = &["neap-c", "neap-malloc", "neap-mallctl"];

/// Threads that free blocks of other threads, of sizes for each path, and a statistic of neap's
/// own.
const PROGRAM: &str = r#"
#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

fn main() {
    let (to, from) = std::sync::mpsc::channel::<Vec<usize>>();
    let workers: Vec<_> = (0..4)
        .map(|n| {
            let to = to.clone();
            std::thread::spawn(move || (0..20_000).for_each(|i| to.send(vec![n; (i * 37) % 3000 + 1]).unwrap()))
        })
        .collect();
    drop(to);
    let sum: usize = from.iter().map(|words| words.len()).sum();
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    assert_eq!(sum, 4 * (0..20_000).map(|i| (i * 37) % 3000 + 1).sum::<usize>());
    let large = vec![1_u8; 64 << 20];
    assert!(neap::process::PROCESS.usage().used_bytes >= large.len() as u64);
    println!("ok");
}
"#;

/// The features with which each package is built.
const FEATURES: &[&[&str]] = &[&[], &["--all-features"], &["--no-default-features"]];

/// Default, many object files without optimisation at link time, and debug.
const PROFILES: &[&str] = &["release", "apart", "dev"];

/// The command. With a target, it builds and runs the program for that target alone.
///
/// # Errors
/// [`Skipped`](crate::Skipped) if tools for the named target are missing.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    let mut report = Report::default();
    match Target::parse(arguments)? {
        (_, [extra, ..]) => bail!("`dependent` takes no argument but --target, and got `{extra}`"),
        (Target::Native, []) => {
            let targets = [Target::Native, Target::Musl, Target::Arm64];
            let builds = targets.into_iter().flat_map(|target| PROFILES.iter().map(move |profile| (target, *profile)));
            all(&mut report, &builds.collect::<Vec<_>>())?;
        }
        (target, []) => {
            can_build(target)?;
            for_target(&mut report, target)?;
        }
    }
    report.close("dependent")
}

/// Builds the packages. Builds and runs the program with each profile, and with one for musl. All
/// are counted in a report with other checks.
pub(crate) fn into(report: &mut Report) -> Result<()> {
    let native = PROFILES.iter().map(|profile| (Target::Native, *profile));
    all(report, &native.chain([(Target::Musl, "release")]).collect::<Vec<_>>())
}

/// Builds each package by itself, and the program with each target and profile, side by side.
fn all(report: &mut Report, builds: &[Build]) -> Result<()> {
    let folder = prepare()?;
    let report = Mutex::new(report);
    // Packages are built in the folder of the profile `dev`, in which cargo does one build at a
    // time.
    let packages = || {
        by_themselves(&report, &folder);
        Ok(())
    };
    lanes::both(packages, || each(&report, &folder, builds)).map(|_| ())
}

/// Builds and runs the program with each profile for one target alone.
pub(crate) fn for_target(report: &mut Report, target: Target) -> Result<()> {
    let builds: Vec<Build> = PROFILES.iter().map(|profile| (target, *profile)).collect();
    each(&Mutex::new(report), &prepare()?, &builds)
}

/// A build of the program: target and profile.
type Build = (Target, &'static str);

/// Whether the program can be built for a target and run here.
///
/// # Errors
/// [`Skipped`](crate::Skipped), with the command that installs the missing tools.
fn can_build(target: Target) -> Result<()> {
    match target {
        // A static program needs no C compiler for musl.
        Target::Musl => standard_library(MUSL),
        Target::Native | Target::Arm64 => target.is_there(true),
    }
}

/// Builds and runs the program for each target and profile.
fn each(report: &Mutex<&mut Report>, folder: &Path, builds: &[Build]) -> Result<()> {
    lanes::each(lanes::BUSY, builds, |(target, profile)| {
        let name = match target.name() {
            Some(target) => format!("profile {profile}, for {target}"),
            None => format!("profile {profile}"),
        };
        match can_build(*target) {
            Ok(()) => {
                let result = run(folder, profile, *target);
                locked(report).check(&name, result);
            }
            Err(error) => locked(report).skip(&name, &error.to_string()),
        }
        Ok(())
    })
}

/// Writes the dependent program and unpacks neap's crates for it. Returns the program's folder.
fn prepare() -> Result<PathBuf> {
    need("cc", &["gcc", "libc6-dev"])?;
    need("nm", &["binutils"])?;
    let folder = layout::target().join("dependent");
    println!("a program that depends on the crate, in {}", folder.display());
    fs::create_dir_all(folder.join("src"))?;
    // An absolute path, since cargo runs in this folder.
    let folder = fs::canonicalize(folder)?;
    fs::write(folder.join("Cargo.toml"), manifest(&packages(&folder)?))?;
    fs::write(folder.join("src/main.rs"), PROGRAM)?;
    // The versions of the workspace, which are downloaded already.
    fs::copy(layout::root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    Ok(folder)
}

/// The crates that a registry would have, which are those that a program in Rust needs.
pub(crate) fn packaged() -> impl Iterator<Item = &'static str> {
    tidy::RING_0.iter().copied().filter(|name| !NOT_PACKAGED.contains(name))
}

/// Packages the crates, and returns the packages.
pub(crate) fn package() -> Result<Vec<PathBuf>> {
    let package = |more: &[&str]| {
        let mut package = cargo(["package", "--quiet", "--no-verify", "--allow-dirty"]);
        package.args(packaged().flat_map(|name| ["--package", name])).args(more).current_dir(layout::root());
        capture(package)
    };
    // A machine that has built the workspace needs no registry.
    package(&["--offline"]).or_else(|_| package(&[]))?;
    let made = fs::canonicalize(layout::target())?.join("package");
    Ok(packaged().map(|name| made.join(format!("{name}-{VERSION}.crate"))).collect())
}

/// Packages the crates and unpacks them in a folder, which is returned.
fn packages(folder: &Path) -> Result<PathBuf> {
    let (unpacked, fresh) = (folder.join("packages"), folder.join("unpacking"));
    if fresh.exists() {
        fs::remove_dir_all(&fresh)?;
    }
    fs::create_dir_all(&fresh)?;
    for package in package()? {
        let mut tar = command("tar", ["-xf"]);
        tar.arg(package).arg("-C").arg(&fresh);
        capture(tar)?;
    }
    renew(&fresh, &unpacked)?;
    Ok(unpacked)
}

/// Makes a folder equal to another one. Only files that differ are written: all files of a package
/// have one fixed time, and cargo builds a crate again when a file is newer than the build.
fn renew(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(to)? {
        let entry = entry?;
        if !from.join(entry.file_name()).exists() {
            if entry.path().is_dir() { fs::remove_dir_all(entry.path())? } else { fs::remove_file(entry.path())? }
        }
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, copy) = (entry.path(), to.join(entry.file_name()));
        if source.is_dir() {
            renew(&source, &copy)?;
        } else {
            let bytes = fs::read(&source)?;
            if fs::read(&copy).ok().as_ref() != Some(&bytes) {
                fs::write(&copy, bytes)?;
            }
        }
    }
    Ok(())
}

/// The program's manifest: the crates that neap depends on have their places beside it.
fn manifest(packages: &Path) -> String {
    let packages = packages.to_string_lossy();
    let patches = packaged().filter(|name| *name != "neap");
    let patches = patches.map(|name| format!("{name} = {{ path = \"{packages}/{name}-{VERSION}\" }}\n"));
    MANIFEST.replace("PACKAGES", &packages).replace("VERSION", VERSION) + &patches.collect::<String>()
}

/// Builds each package with only the packages that its manifest names, with each set of features.
fn by_themselves(report: &Mutex<&mut Report>, folder: &Path) {
    for name in packaged() {
        let build = |features: &&[&str]| built(folder, Target::Native, &[&["--package", name], *features].concat());
        let result = FEATURES.iter().try_for_each(|features| build(features).map(|_| ()));
        locked(report).check(&format!("package {name}"), result);
    }
}

/// Has cargo build in the program's folder, and returns the target folder.
fn built(folder: &Path, target: Target, arguments: &[&str]) -> Result<PathBuf> {
    let to = folder.join("target");
    let mut build = target.cargo(&["build", "--quiet", "--target-dir"]);
    build.arg(&to).args(arguments).current_dir(folder);
    capture(build)?;
    Ok(to)
}

/// Builds the program with one profile, checks its symbols, and runs it.
fn run(folder: &Path, profile: &str, target: Target) -> Result<()> {
    let output = built(folder, target, &["--profile", profile])?.join(target.name().unwrap_or_default());
    let program: PathBuf = output.join(if profile == "dev" { "debug" } else { profile }).join("dependent");
    if target == Target::Musl {
        let mut readelf = command("readelf", ["-hlW", &program.to_string_lossy()]);
        readelf.env("LC_ALL", "C");
        is_static_pie(&capture(readelf)?)?;
    } else {
        let imports = capture(command(&target.tool("nm"), ["-D", "--undefined-only", &program.to_string_lossy()]))?;
        let strong = strong(&imports);
        ensure!(strong.is_empty(), "it does not start with a C library without {}", strong.join(", "));
    }
    let said = capture(target.start(&program))?;
    ensure!(said == "ok\n", "it said `{}`", said.trim());
    Ok(())
}

/// An error unless the text of `readelf -hlW` is of a program that is loaded anywhere and asks for
/// no loader.
fn is_static_pie(readelf: &str) -> Result<()> {
    let mut types = readelf.lines().filter_map(|line| line.trim_start().strip_prefix("Type:"));
    let found = types.next().unwrap_or_default().trim();
    ensure!(found.starts_with("DYN "), "no static-pie: its type is `{found}`, not DYN");
    let loader = readelf.lines().any(|line| line.trim_start().starts_with("INTERP "));
    ensure!(!loader, "no static-pie: it asks for a loader (INTERP)");
    Ok(())
}

/// Optional symbols that are not weak, in the text of `nm`.
fn strong(imports: &str) -> Vec<&'static str> {
    let is_strong = |name: &&str| {
        let named = |line: &&str| {
            line.trim_start().strip_prefix("U ").is_some_and(|rest| rest.split('@').next() == Some(*name))
        };
        imports.lines().any(|line| named(&line))
    };
    OPTIONAL.iter().copied().filter(|name| is_strong(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewal_writes_changed_files_only() {
        let folder = std::env::temp_dir().join(format!("neap-renew-{}", std::process::id()));
        let (from, to) = (folder.join("from"), folder.join("to"));
        for (place, name, text) in
            [(&from, "d/kept", "a"), (&from, "d/new", "b"), (&to, "d/kept", "a"), (&to, "e/gone", "")]
        {
            let file = place.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let long_ago = std::time::SystemTime::UNIX_EPOCH + core::time::Duration::from_secs(1);
        fs::File::options().write(true).open(to.join("d/kept")).unwrap().set_modified(long_ago).unwrap();
        renew(&from, &to).unwrap();
        assert_eq!(to.join("d/kept").metadata().unwrap().modified().unwrap(), long_ago);
        assert_eq!(fs::read(to.join("d/new")).unwrap(), b"b");
        assert!(!to.join("e").exists());
        fs::write(from.join("d/kept"), "c").unwrap();
        renew(&from, &to).unwrap();
        assert_eq!(fs::read(to.join("d/kept")).unwrap(), b"c");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn static_pie_has_no_loader_and_no_fixed_address() {
        let text = |kind: &str, segment: &str| {
            format!(
                "ELF Header:\n  Type:                              {kind}\n\nProgram Headers:\n  \
                 Type           Offset   VirtAddr\n  PHDR           0x000040 0x0000000000000040\n  \
                 {segment} 0x0002a8 0x00000000000002a8\n"
            )
        };
        is_static_pie(&text("DYN (Position-Independent Executable file)", "LOAD          ")).unwrap();
        let error = is_static_pie(&text("EXEC (Executable file)", "LOAD          ")).unwrap_err().to_string();
        assert!(error.contains("EXEC"), "{error}");
        let error = is_static_pie(&text("DYN (Position-Independent Executable file)", "INTERP        ")).unwrap_err();
        assert!(error.to_string().contains("INTERP"), "{error}");
        assert!(is_static_pie("").is_err());
    }

    #[test]
    fn a_strong_reference_is_told_from_a_weak_one() {
        let imports = "                 U __rseq_offset@GLIBC_2.35\n                 w __rseq_size@GLIBC_2.35\n\
                                        v _IO_list_lock\n                 U __rseq_offsets\n";
        assert_eq!(strong(imports), ["__rseq_offset"]);
        assert!(strong("                 w __rseq_offset@GLIBC_2.35\n").is_empty());
    }
}
