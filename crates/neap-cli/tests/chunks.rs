//! `neap stat --percpu` on real processes: one with per-CPU data that comes and goes, and one
//! without.
//!
//! No test depends on speed: expected states are waited for, up to a minute.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::os::unix::fs::MetadataExt;

use running::{Program, neap, object, until};
use serde_json::Value;

fn look(pid: u32) -> Value {
    object("stat", pid, &["--percpu"]).unwrap()["percpu"].take()
}

fn number(object: &Value, key: &str) -> u64 {
    object[key].as_u64().unwrap_or_else(|| panic!("{key} in {object}"))
}

/// Pages of a kind in a chunk's map.
fn pages(chunk: &Value, kind: char) -> u64 {
    let runs = chunk["map"].as_str().unwrap().split_inclusive(char::is_alphabetic);
    runs.flat_map(|runs| runs.split_inclusive('-')).filter_map(|run| run.strip_suffix(kind)?.parse::<u64>().ok()).sum()
}

fn sum(percpu: &Value, of: impl Fn(&Value) -> u64) -> u64 {
    percpu["chunks"].as_array().unwrap().iter().map(of).sum()
}

#[test]
fn percpu_chunk_report_matches_program_before_and_after_frees() {
    let mut program = Program::start_alone("percpu", "background:on,interval:10");
    program.hear("ready");
    let pid = program.id();
    let full = look(pid);
    assert_eq!((number(&full, "owners"), number(&full, "allocations")), (500, 1000));
    assert_eq!(sum(&full, |chunk| number(chunk, "allocations")), 1000);
    let groups = number(&full, "groups");
    assert!(number(&full, "allocated_bytes") >= 500 * 2008 * number(&full, "cpus"));
    for chunk in full["chunks"].as_array().unwrap() {
        let [used, empty, missing] = ['u', 'e', '-'].map(|kind| pages(chunk, kind));
        assert_eq!((used + empty, empty), (number(chunk, "populated"), number(chunk, "empty")), "{chunk}");
        assert_eq!(used + empty + missing, number(&full, "chunk_pages"), "{chunk}");
    }
    // A process that does not answer is read in its memory, with the same result.
    program.stop();
    let read = look(pid);
    program.resume();
    for key in ["owners", "allocations", "allocated_bytes", "row_bytes", "chunk_pages"] {
        assert_eq!(read[key], full[key], "{key}");
    }
    let allocated = |percpu: &Value| sum(percpu, |chunk| number(chunk, "allocations") + number(chunk, "taken_bytes"));
    assert_eq!((allocated(&read), number(&read, "owners")), (allocated(&full), 500));
    program.go_on();
    program.hear("closed");
    let few = until("pages that went back", || {
        let few = look(pid);
        let back = 4 * number(&few, "populated") < number(&full, "populated");
        (back && few["chunks"].as_array().unwrap().iter().all(|chunk| chunk["list"] != "to depopulate")).then_some(few)
    });
    assert_eq!((number(&few, "owners"), number(&few, "allocations")), (10, 20));
    assert!(object("stat", pid, &[]).unwrap()["per_cpu"]["used"].as_u64().unwrap() > 0);
    assert_eq!(sum(&few, |chunk| number(chunk, "populated")) * groups, number(&few, "populated"));
    // The report for people, and the page.
    let folder = std::env::temp_dir().join(format!("neap-chunks-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("chunks.html");
    let report = neap("stat", pid, &["--percpu", "--html", file.to_str().unwrap()]);
    let text = String::from_utf8(report.stdout).unwrap();
    assert!(report.status.success() && text.starts_with(&format!("Process {pid} (")), "{text}");
    let rows = text.lines().filter(|line| line.starts_with("| ")).count();
    assert_eq!(rows, few["chunks"].as_array().unwrap().len() + 2, "{text}");
    let page = fs::read_to_string(&file).unwrap();
    assert!(page.contains(&format!("({pid})")) && page.contains("Pages of chunks: "), "{page}");
    fs::remove_dir_all(folder).unwrap();
    // The memory of reports is freed: of the file only the page of the numbers is left.
    let descriptors = running::pages(pid);
    assert_eq!(descriptors.len(), 1);
    let blocks = fs::metadata(format!("/proc/{pid}/fd/{}", descriptors[0].0)).unwrap().blocks();
    assert!(blocks * 512 <= 64 << 10, "{blocks} blocks");
    assert_eq!(program.child.try_wait().unwrap(), None, "it lives on");
}

#[test]
fn sleeping_process_shows_its_per_cpu_data_without_a_tick() {
    // Its one thread is in a read, so no tick comes.
    let mut program = Program::start_alone("percpu", "background:off,interval:60000");
    for word in ["ready", "closed"] {
        program.hear(word);
        let object = running::numbers_with(program.id(), "numbers of now", |object| object["cpus_read_now"] == true);
        let (percpu, page) = (look(program.id()), object["mode"]["page_size"].as_u64().unwrap());
        let [used, free] = ["used", "free"].map(|key| number(&object["per_cpu"], key));
        let empty = number(&percpu, "empty") + number(&percpu, "isolated_empty");
        assert_eq!((used + free, free), (number(&percpu, "populated") * page, empty * page), "{word}");
        // 500 or 10 owners with 2008 bytes for each CPU.
        let owners = number(&percpu, "owners");
        assert!(used >= owners * 2008 * number(&percpu, "cpus") && (owners == 500) == (word == "ready"), "{object}");
        program.go_on();
    }
}

#[test]
fn a_process_without_per_cpu_data_says_so_in_a_line() {
    // Without a thread there would be no answer.
    let mut program = Program::start("burst", "background:off", &[]);
    program.hear("ready");
    let pid = program.id();
    assert_eq!(look(pid), Value::Null);
    let report = neap("stat", pid, &["--percpu"]);
    let text = String::from_utf8(report.stdout).unwrap();
    assert!(report.status.success() && text.lines().count() == 1, "{text}");
    assert!(text.starts_with(&format!("Process {pid} (")) && text.ends_with(" has no per-CPU data.\n"), "{text}");
    // Without --percpu the page would be empty.
    assert!(!neap("stat", pid, &["--html", "x.html"]).status.success());
}
