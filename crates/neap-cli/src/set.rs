//! `neap set PID limit=1g`: changes options of a running process, by the process's
//! [control channel](crate::look::control_channel).
//!
//! [`neap::options`] tells which options may change, and which values they take. This command
//! parses a value and sends it as a number. The process checks the number once more.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use neap::options::OptionRow;
use neap::settings::Setting;

use crate::keys;
use crate::look::control_channel::{ChannelRequest, ControlChannel, NO_SUCH_VALUE, SET, UNKNOWN};
use crate::look::stat_reader::{Page, ProcessStatus};
use crate::look::subject::{Subject, print};

const EXAMPLES: &str = "\
Examples:
  neap set 1234 limit=512m      limit the heap of process 1234, even if it uses more now
  neap set 1234 limit=none      remove the limit
  neap set 1234 page_list_high=0 interval=50
                                switch its page lists off, and have it return memory sooner
  neap stat 1234                see the values in force

Only the process's own user and root may change options. Values take effect at once, one after the
other, and last as long as the process. A process that uses more than a new limit keeps that memory.
It drains its caches, asks its shrinkers, and gets no more memory until its use is below the limit.
Options that a process reads only at its start cannot be changed.

Options that may change:
";

/// Returns the examples, followed by the options that may change.
fn after_help() -> String {
    format!("{EXAMPLES}{}", keys::listing_of(may_change))
}

/// Whether an option may change while a process runs.
pub(crate) fn may_change(option: &OptionRow) -> bool {
    option.setting.is_some()
}

/// Change options of a running process.
#[derive(Args)]
#[command(after_help = after_help())]
pub(crate) struct SetOptions {
    #[command(flatten)]
    subject: Subject,
    /// Options and their new values, as in the variable NEAP
    #[arg(required = true, value_name = "KEY=VALUE", value_parser = change)]
    changes: Vec<(Setting, u64)>,
}

const LIMIT_EXAMPLES: &str = "\
Examples:
  neap limit 1234 512m          limit the heap of process 1234 to 512 MiB
  neap limit 1234 auto          follow the memory that its container or the machine has left
  neap limit 1234 75%           likewise, with at most three quarters of the container's limit
  neap limit 1234 none          remove the limit

`neap limit PID VALUE` does the same as `neap set PID limit=VALUE`. `neap stat PID` shows the limit
in force.";

/// Change the memory limit of a running process.
#[derive(Args)]
#[command(after_help = LIMIT_EXAMPLES)]
pub(crate) struct LimitOptions {
    #[command(flatten)]
    subject: Subject,
    /// New limit: none, auto, a percentage, or bytes with k, m or g
    #[arg(value_name = "VALUE", value_parser = limit)]
    limit: (Setting, u64),
}

fn limit(value: &str) -> Result<(Setting, u64), String> {
    Setting::parse(Setting::Limit.key(), value).map_err(|refused| refused.to_string())
}

/// `neap limit`.
pub(crate) fn limit_main(options: &LimitOptions) -> Result<ExitCode> {
    main(&SetOptions { subject: options.subject.clone(), changes: vec![options.limit] })
}

/// Parses a change.
fn change(text: &str) -> Result<(Setting, u64), String> {
    let (key, value) = text.split_once(['=', ':']).ok_or("it has no \"=\"; write KEY=VALUE, as in limit=64m")?;
    Setting::parse(key, value).map_err(|refused| refused.to_string())
}

/// The possible reasons why a process refuses to sample.
const NO_SAMPLES: &str = "it has no place for samples, by a limit on file sizes (`ulimit -f`) or on address space \
                          (`ulimit -v`), or because the program has closed neap's descriptor";

/// Offset of the previous value in the answer.
const BEFORE: usize = 56;

pub(crate) fn main(options: &SetOptions) -> Result<ExitCode> {
    let changes = options.changes.clone();
    let (_, (done, end)) = options.subject.look(move |process| {
        let (page, mut done) = (process.page()?, String::new());
        let end = changes.iter().try_for_each(|&(setting, number)| {
            done += &set(process, &page, setting, number)?;
            Ok(())
        });
        Ok((done, end))
    })?;
    print(|output| write!(output, "{done}"))?;
    end.map(|()| ExitCode::SUCCESS)
}

/// Requests a change of one option. Returns the new and the previous value as a line.
pub(crate) fn set(process: &ProcessStatus, page: &Page, setting: Setting, number: u64) -> Result<String> {
    let before = change_setting(process, page, setting, number)?;
    Ok(format!("{}: {} (was {})\n", setting.key(), setting.value(number), setting.value(before)))
}

/// Requests a change of one option. Returns the previous value.
pub(crate) fn change_setting(process: &ProcessStatus, page: &Page, setting: Setting, number: u64) -> Result<u64> {
    change_by(&ControlChannel::of(process, page)?, setting, number)
}

/// Requests a change of one option through a channel. Returns the previous value.
pub(crate) fn change_by(channel: &ControlChannel<'_>, setting: Setting, number: u64) -> Result<u64> {
    let request = ChannelRequest { what: SET, from: setting as u32, until: Some(number), ..ChannelRequest::default() };
    match channel.ask(&request)? {
        0 => Ok(channel.number(BEFORE)),
        UNKNOWN => bail!(
            "process {} cannot change {}: its library is older than this command; start it with NEAP={1}:{}",
            channel.pid(),
            setting.key(),
            setting.value(number)
        ),
        NO_SUCH_VALUE if setting == Setting::Profile && number > 0 => bail!(
            "process {} cannot be sampled: {NO_SAMPLES}; started with NEAP=profile:on, it prints the reason",
            channel.pid()
        ),
        other => bail!("process {} refused the request (status {other})", channel.pid()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap::options::TABLE;
    use neap::settings::AUTO;

    #[test]
    fn changes_are_parsed_like_options_or_refused_by_name() {
        assert_eq!(change("limit=64m"), Ok((Setting::Limit, 64 << 20)));
        assert_eq!(change("limit=none"), Ok((Setting::Limit, 0)));
        assert_eq!((change("limit=auto"), limit("auto")), (Ok((Setting::Limit, AUTO)), Ok((Setting::Limit, AUTO))));
        assert_eq!(
            limit("101%"),
            Err("limit: \"101%\" is not a valid limit (none, auto, 1% to 100%, or bytes with k, m, g)".into())
        );
        assert_eq!(change("interval:50"), Ok((Setting::Interval, 50)));
        assert_eq!(change("page_list_high=auto"), Ok((Setting::PageListHigh, AUTO)));
        for (bad, said) in [
            ("limit", "it has no \"=\"; write KEY=VALUE, as in limit=64m"),
            ("limt=1g", "\"limt\" is not an option (did you mean \"limit\"?)"),
            ("interval=5", "interval: \"5\" is not a number from 10 to 60000"),
            ("rseq=off", "rseq cannot change while the process runs; start the process with NEAP=rseq:off"),
        ] {
            assert_eq!(change(bad), Err(said.to_string()));
        }
    }

    #[test]
    fn help_lists_what_may_change_and_nothing_else() {
        let help = after_help();
        for option in &TABLE {
            let line = format!("\n  {:<18}{} (default", option.key, option.values);
            assert_eq!(help.contains(&line), option.setting.is_some(), "{line}");
        }
    }
}
