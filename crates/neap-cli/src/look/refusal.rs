//! The reasons why a command gets no numbers of a process. Commands that look at many processes
//! count by these reasons.

use core::fmt::{self, Display};

/// The kind of a reason. Errors of other kinds are failures to read the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LookRefusal {
    /// The process has ended.
    Ended,
    /// The process does not run under neap.
    NotNeap,
    /// The process belongs to another user, or this command may not trace it.
    NotPermitted,
    /// The process runs under neap and publishes no numbers, or none yet.
    NoNumbers,
}

impl LookRefusal {
    /// Returns an error of this kind with a text for people.
    pub(crate) fn error(self, text: String) -> anyhow::Error {
        RefusedLook { refusal: self, text }.into()
    }

    /// Returns the kind of an error, whatever context it has.
    pub(crate) fn of(error: &anyhow::Error) -> Option<LookRefusal> {
        error.downcast_ref::<RefusedLook>().map(|refused| refused.refusal)
    }
}

/// An error with its kind.
#[derive(Debug)]
struct RefusedLook {
    refusal: LookRefusal,
    text: String,
}

impl Display for RefusedLook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl core::error::Error for RefusedLook {}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn kind_is_found_behind_context_and_is_no_part_of_the_text() {
        let error = Err::<(), _>(LookRefusal::Ended.error("it has ended".into())).context("process 7").unwrap_err();
        assert_eq!(
            (LookRefusal::of(&error), format!("{error:#}")),
            (Some(LookRefusal::Ended), "process 7: it has ended".into())
        );
        assert_eq!(LookRefusal::of(&anyhow::anyhow!("another")), None);
    }
}
