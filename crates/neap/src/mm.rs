//! One memory manager: the entry points, and their slow paths.
//!
//! # Design
//! malloc has four steps. Each calls the next one if it has no object for the caller. Step 1 is
//! inlined into the entry points, the others are out of line.
//!
//! 1. [`Mm::alloc_fast`] pops an object from this CPU's stack by a restartable sequence.
//! 2. [`Mm::alloc_fast_grouped`] reads the thread's group, and pops an object for which the group
//!    pays. If allocations are sampled, they are counted here (`allocate_sampled`).
//! 3. [`Mm::alloc_cpu_locked`] pops under the CPU's lock, on a CPU without sequences.
//! 4. `alloc_slow` serves what is left, and every size and alignment without a class. It adds the
//!    edges of the option `check` (`allocate_checked`), or charges the thread's group
//!    (`alloc_slow_charged`). All of these end in `alloc_slow_uncharged`, inside the fork gate.
//!
//! free has three steps:
//!
//! 1. [`Mm::free`] pushes the object onto a stack of this CPU by a restartable sequence.
//! 2. `free_cpu_locked` runs if the push fails. It pushes under the CPU's lock, or enters the gate
//!    and spills.
//! 3. `free_slow` frees all else: runs, objects with a sample, guarded and checked blocks.
//!
//! The fork gate keeps threads out of the manager's structures during a fork. Steps with sequences
//! and CPU locks run outside, since fork closes both.
//!
//! A function that takes [`Inside`] runs inside the gate. A function that enters the gate, or calls
//! one that does, must be called outside.
//!
//! [`Mm::new`] is `const`, so a manager can be a static. The first call that needs memory opens the
//! manager by [`Hooks::open`].
//!
//! # Locking
//! Only [`Mm::close`] takes locks here, when no other thread uses the manager.

use crate::allocation::fresh::Fresh;
use crate::allocation::splits::Splits;
use crate::limits::limit::Following;
use crate::numbers::page::StatPage;
use crate::once::Once;
use crate::options::settings::Settings;
use crate::options::{Background as Threads, Options, ThreadGroups};
use crate::state::at_limit::AtLimit;
use crate::state::background::Background;
use crate::state::checked::{Checked, NamedSize};
use crate::state::gated::GatedMutex;
use crate::state::guard::Guard;
use crate::state::in_call::{InCall, Returned};
use crate::state::maintenance::Maintenance;
use crate::state::of_process::OfProcess;
use crate::state::per_cpu::PerCpuOnce;
use crate::state::profile::Profile;
use crate::state::reclaim::Reclaim;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use neap_base::gate::{Gate, Inside};
use neap_base::platform::{Errno, Platform};
use neap_groups::Groups;
use neap_objects::fast_path::{FastPath, FreeOutcome};
use neap_objects::objects::{Config, Objects};
use neap_objects::size_class::{Class, GRAIN, LARGEST};
use neap_os::futex::{self, Sharing};
use neap_os::memory::untagged;
use neap_os::thread_state::entered;
use neap_reclaim::lru::LruRegistry;

/// Whether every allocation of this size or alignment is refused. As in the C library, the
/// difference of two pointers into one allocation must fit into an `isize`.
pub(crate) fn is_beyond_any(size: usize, align: usize) -> bool {
    size > isize::MAX as usize || align > neap_pages::MOST_ALIGNMENT
}

/// Tag of a manager that is not open. No thread's [word](entered) contains it.
const NO_TAG: usize = usize::MAX;

const CLOSED: u32 = 0;
const OPENING: u32 = 1;
const OPEN: u32 = 2;

/// A memory manager.
#[derive(Debug)]
#[repr(C)]
pub struct Mm<P: Platform> {
    /// Every call reads it.
    pub(crate) fast_path: FastPath,
    /// Number of this manager among those of the process.
    pub(crate) tag: AtomicUsize,
    pub(crate) profile: Profile,
    /// Counts threads inside slow paths.
    pub(crate) gate: Gate,
    state: AtomicU32,
    /// Address of the control block of neap's thread, or 0. Other threads leave some system calls
    /// to that thread.
    pub(crate) own_thread: AtomicUsize,
    pub(crate) of_process: OfProcess,
    /// Whether neap's fork handlers are registered with the C library. Only the process's manager
    /// has fork handlers.
    pub(crate) has_fork_handlers: AtomicBool,
    /// Whether frees that name a size must name the right one.
    checks_sizes: AtomicBool,
    pub(crate) hooks: Hooks<P>,
    core: UnsafeCell<MaybeUninit<Core<P>>>,
}

