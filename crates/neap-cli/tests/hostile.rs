//! Commands on a process that made a page up, and answers requests as it likes: memory and time
//! are bounded, and no text of it steers a terminal.
//!
//! Method: the test executable runs itself in a role that publishes the page. Where bytes are
//! bounded, the kernel's figure of the command's largest resident memory is compared. Where time
//! is, the process counts the requests that reach it.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use neap_testing::terminal::Terminal;

const ROLE: &str = "NEAP_TEST_ROLE";

/// Bytes that a command may have resident.
const MOST: i64 = 64 << 20;

/// Offsets in the page, as in the crate `neap`, `sheet`, `live` and `requests`.
const CHANNEL: u64 = 32;
const HEAD: u64 = 128;
/// Behind the head, a node's counters and a class's.
const TEXT: u64 = HEAD + 64 + 64 + 32 + 32;
const REPORT: u64 = 256 << 10;
const LENGTH: u64 = 320 << 10;
const WORDS: usize = 8192;

/// Kinds of requests, and refusals.
const CHUNKS: u32 = 1;
const GROUPS: u32 = 2;
const SHRINKERS: u32 = 4;
const SHRINK: u32 = 5;
const MAP: u32 = 7;
const UNKNOWN: u32 = 4;

/// No further report.
const END: u64 = u64::MAX;

/// Numbers that let a command ask for everything.
const NUMBERS: &str = r#"{"groups":{"live":1},"per_cpu":{"used":1,"free":1},"mode":{"background":"awake","interval_ms":250,"page_size":4096}}"#;

/// Text with everything that a terminal or a reader would misread, beside text of two scripts.
const HOSTILE: &str = "\u{1b}[2J\u{9b}2J\u{7f}\u{202e}x\u{2066}\u{2028}\u{2029}\u{200b}\u{e0041}приём'\"漢";

/// A made-up page.
struct Page(File);

impl Page {
    fn publish(text: &str) -> Page {
        // SAFETY: the name is a C string; the descriptor is owned by the file alone.
        let file = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            File::from_raw_fd(libc::memfd_create(c"neap-stat".as_ptr(), flags))
        };
        file.set_len(LENGTH).unwrap();
        // SAFETY: seals a file.
        let sealed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
        assert_eq!(sealed, 0);
        let mut head = b"neapstat".to_vec();
        for word in [7, 2, std::process::id(), text.len() as u32] {
            head.extend(word.to_ne_bytes());
        }
        file.write_all_at(&head, 0).unwrap();
        let head: Vec<u8> = [4096_u32, 1, 1].iter().flat_map(|word| word.to_ne_bytes()).collect();
        file.write_all_at(&head, HEAD).unwrap();
        file.write_all_at(text.as_bytes(), TEXT).unwrap();
        Page(file)
    }

    fn word(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.0.read_exact_at(&mut bytes, CHANNEL + offset).unwrap();
        u32::from_ne_bytes(bytes)
    }

    /// Answers every request by what `answer` makes of its kind and start: a refusal, and a report.
    fn serve(&self, mut answer: impl FnMut(u32, u32) -> (u32, Vec<u64>)) -> ! {
        let mut last = 0;
        loop {
            let ticket = self.word(0);
            if ticket == last {
                std::thread::sleep(Duration::from_micros(100));
                continue;
            }
            last = ticket;
            let (refusal, report) = answer(self.word(72), self.word(76));
            let bytes: Vec<u8> = report.iter().flat_map(|word| word.to_ne_bytes()).collect();
            self.0.write_all_at(&bytes, REPORT).unwrap();
            self.0.write_all_at(&refusal.to_ne_bytes(), CHANNEL + 28).unwrap();
            self.0.write_all_at(&ticket.to_ne_bytes(), CHANNEL + 24).unwrap();
            say("answered");
        }
    }
}

