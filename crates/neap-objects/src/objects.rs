//! Objects: the slow way of allocating and freeing, and the way back to the pages.
//!
//! Sits between the entry points (after the hot part said no) and slots, class caches, slabs and pages. A class has a
//! cache per node: its slabs are of that node's pages, and so is all that its barn holds. Lock order: a
//! class cache's mutex, then nothing; pages are asked for and given back outside it. Never waits for a slot: who finds
//! one busy uses the class cache directly. Never reclaims: where no page can be had the answer is `None`, and the caller
//! decides what to do.

use crate::barns::{Others, sheaf_memory};
use crate::class_cache::{ClassCache, Row, SharedCache};
use crate::helper::Helper;
use crate::hot::{Hot, KindEntry};
use crate::isolated_use::IsolatedUse;
use crate::paid::Payback;
use crate::region::StackId;
use crate::reuse::Reuse;
use crate::size_class::{CLASSES, Class};
use crate::slab::{SlabId, SlabTable, TABLE_SHIFT};
use crate::slots::{Attempt, Slots};
use crate::state::{self, ACCOUNTED, ALLOCATED, CACHED, PAID, States};
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use neap_base::platform::{Errno, Platform};
use neap_base::{Mutex, Order, Pfn};
use neap_pages::{Block, NodePages, Shape, SideTable};

/// Where the tables stand in [`Shape::tables`].
const KINDS: usize = 0;
const DESCRIPTORS: usize = 1;
/// The first of [`state::TABLES`].
const STATES: usize = 2;

/// From so many slabs of a class on, the memory of a new one is asked for at once and not page by page as it is touched: if
/// none of that is touched, it is a quarter of what the class has.
const FILLED: usize = 4;

/// With so many bytes of a class in slabs, a new one is one of many: huge pages are worth it.
const BULK: usize = 1 << 20;

/// What an instance is to be like.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The most address space for memory that is handed out, in bytes.
    pub span: usize,
    /// The most pages that may be in use, if there is to be a limit.
    pub budget: Option<u32>,
    /// Whether to use restartable sequences where they work.
    pub rseq: bool,
    /// Whether fresh memory may come as huge pages, and runs may have them.
    pub huge: bool,
    /// The most pages that a CPU's page list keeps, where that is not to be found out; 0 for no lists.
    pub list_high: Option<u32>,
}

/// Something that is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Memory that is handed out.
    Arena,
    /// Frames, and maps of pages.
    PageTables,
    /// State bytes of objects.
    States,
    /// Kinds of pages, and descriptors of slabs.
    SlabTables,
    /// Lists of pages, by CPU, and what nodes have for every class.
    Lists,
    /// Stacks of objects, by CPU.
    Stacks,
}

/// All objects of an instance, and the pages below them. The class caches, of which few are used at
/// first, lie behind the rest.
#[derive(Debug)]
#[repr(C)]
pub struct Objects<P: Platform> {
    /// The machine.
    pub platform: P,
    /// The pages.
    pub pages: NodePages<P>,
    /// The slots of the CPUs.
    pub slots: Slots,
    /// The shared parts of the classes on the other nodes.
    pub(crate) others: *const Others,
    /// Descriptors of slabs.
    pub slabs: SlabTable,
    pub(crate) states: States,
    kinds: *const KindEntry,
    /// The fast paths in front of this.
    hot: *const Hot,
    pub(crate) reuse: Reuse,
    /// The thread that empties other CPUs' stacks for allocations.
    pub helper: Helper,
    /// Bytes of the memory of all sheaves with cells.
    pub(crate) cell_bytes: AtomicU64,
    /// Bytes of all vectors of [`owners`](crate::owners).
    pub(crate) vector_bytes: AtomicU64,
    /// Whether anything has ever had an owner.
    pub(crate) owned: AtomicBool,
    /// How owners are paid back.
    pub payback: Payback,
    /// Held by who looks at what caches have that somebody has paid for.
    pub(crate) looking: Mutex<()>,
    /// Objects that went around a busy slot.
    busy: AtomicU64,
    /// Sheaves that are not to be bound, since there was no memory to do it with.
    pub(crate) patience: AtomicU32,
    isolated_use: IsolatedUse,
    /// The shared part of every class on node 0, by class.
    pub caches: [SharedCache; CLASSES],
}

// SAFETY: the pointers lead to what threads may share, which lives as long as this is used.
unsafe impl<P: Platform> Sync for Objects<P> {}
// SAFETY: as above.
unsafe impl<P: Platform> Send for Objects<P> {}

