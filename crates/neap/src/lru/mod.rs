//! LRU lists of this process. They keep cached objects by group and node, the oldest first, so that
//! reclaim from a group finds its oldest objects.
//!
//! `LruList` has a safe interface. It keeps values, and returns a `Handle` for each. [`RawList`]
//! links objects by an [`Item`] inside them, and allocates no memory for an object.
//!
//! Every group and node has its own sub-list with its own lock. The first use makes the sub-list.
//! When a group is deleted its items become its parent's at once, as the oldest there.
//!
//! Any thread can call all functions at any time, but a signal handler must not call them.
//!
//! ```
//! # #[cfg(feature = "std")] {
//! use neap::groups::Group;
//! use neap::lru::{LruList, LruStatus};
//!
//! let tenant = Group::create("cache/acme")?;
//! let pages = LruList::new()?;
//! let front = pages.add_on(tenant, 0, "front page")?;
//! let about = pages.add_on(tenant, 0, "about us")?;
//! assert_eq!(pages.count(tenant), 2);
//!
//! // The oldest is asked first. A page in use becomes the newest.
//! let mut evicted = Vec::new();
//! let walked = pages.walk(
//!     tenant,
//!     0,
//!     10,
//!     |page| if *page == "front page" { LruStatus::Rotate } else { LruStatus::Removed },
//!     |page| evicted.push(*page),
//! );
//! assert_eq!((walked.scanned, walked.removed, evicted), (2, 1, vec!["about us"]));
//!
//! // The remaining page becomes the parent's when the tenant is deleted.
//! tenant.delete()?;
//! assert_eq!(pages.count(Group::find("cache")?), 1);
//! assert!(pages.remove(&front) && !pages.remove(&about));
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The idea comes from list_lru of Linux.

use crate::groups::{Group, GroupError};
use crate::lru::lists::Listed;
use crate::process::PROCESS;
use core::ptr::NonNull;
use neap_base::Linux;
use neap_reclaim::ShrinkerId;
pub use neap_reclaim::lru::{By, Item, LONGEST, LruStatus, MOST, Stamp, Turnover, Walked};

mod by_memory;
pub mod lists;
#[cfg(feature = "std")]
mod values;
#[cfg(feature = "std")]
pub use values::{Handle, LruList};

/// Returns the process's lists, if the process's groups were made.
fn made() -> Option<Listed<'static, Linux>> {
    PROCESS.lists_if_made()
}

/// A list of objects that have an [`Item`] inside. This is a handle, which keeps nothing alive. A
/// walk calls its callback under the lock of the items (see [`RawList::walk`]).
///
/// ```
/// use core::ptr::NonNull;
/// use neap::groups::Group;
/// use neap::lru::{By, Item, RawList, LruStatus};
///
/// #[repr(C)]
/// #[derive(Default)]
/// struct Page {
///     item: Item, // at the beginning: the item's address is the page's
///     number: u32,
/// }
///
/// let list = RawList::open(By::Group)?;
/// let page = NonNull::from(Box::leak(Box::new(Page { number: 7, ..Page::default() })));
/// // SAFETY: the page is not moved until it was taken off, and is freed by `dispose` alone.
/// unsafe {
///     assert!(list.add(Group::ROOT, 0, page.cast())?);
///     let mut freed = 0;
///     list.walk(Group::ROOT, 0, 10, |_| LruStatus::Removed, |item| {
///         freed += Box::from_raw(item.cast::<Page>().as_ptr()).number;
///     });
///     assert_eq!((freed, list.count(Group::ROOT, 0)), (7, 0));
///     list.close();
/// }
/// # Ok::<(), neap::groups::GroupError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RawList(neap_reclaim::lru::LruList);

impl RawList {
    /// Makes a list.
    ///
    /// # Errors
    /// [`GroupError::NoMemory`] if there is no memory for the list.
    pub fn open(by: By) -> Result<RawList, GroupError> {
        PROCESS.lists()?.site().open(by, None).map(RawList)
    }

