//! The report on mappings, pages and counters for another process, which compares it with the
//! kernel's view: words in the page of numbers.
//!
//! # Design
//! The report answers a request (`control/mod.rs`) of [`reconcile`](crate::reports::reconcile).
//! This process makes no system call for the report, because a sandbox may end a process that opens
//! a file. The asking process reads this process's mappings itself. A report begins at the
//! requested piece of the arena and ends where the page does. Only the first report has the ranges
//! and counters. The data of a piece are read at one moment. Reporting allocates nothing.
//!
//! # Format
//! Words of 64 bits:
//!
//! 1. whether there is a manager; the next piece to request, all bits set if there is none; bytes
//!    of a page; the arena's base; the first piece, and pieces in this report; ranges in it;
//!    numbers in it;
//! 2. the numbers of [`Books`], in their order;
//! 3. for each range: start, length, `Source`;
//! 4. for each piece: a nibble for every page ([`Use`](neap_pages::Use)).

use crate::mm::Mm;
use crate::reports::reconcile::{Books, Range};
use crate::reports::writer::{self, ReportWriter};
use core::fmt::{self, Write};
use core::sync::atomic::AtomicU64;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_pages::PIECE;

/// Words before the numbers.
pub const HEAD: usize = 8;
/// Words of a range.
pub const RANGE: usize = 3;
/// Words of a piece.
pub const WORDS: usize = PIECE / 16;

/// Writes a report on the pieces from `from` on into `words`; if `from` is 0, also the ranges, and
/// the counters `books`.
pub(crate) fn write<P: Platform>(mm: &Mm<P>, inside: &Inside<'_>, mut books: Books, from: u32, words: &[AtomicU64]) {
    writer::touch(words);
    let Some(core) = mm.core_if_open() else { return };
    let (mut writer, mut numbers, mut ranges) = (ReportWriter::new(words, HEAD), 0, 0);
    if from == 0 {
        numbers = books.numbers().count();
        writer.write_all(books.numbers().map(|number| *number));
        core.each_range(mm, inside, &mut |range| {
            if writer.has_room(RANGE) {
                writer.write_all([range.start as u64, range.length as u64, range.of as u64]);
                ranges += 1;
            }
        });
    }
    let (pages, mut next) = (&core.objects.pages, from);
    while next < pages.pieces() && writer.has_room(WORDS) {
        let mut uses = [0; WORDS];
        pages.survey(next, &mut uses);
        writer.write_all(uses);
        next += 1;
    }
    let mut writer = ReportWriter::new(words, 0);
    let more = if next < pages.pieces() { next.into() } else { u64::MAX };
    writer.write_all([1, more, pages.page_size() as u64, pages.base() as u64]);
    writer.write_all([from.into(), next.saturating_sub(from).into(), ranges, numbers as u64]);
    debug_assert!(writer.at() == HEAD);
}

/// Writes neap's mappings into the numbers, for a process that gets no answer to its requests.
pub(crate) fn describe<P: Platform>(mm: &Mm<P>, inside: &Inside<'_>, text: &mut impl Write) -> fmt::Result {
    let (mut separator, mut answer) = ("", text.write_str("\"mappings\":["));
    if let Some(core) = mm.core_if_open() {
        core.each_range(mm, inside, &mut |Range { start, length, of }| {
            answer = answer
                .and_then(|()| write!(text, "{separator}{{\"of\":\"{of:?}\",\"start\":{start},\"length\":{length}}}"));
            separator = ",";
        });
    }
    answer?;
    text.write_str("],")
}
