//! The allocation sites with the most live bytes of a process, in tables made repeatedly while it
//! runs.
//!
//! # Design
//! A table is a snapshot of the sums by stack. Before a table is made, the places of new stacks are
//! resolved, so each stack gets its site once. If there are new names of generated code, the sites
//! in such code are looked up again.
//!
//! A [`SiteTable`] is plain data, since a [`LiveSites`] stays on its thread.

use core::time::Duration;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Result, ensure};

use super::begin;
use super::limits::ProfileLimits;
use super::resolved::{places_of, site_of};
use super::session::Session;
use super::sums::Amount;
use super::symbols::{SourceLine, Symbols};
use super::unwind::CodePlace;
use crate::look::allowance::Allowance;
use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::{Page, ProcessStatus, monotonic};

/// Most sites in a table. Further sites are summed.
const MOST_SITES: usize = 200;

/// A place in the sources whose allocations hold memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct HotSite {
    /// Name of the function. It is escaped, like `source`.
    pub(crate) function: String,
    /// Path of the source file. Empty if there is none.
    pub(crate) source: String,
    /// 0 if unknown.
    pub(crate) line: u32,
    pub(crate) live: Amount,
}

/// The live bytes of a process by site.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SiteTable {
    /// Time since the first look.
    pub(crate) seconds: f64,
    /// Bytes between two samples, on average.
    pub(crate) every: u64,
    /// Whether files and lines were looked for.
    pub(crate) has_lines: bool,
    /// Places whose lines did not fit into the memory or the time.
    pub(crate) without_lines: usize,
    pub(crate) live: Amount,
    /// Sites, the one with the most bytes first.
    pub(crate) sites: Vec<HotSite>,
    /// Number of sites beyond `sites`, and their sum.
    pub(crate) others: usize,
    pub(crate) other: Amount,
    /// Samples that are not counted, or whose free is not seen.
    pub(crate) lost: u64,
}

/// The site of a stack.
struct KnownSite {
    line: SourceLine,
    /// Whether frames of generated code are on the stack.
    is_generated: bool,
}

/// The sites of a process, while its samples are read.
pub(crate) struct LiveSites {
    session: Session,
    symbols: Symbols,
    /// Sites by the number of the stack.
    known: HashMap<u32, KnownSite>,
    start: Instant,
    /// Inode of the page. It changes when the process executes another program.
    page: Option<u64>,
}

impl LiveSites {
    /// Begins to read the samples of a process.
    ///
    /// # Errors
    /// Returns an error if the process has no samples, or they cannot be read.
    pub(crate) fn begin(process: &ProcessStatus, page: &Page) -> Result<LiveSites> {
        let session = begin(process, page, monotonic(), ProfileLimits::of_user(&process.user))?;
        let symbols = Symbols::without_files(&session.unwinder);
        Ok(LiveSites { session, symbols, known: HashMap::new(), start: Instant::now(), page: page.inode() })
    }

    /// Reads the records that are new. Returns the time to wait before the next look.
    pub(crate) fn poll(&mut self) -> Result<Duration> {
        self.session.poll()
    }

    /// Reads samples for a time, until the process or its sampling ends, or until `stop`.
    pub(crate) fn watch(&mut self, time: Duration, stop: &AtomicBool) -> Result<()> {
        self.session.watch(time, stop, &mut |_, _| {})
    }

