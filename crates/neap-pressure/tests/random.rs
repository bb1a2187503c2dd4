//! Random and mutated files never make a sensor panic, loop or contradict itself.
//!
//! Method: a tree of the table is taken, and some of its files are cut, doubled, garbled, replaced
//! by words of kernel files, refused or removed. Then a sensor looks twice, with other files the
//! second time. `NEAP_SEED` replays a seed that a failure printed. The long form takes minutes:
//! `cargo test --release -p neap-pressure --test random -- --ignored --nocapture`. `NEAP_INPUTS`
//! sets another number than ten million.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod made;

use std::panic::{AssertUnwindSafe, catch_unwind};

use made::table::TABLE;
use made::{Entry, Tree, explained};
use neap_pressure::{
    Errno, Estimator, FileKind, Fired, MemoryLevel, Position, Pressure, Ready, Sample, Sensor, Signal, StallWindow,
    Subject, Trigger, position,
};
use proptest::prelude::*;

/// Random numbers that a seed repeats (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 33) as usize % bound.max(1)
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

const WORDS: &[&[u8]] = &[
    b"max",
    b"0",
    b"1",
    b"-1",
    b"18446744073709551615",
    b"18446744073709551616",
    b"9223372036854771712",
    b"memory",
    b"0::/",
    b"4:memory:/",
    b"/..",
    b"/",
    b"//",
    b"\\040",
    b"\\777",
    b"\\",
    b" - ",
    b" ",
    b"\n",
    b":",
    b"\0",
    b"\xff",
    b"cgroup2",
    b"cgroup",
    b"rw,memory",
    b" (deleted)",
    b"MemTotal: 1 kB",
    b"MemAvailable: 99999999999999999999 kB",
    b"active_file 18446744073709551615",
    b"total_inactive_file 7",
    b"hierarchical_memory_limit 1",
    b"some avg10=9.99",
    b"total=1",
    b"max 18446744073709551615\noom_kill 1\n",
    b"CapEff:\tffffffffffffffff",
    b"Max address space 1 1 bytes",
    b"VmSize: 1 kB",
    b"MEMORY_PRESSURE_WATCH=/x.pressure\0",
    b"MEMORY_PRESSURE_WRITE=QQ==\0",
    b"25 22 0:22 /../.. /sys rw - cgroup2 x rw\n",
];

const EXTRA: &[&str] = &[
    "/proc/self/status",
    "/proc/self/limits",
    "/proc/self/environ",
    "/proc/pressure/memory",
    "/x.pressure",
    "/sys/fs/cgroup/a/memory.high",
    "/sys/fs/cgroup/a/memory.swap.max",
    "/sys/fs/cgroup/a/memory.pressure",
    "/sys/fs/cgroup/a/memory.events",
    "/sys/fs/cgroup/a/memory.events.local",
    "/sys/fs/cgroup/memory/x/memory.pressure_level",
    "/sys/fs/cgroup/memory/x/cgroup.event_control",
    "/sys/fs/cgroup/a/cgroup.controllers",
    "/sys/fs/cgroup/memory/x/memory.memsw.limit_in_bytes",
];

fn garbled(random: &mut Random, text: &mut Vec<u8>) {
    for _ in 0..=random.below(3) {
        let at = random.below(text.len() + 1);
        match random.below(7) {
            0 => text.truncate(at),
            1 => {
                let copy = text.clone();
                text.extend(copy);
            }
            2 => {
                let word = *random.of(WORDS);
                text.splice(at..at, word.iter().copied());
            }
            3 if at < text.len() => text[at] = random.next() as u8,
            4 if at < text.len() => text[at] ^= 1 << random.below(8),
            5 => *text = random.of(WORDS).to_vec(),
            _ => {
                let end = (at + random.below(9)).min(text.len());
                text.drain(at..end);
            }
        }
    }
    // Rarely longer than a line may be.
    if random.below(500) == 0 {
        let byte = *random.of(b"a/\n \\");
        text.extend(std::iter::repeat_n(byte, random.below(20_000)));
    }
}

fn mutate(random: &mut Random, tree: &mut Tree) {
    const ERRORS: [Errno; 6] = [Errno::ACCES, Errno::PERM, Errno::NODEV, Errno::IO, Errno::OPNOTSUPP, Errno(4095)];
    const KINDS: [FileKind; 4] = [FileKind::Stream, FileKind::Socket, FileKind::Directory, FileKind::Other];
    for _ in 0..=random.below(4) {
        let extra = random.below(3) == 0;
        let path = match tree.files.keys().nth(random.below(tree.files.len())) {
            Some(path) if !extra => path.clone(),
            _ => random.of(EXTRA).as_bytes().to_vec(),
        };
        let text = match tree.files.get(&path) {
            Some(Entry::Text(text) | Entry::ReadOnly(text, _)) => text.clone(),
            _ => Vec::new(),
        };
        let entry = match random.below(12) {
            0 => {
                tree.files.remove(&path);
                continue;
            }
            1 => Entry::Refused(*random.of(&ERRORS)),
            2 => Entry::Unreadable(*random.of(&ERRORS)),
            3 => Entry::ReadOnly(text, *random.of(&ERRORS)),
            4 => Entry::Special(*random.of(&KINDS)),
            _ => {
                let mut text = text;
                garbled(random, &mut text);
                Entry::Text(text)
            }
        };
        tree.files.insert(path, entry);
    }
}

