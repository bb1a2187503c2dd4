//! `neap set` on real processes: the new values are in force and shown, and faults are named.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::process::Output;

use running::{Program, neap, numbers, numbers_with};
use serde_json::Value;

fn set(pid: u32, changes: &[&str]) -> Output {
    neap("set", pid, changes)
}

fn said(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn running_process_takes_new_values_and_shows_them() {
    // The nap is a minute long: only the request ends it.
    let mut program = Program::start("burst", "interval:60000", &[]);
    program.hear("ready");
    let pid = program.id();
    let output = set(pid, &["interval=10", "limit=1m", "page_list_high=0", "refuse=on"]);
    let lines =
        "interval: 10 (was 60000)\nlimit: 1048576 (was none)\npage_list_high: 0 (was auto)\nrefuse: on (was off)\n";
    assert_eq!(said(&output), (lines.into(), String::new()));
    let object = numbers_with(pid, "new values", |object| object["settings"]["refuse"] == "on");
    let expected = [("interval", "10"), ("limit", "1048576"), ("page_list_high", "0"), ("refuse", "on")];
    assert!(expected.iter().all(|(key, value)| object["settings"][key] == *value), "{object}");
    let number = |object: &Value, part: &str, key: &str| object[part][key].as_u64();
    assert_eq!(number(&object, "mode", "interval_ms"), Some(10));
    assert_eq!((number(&object, "lists", "highs"), number(&object, "pages", "listed")), (Some(0), Some(0)));
    assert!(number(&object, "pages", "budget") < number(&object, "pages", "used"), "cut below the use: {object}");
    let report = String::from_utf8(neap("stat", pid, &[]).stdout).unwrap();
    assert!(
        report.contains(
            "Settings: high none, interval 10, limit 1048576, page_batch_scale 5, page_list_high 0, profile off, refuse on, reserve auto\n"
        ),
        "{report}"
    );
    assert!(set(pid, &["limit=none", "page_list_high=auto", "refuse=off"]).status.success());
    let object = numbers_with(pid, "limit lifted", |object| object["settings"]["refuse"] == "off");
    assert!(object["pages"]["budget"].is_null() && number(&object, "lists", "highs") > Some(0), "{object}");
    // It ticks at the new interval.
    program.go_on();
    program.hear("freed");
    numbers_with(pid, "burst given back", |object| object["mode"]["background"] == "asleep");
}

#[test]
fn process_without_a_thread_changes_in_its_own_calls() {
    let mut program = Program::start("churn", "background:off,interval:60000", &[]);
    program.hear("ready");
    let output = set(program.id(), &["page_list_high=7", "limit=8g"]);
    let lines = "page_list_high: 7 (was auto)\nlimit: 8589934592 (was none)\n";
    assert_eq!(said(&output), (lines.into(), String::new()));
    assert_eq!(program.child.try_wait().unwrap(), None, "it works on");
    // The answer came after the new values were published, and no tick is due for a minute.
    for value in ["8", "9", "10"] {
        assert!(set(program.id(), &[&format!("page_list_high={value}")]).status.success());
        assert_eq!(numbers(program.id()).unwrap()["settings"]["page_list_high"], value);
    }
}

#[test]
fn faults_are_named_and_nothing_is_changed() {
    let mut program = Program::start("burst", "interval:500", &[]);
    program.hear("ready");
    let pid = program.id();
    for (changes, reason) in [
        (
            &["interval=10", "rseq=off"][..],
            "rseq cannot change while the process runs; start the process with NEAP=rseq:off",
        ),
        (&["limt=1g"], "did you mean \"limit\"?"),
        (&["interval=1"], "\"1\" is not a number from 10 to 60000"),
        (&["limit"], "it has no \"=\""),
        (&[], "required"),
    ] {
        let output = set(pid, changes);
        assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(2), true));
        assert!(said(&output).1.contains(reason), "{}", said(&output).1);
    }
    assert_eq!(numbers(pid).unwrap()["settings"]["interval"], "500");
}
