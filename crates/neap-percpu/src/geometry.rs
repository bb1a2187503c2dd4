//! Where everything lies: pure arithmetic on sizes, and no memory.
//!
//! Sits below every other file of the crate. Memory is in *groups*; a group's part of a chunk is one range of addresses. A
//! chunk is divided into *grains*, numbered in all groups alike: grain `g` lies at `g * stripe` in each group's part, and a
//! run of grains is a row, in which every CPU of the group has a copy of the row's width, one after the other.
//!
//! | layout | a group is | a grain is, per CPU | a stripe is |
//! |---|---|---|---|
//! | rows | the CPUs of a node | a cache line, 64 bytes | a line for each CPU of the node |
//! | CPU-major | one CPU | 8 bytes | 8 bytes |
//!
//! So CPU-major is rows in groups of one CPU, with finer grains. Page `p` means the page at `p * page` in every group's part,
//! so one page of the maps is `groups` pages of the machine. The address of CPU `c`'s copy is `base + offset[class][c]`, where
//! `base` is the first copy's address, the class is the row's width in lines (0 in CPU-major), and
//! `offset[class][c] = group(c) * group_span + column(c) * width`.

use core::ops::Range;

/// The unit of sizes, and the least alignment of an allocation, in bytes.
pub const GRANULE: usize = 8;
/// The largest allocation, in bytes per CPU.
pub const LARGEST: usize = 32 << 10;
/// A cache line: copies of different CPUs never share one, nor do different owners.
pub const LINE: usize = 64;
/// The largest page, in bytes.
const LARGEST_PAGE: usize = 64 << 10;
/// Rows are at most this many lines wide, or grains where they are finer: a class fits in the bits for it.
pub(crate) const CLASSES: usize = LARGEST_PAGE / LINE + 1;
/// The page for which the kernel's reserve of 2 to 4 is meant, in bytes: with larger ones rows need fewer.
const RESERVED: usize = 4096;
/// The pages of a CPU's part of a chunk, where nothing else is asked for.
const UNIT_PAGES: usize = 16;
/// The largest chunk, in bytes per group: more than any machine's CPUs ask for, and less than what [`Divisor`] cannot do.
const LARGEST_CHUNK: usize = 1 << 36;

/// How copies are laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// All copies of an owner's data together.
    Rows,
    /// All data of a CPU together, as in the kernel; for comparison.
    CpuMajor,
}

/// What an instance is made for.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The layout.
    pub layout: Layout,
    /// CPUs that have a copy of everything, whether they exist yet or not: as many as the machine may ever have.
    pub cpus: usize,
    /// Bytes of a page: a power of two up to 64 KiB, and a multiple of the platform's; 0 for the platform's.
    pub page: usize,
    /// Bytes of a chunk per CPU, a multiple of the page and of 16 KiB, at least [`LARGEST`]; 0 for what is usual.
    pub unit: usize,
    /// Address space in bytes per CPU: the most that can ever be in use at once.
    pub span: usize,
}

impl Shape {
    /// What is usual: rows, the platform's pages, a gibibyte of address space for each CPU.
    pub const fn usual(cpus: usize) -> Shape {
        Shape { layout: Layout::Rows, cpus, page: 0, unit: 0, span: 1 << 30 }
    }
}

/// Divides by a number with one multiplication, as long as dividend and number multiplied are below 2^63: that is 2^64 - 1 over
/// the number, rounded down.
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

/// The smallest multiple of a power of two that is not below a number.
pub(crate) fn round_up(number: usize, power: usize) -> usize {
    debug_assert!(power.is_power_of_two());
    (number + power - 1) & !(power - 1)
}

/// Whether a number is a multiple of a power of two.
pub(crate) fn is_multiple(number: usize, power: usize) -> bool {
    debug_assert!(power.is_power_of_two());
    number & (power - 1) == 0
}

/// Everything that follows from a shape and the nodes. Not to be copied by chance: that takes longer than most of what it is
/// asked for.
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
    /// Grains, granules and pages of a chunk.
    pub(crate) grains: usize,
    pub(crate) granules: usize,
    pub(crate) pages: usize,
    /// Bytes of a chunk, per group.
    pub(crate) chunk: usize,
    /// The most chunks there can be.
    pub(crate) chunks: usize,
    /// Populated pages that are too few for those who may not block: 2, or 8 KiB for each CPU of a group.
    pub(crate) low: usize,
    /// Populated pages that suffice for them: twice as many.
    pub(crate) high: usize,
    /// Empty pages from which on a chunk is emptied at once: a quarter, and never none.
    pub(crate) quarter: usize,
    /// A copy's part of a page, in bytes.
    share: usize,
    by_stripe: Divisor,
    by_pages: Divisor,
}

impl Geometry {
    /// `None` for a shape that makes no sense.
    pub(crate) fn new(shape: &Shape, platform_page: usize, groups: usize, columns: usize) -> Option<Geometry> {
        let page = if shape.page == 0 { platform_page } else { shape.page };
        if !page.is_power_of_two() || !page.is_multiple_of(platform_page) || page > LARGEST_PAGE || shape.cpus == 0 {
            return None;
        }
        let unit = if shape.unit == 0 { UNIT_PAGES * page } else { shape.unit };
        let grain = if shape.layout == Layout::Rows { LINE } else { GRANULE };
        let chunk = unit.checked_mul(columns).filter(|chunk| *chunk <= LARGEST_CHUNK)?;
        let whole = unit.is_multiple_of(page) && unit.is_multiple_of(crate::map::BLOCK * LINE) && unit >= LARGEST;
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

    /// The chunk in which so many bytes from the first one's start lie, and how far inside.
    pub(crate) fn chunk_of(&self, offset: usize) -> (usize, usize) {
        let chunk = self.by_pages.quotient(offset >> self.page_shift);
        (chunk, offset - chunk * self.chunk)
    }

    /// The grain in which so many bytes from a chunk's start lie.
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

    /// The grains whose number is a multiple of this begin at a multiple of `align` bytes (a power of two, at most a page).
    pub(crate) fn alignment(&self, align: usize) -> usize {
        align >> self.stripe.trailing_zeros().min(align.trailing_zeros())
    }

    /// The class of a row: what leads to its offsets.
    pub(crate) fn class(&self, width: usize) -> usize {
        if self.shares() { width } else { 0 }
    }

    /// Classes that there are.
    pub(crate) fn classes(&self) -> usize {
        if self.shares() { CLASSES } else { 1 }
    }

    /// Grains of a new row for a request of so many bytes aligned to `align`, by an owner whose rows are `has` bytes wide so far.
    ///
    /// As wide as the request or as a sixteenth of what the owner has, whichever is more, but the latter no longer than a
    /// page: so many small allocations need few rows, and at most a sixteenth of an owner's memory waits for more of them.
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
