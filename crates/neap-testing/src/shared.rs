//! A platform with several owners, whose fences fail on demand and whose CPU a test chooses.
//!
//! A manager owns its platform, and a test keeps a second reference to it.

use core::ops::Deref;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_base::platform::memory::{HugePages, Range};
use std::sync::{Arc, Mutex};

/// An action of a test's in the middle of a call.
type Hook = Mutex<Option<Box<dyn FnMut() + Send>>>;

/// A platform with several owners.
pub struct Shared<P>(Arc<Inner<P>>);

/// The platform, and the changes to its behaviour.
pub struct Inner<P> {
    platform: P,
    /// Number of fences that succeed before those that fail.
    pub good_fences: AtomicUsize,
    /// Number of fences that fail after that.
    pub failing_fences: AtomicUsize,
    /// Number of fences requested.
    pub fences: AtomicUsize,
    /// Added to the CPU id at every query, as if the thread migrated all the time. Only for virtual
    /// machines.
    pub wander: AtomicUsize,
    asked: AtomicUsize,
    /// Added to the CPU id once: a CPU beyond the tables.
    pub shift: AtomicUsize,
    /// The most CPUs that the platform reports.
    pub told: AtomicUsize,
    /// Number of yields in waits.
    pub pauses: AtomicUsize,
    /// Whether sleeps take real time as well, for waits that end by another thread of the test's.
    pub really_sleeps: AtomicBool,
    /// Called before a fence, with the table's entry replaced.
    pub on_fence: Hook,
    /// Called when fresh memory is about to be mapped.
    pub on_map_at: Hook,
    /// Called when memory is about to be released.
    pub on_release: Hook,
}

impl<P> Shared<P> {
    /// Wraps a platform, whose behaviour does not change.
    pub fn new(platform: P) -> Shared<P> {
        Shared(Arc::new(Inner {
            platform,
            good_fences: AtomicUsize::new(0),
            failing_fences: AtomicUsize::new(0),
            fences: AtomicUsize::new(0),
            wander: AtomicUsize::new(0),
            asked: AtomicUsize::new(0),
            shift: AtomicUsize::new(0),
            told: AtomicUsize::new(usize::MAX),
            pauses: AtomicUsize::new(0),
            really_sleeps: AtomicBool::new(false),
            on_fence: Mutex::new(None),
            on_map_at: Mutex::new(None),
            on_release: Mutex::new(None),
        }))
    }

    fn fence_fails(&self) -> bool {
        self.fences.fetch_add(1, Relaxed);
        let count = |counter: &AtomicUsize| counter.try_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
        !count(&self.good_fences) && count(&self.failing_fences)
    }
}

impl<P> Clone for Shared<P> {
    fn clone(&self) -> Shared<P> {
        Shared(Arc::clone(&self.0))
    }
}

impl<P> Deref for Shared<P> {
    type Target = Inner<P>;

    fn deref(&self) -> &Inner<P> {
        &self.0
    }
}

impl<P> Deref for Inner<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.platform
    }
}

/// Calls a hook, which is removed while it runs, since it may come here again.
fn run(hook: &Hook) {
    let action = hook.lock().expect("no hook panics").take();
    if let Some(mut action) = action {
        action();
        *hook.lock().expect("no hook panics") = Some(action);
    }
}

impl<P: Platform> Platform for Shared<P> {
    crate::hand_on!(platform);

    fn map_at(&self, address: usize, length: usize) -> Result<(), Errno> {
        run(&self.on_map_at);
        self.platform.map_at(address, length)
    }

    unsafe fn release(&self, address: usize, length: usize) -> Result<(), Errno> {
        run(&self.on_release);
        // SAFETY: the caller says that the platform may release this memory.
        unsafe { self.platform.release(address, length) }
    }

    unsafe fn release_scattered(&self, ranges: &[Range]) -> Result<usize, Errno> {
        run(&self.on_release);
        // SAFETY: the caller says that the platform may release these ranges.
        unsafe { self.platform.release_scattered(ranges) }
    }

    fn populate(&self, address: usize, length: usize) -> Result<(), Errno> {
        self.platform.populate(address, length)
    }

    fn huge_pages(&self, address: usize, length: usize, huge: HugePages) -> Result<(), Errno> {
        self.platform.huge_pages(address, length, huge)
    }

    fn split(&self, address: usize) {
        self.platform.split(address);
    }

    fn cpus(&self) -> usize {
        self.platform.cpus().min(self.told.load(Relaxed))
    }

    fn cpu(&self) -> usize {
        let wandered = self.asked.fetch_add(self.wander.load(Relaxed), Relaxed);
        (self.platform.cpu() + wandered) % self.cpus() + self.shift.load(Relaxed)
    }

    fn fence(&self, cpu: usize) -> Result<(), Errno> {
        run(&self.on_fence);
        if self.fence_fails() { Err(Errno::PERM) } else { self.platform.fence(cpu) }
    }

    fn fence_all(&self) -> Result<(), Errno> {
        if self.fence_fails() { Err(Errno::PERM) } else { self.platform.fence_all() }
    }

    fn pause(&self) {
        self.pauses.fetch_add(1, Relaxed);
        self.platform.pause();
    }

    fn sleep(&self, nanoseconds: u64) {
        self.platform.sleep(nanoseconds);
        if self.really_sleeps.load(Relaxed) {
            std::thread::sleep(core::time::Duration::from_nanos(nanoseconds));
        }
    }
}
