//! What is seen of a process with which rights: of one that is not dumpable, and of one in another
//! PID namespace. `docs/guide/stat.md` has the table. A test says why it is skipped.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use running::{Program, compiled, library, neap, numbers, object, until};

/// A program that holds 50 MB. With an argument it is not dumpable.
const HOLDING: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
char *volatile kept;
int main(int count, char **words) {
  if (count > 1) prctl(PR_SET_DUMPABLE, 0);
  kept = malloc(50000000);
  memset(kept, 1, 50000000);
  puts("ready"); fflush(stdout);
  getchar();
  return 0;
}
"#;

fn is_root() -> bool {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Has the caller's next children begin a PID namespace. Returns 0, or -1.
fn begin_namespace() -> libc::c_int {
    // SAFETY: the call takes a constant, and changes the caller's next children alone.
    unsafe { libc::unshare(libc::CLONE_NEWPID) }
}

/// Checks that the process's numbers are shown, and that it takes requests.
fn is_seen_and_answers(pid: u32) {
    let seen = numbers(pid).unwrap();
    assert_eq!(seen["pid"], pid, "{seen}");
    assert!(seen["bytes"]["used"].as_u64() >= Some(50_000_000), "{seen}");
    let set = neap("set", pid, &["interval=100"]);
    assert!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
    assert_eq!(numbers(pid).unwrap()["settings"]["interval"], "100");
    let reconciled = object("stat", pid, &["--reconcile"]).unwrap();
    assert!(reconciled["resident_bytes"].as_u64() >= Some(50_000_000), "{reconciled}");
}

#[test]
fn process_that_is_not_dumpable_is_seen_by_root_only() {
    let mut command = Command::new(compiled(&running::folder("rights-dumpable"), "holding", HOLDING));
    command.arg("not dumpable").env("LD_PRELOAD", library()).env("NEAP", "background:on");
    let mut program = Program::run(command);
    program.hear("ready");
    let pid = program.id();
    if is_root() {
        return is_seen_and_answers(pid);
    }
    eprintln!("skipped: root's look at the process, since this is not root");
    for (command, more) in [("stat", &[][..]), ("set", &["interval=100"])] {
        let refused = neap(command, pid, more);
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && error.contains("not permitted"), "{error}");
    }
}

#[test]
fn process_in_another_pid_namespace_is_seen_by_its_outer_number() {
    let program = compiled(&running::folder("rights-namespace"), "holding", HOLDING);
    let mut command = Command::new("/bin/sh");
    // The shell stays outside. Its child is the first process of the namespace.
    command.args(["-c", "LD_PRELOAD=$1 $2; true", "sh"]).arg(library()).arg(program).env("NEAP", "background:on");
    let apart = || match begin_namespace() {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    let mut probe = Command::new("/bin/true");
    // SAFETY: the closure makes a system call only, and builds an error of a number.
    unsafe { probe.pre_exec(apart) };
    if let Err(error) = probe.status() {
        eprintln!("skipped: no PID namespace can be made ({error})");
        return;
    }
    // SAFETY: the closure makes a system call only, and builds an error of a number.
    unsafe { command.pre_exec(apart) };
    let mut shell = Program::run(command);
    shell.hear("ready");
    let children = format!("/proc/{0}/task/{0}/children", shell.id());
    let child = until("the shell's child", || fs::read_to_string(&children).ok()?.trim().parse::<u32>().ok());
    let status = fs::read_to_string(format!("/proc/{child}/status")).unwrap();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    assert_eq!(ids.split_whitespace().last(), Some("1"), "{ids}");
    is_seen_and_answers(child);
    shell.go_on();
}
