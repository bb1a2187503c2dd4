//! Realtime threads of three priorities on one CPU: the claims of `docs/design/realtime.md`.
//!
//! The lowest thread holds neap's locks, the middle one takes its CPU, and the highest one needs
//! the locks. Waits are counted as sleeps of a thread (voluntary context switches), never as time.
//! A thread that spun for a lock of a preempted thread would spin forever; a watchdog ends that.
//!
//! Needs the right to use `SCHED_FIFO`; says so on standard error where it is missing.

use core::ptr::{NonNull, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use core::time::Duration;
use neap::drain::Scope;
use neap::groups::{Bound, Group};
use neap::lru::{By, Item, LruStatus, RawList};
use neap::process::PROCESS;
use neap_testing::child::in_child;
use std::io::{Error, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

const LOW: i32 = 10;
const MIDDLE: i32 = 20;
const HIGH: i32 = 30;

/// Writes to standard error, which the test harness does not capture then.
fn say(text: &str) {
    _ = writeln!(std::io::stderr(), "{text}");
}

/// The right to use the CPU, for one test at a time, and a watchdog that ends the process.
struct Stage {
    /// CPUs of the process, at least one.
    cpus: Vec<usize>,
    over: Arc<AtomicBool>,
    _turn: MutexGuard<'static, ()>,
}

impl Stage {
    /// Returns `None`, and says so, if this process may not use realtime priorities.
    fn new(name: &'static str) -> Option<Stage> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = std::thread::spawn(|| be_realtime(LOW)).join().unwrap() {
            say(&format!("SKIPPED: {name}: no SCHED_FIFO ({error}); grant CAP_SYS_NICE or `ulimit -r 99`"));
            return None;
        }
        // Without ticks, no thread of neap drains what the threads of the test have cached.
        neap::set("interval", "60000").unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let (watched, text) = (over.clone(), format!("{name}: no end after 60 s: a wait for a preempted holder\n"));
        std::thread::spawn(move || {
            be_realtime(99).unwrap();
            // Uses nothing of neap, whose locks may be the reason.
            for _ in 0..600 {
                std::thread::sleep(Duration::from_millis(100));
                if watched.load(Relaxed) {
                    return;
                }
            }
            // SAFETY: the text is there. The process ends at once: the test's threads do not end.
            unsafe {
                libc::write(2, text.as_ptr().cast(), text.len());
                libc::_exit(101);
            }
        });
        // SAFETY: all zeroes is a valid set, and the set is this function's.
        let cpus: Vec<usize> = unsafe {
            let mut set: libc::cpu_set_t = core::mem::zeroed();
            assert_eq!(libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set), 0);
            (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
        };
        Some(Stage { cpus, over, _turn: turn })
    }

    /// Starts a thread with a realtime priority on a CPU.
    fn start<R: Send + 'static>(
        &self,
        cpu: usize,
        priority: i32,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> JoinHandle<R> {
        std::thread::spawn(move || {
            // SAFETY: all zeroes is a valid set, and the set is this function's.
            unsafe {
                let mut set: libc::cpu_set_t = core::mem::zeroed();
                libc::CPU_SET(cpu, &mut set);
                assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set), 0);
            }
            be_realtime(priority).unwrap();
            work()
        })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
    }
}

