//! `neap stat --reconcile` on real programs: redis and Python, under `neap run`.
//!
//! Goal: at least 99 % of an ordinary program's resident memory has a source and, where neap has a
//! counter, is within it. Programs that are not installed are skipped, and the output says so. No
//! test depends on speed.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use running::{Program, library, neap, numbers, object, until};
use serde_json::Value;

fn is_installed(program: &str) -> bool {
    let there = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !there {
        eprintln!("skipped: {program} is not installed");
    }
    there
}

/// The command in a folder with its library, as installed.
fn installed() -> &'static Path {
    static COMMAND: OnceLock<PathBuf> = OnceLock::new();
    COMMAND.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("reconcile");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        fs::hard_link(env!("CARGO_BIN_EXE_neap"), folder.join("neap")).unwrap();
        symlink(library(), folder.join("libneap_malloc.so")).unwrap();
        folder.join("neap")
    })
}

/// A program under `neap run`.
fn run(line: &[&str], options: &str, variables: &[(&str, &str)]) -> Program {
    let mut command = Command::new(installed());
    command.args(["run", "--"]).args(line);
    command.env("NEAP", options).envs(variables.iter().copied());
    Program::run(command)
}

fn of<'v>(seen: &'v Value, source: &str) -> &'v Value {
    let mut sources = seen["sources"].as_array().unwrap().iter();
    sources.find(|each| each["source"] == source).unwrap_or_else(|| panic!("{source} in {seen}"))
}

fn bytes(seen: &Value, source: &str) -> u64 {
    of(seen, source)["resident"].as_u64().unwrap()
}

/// The object of a process that answers, with at least 99 % explained.
fn explained(pid: u32) -> Value {
    until("process that answers, and whose memory is explained", || {
        let seen = object("stat", pid, &["--reconcile"]).unwrap();
        println!("{} % of {}: {}", seen["explained_percent"], seen["resident_bytes"], seen["unanswered"]);
        (seen["unanswered"].is_null() && seen["explained_percent"].as_f64() >= Some(99.0)).then_some(seen)
    })
}

fn is_shown(pid: u32, sources: &[&str]) {
    let report = neap("stat", pid, &["--reconcile"]);
    let text = String::from_utf8(report.stdout).unwrap();
    println!("{text}");
    assert!(report.status.success());
    for line in sources.iter().chain(&["explained ", "resident in all ", "objects in use "]) {
        assert!(text.lines().any(|each| each.starts_with(line)), "{line} is not in\n{text}");
    }
}

#[test]
fn the_memory_of_redis_is_explained() {
    if !is_installed("redis-server") {
        return;
    }
    let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let line =
        ["redis-server", "--port", &port.to_string(), "--save", "", "--appendonly", "no", "--loglevel", "warning"];
    let program = run(&line, "groups:by-thread-name", &[]);
    let pid = program.id();
    let mut client = until("server that listens", || TcpStream::connect(("127.0.0.1", port)).ok());
    let mut send = |command: &str, replies: usize, size: usize| {
        client.write_all(command.as_bytes()).unwrap();
        let mut reply = vec![0; replies * size];
        client.read_exact(&mut reply).unwrap();
        assert!(reply.starts_with(b"+OK\r\n"), "{}", String::from_utf8_lossy(&reply));
    };
    for first in (0..60_000).step_by(100) {
        let set = |key: usize| format!("SET key:{key} {}\r\n", "v".repeat(100 + key % 400));
        send(&(first..first + 100).map(set).collect::<String>(), 100, 5);
    }
    let full = explained(pid);
    assert!(bytes(&full, "Slabs") > 20 << 20 && bytes(&full, "Program") > 1 << 20, "{full}");
    assert_eq!(of(&full, "Free")["believed"], 0);
    // The main thread's group is charged for the stored objects.
    let objects = &full["in_groups"]["objects"];
    let [charged, there] = ["charged", "is_there"].map(|key| objects[key].as_u64().unwrap());
    assert!(charged > 20 << 20 && charged.abs_diff(there) < 64 << 10, "{objects}");
    is_shown(pid, &["slabs of objects ", "program and libraries ", "objects "]);
    send("FLUSHALL\r\n", 1, 5);
    let seen = until("memory that goes back", || Some(explained(pid)).filter(|seen| bytes(seen, "Slabs") < 10 << 20));
    assert!(bytes(&seen, "Free") < 1 << 20, "{seen}");
}

