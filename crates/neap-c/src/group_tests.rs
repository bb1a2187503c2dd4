//! Groups and charges as C uses them: the effect of each function, and its errors for invalid
//! arguments.

use crate::charge::*;
use crate::error::*;
use crate::event::*;
use crate::group::*;
use crate::percpu::*;
use crate::shrinker::neap_reclaim;
use crate::tests::{code, misaligned, zeroed};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::hint::black_box;
use core::mem::MaybeUninit;
use core::ptr::{null, null_mut};
use neap::groups::{Group, UNLIMITED};
use std::ffi::CString;
use std::string::String;
use std::sync::Mutex;
use std::vec::Vec;

/// Tests that check the root take this mutex, and so do tests that charge.
static ALONE: Mutex<()> = Mutex::new(());

const ROOT: u64 = Group::ROOT.id().to_bits();
/// Numbers that no group has: another generation, and bits that no id has.
const NONE: [u64; 3] = [5 << 21, ROOT | 1 << 36, u64::MAX];

type Get = unsafe extern "C" fn(*const c_char, *mut u64) -> c_int;

/// Calls a function with a path; returns its result, and the group if it stored one.
fn at(get: Get, path: &str) -> (c_int, u64) {
    let (path, mut group) = (CString::new(path).unwrap(), 0);
    // SAFETY: the path is a C string, and the place is local.
    (unsafe { get(path.as_ptr(), &raw mut group) }, group)
}

fn made(path: &str) -> u64 {
    let (answer, group) = at(neap_group_create, path);
    assert_eq!(answer, 0, "{path}");
    group
}

fn used(group: u64) -> u64 {
    let mut bytes = u64::MAX;
    // SAFETY: the place is local.
    assert_eq!(unsafe { neap_group_used(group, &raw mut bytes) }, 0);
    bytes
}

fn info(group: u64) -> GroupInfo {
    let mut info = zeroed::<GroupInfo>();
    // SAFETY: the place is local, zeroes are a valid value, and the call writes at most `size`
    // bytes.
    unsafe {
        assert_eq!(neap_group_info_get(group, info.as_mut_ptr(), size_of::<GroupInfo>()), 0);
        info.assume_init_read()
    }
}

fn path(group: u64, size: usize) -> (c_int, String) {
    let mut text = [b'#'; 4096];
    // SAFETY: the buffer has more than `size` bytes.
    unsafe {
        let answer = neap_group_path(group, text.as_mut_ptr().cast(), size);
        assert!(text[size..].iter().all(|&byte| byte == b'#'));
        (answer, CStr::from_ptr(text.as_ptr().cast()).to_str().unwrap().into())
    }
}

fn children(group: u64) -> Vec<u64> {
    let mut child = 0;
    let mut all = Vec::new();
    // SAFETY: the place is local.
    while unsafe { neap_group_next(group, &raw mut child) } == 1 {
        all.push(child);
    }
    assert_eq!(child, 0);
    all
}

