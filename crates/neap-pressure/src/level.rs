//! A level that limits memory: a group, the machine, or a limit of the process. All functions are
//! pure arithmetic.
//!
//! # Used memory
//!
//! The kernel kills a process in a group only after reclaim failed. So memory that reclaim can take
//! without swapping counts as free:
//!
//! ```text
//! used        = usage - reclaimable
//! reclaimable = inactive_file + active_file + slab_reclaimable - dirty - writeback     version 2
//! reclaimable = total_inactive_file + total_active_file - total_dirty - total_writeback  version 1
//! used        = MemTotal - MemAvailable                                                the machine
//! ```
//!
//! Files in tmpfs and shared memory are on the lists of anonymous memory, so they count as used.
//! Dirty pages have to be written first. That may take longer than an allocation can wait, so they
//! count as used, too. Version 1 does not say which part of its slabs is reclaimable, so slabs
//! count as used there.

/// Kind of a level that limits memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LimitedBy {
    /// A visible group.
    Group,
    /// An ancestor above the mount. The files of a version 1 group show the smallest limit of all
    /// its ancestors. The usage of that ancestor is not visible. It is at least the usage of the
    /// topmost visible group, which is in the level.
    HiddenAncestor,
    /// The machine, by `/proc/meminfo`.
    Machine,
    /// `RLIMIT_AS`: address space of the process, with or without memory behind it.
    AddressSpace,
    /// `RLIMIT_DATA`: private writable memory of the process.
    Data,
}

impl LimitedBy {
    /// All kinds.
    pub const ALL: [LimitedBy; 5] =
        [LimitedBy::Group, LimitedBy::HiddenAncestor, LimitedBy::Machine, LimitedBy::AddressSpace, LimitedBy::Data];

    /// Name for people and machines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            LimitedBy::Group => "group",
            LimitedBy::HiddenAncestor => "hidden ancestor",
            LimitedBy::Machine => "machine",
            LimitedBy::AddressSpace => "address space",
            LimitedBy::Data => "data",
        }
    }
}

/// Swap of a group.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Swap {
    /// The level has no limit on swap, or the limit is not known.
    #[default]
    Unlimited,
    /// Version 2: swapped memory alone.
    Standalone {
        /// `memory.swap.max`.
        limit: u64,
        /// `memory.swap.current`.
        usage: u64,
    },
    /// Version 1: memory and swapped memory together.
    Together {
        /// `memory.memsw.limit_in_bytes`.
        limit: u64,
        /// `memory.memsw.usage_in_bytes`.
        usage: u64,
    },
}

/// A level and its numbers, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryLevel {
    /// Kind of the level.
    pub owner: LimitedBy,
    /// Length of the group's path: a prefix of the path of the process's own group.
    pub(crate) path_length: usize,
    /// Hard limit; `None` if there is none or it cannot be read.
    pub limit: Option<u64>,
    /// Limit above which the kernel throttles (`memory.high`).
    pub high: Option<u64>,
    /// Charged memory; `None` if it cannot be read.
    pub usage: Option<u64>,
    /// Part of the usage that reclaim takes without swapping.
    pub reclaimable: u64,
    /// Swap.
    pub swap: Swap,
}

impl MemoryLevel {
    pub(crate) const fn new(owner: LimitedBy) -> MemoryLevel {
        MemoryLevel {
            owner,
            path_length: 0,
            limit: None,
            high: None,
            usage: None,
            reclaimable: 0,
            swap: Swap::Unlimited,
        }
    }

    /// Usage without its reclaimable part.
    #[must_use]
    pub fn used(&self) -> Option<u64> {
        Some(self.usage?.saturating_sub(self.reclaimable))
    }