/// Starts a thread for a manager's background work. Returns the handle of the thread.
pub type Spawn<P> = fn(&Mm<P>, Task) -> Result<usize, Errno>;

/// Work of a thread of a manager.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// Ticks, as neap's thread.
    Maintain,
    /// Runs callbacks of shrinkers, as the reclaimer with this number, which is not 0.
    Reclaim(u32),
}

/// Functions of the process, or of a test, that a manager calls.
#[derive(Debug)]
pub struct Hooks<P: Platform> {
    /// Opens the manager (by [`Mm::open`]) when it is first needed.
    pub open: fn(&Mm<P>),
    /// Starts a thread. If there is no such function, calls of the program and of [`Mm::tick`]
    /// release memory.
    pub spawn: Option<Spawn<P>>,
    /// The manager calls this after each tick, and before neap's thread sleeps. The function must
    /// neither allocate nor free.
    pub ticked: Option<fn(&Mm<P>, &Inside<'_>)>,
}

// SAFETY: `core` is written once, before `state` becomes OPEN. From then on it is only shared.
unsafe impl<P: Platform> Sync for Mm<P> {}

/// Parts of a manager that are made when it opens.
///
/// Fields that every manager writes come first, then the class caches, so that opening takes few
/// page faults.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Core<P: Platform> {
    pub(crate) background: Background,
    pub(crate) maintenance: Maintenance,
    pub(crate) in_call: InCall,
    /// Options at the start of the process. [`Settings`] has the present values of options that can
    /// change.
    pub(crate) options: Options,
    pub(crate) settings: Settings,
    pub(crate) following: Following,
    pub(crate) at_limit: AtLimit,
    /// Bytes of runs that the program has.
    pub(crate) run_bytes: AtomicU64,
    /// Number of refused allocations ([`Core::count_refusal`]).
    pub(crate) refused: AtomicU64,
    /// Objects that the program's shrinkers have freed.
    pub(crate) shrunk: AtomicU64,
    /// A thread holds this mutex while it flushes caches for payers. The value is the earliest time
    /// of the next [spaced](neap_groups::FlushPace::Spaced) flush.
    pub(crate) flushing: GatedMutex<u64>,
    pub(crate) page: StatPage,
    /// Starts and ends of runs that were moved by their page tables.
    pub(crate) splits: GatedMutex<Splits>,
    /// The blocks that the option `check` verifies.
    pub(crate) checked: GatedMutex<Checked>,
    pub(crate) guard: Guard,
    pub(crate) objects: Objects<P>,
    pub(crate) per_cpu: PerCpuOnce,
    pub(crate) lists: LruRegistry,
    pub(crate) groups: Once<Groups>,
    pub(crate) reclaim: Once<Reclaim>,
}

impl<P: Platform> Mm<P> {
    /// A manager that is not open yet.
    pub const fn new(hooks: Hooks<P>) -> Mm<P> {
        Mm {
            fast_path: FastPath::closed(),
            tag: AtomicUsize::new(NO_TAG),
            profile: Profile::new(),
            gate: Gate::new(),
            state: AtomicU32::new(CLOSED),
            own_thread: AtomicUsize::new(0),
            of_process: OfProcess::new(),
            has_fork_handlers: AtomicBool::new(false),
            checks_sizes: AtomicBool::new(false),
            hooks,
            core: UnsafeCell::new(Core::unopened()),
        }
    }

