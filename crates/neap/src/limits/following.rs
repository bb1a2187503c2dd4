//! A limit that follows the container: `limit:auto`, and a percentage.
//!
//! # Design
//! A *look* reads how much room the nearest limit of a container or of the machine leaves
//! ([`Platform::room`]). From this it computes the manager's limit in bytes ([`limit_for`]). The
//! page layer refuses growth beyond the limit, so neap notices fast growth between two looks. An
//! allocation at the limit first requests another look. It waits at most 100 ms for the look of
//! neap's thread, or a second with `refuse:on`. Then it asks shrinkers and drains caches. If that
//! does not suffice it raises the limit, or fails with `refuse:on`.
//!
//! | event | the look is made by | frequency |
//! |---|---|---|
//! | a tick | neap's thread | four times a second |
//! | a sleep of neap's thread without ticks | neap's thread | once a second |
//! | a tick in a process without neap's thread | calls of the program | once a second |
//! | an allocation at the limit | neap's thread; the call without it or with one thread | always |
//!
//! There are 50 ms between looks while the container has too little room or its limit falls, and
//! for one more second. The same is true while other memory in the container grows so fast that the
//! room ends soon. neap expects that such a fall of the room goes on. So reclaim starts before the
//! room falls below the reserve. The faster the fall, the less a heap may grow.
//!
//! Several processes share the room of a container, and do not communicate. The share of a process
//! is its part of the used memory. A process takes its share of spare room, and gives back its
//! share of missing bytes. A small process may take a sixteenth of the spare room. An allocation at
//! the limit that needs more may take it as long as the spare room lasts.
//!
//! The container counts memory when a program touches it. With `refuse:on` neap therefore subtracts
//! what the heap has handed out, and the program has not touched yet, from the spare room. neap
//! does not know what other processes have not touched.
//!
//! If the program listens to [`Event::Container`] ([`headroom`](crate::limits::headroom)), neap
//! makes the first three kinds of looks in the table even for other limits.
//!
//! If the heap is above a limit that follows the container after such a look, reclaim starts at
//! once ([`Core::reach_limit`]). It starts again after each further look while the heap stays above
//! the limit.
//!
//! # Locking
//! A look takes the mutex of a [change](crate::options::change), inside the gate, to set the limit.
//! It holds no lock while it reads the container's files.

use crate::limits::limit::{is_growth, is_near};
use crate::mm::{Core, Mm};
use crate::options::settings::page_price;
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::platform::{Room, margin};
use neap_groups::Event;
use neap_os::stack;

/// Nanoseconds that an allocation at the limit waits for neap's thread to look.
const LOOK_WAIT_NS: u64 = 100_000_000;
/// Nanoseconds of such a wait with `refuse:on`. The allocation fails if no look raises the limit.
const REFUSAL_LOOK_WAIT_NS: u64 = 1_000_000_000;
/// Least change of the limit that takes effect. It is one in so many bytes of the limit, or so many
/// bytes if that is more.
const LEAST_CHANGE: (u64, u64) = (64, 1 << 20);
/// A process may take one in so many bytes of the spare room even if its share is smaller.
const LEAST_SHARE: u64 = 16;
/// A heap that is below its limit by at most this fraction gives memory as if it were at the limit.
/// The fraction is one in so many of its bytes.
const SLACK: u64 = 8;
/// Bytes by which `pass_limit` raises the limit beyond the need of the allocation.
const BEYOND: u64 = 8 << 20;
/// Most tries to pass the limit for one allocation.
const PASSES_MAX: u32 = 16;

/// The numbers from which [`limit_for`] computes a limit, besides the container's room.
#[derive(Clone, Copy)]
struct Terms {
    /// Most hundredths of the smallest limit for the heap.
    percent: u8,
    /// Bytes that stay free below the limit of the level with the least room, and below the
    /// smallest limit.
    reserve: u64,
    least_reserve: u64,
    /// Bytes by which the room is expected to fall.
    fall: u64,
    /// The heap's previous limit.
    before: u64,
    /// Bytes by which reclaim takes the heap below its limit, to the high watermark.
    kept: u64,
    /// Bytes of the heap that the container will only count once the program touches them.
    untouched: u64,
    /// Bytes that an allocation at the limit needs.
    need: u64,
}

