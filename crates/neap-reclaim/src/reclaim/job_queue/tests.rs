//! Tests of the job queue: jobs, their waiters and the reclaimers.

use super::pool::SPAWN_RETRY_NS;
use super::queue::{JOBS, Poster};
use super::*;
use crate::reclaim::inside;
use neap_groups::GroupId;

const BOTH: ReclaimJob = ReclaimJob::Group(GroupId::ROOT, 30);

fn bytes(bytes: u64) -> ReclaimJob {
    ReclaimJob::Group(GroupId::ROOT, bytes)
}

fn high(number: u64) -> ReclaimJob {
    ReclaimJob::AboveHigh(GroupId::from_bits(number))
}

impl JobQueue {
    fn took(&self, reclaimer: u32) -> Option<ReclaimJob> {
        match self.take(&inside(), reclaimer) {
            Next::Job(job) => Some(job),
            Next::Nothing(_) => None,
            Next::End => panic!("{reclaimer} is to end"),
        }
    }

    /// Makes reclaimers with the numbers 1 to `last`.
    fn with(last: u32) -> JobQueue {
        let jobs = JobQueue::default();
        (1..=last).for_each(|number| assert_eq!(jobs.reserve_worker(&inside(), last, last, 0), Some(number)));
        jobs
    }

    fn working_and_lost(&self) -> (u32, u32) {
        let Reclaimers { working, lost } = self.threads(&inside());
        (working, lost)
    }

    fn posted_and_taken(&self) -> (u32, u32) {
        let JobCount { posted, taken } = self.count(&inside());
        (posted, taken)
    }

    fn done(&self, reclaimer: u32, bytes: u64) {
        self.finish(&inside(), reclaimer, bytes, |_| ());
    }
}

#[test]
fn requests_for_one_group_share_a_job_until_it_begins() {
    let jobs = JobQueue::with(2);
    let (first, second) =
        (jobs.enqueue(bytes(10), Poster::Waits).unwrap(), jobs.enqueue(bytes(20), Poster::Waits).unwrap());
    assert_eq!((first, jobs.posted_and_taken()), (second, (1, 0)));
    assert_eq!((jobs.took(1), jobs.took(2)), (Some(BOTH), None));
    let third = jobs.enqueue(bytes(5), Poster::Waits).unwrap();
    assert_ne!(first, third);
    assert_eq!((jobs.poll(first, Patience::Waits), jobs.posted_and_taken()), (None, (1, 1)));
    jobs.done(1, 99);
    assert_eq!([first, second].map(|ticket| jobs.poll(ticket, Patience::Waits)), [Some(99); 2]);
    assert_eq!((jobs.poll(third, Patience::GivesUp), jobs.took(1)), (Some(0), None), "no thread waits for it");
}

#[test]
fn job_of_lost_reclaimer_is_redone_and_its_late_answer_ignored() {
    let jobs = JobQueue::with(3);
    let ticket = jobs.enqueue(bytes(20), Poster::Waits).unwrap();
    assert_eq!(jobs.took(1), Some(bytes(20)));
    jobs.write_off(&inside(), 1, |_| panic!("not for the budget"));
    assert_eq!((jobs.posted_and_taken(), jobs.working_and_lost()), ((1, 0), (2, 1)));
    jobs.done(1, 5);
    assert_eq!((jobs.poll(ticket, Patience::Waits), jobs.took(2)), (None, Some(bytes(20))));
    jobs.done(2, 7);
    assert_eq!(jobs.poll(ticket, Patience::Waits), Some(7));
    assert!(jobs.enqueue(ReclaimJob::Node(0), Poster::Leaves).is_some() && jobs.took(3) == Some(ReclaimJob::Node(0)));
    jobs.write_off(&inside(), 3, |_| ());
    assert_eq!(jobs.posted_and_taken(), (0, 0), "no thread waits for it");
    assert_eq!(jobs.working_and_lost(), (1, 2));
    [1, 3].into_iter().for_each(|number| jobs.end(&inside(), number, |_| panic!("it has let go")));
    assert_eq!(jobs.working_and_lost(), (1, 0));
}

