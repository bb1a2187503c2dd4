//! A host for tests with a limited memory, and a cache that counts its calls.

use core::alloc::Layout;
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_groups::{GroupId, GroupSlot, Reclaimer};
use neap_percpu::{PerCpuData, Shape};
use neap_reclaim::{Asked, EMPTY, Host, Shrinkers, Spec};
use neap_testing::virtual_platform::Virtual;
use std::alloc::{alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Machine, per-CPU data and memory.
pub(crate) struct Stage<P: Platform> {
    pub(crate) platform: P,
    data: PerCpuData,
    /// Number of requests for memory that still succeed; `usize::MAX`: any number.
    pub(crate) left: AtomicUsize,
    /// Bytes that were requested and not given back.
    pub(crate) bytes: AtomicUsize,
    /// A thread that asks for the platform loses its CPU once in so many times; 0: never.
    pub(crate) loses_cpu: AtomicU64,
    asked: AtomicU64,
    /// Deleted groups, and the seats of their heirs.
    heirs: Mutex<BTreeMap<GroupId, GroupSlot>>,
}

impl Stage<Virtual> {
    pub(crate) fn with_nodes(nearest: &[usize]) -> Stage<Virtual> {
        Stage::on(Virtual::new(4096, nearest.len()).with_nodes(nearest))
    }
}

impl<P: Platform> Stage<P> {
    pub(crate) fn on(platform: P) -> Stage<P> {
        let shape = Shape { span: 16 << 20, ..Shape::usual(platform.cpus()) };
        let data = PerCpuData::open(&platform, &shape, |_| 0, ()).unwrap();
        let (loses_cpu, asked) = (AtomicU64::new(0), AtomicU64::new(0));
        let (left, bytes) = (AtomicUsize::new(usize::MAX), AtomicUsize::new(0));
        Stage { platform, data, left, bytes, loses_cpu, asked, heirs: Mutex::default() }
    }
}

/// A host for tests.
pub(crate) struct On<'s, P: Platform>(pub(crate) &'s Stage<P>);

impl<P: Platform> Clone for On<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for On<'_, P> {}

impl<P: Platform> On<'_, P> {
    /// Lets other threads run, now and then.
    pub(crate) fn lose_cpu(&self) {
        let one_in = self.0.loses_cpu.load(Relaxed);
        if one_in > 0
            && self.0.asked.fetch_add(1, Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 < (1 << 32) / one_in
        {
            std::thread::yield_now();
        }
    }
}

impl<P: Platform> neap_percpu::Host for On<'_, P> {
    type Platform = P;
    type Charge = ();

    fn platform(&self) -> &P {
        self.lose_cpu();
        &self.0.platform
    }

    fn data(&self) -> &PerCpuData {
        &self.0.data
    }
}

impl<P: Platform> Reclaimer for On<'_, P> {}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 64).unwrap()
}

impl<P: Platform> Host for On<'_, P> {
    fn memory(&self, _: &Inside<'_>, bytes: usize) -> Option<NonNull<u8>> {
        let left = |left: usize| if left == usize::MAX { Some(left) } else { left.checked_sub(1) };
        self.0.left.try_update(Relaxed, Relaxed, left).ok()?;
        self.0.bytes.fetch_add(bytes, Relaxed);
        // SAFETY: the layout has a size, since no caller requests 0 bytes.
        NonNull::new(unsafe { alloc_zeroed(layout(bytes)) })
    }

    unsafe fn give_back(&self, _: &Inside<'_>, memory: NonNull<u8>, bytes: usize) {
        self.0.bytes.fetch_sub(bytes, Relaxed);
        // SAFETY: `memory` allocated it with this layout, and no thread uses it any more.
        unsafe { dealloc(memory.as_ptr(), layout(bytes)) };
    }

    fn is_online(&self, group: GroupId, _slot: u32) -> bool {
        !self.0.heirs.lock().unwrap().contains_key(&group)
    }

    fn follow(&self, group: GroupId, mut hang: impl FnMut(&Inside<'_>, GroupSlot)) {
        self.0
            .heirs
            .lock()
            .unwrap()
            .get(&group)
            .into_iter()
            .for_each(|&heir| Inside::assume(|inside| hang(inside, heir)));
    }
}

