//! The places of the CPUs' page lists in memory, for a debugger or a monitor that reads the memory
//! of this process from outside.
//!
//! A monitor computes offsets and sizes from the fields alone, so it may be of another version than
//! this crate. It takes no lock: while threads allocate, it may read numbers of different moments.

use crate::node_pages::NodePages;
use neap_base::Platform;

impl<P: Platform> NodePages<P> {
    /// Returns names and values: the length of a CPU's lists, and offsets in them. The addresses of
    /// the tables are [`NodePages::lists_table`]. They stay the same until the pages are closed.
    pub fn memory_layout(&self) -> [(&'static str, u64); 4] {
        let parts = self.node(0).lists.parts();
        [
            ("list_length", parts.length),
            ("in_list_count", parts.count),
            ("in_list_run_pages", parts.run_pages),
            ("in_list_high", parts.high),
        ]
        .map(|(name, value)| (name, value as u64))
    }

    /// Address of the lists of a node's first CPU; those of the other CPUs follow.
    pub fn lists_table(&self, node: usize) -> usize {
        self.node(node).lists.table()
    }

    /// The most pages that lists of a node keep on a CPU that has not used them yet.
    pub fn first_list_high(&self, node: usize) -> u32 {
        self.node(node).lists.first_sizes().high
    }
}
