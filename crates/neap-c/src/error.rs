//! What went wrong, as C hears of it.
//!
//! Sits between the errors of [`neap::percpu`] and the numbers of `enum neap_error`.

use core::ffi::{CStr, c_char, c_int};
use neap::percpu::{Invalid, Refused, Wait};

/// `enum neap_error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Error {
    Argument = -1,
    Owner = -2,
    Charge = -3,
    Wait = -4,
    Full = -5,
    Memory = -6,
    Handle = -7,
    Fence = -8,
}

impl Error {
    pub(crate) const ALL: [Error; 8] = [
        Error::Argument,
        Error::Owner,
        Error::Charge,
        Error::Wait,
        Error::Full,
        Error::Memory,
        Error::Handle,
        Error::Fence,
    ];

    fn text(self) -> &'static CStr {
        match self {
            Error::Argument => c"an argument is not what it has to be",
            Error::Owner => c"there is no such owner",
            Error::Charge => c"the owner may not have more",
            Error::Wait => c"it would take waiting",
            Error::Full => c"the address space for it is in use",
            Error::Memory => c"the system gave no memory",
            Error::Handle => c"nothing is allocated there",
            Error::Fence => c"the system forbids fences",
        }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        match refused {
            Refused::BadRequest => Error::Argument,
            Refused::UnknownOwner => Error::Owner,
            Refused::Charge => Error::Charge,
            Refused::WouldWait => Error::Wait,
            Refused::Full => Error::Full,
            Refused::Memory(_) => Error::Memory,
        }
    }
}

impl From<Invalid> for Error {
    fn from(_: Invalid) -> Error {
        Error::Handle
    }
}

/// The number that a function answers: an error's, or the success's, which is not negative.
pub(crate) fn answer(outcome: Result<c_int, Error>) -> c_int {
    outcome.unwrap_or_else(|error| error as c_int)
}

/// How long a caller that says so many nanoseconds can wait.
pub(crate) fn wait(nanoseconds: i64) -> Wait {
    match nanoseconds {
        0 => Wait::Never,
        1.. => Wait::Until(neap_os::clock::coarse().saturating_add(nanoseconds as u64)),
        _ => Wait::Long,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_error_text(error: c_int) -> *const c_char {
    let known = Error::ALL.into_iter().find(|known| *known as c_int == error);
    match (known, error) {
        (Some(known), _) => known.text(),
        (None, 0) => c"no error",
        (None, _) => c"no error of neap's",
    }
    .as_ptr()
}
