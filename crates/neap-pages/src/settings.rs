//! Settings of the page layer: the numbers of an open instance that may change while threads use
//! it.

use crate::policy::{Limits, NOMINAL, watermarks};

/// Settings of the page layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The most pages that may be in use.
    pub budget: Option<u32>,
    /// The most pages that a CPU's list keeps. 0 means no lists, `None` a size that is tuned at run
    /// time.
    pub list_high: Option<u32>,
    /// The most doublings of the pages that move at once.
    pub batch_scale: u32,
}

impl Settings {
    /// Bounds of the lists of each of `nodes` nodes.
    pub(crate) fn limits(&self, nodes: u32, cpus: usize, page_shift: u32) -> Limits {
        // Lists and watermarks are for a node's equal part of the budget, however the nodes use it.
        let part = self.budget.unwrap_or((NOMINAL >> page_shift) as u32) / nodes;
        let marks = self.budget.map(|_| watermarks(part, page_shift)).unwrap_or_default();
        let limits = Limits::new(part, cpus, page_shift, marks).with_scale(self.batch_scale);
        self.list_high.map_or(limits, |pages| limits.with_size(pages))
    }
}
