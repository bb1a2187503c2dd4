//! The page of numbers that `neap stat` reads while the program runs.
//!
//! Sits between [`statistics`](crate::statistics) and another process, which reads a memfd named `neap-stat` through
//! `/proc/PID/fd`, or the mapping of it where the program closed the descriptor. Written after each tick and never in
//! between; holds one mutex that is only ever tried. Nothing is allocated, and where there can be no page there is none:
//! a program runs the same without it.
//!
//! The format, version 5, in the machine's byte order: magic (8 bytes), version, sequence, process id and length (4
//! bytes each), nanoseconds of `CLOCK_MONOTONIC` (8 bytes), what is asked of the process and what it answered
//! ([`requests`](crate::requests)), and then a JSON object of that length; behind 64 KiB, where a report on chunks of per-CPU data,
//! on groups or on the arena is written ([`chunk_report`](crate::chunk_report), [`group_report`](crate::group_report),
//! [`map_report`](crate::map_report)). The sequence is odd
//! while the numbers are written: a reader who finds it even, and the same afterwards, has read one whole object. The
//! process id is the writer's: a forked child has its parent's page until its own first tick.

use crate::map_report;
use crate::mm::{Core, Mm};
use crate::requests::Desk;
use crate::statistics::Usage;
use core::fmt::{self, Display, Write};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use neap_base::Mutex;
use neap_base::platform::{Linux, Platform};
use neap_groups::{Count, Groups};
use neap_objects::size_class::Class;
use neap_objects::slots::Kind;
use neap_os::memfd::Memfd;
use neap_os::{clock, thread};
use neap_pages::Watermarks;

/// What the page starts with.
const MAGIC: u64 = u64::from_ne_bytes(*b"neapstat");
/// Goes up with every change that an older reader would misread.
const VERSION: u32 = 5;
/// Bytes of the file for the numbers, and behind them for reports; only those written to cost memory.
const LENGTH: usize = 64 << 10;
const REPORT: usize = 64 << 10;
/// Kept free while lists are written, for what follows them.
const TAIL: usize = 64;
/// Looks at the numbers until they agree: parts of a busy program are read at slightly different moments.
const LOOKS: u32 = 4;

/// What stands before the text.
#[derive(Debug)]
#[repr(C)]
struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    sequence: AtomicU32,
    pid: AtomicU32,
    length: AtomicU32,
    published: AtomicU64,
    desk: Desk,
}

/// The page of a manager, where it has one.
#[derive(Debug)]
pub(crate) struct StatPage {
    place: Mutex<Place>,
    /// The process that made it.
    owner: AtomicU32,
    /// Where it is, for who does not have the mutex; null where there is none.
    header: AtomicPtr<Header>,
    /// The last request that was taken up. Not in the page, where anybody could change it.
    pub(crate) taken: AtomicU32,
    /// When a call last looked at one.
    pub(crate) answered: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// Not made yet.
    Unmade,
    Made(Memfd),
    /// A limit or a sandbox is in the way; it is not tried again.
    Refused,
}

impl StatPage {
    pub(crate) const fn new() -> StatPage {
        StatPage {
            place: Mutex::new(Place::Unmade),
            owner: AtomicU32::new(0),
            header: AtomicPtr::new(null_mut()),
            taken: AtomicU32::new(0),
            answered: AtomicU64::new(0),
        }
    }

    /// Where other processes leave requests; `None` where this process has no page of its own.
    pub(crate) fn desk(&self) -> Option<&Desk> {
        // Acquire pairs with the Release in `publish`: who sees the owner sees the page that it made.
        if self.owner.load(Ordering::Acquire) != thread::process_id() {
            return None;
        }
        // SAFETY: null, or a page that stays mapped.
        unsafe { self.header.load(Ordering::Relaxed).as_ref() }.map(|header| &header.desk)
    }

    /// The page is somebody else's from now on: in a forked child, where it is the parent's.
    pub(crate) fn forget(&self) {
        self.header.store(null_mut(), Ordering::Relaxed);
        self.owner.store(0, Ordering::Relaxed);
    }

    /// Whether there is a request that nobody has taken up: three loads, for every call that goes the slow way.
    #[inline]
    pub(crate) fn is_asked(&self) -> bool {
        // SAFETY: null, or a page that stays mapped.
        let header = unsafe { self.header.load(Ordering::Relaxed).as_ref() };
        header.is_some_and(|header| header.desk.ticket() != self.taken.load(Ordering::Relaxed))
    }

