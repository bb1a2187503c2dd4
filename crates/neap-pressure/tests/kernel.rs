//! Triggers of a running kernel. Those of groups need root and a machine whose cgroups of version 2
//! are free to use: `cargo xtask vm` runs them there.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

use std::fs;
use std::hint::black_box;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, id};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use neap_pressure::{Errno, Fired, Notify, Ready, Sensor, Signal, SignalState, StallWindow, Subject, System, Trigger};

const ROOT: &str = "/sys/fs/cgroup";
/// Where a group is throttled.
const HIGH: usize = 32 << 20;
/// Most milliseconds that a notification may take, against a hang.
const PATIENCE: u32 = 60_000;
/// A user without privilege.
const OTHER_USER: u32 = 65534;

/// A group of version 2 that has this process as its only one.
struct Group(PathBuf);

impl Group {
    fn with_this_process(name: &str) -> Group {
        let group = Path::new(ROOT).join(name);
        fs::create_dir(&group).unwrap();
        fs::write(group.join("memory.high"), HIGH.to_string()).unwrap();
        fs::write(group.join("cgroup.procs"), id().to_string()).unwrap();
        Group(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        fs::write(Path::new(ROOT).join("cgroup.procs"), id().to_string()).unwrap();
        fs::remove_dir(&self.0).unwrap();
    }
}

/// Arms one signal.
fn arm(files: &System, signal: Signal, window: StallWindow) -> Trigger<System> {
    let mut sensor = Box::new(Sensor::new(Subject::Own));
    Trigger::arm(files, sensor.survey(files), &[signal], window)
}

fn state(trigger: &Trigger<System>) -> SignalState {
    trigger.states().map(|(_, state)| state).next().unwrap()
}

/// Grows beyond `memory.high` and shrinks by 1 MiB, again and again, until the trigger notifies.
/// The kernel throttles each time, by little.
fn notified_of_growth(files: &System, trigger: &mut Trigger<System>) -> Fired {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let kept = vec![1_u8; HIGH];
            while !is_over.load(Ordering::Relaxed) {
                black_box((&kept, vec![1_u8; 1 << 20]));
            }
        });
        let fired = trigger.wait(files, PATIENCE);
        is_over.store(true, Ordering::Relaxed);
        fired
    })
}

#[test]
#[ignore = "needs root and cgroups of version 2 that are free to use"]
fn group_over_memory_high_notifies_by_its_events() {
    let group = Group::with_this_process("events");
    let files = System::new();
    for signal in [Signal::EventsLocal, Signal::Events] {
        let mut trigger = arm(&files, signal, StallWindow::DEFAULT);
        assert_eq!(state(&trigger), SignalState::Usable, "{signal:?}");
        // Without growth there is no notification.
        assert_eq!(trigger.wait(&files, 100), Fired::Nothing);
        match notified_of_growth(&files, &mut trigger) {
            Fired::Limit(events) => assert!(events.high > 0 && events.oom_kill == 0, "{events:?}"),
            fired => panic!("{fired:?}"),
        }
    }
    drop(group);
}

/// With privilege the window may be half a second.
#[test]
#[ignore = "needs root and cgroups of version 2 that are free to use"]
fn throttled_group_notifies_a_privileged_process_of_stalls() {
    let group = Group::with_this_process("stalls");
    let files = System::new();
    let window = StallWindow { stall_us: 1_000, window_us: 500_000 };
    let mut trigger = arm(&files, Signal::GroupPressure, window);
    assert_eq!(state(&trigger), SignalState::Usable);
    assert_eq!(notified_of_growth(&files, &mut trigger), Fired::Stall);
    drop(group);
}

/// Drops the trigger in a forked child, which closes the child's descriptor. Returns it in the
/// parent.
fn dropped_in_a_child(trigger: Trigger<System>) -> Trigger<System> {
    let shared = Arc::new(Mutex::new(Some(trigger)));
    let of_child = Arc::clone(&shared);
    let mut child = Command::new("sh");
    // SAFETY: no other thread has the lock, and closing a descriptor is a system call.
    unsafe {
        child.pre_exec(move || {
            drop(of_child.lock().unwrap().take().unwrap());
            Ok(())
        })
    };
    assert!(child.args(["-c", ":"]).status().unwrap().success());
    shared.lock().unwrap().take().unwrap()
}

