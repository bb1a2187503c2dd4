//! `neap ps` on real processes: under neap, without numbers, and without neap.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::process::Command;

use running::{Program, neap, object, until};
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
fn named_processes_are_listed_and_the_others_counted_with_a_reason() {
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
