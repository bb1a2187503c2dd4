//! Requests: what another process asks of this one, by way of its page of numbers.
//!
//! Sits between `neap drain`, `neap shrink`, `neap stat --percpu`, `--groups`, `--shrinkers` and
//! `--reconcile`, and `neap top`, which write a request into the page and wake whoever sleeps on
//! it, and the maintenance thread (or, where there is none, a call that goes the slow way), which
//! does what is asked and writes the answer. Nobody is signalled, or stopped but for the
//! milliseconds of a small process's [books](crate::reconcile) where there are groups. The page can
//! be written by the process's user and by root at any time, with anything: every word is read
//! once, a request is checked like any other argument, what is asked for is harmless at any moment,
//! nothing is kept in the page that this process relies on, and requests are taken up at most a
//! thousand times a second.
//!
//! A request: the asker writes what is wanted ([`DRAIN`], [`CHUNKS`], [`GROUPS`], [`BOUND`],
//! [`SHRINKERS`], [`SHRINK`] or [`MAP`]) and then a ticket that is not the one there. The answer:
//! this process writes what came of it and then the same ticket. Askers exclude each other by a
//! lock on the file. A ticket that is put back to the last one answered takes a request back.

use crate::drain::{Drained, NoSuch, RETRIES, Scope};
use crate::mm::{Core, Mm};
use crate::options::Background;
use crate::reconcile::Books;
use crate::{chunk_report, group_report, map_report, shrinker_report};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use neap_base::Platform;
use neap_groups::{Bound, GroupId};
use neap_os::clock;
use neap_os::futex::{self, Scope as Reach};
use neap_os::stack;
use neap_reclaim::ShrinkerId;

/// From one look at the page to the next at least, in nanoseconds, whatever is written there.
const PAUSE: u64 = 1_000_000;

/// Wanted: that caches go to the free pages, as far as the next words say.
const DRAIN: u32 = 0;
/// Wanted: a report on the chunks of per-CPU data ([`chunk_report`]) from that of the number in
/// `from` on.
const CHUNKS: u32 = 1;
/// Wanted: a report on memory groups ([`group_report`]) from the slot in `from` on.
const GROUPS: u32 = 2;
/// Wanted: that a bound of a group changes. The group's id is in `group`, the number of the bound
/// in `from`, the bytes in `until`.
const BOUND: u32 = 3;
/// Wanted: a report on shrinkers ([`shrinker_report`]) from the index in `from` on.
const SHRINKERS: u32 = 4;
/// Wanted: that a shrinker looks at so many objects as are in `until`, or, with all bits set there,
/// how many it has. Its index is in `from` and the rest of its id in `cpu`; of the group in
/// `group`, on the node in `node`.
const SHRINK: u32 = 5;
/// Wanted: what neap has mapped, what its pages are and what it believes ([`map_report`]), from the
/// piece in `from` on.
const MAP: u32 = 7;
/// Refusals: what is wanted is not known here; the numbers are being written at this moment, or a
/// program's call cannot do what is wanted.
const UNKNOWN: u32 = 4;
const BUSY: u32 = 5;
const NO_SUCH_GROUP: u32 = 6;
const NO_ANSWER: u32 = 7;
const NO_RECLAIMER: u32 = 8;

/// The part of the page that is for requests. Numbers with all bits set say nothing.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Desk {
    ticket: AtomicU32,
    cpu: AtomicU32,
    node: AtomicU32,
    zone: AtomicU32,
    /// Bytes.
    until: AtomicU64,
    answered: AtomicU32,
    /// 0, or 1, 2 and 3 for a CPU, a node and a zone that is not there, or one of those above.
    refusal: AtomicU32,
    cpus: AtomicU32,
    skipped: AtomicU32,
    retried: AtomicU32,
    page_size: AtomicU32,
    pages: AtomicU64,
    objects: AtomicU64,
    free: AtomicU64,
    what: AtomicU32,
    from: AtomicU32,
    group: AtomicU64,
}

impl Desk {
    #[inline]
    pub(crate) fn ticket(&self) -> u32 {
        // Acquire pairs with the asker's last store: who sees the ticket sees what is wanted.
        self.ticket.load(Ordering::Acquire)
    }

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

    fn answer(&self, ticket: u32, refusal: u32) {
        self.refusal.store(refusal, Ordering::Relaxed);
        // Release pairs with the asker's look at it: who sees the ticket sees the answer.
        self.answered.store(ticket, Ordering::Release);
    }
}

