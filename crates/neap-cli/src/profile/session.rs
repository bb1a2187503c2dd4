//! Takes a profile of one process: repeatedly reads the area of samples, unwinds their stacks and
//! sums.

use core::time::Duration;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Result;

use super::area::{Area, AreaHead, RingRecord};
use super::code_source::CodeSource;
use super::collect::Collector;
use super::limits::ProfileLimits;
use super::unwind::{Callers, Unwinder};
use crate::groups::ReadGroups;
use crate::look::allowance::Allowance;
use crate::look::control_channel::Haste;
use crate::look::foreign::escaped;
use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::{ProcessStatus, monotonic};

/// Time between two looks, unless one has found so many bytes that the ring may overflow.
pub(crate) const PAUSE: Duration = Duration::from_millis(10);
const MANY: u64 = 1 << 20;
/// Time between two looks then.
const SHORT: Duration = Duration::from_millis(1);
/// Time after which the session reads a thread's name, and the names of groups, again.
const FRESH: Duration = Duration::from_secs(1);
/// Names of threads that are kept at a time.
const MOST_THREADS: usize = 1 << 13;
/// Longest time in which one look unwinds samples. It only counts further samples. Unwinding may
/// take long if a process has many mappings or thread names.
const LONGEST_LOOK: Duration = Duration::from_secs(1);
/// Longest time in which a session adds samples from slots, whose records it has not read. A part
/// of the session's duration comes in addition (`PART_OF_SLOTS`), since each overrun of the ring
/// needs a look at the slots.
const LONGEST_SLOTS: Duration = Duration::from_secs(1);
/// The additional part is the session's duration over this number.
const PART_OF_SLOTS: u32 = 4;
/// Most bytes of a report of groups, most bytes of all kept names of groups, and most characters of
/// one name.
const MOST_OF_GROUPS: usize = 8 << 20;
const MOST_GROUP_NAMES: usize = 2 << 20;
const LONGEST_GROUP: usize = 400;
/// Nanoseconds in which a process writes a sample, its record and its slot.
const WRITING: u64 = 100_000_000;

/// Names of threads, by the kernel's id.
#[derive(Debug, Default)]
struct ThreadNames(HashMap<u32, (Instant, String)>);

impl ThreadNames {
    fn name(&mut self, handle: &ProcessHandle, thread: u32) -> &str {
        if self.0.len() >= MOST_THREADS {
            self.0.clear();
        }
        let now = Instant::now();
        let entry = self.0.entry(thread).or_insert_with(|| (now, String::new()));
        if entry.1.is_empty() || now.duration_since(entry.0) >= FRESH {
            entry.0 = now;
            match handle.read(&format!("task/{thread}/comm")) {
                Ok(name) => entry.1 = escaped(name.trim_ascii_end()),
                // The last name of a thread that has ended stays.
                Err(_) if entry.1.is_empty() => entry.1 = "(ended thread)".to_string(),
                Err(_) => {}
            }
        }
        &entry.1
    }

    /// Returns the known name, without reading from the process.
    fn known(&self, thread: u32) -> &str {
        self.0.get(&thread).map_or("(unknown thread)", |(_, name)| name)
    }
}

/// A profile while it is taken.
pub(crate) struct Session {
    pub(crate) handle: Arc<ProcessHandle>,
    area: Area,
    pub(crate) unwinder: Unwinder,
    pub(crate) collector: Collector,
    threads: ThreadNames,
    groups: HashMap<u64, Rc<str>>,
    group_bytes: usize,
    asked_groups: Option<Instant>,
    head_at_start: AreaHead,
    head: AreaHead,
    /// Time when the session began.
    start: Instant,
    /// Time in which samples of no record were added.
    adding: Duration,
    /// Whether sampling was switched off meanwhile.
    pub(crate) is_over: bool,
}