    /// Lets `write` write a report into the page of this process; not where another thread is at the page, or there is none.
    pub(crate) fn report(&self, write: impl FnOnce(&[AtomicU64])) -> Option<()> {
        let place = self.place.try_lock()?;
        let Place::Made(memfd) = *place else { return None };
        if self.owner.load(Ordering::Relaxed) != thread::process_id() {
            return None;
        }
        let words = core::ptr::with_exposed_provenance::<AtomicU64>(memfd.address + LENGTH);
        // SAFETY: mapped until `leave`, for which the mutex is needed; everybody changes it by atomic accesses.
        write(unsafe { core::slice::from_raw_parts(words, REPORT / size_of::<u64>()) });
        Some(())
    }

    /// Replaces the numbers by what `write` writes; makes the page where this process has none. Does nothing where another
    /// thread is at it.
    pub(crate) fn publish(&self, write: impl FnOnce(&mut Text<'_>) -> fmt::Result) {
        let Some(mut place) = self.place.try_lock() else { return };
        // Asked every time: a child of the bare system call has not told anybody.
        let pid = thread::process_id();
        if let Place::Made(inherited) = *place
            && self.owner.load(Ordering::Relaxed) != pid
        {
            // A child that told nobody may have threads that look at requests in it: it stays mapped there.
            if self.header.load(Ordering::Relaxed).is_null() {
                // SAFETY: the mutex is held, and nobody else keeps an address in it.
                unsafe { inherited.leave() };
            }
            *place = Place::Unmade;
        }
        if let Place::Unmade = *place {
            *place = Memfd::make(c"neap-stat", LENGTH + REPORT).map_or(Place::Refused, Place::Made);
            let address = if let Place::Made(memfd) = *place { memfd.address } else { 0 };
            self.taken.store(0, Ordering::Relaxed);
            self.header.store(core::ptr::with_exposed_provenance_mut(address), Ordering::Relaxed);
            self.owner.store(pid, Ordering::Release); // Pairs with the Acquire in `desk`.
        }
        if let Place::Made(memfd) = *place {
            // SAFETY: mapped until `leave`, for which the mutex is needed; other processes may read it.
            unsafe { Sheet::at(memfd.address, LENGTH) }.publish(pid, clock::precise(), write);
        }
    }
}

/// A page in memory.
#[derive(Clone, Copy)]
struct Sheet<'a> {
    header: &'a Header,
    text: &'a [AtomicU8],
}

impl<'a> Sheet<'a> {
    /// # Safety
    /// `address` is aligned to 8, and `length` bytes there are initialised, live as long as the answer, and are changed only
    /// by atomic accesses; at least a header's.
    unsafe fn at(address: usize, length: usize) -> Sheet<'a> {
        let header = core::ptr::with_exposed_provenance::<Header>(address);
        // SAFETY: as the caller promises.
        unsafe {
            let text = header.add(1).cast::<AtomicU8>();
            Sheet { header: &*header, text: core::slice::from_raw_parts(text, length - size_of::<Header>()) }
        }
    }

    /// One writer at a time.
    fn publish(self, pid: u32, now: u64, write: impl FnOnce(&mut Text<'_>) -> fmt::Result) {
        let header = self.header;
        let sequence = header.sequence.load(Ordering::Relaxed) | 1;
        header.sequence.store(sequence, Ordering::Relaxed);
        // Release pairs with the reader's second look at the sequence: who sees any byte written below sees it odd, or later.
        fence(Ordering::Release);
        header.magic.store(MAGIC, Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Relaxed);
        header.pid.store(pid, Ordering::Relaxed);
        header.published.store(now, Ordering::Relaxed);
        let mut text = Text { bytes: self.text, length: 0, limit: self.text.len(), truncated: false };
        let length = if write(&mut text).is_ok() { text.length } else { 0 };
        header.length.store(length as u32, Ordering::Relaxed);
        // Release pairs with the reader's first look: who sees this sequence sees what it stands for.
        header.sequence.store(sequence.wrapping_add(1), Ordering::Release);
    }
}

