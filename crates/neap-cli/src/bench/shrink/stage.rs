//! Set-up for benchmarks of shrinkers: this machine as a host, a registry, numbered groups, and a
//! cache for each group.
//!
//! The registry's memory comes from neap, as in a program. The system's malloc would place
//! structures of one kind a power of two apart. Objects come from this process's malloc. Each cache
//! has a lock. This module has no other locks.

use core::alloc::{GlobalAlloc, Layout};
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

use anyhow::{Result, anyhow};
use neap::Neap;
use neap_base::gate::Inside;
use neap_base::{Linux, Platform};
use neap_groups::{GroupId, Reclaimer};
use neap_percpu::{PerCpuData, Shape, Standalone};
use neap_reclaim::{Asked, EMPTY, Host, ShrinkerId, Shrinkers, Spec};

/// Number of objects that each group frees in a full pass: one batch.
pub(crate) const BATCH: usize = 128;
/// Bytes of an object.
pub(crate) const OBJECT: usize = 64;

/// This machine, as a host of the registry.
#[derive(Clone, Copy)]
pub(crate) struct Here<'a>(pub(crate) Standalone<'a, Linux>);

impl neap_percpu::Host for Here<'_> {
    type Platform = Linux;
    type Charge = ();

    fn platform(&self) -> &Linux {
        self.0.platform
    }

    fn data(&self) -> &PerCpuData {
        self.0.data
    }
}

impl Reclaimer for Here<'_> {}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, 64).ok()
}

impl Host for Here<'_> {
    fn memory(&self, _: &Inside<'_>, bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the registry never requests 0 bytes, so the layout's size is not 0.
        layout(bytes).and_then(|layout| NonNull::new(unsafe { Neap.alloc_zeroed(layout) }))
    }

    unsafe fn give_back(&self, _: &Inside<'_>, memory: NonNull<u8>, bytes: usize) {
        // SAFETY: the function `memory` above allocated this block from `Neap` with the layout of
        // this size. The caller no longer uses it (its promise).
        layout(bytes).into_iter().for_each(|layout| unsafe { Neap.dealloc(memory.as_ptr(), layout) });
    }
}

/// Runs `f` with a machine and a registry, and closes both.
pub(crate) fn with<R>(f: impl FnOnce(Here<'_>, &Shrinkers) -> Result<R>) -> Result<R> {
    let linux = Linux::probe();
    let data =
        PerCpuData::open(&linux, &Shape::usual(linux.cpus()), |_| 0, ()).map_err(|error| anyhow!("{error:?}"))?;
    let host = Here(Standalone { data: &data, platform: &linux });
    let shrinkers = Shrinkers::open(&host)?;
    let answer = f(host, &shrinkers);
    // SAFETY: `f` has returned, so no callback runs and no thread uses the registry or the per-CPU
    // data any more. `host` and `linux` are those with which both were opened.
    unsafe {
        shrinkers.close(&host);
        data.close(&linux);
    }
    answer
}

/// Returns the group of a slot.
pub(crate) fn group(slot: usize) -> GroupId {
    GroupId::from_bits(GroupId::ROOT.to_bits() + slot as u64)
}

/// A cache of one group, under a lock of its own.
#[derive(Default)]
pub(crate) struct Cache {
    #[expect(clippy::vec_box, reason = "each object is malloc's")]
    objects: Mutex<Vec<Box<[u8; OBJECT]>>>,
    length: AtomicU64,
}

impl Cache {
    /// Fills it up to one batch. Returns whether it was empty.
    pub(crate) fn fill(&self) -> bool {
        let Ok(mut objects) = self.objects.lock() else { return false };
        let was_empty = objects.is_empty();
        objects.resize_with(BATCH, || Box::new([1; OBJECT]));
        self.length.store(BATCH as u64, Ordering::Relaxed);
        was_empty
    }

    pub(crate) fn spec(&self) -> Spec<'static> {
        unsafe extern "C" fn count(data: *mut c_void, _: *const Asked) -> u64 {
            // SAFETY: the shrinker's data is a cache, which outlives the shrinker.
            match unsafe { &*data.cast::<Cache>() }.length.load(Ordering::Relaxed) {
                0 => EMPTY,
                length => length,
            }
        }
        unsafe extern "C" fn scan(data: *mut c_void, asked: *mut Asked) -> u64 {
            // SAFETY: the shrinker's data is a cache, which outlives the shrinker. `asked` is valid
            // for the time of the call, and this callback alone has it.
            let (cache, asked) = unsafe { (&*data.cast::<Cache>(), &mut *asked) };
            let Ok(mut objects) = cache.objects.lock() else { return neap_reclaim::STOP };
            let left = objects.len().saturating_sub(asked.to_scan as usize);
            let freed = objects.split_off(left);
            cache.length.store(left as u64, Ordering::Relaxed);
            drop(objects);
            asked.freed_bytes = (freed.len() * OBJECT) as u64;
            freed.len() as u64
        }
        Spec {
            name: "cache",
            count,
            scan,
            data: core::ptr::from_ref(self).cast_mut().cast(),
            gone: None,
            seeks: neap_reclaim::DEFAULT_SEEKS,
            batch: BATCH as u64,
            by_node: true,
            by_group: true,
            inline: true,
        }
    }
}

/// A count callback that returns 0: the cache has objects, but can free none now.
pub(crate) unsafe extern "C" fn count_nothing(_: *mut c_void, _: *const Asked) -> u64 {
    0
}

/// Registers a shrinker for each cache, with a bit in a group of its own.
pub(crate) fn register(host: Here<'_>, shrinkers: &Shrinkers, caches: &[Cache]) -> Result<Vec<ShrinkerId>> {
    // SAFETY: the caches outlive the registry. Their callbacks may run in several threads at a
    // time, and do not unwind.
    caches.iter().map(|cache| Ok(unsafe { shrinkers.register(&host, &cache.spec()) }?)).collect()
}
