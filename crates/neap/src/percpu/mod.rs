//! Per-CPU data of this process: values, counters, references and histograms with one part for each
//! CPU.
//!
//! The process's manager ([`PROCESS`]) makes the data at first use; nothing has to be set up.
//! neap's thread populates and releases pages. Without that thread, the calls of this module do. A
//! forked child has copies of everything. Freed memory is released within a second, except for a
//! reserve of some pages.
//!
//! ```
//! use neap::percpu::{PerCpuCounter, Owner, Wait, close_owner, open_owner};
//!
//! let requests = PerCpuCounter::new(64)?;
//! std::thread::scope(|scope| {
//!     for _ in 0..4 {
//!         scope.spawn(|| (0..1000).for_each(|_| requests.add(1)));
//!     }
//! });
//! assert_eq!(requests.exact(), 4000);
//!
//! // Data of one owner shares pages, which are free when the owner is closed.
//! let tenant = open_owner()?;
//! let reads = PerCpuCounter::of(tenant, 64, Wait::Long)?;
//! let writes = PerCpuCounter::of(tenant, 64, Wait::Long)?;
//! reads.add(2);
//! assert_eq!((reads.exact(), writes.exact()), (2, 0));
//! drop((reads, writes));
//! // SAFETY: nothing of the tenant's is in use.
//! unsafe { close_owner(tenant)? };
//! # Ok::<(), neap::percpu::Refused>(())
//! ```
//!
//! Context: any thread, but no signal handler unless a function says "signal-safe". [`Wait::Never`]
//! is for threads that must not be delayed by page faults or system calls: it succeeds from
//! populated pages only.
//!
//! Source: the per-CPU allocator, `percpu_counter` and `percpu_ref` of Linux, by idea.

pub use crate::percpu::per_cpu_data::Source;
use crate::process::PROCESS;
use core::ops::Deref;
use neap_base::platform::Errno;
use neap_base::{Linux, Platform};
use neap_percpu::Host;
pub use neap_percpu::{GRANULE, Handle, Invalid, LARGEST, Owner, Refused, Statistics, Wait};

pub(crate) mod per_cpu_data;

/// The process's per-CPU data.
type Here = Source<'static, Linux>;

/// A value for each CPU, under a lock that is only tried.
///
/// ```
/// use neap::percpu::PerCpu;
///
/// let lists = PerCpu::new(|_cpu| Vec::new())?;
/// lists.here().push(1);
/// lists.here().push(2);
/// assert_eq!(lists.fold(0, |sum, list| sum + list.len()), 2);
/// # Ok::<(), neap::percpu::Refused>(())
/// ```
#[derive(Debug)]
pub struct PerCpu<T>(neap_percpu::PerCpu<T, Here>);

impl<T: Send> PerCpu<T> {
    /// Makes a value for each CPU that may ever exist, without an owner. `make` gets the CPU's
    /// number. A value with its lock may have 32 KiB at most.
    ///
    /// # Errors
    /// Those of [`allocate`].
    pub fn new(make: impl FnMut(usize) -> T) -> Result<Self, Refused> {
        PerCpu::of(Owner::NONE, Wait::Long, make)
    }

    /// Makes a value for each CPU that belongs to `owner`. `wait` says how long the caller can
    /// wait.
    ///
    /// # Errors
    /// Those of [`allocate`].
    pub fn of(owner: Owner, wait: Wait, make: impl FnMut(usize) -> T) -> Result<Self, Refused> {
        neap_percpu::PerCpu::new(PROCESS.per_cpu(wait)?, owner, wait, make).map(PerCpu)
    }
}

/// A counter with a part for each CPU. An addition is one restartable sequence, without a lock or a
/// locked instruction.
///
/// ```
/// let bytes = neap::percpu::PerCpuCounter::new(1 << 16)?;
/// bytes.add(4096);
/// bytes.add(-96);
/// assert_eq!((bytes.exact(), bytes.approximate()), (4000, 0));
/// # Ok::<(), neap::percpu::Refused>(())
/// ```
#[derive(Debug)]
pub struct PerCpuCounter(neap_percpu::PerCpuCounter<Here>);

