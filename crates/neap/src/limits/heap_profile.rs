//! Writing a heap profile to a file, in [this format](neap_base::profile_file).
//!
//! # Design
//! 1. neap makes the file ([`FileName`]), and reads the executable mappings.
//! 2. neap copies the ring of samples block by block. It leaves out records of samples that are not
//!    live. It writes zero for words of stacks that are no addresses.
//! 3. The slots of live samples follow. neap adds their stacks that are kept outside of the ring to
//!    the file's ring, while that has room. Then come the names of their threads and groups.
//!
//! neap allocates nothing for that. All buffers are in memory that is mapped while neap writes the
//! file, and it never touches most of it. Other processes may have written anything into the area.
//! neap copies the area, and the reader of the file checks it.
//!
//! # Locking
//! The thread holds the mutex of the samples, inside the gate, while it copies one block. It holds
//! no lock while it writes to the file.

use crate::mm::{Core, Mm};
use crate::options::LONGEST_PATH;
use crate::state::profile::recorder::Recorder;
use core::ffi::CStr;
use core::fmt::{self, Write};
use core::mem::offset_of;
use core::ops::Range;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_base::profile_area::{
    ALLOC, AllocRecord, AreaHeader, BLOCK_BYTES, FILE_AREA_BYTES, FILE_OFFSET, FORMAT_OF_FILES, MAGIC, MOST_STACK, PAD,
    RING_AT, RING_BYTES, SLOT_COUNT, SLOTS_AT, Slot,
};
use neap_base::profile_file::{FIRST_LINE, LAST_LINE};
use neap_groups::GroupId;
use neap_os::call_stack::without_signature;
use neap_os::environment::read_file;
use neap_os::file::File;
use neap_os::{clock, mappings, memory, thread};

/// Most executable mappings. The copies of stacks keep addresses in them.
const MOST_CODE: usize = 1 << 14;
/// Places for threads, and for groups, whose names are written. The number is a power of two. At
/// most three quarters are used.
const MOST_NAMES: usize = 1 << 12;
/// Bytes of `/proc/self/maps` that one read gets.
const LINE: usize = 8 << 10;
/// Most groups of a path.
const DEEPEST: usize = 64;
/// Bytes at the end of the text that are reserved for its last two lines.
const LAST_LINES: usize = 64;

/// Words of a block, of a record without its stack, of a slot, and of a header.
const BLOCK: usize = BLOCK_BYTES / 8;
const RECORD: usize = size_of::<AllocRecord>() / 8;
const SLOT: usize = size_of::<Slot>() / 8;
const HEADER: usize = 9;

// The order of words that the functions below rely on.
const _: () = assert!(offset_of!(AllocRecord, bytes) == 4 && offset_of!(AllocRecord, number) == 8);
const _: () = assert!(offset_of!(AllocRecord, address) == 24 && offset_of!(AllocRecord, stack_bytes) == 60);
const _: () = assert!(offset_of!(AllocRecord, stack_pointer) == 72 && offset_of!(AllocRecord, frame_pointer) == 80);
const _: () = assert!(offset_of!(Slot, group) == 40 && offset_of!(Slot, kept) == 52);
const _: () = assert!(offset_of!(AreaHeader, is_on) == 12 && offset_of!(AreaHeader, began) == 64);

/// The name of a file.
#[derive(Clone, Copy)]
pub(super) enum FileName<'a> {
    /// This name. The content of an existing file is replaced.
    Whole(&'a CStr),
    /// `START.PID.N`, and then `end`. `N` is the first of `tries` numbers, from `first` on, for
    /// which no file exists.
    Numbered { start: &'a CStr, first: u32, tries: usize, end: &'a str },
}

/// The subject of a heap profile.
pub(super) struct Occasion<'a> {
    pub(super) name: FileName<'a>,
    pub(super) reason: &'static str,
    /// Bytes that the program has in use.
    pub(super) used: u64,
}

/// Buffers for writing one file. Memory with all bytes zero is a valid value.
#[repr(C)]
struct Scratch {
    text: [u8; FILE_OFFSET],
    block: [u64; BLOCK],
    out: [u64; BLOCK],
    record: [u64; RECORD + MOST_STACK / 8],
    line: [u8; LINE],
    code: CodeRanges,
    threads: Ids,
    groups: Ids,
}

/// Executable ranges of addresses, in order.
struct CodeRanges {
    ranges: [Range<usize>; MOST_CODE],
    count: usize,
}

