//! Memory groups of this process: usage by tenant, with limits that can change at any moment.
//!
//! A group is a node of a tree, with a path such as `tenant/acme`. The program charges memory of
//! any origin to a group by a [`Charge`], which ends when it is dropped. A charge beyond a `max` is
//! refused, with an error that names the groups that hold the memory.
//!
//! The first use makes the groups. Any thread can call all functions at any time, but a signal
//! handler must not call them.
//!
//! ```
//! use neap::groups::{Bound, Group};
//!
//! let acme = Group::create("tenant/acme")?;
//! acme.set(Bound::Max, 64 << 20)?;
//! let page = acme.charge(1 << 20)?;
//! assert_eq!(acme.used()?, 1 << 20);
//! assert_eq!(Group::find("tenant")?.used()?, 1 << 20);
//! let refused = acme.charge(100 << 20).unwrap_err();
//! let message = "tenant/acme has 1.0 MiB of 64.0 MiB and is asked for 100.0 MiB more";
//! assert!(refused.to_string().starts_with(message), "{refused}");
//! assert!(matches!(refused, neap::groups::ChargeError::TooLarge(_)));
//!
//! // A group may be deleted before its charges end: they become its parent's.
//! acme.delete()?;
//! assert_eq!(Group::find("tenant")?.used()?, 1 << 20);
//! drop(page);
//! assert_eq!(Group::find("tenant")?.used()?, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The idea comes from the memory cgroups of Linux.

use crate::groups::memory_groups::Grouped;
pub use crate::groups::payers::{payer_at, payer_of};
use crate::process::PROCESS;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::{NonNull, with_exposed_provenance_mut};
use core::time::Duration;
use neap_base::Linux;
use neap_groups::Subscription;
pub use neap_groups::protection::Protection;
pub use neap_groups::{
    Bound, Event, EventDelta, GroupCount, GroupError, GroupId, Info, Kind, Limit, Listener, Name, NotSubscribed, Payer,
    UNLIMITED,
};
use neap_os::thread_state::{guards, set_guards};
use neap_percpu::Owner;

#[cfg(feature = "allocator-api2")]
mod allocator;
mod handle;
#[cfg(feature = "std")]
mod listen;
pub(crate) mod memory_groups;
pub(crate) mod payers;
mod request;
mod scope;
pub(crate) mod thread_groups;

#[cfg(feature = "allocator-api2")]
pub use allocator::{GroupVec, InGroup};
pub use handle::GroupHandle;
#[cfg(feature = "std")]
pub use listen::{Events, Listening};
pub use request::{ChargeAsync, ChargeError, ChargeRequest};
pub use scope::Scope;

/// Returns the process's groups. Makes them if need be.
fn here() -> Result<Grouped<'static, Linux>, GroupError> {
    PROCESS.groups()
}

/// Returns the process's groups, if they were made. They were made if the caller has a group other
/// than the root.
#[inline]
pub(crate) fn made() -> Result<Grouped<'static, Linux>, GroupError> {
    PROCESS.groups_if_made().ok_or(GroupError::NoSuchGroup)
}

/// A handle of a group of this process. It does not keep the group alive. Once the group is deleted
/// calls fail, even if another group gets the same path later. Most of them return
/// [`GroupError::NoSuchGroup`] then.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Group(GroupId);

impl Group {
    /// The root of the tree. A charge to any group is also a charge to the root.
    pub const ROOT: Group = Group(GroupId::ROOT);

    /// Makes the group at a path, and missing groups above it. A `/` separates the names in a path.
    /// A name has 1 to 56 bytes.
    ///
    /// # Errors
    /// See [`GroupError`]. This call may have made groups above the group at the path then.
    pub fn create(path: &str) -> Result<Group, GroupError> {
        let grouped = here()?;
        if path.split('/').any(str::is_empty) {
            return Err(GroupError::BadName);
        }
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut parent = GroupId::ROOT;
        for name in above.split('/').filter(|_| !above.is_empty()) {
            parent = grouped.find_or_create(parent, name)?;
        }
        grouped.create(parent, name).map(Group)
    }

    /// Returns the group at a path. An empty path leads to the root.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if there is no group at the path.
    pub fn find(path: &str) -> Result<Group, GroupError> {
        here()?.find(GroupId::ROOT, path).map(Group)
    }

