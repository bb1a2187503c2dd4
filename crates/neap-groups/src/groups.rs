//! A tree of memory groups with its stocks, waiters, subscriptions and grace periods.
//!
//! # Design
//!
//! A charge takes bytes from this CPU's stock (`stock.rs`) by one restartable sequence. If the
//! stock has too little, the thread charges a batch to the group and all its ancestors. An uncharge
//! adds bytes to a stock. It subtracts bytes that exceed the stock from the counters of the group
//! and its ancestors. The *heir* of a deleted group is its nearest ancestor that exists. Bytes of a
//! deleted group are subtracted from the counters of its heir.
//!
//! A group is charged for its stocked bytes. A CPU stocks at most [`CAP`](crate::CAP) for each
//! payer, and eight times that for all payers together. A group is also charged for bytes that the
//! host's caches keep. [`Groups::used`] excludes both.
//!
//! # Locking
//!
//! A thread holds no mutex while it waits for room, or while the host reclaims. Threads take
//! mutexes only inside the host's fork gate, so a fork finds no mutex held. Most functions of
//! [`Groups`] for such threads take an [`Inside`] as the proof.

use crate::counts_memory::{counts_of_new_group, drop_counts};
use crate::error::GroupError;
use crate::events::Subscribers;
use crate::group::{Bound, Event, Group, GroupSlot, Name, ROOT};
use crate::id::{GroupId, Kind, Payer};
use crate::protection::{GroupUsage, Protection};
use crate::queue::Waiters;
use crate::stock::Stocks;
use crate::tree::{GroupCount, Tree};
use core::sync::atomic::Ordering;
use neap_base::gate::Inside;
use neap_base::rcu::{Mark, Rcu};
use neap_base::{Mutex, Platform};
use neap_percpu::{Charge, Host, Owner, Standalone};

/// How soon a flush of caches may follow another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlushPace {
    /// At once: for charges that would otherwise be refused or wait, and for exact numbers.
    AtOnce,
    /// A flush soon after another one may be skipped.
    Spaced,
}

/// An id of a deleted group that is still referred to.
#[derive(Clone, Copy, Debug)]
pub struct GoneId {
    /// The id.
    pub id: GroupId,
    /// The group that is charged for the bytes now.
    pub heir: GroupId,
    /// Bytes booked under the id.
    pub bytes: u64,
}

/// Services of the host that groups use, besides per-CPU data.
pub trait Reclaimer: Host {
    /// Reclaims `bytes` bytes of any kind from a group at its limit and its descendants. The caller
    /// is outside the fork gate and holds no lock.
    ///
    /// Returns about how many bytes were freed; 0 if no more can be freed.
    fn reclaim(&self, _group: GroupId, _bytes: u64) -> u64 {
        0
    }