    /// Returns the live bytes by site. `None` if `goes_on` returned `false` meanwhile. `time`
    /// bounds the check of the process, and the search for lines.
    ///
    /// # Errors
    /// Returns an error if the process has ended or executed another program, or if its sampling
    /// was switched off.
    pub(crate) fn table(&mut self, time: Duration, goes_on: &dyn Fn() -> bool) -> Result<Option<SiteTable>> {
        self.poll()?;
        ensure_same(&self.session.handle, self.page, time)?;
        ensure!(!self.session.is_over, "another command has switched sampling off");
        let mut table = self.totals();
        let LiveSites { session, symbols, known, .. } = self;
        let mut stacks: HashMap<u32, Amount> = HashMap::new();
        for cell in session.collector.cells().iter().filter(|cell| cell.live.samples > 0) {
            stacks.entry(cell.key.stack).or_default().add(cell.live);
        }
        if symbols.follow(&session.unwinder) {
            known.retain(|_, site| !site.is_generated);
        }
        let new = stacks.keys().filter(|stack| !known.contains_key(stack));
        let frames = new.flat_map(|&stack| session.collector.stacks[stack as usize].frames.iter().copied());
        let places: HashSet<CodePlace> = frames.collect();
        // `resolve` reads the ring meanwhile, since it may be full within half a second.
        symbols.resolve(places.into_iter(), time, &mut || session.poll().is_ok() && goes_on());
        let frames_of = |stack: u32| &session.collector.stacks[stack as usize].frames;
        let mut sites: HashMap<SourceLine, Amount> = HashMap::new();
        for (stack, amount) in stacks {
            let site = known.entry(stack).or_insert_with(|| {
                let frames = frames_of(stack);
                let is_generated = frames.iter().any(|frame| frame.file.is_none());
                KnownSite { line: site_of(&places_of(frames, symbols)), is_generated }
            });
            sites.entry(site.line.clone()).or_default().add(amount);
        }
        table.without_lines = symbols.without_lines;
        table.fill(sites);
        Ok(goes_on().then_some(table))
    }

    /// A table without sites.
    fn totals(&self) -> SiteTable {
        let summed = self.session.summed();
        let losses = summed.losses;
        SiteTable {
            seconds: self.start.elapsed().as_secs_f64(),
            every: summed.every,
            has_lines: summed.unwinder.limits().has_lines,
            live: summed.collector.live_total(),
            lost: losses.overwritten.saturating_add(losses.without_slot).saturating_add(losses.left_out),
            ..SiteTable::default()
        }
    }
}

impl SiteTable {
    fn fill(&mut self, sites: HashMap<SourceLine, Amount>) {
        let mut sites: Vec<(SourceLine, Amount)> = sites.into_iter().collect();
        sites.sort_by(|(one, bytes), (other, other_bytes)| {
            other_bytes.bytes.total_cmp(&bytes.bytes).then_with(|| one.cmp(other))
        });
        let beyond = sites.split_off(sites.len().min(MOST_SITES));
        self.others = beyond.len();
        beyond.into_iter().for_each(|(_, amount)| self.other.add(amount));
        let site = |(line, live): (SourceLine, Amount)| HotSite {
            function: line.function.to_string(),
            source: line.source.to_string(),
            line: line.line,
            live,
        };
        self.sites = sites.into_iter().map(site).collect();
    }
}

/// Checks that a process still runs the program whose page has this inode. If the page cannot be
/// read now, as during an exec, the next call checks again.
fn ensure_same(handle: &Arc<ProcessHandle>, page: Option<u64>, time: Duration) -> Result<()> {
    ensure!(!handle.has_ended(), "process {} has ended", handle.pid);
    let now = ProcessStatus::read(handle, Allowance::new(time)).and_then(|process| process.page());
    let is_other = now.is_ok_and(|now| now.inode() != page);
    ensure!(!is_other, "process {} has executed another program", handle.pid);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::area::SampledAllocation;

    #[test]
    fn sites_beyond_the_most_are_summed_and_the_largest_come_first() {
        let amount =
            |bytes: u64| Amount::of(&SampledAllocation { size: bytes, mean: 1, ..SampledAllocation::default() });
        let line = |number: u32| SourceLine { function: "f".into(), line: number, ..SourceLine::default() };
        let mut table = SiteTable::default();
        let count = MOST_SITES as u32 + 3;
        table.fill((1..=count).map(|number| (line(number), amount(u64::from(number) * 100))).collect());
        assert_eq!((table.sites.len(), table.others), (MOST_SITES, 3));
        assert_eq!((table.sites[0].line, table.sites[MOST_SITES - 1].line), (count, 4));
        assert_eq!((table.other.samples, table.other.bytes.round() as u64), (3, 600));
    }
}
