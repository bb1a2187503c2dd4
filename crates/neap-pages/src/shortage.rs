//! Whether a node is short of memory: what the watermarks say, where there is a budget.
//!
//! Sits between the zones and whoever runs background reclaim. The budget is all nodes' together, and none has to give anything up while there is room in it, however
//! much it uses. Where there is little room, whoever uses more than its part is short. If the room is at most the sum of all `low`, some node has
//! at most its `low` left of its part; and when none has at most its `high` left, the room is more than the sum of these. So when all are
//! short somebody is, and when nobody is, all are not. With one node both are the same numbers. Holds a zone's lock at a time, for a few loads. No state.

use crate::node_pages::NodePages;
use crate::statistics::Watermarks;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::Platform;

/// How short a node is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Shortage {
    /// Whether it is at its low watermark or below, where reclaim begins.
    pub is_low: bool,
    /// Pages that are missing until it is above the high one, where reclaim ends; 0: it is not short.
    pub pages: u32,
}

impl Shortage {
    fn of(free: i64, marks: Watermarks) -> Shortage {
        let pages = (i64::from(marks.high) + 1 - free).clamp(0, u32::MAX.into()) as u32;
        Shortage { is_low: free <= i64::from(marks.low), pages }
    }
}

impl<P: Platform> NodePages<P> {
    /// How short a node is at the moment.
    pub fn shortage(&self, node: usize) -> Shortage {
        // The first node has the whole budget at first, and gives it up as others need some.
        let first = self.node(0);
        let Some(budget) = first.zone.budget else { return Shortage::default() };
        let (mut left, mut room) =
            (i64::from(budget) / self.nodes() as i64, i64::from(first.arena.reserve.load(Relaxed)));
        let mut sum = Watermarks::default();
        for at in 0..self.nodes() {
            let pages = self.node(at);
            let inner = pages.zone.lock();
            room += i64::from(inner.room());
            left -= if at == node { i64::from(inner.used()) } else { 0 };
            sum = sum.and(pages.lists.limits.watermarks);
        }
        let (own, all) = (Shortage::of(left, self.node(node).lists.limits.watermarks), Shortage::of(room, sum));
        Shortage { is_low: own.is_low && all.is_low, pages: own.pages.min(all.pages) }
    }
}