/// Returns the limit of a heap with `own` bytes in a container that leaves `room`. It is the size
/// of the heap plus its share of the spare room, or minus its share of the missing bytes.
///
/// Processes look one after the other. If each gave its whole share of the bytes that are missing
/// at its look, the first process would give most. So a heap gives half of its share at each look,
/// unless it has nearly all used memory of the container. Bytes that will be missing because other
/// processes grow are an exception: later looks find that growth again.
///
/// Reclaim takes a heap some bytes below its limit. If each look computed from the size of that
/// heap, the heap would give these bytes at each look, too. They are a larger part of a small heap.
/// So a look computes from the previous limit if the heap is only a little below it.
fn limit_for(own: u64, room: &Room, terms: Terms) -> u64 {
    let Terms { percent, reserve, least_reserve, fall, before, kept, untouched, need } = terms;
    let used = room.used.max(own).max(1);
    let missing_now = room.missing_above(reserve);
    let room = Room { used: room.used.saturating_add(fall), ..*room };
    let is_almost_alone = own > used / 8 * 7;
    let share = |bytes: u64| (u128::from(bytes) * u128::from(own) / u128::from(used)) as u64;
    let from = |slack: u64| if own.saturating_add(slack) >= before { own.max(before) } else { own };
    let limit = match room.missing_above(reserve) {
        0 => {
            let spare = room.spare_above(reserve).max(0).unsigned_abs().saturating_sub(untouched);
            let grant = share(spare).max(spare / LEAST_SHARE);
            let granted = if need <= spare { grant.max(need) } else { grant };
            match need {
                0 => from(kept).saturating_add(grant),
                // No more than the room has, since a heap below its limit may fill it up to that.
                _ => from(kept).max(own.saturating_add(granted)),
            }
        }
        missing if is_almost_alone => from(kept).saturating_sub(share(missing)),
        missing => {
            let (now, ahead) = (share(missing_now), share(missing) - share(missing_now));
            // Growth is faster than the heap: it may not use the bytes up to its limit before.
            let (given, slack) = if is_growth(&room, fall) {
                (now / 2 + ahead, kept)
            } else {
                ((now + ahead) / 2, kept.max(own / SLACK))
            };
            from(slack).saturating_sub(given)
        }
    };
    let below_smallest = room.smallest.saturating_sub(least_reserve - least_reserve / 8);
    let most = (room.smallest / 100 * u64::from(percent)).min(below_smallest);
    // A limit of 0 would mean no limit.
    limit.min(most).max(1)
}

impl<P: Platform> Core<P> {
    /// Returns the bytes of the heap, as a limit counts them.
    pub(crate) fn counted(&self) -> u64 {
        self.objects.pages.counted() * page_price(self.objects.pages.page_size())
    }

    /// Returns by how many bytes reclaim takes the heap below its limit, to the high watermark.
    fn kept_below_limit(&self) -> u64 {
        let pages = &self.objects.pages;
        u64::from(pages.statistics().watermarks.high) * page_price(pages.page_size())
    }

    /// Returns how many bytes stay free below a limit of the container.
    fn reserve_below(&self, limit: u64) -> u64 {
        self.settings.reserve_of(limit).unwrap_or_else(|| margin(limit))
    }

    /// Whether neap makes looks, for a limit that follows the container or for a listener.
    fn is_looking(&self) -> bool {
        let is_heard = || self.groups.get().is_some_and(|groups| groups.root_hears(Event::Container));
        self.settings.follows().is_some() || is_heard()
    }

    /// Makes a look if the last one is `period` nanoseconds old, or 50 ms while looks are
    /// [frequent](Following::is_hurrying). If the last look is more recent, returns the nanoseconds
    /// until the next one.
    pub(crate) fn look_if_due(&self, mm: &Mm<P>, period: u64) -> Option<u64> {
        // Precise, since a sleep ends by the precise clock. By a coarse time the look would not be
        // due yet. The thread would sleep for moments until the coarse clock goes on.
        let (now, last) = (self.objects.platform.precise(), self.following.last.load(Ordering::Relaxed));
        let left = (last + self.following.period(period)).saturating_sub(now);
        if last > 0 && left > 0 {
            return Some(left);
        }
        self.look_at_container(mm, now, 0);
        None
    }

