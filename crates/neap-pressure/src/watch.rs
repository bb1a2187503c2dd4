//! systemd's protocol: the variables `MEMORY_PRESSURE_WATCH` and `MEMORY_PRESSURE_WRITE`.

/// Meaning of `MEMORY_PRESSURE_WATCH`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch<'a> {
    /// The service manager asks not to watch: the variable is empty or `/dev/null`.
    Off,
    /// The value is not an absolute path, or has an empty name, `.` or `..` in it.
    Malformed,
    /// The file to watch.
    Path(&'a [u8]),
}

impl<'a> Watch<'a> {
    /// Reads the value of the variable.
    #[must_use]
    pub fn parse(value: &'a [u8]) -> Watch<'a> {
        if value.is_empty() || value == b"/dev/null" {
            return Watch::Off;
        }
        let Some(names) = value.strip_prefix(b"/") else {
            return Watch::Malformed;
        };
        let mut names = names.split(|byte| *byte == b'/');
        if names.any(|name| name.is_empty() || name == b"." || name == b"..") {
            return Watch::Malformed;
        }
        Watch::Path(value)
    }
}

/// Decodes Base64 into `buffer`. Returns the bytes. `None` if `text` is not Base64 or does not fit.
pub fn decode<'a>(text: &[u8], buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let mut end = 0;
    let groups = text.len() / 4;
    for (at, group) in text.chunks(4).enumerate() {
        let padding = group.iter().rev().take_while(|byte| **byte == b'=').count();
        if padding > 2 || (padding > 0 && at + 1 < groups) {
            return None;
        }
        let digits = group.get(..4 - padding)?;
        let bits = digits.iter().try_fold(0_u32, |bits, byte| Some(bits << 6 | sextet(*byte)?))?;
        let bytes = (bits << (6 * padding)).to_be_bytes();
        let plain = bytes.get(1..4 - padding)?;
        buffer.get_mut(end..end + plain.len())?.copy_from_slice(plain);
        end += plain.len();
    }
    buffer.get(..end)
}

fn sextet(byte: u8) -> Option<u32> {
    let value = match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(u32::from(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_read_as_systemd_does() {
        assert_eq!(Watch::parse(b""), Watch::Off);
        assert_eq!(Watch::parse(b"/dev/null"), Watch::Off);
        assert_eq!(Watch::parse(b"/sys/x/memory.pressure"), Watch::Path(b"/sys/x/memory.pressure"));
        for bad in ["memory.pressure", "/", "/a/", "/a//b", "/a/../b", "/./a"] {
            assert_eq!(Watch::parse(bad.as_bytes()), Watch::Malformed, "{bad}");
        }
    }

    #[test]
    fn base64_is_decoded_or_refused() {
        let decoded = |text: &str| {
            let mut buffer = [0; 24];
            decode(text.as_bytes(), &mut buffer).map(|bytes| bytes.to_vec())
        };
        extern crate std;
        assert_eq!(decoded("c29tZSAyMDAwMDAgMjAwMDAwMAA=").as_deref(), Some(&b"some 200000 2000000\0"[..]));
        assert_eq!(decoded("").as_deref(), Some(&b""[..]));
        assert_eq!(decoded("QQ==").as_deref(), Some(&b"A"[..]));
        assert_eq!(decoded("QUI=").as_deref(), Some(&b"AB"[..]));
        for bad in ["Q", "QQ=", "====", "Q===", "QQ==QQ==", "Q Q=", "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFB"] {
            assert_eq!(decoded(bad), None, "{bad}");
        }
    }
}
