//! Reclaim in this process: caches that shrink when a group is at its limit, so that charges are
//! not refused.
//!
//! A cache registers a [`Shrinker`]: one function counts its objects, the other frees some of them.
//! neap calls these functions in three cases:
//!
//! * the group that pays for the cache, or a group above it, is at a limit;
//! * the process is at its own limit (`NEAP=limit`);
//! * the program calls [`reclaim`].
//!
//! A pass raises the pressure step by step. It asks each group in proportion to the group's usage
//! beyond its `low` and `min`.
//!
//! ```
//! # #[cfg(feature = "std")] {
//! use neap::groups::{Bound, Charge, Group};
//! use neap::reclaim::Shrinker;
//! use std::collections::HashMap;
//! use std::sync::{Arc, Mutex};
//!
//! type Cache = Mutex<HashMap<u64, (Vec<u8>, Charge)>>;
//! let (cache, tenant) = (Arc::new(Cache::default()), Group::create("tenant")?);
//! tenant.set(Bound::Max, 4 << 20)?;
//!
//! let (counted, shrunk) = (cache.clone(), cache.clone());
//! let shrinker = Shrinker::named("pages").group(tenant).batch(16).register(
//!     move || counted.try_lock().map_or(0, |cache| cache.len() as u64),
//!     move |objects| {
//!         // The thread that holds the lock may be waiting for this call.
//!         let Ok(mut cache) = shrunk.try_lock() else { return 0 };
//!         let keys: Vec<u64> = cache.keys().copied().take(objects as usize).collect();
//!         keys.iter().filter(|key| cache.remove(key).is_some()).count() as u64
//!     },
//! )?;
//!
//! // Sixteen times as much as fits: no charge is refused, and the cache stays below its limit.
//! for key in 0..1024 {
//!     let charge = tenant.charge(64 << 10)?;
//!     cache.lock().unwrap().insert(key, (vec![0; 64 << 10], charge));
//!     assert!(tenant.used()? <= 4 << 20);
//! }
//! assert!(cache.lock().unwrap().len() > 16);
//! drop(shrinker);
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Which threads call
//!
//! `malloc` and [`Group::charge`] call no function of the program's shrinkers, because the calling
//! thread may hold a lock that the function takes. They wait for neap's own threads to call the
//! functions, for at most 200 ms each time. neap makes these threads when the first shrinker is
//! registered.
//!
//! A charge that is [`inline`](crate::groups::ChargeRequest::inline) calls the functions of
//! shrinkers that allow it ([`Shrinker::inline`](Builder::inline)) in the charging thread.
//! [`reclaim`] calls the functions of all shrinkers in the calling thread.
//!
//! Any other charge that waits ([`ChargeRequest::wait`](crate::groups::ChargeRequest::wait), or a
//! future) calls no function itself. As long as the charge waits, neap's threads ask its group for
//! memory repeatedly. They also ask a group whose limit was set below its usage, until the usage is
//! below the limit.
//!
//! # Slow and wrong functions
//!
//! A function has 100 ms for a call, or the shrinker's own [budget](Builder::budget). If it has not
//! returned by then, neap *writes off* the thread that called it: another thread takes over that
//! thread's work. The shrinker becomes a [culprit](each_culprit), and is not called again before
//! the function has returned.
//!
//! After each of the events below, neap does not call the shrinker for one second. Each further
//! event doubles that time, up to 64 seconds. Half a minute without an event halves it. The events
//! are:
//!
//! * a function used more CPU time than its budget;
//! * a function took longer than its budget three times in a row, but used less CPU time;
//! * a function panicked;
//! * a function gave an impossible answer, for example that it freed more objects than it has.
//!
//! A charge within a shrinker's function is not throttled above a `high`, and may exceed a `max` by
//! an eighth. So a cache may compress the objects that it evicts.
//!
//! With `NEAP=background:off`, neap has no thread. Then only [inline
//! requests](crate::groups::ChargeRequest::inline) and [`reclaim`] call functions. This also holds
//! in a child of `fork`, until it makes a thread or calls
//! [`start_background`](crate::mm::Mm::start_background).
//!
//! neap reports memory pressure as events of the group that a pass reclaims from
//! ([`Event::PressureLow`](crate::groups::Event::PressureLow) and so on). Listeners that
//! [subscribed](Group::subscribe) to that group, or to a group above it, get the events.
//!
//! Source: the shrinkers, memory cgroups and vmpressure of Linux, by idea.

