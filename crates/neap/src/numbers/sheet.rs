//! The text of the page of numbers: a JSON object that one thread at a time writes, and that
//! readers get as a whole.
//!
//! # Format
//! Version 7, in the machine's byte order: magic (8 bytes), version, sequence, process id and
//! length (4 bytes each), nanoseconds of `CLOCK_MONOTONIC` (8 bytes), a request and its answer
//! ([`control`](crate::control)), [live counters](super::live), and a JSON object of that length.
//! A report on chunks, groups, shrinkers or the arena follows from [`REPORT_AT`] on.
//!
//! The sequence is odd while the text is written, and 0 before the first time. A reader that finds
//! it even, and unchanged afterwards, has one whole object. The process id is that of the process
//! that made the page.

use crate::control::channel::ControlChannel;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Magic at the start of the page.
pub(crate) const MAGIC: u64 = u64::from_ne_bytes(*b"neapstat");
/// Format version. Incremented with every change that an older reader would misread.
pub(crate) const VERSION: u32 = 9;
/// Offset of reports in the file, and the most bytes of numbers.
pub(crate) const REPORT_AT: usize = 256 << 10;
/// Bytes of reports.
pub(crate) const REPORT: usize = 64 << 10;
/// Bytes that each list leaves free for the text behind it.
const TAIL: usize = 64;

/// The start of the page.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) sequence: AtomicU32,
    pub(crate) pid: AtomicU32,
    pub(crate) length: AtomicU32,
    pub(crate) published: AtomicU64,
    pub(crate) channel: ControlChannel,
}

/// Header and text of a page.
#[derive(Clone, Copy)]
pub(crate) struct Sheet<'a> {
    pub(crate) header: &'a Header,
    pub(crate) text: &'a [AtomicU8],
}

impl<'a> Sheet<'a> {
    /// Returns the page at `address`, whose text is from `text_at` to `length`.
    ///
    /// # Safety
    /// * `text_at` is at least the size of a header, and at most `length`.
    /// * The `length` bytes at `address`, a multiple of 8, are initialised, outlive the returned
    ///   value, and are changed by atomic accesses only.
    pub(crate) unsafe fn at(address: usize, text_at: usize, length: usize) -> Sheet<'a> {
        let header = core::ptr::with_exposed_provenance::<Header>(address);
        let text = core::ptr::with_exposed_provenance::<AtomicU8>(address + text_at);
        // SAFETY: header and text lie in the `length` bytes at `address`. These are aligned to 8,
        // initialised, outlive the value, and are changed by atomic accesses only (the caller's
        // promise).
        unsafe { Sheet { header: &*header, text: core::slice::from_raw_parts(text, length - text_at) } }
    }

    /// Replaces the numbers. One writer at a time.
    pub(crate) fn publish(self, pid: u32, now: u64, write: impl FnOnce(&mut Text<'_>) -> fmt::Result) {
        let header = self.header;
        let sequence = header.sequence.load(Ordering::Relaxed) | 1;
        header.sequence.store(sequence, Ordering::Relaxed);
        // Release pairs with the reader's second load: after a byte written below it differs.
        fence(Ordering::Release);
        header.magic.store(MAGIC, Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Relaxed);
        header.pid.store(pid, Ordering::Relaxed);
        header.published.store(now, Ordering::Relaxed);
        let mut text = Text { bytes: self.text, length: 0, limit: self.text.len(), truncated: false };
        let length = if write(&mut text).is_ok() { text.length } else { 0 };
        header.length.store(length as u32, Ordering::Relaxed);
        // Release pairs with the reader's first load: it publishes the numbers.
        header.sequence.store(sequence.wrapping_add(1), Ordering::Release);
    }
}

/// A writer of JSON. A list that does not fit is cut off after a whole element.
pub(crate) struct Text<'a> {
    bytes: &'a [AtomicU8],
    length: usize,
    limit: usize,
    pub(crate) truncated: bool,
}

impl Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.length + text.len();
        if end > self.limit {
            return Err(fmt::Error);
        }
        let bytes = self.bytes[self.length..end].iter();
        bytes.zip(text.bytes()).for_each(|(to, byte)| to.store(byte, Ordering::Relaxed));
        self.length = end;
        Ok(())
    }
}

