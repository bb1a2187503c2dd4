//! Finds the callers of a sampled allocation, from the registers and the copy of the stack that
//! the sample contains.
//!
//! The unwinder takes unwind information from the files of the process. For code without it, the
//! unwinder follows frame pointers. It stores a frame as a file and an address in the file, which
//! stay valid after the mapping is gone. It leaves out the innermost frames if they are of neap's
//! own libraries.

use core::ops::Range;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use framehop::{ExplicitModuleSectionInfo, Module, Unwinder as _};

use super::area::StackCopy;
use super::code_source::CodeSource;
use super::elf::{Budget, ElfImage};
use super::limits::ProfileLimits;
use super::maps::CodeMapping;
use super::perf_map::{PerfMap, has_trampolines, trampoline_sections};
use super::processor::{DESCRIBES_TRAMPOLINES, FrameCache, FrameUnwinder, registers};

/// Frames of a stack that are kept.
const MOST_FRAMES: usize = 512;
/// Bytes that a module takes from the [`Budget`], besides those of its unwind information.
const MODULE: usize = 1 << 10;
/// Age from which mappings are read again, since another library may have taken the place of one
/// (`FRESH`), and shortest time between two readings (`HASTE`).
const FRESH: Duration = Duration::from_secs(1);
const HASTE: Duration = Duration::from_millis(2);

/// A place in the code: a file of [`Unwinder::files`] and an address in it. Code outside of all
/// files has no file and its address in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CodePlace {
    pub(crate) file: Option<u32>,
    pub(crate) address: u64,
}

/// A file with code that the process has mapped.
#[derive(Debug)]
pub(crate) struct CodeFile {
    /// Not escaped.
    pub(crate) path: Vec<u8>,
    /// `None` if it cannot be read.
    pub(crate) image: Option<Rc<ElfImage>>,
    /// One of its mappings: range, and offset in the file.
    pub(crate) range: Range<u64>,
    pub(crate) offset: u64,
    /// Whether it is a library of neap.
    is_neap: bool,
    /// Unwind information, shared by its mappings.
    sections: ExplicitModuleSectionInfo<Arc<[u8]>>,
}

impl CodeFile {
    /// Returns the difference between addresses in the process and in the file, for the mapping in
    /// `range`. If the file cannot be read, offsets in the file serve as addresses.
    pub(crate) fn bias(&self) -> u64 {
        let bias = self.image.as_ref().and_then(|image| image.bias(self.range.start, self.offset));
        bias.unwrap_or(self.range.start.wrapping_sub(self.offset))
    }

    /// The name without folders.
    pub(crate) fn name(&self) -> &[u8] {
        self.path.rsplit(|&byte| byte == b'/').next().unwrap_or_default()
    }
}

/// A mapping with the number of its file in [`Unwinder::files`].
#[derive(Debug)]
struct KnownMapping {
    mapping: CodeMapping,
    file: u32,
    bias: u64,
    /// Bytes that its unwind information takes.
    bytes: usize,
}

/// The callers of a sample, the innermost first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Callers {
    pub(crate) frames: Vec<CodePlace>,
    /// Whether they reach the start of the thread.
    pub(crate) is_complete: bool,
}

/// Unwinds the stacks of one process.
pub(crate) struct Unwinder {
    source: CodeSource,
    inner: FrameUnwinder<Arc<[u8]>>,
    cache: FrameCache,
    /// Sorted by address.
    known: Vec<KnownMapping>,
    files: Vec<CodeFile>,
    by_inode: HashMap<(String, u64, Vec<u8>), u32>,
    budget: Budget,
    limits: ProfileLimits,
    /// Executable mappings without a file, which hold generated code.
    generated: Vec<Range<u64>>,
    read_at: Option<Instant>,
    /// Ranges of `generated` that hold trampolines of Python.
    trampolines: Vec<Range<u64>>,
    /// Names of generated code, opened when such code was first seen.
    perf_map: Option<PerfMap>,
    looked_for_names: Option<Instant>,
    /// Mappings whose unwind information found no room.
    pub(crate) without_room: usize,
}

impl Unwinder {
    pub(crate) fn new(source: CodeSource, limits: ProfileLimits) -> Unwinder {
        Unwinder {
            source,
            inner: FrameUnwinder::new(),
            cache: FrameCache::new(),
            known: Vec::new(),
            files: Vec::new(),
            by_inode: HashMap::new(),
            budget: Budget::new(limits.file_bytes),
            limits,
            generated: Vec::new(),
            read_at: None,
            trampolines: Vec::new(),
            perf_map: None,
            looked_for_names: None,
            without_room: 0,
        }
    }

    /// An unwinder of a process that has ended, whose code was generated in a range.
    #[cfg(test)]
    pub(super) fn of_generated(
        handle: &Arc<crate::look::handle::ProcessHandle>,
        range: Range<u64>,
        names: PerfMap,
    ) -> Unwinder {
        let unwinder = Unwinder::new(CodeSource::Process(Arc::clone(handle)), ProfileLimits::FOREIGN);
        Unwinder { generated: vec![range], perf_map: Some(names), ..unwinder }
    }

