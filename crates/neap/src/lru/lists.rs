//! The LRU lists of a manager, by group and node. Threads take the locks of lists inside the fork
//! gate. A tick frees the remains of deleted groups in the lists.
//!
//! A manager without groups has no lists. If it has groups but no list, deleting a group takes the
//! registry's mutex once, and a tick takes it three times. Without neap's thread, a deletion does a
//! tick's work, too. This module has no lock.

use crate::groups::memory_groups::Grouped;
use crate::mm::Mm;
use crate::percpu::per_cpu_data::Source;
use neap_base::Platform;
use neap_groups::GroupError;
use neap_objects::verify::Finding;
use neap_reclaim::lru::{LruRegistry, Site};

/// The lists of a manager, for [`lru`](crate::lru).
#[derive(Debug)]
pub struct Listed<'m, P: Platform> {
    grouped: Grouped<'m, P>,
    lists: &'m LruRegistry,
}

impl<P: Platform> Clone for Listed<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for Listed<'_, P> {}

impl<P: Platform> Mm<P> {
    /// Returns the manager's lists. Makes its groups if need be.
    ///
    /// # Errors
    /// [`GroupError::NoMemory`] if there is no memory for the groups.
    pub fn lists(&self) -> Result<Listed<'_, P>, GroupError> {
        let grouped = self.groups()?;
        let core = self.core().ok_or(GroupError::NoMemory)?;
        Ok(Listed { grouped, lists: &core.lists })
    }

    /// Returns the manager's lists, if there are groups.
    #[inline]
    pub fn lists_if_made(&self) -> Option<Listed<'_, P>> {
        Some(Listed { grouped: self.groups_if_made()?, lists: &self.core_if_open()?.lists })
    }

    /// Verifies the lists. The caller has closed the gate, and no thread is inside.
    pub(crate) fn verify_lists(&self) -> Result<(), Finding> {
        let Some(listed) = self.lists_if_made() else { return Ok(()) };
        Ok(listed.site().verify()?)
    }
}

impl<'m, P: Platform> Listed<'m, P> {
    /// Returns the context of calls of lists.
    #[inline]
    pub fn site(&self) -> Site<'_, Source<'m, P>> {
        Site { host: self.grouped.source(), groups: self.grouped.groups(), lists: self.lists }
    }

    /// Returns the groups that the items belong to.
    pub fn grouped(&self) -> Grouped<'m, P> {
        self.grouped
    }
}
