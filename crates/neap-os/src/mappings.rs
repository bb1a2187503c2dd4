//! Reads a process's mappings, how much of each is resident, and which pages of a range are
//! present.
//!
//! The source is `/proc/PID/smaps` and `pagemap`, or `maps` where sizes are not needed. This module
//! only reads. Its buffers lie on the stack or belong to the caller, so it does not allocate. The
//! kernel returns the text a page at a time, so mappings that a busy process makes meanwhile may be
//! missing. This module has no lock.

use crate::Errno;
use core::ffi::CStr;
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, Mode, OFlags};

/// Bytes of one read. The parser keeps at most `LINE` bytes of a line, and loses the end of a
/// longer path.
const BUFFER: usize = 4096;
const LINE: usize = 512;

/// A mapping of a process.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'t> {
    /// Address of its first byte.
    pub start: usize,
    /// Address after the mapping's last byte.
    pub end: usize,
    /// Access rights: `rwxp`, with `-` for a missing right, and `s` for a shared mapping.
    pub rights: [u8; 4],
    /// A file's path, or the kernel's name for the mapping. Empty if it has neither.
    pub name: &'t [u8],
    /// Resident bytes. A page of anonymous memory that was only read does not count.
    pub resident: u64,
}

/// The files that describe a process's mappings.
#[derive(Debug)]
pub struct Mappings {
    text: OwnedFd,
    /// `None` if the file cannot be opened.
    pages: Option<OwnedFd>,
    page_size: usize,
}

impl Mappings {
    /// Opens the files of this process.
    ///
    /// # Errors
    /// The error of opening, for example if `/proc` is missing or no descriptor is free.
    pub fn own() -> Result<Mappings, Errno> {
        Mappings::open(c"/proc/self/smaps", c"/proc/self/pagemap")
    }

    /// Opens the files of a process by their paths.
    ///
    /// # Errors
    /// `NOENT` if the process has ended, `ACCESS` if it belongs to another user.
    pub fn open(smaps: &CStr, pagemap: &CStr) -> Result<Mappings, Errno> {
        let open = |path| rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Ok(Mappings { text: open(smaps)?, pages: open(pagemap).ok(), page_size: crate::memory::page_size() })
    }

