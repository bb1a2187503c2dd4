//! `neap drain`: asks a running process to drain its per-CPU caches into its free pages, by the
//! process's [control channel](crate::look::control_channel). The answer is untrusted. It has only
//! numbers, and this command prints them as they are.

use core::time::Duration;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::look::control_channel::{ChannelRequest, ControlChannel, DRAIN};
use crate::look::stat_reader::{Page, ProcessStatus};
use crate::look::subject::{SCHEMA, Subject, print, print_json};

const EXAMPLES: &str = "\
Examples:
  neap drain 1234               drain all per-CPU caches of process 1234, and its barns
  neap drain 1234 --cpu 3       drain only the caches of CPU 3
  neap drain 1234 --until 64m   stop when 64 MiB are free in its zone
  neap drain 1234 --json        print the answer as one JSON object

Only the process's own user and root may drain it. The program runs on meanwhile, and the drain
waits for none of its threads. A list or stack that a thread holds is tried again a few times, and
then counted as skipped. A drain moves memory to the free pages of the process; neap's next ticks
return it to the system. A process without a thread of neap's (see `thread` in `neap stat`) answers
when one of its threads next needs more than its CPU's caches. That may be never.";

/// Drain the per-CPU caches of a running process into its free pages.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DrainOptions {
    #[command(flatten)]
    subject: Subject,
    /// Only the page lists and stacks of this CPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    cpu: Option<u32>,
    /// Only the caches of this NUMA node
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    node: Option<u32>,
    /// Stop when this much memory is free: bytes, with k, m or g
    #[arg(long, value_name = "SIZE", value_parser = size)]
    until: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Parses a number of bytes; k, m and g stand for powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let shift = match text.chars().last().map(|last| last.to_ascii_lowercase()) {
        Some('k') => 10,
        Some('m') => 20,
        Some('g') => 30,
        _ => 0,
    };
    let digits = if shift > 0 { &text[..text.len() - 1] } else { text };
    let number = digits.parse::<u64>().map_err(|_| "not a number of bytes".to_string())?;
    let bytes = number.checked_mul(1 << shift).filter(|bytes| *bytes < u64::MAX);
    bytes.ok_or_else(|| "too many bytes".to_string())
}

pub(crate) fn main(options: &DrainOptions) -> Result<ExitCode> {
    let wanted = ChannelRequest {
        what: DRAIN,
        cpu: options.cpu,
        node: options.node,
        until: options.until,
        ..ChannelRequest::default()
    };
    let (process, (answer, took)) = options.subject.look(move |process| {
        let page = process.page()?;
        let started = Instant::now();
        let answer = ask(process, &page, &wanted)?;
        Ok((answer, started.elapsed()))
    })?;
    if options.json {
        return print_json(&answer.json(&process, options, took));
    }
    print(|output| write!(output, "{}", answer.report(&process)))
}

/// Asks a process to drain, and waits for the answer.
fn ask(process: &ProcessStatus, page: &Page, wanted: &ChannelRequest) -> Result<DrainAnswer> {
    let channel = ControlChannel::of(process, page)?;
    match channel.ask(wanted)? {
        0 => Ok(DrainAnswer::read(&channel)),
        1 => bail!("process {}: CPU {} does not exist", process.pid, wanted.cpu.unwrap_or_default()),
        2 => bail!("process {}: node {} does not exist", process.pid, wanted.node.unwrap_or_default()),
        other => bail!("process {} refused the request (status {other})", process.pid),
    }
}

/// Asks a process to drain one CPU or all. Returns the result in words.
pub(crate) fn drain(process: &ProcessStatus, cpu: Option<u32>) -> Result<String> {
    let page = process.page()?;
    let answer = ask(process, &page, &ChannelRequest { what: DRAIN, cpu, ..ChannelRequest::default() })?;
    Ok(answer.skipped().map_or(answer.went_back(), |skipped| format!("{}. {skipped}", answer.went_back())))
}

/// The answer of a process.
#[derive(Debug)]
struct DrainAnswer {
    cpus: u32,
    skipped: u32,
    retried: u32,
    page_size: u32,
    pages: u64,
    objects: u64,
    free: u64,
}

impl DrainAnswer {
    fn read(channel: &ControlChannel) -> DrainAnswer {
        let [cpus, skipped, retried, page_size] = [32, 36, 40, 44].map(|offset| channel.word(offset));
        let [pages, objects, free] = [48, 56, 64].map(|offset| channel.number(offset));
        DrainAnswer { cpus, skipped, retried, page_size, pages, objects, free }
    }

    fn json(&self, process: &ProcessStatus, options: &DrainOptions, took: Duration) -> Value {
        let bytes = |pages: u64| pages.saturating_mul(self.page_size.into());
        json!({
            "schema": SCHEMA, "pid": process.pid, "cpu": options.cpu, "node": options.node, "until_bytes": options.until,
            "cpus": self.cpus, "pages": self.pages, "page_bytes": bytes(self.pages), "objects": self.objects,
            "skipped": self.skipped, "retried": self.retried,
            "free_pages": self.free, "free_bytes": bytes(self.free), "took_ms": took.as_millis() as u64,
        })
    }

    fn report(&self, process: &ProcessStatus) -> String {
        let (name, free) = (&process.name, self.kib(self.free));
        let skipped = self.skipped().map_or(String::new(), |skipped| format!("{skipped}\n"));
        let back = self.went_back();
        format!("Process {} ({name}): {back}; {} pages ({free} KiB) are free.\n{skipped}", process.pid, self.free)
    }

    fn kib(&self, pages: u64) -> u64 {
        pages.saturating_mul(self.page_size.into()) >> 10
    }

    fn went_back(&self) -> String {
        let (pages, objects, cpus) = (self.pages, self.objects, self.cpus);
        format!("{pages} pages ({} KiB) and {objects} objects of {cpus} CPUs went back", self.kib(pages))
    }

    fn skipped(&self) -> Option<String> {
        let (skipped, retried) = (self.skipped, self.retried);
        (skipped.max(retried) > 0).then(|| format!("Skipped: {skipped} lists or stacks, after {retried} more tries."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::stat_reader::tests::ended;

    #[test]
    fn sizes_are_numbers_with_a_suffix() {
        assert_eq!((size("0"), size("12"), size("3k"), size("1G")), (Ok(0), Ok(12), Ok(3072), Ok(1 << 30)));
        for wrong in ["", "k", "-1", "1x", "1 k", "99999999999g", "18446744073709551615"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_report_says_what_was_skipped_only_where_something_was() {
        let process = ended();
        let mut answer =
            DrainAnswer { cpus: 2, skipped: 0, retried: 0, page_size: 4096, pages: 3, objects: 9, free: u64::MAX };
        let text = answer.report(&process);
        assert!(text.starts_with("Process 12 (ended): 3 pages (12 KiB) and 9 objects of 2 CPUs"), "{text}");
        assert!(!text.contains("Skipped"), "{text}");
        (answer.skipped, answer.retried) = (1, 8);
        assert!(answer.report(&process).ends_with("Skipped: 1 lists or stacks, after 8 more tries.\n"));
    }
}
