//! Queue of jobs, without a lock: the states of a job, and which job is next.
//!
//! # Design
//!
//! | state | event | condition, first match | next state |
//! |---|---|---|---|
//! | free | job is posted | | posted |
//! | posted | request that the job can serve | | posted, for both |
//! | posted | reclaimer takes it | | taken |
//! | posted | waiter gives up | the last, and no other caller wants it | free |
//! | taken | request of the node | does not wait | taken, wanted again |
//! | taken | reclaimer finishes | there are waiters | done |
//! | taken | reclaimer finishes | pass for a node that is wanted again | posted |
//! | taken | reclaimer finishes | | free |
//! | taken | reclaimer is written off | there are waiters, or it is wanted | posted |
//! | taken | reclaimer is written off | | free |
//! | done | waiter reads the answer, or gives up | the last | free |
//! | any | fork, in the child | | free |
//!
//! A waiter that gives up a taken job only lowers the job's count of waiters.
//!
//! # Locking
//!
//! This module has no lock: the caller holds the job queue's mutex.

use crate::ShrinkerId;
use neap_base::platform::nodes::MAX_NODES;
use neap_groups::{GroupId, Patience};

/// Number of places for jobs other than [`ReclaimJob::Requests`].
pub(super) const JOBS: usize = 16;
/// Places for [`ReclaimJob::Requests`]: one job for each reclaimer that works, and one more that
/// waits to be taken.
const SERVERS: usize = MAX_NODES + 1;

/// Task of a reclaimer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReclaimJob {
    /// Reclaim this number of bytes from a group and its descendants, for all waiters together.
    Group(GroupId, u64),
    /// Make room for this number of bytes in the host's budget.
    Budget(u64),
    /// Reclaim the bytes that a group and its ancestors use above their `high`.
    AboveHigh(GroupId),
    /// Ask a shrinker for its number of objects of a group on a node.
    CountObjects(ShrinkerId, GroupId, u32),
    /// Let a shrinker scan this number of objects of a group on a node.
    ScanObjects(ShrinkerId, GroupId, u32, u64),
    /// Reclaim until a node is not short any more.
    Node(usize),
    /// Serve one request of a group: the next that is due
    /// ([`Groups::take_request`](neap_groups::Groups::take_request)).
    Requests,
}

impl ReclaimJob {
    /// Returns a job that does both, if there is one.
    fn and(self, other: ReclaimJob) -> Option<ReclaimJob> {
        match (self, other) {
            (ReclaimJob::Group(group, bytes), ReclaimJob::Group(same, others)) if group == same => {
                Some(ReclaimJob::Group(group, bytes.saturating_add(others)))
            }
            (ReclaimJob::Budget(bytes), ReclaimJob::Budget(others)) => Some(ReclaimJob::Budget(bytes.max(others))),
            _ => (self == other).then_some(self),
        }
    }
}

/// State of a place in the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum JobState {
    Free,
    Posted,
    /// The reclaimer with this number has taken the job.
    Taken(u32),
    /// The job is done, and has freed this number of bytes.
    Done(u64),
}

#[derive(Clone, Copy, Debug)]
struct Job {
    state: JobState,
    task: ReclaimJob,
    waiters: u32,
    /// Whether a caller that does not wait requested the job. If so, it runs even if all waiters
    /// give up. A taken job for a node then runs once more.
    wanted: bool,
    /// Sequence number; the lowest is the oldest job.
    age: u64,
}

/// The jobs and their order.
#[derive(Debug)]
pub(super) struct Queue {
    /// Jobs of [`ReclaimJob::Requests`] lie behind the other ones.
    jobs: [Job; JOBS + SERVERS],
    /// Number of jobs created so far.
    posted: u64,
    /// A thread waits for a free place.
    is_full: bool,
}

/// What a thread does after it has posted a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Poster {
    Leaves,
    Waits,
}

/// Result of [`Queue::enqueue`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Enqueued {
    pub(super) index: usize,
    /// Whether a reclaimer is still to take the job; false if one has it already.
    pub(super) is_posted: bool,
}

/// Result of [`Queue::poll`].
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueAnswer {
    pub(super) bytes: u64,
    /// The place of the job became free.
    pub(super) is_freed: bool,
}

impl Queue {
    pub(super) const fn new() -> Queue {
        let job = Job { state: JobState::Free, task: ReclaimJob::Node(0), waiters: 0, wanted: false, age: 0 };
        Queue { jobs: [job; JOBS + SERVERS], posted: 0, is_full: false }
    }

    /// Returns the index of a free place for a job.
    fn room_for(&self, task: ReclaimJob) -> Option<usize> {
        let places = if task == ReclaimJob::Requests { JOBS..JOBS + SERVERS } else { 0..JOBS };
        places.into_iter().find(|&place| self.jobs[place].state == JobState::Free)
    }

