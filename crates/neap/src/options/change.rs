//! Changes of settings while the process runs: [`Mm::set`], C's `neap_set`, and the request of
//! `neap set`. neap parses and checks a change in the same way as the options at the start
//! ([`Options`]).
//!
//! A limit that is cut below the use takes no memory from the program. It starts reclaim at once:
//! 1. The change drains caches, with only those fences that a call may make. It releases free pages
//!    beyond the limit.
//! 2. Reclaimers ask shrinkers for objects, until the use is below the high watermark.
//! 3. Until the use is below the limit, allocations that need more pages fail.
//!
//! # Locking
//!
//! A change takes one mutex inside the fork gate, so changes run one at a time. Only a change of
//! `profile` makes system calls under it.

use crate::mm::{Core, Mm};
use crate::options::settings::{NotSet, Value};
use crate::options::{Options, Setting};
use crate::process::PROCESS;
use crate::returning::drain::Fences;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_pages::Effort;

/// Changes an option of the process's manager: [`Mm::set`].
///
/// ```
/// assert_eq!(neap::set("interval", "500"), Ok(()));
/// let refused = neap::set("rseq", "off").unwrap_err();
/// assert_eq!(
///     refused.to_string(),
///     "rseq cannot change while the process runs; start the process with NEAP=rseq:off"
/// );
/// ```
///
/// # Within a container
/// `limit:auto` bounds the heap by the room that the container or the machine leaves, as under
/// `neap run`. With neap's thread, a limit that is cut takes effect while the program makes no
/// calls. [`headroom`](fn@crate::headroom) has the level of pressure.
///
/// ```
/// neap::set("limit", "auto").unwrap();
/// // An allocation fails instead of going beyond the container's room.
/// neap::set("refuse", "on").unwrap();
/// let has_thread = neap::process::PROCESS.start_background();
/// if let Some(room) = neap::headroom() {
///     println!("{}: {} of {} bytes are left", room.pressure.name(), room.bytes(), room.limit);
///     assert!(room.used + room.bytes() >= room.limit);
/// }
/// # assert!(has_thread);
/// ```
///
/// # Errors
/// [`NotSet`] says why nothing was changed.
pub fn set<'a>(key: &'a str, value: &'a str) -> Result<(), NotSet<'a>> {
    PROCESS.set(key, value)
}

impl<P: Platform> Core<P> {
    /// Puts a checked number in force. Returns the previous one.
    ///
    /// # Errors
    /// The reason why this process cannot use the number. Nothing was changed then.
    fn change(&self, mm: &Mm<P>, setting: Setting, number: u64) -> Result<u64, &'static str> {
        let (objects, settings) = (&self.objects, &self.settings);
        let before = {
            let inside = mm.gate.enter(objects.platform.cpu());
            let _changing = settings.changing.lock();
            if setting == Setting::Profile {
                self.set_profile(mm, &inside, number)?;
            }
            let before = settings.values[setting as usize].swap(number, Ordering::Relaxed);
            if setting.is_of_pages() && before != number {
                objects.pages.change(&settings.of_pages(objects.pages.page_size()));
                self.note_limit();
            }
            before
        };
        if matches!(setting, Setting::Limit | Setting::Reserve) && settings.limit() > 0 {
            if settings.follows().is_some() {
                self.follow(mm, self.objects.platform.now(), 0);
            }
            self.reach_limit(mm);
        }
        // Ends a nap of the previous interval, and publishes the values.
        self.request_tick();
        Ok(before)
    }

    /// Starts reclaim if more is in use than the limit allows.
    pub(crate) fn reach_limit(&self, mm: &Mm<P>) {
        let pages = &self.objects.pages;
        if self.is_beyond_limit(mm) {
            mm.inside_to_the_end(self, |inside, stop| _ = self.drain_everything(inside, Fences::OfCall, stop));
        }
        if self.is_beyond_limit(mm) {
            mm.inside_to_the_end(self, |_, stop| _ = self.objects.punch(Effort::Full, stop));
        }
        mm.inside_to_the_end(self, |_, stop| pages.shed(&self.objects.platform, stop));
        (0..pages.nodes()).for_each(|node| self.look_at_node(mm, node));
    }

    /// Whether more is in use than the limit allows, since it was cut.
    pub(crate) fn is_beyond_limit(&self, mm: &Mm<P>) -> bool {
        if self.settings.limit() == 0 {
            return false;
        }
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        self.objects.pages.beyond_budget() > 0
    }
}

impl<P: Platform> Mm<P> {
    /// Changes the option `key` to `value`, both written as in the variable `NEAP`. The change
    /// takes effect at once.
    ///
    /// `neap options` lists the options that may change. A limit below the use takes nothing from
    /// the program, but starts reclaim. Must not be called from a signal handler.
    ///
    /// # Errors
    /// [`NotSet`] says why nothing was changed.
    pub fn set<'a>(&self, key: &'a str, value: &'a str) -> Result<(), NotSet<'a>> {
        let (setting, number) = Setting::parse(key, value)?;
        let core = self.core().ok_or(NotSet::NoMemory)?;
        core.change(self, setting, number).map_err(|wrong| NotSet::Value { key, value, wrong })?;
        Ok(())
    }

    /// Changes a setting to a number. Returns the previous one.
    ///
    /// # Errors
    /// The fault of the number, or the reason why this process cannot use it. Nothing was changed
    /// then.
    pub(crate) fn set_number(&self, setting: Setting, number: u64) -> Result<u64, &'static str> {
        let mut checked = Options::DEFAULT;
        checked.set_number(setting, number)?;
        let core = self.core().ok_or("is refused: the system gave no memory")?;
        core.change(self, setting, checked.number(setting))
    }

    /// Returns the value of a setting in force; `None` if the manager cannot be opened.
    pub fn setting(&self, setting: Setting) -> Option<Value> {
        Some(setting.value(self.core()?.settings.number(setting)))
    }
}
