//! The C functions with valid and invalid arguments.
//!
//! Every function works, and returns an error for each invalid argument: null, misaligned, zeroed,
//! destroyed, invented. The tests call the functions as C does. `cargo xtask c-api` runs C programs
//! (`tests/c_api`). `group_tests.rs` has the tests of groups.

use crate::counter::*;
use crate::error::*;
use crate::histogram::*;
use crate::instance::*;
use crate::percpu::*;
use crate::reference::*;
use core::ffi::{CStr, c_int, c_uint, c_void};
use core::mem::MaybeUninit;
use core::ptr::{null, null_mut};
use neap::process::PROCESS;
use neap::settings::Setting;
use std::boxed::Box;

const NEVER: i64 = 0;
const FOREVER: i64 = -1;

pub(crate) fn code(error: Error) -> c_int {
    error as c_int
}

/// Zeroed memory, as `calloc` returns.
pub(crate) fn zeroed<T>() -> Box<MaybeUninit<T>> {
    Box::new(MaybeUninit::zeroed())
}

/// A pointer at which no object can be.
pub(crate) fn misaligned<T>() -> *mut T {
    core::ptr::without_provenance_mut(0x1001)
}

#[test]
fn errors_have_texts_and_numbers_that_are_none_too() {
    let text = |error| {
        // SAFETY: the function returns a static C string.
        unsafe { CStr::from_ptr(neap_error_text(error)) }.to_str().unwrap()
    };
    let texts: std::collections::BTreeSet<&str> = (-19..=0).map(text).collect();
    assert_eq!((texts.len(), Error::ALL.len()), (20, 19));
    assert_eq!((text(1), text(c_int::MIN)), ("no error of neap's", "no error of neap's"));
    // SAFETY: the function returns a static C string.
    assert_eq!(unsafe { CStr::from_ptr(neap_version()) }.to_str(), Ok(env!("CARGO_PKG_VERSION")));
}

#[test]
fn allocations_come_by_owner_and_go_alone_or_with_it() {
    let (mut owner, mut data, mut other) = (0, 0, 0);
    // SAFETY: the places are local, and no code uses freed allocations.
    unsafe {
        assert_eq!(neap_owner_open(&raw mut owner), 0);
        assert_eq!(neap_percpu_alloc(&raw mut data, owner, 100, 64, FOREVER), 0);
        assert_eq!(neap_percpu_alloc(&raw mut other, 0, 1, 1, FOREVER), 0);
        assert!(neap_cpus() > 0 && neap_cpu() < neap_cpus());
        for cpu in 0..neap_cpus() {
            let copy = neap_percpu_ptr(data, cpu).cast::<u8>();
            assert!(
                copy.addr().is_multiple_of(64) && core::slice::from_raw_parts(copy, 100).iter().all(|byte| *byte == 0)
            );
            copy.write_bytes(cpu as u8 + 1, 100);
        }
        let here = neap_percpu_this_cpu(data);
        assert!((0..neap_cpus()).any(|cpu| neap_percpu_ptr(data, cpu) == here));
        extern "C" fn sum(copy: *mut c_void, cpu: c_uint, to: *mut c_void) -> c_int {
            // SAFETY: `to` is the local that the caller passes, and the other pointers are valid
            // for the call.
            unsafe {
                *to.cast::<u64>() += u64::from(*copy.cast::<u8>());
            }
            (cpu == 1000) as c_int
        }
        extern "C" fn end(_: *mut c_void, cpu: c_uint, _: *mut c_void) -> c_int {
            if cpu == 0 { 42 } else { 0 }
        }
        let (mut total, cpus) = (0_u64, u64::from(neap_cpus()));
        assert_eq!(neap_percpu_each(data, Some(sum), (&raw mut total).cast()), 0);
        assert_eq!((total, neap_percpu_each(data, Some(end), null_mut())), (cpus * (cpus + 1) / 2, 42));
        let mut bytes = 1;
        assert_eq!((neap_owner_close(owner, &raw mut bytes), bytes), (0, 104 * cpus as usize));
        assert_eq!((neap_owner_close(owner, &raw mut bytes), bytes), (code(Error::Owner), 104 * cpus as usize));
        assert_eq!((neap_percpu_free(other), neap_percpu_free(0)), (0, 0));
        assert_eq!(neap_percpu_free(other), code(Error::Handle));
    }
}

