//! A quick_cache cache that shrinks at its group's limit, in its own order: frequently used objects
//! stay.
//!
//! Run by `cargo run --release -p neap --example shrinking_quick_cache`. A lower
//! capacity makes the cache evict the objects that it values least. Its own capacity is set
//! practically infinite: the group's limit decides, and can change at any time.

use core::error::Error;
use core::time::Duration;
use neap::groups::{Bound, Bytes, Charge, Event, Group};
use neap::reclaim::{self, Shrinker};
use quick_cache::sync::Cache;
use std::sync::Arc;

const VALUE: usize = 64 << 10;
const LIMIT: u64 = 8 << 20;
const CAPACITY: u64 = 1 << 16;
/// Number of keys that are used all the time.
const HOT: u64 = 16;

/// A value with its charge, which ends when the value is evicted and no thread reads it.
struct Page {
    _bytes: Vec<u8>,
    _charge: Charge,
}

type Pages = Cache<u64, Arc<Page>>;

/// Makes the cache evict `wanted` objects, and returns how many it did.
fn evict(pages: &Pages, wanted: u64) -> u64 {
    let before = pages.len();
    // The shards share the reduction, so at least one for each.
    pages.set_capacity(pages.weight().saturating_sub(wanted.max(pages.num_shards() as u64)).max(1));
    pages.set_capacity(CAPACITY);
    before.saturating_sub(pages.len()) as u64
}

fn insert(pages: &Pages, group: Group, key: u64) -> Result<(), Box<dyn Error>> {
    // This may shrink the cache. No lock of a shard is held here, as it would be in a function that
    // the cache calls for a missing value.
    let charge = group.charge(VALUE as u64)?;
    pages.insert(key, Arc::new(Page { _bytes: vec![0; VALUE], _charge: charge }));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let group = Group::create("quick_cache")?;
    group.set(Bound::Max, LIMIT)?;
    let pages = Arc::new(Pages::new(CAPACITY as usize));
    let (counted, shrunk) = (pages.clone(), pages.clone());
    let shrinker = Shrinker::named("quick_cache")
        .group(group)
        .batch(pages.num_shards() as u64)
        .register(move || counted.len() as u64, move |wanted| evict(&shrunk, wanted))?;

    for key in 0..3000 {
        insert(&pages, group, key)?;
        (0..HOT).for_each(|hot| drop(pages.get(&hot)));
    }
    let (info, hot) = (group.info()?, (0..HOT).filter(|hot| pages.contains_key(hot)).count());
    println!("{} of 3000 values, {} of {} charged", pages.len(), Bytes(info.charged), Bytes(LIMIT));
    println!("{hot} of {HOT} that are used all the time are there");
    assert!(info.peak <= LIMIT && info.events[Event::Refused as usize] == 0, "the cache has made room for each value");
    assert!(pages.len() >= 32 && hot > HOT as usize / 2, "and no more than that");

    let before = group.used()?;
    let got = reclaim::reclaim(group, 1 << 20, Duration::from_secs(10));
    let after = group.used()?;
    println!("asked for 1 MiB: {} values, {}", got.freed, Bytes(got.bytes));
    assert!(after + (1 << 20) <= before && got.bytes >= 1 << 20);
    assert_eq!(after, (pages.len() * VALUE) as u64, "what is charged is what is cached");
    drop(shrinker);
    Ok(())
}

#[test]
fn it_is_as_it_says() {
    main().unwrap();
}