/// Where JSON is written to, up to its end; a list that does not fit is cut off after a whole element.
pub(crate) struct Text<'a> {
    bytes: &'a [AtomicU8],
    length: usize,
    limit: usize,
    truncated: bool,
}

impl Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.length + text.len();
        if end > self.limit {
            return Err(fmt::Error);
        }
        let bytes = self.bytes[self.length..end].iter();
        bytes.zip(text.bytes()).for_each(|(to, byte)| to.store(byte, Ordering::Relaxed));
        self.length = end;
        Ok(())
    }
}

impl Text<'_> {
    /// A JSON list of the items that `each` writes something for.
    fn list<T>(&mut self, items: impl Iterator<Item = T>, each: impl Fn(&mut Self, T) -> fmt::Result) -> fmt::Result {
        self.write_char('[')?;
        self.limit = self.bytes.len().saturating_sub(TAIL);
        let mut separator = "";
        for item in items {
            let before = self.length;
            if self.write_str(separator).and_then(|()| each(self, item)).is_err() {
                self.length = before;
                self.truncated = true;
                break;
            }
            separator = ",";
        }
        self.limit = self.bytes.len();
        self.write_char(']')
    }
}

/// Publishes the numbers of the process's manager. The caller is inside the gate.
pub(crate) fn publish(mm: &Mm<Linux>) {
    let Some(core) = mm.core_if_open().filter(|core| core.options.stat) else { return };
    core.page.publish(|text| match core.objects.platform.no_sequences() {
        _ if !core.options.rseq => core.describe(mm, &"rseq:off was set", text),
        Some(reason) => core.describe(mm, &reason, text),
        None if !core.objects.slots.has_rseq() => core.describe(mm, &"no BMI1 and BMI2, or too many CPUs", text),
        None => core.describe(mm, &"restartable sequences and fences work", text),
    });
}

impl<P: Platform> Core<P> {
    /// Writes everything there is to say as one JSON object. `why` the slots are of the kind they are.
    fn describe(&self, mm: &Mm<P>, why: &dyn Display, text: &mut Text<'_>) -> fmt::Result {
        self.describe_mode(why, text)?;
        self.describe_pages(text)?;
        self.describe_nodes(text)?;
        map_report::describe(mm, text)?;
        write!(text, "\"classes\":")?;
        let classes = Class::all().map(|class| self.class_numbers(class)).filter(|numbers| numbers.slabs > 0);
        text.list(classes, |text, class| {
            write!(text, "{{\"size\":{},\"slabs\":{},\"objects\":{},", class.size, class.slabs, class.objects)?;
            write!(text, "\"in_slabs\":{},\"holes\":{},", class.in_slabs, class.holes)?;
            write!(text, "\"in_barn\":{},\"in_slots\":{}}}", class.in_barn, class.in_slots)
        })?;
        write!(text, ",\"cpus\":")?;
        let page_lists = |cpu| self.objects.pages.listed_on(cpu).unwrap_or(0);
        let cpus = (0..self.objects.slots.cpus()).map(|cpu| (cpu, self.cached_on(cpu), page_lists(cpu)));
        let cpus = cpus.filter(|&(_, (_, stacks), pages)| stacks > 0 || pages > 0);
        text.list(cpus, |text, (cpu, (bytes, stacks), pages)| {
            let kind = kind_name(self.objects.slots.kind(&self.objects.platform, cpu));
            write!(text, "{{\"cpu\":{cpu},\"kind\":\"{kind}\",\"cached_bytes\":{bytes},")?;
            let high = self.objects.pages.list_high_on(cpu).unwrap_or(0);
            write!(text, "\"stacks\":{stacks},\"page_list\":{pages},\"list_high\":{high}}}")
        })?;
        let truncated = text.truncated;
        write!(text, ",\"truncated\":{truncated}}}")
    }

