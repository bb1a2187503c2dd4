//! `neap drain`: asks a running process to give what it caches per CPU to its free pages.
//!
//! Sits between the user and a process's page of numbers, in which the request is left and the answer is found; the format
//! is described in the crate `neap`, `requests`. Sleeping threads of the process's are not woken but for neap's own, which is
//! woken by a futex on the page; nothing is signalled or stopped. What comes back from the process may be anything: it is
//! numbers, and printed as such. A request that is not answered in time is taken back.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use core::time::Duration;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::ptr::NonNull;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::published::{DESK, DESK_LENGTH, Page, Process};

const EXAMPLES: &str = "\
Examples:
  neap drain 1234               everything that process 1234 caches for its CPUs, and its barns
  neap drain 1234 --cpu 3       what it caches for CPU 3
  neap drain 1234 --until 64m   only until 64 MiB are free in its zone
  neap drain 1234 --json        the answer as one JSON object

For the process's own user and root. The program works on meanwhile: nothing waits for its threads,
and what one of them holds at the moment is tried again and then counted as skipped. Memory goes
back to the system by neap's next looks. A process without a thread of neap's (`neap stat` says so)
answers from within one of its next calls that allocate or free, which may be never.";

/// Give what a running process caches for its CPUs to its free pages.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// The process
    #[arg(value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// Only the page lists and stacks of this CPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    cpu: Option<u32>,
    /// Only memory of this node
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    node: Option<u32>,
    /// Only until so much is free: bytes, with k, m or g
    #[arg(long, value_name = "SIZE", value_parser = size)]
    until: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// How long an answer may take; a process that is asleep takes some milliseconds.
const LIMIT: Duration = Duration::from_secs(5);

/// A number with k, m or g for powers of 1024.
fn size(text: &str) -> Result<u64, String> {
    let shift = match text.chars().last().map(|last| last.to_ascii_lowercase()) {
        Some('k') => 10,
        Some('m') => 20,
        Some('g') => 30,
        _ => 0,
    };
    let digits = if shift > 0 { &text[..text.len() - 1] } else { text };
    let number = digits.parse::<u64>().map_err(|_| "not a number of bytes".to_string())?;
    let bytes = number.checked_mul(1 << shift).filter(|bytes| *bytes < u64::MAX);
    bytes.ok_or_else(|| "more bytes than there can be".to_string())
}

pub(crate) fn main(options: &Options) -> Result<ExitCode> {
    let process = Process::look(options.pid)?;
    let page = process.page()?;
    let Some(path) = &page.path else {
        bail!("process {} has closed neap's descriptor, by which it is asked", process.pid)
    };
    let desk = Desk::open(path).map_err(|error| process.refused(error))?;
    let started = Instant::now();
    let Some(answer) = desk.ask(options)? else { return Err(unanswered(&process, &page)) };
    match answer.refusal {
        0 => {}
        1 => bail!("process {} knows no CPU {}", process.pid, options.cpu.unwrap_or_default()),
        2 => bail!("process {} has no node {}", process.pid, options.node.unwrap_or_default()),
        other => bail!("process {} refused, for reason {other}", process.pid),
    }
    if options.json {
        println!("{}", answer.json(&process, options, started.elapsed()));
    } else {
        print!("{}", answer.report(&process));
    }
    Ok(ExitCode::SUCCESS)
}

/// Why nobody answered, as far as the process says.
fn unanswered(process: &Process, page: &Page) -> anyhow::Error {
    let numbers: Value = serde_json::from_slice(&page.text).unwrap_or_default();
    let background = numbers["mode"]["background"].as_str().unwrap_or("unknown");
    let pid = process.pid;
    let why = match background {
        "off" => "it has no thread of neap's (background:off, or none could be made)",
        "absent" => "it has no thread of neap's, since it caches too little for one",
        _ => "its thread does not run: the process may be stopped, or its kernel be older than Linux 5.16",
    };
    let calls = if matches!(background, "off" | "absent") {
        ", and none of its own calls has needed more than its CPU's stacks since"
    } else {
        ""
    };
    anyhow::anyhow!(
        "process {pid} has not answered in {} s: {why}{calls}; nothing is left of the request",
        LIMIT.as_secs()
    )
}

/// The part of a page that is for requests, mapped.
struct Desk {
    file: File,
    mapping: NonNull<u8>,
}

/// What a process answered.
#[derive(Debug)]
struct Answer {
    refusal: u32,
    cpus: u32,
    skipped: u32,
    retried: u32,
    page_size: u32,
    pages: u64,
    objects: u64,
    free: u64,
}

const MAPPED: usize = 4096;
const _: () = assert!(DESK + DESK_LENGTH <= MAPPED);

