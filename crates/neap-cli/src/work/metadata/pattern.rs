//! The look-ups of a build: units of eight tenants, and headers that all of them share.
//!
//! # Design
//! A unit has a few files of its own. It includes headers drawn from a Zipf distribution: the
//! header of rank r has the weight 1/r. An include first looks for the header in directories that
//! do not have it, then in the right one. A unit always includes the same headers. A worker
//! compiles units of its tenant that it draws at random.
//!
//! # Invariants
//! The sorted paths and the fixed seed determine all look-ups, so they are the same in every run.

use std::collections::HashSet;
use std::convert::Infallible;
use std::ffi::OsStr;

use super::files::{ValueKind, bytes_of};
use super::tree::{Tree, directory_of, moved_to};
use crate::work::meter::Random;

/// Tenants, each with its own units.
pub(crate) const TENANTS: usize = 8;
/// Threads of a tenant.
pub(super) const WORKERS: usize = 3;

/// Files of a unit's own.
const OWN: usize = 6;
/// Headers that a unit includes at most.
const INCLUDED: usize = 24;
/// Most headers, and the part of all small files that are headers at most.
const HEADERS: usize = 4000;
const HEADER_PART: usize = 4;
/// Most units of a tenant.
const UNITS: usize = 300;
/// Directories of the include path that precede a header's own at most.
const SEARCHED: usize = 3;
/// Weight of the header of rank 1.
const WEIGHT: usize = 1 << 20;
const SEED: u64 = 1;

struct SharedHeader {
    file: usize,
    /// Paths where a compiler looks for it before it is found.
    probes: Vec<Box<OsStr>>,
}

/// A unit of compilation.
pub(super) struct Unit {
    /// Indexes of files.
    own: [usize; OWN],
    /// Ranks, ascending.
    headers: Vec<usize>,
}

pub(super) struct Pattern<'t> {
    tree: &'t Tree,
    headers: Vec<SharedHeader>,
    /// Units by tenant.
    units: Vec<Vec<Unit>>,
}

impl<'t> Pattern<'t> {
    pub(super) fn new(tree: &'t Tree) -> Pattern<'t> {
        let mut random = Random::new(SEED);
        let mut small: Vec<usize> = (0..tree.files.len()).filter(|&file| tree.files[file].is_small()).collect();
        for last in (1..small.len()).rev() {
            small.swap(last, random.below(last + 1));
        }
        let (headers, own) = small.split_at((small.len() / HEADER_PART).min(HEADERS));
        let headers = with_probes(tree, headers);
        let sums: Vec<usize> = (1..=headers.len())
            .scan(0, |sum, rank| {
                *sum += WEIGHT / rank;
                Some(*sum)
            })
            .collect();
        let each = (own.len() / (TENANTS * OWN)).clamp(1, UNITS);
        let mut own = own.iter().copied().cycle();
        let mut unit = || {
            let draw = |_| {
                let drawn = random.below(sums[sums.len() - 1]);
                sums.partition_point(|sum| *sum <= drawn)
            };
            let mut headers: Vec<usize> = (0..INCLUDED).map(draw).collect();
            headers.sort_unstable();
            headers.dedup();
            Unit { own: std::array::from_fn(|_| own.next().unwrap_or(0)), headers }
        };
        let units = (0..TENANTS).map(|_| (0..each).map(|_| unit()).collect()).collect();
        Pattern { tree, headers, units }
    }

    /// Returns the units that a worker of a tenant compiles, without end.
    pub(super) fn units_of(&self, tenant: usize, worker: usize) -> impl Iterator<Item = &Unit> {
        let (mut random, units) = (Random::new(SEED + 1 + (tenant * WORKERS + worker) as u64), &self.units[tenant]);
        std::iter::repeat_with(move || &units[random.below(units.len())])
    }

    /// Calls `look_up` with the look-ups of a unit, in order.
    ///
    /// # Errors
    /// Returns the first error of `look_up`. The remaining look-ups are then not made.
    pub(super) fn compile<'p, E>(
        &'p self,
        unit: &Unit,
        mut look_up: impl FnMut(ValueKind, &'p OsStr) -> Result<(), E>,
    ) -> Result<(), E> {
        let files = &self.tree.files;
        for file in unit.own {
            read(&files[file].path, &mut look_up)?;
        }
        for header in unit.headers.iter().map(|&rank| &self.headers[rank]) {
            header.probes.iter().try_for_each(|probe| look_up(ValueKind::Stat, probe))?;
            read(&files[header.file].path, &mut look_up)?;
        }
        Ok(())
    }

    /// Returns the bytes of all values that units look up.
    pub(super) fn working_set(&self) -> u64 {
        let mut values = HashSet::new();
        for unit in self.units.iter().flatten() {
            let Ok(()) = self.compile(unit, |what, path| {
                values.insert((what, path));
                Ok::<(), Infallible>(())
            });
        }
        values.into_iter().map(|(what, path)| bytes_of(path, self.content_bytes(what, path))).sum()
    }

    fn content_bytes(&self, what: ValueKind, path: &OsStr) -> u64 {
        let files = &self.tree.files;
        let found = files.binary_search_by(|file| (*file.path).cmp(path)).ok().filter(|_| what == ValueKind::Content);
        found.map_or(0, |file| files[file].bytes)
    }
}

/// Looks up the directory of a file, the file, and its content.
fn read<'p, E>(path: &'p OsStr, look_up: &mut impl FnMut(ValueKind, &'p OsStr) -> Result<(), E>) -> Result<(), E> {
    look_up(ValueKind::Stat, directory_of(path))?;
    look_up(ValueKind::Stat, path)?;
    look_up(ValueKind::Content, path)
}

/// Makes headers of these files. The include path is the directories of the first files.
fn with_probes(tree: &Tree, files: &[usize]) -> Vec<SharedHeader> {
    let mut searched: Vec<&OsStr> = Vec::new();
    for &file in files {
        let directory = directory_of(&tree.files[file].path);
        if searched.len() < SEARCHED && !searched.contains(&directory) {
            searched.push(directory);
        }
    }
    let header = |(rank, &file): (usize, &usize)| {
        let path = &tree.files[file].path;
        let before = &searched[..(rank % (SEARCHED + 1)).min(searched.len())];
        let before = before.iter().filter(|directory| **directory != directory_of(path));
        SharedHeader { file, probes: before.map(|directory| moved_to(directory, path)).collect() }
    };
    files.iter().enumerate().map(header).collect()
}

#[cfg(test)]
mod tests {
    use super::super::made::Made;
    use super::*;
    use std::path::Path;

