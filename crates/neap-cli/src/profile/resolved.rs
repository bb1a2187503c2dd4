//! A finished profile with names, from which all outputs are made.

use std::collections::HashMap;
use std::rc::Rc;

use anyhow::{Result, ensure};
use clap::ValueEnum;

use super::collect::SumCell;
use super::limits::{LINE_TIME, ProfileLimits};
use super::session::{Losses, Session, Summed};
use super::sums::{ProfileView, SampleSums};
use super::symbols::{SourceLine, Symbols};
use super::unwind::{CodePlace, Unwinder};
use crate::look::foreign::escaped;
use crate::report::human;

/// A frame with its functions.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) frame: CodePlace,
    /// Inlined functions first.
    pub(crate) lines: Rc<[SourceLine]>,
}

/// A file that was mapped.
#[derive(Clone, Debug)]
pub(crate) struct MappedFile {
    pub(crate) path: String,
    pub(crate) build_id: String,
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) offset: u64,
    /// Difference between addresses in the process and in the file.
    pub(crate) bias: u64,
    pub(crate) has_lines: bool,
}

/// The sums of a stack, a group and a thread name.
#[derive(Clone, Debug)]
pub(crate) struct ProfileRow {
    /// Number of the stack.
    pub(crate) stack: usize,
    pub(crate) group: Rc<str>,
    pub(crate) thread: Rc<str>,
    pub(crate) sums: SampleSums,
}

/// The process of a profile.
#[derive(Clone, Debug, Default)]
pub(crate) struct Subjected {
    pub(crate) pid: i32,
    /// Escaped.
    pub(crate) name: String,
    pub(crate) seconds: f64,
    /// Bytes in use at the end, from the process's own counts. `None` if the process had ended.
    pub(crate) in_use: Option<u64>,
}

/// Selects the samples that a profile covers. By default it covers all.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ChosenSamples<'a> {
    /// One group, and those below it.
    pub(crate) group: Option<&'a str>,
    /// If set, only samples that were allocated before this time are live.
    pub(crate) before: Option<u64>,
}

/// A profile.
#[derive(Clone, Debug, Default)]
pub(crate) struct Profile {
    pub(crate) of: Subjected,
    /// Bytes between two samples, on average.
    pub(crate) every: u64,
    pub(crate) view: ProfileView,
    /// Stacks with the innermost place first. The first stack is empty.
    pub(crate) stacks: Vec<Vec<Place>>,
    pub(crate) files: Vec<MappedFile>,
    pub(crate) rows: Vec<ProfileRow>,
    pub(crate) losses: Losses,
    /// Bounds of the outputs.
    pub(crate) limits: ProfileLimits,
    /// Counts of samples: with a stack that reaches `main` or the start of its thread (`complete`),
    /// with a stack that ends before (`incomplete`), and without a stack.
    pub(crate) complete: u64,
    pub(crate) incomplete: u64,
    pub(crate) without_stack: u64,
    /// Views that a file does not have.
    pub(crate) lacks: Vec<ProfileView>,
    /// Notes on the profile, from its file or on the command's limits. Each is an escaped sentence.
    pub(crate) notes: Vec<String>,
}

impl Profile {
    /// Makes a profile from a session's sums, with names.
    pub(crate) fn of(session: &Session, of: Subjected, view: ProfileView, chosen: ChosenSamples<'_>) -> Profile {
        Profile::of_sums(&session.summed(), of, view, chosen)
    }

    /// Gives names to sums.
    pub(crate) fn of_sums(summed: &Summed<'_>, of: Subjected, view: ProfileView, chosen: ChosenSamples<'_>) -> Profile {
        let Summed { unwinder, collector, .. } = *summed;
        let mut symbols = Symbols::of(unwinder);
        let old = chosen.before.map(|before| collector.older_than(before));
        let sums = |cell: &SumCell| {
            let sums = collector.sums(cell);
            let old = old.as_ref().map(|old| old.get(&cell.key).copied().unwrap_or_default());
            SampleSums { live: old.unwrap_or(sums.live), ..sums }
        };
        let row = |cell: &SumCell| ProfileRow {
            stack: cell.key.stack as usize,
            group: summed.group(cell.key.group),
            thread: Rc::clone(&collector.threads[cell.key.thread as usize]),
            sums: sums(cell),
        };
        let is_wanted = |row: &ProfileRow| chosen.group.is_none_or(|group| is_below(&row.group, group));
        let rows: Vec<ProfileRow> = collector.cells().iter().map(row).filter(is_wanted).collect();
        let frames = rows.iter().flat_map(|row| collector.stacks[row.stack].frames.iter().copied());
        symbols.resolve(frames, LINE_TIME, &mut || true);
        let mut stacks: Vec<Vec<Place>> = vec![Vec::new(); collector.stacks.len()];
        for stack in rows.iter().map(|row| row.stack) {
            if stacks[stack].is_empty() {
                stacks[stack] = places_of(&collector.stacks[stack].frames, &symbols);
            }
        }
        let (mut complete, mut incomplete) = (0, 0);
        for (stack, places) in collector.stacks.iter().zip(&stacks).filter(|(_, places)| !places.is_empty()) {
            let has_main = places.iter().flat_map(|place| place.lines.iter()).any(|line| &*line.function == "main");
            let ended = if has_main { 0 } else { stack.incomplete };
            complete += stack.samples - ended;
            incomplete += ended;
        }
        let files = unwinder.files().iter().map(|file| MappedFile {
            path: escaped(&file.path),
            build_id: file
                .image
                .as_ref()
                .map(|image| image.build_id.as_slice())
                .unwrap_or_default()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
            start: file.range.start,
            end: file.range.end,
            offset: file.offset,
            bias: file.bias(),
            has_lines: file.image.as_ref().is_some_and(|image| image.has(".debug_line")) && unwinder.limits().has_lines,
        });
        Profile {
            of,
            every: summed.every,
            view,
            stacks,
            files: files.collect(),
            rows,
            losses: summed.losses,
            limits: unwinder.limits(),
            complete,
            incomplete,
            without_stack: collector.without_stack,
            lacks: Vec::new(),
            notes: notes_on_memory(&symbols, unwinder),
        }
    }

