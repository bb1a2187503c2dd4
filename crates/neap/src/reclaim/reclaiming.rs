//! Access to a manager's reclaim, and the registration of shrinkers with it.
//!
//! # Design
//! [`Reclaiming`] joins the parts of a manager that reclaim needs. Code that needs one part uses
//! the value's field. A method of [`Reclaiming`] needs several parts: those for registration and
//! blame are here, those for passes in `pass.rs`, those for reports in `shrinker_report.rs`.
//!
//! The registration of the first shrinker makes the state of reclaim ([`Reclaim`]). In a manager
//! without that state, ticks and charges at a limit find none and do nothing.
//!
//! # Locking
//! This module has no lock. Callbacks run outside the gate and with no lock held.

use crate::mm::Mm;
use crate::percpu::per_cpu_data::Source;
use crate::reclaim::builtin_shrinkers;
use crate::state::reclaim::Reclaim;
use neap_base::Platform;
use neap_groups::{Bound, GroupId, GroupSlot, Groups, Info};
use neap_os::stack;
use neap_percpu::Host as _;
use neap_reclaim::reclaim::Misbehaviour;
use neap_reclaim::{Report, ShrinkerError, ShrinkerId, Shrinkers, Unregistered};

/// The parts of a manager that reclaim needs, for [`reclaim`](crate::reclaim).
#[derive(Debug)]
pub struct Reclaiming<'m, P: Platform> {
    /// The manager: gate, memory, platform and threads.
    pub source: Source<'m, P>,
    pub(crate) groups: &'m Groups,
    /// Shrinkers, passes, reclaimers and the watchdog.
    pub reclaim: &'m Reclaim,
}

impl<P: Platform> Clone for Reclaiming<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for Reclaiming<'_, P> {}

impl<P: Platform> Mm<P> {
    /// Returns the manager's shrinkers and reclaim. Makes them, and its groups, if need be.
    ///
    /// # Errors
    /// [`ShrinkerError::NoMemory`] if there is no memory for them.
    pub fn reclaiming(&self) -> Result<Reclaiming<'_, P>, ShrinkerError> {
        let make = || stack::apart(|| self.make_reclaiming()).unwrap_or(Err(ShrinkerError::NoMemory));
        self.reclaiming_if_made().map_or_else(make, Ok)
    }

    #[cold]
    fn make_reclaiming(&self) -> Result<Reclaiming<'_, P>, ShrinkerError> {
        let grouped = self.groups().map_err(|_| ShrinkerError::NoMemory)?;
        let core = self.core().ok_or(ShrinkerError::NoMemory)?;
        let source = grouped.source();
        // Outside the gate, because `Shrinkers::open` enters it.
        let made = Shrinkers::open(source)?;
        // SAFETY: an open manager does not move, and closes its registry before its own end.
        if let Err(error) = unsafe { builtin_shrinkers::register(self, source, &made) } {
            // SAFETY: `made` was never published, so no other thread uses it and no callback runs.
            // `source` opened it.
            unsafe { made.close(source) };
            return Err(error);
        }
        let mut made = Some(made);
        let reclaim = source
            .inside(|_| core.reclaim.get_or_make(|| made.take().map(Reclaim::new).ok_or(ShrinkerError::NoMemory)))?;
        if let Some(second) = made {
            // SAFETY: another thread published its registry first, so no other thread uses this one
            // and no callback of it runs. `source` opened it.
            unsafe { second.close(source) };
        }
        // Publishes that there are shrinkers.
        self.ticked();
        Ok(Reclaiming { source: *source, groups: grouped.groups(), reclaim })
    }

    /// Returns the manager's shrinkers and reclaim, if they were made.
    #[inline]
    pub fn reclaiming_if_made(&self) -> Option<Reclaiming<'_, P>> {
        let reclaim = self.core_if_open()?.reclaim.get()?;
        let grouped = self.groups_if_made()?;
        Some(Reclaiming { source: *grouped.source(), groups: grouped.groups(), reclaim })
    }
}