/// Changes a bound of a group; why not, if not.
fn change_bound<P: Platform>(mm: &Mm<P>, desk: &Desk, is_call: bool) -> u32 {
    let bound = Bound::ALL.get(desk.from.load(Ordering::Relaxed) as usize);
    let group = GroupId::from_bits(desk.group.load(Ordering::Relaxed));
    let bytes = desk.until.load(Ordering::Relaxed);
    let Some(&bound) = bound else { return UNKNOWN };
    let grouped = mm.groups_if_made().map(|grouped| if is_call { grouped.quietly() } else { grouped });
    let changed = grouped.and_then(|grouped| grouped.set_bound(group, bound, bytes).ok());
    if changed.is_some() { 0 } else { NO_SUCH_GROUP }
}

impl<P: Platform> Core<P> {
    /// Does what another process asks for, if any does; answers whether one did. Not inside the
    /// gate. What is held by somebody is tried again, but never from within a program's call, which
    /// is not to wait.
    pub(crate) fn answer(&self, mm: &Mm<P>, is_call: bool) -> bool {
        let Some(desk) = self.page.desk() else { return false };
        let ticket = desk.ticket();
        let taken = self.page.taken.load(Ordering::Relaxed);
        // Relaxed: only one thread has to be the one that takes it.
        if ticket == taken
            || self.page.taken.compare_exchange(taken, ticket, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return false;
        }
        // Reports are large, and the stack of a program's call may be small.
        if !is_call {
            self.respond(mm, desk, ticket, false);
        } else if stack::apart(|| self.respond(mm, desk, ticket, true)).is_none() {
            desk.answer(ticket, BUSY);
        }
        true
    }

    /// Does it, and says so.
    fn respond(&self, mm: &Mm<P>, desk: &Desk, ticket: u32, is_call: bool) {
        match desk.what.load(Ordering::Relaxed) {
            DRAIN => {
                let page_size = self.objects.pages.page_size() as u64;
                let retries = if is_call { 0 } else { RETRIES };
                desk.answer_drain(ticket, mm.drain_with(&desk.scope(page_size), retries), page_size);
            }
            CHUNKS => desk.answer(ticket, if self.report_chunks(mm, desk) { 0 } else { BUSY }),
            GROUPS => desk.answer(ticket, if self.report_groups(mm, desk) { 0 } else { BUSY }),
            MAP => desk.answer(ticket, if self.report_map(mm, desk, is_call) { 0 } else { BUSY }),
            BOUND => desk.answer(ticket, change_bound(mm, desk, is_call)),
            SHRINKERS => desk.answer(ticket, if self.report_shrinkers(mm, desk) { 0 } else { BUSY }),
            // Who asks waits for a reclaimer, and may make one.
            SHRINK if is_call && self.options.background != Background::Never => desk.answer(ticket, BUSY),
            SHRINK => desk.answer(ticket, self.shrink(mm, desk)),
            _ => desk.answer(ticket, UNKNOWN),
        }
    }

    fn report_chunks(&self, mm: &Mm<P>, desk: &Desk) -> bool {
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        let from = desk.from.load(Ordering::Relaxed);
        self.page.report(|words| chunk_report::write(self.per_cpu.get(), from, words)).is_some()
    }

    fn report_groups(&self, mm: &Mm<P>, desk: &Desk) -> bool {
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        let from = desk.from.load(Ordering::Relaxed);
        self.page.report(|words| group_report::write(mm.groups_if_made(), from, words)).is_some()
    }

    fn report_map(&self, mm: &Mm<P>, desk: &Desk, is_call: bool) -> bool {
        // Perhaps by this very thread, in a handler of the program's between neap's and the fork:
        // it would wait for itself.
        if mm.gate.is_closed() {
            return false;
        }
        let from = desk.from.load(Ordering::Relaxed);
        let books = if from == 0 { mm.books_for_others(is_call) } else { Books::BLANK };
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        self.page.report(|words| map_report::write(mm, books, from, words)).is_some()
    }

    fn report_shrinkers(&self, mm: &Mm<P>, desk: &Desk) -> bool {
        let [from, skip] = [&desk.from, &desk.cpu].map(|word| word.load(Ordering::Relaxed));
        let skip = if skip == u32::MAX { 0 } else { skip };
        // Neap's own are there from the first look on.
        let gathered = shrinker_report::gather(mm.reclaiming().ok(), from, skip);
        let _inside = mm.gate.enter(self.objects.platform.cpu());
        let write = |words: &[AtomicU64]| {
            words.iter().zip(gathered).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        };
        self.page.report(write).is_some()
    }