#[test]
fn what_no_allocation_can_be_is_refused() {
    let mut data = 7;
    // SAFETY: the place is local; refused arguments are not accessed.
    unsafe {
        let mut alloc = |owner, size, align| neap_percpu_alloc(&raw mut data, owner, size, align, FOREVER);
        for (size, align) in [(0, 8), (32769, 8), (usize::MAX, 8), (8, 0), (8, 3), (8, usize::MAX), (8, 1 << 20)] {
            assert_eq!(alloc(0, size, align), code(Error::Argument), "{size} {align}");
        }
        for owner in [1 << 20, u64::MAX, 1 << 32, 5 << 32] {
            assert_eq!(alloc(owner, 8, 8), code(Error::Owner), "{owner:#x}");
            assert_eq!(neap_owner_close(owner, null_mut()), code(Error::Owner));
        }
        assert_eq!(data, 7, "nothing is written");
        assert_eq!(neap_owner_close(0, null_mut()), code(Error::Argument));
        for place in [null_mut(), misaligned()] {
            assert_eq!(neap_owner_open(place), code(Error::Argument));
            assert_eq!(neap_percpu_alloc(place, 0, 8, 8, FOREVER), code(Error::Argument));
        }
        let mut good = 0;
        assert_eq!(neap_percpu_alloc(&raw mut good, 0, 4096, 4096, FOREVER), 0);
        assert!(neap_percpu_ptr(good, 0).is_aligned_to_page() && neap_percpu_ptr(good, neap_cpus()).is_null());
        // Invalid numbers: foreign addresses, nonexistent classes, addresses inside an allocation.
        for handle in
            [1, u64::MAX, 8, good ^ 1 << 63, good + (1 << 47), good & !0 >> 16, (good & !0 >> 16) | 0x3ff << 48]
        {
            assert!(
                neap_percpu_ptr(handle, 0).is_null() || neap_percpu_free(handle) == code(Error::Handle),
                "{handle:#x}"
            );
        }
        for inside in [good + 1, good + 8] {
            assert_eq!(neap_percpu_free(inside), code(Error::Handle));
        }
        assert!(neap_percpu_ptr(0, 0).is_null() && neap_percpu_ptr(good, c_uint::MAX).is_null());
        extern "C" fn each(_: *mut c_void, _: c_uint, _: *mut c_void) -> c_int {
            1
        }
        assert_eq!(neap_percpu_each(good, None, null_mut()), code(Error::Argument));
        assert_eq!(neap_percpu_each(0, Some(each), null_mut()), code(Error::Handle));
        assert_eq!(neap_percpu_free(good), 0);
    }
}

trait Page {
    fn is_aligned_to_page(&self) -> bool;
}

impl Page for *mut c_void {
    fn is_aligned_to_page(&self) -> bool {
        !self.is_null() && self.addr().is_multiple_of(4096)
    }
}

#[test]
fn percpu_alloc_without_wait_uses_reserve_then_fails() {
    let (mut data, mut held) = (0, Vec::new());
    // SAFETY: the place is local, and no code uses freed allocations.
    unsafe {
        assert_eq!(neap_percpu_alloc(&raw mut data, 0, 8, 8, FOREVER), 0);
        let refused = loop {
            let mut more = 0;
            match neap_percpu_alloc(&raw mut more, 0, 4096, 8, NEVER) {
                0 => held.push(more),
                error => break error,
            }
            assert!(held.len() < 100_000);
        };
        assert_eq!(refused, code(Error::Wait));
        let mut waited = 0;
        assert_eq!(neap_percpu_alloc(&raw mut waited, 0, 4096, 8, 1_000_000_000), 0);
        held.extend([data, waited]);
        held.into_iter().for_each(|data| assert_eq!(neap_percpu_free(data), 0));
        neap_tick();
        neap_release();
        let mut usage = Usage::default();
        assert_eq!(neap_usage_get(&raw mut usage), 0);
        assert!(usage.reserve_bytes > 0 && usage.populated_bytes >= usage.empty_bytes, "{usage:?}");
        assert_eq!(neap_usage_get(null_mut()), code(Error::Argument));
    }
}