#[test]
fn groups_are_made_found_stepped_through_and_deleted() {
    let _alone = ALONE.lock().unwrap();
    let leaf = made("c/tree/leaf");
    let (_, tree) = at(neap_group_find, "c/tree");
    assert_eq!(at(neap_group_create, "c/tree/leaf"), (code(Error::Exists), 0));
    assert_eq!(at(neap_group_find, "c/tree/leaf"), (0, leaf));
    assert_eq!(at(neap_group_find_or_create, "c/tree/leaf"), (0, leaf));
    assert_eq!(at(neap_group_find, ""), (0, ROOT));
    assert_eq!(at(neap_group_find, "c/tree/none"), (code(Error::Group), 0));
    for bad in ["", "c//d", "/c", "c/", "..", "a\nb", &"x".repeat(57)] {
        assert_eq!(at(neap_group_create, bad), (code(Error::Name), 0), "{bad:?}");
    }
    let (_, other) = at(neap_group_find_or_create, "c/tree/other");
    let mut both = children(tree);
    both.sort();
    let mut expected = [leaf, other];
    expected.sort();
    assert_eq!((both.as_slice(), children(leaf).len()), (expected.as_slice(), 0));
    assert!(!children(ROOT).is_empty());

    assert_eq!((path(leaf, 4096), path(ROOT, 1)), ((11, "c/tree/leaf".into()), (0, String::new())));
    assert_eq!((path(leaf, 12), path(leaf, 11)), ((11, "c/tree/leaf".into()), (11, "c/tree/lea".into())));
    // SAFETY: the call writes through no pointer.
    assert_eq!(unsafe { neap_group_path(leaf, null_mut(), 0) }, 11);
    let about = info(leaf);
    assert_eq!((about.group, about.parent, &about.name[..5]), (leaf, tree, b"leaf\0".as_slice()));
    assert_eq!((info(tree).children, info(ROOT).parent, info(ROOT).name[0]), (2, 0, 0));

    assert_eq!((neap_group_delete(tree), neap_group_delete(ROOT)), (code(Error::Children), code(Error::Argument)));
    assert_eq!((neap_group_delete(leaf), neap_group_delete(leaf)), (0, code(Error::Group)));
    let second = made("c/tree/leaf");
    assert!(second != leaf && at(neap_group_find, "c/tree/leaf") == (0, second));
    let mut after = leaf;
    // SAFETY: the place is local.
    unsafe {
        assert_eq!(neap_group_next(tree, &raw mut after), code(Error::Group), "after one that is gone");
        assert_eq!((neap_group_next(leaf, &raw mut after), after), (code(Error::Group), leaf));
        after = second;
        assert_eq!((neap_group_next(ROOT, &raw mut after), after), (code(Error::Group), second), "another's child");
    }
    for group in [second, other, tree, at(neap_group_find, "c").1] {
        assert_eq!(neap_group_delete(group), 0);
    }
}

#[test]
fn the_longest_path_fits() {
    let name = "n".repeat(56);
    let mut long = [name.as_str(); 31].join("/");
    let deepest = made(&long);
    assert_eq!(path(deepest, 2048), (long.len() as c_int, long.clone()));
    assert_eq!(at(neap_group_create, &std::format!("{long}/x")), (code(Error::Deep), 0));
    while !long.is_empty() {
        assert_eq!(neap_group_delete(at(neap_group_find, &long).1), 0);
        long.truncate(long.rfind('/').unwrap_or(0));
    }
}

#[test]
fn bounds_are_changed_and_events_counted() {
    let _alone = ALONE.lock().unwrap();
    let group = made("c-bounds");
    for (bound, first) in [(0, UNLIMITED), (1, UNLIMITED), (2, 0), (3, 0)] {
        let mut before = 7;
        // SAFETY: the place is local.
        unsafe {
            assert_eq!((neap_group_set(group, bound, 1000, &raw mut before), before), (0, first));
            assert_eq!(neap_group_set(group, bound, 4096 + bound as u64, null_mut()), 0);
            assert_eq!(
                (neap_group_set(group, bound, 8192 + bound as u64, &raw mut before), before),
                (0, 4096 + bound as u64)
            );
        }
    }
    let about = info(group);
    assert_eq!([about.max_bytes, about.high_bytes, about.low_bytes, about.min_bytes], [8192, 8193, 8194, 8195]);
    assert_eq!((about.changed_events, about.refused_events, about.overcharged_events), (12, 0, 0));
    let (mut over, mut refused) = (zeroed::<Charged>(), zeroed::<Charged>());
    let mut refusal = Refusal::default();
    // SAFETY: the objects are local.
    unsafe {
        assert_eq!(neap_group_charge(over.as_mut_ptr(), group, 10_000, 1, null_mut()), 0);
        assert_eq!(
            neap_group_charge(refused.as_mut_ptr(), group, 5, 0, &raw mut refusal),
            code(Error::Charge),
            "above its max"
        );
        let holders = [Holder { group, bytes: 10_000 }, Holder::default(), Holder::default()];
        let expected =
            Refusal { group, max_bytes: 8192, charged_bytes: 10_000, need_bytes: 5, holders, ..Refusal::default() };
        assert_eq!(refusal, expected);
        assert_eq!(neap_group_charge(refused.as_mut_ptr(), group, 5, 0, null_mut()), code(Error::Charge));
        assert_eq!(neap_group_uncharge(refused.as_mut_ptr()), code(Error::Argument), "nothing was made");
        let about = info(group);
        assert_eq!((about.charged_bytes, about.by_hand_bytes, about.peak_bytes), (10_000, 10_000, 10_000));
        assert_eq!((about.refused_events, about.overcharged_events), (2, 1));
        assert_eq!((about.local_refused_events, about.local_overcharged_events), (2, 1));
        let root = info(Group::ROOT.id().to_bits());
        assert!(root.refused_events >= 2 && root.local_refused_events == 0, "the root has no limit");
        assert_eq!(neap_group_uncharge(over.as_mut_ptr()), 0);
        let mut before = 7;
        for bound in [-1, 4, c_int::MIN] {
            assert_eq!((neap_group_set(group, bound, 0, &raw mut before), before), (code(Error::Argument), 7));
        }
    }
    assert_eq!((used(group), neap_group_delete(group)), (0, 0));
}

