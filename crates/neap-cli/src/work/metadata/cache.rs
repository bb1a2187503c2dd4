//! The cache: values by path, charged to memory groups, on lists that reclaim evicts from.
//!
//! # Design
//! All variants are the same cache. They differ in its groups and its shrinker. A value is charged
//! before it is cached. At the limit the charging thread calls the shrinker, which evicts the least
//! recently used values. If the charge is refused nevertheless, the value is not cached.
//!
//! # Locking
//! Each shard of the map has a mutex. A thread does not charge while it holds one, and eviction
//! only tries the mutex.

use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use clap::ValueEnum;
use neap::groups::{Bound, ChargeError, Group, GroupHandle, Info};
use neap::lru::{Handle, LruList, LruStatus};
use neap::reclaim::{Context, Count, Scan, Shrink, Shrinker};

use super::files::{Value, ValueKind};
use super::pattern::TENANTS;

/// Parts of the map.
const SHARDS: usize = 64;

/// Ways to shrink the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Variant {
    /// One group, one list
    Global,
    /// One group, a list for each node
    Node,
    /// A group for each tenant, with a list for each node, protected up to its part of the limit
    Group,
    /// One group, no shrinker
    Refuse,
}

/// Values by path, for each [`ValueKind`].
type Maps = [HashMap<Arc<OsStr>, Handle<Value>>; 2];

struct Values {
    hasher: RandomState,
    shards: [Mutex<Maps>; SHARDS],
    list: LruList<Value>,
    evictions: AtomicU64,
}

/// Counts of one worker's look-ups.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Tally {
    pub(super) look_ups: u64,
    pub(super) hits: u64,
    /// Values that were not cached because their charge was refused.
    pub(super) refused: u64,
    /// Sum of all values.
    pub(super) sum: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: &Tally) {
        self.look_ups += other.look_ups;
        self.hits += other.hits;
        self.refused += other.refused;
        self.sum = self.sum.wrapping_add(other.sum);
    }
}

/// A cache of eight tenants with a limit for all.
pub(super) struct MetadataCache {
    // This field is dropped first. Afterwards no callback uses `values`.
    _shrinker: Option<Shrinker>,
    values: Arc<Values>,
    /// Groups that are charged, by tenant.
    payers: [Group; TENANTS],
    by_node: bool,
    root: GroupHandle,
}

impl Values {
    fn new(list: LruList<Value>) -> Arc<Values> {
        let (hasher, shards) = (RandomState::new(), std::array::from_fn(|_| Mutex::default()));
        Arc::new(Values { hasher, shards, list, evictions: AtomicU64::new(0) })
    }

    fn shard(&self, path: &OsStr) -> &Mutex<Maps> {
        &self.shards[self.hasher.hash_one(path) as usize % SHARDS]
    }

    /// Removes a value that is being evicted from its map. Skips the value if the map is locked.
    fn forget(&self, value: &Value) -> LruStatus {
        let Ok(mut maps) = self.shard(&value.path).try_lock() else { return LruStatus::Skip };
        let forgotten = maps[value.what as usize].remove(&value.path);
        // The last reference is the list's.
        drop(maps);
        drop(forgotten);
        LruStatus::Removed
    }
}

impl Shrink for Values {
    fn count(&self, cx: &Context) -> Count {
        self.list.count_for(cx)
    }

    fn scan(&self, cx: &Context, objects: usize) -> Scan {
        let evicted = |_| _ = self.evictions.fetch_add(1, Ordering::Relaxed);
        self.list.evict(cx, objects, |value| self.forget(value), evicted)
    }
}

fn locked(shard: &Mutex<Maps>) -> MutexGuard<'_, Maps> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The node of this thread's CPU.
fn this_node() -> usize {
    let (mut cpu, mut node) = (0_u32, 0_u32);
    // SAFETY: both pointers are to live locals. The kernel ignores the third argument.
    let answer = unsafe { libc::syscall(libc::SYS_getcpu, &mut cpu, &mut node, 0_usize) };
    if answer == 0 { node as usize } else { 0 }
}

