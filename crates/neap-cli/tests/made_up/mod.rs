//! A process that made a page up, and commands on it.
//!
//! Method: the test executable runs itself in a role that publishes the page. Where bytes are
//! bounded, the kernel's figure of the command's largest resident memory is compared. Where time
//! is, the process counts the requests that reach it.

#![allow(dead_code, reason = "not every test file uses every piece")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

pub(crate) const ROLE: &str = "NEAP_TEST_ROLE";

/// Bytes that a command may have resident.
pub(crate) const MOST: i64 = 64 << 20;

/// Offsets in the page, as in the crate `neap`, `sheet`, `live` and `requests`.
pub(crate) const CHANNEL: u64 = 32;
pub(crate) const HEAD: u64 = 128;
/// Behind the head, a node's counters and a class's.
pub(crate) const TEXT: u64 = HEAD + 64 + 128 + 32 + 32;
pub(crate) const REPORT: u64 = 256 << 10;
pub(crate) const LENGTH: u64 = 320 << 10;
pub(crate) const WORDS: usize = 8192;

/// No further report.
pub(crate) const END: u64 = u64::MAX;

/// Numbers that let a command ask for everything.
pub(crate) const NUMBERS: &str = r#"{"groups":{"live":1},"per_cpu":{"used":1,"free":1},"mode":{"background":"awake","interval_ms":250,"page_size":4096}}"#;

/// Text with everything that a terminal or a reader would misread, beside text of two scripts.
pub(crate) const HOSTILE: &str = "\u{1b}[2J\u{9b}2J\u{7f}\u{202e}x\u{2066}\u{2028}\u{2029}\u{200b}\u{e0041}приём'\"漢";

/// A made-up page.
pub(crate) struct Page(pub(crate) File);

impl Page {
    pub(crate) fn publish(text: &str) -> Page {
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
        for word in [9, 2, std::process::id(), text.len() as u32] {
            head.extend(word.to_ne_bytes());
        }
        file.write_all_at(&head, 0).unwrap();
        let head: Vec<u8> = [4096_u32, 1, 1].iter().flat_map(|word| word.to_ne_bytes()).collect();
        file.write_all_at(&head, HEAD).unwrap();
        file.write_all_at(text.as_bytes(), TEXT).unwrap();
        Page(file)
    }

    pub(crate) fn word(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.0.read_exact_at(&mut bytes, CHANNEL + offset).unwrap();
        u32::from_ne_bytes(bytes)
    }

    /// Answers every request by what `answer` makes of its kind and start: a refusal, and a report.
    pub(crate) fn serve(&self, mut answer: impl FnMut(u32, u32) -> (u32, Vec<u64>)) -> ! {
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

pub(crate) fn say(text: &str) {
    // Not by `print!`, which libtest captures or delays.
    std::io::stdout().write_all(format!("\n{text}\n").as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

/// A name in a report: its length, and seven words.
pub(crate) fn name(text: &[u8]) -> Vec<u64> {
    let mut padded = text[..text.len().min(56)].to_vec();
    padded.resize(56, 0);
    let words = padded.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
    [text.len() as u64].into_iter().chain(words).collect()
}

pub(crate) fn group(id: u64, parent: u64, called: &[u8]) -> Vec<u64> {
    let mut words = vec![id, parent, 1 << 20, 1 << 20, 0, END, END, 0, 0];
    words.extend([0; 4 + 20]);
    words.extend(name(called));
    words
}

/// A report of groups; `next` is the next slot to request.
pub(crate) fn groups(next: u64, all: &[Vec<u64>]) -> Vec<u64> {
    let mut words = vec![1, all.len() as u64, next, 0, all.len() as u64, 0, 9, 9, 0, 0];
    words.extend(all.iter().flatten());
    words
}

/// A hostile process; it ends with the test.
pub(crate) struct Hostile {
    pub(crate) child: Child,
    pub(crate) output: BufReader<std::process::ChildStdout>,
}

impl Hostile {
    pub(crate) fn start(role: &str) -> Hostile {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "hostile", "--ignored", "--nocapture", "--test-threads=1"]).env(ROLE, role);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut hostile = Hostile { child, output };
        hostile.hear("ready");
        hostile
    }

    /// Waits for a line.
    pub(crate) fn hear(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim() != word {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the process ended before it said {word}");
        }
    }

    /// Ends the process. Returns the number of requests that it answered.
    pub(crate) fn answered(mut self) -> usize {
        self.end();
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        rest.matches("answered").count()
    }

    pub(crate) fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Runs a command on the process.
    pub(crate) fn run(&self, command: &str, more: &[&str]) -> Ended {
        self.run_to(Stdio::piped(), command, more)
    }

    /// Runs a command on the process, with its output to a pipe or elsewhere.
    #[allow(clippy::zombie_processes, reason = "`wait4` waits for the child, and tells its memory")]
    pub(crate) fn run_to(&self, output: Stdio, command: &str, more: &[&str]) -> Ended {
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
            assert_eq!(text.chars().find(steers), None, "{command} {more:?}: {text}");
        }
        ended
    }

    /// Runs a command that is to succeed, without its output.
    pub(crate) fn shows(&self, more: &[&str]) {
        let ended = self.run_to(Stdio::null(), "stat", more);
        assert_eq!(ended.code, Some(0), "{more:?}: {}", ended.said);
    }

    /// Runs a command that is to fail, and checks its message.
    pub(crate) fn refuses(&self, command: &str, more: &[&str], message: &str) {
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
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) text: String,
    pub(crate) said: String,
}

/// Whether a character steers a terminal, or hides from a reader.
pub(crate) fn steers(letter: &char) -> bool {
    letter.is_control() && *letter != '\n' || "\u{202e}\u{2066}\u{2028}\u{2029}\u{200b}\u{e0041}".contains(*letter)
}