impl CodeRanges {
    fn add(&mut self, range: Range<usize>) {
        if let Some(place) = self.ranges.get_mut(self.count) {
            *place = range;
            self.count += 1;
        }
    }

    fn contains(&self, address: u64) -> bool {
        let ranges = &self.ranges[..self.count];
        let after = ranges.partition_point(|range| range.start as u64 <= address);
        after > 0 && address < ranges[after - 1].end as u64
    }
}

/// A set of numbers that are not 0, as a hash table with open addressing.
struct Ids {
    places: [u64; MOST_NAMES],
    count: usize,
}

impl Ids {
    /// Adds a number. Does nothing if three quarters of the places are used.
    fn add(&mut self, id: u64) {
        if id == 0 || self.count >= MOST_NAMES / 4 * 3 {
            return;
        }
        let mut at = (id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - MOST_NAMES.ilog2())) as usize;
        while self.places[at] != id {
            if self.places[at] == 0 {
                self.places[at] = id;
                self.count += 1;
                return;
            }
            at = (at + 1) % MOST_NAMES;
        }
    }

    fn iter(&self) -> impl Iterator<Item = u64> {
        self.places.iter().copied().filter(|&id| id != 0)
    }
}

/// Lines of text. A line that does not fit is left out and counted.
struct TextLines<'a> {
    bytes: &'a mut [u8],
    used: usize,
    /// Bytes that may be used.
    room: usize,
    left_out: u64,
}

impl TextLines<'_> {
    fn new(bytes: &mut [u8], room: usize) -> TextLines<'_> {
        TextLines { bytes, used: 0, room, left_out: 0 }
    }

    fn push(&mut self, bytes: &[u8]) -> fmt::Result {
        let end = self.used + bytes.len();
        let place = self.bytes.get_mut(self.used..end).filter(|_| end <= self.room);
        place.ok_or(fmt::Error)?.copy_from_slice(bytes);
        self.used = end;
        Ok(())
    }

    /// Adds a line that begins with some words and ends with a text. Line ends in both become `?`.
    fn add(&mut self, words: fmt::Arguments<'_>, text: &[u8]) {
        let start = self.used;
        let is_whole = self.write_fmt(words).is_ok() && self.push(text).is_ok();
        self.bytes[start..self.used].iter_mut().filter(|byte| **byte == b'\n').for_each(|byte| *byte = b'?');
        if !is_whole || self.push(b"\n").is_err() {
            self.used = start;
            self.left_out += 1;
        }
    }

    /// Adds the last lines.
    fn end(&mut self) {
        self.room = self.bytes.len();
        let left_out = self.left_out;
        self.add(format_args!("left_out {left_out}"), &[]);
        let _ = self.push(LAST_LINE.as_bytes());
    }
}

impl Write for TextLines<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes())
    }
}

/// Most bytes in the file's ring. A reader of a full ring would take its first block for an
/// overwritten one.
const MOST_WRITTEN: usize = RING_BYTES - BLOCK_BYTES;

/// The ring of the file.
struct Ring<'a> {
    file: &'a File,
    out: &'a mut [u64; BLOCK],
    /// Words in `out`.
    filled: usize,
    /// Bytes in the file.
    written: usize,
}

