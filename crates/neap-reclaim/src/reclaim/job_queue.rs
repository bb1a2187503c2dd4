//! Job queue of the reclaimer threads, the count of these threads, and their wake-ups.
//!
//! Threads that need memory may hold locks of the program, so they run no callbacks. They post jobs
//! here. *Reclaimers* are threads that hold no such locks; they run the jobs.
//!
//! # Design
//!
//! * Requests for the same group share a job that has not begun. The oldest job is taken first.
//! * Each reclaimer has at most one job, which records the reclaimer's number.
//! * The queue (`job_queue/queue.rs`) and the pool of reclaimers (`job_queue/pool.rs`) are plain
//!   data under one mutex. Their tables list the states of a job, and the events that change the
//!   count of reclaimers.
//! * A job has no data of its waiters but their number. A waiter that gives up leaves at once. A
//!   later answer of its job cannot reach another waiter.
//!
//! # Invariants
//!
//! A watcher writes off a reclaimer whose callback does not return. The watcher and the returning
//! reclaimer both look for a job that this reclaimer's number has taken. The first one that finds
//! it releases the job and changes the count of reclaimers. The other one finds no such job.
//!
//! # Locking
//!
//! One mutex protects queue and pool. It is taken inside the fork gate, and no other lock is taken
//! under it. This module runs no callbacks and creates no threads.
//!
//! # Concurrency
//!
//! A thread sleeps outside the gate, on a futex word that it reads before it examines the queue. A
//! thread that changes the queue changes that word afterwards, and wakes sleepers:
//!
//! | W waits | P posts |
//! |---|---|
//! | 1. reads the word | |
//! | 2. examines the queue, finds nothing | |
//! | | 3. posts a job |
//! | | 4. changes the word; wakes no thread |
//! | 5. does not sleep: the word differs | |
//!
//! A model checker explores this module (`tests/loom_job_queue`).

mod pool;
mod queue;

use neap_base::gate::Inside;
use neap_base::mutex::{Guard, Mutex};
use neap_base::sync::{AtomicU32, Ordering, wait, wait_for, wake};
use neap_groups::Patience;
use pool::Pool;
use queue::{Enqueued, JobState, Poster, Queue, QueueAnswer};

pub(super) use pool::LOST_MAX;
pub use pool::Reclaimers;
pub use queue::ReclaimJob;

/// Numbers of jobs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JobCount {
    /// Those that no reclaimer has taken.
    pub posted: u32,
    /// Those that a reclaimer works on.
    pub taken: u32,
}

/// Data under the mutex.
#[derive(Debug)]
struct QueueAndPool {
    queue: Queue,
    pool: Pool,
}

impl QueueAndPool {
    fn is_short(&self, least: u32) -> bool {
        self.pool.is_short(least, self.queue.posted(), self.queue.taken())
    }
}

/// The job queue, and the count of reclaimers.
#[derive(Debug)]
pub struct JobQueue {
    inner: Mutex<QueueAndPool>,
    /// Futex words. `posted` changes when a job can be taken: reclaimers sleep on it. `done`
    /// changes when a job is done or a place becomes free: waiters sleep on it.
    posted: AtomicU32,
    done: AtomicU32,
}

/// A job that a thread waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Ticket(usize);

/// A thread that waits for a job, or for room to post it.
#[derive(Debug)]
pub struct Waiter {
    job: ReclaimJob,
    /// `None` while there was no room.
    ticket: Option<Ticket>,
    /// Value of `JobQueue::done` before the last look at the queue.
    done_seq: u32,
}

impl Waiter {
    /// Makes a waiter for a job that [`JobQueue::ask`] will post.
    pub fn new(job: ReclaimJob) -> Waiter {
        Waiter { job, ticket: None, done_seq: 0 }
    }
}

/// Value of the word `posted`, read before a look that found no job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Idle(u32);

/// Next step of a reclaimer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Run this job.
    Job(ReclaimJob),
    /// [Sleep](JobQueue::sleep) with this value: there is no job.
    Nothing(Idle),
    /// The thread must end. It is not in the count, since it is a copy of a reclaimer of the parent
    /// process, or all reclaimers were dismissed.
    End,
}

