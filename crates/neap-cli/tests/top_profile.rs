//! The profile in `neap top`: as text, as JSON and in a terminal, on a C program with known sites.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use neap_testing::terminal::Terminal;
use running::{Program, compiled, library, neap, numbers_with, object};
use serde_json::Value;

/// A program that holds memory by a function, and after its input by two others. A third one frees
/// what it allocates. In the end the program executes itself.
const HOLDING: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
char *kept[600000], *volatile passing;
static int count;
/* Fast allocation is sampled at a wider distance. */
static void rest(int n, int each) { if (n % each == 0) usleep(5000); }
__attribute__((noinline)) static void hold_before(int objects) {
  for (int n = 0; n < objects; n++) kept[count++] = malloc(9000);
  __asm__ volatile("");
}
__attribute__((noinline)) static void hold_large(int objects) {
  for (int n = 0; n < objects; n++) { rest(n, 100); kept[count++] = malloc(10000); }
  __asm__ volatile("");
}
__attribute__((noinline)) static void hold_small(int objects) {
  for (int n = 0; n < objects; n++) { rest(n, 2000); kept[count++] = malloc(500); }
  __asm__ volatile("");
}
__attribute__((noinline)) static void pass(int objects) {
  for (int n = 0; n < objects; n++) { rest(n, 100); passing = malloc(10000); free(passing); }
  __asm__ volatile("");
}
int main(int words_count, char **words) {
  int scale = atoi(words[1]);
  hold_before(4000 * scale);
  puts("ready"); fflush(stdout); getchar();
  hold_large(6000 * scale);
  pass(4000 * scale);
  hold_small(80000 * scale);
  puts("held"); fflush(stdout); getchar();
  execv("/proc/self/exe", words);
  return 1;
}
"#;

fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("top-profile");
        fs::create_dir_all(&folder).unwrap();
        compiled(&folder, "holding", HOLDING)
    })
}

/// Starts the program with so many times 100 MB for its two functions.
fn start(scale: u32, options: &str) -> Program {
    let mut command = Command::new(program());
    command.arg(scale.to_string()).env("NEAP", format!("background:on,{options}")).env("LD_PRELOAD", library());
    let mut program = Program::run(command);
    program.hear("ready");
    program
}

/// `neap top` of a process in a terminal.
fn top(pid: u32, more: &[&str]) -> Terminal {
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.args(["top", &pid.to_string(), "--interval", "100"]).args(more);
    let mut terminal = Terminal::run(command, 100, 40);
    terminal.wait_for("screen", |screen| screen.starts_with(&format!("neap top {pid} (")));
    terminal
}

fn setting(pid: u32, value: &str) {
    numbers_with(pid, "setting", |object| object["settings"]["profile"] == *value);
}

/// Waits until a profile has begun: samples are taken from then on.
fn begun(terminal: &mut Terminal) {
    terminal.wait_for("profile", |screen| screen.contains("-- Profile of "));
}

/// Whether an estimate is within a fifth of the truth.
fn is_near(bytes: f64, truth: f64) -> bool {
    (bytes / truth - 1.0).abs() < 0.2
}

/// The bytes of a function's row on a screen.
fn bytes_of(screen: &str, function: &str) -> Option<f64> {
    let row = screen.lines().find(|line| line.contains(&format!("  {function}")))?;
    let mega = row.split_whitespace().next()?.strip_suffix('M')?;
    Some(mega.parse::<f64>().ok()? * (1 << 20) as f64)
}

