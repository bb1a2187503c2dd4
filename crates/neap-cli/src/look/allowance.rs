//! The most bytes and time that a look at another process may take, whatever the process answers.
//!
//! Before a command keeps bytes of the process, it [takes](Allowance::take) as many from the
//! allowance. No wait lasts longer than the allowance's time. Commands write output row by row, so
//! a command uses less than 64 MiB in all.

use core::cell::Cell;
use core::time::Duration;
use std::time::Instant;

use anyhow::{Result, bail, ensure};

/// Bytes that a command may keep of one process.
pub(crate) const MOST_BYTES: usize = 40 << 20;
/// Most bytes that an allocation takes besides the requested bytes.
pub(crate) const ALLOCATION: usize = 32;
/// Time of a command, unless the user asks for another.
pub(crate) const USUAL_TIME: Duration = Duration::from_secs(5);

/// The rest of the bytes and of the time.
#[derive(Debug)]
pub(crate) struct Allowance {
    bytes: Cell<usize>,
    most: usize,
    time: Duration,
    end: Instant,
}

impl Allowance {
    pub(crate) fn new(time: Duration) -> Allowance {
        Allowance::of_bytes(MOST_BYTES, time)
    }

    pub(crate) fn of_bytes(most: usize, time: Duration) -> Allowance {
        Allowance { bytes: Cell::new(most), most, time, end: Instant::now() + time }
    }

    /// Takes bytes that the caller is about to keep.
    ///
    /// # Errors
    /// Returns an error if too few bytes or no time is left. With too few bytes left, takes none.
    pub(crate) fn take(&self, bytes: usize) -> Result<()> {
        let Some(rest) = self.bytes.get().checked_sub(bytes) else {
            bail!("it has more than {} MiB of numbers, the most that this command reads", self.most >> 20)
        };
        self.bytes.set(rest);
        self.ensure_time()
    }

    /// Returns an allowance of other bytes and of a part of the time: at most `time`.
    pub(crate) fn part(&self, time: Duration) -> Allowance {
        Allowance::new(time.min(self.end.saturating_duration_since(Instant::now())))
    }

    /// The bytes that are left, for [`Allowance::give_back`].
    pub(crate) fn mark(&self) -> usize {
        self.bytes.get()
    }

    /// Gives back all bytes that were taken since `mark`. The caller has dropped what they were
    /// taken for.
    pub(crate) fn give_back(&self, mark: usize) {
        self.bytes.set(mark);
    }

    /// Checks that time is left.
    ///
    /// # Errors
    /// Returns an error if the time is used up.
    pub(crate) fn ensure_time(&self) -> Result<()> {
        ensure!(
            !self.is_over(),
            "not all of its numbers were read within {} s; --timeout SECONDS allows more",
            self.seconds()
        );
        Ok(())
    }

    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }

    pub(crate) fn end(&self) -> Instant {
        self.end
    }

    /// Returns the seconds that were allowed at the start.
    pub(crate) fn seconds(&self) -> u64 {
        self.time.as_secs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_time_are_used_up() {
        let allowance = Allowance::of_bytes(1 << 20, Duration::from_secs(1000));
        allowance.take(1 << 19).unwrap();
        allowance.take(1 << 19).unwrap();
        assert!(allowance.take(1).unwrap_err().to_string().contains("more than 1 MiB"));
        assert!(allowance.take(usize::MAX).is_err() && allowance.take(0).is_ok());
        let over = Allowance::new(Duration::ZERO);
        assert!(over.is_over() && over.take(0).unwrap_err().to_string().contains("--timeout"));
    }
}
