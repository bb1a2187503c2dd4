//! Requests of other processes, which they write into the page of numbers.
//!
//! # Design
//! The commands `neap drain`, `neap set`, `neap shrink`, `neap top`, and `neap stat` with
//! `--percpu`, `--groups`, `--shrinkers` or `--reconcile` write a request into the page. They wake
//! neap's thread, which sleeps on the request's ticket. neap's thread executes the request and
//! writes the answer. In a process without neap's thread, a call on the slow path does so.
//!
//! A request sends no signal to a thread. It stops threads in one case. In a small process with
//! groups, they stay out of malloc and free for the milliseconds in which neap makes its
//! [books](crate::reports::reconcile).
//!
//! The process's user and root can write anything to the page at any time. So the process reads
//! every word once, and checks a request like any argument. Every request is harmless at any
//! moment. The process does not rely on the contents of the page. It takes at most a thousand
//! requests a second.
//!
//! # Protocol
//! 1. The asker takes a lock on the file, which excludes other askers.
//! 2. The asker writes the request ([`DRAIN`], [`CHUNKS`], [`GROUPS`], [`BOUND`], [`SHRINKERS`],
//!    [`SHRINK`], [`MAP`] or [`SET`]), and then a ticket that differs from the last one.
//! 3. This process writes the answer, and then the same ticket.
//!
//! To withdraw a request, the asker restores the ticket that was answered last.

use crate::control::channel::ControlChannel;
use crate::limits::limit::{PERIOD, is_news};
use crate::mm::{Core, Mm};
use crate::options::Background;
use crate::options::settings::Setting;
use crate::reports::reconcile::Books;
use crate::reports::{chunk_report, group_report, map_report, shrinker_report};
use crate::returning::drain::{Drained, NoSuch, RETRIES_MAX, Scope};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_base::Platform;
use neap_groups::{Bound, GroupId};
use neap_os::clock;
use neap_os::futex::{self, Sharing};
use neap_os::stack;
use neap_reclaim::ShrinkerId;

pub(crate) mod channel;

/// Least nanoseconds between two checks of the page for a request.
const PAUSE: u64 = 1_000_000;

/// Request to drain caches. The next words give the scope.
const DRAIN: u32 = 0;
/// Request for a report on the chunks of per-CPU data ([`chunk_report`]). `from` is the number of
/// the first chunk.
const CHUNKS: u32 = 1;
/// Request for a report on memory groups ([`group_report`]). `from` is the first slot.
const GROUPS: u32 = 2;
/// Request to set a bound of a group. `group` is the group's id, `from` the number of the bound,
/// and `until` the bytes.
const BOUND: u32 = 3;
/// Request for a report on shrinkers ([`shrinker_report`]). `from` is the index of the first one.
const SHRINKERS: u32 = 4;
/// Request that a shrinker scan `until` objects of the group `group` on the node `node`. If all
/// bits of `until` are set, it counts its objects instead. `from` is the shrinker's index, and
/// `cpu` the rest of its id.
const SHRINK: u32 = 5;
/// Request for a report on neap's mappings, pages and counters ([`map_report`]). `from` is the
/// number of the first piece.
const MAP: u32 = 7;
/// Request to change an option. `from` is the number of the [`Setting`], and `until` its value. The
/// answer has the previous value in `objects`.
const SET: u32 = 8;
/// Numbers of refusals. `UNKNOWN` means that neap does not know the request. `BUSY` means that
/// another thread is writing numbers, or that a call of the program cannot serve the request.
const UNKNOWN: u32 = 4;
const BUSY: u32 = 5;
const NO_SUCH_GROUP: u32 = 6;
const NO_ANSWER: u32 = 7;
const NO_RECLAIMER: u32 = 8;
const NO_SUCH_VALUE: u32 = 9;

impl ControlChannel {
    fn scope(&self, page_size: u64) -> Scope {
        let number = |word: &AtomicU32| Some(word.load(Ordering::Relaxed)).filter(|number| *number != u32::MAX);
        let until = Some(self.until.load(Ordering::Relaxed)).filter(|bytes| *bytes != u64::MAX);
        let until = until.map(|bytes| bytes.div_ceil(page_size));
        Scope { cpu: number(&self.cpu), node: number(&self.node), zone: number(&self.zone), until }
    }

