//! `neap profile`, `neap top --profile` and `neap leaks` on a process of another user that made its
//! samples, its files and its names of code up: memory and time are bounded, and no text of it
//! steers a terminal.
//!
//! Method: as in `made_up`. The process gives root's rights up, so these tests need them. Each role
//! is profiled in some of the formats; the test that takes long profiles it in more.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]
#![cfg(target_arch = "x86_64")]

mod made_up;

use std::fs::{self, File, Permissions};
use std::mem::{offset_of, size_of};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use made_up::{END, HOSTILE, Hostile, NUMBERS, Page, ROLE, group, groups, say};
use neap_base::profile_area::{
    ALLOC, AREA_BYTES, AllocRecord, AreaHeader, BLOCK_BYTES, CELL_BYTES, CELL_COUNT, CELLS_AT, FILE_OFFSET, FORMAT,
    MAGIC, MOST_STACK, RING_AT, RING_BYTES, SLOT_COUNT, SLOTS_AT, Slot,
};

const GROUPS: u32 = 2;
const UNKNOWN: u32 = 4;
/// Another user.
const OTHER_USER: u32 = 65_534;
/// Address of the code that stacks lead through, and its bytes.
const TEXT: u64 = 0x7000_0000_0000;
const TEXT_BYTES: u64 = 1 << 20;

/// A large profile takes most memory where a format has all of it at once.
const LARGEST: &[&str] = &["--json", "heap.html"];
/// `neap top --profile` in place of `neap profile`.
const TOP: &str = "top";
const FORMATS: &[&str] = &["", "--json", "heap.pb.gz", "heap.folded", "heap.svg", "heap.html"];

fn folder() -> PathBuf {
    std::env::temp_dir().join(format!("neap-hostile-{}", std::process::id()))
}

/// Numbers that look random (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// A section of an ELF file: its name, type and contents.
struct Section(&'static str, u32, Vec<u8>);

/// An ELF file of a code segment and of sections.
fn elf(sections: &[Section]) -> Vec<u8> {
    let (head, segment, each) = (64, 56, 64);
    let mut names = vec![0_u8];
    let mut places = Vec::new();
    let mut contents: Vec<u8> = Vec::new();
    for Section(name, _, bytes) in sections {
        places.push((names.len() as u32, (head + segment + contents.len()) as u64));
        names.extend(name.as_bytes());
        names.push(0);
        contents.extend(bytes);
    }
    let names_at = head + segment + contents.len();
    let name_of_names = names.len() as u32;
    names.extend(b".shstrtab\0");
    let sections_at = names_at + names.len();
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([3_u16, 62].iter().flat_map(|word| word.to_le_bytes()));
    file.extend(1_u32.to_le_bytes());
    file.extend([0, head as u64, sections_at as u64].iter().flat_map(|word| word.to_le_bytes()));
    file.extend(0_u32.to_le_bytes());
    let counts = [64, 56, 1, 64, sections.len() as u16 + 2, sections.len() as u16 + 1];
    file.extend(counts.iter().flat_map(|word| word.to_le_bytes()));
    // Readable code, from the start of the file on.
    file.extend([1_u32, 5].iter().flat_map(|word| word.to_le_bytes()));
    file.extend([0, 0, 0, TEXT_BYTES, TEXT_BYTES, 4096].iter().flat_map(|word: &u64| word.to_le_bytes()));
    file.extend(contents);
    file.extend(&names);
    file.extend(vec![0; each]);
    let mut put = |name: u32, kind: u32, at: u64, bytes: u64| {
        file.extend([name, kind].iter().flat_map(|word| word.to_le_bytes()));
        file.extend([2, at, at, bytes].iter().flat_map(|word: &u64| word.to_le_bytes()));
        file.extend([0_u8; 24]);
    };
    for (Section(_, kind, bytes), (name, at)) in sections.iter().zip(&places) {
        put(*name, *kind, *at, bytes.len() as u64);
    }
    put(name_of_names, 3, names_at as u64, names.len() as u64);
    file.resize(file.len().max(TEXT_BYTES as usize), 0);
    file
}

/// Unwind information of so many functions of 16 bytes, each of which has one word on the stack.
fn unwind_information(functions: u64) -> Vec<u8> {
    // Version 1, no augmentation, factors 1 and -8, return address 16; the caller's stack pointer
    // is the stack pointer plus 8, and the return address lies 8 bytes below.
    let common = [1, 0, 1, 0x78, 16, 0x0c, 7, 8, 0x90, 1, 0, 0];
    let mut table: Vec<u8> = Vec::new();
    table.extend((4 + common.len() as u32).to_le_bytes());
    table.extend(0_u32.to_le_bytes());
    table.extend(common);
    for function in 0..functions {
        table.extend(20_u32.to_le_bytes());
        table.extend((table.len() as u32).to_le_bytes());
        // The address is that of the code, wherever the section lies.
        table.extend([function * 16, 16].iter().flat_map(|word| word.to_le_bytes()));
    }
    table.extend(0_u32.to_le_bytes());
    table
}

/// Symbols of functions of 16 bytes, with overlapping names in a string of letters.
fn symbols(count: u64, strings: u64) -> Vec<u8> {
    let mut table = vec![0; 24];
    for number in 0..count {
        table.extend(((number * 977 % strings) as u32).to_le_bytes());
        table.extend([2, 0, 1, 0]);
        table.extend([number * 16, 16].iter().flat_map(|word| word.to_le_bytes()));
    }
    table
}

/// Maps a file as code at an address.
fn map(file: &File, address: u64, bytes: u64) {
    let (rights, flags) = (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE);
    let at = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: a mapping at a place where there is none, which nothing executes.
    let mapped = unsafe { libc::mmap(at, bytes as usize, rights, flags, file.as_raw_fd(), 0) };
    assert_eq!(mapped.addr() as u64, address, "{}", std::io::Error::last_os_error());
}

/// Makes a file, and maps it at each of the addresses.
fn map_file(name: &Path, bytes: &[u8], addresses: impl Iterator<Item = u64>) {
    fs::write(name, bytes).unwrap();
    fs::set_permissions(name, Permissions::from_mode(0o644)).unwrap();
    let file = File::open(name).unwrap();
    addresses.for_each(|address| map(&file, address, TEXT_BYTES));
}

/// Writes an area whose ring is full of samples.
struct Samples<'a> {
    page: &'a Page,
    number: u64,
    random: Random,
    /// Bytes of a stack.
    stack: usize,
    /// Bytes of the ring, and the places of its records.
    ring: Vec<u8>,
    records: Vec<usize>,
}

