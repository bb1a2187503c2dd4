//! Objects: the slow path of allocating and freeing, and the return of slabs to the pages.
//!
//! # Design
//!
//! A class has a [class cache](crate::class_cache) on each node. The slabs of a class cache, and
//! the objects in its barn, lie on pages of its node. A thread that finds its CPU's slot busy does
//! not wait for it, but uses the class cache directly. This module never reclaims. If there is no
//! page, it returns `None`, and the caller decides what to do.
//!
//! # Locking
//!
//! A thread takes no other lock while it holds a class's mutex. It allocates and frees pages
//! after it has unlocked the mutex.

use crate::class_cache::{ClassCache, Row, SharedCache};
use crate::cpu_caches::{Attempt, CpuCaches};
use crate::fast_path::FastPath;
use crate::helper::Helper;
pub use crate::hole_punching::Punched;
use crate::isolated_use::IsolatedUse;
use crate::kind_map::KindEntry;
use crate::live::ClassCell;
use crate::object_state::{self, ACCOUNTED, ALLOCATED, CACHED, PAID, States};
use crate::other_nodes::Others;
use crate::region::StackId;
use crate::reuse::Reuse;
use crate::sheaf::{SheafCounts, SheafKind};
use crate::size_class::{CLASSES, Class};
use crate::slab::{SlabId, SlabTable, TABLE_SHIFT};
use crate::uncharger::{GateSide, Uncharger};
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use neap_base::gate::Inside;
use neap_base::live::{Cells, Link};
use neap_base::platform::{Errno, Platform};
use neap_base::{Mutex, Order, Pfn};
use neap_pages::{Block, EarlyTables, NodePages, Shape, SideTable, ZoneCell};

/// Indexes into [`Shape::tables`].
const KINDS: usize = 0;
const DESCRIPTORS: usize = 1;
/// The first of [`object_state::TABLES`] tables.
const STATES: usize = 2;

/// If a class has at least this number of slabs on the near node, neap populates a new slab's
/// memory at once. An untouched slab is then at most a quarter of the class's memory. With fewer
/// slabs, the kernel adds each page when the program first touches it.
const FILLED: usize = 4;

/// If a class has at least this many bytes in slabs, a new slab may take a huge page.
const BULK: usize = 1 << 20;

/// Configuration of an instance.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The most address space for memory that is handed out, in bytes.
    pub span: usize,
    /// The most pages that may be in use; `None`: no limit.
    pub budget: Option<u32>,
    /// Whether to use restartable sequences where they work.
    pub rseq: bool,
    /// Whether fresh memory and runs may get huge pages.
    pub huge: bool,
    /// The most pages that a CPU's page list keeps; 0: no lists; `None`: tuned at run time.
    pub list_high: Option<u32>,
    /// How often neap may double the batch of pages that moves between a page list and the zone.
    pub batch_scale: u32,
}

/// A kind of mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingKind {
    /// Memory that is handed out.
    Arena,
    /// Frames, and maps of pages.
    PageTables,
    /// State bytes of objects.
    States,
    /// Kinds of pages, and descriptors of slabs.
    SlabTables,
    /// Page lists, and the nodes' class caches.
    Lists,
    /// Stacks of objects, by CPU.
    Stacks,
}

