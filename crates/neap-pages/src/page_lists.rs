//! Page lists: blocks of order 0 to 3, and cached runs, of each CPU, taken and put without the
//! zone's mutex.
//!
//! # Design
//!
//! Each CPU has a list for each order, linked through the frames, newest first. Lengths are counted
//! in base pages. The CPU's [`Policy`] decides how many pages the four lists keep together. They
//! may keep up to seven more, since blocks of mixed order do not add up exactly. The policy's state
//! lies beside the lists. The policy updates it when this module reports an event: a pop, a push, a
//! refill, a busy zone lock, a tick, a watermark. A tick gives the pages of lists that did not
//! change since the previous tick to the zone.
//!
//! A CPU's lists are made at their first use on that CPU. Until then their memory is zeroes that
//! were never written, and walks over CPUs skip it.
//!
//! # Locking
//!
//! One [`CpuLock`] per CPU guards its lists and policy. A thread that finds it held bypasses the
//! lists and does not wait. The holder only links and unlinks; it gives chains to the zone after
//! unlocking.

use crate::block_batch::{Chain, TOUCHED};
use crate::buddy::Ends;
use crate::frames::{Frames, State};
use crate::policy::{self, Adaptive, Limits, Policy, SharedLimits, ZoneState};
use crate::run_cache::{CachedRun, RunCache, Runs};
use crate::units::{Block, LISTED_ORDERS};
use crate::zone::Zone;
use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use neap_base::cpu_lock::CpuGuard;
use neap_base::{CpuLock, Finding, Order, Pfn};
use neap_os::topology::{CpuSet, MAX_CPUS};
use neap_os::used_cpus::UsedCpus;

/// Attempts to lock another CPU's lists before they are skipped.
const REMOTE_LOCK_TRIES_MAX: u32 = 1000;
/// A quarter of a second, in nanoseconds.
const QUARTER_NS: u64 = 250_000_000;

/// One CPU's list of one order. The outer links of its ends are not maintained; `length` marks the
/// end.
#[derive(Clone, Copy, Debug)]
struct List {
    ends: Ends,
    length: u32,
}

/// One CPU's lists. With this order of fields, a push uses one cache line with the lock.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct PageList<T> {
    lists: [List; LISTED_ORDERS],
    /// Base pages in all lists.
    count: u32,
    /// Base pages popped and pushed so far, wrapping.
    moved: u32,
    policy: T,
    runs: RunCache,
}

impl<T: Policy> PageList<T> {
    fn empty(limits: &Limits) -> PageList<T> {
        let list = List { ends: Ends { head: Pfn::NONE, tail: Pfn::NONE }, length: 0 };
        PageList { lists: [list; LISTED_ORDERS], count: 0, moved: 0, policy: T::new(limits), runs: RunCache::EMPTY }
    }

    /// The state of the lists that is passed to the policy.
    #[inline]
    fn now(&self) -> policy::List {
        debug_assert!(self.has_sound_count());
        policy::List { count: self.count, moved: self.moved }
    }

    /// Returns whether `count` is the sum of all lists.
    fn has_sound_count(&self) -> bool {
        self.count == self.lists.iter().enumerate().map(|(order, list)| list.length << order).sum::<u32>()
    }

    fn pop(&mut self, frames: &Frames, order: Order) -> Option<Block> {
        let list = &mut self.lists[order.index()];
        list.length = list.length.checked_sub(1)?;
        self.count -= order.pages();
        self.moved = self.moved.wrapping_add(order.pages());
        let pfn = list.ends.head;
        let frame = frames.frame(pfn);
        list.ends.head = frame.next();
        frame.set_state(State::Allocated);
        Some(Block { pfn, zero: frame.spare() == 0 })
    }

    fn push(&mut self, frames: &Frames, pfn: Pfn, order: Order) {
        let list = &mut self.lists[order.index()];
        let frame = frames.frame(pfn);
        frame.set_head(State::Listed, order);
        frame.set_spare(TOUCHED);
        frame.set_next(list.ends.head);
        if list.length == 0 {
            list.ends.tail = pfn;
        } else {
            frames.frame(list.ends.head).set_prev(pfn);
        }
        list.ends.head = pfn;
        list.length += 1;
        self.count += order.pages();
        self.moved = self.moved.wrapping_add(order.pages());
    }

