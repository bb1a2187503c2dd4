//! Parts of an ELF file that another process has mapped: segments, build id and sections.
//!
//! The file is untrusted and may change while it is read, so it is never mapped. Sections are read
//! one by one. All files of a command share a budget of bytes. A section beyond the budget counts
//! as absent. Symbol tables are read in parts, and a child of the command reads debug information,
//! so neither uses the budget.

use core::cell::Cell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use object::elf::{self, FileHeader64};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};
use object::{LittleEndian, SectionIndex, U32};

use super::processor::MACHINE;

/// Longest file, most sections and segments of one, and bytes that each counts for.
const LONGEST: u64 = 16 << 30;
const MOST_PARTS: usize = 4096;
const PART: usize = 128;
/// Longest table of the names of sections, and longest name.
const MOST_NAMES: u64 = 256 << 10;
const LONGEST_NAME: usize = 64;

/// The bytes that may still be read.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Rc<Cell<usize>>);

impl Budget {
    pub(crate) fn new(bytes: usize) -> Budget {
        Budget(Rc::new(Cell::new(bytes)))
    }

    /// Takes bytes from the budget. `None` if it has fewer.
    pub(crate) fn take(&self, bytes: u64) -> Option<usize> {
        let bytes = usize::try_from(bytes).ok()?;
        self.0.set(self.0.get().checked_sub(bytes)?);
        Some(bytes)
    }

    /// Returns bytes to the budget, after their contents were dropped.
    pub(crate) fn put(&self, bytes: usize) {
        self.0.set(self.0.get().saturating_add(bytes));
    }
}

/// A part of a file that is loaded as code.
#[derive(Clone, Copy, Debug)]
struct Segment {
    offset: u64,
    address: u64,
    bytes: u64,
}

#[derive(Clone, Debug)]
struct Section {
    name: Vec<u8>,
    offset: u64,
    address: u64,
    bytes: u64,
    kind: u32,
    is_compressed: bool,
}

/// An ELF file.
#[derive(Debug)]
pub(crate) struct ElfImage {
    file: File,
    budget: Budget,
    segments: Vec<Segment>,
    sections: Vec<Section>,
    pub(crate) build_id: Vec<u8>,
}

impl ElfImage {
    /// Opens an ELF file for this machine.
    pub(crate) fn open(path: &Path, budget: &Budget) -> Result<ElfImage> {
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let about = file.metadata()?;
        ensure!(about.is_file() && about.len() <= LONGEST, "not a regular file");
        let cache = ReadCache::new(&file);
        let head = FileHeader64::<LittleEndian>::parse(&cache)?;
        let endian = head.endian()?;
        ensure!(head.e_machine(endian) == MACHINE, "not of this machine");
        let (segments, sections) = (head.phnum(endian, &cache)?, head.shnum(endian, &cache)?);
        ensure!(segments.max(sections) <= MOST_PARTS, "too many parts");
        budget.take(((segments + sections) * PART) as u64).context("too many parts of all files")?;
        let is_code = |kind: u32, flags: u32| kind == elf::PT_LOAD && flags & elf::PF_X != 0;
        let loaded = head.program_headers(endian, &cache)?.iter();
        let loaded =
            loaded.filter(|segment| is_code(segment.p_type(endian), segment.p_flags(endian))).map(|segment| Segment {
                offset: segment.p_offset(endian),
                address: segment.p_vaddr(endian),
                bytes: segment.p_filesz(endian),
            });
        let segments = loaded.collect();
        let table = head.sections(endian, &cache)?;
        // A bounded part of the table of names is read, since the file decides where a name ends.
        let names = head.shstrndx(endian, &cache).ok().and_then(|at| table.section(SectionIndex(at as usize)).ok());
        let names = names.filter(|names| names.sh_type(endian) != elf::SHT_NOBITS);
        let mut bytes = vec![0; names.map_or(0, |names| names.sh_size(endian).min(MOST_NAMES)) as usize];
        if names.is_some_and(|names| file.read_exact_at(&mut bytes, names.sh_offset(endian)).is_err()) {
            bytes.clear();
        }
        let name = |at: u32| {
            let rest = bytes.get(at as usize..).unwrap_or_default();
            let end = rest.iter().take(LONGEST_NAME).position(|&byte| byte == 0);
            end.map(|end| rest[..end].to_vec()).unwrap_or_default()
        };
        let sections = table.iter().map(|section| Section {
            name: name(section.sh_name(endian)),
            offset: section.sh_offset(endian),
            address: section.sh_addr(endian),
            bytes: section.sh_size(endian),
            kind: section.sh_type(endian),
            is_compressed: section.sh_flags(endian) & u64::from(elf::SHF_COMPRESSED) != 0,
        });
        let sections = sections.collect();
        let mut image =
            ElfImage { file: file.try_clone()?, budget: budget.clone(), segments, sections, build_id: vec![] };
        image.build_id =
            image.shared_section(".note.gnu.build-id").and_then(|note| build_id(&note)).unwrap_or_default();
        Ok(image)
    }

    /// Time of the last change of the file or of its place, in seconds since 1970.
    pub(crate) fn changed_at(&self) -> Option<i64> {
        Some(self.file.metadata().ok()?.ctime())
    }

