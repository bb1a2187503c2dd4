//! The report of a misuse. One call writes its lines to standard error.
//!
//! # Design
//! neap keeps a stack as a copy of its bytes. The report shows each word that is an address in code
//! behind a call instruction. So it may also show calls that had returned before. It shows each
//! address with its file and the distance from that file's first mapping, which debuggers accept.
//!
//! Any function of the process may have failed. So the report runs on a separate stack, maps memory
//! for its buffers, takes no lock, and allocates nothing.

use crate::state::guard::trail::Caller;
use crate::state::guard::{FoundMisuse, Misuse};
use core::fmt::{self, Write};
use neap_os::mappings::{self, Mapping};
use neap_os::signal::{Interrupted, is_behind_call};
use neap_os::{fatal, memory, stack};

/// Most bytes of a report.
const BYTES: usize = 24 << 10;
/// Most calls of a stack that a report shows.
const CALLS: usize = 32;
/// Most mappings with code, most bytes of all their names, and most bytes of one name.
const CODES: usize = 512;
const NAMES: usize = 24 << 10;
const NAME: usize = 160;
/// Bytes of `/proc/self/maps` that one read gets.
const LINES: usize = 4 << 10;

/// The event that revealed a misuse.
pub(super) enum Call<'a> {
    /// A function of malloc's family.
    Function(&'a str),
    /// An access that failed.
    Access(Interrupted),
}

/// Writes a report to standard error. `caller` has the stack of the call.
pub(super) fn report(found: &FoundMisuse<'_>, call: &Call<'_>, caller: &Caller) {
    let room = memory::map(size_of::<Buffers>().next_multiple_of(memory::page_size()));
    let whole = room.ok().and_then(|room| {
        stack::apart(|| {
            // SAFETY: `map` mapped the memory above, with at least the size of `Buffers`. Only this
            // code uses it, and it stays until the process ends. All zeroes is a valid value.
            let Buffers { text, code, lines } =
                unsafe { &mut *core::ptr::with_exposed_provenance_mut::<Buffers>(room) };
            // Without `/proc` the report knows no mapping.
            let _ = mappings::each_own(lines, &mut |mapping, _| code.note(mapping));
            // If the text is longer than its buffer, the report writes only its start.
            let _ = describe(text, code, found, call, caller);
            fatal::write_all(text.bytes.get(..text.length).unwrap_or_default());
        })
    });
    if whole.is_none() {
        fatal::say(format_args!("{}", HeadLine(found, call)));
    }
}

/// Buffers of a report.
struct Buffers {
    text: Text,
    code: Code,
    /// Text of `/proc/self/maps`.
    lines: [u8; LINES],
}

fn describe(text: &mut Text, code: &Code, found: &FoundMisuse<'_>, call: &Call<'_>, caller: &Caller) -> fmt::Result {
    writeln!(text, "neap: {}", HeadLine(found, call))?;
    let (did, at) = match call {
        Call::Function(name) => (*name, None),
        Call::Access(at) => ("access", Some(at)),
    };
    writeln!(text, "neap: {did} by thread {}:", caller.thread)?;
    if let Some(at) = at {
        code.write(text, at.instruction)?;
        at.link.filter(|&link| code.is_call(link)).map_or(Ok(()), |link| code.write(text, link))?;
    }
    // SAFETY: `caller` has the stack of this thread. The thread returns to it only after it has
    // written the report, so the stack is as it was, or deeper.
    code.write_calls(text, |each| unsafe { caller.each_word(each) })?;
    if found.slot.start() > 0 {
        writeln!(text, "neap: allocated by thread {}:", found.slot.allocated.thread())?;
        code.write_calls(text, |each| found.slot.allocated.each_word(each))?;
    }
    if found.slot.is_freed() && found.slot.freed.thread() > 0 {
        writeln!(text, "neap: freed by thread {}:", found.slot.freed.thread())?;
        code.write_calls(text, |each| found.slot.freed.each_word(each))?;
    }
    Ok(())
}

/// The first line.
struct HeadLine<'a>(&'a FoundMisuse<'a>, &'a Call<'a>);

