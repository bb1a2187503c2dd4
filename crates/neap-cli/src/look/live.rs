//! The live counters in a process's page of numbers, and the sums of them.
//!
//! The process stores a counter whenever it changes, so the counters are current even if the
//! process sleeps or is stopped. `crates/neap/src/numbers/live.rs` describes the format. Any
//! process of the user may have written the counters. So this module checks sizes, and its sums do
//! not overflow.

use std::io;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

/// Offset and length of the head.
pub(crate) const HEAD: usize = 128;
const HEAD_LENGTH: usize = 64;
/// Bytes of a zone's counts, of a class's shape, and of a class's counts on a node.
const ZONE: usize = 128;
const SHAPE: usize = 16;
const CLASS: usize = 32;
/// Most nodes and classes of a page. A page with more is damaged.
const MOST_NODES: usize = 32;
const MOST_CLASSES: usize = 256;
/// Most readings of the counters. This command stops earlier if two readings agree. Two readings of
/// a process that allocates all the time may never agree.
const READINGS: u32 = 8;

/// Reads bytes of a page, from an offset on.
pub(crate) type Read<'a> = dyn Fn(u64, &mut [u8]) -> io::Result<()> + 'a;

/// The places of the parts of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageLayout {
    page_size: u64,
    nodes: usize,
    classes: usize,
}

impl PageLayout {
    /// Reads the layout of a page.
    ///
    /// # Errors
    /// Returns an error if the head cannot be read, or is damaged.
    pub(crate) fn read(read: &Read<'_>) -> Result<PageLayout> {
        let mut head = [0; HEAD_LENGTH];
        read(HEAD as u64, &mut head).context("cannot read the page of numbers")?;
        let word = |at| u32_at(&head, at) as usize;
        let (page_size, nodes, classes) = (word(0), word(4), word(8));
        let is_sound = (1..=MOST_NODES).contains(&nodes) && (1..=MOST_CLASSES).contains(&classes);
        let is_size = page_size.is_power_of_two() && (4096..=1 << 20).contains(&page_size);
        ensure!(is_sound && is_size, "the page of numbers is damaged: {nodes} nodes, {classes} classes");
        Ok(PageLayout { page_size: page_size as u64, nodes, classes })
    }

    fn zones_at(self) -> usize {
        HEAD_LENGTH
    }

    fn shapes_at(self) -> usize {
        self.zones_at() + self.nodes * ZONE
    }

    fn classes_at(self) -> usize {
        (self.shapes_at() + self.classes * SHAPE).next_multiple_of(CLASS)
    }

    fn length(self) -> usize {
        self.classes_at() + self.nodes * self.classes * CLASS
    }

    /// Offset of the text in the page.
    pub(crate) fn text_at(self) -> usize {
        HEAD + self.length()
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap_or_default())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
}

/// Counts of a node: pages, and pages and calls since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NodeCounts {
    free: u64,
    releasing: u64,
    managed: u64,
    backed_free: u64,
    holes: u64,
    populated: u64,
    grown: u64,
    released: u64,
    calls: u64,
    failures: u64,
    punched: u64,
    refilled: u64,
    /// Bytes of the tables of all zones when this one grew last.
    table_bytes: u64,
}

impl NodeCounts {
    /// Pages that the zone has handed out, including those in CPUs' lists. Holes (released pages of
    /// slabs) do not count.
    fn used(self) -> u64 {
        self.managed.saturating_sub(self.free).saturating_sub(self.releasing).saturating_sub(self.holes)
    }
}

/// A class, and its counts on all nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ClassCounts {
    size: u64,
    objects_of_slab: u64,
    pages_of_slab: u64,
    slabs: u64,
    holes: u64,
    in_slabs: u64,
    in_barn: u64,
}

impl ClassCounts {
    fn objects(self) -> u64 {
        self.slabs.saturating_mul(self.objects_of_slab)
    }

    /// Bytes of objects that are neither in slabs nor in barns.
    fn out(self) -> u64 {
        let free = self.in_slabs.saturating_add(self.in_barn);
        self.objects().saturating_sub(free).saturating_mul(self.size)
    }

    /// Bytes of free objects in slabs and barns. Holes (released pages of slabs) do not count.
    fn free(self, page_size: u64) -> u64 {
        let free = self.in_slabs.saturating_add(self.in_barn).min(self.objects());
        free.saturating_mul(self.size).saturating_sub(self.holes.saturating_mul(page_size))
    }