    /// Appends a chain at the cold end.
    fn append(&mut self, frames: &Frames, chain: Chain, order: Order) {
        let list = &mut self.lists[order.index()];
        if list.length == 0 {
            list.ends.head = chain.head;
        } else {
            frames.frame(list.ends.tail).set_next(chain.head);
            frames.frame(chain.head).set_prev(list.ends.tail);
        }
        list.ends.tail = chain.tail;
        list.length += chain.blocks;
        self.count += chain.blocks << order.0;
    }

    /// Cuts up to `blocks` blocks off the cold end of one order.
    fn cut(&mut self, frames: &Frames, order: Order, blocks: u32) -> Chain {
        let list = &mut self.lists[order.index()];
        let count = blocks.min(list.length);
        if count == 0 {
            return Chain::EMPTY;
        }
        let tail = list.ends.tail;
        // Cutting all blocks needs no walk. So a drain on demand holds the lock briefly, however
        // long the list is.
        let head = match count == list.length {
            true => list.ends.head,
            false => (1..count).fold(tail, |pfn, _| frames.frame(pfn).prev()),
        };
        list.ends.tail = frames.frame(head).prev();
        list.length -= count;
        self.count -= count << order.0;
        Chain { head, tail, blocks: count }
    }

    /// Cuts about `pages` pages off the cold ends, large blocks first.
    fn cut_pages(&mut self, frames: &Frames, pages: u32) -> Detached {
        let (before, mut chains) = (self.count, [Chain::EMPTY; LISTED_ORDERS]);
        for order in (0..LISTED_ORDERS).rev() {
            let wanted = pages.saturating_sub(before - self.count) >> order;
            chains[order] = self.cut(frames, Order(order as u8), wanted);
        }
        Detached { chains, runs: Runs::NONE, pages: before - self.count, left: self.count }
    }

    /// The order with most of the pages.
    fn largest(&self) -> Order {
        let orders = (0..LISTED_ORDERS as u8).map(Order);
        orders.max_by_key(|order| self.lists[order.index()].length << order.0).unwrap_or(Order(0))
    }
}

/// Blocks and runs taken out of a CPU's lists.
#[derive(Debug)]
pub(crate) struct Detached {
    /// By order.
    pub(crate) chains: [Chain; LISTED_ORDERS],
    pub(crate) runs: Runs,
    /// Number of pages in these chains and runs.
    pub(crate) pages: u32,
    /// Number of pages left in the lists and cached runs.
    pub(crate) left: u32,
}

/// The reason for a detach.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Why {
    /// The caller wants all pages. Also resets the policy's state.
    Wanted,
    /// A tick, with the number of quarters of a second since the last one.
    Time(u32),
    /// Free memory has come to a watermark, or reclaim has begun.
    Pressure,
    /// The lists' bounds have changed. Also resets the policy's state.
    Limits,
}

/// The reason that a list gave no block.
#[derive(Debug)]
pub(crate) enum Missing {
    /// Another thread holds the lists.
    Busy,
    /// The list is empty. The caller should take this many blocks from the zone.
    Blocks(u32),
}

/// Another thread holds the lists.
#[derive(Debug)]
pub(crate) struct Busy;

/// Sizes of a CPU's lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListSizes {
    /// The most pages that they keep.
    pub(crate) high: u32,
    /// Pages that move at once.
    pub(crate) batch: u32,
}

/// Offsets in the lists of a CPU, and their length.
#[derive(Debug)]
pub(crate) struct ListParts {
    pub(crate) length: usize,
    pub(crate) count: usize,
    pub(crate) run_pages: usize,
    pub(crate) high: usize,
}