impl Session {
    /// Begins a profile of a process whose page of numbers is in `page`. The view of allocated
    /// bytes covers allocations from the time `began` on.
    pub(crate) fn begin(
        handle: &Arc<ProcessHandle>,
        page: &File,
        began: u64,
        limits: ProfileLimits,
    ) -> Result<Session> {
        let unwinder = Unwinder::new(CodeSource::Process(Arc::clone(handle)), limits);
        let mut session = Session::of(handle, Area::open(page)?, unwinder, began)?;
        session.unwinder.refresh(Duration::ZERO);
        session.poll()?;
        session.reconcile()?;
        Ok(session)
    }

    /// A session on an area with these parts, before its first look.
    pub(super) fn of(handle: &Arc<ProcessHandle>, area: Area, unwinder: Unwinder, began: u64) -> Result<Session> {
        let head = area.head()?;
        Ok(Session {
            handle: Arc::clone(handle),
            area,
            collector: Collector::new(began, unwinder.limits()),
            unwinder,
            threads: ThreadNames::default(),
            groups: HashMap::new(),
            group_bytes: 0,
            asked_groups: None,
            head_at_start: head,
            head,
            start: Instant::now(),
            adding: Duration::ZERO,
            is_over: false,
        })
    }

    /// Reads the records that are new. Returns the time to wait before the next look.
    pub(crate) fn poll(&mut self) -> Result<Duration> {
        let (overruns, before) = (self.area.overruns, self.head.head);
        let Session { area, unwinder, collector, threads, handle, .. } = self;
        let end = Instant::now() + LONGEST_LOOK;
        let drained = area.drain(&mut |record| match record {
            RingRecord::Alloc(..) if Instant::now() >= end => collector.left_out += 1,
            RingRecord::Alloc(sample, stack) => {
                let callers = if stack.bytes.is_empty() { Callers::default() } else { unwinder.callers(&stack) };
                collector.allocated(&sample, &callers, threads.name(handle, sample.thread));
            }
            RingRecord::Free(number, time) => collector.freed(number, Some(time)),
        });
        self.is_over |= drained.is_err() && area.is_gone();
        if self.is_over {
            return Ok(PAUSE);
        }
        self.head = drained?;
        if self.area.overruns != overruns {
            self.reconcile()?;
        }
        Ok(if self.head.head.saturating_sub(before) > MANY { SHORT } else { PAUSE })
    }

    /// Reads samples for a time. Returns early when the process or its sampling ends, or `stop` is
    /// set. After each look, calls `looked` with the elapsed time.
    pub(crate) fn watch(
        &mut self,
        time: Duration,
        stop: &AtomicBool,
        looked: &mut dyn FnMut(&mut Session, Duration),
    ) -> Result<()> {
        let (start, mut pause) = (Instant::now(), PAUSE);
        // Relaxed: the flag publishes no other data.
        while start.elapsed() < time && !stop.load(Ordering::Relaxed) && !self.is_over && !self.handle.has_ended() {
            std::thread::sleep(pause.min(time.saturating_sub(start.elapsed())));
            pause = self.poll()?;
            looked(self, start.elapsed());
        }
        self.poll()?;
        self.reconcile()
    }

    /// Returns the number of samples that the process has taken, as of the last look.
    pub(crate) fn taken(&self) -> u64 {
        self.head.taken
    }

    /// Corrects the live samples from the process's slots, since records of frees may be lost.
    pub(crate) fn reconcile(&mut self) -> Result<()> {
        if self.is_over {
            return Ok(());
        }
        let until = monotonic().saturating_sub(WRITING);
        let read = self.area.highest().unwrap_or(self.head.taken);
        let missing = self.collector.reconcile(|each| self.area.slots(each), until, read)?;
        let begun = Instant::now();
        let end = begun + (LONGEST_SLOTS + self.start.elapsed() / PART_OF_SLOTS).saturating_sub(self.adding);
        let mut stack = Vec::new();
        for sample in missing {
            // Beyond the time, samples count without their stacks, and threads without new names.
            let is_late = Instant::now() >= end;
            let kept = if is_late { Ok(None) } else { self.area.kept_stack(&sample, &mut stack) };
            let Ok(kept) = kept else { continue };
            let callers = kept.map_or_else(Callers::default, |stack| self.unwinder.callers(&stack));
            let threads = &mut self.threads;
            let thread = if is_late { threads.known(sample.thread) } else { threads.name(&self.handle, sample.thread) };
            self.collector.allocated(&sample, &callers, thread);
        }
        self.adding += begun.elapsed();
        Ok(())
    }

