//! The page of numbers of a process under neap, found through `/proc` and read while the process
//! runs.
//!
//! The library keeps a memfd named `neap-stat` up to date. It is opened through `/proc/PID/fd`,
//! which the kernel allows the process's own user and root, even if `kernel.yama.ptrace_scope`
//! is 1. If a program has closed the descriptor its mapping is read, which takes the right to trace
//! the process. The process is neither stopped nor signalled. Its page is untrusted: it is checked
//! here, and escaped before it reaches a terminal.
//!
//! The page's format, version 6, is described in the crate `neap`, `stat_page`. It is read by
//! bytes, since the library in a process may be of another version than this command.

use core::time::Duration;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};

/// Version of this command.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Nanoseconds of the clock that pages are dated by.
pub(crate) fn monotonic() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is valid for writing; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The kernel's information about a process.
pub(crate) struct ProcessStatus {
    pub(crate) pid: i32,
    pub(crate) name: String,
    pub(crate) user: String,
    /// The id by which the process knows itself.
    pub(crate) own_id: u32,
    pub(crate) resident_kib: u64,
}

/// A page that a process has published.
pub(crate) struct Page {
    writer: u32,
    pub(crate) published: u64,
    pub(crate) text: Vec<u8>,
    pub(crate) way: &'static str,
    /// The descriptor, if the page was read by one.
    pub(crate) path: Option<PathBuf>,
}

/// The kernel's name of the page among descriptors and mappings.
const LINK: &str = "/memfd:neap-stat (deleted)";

