//! The kernel's view of a process compared with neap's counters, source by source.
//!
//! Each resident byte is attributed to one source. A byte in a range of neap's has the source of
//! the range. A byte in the arena has the source of its page. Elsewhere the source follows from the
//! kernel's name of the mapping. This works for this process and for another one. This module has
//! no lock, and changes nothing.

use super::sources::{Books, Held, NONE, Range, SOURCES, Source};
use core::fmt;
use neap_base::platform::Errno;
use neap_groups::Kind;
use neap_os::mappings::{Mapping, Mappings};
use neap_pages::{PIECE, Use};

/// Attributes resident memory to sources.
#[derive(Debug)]
pub struct Tally<'r> {
    ranges: &'r [Range],
    books: Books,
    resident: [u64; SOURCES],
    /// Resident bytes of the arena, by the kernel's list of mappings.
    arena: u64,
    all: u64,
    /// The file whose mappings are being read.
    file: File,
    /// End of the last mapping without rights and without a name.
    guard: usize,
}

/// Consecutive mappings of a file.
#[derive(Clone, Copy, Debug, Default)]
struct File {
    name: u64,
    end: usize,
    executable: bool,
    resident: u64,
}

impl<'r> Tally<'r> {
    /// Starts a tally without any mapping.
    pub fn new(ranges: &'r [Range], books: Books) -> Tally<'r> {
        Tally { ranges, books, resident: [0; SOURCES], arena: 0, all: 0, file: File::default(), guard: 0 }
    }

    /// Reads all mappings.
    ///
    /// # Errors
    /// The system's error if the mappings cannot be read.
    pub fn look(&mut self, view: &Mappings) -> Result<(), Errno> {
        let present = |start: usize, end: usize| {
            let mut pages = 0_u64;
            let seen = view.each_present(start, end - start, &mut |_| pages += 1);
            seen.ok().map(|()| pages * neap_os::memory::page_size() as u64)
        };
        view.each(&mut |mapping| self.mapping(mapping, &present))
    }

    fn mapping(&mut self, mapping: &Mapping<'_>, present: &dyn Fn(usize, usize) -> Option<u64>) {
        let &Mapping { start, end, resident, .. } = mapping;
        self.all += resident;
        let (mut rest, mut own) = (resident, false);
        // The kernel merges adjacent mappings that are alike, whichever code made them.
        for range in self.ranges {
            let (from, to) = (range.start.max(start), (range.start + range.length).min(end));
            if from < to {
                own |= to == end;
                let here = if (from, to) == (start, end) { resident } else { present(from, to).unwrap_or(resident) };
                let here = here.min(rest).min((to - from) as u64);
                rest -= here;
                if range.of == Source::Arena { self.arena += here } else { self.resident[range.of as usize] += here }
            }
        }
        self.foreign(mapping, rest, own);
    }

    /// Attributes the part of a mapping that is not neap's. `own` says whether a range of neap's
    /// reaches the end of the mapping.
    fn foreign(&mut self, mapping: &Mapping<'_>, resident: u64, own: bool) {
        let &Mapping { start, end, rights: [read, write, execute, share], name, .. } = mapping;
        let private = share == b'p';
        let starts = |with: &[u8]| name.starts_with(with);
        let of = match name {
            // Zero-initialised variables follow the initialised ones.
            [] if private && start == self.file.end && self.file.executable => Source::Program,
            [] if private && write == b'w' && start == self.guard => Source::ThreadStacks,
            [] if private => Source::Anonymous,
            [] => Source::Shared,
            b"[heap]" => Source::Heap,
            b"[stack]" => Source::Stack,
            _ if starts(b"[anon") => Source::Anonymous,
            [b'[', ..] => Source::Kernel,
            _ if starts(b"/memfd:neap-stat") => Source::Numbers,
            _ if [&b"/memfd:"[..], b"/dev/shm/", b"/dev/zero", b"/SYSV"].iter().any(|with| starts(with)) => {
                Source::Shared
            }
            _ => Source::Files,
        };
        if of == Source::Files {
            let name = name.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
            if name != self.file.name {
                self.end_file();
                self.file.name = name;
            }
            self.file.end = end;
            self.file.executable |= execute == b'x';
            self.file.resident += resident;
        } else {
            self.resident[of as usize] += resident;
        }
        if name.is_empty() && [read, write, execute] == *b"---" && !own {
            self.guard = end;
        }
    }

    fn end_file(&mut self) {
        let of = if self.file.executable { Source::Program } else { Source::Files };
        self.resident[of as usize] += self.file.resident;
        self.file = File::default();
    }

    /// Reads the pages of a piece of the arena, with the uses that neap reports for them.
    pub fn look_at(&mut self, view: &Mappings, base: usize, page: usize, piece: u32, uses: &[u64]) {
        let length = PIECE * page;
        let start = base + piece as usize * length;
        let own = neap_os::memory::page_size() as u64;
        // If pages cannot be seen, only the arena's sum is known.
        let _ = view.each_present(start, length, &mut |address| {
            let of = Source::of_page(Use::of(uses, (address - start) / page));
            if of != Source::Arena {
                self.resident[of as usize] += own;
            }
        });
    }

    /// Ends the tally.
    pub fn end(mut self) -> Reconciliation {
        self.end_file();
        let by_page: u64 = self.resident[..Source::Arena as usize].iter().sum();
        if by_page == 0 && self.books.believed[Source::Slabs as usize] != NONE {
            // No page could be seen: report the arena as a whole.
            let (states, rest) = self.books.believed.split_at_mut(Source::Arena as usize);
            // Another process may have reported any number.
            rest[0] = states.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
            states.fill(NONE);
        }
        self.resident[Source::Arena as usize] = self.arena.saturating_sub(by_page);
        // Pages that were only read are in the page tables, but have no memory.
        let mut zeroes = by_page.saturating_sub(self.arena);
        let only_read = zeroes;
        for source in [Source::Runs, Source::Slabs, Source::FreeBacked, Source::Free] {
            let resident = &mut self.resident[source as usize];
            let off = zeroes.min(*resident);
            *resident -= off;
            zeroes -= off;
        }
        Reconciliation { books: self.books, by_source: self.resident, resident: self.all, only_read }
    }
}

/// Charges, neap's counters and resident memory, in bytes.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Reconciliation {
    books: Books,
    by_source: [u64; SOURCES],
    /// Resident in the whole process: the sum of all its mappings.
    pub resident: u64,
    /// Pages of the arena that were read, but never written to: not resident, though the page
    /// tables have them. They are subtracted from runs, then from slabs and free pages.
    pub only_read: u64,
}