/// Gives this thread a realtime priority.
fn be_realtime(priority: i32) -> Result<(), Error> {
    // SAFETY: all zeroes is a valid value. musl's has more fields.
    let mut parameters: libc::sched_param = unsafe { core::mem::zeroed() };
    parameters.sched_priority = priority;
    // SAFETY: the parameters are this function's.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Returns how often this thread has slept.
fn sleeps() -> i64 {
    // SAFETY: all zeroes is a valid value, which the call overwrites.
    unsafe {
        let mut usage: libc::rusage = core::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
        usage.ru_nvcsw
    }
}

/// Uses the CPU, and so keeps it from lower priorities. The budget is one of steps.
fn burn(steps: u32) {
    (0..steps).for_each(|step| _ = core::hint::black_box(step));
}

/// An item that any thread may name. It is never moved nor freed.
#[derive(Clone, Copy)]
struct At(NonNull<Item>);

// SAFETY: `RawList` protects items by its own locks.
unsafe impl Send for At {}

#[test]
fn waiters_sleep_once_and_get_the_lock_by_priority() {
    let Some(stage) = Stage::new("waiters_sleep_once_and_get_the_lock_by_priority") else { return };
    let (cpu, list) = (stage.cpus[0], RawList::open(By::RootAlone).unwrap());
    let items: [At; 4] = core::array::from_fn(|_| At(NonNull::from(Box::leak(Box::new(Item::new())))));
    // SAFETY: the items are never moved nor freed, and the list is not closed.
    unsafe { assert!(list.add(Group::ROOT, 0, items[0].0).unwrap()) };
    let (ready, asked, burnt) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), AtomicBool::new(false));
    // The lowest of them asks first.
    let waiters: Vec<JoinHandle<i64>> = [LOW + 5, MIDDLE + 5, HIGH]
        .into_iter()
        .zip(&items[1..])
        .map(|(priority, &item)| {
            let (ready, asked) = (ready.clone(), asked.clone());
            stage.start(cpu, priority, move || {
                let item = item;
                ready.fetch_add(1, Relaxed);
                std::thread::park();
                asked.fetch_add(1, Relaxed);
                let before = sleeps();
                // SAFETY: the items are never moved nor freed, and no walk's callback runs here.
                unsafe { assert!(list.add(Group::ROOT, 0, item.0).unwrap()) };
                sleeps() - before
            })
        })
        .collect();
    let burnt = Arc::new(burnt);
    let burner = stage.start(cpu, MIDDLE, {
        let (ready, burnt) = (ready.clone(), burnt.clone());
        move || {
            ready.fetch_add(1, Relaxed);
            std::thread::park();
            burn(30_000_000);
            burnt.store(true, Relaxed);
        }
    });
    while ready.load(Relaxed) < 4 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // From here on the holder runs only while all of them sleep: they have higher priorities.
    let threads: Vec<Thread> = waiters.iter().map(|waiter| waiter.thread().clone()).collect();
    let middle = burner.thread().clone();
    let holder = stage.start(cpu, LOW, move || {
        let mut seen = Vec::with_capacity(8);
        let hold = |_| {
            // The lock is held. Each wake-up preempts this thread until the woken one sleeps.
            for thread in &threads {
                thread.unpark();
                seen.push(asked.load(Relaxed));
            }
            middle.unpark();
            seen.push(usize::from(burnt.load(Relaxed)));
            LruStatus::Skip
        };
        // SAFETY: the callback wakes threads, which neither waits nor allocates, as the vector has
        // room. It calls nothing of neap.
        unsafe { list.walk(Group::ROOT, 0, 1, hold, |_| ()) };
        seen
    });
    assert_eq!(holder.join().unwrap(), [1, 2, 3, 1], "all waited for the lock, and the middle one was done");
    burner.join().unwrap();
    let slept: Vec<i64> = waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect();
    assert_eq!(slept, [1, 1, 1], "each waiter sleeps until its turn");
    let mut order = Vec::with_capacity(8);
    let note = |item| {
        order.push(item);
        LruStatus::Skip
    };
    // SAFETY: the callback neither waits nor allocates, as the vector has room.
    unsafe { list.walk(Group::ROOT, 0, 8, note, |_| ()) };
    assert_eq!(order, [0, 3, 2, 1].map(|at| items[at].0), "the highest priority gets the lock first");
}

/// Pseudo-random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ mixed >> 31) % bound
    }

    /// Sleeps for a short time, so that threads of lower priority are preempted anywhere.
    fn nap(&mut self) {
        std::thread::sleep(Duration::from_micros(20 + self.below(150)));
    }
}

/// Allocates blocks of one size and frees them: in numbers, by slow paths.
fn burst(size: usize, blocks: usize, kept: &mut Vec<usize>) {
    kept.extend((0..blocks).map(|_| PROCESS.allocate(size).expose_provenance()).filter(|&block| block != 0));
    // SAFETY: the blocks were allocated above, and are freed once.
    kept.drain(..).for_each(|block| unsafe { PROCESS.free(with_exposed_provenance_mut(block)) });
}

/// Sizes of small blocks are multiples of it.
const SIZE_STEP: usize = 1000;

/// Calls of neap that take its locks.
fn slow_call(random: &mut Random, group: Group, kept: &mut Vec<usize>, cpu: usize) {
    match random.below(8) {
        0..4 => burst(SIZE_STEP * (1 + random.below(2) as usize), 600, kept),
        4 => burst(100_000, 20, kept),
        5 => drop(group.request(300 << 10).overcharge().now().unwrap()),
        6 => group.drain().unwrap(),
        _ => _ = PROCESS.drain(&Scope { cpu: Some(cpu as u32), ..Scope::ALL }).unwrap(),
    }
}

/// Runs `work` at the highest priority on the first CPU. Meanwhile the lowest thread calls `low`
/// again and again on `cpu`, and the middle one takes that CPU at any moment.
fn disturbed<R: Send + 'static>(
    stage: &Stage,
    cpu: usize,
    seed: u64,
    mut low: impl FnMut(&mut Random) + Send + 'static,
    work: impl FnOnce() -> R + Send + 'static,
) -> R {
    let stop = Arc::new(AtomicBool::new(false));
    let [stop_low, stop_middle] = [stop.clone(), stop.clone()];
    let low = stage.start(cpu, LOW, move || {
        let mut random = Random(seed);
        while !stop_low.load(Relaxed) {
            low(&mut random);
        }
    });
    let middle = stage.start(cpu, MIDDLE, move || {
        let mut random = Random(seed + 1);
        while !stop_middle.load(Relaxed) {
            random.nap();
            burn(300_000);
        }
    });
    let answer = stage.start(stage.cpus[0], HIGH, work).join();
    stop.store(true, Relaxed);
    [low, middle].into_iter().for_each(|other| other.join().unwrap());
    answer.unwrap()
}