    /// Makes a look if the last one is `period` nanoseconds old, or 50 ms while looks are
    /// [frequent](Following::is_hurrying). Returns the nanoseconds until the next look. Does
    /// nothing, and returns `None`, if no limit follows the container and there is no listener.
    pub(crate) fn follow_if_due(&self, mm: &Mm<P>, period: u64) -> Option<u64> {
        if !self.is_looking() {
            return None;
        }
        if let Some(left) = self.look_if_due(mm, period) {
            return Some(left);
        }
        if self.settings.follows().is_some() && (1..self.counted()).contains(&self.settings.limit()) {
            // Calls of the program may come here, from a small stack.
            stack::apart(|| self.reach_limit(mm));
            // The next ticks go on with the reclaim.
            self.request_tick();
        }
        self.write_wanted_profile(mm);
        Some(self.following.period(period))
    }

    /// Makes a look if an allocation waits for one. Only neap's thread calls this.
    pub(crate) fn look_for_allocation(&self, mm: &Mm<P>) {
        let need = self.following.wanted.swap(0, Ordering::Relaxed);
        if need > 0 {
            self.follow(mm, self.objects.platform.now(), need);
        }
    }

    /// Makes a look for a limit that follows the container, and for an allocation that needs `need`
    /// bytes.
    pub(crate) fn follow(&self, mm: &Mm<P>, now: u64, need: u64) {
        if self.settings.follows().is_some() {
            self.look_at_container(mm, now, need);
        }
    }

    /// Makes a look at time `now`. If the limit follows the container, sets it. An allocation at
    /// the limit may need `need` bytes.
    pub(crate) fn look_at_container(&self, mm: &Mm<P>, now: u64, need: u64) {
        self.following.last.store(now.max(1), Ordering::Relaxed);
        self.following.looks.fetch_add(1, Ordering::Relaxed);
        self.following.looks_for_allocations.fetch_add(u64::from(need > 0), Ordering::Relaxed);
        let own = self.counted();
        // Before the room: memory that is touched in between is then subtracted twice.
        let follows = self.settings.follows();
        let touched = if follows.is_some() { self.touched(own) } else { own };
        let untouched = if self.settings.refuses() { own - touched } else { 0 };
        let room = self.objects.platform.room();
        let before = self.note_headroom(mm, now, room.as_ref()).map_or(0, |before| before.limit);
        let reserve = room.map_or(0, |room| self.reserve_below(room.limit));
        let is_short = follows.is_some() && room.is_some_and(|room| room.missing_above(reserve) > 0);
        let (fall, is_repeated) = match room.map_or(Ok(0), |room| self.following.expected_fall(now, touched, &room)) {
            Ok(fall) => (fall, false),
            Err(fall) => (fall, true),
        };
        let is_falling = room.is_some_and(|room| room.limit < before || is_near(&room, fall));
        self.following.note(own, is_short, follows.is_some() && is_falling);
        let Some(percent) = follows else { return };
        let before = self.settings.followed.load(Ordering::Relaxed);
        let (kept, least_reserve) = (self.kept_below_limit(), room.map_or(0, |room| self.reserve_below(room.smallest)));
        let terms = Terms { percent, reserve, least_reserve, fall, before, kept, untouched, need };
        let limit = room.map_or(0, |room| limit_for(own, &room, terms));
        // An allocation at the limit has requested this look, shortly after the last one. If each
        // such look lowered the limit, the processes that allocate most would give most.
        if is_repeated && limit < before {
            return;
        }
        let least = LEAST_CHANGE.1.max(before / LEAST_CHANGE.0);
        let is_needed = need > 0 && limit > before;
        if limit == 0 || limit < own || is_needed || limit.abs_diff(before) >= least {
            self.put_in_force(mm, limit);
        }
    }

    /// Sets the limit that follows the container.
    fn put_in_force(&self, mm: &Mm<P>, limit: u64) {
        let (pages, settings) = (&self.objects.pages, &self.settings);
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        let _changing = settings.changing.lock();
        if settings.followed.swap(limit, Ordering::Relaxed) != limit && settings.follows().is_some() {
            pages.change(&settings.of_pages(pages.page_size()));
            self.note_limit();
        }
    }

