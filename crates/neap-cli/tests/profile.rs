//! `neap profile`, `neap run --profile` and `neap leaks` on real programs: a C program with known
//! sites, one that leaks, C++, Python, Node, and pprof's own reader of files.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use running::{Program, compiled, compiled_by, library, neap, numbers_with, object};
use serde_json::Value;

/// Sites of the C program below, and the sizes of their objects.
const SITES: usize = 50;
const SIZES: [usize; 5] = [16, 100, 1000, 10_000, 100_000];

fn bytes_of(site: usize) -> f64 {
    let size = SIZES[site % SIZES.len()];
    ((1_000_000 + site * 40_000) / size * size) as f64
}

/// A program with 50 functions that hold memory, without frame pointers. Without an argument it
/// ends at once. With one, it holds the memory in a thread, and waits for its input before and
/// after.
fn program_of_sites(folder: &Path) -> PathBuf {
    let mut source =
        String::from("#include <pthread.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n");
    source += "static int slow;\nvoid *kept[10000000];\nstatic unsigned long count;\n";
    for site in 0..SITES {
        let size = SIZES[site % SIZES.len()];
        let objects = bytes_of(site) as usize / size;
        source += &format!(
            "__attribute__((noinline)) static void site_{site}(void) {{ for (int n = 0; n < {objects}; n++) \
             kept[count++] = malloc({size}); if (slow) usleep(10000); }}\n"
        );
    }
    source += "static void *work(void *none) {\n";
    (0..SITES).for_each(|site| source += &format!("site_{site}();\n"));
    source +=
        "return none; }\nint main(int count, char **words) { slow = count > 1; if (!slow) { work(0); return 7; }\n";
    source += "pthread_t thread; puts(\"ready\"); fflush(stdout); getchar(); pthread_create(&thread, 0, work, 0);\n";
    source += "pthread_setname_np(thread, \"holder\"); pthread_join(thread, 0); puts(\"held\"); fflush(stdout);\n";
    source += "getchar(); return 0; }\n";
    compiled(folder, "sites", &source)
}

/// A folder of a test, empty.
fn folder(name: &str) -> PathBuf {
    running::folder(&format!("profile-{name}"))
}

fn run_profiled(file: &Path, every: &str, line: &[&str]) -> Output {
    let mut run = Command::new(env!("CARGO_BIN_EXE_neap"));
    run.args(["run", "--library"]).arg(library()).arg("--profile").arg(file).args(["--every", every, "--"]);
    run.args(line).env("PYTHONMALLOC", "malloc").env_remove("NEAP").output().unwrap()
}

fn setting(pid: u32, value: &str) {
    numbers_with(pid, "setting", |object| object["settings"]["profile"] == *value);
}

#[test]
fn fifty_known_sites_are_attributed_and_the_option_is_put_back() {
    let program = program_of_sites(&folder("sites"));
    let mut command = Command::new(program);
    command.arg("slow").env("NEAP", "background:on").env("LD_PRELOAD", library());
    let mut program = Program::run(command);
    program.hear("ready");
    let (pid, mut profile) = (program.id(), Command::new(env!("CARGO_BIN_EXE_neap")));
    profile.args(["profile", &pid.to_string(), "--seconds", "1000", "--every", "8k", "--json"]);
    let profile = profile.stdout(Stdio::piped()).spawn().unwrap();
    setting(pid, "8192");
    program.go_on();
    program.hear("held");
    // SAFETY: a child that was not waited for. It ends early by this, with its output.
    unsafe { libc::kill(profile.id() as i32, libc::SIGINT) };
    let output = profile.wait_with_output().unwrap();
    assert!(output.status.success());
    setting(pid, "off");
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let mut found = vec![(0.0, 0.0); SITES];
    let mut by_holder = 0.0;
    for stack in object["stacks"].as_array().unwrap() {
        let names = stack["frames"].as_array().unwrap().iter().filter_map(|frame| frame["function"].as_str());
        let site = names.into_iter().find_map(|name| name.strip_prefix("site_")?.parse::<usize>().ok());
        let Some(site) = site else { continue };
        found[site].0 += number(&stack["live"]["bytes"]);
        found[site].1 += number(&stack["live"]["standard_error_bytes"]).powi(2);
        by_holder += if stack["thread"] == "holder" { number(&stack["live"]["bytes"]) } else { 0.0 };
        let place = &stack["site"];
        assert_eq!(place["function"], format!("site_{site}"));
        assert!(place["file"].as_str().unwrap().ends_with("sites.c") && place["line"].as_u64() > Some(5), "{place}");
    }
    let truth: f64 = (0..SITES).map(bytes_of).sum();
    let sum: f64 = found.iter().map(|(bytes, _)| bytes).sum();
    assert!((sum / truth - 1.0).abs() < 0.05, "{sum} bytes for {truth}");
    for (site, (bytes, variance)) in found.iter().enumerate() {
        let off = (bytes - bytes_of(site)).abs() / variance.sqrt().max(1.0);
        assert!(off < 7.0, "site {site}: {bytes} bytes for {}, {off} standard errors", bytes_of(site));
    }
    assert!((by_holder - sum).abs() < 1.0, "the thread's name");
    let (complete, incomplete) = (number(&object["stacks_complete"]), number(&object["stacks_incomplete"]));
    assert!(complete > 5000.0 && incomplete < 0.01 * complete, "{complete} {incomplete}");
    assert!(number(&object["in_use_bytes"]) > truth);
    program.go_on();
}

