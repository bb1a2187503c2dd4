//! The group that pays for memory, found by an address; and lists that take the group from there.

use core::hint::black_box;
use core::ptr::NonNull;
use neap::groups::{Group, Kind, payer_at, payer_of};
use neap::lru::{By, Item, LruList, RawList};
use neap::process::PROCESS;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

/// Runs `body` in a group.
fn inside<R>(group: Group, body: impl FnOnce() -> R) -> R {
    let _inside = group.enter().unwrap();
    body()
}

#[test]
fn any_address_of_an_object_leads_to_its_payer() {
    let [one, two] = ["payers/one", "payers/two"].map(|path| Group::create(path).unwrap());
    for size in [1, 16, 48, 100, 1000, 4096, 5000, 20_000, 32 << 10] {
        // Neighbours on one page have different payers.
        let blocks: Vec<(Option<Group>, Vec<u8>)> = (0..30)
            .map(|number| match [Some(one), Some(two), None][number % 3] {
                Some(group) => (Some(group), inside(group, || black_box(vec![1_u8; size]))),
                None => (None, black_box(vec![1_u8; size])),
            })
            .collect();
        for (group, block) in &blocks {
            let found = [0, size / 2, size - 1].map(|at| payer_of(&block[at]));
            assert_eq!(found, [*group; 3], "{size} bytes");
            assert_eq!(payer_of(&block[..]), *group);
        }
    }
    [one, two].iter().for_each(|group| group.delete().unwrap());
}

#[test]
fn a_large_block_is_known_by_its_first_page() {
    let group = Group::create("payers/large").unwrap();
    let block = inside(group, || black_box(vec![1_u8; 1 << 20]));
    assert_eq!([0, 17, 4095, 4096].map(|at| payer_of(&block[at])), [Some(group), Some(group), Some(group), None]);
    let other = black_box(vec![1_u8; 1 << 20]);
    assert_eq!(payer_of(&other[0]), None);
    group.delete().unwrap();
    assert_eq!(payer_of(&block[0]), Some(Group::find("payers").unwrap()));
}

#[test]
fn memory_of_another_origin_has_no_payer() {
    static NUMBER: u64 = 7;
    let group = Group::create("payers/origin").unwrap();
    let on_stack = 7_u64;
    let _inside = group.enter().unwrap();
    assert_eq!([&NUMBER, &on_stack].map(payer_of), [None; 2]);
    assert_eq!(payer_of::<[u8]>(&[]), None, "no memory");
    let block = black_box(Box::new([0_u8; 64]));
    assert_eq!(payer_of(&block[64..]), None, "no bytes");
    // SAFETY: the block is not freed during the call; there is no block at null.
    unsafe {
        assert_eq!(payer_at(block.as_ptr()), Some(group));
        assert_eq!(payer_at(core::ptr::null()), None);
    }
}

#[test]
fn an_item_is_listed_for_the_group_that_pays_for_it() {
    #[repr(C)]
    #[derive(Default)]
    struct Page {
        number: u64,
        item: Item,
    }
    let [one, two] = ["payers/list/one", "payers/list/two"].map(|path| Group::create(path).unwrap());
    let list = RawList::open(By::Group).unwrap();
    let count = |group| list.count(group, 0);
    let add = |group: Option<Group>| {
        let make = || Box::into_raw(black_box(Box::<Page>::default()));
        let page = group.map_or_else(make, |group| inside(group, make));
        // SAFETY: the page is not moved, and is freed below, after it was taken off.
        unsafe {
            let item = NonNull::from(&mut (*page).item);
            assert_eq!(list.add_by_memory(item), Ok(true));
            assert_eq!(list.add_by_memory(item), Ok(false), "it is on the list");
            (page, item)
        }
    };
    // In a third group, which neither pays.
    let pages = inside(Group::create("payers/list/adds").unwrap(), || [Some(one), Some(two), Some(two)].map(add));
    let [on_one, on_two, on_root] = [one, two, Group::ROOT].map(count);
    assert_eq!((on_one, on_two, on_root), (1, 2, 0));
    let unpaid = add(None);
    assert_eq!(count(Group::ROOT), 1);
    // An item of a group that is gone goes to the heir.
    // SAFETY: the items are in place, and each page is freed once.
    unsafe {
        assert!(list.del(pages[0].1));
        one.delete().unwrap();
        assert_eq!(list.add_by_memory(pages[0].1), Ok(true));
        assert_eq!(count(Group::find("payers/list").unwrap()), 1);
        for (page, item) in pages.into_iter().chain([unpaid]) {
            assert!(list.del(item));
            drop(Box::from_raw(page));
        }
        list.close();
    }
    let values = LruList::new().unwrap();
    let handle = inside(two, || values.add_by_memory("paid").unwrap());
    assert_eq!((values.count(two), payer_of(&*handle)), (1, Some(two)));
    drop((handle, values));
    two.delete().unwrap();
    assert!(Group::ROOT.charged(Kind::Objects, 0).is_ok());
    PROCESS.tick(0);
}
