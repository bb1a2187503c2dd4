//! Reconciliation: charged bytes, neap's counters, and resident memory as the kernel counts it,
//! side by side.
//!
//! # Design
//! Each resident byte is attributed to a [`Source`]. Where neap has its own counter, the counter
//! stands beside the kernel's figure, so a difference belongs to a source. For another process,
//! reconciliation uses that process's [report](crate::reports::map_report). Reconciliation
//! allocates nothing.
//!
//! # Locking
//! Reconciliation takes the locks of the layers one at a time. If there are groups, it closes the
//! gate, as a fork does, while it compares charges with allocations. At the request of another
//! process, it does so only if that takes a few milliseconds.

mod sources;
mod tally;

pub use neap_base::platform::Errno;
pub use sources::{Books, Held, NONE, Range, Source};
pub use tally::{Reconciliation, Tally};

use crate::groups::memory_groups::price;
use crate::mm::{Core, Mm};
use core::sync::atomic::Ordering::Relaxed;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_base::platform::memory;
use neap_groups::Kind;
use neap_objects::objects::MappingKind;
use neap_objects::size_class::Class;
use neap_os::mappings::Mappings;
use neap_pages::PIECE;
use neap_percpu::Host;

/// Capacity for ranges, more than a manager has.
const RANGES: usize = 256;
/// Number of looks at the gate, for about a tenth of a second. For a request of another process it
/// is `FEW_LOOKS`, for some milliseconds.
const LOOKS: u32 = 2000;
const FEW_LOOKS: u32 = 50;
/// Most bytes in slabs for which a request of another process may close the gate. Counting them
/// takes some milliseconds.
const SOON_DONE: u64 = 64 << 20;

impl<P: Platform> Core<P> {
    fn count(&self, books: &mut Books) {
        let (usage, pages, page) =
            (self.usage(), self.objects.pages.statistics(), self.objects.pages.page_size() as u64);
        let held = &mut books.held;
        let (mut slabs, mut all) = (0, 0);
        for numbers in Class::all().map(|class| self.class_numbers(class)) {
            let size = u64::from(numbers.size);
            slabs += numbers.pages * page;
            all += numbers.objects * size;
            held[Held::InStacks as usize] += numbers.in_slots * size;
            held[Held::InBarns as usize] += numbers.in_barn * size;
            held[Held::InSlabs as usize] += numbers.in_slabs * size;
            held[Held::Holes as usize] += numbers.holes * page;
        }
        held[Held::Sheaves as usize] = self.objects.sheaf_bytes();
        held[Held::Vectors as usize] = usage.owner_vectors;
        held[Held::Waste as usize] = slabs - all;
        let others: u64 = held[Held::InStacks as usize..Held::Waste as usize].iter().sum();
        held[Held::InUse as usize] = all.saturating_sub(others);
        let believed = [
            (Source::Slabs, slabs.saturating_sub(held[Held::Holes as usize])),
            (Source::Runs, self.run_bytes.load(Relaxed)),
            (Source::Blocks, usage.unaccounted_bytes.max(0) as u64),
            (Source::Listed, u64::from(pages.listed) * page),
            (Source::FreeBacked, u64::from(pages.backed_free) * page),
            (Source::Free, 0),
            (Source::Travelling, u64::from(pages.travelling) * page),
            (Source::Arena, 0),
            (Source::PerCpuData, usage.per_cpu_bytes + usage.per_cpu_free_bytes),
        ];
        believed.iter().for_each(|&(source, bytes)| books.believed[source as usize] = bytes);
    }

    /// Calls `each` with every mapping.
    pub(crate) fn each_range(&self, mm: &Mm<P>, inside: &Inside<'_>, each: &mut dyn FnMut(Range)) {
        let mut tell = |of, memory::Range { start, length }| each(Range { start, length, of });
        self.objects.each_mapping(&mut |part, start, length| {
            let of = match part {
                MappingKind::Arena => Source::Arena,
                MappingKind::PageTables => Source::PageTables,
                MappingKind::States => Source::States,
                MappingKind::SlabTables => Source::SlabTables,
                MappingKind::Lists => Source::Lists,
                MappingKind::Stacks => Source::Stacks,
            };
            tell(of, memory::Range { start, length });
        });
        tell(Source::Ticks, self.maintenance.mapping(&self.objects.platform));
        let splits = self.splits.lock(inside).mapping(&self.objects.platform);
        if splits.length > 0 {
            tell(Source::Lists, splits);
        }
        if let Some(region) = self.guard.region() {
            region.mappings().into_iter().for_each(|mapping| tell(Source::Guarded, mapping));
        }
        if let Some(data) = self.per_cpu.get() {
            let [memory, tables] = data.mappings();
            tell(Source::PerCpuData, memory);
            tell(Source::PerCpuTables, tables);
        }
        if let Some(grouped) = mm.groups_if_made() {
            let mut tell = |start, length| tell(Source::Groups, memory::Range { start, length });
            grouped.groups().each_mapping(grouped.platform(), &mut tell);
        }
    }
}

impl<P: Platform> Mm<P> {
    /// Returns this manager's counters, without the sums of allocations that a group pays for.
    /// Stops no thread.
    pub(crate) fn books(&self) -> Books {
        let mut books = Books::BLANK;
        if let Some(core) = self.core_if_open() {
            let inside = self.gate.enter(core.objects.platform.cpu());
            core.count(&mut books);
            self.count_charged(&inside, &mut books);
        }
        books
    }

