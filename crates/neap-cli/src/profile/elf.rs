//! Parts of an ELF file that another process has mapped: segments, build id and sections.
//!
//! The file is untrusted and may change while it is read, so it is never mapped. Sections are read
//! one by one. All files of a command share a budget of bytes; a section that it does not allow is
//! as good as absent.

use core::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use flate2::read::ZlibDecoder;
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

    /// Takes bytes, if there are so many.
    pub(crate) fn take(&self, bytes: u64) -> Option<usize> {
        let bytes = usize::try_from(bytes).ok()?;
        self.0.set(self.0.get().checked_sub(bytes)?);
        Some(bytes)
    }

    /// Puts bytes back whose contents are forgotten.
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
        // The table of names is read within a length: a name ends where its file's writer likes.
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
        image.build_id = image.section(".note.gnu.build-id").and_then(|note| build_id(&note)).unwrap_or_default();
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

    /// Reads a section that is not compressed, for several users. It takes its bytes once.
    pub(crate) fn shared_section(&self, name: &str) -> Option<Arc<[u8]>> {
        let section = self.find(name).filter(|section| section.kind != elf::SHT_NOBITS && !section.is_compressed)?;
        let mut bytes: Arc<[u8]> = core::iter::repeat_n(0, self.budget.take(section.bytes)?).collect();
        self.file.read_exact_at(Arc::get_mut(&mut bytes)?, section.offset).ok()?;
        Some(bytes)
    }

    /// Reads a section, decompressed.
    pub(crate) fn section(&self, name: &str) -> Option<Vec<u8>> {
        let section = self.find(name).filter(|section| section.kind != elf::SHT_NOBITS)?;
        let mut bytes = vec![0; self.budget.take(section.bytes)?];
        self.file.read_exact_at(&mut bytes, section.offset).ok()?;
        if !section.is_compressed {
            return Some(bytes);
        }
        let (head, packed) = object::pod::from_bytes::<elf::CompressionHeader64<LittleEndian>>(&bytes).ok()?;
        if head.ch_type.get(LittleEndian) != elf::ELFCOMPRESS_ZLIB {
            return None;
        }
        let length = head.ch_size.get(LittleEndian);
        let mut unpacked = Vec::with_capacity(self.budget.take(length)?);
        ZlibDecoder::new(packed).take(length).read_to_end(&mut unpacked).ok()?;
        Some(unpacked)
    }
}

/// The build id in a note section.
fn build_id(note: &[u8]) -> Option<Vec<u8>> {
    let (head, rest) = object::pod::from_bytes::<[U32<LittleEndian>; 3]>(note).ok()?;
    let [name, bytes, kind] = head.map(|word| word.get(LittleEndian) as usize);
    let rest = rest.get(name.checked_next_multiple_of(4)?..)?;
    (kind == elf::NT_GNU_BUILD_ID as usize && bytes <= 64).then(|| rest.get(..bytes).map(<[u8]>::to_vec))?
}

/// A function of a symbol table.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    address: u64,
    bytes: u64,
    /// Offset of the name in the strings.
    name: u32,
}

/// Bytes of a name that are kept.
const LONGEST_SYMBOL: usize = 8 << 10;
/// Bytes behind a symbol without a length that count as its own.
const UNSIZED: u64 = 4096;

/// The functions of an ELF file, by address.
#[derive(Debug, Default)]
pub(crate) struct SymbolTable {
    /// Sorted by address.
    symbols: Vec<Symbol>,
    strings: Vec<u8>,
}

impl SymbolTable {
    /// Reads the table of symbols, or the one for the dynamic linker, which stripped files have.
    pub(crate) fn read(image: &ElfImage) -> SymbolTable {
        let table = [(".symtab", ".strtab"), (".dynsym", ".dynstr")].into_iter().find_map(|(symbols, strings)| {
            let table = SymbolTable::parse(&image.section(symbols)?, image.section(strings)?);
            (!table.symbols.is_empty()).then_some(table)
        });
        table.unwrap_or_default()
    }

