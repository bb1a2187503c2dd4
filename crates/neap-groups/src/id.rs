//! Ids of groups, and payers of charges.
//!
//! A [`GroupId`] is an index and a generation, so an id that outlived its group names nothing. An
//! index with all generations used is never used again. A [`Payer`] combines an id, the kind of
//! memory, and the memory's node. Stocks, objects, and programs that charge by hand keep payers.
//! This module has no state and no lock.

use core::fmt;
use neap_base::finding::At;
use neap_base::listed_enum;
use neap_os::nodes::MAX_NODES;

pub(crate) const INDEX_BITS: u32 = 21;
const GENERATION_BITS: u32 = 15;
pub(crate) const ID_BITS: u32 = INDEX_BITS + GENERATION_BITS;
const NODE_BITS: u32 = MAX_NODES.ilog2();
const KIND_BITS: u32 = 2;
/// Bit of a payer for uncharged bytes of a deleted group.
const HEIR_BIT: u32 = ID_BITS + NODE_BITS + KIND_BITS;

/// Bits of a [`Payer`].
pub const PAYER_BITS: u32 = HEIR_BIT + 1;

/// Maximum number of ids at a time: groups, and deleted ones that memory is still booked under.
pub const MOST_GROUPS: u32 = (1 << INDEX_BITS) - 1;

/// The last generation of an index.
pub(crate) const LAST_GENERATION: u32 = (1 << GENERATION_BITS) - 1;

/// Id of a group, valid while the group exists.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[repr(transparent)]
pub struct GroupId(u64);

impl GroupId {
    /// The root, the ancestor of every group.
    pub const ROOT: GroupId = GroupId::new(0, 1);

    /// Makes an id. Generations begin at 1, so no id is 0.
    pub(crate) const fn new(index: u32, generation: u32) -> GroupId {
        GroupId(index as u64 | (generation as u64) << INDEX_BITS)
    }

    /// Returns the index of its entry, which earlier and later ids may share.
    pub const fn index(self) -> u32 {
        self.0 as u32 & MOST_GROUPS
    }

    pub(crate) const fn generation(self) -> u32 {
        (self.0 >> INDEX_BITS) as u32 & LAST_GENERATION
    }

    /// Returns the id as a number, never 0.
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns the id with these bits. Accepts every number; the id may name no group.
    pub const fn from_bits(bits: u64) -> GroupId {
        GroupId(bits & ((1 << ID_BITS) - 1))
    }

    /// Returns the payer for memory of a kind on a node that is charged to the group.
    pub const fn payer(self, kind: Kind, node: usize) -> Payer {
        Payer(self.0 | (node as u64 % MAX_NODES as u64) << ID_BITS | (kind as u64) << (ID_BITS + NODE_BITS))
    }
}

impl From<GroupId> for At {
    fn from(id: GroupId) -> At {
        At { thing: "group", number: id.to_bits() }
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index(), self.generation())
    }
}

listed_enum! {
    /// Kinds of memory that are counted separately.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u8)]
    pub enum Kind {
        /// Runs of pages: allocations above the largest size class.
        Pages = "pages",
        /// Objects of a size class.
        Objects = "objects",
        /// Per-CPU data, all copies.
        PerCpu = "per_cpu",
        /// Bytes charged by hand.
        ByHand = "by_hand",
    }
}

/// Group, kind and node of a charge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Payer(u64);

impl Payer {
    /// Returns the group that was charged. It may have been deleted since.
    pub const fn id(self) -> GroupId {
        GroupId::from_bits(self.0)
    }

    /// Returns the kind of memory.
    pub const fn kind(self) -> Kind {
        Kind::ALL[(self.0 >> (ID_BITS + NODE_BITS)) as usize % Kind::ALL.len()]
    }

    /// Returns the node of the memory.
    pub const fn node(self) -> usize {
        (self.0 >> ID_BITS) as usize % MAX_NODES
    }

    /// Returns the payer as a number, never 0.
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns the payer with these bits.
    pub const fn from_bits(bits: u64) -> Payer {
        Payer(bits & ((1 << PAYER_BITS) - 1))
    }

    /// Returns the payer under which uncharged bytes of a deleted group are stocked. Charges by the
    /// group's id do not find them.
    pub(crate) const fn of_heir(self) -> Payer {
        Payer(self.0 | 1 << HEIR_BIT)
    }

    pub(crate) const fn is_of_heir(self) -> bool {
        self.0 >> HEIR_BIT & 1 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payer_is_all_that_it_was_made_of() {
        for (index, generation) in [(0, 1), (MOST_GROUPS, 1), (7, LAST_GENERATION), (MOST_GROUPS, LAST_GENERATION)] {
            let id = GroupId::new(index, generation);
            assert_eq!((id.index(), id.generation()), (index, generation));
            assert_eq!(GroupId::from_bits(id.to_bits()), id);
            for kind in Kind::ALL {
                for node in [0, 1, MAX_NODES - 1] {
                    let payer = id.payer(kind, node);
                    for payer in [payer, payer.of_heir()] {
                        assert_eq!((payer.id(), payer.kind(), payer.node()), (id, kind, node));
                        assert!(payer.to_bits() != 0 && payer.to_bits() >> PAYER_BITS == 0);
                        assert_eq!(Payer::from_bits(payer.to_bits()), payer);
                    }
                    assert_ne!(payer, payer.of_heir());
                }
            }
        }
    }
}
