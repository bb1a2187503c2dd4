//! Options that change while the process runs: what is refused, and what takes effect at once.
//!
//! Method: managers on virtual machines, and the process's own with a cache whose objects it holds.

mod program;

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use core::time::Duration;
use neap::options::{Options, TABLE};
use neap::process::PROCESS;
use neap::reclaim::Shrinker;
use neap::settings::{NotSet, Setting};
use neap_base::Platform;
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use program::{OPTIONS, Opened};
use std::sync::{Arc, Mutex};
use std::time::Instant;

fn value<P: Platform>(mm: &Opened<P>, setting: Setting) -> String {
    mm.setting(setting).unwrap().to_string()
}

#[test]
fn option_changes_by_its_own_parser_or_says_why_not() {
    let mm = Opened::new(Virtual::new(4096, 1), &OPTIONS).unwrap();
    for (key, text, shown) in [
        ("limit", "64m", "67108864"),
        ("limit", "none", "none"),
        ("interval", "60000", "60000"),
        ("page_list_high", "12", "12"),
        ("page_list_high", "auto", "auto"),
        ("page_batch_scale", "0", "0"),
        ("refuse", "on", "on"),
        ("profile", "off", "off"),
        ("high", "90%", "90%"),
        ("high", "none", "none"),
        ("reserve", "32m", "33554432"),
        ("reserve", "auto", "auto"),
    ] {
        assert_eq!(mm.set(key, text), Ok(()), "{key}");
        let setting = Setting::ALL.into_iter().find(|setting| setting.key() == key).unwrap();
        assert_eq!(value(&mm, setting), shown);
    }
    for (key, text, said) in [
        ("interval", "5", "interval: \"5\" is not a number from 10 to 60000"),
        ("page_batch_scale", "7", "page_batch_scale: \"7\" is not a number from 0 to 6"),
        ("limit", "x", "limit: \"x\" is not a valid limit (none, auto, 1% to 100%, or bytes with k, m, g)"),
        ("high", "auto", "high: \"auto\" is not a valid bound (none, 1% to 100%, or bytes with k, m, g)"),
        ("reserve", "0", "reserve: \"0\" is not a valid reserve (auto, 1% to 100%, or bytes with k, m, g)"),
        ("limti", "1g", "\"limti\" is not an option (did you mean \"limit\"?)"),
        ("profile", "1", "profile: \"1\" is not valid (off, on, or bytes from 1k to 1024g)"),
        ("colour", "red", "\"colour\" is not an option"),
    ] {
        assert_eq!(mm.set(key, text).unwrap_err().to_string(), said);
    }
    let refused = mm.set("profile", "on").unwrap_err().to_string();
    assert!(refused.contains("which this process does not have (stat:off"), "{refused}");
    assert_eq!(value(&mm, Setting::Profile), "off");
    assert_eq!([Setting::Limit, Setting::Interval].map(|setting| value(&mm, setting)), ["none", "60000"]);
    for option in TABLE.iter().filter(|option| option.setting.is_none()) {
        let (key, refused) = (option.key, mm.set(option.key, option.default).unwrap_err());
        assert_eq!(refused, NotSet::Fixed { key, value: option.default });
        let remedy = format!("start the process with NEAP={key}:");
        assert!(refused.to_string().starts_with(key) && refused.to_string().contains(&remedy), "{refused}");
    }
}

#[test]
fn every_setting_has_a_row_in_the_table_of_options() {
    let keys = Setting::ALL.map(Setting::key);
    let rows = TABLE.iter().filter(|option| option.setting.is_some());
    assert!(rows.clone().all(|option| keys.contains(&option.key)) && rows.count() == keys.len(), "{keys:?}");
    for setting in Setting::ALL {
        let number = Options::DEFAULT.number(setting);
        let written = setting.value(number).to_string();
        assert_eq!(Setting::parse(setting.key(), &written), Ok((setting, number)), "a value is parsed as it is shown");
    }
}

