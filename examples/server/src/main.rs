//! Serves two tenants at port 8080 of this machine. `GET /acme/7/16384` returns a page of 16 KiB,
//! `PUT /limit/acme/1000000` changes a limit, and `neap stat PID --groups` shows both tenants.

use core::error::Error;
use core::time::Duration;
use std::sync::Arc;
use tenant_server::{Site, Tenant, routes};

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

fn main() -> Result<(), Box<dyn Error>> {
    let tenants = vec![Tenant::new("acme", 64 << 20)?, Tenant::new("zenith", 64 << 20)?];
    let site = Arc::new(Site { tenants, patience: Duration::from_secs(1) });
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
        Ok(axum::serve(listener, routes(site)).await?)
    })
}
