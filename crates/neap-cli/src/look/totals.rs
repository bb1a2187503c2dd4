//! The numbers that commands on many processes show of each process: sums in bytes, and counts
//! since the start.
//!
//! These commands are `neap ps`, `neap metrics` and `neap top` without a process. They read the
//! numbers of a page only by [`Totals`].

use anyhow::Result;

use crate::look::fresh;
use crate::look::refusal::LookRefusal;
use crate::look::stat_model::{ContainerNumbers, Mode, Numbers};
use crate::look::stat_reader::{Page, ProcessStatus, monotonic};
use crate::top::Kernel;

/// Characters of a published text that are kept.
const LONGEST: usize = 24;

/// Sums of a process. All sizes are bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) pid: i32,
    /// Id of the user that the process runs as.
    pub(crate) user: String,
    /// Name of the main thread, escaped.
    pub(crate) command: String,
    /// Version of the library.
    pub(crate) version: String,
    /// Resident bytes of the whole process, by the kernel.
    pub(crate) resident: u64,
    /// Objects and runs that the program has.
    pub(crate) in_use: u64,
    /// Free objects in slabs and caches.
    pub(crate) cached_objects: u64,
    /// Pages in the page lists of CPUs.
    pub(crate) cached_pages: u64,
    /// Populated pages of per-CPU data without rows.
    pub(crate) cached_per_cpu: u64,
    /// Backed free pages (free pages with memory) of zones.
    pub(crate) free: u64,
    /// The most that the heap may have resident, if it has a limit.
    pub(crate) limit: Option<u64>,
    /// The container that the limit follows, if its limit is known.
    pub(crate) container: Option<ContainerNumbers>,
    /// Tables of the heap, which count against the limit.
    pub(crate) tables: u64,
    /// Kind of the per-CPU slots, such as `rseq`.
    pub(crate) slots: String,
    /// State of neap's thread.
    pub(crate) background: String,
    pub(crate) has_groups: bool,
    /// Nanoseconds since the numbers were written.
    pub(crate) age: u64,
    pub(crate) ticks: u64,
    /// Bytes released to the OS.
    pub(crate) released: u64,
    /// Bytes taken from the page lists for allocations that found no free page.
    pub(crate) reclaimed: u64,
    /// Allocations that found no free page until all lists were drained.
    pub(crate) shortages: u64,
    /// Allocations that were refused.
    pub(crate) refused: u64,
    /// Objects that the program's shrinkers have freed.
    pub(crate) shrunk: u64,
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
}

/// Returns the first [`LONGEST`] characters of an escaped text.
fn short(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}

/// Returns the bytes that objects and runs may still take below a limit.
pub(crate) fn headroom(limit: u64, in_use: u64, tables: u64) -> u64 {
    limit.saturating_sub(in_use).saturating_sub(tables)
}

/// Whether less than a tenth of a limit is left, as for the alert `NeapNearLimit`.
pub(crate) fn is_near(limit: u64, left: u64) -> bool {
    left < limit / 10
}

impl Totals {
    /// Looks at a process, and sums up its numbers of [now](super::fresh).
    pub(crate) fn look(process: &ProcessStatus) -> Result<Totals> {
        Totals::of(process, &fresh::page(process)?)
    }

    /// Sums up the page that a process has published.
    pub(crate) fn of(process: &ProcessStatus, page: &Page) -> Result<Totals> {
        Totals::sum(process, &Numbers::read(process, page)?, page.published)
    }

