//! A plain `HashMap` as a cache that shrinks, in two groups with a limit: no charge is refused, and
//! one tenant's growth costs the other nothing.
//!
//! Run by `cargo run --release -p neap --example shrinking_map`. It evicts the
//! entries that the map has first; a real cache keeps recently used ones.

use core::error::Error;
use core::time::Duration;
use neap::groups::{Bound, Bytes, Charge, Event, Group};
use neap::reclaim::{self, Shrinker};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

const VALUE: usize = 64 << 10;
const LIMIT: u64 = 8 << 20;

/// A value with its charge, which ends with it.
struct Entry {
    _value: Vec<u8>,
    _charge: Charge,
}

struct Cache {
    group: Group,
    map: Arc<Mutex<HashMap<u64, Entry>>>,
    _shrinker: Shrinker,
}

impl Cache {
    fn new(path: &str) -> Result<Cache, Box<dyn Error>> {
        let group = Group::create(path)?;
        group.set(Bound::Max, LIMIT)?;
        let map = Arc::new(Mutex::new(HashMap::new()));
        let (counted, shrunk) = (map.clone(), map.clone());
        let count = move || counted.try_lock().map_or(0, |map| HashMap::<u64, Entry>::len(&map) as u64);
        let evict = move |wanted: u64| {
            // The thread that holds the lock may be waiting for this call, so nothing can be
            // evicted now.
            let Ok(mut map) = shrunk.try_lock() else { return 0 };
            let keys: Vec<u64> = map.keys().copied().take(wanted as usize).collect();
            keys.iter().filter(|key| map.remove(key).is_some()).count() as u64
        };
        let shrinker = Shrinker::named("map").group(group).batch(8).register(count, evict)?;
        Ok(Cache { group, map, _shrinker: shrinker })
    }

    fn insert(&self, key: u64) -> Result<(), Box<dyn Error>> {
        // Before the lock is taken: this may shrink the map.
        let charge = self.group.charge(VALUE as u64)?;
        let entry = Entry { _value: vec![0; VALUE], _charge: charge };
        self.map.lock().map_err(|_| "a callback panicked")?.insert(key, entry);
        Ok(())
    }

    fn len(&self) -> usize {
        self.map.lock().map_or(0, |map| map.len())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (greedy, modest) = (Cache::new("tenants/greedy")?, Cache::new("tenants/modest")?);
    (0..64).try_for_each(|key| modest.insert(key))?;
    (0..3000).try_for_each(|key| greedy.insert(key))?;
    for cache in [&greedy, &modest] {
        let info = cache.group.info()?;
        println!("{}: {} values, {} of {} charged", cache.group, cache.len(), Bytes(info.charged), Bytes(LIMIT));
        assert!(info.peak <= LIMIT && info.events[Event::Refused as usize] == 0, "room was made for each value");
    }
    assert!(greedy.len() >= 32 && modest.len() == 64, "the tenant that grows pays for it");
    reclaim::dry_run(Group::find("tenants")?, 4 << 20, |payment| {
        println!("of 4 MiB, {} would pay {}", Group::from_id(payment.group), Bytes(payment.bytes));
    });
    let got = reclaim::reclaim(greedy.group, 1 << 20, Duration::from_secs(10));
    println!("asked for 1 MiB, {} gave {} values, {}", greedy.group, got.freed, Bytes(got.bytes));
    assert!(got.bytes >= 1 << 20 && greedy.group.used()? == (greedy.len() * VALUE) as u64);
    Ok(())
}

#[test]
fn it_is_as_it_says() {
    main().unwrap();
}