    pub(crate) fn files(&self) -> &[CodeFile] {
        &self.files
    }

    pub(crate) fn limits(&self) -> ProfileLimits {
        self.limits
    }

    /// The names of generated code.
    pub(crate) fn perf_map(&self) -> Option<&PerfMap> {
        self.perf_map.as_ref()
    }

    /// Unwinds a stack.
    pub(crate) fn callers(&mut self, stack: &StackCopy<'_>) -> Callers {
        self.refresh(FRESH);
        let mut addresses = self.addresses(stack);
        if addresses.0.iter().any(|&address| !self.is_code(address)) && self.refresh(HASTE) {
            addresses = self.addresses(stack);
        }
        let is_generated = |address: &u64| self.find(*address).is_none() && self.is_code(*address);
        if addresses.0.iter().any(is_generated) && self.learn_generated() {
            addresses = self.addresses(stack);
        }
        let (mut addresses, mut is_complete) = addresses;
        if let Some(end) = addresses.iter().position(|&address| !self.is_code(address)) {
            addresses.truncate(end);
            is_complete = false;
        }
        let mut frames: Vec<CodePlace> = Vec::with_capacity(addresses.len());
        let mut is_inner = true;
        for address in addresses {
            let known = self.find(address);
            is_inner &= known.is_some_and(|known| self.files[known.file as usize].is_neap);
            if is_inner {
                continue;
            }
            frames.push(match known {
                Some(known) => CodePlace { file: Some(known.file), address: address.wrapping_sub(known.bias) },
                None => CodePlace { file: None, address },
            });
        }
        Callers { frames, is_complete }
    }

    /// Addresses of the stack's instructions, and whether the start of the thread was reached.
    fn addresses(&mut self, stack: &StackCopy<'_>) -> (Vec<u64>, bool) {
        let mut read = |address: u64| {
            let at = address.checked_sub(stack.stack_pointer).and_then(|at| usize::try_from(at).ok()).ok_or(())?;
            let word = stack.bytes.get(at..).and_then(<[u8]>::first_chunk).ok_or(())?;
            Ok(u64::from_le_bytes(*word))
        };
        let mut frames = self.inner.iter_frames(stack.instruction, registers(stack), &mut self.cache, &mut read);
        let mut addresses = Vec::new();
        while addresses.len() < MOST_FRAMES {
            match frames.next() {
                Ok(Some(frame)) => addresses.push(frame.address_for_lookup()),
                Ok(None) => return (addresses, true),
                Err(_) => break,
            }
        }
        (addresses, false)
    }

    fn find(&self, address: u64) -> Option<&KnownMapping> {
        let after = self.known.partition_point(|known| known.mapping.start <= address);
        self.known.get(after.checked_sub(1)?).filter(|known| known.mapping.contains(address))
    }

    fn is_code(&self, address: u64) -> bool {
        self.find(address).is_some() || self.generated.iter().any(|range| range.contains(&address))
    }

    /// Reads the mappings if they were not read for a time. Returns whether they were.
    pub(crate) fn refresh(&mut self, age: Duration) -> bool {
        if self.read_at.is_some_and(|at| at.elapsed() < age) {
            return false;
        }
        let mappings = self.source.mappings();
        // Reading many mappings takes long, so the age counts from the end of the reading.
        self.read_at = Some(Instant::now());
        let Ok(mut mappings) = mappings else { return false };
        if mappings.is_empty() {
            // The process has ended. The known mappings stay.
            return false;
        }
        let generated = mappings.iter().filter(|mapping| mapping.inode == 0);
        self.generated = generated.map(|mapping| mapping.start..mapping.end).collect();
        let (kept, gone) =
            core::mem::take(&mut self.trampolines).into_iter().partition(|range| self.generated.contains(range));
        self.trampolines = kept;
        let gone: Vec<Range<u64>> = gone;
        gone.iter().for_each(|range| self.inner.remove_module(range.start));
        mappings.retain(|mapping| mapping.inode != 0);
        mappings.sort_by_key(|mapping| mapping.start);
        if mappings.iter().eq(self.known.iter().map(|known| &known.mapping)) {
            return true;
        }
        let old = core::mem::take(&mut self.known);
        // The old and the new mappings are sorted by address.
        let is_in = |mapping: &CodeMapping, sorted: &[CodeMapping]| {
            sorted.binary_search_by_key(&mapping.start, |each| each.start).is_ok_and(|at| sorted[at] == *mapping)
        };
        let (kept, gone): (Vec<_>, Vec<_>) = old.into_iter().partition(|known| is_in(&known.mapping, &mappings));
        for known in &gone {
            self.inner.remove_module(known.mapping.start);
            self.budget.put(known.bytes);
        }
        let of_kept = |mapping: &CodeMapping| kept.binary_search_by_key(&mapping.start, |known| known.mapping.start);
        for mapping in mappings.iter().filter(|mapping| of_kept(mapping).is_err()) {
            let added = self.add(mapping);
            self.known.extend(added);
        }
        self.known.extend(kept);
        self.known.sort_by_key(|known| known.mapping.start);
        true
    }