#[test]
fn text_and_json_have_known_functions_and_the_unsampled_rest() {
    let mut program = start(1, "");
    let pid = program.id();
    assert!(neap("set", pid, &["profile=96k"]).status.success());
    program.go_on();
    program.hear("held");
    let object = object("top", pid, &["--profile", "--interval", "200"]).unwrap();
    let profile = &object["profile"];
    assert!(object["profile_failed"].is_null() && profile["every_bytes"] == 96 << 10, "{object}");
    let sites = profile["sites"].as_array().unwrap();
    for (at, (name, truth)) in [("hold_large", 60e6), ("hold_small", 40e6)].into_iter().enumerate() {
        let site = &sites[at];
        assert_eq!(site["function"], name, "{profile}");
        assert!(is_near(site["bytes"].as_f64().unwrap(), truth), "{name}: {site}");
        assert!(site["file"].as_str().unwrap().ends_with("/holding.c") && site["line"].as_u64() > Some(10), "{site}");
    }
    let number = |value: &Value| value.as_f64().unwrap();
    let (live, rest) = (number(&profile["live"]["bytes"]), number(&profile["unsampled_bytes"]));
    let sum: f64 = sites.iter().map(|site| number(&site["bytes"])).sum();
    assert!((sum - live).abs() < 10.0 && profile["sites_left_out"] == 0, "{profile}");
    // The rest is a difference of an estimate of 100 MB.
    assert!((rest - 36e6).abs() < 16e6 && profile["samples_lost"] == 0, "{profile}");
    let text = String::from_utf8(neap("top", pid, &["--once", "--profile", "--interval", "200"]).stdout).unwrap();
    assert!(text.contains("-- Profile of 0 s, a sample every 96.0K --"), "{text}");
    assert!(text.contains("  hold_large (top-profile/holding.c:"), "{text}");
    assert!(bytes_of(&text, "hold_small (").is_some_and(|bytes| is_near(bytes, 40e6)), "{text}");
    assert!(text.contains("  [in no sample: allocated before sampling]"), "{text}");
    // Another command's sampling goes on.
    setting(pid, "98304");
    let without = String::from_utf8(neap("top", pid, &["--once", "--interval", "50"]).stdout).unwrap();
    assert!(!without.contains("-- Profile"), "{without}");
}

#[test]
fn key_shows_known_functions_live_and_puts_the_option_back() {
    let mut program = start(5, "");
    let pid = program.id();
    let mut terminal = top(pid, &[]);
    setting(pid, "off");
    terminal.press("p");
    begun(&mut terminal);
    setting(pid, "524288");
    let screen = terminal.screen();
    assert!(screen.contains("[in no sample: allocated before sampling]") && screen.contains("  100.0  "), "{screen}");
    program.go_on();
    program.hear("held");
    let is_whole = |screen: &str| {
        let near = |name, truth| bytes_of(screen, name).is_some_and(|bytes| is_near(bytes, truth));
        near("hold_large (top-profile/holding.c:1", 300e6) && near("hold_small (top-profile/holding.c:1", 200e6)
    };
    let screen = terminal.wait_for("functions", is_whole);
    assert!(!screen.contains("pass ("), "it holds nothing: {screen}");
    // Rows are sorted as those of other panes.
    let place = |screen: &str, name: &str| screen.lines().position(|line| line.contains(name));
    assert!(place(&screen, "  hold_large (") < place(&screen, "  hold_small ("), "{screen}");
    terminal.press("r");
    terminal.wait_for("order", |screen| place(screen, "  hold_large (") > place(screen, "  hold_small ("));
    terminal.press("p");
    terminal.wait_for("end of the pane", |screen| !screen.contains("-- Profile"));
    setting(pid, "off");
    // Once more, and the end with the pane on.
    terminal.press("p");
    begun(&mut terminal);
    setting(pid, "524288");
    terminal.press("q");
    assert!(terminal.end().0.success());
    terminal.assert_restored();
    setting(pid, "off");
}

#[test]
fn top_exit_restores_only_profile_option_it_set() {
    let program = start(1, "");
    let pid = program.id();
    let mut terminal = top(pid, &["--profile"]);
    begun(&mut terminal);
    setting(pid, "524288");
    // SAFETY: a signal to a child of this process that was not awaited yet.
    unsafe { libc::kill(terminal.child.id() as i32, libc::SIGTERM) };
    assert_eq!(terminal.end().0.signal(), Some(libc::SIGTERM));
    terminal.assert_restored();
    setting(pid, "off");
    let sampled = start(1, "profile:64k");
    let mut terminal = top(sampled.id(), &["--profile"]);
    let screen = terminal.wait_for("functions", |screen| screen.contains("  hold_before ("));
    assert!(screen.contains("a sample every 64.0K"), "{screen}");
    terminal.press("q");
    assert!(terminal.end().0.success());
    setting(sampled.id(), "65536");
}