/// All objects of an instance, and the pages below them. The class caches lie last, since few of
/// them are used at first.
#[derive(Debug)]
#[repr(C)]
pub struct Objects<P: Platform> {
    /// The machine.
    pub platform: P,
    /// The pages.
    pub pages: NodePages<P>,
    /// The slots of the CPUs.
    pub cpu_caches: CpuCaches,
    /// The class caches of the other nodes.
    pub(crate) others: *const Others,
    /// Descriptors of slabs.
    pub slabs: SlabTable,
    pub(crate) states: States,
    kinds: *const KindEntry,
    /// The fast paths.
    fast_path: *const FastPath,
    pub(crate) reuse: Reuse,
    /// The thread that empties other CPUs' stacks for allocations.
    pub helper: Helper,
    /// Bytes of the memory of all sheaves with cells.
    pub(crate) cell_bytes: AtomicU64,
    /// Bytes of all vectors of [`payers`](crate::payers).
    pub(crate) vector_bytes: AtomicU64,
    /// Whether any object has ever had an owner.
    pub(crate) owned: AtomicBool,
    /// The callback that pays back owners.
    pub uncharger: Uncharger,
    /// A thread holds this while it looks at charged objects in caches.
    pub(crate) looking: Mutex<()>,
    /// Number of objects that bypassed a busy slot.
    busy: AtomicU64,
    /// Number of attempts to make a bound sheaf that fail at once, after one found no memory.
    pub(crate) left_unbound: AtomicU32,
    isolated_use: IsolatedUse,
    /// Counters of the class caches for other processes, node by node, then by class.
    pub(crate) live: Cells<ClassCell>,
    /// The class caches of node 0, by class.
    pub caches: [SharedCache; CLASSES],
}

// SAFETY: the pointers lead to the `FastPath`, the kind map and the class caches, which threads may
// share and which live as long as the instance is used.
unsafe impl<P: Platform> Sync for Objects<P> {}
// SAFETY: nothing here belongs to a thread, and the pointers stay valid in any thread as long as
// the instance is used.
unsafe impl<P: Platform> Send for Objects<P> {}

/// A slab that was just made, and the node that its pages are on.
pub(crate) struct NewSlab {
    pub(crate) slab: SlabId,
    pub(crate) node: usize,
}

impl<P: Platform> Objects<P> {
    /// Returns memory in which [`Objects::open`] makes an instance. Only the class caches in it are
    /// initialised. The function is `const`, so a static can hold the result without a copy.
    pub const fn unopened() -> MaybeUninit<Objects<P>> {
        let mut objects = MaybeUninit::<Objects<P>>::uninit();
        // SAFETY: the memory is a local variable, and the field lies in it.
        unsafe {
            let caches = &raw mut (*objects.as_mut_ptr()).caches;
            caches.write([const { SharedCache::new(ClassCache::new()) }; CLASSES]);
        }
        objects
    }

    /// Maps the arena and the slots, and makes the instance at `place`. `fast_path` has the table
    /// of the sequences. malloc and free by the fast path work after [`Objects::open_fast_path`]
    /// and [`Objects::enable_fast_path`].
    ///
    /// # Errors
    /// Returns the platform's error. Nothing stays mapped then, and `place` is unchanged.
    ///
    /// # Safety
    /// * `place` holds [`Objects::unopened`], and belongs to the caller.
    /// * `fast_path` is not in use yet, is no other instance's, stays where it is, and lives as
    ///   long as this instance is used.
    pub unsafe fn open(
        place: *mut Objects<P>,
        platform: P,
        config: &Config,
        fast_path: &FastPath,
    ) -> Result<(), Errno> {
        let mut tables = [SideTable::default(); neap_pages::TABLES];
        for table in 0..object_state::TABLES {
            let shift = object_state::SHIFTS[table];
            let early = table == object_state::COMMON;
            let lead = object_state::LEADS[table];
            tables[STATES + table] = SideTable { shift, lead, droppable: shift <= 10, early, brief: false };
        }
        tables[KINDS] = SideTable { shift: KindEntry::TABLE_SHIFT, brief: true, ..SideTable::default() };
        tables[DESCRIPTORS].shift = TABLE_SHIFT;
        let Config { span, budget, huge, list_high, batch_scale, .. } = *config;
        let shape = Shape { span, budget, tables, huge, list_high, batch_scale };
        let pages = NodePages::open(&platform, &shape)?;
        let others = Others::open(&platform, pages.nodes() - 1).inspect_err(|_| {
            // SAFETY: the pages were just opened, and no other thread uses them.
            unsafe { pages.close(&platform) }
        })?;
        // SAFETY: the caller says that `fast_path` is no other instance's, does not move, and lives
        // as long as this one is used.
        let cpu_caches = unsafe { CpuCaches::open(&platform, config.rseq, &fast_path.table) }.inspect_err(|_| {
            // SAFETY: both were just opened for as many nodes, and no other thread uses them.
            unsafe {
                Others::close(others, &platform, pages.nodes() - 1);
                pages.close(&platform);
            }
        })?;
        let descriptors = NonNull::new(core::ptr::with_exposed_provenance_mut(pages.side_table(DESCRIPTORS)));
        let descriptors = descriptors.ok_or(Errno::NOMEM)?;
        // SAFETY: the caller says that `place` holds `unopened`, with class caches. `DESCRIPTORS`
        // is a side table of shift `TABLE_SHIFT` for `span` bytes.
        unsafe {
            neap_base::fill_in_place!(place => Objects<P> {
                states: States::new(core::array::from_fn(|table| pages.side_table(STATES + table)), pages.base()),
                kinds: core::ptr::with_exposed_provenance(pages.side_table(KINDS)),
                fast_path: fast_path,
                slabs: SlabTable::new(descriptors, config.span, platform.page_size()),
                reuse: Reuse::new(),
                helper: Helper::new(),
                cell_bytes: AtomicU64::new(0),
                others: others,
                vector_bytes: AtomicU64::new(0),
                owned: AtomicBool::new(false),
                uncharger: Uncharger::closed(),
                looking: Mutex::new(()),
                busy: AtomicU64::new(0),
                left_unbound: AtomicU32::new(0),
                isolated_use: IsolatedUse::unknown(),
                live: Cells::new(),
                platform: platform,
                pages: pages,
                cpu_caches: cpu_caches,
            } keeping caches);
        }
        Ok(())
    }

