//! Pure functions on the text of kernel files: numbers, words, keys, escapes.

/// A limit of this or more bytes means "no limit". Version 1 of cgroups shows "no limit" as the
/// largest number of pages, in bytes. That number depends on the page size, and is never below this
/// one.
pub(crate) const UNLIMITED: u64 = 1 << 62;

/// Returns the decimal number in `text`. `None` if `text` has other bytes besides surrounding
/// blanks, or if the number exceeds 64 bits.
pub(crate) fn number(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii();
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0_u64, |value, byte| {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// Returns the limit in `text`. `Some(None)` means no limit: `max`, or at least [`UNLIMITED`]
/// bytes. `None` means that `text` cannot be parsed.
pub(crate) fn limit(text: &[u8]) -> Option<Option<u64>> {
    if text.trim_ascii() == b"max" {
        return Some(None);
    }
    let limit = number(text)?;
    Some((limit < UNLIMITED).then_some(limit))
}

/// Splits `line` into the word before the first blank or colon, and the rest without blanks.
pub(crate) fn key_value(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = line.iter().position(|byte| matches!(byte, b' ' | b'\t' | b':'))?;
    let (key, rest) = line.split_at(at);
    let rest = rest.strip_prefix(b":").unwrap_or(rest);
    Some((key, rest.trim_ascii()))
}

/// Returns whether `word` is an element of the comma-separated `list`.
pub(crate) fn lists(list: &[u8], word: &[u8]) -> bool {
    list.split(|byte| *byte == b',').any(|element| element == word)
}

/// Returns the number of a `123 kB` value in bytes.
pub(crate) fn kib(value: &[u8]) -> Option<u64> {
    let digits = value.strip_suffix(b"kB").unwrap_or(value);
    number(digits)?.checked_mul(1024)
}

/// Replaces escapes of three octal digits (`\040`) in place. Returns the new length.
pub(crate) fn unescape(text: &mut [u8]) -> usize {
    let (mut from, mut to) = (0, 0);
    while let Some(&byte) = text.get(from) {
        let digits = text.get(from + 1..from + 4).filter(|_| byte == b'\\').and_then(|digits| {
            digits.iter().try_fold(0_u32, |value, digit| {
                matches!(digit, b'0'..=b'7').then(|| value * 8 + u32::from(digit - b'0'))
            })
        });
        let (plain, length) = match digits.and_then(|value| u8::try_from(value).ok()) {
            Some(plain) => (plain, 4),
            None => (byte, 1),
        };
        if let Some(place) = text.get_mut(to) {
            *place = plain;
        }
        from += length;
        to += 1;
    }
    to
}

/// Returns `text` without the suffix that the kernel shows for a removed group.
pub(crate) fn without_deleted(text: &[u8]) -> Option<&[u8]> {
    text.strip_suffix(b" (deleted)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_and_nonsense_is_refused() {
        assert_eq!(number(b" 42\n"), Some(42));
        assert_eq!(number(b"18446744073709551615"), Some(u64::MAX));
        for bad in ["", "\n", "-1", "1 2", "0x10", "18446744073709551616", "99999999999999999999999999", "1k"] {
            assert_eq!(number(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn limits_without_effect_are_none() {
        assert_eq!(limit(b"max\n"), Some(None));
        assert_eq!(limit(b"9223372036854771712\n"), Some(None), "pages of 4 KiB");
        assert_eq!(limit(b"9223372036854710272\n"), Some(None), "pages of 64 KiB");
        assert_eq!(limit(b"0\n"), Some(Some(0)));
        assert_eq!(limit(b"maximum"), None);
    }

    #[test]
    fn escapes_are_replaced_once() {
        let cases: [(&[u8], &[u8]); 6] = [
            (b"/a\\040b", b"/a b"),
            (b"/a\\134040", b"/a\\040"),
            (b"/\\04", b"/\\04"),
            (b"/\\999", b"/\\999"),
            (b"\\777", b"\\777"),
            (b"", b""),
        ];
        for (from, to) in cases {
            let mut text = from.to_vec();
            let length = unescape(&mut text);
            assert_eq!(&text[..length], to);
        }
    }

    #[test]
    fn keys_end_at_a_colon_or_blank() {
        assert_eq!(key_value(b"MemTotal:   12 kB"), Some((&b"MemTotal"[..], &b"12 kB"[..])));
        assert_eq!(key_value(b"anon 7"), Some((&b"anon"[..], &b"7"[..])));
        assert_eq!(key_value(b"anon"), None);
        assert_eq!(kib(b"12 kB"), Some(12 << 10));
    }
}
