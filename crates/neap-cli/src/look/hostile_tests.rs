//! Tests with mutated pages and reports, as a hostile process may write them. A command must
//! neither panic nor loop forever. It shows no character that steers a terminal, and keeps no more
//! bytes than the allowance.
//!
//! The corpus is one good page, and good reports of each kind. Each input is the page or the
//! reports of one kind, with a few mutations. The tests print the seed. `NEAP_SEED` replays a seed,
//! and `NEAP_INPUTS` sets the number of inputs of the long run.

use core::time::Duration;
use std::process::Command;

use anyhow::Result;

use crate::look::allowance::Allowance;
use crate::look::foreign::tests::first_hostile;
use crate::look::stat_reader;
use crate::process::parse_kib;
use crate::{chunks, groups, reconcile, shrinkers, stat};

/// Most bytes that one input may keep (`KEPT`) and show (`SHOWN`). A report has 64 KiB.
const KEPT: usize = 4 << 20;
const SHOWN: usize = 32 << 20;
/// Most resident bytes. Each test holds the shown text in memory twice.
const MOST_RESIDENT: u64 = 128 << 20;

/// A generator of numbers. It first returns numbers made of given bytes, and then those of
/// xorshift.
pub(crate) struct Random {
    state: u64,
    bytes: std::vec::IntoIter<u8>,
}

impl Random {
    /// A generator for one input of a run.
    pub(crate) fn of_input(seed: u64, input: u64) -> Random {
        Random { state: (seed + input).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, bytes: Vec::new().into_iter() }
    }

    /// A generator that first returns the numbers in `bytes`, two bytes each.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Random {
        Random { bytes: Vec::from(bytes).into_iter(), ..Random::of_input(1, bytes.len() as u64) }
    }

    pub(crate) fn next(&mut self) -> u64 {
        if let [Some(low), Some(high)] = [self.bytes.next(), self.bytes.next()] {
            return u16::from_le_bytes([low, high]).into();
        }
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A word that is likely to be wrong somewhere.
    pub(crate) fn word(&mut self) -> u64 {
        let sizes =
            [0, 1, 2, 3, 16, 64, 4095, 4096, 8192, 1 << 24, 1 << 30, 1 << 31, 1 << 40, 1 << 47, 1 << 63, u64::MAX];
        match self.below(4) {
            0 => self.next(),
            1 => self.next() % 100,
            2 => u64::from_ne_bytes(*self.pick(&[
                b"\x1b[31mx\0\0",
                b"\xc2\x9b2J\x7f\xff\xd0/",
                b"\xe2\x80\xae\xe2\x80\xa8a\n",
            ])),
            _ => self.pick(&sizes).wrapping_add(self.pick(&[0, 0, 1, u64::MAX])),
        }
    }

    fn mutate_words(&mut self, words: &mut Vec<u64>) {
        for _ in 0..=self.below(6) {
            let (at, other) = (self.below(words.len()), self.below(words.len()));
            match self.below(8) {
                0 => words.truncate(at.max(1)),
                1 => words.swap(at, other),
                2 => words[at] ^= 1 << self.below(64),
                3 => words.extend_from_within(at..),
                _ => words[at] = self.word(),
            }
            words.truncate(8192);
        }
        // Every report that is read from a page is of this length.
        words.resize(8192, 0);
    }

    pub(crate) fn mutate_bytes(&mut self, bytes: &mut Vec<u8>) {
        let tokens = [
            "\"",
            "\\u009b",
            "\u{9b}",
            "\u{7f}",
            "\u{202e}",
            "\u{2028}",
            "[",
            "]",
            "{",
            "}",
            ",",
            ":",
            "-1",
            "1e999",
            "null",
            "18446744073709551615",
            "\"a\":",
            "\\",
            "\u{1b}[2J",
        ];
        for _ in 0..=self.below(6) {
            let (at, other) = (self.below(bytes.len()), self.below(bytes.len()));
            match self.below(8) {
                0 => bytes.truncate(at.max(1)),
                1 => bytes.swap(at, other),
                2 => bytes[at] ^= 1 << self.below(8),
                3 => drop(bytes.drain(at.min(other)..at.max(other))),
                4 => bytes[at] = self.next() as u8,
                _ => drop(bytes.splice(at..at, self.pick(&tokens).bytes())),
            }
            if bytes.is_empty() {
                bytes.push(0);
            }
        }
    }
}

/// A page that has every part.
pub(crate) const PAGE: &str = r#"{"version":"9.9","mode":{"slots":"rseq","why":"it works","isolated_cpus":[3,4],"background":"awake","interval_ms":250,"page_size":4096,"huge":true},"settings":{"limit":"64m"},"container":{"limit":5,"used":4,"heap_limit":3,"looks":2,"passed":1},"bytes":{"mapped":9,"used":8,"cached":7,"free_resident":6,"tables":5,"unaccounted":-4},"per_cpu":{"used":5,"free":6},"groups":{"live":2},"pages":{"managed":9,"free":8,"budget":500,"watermarks":{"min":1,"low":2,"high":3}},"lists":{"highs":8},"released":{"pages":1,"calls":2,"failures":3},"nodes":[{"node":0,"used":70},{"node":1,"misses":17}],"classes":[{"size":16,"slabs":3,"objects":100,"in_slabs":4,"in_barn":5,"in_slots":6}],"cpus":[{"cpu":1,"kind":"rseq","cached_bytes":2048,"stacks":2}],"mappings":[{"start":4096,"length":8192,"of":"Arena"}],"truncated":true}"#;

