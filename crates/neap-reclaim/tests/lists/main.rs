//! LRU lists on a virtual machine.
//!
//! One program: each of its own would compile the lists for the virtual machine again.

mod deleted_groups;
mod edges;
mod faults;
mod isolated;
mod known_bugs;
mod model;
mod site;
mod threads;
