//! Large allocations, which are runs of whole pages. neap finds a run by arithmetic with its
//! address, so a run has no header.
//!
//! The first frame of a run holds its state and length. A run has as many pages as the requested
//! bytes need. While a thread moves a run by its page tables, it holds the mutex of
//! [`Splits`](crate::allocation::splits).

use crate::allocation::fresh::Fresh;
use crate::mm::{Core, Mm};
use neap_base::gate::Inside;
use neap_base::{Pfn, Platform};
use neap_groups::Payer;
use neap_objects::size_class::{Class, GRAIN};
use neap_os::fatal::die;
use neap_pages::State;

/// Least bytes for which moving page tables is cheaper than copying.
const MOVE_BYTES_MIN: usize = 256 << 10;

/// Least bytes in a row for which releasing their memory is cheaper than writing zeroes. The
/// program may never have touched most pages of so long a range.
const RELEASE_BYTES_MIN: usize = 32 << 20;

/// State of the target of a run that could not be moved.
enum Unmoved {
    /// The target is mapped.
    Mapped,
    /// The kernel has unmapped a part of the target, and refuses to map it again.
    Lost,
}

impl<P: Platform> Mm<P> {
    /// Forbids huge pages in a fresh run of zeroes that the program may leave sparse.
    #[cold]
    #[inline(never)]
    pub(crate) fn expect_sparse(&self, memory: *const u8) {
        if let Some((core, count)) = self.core_if_open().and_then(|core| Some((core, core.run_at(memory)?))) {
            let (pages, platform) = (&core.objects.pages, &core.objects.platform);
            // Inside the gate, since `expect_sparse` takes a mutex, which fork must find free.
            let _inside = self.gate.enter(platform.cpu());
            pages.expect_sparse(platform, pages.pfn(memory.addr()), count);
        }
    }

    /// Makes every byte of a fresh run zero. Does not touch pages without memory. Returns `false`
    /// if no run starts at `memory`.
    ///
    /// # Safety
    /// The run is the caller's. No code has written to it since it was handed out.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn zero_run(&self, memory: *mut u8) -> bool {
        let Some((core, count)) = self.core_if_open().and_then(|core| Some((core, core.run_at(memory)?))) else {
            return false;
        };
        let (pages, platform) = (&core.objects.pages, &core.objects.platform);
        let first = pages.pfn(memory.addr()).0;
        let mut rest = first..first + count;
        loop {
            let part = {
                // This runs inside the gate, since `backed_part` takes a mutex, which fork must
                // find free.
                let _inside = self.gate.enter(platform.cpu());
                pages.backed_part(Pfn(first), rest.clone())
            };
            let Some(part) = part else { return true };
            let bytes = part.len() * pages.page_size();
            let start = memory.wrapping_add((part.start - first) as usize * pages.page_size());
            let drops = bytes >= RELEASE_BYTES_MIN && !core.objects.is_isolated_cpu_in_use();
            // SAFETY: `backed_part` returns pages of the run. The run is the caller's and holds no
            // data yet, so this call may release its memory or write to it (the caller's promise).
            unsafe {
                if !drops || platform.release_unless_locked(start.addr(), bytes).is_err() {
                    start.write_bytes(0, bytes);
                }
            }
            rest.start = part.end;
        }
    }
}

impl<P: Platform> Core<P> {
    /// Allocates a run of `size` bytes. Its address is a multiple of `align`.
    pub(crate) fn allocate_run(&self, inside: &Inside<'_>, size: usize, align: usize) -> Option<Fresh> {
        let pages = &self.objects.pages;
        let count = u32::try_from(size.max(1).div_ceil(pages.page_size())).ok()?;
        // `reallocate_aligned` may pass a larger alignment, if its run happens to have it.
        if align > neap_pages::MOST_ALIGNMENT {
            return None;
        }
        let align = u32::try_from(align.div_ceil(pages.page_size())).ok()?;
        let platform = &self.objects.platform;
        let cached = pages.allocate_cached_run(platform, count, align);
        let resident = || pages.allocate_resident_run(platform, count, align);
        let reused = cached.or_else(|| self.objects.reuse_before_growth(inside, count, resident));
        let block = reused.or_else(|| pages.allocate_run(platform, count, align).ok())?;
        let memory = core::ptr::with_exposed_provenance_mut(pages.address(block.pfn));
        Some(Fresh { memory, is_zero: block.zero })
    }