    /// Pages of slabs, without holes.
    fn pages(self) -> u64 {
        self.slabs.saturating_mul(self.pages_of_slab).saturating_sub(self.holes)
    }
}

/// The live counters of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    page_size: u64,
    zones: Vec<NodeCounts>,
    classes: Vec<ClassCounts>,
    run_bytes: u64,
    stacked_bytes: u64,
    limit: u64,
    /// Allocations that were refused so far.
    refused: u64,
    /// Objects that the program's shrinkers have freed so far.
    shrunk: u64,
    /// Whether two readings agreed. If not, the process allocates, and the counters are of slightly
    /// different moments.
    is_settled: bool,
}

/// Sums of the live counters. `listed_pages` counts pages, and the other sums are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LiveSums {
    pub(crate) mapped: u64,
    pub(crate) tables: u64,
    pub(crate) used: u64,
    pub(crate) cached: u64,
    pub(crate) free_resident: u64,
    /// Part of `cached`: objects on the stacks of CPUs, as the last tick found them.
    pub(crate) stacked: u64,
    /// Pages in CPUs' lists, or on their way between a list and a zone.
    pub(crate) listed_pages: u64,
}

/// Bytes of the arena's pages by use, as far as the live counters tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArenaSums {
    /// Objects that are on no stack of a CPU, in no sheaf and in no slab, with neap's own.
    pub(crate) in_use: u64,
    pub(crate) on_stacks: u64,
    pub(crate) in_sheaves: u64,
    /// Free objects in slabs, holes included.
    pub(crate) in_slabs: u64,
    /// Ends of slabs that hold no object.
    pub(crate) ends: u64,
    /// Released pages of slabs, a part of `in_slabs`.
    pub(crate) holes: u64,
    pub(crate) runs: u64,
    pub(crate) listed: u64,
}

impl Live {
    /// Reads the counters until two readings agree, at most [`READINGS`] times.
    pub(crate) fn read(read: &Read<'_>, layout: PageLayout) -> Result<Live> {
        let (mut bytes, mut before) = (vec![0; layout.length()], Vec::new());
        let mut is_settled = false;
        for _ in 0..READINGS {
            read(HEAD as u64, &mut bytes).context("cannot read the page of numbers")?;
            is_settled = bytes == before;
            if is_settled {
                break;
            }
            before.clone_from(&bytes);
        }
        Ok(Live::parse(&bytes, layout, is_settled))
    }

    fn parse(bytes: &[u8], layout: PageLayout, is_settled: bool) -> Live {
        let half = |at: usize| u64::from(u32_at(bytes, at));
        let zone = |node: usize| {
            let at = layout.zones_at() + node * ZONE;
            // Counts that change together share a word, the first in its low half.
            let pair = |at: usize| (u64_at(bytes, at) & u64::from(u32::MAX), u64_at(bytes, at) >> 32);
            let ((free, releasing), (managed, backed_free)) = (pair(at), pair(at + 8));
            let [populated, grown, released, calls, failures, punched, refilled, table_bytes] =
                core::array::from_fn(|word| u64_at(bytes, at + 24 + 8 * word));
            NodeCounts {
                free,
                releasing,
                managed,
                backed_free,
                holes: pair(at + 16).0,
                populated,
                grown,
                released,
                calls,
                failures,
                punched,
                refilled,
                table_bytes,
            }
        };
        let class = |class: usize| {
            let at = layout.shapes_at() + class * SHAPE;
            let shape = ClassCounts {
                size: half(at),
                objects_of_slab: half(at + 4),
                pages_of_slab: half(at + 8),
                ..ClassCounts::default()
            };
            (0..layout.nodes).fold(shape, |sum, node| {
                let at = layout.classes_at() + (node * layout.classes + class) * CLASS;
                ClassCounts {
                    slabs: sum.slabs + half(at),
                    holes: sum.holes + half(at + 4),
                    in_slabs: sum.in_slabs.saturating_add(u64_at(bytes, at + 8)),
                    in_barn: sum.in_barn.saturating_add(u64_at(bytes, at + 16)),
                    ..sum
                }
            })
        };
        Live {
            page_size: layout.page_size,
            zones: (0..layout.nodes).map(zone).collect(),
            classes: (0..layout.classes).map(class).collect(),
            run_bytes: u64_at(bytes, 16),
            stacked_bytes: u64_at(bytes, 24),
            limit: u64_at(bytes, 32),
            refused: u64_at(bytes, 40),
            shrunk: u64_at(bytes, 48),
            is_settled,
        }
    }

