//! The identity of another process, for as long as a command looks at it.
//!
//! A handle is an open `/proc/PID`. The kernel binds the folder to the process, not to the number:
//! once the process has ended, nothing below the folder can be opened, even if a later process has
//! the number. So every file is opened through the handle, and none by the number.

use core::time::Duration;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::look::refusal::LookRefusal;

/// Most bytes that [`ProcessHandle::read`] reads. Of the files that it reads, only `environ` can be
/// longer.
const MOST: u64 = 1 << 20;
/// Most bytes of a line of `maps` that are read. The kernel writes at most a page for the path.
const MOST_OF_LINE: u64 = 16 << 10;

/// A process.
#[derive(Debug)]
pub(crate) struct ProcessHandle {
    pub(crate) pid: i32,
    folder: File,
}

impl ProcessHandle {
    /// Opens the process that has the number `pid` now.
    pub(crate) fn open(pid: i32) -> Result<ProcessHandle> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY);
        match options.open(format!("/proc/{pid}")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(LookRefusal::Ended.error(format!("there is no process {pid}")))
            }
            folder => Ok(ProcessHandle { pid, folder: folder.with_context(|| format!("cannot open /proc/{pid}"))? }),
        }
    }

    /// Returns the path of a file of the process. Nothing is there once the process has ended.
    pub(crate) fn path(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{file}", self.folder.as_raw_fd()))
    }

    /// Reads at most the first [`MOST`] bytes of a file of the process.
    pub(crate) fn read(&self, file: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(self.path(file))?.take(MOST).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Calls `each` with every line of a file, until it returns `false`. Passes at most the first
    /// [`MOST_OF_LINE`] bytes of a line.
    pub(crate) fn each_line(&self, file: &str, each: &mut dyn FnMut(&[u8]) -> bool) -> io::Result<()> {
        each_line(BufReader::new(File::open(self.path(file))?), each)
    }

    /// Returns the line of `/proc/PID/stat` from the state on. `None` if the process has ended.
    pub(crate) fn state_line(&self) -> Option<String> {
        // The name in front of the state may contain spaces, brackets, and bytes that are not
        // UTF-8.
        let line = self.read("stat").ok()?;
        let end = line.windows(2).rposition(|pair| pair == b") ")?;
        String::from_utf8(line[end + 2..].to_vec()).ok()
    }

    /// Returns the time at which the process was started, in ticks of the kernel since boot.
    pub(crate) fn start(&self) -> Option<u64> {
        self.state_line()?.split(' ').nth(19)?.parse().ok()
    }

    /// Whether the process was started less than `time` ago. `false` if it has ended.
    pub(crate) fn is_younger_than(&self, time: Duration) -> bool {
        // SAFETY: the call takes an integer. All-zero bytes are a valid `timespec`, which the other
        // call may write. The clock exists on every Linux.
        let (ticks, now) = unsafe {
            let mut now: libc::timespec = core::mem::zeroed();
            libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now);
            (libc::sysconf(libc::_SC_CLK_TCK), now)
        };
        let milliseconds = |start: u64| start.saturating_mul(1000).checked_div(ticks.try_into().ok()?);
        let start = self.start().and_then(milliseconds).map(Duration::from_millis);
        let age = start.and_then(|start| Duration::new(now.tv_sec as u64, now.tv_nsec as u32).checked_sub(start));
        age.is_some_and(|age| age < time)
    }

    /// Whether the process has ended. If only the main thread has ended, the process still runs.
    pub(crate) fn has_ended(&self) -> bool {
        self.state_line().is_none_or(|line| {
            let is_over = line.starts_with(['Z', 'X']);
            let threads = line.split(' ').nth(17).and_then(|threads| threads.parse::<u64>().ok());
            is_over && threads.is_none_or(|threads| threads <= 1)
        })
    }
}

fn each_line(mut reader: impl BufRead, each: &mut dyn FnMut(&[u8]) -> bool) -> io::Result<()> {
    let mut line = Vec::new();
    loop {
        line.clear();
        if reader.by_ref().take(MOST_OF_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if !line.ends_with(b"\n") {
            reader.skip_until(b'\n')?;
        }
        if !each(line.trim_ascii_end()) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn sleeper() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn handle_reads_its_process_and_nothing_after_its_end() {
        let mut child = sleeper();
        let handle = ProcessHandle::open(child.id() as i32).unwrap();
        assert!(handle.read("status").unwrap().starts_with(b"Name:") && !handle.has_ended());
        let mut lines = 0;
        let mut count = |line: &[u8]| (lines += 1, line.contains(&b'-')).1 && lines < 2;
        handle.each_line("maps", &mut count).unwrap();
        assert_eq!(lines, 2);
        child.kill().unwrap();
        while !handle.has_ended() {
            std::thread::yield_now();
        }
        assert!(handle.read("status").is_ok(), "a process that ended and was not collected has a folder");
        child.wait().unwrap();
        assert!(handle.has_ended() && handle.read("status").is_err() && handle.read("maps").is_err());
        assert!(ProcessHandle::open(child.id() as i32).is_err());
    }

    #[test]
    fn end_of_a_long_line_is_no_line() {
        let text = [b"one\n".to_vec(), vec![b'x'; 3 * MOST_OF_LINE as usize], b" two\nthree".to_vec()].concat();
        let mut lines = Vec::new();
        each_line(&text[..], &mut |line| (lines.push(line.to_vec()), true).1).unwrap();
        assert_eq!(lines.len(), 3);
        assert_eq!((&lines[0][..], lines[1].len(), &lines[2][..]), (&b"one"[..], MOST_OF_LINE as usize, &b"three"[..]));
    }

    /// Makes processes until one has the number that a process had.
    fn reuse(pid: u32) -> Option<Child> {
        for _ in 0..100 {
            std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
            let mut child = sleeper();
            if child.id() == pid {
                return Some(child);
            }
            child.kill().unwrap();
            child.wait().unwrap();
        }
        None
    }

    #[test]
    fn handle_does_not_lead_to_a_later_process_with_its_number() {
        let mut first = sleeper();
        let handle = ProcessHandle::open(first.id() as i32).unwrap();
        first.kill().unwrap();
        first.wait().unwrap();
        let Some(mut later) = reuse(first.id()) else {
            eprintln!("skipped: numbers of processes cannot be chosen here");
            return;
        };
        assert!(handle.has_ended() && handle.read("status").is_err());
        assert!(!ProcessHandle::open(later.id() as i32).unwrap().has_ended());
        later.kill().unwrap();
        later.wait().unwrap();
    }
}