    /// A program's callbacks run on a reclaimer, never here: a thread of the program's that comes
    /// by in a call may hold what they take. neap's own run here.
    fn shrink(&self, mm: &Mm<P>, desk: &Desk) -> u32 {
        let [index, rest, node] = [&desk.from, &desk.cpu, &desk.node].map(|word| word.load(Ordering::Relaxed));
        let id = ShrinkerId::from_bits(u64::from(rest) << 32 | u64::from(index));
        let group = GroupId::from_bits(desk.group.load(Ordering::Relaxed));
        let objects = Some(desk.until.load(Ordering::Relaxed)).filter(|objects| *objects != u64::MAX);
        let Ok(reclaiming) = mm.reclaiming() else { return NO_ANSWER };
        match self.ask_shrinker(mm, &reclaiming, id, (group, node), objects) {
            Some(objects) => {
                desk.objects.store(objects, Ordering::Relaxed);
                0
            }
            None if self.may_have_reclaimers(mm) => NO_ANSWER,
            None => NO_RECLAIMER,
        }
    }

    /// The same from within a program's call: not on an isolated CPU, and not sooner than [`PAUSE`]
    /// after the last time.
    #[cold]
    pub(crate) fn answer_in_call(&self, mm: &Mm<P>) {
        let (platform, now) = (&self.objects.platform, clock::precise());
        let last = self.page.answered.load(Ordering::Relaxed);
        if !platform.is_isolated(platform.cpu()) && now.wrapping_sub(last) >= PAUSE {
            // Relaxed: two threads that find it late both look, and one of them takes the request.
            self.page.answered.store(now, Ordering::Relaxed);
            self.answer(mm, true);
        }
    }

    /// Naps for so many nanoseconds, and helps and answers meanwhile; less if a call wants this
    /// thread to come soon. Returns `false` where the thread is to end.
    pub(crate) fn nap(&self, mm: &Mm<P>, nanoseconds: u64) -> bool {
        let end = clock::precise() + nanoseconds;
        loop {
            let rung = self.objects.helper.rung();
            self.help(mm);
            let answered = self.answer(mm, false);
            let left = end.saturating_sub(clock::precise());
            if self.background.is_ending() || self.background.is_wanted_soon() || left == 0 {
                return !self.background.is_ending();
            }
            self.sleep(rung, Some(if answered { left.min(PAUSE) } else { left }), !answered);
        }
    }

    /// Sleeps until a call wakes the thread or a request has been answered, and helps meanwhile.
    pub(crate) fn sleep_until_woken(&self, mm: &Mm<P>) {
        loop {
            let rung = self.objects.helper.rung();
            self.help(mm);
            if !self.background.is_asleep() || self.background.is_ending() || self.answer(mm, false) {
                return;
            }
            self.sleep(rung, None, true);
        }
    }

