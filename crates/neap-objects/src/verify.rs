//! Verification: proves that every object is in exactly one place.
//!
//! # Design
//!
//! [`Objects::verify`] runs while no other thread works on the objects. It marks the objects of
//! stacks and sheaves in their state bytes, and walks the arena from slab to slab by the frames. It
//! compares every object's byte with its slab's bitmap, and all sums with the class caches' counts.
//! Then it verifies the pages.
//!
//! # Locking
//!
//! The verification takes one lock at a time, and allocates nothing. At the end it removes its
//! marks.

use crate::class_cache::ClassCache;
use crate::cpu_caches::{CacheMode, CpuCaches};
use crate::object_state::{ACCOUNTED, ALLOCATED, CACHED, PAID, SAMPLED};
use crate::objects::Objects;
use crate::payers::Vector;
use crate::region::{REGION, StackId, closed_region_cell, objects, stack};
use crate::sheaf::{SheafCounts, SheafKind};
use crate::size_class::{CLASSES, Class, GRAIN};
use crate::slab::{On, SlabId, SlabList};
use core::fmt;
use core::ops::AddAssign;
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use neap_base::platform::nodes::MAX_NODES;
use neap_base::{Pfn, Platform, bitmap};
use neap_os::rseq::UNREGISTERED;
use neap_pages::State;

/// Bit in the state byte of a cached object. The verification sets it when it finds the object in a
/// stack or sheaf, and clears it at the end. No state has this bit.
const MET: u8 = 8;

/// Two numbers that should be equal and differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the number.
    pub what: &'static str,
    /// The class it belongs to; [`Class::NONE`] if none in particular.
    pub class: Class,
    /// Address of an object or sheaf, or number of a page or CPU; 0 if none in particular.
    pub at: usize,
    /// The number expected.
    pub expected: u64,
    /// The number found.
    pub found: u64,
}

impl Finding {
    /// Returns a finding unless both numbers are equal.
    ///
    /// # Errors
    /// Returns a [`Finding`] with both numbers if they differ.
    pub fn unless_equal(what: &'static str, class: Class, at: usize, expected: u64, found: u64) -> Result<(), Finding> {
        if expected == found { Ok(()) } else { Err(Finding { what, class, at, expected, found }) }
    }
}

impl From<neap_base::Finding> for Finding {
    fn from(finding: neap_base::Finding) -> Finding {
        let neap_base::Finding { what, at, expected, found } = finding;
        Finding { what, class: Class::NONE, at: at.number as usize, expected, found }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { what, class, at, expected, found } = self;
        write!(f, "{what}: expected {expected}, found {found}; class {} of {} bytes, at {at:#x}", class.0, class.size())
    }
}

/// Counts of a [verification](Objects::verify).
#[derive(Clone, Copy, Debug)]
pub struct Verified {
    /// Objects by place.
    pub census: Census,
    /// Number of pages in runs.
    pub run_pages: u64,
}

/// Number of objects by place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Census {
    /// Slabs.
    pub slabs: u64,
    /// Objects of slabs.
    pub objects: u64,
    /// Free objects in the bitmaps of slabs.
    pub free: u64,
    /// Free objects in stacks and sheaves.
    pub cached: u64,
    /// Objects that are the memory of sheaves.
    pub sheaves: u64,
    /// Objects that are the memory of owners' vectors.
    pub vectors: u64,
    /// Objects that the program has.
    pub allocated: u64,
    /// Objects that the program has and that are charged.
    pub accounted: u64,
    /// Objects in stacks and sheaves that are still charged.
    pub paid: u64,
    /// Objects marked as cached that are in no cache. They are in the registers of a stopped
    /// thread, or lost.
    pub in_hands: u64,
}

