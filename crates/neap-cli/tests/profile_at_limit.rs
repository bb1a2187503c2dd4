//! Heap profiles that a C program writes at its limit (`profile_at_limit`) or by a call, read by
//! `neap profile --read` in every form.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use running::{Program, compiled, library, neap, numbers, numbers_with, object, until};
use serde_json::Value;

/// A program with a secret on its stack, that takes memory until it gets none, and asks for more.
/// With an argument, a thread does so, once the input says that the thread's group has a limit.
/// With the argument `fill`, it takes 60 MB, and as many bytes from the system as its input says.
/// With the argument `pass`, it allocates and frees after its first 20 MB, until the samples' ring
/// was overwritten several times. With the argument `request`, it takes 60 MB, and has neap write a
/// heap profile to the file that the next argument names.
const HOARDING: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
char *kept[100000], *volatile passing; static int passes;
__attribute__((noinline)) static char *hoard(void) {
  char *block = malloc(10000);
  if (block) memset(block, 1, 10000);
  return block;
}
#include <sys/mman.h>
static void *fill(void *none) {
  long bytes = 0;
  for (int n = 0; n < 6000; n++) kept[n] = hoard();
  puts("hoarded"); fflush(stdout);
  if (scanf("%ld", &bytes) != 1) return 0;
  char *mapped = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped != MAP_FAILED) memset(mapped, 1, bytes);
  puts("filled"); fflush(stdout);
  getchar(); getchar();
  return mapped;
}
#include <dlfcn.h>
static void request(const char *name) {
  int (*dump)(const char *) = dlsym(0, "neap_profile_dump");
  for (int n = 0; n < 6000; n++) kept[n] = hoard();
  printf("answer %d\n", dump(name)); fflush(stdout);
  getchar();
}
static void *work(void *is_thread) {
  volatile char secret[64];
  int count = 0, refused = 0;
  for (int n = 0; n < 63; n++) secret[n] = "hunter2-"[n % 8];
  if (is_thread) { pthread_setname_np(pthread_self(), "hoarder"); free(hoard()); puts("waiting"); fflush(stdout); getchar(); }
  if (passes) {
    while (count < 2000) kept[count++] = hoard();
    for (int n = 0; n < 40000; n++) { passing = malloc(400000); free(passing); }
  }
  while (count < 100000 && (kept[count] = hoard())) count++;
  for (int n = 0; n < 1000; n++) refused += hoard() == 0;
  printf("refused %d after %d, %c\n", refused, count, secret[3]);
  fflush(stdout);
  getchar();
  return 0;
}
int main(int count, char **words) {
  pthread_t thread;
  if (count < 2) { work(0); return 0; }
  if (!strcmp(words[1], "fill")) { fill(0); return 0; }
  if (!strcmp(words[1], "request")) { request(words[2]); return 0; }
  if (!strcmp(words[1], "pass")) { passes = 1; work(0); return 0; }
  pthread_create(&thread, 0, work, words);
  pthread_join(thread, 0);
  return 0;
}
"#;

/// An empty folder of a test, and the program in it.
fn hoarding(name: &str) -> (PathBuf, PathBuf) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("profile-at-limit-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("heaps")).unwrap();
    let program = compiled(&folder, "hoarding", HOARDING);
    (folder, program)
}

