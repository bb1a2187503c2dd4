//! Asking a process under neap: the part of its page of numbers that is for requests, and the part
//! for reports.
//!
//! Sits between the commands that want something of a process and its page, in which the request is
//! left and the answer is found; the format is described in the crate `neap`, `requests`. Askers
//! exclude each other by a lock on the file, from the first request to the end of the value.
//! Sleeping threads of the process's are not woken but for neap's own, which is woken by a futex on
//! the page; nothing is signalled, nor stopped but for some milliseconds by `--reconcile` where
//! there are groups and little memory in slabs. A request that is not answered in time is taken
//! back.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use core::time::Duration;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use crate::published::{DESK, DESK_LENGTH, Page, Process, REPORT, REPORT_LENGTH};

/// Wanted: that caches go to the free pages.
pub(crate) const DRAIN: u32 = 0;
/// Wanted: a report on chunks of per-CPU data.
pub(crate) const CHUNKS: u32 = 1;
/// Wanted: a report on memory groups.
pub(crate) const GROUPS: u32 = 2;
/// Wanted: that a bound of a group changes.
pub(crate) const BOUND: u32 = 3;
/// Wanted: a report on shrinkers.
pub(crate) const SHRINKERS: u32 = 4;
/// Wanted: that a shrinker looks at some objects, or says how many it has.
pub(crate) const SHRINK: u32 = 5;
/// Wanted: what neap has mapped, what its pages are and what it believes.
pub(crate) const MAP: u32 = 7;
/// Refused because the group is gone.
pub(crate) const NO_SUCH_GROUP: u32 = 6;
/// Refused because callbacks need a thread of neap's, and there is none.
pub(crate) const NO_RECLAIMER: u32 = 8;
/// Refused because the page was being written just then.
const BUSY: u32 = 5;

/// How long an answer may take; a process that is asleep takes some milliseconds.
const LIMIT: Duration = Duration::from_secs(5);
/// The same where there is another way.
const HASTE: Duration = Duration::from_secs(1);

/// What is wanted; what is left out says nothing.
#[derive(Default)]
pub(crate) struct Request {
    pub(crate) what: u32,
    pub(crate) cpu: Option<u32>,
    pub(crate) node: Option<u32>,
    /// Bytes.
    pub(crate) until: Option<u64>,
    /// The number of a chunk, a group's slot, a piece of the arena, or a bound.
    pub(crate) from: u32,
    /// A group's id.
    pub(crate) group: u64,
}

/// A name in a report. Neap's own have no control characters; those of a process that pretends do
/// no harm to a terminal.
pub(crate) fn name_of(bytes: &[u8]) -> String {
    let name = String::from_utf8_lossy(bytes);
    name.chars().map(|character| if character.is_control() { char::REPLACEMENT_CHARACTER } else { character }).collect()
}

/// The part of a page that is for requests, mapped.
pub(crate) struct Desk<'a> {
    process: &'a Process,
    page: &'a Page,
    file: File,
    mapping: NonNull<u8>,
    patience: Duration,
}

const MAPPED: usize = 4096;
const _: () = assert!(DESK + DESK_LENGTH <= MAPPED);