#[test]
fn what_is_known_fits_into_older_and_newer_structures() {
    let group = made("c-sizes");
    let known = info(group);
    // SAFETY: the structure is plain numbers without padding.
    let expected: [u64; size_of::<GroupInfo>() / 8] = unsafe { core::mem::transmute(known) };
    for words in [1, 2, expected.len() - 1, expected.len(), expected.len() + 5] {
        let mut place = [u64::MAX; 64];
        // SAFETY: the buffer has at least `words * 8` bytes.
        assert_eq!(unsafe { neap_group_info_get(group, place.as_mut_ptr().cast(), words * 8) }, 0);
        let same = words.min(expected.len());
        assert_eq!(place[..same], expected[..same]);
        assert!(
            place[same..words].iter().all(|&word| word == 0) && place[words..].iter().all(|&word| word == u64::MAX)
        );
    }
    let mut place = MaybeUninit::<GroupInfo>::zeroed();
    // SAFETY: the place is local.
    unsafe {
        assert_eq!(neap_group_info_get(group, place.as_mut_ptr(), 0), code(Error::Argument));
        for nowhere in [null_mut(), misaligned()] {
            assert_eq!(neap_group_info_get(group, nowhere, size_of::<GroupInfo>()), code(Error::Argument));
        }
    }
    assert_eq!(neap_group_delete(group), 0);
}

#[test]
fn a_tree_is_deleted_and_a_refusal_says_why() {
    let _alone = ALONE.lock().unwrap();
    let (top, leaf) = (made("c-all/top"), made("c-all/top/a/b"));
    let (above, refusal) = (at(neap_group_find, "c-all").1, &mut Refusal::default());
    let (mut charge, mut none) = (zeroed::<Charged>(), zeroed::<Charged>());
    // SAFETY: the objects are this function's.
    unsafe {
        assert_eq!(neap_group_set(top, 0, 4096, null_mut()), 0);
        assert_eq!(neap_group_charge(charge.as_mut_ptr(), leaf, 4096, 0, null_mut()), 0);
        assert_eq!(neap_group_charge(none.as_mut_ptr(), leaf, 1, 0, refusal), code(Error::Charge));
        assert_eq!(refusal.reason, AT_LIMIT);
        assert_eq!(neap_group_charge_wait(none.as_mut_ptr(), leaf, 1, 1, refusal), code(Error::Charge));
        assert_eq!(refusal.reason, AT_DEADLINE);
        assert_eq!(neap_group_charge_wait(none.as_mut_ptr(), leaf, 4097, -1, refusal), code(Error::Charge));
        assert_eq!((refusal.reason, neap_group_heir(leaf)), (TOO_LARGE, leaf));
        assert_eq!(neap_group_charge(none.as_mut_ptr(), leaf, 4096, 1, null_mut()), 0);
        assert_eq!((info(leaf).peak_bytes >= 8192, neap_group_uncharge(none.as_mut_ptr())), (true, 0));
        assert_eq!((neap_group_reset_peak(leaf), neap_group_reset_peak(NONE[0])), (0, code(Error::Group)));
        assert_eq!(info(leaf).peak_bytes, info(leaf).charged_bytes);
        assert_eq!((neap_group_delete_all(ROOT), neap_group_delete_all(top)), (code(Error::Argument), 0));
        assert_eq!((neap_group_delete_all(top), neap_group_heir(leaf), used(above)), (code(Error::Group), above, 4096));
        assert_eq!((neap_group_uncharge(charge.as_mut_ptr()), neap_group_delete(above)), (0, 0));
    }
    assert_eq!(neap_group_heir(NONE[0]), 0);
}

