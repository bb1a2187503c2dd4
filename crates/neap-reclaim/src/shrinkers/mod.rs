//! Shrinkers: callbacks of whoever caches, which say how much there is and give some of it back.
//!
//! Sits between caches and passes of reclaim. [`Shrinkers`] is the whole of it: a registry whose visitors take no lock and write no line that
//! other visitors look at, and for each group and node the bits of those that may have something, so that a pass costs what there is and not what
//! exists. Callbacks run with no lock held.

pub mod bits;
mod calling;
pub mod life;
mod places;
mod registry;
mod shrinker;
mod visit;
mod work;

pub use calling::{is_calling, without_reclaim};
pub use registry::{MOST_SHRINKERS, NotDone, Report, Shrinkers, Unregistered};
pub use shrinker::{Asked, CountFn, DONE, EMPTY, GoneFn, STOP, ScanFn, ShrinkerId, Spec};
pub use visit::{Caller, Visited};
pub use work::{DEFAULT_BATCH, DEFAULT_SEEKS, FIRST_PRIORITY, Press, WHOLE, Whom, Work, share};
