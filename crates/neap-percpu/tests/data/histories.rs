//! Random histories of allocations. Contents stay, and the instance is verified after every step.
//! Pages that count as populated are exactly the resident ones. System calls may fail at any time.

use crate::machine::{Held, end, give, open, populated_ranges, settle, shape, take, verify};
use neap_base::{Linux, Platform};
use neap_percpu::{LARGEST, Layout, Owner, PerCpuData, Refused, Shape, Wait};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::{Call, Virtual};
use std::collections::BTreeSet;

const CALLS: [Call; 4] = [Call::Open, Call::Populate, Call::Release, Call::ReleaseScattered];
const LAYOUTS: [Layout; 2] = [Layout::Rows, Layout::CpuMajor];

/// A random size and alignment: mostly small, sometimes the largest.
fn request(random: &mut Random, page: usize) -> (usize, usize) {
    let largest = 1 << (3 + random.below(13));
    let size = 1 + random.below(largest.min(LARGEST));
    (size, 1 << if random.below(8) == 0 { random.below(page.trailing_zeros() as usize + 1) } else { random.below(5) })
}

/// One step of a history; a refused allocation is skipped.
fn step<P: Platform>(
    data: &PerCpuData,
    platform: &P,
    random: &mut Random,
    owners: &mut Vec<Owner>,
    held: &mut Vec<Held>,
    stamp: u64,
) {
    let page = data.dimensions().page;
    match random.below(20) {
        0..9 => {
            let owner = owners[random.below(owners.len())];
            let wait = [Wait::Never, Wait::Until(platform.now()), Wait::Long][random.below(3)];
            match take(data, platform, owner, request(random, page), wait, stamp) {
                Ok(new) => held.push(new),
                Err(Refused::WouldWait) => assert!(wait != Wait::Long),
                Err(Refused::Memory(_) | Refused::Full) => {}
                Err(refused) => panic!("{refused}"),
            }
        }
        9..17 if !held.is_empty() => give(data, held.swap_remove(random.below(held.len()))),
        17 => _ = data.tick(platform),
        18 => owners.push(data.open_owner(platform).unwrap()),
        19 if owners.len() > 4 => {
            let owner = owners.swap_remove(1 + random.below(owners.len() - 1));
            held.extract_if(.., |held| held.owner == owner).for_each(|held| held.check(data));
            // SAFETY: no code uses the owner's allocations any more.
            unsafe { data.close_owner(owner) }.unwrap();
        }
        _ => {}
    }
}

fn history<P: Platform>(platform: &P, shape: &Shape, steps: u64, each: impl FnMut(&PerCpuData, u64, &mut Random)) {
    history_looked_at(platform, shape, steps, 1, each);
}

/// Runs a history that is verified after every `every` steps only, since a verification frees the
/// kept allocation.
fn history_looked_at<P: Platform>(
    platform: &P,
    shape: &Shape,
    steps: u64,
    every: u64,
    mut each: impl FnMut(&PerCpuData, u64, &mut Random),
) {
    let data = open(platform, shape);
    let (mut random, mut held, mut owners) = (Random(seed()), Vec::new(), vec![Owner::NONE]);
    for stamp in 0..steps {
        step(&data, platform, &mut random, &mut owners, &mut held, stamp);
        if stamp % every == 0 {
            verify(&data);
        }
        each(&data, stamp, &mut random);
        while held.len() > 150 {
            give(&data, held.swap_remove(random.below(held.len())));
        }
    }
    each(&data, u64::MAX, &mut random);
    end(&data, platform, held);
}

#[test]
fn contents_stay_and_everything_adds_up_on_every_machine() {
    for (cpus, page) in [(1, 4096), (2, 4096), (3, 4096), (7, 16384), (32, 4096), (4, 65536), (224, 4096)] {
        for layout in LAYOUTS {
            let machine = Virtual::new(4096, cpus);
            history(&machine, &shape(layout, cpus, page), 1200 / cpus.isqrt() as u64, |_, _, _| {});
            assert_eq!(machine.mapped_bytes(), 0);
        }
    }
}

