//! One memory manager: the entry points, and what they fall back on.
//!
//! Sits between whoever allocates (the C library's malloc family, `GlobalAlloc`, a test) and the object and page layers.
//! The first lines of an entry point are the fast path, inlined; everything else is out of line and inside the fork
//! gate, but for one try at an Atomic CPU's stack, whose lock fork takes. Holds no lock of its own. An `Mm` is in use from its first call: `new` is a constant, and the function that it
//! was given opens it.

use crate::background::Background;
use crate::drain::NAP;
use crate::in_call::{InCall, Returned};
use crate::in_group::NO_TAG;
use crate::lazy::Lazy;
use crate::main_thread::OfProcess;
use crate::maintenance::Maintenance;
use crate::options::{Background as Threads, Options, ThreadGroups};
use crate::per_cpu_data::Place;
use crate::reclaimers::Reclaim;
use crate::splits::Splits;
use crate::stat_page::StatPage;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use neap_base::Mutex;
use neap_base::gate::Gate;
use neap_base::platform::{Errno, Platform};
use neap_groups::Groups;
use neap_objects::hot::{Freed, Hot};
use neap_objects::objects::{Config, Objects};
use neap_objects::size_class::{Class, GRAIN, LARGEST};
use neap_os::entered::entered;
use neap_os::futex::{self, Scope};
use neap_os::stack;
use neap_reclaim::lru::Lists;

/// Whether a request is refused outright: as in the C library, differences of pointers fit.
pub(crate) fn is_beyond_any(size: usize, align: usize) -> bool {
    size > isize::MAX as usize || align > neap_pages::MOST_ALIGNMENT
}

const CLOSED: u32 = 0;
const OPENING: u32 = 1;
const OPEN: u32 = 2;

/// A memory manager.
#[derive(Debug)]
#[repr(C)]
pub struct Mm<P: Platform> {
    /// Read by every call.
    pub(crate) hot: Hot,
    /// Which one of a process's managers this is.
    pub(crate) tag: AtomicUsize,
    /// Counts who is inside everything but the fast paths.
    pub(crate) gate: Gate,
    state: AtomicU32,
    /// The control block of neap's thread, which may make system calls that others may not; 0
    /// without one.
    pub(crate) own_thread: AtomicUsize,
    pub(crate) of_process: OfProcess,
    /// Whether the C library's fork knows of it: of the process's manager alone.
    pub(crate) has_fork_handlers: AtomicBool,
    pub(crate) hooks: Hooks<P>,
    core: UnsafeCell<MaybeUninit<Core<P>>>,
}

/// Starts a thread for a manager's background work, and answers what it is for who ends it.
pub type Spawn<P> = fn(&Mm<P>, Task) -> Result<usize, Errno>;

/// What a thread of a manager is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// It ticks.
    Maintain,
    /// It runs callbacks of shrinkers; the reclaimer of that number, which is not 0.
    Reclaim(u32),
}

/// What a manager asks of its surroundings.
#[derive(Debug)]
pub struct Hooks<P: Platform> {
    /// Opens the manager (by [`Mm::open`]) when it is first needed.
    pub open: fn(&Mm<P>),
    /// Starts a maintenance thread; without one memory goes back from within ordinary calls and by [`Mm::tick`].
    pub spawn: Option<Spawn<P>>,
    /// Called after each tick, and before the maintenance thread sleeps; must neither allocate nor free.
    pub ticked: Option<fn(&Mm<P>)>,
}

// SAFETY: `core` is written once, before `state` says so.
unsafe impl<P: Platform> Sync for Mm<P> {}

/// What there is once an `Mm` is open.
///
/// What every program writes lies in front and side by side, then the class caches, and then what
/// few programs use: so opening is few page faults.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Core<P: Platform> {
    pub(crate) background: Background,
    pub(crate) maintenance: Maintenance,
    pub(crate) in_call: InCall,
    pub(crate) options: Options,
    /// Bytes of runs that the program has.
    pub(crate) run_bytes: AtomicU64,
    /// Held by who flushes caches for those who pay for what they keep; and when that is worth its
    /// price again.
    pub(crate) flushing: Mutex<u64>,
    pub(crate) page: StatPage,
    /// Where runs that were moved by their page tables begin and end.
    pub(crate) splits: Mutex<Splits>,
    pub(crate) objects: Objects<P>,
    pub(crate) per_cpu: Place,
    pub(crate) lists: Lists,
    pub(crate) groups: Lazy<Groups>,
    pub(crate) reclaim: Lazy<Reclaim>,
}

