//! Job queue of the reclaimer threads, and the count of these threads.
//!
//! Threads that need memory may hold locks of the program, so they run no callbacks. They post jobs
//! here; reclaimers, which hold nothing, run them.
//!
//! # Design
//!
//! * Requests for the same group share a job that has not begun. The oldest job is taken first.
//! * Each reclaimer has at most one job, which records the reclaimer's number.
//! * A job has no data of its waiters but their number. A waiter that gives up leaves at once, and
//!   a later answer cannot reach another waiter's job.
//!
//! # Invariants
//!
//! A watcher writes off a reclaimer with a callback that does not return. Either the watcher or
//! the returning thread lets go of the job, and counts the thread: the first to find the job taken
//! by that number. The other one finds nothing.
//!
//! # Locking
//!
//! One mutex, a leaf, inside the fork gate. Nothing here runs callbacks or creates threads.
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
//! A model checker explores this module (`tests/loom_board`).

use crate::ShrinkerId;
use neap_base::mutex::{Guard, Mutex};
use neap_base::platform::nodes::MAX_NODES;
use neap_base::sync::{AtomicU32, Ordering, wait, wait_for, wake};
use neap_groups::GroupId;

/// Jobs at a time that threads wait for, or that are for a node.
const JOBS: usize = 16;
/// Places for [`Aim::Requests`]: one job for each reclaimer that works, and one more that waits to
/// be taken.
const SERVERS: usize = MAX_NODES + 1;
/// Maximum number of written-off reclaimers that have not returned. No more threads are created at
/// that number.
pub(super) const MOST_LOST: u32 = 32;
/// Delay after a failed creation of a thread before the next attempt, in nanoseconds.
const AGAIN: u64 = 1_000_000_000;

/// Task of a reclaimer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aim {
    /// Reclaim this number of bytes from a group and its descendants, for all waiters together.
    Bytes(GroupId, u64),
    /// Make room for this number of bytes in the budget.
    Room(u64),
    /// Reclaim the bytes that a group and its ancestors use above their `high`.
    High(GroupId),
    /// Ask a shrinker for its number of objects of a group on a node.
    Look(ShrinkerId, GroupId, u32),
    /// Let a shrinker scan this number of objects of a group on a node.
    Scan(ShrinkerId, GroupId, u32, u64),
    /// Reclaim until a node is not short any more.
    Node(usize),
    /// Serve one request of a group: the next that is due
    /// ([`Groups::take_request`](neap_groups::Groups::take_request)).
    Requests,
}

impl Aim {
    /// Returns a job that does both, if there is one.
    fn and(self, other: Aim) -> Option<Aim> {
        match (self, other) {
            (Aim::Bytes(group, bytes), Aim::Bytes(same, others)) if group == same => {
                Some(Aim::Bytes(group, bytes.saturating_add(others)))
            }
            (Aim::Room(bytes), Aim::Room(others)) => Some(Aim::Room(bytes.max(others))),
            _ => (self == other).then_some(self),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Posted,
    /// By the reclaimer with this number.
    Taken(u32),
    /// With this number of bytes.
    Done(u64),
}

#[derive(Clone, Copy, Debug)]
struct Job {
    state: State,
    aim: Aim,
    waiters: u32,
    /// A caller that does not wait requested the job, too: it runs even if all waiters give up. For
    /// a node with a taken job: run that again.
    wanted: bool,
    /// Sequence number; the lowest is the oldest job.
    age: u64,
}

#[derive(Debug)]
struct Board {
    /// Jobs of [`Aim::Requests`] lie behind the other ones.
    jobs: [Job; JOBS + SERVERS],
    /// Number of jobs created so far.
    posted: u64,
    /// A thread waits for a free place.
    is_full: bool,
    /// Reclaimers that work, and reclaimers that were written off and have not returned.
    threads: u32,
    lost: u32,
    /// Number of the newest reclaimer, and of the newest one that this process's parent had.
    last: u32,
    parents: u32,
    /// Time before which no reclaimer is created, after a failed creation.
    until: u64,
}

/// The job queue, and the count of reclaimers.
#[derive(Debug)]
pub struct Jobs {
    board: Mutex<Board>,
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
    aim: Aim,
    /// `None` while there was no room.
    ticket: Option<Ticket>,
    /// Value of `Jobs::done` before the last look at the queue.
    dones: u32,
}

impl Waiter {
    /// Makes a waiter for a job that [`Jobs::ask`] will post.
    pub fn new(aim: Aim) -> Waiter {
        Waiter { aim, ticket: None, dones: 0 }
    }
}

/// Value of the word `posted` before no job was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Idle(u32);

/// Next step of a reclaimer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Run this job.
    Job(Aim),
    /// [Sleep](Jobs::sleep) with this value: there is no job.
    Nothing(Idle),
    /// End: the reclaimer is a copy of one of the parent process, and is not counted, or all were
    /// dismissed.
    End,
}

impl Board {
    fn index_of(&self, state: State) -> Option<usize> {
        self.jobs.iter().position(|job| job.state == state)
    }