    /// Returns the number of pages of the run that starts at `pointer`.
    fn run_at(&self, pointer: *const u8) -> Option<u32> {
        let pages = &self.objects.pages;
        let frame = pages.frames().frame(pages.pfn(pointer.addr()));
        (pointer.addr().is_multiple_of(pages.page_size()) && frame.state() == State::Run).then(|| frame.owner())
    }

    /// Returns the bytes of a run for `size` bytes.
    pub(crate) fn run_price(&self, size: usize) -> u64 {
        size.max(1).next_multiple_of(self.objects.pages.page_size()) as u64
    }

    /// Returns the payer of the run that starts at `pointer`. Returns `None` if the run has no
    /// payer, or no run starts there.
    pub(crate) fn run_payer(&self, pointer: *const u8) -> Option<Payer> {
        self.run_at(pointer)?;
        let owner = self.objects.pages.frames().run_owner(self.objects.pages.pfn(pointer.addr()));
        (owner != 0).then(|| Payer::from_bits(owner))
    }

    /// Sets the payer of a run that no other thread knows yet.
    pub(crate) fn set_run_payer(&self, pointer: *const u8, payer: Payer) {
        let pages = &self.objects.pages;
        pages.frames().set_run_owner(pages.pfn(pointer.addr()), payer.to_bits());
    }

    /// Frees the run at `pointer`, and returns its bytes. The pointer leads into the arena, but not
    /// to an object.
    pub(crate) fn free_run(&self, _: &Inside<'_>, pointer: *const u8) -> usize {
        let pages = &self.objects.pages;
        let Some(count) = self.run_at(pointer) else { self.abort_invalid_pointer(Class::NONE, pointer, "free") };
        pages.free_run(&self.objects.platform, pages.pfn(pointer.addr()), count);
        count as usize * pages.page_size()
    }

    /// Resizes the run at `pointer` in place to `size` bytes. Returns `false`, and changes nothing,
    /// if that is impossible.
    pub(crate) fn resize_run(&self, _: &Inside<'_>, pointer: *const u8, size: usize) -> bool {
        let pages = &self.objects.pages;
        let Some(old) = self.run_at(pointer) else { self.abort_invalid_pointer(Class::NONE, pointer, "realloc") };
        let Ok(new) = u32::try_from(size.div_ceil(pages.page_size())) else { return false };
        new == old || pages.resize_run(&self.objects.platform, pages.pfn(pointer.addr()), old, new)
    }

    /// Moves the run at `pointer` to a run of `size` bytes, by moving page tables instead of
    /// copying. Returns `None` if that is impossible, not worth it, or if `size` is less than the
    /// run has. The caller then copies the run.
    pub(crate) fn move_run(
        &self,
        inside: &Inside<'_>,
        pointer: *const u8,
        size: usize,
        align: usize,
    ) -> Option<*mut u8> {
        let (pages, platform) = (&self.objects.pages, &self.objects.platform);
        let old = self.run_at(pointer)?;
        let bytes = old as usize * pages.page_size();
        if bytes < MOVE_BYTES_MIN || size < bytes {
            return None;
        }
        let count = u32::try_from(size.div_ceil(pages.page_size())).ok()?;
        let from = pages.pfn(pointer.addr());
        if pages.is_better_copied(from, old, count) {
            return None;
        }
        // Moving page tables interrupts every CPU that runs the process.
        if self.objects.is_isolated_cpu_in_use() {
            return None;
        }
        let memory = self.allocate_run(inside, size, align)?.memory;
        let to = pages.pfn(memory.addr());
        // Moved pages keep their node and its memory policy. So both runs must lie on the same
        // node.
        if self.objects.node_of(memory) != self.objects.node_of(pointer) || pages.is_part_of_huge(to, old) {
            self.free_run(inside, memory);
            return None;
        }
        let new = self.run_at(memory)?;
        // The kernel moves one mapping at a time, and the mapping keeps its advice on huge pages.
        // Different advice on parts of a run would make several mappings.
        pages.forbid_huge(platform, from, old);
        pages.forbid_huge(platform, to, new);
        let moved = self.move_pieces(inside, from, to, old);
        if let Err(refused) = moved {
            pages.allow_huge(platform, from, old);
            match refused {
                Unmoved::Mapped => _ = self.free_run(inside, memory),
                // A part of the target is not mapped, so its run stays allocated forever.
                Unmoved::Lost => self.count_run(size, 0),
            }
            return None;
        }
        pages.allow_huge(platform, to, new);
        pages.frames().set_run_owner(to, pages.frames().run_owner(from));
        pages.free_moved_run(platform, from, old);
        Some(memory)
    }

