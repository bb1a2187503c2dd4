//! Reclaim in this process: caches that shrink when a group is at its limit, instead of charges that are refused.
//!
//! Sits between a program and the process's manager ([`PROCESS`]). Who caches registers a [`Shrinker`]: two functions, one says how many objects there
//! are, the other gives some of them up. They are called when the group that pays for the cache, or one above it, is at a limit, when the
//! process is at its own (`NEAP=limit`), or when somebody asks ([`reclaim`]); first gently, then harder, in proportion to what each group has beyond its
//! `low` and `min`.
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
//!         // Who holds the lock may be waiting for this call.
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
//! Who calls: within `malloc` and [`Group::charge`] nobody's functions are called, because the
//! thread may hold the very lock that they take. It waits, for 200 ms at most each time that it
//! asks, for neap's own threads, which come into being with the first shrinker, and call them.
//! A charge that is [`inline`](crate::groups::ChargeRequest::inline) calls those that allow it
//! ([`Shrinker::inline`](Builder::inline)) in its own thread, and [`reclaim`] all. A charge that
//! waits ([`ChargeRequest::wait`](crate::groups::ChargeRequest::wait), or as a future) otherwise
//! calls nothing itself: its group is asked again and again, by neap's threads, for as long as it
//! waits. So is a group whose limit was set below what it uses, until it
//! uses less.
//!
//! A function that has not come back after 100 ms, or the shrinker's own [budget](Builder::budget),
//! is written off, and its thread replaced; its shrinker, a [culprit](each_culprit), is not called
//! before it is back. One that has had a CPU for that long, one that waited for something three
//! times in a row, a panic, or an answer that cannot be true, is not called for a second, and for
//! twice as long each further time; half a minute takes one doubling back. A function that charges
//! is not held up above a `high`, and may go an eighth beyond a `max`: so a cache may compress what
//! it gives up. Where neap may have no thread (`NEAP=background:off`), and in a child of `fork`
//! before it makes a thread or calls [`start_background`](crate::mm::Mm::start_background), only
//! the last two calls call a function.
//!
//! How hard memory is to get is told as events of the group that is asked ([`Event::PressureLow`](crate::groups::Event::PressureLow) and so on), to whoever has
//! [subscribed](Group::subscribe) to it or to one above it.
//!
//! Source: the shrinkers, memory cgroups and vmpressure of Linux, by idea.

use crate::groups::Group;
use crate::process::PROCESS;
pub use crate::reclaiming::Payment;
use crate::reclaiming::Reclaiming;
use core::ffi::c_void;
use core::time::Duration;
#[cfg(feature = "std")]
pub use shrink::Prepared;
pub use shrink::{Context, Count, Scan, Shrink};

mod shrink;

use neap_base::{Linux, Platform};
pub use neap_reclaim::reclaim::{Culprit, Got, Verdict};
pub use neap_reclaim::{
    Asked, CountFn, DONE, EMPTY, GoneFn, NotDone, Report, STOP, ScanFn, ShrinkerId, Spec, Unregistered,
};
use neap_reclaim::{DEFAULT_SEEKS, is_calling};

/// Objects that are asked for at a time, where nobody says.
const BATCH: u64 = 32;

fn here() -> Result<Reclaiming<'static, Linux>, NotDone> {
    PROCESS.reclaiming()
}

/// A cache that can shrink; it is not asked any more when this is dropped. Dropping waits for calls of its functions that run at the moment, so nobody drops it who
/// holds what they take; in a function of a shrinker's it does not wait.
#[derive(Debug)]
#[must_use = "the cache is not asked any more when this is dropped"]
pub struct Shrinker(ShrinkerId);

impl Shrinker {
    /// Begins to say what there is to be said of a cache. A name has 1 to 56 bytes and no `/`; several may have the same.
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

    /// Its number, for reports and for [`mark`].
    pub fn id(&self) -> ShrinkerId {
        self.0
    }

    /// [`mark`], on all nodes: that it may have something of a group, once its `count` sees it.
    pub fn mark(&self, group: Group) -> bool {
        let Some(reclaiming) = PROCESS.reclaiming_if_made() else { return false };
        (0..reclaiming.nodes()).all(|node| reclaiming.mark(self.0, group.id(), node))
    }
}

impl Drop for Shrinker {
    fn drop(&mut self) {
        // Where the system forbids the fence it goes on: what its functions use is theirs, and stays.
        let _ = unregister(self.0);
    }
}

