//! `neap profile` stays within its memory with a process of its own user whose file has much debug
//! information, and says which lines are missing.
//!
//! Method: the C compiler makes a program that has many or long compilation units besides its own.
//! A thread looks at the sum of the anonymous memory of the command and its children meanwhile. The
//! kernel's peak of each of them includes pages of files.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]
#![cfg(target_arch = "x86_64")]

mod running;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use running::{Program, compiled, library};

/// Memory of a command, in KiB, and what pages of files may add to that of a process.
const MOST: u64 = 64 << 10;
const OF_FILES: u64 = 32 << 10;

/// A program that holds memory by a function, and waits for its input.
const HOLDING: &str = r#"
#include <stdio.h>
#include <stdlib.h>
char *held[20000];
__attribute__((noinline)) static void hold(void) {
  for (int n = 0; n < 20000; n++) held[n] = malloc(1000);
  __asm__ volatile("");
}
int main(void) { hold(); puts("held"); fflush(stdout); getchar(); return 0; }
"#;

/// A program with so many compilation units, each so many bytes longer than its only entry. They
/// have no code.
fn program(name: &str, units: u32, bytes: u32) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("profile-memory");
    fs::create_dir_all(&folder).unwrap();
    // Length, version, offset of the table of kinds, bytes of an address; then the entry's kind.
    let unit = format!(".4byte {}\\n.2byte 4\\n.4byte .Lkinds\\n.byte 8, 1\\n.zero {bytes}", bytes + 8);
    let kinds = ".pushsection .debug_abbrev,\\\"\\\",@progbits\\n.Lkinds: .byte 1, 0x11, 0, 0, 0, 0\\n.popsection";
    let all = format!(".pushsection .debug_info,\\\"\\\",@progbits\\n.rept {units}\\n{unit}\\n.endr\\n.popsection");
    compiled(&folder, name, &format!("__asm__(\"{kinds}\\n{all}\");{HOLDING}"))
}

/// KiB of anonymous memory of a process.
fn anonymous(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// The children of a process.
fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    texts.flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()).collect()
}

/// The end of a command: its output, its largest resident memory or that of a child in KiB, and the
/// largest sum of their anonymous memory that was seen.
struct Measured {
    text: String,
    resident: u64,
    sum: u64,
}

impl Measured {
    fn is_within_its_memory(&self) {
        let Measured { resident, sum, .. } = self;
        assert!(*sum < MOST && *resident < MOST + OF_FILES, "{sum} KiB anonymous, {resident} KiB resident");
    }
}

/// Profiles a process.
#[allow(clippy::zombie_processes, reason = "`wait4` waits for the child, and tells its memory")]
fn profiled(pid: u32, more: &[&str]) -> Measured {
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    neap.args(["profile", &pid.to_string(), "--seconds", "1"]).args(more).stdout(Stdio::piped());
    let mut child = neap.spawn().unwrap();
    let (command, sum, is_over) = (child.id(), AtomicU64::new(0), AtomicBool::new(false));
    let mut text = String::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Relaxed: the scope's end orders both.
            while !is_over.load(Ordering::Relaxed) {
                let now = anonymous(command) + children(command).into_iter().map(anonymous).sum::<u64>();
                sum.fetch_max(now, Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        is_over.store(true, Ordering::Relaxed);
    });
    let mut status = 0;
    // SAFETY: zeroes are valid numbers, which the call fills; the child is waited for once.
    let usage = unsafe {
        let mut usage: libc::rusage = core::mem::zeroed();
        assert_eq!(libc::wait4(command as i32, &raw mut status, 0, &raw mut usage), command as i32);
        usage
    };
    assert_eq!(status, 0, "{text}");
    let measured = Measured { text, resident: usage.ru_maxrss as u64, sum: sum.into_inner() };
    println!("{more:?}: {} KiB resident, {} KiB anonymous in all", measured.resident, measured.sum);
    measured
}

/// Starts a program, profiled from its start.
fn start(program: &Path) -> Program {
    let mut command = Command::new(program);
    command.env("NEAP", "background:on,profile:8k").env("LD_PRELOAD", library());
    let mut program = Program::run(command);
    program.hear("held");
    program
}

#[test]
fn lines_of_a_large_file_are_found_within_the_memory() {
    let program = start(&program("long", 1, 120 << 20));
    let taken = profiled(program.id(), &[]);
    taken.is_within_its_memory();
    assert!(taken.text.contains("| hold (profile-memory/long.c:"), "{}", taken.text);
    assert!(!taken.text.contains("have no file and line"), "{}", taken.text);
}

#[test]
fn lines_that_do_not_fit_are_counted_and_functions_stay() {
    let program = start(&program("many", 150_000, 0));
    for form in [&[][..], &["--json"]] {
        let taken = profiled(program.id(), form);
        taken.is_within_its_memory();
        let named = if form.is_empty() { "| hold  " } else { "{\"file\":\"\",\"function\":\"hold\",\"line\":0}" };
        assert!(taken.text.contains(named), "{}", taken.text);
        let note =
            "places in the code have no file and line: their debug information takes more than 64.0 MiB, or 10 s";
        assert_eq!(taken.text.matches(note).count(), 1, "{}", taken.text);
    }
    let taken = profiled(program.id(), &["--memory", "512m"]);
    assert!(taken.text.contains("| hold (profile-memory/many.c:"), "{}", taken.text);
    assert!(taken.sum < 512 << 10 && !taken.text.contains("have no file and line"), "{}", taken.text);
}

#[test]
fn memory_below_the_least_is_refused() {
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    let output = neap.args(["profile", "1", "--memory", "63m"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && text.contains("the least is 64m"), "{text}");
}
