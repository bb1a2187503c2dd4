//! Memory groups: what composes the tree, the stocks and the grace periods.
//!
//! Sits between whoever charges (by hand, or an allocator for a thread that is in a group) and the counters. A charge is taken from this CPU's
//! stock, by one restartable sequence; where there is none, a batch is charged to the group and all above it. What comes back goes into a
//! stock, too, and what is too much for it goes back to the counters: of the group that was charged, or of its heir. Nothing here waits but
//! for mutexes that are held for a few links. Everything but the stocks' fast path runs inside the host's gate, so a fork finds no
//! mutex held.
//!
//! Slack: a group is charged for what is stocked, at most [`CAP`](crate::CAP) for each payer and CPU, and eight times that for all payers on a
//! CPU; and for what the host's caches keep of what it had. [`Groups::used`] is without.

use crate::events::Subscribers;
use crate::group::{Bound, Event, Group, Name, ROOT};
use crate::id::{GroupId, Kind, Payer};
use crate::owners::Behind;
use crate::protection::Standing;
use crate::queue::Waiters;
use crate::seat::Seat;
use crate::stock::Stocks;
use crate::tree::{Denied, GroupCount, Tree};
use core::sync::atomic::{AtomicI64, Ordering};
use neap_base::rcu::{Mark, Rcu};
use neap_base::{Mutex, Platform};
use neap_percpu::{Alone, Charge, Handle, Host, Owner, Wait};

/// Looks whether somebody is still on the way through what is to end, one after the other: a few more than are needed where nobody is.
const LOOKS: u32 = 4;
/// How often a new group's maker looks again before tables grow, and sleeps in between, in nanoseconds.
const NAPS: u32 = 100;
const NAP: u64 = 1_000_000;

/// What groups ask of whoever they are part of, besides per-CPU data.
pub trait Reclaimer: Host {
    /// Asks for memory of a group, and of those below it, which is at its limit: so many bytes, of any kind. Answers about how many
    /// came back; 0 when there is nothing more to be had. Called outside the gate and without a lock.
    fn reclaim(&self, _group: GroupId, _bytes: u64) -> u64 {
        0
    }

    /// Calls `each` with everything that caches keep though somebody pays for it still: exactly while nobody allocates or frees. Called inside
    /// the gate and without a lock.
    fn each_kept(&self, _each: &mut dyn FnMut(Payer, u64)) {}

    /// Lets caches give up what they keep for payers that are wanted: `at_once`, or only where that is worth its price again. Called outside
    /// the gate and without a lock.
    fn flush(&self, _wanted: &dyn Fn(Payer) -> bool, _at_once: bool) {}

    /// Asks that [`Groups::tick`] and [`Groups::deliver`] be called soon, by somebody who holds nothing. Called inside the gate, perhaps
    /// under a mutex of the groups' and within a free: it neither waits nor calls them itself.
    fn come_soon(&self) {}

    /// A group asks for memory: a server is to [take the request](Groups::take_request). Called
    /// outside the gate and without a lock; it waits for nothing.
    fn ask_soon(&self) {}

    /// A group is being deleted: what hangs on it goes to its parent now, before what it is charged for does, so that nothing is its
    /// parent's that cannot be found there. Called inside the gate and under the tree's mutex: it asks `groups` only for what takes no
    /// lock ([`Groups::above`] and its like), and is done soon.
    fn offline(&self, _groups: &Groups, _child: Seat, _parent: Seat) {}
}

/// Nobody is asked for anything.
impl<P: Platform, C: Charge> Reclaimer for Alone<'_, P, C> {}

/// How soon [`Groups::tick`] wants to come again, in nanoseconds, where nothing is more urgent.
pub const INTERVAL: u64 = 250_000_000;

/// A tree of groups, and what it takes to charge them.
#[derive(Debug)]
pub struct Groups {
    pub(crate) tree: Tree,
    pub(crate) stocks: Stocks,
    pub(crate) waiters: Waiters,
    pub(crate) subscribers: Subscribers,
    /// Who is on the way through ids and slots.
    pub(crate) rcu: Rcu,
    /// When the slots and ids that wait for the end of a grace period began to.
    reaping: Mutex<Mark>,
    nodes: usize,
}