/// What is said of a cache: [`Shrinker::named`].
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
    /// Nanoseconds; 0: as long as any.
    budget: u64,
    /// For functions of Rust's; those of C's say themselves.
    #[cfg(feature = "std")]
    object_bytes: u64,
}

impl<'a> Builder<'a> {
    /// The group that pays for what is cached: the cache is asked when that, or one above it, is to give memory. When it is deleted its heir is meant. Without
    /// one, the cache is asked when the whole process is to.
    pub const fn group(self, group: Group) -> Self {
        Builder { group: Some(group), ..self }
    }

    /// What it costs to make an object again: 2 unless said otherwise, more for what is dear, 0 for what costs nothing.
    pub const fn seeks(self, seeks: u32) -> Self {
        Builder { seeks, ..self }
    }

    /// How many objects it is asked to give up at a time: 32 unless said otherwise, 1 where they are large. Never 0.
    pub const fn batch(self, objects: u64) -> Self {
        Builder { batch: if objects == 0 { 1 } else { objects }, ..self }
    }

    /// That it serves many groups, and [marks](mark) each that gets a first object: it is called for
    /// marked groups, one at a time, with the group in the [`Context`]. A [`group`](Builder::group)
    /// is marked from the start.
    pub const fn by_group(self) -> Self {
        Builder { by_group: true, ..self }
    }

    /// That it keeps the objects of each node apart: it is called for one node at a time.
    pub const fn by_node(self) -> Self {
        Builder { by_node: true, ..self }
    }

    /// How many bytes an object has, about, where they are charged to nobody: reclaim knows then what came back.
    #[cfg(feature = "std")]
    pub const fn object_bytes(self, bytes: u64) -> Self {
        Builder { object_bytes: bytes, ..self }
    }

    /// That its functions wait for nothing that a thread which charges may hold: they may be called by a charge that is [`inline`](crate::groups::ChargeRequest::inline).
    pub const fn inline(self, inline: bool) -> Self {
        Builder { inline, ..self }
    }

    /// How long one call of its functions may take before others go on without it: 100 ms unless
    /// said otherwise.
    pub const fn budget(self, time: Duration) -> Self {
        let nanoseconds = time.as_nanos();
        let budget = if nanoseconds > u64::MAX as u128 { u64::MAX } else { nanoseconds as u64 };
        Builder { budget: if budget == 0 { 1 } else { budget }, ..self }
    }

    /// Registers it with functions in the form of C's: `count`, `scan`, and `gone` when `data` can go.
    ///
    /// # Errors
    /// See [`NotDone`]; `gone` is not called then.
    ///
    /// # Safety
    /// The functions may be called with `data`, by any thread and by several at a time, until `gone` was called. They do not unwind.
    pub unsafe fn register_raw(
        self,
        count: CountFn,
        scan: ScanFn,
        gone: Option<GoneFn>,
        data: *mut c_void,
    ) -> Result<Shrinker, NotDone> {
        // SAFETY: as the caller promises.
        let shrinker = unsafe { self.prepare(count, scan, gone, data) }?;
        start(shrinker.0, self.group, !self.by_group, self.by_node).map(|()| shrinker)
    }

    /// Names it; nothing is called yet, and on an error nothing is kept.
    unsafe fn prepare(
        self,
        count: CountFn,
        scan: ScanFn,
        gone: Option<GoneFn>,
        data: *mut c_void,
    ) -> Result<Shrinker, NotDone> {
        let Builder { name, group, seeks, batch, by_node, inline, budget, .. } = self;
        // With groups, if there were none.
        let reclaiming = here()?;
        let is_there =
            |group: Group| PROCESS.groups_if_made().is_some_and(|grouped| grouped.heir(group.id()).is_some());
        if group.is_some_and(|group| !is_there(group)) {
            return Err(NotDone::NoSuchGroup);
        }
        let by_group = group.is_some() || self.by_group;
        let spec = Spec { name, count, scan, data, gone, seeks, batch, by_node, by_group, inline };
        // SAFETY: as the caller promises.
        let shrinker = unsafe { reclaiming.prepare(&spec) }.map(Shrinker)?;
        reclaiming.set_budget(shrinker.0, budget);
        Ok(shrinker)
    }
}

