//! Restartable sequences on the per-CPU stacks of pointers: pops, pushes and the capacity.
//!
//! Each call is one attempt. The functions take no lock, never retry, and are signal-safe. The
//! rules are those of [`rseq`](super).

use super::{SequenceResult, SequenceTable};
use crate::arch::stacks;

/// Pops the topmost pointer of this CPU's stack at `place` (bytes from the start of a region).
/// Returns null if the stack is empty or the sequence was aborted.
///
/// # Safety
/// * The table holds [`registered_offset`](super::registered_offset), or the offset of
///   [`OwnAreas`](super::OwnAreas). It holds a region for each entry, as [`SequenceTable`]
///   describes.
/// * The regions have stacks at `place`, and stay mapped.
#[inline(always)]
pub unsafe fn pop(table: &SequenceTable, place: usize) -> *mut u8 {
    // SAFETY: the caller meets the requirements above, which are also those of `stacks::pop`.
    unsafe { stacks::pop(table, place) }
}

/// Pushes `value` (not null) on this CPU's stack at `place` if the low 16 bits of the CPU's id are
/// `home`. Otherwise pushes it on the next stack behind that one.
///
/// # Safety
/// As for [`pop`]. A second stack lies behind the one at `place`, and `value` is not null.
#[inline(always)]
pub unsafe fn push(table: &SequenceTable, place: usize, home: u16, value: *mut u8) -> SequenceResult {
    // SAFETY: the caller meets the requirements above, which are also those of `stacks::push`.
    unsafe { stacks::push(table, place, home, value) }
}

/// Pops the topmost `to.len()` pointers of this CPU's stack at `place`, all or none. They keep the
/// order in which they lie in the stack.
///
/// # Safety
/// As for [`pop`].
#[inline]
pub unsafe fn pop_many(table: &SequenceTable, place: usize, to: &mut [*mut u8]) -> SequenceResult {
    // SAFETY: the caller meets the requirements above, which are also those of `stacks::pop_many`.
    unsafe { stacks::pop_many(table, place, to) }
}

/// Pushes the pointers of `from` on this CPU's stack at `place`, all or none.
///
/// # Safety
/// As for [`pop`]. No pointer is null.
#[inline]
pub unsafe fn push_many(table: &SequenceTable, place: usize, from: &[*mut u8]) -> SequenceResult {
    // SAFETY: the caller meets the requirements above, which are also those of `stacks::push_many`.
    unsafe { stacks::push_many(table, place, from) }
}

/// Pushes `count` pointers on this CPU's stack at `place`, all or none. The first is `value`. Each
/// further pointer lies `step` bytes behind the previous one.
///
/// # Safety
/// As for [`pop`]. `count` is at least 1, and no pointer is null.
#[inline]
pub unsafe fn push_strided_run(
    table: &SequenceTable,
    place: usize,
    value: *mut u8,
    step: isize,
    count: usize,
) -> SequenceResult {
    debug_assert!(count > 0 && !value.is_null());
    // SAFETY: the caller meets the requirements above, which are also those of
    // `stacks::push_strided_run`.
    unsafe { stacks::push_strided_run(table, place, value, step, count) }
}

