//! The text of the numbers that `neap stat` shows beside the live counters. It is written after
//! each tick and at a few other moments, for example when the groups are made.
//!
//! Writing the text changes nothing in the heap. neap counts the parts one after the other, so the
//! sums of a busy process agree only approximately.

use crate::mm::{Core, Mm};
use crate::numbers::live::PageLayout;
use crate::numbers::sheet::Text;
use crate::numbers::statistics::{CachedOn, Usage};
use crate::reports::map_report;
use crate::state::guard::GuardCounts;
use core::fmt::{self, Display, Write};
use core::sync::atomic::Ordering;
use neap_base::gate::Inside;
use neap_base::platform::{Linux, Platform};
use neap_groups::{GroupCount, Groups};
use neap_objects::cpu_caches::{CacheMode, FenceCounts};
use neap_objects::reuse::GrowthBeside;
use neap_objects::size_class::Class;
use neap_os::{stack, thread};
use neap_pages::Watermarks;
use neap_percpu::PerCpuData;

/// Most bytes of text for the numbers of the whole, and of a class, a CPU and a node. neap cuts off
/// longer lists.
const ROOM: [usize; 4] = [12 << 10, 128, 128, 512];
/// The most bytes of text.
const MOST: usize = 64 << 10;
/// Most times that the numbers are read until they add up. Their parts are read at slightly
/// different moments.
const LOOKS_MAX: u32 = 4;

/// The parts of a page for this many CPUs and nodes.
fn layout(cpus: usize, nodes: usize) -> PageLayout {
    let [whole, class, cpu, node] = ROOM;
    let bytes = whole + class * Class::all().count() + cpu * cpus + node * nodes;
    PageLayout { nodes, text: bytes.min(MOST) }
}

/// Makes the page of a manager that was just opened, if the process may have one.
pub(crate) fn open(mm: &Mm<Linux>) {
    if let Some(core) = mm.core_if_open().filter(|core| core.options.stat && thread::count() == Some(1)) {
        core.page.make(layout(core.objects.cpu_caches.cpus(), core.objects.pages.nodes()));
        // SAFETY: the process has one thread.
        unsafe { core.attach_live() };
    }
}

/// Publishes the numbers of the process's manager.
pub(crate) fn publish(mm: &Mm<Linux>, inside: &Inside<'_>) {
    let Some(core) = mm.core_if_open().filter(|core| core.options.stat) else { return };
    // Runs on a separate stack, because formatting needs much stack.
    let _ = stack::apart(|| publish_core(mm, inside, core));
}

fn publish_core(mm: &Mm<Linux>, inside: &Inside<'_>, core: &Core<Linux>) {
    core.note_totals();
    let no_sequences = core.objects.platform.no_sequences();
    let why: &dyn Display = match &no_sequences {
        _ if !core.options.rseq => &"rseq:off was set",
        Some(reason) => reason,
        None if !core.objects.cpu_caches.has_rseq() => &"no BMI1 and BMI2, or too many CPUs",
        None => &"restartable sequences and fences work",
    };
    core.page.publish(|text| core.describe(mm, inside, why, text));
}

impl<P: Platform> Core<P> {
    /// Writes all numbers as one JSON object. `why` says why restartable sequences are used or not.
    fn describe(&self, mm: &Mm<P>, inside: &Inside<'_>, why: &dyn Display, text: &mut Text<'_>) -> fmt::Result {
        self.describe_mode(inside, why, text)?;
        self.describe_pages(inside, text)?;
        self.describe_nodes(text)?;
        map_report::describe(mm, inside, text)?;
        self.describe_memory(text)?;
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
        let cpus = cpus.filter(|&(_, cached, pages)| cached.stacks > 0 || pages > 0);
        text.list(cpus, |text, (cpu, CachedOn { bytes, stacks }, pages)| {
            let kind = kind_name(self.objects.cpu_caches.kind(&self.objects.platform, cpu));
            write!(text, "{{\"cpu\":{cpu},\"kind\":\"{kind}\",\"cached_bytes\":{bytes},")?;
            let high = self.objects.pages.list_high_on(cpu).unwrap_or(0);
            write!(text, "\"stacks\":{stacks},\"page_list\":{pages},\"list_high\":{high}}}")
        })?;
        let truncated = text.truncated;
        write!(text, ",\"truncated\":{truncated}}}")
    }

