//! Sources of memory, to which reconciliation attributes bytes, and a manager's counters of each.
//! This module has only types, and counts nothing.

use neap_groups::Kind;
use neap_pages::Use;

/// The origin of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Source {
    /// Slabs: see [`Held`].
    Slabs,
    /// Runs of pages that the program has.
    Runs,
    /// Blocks of pages that are neither slabs nor runs.
    Blocks,
    /// Pages in CPUs' lists.
    Listed,
    /// Free pages that have memory.
    FreeBacked,
    /// Free pages that were released.
    Free,
    /// Pages on their way to or from the system, or from a list.
    Travelling,
    /// Pages of the arena that cannot be examined one by one, or that changed between two looks.
    Arena,
    /// Frames, and maps of pages.
    PageTables,
    /// State bytes of objects.
    States,
    /// Kinds of pages, and descriptors of slabs.
    SlabTables,
    /// Lists of pages, by CPU and node.
    Lists,
    /// Stacks of objects, by CPU.
    Stacks,
    /// The state of ticks.
    Ticks,
    /// Per-CPU data.
    PerCpuData,
    /// Tables of per-CPU data.
    PerCpuTables,
    /// Groups, ids, stocks, waiters and listeners.
    Groups,
    /// The page of numbers.
    Numbers,
    /// Guarded samples and their table.
    Guarded,
    /// The program, its libraries, and their variables.
    Program,
    /// The heap that `brk` makes.
    Heap,
    /// The first thread's stack.
    Stack,
    /// Other threads' stacks: private memory right behind a guard page.
    ThreadStacks,
    /// Other files.
    Files,
    /// Memory that may be shared with other processes.
    Shared,
    /// Memory that the program has mapped itself.
    Anonymous,
    /// Memory that the kernel maps into every process.
    Kernel,
}

pub(super) const SOURCES: usize = Source::ALL.len();

impl Source {
    /// All, in the order of reports.
    pub const ALL: [Source; 27] = [
        Source::Slabs,
        Source::Runs,
        Source::Blocks,
        Source::Listed,
        Source::FreeBacked,
        Source::Free,
        Source::Travelling,
        Source::Arena,
        Source::PageTables,
        Source::States,
        Source::SlabTables,
        Source::Lists,
        Source::Stacks,
        Source::Ticks,
        Source::PerCpuData,
        Source::PerCpuTables,
        Source::Groups,
        Source::Numbers,
        Source::Guarded,
        Source::Program,
        Source::Heap,
        Source::Stack,
        Source::ThreadStacks,
        Source::Files,
        Source::Shared,
        Source::Anonymous,
        Source::Kernel,
    ];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Slabs => "slabs of objects",
            Source::Runs => "runs of pages in use",
            Source::Blocks => "blocks that are neither",
            Source::Listed => "pages in CPUs' lists",
            Source::FreeBacked => "free pages, kept",
            Source::Free => "free pages, given back",
            Source::Travelling => "pages on their way",
            Source::Arena => "arena, not seen by the page",
            Source::PageTables => "frames and maps of pages",
            Source::States => "state bytes of objects",
            Source::SlabTables => "kinds of pages, slabs",
            Source::Lists => "lists of pages",
            Source::Stacks => "stacks of objects",
            Source::Ticks => "what ticks remember",
            Source::PerCpuData => "per-CPU data",
            Source::PerCpuTables => "tables of per-CPU data",
            Source::Groups => "memory groups",
            Source::Numbers => "page of numbers",
            Source::Guarded => "guarded samples",
            Source::Program => "program and libraries",
            Source::Heap => "heap by brk",
            Source::Stack => "stack of the first thread",
            Source::ThreadStacks => "stacks of other threads",
            Source::Files => "other files",
            Source::Shared => "shared memory",
            Source::Anonymous => "mapped by the program",
            Source::Kernel => "the kernel's own",
        }
    }

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

/// The state of bytes in slabs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Held {
    /// Objects that the program has.
    InUse,
    /// Objects on CPUs' stacks.
    InStacks,
    /// Objects in sheaves.
    InBarns,
    /// Free objects in slabs, holes included.
    InSlabs,
    /// The memory of sheaves.
    Sheaves,
    /// Vectors of owners.
    Vectors,
    /// Ends of slabs that hold no object.
    Waste,
    /// Released pages of slabs: a part of the free objects in slabs, without memory.
    Holes,
}

const HELD: usize = Held::ALL.len();

impl Held {
    /// All, in the order of reports.
    pub const ALL: [Held; 8] = [
        Held::InUse,
        Held::InStacks,
        Held::InBarns,
        Held::InSlabs,
        Held::Sheaves,
        Held::Vectors,
        Held::Waste,
        Held::Holes,
    ];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Held::InUse => "objects in use",
            Held::InStacks => "objects on CPUs' stacks",
            Held::InBarns => "objects in sheaves",
            Held::InSlabs => "free objects in slabs",
            Held::Sheaves => "memory of sheaves",
            Held::Vectors => "vectors of owners",
            Held::Waste => "ends of slabs",
            Held::Holes => "of these, holes",
        }
    }
}

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
