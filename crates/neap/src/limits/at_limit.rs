//! Heap profiles at a limit: the option `profile_at_limit`.
//!
//! # Design
//! While allocations are sampled, neap writes a heap profile to a [file](super::heap_profile):
//! 1. before it refuses an allocation, because of a limit, a group with `refuse:on`, or the system;
//! 2. when a look finds that the container's pressure has become [`Imminent`](Pressure::Imminent).
//!
//! neap's thread writes the file. A refused allocation waits for it, since the program may end
//! after the refusal. The wait takes at most a second. In a process with one thread, or without
//! neap's thread, the call itself writes the file. neap tries to write a file at most once in a
//! minute.
//!
//! # Locking
//! No lock is held while a thread writes a file. The flag `is_writing` lets one thread write at a
//! time.

use crate::limits::heap_profile::{self, FileName, Occasion};
use crate::mm::{Core, Mm};
use crate::state::at_limit::{AtLimit, Reason};
use core::fmt::{self, Write};
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::platform::{Errno, Pressure};
use neap_os::stack;

/// Least nanoseconds from one file to the next.
const FILE_INTERVAL_NS: u64 = 60_000_000_000;
/// Nanoseconds that a refused allocation waits for the file.
const FILE_WAIT_NS: u64 = 1_000_000_000;
/// Nanoseconds of each nap of a thread that waits until another thread has written the file.
const POLL_SLEEP_NS: u64 = 1_000_000;
const POLLS_MAX: u64 = FILE_WAIT_NS / POLL_SLEEP_NS;

impl<P: Platform> Core<P> {
    /// Whether a file may be written now. The load is Relaxed, since `write_wanted_profile` checks
    /// again once its thread is the only writer.
    fn may_write_profile(&self, mm: &Mm<P>) -> bool {
        if self.options.profile_at_limit.as_c_str().is_none() || !mm.profile.is_on() {
            return false;
        }
        let last = self.at_limit.last.load(Ordering::Relaxed);
        last == 0 || self.objects.platform.precise().saturating_sub(last) >= FILE_INTERVAL_NS
    }

    /// Writes a heap profile before an allocation fails, or has neap's thread write it.
    #[cold]
    #[inline(never)]
    pub(crate) fn profile_before_refusal(&self, mm: &Mm<P>) {
        if !self.may_write_profile(mm) {
            return;
        }
        self.at_limit.wanted.store(Reason::Refused as u32, Ordering::Relaxed);
        if self.objects.platform.may_fence() || !self.background.has_thread() {
            self.write_wanted_profile(mm);
            // Another thread may be writing a file.
            for _ in 0..POLLS_MAX {
                if !self.at_limit.is_writing.load(Ordering::Relaxed) {
                    break;
                }
                self.objects.platform.sleep(POLL_SLEEP_NS);
            }
        } else {
            self.objects.helper.ask(FILE_WAIT_NS);
        }
    }

    /// Requests a heap profile if a look has found that memory is about to run out.
    pub(crate) fn profile_at_pressure(&self, pressure: Pressure) {
        if pressure == Pressure::Imminent {
            self.at_limit.wanted.store(Reason::Imminent as u32, Ordering::Relaxed);
        }
    }

    /// Writes a heap profile if one is requested and may be written.
    pub(crate) fn write_wanted_profile(&self, mm: &Mm<P>) {
        let at_limit = &self.at_limit;
        // Relaxed: `wanted` publishes no other data.
        if at_limit.wanted.load(Ordering::Relaxed) == 0 || at_limit.is_writing.swap(true, Ordering::Acquire) {
            return;
        }
        let reason = match at_limit.wanted.swap(0, Ordering::Relaxed) {
            0 => None,
            reason if reason == Reason::Refused as u32 => Some(Reason::Refused),
            _ => Some(Reason::Imminent),
        };
        if let Some(reason) = reason.filter(|_| self.may_write_profile(mm)) {
            // Calls of the program may come here, from a small stack.
            let written = stack::apart(|| self.write_profile_at_limit(mm, reason)).unwrap_or(Err(Errno::NOMEM));
            let count = if written.is_ok() { &at_limit.written } else { &at_limit.failed };
            count.fetch_add(1, Ordering::Relaxed);
            mm.ticked();
            at_limit.last.store(self.objects.platform.precise().max(1), Ordering::Relaxed);
        }
        at_limit.is_writing.store(false, Ordering::Release); // Pairs with the Acquire above; publishes `last`.
    }