impl Default for JobQueue {
    fn default() -> JobQueue {
        let inner = QueueAndPool { queue: Queue::new(), pool: Pool::new() };
        JobQueue { inner: Mutex::new(inner), posted: AtomicU32::new(0), done: AtomicU32::new(0) }
    }
}

impl JobQueue {
    /// Posts a job without waiting for it. Returns whether there was room.
    pub fn post(&self, _: &Inside<'_>, job: ReclaimJob) -> bool {
        self.enqueue(job, Poster::Leaves).is_some()
    }

    /// Posts the waiter's job, once, as soon as there is room.
    ///
    /// [`JobQueue::answer`] must follow. If that returns `None`, [`JobQueue::wait`] must follow,
    /// and then this again.
    pub fn ask(&self, _: &Inside<'_>, waiter: &mut Waiter) {
        // Read before a look at the queue: here that for room, in `answer` that for the result.
        waiter.done_seq = self.done_seq();
        waiter.ticket = waiter.ticket.or_else(|| self.enqueue(waiter.job, Poster::Waits));
    }

    /// Returns the bytes that the job freed, once it is done; 0 if the waiter gives up before.
    /// Returns `None` if the wait goes on. After an answer the waiter must not be used again.
    pub fn answer(&self, _: &Inside<'_>, waiter: &Waiter, patience: Patience) -> Option<u64> {
        match waiter.ticket {
            Some(ticket) => self.poll(ticket, patience),
            None => (patience == Patience::GivesUp).then_some(0),
        }
    }

    /// Sleeps until a job is done or a place becomes free, at most for this number of nanoseconds.
    /// Returns at once if that has happened since [`JobQueue::ask`].
    pub fn wait(&self, waiter: &Waiter, nanoseconds: u64) {
        wait_for(&self.done, waiter.done_seq, nanoseconds);
    }

    /// Posts a job; `None` if there is no room. If the poster waits, [`JobQueue::poll`] must follow
    /// until it returns an answer.
    fn enqueue(&self, job: ReclaimJob, poster: Poster) -> Option<Ticket> {
        let Enqueued { index, is_posted } = self.inner.lock().queue.enqueue(job, poster)?;
        if is_posted {
            self.notify_workers();
        }
        Some(Ticket(index))
    }

    /// Wakes one sleeping reclaimer. The caller has made a job one that can be taken.
    fn notify_workers(&self) {
        self.posted.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `posted_seq`.
        wake(&self.posted, 1);
    }

    /// Wakes all waiters: a job is done, or there is room.
    fn notify_waiters(&self) {
        self.done.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `done_seq`.
        wake(&self.done, i32::MAX as u32);
    }

    /// Wakes the threads that the new state of a job concerns, after releasing the mutex.
    fn finish_update(&self, mut inner: Guard<'_, QueueAndPool>, state: JobState) {
        let is_room = state == JobState::Free && inner.queue.take_full();
        drop(inner);
        match state {
            // A reclaimer may sleep while another one was written off. With one job and one
            // reclaimer left, no further one is created, so the sleeping one must be woken.
            JobState::Posted => self.notify_workers(),
            JobState::Done(_) => self.notify_waiters(),
            _ if is_room => self.notify_waiters(),
            _ => {}
        }
    }

    /// Returns the result of a job that is done, or 0 if its waiter gives up. After an answer the
    /// ticket must not be used again.
    fn poll(&self, ticket: Ticket, patience: Patience) -> Option<u64> {
        let mut inner = self.inner.lock();
        let QueueAnswer { bytes, is_freed } = inner.queue.poll(ticket.0, patience)?;
        if is_freed {
            self.finish_update(inner, JobState::Free);
        }
        Some(bytes)
    }

    /// Takes the oldest job for a reclaimer.
    pub fn take(&self, _: &Inside<'_>, reclaimer: u32) -> Next {
        let idle = Idle(self.posted_seq());
        let mut inner = self.inner.lock();
        if inner.pool.is_gone(reclaimer) {
            return Next::End;
        }
        inner.queue.take(reclaimer).map_or(Next::Nothing(idle), Next::Job)
    }

