//! Sources of a process's code: the running process, or mappings that it has written to a file.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::elf::{Budget, ElfImage};
use super::limits::ProfileLimits;
use super::maps::CodeMapping;
use super::perf_map::PerfMap;
use crate::look::handle::ProcessHandle;

/// A source of mappings and of their files.
#[derive(Debug)]
pub(crate) enum CodeSource {
    /// The process.
    Process(Arc<ProcessHandle>),
    /// Mappings of a process that may have ended. A file counts if it has not changed since the
    /// time `at`, in seconds since 1970.
    Written { mappings: Vec<CodeMapping>, at: i64 },
}

impl CodeSource {
    /// Reads the mappings. There are none once a process has ended.
    pub(crate) fn mappings(&self) -> io::Result<Vec<CodeMapping>> {
        match self {
            CodeSource::Process(handle) => CodeMapping::of(handle),
            CodeSource::Written { mappings, .. } => Ok(mappings.clone()),
        }
    }

    /// Opens the file of a mapping. For a running process, opens it through `map_files` or the
    /// process's root folder.
    pub(crate) fn open(&self, mapping: &CodeMapping, budget: &Budget) -> Option<ElfImage> {
        let is_whole = mapping.path.starts_with(b"/") && !mapping.path.ends_with(b" (deleted)");
        match self {
            CodeSource::Process(handle) => {
                let mut places = vec![handle.path(&format!("map_files/{:x}-{:x}", mapping.start, mapping.end))];
                if is_whole {
                    let below = Path::new(std::ffi::OsStr::from_bytes(&mapping.path[1..]));
                    places.push(handle.path("root").join(below));
                }
                places.iter().find_map(|path: &PathBuf| ElfImage::open(path, budget).ok())
            }
            CodeSource::Written { at, .. } => {
                let path = Path::new(std::ffi::OsStr::from_bytes(&mapping.path));
                let image = if is_whole { ElfImage::open(path, budget).ok()? } else { return None };
                image.changed_at().is_some_and(|changed| changed <= *at).then_some(image)
            }
        }
    }

    /// Opens the names of generated code. `None` for written mappings, which have no names.
    pub(crate) fn perf_map(&self, limits: ProfileLimits) -> Option<PerfMap> {
        match self {
            CodeSource::Process(handle) => PerfMap::open(handle, limits),
            CodeSource::Written { .. } => None,
        }
    }
}
