//! RCU on the real machine: readers on all CPUs that move and sleep, writers, steps, and forks.
//!
//! Goals: an object that a reader found stays valid until the reader leaves. Every deferred object
//! is freed in the end, once. A child that was forked while other threads read frees the objects
//! that were deferred before.
//!
//! Method: freed objects are poisoned and reused at once, so a reader of a freed object sees
//! another number. The tests run with every kind of counting: by sequences, without, and with one
//! CPU isolated. `NEAP_RCU_READS` sets the number of sections of each reader.
#![cfg(not(loom))]

mod deferral;

use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::{NonNull, null, null_mut};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use deferral::Deferral;
use neap_base::platform::{Linux, Platform};
use neap_os::topology::CpuSet;
use neap_testing::child::in_child;
use neap_testing::random::{Random, number, seed};
use std::sync::Mutex;

const READERS: u64 = 4;
const WRITERS: u64 = 2;
const CELLS: usize = 4;
const POISON: u64 = u64::MAX;

struct Object {
    number: AtomicU64,
}

/// A deferred object.
struct Replaced(NonNull<Object>);

// SAFETY: a deferred object belongs to the thread that takes it out of the list.
unsafe impl Send for Replaced {}

/// Cells that are read, and unused objects.
struct World {
    deferral: Deferral<Replaced>,
    cells: [AtomicPtr<Object>; CELLS],
    unused: Mutex<Vec<NonNull<Object>>>,
    /// Objects made, deferred, freed.
    counts: [AtomicUsize; 3],
    /// Tells threads to end.
    done: AtomicBool,
}

// SAFETY: an unused or deferred object belongs to the thread that takes it out of a mutex. The
// other fields are atomics and a domain.
unsafe impl Sync for World {}

impl World {
    fn new(machine: Option<&Linux>) -> World {
        let world = World {
            deferral: Deferral::new(),
            cells: [const { AtomicPtr::new(core::ptr::null_mut()) }; CELLS],
            unused: Mutex::default(),
            counts: [const { AtomicUsize::new(0) }; 3],
            done: AtomicBool::new(false),
        };
        if let Some(machine) = machine {
            world.deferral.rcu.open(machine).unwrap();
        }
        (0..CELLS).for_each(|cell| world.cells[cell].store(world.fresh(0).as_ptr(), Ordering::Relaxed));
        world
    }

    /// An object that no other thread knows.
    fn fresh(&self, number: u64) -> NonNull<Object> {
        let unused = self.unused.lock().unwrap().pop();
        let object = unused.unwrap_or_else(|| {
            self.counts[0].fetch_add(1, Ordering::Relaxed);
            NonNull::from(Box::leak(Box::new(Object { number: AtomicU64::new(POISON) })))
        });
        // SAFETY: objects are never deallocated.
        unsafe { object.as_ref() }.number.store(number, Ordering::Relaxed);
        object
    }

    /// Puts another object into a cell and defers the one that was there.
    fn replace(&self, cell: usize, number: u64) {
        // AcqRel pairs with itself, and as a Release with the Acquire in `read`.
        let old = self.cells[cell].swap(self.fresh(number).as_ptr(), Ordering::AcqRel);
        self.counts[1].fetch_add(1, Ordering::Relaxed);
        self.deferral.defer(Replaced(NonNull::new(old).unwrap()));
    }

    fn free(&self, Replaced(object): Replaced) {
        // SAFETY: objects are never deallocated.
        let was = unsafe { object.as_ref() }.number.swap(POISON, Ordering::Relaxed);
        assert_ne!(was, POISON, "freed twice");
        self.counts[2].fetch_add(1, Ordering::Relaxed);
        self.unused.lock().unwrap().push(object);
    }

    fn advance(&self, machine: &Linux) -> bool {
        self.deferral.advance(machine, |object| self.free(object)).unwrap()
    }

    fn wait(&self, machine: &Linux) {
        self.deferral.wait(machine, |object| self.free(object)).unwrap();
    }

