//! Memory groups of neap: a tree of tenants with their usage, and bounds that can change at any
//! time.
//!
//! [`Groups`] is the entry point. A charge takes bytes from the stock of the caller's CPU. Stocks
//! are filled by batches, which are charged to a group and all its ancestors. Any thread on any CPU
//! can uncharge bytes. Bytes of a deleted group are uncharged from its heir, the nearest ancestor
//! that exists. The page and object allocators do not know groups; they store a payer as a number.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

mod admission;
mod charge;
mod counts;
mod counts_memory;
mod error;
mod events;
mod group;
mod group_slot;
mod groups;
mod id;
mod id_table;
mod lifecycle;
mod memory_layout;
pub mod protection;
mod queue;
mod requests;
mod stall;
mod stock;
pub mod table;
mod tree;
mod verify;
mod wait;

pub use charge::{Limit, OnLimit, Refusal};
pub use error::GroupError;
pub use events::{Callback, EventDelta, Listener, NotSubscribed, Subscription};
pub use group::{Bound, DEEPEST, Event, GroupSlot, LONGEST_NAME, Name, SharedName, UNLIMITED, is_name};
pub use groups::{FlushPace, GoneId, Groups, Info, Reclaimer};
pub use id::{GroupId, Kind, MOST_GROUPS, PAYER_BITS, Payer};
pub use queue::TICK_INTERVAL_NS;
pub use requests::{Due, Request};
pub use stock::{BATCH, CAP};
pub use tree::GroupCount;
pub use wait::{ChargeAsync, FOREVER, Patience, Reason, Waiting};
