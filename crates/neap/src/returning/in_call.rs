//! Returns memory from the program's own frees, where neap has no thread.
//!
//! # Design
//! A program may make no further call after its last free, so a free cannot leave work to a later
//! tick. Frees that take the slow path count the bytes that they return. The *surplus* is the
//! resident bytes in free pages and in free objects of slabs and barns. When the counted bytes may
//! have lifted the surplus above a bound, the free *looks*: it adds the surplus up, and reduces it
//! to [`LOW`]:
//!
//! 1. It releases free pages.
//! 2. It returns objects of the fullest barn to their slabs. Slabs without objects in use become
//!    free pages.
//! 3. It drains the stacks of CPUs. Their few objects keep many slabs from becoming free pages.
//! 4. It releases pages without objects of slabs in use.
//!
//! While the live bytes shrink, step 1 releases only large blocks, none of them a part of a whole
//! huge page, and step 4 does nothing: single free pages may still become parts of larger blocks.
//! Single pages are released when the live bytes no longer shrink and the surplus is more than half
//! of them. They are also released at the end of a burst ([`Learned::is_late`]).
//!
//! A heap that never was larger than a small one
//! ([`NodePages::was_always_small`](neap_pages::NodePages::was_always_small)) returns whole huge
//! pages alone. They are worth more than the little that it keeps. If that leaves the surplus above
//! its bound, the next look waits for frees of a quarter of the surplus. A look empties caches.
//!
//! A look reads every class cache. Before that, the free adds the free pages, which it can read at
//! once, to the free objects of the last look and those freed since. If that sum is below the bound
//! of a look within a second, the program has allocated again what it freed, and the look is put
//! off.
//!
//! A call releases at most [`CALL_BYTES_MAX`] beyond the run that it frees, and returns at most
//! about [`CALL_OBJECTS_MAX`] objects to slabs. If it stops at these limits, the next slow free
//! goes on.
//!
//! Calls learn how much surplus to keep beyond [`LOW`]. If they have released bytes that the
//! program soon takes from the system again, and more bytes are live then, they should have kept
//! these bytes. The bound grows by these bytes, and shrinks by an eighth a second. Calls offer
//! whole free chunks of the kept memory to the system (lazily free), if the program did not need
//! them between two ticks. The system takes them when it is short of memory. Calls do not offer
//! chunks sooner, because the first write to an offered page costs as much as a fault.
//!
//! # Locking
//! A mutex protects the learned numbers. Calls only try to take it, so one call at a time releases
//! memory. Each step holds the locks of zones and classes for one batch.

use crate::mm::{Core, Mm};
use crate::state::in_call::{HIGH, Returned, STEP};
use core::sync::atomic::Ordering::Relaxed;
use neap_base::gate::Inside;
use neap_base::{Order, Platform};
use neap_objects::objects::Punched;
use neap_pages::{Effort, HUGE};

/// Bytes to which frees reduce the surplus, if nothing was learned.
const LOW: u64 = 8 << 20;
/// Bytes of surplus that replace both [`LOW`] and [`HIGH`] while objects in use keep most free
/// memory from being released. That is so if a look has left the surplus above its bound, and the
/// surplus is more than half of the resident memory.
///
/// Objects on the stacks of CPUs keep pages, too, and are not part of the surplus. So this bound is
/// lower.
const SCATTERED: u64 = 3 << 20;
/// Most bytes that one call releases, beyond the run that it frees.
pub(crate) const CALL_BYTES_MAX: u64 = 16 << 20;
/// Most objects that one call returns to slabs. Its last step may go beyond that.
const CALL_OBJECTS_MAX: u64 = 1 << 16;
/// Most slabs in use that one call examines for empty pages.
const CALL_SLABS_MAX: usize = 1024;
/// Slabs whose empty pages are released before the bytes are counted again.
const FEW_SLABS: usize = 8;
/// Bytes that slow frees return between two looks, at least, after the system refused to release
/// anything. It refuses for locked memory.
const REFUSED: u64 = 64 << 20;
/// The smallest free blocks that calls release while a burst is being freed: 16 pages. A call for
/// each page would cost more than the page is worth, and blocks grow as their neighbours come free.
const LEAST: Order = Order(4);
/// Page lists with this many pages or fewer in all are not worth draining.
const FEW_LISTED: u64 = 64;

