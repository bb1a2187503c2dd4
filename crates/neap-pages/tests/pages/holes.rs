//! Holes: pages that are handed out without memory.
//!
//! Goal: they count as handed out but not as used, so that a limit concerns resident memory. They
//! are filled only if there is room. A block that is freed with holes leaves them as pages without
//! memory, whatever its order.
//!
//! Method: virtual machines over real memory. The model is a number of holes, and `verify`.

use crate::machine::{Opened, PAGE_SIZES, resident, shape};
use core::cell::Cell;
use neap_base::platform::memory::Range;
use neap_base::{Order, Pfn};
use neap_pages::{Effort, Report};
use neap_testing::probe::Probe;
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::{Call, Virtual};

/// Releases pages of a block, a bit for each.
fn punch(o: &Opened<'_, Virtual>, pfn: Pfn, pages: u64) -> Option<Report> {
    let (size, given) = (o.pages.page_size(), Cell::new(false));
    let gather = |ranges: &mut [Range]| {
        let wanted = (0..64).filter(|page| !given.get() && pages >> page & 1 == 1);
        let count = ranges
            .iter_mut()
            .zip(wanted)
            .map(|(range, page)| *range = Range { start: o.pages.address(pfn.plus(page)), length: size })
            .count();
        given.set(true);
        count
    };
    // SAFETY: the test does not need the contents of these pages.
    unsafe { o.pages.punch(o.platform, Effort::Full, &|| false, gather, |_, _| ()) }
}

fn write(o: &Opened<'_, Virtual>, pfn: Pfn, pages: u32) {
    for page in 0..pages {
        let address = o.pages.address(pfn.plus(page));
        // SAFETY: the page was handed out to the test.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(address).write_bytes(7, o.pages.page_size()) };
    }
}

#[test]
fn holes_are_handed_out_but_not_used() {
    for page_size in PAGE_SIZES {
        let machine = Virtual::new(page_size, 1);
        let o = Opened::new(&machine, &shape(Some(64))).unwrap();
        let block = o.pages.allocate_block(&machine, Order(5)).unwrap().pfn;
        write(&o, block, 32);
        let punched = punch(&o, block, 0xffff_0ff0).unwrap();
        assert_eq!((punched.released, punched.failed), (24, 0));
        let numbers = o.pages.statistics();
        assert_eq!((numbers.holes, numbers.used, numbers.punched), (24, 8, 24));
        o.pages.verify().unwrap();
        // Their room is available to other blocks.
        let other = o.pages.allocate_block(&machine, Order(5)).unwrap().pfn;
        let third = o.pages.allocate_run(&machine, 20, 1).unwrap().pfn;
        assert!(o.pages.allocate_run(&machine, 5, 1).is_err());
        assert_eq!(o.pages.charge_holes(5), 0, "there is no room for so many");
        assert_eq!(o.pages.charge_holes(3), 3);
        o.pages.uncharge_holes(1);
        assert_eq!((o.pages.statistics().holes, o.pages.statistics().refilled), (22, 2));
        o.pages.free_run(&machine, third, 20);
        assert_eq!(o.pages.charge_holes(100), 22, "and now for all that there are");
        assert_eq!((o.pages.charge_holes(1), o.pages.statistics().refilled), (0, 24));
        o.pages.verify().unwrap();
        o.pages.free_block(&machine, other, Order(5));
        o.pages.free_block(&machine, block, Order(5));
        o.pages.verify().unwrap();
    }
}

#[test]
fn where_nothing_is_taken_there_are_no_holes() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let block = o.pages.allocate_block(&machine, Order(5)).unwrap().pfn;
    write(&o, block, 32);
    machine.fail(Call::ReleaseScattered, 0, usize::MAX);
    machine.fail(Call::Release, 5, usize::MAX);
    let some = punch(&o, block, u64::from(u32::MAX)).unwrap();
    assert_eq!((some.released, o.pages.statistics().holes), (5, 5));
    assert_eq!(resident(o.pages.address(block), 32 * 4096), 27 * 4096);
    o.pages.verify().unwrap();
}

/// A pass without ranges does not count as a success of the system.
#[test]
fn failing_release_is_retried_rarely_despite_empty_passes() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let block = o.pages.allocate_block(&machine, Order(10)).unwrap().pfn;
    write(&o, block, 1024);
    o.pages.free_block(&machine, block, Order(10));
    [Call::Release, Call::ReleaseScattered].into_iter().for_each(|call| machine.fail(call, 0, usize::MAX));
    for _ in 0..64 {
        // SAFETY: no ranges are given.
        unsafe { o.pages.punch(&machine, Effort::Sparing, &|| false, |_| 0, |_, _| ()) };
        o.pages.tick(&machine);
    }
    assert!((1..16).contains(&machine.made(Call::Release)), "{} calls", machine.made(Call::Release));
}