/// Returns a function for the lowest thread that makes slow calls.
fn slow_calls(group: Group, cpu: usize) -> impl FnMut(&mut Random) {
    let mut kept = Vec::with_capacity(600);
    move |random| slow_call(random, group, &mut kept, cpu)
}

#[test]
fn calls_without_a_wait_never_sleep() {
    const SEED: u64 = 3;
    const FIRST: i64 = 500;
    const ROUNDS: i64 = 2500;
    let name = "calls_without_a_wait_never_sleep";
    let Some(stage) = Stage::new(name) else { return };
    // The lower two are on another CPU, so that they leave the stacks and stocks of this one alone.
    let Some(&cpu) = stage.cpus.get(1) else { return say(&format!("SKIPPED: {name}: only one CPU")) };
    let [own, other] = ["realtime/own", "realtime/other"].map(|path| Group::create(path).unwrap());
    let slept = disturbed(&stage, cpu, SEED, slow_calls(other, cpu), move || {
        let (mut random, mut slept) = (Random(SEED), [0; 2]);
        // The first rounds fill stacks and stocks.
        for round in 0..FIRST + ROUNDS {
            random.nap();
            let size = SIZE_STEP * (1 + random.below(2) as usize);
            let before = sleeps();
            for _ in 0..10 {
                let block = PROCESS.allocate(size);
                assert!(!block.is_null());
                // SAFETY: the block was allocated above.
                unsafe { PROCESS.free(block) };
            }
            let between = sleeps();
            (0..10).for_each(|_| drop(own.charge(64).unwrap()));
            if round >= FIRST {
                slept[0] += between - before;
                slept[1] += sleeps() - between;
            }
        }
        slept
    });
    println!("seed {SEED}: {slept:?} sleeps in malloc and free, and in charges");
    // The lower two drain all CPUs now and then, before they take fresh memory. A stack is empty
    // after that, and its refill may wait for a lock.
    assert!(
        slept[0] <= ROUNDS / 100 && slept[1] == 0,
        "seed {SEED}: {slept:?} sleeps in malloc and free, and in charges"
    );
}

#[test]
fn slow_calls_end_though_lower_priorities_hold_locks() {
    const SEED: u64 = 5;
    const CALLS: i64 = 1500;
    let Some(stage) = Stage::new("slow_calls_end_though_lower_priorities_hold_locks") else { return };
    let group = Group::create("realtime-shared").unwrap();
    let cpu = stage.cpus[0];
    let mut slow = slow_calls(group, cpu);
    let low = move |random: &mut Random| match random.below(40) {
        // The fork gate is closed meanwhile.
        0 => in_child(|| {}),
        _ => slow(random),
    };
    let (slept, most) = disturbed(&stage, stage.cpus[0], SEED, low, move || {
        let (mut random, mut kept) = (Random(SEED + 2), Vec::with_capacity(600));
        let (mut slept, mut most) = (0, 0);
        for _ in 0..CALLS {
            random.nap();
            let before = sleeps();
            slow_call(&mut random, group, &mut kept, cpu);
            let times = sleeps() - before;
            (slept, most) = (slept + times, most.max(times));
        }
        (slept, most)
    });
    println!("seed {SEED}: {CALLS} slow calls slept {slept} times, one of them {most} times");
    // A call sleeps once for each lock that it takes, and a drain naps eight times.
    assert!(most <= 16, "seed {SEED}: {most} sleeps in one call");
    PROCESS.verify(64).unwrap();
}

#[test]
fn charge_waits_asleep_for_room_of_a_lower_priority() {
    const SEED: u64 = 7;
    const ROOM: u64 = 1 << 20;
    let Some(stage) = Stage::new("charge_waits_asleep_for_room_of_a_lower_priority") else { return };
    let group = Group::create("realtime-full").unwrap();
    group.set(Bound::Max, ROOM).unwrap();
    // The lowest thread has all of the room nearly always.
    let low = move |_: &mut Random| {
        let all = group.request(ROOM).wait().unwrap();
        burn(20_000);
        drop(all);
    };
    let most = disturbed(&stage, stage.cpus[0], SEED, low, move || {
        let (mut random, mut most) = (Random(SEED + 2), 0);
        for _ in 0..300 {
            random.nap();
            let before = sleeps();
            drop(group.request(64 << 10).wait().unwrap());
            most = most.max(sleeps() - before);
        }
        most
    });
    println!("seed {SEED}: a waiting charge slept {most} times at most");
    assert!(most <= 16, "seed {SEED}: {most} sleeps in one charge");
    group.drain().unwrap();
    assert_eq!(group.used().unwrap(), 0);
}