    /// Returns how many of the heap's `own` bytes the process has touched. The estimate is too high
    /// by the memory that the program has beside the heap. It may be too low by the pages that the
    /// kernel has not added up yet: up to 32, or twice the number of CPUs, for each CPU.
    fn touched(&self, own: u64) -> u64 {
        self.objects.platform.resident().map_or(own, |resident| resident.min(own))
    }

    /// Returns what an allocation of `bytes` bytes adds to the heap, as a limit counts it.
    fn price_of(&self, bytes: u64) -> u64 {
        let page_size = self.objects.pages.page_size();
        (bytes / page_size as u64 + 1).saturating_mul(page_price(page_size))
    }

    /// Requests a look for an allocation of `bytes` bytes that found no memory below a limit that
    /// follows the container. Returns whether the limit is higher now.
    pub(crate) fn look_for_room(&self, mm: &Mm<P>, bytes: u64) -> bool {
        if self.settings.follows().is_none() {
            return false;
        }
        let (platform, before) = (&self.objects.platform, self.settings.limit());
        let need = self.price_of(bytes);
        if platform.may_fence() || !self.background.has_thread() {
            self.follow(mm, platform.now(), need);
        } else {
            // The smallest of several needs, since the room may suffice for that alone.
            let smallest = |wanted: u64| Some(if wanted == 0 { need } else { wanted.min(need) });
            let _ = self.following.wanted.try_update(Ordering::Relaxed, Ordering::Relaxed, smallest);
            self.objects.helper.ask(if self.settings.refuses() { REFUSAL_LOOK_WAIT_NS } else { LOOK_WAIT_NS });
        }
        let limit = self.settings.limit();
        limit == 0 || limit > before
    }