impl AddAssign for Census {
    fn add_assign(&mut self, other: Census) {
        self.slabs += other.slabs;
        self.objects += other.objects;
        self.free += other.free;
        self.cached += other.cached;
        self.sheaves += other.sheaves;
        self.vectors += other.vectors;
        self.allocated += other.allocated;
        self.accounted += other.accounted;
        self.paid += other.paid;
        self.in_hands += other.in_hands;
    }
}

/// Results of the walk over the arena.
struct WalkSums {
    classes: [Census; CLASSES],
    /// Slabs with free objects.
    partial: [u32; CLASSES],
    /// Holes: released pages of slabs, by class and by node.
    holes: [u64; CLASSES],
    node_holes: [u64; MAX_NODES],
    run_pages: u64,
    /// Number of vectors, by the class of their memory.
    vectors: [u64; CLASSES],
    /// The first slab whose count of neap's own objects is wrong.
    private: Result<(), Finding>,
}

impl<P: Platform> Objects<P> {
    /// Proves that every object is in exactly one place and that all counts are right. Returns
    /// what it counted.
    ///
    /// No other thread may be in a slow path, and no sequence may commit, during the call. At most
    /// `in_hands` objects may be on their way between a stack and a thread: one for every thread
    /// that may have been stopped in a fast path.
    ///
    /// # Errors
    /// Returns the first [`Finding`].
    pub fn verify(&self, in_hands: u64) -> Result<Verified, Finding> {
        self.verify_slots()?;
        let marked = self.mark_cached(0, MET);
        let walked = marked.and_then(|()| self.walk());
        // Removes the marks. After a finding the other objects stay as they are.
        let unmarked = self.mark_cached(MET, 0);
        let walk = walked?;
        unmarked?;
        let sheaves = self.verify_barns()?;
        let mut sum = Census::default();
        for class in Class::all() {
            self.verify_class(class, &walk, sheaves[class.index()])?;
            let (seen, vectors) = (walk.classes[class.index()], walk.vectors[class.index()]);
            sum += Census { sheaves: seen.sheaves - vectors, vectors, ..seen };
        }
        walk.private?;
        let vector_bytes = Class::all().map(|class| walk.vectors[class.index()] * class.size() as u64).sum();
        Finding::unless_equal("bytes of owners' vectors", Class::NONE, 0, vector_bytes, self.vector_bytes())?;
        Finding::unless_equal("numbers of slabs", Class::NONE, 0, sum.slabs, self.slabs.used().into())?;
        for (node, holes) in (0..self.pages.nodes()).map(|node| (node, walk.node_holes[node])) {
            let counted = self.pages.node(node).statistics().holes;
            Finding::unless_equal("holes of a node", Class::NONE, node, holes, counted.into())?;
        }
        let lost = sum.in_hands.saturating_sub(in_hands);
        Finding::unless_equal("objects that are cached but in no cache", Class::NONE, 0, 0, lost)?;
        self.pages.verify()?;
        Ok(Verified { census: sum, run_pages: walk.run_pages })
    }

    /// The state byte of an object that starts at `address`.
    fn state(&self, address: usize) -> &AtomicU8 {
        // SAFETY: the caller has found the address in the mapped part of the arena, which has state
        // bytes.
        unsafe { self.states.byte(address) }
    }

