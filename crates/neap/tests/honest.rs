//! Honest shrinkers in a process that does not run: stopped by a signal, or beyond its CPU quota.
//! No charge is refused for that, and no shrinker barred.
//!
//! Method: each test runs itself again as a child process. The parent stops the child within a
//! callback, or gives it a CPU quota. The child fails if a charge is refused although there
//! was time to ask the shrinker.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use neap::groups::{Bound, Charge, Group};
use neap::reclaim::{self, Shrinker};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

const OBJECT: u64 = 64 << 10;
const OBJECTS: usize = 64;
/// Less than the time for which a charge waits for reclaimers.
const PATIENCE: Duration = Duration::from_millis(150);
/// Line by which the child says that a callback runs.
const RUNS: &str = "a callback runs";
/// Times that the child is stopped, for so many milliseconds.
const STOPS: [u64; 4] = [150, 400, 150, 150];

/// Returns whether this is the child process of the test.
fn is_child() -> bool {
    std::env::var_os("NEAP_TEST_OWN").is_some()
}

fn child(test: &str) -> Child {
    let mut own = Command::new(std::env::current_exe().unwrap());
    own.args(["--exact", test, "--nocapture"]).env("NEAP_TEST_OWN", "1");
    own.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: the child was not waited for yet, so its id is no other process's.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

/// A full cache of a group, which frees what it is asked for.
struct Cache {
    group: Group,
    objects: Arc<Mutex<VecDeque<Charge>>>,
    shrinker: Shrinker,
}

impl Cache {
    /// Makes a full cache with a callback that does `work` first.
    fn full(path: &str, work: impl Fn() + Send + Sync + 'static) -> Cache {
        let group = Group::create(path).unwrap();
        group.set(Bound::Max, OBJECTS as u64 * OBJECT).unwrap();
        let objects: Arc<Mutex<VecDeque<Charge>>> = Arc::default();
        let (counted, shrunk) = (objects.clone(), objects.clone());
        let evict = move |wanted: u64| {
            work();
            let mut objects = shrunk.lock().unwrap();
            let wanted = objects.len().min(wanted as usize);
            objects.drain(..wanted).count() as u64
        };
        let count = move || counted.lock().unwrap().len() as u64;
        let shrinker = Shrinker::named("honest").group(group).batch(4).register(count, evict).unwrap();
        let cache = Cache { group, objects, shrinker };
        (0..OBJECTS).for_each(|_| cache.put());
        cache
    }

    /// Charges an object. On a busy machine a reclaimer may not run within the time of one charge;
    /// such a charge is tried again. One that is refused before, or again and again, had nothing to
    /// ask.
    fn put(&self) {
        let end = Instant::now() + Duration::from_secs(2);
        let charge = loop {
            let begun = Instant::now();
            match self.group.charge(OBJECT) {
                Ok(charge) => break charge,
                Err(refused) => assert!(begun.elapsed() >= PATIENCE && Instant::now() < end, "{refused}"),
            }
        };
        self.objects.lock().unwrap().push_back(charge);
    }

    /// Charges an object, however long that takes while the process is beyond its quota.
    fn wait_and_put(&self) {
        let charge = self.group.charge_or_wait(OBJECT, Duration::from_secs(60));
        self.objects.lock().unwrap().push_back(charge.unwrap_or_else(|refused| panic!("{refused}")));
    }

    fn assert_not_barred(&self) {
        reclaim::each_culprit(|culprit| {
            assert!(culprit.shrinker != self.shrinker.id().to_bits() || culprit.until == 0, "{culprit:?}");
        });
    }
}

#[test]
fn process_that_is_stopped_in_a_callback_refuses_no_charge() {
    if !is_child() {
        let mut child = child("process_that_is_stopped_in_a_callback_refuses_no_charge");
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut stops = STOPS.into_iter();
        for line in lines.filter(|line| line.contains(RUNS)) {
            let stop = stops.next().unwrap_or_else(|| panic!("{line}"));
            signal(&child, libc::SIGSTOP);
            std::thread::sleep(Duration::from_millis(stop));
            signal(&child, libc::SIGCONT);
        }
        assert!(child.wait().unwrap().success() && stops.next().is_none());
        return;
    }
    let is_to_be_stopped = Arc::new(AtomicBool::new(false));
    let stopped = is_to_be_stopped.clone();
    let cache = Cache::full("stopped", move || {
        if !stopped.swap(false, Relaxed) {
            return;
        }
        let (end, mut last) = (Instant::now() + Duration::from_secs(60), Instant::now());
        println!("{RUNS}");
        // Until this thread has not run for a while.
        while last.elapsed() < Duration::from_millis(100) {
            assert!(last < end, "it was not stopped");
            last = Instant::now();
            std::thread::sleep(Duration::from_millis(1));
        }
        // Its work is not done yet.
        std::thread::sleep(Duration::from_millis(20));
    });
    for _ in STOPS {
        is_to_be_stopped.store(true, Relaxed);
        (0..4 * OBJECTS).for_each(|_| cache.put());
        assert!(!is_to_be_stopped.load(Relaxed), "no callback was called");
        cache.assert_not_barred();
    }
}

/// A group of the kernel with a CPU quota, below that of this process, until this is dropped.
struct Quota(PathBuf);

impl Quota {
    /// Makes a group that may use a part of one CPU, in per cent. `None` without the right to.
    fn new(percent: u64) -> Option<Quota> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|controller| controller == "cpu").then(|| (controllers.to_string(), path))
        });
        let (controllers, path) = own?;
        let hierarchy = Path::new("/sys/fs/cgroup").join(controllers);
        let group = hierarchy.join(path.trim_start_matches('/')).join(format!("neap-test-{}", std::process::id()));
        std::fs::create_dir(&group).ok()?;
        let quota = Quota(group);
        std::fs::write(quota.0.join("cpu.cfs_period_us"), "100000").ok()?;
        std::fs::write(quota.0.join("cpu.cfs_quota_us"), (1000 * percent).to_string()).ok()?;
        Some(quota)
    }

    fn holds(&self, child: &Child) -> bool {
        std::fs::write(self.0.join("cgroup.procs"), child.id().to_string()).is_ok()
    }

    /// Returns in how many periods the group was stopped by its quota.
    fn throttled(&self) -> u64 {
        let text = std::fs::read_to_string(self.0.join("cpu.stat")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("nr_throttled "));
        line.unwrap().parse().unwrap()
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        _ = std::fs::remove_dir(&self.0);
    }
}

