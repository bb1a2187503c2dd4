//! Names, files and lines of frames.
//!
//! A frame is one or more lines: functions that the compiler inlined have their own. They come from
//! the file's debug information, or from that of its build below `/usr/lib/debug`. Without any, the
//! symbol table gives the function's name, and without that the file's name and the address. Names
//! of generated code come from a perf map. All text is escaped and cut.

use core::fmt::{self, Write};
use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use addr2line::Context;
use cpp_demangle::DemangleOptions;
use gimli::{Dwarf, EndianArcSlice, LittleEndian};

use super::elf::{Budget, ElfImage, SymbolTable, debug_file};
use super::limits::ProfileLimits;
use super::perf_map::GeneratedNames;
use super::unwind::{CodePlace, Unwinder};
use crate::foreign::escaped;

/// Characters of a name or a path that are kept.
const LONGEST: usize = 400;
/// Inlined functions of a frame that are kept.
const MOST_LINES: usize = 64;
/// Bytes of a name that are demangled, and of the result. A short name may stand for one that no
/// memory holds.
const LONGEST_MANGLED: usize = 4096;
const LONGEST_DEMANGLED: usize = 4096;
/// Bytes by which a name counts towards [`ProfileLimits::name_bytes`], besides its text.
const NAME: usize = 128;

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
    /// Length of the perf map that `generated` is from.
    generated_from: Option<u64>,
    /// Time from which on a longer map is read.
    generated_due: Instant,
    known: HashMap<CodePlace, Rc<[SourceLine]>>,
    texts: HashSet<Rc<str>>,
    name_bytes: usize,
    limits: ProfileLimits,
    /// Of places beyond those that get names.
    other: Rc<[SourceLine]>,
}

impl Symbols {
    /// The symbols of the files that an unwinder has seen.
    pub(crate) fn of(unwinder: &Unwinder) -> Symbols {
        let mut symbols = Symbols::without_files(unwinder);
        symbols.follow(unwinder);
        symbols
    }

    /// The symbols of no file, for [`Symbols::follow`] to add to.
    pub(crate) fn without_files(unwinder: &Unwinder) -> Symbols {
        Symbols::within(unwinder.budget().clone(), unwinder.limits())
    }

    /// Takes over the files that an unwinder has seen since, and the new names of generated code.
    /// Returns whether there are such names: earlier results for generated code are outdated then.
    ///
    /// A map that grows is read as a whole. Reads are spaced, so that a caller that follows again
    /// and again spends at most a ninth of its time on them.
    pub(crate) fn follow(&mut self, unwinder: &Unwinder) -> bool {
        for file in &unwinder.files()[self.files.len()..] {
            self.files.push(FileSymbols { image: file.image.clone(), debug: OnceCell::new(), table: OnceCell::new() });
            self.names.push(cut(&escaped(file.name())).into_owned());
        }
        // A map only grows, so one of the former length has the former names.
        let Some(map) = unwinder.perf_map() else { return false };
        let (length, began) = (map.length(), Instant::now());
        if length == self.generated_from || began < self.generated_due {
            return false;
        }
        // The former names are freed first.
        self.generated = GeneratedNames::new();
        (self.generated, self.generated_from) = (map.names(), length);
        self.known.retain(|place, _| place.file.is_some());
        self.generated_due = Instant::now() + began.elapsed() * 8;
        true
    }

    fn within(budget: Budget, limits: ProfileLimits) -> Symbols {
        let other = SourceLine { function: "[other]".into(), ..SourceLine::default() };
        Symbols {
            files: Vec::new(),
            names: Vec::new(),
            budget,
            generated: GeneratedNames::new(),
            generated_from: None,
            generated_due: Instant::now(),
            known: HashMap::new(),
            texts: HashSet::new(),
            name_bytes: 0,
            limits,
            other: [other].into(),
        }
    }

    /// The functions at a frame, the innermost first; at least one.
    pub(crate) fn lines(&mut self, frame: CodePlace) -> Rc<[SourceLine]> {
        if let Some(lines) = self.known.get(&frame) {
            return Rc::clone(lines);
        }
        if self.known.len() >= self.limits.places || self.name_bytes >= self.limits.name_bytes {
            return Rc::clone(&self.other);
        }
        let mut lines = if self.limits.has_lines { self.of_debug(frame) } else { Vec::new() };
        if lines.is_empty() {
            lines.push(self.of_table(frame));
        }
        let lines: Rc<[SourceLine]> = lines.into();
        self.known.insert(frame, Rc::clone(&lines));
        lines
    }