/// What is known of a group.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    /// The group.
    pub id: GroupId,
    /// The one above it; `None` for the root.
    pub parent: Option<GroupId>,
    /// Its name below that; empty for the root.
    pub name: Name,
    /// What bounds it, by [`Bound`].
    pub bounds: [u64; Bound::ALL.len()],
    /// Bytes charged to it and all below it, stocks included.
    pub charged: u64,
    /// The most since the group was made, or [`Groups::reset_peak`].
    pub peak: u64,
    /// Bytes charged to it alone, by [`Kind`], stocks included. What was on its way through a group below while that was deleted is counted
    /// a few ticks later.
    pub kinds: [u64; Kind::ALL.len()],
    /// How often what happened to it or to one below it, by [`Event`].
    pub events: [u64; Event::ALL.len()],
    /// Groups right below it.
    pub children: u32,
}

impl Groups {
    /// A tree with nothing but the root.
    ///
    /// # Errors
    /// What the system refused.
    pub fn open<H: Host>(host: &H) -> Result<Groups, Denied> {
        let (platform, nodes) = (host.platform(), host.platform().nodes());
        let per_cpu = counts_of_new_group(host, nodes)?;
        let stocks = Stocks::open(platform);
        let made = stocks.and_then(|stocks| match Tree::open(platform, per_cpu) {
            Ok(tree) => {
                let rcu = Rcu::new();
                // Without memory for sequences readers do without.
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
                // SAFETY: nobody has seen them.
                unsafe { stocks.close(platform) };
                Err(error)
            }
        });
        made.map_err(|error| {
            drop_counts(host, per_cpu.0);
            Denied::from(error)
        })
    }

    /// Gives everything back but the per-CPU data of groups that are still there.
    ///
    /// # Safety
    /// Nobody uses the groups any more.
    pub unsafe fn close<H: Host>(&self, host: &H) {
        let root = self.tree.group(ROOT).map(|group| group.per_cpu.load(Ordering::Relaxed));
        root.inspect(|&owner| drop_counts(host, Owner::from_bits(owner)));
        let platform = host.platform();
        // SAFETY: as the caller promises.
        unsafe {
            self.tree.close(platform);
            self.stocks.close(platform);
            self.waiters.close(platform);
            self.subscribers.close(platform);
            self.rcu.close(platform);
        }
    }

    /// Makes a group below another. Its counts are per-CPU data with an owner of the group's own. Where tables would grow, for good, though a
    /// quarter of them is what deleted groups have left, that is ended first; it may take a tenth of a second, if somebody who charges was preempted.
    ///
    /// # Errors
    /// See [`Denied`]; nothing has changed then.
    pub fn create<H: Reclaimer>(&self, host: &H, parent: GroupId, name: &str) -> Result<GroupId, Denied> {
        for _ in (0..NAPS).take_while(|_| host.inside(|| self.tree.is_crowded())) {
            if self.end_deleted(host) && host.inside(|| self.tree.is_crowded()) {
                host.platform().sleep(NAP);
            }
        }
        let per_cpu = counts_of_new_group(host, self.nodes)?;
        let made = host.inside(|| self.tree.create(host.platform(), parent, name, per_cpu));
        made.inspect_err(|_| drop_counts(host, per_cpu.0))
    }

    /// Notes that a group was made for a thread, by the thread's id, which is not 0.
    pub fn note_thread<H: Host>(&self, host: &H, id: GroupId, thread: u32) {
        host.inside(|| {
            let slot = self.tree.slot_of(id).ok();
            slot.and_then(|slot| self.tree.group(slot))
                .inspect(|group| group.made_for.store(thread, Ordering::Relaxed));
        });
    }

    /// The thread that a group was made for; `None` for one that was made for none, or is gone.
    pub fn thread_of<H: Host>(&self, host: &H, id: GroupId) -> Option<u32> {
        let thread = host.inside(|| {
            let group = self.tree.group(self.tree.slot_of(id).ok()?)?;
            Some(group.made_for.load(Ordering::Relaxed))
        });
        thread.filter(|thread| *thread != 0)
    }