impl Samples<'_> {
    fn put(&self, at: usize, bytes: &[u8]) {
        self.page.0.write_all_at(bytes, (FILE_OFFSET + at) as u64).unwrap();
    }

    fn word(&self, at: usize, word: u64) {
        self.put(at, &word.to_ne_bytes());
    }

    fn head(&self) {
        self.page.0.set_len((FILE_OFFSET + AREA_BYTES) as u64).unwrap();
        self.word(offset_of!(AreaHeader, magic), MAGIC);
        self.put(offset_of!(AreaHeader, format), &[FORMAT, 1].map(u32::to_ne_bytes).concat());
        self.word(offset_of!(AreaHeader, mean), 1 << 10);
        self.word(offset_of!(AreaHeader, taken), u64::MAX);
    }

    /// Fills all slots with samples that are in no record, and have kept stacks.
    fn fill_slots(&mut self) {
        let each = size_of::<Slot>();
        let mut bytes = vec![0; SLOT_COUNT * each];
        for (at, slot) in bytes.chunks_exact_mut(each).enumerate() {
            let number = at as u64 + 1;
            for (place, word) in [
                (offset_of!(Slot, number), number),
                (offset_of!(Slot, size), self.random.next() % 100_000),
                (offset_of!(Slot, mean), 1000),
                (offset_of!(Slot, group), number),
            ] {
                slot[place..place + 8].copy_from_slice(&word.to_ne_bytes());
            }
            slot[offset_of!(Slot, thread)..][..4].copy_from_slice(&(at as u32).to_ne_bytes());
            slot[offset_of!(Slot, kept)..][..4].copy_from_slice(&(1 + (at % CELL_COUNT) as u32).to_ne_bytes());
        }
        self.put(SLOTS_AT, &bytes);
        // One circle of all cells: a chain has no end, and a stack begins in each cell.
        let mut cells = Vec::with_capacity(CELL_COUNT * CELL_BYTES);
        for at in 0..CELL_COUNT as u64 {
            let stack = 0x7fff_0000_0000_u64;
            let head = [(at + 1) % CELL_COUNT as u64 + 1, TEXT + self.random.next() % TEXT_BYTES, stack, stack, 900];
            cells.extend(head.iter().flat_map(|word| word.to_ne_bytes()));
            (head.len()..CELL_BYTES / 8)
                .for_each(|_| cells.extend((TEXT + self.random.next() % TEXT_BYTES).to_ne_bytes()));
        }
        self.put(CELLS_AT, &cells);
    }

    /// Makes a ring full of samples, each with a stack. [`Samples::fill_ring`] numbers them.
    fn make_ring(&mut self) {
        let length = size_of::<AllocRecord>() + self.stack;
        for at in (0..RING_BYTES).step_by(BLOCK_BYTES) {
            while self.ring.len() + length <= at + BLOCK_BYTES {
                self.records.push(self.ring.len());
                self.ring.extend([ALLOC, length as u32].map(u32::to_ne_bytes).concat());
                // Too young to be missed among the slots.
                let time = u64::MAX >> 1;
                for word in [0, time, 0x1000, 1 + self.random.next() % 100_000, 1000, 0] {
                    self.ring.extend(word.to_ne_bytes());
                }
                self.ring.extend([0, self.stack as u32].map(u32::to_ne_bytes).concat());
                let stack = 0x7fff_0000_0000_u64;
                let code = |random: &mut Random| TEXT + random.next() % TEXT_BYTES;
                self.ring.extend([code(&mut self.random), stack, stack].map(u64::to_ne_bytes).concat());
                (0..self.stack / 8).for_each(|_| self.ring.extend(code(&mut self.random).to_ne_bytes()));
            }
            if self.ring.len() < at + BLOCK_BYTES {
                self.ring.extend(3_u32.to_ne_bytes());
                self.ring.resize(at + BLOCK_BYTES, 0);
            }
        }
    }

    /// Writes a ring full of new samples, each with its own thread, group and place in the code.
    /// The rest of a stack stays.
    fn fill_ring(&mut self) {
        for &at in &self.records {
            self.number += 1;
            let (number, code) = (self.number.to_ne_bytes(), TEXT + self.random.next() % TEXT_BYTES);
            let thread = (self.number as u32 % 100_000).to_ne_bytes();
            let record = &mut self.ring[at..];
            record[offset_of!(AllocRecord, number)..][..8].copy_from_slice(&number);
            record[offset_of!(AllocRecord, group)..][..8].copy_from_slice(&number);
            record[offset_of!(AllocRecord, thread)..][..4].copy_from_slice(&thread);
            record[offset_of!(AllocRecord, instruction)..][..8].copy_from_slice(&code.to_ne_bytes());
        }
        self.put(RING_AT, &self.ring);
    }
}