#[test]
fn profile_from_start_to_end_is_valid_in_every_format() {
    let folder = folder("formats");
    let program = program_of_sites(&folder);
    for name in ["heap.folded", "heap.svg", "heap.html", "heap.pb.gz", "heap.pprof"] {
        let file = folder.join(name);
        let output = run_profiled(&file, "16k", &["sh", "-c", &format!("exec {}", program.display())]);
        assert_eq!(output.status.code(), Some(7), "{}", String::from_utf8_lossy(&output.stderr));
        let bytes = fs::read(&file).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        if name.ends_with(".pb.gz") || name.ends_with(".pprof") {
            assert!(bytes.starts_with(&[0x1f, 0x8b]));
        } else {
            assert!(text.contains("main") && text.contains("site_49"), "{name}: {text}");
        }
    }
    let folded = fs::read_to_string(folder.join("heap.folded")).unwrap();
    let bytes = folded.lines().filter(|line| line.contains(";main;")).map(|line| line.rsplit(' ').next().unwrap());
    let sum: f64 = bytes.map(|bytes| bytes.parse::<f64>().unwrap()).sum();
    let truth: f64 = (0..SITES).map(bytes_of).sum();
    assert!((sum / truth - 1.0).abs() < 0.1, "{sum} bytes for {truth}: {folded}");
    let Ok(go) = Command::new("go")
        .args(["tool", "pprof", "-top", "-sample_index=inuse_space"])
        .arg(folder.join("heap.pb.gz"))
        .output()
    else {
        eprintln!("skipped: there is no go");
        return;
    };
    let top = String::from_utf8_lossy(&go.stdout);
    assert!(go.status.success() && top.contains("site_49") && top.contains("Type: inuse_space"), "{top}");
}