impl<P: Platform> Mm<P> {
    /// A manager that is not open yet.
    pub const fn new(hooks: Hooks<P>) -> Mm<P> {
        Mm {
            hot: Hot::closed(),
            tag: AtomicUsize::new(NO_TAG),
            gate: Gate::new(),
            state: AtomicU32::new(CLOSED),
            own_thread: AtomicUsize::new(0),
            of_process: OfProcess::new(),
            has_fork_handlers: AtomicBool::new(false),
            hooks,
            core: UnsafeCell::new(Core::unopened()),
        }
    }

    /// Opens the manager on a machine. Does nothing if it is open, or being opened, already; answers whether it did.
    ///
    /// # Errors
    /// What the platform refused; the manager is as closed as before.
    ///
    /// # Safety
    /// The manager does not move from now on, until [`Mm::close`].
    pub unsafe fn open(&self, platform: P, options: &Options) -> Result<bool, Errno> {
        // Acquire pairs with the Release below: who finds it open sees what is inside.
        if self.state.compare_exchange(CLOSED, OPENING, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Ok(false);
        }
        self.gate.adopt();
        // SAFETY: the state OPENING is this thread's alone, and the core is unopened; `hot` is this manager's, which does
        // not move.
        let opened = unsafe { Core::open((*self.core.get()).as_mut_ptr(), platform, options, &self.hot) };
        let answer = opened.map(|()| {
            // SAFETY: opened above, and nothing changes it but by shared references from now on.
            let core = unsafe { (*self.core.get()).assume_init_ref() };
            self.make_tag();
            // SAFETY: `hot` has answered everything with "no" until now; it lives as long as the core.
            unsafe { core.objects.open_hot() };
            if options.groups != ThreadGroups::Off {
                // A thread that has entered nothing, as none has at first, is to be put into a group.
                self.hot.serve_entered_alone();
            }
            true
        });
        let state = if answer.is_ok() { OPEN } else { CLOSED };
        self.state.store(state, Ordering::Release); // Pairs with the Acquire loads in `core` and above.
        futex::wake(&self.state, i32::MAX as u32, Scope::Process);
        answer
    }

    /// Waits for who is opening the manager, so that a child has all of it or nothing; a bounded time, since it may be who forks, in a signal handler.
    pub(crate) fn wait_until_opened(&self) {
        /// Nanoseconds, and how often they are waited.
        const WAIT: (u64, u32) = (100_000_000, 10);
        for _ in 0..WAIT.1 {
            if self.state.load(Ordering::Relaxed) != OPENING {
                break;
            }
            futex::wait(&self.state, OPENING, Some(WAIT.0), Scope::Process);
        }
    }

