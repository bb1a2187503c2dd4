//! Evicted values that are needed again: what stamps tell, what walks do with protected values, and
//! the hit rates of caches with and without stamps, and of caches of other designs.
//!
//! `cargo test -p neap --test refaults -- --nocapture` prints the hit rates.

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use neap::groups::{Bound, Group};
use neap::lru::{Handle, LruList, LruStatus, Stamp, Turnover};
use neap::process::PROCESS;
use std::collections::HashMap;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

const NODE: usize = 0;

/// Evicts up to `most` values of a group, and returns them with their stamps.
fn evict(list: &LruList<u32>, group: Group, most: usize) -> Vec<(u32, Stamp)> {
    let mut evicted = Vec::new();
    list.walk(group, NODE, most, |_| LruStatus::Removed, |value| evicted.push((*value, value.stamp().unwrap())));
    evicted
}

fn keys(evicted: &[(u32, Stamp)]) -> Vec<u32> {
    evicted.iter().map(|&(key, _)| key).collect()
}

#[test]
fn stamp_within_list_size_protects_its_value() {
    let [group, other] = ["refaults/a", "refaults/b"].map(|path| Group::create(path).unwrap());
    let list = LruList::new().unwrap();
    let add = |keys: core::ops::Range<u32>| keys.for_each(|key| _ = list.add_on(group, NODE, key).unwrap());
    add(0..20);
    list.add_on(other, NODE, 0).unwrap();
    let evicted = evict(&list, group, 10);
    assert_eq!(keys(&evicted), Vec::from_iter(0..10));
    let readmit = |group, at: usize| {
        let handle = list.readmit(group, NODE, 0, evicted[at].0, evicted[at].1).unwrap();
        (list.is_protected(&handle), handle)
    };
    // 10 values are left, and value 0 has seen 9 evictions since its own.
    let (is_protected, kept) = readmit(group, 0);
    assert!(is_protected && kept.stamp().is_none());
    assert!(!readmit(other, 1).0, "a stamp of another group");
    assert_eq!(list.turnover(group), Turnover { evicted: 10, refaults: 1 });
    assert_eq!((list.turnover(other), list.count(group)), (Turnover::default(), 11));

    // Value 2 sees 12 evictions, and then there are 6 values. Value 9 sees 5.
    evict(&list, group, 5);
    assert!(!readmit(group, 2).0, "too old a stamp");
    assert!(readmit(group, 9).0);

    // A charged value goes with its charge, and a protected value can do what another can.
    group.set(Bound::Max, 4096).unwrap();
    let last = evict(&list, group, 1)[0];
    let charged = list.readmit_charged(group.charge(4096).unwrap(), last.0, last.1).unwrap();
    assert!(list.is_protected(&charged) && group.charge(1).is_err());
    assert!(list.touch(&charged) && list.remove(&charged) && !list.remove(&charged) && !list.touch(&charged));
    assert!(list.add_again(group, NODE, &charged).unwrap() && list.remove(&charged));
    drop(charged);
    assert_eq!(group.used().unwrap(), 0);

    // Both kinds of values become the parent's, and a stamp of a deleted group tells nothing.
    let (before, parent) = (list.count(group), Group::find("refaults").unwrap());
    group.delete().unwrap();
    assert_eq!(list.count(parent), before);
    assert!(!list.is_protected(&list.readmit(parent, NODE, 0, last.0, last.1).unwrap()));
    assert!(list.remove(&kept) && list.count(parent) == before);
    PROCESS.verify(64).unwrap();
}

