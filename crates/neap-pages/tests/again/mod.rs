//! A test in a process of its own: the same test program again, with variables that say what to do.
//!
//! Sits between a test and what it could not survive, or what has to be set before a process starts. A test that is run
//! again this way finds its variable set; without it, it does nothing.
#![allow(dead_code, reason = "not every test file uses every piece")]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

/// What a test that was started again is to do.
const CASE: &str = "NEAP_TEST_CASE";

/// What this process was started for, if it was started again.
pub(crate) fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// Runs the test `name` of this program in a process of its own, with options for the process's manager.
pub(crate) fn again(name: &str, case: &str, options: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads", "1"]);
    command.env(CASE, case).env("NEAP", options).env("RUST_BACKTRACE", "0").output().unwrap()
}

/// The same, which is to succeed; its output is this test's.
pub(crate) fn succeeds(name: &str, case: &str, options: &str) {
    let answer = again(name, case, options);
    let (out, error) = (String::from_utf8_lossy(&answer.stdout), String::from_utf8_lossy(&answer.stderr));
    println!("{case}, {options}: {}\n{out}{error}", answer.status);
    assert!(answer.status.success() && out.contains("1 passed"), "{case} with {options}: {}", answer.status);
}

/// The same, which is to end by SIGABRT; answers its lines that come from neap.
pub(crate) fn dies(name: &str, case: &str, options: &str) -> Vec<String> {
    let answer = again(name, case, options);
    let error = String::from_utf8_lossy(&answer.stderr);
    assert_eq!(answer.status.signal(), Some(libc::SIGABRT), "{case} with {options}: {}\n{error}", answer.status);
    error.lines().filter_map(|line| line.strip_prefix("neap: ")).map(String::from).collect()
}
