//! A child of this command that parses files within bounds of memory and time.
//!
//! # Design
//! 1. The command may have threads, so it does not fork alone: it executes itself as the hidden
//!    command `neap lines`.
//! 2. The child has the file as its standard input, and one end of a socket as its standard output.
//! 3. The child [bounds](bound_memory_and_time) its memory and time before it reads the request.
//! 4. The child sends its answers as lines. Answers that it has sent count even if it dies later.
//!
//! A failed allocation, the kernel or the command ends a child that exceeds its bounds. The child
//! writes no core file and no message, since the command reports the missing results.

use core::time::Duration;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Bytes of an answer, at most.
const MOST_ANSWER: u64 = 512 << 10;

/// Longest time between two calls of `wait` while an answer is awaited.
const PAUSE: Duration = Duration::from_millis(50);

/// A child that answers.
pub(super) struct BoundedChild {
    child: Child,
    answers: BufReader<UnixStream>,
    end: Instant,
}

impl BoundedChild {
    /// Executes this program with `arguments` in a child that gets `file` and `request`. The child
    /// may answer until `end`.
    pub(super) fn start(arguments: &[String], file: File, request: &[u8], end: Instant) -> io::Result<BoundedChild> {
        let (own, other) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        // Nothing is preloaded, and a signal of the terminal is for this command.
        command.args(arguments).env_remove("LD_PRELOAD").process_group(0);
        command.stdin(file).stdout(OwnedFd::from(other)).stderr(Stdio::null());
        let mut child = BoundedChild { child: command.spawn()?, answers: BufReader::new(own), end };
        let own = child.answers.get_mut();
        own.set_write_timeout(Some(left(end)))?;
        // This process keeps the other end open until it has written, so the write raises no
        // SIGPIPE.
        own.write_all(request)?;
        own.shutdown(Shutdown::Write)?;
        drop(command);
        Ok(child)
    }

    /// Returns the next answer, without the end of its line. `None` if there is no answer in time.
    /// Calls `wait` repeatedly meanwhile, and gives up when `wait` returns `false`.
    pub(super) fn answer(&mut self, wait: &mut dyn FnMut() -> bool) -> Option<Vec<u8>> {
        let mut line = Vec::new();
        loop {
            self.answers.get_mut().set_read_timeout(Some(left(self.end).min(PAUSE))).ok()?;
            let room = MOST_ANSWER - line.len() as u64;
            match (&mut self.answers).take(room).read_until(b'\n', &mut line) {
                Ok(_) => return (line.pop() == Some(b'\n')).then_some(line),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return None,
                Err(_) if Instant::now() >= self.end || !wait() => return None,
                Err(_) => {}
            }
        }
    }
}

impl Drop for BoundedChild {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the time until `end`, at least a millisecond, since a timeout of 0 is invalid.
fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Bounds the memory of this process besides mapped files, and its processor time. It ends with its
/// parent, and leaves no core file.
pub(super) fn bound_memory_and_time(bytes: u64, seconds: u64) -> io::Result<()> {
    let done = [(libc::RLIMIT_DATA, bytes), (libc::RLIMIT_CPU, seconds)].into_iter().all(|(kind, most)| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the limit is a live local during both calls.
        unsafe {
            // A lower limit of the user stays.
            libc::getrlimit(kind, &raw mut limit) == 0 && {
                let most = limit.rlim_cur.min(most);
                limit = libc::rlimit { rlim_cur: most, rlim_max: most };
                libc::setrlimit(kind, &raw const limit) == 0
            }
        }
    });
    // SAFETY: neither call touches memory.
    let done = done
        && unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) == 0
        };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes that this process has in memory.
pub(super) fn resident() -> Option<usize> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    // SAFETY: a query without side effects.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
    Some(pages.split(' ').nth(1)?.parse::<usize>().ok()? * page)
}
