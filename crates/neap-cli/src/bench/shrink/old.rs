//! Other registries for comparison. Walks run under a read-write lock that they only try, as
//! readers of a domain (SRCU), or without protection.
//!
//! Each has the bits of neap's registry: a summary and words for each group. With the lock, a visit
//! takes it for reading, or gives up while a thread changes the registry. With the domain,
//! `unregister` waits for every walk that is under way. Without either, no shrinker may be
//! unregistered. This variant shows the cost of the walk itself.

use core::ffi::c_void;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};

use neap_base::gate::Inside;
use neap_base::{Linux, Platform, Rcu};
use neap_reclaim::{Asked, Spec};

use super::stage::group;

const BITS: usize = 64;
/// Pauses of a wait for walks, before it sleeps for [`SLEEP_NS`] nanoseconds at a time.
const PAUSES_MAX: u32 = 20;
const SLEEP_NS: u64 = 50_000;

/// Protection of a shrinker while it is called.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guarding {
    ReadWriteLock,
    Srcu,
    Nothing,
}

/// The bits of a group.
#[repr(align(128))]
struct Bits {
    summary: AtomicU64,
    words: [AtomicU64; BITS],
}

/// Entry of a shrinker: null, or a pointer to its `Spec`. All shrinkers have the same count
/// function.
struct OldShrinker(AtomicPtr<Spec<'static>>);

/// A registry of up to 4096 shrinkers.
pub(crate) struct Old {
    guarding: Guarding,
    lock: RwLock<()>,
    readers: Rcu,
    table: Vec<OldShrinker>,
    free: Mutex<Vec<usize>>,
    groups: Vec<Bits>,
}

impl Old {
    pub(crate) fn new(guarding: Guarding, linux: &Linux, groups: usize) -> Old {
        let readers = Rcu::new();
        // Without memory for sequences readers use no sequences.
        let _ = readers.open(linux);
        let bits = || Bits { summary: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; BITS] };
        Old {
            guarding,
            lock: RwLock::new(()),
            readers,
            table: (0..BITS * BITS).map(|_| OldShrinker(AtomicPtr::default())).collect(),
            free: Mutex::new((0..BITS * BITS).rev().collect()),
            groups: (0..groups).map(|_| bits()).collect(),
        }
    }

    /// Registers a shrinker that has a bit in a group. Returns its index.
    pub(crate) fn register(&self, spec: Spec<'static>, slot: usize) -> Option<usize> {
        let index = self.free.lock().ok()?.pop()?;
        let writing = (self.guarding == Guarding::ReadWriteLock).then(|| self.lock.write());
        self.table[index].0.store(Box::into_raw(Box::new(spec)), Ordering::Release); // Pairs with the Acquire in `visit`.
        drop(writing);
        let bits = &self.groups[slot];
        bits.words[index / BITS].fetch_or(1 << (index % BITS), Ordering::Relaxed);
        bits.summary.fetch_or(1 << (index / BITS), Ordering::Relaxed);
        Some(index)
    }

    /// Ends a shrinker, and waits for threads that may be calling it. Later visits clear its bits.
    pub(crate) fn unregister(&self, linux: &Linux, index: usize) {
        let writing = (self.guarding == Guarding::ReadWriteLock).then(|| self.lock.write());
        let spec = self.table[index].0.swap(core::ptr::null_mut(), Ordering::AcqRel); // Pairs with the Acquire in `visit`.
        drop(writing);
        if self.guarding == Guarding::Srcu {
            // The call fails where the system forbids fences. Then the variant is not compared.
            let mark = self.readers.mark();
            let advance = |inside: &Inside<'_>| self.readers.advance_past(inside, linux, mark);
            let mut polls = 0;
            while Inside::assume(advance) == Ok(false) {
                polls += 1;
                if polls < PAUSES_MAX { linux.pause() } else { linux.sleep(SLEEP_NS) }
            }
        }
        if !spec.is_null() {
            // SAFETY: the box is from `register`. Its entry was cleared, and all readers of it have
            // ended.
            drop(unsafe { Box::from_raw(spec) });
        }
        self.free.lock().into_iter().for_each(|mut free| free.push(index));
    }

    /// Calls the count function of each shrinker of a group. Returns the number of calls.
    pub(crate) fn visit(&self, slot: usize) -> u64 {
        let reading = match self.guarding {
            Guarding::ReadWriteLock => match self.lock.try_read() {
                Ok(lock) => Some(lock),
                Err(_) => return 0,
            },
            _ => None,
        };
        let walking = (self.guarding == Guarding::Srcu).then(|| self.readers.enter());
        let bits = &self.groups[slot];
        let asked = Asked::of(group(slot), 0);
        let mut calls = 0;
        let mut summary = bits.summary.load(Ordering::Relaxed);
        while summary != 0 {
            let word = summary.trailing_zeros() as usize;
            summary &= summary - 1;
            let mut left = bits.words[word].load(Ordering::Relaxed);
            while left != 0 {
                let bit = left.trailing_zeros() as usize;
                left &= left - 1;
                let spec = self.table[word * BITS + bit].0.load(Ordering::Acquire); // Pairs with the Release in `register`.
                // SAFETY: `unregister` frees the box only after this visit has left the lock or the
                // domain. Without either, no shrinker is unregistered.
                match unsafe { spec.as_ref() } {
                    Some(spec) => {
                        // SAFETY: `counted` made the entry from a function and data that outlive
                        // the registry. `asked` is a live local.
                        core::hint::black_box(unsafe { (spec.count)(spec.data, &raw const asked) });
                        calls += 1;
                    }
                    None => _ = bits.words[word].fetch_and(!(1 << bit), Ordering::Relaxed),
                }
            }
        }
        drop(walking);
        drop(reading);
        calls
    }

    /// Frees the memory of readers.
    pub(crate) fn close(self, linux: &Linux) {
        for entry in &self.table {
            let spec = entry.0.swap(core::ptr::null_mut(), Ordering::Relaxed);
            if !spec.is_null() {
                // SAFETY: the box is from `register`, and no thread visits any more.
                drop(unsafe { Box::from_raw(spec) });
            }
        }
        // SAFETY: no thread visits any more, so none uses the domain.
        unsafe { self.readers.close(linux) };
    }
}

/// A shrinker that is only counted.
pub(crate) fn counted(count: neap_reclaim::CountFn, data: *mut c_void) -> Spec<'static> {
    unsafe extern "C" fn scan(_: *mut c_void, _: *mut Asked) -> u64 {
        neap_reclaim::STOP
    }
    Spec { count, scan, data, ..super::stage::Cache::default().spec() }
}
