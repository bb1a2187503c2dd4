//! Errors of the C API: translates the errors of [`neap::percpu`], [`neap::groups`] and
//! [`neap::reclaim`] into the numbers of `enum neap_error`.

use core::ffi::{CStr, c_char, c_int};
use core::ptr::copy_nonoverlapping;
use core::time::Duration;
use neap::NotDumped;
use neap::groups::{GroupError, NotSubscribed};
use neap::percpu::{Invalid, Refused, Wait};
use neap::settings::NotSet;

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
    Group = -9,
    Exists = -10,
    Name = -11,
    Deep = -12,
    Children = -13,
    EventFd = -14,
    Shrinker = -15,
    Callback = -16,
    Fixed = -17,
    Profile = -18,
    File = -19,
}

impl Error {
    pub(crate) const ALL: [Error; 19] = [
        Error::Argument,
        Error::Owner,
        Error::Charge,
        Error::Wait,
        Error::Full,
        Error::Memory,
        Error::Handle,
        Error::Fence,
        Error::Group,
        Error::Exists,
        Error::Name,
        Error::Deep,
        Error::Children,
        Error::EventFd,
        Error::Shrinker,
        Error::Callback,
        Error::Fixed,
        Error::Profile,
        Error::File,
    ];

    fn text(self) -> &'static CStr {
        match self {
            Error::Argument => c"invalid argument",
            Error::Owner => c"there is no such owner",
            Error::Charge => c"a limit refuses the charge of the owner or group",
            Error::Wait => c"operation would block",
            Error::Full => c"the address space, or the table of owners or groups, is full",
            Error::Memory => c"the system gave no memory",
            Error::Handle => c"the handle has no allocation",
            Error::Fence => c"the system forbids fences",
            Error::Group => c"there is no such group",
            Error::Exists => c"a group of that name is there already",
            Error::Name => c"a name has 1 to 56 bytes of printable UTF-8, no '/', and is neither '.' nor '..'",
            Error::Deep => c"no group can be deeper",
            Error::Children => c"the group has children, which must be deleted first",
            Error::EventFd => c"the descriptor is not an eventfd, or lacks EFD_NONBLOCK",
            Error::Shrinker => c"there is no such shrinker",
            Error::Callback => c"a shrinker's callback would wait for itself",
            Error::Fixed => c"the option cannot change while the process runs",
            Error::Profile => c"allocations are not sampled; set the option profile",
            Error::File => c"the file could not be written",
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

impl From<GroupError> for Error {
    fn from(denied: GroupError) -> Error {
        match denied {
            GroupError::NoSuchGroup => Error::Group,
            GroupError::Exists => Error::Exists,
            GroupError::BadName => Error::Name,
            GroupError::TooDeep => Error::Deep,
            GroupError::HasChildren => Error::Children,
            GroupError::Root => Error::Argument,
            GroupError::Full => Error::Full,
            GroupError::NoMemory => Error::Memory,
        }
    }
}

impl From<NotDumped> for Error {
    fn from(refused: NotDumped) -> Error {
        match refused {
            NotDumped::NotSampled => Error::Profile,
            _ => Error::File,
        }
    }
}

impl From<NotSubscribed> for Error {
    fn from(denied: NotSubscribed) -> Error {
        match denied {
            NotSubscribed::NoSuchGroup => Error::Group,
            NotSubscribed::NoMemory => Error::Memory,
            NotSubscribed::NoEventFd | NotSubscribed::Blocking => Error::EventFd,
        }
    }
}

impl From<NotSet<'_>> for Error {
    fn from(refused: NotSet<'_>) -> Error {
        match refused {
            NotSet::Fixed { .. } => Error::Fixed,
            NotSet::NoMemory => Error::Memory,
            _ => Error::Argument,
        }
    }
}

/// The return value of a function: an error's number, or the result, which is not negative.
pub(crate) fn answer(outcome: Result<c_int, Error>) -> c_int {
    outcome.unwrap_or_else(|error| error as c_int)
}

/// Stores the result of `make` at `place`, and returns 0. If `place` is null or misaligned, `make`
/// is not called.
///
/// # Safety
/// `place` is null, misaligned or writable.
pub(crate) unsafe fn into<T>(place: *mut T, make: impl FnOnce() -> Result<T, Error>) -> c_int {
    if place.is_null() || !place.is_aligned() {
        return Error::Argument as c_int;
    }
    // SAFETY: `place` is neither null nor misaligned, so the caller promises that it is writable.
    answer(make().map(|made| unsafe { place.write(made) }).map(|()| 0))
}

/// Stores `known` at `place`. `size` is the size of the structure in the caller's version. Fields
/// that this version does not know become 0. Stores nothing if `place` is null or misaligned.
///
/// # Safety
/// `place` is null, misaligned or writable for `size` bytes.
pub(crate) unsafe fn store_known<T: Copy>(known: T, place: *mut T, size: usize) {
    if !place.is_null() && place.is_aligned() {
        // SAFETY: `place` is neither null nor misaligned, so `size` bytes are writable (the
        // caller's promise).
        unsafe {
            place.cast::<u8>().write_bytes(0, size);
            copy_nonoverlapping((&raw const known).cast::<u8>(), place.cast(), size.min(size_of::<T>()));
        }
    }
}

/// Converts a C caller's wait time in nanoseconds.
///
/// # Errors
/// Returns [`Error::Argument`] for a negative number that is not `NEAP_FOREVER`.
pub(crate) fn wait(nanoseconds: i64) -> Result<Wait, Error> {
    match nanoseconds {
        FOREVER => Ok(Wait::Long),
        0 => Ok(Wait::Never),
        1.. => Ok(Wait::Until(neap_os::clock::coarse().saturating_add(nanoseconds as u64))),
        _ => Err(Error::Argument),
    }
}

/// `NEAP_FOREVER`.
const FOREVER: i64 = -1;

/// Converts nanoseconds into a time.
///
/// # Errors
/// Returns [`Error::Argument`] for a negative number that is not `NEAP_FOREVER`.
pub(crate) fn time(nanoseconds: i64) -> Result<Duration, Error> {
    match nanoseconds {
        FOREVER => Ok(Duration::MAX),
        _ => u64::try_from(nanoseconds).map(Duration::from_nanos).map_err(|_| Error::Argument),
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