/// A trigger belongs to the open file, which parent and child share: it lasts until both have
/// closed it.
#[test]
fn trigger_dropped_in_a_forked_child_stays_armed_in_the_parent() {
    let files = System::new();
    let trigger = arm(&files, Signal::MachinePressure, StallWindow::DEFAULT);
    if state(&trigger) != SignalState::Usable {
        eprintln!("SKIPPED: /proc/pressure/memory cannot be armed: {:?}", state(&trigger));
        return;
    }
    let trigger = dropped_in_a_child(trigger);
    // A pressure file without a trigger is ready at once, with the error bit.
    let ready = files.wait(trigger.file().unwrap(), Ready::URGENT, 1).unwrap();
    assert!(!ready.has(Ready::ERROR) && !ready.has(Ready::INVALID), "{ready:?}");
}

#[test]
#[ignore = "needs root and cgroups of version 2 that are free to use"]
fn trigger_of_a_group_notifies_after_a_forked_child_dropped_it() {
    let group = Group::with_this_process("forked");
    let files = System::new();
    for signal in [Signal::EventsLocal, Signal::GroupPressure] {
        let mut trigger =
            dropped_in_a_child(arm(&files, signal, StallWindow { stall_us: 1_000, window_us: 2_000_000 }));
        let fired = notified_of_growth(&files, &mut trigger);
        assert!(matches!(fired, Fired::Limit(_) | Fired::Stall), "{signal:?}: {fired:?}");
    }
    drop(group);
}

/// Runs a test of this program as a process without privilege, which may not be able to reach the
/// program where it lies.
fn without_privilege(test: &str) {
    let copy = std::env::temp_dir().join(format!("neap-pressure-kernel-{}", id()));
    fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let tests = ["--exact", test, "--ignored", "--nocapture"];
    let output = Command::new(&copy).args(tests).uid(OTHER_USER).gid(OTHER_USER).output();
    fs::remove_file(copy).unwrap();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said.lines().filter(|line| line.starts_with("figure: ")).for_each(|line| println!("{line}"));
}

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Linux 6.5 and later let a process without privilege wait for stalls of its group; some versions
/// before refuse.
#[test]
#[ignore = "needs root and cgroups of version 2 that are free to use"]
fn throttled_group_notifies_without_privilege_or_says_why_not() {
    let group = Group::with_this_process("owned");
    for file in ["memory.pressure", "cgroup.procs"] {
        chown(group.0.join(file), Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    }
    without_privilege("unprivileged::stalls_of_the_group");
    drop(group);
}

/// Since Linux 6.4, and 6.1.0-57 of Debian 12, a process without privilege may wait for stalls of
/// the machine in windows of two seconds. Kernels before refuse all windows, or opening the file.
#[test]
fn machines_stalls_without_privilege_depend_on_the_kernel() {
    if !is_root() || fs::metadata("/proc/pressure/memory").is_err() {
        eprintln!("SKIPPED: not root, or no /proc/pressure/memory");
        return;
    }
    without_privilege("unprivileged::stalls_of_the_machine");
}

/// Tests that others start in a process without privilege.
mod unprivileged {
    use super::*;

    #[test]
    #[ignore = "started by another test"]
    fn stalls_of_the_group() {
        assert!(!is_root());
        let files = System::new();
        let window = StallWindow { stall_us: 1_000, window_us: 2_000_000 };
        let mut trigger = arm(&files, Signal::GroupPressure, window);
        println!("figure: memory.pressure without privilege: {:?}", state(&trigger));
        match state(&trigger) {
            SignalState::Usable => assert_eq!(notified_of_growth(&files, &mut trigger), Fired::Stall),
            state => assert_eq!(state, SignalState::Refused(Errno::PERM)),
        }
    }

    #[test]
    #[ignore = "started by another test"]
    fn stalls_of_the_machine() {
        let files = System::new();
        // A window that only privilege gets is made longer.
        let trigger = arm(&files, Signal::MachinePressure, StallWindow { stall_us: 50_000, window_us: 500_000 });
        println!("figure: /proc/pressure/memory without privilege: {:?}", state(&trigger));
        let refused = [Errno::PERM, Errno::ACCES].map(SignalState::Refused);
        assert!(state(&trigger) == SignalState::Usable || refused.contains(&state(&trigger)));
    }
}
