//! Tests of areas that the tests make: intact ones, ones whose ring has wrapped, and ones with
//! random bytes.

use core::mem::{offset_of, size_of};
use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use neap_base::profile_area::{
    ALLOC, AREA_BYTES, AllocRecord, AreaHeader, BLOCK_BYTES, CELL_BYTES, CELL_COUNT, CELLS_AT, FILE_AREA_BYTES,
    FILE_OFFSET, FORMAT, FORMAT_OF_FILES, FREE, GROUP_WORDS, MAGIC, MOST_STACK, NOT_KEPT, PAD, RING_AT, RING_BYTES,
    SLOT_COUNT, SLOTS_AT, Slot,
};

use super::area::{Area, FreedMeanwhile, RingRecord, SampledAllocation};
use crate::work::meter::Random;
use neap_testing::random::seed;

/// An area as a process would write it.
pub(super) struct Writer {
    pub(super) file: File,
    head: u64,
    number: u64,
    cells: usize,
}

/// What a test says of a sample.
#[derive(Clone, Copy, Default)]
pub(super) struct Written<'a> {
    pub(super) size: u64,
    pub(super) registers: [u64; 3],
    pub(super) stack: &'a [u8],
    pub(super) thread: u32,
}

impl Writer {
    pub(super) fn new() -> Writer {
        // SAFETY: the name is a C string; the descriptor is owned by the file alone.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"neap-test".as_ptr(), libc::MFD_CLOEXEC)) };
        file.set_len((FILE_OFFSET + AREA_BYTES) as u64).unwrap();
        let writer = Writer { file, head: 0, number: 0, cells: 0 };
        writer.put_word(offset_of!(AreaHeader, magic), MAGIC);
        writer.put(offset_of!(AreaHeader, format), &FORMAT.to_ne_bytes());
        writer.put_word(offset_of!(AreaHeader, mean), 1000);
        writer
    }

    pub(super) fn area(&self) -> Area {
        Area::of(self.file.try_clone().unwrap()).unwrap()
    }

    pub(super) fn put(&self, at: usize, bytes: &[u8]) {
        self.file.write_all_at(bytes, (FILE_OFFSET + at) as u64).unwrap();
    }

    fn put_word(&self, at: usize, word: u64) {
        self.put(at, &word.to_ne_bytes());
    }

    pub(super) fn set_head(&mut self, head: u64) {
        self.head = head;
        self.put_word(offset_of!(AreaHeader, head), head);
    }

    fn append(&mut self, record: &[u8]) {
        let left = BLOCK_BYTES - (self.head % BLOCK_BYTES as u64) as usize;
        if record.len() > left {
            self.put_ring(&[PAD.to_ne_bytes(), (left as u32).to_ne_bytes()].concat());
            self.head += left as u64;
        }
        self.put_ring(record);
        self.set_head(self.head + record.len() as u64);
    }

    fn put_ring(&self, bytes: &[u8]) {
        self.put(RING_AT + (self.head % RING_BYTES as u64) as usize, bytes);
    }

    pub(super) fn alloc(&mut self, written: Written<'_>) -> u64 {
        self.number += 1;
        let length = size_of::<AllocRecord>() + written.stack.len();
        let mut record = [ALLOC.to_ne_bytes(), (length as u32).to_ne_bytes()].concat();
        for word in [self.number, self.number * 10, 0x1000, written.size, 1000, 0] {
            record.extend(word.to_ne_bytes());
        }
        record.extend(written.thread.to_ne_bytes());
        record.extend((written.stack.len() as u32).to_ne_bytes());
        written.registers.iter().for_each(|word| record.extend(word.to_ne_bytes()));
        record.extend(written.stack);
        self.append(&record);
        self.slot(self.number as usize % SLOT_COUNT, self.number, written.size);
        self.number
    }