/// The cut comes while half of the memory is cached.
#[test]
fn limit_cut_below_use_empties_caches_and_refuses_until_it_fits() {
    const MIB: usize = 1 << 20;
    let mm = Opened::new(Shared::new(Virtual::new(4096, 4)), &OPTIONS).unwrap();
    let allocate = |size| Some(mm.allocate(size)).filter(|block| !block.is_null());
    // SAFETY: every block was allocated here and is freed once.
    let free = |block: *mut u8| unsafe { mm.free(block) };
    let small: Vec<*mut u8> = (0..8 * MIB / 1024).map(|_| allocate(1024).unwrap()).collect();
    let mut large: Vec<*mut u8> = (0..8).map(|_| allocate(MIB).unwrap()).collect();
    small.into_iter().for_each(free);
    assert!(mm.usage().cached_bytes > MIB as u64, "{:?}", mm.usage());
    mm.set("limit", "4m").unwrap();
    let usage = mm.usage();
    assert_eq!((usage.cached_bytes, usage.used_bytes >= 8 * MIB as u64), (0, true), "{usage:?}");
    assert_eq!(allocate(MIB), None, "twice the limit is in use");
    large.drain(3..).for_each(free);
    assert_eq!(allocate(2 * MIB), None, "1 MiB is left, less the tables");
    large.drain(1..).for_each(free);
    large.extend(allocate(2 * MIB));
    assert_eq!(large.len(), 2, "1 of 4 MiB was in use");
    assert_eq!(allocate(4 * MIB), None);
    mm.set("limit", "16m").unwrap();
    large.extend(allocate(4 * MIB));
    assert_eq!((large.len(), allocate(16 * MIB)), (3, None));
    mm.set("limit", "none").unwrap();
    large.extend(allocate(16 * MIB));
    assert_eq!(large.len(), 4);
    large.into_iter().for_each(free);
    mm.release_all();
    mm.verify(0).unwrap();
}

/// No thread allocates after the cut: neap's own threads make the room.
#[test]
fn limit_cut_below_use_shrinks_caches_by_itself() {
    const BLOCK: usize = 1 << 20;
    let blocks: Vec<usize> = (0..64).map(|_| PROCESS.allocate(BLOCK).expose_provenance()).collect();
    assert!(!blocks.contains(&0));
    let blocks = Arc::new(Mutex::new(blocks));
    let (counted, shrunk, is_open) = (blocks.clone(), blocks.clone(), Arc::new(AtomicBool::new(false)));
    let may = is_open.clone();
    let evict = move |wanted: u64| {
        if !may.load(Relaxed) {
            return 0;
        }
        let mut blocks = shrunk.lock().unwrap();
        let left = blocks.len().saturating_sub(wanted as usize);
        let gone = blocks.split_off(left);
        // SAFETY: each block was allocated above, and is freed once.
        gone.iter().for_each(|&block| unsafe { PROCESS.free(core::ptr::with_exposed_provenance_mut(block)) });
        gone.len() as u64
    };
    let count = move || counted.lock().unwrap().len() as u64;
    let shrinker = Shrinker::named("blocks").batch(1).register(count, evict).unwrap();
    let limit = 32 << 20;
    PROCESS.set("limit", "32m").unwrap();
    assert!(PROCESS.allocate(BLOCK).is_null(), "64 MiB are in use");
    // The first passes found nothing, as in a cache that is in use: later ones go on.
    is_open.store(true, Relaxed);
    let end = Instant::now() + Duration::from_secs(60);
    while PROCESS.usage().used_bytes > limit {
        assert!(Instant::now() < end, "{:?}, {} blocks", PROCESS.usage(), blocks.lock().unwrap().len());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(blocks.lock().unwrap().len() > 16, "not much more than is needed");
    drop(shrinker);
    PROCESS.set("limit", "none").unwrap();
    let block = PROCESS.allocate(64 << 20);
    assert!(!block.is_null());
    // SAFETY: allocated above.
    unsafe { PROCESS.free(block) };
    for block in blocks.lock().unwrap().drain(..) {
        // SAFETY: each block was allocated above, and is freed once.
        unsafe { PROCESS.free(core::ptr::with_exposed_provenance_mut(block)) };
    }
}
