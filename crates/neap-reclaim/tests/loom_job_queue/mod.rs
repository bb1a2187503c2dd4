//! The job queue, with threads that post, wait and give up, reclaimers that take, end and are
//! written off, and watchers.
//!
//! The threads do what those of `neap` do with the real queue. No deadline comes while a thread
//! sleeps, so a lost wake-up stops a model; a waiter that gives up does so at any moment instead. A
//! job brings as many bytes as the number of its group, so an answer shows its job.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread::{self, JoinHandle};
use neap_base::gate::{Gate, Inside};
use neap_base::sync::{AtomicUsize, Ordering};
use neap_groups::{GroupId, Patience};
use neap_reclaim::reclaim::callback_state::CallbackState;
use neap_reclaim::reclaim::{JobCount, JobQueue, Next, ReclaimJob, Waiter};

/// Maximum number of jobs at a time.
const MOST: u64 = 16;
const NO_JOBS: JobCount = JobCount { posted: 0, taken: 0 };
/// Group of the job that lets a reclaimer end.
const STOP: u64 = 90;

fn aim(group: u64) -> ReclaimJob {
    ReclaimJob::AboveHigh(GroupId::from_bits(group))
}

fn bytes_of(aim: ReclaimJob) -> u64 {
    match aim {
        ReclaimJob::AboveHigh(group) => group.to_bits(),
        other => panic!("no thread has posted {other:?}"),
    }
}

/// Explores `actor` and the threads that it spawns. Each thread is inside a gate of its own from
/// its first step on, so the gate adds no interleavings. It sleeps there, which no closer notices.
fn model(actor: impl Fn(&Inside<'_>) + Send + Sync + 'static) {
    loom::model(move || {
        let gate = Gate::new();
        let inside = gate.enter(0);
        actor(&inside);
    });
}

/// Makes a queue with that many reclaimers.
fn queue_of(inside: &Inside<'_>, threads: u32) -> Arc<JobQueue> {
    let jobs = JobQueue::default();
    (1..=threads).for_each(|number| assert_eq!(jobs.reserve_worker(inside, threads, threads, 0), Some(number)));
    Arc::new(jobs)
}

/// Waits as a charge does, without a deadline.
fn await_answer(inside: &Inside<'_>, jobs: &JobQueue, mut waiter: Waiter) -> u64 {
    loop {
        jobs.ask(inside, &mut waiter);
        if let Some(bytes) = jobs.answer(inside, &waiter, Patience::Waits) {
            return bytes;
        }
        jobs.wait(&waiter, 1);
    }
}

/// Posts a job, gives it up, and returns its result until then.
fn ask_in_passing(inside: &Inside<'_>, jobs: &JobQueue, group: u64) -> u64 {
    let mut waiter = Waiter::new(aim(group));
    jobs.ask(inside, &mut waiter);
    jobs.answer(inside, &waiter, Patience::GivesUp).unwrap()
}

fn not_a_node(node: usize) {
    panic!("{node} was in no job");
}

/// Runs a reclaimer: does `most` jobs unless it is stopped before. Returns the jobs.
fn reclaim(inside: &Inside<'_>, jobs: &JobQueue, number: u32, most: usize) -> Vec<u64> {
    let mut done = Vec::new();
    while done.len() < most {
        match jobs.take(inside, number) {
            Next::Job(aim) => {
                let bytes = bytes_of(aim);
                jobs.finish(inside, number, bytes, not_a_node);
                if bytes == STOP {
                    break;
                }
                done.push(bytes);
            }
            Next::Nothing(idle) => jobs.sleep(idle, None),
            Next::End => panic!("it is no parent's"),
        }
    }
    done
}

fn spawn<R: 'static>(jobs: &Arc<JobQueue>, actor: impl FnOnce(&JobQueue, &Inside<'_>) -> R + 'static) -> JoinHandle<R> {
    let jobs = jobs.clone();
    thread::spawn(move || {
        let gate = Gate::new();
        let inside = gate.enter(0);
        actor(&jobs, &inside)
    })
}