impl<P: Platform> Objects<P> {
    /// Memory for an instance, in which [`Objects::open`] makes one: the class caches are there already, the rest is not.
    /// A constant, so that a static needs no copy of them.
    pub const fn unopened() -> MaybeUninit<Objects<P>> {
        let mut objects = MaybeUninit::<Objects<P>>::uninit();
        // SAFETY: the memory is this function's own.
        unsafe {
            let caches = &raw mut (*objects.as_mut_ptr()).caches;
            caches.write([const { SharedCache::new(ClassCache::new()) }; CLASSES]);
        }
        objects
    }

    /// Maps the arena and the slots, for whose sequences `hot` has the table, and makes the instance at `place`; its
    /// fast paths work once [`Objects::open_hot`] was called.
    ///
    /// # Errors
    /// The platform's error where it refused. Nothing stays mapped, and `place` is as it was.
    ///
    /// # Safety
    /// * `place` holds [`Objects::unopened`], and belongs to the caller.
    /// * `hot` is not in use yet, is no other instance's, stays where it is, and lives as long as this instance is used.
    pub unsafe fn open(place: *mut Objects<P>, platform: P, config: &Config, hot: &Hot) -> Result<(), Errno> {
        let mut tables = [SideTable::default(); neap_pages::TABLES];
        for table in 0..state::TABLES {
            let shift = state::SHIFTS[table];
            let early = table == state::COMMON;
            let lead = state::LEADS[table];
            tables[STATES + table] = SideTable { shift, lead, droppable: shift <= 10, early, brief: false };
        }
        tables[KINDS] = SideTable { shift: KindEntry::TABLE_SHIFT, brief: true, ..SideTable::default() };
        tables[DESCRIPTORS].shift = TABLE_SHIFT;
        let Config { span, budget, huge, list_high, .. } = *config;
        let shape = Shape { span, budget, tables, huge, list_high };
        let pages = NodePages::open(&platform, &shape)?;
        let others = Others::open(&platform, pages.nodes() - 1).inspect_err(|_| {
            // SAFETY: nobody has seen the pages yet.
            unsafe { pages.close(&platform) }
        })?;
        // SAFETY: as the caller promises.
        let slots = unsafe { Slots::open(&platform, config.rseq, &hot.table) }.inspect_err(|_| {
            // SAFETY: nobody has seen either yet.
            unsafe {
                Others::close(others, &platform, pages.nodes() - 1);
                pages.close(&platform);
            }
        })?;
        let descriptors = NonNull::new(core::ptr::with_exposed_provenance_mut(pages.side_table(DESCRIPTORS)));
        let descriptors = descriptors.ok_or(Errno::NOMEM)?;
        // SAFETY: the place is the caller's, and holds class caches; the descriptors are the side table made for them.
        unsafe {
            neap_base::fill_in_place!(place => Objects<P> {
                states: States::new(core::array::from_fn(|table| pages.side_table(STATES + table)), pages.base()),
                kinds: core::ptr::with_exposed_provenance(pages.side_table(KINDS)),
                hot: hot,
                slabs: SlabTable::new(descriptors, config.span, platform.page_size()),
                reuse: Reuse::new(),
                helper: Helper::new(),
                cell_bytes: AtomicU64::new(0),
                others: others,
                vector_bytes: AtomicU64::new(0),
                owned: AtomicBool::new(false),
                payback: Payback::closed(),
                looking: Mutex::new(()),
                busy: AtomicU64::new(0),
                patience: AtomicU32::new(0),
                isolated_use: IsolatedUse::unknown(),
                platform: platform,
                pages: pages,
                slots: slots,
            } keeping caches);
        }
        Ok(())
    }

    /// Whether a thread of the process runs on an isolated CPU, as of the last tick, or of at most
    /// an interval ago.
    pub fn is_isolated_cpu_in_use(&self) -> bool {
        self.isolated_use.is_known(&self.platform)
    }

    /// Asks the system whether a thread of the process runs on an isolated CPU: a file for each
    /// thread. For ticks.
    pub fn look_for_isolated_use(&self) -> bool {
        self.isolated_use.look(&self.platform)
    }

    pub(crate) fn hot(&self) -> &Hot {
        // SAFETY: it lives as long as this is used, and stays where it is.
        unsafe { &*self.hot }
    }

    /// Unmaps everything.
    ///
    /// # Safety
    /// Nobody uses this or any object of it any more, and no [`Hot`] leads here.
    pub unsafe fn close(&self) {
        // SAFETY: as the caller promises.
        unsafe {
            self.slots.close(&self.platform);
            Others::close(self.others, &self.platform, self.pages.nodes() - 1);
            self.pages.close(&self.platform);
        }
    }

