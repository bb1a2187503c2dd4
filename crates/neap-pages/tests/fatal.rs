//! Invalid frees: each ends the process with one line that names the page and its state.
//!
//! Each case runs in a process of its own.

mod machine;

use machine::{Opened, shape};
use neap_base::{Order, Pfn};
use neap_testing::again::{case as named_case, dies};
use neap_testing::virtual_platform::Virtual;

fn case(name: &str) {
    let machine = Virtual::new(4096, 1);
    let o = Opened::new(&machine, &shape(None)).unwrap();
    let pages = &o.pages;
    let block = |order: u8| pages.allocate_block(&machine, Order(order)).unwrap().pfn;
    let run = |count: u32| pages.allocate_run(&machine, count, 1).unwrap().pfn;
    match name {
        "listed twice" => {
            let pfn = block(0);
            pages.free_block(&machine, pfn, Order(0));
            pages.free_block(&machine, pfn, Order(0));
        }
        "zone twice" => {
            let pfn = block(6);
            pages.free_block(&machine, pfn, Order(6));
            pages.free_block(&machine, pfn, Order(6));
        }
        "wrong order" => pages.free_block(&machine, block(3), Order(2)),
        "inside" => pages.free_block(&machine, block(3).plus(1), Order(0)),
        "never handed out" => pages.free_block(&machine, Pfn(700), Order(0)),
        "outside" => pages.free_block(&machine, Pfn(pages.frames().pages()), Order(0)),
        "run as block" => pages.free_block(&machine, run(4), Order(2)),
        "block as run" => pages.free_run(&machine, block(2), 4),
        "run twice" => {
            let pfn = run(3000);
            pages.free_run(&machine, pfn, 3000);
            pages.free_run(&machine, pfn, 3000);
        }
        "cached run twice" => {
            let pfn = run(30);
            pages.free_run(&machine, pfn, 30);
            pages.free_run(&machine, pfn, 30);
        }
        "run of another length" => pages.free_run(&machine, run(30), 31),
        "resized run of old length" => {
            let pfn = run(30);
            assert!(pages.resize_run(&machine, pfn, 30, 20));
            pages.free_run(&machine, pfn, 30);
        }
        other => panic!("no such case: {other}"),
    }
}

fn dies_with(name: &str, line: &str) {
    let lines = dies("a_case", name, "");
    assert!(lines.iter().any(|said| said.contains(line)), "{name}: {lines:?}");
}

/// Runs a case in the process that was started for it, and does nothing otherwise.
#[test]
fn a_case() {
    if let Some(name) = named_case() {
        case(&name);
    }
}

#[test]
fn a_block_that_is_freed_twice() {
    dies_with("listed twice", "free of a block of 1 pages that is not handed out: page 0 is Listed, order 0");
    dies_with("zone twice", "free of a block of 64 pages that is not handed out: page 0 is Inside");
}

#[test]
fn b11_a_block_that_is_freed_as_something_else() {
    dies_with("wrong order", "block of 4 pages that is not handed out: page 0 is Allocated, order 3");
    dies_with("inside", "page 1 is Absent");
    dies_with("never handed out", "page 700 is Absent");
    dies_with("outside", "page 8192 is outside the arena of 8192 pages");
    dies_with("run as block", "block of 4 pages that is not handed out: page 0 is Run");
}

#[test]
fn a_run_that_is_freed_twice_or_as_something_else() {
    dies_with("run twice", "run of 3000 pages that is not handed out: page 0 is Inside");
    dies_with("cached run twice", "run of 30 pages that is not handed out: page 0 is Cached");
    dies_with("block as run", "run of 4 pages that is not handed out: page 0 is Allocated");
    dies_with("run of another length", "run of 31 pages that is not handed out: page 0 is Run, order 0, owner 30");
    dies_with("resized run of old length", "owner 20");
}
