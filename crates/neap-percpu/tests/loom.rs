//! Explores a reference count that is killed, and a free with the worker, in every interleaving, by
//! loom. Empty unless built with `--cfg loom` (`cargo xtask loom`).
#![cfg(loom)]

use loom::sync::Arc;
use loom::thread;
use neap_base::Mutex;
use neap_base::platform::Errno;
use neap_base::sync::{AtomicUsize, Ordering};
use neap_percpu::reference::{Count, Counts};
use neap_percpu::{Owner, PerCpuData, Shape, Wait};
use neap_testing::virtual_platform::Virtual;

/// Words of two CPUs. Each has a mutex that a running sequence holds, and that a fence waits for.
struct Cpus([(Mutex<()>, AtomicUsize); 2]);

struct Words(Arc<Cpus>);

loom::thread_local! {
    static CPU: std::cell::Cell<usize> = std::cell::Cell::new(0);
}

impl Counts for Words {
    fn add(&self, open: &AtomicUsize, value: i64) -> bool {
        let (sequence, word) = &self.0.0[CPU.with(|cpu| cpu.get())];
        let _sequence = sequence.lock();
        let opened = open.load(Ordering::Relaxed) != 0;
        if opened {
            word.store(word.load(Ordering::Relaxed).wrapping_add(value as usize), Ordering::Relaxed);
        }
        opened
    }

    fn sum(&self) -> i64 {
        self.0.0.iter().fold(0, |sum, (_, word)| sum + word.load(Ordering::Relaxed) as i64)
    }

    fn opened(&self) -> usize {
        1
    }

    fn clear(&self) {
        self.0.0.iter().for_each(|(_, word)| word.store(0, Ordering::Relaxed));
    }
}

/// Waits for all sequences that began before.
fn fence(cpus: &Cpus) {
    cpus.0.iter().for_each(|(sequence, _)| drop(sequence.lock()));
}

fn count() -> (Arc<Count<Words>>, Arc<Cpus>) {
    let cpus = Arc::new(Cpus([(); 2].map(|()| (Mutex::new(()), AtomicUsize::new(0)))));
    (Arc::new(Count::new(Words(cpus.clone()))), cpus)
}

fn kill<const N: usize>(
    counts: [&Count<Words>; N],
    fence: impl FnOnce() -> Result<(), Errno>,
    last: impl FnMut(usize),
) -> Result<usize, Errno> {
    let killed = Count::close_all(counts.into_iter(), fence)?;
    (0..N).filter(|at| counts[*at].put_first()).for_each(last);
    Ok(killed)
}

#[test]
fn last_put_is_reported_exactly_once_by_put_or_kill() {
    loom::model(|| {
        let (count, words) = count();
        let released = Arc::new(loom::sync::atomic::AtomicUsize::new(0));
        let user = {
            let (count, released) = (count.clone(), released.clone());
            thread::spawn(move || {
                CPU.with(|cpu| cpu.set(1));
                if count.try_get() {
                    assert_eq!(released.load(Ordering::Relaxed), 0, "released while it is referred to");
                    if count.put() {
                        released.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        };
        let last = |_| _ = released.fetch_add(1, Ordering::Relaxed);
        let killed = kill([&*count], || Ok(fence(&words)), last);
        assert_eq!(killed, Ok(1));
        user.join().unwrap();
        assert_eq!((released.load(Ordering::Relaxed), count.references()), (1, Some(0)));
        assert!(!count.try_get());
    });
}

/// The reference is taken on one CPU, and put on another while the count is killed. One fence
/// fails, one succeeds.
#[test]
fn a_reference_moves_between_cpus_while_it_is_killed() {
    loom::model(|| {
        let (count, words) = count();
        count.get();
        let user = {
            let count = count.clone();
            thread::spawn(move || {
                CPU.with(|cpu| cpu.set(1));
                count.put()
            })
        };
        let mut released = 0;
        assert_eq!(kill([&*count], || Err(Errno::PERM), |_| released += 1), Err(Errno::PERM));
        assert!(released == 0 && !count.is_dead());
        let killed = kill([&*count, &*count], || Ok(fence(&words)), |_| released += 1);
        assert_eq!(killed, Ok(1));
        assert_eq!(released + usize::from(user.join().unwrap()), 1);
        assert_eq!(count.references(), Some(0));
    });
}

#[test]
fn concurrent_kills_of_one_count_kill_it_exactly_once() {
    loom::model(|| {
        let (count, words) = count();
        let other = {
            let (count, words) = (count.clone(), words.clone());
            thread::spawn(move || {
                let mut released = 0;
                let killed = kill([&*count], || Ok(fence(&words)), |_| released += 1);
                (killed.unwrap(), released)
            })
        };
        let mut released = 0;
        let killed = kill([&*count], || Ok(fence(&words)), |_| released += 1).unwrap();
        let (others_killed, others_released) = other.join().unwrap();
        assert_eq!((killed + others_killed, released + others_released), (1, 1));
    });
}

/// A chunk is emptied while its rest is freed: all memory is released in the end, and `verify`
/// succeeds at any time.
#[test]
fn a_free_and_the_worker_leave_nothing_behind() {
    loom::model(|| {
        let machine = std::sync::Arc::new(Virtual::new(4096, 1));
        let shape = Shape { unit: 64 << 10, span: 128 << 10, ..Shape::usual(1) };
        let data = Arc::new(PerCpuData::open(&*machine, &shape, |_| 0, ()).unwrap());
        let take = |_| data.allocate(&*machine, Owner::NONE, 16 << 10, 8, Wait::Long).unwrap();
        let held: Vec<_> = (0..5).map(take).collect();
        // SAFETY: no code uses the allocation any more.
        let free = |data: &PerCpuData, handle| _ = unsafe { data.free(handle) }.unwrap();
        held[1..4].iter().for_each(|handle| free(&data, *handle));
        let freeing = {
            let (data, handles) = (data.clone(), [held[0], held[4]]);
            thread::spawn(move || handles.iter().for_each(|handle| free(&data, *handle)))
        };
        data.tick(&*machine);
        data.verify().unwrap();
        freeing.join().unwrap();
        data.verify().unwrap();
        (0..3).for_each(|_| _ = data.tick(&*machine));
        data.verify().unwrap();
        let left = data.statistics();
        assert_eq!((left.populated, left.isolated_empty, left.chunks), (left.reserve, 0, 1));
        // SAFETY: the other thread has ended, and no allocation is in use.
        unsafe { data.close(&*machine) };
    });
}
