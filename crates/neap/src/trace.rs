//! The trace: every block and run of pages that is handed out or comes back, in a file that `neap lab replay` reads.
//!
//! Sits between the page layer, which tells the platform of each, and the file that the option `trace:` names. A thread
//! claims a place in the file by one atomic addition and writes the event there by two stores to a shared mapping; there is
//! no lock, no buffer and nothing to write out, so a program that is killed leaves all but the events that its threads
//! were at. Without the option it is one branch where blocks of pages are handed out, and nothing where objects are.
//!
//! The file is 64 MiB long from the beginning, on disk too, and holds 4194300 events. When it is full it says so, and
//! nothing more is recorded. It is of one process, which its beginning names: a file that is there already is used only
//! by the process that it is of (`neap run` makes it for the program that it becomes; where that executes another program,
//! the recording begins again), every other process leaves it alone. A forked child records nothing, however it is forked:
//! the page that says where the file is reads as zeroes there. While the file is on a disk the kernel writes it out now and
//! then, for which it interrupts CPUs that run the process, isolated ones too; not in `/dev/shm`.
//!
//! The format, all numbers little endian:
//!
//! ```text
//! header, 64 bytes:  "neaptrc2"   u32 process   u32 places   u32 claimed   u32 full   u16 CPUs   u8 page shift
//!                    u8 zero   u32 zero   u64 CLOCK_MONOTONIC at the beginning, in nanoseconds   24 bytes of zeroes
//! places, 16 bytes:  u64: bits 0 to 15 the CPU, the others the nanoseconds since the beginning, plus one
//!                    u32: the first page   u32: bits 0 to 30 how many pages, bit 31 set if they come back
//! ```
//!
//! `full` is not 0 once an event found no place. Events are in the order of their times; of those at the same time, in the
//! order of their places. A place whose time is zero was claimed and not written. A block is noted after it was handed out,
//! and before it comes back, so between two events that hand out a page is one that takes it back. A run that is made longer
//! or shorter where it is is no event.

use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use neap_base::Platform;
use neap_base::platform::{Errno, Handover, Recorder};
use neap_os::file::File;
use neap_os::{clock, memory, thread};

const MAGIC: [u8; 8] = *b"neaptrc2";
/// Bytes of the file.
const LENGTH: usize = 64 << 20;
/// Nanoseconds that an event's time can be: three days.
const LATEST: u64 = (1 << 48) - 2;

/// What a file begins with that a process is to record into.
pub fn claim(process: u32) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&process.to_le_bytes());
    bytes
}

/// What the file begins with.
#[derive(Debug)]
#[repr(C)]
struct Header {
    magic: AtomicU64,
    process: AtomicU32,
    places: AtomicU32,
    claimed: AtomicU32,
    full: AtomicU32,
    cpus: AtomicU16,
    page_shift: AtomicU8,
    zero: [u8; 5],
    begun: AtomicU64,
    zeroes: [u64; 3],
}

/// One event.
#[derive(Debug)]
#[repr(C)]
struct Place {
    when: AtomicU64,
    what: AtomicU64,
}

/// Where the events of a process go. All zeroes, it is nowhere.
#[derive(Debug)]
pub(crate) struct Trace {
    header: AtomicPtr<Header>,
    /// Not taken from the file, which others may write to.
    places: AtomicU32,
    begun: AtomicU64,
}

impl Trace {
    /// Begins a recording in `length` bytes at an address, all of them zero.
    ///
    /// # Safety
    /// They are aligned to 8, are used by atomic accesses only, and stay as long as this is used.
    unsafe fn begin<P: Platform>(&self, address: usize, length: usize, process: u32, platform: &P) {
        let header = core::ptr::with_exposed_provenance_mut::<Header>(address);
        let places = (length - size_of::<Header>()) / size_of::<Place>();
        let begun = clock::precise();
        // SAFETY: as the caller promises.
        let file = unsafe { &*header };
        file.process.store(process, Ordering::Relaxed);
        file.places.store(places as u32, Ordering::Relaxed);
        file.cpus.store(platform.cpus() as u16, Ordering::Relaxed);
        file.page_shift.store(platform.page_size().ilog2() as u8, Ordering::Relaxed);
        file.begun.store(begun, Ordering::Relaxed);
        file.magic.store(u64::from_ne_bytes(MAGIC), Ordering::Relaxed);
        self.places.store(places as u32, Ordering::Relaxed);
        self.begun.store(begun, Ordering::Relaxed);
        self.header.store(header, Ordering::Release); // Pairs with the Acquire in `note`.
    }
}

impl Recorder for Trace {
    #[cold]
    fn note(&self, cpu: usize, Handover { pfn, pages, freed }: Handover) {
        // Acquire pairs with the Release in `begin`. SAFETY: null, or the header of a mapping that stays.
        let Some(header) = (unsafe { self.header.load(Ordering::Acquire).as_ref() }) else { return };
        let since = clock::precise().saturating_sub(self.begun.load(Ordering::Relaxed)).min(LATEST);
        let places = self.places.load(Ordering::Relaxed);
        // Looked at first, so that it does not come around to 0.
        let claimed = header.claimed.load(Ordering::Relaxed);
        let place = if claimed < places { header.claimed.fetch_add(1, Ordering::Relaxed) } else { claimed };
        if place >= places {
            header.full.store(1, Ordering::Relaxed);
            return;
        }
        // SAFETY: below the number of places that lie behind the header.
        let place = unsafe { &*core::ptr::from_ref(header).add(1).cast::<Place>().add(place as usize) };
        let pages = u64::from(pages.min(i32::MAX as u32)) | u64::from(freed) << 31;
        place.what.store(u64::from(pfn.0) | pages << 32, Ordering::Relaxed);
        // Release pairs with whatever reads the file: where there is a time, the event is whole.
        place.when.store((since + 1) << 16 | cpu as u64 & 0xffff, Ordering::Release);
    }
}