impl Desk {
    /// Maps the page behind a descriptor, if nobody can cut it short.
    fn open(path: &Path) -> io::Result<Desk> {
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        // SAFETY: asks about a descriptor.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 || file.metadata()?.len() < MAPPED as u64 {
            return Err(io::Error::other("what is called neap-stat is not sealed as neap's page is"));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping wherever the kernel likes, of a file that cannot become shorter.
        let memory =
            unsafe { libc::mmap(std::ptr::null_mut(), MAPPED, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Desk { file, mapping })
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the mapping, aligned to 4; everybody changes it by atomic accesses.
        unsafe { self.mapping.add(DESK + offset).cast::<AtomicU32>().as_ref() }
    }

    fn number(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: inside the mapping, aligned to 8; everybody changes it by atomic accesses.
        unsafe { self.mapping.add(DESK + offset).cast::<AtomicU64>().as_ref() }
    }

    /// Asks, and waits for the answer; `None` if there was none in time.
    fn ask(&self, options: &Options) -> Result<Option<Answer>> {
        let end = Instant::now() + LIMIT;
        // SAFETY: a lock on an open file, which ends with it.
        while unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            if Instant::now() >= end {
                bail!("somebody else is asking process {} all the time", options.pid);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let (ticket, answered) = (self.word(0), self.word(24));
        let old = ticket.load(Ordering::Relaxed);
        let mine = old.wrapping_add(1);
        // Not a ticket that is answered already.
        let mine = if answered.load(Ordering::Relaxed) == mine { mine.wrapping_add(1) } else { mine };
        self.word(4).store(options.cpu.unwrap_or(u32::MAX), Ordering::Relaxed);
        self.word(8).store(options.node.unwrap_or(u32::MAX), Ordering::Relaxed);
        self.word(12).store(u32::MAX, Ordering::Relaxed);
        self.number(16).store(options.until.unwrap_or(u64::MAX), Ordering::Relaxed);
        ticket.store(mine, Ordering::Release); // Pairs with the process's Acquire: who sees it sees the rest.
        // SAFETY: the word is mapped; waking touches no memory.
        let woken = unsafe { libc::syscall(libc::SYS_futex, ticket.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
        if woken < 0 {
            return Err(io::Error::last_os_error()).context("futex");
        }
        // Acquire pairs with the process's Release: who sees the ticket sees the answer.
        while answered.load(Ordering::Acquire) != mine {
            if Instant::now() >= end {
                // Whoever takes it up now may still do what it says.
                let _ = ticket.compare_exchange(mine, old, Ordering::Relaxed, Ordering::Relaxed);
                return Ok(None);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let [refusal, cpus, skipped, retried, page_size] =
            [28, 32, 36, 40, 44].map(|offset| self.word(offset).load(Ordering::Relaxed));
        let [pages, objects, free] = [48, 56, 64].map(|offset| self.number(offset).load(Ordering::Relaxed));
        Ok(Some(Answer { refusal, cpus, skipped, retried, page_size, pages, objects, free }))
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        // SAFETY: mapped in `open` with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), MAPPED) };
    }
}

impl Answer {
    fn json(&self, process: &Process, options: &Options, took: Duration) -> Value {
        let bytes = |pages: u64| pages.saturating_mul(self.page_size.into());
        json!({
            "pid": process.pid, "cpu": options.cpu, "node": options.node, "until_bytes": options.until,
            "cpus": self.cpus, "pages": self.pages, "page_bytes": bytes(self.pages), "objects": self.objects,
            "skipped": self.skipped, "retried": self.retried,
            "free_pages": self.free, "free_bytes": bytes(self.free), "took_ms": took.as_millis() as u64,
        })
    }

    fn report(&self, process: &Process) -> String {
        let kib = |pages: u64| pages.saturating_mul(self.page_size.into()) >> 10;
        let skipped = match (self.skipped, self.retried) {
            (0, 0) => String::new(),
            (skipped, retried) => format!("Skipped: {skipped} lists or stacks, after {retried} more tries.\n"),
        };
        format!(
            "Process {} ({}): {} pages ({} KiB) and {} objects of {} CPUs went back; {} pages ({} KiB) are free.\n{skipped}",
            process.pid,
            process.name.escape_debug(),
            self.pages,
            kib(self.pages),
            self.objects,
            self.cpus,
            self.free,
            kib(self.free),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_numbers_with_a_suffix() {
        assert_eq!((size("0"), size("12"), size("3k"), size("1G")), (Ok(0), Ok(12), Ok(3072), Ok(1 << 30)));
        for wrong in ["", "k", "-1", "1x", "1 k", "99999999999g", "18446744073709551615"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_report_says_what_was_skipped_only_where_something_was() {
        let name = "a\u{7}b".to_string();
        let process = Process { pid: 12, name, user: "0".to_string(), own_id: 12, resident_kib: 1 };
        let mut answer = Answer {
            refusal: 0,
            cpus: 2,
            skipped: 0,
            retried: 0,
            page_size: 4096,
            pages: 3,
            objects: 9,
            free: u64::MAX,
        };
        let text = answer.report(&process);
        assert!(text.starts_with("Process 12 (a\\u{7}b): 3 pages (12 KiB) and 9 objects of 2 CPUs"), "{text}");
        assert!(!text.contains("Skipped"), "{text}");
        (answer.skipped, answer.retried) = (1, 8);
        assert!(answer.report(&process).ends_with("Skipped: 1 lists or stacks, after 8 more tries.\n"));
    }
}
