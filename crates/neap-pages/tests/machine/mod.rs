//! Shared by the tests of this crate: shapes, and blocks and runs that know their contents.
//!
//! Every page of a test's carries a stamp in its first and last eight bytes. A page that came as
//! zero is read completely first.
#![allow(dead_code, reason = "not every test file uses every piece")]

use neap_base::platform::Errno;
use neap_base::{Order, Pfn, Platform};
use neap_pages::{BATCH_SCALE, Exhausted, Pages, Shape, SideTable, TABLES};
use std::vec;

pub(crate) const PAGE_SIZES: [usize; 3] = [4096, 16384, 65536];

/// Tables like those of the object layer, of more kinds.
pub(crate) fn tables() -> [SideTable; TABLES] {
    let mut tables = [SideTable::default(); TABLES];
    for (table, (shift, droppable)) in tables.iter_mut().zip([(12, false), (4, true), (5, true), (6, true), (10, true)])
    {
        *table = SideTable { shift, lead: 0, droppable, brief: shift == 10, early: shift == 4 };
    }
    tables
}

/// Eight gibibytes at most.
pub(crate) fn shape(budget: Option<u32>) -> Shape {
    Shape { span: 8 << 30, budget, tables: tables(), huge: false, list_high: None, batch_scale: BATCH_SCALE }
}

/// Pages that open and close with a value.
pub(crate) struct Opened<'p, P: Platform> {
    pub(crate) platform: &'p P,
    pub(crate) pages: Pages<P>,
}

impl<'p, P: Platform> Opened<'p, P> {
    pub(crate) fn new(platform: &'p P, shape: &Shape) -> Result<Opened<'p, P>, Errno> {
        Ok(Opened { platform, pages: Pages::open(platform, shape)? })
    }
}

impl<P: Platform> Drop for Opened<'_, P> {
    fn drop(&mut self) {
        // SAFETY: the test is over, and nothing of the pages is used after this.
        unsafe { self.pages.close(self.platform) };
    }
}

fn word(address: usize) -> *mut u64 {
    core::ptr::with_exposed_provenance_mut(address)
}

/// A block or run of a test's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) pfn: Pfn,
    pub(crate) pages: u32,
    pub(crate) order: Option<Order>,
    pub(crate) stamp: u64,
}

impl Held {
    /// Stamps every page; a page that came as zero must be zero. The owner of a run is its stamp.
    pub(crate) fn stamp<P: Platform>(
        pages: &Pages<P>,
        pfn: Pfn,
        count: u32,
        order: Option<Order>,
        zero: bool,
        stamp: u64,
    ) -> Held {
        let (start, size) = (pages.address(pfn), pages.page_size());
        assert!(start >= pages.base() && start + count as usize * size <= pages.base() + pages.limit());
        for page in 0..count as usize {
            let page = start + page * size;
            // SAFETY: the page was handed out to this test.
            unsafe {
                if zero {
                    for at in (page..page + size).step_by(8) {
                        assert_eq!(word(at).read(), 0, "a page said to be zero is not at {at:#x}");
                    }
                }
                word(page).write(stamp ^ page as u64);
                word(page + size - 8).write(stamp);
            }
        }
        if order.is_none() {
            pages.frames().set_run_owner(pfn, stamp);
        }
        Held { pfn, pages: count, order, stamp }
    }

    /// Whether every page still has its stamp, and a run its owner.
    pub(crate) fn check<P: Platform>(&self, pages: &Pages<P>) {
        assert!(self.order.is_some() || pages.frames().run_owner(self.pfn) == self.stamp, "{self:?} lost its owner");
        for page in 0..self.pages {
            let address = pages.address(self.pfn.plus(page));
            // SAFETY: the page is handed out to this test.
            let found = unsafe { (word(address).read(), word(address + pages.page_size() - 8).read()) };
            assert_eq!(
                found,
                (self.stamp ^ address as u64, self.stamp),
                "page {} lost its contents",
                self.pfn.0 + page
            );
        }
    }
}

pub(crate) fn take_block<P: Platform>(o: &Opened<'_, P>, order: u8, stamp: u64) -> Result<Held, Exhausted> {
    let block = o.pages.allocate_block(o.platform, Order(order))?;
    assert_eq!(block.pfn.0 % (1 << order), 0);
    Ok(Held::stamp(&o.pages, block.pfn, 1 << order, Some(Order(order)), block.zero, stamp))
}

pub(crate) fn take_run<P: Platform>(o: &Opened<'_, P>, pages: u32, align: u32, stamp: u64) -> Result<Held, Exhausted> {
    let block = o.pages.allocate_run(o.platform, pages, align)?;
    assert_eq!(o.pages.address(block.pfn) % (align as usize * o.platform.page_size()), 0);
    assert_eq!(o.pages.frames().run_owner(block.pfn), 0, "no group pays yet");
    Ok(Held::stamp(&o.pages, block.pfn, pages, None, block.zero, stamp))
}

pub(crate) fn give<P: Platform>(o: &Opened<'_, P>, held: Held) {
    held.check(&o.pages);
    match held.order {
        Some(order) => o.pages.free_block(o.platform, held.pfn, order),
        None => o.pages.free_run(o.platform, held.pfn, held.pages),
    }
}

/// Resident bytes of a range, as the kernel reports them.
pub(crate) fn resident(address: usize, length: usize) -> usize {
    let (page, first) = (4096, address / 4096);
    let map = std::fs::File::open("/proc/self/pagemap").expect("pagemap of this process");
    let mut words = vec![0_u8; length / page * 8];
    std::os::unix::fs::FileExt::read_exact_at(&map, &mut words, first as u64 * 8).expect("a part of pagemap");
    let (entries, _) = words.as_chunks::<8>();
    entries.iter().filter(|entry| u64::from_le_bytes(**entry) >> 63 == 1).count() * page
}
