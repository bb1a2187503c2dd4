//! Sends requests to a process under neap, and reads its answers and reports, through its page of
//! numbers.
//!
//! `crates/neap/src/control/mod.rs` describes the format. A command locks the page's file from its
//! first request until it drops the [`ControlChannel`]. The lock excludes other commands. A request
//! wakes neap's thread by a futex in the page. It neither wakes nor signals other threads of the
//! process. Only `--reconcile` stops them, for some milliseconds, if there are groups and at most
//! 64 MiB in slabs.
//!
//! This command withdraws a request that the process does not answer in time. It withdraws a
//! request earlier if the process [cannot answer](crate::look::silence). All requests of a command
//! share the time of its [allowance](crate::look::allowance).

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::ptr::NonNull;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};

use crate::look::foreign::escaped;
use crate::look::silence::{Silence, Vigil};
use crate::look::stat_reader::{CHANNEL, CHANNEL_LENGTH, Page, ProcessStatus, REPORT, REPORT_LENGTH, opened_path};

/// Request: drain caches.
pub(crate) const DRAIN: u32 = 0;
/// Request: a report on chunks of per-CPU data.
pub(crate) const CHUNKS: u32 = 1;
/// Request: a report on memory groups.
pub(crate) const GROUPS: u32 = 2;
/// Request: set a bound of a group.
pub(crate) const BOUND: u32 = 3;
/// Request: a report on shrinkers.
pub(crate) const SHRINKERS: u32 = 4;
/// Request: have a shrinker scan some objects, or count them.
pub(crate) const SHRINK: u32 = 5;
/// Request: a report on neap's mappings, pages and counters.
pub(crate) const MAP: u32 = 7;
/// Request: change an option.
pub(crate) const SET: u32 = 8;
/// Refusal: the process does not know this kind of request.
pub(crate) const UNKNOWN: u32 = 4;
/// Refusal: the group does not exist.
pub(crate) const NO_SUCH_GROUP: u32 = 6;
/// Refusal: the process cannot have this value of an option.
pub(crate) const NO_SUCH_VALUE: u32 = 9;
/// Refusal: the callbacks need a thread of neap's, and the process has none.
pub(crate) const NO_RECLAIMER: u32 = 8;
/// Refusal: the process is writing its numbers, or a call of the program cannot serve the request.
const BUSY: u32 = 5;

/// Number of looks for an answer after which the command checks that the process can answer.
const LOOKS: u32 = 64;
/// Longest wait for an answer, for a caller that can go on without one.
const A_MOMENT: Duration = Duration::from_secs(1);

/// How long a command waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Haste {
    /// As long as its allowance allows.
    Unhurried,
    /// [`A_MOMENT`] at most.
    Hurried,
}

/// A wait for a process without neap's thread, whose next slow call answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LongWait<'a> {
    pub(crate) time: Duration,
    /// Ends the wait when it is set.
    pub(crate) stop: &'a AtomicBool,
}

/// A request. A field that a request does not use has its default.
#[derive(Default)]
pub(crate) struct ChannelRequest {
    pub(crate) what: u32,
    pub(crate) cpu: Option<u32>,
    pub(crate) node: Option<u32>,
    /// Bytes, a number of objects, or the value of an option.
    pub(crate) until: Option<u64>,
    /// The number of a chunk, a group's slot, a piece of the arena, a shrinker, a bound, or an
    /// option.
    pub(crate) from: u32,
    /// A group's id.
    pub(crate) group: u64,
}

/// Returns a name in a report, escaped. The first `length` bytes of `words` are the name. neap's
/// names have no control characters and no slash, but another program may have written the report.
pub(crate) fn name_of(length: u64, words: &[u64]) -> String {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).take(length).collect();
    escaped(&bytes).replace('/', "\\u{2f}")
}

/// The error of a request to a process without neap's thread whose own threads sleep.
#[derive(Debug)]
pub(crate) struct Asleep(i32);

impl fmt::Display for Asleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "process {} has not answered: it has no thread of neap's (NEAP=background:on gives it one), and its own \
             threads sleep; the request is withdrawn",
            self.0
        )
    }
}

impl core::error::Error for Asleep {}

/// The mapped part of a page that holds requests and answers.
pub(crate) struct ControlChannel<'a> {
    process: &'a ProcessStatus,
    page: &'a Page,
    file: File,
    mapping: NonNull<u8>,
    /// Longest wait for one answer, if it is not the rest of the allowance.
    patience: Option<Duration>,
    /// Ends a [`LongWait`], which this channel then makes for each answer.
    stop: Option<&'a AtomicBool>,
}

const MAPPED: usize = 4096;
const _: () = assert!(CHANNEL + CHANNEL_LENGTH <= MAPPED);