    /// Replaces the mark `from` by `to` on every object in stacks and full sheaves. An object that
    /// is there twice is a finding, and so is one that is not a cached object with the mark `from`.
    fn mark_cached(&self, from: u8, to: u8) -> Result<(), Finding> {
        let change = |class: Class, pool: &mut dyn Iterator<Item = *mut u8>| {
            pool.map(|object| object.addr()).try_for_each(|at| {
                let wrong = |what, found| Err(Finding { what, class, at, expected: 1, found });
                match self.class_at(core::ptr::without_provenance(at)) {
                    None => return wrong("address in the arena in a cache", 0),
                    Some(found) if found != class => return wrong("object of the class in a cache", found.0.into()),
                    Some(_) => {}
                }
                let byte = self.state(at);
                let found = byte.load(Relaxed);
                let whole = at.is_multiple_of(GRAIN) && [CACHED, PAID].contains(&(found ^ from));
                byte.store(if whole { found ^ from ^ to } else { found }, Relaxed);
                if whole { Ok(()) } else { wrong("object that is cached, once, in a cache", 0) }
            })
        };
        // All objects are visited, even after a finding.
        let mut answer = Ok(());
        for class in Class::all() {
            for cpu in self.cpu_caches.used().iter() {
                // SAFETY: no other thread works on the objects, so none holds or takes the CPU's
                // lock.
                let region = unsafe { self.cpu_caches.lock(cpu).peek() };
                for id in [StackId::local(class), StackId::remote(class)] {
                    answer = answer.and(change(class, &mut objects(stack(region, id)).iter().copied()));
                }
            }
            for cache in self.caches_of(class) {
                let cache = cache.lock();
                answer =
                    cache.full.sheaves().fold(answer, |answer, sheaf| answer.and(change(class, &mut sheaf.objects())));
            }
        }
        answer
    }

    /// Walks every page of the arena.
    fn walk(&self) -> Result<WalkSums, Finding> {
        let (empty, frames) = (Census::default(), self.pages.frames());
        let mut walk = WalkSums {
            classes: [empty; CLASSES],
            partial: [0; CLASSES],
            holes: [0; CLASSES],
            node_holes: [0; MAX_NODES],
            run_pages: 0,
            vectors: [0; CLASSES],
            private: Ok(()),
        };
        let mut page = Pfn(0);
        while page.0 < frames.pages() {
            if !self.pages.has(page.index() << self.pages.page_shift()) {
                page = page.plus(1); // In a hole of the arena there may be no tables.
                continue;
            }
            let frame = frames.frame(page);
            let pages = match frame.state() {
                State::Slab => self.walk_slab(page, &mut walk)?,
                State::Run => {
                    walk.run_pages += u64::from(frame.owner());
                    frame.owner().max(1)
                }
                _ => 1,
            };
            if frame.state() != State::Slab {
                self.verify_kinds(page, pages, Class::NONE)?;
            }
            page = page.plus(pages);
        }
        Ok(walk)
    }

    fn verify_kinds(&self, first: Pfn, pages: u32, class: Class) -> Result<(), Finding> {
        let start = self.pages.address(first);
        (start..start + pages as usize * self.pages.page_size()).step_by(1 << 12).try_for_each(|address| {
            let kind = self.class_at(core::ptr::without_provenance(address)).map_or(u8::MAX, |kind| kind.0);
            Finding::unless_equal("kind map", class, address, class.0.into(), kind.into())
        })
    }