    /// Calls `each` with everything that is mapped: what of, start, and length.
    pub fn each_mapping(&self, each: &mut dyn FnMut(Part, usize, usize)) {
        self.pages.each_mapping(&mut |part, start, length| {
            let part = match part {
                neap_pages::Part::Arena => Part::Arena,
                neap_pages::Part::OwnTables => Part::PageTables,
                neap_pages::Part::Lists => Part::Lists,
                neap_pages::Part::Table(KINDS | DESCRIPTORS) => Part::SlabTables,
                neap_pages::Part::Table(_) => Part::States,
            };
            each(part, start, length);
        });
        let (caches, length) = Others::mapping(self.others, &self.platform, self.pages.nodes() - 1);
        if length > 0 {
            each(Part::Lists, caches, length);
        }
        let (stacks, length) = self.slots.mapping();
        each(Part::Stacks, stacks, length);
    }

    /// Bytes of the memory of all sheaves.
    pub fn sheaf_bytes(&self) -> u64 {
        let bytes = |class: Class| {
            let of = |(plain, bound): (u32, u32)| {
                let bytes = |sheaves: u32, bound| u64::from(sheaves) * sheaf_memory(class, bound).size() as u64;
                bytes(plain, false) + bytes(bound, true)
            };
            self.caches_of(class).map(|cache| of(cache.lock().sheaves())).sum::<u64>()
        };
        Class::all().map(bytes).sum()
    }

    /// Lets the fast paths work on this instance: all where it has Rseq slots, and anywhere those for owners.
    ///
    /// # Safety
    /// The [`Hot`] that this was opened with is used by nobody yet, nor after [`Objects::close`]; from now on this instance stays
    /// where it is.
    pub unsafe fn open_hot(&self) {
        let hot = self.hot();
        // SAFETY: as the caller promises; the tables are those of the arena.
        unsafe { hot.open(&self.pages, self.kinds.expose_provenance(), &self.states, &self.payback) };
        if self.slots.has_rseq() {
            hot.serve();
        }
    }

    /// The class of the object or run that lies at `pointer`: [`Class::NONE`] for runs of pages, `None` for an address that
    /// is not in the arena.
    #[inline]
    pub fn class_at(&self, pointer: *const u8) -> Option<Class> {
        let offset = pointer.addr().wrapping_sub(self.pages.base());
        // SAFETY: the kind map has an entry for every mapped 4 KiB.
        (offset < self.pages.limit()).then(|| unsafe { &*self.kinds.add(offset >> KindEntry::SHIFT) }.class())
    }

    /// Whether the program has the object at `pointer`, an address of a slab: not one inside it, not one that is free.
    pub fn is_allocated(&self, pointer: *const u8) -> bool {
        self.is(pointer, ALLOCATED) || self.is_accounted(pointer)
    }

    /// Whether the program has the object at `pointer`, an address of a slab, and somebody pays for it.
    pub fn is_accounted(&self, pointer: *const u8) -> bool {
        self.is(pointer, ACCOUNTED)
    }

    fn is(&self, pointer: *const u8, state: u8) -> bool {
        // SAFETY: `class_at` found the address in the arena.
        unsafe { self.states.is(pointer.addr(), state) }
    }

    /// Marks an object of the program's as cached; `false` if the program has no such object there.
    pub fn disown(&self, pointer: *const u8) -> bool {
        // SAFETY: `class_at` found the address in the arena.
        unsafe { self.states.release(pointer.addr()) }
    }

    /// Whether `pointer` is an object that sits in a cache.
    pub fn is_cached(&self, pointer: *const u8) -> bool {
        self.is(pointer, CACHED) || self.is(pointer, PAID)
    }

    /// How far into an object of `class` an address of one of its slabs points.
    pub fn offset_in(&self, class: Class, pointer: *const u8) -> usize {
        let slab = SlabId(self.pages.frames().frame(self.pages.pfn(pointer.addr())).owner());
        (pointer.addr() - self.start_of(slab)) % class.size()
    }

    /// An object of `class` from the stack of a CPU with Atomic slots. The fast path of those, as short as can be: no gate,
    /// no refill; `None` sends the caller the slow way.
    #[inline]
    pub fn allocate_at_once(&self, class: Class) -> Option<*mut u8> {
        let object = NonNull::new(self.slots.pop_at_once(&self.platform, class)?)?;
        // SAFETY: what a stack has given out is a cached object of its class.
        unsafe { self.hot().hand_out(object, false) }.map(NonNull::as_ptr)
    }

    /// The same for an object that is marked as cached and in no stack; `false`: the caller still has it.
    #[inline]
    pub fn free_at_once(&self, class: Class, object: *mut u8) -> bool {
        self.slots.push_at_once(&self.platform, class, self.kind_entry(object).home(), object)
    }

