//! `neap ps` on real processes: under neap, without numbers, and without neap.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;
mod traced;

use std::path::Path;
use std::process::{Command, Stdio};

use running::{Program, compiled, folder, library, neap, object, pages, until};
use serde_json::Value;

/// The object of all processes that `neap ps` lists.
fn list(more: &[&str]) -> Value {
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    let output = neap.arg("ps").args(more).arg("--json").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A program without neap.
fn sleeper() -> Program {
    let mut sleep = Command::new("sleep");
    sleep.arg("1000").env_remove("LD_PRELOAD");
    Program::run(sleep)
}

fn find(list: &Value, pid: u32) -> Option<&Value> {
    list["processes"].as_array().unwrap().iter().find(|process| process["pid"] == pid)
}

#[test]
fn all_processes_under_neap_are_listed_and_no_others() {
    let mut programs = [Program::start("burst", "interval:10,limit:1g", &[]), Program::start("burst", "", &[])];
    programs.iter_mut().for_each(|program| drop(program.hear("ready")));
    let sleep = sleeper();
    let pid = programs[0].id();
    let found = until("numbers of a burst", || {
        let found = find(&list(&[]), pid)?.clone();
        (found["in_use_bytes"].as_u64() > Some(10 << 20)).then_some(found)
    });
    assert!(found["resident_bytes"].as_u64() > found["in_use_bytes"].as_u64(), "{found}");
    assert_eq!(found["limit_bytes"].as_u64(), Some(1 << 30), "{found}");
    assert!((1..1 << 30).contains(&found["headroom_bytes"].as_u64().unwrap()), "{found}");
    assert!(["rseq", "atomic"].contains(&found["slots"].as_str().unwrap()), "{found}");
    let all = list(&["--sort", "pid"]);
    let other = find(&all, programs[1].id()).unwrap();
    assert_eq!((&other["limit_bytes"], &other["headroom_bytes"]), (&Value::Null, &Value::Null));
    assert!(find(&all, sleep.id()).is_none(), "{all}");
    let pids: Vec<u64> = all["processes"].as_array().unwrap().iter().flat_map(|one| one["pid"].as_u64()).collect();
    assert!(pids.is_sorted(), "{pids:?}");
    let ended = programs[1].id();
    drop(programs);
    assert!(find(&list(&[]), ended).is_none());
}

#[test]
fn lists_show_caches_of_a_sleeping_process_without_a_tick() {
    // Its one thread is in a read, so no tick comes.
    let mut program = Program::start_alone("caches", "background:off,interval:60000");
    let pid = program.id();
    for _ in 0..2 {
        let said = program.hear("caches");
        let said: Vec<u64> = said.split(' ').map(|number| number.parse().unwrap()).collect();
        let object = until("numbers of now", || {
            running::numbers(pid).ok().filter(|object| object["cpus_read_now"] == true && object["ticks"] == 0)
        });
        let cached = [object["bytes"]["cached"].as_u64().unwrap(), said[1]];
        assert!(cached[0] >= said[0], "{object}");
        let keys = ["cached_object_bytes", "cached_page_bytes"];
        let listed = self::object("ps", pid, &[]).unwrap();
        let listed = keys.map(|key| listed["processes"][0][key].as_u64().unwrap());
        assert_eq!(listed, cached, "neap ps");
        let output = Command::new(env!("CARGO_BIN_EXE_neap")).args(["metrics", &pid.to_string()]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let metric = |kind: &str| -> u64 {
            let is_it = |line: &&str| line.starts_with("neap_cached_bytes{") && line.contains(&format!("\"{kind}\""));
            text.lines().find(is_it).and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap()
        };
        assert_eq!(["objects", "pages"].map(metric), cached, "{text}");
        let output = Command::new(env!("CARGO_BIN_EXE_neap")).args(["top", "--json"]).output().unwrap();
        let all: Value = serde_json::from_slice(&output.stdout).unwrap();
        let row = find(&all, pid).unwrap_or_else(|| panic!("{all}"));
        assert_eq!(row["cached_bytes"].as_u64(), Some(cached.iter().sum()), "{row}");
        program.go_on();
    }
}

/// Most system calls of `neap ps` for a process whose numbers are old. It made 104 when this was
/// written.
const CALLS_MAX: u64 = 130;

#[test]
fn ps_makes_few_system_calls_for_each_process() {
    let role = || Program::start_alone("caches", "background:off,interval:60000");
    let mut programs: Vec<Program> = (0..12).map(|_| role()).collect();
    programs.iter_mut().for_each(|program| drop(program.hear("caches")));
    let pids: Vec<String> = programs.iter().map(|program| program.id().to_string()).collect();
    for program in &programs {
        running::numbers_with(program.id(), "numbers of now", |object| object["cpus_read_now"] == true);
    }
    let calls = |count: usize| {
        let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
        neap.arg("ps").args(&pids[..count]).stdout(Stdio::null());
        traced::system_calls(neap)
    };
    // A fixed number of threads looks at four processes or more.
    let [few, many] = [4, 12].map(calls);
    let each = many.saturating_sub(few) / 8;
    assert!((1..=CALLS_MAX).contains(&each), "{few} calls for 4 processes, {many} for 12");
}

#[test]
fn ps_lists_named_processes_and_counts_others_by_reason() {
    let mut program = Program::start("burst", "", &[]);
    let mut silent = Program::start("burst", "stat:off", &[]);
    program.hear("ready");
    silent.hear("ready");
    let other = sleeper();
    let pids = [silent.id(), other.id()].map(|pid| pid.to_string());
    let output = neap("ps", program.id(), &[&pids[0], &pids[1]]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.lines().count() == 4, "{text}");
    assert!(text.lines().nth(2).unwrap().contains(&format!("| {} ", program.id())), "{text}");
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("Not read: 1 not under neap (") && last.contains("; 1 no numbers ("), "{text}");
    let object = object("ps", silent.id(), &[]).unwrap();
    assert_eq!(object["unread"][0]["reason"], "no numbers", "{object}");
}

/// Starts a compiled C program with arguments, under neap or without it, and waits for its word.
fn started(program: &Path, arguments: &[String], preload: bool) -> Program {
    let mut command = Command::new(program);
    command.args(arguments).env_remove("LD_PRELOAD").env("NEAP", "background:on");
    if preload {
        command.env("LD_PRELOAD", library());
    }
    let mut program = Program::run(command);
    program.hear("ready");
    program
}

/// The reason and the example of the only process that `neap ps PID` has not read.
fn reason(pid: u32) -> (String, String) {
    let object = object("ps", pid, &[]).unwrap();
    let unread = &object["unread"][0];
    assert_eq!(unread["processes"], 1, "{object}");
    let text = |key: &str| unread[key].as_str().unwrap().to_string();
    (text("reason"), text("example"))
}

/// Opens a file as neap commands open the page of another process, and maps it.
const READER: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
int main(int count, char **words) {
  int files = 0;
  files += open(words[1], O_PATH | O_CLOEXEC) >= 0;
  files += open(words[1], O_RDONLY | O_NONBLOCK | O_CLOEXEC) >= 0;
  int file = open(words[1], O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (files != 2 || file < 0) return 1;
  if (count > 2 && mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0) == MAP_FAILED) return 2;
  puts("ready"); fflush(stdout); getchar();
  return 0;
}
"#;

#[test]
fn command_with_the_page_of_another_process_is_no_child_of_it() {
    let mut program = Program::start("burst", "", &[]);
    program.hear("ready");
    let page = format!("/proc/{}/fd/{}", program.id(), pages(program.id())[0].0);
    let reader = compiled(&folder("ps-reader"), "reader", READER);
    let plain = started(&reader, std::slice::from_ref(&page), false);
    let (kind, example) = reason(plain.id());
    assert!(kind == "not under neap" && example.contains("does not run under neap"), "{kind}: {example}");
    let mapping = started(&reader, &[page, "map".to_string()], false);
    let (kind, example) = reason(mapping.id());
    let expected = format!("has mapped the numbers of process {}", program.id());
    assert!(kind == "not under neap" && example.contains(&expected), "{kind}: {example}");
}

/// Makes a child by `vfork`, or by the bare system call if there is an argument, and says its id.
/// The child waits for that many milliseconds, and then executes a program.
const BETWEEN: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
char *none[] = {NULL};
int main(int count, char **words) {
  if (count > 1) {
    int child = syscall(SYS_fork);
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, 9);
      usleep(atoi(words[1]) * 1000);
      execle("/bin/sleep", "sleep", "1000", NULL, none);
      _exit(1);
    }
    printf("ready\nchild %d\n", child); fflush(stdout); getchar();
    return 0;
  }
  if (vfork() == 0) {
    char line[40];
    int length = snprintf(line, sizeof line, "ready\nchild %d\n", getpid());
    prctl(PR_SET_PDEATHSIG, 9);
    write(1, line, length);
    read(0, line, 1);
    _exit(0);
  }
  return 0;
}
"#;

#[test]
fn ps_child_before_exec_is_not_under_neap() {
    let between = compiled(&folder("ps-between"), "between", BETWEEN);
    let mut parent = started(&between, &[], true);
    let child: u32 = parent.hear("child").parse().unwrap();
    let (kind, example) = reason(child);
    assert!(kind == "not under neap" && example.contains("child of vfork"), "{kind}: {example}");
    // Of another child, the descriptor is its parent's for a moment.
    let mut parent = started(&between, &["100".to_string()], true);
    let child: u32 = parent.hear("child").parse().unwrap();
    let (kind, example) = reason(child);
    assert!(kind == "not under neap" && example.contains("does not run under neap"), "{kind}: {example}");
}

#[test]
fn compiler_of_neap_is_not_under_neap() {
    let folder = folder("ps-compiler");
    let reader = compiled(&folder, "reader", READER);
    let metadata = folder.join("libneap_base-1.rmeta");
    std::fs::write(&metadata, [0; 4096]).unwrap();
    let compiler = started(&reader, &[metadata.to_str().unwrap().to_string(), "map".to_string()], false);
    let (kind, example) = reason(compiler.id());
    assert!(kind == "not under neap" && example.contains("does not run under neap"), "{kind}: {example}");
}
