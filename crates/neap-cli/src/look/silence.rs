//! Finds out from `/proc` why a process does not answer a request, while a command waits.
//!
//! neap's thread answers requests. In a process without that thread, a call of the program answers
//! them. If no thread of such a process runs, none makes a call. A stopped process answers nothing.

use core::time::Duration;
use std::fs;
use std::time::Instant;

use crate::look::handle::ProcessHandle;

/// Time until the first look, and between two looks. If two looks in a row agree, [`Vigil::look`]
/// can return a reason.
const FIRST: Duration = Duration::from_millis(200);
const BETWEEN: Duration = Duration::from_millis(500);
/// Most threads that a look reads. For a process with more threads, a look finds no reason, and the
/// command waits until its timeout.
const MOST_THREADS: usize = 256;

/// The reason why no answer will come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    /// A signal or a debugger has stopped the process.
    Stopped,
    /// There is no thread of neap's, and no thread of the program runs.
    Asleep,
}

/// The state of all threads of a process at a look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Threads {
    are_stopped: bool,
    pub(crate) runs_any: bool,
    pub(crate) has_neaps: bool,
    /// Number of times that the threads went to sleep or were preempted.
    switches: u64,
}

impl Threads {
    /// Reads the states of all threads. `None` if there are too many, or the process ends.
    pub(crate) fn look(handle: &ProcessHandle) -> Option<Threads> {
        let mut seen = Threads { are_stopped: true, ..Threads::default() };
        for (count, thread) in fs::read_dir(handle.path("task")).ok()?.enumerate() {
            if count == MOST_THREADS {
                return None;
            }
            seen.add(&fs::read(thread.ok()?.path().join("status")).ok()?);
        }
        Some(seen)
    }

    /// Adds a thread by its `status`.
    fn add(&mut self, status: &[u8]) {
        for line in status.split(|&byte| byte == b'\n') {
            let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
            let value = line[colon + 1..].trim_ascii();
            match &line[..colon] {
                b"Name" => self.has_neaps |= value == b"neap",
                b"State" => {
                    self.are_stopped &= value.starts_with(b"T") || value.starts_with(b"t");
                    self.runs_any |= value.starts_with(b"R");
                }
                b"voluntary_ctxt_switches" | b"nonvoluntary_ctxt_switches" => {
                    let number = str::from_utf8(value).ok().and_then(|number| number.parse().ok());
                    self.switches = self.switches.saturating_add(number.unwrap_or(0));
                }
                _ => {}
            }
        }
    }

    /// Returns the reason for silence, if nothing has changed since the look `before`.
    fn silence(&self, before: &Threads) -> Option<Silence> {
        match self == before && !self.runs_any {
            true if self.are_stopped => Some(Silence::Stopped),
            true if !self.has_neaps => Some(Silence::Asleep),
            _ => None,
        }
    }
}

/// Returns whether a process has a thread of neap's. `true` if it has too many threads to tell.
pub(crate) fn has_neaps_thread(handle: &ProcessHandle) -> bool {
    Threads::look(handle).is_none_or(|threads| threads.has_neaps)
}

/// Looks at the threads of a process from time to time, while a command waits for its answer.
pub(crate) struct Vigil<'a> {
    handle: &'a ProcessHandle,
    next: Instant,
    before: Option<Threads>,
}

impl<'a> Vigil<'a> {
    pub(crate) fn begin(handle: &'a ProcessHandle) -> Vigil<'a> {
        Vigil { handle, next: Instant::now() + FIRST, before: None }
    }

    /// Looks at the process if the next look is due. Returns the reason why the process will not
    /// answer, if this look and the previous one show it.
    pub(crate) fn look(&mut self) -> Option<Silence> {
        if Instant::now() < self.next {
            return None;
        }
        self.next = Instant::now() + BETWEEN;
        let now = Threads::look(self.handle);
        let silence = now.as_ref().zip(self.before.as_ref()).and_then(|(now, before)| now.silence(before));
        self.before = now;
        silence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads(all: &[(&str, &str, u32)]) -> Threads {
        let mut seen = Threads { are_stopped: true, ..Threads::default() };
        for (name, state, switches) in all {
            let text = format!(
                "Name:\t{name}\nState:\t{state}\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t1\n"
            );
            seen.add(text.as_bytes());
        }
        seen
    }

    #[test]
    fn silence_has_a_reason_only_where_no_thread_can_answer() {
        let sleeps = threads(&[("a", "S (sleeping)", 7), ("b", "D (disk sleep)", 8)]);
        assert_eq!(sleeps.switches, 17);
        assert_eq!(sleeps.silence(&sleeps), Some(Silence::Asleep));
        let later = threads(&[("a", "S (sleeping)", 9), ("b", "D (disk sleep)", 8)]);
        assert_eq!(later.silence(&sleeps), None, "a thread has run");
        let runs = threads(&[("a", "S (sleeping)", 7), ("b", "R (running)", 8)]);
        assert_eq!(runs.silence(&runs), None);
        let with = threads(&[("a", "S (sleeping)", 7), ("neap", "S (sleeping)", 8)]);
        assert_eq!(with.silence(&with), None, "neap's thread will wake up");
        let stopped = threads(&[("a", "T (stopped)", 7), ("neap", "t (tracing stop)", 8)]);
        assert_eq!(stopped.silence(&stopped), Some(Silence::Stopped));
        let partly = threads(&[("a", "T (stopped)", 7), ("neap", "S (sleeping)", 8)]);
        assert_eq!(partly.silence(&partly), None);
    }
}
