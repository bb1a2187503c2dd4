//! Threads, a drainer, migration and a storm of signals on the real system.
//!
//! Goal: the scheduler, signals, fences and drains make no sequence and no lock lose an object,
//! hand one out twice, or lose a block's contents; and at any moment all counters add up.
//!
//! Method: six threads allocate, free, resize and hand blocks to each other, and check every byte.
//! Meanwhile one thread drains, ticks and releases as fast as it can, and verifies the manager now
//! and then. One moves the threads from CPU to CPU. One sends them signals, whose handlers do
//! nothing, or spin past the end of a sequence. In the end everything is freed and nothing may be
//! left. `NEAP_SECONDS` sets the duration.

mod program;

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use neap::options::Options;
use neap_base::{Linux, Platform};
use neap_testing::random::{Random, number, seed};
use neap_testing::shared::Shared;
use program::{Block, OPTIONS, Opened, Program, Request, linux, nothing_is_kept};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

const THREADS: usize = 6;

/// Blocks that one thread hands to another.
type Pool = Mutex<Vec<(usize, Block)>>;

/// The tests of this file need the CPUs for themselves.
static TURN: Mutex<()> = Mutex::new(());

static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn nothing(_: i32) {
    HANDLED.fetch_add(1, Relaxed);
}

/// Longer than any sequence, sometimes longer than a time slice.
extern "C" fn spins(_: i32) {
    let turns = if HANDLED.fetch_add(1, Relaxed).is_multiple_of(1000) { 1_000_000 } else { 300 };
    (0..turns).for_each(|_| core::hint::spin_loop());
}

fn handle(signal: i32, handler: extern "C" fn(i32)) {
    // SAFETY: all zeroes is a valid value; the handlers touch one atomic.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(signal, &raw const action, core::ptr::null_mut()), 0);
    }
}

