//! Settings: the options that may change while the process runs.
//!
//! # Design
//! The table of options ([`TABLE`]) names the settings. Each value is one word, which readers load.
//! [`set`](fn@crate::set) parses and checks a new value in the same way as the start does.

use crate::limits::limit::Limit;
pub use crate::options::{AUTO, Setting};
use crate::options::{OptionRow, Options, TABLE};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use neap_base::Mutex;

impl Setting {
    /// The option's row in the table.
    pub(super) fn row(self) -> &'static OptionRow {
        // A test checks that each setting has a row.
        TABLE.iter().find(|row| row.setting == Some(self)).unwrap_or(&TABLE[0])
    }

    /// The option's key.
    pub fn key(self) -> &'static str {
        self.row().key
    }

    /// Returns whether a change must pass the new value to the page layer.
    pub(crate) fn is_of_pages(self) -> bool {
        matches!(self, Setting::Limit | Setting::Reserve | Setting::PageListHigh | Setting::PageBatchScale)
    }

    /// Returns a value that displays `number` as options write it.
    pub fn value(self, number: u64) -> Value {
        Value(self, number)
    }

    /// Returns the setting of the option `key`, and the number of its value `text`.
    ///
    /// # Errors
    /// [`NotSet`] if there is no option `key`, it cannot change at run time, or it does not accept
    /// `text`.
    pub fn parse<'a>(key: &'a str, text: &'a str) -> Result<(Setting, u64), NotSet<'a>> {
        let row = TABLE.iter().find(|row| row.key == key);
        let row = row.ok_or_else(|| NotSet::Unknown { key, near: crate::options::nearest(key.as_bytes()) })?;
        let setting = row.setting.ok_or(NotSet::Fixed { key, value: text })?;
        let mut options = Options::DEFAULT;
        row.assign(&mut options, text.as_bytes()).map_err(|wrong| NotSet::Value { key, value: text, wrong })?;
        Ok((setting, options.number(setting)))
    }
}

/// A value of a [`Setting`]. It is displayed as options write it.
#[derive(Clone, Copy, Debug)]
pub struct Value(Setting, u64);

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.row().kind.show(self.1, f)
    }
}

/// The reason why an option was not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NotSet<'a> {
    /// There is no option with this key. `near` is the key that may be meant.
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
    /// The option, or this process, does not accept the value.
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

/// Returns the bytes that a resident page counts for. They are its own bytes, 16 bytes of its
/// frame, 4 of the kind map, and 32 of descriptors, the most that a page of a slab has.
pub(crate) fn page_price(page_size: usize) -> u64 {
    page_size as u64 + 16 + 4 + 32
}

/// Returns how many pages may be resident within a limit, in bytes.
pub(crate) fn page_budget(limit: u64, page_size: usize) -> u32 {
    (limit / page_price(page_size)).min(u32::MAX.into()) as u32
}

/// The values in force.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Values by the number of the setting. All accesses are relaxed. Each value is one word, and a
    /// thread that reads the previous value acts as it would have acted before the change.
    pub(crate) values: [AtomicU64; Setting::ALL.len()],
    /// The limit in bytes while it [follows](crate::limits::following) the container; 0: none.
    pub(crate) followed: AtomicU64,
    /// Held during a change.
    pub(crate) changing: Mutex<()>,
}

impl Settings {
    pub(crate) fn new(options: &Options) -> Settings {
        Settings {
            values: Setting::ALL.map(|setting| options.number(setting).into()),
            followed: AtomicU64::new(crate::limits::limit::FIRST),
            changing: Mutex::new(()),
        }
    }

    pub(crate) fn number(&self, setting: Setting) -> u64 {
        self.values[setting as usize].load(Ordering::Relaxed)
    }

    /// The most bytes that may be in use; 0: no limit.
    pub(crate) fn limit(&self) -> u64 {
        match Limit::of_number(self.number(Setting::Limit)) {
            Limit::None => 0,
            Limit::Bytes(bytes) => bytes - self.reserve_of(bytes).unwrap_or(0),
            Limit::Auto | Limit::Percent(_) => self.followed.load(Ordering::Relaxed),
        }
    }

    /// Bytes that stay free below a limit of `limit` bytes; `None` if neap chooses them.
    pub(crate) fn reserve_of(&self, limit: u64) -> Option<u64> {
        let reserve = Limit::of_number(self.number(Setting::Reserve)).of(limit)?;
        Some(reserve.min(limit - limit / 10))
    }

    /// Bytes of use above which memory is released in the background, if any.
    pub(crate) fn high(&self) -> Option<u64> {
        match (Limit::of_number(self.number(Setting::High)), self.limit()) {
            (Limit::Percent(_), 0) => None,
            (high, limit) => high.of(limit),
        }
    }

    /// If the limit follows the container: the percentage of the container's limit that it may
    /// reach. `None` if the limit follows nothing.
    pub(crate) fn follows(&self) -> Option<u8> {
        match Limit::of_number(self.number(Setting::Limit)) {
            Limit::Auto => Some(100),
            Limit::Percent(percent) => Some(percent),
            Limit::None | Limit::Bytes(_) => None,
        }
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

#[cfg(test)]
mod tests {
    use crate::mm::{Hooks, Mm};
    use crate::options::Options;
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;

    const MIB: u64 = 1 << 20;

    #[test]
    fn reserve_stays_free_below_a_limit_in_bytes() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
        let core = mm.core().unwrap();
        let limit = |settings: [(&'static str, &'static str); 2]| {
            settings.into_iter().for_each(|(key, value)| mm.set(key, value).unwrap());
            core.settings.limit() / MIB
        };
        assert_eq!(limit([("limit", "512m"), ("reserve", "32m")]), 480);
        assert_eq!(limit([("limit", "512m"), ("reserve", "25%")]), 384);
        assert_eq!(limit([("limit", "100m"), ("reserve", "1g")]), 10, "nine tenths at most");
        assert_eq!(limit([("reserve", "auto"), ("limit", "512m")]), 512);
        assert_eq!(limit([("reserve", "32m"), ("limit", "none")]), 0);
        // SAFETY: no thread uses the manager any more.
        unsafe { mm.close() };
    }
}
