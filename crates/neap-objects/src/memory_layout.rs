//! The places of the CPUs' stacks in memory, for a debugger or a monitor that reads the memory of
//! this process from outside.
//!
//! A monitor computes offsets and sizes from the fields alone, so it may be of another version than
//! this crate. It takes no lock: while threads allocate, it may read numbers of different moments.

use crate::cpu_caches::CpuCaches;
use crate::region::StackId;
use core::mem::offset_of;
use neap_base::CpuLock;
use neap_os::rseq::Stack;

impl CpuCaches {
    /// Returns names and values. `regions_table` has, for each CPU, a word with the address of the
    /// CPU's region, or 0. From `in_region_stacks` on, a region has `stacks_of_class` stacks for
    /// each class from 1 on, each with the addresses of cells. They stay the same until the slots
    /// are closed.
    pub fn memory_layout(&self) -> [(&'static str, u64); 9] {
        [
            ("cpus", self.cpus()),
            ("regions_table", self.locks().expose_provenance() + CpuLock::<usize>::VALUE_AT),
            ("regions_stride", size_of::<CpuLock<usize>>()),
            ("in_region_stacks", usize::from(StackId::FIRST.offset())),
            ("stacks_of_class", StackId::OF_CLASS),
            ("stack_length", size_of::<Stack>()),
            ("in_stack_head", offset_of!(Stack, head)),
            ("in_stack_bottom", offset_of!(Stack, bottom)),
            ("in_stack_end", offset_of!(Stack, end)),
        ]
        .map(|(name, value)| (name, value as u64))
    }
}