/// What holds for every report.
fn check(sensor: &Sensor) {
    let report = sensor.report();
    let least = report.levels().iter().filter_map(MemoryLevel::headroom).min();
    let headroom = report.wall().and_then(MemoryLevel::headroom);
    if report.unlisted() == 0 {
        assert_eq!(headroom, least, "the wall is the level with the least headroom");
        assert_eq!(report.limit().and_then(|level| level.limit), report.levels().iter().filter_map(|l| l.limit).min());
    }
    for level in report.levels() {
        assert!(level.used() <= level.usage);
        if let (Some(limit), Some(headroom)) = (level.limit, level.headroom()) {
            assert!(headroom <= limit, "{level:?}");
        }
        assert!(report.directory().starts_with(report.path(level)) || report.path(level) == b"/", "{level:?}");
    }
    if let Some(headroom) = headroom {
        assert!(report.room_to_grow() <= headroom);
    }
    assert!(report.signals().count() == 8);
    let text = explained(report);
    assert!(text.len() < 100_000 && !text.contains(|c: char| c.is_control() && c != '\n'), "{text}");
}

/// Returns the seed of this run.
fn seed() -> u64 {
    let given = std::env::var("NEAP_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_nanos() as u64 | 1
    })
}

fn run(inputs: u64) {
    let seed = seed();
    println!("NEAP_SEED={seed}");
    let trees: Vec<Tree> = TABLE.iter().map(made::table::Case::tree).collect();
    let mut random = Random(seed.max(1));
    let mut sensor = Box::new(Sensor::new(Subject::Own));
    for input in 0..inputs / 2 {
        let mut tree = random.of(&trees).clone();
        tree.step = if random.below(8) == 0 { 1 + random.below(40) } else { 0 };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            mutate(&mut random, &mut tree);
            let report = sensor.survey(&tree);
            let mut trigger = Trigger::arm(&tree, report, &Signal::NOTIFYING, StallWindow::DEFAULT);
            assert_eq!(trigger.states().count(), Signal::NOTIFYING.len());
            let before = trigger.signal();
            let fired = trigger.fired(&tree, Ready(random.next() as i16));
            assert!(before.is_some() || fired == Fired::Gone);
            assert_eq!(trigger.signal(), before.filter(|_| fired != Fired::Gone));
            check(&sensor);
            mutate(&mut random, &mut tree);
            sensor.look(&tree);
            check(&sensor);
        }));
        if let Err(panic) = outcome {
            println!("input {input}, NEAP_SEED={seed}: {tree:?}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn sensor_survives_random_files() {
    run(20_000);
}

#[test]
#[ignore = "takes minutes"]
fn sensor_survives_ten_million_random_files() {
    let given = std::env::var("NEAP_INPUTS").ok().and_then(|text| text.parse().ok());
    run(given.unwrap_or(10_000_000));
}

/// The path from one group to another as the kernel shows it to a namespace with root `from`.
fn relative(from: &[usize], to: &[usize]) -> String {
    let common = from.iter().zip(to).take_while(|(a, b)| a == b).count();
    let ups = "/..".repeat(from.len() - common);
    let names: String = to[common..].iter().map(|name| format!("/g{name}")).collect();
    if ups.is_empty() && names.is_empty() { "/".into() } else { ups + &names }
}

proptest! {
    /// Groups are lists of names from the real root. A position is right if it names the group, or
    /// names nothing where the names are not shown.
    #[test]
    fn positions_agree_with_the_kernels_paths(
        namespace in prop::collection::vec(0..2_usize, 0..4),
        root in prop::collection::vec(0..2_usize, 0..4),
        group in prop::collection::vec(0..2_usize, 0..5),
    ) {
        let (shown_root, shown_group) = (relative(&namespace, &root), relative(&namespace, &group));
        let below = group.starts_with(&root);
        match position(shown_root.as_bytes(), shown_group.as_bytes()) {
            Position::Below(path) => {
                prop_assert!(below);
                let rest: String = group[root.len()..].iter().map(|name| format!("/g{name}")).collect();
                prop_assert_eq!(path, rest.as_bytes());
            }
            Position::Unnamed => {
                prop_assert!(below);
                // Names between the mount's root and the namespace's are unknown.
                prop_assert!(namespace.starts_with(&root) && root.len() < namespace.len());
            }
            Position::Outside => prop_assert!(!below),
        }
    }

    #[test]
    fn any_path_has_a_position(root in "[/.a]{0,12}", path in "[/.a]{0,12}") {
        if let Position::Below(rest) = position(root.as_bytes(), path.as_bytes()) {
            prop_assert!(path.contains(std::str::from_utf8(rest).unwrap()));
        }
    }

    #[test]
    fn estimator_and_levels_take_any_numbers(
        samples in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..40),
    ) {
        let mut estimator = Estimator::new();
        let mut level = Pressure::Steady;
        for (at_ms, headroom, limit) in samples {
            estimator.add(Sample { at_ms, headroom, limit });
            let time = estimator.time_to_wall();
            let next = level.next(headroom, limit, time);
            // A level changes at once for the worse.
            prop_assert!(next >= Pressure::of(headroom, limit, time));
            prop_assert_eq!(next.next(headroom, limit, time), next);
            level = next;
        }
    }
}
