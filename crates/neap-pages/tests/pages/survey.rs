//! The surveyed use of every page, against the test's blocks and the counters.
//!
//! Goal: code that compares pages with the system's view sees each page's right use. Method: a
//! random program on machines with one node and with two, with surveys in between.

use crate::machine::shape;
use neap_base::platform::Platform;
use neap_base::{Order, Pfn};
use neap_pages::{MappingKind, NodePages, PIECE, Use};
use neap_testing::random::{Random, seed};
use neap_testing::virtual_platform::Virtual;
use std::collections::BTreeMap;

/// The use of every page.
fn survey(pages: &NodePages<Virtual>) -> Vec<Use> {
    let mut all = Vec::new();
    for piece in 0..pages.pieces() {
        let mut uses = [u64::MAX; PIECE / 16];
        pages.survey(piece, &mut uses);
        all.extend((0..PIECE).map(|page| Use::of(&uses, page)));
    }
    all
}

fn check(pages: &NodePages<Virtual>, held: &[(Pfn, u32, Option<Order>)]) {
    let mut all = survey(pages);
    let mut counts = BTreeMap::new();
    all.iter().for_each(|each| *counts.entry(*each as u8).or_insert(0) += 1);
    let count = |what: Use| counts.get(&(what as u8)).copied().unwrap_or(0);
    let numbers = pages.statistics();
    assert_eq!((count(Use::FreeBacked), count(Use::Listed)), (numbers.backed_free, numbers.listed));
    assert_eq!(count(Use::Free) + count(Use::FreeBacked), numbers.free);
    assert_eq!((count(Use::Releasing), count(Use::Slab)), (numbers.releasing, 0));
    for &(pfn, length, order) in held {
        let of = if order.is_some() { Use::Block } else { Use::Run };
        let seen = &mut all[pfn.index()..pfn.index() + length as usize];
        assert!(seen.iter().all(|each| *each == of), "{length} pages at {pfn:?}: {seen:?}");
        seen.fill(Use::Free);
    }
    assert!(!all.contains(&Use::Block) && !all.contains(&Use::Run), "another user has pages");
    assert_eq!(all.iter().filter(|each| **each != Use::Foreign).count(), numbers.managed as usize);
}

#[test]
fn every_page_is_what_it_is_said_to_be() {
    let seed = seed();
    for machine in [Virtual::new(4096, 2), Virtual::new(65536, 2).with_nodes(&[0, 1])] {
        let pages = NodePages::open(&machine, &shape(None)).unwrap();
        let (mut random, mut held) = (Random(seed), Vec::<(Pfn, u32, Option<Order>)>::new());
        for step in 0..600 {
            Virtual::run_on(random.below(2));
            match random.below(6) {
                0..2 => {
                    let order = Order(random.below(11) as u8);
                    held.push((pages.allocate_block(&machine, order).unwrap().pfn, order.pages(), Some(order)));
                }
                2 => {
                    let length = 1 + random.below(3 * PIECE) as u32;
                    held.push((pages.allocate_run(&machine, length, 1).unwrap().pfn, length, None));
                }
                _ if !held.is_empty() => match held.swap_remove(random.below(held.len())) {
                    (pfn, _, Some(order)) => pages.free_block(&machine, pfn, order),
                    (pfn, length, None) => pages.free_run(&machine, pfn, length),
                },
                _ => {}
            }
            if step % 50 == 0 {
                check(&pages, &held);
                pages.tick(&machine);
                check(&pages, &held);
            }
        }
        // SAFETY: the test is over, and nothing of the pages is used any more.
        unsafe { pages.close(&machine) };
        assert_eq!(machine.mapped_bytes(), 0);
    }
}

#[test]
fn all_that_is_mapped_is_told() {
    for machine in [Virtual::new(4096, 2), Virtual::new(4096, 4).with_nodes(&[0, 1, 1, 2])] {
        let pages = NodePages::open(&machine, &shape(None)).unwrap();
        let run = pages.allocate_run(&machine, 40_000, 1).unwrap();
        let (mut sum, mut arena) = (0, 0);
        pages.each_mapping(&mut |part, start, length| {
            assert!(start.is_multiple_of(machine.page_size()));
            sum += length;
            arena += if part == MappingKind::Arena { length } else { 0 };
        });
        assert_eq!((sum, arena), (machine.mapped_bytes(), pages.statistics().mapped_bytes));
        pages.free_run(&machine, run.pfn, 40_000);
        // SAFETY: the test is over, and nothing of the pages is used any more.
        unsafe { pages.close(&machine) };
    }
}