fn say(text: &str) {
    // Not by `print!`, which libtest captures or delays.
    std::io::stdout().write_all(format!("\n{text}\n").as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

/// A name in a report: its length, and seven words.
fn name(text: &[u8]) -> Vec<u64> {
    let mut padded = text[..text.len().min(56)].to_vec();
    padded.resize(56, 0);
    let words = padded.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
    [text.len() as u64].into_iter().chain(words).collect()
}

fn group(id: u64, parent: u64, called: &[u8]) -> Vec<u64> {
    let mut words = vec![id, parent, 1 << 20, 1 << 20, 0, END, END, 0, 0];
    words.extend([0; 4 + 20]);
    words.extend(name(called));
    words
}

/// A report of groups; `next` is the next slot to request.
fn groups(next: u64, all: &[Vec<u64>]) -> Vec<u64> {
    let mut words = vec![1, all.len() as u64, next, 0, all.len() as u64, 0, 9, 9, 0, 0];
    words.extend(all.iter().flatten());
    words
}

/// A shrinker with a number of groups; one that is barred is not asked for its objects.
fn shrinker(id: u64, flags: u64, barred: u64, called: &[u8], places: u64) -> Vec<u64> {
    let mut words = vec![id, flags, 2, 128, 0, 0, 0, 0, 0, 0, 0, barred];
    words.extend(name(called));
    words.push(places);
    (0..places).for_each(|_| words.extend([1, 0, 0]));
    words
}

fn shrinkers(next: u64, all: &[Vec<u64>]) -> Vec<u64> {
    let mut words = vec![1, all.len() as u64, next];
    words.extend([0; 17]);
    words.extend(all.iter().flatten());
    words
}

/// One group, for commands that need groups for their paths.
fn root() -> (u32, Vec<u64>) {
    (0, groups(END, &[group(1, 0, b"")]))
}

/// The roles. Run by the tests below; by itself it does nothing.
#[test]
#[ignore = "a role that the other tests start"]
fn hostile() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let of_text = format!(
        r#"{{"version":"{HOSTILE}","mode":{{"slots":"{HOSTILE}","why":"{HOSTILE}","background":"{HOSTILE}"}},"settings":{{"{HOSTILE}":"{HOSTILE}"}},"{HOSTILE}":["{HOSTILE}"],"cpus":[{{"kind":"{HOSTILE}"}}],"groups":1,"per_cpu":{{}}}}"#
    );
    // JSON allows every character but control characters below U+0020 and quotes.
    let of_text = of_text.replace('\u{1b}', "\\u001b").replace("'\"漢", "'漢");
    // A role may have a number of reports behind a colon.
    let (role, reports_max) = role.split_once(':').unwrap_or((&role, "4294967295"));
    let reports_max: u32 = reports_max.parse().unwrap();
    let page = match role {
        "array" => Page::publish("[]"),
        "text" => Page::publish(&of_text),
        "many" => Page::publish(&format!("{{\"a\":[{}]}}", vec!["{\"\":0}"; 8000].join(","))),
        _ => Page::publish(NUMBERS),
    };
    match role {
        "name" => {
            // As the kernel cuts it: within a letter. The name of the main thread is the process's.
            std::fs::write("/proc/self/comm", &"приложение".as_bytes()[..13]).unwrap();
        }
        "many" => {
            // Kept open for as long as the process lives.
            (0..5000).for_each(|_| core::mem::forget(page.0.try_clone().unwrap()));
        }
        "pages" => (0..20).for_each(|_| core::mem::forget(Page::publish(NUMBERS))),
        _ => {}
    }
    say("ready");
    let next = |from: u32| if from + 1 < reports_max { u64::from(from) + 1 } else { END };
    let mut reports = 0;
    page.serve(|what, from| match (role, what) {
        ("program", GROUPS) => {
            reports += 1;
            let called = if reports == 1 { "tenant" } else { "another program's" };
            (0, groups(END, &[group(1, 0, b""), group(2, 1, called.as_bytes())]))
        }
        ("chain", GROUPS) => {
            let end = 10_000.min(from + 190);
            let all: Vec<_> = (from..end).map(|at| group(u64::from(at) + 1, at.into(), &[b'n'; 56])).collect();
            (0, groups(if end < 10_000 { end.into() } else { END }, &all))
        }
        ("left" | "waiting", GROUPS) if from == 0 => (0, groups(1, &[group(1, 0, b"")])),
        ("left" | "waiting", GROUPS) => {
            let (kind, size) = if role == "left" { (1, 3) } else { (2, 6) };
            let count = (WORDS - 10) / size;
            let mut words = vec![1, count as u64, next(from), kind, 1, 0, 1, 1, 0, 0];
            let entry = |at: usize| [1, u64::from(from) << 16 | at as u64, 7, 7, 7, 7];
            (0..count).for_each(|at| words.extend(&entry(at)[..size]));
            (0, words)
        }
        ("wide", GROUPS) => {
            let id = |at: u32| u64::from(from) * 190 + u64::from(at) + 2;
            let all = (0..190).map(|at| group(id(at), 1, format!("{:x}\u{9b}", id(at)).as_bytes()));
            let root = (from == 0).then(|| group(1, 0, b""));
            (0, groups(next(from), &root.into_iter().chain(all).collect::<Vec<_>>()))
        }
        ("shrinkers", SHRINKERS) => {
            let all: Vec<_> = (0..100).map(|at| shrinker(u64::from(from) * 100 + at, 0, 1, b"evil", 16)).collect();
            (0, shrinkers(next(from), &all))
        }
        ("small chunks", CHUNKS) => {
            let mut words = vec![1, 800, next(from), 0, 2, 1, 1, 4096, 1, 1, 16, 4096];
            words.resize(WORDS, 1);
            (0, words)
        }
        ("places", SHRINKERS) => (0, shrinkers(END, &[shrinker(1, 16, 0, b"evil", 16)])),
        ("slow", SHRINKERS) => (0, shrinkers(END, &[shrinker(1, 0, 0, b"evil", 16)])),
        ("asleep", GROUPS) => loop {
            std::thread::park();
        },
        ("slow", SHRINK) => {
            std::thread::sleep(Duration::from_millis(700));
            (0, Vec::new())
        }
        ("chunks", CHUNKS) => {
            let pages = 64 * 4000;
            let mut words = vec![1, 1, u64::from(from) + 1, 0, 2, 1, 1, 4096, pages, pages, 16, 4096];
            words.extend([0; 10]);
            words.push(from.into());
            words.resize(WORDS, 0x5555_5555_5555_5555);
            (0, words)
        }
        ("map", MAP) => {
            let mut words = vec![1, u64::from(from) + 1, 4096, 1 << 30, 0, 0, 2000, 42];
            words.resize(8 + 42, 0);
            (0..2000).for_each(|_| words.extend([0x7f00_0000_0000, 4096, 1]));
            (0, words)
        }
        ("text", GROUPS) => {
            let names = [HOSTILE.as_bytes(), b"\xff\xfe\xc3(", b"a/b/../..", b"a\nb\r"];
            let all: Vec<_> = (2..).zip(names).map(|(id, called)| group(id, 1, called)).collect();
            (0, groups(END, &[vec![group(1, 0, b"")], all].concat()))
        }
        ("text", SHRINKERS) => (0, shrinkers(END, &[shrinker(1, 0, 0, HOSTILE.as_bytes(), 1)])),
        (_, GROUPS) => root(),
        (_, SHRINK) => (0, Vec::new()),
        _ => (UNKNOWN, Vec::new()),
    })
}

/// A hostile process; it ends with the test.
struct Hostile {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Hostile {
    fn start(role: &str) -> Hostile {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "hostile", "--ignored", "--nocapture", "--test-threads=1"]).env(ROLE, role);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut hostile = Hostile { child, output };
        hostile.hear("ready");
        hostile
    }

    /// Waits for a line.
    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim() != word {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the process ended before it said {word}");
        }
    }

    /// Ends the process. Returns the number of requests that it answered.
    fn answered(mut self) -> usize {
        self.end();
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        rest.matches("answered").count()
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Runs a command on the process.
    fn run(&self, command: &str, more: &[&str]) -> Ended {
        self.run_to(Stdio::piped(), command, more)
    }

    /// Runs a command on the process, with its output to a pipe or elsewhere.
    #[allow(clippy::zombie_processes, reason = "`wait4` waits for the child, and tells its memory")]
    fn run_to(&self, output: Stdio, command: &str, more: &[&str]) -> Ended {
        let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
        neap.arg(command).arg(self.child.id().to_string()).args(more);
        let mut child = neap.stdout(output).stderr(Stdio::piped()).spawn().unwrap();
        // A command whose output is larger than a pipe goes on as it is read.
        let (mut output, mut errors) = (child.stdout.take(), child.stderr.take().unwrap());
        let said = std::thread::spawn(move || {
            let mut text = Vec::new();
            errors.read_to_end(&mut text).unwrap();
            text
        });
        let mut text = Vec::new();
        if let Some(output) = &mut output {
            output.read_to_end(&mut text).unwrap();
        }
        let said = said.join().unwrap();
        let (mut status, pid) = (0, child.id() as i32);
        // SAFETY: zeroes are valid numbers, which the call fills; the child is waited for once.
        let usage = unsafe {
            let mut usage: libc::rusage = core::mem::zeroed();
            assert_eq!(libc::wait4(pid, &raw mut status, 0, &raw mut usage), pid);
            usage
        };
        let ended = Ended {
            code: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
            text: String::from_utf8(text).unwrap(),
            said: String::from_utf8(said).unwrap(),
        };
        assert!(usage.ru_maxrss << 10 < MOST, "{command} {more:?} had {} KiB: {}", usage.ru_maxrss, ended.said);
        assert!(!ended.said.contains("panicked"), "{}", ended.said);
        for text in [&ended.text, &ended.said] {
            let steers = |letter: &char| {
                letter.is_control() && *letter != '\n'
                    || "\u{202e}\u{2066}\u{2028}\u{2029}\u{200b}\u{e0041}".contains(*letter)
            };
            assert_eq!(text.chars().find(steers), None, "{command} {more:?}: {text}");
        }
        ended
    }

    /// Runs a command that is to succeed, without its output.
    fn shows(&self, more: &[&str]) {
        let ended = self.run_to(Stdio::null(), "stat", more);
        assert_eq!(ended.code, Some(0), "{more:?}: {}", ended.said);
    }

    /// Runs a command that is to fail, and checks its message.
    fn refuses(&self, command: &str, more: &[&str], message: &str) {
        let ended = self.run(command, more);
        assert_eq!((ended.code, ended.text.as_str()), (Some(1), ""), "{}", ended.said);
        assert!(ended.said.contains(message), "{}", ended.said);
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.end();
    }
}

