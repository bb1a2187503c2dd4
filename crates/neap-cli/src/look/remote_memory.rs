//! The memory of a process under neap, read from outside.
//!
//! The text of a page says where the numbers of groups, of per-CPU data and of caches lie. So a
//! command reads them also where no thread of the process answers or ticks: the process is stopped,
//! or has no thread of neap's and sleeps. The kernel allows it to the process's user and to root,
//! but not to other processes of the user where `kernel.yama.ptrace_scope` is 1. Reading stops no
//! thread.
//!
//! A hostile process can make a page that takes for ever to read. So a thread of this command
//! reads, and the command waits for it no longer than its [allowance](crate::look::allowance). The
//! thread reads by `process_vm_readv`, whose waits end with the command, unlike those of
//! `/proc/PID/mem`. At most [`READERS_MAX`] such threads exist.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Map, Value};

use crate::look::allowance::Allowance;
use crate::look::control_channel::Haste;
use crate::look::handle::ProcessHandle;
use crate::look::silence::Threads;
use crate::look::stat_reader::{Page, ProcessStatus};

/// Most bytes that are read at once.
const MOST_AT_ONCE: usize = 4 << 20;
/// Most places of one system call (`UIO_MAXIOV`).
const PLACES_MAX: usize = 1024;
/// Most threads that read. Those of hostile processes may wait for as long as the command runs.
const READERS_MAX: usize = 16;
/// Number of threads that read.
static READERS: AtomicUsize = AtomicUsize::new(0);

/// Address and length of bytes to read.
pub(crate) type Place = (u64, usize);

/// One of the [`READERS`].
struct MemoryReader;

impl MemoryReader {
    fn begin() -> Result<MemoryReader> {
        let reader = MemoryReader;
        let others = READERS.fetch_add(1, Ordering::Relaxed);
        ensure!(others < READERS_MAX, "{others} processes have memory that cannot be read in time");
        Ok(reader)
    }
}

impl Drop for MemoryReader {
    fn drop(&mut self) {
        READERS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The memory of a process.
pub(crate) struct RemoteMemory<'a> {
    allowance: &'a Allowance,
    requests: Sender<Vec<Place>>,
    answers: Receiver<io::Result<Vec<u8>>>,
}

impl<'a> RemoteMemory<'a> {
    /// Opens the memory of a process. Reads wait no longer than `allowance` allows.
    pub(crate) fn open(process: &ProcessStatus, allowance: &'a Allowance) -> Result<RemoteMemory<'a>> {
        let (requests, received) = channel::<Vec<Place>>();
        let (answer, answers) = channel();
        let (reader, handle) = (MemoryReader::begin()?, Arc::clone(&process.handle));
        // The thread ends with the sender of requests, or with the command.
        std::thread::Builder::new().name("neap-memory".into()).spawn(move || {
            let _reader = reader;
            received.iter().all(|places| answer.send(read(&handle, &places)).is_ok())
        })?;
        Ok(RemoteMemory { allowance, requests, answers })
    }

    /// Reads the bytes of all places, one after the other.
    pub(crate) fn read(&self, places: Vec<Place>) -> Result<Vec<u8>> {
        let length = places.iter().try_fold(0_usize, |sum, (_, length)| sum.checked_add(*length));
        ensure!(length.is_some_and(|length| length <= MOST_AT_ONCE), "more than {MOST_AT_ONCE} bytes in one piece");
        self.allowance.ensure_time()?;
        let left = self.allowance.end().saturating_duration_since(Instant::now());
        self.requests.send(places).context("the reading thread has ended")?;
        let bytes = self.answers.recv_timeout(left).map_err(|_| anyhow!("its memory was not read in time"))?;
        bytes.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => {
                anyhow!("reading its memory is not permitted (see kernel.yama.ptrace_scope): run this as root")
            }
            _ => anyhow::Error::new(error).context("cannot read its memory"),
        })
    }

    /// Reads words of 64 bits.
    pub(crate) fn words(&self, address: u64, count: usize) -> Result<Vec<u64>> {
        Ok(words_of(&self.read(vec![(address, count.saturating_mul(8))])?))
    }

    /// Reads numbers of 32 bits, each at an address.
    pub(crate) fn shorts<const N: usize>(&self, addresses: [u64; N]) -> Result<[u64; N]> {
        let bytes = self.read(addresses.map(|address| (address, 4)).to_vec())?;
        Ok(core::array::from_fn(|at| short_at(&bytes, 4 * at)))
    }

    /// Reads numbers of 64 bits, each at an address.
    pub(crate) fn longs<const N: usize>(&self, addresses: [u64; N]) -> Result<[u64; N]> {
        let bytes = self.read(addresses.map(|address| (address, 8)).to_vec())?;
        Ok(core::array::from_fn(|at| long_at(&bytes, 8 * at)))
    }
}

/// Reads all places, or fails.
fn read(handle: &ProcessHandle, places: &[Place]) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; places.iter().map(|(_, length)| length).sum()];
    let mut at = 0;
    for places in places.chunks(PLACES_MAX) {
        let length: usize = places.iter().map(|(_, length)| length).sum();
        let part = &mut bytes[at..at + length];
        let own = libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: length };
        let remote: Vec<libc::iovec> = places
            .iter()
            .map(|&(address, length)| libc::iovec {
                iov_base: core::ptr::without_provenance_mut(address as usize),
                iov_len: length,
            })
            .collect();
        // SAFETY: the call writes only to `part`, which is live and as long as `own` says. It reads
        // the lists, and checks the addresses of the other process by itself.
        let count =
            unsafe { libc::process_vm_readv(handle.pid, &raw const own, 1, remote.as_ptr(), remote.len() as u64, 0) };
        if count < 0 {
            return Err(io::Error::last_os_error());
        }
        if count.cast_unsigned() != length {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        at += length;
    }
    // A process that still runs had this number during the calls.
    if handle.has_ended() { Err(io::Error::from_raw_os_error(libc::ESRCH)) } else { Ok(bytes) }
}

