//! Guarded samples. These are allocations whose misuse ends the process at once, even in
//! production.
//!
//! # Design
//! While the option `guard` is on, the countdown of [`profile`](crate::profile) selects samples
//! among the allocations, with the same probabilities. With both options on, neap guards the
//! samples of `profile`. A sample of up to a page gets a page of its own. The pages lie in a region
//! of 512 slots beside the arena:
//!
//! | pages | access |
//! |---|---|
//! | the page before a slot, and the page behind it | never |
//! | the page of a slot | from the allocation to the free |
//!
//! - Every second allocation ends at the end of its page, or up to 15 bytes before it, because of
//!   the alignment of 16. The others begin at the start of their page. neap fills up to 256 bytes
//!   on each side of an allocation, and the free verifies them.
//! - A free removes the access to the page and releases its memory, unless an isolated CPU is in
//!   use. It queues the slot behind all freed slots. At most half of the slots are live. So neap
//!   guards at least 256 other samples before it uses a slot again.
//! - The region lies outside of the arena, so the fast paths refuse pointers into it. The slow
//!   paths check whether a pointer leads into the region.
//! - Once a sample is guarded, neap does not count allocations until the next tick. So a program
//!   that allocates much runs at its usual speed nearly all of the time. The counting goes on if
//!   the mean is below 512 KiB, or if samples are recorded.
//! - A handler of SIGSEGV finds the slot by the address, and writes [a report](report). At any
//!   other fault, it takes the action that the process had set before. A handler that the program
//!   sets later replaces neap's handler.
//! - With the option off, there is no region, no handler, and no instruction on the fast paths.
//!   With the option on, the fast paths refuse every call while allocations are counted, as with
//!   `profile`.
//!
//! # Locking
//! One mutex guards the order of slots. Threads take it inside the fork gate, and make no system
//! call while they hold it. The signal handler takes no lock. A thread holds the mutex of samples
//! when it starts or ends the counting of allocations.

use crate::mm::{Core, Mm};
use crate::options::ThreadGroups;
use crate::state::guard::FoundMisuse;
use crate::state::guard::trail::Caller;
use crate::state::profile::Pace;
use crate::state::profile::recorder::Recorder;
use core::ptr::without_provenance;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_groups::{Kind, Payer};
use neap_os::fatal::abort;
use neap_os::signal::Fault;
use neap_os::thread_state::countdown_mean;

mod report;

use report::{Call, report};

/// After this number of samples without a slot between two ticks, the counting of allocations ends.
/// Samples find no slot while lasting allocations have most of the slots.
const MOST_VAIN: u32 = 16;

impl<P: Platform> Mm<P> {
    /// Begins to guard samples, one in `mean` bytes on average. The thread that opens the manager
    /// calls this once.
    ///
    /// # Errors
    /// Returns the system's error if it gives no address space. No sample is guarded then.
    pub(crate) fn begin_guard(&self, mean: u64) -> Result<(), Errno> {
        let Some(core) = self.core_if_open() else { return Err(Errno::NOMEM) };
        core.guard.open()?;
        core.guard.mean.store(mean, Ordering::Relaxed);
        self.profile.begin_guard(mean);
        self.fast_path.count_all();
        Ok(())
    }

    /// Ends the counting of allocations until the next tick, if the sample at `memory` is guarded,
    /// or [`MOST_VAIN`] samples have found no slot. The counting goes on if samples are recorded,
    /// if the mean is below [`Pace::WIDENED`], or if `size` bytes are too many for a slot.
    pub(crate) fn rest_from_guarding(&self, core: &Core<P>, _: &Recorder, memory: *mut u8, size: usize) {
        // Relaxed, here and below: only threads that hold the mutex of samples write these words.
        let goes_on = core.guard.rests.load(Ordering::Relaxed)
            || self.profile.is_recorded.load(Ordering::Relaxed)
            || core.guard.mean.load(Ordering::Relaxed) < Pace::WIDENED
            || core.guard.region_for(size).is_none();
        if goes_on {
            return;
        }
        let vain = core.guard.vain.load(Ordering::Relaxed) + 1;
        if core.guard.region_of(memory).is_none() && vain < MOST_VAIN {
            return core.guard.vain.store(vain, Ordering::Relaxed);
        }
        core.guard.rests.store(true, Ordering::Relaxed);
        self.fast_path.count_none();
    }

