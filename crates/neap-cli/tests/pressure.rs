//! `neap pressure` on this machine, with any version of cgroups, and on a made tree.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn neap(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_neap")).arg("pressure").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn object(arguments: &[&str]) -> Value {
    let output = neap(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A directory that is removed at the end.
struct Made(PathBuf);

impl Made {
    fn new(name: &str, files: &[(&str, &str)]) -> Made {
        let root = std::env::temp_dir().join(format!("neap-pressure-{name}-{}", std::process::id()));
        let made = Made(root);
        for (path, text) in files {
            let path = made.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        made
    }

    fn root(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn machine_is_a_level_and_nothing_has_more_headroom_than_it_has() {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let total: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    let own = std::process::id().to_string();
    for arguments in [&[][..], &[own.as_str()]] {
        let object = object(arguments);
        let levels = object["levels"].as_array().unwrap();
        let machine = levels.iter().find(|level| level["kind"] == "machine").unwrap();
        assert_eq!(machine["limit"], total << 10, "{object}");
        let headroom = object["wall"]["headroom"].as_u64().unwrap();
        let least = levels.iter().filter_map(|level| level["headroom"].as_u64()).min();
        assert_eq!(Some(headroom), least, "{object}");
        assert!(object["limit"]["limit"].as_u64().unwrap() <= total << 10, "{object}");
        assert_eq!(object["signals"].as_array().unwrap().len(), 8);
        // A group that was found is one that holds the process.
        let directory = object["directory"].as_str().unwrap();
        if object["view"] == "own"
            && let Ok(members) = fs::read_to_string(format!("{directory}/cgroup.procs"))
        {
            assert!(members.lines().any(|line| line == own), "{object}");
        }
    }
}

#[test]
fn explanation_has_every_part() {
    let output = neap(&[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let text = text(&output.stdout);
    for part in
        ["This process: ", "\nLevels, ", "  the machine\n", "\nLimit: ", "\nHeadroom: ", "\nPressure: ", "\nSignals, "]
    {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn made_tree_is_read_below_its_root() {
    let made = Made::new(
        "tree",
        &[
            ("proc/77/cgroup", "0::/a/b\n"),
            ("proc/self/mountinfo", "25 22 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("proc/meminfo", "MemTotal: 4194304 kB\nMemFree: 1048576 kB\nMemAvailable: 2097152 kB\nSwapFree: 0 kB\n"),
            ("sys/fs/cgroup/a/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/a/memory.current", "838860800\n"),
            ("sys/fs/cgroup/a/memory.stat", "inactive_file 104857600\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.high", "524288000\n"),
            ("sys/fs/cgroup/a/b/memory.current", "104857600\n"),
            ("sys/fs/cgroup/a/b/memory.events", "low 0\n"),
        ],
    );
    let object = object(&["77", "--root", made.root()]);
    assert_eq!((&object["pid"], &object["cgroup_version"], &object["view"]), (&77.into(), &2.into(), &"own".into()));
    let wall = &object["wall"];
    assert_eq!((&wall["path"], &wall["limit"]), (&"/sys/fs/cgroup/a".into(), &(1_u64 << 30).into()));
    assert_eq!((&wall["used"], &wall["headroom"]), (&(700_u64 << 20).into(), &(324_u64 << 20).into()));
    assert_eq!(object["soft_wall"]["soft_headroom"], 400_u64 << 20);
    assert_eq!((&object["pressure"], &object["swap_headroom"]), (&"roomy".into(), &0.into()));
    let output = neap(&["77", "--root", made.root()]);
    let expected = "\
Process 77: cgroup version 2
Group:     /a/b
Directory: /sys/fs/cgroup/a/b
Ancestors: all visible

Levels, from the process's own group up:
  /sys/fs/cgroup/a/b
    limit none, throttled above 500.0 MiB, used 100.0 MiB
  /sys/fs/cgroup/a
    limit 1.0 GiB, used 700.0 MiB (800.0 MiB less 100.0 MiB reclaimable), headroom 324.0 MiB
  the machine
    limit 4.0 GiB, used 2.0 GiB (3.0 GiB less 1.0 GiB reclaimable), headroom 2.0 GiB

Limit:     1.0 GiB, of /sys/fs/cgroup/a
Headroom:  324.0 MiB, of /sys/fs/cgroup/a
Throttled: after 400.0 MiB, by /sys/fs/cgroup/a/b
Swap:      0 B free
Pressure:  roomy; caches may grow by 196.0 MiB

Signals, in the order of trust:
  headroom                in use, read at each look
  memory.events.local     absent
  memory.events           usable; not in use: tells of a reached limit, not how far it is
  MEMORY_PRESSURE_WATCH   not set
  memory.pressure         absent
  /proc/pressure/memory   absent
  memory.pressure_level   absent
  MemAvailable            in use, read at each look
";
    assert_eq!(text(&output.stdout), expected);
}

/// The test changes the tree between two lines of the command.
#[test]
fn pressure_watch_shows_growth_limit_change_and_process_end() {
    let made = Made::new(
        "watch",
        &[
            ("proc/77/cgroup", "0::/a\n"),
            ("proc/self/mountinfo", "25 22 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 4194304 kB\n"),
            ("sys/fs/cgroup/a/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/a/memory.current", "104857600\n"),
            ("sys/fs/cgroup/a/memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"),
        ],
    );
    let group = made.0.join("sys/fs/cgroup/a");
    let mut child = Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(["pressure", "77", "--root", made.root(), "--watch=0.02", "--times", "100000", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    let first = next();
    assert_eq!(
        (&first["at_ms"], &first["pressure"], &first["growth_per_second"]),
        (&0.into(), &"roomy".into(), &0.into())
    );
    assert_eq!((&first["wall"]["path"], &first["ms_to_wall"]), (&"/sys/fs/cgroup/a".into(), &Value::Null));
    assert_eq!(first["stalled_percent"], Value::Null, "one reading of stalls is no window");
    let mut used = 100_u64 << 20;
    let grown = (0..1000).find_map(|_| {
        used = (used + (10 << 20)).min(1000 << 20);
        fs::write(group.join("memory.current"), format!("{used}\n")).unwrap();
        Some(next()).filter(|line| line["pressure"] == "imminent")
    });
    let grown = grown.expect("a level is reached");
    assert!(grown["growth_per_second"].as_u64().unwrap() > 0 && grown["ms_to_wall"].is_u64(), "{grown}");
    assert_eq!(grown["stalled_percent"], 0.0, "{grown}");
    fs::write(group.join("memory.pressure"), "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000000000\n").unwrap();
    assert!((0..1000).map(|_| next()).any(|line| line["stalled_percent"] == 100.0), "a stalled window");
    fs::write(group.join("memory.max"), "4000000000\n").unwrap();
    let changed = (0..1000).map(|_| next()).find(|line| line["limit_changed"] == true).expect("it is read");
    assert_eq!((&changed["limit"], &changed["growth_per_second"]), (&4_000_000_000_u64.into(), &0.into()));
    child.kill().unwrap();
    child.wait().unwrap();

    let mut sleeper = Command::new("sleep").arg("1000").spawn().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(["pressure", &sleeper.id().to_string(), "--watch=0.02"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let notified = lines.next().unwrap().unwrap();
    assert!(notified.starts_with("Notified by ") || notified.starts_with("No signal notifies ("), "{notified}");
    assert!(lines.next().unwrap().unwrap().contains("headroom"), "the head");
    assert!(lines.next().unwrap().unwrap().contains("iB"), "a line");
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    assert!(child.wait().unwrap().success(), "it ends with the process");
}

/// A group of version 1 for a process, below the group of this process, until this is dropped.
struct Container(PathBuf);

impl Container {
    /// `None` without the right to make one, or with version 2.
    fn new() -> Option<Container> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|line| line.split_once(":memory:"))?.1;
        let parent = Path::new("/sys/fs/cgroup/memory").join(own.trim_start_matches('/'));
        let group = Container(parent.join(format!("neap-test-watch-{}", std::process::id())));
        fs::create_dir(&group.0).ok()?;
        Some(group)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// The kernel refuses a limit below the use, and notifies. No look by the clock is due.
#[test]
fn refused_cut_of_a_version_1_limit_brings_a_line_at_once() {
    let Some(group) = Container::new() else {
        eprintln!("SKIPPED: this process may make no memory group of version 1");
        return;
    };
    let limit = group.0.join("memory.limit_in_bytes");
    fs::write(&limit, "134217728").unwrap();
    let mut holder = Command::new("sh")
        .args(["-c", "echo 0 >$1/cgroup.procs; x=$(head -c 30000000 /dev/zero | tr '\\0' x); echo up; read end", "sh"])
        .arg(&group.0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    assert_eq!(BufReader::new(holder.stdout.take().unwrap()).lines().next().unwrap().unwrap(), "up");
    let mut watching = Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(["pressure", &holder.id().to_string(), "--watch=3600", "--times", "2"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let head = lines.next().unwrap().unwrap();
    if head.starts_with("Notified by memory.pressure_level: ") {
        assert!(lines.nth(1).unwrap().unwrap().ends_with("roomy"), "the first look");
        assert_eq!(fs::write(&limit, "8388608").unwrap_err().raw_os_error(), Some(libc::EBUSY));
        let line = lines.next().unwrap().unwrap();
        assert!(line.ends_with(", notified: the kernel finds little to reclaim"), "{line}");
        assert!(watching.wait().unwrap().success());
    } else {
        eprintln!("SKIPPED: {head}");
        watching.kill().unwrap();
        watching.wait().unwrap();
    }
    drop(holder.stdin.take());
    holder.wait().unwrap();
}

#[test]
fn an_example_of_the_guide_is_what_is_printed() {
    // The guide explains each line of the tree above.
    let page = include_str!("../../../docs/guide/pressure.md");
    for line in ["Headroom:  324.0 MiB, of /sys/fs/cgroup/a", "Pressure:  roomy; caches may grow by 196.0 MiB"] {
        assert!(page.contains(line), "{line}");
    }
}

#[test]
fn mistakes_are_named() {
    let output = neap(&["--root", "/nowhere/at/all"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), "neap: --root /nowhere/at/all: no such file; name a directory\n");
    let output = neap(&["4194304999"]);
    assert_ne!(output.status.code(), Some(0));
    let output = neap(&["4194305"]);
    assert_eq!(text(&output.stderr), "neap: there is no process 4194305\n");
    assert_eq!(neap(&["0"]).status.code(), Some(2));
    let output = neap(&["--watch=0"]);
    assert!(text(&output.stderr).contains("give 0.01 to 86400 seconds"), "{}", text(&output.stderr));
}
