//! Parts of a report: hidden ancestors, throttling, swap, signals, moved processes, gaps.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod made;

use made::table::{MEMINFO, MOUNT_V2, case};
use made::{Entry, GIB, MIB, Tree, explained, name};
use neap_pressure::{
    Errno, FileKind, LimitedBy, MemoryLevel, MemoryReport, Sensor, Signal, SignalState, Subject, Version, Visibility,
};

fn survey(tree: &Tree) -> Box<Sensor> {
    let mut sensor = Box::new(Sensor::new(Subject::Own));
    sensor.survey(tree);
    sensor
}

fn state(report: &MemoryReport, signal: Signal) -> SignalState {
    report.signals().find(|(each, _)| *each == signal).map(|(_, state)| state).unwrap()
}

#[test]
fn hidden_ancestors_are_reported() {
    let hidden = |name: &str| survey(&case(name).tree()).report().ancestors_hidden();
    assert!(hidden("the visible root of a namespace is taken for the real root"));
    assert!(hidden("the group's path is not cut by the root of a bind mount"));
    assert!(hidden("the host's path is not visible in a container"));
    // The real root has no memory.max.
    assert!(!hidden("only the leaf is read"));
    let mut tree = case("a parent with use_hierarchy is skipped").tree();
    assert!(survey(&tree).report().ancestors_hidden());
    tree.text("/sys/fs/cgroup/memory/release_agent", "\n");
    assert!(!survey(&tree).report().ancestors_hidden());
}

#[test]
fn views_tell_how_the_group_was_found() {
    let view = |name: &str| survey(&case(name).tree()).report().view();
    assert_eq!(view("only the leaf is read"), Visibility::Own);
    assert_eq!(view("the host's path is not visible in a container"), Visibility::Missing);
    assert_eq!(view("a group outside of the namespace is looked for at its root"), Visibility::Outside);
    assert_eq!(
        view("a mount from outside of the namespace is taken for the namespace's root"),
        Visibility::AncestorsOnly
    );
    assert_eq!(view("a removed group has no ancestors"), Visibility::Deleted);
}

/// The root group has no file of the memory controller, only its name in a list.
#[test]
fn version_2_is_recognised_by_its_list_of_controllers() {
    for (controllers, expected) in [
        ("cpuset cpu memory pids\n", Some(Version::V2)),
        ("memory\n", Some(Version::V2)),
        ("cpuset cpu memory_new pids\n", None),
        ("", None),
    ] {
        let mut tree = Tree::of(&[("/proc/self/mountinfo", MOUNT_V2), ("/proc/meminfo", MEMINFO)]);
        tree.text("/proc/self/cgroup", "0::/\n");
        tree.text("/sys/fs/cgroup/cgroup.procs", "1\n");
        tree.text("/sys/fs/cgroup/cgroup.controllers", controllers);
        let sensor = survey(&tree);
        let report = sensor.report();
        assert_eq!((report.version(), report.levels().len()), (expected, 1), "{controllers}");
        let found = if expected.is_some() { "cgroup version 2" } else { "no memory group found; only the machine's" };
        assert!(explained(report).contains(found), "{}", explained(report));
    }
}

#[test]
fn limit_of_a_visible_level_is_listed_once() {
    let owners = |name: &str| {
        let sensor = survey(&case(name).tree());
        sensor.report().levels().iter().map(|level| level.owner).collect::<Vec<_>>()
    };
    let visible = owners("hierarchical_memory_limit of a visible level is counted as hidden");
    assert_eq!(visible, [LimitedBy::Group, LimitedBy::Group, LimitedBy::Machine]);
    let hidden = owners("a limit above the mount is missed although version 1 shows it");
    assert_eq!(hidden, [LimitedBy::Group, LimitedBy::HiddenAncestor, LimitedBy::Machine]);
}

#[test]
fn throttling_is_a_wall_of_its_own() {
    let mut tree = case("only the leaf is read").tree();
    tree.text("/sys/fs/cgroup/a/b/memory.high", "209715200\n");
    let sensor = survey(&tree);
    let report = sensor.report();
    assert_eq!(report.wall().and_then(MemoryLevel::headroom), Some(24 * MIB));
    let soft = report.soft_wall().unwrap();
    assert_eq!((name(report, soft).as_str(), soft.soft_headroom()), ("/sys/fs/cgroup/a/b", Some(100 * MIB)));
    assert!(explained(report).contains("Throttled: after 100.0 MiB, by /sys/fs/cgroup/a/b"));
}

