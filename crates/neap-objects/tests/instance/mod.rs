//! An instance of objects that opens and closes with a value, and short functions to use it.
//!
//! An object of a test's has its address in its first word.
#![allow(dead_code, reason = "not every test file uses every piece")]

use core::ops::Deref;
use neap_base::gate::Inside;
use neap_base::platform::Errno;
use neap_base::{Linux, Platform};
use neap_objects::charged::GateSide;
use neap_objects::fast_path::{FastPath, FreeOutcome};
use neap_objects::objects::{Config, Objects};
use neap_objects::size_class::Class;
use neap_objects::verify::Census;
use neap_pages::Effort;
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use std::boxed::Box;
use std::collections::{BTreeMap, VecDeque};
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

/// Eight gibibytes at most. Every test has the same span, so that instances keep apart.
pub(crate) const CONFIG: Config = Config {
    span: 8 << 30,
    budget: None,
    rseq: true,
    huge: false,
    list_high: None,
    batch_scale: neap_pages::BATCH_SCALE,
};

/// Objects, and the fast path in front of them.
pub(crate) struct Opened<P: Platform> {
    objects: Box<Objects<P>>,
    pub(crate) fast_path: Box<FastPath>,
    /// The number of objects that each owner pays for, as counted by the owners.
    pub(crate) ledger: Box<Ledger>,
}

/// Objects by class and owner.
#[derive(Default)]
pub(crate) struct Ledger(Mutex<BTreeMap<(Class, u64), u32>>);

impl Ledger {
    /// Adds an object that an owner pays for.
    pub(crate) fn charge(&self, class: Class, owner: u64) {
        *self.0.lock().unwrap().entry((class, owner)).or_default() += 1;
    }

    pub(crate) fn repay(&self, class: Class, owner: u64, objects: u32) {
        let mut ledger = self.0.lock().unwrap();
        let left = ledger.get_mut(&(class, owner)).and_then(|held| held.checked_sub(objects));
        let left =
            left.unwrap_or_else(|| panic!("{owner} is paid back for {objects} of {class:?} that it did not pay for"));
        if left == 0 { _ = ledger.remove(&(class, owner)) } else { _ = ledger.insert((class, owner), left) }
    }

    pub(crate) fn all(&self) -> BTreeMap<(Class, u64), u32> {
        self.0.lock().unwrap().clone()
    }
}

/// # Safety
/// `ledger` points to a [`Ledger`].
unsafe fn repay(ledger: *const (), owner: u64, class: Class, objects: u32, _: GateSide) {
    // SAFETY: `Uncharger::open` stored this function with the address of a ledger that lives as
    // long as the instance.
    unsafe { &*ledger.cast::<Ledger>() }.repay(class, owner, objects);
}

impl<P: Platform> Deref for Opened<P> {
    type Target = Objects<P>;

    fn deref(&self) -> &Objects<P> {
        &self.objects
    }
}

impl<P: Platform> Drop for Opened<P> {
    fn drop(&mut self) {
        // SAFETY: the test is over: no thread uses the instance, and no table outside this value
        // leads to it.
        unsafe { self.objects.close() };
    }
}

/// A virtual machine with small steps, so that a verification has little to do.
pub(crate) fn machine(cpus: usize) -> Shared<Virtual> {
    Shared::new(Virtual::new(4096, cpus).with_scarce_address_space())
}

/// The real system; `None` without restartable sequences.
pub(crate) fn rseq() -> Option<Opened<Shared<Linux>>> {
    let platform = Shared::new(Linux::probe());
    platform.rseq_offset().map(|_| Opened::new(platform, &CONFIG).unwrap())
}

/// Resident bytes of a range, as the kernel reports them.
pub(crate) fn resident(address: usize, length: usize) -> usize {
    let mut words = std::vec![0; length / 4096 * 8];
    let map = std::fs::File::open("/proc/self/pagemap").expect("pagemap of this process");
    map.read_exact_at(&mut words, address as u64 / 4096 * 8).expect("a part of pagemap");
    words.as_chunks::<8>().0.iter().filter(|entry| u64::from_le_bytes(**entry) >> 63 == 1).count() * 4096
}

impl<P: Platform> Opened<P> {
    pub(crate) fn new(platform: P, config: &Config) -> Result<Opened<P>, Errno> {
        let fast_path = Box::new(FastPath::closed());
        let mut objects = Box::new(Objects::unopened());
        // SAFETY: the place and the fast path are for this instance alone, and live in one value.
        let objects = unsafe {
            Objects::open(objects.as_mut_ptr(), platform, config, &fast_path)?;
            objects.assume_init()
        };
        let ledger = Box::<Ledger>::default();
        // SAFETY: no thread has used the instance, and the instance, the fast path and the ledger
        // live in one value.
        unsafe {
            objects.open_fast_path();
            objects.enable_fast_path();
            objects.uncharger.open(repay, core::ptr::from_ref(&*ledger).cast());
        }
        Ok(Opened { objects, fast_path, ledger })
    }

    /// Allocates an object of a class, by the fast path if possible.
    pub(crate) fn take(&self, class: Class) -> Option<*mut u8> {
        let fast = self.fast_path.allocate(class.size()).map(|object| object.as_ptr());
        let object = fast.or_else(|| Inside::assume(|inside| self.allocate(inside, class)))?;
        assert!(self.is_allocated(object));
        // SAFETY: the object was just handed out, and holds at least two words.
        unsafe { object.cast::<usize>().write(object.addr()) };
        Some(object)
    }

    /// Frees an object.
    pub(crate) fn give(&self, class: Class, object: *mut u8) {
        // SAFETY: the object is the test's and holds at least two words.
        assert_eq!(unsafe { object.cast::<usize>().read() }, object.addr(), "{object:p} lost its contents");
        match self.fast_path.free(object) {
            FreeOutcome::Cached => {}
            FreeOutcome::CacheFull => Inside::assume(|inside| self.free(inside, class, object)),
            FreeOutcome::NotFastPath => {
                assert!(self.disown(object), "{object:p} is not allocated");
                Inside::assume(|inside| self.free(inside, class, object));
            }
        }
    }

    pub(crate) fn take_many(&self, class: Class, count: usize) -> VecDeque<*mut u8> {
        (0..count).map(|_| self.take(class).expect("there is memory")).collect()
    }

    /// Drains stacks and barns into the slabs.
    pub(crate) fn drain(&self) {
        (0..self.cpu_caches.cpus()).for_each(|cpu| assert!(self.drain_cpu(cpu, |_| true).is_some()));
        Class::all().for_each(|class| _ = self.trim_barn(class, Effort::Full, &|| false));
    }

    pub(crate) fn prove(&self) -> Census {
        self.verify(0).unwrap_or_else(|finding| panic!("{finding}")).census
    }

    /// Number of objects in the stacks of a CPU.
    pub(crate) fn stacked(&self, cpu: usize, class: Class) -> u32 {
        self.cpu_caches.snapshot(&self.platform, cpu, class).count
    }

    /// Number of full and of empty sheaves in the barn of a class.
    pub(crate) fn barn(&self, class: Class) -> (u32, u32) {
        let cache = self.caches[class.index()].lock();
        (cache.full.length(), cache.empty.length())
    }

    /// Number of slabs of a class, and of free objects in them.
    pub(crate) fn slabs_of(&self, class: Class) -> (u32, u64) {
        let cache = self.caches[class.index()].lock();
        (cache.slabs, cache.free)
    }
}
