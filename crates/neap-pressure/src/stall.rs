//! Pressure stall information: the text of a pressure file, and the text by which a program asks
//! for notification.

use crate::text::number;

/// Stall times of a pressure file.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Stalls {
    /// Hundredths of a percent of the last 10 s in which some task waited for memory.
    pub some_10: u32,
    /// Hundredths of a percent of the last 10 s in which all tasks waited for memory.
    pub full_10: u32,
    /// Microseconds in which some task waited so far.
    pub some_us: u64,
    /// Microseconds in which all tasks waited so far.
    pub full_us: u64,
}

impl Stalls {
    /// Adds a line: `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`. Returns whether it is one.
    pub fn add(&mut self, line: &[u8]) -> bool {
        let mut words = line.split(|byte| *byte == b' ');
        let (average, total) = match words.next() {
            Some(b"some") => (&mut self.some_10, &mut self.some_us),
            Some(b"full") => (&mut self.full_10, &mut self.full_us),
            _ => return false,
        };
        let mut found = false;
        for word in words {
            if let Some(value) = word.strip_prefix(b"avg10=").and_then(hundredths) {
                *average = value;
            } else if let Some(value) = word.strip_prefix(b"total=").and_then(number) {
                (*total, found) = (value, true);
            }
        }
        found
    }
}

/// Stall times, and when they were read. Two of them are a window that no trigger is needed for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StallReading {
    /// Microseconds on any clock that does not jump.
    pub at_us: u64,
    /// The stall times of a group or the machine.
    pub stalls: Stalls,
}

impl StallReading {
    /// Returns the hundredths of a percent of the time since `before` in which some task waited for
    /// memory; at most 10,000. `None` if no time has passed, or if the counts began anew, as those
    /// of another group do.
    #[must_use]
    pub fn some_since(&self, before: &StallReading) -> Option<u32> {
        let elapsed = self.at_us.checked_sub(before.at_us).filter(|elapsed| *elapsed > 0)?;
        let waited = self.stalls.some_us.checked_sub(before.stalls.some_us)?;
        let share = u128::from(waited) * 10_000 / u128::from(elapsed);
        Some(share.min(10_000) as u32)
    }
}

/// Returns a number with two decimals as hundredths.
fn hundredths(text: &[u8]) -> Option<u32> {
    let at = text.iter().position(|byte| *byte == b'.')?;
    let (whole, decimals) = (text.get(..at)?, text.get(at + 1..)?);
    if decimals.len() != 2 {
        return None;
    }
    let value = number(whole)?.checked_mul(100)?.checked_add(number(decimals)?)?;
    u32::try_from(value).ok()
}

/// Longest trigger: the kernel cuts a longer write.
pub const LONGEST_TRIGGER: usize = 32;

/// A request for notification when tasks wait longer than `stall_us` in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StallWindow {
    /// Microseconds of waiting in a window.
    pub stall_us: u64,
    /// Microseconds of a window.
    pub window_us: u64,
}

/// Longest window of a trigger in microseconds.
const LONGEST_WINDOW: u64 = 10_000_000;
/// Without CAP_SYS_RESOURCE, the kernel accepts only multiples of these microseconds as windows.
const UNPRIVILEGED_WINDOW: u64 = 2_000_000;
/// Shortest window that every kernel takes with CAP_SYS_RESOURCE.
const SHORTEST_WINDOW: u64 = 500_000;

impl StallWindow {
    /// The threshold of systemd: 200 ms of waiting in 2 s. A process needs no privilege for it.
    pub const DEFAULT: StallWindow = StallWindow { stall_us: 200_000, window_us: 2_000_000 };

    /// Returns the nearest trigger that the kernel takes. `stall_us` stays about the same part of
    /// the window.
    #[must_use]
    pub fn allowed(self, is_privileged: bool) -> StallWindow {
        let window_us = if is_privileged {
            self.window_us.clamp(SHORTEST_WINDOW, LONGEST_WINDOW)
        } else {
            let windows = self.window_us.min(LONGEST_WINDOW).div_ceil(UNPRIVILEGED_WINDOW);
            windows.max(1) * UNPRIVILEGED_WINDOW
        };
        let share = u128::from(self.stall_us) * u128::from(window_us) / u128::from(self.window_us.max(1));
        let stall_us = u64::try_from(share).unwrap_or(u64::MAX).clamp(1, window_us);
        StallWindow { stall_us, window_us }
    }