#[test]
fn what_is_kept_for_a_moment_changes_nothing() {
    for (cpus, page) in [(1, 4096), (2, 4096), (7, 16384), (4, 65536)] {
        let machine = Virtual::new(4096, cpus);
        history_looked_at(&machine, &shape(Layout::Rows, cpus, page), 6000, 37, |_, _, _| {});
    }
}

#[test]
fn failing_system_calls_affect_only_the_failed_request() {
    for layout in LAYOUTS {
        let machine = Virtual::new(4096, 4);
        history(&machine, &shape(layout, 4, 4096), 3000, |_, step, random| {
            let call = CALLS[random.below(CALLS.len())];
            if step == u64::MAX {
                CALLS.iter().for_each(|call| machine.fail(*call, 0, 0));
            } else {
                machine.fail(call, random.below(4), random.below(3));
            }
        });
    }
}

/// Addresses of the pages of a range that are resident.
fn resident(start: usize, length: usize, into: &mut BTreeSet<usize>) {
    let page = neap_base::platform::memory::page_size();
    let mut map = vec![0_u8; length / page];
    // SAFETY: the map has a byte for each page of the range, which is mapped.
    let answer = unsafe { libc::mincore(core::ptr::with_exposed_provenance_mut(start), length, map.as_mut_ptr()) };
    assert_eq!(answer, 0);
    into.extend(map.iter().enumerate().filter(|(_, byte)| **byte & 1 == 1).map(|(at, _)| start + at * page));
}

fn check_residence(data: &PerCpuData) {
    let page = neap_base::platform::memory::page_size();
    let (mut populated, mut there) = (BTreeSet::new(), BTreeSet::new());
    populated_ranges(data, |start, length| populated.extend((start..start + length).step_by(page)));
    data.reach(|start, length| resident(start, length, &mut there));
    assert!(populated == there, "{} pages populated, {} resident", populated.len(), there.len());
    let statistics = data.statistics();
    assert_eq!(populated.len() * page, statistics.populated * statistics.page);
}

/// Populated pages are resident and all others are not, also with failures.
#[test]
fn populated_pages_are_exactly_those_that_are_resident() {
    let linux = Linux::probe();
    for (cpus, page) in [(2, 4096), (3, 16384), (4, 65536)] {
        for layout in LAYOUTS {
            history(&linux, &shape(layout, cpus, page), 800, |data, step, _| {
                if step % 8 == 0 || step == u64::MAX {
                    check_residence(data);
                }
            });
            let machine = Virtual::new(4096, cpus);
            history(&machine, &shape(layout, cpus, page), 800, |data, step, random| {
                // One kind of call fails at a time. If a repair fails as well, the count loses a
                // page.
                CALLS.iter().for_each(|call| machine.fail(*call, 0, 0));
                if step != u64::MAX {
                    machine.fail(CALLS[step as usize % CALLS.len()], random.below(4), random.below(3));
                }
                check_residence(data);
            });
        }
    }
}

/// Counts its drop, also if its thread panics: the worker waits for all threads.
struct Done<'a>(&'a core::sync::atomic::AtomicUsize);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
    }
}

/// Four threads and a worker run together; every copy keeps its contents.
#[test]
fn threads_and_a_worker_do_not_disturb_each_other() {
    use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    let (linux, seed, done) = (Linux::probe(), seed(), AtomicUsize::new(0));
    let data = open(&linux, &shape(Layout::Rows, 4, 4096));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (data, linux, done) = (&data, &linux, &done);
            scope.spawn(move || {
                let _done = Done(done);
                let (mut random, mut held) = (Random(seed + thread), Vec::new());
                let mut owners = vec![Owner::NONE, data.open_owner(linux).unwrap()];
                for stamp in 0..6000 {
                    step(data, linux, &mut random, &mut owners, &mut held, stamp);
                    if stamp % 1500 == 1499 {
                        held.drain(..).for_each(|held| give(data, held));
                        verify(data);
                    }
                }
            });
        }
        let (data, linux, done) = (&data, &linux, &done);
        scope.spawn(move || {
            while done.load(Relaxed) < 4 {
                data.tick(linux);
            }
        });
    });
    settle(&data, &linux);
    end(&data, &linux, Vec::new());
}