    /// Whether a thread of the process runs on an isolated CPU. The answer may be one maintenance
    /// interval old.
    pub fn is_isolated_cpu_in_use(&self) -> bool {
        self.isolated_use.is_known(&self.platform)
    }

    /// Asks the system whether a thread of the process runs on an isolated CPU. The call reads a
    /// file for each thread, which is too slow for calls that allocate or free.
    pub fn look_for_isolated_use(&self) -> bool {
        self.isolated_use.look(&self.platform)
    }

    pub(crate) fn fast_path(&self) -> &FastPath {
        // SAFETY: `open` requires that `fast_path` lives as long as this instance is used, and does
        // not move.
        unsafe { &*self.fast_path }
    }

    /// Unmaps all memory of the instance.
    ///
    /// # Safety
    /// No thread uses this instance or an object of it any more, and no [`FastPath`] leads here.
    pub unsafe fn close(&self) {
        // SAFETY: the caller says that no thread uses the instance or its memory, and that no table
        // of a `FastPath` points to its regions. `open` opened `others` for as many nodes.
        unsafe {
            self.cpu_caches.close(&self.platform);
            Others::close(self.others, &self.platform, self.pages.nodes() - 1);
            self.pages.close(&self.platform);
        }
    }

    /// Makes zones and class caches store their counters into cells, which other processes read.
    ///
    /// # Safety
    /// The conditions of [`Cells::attach`] hold for both links. `zones` has a cell for each node,
    /// and `classes` has [`CLASSES`] cells for each node.
    pub unsafe fn attach_live(&self, zones: &Link<ZoneCell>, classes: &Link<ClassCell>) {
        // SAFETY: `cache` passes indexes below the number of nodes times CLASSES. The caller says
        // that there are as many cells, and meets the other conditions of `attach`.
        unsafe {
            self.pages.attach_live(zones);
            self.live.attach(classes);
        }
    }

    /// Stores all counters of zones and class caches into their cells, and writes to no other
    /// memory. Skips the counters under a mutex that this thread holds; the thread stores those
    /// when it unlocks the mutex.
    ///
    /// # Safety
    /// No other thread uses this instance.
    pub unsafe fn store_live(&self) {
        // SAFETY: no other thread uses the pages (the caller's promise).
        unsafe { self.pages.store_live() };
        for (node, class) in (0..self.pages.nodes()).flat_map(|node| Class::all().map(move |class| (node, class))) {
            // SAFETY: no other thread uses the cache (the caller's promise).
            unsafe { self.cache(node, class).store_live() };
        }
    }