    /// Replaces the bytes on CPUs' stacks by newer ones.
    pub(crate) fn set_stacked(&mut self, bytes: u64) {
        self.stacked_bytes = bytes;
    }

    /// Bytes of an object of each class. Class 0 does not exist.
    pub(crate) fn class_sizes(&self) -> Vec<u64> {
        self.classes.iter().map(|class| class.size).collect()
    }

    fn zones(&self, count: impl Fn(NodeCounts) -> u64) -> u64 {
        self.zones.iter().fold(0, |sum, &zone| sum.saturating_add(count(zone)))
    }

    fn of_classes(&self, count: impl Fn(ClassCounts) -> u64) -> u64 {
        self.classes.iter().fold(0, |sum, &class| sum.saturating_add(count(class)))
    }

    /// Returns the sums. Pages that the zones have handed out, and that are neither in slabs nor in
    /// runs, count as pages of CPUs' lists.
    pub(crate) fn sums(&self) -> LiveSums {
        let bytes = |pages: u64| pages.saturating_mul(self.page_size);
        let owned = bytes(self.of_classes(ClassCounts::pages)).saturating_add(self.run_bytes);
        let listed_pages = bytes(self.zones(NodeCounts::used)).saturating_sub(owned) / self.page_size;
        let stacked = self.stacked_bytes.min(self.of_classes(ClassCounts::out));
        let cached = self.of_classes(|class| class.free(self.page_size)).saturating_add(stacked);
        LiveSums {
            mapped: bytes(self.zones(|zone| zone.managed)),
            tables: self.zones.iter().map(|zone| zone.table_bytes).max().unwrap_or(0),
            used: owned.saturating_sub(cached),
            cached,
            free_resident: bytes(self.zones(|zone| zone.backed_free).saturating_add(listed_pages)),
            stacked,
            listed_pages,
        }
    }

    /// Returns the bytes of the arena's pages by use.
    pub(crate) fn arena(&self) -> ArenaSums {
        let (sums, page) = (self.sums(), self.page_size);
        let objects = |count: fn(ClassCounts) -> u64| self.of_classes(|of| count(of).saturating_mul(of.size));
        let slabs = self.of_classes(|of| of.slabs.saturating_mul(of.pages_of_slab).saturating_mul(page));
        ArenaSums {
            in_use: self.of_classes(ClassCounts::out).saturating_sub(sums.stacked),
            on_stacks: sums.stacked,
            in_sheaves: objects(|of| of.in_barn),
            in_slabs: objects(|of| of.in_slabs),
            ends: slabs.saturating_sub(objects(ClassCounts::objects)),
            holes: self.of_classes(|of| of.holes).saturating_mul(page),
            runs: self.run_bytes,
            listed: sums.listed_pages.saturating_mul(page),
        }
    }

