//! LRU lists: items by group and node, oldest first, each group's and node's under a lock of its
//! own.
//!
//! The objects of a cache have an [`Item`] inside; reclaim walks the lists of a group. [`Lists`] is
//! the shared state of all lists of a tree of groups, and a [`Site`] is an argument of every call.
//! Sub-lists are made when they are first used. When a group is deleted, its items are its parent's
//! at once.
//!
//! Source: list_lru of Linux, by idea.

mod ages;
mod block;
mod chain;
mod isolated;
mod list;
mod radix;
mod registry;
mod sublist;
mod verify;

pub use ages::{Stamp, Turnover};
pub use block::By;
pub use chain::{End, Item};
pub use isolated::{Hands, MOST};
pub use list::{LONGEST, LruList, LruStatus, Walked};
pub use registry::{Lists, Site};