impl<'a> ControlChannel<'a> {
    /// Opens and maps the channel in a process's page.
    pub(crate) fn of(process: &'a ProcessStatus, page: &'a Page) -> Result<ControlChannel<'a>> {
        let Some(file) = &page.file else {
            bail!("process {} has closed neap's descriptor, so no command can send it requests", process.pid)
        };
        let (file, mapping) = map(file).map_err(|error| process.refused(error))?;
        Ok(ControlChannel { process, page, file, mapping, patience: None, stop: None })
    }

    /// Limits the wait for each answer to [`A_MOMENT`] for callers in haste.
    pub(crate) fn with_haste(mut self, haste: Haste) -> ControlChannel<'a> {
        self.patience = (haste == Haste::Hurried).then_some(A_MOMENT);
        self
    }

    /// Waits for each answer beyond the allowance, also while the process's threads sleep. After
    /// [`A_MOMENT`], says so on standard error.
    pub(crate) fn with_wait(mut self, wait: LongWait<'a>) -> ControlChannel<'a> {
        self.patience = Some(wait.time);
        self.stop = Some(wait.stop);
        self
    }

    pub(crate) fn pid(&self) -> i32 {
        self.process.pid
    }

    fn word_at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: callers pass aligned offsets inside the channel. The mapping lasts as long as
        // `self`, and its file cannot shrink. Both processes access the word only by atomics.
        unsafe { self.mapping.add(CHANNEL + offset).cast::<AtomicU32>().as_ref() }
    }

    fn number_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: callers pass aligned offsets inside the channel. The mapping lasts as long as
        // `self`, and its file cannot shrink. Both processes access the number only by atomics.
        unsafe { self.mapping.add(CHANNEL + offset).cast::<AtomicU64>().as_ref() }
    }

    /// A word of the answer.
    pub(crate) fn word(&self, offset: usize) -> u32 {
        self.word_at(offset).load(Ordering::Relaxed)
    }

    /// A number of the answer.
    pub(crate) fn number(&self, offset: usize) -> u64 {
        self.number_at(offset).load(Ordering::Relaxed)
    }

    /// Makes a request, and repeats it while the process is [`BUSY`]. Returns 0, or a refusal.
    pub(crate) fn ask(&self, request: &ChannelRequest) -> Result<u32> {
        let (pid, allowance) = (self.process.pid, &self.process.allowance);
        allowance.ensure_time().with_context(|| format!("process {pid}"))?;
        let patience = self.patience.map_or(allowance.end(), |patience| Instant::now() + patience);
        let (soon, is_long) = (allowance.end().min(patience), self.stop.is_some());
        let end = if is_long { patience } else { soon };
        // SAFETY: the descriptor is open. The lock ends with the open file.
        while unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            if Instant::now() >= soon {
                bail!("another command keeps the page of process {pid} locked; end that command and ask again");
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

    fn ask_once(&self, request: &ChannelRequest, end: Instant) -> Result<u32> {
        let (ticket, answered) = (self.word_at(0), self.word_at(24));
        let old = ticket.load(Ordering::Relaxed);
        let mine = old.wrapping_add(1);
        // A ticket that equals `answered` counts as answered already, so this request skips it.
        let mine = if answered.load(Ordering::Relaxed) == mine { mine.wrapping_add(1) } else { mine };
        self.word_at(4).store(request.cpu.unwrap_or(u32::MAX), Ordering::Relaxed);
        self.word_at(8).store(request.node.unwrap_or(u32::MAX), Ordering::Relaxed);
        self.word_at(12).store(u32::MAX, Ordering::Relaxed);
        self.number_at(16).store(request.until.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.word_at(72).store(request.what, Ordering::Relaxed);
        self.word_at(76).store(request.from, Ordering::Relaxed);
        self.number_at(80).store(request.group, Ordering::Relaxed);
        ticket.store(mine, Ordering::Release); // Pairs with the process's Acquire: it publishes the request.
        // SAFETY: the word lies in the mapping, which outlives the call. A wake reads and writes no
        // memory.
        let woken = unsafe { libc::syscall(libc::SYS_futex, ticket.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
        if woken < 0 {
            return Err(io::Error::last_os_error()).context("futex");
        }
        let (mut looks, mut vigil, mut silence) = (0_u32, Vigil::begin(&self.process.handle), None);
        // Relaxed: the flag publishes no other data.
        let is_stopped = || self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
        let mut notice = self.stop.map(|_| Instant::now() + A_MOMENT);
        // Acquire pairs with the Release in neap's `control/channel.rs`, which publishes the
        // answer.
        while answered.load(Ordering::Acquire) != mine {
            looks = looks.wrapping_add(1);
            let is_time = looks.is_multiple_of(LOOKS);
            let has_ended = is_time && self.process.handle.has_ended();
            silence = if is_time { vigil.look() } else { silence };
            // A long wait lasts until a sleeping thread makes a call.
            silence = silence.filter(|why| self.stop.is_none() || *why == Silence::Stopped);
            if notice.is_some_and(|at| Instant::now() >= at) {
                notice = None;
                let rest = end.saturating_duration_since(Instant::now()).as_secs_f64().ceil();
                eprintln!("neap: process {} has not answered yet: {}; waiting up to {rest} s", self.pid(), self.why());
            }
            if has_ended || silence.is_some() || is_stopped() || Instant::now() >= end {
                // The process may have begun the request at this moment. Then it still executes it.
                let _ = ticket.compare_exchange(mine, old, Ordering::Relaxed, Ordering::Relaxed);
                let pid = self.process.pid;
                return Err(match silence {
                    _ if has_ended => anyhow!("process {pid} has ended"),
                    Some(Silence::Stopped) => anyhow!(
                        "process {pid} has not answered: it is stopped, by a signal or a debugger, and has to go on \
                         first; the request is withdrawn"
                    ),
                    Some(Silence::Asleep) => Asleep(pid).into(),
                    None if is_stopped() => {
                        anyhow!("a signal has ended the wait for an answer of process {pid}; the request is withdrawn")
                    }
                    None => self.unanswered(),
                });
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(self.word(28))
    }

    /// Returns the words of the report that answered a request.
    pub(crate) fn report(&self) -> Result<Vec<u64>> {
        let mut bytes = vec![0; REPORT_LENGTH];
        self.file.read_exact_at(&mut bytes, REPORT as u64).context("cannot read the report")?;
        Ok(bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect())
    }

    /// Requests reports until there are no more, and passes the words of each to `read`. `read`
    /// returns `None` if the process has nothing to report. Otherwise it returns the start of the
    /// next report, if there is one. Returns whether the process had something to report.
    pub(crate) fn reports(
        &self,
        what: u32,
        mut read: impl FnMut(&[u64]) -> Result<Option<Option<u32>>>,
    ) -> Result<bool> {
        let (pid, mut from) = (self.process.pid, 0);
        let is_there = loop {
            let asked = self.ask(&ChannelRequest { what, from, ..ChannelRequest::default() });
            if asked.is_err() && from > 0 {
                // The process has answered an earlier request, so its thread runs. If the time is
                // used up, the error says so.
                self.process.allowance.ensure_time().with_context(|| format!("process {pid}"))?;
            }
            match asked? {
                0 => {}
                other => bail!("process {pid} refused the request (status {other})"),
            }
            let next = read(&self.report()?).with_context(|| format!("cannot read the report of process {pid}"))?;
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

    /// Allocates the memory of a report in the file, so that the process never writes to a page
    /// that the system refuses.
    fn provide(&self) -> Result<()> {
        loop {
            // SAFETY: the call touches no memory of this process. The file keeps its bytes.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, REPORT as i64, REPORT_LENGTH as i64) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error)
                    .with_context(|| format!("cannot allocate the report of process {}", self.process.pid));
            }
        }
    }

    /// Frees the memory of reports.
    fn forget_reports(&self) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the call touches no memory of this process. It changes only a part of the file
        // that no process reads any more. If the kernel refuses the call, some pages stay.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, REPORT as i64, REPORT_LENGTH as i64) };
    }

    /// Explains by the process's own numbers why it has not answered.
    fn why(&self) -> String {
        let mode = self.page.object.get("mode");
        let background = mode.and_then(|mode| mode["background"].as_str()).unwrap_or("unknown");
        let why = match background {
            "off" => "it has no thread of neap's (background:off, or none could be made)",
            "absent" => "it has no thread of neap's, as it has one thread only (NEAP=background:on gives it one)",
            _ => "neap's thread in it does not run; the process may be stopped, or the kernel older than Linux 5.16",
        };
        let calls = if matches!(background, "off" | "absent") {
            ", and since the request its own threads have made no call that could answer"
        } else {
            ""
        };
        format!("{why}{calls}")
    }

    fn unanswered(&self) -> anyhow::Error {
        let patience = self.patience.map_or(self.process.allowance.seconds(), |patience| patience.as_secs());
        let (pid, why) = (self.process.pid, self.why());
        anyhow!("process {pid} has not answered in {patience} s: {why}; the request is withdrawn")
    }
}

/// Opens a page for writing, and maps it. Fails if the file is not sealed against shrinking.
fn map(page: &File) -> io::Result<(File, NonNull<u8>)> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(opened_path(page))?;
    // SAFETY: the call reads the seals of an open descriptor, and touches no memory.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 || file.metadata()?.len() < MAPPED as u64 {
        return Err(io::Error::other("the memfd neap-stat is not sealed as neap's page is"));
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the kernel chooses the address, so the mapping replaces no other. The file has at
    // least `MAPPED` bytes and cannot shrink.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), MAPPED, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mapping = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    Ok((file, mapping))
}

impl Drop for ControlChannel<'_> {
    fn drop(&mut self) {
        // SAFETY: `map` has made the mapping with this length. References into it borrow `self`, so
        // none is left.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), MAPPED) };
    }
}
