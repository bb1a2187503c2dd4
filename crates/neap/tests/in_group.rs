//! Allocations of threads in groups: charged where they are made, uncharged where they are freed,
//! by whichever thread.

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

use core::hint::black_box;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use neap::groups::{Bound, Group, GroupError, Kind};
use neap::process::PROCESS;
use neap_testing::child::exit_code_of;
use std::sync::Mutex;
use std::time::Instant;

/// Tests that look at the whole tree take turns.
static ALONE: Mutex<()> = Mutex::new(());

/// Threads besides the verifying one that may have an object in hands: two that work, neap's, and
/// those of other tests, some of which only begin.
const OTHERS: u64 = 16;

/// Longest wait for the work of other threads.
const WHILE: Duration = Duration::from_secs(20);

const SIZES: [usize; 9] = [1, 16, 100, 1024, 4096, 20_000, 32_768, 100_000, 5 << 20];

/// Returns the usage of a group, as soon as it is `expected`, else its value after a while. It is
/// approximate while other threads allocate or free; the harness and neap's thread do.
fn used(group: Group, expected: u64) -> Result<u64, GroupError> {
    let end = Instant::now() + WHILE;
    loop {
        let used = group.used();
        if used == Ok(expected) || Instant::now() > end {
            return used;
        }
        std::thread::yield_now();
    }
}

fn price(size: usize) -> u64 {
    PROCESS.usable_size(black_box(vec![0_u8; size]).as_ptr()) as u64
}

#[test]
fn everything_is_charged_once_and_comes_back() {
    let _alone = ALONE.lock().unwrap();
    let group = Group::create("in/one").unwrap();
    for size in SIZES {
        for zeroed in [false, true] {
            let inside = group.enter().unwrap();
            let memory = if zeroed { black_box(vec![0_u8; size]) } else { black_box(vec![7_u8; size]) };
            drop(inside);
            assert_eq!(used(group, price(size)), Ok(price(size)), "{size} bytes");
            let outside = black_box(vec![1_u8; size]);
            assert_eq!(used(group, price(size)), Ok(price(size)), "{size} bytes outside");
            drop(outside);
            // Freed by another thread, outside.
            std::thread::spawn(move || drop(memory)).join().unwrap();
            assert_eq!(used(group, 0), Ok(0), "{size} bytes");
        }
    }
    group.delete().unwrap();
    PROCESS.verify(OTHERS).unwrap();
}

#[test]
fn memory_that_grows_and_shrinks_is_charged_for_what_it_is() {
    let _alone = ALONE.lock().unwrap();
    let group = Group::create("in/grows").unwrap();
    let inside = group.enter().unwrap();
    let mut memory: Vec<u8> = Vec::with_capacity(10);
    for size in [10, 100, 5000, 40_000, 1 << 20, 9 << 20, 100 << 10, 33_000, 2000, 10] {
        memory.resize(size, 1);
        memory.shrink_to_fit();
        let usable = PROCESS.usable_size(memory.as_ptr()) as u64;
        assert_eq!(used(group, usable), Ok(usable), "{size} bytes");
    }
    drop(inside);
    // Outside the group the moved memory has no payer.
    memory.resize(1 << 20, 1);
    assert_eq!(used(group, 0), Ok(0));
    drop(memory);
    assert_eq!(used(group, 0), Ok(0));
    group.delete().unwrap();
    PROCESS.verify(OTHERS).unwrap();
}

#[test]
fn groups_nest_and_threads_have_their_own() {
    let _alone = ALONE.lock().unwrap();
    let [one, two] = ["in/outer", "in/inner"].map(|path| Group::create(path).unwrap());
    let outer = one.enter().unwrap();
    let first = black_box(vec![0_u8; 1000]);
    let inner = two.enter().unwrap();
    let second = black_box(vec![0_u8; 1000]);
    let other = std::thread::scope(|scope| scope.spawn(|| black_box(vec![0_u8; 1000])).join().unwrap());
    drop(inner);
    let third = black_box(vec![0_u8; 1000]);
    drop(outer);
    let fourth = black_box(vec![0_u8; 1000]);
    assert_eq!((used(one, 2 * price(1000)), used(two, price(1000))), (Ok(2 * price(1000)), Ok(price(1000))));
    drop((first, second, third, fourth, other));
    assert_eq!((used(one, 0), used(two, 0)), (Ok(0), Ok(0)));
    one.delete().unwrap();
    two.delete().unwrap();
}