/// Begins this process's recording in the file at `path`; `None` where that is of another process, which lives.
///
/// # Errors
/// `EXIST` where it is something else; otherwise what stands in the way.
pub(crate) fn open<P: Platform>(path: &CStr, platform: &P) -> Result<Option<&'static Trace>, Errno> {
    let process = thread::process_id();
    let file = match File::make(path) {
        Err(Errno::EXIST) => {
            let (file, mut start) = (File::open(path)?, [0; 12]);
            let start = file.start(&mut start)?;
            match start.split_last_chunk::<4>() {
                _ if start == claim(process) => file,
                Some((magic, other)) if magic == MAGIC && thread::is_process(u32::from_le_bytes(*other)) => {
                    return Ok(None);
                }
                _ => return Err(Errno::EXIST),
            }
        }
        made => made?,
    };
    let own = platform.map(platform.page_size())?;
    let recording = memory::keep_from_children(own, platform.page_size()).and_then(|()| file.map_zeroes(LENGTH));
    let address = recording.inspect_err(|_| {
        // SAFETY: mapped above, and nobody knows of it.
        unsafe { platform.unmap(own, platform.page_size()) }
    })?;
    // SAFETY: mapped above, for good; zeroes are a trace that is nowhere.
    let trace = unsafe { &*core::ptr::with_exposed_provenance::<Trace>(own) };
    // SAFETY: mapped a moment ago, for good, aligned to a page.
    unsafe { trace.begin(address, LENGTH, process, platform) };
    Ok(Some(trace))
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_base::Pfn;
    use neap_base::virtual_platform::Virtual;
    use std::vec::Vec;

    /// A recording in memory, with room for so many events.
    fn recording(places: usize) -> (Trace, &'static [AtomicU64]) {
        let trace = Trace { header: AtomicPtr::default(), places: AtomicU32::new(0), begun: AtomicU64::new(0) };
        let words: Vec<AtomicU64> = (0..8 + 2 * places).map(|_| AtomicU64::new(0)).collect();
        let words: &'static [AtomicU64] = words.leak();
        // SAFETY: atomics, which stay for good.
        unsafe { trace.begin(words.as_ptr().expose_provenance(), words.len() * 8, 77, &Virtual::new(4096, 3)) };
        (trace, words)
    }

    fn bytes(words: &[AtomicU64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
    }

    #[test]
    fn a_header_and_an_event_are_where_the_format_says() {
        let (trace, words) = recording(5);
        trace.note(2, Handover { pfn: Pfn(0x0102_0304), pages: 9, freed: true });
        let found = bytes(words);
        assert_eq!(found[..12], claim(77));
        assert_eq!(found[12..28], [5, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 12, 0]);
        assert_eq!(found[32..40], trace.begun.load(Ordering::Relaxed).to_le_bytes());
        assert_eq!((&found[64..66], &found[72..80]), (&[2, 0][..], &[4, 3, 2, 1, 9, 0, 0, 0x80][..]));
        let since = words[8].load(Ordering::Relaxed) >> 16;
        assert!(since > 0 && since < 1 << 40, "{since}");
        assert_eq!(size_of::<Header>(), 64);
    }

    #[test]
    fn events_of_many_threads_get_a_place_each_until_all_are_taken() {
        let (trace, words) = recording(1000);
        let full = || (words[2].load(Ordering::Relaxed) >> 32, bytes(words)[20]);
        std::thread::scope(|scope| {
            for cpu in 0..4 {
                let trace = &trace;
                scope.spawn(move || {
                    (0..250).for_each(|page| trace.note(cpu, Handover { pfn: Pfn(page), pages: 1, freed: false }));
                });
            }
        });
        let mut events: Vec<(u64, u64)> = words[8..]
            .chunks(2)
            .map(|place| (place[0].load(Ordering::Relaxed) & 0xffff, place[1].load(Ordering::Relaxed) as u32 as u64))
            .collect();
        events.sort_unstable();
        let expected: Vec<(u64, u64)> = (0..4).flat_map(|cpu| (0..250).map(move |page| (cpu, page))).collect();
        assert_eq!(events, expected);
        assert_eq!((words[2].load(Ordering::Relaxed) as u32, full().1), (1000, 0));
        let before = bytes(&words[8..]);
        (0..3).for_each(|_| trace.note(0, Handover { pfn: Pfn(7), pages: 1, freed: false }));
        assert_eq!((bytes(&words[8..]), full().1, words[2].load(Ordering::Relaxed) as u32), (before, 1, 1000));
    }

    #[test]
    fn zeroes_are_a_trace_that_goes_nowhere() {
        // SAFETY: a null pointer and two numbers.
        let trace: Trace = unsafe { core::mem::zeroed() };
        trace.note(0, Handover { pfn: Pfn(1), pages: 1, freed: false });
        assert!(trace.header.load(Ordering::Relaxed).is_null());
    }
}