    /// Ends the job of a reclaimer, unless another one has it. Calls `idle` as
    /// [`JobQueue::write_off`] does.
    pub fn finish(&self, _: &Inside<'_>, reclaimer: u32, bytes: u64, idle: impl FnOnce(usize)) {
        let mut inner = self.inner.lock();
        if let Some(state) = inner.queue.release_job(reclaimer, Some(bytes), idle) {
            self.finish_update(inner, state);
        }
    }

    /// Writes off a reclaimer with a callback that does not return, and posts its job again.
    ///
    /// If the job was a pass for a node, calls `idle` with that node, under the mutex.
    pub fn write_off(&self, _: &Inside<'_>, reclaimer: u32, idle: impl FnOnce(usize)) {
        let mut inner = self.inner.lock();
        // `None`: the reclaimer has returned already.
        if let Some(state) = inner.queue.release_job(reclaimer, None, idle) {
            inner.pool.write_off();
            self.finish_update(inner, state);
        }
    }

    /// Ends a reclaimer that was written off and has returned. Calls `idle` as
    /// [`JobQueue::write_off`] does.
    pub fn end(&self, _: &Inside<'_>, reclaimer: u32, idle: impl FnOnce(usize)) {
        let mut inner = self.inner.lock();
        if inner.pool.is_gone(reclaimer) {
            return;
        }
        match inner.queue.release_job(reclaimer, None, idle) {
            // The watcher has not reached `write_off` yet; it will find no job there.
            Some(state) => {
                inner.pool.end_working();
                self.finish_update(inner, state);
            }
            None => inner.pool.end_lost(),
        }
    }

    /// Returns whether there are fewer reclaimers than `least`, or more posted jobs than idle
    /// reclaimers.
    pub fn is_short(&self, _: &Inside<'_>, least: u32) -> bool {
        self.inner.lock().is_short(least)
    }

    /// Returns the number of a reclaimer that the caller is to create, and counts it.
    ///
    /// Returns `None` if reclaimers are not [short](JobQueue::is_short), or `most` of them work.
    /// Also returns `None` if too many are lost, or a creation failed lately.
    pub fn reserve_worker(&self, _: &Inside<'_>, least: u32, most: u32, now: u64) -> Option<u32> {
        let mut inner = self.inner.lock();
        if inner.is_short(least) { inner.pool.reserve_worker(most, now) } else { None }
    }

    /// Records that the creation of a counted reclaimer failed, and starts the delay before the
    /// next attempt.
    pub fn spawn_failed(&self, _: &Inside<'_>, now: u64) {
        self.inner.lock().pool.spawn_failed(now);
    }

    /// Returns the numbers of reclaimers.
    pub fn threads(&self, _: &Inside<'_>) -> Reclaimers {
        self.inner.lock().pool.threads()
    }

    /// Returns the numbers of jobs.
    pub fn count(&self, _: &Inside<'_>) -> JobCount {
        let inner = self.inner.lock();
        JobCount { posted: inner.queue.posted(), taken: inner.queue.taken() }
    }

    /// Resets the queue in a forked child, where no thread waits or works. A reclaimer that forked
    /// in a callback ends.
    pub fn forget_all(&self, _: &Inside<'_>) {
        let mut inner = self.inner.lock();
        inner.queue.forget_all();
        inner.pool.forget_all();
    }

    /// Lets every reclaimer end at its next look for a job; no more are created.
    pub fn dismiss(&self, _: &Inside<'_>) {
        self.inner.lock().pool.dismiss();
        self.posted.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `posted_seq`.
        wake(&self.posted, i32::MAX as u32);
    }

    /// Returns the value of the futex word `posted`.
    fn posted_seq(&self) -> u32 {
        self.posted.load(Ordering::Acquire) // Pairs with the Release in `notify_workers`.
    }

    /// Sleeps until another job can be taken, or for this number of nanoseconds.
    pub fn sleep(&self, idle: Idle, nanoseconds: Option<u64>) {
        match nanoseconds {
            Some(nanoseconds) => wait_for(&self.posted, idle.0, nanoseconds),
            None => wait(&self.posted, idle.0),
        }
    }

    /// Returns the value of the futex word `done`.
    fn done_seq(&self) -> u32 {
        self.done.load(Ordering::Acquire) // Pairs with the Release in `notify_waiters`.
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
