//! The page of numbers of a process under neap, found through `/proc` and read while the process
//! runs.
//!
//! The library keeps a memfd named `neap-stat` up to date. This command opens it through
//! `/proc/PID/fd`. The kernel allows that to the process's own user and root, even if
//! `kernel.yama.ptrace_scope` is 1. If the program has closed the descriptor, this command reads
//! the mapping, for which it needs the right to trace the process. This command neither stops nor
//! signals the process. It does not trust the page: it reads only memfds, each of them once, and
//! escapes their [text](crate::look::foreign).
//!
//! `crates/neap/src/numbers/sheet.rs` describes the page's format, version 7. This module reads it
//! byte by byte, since the library in a process may be of another version than this command.

use core::time::Duration;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use crate::look::allowance::Allowance;
use crate::look::foreign::{escaped, escaped_object};
use crate::look::handle::ProcessHandle;
use crate::look::live::{self, Live, PageLayout, Read};
use crate::look::refusal::LookRefusal;

/// Version of this command.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the time in nanoseconds of the clock that dates pages, `CLOCK_MONOTONIC`.
pub(crate) fn monotonic() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a live local that the call may write. The clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The kernel's information about a process, and the [`Allowance`] for a look at it.
pub(crate) struct ProcessStatus {
    pub(crate) handle: Arc<ProcessHandle>,
    pub(crate) allowance: Allowance,
    pub(crate) pid: i32,
    /// Name of the main thread, escaped.
    pub(crate) name: String,
    pub(crate) user: String,
    /// Id of the process in its own pid namespace.
    pub(crate) own_id: u32,
    pub(crate) resident_kib: u64,
}

/// A page that a process has published.
pub(crate) struct Page {
    writer: u32,
    /// Time at which the process wrote the text. If it has written none, the time of the look.
    pub(crate) published: u64,
    /// Whether the process has written a text. A forked child writes one at its first tick.
    pub(crate) is_written: bool,
    pub(crate) live: Live,
    /// The text, escaped. The [live counters](crate::look::live) replace the numbers of the last
    /// tick.
    pub(crate) object: Map<String, Value>,
    pub(crate) way: &'static str,
    /// The memfd, if this command read the page by a descriptor. It is open for its path only.
    pub(crate) file: Option<File>,
}

impl Page {
    /// Returns the memfd's inode, which differs between two programs; `None` without a memfd.
    pub(crate) fn inode(&self) -> Option<u64> {
        Some(self.file.as_ref()?.metadata().ok()?.ino())
    }

    /// Whether the process has published a text, and it has no value for `key`.
    pub(crate) fn lacks(&self, key: &str) -> bool {
        self.is_written && self.object.get(key).is_none_or(Value::is_null)
    }
}

/// The kernel's name of the page among descriptors and mappings.
const LINK: &str = "/memfd:neap-stat (deleted)";
/// Most pages that this command reads of one process. A manager has one page, and few programs have
/// a second manager.
const MOST_PAGES: usize = 16;

/// Time after its start in which a process may have its parent's descriptor for a moment.
const YOUNG: Duration = Duration::from_millis(500);

/// The pages behind a process's descriptors.
struct PagesSeen {
    own: Vec<Page>,
    foreign: Vec<ForeignPage>,
}

/// A page of another process behind a descriptor.
struct ForeignPage {
    writer: u32,
    inode: u64,
    is_command_s: bool,
}

/// The first mapping of a page, and whether a library of neap is mapped.
#[derive(Default)]
struct Mapped {
    page: Option<PageMapping>,
    has_library: bool,
}

struct PageMapping {
    start: u64,
    inode: u64,
}