    /// Returns the group at a path. Makes it if need be.
    ///
    /// # Errors
    /// Those of [`Group::create`].
    pub fn find_or_create(path: &str) -> Result<Group, GroupError> {
        match Group::find(path) {
            Err(GroupError::NoSuchGroup) => match Group::create(path) {
                Err(GroupError::Exists) => Group::find(path),
                answer => answer,
            },
            answer => answer,
        }
    }

    /// Returns the group's id, for reports.
    pub const fn id(self) -> GroupId {
        self.0
    }

    /// Returns the group with an id. The group need not exist any more.
    pub const fn from_id(id: GroupId) -> Group {
        Group(id)
    }

    /// Deletes the group, which must have no groups below it. Its charges become its parent's, and
    /// its name can be used again.
    ///
    /// # Errors
    /// [`GroupError::HasChildren`], [`GroupError::Root`] or, if the group is deleted,
    /// [`GroupError::NoSuchGroup`]. Nothing changes then.
    pub fn delete(self) -> Result<(), GroupError> {
        made_or_here(self)?.delete(self.0)
    }

    /// Returns the group that has this group's charges and list items. That is the group itself
    /// until it is deleted, and then the nearest group above that exists. Returns `None` if the
    /// group is deleted, no charge to it is left, and neap's thread has freed its id.
    pub fn heir(self) -> Option<Group> {
        made_or_here(self).ok()?.heir(self.0).map(Group)
    }

    /// Sets a bound of the group, in bytes, and returns the previous value. The bound takes effect
    /// at once. The call does not wait.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted.
    pub fn set(self, bound: Bound, bytes: u64) -> Result<u64, GroupError> {
        made_or_here(self)?.set_bound(self.0, bound, bytes)
    }

    /// Returns usage, bounds and counters of the group.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted.
    pub fn info(self) -> Result<Info, GroupError> {
        made_or_here(self)?.info(self.0)
    }

    /// Resets the group's [peak](Info::peak) to its present charge. Returns the previous peak. The
    /// groups above and below keep their peaks.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted.
    pub fn reset_peak(self) -> Result<u64, GroupError> {
        made_or_here(self)?.reset_peak(self.0)
    }

    /// Returns the bytes charged to the group alone, of one kind on one node. Stocks are included.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted.
    pub fn charged(self, kind: Kind, node: usize) -> Result<u64, GroupError> {
        made_or_here(self)?.charged(self.0, kind, node)
    }

    /// Returns the bytes that the group and those below it use. These are their charges without
    /// stocks. The number is exact while no thread charges.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted.
    pub fn used(self) -> Result<u64, GroupError> {
        made_or_here(self)?.used(self.0)
    }

    /// Returns how many bytes of the group are protected from reclaim.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted.
    pub fn protection(self) -> Result<Protection, GroupError> {
        made_or_here(self)?.protection(self.0)
    }

    /// Iterates over the groups directly below this one. The iteration ends early if one of them is
    /// deleted meanwhile.
    pub fn children(self) -> impl Iterator<Item = Group> {
        let next = move |after: Option<Group>| self.next_child(after).ok().flatten();
        core::iter::successors(next(None), move |&child| next(Some(child)))
    }

    /// Iterates over the group and all groups below it. A group comes before the groups below it.
    /// The iteration leaves out some groups if groups are deleted meanwhile.
    pub fn below(self) -> impl Iterator<Item = Group> {
        core::iter::successors(Some(self), move |&group| {
            if let Ok(Some(child)) = group.next_child(None) {
                return Some(child);
            }
            let mut last = group;
            while last != self {
                let parent = Group(made().ok()?.place(last.0).ok()?.0?);
                match parent.next_child(Some(last)) {
                    Ok(Some(next)) => return Some(next),
                    Ok(None) => last = parent,
                    Err(_) => return None,
                }
            }
            None
        })
    }

