//! The page of numbers that `neap stat` reads while the program runs.
//!
//! Another process reads a memfd named `neap-stat` through `/proc/PID/fd`, or its mapping if the
//! program closed the descriptor. Numbers are written after each tick only.
//!
//! # Design
//! The page is made while no other thread of the program runs, since its descriptor is the lowest
//! free one for a moment: at the first use of neap by a process with one thread, and in the fork
//! handler of a child whose parent has a page. No call that allocates or frees makes one.
//!
//! A child must not write to its parent's page, by which it could make requests as a user that it
//! gave up:
//! 1. The kernel keeps the mapping from every child.
//! 2. [`Own`], which has the page's address, reads as zeroes in every child.
//! 3. The fork handler closes the descriptor, before code of the program runs in the child.
//!
//! A child of the bare system call runs no handler: it keeps the descriptor, and has no page.
//!
//! # Locking
//! One mutex, only ever tried, is held while numbers or a report are written.
//!
//! # Format
//! Version 6, in the machine's byte order: magic (8 bytes), version, sequence, process id and
//! length (4 bytes each), nanoseconds of `CLOCK_MONOTONIC` (8 bytes), a request and its answer
//! ([`requests`](crate::requests)), and a JSON object of that length. A report on chunks, groups,
//! shrinkers or the arena follows from 64 KiB on.
//!
//! The sequence is odd while the numbers are written, and 0 before the first time. A reader that
//! finds it even, and unchanged afterwards, has one whole object. The process id is the maker's.

use crate::map_report;
use crate::mm::{Core, Mm};
use crate::requests::Desk;
use crate::statistics::Usage;
use core::fmt::{self, Display, Write};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use neap_base::Mutex;
use neap_base::platform::{Linux, Platform};
use neap_groups::{GroupCount, Groups};
use neap_objects::size_class::Class;
use neap_objects::slots::SlotKind;
use neap_os::memfd::{Memfd, OpenFile};
use neap_os::{clock, memory, stack, thread};
use neap_pages::Watermarks;

/// Magic at the start of the page.
const MAGIC: u64 = u64::from_ne_bytes(*b"neapstat");
/// Format version. Incremented with every change that an older reader would misread.
const VERSION: u32 = 6;
/// Bytes of the file for the numbers, of which [`room`] are used, and then for reports.
const LENGTH: usize = 64 << 10;
const REPORT: usize = 64 << 10;
/// Most bytes of numbers for the whole, a class, a CPU and a node. Longer lists are cut off.
const ROOM: [usize; 4] = [6 << 10, 128, 128, 512];
/// Bytes kept free behind lists, for the text that follows.
const TAIL: usize = 64;
/// Most reads of the numbers until they agree: parts are of slightly different moments.
const LOOKS: u32 = 4;

fn room(cpus: usize, nodes: usize) -> usize {
    let [whole, class, cpu, node] = ROOM;
    let bytes = whole + class * Class::all().count() + cpu * cpus + node * nodes;
    bytes.next_multiple_of(memory::page_size()).min(LENGTH)
}

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
    /// Held by the thread that writes numbers or a report.
    writing: Mutex<()>,
    /// Null until the first page is made; then memory that stays mapped, also in children.
    own: AtomicPtr<Own>,
    /// The file, for a child that has to close it; a negative descriptor if there is none.
    descriptor: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
    /// Bytes for the numbers.
    room: AtomicUsize,
    /// Address of the page's mapping; in a child, of its parent's.
    address: AtomicUsize,
    /// The process that made the page. Kept, so that publishing makes no system call for it.
    process: AtomicU32,
    /// The last request that was taken up. Not in the page, where another process could change it.
    pub(crate) taken: AtomicU32,
    /// Time of a call's last look at a request.
    pub(crate) answered: AtomicU64,
}

/// Data that only the process that wrote it may read: all zeroes in its children.
#[derive(Debug)]
struct Own {
    header: AtomicPtr<Header>,
}

