//! Reports and statistics as JSON: objects with the names of the fields.

use neap::groups::{Event, Group, Kind, UNLIMITED};
use neap::process::PROCESS;
#[cfg(feature = "std")]
use neap::reclaim::Shrinker;
use serde_json::{Value, json, to_value};

fn fields(value: &Value) -> Vec<&str> {
    let mut names: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_group_report_has_its_fields_and_its_name_as_text() {
    let group = Group::create("json/tenant").unwrap();
    group.set(neap::groups::Bound::Max, 4096).unwrap();
    let charge = group.charge(1000).unwrap();
    group.charge(8192).unwrap_err();
    let info = group.info().unwrap();
    let report = to_value(info).unwrap();
    let expected = [
        "bounds",
        "charged",
        "children",
        "events",
        "id",
        "kinds",
        "local_events",
        "name",
        "parent",
        "peak",
        "stalled_us",
    ];
    assert_eq!(fields(&report), expected);
    assert_eq!((&report["name"], &report["id"]), (&json!("tenant"), &json!(group.id().to_bits())));
    assert_eq!((&report["bounds"][0], &report["bounds"][1]), (&json!(4096), &json!(UNLIMITED)));
    assert_eq!(report["charged"], info.charged);
    assert_eq!(report["kinds"][Kind::ByHand as usize], info.charged);
    assert_eq!(report["local_events"][Event::Refused as usize], 1);
    let root = to_value(Group::ROOT.info().unwrap()).unwrap();
    assert_eq!((&root["parent"], &root["name"]), (&Value::Null, &json!("")));
    assert_eq!(to_value(Event::LimitChanged).unwrap(), Event::LimitChanged.name());
    drop(charge);
    group.delete().unwrap();
}

#[test]
fn statistics_have_their_fields() {
    // Opens the manager, if no other test has.
    let block = PROCESS.allocate(64);
    let used = PROCESS.usage();
    let json = to_value(used).unwrap();
    let names = ["barn_bytes", "cached_bytes", "free_bytes", "mapped_bytes", "owner_vectors", "per_cpu_bytes"];
    assert_eq!(fields(&json)[..6], names);
    assert_eq!(json["mapped_bytes"], used.mapped_bytes);
    let stats = to_value(neap::stats()).unwrap();
    assert!(stats["allocated"].is_u64() && stats["cached"]["page_lists"].is_u64(), "{stats}");
    let classes: Vec<Value> = PROCESS.classes().iter().map(|class| to_value(class).unwrap()).collect();
    assert!(classes.iter().any(|class| class["size"] == 64 && class["in_slots"].is_u64()));
    assert!(to_value(PROCESS.tick(0)).unwrap()["pages"]["released"].is_u64());
    assert!(to_value(neap::groups::count().unwrap()).unwrap()["live"].as_u64() >= Some(1));
    // SAFETY: allocated above.
    unsafe { PROCESS.free(block) };
}

#[cfg(feature = "std")]
#[test]
fn a_shrinker_report_has_its_name_as_text() {
    let _shrinker = Shrinker::named("json").register(|| 0, |_| 0).unwrap();
    let mut reports = Vec::new();
    neap::reclaim::each_shrinker(|report| reports.push(to_value(report).unwrap()));
    let report = reports.iter().find(|report| report["name"] == "json").unwrap();
    assert!(report["calls"].is_u64() && report["by_group"] == false && report["id"].is_u64());
}