impl ProcessStatus {
    /// Reads the process's files in `/proc`.
    pub(crate) fn look(pid: i32) -> Result<ProcessStatus> {
        let status = match fs::read_to_string(format!("/proc/{pid}/status")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => bail!("there is no process {pid}"),
            status => status.with_context(|| format!("cannot read the status of process {pid}"))?,
        };
        let field = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.map(str::trim).unwrap_or_default()
        };
        if field("State").starts_with(['Z', 'X']) {
            bail!("process {pid} has ended");
        }
        // One id per nested namespace, the innermost last.
        let own_id = field("NStgid").split_whitespace().last().and_then(|id| id.parse().ok());
        Ok(ProcessStatus {
            pid,
            name: field("Name").to_string(),
            user: field("Uid").split_whitespace().next().unwrap_or("?").to_string(),
            own_id: own_id.unwrap_or(pid as u32),
            resident_kib: field("VmRSS").split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0),
        })
    }

    /// Returns the page of this process's manager, by descriptor or mapping.
    pub(crate) fn page(&self) -> Result<Page> {
        self.pages().map(|mut pages| pages.swap_remove(0))
    }

    /// Returns the pages of all managers in it, at least one: a program may have one of its own
    /// beside the preloaded one.
    pub(crate) fn pages(&self) -> Result<Vec<Page>> {
        let (mut own, mut foreign) = (Vec::new(), None);
        for path in self.descriptors()? {
            let page = self.through(&path)?;
            match page {
                Some(page) if page.writer == self.own_id => own.push(Page { path: Some(path), ..page }),
                Some(page) => foreign = Some(page.writer),
                None => {}
            }
        }
        if !own.is_empty() {
            return Ok(own);
        }
        let mut has_library = false;
        if foreign.is_none() {
            let maps = fs::read_to_string(self.path("maps")).map_err(|error| self.refused(error))?;
            has_library =
                maps.lines().any(|line| line.rsplit('/').next().is_some_and(|name| name.starts_with("libneap")));
            if let Some(line) = maps.lines().find(|line| line.ends_with(LINK)) {
                let page = self.through_memory(line)?;
                if page.writer == self.own_id {
                    return Ok(vec![page]);
                }
                foreign = Some(page.writer);
            }
        }
        let pid = self.pid;
        match foreign {
            Some(parent) => bail!(
                "process {pid} was forked by process {parent} without the C library's fork, and publishes no numbers"
            ),
            None if has_library && self.has_stat_off() => {
                bail!("process {pid} runs under neap with NEAP=stat:off, and so publishes no numbers")
            }
            None if has_library => bail!(
                "process {pid} runs under neap and publishes no numbers: it was started with stat:off, has allocated \
                 nothing yet, had threads before it first used neap, or a limit or a sandbox kept neap from making \
                 its page"
            ),
            None if self.has_stat_off() => bail!(
                "process {pid} ({}) has no neap library; if neap is built into it, NEAP=stat:off, with which it was started, \
                 keeps it from publishing numbers",
                self.name.escape_debug()
            ),
            None => bail!(
                "process {pid} ({}) does not run under neap; a program that has neap built in publishes numbers if it \
                 uses neap before it starts threads",
                self.name.escape_debug()
            ),
        }
    }

    fn path(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid))
    }

    /// Explains an error of `/proc`.
    pub(crate) fn refused(&self, error: io::Error) -> anyhow::Error {
        let ProcessStatus { pid, user, .. } = self;
        match error.kind() {
            io::ErrorKind::NotFound => anyhow!("process {pid} has ended"),
            io::ErrorKind::PermissionDenied => {
                anyhow!(
                    "not permitted: the numbers of process {pid} are for its user ({user}), and for root where it may trace processes"
                )
            }
            _ if error.raw_os_error() == Some(libc::ESRCH) => anyhow!("process {pid} has ended"),
            _ => anyhow::Error::new(error).context(format!("cannot look into process {pid}")),
        }
    }

    /// The descriptors that are a page.
    fn descriptors(&self) -> Result<Vec<PathBuf>> {
        let folder = fs::read_dir(self.path("fd")).map_err(|error| self.refused(error))?;
        let paths = folder.flatten().map(|entry| entry.path());
        Ok(paths.filter(|path| fs::read_link(path).is_ok_and(|link| link.as_os_str() == LINK)).collect())
    }

    /// Reads a page by one of the process's descriptors; `None` if the descriptor is closed by now.
    fn through(&self, path: &PathBuf) -> Result<Option<Page>> {
        // The descriptor may be another file by now: opening must neither wait nor acquire a
        // terminal.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(|error| self.refused(error))?,
        };
        let read = |at: u64, bytes: &mut [u8]| file.read_exact_at(bytes, at);
        let page = page(&read, "descriptor").with_context(|| format!("process {}", self.pid))?;
        Ok(Some(page))
    }

    /// Reads a page in the process's mapping, by a line of `maps`.
    fn through_memory(&self, line: &str) -> Result<Page> {
        let start = line.split('-').next().and_then(|start| u64::from_str_radix(start, 16).ok());
        let start = start.with_context(|| format!("not a line of maps: {line}"))?;
        let pid = self.pid;
        let memory = File::open(self.path("mem")).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => anyhow!(
                "process {pid} has closed neap's descriptor, and reading its memory is not permitted (see \
                 kernel.yama.ptrace_scope): run this as root"
            ),
            _ => self.refused(error),
        })?;
        let read = |at: u64, bytes: &mut [u8]| memory.read_exact_at(bytes, start + at);
        page(&read, "memory").with_context(|| format!("process {pid}"))
    }

    /// Whether the process was started with the option that turns the page off.
    fn has_stat_off(&self) -> bool {
        let environment = fs::read(self.path("environ")).unwrap_or_default();
        let options = environment.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(b"NEAP="));
        let mut items = options.unwrap_or_default().split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
        items.rfind(|item| item.starts_with(b"stat:")) == Some(b"stat:off")
    }
}

const MAGIC: &[u8] = b"neapstat";
const FORMAT: u32 = 6;
const HEADER: usize = 32;
/// Offset of requests in the page, and behind them of the text.
pub(crate) const DESK: usize = HEADER;
pub(crate) const DESK_LENGTH: usize = 88;
/// Offset and length of reports.
pub(crate) const REPORT: usize = 64 << 10;
pub(crate) const REPORT_LENGTH: usize = 64 << 10;
/// Most bytes of text of a page.
const MOST: u32 = 1 << 20;
/// Reads of a page that is being written, a millisecond apart; writing takes some microseconds.
const LOOKS: u32 = 200;