impl StatPage {
    pub(crate) const fn new() -> StatPage {
        StatPage {
            writing: Mutex::new(()),
            own: AtomicPtr::new(null_mut()),
            descriptor: AtomicI32::new(-1),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
            room: AtomicUsize::new(0),
            address: AtomicUsize::new(0),
            process: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            answered: AtomicU64::new(0),
        }
    }

    #[inline]
    fn header(&self) -> Option<&Header> {
        // Acquire pairs with the Release in `own`: the pointer leads to zeroes, or data of `make`.
        // SAFETY: null, or a mapping that stays.
        let own = unsafe { self.own.load(Ordering::Acquire).as_ref() }?;
        // Acquire pairs with the Release in `make`: a thread that sees the page sees its start.
        // SAFETY: null, or a page that this process mapped and never unmaps: a child reads null.
        unsafe { own.header.load(Ordering::Acquire).as_ref() }
    }

    /// Words for requests of other processes; `None` if this process has no page of its own.
    pub(crate) fn desk(&self) -> Option<&Desk> {
        self.header().map(|header| &header.desk)
    }

    /// Whether there is a request that no thread has taken up: four loads, for every slow call.
    #[inline]
    pub(crate) fn is_asked(&self) -> bool {
        self.header().is_some_and(|header| header.desk.ticket() != self.taken.load(Ordering::Relaxed))
    }

    /// Makes the page of this process, which has none and no other thread, with `room` bytes for
    /// the numbers. Does nothing if a limit or a sandbox prevents it.
    pub(crate) fn make(&self, room: usize) {
        let Some(own) = self.own() else { return };
        let Ok(memfd) = Memfd::make(c"neap-stat", LENGTH + REPORT, room) else { return };
        let OpenFile { descriptor, device, inode } = memfd.file;
        // Relaxed: read by this thread in a forked child.
        self.descriptor.store(descriptor, Ordering::Relaxed);
        self.device.store(device, Ordering::Relaxed);
        self.inode.store(inode, Ordering::Relaxed);
        self.room.store(room, Ordering::Relaxed);
        self.address.store(memfd.address, Ordering::Relaxed);
        self.taken.store(0, Ordering::Relaxed);
        // SAFETY: mapped a moment ago, for good; other processes may read it.
        let header = unsafe { Sheet::at(memfd.address, room) }.header;
        self.process.store(thread::process_id(), Ordering::Relaxed);
        header.pid.store(self.process.load(Ordering::Relaxed), Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Relaxed);
        let header = core::ptr::with_exposed_provenance_mut(memfd.address);
        own.header.store(header, Ordering::Release); // Pairs with the Acquire in `header`.
    }

    /// The record of this process's page; `None` if no memory can be kept from children.
    fn own(&self) -> Option<&Own> {
        if self.own.load(Ordering::Relaxed).is_null() {
            let length = memory::page_size();
            let address = memory::map(length).ok()?;
            if memory::keep_from_children(address, length).is_err() {
                // SAFETY: mapped above, and nothing refers to it.
                let _ = unsafe { memory::unmap(address, length) };
                return None;
            }
            // Pairs with the Acquire in `header`.
            self.own.store(core::ptr::with_exposed_provenance_mut(address), Ordering::Release);
        }
        // SAFETY: a mapping that stays; zeroes are an `Own`.
        unsafe { self.own.load(Ordering::Relaxed).as_ref() }
    }

