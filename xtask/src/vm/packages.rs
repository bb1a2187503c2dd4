//! The parts of the virtual machine, from Debian's packages.
//!
//! A package is downloaded and unpacked into the target folder, never installed, so no root is
//! needed. An installed QEMU is used. Unpacked packages are reused. It reads apt's lists of
//! packages; without them `apt-get update` by root is needed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::process::{capture, command, which};

/// Files needed to boot.
#[derive(Debug)]
pub(crate) struct Machine {
    /// An emulator, and the folder it was unpacked into unless it is installed.
    pub(crate) qemu: (PathBuf, Option<PathBuf>),
    /// The kernel's image.
    pub(crate) kernel: PathBuf,
    /// That of a kernel with realtime preemption.
    pub(crate) realtime: PathBuf,
    /// A shell and its tools, in one file without libraries.
    pub(crate) busybox: PathBuf,
}

/// Finds or downloads everything.
pub(crate) fn obtain(folder: &Path) -> Result<Machine> {
    ensure!(cfg!(target_arch = "x86_64"), "the machine is described for x86-64 alone");
    let root = folder.join("root");
    let busybox = root.join("bin/busybox");
    if !busybox.exists() {
        unpack(folder, &root, &["busybox-static".into()])?;
    }
    let cloud = kernel(folder, &root, "linux-image-cloud-amd64")?;
    let realtime = kernel(folder, &folder.join("realtime"), "linux-image-rt-amd64")?;
    let own = root.join("usr/bin/qemu-system-x86_64");
    let qemu = match which("qemu-system-x86_64") {
        Some(installed) => (installed, None),
        None => {
            if !own.exists() {
                unpack(folder, &root, &with_missing("qemu-system-x86")?)?;
            }
            (own, Some(root))
        }
    };
    ensure!(qemu.0.exists() && busybox.exists(), "the packages do not hold what their names say");
    Ok(Machine { qemu, kernel: cloud, realtime, busybox })
}

/// The kernel in `root`, unpacked there from the package that `newest` depends on.
fn kernel(folder: &Path, root: &Path, newest: &str) -> Result<PathBuf> {
    if image(root).is_none() {
        let depends = capture(command("apt-cache", ["depends", newest]))?;
        let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        unpack(folder, root, &[package.with_context(|| format!("apt knows no {newest}"))?.into()])?;
    }
    image(root).context("the kernel's package has no boot/vmlinuz-*")
}

fn image(root: &Path) -> Option<PathBuf> {
    let files = fs::read_dir(root.join("boot")).ok()?;
    let mut images: Vec<PathBuf> = files.filter_map(|file| Some(file.ok()?.path())).collect();
    images.retain(|image| image.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")));
    images.sort();
    images.pop()
}

/// A package and its dependencies that are not installed.
fn with_missing(package: &str) -> Result<Vec<String>> {
    let plan = capture(command("apt-get", ["install", "--simulate", "--no-install-recommends", package]))?;
    let packages: Vec<String> =
        plan.lines().filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next()).map(str::to_string).collect();
    if packages.is_empty() {
        bail!("apt would install nothing for {package}:\n{plan}");
    }
    Ok(packages)
}

/// Downloads packages into a folder, and unpacks them below `root`.
pub(crate) fn unpack(folder: &Path, root: &Path, packages: &[String]) -> Result<()> {
    println!("downloading {}", packages.join(" "));
    let archives = folder.join("packages");
    // Left from an interrupted attempt.
    if archives.exists() {
        fs::remove_dir_all(&archives)?;
    }
    fs::create_dir_all(&archives)?;
    fs::create_dir_all(root)?;
    let mut download = command("apt-get", ["download", "-qq"]);
    download.args(packages).current_dir(&archives);
    capture(download).context("`apt-get update` by root may help")?;
    for archive in fs::read_dir(&archives)? {
        let mut extract = command("dpkg-deb", ["--extract"]);
        extract.arg(archive?.path()).arg(root);
        capture(extract)?;
    }
    fs::remove_dir_all(&archives)?;
    Ok(())
}