#[test]
fn charges_split_merge_move_and_go_back_once() {
    let _alone = ALONE.lock().unwrap();
    let [heir, one, two] = ["c-heir", "c-heir/one", "c-two"].map(made);
    let (mut whole, mut part, mut none) = (zeroed::<Charged>(), zeroed::<Charged>(), zeroed::<Charged>());
    let (whole, part, none) = (whole.as_mut_ptr(), part.as_mut_ptr(), none.as_mut_ptr());
    let mut refusal = Refusal::default();
    // SAFETY: the objects are local.
    unsafe {
        assert_eq!(neap_group_charge(whole, one, 1000, 0, null_mut()), 0);
        assert_eq!(neap_charge_split(whole, part, 1001), code(Error::Argument));
        assert_eq!(neap_charge_split(whole, whole, 1), code(Error::Argument));
        assert_eq!((neap_charge_bytes(whole), neap_charge_bytes(part)), (1000, 0));
        assert_eq!(neap_charge_split(whole, part, 400), 0);
        assert_eq!((neap_charge_bytes(whole), neap_charge_bytes(part), used(one)), (600, 400, 1000));
        assert_eq!(neap_charge_move(part, two, null_mut()), 0);
        assert_eq!((used(one), used(two), neap_charge_group(part)), (600, 400, two));
        // A failed merge leaves both charges unchanged.
        for (a, b) in
            [(whole, part), (whole, whole), (none, part), (part, none), (null_mut(), part), (part, misaligned())]
        {
            assert_eq!(neap_charge_merge(a, b), code(Error::Argument));
        }
        assert_eq!((neap_charge_bytes(whole), neap_charge_bytes(part), used(one), used(two)), (600, 400, 600, 400));
        // A refused move leaves the charge where it is.
        assert_eq!(neap_group_set(one, 0, 900, null_mut()), 0);
        assert_eq!(neap_charge_move(part, one, &raw mut refusal), code(Error::Charge));
        assert_eq!((refusal.group, refusal.need_bytes, neap_charge_group(part)), (one, 400, two));
        assert_eq!(neap_group_set(one, 0, 1000, null_mut()), 0);
        assert_eq!(neap_charge_move(part, one, null_mut()), 0);
        assert_eq!(neap_charge_merge(whole, part), 0);
        assert_eq!((neap_charge_bytes(whole), neap_charge_group(part)), (1000, 0));
        // The heir takes over a deleted group's charges.
        assert_eq!((neap_group_delete(one), used(heir), neap_charge_group(whole)), (0, 1000, one));
        assert_eq!(neap_charge_move(whole, one, null_mut()), code(Error::Group));
        assert_eq!((neap_group_uncharge(whole), neap_group_uncharge(whole)), (0, code(Error::Argument)));
        assert_eq!((used(heir), neap_group_uncharge(part)), (0, code(Error::Argument)));
    }
    assert_eq!([two, heir].map(|group| neap_group_delete(group)), [0, 0]);
}