#[test]
fn pane_says_why_there_is_no_profile_and_how_to_get_one() {
    let mut program = start(1, "");
    let pid = program.id();
    let mut terminal = top(pid, &["--profile"]);
    begun(&mut terminal);
    assert!(neap("set", pid, &["profile=off"]).status.success());
    terminal.wait_for("reason", |screen| {
        screen.contains("another command has switched sampling off; p twice begins another profile")
    });
    terminal.press("pp");
    begun(&mut terminal);
    // The program executes itself: what was sampled is gone, and so is the option.
    program.go_on();
    program.hear("held");
    program.go_on();
    program.hear("ready");
    terminal.wait_for("reason", |screen| {
        screen.contains(&format!("process {pid} has executed another program; p twice begins another profile"))
    });
    setting(pid, "off");
    assert!(neap("set", pid, &["profile=1m"]).status.success());
    terminal.press("q");
    assert!(terminal.end().0.success());
    setting(pid, "1048576");
}

#[test]
fn process_that_does_not_answer_is_not_waited_for_by_the_screen() {
    let program = start(1, "");
    let pid = program.id();
    let mut terminal = top(pid, &["--timeout", "2"]);
    program.stop();
    terminal.press("p");
    terminal.wait_for("begin", |screen| screen.contains("The first samples are being read."));
    terminal.wait_for("reason", |screen| screen.contains(&format!("process {pid} has not answered: it is stopped")));
    program.resume();
    terminal.press("pp");
    begun(&mut terminal);
    terminal.press("q");
    assert!(terminal.end().0.success());
    setting(pid, "off");
}

#[test]
fn top_profile_option_left_on_is_reported_and_later_restored() {
    let program = start(1, "");
    let pid = program.id();
    let begin_and_stop = || {
        let mut terminal = top(pid, &["--profile"]);
        begun(&mut terminal);
        setting(pid, "524288");
        program.stop();
        terminal.press("p");
        terminal.wait_for("end of the pane", |screen| !screen.contains("-- Profile"));
        terminal
    };
    let stays = format!("sampling stays on; `neap set {pid} profile=off` puts it back");
    // The end comes while the thread waits for the process.
    let mut terminal = begin_and_stop();
    terminal.press("q");
    let (status, screen) = terminal.end();
    assert!(status.code() == Some(1) && screen.contains(&stays), "{status}: {screen}");
    terminal.assert_restored();
    program.resume();
    assert!(neap("set", pid, &["profile=off"]).status.success());
    // A profile begins after the thread has given up; the process samples already.
    let mut terminal = begin_and_stop();
    terminal.wait_for("reason", |screen| screen.contains(&stays));
    terminal.press("p");
    begun(&mut terminal);
    program.resume();
    terminal.press("q");
    let (status, screen) = terminal.end();
    assert!(status.success(), "{status}: {screen}");
    setting(pid, "off");
}

#[test]
fn top_json_profile_ends_with_sampling_or_full_interval() {
    let program = start(1, "");
    let pid = program.id();
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.args(["top", &pid.to_string(), "--json", "--profile", "--interval", "60000"]).stdout(Stdio::piped());
    let (child, start) = (command.spawn().unwrap(), Instant::now());
    setting(pid, "524288");
    assert!(neap("set", pid, &["profile=off"]).status.success());
    let output = child.wait_with_output().unwrap();
    let known: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(known["profile_failed"], "another command has switched sampling off");
    assert!(start.elapsed() < Duration::from_secs(50), "it has waited for the whole interval");
    // A process without a descriptor for its samples.
    let mut closed = Program::start("close", "", &[]);
    closed.hear("ready");
    let start = Instant::now();
    let known = object("top", closed.id(), &["--profile", "--interval", "1500"]).unwrap();
    assert!(known["profile_failed"].as_str().unwrap().contains("has closed neap's descriptor"), "{known}");
    assert!(start.elapsed() >= Duration::from_millis(1500), "rates are of no time");
}

#[test]
fn end_of_the_process_ends_it_with_a_sentence() {
    let program = start(1, "");
    let pid = program.id();
    let mut terminal = top(pid, &["--profile"]);
    begun(&mut terminal);
    // Dead, awaited, and so gone.
    drop(program);
    let (status, screen) = terminal.end();
    assert!(status.success(), "{status}: {screen}");
    assert!(screen.contains(&format!("process {pid} (holding) has ended\n")), "{screen}");
    assert!(!screen.contains("neap:"), "{screen}");
    terminal.assert_restored();
}

#[test]
fn profile_takes_a_process() {
    let output = Command::new(env!("CARGO_BIN_EXE_neap")).args(["top", "--profile", "--once"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
