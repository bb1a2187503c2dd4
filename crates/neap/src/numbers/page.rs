//! The page of numbers that `neap stat` reads while the program runs.
//!
//! Another process reads a memfd named `neap-stat` through `/proc/PID/fd`, or its mapping if the
//! program closed the descriptor. The process stores [live counters](super::live) when they change,
//! and the [text](super::text) after each tick. [`sheet`](super::sheet) has the format.
//!
//! # Design
//! neap makes the page while no other thread of the program runs, since its descriptor is the
//! lowest free one for a moment. It does so at the first use of neap, if the process has one thread
//! then, and in the fork handler of a child whose parent has a page. No later call that allocates
//! or frees makes one.
//!
//! A child must not write to its parent's page. Otherwise it could make requests as a user whose
//! rights it has given up. Three measures prevent that:
//! 1. The kernel keeps the mapping from every child.
//! 2. [`Own`], which has the page's address, reads as zeroes in every child.
//! 3. The fork handler closes the descriptor, before code of the program runs in the child.
//!
//! A child that was forked by the bare system call runs no handler. It keeps the descriptor, and
//! has no page.
//!
//! # Locking
//! A thread that writes numbers or a report holds one mutex. Threads only try to take it.

use crate::control::channel::ControlChannel;
use crate::numbers::live::{LiveHead, PageLayout};
use crate::numbers::sheet::{Header, MAGIC, REPORT, REPORT_AT, Sheet, Text, VERSION};
use core::fmt;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use neap_base::Mutex;
use neap_base::live::Link;
use neap_base::profile_area::{self, AreaHeader};
use neap_objects::live::ClassCell;
use neap_os::memfd::{Memfd, OpenFile};
use neap_os::{clock, memory, thread};
use neap_pages::ZoneCell;

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
    /// The layout of the page: number of nodes, and bytes of text.
    nodes: AtomicUsize,
    text: AtomicUsize,
    /// Address of the page's mapping; in a child, of its parent's.
    address: AtomicUsize,
    /// The process that made the page. Kept, so that publishing makes no system call for it.
    pub(crate) process: AtomicU32,
    /// The last request that was taken up. Kept outside of the page, where another process could
    /// change it.
    pub(crate) taken: AtomicU32,
    /// Time at which a call last looked for a request.
    pub(crate) answered: AtomicU64,
}

/// Data that only the process that wrote it may read: all zeroes in its children.
#[derive(Debug)]
struct Own {
    header: AtomicPtr<Header>,
    head: AtomicPtr<LiveHead>,
    /// The area of samples, once it is mapped.
    samples: AtomicPtr<AreaHeader>,
    zones: Link<ZoneCell>,
    classes: Link<ClassCell>,
}

impl StatPage {
    pub(crate) const fn new() -> StatPage {
        StatPage {
            writing: Mutex::new(()),
            own: AtomicPtr::new(null_mut()),
            descriptor: AtomicI32::new(-1),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
            nodes: AtomicUsize::new(0),
            text: AtomicUsize::new(0),
            address: AtomicUsize::new(0),
            process: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            answered: AtomicU64::new(0),
        }
    }

    #[inline]
    fn header(&self) -> Option<&Header> {
        // Acquire pairs with the Release in `own`: the pointer leads to zeroes, or data of `make`.
        // SAFETY: null, or a valid `Own` in a mapping that stays.
        let own = unsafe { self.own.load(Ordering::Acquire).as_ref() }?;
        // Acquire pairs with the Release in `make`: a thread that sees the page sees its start.
        // SAFETY: null, or a page that this process mapped and never unmaps: a child reads null.
        unsafe { own.header.load(Ordering::Acquire).as_ref() }
    }

    /// Numbers of the whole instance, for other processes; `None` if this process has no page of
    /// its own.
    #[inline]
    pub(crate) fn head(&self) -> Option<&LiveHead> {
        // Acquire pairs with the Release in `own`: the pointer leads to zeroes, or data of `make`.
        // SAFETY: null, or a valid `Own` in a mapping that stays.
        let own = unsafe { self.own.load(Ordering::Acquire).as_ref() }?;
        // Acquire pairs with the Release in `make`: the head is initialised.
        // SAFETY: null, or a page that this process mapped and never unmaps: a child reads null.
        unsafe { own.head.load(Ordering::Acquire).as_ref() }
    }

