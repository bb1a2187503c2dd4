//! Memory groups of the kernel (cgroups) for one program each, below the group of this process.
//!
//! # Design
//!
//! Under version 1 the group of a program is a child of this process's memory group. Under version
//! 2 this process's group must be delegated. A group that has processes cannot pass controllers to
//! child groups. So this process first moves into a child group, and at the end moves back.
//! Dropping [`Groups`] and [`Cgroup`] removes their groups.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Longest wait for the kernel until the group of a program that has ended can be removed.
const LEAVING: Duration = Duration::from_secs(5);
/// Number of groups that this process has made.
static MADE: AtomicU32 = AtomicU32::new(0);

/// Where memory groups can be made.
#[derive(Debug)]
pub(super) struct Groups {
    own: PathBuf,
    version: Version,
    /// The child group that this process moved to.
    moved: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// One memory group with a limit.
pub(super) struct Cgroup {
    folder: PathBuf,
    version: Version,
}

impl Groups {
    /// Finds this process's group and tries to make a child group.
    ///
    /// An error names the missing part: a controller, a mount or the right to make groups.
    pub(super) fn find() -> Result<Groups> {
        let read = |path: &str| fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
        let found = own_group(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?);
        let (own, version) = found.context("no mounted cgroup hierarchy with a memory controller has this process")?;
        let mut groups = Groups { own, version, moved: None };
        if version == Version::Two {
            groups.hand_memory_on()?;
        }
        groups.make(1 << 30).context("creating a memory cgroup requires root or a delegated cgroup")?;
        Ok(groups)
    }

    /// Lets child groups of a version 2 group have the memory controller.
    fn hand_memory_on(&mut self) -> Result<()> {
        let controllers = fs::read_to_string(self.own.join("cgroup.controllers")).unwrap_or_default();
        if !controllers.split_whitespace().any(|controller| controller == "memory") {
            bail!("{} has no memory controller", self.own.display());
        }
        let control = self.own.join("cgroup.subtree_control");
        if write(&control, "+memory").is_ok() {
            return Ok(());
        }
        let child = self.own.join(format!("neap-bench-{}-self", std::process::id()));
        fs::create_dir(&child).with_context(|| format!("cannot make {}", child.display()))?;
        self.moved = Some(child.clone());
        write(&child.join("cgroup.procs"), "0")?;
        write(&control, "+memory")
            .context("`systemd-run --user --scope -p Delegate=yes` gives a group that can be used")
    }