fn working_and_lost(inside: &Inside<'_>, jobs: &JobQueue) -> (u32, u32) {
    let threads = jobs.threads(inside);
    (threads.working, threads.lost)
}

/// Checks that each place is free, and that no reclaimer has a job.
fn check_empty(inside: &Inside<'_>, jobs: &JobQueue) {
    assert_eq!(jobs.count(inside), NO_JOBS);
    (1..=MOST).for_each(|group| assert!(jobs.post(inside, aim(group)), "a job is left"));
    assert!(!jobs.post(inside, aim(MOST + 1)));
}

/// Two jobs, one of which no thread waits for, and two reclaimers for one job each.
#[test]
fn a_job_is_done_by_one_and_its_waiter_is_woken() {
    model(|inside| {
        let jobs = queue_of(inside, 2);
        let reclaimers = [1, 2].map(|number| spawn(&jobs, move |jobs, inside| reclaim(inside, jobs, number, 1)));
        assert!(jobs.post(inside, aim(5)));
        assert_eq!(await_answer(inside, &jobs, Waiter::new(aim(7))), 7);
        let mut done = reclaimers.map(|reclaimer| reclaimer.join().unwrap()).concat();
        done.sort();
        assert_eq!((done, jobs.count(inside)), (vec![5, 7], NO_JOBS));
    });
}

/// A waiter sees what the reclaimer wrote, without another word than those of the queue.
#[test]
fn done_job_publishes_reclaimer_writes_to_its_waiter() {
    model(|inside| {
        let jobs = queue_of(inside, 1);
        let freed = Arc::new(UnsafeCell::new(0));
        let reclaimer = {
            let freed = freed.clone();
            spawn(&jobs, move |jobs, inside| {
                if let Next::Job(aim) = jobs.take(inside, 1) {
                    // SAFETY: the waiter looks after the job is done; loom reports it if not.
                    freed.with_mut(|freed| unsafe { *freed = 7 });
                    jobs.finish(inside, 1, bytes_of(aim), not_a_node);
                }
            })
        };
        let mut waiter = Waiter::new(aim(7));
        jobs.ask(inside, &mut waiter);
        if jobs.answer(inside, &waiter, Patience::GivesUp) == Some(7) {
            // SAFETY: the job is done, so the reclaimer has written this.
            assert_eq!(freed.with(|freed| unsafe { *freed }), 7);
        }
        reclaimer.join().unwrap();
        check_empty(inside, &jobs);
    });
}

/// R's callback is stuck. The watcher W writes R off and posts its job again, or R returns first
/// and does. Another reclaimer, which sleeps or not yet, does the job.
#[test]
fn handed_back_job_is_answered_by_another_reclaimer() {
    model(|inside| {
        let jobs = queue_of(inside, 2);
        let seat = Arc::new(CallbackState::default());
        let mut waiter = Waiter::new(aim(7));
        jobs.ask(inside, &mut waiter);
        assert_eq!(jobs.take(inside, 1), Next::Job(aim(7)));
        assert!(seat.take(1));
        seat.begin(1, 1);
        // The seat runs here, whatever thread this is.
        let running = seat.running().unwrap();
        let watcher = {
            let seat = seat.clone();
            spawn(&jobs, move |jobs, inside| {
                let is_first = seat.write_off(&running);
                if is_first {
                    jobs.write_off(inside, running.reclaimer, not_a_node);
                }
                is_first
            })
        };
        let stuck = spawn(&jobs, move |jobs, inside| {
            let is_off = seat.end();
            if is_off {
                jobs.end(inside, 1, not_a_node);
            } else {
                jobs.finish(inside, 1, 1, not_a_node);
            }
            is_off
        });
        let other = spawn(&jobs, |jobs, inside| reclaim(inside, jobs, 2, 1));
        let bytes = await_answer(inside, &jobs, waiter);
        if bytes == 1 {
            assert!(jobs.post(inside, aim(STOP)));
        }
        let [written_off, heard] = [watcher, stuck].map(|actor| actor.join().unwrap());
        let done = other.join().unwrap();
        let expected = if heard { (7, vec![7], (1, 0)) } else { (1, vec![], (2, 0)) };
        assert_eq!((bytes, done, working_and_lost(inside, &jobs)), expected);
        assert_eq!((written_off, jobs.count(inside)), (heard, NO_JOBS));
    });
}