    /// In a forked child: a thread that does not exist here opens nothing.
    pub(crate) fn forget_opener(&self) {
        let _ = self.state.compare_exchange(OPENING, CLOSED, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Unmaps everything.
    ///
    /// # Safety
    /// Nobody uses the manager or any memory of it any more, no thread is in a group of it, and it has no maintenance thread.
    pub unsafe fn close(&mut self) {
        if *self.state.get_mut() == OPEN {
            if let Some(reclaiming) = self.reclaiming_if_made() {
                // SAFETY: as the caller promises.
                unsafe { reclaiming.close() };
            }
            if let Some(listed) = self.lists_if_made() {
                // SAFETY: as the caller promises.
                unsafe { listed.site().close() };
            }
            if let Some(grouped) = self.groups_if_made() {
                // SAFETY: as the caller promises.
                unsafe { grouped.close() };
            }
            // SAFETY: the state says that it is initialised; nobody else is here.
            unsafe {
                let core = self.core.get_mut().assume_init_mut();
                core.per_cpu.close(&core.objects.platform);
                core.maintenance.close(&core.objects.platform);
                core.splits.lock().close(&core.objects.platform);
                core.objects.close();
            }
            let Hooks { open, spawn, ticked } = self.hooks;
            *self = Mm::new(Hooks { open, spawn, ticked });
        }
    }

    /// What is inside; opens the manager where that has not happened. `None` where the system refuses.
    pub(crate) fn core(&self) -> Option<&Core<P>> {
        loop {
            // Acquire pairs with the Release in `open`.
            match self.state.load(Ordering::Acquire) {
                // SAFETY: the state says that it is initialised.
                OPEN => return Some(unsafe { (*self.core.get()).assume_init_ref() }),
                OPENING => futex::wait(&self.state, OPENING, None, Scope::Process),
                _ => {
                    (self.hooks.open)(self);
                    // Relaxed: only whether to give up.
                    if self.state.load(Ordering::Relaxed) == CLOSED {
                        return None;
                    }
                }
            }
        }
    }

    /// What is inside, if the manager is open.
    pub(crate) fn core_if_open(&self) -> Option<&Core<P>> {
        // Acquire pairs with the Release in `open`. SAFETY: the state says that it is initialised.
        (self.state.load(Ordering::Acquire) == OPEN).then(|| unsafe { (*self.core.get()).assume_init_ref() })
    }

    /// At least `size` bytes on a multiple of 16, or null.
    #[inline(always)]
    pub fn allocate(&self, size: usize) -> *mut u8 {
        self.allocate_or(size, move || self.allocate_otherwise(size))
    }

    #[inline(never)]
    fn allocate_otherwise(&self, size: usize) -> *mut u8 {
        self.allocate_entered_or(size, move || self.allocate_slow(size))
    }

    /// The same from this CPU's stack alone, as long as no thread has entered a group; else what `otherwise` answers, which is [`Mm::allocate_entered_or`].
    #[inline(always)]
    pub fn allocate_or(&self, size: usize, otherwise: impl FnOnce() -> *mut u8) -> *mut u8 {
        match self.hot.allocate(size) {
            Some(object) => object.as_ptr(),
            None => otherwise(),
        }
    }

    /// The same without the fast paths.
    #[cold]
    #[inline(never)]
    pub fn allocate_slow(&self, size: usize) -> *mut u8 {
        // What the fast path is on CPUs without sequences.
        if size <= LARGEST
            && let Some(core) = self.core_if_open()
            && core.is_ordinary()
            && let Some(object) = core.objects.allocate_at_once(Class::of_size(size))
        {
            return object;
        }
        self.allocate_any(size, GRAIN).0
    }

    /// The same, all bytes zero.
    #[inline]
    pub fn allocate_zeroed(&self, size: usize) -> *mut u8 {
        let (memory, zero) =
            if size <= LARGEST { (self.allocate(size), false) } else { self.allocate_any(size, GRAIN) };
        if !zero && !memory.is_null() {
            // SAFETY: the allocation has at least `size` bytes, and is this thread's.
            unsafe { self.zero(memory, size) };
        }
        memory
    }

    /// Makes the first `size` bytes of a fresh allocation zero.
    ///
    /// # Safety
    /// The allocation is the caller's, has that many bytes, and was not written to.
    #[inline]
    unsafe fn zero(&self, memory: *mut u8, size: usize) {
        // SAFETY: the caller promises what both ask for.
        unsafe {
            if size <= LARGEST || !self.zero_run(memory) {
                memory.write_bytes(0, size);
            }
        }
    }

    /// At least `size` bytes on a multiple of `align`, a power of two; or null.
    #[inline]
    pub fn allocate_aligned(&self, size: usize, align: usize) -> *mut u8 {
        if align <= GRAIN { self.allocate(size) } else { self.allocate_any(size, align).0 }
    }

    /// The same, all bytes zero.
    pub fn allocate_zeroed_aligned(&self, size: usize, align: usize) -> *mut u8 {
        if align <= GRAIN {
            return self.allocate_zeroed(size);
        }
        let (memory, zero) = self.allocate_any(size, align);
        if !zero && !memory.is_null() {
            // SAFETY: the allocation has at least `size` bytes, and is this thread's.
            unsafe { self.zero(memory, size) };
        }
        memory
    }

    /// Everything that is not served by the fast path. The second value: whether all bytes are known to be zero.
    fn allocate_any(&self, size: usize, align: usize) -> (*mut u8, bool) {
        if self.core_if_open().is_some_and(|core| !core.is_ordinary()) {
            return self.allocate_any_entered(size, align);
        }
        self.allocate_unpaid(size, align)
    }

    /// The same, which nobody pays for.
    pub(crate) fn allocate_unpaid(&self, size: usize, align: usize) -> (*mut u8, bool) {
        let Some(core) = self.core() else { return (null_mut(), false) };
        if is_beyond_any(size, align) {
            return (null_mut(), false);
        }
        let attempt = || {
            let _inside = self.gate.enter(core.objects.platform.cpu());
            match Class::of_layout(size, align, core.objects.pages.page_size()) {
                Some(class) => core.objects.allocate(class).map(|object| (object, false)),
                None => core.allocate_run(size, align).inspect(|_| core.count_run(size.max(1), 0)),
            }
        };
        let memory = attempt().or_else(|| {
            // Rare, and deep.
            let apart = stack::apart(|| core.make_room_for(self, size, &attempt));
            apart.unwrap_or_else(|| core.make_room_here(self, size, &attempt))
        });
        self.after_allocation(core);
        memory.unwrap_or((null_mut(), false))
    }

    /// What follows a call that took memory, or tried to. Not inside the gate.
    fn after_allocation(&self, core: &Core<P>) {
        if core.options.limit > 0 {
            core.look_at_node(self, core.objects.pages.nearest(&core.objects.platform));
        }
        core.after(self);
    }

    /// Takes back what one of the functions here answered; null is nothing. A pointer that the program does not have ends
    /// the process with a line that says what is wrong with it.
    ///
    /// # Safety
    /// Nobody uses the memory any more.
    #[inline(always)]
    pub unsafe fn free(&self, pointer: *mut u8) {
        match self.hot.free(pointer) {
            Freed::Done => {}
            Freed::Unplaced => self.free_unplaced(pointer),
            Freed::Unknown => self.free_slow(pointer),
        }
    }

    /// Puts an object that is marked as cached, and in nobody's hands, somewhere.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_unplaced(&self, pointer: *mut u8) {
        let Some(core) = self.core_if_open() else { return };
        // SAFETY: an object lies in the arena.
        let class = unsafe { self.hot.kind(pointer) }.class();
        if core.objects.free_at_once(class, pointer) {
            return;
        }
        {
            let _inside = self.gate.enter(core.objects.platform.cpu());
            core.objects.free(class, pointer);
        }
        core.after_free(self, Returned::Objects(class));
    }

    #[cold]
    #[inline(never)]
    fn free_slow(&self, pointer: *mut u8) {
        if pointer.is_null() {
            return;
        }
        let Some(core) = self.core_if_open() else { core_less(pointer) };
        let class = core.class_of(pointer, "free");
        if class != Class::NONE {
            if !core.objects.disown(pointer) {
                core.die_of(class, pointer, "free");
            }
            return self.free_unplaced(pointer);
        }
        let payer = core.run_payer(pointer);
        let bytes = {
            let _inside = self.gate.enter(core.objects.platform.cpu());
            let bytes = core.free_run(pointer);
            core.count_run(0, bytes);
            bytes
        };
        if let Some(payer) = payer {
            self.uncharge_run(payer, bytes as u64);
        }
        core.after_free(self, Returned::Run(bytes));
    }

    /// How many bytes the memory at `pointer` really has; 0 for null.
    pub fn usable_size(&self, pointer: *const u8) -> usize {
        if pointer.is_null() {
            return 0;
        }
        let Some(core) = self.core_if_open() else { core_less(pointer) };
        core.usable_size(pointer, "malloc_usable_size")
    }

    /// How many bytes memory of `size` bytes on a multiple of `align`, a power of two, would really have; 0 where that is refused outright.
    pub fn usable_size_of(&self, size: usize, align: usize) -> usize {
        let Some(core) = self.core() else { return 0 };
        match Class::of_layout(size, align, core.objects.pages.page_size()) {
            Some(class) => class.size(),
            None if is_beyond_any(size, align) => 0,
            None => core.run_price(size) as usize,
        }
    }

    /// Makes the memory at `pointer` at least `size` bytes large, moving it if need be; null with everything as it was
    /// where there is no memory for that. A null pointer allocates. A `size` of 0 is taken for 1.
    ///
    /// # Safety
    /// As for [`Mm::free`], unless the answer is null.
    pub unsafe fn reallocate(&self, pointer: *mut u8, size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { self.reallocate_aligned(pointer, size, GRAIN) }
    }

    /// The same for memory that has to stay on a multiple of `align`.
    ///
    /// # Safety
    /// As for [`Mm::reallocate`]; a non-null `pointer` is on a multiple of `align`.
    pub unsafe fn reallocate_aligned(&self, pointer: *mut u8, size: usize, align: usize) -> *mut u8 {
        if pointer.is_null() {
            return self.allocate_aligned(size, align);
        }
        let Some(core) = self.core_if_open() else { core_less(pointer) };
        let class = core.class_of(pointer, "realloc");
        let usable = core.usable_size(pointer, "realloc");
        if class == Class::NONE {
            let in_place = || {
                let _inside = self.gate.enter(core.objects.platform.cpu());
                let resized = size > LARGEST && core.resize_run(pointer, size);
                let memory = if resized { Some(pointer) } else { core.move_run(pointer, size, align) };
                memory.inspect(|_| core.count_run(size, usable))
            };
            let resized = match core.run_payer(pointer) {
                None => in_place(),
                Some(payer) => self.resize_paid(payer, usable as u64, core.run_price(size), in_place),
            };
            if let Some(memory) = resized {
                if size < usable {
                    core.after_free(self, Returned::Run(usable - size));
                } else {
                    self.after_allocation(core);
                }
                return memory;
            }
        } else if size <= usable && size * 2 > usable || size <= LARGEST && Class::of_size(size) == class {
            return pointer;
        }
        let memory = self.allocate_aligned(size, align);
        if !memory.is_null() {
            // SAFETY: both have at least that many bytes, and are different allocations.
            unsafe { memory.copy_from_nonoverlapping(pointer, usable.min(size)) };
            // SAFETY: as the caller promises.
            unsafe { self.free(pointer) };
        }
        memory
    }
}

/// Pages that may be resident within a limit of so many bytes. Each has 16 bytes of a frame and 4
/// of the kind map, and those of slabs have up to 32 bytes of descriptors.
pub(crate) fn page_budget(limit: u64, page_size: usize) -> u32 {
    const BESIDE: u64 = 16 + 4 + 32;
    (limit / (page_size as u64 + BESIDE)).min(u32::MAX.into()) as u32
}

impl<P: Platform> Core<P> {
    /// Whether nobody pays for what this thread allocates.
    fn is_ordinary(&self) -> bool {
        entered() == 0 && self.options.groups == ThreadGroups::Off
    }

