//! `cargo xtask deb [--target aarch64-unknown-linux-gnu] [--test [noble]]`: Debian packages, in
//! `target/deb`, or in `target/TARGET/deb` for another processor.
//!
//! debhelper makes them from `contrib/debian` and an installation. It splits debug information off
//! by itself, into the packages `*-dbgsym`. The lists in `contrib/contents` name the files of each
//! package, and lintian judges all. With `--test` the packages are installed, used and purged in a
//! fresh root of the system's own release, or of Ubuntu 24.04 (`noble`), and programs are built
//! with them. The kernel starts the programs of a root for arm64 by `qemu-aarch64-static`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};

use crate::packages::contents;
use crate::packages::crates::{COMMAND, LIBRARIES, crates};
use crate::packages::install::{DebugInfo, VERSION, install};
use crate::packages::places::Places;
use crate::process::{capture, command, need, run};
use crate::target::{ARM64, Target, for_target};
use crate::{Skipped, build, layout};

/// The packages, which have lists of contents by these names.
const NAMES: [&str; 5] = ["libneap-dev", "libneap0-dbgsym", "libneap0", "neap-dbgsym", "neap"];

/// The command.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    let (target, rest) = Target::parse(arguments)?;
    if let Some(name) = target.name() {
        ensure!(target != Target::Musl, "Debian has no packages for musl");
        target.is_there(false)?;
        // Also for another target: the host's command writes the man pages.
        build::build()?;
        return run(for_target(name, &layout::host()?, &[&["deb".to_string()], rest].concat())?);
    }
    let release = match rest {
        [] => None,
        [option] if option == "--test" => Some(Release::own()?),
        [option, name] if option == "--test" && name == UBUNTU => Some(Release::ubuntu()),
        _ => bail!("deb takes no argument but --target and --test, perhaps with {UBUNTU}"),
    };
    let other = layout::other_target();
    build::build()?;
    let folder = folder(other.as_deref());
    let packages = packages(&folder, other.as_deref())?;
    lint(&folder)?;
    if let Some(release) = release {
        in_fresh_root(&folder, &packages, other.as_deref(), &release)?;
    }
    for package in packages {
        println!("{}", package.display());
    }
    Ok(())
}

/// The folder of the packages for another target than this machine's, or for this machine.
pub(crate) fn folder(other: Option<&str>) -> PathBuf {
    layout::target().join(other.unwrap_or_default()).join("deb")
}

/// Debian's option for another system than this machine's.
fn host_type(other: Option<&str>) -> Option<String> {
    other.map(|target| format!("--host-type={}", target.replacen("-unknown-", "-", 1)))
}

/// Builds the packages, compares their contents with the lists, and returns their files without
/// those of debug information.
fn packages(folder: &Path, other: Option<&str>) -> Result<Vec<PathBuf>> {
    need("dh", &["debhelper"])?;
    need("dpkg-buildpackage", &["dpkg-dev"])?;
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    let sources = folder.join(format!("neap-{VERSION}"));
    let debian = sources.join("debian");
    fs::create_dir_all(&debian)?;
    for entry in fs::read_dir(layout::root().join("contrib/debian"))? {
        let entry = entry?;
        fs::copy(entry.path(), debian.join(entry.file_name()))?;
    }
    fs::copy(layout::root().join("CHANGELOG.md"), sources.join("CHANGELOG.md"))?;
    fs::write(sources.join("rust-crates"), crates(COMMAND, other)?)?;
    fs::create_dir(sources.join("libraries"))?;
    fs::write(sources.join("libraries/rust-crates"), crates(LIBRARIES, other)?)?;
    let changelog = fs::read_to_string(debian.join("changelog"))?;
    ensure!(
        changelog.starts_with(&format!("neap ({VERSION}-")),
        "the first line of contrib/debian/changelog is not of version {VERSION}"
    );
    let mut ask = command("dpkg-architecture", ["-qDEB_HOST_MULTIARCH"]);
    ask.args(host_type(other));
    let lib = capture(ask)?;
    let root = fs::canonicalize(&sources)?.join("installed");
    let arguments = ["--prefix", "/usr", "--libdir", &format!("lib/{}", lib.trim()), "--destdir"].map(str::to_string);
    let places = Places::parse(&[&arguments[..], &[root.to_string_lossy().into_owned()]].concat())?;
    install(&places, DebugInfo::Kept)?;
    if other.is_some() {
        let folder = root.join("usr/lib").join(lib.trim());
        let shared = ["libneap", "libneap_malloc", "libneap_mallctl"];
        let shared = shared.map(|name| folder.join(format!("{name}.so.{VERSION}")));
        fs::write(debian.join("neap.libraries"), libraries(&[root.join("usr/bin/neap")])?)?;
        fs::write(debian.join("libneap0.libraries"), libraries(&shared)?)?;
    }
    let mut build = command("dpkg-buildpackage", ["--build=binary", "--no-sign"]);
    build.args(host_type(other)).current_dir(&sources);
    fs::write(folder.join("build.log"), capture(build)?)?;
    let mut packages: Vec<PathBuf> = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    packages.retain(|file| file.extension().is_some_and(|end| end == "deb"));
    packages.sort();
    let named = |file: &PathBuf| file.file_name()?.to_str()?.split_once('_').map(|(name, _)| name.to_string());
    let names: Vec<String> = packages.iter().filter_map(named).collect();
    ensure!(names == NAMES, "these packages were made: {packages:?}");
    for (package, name) in packages.iter().zip(NAMES) {
        let listing = capture(command("dpkg-deb", ["--contents", &package.to_string_lossy()]))?;
        contents::check(&listing, name, "./", lib.trim())?;
    }
    println!("packages: their files are those of the lists in contrib/contents");
    packages.retain(|file| !file.to_string_lossy().contains("dbgsym"));
    Ok(packages)
}

