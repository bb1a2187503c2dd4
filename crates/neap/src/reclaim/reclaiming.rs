//! Reclaim in a manager: shrinkers and passes, and the parts of the manager that they use.
//!
//! # Design
//! [`Reclaiming`] joins the state of reclaim ([`Reclaim`]) with the manager's groups. The
//! registration of the first shrinker makes the state. In a manager without that state, ticks and
//! charges at a limit find none and do nothing.
//!
//! # Locking
//! This module has no lock. Callbacks run outside the gate and with no lock held.

use crate::groups::memory_groups::Grouped;
use crate::mm::Mm;
use crate::percpu::per_cpu_data::Source;
use crate::reclaim::builtin_shrinkers;
use crate::state::reclaim::Reclaim;
use core::ptr::NonNull;
use neap_base::Platform;
use neap_groups::{Bound, GroupId, GroupSlot, Groups, Info};
use neap_objects::size_class::Class;
use neap_os::{clock, stack};
use neap_percpu::Host as _;
use neap_reclaim::reclaim::Misbehaviour;
use neap_reclaim::{Host, Report, ShrinkerError, ShrinkerId, Shrinkers, Spec, Unregistered};

/// Alignment of tables, in bytes.
const LINE: usize = 64;

/// Reclaim of a manager, for [`reclaim`](crate::reclaim).
#[derive(Debug)]
pub struct Reclaiming<'m, P: Platform> {
    grouped: Grouped<'m, P>,
    pub(crate) reclaim: &'m Reclaim,
}

impl<P: Platform> Clone for Reclaiming<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for Reclaiming<'_, P> {}

impl<P: Platform> Host for Source<'_, P> {
    fn memory(&self, bytes: usize) -> Option<NonNull<u8>> {
        let core = self.core();
        let memory = match Class::of_layout(bytes, LINE, core.objects.pages.page_size()) {
            Some(class) => core.objects.allocate(class)?,
            None => {
                let (memory, _) = core.allocate_run(bytes, LINE)?;
                core.count_run(bytes.max(1), 0);
                memory
            }
        };
        // SAFETY: allocated above with at least `bytes` bytes, and known to no other thread yet.
        unsafe { memory.write_bytes(0, bytes) };
        NonNull::new(memory)
    }

    unsafe fn give_back(&self, memory: NonNull<u8>, _bytes: usize) {
        let core = self.core();
        match core.class_of(memory.as_ptr(), "free") {
            Class::NONE => {
                let bytes = core.free_run(memory.as_ptr());
                core.count_run(0, bytes);
            }
            class => {
                // `disown` marks the object as cached; it was marked as allocated.
                if core.objects.disown(memory.as_ptr()) {
                    core.objects.free(class, memory.as_ptr());
                }
            }
        }
    }

    fn mark(&self, shrinker: u64, seat: GroupSlot, node: usize) {
        if let Some(reclaim) = self.core().reclaim.get() {
            reclaim.shrinkers.mark(self, ShrinkerId::from_bits(shrinker), seat.slot, node as u32);
        }
    }

    fn is_seat(&self, group: GroupId, slot: u32) -> bool {
        self.mm().groups_if_made().is_some_and(|grouped| grouped.groups().is_seat(group, slot))
    }

    fn follow(&self, group: GroupId, mut hang: impl FnMut(GroupSlot)) {
        let Some(grouped) = self.mm().groups_if_made() else { return };
        let groups = grouped.groups();
        self.inside(|| {
            let reading = groups.reading();
            if !groups.hang_on(&reading, group, &mut hang) {
                // No reference is left that leads from the group to its heir, so every group is
                // marked.
                groups.seats().for_each(|seat| _ = groups.hang_on(&reading, seat.group, &mut hang));
            }
        });
    }
}

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
            .inside(|| core.reclaim.get_or_make(|| made.take().map(Reclaim::new).ok_or(ShrinkerError::NoMemory)))?;
        if let Some(second) = made {
            // SAFETY: another thread published its registry first, so no other thread uses this one
            // and no callback of it runs. `source` opened it.
            unsafe { second.close(source) };
        }
        Ok(Reclaiming { grouped, reclaim })
    }

    /// Returns the manager's shrinkers and reclaim, if they were made.
    #[inline]
    pub fn reclaiming_if_made(&self) -> Option<Reclaiming<'_, P>> {
        let reclaim = self.core_if_open()?.reclaim.get()?;
        Some(Reclaiming { grouped: self.groups_if_made()?, reclaim })
    }
}