    /// Opens the manager on a machine. Returns `true` if this call opened it. Returns `false` if
    /// the manager is open already, or another call is opening it.
    ///
    /// # Errors
    /// Returns the platform's error. The manager is still closed then.
    ///
    /// # Safety
    /// The manager does not move from now on, until [`Mm::close`].
    pub unsafe fn open(&self, platform: P, options: &Options) -> Result<bool, Errno> {
        // Acquire pairs with the Release store of `state` below, which publishes the core.
        if self.state.compare_exchange(CLOSED, OPENING, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Ok(false);
        }
        self.gate.adopt();
        // The exchange above made the state OPENING in this thread alone. So no other thread uses
        // the core, which is unopened, or `fast_path`, which no other instance has.
        // SAFETY: both are this call's alone, as just said. They do not move until the manager is
        // closed (the caller's promise).
        let opened = unsafe { Core::open((*self.core.get()).as_mut_ptr(), platform, options, &self.fast_path) };
        let answer = opened.map(|()| {
            // SAFETY: `Core::open` succeeded, so the core is initialised; it is only shared from
            // now on.
            let core = unsafe { (*self.core.get()).assume_init_ref() };
            self.make_tag();
            // SAFETY: `fast_path` belongs to this core and has refused every call so far. The core
            // does not move until `Mm::close` (the caller's promise). No thread uses the manager
            // after that (the promise of `close`'s caller).
            unsafe { core.objects.open_fast_path() };
            // Relaxed: a free of this manager's memory comes after its opening.
            self.checks_sizes.store(options.check, Ordering::Relaxed);
            if !options.check {
                core.objects.enable_fast_path();
            }
            if options.groups != ThreadGroups::Off {
                // A new thread has entered no group. The slow path puts it into one.
                self.fast_path.disable_ungrouped_fast_path();
            }
            true
        });
        let state = if answer.is_ok() { OPEN } else { CLOSED };
        self.state.store(state, Ordering::Release); // Pairs with the Acquire loads in `core` and above.
        futex::wake(&self.state, i32::MAX as u32, Sharing::Process);
        answer
    }

    /// Waits while a thread opens the manager, so that a forked child has a whole manager or a
    /// closed one. The wait ends after a second at most, since the opener may be the forking thread
    /// itself, in a signal handler.
    pub(crate) fn wait_until_opened(&self) {
        /// Nanoseconds of one wait, and the number of waits.
        const WAIT: (u64, u32) = (100_000_000, 10);
        for _ in 0..WAIT.1 {
            if self.state.load(Ordering::Relaxed) != OPENING {
                break;
            }
            futex::wait(&self.state, OPENING, Some(WAIT.0), Sharing::Process);
        }
    }

