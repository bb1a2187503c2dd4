//! `cargo xtask artefacts --to FOLDER [--target TRIPLE]...`: the files of a release, from this
//! tree.
//!
//! For each target: an archive of the files that `install` writes below /usr/local, an archive of
//! their debug information, a bill of materials and the Debian packages. For musl, the archive has
//! the preload library and `neap.h` alone, and there are no packages. Once: the packages of crates
//! and `SHA256SUMS`. The crate `neap-packing` writes archives and lists. Without `--target` the
//! targets are this machine's, and on x86-64 with glibc also arm64 and musl.
//!
//! `SOURCE_DATE_EPOCH` is the time in all of these files. `cargo xtask release` sets it, and has
//! the compiler replace the folders of this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};

use crate::packages::contents;
use crate::packages::crates::{PRELOADED, SHIPPED};
use crate::packages::deb;
use crate::packages::install::{self, VERSION};
use crate::packages::install_check;
use crate::packages::places::Places;
use crate::process::{capture, cargo, command, need, run};
use crate::report::Report;
use crate::target::{ARM64, MUSL, Target, for_target, standard_library};
use crate::{build, dependent, layout, programs};

/// Where the archive's files lie if it is unpacked in the root.
const PREFIX: &str = "/usr/local";

/// Reads the arguments, and writes all files.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    let (mut to, mut targets) = (None, Vec::new());
    for pair in arguments.chunks(2) {
        match pair {
            [option, folder] if option == "--to" => to = Some(std::path::absolute(folder)?),
            [option, triple] if option == "--target" => targets.push(triple.clone()),
            _ => bail!("artefacts takes --to FOLDER and --target TRIPLE, but got `{}`", pair.join(" ")),
        }
    }
    let to = to.context("--to FOLDER is needed")?;
    let host = layout::host()?;
    if targets.is_empty() {
        targets = all()?;
    }
    if to.exists() {
        fs::remove_dir_all(&to)?;
    }
    fs::create_dir_all(&to)?;
    let seconds = seconds()?;
    // Also for another processor: the host's command writes the man pages.
    if targets.iter().any(|target| target != MUSL) {
        build::build()?;
    }
    for target in &targets {
        if *target != host {
            standard_library(target)?;
        }
        if target == ARM64 {
            need(&Target::Arm64.tool("gcc"), &["gcc-aarch64-linux-gnu"])?;
        }
        if target == MUSL {
            need(&Target::Musl.tool("gcc"), &["musl-tools"])?;
        }
        println!("artefacts: archives for {target}");
        archives(target, &host, &seconds, &to).with_context(|| target.clone())?;
        if target == MUSL {
            continue;
        }
        println!("artefacts: Debian packages for {target}");
        run(for_target(target, &host, &["deb"])?)?;
        copy(&deb::folder((*target != host).then_some(target)), "deb", &to)?;
    }
    for package in dependent::package()? {
        copy_file(&package, &to)?;
    }
    packing(&["sums", &to.to_string_lossy()], None)
}

/// The targets of a release.
pub(crate) fn all() -> Result<Vec<String>> {
    let host = layout::host()?;
    let others = beside(&host).iter().map(|target| target.to_string());
    Ok([host.clone()].into_iter().chain(others).collect())
}

/// The targets that are built on a machine beside its own.
fn beside(host: &str) -> &'static [&'static str] {
    match host {
        // Debian's musl-gcc builds for its own processor.
        "x86_64-unknown-linux-gnu" => &[ARM64, MUSL],
        _ => &[],
    }
}

/// The time of the release, in seconds since 1970.
fn seconds() -> Result<String> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(seconds) => Ok(seconds),
        Err(_) => {
            let root = layout::root();
            let seconds = capture(command("git", ["-C", &root.to_string_lossy(), "log", "-1", "--format=%ct"]))?;
            Ok(seconds.trim().to_string())
        }
    }
}

/// The name of a target in file names: without the vendor.
fn short(target: &str) -> String {
    target.replacen("-unknown-", "-", 1)
}

