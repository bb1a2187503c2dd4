//! Addresses and sizes of an instance: pure arithmetic, no memory.
//!
//! Memory is divided into *groups* of CPUs, as in the table. A group's part of a chunk is one range
//! of addresses. A chunk is divided into *grains*, numbered in all groups alike. Grain `g` lies at
//! `g * stripe` in each group's part. A run of grains is a row. In it, every CPU of the group has a
//! copy of the row's width, one after the other.
//!
//! | layout | group | grain, per CPU | stripe |
//! |---|---|---|---|
//! | rows | CPUs of a node | a cache line, 64 bytes | a line for each CPU of the node |
//! | CPU-major | one CPU | 8 bytes | 8 bytes |
//!
//! So the CPU-major layout has rows in groups of one CPU, with finer grains. Page `p` is the page
//! at `p * page` in every group's part. One page of the maps is therefore `groups` pages of the
//! machine. The address of CPU `c`'s copy is `base + offset[class][c]`:
//!
//! * `base` is the first copy's address.
//! * The class is the row's width in cache lines, 0 in CPU-major.
//! * `offset[class][c] = group(c) * group_span + column(c) * width`.

use core::ops::Range;

/// The unit of sizes, and the least alignment of an allocation, in bytes.
pub const GRANULE: usize = 8;
/// The largest allocation, in bytes per CPU.
pub const LARGEST: usize = 32 << 10;
/// A cache line in bytes. Copies of different CPUs never share one. In the layout [`Layout::Rows`],
/// copies of different owners do not either.
pub const LINE: usize = 64;
/// The largest page, in bytes.
const LARGEST_PAGE: usize = 64 << 10;
/// Number of classes: one more than a row's maximum width in lines. The bits of a handle suffice.
pub(crate) const CLASSES: usize = LARGEST_PAGE / LINE + 1;
/// Page size in bytes for which the reserve has 2 to 4 pages for each CPU of a group. With larger
/// pages, rows need fewer.
const RESERVED: usize = 4096;
/// Pages of a CPU's part of a chunk, by default.
const UNIT_PAGES: usize = 16;
/// The largest chunk, in bytes per group. The CPUs of any machine need less, and [`Divisor`] works
/// for more.
const LARGEST_CHUNK: usize = 1 << 36;

/// Arrangement of copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// All copies of an owner's data together.
    Rows,
    /// All data of a CPU together, as in the kernel; for comparison.
    CpuMajor,
}

/// Parameters of an instance.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The layout.
    pub layout: Layout,
    /// Number of CPUs that have copies, whether they exist yet or not: the maximum of the machine.
    pub cpus: usize,
    /// Bytes of a page: a power of two up to 64 KiB, and a multiple of the platform's page. 0
    /// stands for the platform's page.
    pub page: usize,
    /// Bytes of a chunk per CPU: a multiple of the page and of 16 KiB, at least [`LARGEST`]. 0
    /// stands for 16 pages.
    pub unit: usize,
    /// Bytes of address space per CPU, which bound the memory in use at once.
    pub span: usize,
}

impl Shape {
    /// The default shape: rows, the platform's pages, 1 GiB of address space for each CPU.
    pub const fn usual(cpus: usize) -> Shape {
        Shape { layout: Layout::Rows, cpus, page: 0, unit: 0, span: 1 << 30 }
    }
}

/// The place of a byte in the chunks of one group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkOffset {
    /// Number of the chunk.
    pub(crate) chunk: usize,
    /// Bytes from the chunk's start.
    pub(crate) inside: usize,
}

/// Divides by a number with one multiplication. The dividend times the number must be below 2^63.
/// Holds 2^64 - 1 divided by the number, rounded down.
#[derive(Clone, Copy, Debug)]
struct Divisor(u64);

impl Divisor {
    fn new(number: usize) -> Divisor {
        Divisor(u64::MAX / number as u64)
    }

    fn quotient(self, dividend: usize) -> usize {
        ((u128::from(dividend as u64 + 1) * u128::from(self.0)) >> 64) as usize
    }
}

/// The smallest multiple of a power of two that is not below `number`.
pub(crate) fn round_up(number: usize, power: usize) -> usize {
    debug_assert!(power.is_power_of_two());
    (number + power - 1) & !(power - 1)
}

/// Whether `number` is a multiple of a power of two.
pub(crate) fn is_multiple(number: usize, power: usize) -> bool {
    debug_assert!(power.is_power_of_two());
    number & (power - 1) == 0
}