    /// Resets the state that an opening thread of the parent left, in a forked child.
    pub(crate) fn forget_opener(&self) {
        let _ = self.state.compare_exchange(OPENING, CLOSED, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Unmaps all memory of the manager, and makes it a closed one.
    ///
    /// # Safety
    /// * No thread uses the manager or its memory any more.
    /// * No thread is in a group of it.
    /// * It has no maintenance thread.
    pub unsafe fn close(&mut self) {
        if *self.state.get_mut() == OPEN {
            if let Some(reclaiming) = self.reclaiming_if_made() {
                // SAFETY: no thread uses the manager any more (the caller's promise), so none uses
                // its shrinkers or runs a callback. `reclaiming` has the host with which the
                // shrinkers were opened.
                unsafe { reclaiming.reclaim.shrinkers.close(&reclaiming.source) };
            }
            if let Some(listed) = self.lists_if_made() {
                // SAFETY: no thread uses the manager any more (the caller's promise), so none uses
                // its LRU lists.
                unsafe { listed.site().close() };
            }
            if let Some(grouped) = self.groups_if_made() {
                // SAFETY: no thread uses the manager any more, and none is in a group of it (the
                // caller's promise). `grouped` has the platform with which the groups were opened.
                unsafe { grouped.close() };
            }
            // SAFETY: the state is OPEN, so the core is initialised. `&mut self` excludes all other
            // users. No thread ticks, or uses per-CPU data, guarded memory, objects or `fast_path`
            // any more (the caller's promise). `fast_path` is replaced below.
            unsafe {
                let core = self.core.get_mut().assume_init_mut();
                core.per_cpu.close(&core.objects.platform);
                core.maintenance.close(&core.objects.platform);
                core.splits.lock(&self.gate.enter(0)).close(&core.objects.platform);
                core.guard.close();
                core.objects.close();
            }
            let Hooks { open, spawn, ticked } = self.hooks;
            *self = Mm::new(Hooks { open, spawn, ticked });
        }
    }

    /// Returns the core, and opens the manager first if need be. `None` if it cannot be opened.
    pub(crate) fn core(&self) -> Option<&Core<P>> {
        loop {
            // Acquire pairs with the Release in `open`.
            match self.state.load(Ordering::Acquire) {
                // SAFETY: a thread stores OPEN only after it has initialised the core.
                OPEN => return Some(unsafe { (*self.core.get()).assume_init_ref() }),
                OPENING => futex::wait(&self.state, OPENING, None, Sharing::Process),
                _ => {
                    (self.hooks.open)(self);
                    // Relaxed: it only decides whether to give up; the next round loads with
                    // Acquire.
                    if self.state.load(Ordering::Relaxed) == CLOSED {
                        return None;
                    }
                }
            }
        }
    }

    /// Returns the core if the manager is open.
    pub(crate) fn core_if_open(&self) -> Option<&Core<P>> {
        // Acquire pairs with the Release in `open`.
        // SAFETY: a thread stores OPEN only after it has initialised the core.
        (self.state.load(Ordering::Acquire) == OPEN).then(|| unsafe { (*self.core.get()).assume_init_ref() })
    }

    /// Allocates at least `size` bytes. Their address is a multiple of 16. Returns null if there is
    /// no memory.
    #[inline(always)]
    pub fn allocate(&self, size: usize) -> *mut u8 {
        self.alloc_fast(size, move || self.allocate_grouped(size))
    }

    #[inline(never)]
    fn allocate_grouped(&self, size: usize) -> *mut u8 {
        self.alloc_fast_grouped(size, move || self.alloc_cpu_locked(size))
    }

    /// Step 1 of malloc: allocates at least `size` bytes from this CPU's stack. Calls `grouped` if
    /// the fast path refuses. `grouped` must end in [`Mm::alloc_fast_grouped`].
    #[inline(always)]
    pub fn alloc_fast(&self, size: usize, grouped: impl FnOnce() -> *mut u8) -> *mut u8 {
        match self.fast_path.allocate(size) {
            Some(object) => object.as_ptr(),
            None => grouped(),
        }
    }

    /// Step 3 of malloc: allocates at least `size` bytes from this CPU's stack under the CPU's
    /// lock, or on the slow path. Their address is a multiple of 16. Returns null if there is no
    /// memory.
    #[cold]
    #[inline(never)]
    pub fn alloc_cpu_locked(&self, size: usize) -> *mut u8 {
        if size <= LARGEST
            && let Some(core) = self.core()
            && !core.options.check
            && core.is_ordinary()
            && let Some(object) = core.objects.alloc_cpu_locked(Class::of_size(size))
        {
            return object;
        }
        self.alloc_slow(size, GRAIN).memory
    }

    /// Allocates at least `size` bytes. Their address is a multiple of 16. The first `size` bytes
    /// are zero. Returns null if there is no memory.
    #[inline]
    pub fn allocate_zeroed(&self, size: usize) -> *mut u8 {
        let fresh = match size {
            ..=LARGEST => Fresh { memory: self.allocate(size), is_zero: false },
            _ => self.alloc_slow_counted(size, GRAIN),
        };
        // SAFETY: this call has just allocated `size` bytes, to which no code has written since.
        unsafe { self.zero(fresh, size) }
    }

    /// Makes the first `size` bytes of a fresh allocation zero, unless it is null or `is_zero`.
    /// Returns the allocation.
    ///
    /// # Safety
    /// The allocation is the caller's and has that many bytes. No code has written to it.
    #[inline]
    unsafe fn zero(&self, Fresh { memory, is_zero }: Fresh, size: usize) -> *mut u8 {
        // A shorter run has no huge page.
        if size >= neap_pages::HUGE_BYTES && !memory.is_null() {
            self.expect_sparse(memory);
        }
        // SAFETY: the allocation is the caller's and has `size` bytes, so this call may write to
        // them. No code has written to it, as `zero_run` requires of a run. All three are the
        // caller's promise.
        unsafe {
            if !is_zero && !memory.is_null() && (size <= LARGEST || !self.zero_run(memory)) {
                memory.write_bytes(0, size);
            }
        }
        memory
    }

    /// Allocates at least `size` bytes. Their address is a multiple of `align`, which is a power of
    /// two. Returns null if there is no memory.
    #[inline]
    pub fn allocate_aligned(&self, size: usize, align: usize) -> *mut u8 {
        match self.size_on(size, align) {
            Some(size) => self.allocate(size),
            None => self.alloc_slow_counted(size, align).memory,
        }
    }

    /// Returns a size of at least `size` whose objects have addresses that are multiples of
    /// `align`. Returns `None` if no class has such objects, if the manager is not open, or if the
    /// option `check` puts a front before each allocation.
    #[inline]
    fn size_on(&self, size: usize, align: usize) -> Option<usize> {
        if align <= GRAIN {
            return Some(size);
        }
        let core = self.core_if_open().filter(|core| !core.options.check)?;
        Class::of_layout(size, align, core.objects.pages.page_size()).map(Class::size)
    }

    /// Allocates at least `size` bytes. Their address is a multiple of `align`, which is a power of
    /// two. The first `size` bytes are zero. Returns null if there is no memory.
    pub fn allocate_zeroed_aligned(&self, size: usize, align: usize) -> *mut u8 {
        if let Some(size) = self.size_on(size, align) {
            return self.allocate_zeroed(size);
        }
        let fresh = self.alloc_slow_counted(size, align);
        // SAFETY: this call has just allocated `size` bytes, to which no code has written since.
        unsafe { self.zero(fresh, size) }
    }

    /// Allocates by step 4 of malloc, and counts the allocation for samples.
    /// ([`Mm::alloc_fast_grouped`] counts the allocations that come through it.)
    // Its callers stay as small as their fast paths.
    #[inline(never)]
    fn alloc_slow_counted(&self, size: usize, align: usize) -> Fresh {
        let fresh = self.alloc_slow(size, align);
        self.count_allocation(fresh.memory, size);
        fresh
    }

    /// Step 4 of malloc: allocates with the edges of the option `check`, or charged to the thread's
    /// group, or neither.
    fn alloc_slow(&self, size: usize, align: usize) -> Fresh {
        match self.core() {
            None => Fresh::NULL,
            Some(core) if core.options.check => {
                Fresh { memory: self.allocate_checked(core, size, align), is_zero: false }
            }
            Some(core) if core.is_ordinary() => self.alloc_slow_uncharged(core, size, align),
            Some(core) => self.alloc_slow_charged(core, size, align),
        }
    }

    /// Allocates on the slow path, and charges no group.
    pub(crate) fn alloc_slow_uncharged(&self, core: &Core<P>, size: usize, align: usize) -> Fresh {
        if is_beyond_any(size, align) {
            return Fresh::NULL;
        }
        let attempt = || {
            let inside = self.gate.enter(core.objects.platform.cpu());
            match Class::of_layout(size, align, core.objects.pages.page_size()) {
                Some(class) => core.objects.allocate(&inside, class).map(|memory| Fresh { memory, is_zero: false }),
                None => core.allocate_run(&inside, size, align).inspect(|_| core.count_run(size.max(1), 0)),
            }
        };
        let memory = attempt().or_else(|| core.reclaim_for_allocation(self, size, &attempt));
        self.after_allocation(core);
        memory.unwrap_or_else(|| {
            core.count_refusal();
            Fresh::NULL
        })
    }

    /// Does the work that follows an allocation on the slow path, even if the allocation failed.
    pub(crate) fn after_allocation(&self, core: &Core<P>) {
        if core.settings.limit() > 0 {
            core.look_at_node(self, core.objects.pages.nearest(&core.objects.platform));
        }
        core.after_slow_path(self);
    }

    /// Frees memory that a function of this manager returned. Ignores null. Any other pointer ends
    /// the process with a line that names the error. This is step 1 of free.
    ///
    /// # Safety
    /// No thread uses the memory any more.
    #[inline(always)]
    pub unsafe fn free(&self, pointer: *mut u8) {
        match self.fast_path.free(pointer) {
            FreeOutcome::Cached => {}
            FreeOutcome::CacheFull => self.free_cpu_locked(pointer),
            FreeOutcome::NotFastPath => self.free_slow(pointer),
        }
    }

    /// Step 2 of free: puts an object into a stack or its slab. The object is marked as cached, and
    /// no other thread has it.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_cpu_locked(&self, pointer: *mut u8) {
        let Some(core) = self.core_if_open() else { return };
        // SAFETY: the state byte marks the object as cached, so it lies in this manager's arena.
        let class = unsafe { self.fast_path.kind(pointer) }.class();
        if core.objects.free_cpu_locked(class, pointer) {
            return;
        }
        {
            let inside = self.gate.enter(core.objects.platform.cpu());
            core.objects.free(&inside, class, pointer);
        }
        core.after_free(self, Returned::Objects(class));
    }

    /// Step 3 of free.
    #[cold]
    #[inline(never)]
    fn free_slow(&self, pointer: *mut u8) {
        // The fast path refuses a pointer with a tag.
        let pointer = untagged(pointer);
        if pointer.is_null() {
            return;
        }
        let Some(core) = self.core_if_open() else { abort_before_init(pointer) };
        if core.options.check {
            return self.free_checked(core, pointer, None, "free");
        }
        if core.guard.region_of(pointer).is_some() {
            return self.free_guarded(core, pointer);
        }
        self.free_block(core, pointer);
    }

    /// Whether [`Mm::free_named`] verifies the size that it is given (`check:on`).
    #[inline(always)]
    pub fn checks_sizes(&self) -> bool {
        // Relaxed: the flag changes only when the manager opens, before it hands out memory.
        self.checks_sizes.load(Ordering::Relaxed)
    }

    /// Frees memory as [`Mm::free`] does. If the option `check` is on, verifies the size that the
    /// caller names.
    ///
    /// # Safety
    /// Those of [`Mm::free`].
    #[inline(always)]
    pub unsafe fn free_named(&self, pointer: *mut u8, size: NamedSize) {
        match self.fast_path.free(pointer) {
            FreeOutcome::Cached => {}
            FreeOutcome::CacheFull => self.free_cpu_locked(pointer),
            FreeOutcome::NotFastPath => self.free_named_slow(pointer, size),
        }
    }

    #[cold]
    #[inline(never)]
    fn free_named_slow(&self, pointer: *mut u8, size: NamedSize) {
        let pointer = untagged(pointer);
        match self.core_if_open().filter(|core| core.options.check && !pointer.is_null()) {
            Some(core) => self.free_checked(core, pointer, Some(size), "sized free"),
            None => self.free_slow(pointer),
        }
    }

    /// Frees an object or run on the slow path.
    pub(crate) fn free_block(&self, core: &Core<P>, pointer: *mut u8) {
        let class = core.class_of(pointer, "free");
        if class != Class::NONE {
            if core.objects.end_sample(pointer) {
                self.end_sample(core, pointer);
            }
            if !core.objects.disown(pointer) {
                core.abort_invalid_pointer(class, pointer, "free");
            }
            return self.free_cpu_locked(pointer);
        }
        self.end_sample_of_run(core, pointer);
        let payer = core.run_payer(pointer);
        let bytes = {
            let inside = self.gate.enter(core.objects.platform.cpu());
            let bytes = core.free_run(&inside, pointer);
            core.count_run(0, bytes);
            bytes
        };
        if let Some(payer) = payer {
            self.uncharge_run(payer, bytes as u64);
        }
        core.after_free(self, Returned::Run(bytes));
    }

    /// Returns how many bytes the memory at `pointer` has. Returns 0 for null.
    pub fn usable_size(&self, pointer: *const u8) -> usize {
        match self.fast_path.class_of(pointer) {
            Some(class) => class.size(),
            None => self.usable_size_slow(pointer),
        }
    }

    #[inline(never)]
    fn usable_size_slow(&self, pointer: *const u8) -> usize {
        let pointer = untagged(pointer.cast_mut());
        if pointer.is_null() {
            return 0;
        }
        let Some(core) = self.core_if_open() else { abort_before_init(pointer) };
        if core.options.check {
            return self.usable_checked(core, pointer, "malloc_usable_size");
        }
        core.usable_size(pointer, "malloc_usable_size")
    }

    /// Returns how many bytes an allocation of `size` bytes with the alignment `align` would have.
    /// `align` is a power of two. Returns 0 if every such allocation is refused, or if the manager
    /// cannot be opened.
    pub fn usable_size_of(&self, size: usize, align: usize) -> usize {
        let Some(core) = self.core() else { return 0 };
        match Class::of_layout(size, align, core.objects.pages.page_size()) {
            Some(class) => class.size(),
            None if is_beyond_any(size, align) => 0,
            None => core.run_price(size) as usize,
        }
    }
}

impl<P: Platform> Core<P> {
    /// Whether no group pays for this thread's allocations.
    fn is_ordinary(&self) -> bool {
        entered() == 0 && self.options.groups == ThreadGroups::Off
    }