impl MetadataCache {
    /// Makes a cache whose groups are the group `name` with `limit` bytes, and groups below it.
    pub(super) fn open(name: &str, variant: Variant, limit: u64) -> Result<MetadataCache> {
        let root = GroupHandle::create(name)?;
        root.set(Bound::Max, limit)?;
        let mut payers = [*root; TENANTS];
        let builder = Shrinker::named("metadata").inline(true);
        let (values, shrinker) = match variant {
            Variant::Refuse => (Values::new(LruList::new()?), None),
            Variant::Global | Variant::Node => {
                let values = Values::new(LruList::new()?);
                let builder = builder.group(*root);
                let builder = if variant == Variant::Node { builder.by_node() } else { builder };
                let shrinker = builder.register_shrink(values.clone())?;
                (values, Some(shrinker))
            }
            Variant::Group => {
                for (number, payer) in payers.iter_mut().enumerate() {
                    *payer = Group::create(&format!("{name}/{number}"))?;
                    payer.set(Bound::Low, limit / TENANTS as u64)?;
                }
                let prepared = builder.by_group().by_node().prepare_shrink()?;
                let values = Values::new(LruList::for_shrinker(prepared.id())?);
                let shrinker = prepared.start(values.clone())?;
                (values, Some(shrinker))
            }
        };
        let by_node = matches!(variant, Variant::Node | Variant::Group);
        Ok(MetadataCache { _shrinker: shrinker, values, payers, by_node, root })
    }

    /// Looks a value up for a tenant. If it is not cached, makes the system calls, and caches the
    /// result.
    ///
    /// # Errors
    /// Returns an error if a group was deleted or the list refuses a value. A charge refused at a
    /// limit is not an error. The value is then not cached.
    pub(super) fn look_up(&self, tenant: usize, what: ValueKind, path: &OsStr, tally: &mut Tally) -> Result<()> {
        let Values { list, .. } = &*self.values;
        tally.look_ups += 1;
        let cached = locked(self.values.shard(path))[what as usize].get(path).cloned();
        if let Some(value) = cached {
            list.touch(&value);
            tally.hits += 1;
            tally.sum = tally.sum.wrapping_add(value.sum());
            return Ok(());
        }
        let value = Value::read(what, path);
        tally.sum = tally.sum.wrapping_add(value.sum());
        let request = self.payers[tenant].request(value.bytes()).inline();
        let request = if self.by_node { request.node(this_node()) } else { request };
        match request.now() {
            Ok(charge) => {
                let mut maps = locked(self.values.shard(path));
                // Another worker may have cached it meanwhile.
                if !maps[what as usize].contains_key(path) {
                    let path = value.path.clone();
                    let value = list.add_charged(charge, value)?;
                    maps[what as usize].insert(path, value);
                }
            }
            Err(ChargeError::Deleted) => return Err(ChargeError::Deleted.into()),
            Err(_) => tally.refused += 1,
        }
        Ok(())
    }

    /// Number of values that were evicted.
    pub(super) fn evictions(&self) -> u64 {
        self.values.evictions.load(Ordering::Relaxed)
    }

    /// Usage and limit of all tenants together.
    pub(super) fn info(&self) -> Result<Info> {
        Ok(self.root.info()?)
    }

