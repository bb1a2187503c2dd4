//! `cargo xtask release X.Y.Z [--dry-run] [--unchecked] [--without STEP]... [--once] [--target
//! TRIPLE]...`: a release, in `target/release-X.Y.Z`.
//!
//! # Design
//!
//! 1. The checkout must be clean, all places must name one version, and CHANGELOG must have changes
//!    that no release had. Then `ci --full` runs in it, which `--unchecked` leaves out. A step that
//!    `ci` skips ends the release, unless `--without` names the step.
//! 2. A clone gets the new version, the commit and the tag.
//! 3. The clone builds all files. A second clone in another folder, with another target folder,
//!    builds them again; all bytes must be equal. `--once` leaves the second build out.
//! 4. The checkout takes over the commit and the tag, unless it is a dry run. So a build that fails
//!    leaves no trace in it. The last lines name the steps and the checks that did not run.
//!
//! Nothing is signed or uploaded.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::ci::{self, LeftOut, SkippedStep};
use crate::layout;
use crate::packages::artefacts::all;
use crate::packages::versions::{self, Version};
use crate::process::{capture, cargo, command, run};

/// The arguments.
struct Wanted {
    version: Version,
    dry_run: bool,
    unchecked: bool,
    /// Steps of `ci --full` that may be skipped.
    without: Vec<String>,
    once: bool,
    targets: Vec<String>,
}

fn parse(arguments: &[String]) -> Result<Wanted> {
    let [version, options @ ..] = arguments else { bail!("release needs a version such as 1.2.3") };
    let version = version.parse()?;
    let (without, targets) = (Vec::new(), Vec::new());
    let mut wanted = Wanted { version, dry_run: false, unchecked: false, without, once: false, targets };
    let mut options = options.iter();
    while let Some(option) = options.next() {
        match option.as_str() {
            "--dry-run" => wanted.dry_run = true,
            "--unchecked" => wanted.unchecked = true,
            "--once" => wanted.once = true,
            "--without" => {
                let step = options.next().context("--without needs the name of a step")?;
                let names: Vec<&str> = ci::names().collect();
                ensure!(names.contains(&step.as_str()), "--without: no step `{step}`; steps: {}", names.join("; "));
                wanted.without.push(step.clone());
            }
            "--target" => wanted.targets.push(options.next().context("--target needs a triple")?.clone()),
            _ => {
                bail!("`{option}`: the options are --dry-run, --unchecked, --without STEP, --once and --target TRIPLE")
            }
        }
    }
    ensure!(!wanted.unchecked || wanted.without.is_empty(), "--unchecked runs no step; leave out --without");
    Ok(wanted)
}

/// An error that names the skipped steps which `without` does not name.
fn allowed(skipped: &[SkippedStep], without: &[String]) -> Result<()> {
    let refused: Vec<&SkippedStep> =
        skipped.iter().filter(|step| !without.iter().any(|name| name == step.name)).collect();
    let lines: String = refused.iter().map(|step| format!("\n  {}: {}", step.name, step.reason)).collect();
    let options: String = refused.iter().map(|step| format!(" --without '{}'", step.name)).collect();
    ensure!(refused.is_empty(), "`ci --full` skipped steps; make them run here, or add{options}:{lines}");
    Ok(())
}