    /// Returns memory for [`Core::open`], with the large parts of a core initialised. The function
    /// is `const`, so that the process's static needs no copy of these parts.
    const fn unopened() -> MaybeUninit<Core<P>> {
        let mut core = MaybeUninit::<Core<P>>::uninit();
        let place = core.as_mut_ptr();
        // SAFETY: `core` is a local variable, and the pointers lead to its fields.
        unsafe {
            (&raw mut (*place).objects).cast::<MaybeUninit<Objects<P>>>().write(Objects::unopened());
            (&raw mut (*place).per_cpu).write(PerCpuOnce::new());
            (&raw mut (*place).groups).write(Once::new());
            (&raw mut (*place).reclaim).write(Once::new());
        }
        core
    }

    /// Makes the core in `place`, where it stays.
    ///
    /// # Safety
    /// * `place` holds [`Core::unopened`], and belongs to the caller.
    /// * `fast_path` fulfils the conditions of [`Objects::open`].
    unsafe fn open(place: *mut Core<P>, platform: P, options: &Options, fast_path: &FastPath) -> Result<(), Errno> {
        let settings = Settings::new(options);
        let neap_pages::Settings { budget, list_high, batch_scale } = settings.of_pages(platform.page_size());
        let maintenance = Maintenance::open(&platform)?;
        let Options { rseq, huge, .. } = *options;
        let config = Config { span: SPAN, budget, rseq, huge, list_high, batch_scale };
        // The few pages of `maintenance` stay mapped if this fails. The caller is about to give up
        // on memory altogether.
        // SAFETY: `place` holds `Core::unopened` and is the caller's. So its objects are
        // `Objects::unopened` and the caller's. `fast_path` fulfils the conditions of
        // `Objects::open` (the caller's promise).
        unsafe { Objects::open(&raw mut (*place).objects, platform, &config, fast_path)? };
        // SAFETY: the place is the caller's. `Objects::open` has initialised the objects above, and
        // `Core::unopened` has initialised the other three fields that are kept.
        unsafe {
            neap_base::fill_in_place!(place => Core<P> {
                background: Background::new(options.background != Threads::Never),
                maintenance: maintenance,
                in_call: InCall::new(),
                options: *options,
                settings: settings,
                following: Following::new(),
                at_limit: AtLimit::new(),
                run_bytes: AtomicU64::new(0),
                refused: AtomicU64::new(0),
                shrunk: AtomicU64::new(0),
                splits: GatedMutex::new(Splits::new()),
                checked: GatedMutex::new(Checked::new()),
                guard: Guard::new(),
                page: StatPage::new(),
                flushing: GatedMutex::new(0),
                lists: LruRegistry::new(),
            } keeping objects, per_cpu, groups, reclaim);
        }
        Ok(())
    }
}

/// Most bytes of address space for the program's memory. Page numbers of 32 bits reach that far
/// with pages of 4 KiB.
const SPAN: usize = 16 << 40;

/// Ends the process, because a caller has passed a pointer before the manager allocated memory.
#[cold]
pub(crate) fn abort_before_init(pointer: *const u8) -> ! {
    neap_os::fatal::die(format_args!(
        "free: {pointer:p} is not from this allocator, which has not allocated anything yet"
    ))
}