    /// Raises a limit that follows the container, for an allocation of `bytes` bytes that found no
    /// memory after neap has emptied all caches. Does nothing if `refuse` is on.
    ///
    /// Other threads may use the new room before this allocation does, so there are several tries:
    ///
    /// | thread A, here | thread B |
    /// |---|---|
    /// | 1. raises the limit | |
    /// | | 2. makes a look, which sets the limit as before, or allocates all of the room |
    /// | 3. finds no memory | |
    pub(crate) fn pass_limit<T>(&self, mm: &Mm<P>, bytes: u64, attempt: &dyn Fn() -> Option<T>) -> Option<T> {
        if self.settings.follows().is_none() || self.settings.refuses() {
            return None;
        }
        let (first, needed) = (self.settings.limit(), self.price_of(bytes));
        for _ in 0..PASSES_MAX {
            let before = self.settings.limit();
            self.put_in_force(mm, self.counted().max(before).saturating_add(needed + BEYOND));
            let memory = attempt();
            if memory.is_some() {
                self.following.passed.fetch_add(1, Ordering::Relaxed);
                return memory;
            }
        }
        // The system has no memory, so this restores the first limit.
        self.put_in_force(mm, first);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::limit::{Following, TICKING};
    use crate::mm::Hooks;
    use crate::options::settings::Setting;
    use crate::options::{AUTO, Options};
    use core::cell::{Cell, RefCell};
    use core::sync::atomic::AtomicU64;
    use neap_base::platform::LimitedBy;
    use neap_testing::virtual_platform::{Call, Virtual};
    use std::boxed::Box;
    use std::sync::Arc;
    use std::vec::Vec;

    const MIB: u64 = 1 << 20;

    /// Without a fall, beside the container's own margin.
    fn limit_of(own: u64, room: &Room, percent: u8) -> u64 {
        let [reserve, least_reserve] = [room.limit, room.smallest].map(margin);
        limit_for(own, room, Terms { percent, reserve, least_reserve, ..TERMS })
    }

    const TERMS: Terms = Terms {
        percent: 100,
        reserve: 64 * MIB,
        least_reserve: 64 * MIB,
        fall: 0,
        before: 0,
        kept: 0,
        untouched: 0,
        need: 0,
    };

    fn room(limit: u64, used: u64) -> Room {
        Room { owner: LimitedBy::Group, limit, used, smallest: limit }
    }

    #[test]
    fn a_process_takes_and_gives_its_share() {
        let limit = |own, (limit, used), percent| limit_of(own * MIB, &room(limit * MIB, used * MIB), percent) >> 20;
        // The margin is 64 MiB.
        assert_eq!(limit(500, (1064, 500), 100), 1000, "alone");
        assert_eq!(limit(250, (1064, 500), 100), 500, "half of the use, half of the spare");
        assert_eq!(limit(0, (1064, 200), 100), 50, "a sixteenth of the spare, of 800");
        assert_eq!(limit(800, (664, 800), 100), 608, "alone, with 192 too much");
        assert_eq!(limit(400, (664, 800), 100), 352, "half of it, in two looks");
        assert_eq!(limit(1005, (1064, 1005), 100), 1005, "an eighth of the margin may be used");
        assert_eq!(
            limit(9000, (1064, 100), 100),
            1008,
            "the heap counts untouched memory, the container does not: seven eighths of the margin stay"
        );
        let needs = |own, used, untouched: u64, need: u64| {
            let terms = Terms { untouched: untouched * MIB, need: need * MIB, ..TERMS };
            limit_for(own * MIB, &room(1064 * MIB, used * MIB), terms) >> 20
        };
        assert_eq!([needs(2, 302, 0, 200), needs(2, 302, 0, 698)], [202, 700], "beside others");
        assert_eq!([needs(2, 302, 0, 699), needs(0, 0, 0, 400)], [45, 400], "more than there is; a first block");
        assert_eq!([needs(500, 300, 200, 0), needs(500, 300, 200, 600)], [1000, 1000], "alone, untouched is not spare");
        assert_eq!([needs(250, 600, 100, 0), needs(250, 600, 100, 301)], [375, 375], "beside others");
        assert_eq!(limit(500, (1064, 500), 75), 797, "three quarters of the container");
        let with = |own, used, reserve: u64, fall: u64| {
            let terms = Terms { reserve: reserve * MIB, least_reserve: reserve * MIB, fall: fall * MIB, ..TERMS };
            limit_for(own * MIB, &room(1064 * MIB, used * MIB), terms) >> 20
        };
        let falling = |own, used, fall| with(own, used, 64, fall);
        assert_eq!([32, 264].map(|reserve| with(500, 500, reserve, 0)), [1032, 800], "another reserve");
        assert_eq!(falling(500, 500, 100), 900, "growth ends before the fall does");
        assert_eq!(falling(1000, 1000, 38), 970, "given back before the margin is used");
        assert_eq!(falling(1000, 1000, 8), 1000, "an eighth of the margin may be used");
        assert_eq!(falling(500, 1000, 38), 485, "the whole share of 30, for growth");
        assert_eq!(falling(500, 1000, 16), 498, "half of the share, for a cut");
        assert_eq!(falling(500, 1020, 20), 487, "half of the share of 12, the whole share of 20");
        // Reclaim has taken the heap to the high watermark, 4 MiB below its limit, or further.
        let below_with = |own, before: u64, used, fall: u64| {
            let terms = Terms { before: before * MIB, kept: 4 * MIB, fall: fall * MIB, ..TERMS };
            limit_for(own * MIB, &room(1064 * MIB, used * MIB), terms) >> 20
        };
        let below = |own, before, used| below_with(own, before, used, 0);
        assert_eq!([38, 16].map(|fall| below_with(500, 550, 1000, fall)), [485, 548], "further, for growth and a cut");
        assert_eq!([below(396, 400, 1108), below(380, 400, 1108)], [382, 382], "from the limit that it had");
        assert_eq!(below(340, 400, 1108), 324, "from its own size");
        assert_eq!([below(996, 1000, 1108), below(980, 1000, 1108)], [910, 891], "alone, further below is further");
        assert_eq!([below(396, 400, 1000), below(380, 400, 1000)], [400, 380], "without spare room");
        // The machine leaves less room than the container, whose limit is smaller.
        let machine = Room { owner: LimitedBy::Machine, limit: 65_536 * MIB, used: 65_000 * MIB, smallest: 1024 * MIB };
        let terms = Terms { reserve: 6553 * MIB, least_reserve: 102 * MIB, ..TERMS };
        assert_eq!(limit_for(300 * MIB, &machine, terms) >> 20, 288, "a part of what is missing");
        let terms = Terms { before: 500 * MIB, kept: 4 * MIB, need: 100 * MIB, ..TERMS };
        assert_eq!(limit_for(498 * MIB, &room(1064 * MIB, 998 * MIB), terms) >> 20, 500, "too much is asked for");
        assert_eq!(limit_of(5, &room(10, 1000), 100), 1, "0 would be no limit");
        assert_eq!(limit_of(0, &room(0, 0), 1), 1);
    }

    /// Workers in one container whose limit is halved: each gives up to its limit, in turn.
    #[test]
    fn workers_give_by_their_sizes() {
        let before = [400_u64, 300, 200, 100];
        let mut sizes = before;
        for _ in 0..40 {
            for worker in 0..sizes.len() {
                let used = sizes.iter().sum::<u64>();
                sizes[worker] =
                    sizes[worker].min(limit_of(sizes[worker] * MIB, &room(500 * MIB, used * MIB), 100) >> 20);
            }
        }
        let used = sizes.iter().sum::<u64>();
        assert!((430..=457).contains(&used), "{used} MiB: 450, and an eighth of the margin of 50");
        for (size, before) in sizes.iter().zip(before) {
            let fair = before * used / 1000;
            assert!(size.abs_diff(fair) * 5 <= fair, "{size} of {before}, fair are {fair}");
        }
    }

    /// A manager in a container, whose limit and other memory a test sets.
    struct Contained {
        mm: Box<Mm<Virtual>>,
        limit: Arc<AtomicU64>,
        others: Arc<AtomicU64>,
    }

    fn contained(limit: u64) -> Contained {
        with_options(limit, &Options { stat: false, limit: AUTO, ..Options::DEFAULT })
    }

    /// As [`contained`], with the option `refuse`.
    fn refusing(limit: u64) -> Contained {
        with_options(limit, &Options { stat: false, limit: AUTO, refuse: true, ..Options::DEFAULT })
    }

    fn with_options(limit: u64, options: &Options) -> Contained {
        let mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(Virtual::new(4096, 1), options) }.unwrap();
        let (limit, others) = (Arc::new(AtomicU64::new(limit)), Arc::new(AtomicU64::new(0)));
        let (its, theirs, heap) = (limit.clone(), others.clone(), (&raw const *mm).expose_provenance());
        mm.core().unwrap().objects.platform.set_room(move || {
            // SAFETY: the manager stays in its box until `close`, and its platform goes with it.
            let mm = unsafe { &*core::ptr::with_exposed_provenance::<Mm<Virtual>>(heap) };
            room(its.load(Ordering::Relaxed), theirs.load(Ordering::Relaxed) + mm.core().unwrap().counted())
        });
        Contained { mm, limit, others }
    }

