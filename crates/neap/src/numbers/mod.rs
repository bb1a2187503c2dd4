//! Numbers of a manager: statistics for the program, and the page of numbers for `neap stat`.

pub(crate) mod live;
pub(crate) mod page;
pub(crate) mod sheet;
pub mod statistics;
pub mod stats;
pub(crate) mod text;
