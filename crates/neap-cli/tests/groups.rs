//! `neap stat --groups` and `neap group` on real processes with threads in groups by name.
//!
//! No test depends on speed: expected states are waited for, up to a minute.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use running::{Program, neap, object, until};
use serde_json::Value;

fn look(pid: u32) -> Value {
    object("stat", pid, &["--groups"]).unwrap()["memory_groups"].take()
}

fn group<'v>(groups: &'v Value, path: &str) -> Option<&'v Value> {
    groups["groups"].as_array()?.iter().find(|group| group["path"] == path)
}

fn used(groups: &Value, path: &str) -> u64 {
    group(groups, path).and_then(|group| group["used"].as_u64()).unwrap_or_else(|| panic!("{path} in {groups}"))
}

#[test]
fn the_root_group_is_shown_with_the_container_that_bounds_it() {
    let shown = |options: &str| {
        let mut program = Program::start("threads", options, &[]);
        program.hear("ready");
        let report = neap("stat", program.id(), &["--groups"]);
        String::from_utf8(report.stdout).unwrap()
    };
    let text = shown("groups:by-thread-name,limit:auto,interval:10");
    assert!(text.lines().any(|line| line.starts_with("Container: ") && line.contains("the heap")), "{text}");
    let text = shown("groups:by-thread-name,interval:10");
    assert!(text.contains("alpha") && !text.contains("Container: "), "{text}");
}

#[test]
fn by_thread_name_groups_hold_memory_of_their_threads() {
    let mut program = Program::start("threads", "groups:by-thread-name,interval:10", &[]);
    program.hear("ready");
    let pid = program.id();
    let full = look(pid);
    for (path, mib) in [("alpha", 8), ("beta", 3)] {
        let own = &group(&full, path).unwrap_or_else(|| panic!("{full}"))["own"];
        assert!((mib << 20..(mib + 1) << 20).contains(&used(&full, path)), "{full}");
        assert!(own["objects"].as_u64() >= Some(mib * 500_000) && own["pages"].as_u64() >= Some(mib << 19), "{own}");
    }
    assert!(used(&full, "") >= 11 << 20);
    // Bounds are changed from outside, and read back.
    let changed = neap("group", pid, &["alpha", "max=1m", "low=64k"]);
    let text = String::from_utf8(changed.stdout).unwrap();
    assert!(changed.status.success() && text.contains("alpha: max 1.0 MiB (was none)"), "{text}");
    let bounds = group(&look(pid), "alpha").unwrap()["bounds"].clone();
    assert_eq!((bounds["max"].as_u64(), bounds["low"].as_u64()), (Some(1 << 20), Some(64 << 10)));
    for (more, complaint) in [(["gamma", "max=1"], "has no group"), (["alpha", "most=1"], "give max, high")] {
        let refused = neap("group", pid, &more);
        let text = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && text.contains(complaint), "{text}");
    }
    let report = neap("stat", pid, &["--groups", "--dead"]);
    let text = String::from_utf8(report.stdout).unwrap();
    assert!(report.status.success() && text.starts_with(&format!("Process {pid} (")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("alpha ") && line.contains("####################")), "{text}");
    program.go_on();
    program.hear("freed");
    let free = until("memory that went back to its groups", || {
        let free = look(pid);
        (used(&free, "alpha") < 1 << 20 && used(&free, "beta") < 1 << 20).then_some(free)
    });
    assert!(group(&free, "alpha").unwrap()["peak"].as_u64() >= Some(8 << 20));
    // Drained stocks are not kept.
    until("stocks that were emptied", || {
        let groups = look(pid)["groups"].take();
        groups.as_array().unwrap().iter().all(|group| group["stocked"] == 0).then_some(())
    });
}

#[test]
fn the_group_of_one_thread_goes_with_it() {
    let mut program = Program::start("threads", "groups:by-thread,interval:10", &[]);
    program.hear("ready");
    let pid = program.id();
    let paths = |groups: &Value| -> Vec<String> {
        let groups = groups["groups"].as_array().unwrap();
        groups.iter().map(|group| group["path"].as_str().unwrap().to_string()).collect()
    };
    let named = |groups: &Value, name: &str| paths(groups).iter().filter(|path| path.starts_with(name)).count();
    let full = look(pid);
    assert_eq!((named(&full, "alpha:"), named(&full, "beta:")), (1, 1), "{full}");
    program.go_on();
    program.hear("freed");
    program.go_on();
    program.hear("ended");
    until("groups that went", || {
        let groups = look(pid);
        (named(&groups, "alpha:") + named(&groups, "beta:") == 0 && groups["dying"] == 0).then_some(())
    });
}