impl<P: Platform> On<'_, P> {
    /// Deletes a group.
    pub(crate) fn delete(&self, shrinkers: &Shrinkers, group: GroupId, slot: u32, heir: u32) {
        self.0.heirs.lock().unwrap().insert(group, GroupSlot { group: GroupId::ROOT, slot: heir });
        Inside::assume(|inside| shrinkers.offline(inside, self, slot, heir));
    }
}

/// Runs `f` with a registry on a machine, and closes it. All memory must have come back then.
pub(crate) fn with<P: Platform, R>(stage: &Stage<P>, f: impl FnOnce(&On<'_, P>, &Shrinkers) -> R) -> R {
    let host = On(stage);
    let shrinkers = Shrinkers::open(&host).unwrap();
    let answer = f(&host, &shrinkers);
    // SAFETY: no thread uses it any more.
    unsafe { shrinkers.close(&host) };
    assert_eq!(stage.bytes.load(Relaxed), 0, "bytes that were not given back");
    answer
}

/// A cache with a number of objects.
#[derive(Default)]
pub(crate) struct Cache {
    pub(crate) objects: AtomicU64,
    pub(crate) counts: AtomicU64,
    pub(crate) scans: AtomicU64,
}

impl Cache {
    pub(crate) fn of(objects: u64) -> Cache {
        Cache { objects: AtomicU64::new(objects), ..Cache::default() }
    }

    pub(crate) fn spec(&self) -> Spec<'static> {
        Spec {
            name: "cache",
            count: Cache::count,
            scan: Cache::scan,
            data: core::ptr::from_ref(self).cast_mut().cast(),
            gone: None,
            seeks: 2,
            batch: 0,
            by_node: false,
            by_group: false,
            inline: false,
        }
    }

    pub(crate) fn by_group(&self) -> Spec<'static> {
        Spec { by_group: true, by_node: true, ..self.spec() }
    }

    pub(crate) unsafe extern "C" fn count(data: *mut c_void, _: *const Asked) -> u64 {
        // SAFETY: registered with a cache, which outlives it.
        let cache = unsafe { &*data.cast::<Cache>() };
        cache.counts.fetch_add(1, Relaxed);
        match cache.objects.load(Relaxed) {
            0 => EMPTY,
            objects => objects,
        }
    }

    pub(crate) unsafe extern "C" fn scan(data: *mut c_void, asked: *mut Asked) -> u64 {
        // SAFETY: the shrinker was registered with a cache, which outlives it; `asked` is this
        // call's.
        let (cache, asked) = unsafe { (&*data.cast::<Cache>(), &mut *asked) };
        cache.scans.fetch_add(1, Relaxed);
        let freed = cache.objects.load(Relaxed).min(asked.to_scan);
        cache.objects.fetch_sub(freed, Relaxed);
        asked.freed_bytes = freed * 64;
        freed
    }
}

/// A shrinker of two closures.
pub(crate) struct Made<'c> {
    count: Box<dyn Fn(&Asked) -> u64 + Sync + 'c>,
    scan: Box<dyn Fn(&mut Asked) -> u64 + Sync + 'c>,
}

impl<'c> Made<'c> {
    pub(crate) fn of(
        count: impl Fn(&Asked) -> u64 + Sync + 'c,
        scan: impl Fn(&mut Asked) -> u64 + Sync + 'c,
    ) -> Made<'c> {
        Made { count: Box::new(count), scan: Box::new(scan) }
    }

    pub(crate) fn spec(&self) -> Spec<'static> {
        unsafe extern "C" fn count(data: *mut c_void, asked: *const Asked) -> u64 {
            // SAFETY: registered with such a value, which outlives it.
            let (made, asked) = unsafe { (&*data.cast::<Made<'_>>(), &*asked) };
            (made.count)(asked)
        }
        unsafe extern "C" fn scan(data: *mut c_void, asked: *mut Asked) -> u64 {
            // SAFETY: the shrinker was registered with such a value, which outlives it; `asked` is
            // this call's.
            let (made, asked) = unsafe { (&*data.cast::<Made<'_>>(), &mut *asked) };
            (made.scan)(asked)
        }
        Spec { name: "made", count, scan, data: core::ptr::from_ref(self).cast_mut().cast(), ..Cache::of(0).spec() }
    }
}