#[test]
fn room_to_grow_is_said_on_both_sides() {
    let room = |name: &str| {
        let sensor = survey(&case(name).tree());
        let report = sensor.report();
        (report.pressure().map(|pressure| pressure.name()), report.room_to_grow())
    };
    let (pressure, bytes) = room("fixed path instead of the mount point");
    assert_eq!((pressure, bytes), (Some("roomy"), 512 * MIB - 128 * MIB));
    assert_eq!(room("only the leaf is read"), (Some("critical"), 0));
    assert_eq!(room("usage above a limit that was cut underflows"), (Some("imminent"), 0));
}

#[test]
fn swap_is_bounded_by_groups_and_the_machine() {
    let mut tree = case("only the leaf is read").tree();
    assert_eq!(survey(&tree).report().swap_headroom(), Some(2 * GIB));
    tree.text("/sys/fs/cgroup/a/memory.swap.max", "10485760\n");
    tree.text("/sys/fs/cgroup/a/memory.swap.current", "4194304\n");
    assert_eq!(survey(&tree).report().swap_headroom(), Some(6 * MIB));
}

#[test]
fn signals_are_usable_absent_or_refused_with_a_reason() {
    let mut tree = case("only the leaf is read").tree();
    let psi = "some avg10=1.50 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=5\n";
    tree.text("/sys/fs/cgroup/a/b/memory.events", "low 0\n");
    tree.set("/sys/fs/cgroup/a/b/memory.pressure", Entry::ReadOnly(psi.into(), Errno::PERM));
    tree.text("/proc/pressure/memory", psi);
    let sensor = survey(&tree);
    let report = sensor.report();
    let states = Signal::ALL.map(|signal| state(report, signal));
    let usable = SignalState::Usable;
    let readable = SignalState::ReadOnly(Errno::PERM);
    let absent = SignalState::Absent;
    assert_eq!(states, [usable, absent, usable, absent, readable, usable, absent, usable]);
    let (group, machine) = report.stalls();
    assert_eq!((group.unwrap().some_10, machine.unwrap().full_10), (150, 25));
    let text = explained(report);
    let refused = "can be read; no notification (operation not permitted); not in use: tells of stalls that ";
    assert!(text.contains(refused) && text.contains("; last 10 s: some 1.50 %"), "{text}");
    assert!(text.contains("windows of 2, 4, 6, 8 or 10 s"), "{text}");

    tree.set("/proc/pressure/memory", Entry::Unreadable(Errno::OPNOTSUPP));
    tree.set("/sys/fs/cgroup/a/b/memory.pressure", Entry::Refused(Errno::ACCES));
    tree.text("/proc/self/status", "CapEff:\t0000000001000000\n");
    let sensor = survey(&tree);
    let report = sensor.report();
    assert!(report.is_privileged());
    assert!(matches!(state(report, Signal::MachinePressure), SignalState::Not(_)));
    assert_eq!(state(report, Signal::GroupPressure), SignalState::Refused(Errno::ACCES));
}

