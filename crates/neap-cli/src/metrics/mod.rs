//! `neap metrics`: the numbers of processes under neap for Prometheus, by HTTP, in a file or on
//! standard output.
//!
//! `reading` reads the processes, `groups` chooses the memory groups that have metrics, `families`
//! writes the text, and `serve` answers HTTP requests.

mod families;
mod groups;
mod reading;
mod serve;

use core::time::Duration;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

use crate::look::census::{Busy, Chosen, unread_line};
use crate::look::subject::print;
use families::Format;
use reading::Reader;

const EXAMPLES: &str = "\
Examples:
  neap metrics --all                           the metrics of all processes under neap, once
  neap metrics 1234 5678                       the metrics of two processes
  neap metrics --all --listen 127.0.0.1:9808   a server that Prometheus scrapes, until it is ended
  neap metrics --all --textfile /var/lib/prometheus/node-exporter/neap.prom
                                               replace a file for node_exporter in one step

The server answers GET /metrics in OpenMetrics if the client accepts it, and otherwise in
Prometheus's text format. The other outputs are in Prometheus's text format. Each scrape makes one
reading, and readings follow one another. Only the 1000 largest processes and the 500 largest memory
groups have metrics. The other groups of a process are summed as (other). Only a process's own user
and root may read its numbers.";

/// Show the numbers of processes for Prometheus.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MetricsOptions {
    /// Ids of the processes
    #[arg(value_name = "PID", required_unless_present = "all", value_parser = clap::value_parser!(i32).range(1..))]
    pids: Vec<i32>,
    /// All processes under neap
    #[arg(long, conflicts_with = "pids")]
    all: bool,
    /// Serve the metrics by HTTP at an address, such as 127.0.0.1:9808
    #[arg(long, value_name = "ADDRESS", conflicts_with = "textfile")]
    listen: Option<String>,
    /// Write the metrics to a file for node_exporter, whose name ends in .prom
    #[arg(long, value_name = "FILE")]
    textfile: Option<PathBuf>,
    /// Seconds that a reading may take; Prometheus waits for 10
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=9))]
    timeout: u64,
}

pub(crate) fn main(options: &MetricsOptions) -> Result<ExitCode> {
    let chosen = Chosen::new(&options.pids);
    let reader = Reader { chosen, time: Duration::from_secs(options.timeout), busy: Busy::default() };
    if let Some(address) = &options.listen {
        return serve::main(address, reader);
    }
    let reading = reader.read()?;
    if !options.all {
        eprint!("{}", unread_line(&reading.unread));
    }
    let is_empty = reading.processes.is_empty();
    let text = reading.text(Format::Prometheus);
    match &options.textfile {
        Some(file) => replace(file, &text).with_context(|| format!("cannot write {}", file.display()))?,
        None => drop(print(|output| write!(output, "{text}"))?),
    }
    Ok(if is_empty && !options.all { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Replaces a file, so that a reader finds either the old text or the new one.
fn replace(path: &Path, text: &str) -> Result<()> {
    let name = path.file_name().context("the path has no file name")?;
    // The temporary file is in the same folder, and node_exporter does not read its name.
    let temporary = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&temporary, path)
    };
    // An earlier command with the id of this process may have left the file.
    let _ = fs::remove_file(&temporary);
    write().inspect_err(|_| drop(fs::remove_file(&temporary)))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_replaced_whole_and_nothing_else_stays() {
        let folder = std::env::temp_dir().join(format!("neap-metrics-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("neap.prom");
        for text in ["first\n", "second\n"] {
            replace(&file, text).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
        // A folder is not replaced, and its temporary file goes.
        fs::create_dir(folder.join("folder")).unwrap();
        assert!(replace(&folder.join("folder"), "text").is_err() && replace(Path::new("/"), "text").is_err());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
        fs::remove_dir_all(&folder).unwrap();
    }
}