/// Makes a release.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    let wanted = parse(arguments)?;
    let (root, version) = (layout::root(), wanted.version);
    let tag = format!("v{version}");
    let current = versions::agreed(&root)?;
    ensure!(version >= current, "the sources are of {current} already");
    let changed = git(&root, &["status", "--porcelain"])?;
    ensure!(changed.is_empty(), "the checkout is not clean:\n{changed}");
    ensure!(git(&root, &["tag", "--list", &tag])?.is_empty(), "there is a tag {tag} already");
    let left = if wanted.unchecked { LeftOut::default() } else { ci::full()? };
    allowed(&left.steps, &wanted.without)?;
    let target = layout::target();
    fs::create_dir_all(&target)?;
    let target = fs::canonicalize(target)?;
    let (output, work) = (target.join(format!("release-{version}")), target.join("release-work"));
    for folder in [&output, &work] {
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
    }
    let first = clone(&root, &work.join("neap"))?;
    commit(&first, version, &tag)?;
    let targets = if wanted.targets.is_empty() { all()? } else { wanted.targets };
    let built = artefacts(&first, &work.join("target"), &work.join("artefacts"), &targets)?;
    if wanted.once {
        println!("release: built once; whether another build gives equal bytes was not checked");
    } else {
        let second = clone(&first, &work.join("elsewhere/another-neap"))?;
        let again = artefacts(&second, &work.join("elsewhere/built"), &work.join("elsewhere/artefacts"), &targets)?;
        equal(&built, &again)?;
        println!("release: a second build in another folder gave equal bytes");
    }
    fs::rename(&built, &output)?;
    if wanted.dry_run {
        println!("release: a dry run; the checkout has neither the commit nor the tag");
    } else {
        let from = first.to_string_lossy();
        git(&root, &["pull", "--quiet", "--ff-only", &from, "HEAD"])?;
        git(&root, &["fetch", "--quiet", &from, &format!("refs/tags/{tag}:refs/tags/{tag}")])?;
        println!("release: the checkout has the commit and the tag {tag}; push both to publish them");
    }
    fs::remove_dir_all(&work)?;
    if wanted.unchecked {
        println!("release: no step of `ci --full` was run");
    }
    for step in &left.steps {
        println!("release: without {}: {}", step.name, step.reason);
    }
    for (step, checks) in &left.parts {
        println!("release: {step} without {checks}");
    }
    for name in names(&output)? {
        println!("{:>10} {}", fs::metadata(output.join(&name))?.len(), output.join(&name).display());
    }
    Ok(())
}

/// Runs git in a folder.
fn git(folder: &Path, arguments: &[&str]) -> Result<String> {
    let mut git = command("git", ["-C"]);
    git.arg(folder).args(arguments);
    capture(git)
}

/// Clones the commit that a repository has checked out.
fn clone(from: &Path, to: &Path) -> Result<PathBuf> {
    fs::create_dir_all(to.parent().context("a folder")?)?;
    let mut clone = command("git", ["clone", "--quiet"]);
    clone.args([from, to]);
    capture(clone)?;
    Ok(to.to_path_buf())
}

/// Writes the version to the sources of a clone, and makes commit and tag.
fn commit(clone: &Path, version: Version, tag: &str) -> Result<()> {
    let now = |format: &str| -> Result<String> { Ok(capture(command("date", ["-u", format]))?.trim().to_string()) };
    versions::set(clone, version, &now("+%F")?, &now("+%a, %d %b %Y %H:%M:%S +0000")?)?;
    let mut lock = cargo(["update", "--workspace", "--offline", "--quiet"]);
    lock.current_dir(clone);
    capture(lock)?;
    git(clone, &["commit", "--quiet", "--all", "--message", &format!("release: neap {version}")])?;
    git(clone, &["tag", "--annotate", "--message", &format!("neap {version}"), tag])?;
    Ok(())
}

/// Builds all files of a clone into `to`, which is returned. No name of a folder of this machine
/// reaches them.
fn artefacts(clone: &Path, target: &Path, to: &Path, targets: &[String]) -> Result<PathBuf> {
    println!("release: building {}", clone.display());
    let seconds = git(clone, &["log", "-1", "--format=%ct"])?;
    let mut build = cargo(["run", "--quiet", "--package", "xtask", "--", "artefacts", "--to"]);
    build.arg(to).args(targets.iter().flat_map(|target| ["--target", target])).current_dir(clone);
    build.env("CARGO_TARGET_DIR", target).env("SOURCE_DATE_EPOCH", seconds.trim());
    // Each would replace the flags of a target.
    for variable in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_RUSTFLAGS"] {
        build.env_remove(variable);
    }
    let host = layout::host()?;
    for triple in targets.iter().chain([&host]) {
        build.env(layout::cargo_variable(triple, "RUSTFLAGS"), remapped(clone, target)?);
    }
    run(build)?;
    Ok(to.to_path_buf())
}