    impl Contained {
        fn core(&self) -> &Core<Virtual> {
            self.mm.core().unwrap()
        }

        /// Allocates blocks of 256 KiB until one fails, or as many as `most`.
        fn fill(&self, most: usize) -> Vec<*mut u8> {
            (0..most).map(|_| self.mm.allocate(256 << 10)).take_while(|block| !block.is_null()).collect()
        }

        fn free(&self, blocks: impl IntoIterator<Item = *mut u8>) {
            // SAFETY: allocated by `fill`, and not used after this.
            blocks.into_iter().for_each(|block| unsafe { self.mm.free(block) });
        }

        fn looks(&self) -> usize {
            self.core().objects.platform.made(Call::Room)
        }

        fn passed(&self) -> u64 {
            self.core().following.passed.load(Ordering::Relaxed)
        }

        fn close(mut self) {
            assert_eq!(self.mm.verify(0).map(|_| ()), Ok(()));
            // SAFETY: no thread uses the manager any more.
            unsafe { self.mm.close() };
        }
    }

    #[test]
    fn allocations_fail_at_margin_and_resume_at_raised_limit() {
        let it = refusing(200 * MIB);
        it.others.store(60 * MIB, Ordering::Relaxed);
        // The margin is 20 MiB.
        let first = it.fill(1000);
        let counted = it.core().counted();
        assert!((100 * MIB..=120 * MIB).contains(&counted), "{counted} bytes of 120 MiB");
        assert!(it.looks() < 40, "{} looks", it.looks());
        let counts = [&it.core().following.looks, &it.core().following.looks_for_allocations];
        let [looks, for_allocations] = counts.map(|count| count.load(Ordering::Relaxed));
        assert!(looks == it.looks() as u64 && (1..=looks).contains(&for_allocations), "{for_allocations} of {looks}");
        it.core().look_at_container(&it.mm, it.core().objects.platform.precise(), 0);
        assert_eq!(counts.map(|count| count.load(Ordering::Relaxed)), [looks + 1, for_allocations], "not by the clock");
        it.limit.store(400 * MIB, Ordering::Relaxed);
        let more = it.fill(2000);
        let counted = it.core().counted();
        assert!((270 * MIB..=300 * MIB).contains(&counted), "{counted} bytes of 300 MiB");
        assert_eq!(it.passed(), 0);
        it.free(first.into_iter().chain(more));
        it.close();
    }

