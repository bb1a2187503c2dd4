//! Heap profiles that the program requests: [`dump_profile`].
//!
//! # Locking
//! This module has no lock. Two calls at once with one name write into one file.

use crate::limits::heap_profile::FileName;
use crate::mm::Mm;
use crate::process::PROCESS;
use core::ffi::CStr;
use core::fmt;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_os::stack;

/// Beginning and end of the name of a file for which the program gives no name.
const NAME: (&CStr, &str) = (c"neap", ".heap");

/// The reason why a heap profile was not written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NotDumped {
    /// Allocations are not sampled.
    NotSampled,
    /// The error of making or writing the file. A file that was made is empty.
    File(Errno),
}

impl fmt::Display for NotDumped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotDumped::NotSampled => f.write_str("allocations are not sampled; set the option profile"),
            NotDumped::File(error) => write!(f, "the heap profile cannot be written: {error}"),
        }
    }
}

impl core::error::Error for NotDumped {}

/// Writes the live samples of the process's allocations to a file, for `neap profile --read`:
/// [`Mm::dump_profile`].
///
/// ```
/// let refused = neap::dump_profile(None).unwrap_err();
/// assert_eq!(refused.to_string(), "allocations are not sampled; set the option profile");
/// ```
///
/// # Errors
/// [`NotDumped`] says why no heap profile was written.
pub fn dump_profile(file: Option<&CStr>) -> Result<(), NotDumped> {
    PROCESS.dump_profile(file)
}

impl<P: Platform> Mm<P> {
    /// Writes a heap profile: the live samples of allocations, in the format of the option
    /// `profile_at_limit`.
    ///
    /// The content of an existing `file` is replaced. A new file is for its owner alone. Without a
    /// name the file is `neap.PID.N.heap` in the current folder. `N` is the number of such calls so
    /// far or, if the file exists, a later number.
    ///
    /// The call allocates nothing and may take some milliseconds. Must not be called from a signal
    /// handler.
    ///
    /// # Errors
    /// [`NotDumped`] says why no heap profile was written.
    pub fn dump_profile(&self, file: Option<&CStr>) -> Result<(), NotDumped> {
        let core = self.core().filter(|_| self.profile.recorded_every().is_some()).ok_or(NotDumped::NotSampled)?;
        let numbered = || {
            let (start, end) = NAME;
            // Relaxed: the number publishes no other data.
            let first = self.profile.dumps.fetch_add(1, Ordering::Relaxed).saturating_add(1);
            // A container's process has number 1 at each start, and finds files of earlier ones.
            FileName::Numbered { start, first, tries: 1 << 16, end }
        };
        let name = file.map_or_else(numbered, FileName::Whole);
        // The caller's stack may be small.
        let written = stack::apart(|| core.write_profile(self, name, "requested"));
        written.unwrap_or(Err(Errno::NOMEM)).map_err(NotDumped::File)
    }
}
