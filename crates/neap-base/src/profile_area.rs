//! Format of the memory in which a process leaves samples of its allocations for other processes.
//!
//! # Design
//! The area lies in the file of the page of numbers, from [`FILE_OFFSET`] on:
//!
//! | offset in the area | length | |
//! |---|---|---|
//! | 0 | [`HEADER_BYTES`] | [`AreaHeader`] |
//! | [`SLOTS_AT`] | [`SLOT_COUNT`] times 64 | [`Slot`]s: the samples that are live |
//! | [`RING_AT`] | [`RING_BYTES`] | records: the last samples and frees, with stacks |
//! | [`CELLS_AT`] | [`CELL_COUNT`] times [`CELL_BYTES`] | kept stacks of live samples, see below |
//!
//! A file that is shorter has no area. The sampled process writes the area, and relies on nothing
//! that it reads there, since other processes of its user may write to the area, too.
//!
//! # Ring
//! [`AreaHeader::head`] counts the bytes ever written to the ring. The byte `n` lies at `n %`
//! [`RING_BYTES`]. A record begins at a multiple of 8, and never crosses a multiple of
//! [`BLOCK_BYTES`]; a record of the kind [`PAD`] fills the rest of a block. So a reader can begin
//! at every block. A reader loads `head` before and after it reads. Bytes that lie more than
//! [`RING_BYTES`] minus [`BLOCK_BYTES`] behind the later `head` may have changed meanwhile.
//!
//! Samples are numbered from 1 on. From the numbers, a reader learns how many records it lost.
//!
//! # Kept stacks
//! Before the ring overwrites the record of a live sample, the process packs the stack of the
//! record into a chain of cells. [`Slot::kept`] names the first cell. The first word of a cell is
//! the number of the next cell plus 1, or 0. The other words of the chain are a stream:
//!
//! 1. the instruction, the stack pointer, the frame pointer, and the count of the stack's words;
//! 2. for every [`GROUP_WORDS`] words of the stack a mask, then the words whose bits are set in it.
//!    A word whose bit is 0 is not an address. A reader takes it for 0.
//!
//! The cells of a chain do not change while the slot has the number of its sample. A number is
//! not used again until sampling ends. A reader that finds it, then reads `kept` and the chain, and
//! then finds it again, has the stack of that sample.
//!
//! The format [`FORMAT_OF_FILES`] has no cells, and its area ends with the ring.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// Offset of the area in the file of the page of numbers, in bytes.
pub const FILE_OFFSET: usize = 1 << 20;
/// Length of the area, in bytes.
pub const AREA_BYTES: usize = CELLS_AT + CELL_COUNT * CELL_BYTES;
/// Length of an area of [`FORMAT_OF_FILES`], in bytes.
pub const FILE_AREA_BYTES: usize = CELLS_AT;
/// The first word of a header.
pub const MAGIC: u64 = u64::from_le_bytes(*b"neapprof");
/// Version of this format.
pub const FORMAT: u32 = 2;
/// Version of the format without kept stacks: that of files, and of processes with an older neap.
pub const FORMAT_OF_FILES: u32 = 1;
/// Bytes in front of the slots.
pub const HEADER_BYTES: usize = 1 << 16;
/// Offset of the first slot in the area.
pub const SLOTS_AT: usize = HEADER_BYTES;
/// Number of slots, which is the maximum of live samples that have a slot.
pub const SLOT_COUNT: usize = 1 << 17;
/// Offset of the ring in the area.
pub const RING_AT: usize = SLOTS_AT + SLOT_COUNT * size_of::<Slot>();
/// Bytes of the ring.
pub const RING_BYTES: usize = 16 << 20;
/// No record of the ring crosses a multiple of this.
pub const BLOCK_BYTES: usize = 128 << 10;
/// The most bytes of a stack in a record.
pub const MOST_STACK: usize = 32 << 10;
/// Offset of the first cell in the area.
pub const CELLS_AT: usize = RING_AT + RING_BYTES;
/// Number of cells.
pub const CELL_COUNT: usize = 1 << 16;
/// Bytes of a cell.
pub const CELL_BYTES: usize = 256;
/// The most cells of a stack. A longer stack is cut at its outer end.
pub const MOST_CELLS: usize = 32;
/// Words of a stack that share a mask.
pub const GROUP_WORDS: usize = 64;
/// Value of [`Slot::kept`]: all cells were in use when the record left the ring.
pub const NOT_KEPT: u32 = u32::MAX;

