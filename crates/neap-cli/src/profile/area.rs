//! The samples that a process leaves in the file of its page of numbers, read while it runs.
//!
//! The format is described in the crate `neap-base`, `profile_area`. Any process of the user may
//! have written the area, so it is read by `pread` and never mapped. Kinds and sizes are checked. A
//! damaged record ends its block and is counted. One look reads at most the ring once.

use core::mem::{offset_of, size_of};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use anyhow::{Context, Result, ensure};
use neap_base::profile_area::{
    ALLOC, AREA_BYTES, AllocRecord, AreaHeader, BLOCK_BYTES, FILE_OFFSET, FORMAT, FREE, FreeRecord, MAGIC, MOST_STACK,
    PAD, RING_AT, RING_BYTES, SLOT_COUNT, SLOTS_AT, Slot,
};

use crate::stat_reader::opened_path;

/// Bytes behind the head that the process does not overwrite while they are read.
const SAFE: u64 = (RING_BYTES - BLOCK_BYTES) as u64;
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Slots that are read at a time.
const SLOTS_AT_ONCE: usize = 2048;

/// The head of an area.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AreaHead {
    pub(crate) is_on: bool,
    /// Bytes between two samples, on average.
    pub(crate) mean: u64,
    /// Bytes ever written to the ring.
    pub(crate) head: u64,
    /// Number of the last sample.
    pub(crate) taken: u64,
    pub(crate) without_slot: u64,
    pub(crate) without_stack: u64,
    /// Time at which sampling was switched on.
    pub(crate) began: u64,
}

/// A sampled allocation, from the ring or from a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SampledAllocation {
    pub(crate) number: u64,
    pub(crate) time: u64,
    pub(crate) size: u64,
    /// Average bytes between two samples at the time of this sample.
    pub(crate) mean: u64,
    /// Id of the memory group; 0: none.
    pub(crate) group: u64,
    pub(crate) thread: u32,
}

/// The registers of a sample, and the bytes of its stack from the stack pointer on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StackCopy<'a> {
    pub(crate) instruction: u64,
    pub(crate) stack_pointer: u64,
    pub(crate) frame_pointer: u64,
    pub(crate) bytes: &'a [u8],
}

/// A record of the ring.
#[derive(Debug)]
pub(crate) enum RingRecord<'a> {
    /// An allocation.
    Alloc(SampledAllocation, StackCopy<'a>),
    /// The free of the sample with this number.
    Free(u64),
}

/// An area, and how far its ring was read.
#[derive(Debug)]
pub(crate) struct Area {
    file: File,
    /// The first byte of the ring that was not read; `None` before the first look.
    next: Option<u64>,
    block: Vec<u8>,
    /// The lowest and the highest number of the samples that were read, and their count.
    numbers: Option<(u64, u64)>,
    read: u64,
    /// Times that the process was faster than this reader.
    pub(crate) overruns: u64,
    /// Blocks that ended at a damaged record.
    pub(crate) damaged: u64,
}