    fn count(&self, is: impl Fn(JobState) -> bool) -> u32 {
        self.jobs.iter().filter(|job| is(job.state)).count() as u32
    }

    /// Returns the number of posted jobs.
    pub(super) fn posted(&self) -> u32 {
        self.count(|state| state == JobState::Posted)
    }

    /// Returns the number of taken jobs.
    pub(super) fn taken(&self) -> u32 {
        self.count(|state| matches!(state, JobState::Taken(_)))
    }

    /// Posts a job, or adds it to one that serves both; `None` if there is no room. If the poster
    /// waits, [`Queue::poll`] must follow until it returns an answer.
    pub(super) fn enqueue(&mut self, task: ReclaimJob, poster: Poster) -> Option<Enqueued> {
        let waits = poster == Poster::Waits;
        let same = |job: &Job| match job.state {
            JobState::Posted => job.task.and(task),
            // A pass that has begun does not serve a new request, except a pass for a node: two
            // passes over a node at a time bring no more than one. Such a pass may already have
            // seen enough memory:
            // 1. The pass finds the node above its high watermark.
            // 2. A thread allocates, finds the node at its low watermark, and comes here.
            // 3. The pass ends.
            // So the job is marked to run again. The queue's mutex orders steps 2 and 3.
            JobState::Taken(_) if !waits => job.task.and(task).filter(|both| matches!(both, ReclaimJob::Node(_))),
            _ => None,
        };
        let (index, is_new) = match self.jobs.iter().position(|job| same(job).is_some()) {
            Some(index) => (index, false),
            None => match self.room_for(task) {
                Some(index) => (index, true),
                None => {
                    self.is_full |= waits;
                    return None;
                }
            },
        };
        if is_new {
            self.posted += 1;
            self.jobs[index] = Job { state: JobState::Posted, task, waiters: 0, wanted: false, age: self.posted };
        }
        let job = &mut self.jobs[index];
        job.task = if is_new { task } else { same(job).unwrap_or(task) };
        job.waiters += u32::from(waits);
        job.wanted |= !waits;
        Some(Enqueued { index, is_posted: job.state == JobState::Posted })
    }

    /// Returns the result of a job that is done, or 0 if its waiter gives up. The waiter is not
    /// counted after an answer.
    pub(super) fn poll(&mut self, index: usize, patience: Patience) -> Option<QueueAnswer> {
        let job = self.jobs.get_mut(index)?;
        let bytes = match job.state {
            JobState::Done(bytes) => bytes,
            _ if patience == Patience::GivesUp => 0,
            // The ticket is one of the parent process.
            JobState::Free => 0,
            _ => return None,
        };
        job.waiters = job.waiters.saturating_sub(1);
        // A job that no caller wants any more is not begun.
        let is_freed = match job.state {
            JobState::Done(_) => job.waiters == 0,
            JobState::Posted => job.waiters == 0 && !job.wanted,
            _ => false,
        };
        if is_freed {
            job.state = JobState::Free;
        }
        Some(QueueAnswer { bytes, is_freed })
    }

    /// Gives the oldest posted job to a reclaimer; `None` if there is none.
    pub(super) fn take(&mut self, reclaimer: u32) -> Option<ReclaimJob> {
        let posted = self.jobs.iter_mut().filter(|job| job.state == JobState::Posted);
        let oldest = posted.min_by_key(|job| job.age)?;
        oldest.state = JobState::Taken(reclaimer);
        oldest.wanted &= !matches!(oldest.task, ReclaimJob::Node(_));
        Some(oldest.task)
    }

    /// Takes a reclaimer's job away from the reclaimer. With `done`, the job has freed that number
    /// of bytes. Without it, another reclaimer is to run the job.
    ///
    /// If the job was a pass for a node, calls `idle` with that node. Returns the new state of the
    /// job; `None` if the reclaimer had none.
    pub(super) fn release_job(
        &mut self,
        reclaimer: u32,
        done: Option<u64>,
        idle: impl FnOnce(usize),
    ) -> Option<JobState> {
        let job = self.jobs.iter_mut().find(|job| job.state == JobState::Taken(reclaimer))?;
        let mut goes_on = done.is_none() && (job.waiters > 0 || job.wanted);
        if let ReclaimJob::Node(node) = job.task {
            idle(node);
            goes_on |= job.wanted;
        }
        job.state = match done {
            Some(bytes) if job.waiters > 0 => JobState::Done(bytes),
            _ if goes_on => JobState::Posted,
            _ => JobState::Free,
        };
        Some(job.state)
    }

    /// Returns whether a thread waits for a free place, and forgets that.
    pub(super) fn take_full(&mut self) -> bool {
        core::mem::take(&mut self.is_full)
    }

    /// Frees all places.
    pub(super) fn forget_all(&mut self) {
        self.jobs.iter_mut().for_each(|job| job.state = JobState::Free);
    }
}