/// The slot has written the reclaimer off, and the callback has returned. Either of the two
/// threads comes first here.
#[test]
fn written_off_reclaimer_is_counted_once_in_either_order() {
    for is_back_first in [false, true] {
        let jobs = JobQueue::with(2);
        let ticket = jobs.enqueue(bytes(20), Poster::Waits).unwrap();
        assert_eq!(jobs.took(1), Some(bytes(20)));
        let posted_seq = jobs.posted_seq();
        if is_back_first {
            jobs.end(&inside(), 1, |_| ());
            assert_eq!((jobs.working_and_lost(), jobs.posted_and_taken()), ((1, 0), (1, 0)));
            // Another reclaimer may have taken the job by now.
            assert_eq!(jobs.took(2), Some(bytes(20)));
            jobs.write_off(&inside(), 1, |_| panic!("it has let go"));
        } else {
            jobs.write_off(&inside(), 1, |_| ());
            assert_eq!((jobs.working_and_lost(), jobs.posted_and_taken()), ((1, 1), (1, 0)));
            jobs.end(&inside(), 1, |_| panic!("it has let go"));
            assert_eq!(jobs.took(2), Some(bytes(20)));
        }
        assert_ne!(jobs.posted_seq(), posted_seq, "the sleeping reclaimer is not woken");
        assert_eq!((jobs.working_and_lost(), jobs.posted_and_taken()), ((1, 0), (0, 1)));
        jobs.done(2, 7);
        assert_eq!(jobs.poll(ticket, Patience::Waits), Some(7));
    }
}

#[test]
fn hire_creates_one_thread_per_job_without_idle_reclaimer() {
    let jobs = JobQueue::default();
    assert_eq!(
        (
            jobs.reserve_worker(&inside(), 0, 3, 0),
            jobs.reserve_worker(&inside(), 1, 3, 0),
            jobs.reserve_worker(&inside(), 1, 3, 0)
        ),
        (None, Some(1), None)
    );
    jobs.enqueue(high(1), Poster::Waits).unwrap();
    assert_eq!(jobs.reserve_worker(&inside(), 0, 3, 0), None, "one has nothing to do");
    jobs.enqueue(high(2), Poster::Waits).unwrap();
    assert_eq!(jobs.reserve_worker(&inside(), 0, 3, 0), Some(2), "though it has not come yet");
    jobs.spawn_failed(&inside(), 7);
    assert_eq!(
        (
            jobs.working_and_lost(),
            jobs.reserve_worker(&inside(), 0, 3, 7),
            jobs.reserve_worker(&inside(), 0, 3, 6 + SPAWN_RETRY_NS)
        ),
        ((1, 0), None, None)
    );
    assert_eq!(
        (
            jobs.reserve_worker(&inside(), 0, 3, 7 + SPAWN_RETRY_NS),
            jobs.reserve_worker(&inside(), 0, 3, 7 + SPAWN_RETRY_NS)
        ),
        (Some(3), None)
    );
    jobs.enqueue(high(3), Poster::Waits).unwrap();
    jobs.enqueue(high(4), Poster::Waits).unwrap();
    assert_eq!(
        (
            jobs.reserve_worker(&inside(), 0, 3, 7 + SPAWN_RETRY_NS),
            jobs.reserve_worker(&inside(), 0, 3, 7 + SPAWN_RETRY_NS)
        ),
        (Some(4), None),
        "there are enough"
    );
}

#[test]
fn no_more_are_made_while_too_many_do_not_come_back() {
    let jobs = JobQueue::default();
    for number in 1..=LOST_MAX {
        jobs.enqueue(high(1), Poster::Waits).unwrap();
        assert_eq!((jobs.reserve_worker(&inside(), 0, 4, 0), jobs.took(number)), (Some(number), Some(high(1))));
        jobs.write_off(&inside(), number, |_| ());
    }
    assert_eq!((jobs.reserve_worker(&inside(), 0, 4, 0), jobs.working_and_lost()), (None, (0, LOST_MAX)));
    jobs.end(&inside(), 1, |_| ());
    assert_eq!(jobs.reserve_worker(&inside(), 0, 4, 0), Some(LOST_MAX + 1));
}

