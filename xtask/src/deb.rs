//! `cargo xtask deb [--test]`: Debian packages, in `target/deb`.
//!
//! debhelper makes them from `contrib/debian` and an installation. It splits
//! debug information off by itself, into the packages `*-dbgsym`. lintian judges the result. With
//! `--test` a fresh root of the system's own release gets the packages: installed, used, purged.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::install::{DebugInfo, VERSION, install};
use crate::places::Places;
use crate::process::{capture, cargo, command, need, run};
use crate::{build, layout};

/// The command.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    let test = match arguments {
        [] => false,
        [option] if option == "--test" => true,
        _ => bail!("deb takes no argument but --test"),
    };
    build::build()?;
    let folder = layout::target().join("deb");
    let packages = packages(&folder)?;
    lint(&folder)?;
    if test {
        in_fresh_root(&folder, &packages)?;
    }
    for package in packages {
        println!("{}", package.display());
    }
    Ok(())
}

/// Builds the packages, and returns their files without those of debug information.
pub(crate) fn packages(folder: &Path) -> Result<Vec<PathBuf>> {
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
    fs::write(sources.join("rust-crates"), crates()?)?;
    let changelog = fs::read_to_string(debian.join("changelog"))?;
    ensure!(
        changelog.starts_with(&format!("neap ({VERSION}-")),
        "the first line of contrib/debian/changelog is not of version {VERSION}"
    );
    let lib = capture(command("dpkg-architecture", ["-qDEB_HOST_MULTIARCH"]))?;
    let root = fs::canonicalize(&sources)?.join("installed");
    let arguments = ["--prefix", "/usr", "--libdir", &format!("lib/{}", lib.trim()), "--destdir"].map(str::to_string);
    let places = Places::parse(&[&arguments[..], &[root.to_string_lossy().into_owned()]].concat())?;
    install(&places, DebugInfo::Kept)?;
    let mut build = command("dpkg-buildpackage", ["--build=binary", "--no-sign"]);
    build.current_dir(&sources);
    fs::write(folder.join("build.log"), capture(build)?)?;
    let mut packages: Vec<PathBuf> = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    packages
        .retain(|file| file.extension().is_some_and(|end| end == "deb") && !file.to_string_lossy().contains("dbgsym"));
    packages.sort();
    ensure!(packages.len() == 3, "these packages were made: {packages:?}");
    Ok(packages)
}

/// The crates of other projects whose code the command contains, with their licences.
pub(crate) fn crates() -> Result<String> {
    let format = ["tree", "--package", "neap-cli", "--edges", "normal", "--prefix", "none", "--format", "{p}: {l}"];
    let mut tree = cargo(format);
    tree.arg("--no-dedupe").current_dir(layout::root());
    let listed = capture(tree)?;
    // A crate of the workspace has its folder beside its version. Macros are no part of a program.
    let other = |line: &&str| !line.is_empty() && !line.contains("(/") && !line.contains("(proc-macro)");
    let others: BTreeSet<&str> = listed.lines().filter(other).collect();
    let mut text = String::from("The command neap contains code of these Rust crates, under the licences named.\n\n");
    others.iter().for_each(|line| text.extend([line, "\n"]));
    Ok(text)
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

/// Runs `contrib/debian/test.sh` in a new root, which is gone afterwards.
fn in_fresh_root(folder: &Path, packages: &[PathBuf]) -> Result<()> {
    need("mmdebstrap", &["mmdebstrap"])?;
    let stage = folder.join("stage");
    fs::create_dir_all(stage.join("packages"))?;
    for package in packages {
        fs::copy(package, stage.join("packages").join(package.file_name().context("a package has a name")?))?;
    }
    let script = stage.join("test.sh");
    fs::copy(layout::root().join("contrib/debian/test.sh"), &script)?;
    // Another user reads it where mmdebstrap does not run as root.
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let release = fs::read_to_string("/etc/os-release")?;
    let suite = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME=")).unwrap_or("stable");
    let stage = fs::canonicalize(stage)?;
    let mut root = command("mmdebstrap", ["--quiet", "--variant=apt", "--include=man-db", "--format=null"]);
    root.args([suite, "/dev/null"]);
    root.arg(format!("--customize-hook=copy-in {0}/packages {0}/test.sh /tmp", stage.display()));
    root.arg("--customize-hook=chroot \"$1\" sh /tmp/test.sh");
    root.arg(format!("--customize-hook=copy-out /tmp/passed {}", stage.display()));
    capture(root)?;
    ensure!(stage.join("passed").exists(), "the test did not run to its end");
    println!("in a new {suite}: installed, used and purged");
    Ok(())
}
