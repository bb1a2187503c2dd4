//! The samples that a process leaves in the file of its page of numbers, read while it runs.
//!
//! The format is described in the crate `neap-base`, `profile_area`. Any process of the user may
//! have written the area, so it is read by `pread` and never mapped. Kinds and sizes are checked. A
//! damaged record ends the reading of its block, and is counted. One look reads at most as many
//! bytes as the ring has.

use core::mem::{offset_of, size_of};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use anyhow::{Context, Result, ensure};
use neap_base::packed_stack::unpack;
use neap_base::profile_area::{
    ALLOC, AREA_BYTES, AllocRecord, AreaHeader, BLOCK_BYTES, CELL_BYTES, CELL_COUNT, CELLS_AT, FILE_AREA_BYTES,
    FILE_OFFSET, FORMAT, FORMAT_OF_FILES, FREE, FreeRecord, MAGIC, MOST_CELLS, MOST_STACK, NOT_KEPT, PAD, RING_AT,
    RING_BYTES, SLOT_COUNT, SLOTS_AT, Slot,
};

use crate::look::stat_reader::opened_path;

/// Bytes before the head that a reader may read. The process writes its next block outside of them.
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

/// Error: the sample was freed while its stack was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreedMeanwhile;

/// A sampled allocation, from the ring or from a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SampledAllocation {
    pub(crate) number: u64,
    pub(crate) time: u64,
    pub(crate) size: u64,
    /// Average bytes between two samples at the time of this sample.
    pub(crate) mean: u64,
    /// Id of the memory group. 0 if the sample has none.
    pub(crate) group: u64,
    pub(crate) thread: u32,
    /// Number of the slot. 0 if the sample is from the ring.
    pub(crate) slot: u32,
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
    /// The free of a sample, by its number, and the time of the free.
    Free(u64, u64),
}