    /// Returns the group directly below this one that follows `after`, or the first one. Returns
    /// `None` at the end.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted, or `after` is no longer directly below
    /// it.
    pub fn next_child(self, after: Option<Group>) -> Result<Option<Group>, GroupError> {
        let next = made_or_here(self)?.next_child(self.0, after.map(Group::id)).map(Group);
        // Checked afterwards: if `after` is there now, it was there before.
        match after {
            Some(after) if made()?.place(after.0)?.0 != Some(self.0) => Err(GroupError::NoSuchGroup),
            Some(_) => Ok(next),
            None => self.info().map(|_| next),
        }
    }

    /// Charges bytes to the group and all above it. A charge beyond a `max` first drains stocks,
    /// then runs reclaim, and is refused if there is still no room. A charge above a `high` takes
    /// up to two seconds. [`Group::request`] has all options of a charge.
    ///
    /// # Errors
    /// See [`ChargeError`]. Nothing is charged then.
    #[inline]
    pub fn charge(self, bytes: u64) -> Result<Charge, ChargeError> {
        self.request(bytes).now()
    }

    /// Charges bytes, and waits for room at a limit for at most `time`. Does the work of
    /// `request(bytes).deadline(time).wait()`. The caller must hold nothing that other threads need
    /// to make room.
    ///
    /// ```
    /// use core::time::Duration;
    /// use neap::groups::{Bound, Group};
    ///
    /// let pool = Group::create("pool")?;
    /// pool.set(Bound::Max, 1 << 20)?;
    /// let first = pool.charge(1 << 20)?;
    /// assert!(pool.charge_or_wait(4096, Duration::from_millis(1)).is_err());
    /// let second = std::thread::spawn(move || pool.charge_or_wait(4096, Duration::from_secs(60)));
    /// drop(first);
    /// assert_eq!(second.join().unwrap()?.bytes(), 4096);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`ChargeError`].
    pub fn charge_or_wait(self, bytes: u64, time: Duration) -> Result<Charge, ChargeError> {
        self.request(bytes).deadline(time).wait()
    }

    /// Calls a listener at events of the group and those below it, until the returned handle is
    /// dropped or the group is gone. The listener is also called when the group goes.
    ///
    /// neap's thread calls the listener. Where neap can have no thread,
    /// [`Mm::tick`](crate::mm::Mm::tick) does. A callback may do anything.
    ///
    /// ```
    /// use core::sync::atomic::{AtomicU64, Ordering};
    /// use neap::groups::{Bound, Event, Group, Listener};
    ///
    /// static REFUSED: AtomicU64 = AtomicU64::new(0);
    /// let tenant = Group::create("watched")?;
    /// tenant.set(Bound::Max, 4096)?;
    /// let heard = tenant.subscribe(&[Event::Refused], Listener::Callback(
    ///     |_context, happened| {
    ///         _ = happened.event.map(|(_, times)| REFUSED.fetch_add(times, Ordering::Relaxed));
    ///     },
    ///     0,
    /// ))?;
    /// assert!(tenant.charge(8192).is_err());
    /// while REFUSED.load(Ordering::Relaxed) == 0 {
    ///     neap::process::PROCESS.tick(0);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`NotSubscribed`].
    pub fn subscribe(self, events: &[Event], listener: Listener) -> Result<Heard, NotSubscribed> {
        let grouped = made_or_here(self).map_err(|_| NotSubscribed::NoSuchGroup)?;
        grouped.subscribe(self.0, events, listener).map(Heard)
    }

    /// Puts this thread into the group until the returned guard is dropped.
    ///
    /// All memory that the thread allocates meanwhile is charged to the group, if neap is the
    /// allocator. That includes `malloc`, Rust's collections and C++. The charge ends when any
    /// thread frees the memory. A charge beyond a limit succeeds, and is counted, unless
    /// `NEAP=refuse:on` is set. Guards may be dropped in any order.
    ///
    /// After the first call every thread's malloc checks whether the thread is in a group, until
    /// the process ends.
    ///
    /// ```
    /// #[global_allocator]
    /// static ALLOCATOR: neap::Neap = neap::Neap;
    ///
    /// let query = neap::groups::Group::create("queries/17")?;
    /// let inside = query.enter()?;
    /// let rows = std::hint::black_box(vec![0_u8; 1 << 20]);
    /// drop(inside);
    /// assert!(query.used()? >= 1 << 20);
    /// drop(rows);
    /// assert!(query.used()? < 1 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted, or [`GroupError::NoMemory`].
    pub fn enter(self) -> Result<Entered, GroupError> {
        if !made_or_here(self)?.exists(self.0) {
            return Err(GroupError::NoSuchGroup);
        }
        Entered::new(self.0)
    }