    /// Calls `each` with every mapping, lowest first. A second call finds no mapping, since the
    /// file was read to its end.
    ///
    /// # Errors
    /// The error of reading.
    pub fn each(&self, each: &mut dyn FnMut(&Mapping<'_>)) -> Result<(), Errno> {
        let (mut parser, mut buffer) = (Parser::new(), [0; BUFFER]);
        loop {
            match rustix::io::read(&self.text, &mut buffer) {
                Ok(0) => return Ok(()),
                Ok(length) => parser.take(&buffer[..length], each),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Calls `each` with the address of every page of a range that is present. This includes pages
    /// that were only read, which share one page of zeroes. `start` is a multiple of the page size.
    /// A partial page at the end does not count.
    ///
    /// # Errors
    /// `NOSYS` if `pagemap` could not be opened; otherwise the error of reading.
    pub fn each_present(&self, start: usize, length: usize, each: &mut dyn FnMut(usize)) -> Result<(), Errno> {
        const PRESENT: u64 = 1 << 63;
        let pages = self.pages.as_ref().ok_or(Errno::NOSYS)?;
        let (mut page, end) = (start / self.page_size, (start + length) / self.page_size);
        let mut buffer = [0; BUFFER];
        while page < end {
            let wanted = (end - page).min(BUFFER / size_of::<u64>()) * size_of::<u64>();
            let read = rustix::io::pread(pages, &mut buffer[..wanted], (page * size_of::<u64>()) as u64)?;
            let words = buffer[..read].chunks_exact(size_of::<u64>());
            if words.len() == 0 {
                return Ok(());
            }
            for word in words {
                if u64::from_ne_bytes(word.try_into().unwrap_or_default()) & PRESENT != 0 {
                    each(page * self.page_size);
                }
                page += 1;
            }
        }
        Ok(())
    }
}

/// Calls `each` with every mapping of this process, lowest first, and its line of text.
/// [`Mapping::resident`] is 0, since the kernel would have to walk the pages for it. The function
/// reads the text into `buffer`. A line that is longer than the buffer loses a part behind its
/// start.
///
/// # Errors
/// The error of opening or reading `/proc/self/maps`.
pub fn each_own(buffer: &mut [u8], each: &mut impl FnMut(&Mapping<'_>, &[u8])) -> Result<(), Errno> {
    let text = rustix::fs::openat(CWD, c"/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut filled = 0;
    loop {
        let read = match rustix::io::read(&text, &mut buffer[filled..]) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error),
        };
        filled += read;
        let mut start = 0;
        while let Some(length) = buffer[start..filled].iter().position(|&byte| byte == b'\n') {
            let line = &buffer[start..start + length];
            if let Some(mapping) = head(line) {
                each(&mapping, line);
            }
            start += length + 1;
        }
        buffer.copy_within(start..filled, 0);
        filled -= start;
        if filled == buffer.len() {
            // The line is longer than the buffer. Only its start matters.
            filled = filled.min(buffer.len() / 2);
        }
    }
}

/// Finds mappings in the text, which arrives in pieces.
struct Parser {
    line: [u8; LINE],
    length: usize,
    /// Start and end of the mapping whose fields are being read.
    place: (usize, usize),
    rights: [u8; 4],
    name: [u8; LINE],
    name_length: usize,
}

impl Parser {
    fn new() -> Parser {
        Parser { line: [0; LINE], length: 0, place: (0, 0), rights: *b"---p", name: [0; LINE], name_length: 0 }
    }

    fn take(&mut self, text: &[u8], each: &mut dyn FnMut(&Mapping<'_>)) {
        for &byte in text {
            if byte == b'\n' {
                self.end_line(each);
                self.length = 0;
            } else if let Some(place) = self.line.get_mut(self.length) {
                *place = byte;
                self.length += 1;
            }
        }
    }

    fn end_line(&mut self, each: &mut dyn FnMut(&Mapping<'_>)) {
        let line = &self.line[..self.length];
        if let Some(value) = line.strip_prefix(b"Rss:") {
            let kib = number(value.trim_ascii(), 10).unwrap_or(0);
            let ((start, end), rights, name) = (self.place, self.rights, &self.name[..self.name_length]);
            each(&Mapping { start, end, rights, name, resident: kib as u64 * 1024 });
        } else if let Some(Mapping { start, end, rights, name, .. }) = head(line) {
            (self.place, self.rights, self.name_length) = ((start, end), rights, name.len());
            self.name[..name.len()].copy_from_slice(name);
        }
    }
}

/// Parses the first line of a mapping: `start-end rights offset device inode name`.
fn head(line: &[u8]) -> Option<Mapping<'_>> {
    let mut rest = line;
    let mut word = || {
        rest = rest.trim_ascii_start();
        let length = rest.iter().position(|&byte| byte == b' ').unwrap_or(rest.len());
        let (word, after) = rest.split_at(length);
        rest = after;
        word
    };
    let (place, rights) = (word(), word());
    let dash = place.iter().position(|&byte| byte == b'-')?;
    let (start, end) = (number(&place[..dash], 16)?, number(&place[dash + 1..], 16)?);
    let rights = rights.try_into().ok()?;
    let _ = (word(), word(), word());
    Some(Mapping { start, end, rights, name: rest.trim_ascii_start(), resident: 0 })
}

/// The number at the start of a text; `None` if the text starts with no digit.
fn number(text: &[u8], base: u32) -> Option<usize> {
    let digits = text.iter().map_while(|&byte| char::from(byte).to_digit(base));
    let mut seen = false;
    let number = digits.fold(0_usize, |sum, digit| {
        seen = true;
        sum.wrapping_mul(base as usize).wrapping_add(digit as usize)
    });
    seen.then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::String;
    use std::vec::Vec;

    const TEXT: &[u8] =
        b"55d0c000-55d0e000 r-xp 00001000 fe:00 17       /usr/bin/a name\nSize:  8 kB\nRss:   4 kB\nPss: 2 kB\n\
        7f00-7f80 rw-p 00000000 00:00 0 \nRss:   0 kB\nVmFlags: rd wr\n\
        ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0   [vsyscall]\nRss: 12345 kB\n";

    fn parse(pieces: usize) -> Vec<(usize, usize, [u8; 4], String, u64)> {
        let (mut parser, mut seen) = (Parser::new(), Vec::new());
        for piece in TEXT.chunks(pieces) {
            parser.take(piece, &mut |mapping| {
                let name = String::from_utf8(mapping.name.into()).unwrap();
                seen.push((mapping.start, mapping.end, mapping.rights, name, mapping.resident));
            });
        }
        seen
    }

    #[test]
    fn mappings_are_found_in_whatever_pieces_the_text_comes() {
        let expected = [
            (0x55d0_c000, 0x55d0_e000, *b"r-xp", "/usr/bin/a name".into(), 4096),
            (0x7f00, 0x7f80, *b"rw-p", "".into(), 0),
            (0xffff_ffff_ff60_0000, 0xffff_ffff_ff60_1000, *b"--xp", "[vsyscall]".into(), 12345 * 1024),
        ];
        (1..200).for_each(|pieces| assert_eq!(parse(pieces), expected, "in pieces of {pieces}"));
    }

    #[test]
    fn own_mappings_are_found_through_any_buffer() {
        let here = own_mappings_are_found_through_any_buffer as *const () as usize;
        let program = std::env::current_exe().unwrap().into_os_string().into_encoded_bytes();
        for bytes in [512, 4096, 1 << 16] {
            let (mut found, mut last) = (false, 0);
            each_own(&mut std::vec![0; bytes], &mut |mapping, line| {
                let is_own = mapping.rights == *b"r-xp" && line.ends_with(&program);
                found |= (mapping.start..mapping.end).contains(&here) && is_own;
                assert!(mapping.start >= last && mapping.end > mapping.start, "in order");
                last = mapping.end;
            })
            .unwrap();
            assert!(found, "{bytes}");
        }
    }

    #[test]
    fn what_is_written_is_resident_and_nothing_else() {
        let (page, pages) = (crate::memory::page_size(), 1500);
        let start = crate::memory::map(pages * page).unwrap();
        let _ = crate::memory::huge_pages(start, pages * page, crate::memory::HugePages::Forbidden);
        let touched = [0, 1, 511, 512, 513, 1024, 1499];
        // SAFETY: inside the mapping made above.
        touched.iter().for_each(|at| unsafe {
            core::ptr::with_exposed_provenance_mut::<u8>(start + at * page).write(1);
        });
        let (view, mut present) = (Mappings::own().unwrap(), Vec::new());
        view.each_present(start, pages * page, &mut |address| present.push((address - start) / page)).unwrap();
        assert_eq!(present, touched);
        let mut around = None;
        view.each(&mut |mapping| {
            if (mapping.start..mapping.end).contains(&start) {
                around = Some((mapping.rights, mapping.resident));
            }
        })
        .unwrap();
        // The kernel may have merged it with another mapping.
        let (rights, resident) = around.unwrap();
        assert!(rights == *b"rw-p" && resident >= (touched.len() * page) as u64, "{resident}");
        // SAFETY: mapped above, and used by no other code.
        unsafe { crate::memory::unmap(start, pages * page) }.unwrap();
    }
}