    fn describe_mode(&self, why: &dyn Display, text: &mut Text<'_>) -> fmt::Result {
        let (objects, version) = (&self.objects, env!("CARGO_PKG_VERSION"));
        let kind = if objects.slots.has_rseq() { Kind::Rseq } else { Kind::Atomic };
        write!(text, "{{\"pid\":{},\"version\":\"{version}\",", thread::process_id())?;
        write!(text, "\"mode\":{{\"slots\":\"{}\",\"why\":\"{why}\",\"isolated_cpus\":", kind_name(kind))?;
        let isolated = (0..objects.slots.cpus()).filter(|&cpu| objects.platform.is_isolated(cpu));
        text.list(isolated, |text, cpu| write!(text, "{cpu}"))?;
        let (background, page_size) = (self.maintenance.thread_state(), objects.pages.page_size());
        write!(text, ",\"background\":\"{background}\",\"interval_ms\":{},", self.options.interval)?;
        write!(text, "\"page_size\":{page_size},\"huge\":{}}},", self.options.huge)
    }

    fn describe_pages(&self, text: &mut Text<'_>) -> fmt::Result {
        let mut looks = (0..LOOKS).map(|_| self.usage());
        let usage = looks.find(|usage| usage.unaccounted_bytes == 0).unwrap_or_else(|| self.usage());
        let pages = self.objects.pages.statistics();
        let Usage { mapped_bytes, used_bytes, cached_bytes, free_bytes, unaccounted_bytes, .. } = usage;
        let (per_cpu, per_cpu_free) = (usage.per_cpu_bytes, usage.per_cpu_free_bytes);
        write!(text, "\"bytes\":{{\"mapped\":{mapped_bytes},\"used\":{used_bytes},\"cached\":{cached_bytes},")?;
        write!(text, "\"free_resident\":{free_bytes},\"tables\":{},", pages.table_bytes)?;
        write!(text, "\"owner_vectors\":{},\"unaccounted\":{unaccounted_bytes}}},\"per_cpu\":", usage.owner_vectors)?;
        match self.per_cpu.get() {
            Some(_) => write!(text, "{{\"used\":{per_cpu},\"free\":{per_cpu_free}}},")?,
            None => write!(text, "null,")?,
        }
        match self.groups.get().map(Groups::count_inside) {
            Some(Count { live, dying, ids, .. }) => {
                write!(text, "\"groups\":{{\"live\":{live},\"dying\":{dying},\"ids\":{ids}}},")?;
            }
            None => write!(text, "\"groups\":null,")?,
        }
        write!(text, "\"pages\":{{\"managed\":{},\"free\":{},", pages.managed, pages.free)?;
        write!(text, "\"backed_free\":{},\"used\":{},\"listed\":{},", pages.backed_free, pages.used, pages.listed)?;
        let draining = pages.travelling.saturating_sub(pages.releasing);
        write!(text, "\"releasing\":{},\"draining\":{draining},\"budget\":", pages.releasing)?;
        match pages.budget {
            Some(budget) => write!(text, "{budget}")?,
            None => text.write_str("null")?,
        }
        text.write_char(',')?;
        write_watermarks(text, pages.watermarks)?;
        write!(text, ",\"zone_locks\":{},\"zone_waits\":{},", pages.zone_locks, pages.zone_waits)?;
        write!(text, "\"populated\":{}}},\"lists\":{{\"highs\":{},", pages.populated, pages.list_highs)?;
        write!(text, "\"high\":{},\"batch\":{},", pages.list_high, pages.list_batch)?;
        write!(text, "\"refills\":{},\"spills\":{},", pages.list_refills, pages.list_spills)?;
        write!(text, "\"drains\":{},\"busy\":{},", pages.list_drains, pages.list_busy)?;
        write!(text, "\"need_drains\":{},\"need_pages\":{}}},", pages.need_drains, pages.need_pages)?;
        write!(text, "\"released\":{{\"pages\":{},\"calls\":{},", pages.released, pages.release_calls)?;
        write!(text, "\"failures\":{}}},", pages.release_failures)?;
        write!(text, "\"holes\":{{\"pages\":{},", pages.holes)?;
        write!(text, "\"released\":{},\"refilled\":{}}},", pages.punched, pages.refilled)?;
        let reuse = self.objects.reuse_numbers();
        write!(text, "\"reuse\":{{\"grown\":{},", self.objects.pages.grown())?;
        write!(text, "\"sweeps\":{},\"objects\":{},", reuse.sweeps, reuse.objects)?;
        write!(text, "\"grown_in_sweeps\":{},\"released\":{}}},", reuse.grown, reuse.released)?;
        let ((ticks, drains), (fences, skipped)) = (self.maintenance.counters(), self.objects.slots.counters());
        write!(text, "\"ticks\":{ticks},\"drains\":{drains},\"fences\":{fences},\"skipped\":{skipped},")?;
        write!(text, "\"busy\":{},", self.objects.busy())
    }

