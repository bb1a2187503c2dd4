//! Lists of pages per CPU: blocks of order 0 to 3, taken and given without the zone's lock.
//!
//! Sits between the callers and the zone. One [`CpuLock`] per CPU over four lists that are linked through the frames,
//! newest first, counted in base pages. A list that is busy is gone around, never waited for; whoever holds one only
//! links and unlinks, and gives chains to the zone after unlocking. A CPU's lists keep at
//! most `high` pages (and up to seven more for a moment, where blocks of mixed order do not come out even), so all CPUs
//! together at most `cpus * (high + 7)`; what has not changed for a whole interval goes back to the zone.

use crate::buddy::Ends;
use crate::chains::{Chain, TOUCHED};
use crate::frames::{Frames, State};
use crate::pages::Block;
use crate::policy::Fixed;
use crate::statistics::Finding;
use crate::zone::Zone;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap_base::cpu_lock::CpuGuard;
use neap_base::{CpuLock, Order, Pfn};

/// Orders that are listed: 0 to 3.
pub(crate) const LISTED_ORDERS: usize = 4;
/// Tries of a remote side before it skips a list.
const TRIES: u32 = 1000;

/// One CPU's list of one order. The links at its ends are not kept: `length` says where it ends.
#[derive(Clone, Copy, Debug)]
struct List {
    ends: Ends,
    length: u32,
}

/// One CPU's lists.
#[derive(Debug)]
pub(crate) struct PageList {
    lists: [List; LISTED_ORDERS],
    /// Base pages in all of them.
    count: u32,
    /// Goes up with every change; `seen` is what the last tick saw.
    changes: u32,
    seen: u32,
}

impl PageList {
    const EMPTY: PageList = PageList {
        lists: [List { ends: Ends { head: Pfn::NONE, tail: Pfn::NONE }, length: 0 }; LISTED_ORDERS],
        count: 0,
        changes: 0,
        seen: 0,
    };

    fn pop(&mut self, frames: &Frames, order: Order) -> Option<Block> {
        let list = &mut self.lists[order.index()];
        list.length = list.length.checked_sub(1)?;
        self.count -= order.pages();
        self.changes = self.changes.wrapping_add(1);
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
        self.changes = self.changes.wrapping_add(1);
    }

    /// Puts a chain behind what is there.
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
        self.changes = self.changes.wrapping_add(1);
    }

    /// Cuts up to `blocks` blocks off the cold end of one order.
    fn cut(&mut self, frames: &Frames, order: Order, blocks: u32) -> Chain {
        let list = &mut self.lists[order.index()];
        let count = blocks.min(list.length);
        if count == 0 {
            return Chain::EMPTY;
        }
        let tail = list.ends.tail;
        let head = (1..count).fold(tail, |pfn, _| frames.frame(pfn).prev());
        list.ends.tail = frames.frame(head).prev();
        list.length -= count;
        self.count -= count << order.0;
        self.changes = self.changes.wrapping_add(1);
        Chain { head, tail, blocks: count }
    }

    /// The order that most of the pages are in.
    fn largest(&self) -> Order {
        let orders = (0..LISTED_ORDERS as u8).map(Order);
        orders.max_by_key(|order| self.lists[order.index()].length << order.0).unwrap_or(Order(0))
    }
}

/// What came out of a CPU's lists.
#[derive(Debug)]
pub(crate) struct Detached {
    /// By order.
    pub(crate) chains: [Chain; LISTED_ORDERS],
    /// In these chains.
    pub(crate) pages: u32,
    /// Still in the lists.
    pub(crate) left: u32,
}

/// The lists of all CPUs.
#[derive(Debug)]
pub(crate) struct PageLists {
    slots: *const CpuLock<PageList>,
    cpus: usize,
    pub(crate) policy: Fixed,
    pub(crate) busy: AtomicU64,
    pub(crate) refills: AtomicU64,
    pub(crate) spills: AtomicU64,
    pub(crate) drains: AtomicU64,
}

// SAFETY: the pointer leads to locks that are shared by design, and never changes.
unsafe impl Send for PageLists {}
// SAFETY: as above.
unsafe impl Sync for PageLists {}

/// Somebody else holds the list.
#[derive(Debug)]
pub(crate) struct Busy;

impl PageLists {
    /// Bytes that the lists of `cpus` CPUs take.
    pub(crate) fn bytes(cpus: usize) -> usize {
        cpus * size_of::<CpuLock<PageList>>()
    }

