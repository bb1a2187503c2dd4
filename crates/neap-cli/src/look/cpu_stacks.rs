//! The CPUs' stacks of objects in the [memory](super::remote_memory) of a process.
//!
//! The process may have published any layout, and may have any numbers in its memory. So sizes are
//! bounded, and sums do not overflow.

use anyhow::{Context, Result, ensure};

use super::remote_memory::{MemoryLayout, RemoteMemory, long_at, words_of};
use super::stat_reader::Page;

/// Most CPUs. A layout with more is damaged.
pub(crate) const CPUS_MAX: usize = 1024;
/// Most bytes of the stacks of a CPU, and of a stack.
const STACKS_BYTES_MAX: usize = 64 << 10;
const STACK_BYTES_MAX: usize = 256;
/// Most bytes of stacks that are read at once.
const AT_ONCE: usize = 1 << 20;

/// A stack of a CPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenStack {
    pub(crate) cpu: usize,
    pub(crate) class: usize,
    /// Address of the lowest cell, and number of cells with objects.
    pub(crate) bottom: u64,
    pub(crate) count: u64,
    /// Whether the CPU uses the stack.
    pub(crate) is_active: bool,
}

/// The layout of the stacks in a page.
pub(crate) fn layout(page: &Page) -> Result<MemoryLayout<'_>> {
    MemoryLayout::of(page, "stacks").context("its page has no layout of stacks")
}