    /// Verifies the slab that starts at a page, and all its objects. Returns its number of pages.
    fn walk_slab(&self, page: Pfn, walk: &mut WalkSums) -> Result<u32, Finding> {
        let (frames, at) = (self.pages.frames(), self.pages.address(page));
        let id = SlabId(frames.frame(page).owner());
        let known = id.0 < self.slabs.numbers();
        Finding::unless_equal("number of a slab", Class::NONE, at, 1, known.into())?;
        // SAFETY: the number was given out, so it has a descriptor. No other thread uses it.
        let (slab, consistent, listed) =
            unsafe { (self.slabs.get(id), self.slabs.is_consistent(id), SlabList::contains(&self.slabs, id)) };
        let (class, objects, free, private, order) = (slab.class, slab.objects, slab.free, slab.private, slab.order);
        let equal = |what, expected: u64, found: u64| Finding::unless_equal(what, class, at, expected, found);
        equal("first page of a slab", page.0.into(), slab.pfn.0.into())?;
        equal("class of a slab", 1, u64::from(class != Class::NONE && class.index() < CLASSES))?;
        let shape = class.slab_shape(self.pages.page_size());
        equal("order of a slab", shape.order.into(), order.into())?;
        equal("objects of a slab", shape.objects.into(), objects.into())?;
        equal("counts and bitmap of a slab", 1, consistent.into())?;
        equal("slab on the list of partly free ones", u64::from(free > 0), listed.into())?;
        equal("slab that is wholly free", 0, u64::from(free == objects))?;
        let (holes, pages) = (slab.holes, 1 << order);
        // SAFETY: the slab's number was given out, and no other thread uses its descriptor.
        let empty = unsafe { self.slabs.empty_pages(id) };
        equal("hole where an object is in use", 0, holes & !empty)?;
        for inside in (0..pages).map(|inside| frames.frame(page.plus(inside))) {
            equal("page of a slab", State::Slab as u64, inside.state() as u64)?;
            equal("owner of a slab's page", id.0.into(), inside.owner().into())?;
        }
        self.verify_kinds(page, pages, class)?;
        for inside in 0..pages {
            let useless = holes >> inside & 1 == 1 || free + private == objects;
            self.verify_owners(page.plus(inside), class, useless, walk)?;
        }
        let census = self.walk_objects(id, class, objects, at)?;
        let bytes = pages as usize * self.pages.page_size();
        equal("state bytes of a slab", census.allocated + census.cached + census.in_hands, self.bytes_set(at, bytes))?;
        // Reported last: a lost object has a more precise finding in most cases.
        walk.private = walk.private.and(equal("objects of neap's own in a slab", census.sheaves, private.into()));
        walk.classes[class.index()] += Census { slabs: 1, objects: objects.into(), ..census };
        walk.partial[class.index()] += u32::from(free > 0);
        walk.holes[class.index()] += u64::from(holes.count_ones());
        walk.node_holes[self.pages.node_of(page)] += u64::from(holes.count_ones());
        Ok(pages)
    }

    /// Verifies the owners of a slab's page. A page has owners only while the program or a cache
    /// may have an object of it. A vector is an object of neap's own, of the right class.
    fn verify_owners(&self, page: Pfn, class: Class, useless: bool, walk: &mut WalkSums) -> Result<(), Finding> {
        let (owners, known) = (self.owners(page), u64::from(self.pages.frames().frame(page).word().load(Relaxed) != 0));
        let at = self.pages.address(page);
        Finding::unless_equal("owner where no object can lie", class, at, 0, known & u64::from(useless))?;
        let Some(vector) = owners.vector() else { return Ok(()) };
        let (at, memory) = (vector.address(), Vector::class(class, self.pages.page_size()));
        let equal = |what, expected: u64, found: u64| Finding::unless_equal(what, class, at, expected, found);
        let kind = self.class_at(core::ptr::without_provenance(at)).map_or(u8::MAX, |kind| kind.0);
        equal("class of a vector's memory", memory.0.into(), kind.into())?;
        let frame = self.pages.frames().frame(self.pages.pfn(at));
        equal("vector in a slab", State::Slab as u64, frame.state() as u64)?;
        equal("place of a vector", 0, self.offset_in(memory, core::ptr::without_provenance(at)) as u64)?;
        equal("state of a vector's memory", 0, self.state(at).load(Relaxed).into())?;
        equal("factor of a vector", 1, u64::from(vector == Vector::new(at, class)))?;
        walk.vectors[memory.index()] += 1;
        Ok(())
    }