    /// Reads a cell's object, runs `meanwhile`, and reads it again.
    fn read(&self, cell: usize, meanwhile: impl FnOnce()) {
        let _reading = self.deferral.rcu.enter();
        // Acquire pairs with the AcqRel in `replace`.
        let object = self.cells[cell].load(Ordering::Acquire);
        // SAFETY: objects are never deallocated.
        let object = unsafe { &*object };
        let before = object.number.load(Ordering::Relaxed);
        meanwhile();
        let after = object.number.load(Ordering::Relaxed);
        assert!(before == after && before != POISON, "an object that is read was freed: {before}, then {after}");
    }
}

/// Tells threads to end when dropped, also if a test fails.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Pins this thread to a CPU, if it may run there.
fn move_to(cpu: usize) {
    // SAFETY: a zeroed set of CPUs is valid, and the calls only read or write it.
    unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

fn reader(world: &World, machine: &Linux, mut random: Random) {
    for _ in 0..number("NEAP_RCU_READS", 200_000) {
        let (cell, inner) = (random.below(CELLS), random.below(CELLS));
        match random.below(1000) {
            0 => world.read(cell, || move_to(random.below(machine.cpus()))),
            1 => world.read(cell, || machine.sleep(1000)),
            2..20 => world.read(cell, || machine.pause()),
            20..200 => world.read(cell, || world.read(inner, || ())),
            _ => world.read(cell, core::hint::spin_loop),
        }
    }
}

/// Every kind of counting: its name, whether the domain is opened, and the machine.
fn kinds() -> Vec<(&'static str, bool, Linux)> {
    let mut isolated = CpuSet::EMPTY;
    isolated.insert(0);
    let machine = Linux::probe();
    vec![
        ("sequences", true, machine),
        ("lanes", false, machine),
        ("CPU 0 isolated", true, machine.with_isolated(&isolated)),
    ]
}

#[test]
fn nothing_is_freed_under_a_reader_and_everything_in_the_end() {
    let seed = seed();
    for (kind, opened, machine) in kinds() {
        println!("{kind}");
        let world = World::new(opened.then_some(&machine));
        std::thread::scope(|scope| {
            let (world, machine) = (&world, &machine);
            let _done = Done(&world.done);
            let readers: Vec<_> =
                (0..READERS).map(|at| scope.spawn(move || reader(world, machine, Random(seed + at)))).collect();
            let reading = || readers.iter().any(|reader| !reader.is_finished());
            for at in 0..WRITERS {
                scope.spawn(move || {
                    let mut random = Random(seed + READERS + at);
                    let mut next = 1;
                    // Relaxed: one more iteration is harmless.
                    while !world.done.load(Ordering::Relaxed) {
                        world.replace(random.below(CELLS), next);
                        next += 1;
                        match random.below(64) {
                            0 => world.wait(machine),
                            1..4 => machine.pause(),
                            _ => {}
                        }
                    }
                });
            }
            while reading() {
                world.advance(machine);
                machine.pause();
            }
        });
        world.wait(&machine);
        let [made, deferred, freed] = [0, 1, 2].map(|count| world.counts[count].load(Ordering::Relaxed));
        assert_eq!((freed, made), (deferred, world.unused.lock().unwrap().len() + CELLS));
        assert!(deferred > 100 * CELLS, "{kind}: {deferred} objects were replaced");
        println!("{kind}: {made} objects made, {deferred} deferred");
    }
}

/// Checks the purpose of the fence. A reader's count still waits in its CPU's store buffer, behind
/// slow stores, while the reader has found an object already. Needs two CPUs.
#[test]
fn rcu_reader_count_in_store_buffer_delays_free() {
    const LINE: usize = 64 / size_of::<AtomicU64>();
    const FAR: usize = 1 << 22;
    let (seed, machine) = (seed(), Linux::probe());
    let world = World::new(Some(&machine));
    let far: Vec<AtomicU64> = (0..FAR).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let (world, machine, far) = (&world, &machine, &far);
        let reader = scope.spawn(move || {
            move_to(0);
            let mut random = Random(seed);
            for _ in 0..number("NEAP_RCU_READS", 200_000) {
                (0..8).for_each(|_| far[random.below(FAR / LINE) * LINE].store(1, Ordering::Relaxed));
                world.read(0, || (0..200).for_each(|_| core::hint::spin_loop()));
            }
        });
        move_to(1);
        let mut next = 1;
        while !reader.is_finished() {
            world.replace(0, next);
            world.advance(machine);
            next += 1;
        }
    });
}