/// The end of a command.
struct Ended {
    code: Option<i32>,
    text: String,
    said: String,
}

#[test]
fn groups_deeper_than_any_can_be_are_refused() {
    let hostile = Hostile::start("chain");
    for more in [&["--groups"][..], &["--groups", "--json"]] {
        hostile.refuses("stat", more, "deeper than 32 levels");
    }
}

#[test]
fn reports_without_an_end_are_refused_at_a_number_of_bytes() {
    for (role, option) in [
        ("left", "--groups"),
        ("waiting", "--groups"),
        ("shrinkers", "--shrinkers"),
        ("chunks", "--percpu"),
        ("map", "--reconcile"),
    ] {
        Hostile::start(role).refuses("stat", &[option, "--timeout", "60"], "more than 40 MiB");
    }
}

#[test]
fn as_many_bytes_as_are_read_are_shown_in_bounded_memory() {
    for (role, reports, option) in [
        ("left", 630, "--groups"),
        ("waiting", 470, "--groups"),
        ("wide", 440, "--groups"),
        ("shrinkers", 270, "--shrinkers"),
        ("small chunks", 360, "--percpu"),
    ] {
        let hostile = Hostile::start(&format!("{role}:{reports}"));
        let dead = if option == "--groups" { &["--dead"][..] } else { &[] };
        for json in [&[][..], &["--json"]] {
            hostile.shows(&[&[option, "--timeout", "60"], dead, json].concat());
        }
    }
}

