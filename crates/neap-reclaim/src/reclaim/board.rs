//! The board of jobs: what reclaimer threads have to do, who asks for memory of which group, and what came of it; and how many of these threads there are.
//!
//! Sits between threads that need memory, which may hold anything and so call nobody's callbacks themselves, and the reclaimers, which hold nothing; it is what a model
//! checker explores. Who asks for the same group at the same time shares a job; the oldest is done first. A job whose reclaimer does not come back is given to another
//! one: each reclaimer has one job at a time, so whoever finds it taken by that number, the watcher who writes the thread off or the thread itself when it is back, lets
//! go of it and counts the thread, and the other one finds nothing. A job has nothing of whoever waits for it but a count: who gives up leaves at once, and no answer
//! that comes later finds another's job.
//!
//! One mutex, a leaf, inside the gate. Who sleeps does so outside, on a word that it has read before it looked; who changes what it looked for changes the word after that, and
//! wakes:
//! 1. W reads the word. 2. W looks, and finds nothing. 3. P posts. 4. P changes the word, and wakes nobody. 5. W does not sleep: the word is another one.
//!
//! Nothing here runs callbacks or makes threads.

use crate::ShrinkerId;
use neap_base::mutex::{Guard, Mutex};
use neap_base::platform::nodes::MAX_NODES;
use neap_base::sync::{AtomicU32, Ordering, wait, wait_for, wake};
use neap_groups::GroupId;

/// Jobs at a time that are for those who wait, or for a node.
const JOBS: usize = 16;
/// Places for [`Aim::Requests`]: each reclaimer that works has one job, and one more may wait to be
/// taken.
const SERVERS: usize = MAX_NODES + 1;
/// Threads that may be in callbacks that do not come back, before no more are made.
pub(super) const MOST_LOST: u32 = 32;
/// How long nobody tries to make a thread after that has failed, in nanoseconds.
const AGAIN: u64 = 1_000_000_000;

/// What a reclaimer is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aim {
    /// So many bytes of a group and those below it, for all waiters together.
    Bytes(GroupId, u64),
    /// Room for so many in the budget.
    Room(u64),
    /// As much as a group, and those above it, have beyond their `high`.
    High(GroupId),
    /// How many objects a shrinker has of a group on a node.
    Look(ShrinkerId, GroupId, u32),
    /// That it looks at so many.
    Scan(ShrinkerId, GroupId, u32, u64),
    /// Until a node is not short any more.
    Node(usize),
    /// One request of a group's ([`Groups::take_request`](neap_groups::Groups::take_request)):
    /// whichever is due.
    Requests,
}

impl Aim {
    /// The job that does both, if one can.
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
    /// By the reclaimer of that number.
    Taken(u32),
    /// With so many bytes.
    Done(u64),
}

#[derive(Clone, Copy, Debug)]
struct Job {
    state: State,
    aim: Aim,
    waiters: u32,
    /// Somebody who does not wait wants it, too; of a node that it is done once more.
    wanted: bool,
    /// The lower, the older.
    age: u64,
}

#[derive(Debug)]
struct Board {
    /// Those for requests lie behind the others.
    jobs: [Job; JOBS + SERVERS],
    /// Jobs that there ever were.
    posted: u64,
    /// Somebody waits for room for a job.
    is_full: bool,
    /// Threads that work, and those that were written off and are not back.
    threads: u32,
    lost: u32,
    /// The number of the last one, and of the last that a parent had.
    last: u32,
    parents: u32,
    /// Until when none is made, because none could be.
    until: u64,
}

/// The jobs, and how many reclaimers there are.
#[derive(Debug)]
pub struct Jobs {
    board: Mutex<Board>,
    /// Changes when there is a job to be taken: reclaimers sleep on it; and when one is done, or there is room for another: who waits sleeps on it.
    posted: AtomicU32,
    done: AtomicU32,
}

/// A job that somebody waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Ticket(usize);

/// Somebody who waits for a job, or for room to post it.
#[derive(Debug)]
pub struct Waiter {
    aim: Aim,
    /// `None` where there was no room yet.
    ticket: Option<Ticket>,
    /// How often a job was done when it last looked.
    dones: u32,
}

impl Waiter {
    /// Who wants this done; [`Jobs::ask`] posts it.
    pub fn new(aim: Aim) -> Waiter {
        Waiter { aim, ticket: None, dones: 0 }
    }
}