    /// Moves the contents of a run to the start of another one by page tables, one piece at a time.
    /// Earlier moves have split the mapping of the run at some places. Each piece lies between two
    /// of these places, or is the whole run. If the kernel refuses to move a piece other than the
    /// first, this copies the piece.
    ///
    /// # Errors
    /// The contents are where they were.
    /// * [`Unmoved::Mapped`] if the kernel refuses the first piece, there are too many pieces, or
    ///   there is no memory for the places.
    /// * [`Unmoved::Lost`] if the kernel also refuses to map the target of a piece again.
    fn move_pieces(&self, inside: &Inside<'_>, from: Pfn, to: Pfn, count: u32) -> Result<(), Unmoved> {
        let (pages, platform) = (&self.objects.pages, &self.objects.platform);
        let (source, place) = (from.0..from.0 + count, to.0..to.0 + count);
        let address = |page: u32| core::ptr::with_exposed_provenance_mut::<u8>(pages.address(Pfn(page)));
        let bytes = |pages_of: u32| pages_of as usize * pages.page_size();
        let mut splits = self.splits.lock(inside);
        splits.open(platform).map_err(|_| Unmoved::Mapped)?;
        let pieces = splits.pieces(source.clone()).count();
        if pieces > bytes(count) / MOVE_BYTES_MIN || !splits.have_room(&place, pieces) {
            return Err(Unmoved::Mapped);
        }
        for piece in splits.pieces(source.clone()) {
            let (at, length) = (piece.start - from.0, piece.end - piece.start);
            let (here, there) = (address(piece.start), address(to.0 + at));
            // SAFETY: this thread alone uses both runs, and they do not overlap. They lie in
            // segments of the arena, which `map_at` has mapped. The run at `to` holds no data yet.
            if unsafe { platform.move_pages(here.addr(), there.addr(), bytes(length)) }.is_ok() {
                continue;
            }
            let mapped = pages.map_again(platform, Pfn(to.0 + at), length);
            // SAFETY: this thread alone uses both runs, and they do not overlap. The kernel has
            // moved the pieces before `at`, which leaves both sides mapped. It has not moved this
            // piece.
            unsafe {
                match (mapped, at) {
                    (true, 0) => return Err(Unmoved::Mapped),
                    (true, _) => there.copy_from_nonoverlapping(here, bytes(length)),
                    (false, _) => {
                        address(from.0).copy_from_nonoverlapping(address(to.0), bytes(at));
                        return Err(Unmoved::Lost);
                    }
                }
            }
        }
        splits.note(&place);
        let mut at = source.start;
        while at < source.end {
            let Some(piece) = splits.pieces(at..source.end).next() else { break };
            splits.note(&(piece.start - from.0 + to.0..piece.end - from.0 + to.0));
            at = piece.end;
        }
        Ok(())
    }

