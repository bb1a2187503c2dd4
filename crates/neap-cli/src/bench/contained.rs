//! Workloads that talk with their benchmark, in memory groups of the kernel that may kill them.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::cgroup::Cgroup;
use crate::process::Process;
use crate::variant::Variant;
use crate::work::{self, Outcome};

/// Longest time of a workload.
const PATIENCE: Duration = Duration::from_secs(1200);
/// Name of a count of an outcome. The count is 1 if the kernel killed the process.
pub(super) const KILLED: &str = "killed";

/// A workload that runs in a memory group, or in the group of its benchmark.
pub(super) struct Contained {
    process: Process,
    name: &'static str,
    said: Vec<u8>,
}

impl Contained {
    /// Starts `neap work ARGUMENTS` on a variant in the group. Its standard input stays open.
    pub(super) fn start(executable: &Path, variant: &Variant, arguments: &[&str], group: &Cgroup) -> Result<Contained> {
        Contained::start_for(PATIENCE, executable, variant, arguments, Some(group))
    }

    /// Starts `neap work ARGUMENTS`, which must end within `time`, in the group if there is one.
    pub(super) fn start_for(
        time: Duration,
        executable: &Path,
        variant: &Variant,
        arguments: &[&str],
        group: Option<&Cgroup>,
    ) -> Result<Contained> {
        let mut command = work::command(executable, variant, arguments);
        command.stdin(Stdio::piped());
        group.map_or(Ok(()), |group| group.enter(&mut command))?;
        let process = Process::start(command, time)?;
        Ok(Contained { process, name: variant.name, said: Vec::new() })
    }

    /// Number of the process.
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits for a line of standard output.
    ///
    /// If the process ends instead, this returns `Ok` too. [`end`](Self::end) then reports how it
    /// ended.
    pub(super) fn wait_for_line(&mut self) -> Result<()> {
        let said = &mut self.said;
        self.process.read(|bytes| {
            said.extend_from_slice(bytes);
            !said.contains(&b'\n')
        })
    }

    /// Closes standard input, waits for the end, and parses the last line. A killed process has the
    /// count [`KILLED`] alone.
    pub(super) fn end(mut self) -> Result<Outcome> {
        drop(self.process.stdin());
        let said = &mut self.said;
        self.process.read(|bytes| {
            said.extend_from_slice(bytes);
            true
        })?;
        let status = self.process.wait()?.status;
        let killed = status.signal() == Some(libc::SIGKILL);
        if !killed && !status.success() {
            bail!("the workload on {} failed: {status}", self.name);
        }
        let mut outcome = Outcome::default();
        if !killed {
            let line = self.said.trim_ascii_end().rsplit(|&byte| byte == b'\n').next().unwrap_or_default();
            outcome =
                serde_json::from_slice(line).with_context(|| format!("the workload on {}: no result", self.name))?;
        }
        outcome.counts.insert(KILLED.to_string(), f64::from(u8::from(killed)));
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cgroup::Groups;
    use crate::bench::tests::variant;
    use crate::variant::AllocatorKind;

    #[test]
    fn a_killed_process_has_no_result_and_a_missing_one_is_named() {
        let Ok(groups) = Groups::find() else { return };
        let group = groups.make(64 << 20).unwrap();
        let shell = variant("shell", AllocatorKind::Peer);
        let start = |executable: &str| Contained::start(Path::new(executable), &shell, &[], &group);
        // `sleep work` and `yes work` are commands, too.
        let mut endless = start("/usr/bin/yes").unwrap();
        endless.wait_for_line().unwrap();
        // SAFETY: `kill` touches no memory. The process was started above and was not awaited, so
        // the number is its own.
        unsafe { libc::kill(endless.process.id() as i32, libc::SIGKILL) };
        assert_eq!(endless.end().unwrap().count(KILLED), 1.0);
        assert!(start("/bin/sleep").unwrap().end().unwrap_err().to_string().contains("failed"));
        assert!(start("/bin/echo").unwrap().end().unwrap_err().to_string().contains("no result"));
    }
}
