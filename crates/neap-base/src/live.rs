//! Counters of an instance in memory that other processes read while it runs.
//!
//! # Design
//! A layer stores its counters into cells while it holds the lock that protects them. The cells lie
//! in a shared mapping that no child of a fork has. So a layer finds them by a [`Link`]: a word of
//! a mapping that stays in every child, but reads as zero there. A child of the bare system call
//! `clone` thus stores nothing, and touches no page that it lacks.
//!
//! Other processes may write to the cells. The instance never reads them.

use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

/// Address of the first cell; null if there are no cells.
pub type Link<T> = AtomicPtr<T>;

/// Cells of one kind, through a [`Link`].
#[derive(Debug)]
pub struct Cells<T> {
    link: AtomicPtr<Link<T>>,
}

impl<T> Default for Cells<T> {
    fn default() -> Cells<T> {
        Cells::new()
    }
}

impl<T> Clone for Cells<T> {
    #[inline]
    fn clone(&self) -> Cells<T> {
        // Acquire pairs with the Release in `attach`.
        Cells { link: AtomicPtr::new(self.link.load(Ordering::Acquire)) }
    }
}

impl<T> Cells<T> {
    /// No cells.
    pub const fn new() -> Cells<T> {
        Cells { link: AtomicPtr::new(null_mut()) }
    }

    /// Makes [`Cells::get`] find the cells through `link` from now on.
    ///
    /// # Safety
    /// * The link stays mapped as long as this value or a clone is used, in forked children too.
    /// * Whenever it is not null, it leads to initialised cells that stay mapped in this process.
    ///   There are more of them than the largest index that is passed to [`Cells::get`] of this
    ///   value or of a clone.
    pub unsafe fn attach(&self, link: &Link<T>) {
        // Release pairs with the Acquire in `get`: a thread that finds the link sees its memory.
        self.link.store(core::ptr::from_ref(link).cast_mut(), Ordering::Release);
    }

    /// Returns the cell `index`; `None` if there are no cells.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&T> {
        // Acquire pairs with the Release in `attach`.
        // SAFETY: the pointer is null, or leads to a link that stays mapped, as `attach` requires.
        let link = unsafe { self.link.load(Ordering::Acquire).as_ref() }?;
        // Acquire pairs with the Release of the thread that made the cells: they are initialised.
        let first = link.load(Ordering::Acquire);
        // SAFETY: `first` is not null. `attach` requires that it leads to initialised cells that
        // stay mapped, and that there are more of them than `index`.
        (!first.is_null()).then(|| unsafe { &*first.add(index) })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU64;

    #[test]
    fn cells_are_found_only_while_the_link_leads_to_them() {
        let places = [AtomicU64::new(0), AtomicU64::new(0)];
        let link = Link::new(null_mut());
        let cells: Cells<AtomicU64> = Cells::new();
        assert!(cells.get(1).is_none(), "not attached");
        // SAFETY: the link and both cells outlive the value, and indexes are below 2.
        unsafe { cells.attach(&link) };
        assert!(cells.get(1).is_none(), "no cells");
        link.store(places.as_ptr().cast_mut(), Ordering::Release);
        cells.get(1).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(places.map(AtomicU64::into_inner), [0, 7]);
    }
}