    /// Bytes that the tenant's values are charged.
    pub(super) fn used(&self, tenant: usize) -> Result<u64> {
        Ok(self.payers[tenant].used()?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::made::Made;
    use super::*;
    use neap::process::PROCESS;
    use std::thread;

    const LIMIT: u64 = 512 << 10;

    /// The paths of some files: more than three times the limit.
    fn made(name: &str) -> (Made, Vec<std::ffi::OsString>) {
        let made = Made::new(name, 800);
        let path = |file: usize| made.0.join(format!("d{}/f{file}.h", file / 16)).into_os_string();
        let paths = (0..800).map(path).collect();
        (made, paths)
    }

    /// Looks up contents, and returns the hits.
    fn look_up(cache: &MetadataCache, tenant: usize, paths: &[std::ffi::OsString]) -> u64 {
        let mut tally = Tally::default();
        paths.iter().for_each(|path| cache.look_up(tenant, ValueKind::Content, path, &mut tally).unwrap());
        tally.hits
    }

    /// Bytes of all cached values.
    fn cached_bytes(cache: &MetadataCache) -> u64 {
        let sum = |maps: &Maps| -> u64 { maps.iter().flat_map(HashMap::values).map(|value| value.bytes()).sum() };
        cache.values.shards.iter().map(|shard| sum(&locked(shard))).sum()
    }

    #[test]
    fn metadata_cache_stays_below_limit_and_charges_match_values() {
        let (_made, paths) = made("limit");
        for variant in [Variant::Global, Variant::Node, Variant::Group, Variant::Refuse] {
            let cache = MetadataCache::open(&format!("limit-{variant:?}"), variant, LIMIT).unwrap();
            thread::scope(|scope| {
                let (cache, paths) = (&cache, &paths);
                let workers: Vec<_> = (0..4)
                    .map(|tenant| scope.spawn(move || _ = look_up(cache, tenant, &paths[tenant * 20..])))
                    .collect();
                while workers.iter().any(|worker| !worker.is_finished()) {
                    let charged = cache.info().unwrap().charged;
                    assert!(charged <= LIMIT, "{variant:?}: {charged} bytes");
                }
            });
            let info = cache.info().unwrap();
            assert!(info.peak <= LIMIT && info.peak > LIMIT / 2, "{variant:?}: {}", info.peak);
            let used: u64 = match variant {
                Variant::Group => (0..TENANTS).map(|tenant| cache.used(tenant).unwrap()).sum(),
                _ => cache.root.used().unwrap(),
            };
            assert_eq!(used, cached_bytes(&cache), "{variant:?}");
            assert_eq!(cache.evictions() == 0, variant == Variant::Refuse, "{variant:?}");
            PROCESS.verify(64).unwrap();
            let root = *cache.root;
            drop(cache);
            assert!(root.info().is_err(), "{variant:?}");
        }
    }

    #[test]
    fn refused_values_are_not_cached() {
        let (_made, paths) = made("refused");
        let cache = MetadataCache::open("refused", Variant::Refuse, LIMIT).unwrap();
        let mut tally = Tally::default();
        paths.iter().for_each(|path| cache.look_up(0, ValueKind::Content, path, &mut tally).unwrap());
        let cached: usize = cache.values.shards.iter().map(|shard| locked(shard)[1].len()).sum();
        assert!(tally.refused > 0 && tally.hits == 0, "{tally:?}");
        assert_eq!((tally.look_ups, cached as u64), (800, 800 - tally.refused));
        assert_eq!(look_up(&cache, 0, &paths), cached as u64);
    }

    #[test]
    fn cached_values_equal_those_of_the_system_calls() {
        let (_made, paths) = made("equal-values");
        let cache = MetadataCache::open("equal-values", Variant::Group, LIMIT).unwrap();
        for what in [ValueKind::Stat, ValueKind::Content] {
            let [mut first, mut second] = [Tally::default(); 2];
            for tally in [&mut first, &mut second] {
                paths[..50].iter().for_each(|path| cache.look_up(3, what, path, tally).unwrap());
            }
            assert_eq!((first.hits, second.hits, second.sum), (0, 50, first.sum), "{what:?}");
        }
    }

    #[test]
    fn metadata_flood_evicts_other_tenants_unless_protected() {
        let (_made, paths) = made("flood");
        let (kept, flood) = paths.split_at(20);
        for variant in [Variant::Global, Variant::Group] {
            let cache = MetadataCache::open(&format!("flood-{variant:?}"), variant, LIMIT).unwrap();
            look_up(&cache, 1, kept);
            look_up(&cache, 0, flood);
            assert!(cache.evictions() > 0);
            let hits = look_up(&cache, 1, kept);
            assert_eq!(hits, if variant == Variant::Group { 20 } else { 0 }, "{variant:?}");
        }
    }
}