    /// Memory for a core, in which [`Core::open`] makes one: the large parts are there already. A constant, so that the
    /// process's static needs no copy of them.
    const fn unopened() -> MaybeUninit<Core<P>> {
        let mut core = MaybeUninit::<Core<P>>::uninit();
        let place = core.as_mut_ptr();
        // SAFETY: the memory is this function's own.
        unsafe {
            (&raw mut (*place).objects).cast::<MaybeUninit<Objects<P>>>().write(Objects::unopened());
            (&raw mut (*place).per_cpu).write(Place::new());
            (&raw mut (*place).groups).write(Lazy::new());
            (&raw mut (*place).reclaim).write(Lazy::new());
        }
        core
    }

    /// Makes the core where it stays.
    ///
    /// # Safety
    /// * `place` holds [`Core::unopened`], and belongs to the caller.
    /// * `hot` is as [`Objects::open`] wants it.
    unsafe fn open(place: *mut Core<P>, platform: P, options: &Options, hot: &Hot) -> Result<(), Errno> {
        let budget = (options.limit > 0).then(|| page_budget(options.limit, platform.page_size()));
        let maintenance = Maintenance::open(&platform)?;
        let Options { rseq, huge, page_list_high: list_high, .. } = *options;
        let config = Config { span: SPAN, budget, rseq, huge, list_high };
        // Where this fails the maintenance's few pages stay mapped: the caller is about to give up on memory altogether.
        // SAFETY: as the caller promises; an unopened core has unopened objects.
        unsafe { Objects::open(&raw mut (*place).objects, platform, &config, hot)? };
        // SAFETY: the place is the caller's; the objects were opened above, and an unopened core has the other three.
        unsafe {
            neap_base::fill_in_place!(place => Core<P> {
                background: Background::new(options.background != Threads::Never),
                maintenance: maintenance,
                in_call: InCall::new(),
                options: *options,
                run_bytes: AtomicU64::new(0),
                splits: Mutex::new(Splits::new()),
                page: StatPage::new(),
                flushing: Mutex::new(0),
                lists: Lists::new(),
            } keeping objects, per_cpu, groups, reclaim);
        }
        Ok(())
    }

