//! Parser of the list format of `/sys`: `0-3,8,10-11`.
//!
//! A pure function of bytes: no system call, no allocation. Text that is not a list is an error
//! that names the offending byte.

/// Error for text that is not a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadList {
    /// Offset of the first offending byte in the text.
    pub at: usize,
}

/// Calls `each` with the inclusive bounds of every range in `text`. White space at the end is
/// allowed. An empty text is an empty list.
///
/// # Errors
/// [`BadList`] with the offset of the first offending part. This is a byte that is not a digit, `-`
/// or `,` in its place, a number over `u32::MAX`, or a range that runs backwards.
///
/// ```
/// let mut cpus = vec![];
/// neap_os::cpuset::parse(b"0-2,5\n", |low, high| cpus.extend(low..=high)).unwrap();
/// assert_eq!(cpus, [0, 1, 2, 5]);
/// ```
pub fn parse(text: &[u8], mut each: impl FnMut(u32, u32)) -> Result<(), BadList> {
    let text = text.trim_ascii_end();
    let mut at = 0;
    while at < text.len() {
        let start = at;
        let low = number(text, &mut at)?;
        let mut high = low;
        if text.get(at) == Some(&b'-') {
            at += 1;
            high = number(text, &mut at)?;
        }
        if high < low {
            return Err(BadList { at: start });
        }
        each(low, high);
        match text.get(at) {
            None => break,
            Some(b',') if at + 1 < text.len() => at += 1,
            Some(_) => return Err(BadList { at }),
        }
    }
    Ok(())
}

fn number(text: &[u8], at: &mut usize) -> Result<u32, BadList> {
    let start = *at;
    let mut value: u32 = 0;
    while let Some(digit) = text.get(*at).filter(|b| b.is_ascii_digit()) {
        let grown = value.checked_mul(10).and_then(|v| v.checked_add(u32::from(digit - b'0')));
        value = grown.ok_or(BadList { at: start })?;
        *at += 1;
    }
    if *at == start { Err(BadList { at: start }) } else { Ok(value) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn list(text: &str) -> Result<Vec<(u32, u32)>, BadList> {
        let mut ranges = vec![];
        parse(text.as_bytes(), |low, high| ranges.push((low, high))).map(|()| ranges)
    }

    #[test]
    fn lists_as_the_kernel_writes_them() {
        assert_eq!(list(""), Ok(vec![]));
        assert_eq!(list("\n"), Ok(vec![]));
        assert_eq!(list("0\n"), Ok(vec![(0, 0)]));
        assert_eq!(list("0-3,8,10-11\n"), Ok(vec![(0, 3), (8, 8), (10, 11)]));
        assert_eq!(list("4294967295"), Ok(vec![(u32::MAX, u32::MAX)]));
    }

    #[test]
    fn anything_else_is_refused_at_the_byte_that_is_wrong() {
        for (text, at) in
            [("x", 0), ("1-", 2), ("1,", 1), ("1,,2", 2), ("3-1", 0), ("1-2-3", 3), ("4294967296", 0), ("1 2", 1)]
        {
            assert_eq!(list(text), Err(BadList { at }), "{text:?}");
        }
    }
}