    /// Replaces numbers in `object`, which are as old as the last tick, by the counters.
    pub(crate) fn put_into(&self, object: &mut Map<String, Value>) {
        let sums = self.sums();
        let holes = self.zones(|zone| zone.holes);
        let budget = if self.limit == 0 { Value::Null } else { (self.limit / self.page_size).into() };
        put(object, "mode", json!({"page_size": self.page_size}));
        put(
            object,
            "bytes",
            json!({
                "mapped": sums.mapped, "tables": sums.tables, "used": sums.used, "cached": sums.cached, "free_resident": sums.free_resident,
                "on_stacks": sums.stacked,
            }),
        );
        put(
            object,
            "pages",
            json!({
                "managed": self.zones(|zone| zone.managed), "free": self.zones(|zone| zone.free),
                "backed_free": self.zones(|zone| zone.backed_free), "used": self.zones(NodeCounts::used),
                "listed": sums.listed_pages, "releasing": self.zones(|zone| zone.releasing), "budget": budget,
                "populated": self.zones(|zone| zone.populated),
            }),
        );
        put(
            object,
            "holes",
            json!({
                "pages": holes, "released": self.zones(|zone| zone.punched),
                "refilled": self.zones(|zone| zone.refilled),
            }),
        );
        put(
            object,
            "released",
            json!({
                "pages": self.zones(|zone| zone.released), "calls": self.zones(|zone| zone.calls),
                "failures": self.zones(|zone| zone.failures),
            }),
        );
        put(object, "reuse", json!({"grown": self.zones(|zone| zone.grown)}));
        let nodes = list(object, "nodes");
        for (node, zone) in self.zones.iter().enumerate() {
            let counts = json!({
                "node": node, "managed": zone.managed, "free": zone.free, "backed_free": zone.backed_free,
                "used": zone.used(),
            });
            put_row(nodes, "node", counts);
        }
        let classes = list(object, "classes");
        let has_slabs =
            |size: &Value| self.classes.iter().any(|class| class.slabs > 0 && size.as_u64() == Some(class.size));
        classes.retain(|row| has_slabs(&row["size"]));
        for class in self.classes.iter().filter(|class| class.slabs > 0) {
            let counts = json!({
                "size": class.size, "slabs": class.slabs, "objects": class.objects(), "in_slabs": class.in_slabs,
                "holes": class.holes, "in_barn": class.in_barn,
            });
            put_row(classes, "size", counts);
        }
        object.insert("refused".to_string(), self.refused.into());
        object.insert("shrunk".to_string(), self.shrunk.into());
        object.insert("settled".to_string(), self.is_settled.into());
    }
}

/// Puts entries into the object under `key`. If there is none, adds an empty object first.
pub(crate) fn put(object: &mut Map<String, Value>, key: &str, entries: Value) {
    let place = object.entry(key).or_insert_with(|| json!({}));
    if let (Some(place), Value::Object(entries)) = (place.as_object_mut(), entries) {
        place.extend(entries);
    }
}

/// Returns the array under `key`. If there is none, puts an empty array there.
pub(crate) fn list<'a>(object: &'a mut Map<String, Value>, key: &str) -> &'a mut Vec<Value> {
    let place = object.entry(key).or_insert(Value::Null);
    if !place.is_array() {
        *place = json!([]);
    }
    place.as_array_mut().expect("an array")
}

