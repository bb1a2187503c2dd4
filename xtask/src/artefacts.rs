//! `cargo xtask artefacts --to FOLDER [--target TRIPLE]...`: the files of a release, from this
//! tree.
//!
//! For each target an archive of the files that `install` writes below /usr/local, and one of their
//! debug information; once the Debian packages, the packages of crates, a bill of materials and
//! `SHA256SUMS`. The crate `neap-packing` writes archives and lists.
//!
//! `SOURCE_DATE_EPOCH` is the time in all of them. `cargo xtask release` sets it, and has the
//! compiler replace the folders of this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};

use crate::install::VERSION;
use crate::process::{capture, cargo, command, run};
use crate::{Skipped, build, deb, dependent, install_check, layout};

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
        targets.push(host.clone());
    }
    if to.exists() {
        fs::remove_dir_all(&to)?;
    }
    fs::create_dir_all(&to)?;
    let seconds = seconds()?;
    // Also for another target: the host's command writes the man pages.
    build::build()?;
    let mut skipped = Vec::new();
    for target in &targets {
        match archives(target, &host, &seconds, &to) {
            Err(error) if error.is::<Skipped>() => skipped.push(error.to_string()),
            outcome => outcome?,
        }
    }
    ensure!(skipped.len() < targets.len(), "no target could be built: {}", skipped.join("; "));
    let packages = layout::target().join("deb");
    deb::packages(&packages)?;
    copy(&packages, "deb", &to)?;
    for package in dependent::package()? {
        copy_file(&package, &to)?;
    }
    packing(&["sums", &to.to_string_lossy()], None)?;
    for reason in skipped {
        println!("skipped: {reason}");
    }
    Ok(())
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

/// Writes the archives and the bill of one target. An error with the type [`Skipped`] if another
/// target than the host's cannot be built here.
fn archives(target: &str, host: &str, seconds: &str, to: &Path) -> Result<()> {
    let stage = layout::target().join("artefacts").join(target);
    if stage.exists() {
        fs::remove_dir_all(&stage)?;
    }
    let xtask = std::env::current_exe()?;
    let mut install = command(&xtask.to_string_lossy(), ["install", "--prefix", PREFIX, "--destdir"]);
    install.arg(&stage).stdout(Stdio::null());
    if target != host {
        standard_library(target)?;
        install.env(layout::TARGET, target);
    }
    match run(install) {
        Err(error) if target != host => return Err(Skipped(format!("{target} does not build: {error:#}")).into()),
        outcome => outcome?,
    }
    let name = format!("neap-{VERSION}-{}", short(target));
    let installed = stage.join(PREFIX.trim_start_matches('/'));
    let debug = stage.join("debug");
    fs::create_dir_all(debug.join("lib"))?;
    fs::rename(installed.join("lib/debug"), debug.join("lib/debug"))?;
    for (folder, file) in [(&installed, format!("{name}.tar.gz")), (&debug, format!("{name}-debug.tar.gz"))] {
        packing(&["archive", &folder.to_string_lossy(), &name, seconds, &to.join(file).to_string_lossy()], None)?;
    }
    if target == host {
        unpacked(&to.join(format!("{name}.tar.gz")), &stage.join("unpacked"), &name)?;
    }
    let mut metadata = cargo(["metadata", "--format-version", "1", "--locked", "--filter-platform", target]);
    metadata.current_dir(layout::root());
    let (lock, bill) = (layout::root().join("Cargo.lock"), to.join(format!("{name}.cdx.json")));
    packing(&["bill", &lock.to_string_lossy(), target, seconds, &bill.to_string_lossy()], Some(capture(metadata)?))
}

/// Makes sure that Rust's libraries for a target and a linker for it are there.
fn standard_library(target: &str) -> Result<()> {
    let linker = layout::cargo_variable(target, "LINKER");
    if std::env::var_os(&linker).is_none() {
        return Err(Skipped(format!("{target}: {linker} names no linker")).into());
    }
    match capture(command("rustup", ["target", "add", target])) {
        Ok(_) => Ok(()),
        Err(error) => Err(Skipped(format!("{target}: {error:#}")).into()),
    }
}

/// Unpacks an archive with the system's tar, and runs a program by the command in it.
fn unpacked(archive: &Path, folder: &Path, name: &str) -> Result<()> {
    fs::create_dir_all(folder)?;
    let mut tar = command("tar", ["-xzf"]);
    tar.arg(archive).arg("-C").arg(folder);
    capture(tar)?;
    install_check::run(&folder.join(name))
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