/// A gives up while R does its job, or before that. B's job gets the place. R ends A's.
#[test]
fn late_answer_after_timeout_never_reaches_another_waiter() {
    model(|inside| {
        let jobs = queue_of(inside, 1);
        let reclaimer = spawn(&jobs, |jobs, inside| reclaim(inside, jobs, 1, 3));
        let first = ask_in_passing(inside, &jobs, 5);
        assert!(first == 0 || first == 5, "{first}");
        assert_eq!(await_answer(inside, &jobs, Waiter::new(aim(7))), 7);
        assert!(jobs.post(inside, aim(STOP)));
        let done = reclaimer.join().unwrap();
        assert!(done == [7] && first == 0 || done == [5, 7], "{done:?}");
        check_empty(inside, &jobs);
    });
}

/// A job of two waiters is dropped when the second gives it up, and not before.
#[test]
fn shared_job_survives_one_waiter_giving_up() {
    model(|inside| {
        let jobs = queue_of(inside, 1);
        let [mut own, mut other] = [7, 7].map(|group| Waiter::new(aim(group)));
        [&mut own, &mut other].into_iter().for_each(|waiter| jobs.ask(inside, waiter));
        let passing = spawn(&jobs, move |jobs, inside| jobs.answer(inside, &other, Patience::GivesUp).unwrap());
        let reclaimer = spawn(&jobs, |jobs, inside| reclaim(inside, jobs, 1, 1));
        assert_eq!(await_answer(inside, &jobs, own), 7);
        let answer = passing.join().unwrap();
        assert!(answer == 0 || answer == 7, "{answer}");
        assert_eq!(reclaimer.join().unwrap(), [7]);
        check_empty(inside, &jobs);
    });
}

/// A waits for R's job. W posts it again while A gives up and R returns. No thread wants the job
/// then, and each thread is counted once.
#[test]
fn job_given_up_during_handback_has_no_waiter() {
    model(|inside| {
        let jobs = queue_of(inside, 2);
        let mut waiter = Waiter::new(aim(7));
        jobs.ask(inside, &mut waiter);
        assert_eq!(jobs.take(inside, 1), Next::Job(aim(7)));
        let watcher = spawn(&jobs, |jobs, inside| jobs.write_off(inside, 1, not_a_node));
        let stuck = spawn(&jobs, |jobs, inside| jobs.end(inside, 1, not_a_node));
        assert_eq!(jobs.answer(inside, &waiter, Patience::GivesUp), Some(0));
        [watcher, stuck].into_iter().for_each(|actor| actor.join().unwrap());
        assert_eq!(working_and_lost(inside, &jobs), (1, 0));
        check_empty(inside, &jobs);
    });
}

#[test]
fn two_waiters_for_different_jobs_are_both_answered() {
    model(|inside| {
        let jobs = queue_of(inside, 1);
        let reclaimer = spawn(&jobs, |jobs, inside| reclaim(inside, jobs, 1, 2));
        let other = spawn(&jobs, |jobs, inside| await_answer(inside, jobs, Waiter::new(aim(5))));
        assert_eq!(await_answer(inside, &jobs, Waiter::new(aim(7))), 7);
        assert_eq!(other.join().unwrap(), 5);
        let mut done = reclaimer.join().unwrap();
        done.sort();
        assert_eq!((done, jobs.count(inside)), (vec![5, 7], NO_JOBS));
    });
}

