//! The state of a process at one moment, and the differences between two.
//!
//! A [`Reading`] comes from the process's page of numbers and from `/proc`, without a request to
//! the process. Panes are pure functions of readings.

use core::time::Duration;
use std::sync::Arc;

use anyhow::{Context, Result};

use crate::look::allowance::Allowance;
use crate::look::fresh;
use crate::look::handle::ProcessHandle;
use crate::look::stat_model::Numbers;
use crate::look::stat_reader::{ProcessStatus, monotonic};

/// The state at one moment.
#[derive(Default)]
pub(super) struct Reading {
    pub(super) pid: i32,
    pub(super) name: String,
    pub(super) numbers: Numbers,
    /// Bytes.
    pub(super) resident: u64,
    pub(super) kernel: Kernel,
    /// Times of this reading (`at`) and of its numbers (`published`), in nanoseconds of the clock
    /// of pages.
    pub(super) at: u64,
    pub(super) published: u64,
    /// The time of day.
    pub(super) clock: String,
}

/// Counters of the kernel.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Kernel {
    /// Page faults without (`minor`) and with (`major`) a read from disk.
    pub(crate) minor: u64,
    pub(crate) major: u64,
    /// Whether the main thread has ended while other threads run. This command cannot read the page
    /// of such a process. A process is also in this state for a moment while a thread other than
    /// the main thread executes a program.
    pub(crate) headless: bool,
}

impl Kernel {
    /// The current counters of a process; `None` if it has ended.
    pub(crate) fn read(handle: &ProcessHandle) -> Option<Kernel> {
        Kernel::parse(&handle.state_line()?)
    }

    /// Parses a line of `/proc/PID/stat` from the state on; `None` for a process that has ended.
    fn parse(line: &str) -> Option<Kernel> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        let (over, threads): (bool, u64) = (matches!(*fields.first()?, "Z" | "X"), number(17)?);
        let kernel = Kernel { minor: number(7)?, major: number(9)?, headless: over };
        (!over || threads > 1).then_some(kernel)
    }
}

impl Reading {
    /// Reads the state of a process.
    pub(super) fn take(handle: &Arc<ProcessHandle>, time: Duration) -> Result<Reading> {
        let process = ProcessStatus::read(handle, Allowance::new(time))?;
        let page = fresh::page(&process)?;
        let numbers = Numbers::read(&process, &page)?;
        let kernel = Kernel::read(handle).with_context(|| format!("process {} has ended", handle.pid))?;
        let resident = process.resident_kib << 10;
        let (at, published) = (monotonic(), page.published);
        let (pid, name, clock) = (process.pid, process.name, time_of_day());
        Ok(Reading { pid, name, numbers, resident, kernel, at, published, clock })
    }

    /// Bytes of a number of pages.
    pub(super) fn bytes(&self, pages: u64) -> u64 {
        pages.saturating_mul(self.numbers.mode.page_size)
    }
}

/// The time of day for people.
pub(super) fn time_of_day() -> String {
    // SAFETY: `time` accepts a null pointer, and all-zero bytes are a valid `tm`.
    let (now, mut time) = unsafe { (libc::time(core::ptr::null_mut()), core::mem::zeroed::<libc::tm>()) };
    // SAFETY: `now` and `time` are live locals. The call reads the first and writes the second.
    unsafe { libc::localtime_r(&raw const now, &raw mut time) };
    format!("{:02}:{:02}:{:02}", time.tm_hour, time.tm_min, time.tm_sec)
}

/// Two readings of one process. The first may be the same as the second.
#[derive(Clone, Copy)]
pub(super) struct Pair<'a> {
    pub(super) previous: &'a Reading,
    pub(super) current: &'a Reading,
}

impl Pair<'_> {
    /// Growth of a counter.
    pub(super) fn grown(&self, counter: impl Fn(&Reading) -> u64) -> u64 {
        counter(self.current).saturating_sub(counter(self.previous))
    }

    /// Growth per second of a counter of the kernel. Such a counter is always current.
    pub(super) fn rate_of_kernel(&self, counter: impl Fn(&Reading) -> u64) -> Option<f64> {
        rate(self.grown(counter), self.between())
    }

    /// Growth per second of a published number that has grown by `grown`.
    pub(super) fn rate(&self, grown: u64) -> Option<f64> {
        // The numbers in a reading are of the last tick. So the time between two numbers differs
        // from that between their readings by up to one interval of ticks. A process that slept
        // counted nothing meanwhile. So a longer time is cut to the time between the readings and
        // one interval.
        let tick = Duration::from_millis(self.current.numbers.mode.interval_ms);
        let published = Duration::from_nanos(self.current.published.saturating_sub(self.previous.published));
        let between = self.between();
        let whole = between.is_zero() || published.is_zero();
        rate(grown, if whole { between } else { published.min(between.saturating_add(tick)) })
    }

    fn between(&self) -> Duration {
        Duration::from_nanos(self.current.at.saturating_sub(self.previous.at))
    }

    /// Age of the numbers.
    pub(super) fn age(&self) -> Duration {
        Duration::from_nanos(self.current.at.saturating_sub(self.current.published))
    }
}

