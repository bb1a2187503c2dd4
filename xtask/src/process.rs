//! Runs other programs: the one place where xtask starts a process.
//!
//! Each function names the program and its arguments when it fails, so that a failed step can be
//! repeated by hand. It uses no shell, and hides a program's output only if asked to capture it.

use core::time::Duration;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// The command as a person would type it, environment left out.
fn spelled(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    text
}

/// A command from a program and its arguments.
pub(crate) fn command<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

/// The cargo that runs this xtask, so that a `+toolchain` given by the caller holds for every step.
pub(crate) fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    command(&cargo, args)
}

/// Runs to the end with the caller's output; an exit status other than 0 is an error.
pub(crate) fn run(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start `{}`", spelled(&command)))?;
    if !status.success() {
        bail!("`{}` ended with {status}", spelled(&command));
    }
    Ok(())
}

/// Runs to the end and hands back standard output; on failure the error carries both outputs.
pub(crate) fn capture(mut command: Command) -> Result<String> {
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{}`", spelled(&command)))?;
    if !output.status.success() {
        bail!(
            "`{}` ended with {}\n{}{}",
            spelled(&command),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The last line of an error that is not empty.
pub(crate) fn last_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_string()
}

/// The result of a program, for comparison with another run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Exit code or signal; `None` when the time limit ended it.
    pub(crate) status: Option<ExitStatus>,
    /// Standard output.
    pub(crate) stdout: Vec<u8>,
    /// Standard error.
    pub(crate) stderr: Vec<u8>,
}

impl Outcome {
    /// True if the program ended by itself with status 0.
    pub(crate) fn success(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }

    /// One line for a report: how it ended and the last lines it complained with. A parent's
    /// complaint of its child comes after the child's.
    pub(crate) fn summary(&self) -> String {
        let how = match self.status {
            Some(status) => status.to_string(),
            None => "stopped by the time limit".into(),
        };
        let text = String::from_utf8_lossy(&self.stderr);
        let mut lines: Vec<&str> = text.lines().rev().filter(|line| !line.trim().is_empty()).take(3).collect();
        lines.reverse();
        if lines.is_empty() { how } else { format!("{how}; stderr ends: {}", lines.join(" | ")) }
    }
}

/// Runs a program without input for at most `limit`, and collects its result. The time limit guards
/// against a hang: it ends the program, which is reported. Children of the program end with it.
pub(crate) fn observe(command: Command, limit: Duration) -> Result<Outcome> {
    observe_lines(command, limit, |_| ())
}

/// Runs a program as [`observe`] does, and calls `hear` with each line of its standard output.
pub(crate) fn observe_lines(
    mut command: Command,
    limit: Duration,
    hear: impl Fn(&str) + Send + 'static,
) -> Result<Outcome> {
    use std::os::unix::process::CommandExt;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start `{}`", spelled(&command)))?;
    let stdout = reader(child.stdout.take().context("no stdout pipe")?, hear);
    let stderr = reader(child.stderr.take().context("no stderr pipe")?, |_| ());
    let deadline = Instant::now() + limit;
    let status = loop {
        let status = child.try_wait()?;
        if status.is_some() || Instant::now() >= deadline {
            break status;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    // Children that it left behind may hold the pipes.
    let group = format!("-{}", child.id());
    let _ = command_quiet("kill", ["-KILL", "--", &group]).status();
    let _ = child.wait();
    let stdout = stdout.join().unwrap_or_default();
    let stderr = stderr.join().unwrap_or_default();
    Ok(Outcome { status, stdout, stderr })
}

/// Starts a thread that reads a pipe to its end, and calls `hear` with each line.
fn reader(pipe: impl Read + Send + 'static, hear: impl Fn(&str) + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let (mut pipe, mut bytes, mut start) = (BufReader::new(pipe), Vec::new(), 0);
        // A read error ends the stream: the comparison then shows the shorter output.
        while pipe.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
            hear(&String::from_utf8_lossy(&bytes[start..]));
            start = bytes.len();
        }
        bytes
    })
}

/// A command whose output goes nowhere.
pub(crate) fn command_quiet<'a>(program: &str, args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = command(program, args);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// The full path of a program on `PATH`.
pub(crate) fn which(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// Installs Debian packages when `program` is missing and this user may; otherwise says how to.
pub(crate) fn need(program: &str, packages: &[&str]) -> Result<()> {
    if which(program).is_some() {
        return Ok(());
    }
    let list = packages.join(" ");
    let root = capture(command("id", ["-u"])).is_ok_and(|id| id.trim() == "0");
    if !root || which("apt-get").is_none() {
        bail!("`{program}` is missing: install it with `sudo apt-get install {list}` and run this again");
    }
    println!("installing {list} (for `{program}`)");
    let apt = |args: &[&str]| {
        let mut apt = command("apt-get", args);
        apt.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
        run(apt)
    };
    apt(&["update", "-qq"])?;
    let mut args = vec!["install", "-qq", "-y", "--no-install-recommends"];
    args.extend(packages);
    apt(&args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_observed_as_it_is() {
        let found = observe(command("sh", ["-c", "echo out; echo err >&2; exit 3"]), Duration::from_secs(60)).unwrap();
        assert_eq!(found.status.and_then(|status| status.code()), Some(3));
        assert_eq!((found.stdout.as_slice(), found.stderr.as_slice()), (b"out\n".as_slice(), b"err\n".as_slice()));
        assert_eq!(found.summary(), "exit status: 3; stderr ends: err");
        let complaints = command("sh", ["-c", "printf '1\\n2\\n\\nchild\\nparent\\n' >&2; exit 1"]);
        let found = observe(complaints, Duration::from_secs(60)).unwrap();
        assert_eq!(found.summary(), "exit status: 1; stderr ends: 2 | child | parent");
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_its_children() {
        let hangs = command("sh", ["-c", "echo begun; sleep 1000 & wait"]);
        let found = observe(hangs, Duration::from_millis(300)).unwrap();
        assert!(found.status.is_none(), "{found:?}");
        let leaves = command("sh", ["-c", "echo begun; sleep 1000 &"]);
        let found = observe(leaves, Duration::from_secs(900)).unwrap();
        assert!(found.success() && found.stdout == b"begun\n", "{found:?}");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = run(command("no-such-program", ["x"])).unwrap_err();
        assert_eq!(error.to_string(), "cannot start `no-such-program x`");
    }
}
