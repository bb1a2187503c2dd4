//! One reading for the metrics: the totals of the chosen processes, then the memory groups of the
//! processes that have some. Both share one timeout, which is shorter than Prometheus's own.

use core::time::Duration;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;

use super::groups::{GroupShares, bound};
use crate::groups::ReadGroups;
use crate::look::census::{Busy, Chosen, Unread, UnreadCount, take};
use crate::look::control_channel::Haste;
use crate::look::fresh;
use crate::look::stat_reader::ProcessStatus;
use crate::look::totals::Totals;

/// Most processes with metrics. Those with the least resident memory are left out.
const MOST_PROCESSES: usize = 1000;

/// A process, and its groups if they were read.
pub(super) struct MeasuredProcess {
    pub(super) totals: Totals,
    pub(super) groups: Option<GroupShares>,
}

/// The result of one reading.
pub(super) struct Scrape {
    pub(super) processes: Vec<MeasuredProcess>,
    /// Processes that were read and have no metrics.
    pub(super) left_out: u64,
    pub(super) unread: BTreeMap<Unread, UnreadCount>,
    /// Processes whose groups were not read.
    pub(super) without_groups: u64,
    pub(super) took: Duration,
}

/// The processes to read, and the state between two readings.
pub(super) struct Reader {
    pub(super) chosen: Chosen,
    pub(super) time: Duration,
    pub(super) busy: Busy,
}

impl Reader {
    /// Reads the processes once.
    ///
    /// # Errors
    /// Returns an error if this command cannot read the list of processes, or cannot start a
    /// thread.
    pub(super) fn read(&self) -> Result<Scrape> {
        let start = Instant::now();
        let end = start + self.time;
        let survey = take(&self.chosen, end, &self.busy, Totals::size, Totals::look)?;
        let mut processes = survey.seen;
        processes.sort_unstable_by_key(|process| (Reverse(process.resident), process.pid));
        let left_out = processes.len().saturating_sub(MOST_PROCESSES) as u64;
        processes.truncate(MOST_PROCESSES);
        let mut processes: Vec<MeasuredProcess> =
            processes.into_iter().map(|totals| MeasuredProcess { totals, groups: None }).collect();
        let with_groups: Vec<i32> =
            processes.iter().map(|one| &one.totals).filter(|one| one.has_groups).map(|one| one.pid).collect();
        let mut without_groups = 0;
        if !with_groups.is_empty() {
            without_groups = with_groups.len() as u64;
            let survey =
                take(&Chosen::new(&with_groups), end, &self.busy, MeasuredProcess::size, MeasuredProcess::with_groups)?;
            let mut places: BTreeMap<i32, &mut MeasuredProcess> =
                processes.iter_mut().map(|process| (process.totals.pid, process)).collect();
            for process in survey.seen {
                without_groups -= u64::from(process.groups.is_some());
                // This reading is later, and another process may have the id by now.
                if let Some(place) = places.get_mut(&process.totals.pid) {
                    **place = process;
                }
            }
        }
        bound(processes.iter_mut().filter_map(|process| process.groups.as_mut()).collect());
        Ok(Scrape { processes, left_out, unread: survey.unread, without_groups, took: start.elapsed() })
    }
}

impl MeasuredProcess {
    /// Reads a process with its groups.
    fn with_groups(process: &ProcessStatus) -> Result<MeasuredProcess> {
        let page = fresh::page(process)?;
        let totals = Totals::of(process, &page)?;
        let read = if totals.has_groups { ReadGroups::ask(process, &page, Haste::Hurried)? } else { None };
        Ok(MeasuredProcess { totals, groups: read.as_ref().map(GroupShares::of) })
    }

    fn size(&self) -> usize {
        self.totals.size() + self.groups.as_ref().map_or(0, GroupShares::size)
    }
}
