//! Costs of operations, with the origin of each number.
//!
//! Two numbers are calibrated, both with one line of one published table: page_fault1 with 56
//! processes on the unchanged kernel. That line has 34.3 GB/s, and 60.9 % of all cycles in the zone
//! lock. All other costs are measured, published or assumed, and labelled so. They do not depend on
//! the policy.

use crate::setup::ListLock;

/// Published for page_fault1 with 56 processes on the unchanged kernel: bytes a second.
pub const BASE_THROUGHPUT: f64 = 34.3e9;
/// Published for page_fault1 with 56 processes: share of cycles in the zone lock's slow path.
pub const BASE_LOCK_SHARE: f64 = 0.609;
/// Processes in that run, each on a CPU of its own.
pub const BASE_CPUS: f64 = 56.0;
/// Pages that move in one visit of an unchanged list.
pub const BASE_BATCH: f64 = 63.0;
/// Bytes of a page.
pub const PAGE: f64 = 4096.0;

/// Nanoseconds of a pop from or push onto a CPU's list, under a tried lock.
const LIST: u64 = 12;
/// Nanoseconds of a pop or push without a lock.
const LIST_WITHOUT_LOCK: u64 = 3;
/// Nanoseconds of a pop or push under a spin lock that also keeps interrupts off.
const LIST_WITH_INTERRUPTS_OFF: u64 = 28;
/// Nanoseconds of taking one page off a list of another CPU, under its lock.
pub const CUT: u64 = 2;
/// Nanoseconds of taking and releasing a free zone lock.
pub const LOCK: u64 = 40;
/// Additional nanoseconds if another CPU held the lock before.
pub const HANDOVER: u64 = 100;
/// From a wake-up to the woken thread's first instruction, in nanoseconds.
pub const WAKE: u64 = 3_000;

/// Factor for the time of lists and zone if each CPU is one of two hardware threads of a core. Two
/// threads are together about 1.3 times as fast as one, so each has 0.65 of a core.
pub const SIBLING: f64 = 2.0 / 1.3;

/// Pages of a fault a second in the base, over all CPUs.
pub fn base_pages() -> f64 {
    BASE_THROUGHPUT / PAGE
}

/// Nanoseconds under the zone's lock for each page that moves. In the calibrated run the lock is
/// never free, so the published throughput gives the time of a visit. A visit moves 63 pages, and
/// each page moves out of the zone once and into it once.
pub fn page_move() -> f64 {
    let visits = 2.0 * base_pages() / BASE_BATCH;
    (1e9 / visits - (LOCK + HANDOVER) as f64) / BASE_BATCH
}

/// Nanoseconds of a CPU for a page: fault, clearing and unmapping together. List and zone are not
/// included.
pub fn page_work() -> f64 {
    let all = BASE_CPUS * 1e9 / base_pages() * (1.0 - BASE_LOCK_SHARE);
    let visits = 2.0 / BASE_BATCH * (LOCK + HANDOVER) as f64;
    all - 2.0 * LIST as f64 - 2.0 * page_move() - visits
}

fn slowed(nanoseconds: f64, siblings: bool) -> u64 {
    (nanoseconds * if siblings { SIBLING } else { 1.0 }) as u64
}

/// Nanoseconds of a pop or push under a list's lock. `siblings`: CPUs are hardware threads of
/// shared cores.
pub fn list(lock: ListLock, siblings: bool) -> u64 {
    let alone = match lock {
        ListLock::None => LIST_WITHOUT_LOCK,
        ListLock::Blocking => LIST_WITH_INTERRUPTS_OFF,
        ListLock::Try => LIST,
    };
    slowed(alone as f64, siblings)
}

/// State of the zone's lock when a CPU wants it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ZoneLock {
    /// No other CPU holds it.
    Free,
    /// Another CPU hands it over.
    HandedOver,
}

/// Nanoseconds of a hold of the zone's lock in which `pages` pages move. `siblings`: CPUs are
/// hardware threads of shared cores.
pub fn hold(pages: u32, found: ZoneLock, siblings: bool) -> u64 {
    let handover = if found == ZoneLock::HandedOver { HANDOVER } else { 0 };
    let alone = (LOCK + handover) as f64 + f64::from(pages) * page_move();
    slowed(alone, siblings)
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Cost {
    /// The operation.
    pub name: &'static str,
    /// In nanoseconds.
    pub value: f64,
    /// Origin of the number.
    pub source: &'static str,
}

/// All lines.
pub fn table() -> Vec<Cost> {
    let cost = |name, value, source| Cost { name, value, source };
    vec![
        cost("pop or push, list lock by compare-and-swap", LIST as f64, "measured on a Xeon with Golden Cove cores"),
        cost("the same without a lock", LIST_WITHOUT_LOCK as f64, "measured there: 2.6 ns"),
        cost(
            "the same with a spin lock and interrupts off",
            LIST_WITH_INTERRUPTS_OFF as f64,
            "assumed: the lock, and 16 ns for saving, clearing and restoring the flag",
        ),
        cost("cutting a page off another CPU's list", CUT as f64, "assumed: one link followed in the cache"),
        cost("zone lock, free", LOCK as f64, "assumed: two locked instructions on a line that is elsewhere"),
        cost("zone lock, more if it was held", HANDOVER as f64, "assumed: a line between two cores of a socket"),
        cost("a page moved under the zone lock", page_move(), "calibrated: published 34.3 GB/s at 56 CPUs"),
        cost("the rest of a page's life", page_work(), "calibrated: published 60.9 % in the lock at 56 CPUs"),
        cost("times as long where two CPUs share a core", SIBLING, "assumed: two threads do 1.3 times what one does"),
        cost("waking a thread", WAKE as f64, "assumed"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calibrated_numbers_are_of_the_size_that_is_known() {
        // Clearing a page takes some hundred nanoseconds at best, and a fault about a thousand.
        // Moving a page takes a few cache misses.
        assert!((1000.0..3000.0).contains(&page_work()), "{}", page_work());
        assert!((20.0..100.0).contains(&page_move()), "{}", page_move());
        // The number of visits that fill a second.
        let visits = 2.0 * base_pages() / BASE_BATCH;
        assert!(
            (hold(63, ZoneLock::HandedOver, false) as f64 * visits / 1e9 - 1.0).abs() < 0.001,
            "{}",
            hold(63, ZoneLock::HandedOver, false)
        );
    }
}