impl ProcessStatus {
    /// Reads the process's status from `/proc`.
    pub(crate) fn read(handle: &Arc<ProcessHandle>, allowance: Allowance) -> Result<ProcessStatus> {
        let pid = handle.pid;
        let status = match handle.read("status") {
            Err(error) if is_end(&error) => return Err(LookRefusal::Ended.error(format!("process {pid} has ended"))),
            status => status.with_context(|| format!("cannot read the status of process {pid}"))?,
        };
        let field = |name: &str| {
            let mut lines = status.split(|&byte| byte == b'\n');
            let value = lines.find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b":"));
            value.unwrap_or_default().trim_ascii()
        };
        let words = |name: &str| str::from_utf8(field(name)).unwrap_or_default().split_whitespace();
        if matches!(field("State").first(), Some(b'Z' | b'X')) {
            return Err(LookRefusal::Ended.error(format!("process {pid} has ended")));
        }
        // The line has one id for each nested namespace. The innermost comes last.
        let own_id = words("NStgid").last().and_then(|id| id.parse().ok());
        Ok(ProcessStatus {
            handle: Arc::clone(handle),
            allowance,
            pid,
            name: escaped(field("Name")),
            user: words("Uid").next().unwrap_or("?").to_string(),
            own_id: own_id.unwrap_or(pid as u32),
            resident_kib: words("VmRSS").next().and_then(|kib| kib.parse().ok()).unwrap_or(0),
        })
    }

    /// Returns the first of [`ProcessStatus::pages`].
    pub(crate) fn page(&self) -> Result<Page> {
        self.pages().map(|mut pages| pages.swap_remove(0))
    }

    /// Returns the pages of all managers in the process. A program may have a manager of its own
    /// beside the preloaded one. If there is no page, returns an error that says why.
    pub(crate) fn pages(&self) -> Result<Vec<Page>> {
        let (parent, mapped) = loop {
            let PagesSeen { own, foreign } = self.seen()?;
            if !own.is_empty() {
                return Ok(own);
            }
            let mapped = self.mapped()?;
            if let Some(PageMapping { start, inode }) = mapped.page {
                let writer = match foreign.iter().find(|page| page.inode == inode) {
                    Some(page) => page.writer,
                    None => match self.through_memory(start)? {
                        page if page.writer == self.own_id => return Ok(vec![page]),
                        page => page.writer,
                    },
                };
                return Err(self.shares(writer));
            }
            let parent = foreign.iter().find(|page| !page.is_command_s).map(|page| page.writer);
            // A child of fork has its parent's descriptor until its fork handler has run, or until
            // it executes a program.
            if parent.is_none() || self.allowance.is_over() || !self.handle.is_younger_than(YOUNG) {
                break (parent, mapped);
            }
            std::thread::sleep(PAUSE);
        };
        let pid = self.pid;
        let (refusal, text) = match parent {
            Some(parent) => (
                LookRefusal::NoNumbers,
                format!(
                    "process {pid} was forked by process {parent} without the C library's fork, and publishes no numbers"
                ),
            ),
            None if mapped.has_library && self.has_stat_off() => (
                LookRefusal::NoNumbers,
                format!("process {pid} runs under neap with NEAP=stat:off, and so publishes no numbers"),
            ),
            None if mapped.has_library => (
                LookRefusal::NoNumbers,
                format!(
                    "process {pid} runs under neap and publishes no numbers: it was started with stat:off, has allocated \
                     nothing yet, had threads before it first used neap, or a limit or a sandbox kept neap from making \
                     its page"
                ),
            ),
            None if self.has_stat_off() => (
                LookRefusal::NotNeap,
                format!(
                    "process {pid} ({}) has no neap library; if neap is built into it, NEAP=stat:off, with which it was \
                     started, keeps it from publishing numbers",
                    self.name
                ),
            ),
            None => (
                LookRefusal::NotNeap,
                format!(
                    "process {pid} ({}) does not run under neap; start it by `neap run`, or if neap is built into it, \
                     have it use neap before it starts threads",
                    self.name
                ),
            ),
        };
        Err(refusal.error(text))
    }

    /// Explains an error of `/proc`.
    pub(crate) fn refused(&self, error: io::Error) -> anyhow::Error {
        let ProcessStatus { pid, user, .. } = self;
        match error.kind() {
            _ if is_end(&error) => LookRefusal::Ended.error(format!("process {pid} has ended")),
            io::ErrorKind::PermissionDenied => LookRefusal::NotPermitted.error(format!(
                "not permitted: the numbers of process {pid} are for its user ({user}), and for root where it may trace processes"
            )),
            _ => anyhow::Error::new(error).context(format!("cannot look into process {pid}")),
        }
    }

    /// Returns the error for a process that has mapped the page of another process.
    fn shares(&self, writer: u32) -> anyhow::Error {
        LookRefusal::NotNeap.error(format!(
            "process {} has mapped the numbers of process {writer}: it is a child of vfork that has not executed its \
             program yet, or a neap command that looks at process {writer}",
            self.pid
        ))
    }

    /// Reads the pages behind the process's descriptors.
    fn seen(&self) -> Result<PagesSeen> {
        let mut seen = PagesSeen { own: Vec::new(), foreign: Vec::new() };
        for (file, number) in self.descriptors()? {
            let page = self.through(file)?;
            if page.writer == self.own_id {
                seen.own.push(page);
            } else if let Some(inode) = page.inode() {
                let is_command_s = self.is_command_s(&number);
                seen.foreign.push(ForeignPage { writer: page.writer, inode, is_command_s });
            }
        }
        Ok(seen)
    }

    /// Looks for a library of neap, and for a page, among the process's mappings.
    fn mapped(&self) -> Result<Mapped> {
        let (mut mapped, device) = (Mapped::default(), memfds().map_err(|error| self.refused(error))?);
        let seen = self.handle.each_line("maps", &mut |line| {
            mapped.has_library |= is_library(line);
            if line.ends_with(LINK.as_bytes()) && is_on(line, device) {
                mapped.page = PageMapping::of(line);
            }
            mapped.page.is_none() && !self.allowance.is_over()
        });
        seen.map_err(|error| self.refused(error))?;
        self.allowance.ensure_time().with_context(|| format!("process {}", self.pid))?;
        Ok(mapped)
    }

    /// Whether a descriptor of the process is one by which a neap command reads another process.
    /// Commands open pages by `O_PATH` or `O_NONBLOCK`, and other programs that look at a page open
    /// it for reading. The library's descriptor is for reading and writing, without these flags.
    fn is_command_s(&self, number: &OsStr) -> bool {
        let info = self.handle.read(&format!("fdinfo/{}", number.display())).unwrap_or_default();
        let mut lines = info.split(|&byte| byte == b'\n');
        let flags = lines.find_map(|line| str::from_utf8(line.strip_prefix(b"flags:")?).ok());
        let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
        let of_library = |flags| flags & (libc::O_ACCMODE | libc::O_PATH | libc::O_NONBLOCK) == libc::O_RDWR;
        !flags.is_some_and(of_library)
    }

    /// Returns the memfds with the page's name among the process's descriptors, each once, with the
    /// number of the descriptor.
    fn descriptors(&self) -> Result<Vec<(File, OsString)>> {
        let folder = fs::read_dir(self.handle.path("fd")).map_err(|error| self.refused(error))?;
        let (mut files, mut known) = (Vec::new(), Vec::new());
        let device = memfds().map_err(|error| self.refused(error))?;
        for entry in folder.flatten() {
            let path = entry.path();
            self.allowance.ensure_time().with_context(|| format!("process {}", self.pid))?;
            if !fs::read_link(&path).is_ok_and(|link| link.as_os_str() == LINK) {
                continue;
            }
            // The process may have closed the descriptor meanwhile, or reused its number for
            // another file. Opening a file for its path only neither waits nor acquires a terminal.
            let file = match OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                file => file.map_err(|error| self.refused(error))?,
            };
            let place = place(&file).map_err(|error| self.refused(error))?;
            if place.device == device && !known.contains(&place.inode) {
                ensure!(files.len() < MOST_PAGES, "process {} has more than {MOST_PAGES} pages of numbers", self.pid);
                known.push(place.inode);
                files.push((file, entry.file_name()));
            }
        }
        Ok(files)
    }

    /// Reads a page by its memfd.
    fn through(&self, file: File) -> Result<Page> {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(opened_path(&file));
        let opened = opened.map_err(|error| self.refused(error))?;
        let read = |at: u64, bytes: &mut [u8]| opened.read_exact_at(bytes, at);
        let page = page(&read, "descriptor").with_context(|| format!("process {}", self.pid))?;
        Ok(Page { file: Some(file), ..page })
    }

    /// Reads a page in the process's mapping, which begins at `start`.
    fn through_memory(&self, start: u64) -> Result<Page> {
        let pid = self.pid;
        let memory = File::open(self.handle.path("mem")).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => LookRefusal::NotPermitted.error(format!(
                "process {pid} has closed neap's descriptor, and reading its memory is not permitted (see \
                 kernel.yama.ptrace_scope): run this as root"
            )),
            _ => self.refused(error),
        })?;
        let read = |at: u64, bytes: &mut [u8]| memory.read_exact_at(bytes, start.saturating_add(at));
        page(&read, "memory").with_context(|| format!("process {pid}"))
    }

    /// Whether the process was started with the option that turns the page off.
    fn has_stat_off(&self) -> bool {
        let environment = self.handle.read("environ").unwrap_or_default();
        let options = environment.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(b"NEAP="));
        let mut items = options.unwrap_or_default().split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
        items.rfind(|item| item.starts_with(b"stat:")) == Some(b"stat:off")
    }
}