#[test]
fn walk_spares_protected_values_down_to_a_tenth() {
    let group = Group::create("order").unwrap();
    let list = LruList::new().unwrap();
    let handles: Vec<Handle<u32>> = (0..40).map(|key| list.add_on(group, NODE, key).unwrap()).collect();
    let evicted = evict(&list, group, 20);
    for &(key, stamp) in &evicted {
        assert!(list.is_protected(&list.readmit(group, NODE, 0, key, stamp).unwrap()));
    }
    // The 20 values that were never evicted go first, but for a tenth of the rest.
    let mut order = Vec::new();
    (0..40).for_each(|_| order.extend(keys(&evict(&list, group, 1))));
    let others: Vec<usize> = (0..order.len()).filter(|&at| order[at] >= 20).collect();
    assert_eq!((order.len(), others), (40, (0..18).chain([21, 31]).collect()), "{order:?}");
    assert!(order.iter().filter(|&&key| key < 20).is_sorted() && order.iter().filter(|&&key| key >= 20).is_sorted());
    // One walk reaches all, each once, and a verdict holds where it was given.
    handles.iter().for_each(|handle| assert!(list.add_again(group, NODE, handle).unwrap()));
    let (key, stamp) = evict(&list, group, 1)[0];
    list.readmit(group, NODE, 0, key, stamp).unwrap();
    let (mut seen, rotate) = (Vec::new(), |seen: &mut Vec<u32>, key: u32| {
        seen.push(key);
        if key.is_multiple_of(2) { LruStatus::Rotate } else { LruStatus::Skip }
    });
    let walked = list.walk(group, NODE, usize::MAX, |&key| rotate(&mut seen, key), drop);
    seen.sort_unstable();
    assert_eq!((walked.scanned, walked.removed, seen), (40, 0, Vec::from_iter(0..40)));
    let walked = list.walk(group, NODE, usize::MAX, |_| LruStatus::Stop, drop);
    assert_eq!((walked.scanned, walked.stopped, list.count(group)), (1, true, 40));
    PROCESS.verify(64).unwrap();
}

/// Values of a full cache.
const SIZE: usize = 500;
const REQUESTS: usize = 60_000;
const SEED: u64 = 7;

/// What a cache remembers of a key.
enum Known {
    Cached(Handle<(u64, AtomicBool)>),
    Evicted(Stamp),
}

/// Counts the hits of a cache whose walks give each used value a second chance. With `stamps`, it
/// keeps the stamps of evicted values.
fn second_chance(group: Group, requests: &[u64], stamps: bool) -> usize {
    let (list, mut hits) = (LruList::new().unwrap(), 0);
    let mut known: HashMap<u64, Known> = HashMap::new();
    for &key in requests {
        let stamp = match known.get(&key) {
            Some(Known::Cached(handle)) => {
                handle.1.store(true, Relaxed);
                hits += 1;
                continue;
            }
            Some(&Known::Evicted(stamp)) => Some(stamp),
            None => None,
        };
        while list.count(group) >= SIZE {
            let done = Cell::new(false);
            let decide = |value: &(u64, AtomicBool)| {
                if done.get() {
                    LruStatus::Stop
                } else if value.1.swap(false, Relaxed) {
                    LruStatus::Rotate
                } else {
                    done.set(true);
                    LruStatus::Removed
                }
            };
            list.walk(group, NODE, 8, decide, |value| {
                match value.stamp().filter(|_| stamps) {
                    Some(stamp) => known.insert(value.0, Known::Evicted(stamp)),
                    None => known.remove(&value.0),
                };
            });
        }
        let value = (key, AtomicBool::new(false));
        let handle = match stamp {
            Some(stamp) => list.readmit(group, NODE, 0, value, stamp),
            None => list.add_on(group, NODE, value),
        };
        known.insert(key, Known::Cached(handle.unwrap()));
    }
    hits
}

/// Counts the hits of a cache that evicts the least recently used value.
fn lru(group: Group, requests: &[u64]) -> usize {
    let (list, mut hits) = (LruList::new().unwrap(), 0);
    let mut cached: HashMap<u64, Handle<u64>> = HashMap::new();
    for &key in requests {
        if cached.get(&key).is_some_and(|handle| list.touch(handle)) {
            hits += 1;
            continue;
        }
        if cached.len() >= SIZE {
            list.walk(group, NODE, 1, |_| LruStatus::Removed, |value| drop(cached.remove(&*value)));
        }
        cached.insert(key, list.add_on(group, NODE, key).unwrap());
    }
    hits
}

