//! A virtual machine that records its calls, and lets a test act in the middle of one.

use crate::virtual_platform::Virtual;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use core::time::Duration;
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_base::platform::memory::{HugePages, Range};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

type Action = Box<dyn FnMut() + Send>;
type Hook = Mutex<Option<Action>>;

/// An action that stops the first thread that comes. The receiver tells the test of it, and the
/// sender lets the thread go on.
pub fn stop_once() -> (Action, Receiver<()>, Sender<()>) {
    let ((inside, entered), (go_on, waited)) = (channel(), channel());
    let stop = at_call(1, move || {
        inside.send(()).expect("the test listens");
        // If the test has failed, nothing lets the thread go on. Then it goes on by itself.
        let _ = waited.recv_timeout(Duration::from_secs(60));
    });
    (stop, entered, go_on)
}

/// An action that acts only the `number`th time that it is called.
pub fn at_call(number: u32, mut act: impl FnMut() + Send + 'static) -> Action {
    let mut calls = 0;
    Box::new(move || {
        calls += 1;
        if calls == number {
            act();
        }
    })
}

/// Records and hooks around a [`Virtual`].
pub struct Probe {
    /// The machine that does the work.
    pub machine: Virtual,
    /// Lengths of single releases.
    pub released: Mutex<Vec<usize>>,
    /// Lengths of the ranges of scattered releases.
    pub scattered: Mutex<Vec<Vec<usize>>>,
    /// Advice about huge pages: address, length, whether they are allowed.
    pub huge: Mutex<Vec<(usize, usize, bool)>>,
    /// Addresses whose huge pages were split.
    pub split: Mutex<Vec<usize>>,
    /// Number of yields in waits.
    pub pauses: AtomicUsize,
    /// Added to the CPU id at every query, as if the thread migrated all the time.
    pub wander: usize,
    /// Added to the CPU id once.
    pub shift: usize,
    /// Number of queries of the CPU id, if it wanders.
    pub asked: AtomicUsize,
    /// Called before a yield in a wait.
    pub on_pause: Hook,
    /// Called before a release.
    pub on_release: Hook,
    /// Called before pages are populated.
    pub on_populate: Hook,
    /// Called after advice about huge pages.
    pub on_huge: Hook,
}

impl Probe {
    /// Wraps a machine, whose behaviour does not change.
    pub fn new(machine: Virtual) -> Probe {
        Probe {
            machine,
            released: Mutex::default(),
            scattered: Mutex::default(),
            huge: Mutex::default(),
            split: Mutex::default(),
            pauses: AtomicUsize::new(0),
            wander: 0,
            shift: 0,
            asked: AtomicUsize::new(0),
            on_pause: Mutex::new(None),
            on_release: Mutex::new(None),
            on_populate: Mutex::new(None),
            on_huge: Mutex::new(None),
        }
    }
}

fn run(hook: &Hook) {
    if let Some(action) = hook.lock().expect("no hook panics").as_mut() {
        action();
    }
}

impl Platform for Probe {
    crate::hand_on!(machine);

    fn map_at(&self, address: usize, length: usize) -> Result<(), Errno> {
        self.machine.map_at(address, length)
    }

    unsafe fn release(&self, address: usize, length: usize) -> Result<(), Errno> {
        self.released.lock().expect("no holder panics").push(length);
        run(&self.on_release);
        // SAFETY: the caller says that the machine may release this memory.
        unsafe { self.machine.release(address, length) }
    }

    unsafe fn release_scattered(&self, ranges: &[Range]) -> Result<usize, Errno> {
        self.scattered.lock().expect("no holder panics").push(ranges.iter().map(|range| range.length).collect());
        run(&self.on_release);
        // SAFETY: the caller says that the machine may release these ranges.
        unsafe { self.machine.release_scattered(ranges) }
    }

    fn populate(&self, address: usize, length: usize) -> Result<(), Errno> {
        run(&self.on_populate);
        self.machine.populate(address, length)
    }

    fn huge_pages(&self, address: usize, length: usize, huge: HugePages) -> Result<(), Errno> {
        self.machine.huge_pages(address, length, huge)?;
        self.huge.lock().expect("no holder panics").push((address, length, huge == HugePages::Allowed));
        run(&self.on_huge);
        Ok(())
    }

    fn split(&self, address: usize) {
        self.split.lock().expect("no holder panics").push(address);
    }

    fn cpus(&self) -> usize {
        self.machine.cpus()
    }

    fn cpu(&self) -> usize {
        let wandered = self.asked.fetch_add(self.wander, Relaxed);
        (self.machine.cpu() + wandered) % self.cpus() + self.shift
    }

    fn fence(&self, cpu: usize) -> Result<(), Errno> {
        self.machine.fence(cpu)
    }

    fn fence_all(&self) -> Result<(), Errno> {
        self.machine.fence_all()
    }

    fn pause(&self) {
        self.pauses.fetch_add(1, Relaxed);
        run(&self.on_pause);
        self.machine.pause();
    }

    fn sleep(&self, nanoseconds: u64) {
        // In real time, since other threads need real time.
        std::thread::sleep(Duration::from_nanos(nanoseconds));
    }
}