impl PerCpuCounter {
    /// Makes a counter at 0, without an owner. A CPU's part counts in the approximate value once it
    /// reaches `batch`. `batch` is 1 to 2^61, and is rounded down to a power of two.
    ///
    /// # Errors
    /// Those of [`allocate`].
    pub fn new(batch: i64) -> Result<Self, Refused> {
        PerCpuCounter::of(Owner::NONE, batch, Wait::Long)
    }

    /// Makes a counter at 0 that belongs to `owner`. `wait` says how long the caller can wait.
    ///
    /// # Errors
    /// Those of [`allocate`].
    pub fn of(owner: Owner, batch: i64, wait: Wait) -> Result<Self, Refused> {
        neap_percpu::PerCpuCounter::new(PROCESS.per_cpu(wait)?, owner, batch, wait).map(PerCpuCounter)
    }
}

/// A reference count that is per-CPU until it is killed, and exact from then on.
///
/// ```
/// use neap::percpu::PerCpuRef;
///
/// let users = PerCpuRef::new()?;
/// assert!(users.try_get());
/// // One fence for all that are killed together.
/// PerCpuRef::kill_all([&users].into_iter(), |_| unreachable!("a reference is left")).unwrap();
/// assert!(!users.try_get());
/// assert!(users.put(), "it was the last");
/// # Ok::<(), neap::percpu::Refused>(())
/// ```
#[derive(Debug)]
pub struct PerCpuRef(neap_percpu::PerCpuRef<Here>);

impl PerCpuRef {
    /// Makes a count of one, without an owner. Killing drops that reference.
    ///
    /// # Errors
    /// Those of [`allocate`].
    pub fn new() -> Result<Self, Refused> {
        PerCpuRef::of(Owner::NONE, Wait::Long)
    }

    /// Makes a count of one that belongs to `owner`. `wait` says how long the caller can wait.
    ///
    /// # Errors
    /// Those of [`allocate`].
    pub fn of(owner: Owner, wait: Wait) -> Result<Self, Refused> {
        neap_percpu::PerCpuRef::new(PROCESS.per_cpu(wait)?, owner, wait).map(PerCpuRef)
    }

    /// Kills references with one fence, and drops the reference that each was made with. Calls
    /// `last` with the index of each that has no other reference. Skips those that were killed
    /// before, or that another thread is killing.
    ///
    /// The fence interrupts the CPUs that run the process, but for isolated ones. Returns how many
    /// were killed.
    ///
    /// # Errors
    /// The fence's error, if the system forbids the fence. No reference was killed then.
    pub fn kill_all<'r>(
        references: impl Iterator<Item = &'r PerCpuRef> + Clone,
        last: impl FnMut(usize),
    ) -> Result<usize, Errno> {
        let Some(source) = PROCESS.per_cpu_if_made() else { return Ok(0) };
        neap_percpu::PerCpuRef::kill_all(&source, references.map(|reference| &reference.0), last)
    }

    /// Does the first half of [`PerCpuRef::kill_all`], for references whose memory ends with them.
    /// This thread must then call `put_first` for each, which is the second half.
    ///
    /// # Errors
    /// Those of [`PerCpuRef::kill_all`].
    pub fn close_all<'r>(references: impl Iterator<Item = &'r PerCpuRef> + Clone) -> Result<usize, Errno> {
        let Some(source) = PROCESS.per_cpu_if_made() else { return Ok(0) };
        neap_percpu::PerCpuRef::close_all(&source, references.map(|reference| &reference.0))
    }
}

/// A histogram counted on every CPU, with 8 buckets for each doubling: 4 KiB for each CPU.
///
/// ```
/// let latencies = neap::percpu::PerCpuHistogram::new()?;
/// (0..1000).for_each(|value| latencies.record(value));
/// let median = latencies.quantile(500_000).unwrap();
/// assert!((437..=500).contains(&median));
/// # Ok::<(), neap::percpu::Refused>(())
/// ```
#[derive(Debug)]
pub struct PerCpuHistogram(neap_percpu::PerCpuHistogram<Here>);

impl PerCpuHistogram {
    /// Makes an empty histogram, without an owner.
    ///
    /// # Errors
    /// Those of [`allocate`].
    pub fn new() -> Result<Self, Refused> {
        PerCpuHistogram::of(Owner::NONE, Wait::Long)
    }

