//! `cargo xtask kernel-percpu`: how much memory the kernel's own per-CPU allocator returns when ten
//! of eleven memory cgroups go.
//!
//! The command makes 1000 times a group and ten more, 11 000 in all. Then it removes the ten of
//! each. It prints `Percpu:` of `/proc/meminfo` before, with all, and after. Groups are made in a
//! folder of their own, which is removed in the end, even after an error, or by the next run if
//! this one was killed. Nothing else is changed. Without an available memory controller it does
//! nothing (status 77).

use core::time::Duration;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::Skipped;

const FOLDER: &str = "neap-kernel-percpu";
const SURVIVORS: usize = 1000;
const OTHERS: usize = 10;
/// Longest time of making all groups, and of removing them.
const LIMIT: Duration = Duration::from_secs(120);
/// Time without a change after which all is freed: the kernel frees groups some time after they are
/// removed, and pages after that.
const REST: Duration = Duration::from_secs(10);

/// The folder of all groups, removed with this value.
struct Groups(PathBuf);

impl Drop for Groups {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            eprintln!("cannot remove {}: {error:#}", self.0.display());
        }
    }
}

/// Removes a folder of groups. Its files are the kernel's and go with it.
fn remove(folder: &Path) -> Result<()> {
    let entries = fs::read_dir(folder)?.flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        fs::remove_dir(entry.path()).with_context(|| entry.path().display().to_string())?;
    }
    fs::remove_dir(folder).with_context(|| folder.display().to_string())
}

/// The place for memory cgroups, and whether it is the unified hierarchy.
fn hierarchy(mounts: &str) -> Option<(PathBuf, bool)> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (place, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let place = PathBuf::from(place);
        let unified = kind == "cgroup2";
        let given = || fs::read_to_string(place.join("cgroup.subtree_control")).unwrap_or_default();
        let has_memory = if unified {
            given().split_whitespace().any(|controller| controller == "memory")
        } else {
            kind == "cgroup" && options.split(',').any(|option| option == "memory")
        };
        has_memory.then_some((place, unified))
    })
}

fn make_folder() -> Result<Groups> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    let Some((place, unified)) = hierarchy(&mounts) else {
        let why = "no cgroup hierarchy is mounted in which groups have the memory controller";
        return Err(Skipped(format!("the kernel is not measured: {why}")).into());
    };
    let folder = place.join(FOLDER);
    if folder.exists() {
        remove(&folder).context("left by a run that was killed")?;
    }
    if let Err(error) = fs::create_dir(&folder) {
        let why = format!("{}: {error}; making cgroups takes root's rights there", folder.display());
        return Err(Skipped(format!("the kernel is not measured: {why}")).into());
    }
    let groups = Groups(folder);
    if unified {
        fs::write(groups.0.join("cgroup.subtree_control"), "+memory").context("cgroup.subtree_control")?;
    }
    Ok(groups)
}

/// `Percpu:` in KiB.
fn percpu() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Percpu:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.ok_or_else(|| Skipped("the kernel is not measured: /proc/meminfo has no Percpu (before 4.20)".into()).into())
}

/// `Percpu:` in KiB, once it no longer changes.
fn settled() -> Result<u64> {
    let (start, mut last, mut since) = (Instant::now(), percpu()?, Instant::now());
    while since.elapsed() < REST && start.elapsed() < LIMIT {
        sleep(Duration::from_millis(250));
        let now = percpu()?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last)
}

/// Calls `each` with the names of the groups in the order of their creation: those that stay, those
/// that go, or all.
fn for_each(stay: bool, go: bool, each: &dyn Fn(&str) -> std::io::Result<()>) -> Result<()> {
    let start = Instant::now();
    for survivor in 1..=SURVIVORS {
        let others = (1..=OTHERS).map(|other| format!("cg_{survivor}_{other}"));
        for name in stay.then(|| format!("cg_{survivor}")).into_iter().chain(others.filter(|_| go)) {
            each(&name).with_context(|| name.clone())?;
        }
        if start.elapsed() > LIMIT {
            bail!("not done in {} s, with group {survivor} of {SURVIVORS}", LIMIT.as_secs());
        }
    }
    Ok(())
}

pub(crate) fn measure() -> Result<()> {
    let before = percpu()?;
    let groups = make_folder()?;
    println!("making {} memory cgroups in {}", SURVIVORS * (OTHERS + 1), groups.0.display());
    for_each(true, true, &|name| fs::create_dir(groups.0.join(name)))?;
    let full = percpu()?;
    for_each(false, true, &|name| fs::remove_dir(groups.0.join(name)))?;
    let few = settled()?;
    for_each(true, false, &|name| fs::remove_dir(groups.0.join(name)))?;
    drop(groups);
    let none = settled()?;
    println!("Percpu: {before} KiB before, {full} with all, {few} without ten of eleven, {none} without any");
    let net = (full as f64 - before as f64) / (few as f64 - before as f64).max(1.0);
    println!("return ratio: {:.2} x ({net:.2} x without what was there before)", full as f64 / few.max(1) as f64);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_hierarchy_requires_memory_controller() {
        let find = |mounts: &str| hierarchy(mounts).map(|(place, unified)| (place.display().to_string(), unified));
        let first = "cgroup /a/cpu cgroup rw,cpu 0 0\ncgroup2 /nowhere cgroup2 rw 0 0\n";
        assert_eq!(find(first), None);
        let second = format!("{first}cgroup /a/memory cgroup rw,relatime,memory 0 0\n");
        assert_eq!(find(&second), Some(("/a/memory".to_string(), false)));
        let folder = std::env::temp_dir().join(format!("neap-hierarchy-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let unified = format!("cgroup2 {} cgroup2 rw 0 0\n", folder.display());
        for (given, found) in [("cpu pids\n", false), ("cpu memory pids\n", true)] {
            fs::write(folder.join("cgroup.subtree_control"), given).unwrap();
            assert_eq!(find(&unified), found.then(|| (folder.display().to_string(), true)));
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn percpu_script_groups_are_created_in_order_removed_once() {
        let seen = core::cell::RefCell::new(Vec::new());
        let note = |name: &str| {
            seen.borrow_mut().push(name.to_string());
            Ok(())
        };
        for_each(true, true, &note).unwrap();
        let all = seen.take();
        assert_eq!((all.len(), &all[0], &all[1], &all[11]), (11_000, &"cg_1".into(), &"cg_1_1".into(), &"cg_2".into()));
        for_each(false, true, &note).unwrap();
        for_each(true, false, &note).unwrap();
        let mut gone = seen.take();
        let mut all = all;
        all.sort();
        gone.sort();
        assert_eq!(all, gone);
    }
}
