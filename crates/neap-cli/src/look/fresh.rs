//! The page of a process, with numbers of now in place of those of an old text.
//!
//! The text of a page has the numbers of the last tick, and a sleeping process without neap's
//! thread makes none. If the text is older than a second, this command counts the contents of the
//! [CPUs' caches](super::cpu_caches) and of [per-CPU data](super::per_cpu), and looks at the
//! [container](super::container).

use core::time::Duration;

use anyhow::Result;

use super::remote_memory::RemoteMemory;
use super::stat_reader::{Page, ProcessStatus, monotonic};
use super::{container, cpu_caches, per_cpu};

/// Age of a text from which its numbers are replaced.
const OLD: Duration = Duration::from_secs(1);
/// Longest time that reading memory takes. A hostile process may have memory that is never read.
const TIME: Duration = Duration::from_secs(1);

/// Returns the page of a process's first manager. The key `cpus_read_now` says whether the numbers
/// of CPUs' caches and of per-CPU data are of now. Where they cannot be read, those of the text
/// stay.
pub(crate) fn page(process: &ProcessStatus) -> Result<Page> {
    let mut page = process.page()?;
    let age = Duration::from_nanos(monotonic().saturating_sub(page.published));
    let is_old = page.is_written && age >= OLD;
    if is_old {
        container::refresh(process, &mut page);
    }
    let are_read = is_old && refresh(process, &mut page).is_ok();
    page.object.insert("cpus_read_now".to_string(), are_read.into());
    Ok(page)
}

/// Replaces numbers by those in the process's memory.
fn refresh(process: &ProcessStatus, page: &mut Page) -> Result<()> {
    let time = process.allowance.part(TIME);
    let memory = RemoteMemory::open(process, &time)?;
    per_cpu::refresh(&memory, page)?;
    cpu_caches::refresh(&memory, page, &process.allowance)
}
