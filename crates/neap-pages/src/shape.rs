//! The shape of an arena: its span, its budget and the tables beside it.

use crate::policy;

/// The batch scale unless another is set.
pub const BATCH_SCALE: u32 = policy::DOUBLINGS;

/// The largest batch scale.
pub const MOST_BATCH_SCALE: u32 = policy::MOST_DOUBLINGS;

/// Number of side tables that the layer above may have.
pub const TABLES: usize = 7;

/// Number of side tables, from the first, for which the arena records where they have memory. Only
/// these may be [droppable](SideTable::droppable) or [early](SideTable::early).
pub const MARKED: usize = 6;

/// A table of one byte per 2^shift bytes of the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SideTable {
    /// 0: no such table.
    pub shift: u8,
    /// Unused bytes in front of the first byte, less than a page.
    pub lead: u8,
    /// Whether the table's memory is released with a chunk's memory. The table's bytes for a free
    /// chunk must mean the same as zeroes. Only for shifts up to 10. With a lead, the pages at both
    /// ends of the part stay, since they may have bytes of other chunks.
    pub droppable: bool,
    /// Whether the table's part for a block is populated whenever the block is. The part is a page
    /// or two, and threads write to it under locks.
    pub brief: bool,
    /// Whether the table's part is populated together with a block: one for small blocks, or one
    /// for which the caller will write to early tables.
    pub early: bool,
}

/// What a caller does with the [early tables](SideTable::early) of a new block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlyTables {
    /// It will write to them.
    Written,
    /// It will not write to them soon.
    Untouched,
}

/// Configuration of an arena.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The most address space that the arena may take, in bytes.
    pub span: usize,
    /// The most pages that may be in use.
    pub budget: Option<u32>,
    /// Side tables of the layer above.
    pub tables: [SideTable; TABLES],
    /// Whether fresh memory may be populated as huge pages, and runs may have them, if the system
    /// supplies huge pages of 2 MiB.
    pub huge: bool,
    /// The most pages that a CPU's list keeps. 0 means no lists, `None` a size that is tuned at run
    /// time.
    pub list_high: Option<u32>,
    /// The most doublings of the pages that move at once; at most [`MOST_BATCH_SCALE`].
    pub batch_scale: u32,
}