#[test]
fn what_is_none_is_refused() {
    let made = made("c-some");
    let (mut object, mut inside) = (zeroed::<Charged>(), zeroed::<Inside>());
    let (charge, entered) = (object.as_mut_ptr(), inside.as_mut_ptr());
    let (mut number, mut refusal) = (7, Refusal::default());
    // SAFETY: the places are local, null or misaligned.
    unsafe {
        // Small numbers are an index that may be in use, without a generation.
        for none in (0..300).chain(NONE) {
            assert_eq!(neap_group_delete(none), code(Error::Group), "{none:#x}");
            assert_eq!(neap_group_set(none, 0, 0, null_mut()), code(Error::Group));
            assert_eq!((neap_group_used(none, &raw mut number), number), (code(Error::Group), 7));
            assert_eq!(neap_group_path(none, null_mut(), 0), code(Error::Group));
            let mut about = zeroed::<GroupInfo>();
            assert_eq!(neap_group_info_get(none, about.as_mut_ptr(), 8), code(Error::Group));
            assert_eq!(neap_group_charge(charge, none, 1, 1, &raw mut refusal), code(Error::Group));
            assert_eq!(
                (neap_group_enter(entered, none), neap_group_leave(entered)),
                (code(Error::Group), code(Error::Argument))
            );
            let mut child = 0;
            assert_eq!(neap_group_next(none, &raw mut child), code(Error::Group));
        }
        assert_eq!(refusal, Refusal::default(), "only a limit is told of");
        for flags in [2, 3, u32::MAX] {
            assert_eq!(neap_group_charge(charge, ROOT, 1, flags, null_mut()), code(Error::Argument));
        }
        for get in [neap_group_create as Get, neap_group_find, neap_group_find_or_create] {
            assert_eq!(get(null(), &raw mut number), code(Error::Argument));
            assert_eq!(get(c"c-nowhere".as_ptr(), null_mut()), code(Error::Argument));
            assert_eq!(get(c"c-nowhere".as_ptr(), misaligned()), code(Error::Argument));
            assert_eq!((get(c"c-\xff".as_ptr(), &raw mut number), number), (code(Error::Name), 7));
        }
        assert_eq!(at(neap_group_find, "c-nowhere"), (code(Error::Group), 0), "not made by the look");
        for nothing in [null_mut(), misaligned(), charge] {
            assert_eq!(neap_group_uncharge(nothing), code(Error::Argument));
            assert_eq!((neap_charge_bytes(nothing), neap_charge_group(nothing)), (0, 0));
            assert_eq!(neap_charge_split(nothing, charge, 0), code(Error::Argument));
            assert_eq!(neap_charge_move(nothing, ROOT, null_mut()), code(Error::Argument));
        }
        for nothing in [null_mut(), misaligned()] {
            assert_eq!(neap_group_charge(nothing, ROOT, 1, 0, null_mut()), code(Error::Argument));
            assert_eq!(neap_group_enter(nothing.cast(), ROOT), code(Error::Argument));
            assert_eq!(neap_group_next(ROOT, nothing.cast()), code(Error::Argument));
            assert_eq!(neap_group_used(ROOT, nothing.cast()), code(Error::Argument));
        }
        assert_eq!(neap_group_set(ROOT, 0, 5, misaligned()), code(Error::Argument));
        assert_eq!((info(ROOT).max_bytes, neap_group_path(ROOT, null_mut(), 1)), (UNLIMITED, code(Error::Argument)));
    }
    assert_eq!(neap_group_delete(made), 0);
}

#[test]
fn a_thread_is_in_a_group_until_it_leaves() {
    #[global_allocator]
    static ALLOCATOR: neap::Neap = neap::Neap;
    let _alone = ALONE.lock().unwrap();
    let [outer, inner] = ["c-outer", "c-inner"].map(made);
    let (mut first, mut second) = (zeroed::<Inside>(), zeroed::<Inside>());
    let (first, second) = (first.as_mut_ptr(), second.as_mut_ptr());
    // SAFETY: the objects are local.
    unsafe {
        assert_eq!(neap_group_enter(first, outer), 0);
        let a = black_box(Vec::<u8>::with_capacity(100_000));
        assert_eq!(neap_group_enter(second, inner), 0);
        let b = black_box(Vec::<u8>::with_capacity(1000));
        assert_eq!(neap_group_leave(second), 0);
        assert_eq!(neap_group_leave(second), code(Error::Argument), "it left");
        let c = black_box(Vec::<u8>::with_capacity(100_000));
        assert_eq!(neap_group_leave(first), 0);
        let d = black_box(Vec::<u8>::with_capacity(100_000));
        assert!((200_000..300_000).contains(&used(outer)), "{}", used(outer));
        assert!((1000..2000).contains(&used(inner)), "{}", used(inner));
        assert!(info(outer).pages_bytes >= 200_000 && info(inner).objects_bytes >= 1000);
        drop((a, b, c, d));
    }
    assert_eq!((used(outer), used(inner)), (0, 0));
    assert_eq!((neap_group_delete(outer), neap_group_delete(inner)), (0, 0));
}

#[test]
fn a_group_pays_for_all_copies_of_its_owners_data() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let group = made("c-percpu");
    let (mut owner, mut data) = (0, 0);
    // SAFETY: the places are local, and no code uses freed allocations.
    unsafe {
        assert_eq!(neap_owner_open_in(group, &raw mut owner), 0);
        for size in [100, 4000] {
            assert_eq!(neap_percpu_alloc(&raw mut data, owner, size, 8, -1), 0);
            let price = size.next_multiple_of(8) as u64 * u64::from(neap_cpus());
            assert_eq!((used(group), info(group).percpu_bytes >= price), (price, true));
            assert_eq!((neap_percpu_free(data), used(group)), (0, 0));
        }
        assert_eq!(neap_group_set(group, 0, 64, null_mut()), 0);
        assert_eq!(neap_percpu_alloc(&raw mut data, owner, 4000, 8, -1), code(Error::Charge));
        // An impossible request is not charged.
        for (size, align) in [(40_000, 8), (4000, 3), (0, 8)] {
            assert_eq!(neap_percpu_alloc(&raw mut data, owner, size, align, -1), code(Error::Argument));
        }
        assert_eq!(neap_owner_close(owner, null_mut()), 0);
        assert_eq!(neap_group_delete(group), 0);
        for none in [group].iter().chain(&NONE) {
            assert_eq!(neap_owner_open_in(*none, &raw mut owner), code(Error::Group));
        }
        assert_eq!(neap_owner_open_in(ROOT, null_mut()), code(Error::Argument));
    }
}