    /// The group at a path below `from`: names with a `/` between them; nothing for `from` itself.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn find<H: Host>(&self, host: &H, from: GroupId, path: &str) -> Result<GroupId, Denied> {
        host.inside(|| self.tree.find(from, path))
    }

    /// Deletes a group: what it is charged for is its parent's from now on, and what comes back of it goes there, after what else hangs on
    /// it ([`Reclaimer::offline`]). It has no children.
    /// Charging it fails from now on, but for what was stocked for it a moment ago. What is left of it is gone after a few ticks.
    ///
    /// # Errors
    /// See [`Denied`]; nothing has changed then.
    pub fn delete<H: Reclaimer>(&self, host: &H, id: GroupId) -> Result<(), Denied> {
        host.inside(|| {
            let subscribers = self.subscribers.lock();
            // So that the slot is nobody else's before its subscribers have its counts.
            let _reading = self.rcu.enter();
            let slot = self.tree.delete(id, |child, parent| host.offline(self, child, parent))?;
            let is_news = self.tree.group(slot).is_some_and(|group| self.subscribers.orphan(&subscribers, group));
            drop(subscribers);
            self.tree.group(slot).inspect(|group| self.hand_down_counts(host, group));
            if is_news {
                host.come_soon();
            }
            self.end_waits(host, id);
            Ok(())
        })
    }

    /// Changes a bound, and tells; answers what it was. Takes effect at once: where a new `max` is
    /// below what the group is charged for, the stocks of all below it are emptied, and it is
    /// charged for no more until there is room; what comes back meanwhile may be used again. From
    /// then on the group asks for memory until it is below its new `max`, or `high`; this call does
    /// not wait for that.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn set_bound<H: Reclaimer>(&self, host: &H, id: GroupId, bound: Bound, bytes: u64) -> Result<u64, Denied> {
        let (before, usage) = host.inside(|| {
            let _reading = self.rcu.enter();
            self.tree.change(id, |group| {
                let before = group.bound(bound);
                self.tree.set_bound(group, bound, bytes);
                self.tell(host, group, Event::LimitChanged);
                (before, group.usage())
            })
        })?;
        if bound == Bound::Max && usage > bytes {
            self.drain(host, id);
        }
        if bound == Bound::Max {
            // Also where it was lowered: what does not fit any more is refused.
            while host.inside(|| self.admit(host, id)) {}
        }
        if bound == Bound::High {
            // Charges that are held up may go on.
            host.inside(|| host.come_soon());
        }
        if matches!(bound, Bound::Max | Bound::High) && usage > bytes {
            host.inside(|| {
                let _reading = self.rcu.enter();
                self.tree.owners.own(id).inspect(|&slot| self.ask_for_excess(slot));
            });
            host.ask_soon();
        }
        Ok(before)
    }

    /// Whether a group is there, at this moment. Takes no lock.
    pub fn is_there(&self, id: GroupId) -> bool {
        self.tree.owners.is_there(id)
    }

    /// The group above one, `None` for the root, and its name below that.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn place<H: Host>(&self, host: &H, id: GroupId) -> Result<(Option<GroupId>, Name), Denied> {
        host.inside(|| self.with(id, |group| (self.above(group), group.name())))
    }

    /// Calls `f` with a group that keeps its slot meanwhile. Takes no lock that others want. Inside
    /// the gate.
    pub(crate) fn with<R>(&self, id: GroupId, f: impl FnOnce(&Group) -> R) -> Result<R, Denied> {
        let _reading = self.rcu.enter();
        self.tree.with(id, f)
    }

    fn above(&self, group: &Group) -> Option<GroupId> {
        self.tree.group(group.parent.load(Ordering::Relaxed)).map(Group::id)
    }

    /// What is known of a group.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn info<H: Host>(&self, host: &H, id: GroupId) -> Result<Info, Denied> {
        host.inside(|| self.with(id, |group| self.info_of(host, group)))
    }

    /// The same for whoever goes through all slots, from 0 up to [`GroupCount::slots`]; `None` for one without a group. Inside the gate.
    pub fn info_at<H: Host>(&self, host: &H, slot: u32) -> Option<Info> {
        let _reading = self.rcu.enter();
        self.tree.at(slot, |group| self.info_of(host, group))
    }

    fn info_of<H: Host>(&self, host: &H, group: &Group) -> Info {
        Info {
            id: group.id(),
            parent: self.above(group),
            name: group.name(),
            bounds: Bound::ALL.map(|bound| group.bound(bound)),
            charged: group.usage(),
            peak: group.counters.peak.load(Ordering::Relaxed),
            kinds: Kind::ALL.map(|kind| self.of_kind(host, group, kind)),
            events: core::array::from_fn(|event| group.events[event].load(Ordering::Relaxed)),
            children: group.children.load(Ordering::Relaxed),
        }
    }

    /// Lets a group's peak begin again at its charge of this moment. Returns the peak before.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn reset_peak<H: Host>(&self, host: &H, id: GroupId) -> Result<u64, Denied> {
        let reset = |group: &Group| {
            let peak = &group.counters.peak;
            // Relaxed: statistics; they publish no other data.
            let before = peak.swap(group.usage(), Ordering::Relaxed);
            // A charge in between has raised the peak that was replaced.
            peak.fetch_max(group.usage(), Ordering::Relaxed);
            before
        };
        host.inside(|| self.with(id, reset))
    }

    /// Bytes charged to a group alone, of one kind on one node, stocks included.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn charged<H: Host>(&self, host: &H, id: GroupId, kind: Kind, node: usize) -> Result<u64, Denied> {
        let counted = |group: &Group| if node < self.nodes { self.counted(host, group, kind, node) } else { 0 };
        host.inside(|| self.with(id, counted))
    }

    /// Bytes that a group and those below it use: charged, neither stocked nor kept by caches. Exact while nobody charges, allocates or
    /// frees; otherwise off by what is charged meanwhile. Looks at everything that caches have.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn used<H: Reclaimer>(&self, host: &H, id: GroupId) -> Result<u64, Denied> {
        host.inside(|| {
            let charged = self.with(id, Group::usage)?;
            let mut unused = 0;
            self.each_slack(host, &mut |payer, bytes| unused += if self.is_below(payer.id(), id) { bytes } else { 0 });
            Ok(charged.saturating_sub(unused))
        })
    }

    /// Whether what an id leads to is `top`, or below it.
    pub(crate) fn is_below(&self, id: GroupId, top: GroupId) -> bool {
        let _reading = self.rcu.enter();
        let Some(behind) = self.tree.owners.behind(id) else { return false };
        self.tree.upwards(behind.slot()).any(|(_, group)| group.id() == top)
    }

    /// Adds up, for [`Groups::unused_at`], what is charged to each group alone and nobody uses, stocked or kept by caches, as far as that
    /// can be seen at this moment. By one thread at a time, inside the gate.
    pub fn add_up_unused<H: Reclaimer>(&self, host: &H) {
        let groups = (0..self.tree.count().slots).filter_map(|slot| self.tree.group(slot));
        groups.for_each(|group| group.unused.store(0, Ordering::Relaxed));
        self.each_slack(host, &mut |payer, bytes| {
            let _reading = self.rcu.enter();
            let behind = self.tree.owners.behind(payer.id());
            let group = behind.and_then(|behind| self.tree.group(behind.slot()));
            group.inspect(|group| _ = group.unused.fetch_add(bytes, Ordering::Relaxed));
        });
    }

    /// The group in a slot, and bytes of it that nobody used when [`Groups::add_up_unused`] was last called, if there were any. Inside
    /// the gate.
    pub fn unused_at(&self, slot: u32) -> Option<(GroupId, u64)> {
        let _reading = self.rcu.enter();
        let group = self.tree.group(slot)?;
        Some((group.id(), group.unused.load(Ordering::Relaxed))).filter(|(_, bytes)| *bytes > 0)
    }

    fn each_slack<H: Reclaimer>(&self, host: &H, each: &mut dyn FnMut(Payer, u64)) {
        self.stocks.each(&mut *each);
        host.each_kept(each);
    }

    /// Bytes of a kind that somebody uses, in all groups together: charged, and not stocked. Exact while nobody charges. Inside the gate.
    pub fn used_of_kind<H: Host>(&self, host: &H, kind: Kind) -> u64 {
        let slots = 0..self.tree.count().slots;
        let charged: u64 =
            slots.filter_map(|slot| self.info_at(host, slot)).map(|info| info.kinds[kind as usize]).sum();
        let mut stocked = 0;
        self.stocks.each(|payer, bytes| stocked += if payer.kind() == kind { bytes } else { 0 });
        charged.saturating_sub(stocked)
    }

    /// The group that an id leads to: its own, or the heir of one that is gone. Inside the gate.
    pub fn heir(&self, id: GroupId) -> Option<GroupId> {
        let _reading = self.rcu.enter();
        self.tree.group(self.tree.owners.behind(id)?.slot()).map(Group::id)
    }

    /// The groups right below one, one after the other: the one behind `after`, or the first. `None` at the end, or when either is gone.
    pub fn next_child<H: Host>(&self, host: &H, parent: GroupId, after: Option<GroupId>) -> Option<GroupId> {
        host.inside(|| {
            let _reading = self.rcu.enter();
            self.tree.next_child(parent, after)
        })
    }

    /// The slots of a group and of all below it, in order, and how many these are; `None` if there is not room for all, or the group is gone.
    pub fn slots_below<H: Host>(&self, host: &H, top: GroupId, slots: &mut [u32]) -> Option<usize> {
        host.inside(|| {
            let _reading = self.rcu.enter();
            self.tree.slots_below(top, slots)
        })
    }

    /// How much of what a group has is protected from reclaim: by `min`, and by `low`.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn protection<H: Host>(&self, host: &H, id: GroupId) -> Result<(u64, u64), Denied> {
        host.inside(|| {
            let _reading = self.rcu.enter();
            Ok((self.tree.effective(id, Bound::Min)?, self.tree.effective(id, Bound::Low)?))
        })
    }

    /// A pass of reclaim begins, which asks [`Groups::standing`]: what several groups below one claim together is not taken from before.
    pub fn begin_pass(&self) {
        self.tree.begin_pass();
    }

    /// Groups that were looked at so far to add up what all of those right below another claim, or
    /// to name those that hold most.
    pub fn summed(&self) -> u64 {
        self.tree.summed()
    }

    /// Bytes charged to a group and those below it, stocks included.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn usage<H: Host>(&self, host: &H, id: GroupId) -> Result<u64, Denied> {
        host.inside(|| self.with(id, Group::usage))
    }

    /// The same of the group alone.
    ///
    /// # Errors
    /// [`Denied::NoSuchGroup`].
    pub fn own_usage<H: Host>(&self, host: &H, id: GroupId) -> Result<u64, Denied> {
        host.inside(|| self.with(id, |group| self.tree.own_usage(group)))
    }

    /// What somebody who reclaims from `top` has to know of the group in a slot, if that is `top` or below it.
    pub fn standing<H: Host>(&self, host: &H, slot: u32, top: GroupId) -> Option<Standing> {
        host.inside(|| {
            let _reading = self.rcu.enter();
            self.tree.standing(slot, top)
        })
    }

    /// Counts an event of a group and of all above it, and has it told to who subscribed; nothing if the group is gone.
    pub fn happened<H: Reclaimer>(&self, host: &H, id: GroupId, event: Event) {
        _ = host.inside(|| self.with(id, |group| self.tell(host, group, event)));
    }

    /// How many groups there are.
    pub fn count<H: Host>(&self, host: &H) -> GroupCount {
        host.inside(|| self.count_inside())
    }

    /// The same inside the gate.
    pub fn count_inside(&self) -> GroupCount {
        self.tree.count()
    }

    /// The first id, of an index from `from` on, whose group is gone though something still refers to it, with the group that has
    /// inherited it, and how many bytes are booked under it. Inside the gate.
    pub fn next_gone(&self, from: u32) -> Option<(GroupId, GroupId, u64)> {
        let gone = |index| self.tree.owners.gone_at(index).and_then(|(id, bytes)| Some((id, self.heir(id)?, bytes)));
        (from..self.tree.owners.len()).find_map(gone)
    }

    /// In a forked child: those who were on their way in the parent's threads are not here, and nobody waits for room.
    ///
    /// # Safety
    /// As for [`Rcu::forget_others`].
    pub unsafe fn forget_others<H: Reclaimer>(&self, host: &H) {
        // SAFETY: as the caller promises.
        unsafe { self.rcu.forget_others() };
        host.inside(|| {
            self.forget_tellers();
            self.forget_waiters(host);
            self.give_up_requests(|_| true);
        });
    }

    /// Fences that emptying stocks has asked for so far.
    pub fn fences(&self) -> u32 {
        self.stocks.fences()
    }

    /// Bytes of memory that groups take, besides their per-CPU data.
    pub fn bytes<P: Platform>(&self, platform: &P) -> usize {
        let mut sum = 0;
        self.each_mapping(platform, &mut |_, length| sum += length);
        sum
    }

    /// Calls `each` with the start and length of all that is mapped for groups.
    pub fn each_mapping<P: Platform>(&self, platform: &P, each: &mut dyn FnMut(usize, usize)) {
        self.tree.each_mapping(platform, each);
        self.waiters.each_mapping(platform, each);
        self.subscribers.each_mapping(platform, each);
        let (lines, length) = self.stocks.mapping();
        each(lines, length);
        self.rcu.mapping(platform).inspect(|&(records, length)| each(records, length));
    }

    /// Work that waits: empties the stocks of CPUs that have not charged since the last call, ends what deleted groups have left, and attends to those
    /// who wait for room. Answers in how many nanoseconds to come again though nobody calls in between, if at all. To be called now and
    /// then, outside the gate; never waits.
    pub fn tick<H: Reclaimer>(&self, host: &H) -> Option<u64> {
        let left = host.inside(|| {
            let out = |payer, bytes| self.settle(host, payer, bytes);
            let (stocked, skipped) = self.stocks.drain_idle(host.platform(), out);
            // A CPU that cannot be fenced is no reason to come again for ever.
            self.reap(host) || stocked && !skipped
        });
        let next = self.attend(host, host.platform().now());
        next.or(left.then_some(INTERVAL))
    }

    /// Ends what deleted groups have left, unless somebody else is on the way through it at the moment; whether anything is left. For
    /// hosts whose ticks may not come soon. Fences.
    pub fn end_deleted<H: Reclaimer>(&self, host: &H) -> bool {
        (0..LOOKS).all(|_| host.inside(|| self.reap(host)))
    }

    /// Ends what deleted groups have left, as far as nobody is on the way through it any more; whether anything is left. Inside the gate.
    fn reap<H: Reclaimer>(&self, host: &H) -> bool {
        if !self.tree.is_waiting().contains(&true) {
            return false;
        }
        let Some(mut since) = self.reaping.try_lock() else { return true };
        let [_, ending] = self.tree.is_waiting();
        if ending {
            if !self.has_passed(host.platform(), *since) {
                return true;
            }
            let gone = |payer: Payer| !payer.is_of_heir() && !self.tree.owners.is_there(payer.id());
            let out = |payer, bytes| self.settle(host, payer, bytes);
            if self.stocks.drain(host.platform(), gone, out) > 0 {
                return true;
            }
            self.tree.end_grace(|group| {
                self.hand_down_counts(host, group);
                let owner = Owner::from_bits(group.per_cpu.load(Ordering::Relaxed));
                // SAFETY: nobody can find the group's counts any more. The owner was opened for it, so there is no error.
                let _ = unsafe { host.data().close_owner(owner) };
            });
        }
        let [beginning, _] = self.tree.is_waiting();
        if beginning {
            self.tree.begin_grace();
            *since = self.rcu.mark();
        }
        beginning
    }

    /// Takes back what caches keep for a group and those below it, and empties their stocks. Answers how many CPUs' stocks had to be skipped.
    pub fn drain<H: Reclaimer>(&self, host: &H, id: GroupId) -> u32 {
        self.drain_with(host, id, true)
    }

    /// The same, with caches `at_once` or only where that is worth its price again.
    pub(crate) fn drain_with<H: Reclaimer>(&self, host: &H, id: GroupId, at_once: bool) -> u32 {
        host.flush(&|payer| self.is_below(payer.id(), id), at_once);
        self.drain_stocks(host, id)
    }

    /// Empties the stocks of a group and those below it.
    pub(crate) fn drain_stocks<H: Reclaimer>(&self, host: &H, id: GroupId) -> u32 {
        let wanted = |payer: Payer| self.is_below(payer.id(), id);
        host.inside(|| self.stocks.drain(host.platform(), wanted, |payer, bytes| self.settle(host, payer, bytes)))
    }

    /// Takes bytes off the counters of whoever they are booked for. Inside the gate.
    pub(crate) fn settle<H: Reclaimer>(&self, host: &H, payer: Payer, bytes: u64) {
        {
            let _reading = self.rcu.enter();
            let Some(behind) = self.tree.owners.behind(payer.id()) else { return };
            self.tree.group(behind.slot()).inspect(|group| {
                self.count_charged(host, group, payer, bytes.wrapping_neg());
                self.count_shared(host, group, 1);
            });
            // All of them are lowered before anybody is let in.
            if self.tree.upwards(behind.slot()).fold(false, |waited_for, (_, group)| group.lower(bytes) | waited_for) {
                _ = self.admit(host, payer.id());
            }
        }
        self.tree.owners.unbook(payer.id(), bytes);
    }

    /// Counts what a batch costs those who share a group: so many operations on it and on each above it, and one on what is booked.
    pub(crate) fn count_shared<H: Host>(&self, host: &H, group: &Group, each: u64) {
        let depth = u64::from(group.depth.load(Ordering::Relaxed));
        self.stocks.count_shared(host.platform(), each * depth + 1);
    }

    /// Operations so far, by charges and what came back, on counters that CPUs share, at most: of a batch that is charged the usage and the
    /// peak of the group and of each above it, and what is booked under its id; of one that comes back the same without the peak. Not
    /// counted are attempts at a limit that failed.
    pub fn shared_operations(&self) -> u64 {
        self.stocks.shared()
    }

    /// Adds to the counts of a group, on this CPU.
    pub(crate) fn count_charged<H: Host>(&self, host: &H, group: &Group, payer: Payer, bytes: u64) {
        let index = payer.node().min(self.nodes - 1) * Kind::ALL.len() + payer.kind() as usize;
        let cpu = host.platform().cpu();
        if let Some(count) = self.counts(host, group, cpu).and_then(|counts| counts.get(index)) {
            count.fetch_add(bytes as i64, Ordering::Relaxed);
        }
    }

    /// The counts of a group on a CPU.
    fn counts<'h, H: Host>(&self, host: &'h H, group: &Group, cpu: usize) -> Option<&'h [AtomicI64]> {
        let handle = core::num::NonZeroU64::new(group.counts.load(Ordering::Relaxed))?;
        let copy = host.data().copy(Handle::from_bits(handle), cpu)?.cast::<AtomicI64>();
        // SAFETY: the copy has that many, as long as the group is there, which the caller sees to.
        Some(unsafe { core::slice::from_raw_parts(copy, self.nodes * Kind::ALL.len()) })
    }

    /// Bytes charged to a group alone, of one kind.
    pub(crate) fn of_kind<H: Host>(&self, host: &H, group: &Group, kind: Kind) -> u64 {
        (0..self.nodes).map(|node| self.counted(host, group, kind, node)).sum()
    }

    fn counted<H: Host>(&self, host: &H, group: &Group, kind: Kind, node: usize) -> u64 {
        let index = node * Kind::ALL.len() + kind as usize;
        let words = (0..host.data().cpus()).filter_map(|cpu| self.counts(host, group, cpu)?.get(index));
        words.map(|word| word.load(Ordering::Relaxed)).fold(0, i64::wrapping_add).max(0) as u64
    }

    /// Adds what a group that is gone has counted to what its heir has.
    pub(crate) fn hand_down_counts<H: Host>(&self, host: &H, group: &Group) {
        let _reading = self.rcu.enter();
        let Some(Behind::Heir(slot)) = self.tree.owners.behind(group.id()) else { return };
        let Some(heir) = self.tree.group(slot) else { return };
        for cpu in 0..host.data().cpus() {
            let (Some(from), Some(to)) = (self.counts(host, group, cpu), self.counts(host, heir, cpu)) else { return };
            for (from, to) in from.iter().zip(to) {
                to.fetch_add(from.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            }
        }
    }
}

/// An owner of per-CPU data, and room for a group's counts.
fn counts_of_new_group<H: Host>(host: &H, nodes: usize) -> Result<(Owner, Handle), Denied> {
    let owner = host.inside(|| host.data().open_owner(host.platform()))?;
    let size = nodes * Kind::ALL.len() * size_of::<AtomicI64>();
    match host.allocate(owner, size, align_of::<AtomicI64>(), Wait::Long) {
        Ok(counts) => Ok((owner, counts)),
        Err(refused) => {
            drop_counts(host, owner);
            Err(refused.into())
        }
    }
}

fn drop_counts<H: Host>(host: &H, owner: Owner) {
    // SAFETY: nobody else has heard of it. It was opened a moment ago, so there is no error.
    let _ = host.inside(|| unsafe { host.data().close_owner(owner) });
}