/// Flags by which the compiler writes fixed names for the folders of sources, of crates and of its
/// own library.
fn remapped(clone: &Path, target: &Path) -> Result<String> {
    let sysroot = layout::rustc(["--print", "sysroot"])?;
    let home = std::env::var("HOME").unwrap_or_default();
    let cargo_home = std::env::var("CARGO_HOME").unwrap_or_else(|_| format!("{home}/.cargo"));
    let folders = [
        (cargo_home.as_str(), "/cargo"),
        (&sysroot, "/rust"),
        (&target.to_string_lossy(), "/target"),
        (&clone.to_string_lossy(), "/neap"),
    ];
    let mut flags = Vec::new();
    for (folder, name) in folders {
        ensure!(!folder.contains([' ', '=']), "{folder}: cargo passes no flag with a space");
        flags.push(format!("--remap-path-prefix={folder}={name}"));
    }
    Ok(flags.join(" "))
}

/// The names of a folder's files.
fn names(folder: &Path) -> Result<BTreeSet<String>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// An error that names all files which only one of two folders has, or which differ.
fn equal(first: &Path, second: &Path) -> Result<()> {
    let (one, two) = (names(first)?, names(second)?);
    let mut differ: Vec<&String> = one.symmetric_difference(&two).collect();
    for name in one.intersection(&two) {
        if fs::read(first.join(name))? != fs::read(second.join(name))? {
            differ.push(name);
        }
    }
    ensure!(differ.is_empty(), "two builds differ in {differ:?}; compare {} and {}", first.display(), second.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_follow_the_version() {
        let parse = |line: &str| parse(&line.split_whitespace().map(str::to_string).collect::<Vec<_>>());
        let wanted = parse("1.2.3 --once --target a --dry-run --target b").unwrap();
        assert_eq!((wanted.version.to_string().as_str(), wanted.once, wanted.dry_run), ("1.2.3", true, true));
        assert!(!wanted.unchecked && parse("1.2.3 --unchecked").unwrap().unchecked);
        assert_eq!(wanted.targets, ["a", "b"]);
        assert_eq!(parse("1.2.3 --without vm --without deb").unwrap().without, ["vm", "deb"]);
        for line in [
            "",
            "--dry-run",
            "1.2.3 --target",
            "1.2.3 --sign",
            "1.2.3 --without",
            "1.2.3 --without no-step",
            "1.2.3 --unchecked --without vm",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn skipped_step_ends_the_release_unless_an_option_names_it() {
        let skipped = ["vm, arm64", "miri"].map(|name| SkippedStep { name, reason: format!("no {name} here") });
        assert!(allowed(&[], &[]).is_ok());
        assert!(allowed(&skipped, &["miri".to_string(), "vm, arm64".to_string()]).is_ok());
        let error = allowed(&skipped, &["miri".to_string()]).unwrap_err().to_string();
        assert!(error.contains("--without 'vm, arm64'") && error.ends_with("vm, arm64: no vm, arm64 here"), "{error}");
        assert!(!error.contains("miri"), "{error}");
    }

    #[test]
    fn folders_differ_by_names_and_by_bytes() {
        let folder = std::env::temp_dir().join(format!("neap-equal-{}", std::process::id()));
        let (one, two) = (folder.join("one"), folder.join("two"));
        for (folder, name, text) in [(&one, "a", "1"), (&two, "a", "1"), (&one, "b", "2"), (&two, "b", "2")] {
            fs::create_dir_all(folder).unwrap();
            fs::write(folder.join(name), text).unwrap();
        }
        equal(&one, &two).unwrap();
        fs::write(two.join("b"), "3").unwrap();
        fs::write(one.join("c"), "").unwrap();
        let error = equal(&one, &two).unwrap_err().to_string();
        assert!(error.contains("[\"c\", \"b\"]"), "{error}");
        fs::remove_dir_all(folder).unwrap();
    }
}
