//! The lists of a manager: LRU lists on its groups, kept from forks by the gate, tidied up by
//! maintenance.
//!
//! Sits between [`Mm`] and `neap-reclaim`. What is not asked for costs a deletion of a group one
//! lock, and a tick one. No lock of its own.

use crate::memory_groups::Grouped;
use crate::mm::Mm;
use crate::per_cpu_data::Source;
use neap_base::Platform;
use neap_groups::Denied;
use neap_objects::size_class::Class;
use neap_objects::verify::Finding;
use neap_reclaim::lru::{Lists, Site};

/// The lists of a manager: what [`lru`](crate::lru) stands on.
#[derive(Debug)]
pub struct Listed<'m, P: Platform> {
    grouped: Grouped<'m, P>,
    lists: &'m Lists,
}

impl<P: Platform> Clone for Listed<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for Listed<'_, P> {}

impl<P: Platform> Mm<P> {
    /// The manager's lists, with its groups, which are made where there are none yet.
    ///
    /// # Errors
    /// [`Denied::NoMemory`].
    pub fn lists(&self) -> Result<Listed<'_, P>, Denied> {
        let grouped = self.groups()?;
        let core = self.core().ok_or(Denied::NoMemory)?;
        Ok(Listed { grouped, lists: &core.lists })
    }

    /// The same, if there are groups.
    #[inline]
    pub fn lists_if_made(&self) -> Option<Listed<'_, P>> {
        Some(Listed { grouped: self.groups_if_made()?, lists: &self.core_if_open()?.lists })
    }

    /// The proof that lists add up. The gate is closed, and nobody inside.
    pub(crate) fn verify_lists(&self) -> Result<(), Finding> {
        let Some(listed) = self.lists_if_made() else { return Ok(()) };
        listed.site().verify().map_err(|finding| {
            let neap_reclaim::lru::Finding { what, group, expected, found } = finding;
            let [expected, found] = [expected, found].map(|number| number as u64);
            Finding { what, class: Class::NONE, at: group.to_bits() as usize, expected, found }
        })
    }
}

impl<'m, P: Platform> Listed<'m, P> {
    /// What calls of lists are told.
    #[inline]
    pub fn site(&self) -> Site<'_, Source<'m, P>> {
        Site { host: self.grouped.source(), groups: self.grouped.groups(), lists: self.lists }
    }

    /// The groups that items are of.
    pub fn grouped(&self) -> Grouped<'m, P> {
        self.grouped
    }
}