/// The good inputs.
pub(crate) struct Corpus {
    page: Vec<u8>,
    groups: [Vec<u64>; 3],
    shrinkers: Vec<u64>,
    chunks: Vec<u64>,
    map: Vec<u64>,
}

impl Corpus {
    pub(crate) fn new() -> Corpus {
        let tree = [(1, 0, ""), (2, 1, "tenant"), (3, 2, "acme"), (4, 2, "beta")];
        let [left, waiting] = groups::tests::other_words();
        Corpus {
            page: stat_reader::tests::bytes(8, PAGE),
            groups: [groups::tests::words(&tree, 1 << 30), left, waiting],
            shrinkers: shrinkers::tests::words(),
            chunks: chunks::tests::words(),
            map: reconcile::tests::words(),
        }
    }

    /// Reads and shows one mutated input.
    pub(crate) fn show(&self, random: &mut Random) -> Result<[String; 2]> {
        let allowance = &Allowance::of_bytes(KEPT, Duration::from_secs(1000));
        let mutated = |random: &mut Random, words: &Vec<u64>| {
            let mut words = words.clone();
            random.mutate_words(&mut words);
            words
        };
        match random.below(16) {
            0..6 => {
                let mut page = self.page.clone();
                // The header is mutated more rarely than the text: most such pages are refused.
                let start = if random.below(4) == 0 { 0 } else { self.page.len() - PAGE.len() };
                let mut rest = page.split_off(start);
                random.mutate_bytes(&mut rest);
                page.extend(rest);
                if start > 0 {
                    let length = (page.len() - start) as u32;
                    page[20..24].copy_from_slice(&length.to_ne_bytes());
                }
                stat::tests::show_page(page)
            }
            6..10 => {
                let reports = self.groups.each_ref().map(|words| mutated(random, words));
                groups::tests::show_reports(&reports, allowance)
            }
            10..13 => shrinkers::tests::show_report(&mutated(random, &self.shrinkers), allowance),
            13..15 => chunks::tests::show_report(&mutated(random, &self.chunks), allowance),
            _ => reconcile::tests::show_report(&mutated(random, &self.map), allowance),
        }
    }
}

/// Shows inputs, and returns how many were read, and how many were refused.
fn show(seed: u64, inputs: u64) -> [u64; 2] {
    println!("NEAP_SEED={seed}");
    let (corpus, mut counts) = (Corpus::new(), [0; 2]);
    for input in 0..inputs {
        let mut random = Random::of_input(seed, input);
        let texts = match corpus.show(&mut random) {
            Ok(texts) => texts.to_vec(),
            Err(error) => vec![crate::look::foreign::escaped(format!("{error:#}").as_bytes())],
        };
        counts[usize::from(texts.len() == 1)] += 1;
        for text in texts {
            assert!(text.len() <= SHOWN, "{} bytes of input {input}", text.len());
            assert_eq!(first_hostile(&text, &['\n']), None, "input {input}: {text}");
        }
    }
    counts
}

/// The seed that the environment names, or another one at each call.
pub(crate) fn seed() -> u64 {
    let clock = u64::from(std::process::id()) << 20 ^ stat_reader::monotonic();
    number("NEAP_SEED").unwrap_or(clock)
}

pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs an ignored test with a few inputs in a new process, to measure the memory of this test
/// alone. In this process it would disturb other tests, which count page faults.
pub(crate) fn run_apart(test: &str, inputs: u64) {
    let seed = seed().to_string();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command.env("NEAP_SEED", seed).env("NEAP_INPUTS", inputs.to_string());
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    assert!(output.status.success() && said.contains("inputs read"), "{said}");
}

/// Asserts that the peak of resident bytes of this process is below `most`.
pub(crate) fn assert_resident_below(most: u64) {
    let peak = parse_kib(&std::fs::read("/proc/self/status").unwrap(), b"VmHWM:").unwrap();
    assert!(peak << 10 < most, "{peak} KiB were resident");
}

#[test]
fn mutated_pages_and_reports_are_shown_or_refused() {
    run_apart("look::hostile_tests::many_mutated_pages_and_reports_are_shown_or_refused", 12_000);
}

#[test]
#[ignore = "takes long: ten million inputs"]
fn many_mutated_pages_and_reports_are_shown_or_refused() {
    let [read, refused] = show(number("NEAP_SEED").unwrap_or(1), number("NEAP_INPUTS").unwrap_or(10_000_000));
    println!("{read} inputs read, {refused} refused");
    assert!(read > 100 && refused > 100);
    assert_resident_below(MOST_RESIDENT);
}
