//! Mutated samples and maps of generated code, as a hostile process may write them. The tests check
//! each output: writing it does not panic and ends, its memory is bounded, and it has no control
//! characters for a terminal.
//!
//! The corpus is an area with a header, a few slots, records and kept stacks, and a perf map. Each
//! input is the whole corpus with a few mutations. The tests print the seed. `NEAP_SEED` replays
//! one seed, and `NEAP_INPUTS` sets the number of inputs of the long run.

use core::mem::size_of;
use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;

use anyhow::Result;
use neap_base::profile_area::{AREA_BYTES, AreaHeader, CELL_BYTES, CELLS_AT, FILE_OFFSET, RING_AT, SLOTS_AT, Slot};
use prost::Message;

use super::area::Area;
use super::area_tests::{Writer, Written};
use super::limits::ProfileLimits;
use super::perf_map::PerfMap;
use super::resolved::{ChosenSamples, Profile, Subjected};
use super::saved::tests::{TestRow, profile};
use super::session::Session;
use super::sums::ProfileView;
use super::top_table::{self, ProfileObject};
use super::unwind::Unwinder;
use super::{dhat, folded, html, pprof, saved};
use crate::look::foreign::tests::first_hostile;
use crate::look::handle::ProcessHandle;
use crate::look::hostile_tests::{Random, assert_resident_below, number, run_apart, seed};

/// Addresses of generated code.
const CODE: core::ops::Range<u64> = 0x10_0000..0x20_0000;
/// Most bytes of an output. A flame graph begins with a script.
const SHOWN: usize = 2 << 20;
const MOST_RESIDENT: u64 = 64 << 20;
/// Slots, bytes of the ring, and bytes of cells that are mutated.
const SLOTS: usize = 8;
const RING: usize = 2 << 10;
const CELLS: usize = 4 * CELL_BYTES;

fn memfd() -> File {
    // SAFETY: the name is a C string; the descriptor is owned by the file alone.
    unsafe { File::from_raw_fd(libc::memfd_create(c"neap-test".as_ptr(), libc::MFD_CLOEXEC)) }
}

/// The good inputs, and the files and the process that inputs are read from.
pub(crate) struct Corpus {
    header: Vec<u8>,
    slots: Vec<u8>,
    ring: Vec<u8>,
    cells: Vec<u8>,
    map: Vec<u8>,
    area: File,
    names: File,
    /// A process that has ended.
    handle: Arc<ProcessHandle>,
}

impl Corpus {
    pub(crate) fn new() -> Corpus {
        let mut writer = Writer::new();
        for size in [32, 9000] {
            let frames = (0..8 + size / 1000).flat_map(|at| [0x7000 + 16 * (at + 1), CODE.start + 64 * at + 8]);
            writer.keep(size, [CODE.start + 70, 0x7000, 0x7000], &frames.collect::<Vec<u64>>());
        }
        for size in [16, 100, 5000, 100_000] {
            // A frame pointer leads from frame to frame.
            let frames = (0..8_u64).flat_map(|at| [0x7000 + 16 * (at + 1), CODE.start + 64 * at + 8]);
            let stack: Vec<u8> = frames.flat_map(u64::to_le_bytes).collect();
            let registers = [CODE.start + size % 1000, 0x7000, 0x7000];
            let number = writer.alloc(Written { size, registers, stack: &stack, thread: size as u32 });
            if size == 100 {
                writer.free(number);
            }
        }
        let read = |at: usize, length: usize| {
            let mut bytes = vec![0; length];
            writer.file.read_exact_at(&mut bytes, (FILE_OFFSET + at) as u64).unwrap();
            bytes
        };
        let map =
            (0..40).map(|at| format!("{:x} 40 py::work_{at}:/a/b c.py\n", CODE.start + 64 * at)).collect::<String>();
        let mut child = Command::new("true").spawn().unwrap();
        let handle = Arc::new(ProcessHandle::open(child.id() as i32).unwrap());
        child.wait().unwrap();
        let area = memfd();
        area.set_len((FILE_OFFSET + AREA_BYTES) as u64).unwrap();
        let (header, slots) = (read(0, size_of::<AreaHeader>()), read(SLOTS_AT, SLOTS * size_of::<Slot>()));
        let (ring, cells) = (read(RING_AT, RING), read(CELLS_AT, CELLS));
        Corpus { header, slots, ring, cells, map: map.into_bytes(), area, names: memfd(), handle }
    }

