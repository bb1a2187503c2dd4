//! Size classes: the sizes of objects, and a class's layout in slabs, sheaves and stacks.
//!
//! This module has only constant tables and arithmetic. Classes are multiples of 16 from 16 to 128
//! bytes, then eight per doubling up to 32 KiB. An object of up to 128 bytes wastes at most 15
//! bytes, a larger one at most 12.5 %.

/// The size of the largest object. Larger allocations are runs of pages.
pub const LARGEST: usize = 32 << 10;

/// The alignment of every object, and the finest step of sizes.
pub const GRAIN: usize = 16;

/// Number of classes, with class 0, which stands for "no objects".
pub const CLASSES: usize = 73;

/// A size class, 1 to 72; 0 is the class of memory that holds no objects.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct Class(pub u8);

impl Class {
    /// The class of memory that holds no objects.
    pub const NONE: Class = Class(0);

    /// Every class of objects, smallest first.
    pub fn all() -> impl DoubleEndedIterator<Item = Class> {
        (1..CLASSES as u8).map(Class)
    }

    /// The class of objects of `size` bytes (at most [`LARGEST`]; 0 counts as 1).
    #[inline(always)]
    pub fn of_size(size: usize) -> Class {
        Class(OF_GRAINS[size.div_ceil(GRAIN)])
    }

    /// The smallest class whose objects hold `size` bytes and have addresses that are multiples of
    /// `align` (a power of two); `None` if there is none.
    pub fn of_layout(size: usize, align: usize, page_size: usize) -> Option<Class> {
        if size > LARGEST || align > page_size {
            return None;
        }
        let first = Class::of_size(size);
        // A slab starts at a page boundary, so objects are aligned if their size is a multiple of
        // `align`.
        (first.0..CLASSES as u8).map(Class).find(|class| class.size() % align == 0)
    }

    /// Bytes of one object.
    #[inline(always)]
    pub const fn size(self) -> usize {
        SIZES[self.index()] as usize
    }

    /// Whether an object of this class stays where it is when it is resized to `size` bytes. The
    /// object must hold `size` bytes. It must also be less than twice as large as `size`, or of the
    /// smallest class that holds `size` bytes.
    #[inline]
    pub fn suits(self, size: usize) -> bool {
        size <= self.size() && (size * 2 > self.size() || Class::of_size(size) == self)
    }

    /// The class as an index.
    #[inline(always)]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Number of objects that a CPU's local stack holds at first: as many as 64 KiB hold, at most
    /// 1024. If 64 KiB hold fewer than 64, it is as many as 1 MiB holds, at most 64. The result is
    /// 32 to 1024. With the remote stack, which is half as large, a CPU keeps at most 1.5 MiB of a
    /// class from other CPUs at first.
    pub const fn stack_capacity(self) -> u32 {
        let size = SIZES[self.0 as usize] as u32;
        let (small, large) = ((64 << 10) / size, (1 << 20) / size);
        let objects = match (small, large) {
            (64.., _) => small,
            (_, 64..) => 64,
            _ => large,
        };
        if objects > 1024 { 1024 } else { objects }
    }

    /// Number of objects that a stack holds at most, after long bursts (see `Direction` in
    /// `class_cache.rs`): up to 256 KiB of objects up to 1 KiB, up to 4 MiB of larger ones.
    pub const fn most_capacity(self) -> u32 {
        self.stack_capacity() * 4
    }

    /// Number of objects in a sheaf, which moves between stacks and barn: half a stack. After a
    /// sheaf went to an empty stack or came from a full one, the stack is half full, and serves
    /// either direction. If half a stack is a power of two, the capacity is two less, so that the
    /// head and the cells together have a power of two.
    pub const fn sheaf_capacity(self) -> u32 {
        let half = self.stack_capacity() / 2;
        if half.is_power_of_two() && half > 2 { half - 2 } else { half }
    }

    /// Size of the aligned parts of a slab that have one [home](crate::kind_map::KindEntry), in
    /// bytes: 32 KiB, or all of a smaller slab.
    pub fn home_bytes(self) -> usize {
        1 << (512 * self.size()).min(32 << 10).ilog2()
    }