/// An area, and how far its ring was read.
#[derive(Debug)]
pub(crate) struct Area {
    file: File,
    /// The first byte of the ring that was not read; `None` before the first look.
    next: Option<u64>,
    block: Vec<u8>,
    /// Whether stacks of live samples are kept outside of the ring.
    has_cells: bool,
    /// The lowest and the highest number of the samples that were read, and their count.
    numbers: Option<(u64, u64)>,
    read: u64,
    /// Times that the process overwrote records before this reader had read them.
    pub(crate) overruns: u64,
    /// Blocks that ended at a damaged record, and damaged kept stacks.
    pub(crate) damaged: u64,
    /// Live samples whose stack the process could not keep.
    pub(crate) not_kept: u64,
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
    /// Returns an error if the file has no area, or an area of another format.
    pub(crate) fn of(file: File) -> Result<Area> {
        let length = file.metadata().context("cannot read the file of samples")?.len();
        ensure!(length >= (FILE_OFFSET + FILE_AREA_BYTES) as u64, "it has no place for samples");
        let mut area = Area {
            file,
            next: None,
            block: vec![0; BLOCK_BYTES],
            has_cells: false,
            numbers: None,
            read: 0,
            overruns: 0,
            damaged: 0,
            not_kept: 0,
        };
        area.head()?;
        let mut format = [0; 4];
        area.read(offset_of!(AreaHeader, format), &mut format)?;
        area.has_cells = u32_at(&format, 0) == FORMAT && length >= (FILE_OFFSET + AREA_BYTES) as u64;
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
        ensure!(
            format == FORMAT || format == FORMAT_OF_FILES,
            "its samples are of format {format}, and this command reads formats {FORMAT_OF_FILES} and {FORMAT}"
        );
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

    /// Calls `each` with the sample of each used slot. These samples are live.
    pub(crate) fn slots(&self, each: &mut dyn FnMut(SampledAllocation)) -> Result<()> {
        const EACH: usize = size_of::<Slot>();
        let mut bytes = vec![0; SLOTS_AT_ONCE * EACH];
        for first in (0..SLOT_COUNT).step_by(SLOTS_AT_ONCE) {
            self.read(SLOTS_AT + first * EACH, &mut bytes)?;
            let used = |slot: &(usize, &[u8])| u64_at(slot.1, offset_of!(Slot, number)) != 0;
            for (at, slot) in bytes.chunks_exact(EACH).enumerate().filter(used) {
                each(SampledAllocation {
                    number: u64_at(slot, offset_of!(Slot, number)),
                    time: u64_at(slot, offset_of!(Slot, time)),
                    size: u64_at(slot, offset_of!(Slot, size)),
                    mean: u64_at(slot, offset_of!(Slot, mean)),
                    group: u64_at(slot, offset_of!(Slot, group)),
                    thread: u32_at(slot, offset_of!(Slot, thread)),
                    slot: (first + at) as u32,
                });
            }
        }
        Ok(())
    }

    /// Calls `each` with the records that the process has written since the last call. The first
    /// call begins with the oldest records that the ring still has. Skips overwritten records.
    /// Returns the head.
    pub(crate) fn drain(&mut self, each: &mut dyn FnMut(RingRecord<'_>)) -> Result<AreaHead> {
        let head = self.head()?;
        let oldest = |head: u64| head.saturating_sub(SAFE).checked_next_multiple_of(BLOCK).unwrap_or(head);
        let mut next = match self.next {
            None => oldest(head.head),
            Some(next) if next > head.head => {
                // The count has decreased, so another process has written here.
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
                    let word = |at| u64_at(record, at);
                    let (number, time) = (offset_of!(FreeRecord, number), offset_of!(FreeRecord, time));
                    each(RingRecord::Free(word(number), word(time)));
                }
                _ => return false,
            }
            rest = after;
        }
        true
    }

    /// Reads the kept stack of a sample from [`slots`](Area::slots), and unpacks its bytes into
    /// `to`. Returns an error if the sample was freed meanwhile.
    pub(crate) fn kept_stack<'a>(
        &mut self,
        of: &SampledAllocation,
        to: &'a mut Vec<u8>,
    ) -> Result<Option<StackCopy<'a>>, FreedMeanwhile> {
        if !self.has_cells {
            return Ok(None);
        }
        // The slot had the sample's number when it was read, and is checked to have it still after
        // the last cell was read. So all cells are of this sample.
        let slot = SLOTS_AT + of.slot as usize % SLOT_COUNT * size_of::<Slot>();
        let mut kept = [0; 4];
        if self.read(slot + offset_of!(Slot, kept), &mut kept).is_err() {
            return Ok(None);
        }
        let first = u32_at(&kept, 0);
        let stream = if first == 0 || first == NOT_KEPT { Ok(Vec::new()) } else { self.chain(first) };
        let mut number = [0; 8];
        if self.read(slot + offset_of!(Slot, number), &mut number).is_ok() && u64_at(&number, 0) != of.number {
            return Err(FreedMeanwhile);
        }
        self.not_kept += u64::from(first == NOT_KEPT);
        if first == 0 || first == NOT_KEPT {
            return Ok(None);
        }
        let mut words = vec![0; MOST_STACK / 8];
        let unpacked = stream.ok().and_then(|stream| unpack(&mut stream.into_iter(), &mut words));
        let Some(stack) = unpacked else {
            self.damaged += 1;
            return Ok(None);
        };
        to.clear();
        to.extend(words[..stack.words].iter().flat_map(|word| word.to_ne_bytes()));
        let [instruction, stack_pointer, frame_pointer] = stack.registers;
        Ok(Some(StackCopy { instruction, stack_pointer, frame_pointer, bytes: to }))
    }

    /// The words of a chain of cells.
    fn chain(&self, first: u32) -> Result<Vec<u64>> {
        let (mut link, mut words) = (u64::from(first), Vec::new());
        let mut cell = [0; CELL_BYTES];
        for _ in 0..MOST_CELLS {
            let at = usize::try_from(link).ok().and_then(|link| link.checked_sub(1)).filter(|at| *at < CELL_COUNT);
            self.read(CELLS_AT + at.context("there is no such cell")? * CELL_BYTES, &mut cell)?;
            words.extend(cell.chunks_exact(8).skip(1).map(|word| u64_at(word, 0)));
            link = u64_at(&cell, 0);
            if link == 0 {
                break;
            }
        }
        Ok(words)
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

/// Parses a record's sample and stack. `None` if the record's sizes are wrong.
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
        slot: 0,
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