/// How often there had been a job to be taken, before none was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Idle(u32);

/// What a reclaimer does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// This.
    Job(Aim),
    /// There is nothing to do: it [sleeps](Jobs::sleep), with this.
    Nothing(Idle),
    /// It ends: it is a copy of its parent's, and counted nowhere.
    End,
}

impl Board {
    fn index_of(&self, state: State) -> Option<usize> {
        self.jobs.iter().position(|job| job.state == state)
    }

    /// A free place for a job.
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

    /// The reclaimer of a number has its job no more: it is done, with so many bytes, or to be done by another one; `idle` is called with the node whose pass is not under
    /// way from now on. Answers what the job is now; `None` if it had none.
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
    /// Posts a job for somebody who does not wait; answers whether there was room for it. Inside the gate.
    pub fn post(&self, aim: Aim) -> bool {
        self.place(aim, false).is_some()
    }

    /// Posts what somebody waits for, once, as soon as there is room. [`Jobs::answer`] is to follow; where there is none, [`Jobs::wait`], and then this again. Inside the gate.
    pub fn ask(&self, waiter: &mut Waiter) {
        // Before it looks: for room here, for what came of it in `answer`.
        waiter.dones = self.dones();
        waiter.ticket = waiter.ticket.or_else(|| self.place(waiter.aim, true));
    }

    /// What came of it, once it is done; 0 where the waiter is `giving_up` before that. There is one answer: then the waiter is void. Inside the gate.
    pub fn answer(&self, waiter: &Waiter, giving_up: bool) -> Option<u64> {
        match waiter.ticket {
            Some(ticket) => self.look(ticket, giving_up),
            None => giving_up.then_some(0),
        }
    }

    /// Sleeps until a job is done, or there is room, that the waiter has not seen, or for so many nanoseconds.
    pub fn wait(&self, waiter: &Waiter, nanoseconds: u64) {
        wait_for(&self.done, waiter.dones, nanoseconds);
    }

