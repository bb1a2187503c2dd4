//! Memory groups of this process: who holds what, with limits that can change at any moment.
//!
//! Sits between a program and the process's manager ([`PROCESS`]), whose groups are made when they are first asked for. A group is a node of a
//! tree with a path such as `tenant/acme`. Memory of any origin is charged to it by hand, by a [`Charge`] that takes it back when
//! it is dropped. A charge beyond a `max` is refused, with an error that says who holds the memory. All of it can be called from any thread, at any
//! time, but not from signal handlers.
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
//! assert!(refused.to_string().starts_with("tenant/acme has 1.0 MiB of 64.0 MiB and is asked for 100.0 MiB more"), "{refused}");
//! assert!(matches!(refused, neap::groups::ChargeError::TooLarge(_)));
//!
//! // A group may go before what was charged to it: its parent has that from then on.
//! acme.delete()?;
//! assert_eq!(Group::find("tenant")?.used()?, 1 << 20);
//! drop(page);
//! assert_eq!(Group::find("tenant")?.used()?, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Source: the memory cgroups of Linux, by idea.

use crate::memory_groups::Grouped;
use crate::process::PROCESS;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::{NonNull, with_exposed_provenance_mut};
use core::time::Duration;
use neap_base::Linux;
use neap_groups::Subscription;
pub use neap_groups::{
    Bound, Denied, Event, GroupCount, GroupId, Happened, Info, Kind, Limit, Listener, Name, NotSubscribed, Payer,
    UNLIMITED,
};
use neap_os::entered::{guards, set_guards};
use neap_percpu::Owner;

mod handle;
mod request;
mod scope;

pub use handle::GroupHandle;
pub use request::{ChargeAsync, ChargeError, ChargeRequest};
pub use scope::Scope;

/// The process's groups.
fn here() -> Result<Grouped<'static, Linux>, Denied> {
    PROCESS.groups()
}

/// The same where a group is known already: then they have been made.
#[inline]
fn made() -> Result<Grouped<'static, Linux>, Denied> {
    PROCESS.groups_if_made().ok_or(Denied::NoSuchGroup)
}

/// A group of this process: a name for it, which keeps nothing alive. Once the group is deleted every call answers
/// [`Denied::NoSuchGroup`], also if another group has the same path later.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Group(GroupId);

impl Group {
    /// The root: what all groups are charged for together.
    pub const ROOT: Group = Group(GroupId::ROOT);

    /// Makes the group at a path, and those above it that are not there yet. Names have 1 to 56 bytes; between them is a `/`.
    ///
    /// # Errors
    /// See [`Denied`]; groups above it may have been made.
    pub fn create(path: &str) -> Result<Group, Denied> {
        let grouped = here()?;
        if path.split('/').any(str::is_empty) {
            return Err(Denied::BadName);
        }
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut parent = GroupId::ROOT;
        for name in above.split('/').filter(|_| !above.is_empty()) {
            parent = grouped.find_or_create(parent, name)?;
        }
        grouped.create(parent, name).map(Group)
    }

