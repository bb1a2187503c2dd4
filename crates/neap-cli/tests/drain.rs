//! `neap drain` on real processes: awake, asleep, without a thread, stopped, and with nonsense in
//! their page.
//!
//! No test depends on speed: expected states are waited for, up to a minute.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use running::{Program, neap, numbers, numbers_with, object, pages, until};
use serde_json::Value;

fn number(object: &Value, key: &str) -> u64 {
    object[key].as_u64().unwrap_or_else(|| panic!("{key} in {object}"))
}

fn drain(pid: u32, more: &[&str]) -> Result<Value, String> {
    object("drain", pid, more)
}

#[test]
fn drain_during_background_nap_is_answered_at_once() {
    // The nap is a minute long: only a request ends it.
    let mut program = Program::start("burst", "interval:60000", &[]);
    program.hear("ready");
    program.go_on();
    program.hear("freed");
    let pid = program.id();
    let first = drain(pid, &["--until", "1"]).unwrap();
    assert_eq!(
        (number(&first, "pages"), number(&first, "objects"), number(&first, "until_bytes")),
        (0, 0, 1),
        "{first}"
    );
    let one = drain(pid, &["--cpu", "0"]).unwrap();
    assert_eq!((number(&one, "cpu"), number(&one, "cpus"), number(&one, "skipped")), (0, 1, 0), "{one}");
    let all = drain(pid, &["--node", "0"]).unwrap();
    assert_eq!((number(&all, "pid"), number(&all, "skipped")), (u64::from(pid), 0), "{all}");
    assert!(number(&all, "objects") > 1000 && number(&all, "pages") > 0, "a burst was cached: {all}");
    assert_eq!(number(&all, "free_bytes"), number(&all, "free_pages") * page_size());
    let report = neap("drain", pid, &[]);
    let text = String::from_utf8(report.stdout).unwrap();
    assert!(report.status.success() && text.starts_with(&format!("Process {pid} (")), "{text}");
}

fn page_size() -> u64 {
    // SAFETY: a query without side effects.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

/// Number of times that neap's threads in a process have slept: the library's, and that of the
/// crate, which is in this executable, too.
fn sleeps(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|task| task.unwrap().path());
    let ours = tasks.filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "neap\n"));
    let slept = |task: std::path::PathBuf| -> u64 {
        let status = fs::read_to_string(task.join("status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap().trim().parse().unwrap()
    };
    let slept: Vec<u64> = ours.map(slept).collect();
    assert!(!slept.is_empty(), "no thread of neap's");
    slept.iter().sum()
}

#[test]
fn sleeping_process_wakes_for_drain_request_only() {
    let mut program = Program::start("burst", "interval:10", &[]);
    program.hear("ready");
    program.go_on();
    program.hear("freed");
    let pid = program.id();
    let asleep = || numbers_with(pid, "process asleep", |object| object["mode"]["background"] == "asleep");
    asleep();
    for _ in 0..3 {
        // It goes to sleep right after it published that.
        let before = until("rest", || {
            let before = sleeps(pid);
            std::thread::sleep(Duration::from_millis(50));
            (sleeps(pid) == before).then_some(before)
        });
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(sleeps(pid), before, "it woke though nothing happened");
        let ticks = number(&numbers(pid).unwrap(), "ticks");
        let answer = drain(pid, &[]).unwrap();
        assert_eq!((number(&answer, "objects"), number(&answer, "skipped")), (0, 0), "{answer}");
        assert!(sleeps(pid) > before);
        // A drain may have freed memory, which a tick looks at.
        numbers_with(pid, "tick after the answer", |object| number(object, "ticks") > ticks);
        asleep();
    }
}

#[test]
fn without_a_thread_the_program_s_own_calls_answer() {
    let mut program = Program::start("churn", "background:off", &[]);
    program.hear("ready");
    let answer = drain(program.id(), &[]).unwrap();
    assert!(number(&answer, "objects") > 0, "{answer}");
    assert_eq!(program.child.try_wait().unwrap(), None, "it works on");
}

#[test]
fn unanswered_drain_is_reported_and_request_withdrawn() {
    let mut program = Program::start("burst", "background:off", &[]);
    program.hear("ready");
    let pid = program.id();
    let complaint = drain(pid, &[]).unwrap_err();
    let expected = format!("process {pid} has not answered: it has no thread of neap's (NEAP=background:on");
    assert!(complaint.contains(&expected), "{complaint}");
    // The ticket is the last answered one again.
    let file = fs::File::open(format!("/proc/{pid}/fd/{}", pages(pid)[0].0)).unwrap();
    let word = |at| {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, at).unwrap();
        u32::from_ne_bytes(bytes)
    };
    assert_eq!(word(32), word(56));
    // Nor does a stopped process answer, though it has a thread.
    let mut program = Program::start("burst", "background:on", &[]);
    program.hear("ready");
    let pid = program.id();
    program.stop();
    let complaint = drain(pid, &[]).unwrap_err();
    assert!(complaint.contains(&format!("process {pid} has not answered: it is stopped")), "{complaint}");
    program.resume();
    until("answer of a process that goes on", || drain(pid, &[]).ok());
}

#[test]
fn a_scope_that_is_not_there_is_refused_by_name() {
    let mut program = Program::start("burst", "interval:60000", &[]);
    program.hear("ready");
    let pid = program.id();
    assert_eq!(drain(pid, &["--cpu", "99999"]), Err(format!("neap: process {pid}: CPU 99999 does not exist\n")));
    assert_eq!(drain(pid, &["--node", "3"]), Err(format!("neap: process {pid}: node 3 does not exist\n")));
    assert_eq!(neap("drain", pid, &["--until", "much"]).status.code(), Some(2), "a usage error");
    let mut closed = Program::start("close", "", &[]);
    closed.hear("ready");
    let complaint = drain(closed.id(), &[]).unwrap_err();
    assert!(complaint.contains("has closed neap's descriptor"), "{complaint}");
}

#[test]
fn a_program_survives_whatever_is_written_into_its_page() {
    let mut program = Program::start("churn", "interval:10", &[]);
    program.hear("ready");
    let pid = program.id();
    let (descriptor, _) = pages(pid)[0];
    let path = format!("/proc/{pid}/fd/{descriptor}");
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let seed = 0x9e37_79b9_7f4a_7c15_u64;
    println!("seed {seed}");
    let mut state = seed;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..20_000_u64 {
        let (at, bytes) = match round % 4 {
            // A request of nonsense: tickets, CPUs, sizes.
            0 => (32 + next() % 72, next().to_ne_bytes().to_vec()),
            1 => (32, (next() as u32 % 3).to_ne_bytes().to_vec()),
            2 => (36, vec![0xff; 20]),
            _ => (next() % 60_000, vec![next() as u8; 1 + next() as usize % 2000]),
        };
        file.write_all_at(&bytes, at).unwrap();
    }
    assert_eq!(program.child.try_wait().unwrap(), None, "it works on");
    until("numbers", || numbers(pid).ok());
    let answer = until("answer", || drain(pid, &[]).ok());
    assert!(number(&answer, "cpus") > 0, "{answer}");
    assert_eq!(program.child.try_wait().unwrap(), None);
}
