//! Kinds of options: the values that an option accepts, and the text that refuses others.
//!
//! # Design
//! A value stands for a number. It is written as a word, as a number, or as a percentage. A path
//! and a list of CPUs have no number, and `OptionRow::assign` parses them.

use crate::limits::limit::PERCENT;
use crate::options::types::AUTO;
use core::fmt;
use core::ops::RangeInclusive;

/// The values of an option.
#[derive(Debug)]
pub(super) struct ValueKind {
    /// The values, as users read them.
    pub(super) values: &'static str,
    /// The fault of any other value.
    pub(super) wrong: &'static str,
    /// Words, and the numbers for which they stand. The first word of a number displays it. With a
    /// word `0`, any spelling of zero is a value.
    words: &'static [(&'static str, u64)],
    /// The values that are written as numbers.
    numbers: RangeInclusive<u64>,
    /// Whether 1% to 100% are values, too.
    has_percentages: bool,
}

/// The kind whose values are the numbers from the first bound to the last.
macro_rules! number {
    ($least:literal, $most:literal) => {{
        let (values, wrong) = (concat!($least, " to ", $most), concat!("is not a number from ", $least, " to ", $most));
        ValueKind::words(values, wrong, &[]).or_numbers($least..=$most)
    }};
}
pub(super) use number;

/// Bytes between two samples with `profile:on` or `guard:on`.
const SAMPLE_MEAN: u64 = 512 << 10;
/// The numbers of percentages.
const PERCENTAGES: RangeInclusive<u64> = PERCENT + 1..=PERCENT + 100;

impl ValueKind {
    pub(super) const ON_OFF: ValueKind = ValueKind::words("on, off", "is neither on nor off", &[("off", 0), ("on", 1)]);
    pub(super) const BACKGROUND: ValueKind =
        ValueKind::words("auto, on, off", "is not valid (auto, on or off)", &[("auto", 0), ("on", 1), ("off", 2)]);
    pub(super) const GROUPS: ValueKind = ValueKind::words(
        "off, by-thread-name, by-thread",
        "is not valid (off, by-thread-name or by-thread)",
        &[("off", 0), ("by-thread-name", 1), ("by-thread", 2)],
    );
    pub(super) const CPUS: ValueKind = ValueKind::words("CPUs, as in 1,3-5", "is not a list of CPUs", &[]);
    pub(super) const PATH: ValueKind =
        ValueKind::words("a file, from / on", "is not a path from / on of at most 255 bytes", &[]);
    pub(super) const PAGES: ValueKind =
        ValueKind::words("auto, pages", "is neither auto nor a number of pages", &[("auto", AUTO)])
            .or_numbers(0..=AUTO - 1);
    pub(super) const NODES: ValueKind =
        ValueKind::words("auto, 1 to 32", "is neither auto nor a number from 1 to 32", &[("auto", 0)])
            .or_numbers(1..=32);
    pub(super) const PROFILE: ValueKind = ValueKind::words(
        "off, on, or bytes with k, m, g",
        "is not valid (off, on, or bytes from 1k to 1024g)",
        &[("off", 0), ("0", 0), ("on", SAMPLE_MEAN)],
    )
    .or_numbers(1 << 10..=1 << 40);
    pub(super) const GUARD: ValueKind = ValueKind::words(
        "off, on, or bytes with k, m, g",
        "is not valid (off, on, or bytes from 1 to 1024g)",
        &[("off", 0), ("on", SAMPLE_MEAN)],
    )
    .or_numbers(1..=1 << 40);
    pub(super) const LIMIT: ValueKind = ValueKind::words(
        "none, auto, 1% to 100%, or bytes with k, m, g",
        "is not a valid limit (none, auto, 1% to 100%, or bytes with k, m, g)",
        &[("none", 0), ("0", 0), ("auto", AUTO)],
    )
    .or_bytes_and_percentages();
    pub(super) const HIGH: ValueKind = ValueKind::words(
        "none, 1% to 100% of the limit, or bytes with k, m, g",
        "is not a valid bound (none, 1% to 100%, or bytes with k, m, g)",
        &[("none", 0), ("0", 0)],
    )
    .or_bytes_and_percentages();
    pub(super) const RESERVE: ValueKind = ValueKind::words(
        "auto, 1% to 100% of the limit, or bytes with k, m, g",
        "is not a valid reserve (auto, 1% to 100%, or bytes with k, m, g)",
        &[("auto", AUTO)],
    )
    .or_bytes_and_percentages();

