//! The states of a manager's parts, which [`Core`](crate::mm::Core) holds.
//!
//! The behaviour of a part is in a file or folder of its name elsewhere in this crate. It uses the
//! whole manager, which the files here do not.

pub(crate) mod at_limit;
pub(crate) mod background;
pub(crate) mod checked;
pub(crate) mod gated;
pub(crate) mod guard;
pub(crate) mod headroom;
pub(crate) mod in_call;
pub(crate) mod maintenance;
pub(crate) mod of_process;
pub(crate) mod per_cpu;
pub(crate) mod profile;
pub(crate) mod reclaim;
