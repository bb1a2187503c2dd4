//! Targets of a fuzzer for the readers of data that other processes write, and their committed
//! inputs.
//!
//! | target | input |
//! |---|---|
//! | `page` | the text of a page of numbers |
//! | `report` | choices of a mutated page or report |
//! | `samples` | choices of a mutated area of samples |
//! | `profile` | a profile in the format of pprof, not compressed |
//! | `trace` | a trace of the laboratory |
//!
//! Choices are the random numbers ([`Random`]) by which the tests mutate data. `tests/corpus` has
//! inputs for each target, at most [`LONGEST`] bytes each: valid ones (`good...`), and ones that
//! readers must refuse or cut. `cargo xtask fuzz` begins with them. An input that made a target
//! fail belongs there, too.

use std::fs;
use std::path::PathBuf;

use crate::look::foreign::tests::first_hostile;
use crate::look::hostile_tests::{self, Random};
use crate::profile;

const TARGETS: [&str; 5] = ["page", "report", "samples", "profile", "trace"];

/// Most bytes of a committed input.
const LONGEST: usize = 2 << 10;

/// Reads an input, and returns the texts that a command would show. The caller checks the texts.
pub(crate) type Target = Box<dyn Fn(&[u8]) -> Vec<String>>;

pub(crate) fn target(name: &str) -> Target {
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

/// Gives an input to a target, and checks the texts.
pub(crate) fn check(target: &Target, data: &[u8]) {
    for text in target(data) {
        // The script of a flame graph has tabs.
        assert_eq!(first_hostile(&text, &['\n', '\t']), None, "{text}");
    }
}

/// The committed inputs of a target.
fn inputs(target: &str) -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn committed_inputs_of_each_target_are_shown_or_refused() {
    for name in TARGETS {
        let (target, inputs) = (target(name), inputs(name));
        assert!(inputs.len() >= 5, "{name} has {} inputs", inputs.len());
        for input in inputs {
            println!("{}", input.display());
            let data = fs::read(&input).unwrap();
            assert!(data.len() <= LONGEST, "{} bytes", data.len());
            check(&target, &data);
        }
    }
}

#[test]
fn good_inputs_of_the_corpus_are_read() {
    let good = |target: &str| {
        let is_good = |input: &PathBuf| input.file_name().unwrap().to_string_lossy().starts_with("good");
        let good: Vec<Vec<u8>> =
            inputs(target).iter().filter(|input| is_good(input)).map(|input| fs::read(input).unwrap()).collect();
        assert!(!good.is_empty(), "{target}");
        good
    };
    for page in good("page") {
        crate::stat::tests::show_page(crate::look::stat_reader::tests::bytes(8, &page)).unwrap();
    }
    for message in good("profile") {
        assert!(profile::mutated_tests::show_saved(&message).unwrap().contains("main"));
    }
    for trace in good("trace") {
        assert_eq!(neap_sim::trace::Trace::read(&trace).unwrap().events.len(), 2);
    }
}
