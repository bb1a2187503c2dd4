//! The counts of pages that a process publishes, in bytes, for readers of `neap stat --json`.

use serde_json::{Value, json};

use crate::look::stat_model::Numbers;

/// Returns the numbers of pages as bytes.
pub(crate) fn page_bytes(numbers: &Numbers) -> Value {
    let bytes = |pages: u64| pages.saturating_mul(numbers.mode.page_size);
    let pages = &numbers.pages;
    json!({
        "managed": bytes(pages.managed), "free": bytes(pages.free), "backed_free": bytes(pages.backed_free),
        "used": bytes(pages.used), "listed": bytes(pages.listed), "releasing": bytes(pages.releasing),
        "draining": bytes(pages.draining), "populated": bytes(pages.populated), "limit": pages.budget.map(bytes),
        "released": bytes(numbers.released.pages), "holes": bytes(numbers.holes.pages),
        "grown": bytes(numbers.reuse.grown),
    })
}
