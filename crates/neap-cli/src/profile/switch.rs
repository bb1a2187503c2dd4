//! Switches sampling on in a running process for a profile, and restores the former setting
//! afterwards.

use core::time::Duration;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use neap::settings::Setting;

use super::area::Area;
use crate::look::allowance::Allowance;
use crate::look::control_channel::{ControlChannel, LongWait};
use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::{Page, ProcessStatus, monotonic};
use crate::set::{change_by, change_setting};

/// Key of the option.
pub(crate) const KEY: &str = "profile";

/// Parses a number of bytes between two samples.
pub(crate) fn parse_every(text: &str) -> Result<String, String> {
    match Setting::parse(KEY, text) {
        Ok((_, 0)) => Err("it is the number of bytes between two samples, as 512k".to_string()),
        Ok(_) => Ok(text.to_string()),
        Err(refused) => Err(refused.to_string()),
    }
}

/// A changed setting.
#[derive(Clone, Copy)]
struct Change {
    setting: Setting,
    before: u64,
    now: u64,
    /// The last requested value. A process that was stopped meanwhile may take it later.
    asked: u64,
    /// Inode of the page of numbers of the changed program. If the process executes another
    /// program, that program has another page.
    page: Option<u64>,
}

impl Change {
    /// Whether the program is the changed one, and samples as the command has requested.
    fn is_own(&self, page: &Page) -> bool {
        [self.now, self.asked].contains(&mean(page)) && page.inode() == self.page
    }
}

/// Least time that a command waits until a process begins to sample. Without neap's thread, the
/// process begins in its next call that its CPU's stack cannot serve.
const LEAST_WAIT: Duration = Duration::from_secs(30);
/// Nanoseconds in which this command sees that the process has begun to sample.
const SEEN: u64 = 10_000_000;

/// Returns the longest wait before a profile of `seconds`.
pub(super) fn longest_wait(seconds: u64) -> Duration {
    Duration::from_secs(seconds).max(LEAST_WAIT)
}

/// Sampling that was switched on. Dropping this value restores the former setting.
pub(crate) struct SamplingSwitch {
    handle: Arc<ProcessHandle>,
    time: Duration,
    /// The changed setting; `None` if none was changed.
    changed: Option<Change>,
    /// Time since which the process samples, or at which this command found that it samples.
    pub(super) since: u64,
}

impl SamplingSwitch {
    /// Switches sampling on in a process. `every` is the interval that the user requests. Without
    /// it, a process that samples already goes on unchanged. With `wait`, waits beyond the
    /// allowance of `process`.
    pub(crate) fn on(
        process: &ProcessStatus,
        page: &Page,
        every: Option<&str>,
        time: Duration,
        wait: Option<LongWait<'_>>,
    ) -> Result<SamplingSwitch> {
        let since = monotonic();
        let mut switch = SamplingSwitch { handle: Arc::clone(&process.handle), time, changed: None, since };
        if every.is_none() && mean(page) > 0 {
            return Ok(switch);
        }
        let (setting, number) =
            Setting::parse(KEY, every.unwrap_or("on")).map_err(|refused| anyhow::anyhow!("{refused}"))?;
        let mut channel = ControlChannel::of(process, page)?;
        if let Some(wait) = wait {
            channel = channel.with_wait(wait);
        }
        let before = change_by(&channel, setting, number)?;
        switch.since = since.max(monotonic().saturating_sub(SEEN));
        switch.changed = Some(Change { setting, before, now: number, asked: number, page: page.inode() });
        Ok(switch)
    }

    /// Whether a process samples already.
    pub(crate) fn is_on(page: &Page) -> bool {
        mean(page) > 0
    }

    /// Changes the interval of samples that this switch has switched on. The former setting is
    /// restored as before.
    ///
    /// # Errors
    /// The process does not answer within a second, or another command has changed the setting.
    pub(crate) fn change(&mut self, every: u64) -> Result<()> {
        let Some(change) = &mut self.changed else { return Ok(()) };
        let time = self.time.min(Duration::from_secs(1));
        let process = ProcessStatus::read(&self.handle, Allowance::new(time))?;
        let page = process.page()?;
        let is_own = change.is_own(&page);
        ensure!(is_own, "another command has changed how process {} is sampled", process.pid);
        change.asked = every;
        change_setting(&process, &page, change.setting, every)?;
        change.now = every;
        Ok(())
    }

    /// Takes over an earlier switch of the process that failed to restore the setting. If this
    /// switch changed the setting itself, it restores only its own former value.
    pub(crate) fn after(mut self, earlier: Option<SamplingSwitch>) -> SamplingSwitch {
        let duty = earlier.and_then(|mut earlier| earlier.changed.take());
        self.changed = self.changed.or(duty);
        self
    }

    /// Puts the former value back, or says why it stays.
    pub(crate) fn off(mut self) -> Result<()> {
        let put = self.put_back();
        self.changed = None;
        put
    }

    /// Restores the former value. The caller may call this again after an error. Does nothing if
    /// the process has ended or executed another program, or if another command has changed the
    /// value since.
    pub(crate) fn put_back(&mut self) -> Result<()> {
        let Some(change) = self.changed else { return Ok(()) };
        if !self.handle.has_ended() {
            self.undo(change)?;
        }
        self.changed = None;
        Ok(())
    }

    fn undo(&self, change: Change) -> Result<()> {
        let Change { setting, before, .. } = change;
        let process = ProcessStatus::read(&self.handle, Allowance::new(self.time))?;
        let page = process.page()?;
        if !change.is_own(&page) {
            return Ok(());
        }
        let put = change_setting(&process, &page, setting, before);
        put.map(drop).with_context(|| {
            format!("sampling stays on; `neap set {} {KEY}={}` puts it back", process.pid, setting.value(before))
        })
    }
}

/// Returns the average number of bytes between two samples of a process. 0 if it does not sample.
fn mean(page: &Page) -> u64 {
    let head = page.file.as_ref().and_then(|file| Area::open(file).ok()?.head().ok());
    head.filter(|head| head.is_on).map_or(0, |head| head.mean)
}

impl Drop for SamplingSwitch {
    fn drop(&mut self) {
        // A destructor cannot return the error, so this one prints the error.
        if let Err(error) = self.put_back() {
            eprintln!("neap: {error:#}");
        }
    }
}