    /// Makes a list by group whose items belong to a shrinker. The shrinker must know groups, and
    /// be registered before. The first item of a group on a node marks the shrinker there. So
    /// reclaim calls its `count` only for groups with items. `count` may call [`RawList::count`].
    ///
    /// # Errors
    /// [`GroupError::NoMemory`] if there is no memory for the list.
    pub fn open_for(shrinker: ShrinkerId) -> Result<RawList, GroupError> {
        PROCESS.lists()?.site().open(By::Group, Some(shrinker.to_bits())).map(RawList)
    }

    /// Frees the list. Items on it are on no list any more.
    ///
    /// # Safety
    /// No thread uses the list any more. The program may only overwrite items that were on it.
    pub unsafe fn close(self) {
        if let Some(listed) = made() {
            // SAFETY: no thread uses the list any more, and items on it are only overwritten (the
            // caller's promise).
            unsafe { listed.site().close_list(self.0) };
        }
    }

    /// Adds an item as the newest of a group on a node. A number beyond the last node stands for
    /// the last node. If the group is gone, the item becomes its heir's. Returns `false`, and
    /// changes nothing, if the item is on a list already or a walk has taken it off.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`] if the group is gone and neap cannot find its heir.
    ///
    /// # Safety
    /// * The item stays in place until [`RawList::del`] has returned true for it, or a walk has
    ///   passed it to `dispose`.
    /// * No callback that a walk runs under the lock calls this.
    pub unsafe fn add(self, group: Group, node: usize, item: NonNull<Item>) -> Result<bool, GroupError> {
        let listed = made().ok_or(GroupError::NoSuchGroup)?;
        // SAFETY: the item stays in place until it is taken off, and no walk's callback calls this
        // under the lock (the caller's promise).
        unsafe { self.0.add(&listed.site(), group.id(), node, item) }
    }

    /// Takes an item off the list, whichever group it belongs to now. Returns whether this call
    /// took it off. If not, the item is on no list or on another one, or a walk has taken it off. A
    /// walk passes such an item to `dispose`. Only the code that got the item may free it.
    ///
    /// # Safety
    /// * The item is in place.
    /// * No callback that a walk runs under the lock calls this.
    pub unsafe fn del(self, item: NonNull<Item>) -> bool {
        // SAFETY: the item is in place, and no walk's callback calls this under the lock (the
        // caller's promise).
        made().is_some_and(|listed| unsafe { self.0.del(&listed.site(), item) })
    }

    /// Makes an item the newest of its present group on its node. Returns `false`, and changes
    /// nothing, if the item is on no list or on another list, or a walk has taken it off.
    ///
    /// # Safety
    /// The item exists. No function that a walk calls under the lock may call this.
    pub unsafe fn touch(self, item: NonNull<Item>) -> bool {
        // SAFETY: the item exists, and no walk's callback calls this under the lock (the caller's
        // promise).
        made().is_some_and(|listed| unsafe { self.0.touch(&listed.site(), item) })
    }

    /// Returns how many items of a group alone are on a node, or 0 if the group is gone. Takes no
    /// lock.
    pub fn count(self, group: Group, node: usize) -> usize {
        made().map_or(0, |listed| self.0.count(&listed.site(), group.id(), node))
    }

    /// Calls `isolate` with up to `most` items of a group alone on a node, oldest first, and obeys
    /// its verdicts. Each item comes once, except after [`LruStatus::Retry`]. If some items stay,
    /// `isolate` gets at most [`LONGEST`] items. Does nothing if the group is gone.
    ///
    /// The walk passes the items that it takes off to `dispose`, in the same order, with no lock
    /// held. From then on they are the caller's. [`Item::is_linked`] is true until
    /// [`Item::leave_hands`].
    ///
    /// # Safety
    /// The walk calls `isolate` under the lock of the items, and a fork waits for its return.
    /// `isolate` must not wait, allocate, free or call neap. It may only try locks of the items'
    /// owner.
    pub unsafe fn walk(
        self,
        group: Group,
        node: usize,
        most: usize,
        isolate: impl FnMut(NonNull<Item>) -> LruStatus,
        dispose: impl FnMut(NonNull<Item>),
    ) -> Walked {
        let Some(listed) = made() else { return Walked::default() };
        // SAFETY: `isolate` fulfils the conditions above (the caller's promise).
        unsafe { self.0.walk(&listed.site(), group.id(), node, most, isolate, dispose) }
    }
}