    /// Writes the text for a pressure file into `buffer`, with a NUL at its end. Returns the
    /// length. The kernel replaces the last byte of a write to `/proc/pressure/memory` by a NUL.
    /// Without the NUL here, the last digit would be lost.
    pub fn write(self, buffer: &mut [u8; LONGEST_TRIGGER]) -> usize {
        let mut end = 0;
        let mut put = |bytes: &[u8]| {
            for (place, byte) in buffer.iter_mut().skip(end).zip(bytes) {
                *place = *byte;
            }
            end += bytes.len();
        };
        put(b"some ");
        for (value, behind) in [(self.stall_us, b' '), (self.window_us, 0)] {
            // Eight digits hold the longest window.
            let mut digits = [0; 8];
            let mut rest = value.min(LONGEST_WINDOW);
            for digit in digits.iter_mut().rev() {
                *digit = b'0' + (rest % 10) as u8;
                rest /= 10;
            }
            let zeroes = digits.iter().take_while(|digit| **digit == b'0').count();
            put(digits.get(zeroes.min(7)..).unwrap_or_default());
            put(&[behind]);
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_by_key() {
        let mut stalls = Stalls::default();
        assert!(stalls.add(b"some avg10=1.25 avg60=0.00 avg300=0.00 total=77"));
        assert!(stalls.add(b"full later=1 avg10=100.00 total=5"));
        assert_eq!(stalls, Stalls { some_10: 125, full_10: 10_000, some_us: 77, full_us: 5 });
        for bad in ["", "some", "none avg10=1.25 total=7", "some avg10=x total=-1"] {
            assert!(!stalls.add(bad.as_bytes()), "{bad}");
        }
    }

    #[test]
    fn share_of_a_window_is_that_of_the_time_between_two_readings() {
        let reading = |at_us, some_us| StallReading { at_us, stalls: Stalls { some_us, ..Stalls::default() } };
        let share =
            |before: (u64, u64), now: (u64, u64)| reading(now.0, now.1).some_since(&reading(before.0, before.1));
        assert_eq!(share((1_000_000, 70), (1_250_000, 25_070)), Some(1000), "25 ms of 250");
        assert_eq!(share((0, 5), (100_000, 5)), Some(0));
        assert_eq!(share((0, 0), (3, 1)), Some(3333));
        // The kernel adds up later than the clock of the reader.
        assert_eq!(share((0, 0), (100_000, 120_000)), Some(10_000));
        assert_eq!(share((0, 0), (1, u64::MAX)), Some(10_000));
        assert_eq!(share((7, 0), (7, 9)), None, "no time has passed");
        assert_eq!(share((8, 0), (7, 9)), None, "the clock jumped");
        assert_eq!(share((0, 9), (7, 8)), None, "another group");
    }

    #[test]
    fn windows_are_what_the_kernel_takes() {
        let allowed = |stall_us, window_us, privileged| {
            let StallWindow { stall_us, window_us } = StallWindow { stall_us, window_us }.allowed(privileged);
            (stall_us, window_us)
        };
        assert_eq!(allowed(100_000, 1_000_000, true), (100_000, 1_000_000));
        assert_eq!(allowed(100_000, 1_000_000, false), (200_000, 2_000_000));
        assert_eq!(allowed(150_000, 3_000_000, false), (200_000, 4_000_000));
        assert_eq!(allowed(1, 60_000_000, false).1, 10_000_000);
        assert_eq!(allowed(0, 0, false), (1, 2_000_000));
        assert_eq!(allowed(u64::MAX, 1, true), (500_000, 500_000));
    }

    #[test]
    fn triggers_end_with_a_nul() {
        let mut buffer = [7; LONGEST_TRIGGER];
        let length = StallWindow { stall_us: 200_000, window_us: 2_000_000 }.write(&mut buffer);
        assert_eq!(&buffer[..length], b"some 200000 2000000\0");
        let length = StallWindow { stall_us: u64::MAX, window_us: 0 }.write(&mut buffer);
        assert_eq!(&buffer[..length], b"some 10000000 0\0");
    }
}