    fn add(&mut self, mapping: &CodeMapping) -> Option<KnownMapping> {
        let key = (mapping.device.clone(), mapping.inode, mapping.path.clone());
        let file = match self.by_inode.get(&key) {
            Some(&file) => file,
            None if self.files.len() >= self.limits.files => return None,
            None => {
                let file = self.files.len() as u32;
                self.files.push(self.open(mapping));
                self.by_inode.insert(key, file);
                file
            }
        };
        let code = &self.files[file as usize];
        let bias = code.image.as_ref().and_then(|image| image.bias(mapping.start, mapping.offset));
        // Each module has a table of its own over the unwind information.
        let bytes = code.sections.eh_frame.as_ref().map_or(0, |bytes| bytes.len()) + MODULE;
        let bytes = bias.and_then(|_| self.budget.take(bytes as u64)).unwrap_or(0);
        let is_lost =
            code.sections.eh_frame.is_none() && code.image.as_ref().is_some_and(|image| image.has(".eh_frame"));
        self.without_room += usize::from(bias.is_some() && (bytes == 0 || is_lost));
        if let Some(bias) = bias.filter(|_| bytes > 0) {
            let name = String::from_utf8_lossy(code.name()).into_owned();
            self.inner.add_module(Module::new(name, mapping.start..mapping.end, bias, sections_of(&code.sections)));
        }
        // Without the file, offsets in it are the best addresses.
        let bias = bias.unwrap_or(mapping.start.wrapping_sub(mapping.offset));
        Some(KnownMapping { mapping: mapping.clone(), file, bias, bytes })
    }

    /// Opens the file of a mapping.
    fn open(&self, mapping: &CodeMapping) -> CodeFile {
        let image = self.source.open(mapping, &self.budget).map(Rc::new);
        let sections = image.as_ref().map(|image| unwind_sections(image)).unwrap_or_default();
        let name = mapping.path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        CodeFile {
            is_neap: name.starts_with(b"libneap"),
            path: mapping.path.clone(),
            range: mapping.start..mapping.end,
            offset: mapping.offset,
            image,
            sections,
        }
    }

    /// Opens the names of generated code, and looks for new trampolines of Python in such code.
    /// Returns whether there are new trampolines.
    fn learn_generated(&mut self) -> bool {
        if self.looked_for_names.is_some_and(|at| at.elapsed() < FRESH) {
            return false;
        }
        self.looked_for_names = Some(Instant::now());
        if self.perf_map.is_none() {
            self.perf_map = self.source.perf_map(self.limits);
        }
        let Some(names) = self.perf_map.as_ref().map(PerfMap::names) else { return false };
        let is_new = |range: &&Range<u64>| {
            DESCRIBES_TRAMPOLINES && !self.trampolines.contains(range) && has_trampolines(&names, range)
        };
        let ranges: Vec<Range<u64>> = self.generated.iter().filter(is_new).cloned().collect();
        for range in &ranges {
            let sections = trampoline_sections(range);
            self.inner.add_module(Module::new("[generated code]".into(), range.clone(), range.start, sections));
        }
        let is_any = !ranges.is_empty();
        self.trampolines.extend(ranges);
        is_any
    }
}

/// Copies the sections. The copies share their bytes.
fn sections_of(from: &ExplicitModuleSectionInfo<Arc<[u8]>>) -> ExplicitModuleSectionInfo<Arc<[u8]>> {
    ExplicitModuleSectionInfo {
        base_svma: from.base_svma,
        text_svma: from.text_svma.clone(),
        got_svma: from.got_svma.clone(),
        eh_frame_svma: from.eh_frame_svma.clone(),
        eh_frame: from.eh_frame.clone(),
        ..ExplicitModuleSectionInfo::default()
    }
}

/// The unwind information of a file.
fn unwind_sections(image: &ElfImage) -> ExplicitModuleSectionInfo<Arc<[u8]>> {
    let section = |name| image.shared_section(name);
    let at = |name| image.range(name);
    ExplicitModuleSectionInfo {
        base_svma: 0,
        text_svma: at(".text"),
        got_svma: at(".got"),
        eh_frame_svma: at(".eh_frame"),
        eh_frame: section(".eh_frame"),
        ..ExplicitModuleSectionInfo::default()
    }
}

/// Addresses of a stack, by the unwind information of one file alone.
#[cfg(test)]
pub(super) fn addresses_in(image: &ElfImage, stack: &StackCopy<'_>) -> Vec<u64> {
    let mut unwinder = Unwinder::new(CodeSource::Written { mappings: Vec::new(), at: 0 }, ProfileLimits::OWN);
    unwinder.inner.add_module(Module::new(String::new(), 0..1 << 40, 0, unwind_sections(image)));
    unwinder.addresses(stack).0
}
