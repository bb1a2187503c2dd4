//! Caches as values: what a cache is asked, what it answers, and how it is registered.
//!
//! # Design
//! A [`Shrink`] is a cache's two functions. Each gets a [`Context`], which says which group pays for
//! the objects that are meant: after a deletion that is the heir. Answers are enums, so an empty
//! cache, a busy one and one whose objects are all in use cannot be mistaken for one another.
//!
//! # Concurrency
//! Several threads may call a cache at once. A context belongs to one call.

use super::Asked;
use crate::groups::Group;
use core::cell::Cell;
use core::time::Duration;

/// A pass that needs so many bytes takes all that there are.
const ALL: u64 = 1 << 62;

/// A call of a cache's function: whose objects are meant, and how many bytes are needed by when.
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

    /// Whether the objects of one group are meant. Otherwise the cache has no groups, and those of
    /// all are.
    pub fn is_by_group(&self) -> bool {
        self.by_group
    }

    /// The group whose objects are meant. The root for a cache without groups.
    ///
    /// A cache that was registered for a group that is deleted by now is asked for its heir here.
    pub fn group(&self) -> Group {
        Group::from_id(self.asked.group())
    }

    /// The node whose objects are meant. `None` for a cache that knows no nodes: those of all nodes.
    pub fn node(&self) -> Option<usize> {
        self.by_node.then_some(self.asked.node as usize)
    }

    /// Bytes that are still needed. `None`: all that can be had.
    pub fn need(&self) -> Option<u64> {
        Some(self.asked.need).filter(|need| *need < ALL)
    }

    /// How hard memory is to get: from 12 down to 0, where all is asked for.
    pub fn priority(&self) -> u32 {
        self.asked.priority
    }

    /// The time that is left until the caller gives up, 0 from then on. `None`: it has no end.
    ///
    /// One call may take the cache's [budget](super::Builder::budget), or less where less is left.
    pub fn time_left(&self) -> Option<Duration> {
        let deadline = Some(self.asked.deadline).filter(|deadline| *deadline != u64::MAX)?;
        Some(Duration::from_nanos(deadline.saturating_sub(neap_os::clock::precise())))
    }

    /// Adds to the bytes that this call has freed, where they are charged to no group. Replaces
    /// what `object_bytes` of the builder would say.
    pub fn add_freed_bytes(&self, bytes: u64) {
        self.freed_bytes.set(self.freed_bytes.get().saturating_add(bytes));
    }
}

/// How many objects a cache has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// About so many.
    Objects(u64),
    /// It cannot say now, because another thread has its lock.
    Busy,
    /// None, until the cache [marks](super::mark) the group. A cache that never marks, because it
    /// was registered without [`by_group`](super::Builder::by_group), is asked all the same.
    Empty,
}

/// What a cache did when it was asked to free objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scan {
    /// It looked at the objects, and freed so many. 0: all that it looked at are in use.
    Freed(u64),
    /// It could not look, because another thread has its lock. It is asked again after a rest.
    Busy,
    /// It has nothing, until the cache [marks](super::mark) the group, as with [`Count::Empty`].
    /// It is asked once more after its mark was cleared, so no object is missed that comes meanwhile.
    Empty,
    /// It looked at the objects, frees none of them, and is not to be called again in this visit.
    Stop,
}