#[test]
fn memory_is_counted_by_state() {
    let get = || {
        let mut now = Stats::default();
        // SAFETY: the place is local, and of that size.
        assert_eq!(unsafe { neap_stats_get(&raw mut now, size_of::<Stats>()) }, 0);
        now
    };
    let run = PROCESS.allocate(200 << 20);
    let held = get();
    // Other tests of this program hold less memory. They change their caches during the reading.
    assert!((199 << 20..300 << 20).contains(&held.allocated_bytes), "{held:?}");
    assert!(held.active_bytes >= 200 << 20 && held.resident_bytes > held.active_bytes, "{held:?}");
    assert!(held.metadata_bytes > 0 && held.mapped_bytes >= held.active_bytes, "{held:?}");
    assert!(held.page_bytes == 4096 && held.nodes > 0 && held.has_thread <= 1, "{held:?}");
    assert_eq!(held.limit_bytes, u64::MAX);
    // SAFETY: allocated above.
    unsafe { PROCESS.free(run) };
    neap_release();
    assert!(get().retained_bytes >= held.retained_bytes + (150 << 20), "{held:?}");
    // SAFETY: nothing is written to null or a misaligned place, or beyond the size.
    unsafe {
        let mut first = [0_u64, 99];
        let place = first.as_mut_ptr().cast();
        let refused = [(null_mut(), 8), (misaligned(), 8), (place, 0)].map(|(place, size)| neap_stats_get(place, size));
        assert_eq!(refused, [code(Error::Argument); 3]);
        assert_eq!((neap_stats_get(place, 8), first[1]), (0, 99), "as far as the caller's size reaches");
    }
    let mut later = [99_u64; 30];
    // SAFETY: the place is local, and of that size.
    assert_eq!(unsafe { neap_stats_get(later.as_mut_ptr().cast(), size_of_val(&later)) }, 0);
    assert!(later[14] == 4096 && later[17..] == [0; 13], "{later:?}");
}

#[test]
fn heap_profile_without_samples_is_refused() {
    // SAFETY: null, and a string.
    let refused = unsafe { [null(), c"/no/such/file".as_ptr()].map(|file| neap_profile_dump(file)) };
    assert_eq!(refused, [code(Error::Profile); 2]);
}

#[test]
fn options_change_or_are_refused() {
    let set = |key: &CStr, value: &CStr| {
        // SAFETY: both are strings.
        unsafe { neap_set(key.as_ptr(), value.as_ptr()) }
    };
    assert_eq!([set(c"interval", c"400"), set(c"page_list_high", c"100"), set(c"page_list_high", c"auto")], [0; 3]);
    assert_eq!(PROCESS.setting(Setting::Interval).unwrap().to_string(), "400");
    for (key, value) in [(c"interval", c"4"), (c"colour", c"red"), (c"", c""), (c"limit", c"\xff")] {
        assert_eq!(set(key, value), code(Error::Argument));
    }
    assert_eq!(set(c"rseq", c"off"), code(Error::Fixed));
    // SAFETY: null is refused.
    unsafe {
        assert_eq!([neap_set(null(), c"1".as_ptr()), neap_set(c"limit".as_ptr(), null())], [code(Error::Argument); 2])
    };
    assert_eq!(set(c"interval", c"250"), 0);
}

#[test]
fn caches_of_a_scope_are_drained() {
    let drain = |cpu, node| {
        let mut drained = Drained { skipped: 99, ..Drained::default() };
        // SAFETY: the place is local, and of that size.
        let answer = unsafe { neap_drain(cpu, node, u64::MAX, &raw mut drained, size_of::<Drained>()) };
        (answer, drained)
    };
    let fill = || {
        let blocks: Vec<*mut u8> = (0..2000).map(|_| PROCESS.allocate(500)).collect();
        // SAFETY: allocated above, and not used any more.
        blocks.into_iter().for_each(|block| unsafe { PROCESS.free(block) });
    };
    fill();
    let (answer, all) = drain(ALL, ALL);
    assert!(answer == 0 && all.objects > 1000 && all.cpus > 0 && all.free_bytes > 0, "{all:?}");
    fill();
    let (answer, one) = drain(0, ALL);
    assert_eq!((answer, one.cpus), (0, 1));
    let (answer, node) = drain(ALL, 0);
    assert_eq!((answer, node.cpus <= all.cpus), (0, true));
    for (cpu, node) in [(1 << 20, ALL), (ALL, 1 << 20)] {
        assert_eq!(drain(cpu, node), (code(Error::Argument), Drained { skipped: 99, ..Drained::default() }));
    }
    // SAFETY: nothing is written to null or a misaligned place.
    unsafe { assert_eq!([neap_drain(ALL, ALL, 0, null_mut(), 8), neap_drain(ALL, ALL, 0, misaligned(), 8)], [0; 2]) };
    let mut first = [0_u64, 99];
    // SAFETY: the place is local, and has eight bytes.
    assert_eq!(unsafe { neap_drain(ALL, ALL, u64::MAX, first.as_mut_ptr().cast(), 8) }, 0);
    assert_eq!(first[1], 99, "as far as the caller's size reaches");
}

