//! The trace: a record of every block and run of pages that the page layer hands out or takes back.
//! It lies in a file that `neap lab replay` reads.
//!
//! # Design
//! The option `trace:` names the file. The page layer reports each event to the platform's
//! recorder. A thread claims a place by one atomic addition, and has the kernel copy the event into
//! a shared mapping of the file. There is no lock and no buffer, so a killed program loses only
//! events that its threads were writing. If the file was cut short, the kernel's copy fails and the
//! recording ends; a store would end the program. Without the option, tracing costs one branch
//! where the page layer hands out blocks, and nothing for objects.
//!
//! The file has 64 MiB from the beginning, on disk too, and holds 4194300 events. When it is full a
//! flag in its header is set, and nothing more is recorded. It belongs to the process that its
//! header names:
//!
//! * Only the process that an existing file belongs to uses the file. Every other process ignores
//!   it. `neap run` makes it for the program that it executes. If that program executes another
//!   one, the recording begins again.
//! * The file must belong to the process's user, have only one name, and be no symbolic link.
//! * A forked child records nothing, however it is forked: the page with the file's address reads
//!   as zeroes there.
//!
//! From time to time, the kernel writes a file on a disk back. For that it interrupts CPUs that run
//! the process, isolated ones too. A file in `/dev/shm` has no disk to be written back to.
//!
//! The format, all numbers little endian:
//!
//! ```text
//! header, 64 bytes:  "neaptrc2"   u32 process   u32 places   u32 claimed   u32 full   u16 CPUs
//!                    u8 page shift   u8 zero   u32 zero
//!                    u64 CLOCK_MONOTONIC at the beginning, in nanoseconds   24 bytes of zeroes
//! places, 16 bytes:  u64: bits 0 to 15: CPU; others: nanoseconds since the beginning, plus one
//!                    u32: first page
//!                    u32: bits 0 to 30: number of pages; bit 31: set if they come back
//! ```
//!
//! Places from `claimed` on are unused. `full` is not 0 once an event found no place. Events are
//! ordered by time; those of the same time by place. A place with a time of zero was claimed, but
//! not written.
//!
//! The page layer records an event after it has handed a block out, or before it takes one back. So
//! between two events that hand out a page, there is one that takes it back. Resizing a run in
//! place records no event.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use neap_base::Platform;
use neap_base::platform::{Errno, Handover, Recorder};
use neap_os::fatal::say_if_heard;
use neap_os::file::{File, store};
use neap_os::{clock, memory, thread};

const MAGIC: [u8; 8] = *b"neaptrc2";
/// Bytes of the file.
const LENGTH: usize = 64 << 20;
/// Latest time of an event, in nanoseconds since the beginning: about three days.
const LATEST: u64 = (1 << 48) - 2;

/// Returns the first bytes of a file that a process is to record into.
pub fn claim(process: u32) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&process.to_le_bytes());
    bytes
}

/// Bytes in front of the places, and of a place.
const HEADER: usize = 64;
const PLACE: usize = 16;
/// Offset of the flag in the header that the file is full.
const FULL: usize = 20;

/// A recording. All zeroes: none.
#[derive(Debug)]
pub(crate) struct Trace {
    /// Address of the file's bytes; 0 before and after the recording.
    address: AtomicUsize,
    process: AtomicU32,
    /// Number of places. Kept here, because other processes may write to the file's header.
    places: AtomicU32,
    claimed: AtomicU32,
    begun: AtomicU64,
}

impl Trace {
    /// Begins a recording in `length` bytes at an address, all of them zero.
    ///
    /// # Errors
    /// The error of the first store. Nothing is recorded then.
    ///
    /// # Safety
    /// No other code uses the memory as long as the trace is used.
    unsafe fn begin<P: Platform>(&self, address: usize, length: usize, platform: &P) -> Result<(), Errno> {
        let (process, places) = (thread::process_id(), ((length - HEADER) / PLACE) as u32);
        let begun = clock::precise();
        let mut header = [0; HEADER];
        header[..12].copy_from_slice(&claim(process));
        header[12..16].copy_from_slice(&places.to_le_bytes());
        // The header counts all places as claimed. Places that are not written have a time of zero.
        header[16..20].copy_from_slice(&places.to_le_bytes());
        header[24..26].copy_from_slice(&(platform.cpus() as u16).to_le_bytes());
        header[26] = platform.page_size().ilog2() as u8;
        header[32..40].copy_from_slice(&begun.to_le_bytes());
        // SAFETY: the id is this process's, and the memory is used by nothing else (the caller's
        // promise).
        unsafe { store(process, [(address, &header), (address, &[])]) }?;
        self.process.store(process, Ordering::Relaxed);
        self.places.store(places, Ordering::Relaxed);
        self.begun.store(begun, Ordering::Relaxed);
        self.address.store(address, Ordering::Release); // Pairs with the Acquire in `note`.
        Ok(())
    }

    /// Ends the recording. Returns its address to the first caller, and `None` to later ones.
    fn end(&self) -> Option<usize> {
        // Relaxed: it only decides which thread ends the recording.
        Some(self.address.swap(0, Ordering::Relaxed)).filter(|&address| address != 0)
    }
}

