//! Shrinkers as Rust values: their two functions, the request and answers, and their registration.
//!
//! # Design
//! A [`Shrink`] is a cache's two functions. Each gets a [`Context`], which names the group that
//! pays for the requested objects. After the deletion of that group, the context names its heir.
//! Answers are enums, which distinguish an empty cache, a busy cache, and a cache whose objects are
//! all in use.
//!
//! # Concurrency
//! Several threads may call a cache's functions at once. A context belongs to one call.

use super::Asked;
use crate::groups::Group;
use core::cell::Cell;
use core::time::Duration;

/// A need of at least this many bytes means as many bytes as possible.
const ALL: u64 = 1 << 62;

/// Request to a cache's function: the group and node of the objects, needed bytes, and deadline.
#[derive(Debug)]
pub struct Context {
    asked: Asked,
    by_group: bool,
    by_node: bool,
    freed_bytes: Cell<u64>,
}

impl Context {
    #[cfg(feature = "std")]
    fn new(asked: &Asked, by_group: bool, by_node: bool) -> Context {
        Context { asked: *asked, by_group, by_node, freed_bytes: Cell::new(0) }
    }

    /// Returns whether reclaim asks for the objects of one group. If not, the cache was registered
    /// without groups, and reclaim asks for all its objects.
    pub fn is_by_group(&self) -> bool {
        self.by_group
    }

    /// Returns the group whose objects reclaim asks for. For a cache that was registered without
    /// groups, this is the root.
    ///
    /// After a group was deleted, later passes name the group's [heir](Group::heir) instead.
    pub fn group(&self) -> Group {
        Group::from_id(self.asked.group())
    }

    /// Returns the NUMA node whose objects reclaim asks for. `None` for a cache that was registered
    /// without nodes: reclaim asks for the objects of all nodes.
    pub fn node(&self) -> Option<usize> {
        self.by_node.then_some(self.asked.node as usize)
    }

    /// Returns the number of bytes still needed. `None` means as many as the cache can free.
    pub fn need(&self) -> Option<u64> {
        Some(self.asked.need).filter(|need| *need < ALL)
    }

    /// Returns the priority of the pass, from 12 down to 0. At 0, the pass asks for all objects.
    pub fn priority(&self) -> u32 {
        self.asked.priority
    }

    /// Returns the time until the deadline of the pass; 0 after the deadline. `None` if there is no
    /// deadline.
    ///
    /// A call may take as long as the cache's [budget](super::Builder::budget), but no longer than
    /// the time left.
    pub fn time_left(&self) -> Option<Duration> {
        let deadline = Some(self.asked.deadline).filter(|deadline| *deadline != u64::MAX)?;
        Some(Duration::from_nanos(deadline.saturating_sub(neap_os::clock::precise())))
    }

    /// Adds freed bytes that are charged to no group to the answer of this call.
    ///
    /// A sum above 0 replaces the estimate that the builder's `object_bytes` gives.
    pub fn add_freed_bytes(&self, bytes: u64) {
        self.freed_bytes.set(self.freed_bytes.get().saturating_add(bytes));
    }
}

/// Answer of [`Shrink::count`]: the number of freeable objects of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// The approximate number of objects.
    Objects(u64),
    /// The number is unknown for now, because another thread holds the cache's lock.
    Busy,
    /// No objects, until the cache [marks](super::mark) the group. neap does not call the cache for
    /// the group before that.
    ///
    /// A cache that was registered with neither a [`group`](super::Builder::group) nor
    /// [`by_group`](super::Builder::by_group) has no marks. neap calls such a cache nevertheless.
    Empty,
}

/// Answer of [`Shrink::scan`]: the result of a request to free objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scan {
    /// The cache scanned the objects, and freed this many. 0 means that all scanned objects are in
    /// use.
    Freed(u64),
    /// The cache scanned nothing, because another thread holds its lock. neap calls it again after
    /// a pause.
    Busy,
    /// The cache has no objects until it [marks](super::mark) the group, as with [`Count::Empty`].
    /// neap clears the mark and then calls the cache once more, so it does not miss an object that
    /// was added meanwhile.
    Empty,
    /// The cache scanned the objects and freed none. neap does not call it again in this visit of
    /// the pass.
    Stop,
}