    /// The group at a path; an empty one is the root's.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn find(path: &str) -> Result<Group, Denied> {
        here()?.find(GroupId::ROOT, path).map(Group)
    }

    /// The group at a path, which is made where it is not there.
    ///
    /// # Errors
    /// As for [`Group::create`].
    pub fn find_or_create(path: &str) -> Result<Group, Denied> {
        match Group::find(path) {
            Err(Denied::NoSuchGroup) => match Group::create(path) {
                Err(Denied::Exists) => Group::find(path),
                answer => answer,
            },
            answer => answer,
        }
    }

    /// Its id, for reports.
    pub const fn id(self) -> GroupId {
        self.0
    }

    /// The group of an id, which may be gone.
    pub const fn from_id(id: GroupId) -> Group {
        Group(id)
    }

    /// Deletes the group, which has no groups below it. What it is charged for is its parent's from now on, and its name can be used again.
    ///
    /// # Errors
    /// [`Denied::HasChildren`], [`Denied::Root`], [`Denied::NoSuchGroup`]; nothing has changed then.
    pub fn delete(self) -> Result<(), Denied> {
        made_or_here(self)?.delete(self.0)
    }

    /// The group that has its charges and list items: itself, or the next group above that is
    /// there once it is deleted. `None` once no charge is left that was made to a deleted group.
    pub fn heir(self) -> Option<Group> {
        made_or_here(self).ok()?.heir(self.0).map(Group)
    }

    /// Changes what bounds the group, in bytes, and answers what it was. Takes effect at once and does not wait.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn set(self, bound: Bound, bytes: u64) -> Result<u64, Denied> {
        made_or_here(self)?.set_bound(self.0, bound, bytes)
    }

    /// What is known of the group.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn info(self) -> Result<Info, Denied> {
        made_or_here(self)?.info(self.0)
    }

    /// Lets the group's [peak](Info::peak) begin again at what it is charged for at this moment.
    /// Returns the peak before. The groups above and below keep theirs.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn reset_peak(self) -> Result<u64, Denied> {
        made_or_here(self)?.reset_peak(self.0)
    }

    /// Bytes charged to the group alone, of one kind on one node, with what is stocked.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn charged(self, kind: Kind, node: usize) -> Result<u64, Denied> {
        made_or_here(self)?.charged(self.0, kind, node)
    }

    /// Bytes that the group and those below it use: what is charged, less what is stocked on CPUs. Exact while nobody charges.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn used(self) -> Result<u64, Denied> {
        made_or_here(self)?.used(self.0)
    }

    /// How much of it is protected by `min` and by `low`, in bytes, after what the groups above it have to give.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn protection(self) -> Result<(u64, u64), Denied> {
        made_or_here(self)?.protection(self.0)
    }

    /// The groups right below it, as long as none of them is deleted meanwhile.
    pub fn children(self) -> impl Iterator<Item = Group> {
        let next = move |after: Option<Group>| self.next_child(after).ok().flatten();
        core::iter::successors(next(None), move |&child| next(Some(child)))
    }

    /// The group, and all below it, each before those below it; some are left out if groups are
    /// deleted meanwhile.
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

    /// The group right below it that is behind `after`, or the first; `None` at the end.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`] if it is gone, or `after` is not right below it any more.
    pub fn next_child(self, after: Option<Group>) -> Result<Option<Group>, Denied> {
        let next = made_or_here(self)?.next_child(self.0, after.map(Group::id)).map(Group);
        // Asked afterwards: what was there then was there before.
        match after {
            Some(after) if made()?.place(after.0)?.0 != Some(self.0) => Err(Denied::NoSuchGroup),
            Some(_) => Ok(next),
            None => self.info().map(|_| next),
        }
    }

    /// Charges bytes to the group and all above it. Beyond a `max` this asks for memory back, then empties stocks, then refuses; above a `high` it
    /// takes up to two seconds. [`Group::request`] has all choices.
    ///
    /// # Errors
    /// See [`ChargeError`]; nothing is charged then.
    #[inline]
    pub fn charge(self, bytes: u64) -> Result<Charge, ChargeError> {
        self.request(bytes).now()
    }

    /// `request(bytes).deadline(time).wait()`.
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

    /// Has a listener told what happens to the group and those below it, until the answer is dropped or the group is gone, which it is told as well. Callbacks run on
    /// neap's thread, or in [`Mm::tick`](crate::mm::Mm::tick) where there can be none, and may do anything.
    ///
    /// ```
    /// use core::sync::atomic::{AtomicU64, Ordering};
    /// use neap::groups::{Bound, Event, Group, Listener};
    ///
    /// static REFUSED: AtomicU64 = AtomicU64::new(0);
    /// let tenant = Group::create("watched")?;
    /// tenant.set(Bound::Max, 4096)?;
    /// let heard = tenant.subscribe(&[Event::Refused], Listener::Callback(
    ///     |_context, happened| _ = happened.event.map(|(_, times)| REFUSED.fetch_add(times, Ordering::Relaxed)),
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

    /// Lets this thread be in the group until the answer is dropped: all that it allocates
    /// meanwhile, through `malloc`, Rust's collections or C++, where neap is their allocator, is
    /// charged to the group, and goes back to it when it is freed, by whichever thread. It goes
    /// beyond a limit, counted, unless `NEAP=refuse:on` is set. Guards may be dropped in any order.
    /// From the first on, every thread's malloc looks whether the thread is in a group, until the
    /// process ends: a nanosecond.
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
    /// [`Denied::NoSuchGroup`]; [`Denied::NoMemory`].
    pub fn enter(self) -> Result<Entered, Denied> {
        if !made_or_here(self)?.is_there(self.0) {
            return Err(Denied::NoSuchGroup);
        }
        Entered::new(self.0)
    }

    /// An owner of [per-CPU data](crate::percpu) that is charged to the group: every allocation with all its copies, until it is freed, by whichever thread,
    /// and refused at a limit ([`Refused::Charge`](crate::percpu::Refused::Charge)). What the owner has shares pages with nobody else's, as far as
    /// it can, so [closing it](crate::percpu::close_owner), which the caller is to do, empties pages. Once the group is deleted the owner keeps what it
    /// has, which is the heir's to pay, and gets no more. An allocation with [`Wait::Never`](crate::percpu::Wait::Never) is charged with what its CPU has in stock and
    /// the limits leave: it makes no room, and what other CPUs have in stock, up to 256 KiB each, is not to be had.
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
    /// [`Denied::NoSuchGroup`]; [`Denied::Full`] with as many owners as there can be.
    pub fn open_owner(self) -> Result<Owner, Denied> {
        here()?.open_owner(self.0)
    }

    /// Empties what is stocked for the group and those below it, on all CPUs, and takes back what caches keep of theirs.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn drain(self) -> Result<(), Denied> {
        let grouped = made_or_here(self)?;
        if !grouped.is_there(self.0) {
            return Err(Denied::NoSuchGroup);
        }
        grouped.drain(self.0);
        Ok(())
    }
}

