//! Names, files and lines of frames.
//!
//! A frame has one or more lines, since each inlined function has a line of its own. Lines come
//! from the file's debug information, or from that of its build below `/usr/lib/debug`. Without
//! debug information, the symbol table gives the function's name. Without a symbol, the line is the
//! file's name and the address. Names of generated code come from a perf map. All text is escaped
//! and cut.
//!
//! Callers resolve many places at a time. This module reads each file's tables once for all its
//! places, and does not keep them.

use core::fmt::{self, Write};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use cpp_demangle::DemangleOptions;

use super::debug_lines::{self, FoundLine, LineBounds};
use super::elf::ElfImage;
use super::limits::ProfileLimits;
use super::perf_map::GeneratedNames;
use super::symbol_table;
use super::unwind::{CodePlace, Unwinder};
use crate::look::foreign::escaped;

/// Characters of a name or a path that are kept.
const LONGEST: usize = 400;
/// Most bytes of a name that is demangled, and of the result. A short mangled name may stand for a
/// name that does not fit into memory.
const LONGEST_MANGLED: usize = 4096;
const LONGEST_DEMANGLED: usize = 4096;
/// Bytes by which a name counts towards [`ProfileLimits::name_bytes`], besides its text.
const NAME: usize = 128;

/// A function on a stack, or inlined into one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SourceLine {
    pub(crate) function: Rc<str>,
    /// Name before demangling. Empty if there is none.
    pub(crate) system_name: Rc<str>,
    /// Path of the source file. Empty if there is none.
    pub(crate) source: Rc<str>,
    /// 0 if unknown.
    pub(crate) line: u32,
}

/// A file whose addresses have names.
struct FileSymbols {
    /// `None` if it cannot be read.
    image: Option<Rc<ElfImage>>,
    /// Escaped.
    name: String,
}

/// Resolves the frames of one process.
pub(crate) struct Symbols {
    files: Vec<FileSymbols>,
    generated: GeneratedNames,
    /// Length of the perf map that `generated` is from.
    generated_from: Option<u64>,
    /// Time from which on a longer map is read.
    generated_due: Instant,
    known: HashMap<CodePlace, Rc<[SourceLine]>>,
    texts: HashSet<Rc<str>>,
    name_bytes: usize,
    limits: ProfileLimits,
    /// Lines of places beyond those that get names.
    other: Rc<[SourceLine]>,
    /// Whether there are such places.
    pub(crate) has_others: bool,
    /// Places whose lines did not fit into the memory or the time.
    pub(crate) without_lines: usize,
}

impl Symbols {
    /// The symbols of the files that an unwinder has seen.
    pub(crate) fn of(unwinder: &Unwinder) -> Symbols {
        let mut symbols = Symbols::without_files(unwinder);
        symbols.follow(unwinder);
        symbols
    }

    /// Makes symbols without files. [`Symbols::follow`] adds files.
    pub(crate) fn without_files(unwinder: &Unwinder) -> Symbols {
        Symbols::within(unwinder.limits())
    }