/// The roles. Run by the tests below; by itself it does nothing.
#[test]
#[ignore = "a role that the other tests start"]
fn hostile() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let folder = folder();
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let symbols_of = |bytes: u64| {
        let strings = vec![b'a'; bytes as usize / 2];
        [Section(".symtab", 2, symbols(bytes / 48, bytes / 2)), Section(".strtab", 3, strings)]
    };
    let addresses = |count: u64| (0..count).map(|at| TEXT + at * TEXT_BYTES);
    match role.as_str() {
        "names" => {
            let [table, strings] = symbols_of(4 << 20);
            let sections = [Section(".eh_frame", 1, unwind_information(TEXT_BYTES / 16)), table, strings];
            map_file(&folder.join(format!("{HOSTILE}.so").replace('/', "")), &elf(&sections), addresses(1));
        }
        "mappings" => {
            let sections = [Section(".eh_frame", 1, unwind_information(400_000))];
            map_file(&folder.join("many.so"), &elf(&sections), addresses(5000));
        }
        "files" => {
            let [table, strings] = symbols_of(16 << 20);
            let sections = [Section(".eh_frame", 1, unwind_information(10_000)), table, strings];
            let file = elf(&sections);
            for (at, address) in addresses(100).enumerate() {
                map_file(&folder.join(format!("{at}.so")), &file, [address].into_iter());
            }
        }
        "generated" => {
            let rights = libc::PROT_READ | libc::PROT_EXEC;
            let at = std::ptr::with_exposed_provenance_mut(TEXT as usize);
            // SAFETY: a mapping at a place where there is none, which nothing executes.
            let mapped = unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                libc::mmap(at, TEXT_BYTES as usize, rights, flags, -1, 0)
            };
            assert_eq!(mapped.addr() as u64, TEXT);
            let lines: String = (0..1_500_000_u64)
                .map(|at| {
                    format!("{:x} 4 py::{at}{}\n", TEXT + at % TEXT_BYTES, if at % 2 == 0 { "\u{9b}" } else { "" })
                })
                .collect();
            fs::write(format!("/tmp/perf-{}.map", std::process::id()), lines).unwrap();
        }
        _ => {}
    }
    // SAFETY: gives rights up.
    unsafe {
        assert_eq!((libc::setgid(OTHER_USER), libc::setuid(OTHER_USER)), (0, 0));
        libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
    }
    let page = Page::publish(NUMBERS);
    let stack = match role.as_str() {
        "deep" => MOST_STACK,
        "shallow" => 0,
        _ => 1024,
    };
    let mut samples =
        Samples { page: &page, number: 1 << 40, random: Random(7), stack, ring: Vec::new(), records: Vec::new() };
    samples.head();
    samples.fill_slots();
    samples.make_ring();
    samples.fill_ring();
    say("ready");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            page.serve(|what, from| {
                let id = |at: u32| u64::from(from) * 190 + u64::from(at) + 2;
                let all = (0..190).map(|at| group(id(at), 1, HOSTILE.as_bytes()));
                let root = (from == 0).then(|| group(1, 0, b""));
                let next = if from < 300 { u64::from(from) + 1 } else { END };
                match what {
                    GROUPS => (0, groups(next, &root.into_iter().chain(all).collect::<Vec<_>>())),
                    _ => (UNKNOWN, Vec::new()),
                }
            })
        });
        for round in 1.. {
            let head = offset_of!(AreaHeader, head);
            samples.word(head, if role == "endless" { u64::MAX - 8 } else { round * RING_BYTES as u64 });
            std::thread::sleep(std::time::Duration::from_millis(50));
            samples.fill_ring();
        }
    });
}