    /// Makes a group with a limit in bytes.
    pub(super) fn make(&self, limit: u64) -> Result<Cgroup> {
        // Relaxed: the number only has to be unique; it publishes no other data.
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let folder = self.own.join(format!("neap-bench-{}-{number}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let group = Cgroup { folder, version: self.version };
        group.set_limit(limit)?;
        Ok(group)
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        let Some(child) = self.moved.take() else { return };
        // A group that passes on controllers takes no process, so the controller is withdrawn
        // first.
        let _ = write(&self.own.join("cgroup.subtree_control"), "-memory");
        let _ = write(&self.own.join("cgroup.procs"), "0");
        remove(&child);
    }
}

impl Cgroup {
    /// Sets the limit in bytes, and leaves no swap.
    ///
    /// Version 1 refuses a limit below the usage. Under version 2 the kernel kills a process then.
    pub(super) fn set_limit(&self, limit: u64) -> Result<()> {
        let (swap, of_swap) = match self.version {
            Version::One => ("memory.memsw.limit_in_bytes", limit),
            Version::Two => ("memory.swap.max", 0),
        };
        write(&self.limit_file(), &limit.to_string())?;
        // The file is absent where swap is not accounted. Most such systems have no swap.
        let _ = write(&self.folder.join(swap), &of_swap.to_string());
        Ok(())
    }

    /// The file with the limit in bytes.
    pub(super) fn limit_file(&self) -> PathBuf {
        self.folder.join(match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        })
    }

    /// The file with the usage in bytes.
    pub(super) fn usage_file(&self) -> PathBuf {
        self.folder.join(match self.version {
            Version::One => "memory.usage_in_bytes",
            Version::Two => "memory.current",
        })
    }

    /// Usage in bytes.
    pub(super) fn usage(&self) -> Result<u64> {
        number(&self.usage_file())
    }

    /// Largest usage so far in bytes. Version 2 has it from Linux 5.19 on.
    pub(super) fn peak(&self) -> Result<u64> {
        number(&self.folder.join(match self.version {
            Version::One => "memory.max_usage_in_bytes",
            Version::Two => "memory.peak",
        }))
    }

    /// Whether no process is in the group.
    pub(super) fn is_empty(&self) -> bool {
        fs::read(self.processes_file()).is_ok_and(|processes| processes.is_empty())
    }

    /// The file through which processes enter.
    pub(super) fn processes_file(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }

    /// Makes the program of `command` enter the group before it begins.
    pub(super) fn enter(&self, command: &mut Command) -> Result<()> {
        let path = self.processes_file();
        let file = OpenOptions::new().write(true).open(&path);
        let file: File = file.with_context(|| format!("cannot open {}", path.display()))?;
        // SAFETY: between fork and exec the closure makes one system call, which is
        // async-signal-safe. It builds an error from a number, which does not allocate. The closure
        // owns the file, so the descriptor is open.
        unsafe {
            command.pre_exec(move || match libc::write(file.as_raw_fd(), c"0".as_ptr().cast(), 1) {
                1 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            });
        }
        Ok(())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        remove(&self.folder);
    }
}

/// Removes a group whose processes have ended or are about to.
fn remove(folder: &Path) {
    let start = Instant::now();
    while let Err(error) = fs::remove_dir(folder) {
        if start.elapsed() > LEAVING {
            eprintln!("neap bench: cannot remove {}: {error}", folder.display());
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write `{text}` to {}", path.display()))
}

fn number(path: &Path) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    text.trim().parse().with_context(|| format!("{} has no number", path.display()))
}

/// Returns the folder and the version of this process's memory group. The group is that of version
/// 1 if version 1 has the memory controller, and otherwise that of version 2.
fn own_group(mountinfo: &str, cgroup: &str) -> Option<(PathBuf, Version)> {
    let of_version = |version: Version| {
        let path = cgroup.lines().find_map(|line| {
            let (number, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let wanted = match version {
                Version::One => controllers.split(',').any(|controller| controller == "memory"),
                Version::Two => number == "0" && controllers.is_empty(),
            };
            wanted.then_some(path)
        })?;
        let folder = mountinfo.lines().find_map(|line| {
            let (place, kind) = line.split_once(" - ")?;
            let mut place = place.split(' ').skip(3);
            let (root, point) = (place.next()?, place.next()?);
            let mut kind = kind.split(' ');
            let (name, options) = (kind.next()?, kind.nth(1)?);
            let wanted = match version {
                Version::One => name == "cgroup" && options.split(',').any(|option| option == "memory"),
                Version::Two => name == "cgroup2",
            };
            let below = Path::new(path).strip_prefix(root).ok()?;
            wanted.then(|| Path::new(point).join(below))
        })?;
        Some((folder, version))
    };
    of_version(Version::One).or_else(|| of_version(Version::Two))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "30 25 0:26 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
    const TWO: &str = "31 25 0:27 /box /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn own_group_is_the_one_with_the_memory_controller() {
        let find = |mounts: &[&str], cgroup: &str| {
            own_group(&mounts.concat(), cgroup).map(|(folder, version)| (folder.display().to_string(), version))
        };
        let own = "5:cpu:/other\n4:hugetlb,memory:/box/job\n0::/box/job\n";
        assert_eq!(find(&[TWO, ONE], own), Some(("/sys/fs/cgroup/memory/box/job".to_string(), Version::One)));
        // The mount shows the hierarchy from /box on.
        assert_eq!(find(&[TWO], own), Some(("/sys/fs/cgroup/job".to_string(), Version::Two)));
        assert_eq!(find(&[TWO], "0::/elsewhere\n"), None);
        assert_eq!(find(&[ONE], "0::/\n"), None);
        assert_eq!(find(&[], own), None);
    }

    #[test]
    fn groups_are_removed_or_the_missing_right_is_named() {
        match Groups::find() {
            Ok(groups) => {
                let group = groups.make(64 << 20).unwrap();
                let folder = group.folder.clone();
                let beside = groups.make(64 << 20).unwrap();
                assert_ne!(beside.folder, folder);
                assert!(group.is_empty());
                group.set_limit(32 << 20).unwrap();
                assert_eq!(number(&group.limit_file()).unwrap(), 32 << 20);
                let mut command = Command::new("/bin/cat");
                command.arg("/proc/self/cgroup");
                group.enter(&mut command).unwrap();
                let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
                assert!(said.contains(folder.file_name().unwrap().to_str().unwrap()), "{said}");
                drop(command);
                let (usage, peak) = (group.usage().unwrap(), group.peak().unwrap());
                assert!(usage <= peak && peak <= 32 << 20, "{usage} bytes used, {peak} at most");
                drop(group);
                assert!(!folder.exists());
            }
            Err(reason) => assert!(!format!("{reason:#}").is_empty()),
        }
    }
}
