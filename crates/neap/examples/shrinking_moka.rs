//! A moka cache that shrinks at its group's limit, and again when the limit is lowered.
//!
//! Run by `cargo run --release -p neap --example shrinking_moka`. moka evicts by
//! itself only beyond its capacity, which is set practically infinite: the group's limit decides.
//! When asked to shrink, it evicts the objects that its iterator returns first, which says nothing
//! about their use.

use core::error::Error;
use core::time::Duration;
use moka::sync::Cache;
use neap::groups::{Bound, Bytes, Charge, Event, Group};
use neap::reclaim::{self, Shrinker};
use std::sync::Arc;
use std::time::Instant;

const VALUE: usize = 64 << 10;
const LIMIT: u64 = 8 << 20;

/// A value with its charge, which ends when the value is out of the cache and no thread reads it.
struct Page {
    _bytes: Vec<u8>,
    _charge: Charge,
}

type Pages = Cache<u64, Arc<Page>>;

/// Evicts up to `wanted` objects, and returns their number.
fn evict(pages: &Pages, wanted: u64) -> u64 {
    let keys: Vec<u64> = pages.iter().take(wanted as usize).map(|(key, _)| *key).collect();
    let evicted = keys.iter().filter(|key| pages.remove(*key).is_some()).count();
    // moka keeps removed objects, and counts them, until this call.
    pages.run_pending_tasks();
    evicted as u64
}

fn insert(pages: &Pages, group: Group, key: u64) -> Result<(), Box<dyn Error>> {
    // This may shrink the cache. No lock of it is held here, as one would be in a function that it
    // calls for a missing value.
    let charge = group.charge(VALUE as u64)?;
    pages.insert(key, Arc::new(Page { _bytes: vec![0; VALUE], _charge: charge }));
    Ok(())
}

/// Waits until moka has dropped the values that it does not have any more, which it does some time
/// after their removal. Returns what is charged then: the cached values.
fn settled(pages: &Pages, group: Group) -> Result<u64, Box<dyn Error>> {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        pages.run_pending_tasks();
        let used = group.used()?;
        if used == (pages.iter().count() * VALUE) as u64 {
            return Ok(used);
        }
        assert!(Instant::now() < end, "{} stay charged for no value", Bytes(used));
        std::thread::yield_now();
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let group = Group::create("moka")?;
    group.set(Bound::Max, LIMIT)?;
    let pages = Pages::new(1 << 16);
    let (counted, shrunk) = (pages.clone(), pages.clone());
    let count = move || {
        counted.run_pending_tasks();
        counted.entry_count()
    };
    let shrinker =
        Shrinker::named("moka").group(group).batch(8).register(count, move |wanted| evict(&shrunk, wanted))?;

    (0..3000).try_for_each(|key| insert(&pages, group, key))?;
    let (info, values) = (group.info()?, pages.iter().count());
    println!("{values} of 3000 values, {} of {} charged", Bytes(info.charged), Bytes(LIMIT));
    assert!(info.peak <= LIMIT && info.events[Event::Refused as usize] == 0, "the cache has made room for each value");
    assert!(values >= 32, "and no more than that");

    group.set(Bound::Max, LIMIT / 4)?;
    insert(&pages, group, 3000)?;
    println!("with a limit of {}: {} charged", Bytes(LIMIT / 4), Bytes(group.used()?));
    assert!(group.used()? <= LIMIT / 4, "it has given what is too much");

    // moka drops removed values late, so more of them may have gone than the limit asked for.
    (3001..3013).try_for_each(|key| insert(&pages, group, key))?;
    let before = settled(&pages, group)?;
    let got = reclaim::reclaim(group, 1 << 20, Duration::from_secs(10));
    let after = settled(&pages, group)?;
    println!("asked for 1 MiB: {} values, {}", got.freed, Bytes(got.bytes));
    assert!(after + (1 << 20) <= before && got.bytes >= 1 << 20);
    drop(shrinker);
    Ok(())
}

#[test]
fn it_is_as_it_says() {
    main().unwrap();
}
