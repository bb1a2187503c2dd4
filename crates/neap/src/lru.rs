//! LRU lists of this process: what is cached, by group and node, oldest first, so that whoever wants memory back from a group finds its oldest.
//!
//! Sits between caches and the process's manager ([`PROCESS`]). Every group and node has its own part of a list, under a lock of its own, made when
//! it is first used. When a group is deleted, what it has is its parent's at once, as the oldest there. `LruList` keeps values by
//! `Handle`, safely. [`RawList`] links objects by an [`Item`] inside them and takes no memory for them.
//!
//! All of it can be called from any thread, at any time, but not from signal handlers.
//!
//! ```
//! # #[cfg(feature = "std")] {
//! use neap::groups::Group;
//! use neap::lru::{LruList, Verdict};
//!
//! let tenant = Group::create("cache/acme")?;
//! let pages = LruList::new()?;
//! let front = pages.add_on(tenant, 0, "front page")?;
//! let about = pages.add_on(tenant, 0, "about us")?;
//! assert_eq!(pages.count(tenant), 2);
//!
//! // The oldest is asked first. What was in use goes on as the newest.
//! let mut evicted = Vec::new();
//! let walked = pages.walk(
//!     tenant,
//!     0,
//!     10,
//!     |page| if *page == "front page" { Verdict::Rotate } else { Verdict::Removed },
//!     |page| evicted.push(*page),
//! );
//! assert_eq!((walked.scanned, walked.removed, evicted), (2, 1, vec!["about us"]));
//!
//! // What is left is the parent's when the tenant goes.
//! tenant.delete()?;
//! assert_eq!(pages.count(Group::find("cache")?), 1);
//! assert!(pages.remove(&front) && !pages.remove(&about));
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Source: list_lru of Linux, by idea.

use crate::groups::{Denied, Group};
use crate::lists::Listed;
use crate::process::PROCESS;
use core::ptr::NonNull;
use neap_base::Linux;
use neap_reclaim::ShrinkerId;
pub use neap_reclaim::lru::{Item, LONGEST, MOST, Verdict, Walked};

#[cfg(feature = "std")]
#[path = "lru_values.rs"]
mod values;
#[cfg(feature = "std")]
pub use values::{Handle, LruList};

/// Whose the items of a list are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// Each group's are its own.
    Group,
    /// All are the root's, whichever group they are added for.
    Nobody,
}

/// The process's lists, which are there since one was opened.
fn made() -> Option<Listed<'static, Linux>> {
    PROCESS.lists_if_made()
}

/// A list of objects that have an [`Item`] inside: a name for it, which keeps nothing alive. Functions that walks call run under the lock of the
/// items: see [`RawList::walk`].
///
/// ```
/// use core::ptr::NonNull;
/// use neap::groups::Group;
/// use neap::lru::{By, Item, RawList, Verdict};
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
/// // SAFETY: the page stays where it is until it was taken off, and is freed by who has done that.
/// unsafe {
///     assert!(list.add(Group::ROOT, 0, page.cast())?);
///     let mut freed = 0;
///     list.walk(Group::ROOT, 0, 10, |_| Verdict::Removed, |item| {
///         freed += Box::from_raw(item.cast::<Page>().as_ptr()).number;
///     });
///     assert_eq!((freed, list.count(Group::ROOT, 0)), (7, 0));
///     list.close();
/// }
/// # Ok::<(), neap::groups::Denied>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RawList(neap_reclaim::lru::LruList);

impl RawList {
    /// Makes a list.
    ///
    /// # Errors
    /// [`Denied::NoMemory`].
    pub fn open(by: By) -> Result<RawList, Denied> {
        PROCESS.lists()?.site().open(by == By::Group, None).map(RawList)
    }

    /// Makes a list by group whose items a shrinker is for: one that knows groups, registered before. It is marked when a group's first item on a
    /// node is added, so its `count`, which may be [`RawList::count`], is asked where there is something.
    ///
    /// # Errors
    /// [`Denied::NoMemory`].
    pub fn open_for(shrinker: ShrinkerId) -> Result<RawList, Denied> {
        PROCESS.lists()?.site().open(true, Some(shrinker.to_bits())).map(RawList)
    }

    /// Gives back what the list takes. Items that are on it are no list's any more.
    ///
    /// # Safety
    /// Nobody uses the list any more, nor an item that is on it but to put other things in its place.
    pub unsafe fn close(self) {
        if let Some(listed) = made() {
            // SAFETY: as the caller promises.
            unsafe { listed.site().close_list(self.0) };
        }
    }

    /// Puts an item on it, as the newest of a group on a node (the last node, for a number beyond). Where the group is gone the item is its
    /// heir's. Answers whether it was put there: not where it is on a list already.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`]: the group is gone, and nobody is known to be its heir.
    ///
    /// # Safety
    /// The item stays where it is until [`RawList::del`] has answered that it was taken off, or a walk's `dispose` has got it. Not called by a
    /// function that a walk calls under the lock.
    pub unsafe fn add(self, group: Group, node: usize, item: NonNull<Item>) -> Result<bool, Denied> {
        let listed = made().ok_or(Denied::NoSuchGroup)?;
        // SAFETY: as the caller promises.
        unsafe { self.0.add(&listed.site(), group.id(), node, item) }
    }

    /// Takes an item off, whichever group's it is by now; answers whether this call did. If not, it is on no list, or on another, or a walk has
    /// taken it off, whose `dispose` gets it. So whoever got it, here or there, and nobody else, may free it.
    ///
    /// # Safety
    /// The item is there. Not called by a function that a walk calls under the lock.
    pub unsafe fn del(self, item: NonNull<Item>) -> bool {
        // SAFETY: as the caller promises.
        made().is_some_and(|listed| unsafe { self.0.del(&listed.site(), item) })
    }

    /// Makes an item the newest of the group that has it by now, on the node that it is on. Returns
    /// whether that was done: not where it is on no list, on another, or taken off by a walk.
    ///
    /// # Safety
    /// The item is there. Not called by a function that a walk calls under the lock.
    pub unsafe fn touch(self, item: NonNull<Item>) -> bool {
        // SAFETY: the caller keeps the item there, and holds no lock of a list.
        made().is_some_and(|listed| unsafe { self.0.touch(&listed.site(), item) })
    }

    /// Items of a group alone on a node, at this moment; 0 where the group is gone. Takes no lock.
    pub fn count(self, group: Group, node: usize) -> usize {
        made().map_or(0, |listed| self.0.count(&listed.site(), group.id(), node))
    }

    /// Hands up to `most` items of a group alone on a node, or [`LONGEST`] where not all are taken off, to `isolate`, oldest first and each once at
    /// most but for retries, and does what it answers. Those that it takes off are handed to `dispose`, in the same order, with no lock held: they are
    /// its own then, and nobody's before, and say [`Item::is_linked`] until [`Item::leave_hands`]. Finds nothing where the group is gone.
    ///
    /// # Safety
    /// `isolate` is called under the lock of the items, and a fork waits for it: it neither waits, nor allocates or frees, nor calls
    /// anything of neap's; a lock of the item's owner it only tries.
    pub unsafe fn walk(
        self,
        group: Group,
        node: usize,
        most: usize,
        isolate: impl FnMut(NonNull<Item>) -> Verdict,
        dispose: impl FnMut(NonNull<Item>),
    ) -> Walked {
        let Some(listed) = made() else { return Walked::default() };
        // SAFETY: as the caller promises.
        unsafe { self.0.walk(&listed.site(), group.id(), node, most, isolate, dispose) }
    }
}