/// A tick requests a node at each shortage, and a pass can take longer than the time between
/// two ticks.
#[test]
fn node_has_one_pass_at_a_time_and_its_end_is_reported() {
    let jobs = JobQueue::with(2);
    let (mut idle, mut again) = (0, 0);
    jobs.enqueue(ReclaimJob::Node(0), Poster::Leaves).unwrap();
    assert_eq!(jobs.took(1), Some(ReclaimJob::Node(0)));
    jobs.enqueue(ReclaimJob::Node(0), Poster::Leaves).unwrap();
    assert_eq!((jobs.took(2), jobs.posted_and_taken()), (None, (0, 1)));
    jobs.write_off(&inside(), 1, |_| idle += 1);
    assert_eq!(idle, 1);
    jobs.enqueue(ReclaimJob::Node(0), Poster::Leaves).unwrap();
    assert_eq!(jobs.took(2), Some(ReclaimJob::Node(0)));
    jobs.end(&inside(), 1, |_| again += 1);
    jobs.finish(&inside(), 2, 0, |_| idle += 1);
    assert_eq!((idle, again, jobs.posted_and_taken()), (2, 0, (0, 0)));
}

#[test]
fn the_oldest_job_is_done_first_wherever_it_lies() {
    let jobs = JobQueue::with(1);
    let tickets = [1, 2, 3].map(|number| jobs.enqueue(high(number), Poster::Waits).unwrap());
    assert_eq!(jobs.poll(tickets[0], Patience::GivesUp), Some(0));
    assert_eq!(jobs.enqueue(high(4), Poster::Waits), Some(tickets[0]), "in the place of the first");
    jobs.enqueue(high(3), Poster::Waits).unwrap();
    for number in [2, 3, 4] {
        assert_eq!(jobs.took(1), Some(high(number)));
        jobs.done(1, 1);
    }
}

#[test]
fn async_request_survives_waiter_timeout() {
    let jobs = JobQueue::with(2);
    let ticket = jobs.enqueue(bytes(20), Poster::Waits).unwrap();
    assert_eq!(jobs.enqueue(bytes(10), Poster::Leaves), Some(ticket));
    assert_eq!((jobs.poll(ticket, Patience::GivesUp), jobs.posted_and_taken()), (Some(0), (1, 0)));
    assert_eq!(jobs.took(1), Some(BOTH));
    jobs.write_off(&inside(), 1, |_| ());
    assert_eq!(jobs.took(2), Some(BOTH));
    jobs.done(2, 1);
    assert_eq!(jobs.posted_and_taken(), (0, 0));
}

#[test]
fn a_child_has_no_jobs_and_no_reclaimers_and_its_parents_end() {
    let jobs = JobQueue::with(2);
    let ticket = jobs.enqueue(bytes(20), Poster::Waits).unwrap();
    assert_eq!(jobs.took(1), Some(bytes(20)));
    jobs.write_off(&inside(), 1, |_| ());
    assert_eq!(jobs.took(2), Some(bytes(20)));
    jobs.forget_all(&inside());
    assert_eq!((jobs.working_and_lost(), jobs.poll(ticket, Patience::Waits)), ((0, 0), Some(0)));
    for number in [1, 2] {
        jobs.end(&inside(), number, |_| panic!("it has nothing"));
        jobs.write_off(&inside(), number, |_| panic!("it has nothing"));
        jobs.finish(&inside(), number, 1, |_| panic!("it has nothing"));
        assert_eq!((jobs.take(&inside(), number), jobs.working_and_lost()), (Next::End, (0, 0)));
    }
    jobs.enqueue(bytes(20), Poster::Waits).unwrap();
    assert_eq!((jobs.reserve_worker(&inside(), 0, 4, 0), jobs.took(3)), (Some(3), Some(bytes(20))));
}

#[test]
fn dismissed_reclaimers_end_and_none_is_hired() {
    let jobs = JobQueue::with(2);
    jobs.enqueue(bytes(20), Poster::Waits).unwrap();
    let posted_seq = jobs.posted_seq();
    jobs.dismiss(&inside());
    assert_ne!(jobs.posted_seq(), posted_seq, "the sleeping reclaimer is not woken");
    jobs.finish(&inside(), 1, 7, |_| panic!("it has nothing"));
    jobs.end(&inside(), 2, |_| panic!("it has nothing"));
    assert_eq!([1, 2].map(|number| jobs.take(&inside(), number)), [Next::End, Next::End]);
    assert_eq!((jobs.reserve_worker(&inside(), 1, 4, u64::MAX - 1), jobs.working_and_lost()), (None, (0, 0)));
}

