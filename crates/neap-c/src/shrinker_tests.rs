//! Shrinkers as C uses them. The tests register a shrinker by a structure, reach a limit, and end
//! the shrinker. They also pass invalid arguments.

use crate::charge::{Charged, neap_group_charge, neap_group_uncharge};
use crate::error::Error;
use crate::group::{neap_group_create, neap_group_set, neap_group_used};
use crate::shrinker::*;
use core::ffi::{CStr, c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap::reclaim::{Asked, EMPTY, STOP};
use std::sync::Mutex;
use std::thread::{self, ThreadId};

const OBJECT: u64 = 64 << 10;

/// A cache as C would write it: charges in an array.
struct Cache {
    objects: Mutex<Vec<MaybeUninit<Charged>>>,
    gone: AtomicU64,
}

impl Cache {
    const fn new() -> Cache {
        Cache { objects: Mutex::new(Vec::new()), gone: AtomicU64::new(0) }
    }

    fn len(&self) -> usize {
        self.objects.lock().unwrap().len()
    }
}

unsafe extern "C" fn count(data: *mut c_void, asked: *const Asked) -> u64 {
    // SAFETY: the cache is a static, and `asked` lives for the call.
    let (cache, asked) = unsafe { (&*data.cast::<Cache>(), &*asked) };
    assert_eq!((asked.to_scan, asked.node), (0, 0));
    cache.objects.try_lock().map_or(0, |objects| objects.len() as u64)
}

unsafe extern "C" fn scan(data: *mut c_void, asked: *mut Asked) -> u64 {
    // SAFETY: `data` is a static cache, and arguments live for the call.
    let (cache, asked) = unsafe { (&*data.cast::<Cache>(), &mut *asked) };
    let Ok(mut objects) = cache.objects.try_lock() else { return STOP };
    let wanted = (asked.to_scan as usize).min(objects.len());
    for mut object in objects.drain(..wanted) {
        // SAFETY: each object holds a charge, which no other code uses.
        assert_eq!(unsafe { neap_group_uncharge(object.as_mut_ptr()) }, 0);
    }
    wanted as u64
}

unsafe extern "C" fn gone(data: *mut c_void) {
    // SAFETY: `data` is a static cache, and arguments live for the call.
    unsafe { &*data.cast::<Cache>() }.gone.fetch_add(1, Relaxed);
}

fn group(path: &CStr, max: u64) -> u64 {
    let mut group = 0;
    // SAFETY: the path is a C string, and the place is local.
    assert_eq!(unsafe { neap_group_create(path.as_ptr(), &raw mut group) }, 0);
    // SAFETY: the call writes through no pointer.
    assert_eq!(unsafe { neap_group_set(group, 0, max, null_mut()) }, 0);
    group
}

fn said(name: &CStr, cache: &'static Cache, group: u64) -> Said {
    let data = core::ptr::from_ref(cache).cast_mut().cast();
    let (count, scan, gone) = (Some(count as _), Some(scan as _), Some(gone as _));
    Said { name: name.as_ptr(), count, scan, gone, data, group, batch: 4, seeks: 0, flags: 0 }
}

fn register(said: &Said) -> Result<u64, c_int> {
    let mut shrinker = 0;
    // SAFETY: the caches are statics, and the description is local.
    match unsafe { neap_shrinker_register(&raw mut shrinker, said, size_of::<Said>()) } {
        0 => Ok(shrinker),
        error => Err(error),
    }
}

#[test]
fn lists_of_a_cache_share_a_scan() {
    let parts = [900, 99, 1, 0].map(|count| neap_share(100, count, 1000));
    assert_eq!(parts, [90, 9, 1, 0]);
    assert_eq!((neap_share(10, 1, 1_000_000), neap_share(10, 5, 0)), (1, 5));
}

#[test]
fn a_cache_of_cs_shrinks_where_a_charge_would_have_been_refused() {
    static CACHE: Cache = Cache::new();
    let group = group(c"c/shrinks", 32 * OBJECT);
    let shrinker = register(&said(c"c/cache".to_owned().as_c_str(), &CACHE, group));
    assert_eq!(shrinker, Err(Error::Name as c_int));
    let shrinker = register(&said(c"a cache of C's", &CACHE, group)).unwrap();
    for _ in 0..200 {
        let mut charge = MaybeUninit::<Charged>::uninit();
        // SAFETY: the place is local and has room for a charge.
        assert_eq!(unsafe { neap_group_charge(charge.as_mut_ptr(), group, OBJECT, 0, null_mut()) }, 0);
        CACHE.objects.lock().unwrap().push(charge);
    }
    assert!((8..=32).contains(&CACHE.len()), "{} are left", CACHE.len());
    let (before, mut reclaimed) = (CACHE.len() as u64, Reclaimed::default());
    // SAFETY: the place is local and has `size` bytes.
    let some = unsafe { neap_reclaim(group, 8 * OBJECT, -1, &raw mut reclaimed, size_of::<Reclaimed>()) };
    assert_eq!((some, reclaimed.freed, reclaimed.late), (1, before - CACHE.len() as u64, 0));
    assert!(reclaimed.bytes >= 8 * OBJECT);
    let mut used = 0;
    // SAFETY: the place is local.
    assert_eq!(unsafe { neap_group_used(group, &raw mut used) }, 0);
    assert_eq!(used, CACHE.len() as u64 * OBJECT);
    assert_eq!((neap_shrinkers_synchronize(), CACHE.gone.load(Relaxed)), (0, 0));
    assert_eq!((neap_shrinker_unregister(shrinker), CACHE.gone.load(Relaxed)), (0, 1));
    assert_eq!(neap_shrinker_unregister(shrinker), Error::Shrinker as c_int);
    let objects = CACHE.len();
    // SAFETY: the call writes through no pointer.
    assert_eq!(unsafe { neap_reclaim(group, u64::MAX, -1, null_mut(), 0) }, 0);
    assert_eq!(CACHE.len(), objects);
}

#[test]
fn one_that_knows_groups_is_asked_for_those_that_it_marked() {
    // Another test's reclaim of all memory, in that test's thread, calls `count`, too.
    static ASKED: Mutex<Vec<(ThreadId, u64)>> = Mutex::new(Vec::new());
    unsafe extern "C" fn count(_: *mut c_void, asked: *const Asked) -> u64 {
        // SAFETY: `asked` lives for the call.
        let group = unsafe { (*asked).group };
        ASKED.lock().unwrap().push((thread::current().id(), group));
        EMPTY
    }
    unsafe extern "C" fn scan(_: *mut c_void, _: *mut Asked) -> u64 {
        STOP
    }
    let [first, second] = [c"marks/first", c"marks/second"].map(|path| group(path, u64::MAX));
    let (count, scan) = (Some(count as _), Some(scan as _));
    let name = c"marks".as_ptr();
    let said =
        Said { name, count, scan, gone: None, data: null_mut(), group: 0, batch: 0, seeks: NO_SEEKS, flags: BY_GROUP };
    let shrinker = register(&said).unwrap();
    // SAFETY: the call writes through no pointer.
    let reclaim = |group| unsafe { neap_reclaim(group, 1, 1_000_000_000, null_mut(), 0) };
    let asks = || ASKED.lock().unwrap().iter().filter(|(asker, _)| *asker == thread::current().id()).count();
    assert_eq!((reclaim(first), asks()), (0, 0));
    assert_eq!(neap_shrinker_mark(shrinker, second, 0), 0);
    assert_eq!((reclaim(first), asks()), (0, 0));
    assert_eq!(reclaim(second), 0);
    let asked = core::mem::take(&mut *ASKED.lock().unwrap());
    assert!(!asked.is_empty() && asked.iter().all(|&(_, group)| group == second), "{asked:?}");
    assert_eq!((reclaim(second), asks()), (0, 0), "until it is marked again");
    assert_eq!(neap_shrinker_unregister(shrinker), 0);
}

#[test]
fn what_c_gets_wrong_is_refused() {
    static CACHE: Cache = Cache::new();
    let good = said(c"wrong", &CACHE, 0);
    let (argument, group) = (Err(Error::Argument as c_int), Err(Error::Group as c_int));
    for (bad, error) in [
        (Said { name: core::ptr::null(), ..good }, argument),
        (Said { count: None, ..good }, argument),
        (Said { scan: None, ..good }, argument),
        (Said { flags: 8, ..good }, argument),
        (Said { name: c"".as_ptr(), ..good }, Err(Error::Name as c_int)),
        (Said { group: u64::MAX, ..good }, group),
        (Said { group: 77, ..good }, group),
    ] {
        assert_eq!(register(&bad), error, "{bad:?}");
    }
    // A description that ends before `scan` is refused.
    let mut shrinker = 0;
    // SAFETY: the call reads 16 bytes, which exist.
    assert_eq!(unsafe { neap_shrinker_register(&raw mut shrinker, &raw const good, 16) }, Error::Argument as c_int);
    // SAFETY: a null description is refused.
    let nothing = unsafe { neap_shrinker_register(&raw mut shrinker, core::ptr::null(), size_of::<Said>()) };
    assert_eq!((nothing, neap_shrinker_unregister(77)), (Error::Argument as c_int, Error::Shrinker as c_int));
    assert_eq!(neap_shrinker_mark(77, u64::MAX, 0), Error::Group as c_int);
    // SAFETY: the call writes through no pointer.
    assert_eq!(unsafe { neap_reclaim(77, 1, 0, null_mut(), 0) }, Error::Group as c_int);
    assert_eq!(CACHE.gone.load(Relaxed), 0);
}