#[test]
fn counters_count_and_are_nothing_before_and_after() {
    let mut place = zeroed::<Counter>();
    let counter = place.as_mut_ptr();
    // SAFETY: the object is local.
    unsafe {
        for nothing in [null_mut(), misaligned(), counter] {
            neap_counter_add(nothing, 1);
            assert_eq!((neap_counter_exact(nothing), neap_counter_approximate(nothing)), (0, 0));
            assert_eq!(neap_counter_destroy(nothing), code(Error::Argument));
        }
        assert_eq!(neap_counter_init(null_mut(), 0, 1, FOREVER), code(Error::Argument));
        assert_eq!(neap_counter_init(misaligned(), 0, 1, FOREVER), code(Error::Argument));
        assert_eq!(neap_counter_init(counter, 1 << 40, 1, FOREVER), code(Error::Owner));
        for batch in [i64::MIN, -1, 0, 1, 1000, i64::MAX] {
            assert_eq!(neap_counter_init(counter, 0, batch, FOREVER), 0);
            [5, -7, i64::MAX, i64::MIN, 3, 1].iter().for_each(|value| neap_counter_add(counter, *value));
            assert_eq!(neap_counter_exact(counter), 1, "batch {batch}");
            // An object of one kind is refused as another.
            assert_eq!(neap_ref_kill(counter.cast()), code(Error::Argument));
            assert_eq!(
                (neap_histogram_destroy(counter.cast()), neap_counter_destroy(counter)),
                (code(Error::Argument), 0)
            );
            assert_eq!((neap_counter_exact(counter), neap_counter_destroy(counter)), (0, code(Error::Argument)));
        }
    }
}

#[test]
fn histograms_tell_what_was_recorded() {
    let mut place = zeroed::<Histogram>();
    let (histogram, mut value) = (place.as_mut_ptr(), 99);
    extern "C" fn each(lowest: u64, count: u64, to: *mut c_void) -> c_int {
        // SAFETY: `to` is the local that the caller passes, and the other pointers are valid for
        // the call.
        unsafe {
            *to.cast::<u64>() += count;
        }
        if lowest >= 500 { 17 } else { 0 }
    }
    // SAFETY: the object is local.
    unsafe {
        for nothing in [null_mut(), misaligned(), histogram] {
            neap_histogram_record(nothing, 1);
            assert_eq!(neap_histogram_count(nothing), 0);
            assert!(!neap_histogram_quantile(nothing, 500_000, &raw mut value));
            assert_eq!(neap_histogram_each(nothing, Some(each), null_mut()), code(Error::Argument));
            assert_eq!(neap_histogram_destroy(nothing), code(Error::Argument));
        }
        assert_eq!(neap_histogram_init(histogram, 0, FOREVER), 0);
        assert!(!neap_histogram_quantile(histogram, 500_000, &raw mut value) && value == 99);
        (0..1000).for_each(|value| neap_histogram_record(histogram, value));
        neap_histogram_record(histogram, u64::MAX);
        assert_eq!(neap_histogram_count(histogram), 1001);
        assert!(neap_histogram_quantile(histogram, 500_000, &raw mut value) && (437..=500).contains(&value), "{value}");
        assert!(neap_histogram_quantile(histogram, u32::MAX, &raw mut value) && value > u64::MAX / 2);
        assert!(!neap_histogram_quantile(histogram, 500_000, null_mut()));
        let mut counted = 0_u64;
        assert_eq!(neap_histogram_each(histogram, Some(each), (&raw mut counted).cast()), 17);
        assert!((500..700).contains(&counted), "it ends where it is told to: {counted}");
        assert_eq!(neap_histogram_each(histogram, None, null_mut()), code(Error::Argument));
        assert_eq!(neap_histogram_destroy(histogram), 0);
    }
}