/// Returns `grown` per second; `None` if no time has passed.
fn rate(grown: u64, time: Duration) -> Option<f64> {
    (!time.is_zero()).then(|| grown as f64 / time.as_secs_f64())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::{Value, json};

    /// A reading of a process with these published numbers, at a time in milliseconds.
    pub(in crate::top) fn reading(at: u64, numbers: &Value) -> Reading {
        Reading {
            pid: 1234,
            name: "redis-server".to_string(),
            numbers: Numbers::deserialize(numbers).unwrap(),
            resident: 100 << 20,
            kernel: Kernel { minor: at * 3, major: 0, headless: false },
            at: at * 1_000_000,
            published: (at - 120) * 1_000_000,
            clock: format!("13:42:{:02}", at / 1000),
        }
    }

    /// Two readings a second apart, of a process with a limit, two nodes and per-CPU data.
    pub(in crate::top) fn readings() -> [Reading; 2] {
        let node = |node: u64, waits: u64| {
            json!({
                "node": node, "managed": 20_000, "free": 8000, "backed_free": 1000 + node, "used": 12_000, "listed": 300,
                "highs": 700, "zone_waits": waits, "misses": node * 3,
                "watermarks": {"min": 100, "low": 200, "high": 300},
            })
        };
        let cpu = |cpu: u64, bytes: u64, list: u64| json!({"cpu": cpu, "kind": "rseq", "cached_bytes": bytes, "stacks": cpu + 1, "page_list": list, "list_high": 504});
        let object = |fences: u64, background: &str, released: u64, cpus: Value| {
            json!({
                "version": "9.9",
                "mode": {"slots": "rseq", "background": background, "interval_ms": 250, "page_size": 4096},
                "bytes": {"used": 60 << 20, "cached": 10 << 20, "unaccounted": 0},
                "per_cpu": {"used": 4 << 20, "free": 1 << 20},
                "pages": {
                    "budget": 65_536, "used": 24_000, "listed": 600, "backed_free": 2001, "populated": fences * 100,
                    "watermarks": {"min": 200, "low": 400, "high": 600},
                },
                "released": {"pages": released, "calls": released / 100, "failures": released / 1000},
                "ticks": fences / 2, "drains": fences / 5, "fences": fences, "skipped": fences / 20,
                "lists": {"drains": fences / 10, "need_drains": fences / 10, "need_pages": fences},
                "holes": {"pages": 77, "refilled": released / 2},
                "nodes": [node(0, fences), node(1, fences * 3)],
                "cpus": cpus,
            })
        };
        let before = object(10, "awake", 0, json!([cpu(0, 4096, 10), cpu(2, 9000, 0)]));
        let after = object(30, "asleep", 1500, json!([cpu(0, 40_960, 10), cpu(1, 300, 252), cpu(2, 1000, 0)]));
        [reading(10_000, &before), reading(11_000, &after)]
    }

    /// Two readings a second apart, of a process with memory groups.
    pub(in crate::top) fn readings_with_groups() -> [Reading; 2] {
        readings().map(|mut reading| {
            reading.numbers.groups = Some(serde::de::IgnoredAny);
            reading
        })
    }

    #[test]
    fn a_process_has_groups_if_it_says_so() {
        let has = |numbers: Value| reading(1000, &numbers).numbers.groups.is_some();
        assert!(has(json!({"groups": {"live": 2, "dying": 0, "ids": 3}})));
        assert!(!has(json!({"groups": null})) && !has(json!({})));
    }

    #[test]
    fn a_line_of_the_kernel_is_read_from_the_state_on() {
        let line = |state: &str, threads: u32| {
            format!("{state} 1 2 3 4 5 6 700 8 900 10 11 12 13 14 15 16 {threads} 18 1900 20 21")
        };
        let kernel = Kernel { minor: 700, major: 900, headless: false };
        assert_eq!(Kernel::parse(&line("S", 1)), Some(kernel));
        assert_eq!((Kernel::parse(&line("Z", 1)), Kernel::parse(&line("X", 1))), (None, None));
        assert_eq!(Kernel::parse(&line("Z", 2)), Some(Kernel { headless: true, ..kernel }));
        assert_eq!((Kernel::parse("S 1 2"), Kernel::parse("")), (None, None));
        let own = ProcessHandle::open(std::process::id() as i32).unwrap();
        assert!(Kernel::read(&own).is_some_and(|kernel| kernel.minor > 0));
    }

    #[test]
    fn rates_are_of_the_time_in_which_something_was_counted() {
        let reading = |at: u64, published: u64, count: u64| Reading {
            published: published * 1_000_000,
            kernel: Kernel { minor: count, ..Kernel::default() },
            ..reading(at, &json!({"fences": count, "mode": {"interval_ms": 250}}))
        };
        let rates = |previous: &Reading, current: &Reading| {
            let pair = Pair { previous, current };
            (
                pair.rate(pair.grown(|reading| reading.numbers.fences)),
                pair.rate_of_kernel(|reading| reading.kernel.minor),
            )
        };
        let first = reading(10_000, 9_900, 100);
        assert_eq!(rates(&first, &first), (None, None), "one reading has no rate");
        // Numbers of five ticks in the time of four.
        assert_eq!(rates(&first, &reading(11_000, 11_150, 150)), (Some(40.0), Some(50.0)));
        // The numbers did not change.
        assert_eq!(rates(&first, &reading(11_000, 9_900, 100)), (Some(0.0), Some(0.0)));
        // It had slept since long ago.
        let asleep = reading(10_000, 1_000, 100);
        assert_eq!(rates(&asleep, &reading(11_000, 10_900, 150)).0, Some(40.0));
        // Another program in the same process counts from the start.
        assert_eq!(rates(&first, &reading(11_000, 10_900, 3)).0, Some(0.0));
    }
}
