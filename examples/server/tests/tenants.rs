//! Two tenants under load while the limit of one changes: the server refuses no request that an
//! eviction could serve, the limit holds at the end, and the other tenant keeps its pages.

use core::net::SocketAddr;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use neap::groups::{Event, Group};
use std::collections::HashSet;
use std::io::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Instant;
use tenant_server::{Site, Tenant, render, routes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

const PAGE: usize = 16 << 10;
/// Keys that a tenant's requests draw from.
const KEYS: u64 = 300;
const CLIENTS: u64 = 4;
const REQUESTS: u64 = 500;
/// Limits of `acme` in the order of their setting. Each has room for the pages of all clients'
/// requests at once, with their copies, and none for all keys.
const LIMITS: [u64; 5] = [4 << 20, 1 << 20, 3 << 20, 768 << 10, 1 << 20];

/// A connection that is kept from one request to the next.
struct Client(TcpStream);

impl Client {
    async fn to(address: SocketAddr) -> Result<Client> {
        Ok(Client(TcpStream::connect(address).await?))
    }

    /// Sends a request without a body, and returns the status and body of its response.
    async fn ask(&mut self, method: &str, path: &str) -> Result<(u16, Vec<u8>)> {
        self.0.write_all(format!("{method} {path} HTTP/1.1\r\nhost: test\r\n\r\n").as_bytes()).await?;
        let mut read = Vec::new();
        let head = loop {
            if let Some(at) = read.windows(4).position(|end| end == b"\r\n\r\n") {
                break at;
            }
            if self.0.read_buf(&mut read).await? == 0 {
                return Err(Error::from(ErrorKind::UnexpectedEof));
            }
        };
        let mut body = read.split_off(head + 4);
        let head = String::from_utf8_lossy(&read).to_ascii_lowercase();
        let number = |text: Option<&str>| text.and_then(|text| text.trim().parse().ok());
        let length = number(head.lines().find_map(|line| line.strip_prefix("content-length:"))).unwrap_or(0);
        while body.len() < length {
            if self.0.read_buf(&mut body).await? == 0 {
                return Err(Error::from(ErrorKind::UnexpectedEof));
            }
        }
        let status = number(head.split_whitespace().nth(1)).ok_or(ErrorKind::InvalidData)?;
        Ok((status as u16, body))
    }
}

/// Requests pages of pseudo-random keys, counts the served requests, and returns the keys. Ends at
/// the first refusal.
async fn load(address: SocketAddr, tenant: &'static str, seed: u64, served: Arc<AtomicU64>) -> Result<HashSet<u64>> {
    let (mut client, mut random, mut keys) = (Client::to(address).await?, seed, HashSet::new());
    for request in 0..REQUESTS {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let key = (random >> 33) % KEYS;
        let (status, body) = client.ask("GET", &format!("/{tenant}/{key}/{PAGE}")).await?;
        assert_eq!(status, 200, "request {request} of {tenant}: {}", String::from_utf8_lossy(&body));
        assert!(body == render(key, PAGE), "a page of another key");
        keys.insert(key);
        served.fetch_add(1, Relaxed);
    }
    Ok(keys)
}

/// Runs all clients of both tenants. Meanwhile sets one limit of `acme` after the other, each when
/// its clients have made the same share of their requests. Returns the keys of `zenith`.
async fn run(address: SocketAddr) -> Result<HashSet<u64>> {
    let served = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let both = (0..CLIENTS).flat_map(|client| [("acme", client, &served[0]), ("zenith", client, &served[1])]);
    let start = |(tenant, client, served): (_, _, &Arc<AtomicU64>)| {
        (tenant, tokio::spawn(load(address, tenant, client + 1, served.clone())))
    };
    let clients: Vec<_> = both.map(start).collect();
    let mut operator = Client::to(address).await?;
    for (at, limit) in (1..).zip(LIMITS) {
        let due = CLIENTS * REQUESTS * at / (LIMITS.len() as u64 + 1);
        // A client that has failed is finished, too. Its error is reported below.
        while served[0].load(Relaxed) < due && !clients.iter().all(|(_, client)| client.is_finished()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (status, _) = operator.ask("PUT", &format!("/limit/acme/{limit}")).await?;
        assert_eq!(status, 204);
    }
    let mut kept = HashSet::new();
    for (tenant, client) in clients {
        let keys = client.await??;
        if tenant == "zenith" {
            kept.extend(keys);
        }
    }
    Ok(kept)
}

/// Waits until responses that the clients have are dropped by the server, and usage is at most
/// `limit`.
fn settle(group: Group, limit: u64) {
    let end = Instant::now() + Duration::from_secs(60);
    while group.used().unwrap() > limit {
        assert!(Instant::now() < end, "{:?} of {limit} bytes", group.used());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn tenants_share_a_server_while_a_limit_changes() {
    let tenants = vec![Tenant::new("acme", 4 << 20).unwrap(), Tenant::new("zenith", 16 << 20).unwrap()];
    let site = Arc::new(Site { tenants, patience: Duration::from_secs(30) });
    let [acme, zenith] = [&site.tenants[0], &site.tenants[1]];
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let address = runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(axum::serve(listener, routes(site.clone())).into_future());
        address
    });
    let kept = runtime.block_on(run(address)).unwrap();

    let last = LIMITS[LIMITS.len() - 1];
    settle(acme.group(), last);
    let refused = |tenant: &Tenant| tenant.group().info().unwrap().events[Event::Refused as usize];
    assert_eq!((refused(acme), acme.avoidable()), (0, 0), "evicting could have avoided a refusal");
    assert!(acme.cached() * PAGE as u64 <= last, "{} pages are above the limit", acme.cached());

    // The other tenant's limit was never reached, so no other tenant's pressure reached its cache.
    assert_eq!((refused(zenith), zenith.cached()), (0, kept.len() as u64), "pages of the other tenant are gone");
    assert!(zenith.group().used().unwrap() >= (kept.len() * PAGE) as u64);

    // A page that is larger than the limit cannot be made room for. The cache stays as it is.
    let cached = acme.cached();
    let answer = runtime.block_on(async { Client::to(address).await?.ask("GET", "/acme/1000/2000000").await });
    let (status, text) = answer.unwrap();
    assert_eq!(status, 503, "{}", String::from_utf8_lossy(&text));
    assert!(String::from_utf8_lossy(&text).contains("which is more than its limit"));
    assert_eq!((acme.avoidable(), acme.cached()), (0, cached));
    assert!(kept.len() > 200 && cached > 0, "{} of {KEYS} keys, {cached} pages", kept.len());
}
