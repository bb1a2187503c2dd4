//! `neap group PID PATH max=64m`: sets a bound of a group of a running process, by the process's
//! [control channel](crate::look::control_channel).
//!
//! This command finds the group by its path, and names it to the process by its id. So if another
//! group gets the path in between, that group keeps its bounds.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use neap::groups::{Bound, UNLIMITED};

use super::{ReadGroups, ReportedGroup};
use crate::drain::size;
use crate::look::control_channel::Haste;
use crate::look::control_channel::{BOUND, ChannelRequest, ControlChannel, NO_SUCH_GROUP};
use crate::look::foreign::escaped;
use crate::look::subject::{Subject, print};
use crate::report::human;

const EXAMPLES: &str = "\
Examples:
  neap group 1234 tenant/acme max=512m
                          limit this group of process 1234 to 512 MiB
  neap group 1234 tenant/acme max=none low=64m
                          remove the limit, and protect 64 MiB when other groups need memory
  neap stat 1234 --groups list the groups and their bounds

Only the process's own user and root may change bounds. A change takes effect at once. A group that
has more than its new max keeps its memory, and gets no more until it has less than that.";

/// Change the bounds of a memory group of a running process.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BoundOptions {
    #[command(flatten)]
    subject: Subject,
    /// Path of the group
    path: String,
    /// Bounds: max, high, low or min, with bytes (k, m or g may follow), or none
    #[arg(required = true, value_name = "BOUND=BYTES", value_parser = bound)]
    bounds: Vec<(Bound, u64)>,
}

fn bound(text: &str) -> Result<(Bound, u64), String> {
    let (name, bytes) = text.split_once('=').ok_or("it has no \"=\"; write BOUND=BYTES, as in max=64m")?;
    let known = || Bound::ALL.into_iter().find(|bound| bound.name() == name);
    let bound = known().ok_or_else(|| format!("\"{name}\" is no bound; give max, high, low or min"))?;
    Ok((bound, bytes_of(bound, bytes)?))
}

/// Parses the value of a bound, in bytes.
pub(crate) fn bytes_of(bound: Bound, text: &str) -> Result<u64, String> {
    if text == "none" { Ok(bound.default()) } else { size(text) }
}

pub(crate) fn main(options: &BoundOptions) -> Result<ExitCode> {
    let (path, bounds) = (escaped(options.path.as_bytes()), options.bounds.clone());
    let (_, (done, end)) = options.subject.look(move |process| {
        for page in process.pages()? {
            let Some(seen) = ReadGroups::ask(process, &page, Haste::Unhurried)? else { continue };
            let Some(group) = seen.find(&path) else { continue };
            let (channel, mut done) = (ControlChannel::of(process, &page)?, String::new());
            let end = bounds.iter().try_for_each(|&(bound, bytes)| {
                done += &format!("{path}: {}\n", change(&channel, group, bound, bytes)?);
                Ok(())
            });
            return Ok((done, end));
        }
        bail!("process {} has no group \"{path}\"; `neap stat PID --groups` lists its groups", process.pid)
    })?;
    print(|output| write!(output, "{done}"))?;
    end.map(|()| ExitCode::SUCCESS)
}

/// Requests a change of one bound. Returns the new and the previous value in words.
pub(crate) fn change(channel: &ControlChannel<'_>, group: &ReportedGroup, bound: Bound, bytes: u64) -> Result<String> {
    let request = ChannelRequest {
        what: BOUND,
        from: bound as u32,
        until: Some(bytes),
        group: group.id,
        ..ChannelRequest::default()
    };
    let shown = |bytes: u64| if bytes == UNLIMITED { "none".into() } else { human(bytes) };
    let before = group.bounds[bound as usize];
    match channel.ask(&request)? {
        0 => Ok(format!("{} {} (was {})", bound.name(), shown(bytes), shown(before))),
        NO_SUCH_GROUP => bail!("group \"{}\" is gone", group.name),
        other => bail!("the process refused the request (status {other})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_read_or_what_is_wrong_is_said() {
        assert_eq!(bound("max=64m"), Ok((Bound::Max, 64 << 20)));
        assert_eq!(bound("high=none"), Ok((Bound::High, UNLIMITED)));
        assert_eq!(bound("low=none"), Ok((Bound::Low, 0)));
        assert_eq!(bound("min=4096"), Ok((Bound::Min, 4096)));
        for bad in ["max", "most=1", "max=", "max=x", "max=-1", "max=1q"] {
            assert!(bound(bad).is_err(), "{bad}");
        }
    }
}
