//! What memory is of: the names under which bytes are reconciled, and what a manager believes of
//! each.
//!
//! Sits below the tally, and between a process and whoever it tells about itself. Only shapes:
//! nothing is counted here.

use neap_groups::Kind;
use neap_pages::Use;

/// What memory is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Source {
    /// Slabs: see [`Held`].
    Slabs,
    /// Runs of pages that the program has.
    Runs,
    /// Blocks that are neither.
    Blocks,
    /// Pages in CPUs' lists.
    Listed,
    /// Free pages that the system was not given.
    FreeBacked,
    /// Free pages that the system has.
    Free,
    /// Pages on their way to or from the system, or from a list.
    Travelling,
    /// Memory that is handed out, where its pages cannot be looked at one by one, or changed
    /// between two looks.
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
    /// What ticks remember.
    Ticks,
    /// Per-CPU data.
    PerCpuData,
    /// Tables of per-CPU data.
    PerCpuTables,
    /// Groups, ids, stocks, those who wait and listen.
    Groups,
    /// The page of numbers.
    Numbers,
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
    /// What the program has mapped for itself.
    Anonymous,
    /// What the kernel gives every process.
    Kernel,
}

pub(super) const SOURCES: usize = Source::ALL.len();

impl Source {
    /// All, in the order of reports.
    pub const ALL: [Source; 26] = [
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
        Source::Program,
        Source::Heap,
        Source::Stack,
        Source::ThreadStacks,
        Source::Files,
        Source::Shared,
        Source::Anonymous,
        Source::Kernel,
    ];

    /// In words.
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

/// What is in slabs.
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
    /// Vectors that say who pays.
    Vectors,
    /// What is left at the end of slabs.
    Waste,
    /// Pages of slabs that the system has: part of what is free in slabs, and of no slab's memory.
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

    /// In words.
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

/// What a manager believes, in bytes; all bits set where it has no count.
#[derive(Clone, Copy, Debug)]
pub struct Books {
    /// Resident, by [`Source`].
    pub believed: [u64; SOURCES],
    /// In slabs, by [`Held`].
    pub held: [u64; HELD],
    /// Charged to groups and used, by [`Kind`].
    pub charged: [u64; KINDS],
    /// What is there that somebody pays for, by [`Kind`].
    pub payable: [u64; KINDS],
}

/// No count.
pub const NONE: u64 = u64::MAX;

impl Books {
    /// Nothing is known.
    pub const BLANK: Books =
        Books { believed: [NONE; SOURCES], held: [0; HELD], charged: [0; KINDS], payable: [NONE; KINDS] };

    /// All numbers, one after the other.
    pub fn numbers(&mut self) -> impl Iterator<Item = &mut u64> {
        let Books { believed, held, charged, payable } = self;
        believed.iter_mut().chain(held).chain(charged).chain(payable)
    }
}

/// Something that neap has mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Its first byte.
    pub start: usize,
    /// Bytes.
    pub length: usize,
    /// What it is; [`Source::Arena`] for the arena.
    pub of: Source,
}