/// The lists of all CPUs.
#[derive(Debug)]
pub(crate) struct PageLists<T> {
    slots: *const CpuLock<PageList<T>>,
    cpus: usize,
    /// CPUs whose lists were made.
    used: UsedCpus,
    pub(crate) limits: SharedLimits,
    /// Number of pages that [`PageLists::note_free`] stored last.
    free: AtomicU32,
    reclaiming: AtomicBool,
    /// The watermarks that free memory has come to. 0: none. 1: the high one. 2: both.
    level: AtomicU8,
    /// Whether another thread held a list when all lists had to react to a watermark or to new
    /// limits. The next tick takes the surplus pages from all lists again.
    pub(crate) untold: AtomicBool,
    /// The time in nanoseconds up to which [`PageLists::quarters`] has counted.
    told: AtomicU64,
    /// The laboratory's time, with a finer resolution.
    #[cfg(feature = "lab")]
    pub(crate) clock: AtomicU64,
    pub(crate) busy: AtomicU64,
    pub(crate) refills: AtomicU64,
    pub(crate) spills: AtomicU64,
    pub(crate) drains: AtomicU64,
}

// SAFETY: the pointer leads to locks that threads may share, and never changes.
unsafe impl<T> Send for PageLists<T> {}
// SAFETY: the pointer leads to locks that threads may share, and never changes.
unsafe impl<T> Sync for PageLists<T> {}

impl PageLists<Adaptive> {
    /// The parts of a CPU's lists with their lock.
    pub(crate) fn parts(&self) -> ListParts {
        let value = CpuLock::<PageList<Adaptive>>::VALUE_AT;
        ListParts {
            length: size_of::<CpuLock<PageList<Adaptive>>>(),
            count: value + offset_of!(PageList<Adaptive>, count),
            run_pages: value + offset_of!(PageList<Adaptive>, runs) + RunCache::PAGES_AT,
            high: value + offset_of!(PageList<Adaptive>, policy) + Adaptive::HIGH_AT,
        }
    }
}

impl<T: Policy> PageLists<T> {
    /// Bytes of the lists of `cpus` CPUs.
    pub(crate) fn bytes(cpus: usize) -> usize {
        cpus * size_of::<CpuLock<PageList<T>>>()
    }

    /// Makes empty lists at an address, without writing there.
    ///
    /// # Safety
    /// [`PageLists::bytes`] zeroed bytes for the CPUs of `limits` lie at `address`. They are
    /// aligned to 128 bytes, and belong to this value alone for as long as it lives.
    pub(crate) unsafe fn at(address: usize, limits: Limits) -> PageLists<T> {
        let slots = core::ptr::with_exposed_provenance_mut::<CpuLock<PageList<T>>>(address);
        let cpus = (limits.cpus as usize).min(MAX_CPUS);
        let zero = || AtomicU64::new(0);
        let (free, reclaiming, level) = (AtomicU32::new(u32::MAX), AtomicBool::new(false), AtomicU8::new(0));
        let untold = AtomicBool::new(false);
        let (told, busy, refills, spills, drains) = (zero(), zero(), zero(), zero(), zero());
        PageLists {
            slots,
            cpus,
            used: UsedCpus::new(),
            limits: SharedLimits::new(limits),
            free,
            reclaiming,
            level,
            untold,
            told,
            #[cfg(feature = "lab")]
            clock: zero(),
            busy,
            refills,
            spills,
            drains,
        }
    }

    pub(crate) fn cpus(&self) -> usize {
        self.cpus
    }

    /// Address of the first CPU's lists.
    pub(crate) fn table(&self) -> usize {
        self.slots.expose_provenance()
    }