#[test]
fn python_is_profiled_to_its_main_function() {
    let folder = folder("python");
    let program = "kept = [[n] * 200 for n in range(20000)]";
    let file = folder.join("heap.folded");
    let output = run_profiled(&file, "16k", &["python3", "-c", program]);
    if output.status.code() == Some(127) {
        eprintln!("skipped: there is no python3");
        return;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let folded = fs::read_to_string(&file).unwrap();
    let bytes = |line: &str| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
    let all: f64 = folded.lines().map(bytes).sum();
    let evaluated: f64 = folded.lines().filter(|line| line.contains("_PyEval_EvalFrame")).map(bytes).sum();
    let from_start = folded.lines().filter(|line| line.contains("Py_BytesMain") || line.contains("_start;"));
    let started: f64 = from_start.map(bytes).sum();
    let sums = format!("{all} bytes, {evaluated} below the interpreter, {started} below main");
    assert!(all > 20_000_000.0 && evaluated > 0.8 * all && started > 0.8 * all, "{sums}");
}

/// A program that allocates in threads, virtual calls, templates, handlers of exceptions, and
/// destructors that run while an exception passes.
const OBJECTS: &str = r#"
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
static thread_local std::vector<std::unique_ptr<char[]>> kept;
[[gnu::noinline]] static void keep(int bytes) { kept.emplace_back(new char[bytes]); asm volatile(""); }
struct Shape { virtual ~Shape() = default; virtual void draw() = 0; };
struct Circle : Shape { void draw() override { keep(1000); asm volatile(""); } };
struct Square : Shape { void draw() override { keep(2000); asm volatile(""); } };
struct Guard { ~Guard() { keep(3000); asm volatile(""); } };
[[gnu::noinline]] static void thrower(int n) {
  Guard guard;
  if (n >= 0) throw std::runtime_error("thrown");
}
[[gnu::noinline]] static void catcher(int n) {
  try { thrower(n); } catch (const std::exception &) { keep(4000); }
}
template <typename F> [[gnu::noinline]] static void twice(F f) { f(); f(); asm volatile(""); }
[[gnu::noinline]] static void work(int rounds) {
  std::vector<std::unique_ptr<Shape>> shapes;
  shapes.push_back(std::make_unique<Circle>());
  shapes.push_back(std::make_unique<Square>());
  static thread_local std::map<int, std::string> names;
  for (int n = 0; n < rounds; n++) {
    for (auto &shape : shapes) shape->draw();
    catcher(n);
    std::function<void()> function = [n] { names[n] = std::string(500, 'x'); };
    twice(function);
  }
}
[[gnu::noinline]] static void wait() { getchar(); }
int main() {
  std::vector<std::thread> threads;
  for (int n = 0; n < 2; n++) threads.emplace_back([] { work(500); std::puts("held"); std::fflush(stdout); for (;;) std::this_thread::sleep_for(std::chrono::hours(1)); });
  work(500);
  std::puts("held"); std::fflush(stdout);
  wait();
  std::_Exit(0);
}
"#;

#[test]
fn stacks_of_c_plus_plus_reach_main_or_their_thread() {
    let program = compiled_by("c++", &folder("objects"), "objects.cpp", OBJECTS);
    let mut command = Command::new(program);
    command.env("NEAP", "background:on,profile:1k").env("LD_PRELOAD", library());
    let mut program = Program::run(command);
    (0..3).for_each(|_| drop(program.hear("held")));
    let object = object("profile", program.id(), &["--seconds", "1"]).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let complete = number(&object["stacks_complete"]);
    let all = complete + number(&object["stacks_incomplete"]) + number(&object["samples_without_stack"]);
    assert!(all > 1000.0 && complete >= 0.99 * all, "{complete} of {all} stacks are whole: {object}");
    let mut wanted = ["Circle::draw", "Square::draw", "Guard::~Guard", "catcher", "twice", "thrower"].to_vec();
    let mut starts = ["main", "start_thread"].to_vec();
    for stack in object["stacks"].as_array().unwrap() {
        let names = stack["frames"].as_array().unwrap().iter().filter_map(|frame| frame["function"].as_str());
        let names: Vec<&str> = names.collect();
        wanted.retain(|wanted| !names.iter().any(|name| name.contains(wanted)));
        starts.retain(|start| !names.contains(start) || !names.iter().any(|name| name.contains("Circle::draw")));
    }
    assert!(wanted.is_empty() && starts.is_empty(), "{wanted:?} and {starts:?} are not in {object}");
    program.go_on();
}

/// A program that holds buffers, which lie outside of V8's heap, and waits for its input.
const BUFFERS: &str = "\
const kept = [];
function holdBuffers(count) { for (let n = 0; n < count; n++) kept.push(Buffer.allocUnsafeSlow(30000).fill(1)); }
function main() { for (let n = 0; n < 100; n++) holdBuffers(20); }
main();
console.log('held');
process.stdin.resume();
";

#[test]
fn functions_of_node_are_named_by_its_map() {
    if Command::new("node").arg("--version").output().is_err() {
        eprintln!("skipped: there is no node");
        return;
    }
    let folder = folder("node");
    let (program, file) = (folder.join("buffers.js"), folder.join("heap.folded"));
    fs::write(&program, BUFFERS).unwrap();
    let mut node = Command::new("node");
    node.args(["--perf-basic-prof", "--interpreted-frames-native-stack"]).arg(&program);
    // node writes a log into its folder.
    node.env("NEAP", "profile:64k").env("LD_PRELOAD", library()).current_dir(&folder);
    let mut node = Program::run(node);
    node.hear("held");
    let output = neap("profile", node.id(), &["--seconds", "1", "-o", file.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let _ = fs::remove_file(format!("/tmp/perf-{}.map", node.id()));
    let folded = fs::read_to_string(&file).unwrap();
    let bytes = |line: &str| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
    let sum = |wanted: &dyn Fn(&str) -> bool| folded.lines().filter(|line| wanted(line)).map(bytes).sum::<f64>();
    let named = format!("holdBuffers {}:2:", program.display());
    let held = sum(&|line| line.contains(&named));
    let started = sum(&|line| line.contains(";node::Start") || line.contains("start_thread"));
    // With 900 samples, 5 standard errors are 17 %. Some of the stacks are not followed to the map.
    assert!((0.75..1.2).contains(&(held / 60e6)), "{held} bytes for 60 MB: {folded}");
    assert!(started > 0.95 * sum(&|_| true), "{started} bytes from the start: {folded}");
}

#[test]
fn statuses_signals_and_faults_are_passed_on() {
    let folder = folder("faults");
    let file = folder.join("heap.html");
    let output = run_profiled(&file, "on", &["sh", "-c", "kill -TERM $$"]);
    assert_eq!(output.status.code(), Some(128 + libc::SIGTERM));
    assert_eq!(run_profiled(&file, "on", &["/no/such/program"]).status.code(), Some(127));
    let output = run_profiled(&folder.join("heap.txt"), "on", &["true"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("ends in none of .pb.gz"), "{output:?}");
    let output = neap("profile", std::process::id(), &["--every", "0"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let mut child = Command::new("sleep").arg("1000").env_remove("LD_PRELOAD").spawn().unwrap();
    let error = object("profile", child.id(), &["--seconds", "1"]).unwrap_err();
    assert!(error.contains("does not run under neap"), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn process_that_ends_meanwhile_is_shown() {
    let mut program = Program::start("burst", "profile:4k", &[]);
    program.hear("ready");
    let pid = program.id();
    let mut profile = Command::new(env!("CARGO_BIN_EXE_neap"));
    profile.args(["profile", &pid.to_string(), "--seconds", "1000", "--json"]);
    let profile = profile.stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    program.child.kill().unwrap();
    program.child.wait().unwrap();
    let output = profile.wait_with_output().unwrap();
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    // What was sampled before the command came is there, by what the ring and the slots keep.
    assert!(object["live"]["bytes"].as_u64() > Some(10 << 20), "{object}");
    assert!(object["in_use_bytes"].is_null());
    assert_eq!(object["every_bytes"], 4096);
}

/// A program that holds memory by one function. Then another one allocates and frees, until the
/// samples' ring was overwritten several times.
const LASTING: &str = r#"
#include <stdio.h>
#include <stdlib.h>
char *held[300], *volatile passing;
__attribute__((noinline)) static void hold(void) {
  for (int n = 0; n < 300; n++) held[n] = malloc(20000);
  __asm__ volatile("");
}
__attribute__((noinline)) static void pass(void) {
  for (int n = 0; n < 40000; n++) { passing = malloc(40000); free(passing); }
  __asm__ volatile("");
}
int main(void) {
  hold();
  pass();
  puts("passed"); fflush(stdout); getchar();
  return 0;
}
"#;

#[test]
fn late_profile_has_the_stacks_of_what_lives_long() {
    let mut command = Command::new(compiled(&folder("lasting"), "lasting", LASTING));
    command.env("NEAP", "background:on,profile:4k").env("LD_PRELOAD", library());
    let mut program = Program::run(command);
    program.hear("passed");
    let object = object("profile", program.id(), &["--seconds", "1"]).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let of_hold = |stack: &&Value| {
        let names: Vec<_> = stack["frames"].as_array().unwrap().iter().map(|frame| &frame["function"]).collect();
        assert!(stack["site"]["function"] != "hold" || names[..2] == ["hold", "main"], "{names:?}");
        stack["site"]["function"] == "hold"
    };
    let held: f64 =
        object["stacks"].as_array().unwrap().iter().filter(of_hold).map(|stack| number(&stack["live"]["bytes"])).sum();
    assert!((held / 6e6 - 1.0).abs() < 0.1, "{held} bytes for 6 MB: {object}");
    // neap's own thread may have a sample, too.
    assert!(object["samples_without_stack"].as_u64() < Some(3) && object["samples_not_kept"] == 0, "{object}");
    // So may its creation, whose stack is deeper than its copy.
    let creates = |stack: &&Value| stack["frames"].to_string().contains("pthread_create");
    let created = object["stacks"].as_array().unwrap().iter().filter(creates).count() as u64;
    assert!(object["stacks_incomplete"].as_u64() <= Some(created) && object["damaged_blocks"] == 0, "{object}");
    program.go_on();
}

/// A server that leaks 1000 bytes in every second request, and has a cache and passing memory. With
/// an argument, it ends after so many requests.
const LEAKING: &str = r#"
#include <stdlib.h>
#include <unistd.h>
char *cache[64], *volatile passing, *volatile header;
__attribute__((noinline)) static void copy_header(void) {
  header = malloc(1000);
  __asm__ volatile("");
}
__attribute__((noinline)) static void answer(int n) {
  passing = malloc(20000);
  free(passing);
  free(cache[n % 64]);
  cache[n % 64] = malloc(3000);
  copy_header();
  if (n % 2) free(header);
  __asm__ volatile("");
}
int main(int count, char **words) {
  int most = count > 1 ? atoi(words[1]) : 1 << 30;
  for (int n = 0; n < most; n++) { answer(n); if (count < 2) usleep(200); }
  return 3;
}
"#;

/// A server that loses 1000 bytes in one of 1000 requests, and allocates 2000 bytes in each.
const LEAKING_LITTLE: &str = r#"
#include <stdlib.h>
#include <unistd.h>
char *volatile passing, *volatile header;
__attribute__((noinline)) static void copy_header(void) {
  header = malloc(1000);
  __asm__ volatile("");
}
int main(void) {
  for (int n = 0;; n++) {
    passing = malloc(1000);
    copy_header();
    if (n % 1000) free(header);
    free(passing);
    usleep(1000);
  }
}
"#;

#[test]
fn small_leak_is_named_without_options() {
    let program = compiled(&folder("little"), "little", LEAKING_LITTLE);
    let mut server = Command::new(&program).env("LD_PRELOAD", library()).spawn().unwrap();
    numbers_with(server.id(), "page", |_| true);
    // Half of the time has some 15 leaks. Two of five are in a sample.
    let place = "    copy_header (profile-little/little.c:5)\n    main";
    let is_named = (0..3).any(|_| {
        let output = neap("leaks", server.id(), &["--seconds", "30"]);
        let text = String::from_utf8(output.stdout).unwrap();
        eprintln!("{text}");
        text.contains(place) && text.contains("Of leaks of ")
    });
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(is_named, "see above");
}

/// A program that runs and makes no call until it has input. Then it keeps all that it allocates.
const WAITING: &str = r#"
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
char *volatile kept;
int main(void) {
  kept = malloc(1000);
  puts("ready"); fflush(stdout);
  struct pollfd input = {0, POLLIN, 0};
  while (poll(&input, 1, 1) == 0) {}
  for (;;) { kept = malloc(1000); usleep(100); }
}
"#;

#[test]
fn profile_waits_for_a_slow_call_of_a_process_with_one_thread() {
    let folder = folder("waits");
    let mut command = Command::new(compiled(&folder, "waiting", WAITING));
    command.env("LD_PRELOAD", library());
    let mut program = Program::run(command);
    program.hear("ready");
    let (pid, file) = (program.id(), folder.join("heap.folded"));
    let begin = || {
        let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
        neap.args(["profile", &pid.to_string(), "--seconds", "1", "--every", "4k", "-o"]).arg(&file);
        let mut profile = neap.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut errors = BufReader::new(profile.stderr.take().unwrap());
        let mut notice = String::new();
        errors.read_line(&mut notice).unwrap();
        assert!(notice.contains("has not answered yet: it has no thread of neap's, as it has one"), "{notice}");
        (profile, errors)
    };
    let (profile, mut errors) = begin();
    // SAFETY: a child that was not waited for. The signal ends its wait.
    unsafe { libc::kill(profile.id() as i32, libc::SIGINT) };
    let (mut error, status) = (String::new(), profile.wait_with_output().unwrap().status);
    errors.read_to_string(&mut error).unwrap();
    assert!(!status.success() && error.contains("a signal has ended the wait"), "{error}");
    assert!(!file.exists(), "nothing was written");
    setting(pid, "off");
    let (profile, _errors) = begin();
    program.go_on();
    assert!(profile.wait_with_output().unwrap().status.success());
    let folded = fs::read_to_string(&file).unwrap();
    assert!(folded.contains(";main "), "{folded}");
    setting(pid, "off");
    program.child.kill().unwrap();
}

#[test]
fn leak_is_named_by_file_and_line_and_a_cache_is_not() {
    let program = compiled(&folder("leaks"), "leaking", LEAKING);
    let mut server = Command::new(&program).env("LD_PRELOAD", library()).spawn().unwrap();
    numbers_with(server.id(), "page", |_| true);
    let output = neap("leaks", server.id(), &["--seconds", "4", "--every", "16k"]);
    server.kill().unwrap();
    server.wait().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("    copy_header (profile-leaks/leaking.c:5)\n    answer (profile-leaks/leaking.c:13)"),
        "{text}"
    );
    assert!(!text.contains("    answer (profile-leaks/leaking.c:12)\n    main"), "the cache: {text}");
    // At the end of a program, its cache is there, too.
    let mut leaks = Command::new(env!("CARGO_BIN_EXE_neap"));
    leaks.args(["leaks", "--every", "4k", "--library"]).arg(library()).arg("--").arg(&program).arg("4000");
    let output = leaks.env_remove("NEAP").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{text}");
    let (leak, cache) = (
        text.find("    copy_header (profile-leaks/leaking.c:5)"),
        text.find("    answer (profile-leaks/leaking.c:12)"),
    );
    assert!(leak.is_some() && cache.is_some() && leak < cache, "{text}");
}

/// A program with objects that are freed at once, others that are freed after a tenth of a second,
/// and one that is not freed.
const PASSING: &str = r#"
#include <stdlib.h>
#include <unistd.h>
char *volatile passing, *held[2000];
__attribute__((noinline)) static void pass(void) {
  for (int n = 0; n < 20000; n++) { passing = malloc(1000); free(passing); }
}
__attribute__((noinline)) static void hold(void) {
  for (int n = 0; n < 2000; n++) held[n] = malloc(1000);
  __asm__ volatile("");
}
__attribute__((noinline)) static void keep(void) { passing = malloc(1000000); __asm__ volatile(""); }
int main(void) {
  keep();
  for (int round = 0; round < 3; round++) {
    pass();
    hold();
    usleep(100000);
    for (int n = 0; n < 2000; n++) free(held[n]);
  }
  return 0;
}
"#;

#[test]
fn lifetimes_are_those_from_allocation_to_free() {
    let folder = folder("lifetimes");
    let program = compiled(&folder, "passing", PASSING);
    let file = folder.join("profile.pb.gz");
    run_profiled(&file, "16k", &[program.to_str().unwrap()]);
    let read = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
        let output = command.args(["profile", "--allocated", "--read"]).arg(&file).args(more).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let profile: Value = serde_json::from_str(&read(&["--json"])).unwrap();
    let freed = |name: &str| {
        let stacks = profile["stacks"].as_array().unwrap();
        &stacks.iter().find(|stack| stack["site"]["function"] == name).unwrap()["freed"]
    };
    let number = |value: &Value| value.as_f64().unwrap();
    let lifetime = |name| number(&freed(name)["mean_lifetime_seconds"]);
    assert!(lifetime("hold") >= 0.1 && lifetime("pass") < lifetime("hold"), "{profile}");
    assert!((number(&freed("hold")["objects"]) / 6000.0 - 1.0).abs() < 0.3, "{profile}");
    assert_eq!(freed("keep")["mean_lifetime_seconds"], Value::Null);
    let table = read(&[]);
    let row = |name: &str| table.lines().find(|line| line.starts_with(&format!("| {name} "))).unwrap();
    assert!(row("hold").contains("s |") && row("keep").ends_with(" - |"), "{table}");
}

/// A program that holds memory by two functions. Then it frees what the first one holds, and the
/// second allocates more. It waits for its input before each step.
const CHANGING: &str = r#"
#include <stdio.h>
#include <stdlib.h>
char *held[64], *more[20000];
__attribute__((noinline)) static void hold(void) {
  for (int n = 0; n < 64; n++) held[n] = malloc(100000);
  __asm__ volatile("");
}
__attribute__((noinline)) static void grow(int from, int to) {
  for (int n = from; n < to; n++) more[n] = malloc(1000);
  __asm__ volatile("");
}
int main(void) {
  hold();
  grow(0, 4000);
  puts("first"); fflush(stdout); getchar();
  for (int n = 0; n < 64; n++) free(held[n]);
  grow(4000, 20000);
  puts("second"); fflush(stdout); getchar();
  return 0;
}
"#;

#[test]
fn profiles_are_compared_in_every_format_and_by_pprof() {
    let folder = folder("compare");
    let mut command = Command::new(compiled(&folder, "changing", CHANGING));
    command.env("NEAP", "background:on,profile:8k").env("LD_PRELOAD", library());
    let mut program = Program::run(command);
    let file = |name: &str| folder.join(name).to_str().unwrap().to_string();
    let (old, new) = (file("old.pb.gz"), file("new.pb.gz"));
    let profiled = |output: &Output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    program.hear("first");
    profiled(&neap("profile", program.id(), &["--seconds", "1", "-o", &old]));
    program.go_on();
    program.hear("second");
    let compared = profiled(&neap("profile", program.id(), &["--seconds", "1", "--compare", &old, "-o", &new]));
    assert!(compared.contains(&format!("go tool pprof -diff_base {old} {new}")), "{compared}");
    let read = |options: &[&str]| {
        let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
        neap.args(["profile", "--read", &new, "--compare", &old]).args(options).output().unwrap()
    };
    let object: Value = serde_json::from_slice(&read(&["--json"]).stdout).unwrap();
    let sites = object["sites"].as_array().unwrap();
    let change = |at: usize| (&sites[at]["of"]["function"], sites[at]["change"]["change_bytes"].as_f64().unwrap());
    let near = |bytes: f64, expected: f64| (bytes / expected - 1.0).abs() < 0.15;
    let (first, last) = (change(0), change(sites.len() - 1));
    assert!(first.0 == "grow" && near(first.1, 16e6), "{first:?}");
    assert!(last.0 == "hold" && near(last.1, -6.4e6), "{last:?}");
    assert!(sites[0]["of"]["line"].as_u64() > Some(0), "one build: lines are told apart");
    let table = profiled(&read(&[]));
    let rows: Vec<&str> = table.lines().filter(|line| line.contains("changing.c:")).collect();
    assert!(rows[0].contains("grow") && rows[0].contains(" +1") && rows.last().unwrap().contains("hold"), "{table}");
    for name in ["growth.folded", "growth.svg", "growth.html"] {
        profiled(&read(&["-o", &file(name)]));
        let text = fs::read_to_string(file(name)).unwrap();
        assert!(text.contains("main") && text.contains("grow"), "{name}: {text}");
    }
    let folded = fs::read_to_string(file("growth.folded")).unwrap();
    let numbers = |name: &str| {
        let line = folded.lines().find(|line| line.contains(name)).unwrap();
        let mut numbers = line.rsplit(' ').map(|number| number.parse::<f64>().unwrap());
        (numbers.next().unwrap(), numbers.next().unwrap())
    };
    let (now, before) = numbers(";hold ");
    assert!(now == 0.0 && near(before, 6.4e6), "{folded}");
    // A view that a file does not have.
    let refused = read(&["--peak"]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && error.contains("live (--live)"), "{error}");
    let mut go = Command::new("go");
    go.args(["tool", "pprof", "-top", "-sample_index=inuse_space", "-diff_base", &old, &new]);
    let Ok(go) = go.output() else {
        eprintln!("skipped: there is no go");
        return;
    };
    let top = String::from_utf8_lossy(&go.stdout);
    let growth = top.lines().find(|line| line.ends_with(" grow")).unwrap_or_default().trim_start().to_string();
    let megabytes = growth.split("MB").next().unwrap().parse::<f64>().unwrap_or_default();
    assert!(near(megabytes * 1048576.0, 16e6) && top.contains(" hold"), "{top}");
    assert!(top.lines().any(|line| line.trim_start().starts_with('-') && line.ends_with(" hold")), "{top}");
}
