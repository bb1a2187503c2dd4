//! The names that programs may read, write or trigger, and the numbers that stand for them.
//!
//! # Design
//! A name has a number for each of its parts. The number of a word is the name's place in
//! [`CONTROLS`]. The number of an arena's index is the index itself. So a program may replace the
//! index in the numbers.

use crate::instance;
use crate::snapshot::Quantity;
use core::ffi::CStr;

/// The most parts that a name has.
pub(crate) const MOST_PARTS: usize = 3;

/// The part of a name that stands for the number of an arena.
const INDEX: &str = "<i>";

/// Effect and type of a name.
#[derive(Clone, Copy)]
pub(crate) enum Control {
    /// `uint64_t`; a write refreshes all values.
    Epoch,
    /// `const char *`.
    Text(&'static CStr),
    /// `size_t`.
    Size(Quantity),
    /// `unsigned`.
    Number(Quantity),
    /// `bool`.
    Flag(Quantity),
    /// `size_t`.
    Constant(usize),
    /// `bool`: whether allocations are sampled at the moment.
    Sampled,
    /// `const char *`, only written: the name of a file for a heap profile.
    Dump,
    /// No value.
    Act(fn()),
}

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!("neap-", env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"neap",
};

/// Bytes to whose multiples all small sizes are rounded up.
const QUANTUM: usize = 16;

const CONTROLS: [(&str, Control); 19] = [
    ("epoch", Control::Epoch),
    ("version", Control::Text(VERSION)),
    ("background_thread", Control::Flag(Quantity::HasThread)),
    ("stats.allocated", Control::Size(Quantity::Allocated)),
    ("stats.active", Control::Size(Quantity::Active)),
    ("stats.metadata", Control::Size(Quantity::Metadata)),
    ("stats.resident", Control::Size(Quantity::Resident)),
    ("stats.mapped", Control::Size(Quantity::MappedWithMemory)),
    ("stats.retained", Control::Size(Quantity::Retained)),
    ("arenas.narenas", Control::Number(Quantity::Nodes)),
    ("arenas.page", Control::Size(Quantity::Page)),
    ("arenas.quantum", Control::Constant(QUANTUM)),
    ("opt.narenas", Control::Number(Quantity::Nodes)),
    ("opt.prof", Control::Sampled),
    ("prof.active", Control::Sampled),
    ("prof.dump", Control::Dump),
    ("arena.<i>.decay", Control::Act(instance::tick)),
    ("arena.<i>.purge", Control::Act(instance::release)),
    // neap has caches of CPUs and none of threads, so there is nothing to flush.
    ("thread.tcache.flush", Control::Act(|| ())),
];

/// A name, or the numbers that stand for it.
pub(crate) struct Named {
    /// Place in [`CONTROLS`].
    place: usize,
    parts: [usize; MOST_PARTS],
    length: usize,
}

impl Named {
    /// Returns the name at `place` with the arena `index`, if it has a part for one.
    fn at(place: usize, index: usize) -> Named {
        let (mut parts, mut length) = ([place; MOST_PARTS], 0);
        for (part, word) in parts.iter_mut().zip(CONTROLS[place].0.split('.')) {
            if word == INDEX {
                *part = index;
            }
            length += 1;
        }
        Named { place, parts, length }
    }

    /// Returns the name with this text.
    pub(crate) fn parse(text: &str) -> Option<Named> {
        CONTROLS.iter().enumerate().find_map(|(place, (pattern, _))| {
            let Some((before, after)) = pattern.split_once(INDEX) else {
                return (text == *pattern).then(|| Named::at(place, 0));
            };
            let index = text.strip_prefix(before)?.strip_suffix(after)?;
            let is_number = index.bytes().all(|byte| byte.is_ascii_digit());
            index.parse().ok().filter(|_| is_number).map(|index| Named::at(place, index))
        })
    }

    /// Returns the name that these numbers stand for.
    pub(crate) fn of_parts(parts: &[usize]) -> Option<Named> {
        let place = *parts.first()?;
        CONTROLS.get(place)?;
        let named = Named::at(place, parts.get(1).copied().unwrap_or(0));
        (named.parts() == parts).then_some(named)
    }

    /// The numbers that stand for the name.
    pub(crate) fn parts(&self) -> &[usize] {
        &self.parts[..self.length]
    }

    /// The number of the arena, if the name has one.
    pub(crate) fn index(&self) -> Option<usize> {
        CONTROLS[self.place].0.contains(INDEX).then_some(self.parts[1])
    }

    pub(crate) fn control(&self) -> Control {
        CONTROLS[self.place].1
    }
}