    /// Returns the index of a free place for a job.
    fn room_for(&self, aim: Aim) -> Option<usize> {
        let places = if aim == Aim::Requests { JOBS..JOBS + SERVERS } else { 0..JOBS };
        places.into_iter().find(|&place| self.jobs[place].state == State::Free)
    }

    fn count(&self, is: impl Fn(State) -> bool) -> u32 {
        self.jobs.iter().filter(|job| is(job.state)).count() as u32
    }

    fn is_short(&self, least: u32) -> bool {
        let idle = self.threads.saturating_sub(self.count(|state| matches!(state, State::Taken(_))));
        self.threads < least || self.count(|state| state == State::Posted) > idle
    }

    /// Takes the job of a reclaimer from it. With `done`, the job is done, with that number of
    /// bytes; otherwise another reclaimer is to do it.
    ///
    /// Calls `idle` with the node if the job was a pass for one. Returns the new state of the job;
    /// `None` if the reclaimer had none.
    fn let_go(&mut self, reclaimer: u32, done: Option<u64>, idle: impl FnOnce(usize)) -> Option<State> {
        let index = self.index_of(State::Taken(reclaimer))?;
        let job = &mut self.jobs[index];
        let mut goes_on = done.is_none() && (job.waiters > 0 || job.wanted);
        if let Aim::Node(node) = job.aim {
            idle(node);
            goes_on |= job.wanted;
        }
        job.state = match done {
            Some(bytes) if job.waiters > 0 => State::Done(bytes),
            _ if goes_on => State::Posted,
            _ => State::Free,
        };
        Some(job.state)
    }
}

impl Default for Jobs {
    fn default() -> Jobs {
        let job = Job { state: State::Free, aim: Aim::Node(0), waiters: 0, wanted: false, age: 0 };
        let jobs = [job; JOBS + SERVERS];
        let board = Board { jobs, posted: 0, is_full: false, threads: 0, lost: 0, last: 0, parents: 0, until: 0 };
        Jobs { board: Mutex::new(board), posted: AtomicU32::new(0), done: AtomicU32::new(0) }
    }
}

impl Jobs {
    /// Posts a job without waiting for it. Returns whether there was room. The caller must be
    /// inside the fork gate.
    pub fn post(&self, aim: Aim) -> bool {
        self.place(aim, false).is_some()
    }

    /// Posts the waiter's job, once, as soon as there is room. The caller must be inside the fork
    /// gate.
    ///
    /// [`Jobs::answer`] must follow. If that returns `None`, [`Jobs::wait`] must follow, and then
    /// this again.
    pub fn ask(&self, waiter: &mut Waiter) {
        // Before the look at the queue: for room here, for the result in `answer`.
        waiter.dones = self.dones();
        waiter.ticket = waiter.ticket.or_else(|| self.place(waiter.aim, true));
    }

