//! Restartable sequences on per-CPU stacks of pointers and on per-CPU words, without a lock or a
//! locked instruction.
//!
//! The C library registers threads for the kernel's rseq. With a C library that has no rseq areas,
//! neap registers [areas of its own](OwnAreas). The users are the object stacks of `neap-objects`,
//! the per-CPU words of `neap-percpu`, memory groups and RCU.
//!
//! # Design
//!
//! A sequence reads the CPU id, loads the pointer to that CPU's region, and finds a stack in the
//! region. Its last instruction commits: it stores one word. If the thread is preempted, migrated
//! or signalled before, the kernel continues it at the abort exit, and the sequence has no effect.
//!
//! ```text
//! Table { offset, regions } -> pointer of this CPU -> region
//! region: writable | head, bottom, end | head, bottom, end | ... and cells
//!                    ^ at the stack's place
//! ```
//!
//! # Invariants
//!
//! * The first instruction of a sequence directly follows the store to `rseq_cs`. A signal in a gap
//!   would disarm the sequence.
//! * A sequence writes no visible word before every check has passed. The commit is its last
//!   instruction.
//! * A sequence contains no call and no system call, and does not use the machine stack.
//! * A sequence reads `cpu_id`, not `cpu_id_start`, and writes neither.
//! * An unregistered thread has the id -1 or -2. The table has entries for these ids, which lead to
//!   a region whose stacks have no room and no objects. In a closed table every entry leads to that
//!   region. So no sequence needs to compare the id.
//! * A pop checks the cell for null, and does not compare with the bottom. The cell below the
//!   lowest holds null, and no sequence writes to it.
//! * Apart from sequences, only a thread that has fenced the stack's CPU writes to a stack.
//!
//! The forms are chosen for speed:
//!
//! * A stack holds pointers to cells, not an index. With `[base + index * 8]` a pop after a push
//!   waits longer for the stored word than with `[base]`.
//! * A push adds to the head in memory, which saves an instruction and keeps `free` on two cache
//!   lines. A pop stores the new head from a register, which is faster when the class changes
//!   between pops.
//! * The region pointers lie in the table itself, at an address known at link time. This saves one
//!   dependent load.
//!
//! # Concurrency
//!
//! The functions take no lock and never retry: each call is one attempt. They are signal-safe. A
//! child of `vfork` shares its parent's thread area. Therefore the parent [leaves](leave) rseq
//! before it calls `vfork`. A child of `clone(CLONE_VM)` must not call these functions.
//!
//! Source: Linux `kernel/rseq.c`, `include/uapi/linux/rseq.h`.

use core::mem::offset_of;
use core::sync::atomic::{AtomicIsize, AtomicPtr};

mod leaving;
mod own_areas;
mod registration;
mod stacks;
mod words;

pub use leaving::{Left, enter, leave};
pub use own_areas::OwnAreas;
pub use registration::{cpu_at, current_cpu, has_instructions, is_registered, may_register, registered_offset};
pub use stacks::{pop, pop_many, push, push_many, push_strided_run, raise_capacity};
pub use words::{Counted, add, alter, count, count_one};

/// A stack in a region. Its cells are pointers and lie in the same region.
#[repr(C)]
#[derive(Debug)]
pub struct Stack {
    /// The cell above the topmost object.
    pub head: AtomicPtr<*mut u8>,
    /// The lowest cell; the cell below it holds null. Constant while the region is in a table.
    pub bottom: AtomicPtr<*mut u8>,
    /// The cell above the highest. If it equals `bottom`, every operation takes the slow path.
    pub end: AtomicPtr<*mut u8>,
}

/// Number of entries in front of CPU 0's entry. They are for -1 and -2, the ids of unregistered
/// threads.
pub const UNREGISTERED: usize = 2;

/// Number of CPUs for which a table has entries. It is the maximum for which a kernel can be built.
pub const MOST_CPUS: usize = 8192;

/// The data with which the sequences on stacks begin, on cache lines of its own.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct SequenceTable {
    /// Offset of the thread's rseq area from its thread pointer. All threads read it. `apart` keeps
    /// it away from the entries, which a thread that drains a CPU writes.
    pub offset: AtomicIsize,
    apart: [usize; 7],
    /// Pointers to the regions: [`UNREGISTERED`] entries, then one for each CPU that the kernel may
    /// name.
    pub regions: [AtomicPtr<u8>; UNREGISTERED + MOST_CPUS],
}

impl SequenceTable {
    /// Creates a table that no sequence may use yet.
    pub const fn unopened() -> SequenceTable {
        let regions = [const { AtomicPtr::new(core::ptr::null_mut()) }; UNREGISTERED + MOST_CPUS];
        SequenceTable { offset: AtomicIsize::new(0), apart: [0; 7], regions }
    }

    /// Offset of CPU 0's entry in bytes.
    pub const FIRST: usize = offset_of!(SequenceTable, regions) + UNREGISTERED * size_of::<AtomicPtr<u8>>();
}

/// Result of one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceResult {
    /// The operation took effect.
    Committed,
    /// The stack has too few objects (pop) or too little room (push).
    Refused,
    /// The kernel interrupted the thread. Nothing changed.
    Aborted,
}