    /// Makes an owner of [per-CPU data](crate::percpu) that is charged to the group.
    ///
    /// * All copies of an allocation are charged until any thread frees it. At a limit the
    ///   allocation is refused ([`Refused::Charge`](crate::percpu::Refused::Charge)).
    /// * As far as possible, the owner's data shares no page with the data of another owner. The
    ///   caller must [close the owner](crate::percpu::close_owner), which empties pages.
    /// * Once the group is deleted the owner gets no more data. It keeps the data that it has, for
    ///   which the heir is charged.
    /// * An allocation with [`Wait::Never`](crate::percpu::Wait::Never) is charged from the stock
    ///   of its CPU and the room below the limits. It runs no reclaim, and does not use the stocks
    ///   of other CPUs, which have up to 256 KiB each.
    ///
    /// ```
    /// use neap::groups::Group;
    /// use neap::percpu::{PerCpuCounter, Wait, close_owner, cpus};
    ///
    /// let tenant = Group::create("counted")?;
    /// let owner = tenant.open_owner()?;
    /// let requests = PerCpuCounter::of(owner, 64, Wait::Long)?;
    /// assert!(tenant.used()? >= 8 * cpus() as u64);
    /// drop(requests);
    /// assert_eq!(tenant.used()?, 0);
    /// // SAFETY: nothing of the owner's is in use.
    /// unsafe { close_owner(owner)? };
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted. [`GroupError::Full`] if there is no
    /// room for another owner.
    pub fn open_owner(self) -> Result<Owner, GroupError> {
        here()?.open_owner(self.0)
    }

    /// Empties the stocks of the group and those below it, on all CPUs, and flushes their cached
    /// objects.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is deleted.
    pub fn drain(self) -> Result<(), GroupError> {
        let grouped = made_or_here(self)?;
        if !grouped.exists(self.0) {
            return Err(GroupError::NoSuchGroup);
        }
        grouped.drain(self.0);
        Ok(())
    }
}

/// A guard of [`Group::enter`]. The thread is in the group of its latest guard. Guards may be
/// dropped in any order.
#[derive(Debug)]
#[must_use = "the thread leaves the group when this is dropped"]
pub struct Entered {
    frame: NonNull<Frame>,
    /// Makes the guard not `Send`, since it belongs to this thread.
    stays: PhantomData<*const ()>,
}

/// State of a guard. The frames of a thread are a list, latest first. The thread-local word
/// [`guards`] has the address of the first. If a guard is dropped before a later one, its frame
/// stays until the later guard is dropped.
#[derive(Debug)]
struct Frame {
    /// The word of the group that the thread was in before.
    before: usize,
    /// Address of the frame below, or 0.
    below: usize,
    is_open: Cell<bool>,
}

impl Entered {
    /// Enters a group in this thread.
    ///
    /// # Errors
    /// [`GroupError::NoMemory`] if there is no memory for the guard.
    fn new(group: GroupId) -> Result<Entered, GroupError> {
        // The frame is charged to no group.
        let outside = PROCESS.enter(None);
        let memory = PROCESS.allocate(size_of::<Frame>());
        PROCESS.leave(outside);
        let frame = NonNull::new(memory).ok_or(GroupError::NoMemory)?.cast::<Frame>();
        let (before, below) = (PROCESS.enter(Some(group)), guards());
        // SAFETY: this call has just allocated the memory, with the size of a frame. Its address is
        // a multiple of 16, and no other thread knows it.
        unsafe { frame.write(Frame { before, below, is_open: Cell::new(true) }) };
        set_guards(frame.as_ptr().expose_provenance());
        Ok(Entered { frame, stays: PhantomData })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: only the loop below frees frames, after their guards were dropped. The guard of
        // this frame is being dropped, so the frame exists. A guard does not leave its thread, so
        // no other thread uses the frame.
        unsafe { self.frame.as_ref() }.is_open.set(false);
        loop {
            let frame = with_exposed_provenance_mut::<Frame>(guards());
            // SAFETY: the word is the address of a frame of this thread that was not freed, or is
            // 0.
            let Some(&Frame { before, below, .. }) = unsafe { frame.as_ref() }.filter(|frame| !frame.is_open.get())
            else {
                return;
            };
            PROCESS.leave(before);
            set_guards(below);
            // SAFETY: `new` allocated the frame. Its guard is gone, and the word is no longer its
            // address, so no thread uses the frame any more.
            unsafe { PROCESS.free(frame.cast()) };
        }
    }
}

