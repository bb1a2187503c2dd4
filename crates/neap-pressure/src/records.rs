//! Reads a file record by record through a buffer of fixed size.

use core::ffi::CStr;

use crate::files::{Access, Errno, Files};

/// Most bytes that this module reads of one file. Kernel files are far shorter. The limit ends the
/// reading of an endless file.
const MOST: usize = 8 << 20;

/// Records of an open file, each up to a separator.
pub(crate) struct Records<'a, F: Files> {
    files: &'a F,
    file: F::File,
    buffer: &'a mut [u8],
    separator: u8,
    /// Bytes of `buffer` that are read and not yet returned.
    start: usize,
    end: usize,
    read: usize,
    at_end: bool,
    /// Records that did not fit into the buffer. They are skipped.
    pub(crate) too_long: u32,
    /// The kernel's error, if reading ended early.
    pub(crate) error: Option<Errno>,
}

impl<'a, F: Files> Records<'a, F> {
    pub(crate) fn open(files: &'a F, path: &CStr, separator: u8, buffer: &'a mut [u8]) -> Result<Self, Errno> {
        let file = files.open(path, Access::Read)?;
        let (start, end, read, at_end, too_long, error) = (0, 0, 0, false, 0, None);
        Ok(Records { files, file, buffer, separator, start, end, read, at_end, too_long, error })
    }

    /// Returns the next record without its separator.
    pub(crate) fn next(&mut self) -> Option<&mut [u8]> {
        let (from, to) = self.find()?;
        self.buffer.get_mut(from..to)
    }

    fn find(&mut self) -> Option<(usize, usize)> {
        let mut skipping = false;
        // Bytes of `start..end` that hold no separator.
        let mut searched = 0;
        loop {
            let unread = self.buffer.get(self.start + searched..self.end).unwrap_or_default();
            if let Some(at) = unread.iter().position(|byte| *byte == self.separator) {
                let (from, to) = (self.start, self.start + searched + at);
                (self.start, searched) = (to + 1, 0);
                if !skipping {
                    return Some((from, to));
                }
                skipping = false;
                continue;
            }
            searched = self.end.saturating_sub(self.start);
            if self.at_end {
                let (from, to) = (self.start, self.end);
                self.start = self.end;
                return (from < to && !skipping).then_some((from, to));
            }
            if self.start > 0 {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, searched);
            }
            if self.end >= self.buffer.len() {
                if !skipping {
                    self.too_long = self.too_long.saturating_add(1);
                }
                (skipping, searched, self.end) = (true, 0, 0);
            }
            self.fill();
        }
    }

    fn fill(&mut self) {
        let place = self.buffer.get_mut(self.end..).unwrap_or_default();
        match self.files.read(&mut self.file, place) {
            Ok(0) => self.at_end = true,
            Ok(length) => {
                let length = length.min(place.len());
                self.end += length;
                self.read += length;
                self.at_end = self.read >= MOST || length == 0;
            }
            Err(error) => (self.at_end, self.error) = (true, Some(error)),
        }
    }
}

/// Reads the bytes of a small file, at most as many as fit into `buffer`.
pub(crate) fn read_small<'a, F: Files>(files: &F, path: &CStr, buffer: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    let mut file = files.open(path, Access::Read)?;
    let mut end = 0;
    while end < buffer.len() {
        let place = buffer.get_mut(end..).unwrap_or_default();
        let room = place.len();
        match files.read(&mut file, place)? {
            0 => break,
            length => end += length.min(room),
        }
    }
    Ok(buffer.get(..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;
    use crate::files::FileKind;

    /// One file, which is read a few bytes at a time.
    struct Text(Vec<u8>, usize);

    impl Files for Text {
        type File = usize;
        fn open(&self, _: &CStr, _: Access) -> Result<usize, Errno> {
            Ok(0)
        }
        fn read(&self, at: &mut usize, buffer: &mut [u8]) -> Result<usize, Errno> {
            let rest = &self.0[*at..];
            let length = rest.len().min(buffer.len()).min(self.1);
            buffer[..length].copy_from_slice(&rest[..length]);
            *at += length;
            Ok(length)
        }
        fn kind(&self, _: &CStr) -> Result<FileKind, Errno> {
            Err(Errno::NOENT)
        }
    }

    fn records(text: &[u8], step: usize) -> (Vec<Vec<u8>>, u32) {
        let files = Text(text.to_vec(), step);
        let mut buffer = [0; 8];
        let mut records = Records::open(&files, c"/x", b'\n', &mut buffer).unwrap();
        let mut all = Vec::new();
        while let Some(record) = records.next() {
            all.push(record.to_vec());
        }
        (all, records.too_long)
    }

    #[test]
    fn records_are_cut_at_separators_at_every_step() {
        for step in 1..12 {
            let (all, too_long) = records(b"one\n\nthree33\nmuch too long for it\nlast", step);
            assert_eq!(all, [b"one".to_vec(), b"".to_vec(), b"three33".to_vec(), b"last".to_vec()], "step {step}");
            assert_eq!(too_long, 1);
            assert_eq!(records(b"1234567\n", step), (Vec::from([b"1234567".to_vec()]), 0));
            assert_eq!(records(b"", step), (Vec::new(), 0));
            assert_eq!(records(b"123456789abcdef", step), (Vec::new(), 1), "unterminated");
        }
    }
}