    /// Calls `each` with kind, start and length of every mapping.
    pub fn each_mapping(&self, each: &mut dyn FnMut(MappingKind, usize, usize)) {
        self.pages.each_mapping(&mut |part, start, length| {
            let part = match part {
                neap_pages::MappingKind::Arena => MappingKind::Arena,
                neap_pages::MappingKind::OwnTables => MappingKind::PageTables,
                neap_pages::MappingKind::Lists => MappingKind::Lists,
                neap_pages::MappingKind::Table(KINDS | DESCRIPTORS) => MappingKind::SlabTables,
                neap_pages::MappingKind::Table(_) => MappingKind::States,
            };
            each(part, start, length);
        });
        let caches = Others::mapping(self.others, &self.platform, self.pages.nodes() - 1);
        if caches.length > 0 {
            each(MappingKind::Lists, caches.start, caches.length);
        }
        let stacks = self.cpu_caches.mapping();
        each(MappingKind::Stacks, stacks.start, stacks.length);
    }

    /// Size of the memory of all sheaves, in bytes.
    pub fn sheaf_bytes(&self) -> u64 {
        let bytes = |class: Class| {
            let of = |SheafCounts { plain, bound }| {
                let bytes = |sheaves: u32, kind: SheafKind| u64::from(sheaves) * kind.memory(class).size() as u64;
                bytes(plain, SheafKind::Plain) + bytes(bound, SheafKind::Bound)
            };
            self.caches_of(class).map(|cache| of(cache.lock().sheaves())).sum::<u64>()
        };
        Class::all().map(bytes).sum()
    }

    /// Stores this instance's tables in its [`FastPath`]. Objects may have owners from then on.
    /// [`Objects::enable_fast_path`] opens the fast paths of malloc and free.
    ///
    /// # Safety
    /// * No thread has used the [`FastPath`] of this instance yet, and none uses it after
    ///   [`Objects::close`].
    /// * This instance does not move from now on.
    pub unsafe fn open_fast_path(&self) {
        let fast_path = self.fast_path();
        // SAFETY: the tables and the uncharger are this instance's, and the caller says that no
        // thread has used `fast_path` yet.
        unsafe { fast_path.open(&self.pages, self.kinds.expose_provenance(), &self.states, &self.uncharger) };
    }

    /// Opens all fast paths, if there are Rseq slots. Call [`Objects::open_fast_path`] before.
    pub fn enable_fast_path(&self) {
        if self.cpu_caches.has_rseq() {
            self.fast_path().enable();
        }
    }

    /// The class of the object or run at `pointer`: [`Class::NONE`] for runs of pages, `None` for
    /// an address outside the arena.
    #[inline]
    pub fn class_at(&self, pointer: *const u8) -> Option<Class> {
        let offset = pointer.addr().wrapping_sub(self.pages.base());
        // SAFETY: the kind map has an entry for every mapped 4 KiB.
        (offset < self.pages.limit()).then(|| unsafe { &*self.kinds.add(offset >> KindEntry::SHIFT) }.class())
    }

    /// Whether the program has the object that starts at `pointer`, an address of a slab.
    pub fn is_allocated(&self, pointer: *const u8) -> bool {
        self.is(pointer, ALLOCATED) || self.is_accounted(pointer)
    }

    /// Whether the program has the object that starts at `pointer`, an address of a slab, and it is
    /// charged.
    pub fn is_accounted(&self, pointer: *const u8) -> bool {
        self.is(pointer, ACCOUNTED)
    }

    fn is(&self, pointer: *const u8, state: u8) -> bool {
        // SAFETY: callers pass an address of a slab, which lies in the mapped part of the arena.
        unsafe { self.states.is(pointer.addr(), state) }
    }

