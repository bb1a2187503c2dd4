//! Per-CPU data of this process: values, counters, references and histograms with one part for each CPU.
//!
//! Sits between a program and the process's manager ([`PROCESS`]), whose per-CPU data is made when it is first
//! asked for. Nothing has to be set up: pages come and go by the manager's thread, or from within these calls; a forked child has
//! copies of everything. What is freed goes back to the system within a second, but for a reserve of some pages.
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
//! // What belongs together shares pages, which are free when its owner is gone.
//! let tenant = open_owner()?;
//! let (reads, writes) = (PerCpuCounter::of(tenant, 64, Wait::Long)?, PerCpuCounter::of(tenant, 64, Wait::Long)?);
//! reads.add(2);
//! assert_eq!((reads.exact(), writes.exact()), (2, 0));
//! drop((reads, writes));
//! // SAFETY: nothing of the tenant's is in use.
//! unsafe { close_owner(tenant)? };
//! # Ok::<(), neap::percpu::Refused>(())
//! ```
//!
//! Context: any thread, and in it no signal handler, but for what says "signal-safe". [`Wait::Never`] is for threads that must not
//! be delayed by page faults or system calls: what is there already will do, or nothing.
//!
//! Source: the per-CPU allocator, `percpu_counter` and `percpu_ref` of Linux, by idea.

pub use crate::per_cpu_data::Source;
use crate::process::PROCESS;
use core::ops::Deref;
use neap_base::platform::Errno;
use neap_base::{Linux, Platform};
use neap_percpu::Host;
pub use neap_percpu::{GRANULE, Handle, Invalid, LARGEST, Owner, Refused, Statistics, Wait};

/// Where the process's per-CPU data is.
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
    /// A value for each CPU, whether it exists or not, with nobody for an owner; `make` is told which. At most 32 KiB with its lock.
    ///
    /// # Errors
    /// As for [`allocate`].
    pub fn new(make: impl FnMut(usize) -> T) -> Result<Self, Refused> {
        PerCpu::of(Owner::NOBODY, Wait::Long, make)
    }

    /// The same with an owner, by a caller that can wait so long.
    ///
    /// # Errors
    /// As for [`allocate`].
    pub fn of(owner: Owner, wait: Wait, make: impl FnMut(usize) -> T) -> Result<Self, Refused> {
        neap_percpu::PerCpu::new(PROCESS.per_cpu(wait)?, owner, wait, make).map(PerCpu)
    }
}

/// A counter that is added to on every CPU: by one restartable sequence, without a lock and without a locked instruction.
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
    /// A counter at 0, with nobody for an owner. `batch`: what a CPU's part may be before it counts in the approximate value, from 1
    /// to 2^61, rounded down to a power of two.
    ///
    /// # Errors
    /// As for [`allocate`].
    pub fn new(batch: i64) -> Result<Self, Refused> {
        PerCpuCounter::of(Owner::NOBODY, batch, Wait::Long)
    }

    /// The same with an owner, by a caller that can wait so long.
    ///
    /// # Errors
    /// As for [`allocate`].
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
/// PerCpuRef::kill_all([&users].into_iter(), |_| unreachable!("somebody has a reference")).unwrap();
/// assert!(!users.try_get());
/// assert!(users.put(), "it was the last");
/// # Ok::<(), neap::percpu::Refused>(())
/// ```
#[derive(Debug)]
pub struct PerCpuRef(neap_percpu::PerCpuRef<Here>);

impl PerCpuRef {
    /// A count of one, the reference that killing puts, with nobody for an owner.
    ///
    /// # Errors
    /// As for [`allocate`].
    pub fn new() -> Result<Self, Refused> {
        PerCpuRef::of(Owner::NOBODY, Wait::Long)
    }

    /// The same with an owner, by a caller that can wait so long.
    ///
    /// # Errors
    /// As for [`allocate`].
    pub fn of(owner: Owner, wait: Wait) -> Result<Self, Refused> {
        neap_percpu::PerCpuRef::new(PROCESS.per_cpu(wait)?, owner, wait).map(PerCpuRef)
    }

