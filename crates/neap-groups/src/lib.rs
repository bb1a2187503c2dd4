//! Memory groups of neap: who holds what, in a tree, with limits that can change at any moment.
//!
//! Sits on `neap-base` and `neap-percpu`, beside pages and objects, which know no groups: to them a payer is a number. [`Groups`] is the
//! whole of it. What is charged comes out of per-CPU stocks and is charged to a group and all above it a batch at a time; what comes back goes
//! the same way, from any thread and CPU, also to a group that is gone: its parent has inherited it.
#![no_std]
#![deny(missing_docs)]

#[cfg(test)]
extern crate std;

mod admit;
mod asking;
mod charge;
mod events;
mod group;
mod groups;
mod id;
mod owners;
pub mod protection;
mod queue;
mod seat;
mod stock;
pub mod table;
mod tree;
mod verify;
mod wait;

pub use asking::{Due, Request};
pub use charge::{How, Limit, Refusal};
pub use events::{Callback, Happened, Listener, NotSubscribed, Subscription};
pub use group::{Bound, DEEPEST, Event, LONGEST_NAME, Name, SharedName, UNLIMITED, is_name};
pub use groups::{Groups, INTERVAL, Info, Reclaimer};
pub use id::{GroupId, Kind, MOST_GROUPS, PAYER_BITS, Payer};
pub use seat::Seat;
pub use stock::{BATCH, CAP};
pub use tree::{Denied, GroupCount};
pub use verify::Finding;
pub use wait::{ChargeAsync, FOREVER, Reason, Waiting};
