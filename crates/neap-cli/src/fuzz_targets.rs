//! Targets of libFuzzer for the readers of data that other processes write. libFuzzer prefers
//! inputs that reach new code.
//!
//! `cargo xtask fuzz` builds the unit tests with the engine and with counters of all branches, and
//! runs the ignored test here. The variable `NEAP_FUZZ` names the target:
//!
//! | target | input |
//! |---|---|
//! | `page` | the text of a page of numbers |
//! | `report` | choices of a mutated page or report |
//! | `samples` | choices of a mutated area of samples |
//! | `profile` | a profile in the format of pprof, not compressed |
//! | `trace` | a trace of the laboratory |
//!
//! Choices are the random numbers ([`Random`]) by which the tests mutate data. A target aborts on a
//! failure. Then libFuzzer prints the input and writes it to a file.

use core::ffi::{CStr, c_char, c_int};
use std::cell::OnceCell;
use std::ffi::CString;

use crate::look::foreign::tests::first_hostile;
use crate::look::hostile_tests::{self, Random};
use crate::profile;

unsafe extern "C" {
    /// Runs libFuzzer, which calls `target` with inputs. The arguments are libFuzzer's own.
    fn LLVMFuzzerRunDriver(
        count: *mut c_int,
        words: *mut *mut *mut c_char,
        target: unsafe extern "C" fn(*const u8, usize) -> c_int,
    ) -> c_int;
    fn LLVMFuzzerTestOneInput(data: *const u8, size: usize) -> c_int;
}

/// Reads an input, and returns the texts that a command would show. The caller checks the texts.
type Target = Box<dyn Fn(&[u8]) -> Vec<String>>;

fn target(name: &str) -> Target {
    let refused = |error: anyhow::Error| vec![crate::look::foreign::escaped(format!("{error:#}").as_bytes())];
    match name {
        "page" => Box::new(move |data| {
            let page = crate::look::stat_reader::tests::bytes(8, data);
            crate::stat::tests::show_page(page).map_or_else(refused, Vec::from)
        }),
        "report" => {
            let corpus = hostile_tests::Corpus::new();
            Box::new(move |data| corpus.show(&mut Random::of_bytes(data)).map_or_else(refused, Vec::from))
        }
        "samples" => {
            let corpus = profile::mutated_tests::Corpus::new();
            Box::new(move |data| corpus.show(&mut Random::of_bytes(data)).map_or_else(refused, |text| vec![text]))
        }
        "profile" => {
            Box::new(move |data| profile::mutated_tests::show_saved(data).map_or_else(refused, |text| vec![text]))
        }
        // A trace is read in this process, from the user's own file: its errors have no escapes.
        "trace" => Box::new(|data| {
            let _ = neap_sim::trace::Trace::read(data).and_then(|trace| trace.setup());
            Vec::new()
        }),
        other => panic!("NEAP_FUZZ={other}: the targets are page, report, samples, profile and trace"),
    }
}

thread_local! {
    static TARGET: OnceCell<Target> = const { OnceCell::new() };
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    TARGET.with(|cell| {
        let show = cell.get_or_init(|| target(&std::env::var("NEAP_FUZZ").unwrap_or_default()));
        for text in show(data) {
            // The script of a flame graph has tabs.
            assert_eq!(first_hostile(&text, &['\n', '\t']), None, "{text}");
        }
    });
});

/// Returns a valid input of a target. `None` if libFuzzer finds one by itself.
fn seed(target: &str) -> Option<Vec<u8>> {
    match target {
        "page" => Some(hostile_tests::PAGE.into()),
        "profile" => Some(profile::mutated_tests::good_message()),
        "trace" => Some(trace()),
        _ => None,
    }
}

/// A trace of two CPUs: a block is allocated on one, and freed on the other.
fn trace() -> Vec<u8> {
    let mut bytes = [&b"neaptrc2"[..], &[0; 4], &[2, 0, 0, 0, 2, 0, 0, 0], &[0; 4], &[2, 0, 12]].concat();
    bytes.resize(64, 0);
    for (at, cpu, what) in [(1_u64, 0, 1_u32), (2, 1, 1 | 1 << 31)] {
        bytes.extend((at << 16 | cpu).to_le_bytes());
        bytes.extend(8_u32.to_le_bytes());
        bytes.extend(what.to_le_bytes());
    }
    bytes
}

#[test]
fn the_seed_of_traces_is_a_trace() {
    assert_eq!(neap_sim::trace::Trace::read(&trace()).unwrap().events.len(), 2);
}

/// The current folder is the corpus. The words of `NEAP_FUZZ_WORDS`, separated by blanks, are the
/// engine's arguments.
#[test]
#[ignore = "`cargo xtask fuzz` runs it"]
fn fuzz() {
    if let Some(seed) = seed(&std::env::var("NEAP_FUZZ").unwrap_or_default()) {
        std::fs::write("seed", seed).unwrap();
    }
    let words = std::env::var("NEAP_FUZZ_WORDS").unwrap_or_default();
    let words = ["fuzz"].into_iter().chain(words.split_whitespace());
    let words: Vec<CString> = words.map(|word| CString::new(word).unwrap()).collect();
    let mut words: Vec<*mut c_char> = words.iter().map(|word| CStr::as_ptr(word).cast_mut()).collect();
    let mut count = words.len() as c_int;
    words.push(core::ptr::null_mut());
    // SAFETY: `count` is a live local. `words` holds pointers to `count` C strings that outlive the
    // call, and then a null. The engine calls the target in this thread.
    let status = unsafe { LLVMFuzzerRunDriver(&mut count, &mut words.as_mut_ptr(), LLVMFuzzerTestOneInput) };
    assert_eq!(status, 0);
}