    /// Takes over the files that an unwinder has seen since, and the new names of generated code.
    /// Returns whether there are such names. Earlier results for generated code are then outdated.
    ///
    /// After a change the whole map is read again. The next reading waits for eight times the
    /// duration of this one, so a caller spends at most a ninth of its time on them.
    pub(crate) fn follow(&mut self, unwinder: &Unwinder) -> bool {
        for file in &unwinder.files()[self.files.len()..] {
            let name = cut(&escaped(file.name())).into_owned();
            self.files.push(FileSymbols { image: file.image.clone(), name });
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

    fn within(limits: ProfileLimits) -> Symbols {
        let other = SourceLine { function: "[other]".into(), ..SourceLine::default() };
        Symbols {
            files: Vec::new(),
            generated: GeneratedNames::new(),
            generated_from: None,
            generated_due: Instant::now(),
            known: HashMap::new(),
            texts: HashSet::new(),
            name_bytes: 0,
            limits,
            other: [other].into(),
            has_others: false,
            without_lines: 0,
        }
    }

    /// Finds the functions at places that are not known yet. Looks for their lines for at most
    /// `time`. Meanwhile it calls `wait` repeatedly, and stops looking for lines when `wait`
    /// returns `false`.
    pub(crate) fn resolve(
        &mut self,
        places: impl Iterator<Item = CodePlace>,
        time: Duration,
        wait: &mut dyn FnMut() -> bool,
    ) {
        let room = self.limits.places.saturating_sub(self.known.len());
        let mut new: HashSet<CodePlace> = HashSet::new();
        for place in places.filter(|place| !self.known.contains_key(place)) {
            if new.len() >= room && !new.contains(&place) {
                self.has_others = true;
                break;
            }
            new.insert(place);
        }
        let mut by_file: BTreeMap<Option<u32>, Vec<u64>> = BTreeMap::new();
        new.iter().for_each(|place| by_file.entry(place.file).or_default().push(place.address));
        let (end, mut tables) = (Instant::now() + time, self.limits.table_bytes);
        for (file, mut addresses) in by_file {
            addresses.sort_unstable();
            match file {
                Some(file) => self.resolve_in(file, &addresses, end, &mut tables, wait),
                None => addresses.into_iter().for_each(|address| self.resolve_generated(address)),
            }
        }
    }

    /// Returns the functions at a place, the innermost first. An unresolved place has the line
    /// `[other]`.
    pub(crate) fn lines(&self, place: CodePlace) -> Rc<[SourceLine]> {
        Rc::clone(self.known.get(&place).unwrap_or(&self.other))
    }

    /// Resolves addresses of a file by its debug information until `end`, and the others by its
    /// symbols.
    fn resolve_in(
        &mut self,
        number: u32,
        addresses: &[u64],
        end: Instant,
        tables: &mut u64,
        wait: &mut dyn FnMut() -> bool,
    ) {
        let Some(file) = self.files.get(number as usize) else { return };
        let (image, file_name) = (file.image.clone(), file.name.clone());
        let mut of_table: HashMap<u64, SourceLine> = HashMap::new();
        if let Some(image) = &image {
            symbol_table::names(image, addresses, tables, &mut |address, name| {
                if self.name_bytes < self.limits.name_bytes {
                    of_table.insert(address, self.line(&String::from_utf8_lossy(name), "", 0));
                }
            });
        }
        let place = |address| CodePlace { file: Some(number), address };
        let debug_file = image.filter(|_| self.limits.has_lines).and_then(|image| image.debug_file());
        if let Some(file) = debug_file {
            // One file takes at most half of the time that is left for all.
            let half = end.saturating_duration_since(Instant::now()) / 2;
            let bounds = LineBounds { memory: self.limits.memory, end: Instant::now() + half };
            let missing = debug_lines::find(&file, addresses, bounds, wait, &mut |address, found| {
                let lines = self.of_debug(found, of_table.get(&address));
                if !lines.is_empty() && self.name_bytes < self.limits.name_bytes {
                    self.known.insert(place(address), lines.into());
                }
            });
            self.without_lines += missing;
        }
        for &address in addresses {
            if self.name_bytes >= self.limits.name_bytes {
                self.has_others = true;
                return;
            }
            if !self.known.contains_key(&place(address)) {
                let line = of_table.remove(&address);
                let line = line.unwrap_or_else(|| self.plain(&format!("{file_name}+{address:#x}")));
                self.known.insert(place(address), [line].into());
            }
        }
    }

    /// Resolves an address of generated code.
    fn resolve_generated(&mut self, address: u64) {
        let found = self.generated.range(..=address).next_back();
        let name = found.filter(|(_, (end, _))| address < *end).map(|(_, (_, name))| name.clone());
        let line = self.plain(name.as_deref().unwrap_or("[generated code]"));
        if self.name_bytes >= self.limits.name_bytes {
            self.has_others = true;
        } else {
            self.known.insert(CodePlace { file: None, address }, [line].into());
        }
    }

    fn text(&mut self, text: &str) -> Rc<str> {
        // The text is also cut before it is escaped, since an escaped text may be ten times as
        // long.
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

    /// Makes lines from debug information. There are none if a function has no name. A compilation
    /// unit with only line tables lacks the name of the outer function, which then comes from the
    /// symbol table.
    fn of_debug(&mut self, found: Vec<FoundLine>, of_table: Option<&SourceLine>) -> Vec<SourceLine> {
        let last = found.len().saturating_sub(1);
        let line = |(at, (name, source, line)): (usize, FoundLine)| match (name.as_str(), of_table) {
            ("", Some(outer)) if at == last => Some(SourceLine { source: self.text(&source), line, ..outer.clone() }),
            ("", _) => None,
            (name, _) => Some(self.line(name, &source, line)),
        };
        found.into_iter().enumerate().map(line).collect::<Option<_>>().unwrap_or_default()
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

    fn plain(&mut self, name: &str) -> SourceLine {
        SourceLine { function: self.text(name), ..SourceLine::default() }
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
    // Both demanglers may stop early; `text` then has the first bytes of a long name.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::handle::ProcessHandle;
    use crate::profile::perf_map::PerfMap;
    use std::sync::Arc;

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
        let name = |symbols: &mut Symbols, address| {
            let place = CodePlace { file: None, address };
            symbols.resolve([place].into_iter(), Duration::ZERO, &mut || true);
            symbols.lines(place)[0].function.to_string()
        };
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
