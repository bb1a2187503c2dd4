//! Colours of text on standard output.
//!
//! Text has colours if standard output is a terminal, unless the variable `NO_COLOR` is set or
//! `TERM` is `dumb`. All commands decide by [`Colours::of_output`]. No information is in colours
//! alone. Text of other processes is [escaped](crate::look::foreign), so it has none.

use std::io::{self, IsTerminal, Write};

/// Bold; and bold yellow, which is distinct for colour-blind readers, too.
const HEADING: &str = "\x1b[1m";
const WARNING: &str = "\x1b[1;33m";
const END: &str = "\x1b[0m";

/// Whether text has colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Colours(bool);

impl Colours {
    #[cfg(test)]
    pub(crate) const NONE: Colours = Colours(false);
    #[cfg(test)]
    pub(crate) const ALL: Colours = Colours(true);

    /// The colours that suit standard output.
    pub(crate) fn of_output() -> Colours {
        let is_dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
        let has_none = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Colours(io::stdout().is_terminal() && !has_none && !is_dumb)
    }

    pub(crate) fn are_on(self) -> bool {
        self.0
    }

    /// Returns the text between an escape sequence and the end of its effect.
    pub(crate) fn paint(self, sequence: &str, text: &str) -> String {
        if self.0 { format!("{sequence}{text}{END}") } else { text.to_string() }
    }

    pub(crate) fn heading(self, text: &str) -> String {
        self.paint(HEADING, text)
    }

    pub(crate) fn warning(self, text: &str) -> String {
        self.paint(WARNING, text)
    }

    /// Returns a text that warns if `is_bad`.
    pub(crate) fn warning_if(self, is_bad: bool, text: &str) -> String {
        if is_bad { self.warning(text) } else { text.to_string() }
    }
}

/// Returns the number of characters of a text, without its escape sequences for colours.
pub(crate) fn width(text: &str) -> usize {
    let mut parts = text.split('\x1b');
    let first = parts.next().map_or(0, |part| part.chars().count());
    parts.fold(first, |sum, part| sum + part.split_once('m').map_or(part, |(_, rest)| rest).chars().count())
}

/// Writes lines on, the heads of tables as headings. A table's head is the line before its rule.
pub(crate) struct TableHeads<W: Write> {
    output: W,
    colours: Colours,
    /// The last whole line, which is not written yet, and the begin of the next one.
    last: Vec<u8>,
    next: Vec<u8>,
}

impl<W: Write> TableHeads<W> {
    pub(crate) fn new(output: W, colours: Colours) -> TableHeads<W> {
        TableHeads { output, colours, last: Vec::new(), next: Vec::new() }
    }

    /// Writes the rest.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.output.write_all(&self.last)?;
        self.output.write_all(&self.next)?;
        self.output.flush()
    }
}

impl<W: Write> Write for TableHeads<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            self.next.extend_from_slice(part);
            if !part.ends_with(b"\n") {
                continue;
            }
            match str::from_utf8(&self.last) {
                Ok(head) if self.next.starts_with(b"| --") && self.colours.are_on() => {
                    writeln!(self.output, "{}", self.colours.heading(head.trim_end()))?;
                }
                _ => self.output.write_all(&self.last)?,
            }
            core::mem::swap(&mut self.last, &mut self.next);
            self.next.clear();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_have_no_width_and_none_are_there_without_a_terminal() {
        let warning = Colours::ALL.warning("7 \u{6f22}");
        assert_eq!((warning.as_str(), width(&warning), width("")), ("\x1b[1;33m7 \u{6f22}\x1b[0m", 3, 0));
        assert_eq!(Colours::ALL.warning_if(false, "7"), "7");
        assert_eq!(Colours::NONE.warning("7") + &Colours::NONE.heading("8"), "78");
    }

    #[test]
    fn heads_of_tables_are_headings_however_they_are_written() {
        let text = "one\n\n| a | b |\n| --- | --: |\n| 1 | 2 |\nlast";
        let painted = |colours, piece: usize| {
            let mut output = Vec::new();
            let mut heads = TableHeads::new(&mut output, colours);
            text.as_bytes().chunks(piece).for_each(|bytes| heads.write_all(bytes).unwrap());
            heads.finish().unwrap();
            String::from_utf8(output).unwrap()
        };
        let expected = "one\n\n\x1b[1m| a | b |\x1b[0m\n| --- | --: |\n| 1 | 2 |\nlast";
        assert_eq!([painted(Colours::ALL, 1), painted(Colours::ALL, 100)], [expected, expected]);
        assert_eq!(painted(Colours::NONE, 3), text);
    }
}