#[test]
fn groups_of_a_silent_process_are_read_in_its_memory() {
    let mut program = Program::start("threads", "groups:by-thread-name,interval:10", &[]);
    program.hear("ready");
    let pid = program.id();
    assert!(neap("group", pid, &["alpha", "max=100m", "low=64k"]).status.success());
    // Ticks uncharge between the two looks what the program has freed.
    let (read, answered) = until("two looks that agree", || {
        let answered = look(pid);
        assert_eq!(answered["from_memory"], false);
        program.stop();
        let read = look(pid);
        let text = String::from_utf8(neap("stat", pid, &["--groups"]).stdout).unwrap();
        program.resume();
        assert_eq!(read["from_memory"], true, "{read}");
        assert!(text.contains("its memory was read"), "{text}");
        let charged = |groups: &Value| -> Vec<Value> {
            let groups = groups["groups"].as_array().unwrap();
            groups.iter().map(|group| group["charged"].clone()).collect()
        };
        (charged(&read) == charged(&answered)).then_some((read, answered))
    });
    for key in ["ids", "dying"] {
        assert_eq!(read[key], answered[key]);
    }
    let all = [&read, &answered].map(|groups| groups["groups"].as_array().unwrap());
    assert_eq!(all[0].len(), all[1].len());
    for (read, answered) in all[0].iter().zip(all[1]) {
        for key in ["path", "id", "peak", "bounds", "own", "events", "local_events", "stalled_us"] {
            assert_eq!(read[key], answered[key], "{key}: {read} {answered}");
        }
    }
    assert!(used(&read, "alpha") >= used(&answered, "alpha"));
    // Nor is a thread needed.
    let mut program = Program::start("threads", "groups:by-thread-name,background:off", &[]);
    program.hear("ready");
    let read = look(program.id());
    assert_eq!(read["from_memory"], true, "{read}");
    assert!((8 << 20..9 << 20).contains(&used(&read, "alpha")), "{read}");
}

/// The charges that wait: their groups, reasons and bytes.
fn waits(groups: &Value) -> Vec<Value> {
    let keys = |wait: &Value| ["group", "at", "reason", "bytes"].map(|key| wait[key].clone());
    groups["waiting"].as_array().unwrap().iter().map(|wait| keys(wait).to_vec().into()).collect()
}

#[test]
fn waits_and_deleted_groups_of_a_silent_process_are_read() {
    let mut program = Program::start_alone("tenants", "background:on");
    program.hear("tenants");
    let pid = program.id();
    let read = until("two looks that agree", || {
        let answered = look(pid);
        assert_eq!(answered["from_memory"], false);
        program.stop();
        let read = look(pid);
        program.resume();
        assert_eq!(read["from_memory"], true);
        let numbers = |groups: &Value| {
            let used: Vec<u64> = ["", "acme", "beta"].map(|path| used(groups, path)).to_vec();
            (waits(groups), groups["gone"].clone(), used)
        };
        (waits(&read).len() == 2 && numbers(&read) == numbers(&answered)).then_some(read)
    });
    let id = |path: &str| group(&read, path).unwrap()["id"].clone();
    let waiting = read["waiting"].as_array().unwrap();
    for wait in waiting {
        assert_eq!((&wait["group"], &wait["at"]), (&id("acme"), &id("acme")), "{read}");
        assert!(wait["waited_ns"].as_u64() > Some(0) && wait["left_ns"].as_u64() <= Some(3_600_000_000_000), "{wait}");
    }
    assert!(waiting.iter().any(|wait| wait["reason"] == "turn"), "{read}");
    let gone = read["gone"].as_array().unwrap();
    let is_gone = |gone: &Value| gone["heir"] == id("") && gone["bytes"].as_u64() >= Some(10_000);
    assert!(gone.len() == 2 && gone.iter().all(is_gone), "{read}");
}

#[test]
fn freed_objects_in_caches_of_a_silent_process_are_not_used() {
    let paths = ["", "acme", "beta"];
    let kept = |groups: &Value| group(groups, "acme").unwrap()["stocked"].as_u64().unwrap();
    for options in ["", ",rseq:off", ",nodes:2"] {
        let mut program = Program::start_alone("cached tenants", &format!("background:off,interval:60000{options}"));
        let said = program.hear("tenants");
        let read = look(program.id());
        assert_eq!(read["from_memory"], true, "{read}");
        let seen = ["acme", "beta"].map(|path| used(&read, path).to_string()).join(" ");
        assert_eq!(seen, said, "{options}: {read}");
        assert!(kept(&read) > 100_000, "{options}: {read}");
        // A process that answers says as much as its memory.
        let mut program = Program::start_alone("cached tenants", &format!("background:on,interval:60000{options}"));
        program.hear("tenants");
        let (answered, read) = until("two looks with caches", || {
            let answered = look(program.id());
            program.stop();
            let read = look(program.id());
            program.resume();
            let numbers = |groups: &Value| paths.map(|path| used(groups, path));
            (numbers(&answered) == numbers(&read)).then_some((answered, read))
        });
        assert_eq!([&answered, &read].map(|groups| groups["from_memory"].clone()), [false, true], "{options}");
        assert!(kept(&read) > 100_000, "{options}: {read}");
    }
}

#[test]
fn a_process_without_groups_says_so_in_a_line() {
    let mut program = Program::start("burst", "background:off", &[]);
    program.hear("ready");
    let pid = program.id();
    assert_eq!(look(pid), Value::Null);
    let report = neap("stat", pid, &["--groups"]);
    let text = String::from_utf8(report.stdout).unwrap();
    assert!(report.status.success() && text.lines().count() == 1, "{text}");
    assert!(text.starts_with(&format!("Process {pid} (")) && text.ends_with(" has no memory groups.\n"), "{text}");
    assert!(!neap("group", pid, &["x", "max=1"]).status.success());
}