/// Kind of an [`AllocRecord`].
pub const ALLOC: u32 = 1;
/// Kind of a [`FreeRecord`].
pub const FREE: u32 = 2;
/// Kind of a record that fills a block up to its end. It may be a single word of 8 bytes.
pub const PAD: u32 = 3;

/// The first bytes of the area.
#[derive(Debug)]
#[repr(C)]
pub struct AreaHeader {
    /// [`MAGIC`], once the rest is valid.
    pub magic: AtomicU64,
    /// [`FORMAT`].
    pub format: AtomicU32,
    /// 1 while allocations are sampled.
    pub is_on: AtomicU32,
    /// Bytes between two samples, on average.
    pub mean: AtomicU64,
    /// Bytes ever written to the ring.
    pub head: AtomicU64,
    /// Number of samples ever taken, which is also the number of the last one.
    pub taken: AtomicU64,
    /// Number of samples that are live and have a slot.
    pub live: AtomicU64,
    /// Number of samples that found no free slot.
    pub without_slot: AtomicU64,
    /// Number of samples whose stack could not be read.
    pub without_stack: AtomicU64,
    /// Time at which sampling was last switched on.
    pub began: AtomicU64,
}

/// A live sample. Times are nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Slot {
    /// Number of the sample; 0 if the slot is free.
    pub number: AtomicU64,
    /// Address of the allocation.
    pub address: AtomicU64,
    /// Bytes that the program asked for.
    pub size: AtomicU64,
    /// Average bytes between two samples at the time of this sample.
    pub mean: AtomicU64,
    /// Time of the allocation.
    pub time: AtomicU64,
    /// Id of the memory group that the thread was in; 0 if it was in none.
    pub group: AtomicU64,
    /// Kernel's id of the thread.
    pub thread: AtomicU32,
    /// Number of the first cell of the kept stack plus 1, or [`NOT_KEPT`]. 0 if the record is in
    /// the ring, or has no stack.
    pub kept: AtomicU32,
}

/// Record of a sampled allocation. A copy of the `stack_bytes` bytes from `stack_pointer` on
/// follows it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AllocRecord {
    /// [`ALLOC`].
    pub kind: u32,
    /// Bytes of the record with its stack, a multiple of 8.
    pub bytes: u32,
    /// Number of the sample.
    pub number: u64,
    /// Time of the allocation.
    pub time: u64,
    /// Address of the allocation.
    pub address: u64,
    /// Bytes that the program asked for.
    pub size: u64,
    /// Bytes between two samples, on average.
    pub mean: u64,
    /// Id of the memory group that the thread was in; 0 if it was in none.
    pub group: u64,
    /// Kernel's id of the thread.
    pub thread: u32,
    /// Bytes of the stack, a multiple of 8; 0 if the process could not read the stack.
    pub stack_bytes: u32,
    /// Address of an instruction in neap, at which the next two registers were read.
    pub instruction: u64,
    /// The stack pointer at `instruction`.
    pub stack_pointer: u64,
    /// The frame pointer register at `instruction`.
    pub frame_pointer: u64,
}

/// Record of the free of a sampled allocation.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FreeRecord {
    /// [`FREE`].
    pub kind: u32,
    /// Bytes of the record.
    pub bytes: u32,
    /// Number of the sample.
    pub number: u64,
    /// Time of the free.
    pub time: u64,
}

const _: () = assert!(size_of::<AreaHeader>() <= HEADER_BYTES && size_of::<Slot>() == 64);
const _: () = assert!(size_of::<AllocRecord>() == 88 && size_of::<FreeRecord>() == 24);
const _: () = assert!(offset_of!(Slot, kept) == 52 && CELL_BYTES.is_multiple_of(8));
const _: () = assert!(size_of::<AllocRecord>() + MOST_STACK <= BLOCK_BYTES && RING_BYTES.is_multiple_of(BLOCK_BYTES));