    /// Whether pages are listed at all.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.limits.are_any_listed()
    }

    #[inline]
    fn slot(&self, cpu: usize) -> &CpuLock<PageList<T>> {
        // SAFETY: the index is below `cpus`, and the caller of `at` promised that many aligned
        // slots. All-zero memory is a valid free lock around lists that are not made yet.
        unsafe { &*self.slots.add(cpu.min(self.cpus - 1)) }
    }

    /// CPUs whose lists were made by now. No other CPU has listed pages.
    pub(crate) fn used(&self) -> CpuSet {
        self.used.now()
    }

    /// Locks the lists of a used CPU, from any CPU; `None` if they stay held.
    fn remote(&self, cpu: usize) -> Option<CpuGuard<'_, PageList<T>>> {
        self.slot(cpu).lock_bounded(REMOTE_LOCK_TRIES_MAX)
    }

    fn is_used(&self, cpu: usize) -> bool {
        self.used.contains(cpu.min(self.cpus - 1))
    }

    /// Makes a CPU's lists, at their first use.
    #[cold]
    #[inline(never)]
    fn make(&self, cpu: usize, list: &mut PageList<T>) {
        *list = PageList::empty(&self.limits.now());
        // The caller holds the lock. A walk that does not see the CPU yet happens before any use of
        // its lists.
        self.used.insert(cpu.min(self.cpus - 1));
    }

    /// Locks this CPU's lists, if no other thread holds them.
    #[inline]
    pub(crate) fn own(&self, cpu: usize) -> Result<CpuGuard<'_, PageList<T>>, Busy> {
        let mut list = if T::LOCKED {
            self.slot(cpu).try_lock().ok_or_else(|| self.count_busy())?
        } else {
            // SAFETY: the opener of lists without locks guarantees that no other thread uses this
            // CPU's lists. So no thread holds this lock, or takes it before the guard is dropped.
            unsafe { self.slot(cpu).assume() }
        };
        // Checked under the lock, so that only one thread makes the lists.
        if !self.is_used(cpu) {
            self.make(cpu, &mut list);
        }
        Ok(list)
    }

    #[cold]
    fn count_busy(&self) -> Busy {
        self.busy.fetch_add(1, Relaxed);
        Busy
    }

    fn supply<'a>(&self, limits: &'a Limits) -> ZoneState<'a> {
        ZoneState {
            limits,
            free: self.free.load(Relaxed),
            reclaiming: self.is_reclaiming(),
            #[cfg(not(feature = "lab"))]
            now: self.told.load(Relaxed),
            #[cfg(feature = "lab")]
            now: self.clock.load(Relaxed),
        }
    }

    /// Stores the number of pages that can still be handed out. Returns whether the number has
    /// fallen to a watermark since the last call. The caller then takes the surplus pages from all
    /// lists.
    pub(crate) fn note_free(&self, free: u32) -> bool {
        self.free.store(free, Relaxed);
        let marks = self.limits.now().watermarks;
        let level = u8::from(free <= marks.high) + u8::from(free <= marks.low);
        level != self.level.load(Relaxed) && level > self.level.swap(level, Relaxed)
    }

    /// Whether a CPU may keep a run of `pages` pages: free memory is above the watermarks, no
    /// reclaim runs, and eight times as much can still be handed out. Without a budget that is
    /// always so.
    #[inline]
    pub(crate) fn may_keep(&self, pages: u32) -> bool {
        self.level.load(Relaxed) == 0 && !self.is_reclaiming() && pages <= self.free.load(Relaxed) / 8
    }

    pub(crate) fn is_reclaiming(&self) -> bool {
        self.reclaiming.load(Relaxed)
    }

    /// Stores whether background reclaim runs. Returns whether it has begun.
    pub(crate) fn note_reclaim(&self, reclaiming: bool) -> bool {
        !self.reclaiming.swap(reclaiming, Relaxed) && reclaiming
    }

    /// Number of whole quarters of a second since the last call that returned any. Only one thread
    /// at a time may call this.
    pub(crate) fn quarters(&self, now: u64) -> u32 {
        let told = self.told.load(Relaxed);
        // The first call has no earlier time to count from.
        let quarters = if told == 0 { 0 } else { now.saturating_sub(told) / QUARTER_NS };
        self.told.store(if told == 0 { now } else { told + quarters * QUARTER_NS }, Relaxed);
        quarters.min(u32::MAX.into()) as u32
    }

    /// Takes a block from this CPU's list.
    #[inline]
    pub(crate) fn pop(&self, frames: &Frames, cpu: usize, order: Order) -> Result<Block, Missing> {
        let Ok(mut list) = self.own(cpu) else { return Err(Missing::Busy) };
        let now = list.now();
        list.policy.asked(now, order.0);
        list.pop(frames, order).ok_or_else(|| self.missing(&mut list, order))
    }

    #[cold]
    fn missing(&self, list: &mut PageList<T>, order: Order) -> Missing {
        let now = list.now();
        let blocks = list.policy.refill(now, order.0, &self.supply(&self.limits.now()));
        debug_assert!(blocks > 0, "the caller uses one of them");
        Missing::Blocks(blocks)
    }

    /// Puts a block into this CPU's list. Returns a surplus chain for the zone, which counts as
    /// travelling.
    #[inline]
    pub(crate) fn push(
        &self,
        frames: &Frames,
        zone: &Zone,
        cpu: usize,
        pfn: Pfn,
        order: Order,
    ) -> Result<Option<(Chain, Order)>, Busy> {
        let mut list = self.own(cpu)?;
        list.push(frames, pfn, order);
        let (now, mut limits) = (list.now(), None);
        let limits = &mut limits;
        match list.policy.put(now, order.0, move || self.supply(limits.insert(self.limits.now()))) {
            0 => Ok(None),
            give => Ok(Some(self.spill(&mut list, frames, zone, give))),
        }
    }

    #[cold]
    fn spill(&self, list: &mut PageList<T>, frames: &Frames, zone: &Zone, give: u32) -> (Chain, Order) {
        self.spills.fetch_add(1, Relaxed);
        // Cuts the order with the most pages. Cutting the order of the pushed block would empty its
        // list again and again.
        let order = list.largest();
        let over = list.count.saturating_sub(list.policy.high()).min(give).div_ceil(order.pages());
        let chain = list.cut(frames, order, (give >> order.0).max(over).max(1));
        zone.depart(chain.blocks << order.0);
        (chain, order)
    }

    /// Puts a chain into this CPU's list. Returns the chain if the list has no room, or if another
    /// thread holds it. `contended` says that the zone's mutex was busy.
    pub(crate) fn fill(
        &self,
        frames: &Frames,
        cpu: usize,
        chain: Chain,
        order: Order,
        contended: bool,
    ) -> Result<(), Chain> {
        self.refills.fetch_add(1, Relaxed);
        let Ok(mut list) = self.own(cpu) else { return Err(chain) };
        if contended {
            list.policy.contended(&self.supply(&self.limits.now()));
        }
        if list.count + (chain.blocks << order.0) > list.policy.high() {
            return Err(chain);
        }
        list.append(frames, chain, order);
        Ok(())
    }

    /// Takes a cached run of exactly `pages` pages from this CPU. Its first page is a multiple of
    /// `align` pages.
    pub(crate) fn take_run(&self, frames: &Frames, cpu: usize, pages: u32, align: u32) -> Option<Block> {
        let pfn = self.own(cpu).ok()?.runs.take(pages, align)?;
        let frame = frames.frame(pfn);
        frame.set_spare(TOUCHED);
        frame.set_state(State::Run);
        frames.set_run_owner(pfn, 0);
        Some(Block { pfn, zero: false })
    }

    /// Caches a run in the state [`State::Cached`] on this CPU. Returns the runs that it displaces,
    /// which count as travelling.
    pub(crate) fn put_run(&self, zone: &Zone, cpu: usize, run: CachedRun) -> Result<Runs, Busy> {
        let mut list = self.own(cpu)?;
        let out = list.runs.put(run);
        if out.pages() > 0 {
            zone.depart(out.pages());
        }
        Ok(out)
    }

    /// Tells a list's policy that the zone's mutex was busy when the list gave pages.
    pub(crate) fn contended(&self, cpu: usize) {
        if let Ok(mut list) = self.own(cpu) {
            list.policy.contended(&self.supply(&self.limits.now()));
        }
    }

    /// Detaches the surplus pages of a CPU's lists, from any CPU. The pages count as travelling
    /// before the lists are unlocked. `None` if another thread held the lists.
    pub(crate) fn detach(&self, frames: &Frames, zone: &Zone, cpu: usize, why: Why) -> Option<Detached> {
        if !self.is_used(cpu) {
            return Some(Detached { chains: [Chain::EMPTY; LISTED_ORDERS], runs: Runs::NONE, pages: 0, left: 0 });
        }
        let mut list = self.remote(cpu)?;
        let (now, limits) = (list.now(), self.limits.now());
        let supply = self.supply(&limits);
        let pages = match why {
            Why::Wanted => {
                list.policy = T::new(&limits);
                now.count
            }
            Why::Limits => {
                list.policy = T::new(&limits);
                now.count.saturating_sub(list.policy.high())
            }
            Why::Time(quarters) => list.policy.decay(now, &supply, quarters),
            Why::Pressure => list.policy.pressure(now, &supply),
        };
        let mut detached = list.cut_pages(frames, pages);
        detached.runs = if let Why::Time(_) = why { list.runs.age() } else { list.runs.drain() };
        detached.pages += detached.runs.pages();
        detached.left += list.runs.pages();
        zone.depart(detached.pages);
        self.drains.fetch_add(u64::from(detached.pages > 0), Relaxed);
        Some(detached)
    }

    /// The sizes of a CPU's lists at the moment; `None` if another thread held the lists.
    pub(crate) fn sizes(&self, cpu: usize) -> Option<ListSizes> {
        if !self.is_used(cpu) {
            return Some(self.first_sizes());
        }
        let list = self.remote(cpu)?;
        Some(ListSizes { high: list.policy.high(), batch: list.policy.batch(&self.limits.now()) })
    }

    /// The result of [`PageLists::sizes`] for new lists.
    pub(crate) fn first_sizes(&self) -> ListSizes {
        let limits = self.limits.now();
        let policy = T::new(&limits);
        ListSizes { high: policy.high(), batch: policy.batch(&limits) }
    }

    /// Whether the passing of time would change nothing more about a CPU's lists.
    #[cfg(feature = "lab")]
    pub(crate) fn is_settled(&self, cpu: usize) -> bool {
        let settled = |list: CpuGuard<'_, PageList<T>>| list.count == 0 && list.policy.is_settled(&self.limits.now());
        !self.is_used(cpu) || self.remote(cpu).is_some_and(settled)
    }

    /// Pages in a CPU's lists and cached runs; `None` if another thread held the lists.
    pub(crate) fn count(&self, cpu: usize) -> Option<u32> {
        if !self.is_used(cpu) {
            return Some(0);
        }
        let list = self.remote(cpu)?;
        Some(list.count + list.runs.pages())
    }

    /// Verifies the frames of a CPU's cached runs. Returns the runs' pages.
    fn verify_runs(&self, frames: &Frames, cache: &RunCache) -> Result<u32, Finding> {
        for CachedRun { pfn, pages } in cache.iter() {
            let frame = frames.frame(pfn);
            Finding::unless_equal("state of a cached run", pfn, State::Cached as u64, frame.state() as u64)?;
            Finding::unless_equal("pages of a cached run", pfn, pages.into(), frame.owner().into())?;
        }
        let pages = cache.iter().map(|run| run.pages).sum::<u32>();
        Finding::unless_equal("pages of a CPU's cached runs", Pfn::NONE, pages.into(), cache.pages().into())?;
        Ok(pages)
    }

    /// Verifies every link. Returns the pages of all CPUs.
    pub(crate) fn verify(&self, frames: &Frames) -> Result<u32, Finding> {
        let mut sum = 0;
        for cpu in self.used().iter() {
            let taken = Finding::new("CPU list held while no thread runs", Pfn::NONE, 0, 1);
            let guard = self.remote(cpu).ok_or(taken)?;
            let mut pages = 0;
            for (order, list) in guard.lists.iter().enumerate() {
                let (mut at, mut before) = (list.ends.head, Pfn::NONE);
                for _ in 0..list.length {
                    let frame = frames.frame(at);
                    Finding::unless_equal("state of a listed page", at, State::Listed as u64, frame.state() as u64)?;
                    Finding::unless_equal("order of a listed page", at, order as u64, u64::from(frame.order().0))?;
                    if before != Pfn::NONE {
                        Finding::unless_equal(
                            "back link of a listed page",
                            at,
                            before.0.into(),
                            frame.prev().0.into(),
                        )?;
                    }
                    (before, at) = (at, frame.next());
                }
                if list.length > 0 {
                    Finding::unless_equal("tail of a CPU list", before, before.0.into(), list.ends.tail.0.into())?;
                }
                pages += list.length << order;
            }
            Finding::unless_equal("count of a CPU list", Pfn::NONE, pages.into(), guard.count.into())?;
            sum += pages + self.verify_runs(frames, &guard.runs)?;
        }
        Ok(sum)
    }
}