/// Raises the capacity of this CPU's stack at `place` to `capacity` cells, if it is lower. Refuses
/// if the region's first word is 0, which marks the region that must not be written.
///
/// # Safety
/// As for [`pop`]. The region has `capacity` cells for the stack.
#[inline]
pub unsafe fn raise_capacity(table: &SequenceTable, place: usize, capacity: u32) -> SequenceResult {
    // SAFETY: the caller meets the requirements above, which are also those of
    // `stacks::raise_capacity`.
    unsafe { stacks::raise_capacity(table, place, capacity) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rseq::{Stack, UNREGISTERED, registered_offset};
    use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
    use std::boxed::Box;
    use std::vec;
    use std::vec::Vec;

    /// A region with two stacks. The one at `FULL` has no room, and the one behind it has four
    /// cells.
    #[repr(C)]
    struct Region {
        writable: u64,
        full: Stack,
        stack: Stack,
        before: u64,
        none: *mut u8,
        cells: [*mut u8; 4],
        after: u64,
    }

    const FULL: usize = size_of::<u64>();
    const STACK: usize = FULL + size_of::<Stack>();
    /// A value of `home` that no CPU of this machine has.
    const ELSEWHERE: u16 = u16::MAX;

    /// Creates a table in which every entry leads to one region, so the test may run on any CPU.
    fn table(capacity: usize) -> Option<(Box<SequenceTable>, Box<Region>)> {
        let offset = registered_offset()?;
        let null = || AtomicPtr::new(core::ptr::null_mut());
        let [full, stack] = [(), ()].map(|()| Stack { head: null(), bottom: null(), end: null() });
        let mut region = Box::new(Region {
            writable: 1,
            full,
            stack,
            before: 7,
            none: pointer(0),
            cells: [pointer(0); 4],
            after: 7,
        });
        let cells = region.cells.as_mut_ptr();
        region.stack.head.store(cells, Ordering::Relaxed);
        region.stack.bottom.store(cells, Ordering::Relaxed);
        region.stack.end.store(cells.wrapping_add(capacity), Ordering::Relaxed);
        let table = Box::new(SequenceTable::unopened());
        table.offset.store(offset, Ordering::Relaxed);
        let region_start = (&raw mut *region).cast();
        table.regions.iter().for_each(|entry| entry.store(region_start, Ordering::Relaxed));
        Some((table, region))
    }

    /// Repeats an attempt until it is not aborted. (A pop cannot tell an abort from a refusal.)
    fn settled(mut attempt: impl FnMut() -> SequenceResult) -> SequenceResult {
        core::iter::repeat_with(&mut attempt).find(|&outcome| outcome != SequenceResult::Aborted).unwrap()
    }

    unsafe fn settled_pop(table: &SequenceTable) -> *mut u8 {
        // SAFETY: the caller promises a valid table with a stack at `STACK`.
        (0..100).map(|_| unsafe { pop(table, STACK) }).find(|value| !value.is_null()).unwrap_or_default()
    }

    fn pointer(value: usize) -> *mut u8 {
        core::ptr::without_provenance_mut(value)
    }

    /// Pushes from a CPU that is not the object's home.
    unsafe fn push_remote(table: &SequenceTable, value: usize) -> SequenceResult {
        // SAFETY: the caller promises a valid table with stacks at `FULL` and behind it.
        settled(|| unsafe { push(table, FULL, ELSEWHERE, pointer(value)) })
    }

    #[test]
    fn a_stack_is_last_in_first_out_and_bounded() {
        let Some((table, region)) = table(4) else { return };
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            for value in 1..=4 {
                assert_eq!(push_remote(&table, value), SequenceResult::Committed);
            }
            assert_eq!(push_remote(&table, 5), SequenceResult::Refused);
            for value in (1..=4).rev() {
                assert_eq!(settled_pop(&table), pointer(value));
            }
            assert!(settled_pop(&table).is_null());
        }
        assert_eq!((region.before, region.after), (7, 7));
    }

    #[test]
    fn push_uses_first_stack_at_home_and_second_elsewhere() {
        let Some((table, region)) = table(4) else { return };
        let home = pin();
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            assert_eq!(settled(|| push(&table, FULL, home, pointer(1))), SequenceResult::Refused);
            assert_eq!(push_remote(&table, 2), SequenceResult::Committed);
            // With the second stack's place, home has room, and no cell behind it is touched.
            assert_eq!(settled(|| push(&table, STACK, home, pointer(3))), SequenceResult::Committed);
            assert_eq!([settled_pop(&table), settled_pop(&table)], [3, 2].map(pointer));
        }
        assert_eq!((region.before, region.after), (7, 7));
    }

    /// Pins this thread to its current CPU, and returns the CPU.
    fn pin() -> u16 {
        // SAFETY: a zeroed set of CPUs is valid, and the calls only read or write it.
        unsafe {
            let cpu = libc::sched_getcpu();
            let mut set: libc::cpu_set_t = core::mem::zeroed();
            libc::CPU_SET(cpu as usize, &mut set);
            assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
            cpu as u16
        }
    }

    #[test]
    fn many_go_together_or_not_at_all() {
        let Some((table, region)) = table(4) else { return };
        let three = [1, 2, 3].map(pointer);
        let mut taken = [pointer(0); 2];
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            assert_eq!(settled(|| push_many(&table, STACK, &three)), SequenceResult::Committed);
            assert_eq!(settled(|| push_many(&table, STACK, &three)), SequenceResult::Refused);
            assert_eq!(settled(|| pop_many(&table, STACK, &mut taken)), SequenceResult::Committed);
            assert_eq!(taken, [2, 3].map(pointer));
            assert_eq!(settled(|| pop_many(&table, STACK, &mut taken)), SequenceResult::Refused);
            assert_eq!(settled_pop(&table), pointer(1));
        }
        assert_eq!((region.before, region.after), (7, 7));
    }

    #[test]
    fn a_progression_goes_up_or_down_and_together() {
        let Some((table, region)) = table(4) else { return };
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            let progression =
                |first, step, count| settled(|| push_strided_run(&table, STACK, pointer(first), step, count));
            assert_eq!(progression(48, 16, 5), SequenceResult::Refused);
            assert_eq!(progression(48, 16, 3), SequenceResult::Committed);
            assert_eq!(progression(7, 1, 2), SequenceResult::Refused);
            assert_eq!(progression(7, 1, 1), SequenceResult::Committed);
            assert_eq!([(); 5].map(|()| settled_pop(&table)), [7, 80, 64, 48, 0].map(pointer));
            assert_eq!(progression(64, -16, 4), SequenceResult::Committed);
            assert_eq!([(); 5].map(|()| settled_pop(&table)), [16, 32, 48, 64, 0].map(pointer));
        }
        assert_eq!((region.before, region.after), (7, 7));
    }

    /// Eight threads push and pop on the CPUs that they run on. Another thread interrupts them by
    /// fences. In the end, the stacks hold as many pointers as were pushed and not popped. If
    /// fences work, `push_strided_run`, `pop_many`, `push_many` and `raise_capacity` must each be
    /// aborted at least once. The threads stop after that.
    #[test]
    fn no_object_is_lost_between_threads() {
        const CELLS: usize = 64;
        let Some(offset) = registered_offset() else { return };
        // A region: one word, the stack at `FULL` without room, the next stack, null, and its
        // cells.
        let stack = STACK / size_of::<usize>();
        let length = stack + 4 + CELLS;
        let mut memory = vec![0_usize; crate::topology::nameable() * length];
        let table = Box::new(SequenceTable::unopened());
        table.offset.store(offset, Ordering::Relaxed);
        for (region, entry) in memory.chunks_mut(length).zip(&table.regions[UNREGISTERED..]) {
            let cells = region[stack + 4..].as_ptr().expose_provenance();
            region[0] = 1; // The region is writable.
            region[stack..stack + 3].copy_from_slice(&[cells, cells, cells + CELLS * size_of::<usize>()]);
            entry.store(region.as_mut_ptr().cast(), Ordering::Relaxed);
        }
        let aborted = [(); 4].map(|()| AtomicU32::new(0));
        // Number of pointers that an attempt moved.
        let moved = |which: usize, outcome: SequenceResult, count: isize| {
            aborted[which].fetch_add(u32::from(outcome == SequenceResult::Aborted), Ordering::Relaxed);
            if outcome == SequenceResult::Committed { count } else { 0 }
        };
        let fenced = crate::fence::register().is_ok();
        let all_aborted = || aborted.iter().all(|times| times.load(Ordering::Relaxed) > 0);
        let work = || {
            let mut left = 0_isize;
            for round in 0..50_000_000_u32 {
                // SAFETY: the table has a region for each CPU, which lives to the end of the test.
                // Only these calls change the stacks.
                unsafe {
                    left += isize::from(push(&table, FULL, ELSEWHERE, pointer(1)) == SequenceResult::Committed);
                    left -= isize::from(!pop(&table, STACK).is_null());
                    if round % 16 == 0 {
                        left += moved(0, push_strided_run(&table, STACK, pointer(8), 8, 7), 7);
                        left -= moved(1, pop_many(&table, STACK, &mut [pointer(0); 7]), 7);
                        left += moved(2, push_many(&table, STACK, &[pointer(1); 7]), 7);
                        left -= moved(1, pop_many(&table, STACK, &mut [pointer(0); 7]), 7);
                        moved(3, raise_capacity(&table, STACK, 1), 0);
                        if round > 2_000_000 && (!fenced || all_aborted()) {
                            break;
                        }
                    }
                }
            }
            left
        };
        let left: isize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
            // Each fence interrupts the threads that run on other CPUs.
            while threads.iter().any(|thread| !thread.is_finished()) {
                let _ = crate::fence::all();
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(!fenced || all_aborted(), "{aborted:?}");
        let there = memory.chunks(length).map(|region| (region[stack] - region[stack + 1]) / size_of::<usize>());
        assert_eq!(there.sum::<usize>() as isize, left);
    }

    #[test]
    fn a_stack_refuses_beyond_its_capacity_which_only_grows() {
        let Some((table, mut region)) = table(0) else { return };
        region.writable = 0;
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        assert_eq!(settled(|| unsafe { raise_capacity(&table, STACK, 1) }), SequenceResult::Refused);
        region.writable = 1;
        // SAFETY: the table and its one region live to the end of the test, and only this thread
        // uses them.
        unsafe {
            assert_eq!(push_remote(&table, 1), SequenceResult::Refused);
            assert_eq!(settled(|| raise_capacity(&table, STACK, 1)), SequenceResult::Committed);
            assert_eq!(push_remote(&table, 1), SequenceResult::Committed);
            assert_eq!(push_remote(&table, 2), SequenceResult::Refused);
            assert_eq!(settled(|| raise_capacity(&table, STACK, 3)), SequenceResult::Committed);
            assert_eq!(settled(|| raise_capacity(&table, STACK, 2)), SequenceResult::Committed);
            assert_eq!(
                [2, 3, 4].map(|value| push_remote(&table, value)),
                [SequenceResult::Committed, SequenceResult::Committed, SequenceResult::Refused]
            );
        }
    }
}