    fn describe_nodes(&self, text: &mut Text<'_>) -> fmt::Result {
        let pages = &self.objects.pages;
        write!(text, "\"nodes\":")?;
        text.list((0..pages.nodes()).map(|node| (node, pages.node(node).statistics())), |text, (node, pages)| {
            write!(text, "{{\"node\":{node},\"managed\":{},\"free\":{},", pages.managed, pages.free)?;
            write!(text, "\"backed_free\":{},\"used\":{},", pages.backed_free, pages.used)?;
            write!(text, "\"listed\":{},\"highs\":{},", pages.listed, pages.list_highs)?;
            write!(text, "\"zone_waits\":{},\"misses\":{},", pages.zone_waits, pages.node_misses)?;
            write_watermarks(text, pages.watermarks)?;
            text.write_char('}')
        })?;
        write!(text, ",\"unbound_segments\":{},", pages.statistics().unbound_segments)
    }

    /// Bytes of objects on a CPU's stacks, and how many stacks are in use.
    fn cached_on(&self, cpu: usize) -> (u64, u32) {
        Class::all().fold((0, 0), |(bytes, stacks), class| {
            let peek = self.objects.slots.peek(&self.objects.platform, cpu, class);
            let here = u64::from(peek.count) * class.size() as u64;
            (bytes + here, stacks + u32::from(peek.active))
        })
    }
}

fn write_watermarks(text: &mut Text<'_>, Watermarks { min, low, high }: Watermarks) -> fmt::Result {
    write!(text, "\"watermarks\":{{\"min\":{min},\"low\":{low},\"high\":{high}}}")
}

