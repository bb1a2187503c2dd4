//! The per-CPU data of a manager. The manager makes it at first use. Its calls pass the fork gate,
//! and ticks run its worker.
//!
//! A manager without per-CPU data has no memory for it, and a tick only finds that there is none.
//! The memory of per-CPU data lies outside the arena, so it does not count for the limit. Making it
//! takes one mutex.

use crate::groups::memory_groups::Grouped;
use crate::mm::{Core, Mm};
use crate::state::reclaim::Manner;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_base::platform::Errno;
use neap_groups::{GroupId, Kind, OnLimit, Payer};
use neap_os::stack;
use neap_percpu::{Handle, Host, Invalid, Owner, PerCpuData, Refused, Statistics, TakenBack, Wait};

/// Per-CPU data of a manager: the host of typed values, for [`percpu`](crate::percpu).
#[derive(Debug)]
pub struct Source<'m, P: Platform> {
    mm: &'m Mm<P>,
    core: &'m Core<P>,
    data: &'m PerCpuData,
    /// How callbacks run for charges.
    pub(crate) manner: Manner,
}

impl<P: Platform> Clone for Source<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for Source<'_, P> {}

impl<P: Platform> Mm<P> {
    /// Returns the manager's per-CPU data. Makes it if need be, unless `wait` is [`Wait::Never`].
    ///
    /// # Errors
    /// * [`Refused::Memory`] if there is no address space for it.
    /// * [`Refused::WouldWait`] if it was not made yet, and `wait` is [`Wait::Never`].
    pub fn per_cpu(&self, wait: Wait) -> Result<Source<'_, P>, Refused> {
        if let Some(source) = self.per_cpu_if_made() {
            return Ok(source);
        }
        if wait == Wait::Never {
            return Err(Refused::WouldWait);
        }
        let core = self.core().ok_or(Refused::Memory(Errno::NOMEM))?;
        let inside = self.gate.enter(core.objects.platform.cpu());
        let made = stack::apart(|| core.per_cpu.make(&inside, &core.objects.platform));
        let data = made.unwrap_or(Err(Errno::NOMEM)).map_err(Refused::Memory)?;
        // Publishes in the page of numbers that there is per-CPU data. Until then, `neap stat
        // --percpu` sends this process no request.
        self.hooks.ticked.inspect(|ticked| ticked(self, &inside));
        Ok(Source { mm: self, core, data, manner: Manner::Wait })
    }

    /// Returns the manager's per-CPU data, if it was made.
    #[inline]
    pub fn per_cpu_if_made(&self) -> Option<Source<'_, P>> {
        let core = self.core_if_open()?;
        Some(Source { mm: self, core, data: core.per_cpu.get()?, manner: Manner::Wait })
    }
}

impl<'m, P: Platform> Source<'m, P> {
    /// Makes an owner: [`PerCpuData::open_owner`].
    ///
    /// # Errors
    /// Those of [`PerCpuData::open_owner`].
    pub fn open_owner(&self) -> Result<Owner, Refused> {
        self.inside(|_| self.data.open_owner(self.platform()))
    }

    /// Makes an owner with data that is charged to a group: all copies, as [`Kind::PerCpu`].
    ///
    /// # Errors
    /// Those of [`PerCpuData::open_owner`].
    pub(crate) fn open_owner_in(&self, group: GroupId) -> Result<Owner, Refused> {
        // The copies are on all nodes. Charges book them under the first node.
        self.inside(|_| self.data.open_owner_for(self.platform(), group.payer(Kind::PerCpu, 0).to_bits()))
    }

    /// Frees an owner's data and ends it: [`PerCpuData::close_owner`].
    ///
    /// # Errors
    /// Those of [`PerCpuData::close_owner`].
    ///
    /// # Safety
    /// Those of [`PerCpuData::close_owner`].
    pub unsafe fn close_owner(&self, owner: Owner) -> Result<usize, Refused> {
        let (payer, answer) = self.inside(|_| {
            let payer = self.data.payer(owner);
            // SAFETY: no thread uses the owner's data any more, or allocates for it meanwhile (the
            // caller's promise).
            (payer, unsafe { self.data.close_owner(owner) })
        });
        if let Ok(bytes) = answer {
            self.uncharge(payer, bytes as u64);
        }
        self.after(Wait::Long);
        answer
    }

    /// Returns the current statistics. May wait for a pass of the worker.
    pub fn statistics(&self) -> Statistics {
        self.inside(|_| self.data.statistics())
    }

    /// Returns the node that memory for this thread comes from.
    #[inline]
    pub(crate) fn node(&self) -> usize {
        self.core.objects.pages.nearest(&self.core.objects.platform)
    }

    pub(crate) fn after(&self, wait: Wait) {
        self.core.after_per_cpu(self.mm, self.data, wait);
    }

