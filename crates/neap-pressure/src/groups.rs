//! Reads the numbers of a group and its ancestors.

use crate::files::{Errno, Files};
use crate::level::{LimitedBy, MemoryLevel, Swap};
use crate::path::PathText;
use crate::records::{Records, read_small};
use crate::text::{UNLIMITED, key_value, limit, number};

/// Version of cgroups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// Version 1: a hierarchy for each controller.
    V1,
    /// Version 2: one hierarchy.
    V2,
}

/// Buffers and files of a reader.
pub(crate) struct Reader<'a, F: Files> {
    pub(crate) files: &'a F,
    pub(crate) scratch: &'a mut PathText,
    pub(crate) buffer: &'a mut [u8],
    /// The error of the first file that exists and could not be read.
    pub(crate) refused: Option<Errno>,
    /// Whether the content of a file could not be parsed.
    pub(crate) malformed: bool,
}

/// A group as read: its level, and facts that only the walk uses.
pub(crate) struct GroupReading {
    pub(crate) level: MemoryLevel,
    /// The group has files of the memory controller.
    pub(crate) has_memory: bool,
    /// Version 1: smallest limit of the group and all its ancestors.
    pub(crate) hierarchical: Option<u64>,
}

impl<F: Files> Reader<'_, F> {
    /// Reads a file of `directory`. `None` if it does not exist or cannot be read.
    fn small(&mut self, directory: &[u8], name: &[u8]) -> Option<&[u8]> {
        let path = self.scratch.set(&[directory, b"/", name]).and_then(|()| self.scratch.as_c_str());
        match path.and_then(|path| read_small(self.files, path, &mut *self.buffer)) {
            Ok(text) => Some(text),
            Err(error) => {
                if !error.is_absent() {
                    self.refused = self.refused.or(Some(error));
                }
                None
            }
        }
    }

    fn parsed<T>(&mut self, directory: &[u8], name: &[u8], parse: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
        let parsed = parse(self.small(directory, name)?);
        self.malformed |= parsed.is_none();
        parsed
    }

    /// Reads a number, such as a usage.
    pub(crate) fn number(&mut self, directory: &[u8], name: &[u8]) -> Option<u64> {
        self.parsed(directory, name, number)
    }

    /// Reads a limit. The outer `None` means that the file cannot be read or parsed.
    fn limit(&mut self, directory: &[u8], name: &[u8]) -> Option<Option<u64>> {
        self.parsed(directory, name, limit)
    }

    /// Calls `each` for each line with a key and a value. Returns whether the file could be opened.
    pub(crate) fn values(&mut self, parts: &[&[u8]], mut each: impl FnMut(&[u8], &[u8])) -> bool {
        let path = self.scratch.set(parts).and_then(|()| self.scratch.as_c_str());
        match path.and_then(|path| Records::open(self.files, path, b'\n', &mut *self.buffer)) {
            Ok(mut lines) => {
                while let Some(line) = lines.next() {
                    if let Some((key, value)) = key_value(line) {
                        each(key, value);
                    }
                }
                true
            }
            Err(error) => {
                if !error.is_absent() {
                    self.refused = self.refused.or(Some(error));
                }
                false
            }
        }
    }

    /// Reads the group of a directory.
    pub(crate) fn group(&mut self, version: Version, directory: &[u8]) -> GroupReading {
        match version {
            Version::V1 => self.version_1(directory),
            Version::V2 => self.version_2(directory),
        }
    }

    fn version_2(&mut self, directory: &[u8]) -> GroupReading {
        let limit = self.limit(directory, b"memory.max");
        let usage = self.number(directory, b"memory.current");
        let mut level = MemoryLevel::new(LimitedBy::Group);
        level.path_length = directory.len();
        level.limit = limit.flatten();
        level.usage = usage;
        let has_memory = limit.is_some() || usage.is_some();
        if has_memory {
            level.high = self.limit(directory, b"memory.high").flatten();
            let mut found = Reclaimable::default();
            self.values(&[directory, b"/memory.stat"], |key, value| found.add_version_2(key, value));
            level.reclaimable = found.bytes().min(usage.unwrap_or(0));
            if let Some(Some(limit)) = self.limit(directory, b"memory.swap.max") {
                let usage = self.number(directory, b"memory.swap.current").unwrap_or(0);
                level.swap = Swap::Standalone { limit, usage };
            }
        }
        GroupReading { level, has_memory, hierarchical: None }
    }

    fn version_1(&mut self, directory: &[u8]) -> GroupReading {
        let limit = self.limit(directory, b"memory.limit_in_bytes");
        let usage = self.number(directory, b"memory.usage_in_bytes");
        let mut level = MemoryLevel::new(LimitedBy::Group);
        level.path_length = directory.len();
        level.limit = limit.flatten();
        level.usage = usage;
        let has_memory = limit.is_some() || usage.is_some();
        let mut hierarchical = None;
        if has_memory {
            let (mut own, mut total) = (Reclaimable::default(), Reclaimable::default());
            let mut has_total = false;
            self.values(&[directory, b"/memory.stat"], |key, value| match key.strip_prefix(b"total_") {
                Some(key) => {
                    has_total = true;
                    total.add_version_1(key, value);
                }
                None if key == b"hierarchical_memory_limit" => hierarchical = number(value),
                None => own.add_version_1(key, value),
            });
            // If the file has no sums over the groups below, the group's own numbers are used.
            let found = if has_total { total } else { own };
            level.reclaimable = found.bytes().min(usage.unwrap_or(0));
            if let Some(Some(limit)) = self.limit(directory, b"memory.memsw.limit_in_bytes")
                && let Some(usage) = self.number(directory, b"memory.memsw.usage_in_bytes")
            {
                level.swap = Swap::Together { limit, usage };
            }
        }
        GroupReading { level, has_memory, hierarchical: hierarchical.filter(|limit| *limit < UNLIMITED) }
    }

    /// Returns whether a version 1 group counts the memory of the groups below it. If
    /// `memory.use_hierarchy` does not exist, groups always do.
    pub(crate) fn counts_children(&mut self, directory: &[u8]) -> bool {
        self.small(directory, b"memory.use_hierarchy").and_then(number) != Some(0)
    }

    /// Returns whether the file `name` exists in `directory`, even if it may not be opened.
    pub(crate) fn is_there(&mut self, directory: &[u8], name: &[u8]) -> bool {
        let path = self.scratch.set(&[directory, b"/", name]).and_then(|()| self.scratch.as_c_str());
        let opened = path.and_then(|path| self.files.open(path, crate::files::Access::Read));
        opened.err().is_none_or(|error| !error.is_absent())
    }
}

/// Parts of a usage that reclaim takes without swapping.
#[derive(Clone, Copy, Default)]
struct Reclaimable {
    file: u64,
    slab: u64,
    /// Pages of files that have to be written first.
    unwritten: u64,
}

impl Reclaimable {
    fn bytes(self) -> u64 {
        self.file.saturating_sub(self.unwritten).saturating_add(self.slab)
    }

    fn add_version_2(&mut self, key: &[u8], value: &[u8]) {
        let sum = match key {
            b"inactive_file" | b"active_file" => &mut self.file,
            b"slab_reclaimable" => &mut self.slab,
            b"file_dirty" | b"file_writeback" => &mut self.unwritten,
            _ => return,
        };
        *sum = sum.saturating_add(number(value).unwrap_or(0));
    }

    fn add_version_1(&mut self, key: &[u8], value: &[u8]) {
        let sum = match key {
            b"inactive_file" | b"active_file" => &mut self.file,
            b"dirty" | b"writeback" => &mut self.unwritten,
            _ => return,
        };
        *sum = sum.saturating_add(number(value).unwrap_or(0));
    }
}