impl Reconciliation {
    /// Resident bytes of a source, as the kernel counts them.
    pub fn resident_of(&self, source: Source) -> u64 {
        self.by_source[source as usize]
    }

    /// Resident bytes of a source by neap's own counter, if it has one.
    pub fn believed_of(&self, source: Source) -> Option<u64> {
        Some(self.books.believed[source as usize]).filter(|bytes| *bytes != NONE)
    }

    /// Bytes in slabs.
    pub fn held(&self, held: Held) -> u64 {
        self.books.held[held as usize]
    }

    /// Bytes of a kind that are charged to groups and not stocked.
    pub fn charged(&self, kind: Kind) -> u64 {
        self.books.charged[kind as usize]
    }

    /// Bytes of allocations of a kind with a payer, if they could be counted.
    pub fn payable(&self, kind: Kind) -> Option<u64> {
        Some(self.books.payable[kind as usize]).filter(|bytes| *bytes != NONE)
    }

    /// Resident bytes of a source beyond neap's counter.
    pub fn unexplained_of(&self, source: Source) -> u64 {
        self.believed_of(source).map_or(0, |believed| self.resident_of(source).saturating_sub(believed))
    }

    /// Resident bytes that have a source and, where neap has a counter, are within it.
    pub fn explained(&self) -> u64 {
        Source::ALL.iter().map(|&source| self.resident_of(source) - self.unexplained_of(source)).sum()
    }
}