    /// Bytes until the nearer of two hard limits: on memory, and on memory and swap together.
    /// `None` without a limit on memory, or if no usage is known.
    #[must_use]
    pub fn headroom(&self) -> Option<u64> {
        let Swap::Together { limit: both_limit, usage: both_usage } = self.swap else {
            return self.memory_headroom();
        };
        let both_used = both_usage.saturating_sub(self.reclaimable);
        // If the usage of memory is not known, the usage of memory and swap together replaces it.
        // That usage is at least as large.
        let used = self.used().unwrap_or(both_used);
        let memory = self.limit?.saturating_sub(used);
        // Memory and swap together may reach their limit before memory does. The kernel keeps their
        // limit at or above that of memory. So if memory has no limit, both together have none.
        Some(memory.min(both_limit.saturating_sub(both_used)))
    }

    fn memory_headroom(&self) -> Option<u64> {
        Some(self.limit?.saturating_sub(self.used()?))
    }

    /// Bytes until the limit above which the kernel throttles.
    #[must_use]
    pub fn soft_headroom(&self) -> Option<u64> {
        Some(self.high?.saturating_sub(self.used()?))
    }

    /// Bytes that the kernel may still swap out for this level. `None` if the level does not limit
    /// them.
    #[must_use]
    pub fn swap_headroom(&self) -> Option<u64> {
        match self.swap {
            Swap::Unlimited => None,
            Swap::Standalone { limit, usage } => Some(limit.saturating_sub(usage)),
            Swap::Together { limit, usage } => {
                let both = limit.saturating_sub(usage.saturating_sub(self.reclaimable));
                Some(both.saturating_sub(self.memory_headroom().unwrap_or(0)))
            }
        }
    }
}

/// Returns the level with the smallest value. If several levels have that value, returns the first.
pub(crate) fn smallest(
    levels: impl Iterator<Item = MemoryLevel>,
    value: impl Fn(&MemoryLevel) -> Option<u64>,
) -> Option<MemoryLevel> {
    let valued = levels.filter(|level| value(level).is_some());
    valued.min_by_key(|level| value(level))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEVEL: MemoryLevel = MemoryLevel {
        limit: Some(100),
        usage: Some(90),
        reclaimable: 30,
        high: Some(70),
        ..MemoryLevel::new(LimitedBy::Group)
    };

    #[test]
    fn reclaimable_memory_is_headroom() {
        assert_eq!((LEVEL.used(), LEVEL.headroom(), LEVEL.soft_headroom()), (Some(60), Some(40), Some(10)));
        let over = MemoryLevel { reclaimable: 1000, ..LEVEL };
        assert_eq!((over.used(), over.headroom()), (Some(0), Some(100)));
        let above = MemoryLevel { usage: Some(1000), ..LEVEL };
        assert_eq!((above.headroom(), above.soft_headroom()), (Some(0), Some(0)));
        assert_eq!(MemoryLevel { usage: None, ..LEVEL }.headroom(), None);
        assert_eq!(MemoryLevel { limit: None, ..LEVEL }.headroom(), None);
    }

    #[test]
    fn memory_and_swap_together_may_be_the_nearer_wall() {
        let level = MemoryLevel { swap: Swap::Together { limit: 110, usage: 130 }, ..LEVEL };
        assert_eq!((level.headroom(), level.swap_headroom()), (Some(10), Some(0)));
        let level = MemoryLevel { swap: Swap::Together { limit: 200, usage: 90 }, ..LEVEL };
        assert_eq!((level.headroom(), level.swap_headroom()), (Some(40), Some(100)));
        let unknown = MemoryLevel { usage: None, reclaimable: 0, ..level };
        assert_eq!(unknown.headroom(), Some(10), "memory is at most memory and swap");
        assert_eq!(MemoryLevel { limit: None, ..level }.headroom(), None);
        let level = MemoryLevel { swap: Swap::Standalone { limit: 5, usage: 9 }, ..LEVEL };
        assert_eq!((level.headroom(), level.swap_headroom()), (Some(40), Some(0)));
    }

    #[test]
    fn the_first_of_equal_levels_is_the_smallest() {
        let other = MemoryLevel { owner: LimitedBy::Machine, ..LEVEL };
        assert_eq!(smallest([LEVEL, other].into_iter(), MemoryLevel::headroom), Some(LEVEL));
        assert_eq!(smallest([MemoryLevel::new(LimitedBy::Group)].into_iter(), MemoryLevel::headroom), None);
    }
}
