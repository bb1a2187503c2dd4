//! LRU lists as C uses them: objects with a link inside, walks, deleted groups; and invalid
//! arguments.

use crate::error::Error;
use crate::group::{neap_group_create, neap_group_delete, neap_group_of};
use crate::list::*;
use crate::tests::zeroed;
use core::ffi::{CStr, c_int, c_void};
use core::ptr::{null, null_mut};
use neap::groups::{Group, GroupId};
use neap::lru::Item;
use neap::process::PROCESS;

const ROOT: u64 = Group::ROOT.id().to_bits();
const ARGUMENT: c_int = Error::Argument as c_int;

#[derive(Default)]
#[repr(C)]
struct Thing {
    item: Item,
    number: u32,
}

/// Items that a walk visited.
#[derive(Default)]
struct Seen {
    isolated: Vec<u32>,
    disposed: Vec<u32>,
}

unsafe extern "C" fn isolate(item: *mut Item, seen: *mut c_void) -> c_int {
    // SAFETY: each item is the first field of a `Thing`, and `seen` is the test's.
    let (thing, seen) = unsafe { (&*item.cast::<Thing>(), &mut *seen.cast::<Seen>()) };
    // The vector has room, so nothing is allocated under the lock.
    seen.isolated.push(thing.number);
    // 0: removed, 1: rotated, 2: stays; an invalid verdict: stays, too.
    [0, 1, 2, 77][thing.number as usize % 4]
}

unsafe extern "C" fn dispose(item: *mut Item, seen: *mut c_void) {
    // SAFETY: each item is the first field of a `Thing`, and `seen` is the test's.
    let (thing, seen) = unsafe { (&*item.cast::<Thing>(), &mut *seen.cast::<Seen>()) };
    // SAFETY: the item exists, and the walk has handed it to this function.
    unsafe { assert!(neap_item_is_linked(item) && neap_item_leave_hands(item) && !neap_item_leave_hands(item)) };
    seen.disposed.push(thing.number);
}

fn group(path: &CStr) -> u64 {
    let mut group = 0;
    // SAFETY: the path is a C string, and the place is local.
    assert_eq!(unsafe { neap_group_create(path.as_ptr(), &raw mut group) }, 0);
    group
}

#[test]
fn items_are_added_walked_and_handed_up() {
    let mut list = zeroed::<List>();
    let list = list.as_mut_ptr();
    let (above, below) = (group(c"c-lists"), group(c"c-lists/below"));
    let things: Vec<Thing> = (0..8).map(|number| Thing { number, ..Thing::default() }).collect();
    let item = |thing: usize| (&raw const things[thing]).cast_mut().cast::<Item>();
    let mut seen = Seen::default();
    seen.isolated.reserve(64);
    // SAFETY: the things outlive the list, and the callbacks keep the header's contract.
    unsafe {
        assert_eq!(neap_list_init(list, 2, 0), 0);
        for thing in 0..8 {
            assert_eq!(neap_list_add(list, below, 0, item(thing)), 1);
            assert_eq!(neap_list_add(list, above, 0, item(thing)), 0, "it is on it");
        }
        assert_eq!((neap_list_count(list, below, 0), neap_list_count(list, above, 0)), (8, 0));
        let mut walked = Walked::default();
        let argument = (&raw mut seen).cast();
        let walk = |group, most, walked: *mut Walked| {
            neap_list_walk(list, group, 0, most, Some(isolate), Some(dispose), argument, walked)
        };
        assert_eq!(walk(below, 6, &raw mut walked), 0);
        assert_eq!(walked, Walked { scanned: 6, removed: 2, stopped: 0 });
        assert_eq!((&*seen.isolated, &*seen.disposed), (&[0, 1, 2, 3, 4, 5][..], &[0, 4][..]));
        assert_eq!(neap_group_delete(below), 0);
        assert_eq!((neap_list_count(list, below, 0), neap_list_count(list, above, 0)), (0, 6));
        seen.isolated.clear();
        assert_eq!(walk(above, 100, null_mut()), 0);
        assert_eq!(seen.isolated, [2, 3, 6, 7, 1, 5], "those that were rotated are the newest");
        let off = (0..8).filter(|&thing| neap_list_del(list, item(thing))).collect::<Vec<_>>();
        assert_eq!((off, neap_list_count(list, above, 0)), (vec![1, 2, 3, 5, 6, 7], 0));
        assert!((0..8).all(|thing| !neap_item_is_linked(item(thing))));
        assert_eq!((neap_list_destroy(list), neap_list_destroy(list)), (0, ARGUMENT));
    }
    assert_eq!(neap_group_delete(above), 0);
}