/// Callbacks take 3 ms of CPU time each, beside two threads that spin.
#[test]
fn process_beyond_its_cpu_quota_refuses_no_charge_that_waits() {
    if !is_child() {
        let Some(quota) = Quota::new(10) else {
            eprintln!("SKIPPED: this process may make no group with a CPU quota (cgroup v1, controller cpu)");
            return;
        };
        let mut child = child("process_beyond_its_cpu_quota_refuses_no_charge_that_waits");
        assert!(quota.holds(&child), "the child does not enter its group");
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        assert!(child.wait().unwrap().success());
        println!("stopped by its quota {} times", quota.throttled());
        assert!(quota.throttled() > 3, "{} times", quota.throttled());
        return;
    }
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let calls = Arc::new(AtomicU64::new(0));
    let called = calls.clone();
    let cache = Cache::full("throttled", move || {
        called.fetch_add(1, Relaxed);
        let end = cpu_time() + 3_000_000;
        while cpu_time() < end {
            core::hint::spin_loop();
        }
    });
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    core::hint::spin_loop()
                }
            });
        }
        let _ends = Ends(&is_over);
        (0..OBJECTS).for_each(|_| cache.wait_and_put());
    });
    assert!(calls.load(Relaxed) > 0);
    cache.assert_not_barred();
}

/// Ends the threads that spin, also if the test panics.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Returns the CPU time of this thread, in nanoseconds.
fn cpu_time() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to the given time.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