    /// Enters the gate.
    pub(crate) fn enter(&self) -> Inside<'m> {
        self.mm.gate.enter(self.platform().cpu())
    }

    /// Returns the groups, and the payer of an owner, if it has one.
    fn payer(&self, _: &Inside<'_>, owner: Owner) -> Option<(Grouped<'m, P>, Payer)> {
        let grouped = self.mm.groups_if_made().filter(|_| owner != Owner::NONE)?;
        let payer = self.data.payer(owner);
        (payer != 0).then(|| (grouped, Payer::from_bits(payer)))
    }

    /// Charges the payer of an owner for an allocation, before it is made. Returns the payer, 0 for
    /// none. Unless `wait` is `Long`, the thread is not delayed above a `high`, and waits for no
    /// callback.
    fn charge(&self, owner: Owner, bytes: u64, wait: Wait) -> Result<u64, Refused> {
        let Some((grouped, payer)) = self.payer(&self.enter(), owner) else { return Ok(0) };
        let charged = if wait == Wait::Long {
            grouped.charge(payer, bytes, OnLimit::Refuse)
        } else {
            grouped.groups().charge(&self.with(Manner::Post), payer, bytes, OnLimit::Refuse).map(|_| ())
        };
        charged.map(|()| payer.to_bits()).map_err(|_| Refused::Charge)
    }

    /// Allocates without waiting. Takes the charge from this CPU's stock or from the room below the
    /// limits. Fails with [`Refused::WouldWait`] while a thread forks.
    fn allocate_at_once(&self, owner: Owner, size: usize, align: usize) -> Result<Handle, Refused> {
        let Some(inside) = self.mm.gate.try_enter(self.platform().cpu()) else { return Err(Refused::WouldWait) };
        let (paying, bytes) = (self.payer(&inside, owner), self.data.price(size));
        if paying.is_some_and(|(grouped, payer)| !grouped.groups().charge_at_once(&inside, self, payer, bytes)) {
            return Err(Refused::Charge);
        }
        let answer = self.data.allocate(self.platform(), owner, size, align, Wait::Never);
        answer.inspect_err(|_| {
            paying.inspect(|(grouped, payer)| grouped.groups().uncharge_inside(&inside, self, *payer, bytes));
        })
    }

    fn uncharge(&self, payer: u64, bytes: u64) {
        if payer != 0
            && bytes > 0
            && let Some(grouped) = self.mm.groups_if_made()
        {
            grouped.uncharge(Payer::from_bits(payer), bytes);
        }
    }

    pub(crate) fn mm(&self) -> &'m Mm<P> {
        self.mm
    }

    /// Returns this source with another manner of charging.
    pub(crate) fn with(&self, manner: Manner) -> Source<'m, P> {
        Source { manner, ..*self }
    }

    pub(crate) fn core(&self) -> &'m Core<P> {
        self.core
    }

    pub(crate) fn has_thread(&self) -> bool {
        self.core.background.has_thread()
    }

    /// Makes neap's thread for work that only a thread can do. Must not be called in a call that
    /// allocates or frees.
    pub(crate) fn ensure_thread(&self) {
        self.core.ensure_thread(self.mm);
    }
}

impl<P: Platform> Host for Source<'_, P> {
    type Platform = P;
    type Charge = ();

    fn platform(&self) -> &P {
        &self.core.objects.platform
    }

    fn data(&self) -> &PerCpuData {
        self.data
    }

    fn inside<R>(&self, body: impl FnOnce(&Inside<'_>) -> R) -> R {
        body(&self.enter())
    }

    fn try_inside<R>(&self, body: impl FnOnce(&Inside<'_>) -> R) -> Option<R> {
        Some(body(&self.mm.gate.try_enter(self.platform().cpu())?))
    }

    fn allocate(&self, owner: Owner, size: usize, align: usize, wait: Wait) -> Result<Handle, Refused> {
        self.data.check(size, align)?; // Before a group is charged, or a cache shrinks.
        let answer = if wait == Wait::Never {
            self.allocate_at_once(owner, size, align)
        } else {
            let bytes = self.data.price(size);
            let payer = self.charge(owner, bytes, wait)?;
            let allocate = |_: &Inside<'_>| self.data.allocate(self.platform(), owner, size, align, wait);
            self.inside(allocate).inspect_err(|_| self.uncharge(payer, bytes))
        };
        self.after(wait);
        answer
    }

    unsafe fn free(&self, handle: Handle) -> Result<usize, Invalid> {
        // SAFETY: no thread uses the allocation any more (the caller's promise).
        let answer = self.inside(|_| unsafe { self.data.take_back(handle) }).map(|TakenBack { bytes, payer }| {
            self.uncharge(payer, self.data.price(bytes));
            bytes
        });
        self.after(Wait::Long);
        answer
    }
}