#[test]
fn reports_without_an_end_are_refused_after_a_time() {
    let hostile = Hostile::start("places");
    hostile.refuses("stat", &["--shrinkers", "--timeout", "3"], "within 3 s; --timeout SECONDS");
}

#[test]
fn slow_answers_share_the_time_of_a_command() {
    let hostile = Hostile::start("slow");
    let ended = hostile.run("stat", &["--shrinkers", "--timeout", "2"]);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    assert!(ended.text.contains("Not all were asked within 2 s") && ended.text.contains(" ? "), "{}", ended.text);
    // A report of shrinkers, one of groups, and a few of sixteen counts.
    assert!(hostile.answered() < 8);
    // A process that has not answered is not asked for the second reading.
    let hostile = Hostile::start("asleep");
    let ended = hostile.run("top", &["--json", "--interval", "50", "--timeout", "1"]);
    assert!(
        ended.code == Some(0) && ended.text.contains("has not answered: it has no thread of neap's"),
        "{}",
        ended.said
    );
    assert_eq!(hostile.answered(), 0);
}

#[test]
fn a_page_behind_many_descriptors_is_read_once() {
    let ended = Hostile::start("many").run("stat", &["--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    Hostile::start("pages").refuses("stat", &[], "more than 16 pages");
}

#[test]
fn numbers_that_are_no_object_are_refused() {
    let hostile = Hostile::start("array");
    for (command, more) in [
        ("stat", &[][..]),
        ("stat", &["--json"]),
        ("stat", &["--groups"]),
        ("stat", &["--percpu"]),
        ("stat", &["--shrinkers"]),
        ("stat", &["--reconcile"]),
        ("top", &["--once", "--interval", "50"]),
        ("drain", &[]),
    ] {
        hostile.refuses(command, more, "is not a JSON object");
    }
}

#[test]
fn a_name_that_is_not_utf_8_hides_no_process() {
    let hostile = Hostile::start("name");
    for (command, more) in [
        ("stat", &[][..]),
        ("stat", &["--json"]),
        ("stat", &["--groups"]),
        ("stat", &["--groups", "--json"]),
        ("top", &["--once", "--interval", "50"]),
        ("top", &["--json", "--interval", "50"]),
    ] {
        let ended = hostile.run(command, more);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        let shown = if more.contains(&"--json") { "прилож\\\\xd0" } else { "прилож\\xd0" };
        assert!(ended.text.contains(shown), "{}", ended.text);
    }
}

#[test]
fn text_of_a_process_is_escaped_in_every_output() {
    let hostile = Hostile::start("text");
    for (command, more) in [
        ("stat", &[][..]),
        ("stat", &["--json"]),
        ("stat", &["--groups"]),
        ("stat", &["--groups", "--json"]),
        ("stat", &["--shrinkers"]),
        ("stat", &["--shrinkers", "--json"]),
        ("top", &["--once", "--interval", "50"]),
        ("top", &["--json", "--interval", "50"]),
    ] {
        // The output is checked where it is read.
        let ended = hostile.run(command, more);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        assert!(ended.text.contains("u{9b}") && ended.text.contains("приём"), "{}", ended.text);
    }
    // A shown path names the group, and a slash in a name makes no path.
    let text = hostile.run("stat", &["--groups"]).text;
    assert!(
        text.contains("\\xff\\xfe\\xc3(") && text.contains("a\\u{2f}b\\u{2f}..") && text.contains("a\\nb\\r"),
        "{text}"
    );
    hostile.refuses("group", &["a/b/../..", "max=1m"], "has no group");
    hostile.refuses("group", &["a\\nb\\r", "max=1m"], "refused, for reason 4");
}

#[test]
fn lists_of_processes_escape_text_and_count_what_makes_no_sense() {
    for (role, more, shown) in [
        ("text", &[][..], "\\u{1b}[2J\\u{9b}2J"),
        ("text", &["--json"], "\\\\u{1b}[2J\\\\u{9b}2J"),
        ("name", &[], "прилож\\xd0"),
        ("many", &[], "| hostile-"),
        ("array", &[], "Not read: 1 failed (process"),
        ("pages", &["--json"], "more than 16 pages"),
    ] {
        let ended = Hostile::start(role).run("ps", more);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        assert!(ended.text.contains(shown), "{role}: {}", ended.text);
    }
}

#[test]
fn metrics_of_a_process_escape_text_and_are_bounded() {
    for (role, shown) in [
        ("text", "group=\"\\\\u{1b}[2J\\\\u{9b}2J"),
        ("text", "slots=\"\\\\u{1b}[2J\\\\u{9b}2J"),
        ("name", "command=\"прилож\\\\xd0\""),
        ("many", "neap_processes 1\n"),
        ("array", "neap_unread_processes{reason=\"failed\"} 1\n"),
        ("chain", "neap_unread_groups_processes 1\n"),
        ("left", "neap_unread_groups_processes 1\n"),
        ("wide:60", "group=\"(other)\"} "),
        ("asleep", "neap_unread_groups_processes 1\n"),
    ] {
        let ended = Hostile::start(role).run("metrics", &[]);
        assert_eq!(ended.code, Some(i32::from(role == "array")), "{role}: {}", ended.said);
        assert!(ended.text.contains(shown), "{role}: {}", ended.text);
        assert!(ended.text.matches("neap_group_used_bytes{").count() <= 501, "{role}");
    }
}

/// Starts hostile processes until one has the number that a process had.
fn reuse(pid: u32) -> Option<Hostile> {
    for _ in 0..50 {
        std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
        let hostile = Hostile::start("other");
        if hostile.child.id() == pid {
            return Some(hostile);
        }
    }
    None
}

#[test]
fn top_does_not_mix_two_processes_of_one_number() {
    let mut first = Hostile::start("first");
    let pid = first.child.id();
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    neap.args(["top", &pid.to_string(), "--json", "--interval", "3000"]);
    let top = neap.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The first reading is complete once its groups are.
    first.hear("answered");
    first.end();
    let Some(_later) = reuse(pid) else {
        eprintln!("skipped: numbers of processes cannot be chosen here");
        let _ = top.wait_with_output();
        return;
    };
    let ended = top.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success() && said.contains(&format!("process {pid} has ended")), "{said}");
}

/// `neap top` of a process in a terminal, with one reading in a minute.
fn top(pid: u32) -> Terminal {
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    neap.args(["top", &pid.to_string(), "--interval", "60000"]);
    let mut top = Terminal::run(neap, 100, 40);
    top.wait_for("groups", |screen| screen.contains("\n(all) "));
    assert!(top.is_raw());
    top
}

#[test]
fn keys_of_top_change_no_group_of_another_program() {
    let hostile = Hostile::start("program");
    let mut top = top(hostile.child.id());
    // From the CPUs' caches by the zones to the groups, and there to the second.
    top.press("\x1b[Z\x1b[Z\x1b[B\x1b[Bm1\r");
    top.wait_for("answer", |screen| screen.contains("group \"tenant\" is gone"));
    top.press("q");
    assert!(top.end().0.success());
    top.assert_restored();
    assert_eq!(hostile.answered(), 2, "two reports, and no change");
}

#[test]
fn keys_of_top_reach_no_later_process_of_the_number() {
    let mut first = Hostile::start("first");
    let pid = first.child.id();
    let mut top = top(pid);
    first.end();
    let Some(later) = reuse(pid) else {
        eprintln!("skipped: numbers of processes cannot be chosen here");
        return;
    };
    top.press("d");
    top.wait_for("answer", |screen| screen.contains(&format!("process {pid} has ended")));
    top.press("\x1b[Z\x1b[Z\x1b[Bm1\r");
    let bound = |line: &str| line.contains("asked") && line.contains("for max");
    top.wait_for("request", |screen| screen.lines().any(bound) && screen.matches("has ended").count() > 2);
    top.press("q");
    assert!(top.end().0.success());
    top.assert_restored();
    assert_eq!(later.answered(), 0);
}
