//! Names, files and lines of frames.
//!
//! A frame is one or more lines: functions that the compiler inlined have their own. They come from
//! the file's debug information, or from that of its build below `/usr/lib/debug`. Without any, the
//! symbol table gives the function's name, and without that the file's name and the address. Names
//! of generated code come from a perf map. All text is escaped and cut.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use addr2line::{Context, demangle_auto};
use gimli::{Dwarf, EndianArcSlice, LittleEndian};

use super::elf::{Budget, ElfImage, SymbolTable, debug_file};
use super::perf_map::{GeneratedNames, PerfMap};
use super::unwind::{CodeFile, CodePlace, Unwinder};
use crate::foreign::escaped;

/// Characters of a name or a path that are kept.
const LONGEST: usize = 400;
/// Inlined functions of a frame that are kept.
const MOST_LINES: usize = 64;

/// A function on a stack, or inlined into one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SourceLine {
    pub(crate) function: Rc<str>,
    /// Name as the linker knows it; empty if it is not known.
    pub(crate) system_name: Rc<str>,
    /// Path of the source; empty if it is not known.
    pub(crate) source: Rc<str>,
    /// 0 if it is not known.
    pub(crate) line: u32,
}

type Slice = EndianArcSlice<LittleEndian>;

/// What is known of one file's addresses. Read at the first use.
struct FileSymbols {
    image: Option<Rc<ElfImage>>,
    debug: OnceCell<Option<Context<Slice>>>,
    table: OnceCell<SymbolTable>,
}

impl FileSymbols {
    fn debug(&self, budget: &Budget) -> Option<&Context<Slice>> {
        self.debug.get_or_init(|| context(self.image.as_ref()?, budget)).as_ref()
    }

    fn table(&self) -> &SymbolTable {
        self.table.get_or_init(|| self.image.as_ref().map(|image| SymbolTable::read(image)).unwrap_or_default())
    }
}

/// The debug information of a file, or of the file that has it instead.
fn context(image: &ElfImage, budget: &Budget) -> Option<Context<Slice>> {
    let other = if image.has(".debug_info") { None } else { Some(debug_file(&image.build_id, budget).ok()?) };
    let image = other.as_ref().unwrap_or(image);
    let load = |name: &str| Slice::new(Arc::from(image.section(name).unwrap_or_default()), LittleEndian);
    let dwarf = Dwarf::load(|section| Ok::<_, core::convert::Infallible>(load(section.name()))).ok()?;
    Context::from_dwarf(dwarf).ok()
}

/// Resolves the frames of one process.
pub(crate) struct Symbols {
    files: Vec<FileSymbols>,
    names: Vec<String>,
    budget: Budget,
    generated: GeneratedNames,
    known: HashMap<CodePlace, Rc<[SourceLine]>>,
    texts: HashMap<String, Rc<str>>,
}

impl Symbols {
    /// The symbols of the files that an unwinder has seen.
    pub(crate) fn of(unwinder: &Unwinder) -> Symbols {
        let symbols =
            |file: &CodeFile| FileSymbols { image: file.image.clone(), debug: OnceCell::new(), table: OnceCell::new() };
        Symbols {
            files: unwinder.files().iter().map(symbols).collect(),
            names: unwinder.files().iter().map(|file| escaped(file.name())).collect(),
            budget: unwinder.budget().clone(),
            generated: unwinder.perf_map().map(PerfMap::names).unwrap_or_default(),
            known: HashMap::new(),
            texts: HashMap::new(),
        }
    }

    /// The functions at a frame, the innermost first; at least one.
    pub(crate) fn lines(&mut self, frame: CodePlace) -> Rc<[SourceLine]> {
        if let Some(lines) = self.known.get(&frame) {
            return Rc::clone(lines);
        }
        let mut lines = self.of_debug(frame);
        if lines.is_empty() {
            lines.push(self.of_table(frame));
        }
        let lines: Rc<[SourceLine]> = lines.into();
        self.known.insert(frame, Rc::clone(&lines));
        lines
    }