    fn describe_mode(&self, inside: &Inside<'_>, why: &dyn Display, text: &mut Text<'_>) -> fmt::Result {
        let (objects, version) = (&self.objects, env!("CARGO_PKG_VERSION"));
        let kind = if objects.cpu_caches.has_rseq() { CacheMode::Rseq } else { CacheMode::Atomic };
        write!(text, "{{\"pid\":{},\"version\":\"{version}\",", self.page.process.load(Ordering::Relaxed))?;
        write!(text, "\"mode\":{{\"slots\":\"{}\",\"why\":\"{why}\",\"isolated_cpus\":", kind_name(kind))?;
        let isolated = (0..objects.cpu_caches.cpus()).filter(|&cpu| objects.platform.is_isolated(cpu));
        text.list(isolated, |text, cpu| write!(text, "{cpu}"))?;
        let (background, page_size) = (self.background.state_name(), objects.pages.page_size());
        write!(text, ",\"background\":\"{background}\",\"interval_ms\":{},", self.settings.interval() / 1_000_000)?;
        write!(text, "\"page_size\":{page_size},\"huge\":{}}},", objects.pages.uses_huge_pages())?;
        write!(text, "\"settings\":{{{}}},\"container\":", self.settings)?;
        self.describe_container(inside, text)?;
        self.describe_at_limit(text)
    }

    fn describe_pages(&self, inside: &Inside<'_>, text: &mut Text<'_>) -> fmt::Result {
        let mut looks = (0..LOOKS_MAX).map(|_| self.usage());
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
        match self.groups.get().map(|groups| groups.count_inside(inside)) {
            Some(GroupCount { live, dying, ids, .. }) => {
                write!(text, "\"groups\":{{\"live\":{live},\"dying\":{dying},\"ids\":{ids}}},")?;
            }
            None => write!(text, "\"groups\":null,")?,
        }
        write!(text, "\"has_shrinkers\":{},", self.reclaim.get().is_some())?;
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
        write!(text, "\"grown_in_sweeps\":{},\"released\":{},", reuse.grown, reuse.released)?;
        let GrowthBeside { free_pages, barns, slabs } = reuse.beside;
        write!(text, "\"beside_free_pages\":{free_pages},\"beside_barns\":{barns},\"beside_slabs\":{slabs},")?;
        write!(text, "\"waits_in_vain\":{}}},", self.objects.helper.late())?;
        if let Some(region) = self.guard.region() {
            let (live, GuardCounts { guarded, refused }) = region.numbers();
            let bytes = u64::from(live) * region.page_size as u64;
            write!(
                text,
                "\"guard\":{{\"live\":{live},\"bytes\":{bytes},\"guarded\":{guarded},\"refused\":{refused}}},"
            )?;
        }
        // Relaxed: statistics.
        let [ticks, drains] =
            [&self.maintenance.ticks, &self.maintenance.drains].map(|count| count.load(Ordering::Relaxed));
        let FenceCounts { fences, skipped } = self.objects.cpu_caches.counters();
        write!(text, "\"ticks\":{ticks},\"drains\":{drains},\"fences\":{fences},\"skipped\":{skipped},")?;
        write!(text, "\"busy\":{},", self.objects.busy())
    }

    /// Writes where the numbers of groups, of per-CPU data, of the CPUs' caches and of charged
    /// objects in caches lie in memory, for a command that reads them there, since no thread of the
    /// process answers or ticks.
    fn describe_memory(&self, text: &mut Text<'_>) -> fmt::Result {
        write!(text, "\"memory\":{{\"groups\":")?;
        write_layout(text, self.groups.get().map(|groups| groups.memory_layout(&self.objects.platform)))?;
        write!(text, ",\"group_ids\":")?;
        write_layout(text, self.groups.get().map(Groups::ids_layout))?;
        write!(text, ",\"group_waits\":")?;
        write_layout(text, self.groups.get().map(Groups::waits_layout))?;
        write!(text, ",\"per_cpu\":")?;
        write_layout(text, self.per_cpu.get().map(PerCpuData::memory_layout))?;
        write!(text, ",\"stacks\":")?;
        write_layout(text, Some(self.objects.cpu_caches.memory_layout()))?;
        write!(text, ",\"charged\":")?;
        write_layout(text, self.groups.get().map(|_| self.objects.charged_layout()))?;
        write!(text, ",\"lists\":")?;
        write_layout(text, Some(self.objects.pages.memory_layout()))?;
        write!(text, "}},")
    }

    fn describe_nodes(&self, text: &mut Text<'_>) -> fmt::Result {
        let pages = &self.objects.pages;
        write!(text, "\"nodes\":")?;
        text.list((0..pages.nodes()).map(|node| (node, pages.node(node).statistics())), |text, (node, of)| {
            write!(text, "{{\"node\":{node},\"managed\":{},\"free\":{},", of.managed, of.free)?;
            write!(text, "\"backed_free\":{},\"used\":{},", of.backed_free, of.used)?;
            write!(text, "\"listed\":{},\"highs\":{},", of.listed, of.list_highs)?;
            write!(text, "\"zone_waits\":{},\"misses\":{},", of.zone_waits, of.node_misses)?;
            let (table, high) = (pages.lists_table(node), pages.first_list_high(node));
            write!(text, "\"lists_table\":{table},\"first_list_high\":{high},")?;
            write_watermarks(text, of.watermarks)?;
            text.write_char('}')
        })?;
        write!(text, ",\"unbound_segments\":{},", pages.statistics().unbound_segments)
    }
}

