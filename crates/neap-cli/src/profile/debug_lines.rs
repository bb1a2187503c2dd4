//! Functions, files and lines of addresses, from the debug information of one file.
//!
//! Parsers of debug information need much memory: a large file has millions of entries. So a
//! [child](super::bounded_child) maps and parses one file at a time. If the memory is used up
//! before all addresses are found, a new child goes on with the rest. An address whose own
//! compilation unit is too large stays without a line, and is counted.
//!
//! The mapped file may change while the child reads it. If the file is truncated, the child dies. A
//! trusted process executes the file, so the file's owner already has the rights of the user.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Instant;

use addr2line::Context;
use anyhow::{Context as _, Result};
use clap::Args;
use flate2::read::ZlibDecoder;
use gimli::{AbbreviationsCacheStrategy, Dwarf, EndianSlice, LittleEndian, SectionId};
use object::read::elf::ElfFile64;
use object::{CompressionFormat, Object, ObjectSection};

use super::bounded_child::{BoundedChild, bound_memory_and_time, resident};

/// Inlined functions of a frame that are kept, and bytes of all their texts.
const MOST_FRAMES: usize = 64;
const MOST_TEXT: usize = 64 << 10;
/// Memory that this command keeps for the lines that are found, and the least for a child.
const OWN_MEMORY: usize = 6 << 20;
const LEAST_MEMORY: usize = 4 << 20;

/// A function with its file and line. A text is empty, and a line 0, if unknown.
pub(super) type FoundLine = (String, String, u32);

/// Bounds of a search for lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct LineBounds {
    /// Memory of this command and the child.
    pub(super) memory: usize,
    pub(super) end: Instant,
}

/// For each address of a file that it looks up, calls `found` with the functions there, inlined
/// ones first. Calls `wait` repeatedly, and stops when it returns `false`. Returns the number of
/// addresses that were not looked up.
pub(super) fn find(
    file: &File,
    addresses: &[u64],
    bounds: LineBounds,
    wait: &mut dyn FnMut() -> bool,
    found: &mut dyn FnMut(u64, Vec<FoundLine>),
) -> usize {
    // The executable of unit tests has no hidden command.
    #[cfg(test)]
    if let Ok(lines) = DebugLines::of(file) {
        addresses.iter().for_each(|&address| found(address, lines.at(address)));
        return 0;
    }
    let (mut rest, mut missing) = (addresses, 0);
    while !rest.is_empty() {
        let Some(mut child) = start(file, rest, bounds) else { return missing + rest.len() };
        // The first answer says that the file is parsed.
        let is_parsed = child.answer(wait).is_some();
        let before = rest.len();
        while let Some((&address, later)) = rest.split_first()
            && let Some(lines) = child.answer(wait).and_then(|line| serde_json::from_slice(&line).ok())
        {
            found(address, lines);
            rest = later;
        }
        if !is_parsed || Instant::now() >= bounds.end {
            return missing + rest.len();
        }
        if rest.len() == before {
            missing += 1;
            rest = &rest[1..];
        }
    }
    missing
}

/// Starts a child for addresses of a file. `None` if too little memory or time is left, or the
/// start fails.
fn start(file: &File, addresses: &[u64], bounds: LineBounds) -> Option<BoundedChild> {
    let memory = bounds.memory.checked_sub(resident()? + OWN_MEMORY).filter(|&memory| memory >= LEAST_MEMORY)?;
    let seconds = bounds.end.checked_duration_since(Instant::now())?.as_secs() + 1;
    let arguments = ["lines", "--memory", &memory.to_string(), "--seconds", &seconds.to_string()].map(String::from);
    let request: Vec<u8> = addresses.iter().flat_map(|address| address.to_le_bytes()).collect();
    BoundedChild::start(&arguments, file.try_clone().ok()?, &request, bounds.end).ok()
}

/// Find the lines of addresses: what `neap profile` executes for a file.
#[derive(Args)]
pub(crate) struct LinesOptions {
    /// Bytes of memory besides mapped files
    #[arg(long)]
    memory: u64,
    /// Seconds of processor time
    #[arg(long)]
    seconds: u64,
}