    /// Makes room for an allocation where no stack can be mapped: the caller's has to do.
    #[cold]
    #[inline(never)]
    fn make_room_here<T>(&self, mm: &Mm<P>, bytes: usize, attempt: &dyn Fn() -> Option<T>) -> Option<T> {
        self.make_room_for(mm, bytes, attempt)
    }

    /// What is given up for an allocation that has found no memory, before it fails; nothing else
    /// stands in between. Shrinkers are asked, outside the gate, as long as they give something;
    /// where they do not, others may have freed something meanwhile. Then, or where there are none,
    /// every cache is emptied into the pages, again after those have come out who were inside; and
    /// where it is the limit that refuses, pages of slabs that hold no object go to the system,
    /// which makes room. Last goes what the system may take when it is short of memory.
    #[cold]
    fn make_room_for<T>(&self, mm: &Mm<P>, bytes: usize, attempt: &dyn Fn() -> Option<T>) -> Option<T> {
        // More than fits into the budget when nobody has anything, or than all that there is: caches would give everything up in vain.
        let most = match self.options.limit {
            0 => self.objects.pages.limit() as u64,
            limit => limit,
        };
        if bytes as u64 > most {
            return None;
        }
        for _ in 0..RECLAIMS {
            let Some(gave) = self.reclaim_for_budget(mm, bytes as u64) else { break };
            let memory = attempt();
            if memory.is_some() {
                return memory;
            }
            if !gave {
                break;
            }
        }
        self.drain_for(mm, attempt).or_else(|| {
            let mut made_room = false;
            if self.options.limit > 0 {
                mm.inside_to_the_end(self, |stop| made_room |= self.objects.punch(true, stop).released > 0);
            }
            if self.objects.pages.lazily_free() > 0 {
                mm.inside_to_the_end(self, |stop| made_room |= self.release_lazily_free(stop) > 0);
            }
            if made_room { attempt() } else { None }
        })
    }

