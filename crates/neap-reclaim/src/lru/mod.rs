//! LRU lists: items by group and node, oldest first, each group's and node's under a lock of its own.
//!
//! Sits between caches, whose objects have an [`Item`] inside, and reclaim, which walks the lists of a group. [`Lists`] is what all lists of
//! a tree of groups have in common, and a [`Site`] is what every call is told. Sub-lists are made when they are first used; when a group is
//! deleted what it has is its parent's at once.
//!
//! Source: list_lru of Linux, by idea.

mod block;
mod chain;
mod hands;
mod item;
mod list;
mod radix;
mod registry;
mod verify;

pub use chain::End;
pub use hands::{Hands, MOST};
pub use item::Item;
pub use list::{LONGEST, LruList, Verdict, Walked};
pub use registry::{Lists, Site};
pub use verify::Finding;