    /// Reads and shows one mutated input.
    pub(crate) fn show(&self, random: &mut Random) -> Result<String> {
        let mut parts = [&self.header, &self.slots, &self.ring, &self.cells, &self.map].map(Vec::clone);
        for (at, part) in parts.iter_mut().enumerate() {
            // Most damaged headers are refused.
            if random.below(if at == 0 { 8 } else { 2 }) > 0 {
                continue;
            }
            let length = part.len();
            if at < 4 && random.below(3) > 0 {
                let place = random.below(length / 8) * 8;
                part[place..place + 8].copy_from_slice(&random.word().to_ne_bytes());
            } else {
                random.mutate_bytes(part);
            }
            if at < 4 {
                part.resize(length, 0);
            }
        }
        let [header, slots, ring, cells, map] = parts;
        for (at, bytes) in [(0, &header), (SLOTS_AT, &slots), (RING_AT, &ring), (CELLS_AT, &cells)] {
            self.area.write_all_at(bytes, (FILE_OFFSET + at) as u64)?;
        }
        self.names.set_len(0)?;
        self.names.write_all_at(&map, 0)?;
        let names = PerfMap::of(self.names.try_clone()?, ProfileLimits::FOREIGN);
        let unwinder = Unwinder::of_generated(&self.handle, CODE, names);
        let mut session = Session::of(&self.handle, Area::of(self.area.try_clone()?)?, unwinder, 0)?;
        session.poll()?;
        // All slots are read, most of which are empty.
        if random.below(32) == 0 {
            session.reconcile()?;
        }
        let view = [ProfileView::Live, ProfileView::Allocated, ProfileView::Peak][random.below(3)];
        let of = Subjected { pid: 7, name: "it".into(), seconds: 1.0, in_use: Some(random.word()) };
        let before = (random.below(4) == 0).then(|| random.word());
        let profile = Profile::of(&session, of, view, ChosenSamples { group: None, before });
        let mut text = Vec::new();
        match random.below(256) {
            0 => folded::flame_graph(&mut text, &profile)?,
            1 => html::write(&mut text, &profile)?,
            2..64 => folded::write(&mut text, &folded::lines(&profile))?,
            64..128 => serde_json::to_writer(&mut text, &ProfileObject(&profile))?,
            160..192 => dhat::write(&mut text, &profile)?,
            128..160 => text = pprof::message(&profile).strings.join("\n").into_bytes(),
            _ => top_table::write(&mut text, &profile)?,
        }
        Ok(String::from_utf8(text)?)
    }
}

/// A profile in the format of pprof.
pub(crate) fn good_message() -> Vec<u8> {
    let rows: [TestRow<'_>; 2] = [(&[("f", 3), ("main", 9)], "g", 1e6), (&[("h", 4), ("main", 9)], "", 2e6)];
    pprof::message(&profile("ab", &rows)).encode_to_vec()
}

/// Shows a profile in the format of pprof.
pub(crate) fn show_saved(message: &[u8]) -> Result<String> {
    let mut text = Vec::new();
    top_table::write(&mut text, &saved::of_bytes(message, "file")?)?;
    Ok(String::from_utf8(text)?)
}

#[test]
fn mutated_files_of_pprof_are_shown_or_refused() {
    let seed = seed();
    println!("NEAP_SEED={seed}");
    let good = good_message();
    let mut counts = [0; 2];
    for input in 0..6_000 {
        let mut message = good.clone();
        Random::of_input(seed, input).mutate_bytes(&mut message);
        let text = show_saved(&message);
        counts[usize::from(text.is_err())] += 1;
        let text = text.unwrap_or_default();
        assert_eq!(first_hostile(&text, &['\n']), None, "input {input}: {text}");
    }
    assert!(counts[0] > 100 && counts[1] > 100, "{counts:?} shown and refused");
}

#[test]
fn mutated_profiles_are_shown_or_refused() {
    run_apart("profile::mutated_tests::many_mutated_profiles_are_shown_or_refused", 3_000);
}

#[test]
#[ignore = "takes long: ten million inputs"]
fn many_mutated_profiles_are_shown_or_refused() {
    let (seed, inputs) = (number("NEAP_SEED").unwrap_or(1), number("NEAP_INPUTS").unwrap_or(10_000_000));
    println!("NEAP_SEED={seed}");
    let (corpus, mut read, mut named) = (Corpus::new(), 0, 0);
    for input in 0..inputs {
        let text = match corpus.show(&mut Random::of_input(seed, input)) {
            Ok(text) => {
                read += 1;
                named += u64::from(text.contains("py::work_"));
                text
            }
            Err(error) => crate::look::foreign::escaped(format!("{error:#}").as_bytes()),
        };
        assert!(text.len() <= SHOWN, "{} bytes of input {input}", text.len());
        // The script of a flame graph has tabs.
        assert_eq!(first_hostile(&text, &['\n', '\t']), None, "input {input}: {text}");
    }
    println!("{read} inputs read, {} refused, {named} with names", inputs - read);
    assert!(read > inputs / 2 && read < inputs && named > inputs / 4);
    assert_resident_below(MOST_RESIDENT);
}