    /// Chooses the view and the group to show of a profile from a file.
    ///
    /// # Errors
    /// Returns an error if the file lacks the view.
    pub(crate) fn choose(&mut self, view: Option<ProfileView>, group: Option<&str>) -> Result<()> {
        self.view = view.unwrap_or(self.view);
        ensure!(!self.lacks.contains(&self.view), "it has the bytes {}", {
            let has = ProfileView::value_variants().iter().filter(|view| !self.lacks.contains(view));
            has.map(|view| format!("{} (--{})", view.name(), view.option())).collect::<Vec<_>>().join(" and those ")
        });
        self.rows.retain(|row| group.is_none_or(|group| is_below(&row.group, group)));
        Ok(())
    }

    /// The sums of all rows.
    pub(crate) fn total(&self) -> SampleSums {
        self.rows.iter().fold(SampleSums::default(), |mut sums, row| {
            sums.add(&row.sums);
            sums
        })
    }

    /// Sums by a key of the rows, those with the most bytes of the view first.
    pub(crate) fn by<K: core::hash::Hash + Eq + Ord + Clone>(
        &self,
        key: impl Fn(&ProfileRow) -> K,
    ) -> Vec<(K, SampleSums)> {
        let mut sums: HashMap<K, SampleSums> = HashMap::new();
        for row in &self.rows {
            sums.entry(key(row)).or_default().add(&row.sums);
        }
        let mut sums: Vec<_> = sums.into_iter().filter(|(_, sum)| sum.of(self.view).samples > 0).collect();
        let bytes = |sum: &SampleSums| sum.of(self.view).bytes;
        sums.sort_by(|(name, one), (other_name, other)| bytes(other).total_cmp(&bytes(one)).then(name.cmp(other_name)));
        sums
    }

    /// Returns the line of a stack that represents it in tables. This is the innermost line of
    /// generated code with a name, such as an interpreter's. Otherwise it is the innermost line
    /// outside allocation functions and the standard libraries of C++ and Rust.
    pub(crate) fn site(&self, row: &ProfileRow) -> SourceLine {
        site_of(&self.stacks[row.stack])
    }

    /// The line of [`site`](Profile::site), and the place that it is of.
    pub(crate) fn place_of_site(&self, row: &ProfileRow) -> Option<(&Place, &SourceLine)> {
        place_of_site(&self.stacks[row.stack])
    }

    /// Whether a function belongs to the standard library of C++ or Rust, or is a program's wrapper
    /// of `malloc`, such as `zmalloc` or `xstrdup`.
    pub(crate) fn is_standard(line: &SourceLine) -> bool {
        let source = &line.source;
        let is_source =
            source.starts_with("/rustc/") || source.contains("/library/alloc/src/") || source.contains("/include/c++/");
        let name = line.function.trim_start_matches('<');
        let starts = ["alloc::", "core::", "std::", "hashbrown::", "__gnu_cxx::"];
        // A function of C++ with template arguments begins with its result.
        let head = name.split(['(', '<']).next().unwrap_or_default();
        let lower = head.to_ascii_lowercase();
        let is_wrapper = ["malloc", "calloc", "realloc", "strdup"].iter().any(|part| lower.contains(part));
        let is_name = is_wrapper || starts.iter().any(|start| name.starts_with(start)) || head.contains(" std::");
        is_source || is_name || (line.function.starts_with('<') && name.contains(" as alloc::")) || is_allocator(line)
    }
}

/// Returns a sentence for each kind of data that did not fit into the command's memory or time.
fn notes_on_memory(symbols: &Symbols, unwinder: &Unwinder) -> Vec<String> {
    let memory = human(unwinder.limits().memory as u64);
    let mut notes = Vec::new();
    if symbols.without_lines > 0 {
        notes.push(format!(
            "{} places in the code have no file and line: their debug information takes more than {memory}, or {} s; \
             --memory allows more",
            symbols.without_lines,
            LINE_TIME.as_secs()
        ));
    }
    if symbols.has_others {
        notes.push(format!("places in the code whose names take more than {memory} are [other]; --memory allows more"));
    }
    if unwinder.without_room > 0 {
        notes.push(format!(
            "{} mappings of code have unwind information beyond {memory}: stacks may end there; --memory allows more",
            unwinder.without_room
        ));
    }
    notes
}