    /// Marks as cached an object that the program has. Returns `false` if the program has no object
    /// there.
    pub fn disown(&self, pointer: *const u8) -> bool {
        // SAFETY: callers pass an address that `class_at` found in the arena.
        unsafe { self.states.release(pointer.addr()) }
    }

    /// Marks an object as sampled. This thread was just given the object.
    pub fn mark_sampled(&self, pointer: *const u8) {
        // SAFETY: callers pass an object of the arena that is theirs.
        unsafe { self.states.mark_sampled(pointer.addr()) }
    }

    /// Makes a sampled object an ordinary one. Returns `false` if there is no such object.
    pub fn end_sample(&self, pointer: *const u8) -> bool {
        // SAFETY: callers pass an address that `class_at` found in the arena.
        unsafe { self.states.end_sample(pointer.addr()) }
    }

    /// Whether `pointer` is the start of an object in a cache.
    pub fn is_cached(&self, pointer: *const u8) -> bool {
        self.is(pointer, CACHED) || self.is(pointer, PAID)
    }

    /// Offset of an address of a slab from the start of its object, in bytes.
    pub fn offset_in(&self, class: Class, pointer: *const u8) -> usize {
        let slab = SlabId(self.pages.frames().frame(self.pages.pfn(pointer.addr())).owner());
        (pointer.addr() - self.start_of(slab)) % class.size()
    }

    /// Pops an object of `class` from this CPU's stack if the CPU has Atomic slots. The call
    /// neither enters the gate nor refills the stack. If it returns `None`, the caller takes the
    /// slow path.
    #[inline]
    pub fn alloc_cpu_locked(&self, class: Class) -> Option<*mut u8> {
        let object = NonNull::new(self.cpu_caches.pop_at_once(&self.platform, class)?)?;
        // SAFETY: stacks hold cached objects of this instance, and this one is this thread's now.
        unsafe { self.fast_path().hand_out(object, GateSide::Outside) }.map(NonNull::as_ptr)
    }

    /// Pushes an object onto a stack of this CPU if the CPU has Atomic slots. The object is marked
    /// as cached and in no stack. Returns `false` if the caller still has the object.
    #[inline]
    pub fn free_cpu_locked(&self, class: Class, object: *mut u8) -> bool {
        self.cpu_caches.push_at_once(&self.platform, class, self.kind_entry(object).home(), object)
    }

    /// Allocates an object of `class`; `None` if there is no page for it.
    pub fn allocate(&self, inside: &Inside<'_>, class: Class) -> Option<*mut u8> {
        let object = match self.cpu_caches.pop(&self.platform, class) {
            Attempt::Done(object) => object,
            Attempt::Refused => self.refill(inside, class)?,
            Attempt::Busy => self.allocate_directly(inside, class)?,
        };
        // SAFETY: stacks, sheaves and slabs give out objects of this instance that are marked as
        // cached, and this one is this thread's now.
        unsafe { self.fast_path().hand_out(NonNull::new(object)?, GateSide::Inside) }.map(NonNull::as_ptr)
    }

    /// Address of the first object of a slab. The slab exists: the caller has an object of it, or
    /// the kind map says so.
    pub(crate) fn start_of(&self, slab: SlabId) -> usize {
        // SAFETY: the caller says that the slab exists.
        self.pages.address(unsafe { self.slabs.pfn_of(slab) })
    }

