//! The per-CPU memory of a group's counts.

use crate::error::GroupError;
use crate::id::Kind;
use core::sync::atomic::AtomicI64;
use neap_percpu::{Handle, Host, Owner, Wait};

/// Opens an owner of per-CPU data, and allocates a group's counts under it.
pub(crate) fn counts_of_new_group<H: Host>(host: &H, nodes: usize) -> Result<(Owner, Handle), GroupError> {
    let owner = host.inside(|_| host.data().open_owner(host.platform()))?;
    let size = nodes * Kind::ALL.len() * size_of::<AtomicI64>();
    match host.allocate(owner, size, align_of::<AtomicI64>(), Wait::Long) {
        Ok(counts) => Ok((owner, counts)),
        Err(refused) => {
            drop_counts(host, owner);
            Err(refused.into())
        }
    }
}

/// Frees the counts of a group with their owner.
pub(crate) fn drop_counts<H: Host>(host: &H, owner: Owner) {
    // SAFETY: the owner is that of a group that was not made, or of the root in `close`. So no
    // thread uses its counts or allocates for it. It is open, so there is no error.
    let _ = host.inside(|_| unsafe { host.data().close_owner(owner) });
}