impl Recorder for Trace {
    #[cold]
    fn note(&self, cpu: usize, Handover { pfn, pages, freed }: Handover) {
        let address = self.address.load(Ordering::Acquire); // Pairs with the Release in `begin`.
        if address == 0 {
            return;
        }
        let since = clock::precise().saturating_sub(self.begun.load(Ordering::Relaxed)).min(LATEST);
        let (process, places) = (self.process.load(Ordering::Relaxed), self.places.load(Ordering::Relaxed));
        // It does not wrap to 0: a thread that reads `places` or more ends the recording.
        let place = self.claimed.fetch_add(1, Ordering::Relaxed);
        if place >= places {
            if self.end().is_some() {
                // SAFETY: the id is this process's, or that of one that it shares its memory with.
                // The flag lies in the header, which may be overwritten. If the file was cut short,
                // the flag is not needed.
                let _ = unsafe { store(process, [(address + FULL, &1_u32.to_le_bytes()), (address, &[])]) };
            }
            return;
        }
        let at = address + HEADER + place as usize * PLACE;
        let what = u64::from(pages.min(i32::MAX as u32)) << 32 | u64::from(freed) << 63 | u64::from(pfn.0);
        let when = (since + 1) << 16 | cpu as u64 & 0xffff;
        // The time last: a reader that finds it sees the whole event.
        let parts: [(usize, &[u8]); 2] = [(at + 8, &what.to_le_bytes()), (at, &when.to_le_bytes())];
        // SAFETY: the id is this process's, or that of one that it shares its memory with. The
        // place is below the number of places behind the header. This thread claimed it, so it may
        // overwrite it.
        if unsafe { store(process, parts) }.is_err() && self.end().is_some() {
            say_cut_short();
        }
    }
}

/// Reports that the file was cut short. This is a separate function, because formatting needs more
/// stack than recording does.
#[cold]
#[inline(never)]
fn say_cut_short() {
    say_if_heard(format_args!("the recording ends: its file was cut short"));
}

/// Begins this process's recording in the file at `path`. `None` if the file belongs to another
/// living process.
///
/// # Errors
/// `EXIST` if the file exists, and is not the trace of a living process. Else the system's error.
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
        // SAFETY: mapped above, and known to no other thread.
        unsafe { platform.unmap(own, platform.page_size()) }
    })?;
    // SAFETY: mapped above, and never unmapped; zeroes are a valid trace.
    let trace = unsafe { &*core::ptr::with_exposed_provenance::<Trace>(own) };
    // SAFETY: `map_zeroes` mapped it above, and it is never unmapped.
    unsafe { trace.begin(address, LENGTH, platform) }?;
    Ok(Some(trace))
}

#[cfg(test)]
mod tests {
    use super::*;
    use neap_base::Pfn;
    use neap_testing::virtual_platform::Virtual;
    use std::vec::Vec;

    fn nowhere() -> Trace {
        // SAFETY: the fields are integers, for which zeroes are valid.
        unsafe { core::mem::zeroed() }
    }

    /// A recording in memory, with room for `places` events.
    fn recording(places: usize) -> (Trace, &'static [AtomicU64]) {
        let trace = nowhere();
        let words: Vec<AtomicU64> = (0..8 + 2 * places).map(|_| AtomicU64::new(0)).collect();
        let words: &'static [AtomicU64] = words.leak();
        let (address, length) = (words.as_ptr().expose_provenance(), words.len() * 8);
        // SAFETY: the words were leaked, so they live forever, and are atomics.
        unsafe { trace.begin(address, length, &Virtual::new(4096, 3)) }.unwrap();
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
        assert_eq!(found[..12], claim(thread::process_id()));
        assert_eq!(found[12..28], [5, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 3, 0, 12, 0]);
        assert_eq!(found[32..40], trace.begun.load(Ordering::Relaxed).to_le_bytes());
        assert_eq!((&found[64..66], &found[72..80]), (&[2, 0][..], &[4, 3, 2, 1, 9, 0, 0, 0x80][..]));
        let since = words[8].load(Ordering::Relaxed) >> 16;
        assert!(since > 0 && since < 1 << 40, "{since}");
    }

    #[test]
    fn events_of_many_threads_get_a_place_each_until_all_are_taken() {
        let (trace, words) = recording(1000);
        let full = || bytes(words)[FULL];
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
        assert_eq!((events, full()), (expected, 0));
        let before = bytes(&words[8..]);
        (0..3).for_each(|_| trace.note(0, Handover { pfn: Pfn(7), pages: 1, freed: false }));
        assert_eq!((bytes(&words[8..]), full()), (before, 1));
    }

    #[test]
    fn zeroes_are_a_trace_that_goes_nowhere() {
        let trace = nowhere();
        trace.note(0, Handover { pfn: Pfn(1), pages: 1, freed: false });
        assert_eq!(trace.claimed.load(Ordering::Relaxed), 0);
    }
}