    pub(super) fn free(&mut self, number: u64) {
        let mut record = [FREE.to_ne_bytes(), 24_u32.to_ne_bytes()].concat();
        record.extend([number, number * 10 + 5].iter().flat_map(|word| word.to_ne_bytes()));
        self.append(&record);
        self.slot(number as usize % SLOT_COUNT, 0, 0);
    }

    /// Writes a live sample whose record the ring no longer has. No word of its stack may be 0. Its
    /// cells follow each other in descending order.
    pub(super) fn keep(&mut self, size: u64, registers: [u64; 3], stack: &[u64]) -> SampledAllocation {
        self.number += 1;
        let mut stream = registers.to_vec();
        stream.push(stack.len() as u64);
        for group in stack.chunks(GROUP_WORDS) {
            stream.push(u64::MAX >> (GROUP_WORDS - group.len()));
            stream.extend(group);
        }
        let mut link = 0_u64;
        for words in stream.chunks(CELL_BYTES / 8 - 1).rev() {
            let cell: Vec<u8> = [link].iter().chain(words).flat_map(|word| word.to_ne_bytes()).collect();
            self.put(CELLS_AT + self.cells * CELL_BYTES, &cell);
            self.cells += 1;
            link = self.cells as u64;
        }
        let slot = self.number as usize % SLOT_COUNT;
        self.slot(slot, self.number, size);
        self.set_kept(slot, link as u32);
        SampledAllocation { number: self.number, size, slot: slot as u32, ..SampledAllocation::default() }
    }

    fn set_kept(&self, slot: usize, kept: u32) {
        self.put(SLOTS_AT + slot * size_of::<Slot>() + offset_of!(Slot, kept), &kept.to_ne_bytes());
    }

    fn slot(&self, at: usize, number: u64, size: u64) {
        let slot = SLOTS_AT + at * size_of::<Slot>();
        self.put_word(slot + offset_of!(Slot, number), number);
        self.put_word(slot + offset_of!(Slot, size), size);
    }
}

/// The numbers of the allocations, and of the frees, that a look finds.
fn drain(area: &mut Area) -> (Vec<u64>, Vec<u64>) {
    let (mut made, mut freed) = (Vec::new(), Vec::new());
    area.drain(&mut |record| match record {
        RingRecord::Alloc(sample, _) => made.push(sample.number),
        RingRecord::Free(number, _) => freed.push(number),
    })
    .unwrap();
    (made, freed)
}

#[test]
fn records_are_read_once_in_their_order() {
    let mut writer = Writer::new();
    let mut area = writer.area();
    assert_eq!(drain(&mut area), (vec![], vec![]));
    let stack: Vec<u8> = (0..64).collect();
    writer.alloc(Written { size: 77, registers: [1, 2, 3], stack: &stack, thread: 9 });
    writer.alloc(Written::default());
    writer.free(1);
    let mut seen = Vec::new();
    area.drain(&mut |record| match record {
        RingRecord::Alloc(sample, of) => seen.push((sample, of.instruction, of.frame_pointer, of.bytes.to_vec())),
        RingRecord::Free(number, _) => assert_eq!(number, 1),
    })
    .unwrap();
    assert_eq!((seen.len(), seen[0].0.size, seen[0].0.thread, seen[0].0.time), (2, 77, 9, 10));
    assert_eq!((seen[0].1, seen[0].2, &seen[0].3, seen[1].3.len()), (1, 3, &stack, 0));
    assert_eq!(drain(&mut area), (vec![], vec![]));
    writer.free(2);
    assert_eq!(drain(&mut area), (vec![], vec![2]));
    assert_eq!((area.lost(), area.damaged, area.overruns), (0, 0, 0));
}

