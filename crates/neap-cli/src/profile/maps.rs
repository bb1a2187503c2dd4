//! The executable mappings of a process, from its `maps`.

use std::io;

use crate::look::handle::ProcessHandle;

/// Executable mappings that are kept, bytes of the path of one, and of all paths.
const MOST: usize = 8 << 10;
const LONGEST: usize = 4096;
const MOST_PATHS: usize = 1 << 20;

/// An executable mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodeMapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Offset of its first byte in the file.
    pub(crate) offset: u64,
    /// The file system and the inode. An inode of 0 means that there is no file.
    pub(crate) device: String,
    pub(crate) inode: u64,
    /// The kernel's text for the path; not escaped.
    pub(crate) path: Vec<u8>,
}

impl CodeMapping {
    /// Parses a line of `maps`. `None` if the mapping is not executable.
    pub(super) fn parse(line: &[u8]) -> Option<CodeMapping> {
        let mut rest = line;
        let mut word = || {
            rest = rest.trim_ascii_start();
            let (word, after) = rest.split_at(rest.iter().position(|&byte| byte == b' ').unwrap_or(rest.len()));
            rest = after;
            str::from_utf8(word).ok()
        };
        let (range, rights, offset, device, inode) = (word()?, word()?, word()?, word()?, word()?);
        let (start, end) = range.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = (hex(start)?, hex(end)?);
        if rights.as_bytes().get(2) != Some(&b'x') || start >= end {
            return None;
        }
        let path = rest.trim_ascii_start();
        Some(CodeMapping {
            start,
            end,
            offset: hex(offset)?,
            device: device.to_string(),
            inode: inode.parse().ok()?,
            path: path[..path.len().min(LONGEST)].to_vec(),
        })
    }

    /// Reads the mappings of a process. There are none once it has ended.
    pub(crate) fn of(handle: &ProcessHandle) -> io::Result<Vec<CodeMapping>> {
        let mut mappings = Vec::new();
        let mut paths = 0;
        handle.each_line("maps", &mut |line| {
            if let Some(mapping) = CodeMapping::parse(line) {
                paths += mapping.path.len();
                mappings.push(mapping);
            }
            mappings.len() < MOST && paths < MOST_PATHS
        })?;
        Ok(mappings)
    }

    pub(crate) fn contains(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_code_are_parsed_and_others_left_out() {
        let line = b"7f00a000-7f00c000 r-xp 00001000 fe:00 1234                       /usr/lib/a b.so (deleted)";
        let mapping = CodeMapping::parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end, mapping.offset), (0x7f00_a000, 0x7f00_c000, 0x1000));
        assert_eq!((mapping.inode, &mapping.path[..]), (1234, &b"/usr/lib/a b.so (deleted)"[..]));
        assert!(mapping.contains(0x7f00_bfff) && !mapping.contains(0x7f00_c000));
        let anonymous = CodeMapping::parse(b"10-20 rwxp 00000000 00:00 0 ").unwrap();
        assert_eq!((anonymous.inode, anonymous.path.len()), (0, 0));
        for bad in [&b"10-20 rw-p 0 00:00 0"[..], b"20-10 r-xp 0 00:00 0", b"x", b"", b"10-20 r-xp zz 00:00 0"] {
            assert_eq!(CodeMapping::parse(bad), None);
        }
    }

    #[test]
    fn own_code_is_found() {
        let handle = ProcessHandle::open(std::process::id() as i32).unwrap();
        let here = own_code_is_found as *const () as u64;
        assert!(CodeMapping::of(&handle).unwrap().iter().any(|mapping| mapping.contains(here) && mapping.inode != 0));
    }
}