    /// Returns the bytes that the job brought, once it is done; 0 if the waiter is `giving_up`
    /// before. The waiter is void after an answer. The caller must be inside the fork gate.
    pub fn answer(&self, waiter: &Waiter, giving_up: bool) -> Option<u64> {
        match waiter.ticket {
            Some(ticket) => self.look(ticket, giving_up),
            None => giving_up.then_some(0),
        }
    }

    /// Sleeps until a job is done or a place becomes free that the waiter has not seen, or for this
    /// number of nanoseconds.
    pub fn wait(&self, waiter: &Waiter, nanoseconds: u64) {
        wait_for(&self.done, waiter.dones, nanoseconds);
    }

    /// Posts a job; `None` if there is no room. With `waits`, [`Jobs::look`] must follow until it
    /// returns an answer.
    fn place(&self, aim: Aim, waits: bool) -> Option<Ticket> {
        let mut board = self.board.lock();
        let same = |job: &Job| match job.state {
            State::Posted => job.aim.and(aim),
            // A pass that has begun does not serve a new request, except a pass for a node: two
            // passes over a node at a time bring no more than one. Such a pass may already have
            // seen enough memory:
            // 1. The pass finds the node above its high watermark.
            // 2. A thread allocates, finds the node at its low watermark, and comes here.
            // 3. The pass ends.
            // So the job is marked to run again. This mutex orders steps 2 and 3.
            State::Taken(_) if !waits => job.aim.and(aim).filter(|both| matches!(both, Aim::Node(_))),
            _ => None,
        };
        let (index, is_new) = match board.jobs.iter().position(|job| same(job).is_some()) {
            Some(index) => (index, false),
            None => match board.room_for(aim) {
                Some(index) => (index, true),
                None => {
                    board.is_full |= waits;
                    return None;
                }
            },
        };
        if is_new {
            board.posted += 1;
            board.jobs[index] = Job { state: State::Posted, aim, waiters: 0, wanted: false, age: board.posted };
        }
        let job = &mut board.jobs[index];
        job.aim = if is_new { aim } else { same(job).unwrap_or(aim) };
        job.waiters += u32::from(waits);
        job.wanted |= !waits;
        let is_posted = job.state == State::Posted;
        drop(board);
        if is_posted {
            self.call();
        }
        Some(Ticket(index))
    }

    /// Wakes one sleeping reclaimer. To be called whenever a job becomes one that can be taken.
    fn call(&self) {
        self.posted.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `posts`.
        wake(&self.posted, 1);
    }

    /// Wakes all waiters: a job is done, or there is room.
    fn tell(&self) {
        self.done.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `dones`.
        wake(&self.done, i32::MAX as u32);
    }

    /// Wakes the threads that the new state of a job concerns, after releasing the mutex.
    fn leave(&self, mut board: Guard<'_, Board>, state: State) {
        let is_room = state == State::Free && core::mem::take(&mut board.is_full);
        drop(board);
        match state {
            // A reclaimer may sleep while another one was written off. With one job and one
            // reclaimer left, no further one is created, so the sleeping one must be woken.
            State::Posted => self.call(),
            State::Done(_) => self.tell(),
            _ if is_room => self.tell(),
            _ => {}
        }
    }

    /// Returns the result of a job that is done, or 0 if its waiter is `giving_up`. The ticket is
    /// void after an answer.
    fn look(&self, ticket: Ticket, giving_up: bool) -> Option<u64> {
        let mut board = self.board.lock();
        let job = board.jobs.get_mut(ticket.0)?;
        let bytes = match job.state {
            State::Done(bytes) => bytes,
            _ if giving_up => 0,
            // The ticket is one of the parent process.
            State::Free => 0,
            _ => return None,
        };
        job.waiters = job.waiters.saturating_sub(1);
        // A job that no caller wants any more is not begun.
        let is_void = match job.state {
            State::Done(_) => job.waiters == 0,
            State::Posted => job.waiters == 0 && !job.wanted,
            _ => false,
        };
        if is_void {
            job.state = State::Free;
            self.leave(board, State::Free);
        }
        Some(bytes)
    }