    /// In the fork handler of a child: replaces the parent's page, if there is one, by its own.
    pub(crate) fn renew(&self) {
        // Relaxed: written by this thread, or before it was made.
        let descriptor = self.descriptor.swap(-1, Ordering::Relaxed);
        if descriptor >= 0 {
            let (device, inode) = (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed));
            OpenFile { descriptor, device, inode }.close();
            // A signal handler may have forked before a read at the page's address.
            let _ = memory::map_at(self.address.load(Ordering::Relaxed), LENGTH + REPORT);
            self.make(self.room.load(Ordering::Relaxed));
        }
    }

    /// Calls `write` with the words for a report. `None` without a page, or if it is in use.
    pub(crate) fn report(&self, write: impl FnOnce(&[AtomicU64])) -> Option<()> {
        let _writing = self.writing.try_lock()?;
        let address = core::ptr::from_ref(self.header()?).expose_provenance();
        let words = core::ptr::with_exposed_provenance::<AtomicU64>(address + LENGTH);
        // SAFETY: mapped for good, behind the numbers; changed by atomic accesses only.
        write(unsafe { core::slice::from_raw_parts(words, REPORT / size_of::<u64>()) });
        Some(())
    }

    /// Replaces the numbers by the output of `write`, unless there is no page or it is in use.
    pub(crate) fn publish(&self, write: impl FnOnce(&mut Text<'_>) -> fmt::Result) {
        let Some(_writing) = self.writing.try_lock() else { return };
        let Some(header) = self.header() else { return };
        // Relaxed: written before the header that was found.
        let room = self.room.load(Ordering::Relaxed);
        // SAFETY: mapped for good; other processes may read it.
        let sheet = unsafe { Sheet::at(core::ptr::from_ref(header).expose_provenance(), room) };
        sheet.publish(self.process.load(Ordering::Relaxed), clock::precise(), write);
    }
}

#[derive(Clone, Copy)]
struct Sheet<'a> {
    header: &'a Header,
    text: &'a [AtomicU8],
}

impl<'a> Sheet<'a> {
    /// Returns the page at `address`, with `length` bytes.
    ///
    /// # Safety
    /// The `length` bytes at `address`, a multiple of 8, have at least a header, are initialised,
    /// outlive the returned value, and are changed by atomic accesses only.
    unsafe fn at(address: usize, length: usize) -> Sheet<'a> {
        let header = core::ptr::with_exposed_provenance::<Header>(address);
        // SAFETY: initialised, aligned, alive and changed by atomics only (the caller's promise).
        unsafe {
            let text = header.add(1).cast::<AtomicU8>();
            Sheet { header: &*header, text: core::slice::from_raw_parts(text, length - size_of::<Header>()) }
        }
    }

    /// Replaces the numbers. One writer at a time.
    fn publish(self, pid: u32, now: u64, write: impl FnOnce(&mut Text<'_>) -> fmt::Result) {
        let header = self.header;
        let sequence = header.sequence.load(Ordering::Relaxed) | 1;
        header.sequence.store(sequence, Ordering::Relaxed);
        // Release pairs with the reader's second load: after a byte written below it differs.
        fence(Ordering::Release);
        header.magic.store(MAGIC, Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Relaxed);
        header.pid.store(pid, Ordering::Relaxed);
        header.published.store(now, Ordering::Relaxed);
        let mut text = Text { bytes: self.text, length: 0, limit: self.text.len(), truncated: false };
        let length = if write(&mut text).is_ok() { text.length } else { 0 };
        header.length.store(length as u32, Ordering::Relaxed);
        // Release pairs with the reader's first load: it publishes the numbers.
        header.sequence.store(sequence.wrapping_add(1), Ordering::Release);
    }
}

/// A writer of JSON. A list that does not fit is cut off after a whole element.
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

/// Makes the page of a manager that was just opened, if the process may have one.
pub(crate) fn open(mm: &Mm<Linux>) {
    if let Some(core) = mm.core_if_open().filter(|core| core.options.stat && thread::count() == Some(1)) {
        core.page.make(room(core.objects.slots.cpus(), core.objects.pages.nodes()));
    }
}

/// Publishes the numbers of the process's manager. Inside the gate.
pub(crate) fn publish(mm: &Mm<Linux>) {
    let Some(core) = mm.core_if_open().filter(|core| core.options.stat) else { return };
    // Formatting calls functions deeply.
    let _ = stack::apart(|| publish_core(mm, core));
}

