//! LRU lists: items by group and node, oldest first. Each pair of group and node has its own lock.
//!
//! An object of a cache contains an [`Item`]. To evict objects, a cache walks the lists of a group.
//! [`LruRegistry`] is the shared state of all lists of a tree of groups, and a [`Site`] is an
//! argument of every call. A sub-list is made when it is first used. When a group is deleted, its
//! items are its parent's at once.
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
pub use registry::{LruRegistry, Site};
