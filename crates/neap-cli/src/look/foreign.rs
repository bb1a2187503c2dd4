//! Text that another process wrote, made harmless for terminals, files and readers.
//!
//! Every such text passes [`escaped`] where it is read: names, paths, published numbers, reports.
//! Reports for people and JSON objects show the result unchanged.

use core::fmt::Write;

use serde_json::{Map, Value};

/// Quotes and the backslash. They end no line and start no terminal sequence, so they stay
/// unchanged.
const HARMLESS: [char; 3] = ['\'', '"', '\\'];

/// Escapes a text. A byte that is not UTF-8 becomes an escape such as `\xd0`. A character that is
/// not printable becomes an escape such as `\u{9b}`. Control and format characters, line separators
/// and unassigned characters are not printable. Text that was escaped before stays unchanged.
pub(crate) fn escaped(text: &[u8]) -> String {
    let mut safe = String::with_capacity(text.len());
    for chunk in text.utf8_chunks() {
        for piece in chunk.valid().split_inclusive(HARMLESS) {
            let plain = piece.trim_end_matches(HARMLESS);
            // `escape_debug` also escapes a combining mark at the start of a piece.
            safe.extend(plain.escape_debug());
            safe.push_str(&piece[plain.len()..]);
        }
        for byte in chunk.invalid() {
            // Writing into a string does not fail.
            let _ = write!(safe, "\\x{byte:02x}");
        }
    }
    safe
}

/// Most characters of a published text that are kept. Each row of a table is as wide as its longest
/// text.
const LONGEST: usize = 1000;

/// Returns a published text, escaped and cut to [`LONGEST`] characters.
fn cut(text: &str) -> String {
    let safe = escaped(text.as_bytes());
    match safe.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &safe[..end]),
        None => safe,
    }
}

/// Returns a JSON value with all strings and keys escaped and cut to [`LONGEST`] characters.
pub(crate) fn escaped_value(value: Value) -> Value {
    match value {
        Value::String(text) => cut(&text).into(),
        Value::Array(values) => values.into_iter().map(escaped_value).collect(),
        Value::Object(entries) => escaped_object(entries).into(),
        plain => plain,
    }
}

/// Returns a JSON object with all strings and keys escaped and cut to [`LONGEST`] characters.
pub(crate) fn escaped_object(entries: Map<String, Value>) -> Map<String, Value> {
    entries.into_iter().map(|(key, value)| (cut(&key), escaped_value(value))).collect()
}

/// Escapes characters with a meaning in HTML.
pub(crate) fn quoted(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Whether a character could steer a terminal or hide from a reader. This check is independent
    /// of the code above.
    pub(crate) fn is_hostile(letter: char) -> bool {
        letter.is_control()
            || matches!(letter, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}')
            || ('\u{200b}'..='\u{200f}').contains(&letter)
            || ('\u{2028}'..='\u{202e}').contains(&letter)
            || ('\u{2060}'..='\u{206f}').contains(&letter)
            || ('\u{e0000}'..='\u{e007f}').contains(&letter)
    }

    /// The first character of an output that could do harm. Those of `layout` may be in it.
    pub(crate) fn first_hostile(output: &str, layout: &[char]) -> Option<char> {
        output.chars().find(|letter| !layout.contains(letter) && is_hostile(*letter))
    }

    #[test]
    fn text_of_all_scripts_stays_and_what_steers_is_escaped() {
        for plain in ["", "redis-server", "приложение", "it's \"a\\b\"", "漢字", "e\u{301}a", "a b"] {
            assert_eq!(escaped(plain.as_bytes()), plain);
        }
        for (text, expected) in [
            (&b"\xd0\xbf\xd1\x80\xd0"[..], "пр\\xd0"),
            (b"\xff\xfe\xc3(", "\\xff\\xfe\\xc3("),
            (b"\x1b[31mred", "\\u{1b}[31mred"),
            ("\u{9b}2J\u{85}x\u{7f}".as_bytes(), "\\u{9b}2J\\u{85}x\\u{7f}"),
            ("\u{202e}evil\u{2066}".as_bytes(), "\\u{202e}evil\\u{2066}"),
            ("a\u{2028}b\u{2029}c\u{200b}\u{e0041}".as_bytes(), "a\\u{2028}b\\u{2029}c\\u{200b}\\u{e0041}"),
            (b"a\nb\r\tc\0", "a\\nb\\r\\tc\\0"),
        ] {
            assert_eq!(escaped(text), expected);
            assert_eq!(escaped(expected.as_bytes()), expected, "escaped once");
        }
    }

    #[test]
    fn no_character_that_steers_passes() {
        for letter in '\0'..=char::MAX {
            let shown = escaped(format!("a{letter}b").as_bytes());
            assert!(!shown.chars().any(is_hostile), "{:x}", letter as u32);
        }
    }

    #[test]
    fn values_are_escaped_at_every_depth_and_in_keys() {
        let value = serde_json::json!({"a\u{9b}": [{"b": "\u{202e}x"}, 7, null], "c": "\u{7f}"});
        let expected = serde_json::json!({"a\\u{9b}": [{"b": "\\u{202e}x"}, 7, null], "c": "\\u{7f}"});
        assert_eq!(escaped_value(value), expected);
        let long = escaped_value("\u{9b}".repeat(LONGEST).into());
        assert_eq!(long.as_str().map(|text| text.chars().count()), Some(LONGEST + 3));
    }
}