/// Freed objects stay charged while caches have them; a limit takes that slack back.
#[test]
fn what_caches_keep_is_charged_until_a_limit_wants_it() {
    let _alone = ALONE.lock().unwrap();
    let group = Group::create("in/slack").unwrap();
    let inside = group.enter().unwrap();
    let blocks: Vec<Vec<u8>> = (0..2000).map(|_| black_box(vec![0_u8; 64])).collect();
    drop(black_box(blocks));
    drop(inside);
    assert_eq!(used(group, 0), Ok(0));
    let charged = group.info().unwrap().charged;
    assert!(charged >= 64 * 64, "{charged}: a stack has some of them, and a stock the rest");
    group.set(Bound::Max, 200 << 10).unwrap();
    // A tick may have a sheaf in its hands.
    let end = Instant::now() + WHILE;
    let charge = loop {
        match group.charge(200 << 10) {
            Ok(charge) => break charge,
            Err(refusal) => assert!(Instant::now() < end, "{refusal:?}"),
        }
    };
    assert_eq!((used(group, 200 << 10), group.info().unwrap().charged), (Ok(200 << 10), 200 << 10));
    drop(charge);
    group.delete().unwrap();
    PROCESS.verify(OTHERS).unwrap();
}

/// Five hundred groups, each with an object that outlives it.
#[test]
fn l18_objects_outliving_group_move_to_parent_and_pin_nothing() {
    let _alone = ALONE.lock().unwrap();
    let parent = Group::create("in/zombies").unwrap();
    let kept: Vec<Vec<u8>> = (0..500)
        .map(|number| {
            let group = Group::create(&format!("in/zombies/{number}")).unwrap();
            let inside = group.enter().unwrap();
            let object = black_box(vec![0_u8; 100]);
            drop(inside);
            group.delete().unwrap();
            object
        })
        .collect();
    assert_eq!((used(parent, 500 * price(100)), parent.children().count()), (Ok(500 * price(100)), 0));
    let end = Instant::now() + WHILE;
    while neap::groups::count().unwrap().dying > 0 {
        assert!(Instant::now() < end);
        PROCESS.tick(0);
    }
    PROCESS.verify(OTHERS).unwrap();
    drop(kept);
    assert_eq!(used(parent, 0), Ok(0));
    parent.delete().unwrap();
}

#[test]
fn thread_in_deleted_group_charges_its_heir() {
    let _alone = ALONE.lock().unwrap();
    let child = Group::create("in/heir/child").unwrap();
    let parent = Group::find("in/heir").unwrap();
    let inside = child.enter().unwrap();
    let before = black_box(vec![0_u8; 5000]);
    child.delete().unwrap();
    // The stock of the child may still be used.
    parent.drain().unwrap();
    let after = black_box(vec![0_u8; 5000]);
    drop(inside);
    assert_eq!(used(parent, 2 * price(5000)), Ok(2 * price(5000)));
    drop((before, after));
    assert_eq!(used(parent, 0), Ok(0));
    parent.delete().unwrap();
}

#[test]
fn beyond_a_limit_memory_is_had_and_counted() {
    let _alone = ALONE.lock().unwrap();
    let group = Group::create("in/limit").unwrap();
    group.set(Bound::Max, 1 << 20).unwrap();
    let inside = group.enter().unwrap();
    let memory: Vec<Vec<u8>> = (0..40).map(|_| black_box(vec![0_u8; 50_000])).collect();
    drop(inside);
    let info = group.info().unwrap();
    assert!(group.used().unwrap() > 1 << 20 && info.events[4] > 0);
    assert!(info.kinds[Kind::Pages as usize] >= 40 * 50_000 && info.kinds[Kind::ByHand as usize] == 0);
    drop(memory);
    assert_eq!(used(group, 0), Ok(0));
    group.delete().unwrap();
}

