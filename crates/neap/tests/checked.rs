//! Writes out of bounds or after a free, and frees that name a wrong size, under `check:on`: each
//! ends the process by SIGABRT after one line that names the error.
//!
//! Goal: of 288 wrong programs, each in a process of its own, all are found, and a right program is
//! left alone. Method: this program again, with the process's manager as its allocator.

use core::alloc::{GlobalAlloc, Layout};
use neap_testing::again::{self, dies, succeeds};
use neap_testing::child::exit_code_of;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

/// Sizes and alignments of the wrong programs' allocations.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (16, 8), (100, 16), (1000, 64), (4096, 4096), (30_000, 16), (32_768, 512), (100_000, 16), (300_000, 8192)];

/// An error, the start of the line that names it, and where it is made: distances from the start or
/// the end, or differences of sizes.
const ERRORS: [(&str, &str, [usize; 4]); 8] = [
    ("beyond, freed", "write beyond the end: sized free: ", [0, 1, 7, 15]),
    ("beyond, kept", "write beyond the end: exit: ", [0, 1, 7, 15]),
    ("beyond, reallocated", "write beyond the end: sized free: ", [0, 1, 7, 15]),
    ("before, freed", "", [1, 8, 40, 63]),
    ("before, kept", "write before the start: ", [1, 8, 40, 63]),
    ("after free", "write after free: ", [0, 1, 2, 3]),
    ("after free and others", "write after free: ", [0, 1, 2, 3]),
    ("size", "size mismatch: sized free: ", [1, 2, 8, 4096]),
];

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

/// Changes a byte that may be none of the program's.
fn scribble(block: *mut u8, at: isize) {
    let byte = core::hint::black_box(block.wrapping_offset(at));
    // SAFETY: unsound by design: the tested checks find what was overwritten. The byte lies in the
    // front or the tail of a block, or in one that was freed and is kept.
    unsafe { byte.write_volatile(byte.read_volatile() ^ 0x11) };
}

fn wrong(error: &str, size: usize, align: usize, place: usize) {
    let free = |block: *mut u8, size| {
        // SAFETY: the block is freed once. Its size may be wrong by design.
        unsafe { ALLOCATOR.dealloc(block, layout(size, align)) }
    };
    // SAFETY: the layout is not empty.
    let allocate = |size| unsafe { ALLOCATOR.alloc(layout(size, align)) };
    let (block, _beside) = (allocate(size), allocate(size));
    // SAFETY: the block has so many bytes.
    unsafe { block.write_bytes(1, size) };
    match error {
        "beyond, freed" => {
            scribble(block, (size + place) as isize);
            free(block, size);
        }
        "beyond, kept" => scribble(block, (size + place) as isize),
        "beyond, reallocated" => {
            // SAFETY: the block has that layout.
            let block = unsafe { ALLOCATOR.realloc(block, layout(size, align), size / 2 + 1) };
            scribble(block, (size / 2 + 1 + place) as isize);
            free(block, size / 2 + 1);
        }
        "before, freed" => {
            scribble(block, -(place as isize));
            free(block, size);
        }
        "before, kept" => scribble(block, -(place as isize)),
        "after free" => {
            free(block, size);
            scribble(block, place.min(size - 1) as isize);
        }
        "after free and others" => {
            free(block, size);
            scribble(block, place.min(size - 1) as isize);
            // More than is kept.
            (0..40).for_each(|_| free(allocate(1 << 20), 1 << 20));
        }
        "size" => free(block, size + place),
        _ => unreachable!("{error}"),
    }
}

#[test]
fn a_program() {
    let Some(case) = again::case() else { return };
    match case.split('/').collect::<Vec<_>>()[..] {
        [error, size, align, place] => {
            let [size, align, place] = [size, align, place].map(|number| number.parse().unwrap());
            wrong(error, size, align, place);
        }
        _ => right(),
    }
}

#[test]
fn every_wrong_program_is_found_and_told_what_it_did() {
    let (mut found, mut count) = (0, 0);
    for (error, line, places) in ERRORS {
        for ((size, align), place) in SHAPES.into_iter().flat_map(|shape| places.map(|place| (shape, place))) {
            count += 1;
            let case = format!("{error}/{size}/{align}/{place}");
            let lines = dies("a_program", &case, "check:on");
            assert_eq!(lines.len(), 1, "{case}: {lines:?}");
            let names_it = match error {
                "before, freed" => lines[0].contains("write before the start"),
                _ => lines[0].starts_with(line),
            };
            assert!(names_it, "{case}: {lines:?}");
            found += 1;
        }
    }
    println!("{found} of {count} found");
}

/// A program without an error, in threads and in a forked child.
fn right() {
    let work = |seed: u64| {
        let (mut random, mut kept) = (seed, Vec::new());
        for _ in 0..3000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (size, align) = (1 + (random >> 33) as usize % 40_000, 1 << ((random >> 20) % 8));
            let layout = layout(size, align);
            // SAFETY: the layouts are not empty; blocks are freed with theirs.
            unsafe {
                let mut block = ALLOCATOR.alloc_zeroed(layout);
                assert!(block.addr().is_multiple_of(align));
                assert!(core::slice::from_raw_parts(block, size).iter().all(|&byte| byte == 0));
                block.write_bytes(7, size);
                let new = size / 2 + 1 + size % 3;
                block = ALLOCATOR.realloc(block, layout, new);
                assert!(core::slice::from_raw_parts(block, new.min(size)).iter().all(|&byte| byte == 7));
                kept.push((block, self::layout(new, align)));
                if kept.len() > 100 {
                    let (block, layout) = kept.swap_remove(random as usize % 100);
                    ALLOCATOR.dealloc(block, layout);
                }
            }
        }
        // SAFETY: blocks are freed with their layouts.
        kept.into_iter().for_each(|(block, layout)| unsafe { ALLOCATOR.dealloc(block, layout) });
    };
    std::thread::scope(|scope| (1..4).for_each(|seed| _ = scope.spawn(move || work(seed))));
    // neap may be used after a fork. The child ends as a program does.
    let code = exit_code_of(|| {
        work(9);
        std::process::exit(7)
    });
    assert_eq!(code, 7);
    let group = neap::groups::Group::create("checked").unwrap();
    let block = group.enter().map(|_inside| vec![1_u8; 5000]).unwrap();
    assert_eq!(neap::groups::payer_of(&block[10]), Some(group));
    drop(block);
    neap::process::PROCESS.verify(0).unwrap();
}

#[test]
fn a_right_program_is_left_alone() {
    succeeds("a_program", "right", "check:on");
    succeeds("a_program", "right", "check:on,rseq:off");
    succeeds("a_program", "right", "check:on,profile:4k,background:on");
}
