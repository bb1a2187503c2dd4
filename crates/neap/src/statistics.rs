//! What a manager tells about itself.
//!
//! Sits between the counters of the layers and whoever asks: mallinfo, tests, `neap stat`. Reads only; numbers of parts
//! that go on working are of slightly different moments.

use crate::mm::{Core, Mm};
use neap_base::Platform;
use neap_objects::size_class::{CLASSES, Class};
use neap_objects::slots::Kind;

/// Where the bytes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Address space that memory was handed out of so far.
    pub mapped_bytes: u64,
    /// In the program's hands: objects by the size of their class, and runs of pages.
    pub used_bytes: u64,
    /// Free objects: in sheaves, and in slabs that are partly used.
    pub cached_bytes: u64,
    /// Free pages that are resident.
    pub free_bytes: u64,
}

/// One class's objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassNumbers {
    /// Bytes of an object.
    pub size: u32,
    /// Slabs.
    pub slabs: u32,
    /// Objects there are in these slabs.
    pub objects: u64,
    /// Free, in slabs.
    pub in_slabs: u64,
    /// Free, in the barn.
    pub in_barn: u64,
    /// Free, in the sheaves of CPUs.
    pub in_slots: u64,
}

impl<P: Platform> Core<P> {
    /// The numbers of one class.
    pub(crate) fn class_numbers(&self, class: Class) -> ClassNumbers {
        let objects = &self.objects;
        let mut in_slots = 0;
        for cpu in 0..objects.slots.cpus() {
            let peek = objects.slots.peek(&objects.platform, cpu, class);
            in_slots += u64::from(peek.main) + u64::from(peek.spare);
        }
        let cache = objects.caches[class.index()].lock();
        let mut in_barn = 0;
        cache.full.each(|sheaf| in_barn += u64::from(sheaf.count()));
        let per_slab = u64::from(class.slab_shape(objects.pages.page_size()).objects);
        ClassNumbers {
            size: class.size() as u32,
            slabs: cache.slabs,
            objects: u64::from(cache.slabs) * per_slab,
            in_slabs: cache.free,
            in_barn,
            in_slots,
        }
    }

    /// Where the bytes are.
    pub(crate) fn usage(&self) -> Usage {
        let page = self.objects.pages.page_size() as u64;
        let pages = self.objects.pages.statistics();
        let (mut cached, mut in_slabs) = (0, 0);
        for class in Class::all() {
            let numbers = self.class_numbers(class);
            let free = numbers.in_slabs + numbers.in_barn + numbers.in_slots;
            cached += free.min(numbers.objects) * u64::from(numbers.size);
            in_slabs += numbers.objects * u64::from(numbers.size);
        }
        let handed_out = u64::from(pages.used.saturating_sub(pages.listed)) * page;
        Usage {
            mapped_bytes: pages.mapped_bytes as u64,
            used_bytes: handed_out.max(in_slabs) - cached.min(handed_out.max(in_slabs)),
            cached_bytes: cached,
            free_bytes: u64::from(pages.backed_free + pages.listed) * page,
        }
    }
}

impl<P: Platform> Mm<P> {
    /// Where the bytes are; zeroes before the first allocation.
    pub fn usage(&self) -> Usage {
        let Some(core) = self.core_if_open() else { return Usage::default() };
        let _inside = self.gate.enter(core.objects.platform.cpu());
        core.usage()
    }

    /// The numbers of every class, by class; class 0 is not one.
    pub fn classes(&self) -> [ClassNumbers; CLASSES] {
        let mut numbers = [ClassNumbers::default(); CLASSES];
        if let Some(core) = self.core_if_open() {
            let _inside = self.gate.enter(core.objects.platform.cpu());
            Class::all().for_each(|class| numbers[class.index()] = core.class_numbers(class));
        }
        numbers
    }

    /// Which slots CPU 0 has, and so all that are not isolated; `None` before the first allocation.
    pub fn kind(&self) -> Option<Kind> {
        self.core_if_open().map(|core| core.objects.slots.kind(&core.objects.platform, 0))
    }

    /// Bytes of a page.
    pub fn page_size(&self) -> usize {
        self.core().map_or(4096, |core| core.objects.pages.page_size())
    }
}