/// Restricts a thread to some of the first four CPUs, by the bits of `cpus`.
fn run_on(thread: i32, cpus: usize) {
    // SAFETY: all zeroes is a valid set, which is this function's.
    unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        (0..4).filter(|cpu| cpus >> cpu & 1 == 1).for_each(|cpu| libc::CPU_SET(cpu, &mut set));
        // If none of them exists the thread stays where it is.
        _ = libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

/// Works until told to stop. If memory is `scarce`, failed allocations are accepted.
fn work<P: Platform>(
    program: &mut Program<'_, P>,
    pool: &Pool,
    random: &mut Random,
    stop: &AtomicBool,
    scarce: bool,
) -> (u64, u64) {
    const SIZES: [usize; 14] = [1, 16, 24, 64, 64, 64, 100, 256, 700, 2000, 5000, 30_000, 40_000, 300_000];
    let (mut steps, mut refused) = (0, 0);
    while !stop.load(Relaxed) {
        steps += 1;
        let size = SIZES[random.below(SIZES.len())];
        match random.below(20) {
            0..7 => {
                let align = if random.below(10) == 0 { 1 << random.below(13) } else { 1 };
                refused += u64::from(!program.allocate(Request { size, align, zeroed: random.below(4) == 0 }));
            }
            7 => {
                let many = random.below(200_000 / size.max(200) + 2);
                let mut one = || program.allocate(Request { size, align: 1, zeroed: false });
                refused += (0..many).filter(|_| !one()).count() as u64;
            }
            8 => {
                if let Some(start) = program.choose(random.below(usize::MAX)) {
                    refused += u64::from(!program.reallocate(start, size));
                }
            }
            9 | 10 => {
                if let Some(start) = program.choose(random.below(usize::MAX)) {
                    let block = program.give_away(start);
                    pool.lock().unwrap().push(block);
                }
            }
            11 | 12 => {
                let block = pool.lock().unwrap().pop();
                block.into_iter().for_each(|block| program.adopt(block));
            }
            _ => {
                if let Some(start) = program.choose(random.below(usize::MAX)) {
                    program.free(start);
                }
            }
        }
        while program.blocks.len() > 400 {
            let start = program.choose(random.below(usize::MAX)).unwrap();
            program.free(start);
        }
        assert!(scarce || refused == 0, "there is memory");
    }
    (steps, refused)
}

/// The disturbances of the working threads.
struct Storm {
    /// By the kernel's number. The C libraries have different types for theirs.
    threads: Mutex<Vec<i32>>,
    stop: AtomicBool,
    /// Threads that may still be signalled.
    working: AtomicU32,
}

impl Storm {
    fn signals(&self) {
        let mut random = Random(7);
        while self.working.load(Relaxed) as usize == THREADS {
            for thread in self.threads.lock().unwrap().iter() {
                let signal = if random.below(3) == 0 { libc::SIGUSR2 } else { libc::SIGUSR1 };
                // SAFETY: the signal has a handler. The thread has not ended: it waits for the
                // storm.
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), *thread, signal) };
            }
            std::thread::sleep(Duration::from_micros(50 + random.below(200) as u64));
        }
    }

    fn migrations(&self) {
        let mut random = Random(8);
        while self.working.load(Relaxed) as usize == THREADS {
            for thread in self.threads.lock().unwrap().iter() {
                run_on(*thread, 1 + random.below(15));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn drains(&self, mm: &Opened<Shared<Linux>>) -> u64 {
        let (mut random, mut now, mut proofs) = (Random(9), 0, 0);
        while self.working.load(Relaxed) as usize == THREADS {
            now += 1;
            mm.tick(now);
            // The first proof comes early: on an emulated machine a turn may take a tenth of a
            // second.
            match if proofs == 0 && now > 20 { 3 } else { random.below(300) } {
                0..3 => _ = mm.release_all(),
                // A thread between a stack and itself has one object in its hands; a thread that
                // resizes a run has none.
                3 => {
                    let census = mm.verify(THREADS as u64).unwrap_or_else(|finding| panic!("under load: {finding}"));
                    assert!(census.in_hands <= THREADS as u64);
                    proofs += 1;
                }
                4..40 => std::thread::yield_now(),
                _ => {}
            }
        }
        proofs
    }
}

fn stress(machine: &Shared<Linux>, options: &Options, seconds: f64) {
    let seed = seed();
    println!("for {seconds} seconds (NEAP_SECONDS)");
    handle(libc::SIGUSR1, nothing);
    handle(libc::SIGUSR2, spins);
    let mm = Opened::new(machine.clone(), options).unwrap();
    let storm =
        Storm { threads: Mutex::default(), stop: AtomicBool::new(false), working: AtomicU32::new(THREADS as u32) };
    let (pool, mut left) = (Pool::default(), BTreeMap::<usize, Block>::new());
    let proofs = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS as u64)
            .map(|number| {
                let (mm, storm, pool) = (&mm, &storm, &pool);
                scope.spawn(move || {
                    // SAFETY: about this thread.
                    let me = unsafe { libc::gettid() };
                    storm.threads.lock().unwrap().push(me);
                    let mut program = Program::new(mm);
                    let scarce = options.limit > 0;
                    let steps = work(&mut program, pool, &mut Random(seed + number), &storm.stop, scarce);
                    // From here on no signal is sent to this thread.
                    storm.working.fetch_sub(1, Relaxed);
                    storm.threads.lock().unwrap().retain(|thread| *thread != me);
                    (steps, core::mem::take(&mut program.blocks))
                })
            })
            .collect();
        scope.spawn(|| storm.signals());
        scope.spawn(|| storm.migrations());
        let drainer = scope.spawn(|| storm.drains(&mm));
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        while Instant::now() < end && !threads.iter().any(|thread| thread.is_finished()) && !drainer.is_finished() {
            std::thread::sleep(Duration::from_millis(20));
        }
        storm.stop.store(true, Relaxed);
        let (mut steps, mut refused) = (0, 0);
        for thread in threads {
            let (done, blocks) = thread.join().unwrap_or_else(|_| std::process::abort());
            (steps, refused) = (steps + done.0, refused + done.1);
            blocks
                .into_iter()
                .for_each(|(start, block)| assert!(left.insert(start, block).is_none(), "{start:#x} twice"));
        }
        println!("{steps} steps, {refused} without memory, {} signals", HANDLED.load(Relaxed));
        drainer.join().unwrap()
    });
    assert!(proofs > 0, "no proof was made under load");
    // All remaining memory is known; then nothing is left.
    let mut rest = Program::new(&mm);
    left.into_iter().chain(pool.into_inner().unwrap()).for_each(|block| rest.adopt(block));
    rest.end();
    nothing_is_kept(&mm);
    println!("{proofs} proofs, {} fences", machine.fences.load(Relaxed));
}

fn seconds() -> f64 {
    number("NEAP_SECONDS", 0) as f64
}

#[test]
fn a6_b6_nothing_is_lost_to_drains_signals_and_migration() {
    let _turn = TURN.lock().unwrap();
    // One after the other: there are two CPUs for nine threads.
    for (rseq, limit, least) in [(true, 0, 4.0), (false, 0, 1.5), (true, 6 << 20, 1.0)] {
        let (machine, options) = linux(rseq);
        stress(&machine, &Options { limit, ..options }, seconds().max(least));
    }
}

#[test]
fn nothing_is_lost_between_nodes_either() {
    let _turn = TURN.lock().unwrap();
    for limit in [0, 12 << 20] {
        let machine = Shared::new(Linux::probe().with_nodes(2));
        stress(&machine, &Options { limit, ..OPTIONS }, seconds().max(1.5));
    }
}
