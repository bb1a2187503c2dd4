//! `neap stat --shrinkers` and `neap shrink` on a process with caches: this one.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use neap::groups::{Bound, Charge, Group};
use neap::reclaim::Shrinker;
use running::{Program, neap, object, until};
use serde_json::Value;
use std::sync::{Arc, Mutex};

const OBJECT: u64 = 64 << 10;

fn look() -> Value {
    object("stat", std::process::id(), &["--shrinkers"]).unwrap()["reclaim"].take()
}

fn shrinker<'v>(seen: &'v Value, name: &str) -> &'v Value {
    let all = seen["shrinkers"].as_array().unwrap_or_else(|| panic!("{seen}"));
    all.iter().find(|shrinker| shrinker["name"] == name).unwrap_or_else(|| panic!("no {name} in {seen}"))
}

#[test]
fn shrinkers_report_names_misbehaving_cache_and_shrink_works() {
    let group = Group::create("tenant/acme").unwrap();
    group.set(Bound::Max, 128 * OBJECT).unwrap();
    let objects: Arc<Mutex<Vec<Charge>>> = Arc::default();
    let (counted, shrunk) = (objects.clone(), objects.clone());
    let evict = move |wanted: u64| {
        let mut objects = shrunk.lock().unwrap();
        let left = objects.len().saturating_sub(wanted as usize);
        (objects.drain(left..).count()) as u64
    };
    let count = move || counted.lock().unwrap().len() as u64;
    let cache = Shrinker::named("pages").group(group).batch(4).register(count, evict).unwrap();
    let bad = Shrinker::named("bad one").group(group).batch(1).register(|| 1000, |_| u64::MAX / 2).unwrap();
    for _ in 0..1000 {
        let charge = group.charge(OBJECT).unwrap();
        objects.lock().unwrap().push(charge);
    }
    let pid = std::process::id();
    let seen = until("a report", || (look()["shrinkers"].as_array()?.len() >= 2).then(look));
    let pages = shrinker(&seen, "pages");
    assert!(pages["freed"].as_u64() >= Some(800) && pages["calls"].as_u64() >= Some(200), "{pages}");
    let place = &pages["places"][0];
    assert_eq!(
        (place["path"].as_str(), place["objects"].as_u64()),
        (Some("tenant/acme"), Some(objects.lock().unwrap().len() as u64))
    );
    let blamed = shrinker(&seen, "bad one");
    assert!(blamed["blamed"]["lied"].as_u64() >= Some(1), "{blamed}");
    assert!(seen["direct"]["bytes"].as_u64() >= Some(800 * OBJECT) && seen["reclaimers"].as_u64() >= Some(1), "{seen}");
    // By name, of a group.
    let before = objects.lock().unwrap().len();
    let shrunk = neap("shrink", pid, &["pages", "20", "--group", "tenant/acme"]);
    let text = String::from_utf8_lossy(&shrunk.stdout);
    assert!(shrunk.status.success() && text.contains("tenant/acme, node 0: 20 objects freed"), "{text}");
    assert_eq!(objects.lock().unwrap().len(), before - 20);
    for (more, complaint) in [
        (&["unknown", "1"][..], "has no shrinker \"unknown\""),
        (&["pages", "1", "--group", "other"], "with objects of group \"other\""),
        (&["pages", "1", "--node", "31"], "has no shrinker \"pages\""),
    ] {
        let refused = neap("shrink", pid, more);
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && text.contains(complaint), "{text}");
    }
    let report = neap("stat", pid, &["--shrinkers"]);
    let text = String::from_utf8_lossy(&report.stdout);
    assert!(report.status.success() && text.lines().any(|line| line.starts_with("| bad one")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("| tenant/acme") && line.contains("pages")), "{text}");
    drop((cache, bad));
    let gone = look();
    assert_eq!(shrinker(&gone, "bad one")["gone"].as_bool(), Some(true), "it is still named");
}

/// A program that knows nothing of neap has neap's own caches from the first request on.
#[test]
fn neaps_own_caches_are_seen_and_asked_in_any_program() {
    let mut program = Program::start("burst", "interval:60000", &[]);
    program.hear("ready");
    program.go_on();
    program.hear("freed");
    let pid = program.id();
    let seen = object("stat", pid, &["--shrinkers"]).unwrap()["reclaim"].take();
    let objects = |seen: &Value| shrinker(seen, "neap:sheaves")["places"][0]["objects"].as_u64().unwrap();
    assert!(objects(&seen) > 1000, "{seen}");
    assert_eq!((seen["reclaimers"].as_u64(), seen["shrinkers"].as_array().map(Vec::len)), (Some(0), Some(5)), "{seen}");
    let shrunk = neap("shrink", pid, &["neap:sheaves", "1000", "--node", "0"]);
    let text = String::from_utf8_lossy(&shrunk.stdout);
    assert!(
        shrunk.status.success() && text.starts_with("(all), node 0: ") && text.ends_with(" objects freed\n"),
        "{text}"
    );
    let freed: u64 = text.split(' ').nth(3).unwrap().parse().unwrap();
    let now = object("stat", pid, &["--shrinkers"]).unwrap()["reclaim"].take();
    assert!(freed >= 1000 && objects(&now) + freed / 2 < objects(&seen), "{text} {now}");
}

#[test]
fn a_sleeping_process_without_a_thread_has_no_shrinkers() {
    let mut program = Program::start("burst", "background:off", &[]);
    program.hear("ready");
    let report = neap("stat", program.id(), &["--shrinkers"]);
    let text = String::from_utf8_lossy(&report.stdout);
    assert!(report.status.success() && text.ends_with(" has no shrinkers.\n"), "{text}");
}

/// Without threads of neap's, any call of the program scans neap's own caches. The program's caches
/// are refused, with a reason.
#[test]
fn shrink_without_background_thread_serves_only_neap_caches() {
    let mut program = Program::start_alone("cache", "background:off");
    program.hear("ready");
    let pid = program.id();
    let own = neap("shrink", pid, &["neap:sheaves", "1"]);
    let text = String::from_utf8_lossy(&own.stdout);
    assert!(own.status.success() && text.ends_with(" objects freed\n"), "{text} {own:?}");
    let others = neap("shrink", pid, &["pages", "1"]);
    let text = String::from_utf8_lossy(&others.stdout);
    assert!(
        !others.status.success() && text.contains("the process has none (NEAP=background:off?)"),
        "{text} {others:?}"
    );
}
