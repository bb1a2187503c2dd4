//! A test in a process of its own: the same test program again, with variables that select the
//! case.
//!
//! For cases that end the process, or that need settings from its start. A test that is run again
//! this way finds its variable set; without it, it does nothing.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

/// The variable with the case of a test that was started again.
const CASE: &str = "NEAP_TEST_CASE";

/// The case that this process was started for, if any.
pub fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// Runs the test `name` of this program in a process of its own, with options for the process's
/// manager.
pub fn again(name: &str, case: &str, options: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads", "1"]);
    command.env(CASE, case).env("NEAP", options).env("RUST_BACKTRACE", "0").output().unwrap()
}

/// Runs the test in a process of its own, which must succeed. Its output becomes this test's.
pub fn succeeds(name: &str, case: &str, options: &str) {
    let answer = again(name, case, options);
    let (out, error) = (String::from_utf8_lossy(&answer.stdout), String::from_utf8_lossy(&answer.stderr));
    println!("{case}, {options}: {}\n{out}{error}", answer.status);
    assert!(answer.status.success() && out.contains("1 passed"), "{case} with {options}: {}", answer.status);
}

/// Runs the test in a process of its own, which must end by SIGABRT. Returns its lines that come
/// from neap.
pub fn dies(name: &str, case: &str, options: &str) -> Vec<String> {
    let answer = again(name, case, options);
    let error = String::from_utf8_lossy(&answer.stderr);
    assert_eq!(answer.status.signal(), Some(libc::SIGABRT), "{case} with {options}: {}\n{error}", answer.status);
    error.lines().filter_map(|line| line.strip_prefix("neap: ")).map(String::from).collect()
}
