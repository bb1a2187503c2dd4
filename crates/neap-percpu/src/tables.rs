//! The tables of an instance: which there are, and where each of them lies.

use crate::chunk::Parts;
use crate::geometry::Geometry;
use crate::pool::Pool;
use crate::rows::{Record, Row};
use core::ptr::with_exposed_provenance_mut;
use neap_base::platform::memory::{Range, SCATTERED_RANGES};

/// Maximum number of owners at a time, even if more rows are possible.
const OWNERS: u32 = 1 << 22;

/// Addresses of the tables, in the order in which they lie.
#[derive(Debug)]
pub(crate) struct Tables {
    /// Room for the ranges of a release.
    pub(crate) ranges: *mut Range,
    /// Room for the numbers of all chunks.
    pub(crate) stack: *mut u32,
    /// By CPU: the index of its copy in its group.
    pub(crate) columns: *mut usize,
    /// By class and CPU: the offset of the CPU's copy from the first copy. For class 0, the start
    /// of the CPU's group. Another class's offsets are written when it is first used.
    pub(crate) offsets: *mut usize,
    /// By class and CPU: the offset, or `usize::MAX` for an isolated CPU. Equals `offsets` if no
    /// CPU is isolated.
    pub(crate) fenced: *mut usize,
    /// Tables of the chunks. The tables above are open from the start; this one and those below
    /// grow.
    pub(crate) chunks: usize,
    /// [`Pool`] of the rows.
    pub(crate) rows: usize,
    /// [`Pool`] of the owners' records.
    pub(crate) owners: usize,
    /// End of the last table's page.
    pub(crate) end: usize,
}

/// Carves pieces out of a range.
struct Carver(usize);

impl Carver {
    fn piece(&mut self, bytes: usize, align: usize) -> usize {
        let start = self.0.next_multiple_of(align);
        self.0 = start + bytes;
        start
    }

    /// A table on cache lines of its own.
    fn table<T>(&mut self, count: usize) -> *mut T {
        with_exposed_provenance_mut(self.piece(count * size_of::<T>(), 64))
    }
}

impl Tables {
    /// Lays the tables out from `first` on, a multiple of `page`, which is the platform's page
    /// size.
    pub(crate) fn at(first: usize, geometry: &Geometry, parts: &Parts, page: usize) -> Tables {
        let mut carver = Carver(first);
        Tables {
            ranges: carver.table(SCATTERED_RANGES),
            stack: carver.table(geometry.chunks),
            columns: carver.table(geometry.cpus),
            offsets: carver.table(geometry.classes() * geometry.cpus),
            fenced: carver.table(geometry.classes() * geometry.cpus),
            chunks: carver.piece(parts.length * geometry.chunks, page),
            rows: carver.piece(Pool::<Row>::bytes(most_rows(geometry)), page),
            owners: carver.piece(Pool::<Record>::bytes(most_owners(geometry)), page),
            end: carver.piece(0, page),
        }
    }
}

pub(crate) fn most_rows(geometry: &Geometry) -> u32 {
    (geometry.chunks * geometry.grains) as u32
}

pub(crate) fn most_owners(geometry: &Geometry) -> u32 {
    OWNERS.min(most_rows(geometry)) + 1
}

#[cfg(test)]
mod tests {
    use crate::data::{OffsetsOf, PerCpuData, Wait};
    use crate::geometry::Shape;
    use crate::rows::Owner;
    use neap_os::topology::CpuSet;
    use neap_testing::virtual_platform::Virtual;

    #[test]
    fn fenced_table_has_no_offset_of_isolated_cpus() {
        for isolated in ["", "1", "0-3"] {
            let isolated = CpuSet::parse(isolated.as_bytes()).unwrap();
            let machine = Virtual::new(4096, 4).with_isolated(isolated);
            let data = PerCpuData::open(&machine, &Shape::usual(4), |_| 0, ()).unwrap();
            // Of several classes, and of class 0 again.
            for size in [8, 64, 500, 8] {
                let handle = data.allocate(&machine, Owner::NONE, size, 8, Wait::Long).unwrap();
                for cpu in 0..4 {
                    let [all, fenced] = [OffsetsOf::AllCpus, OffsetsOf::FencedCpus].map(|of| {
                        let table = core::ptr::with_exposed_provenance::<usize>(data.offsets(handle, of));
                        // SAFETY: the handle's tables have an entry for each of the 4 CPUs.
                        unsafe { *table.add(cpu) }
                    });
                    assert_eq!(handle.address() + all, data.address(handle, cpu).addr());
                    let expected = if isolated.contains(cpu) { usize::MAX } else { all };
                    assert_eq!(fenced, expected, "CPU {cpu}, {size} bytes, {isolated:?}");
                }
            }
            // SAFETY: no code uses the instance any more.
            unsafe { data.close(&machine) };
        }
    }
}
