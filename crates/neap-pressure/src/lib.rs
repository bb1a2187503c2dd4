//! Finds the memory limit and the headroom that bind a Linux process.
//!
//! A [`Sensor`] finds the process's own group in cgroup version 1, version 2 and hybrid systems. It
//! reads the group, all visible ancestors, the machine, and the process's own limits. The
//! [`MemoryReport`] has the level with the least headroom, the room to grow, and the signals of
//! pressure that can be used. [`MemoryReport::explain`] writes all of it as text.
//!
//! ```
//! use neap_pressure::{Sensor, Subject, System};
//!
//! let mut sensor = Sensor::new(Subject::Own);
//! let report = sensor.look(&System::new());
//! if let Some(wall) = report.wall() {
//!     println!("{:?} bytes until {:?}", wall.headroom(), wall.owner);
//! }
//! ```
//!
//! # Design
//!
//! Pure functions parse files and make decisions. [`Files`] is the only access to the system, so
//! tests can use made-up files. The crate depends on no other crate of neap. It allocates nothing
//! and starts no thread. Only a trigger writes to files. A look makes a report whatever the files
//! contain. The report lacks parts that cannot be read, and its explanation names them.
//!
//! The wall is the level with the least headroom. An [`Estimator`] estimates the time until
//! headroom is used up, from a series of headrooms. [`Pressure`] is a level with hysteresis,
//! computed from headroom and that time. A [`Series`] does both, look by look. The caller passes
//! the time of each look.
//!
//! A [`Trigger`] arms one signal that notifies on a descriptor, so that a program can wait between
//! two looks. [`Notify`] is its access to the system.

#![no_std]
#![forbid(unsafe_code)]

mod explain;
mod files;
mod groups;
mod level;
mod lines;
mod notify;
mod path;
mod place;
mod process;
mod records;
mod report;
mod room;
mod sensor;
mod series;
mod signals;
mod stall;
mod system;
mod text;
mod trigger;
mod wall;
mod watch;

pub use explain::Size;
pub use files::{Access, Errno, FileKind, Files};
pub use groups::Version;
pub use level::{LimitedBy, MemoryLevel, Swap};
pub use lines::{Membership, Mount, Position, position};
pub use notify::{Notify, Ready};
pub use place::Visibility;
pub use process::Subject;
pub use report::{MOST_LEVELS, MemoryReport};
pub use room::Room;
pub use sensor::Sensor;
pub use series::{Series, Step};
pub use signals::{Signal, SignalState};
pub use stall::{LONGEST_TRIGGER, StallReading, StallWindow, Stalls};
pub use system::System;
pub use trigger::{Fired, LimitEvents, Trigger};
pub use wall::{Estimator, KEPT, Pressure, Sample, margin, room_to_grow};
pub use watch::{Watch, decode};
