//! Counts of checks that passed, failed or could not be made, and the closing line.
//!
//! Every command with many small checks has one. A skipped check is printed with its reason and
//! counted separately: it never passes.

use std::sync::Mutex;

use anyhow::{Result, bail};

/// Names of the checks of all reports that could not be made, for the summary of `ci`.
static SKIPPED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Returns the names of checks skipped since the last call.
pub(crate) fn take_skipped() -> Vec<String> {
    SKIPPED.lock().map(|mut names| core::mem::take(&mut *names)).unwrap_or_default()
}

/// Passed, failed and skipped checks so far.
#[derive(Default)]
pub(crate) struct Report {
    passed: usize,
    skipped: usize,
    failed: Vec<String>,
}

impl Report {
    /// Records one check. A failure is printed at once.
    pub(crate) fn check(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => {
                println!("  ok       {name}");
                self.passed += 1;
            }
            Err(error) => {
                println!("  FAILED   {name}: {error:#}");
                self.failed.push(name.to_string());
            }
        }
    }

    /// Records a check that could not be made here.
    pub(crate) fn skip(&mut self, name: &str, reason: &str) {
        println!("  skipped  {name}: {reason}");
        self.skipped += 1;
        if let Ok(mut names) = SKIPPED.lock() {
            names.push(name.to_string());
        }
    }

    /// Whether no check passed or failed.
    pub(crate) fn is_empty(&self) -> bool {
        self.passed == 0 && self.failed.is_empty()
    }

    /// Prints the closing line; an error if anything failed or nothing passed.
    pub(crate) fn close(self, what: &str) -> Result<()> {
        println!("{what}: {} passed, {} failed, {} skipped", self.passed, self.failed.len(), self.skipped);
        if let Some(first) = self.failed.first() {
            bail!("{what}: {} checks failed, the first was: {first}", self.failed.len());
        }
        if self.passed == 0 {
            bail!("{what}: no check was made");
        }
        Ok(())
    }
}