/// The second waiter comes before the reclaimer has taken the job, and shares it, or later, and has
/// a job of its own.
#[test]
fn two_waiters_for_the_same_aim_are_both_answered() {
    model(|inside| {
        let jobs = queue_of(inside, 1);
        let mut waiter = Waiter::new(aim(7));
        jobs.ask(inside, &mut waiter);
        let reclaimer = spawn(&jobs, |jobs, inside| reclaim(inside, jobs, 1, 3));
        let other = spawn(&jobs, |jobs, inside| {
            let has_begun = jobs.count(inside) != (JobCount { posted: 1, taken: 0 });
            assert_eq!(await_answer(inside, jobs, Waiter::new(aim(7))), 7);
            has_begun
        });
        assert_eq!(await_answer(inside, &jobs, waiter), 7);
        let had_begun = other.join().unwrap();
        assert!(jobs.post(inside, aim(STOP)));
        let done = reclaimer.join().unwrap();
        assert!(done == [7] && !had_begun || done == [7, 7], "{done:?}");
    });
}

/// All places but one have jobs that stay taken. The last one becomes free by its reclaimer, by its
/// waiter that gives up, or by a second reclaimer after the first was stuck.
#[test]
fn waiter_for_queue_room_is_woken_when_a_place_is_freed() {
    #[derive(Clone, Copy, PartialEq)]
    enum End {
        Done,
        GivenUp,
        HandedBack,
    }
    for end in [End::Done, End::GivenUp, End::HandedBack] {
        model(move |inside| {
            let jobs = queue_of(inside, 1);
            for number in 2..=MOST {
                assert!(jobs.post(inside, aim(number + 20)));
                assert_eq!(jobs.take(inside, number as u32), Next::Job(aim(number + 20)));
            }
            let mut first = Waiter::new(aim(5));
            if end == End::HandedBack {
                assert!(jobs.post(inside, aim(5)));
                assert_eq!(jobs.take(inside, 1), Next::Job(aim(5)));
            } else {
                jobs.ask(inside, &mut first);
            }
            let other = spawn(&jobs, |jobs, inside| await_answer(inside, jobs, Waiter::new(aim(7))));
            match end {
                End::Done => {}
                End::GivenUp => assert_eq!(jobs.answer(inside, &first, Patience::GivesUp), Some(0)),
                End::HandedBack => jobs.write_off(inside, 1, not_a_node),
            }
            let expected = if end == End::GivenUp { vec![7] } else { vec![5, 7] };
            let most = expected.len();
            let reclaimer = spawn(&jobs, move |jobs, inside| reclaim(inside, jobs, MOST as u32 + 1, most));
            if end == End::Done {
                assert_eq!(await_answer(inside, &jobs, first), 5);
            }
            assert_eq!(other.join().unwrap(), 7);
            assert_eq!(reclaimer.join().unwrap(), expected);
        });
    }
}

/// A node: whether it is short, and the passes on it.
struct Node {
    short: AtomicUsize,
    pass: UnsafeCell<()>,
    is_under_way: AtomicUsize,
}

impl Node {
    fn new() -> Arc<Node> {
        Arc::new(Node { short: AtomicUsize::new(0), pass: UnsafeCell::new(()), is_under_way: AtomicUsize::new(0) })
    }

    fn idle(&self) {
        self.is_under_way.store(0, Ordering::Relaxed);
    }

    /// Allocates, and finds the node short.
    fn allocate(&self, inside: &Inside<'_>, jobs: &JobQueue) {
        self.short.store(1, Ordering::Relaxed);
        assert!(jobs.post(inside, ReclaimJob::Node(0)));
    }

    /// Looks for a job once, and does it. Returns whether there was one.
    fn relieve(&self, inside: &Inside<'_>, jobs: &JobQueue, number: u32) -> bool {
        let is_job = jobs.take(inside, number) == Next::Job(ReclaimJob::Node(0));
        if is_job {
            self.pass.with_mut(|_| self.short.store(0, Ordering::Relaxed));
            jobs.finish(inside, number, 1, |_| self.idle());
        }
        is_job
    }
}

