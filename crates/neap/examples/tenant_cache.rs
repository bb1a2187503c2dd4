//! A tenant's cache: charged values, charges that wait for room, and deletion of a full tenant.

use core::{error::Error, pin::pin, task::Context as Task, task::Poll, task::Waker};
use neap::groups::{Bound, Group, GroupHandle};
use neap::lru::{Handle, LruList, LruStatus};
use neap::reclaim::{Context, Count, Scan, Shrink, Shrinker};
use std::{collections::HashMap, sync::Arc, sync::Mutex};

const PAGE: usize = 64 << 10;
type Page = (u64, Vec<u8>);
struct Cache {
    map: Mutex<HashMap<u64, Handle<Page>>>,
    list: LruList<Page>,
}

impl Shrink for Cache {
    fn count(&self, cx: &Context) -> Count {
        self.list.count_for(cx)
    }
    fn scan(&self, cx: &Context, objects: usize) -> Scan {
        let Ok(mut map) = self.map.try_lock() else { return Scan::Busy };
        self.list.evict(cx, objects, |_| LruStatus::Removed, |page| drop(map.remove(&page.0)))
    }
}

async fn get(cache: &Cache, tenant: Group, key: u64) -> Result<Handle<Page>, Box<dyn Error>> {
    if let Some(page) = cache.map.lock().map_err(|_| "poisoned")?.get(&key) {
        cache.list.touch(page);
        return Ok(page.clone());
    }
    let charge = tenant.request(PAGE as u64).await?; // Waits at the limit while the cache shrinks.
    let mut map = cache.map.lock().map_err(|_| "poisoned")?;
    let page = cache.list.add_charged(charge, (key, vec![0; PAGE]))?;
    map.insert(key, page.clone());
    Ok(page)
}

#[cfg_attr(test, test)]
fn main() -> Result<(), Box<dyn Error>> {
    let (site, tenant) = (Group::create("site")?, GroupHandle::create("site/acme")?);
    tenant.set(Bound::Max, 64 * PAGE as u64)?;
    let cache = Arc::new(Cache { map: Mutex::default(), list: LruList::new()? });
    let _shrinker = Shrinker::named("pages").group(*tenant).register_shrink(cache.clone())?;
    (0..500).try_for_each(|key| block_on(get(&cache, *tenant, key)).map(drop))?;
    assert!((1..=64).contains(&cache.list.count(*tenant)) && tenant.used()? <= 64 * PAGE as u64);
    drop(tenant); // Its parent has its pages now: a limit of the parent makes the cache shrink.
    site.set(Bound::Max, 8 * PAGE as u64)?;
    drop(block_on(site.request(PAGE as u64).into_future())?);
    println!("{} of 500 pages are left", cache.list.count(site));
    assert!(site.used()? <= 8 * PAGE as u64 && cache.map.lock().map_err(|_| "poisoned")?.len() <= 8);
    Ok(())
}

fn block_on<F: Future>(future: F) -> F::Output {
    let (mut future, mut task) = (pin!(future), Task::from_waker(Waker::noop()));
    loop {
        let Poll::Ready(answer) = future.as_mut().poll(&mut task) else { continue }; // Any executor works.
        return answer;
    }
}