    /// Takes the oldest job for a reclaimer. The caller must be inside the fork gate.
    pub fn take(&self, reclaimer: u32) -> Next {
        let idle = Idle(self.posts());
        let mut board = self.board.lock();
        if reclaimer <= board.parents {
            return Next::End;
        }
        let posted = board.jobs.iter_mut().filter(|job| job.state == State::Posted);
        let Some(oldest) = posted.min_by_key(|job| job.age) else { return Next::Nothing(idle) };
        oldest.state = State::Taken(reclaimer);
        oldest.wanted &= !matches!(oldest.aim, Aim::Node(_));
        Next::Job(oldest.aim)
    }

    /// Ends the job of a reclaimer, unless another one has it. `idle`: see [`Jobs::write_off`]. The
    /// caller must be inside the fork gate.
    pub fn finish(&self, reclaimer: u32, bytes: u64, idle: impl FnOnce(usize)) {
        let mut board = self.board.lock();
        if let Some(state) = board.let_go(reclaimer, Some(bytes), idle) {
            self.leave(board, state);
        }
    }

    /// Writes off a reclaimer with a callback that does not return, and posts its job again. The
    /// caller must be inside the fork gate.
    ///
    /// Calls `idle` with the node, under the mutex, if the job was a pass for one.
    pub fn write_off(&self, reclaimer: u32, idle: impl FnOnce(usize)) {
        let mut board = self.board.lock();
        // `None`: the reclaimer has returned already.
        if let Some(state) = board.let_go(reclaimer, None, idle) {
            board.threads -= 1;
            board.lost += 1;
            self.leave(board, state);
        }
    }

    /// Ends a reclaimer that was written off and has returned. `idle`: see [`Jobs::write_off`]. The
    /// caller must be inside the fork gate.
    pub fn end(&self, reclaimer: u32, idle: impl FnOnce(usize)) {
        let mut board = self.board.lock();
        if reclaimer <= board.parents {
            return;
        }
        match board.let_go(reclaimer, None, idle) {
            // The watcher has not reached `write_off` yet; it will find no job there.
            Some(state) => {
                board.threads -= 1;
                self.leave(board, state);
            }
            None => board.lost -= 1,
        }
    }

    /// Returns whether there are fewer reclaimers than `least`, or more posted jobs than idle
    /// reclaimers. The caller must be inside the fork gate.
    pub fn is_short(&self, least: u32) -> bool {
        self.board.lock().is_short(least)
    }

    /// Returns the number of a reclaimer that the caller is to create, and counts it. The caller
    /// must be inside the fork gate.
    ///
    /// `None` unless reclaimers are [short](Jobs::is_short), fewer than `most` exist, few enough
    /// are lost, and no creation failed lately.
    pub fn hire(&self, least: u32, most: u32, now: u64) -> Option<u32> {
        let mut board = self.board.lock();
        if !board.is_short(least) || board.threads >= most || board.lost >= MOST_LOST || now < board.until {
            return None;
        }
        board.threads += 1;
        board.last += 1;
        Some(board.last)
    }

    /// Records that the creation of a counted reclaimer failed, and starts the delay before the
    /// next attempt. The caller must be inside the fork gate.
    pub fn not_made(&self, now: u64) {
        let mut board = self.board.lock();
        board.threads -= 1;
        board.until = now.saturating_add(AGAIN);
    }

    /// Returns the number of reclaimers that work, and of those that were written off and have not
    /// returned. The caller must be inside the fork gate.
    pub fn threads(&self) -> (u32, u32) {
        let board = self.board.lock();
        (board.threads, board.lost)
    }