/// Lets one be called that nobody knows yet, so there is no error but that somebody has guessed its id and unregistered it. If it has a `group`, that or its heir is
/// marked, on each node for one that is `by_node`; one that `belongs` to it is asked for no other.
fn start(id: ShrinkerId, group: Option<Group>, belongs: bool, by_node: bool) -> Result<(), NotDone> {
    let reclaiming = here()?;
    group.filter(|_| belongs).inspect(|group| reclaiming.belongs_to(id, group.id()));
    // One that was deleted a moment ago has the root for an heir, if nobody else.
    let groups = group.into_iter().chain(group.map(|_| Group::ROOT));
    let nodes = if by_node { reclaiming.nodes() } else { 1 };
    (0..nodes).for_each(|node| _ = groups.clone().any(|group| reclaiming.mark(id, group.id(), node)));
    reclaiming.start(id)
}

/// Registers a shrinker that says itself, by [`mark`], of which groups and nodes it has something; if it has a `group`, that is done for this, or its heir, and for
/// every node. One that has a group and knows none (`by_group`) is asked for that one alone.
///
/// # Errors
/// See [`NotDone`]; `gone` is not called then.
///
/// # Safety
/// As for [`Builder::register_raw`].
pub unsafe fn register(spec: &Spec<'_>, group: Option<Group>) -> Result<ShrinkerId, NotDone> {
    let reclaiming = here()?;
    if group.is_some_and(|group| group.info().is_err()) {
        return Err(NotDone::NoSuchGroup);
    }
    let by_group = spec.by_group || group.is_some();
    // SAFETY: as the caller promises.
    let id = unsafe { reclaiming.prepare(&Spec { by_group, ..*spec }) }?;
    start(id, group, !spec.by_group, spec.by_node).map(|()| id)
}

/// Says that a shrinker that knows groups may have something of one of them, or its heir, on a node: to be called when the first object is there, once `count` sees
/// it. Answers whether there is such a group.
pub fn mark(id: ShrinkerId, group: Group, node: u32) -> bool {
    PROCESS.reclaiming_if_made().is_some_and(|reclaiming| reclaiming.mark(id, group.id(), node))
}

/// Ends a shrinker, and waits for calls of it that run; inside a callback it does not wait.
///
/// # Errors
/// [`NotDone::NoSuchShrinker`], also for neap's own, which stay; [`NotDone::Fence`], and it goes on.
pub fn unregister(id: ShrinkerId) -> Result<Unregistered, NotDone> {
    PROCESS.reclaiming_if_made().ok_or(NotDone::NoSuchShrinker)?.unregister(id)
}

/// Waits for all calls of shrinkers' functions that run at the moment.
///
/// # Errors
/// [`NotDone::InCallback`]; [`NotDone::Fence`].
pub fn synchronize() -> Result<(), NotDone> {
    PROCESS.reclaiming_if_made().map_or(Ok(()), |reclaiming| reclaiming.synchronize())
}

/// Asks a group, and all below it, for so many bytes, for so long at most. Shrinkers are called in this thread, which holds nothing that they take. Answers what
/// came back: nothing, inside a shrinker's function.
pub fn reclaim(group: Group, bytes: u64, time: Duration) -> Got {
    let Some(reclaiming) = here().ok().filter(|_| !is_calling()) else { return Got::default() };
    let now = PROCESS.groups_if_made().map_or(0, |grouped| grouped.platform().now());
    let deadline = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    reclaiming.ask(group.id(), bytes, now.saturating_add(deadline))
}

/// Calls `each` with who would pay, and how much, if a group were asked for so many bytes: groups below it that say they have something, in
/// proportion to what is charged to each beyond its protection. Nothing is freed; shrinkers are asked in this thread what they have.
pub fn dry_run(group: Group, bytes: u64, each: impl FnMut(Payment)) {
    if let Some(reclaiming) = PROCESS.reclaiming_if_made().filter(|_| !is_calling()) {
        reclaiming.dry_run(group.id(), bytes, each);
    }
}

/// Calls `each` with what is known of every shrinker. Takes no lock, and keeps nobody from unregistering.
pub fn each_shrinker(each: impl FnMut(&Report)) {
    if let Some(reclaiming) = PROCESS.reclaiming_if_made() {
        reclaiming.each(each);
    }
}

/// Calls `each` with shrinkers that were too slow, panicked or lied, as far as that is remembered: 64 of them.
pub fn each_culprit(each: impl FnMut(Culprit)) {
    if let Some(reclaiming) = PROCESS.reclaiming_if_made() {
        reclaiming.each_culprit(each);
    }
}
