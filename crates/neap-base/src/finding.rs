//! Findings of verifications.

use crate::Pfn;
use core::fmt;

/// Two numbers that should be equal but differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the number.
    pub what: &'static str,
    /// The thing that the number belongs to.
    pub at: At,
    /// The number expected.
    pub expected: u64,
    /// The number found.
    pub found: u64,
}

/// A numbered thing that a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// Name of the kind of thing; empty if the finding is about none in particular.
    pub thing: &'static str,
    /// Its number.
    pub number: u64,
}

impl At {
    /// No particular thing.
    pub const NONE: At = At { thing: "", number: 0 };
}

impl From<Pfn> for At {
    fn from(pfn: Pfn) -> At {
        pfn.some().map_or(At::NONE, |pfn| At { thing: "page", number: pfn.0.into() })
    }
}

impl Finding {
    /// Makes a finding.
    pub fn new(what: &'static str, at: impl Into<At>, expected: u64, found: u64) -> Finding {
        Finding { what, at: at.into(), expected, found }
    }

    /// Returns a finding unless both numbers are equal.
    ///
    /// # Errors
    /// The finding.
    pub fn unless_equal(what: &'static str, at: impl Into<At>, expected: u64, found: u64) -> Result<(), Finding> {
        if expected == found { Ok(()) } else { Err(Finding::new(what, at, expected, found)) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { what, at: At { thing, number }, expected, found } = self;
        write!(f, "{what}: expected {expected}, found {found}")?;
        if thing.is_empty() { Ok(()) } else { write!(f, " at {thing} {number}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn a_finding_names_what_it_is_about() {
        let at = |pfn| Finding::unless_equal("free pages", pfn, 1, 2).unwrap_err().to_string();
        assert_eq!(at(Pfn(7)), "free pages: expected 1, found 2 at page 7");
        assert_eq!(at(Pfn::NONE), "free pages: expected 1, found 2");
        assert_eq!(Finding::unless_equal("free pages", At::NONE, 2, 2), Ok(()));
    }
}