/// Result of [`Core::release_pages`].
#[derive(Clone, Copy)]
struct Released {
    bytes: u64,
    /// Whether the system refused to release any.
    is_refused: bool,
}

/// Result of reducing the surplus.
#[derive(Clone, Copy, Debug, Default)]
struct Worked {
    /// Bytes that went to the system.
    gone: u64,
    /// Whether the call stopped at its limits, so that surplus may be left.
    more: bool,
    /// Whether the system refused to release anything.
    refused: bool,
}

impl<P: Platform> Core<P> {
    /// Counts the bytes that a free on the slow path returned, if neap has no thread, and looks if
    /// due. Then wakes neap's thread, or ticks in its place.
    #[inline]
    pub(crate) fn after_free(&self, mm: &Mm<P>, returned: Returned) {
        if !self.background.has_thread() && self.in_call.count(returned) {
            let own = if let Returned::Run(bytes) = returned { bytes } else { 0 };
            self.look(mm, own as u64);
        }
        self.after_slow_path(mm);
    }

    /// Adds the surplus up and reduces it. `own` bytes of it are a run that the caller has freed.
    #[cold]
    #[inline(never)]
    fn look(&self, mm: &Mm<P>, own: u64) {
        let platform = &self.objects.platform;
        let keep = self.maintenance.kept();
        if keep == u64::MAX || platform.is_isolated(platform.cpu()) {
            return self.in_call.left.store(REFUSED as i64, Relaxed);
        }
        let inside = mm.gate.enter(platform.cpu());
        let now = platform.now();
        if self.in_call.put_off(self.objects.free_page_bytes(), now) {
            return;
        }
        let Some(mut learned) = self.in_call.learned.try_lock(&inside) else { return };
        let free = self.objects.free_objects();
        let surplus = free.resident + self.objects.free_page_bytes();
        let live = self.live(surplus);
        // Other live bytes keep no slab from becoming free pages.
        let pinning = live.min(free.pinning);
        learned.learn(self.objects.pages.grown() << self.objects.pages.page_shift(), live, own, now);
        self.in_call.kept.store(learned.kept, Relaxed);
        let kept = learned.kept.max(keep);
        let is_scattered = learned.fruitless > 0 && surplus > self.resident() / 2;
        let (low, high) = if is_scattered { (SCATTERED + kept, SCATTERED + kept) } else { (LOW + kept, HIGH + kept) };
        let mut next = high.saturating_sub(surplus).max(STEP);
        if surplus > high && !platform.is_isolated_cpu_in_use() {
            let most = (surplus - low).min(CALL_BYTES_MAX + own);
            let has_settled = learned.has_settled(live, now);
            let is_small = self.objects.pages.was_always_small();
            let scattered = has_settled && surplus > live / 2 || learned.is_late(surplus, pinning);
            let least = match scattered {
                _ if is_small => HUGE,
                true => Order(0),
                false => LEAST,
            };
            let worked = self.work_down(&inside, most, least, &|| mm.gate.is_closed());
            learned.give(worked.gone, now);
            let rest = surplus.saturating_sub(worked.gone);
            next = if worked.refused {
                REFUSED
            } else if worked.more {
                0
            } else if rest > high && is_small {
                rest / 4
            } else if rest > high {
                learned.after_stuck(rest, pinning, worked.gone)
            } else {
                learned.fruitless = 0;
                (high - rest).max(STEP)
            };
        }
        // Work of this look may have put objects of stacks into slabs.
        let objects = if surplus > high { self.objects.free_objects().resident } else { free.resident };
        self.in_call.note_look(next, objects, high, now);
    }

    /// Returns the resident bytes outside of `surplus`, without the waste of slabs. They are in
    /// use, or in objects on the stacks of CPUs.
    fn live(&self, surplus: u64) -> u64 {
        self.resident().saturating_sub(surplus).saturating_sub(self.objects.slab_waste())
    }

    fn resident(&self) -> u64 {
        self.objects.pages.resident() << self.objects.pages.page_shift()
    }