    /// Posts a job; `None` where there are too many. With `waits`, [`Jobs::look`] is to follow until it has answered.
    fn place(&self, aim: Aim, waits: bool) -> Option<Ticket> {
        let mut board = self.board.lock();
        let same = |job: &Job| match job.state {
            State::Posted => job.aim.and(aim),
            // What a reclaimer has begun with is not what is needed now. But two passes over a node at a time bring no more than one, which may have seen enough already:
            // 1. the pass finds the node above its high watermark; 2. somebody allocates, finds it at the low one, and comes here; 3. the pass ends. So it is
            // wanted once more; this mutex says which of 2 and 3 was first.
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

    /// Lets a reclaimer that sleeps look for a job: to be called whenever there is one to be taken that was not before.
    fn call(&self) {
        self.posted.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `posts`.
        wake(&self.posted, 1);
    }

    /// Lets those who wait look: for what came of a job, or for room.
    fn tell(&self) {
        self.done.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `dones`.
        wake(&self.done, i32::MAX as u32);
    }

    /// Wakes whoever is concerned by what a job is now, and opens the board for others.
    fn leave(&self, mut board: Guard<'_, Board>, state: State) {
        let is_room = state == State::Free && core::mem::take(&mut board.is_full);
        drop(board);
        match state {
            // 1. Two reclaimers; one sleeps, the other's callback sticks. 2. It is written off. 3. One job, one reclaimer: nobody makes another. So the one that
            // sleeps has to hear of it.
            State::Posted => self.call(),
            State::Done(_) => self.tell(),
            _ if is_room => self.tell(),
            _ => {}
        }
    }

    /// What came of a job that is done, or 0 where its waiter is `giving_up`; the ticket is void then.
    fn look(&self, ticket: Ticket, giving_up: bool) -> Option<u64> {
        let mut board = self.board.lock();
        let job = board.jobs.get_mut(ticket.0)?;
        let bytes = match job.state {
            State::Done(bytes) => bytes,
            _ if giving_up => 0,
            // A parent's.
            State::Free => 0,
            _ => return None,
        };
        job.waiters = job.waiters.saturating_sub(1);
        // What nobody wants any more is not begun either.
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

    /// The next job, for the reclaimer of a number. Inside the gate.
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

    /// The job of a reclaimer is done, unless it was given to another one. `idle`: see [`Jobs::write_off`]. Inside the gate.
    pub fn finish(&self, reclaimer: u32, bytes: u64, idle: impl FnOnce(usize)) {
        let mut board = self.board.lock();
        if let Some(state) = board.let_go(reclaimer, Some(bytes), idle) {
            self.leave(board, state);
        }
    }

    /// A reclaimer does not come back: another one is to do what it was at. `idle` is called, under the mutex, with the node if that was a pass for one. Inside the gate.
    pub fn write_off(&self, reclaimer: u32, idle: impl FnOnce(usize)) {
        let mut board = self.board.lock();
        // Otherwise it is back already.
        if let Some(state) = board.let_go(reclaimer, None, idle) {
            board.threads -= 1;
            board.lost += 1;
            self.leave(board, state);
        }
    }

    /// A reclaimer that was written off is back, and ends. `idle`: see [`Jobs::write_off`]. Inside the gate.
    pub fn end(&self, reclaimer: u32, idle: impl FnOnce(usize)) {
        let mut board = self.board.lock();
        if reclaimer <= board.parents {
            return;
        }
        match board.let_go(reclaimer, None, idle) {
            // Who has written it off comes too late for that.
            Some(state) => {
                board.threads -= 1;
                self.leave(board, state);
            }
            None => board.lost -= 1,
        }
    }

    /// Whether there are fewer reclaimers than `least`, or more jobs than reclaimers who have nothing to do. Inside the gate.
    pub fn is_short(&self, least: u32) -> bool {
        self.board.lock().is_short(least)
    }

    /// The number of a reclaimer that is to be made, and counts already: where that [is so](Jobs::is_short), and there are fewer than `most`. Inside the gate.
    pub fn hire(&self, least: u32, most: u32, now: u64) -> Option<u32> {
        let mut board = self.board.lock();
        if !board.is_short(least) || board.threads >= most || board.lost >= MOST_LOST || now < board.until {
            return None;
        }
        board.threads += 1;
        board.last += 1;
        Some(board.last)
    }

    /// It could not be made. Inside the gate.
    pub fn not_made(&self, now: u64) {
        let mut board = self.board.lock();
        board.threads -= 1;
        board.until = now.saturating_add(AGAIN);
    }

    /// Threads that work, and those that were written off and are not back. Inside the gate.
    pub fn threads(&self) -> (u32, u32) {
        let board = self.board.lock();
        (board.threads, board.lost)
    }

    /// Jobs that wait to be taken, and those that are. Inside the gate.
    pub fn count(&self) -> (u32, u32) {
        let board = self.board.lock();
        (board.count(|state| state == State::Posted), board.count(|state| matches!(state, State::Taken(_))))
    }

    /// In a forked child: nobody waits and nobody works. A reclaimer that forked in a callback ends. Inside the gate.
    pub fn forget_all(&self) {
        let mut board = self.board.lock();
        board.jobs.iter_mut().for_each(|job| job.state = State::Free);
        (board.threads, board.lost, board.parents, board.until) = (0, 0, board.last, 0);
    }

    /// Every reclaimer ends when it looks for a job the next time, and none is made any more.
    /// Inside the gate.
    pub fn dismiss(&self) {
        let mut board = self.board.lock();
        (board.threads, board.lost, board.parents, board.until) = (0, 0, u32::MAX, u64::MAX);
        drop(board);
        self.posted.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `posts`.
        wake(&self.posted, i32::MAX as u32);
    }

    /// How often there was a job to be taken.
    fn posts(&self) -> u32 {
        self.posted.load(Ordering::Acquire) // Pairs with the Release in `call`.
    }

    /// Sleeps until there is another job to be taken, or for so many nanoseconds.
    pub fn sleep(&self, idle: Idle, nanoseconds: Option<u64>) {
        match nanoseconds {
            Some(nanoseconds) => wait_for(&self.posted, idle.0, nanoseconds),
            None => wait(&self.posted, idle.0),
        }
    }

    /// How often a job was done, or room was made.
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

        /// Makes reclaimers up to the number of `last`.
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

    /// 1. W writes the thread off in its lane. 2. Its callback is back. 3. Either of the two comes here first.
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
                // By now another one may be at it.
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

    /// A tick asks for a node each time that it finds too little, while a pass takes longer than the time between two.
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

    /// Fails by never ending where nobody is woken; the number that reclaimers sleep on says it at once.
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

    /// However many others there are, and each server that finds another request due lets one more
    /// come.
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