    /// The first object of a row that was just taken from its slab.
    pub(crate) fn first_of(&self, class: Class, row: &Row) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.start_of(row.slab) + row.objects.start as usize * class.size())
    }

    /// The entry of the kind map for an object.
    pub(crate) fn kind_entry(&self, object: *const u8) -> &KindEntry {
        // SAFETY: the kind map has an entry for every mapped 4 KiB of the arena, where objects lie.
        unsafe { &*self.kinds.add((object.addr() - self.pages.base()) >> KindEntry::SHIFT) }
    }

    /// Allocates one object from the barn or a slab, for a caller that finds its slot busy. The
    /// object is marked as cached.
    fn allocate_directly(&self, inside: &Inside<'_>, class: Class) -> Option<*mut u8> {
        self.busy.fetch_add(1, Ordering::Relaxed);
        if let Some(object) = self.near(class).lock().take_one() {
            return Some(object);
        }
        self.take_one(inside, class)
    }

    /// Makes a slab that is on no list; `None` if there is no page.
    pub(crate) fn new_slab(&self, class: Class) -> Option<NewSlab> {
        let shape = class.slab_shape(self.pages.page_size());
        let (bytes, order) = (self.pages.page_size() << shape.order, Order(shape.order));
        // The near slabs of the class have no free objects left. So the program probably uses the
        // objects of a new slab soon.
        let filled = self.shared(self.pages.nearest(&self.platform), class).lock().slabs as usize;
        let block = if filled * bytes >= BULK {
            let writes = object_state::tables_of(class).any(|table| table == object_state::COMMON);
            let early = if writes { EarlyTables::Written } else { EarlyTables::Untouched };
            self.pages.allocate_one_more_block(&self.platform, order, early)
        } else {
            self.pages.allocate_block(&self.platform, order)
        };
        let block = block.ok()?;
        if block.zero && filled >= FILLED {
            let _ = self.platform.populate(self.pages.address(block.pfn), bytes);
        }
        self.make_slab(class, block)
    }

    /// Makes a slab over a block of the class's order. It is on no list.
    pub(crate) fn make_slab(&self, class: Class, block: Block) -> Option<NewSlab> {
        let shape = class.slab_shape(self.pages.page_size());
        let Some(slab) = self.slabs.create(block.pfn, class, shape, |offset| self.pages.has(offset)) else {
            self.pages.free_block(&self.platform, block.pfn, Order(shape.order));
            return None;
        };
        self.pages.frames().mark_slab(block.pfn, Order(shape.order), slab.0);
        object_state::tables_of(class).for_each(|table| self.pages.mark_side_table(block.pfn, STATES + table));
        self.set_kind(block.pfn, Order(shape.order), class);
        self.fast_path().extend_covered_range(self.pages.limit());
        Some(NewSlab { slab, node: self.pages.node_of(block.pfn) })
    }

    pub(crate) fn set_kind(&self, pfn: Pfn, order: Order, class: Class) {
        let first = (self.pages.address(pfn) - self.pages.base()) >> KindEntry::SHIFT;
        let count = (order.pages() as usize * self.pages.page_size()) >> KindEntry::SHIFT;
        for entry in first..first + count {
            // SAFETY: the kind map has an entry for every mapped 4 KiB.
            unsafe { &*self.kinds.add(entry) }.set(class);
        }
    }

    /// Frees an object that is marked as cached and in no stack.
    pub fn free(&self, inside: &Inside<'_>, class: Class, object: *mut u8) {
        let home = self.kind_entry(object).home();
        let stack = if home == self.platform.cpu() as u16 { StackId::local(class) } else { StackId::remote(class) };
        match self.cpu_caches.push(&self.platform, stack, object) {
            Attempt::Done(()) => {}
            Attempt::Refused => self.spill(inside, stack, home, object),
            Attempt::Busy => self.free_directly(class, object),
        }
    }

    /// Returns an object to its slab, without a stack.
    pub(crate) fn free_directly(&self, class: Class, object: *mut u8) {
        self.busy.fetch_add(1, Ordering::Relaxed);
        self.flush(class, &[object]);
    }

    /// Takes every object of the `wanted` classes from a CPU's stacks and returns it to its slab.
    /// Returns the number of objects; `None` if the CPU was skipped.
    pub fn drain_cpu(&self, cpu: usize, wanted: impl Fn(Class) -> bool) -> Option<u64> {
        let mut count = 0;
        let taken = self.cpu_caches.drain_cpu(&self.platform, cpu, wanted, |class, objects| {
            count += objects.len() as u64;
            self.flush(class, objects);
        });
        taken.then_some(count)
    }

    /// Number of objects that bypassed a busy slot so far.
    pub fn busy(&self) -> u64 {
        self.busy.load(Ordering::Relaxed)
    }
}
