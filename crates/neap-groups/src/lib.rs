//! Memory groups of neap: a tree of tenants with their usage, and bounds that can change at any
//! time.
//!
//! [`Groups`] is the whole of it. Charges come out of per-CPU stocks, and go to a group and all its
//! ancestors a batch at a time. Uncharges go the same way, from any thread and CPU, also for a
//! deleted group, which its parent has inherited. Pages and objects know no groups; to them a payer
//! is a number.
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
pub use groups::{FlushPace, Groups, Info, Reclaimer};
pub use id::{GroupId, Kind, MOST_GROUPS, PAYER_BITS, Payer};
pub use queue::INTERVAL;
pub use requests::{Due, Request};
pub use stock::{BATCH, CAP};
pub use tree::GroupCount;
pub use wait::{ChargeAsync, FOREVER, Patience, Reason, Waiting};
