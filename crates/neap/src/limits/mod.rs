//! Bounds of the heap: the options `limit` and `high`, and the container's headroom. Heap profiles
//! in files, at a limit or by request.

pub(crate) mod at_limit;
pub(crate) mod dump;
pub(crate) mod following;
pub(crate) mod headroom;
mod heap_profile;
pub(crate) mod high;
pub(crate) mod limit;