#[test]
fn what_is_no_list_no_item_and_no_group_is_refused() {
    let (mut none, mut list, thing) = (zeroed::<List>(), zeroed::<List>(), Thing::default());
    let (none, list, item) = (none.as_mut_ptr(), list.as_mut_ptr(), (&raw const thing).cast_mut().cast::<Item>());
    // SAFETY: the pointers are null, misaligned or local; refused ones are not accessed.
    unsafe {
        assert_eq!(neap_list_init(null_mut(), 0, 0), ARGUMENT);
        assert_eq!((neap_list_init(list, 1, 0), neap_list_init(list, 0, 7)), (ARGUMENT, ARGUMENT));
        assert_eq!(neap_list_init(list, 0, 0), 0);
        for wrong in [null(), none.cast_const()] {
            assert_eq!(neap_list_add(wrong, ROOT, 0, item), ARGUMENT);
            assert!(!neap_list_del(wrong, item) && neap_list_count(wrong, ROOT, 0) == 0);
            let walk = neap_list_walk(wrong, ROOT, 0, 1, Some(isolate), Some(dispose), null_mut(), null_mut());
            assert_eq!(walk, ARGUMENT);
        }
        assert_eq!(
            (neap_list_add(list, ROOT, 0, null_mut()), neap_list_add(list, u64::MAX, 0, item)),
            (ARGUMENT, Error::Group as c_int)
        );
        assert_eq!(neap_list_walk(list, ROOT, 0, 1, None, Some(dispose), null_mut(), null_mut()), ARGUMENT);
        assert!(!neap_list_touch(list, item) && !neap_list_touch(null(), item) && !neap_list_touch(list, null_mut()));
        assert!(!neap_list_del(list, item) && !neap_item_is_linked(null()) && !neap_item_leave_hands(null_mut()));
        // A list without groups has all items with the root.
        let group = group(c"c-lists-flat");
        assert_eq!((neap_list_add(list, group, 0, item), neap_list_count(list, ROOT, 0)), (1, 1));
        assert!(neap_list_touch(list, item) && neap_list_del(list, item));
        assert_eq!((neap_list_destroy(list), neap_group_delete(group)), (0, 0));
    }
}

#[test]
fn an_item_is_added_for_the_group_that_pays_for_its_memory() {
    let mut list = zeroed::<List>();
    let list = list.as_mut_ptr();
    let payer = group(c"c-lists-payer");
    let inside = Group::from_id(GroupId::from_bits(payer)).enter().unwrap();
    let memory = PROCESS.allocate(100);
    drop(inside);
    // SAFETY: the memory has 100 bytes and is this test's, also the item in it. The list is local.
    unsafe {
        memory.write_bytes(0, 100);
        let item = memory.add(24).cast::<Item>();
        assert_eq!((neap_group_of(memory.cast()), neap_group_of(item.cast())), (payer, payer));
        assert_eq!((neap_group_of(null()), neap_group_of((&raw const payer).cast())), (0, 0));
        assert_eq!(neap_list_init(list, 2, 0), 0);
        assert_eq!(neap_list_add_by_memory(list, null_mut()), ARGUMENT);
        assert_eq!([(); 2].map(|()| neap_list_add_by_memory(list, item)), [1, 0]);
        assert_eq!((neap_list_count(list, payer, 0), neap_list_count(list, ROOT, 0)), (1, 0));
        assert!(neap_list_del(list, item));
        assert_eq!(neap_list_destroy(list), 0);
        PROCESS.free(memory);
    }
    assert_eq!(neap_group_delete(payer), 0);
}