fn is_root() -> bool {
    // SAFETY: a query without side effects.
    let is_root = unsafe { libc::geteuid() } == 0;
    if !is_root {
        eprintln!("skipped: a process of another user takes root");
    }
    is_root
}

/// Profiles a process in a role, in these formats: `--json`, a file's name, or [`TOP`].
fn profiled(role: &str, formats: &[&str]) {
    if !is_root() {
        return;
    }
    println!("{role}");
    let hostile = Hostile::start(role);
    let pid = hostile.child.id();
    let output = std::env::temp_dir().join(format!("neap-hostile-output-{pid}"));
    fs::create_dir_all(&output).unwrap();
    for format in formats {
        if *format == TOP {
            watched(&hostile, role);
            continue;
        }
        let file = output.join(format);
        let file = file.to_str().unwrap();
        let more: &[&str] = match *format {
            "" => &[],
            "--json" => &["--json"],
            "heap.pb.gz" => &["--allocated", "-o", file],
            "heap.html" => &["--peak", "-o", file],
            _ => &["-o", file],
        };
        let ended = hostile.run("profile", &[&["--seconds", "1", "--timeout", "60"], more].concat());
        assert_eq!(ended.code, Some(0), "{role} {more:?}: {}", ended.said);
        let says_so = ended.text.contains("functions only: --trust");
        assert!(says_so || *format == "--json", "{role}: {}", ended.text);
        if !format.ends_with(".gz") && Path::new(file).is_file() {
            let text = fs::read_to_string(file).unwrap();
            assert_eq!(text.chars().find(made_up::steers), None, "{role} {file}");
        }
    }
    fs::remove_dir_all(&output).unwrap();
    let of_process = std::env::temp_dir().join(format!("neap-hostile-{pid}"));
    let _ = (fs::remove_dir_all(of_process), fs::remove_file(format!("/tmp/perf-{pid}.map")));
}

/// Looks at a process in a role with `neap top`.
fn watched(hostile: &Hostile, role: &str) {
    let way = if role == "names" { "--once" } else { "--json" };
    let ended = hostile.run("top", &["--profile", way, "--interval", "1000", "--timeout", "60"]);
    assert_eq!(ended.code, Some(0), "{role}: {}", ended.said);
    assert!(
        ended.text.contains("functions only") || ended.text.contains("\"has_lines\":false"),
        "{role}: {}",
        ended.text
    );
}

#[test]
fn samples_without_end_are_profiled_in_bounded_memory() {
    profiled("samples", &["heap.pb.gz", TOP]);
    profiled("deep", &["--json"]);
    profiled("shallow", &["heap.html"]);
    profiled("endless", &["--json"]);
}

#[test]
fn long_names_of_code_are_profiled_in_bounded_memory() {
    profiled("names", &["", "--json", "heap.folded", "heap.html", TOP]);
    profiled("generated", &["heap.svg"]);
}

#[test]
fn profile_of_endless_files_and_mappings_is_bounded() {
    profiled("mappings", &["heap.html"]);
    profiled("files", &["--json"]);
}

#[test]
#[ignore = "takes long: each role in each format that takes most memory"]
fn every_role_is_profiled_in_bounded_memory() {
    profiled("names", &[FORMATS, &[TOP]].concat());
    for role in ["samples", "deep", "shallow", "endless", "generated", "mappings", "files"] {
        profiled(role, &[LARGEST, &[TOP]].concat());
    }
}

#[test]
fn leaks_of_a_hostile_process_are_bounded() {
    if is_root() {
        let ended = Hostile::start("samples").run("leaks", &["--seconds", "1", "--timeout", "60"]);
        assert!(ended.said.contains("neap:") || ended.code == Some(0), "{}", ended.said);
    }
}