    fn sum(process: &ProcessStatus, numbers: &Numbers, published: u64) -> Result<Totals> {
        let ended = || LookRefusal::Ended.error(format!("process {} has ended", process.pid));
        let kernel = Kernel::read(&process.handle).ok_or_else(ended)?;
        let Numbers { bytes, pages, lists, mode, .. } = numbers;
        let Mode { slots, background, page_size, .. } = mode;
        let of_pages = |pages: u64| pages.saturating_mul(*page_size);
        let container = numbers.container.filter(|container| container.looks > 0 && container.limit > 0);
        Ok(Totals {
            pid: process.pid,
            user: process.user.clone(),
            command: process.name.clone(),
            version: short(&numbers.version),
            resident: process.resident_kib << 10,
            in_use: bytes.used,
            cached_objects: bytes.cached,
            cached_pages: of_pages(pages.listed),
            cached_per_cpu: numbers.per_cpu.map_or(0, |per_cpu| per_cpu.free),
            free: of_pages(pages.backed_free),
            limit: pages.budget.map(of_pages),
            container,
            tables: bytes.tables,
            slots: short(slots),
            background: short(background),
            has_groups: numbers.groups.is_some(),
            age: monotonic().saturating_sub(published),
            ticks: numbers.ticks,
            released: of_pages(numbers.released.pages),
            reclaimed: of_pages(lists.need_pages),
            shortages: lists.need_drains,
            refused: numbers.refused,
            shrunk: numbers.shrunk,
            minor_faults: kernel.minor,
            major_faults: kernel.major,
        })
    }

    /// Bytes that all caches keep.
    pub(crate) fn cached(&self) -> u64 {
        self.cached_objects.saturating_add(self.cached_pages).saturating_add(self.cached_per_cpu)
    }

    /// Bytes that objects and runs may still take below the limit; `None` without a limit.
    pub(crate) fn headroom(&self) -> Option<u64> {
        Some(headroom(self.limit?, self.in_use, self.tables))
    }

    pub(crate) fn is_near_limit(&self) -> bool {
        self.limit.zip(self.headroom()).is_some_and(|(limit, left)| is_near(limit, left))
    }

    /// Bytes of this value in memory.
    pub(crate) fn size(&self) -> usize {
        let texts = [&self.user, &self.command, &self.version, &self.slots, &self.background];
        size_of::<Totals>() + texts.iter().map(|text| text.len()).sum::<usize>()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::look::stat_reader::tests::ended;
    use neap_pressure::Pressure;

    /// The totals of a process with these numbers.
    pub(crate) fn totals(text: &str) -> Totals {
        let mut process = ended();
        process.name = "server".into();
        Totals::sum(&process, &serde_json::from_str(text).unwrap(), 0).unwrap()
    }

    #[test]
    fn sums_are_bytes_and_count_no_page_twice() {
        let totals = totals(
            r#"{"version":"9.9","mode":{"slots":"rseq","background":"awake","page_size":4096},
            "bytes":{"used":100,"cached":20,"free_resident":28672,"tables":50},"per_cpu":{"used":5,"free":6},
            "groups":{"live":1},"container":{"limit":9,"used":8,"looks":1,"pressure":"low"},
            "pages":{"listed":3,"backed_free":4,"budget":2},"released":{"pages":5},
            "lists":{"need_pages":6,"need_drains":7},"ticks":8,"refused":9,"shrunk":10}"#,
        );
        assert_eq!((totals.resident, totals.in_use, totals.cached()), (2048 << 10, 100, 20 + 3 * 4096 + 6));
        assert_eq!((totals.free, totals.limit, totals.headroom()), (4 * 4096, Some(8192), Some(8192 - 150)));
        assert_eq!((totals.released, totals.reclaimed, totals.shortages, totals.ticks), (5 * 4096, 6 * 4096, 7, 8));
        let container = totals.container.map(|container| (container.limit, container.used, container.pressure));
        assert_eq!((container, totals.has_groups), (Some((9, 8, Some(Pressure::Low))), true));
        assert_eq!((totals.refused, totals.shrunk), (9, 10));
        assert!(totals.minor_faults > 0);
    }

    #[test]
    fn numbers_that_cannot_be_true_overflow_nothing() {
        let most = u64::MAX;
        let totals = totals(&format!(
            r#"{{"mode":{{"slots":"{}","page_size":{most}}},"bytes":{{"used":{most},"cached":{most},"tables":{most}}},
            "pages":{{"listed":{most},"backed_free":{most},"budget":2}},"per_cpu":{{"free":{most}}}}}"#,
            "s".repeat(500)
        ));
        assert_eq!((totals.cached(), totals.headroom(), totals.slots.len()), (most, Some(0), LONGEST));
        assert_eq!((totals.container, totals.has_groups), (None, false));
    }
}