    /// Empties every cache for an allocation that has found no memory.
    fn drain_for<T>(&self, mm: &Mm<P>, attempt: &dyn Fn() -> Option<T>) -> Option<T> {
        let (mut memory, mut pages) = (None, 0);
        for round in 0..ROUNDS {
            if !self.objects.platform.may_fence() {
                self.objects.helper.ask(LAST_RESORT);
            }
            mm.inside_to_the_end(self, |stop| pages += self.drain_everything(false, stop));
            memory = attempt();
            if memory.is_some() {
                break;
            }
            // Who is inside has pages and objects in hands, which are in lists and stacks when it comes out: 1. A takes a batch, and is stopped. 2. B finds
            // nothing. 3. A puts all of it but one away. A may have come out before it is looked for, so there are two rounds at least.
            let mut looks = 0;
            let was_inside = mm.gate.outwait(LOOKS, || {
                looks += 1;
                if looks < QUICK { self.objects.platform.pause() } else { self.objects.platform.sleep(NAP) }
            });
            if round > 0 && !was_inside {
                break;
            }
        }
        self.objects.pages.count_need(pages);
        memory
    }
}

/// How often shrinkers are asked, for one allocation.
const RECLAIMS: u32 = 4;

/// Nanoseconds that an allocation that is about to fail waits for the stacks of all CPUs to be
/// emptied by neap's thread.
const LAST_RESORT: u64 = 100_000_000;

/// How often such an allocation tries again while others were inside.
const ROUNDS: u32 = 4;
/// How often it looks whether these have come out, each time: at first without a nap, then for many slices of the scheduler's.
const LOOKS: u32 = 64;
const QUICK: u32 = 16;

/// The most address space for memory that is handed out: what 32-bit page numbers reach with 4 KiB pages.
const SPAN: usize = 16 << 40;

/// A pointer came back before anything was given out.
#[cold]
fn core_less(pointer: *const u8) -> ! {
    neap_os::write::die(format_args!(
        "free: {pointer:p} is not from this allocator, which has not allocated anything yet"
    ))
}