    /// Empty lists at an address.
    ///
    /// # Safety
    /// [`PageLists::bytes`] bytes there, aligned to a page, belong to this value alone for as long as it lives.
    pub(crate) unsafe fn at(address: usize, cpus: usize, policy: Fixed) -> PageLists {
        let slots = core::ptr::with_exposed_provenance_mut::<CpuLock<PageList>>(address);
        for cpu in 0..cpus {
            // SAFETY: inside the bytes that the caller gave.
            unsafe { slots.add(cpu).write(CpuLock::new(PageList::EMPTY)) };
        }
        let zero = || AtomicU64::new(0);
        PageLists { slots, cpus, policy, busy: zero(), refills: zero(), spills: zero(), drains: zero() }
    }

    pub(crate) fn cpus(&self) -> usize {
        self.cpus
    }

    #[inline]
    fn slot(&self, cpu: usize) -> &CpuLock<PageList> {
        // SAFETY: below `cpus`, so one of the slots that `at` wrote.
        unsafe { &*self.slots.add(cpu.min(self.cpus - 1)) }
    }

    /// The CPU's lists, if nobody has them.
    #[inline]
    pub(crate) fn own(&self, cpu: usize) -> Result<CpuGuard<'_, PageList>, Busy> {
        self.slot(cpu).try_lock().ok_or_else(|| self.count_busy())
    }

    #[cold]
    fn count_busy(&self) -> Busy {
        self.busy.fetch_add(1, Relaxed);
        Busy
    }

    /// A block from this CPU's list, if it has one.
    #[inline]
    pub(crate) fn pop(&self, frames: &Frames, cpu: usize, order: Order) -> Result<Option<Block>, Busy> {
        Ok(self.own(cpu)?.pop(frames, order))
    }

    /// A block into this CPU's list. What is now too much comes back, to be given to the zone.
    #[inline]
    pub(crate) fn push(
        &self,
        frames: &Frames,
        cpu: usize,
        pfn: Pfn,
        order: Order,
    ) -> Result<Option<(Chain, Order)>, Busy> {
        let mut list = self.own(cpu)?;
        list.push(frames, pfn, order);
        if list.count <= self.policy.high {
            return Ok(None);
        }
        self.spills.fetch_add(1, Relaxed);
        // From the order that has most: taking from the one just pushed would empty it again and again.
        let order = list.largest();
        let over = (list.count - self.policy.high).div_ceil(order.pages());
        Ok(Some((list.cut(frames, order, self.policy.blocks(order.0).max(over)), order)))
    }

    /// A chain into this CPU's list, if it has room; otherwise the chain comes back.
    pub(crate) fn fill(&self, frames: &Frames, cpu: usize, chain: Chain, order: Order) -> Result<(), Chain> {
        self.refills.fetch_add(1, Relaxed);
        let Ok(mut list) = self.own(cpu) else { return Err(chain) };
        if list.count + (chain.blocks << order.0) > self.policy.high {
            return Err(chain);
        }
        list.append(frames, chain, order);
        Ok(())
    }

    /// Detaches all of a CPU's lists, from any CPU; with `idle` only if they have not changed since the last such call.
    /// The pages are counted as travelling before they leave. `None`: somebody held it.
    pub(crate) fn detach(&self, frames: &Frames, zone: &Zone, cpu: usize, idle: bool) -> Option<Detached> {
        let mut list = self.slot(cpu).lock_bounded(TRIES)?;
        let unchanged = list.seen == list.changes;
        list.seen = list.changes;
        if list.count == 0 || idle && !unchanged {
            return Some(Detached { chains: [Chain::EMPTY; LISTED_ORDERS], pages: 0, left: list.count });
        }
        let pages = list.count;
        zone.depart(pages);
        let chains = core::array::from_fn(|order| list.cut(frames, Order(order as u8), u32::MAX));
        list.seen = list.changes;
        self.drains.fetch_add(1, Relaxed);
        Some(Detached { chains, pages, left: 0 })
    }

    /// Pages in a CPU's lists.
    pub(crate) fn count(&self, cpu: usize) -> Option<u32> {
        Some(self.slot(cpu).lock_bounded(TRIES)?.count)
    }

    /// Follows every link; answers the pages of all CPUs.
    pub(crate) fn verify(&self, frames: &Frames) -> Result<u32, Finding> {
        let mut sum = 0;
        for cpu in 0..self.cpus {
            let taken = Finding { what: "CPU list held while nobody runs", page: Pfn::NONE, expected: 0, found: 1 };
            let guard = self.slot(cpu).lock_bounded(TRIES).ok_or(taken)?;
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
            sum += pages;
        }
        Ok(sum)
    }
}