/// Reads in a thread that the standard library did not create. When the child was forked, another
/// thread of the parent may have been starting one, and its locks stay held in the child for ever.
fn read_in_a_thread(world: &World, machine: &Linux) {
    extern "C" fn reads(of: *mut c_void) -> *mut c_void {
        // SAFETY: `of` is the pair below, which lives until this thread was joined.
        let (world, machine) = unsafe { *of.cast::<(&World, &Linux)>() };
        (0..100).for_each(|_| world.read(0, || machine.pause()));
        null_mut()
    }
    let (mut of, mut thread) = ((world, machine), MaybeUninit::<libc::pthread_t>::uninit());
    // SAFETY: the pointers are valid during the calls. The thread is joined once, after its
    // creation wrote its number.
    unsafe {
        assert_eq!(libc::pthread_create(thread.as_mut_ptr(), null(), reads, (&raw mut of).cast()), 0);
        assert_eq!(libc::pthread_join(thread.assume_init(), null_mut()), 0);
    }
}

/// The child of a process with readers everywhere. It waits for its own readers only.
fn child(world: &World, machine: &Linux, own: neap_base::rcu::Reading<'_>) {
    if machine.rseq_offset().is_some() {
        neap_os::fence::register().unwrap();
    }
    // SAFETY: this thread is the only one, and uses no object that it found before.
    unsafe { world.deferral.rcu.forget_others() };
    let all_freed = || world.counts[1].load(Ordering::Relaxed) == world.counts[2].load(Ordering::Relaxed);
    let mut steps = (0..100).map(|_| world.advance(machine));
    assert!(!all_freed() && steps.any(|left| !left) && all_freed(), "what was deferred before the fork is not freed");
    let reading = world.deferral.rcu.enter();
    drop(own);
    world.replace(1, 1);
    assert!((0..100).all(|_| world.advance(machine)) && !all_freed());
    drop(reading);
    world.wait(machine);
    assert!(all_freed());
    // Threads of the child can read, too.
    read_in_a_thread(world, machine);
    world.replace(0, 2);
    world.wait(machine);
    assert!(all_freed());
}

#[test]
fn rcu_child_forgets_parent_readers_and_frees_deferred() {
    let seed = seed();
    for (kind, opened, machine) in kinds() {
        println!("{kind}");
        let world = World::new(opened.then_some(&machine));
        std::thread::scope(|scope| {
            let (world, machine) = (&world, &machine);
            let _done = Done(&world.done);
            for at in 0..READERS {
                scope.spawn(move || {
                    let mut random = Random(seed + at);
                    // Relaxed: one more iteration is harmless.
                    while !world.done.load(Ordering::Relaxed) {
                        world.read(random.below(CELLS), || machine.pause());
                    }
                });
            }
            let mut random = Random(seed);
            for number in 1..=50 {
                let own = world.deferral.rcu.enter();
                (0..random.below(5) + 1).for_each(|_| world.replace(random.below(CELLS), number));
                // In the child, the period has not begun, or it has begun and waits for a reader.
                if random.below(2) == 0 {
                    world.advance(machine);
                }
                in_child(|| child(world, machine, world.deferral.rcu.enter()));
                drop(own);
            }
        });
        world.wait(&machine);
        assert_eq!(world.counts[1].load(Ordering::Relaxed), world.counts[2].load(Ordering::Relaxed));
    }
}
