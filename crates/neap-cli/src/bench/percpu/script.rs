//! One run of the script: makes owners, deletes most of them, then the rest. Compares populated
//! with resident memory after each step.
//!
//! The script uses one instance of `neap-percpu`. A worker thread ticks as neap's thread does:
//! every 250 ms, and at once if the instance requests it.

use core::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use neap_base::Linux;
use neap_percpu::{LINE, Owner, PerCpuData, Shape, Statistics, Wait};

/// Bytes per CPU of an owner's allocations, in this order.
pub(super) const SIZES: [usize; 5] = [1400, 600, 24, 8, 8];
const TICK: Duration = Duration::from_millis(250);
/// Interval at which the worker checks for requests, and the script for changes.
const LOOK: Duration = Duration::from_millis(2);
/// Time without a change after which the script expects no further change. It is a little more than
/// three ticks.
const QUIET: Duration = Duration::from_millis(900);
const PATIENCE: Duration = Duration::from_secs(60);

/// Numbers from a seed (SplitMix64).
pub(super) struct SplitMix(pub(super) u64);

impl SplitMix {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// Populated memory in KiB, and the times of its release.
#[derive(Clone, Copy)]
pub(super) struct Trial {
    pub(super) before: f64,
    pub(super) full: f64,
    pub(super) few: f64,
    pub(super) after: f64,
    /// Populated memory for the owners over their requests, and over these rounded to cache lines.
    pub(super) waste: f64,
    pub(super) waste_of_lines: f64,
    /// Milliseconds from the last free until the last page was released; the longer of both times.
    pub(super) returned_ms: f64,
    /// Largest ratio without moving data: all pages over those that keep data.
    pub(super) bound: f64,
}

impl Trial {
    pub(super) fn ratio(&self) -> f64 {
        self.full / self.few
    }
}

/// An instance with a worker.
struct Stage<'a> {
    data: &'a PerCpuData,
    linux: &'a Linux,
}

impl Stage<'_> {
    fn populated(&self) -> usize {
        let Statistics { populated, page, .. } = self.data.statistics();
        populated * page
    }

    /// Waits until the reserve is full.
    fn fill(&self) -> Result<()> {
        let start = Instant::now();
        loop {
            let Statistics { empty, reserve, .. } = self.data.statistics();
            if empty >= reserve {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                bail!("after a minute the reserve is not full");
            }
            thread::sleep(LOOK);
        }
    }

    /// Waits until nothing changes any more. Returns the time of the last change.
    fn settle(&self) -> Result<Instant> {
        let start = Instant::now();
        let (mut seen, mut changed) = (self.populated(), start);
        while changed.elapsed() < QUIET {
            thread::sleep(LOOK);
            let now = self.populated();
            if now != seen {
                (seen, changed) = (now, Instant::now());
            }
            if start.elapsed() > PATIENCE {
                bail!("after a minute pages still come or go");
            }
        }
        Ok(changed)
    }

    /// Returns the populated KiB. Fails if they differ from the resident memory that the kernel
    /// reports.
    fn checked(&self) -> Result<f64> {
        let mut resident = Ok(0);
        self.data.reach(|start, length| {
            if let Ok(sum) = &mut resident {
                match resident_bytes(start, length) {
                    Ok(bytes) => *sum += bytes,
                    Err(error) => resident = Err(error),
                }
            }
        });
        let (populated, resident) = (self.populated(), resident?);
        if populated != resident {
            bail!("{populated} bytes count as populated, {resident} are resident");
        }
        self.data.verify().map_err(|finding| anyhow!("{finding}"))?;
        Ok(populated as f64 / 1024.0)
    }
}

/// Returns the resident bytes of a range, by the kernel.
fn resident_bytes(start: usize, length: usize) -> Result<usize> {
    let page = neap_os::memory::page_size();
    let (mut map, mut pages) = (vec![0_u8; 1 << 16], 0);
    let end = start + length;
    for start in (start..end).step_by(map.len() * page) {
        let length = (end - start).min(map.len() * page);
        // SAFETY: the map is a live local with a byte for each page of the range.
        let answer = unsafe { libc::mincore(core::ptr::with_exposed_provenance_mut(start), length, map.as_mut_ptr()) };
        if answer != 0 {
            return Err(std::io::Error::last_os_error()).context("mincore");
        }
        pages += map[..length / page].iter().filter(|byte| **byte & 1 == 1).count();
    }
    Ok(pages * page)
}