fn publish_core(mm: &Mm<Linux>, core: &Core<Linux>) {
    core.page.publish(|text| match core.objects.platform.no_sequences() {
        _ if !core.options.rseq => core.describe(mm, &"rseq:off was set", text),
        Some(reason) => core.describe(mm, &reason, text),
        None if !core.objects.slots.has_rseq() => core.describe(mm, &"no BMI1 and BMI2, or too many CPUs", text),
        None => core.describe(mm, &"restartable sequences and fences work", text),
    });
}

impl<P: Platform> Core<P> {
    /// Writes all numbers as one JSON object. `why` says why the slots are of their kind.
    fn describe(&self, mm: &Mm<P>, why: &dyn Display, text: &mut Text<'_>) -> fmt::Result {
        self.describe_mode(why, text)?;
        self.describe_pages(text)?;
        self.describe_nodes(text)?;
        map_report::describe(mm, text)?;
        write!(text, "\"classes\":")?;
        let classes =
            self.classes_with_slabs().map(|class| self.class_numbers(class)).filter(|numbers| numbers.slabs > 0);
        text.list(classes, |text, class| {
            write!(text, "{{\"size\":{},\"slabs\":{},\"objects\":{},", class.size, class.slabs, class.objects)?;
            write!(text, "\"in_slabs\":{},\"holes\":{},", class.in_slabs, class.holes)?;
            write!(text, "\"in_barn\":{},\"in_slots\":{}}}", class.in_barn, class.in_slots)
        })?;
        write!(text, ",\"cpus\":")?;
        let page_lists = |cpu| self.objects.pages.listed_on(cpu).unwrap_or(0);
        let cpus = self.used_cpus().iter().map(|cpu| (cpu, self.cached_on(cpu), page_lists(cpu)));
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
        let kind = if objects.slots.has_rseq() { SlotKind::Rseq } else { SlotKind::Atomic };
        write!(text, "{{\"pid\":{},\"version\":\"{version}\",", self.page.process.load(Ordering::Relaxed))?;
        write!(text, "\"mode\":{{\"slots\":\"{}\",\"why\":\"{why}\",\"isolated_cpus\":", kind_name(kind))?;
        let isolated = (0..objects.slots.cpus()).filter(|&cpu| objects.platform.is_isolated(cpu));
        text.list(isolated, |text, cpu| write!(text, "{cpu}"))?;
        let (background, page_size) = (self.background.state(), objects.pages.page_size());
        write!(text, ",\"background\":\"{background}\",\"interval_ms\":{},", self.settings.interval() / 1_000_000)?;
        write!(text, "\"page_size\":{page_size},\"huge\":{}}},", self.options.huge)?;
        write!(text, "\"settings\":{{{}}},\"container\":", self.settings)?;
        self.describe_container(text)
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
            Some(GroupCount { live, dying, ids, .. }) => {
                write!(text, "\"groups\":{{\"live\":{live},\"dying\":{dying},\"ids\":{ids}}},")?;
            }
            None => write!(text, "\"groups\":null,")?,
        }
        write!(text, "\"pages\":{{\"managed\":{},\"free\":{},", pages.managed, pages.free)?;
        write!(text, "\"backed_free\":{},\"used\":{},\"listed\":{},", pages.backed_free, pages.used, pages.listed)?;
        let draining = pages.travelling.saturating_sub(pages.releasing);
        write!(text, "\"releasing\":{},\"draining\":{draining},\"budget\":", pages.releasing)?;
        // The limit in pages, some of which are for tables.
        let limit = pages.budget.map(|_| self.settings.limit() >> self.objects.pages.page_shift());
        match limit {
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

    /// Bytes of objects on a CPU's stacks, and the number of stacks in use.
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

fn kind_name(kind: SlotKind) -> &'static str {
    if kind == SlotKind::Rseq { "rseq" } else { "atomic" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use crate::settings::page_budget;
    use neap_base::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::string::String;
    use std::vec::Vec;

    const WORDS: usize = 1 << 9;

    /// Memory of a page, and its reader: it returns one whole object, or nothing.
    struct Memory(Box<[AtomicU64]>);

    impl Memory {
        fn new(words: usize) -> Memory {
            Memory((0..words).map(|_| AtomicU64::new(0)).collect())
        }

        fn sheet(&self) -> Sheet<'_> {
            // SAFETY: the words are atomics, aligned to 8, and the returned value borrows them.
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

    /// The object that a manager writes about itself into a page of `words` words.
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
        // A page that is too small has a part of the numbers, and says so.
        let text = described(&mm, described(&mm, LENGTH / 8).len() / 8);
        assert!(text.ends_with("],\"cpus\":[],\"truncated\":true}"), "{text}");
        // SAFETY: allocated above, once each.
        given.into_iter().for_each(|memory| unsafe { mm.free(memory) });
        let text = described(&mm, LENGTH / 8);
        assert_eq!((number(&text, "unaccounted"), mm.usage().unaccounted_bytes), (0, 0), "{text}");
        // SAFETY: all memory was freed, and no thread uses the manager any more.
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
        // SAFETY: all memory was freed, and no thread uses the manager any more.
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
        let tables = mm.core().unwrap().objects.pages.statistics().table_pages;
        let all = mm.allocate((page_budget(LIMIT as u64, 4096) - tables) as usize * 4096);
        assert!(!all.is_null());
        let [left, drains, pages] = numbers(&mm);
        assert!(drains == 1 && pages >= listed && left == 0, "{left} {drains} {pages} of {listed}");
        assert!(mm.allocate(1).is_null());
        assert_eq!(numbers(&mm), [0, 2, pages]);
        // SAFETY: allocated above.
        unsafe { mm.free(all) };
        // SAFETY: all memory was freed, and no thread uses the manager any more.
        unsafe { mm.close() };
    }

    #[test]
    fn room_holds_the_numbers_of_every_machine() {
        let class = "{'size':32768,'slabs':12345678,'objects':12345678,'in_slabs':12345678,'holes':12345678,\
                     'in_barn':12345678,'in_slots':12345678},";
        let cpu =
            "{'cpu':1023,'kind':'atomic','cached_bytes':12345678,'stacks':70,'page_list':123456,'list_high':123456},";
        assert!(class.len() <= ROOM[1] && cpu.len() <= ROOM[2], "{} {}", class.len(), cpu.len());
        assert_eq!((room(2, 1) % memory::page_size(), room(10_000, 32)), (0, LENGTH));
        assert!(room(2, 1) <= 32 << 10 || memory::page_size() > 4096);
    }

    #[test]
    fn page_is_made_once_and_renewed_for_a_child() {
        let page = StatPage::new();
        let inode = || page.inode.load(Ordering::Relaxed);
        page.publish(|_| panic!("there is no page"));
        page.renew();
        assert!(page.desk().is_none() && page.report(|_| ()).is_none(), "a parent without a page has children without");
        page.make(room(4, 1));
        let first = inode();
        page.publish(|text| text.write_str("{}"));
        assert_eq!((page.header().unwrap().length.load(Ordering::Relaxed), inode()), (2, first));
        let descriptor = page.descriptor.load(Ordering::Relaxed);
        page.renew();
        assert_ne!(inode(), first);
        assert_eq!(page.descriptor.load(Ordering::Relaxed), descriptor, "the first one is closed");
        let header = page.header().unwrap();
        let read = [&header.pid, &header.version, &header.sequence].map(|word| word.load(Ordering::Relaxed));
        assert_eq!(read, [thread::process_id(), VERSION, 0]);
    }
}