    /// Releases about `most` bytes of the surplus to the system. Releases free blocks of at least
    /// order `least`, and with order 0 also empty pages of slabs in use. Ends early if `stop`
    /// returns true.
    fn work_down(&self, _: &Inside<'_>, most: u64, least: Order, stop: &dyn Fn() -> bool) -> Worked {
        let (mut worked, mut objects) = (Worked::default(), 0);
        let release = |worked: &mut Worked| {
            let released = self.release_pages(most - worked.gone.min(most), least, stop);
            worked.gone += released.bytes;
            worked.refused |= released.is_refused;
            worked.gone < most && !worked.refused && !stop()
        };
        if !release(&mut worked) {
            return Worked { more: !worked.refused, ..worked };
        }
        while let Some(more) =
            self.objects.shrink_fullest_barn(most - worked.gone.min(most), CALL_OBJECTS_MAX - objects, stop)
        {
            objects += more;
            if !release(&mut worked) || objects >= CALL_OBJECTS_MAX {
                return Worked { more: !worked.refused, ..worked };
            }
        }
        for cpu in self.objects.cpu_caches.used().iter() {
            if self.may_take_in_call(cpu) {
                objects += self.objects.drain_cpu(cpu, |_| true).unwrap_or(0);
            }
        }
        if objects > 0 && !release(&mut worked) {
            return Worked { more: !worked.refused, ..worked };
        }
        if least == Order(0) {
            self.release_holes(most - worked.gone.min(most), &mut worked, stop);
        }
        worked
    }

    /// Offers those kept free chunks to the system that the program did not need since the last
    /// tick. Ticks within calls use this.
    pub(crate) fn offer_kept(&self, _: &Inside<'_>) {
        let [keep, most] = [HIGH, CALL_BYTES_MAX].map(|bytes| (bytes >> self.objects.pages.page_shift()) as u32);
        self.objects.pages.offer(&self.objects.platform, keep, most);
    }

    /// Releases free pages, as many as are lazily free. The last step before an allocation
    /// fails. Returns the number of released bytes.
    pub(crate) fn release_lazily_free(&self, _: &Inside<'_>, stop: &dyn Fn() -> bool) -> u64 {
        let bytes = self.objects.pages.lazily_free() << self.objects.pages.page_shift();
        self.release_pages(bytes, Order(0), stop).bytes
    }

    /// Releases up to `bytes` bytes of free blocks of at least order `least`.
    fn release_pages(&self, bytes: u64, least: Order, stop: &dyn Fn() -> bool) -> Released {
        let (pages, platform) = (&self.objects.pages, &self.objects.platform);
        let wanted = u32::try_from(bytes >> pages.page_shift()).unwrap_or(u32::MAX);
        if pages.backed_free_pages() < u64::from(wanted) && pages.listed() > FEW_LISTED {
            pages.drain_all(platform);
        }
        // Until a burst is at its end, live objects need the rest of each whole huge page.
        let effort = if least == Order(0) { Effort::Sparing } else { Effort::Whole };
        let (mut released, mut failed) = (0, 0);
        for node in 0..pages.nodes() {
            let wanted = wanted - released.min(wanted);
            let report = pages.node(node).release_blocks(platform, wanted, least, effort, stop);
            pages.node(node).expect_again(report.released);
            released += report.released;
            failed += report.failed;
        }
        Released { bytes: u64::from(released) << pages.page_shift(), is_refused: released == 0 && failed > 0 }
    }

