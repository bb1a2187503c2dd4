//! Sources of memory, to which reconciliation attributes bytes, and a manager's counters of each.
//! This module has only types, and counts nothing.

use neap_base::listed_enum;
use neap_groups::Kind;
use neap_pages::Use;

listed_enum! {
    /// The origin of memory. The variants are in the order of reports.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u8)]
    pub enum Source {
        /// Slabs: see [`Held`].
        Slabs = "slabs of objects",
        /// Runs of pages that the program has.
        Runs = "runs of pages in use",
        /// Blocks of pages that are neither slabs nor runs.
        Blocks = "blocks that are neither",
        /// Pages in CPUs' lists.
        Listed = "pages in CPUs' lists",
        /// Free pages that have memory.
        FreeBacked = "free pages, kept",
        /// Free pages that were released.
        Free = "free pages, given back",
        /// Pages on their way to or from the system, or from a list.
        Travelling = "pages on their way",
        /// Pages of the arena that cannot be examined one by one, or that changed between two
        /// looks.
        Arena = "arena, not seen by the page",
        /// Frames, and maps of pages.
        PageTables = "frames and maps of pages",
        /// State bytes of objects.
        States = "state bytes of objects",
        /// Kinds of pages, and descriptors of slabs.
        SlabTables = "kinds of pages, slabs",
        /// Lists of pages, by CPU and node.
        Lists = "lists of pages",
        /// Stacks of objects, by CPU.
        Stacks = "stacks of objects",
        /// The state of ticks.
        Ticks = "what ticks remember",
        /// Per-CPU data.
        PerCpuData = "per-CPU data",
        /// Tables of per-CPU data.
        PerCpuTables = "tables of per-CPU data",
        /// Groups, ids, stocks, waiters and listeners.
        Groups = "memory groups",
        /// The page of numbers.
        Numbers = "page of numbers",
        /// Guarded samples and their table.
        Guarded = "guarded samples",
        /// The program, its libraries, and their variables.
        Program = "program and libraries",
        /// The heap that `brk` makes.
        Heap = "heap by brk",
        /// The first thread's stack.
        Stack = "stack of the first thread",
        /// Other threads' stacks: private memory right behind a guard page.
        ThreadStacks = "stacks of other threads",
        /// Other files.
        Files = "other files",
        /// Memory that may be shared with other processes.
        Shared = "shared memory",
        /// Memory that the program has mapped itself.
        Anonymous = "mapped by the program",
        /// Memory that the kernel maps into every process.
        Kernel = "the kernel's own",
    }
}

pub(super) const SOURCES: usize = Source::ALL.len();

impl Source {
    pub(super) fn of_page(what: Use) -> Source {
        match what {
            Use::Slab => Source::Slabs,
            Use::Run => Source::Runs,
            Use::Block => Source::Blocks,
            Use::Listed => Source::Listed,
            Use::FreeBacked => Source::FreeBacked,
            Use::Free => Source::Free,
            Use::Releasing => Source::Travelling,
            Use::Foreign => Source::Arena,
        }
    }
}

listed_enum! {
    /// The state of bytes in slabs. The variants are in the order of reports.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u8)]
    pub enum Held {
        /// Objects that the program has.
        InUse = "objects in use",
        /// Objects on CPUs' stacks.
        InStacks = "objects on CPUs' stacks",
        /// Objects in sheaves.
        InBarns = "objects in sheaves",
        /// Free objects in slabs, holes included.
        InSlabs = "free objects in slabs",
        /// The memory of sheaves.
        Sheaves = "memory of sheaves",
        /// Vectors of owners.
        Vectors = "vectors of owners",
        /// Ends of slabs that hold no object.
        Waste = "ends of slabs",
        /// Released pages of slabs: a part of the free objects in slabs, without memory.
        Holes = "of these, holes",
    }
}

const HELD: usize = Held::ALL.len();

const KINDS: usize = Kind::ALL.len();

/// A manager's counters, in bytes. [`NONE`] stands for a counter that the manager does not have.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Books {
    /// Resident, by [`Source`].
    pub believed: [u64; SOURCES],
    /// In slabs, by [`Held`].
    pub held: [u64; HELD],
    /// Charged to groups and used, by [`Kind`].
    pub charged: [u64; KINDS],
    /// Bytes of allocations with a payer, by [`Kind`].
    pub payable: [u64; KINDS],
}

/// Value of a counter that the manager does not have.
pub const NONE: u64 = u64::MAX;

impl Books {
    /// No counters.
    pub const BLANK: Books =
        Books { believed: [NONE; SOURCES], held: [0; HELD], charged: [0; KINDS], payable: [NONE; KINDS] };

    /// All numbers, one after the other.
    pub fn numbers(&mut self) -> impl Iterator<Item = &mut u64> {
        let Books { believed, held, charged, payable } = self;
        believed.iter_mut().chain(held).chain(charged).chain(payable)
    }
}

/// A mapping of neap's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Its first byte.
    pub start: usize,
    /// Bytes.
    pub length: usize,
    /// Its source; [`Source::Arena`] for the arena.
    pub of: Source,
}
