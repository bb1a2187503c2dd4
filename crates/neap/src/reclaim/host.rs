//! The manager as the host of shrinkers and LRU lists: memory for tables, and marks of groups.
//!
//! # Locking
//! This module has no lock.

use crate::percpu::per_cpu_data::Source;
use core::ptr::NonNull;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_groups::{GroupId, GroupSlot};
use neap_objects::size_class::Class;
use neap_percpu::Host as _;
use neap_reclaim::{Host, ShrinkerId};

/// Alignment of tables, in bytes.
const LINE: usize = 64;

impl<P: Platform> Host for Source<'_, P> {
    fn memory(&self, inside: &Inside<'_>, bytes: usize) -> Option<NonNull<u8>> {
        let core = self.core();
        let memory = match Class::of_layout(bytes, LINE, core.objects.pages.page_size()) {
            Some(class) => core.objects.allocate(inside, class)?,
            None => {
                let memory = core.allocate_run(inside, bytes, LINE)?.memory;
                core.count_run(bytes.max(1), 0);
                memory
            }
        };
        // SAFETY: allocated above with at least `bytes` bytes, and known to no other thread yet.
        unsafe { memory.write_bytes(0, bytes) };
        NonNull::new(memory)
    }

    unsafe fn give_back(&self, inside: &Inside<'_>, memory: NonNull<u8>, _bytes: usize) {
        let core = self.core();
        match core.class_of(memory.as_ptr(), "free") {
            Class::NONE => {
                let bytes = core.free_run(inside, memory.as_ptr());
                core.count_run(0, bytes);
            }
            class => {
                // `disown` marks the object as cached; it was marked as allocated.
                if core.objects.disown(memory.as_ptr()) {
                    core.objects.free(inside, class, memory.as_ptr());
                }
            }
        }
    }

    fn mark(&self, inside: &Inside<'_>, shrinker: u64, seat: GroupSlot, node: usize) {
        if let Some(reclaim) = self.core().reclaim.get() {
            reclaim.shrinkers.mark(inside, self, ShrinkerId::from_bits(shrinker), seat.slot, node as u32);
        }
    }

    fn is_online(&self, group: GroupId, slot: u32) -> bool {
        self.mm().groups_if_made().is_some_and(|grouped| grouped.groups().is_online(group, slot))
    }

    fn follow(&self, group: GroupId, mut hang: impl FnMut(&Inside<'_>, GroupSlot)) {
        let Some(grouped) = self.mm().groups_if_made() else { return };
        let groups = grouped.groups();
        self.inside(|inside| {
            let reading = groups.reading();
            let mut hang = |seat: GroupSlot| hang(inside, seat);
            if !groups.attach(inside, &reading, group, &mut hang) {
                // No reference is left that leads from the group to its heir, so every group is
                // marked.
                groups.online_slots().for_each(|seat| _ = groups.attach(inside, &reading, seat.group, &mut hang));
            }
        });
    }
}
