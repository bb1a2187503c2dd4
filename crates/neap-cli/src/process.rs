//! Child processes of benchmarks. Each child has a process group of its own and a deadline, until
//! which this process reads its output and awaits it. This module measures the child's costs.
//!
//! A [`Process`] that is dropped before it was awaited kills the child's process group. The kernel
//! kills a child when the thread that started it ends.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// A running child.
pub(crate) struct Process {
    child: Child,
    name: String,
    started: Instant,
    deadline: Instant,
    awaited: bool,
}

/// Exit status and costs of a child. The costs include those of the processes that the child has
/// awaited.
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) wall: Duration,
    pub(crate) usage: libc::rusage,
}

impl Process {
    /// Starts `command`. [`Process::read`] reads its standard output. The child must end within
    /// `limit`.
    pub(crate) fn start(mut command: Command, limit: Duration) -> Result<Process> {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdout(Stdio::piped()).process_group(0);
        // SAFETY: the closure runs in the child between fork and exec. It makes one system call,
        // which is async-signal-safe, and allocates nothing.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            });
        }
        let started = Instant::now();
        let child = command.spawn().with_context(|| format!("cannot run `{name}`"))?;
        Ok(Process { child, name, started, deadline: started + limit, awaited: false })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn stdin(&mut self) -> Option<std::process::ChildStdin> {
        self.child.stdin.take()
    }

    /// Passes standard output to `sink` as it comes, until the output ends or `sink` returns false.
    /// Returns an error at the deadline.
    pub(crate) fn read(&mut self, mut sink: impl FnMut(&[u8]) -> bool) -> Result<()> {
        let mut buffer = [0; 64 * 1024];
        loop {
            let output = self.child.stdout.as_mut().context("standard output was not asked for")?;
            if !readable(output.as_raw_fd(), self.deadline)? {
                bail!("`{}` did not end in time", self.name);
            }
            match output.read(&mut buffer)? {
                0 => return Ok(()),
                length if !sink(&buffer[..length]) => return Ok(()),
                _ => {}
            }
        }
    }

    /// Waits for the end of the child. At the deadline, kills its whole process group and returns
    /// an error.
    pub(crate) fn wait(mut self) -> Result<Finished> {
        // SAFETY: pidfd_open takes two integers, and returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.child.id(), 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error()).context("pidfd_open");
        }
        // SAFETY: the descriptor is new and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        if !readable(fd.as_raw_fd(), self.deadline)? {
            bail!("`{}` did not end in time", self.name);
        }
        self.reap()
    }

    fn signal(&self) {
        // SAFETY: the call touches no memory. This process made the group for the child, and has
        // not awaited the child yet, so the group's number is not reused.
        unsafe { libc::kill(-(self.child.id() as i32), libc::SIGKILL) };
    }

    fn reap(&mut self) -> Result<Finished> {
        let mut status = 0;
        // SAFETY: all-zero bytes are a valid rusage.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: `status` and `usage` are live locals that the call may write.
        let answer = unsafe { libc::wait4(self.child.id() as i32, &mut status, 0, &mut usage) };
        if answer < 0 {
            return Err(io::Error::last_os_error()).with_context(|| format!("cannot wait for `{}`", self.name));
        }
        self.awaited = true;
        Ok(Finished { status: ExitStatus::from_raw(status), wall: self.started.elapsed(), usage })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.awaited {
            self.signal();
            let _ = self.reap();
        }
    }
}

/// Waits until `fd` can be read or is closed. Returns false if `deadline` has passed.
fn readable(fd: i32, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: `entry` is a live local, and the number of entries is 1.
        match unsafe { libc::poll(&mut entry, 1, left.as_millis().min(i32::MAX as u128) as i32) } {
            0 if left.is_zero() => return Ok(false),
            0 => {}
            1 => return Ok(true),
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(io::Error::last_os_error()),
        }
    }
}

/// Runs `command` to its end and hands its standard output to `sink`.
pub(crate) fn run(command: Command, limit: Duration, mut sink: impl FnMut(&[u8])) -> Result<Finished> {
    let mut process = Process::start(command, limit)?;
    process.read(|bytes| {
        sink(bytes);
        true
    })?;
    process.wait()
}