    /// The look-ups of some units of each worker.
    fn look_ups(pattern: &Pattern<'_>) -> Vec<(ValueKind, std::ffi::OsString)> {
        let mut all = Vec::new();
        for (tenant, worker) in (0..TENANTS).flat_map(|tenant| (0..WORKERS).map(move |worker| (tenant, worker))) {
            for unit in pattern.units_of(tenant, worker).take(20) {
                let Ok(()) = pattern.compile(unit, |what, path| {
                    all.push((what, path.to_os_string()));
                    Ok::<(), Infallible>(())
                });
            }
        }
        all
    }

    #[test]
    fn two_runs_make_equal_look_ups_in_equal_order() {
        let made = Made::new("equal", 2000);
        let trees = [(); 2].map(|()| Tree::walk(&made.0).unwrap());
        let [one, other] = trees.each_ref().map(|tree| look_ups(&Pattern::new(tree)));
        assert!(one == other && one.len() > 20_000, "{} and {} look-ups", one.len(), other.len());
    }

    #[test]
    fn workers_of_a_tenant_share_its_units_and_draw_their_own() {
        let made = Made::new("workers", 2000);
        let tree = Tree::walk(&made.0).unwrap();
        let pattern = Pattern::new(&tree);
        assert_eq!(pattern.units.len(), TENANTS);
        let drawn = |tenant, worker| -> Vec<[usize; OWN]> {
            pattern.units_of(tenant, worker).take(50).map(|unit| unit.own).collect()
        };
        assert_ne!(drawn(0, 0), drawn(0, 1));
        let of = |tenant: usize| -> HashSet<usize> { pattern.units[tenant].iter().flat_map(|unit| unit.own).collect() };
        assert!((1..TENANTS).all(|tenant| of(tenant).is_disjoint(&of(0))), "no file is two tenants'");
    }

    #[test]
    fn headers_are_shared_with_few_that_most_units_include() {
        let made = Made::new("headers", 2000);
        let tree = Tree::walk(&made.0).unwrap();
        let pattern = Pattern::new(&tree);
        let units: Vec<&Unit> = pattern.units.iter().flatten().collect();
        let share =
            |rank: usize| units.iter().filter(|unit| unit.headers.contains(&rank)).count() as f64 / units.len() as f64;
        assert_eq!(pattern.headers.len(), 500);
        // 1/r over the sum of 500: a draw is the first header with 0.147, and 24 are 0.98.
        assert!(share(0) > 0.9, "{}", share(0));
        let (tenth, last) = (share(9), share(499));
        assert!(tenth < 0.6 && last < 0.1 && tenth > last, "{tenth}, {last}");
    }

    #[test]
    fn probes_are_missing_paths_of_the_include_path() {
        let made = Made::new("probes", 2000);
        let tree = Tree::walk(&made.0).unwrap();
        let pattern = Pattern::new(&tree);
        let probes: Vec<&OsStr> =
            pattern.headers.iter().flat_map(|header| header.probes.iter().map(|p| &**p)).collect();
        assert!(probes.len() > pattern.headers.len(), "{}", probes.len());
        assert!(probes.iter().all(|probe| !Path::new(probe).exists()));
        assert!(pattern.headers.iter().all(|header| header.probes.len() <= SEARCHED));
    }

    #[test]
    fn working_set_counts_every_value_once() {
        let made = Made::new("set", 300);
        let tree = Tree::walk(&made.0).unwrap();
        let pattern = Pattern::new(&tree);
        let contents: u64 = tree.files.iter().map(|file| file.bytes).sum();
        let set = pattern.working_set();
        assert!(set > contents / 2 && set < 4 * contents, "{set} of {contents}");
    }
}
