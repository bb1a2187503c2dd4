//! Triggers: which signal is armed, what is written for it, and what a notification means.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod made;

use made::table::{MEMINFO, MOUNT_V2, case};
use made::{Entry, Tree};
use neap_pressure::{
    Access, Errno, FileKind, Files, Fired, LimitEvents, Notify, Ready, Sensor, Signal, SignalState, StallWindow,
    Subject, System, Trigger,
};

const PSI: &str = "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=5\n";
const GROUP: &str = "/sys/fs/cgroup/a/b";
const MACHINE: &str = "/proc/pressure/memory";
const DEFAULT_TEXT: &str = "some 200000 2000000\0";

/// Survey of a tree, and a trigger among all signals.
fn armed(tree: &Tree) -> Trigger<Tree> {
    let mut sensor = Box::new(Sensor::new(Subject::Own));
    Trigger::arm(tree, sensor.survey(tree), &Signal::NOTIFYING, StallWindow::DEFAULT)
}

fn state(trigger: &Trigger<Tree>, signal: Signal) -> SignalState {
    trigger.states().find(|(each, _)| *each == signal).map(|(_, state)| state).unwrap()
}

/// A process in the version 2 group `/a/b`, without files that notify.
fn version_2() -> Tree {
    case("only the leaf is read").tree()
}

fn set_watch(tree: &mut Tree, path: &str, write: &str) {
    let text = format!("A=1\0MEMORY_PRESSURE_WATCH={path}\0MEMORY_PRESSURE_WRITE={write}\0");
    tree.text("/proc/self/environ", &text);
}

#[test]
fn most_trusted_signal_is_armed_and_each_other_has_a_reason() {
    let mut tree = version_2();
    tree.text("/sys/fs/cgroup/a/b/memory.events", "max 1\n");
    assert_eq!(armed(&tree).signal(), Some(Signal::Events));
    assert_eq!(state(&armed(&tree), Signal::EventsLocal), SignalState::Absent);
    tree.text("/sys/fs/cgroup/a/b/memory.events.local", "max 1\n");
    tree.text(MACHINE, PSI);
    let trigger = armed(&tree);
    assert_eq!((trigger.signal(), trigger.wanted()), (Some(Signal::EventsLocal), Ready::URGENT));
    assert_eq!(state(&trigger, Signal::EventsLocal), SignalState::Usable);
    let later = SignalState::Not("not tried: a signal with more trust is armed");
    assert!(Signal::NOTIFYING[1..].iter().all(|signal| state(&trigger, *signal) == later));
    assert!(tree.written.borrow().is_empty(), "events need no text");
}

/// The parent's limit is nearer than the group's own, and does not show in the events of the group.
fn nested() -> Tree {
    let mut tree = version_2();
    tree.text("/sys/fs/cgroup/a/memory.events.local", "low 0\nhigh 0\nmax 7\noom 0\noom_kill 0\n");
    tree.text("/sys/fs/cgroup/a/b/memory.events.local", "max 0\n");
    tree
}

#[test]
fn events_are_those_of_the_group_with_the_nearest_limit() {
    let mut tree = nested();
    let mut trigger = armed(&tree);
    assert_eq!(trigger.wait(&tree, 0), Fired::Nothing, "nothing since it was armed");
    tree.text("/sys/fs/cgroup/a/memory.events.local", "low 3\nhigh 0\nmax 7\noom 0\noom_kill 0\n");
    assert_eq!(trigger.wait(&tree, 0), Fired::Nothing, "protection is no limit");
    tree.text("/sys/fs/cgroup/a/memory.events.local", "low 3\nhigh 2\nmax 8\noom 0\noom_kill 0\n");
    let events = LimitEvents { high: 2, max: 1, ..LimitEvents::default() };
    // Version 2 sets the error bit with each notification.
    assert_eq!(trigger.fired(&tree, Ready(Ready::URGENT.0 | Ready::ERROR.0)), Fired::Limit(events));
    assert_eq!(trigger.wait(&tree, 0), Fired::Nothing, "told once");
    tree.set("/sys/fs/cgroup/a/memory.events.local", Entry::Refused(Errno::NODEV));
    assert_eq!((trigger.wait(&tree, 0), trigger.signal()), (Fired::Gone, None), "the group was removed");
    assert_eq!(trigger.wait(&tree, 0), Fired::Gone, "nothing is armed");
}