use crate::groups::Group;
use crate::process::PROCESS;
pub use crate::reclaim::pass::Payment;
use crate::reclaim::reclaiming::Reclaiming;
use core::ffi::c_void;
use core::time::Duration;
#[cfg(feature = "std")]
pub use shrink::Prepared;
pub use shrink::{Context, Count, Scan, Shrink};

use neap_base::{Linux, Platform};
use neap_percpu::Host as _;
pub use neap_reclaim::reclaim::{Culprit, Misbehaviour, PassResult};
pub use neap_reclaim::{
    Asked, CountFn, DONE, EMPTY, GoneFn, Report, STOP, ScanFn, ShrinkerError, ShrinkerId, Spec, Unregistered, share,
};
use neap_reclaim::{DEFAULT_SEEKS, is_calling};

pub(crate) mod builtin_shrinkers;
pub(crate) mod callback_clock;
mod host;
pub(crate) mod pass;
pub mod reclaiming;
mod shrink;
#[cfg(test)]
mod waiting_tests;
pub(crate) mod watching;
pub(crate) mod workers;
#[cfg(test)]
mod workers_tests;

/// Default number of objects per call.
const BATCH: u64 = 32;

fn here() -> Result<Reclaiming<'static, Linux>, ShrinkerError> {
    PROCESS.reclaiming()
}

/// A registered cache. Dropping this value unregisters the cache.
///
/// Dropping waits until running calls of the cache's functions have ended. So a thread must not
/// drop it while it holds a lock that the functions take. Inside a shrinker's function, dropping
/// does not wait.
#[derive(Debug)]
#[must_use = "the cache is not asked any more when this is dropped"]
pub struct Shrinker(ShrinkerId);

impl Shrinker {
    /// Begins the registration of a cache. A name has 1 to 56 bytes and no `/`. Several caches may
    /// have equal names.
    pub fn named(name: &str) -> Builder<'_> {
        Builder {
            name,
            group: None,
            seeks: DEFAULT_SEEKS,
            batch: BATCH,
            by_group: false,
            by_node: false,
            inline: false,
            budget: 0,
            #[cfg(feature = "std")]
            object_bytes: 0,
        }
    }

    /// Returns the shrinker's id, for reports and for [`mark`].
    pub fn id(&self) -> ShrinkerId {
        self.0
    }

    /// Calls [`mark`] for all nodes. Call it after the group's first object has become visible to
    /// `count`. Returns `false` if there is neither the group nor an heir.
    pub fn mark(&self, group: Group) -> bool {
        let Some(reclaiming) = PROCESS.reclaiming_if_made() else { return false };
        (0..reclaiming.source.platform().nodes() as u32).all(|node| reclaiming.mark(self.0, group.id(), node))
    }
}

impl Drop for Shrinker {
    fn drop(&mut self) {
        // If the system refuses the fence, the shrinker stays registered, and neap keeps the data
        // of its functions.
        let _ = unregister(self.0);
    }
}

/// A registration in preparation. [`Shrinker::named`] begins one.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is registered yet"]
pub struct Builder<'a> {
    name: &'a str,
    group: Option<Group>,
    seeks: u32,
    batch: u64,
    by_group: bool,
    by_node: bool,
    inline: bool,
    /// Budget of a call in nanoseconds; 0: the default.
    budget: u64,
    /// Approximate bytes of an object, for functions in Rust. Functions in C return freed bytes
    /// themselves.
    #[cfg(feature = "std")]
    object_bytes: u64,
}

impl<'a> Builder<'a> {
    /// Sets the group that pays for the cached objects. Reclaim asks the cache for objects when it
    /// reclaims from that group, its heir, or a group above it. It asks a cache without a group
    /// only when it reclaims from the whole process.
    pub const fn group(self, group: Group) -> Self {
        Builder { group: Some(group), ..self }
    }

    /// Sets the cost of recreating an object: 2 by default, more for expensive objects, 0 for free
    /// ones.
    pub const fn seeks(self, seeks: u32) -> Self {
        Builder { seeks, ..self }
    }

    /// Sets how many objects neap asks one call to free. The default is 32; 1 suits large objects.
    /// 0 counts as 1.
    pub const fn batch(self, objects: u64) -> Self {
        Builder { batch: if objects == 0 { 1 } else { objects }, ..self }
    }

    /// Declares that the cache serves many groups. The program [marks](mark) a group once the first
    /// object of the group is visible to `count`. neap calls `count` and `scan` for one marked
    /// group at a time, which the [`Context`] names. If the builder also has a
    /// [`group`](Builder::group), neap marks that group at registration.
    pub const fn by_group(self) -> Self {
        Builder { by_group: true, ..self }
    }