/// A cache that frees objects on request.
///
/// neap's threads call both functions, and several threads may call them at once.
/// [`reclaim`](super::reclaim()) and inline charges call them in the calling thread. If other
/// threads charge or allocate while they hold a lock, the functions may only try to take that lock.
///
/// ```
/// use neap::groups::{Bound, Group};
/// use neap::reclaim::{Context, Count, Scan, Shrink, Shrinker};
/// use std::sync::{Arc, Mutex};
///
/// struct Buffers(Mutex<Vec<(Vec<u8>, neap::groups::Charge)>>);
///
/// impl Shrink for Buffers {
///     fn count(&self, _: &Context) -> Count {
///         self.0.try_lock().map_or(Count::Busy, |buffers| Count::Objects(buffers.len() as u64))
///     }
///
///     fn scan(&self, _: &Context, objects: usize) -> Scan {
///         let Ok(mut buffers) = self.0.try_lock() else { return Scan::Busy };
///         let objects = objects.min(buffers.len());
///         Scan::Freed(buffers.drain(..objects).count() as u64)
///     }
/// }
///
/// let tenant = Group::create("buffers")?;
/// tenant.set(Bound::Max, 1 << 20)?;
/// let buffers = Arc::new(Buffers(Mutex::default()));
/// let shrinker =
///     Shrinker::named("buffers").group(tenant).batch(4).register_shrink(buffers.clone())?;
/// for _ in 0..64 {
///     let charge = tenant.charge(64 << 10)?;
///     buffers.0.lock().unwrap().push((vec![0; 64 << 10], charge));
/// }
/// assert!(buffers.0.lock().unwrap().len() <= 16);
/// drop(shrinker);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A pair of closures is a `Shrink`, too: `(|cx: &Context| …, |cx: &Context, objects| …)`.
pub trait Shrink: Send + Sync + 'static {
    /// Returns the approximate number of freeable objects, without delay.
    fn count(&self, cx: &Context) -> Count;

    /// Scans `objects` objects, and frees those that are not in use.
    fn scan(&self, cx: &Context, objects: usize) -> Scan;
}

impl<C, S> Shrink for (C, S)
where
    C: Fn(&Context) -> Count + Send + Sync + 'static,
    S: Fn(&Context, usize) -> Scan + Send + Sync + 'static,
{
    fn count(&self, cx: &Context) -> Count {
        (self.0)(cx)
    }

    fn scan(&self, cx: &Context, objects: usize) -> Scan {
        (self.1)(cx, objects)
    }
}

#[cfg(feature = "std")]
pub use registered::Prepared;

#[cfg(feature = "std")]
mod registered {
    //! Registration of Rust caches as shrinkers.
    //!
    //! An [`Arc`] holds a registered cache until the last call of its functions has ended. The
    //! callbacks catch panics of these functions.

    extern crate std;

    use super::super::{Asked, Builder, DONE, EMPTY, Misbehaviour, STOP, Shrinker, ShrinkerError, ShrinkerId};
    use super::{Context, Count, Scan, Shrink};
    use crate::process::PROCESS;
    use core::ffi::c_void;
    use core::panic::AssertUnwindSafe;
    use core::sync::atomic::{AtomicU64, Ordering};
    use std::panic::catch_unwind;
    use std::sync::{Arc, OnceLock};

    impl<S: Shrink> Shrink for Arc<S> {
        fn count(&self, cx: &Context) -> Count {
            (**self).count(cx)
        }

        fn scan(&self, cx: &Context, objects: usize) -> Scan {
            (**self).scan(cx, objects)
        }
    }

    /// Two functions that answer with numbers alone. An answer of 0 from the second may mean that
    /// the cache was busy.
    struct Plain<C, E>(C, E);

    /// Functions of a registered cache: a [`Shrink`], or a [`Plain`].
    trait Answer: Send + Sync + 'static {
        fn count(&self, cx: &Context) -> u64;

