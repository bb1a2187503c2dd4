//! Real threads on the real system, with ticks, drains and explicit releases in between.

use crate::machine::{Held, Opened, give, shape, take_block, take_run};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use neap_base::{Linux, Platform};
use neap_pages::Shape;
use neap_testing::random::{Random, seed};

const THREADS: u64 = 6;

fn work<P: Platform>(o: &Opened<'_, P>, mut random: Random, steps: u64, done: &AtomicUsize) -> Vec<Held> {
    let mut held: Vec<Held> = Vec::new();
    for _ in 0..steps {
        let stamp = random.next();
        match random.below(16) {
            0..6 => held.extend(take_block(o, random.below(4) as u8, stamp)),
            6 => held.extend(take_block(o, random.below(11) as u8, stamp)),
            7 => held.extend(take_run(o, 1 + random.below(1500) as u32, 1 << random.below(5), stamp)),
            8 if !held.is_empty() => {
                let index = random.below(held.len());
                let (old, new) = (held[index], 1 + random.below(200) as u32);
                old.check(&o.pages);
                if old.order.is_none() && o.pages.resize_run(o.platform, old.pfn, old.pages, new) {
                    Held { pages: old.pages.min(new), ..old }.check(&o.pages);
                    held[index] = Held::stamp(&o.pages, old.pfn, new, None, false, old.stamp);
                }
            }
            _ if !held.is_empty() => give(o, held.swap_remove(random.below(held.len()))),
            _ => {}
        }
        while held.len() > 60 {
            give(o, held.swap_remove(random.below(held.len())));
        }
    }
    done.fetch_add(1, Relaxed);
    held
}

fn stress(shape: &Shape, steps: u64) {
    let platform = Linux::probe();
    let o = Opened::new(&platform, shape).unwrap();
    let (seed, done) = (seed(), AtomicUsize::new(0));
    let mut held = Vec::new();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (o, done) = (&o, &done);
                scope.spawn(move || work(o, Random(seed + thread), steps, done))
            })
            .collect();
        scope.spawn(|| {
            let mut now = 0;
            while done.load(Relaxed) < THREADS as usize {
                now += 1;
                o.pages.tick(&platform);
                if now % 50 == 0 {
                    o.pages.release_all(&platform);
                }
                o.pages.drain_cpu(&platform, now as usize % platform.cpus());
                std::thread::sleep(core::time::Duration::from_micros(500));
            }
        });
        threads.into_iter().for_each(|thread| held.extend(thread.join().unwrap()));
    });
    o.pages.verify().unwrap();
    held.into_iter().for_each(|held| give(&o, held));
    o.pages.release_all(&platform);
    o.pages.verify().unwrap();
    let statistics = o.pages.statistics();
    assert_eq!((statistics.used, statistics.backed_free, statistics.release_failures), (0, 0, 0), "{statistics:?}");
    assert!(statistics.released > 1000);
}

#[test]
fn threads_and_ticks_on_the_real_system() {
    stress(&shape(None), 6000);
}

#[test]
fn threads_at_a_budget() {
    stress(&shape(Some(20_000)), 6000);
}

#[test]
fn threads_with_huge_pages() {
    stress(&Shape { huge: true, ..shape(None) }, 3000);
}