    #[test]
    fn block_beyond_the_share_is_granted_from_spare_room() {
        let it = refusing(1000 * MIB);
        it.others.store(300 * MIB, Ordering::Relaxed);
        let few = it.fill(8);
        let large = it.mm.allocate(500 << 20);
        assert!(!large.is_null(), "500 of 634 MiB");
        assert!(it.mm.allocate(200 << 20).is_null(), "200 of 134 MiB");
        it.free(few.into_iter().chain([large]));
        let whole = it.mm.allocate(600 << 20);
        assert!(!whole.is_null());
        it.free([whole]);
        it.close();
    }

    #[test]
    fn untouched_memory_is_not_spare_with_refuse() {
        for refuse in [true, false] {
            let it = if refuse { refusing(400 * MIB) } else { contained(400 * MIB) };
            let platform = &it.core().objects.platform;
            // The heap is not touched, and another process uses 60 MiB.
            platform.set_room(|| room(400 * MIB, 60 * MIB));
            platform.set_resident(0);
            let blocks = it.fill(1600);
            let counted = it.core().counted();
            match refuse {
                true => assert!((290 * MIB..=305 * MIB).contains(&counted), "{counted} bytes of 300 MiB"),
                false => assert_eq!(blocks.len(), 1600),
            }
            it.free(blocks);
            it.close();
        }
    }

    #[test]
    fn a_small_container_is_looked_at_before_it_is_full() {
        let it = refusing(40 * MIB);
        let blocks = it.fill(1000);
        let counted = it.core().counted();
        assert!((30 * MIB..=36 * MIB).contains(&counted), "{counted} bytes of 36 MiB");
        it.free(blocks);
        it.close();
    }

    #[test]
    fn limit_without_refuse_is_passed_in_small_steps() {
        let it = contained(100 * MIB);
        let blocks = it.fill(1200);
        assert_eq!(blocks.len(), 1200, "300 MiB");
        let most = 300 / 8 + 2;
        assert!((10..=most).contains(&it.passed()), "passed {} times", it.passed());
        let huge = it.mm.allocate(1 << 30);
        assert!(!huge.is_null());
        it.free(blocks.into_iter().chain([huge]));
        it.close();
    }

    /// Between the raise of the limit and the allocation, neap's thread looks, and other threads
    /// take what there is.
    #[test]
    fn pass_limit_retries_after_other_threads_take_the_room() {
        let it = contained(100 * MIB);
        let (blocks, tries) = (RefCell::new(it.fill(480)), Cell::new(0));
        let attempt = || {
            tries.set(tries.get() + 1);
            match tries.get() {
                1 => {
                    it.core().objects.platform.advance(TICKING);
                    it.core().follow(&it.mm, it.core().objects.platform.now(), 0);
                }
                2 => {
                    while it.core().counted() + MIB / 4 <= it.core().settings.limit() {
                        blocks.borrow_mut().extend(it.fill(1));
                    }
                }
                _ => {}
            }
            let inside = it.mm.gate.enter(it.core().objects.platform.cpu());
            it.core().allocate_run(&inside, 32 << 20, 1).inspect(|_| it.core().count_run(32 << 20, 0))
        };
        let block = it.core().pass_limit(&it.mm, 32 * MIB, &attempt).expect("refused without `refuse`").memory;
        assert_eq!(tries.get(), 3);
        it.free(blocks.into_inner().into_iter().chain([block]));
        it.close();
    }