    /// Compares every object's state with the slab's bitmap.
    fn walk_objects(&self, id: SlabId, class: Class, objects: u32, start: usize) -> Result<Census, Finding> {
        let mut census = Census::default();
        // SAFETY: the number was given out, the count of objects was verified, and no other thread
        // uses the bitmap.
        let words = unsafe { self.slabs.words(id, objects).as_ref() };
        for object in 0..objects as usize {
            let at = start + object * class.size();
            let found = self.state(at).load(Relaxed);
            let free = bitmap::get(words, object);
            let count = match found {
                0 if free => &mut census.free,
                0 => &mut census.sheaves,
                _ if free => return Err(Finding { what: "free object", class, at, expected: 0, found: found.into() }),
                held if held & !SAMPLED == ALLOCATED => &mut census.allocated,
                held if held & !SAMPLED == ACCOUNTED => {
                    let owned = (self.owner_at(at) != 0).into();
                    Finding::unless_equal("owner of an object that a group pays for", class, at, 1, owned)?;
                    census.accounted += 1;
                    &mut census.allocated
                }
                PAID if self.owner_at(at) == 0 => {
                    let what = "owner of a cached object that a group pays for";
                    return Err(Finding { what, class, at, expected: 1, found: 0 });
                }
                CACHED | PAID => &mut census.in_hands,
                met if [CACHED, PAID].contains(&(met ^ MET)) => {
                    census.paid += u64::from(met == PAID ^ MET);
                    &mut census.cached
                }
                _ => {
                    let (what, expected) = ("state of an object", ALLOCATED.into());
                    return Err(Finding { what, class, at, expected, found: found.into() });
                }
            };
            *count += 1;
        }
        Ok(census)
    }

    /// Number of state bytes of a part of the arena that are not 0.
    fn bytes_set(&self, start: usize, bytes: usize) -> u64 {
        (start..start + bytes).step_by(GRAIN).filter(|&at| self.state(at).load(Relaxed) != 0).count() as u64
    }

    /// Compares the counts and lists of a class with the results of the walk.
    fn verify_class(&self, class: Class, walk: &WalkSums, sheaves: u64) -> Result<(), Finding> {
        let seen = &walk.classes[class.index()];
        let equal = |what, expected: u64, found: u64| Finding::unless_equal(what, class, 0, expected, found);
        equal("memory of sheaves", sheaves + walk.vectors[class.index()], seen.sheaves)?;
        let sum = |count: fn(&ClassCache) -> u64| self.caches_of(class).map(|cache| count(&cache.lock())).sum();
        equal("slabs of a class", seen.slabs, sum(|cache| cache.slabs.into()))?;
        equal("objects of a class", seen.objects, sum(|cache| cache.objects))?;
        equal("free objects of a class", seen.free, sum(|cache| cache.free))?;
        let listed = |cache: &ClassCache| cache.lists().iter().map(|list| u64::from(list.length)).sum();
        equal("partly free slabs", walk.partial[class.index()].into(), sum(listed))?;
        equal("holes of a class", walk.holes[class.index()], sum(|cache| cache.holes))?;
        equal("isolated slabs while no thread releases", 0, sum(|cache| cache.isolated.length.into()))?;
        for (node, cache) in self.caches_of(class).enumerate() {
            let cache = cache.lock();
            let names = cache.lists().map(|list| list.on);
            let right = matches!(names[..2], [On::Odd, On::Even] | [On::Even, On::Odd])
                && names[2..] == [On::Sidelined, On::Hollow, On::Isolated];
            equal("lists of slabs with the right names", 1, right.into())?;
            for list in cache.lists() {
                let (mut next, mut length) = (list.first(), 0);
                while let Some(id) = next
                    && length <= list.length
                {
                    // SAFETY: the lock is held. A slab on the list has a descriptor, and the walk
                    // has verified it.
                    let (slab, after, hollow) =
                        unsafe { (self.slabs.get(id), SlabList::after(&self.slabs, id), self.slabs.is_hollow(id)) };
                    equal("class of a slab on the list", class.0.into(), slab.class.0.into())?;
                    equal("node of a slab on the list", node as u64, self.pages.node_of(slab.pfn) as u64)?;
                    equal("list that a slab says it is on", list.on as u64, slab.on as u64)?;
                    equal(
                        "hollow slab with an object that is in no hole",
                        1,
                        u64::from(hollow || list.on != On::Hollow),
                    )?;
                    (next, length) = (after, length + 1);
                }
                equal("length of the list of slabs", list.length.into(), length.into())?;
            }
        }
        Ok(())
    }

