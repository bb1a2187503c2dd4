//! Shrinkers: callbacks by which caches report their number of objects and free some of them.
//!
//! [`Shrinkers`] is the registry. Threads that visit shrinkers take no lock and, with restartable
//! sequences, take references in words of their CPU. For each group and node the registry has the
//! bits of shrinkers that may have objects. So the cost of a pass depends on the number of such
//! shrinkers alone. Callbacks run with no lock held.

pub mod bits;
mod call_depth;
pub mod lifecycle;
mod registry;
mod shrinker;
mod shrinker_info;
mod visit;
mod work;

pub use call_depth::{is_calling, without_reclaim};
pub use registry::{MOST_SHRINKERS, Report, ShrinkerError, Shrinkers, Unregistered};
pub use shrinker::{Asked, CountFn, DONE, EMPTY, GoneFn, STOP, ScanFn, ShrinkerId, Spec};
pub use visit::{Caller, Visited};
pub use work::{DEFAULT_BATCH, DEFAULT_SEEKS, FIRST_PRIORITY, ScanPressure, ShrinkerFilter, WHOLE, Work, share};