    fn answer_drain(&self, ticket: u32, answer: Result<Drained, NoSuch>, page_size: u64) {
        let refusal = match answer {
            Ok(_) => 0,
            Err(NoSuch::Cpu(_)) => 1,
            Err(NoSuch::Node(_)) => 2,
            Err(NoSuch::Zone(_)) => 3,
        };
        let Drained { pages, objects, cpus, skipped, retried, free } = answer.unwrap_or_default();
        let words = [(&self.cpus, cpus), (&self.skipped, skipped), (&self.retried, retried)];
        words.iter().for_each(|(word, number)| word.store(*number, Ordering::Relaxed));
        self.page_size.store(page_size as u32, Ordering::Relaxed);
        self.pages.store(pages, Ordering::Relaxed);
        self.objects.store(objects, Ordering::Relaxed);
        self.free.store(free, Ordering::Relaxed);
        self.answer(ticket, refusal);
    }
}

/// The kind of thread that serves a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ServedBy {
    OwnThread,
    /// A thread in a call of the program, which must not wait.
    Call,
}

/// Sets a bound of a group. Returns the number of the refusal, or 0.
fn change_bound<P: Platform>(mm: &Mm<P>, channel: &ControlChannel, by: ServedBy) -> u32 {
    let bound = Bound::ALL.get(channel.from.load(Ordering::Relaxed) as usize);
    let group = GroupId::from_bits(channel.group.load(Ordering::Relaxed));
    let bytes = channel.until.load(Ordering::Relaxed);
    let Some(&bound) = bound else { return UNKNOWN };
    let grouped = mm.groups_if_made().map(|grouped| if by == ServedBy::Call { grouped.quietly() } else { grouped });
    let changed = grouped.and_then(|grouped| grouped.set_bound(group, bound, bytes).ok());
    if changed.is_some() { 0 } else { NO_SUCH_GROUP }
}

/// Changes an option. Returns the number of the refusal, or 0.
fn change_setting<P: Platform>(mm: &Mm<P>, channel: &ControlChannel) -> u32 {
    let setting = Setting::ALL.get(channel.from.load(Ordering::Relaxed) as usize);
    let Some(&setting) = setting else { return UNKNOWN };
    match mm.set_number(setting, channel.until.load(Ordering::Relaxed)) {
        Ok(before) => {
            channel.objects.store(before, Ordering::Relaxed);
            0
        }
        Err(_) => NO_SUCH_VALUE,
    }
}

impl<P: Platform> Core<P> {
    /// Takes the request of another process, if there is one.
    fn take_request(&self) -> Option<(&ControlChannel, u32)> {
        let channel = self.page.channel()?;
        let ticket = channel.ticket();
        let taken = self.page.taken.load(Ordering::Relaxed);
        // Relaxed: it only decides which thread takes the request.
        let is_taken = ticket == taken
            || self.page.taken.compare_exchange(taken, ticket, Ordering::Relaxed, Ordering::Relaxed).is_err();
        (!is_taken).then_some((channel, ticket))
    }

    /// Serves a request in neap's thread. Returns whether there was one.
    fn answer(&self, mm: &Mm<P>) -> bool {
        let Some((channel, ticket)) = self.take_request() else { return false };
        self.respond(mm, channel, ticket, ServedBy::OwnThread);
        true
    }

    /// Serves a request in a call of the program. Returns whether there was one. This runs on a
    /// separate stack, since reports are large and the stack of the call may be small.
    fn answer_apart(&self, mm: &Mm<P>) -> bool {
        let Some((channel, ticket)) = self.take_request() else { return false };
        if stack::apart(|| self.respond(mm, channel, ticket, ServedBy::Call)).is_none() {
            channel.answer(ticket, BUSY);
        }
        true
    }

