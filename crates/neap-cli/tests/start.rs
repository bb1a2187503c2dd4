//! What neap costs a program that does nothing: page faults, beside those with an empty preloaded
//! library, also where the machine may have 1024 CPUs. A test says why it is skipped.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::process::Command;

use running::{compiled, folder, library};

/// Page faults that neap may add.
const MOST_FAULTS: i64 = 15;
/// Runs of each kind. The least counts: the kernel's read-ahead of files varies.
const RUNS: usize = 7;

/// A program that does nothing, and an empty library.
fn compile(folder: &Path) -> (PathBuf, PathBuf) {
    let nothing = compiled(folder, "nothing", "int main(void) { return 0; }\n");
    let (source, empty) = (folder.join("empty.c"), folder.join("empty.so"));
    fs::write(&source, "int neap_test_of_an_empty_library;\n").unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&empty).arg(&source).status().unwrap();
    assert!(built.success(), "cannot build the empty library");
    (nothing, empty)
}

/// The least number of page faults of `command` with a preloaded library. `None` if it fails.
#[expect(clippy::zombie_processes, reason = "`wait4` waits")]
fn faults(command: &[&str], preloaded: &Path) -> Option<i64> {
    let run = |_| {
        let mut program = Command::new(command[0]);
        let child = program.args(&command[1..]).env("TEST_PRELOADED", preloaded).spawn().unwrap();
        let (mut status, mut usage) = (0, MaybeUninit::<libc::rusage>::zeroed());
        // SAFETY: both pointers are to variables of this frame, which the call fills.
        let ended = unsafe { libc::wait4(child.id() as libc::pid_t, &mut status, 0, usage.as_mut_ptr()) };
        assert_eq!(ended, child.id() as libc::pid_t);
        // SAFETY: zeroes are a valid usage, and the call has filled it.
        (status == 0).then(|| unsafe { usage.assume_init() }.ru_minflt)
    };
    (0..RUNS).map(run).collect::<Option<Vec<_>>>()?.into_iter().min()
}

#[test]
fn program_that_does_nothing_has_few_page_faults_more() {
    let (nothing, empty) = compile(&folder("start"));
    let script = format!("LD_PRELOAD=$TEST_PRELOADED exec {}", nothing.display());
    let of = |preloaded| faults(&["sh", "-c", &script], preloaded).unwrap();
    let (with, without) = (of(library()), of(&empty));
    println!("{with} page faults, {without} with an empty library");
    assert!(with - without <= MOST_FAULTS, "{with} page faults, {without} with an empty library");
}

#[test]
fn cpus_that_the_machine_might_get_cost_no_page_faults() {
    let folder = folder("start-1024");
    let (nothing, empty) = compile(&folder);
    let possible = folder.join("possible");
    fs::write(&possible, "0-1023\n").unwrap();
    let (from, to) = (possible.display(), "/sys/devices/system/cpu/possible");
    let script = format!("mount --bind {from} {to} && LD_PRELOAD=$TEST_PRELOADED exec {}", nothing.display());
    let of = |preloaded| faults(&["unshare", "-m", "sh", "-c", &script], preloaded);
    let (Some(with), Some(without)) = (of(library()), of(&empty)) else {
        eprintln!("skipped: the file with the possible CPUs cannot be replaced by a bind mount");
        return;
    };
    println!("{with} page faults, {without} with an empty library");
    assert!(with - without <= MOST_FAULTS, "{with} page faults, {without} with an empty library");
}