fn start(program: &Path, words: &[&str], options: &str) -> Program {
    let mut command = Command::new(program);
    command.args(words).env("NEAP", options).env("LD_PRELOAD", library());
    Program::run(command)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder.join("heaps")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn counts(pid: u32, written: u64, failed: u64) {
    let expected = serde_json::json!({"written": written, "failed": failed});
    numbers_with(pid, "heap profiles", |object| object["heap_profiles"] == expected);
}

fn read(file: &Path, options: &[&str]) -> Output {
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    neap.args(["profile", "--read"]).arg(file).args(options).output().unwrap()
}

/// Checks that a file has the memory of `hoard`, of a process.
fn check(file: &Path, pid: u32, bytes: f64) -> Value {
    check_of(file, pid, bytes, "work")
}

/// Checks that a file has the memory of `hoard`, of a process, with the caller of `hoard`.
fn check_of(file: &Path, pid: u32, bytes: f64, caller: &str) -> Value {
    let output = read(file, &["--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&object["pid"], &object["name"]), (&pid.into(), &"hoarding".into()));
    let of_hoard = |stack: &&Value| stack["site"]["function"] == "hoard";
    let stacks: Vec<&Value> = object["stacks"].as_array().unwrap().iter().filter(of_hoard).collect();
    let live: f64 = stacks.iter().map(|stack| stack["live"]["bytes"].as_f64().unwrap()).sum();
    assert!((live / bytes - 1.0).abs() < 0.2, "{live} bytes for {bytes}: {object}");
    let first = stacks[0];
    assert!(first["site"]["file"].as_str().unwrap().ends_with("hoarding.c") && first["site"]["line"] == 7, "{first}");
    let names = first["frames"].as_array().unwrap().iter().map(|frame| frame["function"].as_str().unwrap());
    assert_eq!(names.take(2).collect::<Vec<_>>(), ["hoard", caller]);
    assert!(object["stacks_complete"].as_u64() > Some(0) && object["stacks_incomplete"] == 0, "{object}");
    assert!(first["allocated"].is_null() && object["peak"].is_null());
    object
}

#[test]
fn refused_allocation_leaves_one_file_without_secrets() {
    // Written by neap's thread, or in the call that is refused.
    for (background, words) in [("off", &[][..]), ("auto", &[]), ("on", &[])] {
        let (folder, program) = hoarding(background);
        let heap = folder.join("heaps/heap");
        let options = format!(
            "background:{background},limit:64m,refuse:on,profile:64k,profile_at_limit:{}",
            heap.to_str().unwrap()
        );
        let mut program = start(&program, words, &options);
        let said = program.hear("refused 1000 after ");
        let bytes = said.split(',').next().unwrap().parse::<f64>().unwrap() * 10_000.0;
        let file = folder.join(format!("heaps/heap.{}.1", program.id()));
        assert_eq!(files(&folder), core::slice::from_ref(&file), "{background}");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        counts(program.id(), 1, 0);
        let content = fs::read(&file).unwrap();
        assert!(
            !content.windows(8).any(|word| word == b"hunter2-" || word == b"unter2-h"),
            "the secret is in the file"
        );
        let object = check(&file, program.id(), bytes);
        assert!(object["notes"][0].as_str().unwrap().contains("before an allocation was refused"), "{object}");
        let pid = program.id();
        program.go_on();
        drop(program);
        // After the end of the process, in every form.
        check(&file, pid, bytes);
        for name in ["heap.folded", "heap.svg", "heap.html", "heap.pb.gz"] {
            let output = read(&file, &["-o", folder.join(name).to_str().unwrap()]);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        let folded = fs::read_to_string(folder.join("heap.folded")).unwrap();
        assert!(folded.lines().any(|line| line.contains(";main;") && line.contains(";work;hoard ")), "{folded}");
        let again = read(&folder.join("heap.pb.gz"), &["--compare", file.to_str().unwrap()]);
        let again = String::from_utf8_lossy(&again.stdout).into_owned();
        assert!(again.contains("Change: +0 B") || again.contains("Change: -0 B"), "{again}");
        let refused = read(&file, &["--allocated"]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("live (--live)"));
        // A program that was changed since has no names.
        fs::write(folder.join("hoarding"), b"other").unwrap();
        let output = read(&file, &[]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("Gone, or changed since") && !text.contains("hoard "), "{text}");
        // Incomplete and damaged files are refused.
        for cut in [0, 100, 1 << 20, content.len() / 2] {
            fs::write(&file, &content[..cut]).unwrap();
            assert!(!read(&file, &[]).status.success(), "{cut} bytes");
        }
    }
}

#[test]
fn requested_file_is_read_as_one_at_a_limit() {
    let (folder, program) = hoarding("request");
    let file = folder.join("heaps/named");
    let words = ["request", file.to_str().unwrap()];
    let mut program = start(&program, &words, "profile:64k");
    assert_eq!(program.hear("answer "), "0");
    let object = check_of(&file, program.id(), 6e7, "request");
    assert_eq!(object["notes"][0], "Written at the program's request", "{object}");
    program.go_on();
}

#[test]
fn file_has_the_stacks_of_what_lives_long() {
    let (folder, program) = hoarding("lasting");
    let heap = folder.join("heaps/heap");
    let options = format!("background:on,limit:64m,refuse:on,profile:64k,profile_at_limit:{}", heap.to_str().unwrap());
    let mut program = start(&program, &["pass"], &options);
    let said = program.hear("refused 1000 after ");
    let bytes = said.split(',').next().unwrap().parse::<f64>().unwrap() * 10_000.0;
    let file = folder.join(format!("heaps/heap.{}.1", program.id()));
    let object = check(&file, program.id(), bytes);
    assert_eq!(object["samples_without_stack"], 0, "{object}");
    let content = fs::read(&file).unwrap();
    assert!(!content.windows(8).any(|word| word == b"hunter2-" || word == b"unter2-h"), "the secret is in the file");
    program.go_on();
}

#[test]
fn group_at_its_limit_leaves_a_file_with_its_name() {
    let (folder, program) = hoarding("group");
    let heap = folder.join("heaps/heap");
    let options = format!(
        "background:on,groups:by-thread-name,refuse:on,profile:64k,profile_at_limit:{}",
        heap.to_str().unwrap()
    );
    let mut program = start(&program, &["thread"], &options);
    program.hear("waiting");
    let output = neap("stat", program.id(), &["--groups", "--json"]);
    let seen = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(seen.contains("hoarder"), "{seen}");
    let output = neap("group", program.id(), &["hoarder", "max=20m"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program.go_on();
    let said = program.hear("refused 1000 after ");
    let bytes = said.split(',').next().unwrap().parse::<f64>().unwrap() * 10_000.0;
    let file = folder.join(format!("heaps/heap.{}.1", program.id()));
    assert_eq!(files(&folder), core::slice::from_ref(&file));
    let object = check(&file, program.id(), bytes);
    let stacks = object["stacks"].as_array().unwrap();
    let of_hoard = stacks.iter().find(|stack| stack["site"]["function"] == "hoard").unwrap();
    assert_eq!((&of_hoard["group"], &of_hoard["thread"]), (&"hoarder".into(), &"hoarder".into()));
    program.go_on();
}

/// A memory group of the kernel, of version 1, below the one of this process.
struct Container(PathBuf);

impl Container {
    /// A group with a limit; the reason if there can be none.
    fn new(limit: u64) -> Result<Container, String> {
        let own = object("pressure", std::process::id(), &[])?;
        let (directory, version) = (own["directory"].as_str().unwrap_or_default(), &own["cgroup_version"]);
        if *version != 1 {
            return Err(format!("cgroup version is {version}"));
        }
        let folder = Path::new(directory).join(format!("neap-test-{}", std::process::id()));
        fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let made = Container(folder);
        let limited = fs::write(made.0.join("memory.limit_in_bytes"), limit.to_string());
        // Absent where swap is not accounted.
        let _ = fs::write(made.0.join("memory.memsw.limit_in_bytes"), limit.to_string());
        limited.map(|()| made).map_err(|error| format!("memory.limit_in_bytes: {error}"))
    }

    fn usage(&self) -> u64 {
        fs::read_to_string(self.0.join("memory.usage_in_bytes")).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // The last process may be about to leave.
        let start = Instant::now();
        while fs::remove_dir(&self.0).is_err() && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn container_about_to_be_full_leaves_one_file() {
    const LIMIT: u64 = 640 << 20;
    let container = match Container::new(LIMIT) {
        Ok(container) => container,
        Err(reason) => {
            eprintln!("SKIPPED: this process may make no memory group of cgroup version 1 ({reason})");
            return;
        }
    };
    let (folder, program) = hoarding("imminent");
    let (heap, processes) = (folder.join("heaps/heap"), container.0.join("cgroup.procs"));
    let line = format!("echo $$ > '{}' && exec '{}' fill", processes.display(), program.display());
    let options = format!("background:on,limit:auto,profile:64k,profile_at_limit:{}", heap.to_str().unwrap());
    let mut command = Command::new("sh");
    command.args(["-c", &line]).env("NEAP", options).env("LD_PRELOAD", library());
    let mut program = Program::run(command);
    program.hear("hoarded");
    let pid = program.id();
    let of = object("pressure", pid, &[]).unwrap();
    assert_eq!((&of["limit"]["limit"], &of["pressure"]), (&LIMIT.into(), &"roomy".into()), "{of}");
    counts(pid, 0, 0);
    // The estimate of the growth may change the level between two of the commands.
    let seen = |level: &str, number: u32| {
        until(level, || {
            let object = numbers(pid).ok()?;
            let container = &object["container"];
            let text = |command: &str| String::from_utf8(neap(command, pid, &[]).stdout).unwrap();
            let line = format!("\nPressure: {level}, by the limit of the group; ");
            let gauge = format!("\nneap_container_pressure{{pid=\"{pid}\",command=\"hoarding\"}} {number}\n");
            let is_seen = container["limit"] == LIMIT && container["limited_by"] == "group";
            let is_seen = is_seen && container["pressure"] == level;
            (is_seen && text("stat").contains(&line) && text("metrics").contains(&gauge)).then_some(())
        });
    };
    seen("roomy", 0);
    // The margin is a tenth of the limit; below a quarter of it, the wall is near. The program's
    // heap takes none of it: as if another process of the container did.
    let left = LIMIT / 10 / 4 * 3 / 4;
    program.say(&(LIMIT - container.usage() - left).to_string());
    program.hear("filled");
    counts(pid, 1, 0);
    seen("imminent", 5);
    let file = folder.join(format!("heaps/heap.{pid}.1"));
    assert_eq!(files(&folder), core::slice::from_ref(&file));
    let object = check_of(&file, pid, 60e6, "fill");
    assert!(object["notes"][0].as_str().unwrap().contains("container's memory was about to run out"), "{object}");
    // The level stays, and there is one file in a minute.
    std::thread::sleep(Duration::from_secs(2));
    counts(pid, 1, 0);
    program.go_on();
}

#[test]
fn program_goes_on_where_no_file_can_be_made() {
    let (folder, program) = hoarding("faults");
    let options = |file: &str| {
        let file = folder.join(file);
        format!("background:on,limit:64m,refuse:on,profile:64k,profile_at_limit:{}", file.to_str().unwrap())
    };
    // No such folder.
    let mut faulty = start(&program, &[], &options("nowhere/heap"));
    faulty.hear("refused 1000 after ");
    counts(faulty.id(), 0, 1);
    faulty.go_on();
    // Sampling is off.
    let mut off = start(&program, &[], &options("heaps/heap").replace("profile:64k,", ""));
    off.hear("refused 1000 after ");
    counts(off.id(), 0, 0);
    off.go_on();
    // Files may be short only: the kernel would send a deadly signal, and samples have no place.
    let mut limited = Command::new("sh");
    let line = format!("ulimit -f 2048; exec {}", program.display());
    limited.args(["-c", &line]).env("NEAP", options("heaps/heap")).env("LD_PRELOAD", library());
    let mut limited = Program::run(limited);
    limited.hear("refused 1000 after ");
    limited.go_on();
    assert!(files(&folder).is_empty());
    // Others' files and links are never written to.
    let others = folder.join("heaps");
    let mut waiting = start(&program, &["thread"], &options("heaps/heap"));
    waiting.hear("waiting");
    let pid = waiting.id();
    let target = folder.join("target");
    std::os::unix::fs::symlink(&target, others.join(format!("heap.{pid}.1"))).unwrap();
    fs::write(others.join(format!("heap.{pid}.2")), b"mine").unwrap();
    waiting.go_on();
    waiting.hear("refused 1000 after ");
    counts(pid, 1, 0);
    assert!(!target.exists() && fs::read(others.join(format!("heap.{pid}.2"))).unwrap() == b"mine");
    assert!(read(&others.join(format!("heap.{pid}.3")), &[]).status.success());
    waiting.go_on();
}