/// Returns bytes as words of 64 bits.
pub(crate) fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect()
}

/// Returns the 64 bits at an offset; 0 beyond the end.
pub(crate) fn long_at(bytes: &[u8], at: usize) -> u64 {
    let part = bytes.get(at..).and_then(|part| part.first_chunk());
    part.copied().map_or(0, u64::from_ne_bytes)
}

/// Returns the 32 bits at an offset; 0 beyond the end.
pub(crate) fn short_at(bytes: &[u8], at: usize) -> u64 {
    let part = bytes.get(at..).and_then(|part| part.first_chunk());
    part.copied().map_or(0, u32::from_ne_bytes).into()
}

/// Names and values that say where numbers lie, as the library's `memory_layout` functions give
/// them.
#[derive(Clone, Copy)]
pub(crate) struct MemoryLayout<'a>(&'a Map<String, Value>);

impl<'a> MemoryLayout<'a> {
    /// Returns the layout of `part` in a page's text, if there is one.
    pub(crate) fn of(page: &'a Page, part: &str) -> Option<MemoryLayout<'a>> {
        page.object.get("memory")?.get(part)?.as_object().map(MemoryLayout)
    }

    /// Returns a value.
    pub(crate) fn get(&self, name: &str) -> Result<u64> {
        self.0.get(name).and_then(Value::as_u64).with_context(|| format!("its page has no number for {name}"))
    }

    /// Returns a size, an offset or a count, which is at most `most`.
    pub(crate) fn size(&self, name: &str, most: usize) -> Result<usize> {
        let value = self.get(name)?;
        let size = usize::try_from(value).ok().filter(|size| *size <= most);
        size.with_context(|| format!("its page has {value} for {name}, more than {most}"))
    }
}

/// Asks a process, and reads its memory if it does not answer. Reads first if no thread of the
/// process can answer. Where the memory cannot be read, waits for the answer according to `haste`.
///
/// # Errors
/// If neither way works, both reasons.
pub(crate) fn ask_or_read<'p, T>(
    process: &'p ProcessStatus,
    layout: Option<MemoryLayout<'p>>,
    haste: Haste,
    ask: impl Fn(Haste) -> Result<T>,
    read: impl Fn(&RemoteMemory<'p>, MemoryLayout<'p>) -> Result<T>,
) -> Result<T> {
    let Some(layout) = layout else { return ask(haste) };
    let read = || {
        let mark = process.allowance.mark();
        let read = RemoteMemory::open(process, &process.allowance).and_then(|memory| read(&memory, layout));
        read.inspect_err(|_| process.allowance.give_back(mark))
    };
    let unread = |error: anyhow::Error, why: &anyhow::Error| error.context(format!("its memory was not read: {why:#}"));
    let can_answer = Threads::look(&process.handle).is_none_or(|threads| threads.has_neaps || threads.runs_any);
    if !can_answer {
        return read().or_else(|why| ask(haste).map_err(|error| unread(error, &why)));
    }
    let mark = process.allowance.mark();
    ask(Haste::Hurried).or_else(|error| {
        process.allowance.give_back(mark);
        read().or_else(|why| if haste == Haste::Hurried { Err(unread(error, &why)) } else { ask(haste) })
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use core::time::Duration;

    impl<'a> MemoryLayout<'a> {
        /// A layout that no process has published.
        pub(crate) fn made_up(layout: &'a Map<String, Value>) -> MemoryLayout<'a> {
            MemoryLayout(layout)
        }
    }

    /// The memory of this process, and the number of reads so far.
    pub(crate) fn counted(allowance: &Allowance) -> (RemoteMemory<'_>, Arc<AtomicUsize>) {
        let ((requests, received), (answer, answers)) = (channel::<Vec<Place>>(), channel());
        let (handle, reads) = (ProcessHandle::open(std::process::id() as i32).unwrap(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&reads);
        std::thread::spawn(move || {
            received.iter().all(|places| {
                count.fetch_add(1, Ordering::Relaxed);
                answer.send(read(&handle, &places)).is_ok()
            })
        });
        (RemoteMemory { allowance, requests, answers }, reads)
    }

    /// A process can make a page that is never read.
    #[test]
    fn reading_waits_no_longer_than_its_allowance() {
        let allowance = Allowance::new(Duration::from_millis(20));
        let ((requests, _requested), (_answer, answers)) = (channel(), channel());
        let memory = RemoteMemory { allowance: &allowance, requests, answers };
        let refused = memory.words(4096, 1).unwrap_err().to_string();
        assert!(refused.contains("was not read in time"), "{refused}");
        assert!(allowance.is_over() && memory.words(4096, 1).is_err());
        let allowance = Allowance::new(Duration::from_secs(1000));
        let memory = RemoteMemory { allowance: &allowance, ..memory };
        assert!(memory.words(4096, MOST_AT_ONCE).unwrap_err().to_string().contains("in one piece"));
    }

    #[test]
    fn readers_that_still_wait_are_bounded() {
        let readers: Vec<_> = (0..READERS_MAX).map(|_| MemoryReader::begin().unwrap()).collect();
        assert!(MemoryReader::begin().is_err());
        drop(readers);
        assert!(MemoryReader::begin().is_ok());
    }
}