/// Events that a listener received.
#[derive(Default)]
struct Notes(Mutex<Vec<(u64, c_int, u64)>>);

extern "C" fn note(argument: *mut c_void, group: u64, event: c_int, times: u64) {
    // SAFETY: the argument is a test's `Notes`, which outlive the listener.
    let notes: &Notes = unsafe { &*argument.cast_const().cast() };
    notes.0.lock().unwrap().push((group, event, times));
}

/// Ticks until `is` returns `true`, whether neap's thread runs or not.
fn ticked(what: &str, is: impl Fn() -> bool) {
    let end = std::time::Instant::now() + core::time::Duration::from_secs(60);
    while !is() {
        assert!(std::time::Instant::now() < end, "no {what} in a minute");
        crate::instance::neap_tick();
        std::thread::yield_now();
    }
}

#[test]
fn listeners_are_told_by_functions_and_eventfds_until_they_end() {
    let group = made("c-heard");
    let below = made("c-heard/below");
    let (notes, mut ear, mut poll) = (Notes::default(), zeroed::<Listens>(), zeroed::<Listens>());
    let argument = (&raw const notes).cast_mut().cast();
    // SAFETY: the objects and places are local, and stay at their addresses.
    unsafe {
        let descriptor = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let count = || {
            let mut count = 0_u64;
            let read = libc::read(descriptor, (&raw mut count).cast(), 8);
            if read == 8 { count } else { 0 }
        };
        assert_eq!(neap_group_subscribe(ear.as_mut_ptr(), group, 1 << 3 | 1 << 5, Some(note), argument), 0);
        assert_eq!(neap_group_subscribe_fd(poll.as_mut_ptr(), below, 1 << 3, descriptor), 0);
        assert_eq!(neap_group_set(below, 0, 4096, null_mut()), 0);
        let mut charge = zeroed::<Charged>();
        assert_eq!(neap_group_charge(charge.as_mut_ptr(), below, 8192, 0, null_mut()), code(Error::Charge));
        let has = |event| notes.0.lock().unwrap().contains(&(group, event, 1));
        ticked("change and refusal", || has(5) && has(3));
        ticked("count", || count() == 1);
        assert_eq!(neap_group_unsubscribe(poll.as_mut_ptr()), 0);
        assert_eq!(neap_group_unsubscribe(poll.as_mut_ptr()), code(Error::Argument));
        assert_eq!((neap_group_delete(below), neap_group_delete(group)), (0, 0));
        ticked("end", || has(-1));
        assert_eq!(notes.0.lock().unwrap().last(), Some(&(group, -1, 1)));
        assert_eq!(neap_group_unsubscribe(ear.as_mut_ptr()), 0);
        // Invalid arguments.
        let place = ear.as_mut_ptr();
        assert_eq!(neap_group_subscribe(place, group, 1, Some(note), argument), code(Error::Group));
        for mask in [0, 1 << neap::groups::Event::ALL.len(), u32::MAX] {
            assert_eq!(neap_group_subscribe(place, ROOT, mask, Some(note), argument), code(Error::Argument));
        }
        assert_eq!(neap_group_subscribe(place, ROOT, 1, None, argument), code(Error::Argument));
        assert_eq!(neap_group_subscribe(null_mut(), ROOT, 1, Some(note), argument), code(Error::Argument));
        let blocks = libc::eventfd(0, libc::EFD_CLOEXEC);
        for none in [-1, 0, blocks] {
            assert_eq!(neap_group_subscribe_fd(place, ROOT, 1, none), code(Error::EventFd), "{none}");
        }
        assert_eq!(neap_group_unsubscribe(place), code(Error::Argument), "a failure leaves none");
        assert_eq!((libc::close(descriptor), libc::close(blocks)), (0, 0));
    }
}