    /// Declares that the cache keeps the objects of each NUMA node apart. neap calls its functions
    /// for one node at a time.
    pub const fn by_node(self) -> Self {
        Builder { by_node: true, ..self }
    }

    /// Sets the approximate bytes of an object that is charged to no group. Reclaim computes the
    /// freed bytes from them.
    #[cfg(feature = "std")]
    pub const fn object_bytes(self, bytes: u64) -> Self {
        Builder { object_bytes: bytes, ..self }
    }

    /// Allows calls within a charge that is [`inline`](crate::groups::ChargeRequest::inline). The
    /// functions must not wait for a lock that a charging thread may hold.
    pub const fn inline(self, inline: bool) -> Self {
        Builder { inline, ..self }
    }

    /// Sets how long one call of a function may take before neap writes off the calling thread. The
    /// default is 100 ms.
    pub const fn budget(self, time: Duration) -> Self {
        let nanoseconds = time.as_nanos();
        let budget = if nanoseconds > u64::MAX as u128 { u64::MAX } else { nanoseconds as u64 };
        Builder { budget: if budget == 0 { 1 } else { budget }, ..self }
    }

    /// Registers the cache with the C functions `count` and `scan`. neap calls `gone` when it no
    /// longer needs `data`.
    ///
    /// # Errors
    /// See [`ShrinkerError`]. neap does not call `gone` then.
    ///
    /// # Safety
    /// * The functions may be called with `data`, by any thread and by several at a time, until
    ///   `gone` was called.
    /// * They do not unwind.
    pub unsafe fn register_raw(
        self,
        count: CountFn,
        scan: ScanFn,
        gone: Option<GoneFn>,
        data: *mut c_void,
    ) -> Result<Shrinker, ShrinkerError> {
        // SAFETY: the functions may be called with `data` by any threads until `gone` was called,
        // and do not unwind (the caller's promise).
        let shrinker = unsafe { self.prepare(count, scan, gone, data) }?;
        start(shrinker.0, self.group, !self.by_group, self.by_node).map(|()| shrinker)
    }

    /// Enters the cache into the registry. neap does not call its functions before [`start`]. On an
    /// error, the registry keeps nothing of the cache.
    ///
    /// # Safety
    /// Those of [`Builder::register_raw`].
    unsafe fn prepare(
        self,
        count: CountFn,
        scan: ScanFn,
        gone: Option<GoneFn>,
        data: *mut c_void,
    ) -> Result<Shrinker, ShrinkerError> {
        let Builder { name, group, seeks, batch, by_node, inline, budget, .. } = self;
        // Makes the groups, if there are none yet.
        let reclaiming = here()?;
        let is_there =
            |group: Group| PROCESS.groups_if_made().is_some_and(|grouped| grouped.heir(group.id()).is_some());
        if group.is_some_and(|group| !is_there(group)) {
            return Err(ShrinkerError::NoSuchGroup);
        }
        let by_group = group.is_some() || self.by_group;
        let spec = Spec { name, count, scan, data, gone, seeks, batch, by_node, by_group, inline };
        // SAFETY: the functions may be called with `data` by any threads until `gone` was called,
        // and do not unwind (the caller's promise).
        let shrinker = unsafe { reclaiming.reclaim.shrinkers.prepare(&reclaiming.source, &spec) }.map(Shrinker)?;
        reclaiming.reclaim.shrinkers.set_budget(shrinker.0, budget);
        Ok(shrinker)
    }
}

/// Allows calls of a prepared shrinker, which no other thread knows yet. Fails only if another
/// thread guessed its id and unregistered it.
///
/// If the shrinker has a `group`, marks that group or its heir, on each node if `by_node`. If the
/// shrinker `belongs` to the group, reclaim asks it for objects of that group alone.
fn start(id: ShrinkerId, group: Option<Group>, belongs: bool, by_node: bool) -> Result<(), ShrinkerError> {
    let reclaiming = here()?;
    group.filter(|_| belongs).inspect(|group| reclaiming.reclaim.shrinkers.belongs_to(id, group.id()));
    // If neither the group nor an heir is left, the root is marked.
    let groups = group.into_iter().chain(group.map(|_| Group::ROOT));
    let nodes = if by_node { reclaiming.source.platform().nodes() as u32 } else { 1 };
    (0..nodes).for_each(|node| _ = groups.clone().any(|group| reclaiming.mark(id, group.id(), node)));
    reclaiming.start(id)
}