/// Without a wake-up this test would not end. The comparison of the futex word fails at once.
#[test]
fn sleeping_reclaimer_is_woken_for_a_handed_back_job() {
    let jobs = JobQueue::with(2);
    let ticket = jobs.enqueue(bytes(20), Poster::Waits).unwrap();
    assert_eq!(jobs.took(1), Some(bytes(20)));
    let posted_seq = jobs.posted_seq();
    std::thread::scope(|scope| {
        let idle = scope.spawn(|| {
            loop {
                match jobs.take(&inside(), 2) {
                    Next::Job(job) => break job,
                    Next::Nothing(idle) => jobs.sleep(idle, None),
                    Next::End => panic!("it is no parent's"),
                }
            }
        });
        jobs.write_off(&inside(), 1, |_| ());
        assert_ne!(jobs.posted_seq(), posted_seq, "the sleeping reclaimer is not woken");
        assert_eq!(idle.join().unwrap(), bytes(20));
    });
    jobs.done(2, 7);
    assert_eq!(jobs.poll(ticket, Patience::Waits), Some(7));
}

/// Other jobs do not take the places of requests, and each server that finds another request
/// due lets one more come.
#[test]
fn requests_job_has_reserved_room_and_one_successor() {
    let jobs = JobQueue::with(2);
    (0..JOBS).for_each(|at| _ = jobs.enqueue(high(at as u64), Poster::Waits).unwrap());
    assert!(!jobs.post(&inside(), ReclaimJob::Node(0)), "it is full");
    for _ in 0..3 {
        assert!(jobs.post(&inside(), ReclaimJob::Requests));
    }
    assert_eq!(jobs.posted_and_taken(), (JOBS as u32 + 1, 0), "all that are posted are one");
    (0..JOBS).for_each(|at| {
        assert_eq!(jobs.took(1), Some(high(at as u64)));
        jobs.done(1, 1);
    });
    assert_eq!(jobs.took(1), Some(ReclaimJob::Requests));
    assert!(jobs.post(&inside(), ReclaimJob::Requests), "what a server has begun with is not what is needed now");
    assert_eq!((jobs.took(2), jobs.posted_and_taken()), (Some(ReclaimJob::Requests), (0, 2)));
    jobs.write_off(&inside(), 1, |_| ());
    assert_eq!(jobs.posted_and_taken(), (1, 1), "another server is to look");
    jobs.done(2, 0);
    assert_eq!((jobs.took(2), jobs.posted_and_taken()), (Some(ReclaimJob::Requests), (0, 1)));
    jobs.done(2, 0);
    assert_eq!(jobs.posted_and_taken(), (0, 0));
}

#[test]
fn full_queue_refuses_jobs_until_a_last_waiter_gives_up() {
    let jobs = JobQueue::default();
    let tickets: [Ticket; JOBS] = core::array::from_fn(|at| {
        let ticket = jobs.enqueue(high(at as u64), Poster::Waits).unwrap();
        assert_eq!(jobs.enqueue(high(at as u64), Poster::Waits), Some(ticket), "shares");
        ticket
    });
    assert_eq!(
        (jobs.enqueue(ReclaimJob::Node(0), Poster::Leaves), jobs.enqueue(ReclaimJob::Node(0), Poster::Waits)),
        (None, None)
    );
    let done_seq = jobs.done_seq();
    assert_eq!(
        (jobs.poll(tickets[3], Patience::GivesUp), jobs.done_seq()),
        (Some(0), done_seq),
        "another one waits for it"
    );
    assert_eq!(jobs.poll(tickets[3], Patience::GivesUp), Some(0));
    assert_ne!(jobs.done_seq(), done_seq, "the thread that waits for room is not told");
    assert_eq!(jobs.enqueue(ReclaimJob::Node(0), Poster::Waits), Some(tickets[3]));
    jobs.forget_all(&inside());
    assert_eq!(jobs.posted_and_taken(), (0, 0));
}
