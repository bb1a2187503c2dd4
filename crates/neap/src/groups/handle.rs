//! Groups that are deleted by their owner, and trees of groups that are deleted as a whole.
//!
//! # Concurrency
//! Groups that other threads make below a tree while it is deleted are deleted as well.

use super::{Denied, Group};
use core::ops::Deref;

impl Group {
    /// Deletes the group and all groups below it, the lowest first. Their charges are its parent's
    /// from now on.
    ///
    /// ```
    /// use neap::groups::Group;
    ///
    /// let tenant = Group::create("site/acme")?;
    /// Group::create("site/acme/queries/17")?;
    /// let charge = Group::find("site/acme/queries/17")?.charge(4096)?;
    /// tenant.delete_all()?;
    /// assert!(Group::find("site/acme").is_err());
    /// assert_eq!(Group::find("site")?.used()?, 4096);
    /// # drop(charge);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Denied::Root`], and nothing has changed; [`Denied::NoSuchGroup`].
    pub fn delete_all(self) -> Result<(), Denied> {
        loop {
            match self.delete() {
                Err(Denied::HasChildren) => {}
                answer => return answer,
            }
            let mut lowest = self;
            while let Ok(Some(child)) = lowest.next_child(None) {
                lowest = child;
            }
            match lowest.delete() {
                // Another thread has deleted it, or made a group below it.
                Ok(()) | Err(Denied::NoSuchGroup | Denied::HasChildren) => {}
                error => return error,
            }
        }
    }
}

/// A group that is deleted when this is dropped, with all groups below it.
///
/// ```
/// use neap::groups::{Group, GroupHandle};
///
/// let query = GroupHandle::create("queries/18")?;
/// let buffers = query.charge(1 << 20)?;
/// assert_eq!(query.used()?, 1 << 20);
/// drop(query);
/// assert!(Group::find("queries/18").is_err());
/// drop(buffers);
/// assert_eq!(Group::find("queries")?.used()?, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(PartialEq, Eq, Hash, Debug)]
#[must_use = "the group is deleted when this is dropped"]
pub struct GroupHandle(Group);

impl GroupHandle {
    /// Makes the group at a path, as [`Group::create`] does. The groups above it stay when this is
    /// dropped.
    ///
    /// # Errors
    /// See [`Denied`].
    pub fn create(path: &str) -> Result<GroupHandle, Denied> {
        Group::create(path).map(GroupHandle)
    }

    /// Becomes the owner of a group.
    pub const fn of(group: Group) -> GroupHandle {
        GroupHandle(group)
    }

    /// The group: a name for it, which may outlive it.
    pub const fn group(&self) -> Group {
        self.0
    }

    /// Gives the group up without deleting it.
    pub fn leak(self) -> Group {
        let group = self.0;
        core::mem::forget(self);
        group
    }
}

impl Deref for GroupHandle {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.0
    }
}

impl Drop for GroupHandle {
    fn drop(&mut self) {
        // It may have been deleted by its name.
        let _ = self.0.delete_all();
    }
}