    fn parse(bytes: &[u8], strings: Vec<u8>) -> SymbolTable {
        let mut symbols = Vec::new();
        for bytes in bytes.chunks_exact(size_of::<elf::Sym64<LittleEndian>>()) {
            let Ok((symbol, _)) = object::pod::from_bytes::<elf::Sym64<LittleEndian>>(bytes) else { continue };
            let is_code = matches!(symbol.st_info & 0xf, elf::STT_FUNC | elf::STT_GNU_IFUNC | elf::STT_NOTYPE);
            let address = symbol.st_value.get(LittleEndian);
            if is_code && address != 0 && symbol.st_shndx.get(LittleEndian) != elf::SHN_UNDEF {
                let (bytes, name) = (symbol.st_size.get(LittleEndian), symbol.st_name.get(LittleEndian));
                symbols.push(Symbol { address, bytes, name });
            }
        }
        // Of symbols at one address, the last one that has a length counts.
        symbols.sort_by_key(|symbol| (symbol.address, symbol.bytes > 0));
        SymbolTable { symbols, strings }
    }

    /// The name of the function at an address of the file, as the linker knows it.
    pub(crate) fn name(&self, address: u64) -> Option<&[u8]> {
        let after = self.symbols.partition_point(|symbol| symbol.address <= address);
        let symbol = self.symbols.get(after.checked_sub(1)?)?;
        let bytes = if symbol.bytes > 0 { symbol.bytes } else { UNSIZED };
        if address - symbol.address >= bytes {
            return None;
        }
        let name = self.strings.get(symbol.name as usize..)?;
        let name = &name[..name.len().min(LONGEST_SYMBOL)];
        let name = &name[..name.iter().position(|&byte| byte == 0).unwrap_or(name.len())];
        (!name.is_empty()).then_some(name)
    }
}

/// Opens the file with the debug information of a build, as distributions install it.
pub(crate) fn debug_file(build_id: &[u8], budget: &Budget) -> Result<ElfImage> {
    let (first, rest) = build_id.split_first().context("no build id")?;
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let path = format!("/usr/lib/debug/.build-id/{first:02x}/{}.debug", hex(rest));
    ElfImage::open(Path::new(&path), budget)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::limits::ProfileLimits;

    const BUDGET: usize = ProfileLimits::OWN.file_bytes;

    #[test]
    fn own_executable_has_segments_symbols_and_debug_information() {
        let image = ElfImage::open(Path::new("/proc/self/exe"), &Budget::new(BUDGET)).unwrap();
        assert!(image.has(".eh_frame") && image.has(".debug_line") && !image.has(".nothing"));
        let symbols = SymbolTable::read(&image);
        assert!(symbols.symbols.len() > 1000);
        let text = image.range(".text").unwrap();
        let places = text.clone().step_by((text.end - text.start) as usize / 100);
        assert!(places.filter(|&at| symbols.name(at).is_some()).count() > 80, "between functions there are gaps");
        assert!(symbols.name(1).is_none() && symbols.name(u64::MAX).is_none());
        let offset = image.segments[0].offset & !0xfff;
        assert_eq!(image.bias(0x7000_0000, offset).map(|bias| bias & 0xfff), Some(0));
        assert_eq!(image.bias(0x7000_0000, u64::MAX), None);
    }

    #[test]
    fn budget_bounds_the_bytes_that_are_read() {
        let image = ElfImage::open(Path::new("/proc/self/exe"), &Budget::new(64 << 10)).unwrap();
        assert!(image.has(".eh_frame") && image.section(".eh_frame").is_none());
    }

    #[test]
    fn files_of_other_kinds_are_refused() {
        for path in ["/dev/null", "/proc/self/status", "/", "/etc/passwd"] {
            assert!(ElfImage::open(Path::new(path), &Budget::new(BUDGET)).is_err(), "{path}");
        }
        assert_eq!(build_id(&[4, 0, 0, 0, 200, 0, 0, 0, 3, 0, 0, 0, b'G', b'N', b'U', 0]), None);
    }
}