#[test]
fn closed_descriptor_is_forgotten_at_once() {
    for write in ["", "c29tZSAyMDAwMDAgMjAwMDAwMAA="] {
        let mut tree = nested();
        if write.is_empty() {
            tree.files.retain(|path, _| !path.ends_with(b"memory.events.local"));
            tree.text(MACHINE, PSI);
        }
        let mut trigger = armed(&tree);
        assert!(trigger.signal().is_some());
        assert_eq!(trigger.fired(&tree, Ready::default()), Fired::Nothing, "the wait has ended without it");
        assert_eq!((trigger.fired(&tree, Ready::INVALID), trigger.signal()), (Fired::Gone, None));
    }
}

#[test]
fn pressure_files_get_a_text_with_a_nul_and_are_never_read() {
    let mut tree = version_2();
    tree.text("/sys/fs/cgroup/a/b/memory.pressure", PSI);
    tree.text(MACHINE, PSI);
    let mut trigger = armed(&tree);
    assert_eq!(trigger.signal(), Some(Signal::GroupPressure));
    let text = (format!("{GROUP}/memory.pressure"), DEFAULT_TEXT.to_string());
    assert_eq!(*tree.written.borrow(), [text]);
    tree.set("/sys/fs/cgroup/a/b/memory.pressure", Entry::Unreadable(Errno::IO));
    assert_eq!(trigger.wait(&tree, 0), Fired::Stall);
    let without_trigger = Ready(Ready::URGENT.0 | Ready::ERROR.0);
    assert_eq!((trigger.fired(&tree, without_trigger), trigger.signal()), (Fired::Gone, None));
}

#[test]
fn refused_pressure_files_lead_to_the_next_signal() {
    let refusals = [
        (Errno::PERM, SignalState::Refused(Errno::PERM)),
        (Errno::ACCES, SignalState::Refused(Errno::ACCES)),
        (Errno::ROFS, SignalState::Refused(Errno::ROFS)),
        (Errno::BUSY, SignalState::Refused(Errno::BUSY)),
        (Errno::OPNOTSUPP, SignalState::Not("pressure stall information is switched off")),
    ];
    for (error, expected) in refusals {
        let mut tree = version_2();
        tree.text("/sys/fs/cgroup/a/b/memory.pressure", PSI);
        tree.text(MACHINE, PSI);
        // Opening fails, or writing.
        match error {
            Errno::PERM | Errno::ACCES | Errno::ROFS => {
                tree.set("/sys/fs/cgroup/a/b/memory.pressure", Entry::ReadOnly(PSI.into(), error));
            }
            _ => _ = tree.refusing.insert(format!("{GROUP}/memory.pressure"), error),
        }
        let trigger = armed(&tree);
        assert_eq!(trigger.signal(), Some(Signal::MachinePressure), "{error}");
        assert_eq!(state(&trigger, Signal::GroupPressure), expected);
        tree.refusing.insert(MACHINE.into(), error);
        let trigger = armed(&tree);
        assert_eq!(trigger.signal(), None, "{error}");
        assert_eq!(state(&trigger, Signal::PressureLevel), SignalState::Absent);
    }
}

#[test]
fn windows_without_privilege_are_multiples_of_two_seconds() {
    let mut tree = version_2();
    tree.text(MACHINE, PSI);
    let text = |tree: &Tree| {
        let mut sensor = Box::new(Sensor::new(Subject::Own));
        let window = StallWindow { stall_us: 100_000, window_us: 1_000_000 };
        tree.written.borrow_mut().clear();
        Trigger::arm(tree, sensor.survey(tree), &[Signal::MachinePressure], window);
        tree.written.borrow().iter().map(|(_, text)| text.clone()).collect::<Vec<_>>()
    };
    assert_eq!(text(&tree), [DEFAULT_TEXT]);
    tree.text("/proc/self/status", "CapEff:\t0000000001000000\n");
    let privileged = "some 100000 1000000\0";
    assert_eq!(text(&tree), [privileged]);
    // The capability is that of a user namespace.
    tree.refusing.insert(MACHINE.into(), Errno::INVAL);
    assert_eq!(text(&tree), [privileged, DEFAULT_TEXT]);
}