/// Being in a group, as this thread is until this is dropped, or until it enters another. A thread
/// is in the group that it entered last of those whose guards are there, in whichever order guards
/// are dropped.
#[derive(Debug)]
#[must_use = "the thread leaves the group when this is dropped"]
pub struct Entered {
    frame: NonNull<Frame>,
    /// It is about this thread.
    stays: PhantomData<*const ()>,
}

/// What is known of a guard: frames of a thread are a list, the latest first, to which the thread's
/// own word leads. A guard that is dropped while a later one is there leaves its frame, which goes
/// with the frames above it.
#[derive(Debug)]
struct Frame {
    /// What the thread had entered before.
    before: usize,
    /// The frame below, or 0.
    below: usize,
    is_open: Cell<bool>,
}

impl Entered {
    /// Enters a group, in this thread.
    ///
    /// # Errors
    /// [`Denied::NoMemory`].
    fn new(group: GroupId) -> Result<Entered, Denied> {
        // No group pays for it.
        let outside = PROCESS.enter(None);
        let memory = PROCESS.allocate(size_of::<Frame>());
        PROCESS.leave(outside);
        let frame = NonNull::new(memory).ok_or(Denied::NoMemory)?.cast::<Frame>();
        let (before, below) = (PROCESS.enter(Some(group)), guards());
        // SAFETY: it has the size, is on a multiple of 16, and nobody else knows it.
        unsafe { frame.write(Frame { before, below, is_open: Cell::new(true) }) };
        set_guards(frame.as_ptr().expose_provenance());
        Ok(Entered { frame, stays: PhantomData })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: a frame is freed below alone, after its guard is gone. A guard does not leave its
        // thread.
        unsafe { self.frame.as_ref() }.is_open.set(false);
        loop {
            let frame = with_exposed_provenance_mut::<Frame>(guards());
            // SAFETY: the word leads to a frame of this thread's that was not freed, or to none.
            let Some(&Frame { before, below, .. }) = unsafe { frame.as_ref() }.filter(|frame| !frame.is_open.get())
            else {
                return;
            };
            PROCESS.leave(before);
            set_guards(below);
            // SAFETY: it was allocated by `new`; its guard is gone, and the word does not lead to
            // it any more.
            unsafe { PROCESS.free(frame.cast()) };
        }
    }
}

/// A listener that is told; no more when this is dropped. Where it is being told at the moment, dropping waits for that, but in the listener itself.
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

/// The root is there as soon as it is asked for, all others have been made before.
#[inline]
fn made_or_here(group: Group) -> Result<Grouped<'static, Linux>, Denied> {
    if group == Group::ROOT { here() } else { made() }
}

/// How many groups there are, and were.
///
/// # Errors
/// [`Denied::NoMemory`] where there were none, and cannot be.
pub fn count() -> Result<GroupCount, Denied> {
    Ok(here()?.count())
}

/// The path of the group, or its number where it is gone.
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

/// Bytes that are charged to a group, until this is dropped. They go back to who paid, or to its heir.
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

    /// How many.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The node that the bytes are counted for.
    pub fn node(&self) -> usize {
        self.payer.node()
    }

    /// Who was charged. It may be gone; then its heir has the bytes.
    pub fn group(&self) -> Group {
        Group(self.payer.id())
    }

    /// Takes some of the bytes off into a charge of their own; `None`, and nothing has changed, if there are not so many.
    pub fn split(&mut self, bytes: u64) -> Option<Charge> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(Charge { payer: self.payer, bytes })
    }

    /// Adds another charge of the same group and node.
    ///
    /// # Errors
    /// The other charge, if it is of another.
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
    /// As for [`Group::charge`]; then they are where they were.
    pub fn move_to(&mut self, group: Group) -> Result<(), ChargeError> {
        let charge = group.request(self.bytes).node(self.payer.node()).now()?;
        // What is dropped is the old one.
        drop(core::mem::replace(self, charge));
        Ok(())
    }
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        // As when it was charged.
        if !PROCESS.give_to_stock(self.payer, self.bytes) {
            self.give_back_slowly();
        }
    }
}

/// Bytes, as people read them: `1.5 MiB`.
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