#[test]
fn a_charge_waits_for_room_or_until_its_time_is_over() {
    let group = made("c-waits");
    let (mut first, mut second) = (zeroed::<Charged>(), zeroed::<Charged>());
    let mut refusal = Refusal::default();
    // SAFETY: the objects and places are local.
    unsafe {
        assert_eq!(neap_group_set(group, 0, 1 << 20, null_mut()), 0);
        assert_eq!(neap_group_charge_wait(first.as_mut_ptr(), group, 1 << 20, -1, null_mut()), 0);
        for time in [0, 1_000_000] {
            let answer = neap_group_charge_wait(second.as_mut_ptr(), group, 4096, time, &raw mut refusal);
            assert_eq!((answer, refusal.group, refusal.need_bytes), (code(Error::Charge), group, 4096));
        }
        for absurd in [-2, i64::MIN] {
            let answer = neap_group_charge_wait(second.as_mut_ptr(), group, 4096, absurd, null_mut());
            assert_eq!(answer, code(Error::Argument));
            let mut data = 0;
            assert_eq!(neap_percpu_alloc(&raw mut data, 0, 8, 8, absurd), code(Error::Argument));
            assert_eq!(neap_reclaim(group, 1, absurd, null_mut(), 0), code(Error::Argument));
        }
        let more = neap_group_charge_wait(second.as_mut_ptr(), group, 2 << 20, -1, null_mut());
        assert_eq!(more, code(Error::Charge), "more than the limit does not wait");
        let waiter = std::thread::spawn(move || {
            let mut charge = zeroed::<Charged>();
            let answer = neap_group_charge_wait(charge.as_mut_ptr(), group, 4096, -1, null_mut());
            (answer, neap_charge_bytes(charge.as_ptr()), neap_group_uncharge(charge.as_mut_ptr()))
        });
        std::thread::yield_now();
        assert_eq!(neap_group_uncharge(first.as_mut_ptr()), 0);
        assert_eq!(waiter.join().unwrap(), (0, 4096, 0));
        assert_eq!(neap_group_charge_wait(first.as_mut_ptr(), NONE[0], 1, -1, null_mut()), code(Error::Group));
        assert_eq!((used(group), neap_group_delete(group)), (0, 0));
    }
}

#[test]
fn protection_stocks_and_counts_are_told() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let (mut min, mut low) = (7, 7);
    let mut before = zeroed::<GroupCount>();
    // SAFETY: the objects and places are local.
    unsafe {
        assert_eq!(neap_group_count_get(before.as_mut_ptr()), 0);
        let group = made("c-protected");
        let mut charge = zeroed::<Charged>();
        assert_eq!(neap_group_charge(charge.as_mut_ptr(), group, 1 << 20, 0, null_mut()), 0);
        assert_eq!(neap_group_drain(group), 0);
        assert_eq!(info(group).charged_bytes, 1 << 20, "nothing is in stock");
        assert_eq!((neap_group_set(group, 3, 4096, null_mut()), neap_group_set(group, 2, 8192, null_mut())), (0, 0));
        assert_eq!((neap_group_protection(group, &raw mut min, &raw mut low), min, low), (0, 4096, 8192));
        let mut now = zeroed::<GroupCount>();
        assert_eq!(neap_group_count_get(now.as_mut_ptr()), 0);
        assert!(now.assume_init_ref().live >= 2 && now.assume_init_ref().ids >= now.assume_init_ref().live);
        assert_eq!((neap_group_uncharge(charge.as_mut_ptr()), neap_group_delete(group)), (0, 0));
        for none in [group].iter().chain(&NONE) {
            assert_eq!(neap_group_drain(*none), code(Error::Group));
            assert_eq!(neap_group_protection(*none, &raw mut min, &raw mut low), code(Error::Group));
        }
        assert_eq!((min, low), (4096, 8192), "nothing is written");
        assert_eq!(neap_group_protection(ROOT, null_mut(), &raw mut low), code(Error::Argument));
        assert_eq!(neap_group_protection(ROOT, &raw mut min, null_mut()), code(Error::Argument));
        assert_eq!(neap_group_count_get(null_mut()), code(Error::Argument));
    }
}