/// A pass finds the node above its high watermark. A thread allocates, finds it at the low one, and
/// posts. The pass ends.
#[test]
fn node_short_at_pass_end_gets_another_pass_one_at_a_time() {
    model(|inside| {
        let (jobs, node) = (queue_of(inside, 2), Node::new());
        node.allocate(inside, &jobs);
        let reclaimers = [1, 2].map(|number| {
            let node = node.clone();
            spawn(&jobs, move |jobs, inside| node.relieve(inside, jobs, number))
        });
        node.allocate(inside, &jobs);
        reclaimers.into_iter().for_each(|reclaimer| _ = reclaimer.join().unwrap());
        assert_eq!(jobs.count(inside).taken, 0);
        let is_wanted = jobs.count(inside).posted == 1;
        assert!(is_wanted || node.short.load(Ordering::Relaxed) == 0, "no reclaimer comes to a node that is short");
        assert_eq!(node.relieve(inside, &jobs, 1), is_wanted);
        assert!(!node.relieve(inside, &jobs, 2), "it is wanted for ever");
    });
}

/// R1, in a pass over a node, is written off. R2 continues that. R1 returns: the pass that runs is
/// not its own.
#[test]
fn handed_over_pass_is_under_way_until_its_new_owner_ends_it() {
    model(|inside| {
        let (jobs, node) = (queue_of(inside, 2), Node::new());
        assert!(jobs.post(inside, ReclaimJob::Node(0)));
        assert_eq!(jobs.take(inside, 1), Next::Job(ReclaimJob::Node(0)));
        // A thread posted meanwhile, so the job is wanted when R1 lets go.
        assert!(jobs.post(inside, ReclaimJob::Node(0)));
        node.is_under_way.store(1, Ordering::Relaxed);
        let [watcher, stuck] = [true, false].map(|watches| {
            let node = node.clone();
            spawn(&jobs, move |jobs, inside| {
                let leave = if watches { JobQueue::write_off } else { JobQueue::end };
                leave(jobs, inside, 1, |_| node.idle());
            })
        });
        loop {
            match jobs.take(inside, 2) {
                Next::Job(aim) => break assert_eq!(aim, ReclaimJob::Node(0)),
                Next::Nothing(idle) => jobs.sleep(idle, None),
                Next::End => panic!("it is no parent's"),
            }
        }
        assert_eq!(node.is_under_way.load(Ordering::Relaxed), 0, "R1 did not say that it is over");
        node.is_under_way.store(1, Ordering::Relaxed);
        [watcher, stuck].into_iter().for_each(|actor| actor.join().unwrap());
        assert_eq!(node.is_under_way.load(Ordering::Relaxed), 1, "R1 says that R2's is over");
        jobs.finish(inside, 2, 1, |_| node.idle());
        assert_eq!((node.is_under_way.load(Ordering::Relaxed), working_and_lost(inside, &jobs)), (0, (1, 0)));
        check_empty(inside, &jobs);
    });
}

/// A thread that posts makes a reclaimer if there are too few: as many as jobs, in any order.
#[test]
fn one_reclaimer_is_made_for_each_job() {
    for groups in [[5, 7], [7, 7]] {
        model(move |inside| {
            let jobs = queue_of(inside, 0);
            let post_and_reserve = |inside: &Inside<'_>, jobs: &JobQueue, group| {
                assert!(jobs.post(inside, aim(group)));
                u32::from(jobs.reserve_worker(inside, 0, 4, 0).is_some())
            };
            let other = spawn(&jobs, move |jobs, inside| post_and_reserve(inside, jobs, groups[0]));
            let reserved = post_and_reserve(inside, &jobs, groups[1]) + other.join().unwrap();
            assert_eq!(reserved, if groups[0] == groups[1] { 1 } else { 2 });
            assert_eq!(working_and_lost(inside, &jobs), (reserved, 0));
        });
    }
}