/// The packages of libraries that programs for another processor need, for `debian/rules`: that of
/// the C library with the newest version that one of them asks for.
fn libraries(files: &[PathBuf]) -> Result<String> {
    let mut newest = None;
    for file in files {
        let text = capture(command("readelf", ["--wide", "--version-info", &file.to_string_lossy()]))?;
        newest = newest.max(newest_libc(&text));
    }
    let (major, minor) = newest.context("no file asks for a version of the C library")?;
    let lines = ["libc 6", "libm 6", "ld-linux-aarch64 1", "ld-linux-x86-64 2"];
    let lines: String = lines.iter().map(|name| format!("{name} libc6 (>= {major}.{minor})\n")).collect();
    Ok(lines + "libgcc_s 1 libgcc-s1\n")
}

/// The newest version of the C library in the text of `readelf`.
fn newest_libc(text: &str) -> Option<(u32, u32)> {
    let version = |part: &str| {
        let (major, rest) = part.split_once('.')?;
        let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    text.split("GLIBC_").skip(1).filter_map(version).max()
}

/// Lets lintian judge all packages of a folder.
fn lint(folder: &Path) -> Result<()> {
    need("lintian", &["lintian"])?;
    let changes = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let changes = changes.into_iter().find(|file| file.extension().is_some_and(|end| end == "changes"));
    let mut lintian = command("lintian", ["--fail-on", "error,warning", "--allow-root", "--tag-display-limit", "0"]);
    lintian.arg(changes.context("there is no file .changes")?);
    run(lintian)?;
    println!("lintian: no errors, no warnings");
    Ok(())
}

/// The release of Ubuntu on which the packages are tested.
pub(crate) const UBUNTU: &str = "noble";

/// The public key by which Ubuntu signs it, from Ubuntu's package of keys: F6EC B376 2474 EDA9 D21B
/// 7022 8719 20D1 991B C93C.
const UBUNTU_KEY: &str = "xtask/src/packages/ubuntu-archive-key.asc";

/// A release of a distribution, of which a root is made.
struct Release {
    suite: String,
    /// Options of mmdebstrap.
    options: Vec<String>,
}

impl Release {
    /// The system's own.
    fn own() -> Result<Release> {
        let text = fs::read_to_string("/etc/os-release")?;
        let suite = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME=")).unwrap_or("stable");
        Ok(Release { suite: suite.to_string(), options: Vec::new() })
    }

    /// Ubuntu's, whose key Debian does not have. Shells other than bash are in `universe`.
    fn ubuntu() -> Release {
        let key = format!("--keyring={}", layout::root().join(UBUNTU_KEY).display());
        Release { suite: UBUNTU.to_string(), options: vec![key, "--components=main,universe".to_string()] }
    }
}

/// The kernel's entry of the emulator for arm64.
const ENTRY: &str = "/proc/sys/fs/binfmt_misc/qemu-aarch64";

/// The kernel starts arm64's programs by an emulator. Dropping this value ends that if this run
/// began it.
struct Emulation {
    is_ours: bool,
}

impl Drop for Emulation {
    fn drop(&mut self) {
        if self.is_ours {
            let _ = run(command("update-binfmts", ["--disable", "qemu-aarch64"]));
        }
    }
}

/// Whether the kernel starts arm64's programs by an emulator that needs no file of the root it runs
/// in (the flag `F`).
fn is_emulated() -> bool {
    let is_fixed = |line: &str| line.strip_prefix("flags: ").is_some_and(|flags| flags.contains('F'));
    fs::read_to_string(ENTRY).is_ok_and(|entry| entry.starts_with("enabled") && entry.lines().any(is_fixed))
}

/// Has the kernel start arm64's programs by an emulator.
fn emulate() -> Result<Emulation> {
    let missing = |what: &str| Skipped(format!("{ARM64}: SKIPPED, the packages were not installed: {what}"));
    let packages = ["qemu-user-static", "binfmt-support"];
    for (program, package) in [("qemu-aarch64-static", packages[0]), ("update-binfmts", packages[1])] {
        need(program, &[package]).map_err(|error| missing(&format!("{error:#}")))?;
    }
    // Enabled at the start of a system that has a service for it.
    if is_emulated() {
        return Ok(Emulation { is_ours: false });
    }
    run(command("update-binfmts", ["--enable", "qemu-aarch64"])).map_err(|error| missing(&format!("{error:#}")))?;
    let emulation = Emulation { is_ours: true };
    ensure!(is_emulated(), missing(&format!("{ENTRY} is not enabled with the flag F")));
    Ok(emulation)
}

/// A file that each root has once it is made.
const MADE: &str = "/etc/debian_version";

/// Runs `contrib/debian/test.sh` in a new root, which is gone afterwards.
///
/// # Errors
/// [`Skipped`] if the root cannot be made, as without a mirror.
fn in_fresh_root(folder: &Path, packages: &[PathBuf], other: Option<&str>, release: &Release) -> Result<()> {
    need("mmdebstrap", &["mmdebstrap"])?;
    let _emulation = match other {
        None => None,
        Some(target) => {
            ensure!(target == ARM64, "packages for {target} cannot be used here");
            Some(emulate()?)
        }
    };
    let stage = folder.join("stage");
    fs::create_dir_all(stage.join("packages"))?;
    for package in packages {
        fs::copy(package, stage.join("packages").join(package.file_name().context("a package has a name")?))?;
    }
    for folder in ["examples", "tests/c_api", "tests/c_api/cmake", "tests/programs"] {
        let to = stage.join("sources").join(folder);
        fs::create_dir_all(&to)?;
        for entry in fs::read_dir(layout::root().join(folder))? {
            let file = entry?.path();
            if file.is_file() {
                fs::copy(&file, to.join(file.file_name().context("a file has a name")?))?;
            }
        }
    }
    let script = stage.join("test.sh");
    fs::copy(layout::root().join("contrib/debian/test.sh"), &script)?;
    // If mmdebstrap does not run as root, another user reads the script.
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let Release { suite, options } = release;
    let stage = fs::canonicalize(stage)?;
    println!("a root of {suite}, in which {} runs", script.display());
    let mut root = command("mmdebstrap", ["--variant=apt", "--include=man-db,zsh,fish", "--format=null"]);
    if other.is_some() {
        root.arg("--architectures=arm64");
    }
    root.args(options).args([suite, "/dev/null"]);
    // Of the root's files, since without root the hooks themselves may not write to the stage.
    root.arg(format!("--customize-hook=copy-out {MADE} {}", stage.display()));
    root.arg(format!("--customize-hook=copy-in {0}/packages {0}/sources {0}/test.sh /tmp", stage.display()));
    root.arg("--customize-hook=chroot \"$1\" sh /tmp/test.sh");
    root.arg(format!("--customize-hook=copy-out /tmp/passed {}", stage.display()));
    root.stdin(Stdio::null());
    if let Err(error) = run(root) {
        let is_made = Path::new(MADE).file_name().is_some_and(|name| stage.join(name).exists());
        ensure!(is_made, Skipped(format!("cannot make a root of {suite}: {error:#}")));
        return Err(error);
    }
    ensure!(stage.join("passed").exists(), "the test did not run to its end");
    let of = other.map_or_else(String::new, |target| format!(" for {target}"));
    println!("packages{of}: installed, used and purged in a new root of {suite}; programs built with libneap-dev ran");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_tested_on_known_releases_only() {
        for line in ["--test sid", "noble", "--test noble more"] {
            let words: Vec<String> = line.split(' ').map(str::to_string).collect();
            let error = command_line(&words).unwrap_err().to_string();
            assert!(error.contains("perhaps with noble"), "{line}: {error}");
        }
        let key = Release::ubuntu().options[0].trim_start_matches("--keyring=").to_string();
        assert!(fs::read_to_string(&key).unwrap().starts_with("-----BEGIN PGP PUBLIC KEY BLOCK-----"), "{key}");
    }

    #[test]
    fn newest_version_is_one_of_numbers() {
        let text = "  0x0010:   Name: GLIBC_2.9  Flags: none  Version: 3\n  0x0020:   Name: GLIBC_2.34  Flags: none\n\
                    004:   2 (GLIBC_2.17)   0 (*local*)   1 (*global*)   3 (GCC_12.0)   4 (GLIBC_PRIVATE)\n";
        assert_eq!(newest_libc(text), Some((2, 34)));
        assert_eq!(newest_libc("Name: GCC_3.0"), None);
    }
}