    /// Makes an empty histogram that belongs to `owner`. `wait` says how long the caller can wait.
    ///
    /// # Errors
    /// Those of [`allocate`].
    pub fn of(owner: Owner, wait: Wait) -> Result<Self, Refused> {
        neap_percpu::PerCpuHistogram::new(PROCESS.per_cpu(wait)?, owner, wait).map(PerCpuHistogram)
    }
}

/// Gives the types of this module the methods of the library's types.
macro_rules! stands_for {
    ($($name:ident $(<$value:ident>)?;)*) => { $(
        impl $(<$value>)? Deref for $name $(<$value>)? {
            type Target = neap_percpu::$name<$($value,)? Here>;

            #[inline(always)]
            fn deref(&self) -> &Self::Target {
                &self.0
            }
        }
    )* };
}

stands_for! {
    PerCpu<T>;
    PerCpuCounter;
    PerCpuRef;
    PerCpuHistogram;
}

/// Makes an owner. Its data shares no cache line with the data of other owners, and usually no
/// page.
///
/// # Errors
/// [`Refused::Full`] if there are four million owners; [`Refused::Memory`] if the system refuses
/// memory for tables.
pub fn open_owner() -> Result<Owner, Refused> {
    PROCESS.per_cpu(Wait::Long)?.open_owner()
}

/// Frees all data of an owner, and ends it. Returns the bytes of all copies.
///
/// # Errors
/// [`Refused::UnknownOwner`] if it was closed before; [`Refused::BadRequest`] for
/// [`Owner::NONE`], which cannot be closed.
///
/// # Safety
/// * No thread uses the owner's data any more, or allocates for it meanwhile.
/// * Typed values of the owner are forgotten, not dropped.
pub unsafe fn close_owner(owner: Owner) -> Result<usize, Refused> {
    if owner == Owner::NONE {
        return Err(Refused::BadRequest);
    }
    let source = PROCESS.per_cpu_if_made().ok_or(Refused::UnknownOwner)?;
    // SAFETY: no thread uses the owner's data any more, or allocates for it meanwhile (the caller's
    // promise).
    unsafe { source.close_owner(owner) }
}

/// Allocates `size` zero bytes, 1 to [`LARGEST`], for each CPU. Each copy starts at a multiple of
/// `align`, a power of two up to a page, and shares no cache line with those of other CPUs or
/// owners.
///
/// # Errors
/// See [`Refused`]. Nothing has changed then.
pub fn allocate(owner: Owner, size: usize, align: usize, wait: Wait) -> Result<Handle, Refused> {
    PROCESS.per_cpu(wait)?.allocate(owner, size, align, wait)
}

/// Frees an allocation, and returns the bytes of one copy.
///
/// # Errors
/// See [`Invalid`]. Nothing has changed then.
///
/// # Safety
/// No thread uses the allocation any more.
pub unsafe fn free(handle: Handle) -> Result<usize, Invalid> {
    let source = PROCESS.per_cpu_if_made().ok_or(Invalid::Foreign)?;
    // SAFETY: no thread uses the allocation any more (the caller's promise).
    unsafe { source.free(handle) }
}

/// Returns a CPU's copy of an allocation, even if the CPU does not exist. `None` if `cpu` is
/// [`cpus`] or more, or the handle is invalid. For a freed allocation, returns some address in
/// per-CPU data. Signal-safe.
pub fn copy(handle: Handle, cpu: usize) -> Option<*mut u8> {
    PROCESS.per_cpu_if_made()?.data().copy(handle, cpu)
}

/// Returns the number of this thread's CPU, below [`cpus`]. The number is a hint, since the thread
/// may have moved when this returns. Signal-safe.
pub fn cpu() -> usize {
    PROCESS.per_cpu_if_made().map_or(0, |source| source.platform().cpu())
}

/// Returns the number of copies of every allocation: one for each CPU that this machine may ever
/// have. 0 before the first allocation. Signal-safe.
pub fn cpus() -> usize {
    PROCESS.per_cpu_if_made().map_or(0, |source| source.data().cpus())
}

/// Returns the current statistics; `None` before the first allocation. May wait until the worker
/// ends a pass.
pub fn statistics() -> Option<Statistics> {
    Some(PROCESS.per_cpu_if_made()?.statistics())
}
