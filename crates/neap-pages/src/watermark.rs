//! Shortage of a node: its free memory against the watermarks, if there is a budget.
//!
//! # Design
//!
//! The nodes share the budget. While it has room, no node has to free memory, however much it uses.
//! With little room, a node that uses more than its part is short.
//!
//! If the room is at most the sum of all `low`, some node has at most its `low` left of its part.
//! If no node has at most its `high` left, the room is more than the sum of all `high`. So if the
//! nodes together are short, at least one node is short. If no node is short, the nodes together
//! are not short. With one node the two conditions are the same.
//!
//! # Locking
//!
//! This module takes one zone's mutex at a time, for a few loads.

use crate::node_pages::NodePages;
use crate::statistics::Watermarks;
use neap_base::Platform;

/// The shortage of a node.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Shortage {
    /// Whether free memory is at the low watermark or below, where reclaim begins.
    pub is_low: bool,
    /// Pages missing to more than the high watermark, where reclaim ends; 0: the node is not short.
    pub pages: u32,
}

impl Shortage {
    fn of(free: i64, marks: Watermarks) -> Shortage {
        let pages = (i64::from(marks.high) + 1 - free).clamp(0, u32::MAX.into()) as u32;
        Shortage { is_low: free <= i64::from(marks.low), pages }
    }
}

impl<P: Platform> NodePages<P> {
    /// The shortage of a node at the moment.
    pub fn shortage(&self, node: usize) -> Shortage {
        // The first node has the whole budget at first, and gives it up as other nodes need some.
        let first = self.node(0);
        let Some(budget) = first.arena.budget() else { return Shortage::default() };
        let (mut left, mut room) = (i64::from(budget) / self.nodes() as i64, first.arena.reserve());
        let mut sum = Watermarks::default();
        for at in 0..self.nodes() {
            let pages = self.node(at);
            let inner = pages.zone.lock();
            room += i64::from(inner.room());
            left -= if at == node { i64::from(inner.used()) } else { 0 };
            sum = sum.and(pages.lists.limits.now().watermarks);
        }
        let (own, all) = (Shortage::of(left, self.node(node).lists.limits.now().watermarks), Shortage::of(room, sum));
        Shortage { is_low: own.is_low && all.is_low, pages: own.pages.min(all.pages) }
    }
}
