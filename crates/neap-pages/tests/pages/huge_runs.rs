//! Huge pages behind long runs.
//!
//! Goal:
//! * They are allowed behind exactly those huge pages that lie wholly in a run, after any history
//!   of runs that come, go and change their length, of small blocks that are populated in between,
//!   and of ticks.
//! * Free memory does not allow them when it is released.
//! * If the system gives them on request, runs have them that are no longer than the rest of the
//!   resident memory.
//! * No call is made if they are switched off or a CPU may not be interrupted.
//!
//! Method: a virtual machine that records its calls, against a model.

use crate::machine::{Opened, shape};
use neap_base::platform::{HugePageSupply, memory::Range};
use neap_base::{Order, Pfn};
use neap_os::topology::CpuSet;
use neap_pages::{EarlyTables, Effort, Shape};
use neap_testing::probe::Probe;
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::{Call, Virtual};
use std::collections::BTreeMap;

const CHUNK: u32 = 1024;
/// Pages of a huge page.
const PART: u32 = 512;

fn huge() -> Shape {
    Shape { huge: true, ..shape(None) }
}

fn for_all() -> Virtual {
    Virtual::new(4096, 1).with_huge_pages_for_all()
}

/// A run: its pages, and whether it has huge pages. A run whose memory was resident already when it
/// came has none until it gets its first whole huge page.
type Runs = BTreeMap<u32, (u32, bool)>;

fn has_whole_part(pfn: u32, pages: u32) -> bool {
    (pfn + pages) / PART > pfn.div_ceil(PART)
}

/// Records that a run has `pages` pages now.
fn note(o: &Opened<'_, Probe>, runs: &mut Runs, pfn: u32, pages: u32) {
    let had = runs.get(&pfn).is_some_and(|run| run.1);
    let others = runs.iter().filter(|(from, run)| **from != pfn && run.1).count();
    let has = o.pages.huge_runs() as usize > others;
    assert!(if has_whole_part(pfn, pages) { has || !had } else { !has });
    runs.insert(pfn, (pages, has));
}

/// Checks that every huge page, up to the last page of the arena, allows huge pages if and only if
/// it lies wholly in a run that has them.
fn agree(machine: &Probe, o: &Opened<'_, Probe>, runs: &Runs) {
    assert!(machine.huge.lock().unwrap().iter().all(|(_, length, _)| *length > 0));
    assert_eq!(o.pages.huge_runs() as usize, runs.values().filter(|run| run.1).count());
    for start in (0..o.pages.frames().pages()).step_by(PART as usize) {
        let inside = |(from, run): (&u32, &(u32, bool))| run.1 && from + run.0 >= start + PART;
        let inside = runs.range(..=start).next_back().is_some_and(inside);
        let allows = |page: u32| machine.machine.allows_huge_pages(o.pages.address(Pfn(start + page)));
        assert_eq!([allows(0), allows(PART - 1)], [inside; 2], "the huge page from page {start}");
    }
}

#[test]
fn huge_page_advice_matches_runs_after_random_operations() {
    let mut random = Random(seed());
    let mut most = 0;
    for _ in 0..4 {
        let machine = Probe::new(for_all());
        let o = Opened::new(&machine, &huge()).unwrap();
        let (mut runs, mut blocks, mut populated) = (Runs::new(), Vec::new(), 0);
        for _ in 0..400 {
            let length = |random: &mut Random| {
                let around = PART * random.below(12) as u32;
                (around + random.below(3) as u32).saturating_sub(1).max(1 + random.below(300) as u32)
            };
            let at = random.below(runs.len().max(1));
            match random.below(8) {
                0..3 => {
                    let pages = length(&mut random);
                    let run = o.pages.allocate_run(&machine, pages, 1 << random.below(11)).unwrap();
                    note(&o, &mut runs, run.pfn.0, pages);
                    let has = runs[&run.pfn.0].1;
                    assert!(has || !run.zero || !has_whole_part(run.pfn.0, pages), "fresh memory has them");
                }
                3..5 => {
                    if let Some((&pfn, &(pages, _))) = runs.iter().nth(at) {
                        runs.remove(&pfn);
                        o.pages.free_run(&machine, Pfn(pfn), pages);
                    }
                }
                5..7 => {
                    if let Some((&pfn, &(pages, _))) = runs.iter().nth(at) {
                        let new = length(&mut random);
                        if o.pages.resize_run(&machine, Pfn(pfn), pages, new) {
                            note(&o, &mut runs, pfn, new);
                        }
                    }
                }
                _ => {
                    blocks.extend((0..600).map(|_| {
                        o.pages.allocate_one_more_block(&machine, Order(2), EarlyTables::Written).unwrap().pfn
                    }))
                }
            }
            // The next tick forbids huge pages that populations have allowed.
            if core::mem::replace(&mut populated, o.pages.statistics().populated) != populated {
                o.pages.tick(&machine);
            }
            agree(&machine, &o, &runs);
            most = most.max(o.pages.huge_runs());
        }
        assert!(o.pages.statistics().populated > 0);
        o.pages.verify().unwrap();
        blocks.into_iter().for_each(|pfn| o.pages.free_block(&machine, pfn, Order(2)));
        core::mem::take(&mut runs).into_iter().for_each(|(pfn, run)| o.pages.free_run(&machine, Pfn(pfn), run.0));
        agree(&machine, &o, &runs);
        assert!(!o.pages.release_all(&machine).left);
        o.pages.verify().unwrap();
    }
    assert!(most > 5, "{most}");
}

