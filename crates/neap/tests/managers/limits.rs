//! The option `limit`: allocations fail beyond it, and only when nothing is left to give up.
//!
//! Goal: a manager never has more pages in use than its limit allows. Before an allocation fails
//! all caches are emptied. After frees allocations succeed again. A failed realloc changes nothing.
//! No counter wraps around at the edges.
//!
//! Method: small limits on virtual machines of every page size, and on the real system with both
//! kinds of slots, filled and emptied again, in several sizes one after another.

use crate::program::{OPTIONS, Opened, Program, Request, linux};
use neap::options::Options;
use neap_base::Platform;
use neap_objects::size_class::Class;
use neap_testing::random::{Random, seed};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;

const LIMIT: usize = 6 << 20;

fn request(size: usize) -> Request {
    Request { size, align: 1, zeroed: false }
}

/// Pages that the limit leaves for pages, beside the tables.
fn left_for_pages<P: Platform>(mm: &Opened<P>) -> usize {
    let numbers = mm.node(0).unwrap();
    (numbers.budget.unwrap() - numbers.table_pages) as usize
}

/// Allocates blocks of one size until memory is used up. Returns their number.
fn fill<P: Platform>(program: &mut Program<'_, P>, size: usize) -> usize {
    (0..).take_while(|n| (*n < LIMIT) && program.allocate(request(size))).count()
}

fn empty<P: Platform>(program: &mut Program<'_, P>) {
    while let Some((start, _)) = program.blocks.first_key_value() {
        program.free(*start);
    }
}

fn limited<P: Platform>(machine: Shared<P>, options: &Options) {
    let page_size = machine.page_size();
    let mm = Opened::new(machine, &Options { limit: LIMIT as u64, ..*options }).unwrap();
    let mut program = Program::new(&mm);
    // Caches that one size leaves are emptied for the next; nothing is released in between.
    for size in [64, 30_000, 100, 1 << 20, 2000, 16, 5000, 200_000, 64] {
        let count = fill(&mut program, size);
        let class = Class::of_layout(size, 1, page_size);
        let limit = left_for_pages(&mm) * page_size;
        let expected = match class.map(|class| class.slab_shape(page_size)) {
            Some(shape) => limit / (page_size << shape.order) * shape.objects as usize,
            None => limit / size.next_multiple_of(page_size),
        };
        assert_eq!(count, expected, "{size} bytes each");
        let usage = mm.usage();
        let unused = limit
            % class.map_or(size.next_multiple_of(page_size), |class| page_size << class.slab_shape(page_size).order);
        assert!(
            usage.used_bytes as usize <= limit && usage.used_bytes as usize + unused >= limit / 10 * 9,
            "{usage:?}"
        );
        program.verify();
        // Full: no other size fits, nor a realloc that moves, and both report failure.
        let first = *program.blocks.keys().next().unwrap();
        assert!(!program.reallocate(first, LIMIT));
        assert!(!program.allocate(request(LIMIT / 2)));
        // One object freed, one object allocated.
        program.free(first);
        assert!(program.allocate(request(size)), "{size} bytes");
        assert!(!program.allocate(request(size)), "{size} bytes");
        empty(&mut program);
    }
    program.end();
}

/// A request that can never succeed, with or without a limit, empties no cache.
#[test]
fn a_request_for_more_than_there_is_empties_nothing() {
    for limit in [0, LIMIT as u64] {
        let mm = Opened::new(Virtual::new(4096, 1), &Options { limit, ..OPTIONS }).unwrap();
        let block = mm.allocate(100);
        // SAFETY: allocated above.
        unsafe { mm.free(block) };
        let cached = mm.usage().cached_bytes;
        assert!(cached > 0 && mm.allocate(1 << 46).is_null() && mm.allocate_zeroed(1 << 40).is_null());
        assert_eq!(mm.usage().cached_bytes, cached);
    }
}