    /// The links to the cells of zones and of class caches; `None` if no page was ever made. They
    /// stay mapped for good, and lead to a cell per node, and to a cell per node and class.
    pub(crate) fn links(&self) -> Option<(&Link<ZoneCell>, &Link<ClassCell>)> {
        // Acquire pairs with the Release in `own`.
        // SAFETY: null, or a valid `Own` in a mapping that stays.
        let own = unsafe { self.own.load(Ordering::Acquire).as_ref() }?;
        Some((&own.zones, &own.classes))
    }

    /// The area of samples; `None` if this process has mapped none.
    pub(crate) fn samples(&self) -> Option<&AreaHeader> {
        // Acquire pairs with the Release in `own`: the pointer leads to zeroes, or data of `make`.
        // SAFETY: null, or a valid `Own` in a mapping that stays.
        let own = unsafe { self.own.load(Ordering::Acquire).as_ref() }?;
        // Acquire pairs with the Release in `map_samples`.
        // SAFETY: null, or a mapping that this process never unmaps: a child reads null.
        unsafe { own.samples.load(Ordering::Acquire).as_ref() }
    }

    /// Maps the area of samples, if it is not mapped yet. `None` if this process has no page, or
    /// has closed its descriptor. Only one thread may call this at a time.
    pub(crate) fn map_samples(&self) -> Option<&AreaHeader> {
        self.header()?;
        if self.samples().is_none() {
            let file = OpenFile {
                descriptor: self.descriptor.load(Ordering::Relaxed),
                device: self.device.load(Ordering::Relaxed),
                inode: self.inode.load(Ordering::Relaxed),
            };
            let address = file.map(profile_area::FILE_OFFSET, profile_area::AREA_BYTES).ok()?;
            // Release pairs with the Acquire in `samples`.
            self.own()?.samples.store(core::ptr::with_exposed_provenance_mut(address), Ordering::Release);
        }
        self.samples()
    }

    fn layout(&self) -> PageLayout {
        // Relaxed: written by this thread, or before the header that was found.
        let [nodes, text] = [&self.nodes, &self.text].map(|word| word.load(Ordering::Relaxed));
        PageLayout { nodes, text }
    }

    /// Words for requests of other processes; `None` if this process has no page of its own.
    pub(crate) fn channel(&self) -> Option<&ControlChannel> {
        self.header().map(|header| &header.channel)
    }

    /// Returns whether there is a request that no thread has taken up. Takes four loads, because
    /// slow calls call this.
    #[inline]
    pub(crate) fn is_asked(&self) -> bool {
        self.header().is_some_and(|header| header.channel.ticket() != self.taken.load(Ordering::Relaxed))
    }