        /// Scans objects, and returns the answer of a [`ScanFn`](super::super::ScanFn). Sets
        /// `unsure` to the value for [`Asked::unsure`].
        fn scan(&self, cx: &Context, objects: u64, unsure: &mut u32) -> u64;
    }

    struct Typed<S>(S);

    impl<S: Shrink> Answer for Typed<S> {
        fn count(&self, cx: &Context) -> u64 {
            match self.0.count(cx) {
                Count::Objects(objects) => objects.min(DONE - 1),
                Count::Busy => STOP,
                Count::Empty => EMPTY,
            }
        }

        fn scan(&self, cx: &Context, objects: u64, _: &mut u32) -> u64 {
            match self.0.scan(cx, usize::try_from(objects).unwrap_or(usize::MAX)) {
                Scan::Freed(objects) => objects.min(DONE - 1),
                Scan::Busy => STOP,
                Scan::Empty => EMPTY,
                Scan::Stop => DONE,
            }
        }
    }

    impl<C, E> Answer for Plain<C, E>
    where
        C: Fn() -> u64 + Send + Sync + 'static,
        E: Fn(u64) -> u64 + Send + Sync + 'static,
    {
        fn count(&self, _: &Context) -> u64 {
            // Answers of `DONE` and above count as 0 objects. As `EMPTY`, they would end all calls
            // of the cache, since it sets no marks.
            match (self.0)() {
                answer if answer >= DONE => 0,
                answer => answer,
            }
        }

        fn scan(&self, _: &Context, objects: u64, unsure: &mut u32) -> u64 {
            *unsure = 1;
            (self.1)(objects)
        }
    }

    /// Data of the callbacks.
    struct Functions<A> {
        answer: OnceLock<A>,
        object_bytes: u64,
        by_group: bool,
        by_node: bool,
        /// Bits of the [`ShrinkerId`]; 0 until the shrinker has one.
        id: AtomicU64,
    }

    /// A registered cache that has an id. neap keeps its marks, but does not call it before
    /// [`Prepared::start`].
    #[derive(Debug)]
    #[must_use = "nothing is called before it is started"]
    pub struct Prepared<S: Shrink>(Half<Typed<S>>);

    impl<S: Shrink> Prepared<S> {
        /// Returns the id, for [`LruList::for_shrinker`](crate::lru::LruList::for_shrinker).
        pub fn id(&self) -> ShrinkerId {
            self.0.shrinker.id()
        }

        /// Sets the cache's functions, and allows calls of them.
        ///
        /// # Errors
        /// See [`ShrinkerError`].
        pub fn start(self, shrink: S) -> Result<Shrinker, ShrinkerError> {
            self.0.start(Typed(shrink))
        }
    }

    /// A prepared shrinker whose functions are not set yet.
    struct Half<A> {
        builder: (Option<crate::groups::Group>, bool, bool),
        shrinker: Shrinker,
        functions: Arc<Functions<A>>,
    }

    impl<A> core::fmt::Debug for Half<A> {
        fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            self.shrinker.fmt(f)
        }
    }

    impl<A: Answer> Half<A> {
        fn new(builder: Builder<'_>) -> Result<Half<A>, ShrinkerError> {
            let Builder { group, object_bytes, by_group, by_node, .. } = builder;
            let answer = OnceLock::new();
            let has_groups = by_group || group.is_some();
            let functions = Functions { answer, object_bytes, by_group: has_groups, by_node, id: AtomicU64::new(0) };
            let functions = Arc::new(functions);
            let data = Arc::into_raw(functions.clone()).cast_mut();
            // SAFETY: `data` owns a reference to a `Functions<A>`, which is Sync, until `gone`
            // drops it. So any threads may call the functions with it until then. The callbacks
            // catch the panics of the cache's functions (`guarded`), so none unwinds.
            match unsafe { builder.prepare(call_count::<A>, call_scan::<A>, Some(gone::<A>), data.cast()) } {
                Ok(shrinker) => {
                    functions.id.store(shrinker.id().to_bits(), Ordering::Relaxed);
                    Ok(Half { builder: (group, by_group, by_node), shrinker, functions })
                }
                Err(error) => {
                    // SAFETY: made by `Arc::into_raw` above. `prepare` failed and keeps nothing, so
                    // `gone` is not called.
                    drop(unsafe { Arc::from_raw(data) });
                    Err(error)
                }
            }
        }

        fn start(self, answer: A) -> Result<Shrinker, ShrinkerError> {
            let (group, by_group, by_node) = self.builder;
            _ = self.functions.answer.set(answer);
            super::super::start(self.shrinker.id(), group, !by_group, by_node).map(|()| self.shrinker)
        }
    }

    impl Builder<'_> {
        /// Registers the cache with two closures.
        ///
        /// `count` returns the approximate number of objects, without delay. `evict` frees up to
        /// the given number of objects, and returns the number of freed ones. Several threads may
        /// call both at once. neap catches panics of both.
        ///
        /// # Errors
        /// See [`ShrinkerError`].
        pub fn register<C, E>(self, count: C, evict: E) -> Result<Shrinker, ShrinkerError>
        where
            C: Fn() -> u64 + Send + Sync + 'static,
            E: Fn(u64) -> u64 + Send + Sync + 'static,
        {
            Half::new(self)?.start(Plain(count, evict))
        }

        /// Registers a [`Shrink`], or a pair of closures that get a [`Context`]. neap catches a
        /// panic of a function, and the cache becomes a [culprit](super::super::each_culprit).
        ///
        /// # Errors
        /// See [`ShrinkerError`].
        pub fn register_shrink<S: Shrink>(self, shrink: S) -> Result<Shrinker, ShrinkerError> {
            Half::new(self)?.start(Typed(shrink))
        }

        /// Registers a cache that is made later, because it needs the shrinker's id.
        ///
        /// [`LruList::for_shrinker`](crate::lru::LruList::for_shrinker) has an example.
        ///
        /// # Errors
        /// See [`ShrinkerError`].
        pub fn prepare_shrink<S: Shrink>(self) -> Result<Prepared<S>, ShrinkerError> {
            Half::new(self).map(Prepared)
        }
    }

    /// Returns the answer of a function. If it panics, makes the shrinker with `id` a culprit and
    /// returns [`STOP`].
    fn guarded(id: &AtomicU64, call: impl FnOnce() -> u64) -> u64 {
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
            // Dropping the payload of the panic could panic.
            core::mem::forget(payload);
            if let Some(reclaiming) = PROCESS.reclaiming_if_made() {
                reclaiming.blame(ShrinkerId::from_bits(id.load(Ordering::Relaxed)), Misbehaviour::Panicked);
            }
            STOP
        })
    }

    unsafe extern "C" fn call_count<A: Answer>(data: *mut c_void, asked: *const Asked) -> u64 {
        // SAFETY: `Half::new` registered `data` as a `Functions<A>`, which `gone` frees after the
        // last call. The caller keeps `asked` valid, and does not write it, during the call.
        let (functions, asked) = unsafe { (&*data.cast::<Functions<A>>(), &*asked) };
        let Some(answer) = functions.answer.get() else { return 0 };
        guarded(&functions.id, || answer.count(&Context::new(asked, functions.by_group, functions.by_node)))
    }

    unsafe extern "C" fn call_scan<A: Answer>(data: *mut c_void, asked: *mut Asked) -> u64 {
        // SAFETY: `Half::new` registered `data` as a `Functions<A>`, which `gone` frees after the
        // last call. The caller gives this call exclusive access to `asked`.
        let (functions, asked) = unsafe { (&*data.cast::<Functions<A>>(), &mut *asked) };
        let Some(answer) = functions.answer.get() else { return STOP };
        let (context, mut unsure) = (Context::new(asked, functions.by_group, functions.by_node), 0);
        let objects = guarded(&functions.id, || answer.scan(&context, asked.to_scan, &mut unsure));
        asked.unsure = unsure;
        let said = if objects >= DONE { 0 } else { objects.saturating_mul(functions.object_bytes) };
        asked.freed_bytes = if context.freed_bytes.get() > 0 { context.freed_bytes.get() } else { said };
        objects
    }

    unsafe extern "C" fn gone<A>(data: *mut c_void) {
        // SAFETY: `Half::new` made `data` by `Arc::into_raw`. This callback runs once, after all
        // other calls with `data` have ended.
        drop(unsafe { Arc::from_raw(data.cast::<Functions<A>>()) });
    }
}