/// Registers a shrinker. The program calls [`mark`] for each group and node of which the cache may
/// have objects. If there is a `group`, this function marks that group or its heir, on each node if
/// `spec` is `by_node`. Reclaim asks a shrinker with a group and without `by_group` for objects of
/// that group alone.
///
/// # Errors
/// See [`ShrinkerError`]. neap does not call `gone` then.
///
/// # Safety
/// Those of [`Builder::register_raw`].
pub unsafe fn register(spec: &Spec<'_>, group: Option<Group>) -> Result<ShrinkerId, ShrinkerError> {
    let reclaiming = here()?;
    if group.is_some_and(|group| group.info().is_err()) {
        return Err(ShrinkerError::NoSuchGroup);
    }
    let by_group = spec.by_group || group.is_some();
    // SAFETY: the functions of `spec` may be called with `data` by any threads until `gone` was
    // called, and do not unwind (the caller's promise).
    let id = unsafe { reclaiming.reclaim.shrinkers.prepare(&reclaiming.source, &Spec { by_group, ..*spec }) }?;
    start(id, group, !spec.by_group, spec.by_node).map(|()| id)
}

/// Marks a group on a node, so that reclaim asks a shrinker with `by_group` for its objects. If the
/// group was deleted, marks the group's heir. Call it after the first object of the group has
/// become visible to `count`. Returns `false` if there is neither the group nor an heir.
///
/// Source: Linux `set_shrinker_bit`, by description.
pub fn mark(id: ShrinkerId, group: Group, node: u32) -> bool {
    PROCESS.reclaiming_if_made().is_some_and(|reclaiming| reclaiming.mark(id, group.id(), node))
}

/// Ends a shrinker, and waits for running calls of it. Inside a callback it does not wait.
///
/// # Errors
/// * [`ShrinkerError::NoSuchShrinker`], also for neap's own shrinkers, which cannot be
///   unregistered.
/// * [`ShrinkerError::Fence`] if the system refuses the fence. The shrinker stays registered then.
pub fn unregister(id: ShrinkerId) -> Result<Unregistered, ShrinkerError> {
    PROCESS.reclaiming_if_made().ok_or(ShrinkerError::NoSuchShrinker)?.unregister(id)
}

/// Waits for all running calls of shrinkers' functions.
///
/// # Errors
/// [`ShrinkerError::InCallback`] inside a shrinker's function; [`ShrinkerError::Fence`] if the
/// system refuses the fence.
pub fn synchronize() -> Result<(), ShrinkerError> {
    PROCESS
        .reclaiming_if_made()
        .map_or(Ok(()), |reclaiming| reclaiming.reclaim.shrinkers.synchronize(&reclaiming.source))
}

/// Asks the shrinkers of a group, and of all groups below it, for `bytes` bytes, for at most
/// `time`. Calls them in this thread, which must hold no lock that they take. Returns the freed
/// bytes and objects. Inside a shrinker's function, it calls no shrinker and returns zeroes.
pub fn reclaim(group: Group, bytes: u64, time: Duration) -> PassResult {
    let Some(reclaiming) = here().ok().filter(|_| !is_calling()) else { return PassResult::default() };
    let now = PROCESS.groups_if_made().map_or(0, |grouped| grouped.platform().precise());
    let deadline = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    reclaiming.ask(group.id(), bytes, now.saturating_add(deadline))
}

/// Calls `each` with the groups that would pay if reclaim asked `group` for `bytes` bytes, and
/// their shares.
///
/// A share is in proportion to the bytes that are charged to a group beyond its protection. A group
/// whose shrinkers count no objects has no share. Frees nothing. Calls `count` functions in this
/// thread.
pub fn dry_run(group: Group, bytes: u64, each: impl FnMut(Payment)) {
    if let Some(reclaiming) = PROCESS.reclaiming_if_made().filter(|_| !is_calling()) {
        reclaiming.dry_run(group.id(), bytes, each);
    }
}

/// Calls `each` with a report of every shrinker. Takes no lock, and does not delay unregistering.
pub fn each_shrinker(each: impl FnMut(&Report)) {
    if let Some(reclaiming) = PROCESS.reclaiming_if_made() {
        reclaiming.reclaim.shrinkers.each(each);
    }
}

/// Calls `each` with shrinkers that were too slow, panicked or gave false answers. neap remembers
/// up to 64 of them.
pub fn each_culprit(each: impl FnMut(Culprit)) {
    if let Some(reclaiming) = PROCESS.reclaiming_if_made() {
        reclaiming.reclaim.watchdog.each_culprit(each);
    }
}
