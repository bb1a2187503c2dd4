//! Every interleaving of marks with visits that clear bits, and of references with the end of a
//! life and a new one, by loom. Folders beside this file have the models of callback states, of the
//! job queue and of lists. Empty unless built with `--cfg loom` (`cargo xtask loom`).
#![cfg(loom)]

mod loom_callback_state;
mod loom_job_queue;
mod loom_lists;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use neap_base::Mutex;
use neap_base::platform::Errno;
use neap_base::sync::{AtomicUsize, Ordering};
use neap_percpu::reference::Counts;
use neap_reclaim::shrinkers::bits::{Bit, clear_bit_if_empty, set_bits};
use neap_reclaim::shrinkers::lifecycle::{ENDING, Ending, LIVE, Life, PREPARED};

/// An info: objects, and three levels of bits above them.
struct Info {
    objects: AtomicUsize,
    levels: [AtomicUsize; 3],
}

impl Info {
    fn new() -> Arc<Info> {
        Arc::new(Info { objects: AtomicUsize::new(0), levels: [(); 3].map(|()| AtomicUsize::new(0)) })
    }

    fn bits(&self, from: usize) -> impl Iterator<Item = Bit<'_>> {
        self.levels[from..].iter().map(|word| Bit { word, bit: 5 })
    }

    fn add(&self) {
        self.objects.fetch_add(1, Ordering::Relaxed);
        set_bits(self.bits(0));
    }

    /// Clears all bits with nothing below.
    fn visit(&self) {
        let is_empty = || self.objects.load(Ordering::Relaxed) == 0;
        if self.levels[0].load(Ordering::Relaxed) != 0 && is_empty() {
            clear_bit_if_empty(self.bits(0), is_empty);
        }
        for level in 1..3 {
            let is_empty = || self.levels[level - 1].load(Ordering::Relaxed) == 0;
            if self.levels[level].load(Ordering::Relaxed) != 0 && is_empty() {
                clear_bit_if_empty(self.bits(level), is_empty);
            }
        }
    }

    /// Checks, while no thread is on its way, that the objects can be found.
    fn check(&self) {
        if self.objects.load(Ordering::Relaxed) > 0 {
            let levels = self.levels.each_ref().map(|level| level.load(Ordering::Relaxed));
            assert_eq!(levels, [1 << 5; 3], "there is something that no pass finds");
        }
    }
}

#[test]
fn what_is_added_while_bits_are_cleared_is_found() {
    loom::model(|| {
        let info = Info::new();
        // Objects were there and are gone, and their bits remain.
        set_bits(info.bits(0));
        let adder = {
            let info = info.clone();
            thread::spawn(move || info.add())
        };
        info.visit();
        adder.join().unwrap();
        info.check();
    });
}

#[test]
fn of_two_visitors_none_takes_away_what_the_other_has_found() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let info = Info::new();
        set_bits(info.bits(0));
        let threads = [true, false].map(|adds| {
            let info = info.clone();
            thread::spawn(move || if adds { info.add() } else { info.visit() })
        });
        info.visit();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        info.check();
    });
}

/// Two CPUs' words, as in the model of references themselves.
struct Words([(Mutex<()>, AtomicUsize); 2]);

loom::thread_local! {
    static CPU: std::cell::Cell<usize> = std::cell::Cell::new(0);
}

impl Counts for Words {
    fn add(&self, open: &AtomicUsize, value: i64) -> bool {
        let (sequence, word) = &self.0[CPU.with(|cpu| cpu.get())];
        let _sequence = sequence.lock();
        let opened = open.load(Ordering::Acquire) != 0;
        if opened {
            word.store(word.load(Ordering::Relaxed).wrapping_add(value as usize), Ordering::Relaxed);
        }
        opened
    }

    fn sum(&self) -> i64 {
        self.0.iter().fold(0, |sum, (_, word)| sum + word.load(Ordering::Relaxed) as i64)
    }

    fn opened(&self) -> usize {
        1
    }

    fn clear(&self) {
        self.0.iter().for_each(|(_, word)| word.store(0, Ordering::Relaxed));
    }
}