    /// Returns the bytes of the allocation at `pointer`. Ends the process if the program has no
    /// allocation there.
    pub(crate) fn usable_size(&self, pointer: *const u8, call: &str) -> usize {
        if let Some(size) = self.guarded_size(pointer, call) {
            return size;
        }
        match self.class_of(pointer, call) {
            Class::NONE => match self.run_at(pointer) {
                Some(pages) => pages as usize * self.objects.pages.page_size(),
                None => self.abort_invalid_pointer(Class::NONE, pointer, call),
            },
            class if self.objects.is_allocated(pointer) => class.size(),
            class => self.abort_invalid_pointer(class, pointer, call),
        }
    }

    /// Returns the class at an address of the arena. An address outside of the arena ends the
    /// process.
    pub(crate) fn class_of(&self, pointer: *const u8, call: &str) -> Class {
        self.objects
            .class_at(pointer)
            .unwrap_or_else(|| die(format_args!("{call}: {pointer:p} is not from this allocator")))
    }

    /// Ends the process with a message about a pointer to no allocation of the program.
    #[cold]
    pub(crate) fn abort_invalid_pointer(&self, class: Class, pointer: *const u8, call: &str) -> ! {
        let (page, size) = (self.objects.pages.page_size(), class.size());
        if class == Class::NONE {
            let state = self.objects.pages.frames().frame(self.objects.pages.pfn(pointer.addr())).state();
            if pointer.addr().is_multiple_of(page) {
                die(format_args!(
                    "double free or bad pointer: {call}: the page at {pointer:p} is {state:?}, not allocated"
                ));
            }
            die(format_args!(
                "interior or free pointer: {call}: {pointer:p} is not the start of an allocation (page {state:?})"
            ));
        }
        let into = self.objects.offset_in(class, pointer);
        if into != 0 || !pointer.addr().is_multiple_of(GRAIN) {
            die(format_args!("interior pointer: {call}: {pointer:p} is {into} bytes into an object of {size} bytes"));
        }
        let where_to = if self.objects.is_cached(pointer) { "cached" } else { "in its slab" };
        die(format_args!("double free: {call}: {pointer:p} ({size} bytes) is free already, {where_to}"))
    }
}

#[cfg(test)]
mod tests {
    use crate::mm::{Hooks, Mm};
    use crate::options::Options;
    use neap_testing::virtual_platform::{Call, Virtual};
    use std::boxed::Box;
    use std::vec::Vec;

    const MIB: usize = 1 << 20;