    /// Returns the kind with `words`, and texts for users: its `values`, and the fault of others.
    pub(super) const fn words(
        values: &'static str,
        wrong: &'static str,
        words: &'static [(&'static str, u64)],
    ) -> ValueKind {
        // No number is from 1 to 0.
        ValueKind { values, wrong, words, numbers: RangeInclusive::new(1, 0), has_percentages: false }
    }

    /// Returns the kind that has `numbers`, too.
    pub(super) const fn or_numbers(self, numbers: RangeInclusive<u64>) -> ValueKind {
        ValueKind { numbers, ..self }
    }

    /// Returns the kind that has numbers of bytes and percentages, too.
    const fn or_bytes_and_percentages(self) -> ValueKind {
        ValueKind { numbers: 1..=isize::MAX as u64, has_percentages: true, ..self }
    }

    /// Returns the number for which `text` stands.
    ///
    /// # Errors
    /// The fault of the text.
    pub(super) fn parse(&self, text: &[u8]) -> Result<u64, &'static str> {
        let word = |text: &[u8]| self.words.iter().find(|(word, _)| word.as_bytes() == text).map(|&(_, number)| number);
        let number = || match text {
            [digits @ .., b'%'] if self.has_percentages => {
                bytes(digits).filter(|percent| (1..=100).contains(percent)).map(|percent| PERCENT + percent)
            }
            _ => bytes(text).filter(|number| self.numbers.contains(number) || *number == 0 && word(b"0").is_some()),
        };
        word(text).or_else(number).ok_or(self.wrong)
    }

    /// Returns `number` if it is a value's.
    ///
    /// # Errors
    /// The fault of another number.
    pub(super) fn check(&self, number: u64) -> Result<u64, &'static str> {
        let is_word = self.words.iter().any(|&(_, known)| known == number);
        let is_percentage = self.has_percentages && PERCENTAGES.contains(&number);
        if is_word || is_percentage || self.numbers.contains(&number) { Ok(number) } else { Err(self.wrong) }
    }

    /// Writes the value of `number`, as options write it.
    pub(super) fn show(&self, number: u64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.words.iter().find(|&&(_, known)| known == number) {
            Some((word, _)) if !self.numbers.contains(&number) => f.write_str(word),
            None if self.has_percentages && PERCENTAGES.contains(&number) => write!(f, "{}%", number - PERCENT),
            _ => write!(f, "{number}"),
        }
    }
}

/// Parses a number with an optional k, m or g for powers of 1024.
fn bytes(text: &[u8]) -> Option<u64> {
    let (digits, shift) = match text.last()?.to_ascii_lowercase() {
        b'k' => (&text[..text.len() - 1], 10),
        b'm' => (&text[..text.len() - 1], 20),
        b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number =
        digits.iter().try_fold(0_u64, |number, digit| number.checked_mul(10)?.checked_add(u64::from(digit - b'0')))?;
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    struct Shown(&'static ValueKind, u64);

    impl fmt::Display for Shown {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.show(self.1, f)
        }
    }

    #[test]
    fn a_limit_is_parsed_numbered_and_displayed() {
        for (text, limit, shown) in [
            ("none", 0, "none"),
            ("0", 0, "none"),
            ("0m", 0, "none"),
            ("64m", 64 << 20, "67108864"),
            ("auto", AUTO, "auto"),
            ("1%", PERCENT + 1, "1%"),
            ("100%", PERCENT + 100, "100%"),
        ] {
            assert_eq!(ValueKind::LIMIT.parse(text.as_bytes()), Ok(limit), "{text}");
            assert_eq!(
                (ValueKind::LIMIT.check(limit), Shown(&ValueKind::LIMIT, limit).to_string()),
                (Ok(limit), shown.into())
            );
        }
        for wrong in ["", "%", "0%", "101%", "50.5%", "auto%", "9223372036854775807%", "9999999999g", "-1", "automatic"]
        {
            assert_eq!(ValueKind::LIMIT.parse(wrong.as_bytes()), Err(ValueKind::LIMIT.wrong), "{wrong}");
        }
        for wrong in [1 << 63, PERCENT | 101, PERCENT | 0x150, AUTO - 1] {
            assert_eq!(ValueKind::LIMIT.check(wrong), Err(ValueKind::LIMIT.wrong), "{wrong:#x}");
        }
    }

    #[test]
    fn a_word_displays_only_numbers_that_are_not_written() {
        let shown = |kind, number| Shown(kind, number).to_string();
        assert_eq!([0, 512 << 10].map(|number| shown(&ValueKind::PROFILE, number)), ["off", "524288"]);
        assert_eq!([0, AUTO].map(|number| shown(&ValueKind::PAGES, number)), ["0", "auto"]);
        assert_eq!([0, 1].map(|number| shown(&ValueKind::ON_OFF, number)), ["off", "on"]);
        for (kind, text) in
            [(&ValueKind::GUARD, "0"), (&ValueKind::RESERVE, "0"), (&ValueKind::NODES, "0"), (&ValueKind::ON_OFF, "1")]
        {
            assert_eq!(kind.parse(text.as_bytes()), Err(kind.wrong));
        }
        assert_eq!(
            (ValueKind::PROFILE.parse(b"0k"), ValueKind::PROFILE.parse(b"1")),
            (Ok(0), Err(ValueKind::PROFILE.wrong))
        );
    }
}
