//! Handles that delete their group when they are dropped, and deletion of whole subtrees.
//!
//! # Concurrency
//! If another thread makes groups in a subtree during its deletion, they are deleted as well.

use super::{Group, GroupError};
use core::ops::Deref;

impl Group {
    /// Deletes the group and all groups below it, the lowest first. Their charges become those of
    /// its parent.
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
    /// * [`GroupError::Root`] if the group is the root. Nothing has changed then.
    /// * [`GroupError::NoSuchGroup`] if another call has deleted the group.
    pub fn delete_all(self) -> Result<(), GroupError> {
        loop {
            match self.delete() {
                Err(GroupError::HasChildren) => {}
                answer => return answer,
            }
            let mut lowest = self;
            while let Ok(Some(child)) = lowest.next_child(None) {
                lowest = child;
            }
            match lowest.delete() {
                // Another thread deleted `lowest`, or made a group below it.
                Ok(()) | Err(GroupError::NoSuchGroup | GroupError::HasChildren) => {}
                error => return error,
            }
        }
    }
}

/// Owner of a group. Dropping it deletes the group and all groups below it.
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
    /// Makes the group at a path, as [`Group::create`] does. The handle does not own groups above
    /// it, which stay when the handle is dropped.
    ///
    /// # Errors
    /// See [`GroupError`].
    pub fn create(path: &str) -> Result<GroupHandle, GroupError> {
        Group::create(path).map(GroupHandle)
    }

    /// Makes a handle that owns an existing group.
    pub const fn of(group: Group) -> GroupHandle {
        GroupHandle(group)
    }

    /// Returns the group without ownership. The result may outlive the group.
    pub const fn group(&self) -> Group {
        self.0
    }

    /// Ends the ownership without deleting the group, and returns it.
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
        // Fails if the group was deleted through another handle. Then nothing is left to do.
        let _ = self.0.delete_all();
    }
}