    /// A manager that publishes nothing.
    fn opened(machine: Virtual) -> Box<Mm<Virtual>> {
        let mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(machine, &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
        mm
    }

    /// Only growth can make a sweep worth while, unless it is that of a very long request.
    #[test]
    fn run_that_grows_nothing_is_not_checked_again() {
        let mut mm = opened(Virtual::new(4096, 1));
        let core = mm.core().unwrap();
        let pairs = |size: usize, times: usize| {
            let before = core.objects.reuse_numbers().checks;
            // SAFETY: the block is this test's, and is freed once.
            (0..times).for_each(|_| unsafe { mm.free(mm.allocate(size)) });
            core.objects.reuse_numbers().checks - before
        };
        let held = mm.allocate(5000);
        for size in [3_000_000, 5_000_000, 3_000_000, 15_000_000] {
            pairs(size, 3);
            assert_eq!(pairs(size, 100), 0, "runs of {size} bytes");
        }
        // SAFETY: the block is this test's, and no thread uses the manager any more.
        unsafe {
            mm.free(held);
            mm.close();
        }
    }

    /// A sweep takes what it has made free from the zone. A run that the CPU caches comes first.
    #[test]
    fn cached_run_is_taken_during_a_sweep() {
        let mut mm = opened(Virtual::new(4096, 1));
        let core = mm.core().unwrap();
        // SAFETY: each block is this test's, and is freed once.
        let free = |block: *mut u8| unsafe { mm.free(block) };
        // Frees release nothing.
        core.in_call.note_look(1 << 60, 0, 0, 0);
        let blocks: Vec<_> = (0..16 * MIB / 4096).map(|_| mm.allocate(4096)).collect();
        blocks.into_iter().for_each(free);
        let mut runs = Vec::new();
        while core.objects.reuse_numbers().sweeps == 0 && runs.len() < 8 {
            runs.push(mm.allocate(3 * MIB));
        }
        assert!(core.objects.reuse_numbers().sweeps > 0);
        let locks = || core.objects.pages.statistics().zone_locks;
        (0..100).for_each(|_| free(mm.allocate(MIB / 2)));
        let before = locks();
        (0..1000).for_each(|_| free(mm.allocate(MIB / 2)));
        assert!(locks() - before < 200, "the zone was locked {} times", locks() - before);
        runs.into_iter().for_each(free);
        // SAFETY: no thread uses the manager any more.
        unsafe { mm.close() };
    }

    /// Free pages between runs in use cannot serve longer runs. Growth replaces all of them in a
    /// large heap, and none that are parts of huge pages in a small one.
    #[test]
    fn growth_keeps_the_huge_pages_of_a_small_heap() {
        for (live, is_kept) in [(21 * MIB, true), (64 * MIB, false)] {
            let mut mm = opened(Virtual::new(4096, 1));
            let core = mm.core().unwrap();
            // SAFETY: each block is this test's, and is freed once.
            let free = |block: *mut u8| unsafe { mm.free(block) };
            // Frees release nothing.
            core.in_call.note_look(1 << 60, 0, 0, 0);
            let runs: Vec<_> = (0..live / 40_960).map(|_| mm.allocate(40_000)).collect();
            runs.iter().step_by(2).for_each(|run| free(*run));
            let longer: Vec<_> = (0..3).map(|_| mm.allocate(5 * MIB / 2)).collect();
            let released = core.objects.reuse_numbers().released << 12;
            // The first pages of a heap are small.
            assert_eq!(released <= 9 * MIB as u64 / 2, is_kept, "{released} bytes of {live}");
            runs.into_iter().skip(1).step_by(2).chain(longer).for_each(free);
            // SAFETY: no thread uses the manager any more.
            unsafe { mm.close() };
        }
    }

    /// The system gives huge pages to every mapping, and moves one mapping at a time.
    #[test]
    fn a_run_with_huge_pages_moves_and_has_them_afterwards() {
        let mut mm = opened(Virtual::new(4096, 1).with_huge_pages_for_all());
        let platform = &mm.core().unwrap().objects.platform;
        let mut run = mm.allocate(9 * MIB);
        for (moves, refused) in [(1, false), (2, false), (2, true)] {
            let behind = mm.allocate(MIB);
            assert!(platform.allows_huge_pages(run.addr()) && !platform.allows_huge_pages(run.addr() + 8 * MIB));
            assert_eq!(mm.core().unwrap().objects.pages.node(0).huge_runs(), 1);
            // SAFETY: the runs are this test's.
            unsafe {
                run.write(moves);
                if refused {
                    platform.fail(Call::MovePages, 0, 1);
                    assert!(mm.core().unwrap().move_run(&mm.gate.enter(0), run, 20 * MIB, 16).is_none());
                } else {
                    run = mm.core().unwrap().move_run(&mm.gate.enter(0), run, 9 * MIB, 16).unwrap();
                }
                assert_eq!(run.read(), moves);
                mm.free(behind);
            }
        }
        assert!(platform.allows_huge_pages(run.addr()) && platform.made(Call::MovePages) == 3);
        // SAFETY: the run is this test's, and is freed once.
        unsafe { mm.free(run) };
        assert!(!platform.allows_huge_pages(run.addr()));
        // SAFETY: no thread uses the manager any more.
        unsafe { mm.close() };
    }

    /// Moved page tables keep small pages, in a mapping of their own.
    #[test]
    fn run_of_small_pages_is_copied_to_get_huge_pages() {
        for huge in [true, false] {
            let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, huge, ..Options::DEFAULT }) }.unwrap();
            let core = mm.core().unwrap();
            // More is resident than any run below is long.
            let rest = mm.allocate(32 * MIB);
            let mut run = mm.allocate(3 * MIB / 2);
            let mut grow = |size: usize| {
                let moved = core.move_run(&mm.gate.enter(0), run, size, 16);
                run = moved.unwrap_or_else(|| {
                    // SAFETY: the run was not moved, and is this test's.
                    unsafe { mm.free(run) };
                    mm.allocate(size)
                });
                moved.is_some()
            };
            assert!(grow(2 * MIB - 4096), "the longer run has no whole huge page");
            assert_eq!(grow(8 * MIB), !huge, "it gets huge pages if there are any");
            assert!(grow(16 * MIB), "it keeps what it has");
            // SAFETY: the runs are this test's, and each is freed once.
            unsafe { [rest, run].into_iter().for_each(|run| mm.free(run)) };
            // SAFETY: no thread uses the manager any more.
            unsafe { mm.close() };
        }
    }

    /// A move would break the huge page that has the run, or the one that has its new place.
    #[test]
    fn run_that_is_part_of_a_huge_page_is_copied() {
        for (huge, is_target) in [(true, false), (true, true), (false, false), (false, true)] {
            let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, huge, ..Options::DEFAULT }) }.unwrap();
            let rest = mm.allocate(32 * MIB);
            // Fresh memory for runs of up to 1 MiB, and only for these, is populated as huge pages.
            let mut short = [(); 6].map(|()| mm.allocate(MIB)).to_vec();
            let size = if is_target { 2 * MIB - 65536 } else { MIB };
            let run = if is_target { mm.allocate(size) } else { short.remove(0) };
            // Neither grows in place.
            let next = mm.allocate(61440);
            let core = mm.core().unwrap();
            let pages = &core.objects.pages;
            assert_eq!(pages.is_part_of_huge(pages.pfn(run.addr()), (size / 4096) as u32), huge && !is_target);
            let others = short.into_iter().chain([rest, next]);
            let (before, after) = others.partition::<Vec<_>, _>(|other| is_target && ![rest, next].contains(other));
            // SAFETY: the runs are this test's. The run grows into their place.
            before.into_iter().for_each(|other| unsafe { mm.free(other) });
            // SAFETY: the run is this test's.
            let run = unsafe { mm.reallocate(run, 2 * MIB - 4096) };
            assert_eq!(core.objects.platform.made(Call::MovePages), usize::from(!huge));
            // SAFETY: these runs are left.
            after.into_iter().chain([run]).for_each(|run| unsafe { mm.free(run) });
            mm.verify(0).unwrap();
            // SAFETY: no thread uses the manager any more.
            unsafe { mm.close() };
        }
    }

    /// The system unmaps the target of a refused move, and refuses to map it again.
    #[test]
    fn lost_move_target_is_not_allocated_again() {
        let mut mm = opened(Virtual::new(4096, 1));
        let core = mm.core().unwrap();
        let platform = &core.objects.platform;
        let run = mm.allocate(4 * MIB);
        platform.let_refused_moves_unmap();
        platform.fail(Call::MovePages, 0, 1);
        platform.fail(Call::MapAt, 0, 1);
        let mapped = platform.made(Call::MapAt);
        assert!(core.move_run(&mm.gate.enter(0), run, 8 * MIB, 16).is_none());
        assert_eq!((platform.made(Call::MovePages), platform.made(Call::MapAt) - mapped), (1, 1));
        let others: Vec<*mut u8> = (0..64).map(|_| mm.allocate(MIB)).collect();
        // SAFETY: the runs are this test's.
        unsafe { others.iter().for_each(|other| other.write_bytes(1, MIB)) };
        // SAFETY: the runs are this test's, and each is freed once.
        unsafe { others.iter().chain([&run]).for_each(|&other| mm.free(other)) };
        assert_eq!((mm.verify(0).map(|_| ()), mm.usage().used_bytes), (Ok(()), 8 * MIB as u64));
        // SAFETY: no thread uses the manager any more.
        unsafe { mm.close() };
    }

    /// For any base of the arena.
    #[test]
    fn runs_lie_on_multiples_of_what_was_asked_for() {
        let mut bases = 0;
        for _ in 0..4 {
            let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
            bases |= mm.core().unwrap().objects.pages.base();
            for shift in 12..=30 {
                let runs = [mm.allocate_aligned(5 * MIB, 1 << shift), mm.allocate_aligned(70_000, 1 << shift)];
                for run in runs {
                    assert!(!run.is_null() && run.addr().is_multiple_of(1 << shift), "{run:p} for 2^{shift}");
                    // SAFETY: the run is this test's.
                    unsafe { run.write(1) };
                }
                // SAFETY: the run is this test's; the other one stays.
                unsafe { mm.free(runs[shift % 2]) };
            }
            assert!(mm.allocate_aligned(1, 2 << 30).is_null());
            assert_eq!(mm.verify(0).map(|_| ()), Ok(()));
            // SAFETY: no thread uses the manager any more.
            unsafe { mm.close() };
        }
        assert!(bases % (1 << 30) != 0, "a base that is no multiple of the largest alignment");
    }

    /// The pieces move one by one. A piece that is refused later is copied. If its target is lost,
    /// the moved pieces are copied back.
    #[test]
    fn multi_piece_run_keeps_contents_after_any_failed_move() {
        for (refused, unmaps, lost) in
            [(usize::MAX, false, false), (0, true, false), (1, false, false), (1, true, false), (1, true, true)]
        {
            let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, huge: false, ..Options::DEFAULT }) }
                .unwrap();
            let core = mm.core().unwrap();
            let (pages, platform) = (&core.objects.pages, &core.objects.platform);
            // Nothing has to be mapped later.
            let all = mm.allocate(64 * MIB);
            // SAFETY: the run is this test's.
            unsafe { mm.free(all) };
            // Too long to be cached.
            let small = mm.allocate(2 * MIB);
            let small = core.move_run(&mm.gate.enter(0), small, 2 * MIB, 16).unwrap();
            // SAFETY: the run is this test's.
            unsafe { mm.free(small) };
            let run = mm.allocate(16 * MIB);
            let words =
                |run: *mut u8| (0..16 * MIB / 4096).map(move |page| run.wrapping_add(page * 4096).cast::<usize>());
            // SAFETY: the run is this test's.
            words(run).enumerate().for_each(|(n, word)| unsafe { word.write(n) });
            let first = pages.pfn(run.addr()).0;
            let pieces = core.splits.lock(&mm.gate.enter(0)).pieces(first..first + 4096).count();
            assert!(pieces > 1, "the small run's place is in the large one");
            let before = platform.made(Call::MovePages);
            if unmaps {
                platform.let_refused_moves_unmap();
            }
            if refused < pieces {
                platform.fail(Call::MovePages, refused, 1);
            }
            if lost {
                platform.fail(Call::MapAt, 0, 1);
            }
            let moved = core.move_run(&mm.gate.enter(0), run, 17 * MIB, 16);
            assert_eq!(moved.is_some(), refused > 0 && !lost, "refused {refused}, unmaps {unmaps}, lost {lost}");
            let made = platform.made(Call::MovePages) - before;
            assert_eq!(made, if moved.is_some() { pieces } else { refused + 1 });
            let run = moved.unwrap_or(run);
            // SAFETY: the run is this test's.
            assert!(words(run).enumerate().all(|(n, word)| unsafe { word.read() } == n), "its contents");
            // SAFETY: the run is this test's; no thread uses the manager any more.
            unsafe {
                mm.free(run);
                mm.close();
            }
        }
    }

    /// Moves to places of earlier moves add no mappings, so their number is not limited.
    #[test]
    fn runs_move_however_often_others_moved_to_the_same_places() {
        const MOVES: usize = 20_000;
        let mut mm = opened(Virtual::new(4096, 1));
        let core = mm.core().unwrap();
        let mut run = mm.allocate(MIB / 2);
        (0..MOVES).for_each(|_| run = core.move_run(&mm.gate.enter(0), run, MIB / 2, 16).unwrap());
        assert_eq!(core.objects.platform.made(Call::MovePages), MOVES);
        // SAFETY: the run is this test's; no thread uses the manager any more.
        unsafe {
            mm.free(run);
            mm.close();
        }
    }

    /// `zero_run` writes zeroes to a short used part of a run, and drops the memory of a long one.
    #[test]
    fn zeroes_touch_no_page_that_has_no_memory() {
        let mut mm = opened(Virtual::new(4096, 1));
        assert!(mm.keep_free(u64::MAX), "frees give nothing back");
        let platform = &mm.core().unwrap().objects.platform;
        let check = |run: *mut u8, bytes: usize| {
            let resident = resident(run, bytes);
            let zero = |at| {
                (0..bytes).step_by(at).all(|at| {
                    // SAFETY: a byte of the run, which is this test's.
                    unsafe { run.add(at).read() == 0 }
                })
            };
            assert!(zero(4096 * 7 + 512), "a byte is not zero");
            resident
        };
        // SAFETY: the runs are this test's.
        unsafe {
            let warm = mm.allocate(8 * MIB);
            warm.write_bytes(1, 8 * MIB);
            mm.free(warm);
            let run = mm.allocate_zeroed(256 * MIB);
            assert_eq!((check(run, 256 * MIB), platform.made(Call::Release)), (8 * MIB, 0), "the warm part alone");
            mm.free(run);
            // All of it was in use before.
            let run = mm.allocate_zeroed_aligned(200 * MIB, 4096);
            assert_eq!((check(run, 200 * MIB), platform.made(Call::Release)), (0, 1), "dropped, not written to");
            mm.free(run);
            platform.fail(Call::Release, 0, 1);
            let run = mm.allocate_zeroed(40 * MIB);
            assert_eq!((check(run, 40 * MIB), platform.made(Call::Release)), (40 * MIB, 2), "where that is refused");
            mm.free(run);
            mm.close();
        }
    }

    /// Returns how many bytes of a range have memory.
    fn resident(start: *mut u8, bytes: usize) -> usize {
        let mut pages = std::vec![0_u8; bytes / 4096];
        // SAFETY: the vector has a byte for every page.
        assert_eq!(unsafe { libc::mincore(start.cast(), bytes, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|page| **page & 1 == 1).count() * 4096
    }

    /// A run keeps its payer if it is resized in place, if it is moved, and if the system refuses
    /// to move it.
    #[test]
    fn run_keeps_owner_after_resize_move_and_refused_move() {
        for moves in [true, false] {
            let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, huge: false, ..Options::DEFAULT }) }
                .unwrap();
            let core = mm.core().unwrap();
            let (pages, platform) = (&core.objects.pages, &core.objects.platform);
            if !moves {
                platform.fail(Call::MovePages, 0, usize::MAX);
            }
            let page = |run: *mut u8| pages.pfn(run.addr());
            let runs: Vec<*mut u8> = (0..8).map(|_| mm.allocate(MIB)).collect();
            for (n, &run) in runs.iter().enumerate() {
                assert_eq!(pages.frames().run_owner(page(run)), 0, "no owner at first");
                pages.frames().set_run_owner(page(run), n as u64 + 1);
            }
            for (n, &run) in runs.iter().enumerate().step_by(2) {
                // SAFETY: the runs are this test's.
                let (shorter, longer) =
                    unsafe { (mm.reallocate(run, MIB / 2), core.move_run(&mm.gate.enter(0), run, 3 * MIB, 16)) };
                assert_eq!((shorter, longer.is_some()), (run, moves));
                assert_eq!(pages.frames().run_owner(page(longer.unwrap_or(run))), n as u64 + 1);
                // SAFETY: `move_run` freed the old run if it returned one, so exactly one run is
                // left, which is this test's.
                unsafe { mm.free(longer.unwrap_or(run)) };
            }
            let others = runs.iter().enumerate().skip(1).step_by(2);
            others.clone().for_each(|(n, &run)| assert_eq!(pages.frames().run_owner(page(run)), n as u64 + 1));
            let again = mm.allocate(2 * MIB);
            assert_eq!(pages.frames().run_owner(page(again)), 0, "no owner again");
            // SAFETY: the runs are this test's, and were not freed above.
            others.for_each(|(_, &run)| unsafe { mm.free(run) });
            // SAFETY: no thread uses the manager any more.
            unsafe { mm.close() };
        }
    }
}
