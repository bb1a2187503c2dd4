//! Settings: the options that may change while the process runs, in the place of sysctl.
//!
//! # Design
//! The table of options ([`DESCRIPTIONS`](crate::options::DESCRIPTIONS)) names them. Each has its
//! value in one word here, from which every reader takes it. A change is parsed and checked as at
//! the start ([`Options`]), by [`Mm::set`], C's `neap_set`, and the request of `neap set`.
//!
//! A limit that is cut below the use takes no memory from the program. It starts reclaim at once:
//! 1. Every cache is drained, and free pages beyond the limit are released.
//! 2. Shrinkers are asked, by reclaimers, until the use is below the high watermark.
//! 3. Until the use is below the limit, allocations that need more pages fail.
//!
//! # Locking
//! One mutex, for one change at a time, inside the fork gate. No system call is made under it.

use crate::mm::{Core, Mm, page_budget};
use crate::options::{DESCRIPTIONS, Options};
use crate::process::PROCESS;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use neap_base::{Mutex, Platform};

/// The number of [`Setting::PageListHigh`] for tuning at run time.
pub const AUTO: u64 = u64::MAX;

/// An option that may change while the process runs, with its value as a number. `neap set` sends
/// the number of the setting, so these stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Setting {
    /// Bytes; 0: none.
    Limit,
    /// Milliseconds.
    Interval,
    /// Pages; [`AUTO`]: tuned at run time.
    PageListHigh,
    /// 1: on; 0: off.
    Refuse,
    /// Doublings.
    PageBatchScale,
}

impl Setting {
    /// All settings, in the order of their numbers.
    pub const ALL: [Setting; 5] =
        [Setting::Limit, Setting::Interval, Setting::PageListHigh, Setting::Refuse, Setting::PageBatchScale];

    /// The option's key.
    pub fn key(self) -> &'static str {
        let own = DESCRIPTIONS.iter().find(|option| option.setting == Some(self));
        own.map_or("", |option| option.key)
    }

    /// Returns `number` as the option's value is written.
    pub fn value(self, number: u64) -> Value {
        Value(self, number)
    }

    /// Returns the setting of the option `key`, and the number of its value `text`.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn parse<'a>(key: &'a str, text: &'a str) -> Result<(Setting, u64), NotSet<'a>> {
        let option = DESCRIPTIONS.iter().find(|option| option.key == key);
        let option = option.ok_or_else(|| NotSet::Unknown { key, near: crate::options::nearest(key.as_bytes()) })?;
        let mut options = Options::DEFAULT;
        let assigned = options.assign(key.as_bytes(), text.as_bytes());
        let setting = option.setting.ok_or(NotSet::Fixed { key, value: text })?;
        assigned.map_err(|wrong| NotSet::Value { key, value: text, wrong })?;
        Ok((setting, options.number(setting)))
    }
}

/// A value of a [`Setting`]; displayed as it is written in options.
#[derive(Clone, Copy, Debug)]
pub struct Value(Setting, u64);

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Value(Setting::Limit, 0) => f.write_str("none"),
            Value(Setting::PageListHigh, AUTO) => f.write_str("auto"),
            Value(Setting::Refuse, on) => f.write_str(if on == 1 { "on" } else { "off" }),
            Value(_, number) => write!(f, "{number}"),
        }
    }
}

/// The reason why an option was not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NotSet<'a> {
    /// There is no option of this key. `near` may be meant.
    Unknown {
        /// The key.
        key: &'a str,
        /// The most similar key.
        near: Option<&'static str>,
    },
    /// The option is read once, at the start.
    Fixed {
        /// The key.
        key: &'a str,
        /// The value.
        value: &'a str,
    },
    /// The value is not one of the option.
    Value {
        /// The key.
        key: &'a str,
        /// The value.
        value: &'a str,
        /// Its fault.
        wrong: &'static str,
    },
    /// The system gave no memory to open the manager.
    NoMemory,
}

impl fmt::Display for NotSet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            NotSet::Unknown { key, near: None } => write!(f, "\"{}\" is not an option", key.escape_debug()),
            NotSet::Unknown { key, near: Some(near) } => {
                write!(f, "\"{}\" is not an option (did you mean \"{near}\"?)", key.escape_debug())
            }
            NotSet::Fixed { key, value } => write!(
                f,
                "{key} cannot change while the process runs; start the process with NEAP={key}:{}",
                value.escape_debug()
            ),
            NotSet::Value { key, value, wrong } => write!(f, "{key}: \"{}\" {wrong}", value.escape_debug()),
            NotSet::NoMemory => f.write_str("the system gave no memory"),
        }
    }
}

impl core::error::Error for NotSet<'_> {}

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
/// # Errors
/// The reason why nothing was changed.
pub fn set<'a>(key: &'a str, value: &'a str) -> Result<(), NotSet<'a>> {
    PROCESS.set(key, value)
}