    /// Calls `each` with the bytes that caches keep, by the payer that is still charged for them.
    /// Exact while no thread allocates or frees. The caller holds no lock.
    fn each_kept(&self, _: &Inside<'_>, _each: &mut dyn FnMut(Payer, u64)) {}

    /// Makes caches free the bytes that they keep for the payers for which `wanted` returns true.
    /// The caller is outside the fork gate and holds no lock.
    fn flush(&self, _wanted: &dyn Fn(Payer) -> bool, _pace: FlushPace) {}

    /// Requests that [`Groups::tick`] and [`Groups::deliver`] be called soon, by a thread that
    /// holds no lock.
    ///
    /// The caller may hold a mutex of the groups, and be within a free. The implementation must
    /// neither wait nor call these two functions itself.
    fn request_tick(&self, _: &Inside<'_>) {}

    /// Requests that a server, a thread that reclaims, [take a request](Groups::take_request) of a
    /// group. The caller is outside the fork gate and holds no lock. The implementation must not
    /// wait.
    fn ask_soon(&self) {}

    /// Moves the items attached to a group to its parent, while the group is being deleted. The
    /// group's charges move after the items. So the parent is never charged for items that cannot
    /// be found there.
    ///
    /// The caller holds the tree's mutex. The implementation must return soon. It may use only
    /// functions of `groups` that take no lock, such as [`Groups::parent_of`].
    fn offline(&self, _: &Inside<'_>, _groups: &Groups, _child: GroupSlot, _parent: GroupSlot) {}
}

/// A standalone host keeps the no-op defaults: it never reclaims.
impl<P: Platform, C: Charge> Reclaimer for Standalone<'_, P, C> {}

/// A tree of groups, with the stocks, waiters and subscriptions that charges need.
#[derive(Debug)]
pub struct Groups {
    pub(crate) tree: Tree,
    pub(crate) stocks: Stocks,
    pub(crate) waiters: Waiters,
    pub(crate) subscribers: Subscribers,
    /// RCU domain of the threads that read ids and slots.
    pub(crate) rcu: Rcu,
    /// Mark of the time when the grace period of deleted slots and ids began.
    pub(crate) reaping: Mutex<Mark>,
    pub(crate) nodes: usize,
}

/// Description of a group.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Info {
    /// The group.
    pub id: GroupId,
    /// Its parent; `None` for the root.
    pub parent: Option<GroupId>,
    /// Its name below the parent; empty for the root.
    pub name: Name,
    /// Its bounds, by [`Bound`].
    pub bounds: [u64; Bound::ALL.len()],
    /// Bytes charged to it and all its descendants, stocks included.
    pub charged: u64,
    /// Maximum of the charged bytes since the group was created, or [`Groups::reset_peak`].
    pub peak: u64,
    /// Bytes charged to it alone, by [`Kind`], stocks included. If a child was deleted while
    /// threads charged it, their bytes are counted here a few ticks later.
    pub kinds: [u64; Kind::ALL.len()],
    /// Events at it and its descendants so far, deleted ones included, by [`Event`].
    pub events: [u64; Event::ALL.len()],
    /// Events at the group itself so far, by [`Event`], without those of descendants.
    pub local_events: [u64; Event::ALL.len()],
    /// Microseconds in which at least one thread or future of it or of a descendant was stalled on
    /// memory. A thread is stalled while it waits for room, is delayed above a `high`, or reclaims
    /// within a charge. Stalls that overlap count once. The platform's clock, which may be coarse,
    /// measures the time.
    pub stalled_us: u64,
    /// Number of its children.
    pub children: u32,
}

impl Groups {
    /// Makes a tree that has only the root.
    ///
    /// # Errors
    /// [`GroupError::NoMemory`] or [`GroupError::Full`]. Nothing stays open then.
    pub fn open<H: Host>(host: &H) -> Result<Groups, GroupError> {
        let (platform, nodes) = (host.platform(), host.platform().nodes());
        let per_cpu = counts_of_new_group(host, nodes)?;
        let stocks = Stocks::open(platform);
        let made = stocks.and_then(|stocks| match Tree::open(platform, per_cpu) {
            Ok(tree) => {
                let rcu = Rcu::new();
                // `open` fails if there is no memory for sequences. Then readers count by locked
                // instructions.
                let _ = rcu.open(platform);
                let reaping = Mutex::new(rcu.mark());
                Ok(Groups {
                    tree,
                    stocks,
                    waiters: Waiters::new(),
                    subscribers: Subscribers::new(),
                    rcu,
                    reaping,
                    nodes,
                })
            }
            Err(error) => {
                // SAFETY: the stocks were opened above, and no other thread has a reference to
                // them.
                unsafe { stocks.close(platform) };
                Err(error)
            }
        });
        made.map_err(|error| {
            drop_counts(host, per_cpu.0);
            GroupError::from(error)
        })
    }

    /// Frees everything but the per-CPU data of groups other than the root.
    ///
    /// # Safety
    /// No thread uses the groups any more, and `host` has the platform that they were opened with.
    pub unsafe fn close<H: Host>(&self, host: &H) {
        let root = self.tree.group(ROOT).map(|group| group.per_cpu.load(Ordering::Relaxed));
        root.inspect(|&owner| drop_counts(host, Owner::from_bits(owner)));
        let platform = host.platform();
        // SAFETY: by this function's contract no thread uses the groups, so none uses these parts,
        // their entries, or the RCU domain. `platform` is the one that they were opened with.
        unsafe {
            self.tree.close(platform);
            self.stocks.close(platform);
            self.waiters.close(platform);
            self.subscribers.close(platform);
            self.rcu.close(platform);
        }
    }

    /// Records the thread that a group was made for, by the thread's id, which is not 0.
    pub fn note_thread<H: Host>(&self, host: &H, id: GroupId, thread: u32) {
        host.inside(|_| {
            let slot = self.tree.slot_of(id).ok();
            slot.and_then(|slot| self.tree.group(slot))
                .inspect(|group| group.made_for.store(thread, Ordering::Relaxed));
        });
    }

    /// Returns the thread that a group was made for; `None` if there is none or the group is gone.
    pub fn thread_of<H: Host>(&self, host: &H, id: GroupId) -> Option<u32> {
        let thread = host.inside(|_| {
            let group = self.tree.group(self.tree.slot_of(id).ok()?)?;
            Some(group.made_for.load(Ordering::Relaxed))
        });
        thread.filter(|thread| *thread != 0)
    }

    /// Returns the group at a path below `from`: names separated by `/`; an empty path for `from`
    /// itself.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn find<H: Host>(&self, host: &H, from: GroupId, path: &str) -> Result<GroupId, GroupError> {
        host.inside(|_| self.tree.find(from, path))
    }

    /// Sets a bound, counts [`Event::LimitChanged`], and returns the previous value. Takes effect
    /// at once.
    ///
    /// If a new `max` is below the charged bytes, this flushes caches, and empties the stocks of
    /// the group and its descendants. Charges then fail until there is room. While the usage
    /// exceeds its new `max` or `high`, the group requests reclaim. This call does not wait for
    /// that.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn set_bound<H: Reclaimer>(&self, host: &H, id: GroupId, bound: Bound, bytes: u64) -> Result<u64, GroupError> {
        let (before, usage) = host.inside(|inside| {
            let _reading = self.rcu.enter();
            self.tree.change(id, |group| {
                let before = group.bound(bound);
                self.tree.set_bound(group, bound, bytes);
                self.tell(inside, host, group, Event::LimitChanged);
                (before, group.usage())
            })
        })?;
        if bound == Bound::Max && usage > bytes {
            self.drain(host, id);
        }
        if bound == Bound::Max {
            // After a lower `max`, too: waiters with a request that exceeds the new `max` are
            // refused.
            while host.inside(|inside| self.admit(inside, host, id)) {}
        }
        if bound == Bound::High {
            // A tick ends the delay of charges that were delayed above the previous `high`.
            host.inside(|inside| host.request_tick(inside));
        }
        if matches!(bound, Bound::Max | Bound::High) && usage > bytes {
            host.inside(|inside| {
                let _reading = self.rcu.enter();
                self.tree.owners.own(id).inspect(|&slot| self.ask_for_excess(inside, slot));
            });
            host.ask_soon();
        }
        Ok(before)
    }

