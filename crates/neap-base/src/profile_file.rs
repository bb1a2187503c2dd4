//! Format of a heap profile in a file, which a process writes at a limit (`profile_at_limit`) or at
//! the program's request.
//!
//! # Design
//! | offset | content |
//! |---|---|
//! | 0 | lines of text, the first [`FIRST_LINE`], the last [`LAST_LINE`] |
//! | [`FILE_OFFSET`](crate::profile_area::FILE_OFFSET) | an [area](crate::profile_area) |
//!
//! | line | content |
//! |---|---|
//! | `pid N` | id of the process in its own PID namespace |
//! | `name TEXT` | name of the process |
//! | `why TEXT` | `refused`, `imminent`, or `requested` |
//! | `time N` | seconds since 1970 |
//! | `now N` | `CLOCK_MONOTONIC` in nanoseconds |
//! | `used N` | bytes that the program has in use |
//! | `code LINE` | an executable mapping: a line of the kernel's `maps` |
//! | `thread N TEXT` | id and name of a thread that has samples |
//! | `group N TEXT` | id and path of a memory group that has samples |
//! | `left_out N` | count of lines that found no room |
//!
//! The area has the samples that are live. The process fills its ring from the first byte on,
//! without records of frees. It writes the text last, so a file without text is not complete.
//!
//! A copy of a stack may hold secrets. An unwinder needs only addresses of code and addresses in
//! the copied bytes themselves. In the file, every other word of the copy is zero.

/// The first line, with its end.
pub const FIRST_LINE: &str = "neap heap profile 1\n";
/// The last line, with its end.
pub const LAST_LINE: &str = "end\n";