/// Threads in groups that come and go. Other threads free their memory.
#[test]
fn l21_a_storm_of_threads_in_groups_leaves_nothing_behind() {
    let _alone = ALONE.lock().unwrap();
    let top = Group::create("in/storm").unwrap();
    let shelf: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::with_capacity(4000));
    let rounds = if cfg!(debug_assertions) { 20_000 } else { 100_000 };
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let shelf = &shelf;
            scope.spawn(move || {
                let mut state = thread + 1;
                for round in 0..rounds {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let random = (state >> 33) as usize;
                    let path = format!("in/storm/{}", random % 8);
                    let group = Group::find_or_create(&path);
                    let Ok(inside) = group.unwrap_or(top).enter() else { continue };
                    let size = if random.is_multiple_of(500) { 50_000 + random % 100_000 } else { 1 + random % 3000 };
                    let mut memory = black_box(vec![thread as u8; size]);
                    if random.is_multiple_of(7) {
                        memory.resize(1 + random % 10_000, 1);
                    }
                    drop(inside);
                    if round % 50 == 0 {
                        let _ = Group::find(&path).map(Group::delete);
                    }
                    let other = {
                        let mut shelf = shelf.lock().unwrap();
                        shelf.push(memory);
                        if shelf.len() > 2000 { Some(shelf.swap_remove(random % 2000)) } else { None }
                    };
                    drop(other);
                }
            });
        }
    });
    let census = PROCESS.verify(OTHERS);
    assert!(census.is_ok(), "{census:?}");
    assert!(top.used().unwrap() > 100_000);
    shelf.lock().unwrap().clear();
    assert_eq!(used(top, 0), Ok(0));
    (0..8).for_each(|number| _ = Group::find(&format!("in/storm/{number}")).map(Group::delete));
    top.delete().unwrap();
    PROCESS.verify(OTHERS).unwrap();
}

/// A child has the parent's groups, whatever its other threads were doing, and can use them.
#[test]
fn a_child_has_its_parents_groups() {
    let _alone = ALONE.lock().unwrap();
    let top = Group::create("in/fork").unwrap();
    let (stop, mut codes) = (AtomicBool::new(false), Vec::with_capacity(50));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let stop = &stop;
            scope.spawn(move || {
                for round in 0.. {
                    let group = Group::find_or_create(&format!("in/fork/{}", round % 3)).unwrap_or(top);
                    let charge = group.charge(1 + round % 100_000);
                    let inside = group.enter();
                    let memory = black_box(vec![thread as u8; 1 + (round % 5000) as usize]);
                    drop(inside);
                    if round % 500 == 0 {
                        let _ = group.delete();
                    }
                    drop((memory, charge));
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        for _ in 0..50 {
            let child = || {
                let mut wrong = i32::from(PROCESS.verify(OTHERS).is_err());
                let before = top.used().unwrap_or(0);
                let charge = top.charge(5000);
                let memory = top.enter().map(|_inside| black_box(vec![0_u8; 3000]));
                let inside = before + 5000 + price(3000);
                wrong |= i32::from(used(top, inside) != Ok(inside)) << 1;
                drop((charge, memory));
                wrong |= i32::from(used(top, before) != Ok(before)) << 2;
                let made = Group::create("in/fork/child").and_then(|group| group.delete());
                wrong |= i32::from(made.is_err()) << 3;
                (0..100).for_each(|_| _ = PROCESS.tick(0));
                wrong |= i32::from(neap::groups::count().map(|count| count.dying) != Ok(0)) << 4;
                wrong |= i32::from(PROCESS.verify(OTHERS).is_err()) << 5;
                wrong
            };
            codes.push(exit_code_of(child));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(codes.iter().all(|&code| code == 0), "{codes:x?}");
    (0..3).for_each(|number| _ = Group::find(&format!("in/fork/{number}")).map(Group::delete));
    assert_eq!(used(top, 0), Ok(0));
    top.delete().unwrap();
    PROCESS.verify(OTHERS).unwrap();
}