impl<P: Platform> Reclaiming<'_, P> {
    /// Returns the group and its ancestors, the lowest first.
    pub(crate) fn with_ancestors(&self, group: GroupId) -> impl Iterator<Item = Info> {
        let info = |id| self.groups.info(&self.source, id).ok();
        core::iter::successors(info(group), move |child| info(child.parent?))
    }

    /// Returns those of the group and its ancestors that are beyond their `high`, the lowest first.
    pub(crate) fn above_high(&self, group: GroupId) -> impl Iterator<Item = Info> {
        self.with_ancestors(group).filter(|info| info.charged > info.bounds[Bound::High as usize])
    }

    /// Starts a shrinker ([`Shrinkers::start`]), and makes neap's thread and a reclaimer if it can.
    ///
    /// # Errors
    /// Those of [`Shrinkers::start`].
    pub fn start(&self, id: ShrinkerId) -> Result<(), ShrinkerError> {
        self.reclaim.shrinkers.start(&self.source, id)?;
        let source = &self.source;
        source.ensure_thread();
        _ = source.core().spawn_worker(source.mm(), self, 1);
        Ok(())
    }

    /// Ends a shrinker ([`Shrinkers::unregister`]) and its bar.
    ///
    /// # Errors
    /// Those of [`Shrinkers::unregister`].
    pub fn unregister(&self, id: ShrinkerId) -> Result<Unregistered, ShrinkerError> {
        self.reclaim.shrinkers.unregister(&self.source, id).inspect(|_| self.reclaim.watchdog.forget(id.to_bits()))
    }

    /// Marks a shrinker for the group, or its heir, on a node ([`Shrinkers::mark`]). Returns
    /// `false` if neither the group nor an heir exists.
    pub fn mark(&self, id: ShrinkerId, group: GroupId, node: u32) -> bool {
        self.source.inside(|inside| {
            let reading = self.groups.reading();
            let mark = |seat: GroupSlot| self.reclaim.shrinkers.mark(inside, &self.source, id, seat.slot, node);
            self.groups.attach(inside, &reading, group, mark)
        })
    }

    /// Calls `each` with each group and node that a shrinker is marked for. The third argument is
    /// the shrinker's deferred work there.
    pub(crate) fn each_place(&self, report: &Report, mut each: impl FnMut(GroupId, u32, u64)) {
        let (shrinkers, nodes) = (&self.reclaim.shrinkers, self.source.platform().nodes() as u32);
        for node in 0..if report.by_node { nodes } else { 1 } {
            let mut from = 0;
            while let Some(slot) = shrinkers.next_with_anything(node, from) {
                from = slot + 1;
                if shrinkers.is_marked(report.id, slot, node)
                    && let Some(group) = self.groups.standing(&self.source, slot, GroupId::ROOT)
                {
                    each(group.id, node, shrinkers.deferred(report.id, slot, node));
                }
            }
        }
    }

    /// Blames a shrinker. neap then does not call it for some time.
    pub(crate) fn blame(&self, shrinker: ShrinkerId, misbehaviour: Misbehaviour) {
        let Reclaim { shrinkers, watchdog, clock, .. } = self.reclaim;
        let name = shrinkers.name_of(shrinker);
        watchdog.blame(&self.source.enter(), shrinker.to_bits(), name, misbehaviour, clock.now());
    }

    /// Forgets the threads of the parent, in a forked child.
    ///
    /// # Safety
    /// Those of [`Shrinkers::forget_others`].
    pub(crate) unsafe fn forget_others(&self) {
        // SAFETY: this is the only thread of a forked child. It relies on no read of `running` that
        // it began before the fork (the caller's promise).
        unsafe { self.reclaim.shrinkers.forget_others(&self.source) };
        self.reclaim.forget_others(&self.source.enter());
        self.source.core().objects.pages.set_reclaiming(false);
    }
}