#[test]
fn a_limit_is_used_to_the_last_slab_and_never_exceeded() {
    for page_size in [4 << 10, 16 << 10, 64 << 10] {
        for cpus in [1, 2, 8] {
            Virtual::run_on(cpus - 1);
            limited(Shared::new(Virtual::new(page_size, cpus).with_scarce_address_space()), &OPTIONS);
        }
    }
}

#[test]
fn a_limit_on_the_real_system() {
    for rseq in [true, false] {
        let (machine, options) = linux(rseq);
        limited(machine, &options);
    }
}

#[test]
fn allocation_at_limit_drains_caches_of_other_cpus() {
    let mm = Opened::new(Shared::new(Virtual::new(4096, 8)), &Options { limit: LIMIT as u64, ..OPTIONS }).unwrap();
    let mut program = Program::new(&mm);
    for cpu in 0..8 {
        Virtual::run_on(cpu);
        (0..700_000 / 1000).for_each(|_| assert!(program.allocate(request(1000))));
    }
    for cpu in 0..8 {
        Virtual::run_on(cpu);
        let mine: Vec<usize> = program.blocks.keys().copied().take(700_000 / 1000).collect();
        mine.into_iter().for_each(|start| program.free(start));
    }
    let cached = mm.usage().cached_bytes;
    assert!(cached > 400_000, "{cached}");
    let most = left_for_pages(&mm) * 4096;
    assert!(program.allocate(request(most)), "everything was cached, nothing used");
    assert_eq!(mm.usage().cached_bytes, 0);
    program.end();
}

/// One in thirty stays: the space between is for other sizes.
#[test]
fn allocation_at_limit_reclaims_holes_of_slabs() {
    for rseq in [true, false] {
        let (machine, options) = linux(rseq);
        let mm = Opened::new(machine, &Options { limit: LIMIT as u64, ..options }).unwrap();
        let mut program = Program::new(&mm);
        let count = fill(&mut program, 500);
        let gone: Vec<usize> =
            program.blocks.keys().copied().enumerate().filter(|(n, _)| n % 30 != 0).map(|(_, at)| at).collect();
        gone.into_iter().for_each(|start| program.free(start));
        assert!(program.allocate(request(LIMIT / 2)), "{:?}", mm.usage());
        assert!(!program.allocate(request(LIMIT / 2)));
        let usage = mm.usage();
        assert!(usage.used_bytes + usage.cached_bytes <= LIMIT as u64 && usage.unaccounted_bytes == 0, "{usage:?}");
        program.verify();
        // From now on the space is shared: the holes take what the run leaves of them.
        let more = fill(&mut program, 500);
        assert!(more > count / 4 && more < count * 2 / 3, "{more} of {count}");
        program.verify();
        program.end();
    }
}

/// High marks and sums of a zone that is too small for them must not wrap below zero.
#[test]
fn a3_no_figure_wraps_around_in_the_smallest_managers() {
    let seed = seed();
    for pages in [1_u64, 2, 3, 7, 31, 64, 200] {
        for page_size in [4 << 10, 64 << 10] {
            let machine = Shared::new(Virtual::new(page_size, 2).with_scarce_address_space());
            let options = Options { limit: pages * page_size as u64, ..OPTIONS };
            let mm = Opened::new(machine.clone(), &options).unwrap();
            let (mut program, mut random) = (Program::new(&mm), Random(seed));
            for step in 0..400_usize {
                Virtual::run_on(step % 2);
                let size = [16, 200, 3000, 20_000, page_size * 3][random.below(5)];
                match random.below(8) {
                    0..4 => _ = program.allocate(request(size)),
                    4 if step % 40 == 0 => _ = mm.tick(machine.now()),
                    _ => {
                        if let Some(start) = program.choose(random.below(usize::MAX)) {
                            program.free(start);
                        }
                    }
                }
                let usage = mm.usage();
                let figures = [usage.used_bytes, usage.cached_bytes, usage.free_bytes];
                assert!(figures.iter().all(|figure| *figure <= options.limit.max(usage.mapped_bytes)), "{usage:?}");
                assert!(usage.used_bytes <= options.limit && usage.unaccounted_bytes == 0, "{usage:?}");
            }
            program.end();
        }
    }
}