/// Processor time in a rusage, user and system together.
pub(crate) fn cpu_ns(usage: &libc::rusage) -> u64 {
    nanoseconds(usage.ru_utime) + system_ns(usage)
}

/// System time in a rusage.
pub(crate) fn system_ns(usage: &libc::rusage) -> u64 {
    nanoseconds(usage.ru_stime)
}

fn nanoseconds(time: libc::timeval) -> u64 {
    time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1_000
}

/// Resident memory of another process in KiB, counted by the kernel from the page tables. The
/// counters in `statm` lag by some pages per CPU.
pub(crate) fn rss_kib(process: u32) -> Result<u64> {
    let path = format!("/proc/{process}/smaps_rollup");
    let text = std::fs::read(&path).with_context(|| format!("cannot read {path}"))?;
    parse_rss(&text).with_context(|| format!("{path} names no Rss"))
}

/// The `Rss:` line of an smaps_rollup. Allocates nothing, so a workload may use it on itself.
pub(crate) fn parse_rss(text: &[u8]) -> Option<u64> {
    parse_kib(text, b"Rss:")
}

/// The number of the line that begins with `name`. Allocates nothing, so a workload may use it on
/// itself.
pub(crate) fn parse_kib(text: &[u8], name: &[u8]) -> Option<u64> {
    let line = text.split(|&byte| byte == b'\n').find(|line| line.starts_with(name))?;
    let digits = line.iter().filter(|byte| byte.is_ascii_digit());
    Some(digits.fold(0, |value, digit| value * 10 + u64::from(digit - b'0')))
}

/// Processor time of all threads that a process has now, in nanoseconds. The time of threads that
/// have ended is not included.
pub(crate) fn threads_cpu_ns(process: u32) -> Result<u64> {
    let mut total = 0;
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let path = task?.path().join("schedstat");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        total += text.split(' ').next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn output_status_and_cost_come_back() {
        let mut output = Vec::new();
        let finished = run(shell("echo one; echo two; exit 7"), Duration::from_secs(60), |bytes| {
            output.extend_from_slice(bytes);
        });
        let finished = finished.unwrap();
        assert_eq!(output, b"one\ntwo\n");
        assert_eq!(finished.status.code(), Some(7));
        assert!(finished.usage.ru_maxrss > 0);
    }

    #[test]
    fn a_child_past_its_deadline_is_killed_with_its_group() {
        // Long enough for the shell to start on a busy machine.
        let process = Process::start(shell("sleep 1000 & echo $!; wait"), Duration::from_secs(3));
        let mut process = process.unwrap();
        let mut grandchild = Vec::new();
        process
            .read(|bytes| {
                grandchild.extend_from_slice(bytes);
                false
            })
            .unwrap();
        let grandchild: i32 = String::from_utf8(grandchild).unwrap().trim().parse().unwrap();
        assert!(process.wait().err().unwrap().to_string().contains("did not end in time"));
        // The grandchild is a zombie until init has collected it, and then gone. It runs in neither
        // case.
        let running = || {
            std::fs::read_to_string(format!("/proc/{grandchild}/stat"))
                .is_ok_and(|text| !text.rsplit(") ").next().unwrap_or("").starts_with(['Z', 'X']))
        };
        let patience = Instant::now() + Duration::from_secs(60);
        while running() {
            assert!(Instant::now() < patience, "the group of a killed child still runs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = Process::start(Command::new("/nowhere/program"), Duration::from_secs(1)).err().unwrap();
        assert!(error.to_string().contains("/nowhere/program"));
    }

    #[test]
    fn rss_is_read_from_a_rollup() {
        assert_eq!(parse_rss(b"5-6 ---p 0 [rollup]\nRss:                1234 kB\nPss: 1 kB\n"), Some(1234));
        assert_eq!(parse_rss(b"Pss: 1 kB\n"), None);
        assert_eq!(parse_kib(b"VmPeak:\t 9 kB\nVmHWM:\t   567 kB\n", b"VmHWM:"), Some(567));
        assert!(rss_kib(std::process::id()).unwrap() > 100);
    }
}