    /// Executes a request and writes the answer.
    fn respond(&self, mm: &Mm<P>, channel: &ControlChannel, ticket: u32, by: ServedBy) {
        match channel.what.load(Ordering::Relaxed) {
            DRAIN => {
                let page_size = self.objects.pages.page_size() as u64;
                let retries = if by == ServedBy::Call { 0 } else { RETRIES_MAX };
                channel.answer_drain(ticket, mm.drain_with(&channel.scope(page_size), retries), page_size);
            }
            CHUNKS => channel.answer(ticket, if self.report_chunks(mm, channel) { 0 } else { BUSY }),
            GROUPS => channel.answer(ticket, if self.report_groups(mm, channel) { 0 } else { BUSY }),
            MAP => channel.answer(ticket, if self.report_map(mm, channel, by) { 0 } else { BUSY }),
            BOUND => channel.answer(ticket, change_bound(mm, channel, by)),
            SET => {
                let refusal = change_setting(mm, channel);
                // Without neap's thread, the next tick may be far away. The asker that reads the
                // answer finds the values in force.
                mm.ticked();
                channel.answer(ticket, refusal);
            }
            SHRINKERS => channel.answer(ticket, if self.report_shrinkers(mm, channel) { 0 } else { BUSY }),
            // `shrink` waits for a reclaimer and may make one, so no call of the program runs it.
            SHRINK if by == ServedBy::Call && self.options.background != Background::Never => {
                channel.answer(ticket, BUSY)
            }
            SHRINK => channel.answer(ticket, self.shrink(mm, channel)),
            _ => channel.answer(ticket, UNKNOWN),
        }
    }

    fn report_chunks(&self, mm: &Mm<P>, channel: &ControlChannel) -> bool {
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        let from = channel.from.load(Ordering::Relaxed);
        self.page.report(|words| chunk_report::write(self.per_cpu.get(), from, words)).is_some()
    }

    fn report_groups(&self, mm: &Mm<P>, channel: &ControlChannel) -> bool {
        let inside = mm.gate.enter(self.objects.platform.cpu());
        let from = channel.from.load(Ordering::Relaxed);
        self.page
            .report(|words| group_report::write(&inside, mm.groups_if_made(), mm.reclaiming_if_made(), from, words))
            .is_some()
    }

    fn report_map(&self, mm: &Mm<P>, channel: &ControlChannel, by: ServedBy) -> bool {
        // A fork handler of the program may run between neap's handler and the fork. This thread
        // has then closed the gate itself, and would wait for itself.
        if mm.gate.is_closed() {
            return false;
        }
        let from = channel.from.load(Ordering::Relaxed);
        let books = match by {
            _ if from > 0 => Books::BLANK,
            ServedBy::OwnThread => mm.books_with_payers(),
            ServedBy::Call => mm.books(),
        };
        let inside = mm.gate.enter(self.objects.platform.cpu());
        self.page.report(|words| map_report::write(mm, &inside, books, from, words)).is_some()
    }

    fn report_shrinkers(&self, mm: &Mm<P>, channel: &ControlChannel) -> bool {
        let [from, skip] = [&channel.from, &channel.cpu].map(|word| word.load(Ordering::Relaxed));
        let skip = if skip == u32::MAX { 0 } else { skip };
        // The first request registers neap's own shrinkers.
        let gathered = shrinker_report::gather(mm.reclaiming().ok(), from, skip);
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        let write = |words: &[AtomicU64]| {
            words.iter().zip(gathered).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        };
        self.page.report(write).is_some()
    }

    /// Makes a shrinker scan or count, and returns the refusal, or 0. Callbacks of the program run
    /// on a reclaimer, never in this thread. This thread may be in a call of the program and hold
    /// locks that the callbacks take. The callbacks of neap's own shrinkers run in this thread.
    fn shrink(&self, mm: &Mm<P>, channel: &ControlChannel) -> u32 {
        let [index, rest, node] = [&channel.from, &channel.cpu, &channel.node].map(|word| word.load(Ordering::Relaxed));
        let id = ShrinkerId::from_bits(u64::from(rest) << 32 | u64::from(index));
        let group = GroupId::from_bits(channel.group.load(Ordering::Relaxed));
        let objects = Some(channel.until.load(Ordering::Relaxed)).filter(|objects| *objects != u64::MAX);
        let Ok(reclaiming) = mm.reclaiming() else { return NO_ANSWER };
        match self.ask_shrinker(mm, &reclaiming, id, (group, node), objects) {
            Some(objects) => {
                channel.objects.store(objects, Ordering::Relaxed);
                0
            }
            None if self.may_have_reclaimers(mm) => NO_ANSWER,
            None => NO_RECLAIMER,
        }
    }