/// Counts the hits of a model of SIEVE: one hand visits values in the order of their addition, and
/// leaves used values where they are.
fn sieve(requests: &[u64]) -> usize {
    let (mut used, mut order, mut hand, mut hits) = (HashMap::new(), Vec::new(), 0, 0);
    for &key in requests {
        if let Some(used) = used.get_mut(&key) {
            *used = true;
            hits += 1;
            continue;
        }
        while order.len() >= SIZE {
            hand %= order.len();
            if core::mem::take(used.get_mut(&order[hand]).unwrap()) {
                hand += 1;
            } else {
                used.remove(&order.remove(hand));
            }
        }
        order.push(key);
        used.insert(key, false);
    }
    hits
}

/// Pseudo-random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Requests of `keys` keys by Zipf's law with exponent 0.9, as ranks.
fn zipf(random: &mut Random, keys: usize, requests: usize) -> Vec<u64> {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=keys)
        .map(|rank| {
            sum += (rank as f64).powf(-0.9);
            sum
        })
        .collect();
    let mut draw = || (random.next() >> 11) as f64 / (1_u64 << 53) as f64 * sum;
    (0..requests).map(|_| draw()).map(|point| sums.partition_point(|&sum| sum <= point) as u64).collect()
}

/// Sequences of requests, with their names.
fn workloads() -> Vec<(&'static str, Vec<u64>)> {
    const FAR: u64 = 1 << 32;
    let mut random = Random(SEED);
    let skewed = zipf(&mut random, 5000, REQUESTS);
    let once = skewed.iter().zip(0..).flat_map(|(&key, at)| [Some(key), (at % 4 == 0).then_some(FAR + at)]).flatten();
    let scans = skewed.chunks(6000).zip(0..).flat_map(|(part, at)| {
        let scan = FAR + at * 1000..FAR + (at + 1) * 1000;
        part.iter().copied().chain(scan).collect::<Vec<_>>()
    });
    let mut at = 0;
    let mut hot = |share: u64| {
        let next = |_| match random.below(100) < share {
            true => random.below(250),
            false => {
                at += 1;
                FAR + at % 1000
            }
        };
        (0..REQUESTS).map(next).collect::<Vec<_>>()
    };
    let hot = [hot(50), hot(20)];
    let around = (0..REQUESTS as u64).map(|at| at % 600).collect();
    let moving = (0..10).flat_map(|phase| {
        let part = zipf(&mut Random(SEED + phase), 1500, REQUESTS / 10);
        part.into_iter().map(move |key| phase * 750 + key)
    });
    let [often, seldom] = hot;
    vec![
        ("zipf", skewed.clone()),
        ("zipf, 20 % once", once.collect()),
        ("zipf, scans", scans.collect()),
        ("hot set 50 %, loop", often),
        ("hot set 20 %, loop", seldom),
        ("loop", around),
        ("moving zipf", moving.collect()),
    ]
}

#[test]
fn stamps_raise_hits_under_scans_and_loops() {
    let group = Group::create("hits").unwrap();
    let mut failed = Vec::new();
    println!("seed {SEED}; hits in %: LRU, second chance, SIEVE, second chance with stamps");
    for (name, requests) in workloads() {
        let all = [
            lru(group, &requests),
            second_chance(group, &requests, false),
            sieve(&requests),
            second_chance(group, &requests, true),
        ];
        let [lru, plain, sieve, stamps] = all.map(|hits| 100.0 * hits as f64 / requests.len() as f64);
        println!("| {name} | {lru:.1} | {plain:.1} | {sieve:.1} | {stamps:.1} |");
        let gain = match name {
            "zipf" | "hot set 50 %, loop" => 3.0,
            "zipf, 20 % once" | "zipf, scans" | "hot set 20 %, loop" | "loop" => 5.0,
            _ => -3.0,
        };
        failed.extend((stamps < plain + gain || stamps < sieve - 2.0).then_some(name));
    }
    assert!(failed.is_empty(), "{failed:?}");
}