    /// Returns the number of posted jobs, and of taken ones. The caller must be inside the fork
    /// gate.
    pub fn count(&self) -> (u32, u32) {
        let board = self.board.lock();
        (board.count(|state| state == State::Posted), board.count(|state| matches!(state, State::Taken(_))))
    }

    /// Resets the queue in a forked child, where no thread waits or works. A reclaimer that forked
    /// in a callback ends. The caller must be inside the fork gate.
    pub fn forget_all(&self) {
        let mut board = self.board.lock();
        board.jobs.iter_mut().for_each(|job| job.state = State::Free);
        (board.threads, board.lost, board.parents, board.until) = (0, 0, board.last, 0);
    }

    /// Lets every reclaimer end at its next look for a job; no more are created. The caller must be
    /// inside the fork gate.
    pub fn dismiss(&self) {
        let mut board = self.board.lock();
        (board.threads, board.lost, board.parents, board.until) = (0, 0, u32::MAX, u64::MAX);
        drop(board);
        self.posted.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `posts`.
        wake(&self.posted, i32::MAX as u32);
    }

    /// Returns the value of the futex word `posted`.
    fn posts(&self) -> u32 {
        self.posted.load(Ordering::Acquire) // Pairs with the Release in `call`.
    }

    /// Sleeps until another job can be taken, or for this number of nanoseconds.
    pub fn sleep(&self, idle: Idle, nanoseconds: Option<u64>) {
        match nanoseconds {
            Some(nanoseconds) => wait_for(&self.posted, idle.0, nanoseconds),
            None => wait(&self.posted, idle.0),
        }
    }

