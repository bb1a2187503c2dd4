//! The parts of the virtual machine, from Debian's packages.
//!
//! A package is downloaded and unpacked into the target folder, never installed, so no root is
//! needed. An installed QEMU is used. Unpacked packages are reused. It reads apt's lists of
//! packages; without them `apt-get update` by root is needed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};

use crate::process::{capture, command, which};
use crate::target::Target;
use crate::vm::machine::Shape;

/// Files needed to boot.
#[derive(Debug)]
pub(crate) struct Machine {
    /// An emulator, and the folder it was unpacked into unless it is installed.
    pub(crate) qemu: (PathBuf, Option<PathBuf>),
    /// The kernel's image.
    pub(crate) kernel: PathBuf,
    /// The image of a kernel with realtime preemption, or the reason why there is none.
    pub(crate) realtime: Result<PathBuf>,
    /// The image of a kernel of an older release of Debian, or the reason why there is none.
    pub(crate) old: Result<PathBuf>,
    /// A shell and its tools, in one file without libraries.
    pub(crate) busybox: PathBuf,
}

impl Machine {
    /// The kernel of a shape, or the reason why there is none.
    pub(crate) fn kernel(&self, shape: Shape) -> Result<&Path, &Error> {
        match shape {
            Shape::TwoNodes | Shape::Memoryless => Ok(&self.kernel),
            Shape::Realtime => self.realtime.as_deref(),
            Shape::Old => self.old.as_deref(),
        }
    }
}

/// Finds or downloads everything.
pub(crate) fn obtain(target: Target, folder: &Path) -> Result<Machine> {
    ensure!(cfg!(target_arch = "x86_64"), "the machine is emulated on x86-64 alone");
    match target {
        Target::Native | Target::Musl => obtain_native(folder),
        Target::Arm64 => obtain_arm64(folder),
    }
}

/// The options with which apt reads its lists of arm64's packages in `folder`, without touching the
/// machine's own.
fn foreign(folder: &Path) -> Vec<String> {
    let lists = format!("-oDir::State::Lists={}", folder.join("lists").display());
    vec!["-oAPT::Architecture=arm64".into(), "-oAPT::Architectures=arm64".into(), lists]
}

/// The machine for arm64. Its emulator must be installed.
fn obtain_arm64(folder: &Path) -> Result<Machine> {
    let root = folder.join("root");
    let qemu = which("qemu-system-aarch64").context("apt-get install qemu-system-arm")?;
    let (busybox, options) = (root.join("bin/busybox"), foreign(folder));
    if !busybox.exists() || image(&root).is_none() {
        fs::create_dir_all(folder.join("lists/partial"))?;
        let mut update = command("apt-get", &options);
        update.args(["update", "-qq"]);
        capture(update)?;
        unpack_with(&options, folder, &root, &["busybox-static".into()])?;
    }
    let kernel = kernel_with(&options, folder, &root, "linux-image-cloud-arm64")?;
    ensure!(busybox.exists(), "the packages do not hold what their names say");
    let none = || Err(anyhow!("for x86-64 alone"));
    Ok(Machine { qemu: (qemu, None), kernel, realtime: none(), old: none(), busybox })
}

fn obtain_native(folder: &Path) -> Result<Machine> {
    let root = folder.join("root");
    let busybox = root.join("bin/busybox");
    if !busybox.exists() {
        unpack(folder, &root, &["busybox-static".into()])?;
    }
    let cloud = kernel(folder, &root, "linux-image-cloud-amd64")?;
    let realtime = kernel(folder, &folder.join("realtime"), "linux-image-rt-amd64");
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
    Ok(Machine { qemu, kernel: cloud, realtime, old: old_kernel(folder), busybox })
}

/// A release of Debian with Linux 5.10, the last one before `MADV_POPULATE_WRITE`.
const OLD_RELEASE: &str = "bullseye";

/// The kernel of [`OLD_RELEASE`], from the mirror that apt uses.
fn old_kernel(folder: &Path) -> Result<PathBuf> {
    let root = folder.join("old");
    if let Some(image) = image(&root) {
        return Ok(image);
    }
    let repositories = capture(command("apt-get", ["indextargets", "--format", "$(ORIGIN) $(REPO_URI)"]))?;
    let archive = |line: &str| {
        let uri = line.strip_prefix("Debian ")?;
        uri.trim_end_matches('/').ends_with("/debian").then(|| uri.to_string())
    };
    let mirror = repositories.lines().find_map(archive).context("apt has no archive of Debian")?;
    let (list, lists) = (folder.join("old.list"), folder.join("old-lists"));
    fs::write(&list, format!("deb {mirror} {OLD_RELEASE} main\n"))?;
    fs::create_dir_all(lists.join("partial"))?;
    let options = [
        format!("-oDir::Etc::SourceList={}", list.display()),
        "-oDir::Etc::SourceParts=/dev/null".into(),
        format!("-oDir::State::Lists={}", lists.display()),
    ];
    let mut update = command("apt-get", &options);
    update.args(["update", "-qq"]);
    capture(update)?;
    kernel_with(&options, folder, &root, "linux-image-cloud-amd64")
}

/// The kernel in `root`, unpacked there from the package that `newest` depends on.
fn kernel(folder: &Path, root: &Path, newest: &str) -> Result<PathBuf> {
    kernel_with(&[], folder, root, newest)
}

fn kernel_with(options: &[String], folder: &Path, root: &Path, newest: &str) -> Result<PathBuf> {
    if image(root).is_none() {
        let mut depends = command("apt-cache", options);
        depends.args(["depends", newest]);
        let depends = capture(depends)?;
        let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        unpack_with(options, folder, root, &[package.with_context(|| format!("apt knows no {newest}"))?.into()])?;
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
    unpack_with(&[], folder, root, packages)
}

fn unpack_with(options: &[String], folder: &Path, root: &Path, packages: &[String]) -> Result<()> {
    println!("downloading {}", packages.join(" "));
    let archives = folder.join("packages");
    // Left from an interrupted attempt.
    if archives.exists() {
        fs::remove_dir_all(&archives)?;
    }
    fs::create_dir_all(&archives)?;
    fs::create_dir_all(root)?;
    let mut download = command("apt-get", ["download", "-qq"]);
    download.args(options).args(packages).current_dir(&archives);
    capture(download).context("`apt-get update` by root may help")?;
    for archive in fs::read_dir(&archives)? {
        let mut extract = command("dpkg-deb", ["--extract"]);
        extract.arg(archive?.path()).arg(root);
        capture(extract)?;
    }
    fs::remove_dir_all(&archives)?;
    Ok(())
}