    #[test]
    fn a_cut_takes_free_memory_at_the_next_tick() {
        let it = contained(400 * MIB);
        assert!(it.mm.keep_free(u64::MAX), "the program keeps its free memory");
        let mut blocks = it.fill(1000);
        it.free(blocks.split_off(200));
        let looks = it.looks();
        it.mm.tick(1 << 30);
        let kept = it.core().counted();
        it.limit.store(80 * MIB, Ordering::Relaxed);
        it.core().objects.platform.advance(TICKING - 1);
        it.mm.tick(2 << 30);
        assert_eq!((it.looks(), it.core().counted()), (looks, kept), "too early");
        it.core().objects.platform.advance(2);
        it.mm.tick(3 << 30);
        let counted = it.core().counted();
        assert!(counted <= 72 * MIB, "{counted} bytes, {kept} before");
        it.free(blocks);
        it.close();
    }

    /// A neighbour grows by 230 MiB beside a heap of 362 MiB, in a container of 512 MiB. The first
    /// look after its start comes after 50 to 100 ms, the others follow every 50 ms.
    #[test]
    fn heap_gives_way_before_a_growing_neighbour_is_at_the_wall() {
        const TICK: u64 = 50;
        for (rate, start) in [10, 25, 50].into_iter().flat_map(|rate| [0, 20, 40].map(|start| (rate, start))) {
            let (following, mut own, mut before) = (Following::new(), 362 * MIB, 400 * MIB);
            for at in (TICK..3000).step_by(TICK as usize) {
                let others = (at.saturating_sub(100 + start) * rate / TICK).min(230) * MIB;
                let used = own + others;
                assert!(used < 512 * MIB, "{} MiB at {at} ms, {rate} MiB a look", used / MIB);
                let room = room(512 * MIB, used);
                let fall = following.expected_fall(at * 1_000_000, own, &room).unwrap();
                let [reserve, least_reserve] = [margin(room.limit); 2];
                let terms = Terms { percent: 100, reserve, least_reserve, fall, before, ..TERMS };
                before = limit_for(own, &room, terms);
                own = own.min(before);
            }
            // The neighbour and the margin leave 231 MiB, and an eighth of the margin may be used.
            let left = own / MIB;
            assert!((221 - rate..=238).contains(&left), "{left} MiB are left at {rate}");
        }
    }

    #[test]
    fn memory_that_the_heap_touches_is_no_growth_of_others() {
        for (touches, is_hurrying) in [(true, false), (false, true)] {
            let it = contained(400 * MIB);
            let platform = &it.core().objects.platform;
            let look = |used: u64, resident: u64| {
                platform.set_room(move || room(400 * MIB, used * MIB));
                platform.set_resident(resident * MIB);
                platform.advance(TICKING);
                it.core().look_at_container(&it.mm, platform.precise(), 0);
            };
            look(60, 0);
            let blocks = it.fill(800);
            look(60, 0);
            look(160, if touches { 100 } else { 0 });
            assert_eq!(it.core().following.is_hurrying(), is_hurrying, "touched: {touches}");
            it.free(blocks);
            it.close();
        }
    }

    #[test]
    fn where_no_limit_is_visible_there_is_none() {
        let it = refusing(80 * MIB);
        it.core().objects.platform.fail(Call::Room, 0, usize::MAX);
        let blocks = it.fill(800);
        assert_eq!(blocks.len(), 800, "200 MiB");
        assert_eq!((it.core().settings.limit(), it.passed()), (0, 0));
        it.free(blocks);
        it.close();
    }

    #[test]
    fn the_rule_changes_while_the_process_runs() {
        let it = refusing(400 * MIB);
        let few = it.fill(4);
        let limits = ["50%", "64m", "auto", "none"].map(|value| {
            it.mm.set(Setting::Limit.key(), value).unwrap();
            it.core().settings.limit() >> 20
        });
        let near = |at: usize, least, most| (least..=most).contains(&limits[at]);
        assert!(near(0, 199, 200) && near(1, 64, 64) && near(2, 359, 360) && near(3, 0, 0), "{limits:?}");
        let blocks = it.fill(2000);
        assert_eq!(blocks.len(), 2000, "none is none");
        it.free(blocks.into_iter().chain(few));
        it.close();
    }
}
