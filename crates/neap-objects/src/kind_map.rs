//! The kind map: class and home CPU of the objects in each 4 KiB of the arena.
//!
//! Every free reads an entry, and no lock protects it. An entry's class changes only while the
//! program has no object of the range.

use crate::size_class::Class;
use core::sync::atomic::{AtomicU32, Ordering};

/// Number of low bits of an entry that hold the home CPU.
pub(crate) const HOME_BITS: u32 = u16::BITS;

/// An entry of the kind map, which describes 4 KiB of the arena. Bits 0 to 15 are the home CPU.
/// Bits 16 to 31 are the [offset](Class::stack_offset) of the class's stack in a region; 0 if the
/// range holds no objects.
///
/// The home is the CPU that the objects were last handed to in bulk. A whole
/// [part](Class::home_bytes) of a slab has one home. An object that is freed on another CPU is
/// remote there. Remote objects return to the barn in batches, and malloc does not pop them.
/// Otherwise different CPUs would use neighbouring objects, and the cache lines of objects and
/// state bytes would move between these CPUs. The home is a hint: a wrong one costs time only.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct KindEntry(AtomicU32);

impl KindEntry {
    /// Bytes of the arena that an entry describes, on every page size, as a power of two.
    pub const SHIFT: u32 = 12;

    /// Binary logarithm of the bytes of arena for a byte of the kind map. An entry has four bytes.
    pub const TABLE_SHIFT: u8 = 10;

    /// The value of the entry.
    #[inline(always)]
    pub(crate) fn kind(&self) -> PageKind {
        PageKind(self.0.load(Ordering::Relaxed))
    }

    /// The class of the objects in the range; [`Class::NONE`] if there are none.
    pub fn class(&self) -> Class {
        self.kind().class()
    }

    /// Sets the class of the range; [`Class::NONE`] for no objects. The home becomes 0.
    pub fn set(&self, class: Class) {
        self.0.store(u32::from(class.stack_offset()) << HOME_BITS, Ordering::Relaxed);
    }

    /// The range's home CPU, cut to 16 bits. No kernel supports more CPUs than fit.
    pub fn home(&self) -> u16 {
        self.kind().home()
    }

    /// Makes a CPU the home of the range. The caller has an object of the slab, so the class does
    /// not change meanwhile.
    pub fn set_home(&self, cpu: u16) {
        let entry = self.0.load(Ordering::Relaxed);
        let new = entry >> HOME_BITS << HOME_BITS | u32::from(cpu);
        // Every free reads the entry, so it is written only if its value changes.
        if entry != new {
            self.0.store(new, Ordering::Relaxed);
        }
    }
}

/// The value of an entry of the kind map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct PageKind(u32);

impl PageKind {
    /// The class of the objects in the range.
    #[inline]
    pub fn class(self) -> Class {
        Class::of_stack_offset(self.stack_offset())
    }

    /// Offset of the class's stack in a region, in bytes; 0 if the range holds no objects.
    #[inline(always)]
    pub(crate) fn stack_offset(self) -> u16 {
        (self.0 >> HOME_BITS) as u16
    }

    /// The range's home CPU, cut to 16 bits.
    #[inline(always)]
    pub(crate) fn home(self) -> u16 {
        self.0 as u16
    }
}