#[test]
fn memory_that_is_there_already_is_not_spoken_of() {
    let machine = Probe::new(for_all());
    let o = Opened::new(&machine, &huge()).unwrap();
    let take = |pages| o.pages.allocate_run(&machine, pages, 1).unwrap().pfn;
    let run = take(2 * CHUNK);
    o.pages.free_run(&machine, run, 2 * CHUNK);
    let said = machine.huge.lock().unwrap().len();
    for _ in 0..3 {
        assert_eq!(take(2 * CHUNK), run);
        o.pages.free_run(&machine, run, 2 * CHUNK);
    }
    assert_eq!((machine.huge.lock().unwrap().len(), o.pages.huge_runs()), (said, 0));
    // Some of its memory is not resident yet.
    let longer = take(3 * CHUNK);
    assert_eq!((longer, o.pages.huge_runs()), (run, 1));
    o.pages.free_run(&machine, longer, 3 * CHUNK);
}

#[test]
fn nothing_is_said_where_there_are_none() {
    let isolated = || for_all().with_isolated(CpuSet::parse(b"0").unwrap());
    let small = Shape { huge: false, ..huge() };
    let sized = |size| Virtual::new(size, 1).with_huge_pages_for_all();
    let none = for_all().with_huge_page_supply(HugePageSupply::None);
    let others = [sized(16384), sized(65536), isolated(), none].map(|machine| (machine, huge()));
    for (machine, shape) in others.into_iter().chain([(for_all(), small)]) {
        let machine = Probe::new(machine);
        let o = Opened::new(&machine, &shape).unwrap();
        let run = o.pages.allocate_run(&machine, 3 * CHUNK, 1).unwrap().pfn;
        assert!(o.pages.resize_run(&machine, run, 3 * CHUNK, 2 * CHUNK));
        o.pages.free_run(&machine, run, 2 * CHUNK);
        let said = machine.huge.lock().unwrap();
        assert!(!said.iter().any(|(.., allowed)| *allowed), "{said:?}");
    }
}

/// A run that is longer than the rest of the resident memory may never be touched as a whole.
#[test]
fn madvise_run_gets_huge_pages_if_shorter_than_the_rest() {
    let machine = Probe::new(Virtual::new(4096, 1));
    let o = Opened::new(&machine, &huge()).unwrap();
    let take = |pages| o.pages.allocate_run(&machine, pages, 1).unwrap().pfn;
    let first = take(2 * CHUNK);
    assert_eq!(o.pages.huge_runs(), 0, "all that there is");
    let second = take(3 * CHUNK);
    assert_eq!(o.pages.huge_runs(), 0, "longer than the rest");
    let third = take(4 * CHUNK);
    assert_eq!(o.pages.huge_runs(), 1, "shorter than the rest");
    assert_eq!(machine.huge.lock().unwrap().last(), Some(&(o.pages.address(third), 16 << 20, true)));
    for (run, pages) in [(first, 2 * CHUNK), (second, 3 * CHUNK), (third, 4 * CHUNK)] {
        o.pages.free_run(&machine, run, pages);
    }
    assert_eq!(o.pages.huge_runs(), 0);
    assert_eq!(machine.huge.lock().unwrap().last(), Some(&(o.pages.address(third), 16 << 20, false)));
    o.pages.verify().unwrap();
}

/// In front of a run's block lie free pages. The run begins in them only if it has no huge pages.
#[test]
fn run_with_huge_pages_begins_at_one() {
    for (shape, begins_at_one) in [(huge(), true), (shape(None), false)] {
        let machine = Virtual::new(4096, 1);
        let o = Opened::new(&machine, &shape).unwrap();
        let take = |pages| o.pages.allocate_run(&machine, pages, 1).unwrap().pfn;
        let runs = [2 * CHUNK, PART / 4, PART].map(|pages| (take(pages), pages));
        assert_eq!(runs[2].0.0.is_multiple_of(PART), begins_at_one, "{runs:?}");
        assert_eq!(o.pages.huge_runs(), u32::from(begins_at_one));
        runs.into_iter().for_each(|(run, pages)| o.pages.free_run(&machine, run, pages));
        o.pages.verify().unwrap();
    }
}