    /// Makes the page of this process, which has none and no other thread. Does nothing if a limit
    /// or a sandbox prevents it.
    pub(crate) fn make(&self, layout: PageLayout) {
        let Some(own) = self.own() else { return };
        let length = layout.bytes(REPORT_AT);
        // A low limit on the size of files leaves no place for samples.
        let make = |file_bytes| Memfd::make(c"neap-stat", file_bytes, REPORT_AT + REPORT, length);
        let made = make(profile_area::FILE_OFFSET + profile_area::AREA_BYTES).or_else(|_| make(REPORT_AT + REPORT));
        let Ok(memfd) = made else { return };
        let OpenFile { descriptor, device, inode } = memfd.file;
        // Relaxed: read by this thread in a forked child.
        self.descriptor.store(descriptor, Ordering::Relaxed);
        self.device.store(device, Ordering::Relaxed);
        self.inode.store(inode, Ordering::Relaxed);
        self.nodes.store(layout.nodes, Ordering::Relaxed);
        self.text.store(layout.text, Ordering::Relaxed);
        self.address.store(memfd.address, Ordering::Relaxed);
        self.taken.store(0, Ordering::Relaxed);
        // SAFETY: `memfd` maps `length` zeroes at the start of a page, for good, and accesses to
        // them are atomic. The text begins behind the header, and `layout` keeps it within the
        // length.
        let header = unsafe { Sheet::at(memfd.address, layout.text_at(), length) }.header;
        self.process.store(thread::process_id(), Ordering::Relaxed);
        header.pid.store(self.process.load(Ordering::Relaxed), Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Relaxed);
        // SAFETY: the mapping starts at a multiple of a page, stays, and is longer than `text_at`.
        // It is all zero, and changed by atomic accesses only.
        let head = unsafe { layout.begin(memfd.address) };
        header.magic.store(MAGIC, Ordering::Relaxed);
        // Release pairs with the Acquire of those that read the pointers.
        let at = |offset: usize| memfd.address + offset;
        own.zones.store(core::ptr::with_exposed_provenance_mut(at(layout.zones_at())), Ordering::Release);
        own.classes.store(core::ptr::with_exposed_provenance_mut(at(layout.classes_at())), Ordering::Release);
        own.head.store(core::ptr::from_ref(head).cast_mut(), Ordering::Release);
        own.header.store(core::ptr::with_exposed_provenance_mut(memfd.address), Ordering::Release);
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

    /// Replaces the parent's page, if there is one, by a page of this process. The fork handler of
    /// a child calls this.
    pub(crate) fn renew(&self) {
        // Relaxed: written by this thread, or before it was made.
        let descriptor = self.descriptor.swap(-1, Ordering::Relaxed);
        if descriptor >= 0 {
            let (device, inode) = (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed));
            OpenFile { descriptor, device, inode }.close();
            // A signal handler may have forked right before a read from the page, so the address
            // stays readable.
            let _ = memory::map_at(self.address.load(Ordering::Relaxed), REPORT_AT + REPORT);
            self.make(self.layout());
        }
    }

    /// Calls `write` with the words for a report. `None` without a page, or if it is in use.
    pub(crate) fn report(&self, write: impl FnOnce(&[AtomicU64])) -> Option<()> {
        let _writing = self.writing.try_lock()?;
        let address = core::ptr::from_ref(self.header()?).expose_provenance();
        let words = core::ptr::with_exposed_provenance::<AtomicU64>(address + REPORT_AT);
        // SAFETY: mapped for good, behind the numbers; changed by atomic accesses only.
        write(unsafe { core::slice::from_raw_parts(words, REPORT / size_of::<u64>()) });
        Some(())
    }

    /// Replaces the numbers by the output of `write`, unless there is no page or it is in use.
    pub(crate) fn publish(&self, write: impl FnOnce(&mut Text<'_>) -> fmt::Result) {
        let Some(_writing) = self.writing.try_lock() else { return };
        let Some(header) = self.header() else { return };
        let (layout, address) = (self.layout(), core::ptr::from_ref(header).expose_provenance());
        // SAFETY: `make` mapped the page for good, with this layout, and accesses to it are atomic.
        let sheet = unsafe { Sheet::at(address, layout.text_at(), layout.bytes(REPORT_AT)) };
        // Another process may have overwritten the constant numbers.
        // SAFETY: `make` mapped the page for good, with this layout, at a multiple of a page. It is
        // initialised, and changed by atomic accesses only.
        unsafe { layout.begin(address) };
        sheet.publish(self.process.load(Ordering::Relaxed), clock::precise(), write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::fmt::Write;

    #[test]
    fn page_is_made_once_and_renewed_for_a_child() {
        let page = StatPage::new();
        let inode = || page.inode.load(Ordering::Relaxed);
        page.publish(|_| panic!("there is no page"));
        page.renew();
        assert!(
            page.channel().is_none() && page.report(|_| ()).is_none(),
            "a parent without a page has children without"
        );
        page.make(PageLayout { nodes: 1, text: 4096 });
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