/// A subscription. Dropping it ends the subscription, and waits for a running call of the listener.
/// A drop inside the listener itself does not wait.
#[derive(Debug)]
#[must_use = "the listener is told nothing more when this is dropped"]
pub struct Heard(Subscription);

impl Drop for Heard {
    fn drop(&mut self) {
        if let Ok(grouped) = made() {
            grouped.unsubscribe(self.0);
        }
    }
}

/// Returns the process's groups. Makes them if `group` is the root. Any other group exists only if
/// the groups were made.
#[inline]
fn made_or_here(group: Group) -> Result<Grouped<'static, Linux>, GroupError> {
    if group == Group::ROOT { here() } else { made() }
}

/// Returns the numbers of groups and of their ids.
///
/// # Errors
/// [`GroupError::NoMemory`] if the groups cannot be made.
pub fn count() -> Result<GroupCount, GroupError> {
    Ok(here()?.count())
}

/// Writes the path of the group, or its id if it is gone.
impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = made_or_here(*self).and_then(|grouped| grouped.place(self.0));
        let Ok((above, name)) = place else { return write!(f, "group {:?}, which is gone", self.0) };
        match above {
            None => f.write_str("the root group"),
            Some(GroupId::ROOT) => f.write_str(name.as_str()),
            Some(above) => write!(f, "{}/{}", Group(above), name.as_str()),
        }
    }
}

/// Bytes that are charged to a group. Dropping the charge uncharges them from the group, or from
/// its heir.
#[derive(Debug)]
#[must_use = "what is dropped is not charged any more"]
pub struct Charge {
    payer: Payer,
    bytes: u64,
}

impl Charge {
    #[cold]
    #[inline(never)]
    fn give_back_slowly(&self) {
        if let (Ok(grouped), true) = (made(), self.bytes > 0) {
            grouped.uncharge(self.payer, self.bytes);
        }
    }

    /// Number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The node that the bytes are counted for.
    pub fn node(&self) -> usize {
        self.payer.node()
    }

    /// The charged group. If that is gone its heir is charged.
    pub fn group(&self) -> Group {
        Group(self.payer.id())
    }

    /// Moves `bytes` bytes into a new charge. Returns `None`, and changes nothing, if this charge
    /// has fewer.
    pub fn split(&mut self, bytes: u64) -> Option<Charge> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(Charge { payer: self.payer, bytes })
    }

    /// Adds another charge of the same group and node.
    ///
    /// # Errors
    /// Returns the other charge if its group or node differs.
    pub fn merge(&mut self, other: Charge) -> Result<(), Charge> {
        if other.payer != self.payer {
            return Err(other);
        }
        self.bytes += other.bytes;
        core::mem::forget(other);
        Ok(())
    }

    /// Moves the bytes to another group.
    ///
    /// # Errors
    /// Those of [`Group::charge`]. The bytes stay with their group then.
    pub fn move_to(&mut self, group: Group) -> Result<(), ChargeError> {
        let charge = group.request(self.bytes).node(self.payer.node()).now()?;
        // Drops the old charge.
        drop(core::mem::replace(self, charge));
        Ok(())
    }
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        // The fast path puts the bytes into this CPU's stock.
        if !PROCESS.give_to_stock(self.payer, self.bytes) {
            self.give_back_slowly();
        }
    }
}

/// Bytes in a readable form: `1.5 MiB`.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = (self.0.checked_ilog2().unwrap_or(0) / 10).min(4);
        if unit == 0 {
            return write!(f, "{} B", self.0);
        }
        let tenths = (u128::from(self.0) * 10) >> (10 * unit);
        write!(f, "{}.{} {}iB", tenths / 10, tenths % 10, ["", "K", "M", "G", "T"][unit as usize])
    }
}