/// Returns the site of a stack, as [`Profile::site`] does.
pub(super) fn site_of(places: &[Place]) -> SourceLine {
    let line = place_of_site(places).map(|(_, line)| line.clone());
    line.unwrap_or_else(|| SourceLine { function: "[no stack]".into(), ..SourceLine::default() })
}

fn place_of_site(places: &[Place]) -> Option<(&Place, &SourceLine)> {
    let lines = || places.iter().flat_map(|place| place.lines.iter().map(move |line| (place, line)));
    let is_named = |place: &Place, line: &SourceLine| place.frame.file.is_none() && !line.function.starts_with('[');
    let generated = lines().find(|(place, line)| is_named(place, line));
    generated.or_else(|| lines().find(|(_, line)| !Profile::is_standard(line))).or_else(|| lines().next())
}

/// The places of a stack's frames.
pub(super) fn places_of(frames: &[CodePlace], symbols: &Symbols) -> Vec<Place> {
    without_allocator(frames.iter().map(|&frame| Place { frame, lines: symbols.lines(frame) }).collect())
}

/// Whether a path is of a group or of one below it.
fn is_below(path: &str, group: &str) -> bool {
    group == "/" || path.strip_prefix(group).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Leaves out the functions of the allocator at the inner end, where neap is part of the program.
fn without_allocator(mut places: Vec<Place>) -> Vec<Place> {
    let is_all = |place: &Place| place.lines.iter().all(is_allocator);
    let inner = places.iter().take_while(|place| is_all(place)).count();
    // A stack of nothing else stays.
    if inner == places.len() {
        return places;
    }
    places.drain(..inner);
    if let Some(first) = places.first_mut() {
        let inlined = first.lines.iter().take_while(|line| is_allocator(line)).count();
        if inlined > 0 {
            first.lines = first.lines[inlined..].into();
        }
    }
    places
}

const ALLOCATORS: [&str; 14] = [
    "malloc",
    "calloc",
    "realloc",
    "reallocarray",
    "memalign",
    "aligned_alloc",
    "posix_memalign",
    "valloc",
    "pvalloc",
    "__rust_alloc",
    "__rust_alloc_zeroed",
    "__rust_realloc",
    "__libc_malloc",
    "__libc_calloc",
];

/// Whether a function is one of allocation, or of neap.
fn is_allocator(line: &SourceLine) -> bool {
    let name = line.function.trim_start_matches('<');
    let crates = ["neap::", "neap_base::", "neap_os::", "neap_pages::", "neap_percpu::", "neap_groups::"];
    let more =
        ["neap_reclaim::", "neap_objects::", "neap_malloc::", "neap_c::", "operator new", "__rdl_", "__rustc::__r"];
    ALLOCATORS.contains(&name) || crates.iter().chain(&more).any(|start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(function: &str, source: &str) -> SourceLine {
        SourceLine { function: function.into(), source: source.into(), ..SourceLine::default() }
    }

    fn place(lines: &[SourceLine]) -> Place {
        Place { frame: CodePlace { file: None, address: 0 }, lines: lines.into() }
    }

    #[test]
    fn group_and_those_below_it_are_kept() {
        assert!(is_below("a/b", "a") && is_below("a", "a") && is_below("", "/") && is_below("x", "/"));
        assert!(!is_below("ab", "a") && !is_below("", "a"));
    }

    #[test]
    fn allocator_is_left_out_at_the_inner_end_only() {
        let places = vec![
            place(&[line("neap::process::allocate", "")]),
            place(&[line("malloc", ""), line("wrap", "w.c"), line("outer", "w.c")]),
            place(&[line("malloc", "")]),
        ];
        let left = without_allocator(places);
        assert_eq!((left.len(), left[0].lines.len(), &*left[0].lines[0].function), (2, 2, "wrap"));
        assert_eq!(without_allocator(vec![place(&[line("malloc", "")])]).len(), 1);
    }

    #[test]
    fn site_is_outside_of_standard_libraries() {
        for standard in [
            "alloc::raw_vec::RawVec<T,A>::grow_one",
            "<alloc::vec::Vec<T> as core::clone::Clone>::clone",
            "<T as alloc::slice::<impl [T]>::to_vec_in::ConvertVec>::to_vec",
            "void std::vector<int, std::allocator<int> >::_M_realloc_insert<int>(int&&)",
            "operator new(unsigned long)",
            "zmalloc_usable",
            "PyMem_Realloc",
        ] {
            assert!(Profile::is_standard(&line(standard, "")), "{standard}");
        }
        assert!(Profile::is_standard(&line("push", "/usr/include/c++/12/bits/stl_vector.h")));
        for own in ["main", "app::Foo::new", "<app::Foo as core::clone::Clone>::clone", "f(std::string)", "standard::x"]
        {
            assert!(!Profile::is_standard(&line(own, "src/main.rs")), "{own}");
        }
    }
}