const SCRIPT: &str = "
import sys, threading, time
book = {f'key {n}': [n, str(n)] for n in range(100000)}
blocks = [bytearray(200_000) for _ in range(50)]
threads = [threading.Thread(target=time.sleep, args=(1000,), daemon=True) for _ in range(3)]
for thread in threads: thread.start()
del blocks[::2]
print('ready', flush=True)
while True:
    kept = [bytearray(100_000) for _ in range(20)]
    time.sleep(0.005)
";

#[test]
fn the_memory_of_a_python_program_is_explained() {
    if !is_installed("python3") {
        return;
    }
    for (malloc, source) in [("pymalloc", "Anonymous"), ("malloc", "Slabs")] {
        let mut program = run(&["python3", "-c", SCRIPT], "", &[("PYTHONMALLOC", malloc)]);
        program.hear("ready");
        let seen = explained(program.id());
        // Python maps memory for small objects itself, unless it is set to use malloc.
        assert!(bytes(&seen, source) > 10 << 20 && bytes(&seen, "Runs") > 4 << 20, "{seen}");
        assert!(bytes(&seen, "ThreadStacks") > 0 && bytes(&seen, "Program") > 1 << 20, "{seen}");
        is_shown(program.id(), &["runs of pages in use ", "stacks of other threads "]);
    }
}

#[test]
fn reconcile_without_answer_reports_outside_view_and_reason() {
    let mut program = Program::start("burst", "background:off", &[]);
    program.hear("ready");
    // The program may still be on its way to sleep, and answer, or its text may be fresh.
    let seen = until("reading without an answer", || {
        let seen = object("stat", program.id(), &["--reconcile"]);
        println!("{seen:?}");
        seen.ok().filter(|seen| seen["in_arena"]["stacks_read_now"] == true)
    });
    assert!(seen["unanswered"].as_str().unwrap().contains("it has no thread of neap's"), "{seen}");
    // The extent of the arena is that of the last tick. A quarter of its first segment is in use.
    assert!(of(&seen, "Slabs")["believed"].is_null() && bytes(&seen, "Arena") > 5 << 20, "{seen}");
    // No zeroes in place of counters that are not known.
    assert!(seen["in_slabs"].is_null() && seen["in_groups"].is_null(), "{seen}");
    // The live counters, and the stacks in the process's memory, tell what is in the arena.
    let arena = &seen["in_arena"];
    let of = |key: &str| arena[key].as_u64().unwrap();
    let known = numbers(program.id()).unwrap();
    let used = of("objects_in_use") + of("ends_of_slabs") + of("runs");
    assert_eq!(Some(used), known["bytes"]["used"].as_u64(), "{seen} {known}");
    let cached = of("objects_on_stacks") + of("objects_in_sheaves") + of("objects_in_slabs") - of("holes");
    assert_eq!(Some(cached), known["bytes"]["cached"].as_u64(), "{seen} {known}");
    assert_eq!(Some(of("page_lists") / 4096), known["pages"]["listed"].as_u64(), "{seen} {known}");
    let report = neap("stat", program.id(), &["--reconcile"]);
    let text = String::from_utf8(report.stdout).unwrap();
    assert!(
        text.contains("\nobjects in use, neap's too ")
            && text.contains("\nruns of pages in use ")
            && text.lines().any(|line| line.starts_with("explained ")),
        "{text}"
    );
    let words = ["neap's other counters are not known", "arena, not seen by the page"];
    assert!(words.into_iter().all(|words| text.contains(words)), "{text}");
}
