//! Names of code that a process generates, from the file `/tmp/perf-PID.map` that the process
//! writes. Also unwind information for code that Python generates.
//!
//! Code without unwind information is unwound by its frame pointers, which most code generators set
//! up. The trampolines of `python3 -X perf` set up none. Each is called, moves the stack pointer by
//! 8 bytes, and calls the interpreter, so the return address is 16 bytes below.

use core::ops::Range;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use framehop::ExplicitModuleSectionInfo;

use super::limits::ProfileLimits;
use crate::look::handle::ProcessHandle;

/// Bytes of a name that are kept.
const LONGEST: usize = 400;

/// Ends and names of functions, by start.
pub(crate) type GeneratedNames = BTreeMap<u64, (u64, String)>;

/// The map of a process. The file is open, so that it can be read after the process has ended.
#[derive(Debug)]
pub(crate) struct PerfMap {
    file: File,
    limits: ProfileLimits,
}

impl PerfMap {
    /// Opens the map of a process. `None` if there is no regular file that can be opened.
    pub(crate) fn open(handle: &ProcessHandle, limits: ProfileLimits) -> Option<PerfMap> {
        let status = handle.read("status").unwrap_or_default();
        let own = status.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"NStgid:"));
        // The process names the file by its id in its own PID namespace, the last one in the line.
        let own = own.and_then(|ids| str::from_utf8(ids).ok()?.split_whitespace().last()?.parse::<u32>().ok());
        let path = handle.path(&format!("root/tmp/perf-{}.map", own.unwrap_or(handle.pid as u32)));
        let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
        file.metadata().is_ok_and(|about| about.is_file()).then_some(PerfMap { file, limits })
    }

    #[cfg(test)]
    pub(super) fn of(file: File, limits: ProfileLimits) -> PerfMap {
        PerfMap { file, limits }
    }

    /// Returns the current length of the file in bytes. `None` if the system reports an error.
    pub(crate) fn length(&self) -> Option<u64> {
        self.file.metadata().ok().map(|about| about.len())
    }

    /// Reads the names that are there now.
    pub(crate) fn names(&self) -> GeneratedNames {
        let (mut file, mut text) = (&self.file, Vec::new());
        let read = file.seek(SeekFrom::Start(0)).and_then(|_| file.take(self.limits.map_bytes).read_to_end(&mut text));
        if read.is_ok() { parse(&text, self.limits.map_entries) } else { GeneratedNames::new() }
    }
}

/// Parses a start, a length and a name in each line, of `most` lines.
pub(super) fn parse(text: &[u8], most: usize) -> GeneratedNames {
    let mut names = GeneratedNames::new();
    for line in text.split(|&byte| byte == b'\n') {
        if names.len() >= most {
            break;
        }
        let line = String::from_utf8_lossy(&line[..line.len().min(LONGEST)]);
        let mut words = line.splitn(3, ' ');
        let (Some(start), Some(length), Some(name)) = (words.next(), words.next(), words.next()) else { continue };
        let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
        if let (Some(start), Some(length)) = (hex(start), hex(length)) {
            names.insert(start, (start.saturating_add(length), name.trim().to_string()));
        }
    }
    names
}

/// Whether a range of memory has trampolines of Python.
pub(crate) fn has_trampolines(names: &GeneratedNames, range: &Range<u64>) -> bool {
    names.range(range.clone()).any(|(_, (_, name))| name.starts_with("py::"))
}

/// Unwind information for trampolines of Python in a range.
pub(crate) fn trampoline_sections(range: &Range<u64>) -> ExplicitModuleSectionInfo<Arc<[u8]>> {
    // The common part: version 1, no augmentation, factors 1 and -8, return address in register
    // number 16. The caller's stack pointer is the stack pointer (register 7) plus 16. The return
    // address is stored 8 bytes below that.
    let common = [1, 0, 1, 0x78, 16, 0x0c, 7, 16, 0x90, 1, 0, 0];
    let mut table: Vec<u8> = Vec::new();
    table.extend((4 + common.len() as u32).to_le_bytes());
    table.extend(0_u32.to_le_bytes());
    table.extend(common);
    table.extend(20_u32.to_le_bytes());
    // Distance to the common part.
    table.extend((table.len() as u32).to_le_bytes());
    table.extend(range.start.to_le_bytes());
    table.extend((range.end - range.start).to_le_bytes());
    // The end of all.
    table.extend(0_u32.to_le_bytes());
    ExplicitModuleSectionInfo {
        base_svma: range.start,
        eh_frame_svma: Some(0..table.len() as u64),
        eh_frame: Some(Arc::from(table)),
        ..ExplicitModuleSectionInfo::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_maps_are_parsed_and_damaged_lines_left_out() {
        let map = parse(b"7f0000 40 py::main:/a b.py\nzz 1 x\n7f0040\n7f0080 ffffffffffffffff \xff\n", 100);
        assert_eq!(map.len(), 2);
        assert_eq!(map[&0x7f_0000], (0x7f_0040, "py::main:/a b.py".to_string()));
        assert_eq!(map[&0x7f_0080].0, u64::MAX);
        assert!(has_trampolines(&map, &(0x7e_0000..0x7f_0001)) && !has_trampolines(&map, &(0x7f_0001..u64::MAX)));
    }
}
