//! Tests copy a stack of their own thread, unwind it, name its frames, and write it in every
//! format.

use core::time::Duration;
use std::arch::asm;
use std::hint::black_box;
use std::io::Read;
use std::sync::Arc;

use flate2::read::GzDecoder;
use prost::Message;

use super::area::StackCopy;
use super::area_tests::{Writer, Written};
use super::code_source::CodeSource;
use super::limits::ProfileLimits;
use super::pprof::PprofProfile;
use super::resolved::{ChosenSamples, Profile, Subjected};
use super::session::Session;
use super::sums::ProfileView;
use super::symbols::Symbols;
use super::unwind::Unwinder;
use super::{folded, html, pprof, top_table};
use crate::look::handle::ProcessHandle;

/// The registers here, and a copy of the stack from here on.
#[inline(always)]
fn copied() -> ([u64; 3], Vec<u8>) {
    let (instruction, stack, frame): (u64, u64, u64);
    // SAFETY: the assembly only reads three registers.
    unsafe {
        // instruction := address of the next instruction
        // stack := rsp; frame := rbp
        //
        // Registers: instruction, stack, frame: the results.
        asm!("lea {}, [rip]", "mov {}, rsp", "mov {}, rbp", out(reg) instruction, out(reg) stack, out(reg) frame);
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().filter_map(|line| line.split_once(' ')?.0.split_once('-'));
    let mut ranges = ranges.map(|(start, end)| [start, end].map(|hex| u64::from_str_radix(hex, 16).unwrap()));
    let end = ranges.find(|[start, end]| (*start..*end).contains(&stack)).unwrap()[1];
    let length = (end - stack).min(32 << 10) as usize;
    // SAFETY: the bytes are on this thread's own stack. They are mapped up to `end`, and no other
    // thread writes them.
    let bytes = unsafe { core::slice::from_raw_parts(stack as *const u8, length) }.to_vec();
    ([instruction, stack, frame], bytes)
}

#[inline(never)]
fn inner_function(depth: u32) -> ([u64; 3], Vec<u8>) {
    let copy = copied();
    assert!(black_box(depth) < 100);
    copy
}

#[inline(never)]
fn middle_function(depth: u32) -> ([u64; 3], Vec<u8>) {
    let copy = inner_function(black_box(depth) + 1);
    assert!(black_box(depth) < 100);
    copy
}

#[inline(never)]
fn outer_function() -> ([u64; 3], Vec<u8>) {
    let copy = middle_function(black_box(1));
    assert!(!black_box(&copy).1.is_empty());
    copy
}

fn own() -> Arc<ProcessHandle> {
    Arc::new(ProcessHandle::open(std::process::id() as i32).unwrap())
}

#[test]
fn functions_of_a_copied_stack_are_found_in_order() {
    let ([instruction, stack_pointer, frame_pointer], bytes) = outer_function();
    let mut unwinder = Unwinder::new(CodeSource::Process(own()), ProfileLimits::OWN);
    let copy = StackCopy { instruction, stack_pointer, frame_pointer, bytes: &bytes };
    let callers = unwinder.callers(&copy);
    let mut symbols = Symbols::of(&unwinder);
    symbols.resolve(callers.frames.iter().copied(), Duration::ZERO, &mut || true);
    let lines: Vec<_> = callers.frames.iter().flat_map(|&frame| symbols.lines(frame).to_vec()).collect();
    let names: Vec<&str> = lines.iter().map(|line| &*line.function).collect();
    let at = |name: &str| names.iter().position(|known| known.ends_with(name));
    let found = ["inner_function", "middle_function", "outer_function"].map(at);
    assert!(found.is_sorted() && found.iter().all(Option::is_some), "{names:?}");
    let line = &lines[found[1].unwrap()];
    assert!(line.source.ends_with("unwind_tests.rs") && line.line > 20, "{line:?}");
    assert!(callers.is_complete, "{names:?}");
    let start = names.last().unwrap();
    assert!(["clone3", "__clone3", "clone", "_start"].iter().any(|name| start.contains(name)), "{names:?}");
    // A truncated stack ends early, and counts as incomplete.
    let callers = unwinder.callers(&StackCopy { bytes: &bytes[..64], ..copy });
    assert!(!callers.is_complete);
    // Registers with invalid addresses lead to no caller.
    for stack_pointer in [0, u64::MAX, u64::MAX - 7] {
        let callers = unwinder.callers(&StackCopy { stack_pointer, instruction: 1, ..copy });
        assert!(callers.frames.is_empty() && !callers.is_complete);
    }
}

/// A profile of two sites of this test: one with two samples, and one with a sample that was freed.
fn profile(view: ProfileView) -> Profile {
    let (registers, stack) = outer_function();
    let (other_registers, other_stack) = middle_function(black_box(7));
    let mut writer = Writer::new();
    // SAFETY: `gettid` takes no argument and cannot fail.
    let thread = unsafe { libc::gettid() } as u32;
    writer.alloc(Written { size: 50_000, registers, stack: &stack, thread });
    writer.alloc(Written { size: 30_000, registers, stack: &stack, thread });
    let freed = writer.alloc(Written { size: 90_000, registers: other_registers, stack: &other_stack, thread });
    writer.free(freed);
    let session = Session::begin(&own(), &writer.file, 0, ProfileLimits::OWN).unwrap();
    let of = Subjected { pid: 7, name: "it".into(), seconds: 1.5, in_use: Some(1_000_000) };
    Profile::of(&session, of, view, ChosenSamples::default())
}

#[test]
fn sums_by_site_are_those_of_the_samples() {
    for (view, expected) in [
        (ProfileView::Live, [80_000.0, 0.0]),
        (ProfileView::Allocated, [80_000.0, 90_000.0]),
        (ProfileView::Peak, [80_000.0, 90_000.0]),
    ] {
        let profile = profile(view);
        let bytes = |text: &str| -> f64 {
            let with = |row: &&super::resolved::ProfileRow| {
                let outer = profile.stacks[row.stack]
                    .iter()
                    .any(|place| place.lines.iter().any(|line| line.function.ends_with("outer_function")));
                outer == (text == "outer")
            };
            profile.rows.iter().filter(with).map(|row| row.sums.of(view).bytes).sum()
        };
        for (text, expected) in ["outer", "other"].iter().zip(expected) {
            let bytes = bytes(text);
            assert!((bytes - expected).abs() < 1.0, "{view:?} {text}: {bytes} for {expected}");
        }
        let mut table = Vec::new();
        top_table::write(&mut table, &profile).unwrap();
        let table = String::from_utf8(table).unwrap();
        assert!(table.contains("copied (profile/unwind_tests.rs:"), "{table}");
    }
}

#[test]
fn pprof_is_parsed_back_with_names_lines_and_mappings() {
    let mut file = Vec::new();
    pprof::write(&mut file, &profile(ProfileView::Live)).unwrap();
    let mut bytes = Vec::new();
    GzDecoder::new(&file[..]).read_to_end(&mut bytes).unwrap();
    let read = PprofProfile::decode(&bytes[..]).unwrap();
    let text = |at: i64| read.strings[at as usize].as_str();
    assert_eq!(text(0), "");
    let kinds: Vec<_> = read.sample_types.iter().map(|kind| (text(kind.kind), text(kind.unit))).collect();
    assert_eq!(
        kinds,
        [
            ("alloc_objects", "count"),
            ("alloc_space", "bytes"),
            ("inuse_objects", "count"),
            ("inuse_space", "bytes"),
            ("freed_objects", "count"),
            ("freed_lifetime", "microseconds")
        ]
    );
    let sums = [0, 1, 2, 3, 4].map(|at| read.samples.iter().map(|sample| sample.values[at]).sum::<i64>());
    assert_eq!(sums, [3, 170_000, 2, 80_000, 1]);
    assert_eq!((text(read.default_sample_type), read.period), ("inuse_space", 1000));
    let label = &read.samples[0].labels[0];
    assert!(text(label.key) == "thread" && !text(label.text).is_empty());
    for sample in &read.samples {
        let locations = sample.location_ids.iter().map(|&id| &read.locations[id as usize - 1]);
        for location in locations.filter(|location| location.mapping_id != 0) {
            let mapping = &read.mappings[location.mapping_id as usize - 1];
            assert!((mapping.start..mapping.limit).contains(&location.address), "{location:?} {mapping:?}");
        }
    }
    let own = read.mappings.iter().find(|mapping| text(mapping.file).contains("neap")).unwrap();
    assert!(own.has_functions);
    let function = read.functions.iter().find(|function| text(function.name).ends_with("middle_function")).unwrap();
    assert!(text(function.file).ends_with("unwind_tests.rs"));
    let lines = read.locations.iter().flat_map(|location| &location.lines);
    assert!(lines.filter(|line| line.function_id == function.id).all(|line| line.line > 20));
}

#[test]
fn folded_stacks_and_pages_have_the_functions() {
    let profile = profile(ProfileView::Peak);
    let lines = folded::lines(&profile);
    let long = lines.iter().find(|line| line.contains("outer_function")).unwrap();
    assert!(long.contains("middle_function;") && long.ends_with(" 80000"), "{long}");
    let mut graph = Vec::new();
    folded::flame_graph(&mut graph, &profile).unwrap();
    let graph = String::from_utf8(graph).unwrap();
    assert!(graph.contains("<svg") && graph.contains("outer_function"));
    let mut page = Vec::new();
    html::write(&mut page, &profile).unwrap();
    let page = String::from_utf8(page).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("<svg") && page.contains("unwind_tests.rs"));
    let loads =
        |mark: &str| page.match_indices(mark).filter(|(at, _)| page[at + mark.len()..].starts_with("http")).count();
    assert_eq!(loads("src=\"") + loads("href=\""), 0, "nothing is loaded");
    let empty = Profile { rows: Vec::new(), ..profile };
    let mut graph = Vec::new();
    folded::flame_graph(&mut graph, &empty).unwrap();
    assert!(String::from_utf8(graph).unwrap().contains("no samples"));
    assert!(html::write(&mut Vec::new(), &empty).is_ok() && top_table::write(&mut Vec::new(), &empty).is_ok());
}

#[test]
fn sessions_go_on_where_they_stopped() {
    let (registers, stack) = outer_function();
    let mut writer = Writer::new();
    let mut session = Session::begin(&own(), &writer.file, 0, ProfileLimits::OWN).unwrap();
    let number = writer.alloc(Written { size: 5000, registers, stack: &stack, thread: 1 });
    session.poll().unwrap();
    assert_eq!(session.collector.live_total().samples, 1);
    writer.free(number);
    std::thread::sleep(Duration::from_millis(1));
    session.poll().unwrap();
    assert_eq!((session.collector.live_total().samples, session.collector.stacks[1].samples), (0, 1));
    // Sampling is switched off by another command.
    writer.put(0, &[0; 8]);
    session.poll().unwrap();
    session.reconcile().unwrap();
    assert!(session.is_over && session.collector.stacks[1].samples == 1);
}