    fn write_profile_at_limit(&self, mm: &Mm<P>, reason: Reason) -> Result<(), Errno> {
        let start = self.options.profile_at_limit.as_c_str().ok_or(Errno::NOENT)?;
        let reason = match reason {
            Reason::Refused => "refused",
            Reason::Imminent => "imminent",
        };
        self.write_profile(mm, FileName::Numbered { start, first: 1, tries: 16, end: "" }, reason)
    }

    /// Writes a heap profile to a file. `reason` is the `why` of the file's
    /// [text](neap_base::profile_file).
    pub(super) fn write_profile(&self, mm: &Mm<P>, name: FileName<'_>, reason: &'static str) -> Result<(), Errno> {
        let used = {
            let _inside = mm.gate.enter(self.objects.platform.cpu());
            self.usage().used_bytes
        };
        heap_profile::write(self, mm, &Occasion { name, reason, used })
    }

    /// Writes as JSON how many files were written and how many failed. Writes `null` without the
    /// option.
    pub(crate) fn describe_at_limit(&self, text: &mut impl Write) -> fmt::Result {
        if self.options.profile_at_limit.as_c_str().is_none() {
            return text.write_str("\"heap_profiles\":null,");
        }
        // Relaxed: heuristic; each number stands alone.
        let AtLimit { written, failed, .. } = &self.at_limit;
        let [written, failed] = [written, failed].map(|word| word.load(Ordering::Relaxed));
        write!(text, "\"heap_profiles\":{{\"written\":{written},\"failed\":{failed}}},")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::{Options, Path};
    use neap_base::platform::{LimitedBy, Room};
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;

    #[test]
    fn imminent_end_of_the_room_asks_for_a_profile_once() {
        const MIB: u64 = 1 << 20;
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let path = Path::absolute(b"/nowhere/heap").unwrap();
        let options = Options { stat: false, profile_at_limit: path, ..Options::DEFAULT };
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(Virtual::new(4096, 1), &options) }.unwrap();
        let core = mm.core().unwrap();
        let look = |second: u64, left: u64| {
            let room =
                Room { owner: LimitedBy::Group, limit: 4096 * MIB, used: (4096 - left) * MIB, smallest: 4096 * MIB };
            core.note_headroom(&mm, second * 1_000_000_000, Some(&room));
            core.at_limit.wanted.load(Ordering::Relaxed)
        };
        assert_eq!((look(1, 2000), look(2, 1990), look(3, 40)), (0, 0, Reason::Imminent as u32));
        // Without samples none is written, and none fails.
        core.write_wanted_profile(&mm);
        assert_eq!((look(4, 40), core.at_limit.failed.load(Ordering::Relaxed)), (0, 0), "the level has not changed");
        // As if samples were taken: there is no page for them.
        mm.profile.mean.store(1 << 20, Ordering::Relaxed);
        let counts = || [&core.at_limit.written, &core.at_limit.failed].map(|word| word.load(Ordering::Relaxed));
        core.profile_before_refusal(&mm);
        assert_eq!((counts(), core.at_limit.wanted.load(Ordering::Relaxed)), ([0, 1], 0));
        core.objects.platform.advance(FILE_INTERVAL_NS - 1);
        core.profile_before_refusal(&mm);
        assert_eq!(counts(), [0, 1], "too soon");
        core.objects.platform.advance(1);
        core.profile_before_refusal(&mm);
        assert_eq!(counts(), [0, 2]);
        core.at_limit.forget();
        core.profile_before_refusal(&mm);
        assert_eq!(counts(), [0, 1], "a child begins anew");
        mm.profile.mean.store(0, Ordering::Relaxed);
        // SAFETY: no thread uses the manager any more.
        unsafe { mm.close() };
    }
}