    /// Serves a request in a call of the program. Does nothing on an isolated CPU, or within
    /// [`PAUSE`] of the last call that did this.
    #[cold]
    pub(crate) fn answer_in_call(&self, mm: &Mm<P>) {
        let (platform, now) = (&self.objects.platform, clock::precise());
        let last = self.page.answered.load(Ordering::Relaxed);
        if !platform.is_isolated(platform.cpu()) && now.wrapping_sub(last) >= PAUSE {
            // Relaxed: two threads may both find that the pause is over. Both look for a request,
            // and one takes it.
            self.page.answered.store(now, Ordering::Relaxed);
            self.answer_apart(mm);
        }
    }

    /// Sleeps for `nanoseconds`. Meanwhile serves requests, and drains caches for allocations that
    /// ask the helper. Ends early if a call requests a tick. Returns `false` if the thread has to
    /// end.
    pub(crate) fn nap(&self, mm: &Mm<P>, nanoseconds: u64) -> bool {
        let end = clock::precise() + nanoseconds;
        loop {
            let rung = self.objects.helper.rung();
            self.help(mm);
            let answered = self.answer(mm);
            let left = end.saturating_sub(clock::precise());
            if self.background.is_ending() || self.background.take_tick_request() || left == 0 {
                self.look_after_nap(mm, clock::precise().saturating_sub(end));
                return !self.background.is_ending();
            }
            // After a request, the thread does not look for the next one for [`PAUSE`].
            let (left, channel) = if answered { (left.min(PAUSE), None) } else { (left, self.page.channel()) };
            self.sleep(rung, Some(left), channel);
        }
    }

    /// Sleeps until a call wakes the thread, or the thread has answered a request. Meanwhile drains
    /// caches for allocations that ask the helper. Looks at the container if the limit follows it,
    /// and publishes what has changed much.
    pub(crate) fn sleep_until_woken(&self, mm: &Mm<P>) {
        let seen = || self.following.seen(&mm.gate.enter(self.objects.platform.cpu()));
        let mut published = seen();
        loop {
            let rung = self.objects.helper.rung();
            self.help(mm);
            let next_look = self.follow_if_due(mm, PERIOD);
            let last = seen();
            if is_news(last, published) {
                published = last;
                mm.ticked();
            }
            if !self.background.is_asleep() || self.background.is_ending() || self.answer(mm) {
                return;
            }
            self.sleep(rung, next_look, self.page.channel());
        }
    }