/// Reads a page by `read`, repeatedly until one whole object was read.
fn page(read: &dyn Fn(u64, &mut [u8]) -> io::Result<()>, way: &'static str) -> Result<Page> {
    let mut is_unwritten = false;
    for look in 0..LOOKS {
        if look > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (mut before, mut after) = ([0; HEADER], [0; HEADER]);
        read(0, &mut before).context("cannot read the page of numbers")?;
        let word = |at: usize| u32::from_ne_bytes(before[at..at + 4].try_into().unwrap_or_default());
        let (version, sequence, writer, length) = (word(8), word(12), word(16), word(20));
        // Sequence 0 is a page that was not written yet.
        is_unwritten = sequence == 0 && before.starts_with(MAGIC);
        if sequence == 0 || sequence % 2 == 1 {
            continue;
        }
        if &before[..8] != MAGIC {
            bail!("what is called neap-stat is no page of numbers");
        }
        if version != FORMAT {
            bail!("its numbers are of format {version}; this is neap {VERSION}, which reads format {FORMAT}");
        }
        if length > MOST {
            bail!("the page of numbers is damaged: {length} bytes of text");
        }
        let mut text = vec![0; length as usize];
        read((DESK + DESK_LENGTH) as u64, &mut text).context("cannot read the page of numbers")?;
        read(0, &mut after).context("cannot read the page of numbers")?;
        if before == after {
            let published = u64::from_ne_bytes(before[24..].try_into().unwrap_or_default());
            return Ok(Page { writer, published, text, way, path: None });
        }
    }
    if is_unwritten {
        bail!("has not published numbers yet: a forked child does so when it next gives memory back");
    }
    bail!("the page of numbers was being written at every look; is the process stopped?")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use core::cell::Cell;

    /// A process without existence, for reports.
    pub(crate) fn nobody() -> ProcessStatus {
        let (name, user) = ("nobody".to_string(), "0".to_string());
        ProcessStatus { pid: 12, name, user, own_id: 12, resident_kib: 2048 }
    }

    fn bytes(sequence: u32, text: &str) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for word in [FORMAT, sequence, 77, text.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(5_000_000_u64.to_ne_bytes());
        bytes.extend([0; DESK_LENGTH]);
        bytes.extend(text.as_bytes());
        bytes
    }

    /// Reads a page that changes at each read; the last state stays.
    fn read_in_turn(pages: &[Vec<u8>]) -> Result<Page> {
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
        assert_eq!((page.writer, page.published, page.text.as_slice()), (77, 5_000_000, &b"{\"a\":1}"[..]));
    }

    #[test]
    fn a_page_that_changes_between_two_reads_is_read_again() {
        let (old, torn, new) = (bytes(8, "old"), bytes(9, "onw"), bytes(10, "new"));
        for pages in [
            vec![torn.clone(), new.clone()],
            vec![old.clone(), torn.clone(), new.clone()],
            vec![old.clone(), torn.clone(), torn, new.clone()],
            vec![old.clone(), new.clone()],
            vec![old.clone(), old, new],
        ] {
            assert_eq!(read_in_turn(&pages).unwrap().text, b"new");
        }
    }

    #[test]
    fn what_is_no_page_is_refused_with_a_reason() {
        let mut other = bytes(2, "{}");
        other[0] = b'x';
        let mut newer = bytes(2, "{}");
        newer[8] = 7;
        let mut long = bytes(2, "{}");
        long[23] = 1;
        let cases = [
            (other, "is no page"),
            (newer, "format 7"),
            (long, "damaged"),
            (bytes(2, "{}")[..HEADER + DESK_LENGTH + 1].to_vec(), "cannot read"),
            (bytes(3, "{}"), "being written"),
            (vec![0; 64], "being written"),
            (bytes(0, ""), "has not published numbers yet"),
        ];
        for (page, expected) in cases {
            let message = format!("{:#}", read_in_turn(&[page]).err().expect(expected));
            assert!(message.contains(expected), "{message}");
        }
    }
}