#[test]
fn file_of_the_service_manager_is_armed_by_its_kind() {
    let systemd = "c29tZSAxNTAwMDAgMjAwMDAwMAA=";
    let own = "some 150000 2000000\0";
    let path = "/run/x.pressure";
    let cases = [
        (Entry::Text(PSI.into()), systemd, Some(own), Ready::URGENT),
        (Entry::Text(PSI.into()), "", Some(DEFAULT_TEXT), Ready::URGENT),
        (Entry::Special(FileKind::Stream), "", None, Ready::DATA),
        (Entry::Special(FileKind::Stream), systemd, Some(own), Ready::DATA),
        (Entry::Special(FileKind::Socket), systemd, Some(own), Ready::DATA),
    ];
    for (entry, write, written, wanted) in cases {
        let mut tree = version_2();
        tree.text("/sys/fs/cgroup/a/b/memory.pressure", PSI);
        tree.set(path, entry.clone());
        set_watch(&mut tree, path, write);
        let mut trigger = armed(&tree);
        assert_eq!((trigger.signal(), trigger.wanted()), (Some(Signal::Watch), wanted), "{entry:?}");
        let texts: Vec<_> = tree.written.borrow().iter().map(|(to, text)| (to.clone(), text.clone())).collect();
        assert_eq!(texts, written.map(|text| (path.to_string(), text.to_string())).into_iter().collect::<Vec<_>>());
        assert_eq!(trigger.wait(&tree, 0), Fired::Stall, "{entry:?}");
        if wanted == Ready::DATA {
            assert_eq!(trigger.wait(&tree, 0), Fired::Gone, "ready without data: the other end is closed");
        }
    }
    for (entry, value, expected) in [
        (None, "", SignalState::Not("switched off by the service manager")),
        (None, "/dev/null", SignalState::Not("switched off by the service manager")),
        (None, "a/b", SignalState::Not("the path is not absolute and normalised")),
        (None, path, SignalState::Refused(Errno::NOENT)),
        (Some(Entry::Special(FileKind::Directory)), path, SignalState::Refused(Errno::ISDIR)),
        (Some(Entry::Special(FileKind::Other)), path, SignalState::Not("the file is not one of procfs or cgroup2")),
    ] {
        let mut tree = version_2();
        tree.text("/sys/fs/cgroup/a/b/memory.pressure", PSI);
        entry.into_iter().for_each(|entry| tree.set(path, entry));
        set_watch(&mut tree, value, systemd);
        let trigger = armed(&tree);
        assert_eq!((trigger.signal(), state(&trigger, Signal::Watch)), (Some(Signal::GroupPressure), expected));
    }
}

#[test]
fn version_1_names_two_descriptors_to_the_kernel() {
    let mut tree = case("a parent with use_hierarchy is skipped").tree();
    let mut sensor = Box::new(Sensor::new(Subject::Own));
    let directory = String::from_utf8(sensor.survey(&tree).directory().to_vec()).unwrap();
    let refused = Trigger::arm(&tree, sensor.survey(&tree), &Signal::NOTIFYING, StallWindow::DEFAULT);
    assert_eq!(state(&refused, Signal::PressureLevel), SignalState::Absent);
    tree.text(&format!("{directory}/memory.pressure_level"), "");
    let control = format!("{directory}/cgroup.event_control");
    tree.set(&control, Entry::ReadOnly(Vec::new(), Errno::ACCES));
    assert_eq!(state(&armed(&tree), Signal::PressureLevel), SignalState::Refused(Errno::ACCES));
    tree.text(&control, "");
    let mut trigger = armed(&tree);
    assert_eq!((trigger.signal(), trigger.wanted()), (Some(Signal::PressureLevel), Ready::DATA));
    assert_eq!(*tree.written.borrow(), [(control, "1007 10 medium,hierarchy".to_string())]);
    assert_eq!(trigger.wait(&tree, 0), Fired::Reclaim);
}

#[test]
fn signal_of_the_group_comes_before_that_of_the_machine() {
    let mut tree = case("0:: is taken for memory on version 2").tree();
    tree.text("/sys/fs/cgroup/unified/memory.pressure", PSI);
    tree.text("/proc/self/cgroup", "4:memory:/x\n0::/\n");
    tree.text("/sys/fs/cgroup/unified/cgroup.procs", "1\n");
    tree.text(MACHINE, PSI);
    let trigger = armed(&tree);
    assert_eq!(trigger.signal(), Some(Signal::MachinePressure));
    assert_eq!(state(&trigger, Signal::GroupPressure), SignalState::Not("it reports the whole machine"));
    tree.text("/sys/fs/cgroup/memory/x/memory.pressure_level", "");
    tree.text("/sys/fs/cgroup/memory/x/cgroup.event_control", "");
    assert_eq!(armed(&tree).signal(), Some(Signal::PressureLevel));
}