    /// Returns the counters, with the sums of charged allocations if these take some milliseconds
    /// at most.
    pub(crate) fn books_with_payers(&self) -> Books {
        let mut books = self.books();
        if books.believed[Source::Slabs as usize] <= SOON_DONE {
            self.count_payable(&mut books, FEW_LOOKS);
        }
        books
    }

    fn count_charged(&self, inside: &Inside<'_>, books: &mut Books) {
        let Some(grouped) = self.groups_if_made() else { return };
        let (groups, source) = (grouped.groups(), grouped.source());
        Kind::ALL.iter().for_each(|&kind| books.charged[kind as usize] = groups.used_of_kind(inside, source, kind));
        books.payable[Kind::PerCpu as usize] = source.data().paid_bytes();
    }

    /// Counts charged allocations, and charges at the same moment. Threads that allocate or free
    /// wait meanwhile. Does nothing while a thread on an isolated CPU might have to wait.
    fn count_payable(&self, books: &mut Books, looks: u32) {
        let Some(core) = self.core_if_open() else { return };
        if self.groups_if_made().is_none() || core.objects.platform.is_isolated_cpu_in_use() {
            return;
        }
        self.close_for_fork(&|seen| seen < looks);
        self.count_charged(&self.gate.enter(core.objects.platform.cpu()), books); // The closer may enter.
        if self.gate.is_empty() {
            let (mut objects, mut runs) = (0, 0);
            core.objects.each_accounted(&mut |class, memory, _| match class {
                Class::NONE => runs += core.usable_size(memory, "reconcile") as u64,
                class => objects += price(class),
            });
            runs += core.guard.paid.load(Relaxed);
            books.payable[Kind::Objects as usize] = objects;
            books.payable[Kind::Pages as usize] = runs;
        }
        self.reopen_after_fork();
    }

    /// Compares charges, this manager's counters, and the kernel's view of resident memory. Takes
    /// some milliseconds, more for an arena of many gibibytes.
    ///
    /// If other threads allocate or free meanwhile, the numbers may not agree exactly. Where there
    /// are groups, threads that allocate or free wait while every charged object is counted.
    ///
    /// ```
    /// let kept = vec![1_u8; 1 << 20];
    /// let seen = neap::process::PROCESS.reconcile()?;
    /// assert!(seen.explained() as f64 > 0.95 * seen.resident as f64, "{seen}");
    /// # drop(kept);
    /// # Ok::<(), neap::reconcile::Errno>(())
    /// ```
    ///
    /// # Errors
    /// The kernel's error if `/proc/self/smaps` cannot be read.
    pub fn reconcile(&self) -> Result<Reconciliation, Errno> {
        let view = Mappings::own()?;
        let (mut ranges, mut count) = ([Range { start: 0, length: 0, of: Source::Arena }; RANGES], 0);
        let mut books = self.books();
        self.count_payable(&mut books, LOOKS);
        let core = self.core_if_open();
        if let Some(core) = core {
            let inside = self.gate.enter(core.objects.platform.cpu());
            core.each_range(self, &inside, &mut |range| {
                ranges.get_mut(count).into_iter().for_each(|place| *place = range);
                count += 1;
            });
        }
        let mut tally = Tally::new(&ranges[..count.min(RANGES)], books);
        tally.look(&view)?;
        let Some(core) = core else { return Ok(tally.end()) };
        for piece in 0..core.objects.pages.pieces() {
            let mut uses = [0; PIECE / 16];
            {
                let _inside = self.gate.enter(core.objects.platform.cpu());
                core.objects.pages.survey(piece, &mut uses);
            }
            tally.look_at(&view, core.objects.pages.base(), core.objects.pages.page_size(), piece, &uses);
        }
        Ok(tally.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::options::Options;
    use neap_percpu::Wait;
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::vec::Vec;

    /// A mapping that is not reported would be taken for the program's own.
    #[test]
    fn all_that_is_mapped_is_told_and_nothing_twice() {
        for nodes in [&[0, 0][..], &[0, 1, 2, 1]] {
            let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
            let machine = Virtual::new(4096, nodes.len()).with_nodes(nodes);
            // SAFETY: the manager stays in its box.
            unsafe { mm.open(machine, &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
            let core = mm.core_if_open().unwrap();
            let told = || {
                let mut ranges = Vec::new();
                core.each_range(&mm, &mm.gate.enter(0), &mut |range| ranges.push(range));
                ranges.sort_by_key(|range| range.start);
                assert!(ranges.is_sorted_by(|one, next| one.start + one.length <= next.start), "{ranges:x?}");
                assert!(ranges.len() < RANGES / 2);
                ranges.iter().map(|range| range.length).sum::<usize>()
            };
            let mapped = || core.objects.platform.mapped_bytes();
            assert_eq!(told(), mapped());
            mm.per_cpu(Wait::Long).unwrap();
            assert_eq!(told(), mapped());
            let groups = mm.groups().unwrap();
            let root = neap_groups::GroupId::ROOT;
            (0..1000).for_each(|n| _ = groups.create(root, &std::format!("{n}")).unwrap());
            let run = mm.allocate(200 << 20);
            assert_eq!(told(), mapped());
            // SAFETY: allocated above; nothing is used any more.
            unsafe {
                mm.free(run);
                mm.close();
            }
        }
    }

    #[test]
    fn sources_are_where_their_numbers_say() {
        for (at, source) in Source::ALL.iter().enumerate() {
            assert_eq!(*source as usize, at);
            assert!(Source::ALL.iter().filter(|other| other.name() == source.name()).count() == 1);
        }
        assert!(Held::ALL.iter().enumerate().all(|(at, held)| *held as usize == at));
    }
}
