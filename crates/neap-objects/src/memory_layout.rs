//! The places of the CPUs' stacks and of charged objects in memory, for a debugger or a monitor
//! that reads the memory of this process from outside.
//!
//! A monitor computes offsets and sizes from the fields alone, so it may be of another version than
//! this crate. It takes no lock: while threads allocate, it may read numbers of different moments.

use crate::class_cache::{ClassCache, SharedCache};
use crate::cpu_caches::CpuCaches;
use crate::object_state::{BEHIND, PAID, SAMPLED};
use crate::objects::Objects;
use crate::other_nodes::Others;
use crate::payers::{PayersLayout, payers_layout};
use crate::region::StackId;
use crate::sheaf::{SheafLayout, sheaf_layout};
use crate::size_class::GRAIN;
use crate::strided_run;
use core::mem::offset_of;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::{CpuLock, Platform};
use neap_os::rseq::Stack;
use neap_pages::Frame;

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

impl<P: Platform> Objects<P> {
    /// Returns names and values that lead to the [charged](crate::charged) objects in caches, and
    /// from an object to its owner:
    /// * `at_owned` is a byte that is 0 if no object has ever had an owner.
    /// * `barns_table` has the barns of the first node by class, and `other_barns_table` those of
    ///   the other nodes. From `in_barn_chains` on, a barn has `chains` words, each with the first
    ///   of a list of full sheaves. A sheaf has as many cells with objects as it counts, or words
    ///   with strided runs if its capacity is 0.
    /// * `origins_table` has the words of the [state tables](crate::object_state).
    /// * `frames_from_zero` is the address that the frame of address 0 would have. The words of
    ///   frames are described in [`payers`](crate::payers).
    ///
    /// They stay the same until the instance is closed.
    pub fn charged_layout(&self) -> [(&'static str, u64); 29] {
        let (fast_path, SheafLayout { chains_at, chains, next, count, capacity, contents }) =
            (self.fast_path(), sheaf_layout());
        let PayersLayout { sole_bit, vector_address_bits, vector_shift } = payers_layout();
        [
            ("at_owned", self.owned.as_ptr().expose_provenance()),
            ("barns_table", self.caches.as_ptr().expose_provenance()),
            ("other_barns_table", self.others.expose_provenance()),
            ("other_barns_stride", size_of::<Others>()),
            ("nodes", self.pages.nodes()),
            ("barn_stride", size_of::<SharedCache>()),
            ("in_barn_chains", SharedCache::VALUE_AT + offset_of!(ClassCache, full) + chains_at),
            ("chains", chains),
            ("in_sheaf_next", next),
            ("in_sheaf_count", count),
            ("in_sheaf_capacity", capacity),
            ("in_sheaf_contents", contents),
            ("run_address_bits", strided_run::ADDRESS as usize),
            ("origins_table", core::ptr::from_ref(&self.states).expose_provenance()),
            ("origins", size_of_val(&self.states) / size_of::<usize>()),
            ("shift_bits", usize::BITS.ilog2() as usize),
            ("behind", BEHIND),
            ("paid", PAID.into()),
            ("sampled", SAMPLED.into()),
            ("arena_base", fast_path.base.load(Relaxed)),
            ("at_arena_pages", self.pages.frames().pages_word().expose_provenance()),
            ("page_shift", self.pages.page_shift() as usize),
            ("frames_from_zero", fast_path.frames.load(Relaxed).expose_provenance()),
            ("frame_length", size_of::<Frame>()),
            ("in_frame_word", Frame::WORD_AT),
            ("sole_bit", sole_bit as usize),
            ("vector_address_bits", vector_address_bits as usize),
            ("vector_shift", vector_shift as usize),
            ("grain", GRAIN),
        ]
        .map(|(name, value)| (name, value as u64))
    }
}