#[test]
fn reader_that_starts_late_or_is_slow_counts_what_it_lost() {
    let mut writer = Writer::new();
    let mut area = writer.area();
    let stack = vec![7; MOST_STACK];
    let most = RING_BYTES / MOST_STACK;
    for _ in 0..5 * most {
        writer.alloc(Written { stack: &stack, ..Written::default() });
    }
    // At the first look, the oldest whole block is the start.
    let (made, _) = drain(&mut area);
    assert!(made.len() > most / 2 && made.windows(2).all(|pair| pair[1] == pair[0] + 1), "{}", made.len());
    assert_eq!((made.last(), area.lost(), area.overruns), (Some(&(5 * most as u64)), 0, 0));
    for _ in 0..2 * most {
        writer.alloc(Written { stack: &stack, ..Written::default() });
    }
    let (more, _) = drain(&mut area);
    assert_eq!((more.last(), area.overruns, area.damaged), (Some(&(7 * most as u64)), 1, 0));
    assert_eq!(area.lost(), 2 * most as u64 - more.len() as u64);
    assert!(area.lost() > 0);
}

#[test]
fn slots_are_read() {
    let writer = Writer::new();
    writer.slot(0, 5, 50);
    writer.slot(100_000, 9, 90);
    let mut seen = Vec::new();
    writer.area().slots(&mut |slot| seen.push((slot.number, slot.size))).unwrap();
    assert_eq!(seen, [(5, 50), (9, 90)]);
}

#[test]
fn files_without_an_area_are_refused() {
    let writer = Writer::new();
    writer.put(offset_of!(AreaHeader, format), &3_u32.to_ne_bytes());
    let error = Area::of(writer.file.try_clone().unwrap()).unwrap_err().to_string();
    assert!(error.contains("format 3") && error.contains("formats 1 and 2"), "{error}");
    writer.put(0, &[0; 8]);
    assert!(Area::of(writer.file.try_clone().unwrap()).unwrap_err().to_string().contains("empty or damaged"));
    writer.file.set_len(1 << 20).unwrap();
    assert!(Area::of(writer.file).unwrap_err().to_string().contains("no place"));
}

/// The registers and words of a kept stack.
fn kept(area: &mut Area, of: &SampledAllocation) -> Option<([u64; 3], Vec<u64>)> {
    let mut bytes = Vec::new();
    let stack = area.kept_stack(of, &mut bytes).ok()??;
    let words = stack.bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
    Some(([stack.instruction, stack.stack_pointer, stack.frame_pointer], words))
}

#[test]
fn kept_stacks_are_read_while_their_samples_are_live() {
    let mut writer = Writer::new();
    let mut area = writer.area();
    let stacks = [0, 1, 27, 64, 65, 500, 900].map(|words| (0..words).map(|word| word + 7).collect::<Vec<u64>>());
    let samples = stacks.each_ref().map(|stack| writer.keep(stack.len() as u64, [1, 2, 3], stack));
    for (sample, stack) in samples.iter().zip(&stacks) {
        assert_eq!(kept(&mut area, sample), Some(([1, 2, 3], stack.clone())));
    }
    // A slot that another sample has, one without a kept stack, and one that found no room.
    let freed = SampledAllocation { number: 99, ..samples[5] };
    assert_eq!(area.kept_stack(&freed, &mut Vec::new()).err(), Some(FreedMeanwhile));
    writer.set_kept(samples[5].slot as usize, 0);
    assert_eq!((kept(&mut area, &samples[5]), area.not_kept), (None, 0));
    writer.set_kept(samples[5].slot as usize, NOT_KEPT);
    assert_eq!((kept(&mut area, &samples[5]), area.not_kept, area.damaged), (None, 1, 0));
    // Cells that there are not, and a chain without an end.
    writer.set_kept(samples[5].slot as usize, CELL_COUNT as u32 + 1);
    assert_eq!((kept(&mut area, &samples[5]), area.damaged), (None, 1));
    writer.put(CELLS_AT, &[0xff; CELL_BYTES]);
    writer.put_word(CELLS_AT, 1);
    writer.put_word(CELLS_AT + 4 * 8, 4000);
    writer.set_kept(samples[5].slot as usize, 1);
    assert_eq!((kept(&mut area, &samples[5]), area.damaged), (None, 2));
}

