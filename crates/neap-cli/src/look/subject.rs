//! The process that a command looks at, the time that the command may take, and its output.

use core::time::Duration;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

use crate::colours::{Colours, TableHeads};
use crate::look::allowance::{Allowance, USUAL_TIME};
use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::ProcessStatus;

/// Time that [`within`] waits beyond the user's timeout. A look that checks its [`Allowance`] ends
/// in this time, with an error that says more.
const GRACE: Duration = Duration::from_secs(1);

/// The time of a look at a process.
#[derive(Clone, Args)]
pub(crate) struct Timeout {
    /// Most seconds that reading may take
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = USUAL_TIME.as_secs(), value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
}

impl Timeout {
    pub(crate) fn time(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

/// The process, and the time for it.
#[derive(Clone, Args)]
pub(crate) struct Subject {
    /// Id of the process
    #[arg(value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    #[command(flatten)]
    timeout: Timeout,
}

impl Subject {
    pub(crate) fn time(&self) -> Duration {
        self.timeout.time()
    }

    /// Opens the process for several looks.
    pub(crate) fn open(&self) -> Result<Arc<ProcessHandle>> {
        Ok(Arc::new(ProcessHandle::open(self.pid)?))
    }

    /// Looks at the process within the time, and returns the result.
    pub(crate) fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&ProcessStatus) -> Result<T> + Send + 'static,
    ) -> Result<(ProcessStatus, T)> {
        let (handle, time) = (self.open()?, self.time());
        within(time, &format!("process {}", self.pid), move || {
            let process = ProcessStatus::read(&handle, Allowance::new(time))?;
            let seen = look(&process)?;
            Ok((process, seen))
        })
    }
}

/// Calls `read` on a new thread, and waits for the result for `time` and [`GRACE`]. After that,
/// this command leaves the thread behind, since it may be stuck in the kernel. The thread ends with
/// this command.
pub(crate) fn within<T: Send + 'static>(
    time: Duration,
    what: &str,
    read: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = channel();
    // If the receiver is gone, `within` has given up and this command is about to end.
    std::thread::spawn(move || drop(sender.send(read())));
    match receiver.recv_timeout(time + GRACE) {
        Ok(seen) => seen,
        Err(RecvTimeoutError::Timeout) => {
            bail!("{what} was not read within {} s; --timeout SECONDS allows more", time.as_secs())
        }
        Err(RecvTimeoutError::Disconnected) => bail!("the thread that read {what} has failed"),
    }
}

/// Writes text to standard output through a buffer, with [colours](crate::colours) for the heads of
/// tables.
pub(crate) fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<ExitCode> {
    let mut output = TableHeads::new(BufWriter::new(io::stdout().lock()), Colours::of_output());
    write(&mut output).and_then(|()| output.finish()).context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}

/// Version of the schemas in `docs/schema`, in every JSON object for programs.
pub(crate) const SCHEMA: u32 = 1;

/// Writes a JSON object and the end of the line to standard output.
pub(crate) fn print_json(object: &impl Serialize) -> Result<ExitCode> {
    let mut output = BufWriter::new(io::stdout().lock());
    let written = serde_json::to_writer(&mut output, object).map_err(io::Error::from);
    written.and_then(|()| writeln!(output)).and_then(|()| output.flush()).context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}

/// A JSON array that makes each element when it is written.
pub(crate) struct Rows<'a, T, F>(pub(crate) &'a [T], pub(crate) F);

impl<T, F: Fn(&T) -> Value> Serialize for Rows<'_, T, F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(&self.1))
    }
}

/// A process, and the numbers read of it, as a JSON object.
pub(crate) struct Named<'a, T> {
    process: &'a ProcessStatus,
    key: &'static str,
    value: &'a T,
}

impl ProcessStatus {
    pub(crate) fn named<'a, T: Serialize>(&'a self, key: &'static str, value: &'a T) -> Named<'a, T> {
        Named { process: self, key, value }
    }
}

impl<T: Serialize> Serialize for Named<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(Some(4))?;
        object.serialize_entry("schema", &SCHEMA)?;
        object.serialize_entry("pid", &self.process.pid)?;
        object.serialize_entry("name", &self.process.name)?;
        object.serialize_entry(self.key, self.value)?;
        object.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_that_does_not_end_is_left_behind() {
        let endless = || -> Result<()> {
            loop {
                std::thread::park();
            }
        };
        let error = within(Duration::ZERO, "it", endless).unwrap_err().to_string();
        assert!(error.contains("it was not read within 0 s; --timeout SECONDS"), "{error}");
        assert_eq!(within(Duration::ZERO, "it", || Ok(7)).unwrap(), 7);
    }
}
