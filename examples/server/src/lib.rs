//! A server with a moka cache for each tenant. The limit of a tenant's memory group decides how
//! many pages its cache holds, and can change at any moment.
//!
//! # Design
//! A request for a page that is not cached charges the page's bytes to its tenant. The charge waits
//! at the limit while neap asks the tenant's shrinker, which evicts pages. The request is answered
//! with 503 only if the charge is refused, so never while there are pages to evict.
//!
//! # Locking
//! moka's locks are held neither during a charge nor inside [`Group::scope`], where an allocation
//! may wait for the shrinker. So the shrinker never waits for a request.

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use bytes::Bytes;
use core::error::Error;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use moka::sync::Cache;
use neap::groups::{Bound, Charge, ChargeError, Group, GroupHandle};
use neap::reclaim::Shrinker;
use std::sync::{Arc, Mutex, PoisonError};

/// A page with its charge. The charge ends when the page is evicted and no response uses it.
struct Page {
    body: Vec<u8>,
    _charge: Charge,
}

impl AsRef<[u8]> for Page {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

/// A page's place in the cache. moka drops removed values late, so an eviction empties the place.
#[derive(Default)]
struct Slot(Mutex<Option<Arc<Page>>>);

impl Slot {
    fn with<R>(&self, with: impl FnOnce(&mut Option<Arc<Page>>) -> R) -> R {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A tenant: its group, its cache, and the shrinker that connects them.
pub struct Tenant {
    name: String,
    group: GroupHandle,
    pages: Cache<u64, Arc<Slot>>,
    /// Number of cached pages. A removal counts at once, while moka's own number is late.
    cached: Arc<AtomicU64>,
    /// Refused charges at a time when there were cached pages.
    avoidable: AtomicU64,
    _shrinker: Shrinker,
}

impl Tenant {
    /// Makes a tenant with a limit in bytes.
    pub fn new(name: &str, limit: u64) -> Result<Tenant, Box<dyn Error>> {
        let group = GroupHandle::create(&format!("tenants/{name}"))?;
        group.set(Bound::Max, limit)?;
        let cached = Arc::new(AtomicU64::new(0));
        let (counted, evicted) = (cached.clone(), cached.clone());
        let pages = Cache::builder()
            .eviction_listener(move |_key, slot: Arc<Slot>, _cause| {
                if slot.with(Option::take).is_some() {
                    evicted.fetch_sub(1, Relaxed);
                }
            })
            .build();
        let shrunk = pages.clone();
        let shrinker = Shrinker::named(name)
            .group(*group)
            .batch(8)
            .register(move || counted.load(Relaxed), move |wanted| evict(&shrunk, wanted))?;
        Ok(Tenant { name: name.into(), group, pages, cached, avoidable: AtomicU64::new(0), _shrinker: shrinker })
    }

    /// The tenant's group.
    pub fn group(&self) -> Group {
        *self.group
    }

    /// Number of cached pages.
    pub fn cached(&self) -> u64 {
        self.cached.load(Relaxed)
    }

    /// Number of charges that were refused although there were pages to evict.
    pub fn avoidable(&self) -> u64 {
        self.avoidable.load(Relaxed)
    }

    /// Returns a page: the cached one, or a new one that is charged to the tenant and cached.
    async fn page(&self, key: u64, size: usize, patience: Duration) -> Result<Arc<Page>, ChargeError> {
        if let Some(page) = self.pages.get(&key).and_then(|slot| slot.with(|page| page.clone())) {
            return Ok(page);
        }
        let request = self.group.request(size as u64).deadline(patience);
        let charge = request.await.inspect_err(|error| {
            let may_fit = !matches!(error, ChargeError::TooLarge(_));
            self.avoidable.fetch_add(u64::from(may_fit && self.cached() > 0), Relaxed);
        })?;
        let page = Arc::new(Page { body: render(key, size), _charge: charge });
        self.cached.fetch_add(1, Relaxed);
        self.pages.insert(key, Arc::new(Slot(Mutex::new(Some(page.clone())))));
        Ok(page)
    }
}

/// Evicts up to `wanted` pages, and returns their number.
fn evict(pages: &Cache<u64, Arc<Slot>>, wanted: u64) -> u64 {
    let keys = pages.iter().take(wanted as usize).map(|(key, _)| *key);
    keys.filter(|key| pages.remove(key).is_some()).count() as u64
}

/// Returns the text of a page.
pub fn render(key: u64, size: usize) -> Vec<u8> {
    (0..size as u64).map(|at| b'a' + (key.wrapping_add(at) % 26) as u8).collect()
}

/// The server's tenants, and how long a request waits for memory.
pub struct Site {
    /// The tenants.
    pub tenants: Vec<Tenant>,
    /// Time that a charge may wait at a limit.
    pub patience: Duration,
}

impl Site {
    fn tenant(&self, name: &str) -> Result<&Tenant, StatusCode> {
        self.tenants.iter().find(|tenant| tenant.name == name).ok_or(StatusCode::NOT_FOUND)
    }
}

/// Answers `GET /tenant/key/size` with a page.
async fn answer(State(site): State<Arc<Site>>, Path(path): Path<(String, u64, usize)>) -> Response {
    let (name, key, size) = path;
    let page = match site.tenant(&name) {
        Ok(tenant) => tenant.page(key, size, site.patience).await.map(|page| (tenant, page)),
        Err(status) => return status.into_response(),
    };
    match page {
        // The copy for the response is charged to the tenant until it is sent.
        Ok((tenant, page)) => tenant.group.scope(async { Bytes::copy_from_slice(&page.body).into_response() }).await,
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    }
}

/// Answers `PUT /limit/tenant/bytes`: changes the tenant's limit, and does not wait.
async fn limit(State(site): State<Arc<Site>>, Path((name, bytes)): Path<(String, u64)>) -> StatusCode {
    match site.tenant(&name).map(|tenant| tenant.group.set(Bound::Max, bytes)) {
        Ok(Ok(_before)) => StatusCode::NO_CONTENT,
        Ok(Err(_)) => StatusCode::GONE,
        Err(status) => status,
    }
}

/// Returns the routes of a server with these tenants.
pub fn routes(site: Arc<Site>) -> Router {
    // Neither futures nor shrinkers need a thread of the server: neap's own wakes and calls them.
    neap::process::PROCESS.start_background();
    Router::new()
        .route("/{tenant}/{key}/{size}", get(answer))
        .route("/limit/{tenant}/{bytes}", put(limit))
        .with_state(site)
}