/// Whether an error of `/proc` says that the process has ended.
fn is_end(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Returns a path by which this command can open `file` once more.
pub(crate) fn opened_path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The device of a file system, and the inode of a file in it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FilePlace {
    device: (u32, u32),
    inode: u64,
}

/// Returns the place of an open file. Does not contact a network file system's server, which may
/// never answer.
fn place(file: &File) -> io::Result<FilePlace> {
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the descriptor is open, and the path is a NUL-terminated literal. All-zero bytes are
    // a valid `statx`, and the call writes only to `status`.
    let (done, status) = unsafe {
        let mut status: libc::statx = core::mem::zeroed();
        (libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_INO, &raw mut status), status)
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(FilePlace { device: (status.stx_dev_major, status.stx_dev_minor), inode: status.stx_ino })
}

/// Returns the device of all memfds. A file on another device may have the name of a page, and its
/// server may let readers wait.
fn memfds() -> io::Result<(u32, u32)> {
    // SAFETY: the name is a NUL-terminated literal.
    let descriptor = unsafe { libc::memfd_create(c"neap".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `memfd_create` has just returned the descriptor, which has no other owner.
    let file = unsafe { File::from_raw_fd(descriptor) };
    Ok(place(&file)?.device)
}

/// Returns whether a line of `maps` shows a mapping of a file on a device.
fn is_on(line: &[u8], (major, minor): (u32, u32)) -> bool {
    let mut words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
    words.nth(3) == Some(format!("{major:02x}:{minor:02x}").as_bytes())
}

/// Returns whether a line of `maps` shows a shared library of neap. Compilers map files of neap's
/// crates, whose names begin in this way, too.
fn is_library(line: &[u8]) -> bool {
    let name = line.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    line.contains(&b'/') && name.starts_with(b"libneap") && name.windows(3).any(|part| part == b".so")
}

impl PageMapping {
    /// Returns the mapping in a line of `maps`.
    fn of(line: &[u8]) -> Option<PageMapping> {
        let line = str::from_utf8(line).ok()?;
        let start = u64::from_str_radix(line.split('-').next()?, 16).ok()?;
        Some(PageMapping { start, inode: line.split_ascii_whitespace().nth(4)?.parse().ok()? })
    }
}

const MAGIC: &[u8] = b"neapstat";
const FORMAT: u32 = 9;
const HEADER: usize = 32;
/// Offset and length of requests and answers in the page. The live counters follow them.
pub(crate) const CHANNEL: usize = HEADER;
pub(crate) const CHANNEL_LENGTH: usize = 88;
const _: () = assert!(CHANNEL + CHANNEL_LENGTH <= live::HEAD);
/// Offset and length of reports.
pub(crate) const REPORT: usize = 256 << 10;
pub(crate) const REPORT_LENGTH: usize = 64 << 10;
/// Most bytes of text of a page.
const MOST: usize = 64 << 10;
/// Most readings of a page while the process writes it, and the time between two readings. The
/// process writes for some microseconds. A test's page does not change with time, so tests do not
/// wait.
const LOOKS: u32 = 200;
const PAUSE: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_millis(1) };

/// The layout, the writer and the text of a page.
struct Sheet {
    layout: PageLayout,
    writer: u32,
    /// Time and bytes of the text. `None` if there is none, or if the process was writing it at
    /// each look.
    text: Option<(u64, Vec<u8>)>,
}

/// Reads a page by `read`: first its text, then the live counters. Reads the text again, at most
/// [`LOOKS`] times, until the process has not changed it meanwhile.
fn page(read: &Read<'_>, way: &'static str) -> Result<Page> {
    let Sheet { layout, writer, text } = sheet(read)?;
    let (published, mut object) = match &text {
        Some((published, text)) => (*published, object(text)?),
        None => (monotonic(), Map::new()),
    };
    let live = Live::read(read, layout)?;
    live.put_into(&mut object);
    Ok(Page { writer, published, is_written: text.is_some(), live, object, way, file: None })
}

fn sheet(read: &Read<'_>) -> Result<Sheet> {
    let mut unwritten = None;
    for look in 0..LOOKS {
        if look > 0 {
            std::thread::sleep(PAUSE);
        }
        let (mut before, mut after) = ([0; HEADER], [0; HEADER]);
        read(0, &mut before).context("cannot read the page of numbers")?;
        let word = |at: usize| u32::from_ne_bytes(before[at..at + 4].try_into().unwrap_or_default());
        let (version, sequence, writer, length) = (word(8), word(12), word(16), word(20) as usize);
        if &before[..8] != MAGIC {
            ensure!(before == [0; HEADER], "the memfd neap-stat is not a page of numbers (bad magic)");
            // The process is still making the page.
            continue;
        }
        ensure!(
            version == FORMAT,
            "its numbers are of format {version}; this is neap {VERSION}, which reads format {FORMAT}; use the neap \
             command of its library"
        );
        let layout = PageLayout::read(read)?;
        unwritten = Some((layout, writer));
        if sequence == 0 {
            break;
        }
        if sequence % 2 == 1 {
            continue;
        }
        ensure!(
            length <= MOST && layout.text_at() + length <= REPORT,
            "the page of numbers is damaged: {length} bytes of text"
        );
        let mut text = vec![0; length];
        read(layout.text_at() as u64, &mut text).context("cannot read the page of numbers")?;
        read(0, &mut after).context("cannot read the page of numbers")?;
        if before == after {
            let published = u64::from_ne_bytes(before[24..].try_into().unwrap_or_default());
            return Ok(Sheet { layout, writer, text: Some((published, text)) });
        }
    }
    // A process may be stopped while it writes the text. Then no look finds a whole text.
    let (layout, writer) = unwritten.context("the page of numbers was being made at every look")?;
    Ok(Sheet { layout, writer, text: None })
}

/// Parses the text of a page, and escapes its keys and strings.
fn object(text: &[u8]) -> Result<Map<String, Value>> {
    match serde_json::from_slice(text) {
        Ok(Value::Object(entries)) => Ok(escaped_object(entries)),
        Ok(_) => bail!("the page of numbers is damaged: its text is not a JSON object"),
        Err(error) => bail!("the page of numbers is damaged: its text is not JSON ({error})"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use core::cell::Cell;

    /// A process that does not exist, for tests of reports.
    pub(crate) fn ended() -> ProcessStatus {
        let (name, user) = ("ended".to_string(), "0".to_string());
        let handle = Arc::new(ProcessHandle::open(std::process::id() as i32).unwrap());
        let allowance = Allowance::new(Duration::from_secs(1000));
        ProcessStatus { handle, allowance, pid: 12, name, user, own_id: 12, resident_kib: 2048 }
    }

    /// A page with a text.
    pub(crate) fn bytes(sequence: u32, text: &(impl AsRef<[u8]> + ?Sized)) -> Vec<u8> {
        let text = text.as_ref();
        let mut bytes = MAGIC.to_vec();
        for word in [FORMAT, sequence, 77, text.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(5_000_000_u64.to_ne_bytes());
        bytes.resize(live::HEAD, 0);
        bytes.extend(live::tests::bytes());
        bytes.extend(text);
        bytes
    }

    /// Reads a page whose state changes at each read. Later reads find the last state.
    pub(crate) fn read_in_turn(pages: &[Vec<u8>]) -> Result<Page> {
        let reads = Cell::new(0);
        let read = |at: u64, to: &mut [u8]| {
            let page = &pages[reads.get().min(pages.len() - 1)];
            reads.set(reads.get() + 1);
            let from = page.get(at as usize..at as usize + to.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            to.copy_from_slice(from);
            Ok(())
        };
        page(&read, "test")
    }

    #[test]
    fn a_page_that_rests_is_read() {
        let page = read_in_turn(&[bytes(8, "{\"a\":1}")]).unwrap();
        assert_eq!((page.writer, page.published, &page.object["a"]), (77, 5_000_000, &1.into()));
    }

    #[test]
    fn a_page_that_changes_between_two_reads_is_read_again() {
        let (old, torn, new) = (bytes(8, "{\"a\":1}"), bytes(9, "{\"b\":1}"), bytes(10, "{\"a\":2}"));
        for pages in [
            vec![torn.clone(), new.clone()],
            vec![old.clone(), torn.clone(), new.clone()],
            vec![old.clone(), torn.clone(), torn, new.clone()],
            vec![old.clone(), new.clone()],
            vec![old.clone(), old, new],
        ] {
            assert_eq!(read_in_turn(&pages).unwrap().object["a"], 2);
        }
    }

    #[test]
    fn live_counters_are_read_without_a_text() {
        for page in [bytes(0, ""), bytes(3, "{}")] {
            let page = read_in_turn(&[page]).unwrap();
            assert!(!page.is_written && !page.lacks("groups"));
            assert!(page.object["bytes"]["used"].as_u64().unwrap() > 0);
        }
        assert!(read_in_turn(&[bytes(2, "{}")]).unwrap().lacks("groups"));
    }

    #[test]
    fn what_is_no_page_is_refused_with_a_reason() {
        let mut other = bytes(2, "{}");
        other[0] = b'x';
        let mut newer = bytes(2, "{}");
        newer[8] = FORMAT as u8 + 1;
        let mut long = bytes(2, "{}");
        long[23] = 1;
        let cases = [
            (other, "not a page"),
            (newer, "its numbers are of format "),
            (long, "damaged"),
            (bytes(2, "[]"), "is not a JSON object"),
            (bytes(2, "7"), "is not a JSON object"),
            (bytes(2, "{\"a\":\"\u{1b}\"}"), "is not JSON"),
            (bytes(2, &"[".repeat(10_000)), "is not JSON"),
            (bytes(2, "{}")[..HEADER + CHANNEL_LENGTH + 1].to_vec(), "cannot read"),
            (vec![0; 64], "being made"),
        ];
        for (page, expected) in cases {
            let message = format!("{:#}", read_in_turn(&[page]).err().expect(expected));
            assert!(message.contains(expected), "{message}");
        }
    }
}