impl Text<'_> {
    pub(crate) fn list<T>(
        &mut self,
        items: impl Iterator<Item = T>,
        each: impl Fn(&mut Self, T) -> fmt::Result,
    ) -> fmt::Result {
        self.write_char('[')?;
        self.limit = self.bytes.len().saturating_sub(TAIL);
        let mut separator = "";
        for item in items {
            let before = self.length;
            if self.write_str(separator).and_then(|()| each(self, item)).is_err() {
                self.length = before;
                self.truncated = true;
                break;
            }
            separator = ",";
        }
        self.limit = self.bytes.len();
        self.write_char(']')
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::boxed::Box;
    use std::string::String;
    use std::vec::Vec;

    const WORDS: usize = 1 << 9;

    /// Memory of a page without live counters, and its reader: it returns one whole object, or
    /// nothing.
    pub(crate) struct Memory(Box<[AtomicU64]>);

    impl Memory {
        pub(crate) fn new(words: usize) -> Memory {
            Memory((0..words).map(|_| AtomicU64::new(0)).collect())
        }

        pub(crate) fn sheet(&self) -> Sheet<'_> {
            // SAFETY: the words are atomics, aligned to 8, and the returned value borrows them.
            unsafe { Sheet::at(self.0.as_ptr().expose_provenance(), size_of::<Header>(), self.0.len() * 8) }
        }

        pub(crate) fn read(&self) -> Option<(u32, u64, String)> {
            let Sheet { header, text } = self.sheet();
            let sequence = header.sequence.load(Ordering::Acquire); // Pairs with the last store of `publish`.
            let read = (header.pid.load(Ordering::Relaxed), header.published.load(Ordering::Relaxed));
            let length = header.length.load(Ordering::Relaxed) as usize;
            let bytes: Vec<u8> = text[..length].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
            fence(Ordering::Acquire); // Pairs with the fence of `publish`.
            let whole = sequence % 2 == 0 && header.sequence.load(Ordering::Relaxed) == sequence;
            whole.then(|| (read.0, read.1, String::from_utf8(bytes).unwrap()))
        }
    }

    #[test]
    fn what_was_published_last_is_read() {
        let memory = Memory::new(WORDS);
        for (pid, text) in [(7, "{\"first\":1}"), (8, "{}")] {
            memory.sheet().publish(pid, u64::from(pid) * 10, |to| to.write_str(text));
            assert_eq!(memory.read(), Some((pid, u64::from(pid) * 10, text.into())));
        }
        let header = memory.sheet().header;
        assert_eq!(&header.magic.load(Ordering::Relaxed).to_ne_bytes(), b"neapstat");
        assert_eq!(header.version.load(Ordering::Relaxed), VERSION);
    }

    #[test]
    fn a_reader_in_the_middle_of_writing_gets_nothing() {
        let memory = Memory::new(WORDS);
        memory.sheet().publish(1, 1, |to| to.write_str("old"));
        memory.sheet().publish(1, 2, |to| {
            to.write_str("ne")?;
            assert_eq!(memory.read(), None);
            to.write_str("w")
        });
        assert_eq!(memory.read().unwrap().2, "new");
    }

    #[test]
    fn a_reader_beside_a_writer_never_sees_a_mixture() {
        let (memory, done) = (Memory::new(WORDS), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20_000_u64 {
                    let letter = char::from(b'a' + (round % 26) as u8);
                    let length = 100 + round % 26 * 100;
                    memory
                        .sheet()
                        .publish(round as u32 % 26, length, |to| (0..length).try_for_each(|_| to.write_char(letter)));
                }
                done.store(1, Ordering::Relaxed);
            });
            let mut whole = 0;
            while done.load(Ordering::Relaxed) == 0 || whole == 0 {
                let Some((pid, length, text)) = memory.read() else { continue };
                let letter = char::from(b'a' + pid as u8);
                let fits = text.len() as u64 == length && text.chars().all(|each| each == letter);
                assert!(fits || length == 0, "{} bytes of {letter}, {length} expected: {text}", text.len());
                whole += 1;
            }
        });
    }

    #[test]
    fn a_list_that_does_not_fit_ends_after_a_whole_element() {
        let memory = Memory::new((size_of::<Header>() + TAIL + 40) / 8);
        memory.sheet().publish(1, 1, |text| {
            text.list(0..1000, |text, number| write!(text, "{{\"n\":{number}}}"))?;
            assert!(text.truncated);
            text.write_char(';')?;
            text.list(0..1, |text, number| write!(text, "{number}"))
        });
        assert_eq!(memory.read().unwrap().2, "[{\"n\":0},{\"n\":1},{\"n\":2},{\"n\":3},{\"n\":4}];[]");
        memory.sheet().publish(1, 1, |text| (0..1000).try_for_each(|_| text.write_char('x')));
        assert_eq!(memory.read().unwrap().2, "", "what cannot be cut off is left out");
    }
}