/// All values that follow from a shape and the nodes. Not `Copy`: a copy by accident would take
/// longer than most uses.
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    pub(crate) layout: Layout,
    pub(crate) cpus: usize,
    pub(crate) groups: usize,
    /// CPUs that a group has room for.
    pub(crate) columns: usize,
    pub(crate) page: usize,
    pub(crate) page_shift: u32,
    /// Bytes of a grain, per CPU.
    pub(crate) grain: usize,
    /// Bytes of a grain, per group.
    pub(crate) stripe: usize,
    /// Grains of a chunk. The next two fields: granules and pages of a chunk.
    pub(crate) grains: usize,
    pub(crate) granules: usize,
    pub(crate) pages: usize,
    /// Bytes of a chunk, per group.
    pub(crate) chunk: usize,
    /// Maximum number of chunks.
    pub(crate) chunks: usize,
    /// Reserve in pages below which the worker is needed: 2, or 8 KiB for each CPU of a group.
    pub(crate) low: usize,
    /// Reserve in pages that the worker fills up to: twice `low`.
    pub(crate) high: usize,
    /// The fewest empty pages with which a chunk is isolated at a free: a quarter of its pages, at
    /// least 1.
    pub(crate) quarter: usize,
    /// Bytes of a page that belong to one copy.
    share: usize,
    by_stripe: Divisor,
    by_pages: Divisor,
}

impl Geometry {
    /// Computes the geometry; `None` for an invalid shape.
    pub(crate) fn new(shape: &Shape, platform_page: usize, groups: usize, columns: usize) -> Option<Geometry> {
        let page = if shape.page == 0 { platform_page } else { shape.page };
        if !page.is_power_of_two() || !page.is_multiple_of(platform_page) || page > LARGEST_PAGE || shape.cpus == 0 {
            return None;
        }
        let unit = if shape.unit == 0 { UNIT_PAGES * page } else { shape.unit };
        let grain = if shape.layout == Layout::Rows { LINE } else { GRANULE };
        let chunk = unit.checked_mul(columns).filter(|chunk| *chunk <= LARGEST_CHUNK)?;
        let whole =
            unit.is_multiple_of(page) && unit.is_multiple_of(crate::alloc_bitmap::BLOCK * LINE) && unit >= LARGEST;
        let (pages, stripe) = (chunk / page, grain * columns);
        let low = (2 * RESERVED * columns / page).max(2);
        let chunks = (shape.span / unit.max(1)).min(u32::MAX as usize / (unit / grain).max(1));
        (whole && chunks > 0).then_some(Geometry {
            layout: shape.layout,
            cpus: shape.cpus,
            groups,
            columns,
            page,
            page_shift: page.trailing_zeros(),
            grain,
            stripe,
            grains: unit / grain,
            granules: unit / GRANULE,
            pages,
            chunk,
            chunks,
            low,
            high: 2 * low,
            quarter: (pages / 4).max(1),
            share: page / columns,
            by_stripe: Divisor::new(stripe),
            by_pages: Divisor::new(pages.max(1)),
        })
    }

    /// Bytes from one group's memory to the next one's.
    pub(crate) fn group_span(&self) -> usize {
        self.chunk * self.chunks
    }

    /// Whether allocations share rows.
    pub(crate) fn shares(&self) -> bool {
        self.layout == Layout::Rows
    }

    /// Granules of a grain.
    pub(crate) fn grain_granules(&self) -> usize {
        self.grain / GRANULE
    }

    /// The place of the byte `offset` bytes from the first chunk's start.
    pub(crate) fn chunk_of(&self, offset: usize) -> ChunkOffset {
        let chunk = self.by_pages.quotient(offset >> self.page_shift);
        ChunkOffset { chunk, inside: offset - chunk * self.chunk }
    }

    /// The grain that contains byte `offset` from a chunk's start.
    pub(crate) fn grain_at(&self, offset: usize) -> usize {
        self.by_stripe.quotient(offset)
    }

    /// The pages that a run of grains touches.
    pub(crate) fn pages_of(&self, start: usize, end: usize) -> Range<usize> {
        let shift = self.page_shift;
        (start * self.stripe) >> shift..(end * self.stripe + self.page - 1) >> shift
    }

    /// The grains that touch a page.
    pub(crate) fn grains_of(&self, page: usize) -> Range<usize> {
        self.grain_at(page << self.page_shift)..self.grain_after(page)
    }

    /// The first grain that lies wholly behind a page.
    pub(crate) fn grain_after(&self, page: usize) -> usize {
        self.grain_at(((page + 1) << self.page_shift) + self.stripe - 1)
    }

    /// Grains whose number is a multiple of the result begin at a multiple of `align` bytes.
    /// `align` is a power of two, at most a page.
    pub(crate) fn alignment(&self, align: usize) -> usize {
        align >> self.stripe.trailing_zeros().min(align.trailing_zeros())
    }