    /// Releases about `bytes` bytes of empty pages of slabs in use.
    fn release_holes(&self, bytes: u64, worked: &mut Worked, stop: &dyn Fn() -> bool) {
        let (pages, before, mut looked) = (&self.objects.pages, worked.gone, 0);
        for node in 0..pages.nodes() {
            // A round lets slabs come to rest at its end. So the round after an empty one may find
            // some.
            let mut dry = 0;
            while dry < 2 && worked.gone - before < bytes && looked < CALL_SLABS_MAX && !stop() {
                let Punched { slabs, report } = self.objects.punch_on(node, Effort::Sparing, FEW_SLABS, stop);
                pages.node(node).expect_again(report.released);
                worked.gone += u64::from(report.released) << pages.page_shift();
                looked += slabs;
                dry = if slabs < FEW_SLABS { dry + 1 } else { 0 };
            }
        }
        worked.more |= worked.gone > before && (worked.gone - before >= bytes || looked >= CALL_SLABS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use crate::state::in_call::{SECOND, SETTLED};
    use neap_testing::random::{Random, seed};
    use neap_testing::virtual_platform::{Call, Virtual};
    use std::boxed::Box;
    use std::format;
    use std::vec::Vec;

    const MIB: u64 = 1 << 20;

    fn open(machine: Virtual) -> Box<Mm<Virtual>> {
        open_with(machine, 0)
    }

    fn open_with(machine: Virtual, limit: u64) -> Box<Mm<Virtual>> {
        opened_by(machine, &Options { limit, ..Options::DEFAULT })
    }

    fn opened_by(machine: Virtual, options: &Options) -> Box<Mm<Virtual>> {
        let mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(machine, &Options { stat: false, ..*options }) }.unwrap();
        mm
    }

    fn close(mut mm: Box<Mm<Virtual>>) {
        assert_eq!(mm.verify(0).map(|_| ()), Ok(()));
        // SAFETY: no thread uses the manager any more.
        unsafe { mm.close() };
    }

    fn surplus(mm: &Mm<Virtual>) -> u64 {
        let core = mm.core().unwrap();
        core.objects.free_objects().resident + core.objects.free_page_bytes()
    }

    fn resident(mm: &Mm<Virtual>) -> u64 {
        mm.core().unwrap().resident()
    }

    /// Allocates `bytes` bytes in blocks of `size`, and frees them in the given order, on one CPU
    /// after the other. Returns the most bytes that one free released.
    fn burst(mm: &Mm<Virtual>, bytes: u64, size: usize, order: u64, cpus: usize) -> u64 {
        let mut blocks: Vec<*mut u8> = (0..bytes as usize / size).map(|_| mm.allocate(size)).collect();
        match order {
            0 => {}
            1 => blocks.reverse(),
            seed => {
                let mut random = seed;
                for last in (1..blocks.len()).rev() {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    blocks.swap(last, (random >> 33) as usize % (last + 1));
                }
            }
        }
        let gone = || mm.core().unwrap().objects.pages.statistics().released << 12;
        let mut most = 0;
        for (n, &block) in blocks.iter().enumerate() {
            Virtual::run_on(n * 4 / blocks.len() % cpus);
            let before = gone();
            // SAFETY: the blocks are this test's.
            unsafe { mm.free(block) };
            most = most.max(gone() - before);
        }
        Virtual::run_on(0);
        most
    }

    /// Frees a block. Returns whether the free looked.
    fn looks_at(mm: &Mm<Virtual>, block: *mut u8) -> bool {
        let left = &mm.core().unwrap().in_call.left;
        // A look that leaves 0 differs from a free that does not look.
        let before = left.load(Relaxed).max(1);
        left.store(before, Relaxed);
        // SAFETY: the block is the caller's.
        unsafe { mm.free(block) };
        left.load(Relaxed) > before || left.load(Relaxed) == 0
    }

    /// Allocates a block, and frees it.
    fn pair(mm: &Mm<Virtual>, size: usize) {
        let block = mm.allocate(size);
        // SAFETY: the block is this function's.
        unsafe { mm.free(block) };
    }

    #[test]
    fn first_burst_leaves_little_whatever_its_order() {
        let sizes = [16, 64, 512, 5000, 20_000, 100_000, 3 << 20];
        // A run beside them keeps no slab from being whole.
        for (size, order, run) in sizes
            .into_iter()
            .flat_map(|size| [(0, 0), (1, 0), (7, 0), (7, 6 << 20)].map(|(order, run)| (size, order, run)))
        {
            let mm = open(Virtual::new(4096, 2));
            let held = mm.allocate(run);
            let before = resident(&mm);
            let most = burst(&mm, 40 * MIB, size, order, 2);
            let left = resident(&mm) - before;
            let case = format!("blocks of {size} bytes, order {order}, beside {run} bytes");
            assert!(left <= 16 * MIB, "{left} bytes left of {case}");
            assert!(most <= CALL_BYTES_MAX + size as u64 + MIB, "{most} bytes by one free of {case}");
            // SAFETY: allocated above, and freed once.
            unsafe { mm.free(held) };
            close(mm);
        }
    }

    /// What a garbage collector frees is allocated again. Small pages would serve it from then on.
    #[test]
    fn small_heap_keeps_its_huge_pages() {
        for (huge, most) in [(true, 24 * MIB), (false, 12 * MIB)] {
            let mm = opened_by(Virtual::new(4096, 1), &Options { huge, ..Options::DEFAULT });
            let core = mm.core().unwrap();
            let bursts = |times| (0..times).for_each(|_| _ = burst(&mm, 18 * MIB, 64, 7, 1));
            bursts(1);
            assert!(resident(&mm) <= most, "{} bytes are left", resident(&mm));
            if huge {
                bursts(1);
                let released = core.objects.platform.released_bytes();
                bursts(10);
                assert_eq!((core.objects.platform.released_bytes(), core.objects.platform.splits()), (released, 0));
            }
            close(mm);
        }
    }

    /// A look empties caches. In a small heap whose huge pages are all in use that is in vain.
    #[test]
    fn small_heap_is_seldom_looked_at() {
        let mm = open(Virtual::new(4096, 1));
        let blocks: Vec<*mut u8> = (0..20 * MIB / 500).map(|_| mm.allocate(500)).collect();
        // One of 64 stays: one or more in each huge page.
        let freed = blocks.iter().enumerate().filter(|(n, _)| n % 64 > 0);
        let looks = freed.filter(|(_, block)| looks_at(&mm, **block)).count();
        assert!(surplus(&mm) > 12 * MIB, "{}", surplus(&mm));
        assert!((1..40).contains(&looks), "{looks} looks");
        close(mm);
    }

    /// A look reads every class cache. A buffer that is freed and allocated again needs none.
    #[test]
    fn free_that_is_allocated_again_puts_the_look_off() {
        let mm = open(Virtual::new(4096, 1));
        let core = mm.core().unwrap();
        let held = [64, 5000, 100_000].map(|size| mm.allocate(size));
        (0..20).for_each(|_| pair(&mm, 4 << 20));
        {
            // A look that finds the numbers held does nothing, and the next free looks again.
            let inside = mm.gate.enter(0);
            let _numbers = core.in_call.learned.try_lock(&inside).unwrap();
            for size in [4 << 20, 1 << 20, 100_000, 6 << 20] {
                (0..1000).for_each(|_| pair(&mm, size));
                assert!(!core.in_call.is_due(), "blocks of {size} bytes");
            }
        }
        // What stays free is seen at once.
        burst(&mm, 64 * MIB, 4 << 20, 0, 1);
        assert!(surplus(&mm) <= HIGH + core.in_call.kept(), "{} bytes", surplus(&mm));
        // SAFETY: each was allocated above, and is freed once.
        held.into_iter().for_each(|block| unsafe { mm.free(block) });
        close(mm);
    }

    /// The run is not live any more when its free looks.
    #[test]
    fn large_run_that_is_allocated_again_and_again_keeps_its_memory() {
        let mm = open(Virtual::new(4096, 1));
        let core = mm.core().unwrap();
        for size in [20 << 20, 100 << 20] {
            (0..10).for_each(|_| pair(&mm, size));
            let released = core.objects.platform.released_bytes();
            (0..100).for_each(|_| pair(&mm, size));
            let released = core.objects.platform.released_bytes() - released;
            assert!(released < 2 * MIB, "{released} bytes of 100 blocks of {size}");
        }
        // An eighth of what was kept goes each second, and calls look after some frees.
        core.objects.platform.advance(100 * SECOND);
        (0..30).for_each(|_| pair(&mm, 11 << 20));
        assert!(resident(&mm) < 16 * MIB, "{} bytes after a while", resident(&mm));
        close(mm);
    }

    /// Runs of random lengths leave free pages that fit no other run for a while. Growth replaces
    /// some of these, and then comes to an end.
    #[test]
    fn runs_of_random_lengths_settle() {
        let mm = open(Virtual::new(4096, 1));
        let core = mm.core().unwrap();
        let mut random = Random(seed());
        let mut runs = [core::ptr::null_mut::<u8>(); 50];
        let (mut taken, mut grown, mut peak) = (0, 0, 0);
        for n in 0..6000 {
            let run = &mut runs[random.below(50)];
            // SAFETY: the run is this test's, and is freed once.
            unsafe { mm.free(*run) };
            let size = 100_000 + random.below(1_900_000);
            *run = mm.allocate(size);
            peak = peak.max(resident(&mm));
            if n == 1000 {
                grown = core.objects.pages.grown();
            }
            taken += if n > 1000 { size as u64 >> 12 } else { 0 };
        }
        let grown = core.objects.pages.grown() - grown;
        assert!(grown < taken / 50, "{grown} of {taken} pages came from the system");
        assert!(peak < 128 * MIB, "{peak} bytes for 70 MiB");
        // SAFETY: each is this test's, and is freed once.
        runs.into_iter().for_each(|run| unsafe { mm.free(run) });
        close(mm);
    }

    #[test]
    fn burst_that_comes_again_finds_its_memory() {
        for size in [512, 100_000] {
            let mm = open(Virtual::new(4096, 1));
            (0..4).for_each(|_| _ = burst(&mm, 40 * MIB, size, 0, 1));
            let platform = &mm.core().unwrap().objects.platform;
            let (released, grown) = (platform.released_bytes(), mm.core().unwrap().objects.pages.grown());
            (0..10).for_each(|_| _ = burst(&mm, 40 * MIB, size, 0, 1));
            // A twentieth: runs of 25 pages do not always find the same places.
            let released = platform.released_bytes() - released;
            assert!(released < 20 * MIB, "{released} bytes went in ten bursts of blocks of {size} bytes");
            let grown = (mm.core().unwrap().objects.pages.grown() - grown) << 12;
            assert!(grown < 20 * MIB, "{grown} bytes in ten bursts of blocks of {size} bytes");
            assert!(resident(&mm) > 32 * MIB, "what stays serves the next burst");
            // A minute without one.
            platform.advance(60 * SECOND);
            burst(&mm, 12 * MIB, size, 0, 1);
            assert!(resident(&mm) < 16 * MIB, "{} bytes after a minute", resident(&mm));
            close(mm);
        }
    }

    /// Bursts whose memory stays, then calls from time to time.
    fn keep_and_rest(mm: &Mm<Virtual>) {
        (0..3).for_each(|_| _ = burst(mm, 64 * MIB, 100_000, 0, 1));
        for _ in 0..6 {
            mm.core().unwrap().objects.platform.advance(300_000_000);
            (0..100).for_each(|_| pair(mm, 50_000));
        }
    }

    #[test]
    fn kept_memory_that_rests_is_offered_and_never_taken_for_zeroes() {
        let mm = open(Virtual::new(4096, 1));
        let core = mm.core().unwrap();
        keep_and_rest(&mm);
        let (offered, lazy) = (core.objects.platform.offered_bytes(), core.objects.pages.lazily_free() << 12);
        assert!(lazy > 24 * MIB && offered < 2 * lazy, "{lazy} bytes are lazily free, of {offered} offered");
        assert!(resident(&mm) > 40 * MIB, "they count as resident");
        let blocks = [(); 9].map(|()| mm.allocate_zeroed(6 << 20));
        for block in blocks {
            // SAFETY: `allocate_zeroed` gave this test 6 MiB at `block`, all initialized.
            assert!((0..6 << 20).step_by(512).all(|at| unsafe { block.add(at).read() } == 0));
            // SAFETY: the 6 MiB at `block` are this test's until it frees them below.
            unsafe { block.write_bytes(1, 6 << 20) };
        }
        assert!(core.objects.pages.lazily_free() << 12 < 8 * MIB, "{}", core.objects.pages.lazily_free());
        // SAFETY: `mm` allocated each block above, and each is freed once.
        blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
        close(mm);
    }

    #[test]
    fn kept_memory_stays_where_it_cannot_be_offered() {
        let mm = open(Virtual::new(4096, 1));
        let core = mm.core().unwrap();
        core.objects.platform.fail(Call::ReleaseLazily, 0, usize::MAX);
        keep_and_rest(&mm);
        assert_eq!((core.objects.pages.lazily_free(), core.objects.platform.offered_bytes()), (0, 0));
        assert!(resident(&mm) > 40 * MIB);
        close(mm);
    }

    #[test]
    fn lazily_free_memory_goes_before_an_allocation_fails() {
        let mm = open_with(Virtual::new(4096, 1), 128 * MIB);
        keep_and_rest(&mm);
        let core = mm.core().unwrap();
        assert!(core.objects.pages.lazily_free() << 12 > 24 * MIB);
        let block = mm.allocate(100 << 20);
        assert!(mm.allocate(100 << 20).is_null() && core.objects.pages.lazily_free() == 0);
        // SAFETY: the block is this test's.
        unsafe { mm.free(block) };
        close(mm);
    }

    #[test]
    fn pages_between_survivors_go_when_these_have_settled() {
        for size in [512, 4000] {
            let mm = open(Virtual::new(4096, 1));
            let blocks: Vec<*mut u8> = (0..(64 << 20) / size).map(|_| mm.allocate(size)).collect();
            for (_, block) in blocks.iter().enumerate().filter(|(n, _)| n % 20 > 0) {
                // SAFETY: the blocks are this test's.
                unsafe { mm.free(*block) };
            }
            let left = resident(&mm) - 64 * MIB / 20;
            assert!(left < 32 * MIB, "{left} bytes right after the burst, blocks of {size} bytes");
            // Calls that take and free as much as lies between two looks, before and after the
            // survivors have settled.
            for _ in 0..10 {
                burst(&mm, MIB / 4, 100_000, 0, 1);
            }
            mm.core().unwrap().objects.platform.advance(SETTLED);
            for _ in 0..100 {
                burst(&mm, MIB / 4, 100_000, 0, 1);
            }
            let surplus = surplus(&mm);
            assert!(surplus < 32 * MIB, "{surplus} bytes are free, blocks of {size} bytes");
            close(mm);
        }
    }

    /// What calls release brings the surplus down, and not the end of the burst nearer.
    #[test]
    fn large_burst_leaves_little_beyond_pages_of_survivors() {
        const BURST: u64 = 192 * MIB;
        let mm = open(Virtual::new(4096, 1));
        let blocks: Vec<*mut u8> = (0..BURST / 4000).map(|_| mm.allocate(4000)).collect();
        for (_, block) in blocks.iter().enumerate().filter(|(n, _)| n % 20 > 0) {
            // SAFETY: the blocks are this test's.
            unsafe { mm.free(*block) };
        }
        let left = resident(&mm) - BURST / 20;
        assert!(left < 16 * MIB, "{left} bytes");
        close(mm);
    }

    #[test]
    fn burst_freed_at_random_goes_by_few_system_calls() {
        // A call for each page would be 24,576.
        for (size, most) in [(512, 2500), (4000, 250), (30_000, 100)] {
            let mm = open(Virtual::new(4096, 1));
            burst(&mm, 96 * MIB, size, 7, 1);
            let calls = mm.core().unwrap().objects.pages.statistics().release_calls;
            assert!(resident(&mm) < 16 * MIB, "{} bytes left of blocks of {size} bytes", resident(&mm));
            assert!(calls < most, "{calls} calls for blocks of {size} bytes");
            close(mm);
        }
    }

    #[test]
    fn objects_that_keep_pages_do_not_make_every_free_look() {
        let mm = open(Virtual::new(4096, 1));
        let blocks: Vec<*mut u8> = (0..200_000).map(|_| mm.allocate(500)).collect();
        // One of eight stays, so every page is in use.
        let freed = blocks.iter().enumerate().filter(|(n, _)| n % 8 > 0);
        let looks = freed.filter(|(_, block)| looks_at(&mm, **block)).count();
        assert!(surplus(&mm) > 64 * MIB, "{}", surplus(&mm));
        assert!(looks < 200, "{looks} looks");
        close(mm);
    }
}
