//! Collections whose memory a group pays for, in any thread and inside any other group.

use allocator_api2::alloc::{Allocator, Layout};
use allocator_api2::boxed::Box;
use core::hint::black_box;
use hashbrown::{DefaultHashBuilder, HashMap};
use neap::groups::{Bound, Group, GroupVec};
use std::thread;

const MIB: usize = 1 << 20;

fn used(group: Group) -> usize {
    group.used().unwrap() as usize
}

#[test]
fn a_vector_is_paid_by_its_group_in_any_thread_and_group() {
    let (own, other) = (Group::create("vectors/own").unwrap(), Group::create("vectors/other").unwrap());
    let mut rows = GroupVec::new_in(own.allocator());
    let inside = other.enter().unwrap();
    (0..MIB as u64).for_each(|row| rows.push(row));
    drop(inside);
    assert!(used(own) >= 8 * MIB && used(other) < MIB, "{} and {}", used(own), used(other));
    let rows = thread::spawn(move || {
        rows.extend(0..MIB as u64);
        rows
    });
    let rows = rows.join().unwrap();
    assert!(used(own) >= 16 * MIB);
    assert!(rows.iter().enumerate().all(|(at, row)| *row == (at % MIB) as u64));
    thread::spawn(|| drop(rows)).join().unwrap();
    assert!(used(own) < MIB);
}

#[test]
fn a_map_of_boxes_is_paid_by_its_group() {
    let group = Group::create("maps").unwrap();
    let mut map = HashMap::with_hasher_in(DefaultHashBuilder::default(), group.allocator());
    for key in 0..10_000_u64 {
        map.insert(key, Box::new_in([key; 16], group.allocator()));
    }
    assert!(used(group) >= 10_000 * (16 + 2) * 8, "{}", used(group));
    map.retain(|key, _| key % 2 == 0);
    map.shrink_to_fit();
    assert!(map.iter().all(|(key, value)| **value == [*key; 16]) && map.len() == 5000);
    drop(map);
    assert!(used(group) < MIB);
}

#[test]
fn resized_memory_keeps_contents_and_alignment() {
    let memory = Group::create("resized").unwrap().allocator();
    let layout = |size, align| Layout::from_size_align(size, align).unwrap();
    let sizes = [0, 1, 100, 100, 5000, 0, 300_000, 3 << 20, 70_000, 7, 0];
    for aligns in [[8, 8], [8, 64], [4096, 16], [1, 1 << 16]] {
        let align = |step: usize| aligns[step % 2];
        let mut now = layout(sizes[0], align(0));
        let mut block = memory.allocate_zeroed(now).unwrap().cast::<u8>();
        for (step, size) in sizes.into_iter().enumerate().skip(1) {
            let new = layout(size, align(step));
            // SAFETY: `block` was allocated with the layout `now`, and is replaced here.
            block = unsafe {
                if new.size() >= now.size() { memory.grow(block, now, new) } else { memory.shrink(block, now, new) }
            }
            .unwrap()
            .cast();
            assert_eq!(block.addr().get() % new.align(), 0);
            let kept = now.size().min(new.size());
            // SAFETY: the block has `size` bytes. The first `kept` are zeroes, or written below.
            let bytes = unsafe { core::slice::from_raw_parts(block.as_ptr(), kept) };
            assert!(bytes.iter().all(|byte| *byte == step as u8 - 1));
            // SAFETY: the block has `size` bytes.
            unsafe { block.write_bytes(step as u8, size) };
            now = new;
        }
        // SAFETY: `block` was allocated with the layout `now`, and is not used any more.
        unsafe { memory.deallocate(block, now) };
    }
}

#[test]
fn an_heir_pays_after_deletion() {
    let parent = Group::create("heirs").unwrap();
    let child = Group::create("heirs/child").unwrap();
    let mut rows = GroupVec::new_in(child.allocator());
    rows.resize(MIB, 1_u8);
    child.delete().unwrap();
    rows.resize(4 * MIB, 2_u8);
    assert!(used(parent) >= 4 * MIB);
    drop(black_box(rows));
    assert!(used(parent) < MIB);
}

#[test]
fn at_a_limit_a_vector_grows_or_says_no() {
    let group = Group::create("limited").unwrap();
    group.set(Bound::Max, 4 * MIB as u64).unwrap();
    let mut rows = GroupVec::new_in(group.allocator());
    rows.resize(8 * MIB, 1_u8);
    assert!(used(group) >= 8 * MIB, "unless refusal is wanted, the limit is exceeded");
    neap::set("refuse", "on").unwrap();
    assert!(rows.try_reserve_exact(8 * MIB).is_err() && rows.len() == 8 * MIB);
    assert!(rows.iter().all(|byte| *byte == 1));
    rows.truncate(MIB);
    rows.shrink_to_fit();
    assert!(rows.try_reserve_exact(MIB).is_ok());
}