fn kind_name(kind: Kind) -> &'static str {
    if kind == Kind::Rseq { "rseq" } else { "atomic" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use neap_base::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::string::String;
    use std::vec::Vec;

    const WORDS: usize = 1 << 9;

    /// Memory of a page, and what a reader makes of it: one whole object, or nothing.
    struct Memory(Box<[AtomicU64]>);

    impl Memory {
        fn new(words: usize) -> Memory {
            Memory((0..words).map(|_| AtomicU64::new(0)).collect())
        }

        fn sheet(&self) -> Sheet<'_> {
            // SAFETY: the words are atomics, aligned to 8, and the answer borrows them.
            unsafe { Sheet::at(self.0.as_ptr().expose_provenance(), self.0.len() * 8) }
        }

        fn read(&self) -> Option<(u32, u64, String)> {
            let Sheet { header, text } = self.sheet();
            let sequence = header.sequence.load(Ordering::Acquire); // Pairs with the last store of `publish`.
            let read = (header.pid.load(Ordering::Relaxed), header.published.load(Ordering::Relaxed));
            let length = header.length.load(Ordering::Relaxed) as usize;
            let bytes: Vec<u8> = text[..length].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
            fence(Ordering::Acquire); // Pairs with the fence of `publish`.
            let whole = sequence % 2 == 0 && header.sequence.load(Ordering::Relaxed) == sequence;
            whole.then(|| (read.0, read.1, String::from_utf8(bytes).unwrap()))
        }
    }

    #[test]
    fn what_was_published_last_is_read() {
        let memory = Memory::new(WORDS);
        for (pid, text) in [(7, "{\"first\":1}"), (8, "{}")] {
            memory.sheet().publish(pid, u64::from(pid) * 10, |to| to.write_str(text));
            assert_eq!(memory.read(), Some((pid, u64::from(pid) * 10, text.into())));
        }
        let header = memory.sheet().header;
        assert_eq!(&header.magic.load(Ordering::Relaxed).to_ne_bytes(), b"neapstat");
        assert_eq!(header.version.load(Ordering::Relaxed), VERSION);
    }

    #[test]
    fn a_reader_in_the_middle_of_writing_gets_nothing() {
        let memory = Memory::new(WORDS);
        memory.sheet().publish(1, 1, |to| to.write_str("old"));
        memory.sheet().publish(1, 2, |to| {
            to.write_str("ne")?;
            assert_eq!(memory.read(), None);
            to.write_str("w")
        });
        assert_eq!(memory.read().unwrap().2, "new");
    }

    #[test]
    fn a_reader_beside_a_writer_never_sees_a_mixture() {
        let (memory, done) = (Memory::new(WORDS), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20_000_u64 {
                    let letter = char::from(b'a' + (round % 26) as u8);
                    let length = 100 + round % 26 * 100;
                    memory
                        .sheet()
                        .publish(round as u32 % 26, length, |to| (0..length).try_for_each(|_| to.write_char(letter)));
                }
                done.store(1, Ordering::Relaxed);
            });
            let mut whole = 0;
            while done.load(Ordering::Relaxed) == 0 || whole == 0 {
                let Some((pid, length, text)) = memory.read() else { continue };
                let letter = char::from(b'a' + pid as u8);
                let fits = text.len() as u64 == length && text.chars().all(|each| each == letter);
                assert!(fits || length == 0, "{} bytes of {letter}, {length} expected: {text}", text.len());
                whole += 1;
            }
        });
    }

    #[test]
    fn a_list_that_does_not_fit_ends_after_a_whole_element() {
        let memory = Memory::new((size_of::<Header>() + TAIL + 40) / 8);
        memory.sheet().publish(1, 1, |text| {
            text.list(0..1000, |text, number| write!(text, "{{\"n\":{number}}}"))?;
            assert!(text.truncated);
            text.write_char(';')?;
            text.list(0..1, |text, number| write!(text, "{number}"))
        });
        assert_eq!(memory.read().unwrap().2, "[{\"n\":0},{\"n\":1},{\"n\":2},{\"n\":3},{\"n\":4}];[]");
        memory.sheet().publish(1, 1, |text| (0..1000).try_for_each(|_| text.write_char('x')));
        assert_eq!(memory.read().unwrap().2, "", "what cannot be cut off is left out");
    }

    /// The object that a manager writes about itself into a page of so many words.
    fn described(mm: &Mm<Virtual>, words: usize) -> String {
        let memory = Memory::new(words);
        memory.sheet().publish(1, 1, |text| mm.core().unwrap().describe(mm, &"a test", text));
        memory.read().unwrap().2
    }

    fn number(object: &str, key: &str) -> i64 {
        let (_, rest) = object.split_once(&std::format!("\"{key}\":")).unwrap_or_else(|| panic!("{key} in {object}"));
        rest[..rest.find([',', '}']).unwrap()].parse().unwrap()
    }

    #[test]
    fn a_manager_accounts_for_every_page() {
        let mut mm: Mm<Virtual> = Mm::new(Hooks { open: |_| (), spawn: None, ticked: None });
        // SAFETY: the manager stays where it is until it is closed.
        unsafe { mm.open(Virtual::new(4096, 3), &Options::DEFAULT) }.unwrap();
        let mut given = Vec::new();
        for size in [1, 1000, 5000, 40_000, 40_960, 3 << 20] {
            given.extend((0..50).map(|_| mm.allocate(size)));
        }
        // SAFETY: allocated above, and the last one is replaced.
        unsafe {
            let last = given.pop().unwrap();
            let moved = mm.reallocate(last, 3_200_000);
            given.push(mm.reallocate(moved, 1 << 20));
            given.drain(100..230).for_each(|memory| mm.free(memory));
        }
        for tick in 0..3 {
            let text = described(&mm, LENGTH / 8);
            assert_eq!(number(&text, "unaccounted"), 0, "{text}");
            assert_eq!(number(&text, "ticks"), tick);
            assert!(number(&text, "used") > 70 << 20, "{text}");
            assert!(text.contains("\"slots\":\"atomic\",\"why\":\"a test\",\"isolated_cpus\":[]"), "{text}");
            assert!(text.contains("{\"size\":1024,\"slabs\":1,\"objects\":128,"), "{text}");
            assert!(text.ends_with("],\"truncated\":false}"), "{text}");
            // What rests for a tick is drained.
            assert_eq!(number(&text, "stacks") > 0, tick < 2, "{text}");
            mm.tick(tick as u64);
        }
        // A lost page is found.
        let core = mm.core().unwrap();
        core.count_run(0, 4096);
        assert_eq!(number(&described(&mm, LENGTH / 8), "unaccounted"), 4096);
        core.count_run(4096, 0);
        // A small page holds what it can, and says so.
        let text = described(&mm, described(&mm, LENGTH / 8).len() / 8);
        assert!(text.ends_with("],\"cpus\":[],\"truncated\":true}"), "{text}");
        // SAFETY: allocated above, once each.
        given.into_iter().for_each(|memory| unsafe { mm.free(memory) });
        let text = described(&mm, LENGTH / 8);
        assert_eq!((number(&text, "unaccounted"), mm.usage().unaccounted_bytes), (0, 0), "{text}");
        // SAFETY: everything was given back.
        unsafe { mm.close() };
    }

    /// The sum of a number over the elements of a list.
    fn sum(object: &str, list: &str, key: &str) -> i64 {
        let (_, rest) = object.split_once(&std::format!("\"{list}\":[")).unwrap();
        rest[..rest.find(']').unwrap()].split(",{").map(|element| number(element, key)).sum()
    }

    #[test]
    fn nodes_and_cpus_have_their_share_of_what_lists_may_keep_and_of_the_watermarks() {
        let mut mm: Mm<Virtual> = Mm::new(Hooks { open: |_| (), spawn: None, ticked: None });
        let options = Options { limit: 256 << 20, ..Options::DEFAULT };
        // SAFETY: the manager stays where it is until it is closed.
        unsafe { mm.open(Virtual::new(4096, 2).with_nodes(&[0, 1]), &options) }.unwrap();
        let blocks = [0, 1].map(|cpu| {
            Virtual::run_on(cpu);
            mm.allocate(100)
        });
        let text = described(&mm, LENGTH / 8);
        assert_eq!(number(&text, "budget"), 256 << 8, "{text}");
        let highs = number(&text, "highs");
        assert!(highs > 0, "{text}");
        assert_eq!([sum(&text, "nodes", "highs"), sum(&text, "cpus", "list_high")], [highs, highs], "{text}");
        // The first are those of both together.
        for mark in ["min", "low", "high"] {
            assert_eq!(sum(&text, "nodes", mark), number(&text, mark), "{mark} in {text}");
        }
        assert!(number(&text, "low") > 0, "{text}");
        assert_eq!(sum(&text, "nodes", "zone_waits"), 0, "{text}");
        // SAFETY: allocated above, once each.
        blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
        // SAFETY: everything was given back.
        unsafe { mm.close() };
    }

    #[test]
    fn an_allocation_that_takes_what_lists_keep_is_counted() {
        const LIMIT: usize = 256 << 20;
        let mut mm: Mm<Virtual> = Mm::new(Hooks { open: |_| (), spawn: None, ticked: None });
        let options = Options { limit: LIMIT as u64, ..Options::DEFAULT };
        // SAFETY: the manager stays where it is until it is closed.
        unsafe { mm.open(Virtual::new(4096, 1), &options) }.unwrap();
        let numbers = |mm: &Mm<Virtual>| {
            let text = described(mm, LENGTH / 8);
            ["listed", "need_drains", "need_pages"].map(|key| number(&text, key))
        };
        let block = mm.allocate(100);
        // SAFETY: allocated above, once each.
        unsafe { mm.free(block) };
        let [listed, drains, pages] = numbers(&mm);
        assert!(listed > 0 && (drains, pages) == (0, 0), "{listed} {drains} {pages}");
        let all = mm.allocate(LIMIT);
        assert!(!all.is_null());
        let [left, drains, pages] = numbers(&mm);
        assert!(drains == 1 && pages >= listed && left == 0, "{left} {drains} {pages} of {listed}");
        assert!(mm.allocate(1).is_null());
        assert_eq!(numbers(&mm), [0, 2, pages]);
        // SAFETY: allocated above.
        unsafe { mm.free(all) };
        // SAFETY: everything was given back.
        unsafe { mm.close() };
    }

    #[test]
    fn a_process_that_did_not_make_the_page_makes_its_own() {
        let page = StatPage::new();
        let publish = || {
            page.publish(|text| text.write_str("{}"));
            let Place::Made(memfd) = *page.place.lock() else { panic!("no page") };
            memfd
        };
        let first = publish();
        assert_eq!(publish(), first);
        page.forget();
        let second = publish();
        assert_ne!(second, first);
        // SAFETY: nobody uses the page any more.
        unsafe { second.leave() };
    }
}