    /// Kills references with one fence, which interrupts the CPUs that run the process (isolated ones it leaves alone), and puts
    /// the reference that each was made with; `last` is told the index of each that has no other. Those killed before, or about to be by another
    /// thread, are left out. Answers how many were killed.
    ///
    /// # Errors
    /// That of the fence, where the system forbids it: all live on.
    pub fn kill_all<'r>(
        references: impl Iterator<Item = &'r PerCpuRef> + Clone,
        last: impl FnMut(usize),
    ) -> Result<usize, Errno> {
        let Some(source) = PROCESS.per_cpu_if_made() else { return Ok(0) };
        neap_percpu::PerCpuRef::kill_all(&source, references.map(|reference| &reference.0), last)
    }

    /// The first half of [`PerCpuRef::kill_all`], for those whose end is also that of the memory they are in; the other half is
    /// `put_first` for each, by the same thread.
    ///
    /// # Errors
    /// As there.
    pub fn close_all<'r>(references: impl Iterator<Item = &'r PerCpuRef> + Clone) -> Result<usize, Errno> {
        let Some(source) = PROCESS.per_cpu_if_made() else { return Ok(0) };
        neap_percpu::PerCpuRef::close_all(&source, references.map(|reference| &reference.0))
    }
}

/// How often which values occurred, counted on every CPU, with 8 buckets to each doubling: 4 KiB for each CPU.
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
    /// An empty histogram, with nobody for an owner.
    ///
    /// # Errors
    /// As for [`allocate`].
    pub fn new() -> Result<Self, Refused> {
        PerCpuHistogram::of(Owner::NOBODY, Wait::Long)
    }

    /// The same with an owner, by a caller that can wait so long.
    ///
    /// # Errors
    /// As for [`allocate`].
    pub fn of(owner: Owner, wait: Wait) -> Result<Self, Refused> {
        neap_percpu::PerCpuHistogram::new(PROCESS.per_cpu(wait)?, owner, wait).map(PerCpuHistogram)
    }
}

/// What the value does is what the one of the library's does.
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

/// A new owner, whose data shares no cache line, and as far as it can no page, with that of others.
///
/// # Errors
/// [`Refused::Full`] with four million of them; [`Refused::Memory`] where the system refuses tables for more.
pub fn open_owner() -> Result<Owner, Refused> {
    PROCESS.per_cpu(Wait::Long)?.open_owner()
}

/// Frees all that an owner has, and ends it; answers the bytes of all copies.
///
/// # Errors
/// [`Refused::UnknownOwner`] if it was closed before; for [`Owner::NOBODY`], which has no end, [`Refused::BadRequest`].
///
/// # Safety
/// Nobody uses what the owner had any more, or allocates for it meanwhile; typed values of the owner's are forgotten, not dropped.
pub unsafe fn close_owner(owner: Owner) -> Result<usize, Refused> {
    if owner == Owner::NOBODY {
        return Err(Refused::BadRequest);
    }
    let source = PROCESS.per_cpu_if_made().ok_or(Refused::UnknownOwner)?;
    // SAFETY: as the caller promises.
    unsafe { source.close_owner(owner) }
}

/// Zeroes of `size` bytes, from 1 to [`LARGEST`], for each CPU; every copy begins at a multiple of `align`, a power of two up to a page,
/// and shares no cache line with those of other CPUs or owners.
///
/// # Errors
/// See [`Refused`]; nothing has changed then.
pub fn allocate(owner: Owner, size: usize, align: usize, wait: Wait) -> Result<Handle, Refused> {
    PROCESS.per_cpu(wait)?.allocate(owner, size, align, wait)
}

/// Frees an allocation; answers the bytes of one copy.
///
/// # Errors
/// See [`Invalid`]; nothing has changed then.
///
/// # Safety
/// Nobody uses the allocation any more.
pub unsafe fn free(handle: Handle) -> Result<usize, Invalid> {
    let source = PROCESS.per_cpu_if_made().ok_or(Invalid::Foreign)?;
    // SAFETY: as the caller promises.
    unsafe { source.free(handle) }
}

/// A CPU's copy of an allocation, also of a CPU that does not exist; `None` for a CPU from [`cpus`] on, or a handle that is none. A handle
/// whose allocation was freed leads somewhere in per-CPU data. Signal-safe.
pub fn copy(handle: Handle, cpu: usize) -> Option<*mut u8> {
    PROCESS.per_cpu_if_made()?.data().copy(handle, cpu)
}

/// The CPU that this thread is on, below [`cpus`]: a hint, since it may be on another one when this returns. Signal-safe.
pub fn cpu() -> usize {
    PROCESS.per_cpu_if_made().map_or(0, |source| source.platform().cpu())
}

/// How many copies everything has: one for each CPU that this machine may ever have; 0 before anything was allocated. Signal-safe.
pub fn cpus() -> usize {
    PROCESS.per_cpu_if_made().map_or(0, |source| source.data().cpus())
}

/// The numbers of this moment; `None` before anything was allocated. May wait for a pass of the worker.
pub fn statistics() -> Option<Statistics> {
    Some(PROCESS.per_cpu_if_made()?.statistics())
}