    /// Counts allocations again, at a tick.
    pub(crate) fn resume_guarding(&self, core: &Core<P>) {
        // Relaxed: this only decides whether to try the mutex of samples, under which the flag
        // changes.
        if core.guard.rests.load(Ordering::Relaxed)
            && let Some(_recorder) = self.profile.recorder.try_lock()
        {
            self.count_for_guard(core);
        }
    }

    /// Counts allocations again. The caller holds the mutex of samples, or is the only thread of
    /// the process.
    pub(crate) fn count_for_guard(&self, core: &Core<P>) {
        core.guard.vain.store(0, Ordering::Relaxed);
        core.guard.rests.store(false, Ordering::Relaxed);
        self.fast_path.count_all();
    }

    /// Allocates `size` bytes in a slot, for a sample. Returns `None` if the sample is not guarded.
    #[cold]
    #[inline(never)]
    pub(crate) fn allocate_guarded(&self, size: usize) -> Option<*mut u8> {
        let core = self.core_if_open()?;
        let region = core.guard.region_for(size)?;
        // The counting has ended. A thread in a group counts all the same. So does a thread that
        // sees the end late.
        if core.guard.rests.load(Ordering::Relaxed) && !self.profile.is_recorded.load(Ordering::Relaxed) {
            return None;
        }
        // Without a mean, this thread has not drawn its first number yet, so this allocation is no
        // sample. While an isolated CPU is in use, no sample is guarded, since removing the access
        // to a page interrupts every CPU that runs the process.
        if countdown_mean() == 0 || core.objects.is_isolated_cpu_in_use() {
            return None;
        }
        let caller = Caller::here();
        let payer = self.pay_for_page(core, region.page_size)?;
        let memory = {
            let _inside = self.gate.enter(core.objects.platform.cpu());
            let number = payer.map_or(0, Payer::to_bits);
            // SAFETY: this thread takes the slot here for this call. The region takes the size, so
            // it is at most a page. The stack of `caller` is this thread's, so it can be read.
            region.take().and_then(|taken| unsafe { region.hand_out(taken, size, number, &caller) })
        };
        if let Some(payer) = payer {
            match memory {
                Some(_) => _ = core.guard.paid.fetch_add(region.page_size as u64, Ordering::Relaxed),
                None => self.uncharge_run(payer, region.page_size as u64),
            }
        }
        memory
    }

    /// Charges a page to the group that the thread is in, if any. Returns `None` if the group
    /// refuses, or if neap has yet to put the thread into a group.
    fn pay_for_page(&self, core: &Core<P>, bytes: usize) -> Option<Option<Payer>> {
        let (Some(group), Some(grouped)) = (self.group_of_thread(), self.groups_if_made()) else {
            return (core.options.groups == ThreadGroups::Off).then_some(None);
        };
        let payer = group.payer(Kind::Pages, grouped.node());
        grouped.charge(payer, bytes as u64, self.how()).ok().map(|()| Some(payer))
    }

    /// Frees the memory at a pointer into the region. A misuse ends the process.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_guarded(&self, core: &Core<P>, pointer: *mut u8) {
        let Some(region) = core.guard.region() else { return };
        self.end_sample_of_run(core, pointer);
        let (caller, seals) = (Caller::here(), !core.objects.is_isolated_cpu_in_use());
        let payer = {
            let _inside = self.gate.enter(core.objects.platform.cpu());
            // SAFETY: no thread uses the memory any more (the promise of `free`'s caller). The
            // stack of `caller` is this thread's, so it can be read.
            unsafe { region.retire(pointer.addr(), seals, &caller) }
                .unwrap_or_else(|found| end(&found, "free", &caller))
        };
        if payer != 0 {
            core.guard.paid.fetch_sub(region.page_size as u64, Ordering::Relaxed);
            self.uncharge_run(Payer::from_bits(payer), region.page_size as u64);
        }
    }
}

impl<P: Platform> Core<P> {
    /// Returns the bytes of a guarded allocation. Returns `None` if the pointer leads elsewhere. A
    /// misuse ends the process.
    pub(crate) fn guarded_size(&self, pointer: *const u8, call: &str) -> Option<usize> {
        let region = self.guard.region_of(pointer)?;
        Some(region.size_at(pointer.addr()).unwrap_or_else(|found| end(&found, call, &Caller::here())))
    }