    /// Verifies the sheaves of all barns. Returns the number of sheaves with memory of each class.
    fn verify_barns(&self) -> Result<[u64; CLASSES], Finding> {
        let mut all = [0; CLASSES];
        for class in Class::all() {
            for (node, cache) in self.caches_of(class).enumerate() {
                let SheafCounts { plain, bound } = self.verify_barn(class, node, &cache.lock())?;
                all[SheafKind::Plain.memory(class).index()] += u64::from(plain);
                all[SheafKind::Bound.memory(class).index()] += u64::from(bound);
            }
        }
        Ok(all)
    }

    /// Verifies the sheaves of one barn, and counts them.
    fn verify_barn(&self, class: Class, node: usize, cache: &ClassCache) -> Result<SheafCounts, Finding> {
        let mut all = SheafCounts { plain: 0, bound: 0 };
        // For each list: its sheaves, whether they are empty, and the kind of sheaf that it must
        // not have.
        let lists =
            [(&cache.full, false, None), (&cache.empty, true, Some(true)), (&cache.empty_bound, true, Some(false))];
        for (list, empty, never_bound) in lists {
            let (mut plain, mut bound) = (0, 0);
            for sheaf in list.sheaves().take(list.length() as usize + 1) {
                let at = sheaf.address();
                let equal = |what, expected: u64, found: u64| Finding::unless_equal(what, class, at, expected, found);
                equal("empty sheaf", empty.into(), sheaf.is_empty().into())?;
                equal("sheaf of the other kind on a list", 0, (never_bound == Some(sheaf.is_bound())).into())?;
                if sheaf.is_bound() {
                    let empty = sheaf.strided_runs().filter(|run| run.length == 0).count();
                    equal("strided_runs without objects", 0, empty as u64)?;
                    bound += 1;
                } else {
                    plain += 1;
                    equal("capacity of a sheaf", class.sheaf_capacity().into(), sheaf.capacity() as u64)?;
                }
                equal("objects of a sheaf", 1, (sheaf.length() <= class.sheaf_capacity() as usize).into())?;
                equal("size of a sheaf's objects", class.size() as u64, sheaf.size() as u64)?;
                let kind = self.class_at(core::ptr::without_provenance(at)).map_or(0, |kind| kind.0);
                let memory = sheaf.kind().memory(class);
                equal("class of a sheaf's memory", memory.0.into(), kind.into())?;
                equal("state of a sheaf's memory", 0, self.state(at).load(Relaxed).into())?;
                let far = sheaf.objects().filter(|&object| self.node_of(object) != node).count();
                equal("objects of another node in a barn", 0, far as u64)?;
            }
            Finding::unless_equal("sheaves in a barn", class, 0, list.length().into(), (plain + bound).into())?;
            Finding::unless_equal("bound sheaves in a barn", class, 0, list.lengths().bound.into(), bound.into())?;
            (all.plain, all.bound) = (all.plain + plain, all.bound + bound);
        }
        Ok(all)
    }