impl Ring<'_> {
    /// Adds a record, which fits into a block. Leaves the record out if the ring is full.
    fn add(&mut self, record: &[u64]) -> Result<(), Errno> {
        let rest = BLOCK - self.filled;
        let is_last = self.written + BLOCK_BYTES >= MOST_WRITTEN;
        if self.written == MOST_WRITTEN || (is_last && record.len() > rest) {
            return Ok(());
        }
        if record.len() > rest {
            self.out[self.filled..].fill(0);
            self.out[self.filled] = u64::from(PAD) | (rest as u64 * 8) << 32;
            self.filled = BLOCK;
            self.flush()?;
        }
        self.out[self.filled..][..record.len()].copy_from_slice(record);
        self.filled += record.len();
        if self.filled == BLOCK { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Errno> {
        self.file.write_at(bytes_of(&self.out[..self.filled]), FILE_OFFSET + RING_AT + self.written)?;
        self.written += self.filled * 8;
        self.filled = 0;
        Ok(())
    }
}

fn bytes_of(words: &[u64]) -> &[u8] {
    // SAFETY: the words are `size_of_val(words)` initialised bytes, and any address is aligned for
    // bytes.
    unsafe { core::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

/// Writes a heap profile of a manager's live samples.
///
/// # Errors
/// Returns the error of making or writing the file. The file is empty then.
pub(super) fn write<P: Platform>(core: &Core<P>, mm: &Mm<P>, subject: &Occasion<'_>) -> Result<(), Errno> {
    let length = size_of::<Scratch>().next_multiple_of(memory::page_size());
    let address = memory::map(length)?;
    // SAFETY: `map` mapped the memory above, with at least the size of `Scratch`. This thread alone
    // uses it. Zeroes are a valid `Scratch`.
    let scratch = unsafe { &mut *core::ptr::with_exposed_provenance_mut::<Scratch>(address) };
    let written = make(subject.name).and_then(|file| {
        let written = fill(core, mm, subject, &file, scratch);
        written.inspect_err(|_| _ = file.set_length(0))
    });
    // SAFETY: `map` mapped the memory above. No code uses the reference any more.
    let _ = unsafe { memory::unmap(address, length) };
    written
}

/// Makes the file.
fn make(name: FileName<'_>) -> Result<File, Errno> {
    let (start, first, tries, end) = match name {
        FileName::Whole(path) => return File::make_or_empty(path),
        FileName::Numbered { start, first, tries, end } => (start, first, tries, end),
    };
    let process = thread::process_id();
    for number in (first..=u32::MAX).take(tries) {
        let mut name = [0; LONGEST_PATH + 64];
        let mut lines = TextLines::new(&mut name, LONGEST_PATH + 63);
        let named = lines.push(start.to_bytes()).and_then(|()| write!(lines, ".{process}.{number}{end}"));
        let name = CStr::from_bytes_until_nul(&name).ok().filter(|_| named.is_ok()).ok_or(Errno::NAMETOOLONG)?;
        match File::make_private(name) {
            Err(Errno::EXIST) => {}
            made => return made,
        }
    }
    Err(Errno::EXIST)
}

fn fill<P: Platform>(
    core: &Core<P>,
    mm: &Mm<P>,
    subject: &Occasion<'_>,
    file: &File,
    scratch: &mut Scratch,
) -> Result<(), Errno> {
    let Scratch { text, block, out, record, line, code, threads, groups } = scratch;
    file.set_length(FILE_OFFSET + FILE_AREA_BYTES)?;
    let mut lines = TextLines::new(text, FILE_OFFSET - LAST_LINES);
    let _ = lines.push(FIRST_LINE.as_bytes());
    let mut name = [0; 64];
    let name = read_file(c"/proc/self/comm", &mut name).unwrap_or_default().trim_ascii_end();
    lines.add(format_args!("pid {}", thread::process_id()), &[]);
    lines.add(format_args!("name "), name);
    lines.add(format_args!("why {}", subject.reason), &[]);
    lines.add(format_args!("time {}", file.changed_at()?), &[]);
    lines.add(format_args!("now {}", clock::precise()), &[]);
    lines.add(format_args!("used {}", subject.used), &[]);
    mappings::each_own(line, &mut |mapping, line| {
        if mapping.rights[2] == b'x' {
            code.add(mapping.start..mapping.end);
            lines.add(format_args!("code "), line);
        }
    })?;
    let head = core.with_samples(mm, |recorder, _| recorder.head()).flatten().ok_or(Errno::NOENT)?;
    let mut ring = Ring { file, out, filled: 0, written: 0 };
    let mut at = head.saturating_sub(RING_BYTES as u64).next_multiple_of(BLOCK_BYTES as u64);
    while at < head {
        let copied = core.with_samples(mm, |recorder, area| {
            // SAFETY: the area is that of the recorder, which is locked. So no other thread of the
            // process writes to it.
            let words = unsafe { recorder.copy_block(area, at, block) };
            each_sample(&mut block[..words], &mut |record| {
                if !recorder.is_live(record[3], record[1]) {
                    // `each_sample` below skips a record without a kind.
                    record[0] &= !u64::from(u32::MAX);
                }
                Ok(())
            })
            .map(|()| words)
        });
        let words = copied.ok_or(Errno::NOENT)??;
        each_sample(&mut block[..words], &mut |record| {
            let length = clear(record, code);
            ring.add(&record[..length])
        })?;
        at += BLOCK_BYTES as u64;
    }
    let mut live = 0;
    for first in (0..SLOT_COUNT).step_by(BLOCK / SLOT) {
        // SAFETY: the area is that of the recorder, which is locked, so no other thread of the
        // process writes to it. It has all slots below `SLOT_COUNT`.
        let copied = core.with_samples(mm, |recorder, area| unsafe { recorder.copy_slots(area, first, block) });
        copied.ok_or(Errno::NOENT)?;
        for slot in block.chunks_exact(SLOT).filter(|slot| slot[0] != 0 && slot[6] >> 32 != 0) {
            let length = core.with_samples(mm, |recorder, area| kept(recorder, area, slot, record));
            let length = length.ok_or(Errno::NOENT)?;
            if length > 0 {
                let length = clear(&mut record[..length], code);
                ring.add(&record[..length])?;
            }
        }
        let used = gather(block, threads, groups);
        file.write_at(bytes_of(&block[..used * SLOT]), FILE_OFFSET + SLOTS_AT + live * SLOT * 8)?;
        live += used;
    }
    ring.flush()?;
    let bytes = ring.written;
    let header = core.with_samples(mm, |_, area| header(area, bytes as u64, live as u64)).ok_or(Errno::NOENT)?;
    file.write_at(bytes_of(&header), FILE_OFFSET)?;
    threads.iter().for_each(|id| add_thread(&mut lines, id));
    groups.iter().for_each(|id| add_group(mm, &mut lines, GroupId::from_bits(id)));
    lines.end();
    let used = lines.used;
    file.write_at(&text[..used], 0)
}

/// Writes the record of a slot whose stack is kept outside of the ring. Returns the words of the
/// record, or 0 if there is no such stack.
fn kept(recorder: &Recorder, area: &AreaHeader, slot: &[u64], record: &mut [u64]) -> usize {
    let (head, stack) = record.split_at_mut(RECORD);
    let &[number, address, size, mean, time, group, thread, ..] = slot else { return 0 };
    // SAFETY: the area is that of the recorder, which is locked. So no other thread of the process
    // writes to it.
    let Some(kept) = (unsafe { recorder.kept(area, address, number, stack) }) else { return 0 };
    let length = RECORD + kept.words;
    let thread = thread & u64::from(u32::MAX) | (kept.words as u64 * 8) << 32;
    head[..8].copy_from_slice(&[u64::from(ALLOC), number, time, address, size, mean, group, thread]);
    head[8..].copy_from_slice(&kept.registers);
    length
}

/// Calls `each` with every record of a sample in a block, until one fails. A damaged record ends
/// the block.
fn each_sample(mut words: &mut [u64], each: &mut dyn FnMut(&mut [u64]) -> Result<(), Errno>) -> Result<(), Errno> {
    while let Some(&first) = words.first() {
        let (kind, bytes) = (first as u32, (first >> 32) as usize);
        let length = bytes / 8;
        if kind == PAD || length == 0 || length > words.len() || !bytes.is_multiple_of(8) {
            return Ok(());
        }
        let (record, rest) = core::mem::take(&mut words).split_at_mut(length);
        words = rest;
        let stack = record.get(7).map_or(usize::MAX, |word| (word >> 32) as usize);
        if kind == ALLOC && length >= RECORD && stack <= (length - RECORD) * 8 && stack.is_multiple_of(8) {
            each(record)?;
        }
    }
    Ok(())
}

/// Clears all words of a sample's stack that are no address of code or of the stack. Cuts off the
/// words behind the last such address. Returns the number of words of the record.
fn clear(record: &mut [u64], code: &CodeRanges) -> usize {
    let (stack_bytes, start) = (record[7] >> 32, record[9]);
    let is_kept = |word: u64| word.wrapping_sub(start) < stack_bytes || code.contains(word);
    let (head, stack) = record.split_at_mut(RECORD);
    let mut kept = 0;
    for (at, word) in stack[..(stack_bytes / 8) as usize].iter_mut().enumerate() {
        let bare = without_signature(*word);
        if is_kept(bare) {
            *word = bare;
            kept = at + 1;
        } else {
            *word = 0;
        }
    }
    if !is_kept(head[10]) {
        head[10] = 0;
    }
    let length = RECORD + kept;
    head[0] = u64::from(ALLOC) | (length as u64 * 8) << 32;
    head[7] = head[7] & u64::from(u32::MAX) | (kept as u64 * 8) << 32;
    length
}

/// Moves the slots of live samples to the start of a block, and adds their threads and groups to
/// the sets. Returns the number of live samples.
fn gather(block: &mut [u64; BLOCK], threads: &mut Ids, groups: &mut Ids) -> usize {
    let mut used = 0;
    for at in (0..BLOCK).step_by(SLOT) {
        if block[at] != 0 {
            groups.add(block[at + 5]);
            // Clears the number of a kept stack's cell. The file has no cells.
            block[at + 6] &= u64::from(u32::MAX);
            threads.add(block[at + 6]);
            block.copy_within(at..at + SLOT, used * SLOT);
            used += 1;
        }
    }
    used
}

/// Returns the header of the file's area.
fn header(area: &AreaHeader, bytes: u64, live: u64) -> [u64; HEADER] {
    // Relaxed: the numbers stand alone; they publish no other data.
    let number = |word: &core::sync::atomic::AtomicU64| word.load(Ordering::Relaxed);
    let is_on = area.is_on.load(Ordering::Relaxed);
    [
        MAGIC,
        u64::from(FORMAT_OF_FILES) | u64::from(is_on) << 32,
        number(&area.mean),
        bytes,
        number(&area.taken),
        live,
        number(&area.without_slot),
        number(&area.without_stack),
        number(&area.began),
    ]
}

/// Adds the name of a thread, unless it has ended.
fn add_thread(lines: &mut TextLines<'_>, id: u64) {
    let (mut path, mut name) = ([0; 64], [0; 64]);
    let made = write!(TextLines::new(&mut path, 63), "/proc/self/task/{id}/comm");
    let path = CStr::from_bytes_until_nul(&path).ok().filter(|_| made.is_ok());
    if let Some(Ok(name)) = path.map(|path| read_file(path, &mut name)) {
        lines.add(format_args!("thread {id} "), name.trim_ascii_end());
    }
}

/// Adds the path of a group, unless it is gone.
fn add_group<P: Platform>(mm: &Mm<P>, lines: &mut TextLines<'_>, id: GroupId) {
    let Some(grouped) = mm.groups_if_made() else { return };
    let (mut above, mut depth) = ([GroupId::ROOT; DEEPEST], 0);
    let mut next = Some(id);
    while let Some(group) = next.filter(|&group| group != GroupId::ROOT && depth < DEEPEST) {
        let Ok((parent, _)) = grouped.place(group) else { return };
        above[depth] = group;
        depth += 1;
        next = parent;
    }
    let mut path = [0; DEEPEST * 64];
    let mut names = TextLines::new(&mut path, DEEPEST * 64);
    for (at, &group) in above[..depth].iter().rev().enumerate() {
        let Ok((_, name)) = grouped.place(group) else { return };
        let slash = if at > 0 { "/" } else { "" };
        if write!(names, "{slash}{}", name.as_str()).is_err() {
            return;
        }
    }
    let used = names.used;
    lines.add(format_args!("group {} ", id.to_bits()), &path[..used]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;
    use std::vec::Vec;

    fn scratch() -> Box<Scratch> {
        // SAFETY: zeroes are valid for its fields, which are numbers.
        unsafe { Box::<Scratch>::new_zeroed().assume_init() }
    }

    fn record(kind: u32, stack: &[u64]) -> Vec<u64> {
        let mut words = std::vec![0; RECORD + stack.len()];
        words[0] = u64::from(kind) | (words.len() as u64 * 8) << 32;
        words[7] = 5 | (stack.len() as u64 * 8) << 32;
        words[9] = 0x7ff0_0000;
        words[RECORD..].copy_from_slice(stack);
        words
    }

    #[test]
    fn stack_keeps_addresses_alone() {
        let mut scratch = scratch();
        scratch.code.add(0x1000..0x2000);
        scratch.code.add(0x9000..0xa000);
        let secret = u64::from_le_bytes(*b"password");
        let stack = [secret, 0x1000, 0x2000, 7, 0x9fff, 0x7ff0_0008, 0x7ff0_0048, 0xfff, secret];
        let mut words = record(ALLOC, &stack);
        (words[8], words[10]) = (0x1234, secret);
        let length = clear(&mut words, &scratch.code);
        let kept = &words[RECORD..length];
        assert_eq!(kept, [0, 0x1000, 0, 0, 0x9fff, 0x7ff0_0008], "an address behind the copy tells nothing");
        assert_eq!((words[0] >> 32, words[7], words[10]), (length as u64 * 8, 5 | 48 << 32, 0));
        let mut empty = record(ALLOC, &[secret; 4]);
        assert_eq!(clear(&mut empty, &scratch.code), RECORD);
    }

    #[test]
    fn full_ring_of_a_file_is_read_from_its_start() {
        let mut scratch = scratch();
        let path = std::format!("{}/neap-ring", std::env::temp_dir().display());
        let start = std::ffi::CString::new(path.clone()).unwrap();
        let file = make(FileName::Numbered { start: &start, first: 1, tries: 16, end: "" }).unwrap();
        let mut ring = Ring { file: &file, out: &mut scratch.out, filled: 0, written: 0 };
        let stack = record(ALLOC, &[1; 100]);
        // More than the ring has.
        (0..2 * RING_BYTES / (stack.len() * 8)).for_each(|_| ring.add(&stack).unwrap());
        ring.flush().unwrap();
        std::fs::remove_file(std::format!("{path}.{}.1", std::process::id())).unwrap();
        // A reader passes over blocks that a process may be overwriting.
        let oldest = (ring.written + BLOCK_BYTES).saturating_sub(RING_BYTES).next_multiple_of(BLOCK_BYTES);
        assert_eq!((oldest, ring.written / BLOCK_BYTES), (0, RING_BYTES / BLOCK_BYTES - 2));
    }

    #[test]
    fn damaged_records_end_a_block_and_others_are_passed_over() {
        let count = |words: &mut [u64]| {
            let mut count = 0;
            let mut add = |_: &mut [u64]| {
                count += 1;
                Ok(())
            };
            each_sample(words, &mut add).unwrap();
            count
        };
        let (sound, other) = (record(ALLOC, &[1; 9]), record(2, &[]));
        let mut words = [&sound[..], &other, &sound, &[u64::from(PAD)], &sound].concat();
        assert_eq!(count(&mut words), 2);
        // Without a length, one beyond the block, one that is no number of words.
        let lengths = [(0, 0), (0, 1 | 8000 << 32), (0, u64::MAX), (0, 1 | 12 << 32), (0, 1 | 8 << 32)];
        for (at, word) in lengths.into_iter().chain([(7, u64::MAX), (7, 4 << 32), (7, 8000 << 32)]) {
            let mut words = [&sound[..], &sound].concat();
            words[at] = word;
            assert!(count(&mut words) <= 1, "{at} {word:#x}");
        }
        let error = each_sample(&mut words, &mut |_| Err(Errno::NOSPC));
        assert_eq!(error, Err(Errno::NOSPC));
    }

    #[test]
    fn lines_that_do_not_fit_are_counted_and_have_no_ends_inside() {
        let mut bytes = [0; 200];
        let mut lines = TextLines::new(&mut bytes, 40);
        lines.add(format_args!("thread {} ", 7), b"a\nb");
        lines.add(format_args!("group {} ", 8), &[b'x'; 30]);
        lines.add(format_args!("last"), &[]);
        lines.end();
        let used = lines.used;
        assert_eq!(core::str::from_utf8(&bytes[..used]), Ok("thread 7 a?b\nlast\nleft_out 1\nend\n"));
    }

    #[test]
    fn ids_are_a_set_without_zero_and_bounded() {
        let mut scratch = scratch();
        (0..3).for_each(|_| (0..100).for_each(|id| scratch.threads.add(id << 32)));
        assert_eq!(scratch.threads.iter().count(), 99);
        (1..1_000_000).for_each(|id| scratch.groups.add(id));
        assert_eq!(scratch.groups.iter().count(), MOST_NAMES / 4 * 3);
    }

    #[test]
    fn slots_of_live_samples_come_to_the_start() {
        let mut scratch = scratch();
        for at in [0, 5, BLOCK / SLOT - 1] {
            scratch.block[at * SLOT..][..SLOT].copy_from_slice(&[9, at as u64, 0, 0, 0, 3, 4 | 7 << 32, 0]);
        }
        let Scratch { block, threads, groups, .. } = &mut *scratch;
        assert_eq!(gather(block, threads, groups), 3);
        assert_eq!([block[1], block[SLOT + 1], block[2 * SLOT + 1]], [0, 5, (BLOCK / SLOT - 1) as u64]);
        assert!(threads.iter().eq([4]) && groups.iter().eq([3]));
    }
}