/// Puts entries into the row that has their value of `key`. If there is none, adds a row.
pub(crate) fn put_row(rows: &mut Vec<Value>, key: &str, entries: Value) {
    let Value::Object(entries) = entries else { return };
    match rows.iter_mut().filter_map(Value::as_object_mut).find(|row| row.get(key) == entries.get(key)) {
        Some(row) => row.extend(entries),
        None => rows.push(entries.into()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const NODES: usize = 2;
    pub(crate) const CLASSES: usize = 3;

    /// The counters of a page, from its head to the start of the text: two nodes, and classes of 64
    /// and 1024 bytes.
    pub(crate) fn bytes() -> Vec<u8> {
        let mut words: Vec<u32> = vec![4096, NODES as u32, CLASSES as u32, 0];
        let long = |words: &mut Vec<u32>, numbers: &[u64]| {
            numbers.iter().for_each(|number| words.extend([*number as u32, (number >> 32) as u32]));
        };
        // Bytes of runs and on stacks, the limit, refused allocations, and objects of shrinkers.
        long(&mut words, &[40 * 4096, 10 * 64, 1 << 30, 138, 21, 0]);
        // Free, releasing, managed, free with memory, holes. Then the counts since the start.
        for (zone, first) in [([900, 4, 1000, 70, 1], 100), ([950, 0, 1000, 30, 0], 1000)] {
            words.extend(zone);
            words.push(0);
            long(&mut words, &core::array::from_fn::<u64, 8, _>(|count| first + count as u64));
            words.extend([0; 10]);
        }
        for shape in [[0, 0, 0, 0], [64, 512, 8, 0], [1024, 128, 32, 0]] {
            words.extend(shape);
        }
        words.extend(vec![0; words.len().next_multiple_of(8) - words.len()]);
        for (slabs, holes, in_slabs, in_barn) in
            [(0, 0, 0, 0), (2, 1, 300, 64), (1, 0, 28, 0), (0, 0, 0, 0), (1, 0, 12, 0), (0, 0, 0, 0)]
        {
            words.extend([slabs, holes]);
            long(&mut words, &[in_slabs, in_barn, 0]);
        }
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn layout() -> PageLayout {
        PageLayout { page_size: 4096, nodes: NODES, classes: CLASSES }
    }

    fn reader(bytes: Vec<u8>) -> impl Fn(u64, &mut [u8]) -> io::Result<()> {
        move |at, to| {
            let at = at as usize - HEAD;
            to.copy_from_slice(bytes.get(at..at + to.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
    }

    #[test]
    fn counters_are_read_and_summed() {
        let read = reader(bytes());
        assert_eq!(PageLayout::read(&read).unwrap(), layout());
        let live = Live::read(&read, layout()).unwrap();
        assert!(live.is_settled);
        let sums = live.sums();
        // Slabs of 24 pages and of 32 pages, less a hole.
        let (owned, page) = ((24 + 32 - 1 + 40) * 4096, 4096);
        let free = (300 + 64 + 12) * 64 - page + 28 * 1024;
        let listed = 1000 - 900 - 4 - 1 + 50 - (24 + 32 - 1 + 40);
        assert_eq!(
            sums,
            LiveSums {
                mapped: 2000 * page,
                tables: 1007,
                used: owned - free - 640,
                cached: free + 640,
                free_resident: (100 + listed) * page,
                stacked: 640,
                listed_pages: listed,
            }
        );
    }

    #[test]
    fn live_counters_replace_those_of_the_text() {
        let live = Live::read(&reader(bytes()), layout()).unwrap();
        let mut object = json!({
            "bytes": {"used": 1, "unaccounted": 77}, "nodes": [{"node": 0, "used": 1, "misses": 5}],
            "classes": [{"size": 64, "slabs": 9, "in_slots": 10}, {"size": 80, "slabs": 1}],
            "mode": {"page_size": 1, "slots": "rseq"},
        });
        let object = object.as_object_mut().unwrap();
        live.put_into(object);
        assert_eq!(object["bytes"]["used"], live.sums().used);
        assert_eq!((&object["bytes"]["unaccounted"], &object["mode"]["slots"]), (&77.into(), &"rseq".into()));
        assert_eq!(object["nodes"][0]["misses"], 5);
        assert_eq!([&object["nodes"][0]["used"], &object["nodes"][1]["used"]], [95, 50]);
        let classes = object["classes"].as_array().unwrap();
        assert_eq!(classes.len(), 2, "the class without slabs is gone: {classes:?}");
        assert_eq!((&classes[0]["in_slots"], &classes[0]["slabs"]), (&10.into(), &3.into()));
        assert_eq!((&object["pages"]["budget"], &object["holes"]["pages"]), (&(1 << 18).into(), &1.into()));
        assert_eq!([&object["refused"], &object["shrunk"]], [138, 21]);
        assert_eq!([&object["pages"]["populated"], &object["reuse"]["grown"]], [1100, 1102]);
        let released = ["pages", "calls", "failures"].map(|key| &object["released"][key]);
        assert_eq!(released, [1104, 1106, 1108]);
        assert_eq!([&object["holes"]["released"], &object["holes"]["refilled"]], [1110, 1112]);
        // Without a text, the live counters are all there is.
        let mut empty = Map::new();
        live.put_into(&mut empty);
        assert_eq!(empty["bytes"]["cached"], live.sums().cached);
    }

    #[test]
    fn live_read_of_changing_counters_is_bounded() {
        let looks = core::cell::Cell::new(0_u32);
        let read = |_: u64, to: &mut [u8]| {
            looks.set(looks.get() + 1);
            to.fill(looks.get() as u8);
            Ok(())
        };
        assert!(!Live::read(&read, layout()).unwrap().is_settled);
        assert_eq!(looks.get(), READINGS);
    }

    #[test]
    fn damaged_heads_are_refused_and_damaged_counters_saturate() {
        for (at, value) in [(0, 0), (0, 4095), (0, u32::MAX), (4, 0), (4, 33), (8, 0), (8, 257), (8, u32::MAX)] {
            let mut bytes = bytes();
            bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
            let error = PageLayout::read(&reader(bytes)).unwrap_err();
            assert!(error.to_string().contains("damaged"), "{error}");
        }
        let mut bytes = bytes();
        bytes[16..].fill(0xff);
        let live = Live::read(&reader(bytes), layout()).unwrap();
        live.put_into(&mut Map::new());
        assert_eq!(live.sums().cached, u64::MAX);
    }
}