/// Writes the archives and the bill of one target.
fn archives(target: &str, host: &str, seconds: &str, to: &Path) -> Result<()> {
    let stage = layout::target().join("artefacts").join(target);
    if stage.exists() {
        fs::remove_dir_all(&stage)?;
    }
    if target == MUSL {
        run(Target::Musl.cargo_of_library()?)?;
        install::library_for_musl(&Places::staged(Path::new(PREFIX), &stage))?;
    } else {
        let mut install = for_target(target, host, &["install", "--prefix", PREFIX, "--destdir"])?;
        install.arg(&stage).stdout(Stdio::null());
        run(install)?;
    }
    let name = format!("neap-{VERSION}-{}", short(target));
    let installed = stage.join(PREFIX.trim_start_matches('/'));
    let debug = stage.join("debug");
    fs::create_dir_all(debug.join("lib"))?;
    fs::rename(installed.join("lib/debug"), debug.join("lib/debug"))?;
    let part = if target == MUSL { "-musl" } else { "" };
    for (folder, kind) in [(&installed, ""), (&debug, "-debug")] {
        let file = to.join(format!("{name}{kind}.tar.gz"));
        packing(&["archive", &folder.to_string_lossy(), &name, seconds, &file.to_string_lossy()], None)?;
        let listing = capture(command("tar", ["-tvzf", &file.to_string_lossy()]))?;
        contents::check(&listing, &format!("archive{part}{kind}"), &format!("{name}/"), "lib")?;
    }
    let prefix = unpacked(&to.join(format!("{name}.tar.gz")), &stage.join("unpacked"), &name)?;
    if target == host && target != MUSL {
        install_check::run(&prefix)?;
    } else if target == ARM64 && Target::Arm64.is_there(true).is_ok() {
        let mut neap = Target::Arm64.start(&prefix.join("bin/neap"));
        neap.arg("--version");
        let said = capture(neap)?;
        ensure!(said.trim() == format!("neap {VERSION}"), "`neap --version` says {said}");
    } else if target == MUSL {
        let mut report = Report::default();
        programs::musl(&mut report, &prefix.join("lib/libneap_malloc.so"), &stage);
        report.close("the archive for musl")?;
    } else {
        println!("artefacts: the command for {target} was not run");
    }
    let mut metadata = cargo(["metadata", "--format-version", "1", "--locked", "--filter-platform", target]);
    metadata.current_dir(layout::root());
    let (lock, bill) = (layout::root().join("Cargo.lock"), to.join(format!("{name}.cdx.json")));
    let shipped = if target == MUSL { PRELOADED } else { SHIPPED };
    let inputs = ["bill", &lock.to_string_lossy(), target, seconds, &bill.to_string_lossy()];
    packing(&[&inputs, shipped].concat(), Some(capture(metadata)?))
}

/// Unpacks an archive with the system's tar, and returns its prefix.
fn unpacked(archive: &Path, folder: &Path, name: &str) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let mut tar = command("tar", ["-xzf"]);
    tar.arg(archive).arg("-C").arg(folder);
    capture(tar)?;
    Ok(folder.join(name))
}

/// Runs `neap-packing`, with a text on its input.
fn packing(arguments: &[&str], input: Option<String>) -> Result<()> {
    let mut packing = cargo(["run", "--quiet", "--package", "neap-packing", "--"]);
    packing.args(arguments).current_dir(layout::root());
    let Some(input) = input else { return run(packing) };
    let file = layout::target().join("artefacts/input");
    fs::write(&file, input)?;
    packing.stdin(fs::File::open(&file)?);
    run(packing)
}

/// Copies a file into a folder.
fn copy_file(file: &Path, to: &Path) -> Result<()> {
    fs::copy(file, to.join(file.file_name().context("a file has a name")?))
        .with_context(|| file.display().to_string())?;
    Ok(())
}

/// Copies all files of a folder with an extension.
fn copy(folder: &Path, extension: &str, to: &Path) -> Result<()> {
    let files = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    files
        .iter()
        .filter(|file| file.extension().is_some_and(|end| end == extension))
        .try_for_each(|file| copy_file(file, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_x86_64_with_glibc_builds_for_other_targets() {
        assert_eq!(beside("x86_64-unknown-linux-gnu"), [ARM64, MUSL]);
        for host in [ARM64, MUSL, "riscv64gc-unknown-linux-gnu"] {
            assert!(beside(host).is_empty(), "{host}");
        }
    }
}