/// Memory that is there serves a run before fresh memory does, although it begins at no huge page.
#[test]
fn run_takes_blocks_side_by_side_before_fresh_huge_pages() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &huge()).unwrap();
    let take = |pages| o.pages.allocate_run(&machine, pages, 1).unwrap().pfn;
    let rest = take(2 * CHUNK);
    let runs = [(); 4].map(|()| take(PART / 2));
    runs[1..3].iter().for_each(|run| o.pages.free_run(&machine, *run, PART / 2));
    o.pages.drain_all(&machine);
    let grown = o.pages.grown();
    assert_eq!((take(PART), o.pages.grown()), (runs[1], grown), "{runs:?}");
    for (run, pages) in [(rest, 2 * CHUNK), (runs[0], PART / 2), (runs[1], PART), (runs[3], PART / 2)] {
        o.pages.free_run(&machine, run, pages);
    }
    o.pages.verify().unwrap();
}

/// Pages released from memory that may be huge are made small first, and do not allow huge pages
/// when they go.
#[test]
fn freed_run_forbids_huge_pages_before_its_memory_is_reused() {
    let machine = Probe::new(for_all());
    let o = Opened::new(&machine, &huge()).unwrap();
    let run = o.pages.allocate_run(&machine, 2 * CHUNK, 1).unwrap().pfn;
    assert_eq!(machine.huge.lock().unwrap().last(), Some(&(o.pages.address(run), 8 << 20, true)));
    o.pages.free_run(&machine, run, 2 * CHUNK);
    assert_eq!(machine.huge.lock().unwrap().last(), Some(&(o.pages.address(run), 8 << 20, false)));
    // Its memory is used by blocks, of which a page each is released.
    let block = o.pages.allocate_block(&machine, Order(3)).unwrap().pfn;
    assert!((run.0..run.0 + 2 * CHUNK).contains(&block.0), "the run's memory is handed out again");
    let hole = Range { start: o.pages.address(block.plus(2)), length: 4096 };
    let mut given = Some(hole).into_iter();
    let gather = |ranges: &mut [Range]| ranges.iter_mut().zip(given.by_ref()).map(|(to, hole)| *to = hole).count();
    // SAFETY: the test does not need the page's contents.
    let report = unsafe { o.pages.punch(&machine, Effort::Full, &|| false, gather, |_, _| ()) };
    assert_eq!((report.unwrap().released, machine.split.lock().unwrap().as_slice()), (1, [hole.start].as_slice()));
    assert!(!machine.machine.allows_huge_pages(hole.start));
    o.pages.verify().unwrap();
}

/// The kernel may refuse that at the limit of mappings. Then a later tick forbids them.
#[test]
fn what_the_system_would_not_forbid_is_forbidden_later() {
    for refused in 1..4 {
        let machine = Probe::new(for_all());
        let o = Opened::new(&machine, &huge()).unwrap();
        let run = o.pages.allocate_run(&machine, 2 * CHUNK, 1).unwrap().pfn;
        let allows = || machine.machine.allows_huge_pages(o.pages.address(run));
        machine.machine.fail(Call::HugePages, 0, refused);
        o.pages.free_run(&machine, run, 2 * CHUNK);
        for tick in 0..refused {
            assert!(allows(), "{refused} refused, {tick} ticks");
            o.pages.tick(&machine);
        }
        assert!(!allows() && o.pages.huge_runs() == 0);
        o.pages.verify().unwrap();
    }
}

#[test]
fn there_are_so_many_runs_with_huge_pages_and_no_more() {
    let machine = Probe::new(for_all());
    let o = Opened::new(&machine, &Shape { span: 64 << 30, ..huge() }).unwrap();
    let take = || o.pages.allocate_run(&machine, CHUNK, 1).unwrap().pfn;
    let allows = |run: Pfn| machine.huge.lock().unwrap().last() == Some(&(o.pages.address(run), 4 << 20, true));
    let runs: Vec<Pfn> = (0..8192).map(|_| take()).collect();
    assert!(allows(*runs.last().unwrap()) && o.pages.huge_runs() == 8192);
    let one_more = take();
    assert!(!allows(one_more) && o.pages.huge_runs() == 8192);
    // It gets none when it grows, and takes no other run's place when it goes.
    assert!(o.pages.resize_run(&machine, one_more, CHUNK, 2 * CHUNK) && o.pages.huge_runs() == 8192);
    o.pages.free_run(&machine, one_more, 2 * CHUNK);
    assert_eq!(o.pages.huge_runs(), 8192);
    o.pages.free_run(&machine, runs[0], CHUNK);
    assert!(!o.pages.release_all(&machine).left);
    assert!(o.pages.huge_runs() == 8191 && allows(take()));
}