    /// Returns the value of the futex word `done`.
    fn dones(&self) -> u32 {
        self.done.load(Ordering::Acquire) // Pairs with the Release in `tell`.
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const BOTH: Aim = Aim::Bytes(GroupId::ROOT, 30);

    fn bytes(bytes: u64) -> Aim {
        Aim::Bytes(GroupId::ROOT, bytes)
    }

    fn high(number: u64) -> Aim {
        Aim::High(GroupId::from_bits(number))
    }

    impl Jobs {
        fn took(&self, reclaimer: u32) -> Option<Aim> {
            match self.take(reclaimer) {
                Next::Job(aim) => Some(aim),
                Next::Nothing(_) => None,
                Next::End => panic!("{reclaimer} is nobody's"),
            }
        }

        /// Makes reclaimers with the numbers 1 to `last`.
        fn with(last: u32) -> Jobs {
            let jobs = Jobs::default();
            (1..=last).for_each(|number| assert_eq!(jobs.hire(last, last, 0), Some(number)));
            jobs
        }

        fn done(&self, reclaimer: u32, bytes: u64) {
            self.finish(reclaimer, bytes, |_| ());
        }
    }

    #[test]
    fn who_asks_for_the_same_group_shares_a_job_that_has_not_begun() {
        let jobs = Jobs::with(2);
        let (first, second) = (jobs.place(bytes(10), true).unwrap(), jobs.place(bytes(20), true).unwrap());
        assert_eq!((first, jobs.count()), (second, (1, 0)));
        assert_eq!((jobs.took(1), jobs.took(2)), (Some(BOTH), None));
        let third = jobs.place(bytes(5), true).unwrap();
        assert_ne!(first, third);
        assert_eq!((jobs.look(first, false), jobs.count()), (None, (1, 1)));
        jobs.done(1, 99);
        assert_eq!([first, second].map(|ticket| jobs.look(ticket, false)), [Some(99); 2]);
        assert_eq!((jobs.look(third, true), jobs.took(1)), (Some(0), None), "nobody waits for it");
    }

    #[test]
    fn what_a_reclaimer_leaves_another_one_does_and_its_own_late_answer_is_none() {
        let jobs = Jobs::with(3);
        let ticket = jobs.place(bytes(20), true).unwrap();
        assert_eq!(jobs.took(1), Some(bytes(20)));
        jobs.write_off(1, |_| panic!("not for the budget"));
        assert_eq!((jobs.count(), jobs.threads()), ((1, 0), (2, 1)));
        jobs.done(1, 5);
        assert_eq!((jobs.look(ticket, false), jobs.took(2)), (None, Some(bytes(20))));
        jobs.done(2, 7);
        assert_eq!(jobs.look(ticket, false), Some(7));
        assert!(jobs.place(Aim::Node(0), false).is_some() && jobs.took(3) == Some(Aim::Node(0)));
        jobs.write_off(3, |_| ());
        assert_eq!(jobs.count(), (0, 0), "nobody waits for it");
        assert_eq!(jobs.threads(), (1, 2));
        [1, 3].into_iter().for_each(|number| jobs.end(number, |_| panic!("it has let go")));
        assert_eq!(jobs.threads(), (1, 0));
    }

    /// The lane has written the reclaimer off, and the callback has returned. Either of the two
    /// threads comes first here.
    #[test]
    fn a_reclaimer_that_is_written_off_is_counted_once_whoever_comes_first() {
        for is_back_first in [false, true] {
            let jobs = Jobs::with(2);
            let ticket = jobs.place(bytes(20), true).unwrap();
            assert_eq!(jobs.took(1), Some(bytes(20)));
            let posts = jobs.posts();
            if is_back_first {
                jobs.end(1, |_| ());
                assert_eq!((jobs.threads(), jobs.count()), ((1, 0), (1, 0)));
                // Another reclaimer may have taken the job by now.
                assert_eq!(jobs.took(2), Some(bytes(20)));
                jobs.write_off(1, |_| panic!("it has let go"));
            } else {
                jobs.write_off(1, |_| ());
                assert_eq!((jobs.threads(), jobs.count()), ((1, 1), (1, 0)));
                jobs.end(1, |_| panic!("it has let go"));
                assert_eq!(jobs.took(2), Some(bytes(20)));
            }
            assert_ne!(jobs.posts(), posts, "who sleeps is not woken");
            assert_eq!((jobs.threads(), jobs.count()), ((1, 0), (0, 1)));
            jobs.done(2, 7);
            assert_eq!(jobs.look(ticket, false), Some(7));
        }
    }

    #[test]
    fn a_thread_is_made_for_each_job_that_nobody_is_there_for() {
        let jobs = Jobs::default();
        assert_eq!((jobs.hire(0, 3, 0), jobs.hire(1, 3, 0), jobs.hire(1, 3, 0)), (None, Some(1), None));
        jobs.place(high(1), true).unwrap();
        assert_eq!(jobs.hire(0, 3, 0), None, "one has nothing to do");
        jobs.place(high(2), true).unwrap();
        assert_eq!(jobs.hire(0, 3, 0), Some(2), "though it has not come yet");
        jobs.not_made(7);
        assert_eq!((jobs.threads(), jobs.hire(0, 3, 7), jobs.hire(0, 3, 6 + AGAIN)), ((1, 0), None, None));
        assert_eq!((jobs.hire(0, 3, 7 + AGAIN), jobs.hire(0, 3, 7 + AGAIN)), (Some(3), None));
        jobs.place(high(3), true).unwrap();
        jobs.place(high(4), true).unwrap();
        assert_eq!((jobs.hire(0, 3, 7 + AGAIN), jobs.hire(0, 3, 7 + AGAIN)), (Some(4), None), "there are enough");
    }

    #[test]
    fn no_more_are_made_while_too_many_do_not_come_back() {
        let jobs = Jobs::default();
        for number in 1..=MOST_LOST {
            jobs.place(high(1), true).unwrap();
            assert_eq!((jobs.hire(0, 4, 0), jobs.took(number)), (Some(number), Some(high(1))));
            jobs.write_off(number, |_| ());
        }
        assert_eq!((jobs.hire(0, 4, 0), jobs.threads()), (None, (0, MOST_LOST)));
        jobs.end(1, |_| ());
        assert_eq!(jobs.hire(0, 4, 0), Some(MOST_LOST + 1));
    }

    /// A tick requests a node at each shortage, and a pass can take longer than the time between
    /// two ticks.
    #[test]
    fn one_pass_for_a_node_is_under_way_and_it_is_known_when_none_is() {
        let jobs = Jobs::with(2);
        let (mut idle, mut again) = (0, 0);
        jobs.place(Aim::Node(0), false).unwrap();
        assert_eq!(jobs.took(1), Some(Aim::Node(0)));
        jobs.place(Aim::Node(0), false).unwrap();
        assert_eq!((jobs.took(2), jobs.count()), (None, (0, 1)));
        jobs.write_off(1, |_| idle += 1);
        assert_eq!(idle, 1);
        jobs.place(Aim::Node(0), false).unwrap();
        assert_eq!(jobs.took(2), Some(Aim::Node(0)));
        jobs.end(1, |_| again += 1);
        jobs.finish(2, 0, |_| idle += 1);
        assert_eq!((idle, again, jobs.count()), (2, 0, (0, 0)));
    }

    #[test]
    fn the_oldest_job_is_done_first_wherever_it_lies() {
        let jobs = Jobs::with(1);
        let tickets = [1, 2, 3].map(|number| jobs.place(high(number), true).unwrap());
        assert_eq!(jobs.look(tickets[0], true), Some(0));
        assert_eq!(jobs.place(high(4), true), Some(tickets[0]), "in the place of the first");
        jobs.place(high(3), true).unwrap();
        for number in [2, 3, 4] {
            assert_eq!(jobs.took(1), Some(high(number)));
            jobs.done(1, 1);
        }
    }

    #[test]
    fn what_somebody_wants_who_does_not_wait_stays_when_others_give_up_and_when_a_reclaimer_does_not_come_back() {
        let jobs = Jobs::with(2);
        let ticket = jobs.place(bytes(20), true).unwrap();
        assert_eq!(jobs.place(bytes(10), false), Some(ticket));
        assert_eq!((jobs.look(ticket, true), jobs.count()), (Some(0), (1, 0)));
        assert_eq!(jobs.took(1), Some(BOTH));
        jobs.write_off(1, |_| ());
        assert_eq!(jobs.took(2), Some(BOTH));
        jobs.done(2, 1);
        assert_eq!(jobs.count(), (0, 0));
    }

    #[test]
    fn a_child_has_no_jobs_and_no_reclaimers_and_its_parents_end() {
        let jobs = Jobs::with(2);
        let ticket = jobs.place(bytes(20), true).unwrap();
        assert_eq!(jobs.took(1), Some(bytes(20)));
        jobs.write_off(1, |_| ());
        assert_eq!(jobs.took(2), Some(bytes(20)));
        jobs.forget_all();
        assert_eq!((jobs.threads(), jobs.look(ticket, false)), ((0, 0), Some(0)));
        for number in [1, 2] {
            jobs.end(number, |_| panic!("it has nothing"));
            jobs.write_off(number, |_| panic!("it has nothing"));
            jobs.finish(number, 1, |_| panic!("it has nothing"));
            assert_eq!((jobs.take(number), jobs.threads()), (Next::End, (0, 0)));
        }
        jobs.place(bytes(20), true).unwrap();
        assert_eq!((jobs.hire(0, 4, 0), jobs.took(3)), (Some(3), Some(bytes(20))));
    }

    #[test]
    fn dismissed_reclaimers_end_and_none_is_hired() {
        let jobs = Jobs::with(2);
        jobs.place(bytes(20), true).unwrap();
        let posts = jobs.posts();
        jobs.dismiss();
        assert_ne!(jobs.posts(), posts, "who sleeps is not woken");
        jobs.finish(1, 7, |_| panic!("it has nothing"));
        jobs.end(2, |_| panic!("it has nothing"));
        assert_eq!([1, 2].map(|number| jobs.take(number)), [Next::End, Next::End]);
        assert_eq!((jobs.hire(1, 4, u64::MAX - 1), jobs.threads()), (None, (0, 0)));
    }

    /// Without a wake-up this test would never end; the comparison of the futex word fails at once.
    #[test]
    fn a_reclaimer_that_sleeps_is_woken_for_a_job_that_another_one_leaves() {
        let jobs = Jobs::with(2);
        let ticket = jobs.place(bytes(20), true).unwrap();
        assert_eq!(jobs.took(1), Some(bytes(20)));
        let posts = jobs.posts();
        std::thread::scope(|scope| {
            let idle = scope.spawn(|| {
                loop {
                    match jobs.take(2) {
                        Next::Job(aim) => break aim,
                        Next::Nothing(idle) => jobs.sleep(idle, None),
                        Next::End => panic!("it is no parent's"),
                    }
                }
            });
            jobs.write_off(1, |_| ());
            assert_ne!(jobs.posts(), posts, "who sleeps is not woken");
            assert_eq!(idle.join().unwrap(), bytes(20));
        });
        jobs.done(2, 7);
        assert_eq!(jobs.look(ticket, false), Some(7));
    }

    /// Other jobs do not take the places of requests, and each server that finds another request
    /// due lets one more come.
    #[test]
    fn requests_have_room_of_their_own_and_one_more_waits_to_be_taken() {
        let jobs = Jobs::with(2);
        (0..JOBS).for_each(|at| _ = jobs.place(high(at as u64), true).unwrap());
        assert!(!jobs.post(Aim::Node(0)), "it is full");
        for _ in 0..3 {
            assert!(jobs.post(Aim::Requests));
        }
        assert_eq!(jobs.count(), (JOBS as u32 + 1, 0), "all that are posted are one");
        (0..JOBS).for_each(|at| {
            assert_eq!(jobs.took(1), Some(high(at as u64)));
            jobs.done(1, 1);
        });
        assert_eq!(jobs.took(1), Some(Aim::Requests));
        assert!(jobs.post(Aim::Requests), "what a server has begun with is not what is needed now");
        assert_eq!((jobs.took(2), jobs.count()), (Some(Aim::Requests), (0, 2)));
        jobs.write_off(1, |_| ());
        assert_eq!(jobs.count(), (1, 1), "another server is to look");
        jobs.done(2, 0);
        assert_eq!((jobs.took(2), jobs.count()), (Some(Aim::Requests), (0, 1)));
        jobs.done(2, 0);
        assert_eq!(jobs.count(), (0, 0));
    }

    #[test]
    fn there_are_only_so_many_jobs_and_who_gives_up_makes_room() {
        let jobs = Jobs::default();
        let tickets: [Ticket; JOBS] = core::array::from_fn(|at| {
            let ticket = jobs.place(high(at as u64), true).unwrap();
            assert_eq!(jobs.place(high(at as u64), true), Some(ticket), "shares");
            ticket
        });
        assert_eq!((jobs.place(Aim::Node(0), false), jobs.place(Aim::Node(0), true)), (None, None));
        let dones = jobs.dones();
        assert_eq!((jobs.look(tickets[3], true), jobs.dones()), (Some(0), dones), "another one waits for it");
        assert_eq!(jobs.look(tickets[3], true), Some(0));
        assert_ne!(jobs.dones(), dones, "who waits for room is not told");
        assert_eq!(jobs.place(Aim::Node(0), true), Some(tickets[3]));
        jobs.forget_all();
        assert_eq!(jobs.count(), (0, 0));
    }
}