/// Calls `see` with every stack of every CPU that has some. Reads once for the table of CPUs, and
/// once for each [`AT_ONCE`] bytes of stacks.
pub(crate) fn each(
    memory: &RemoteMemory<'_>,
    layout: MemoryLayout<'_>,
    classes: usize,
    see: &mut dyn FnMut(SeenStack) -> Result<()>,
) -> Result<()> {
    let cpus = layout.size("cpus", CPUS_MAX)?;
    let (first, stride) = (layout.get("regions_table")?, layout.get("regions_stride")?);
    let (of_class, length) = (layout.size("stacks_of_class", 8)?, layout.size("stack_length", STACK_BYTES_MAX)?);
    let [head, bottom, end] = [
        layout.size("in_stack_head", STACK_BYTES_MAX)?,
        layout.size("in_stack_bottom", STACK_BYTES_MAX)?,
        layout.size("in_stack_end", STACK_BYTES_MAX)?,
    ];
    let all = classes.saturating_sub(1) * of_class * length;
    ensure!(all <= STACKS_BYTES_MAX, "its page has stacks of {all} bytes");
    if all == 0 {
        return Ok(());
    }
    let in_region = layout.get("in_region_stacks")?;
    let table = (0..cpus as u64).map(|cpu| (first.wrapping_add(stride.wrapping_mul(cpu)), 8));
    let regions = words_of(&memory.read(table.collect())?).into_iter().enumerate();
    let regions: Vec<(usize, u64)> = regions.filter(|(_, region)| *region != 0).collect();
    for regions in regions.chunks((AT_ONCE / all).max(1)) {
        let places = regions.iter().map(|(_, region)| (region.wrapping_add(in_region), all));
        let bytes = memory.read(places.collect())?;
        for ((cpu, _), stacks) in regions.iter().zip(bytes.chunks_exact(all)) {
            for (number, stack) in stacks.chunks_exact(length).enumerate() {
                let [head, bottom, end] = [head, bottom, end].map(|at| long_at(stack, at));
                // Class 0 has no stacks.
                let (class, count) = (1 + number / of_class, head.saturating_sub(bottom) / 8);
                see(SeenStack { cpu: *cpu, class, bottom, count, is_active: end != bottom })?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::allowance::Allowance;
    use crate::look::remote_memory::tests::counted;
    use core::time::Duration;
    use serde_json::{Map, Value, json};

    /// Words of a stack, classes, and stacks of a class.
    const STACK: usize = 4;
    const CLASSES: usize = 5;
    const OF_CLASS: usize = 2;

    /// The layout of stacks in this process, with `table` as the table of CPUs.
    fn layout(table: &[u64]) -> Map<String, Value> {
        let layout = json!({
            "cpus": table.len(), "regions_table": table.as_ptr().addr(), "regions_stride": 8, "in_region_stacks": 16,
            "stacks_of_class": OF_CLASS, "stack_length": 8 * STACK, "in_stack_head": 0, "in_stack_bottom": 8,
            "in_stack_end": 16,
        });
        layout.as_object().unwrap().clone()
    }

    /// Regions of two words and the stacks. The stack `number` of CPU `cpu` has `cpu + number`
    /// objects.
    fn regions(cpus: usize) -> Vec<Vec<u64>> {
        let stack = |cpu: usize, number: usize| [1000 + 8 * (cpu + number) as u64, 1000, 2000, 0];
        let stacks = |cpu| (0..(CLASSES - 1) * OF_CLASS).flat_map(move |number| stack(cpu, number));
        (0..cpus).map(|cpu| [7, 7].into_iter().chain(stacks(cpu)).collect()).collect()
    }

    #[derive(Debug, PartialEq)]
    struct Seen {
        /// CPU, class and number of objects of each stack.
        stacks: Vec<(usize, usize, u64)>,
        reads: usize,
    }

    fn seen(layout: &Map<String, Value>) -> Result<Seen> {
        let allowance = Allowance::new(Duration::from_secs(1000));
        let (memory, reads) = counted(&allowance);
        let mut stacks = Vec::new();
        let see = &mut |stack: SeenStack| {
            stacks.push((stack.cpu, stack.class, stack.count));
            Ok(())
        };
        each(&memory, MemoryLayout::made_up(layout), CLASSES, see)?;
        Ok(Seen { stacks, reads: reads.load(core::sync::atomic::Ordering::Relaxed) })
    }

    #[test]
    fn stacks_of_many_cpus_take_few_reads() {
        let regions = regions(CPUS_MAX);
        // Every third CPU has no region.
        let address = |(cpu, region): (usize, &Vec<u64>)| if cpu % 3 == 2 { 0 } else { region.as_ptr().addr() as u64 };
        let table: Vec<u64> = regions.iter().enumerate().map(address).collect();
        let stacks = |cpu| (0..(CLASSES - 1) * OF_CLASS).map(move |at| (cpu, 1 + at / OF_CLASS, (cpu + at) as u64));
        let stacks = (0..CPUS_MAX).filter(|cpu| cpu % 3 != 2).flat_map(stacks).collect();
        assert_eq!(seen(&layout(&table)).unwrap(), Seen { stacks, reads: 2 });
    }

    #[test]
    fn layouts_of_stacks_without_bounds_are_refused() {
        let regions = regions(1);
        let mut table = vec![0; CPUS_MAX + 1];
        table[0] = regions[0].as_ptr().addr() as u64;
        let mut good = layout(&table);
        assert!(seen(&good).is_err(), "more than {CPUS_MAX} CPUs");
        good.insert("cpus".to_string(), CPUS_MAX.into());
        for (name, value) in
            [("stacks_of_class", 9), ("stack_length", STACK_BYTES_MAX as u64 + 1), ("in_stack_head", u64::MAX)]
        {
            let mut bad = good.clone();
            bad.insert(name.to_string(), value.into());
            assert!(seen(&bad).is_err(), "{name} {value}");
        }
        for (name, value) in [("stacks_of_class", 0), ("stack_length", 0)] {
            let mut empty = good.clone();
            empty.insert(name.to_string(), value.into());
            assert_eq!(seen(&empty).unwrap(), Seen { stacks: Vec::new(), reads: 0 }, "{name}");
        }
        let (length, classes) = (STACK_BYTES_MAX, STACKS_BYTES_MAX / STACK_BYTES_MAX / OF_CLASS + 2);
        let mut large = good.clone();
        large.insert("stack_length".to_string(), length.into());
        let allowance = Allowance::new(Duration::from_secs(1000));
        let (memory, _) = counted(&allowance);
        assert!(each(&memory, MemoryLayout::made_up(&large), classes, &mut |_| Ok(())).is_err());
    }
}
