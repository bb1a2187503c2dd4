//! What reclaimer threads have to do: who asks for memory of which group, and what came of it.
//!
//! Sits between threads that need memory, which may hold anything and so call nobody's callbacks themselves, and the reclaimers, which hold nothing. Who asks for
//! the same group at the same time shares a job. A job whose reclaimer does not come back is given to another one. One mutex, a leaf, inside the gate; who
//! waits does so outside, to a deadline. Nothing here runs callbacks or makes threads.

use core::sync::atomic::{AtomicU32, Ordering};
use neap_base::Mutex;
use neap_groups::GroupId;
use neap_os::futex::{self, Scope};
use neap_reclaim::ShrinkerId;

/// Jobs at a time.
const JOBS: usize = 16;

/// What a reclaimer is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Aim {
    /// So many bytes of a group and those below it.
    Bytes(GroupId, u64),
    /// As much as a group, and those above it, have beyond their `high`.
    High(GroupId),
    /// How many objects a shrinker has of a group on a node.
    Look(ShrinkerId, GroupId, u32),
    /// That it looks at so many.
    Scan(ShrinkerId, GroupId, u32, u64),
    /// Until enough of the budget is free.
    Budget,
}

impl Aim {
    /// The job that does both, if one can.
    fn and(self, other: Aim) -> Option<Aim> {
        match (self, other) {
            (Aim::Bytes(group, bytes), Aim::Bytes(same, others)) if group == same => {
                Some(Aim::Bytes(group, bytes.max(others)))
            }
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
}

/// The jobs, and how many reclaimers there are.
#[derive(Debug)]
pub(crate) struct Jobs {
    jobs: Mutex<[Job; JOBS]>,
    /// Changes when a job is posted: reclaimers sleep on it; and when one is done: who waits sleeps on it.
    posted: AtomicU32,
    done: AtomicU32,
}

/// A job that somebody waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket(usize);

impl Jobs {
    pub(crate) fn new() -> Jobs {
        let job = Job { state: State::Free, aim: Aim::Budget, waiters: 0 };
        Jobs { jobs: Mutex::new([job; JOBS]), posted: AtomicU32::new(0), done: AtomicU32::new(0) }
    }

    /// Posts a job; `None` where there are too many. With `waits`, [`Jobs::look`] is to follow until it has answered. Inside the gate.
    pub(crate) fn post(&self, aim: Aim, waits: bool) -> Option<Ticket> {
        let mut jobs = self.jobs.lock();
        // What a reclaimer has begun with is not what is needed now.
        let same = |job: &Job| (job.state == State::Posted).then(|| job.aim.and(aim)).flatten();
        let index = match jobs.iter().position(|job| same(job).is_some()) {
            Some(index) => index,
            None => jobs.iter().position(|job| job.state == State::Free)?,
        };
        let job = &mut jobs[index];
        *job = match same(job) {
            Some(both) => Job { aim: both, ..*job },
            None => Job { state: State::Posted, aim, waiters: 0 },
        };
        job.waiters += u32::from(waits);
        drop(jobs);
        self.call();
        Some(Ticket(index))
    }

    /// Lets a reclaimer that sleeps look for a job: to be called whenever there is one to be taken that was not before.
    fn call(&self) {
        self.posted.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `posts`.
        futex::wake(&self.posted, 1, Scope::Process);
    }

    /// What came of a job that is done, or 0 where its waiter is `giving_up`; the ticket is void then. Inside the gate.
    pub(crate) fn look(&self, ticket: Ticket, giving_up: bool) -> Option<u64> {
        let mut jobs = self.jobs.lock();
        let job = jobs.get_mut(ticket.0)?;
        let bytes = match job.state {
            State::Done(bytes) => bytes,
            _ if giving_up => 0,
            _ => return None,
        };
        job.waiters = job.waiters.saturating_sub(1);
        // What nobody waits for any more is not begun either.
        if job.waiters == 0 && !matches!(job.state, State::Taken(_)) {
            job.state = State::Free;
        }
        Some(bytes)
    }

    /// The next job, for the reclaimer of a number. Inside the gate.
    pub(crate) fn take(&self, reclaimer: u32) -> Option<Aim> {
        let mut jobs = self.jobs.lock();
        let job = jobs.iter_mut().find(|job| job.state == State::Posted)?;
        job.state = State::Taken(reclaimer);
        Some(job.aim)
    }

    /// The job of a reclaimer is done, unless it was given to another one. Inside the gate.
    pub(crate) fn finish(&self, reclaimer: u32, bytes: u64) {
        let mut jobs = self.jobs.lock();
        let Some(job) = jobs.iter_mut().find(|job| job.state == State::Taken(reclaimer)) else { return };
        job.state = if job.waiters > 0 { State::Done(bytes) } else { State::Free };
        drop(jobs);
        self.done.fetch_add(1, Ordering::Release); // Pairs with the Acquire in `dones`.
        futex::wake(&self.done, i32::MAX as u32, Scope::Process);
    }

    /// A reclaimer does not come back: another one is to do what it was at. Answers whether there is anything to do. Inside the gate.
    pub(crate) fn give_back(&self, reclaimer: u32) -> bool {
        let mut jobs = self.jobs.lock();
        for job in jobs.iter_mut().filter(|job| job.state == State::Taken(reclaimer)) {
            job.state = if job.waiters > 0 { State::Posted } else { State::Free };
        }
        let is_needed = jobs.iter().any(|job| job.state == State::Posted);
        drop(jobs);
        // 1. Two reclaimers; one sleeps, the other's callback sticks. 2. It is written off. 3. One job, one reclaimer: nobody makes another. So the
        // one that sleeps has to hear of it.
        if is_needed {
            self.call();
        }
        is_needed
    }

    /// How many wait to be taken, and how many are. Inside the gate.
    pub(crate) fn count(&self) -> (u32, u32) {
        self.jobs.lock().iter().fold((0, 0), |(posted, taken), job| match job.state {
            State::Posted => (posted + 1, taken),
            State::Taken(_) => (posted, taken + 1),
            _ => (posted, taken),
        })
    }

    /// In a forked child: nobody waits and nobody works. Inside the gate.
    pub(crate) fn forget_all(&self) {
        self.jobs.lock().iter_mut().for_each(|job| job.state = State::Free);
    }

    /// How often a job was posted, to be read before [`Jobs::take`] finds none.
    pub(crate) fn posts(&self) -> u32 {
        self.posted.load(Ordering::Acquire) // Pairs with the Release in `post`.
    }

    /// Sleeps until another one is.
    pub(crate) fn sleep(&self, posts: u32) {
        futex::wait(&self.posted, posts, None, Scope::Process);
    }

    /// How often one was done, to be read before [`Jobs::look`] finds none.
    pub(crate) fn dones(&self) -> u32 {
        self.done.load(Ordering::Acquire) // Pairs with the Release in `finish`.
    }

    /// Sleeps until another one is, or for so many nanoseconds.
    pub(crate) fn wait(&self, dones: u32, nanoseconds: u64) {
        futex::wait(&self.done, dones, Some(nanoseconds), Scope::Process);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Aim = Aim::Bytes(GroupId::ROOT, 20);

    fn bytes(bytes: u64) -> Aim {
        Aim::Bytes(GroupId::ROOT, bytes)
    }

    #[test]
    fn who_asks_for_the_same_group_shares_a_job_that_has_not_begun() {
        let jobs = Jobs::new();
        let (first, second) = (jobs.post(bytes(10), true).unwrap(), jobs.post(bytes(20), true).unwrap());
        assert_eq!((first, jobs.count()), (second, (1, 0)));
        assert_eq!((jobs.take(1), jobs.take(2)), (Some(BOTH), None));
        let third = jobs.post(bytes(5), true).unwrap();
        assert_ne!(first, third);
        assert_eq!((jobs.look(first, false), jobs.count()), (None, (1, 1)));
        jobs.finish(1, 99);
        assert_eq!([first, second].map(|ticket| jobs.look(ticket, false)), [Some(99); 2]);
        assert_eq!((jobs.look(third, true), jobs.take(1)), (Some(0), None), "nobody waits for it");
    }

    #[test]
    fn what_a_reclaimer_leaves_another_one_does_and_its_own_late_answer_is_none() {
        let jobs = Jobs::new();
        let ticket = jobs.post(bytes(20), true).unwrap();
        assert_eq!(jobs.take(1), Some(BOTH));
        assert!(jobs.give_back(1));
        jobs.finish(1, 5);
        assert_eq!((jobs.look(ticket, false), jobs.take(2)), (None, Some(BOTH)));
        jobs.finish(2, 7);
        assert_eq!(jobs.look(ticket, false), Some(7));
        assert!(jobs.post(Aim::Budget, false).is_some() && jobs.take(3) == Some(Aim::Budget));
        assert!(!jobs.give_back(3), "nobody waits for it");
        assert_eq!(jobs.count(), (0, 0));
    }

    /// Fails by never ending where nobody is woken; the number that reclaimers sleep on says it at once.
    #[test]
    fn a_reclaimer_that_sleeps_is_woken_for_a_job_that_another_one_leaves() {
        let jobs = Jobs::new();
        let ticket = jobs.post(bytes(20), true).unwrap();
        assert_eq!(jobs.take(1), Some(BOTH));
        let posts = jobs.posts();
        std::thread::scope(|scope| {
            let idle = scope.spawn(|| {
                loop {
                    let posts = jobs.posts();
                    match jobs.take(2) {
                        Some(aim) => break aim,
                        None => jobs.sleep(posts),
                    }
                }
            });
            assert!(jobs.give_back(1));
            assert_ne!(jobs.posts(), posts, "who sleeps is not woken");
            assert_eq!(idle.join().unwrap(), BOTH);
        });
        jobs.finish(2, 7);
        assert_eq!(jobs.look(ticket, false), Some(7));
    }

    #[test]
    fn there_are_only_so_many_jobs_and_who_gives_up_makes_room() {
        let jobs = Jobs::new();
        let groups = (1..).map(|number| Aim::High(GroupId::from_bits(number)));
        let tickets: [Ticket; JOBS] = core::array::from_fn(|at| {
            let aim = groups.clone().nth(at).unwrap();
            assert!(jobs.post(aim, false).is_some(), "shares");
            jobs.post(aim, true).unwrap()
        });
        assert_eq!(jobs.post(Aim::Budget, true), None);
        assert_eq!(jobs.look(tickets[3], true), Some(0));
        assert_eq!(jobs.post(Aim::Budget, true), Some(tickets[3]));
        jobs.forget_all();
        assert_eq!(jobs.count(), (0, 0));
    }
}