    /// Asks for the names of groups if there are new ones, and they were not asked for just now.
    pub(crate) fn learn_groups(&mut self) {
        let is_new = self.collector.cells().iter().any(|cell| {
            let id = cell.key.group;
            id != 0 && !self.groups.contains_key(&id)
        });
        if !is_new || self.asked_groups.is_some_and(|at| at.elapsed() < FRESH) {
            return;
        }
        self.asked_groups = Some(Instant::now());
        let seen = ProcessStatus::read(&self.handle, Allowance::of_bytes(MOST_OF_GROUPS, LONGEST_LOOK))
            .and_then(|process| ReadGroups::ask(&process, &process.page()?, Haste::Unhurried));
        let wanted: HashSet<u64> = self.collector.cells().iter().map(|cell| cell.key.group).collect();
        for group in seen.ok().flatten().map(|seen| seen.groups).unwrap_or_default() {
            let path = if group.path.is_empty() { "/" } else { group.path.as_str() };
            let path = match path.char_indices().nth(LONGEST_GROUP) {
                Some((end, _)) => format!("{}...", &path[..end]),
                None => path.to_string(),
            };
            if wanted.contains(&group.id) && self.group_bytes + path.len() <= MOST_GROUP_NAMES {
                self.group_bytes += path.len();
                self.groups.insert(group.id, path.into());
            }
        }
    }

    /// The sums so far.
    pub(crate) fn summed(&self) -> Summed<'_> {
        Summed {
            unwinder: &self.unwinder,
            collector: &self.collector,
            groups: &self.groups,
            every: self.head.mean,
            losses: self.losses(),
        }
    }

    /// Samples that the process could not keep, or that this command could not read.
    fn losses(&self) -> Losses {
        Losses {
            overwritten: self.area.lost(),
            without_slot: self.head.without_slot.saturating_sub(self.head_at_start.without_slot),
            unreadable_stack: self.head.without_stack.saturating_sub(self.head_at_start.without_stack),
            damaged: self.area.damaged,
            not_kept: self.area.not_kept,
            left_out: self.collector.left_out,
        }
    }
}

/// The sums of samples, and the sources of their names.
pub(crate) struct Summed<'a> {
    pub(crate) unwinder: &'a Unwinder,
    pub(crate) collector: &'a Collector,
    /// Paths of memory groups, by id.
    pub(crate) groups: &'a HashMap<u64, Rc<str>>,
    /// Bytes between two samples, on average, at the end.
    pub(crate) every: u64,
    pub(crate) losses: Losses,
}

impl Summed<'_> {
    /// Returns the path of a group. It is empty if there is no group.
    pub(crate) fn group(&self, id: u64) -> Rc<str> {
        match self.groups.get(&id) {
            _ if id == 0 => "".into(),
            Some(path) => Rc::clone(path),
            None => format!("group {id}").into(),
        }
    }
}

/// Counts of samples that a profile lacks, or has in part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Losses {
    /// Written over before they were read.
    pub(crate) overwritten: u64,
    /// The process had no free slot for them, so their frees are not recorded.
    pub(crate) without_slot: u64,
    /// The process could not read the stack.
    pub(crate) unreadable_stack: u64,
    /// Live, and the process had no room to keep the stack.
    pub(crate) not_kept: u64,
    /// Blocks of the ring that ended at a damaged record, and damaged kept stacks.
    pub(crate) damaged: u64,
    /// Samples beyond the bounds of this command.
    pub(crate) left_out: u64,
}