#[test]
fn area_of_an_older_process_is_read_without_kept_stacks() {
    let mut writer = Writer::new();
    let sample = writer.keep(5, [1, 2, 3], &[7; 9]);
    assert!(kept(&mut writer.area(), &sample).is_some());
    writer.put(offset_of!(AreaHeader, format), &FORMAT_OF_FILES.to_ne_bytes());
    assert_eq!(kept(&mut writer.area(), &sample), None);
    writer.alloc(Written::default());
    writer.file.set_len((FILE_OFFSET + FILE_AREA_BYTES) as u64).unwrap();
    let mut area = writer.area();
    assert_eq!((drain(&mut area), kept(&mut area, &sample)), ((vec![2], vec![]), None));
    // A file that is too short for its format.
    writer.put(offset_of!(AreaHeader, format), &FORMAT.to_ne_bytes());
    assert_eq!((kept(&mut writer.area(), &sample), area.damaged), (None, 0));
}

#[test]
fn damaged_kept_stacks_are_counted_or_read() {
    let mut numbers = Random::new(seed());
    let mut random = || numbers.draw();
    let (mut damaged, mut read) = (0, 0);
    for _ in 0..200 {
        let mut writer = Writer::new();
        let mut area = writer.area();
        let samples: Vec<_> = (0..20).map(|_| writer.keep(8, [1, 2, 3], &vec![9; (random() % 900) as usize])).collect();
        for _ in 0..1 + random() % 40 {
            let cell = (random() % writer.cells as u64) as usize;
            // Links, counts and masks are at the start of a cell.
            let at = CELLS_AT + cell * CELL_BYTES + (random() % 8) as usize * 8;
            let word = match random() % 4 {
                0 => random(),
                1 => random() % (2 * writer.cells as u64),
                2 => u64::MAX,
                _ => random() % 5000,
            };
            writer.put_word(at, word);
        }
        for sample in &samples {
            if let Some((_, words)) = kept(&mut area, sample) {
                assert!(words.len() <= MOST_STACK / 8);
                read += 1;
            }
        }
        damaged += area.damaged;
    }
    assert!(damaged > 100 && read > 500, "{damaged} damaged, {read} read");
}

#[test]
fn damaged_areas_end_and_are_counted() {
    let mut numbers = Random::new(seed());
    let mut random = || numbers.draw();
    let mut damaged = 0;
    for _ in 0..300 {
        let mut writer = Writer::new();
        let mut area = writer.area();
        for _ in 0..20 {
            let stack = vec![1; (random() % 4000) as usize / 8 * 8];
            let number = writer.alloc(Written { stack: &stack, ..Written::default() });
            if random() % 2 == 0 {
                writer.free(number);
            }
        }
        let end = writer.head;
        for _ in 0..1 + random() % 8 {
            let at = RING_AT + (random() % end) as usize;
            let word = match random() % 4 {
                0 => random(),
                1 => random() % 4,
                2 => u64::MAX,
                _ => (random() % 5) | (random() % 200_000) << 32,
            };
            writer.put(at - at % 4, &word.to_ne_bytes());
        }
        match random() % 6 {
            0 => writer.set_head(random()),
            1 => writer.set_head(end.wrapping_sub(random() % 4000)),
            2 => writer.set_head(u64::MAX - random() % 3),
            _ => {}
        }
        // Records are of 24 bytes at least.
        let most = RING_BYTES / 24;
        for _ in 0..2 {
            let (made, freed) = drain(&mut area);
            assert!(made.len() + freed.len() <= most);
        }
        damaged += area.damaged;
        // The count decreases.
        writer.set_head(0);
        assert_eq!(drain(&mut area), (vec![], vec![]));
        assert!(area.damaged > 0 || end == 0 || area.lost() < u64::MAX);
    }
    assert!(damaged > 50, "only {damaged} inputs were damaged");
}