/// Runs the script: an owner for each list of sizes. First the owners in `goes` are closed, then
/// the others.
pub(super) fn run(linux: &Linux, shape: &Shape, owners: &[Vec<usize>], goes: &[bool]) -> Result<Trial> {
    let refused = |error| anyhow!("the allocator was refused memory: {error:?}");
    let data = PerCpuData::open(linux, shape, |_| 0, ()).map_err(refused)?;
    let over = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        scope.spawn(|| {
            let mut last = None::<Instant>;
            while !over.load(Ordering::Relaxed) {
                if data.is_work_wanted() || last.is_none_or(|last| last.elapsed() >= TICK) {
                    data.tick(linux);
                    last = Some(Instant::now());
                }
                thread::sleep(LOOK);
            }
        });
        let outcome = play(&Stage { data: &data, linux }, owners, goes, shape.cpus);
        over.store(true, Ordering::Relaxed);
        outcome
    });
    // SAFETY: the worker has ended. No thread uses `data` or an allocation of it any more.
    unsafe { data.close(linux) };
    outcome
}

fn play(stage: &Stage<'_>, owners: &[Vec<usize>], goes: &[bool], cpus: usize) -> Result<Trial> {
    let Stage { data, linux } = stage;
    stage.fill()?;
    let before = stage.checked()?;
    let refused = |refused| anyhow!("an allocation was refused: {refused}");
    let mut held = Vec::with_capacity(owners.len());
    for sizes in owners {
        let owner = data.open_owner(*linux).map_err(refused)?;
        for &size in sizes {
            data.allocate(*linux, owner, size, 8, Wait::Long).map_err(refused)?;
        }
        held.push(owner);
    }
    stage.fill()?;
    let full = stage.checked()?;
    let (going, staying): (Vec<_>, Vec<_>) = held.into_iter().zip(goes).partition(|(_, goes)| **goes);
    let close = |owners: Vec<(Owner, &bool)>| -> Result<(f64, f64)> {
        for (owner, _) in owners {
            // SAFETY: the script is the only user of the owner's allocations. It no longer uses
            // them, and allocates nothing for the owner meanwhile.
            unsafe { data.close_owner(owner) }.map_err(refused)?;
        }
        let start = Instant::now();
        let gone = stage.settle()?;
        Ok((stage.checked()?, gone.saturating_duration_since(start).as_secs_f64() * 1e3))
    };
    let ((few, first), (after, second)) = (close(going)?, close(staying)?);
    let page = data.statistics().page;
    let sum = |each: fn(&Vec<usize>) -> usize| (owners.iter().map(each).sum::<usize>() * cpus) as f64 / 1024.0;
    Ok(Trial {
        before,
        full,
        few,
        after,
        waste: (full - before) / sum(|sizes| sizes.iter().sum()),
        waste_of_lines: (full - before) / sum(|sizes| sizes.iter().sum::<usize>().next_multiple_of(LINE)),
        returned_ms: first.max(second),
        bound: bound(owners, goes, cpus, page),
    })
}

/// Returns the ratio of all pages to the pages that hold data of remaining owners. Assumes that the
/// data of each owner fills whole cache lines, and directly follows that of the previous owner.
fn bound(owners: &[Vec<usize>], goes: &[bool], cpus: usize, page: usize) -> f64 {
    let (mut at, mut kept, mut beyond) = (0, 0, 0);
    for (sizes, goes) in owners.iter().zip(goes) {
        let end = at + sizes.iter().sum::<usize>().next_multiple_of(LINE) * cpus;
        if !goes {
            let (first, last) = ((at / page).max(beyond), end.div_ceil(page));
            kept += last - first;
            beyond = last;
        }
        at = end;
    }
    at.div_ceil(page) as f64 / f64::from(u32::try_from(kept).unwrap_or(u32::MAX)).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_the_share_of_pages_that_keep_something() {
        let owners = vec![SIZES.to_vec(); 22];
        let every = |step: usize| (0..22).map(|at| at % step != 0).collect::<Vec<bool>>();
        assert_eq!(bound(&owners, &every(11), 2, 4096), 11.0);
        // Two pages each; a page of four; one of two, and a half that the next owner shares.
        assert_eq!(bound(&owners, &every(11), 4, 4096), 11.0);
        assert_eq!(bound(&owners, &every(4), 2, 16384), 1.0);
        assert_eq!(bound(&owners, &every(11), 3, 4096), 33.0 / 4.0);
    }
}