impl fmt::Display for HeadLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HeadLine(found, call) = self;
        let FoundMisuse { misuse, slot, address } = **found;
        let kind = match misuse {
            Misuse::Overflow => "overflow",
            Misuse::Underflow => "underflow",
            Misuse::AfterFree => "use after free",
            Misuse::DoubleFree => "double free",
            Misuse::BadFree => "bad free",
        };
        write!(f, "{kind}: ")?;
        match (call, misuse) {
            (Call::Access(at), _) => f.write_str(match at.is_write {
                Some(true) => "write to",
                Some(false) => "read of",
                None => "access to",
            })?,
            (Call::Function(name), Misuse::Overflow | Misuse::Underflow) => write!(f, "found by {name}, write to")?,
            (Call::Function(name), _) => write!(f, "{name} of")?,
        }
        let (start, size) = (slot.start(), slot.size());
        let offset = address.wrapping_sub(start).cast_signed();
        write!(f, " {address:#x}")?;
        if start == 0 {
            return f.write_str(", which is no allocation");
        }
        write!(f, ", offset {offset} of an allocation of {size} bytes at {start:#x}")
    }
}

/// Text that ends where its buffer ends.
struct Text {
    bytes: [u8; BYTES],
    length: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.get_mut(self.length..self.length + text.len()).ok_or(fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.length += text.len();
        Ok(())
    }
}

/// A mapping with code.
#[derive(Clone, Copy)]
struct CodePart {
    start: usize,
    end: usize,
    /// Address of the file's first mapping.
    base: usize,
    /// Index of the file's name among the names, and its length.
    name: (usize, usize),
}

/// The process's code.
struct Code {
    parts: [CodePart; CODES],
    count: usize,
    names: [u8; NAMES],
    named: usize,
    /// Name of the last mapping that was read, its length, and the address of the first mapping of
    /// that file.
    last: [u8; NAME],
    last_length: usize,
    base: usize,
}

impl Code {
    /// Records a mapping of the process. It lies above all mappings that were recorded before.
    fn note(&mut self, mapping: &Mapping<'_>) {
        let name = mapping.name.get(..NAME).unwrap_or(mapping.name);
        if self.last.get(..self.last_length) != Some(name) || name.is_empty() {
            self.last.iter_mut().zip(name).for_each(|(to, from)| *to = *from);
            (self.last_length, self.base) = (name.len(), mapping.start);
        }
        let place = self.parts.get_mut(self.count);
        let room = self.names.get_mut(self.named..self.named + name.len());
        if let (Some(place), Some(room), b"r-xp") = (place, room, &mapping.rights) {
            // A name may have any bytes.
            let shown = |byte: u8| if byte.is_ascii_graphic() { byte } else { b'?' };
            room.iter_mut().zip(name).for_each(|(to, from)| *to = shown(*from));
            *place =
                CodePart { start: mapping.start, end: mapping.end, base: self.base, name: (self.named, name.len()) };
            self.named += name.len();
            self.count += 1;
        }
    }

    fn part_of(&self, address: usize) -> Option<&CodePart> {
        self.parts.iter().take(self.count).find(|part| (part.start..part.end).contains(&address))
    }

    fn name(&self, part: &CodePart) -> &str {
        let bytes = self.names.get(part.name.0..part.name.0 + part.name.1).unwrap_or_default();
        core::str::from_utf8(bytes).unwrap_or_default()
    }

    /// Whether a word may be the address to which a call returns.
    fn is_call(&self, word: usize) -> bool {
        let is_aligned = cfg!(target_arch = "x86_64") || word.is_multiple_of(4);
        let in_code = self.part_of(word).is_some_and(|part| word >= part.start + 8);
        // SAFETY: the address has the alignment of code. The 8 bytes before it lie in the same
        // mapping, which can be read.
        is_aligned && in_code && unsafe { is_behind_call(word) }
    }

    /// Writes the line of an address.
    fn write(&self, text: &mut Text, address: usize) -> fmt::Result {
        match self.part_of(address) {
            Some(part) => writeln!(text, "neap:   {address:#x} {}+{:#x}", self.name(part), address - part.base),
            None => writeln!(text, "neap:   {address:#x}"),
        }
    }

    /// Writes a line for each call on a stack, except for calls of neap's own library.
    fn write_calls(&self, text: &mut Text, each_word: impl FnOnce(&mut dyn FnMut(usize))) -> fmt::Result {
        let (mut left, mut answer) = (CALLS, Ok(()));
        let is_own = |part| {
            let name = self.name(part).as_bytes();
            let file = name.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
            name.get(file..).is_some_and(|file| file.starts_with(b"libneap"))
        };
        each_word(&mut |word| {
            if left > 0 && self.is_call(word) && !self.part_of(word).is_some_and(is_own) {
                left -= 1;
                answer = answer.and_then(|()| self.write(text, word));
            }
        });
        answer
    }
}
