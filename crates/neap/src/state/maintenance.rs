//! State that one tick leaves for the next.
//!
//! # Locking
//! A tick holds the mutex of `seen`. Threads only try to take it.

use crate::state::gated::GatedMutex;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use neap_base::platform::memory::Range;
use neap_base::platform::{Errno, Platform};
use neap_objects::cpu_caches::StackSnapshot;
use neap_objects::size_class::{CLASSES, Class};

/// The state of maintenance.
#[derive(Debug)]
pub(crate) struct Maintenance {
    pub(crate) ticks: AtomicU64,
    /// Number of drains of CPUs by ticks.
    pub(crate) drains: AtomicU64,
    /// Time of the last tick, in the platform's nanoseconds.
    pub(crate) last: AtomicU64,
    /// Number of slow calls while neap had no thread.
    pub(crate) calls: AtomicU32,
    /// Whether a tick within a call stopped at the limit of a call, so that work is left.
    pub(crate) unfinished: AtomicBool,
    /// Bytes of free pages that ticks leave resident.
    pub(crate) kept: AtomicU64,
    /// Number of coming ticks that do nothing about a use above `high`.
    pub(crate) high_rest: AtomicU32,
    /// Bytes in use after the last tick that released memory because of `high`; `u64::MAX` before
    /// the first.
    pub(crate) high_use: AtomicU64,
    /// Address of the [`StackSnapshot`]s, for readers that do not take the mutex. A tick holds the
    /// mutex for long.
    pub(crate) memory: usize,
    /// The stacks of each CPU and class at the last tick: a [`StackSnapshot`] for each slot.
    pub(crate) seen: GatedMutex<Snapshots>,
}

/// Memory of the [`StackSnapshot`]s.
#[derive(Debug)]
pub(crate) struct Snapshots {
    pub(crate) memory: usize,
    /// Ticks in a row in which a CPU was skipped.
    pub(crate) skips: u32,
    /// Ticks in a row in which nothing was released because of an isolated CPU.
    pub(crate) holds: u32,
}

impl Maintenance {
    pub(crate) fn open<P: Platform>(platform: &P) -> Result<Maintenance, Errno> {
        let length = platform.cpus() * CLASSES * size_of::<StackSnapshot>();
        let memory = platform.map(length.next_multiple_of(platform.page_size()))?;
        Ok(Maintenance {
            ticks: AtomicU64::new(0),
            drains: AtomicU64::new(0),
            last: AtomicU64::new(platform.now()),
            calls: AtomicU32::new(0),
            unfinished: AtomicBool::new(false),
            kept: AtomicU64::new(0),
            high_rest: AtomicU32::new(0),
            high_use: AtomicU64::new(u64::MAX),
            memory,
            seen: GatedMutex::new(Snapshots { memory, skips: 0, holds: 0 }),
        })
    }

    /// Unmaps the memory of [`Maintenance::open`].
    ///
    /// # Safety
    /// No thread ticks any more.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        let mapping = self.mapping(platform);
        // SAFETY: the mapping was made by `open`, and no thread ticks any more (the caller's
        // promise).
        unsafe { platform.unmap(mapping.start, mapping.length) };
    }

    /// The memory that [`Maintenance::open`] mapped.
    pub(crate) fn mapping<P: Platform>(&self, platform: &P) -> Range {
        let length = platform.cpus() * CLASSES * size_of::<StackSnapshot>();
        Range { start: self.memory, length: length.next_multiple_of(platform.page_size()) }
    }

    /// Bytes of free pages that the program keeps resident.
    pub(crate) fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }
}

impl Snapshots {
    /// Stores the state of a CPU's stacks of a class. Returns whether the state is the one of the
    /// last tick, and a stack has capacity.
    pub(crate) fn is_idle(&mut self, cpu: usize, class: Class, now: StackSnapshot) -> bool {
        let entry = core::ptr::with_exposed_provenance_mut::<StackSnapshot>(self.memory)
            .wrapping_add(cpu * CLASSES + class.index());
        // SAFETY: the mapping has an entry per CPU and class; zeroes are a valid `StackSnapshot`;
        // the lock is held.
        let before = unsafe { entry.replace(now) };
        before == now && now.active
    }
}