    /// Verifies regions, stacks and the table.
    fn verify_slots(&self) -> Result<(), Finding> {
        let cpu_caches = &self.cpu_caches;
        let spare = *cpu_caches.spare.lock();
        if spare != 0 {
            cpu_caches.verify_empty(spare, 1, |id| id.cells(spare))?;
        }
        cpu_caches.verify_empty(cpu_caches.closed_region(), 0, |_| closed_region_cell(cpu_caches.closed_region()))?;
        let used = cpu_caches.used();
        for cpu in 0..cpu_caches.cpus() {
            let equal =
                |what, expected: u64, found: u64| Finding::unless_equal(what, Class::NONE, cpu, expected, found);
            // SAFETY: no other thread works on the objects, so none holds or takes the CPU's lock.
            let region = unsafe { cpu_caches.lock(cpu).peek() };
            let entry = cpu_caches.entry(cpu + UNREGISTERED).load(Relaxed).addr();
            if !used.contains(cpu) {
                equal("region of a CPU that was never used", 0, region as u64)?;
                equal("table entry of a CPU that was never used", cpu_caches.closed_region() as u64, entry as u64)?;
                continue;
            }
            let regions = cpu_caches.first_region()..cpu_caches.first_region() + (cpu_caches.cpus() + 1) * REGION;
            equal("region of a CPU", 1, u64::from(regions.contains(&region) && region != spare))?;
            equal("region of a CPU", 0, ((region - regions.start) % REGION) as u64)?;
            // SAFETY: no other thread works on the objects, so none holds or takes a CPU's lock.
            let has_it = |other: usize| unsafe { cpu_caches.lock(other).peek() } == region;
            let twice = used.iter().take_while(|&other| other < cpu).any(has_it);
            equal("region of two CPUs", 0, twice.into())?;
            let owned = entry == region && cpu_caches.kind(&self.platform, cpu) == CacheMode::Rseq;
            equal("table entry of a CPU", 1, u64::from(owned || entry == cpu_caches.closed_region()))?;
            StackId::all().try_for_each(|id| cpu_caches.verify_stack(cpu, region, id))?;
        }
        let others = (0..UNREGISTERED).chain(cpu_caches.cpus() + UNREGISTERED..cpu_caches.named + UNREGISTERED);
        let (what, closed) = ("table entry of no CPU", cpu_caches.closed_region() as u64);
        others
            .map(|entry| (entry, cpu_caches.entry(entry).load(Relaxed).addr() as u64))
            .try_for_each(|(entry, found)| Finding::unless_equal(what, Class::NONE, entry, closed, found))
    }
}

impl CpuCaches {
    /// Verifies a region in which no stack has objects or room. `writable` is its mark, and `cells`
    /// says where the stacks' cells are.
    fn verify_empty(&self, region: usize, writable: u64, cells: impl Fn(StackId) -> usize) -> Result<(), Finding> {
        let mark = core::ptr::with_exposed_provenance::<u64>(region);
        // SAFETY: the region is the spare or the closed region, and a region begins with its mark.
        Finding::unless_equal("mark of a region", Class::NONE, region, writable, unsafe { mark.read() })?;
        StackId::all().try_for_each(|id| {
            let (stack, cells) = (stack(region, id), cells(id));
            [&stack.head, &stack.bottom, &stack.end].into_iter().try_for_each(|pointer| {
                let found = pointer.load(Relaxed).addr();
                Finding::unless_equal("pointer of an empty stack", id.class(), region, cells as u64, found as u64)
            })?;
            CpuCaches::verify_below(region, id, cells)
        })
    }

    /// Verifies that the cell below a stack's lowest one is null.
    fn verify_below(region: usize, id: StackId, cells: usize) -> Result<(), Finding> {
        // SAFETY: below each stack's lowest cell, and below the cell of the closed region, lies
        // another cell.
        let below = unsafe { core::ptr::with_exposed_provenance::<usize>(cells).sub(1).read() };
        Finding::unless_equal("null below a stack", id.class(), region, 0, below as u64)
    }

    fn verify_stack(&self, cpu: usize, region: usize, id: StackId) -> Result<(), Finding> {
        let (stack, cells) = (stack(region, id), id.cells(region));
        let [head, bottom, end] = [&stack.head, &stack.bottom, &stack.end].map(|pointer| pointer.load(Relaxed).addr());
        let most = cells + id.capacity() as usize * size_of::<usize>();
        let equal = |what, expected: u64, found: u64| Finding::unless_equal(what, id.class(), cpu, expected, found);
        equal("bottom of a stack", cells as u64, bottom as u64)?;
        CpuCaches::verify_below(region, id, cells)?;
        equal("end of a stack", 1, u64::from((bottom..=most).contains(&end)))?;
        equal("head of a stack", 1, u64::from(head >= bottom && head <= end && head % size_of::<usize>() == 0))
    }
}