    fn text(&mut self, text: &str) -> Rc<str> {
        let mut safe = escaped(text.as_bytes());
        if let Some((end, _)) = safe.char_indices().nth(LONGEST) {
            safe.truncate(end);
            safe.push_str("...");
        }
        Rc::clone(self.texts.entry(safe).or_insert_with_key(|safe| Rc::from(safe.as_str())))
    }

    fn of_debug(&mut self, frame: CodePlace) -> Vec<SourceLine> {
        let found: Vec<(String, String, u32)> = {
            let file = frame.file.and_then(|file| self.files.get(file as usize));
            let Some((context, file)) = file.and_then(|file| Some((file.debug(&self.budget)?, file))) else {
                return Vec::new();
            };
            let Ok(mut frames) = context.find_frames(frame.address).skip_all_loads() else { return Vec::new() };
            let mut found = Vec::new();
            while let Ok(Some(inner)) = frames.next() {
                let name = inner.function.and_then(|function| Some(function.raw_name().ok()?.into_owned()));
                let (source, line) = inner.location.map_or((None, None), |place| (place.file, place.line));
                found.push((name.unwrap_or_default(), source.unwrap_or_default().to_string(), line.unwrap_or(0)));
                if found.len() == MOST_LINES {
                    break;
                }
            }
            // Units with line tables only name no outer function.
            if let Some((name, _, _)) = found.last_mut().filter(|(name, _, _)| name.is_empty()) {
                *name = file
                    .table()
                    .name(frame.address)
                    .map(|name| String::from_utf8_lossy(name).into_owned())
                    .unwrap_or_default();
            }
            if found.iter().any(|(name, _, _)| name.is_empty()) { Vec::new() } else { found }
        };
        found.into_iter().map(|(name, source, line)| self.line(&name, &source, line)).collect()
    }

    fn line(&mut self, system_name: &str, source: &str, line: u32) -> SourceLine {
        let function = demangle_auto(system_name.into(), None).into_owned();
        SourceLine {
            function: self.text(function_name(&function)),
            system_name: self.text(system_name),
            source: self.text(source),
            line,
        }
    }

    fn of_table(&mut self, frame: CodePlace) -> SourceLine {
        let plain = |function| SourceLine { function, ..SourceLine::default() };
        let Some(file) = frame.file.map(|file| file as usize) else {
            let found = self.generated.range(..=frame.address).next_back();
            let name = found.filter(|(_, (end, _))| frame.address < *end).map(|(_, (_, name))| name.clone());
            return plain(self.text(&name.unwrap_or_else(|| "[generated code]".to_string())));
        };
        let name = self.files[file].table().name(frame.address).map(|name| String::from_utf8_lossy(name).into_owned());
        match name {
            Some(name) => self.line(&name, "", 0),
            None => plain(self.text(&format!("{}+{:#x}", self.names[file], frame.address))),
        }
    }
}

/// A demangled Rust name without its hash.
fn function_name(name: &str) -> &str {
    match name.rsplit_once("::h") {
        Some((before, hash)) if hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) => before,
        _ => name,
    }
}

/// The functions at addresses of one file.
#[cfg(test)]
pub(super) fn lines_of(image: ElfImage, addresses: &[u64]) -> Vec<Rc<[SourceLine]>> {
    let file = FileSymbols { image: Some(Rc::new(image)), debug: OnceCell::new(), table: OnceCell::new() };
    let mut symbols = Symbols {
        files: vec![file],
        names: vec!["it".to_string()],
        budget: Budget::new(super::elf::BUDGET),
        generated: GeneratedNames::new(),
        known: HashMap::new(),
        texts: HashMap::new(),
    };
    addresses.iter().map(|&address| symbols.lines(CodePlace { file: Some(0), address })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_of_a_name_is_cut_off() {
        assert_eq!(function_name("a::b::h0123456789abcdef"), "a::b");
        assert_eq!(function_name("a::hello"), "a::hello");
    }
}