/// Three tables: resident bytes, bytes in slabs, charged bytes.
impl fmt::Display for Reconciliation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let drift = |is: u64, believed: u64| is.wrapping_sub(believed) as i64;
        writeln!(f, "{:<28} {:>15} {:>15} {:>15}", "bytes", "resident", "neap believes", "difference")?;
        for source in Source::ALL {
            let resident = self.resident_of(source);
            match self.believed_of(source) {
                Some(believed) if (believed, resident) != (0, 0) => writeln!(
                    f,
                    "{:<28} {resident:>15} {believed:>15} {:>15}",
                    source.name(),
                    drift(resident, believed)
                )?,
                None if resident > 0 => writeln!(f, "{:<28} {resident:>15}", source.name())?,
                _ => {}
            }
        }
        let (all, explained) = (self.resident, self.explained());
        let hundredths = (explained as u128 * 10_000).checked_div(all.into()).unwrap_or(10_000);
        writeln!(f, "{:<28} {all:>15}", "resident in all")?;
        writeln!(f, "{:<28} {explained:>15} {:>11}.{:02} %", "explained", hundredths / 100, hundredths % 100)?;
        if self.only_read > 0 {
            writeln!(f, "{:<28} {:>15}", "read, never written to", self.only_read)?;
        }
        writeln!(f, "\n{:<28} {:>15}", "in slabs", "bytes")?;
        for held in Held::ALL {
            writeln!(f, "{:<28} {:>15}", held.name(), self.held(held))?;
        }
        if Kind::ALL.iter().all(|&kind| self.charged(kind) == 0 && self.payable(kind).unwrap_or(0) == 0) {
            return Ok(());
        }
        writeln!(f, "\n{:<28} {:>15} {:>15} {:>15}", "in groups", "charged", "is there", "difference")?;
        for &kind in &Kind::ALL {
            let charged = self.charged(kind);
            match self.payable(kind) {
                Some(there) => {
                    writeln!(f, "{:<28} {charged:>15} {there:>15} {:>15}", kind.name(), drift(charged, there))?;
                }
                None => writeln!(f, "{:<28} {charged:>15}", kind.name())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const PAGE: u64 = 4096;

    /// Mappings by start and end in pages, rights, name, and resident pages.
    fn tally(ranges: &[Range], mappings: &[(usize, usize, &[u8; 4], &str, u64)], present: u64) -> Reconciliation {
        let mut tally = Tally::new(ranges, Books::BLANK);
        for &(start, end, rights, name, pages) in mappings {
            let (start, end) = (start * PAGE as usize, end * PAGE as usize);
            let mapping = Mapping { start, end, rights: *rights, name: name.as_bytes(), resident: pages * PAGE };
            tally.mapping(&mapping, &|_, _| Some(present * PAGE));
        }
        tally.end()
    }

    fn pages(seen: &Reconciliation) -> Vec<(Source, u64)> {
        let all = Source::ALL.iter().map(|&source| (source, seen.resident_of(source) / PAGE));
        all.filter(|(_, pages)| *pages > 0).collect()
    }

    #[test]
    fn mappings_are_of_what_their_names_and_neighbours_say() {
        let seen = tally(
            &[],
            &[
                (1, 2, b"r--p", "/bin/a", 1),
                (2, 4, b"r-xp", "/bin/a", 2),
                (5, 6, b"rw-p", "/bin/a", 1),
                (6, 9, b"rw-p", "", 3),
                (9, 10, b"rw-p", "", 10),
                (20, 30, b"rw-p", "[heap]", 5),
                (30, 40, b"r--s", "/data", 40),
                (40, 41, b"rw-p", "", 100),
                (50, 51, b"---p", "", 0),
                (51, 60, b"rw-p", "", 7),
                (61, 62, b"rw-s", "/memfd:x (deleted)", 1),
                (62, 63, b"rw-s", "/memfd:neap-stat (deleted)", 2),
                (63, 64, b"rw-p", "[anon: x]", 1000),
                (70, 80, b"rw-p", "[stack]", 6),
                (80, 81, b"r-xp", "[vdso]", 1),
            ],
            0,
        );
        let expected = [
            (Source::Numbers, 2),
            (Source::Program, 4 + 3),
            (Source::Heap, 5),
            (Source::Stack, 6),
            (Source::ThreadStacks, 7),
            (Source::Files, 40),
            (Source::Shared, 1),
            (Source::Anonymous, 10 + 100 + 1000),
            (Source::Kernel, 1),
        ];
        assert_eq!(pages(&seen), expected);
        assert_eq!((seen.resident, seen.explained()), (1179 * PAGE, 1179 * PAGE));
    }

    #[test]
    fn a_mapping_that_is_neaps_in_part_is_divided_by_its_pages() {
        let range = |start: usize, end: usize, of| Range {
            start: start * PAGE as usize,
            length: (end - start) * PAGE as usize,
            of,
        };
        let ranges = [range(10, 20, Source::Stacks), range(20, 25, Source::Ticks), range(100, 200, Source::Arena)];
        let seen = tally(&ranges, &[(5, 30, b"rw-p", "", 12), (100, 200, b"rw-p", "", 50)], 4);
        let expected = [(Source::Arena, 50), (Source::Stacks, 4), (Source::Ticks, 4), (Source::Anonymous, 4)];
        assert_eq!(pages(&seen), expected);
        // A range that neap has reserved, and not opened, is no guard of a stack.
        let part = [(10, 12, b"rw-p", "", 2), (12, 25, b"---p", "", 0), (25, 30, b"rw-p", "", 5)];
        assert_eq!(pages(&tally(&ranges, &part, 4)), [(Source::Stacks, 2), (Source::Anonymous, 5)]);
        // A guard of the program behind it is merged with it.
        let part = [(10, 12, b"rw-p", "", 2), (12, 26, b"---p", "", 0), (26, 30, b"rw-p", "", 5)];
        assert_eq!(pages(&tally(&ranges, &part, 4)), [(Source::Stacks, 2), (Source::ThreadStacks, 5)]);
    }
}