/// The values in force.
#[derive(Debug)]
pub(crate) struct Settings {
    /// By the number of the setting. Relaxed, everywhere: each value is a word of its own, and a
    /// thread that reads the previous one acts as shortly before the change.
    values: [AtomicU64; Setting::ALL.len()],
    /// Held during a change.
    changing: Mutex<()>,
}

impl Settings {
    pub(crate) fn new(options: &Options) -> Settings {
        Settings { values: Setting::ALL.map(|setting| options.number(setting).into()), changing: Mutex::new(()) }
    }

    pub(crate) fn number(&self, setting: Setting) -> u64 {
        self.values[setting as usize].load(Ordering::Relaxed)
    }

    /// The most bytes that may be in use; 0: no limit.
    pub(crate) fn limit(&self) -> u64 {
        self.number(Setting::Limit)
    }

    /// Nanoseconds between two ticks.
    pub(crate) fn interval(&self) -> u64 {
        self.number(Setting::Interval) * 1_000_000
    }

    /// Whether an allocation in a group at its limit fails.
    pub(crate) fn refuses(&self) -> bool {
        self.number(Setting::Refuse) == 1
    }

    /// The settings of the page layer.
    pub(crate) fn of_pages(&self, page_size: usize) -> neap_pages::Settings {
        let limit = Some(self.limit()).filter(|&limit| limit > 0);
        let list_high = Some(self.number(Setting::PageListHigh)).filter(|&pages| pages != AUTO);
        neap_pages::Settings {
            budget: limit.map(|limit| page_budget(limit, page_size)),
            list_high: list_high.map(|pages| pages as u32),
            batch_scale: self.number(Setting::PageBatchScale) as u32,
        }
    }
}

/// All settings in force, as the members of a JSON object.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, setting) in Setting::ALL.into_iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(f, "{comma}\"{}\":\"{}\"", setting.key(), setting.value(self.number(setting)))?;
        }
        Ok(())
    }
}

impl<P: Platform> Core<P> {
    /// Puts a checked number in force. Returns the previous one. Not inside the gate.
    fn change(&self, mm: &Mm<P>, setting: Setting, number: u64) -> u64 {
        let (objects, settings) = (&self.objects, &self.settings);
        let before = {
            let _inside = mm.gate.enter(objects.platform.cpu());
            let _changing = settings.changing.lock();
            let before = settings.values[setting as usize].swap(number, Ordering::Relaxed);
            if !matches!(setting, Setting::Interval | Setting::Refuse) && before != number {
                objects.pages.change(&settings.of_pages(objects.pages.page_size()));
            }
            before
        };
        if setting == Setting::Limit && number > 0 {
            self.reach_limit(mm);
        }
        // Ends a nap of the previous interval, and publishes the values.
        self.come_soon();
        before
    }

    /// Starts reclaim if more is in use than the limit allows.
    fn reach_limit(&self, mm: &Mm<P>) {
        let pages = &self.objects.pages;
        if self.is_beyond_limit(mm) {
            mm.inside_to_the_end(self, |stop| _ = self.drain_everything(false, stop));
        }
        if self.is_beyond_limit(mm) {
            mm.inside_to_the_end(self, |stop| _ = self.objects.punch(true, stop));
        }
        mm.inside_to_the_end(self, |stop| pages.shed(&self.objects.platform, stop));
        (0..pages.nodes()).for_each(|node| self.look_at_node(mm, node));
    }

    /// Whether more is in use than the limit allows, since it was cut. Not inside the gate.
    pub(crate) fn is_beyond_limit(&self, mm: &Mm<P>) -> bool {
        if self.settings.limit() == 0 {
            return false;
        }
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        self.objects.pages.beyond_budget() > 0
    }
}

impl<P: Platform> Mm<P> {
    /// Changes the option `key` to `value`, both as in the variable `NEAP`. The effect is at once.
    ///
    /// `neap options` lists the options that may change. A limit below the use takes nothing from
    /// the program: see [the module](self). Not from a signal handler.
    ///
    /// # Errors
    /// The reason why nothing was changed.
    pub fn set<'a>(&self, key: &'a str, value: &'a str) -> Result<(), NotSet<'a>> {
        let (setting, number) = Setting::parse(key, value)?;
        let core = self.core().ok_or(NotSet::NoMemory)?;
        core.change(self, setting, number);
        Ok(())
    }

    /// Changes a setting to a number. Returns the previous one.
    ///
    /// # Errors
    /// The fault of the number; nothing was changed then.
    pub(crate) fn set_number(&self, setting: Setting, number: u64) -> Result<u64, &'static str> {
        let mut checked = Options::DEFAULT;
        checked.set_number(setting, number)?;
        let core = self.core().ok_or("is refused: the system gave no memory")?;
        Ok(core.change(self, setting, number))
    }

    /// Returns the value of a setting in force; `None` if the manager cannot be opened.
    pub fn setting(&self, setting: Setting) -> Option<Value> {
        Some(setting.value(self.core()?.settings.number(setting)))
    }
}