    /// Returns whether a group exists at this moment. Takes no lock.
    pub fn exists(&self, id: GroupId) -> bool {
        self.tree.owners.exists(id)
    }

    /// Returns the parent of a group, `None` for the root, and the group's name.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn place<H: Host>(&self, host: &H, id: GroupId) -> Result<(Option<GroupId>, Name), GroupError> {
        host.inside(|inside| self.with(inside, id, |group| (self.above(group), group.name())))
    }

    /// Calls `f` with a group, which keeps its slot meanwhile. Takes the mutex of the ids if a
    /// chain of ids can be shortened and the mutex is free.
    pub(crate) fn with<R>(&self, _: &Inside<'_>, id: GroupId, f: impl FnOnce(&Group) -> R) -> Result<R, GroupError> {
        let _reading = self.rcu.enter();
        self.tree.with(id, f)
    }

    fn above(&self, group: &Group) -> Option<GroupId> {
        self.tree.group(group.parent.load(Ordering::Relaxed)).map(Group::id)
    }

    /// Returns a description of a group.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn info<H: Host>(&self, host: &H, id: GroupId) -> Result<Info, GroupError> {
        host.inside(|inside| self.with(inside, id, |group| self.info_of(inside, host, group)))
    }

    /// Returns a description of the group in a slot; `None` if there is none. Slots go from 0 up to
    /// [`GroupCount::slots`].
    pub fn info_at<H: Host>(&self, inside: &Inside<'_>, host: &H, slot: u32) -> Option<Info> {
        let _reading = self.rcu.enter();
        self.tree.at(slot, |group| self.info_of(inside, host, group))
    }

    fn info_of<H: Host>(&self, inside: &Inside<'_>, host: &H, group: &Group) -> Info {
        Info {
            id: group.id(),
            parent: self.above(group),
            name: group.name(),
            bounds: Bound::ALL.map(|bound| group.bound(bound)),
            charged: group.usage(),
            peak: group.counters.peak.load(Ordering::Relaxed),
            kinds: Kind::ALL.map(|kind| self.of_kind(host, group, kind)),
            events: Event::ALL.map(|event| group.events(event)),
            local_events: Event::ALL.map(|event| group.local_events(event)),
            stalled_us: self.stalled_us(inside, host, group),
            children: group.children.load(Ordering::Relaxed),
        }
    }

    /// Resets a group's peak to its charge at this moment. Returns the peak before.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn reset_peak<H: Host>(&self, host: &H, id: GroupId) -> Result<u64, GroupError> {
        let reset = |group: &Group| {
            let peak = &group.counters.peak;
            // Relaxed: statistics; they publish no other data.
            let before = peak.swap(group.usage(), Ordering::Relaxed);
            // A charge between the read of the usage and the swap raised the peak that the swap
            // replaced.
            peak.fetch_max(group.usage(), Ordering::Relaxed);
            before
        };
        host.inside(|inside| self.with(inside, id, reset))
    }

    /// Returns the bytes charged to a group alone, of one kind on one node, stocks included.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn charged<H: Host>(&self, host: &H, id: GroupId, kind: Kind, node: usize) -> Result<u64, GroupError> {
        let counted = |group: &Group| if node < self.nodes { self.counted(host, group, kind, node) } else { 0 };
        host.inside(|inside| self.with(inside, id, counted))
    }

    /// Returns the bytes that a group and its descendants use. They are charged bytes that are
    /// neither stocked nor kept by caches.
    ///
    /// The result is exact while no thread charges, allocates or frees. Otherwise it may miss
    /// concurrent changes. Scans all stocks and caches.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn used<H: Reclaimer>(&self, host: &H, id: GroupId) -> Result<u64, GroupError> {
        host.inside(|inside| {
            let charged = self.with(inside, id, Group::usage)?;
            let mut unused = 0;
            self.each_slack(inside, host, &mut |payer, bytes| {
                unused += if self.is_below(payer.id(), id) { bytes } else { 0 }
            });
            Ok(charged.saturating_sub(unused))
        })
    }

    /// Returns whether the group that an id leads to is `top` or a descendant.
    pub(crate) fn is_below(&self, id: GroupId, top: GroupId) -> bool {
        let _reading = self.rcu.enter();
        let Some(behind) = self.tree.owners.behind(id) else { return false };
        self.tree.upwards(behind.slot()).any(|(_, group)| group.id() == top)
    }

    /// Stores the unused bytes of each group, without its descendants, for [`Groups::unused_at`].
    /// Unused bytes are stocked, or kept by caches.
    ///
    /// The result may miss concurrent changes. Only one thread at a time may call this.
    pub fn add_up_unused<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H) {
        let groups = (0..self.tree.count().slots).filter_map(|slot| self.tree.group(slot));
        groups.for_each(|group| group.unused.store(0, Ordering::Relaxed));
        self.each_slack(inside, host, &mut |payer, bytes| {
            let _reading = self.rcu.enter();
            let behind = self.tree.owners.behind(payer.id());
            let group = behind.and_then(|behind| self.tree.group(behind.slot()));
            group.inspect(|group| _ = group.unused.fetch_add(bytes, Ordering::Relaxed));
        });
    }

    /// Returns the group in a slot and its unused bytes at the last call of
    /// [`Groups::add_up_unused`]; `None` for 0 bytes.
    pub fn unused_at(&self, _: &Inside<'_>, slot: u32) -> Option<(GroupId, u64)> {
        let _reading = self.rcu.enter();
        let group = self.tree.group(slot)?;
        Some((group.id(), group.unused.load(Ordering::Relaxed))).filter(|(_, bytes)| *bytes > 0)
    }

    fn each_slack<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H, each: &mut dyn FnMut(Payer, u64)) {
        self.stocks.each(&mut *each);
        host.each_kept(inside, each);
    }

    /// Returns the bytes of a kind that are charged in all groups together and not stocked. Exact
    /// while no thread charges.
    pub fn used_of_kind<H: Host>(&self, inside: &Inside<'_>, host: &H, kind: Kind) -> u64 {
        let slots = 0..self.tree.count().slots;
        let charged: u64 =
            slots.filter_map(|slot| self.info_at(inside, host, slot)).map(|info| info.kinds[kind as usize]).sum();
        let mut stocked = 0;
        self.stocks.each(|payer, bytes| stocked += if payer.kind() == kind { bytes } else { 0 });
        charged.saturating_sub(stocked)
    }

    /// Returns the group of an id, or its heir if the group is deleted.
    pub fn heir(&self, _: &Inside<'_>, id: GroupId) -> Option<GroupId> {
        let _reading = self.rcu.enter();
        self.tree.group(self.tree.owners.behind(id)?.slot()).map(Group::id)
    }

    /// Returns the child of `parent` that follows `after`; the first child if `after` is `None`.
    /// Returns `None` at the end, or if either group is gone.
    pub fn next_child<H: Host>(&self, host: &H, parent: GroupId, after: Option<GroupId>) -> Option<GroupId> {
        host.inside(|_| {
            let _reading = self.rcu.enter();
            self.tree.next_child(parent, after)
        })
    }

    /// Writes the slots of a group and all its descendants to `slots`, in order, and returns their
    /// number. `None` if there is not room for all, or the group is gone.
    pub fn slots_below<H: Host>(&self, host: &H, top: GroupId, slots: &mut [u32]) -> Option<usize> {
        host.inside(|_| {
            let _reading = self.rcu.enter();
            self.tree.slots_below(top, slots)
        })
    }

    /// Returns the bytes of a group that are protected from reclaim.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn protection<H: Host>(&self, host: &H, id: GroupId) -> Result<Protection, GroupError> {
        host.inside(|_| {
            let _reading = self.rcu.enter();
            let by = |bound| self.tree.effective(id, bound);
            Ok(Protection { min: by(Bound::Min)?, low: by(Bound::Low)? })
        })
    }

    /// Begins a pass of reclaim that calls [`Groups::standing`]. The pass does not use sums over
    /// children that earlier passes computed.
    pub fn begin_pass(&self) {
        self.tree.begin_pass();
    }

    /// Returns how many children were visited so far to add up `min` and `low`, and to find the
    /// largest holders. Tests check the amount of work by this number.
    pub fn summed(&self) -> u64 {
        self.tree.summed()
    }

    /// Returns the bytes charged to a group and its descendants, stocks included.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn usage<H: Host>(&self, host: &H, id: GroupId) -> Result<u64, GroupError> {
        host.inside(|inside| self.with(inside, id, Group::usage))
    }

    /// Returns the bytes charged to a group alone, stocks included.
    ///
    /// # Errors
    /// [`GroupError::NoSuchGroup`].
    pub fn own_usage<H: Host>(&self, host: &H, id: GroupId) -> Result<u64, GroupError> {
        host.inside(|inside| self.with(inside, id, |group| self.tree.own_usage(group)))
    }

    /// Returns usage and protection of the group in a slot, relative to `top`. `None` if it is
    /// neither `top` nor a descendant.
    pub fn standing<H: Host>(&self, host: &H, slot: u32, top: GroupId) -> Option<GroupUsage> {
        host.inside(|_| {
            let _reading = self.rcu.enter();
            self.tree.standing(slot, top)
        })
    }

    /// Counts an event of a group and of all its ancestors, and requests a delivery to subscribers.
    /// Does nothing if the group is gone.
    pub fn happened<H: Reclaimer>(&self, host: &H, id: GroupId, event: Event) {
        _ = host.inside(|inside| self.with(inside, id, |group| self.tell(inside, host, group, event)));
    }

    /// Returns the number of groups.
    pub fn count<H: Host>(&self, host: &H) -> GroupCount {
        host.inside(|inside| self.count_inside(inside))
    }

    /// Returns the number of groups.
    pub fn count_inside(&self, _: &Inside<'_>) -> GroupCount {
        self.tree.count()
    }

    /// Returns the first id, from index `from` on, of a deleted group that is still referred to.
    pub fn next_gone(&self, inside: &Inside<'_>, from: u32) -> Option<GoneId> {
        let gone = |index| {
            let (id, bytes) = self.tree.owners.gone_at(index)?;
            Some(GoneId { id, heir: self.heir(inside, id)?, bytes })
        };
        (from..self.tree.owners.len()).find_map(gone)
    }

    /// Forgets readers, waiters and servers of the parent's other threads, in a forked child.
    ///
    /// # Safety
    /// The caller is the only thread of the child, and does not rely on groups that it had found as
    /// a reader before the fork.
    pub unsafe fn forget_others<H: Reclaimer>(&self, host: &H) {
        // SAFETY: by this function's contract the caller is the only thread of the child. It does
        // not use groups that it found in a read before the fork.
        unsafe { self.rcu.forget_others() };
        host.inside(|inside| {
            self.forget_tellers(inside);
            self.forget_waiters(inside, host);
            self.give_up_requests(inside, |_| true);
        });
    }

    /// Returns the number of fences that emptying stocks has requested so far.
    pub fn fences(&self) -> u32 {
        self.stocks.fences()
    }

    /// Returns the bytes of memory that groups take, without their per-CPU data.
    pub fn bytes<P: Platform>(&self, platform: &P) -> usize {
        let mut sum = 0;
        self.each_mapping(platform, &mut |_, length| sum += length);
        sum
    }

    /// Calls `each` with the start and length of each mapping that groups use.
    pub fn each_mapping<P: Platform>(&self, platform: &P, each: &mut dyn FnMut(usize, usize)) {
        self.tree.each_mapping(platform, each);
        self.waiters.each_mapping(platform, each);
        self.subscribers.each_mapping(platform, each);
        let stocks = self.stocks.mapping();
        each(stocks.start, stocks.length);
        self.rcu.mapping(platform).inspect(|records| each(records.start, records.length));
    }

    /// Flushes caches that keep bytes of a group and its descendants, and empties their stocks.
    /// Returns the number of CPUs that were skipped because a fence failed.
    pub fn drain<H: Reclaimer>(&self, host: &H, id: GroupId) -> u32 {
        self.drain_with(host, id, FlushPace::AtOnce)
    }

    /// Flushes caches at `pace`, and then empties stocks, as [`Groups::drain`] does.
    pub(crate) fn drain_with<H: Reclaimer>(&self, host: &H, id: GroupId, pace: FlushPace) -> u32 {
        host.flush(&|payer| self.is_below(payer.id(), id), pace);
        self.drain_stocks(host, id)
    }

    /// Empties the stocks of a group and its descendants. Returns the number of CPUs that had to be
    /// skipped.
    pub(crate) fn drain_stocks<H: Reclaimer>(&self, host: &H, id: GroupId) -> u32 {
        let wanted = |payer: Payer| self.is_below(payer.id(), id);
        host.inside(|inside| {
            self.stocks
                .drain(host.platform(), wanted, |payer, bytes| self.uncharge_counters(inside, host, payer, bytes))
        })
    }

    /// Uncharges bytes from the counters of the payer's group, or of its heir, and of all
    /// ancestors.
    pub(crate) fn uncharge_counters<H: Reclaimer>(&self, inside: &Inside<'_>, host: &H, payer: Payer, bytes: u64) {
        {
            let _reading = self.rcu.enter();
            let Some(behind) = self.tree.owners.behind(payer.id()) else { return };
            self.tree.group(behind.slot()).inspect(|group| {
                self.count_charged(host, group, payer, bytes.wrapping_neg());
                self.count_shared(host, group, 1);
            });
            // All counters are lowered before a waiter is admitted.
            if self
                .tree
                .upwards(behind.slot())
                .fold(false, |waited_for, (_, group)| group.sub_usage(bytes) | waited_for)
            {
                _ = self.admit(inside, host, payer.id());
            }
        }
        self.tree.owners.unref_bytes(payer.id(), bytes);
    }

    /// Counts the operations of a batch on shared memory: `each` on the group and on each ancestor,
    /// and one on the booked bytes.
    pub(crate) fn count_shared<H: Host>(&self, host: &H, group: &Group, each: u64) {
        let depth = u64::from(group.depth.load(Ordering::Relaxed));
        self.stocks.count_shared(host.platform(), each * depth + 1);
    }

    /// Returns an upper bound of the number of operations so far, by charges and uncharges, on
    /// counters that CPUs share.
    ///
    /// A charged batch changes usage and peak of the group and each ancestor, and the bytes booked
    /// under its id. An uncharged batch changes all of these but the peak. Failed attempts at a
    /// limit are not counted.
    pub fn shared_operations(&self) -> u64 {
        self.stocks.shared()
    }
}