/// A survey and an armed trigger agree on each signal of groups, whichever part of the group the
/// mounts show.
#[test]
fn survey_and_arming_agree_on_each_view() {
    let cases = [
        ("only the leaf is read", "/sys/fs/cgroup/a/b", true),
        ("the host's path is not visible in a container", "/sys/fs/cgroup", true),
        ("a mount from outside of the namespace is taken for the namespace's root", "/sys/fs/cgroup", true),
        ("a group outside of the namespace is looked for at its root", "/sys/fs/cgroup", false),
        ("a parent with use_hierarchy is skipped", "/sys/fs/cgroup/memory/x/y", true),
        ("a process that was moved above its mount has the mount's limit", "/sys/fs/cgroup/memory", false),
    ];
    for (name, directory, shown) in cases {
        let mut tree = case(name).tree();
        let own: &[_] = match directory.contains("memory") {
            true => &[Signal::PressureLevel],
            false => &[Signal::EventsLocal, Signal::Events, Signal::GroupPressure],
        };
        tree.text(&format!("{directory}/cgroup.event_control"), "");
        own.iter().for_each(|signal| tree.text(&format!("{directory}/{}", signal.name()), PSI));
        let mut sensor = Box::new(Sensor::new(Subject::Own));
        let report = sensor.survey(&tree);
        for signal in [Signal::EventsLocal, Signal::Events, Signal::GroupPressure, Signal::PressureLevel] {
            let trigger = Trigger::arm(&tree, report, &[signal], StallWindow::DEFAULT);
            let surveyed = report.signals().find(|(each, _)| *each == signal).unwrap().1;
            let expected = if shown && own.contains(&signal) { SignalState::Usable } else { SignalState::Absent };
            assert_eq!((surveyed, state(&trigger, signal)), (expected, expected), "{name}: {signal:?}");
        }
    }
}

#[test]
fn variables_of_another_process_arm_nothing() {
    let mut tree = Tree::of(&[("/proc/7/cgroup", "0::/a\n"), ("/proc/self/mountinfo", MOUNT_V2)]);
    tree.text("/proc/meminfo", MEMINFO);
    tree.text("/run/x.pressure", PSI);
    tree.text("/proc/7/environ", "MEMORY_PRESSURE_WATCH=/run/x.pressure\0");
    let mut sensor = Box::new(Sensor::new(Subject::Other(7)));
    let trigger = Trigger::arm(&tree, sensor.survey(&tree), &[Signal::Watch], StallWindow::DEFAULT);
    let expected = SignalState::Not("not tried: the variable is of another process");
    assert_eq!((trigger.signal(), state(&trigger, Signal::Watch)), (None, expected));
}

/// Each descriptor has a trigger of its own. The kernel takes the text of this library, and no
/// second text on one descriptor.
#[test]
fn running_kernel_takes_two_triggers_on_one_file() {
    let files = System::new();
    let mut sensor = Box::new(Sensor::new(Subject::Own));
    let report = sensor.survey(&files);
    let usable = report.signals().any(|each| each == (Signal::MachinePressure, SignalState::Usable));
    if !usable {
        eprintln!("SKIPPED: this process may arm no trigger of /proc/pressure/memory");
        return;
    }
    let arm = || Trigger::arm(&files, report, &[Signal::MachinePressure], StallWindow::DEFAULT);
    let mut triggers = [arm(), arm()];
    for trigger in &mut triggers {
        assert_eq!(trigger.signal(), Some(Signal::MachinePressure), "{:?}", trigger.states().next());
        let fired = trigger.wait(&files, 1);
        assert!(matches!(fired, Fired::Nothing | Fired::Stall), "{fired:?}");
    }
    // A descriptor without a trigger is ready at once, forever, and with the error bit.
    let mut file = files.open(c"/proc/pressure/memory", Access::ReadWrite).unwrap();
    let ready = files.wait(&file, Ready::URGENT, 1000).unwrap();
    assert!(ready.has(Ready::ERROR), "{ready:?}");
    assert_eq!(files.write(&mut file, DEFAULT_TEXT.as_bytes()), Ok(()));
    assert_eq!(files.write(&mut file, DEFAULT_TEXT.as_bytes()), Err(Errno::BUSY));
}