    fn text(&mut self, text: &str) -> Rc<str> {
        // Cut before, too: an escaped text may be ten times as long.
        let text = text.char_indices().nth(LONGEST + 1).map_or(text, |(end, _)| &text[..end]);
        let safe = escaped(text.as_bytes());
        let safe = cut(&safe);
        if let Some(known) = self.texts.get(&*safe) {
            return Rc::clone(known);
        }
        self.name_bytes += safe.len() + NAME;
        let text = Rc::<str>::from(&*safe);
        self.texts.insert(Rc::clone(&text));
        text
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
        let function = demangled(system_name);
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

/// A text, cut to [`LONGEST`] characters.
fn cut(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => Cow::Owned(format!("{}...", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

/// A text that ends after [`LONGEST_DEMANGLED`] bytes.
#[derive(Debug, Default)]
struct BoundedText(String);

impl fmt::Write for BoundedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = LONGEST_DEMANGLED - self.0.len();
        self.0.push_str(&text[..text.floor_char_boundary(room)]);
        if text.len() > room { Err(fmt::Error) } else { Ok(()) }
    }
}

/// The name of a function of Rust or C++ as its source has it, or the name itself.
fn demangled(name: &str) -> String {
    if name.len() > LONGEST_MANGLED {
        return name.to_string();
    }
    let mut text = BoundedText::default();
    // Either may end early, with the first bytes of a long name.
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        let _ = write!(text, "{rust:#}");
    } else if let Ok(symbol) = cpp_demangle::Symbol::new(name) {
        let _ = symbol.structured_demangle(&mut text, &DemangleOptions::default());
    }
    if text.0.is_empty() { name.to_string() } else { text.0 }
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
    let limits = ProfileLimits::OWN;
    let mut symbols = Symbols {
        files: vec![file],
        names: vec!["it".to_string()],
        ..Symbols::within(Budget::new(limits.file_bytes), limits)
    };
    addresses.iter().map(|&address| symbols.lines(CodePlace { file: Some(0), address })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::ProcessHandle;
    use crate::profile::perf_map::PerfMap;
    use core::time::Duration;

    #[test]
    fn hash_of_a_name_is_cut_off() {
        assert_eq!(function_name("a::b::h0123456789abcdef"), "a::b");
        assert_eq!(function_name("a::hello"), "a::hello");
    }

    #[test]
    fn map_that_grows_is_read_again_when_it_is_due() {
        let path = std::env::temp_dir().join(format!("neap-perf-map-{}", std::process::id()));
        std::fs::write(&path, "1000 10 first\n").unwrap();
        let handle = Arc::new(ProcessHandle::open(std::process::id() as i32).unwrap());
        let map = PerfMap::of(std::fs::File::open(&path).unwrap(), ProfileLimits::OWN);
        let unwinder = Unwinder::of_generated(&handle, 0x1000..0x2000, map);
        let mut symbols = Symbols::without_files(&unwinder);
        let name =
            |symbols: &mut Symbols, address| symbols.lines(CodePlace { file: None, address })[0].function.to_string();
        assert!(symbols.follow(&unwinder) && !symbols.follow(&unwinder));
        assert_eq!((&*name(&mut symbols, 0x1001), &*name(&mut symbols, 0x1011)), ("first", "[generated code]"));
        std::fs::write(&path, "1000 10 first\n1010 10 second\n").unwrap();
        symbols.generated_due = Instant::now() + Duration::from_secs(1000);
        assert!(!symbols.follow(&unwinder));
        assert_eq!(name(&mut symbols, 0x1011), "[generated code]");
        symbols.generated_due = Instant::now();
        let before = Instant::now();
        assert!(symbols.follow(&unwinder) && symbols.generated_due > before);
        assert_eq!(name(&mut symbols, 0x1011), "second");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn short_name_that_stands_for_an_endless_one_is_cut() {
        assert_eq!(demangled("_ZN5space3fooEibc"), "space::foo(int, bool, char)");
        assert_eq!(demangled("_ZN4core3fmt5Write9write_fmt17h0123456789abcdefE"), "core::fmt::Write::write_fmt");
        assert_eq!(demangled("main"), "main");
        // Each part names the one before twice.
        let numbers = ["S_", "S0_", "S1_", "S2_", "S3_", "S4_", "S5_", "S6_", "S7_", "S8_", "S9_"];
        for depth in [4, 11] {
            let mut name = String::from("_Z1f1A");
            numbers[..depth].iter().for_each(|number| name += &format!("1BI{number}{number}{number}{number}E"));
            assert!(demangled(&name).len() <= LONGEST_DEMANGLED, "{name}");
        }
        assert_eq!(demangled(&"_Z".repeat(LONGEST_MANGLED)).len(), 2 * LONGEST_MANGLED);
    }
}