/// Release callback: destroys and frees the reference, and counts.
extern "C" fn frees(object: *mut Ref, count: *mut c_void) {
    // SAFETY: the reference was made by `boxed`, this is its only release, and `count` is the
    // test's.
    unsafe {
        assert!(neap_ref_is_dead(object) && neap_ref_count(object) == 0);
        *count.cast::<usize>() += 1;
        assert_eq!(neap_ref_destroy(object), 0);
        drop(Box::from_raw(object.cast::<MaybeUninit<Ref>>()));
    }
}

fn boxed(count: *mut usize) -> *mut Ref {
    let object = Box::into_raw(zeroed::<Ref>()).cast();
    // SAFETY: the memory was just allocated, and is zeroed.
    assert_eq!(unsafe { neap_ref_init(object, 0, Some(frees), count.cast(), FOREVER) }, 0);
    object
}

/// Release callback of a parent: kills another reference, whose last reference the caller puts.
extern "C" fn kills(_: *mut Ref, other: *mut c_void) {
    let other = other.cast();
    // SAFETY: the other reference lives as long as the test.
    unsafe { assert_eq!((neap_ref_kill(other), neap_ref_count(other)), (0, 1)) };
}

#[test]
fn a_callback_may_kill_what_is_killed_with_its_own() {
    let (mut parent, mut child) = (zeroed::<Ref>(), zeroed::<Ref>());
    // SAFETY: the objects are local.
    unsafe {
        let both = [parent.as_mut_ptr(), child.as_mut_ptr()];
        assert_eq!(neap_ref_init(both[0], 0, Some(kills), both[1].cast(), FOREVER), 0);
        assert_eq!(neap_ref_init(both[1], 0, None, null_mut(), FOREVER), 0);
        assert_eq!((neap_ref_kill_all(both.as_ptr(), 2), neap_ref_count(both[1])), (2, 0));
        assert_eq!(both.map(|object| neap_ref_destroy(object)), [0, 0]);
    }
}

#[test]
fn references_are_told_of_once_and_may_be_gone_then() {
    let mut released = 0;
    let count = &raw mut released;
    let mut place = zeroed::<Ref>();
    // SAFETY: the objects are local, or freed by their callback only.
    unsafe {
        for nothing in [null_mut(), misaligned(), place.as_mut_ptr()] {
            neap_ref_get(nothing);
            assert!(!neap_ref_try_get(nothing) && !neap_ref_put(nothing) && !neap_ref_is_dead(nothing));
            assert_eq!((neap_ref_count(nothing), neap_ref_kill(nothing)), (-1, code(Error::Argument)));
            assert_eq!(neap_ref_destroy(nothing), code(Error::Argument));
            assert_eq!(neap_ref_init(null_mut(), 0, None, null_mut(), FOREVER), code(Error::Argument));
        }
        // Killed with further references, and without.
        let object = boxed(count);
        neap_ref_get(object);
        assert!(neap_ref_try_get(object) && neap_ref_count(object) == -1 && !neap_ref_put(object));
        assert_eq!((neap_ref_kill(object), neap_ref_kill(object)), (1, 0));
        assert!(!neap_ref_try_get(object) && neap_ref_count(object) == 1 && *count == 0);
        assert!(neap_ref_put(object) && *count == 1);
        assert_eq!((neap_ref_kill(boxed(count)), *count), (1, 2));
        // Many at once: invalid ones are skipped, and one with further references dies later.
        let mut all: Vec<*mut Ref> = (0..50).map(|_| boxed(count)).collect();
        neap_ref_get(all[20]);
        all.splice(10..10, [null_mut(), place.as_mut_ptr()]);
        assert_eq!((neap_ref_kill_all(all.as_ptr(), all.len()), *count), (50, 51));
        assert!(neap_ref_put(all[22]) && *count == 52);
        assert_eq!((neap_ref_kill_all(null(), 0), neap_ref_kill_all(null(), 3)), (0, code(Error::Argument)));
        // Without a callback: killed or not.
        for kills in [true, false] {
            let object = place.as_mut_ptr();
            assert_eq!(neap_ref_init(object, 0, None, null_mut(), FOREVER), 0);
            assert!(!kills || neap_ref_kill(object) == 1);
            assert_eq!(neap_ref_destroy(object), 0);
        }
    }
}