    /// An object of `class`, or `None` where no page can be had.
    pub fn allocate(&self, class: Class) -> Option<*mut u8> {
        let object = match self.slots.pop(&self.platform, class) {
            Attempt::Done(object) => object,
            Attempt::Refused => self.refill(class)?,
            Attempt::Busy => self.allocate_directly(class)?,
        };
        // SAFETY: what stacks, sheaves and slabs give out is marked as cached.
        unsafe { self.hot().hand_out(NonNull::new(object)?, true) }.map(NonNull::as_ptr)
    }

    /// Where the objects of a slab start. It exists: the caller has one of them, or the kind map says so.
    pub(crate) fn start_of(&self, slab: SlabId) -> usize {
        // SAFETY: the slab exists.
        self.pages.address(unsafe { self.slabs.pfn_of(slab) })
    }

    /// The first object of a row that was just taken.
    pub(crate) fn first_of(&self, class: Class, row: &Row) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.start_of(row.slab) + row.objects.start as usize * class.size())
    }

    /// The kind map's entry of an object's page.
    pub(crate) fn kind_entry(&self, object: *const u8) -> &KindEntry {
        // SAFETY: the kind map has an entry for every mapped 4 KiB of the arena, where objects lie.
        unsafe { &*self.kinds.add((object.addr() - self.pages.base()) >> KindEntry::SHIFT) }
    }

    /// One object without a sheaf: where the slot is busy, or there is no memory for sheaves. Marked as cached.
    fn allocate_directly(&self, class: Class) -> Option<*mut u8> {
        self.busy.fetch_add(1, Ordering::Relaxed);
        if let Some(object) = self.near(class).lock().take_one() {
            return Some(object);
        }
        self.take_one(class)
    }

    /// A new slab, on no list, and its node; `None` where no page can be had.
    pub(crate) fn new_slab(&self, class: Class) -> Option<(SlabId, usize)> {
        let shape = class.slab_shape(self.pages.page_size());
        let (bytes, order) = (self.pages.page_size() << shape.order, Order(shape.order));
        // Another slab is made where all objects of those before are out: so will be those of this one.
        let filled = self.near(class).lock().slabs as usize;
        let block = if filled * bytes >= BULK {
            let early = state::tables_of(class).any(|table| table == state::COMMON);
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

    /// A new slab over a block of the class's order, on no list, and its node.
    pub(crate) fn make_slab(&self, class: Class, block: Block) -> Option<(SlabId, usize)> {
        let shape = class.slab_shape(self.pages.page_size());
        let Some(slab) = self.slabs.create(block.pfn, class, shape, |offset| self.pages.has(offset)) else {
            self.pages.free_block(&self.platform, block.pfn, Order(shape.order));
            return None;
        };
        self.pages.frames().mark_slab(block.pfn, Order(shape.order), slab.0);
        state::tables_of(class).for_each(|table| self.pages.mark_side_table(block.pfn, STATES + table));
        self.set_kind(block.pfn, Order(shape.order), class);
        self.hot().cover(self.pages.limit());
        Some((slab, self.pages.node_of(block.pfn)))
    }

    pub(crate) fn set_kind(&self, pfn: Pfn, order: Order, class: Class) {
        let first = (self.pages.address(pfn) - self.pages.base()) >> KindEntry::SHIFT;
        let count = (order.pages() as usize * self.pages.page_size()) >> KindEntry::SHIFT;
        for entry in first..first + count {
            // SAFETY: the kind map has an entry for every mapped 4 KiB.
            unsafe { &*self.kinds.add(entry) }.set(class);
        }
    }

    /// Puts away an object that is marked as cached and in no stack.
    pub fn free(&self, class: Class, object: *mut u8) {
        let home = self.kind_entry(object).home();
        let stack = if home == self.platform.cpu() as u16 { StackId::home(class) } else { StackId::guests(class) };
        match self.slots.push(&self.platform, stack, object) {
            Attempt::Done(()) => {}
            Attempt::Refused => self.spill(stack, home, object),
            Attempt::Busy => self.free_directly(class, object),
        }
    }

    /// Puts an object into its slab without a stack.
    pub(crate) fn free_directly(&self, class: Class, object: *mut u8) {
        self.busy.fetch_add(1, Ordering::Relaxed);
        self.flush(class, &[object]);
    }

    /// Takes every object of the `wanted` classes from a CPU's stacks and puts it into its slab; answers how many, or
    /// `None` if the CPU was skipped.
    pub fn drain_cpu(&self, cpu: usize, wanted: impl Fn(Class) -> bool) -> Option<u64> {
        let mut count = 0;
        let taken = self.slots.take(&self.platform, cpu, wanted, |class, objects| {
            count += objects.len() as u64;
            self.flush(class, objects);
        });
        taken.then_some(count)
    }

    /// Objects that went around a busy slot so far.
    pub fn busy(&self) -> u64 {
        self.busy.load(Ordering::Relaxed)
    }
}