    /// Sleeps until the bell's value is no longer `rung`, another process writes a request to
    /// `channel`, or `nanoseconds` are over. If the kernel cannot wait for both words, the thread
    /// finds a request at its next wake-up.
    fn sleep(&self, rung: u32, nanoseconds: Option<u64>, channel: Option<&ControlChannel>) {
        let bell = (self.objects.helper.bell(), rung);
        let taken = self.page.taken.load(Ordering::Relaxed);
        match channel {
            Some(channel) if futex::wait_either(bell, (&channel.ticket, taken), nanoseconds) => {}
            _ => futex::wait(bell.0, bell.1, nanoseconds, Sharing::Process),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::numbers::live::PageLayout;
    use crate::options::Options;
    use core::mem::offset_of;
    use neap_os::topology::CpuSet;
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;

    #[test]
    fn control_channel_has_fixed_layout_and_unset_scope_is_all() {
        let offsets = [
            offset_of!(ControlChannel, ticket),
            offset_of!(ControlChannel, cpu),
            offset_of!(ControlChannel, until),
            offset_of!(ControlChannel, answered),
        ];
        assert_eq!((offsets, size_of::<ControlChannel>()), ([0, 4, 16, 24], 88));
        assert_eq!(
            [offset_of!(ControlChannel, what), offset_of!(ControlChannel, from), offset_of!(ControlChannel, group)],
            [72, 76, 80]
        );
        let channel = |cpu: u32, node: u32, zone: u32, until: u64| {
            let mut words = [0_u64; 11];
            words[..3].copy_from_slice(&[u64::from(cpu) << 32, u64::from(zone) << 32 | u64::from(node), until]);
            // SAFETY: the control channel consists of integers of this total size, which are valid
            // for any bits.
            unsafe { core::mem::transmute::<[u64; 11], ControlChannel>(words) }
        };
        assert_eq!(channel(u32::MAX, u32::MAX, u32::MAX, u64::MAX).scope(4096), Scope::ALL);
        let all = Scope { cpu: Some(7), node: Some(1), zone: Some(0), until: Some(3) };
        assert_eq!(channel(7, 1, 0, 8193).scope(4096), all);
        assert_eq!(channel(0, 0, 0, u64::MAX - 1).scope(4096).until, Some(1 << 52));
    }

    #[test]
    fn an_answer_is_whole_before_its_ticket() {
        // SAFETY: the control channel consists of integers, for which zeroes are valid.
        let channel: ControlChannel = unsafe { core::mem::zeroed() };
        let drained = Drained { pages: 1 << 40, objects: 2, cpus: 3, skipped: 4, retried: 5, free: 6 };
        channel.answer_drain(9, Ok(drained), 65536);
        let words = [
            &channel.answered,
            &channel.refusal,
            &channel.cpus,
            &channel.skipped,
            &channel.retried,
            &channel.page_size,
        ];
        assert_eq!(words.map(|word| word.load(Ordering::Relaxed)), [9, 0, 3, 4, 5, 65536]);
        let numbers = [&channel.pages, &channel.objects, &channel.free].map(|number| number.load(Ordering::Relaxed));
        assert_eq!(numbers, [1 << 40, 2, 6]);
        for (refusal, error) in [(1, NoSuch::Cpu(8)), (2, NoSuch::Node(8)), (3, NoSuch::Zone(8))] {
            channel.answer_drain(10, Err(error), 4096);
            let words = [&channel.answered, &channel.refusal, &channel.cpus].map(|word| word.load(Ordering::Relaxed));
            assert_eq!(words, [10, refusal, 0]);
        }
    }

    /// An isolated CPU does no work for other processes.
    #[test]
    fn call_on_isolated_cpu_answers_no_control_request() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let machine = Virtual::new(4096, 2).with_isolated(CpuSet::parse(b"1").unwrap());
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(machine, &Options::DEFAULT) }.unwrap();
        let core = mm.core_if_open().unwrap();
        core.page.make(PageLayout { nodes: 1, text: 4096 });
        let channel = core.page.channel().expect("a page of this process");
        let ask = |ticket| {
            [&channel.cpu, &channel.node, &channel.zone]
                .iter()
                .for_each(|word| word.store(u32::MAX, Ordering::Relaxed));
            channel.until.store(u64::MAX, Ordering::Relaxed);
            channel.ticket.store(ticket, Ordering::Release); // As an asker's.
        };
        let answered_by_a_call_on = |cpu| {
            Virtual::run_on(cpu);
            let run = mm.allocate(1 << 20);
            // SAFETY: allocated above.
            unsafe { mm.free(run) };
            channel.answered.load(Ordering::Relaxed)
        };
        for ticket in 1..4 {
            ask(ticket);
            (0..200).for_each(|_| assert_eq!(answered_by_a_call_on(1), ticket - 1));
            // An interval of `PAUSE` after the last answer, so that another one may be given.
            std::thread::sleep(core::time::Duration::from_nanos(PAUSE));
            assert_eq!((answered_by_a_call_on(0), channel.cpus.load(Ordering::Relaxed)), (ticket, 2));
        }
        // SAFETY: no memory of the manager is used any more.
        unsafe { mm.close() };
    }

    /// Another process requests a scan. The call that finds the request may be a free under a lock
    /// of the C library, or a callback. It neither waits nor makes a thread.
    #[test]
    fn a_call_asks_no_shrinker() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: Some(|_, _| Ok(1)), ticked: None }));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(Virtual::new(4096, 1), &Options::DEFAULT) }.unwrap();
        let reclaiming = mm.reclaiming().unwrap();
        let core = mm.core_if_open().unwrap();
        core.page.make(PageLayout { nodes: 1, text: 4096 });
        let channel = core.page.channel().expect("a page of this process");
        channel.what.store(SHRINK, Ordering::Relaxed);
        channel.ticket.store(1, Ordering::Release); // As an asker's.
        assert!(core.answer_apart(&mm));
        assert_eq!([&channel.answered, &channel.refusal].map(|word| word.load(Ordering::Relaxed)), [1, BUSY]);
        let none = crate::state::reclaim::ReclaimerCounts { working: 0, lost: 0, waits: 0, late: 0 };
        assert_eq!(reclaiming.reclaim.reclaimers(&reclaiming.source.enter()), none);
        // SAFETY: no memory of the manager is used any more.
        unsafe { mm.close() };
    }
}