    /// Difference between addresses in a process and in this file, for a mapping of code.
    pub(crate) fn bias(&self, start: u64, offset: u64) -> Option<u64> {
        let segment = self.segments.iter().find(|segment| {
            // The kernel maps whole pages.
            let first = segment.offset & !0xfff;
            (first..segment.offset.saturating_add(segment.bytes)).contains(&offset)
        })?;
        Some(start.wrapping_sub(segment.address.wrapping_sub(segment.offset).wrapping_add(offset)))
    }

    /// Address and length of a section in this file's addresses.
    pub(crate) fn range(&self, name: &str) -> Option<core::ops::Range<u64>> {
        let section = self.find(name)?;
        Some(section.address..section.address.checked_add(section.bytes)?)
    }

    fn find(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name.as_bytes())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.find(name).is_some_and(|section| section.kind != elf::SHT_NOBITS)
    }

    /// Reads a section that is not compressed, for several users. The budget pays for it once.
    pub(crate) fn shared_section(&self, name: &str) -> Option<Arc<[u8]>> {
        let section = self.find(name).filter(|section| section.kind != elf::SHT_NOBITS && !section.is_compressed)?;
        let mut bytes: Arc<[u8]> = core::iter::repeat_n(0, self.budget.take(section.bytes)?).collect();
        self.file.read_exact_at(Arc::get_mut(&mut bytes)?, section.offset).ok()?;
        Some(bytes)
    }

    /// The place of a section that is not compressed, and its file.
    pub(crate) fn place(&self, name: &str) -> Option<FilePart<'_>> {
        let section = self.find(name).filter(|section| section.kind != elf::SHT_NOBITS && !section.is_compressed)?;
        Some(FilePart { file: &self.file, offset: section.offset, bytes: section.bytes })
    }

    /// Opens the file with the debug information. It is this file, or the separate one of the same
    /// build that distributions install.
    pub(crate) fn debug_file(&self) -> Option<File> {
        let other =
            if self.has(".debug_info") { None } else { Some(installed_debug_file(&self.build_id, &self.budget)?) };
        other.as_ref().unwrap_or(self).file.try_clone().ok()
    }
}

/// A section in its file. The file may be shorter, and change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilePart<'a> {
    file: &'a File,
    offset: u64,
    pub(crate) bytes: u64,
}

impl FilePart<'_> {
    /// Reads bytes of the section from a place in it on. Returns their number.
    pub(crate) fn read(&self, bytes: &mut [u8], at: u64) -> usize {
        let length = self.bytes.saturating_sub(at).min(bytes.len() as u64) as usize;
        let Some(from) = self.offset.checked_add(at) else { return 0 };
        let mut read = 0;
        while read < length {
            match self.file.read_at(&mut bytes[read..length], from.saturating_add(read as u64)) {
                Ok(0) | Err(_) => break,
                Ok(more) => read += more,
            }
        }
        read
    }
}

/// The build id in a note section.
fn build_id(note: &[u8]) -> Option<Vec<u8>> {
    let (head, rest) = object::pod::from_bytes::<[U32<LittleEndian>; 3]>(note).ok()?;
    let [name, bytes, kind] = head.map(|word| word.get(LittleEndian) as usize);
    let rest = rest.get(name.checked_next_multiple_of(4)?..)?;
    (kind == elf::NT_GNU_BUILD_ID as usize && bytes <= 64).then(|| rest.get(..bytes).map(<[u8]>::to_vec))?
}

/// Opens the file with the debug information of a build.
fn installed_debug_file(build_id: &[u8], budget: &Budget) -> Option<ElfImage> {
    let (first, rest) = build_id.split_first()?;
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let path = format!("/usr/lib/debug/.build-id/{first:02x}/{}.debug", hex(rest));
    ElfImage::open(Path::new(&path), budget).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::limits::ProfileLimits;

    const BUDGET: usize = ProfileLimits::OWN.file_bytes;

    #[test]
    fn own_executable_has_segments_and_debug_information() {
        let image = ElfImage::open(Path::new("/proc/self/exe"), &Budget::new(BUDGET)).unwrap();
        assert!(image.has(".eh_frame") && image.has(".debug_line") && !image.has(".nothing"));
        let offset = image.segments[0].offset & !0xfff;
        assert_eq!(image.bias(0x7000_0000, offset).map(|bias| bias & 0xfff), Some(0));
        assert_eq!(image.bias(0x7000_0000, u64::MAX), None);
    }

    #[test]
    fn budget_bounds_the_bytes_that_are_read() {
        let image = ElfImage::open(Path::new("/proc/self/exe"), &Budget::new(64 << 10)).unwrap();
        assert!(image.has(".eh_frame") && image.shared_section(".eh_frame").is_none());
    }

    #[test]
    fn files_of_other_kinds_are_refused() {
        for path in ["/dev/null", "/proc/self/status", "/", "/etc/passwd"] {
            assert!(ElfImage::open(Path::new(path), &Budget::new(BUDGET)).is_err(), "{path}");
        }
        assert_eq!(build_id(&[4, 0, 0, 0, 200, 0, 0, 0, 3, 0, 0, 0, b'G', b'N', b'U', 0]), None);
    }
}