impl<'a> Desk<'a> {
    /// The desk in a process's page.
    pub(crate) fn of(process: &'a Process, page: &'a Page) -> Result<Desk<'a>> {
        let Some(path) = &page.path else {
            bail!("process {} has closed neap's descriptor, by which it is asked", process.pid)
        };
        let (file, mapping) = map(path).map_err(|error| process.refused(error))?;
        Ok(Desk { process, page, file, mapping, patience: LIMIT })
    }

    /// The same for who can do without an answer.
    pub(crate) fn in_haste(mut self) -> Desk<'a> {
        self.patience = HASTE;
        self
    }

    fn word_at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the mapping, aligned to 4; everybody changes it by atomic accesses.
        unsafe { self.mapping.add(DESK + offset).cast::<AtomicU32>().as_ref() }
    }

    fn number_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: inside the mapping, aligned to 8; everybody changes it by atomic accesses.
        unsafe { self.mapping.add(DESK + offset).cast::<AtomicU64>().as_ref() }
    }

    /// A word of the answer.
    pub(crate) fn word(&self, offset: usize) -> u32 {
        self.word_at(offset).load(Ordering::Relaxed)
    }

    /// A number of the answer.
    pub(crate) fn number(&self, offset: usize) -> u64 {
        self.number_at(offset).load(Ordering::Relaxed)
    }

    /// Asks, and waits for the answer: 0, or why it was refused.
    pub(crate) fn ask(&self, request: &Request) -> Result<u32> {
        let end = Instant::now() + self.patience;
        // SAFETY: a lock on an open file, which ends with it.
        while unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            if Instant::now() >= end {
                bail!("somebody else is asking process {} all the time", self.process.pid);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if matches!(request.what, CHUNKS | GROUPS | SHRINKERS | MAP) {
            self.provide()?;
        }
        loop {
            match self.ask_once(request, end)? {
                BUSY if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
                answer => return Ok(answer),
            }
        }
    }

    fn ask_once(&self, request: &Request, end: Instant) -> Result<u32> {
        let (ticket, answered) = (self.word_at(0), self.word_at(24));
        let old = ticket.load(Ordering::Relaxed);
        let mine = old.wrapping_add(1);
        // Not a ticket that is answered already.
        let mine = if answered.load(Ordering::Relaxed) == mine { mine.wrapping_add(1) } else { mine };
        self.word_at(4).store(request.cpu.unwrap_or(u32::MAX), Ordering::Relaxed);
        self.word_at(8).store(request.node.unwrap_or(u32::MAX), Ordering::Relaxed);
        self.word_at(12).store(u32::MAX, Ordering::Relaxed);
        self.number_at(16).store(request.until.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.word_at(72).store(request.what, Ordering::Relaxed);
        self.word_at(76).store(request.from, Ordering::Relaxed);
        self.number_at(80).store(request.group, Ordering::Relaxed);
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
                return Err(self.unanswered());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(self.word(28))
    }

    /// The report that a request was answered by, in words.
    pub(crate) fn report(&self) -> Result<Vec<u64>> {
        let mut bytes = vec![0; REPORT_LENGTH];
        self.file.read_exact_at(&mut bytes, REPORT as u64).context("cannot read the report")?;
        Ok(bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect())
    }

    /// Asks for reports until all has been told: `read` is told the words of each, and answers
    /// where the next one is to begin, if there is one; `None` where there is nothing to report.
    /// Answers whether there was something.
    pub(crate) fn reports(
        &self,
        what: u32,
        mut read: impl FnMut(&[u64]) -> Result<Option<Option<u32>>>,
    ) -> Result<bool> {
        let (pid, mut from) = (self.process.pid, 0);
        let is_there = loop {
            match self.ask(&Request { what, from, ..Request::default() })? {
                0 => {}
                other => bail!("process {pid} refused, for reason {other}"),
            }
            let next = read(&self.report()?).with_context(|| format!("the report of process {pid} is damaged"))?;
            match next {
                None => break false,
                Some(None) => break true,
                Some(Some(next)) if next > from => from = next,
                Some(Some(_)) => bail!("process {pid} has more than a report can hold"),
            }
        };
        self.forget_reports();
        Ok(is_there)
    }

    /// Allocates the memory of a report, so that the process does not meet a page that the system
    /// refuses.
    fn provide(&self) -> Result<()> {
        loop {
            // SAFETY: changes a file, which keeps its bytes.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, REPORT as i64, REPORT_LENGTH as i64) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error).context("no memory for a report");
            }
        }
    }

    /// Gives the memory of reports back to the system.
    fn forget_reports(&self) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: changes a file; in it, what nobody reads any more. Where it is refused some pages
        // stay.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, REPORT as i64, REPORT_LENGTH as i64) };
    }

    /// Why nobody answered, as far as the process says.
    fn unanswered(&self) -> anyhow::Error {
        let numbers: Value = serde_json::from_slice(&self.page.text).unwrap_or_default();
        let background = numbers["mode"]["background"].as_str().unwrap_or("unknown");
        let pid = self.process.pid;
        let why = match background {
            "off" => "it has no thread of neap's (background:off, or none could be made)",
            "absent" => "it has no thread of neap's, as processes with one thread (see background:on)",
            _ => "its thread does not run: the process may be stopped, or its kernel be older than Linux 5.16",
        };
        let calls = if matches!(background, "off" | "absent") {
            ", and none of its own calls has needed more than its CPU's stacks since"
        } else {
            ""
        };
        anyhow!(
            "process {pid} has not answered in {} s: {why}{calls}; nothing is left of the request",
            self.patience.as_secs()
        )
    }
}

/// Maps the page behind a descriptor, if nobody can cut it short.
fn map(path: &Path) -> io::Result<(File, NonNull<u8>)> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    // SAFETY: asks about a descriptor.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 || file.metadata()?.len() < MAPPED as u64 {
        return Err(io::Error::other("what is called neap-stat is not sealed as neap's page is"));
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping wherever the kernel likes, of a file that cannot become shorter.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), MAPPED, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mapping = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    Ok((file, mapping))
}

impl Drop for Desk<'_> {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), MAPPED) };
    }
}