/// Writes the layout, if there is one, as an object.
fn write_layout<const N: usize>(text: &mut Text<'_>, layout: Option<[(&str, u64); N]>) -> fmt::Result {
    let Some(layout) = layout else { return text.write_str("null") };
    for (at, (name, value)) in layout.iter().enumerate() {
        write!(text, "{}\"{name}\":{value}", if at == 0 { '{' } else { ',' })?;
    }
    text.write_char('}')
}

fn write_watermarks(text: &mut Text<'_>, Watermarks { min, low, high }: Watermarks) -> fmt::Result {
    write!(text, "\"watermarks\":{{\"min\":{min},\"low\":{low},\"high\":{high}}}")
}

fn kind_name(kind: CacheMode) -> &'static str {
    if kind == CacheMode::Rseq { "rseq" } else { "atomic" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Hooks;
    use crate::numbers::sheet::REPORT_AT;
    use crate::numbers::sheet::tests::Memory;
    use crate::options::Options;
    use crate::options::settings::page_budget;
    use neap_os::memory;
    use neap_os::nodes::MAX_NODES;
    use neap_testing::virtual_platform::Virtual;
    use std::string::String;
    use std::vec::Vec;

    /// The object that a manager writes about itself into a page of `words` words.
    fn described(mm: &Mm<Virtual>, words: usize) -> String {
        let memory = Memory::new(words);
        memory.sheet().publish(1, 1, |text| mm.core().unwrap().describe(mm, &mm.gate.enter(0), &"a test", text));
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
            let text = described(&mm, MOST / 8);
            assert_eq!(number(&text, "unaccounted"), 0, "{text}");
            assert_eq!(number(&text, "ticks"), tick);
            assert!(number(&text, "used") > 70 << 20, "{text}");
            assert!(text.contains("\"slots\":\"atomic\",\"why\":\"a test\",\"isolated_cpus\":[]"), "{text}");
            assert!(text.contains("{\"size\":1024,\"slabs\":1,\"objects\":128,"), "{text}");
            assert!(text.ends_with("],\"truncated\":false}"), "{text}");
            // What rests for a tick is drained.
            assert_eq!(sum(&text, "cpus", "stacks") > 0, tick < 2, "{text}");
            mm.tick(tick as u64);
        }
        // A lost page is found.
        let core = mm.core().unwrap();
        core.count_run(0, 4096);
        assert_eq!(number(&described(&mm, MOST / 8), "unaccounted"), 4096);
        core.count_run(4096, 0);
        // A page that is too small has a part of the numbers, and says so.
        let text = described(&mm, described(&mm, MOST / 8).len() / 8);
        assert!(text.ends_with("],\"cpus\":[],\"truncated\":true}"), "{text}");
        // SAFETY: allocated above, once each.
        given.into_iter().for_each(|memory| unsafe { mm.free(memory) });
        let text = described(&mm, MOST / 8);
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
    fn node_and_cpu_shares_add_up_to_list_and_watermark_totals() {
        let mut mm: Mm<Virtual> = Mm::new(Hooks { open: |_| (), spawn: None, ticked: None });
        let options = Options { limit: 256 << 20, ..Options::DEFAULT };
        // SAFETY: the manager stays where it is until it is closed.
        unsafe { mm.open(Virtual::new(4096, 2).with_nodes(&[0, 1]), &options) }.unwrap();
        let blocks = [0, 1].map(|cpu| {
            Virtual::run_on(cpu);
            mm.allocate(100)
        });
        let text = described(&mm, MOST / 8);
        assert_eq!(number(&text, "budget"), 256 << 8, "{text}");
        let highs = number(&text, "highs");
        assert!(highs > 0, "{text}");
        assert_eq!([sum(&text, "nodes", "highs"), sum(&text, "cpus", "list_high")], [highs, highs], "{text}");
        // The first watermarks in the text are the sums over both nodes.
        let both = text.split_once("\"watermarks\":").unwrap().1;
        for mark in ["min", "low", "high"] {
            assert_eq!(sum(&text, "nodes", mark), number(both, mark), "{mark} in {text}");
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
            let text = described(mm, MOST / 8);
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
        assert_eq!(layout(10_000, MAX_NODES).text, MOST);
        assert!(layout(10_000, MAX_NODES).text_at() + MOST <= REPORT_AT);
        assert!(layout(2, 1).bytes(REPORT_AT) <= 32 << 10 || memory::page_size() > 4096);
    }
}