    /// The class of a row of `width` grains, which selects its offsets.
    pub(crate) fn class(&self, width: usize) -> usize {
        if self.shares() { width } else { 0 }
    }

    /// Number of classes.
    pub(crate) fn classes(&self) -> usize {
        if self.shares() { CLASSES } else { 1 }
    }

    /// Grains of a new row for a request of `size` bytes aligned to `align`. The owner's rows are
    /// `has` bytes wide so far.
    ///
    /// The row is as wide as the request, or as a sixteenth of the owner's rows (at most a page),
    /// whichever is more. So many small allocations need few rows. At most a sixteenth of an
    /// owner's memory is unused, besides the losses of rounding.
    pub(crate) fn row(&self, size: usize, align: usize, has: u64) -> usize {
        if !self.shares() {
            return size.div_ceil(GRANULE);
        }
        let room = (has / 16).min(self.share as u64) as usize / LINE * LINE;
        // Every copy begins at a multiple of the alignment if the first does and the width is one.
        round_up(size.max(room), align.max(LINE)) / LINE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(layout: Layout, page: usize, columns: usize) -> Geometry {
        let (groups, columns) = if layout == Layout::Rows { (1, columns) } else { (columns, 1) };
        let shape = Shape { layout, page, ..Shape::usual(groups * columns) };
        Geometry::new(&shape, 4096, groups, columns).unwrap()
    }

    #[test]
    fn a_multiplication_divides_as_a_division() {
        for number in (1..300).chain([1 << 20, (1 << 24) - 1, 1 << 24, 3 << 25]) {
            let divisor = Divisor::new(number);
            let most = (1 << 63) / number - 1;
            for multiple in [0, 1, 2, 1000, 999_999, most / number / 2, most / number] {
                let exact = multiple.min(most / number) * number;
                for dividend in exact.saturating_sub(2)..exact + 3 {
                    assert_eq!(divisor.quotient(dividend), dividend / number, "{dividend} / {number}");
                }
            }
        }
    }

    #[test]
    fn pages_and_grains_name_each_other() {
        for columns in [1, 2, 3, 7, 32, 224] {
            for page in [4096, 16384, 65536] {
                for layout in [Layout::Rows, Layout::CpuMajor] {
                    let g = geometry(layout, page, columns);
                    assert_eq!(g.grains * g.stripe, g.pages * g.page);
                    for at in (0..g.pages).step_by(g.pages / 16 + 1) {
                        for grain in [g.grains_of(at).start, g.grains_of(at).end - 1] {
                            assert!(g.pages_of(grain, grain + 1).contains(&at));
                        }
                        assert!(!g.pages_of(g.grain_after(at), g.grains).contains(&at));
                    }
                }
            }
        }
    }

    #[test]
    fn aligned_grains_begin_at_aligned_addresses() {
        for columns in [1, 2, 3, 6, 224] {
            let g = geometry(Layout::Rows, 4096, columns);
            for align in (0..=12).map(|shift| 1 << shift) {
                let step = g.alignment(align);
                assert!((step * g.stripe).is_multiple_of(align), "{columns} columns, {align}");
                assert!(step == 1 || !(step / 2 * g.stripe).is_multiple_of(align), "not the least");
            }
        }
    }

    #[test]
    fn rows_follow_the_request_until_an_owner_has_much() {
        let g = geometry(Layout::Rows, 4096, 2);
        assert_eq!((g.row(1, 8, 0), g.row(65, 8, 0), g.row(1, 4096, 0)), (1, 2, 64));
        assert_eq!((g.row(600, 8, 1408), g.row(8, 8, 4096), g.row(8, 8, 1 << 20)), (10, 4, 32));
        assert_eq!(geometry(Layout::Rows, 4096, 224).row(8, 8, 1 << 30), 1);
        assert_eq!(geometry(Layout::CpuMajor, 4096, 2).row(600, 8, 1 << 20), 75);
    }

    #[test]
    fn shapes_that_make_no_sense_are_refused() {
        let bad = |change: fn(&mut Shape)| {
            let mut shape = Shape::usual(2);
            change(&mut shape);
            Geometry::new(&shape, 4096, 1, 2).is_none()
        };
        assert!(!bad(|_| ()));
        assert!(bad(|s| s.page = 6000) && bad(|s| s.page = 2048) && bad(|s| s.unit = 100));
        assert!(bad(|s| s.unit = 16384) && bad(|s| s.span = 4096) && bad(|s| s.cpus = 0));
    }
}