    /// Sleeps until the bell has rung more often than so, or, with `requests`, another process
    /// writes one. Where the kernel cannot wait for both, requests wait for another reason to look
    /// up.
    fn sleep(&self, rung: u32, nanoseconds: Option<u64>, requests: bool) {
        let bell = (self.objects.helper.bell(), rung);
        let taken = self.page.taken.load(Ordering::Relaxed);
        match self.page.desk().filter(|_| requests) {
            Some(desk) if futex::wait_either(bell, (&desk.ticket, taken), nanoseconds) => {}
            _ => futex::wait(bell.0, bell.1, nanoseconds, Reach::Process),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use core::mem::offset_of;
    use neap_base::virtual_platform::Virtual;
    use neap_os::topology::CpuSet;
    use std::boxed::Box;

    #[test]
    fn a_request_is_read_where_askers_write_it_and_nothing_said_is_everything() {
        let offsets =
            [offset_of!(Desk, ticket), offset_of!(Desk, cpu), offset_of!(Desk, until), offset_of!(Desk, answered)];
        assert_eq!((offsets, size_of::<Desk>()), ([0, 4, 16, 24], 88));
        assert_eq!([offset_of!(Desk, what), offset_of!(Desk, from), offset_of!(Desk, group)], [72, 76, 80]);
        let desk = |cpu: u32, node: u32, zone: u32, until: u64| {
            let mut words = [0_u64; 11];
            words[..3].copy_from_slice(&[u64::from(cpu) << 32, u64::from(zone) << 32 | u64::from(node), until]);
            // SAFETY: a desk is that many words of plain numbers.
            unsafe { core::mem::transmute::<[u64; 11], Desk>(words) }
        };
        assert_eq!(desk(u32::MAX, u32::MAX, u32::MAX, u64::MAX).scope(4096), Scope::ALL);
        let all = Scope { cpu: Some(7), node: Some(1), zone: Some(0), until: Some(3) };
        assert_eq!(desk(7, 1, 0, 8193).scope(4096), all);
        assert_eq!(desk(0, 0, 0, u64::MAX - 1).scope(4096).until, Some(1 << 52));
    }

    #[test]
    fn an_answer_is_whole_before_its_ticket() {
        // SAFETY: zeroes are a desk.
        let desk: Desk = unsafe { core::mem::zeroed() };
        let drained = Drained { pages: 1 << 40, objects: 2, cpus: 3, skipped: 4, retried: 5, free: 6 };
        desk.answer_drain(9, Ok(drained), 65536);
        let words = [&desk.answered, &desk.refusal, &desk.cpus, &desk.skipped, &desk.retried, &desk.page_size];
        assert_eq!(words.map(|word| word.load(Ordering::Relaxed)), [9, 0, 3, 4, 5, 65536]);
        let numbers = [&desk.pages, &desk.objects, &desk.free].map(|number| number.load(Ordering::Relaxed));
        assert_eq!(numbers, [1 << 40, 2, 6]);
        for (refusal, error) in [(1, NoSuch::Cpu(8)), (2, NoSuch::Node(8)), (3, NoSuch::Zone(8))] {
            desk.answer_drain(10, Err(error), 4096);
            let words = [&desk.answered, &desk.refusal, &desk.cpus].map(|word| word.load(Ordering::Relaxed));
            assert_eq!(words, [10, refusal, 0]);
        }
    }

    /// What others want done is no work for a CPU that is isolated.
    #[test]
    fn a_call_on_an_isolated_cpu_answers_nobody() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let machine = Virtual::new(4096, 2).with_isolated(CpuSet::parse(b"1").unwrap());
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(machine, &Options::DEFAULT) }.unwrap();
        let core = mm.core_if_open().unwrap();
        core.page.make(4096);
        let desk = core.page.desk().expect("a page of this process");
        let ask = |ticket| {
            [&desk.cpu, &desk.node, &desk.zone].iter().for_each(|word| word.store(u32::MAX, Ordering::Relaxed));
            desk.until.store(u64::MAX, Ordering::Relaxed);
            desk.ticket.store(ticket, Ordering::Release); // As an asker's.
        };
        let answered_by_a_call_on = |cpu| {
            Virtual::run_on(cpu);
            let run = mm.allocate(1 << 20);
            // SAFETY: allocated above.
            unsafe { mm.free(run) };
            desk.answered.load(Ordering::Relaxed)
        };
        for ticket in 1..4 {
            ask(ticket);
            (0..200).for_each(|_| assert_eq!(answered_by_a_call_on(1), ticket - 1));
            // So long after the last answer that another one may be given.
            std::thread::sleep(core::time::Duration::from_nanos(PAUSE));
            assert_eq!((answered_by_a_call_on(0), desk.cpus.load(Ordering::Relaxed)), (ticket, 2));
        }
        // SAFETY: nothing of it is used any more.
        unsafe { mm.close() };
    }

    /// Another process wants a shrinker to scan, and the call that finds it may be a free under a
    /// lock of the C library's, or a callback: it neither waits nor makes a thread.
    #[test]
    fn a_call_asks_no_shrinker() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: Some(|_, _| Ok(1)), ticked: None }));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(Virtual::new(4096, 1), &Options::DEFAULT) }.unwrap();
        let reclaiming = mm.reclaiming().unwrap();
        let core = mm.core_if_open().unwrap();
        core.page.make(4096);
        let desk = core.page.desk().expect("a page of this process");
        desk.what.store(SHRINK, Ordering::Relaxed);
        desk.ticket.store(1, Ordering::Release); // As an asker's.
        assert!(core.answer(&mm, true));
        assert_eq!([&desk.answered, &desk.refusal].map(|word| word.load(Ordering::Relaxed)), [1, BUSY]);
        assert_eq!(reclaiming.threads(), (0, 0, 0, 0));
        // SAFETY: nothing of it is used any more.
        unsafe { mm.close() };
    }
}