/// A cache that can shrink.
///
/// Threads of neap call both functions, several at a time. The functions only try the locks that
/// other threads hold while these charge or allocate.
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
/// let shrinker = Shrinker::named("buffers").group(tenant).batch(4).register_shrink(buffers.clone())?;
/// for _ in 0..64 {
///     let charge = tenant.charge(64 << 10)?;
///     buffers.0.lock().unwrap().push((vec![0; 64 << 10], charge));
/// }
/// assert!(buffers.0.lock().unwrap().len() <= 16);
/// drop(shrinker);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A pair of closures is one as well: `(|cx: &Context| …, |cx: &Context, objects| …)`.
pub trait Shrink: Send + Sync + 'static {
    /// Says about how many objects there are, at once.
    fn count(&self, cx: &Context) -> Count;

    /// Looks at so many objects and frees those that can go.
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
    //! Caches of Rust's as shrinkers: in a box, which goes when nobody calls them any more, and with
    //! panics caught.

    extern crate std;

    use super::super::{Asked, Builder, DONE, EMPTY, NotDone, STOP, Shrinker, ShrinkerId};
    use super::{Context, Count, Scan, Shrink};
    use crate::process::PROCESS;
    use core::ffi::c_void;
    use core::panic::AssertUnwindSafe;
    use core::sync::atomic::{AtomicU64, Ordering};
    use std::boxed::Box;
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

    /// Two functions that know numbers alone: 0 may be that they were busy.
    struct Plain<C, E>(C, E);

    /// What is called: a [`Shrink`], or a [`Plain`].
    trait Answer: Send + Sync + 'static {
        fn count(&self, cx: &Context) -> u64;

        /// Answers as a [`ScanFn`](super::super::ScanFn) does, and sets `unsure`.
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
            // Nothing, for now: it does not say when there is something again.
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

    /// What callbacks get.
    struct Functions<A> {
        answer: OnceLock<A>,
        object_bytes: u64,
        by_group: bool,
        by_node: bool,
        /// [`ShrinkerId`]; 0 until it is known.
        id: AtomicU64,
    }

    /// A cache that has its number, and is not called before [`Prepared::start`]. Marks are kept.
    #[derive(Debug)]
    #[must_use = "nothing is called before it is started"]
    pub struct Prepared<S: Shrink>(Half<Typed<S>>);

    impl<S: Shrink> Prepared<S> {
        /// Its number, for [`LruList::for_shrinker`](crate::lru::LruList::for_shrinker).
        pub fn id(&self) -> ShrinkerId {
            self.0.shrinker.id()
        }

        /// Lets the cache be called.
        ///
        /// # Errors
        /// See [`NotDone`].
        pub fn start(self, shrink: S) -> Result<Shrinker, NotDone> {
            self.0.start(Typed(shrink))
        }
    }

    /// A shrinker whose functions are not there yet.
    struct Half<A> {
        builder: (Option<crate::groups::Group>, bool, bool),
        shrinker: Shrinker,
        functions: *const Functions<A>,
    }

    // SAFETY: what the pointer leads to is Sync, and lives until the shrinker is unregistered.
    unsafe impl<A: Answer> Send for Half<A> {}
    // SAFETY: the functions are Sync.
    unsafe impl<A: Answer> Sync for Half<A> {}

    impl<A> core::fmt::Debug for Half<A> {
        fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            self.shrinker.fmt(f)
        }
    }

    impl<A: Answer> Half<A> {
        fn new(builder: Builder<'_>) -> Result<Half<A>, NotDone> {
            let Builder { group, object_bytes, by_group, by_node, .. } = builder;
            let answer = OnceLock::new();
            let has_groups = by_group || group.is_some();
            let functions = Functions { answer, object_bytes, by_group: has_groups, by_node, id: AtomicU64::new(0) };
            let data = Box::into_raw(Box::new(functions));
            // SAFETY: they are Sync, live until `gone`, and nothing of theirs unwinds.
            match unsafe { builder.prepare(call_count::<A>, call_scan::<A>, Some(gone::<A>), data.cast()) } {
                Ok(shrinker) => {
                    // SAFETY: it lives until the shrinker, which is here, is unregistered.
                    unsafe { &*data }.id.store(shrinker.id().to_bits(), Ordering::Relaxed);
                    Ok(Half { builder: (group, by_group, by_node), shrinker, functions: data })
                }
                Err(error) => {
                    // SAFETY: it was not registered, so no other thread has seen it.
                    drop(unsafe { Box::from_raw(data) });
                    Err(error)
                }
            }
        }

        fn start(self, answer: A) -> Result<Shrinker, NotDone> {
            let (group, by_group, by_node) = self.builder;
            // SAFETY: it lives until the shrinker, which is here, is unregistered.
            _ = unsafe { &*self.functions }.answer.set(answer);
            super::super::start(self.shrinker.id(), group, !by_group, by_node).map(|()| self.shrinker)
        }
    }

    impl Builder<'_> {
        /// Registers it: `count` says how many objects there are, at once and about; `evict` gives up so many of them and answers how many it has.
        /// Both may be called by several threads at a time. A panic of theirs goes no further.
        ///
        /// # Errors
        /// See [`NotDone`].
        pub fn register<C, E>(self, count: C, evict: E) -> Result<Shrinker, NotDone>
        where
            C: Fn() -> u64 + Send + Sync + 'static,
            E: Fn(u64) -> u64 + Send + Sync + 'static,
        {
            Half::new(self)?.start(Plain(count, evict))
        }

        /// Registers a [`Shrink`], or two closures that get a [`Context`]. A panic of theirs is
        /// caught, and counts against the cache.
        ///
        /// # Errors
        /// See [`NotDone`].
        pub fn register_shrink<S: Shrink>(self, shrink: S) -> Result<Shrinker, NotDone> {
            Half::new(self)?.start(Typed(shrink))
        }

        /// Gives the cache its number before it is there: for a cache that needs the number itself.
        /// [`LruList::for_shrinker`](crate::lru::LruList::for_shrinker) shows it.
        ///
        /// # Errors
        /// See [`NotDone`].
        pub fn prepare_shrink<S: Shrink>(self) -> Result<Prepared<S>, NotDone> {
            Half::new(self).map(Prepared)
        }
    }

    /// What a function answers; [`STOP`] where it panics, which makes it a culprit.
    fn guarded(id: &AtomicU64, call: impl FnOnce() -> u64) -> u64 {
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
            // What was thrown may throw when it is dropped.
            core::mem::forget(payload);
            if let Some(reclaiming) = PROCESS.reclaiming_if_made() {
                reclaiming.has_panicked(ShrinkerId::from_bits(id.load(Ordering::Relaxed)));
            }
            STOP
        })
    }

    unsafe extern "C" fn call_count<A: Answer>(data: *mut c_void, asked: *const Asked) -> u64 {
        // SAFETY: `data` was made by `Half::new`, and is not gone; what is asked is there for the
        // time of the call.
        let (functions, asked) = unsafe { (&*data.cast::<Functions<A>>(), &*asked) };
        let Some(answer) = functions.answer.get() else { return 0 };
        guarded(&functions.id, || answer.count(&Context::new(asked, functions.by_group, functions.by_node)))
    }

    unsafe extern "C" fn call_scan<A: Answer>(data: *mut c_void, asked: *mut Asked) -> u64 {
        // SAFETY: `data` was made by `Half::new`, and is not gone; what is asked is the caller's for
        // the time of the call.
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
        // SAFETY: made by `Half::new`, and no thread calls it any more.
        drop(unsafe { Box::from_raw(data.cast::<Functions<A>>()) });
    }
}