/// A page of a huge page is released only once that was split into small pages.
#[test]
fn a_huge_page_is_made_small_pages_once_and_by_a_page_that_goes() {
    let machine = Probe::new(Virtual::new(4096, 1));
    let o = Opened::new(&machine, &neap_pages::Shape { huge: true, ..shape(None) }).unwrap();
    let blocks: Vec<Pfn> = (0..1024).map(|_| o.pages.allocate_block(&machine, Order(3)).unwrap().pfn).collect();
    let populated = o.pages.statistics().populated;
    assert!(populated > 0);
    let punch = |page: u32| {
        let mut given = blocks.iter();
        let gather = |ranges: &mut [Range]| {
            let range = |pfn: &Pfn| Range { start: o.pages.address(pfn.plus(page)), length: 4096 };
            ranges.iter_mut().zip(given.by_ref()).map(|(to, pfn)| *to = range(pfn)).count()
        };
        // SAFETY: the test does not need the contents of these pages.
        let report = unsafe { o.pages.punch(&machine, Effort::Full, &|| false, gather, |_, _| ()) };
        assert_eq!(report.unwrap().released, 1024);
    };
    assert!(blocks.iter().any(|pfn| machine.machine.allows_huge_pages(o.pages.address(*pfn))));
    punch(3);
    assert!(
        !blocks.iter().any(|pfn| machine.machine.allows_huge_pages(o.pages.address(*pfn))),
        "the kernel fills no hole"
    );
    let split = machine.split.lock().unwrap().clone();
    assert!(split.iter().all(|address| blocks.iter().any(|pfn| o.pages.address(pfn.plus(3)) == *address)));
    let mut huge: Vec<usize> = split.iter().map(|address| address >> 21).collect();
    huge.dedup();
    assert_eq!((huge.len(), split.len() as u64), (split.len(), populated / 512), "each of them once");
    punch(5);
    assert_eq!(machine.split.lock().unwrap().len(), split.len(), "and never again");
}

/// While a thread releases, no other pass is made, and a thread that waits for its end sees it.
#[test]
fn one_pass_at_a_time() {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let block = o.pages.allocate_block(&machine, Order(5)).unwrap().pfn;
    let calls = Cell::new(0);
    let gather = |_: &mut [Range]| {
        calls.set(calls.get() + 1);
        assert!(punch(&o, block, 1).is_none());
        0
    };
    // SAFETY: no ranges are given.
    let report = unsafe { o.pages.punch(&machine, Effort::Sparing, &|| false, gather, |_, _| ()) };
    assert_eq!((report, calls.get()), (Some(Report { left: true, ..Report::default() }), 1));
    o.pages.await_release(&machine);
    assert!(punch(&o, block, 1).is_some());
}

/// Blocks of all orders are freed, some with holes. Exactly the right pages are free and known to
/// have no memory.
#[test]
fn a_block_that_comes_back_with_holes_brings_the_rest() {
    let mut random = Random(seed());
    for page_size in PAGE_SIZES {
        let machine = Virtual::new(page_size, 2).with_scarce_address_space();
        let o = neap_pages::NodePages::open(&machine, &shape(None)).unwrap();
        let mut held: Vec<(Pfn, Order, u64)> = Vec::new();
        for _ in 0..400 {
            match random.below(5) {
                0 | 1 => {
                    let order = Order(random.below(7) as u8);
                    let block = o.allocate_block(&machine, order).unwrap();
                    let start = o.address(block.pfn);
                    for byte in (start..start + (order.pages() as usize) * page_size).step_by(64) {
                        let at = core::ptr::with_exposed_provenance_mut::<u8>(byte);
                        // SAFETY: the page was handed out to the test.
                        unsafe {
                            assert!(!block.zero || at.read() == 0, "known to be zero");
                            at.write(7);
                        }
                    }
                    held.push((block.pfn, order, 0));
                }
                2 if !held.is_empty() => {
                    let at = random.below(held.len());
                    let (pfn, order, holes) = &mut held[at];
                    let all = u64::MAX >> (64 - order.pages());
                    let gone = random.next() & all & !*holes;
                    let (address, given) = (|page| o.address(pfn.plus(page)), Cell::new(false));
                    let gather = |ranges: &mut [Range]| {
                        let pages = (0..64).filter(|page| !given.get() && gone >> page & 1 == 1);
                        let range = |page| Range { start: address(page), length: page_size };
                        let count = ranges.iter_mut().zip(pages).map(|(to, page)| *to = range(page)).count();
                        given.set(true);
                        count
                    };
                    // SAFETY: the test does not need the contents of these pages.
                    let done =
                        unsafe { o.node(0).punch(&machine, Effort::Full, &|| false, gather, |_, _| ()) }.unwrap();
                    assert_eq!(done.released, gone.count_ones());
                    *holes |= gone;
                }
                3 if !held.is_empty() => {
                    let (pfn, order, holes) = held.swap_remove(random.below(held.len()));
                    o.free_block_with_holes(&machine, pfn, order, holes);
                }
                _ => _ = o.tick(&machine),
            }
            let holes: u32 = held.iter().map(|(.., holes)| holes.count_ones()).sum();
            assert_eq!(o.statistics().holes, holes);
            o.verify().unwrap();
        }
        for (pfn, order, holes) in held {
            o.free_block_with_holes(&machine, pfn, order, holes);
        }
        let numbers = o.statistics();
        assert_eq!((numbers.holes, numbers.used), (0, numbers.listed));
        o.drain_all(&machine);
        // Exactly the backed pages are resident.
        let there = resident(o.base(), o.limit());
        assert_eq!(there, o.statistics().backed_free as usize * page_size);
        o.release_all(&machine);
        assert_eq!((resident(o.base(), o.limit()), o.statistics().backed_free), (0, 0));
        o.verify().unwrap();
        // SAFETY: everything was freed, and nothing of the pages is used any more.
        unsafe { o.close(&machine) };
    }
}