    /// Returns the payer of the guarded allocation that a pointer leads into.
    ///
    /// # Errors
    /// Returns `Err` if the pointer leads elsewhere.
    pub(crate) fn guarded_payer(&self, pointer: *const u8) -> Result<Option<Payer>, ()> {
        let payer = self.guard.region_of(pointer).ok_or(())?.payer_at(pointer.addr());
        Ok((payer != 0).then(|| Payer::from_bits(payer)))
    }
}

/// Ends the process with a report of a misuse that a call has found.
#[cold]
fn end(found: &FoundMisuse<'_>, call: &str, caller: &Caller) -> ! {
    report(found, &Call::Function(call), caller);
    abort()
}

/// Reports a failed access to the region. Returns `false` if the fault was elsewhere. If several
/// threads fail at once, one reports, and the others wait until it ends the process.
pub(crate) fn report_fault<P: Platform>(mm: &Mm<P>, fault: &Fault) -> bool {
    /// Nanoseconds for which another thread waits at most.
    const WAIT: u64 = 5_000_000_000;
    let region = mm.core_if_open().and_then(|core| core.guard.region_of(without_provenance(fault.address)));
    let Some(found) = region.and_then(|region| region.blame(fault.address)) else { return false };
    // Relaxed: it only decides which thread is first.
    if mm.of_process.has_reported.swap(true, Ordering::Relaxed) {
        neap_os::thread::sleep(WAIT);
    } else {
        report(&found, &Call::Access(fault.at), &Caller::with(fault.at.stack_pointer));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::{Background, Options};
    use neap_groups::{Bound, GroupId};
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::vec::Vec;

    /// Runs `test` with a manager that guards each allocation, as long as slots are free.
    fn with_guard(options: Options, test: impl FnOnce(&Mm<Virtual>)) {
        with_guard_of(1, options, test);
    }

    /// Runs `test` with a manager that guards an allocation in `mean` bytes.
    fn with_guard_of(mean: u64, options: Options, test: impl FnOnce(&Mm<Virtual>)) {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let options = Options { stat: false, background: Background::Never, ..options };
        // SAFETY: the manager stays in its box until it is closed.
        unsafe { mm.open(Virtual::new(4096, 2), &options) }.unwrap();
        mm.begin_guard(mean).unwrap();
        // The thread draws its first number, maybe again after another test's manager.
        for _ in 0..2 {
            let first = mm.allocate(100);
            // SAFETY: the block is this test's.
            unsafe { mm.free(first) };
        }
        test(&mm);
        mm.verify(0).unwrap();
        // SAFETY: the test has freed all, and this thread, in no group now, is the only user.
        unsafe { mm.close() };
    }

    fn is_guarded(mm: &Mm<Virtual>, memory: *mut u8) -> bool {
        mm.core().unwrap().guard.region_of(memory).is_some()
    }

    #[test]
    fn samples_are_guarded_whatever_call_asks_for_them() {
        with_guard(Options::DEFAULT, |mm| {
            let blocks =
                [mm.allocate(99), mm.allocate_zeroed(99), mm.allocate_aligned(99, 64), mm.allocate_aligned(4000, 4096)];
            for (block, (size, align)) in blocks.into_iter().zip([(99, 16), (99, 16), (99, 64), (4000, 4096)]) {
                assert!(is_guarded(mm, block) && block.addr().is_multiple_of(align), "{block:p}, {size}, {align}");
                assert!(mm.usable_size(block) >= size);
            }
            assert_eq!(mm.usable_size(blocks[0]), 99);
            // SAFETY: the block is this test's, and was to be zero.
            assert!(unsafe { core::slice::from_raw_parts(blocks[1], 99) }.iter().all(|&byte| byte == 0));
            // SAFETY: the blocks are this test's.
            unsafe {
                blocks[0].write_bytes(5, 99);
                // Fewer bytes may be no sample: three are none once in twenty runs.
                let moved = [40, 200, 5000, 100_000, 50].iter().fold(blocks[0], |block, &size| {
                    let moved = mm.reallocate(block, size);
                    assert_eq!((is_guarded(mm, moved), moved.add(39).read()), (size <= 4096, 5), "{size}");
                    moved
                });
                mm.free(moved);
                blocks[1..].iter().for_each(|&block| mm.free(block));
            }
            let large = mm.allocate(4097);
            assert!(!is_guarded(mm, large));
            // SAFETY: the block is this test's.
            unsafe { mm.free(large) };
            assert_eq!(mm.core().unwrap().guard.region().unwrap().numbers().0, 0);
        });
    }

    #[test]
    fn one_sample_is_guarded_between_two_ticks() {
        with_guard_of(Pace::WIDENED, Options::DEFAULT, |mm| {
            let guarded = |bytes: u64| {
                let blocks = (0..bytes / 99).map(|_| {
                    let block = mm.allocate(99);
                    let found = is_guarded(mm, block);
                    // SAFETY: the block is this test's.
                    unsafe { mm.free(block) };
                    found
                });
                blocks.filter(|&found| found).count()
            };
            // None comes in that many bytes once in e^40 runs.
            for tick in 1..4 {
                assert_eq!(guarded(40 * Pace::WIDENED), 1, "tick {tick}");
                mm.tick(tick << 30);
            }
        });
        with_guard_of(Pace::WIDENED - 1, Options::DEFAULT, |mm| {
            let mut guarded = 0;
            for _ in 0..40 * Pace::WIDENED / 99 {
                let block = mm.allocate(99);
                guarded += usize::from(is_guarded(mm, block));
                // SAFETY: the block is this test's.
                unsafe { mm.free(block) };
            }
            assert!(guarded > 10, "{guarded}: closer samples were asked for");
        });
    }

    #[test]
    fn counting_rests_after_samples_that_found_no_slot() {
        with_guard_of(Pace::WIDENED, Options::DEFAULT, |mm| {
            let core = mm.core().unwrap();
            // Nothing is guarded meanwhile.
            core.objects.platform.use_isolated_cpu(true);
            core.objects.look_for_isolated_use();
            let samples_in = |bytes: u64, size: usize| {
                for _ in 0..bytes / size as u64 {
                    // SAFETY: the block is this test's.
                    unsafe { mm.free(mm.allocate(size)) };
                }
            };
            samples_in(100 * Pace::WIDENED, 5000);
            assert!(!core.guard.rests.load(Ordering::Relaxed), "none so large finds a slot");
            samples_in(100 * Pace::WIDENED, 99);
            assert!(core.guard.rests.load(Ordering::Relaxed));
            core.objects.platform.use_isolated_cpu(false);
            mm.tick(1 << 30);
            assert!(!core.guard.rests.load(Ordering::Relaxed));
        });
    }

    #[test]
    fn thread_in_a_group_pays_for_the_page() {
        with_guard(Options { refuse: true, ..Options::DEFAULT }, |mm| {
            let groups = mm.groups().unwrap();
            let parent = groups.create(GroupId::ROOT, "parent").unwrap();
            let group = groups.create(parent, "guarded").unwrap();
            let used = |id| groups.used(id).unwrap();
            let before = mm.enter(Some(group));
            let block = mm.allocate(99);
            assert!(is_guarded(mm, block) && used(group) == 4096, "{}", used(group));
            // SAFETY: the block is this test's, and is not freed meanwhile.
            assert_eq!(unsafe { mm.payer_at(block.add(50)) }.map(|payer| payer.id()), Some(group));
            mm.verify(0).unwrap();
            groups.set_bound(group, Bound::Max, 8000).unwrap();
            let others: Vec<*mut u8> = (0..3).map(|_| mm.allocate(99)).collect();
            assert!(others.iter().all(|&other| !other.is_null() && !is_guarded(mm, other)), "the group has no room");
            mm.leave(before);
            groups.delete(group).unwrap();
            assert!(used(parent) >= 4096);
            // SAFETY: the blocks are this test's.
            unsafe { others.into_iter().chain([block]).for_each(|block| mm.free(block)) };
            assert_eq!((used(parent), mm.core().unwrap().guard.paid.load(Ordering::Relaxed)), (0, 0));
        });
    }

    #[test]
    fn nothing_loses_its_access_while_an_isolated_cpu_is_used() {
        with_guard(Options::DEFAULT, |mm| {
            let kept = mm.allocate(99);
            assert!(is_guarded(mm, kept));
            let core = mm.core().unwrap();
            let page = kept.map_addr(|at| at & !4095);
            core.objects.platform.use_isolated_cpu(true);
            core.objects.look_for_isolated_use();
            let ordinary = mm.allocate(99);
            assert!(!is_guarded(mm, ordinary));
            // SAFETY: the blocks are this test's; the page of a freed one has access, as is tested.
            unsafe {
                mm.free(ordinary);
                mm.free(kept);
                page.write(1);
            }
            core.objects.platform.use_isolated_cpu(false);
            core.objects.look_for_isolated_use();
        });
    }
}
