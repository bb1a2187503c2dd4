//! A path in a buffer of fixed size.

use core::ffi::CStr;

use crate::files::Errno;

/// The longest path that the kernel takes.
pub(crate) const LONGEST: usize = 4095;

/// A path that ends with a NUL.
pub(crate) struct PathText {
    bytes: [u8; LONGEST + 1],
    length: usize,
}

impl PathText {
    pub(crate) const fn new() -> PathText {
        PathText { bytes: [0; LONGEST + 1], length: 0 }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    /// Returns the path for a system call. Returns [`Errno::INVAL`] if a NUL is inside.
    pub(crate) fn as_c_str(&self) -> Result<&CStr, Errno> {
        let bytes = self.bytes.get(..=self.length).unwrap_or_default();
        CStr::from_bytes_with_nul(bytes).map_err(|_| Errno::INVAL)
    }

    /// Replaces the path by `parts`, one after the other. Leaves the path empty if they do not fit.
    pub(crate) fn set(&mut self, parts: &[&[u8]]) -> Result<(), Errno> {
        self.length = 0;
        let mut end = 0;
        for part in parts {
            let Some(place) = self.bytes.get_mut(end..end + part.len()).filter(|_| end + part.len() <= LONGEST) else {
                self.bytes[0] = 0;
                return Err(Errno::NAMETOOLONG);
            };
            place.copy_from_slice(part);
            end += part.len();
        }
        if let Some(terminator) = self.bytes.get_mut(end) {
            *terminator = 0;
        }
        self.length = end;
        Ok(())
    }
}

/// Returns `point` without the slash of a lone `/`, so that a path can follow it.
pub(crate) fn as_prefix(point: &[u8]) -> &[u8] {
    if point == b"/" { b"" } else { point }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_does_not_fit_is_refused_whole() {
        let mut path = PathText::new();
        path.set(&[b"/a", b"/b"]).unwrap();
        assert_eq!(path.as_c_str(), Ok(c"/a/b"));
        assert_eq!(path.set(&[&[b'x'; LONGEST], b"y"]), Err(Errno::NAMETOOLONG));
        assert_eq!(path.as_bytes(), b"");
        path.set(&[&[b'x'; LONGEST]]).unwrap();
        assert_eq!(path.as_c_str().unwrap().to_bytes().len(), LONGEST);
        path.set(&[b"/a\0b"]).unwrap();
        assert_eq!(path.as_c_str(), Err(Errno::INVAL));
    }
}