    /// The shape of slabs of this class on pages of `page_size` bytes.
    pub fn slab_shape(self, page_size: usize) -> SlabShape {
        let size = self.size();
        let shape = |order: u8| {
            let bytes = page_size << order;
            SlabShape { order, objects: (bytes / size) as u32, waste: bytes % size }
        };
        // The largest order of at most this many bytes.
        let order_of = |bytes: usize| (bytes / page_size).checked_ilog2().unwrap_or(0) as u8;
        // Small objects: up to 512 of them, in blocks that the CPUs' page lists hold (32 KiB with 4
        // KiB pages). Larger objects: at least eight of the largest, so that the cost per slab is
        // small for each.
        let (low, high) = if size < 512 {
            let order = order_of((512 * size).min(32 << 10));
            (order, order)
        } else {
            (order_of((8 * size).clamp(128 << 10, 256 << 10)), order_of(256 << 10))
        };
        // The smallest order that wastes at most a sixteenth, or the one that wastes least.
        let fits = (low..=high).map(shape).find(|shape| shape.waste * 16 <= page_size << shape.order);
        fits.unwrap_or_else(|| {
            (low..=high).map(shape).min_by_key(|shape| (shape.waste << 16) >> shape.order).unwrap_or(shape(high))
        })
    }
}

/// The shape of a slab: a block of pages cut into objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlabShape {
    /// Order of the block.
    pub order: u8,
    /// Number of objects.
    pub objects: u32,
    /// Bytes left over at the end.
    pub waste: usize,
}

const SIZES: [u16; CLASSES] = {
    let mut sizes = [0; CLASSES];
    let mut class = 1;
    let mut size = GRAIN;
    while class < CLASSES {
        sizes[class] = size as u16;
        size += if size < 128 { GRAIN } else { 1 << (usize::BITS - 1 - size.leading_zeros() - 3) };
        class += 1;
    }
    sizes
};

pub(crate) const OF_GRAINS: [u8; LARGEST / GRAIN + 1] = {
    let mut table = [1; LARGEST / GRAIN + 1];
    let (mut grains, mut class) = (1, 1);
    while grains < table.len() {
        while (SIZES[class] as usize) < grains * GRAIN {
            class += 1;
        }
        table[grains] = class as u8;
        grains += 1;
    }
    table
};

const _: () = assert!(SIZES[CLASSES - 1] as usize == LARGEST, "the last class is the largest");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_the_smallest_class_that_holds_it() {
        for size in 0..=LARGEST {
            let class = Class::of_size(size);
            assert!(class.size() >= size && class.size().is_multiple_of(GRAIN), "size {size}");
            assert!(class.0 == 1 || Class(class.0 - 1).size() < size, "size {size}");
        }
    }

    #[test]
    fn object_suits_its_class_sizes_and_above_half_of_its_size() {
        for class in Class::all() {
            let below = if class.0 == 1 { 0 } else { Class(class.0 - 1).size() };
            let first = (0..=LARGEST + 1).find(|&size| class.suits(size)).unwrap();
            assert_eq!(first, if class.0 == 1 { 0 } else { (class.size() / 2 + 1).min(below + 1) }, "{class:?}");
            assert!((first..=class.size()).all(|size| class.suits(size)) && !class.suits(class.size() + 1));
        }
    }

    #[test]
    fn at_most_an_eighth_of_an_object_is_wasted() {
        for size in 129..=LARGEST {
            let waste = Class::of_size(size).size() - size;
            assert!(waste * 8 <= Class::of_size(size).size(), "size {size} wastes {waste}");
        }
    }

    #[test]
    fn a_slab_has_eight_of_the_largest_objects() {
        let shapes = [4096, 16384, 65536].map(|page_size| Class::of_size(LARGEST).slab_shape(page_size).objects);
        assert_eq!(shapes, [8; 3]);
    }

    #[test]
    fn slabs_waste_little_on_every_page_size() {
        for page_size in [4096, 16384, 65536] {
            for class in Class::all() {
                let shape = class.slab_shape(page_size);
                let bytes = page_size << shape.order;
                assert_eq!(shape.objects as usize * class.size() + shape.waste, bytes);
                assert!(
                    shape.waste * 100 <= bytes * 9,
                    "{class:?} of {} wastes {} of {bytes}",
                    class.size(),
                    shape.waste
                );
                assert!(shape.objects as usize <= crate::slab::most_objects(page_size), "{class:?} {shape:?}");
                assert!(shape.order <= 6);
            }
        }
    }

    #[test]
    fn an_aligned_request_gets_objects_that_are_all_aligned() {
        for align_bits in 0..=12 {
            for size in (0..5000).step_by(7) {
                let align = 1 << align_bits;
                let class = Class::of_layout(size, align, 4096).unwrap();
                assert!(class.size() >= size && class.size().is_multiple_of(align));
            }
        }
        assert_eq!(Class::of_layout(1, 8192, 4096), None);
        assert_eq!(Class::of_layout(LARGEST + 1, 16, 4096), None);
    }
}
