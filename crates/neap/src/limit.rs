//! The option `limit`: a number of bytes, or a rule by which the manager
//! [follows](crate::following) the container, and the state of following.

use crate::options::AUTO;
use crate::state::headroom::Looks;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use neap_base::Mutex;

/// A value of the option `limit`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Limit {
    None,
    Bytes(u64),
    /// What the nearest limit of the container or machine leaves.
    Auto,
    /// As [`Limit::Auto`], and at most so many hundredths of that limit.
    Percent(u8),
}

/// Marks the number of a [`Limit::Percent`]. No number of bytes has this bit.
const PERCENT: u64 = 1 << 63;

impl Limit {
    /// The limit that a setting's number stands for.
    pub(crate) fn of_number(number: u64) -> Limit {
        match number {
            0 => Limit::None,
            AUTO => Limit::Auto,
            _ if number & PERCENT > 0 => Limit::Percent((number & 0xff) as u8),
            bytes => Limit::Bytes(bytes),
        }
    }

    /// The number of the setting.
    pub(crate) fn number(self) -> u64 {
        match self {
            Limit::None => 0,
            Limit::Bytes(bytes) => bytes,
            Limit::Auto => AUTO,
            Limit::Percent(percent) => PERCENT | u64::from(percent),
        }
    }

    /// Whether a number stands for a limit.
    pub(crate) fn is_number(number: u64) -> bool {
        number <= isize::MAX as u64
            || number == AUTO
            || matches!(Limit::of_number(number), Limit::Percent(1..=100)) && number & !PERCENT <= 100
    }

    /// Parses a value; `bytes` parses a number of bytes.
    pub(crate) fn parse(value: &[u8], bytes: impl Fn(&[u8]) -> Option<u64>) -> Option<Limit> {
        Some(match value {
            b"none" => Limit::None,
            b"auto" => Limit::Auto,
            [digits @ .., b'%'] => {
                let percent = bytes(digits).filter(|percent| (1..=100).contains(percent))?;
                Limit::Percent(percent as u8)
            }
            _ => Limit::of_number(bytes(value).filter(|&bytes| bytes <= isize::MAX as u64)?),
        })
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::None => f.write_str("none"),
            Limit::Bytes(bytes) => write!(f, "{bytes}"),
            Limit::Auto => f.write_str("auto"),
            Limit::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// The limit until the first look, in bytes. Programs below it make none before their first tick.
pub(crate) const FIRST: u64 = 64 << 20;
/// Nanoseconds from one look to the next.
pub(crate) const PERIOD: u64 = 1_000_000_000;
/// Nanoseconds while the container has too little, for so many looks since the heap last shrank.
const HURRY: (u64, u32) = (100_000_000, 8);

/// State of a limit that follows the container. Counters and times: they publish no other data.
#[derive(Debug)]
pub(crate) struct Following {
    /// Time of the last look; 0: none.
    pub(crate) last: AtomicU64,
    /// An allocation waits for a look.
    pub(crate) wanted: AtomicBool,
    pub(crate) looks: AtomicU64,
    /// Looks in a row that found too little room, since the heap last shrank.
    short: AtomicU32,
    /// Bytes of the heap at the last look.
    own: AtomicU64,
    /// Number of times that the limit was passed since nothing could be given back.
    pub(crate) passed: AtomicU64,
    /// Limit and used bytes of the nearest level at the last look; 0 if none was visible.
    pub(crate) nearest: [AtomicU64; 2],
    /// Level of pressure of the container.
    pub(crate) headroom: Mutex<Looks>,
}

impl Following {
    pub(crate) fn new() -> Following {
        let [last, looks, own, passed, limit, used] = [const { AtomicU64::new(0) }; 6];
        Following {
            last,
            wanted: AtomicBool::new(false),
            looks,
            short: AtomicU32::new(0),
            own,
            passed,
            nearest: [limit, used],
            headroom: Mutex::new(Looks::new()),
        }
    }

    /// Records a look: bytes of the heap, and whether the container has too little.
    pub(crate) fn note(&self, own: u64, is_short: bool) {
        let has_shrunk = self.own.swap(own, Ordering::Relaxed) > own + (1 << 20);
        let before = if has_shrunk { 0 } else { self.short.load(Ordering::Relaxed) };
        let short = if is_short { before.saturating_add(1) } else { 0 };
        self.short.store(short, Ordering::Relaxed);
    }

    /// Whether looks follow each other fast.
    pub(crate) fn is_hurrying(&self) -> bool {
        (1..=HURRY.1).contains(&self.short.load(Ordering::Relaxed))
    }

    /// Nanoseconds from the last look to the next.
    pub(crate) fn period(&self) -> u64 {
        if self.is_hurrying() { HURRY.0 } else { PERIOD }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::bytes;
    use std::string::ToString;

    #[test]
    fn a_limit_is_parsed_numbered_and_displayed() {
        for (text, limit, shown) in [
            ("none", Limit::None, "none"),
            ("0", Limit::None, "none"),
            ("64m", Limit::Bytes(64 << 20), "67108864"),
            ("auto", Limit::Auto, "auto"),
            ("1%", Limit::Percent(1), "1%"),
            ("100%", Limit::Percent(100), "100%"),
        ] {
            assert_eq!(Limit::parse(text.as_bytes(), bytes), Some(limit), "{text}");
            assert_eq!((Limit::of_number(limit.number()), limit.to_string()), (limit, shown.into()));
            assert!(Limit::is_number(limit.number()), "{text}");
        }
        for wrong in ["", "%", "0%", "101%", "50.5%", "auto%", "9999999999g", "-1", "automatic"] {
            assert_eq!(Limit::parse(wrong.as_bytes(), bytes), None, "{wrong}");
        }
        for wrong in [1 << 63, PERCENT | 101, PERCENT | 0x150, AUTO - 1] {
            assert!(!Limit::is_number(wrong), "{wrong:#x}");
        }
    }
}