#[test]
fn signals_in_use_are_those_that_looks_read() {
    let mut tree = case("only the leaf is read").tree();
    tree.text("/sys/fs/cgroup/a/b/memory.events", "low 0\n");
    tree.text("/proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
    let text = explained(survey(&tree).report());
    let line = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
    for name in ["headroom ", "MemAvailable "] {
        assert!(line(name).ends_with(" in use, read at each look"), "{text}");
    }
    for name in ["memory.events ", "/proc/pressure/memory "] {
        assert!(line(name).contains(" usable; not in use: tells of "), "{text}");
    }
    assert!(line("memory.events.local ").ends_with(" absent"), "{text}");
    tree.set("/sys/fs/cgroup/a/b/memory.events", Entry::Refused(Errno::ACCES));
    let text = explained(survey(&tree).report());
    assert!(text.contains("  memory.events           refused: permission denied\n"), "{text}");
}

#[test]
fn pressure_of_the_root_group_is_the_machines() {
    let mut tree = case("0:: is taken for memory on version 2").tree();
    tree.text("/proc/self/cgroup", "4:memory:/x\n0::/\n");
    tree.text("/sys/fs/cgroup/unified/cgroup.procs", "1\n");
    tree.text("/sys/fs/cgroup/unified/memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
    let sensor = survey(&tree);
    assert_eq!(state(sensor.report(), Signal::GroupPressure), SignalState::WholeMachine);
    assert!(sensor.report().is_hybrid() && sensor.report().version() == Some(Version::V1));
    // A namespace's root is a group like others.
    tree.text("/sys/fs/cgroup/unified/cgroup.type", "domain\n");
    assert_eq!(state(survey(&tree).report(), Signal::GroupPressure), SignalState::Usable);
}

#[test]
fn version_1_notifies_with_both_files_only() {
    let mut tree = case("co-mounted controllers are not found").tree();
    tree.text("/cgroup/all/x/memory.pressure_level", "");
    assert_eq!(state(survey(&tree).report(), Signal::PressureLevel), SignalState::Absent);
    tree.text("/cgroup/all/x/cgroup.event_control", "");
    assert_eq!(state(survey(&tree).report(), Signal::PressureLevel), SignalState::Usable);
    tree.set("/cgroup/all/x/cgroup.event_control", Entry::ReadOnly(Vec::new(), Errno::ROFS));
    assert_eq!(state(survey(&tree).report(), Signal::PressureLevel), SignalState::Refused(Errno::ROFS));
    assert_eq!(state(survey(&tree).report(), Signal::Events), SignalState::Absent);
}

#[test]
fn variables_of_the_service_manager_are_honoured() {
    let watch = |environment: &str, file: Option<Entry>| {
        let mut tree = case("only the leaf is read").tree();
        tree.text("/proc/self/environ", environment);
        if let Some(entry) = file {
            tree.set("/run/x.pressure", entry);
        }
        let sensor = survey(&tree);
        let report = sensor.report();
        (state(report, Signal::Watch), report.trigger().map(<[u8]>::to_vec))
    };
    let set = "A=b\0MEMORY_PRESSURE_WATCH=/run/x.pressure\0MEMORY_PRESSURE_WRITE=c29tZSAyMDAwMDAgMjAwMDAwMAA=\0";
    let text = || Some(Entry::Text(Vec::new()));
    assert_eq!(watch("A=b\0", None), (SignalState::Absent, None));
    assert_eq!(watch(set, text()), (SignalState::Usable, Some(b"some 200000 2000000\0".to_vec())));
    assert_eq!(watch(set, None).0, SignalState::Refused(Errno::NOENT));
    let read_only = Entry::ReadOnly(Vec::new(), Errno::ACCES);
    assert_eq!(watch(set, Some(read_only)).0, SignalState::Refused(Errno::ACCES));
    assert_eq!(watch(set, Some(Entry::Special(FileKind::Socket))).0, SignalState::Usable);
    assert_eq!(watch(set, Some(Entry::Special(FileKind::Stream))).0, SignalState::Usable);
    assert_eq!(watch(set, Some(Entry::Special(FileKind::Directory))).0, SignalState::Refused(Errno::ISDIR));
    assert!(matches!(watch(set, Some(Entry::Special(FileKind::Other))).0, SignalState::Not(_)));
    for off in ["MEMORY_PRESSURE_WATCH=\0", "MEMORY_PRESSURE_WATCH=/dev/null\0", "MEMORY_PRESSURE_WATCH=x\0"] {
        assert!(matches!(watch(off, None).0, SignalState::Not(_)), "{off}");
    }
    assert_eq!(watch("MEMORY_PRESSURE_WRITE=????\0", None).1, None);
}

#[test]
fn file_of_another_process_environment_is_not_opened() {
    let mut tree = Tree::of(&[
        ("/proc/7/environ", "MEMORY_PRESSURE_WATCH=/run/x.pressure\0"),
        ("/run/x.pressure", ""),
        ("/proc/7/cgroup", "0::/a\n"),
        ("/proc/self/mountinfo", MOUNT_V2),
        ("/sys/fs/cgroup/a/memory.max", "1073741824\n"),
        ("/sys/fs/cgroup/a/memory.current", "1048576\n"),
    ]);
    let mut sensor = Box::new(Sensor::new(Subject::Other(7)));
    let report = sensor.survey(&tree);
    assert!(matches!(state(report, Signal::Watch), SignalState::Not(reason) if reason.starts_with("not tried")));
    assert_eq!(report.wall().and_then(MemoryLevel::headroom), Some(1023 * MIB));
    tree.files.clear();
    let report = sensor.survey(&tree);
    assert!(report.wall().is_none() && explained(report).contains("no memory group found"));
}

#[test]
fn moved_process_is_followed() {
    let mut tree = case("only the root of the mount is read").tree();
    let mut sensor = Box::new(Sensor::new(Subject::Own));
    assert!(!sensor.look(&tree).moved());
    let before = tree.opened.get();
    assert!(!sensor.look(&tree).moved());
    let repeated = tree.opened.get() - before;
    tree.text("/proc/self/cgroup", "0::/a\n");
    tree.text("/sys/fs/cgroup/a/memory.max", "2097152000\n");
    let before = tree.opened.get();
    let report = sensor.look(&tree);
    assert!(report.moved());
    assert_eq!(report.directory(), b"/sys/fs/cgroup/a");
    assert_eq!(report.wall().and_then(MemoryLevel::headroom), Some(1000 * MIB));
    assert!(tree.opened.get() - before > 0 && repeated > 0);
    assert!(!sensor.look(&tree).moved());
}

#[test]
fn changed_limit_is_seen_by_the_next_look() {
    let mut tree = case("only the root of the mount is read").tree();
    let mut sensor = Box::new(Sensor::new(Subject::Own));
    sensor.look(&tree);
    tree.text("/sys/fs/cgroup/a/b/memory.max", "209715200\n");
    assert_eq!(sensor.look(&tree).wall().and_then(MemoryLevel::headroom), Some(100 * MIB));
}

#[test]
fn removed_directory_has_the_mounts_read_again() {
    let mut tree = case("only the root of the mount is read").tree();
    let mut sensor = Box::new(Sensor::new(Subject::Own));
    sensor.look(&tree);
    tree.files.retain(|path, _| !path.starts_with(b"/sys/fs/cgroup/a"));
    tree.text("/proc/self/mountinfo", "25 22 0:22 / /elsewhere rw - cgroup2 none rw\n");
    tree.text("/elsewhere/a/b/memory.max", "1048576\n");
    tree.text("/elsewhere/a/b/memory.current", "0\n");
    let report = sensor.look(&tree);
    assert_eq!(
        (report.directory(), report.wall().and_then(MemoryLevel::headroom)),
        (&b"/elsewhere/a/b"[..], Some(MIB))
    );
}

#[test]
fn deep_tree_is_read_whole() {
    let mut tree = Tree::of(&[("/proc/self/mountinfo", MOUNT_V2), ("/proc/meminfo", MEMINFO)]);
    let mut path = String::new();
    for depth in 0..300 {
        path += &format!("/g{depth}");
        tree.text(&format!("/sys/fs/cgroup{path}/memory.max"), if depth == 3 { "1048576" } else { "max" });
        tree.text(&format!("/sys/fs/cgroup{path}/memory.current"), "4096");
    }
    tree.text("/proc/self/cgroup", &format!("0::{path}\n"));
    let sensor = survey(&tree);
    let report = sensor.report();
    assert_eq!(report.levels().len() + report.unlisted(), 301);
    let wall = report.wall().unwrap();
    assert_eq!((report.path(wall), wall.headroom()), (&b"/sys/fs/cgroup/g0/g1/g2/g3"[..], Some(MIB - 4096)));
}

#[test]
fn overlong_lines_are_skipped_and_named() {
    let mut tree = case("only the leaf is read").tree();
    let long = format!("9 1 0:9 / /x{} rw - overlay o rw\n{MOUNT_V2}", "y".repeat(10_000));
    tree.text("/proc/self/mountinfo", &long);
    let sensor = survey(&tree);
    assert_eq!(sensor.report().wall().and_then(MemoryLevel::headroom), Some(24 * MIB));
    assert!(explained(sensor.report()).contains("1 lines of groups or mounts, which are too long"));
}

#[test]
fn refused_files_are_named() {
    let mut tree = case("only the leaf is read").tree();
    tree.set("/sys/fs/cgroup/a/memory.current", Entry::Refused(Errno::ACCES));
    let sensor = survey(&tree);
    assert_eq!(sensor.report().wall().and_then(MemoryLevel::headroom), Some(1948 * MIB));
    assert!(explained(sensor.report()).contains("a file of a level (permission denied)"));
    let nothing = survey(&Tree::default());
    let text = explained(nothing.report());
    assert!(text.contains("the process's groups (no such file)") && text.contains("mounts (no such file)"), "{text}");
    assert!(text.contains("no memory group found, and the machine's numbers cannot be read"), "{text}");
    assert!(nothing.report().wall().is_none() && nothing.report().pressure().is_none());
}

#[test]
fn control_characters_of_names_are_escaped() {
    let mut tree = case("only the leaf is read").tree();
    tree.text("/proc/self/cgroup", "0::/a\x1b[2J\n");
    tree.text("/sys/fs/cgroup/a\x1b[2J/memory.max", "1048576\n");
    tree.text("/sys/fs/cgroup/a\x1b[2J/memory.current", "0\n");
    let text = explained(survey(&tree).report());
    assert!(text.contains("/a\\x1b[2J") && !text.contains('\x1b'), "{text}");
}
