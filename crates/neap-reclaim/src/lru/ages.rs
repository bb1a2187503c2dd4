//! Ages of evicted items, counted in later evictions. The age tells a cache whether it should have
//! protected the item.
//!
//! # Design
//! Each sub-list counts its evictions. A [`Stamp`] is the number of one eviction. An evicted item
//! that is needed again is a *refault* if its sub-list has since evicted no more items than it
//! holds. The list would still have the item if the cache had kept it in place of items not needed
//! meanwhile.
//!
//! Source: Linux's workingset detection, by idea.

use super::block;
use super::list::LruList;
use super::registry::Site;
use super::sublist::Sub;
use crate::Host;
use core::num::NonZeroU64;
use core::sync::atomic::Ordering;
use neap_groups::GroupId;

/// Number of bits of a stamp that count evictions. The rest names group and node.
const NUMBER_BITS: u32 = 40;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;

/// The eviction of an item: 8 bytes that a cache keeps in place of the value.
///
/// 40 bits are the number of the eviction, and 24 bits are a hash of group and node. The hash
/// detects a stamp of another group or node. A stamp is a hint: a mistake only protects one item in
/// vain.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stamp(NonZeroU64);

impl Stamp {
    fn new(group: GroupId, node: usize, number: u64) -> Option<Stamp> {
        // Fibonacci hashing: the high bits depend on all bits.
        let name = (group.to_bits() ^ (node as u64) << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        NonZeroU64::new(name & !NUMBER | number & NUMBER).map(Stamp)
    }

    /// Returns its bits, which are not 0.
    pub const fn to_bits(self) -> u64 {
        self.0.get()
    }

    /// Returns the stamp with these bits; `None` for 0.
    pub const fn from_bits(bits: u64) -> Option<Stamp> {
        match NonZeroU64::new(bits) {
            Some(bits) => Some(Stamp(bits)),
            None => None,
        }
    }

    /// Returns the number of evictions between this and a later stamp; `None` if the two are of
    /// different groups or nodes.
    fn distance(self, later: Stamp) -> Option<u64> {
        let (this, later) = (self.to_bits(), later.to_bits());
        ((this ^ later) & !NUMBER == 0).then_some(later.wrapping_sub(this) & NUMBER)
    }
}

/// Evictions and refaults of items of a group.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Turnover {
    /// Number of evicted items.
    pub evicted: u64,
    /// Number of evicted items that were needed again while the list would still have had them. If
    /// they are a considerable part of the evictions, the items in use do not fit.
    pub refaults: u64,
}

// All accesses are Relaxed: the counters publish no other data.
impl LruList {
    /// Calls `with` with the sub-list of a group on a node. Returns `None` if there is no such
    /// sub-list.
    fn with_sub<H, R>(
        self,
        site: &Site<'_, H>,
        group: GroupId,
        node: usize,
        with: impl FnOnce(&Sub) -> R,
    ) -> Option<R> {
        let reading = site.groups.reading();
        let block = self.head().block(self.seat(site, &reading, group)?.slot)?;
        // SAFETY: the block was found within the read, which is held, so it is not freed.
        Some(with(unsafe { block::sub(block, node) }))
    }

    /// Counts an eviction of an item of a group, and returns its stamp. `None` if the group is gone
    /// or never had an item on the node.
    pub fn stamp<H: Host>(self, site: &Site<'_, H>, group: GroupId, node: usize) -> Option<Stamp> {
        let node = node.min(self.head().nodes - 1);
        let evict = |sub: &Sub| sub.evicted.fetch_add(1, Ordering::Relaxed) + 1;
        Stamp::new(group, node, self.with_sub(site, group, node, evict)?)
    }

    /// Returns whether the sub-list of a group has evicted at most `most` items since a stamp. If
    /// so, counts a refault. Returns false for a stamp of another group or node.
    pub fn refault<H: Host>(self, site: &Site<'_, H>, group: GroupId, node: usize, stamp: Stamp, most: usize) -> bool {
        let node = node.min(self.head().nodes - 1);
        let look = |sub: &Sub| {
            let now = Stamp::new(group, node, sub.evicted.load(Ordering::Relaxed));
            let is_near = now.and_then(|now| stamp.distance(now)).is_some_and(|distance| distance <= most as u64);
            sub.refaults.fetch_add(is_near.into(), Ordering::Relaxed);
            is_near
        };
        self.with_sub(site, group, node, look).unwrap_or(false)
    }

    /// Returns the evictions and refaults of a group on a node, without those of its descendants.
    pub fn turnover<H>(self, site: &Site<'_, H>, group: GroupId, node: usize) -> Turnover {
        let read = |sub: &Sub| Turnover {
            evicted: sub.evicted.load(Ordering::Relaxed),
            refaults: sub.refaults.load(Ordering::Relaxed),
        };
        self.with_sub(site, group, node, read).unwrap_or_default()
    }
}