/// Body of the child. Standard input is the file. Standard output is a socket, which first delivers
/// the addresses, 8 bytes each, and then takes the answers.
pub(crate) fn main(options: &LinesOptions) -> Result<ExitCode> {
    bound_memory_and_time(options.memory, options.seconds).context("cannot bound memory and time")?;
    let mut request = Vec::new();
    let mut channel = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    channel.read_to_end(&mut request)?;
    let lines = DebugLines::of(&File::from(io::stdin().as_fd().try_clone_to_owned()?))?;
    writeln!(channel, "parsed")?;
    for address in request.as_chunks::<8>().0 {
        let mut answer = serde_json::to_vec(&lines.at(u64::from_le_bytes(*address)))?;
        answer.push(b'\n');
        channel.write_all(&answer)?;
    }
    Ok(ExitCode::SUCCESS)
}

type Slice = EndianSlice<'static, LittleEndian>;

/// The debug information of a file, for the rest of this process.
pub(super) struct DebugLines(Context<Slice>);

impl DebugLines {
    pub(super) fn of(file: &File) -> Result<DebugLines> {
        let file = ElfFile64::<object::LittleEndian>::parse(mapped(file)?)?;
        let load = |id: SectionId| {
            let bytes = if is_needed(id) { section(&file, id.name()) } else { None };
            Ok::<_, core::convert::Infallible>(Slice::new(bytes.unwrap_or_default(), LittleEndian))
        };
        let mut dwarf = Dwarf::load(load)?;
        dwarf.populate_abbreviations_cache(AbbreviationsCacheStrategy::Duplicates);
        Ok(DebugLines(Context::from_dwarf(dwarf)?))
    }

    /// The functions at an address, the innermost first.
    pub(super) fn at(&self, address: u64) -> Vec<FoundLine> {
        let (mut found, mut bytes) = (Vec::new(), 0);
        let Ok(mut frames) = self.0.find_frames(address).skip_all_loads() else { return found };
        while let Ok(Some(inner)) = frames.next() {
            let name = inner.function.and_then(|function| Some(function.raw_name().ok()?.into_owned()));
            let (source, line) = inner.location.map_or((None, None), |place| (place.file, place.line));
            let line = (name.unwrap_or_default(), source.unwrap_or_default().to_string(), line.unwrap_or(0));
            bytes += line.0.len() + line.1.len();
            if found.len() == MOST_FRAMES || bytes > MOST_TEXT {
                break;
            }
            found.push(line);
        }
        found
    }
}

/// Whether a section is needed to find lines.
fn is_needed(id: SectionId) -> bool {
    use SectionId::{
        DebugAbbrev, DebugAddr, DebugAranges, DebugInfo, DebugLine, DebugLineStr, DebugRanges, DebugRngLists, DebugStr,
        DebugStrOffsets,
    };
    matches!(
        id,
        DebugAbbrev
            | DebugAddr
            | DebugAranges
            | DebugInfo
            | DebugLine
            | DebugLineStr
            | DebugRanges
            | DebugRngLists
            | DebugStr
            | DebugStrOffsets
    )
}

/// Maps a file for the rest of this process.
fn mapped(file: &File) -> io::Result<&'static [u8]> {
    let length = file.metadata()?.len() as usize;
    let (rights, flags) = (libc::PROT_READ, libc::MAP_PRIVATE);
    // SAFETY: the call creates a new mapping at an address that the kernel chooses, so it replaces
    // none.
    let start = unsafe { libc::mmap(core::ptr::null_mut(), length, rights, flags, file.as_raw_fd(), 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping has the length, is readable and is never unmapped. The head of this file
    // explains why a change of the file is acceptable.
    Ok(unsafe { core::slice::from_raw_parts(start.cast::<u8>(), length) })
}

/// A section of a mapped file, decompressed.
fn section(file: &ElfFile64<'static, object::LittleEndian>, name: &str) -> Option<&'static [u8]> {
    let section = file.section_by_name(name)?;
    let packed = section.compressed_data().ok()?;
    match packed.format {
        CompressionFormat::None => Some(packed.data),
        CompressionFormat::Zlib => {
            let mut bytes = Vec::with_capacity(usize::try_from(packed.uncompressed_size).ok()?);
            ZlibDecoder::new(packed.data).take(packed.uncompressed_size).read_to_end(&mut bytes).ok()?;
            Some(bytes.leak())
        }
        _ => None,
    }
}