impl Area {
    /// Opens the area in a page's file.
    pub(crate) fn open(page: &File) -> Result<Area> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(opened_path(page));
        Area::of(file.context("cannot open the file of samples")?)
    }

    /// The area in a file that is open for reading.
    ///
    /// # Errors
    /// The file has none, or one of another format.
    pub(crate) fn of(file: File) -> Result<Area> {
        let length = file.metadata().context("cannot read the file of samples")?.len();
        ensure!(length >= (FILE_OFFSET + AREA_BYTES) as u64, "it has no place for samples");
        let area =
            Area { file, next: None, block: vec![0; BLOCK_BYTES], numbers: None, read: 0, overruns: 0, damaged: 0 };
        area.head()?;
        Ok(area)
    }

    fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(to, (FILE_OFFSET + at) as u64).context("cannot read the samples")
    }

    /// Reads the head.
    pub(crate) fn head(&self) -> Result<AreaHead> {
        let mut bytes = [0; size_of::<AreaHeader>()];
        self.read(0, &mut bytes)?;
        let (magic, format) =
            (u64_at(&bytes, offset_of!(AreaHeader, magic)), u32_at(&bytes, offset_of!(AreaHeader, format)));
        ensure!(magic == MAGIC, "its place for samples is empty or damaged");
        ensure!(format == FORMAT, "its samples are of format {format}, and this command reads format {FORMAT}");
        Ok(AreaHead {
            is_on: u32_at(&bytes, offset_of!(AreaHeader, is_on)) != 0,
            mean: u64_at(&bytes, offset_of!(AreaHeader, mean)),
            head: u64_at(&bytes, offset_of!(AreaHeader, head)),
            taken: u64_at(&bytes, offset_of!(AreaHeader, taken)),
            without_slot: u64_at(&bytes, offset_of!(AreaHeader, without_slot)),
            without_stack: u64_at(&bytes, offset_of!(AreaHeader, without_stack)),
            began: u64_at(&bytes, offset_of!(AreaHeader, began)),
        })
    }

    /// Whether the process has ended sampling, and given the memory back.
    pub(crate) fn is_gone(&self) -> bool {
        let mut magic = [0xff; 8];
        self.read(offset_of!(AreaHeader, magic), &mut magic).is_ok() && magic == [0; 8]
    }

    /// Gives the slots to `each`: the samples that are live.
    pub(crate) fn slots(&self, each: &mut dyn FnMut(SampledAllocation)) -> Result<()> {
        const EACH: usize = size_of::<Slot>();
        let mut bytes = vec![0; SLOTS_AT_ONCE * EACH];
        for first in (0..SLOT_COUNT).step_by(SLOTS_AT_ONCE) {
            self.read(SLOTS_AT + first * EACH, &mut bytes)?;
            for slot in bytes.chunks_exact(EACH).filter(|slot| u64_at(slot, offset_of!(Slot, number)) != 0) {
                each(SampledAllocation {
                    number: u64_at(slot, offset_of!(Slot, number)),
                    time: u64_at(slot, offset_of!(Slot, time)),
                    size: u64_at(slot, offset_of!(Slot, size)),
                    mean: u64_at(slot, offset_of!(Slot, mean)),
                    group: u64_at(slot, offset_of!(Slot, group)),
                    thread: u32_at(slot, offset_of!(Slot, thread)),
                });
            }
        }
        Ok(())
    }

    /// Gives the records that were written since the last look to `each`; at the first look, those
    /// that the ring still has. Returns the head.
    pub(crate) fn drain(&mut self, each: &mut dyn FnMut(RingRecord<'_>)) -> Result<AreaHead> {
        let head = self.head()?;
        let oldest = |head: u64| head.saturating_sub(SAFE).checked_next_multiple_of(BLOCK).unwrap_or(head);
        let mut next = match self.next {
            None => oldest(head.head),
            Some(next) if next > head.head => {
                // The count went back: another process has written here.
                self.damaged += 1;
                head.head
            }
            Some(next) => next,
        };
        while next < head.head {
            let now = self.head()?.head;
            if now.saturating_sub(next) > SAFE {
                self.overruns += 1;
                next = oldest(now).clamp(next, head.head);
                continue;
            }
            let end = (next - next % BLOCK).saturating_add(BLOCK).min(head.head);
            let mut block = core::mem::take(&mut self.block);
            let bytes = &mut block[..(end - next) as usize];
            let read = self.read(RING_AT + (next % RING_BYTES as u64) as usize, bytes);
            let is_whole = read.is_ok() && self.head().is_ok_and(|now| now.head.saturating_sub(next) <= SAFE);
            if is_whole {
                self.damaged += u64::from(!self.parse(bytes, each));
                next = end;
            }
            self.block = block;
            read?;
        }
        self.next = Some(next);
        Ok(head)
    }

    /// Gives the records of a block to `each`. Returns whether all were sound.
    fn parse(&mut self, mut rest: &[u8], each: &mut dyn FnMut(RingRecord<'_>)) -> bool {
        while !rest.is_empty() {
            if rest.len() < 8 {
                return false;
            }
            let (kind, bytes) = (u32_at(rest, 0), u32_at(rest, 4) as usize);
            if kind == PAD {
                return true;
            }
            if !bytes.is_multiple_of(8) || bytes > rest.len() {
                return false;
            }
            let (record, after) = rest.split_at(bytes);
            match kind {
                ALLOC => {
                    let Some((sample, stack)) = alloc(record) else { return false };
                    self.read += 1;
                    let (lowest, highest) = self.numbers.unwrap_or((sample.number, sample.number));
                    self.numbers = Some((lowest.min(sample.number), highest.max(sample.number)));
                    each(RingRecord::Alloc(sample, stack));
                }
                FREE if bytes >= size_of::<FreeRecord>() => {
                    each(RingRecord::Free(u64_at(record, offset_of!(FreeRecord, number))));
                }
                _ => return false,
            }
            rest = after;
        }
        true
    }

    /// Number of samples that the process took, and that were overwritten before they were read.
    pub(crate) fn lost(&self) -> u64 {
        let taken = self.numbers.map_or(0, |(lowest, highest)| (highest - lowest).saturating_add(1));
        taken.saturating_sub(self.read)
    }

    /// The highest number of a sample that was read from the ring.
    pub(crate) fn highest(&self) -> Option<u64> {
        self.numbers.map(|(_, highest)| highest)
    }
}

/// The sample and the stack of a record; `None` if its sizes are wrong.
fn alloc(record: &[u8]) -> Option<(SampledAllocation, StackCopy<'_>)> {
    let (head, stack) = record.split_at_checked(size_of::<AllocRecord>())?;
    let length = u32_at(head, offset_of!(AllocRecord, stack_bytes)) as usize;
    if length > MOST_STACK || length > stack.len() || !length.is_multiple_of(8) {
        return None;
    }
    let word = |at| u64_at(head, at);
    let sample = SampledAllocation {
        number: word(offset_of!(AllocRecord, number)),
        time: word(offset_of!(AllocRecord, time)),
        size: word(offset_of!(AllocRecord, size)),
        mean: word(offset_of!(AllocRecord, mean)),
        group: word(offset_of!(AllocRecord, group)),
        thread: u32_at(head, offset_of!(AllocRecord, thread)),
    };
    let stack = StackCopy {
        instruction: word(offset_of!(AllocRecord, instruction)),
        stack_pointer: word(offset_of!(AllocRecord, stack_pointer)),
        frame_pointer: word(offset_of!(AllocRecord, frame_pointer)),
        bytes: &stack[..length],
    };
    Some((sample, stack))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap_or_default())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
}