/// An index of a registry, with the data of its life: the number of the life.
struct Index {
    life: Life<Words>,
    said: UnsafeCell<u32>,
}

impl Index {
    fn new() -> Arc<Index> {
        let words = Words([(); 2].map(|()| (Mutex::new(()), AtomicUsize::new(0))));
        let index = Index { life: Life::new(words), said: UnsafeCell::new(0) };
        index.begin(1);
        Arc::new(index)
    }

    fn begin(&self, number: u32) {
        // SAFETY: no thread has a reference; the model reports it if one has.
        self.said.with_mut(|said| unsafe { *said = number });
        self.life.prepare();
        self.life.start();
    }

    fn finish(&self) {
        // SAFETY: the last reference was put; the model reports it if a thread still reads.
        self.said.with_mut(|said| unsafe { *said = 0 });
        self.life.free();
    }

    /// Visits once; returns the number of the visited life.
    fn visit(&self) -> Option<u32> {
        CPU.with(|cpu| cpu.set(1));
        if !self.life.try_get(|| {}) {
            return None;
        }
        // SAFETY: with a reference it is only read.
        let said = self.said.with(|said| unsafe { *said });
        if self.life.put() {
            self.finish();
        }
        Some(said)
    }

    fn unregister(&self) {
        let Ending { before, ended } = self.life.end().unwrap();
        assert_eq!(before, LIVE);
        let fence = || {
            self.life.words().0.iter().for_each(|(sequence, _)| drop(sequence.lock()));
            Ok(())
        };
        if self.life.close(fence).unwrap() {
            self.finish();
        }
        while !self.life.is_over(ended) {
            self.life.wait(ended);
        }
    }
}

#[test]
fn no_callback_runs_after_unregister_returns() {
    loom::model(|| {
        let index = Index::new();
        let visitor = {
            let index = index.clone();
            thread::spawn(move || index.visit())
        };
        index.unregister();
        // SAFETY: the life is over, so no other thread accesses its data.
        index.said.with_mut(|said| unsafe { *said = 7 });
        let seen = visitor.join().unwrap();
        assert!(matches!(seen, None | Some(1)), "{seen:?}");
        assert!(index.visit().is_none() && index.life.end().is_none());
    });
}

#[test]
fn a_visitor_of_one_life_may_meet_the_next_one_whole() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let index = Index::new();
        let visitor = {
            let index = index.clone();
            thread::spawn(move || index.visit())
        };
        index.unregister();
        index.begin(2);
        let seen = visitor.join().unwrap();
        assert!(matches!(seen, None | Some(1 | 2)), "{seen:?}");
        assert_eq!(index.visit(), Some(2));
        index.unregister();
    });
}

#[test]
fn without_a_fence_it_lives_on() {
    loom::model(|| {
        let index = Index::new();
        let visitor = {
            let index = index.clone();
            thread::spawn(move || index.visit())
        };
        assert_eq!(index.life.end().map(|ending| ending.before), Some(LIVE));
        assert_eq!(index.life.close(|| Err(Errno::PERM)), Err(Errno::PERM));
        visitor.join().unwrap();
        assert_eq!((index.life.state(), index.visit()), (LIVE, Some(1)));
        index.unregister();
    });
}

/// An index that is free is marked as a prepared one is, while a visitor clears the bit of the
/// shrinker before.
#[test]
fn marks_of_the_next_shrinker_of_an_index_stay() {
    loom::model(|| {
        let (index, info) = (Index::new(), Info::new());
        index.unregister();
        set_bits(info.bits(0));
        let visitor = {
            let (index, info) = (index.clone(), info.clone());
            thread::spawn(move || {
                let is_free = || !index.life.try_get(|| {}) && !matches!(index.life.state(), PREPARED | LIVE);
                if is_free() {
                    clear_bit_if_empty(info.bits(0), is_free);
                }
            })
        };
        assert_ne!(index.life.state(), ENDING);
        index.life.prepare();
        info.add();
        visitor.join().unwrap();
        info.check();
    });
}