impl<'m, P: Platform> Reclaiming<'m, P> {
    pub(crate) fn source(&self) -> &Source<'m, P> {
        self.grouped.source()
    }

    pub(crate) fn groups(&self) -> &'m Groups {
        self.grouped.groups()
    }

    pub(crate) fn inside<R>(&self, body: impl FnOnce() -> R) -> R {
        self.source().inside(body)
    }

    pub(crate) fn now(&self) -> u64 {
        self.source().platform().precise()
    }

    /// The current time of the [clock of callbacks](crate::reclaim::callback_clock), in
    /// nanoseconds. The watchdog uses it to time callbacks, and the penalties of blamed shrinkers.
    pub(crate) fn moment(&self) -> u64 {
        self.reclaim.clock.read(clock::precise)
    }

    /// Returns the bytes charged to a group and those below it, with stocks and cached objects.
    pub(crate) fn charged(&self, group: GroupId) -> Option<u64> {
        self.groups().usage(self.source(), group).ok()
    }

    pub(crate) fn info(&self, group: GroupId) -> Option<Info> {
        self.grouped.info(group).ok()
    }

    pub(crate) fn drain(&self, group: GroupId) {
        self.grouped.drain(group);
    }

    /// Returns those of the group and its ancestors that are beyond their `high`, the lowest first.
    pub(crate) fn above_high(&self, group: GroupId) -> impl Iterator<Item = Info> {
        let chain = core::iter::successors(self.info(group), |info| self.info(info.parent?));
        chain.filter(|info| info.charged > info.bounds[Bound::High as usize])
    }

    /// Number of nodes.
    pub(crate) fn nodes(&self) -> u32 {
        self.source().platform().nodes() as u32
    }

    /// [`Shrinkers::prepare`].
    ///
    /// # Errors
    /// Those of [`Shrinkers::prepare`].
    ///
    /// # Safety
    /// Those of [`Shrinkers::prepare`].
    pub unsafe fn prepare(&self, spec: &Spec<'_>) -> Result<ShrinkerId, ShrinkerError> {
        // SAFETY: the callbacks may be called with `data` by any threads until the end of the
        // shrinker, and do not unwind (the caller's promise).
        unsafe { self.reclaim.shrinkers.prepare(self.source(), spec) }
    }

    /// Starts a shrinker ([`Shrinkers::start`]), and makes neap's thread and a reclaimer if it can.
    ///
    /// # Errors
    /// Those of [`Shrinkers::start`].
    pub fn start(&self, id: ShrinkerId) -> Result<(), ShrinkerError> {
        self.reclaim.shrinkers.start(self.source(), id)?;
        let source = self.source();
        source.ensure_thread();
        _ = source.core().spawn_worker(source.mm(), self, 1);
        Ok(())
    }

    /// Ends every reclaimer when it next looks for a job, and prevents new ones.
    pub(crate) fn dismiss(&self) {
        self.reclaim.dismiss(&self.source().enter());
    }

    /// [`Shrinkers::unregister`].
    ///
    /// # Errors
    /// Those of [`Shrinkers::unregister`].
    pub fn unregister(&self, id: ShrinkerId) -> Result<Unregistered, ShrinkerError> {
        self.reclaim.shrinkers.unregister(self.source(), id).inspect(|_| self.reclaim.watchdog.forget(id.to_bits()))
    }

    /// Marks a shrinker for the group, or its heir, on a node ([`Shrinkers::mark`]). Returns
    /// `false` if neither the group nor an heir exists.
    pub fn mark(&self, id: ShrinkerId, group: GroupId, node: u32) -> bool {
        self.inside(|| {
            let reading = self.groups().reading();
            let mark = |seat: GroupSlot| self.reclaim.shrinkers.mark(self.source(), id, seat.slot, node);
            self.groups().hang_on(&reading, group, mark)
        })
    }

    /// [`Shrinkers::each`].
    pub fn each(&self, each: impl FnMut(&Report)) {
        self.reclaim.shrinkers.each(each);
    }

    /// Calls `each` with each group and node that a shrinker is marked for. The third argument is
    /// the shrinker's deferred work there.
    pub(crate) fn each_place(&self, report: &Report, mut each: impl FnMut(GroupId, u32, u64)) {
        let (shrinkers, nodes) = (&self.reclaim.shrinkers, self.source().platform().nodes() as u32);
        for node in 0..if report.by_node { nodes } else { 1 } {
            let mut from = 0;
            while let Some(slot) = shrinkers.next_with_anything(node, from) {
                from = slot + 1;
                if shrinkers.is_marked(report.id, slot, node)
                    && let Some(group) = self.groups().standing(self.source(), slot, GroupId::ROOT)
                {
                    each(group.id, node, shrinkers.deferred(report.id, slot, node));
                }
            }
        }
    }

    /// [`Passes::counts`](neap_reclaim::reclaim::Passes::counts).
    pub fn passes(&self) -> [[u64; 5]; 2] {
        self.reclaim.passes.counts()
    }

    /// Blames a shrinker. neap then does not call it for some time.
    pub(crate) fn blame(&self, shrinker: ShrinkerId, misbehaviour: Misbehaviour) {
        let Reclaim { shrinkers, watchdog, .. } = self.reclaim;
        let name = shrinkers.name_of(shrinker);
        self.inside(|| watchdog.blame(shrinker.to_bits(), name, misbehaviour, self.moment()));
    }

    /// Blames a shrinker for a panic. The function that caught the panic calls this.
    pub fn has_panicked(&self, id: ShrinkerId) {
        self.blame(id, Misbehaviour::Panicked);
    }

    /// Frees the shrinkers.
    ///
    /// # Safety
    /// Those of [`Shrinkers::close`].
    pub(crate) unsafe fn close(&self) {
        // SAFETY: no thread uses the registry any more, and no callback runs (the caller's
        // promise). This manager's source opened the registry.
        unsafe { self.reclaim.shrinkers.close(self.source()) };
    }

    /// Forgets the threads of the parent, in a forked child.
    ///
    /// # Safety
    /// Those of [`Shrinkers::forget_others`].
    pub(crate) unsafe fn forget_others(&self) {
        // SAFETY: this is the only thread of a forked child. It relies on no read of `running` that
        // it began before the fork (the caller's promise).
        unsafe { self.reclaim.shrinkers.forget_others(self.source()) };
        self.reclaim.forget_others(&self.source().enter());
        self.source().core().objects.pages.set_reclaiming(false);
    }
}
