//! C functions over the process's instance: its version, statistics, settings and maintenance.

use crate::error::{Error, answer, into, store_known};
use core::ffi::{CStr, c_char, c_int};
use neap::drain::Scope;
use neap::groups::UNLIMITED;
use neap::percpu;
use neap::process::PROCESS;

/// The library's version as a C string.
const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"",
};

/// `neap_usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Usage {
    pub(crate) allocated_bytes: u64,
    pub(crate) populated_bytes: u64,
    pub(crate) empty_bytes: u64,
    pub(crate) reserve_bytes: u64,
    pub(crate) allocations: u64,
    pub(crate) owners: u64,
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_version() -> *const c_char {
    VERSION.as_ptr()
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_usage_get(usage: *mut Usage) -> c_int {
    let now = || {
        percpu::statistics().map_or(Usage::default(), |now| Usage {
            allocated_bytes: now.allocated_bytes as u64,
            populated_bytes: (now.populated * now.page) as u64,
            empty_bytes: ((now.empty + now.isolated_empty) * now.page) as u64,
            reserve_bytes: (now.reserve * now.page) as u64,
            allocations: now.allocations as u64,
            owners: now.owners as u64,
        })
    };
    // SAFETY: by the header's contract, `usage` is null, misaligned or writable.
    unsafe { into(usage, || Ok(now())) }
}

/// `neap_stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Stats {
    pub(crate) allocated_bytes: u64,
    pub(crate) active_bytes: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) mapped_bytes: u64,
    pub(crate) retained_bytes: u64,
    pub(crate) metadata_bytes: u64,
    pub(crate) stack_bytes: u64,
    pub(crate) barn_bytes: u64,
    pub(crate) slab_bytes: u64,
    pub(crate) page_list_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) percpu_bytes: u64,
    pub(crate) percpu_free_bytes: u64,
    pub(crate) limit_bytes: u64,
    pub(crate) page_bytes: u64,
    pub(crate) nodes: u32,
    pub(crate) has_thread: u32,
    pub(crate) refused: u64,
    pub(crate) sampled_every_bytes: u64,
}

impl From<neap::Stats> for Stats {
    fn from(now: neap::Stats) -> Stats {
        Stats {
            allocated_bytes: now.allocated,
            active_bytes: now.active,
            resident_bytes: now.resident,
            mapped_bytes: now.mapped,
            retained_bytes: now.retained,
            metadata_bytes: now.metadata,
            stack_bytes: now.cached.stacks,
            barn_bytes: now.cached.barns,
            slab_bytes: now.cached.slabs,
            page_list_bytes: now.cached.page_lists,
            free_bytes: now.free,
            percpu_bytes: now.per_cpu,
            percpu_free_bytes: now.cached.per_cpu,
            limit_bytes: now.limit.unwrap_or(UNLIMITED),
            page_bytes: now.page_size.into(),
            nodes: now.nodes,
            has_thread: now.has_thread.into(),
            refused: now.refused,
            sampled_every_bytes: now.sampled_every.unwrap_or(0),
        }
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_stats_get(stats: *mut Stats, size: usize) -> c_int {
    if stats.is_null() || !stats.is_aligned() || size == 0 {
        return Error::Argument as c_int;
    }
    // SAFETY: `stats` is neither null nor misaligned, and by the header's contract it has `size`
    // bytes.
    unsafe { store_known(neap::stats().into(), stats, size) };
    0
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_set(key: *const c_char, value: *const c_char) -> c_int {
    if key.is_null() || value.is_null() {
        return Error::Argument as c_int;
    }
    // SAFETY: neither pointer is null, so by the header's contract both are strings that no thread
    // changes during the call.
    let [key, value] = [key, value].map(|text| unsafe { CStr::from_ptr(text) }.to_str());
    let (Ok(key), Ok(value)) = (key, value) else { return Error::Argument as c_int };
    answer(PROCESS.set(key, value).map(|()| 0).map_err(Error::from))
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_profile_dump(file: *const c_char) -> c_int {
    // SAFETY: by the header's contract, `file` is null or a string that no thread changes during
    // the call.
    let file = (!file.is_null()).then(|| unsafe { CStr::from_ptr(file) });
    answer(PROCESS.dump_profile(file).map(|()| 0).map_err(Error::from))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_tick() -> bool {
    PROCESS.tick(neap_os::clock::coarse()).left
}

/// `NEAP_ALL`.
pub(crate) const ALL: u32 = u32::MAX;

/// `neap_drained`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Drained {
    pub(crate) page_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) objects: u64,
    pub(crate) cpus: u32,
    pub(crate) skipped: u32,
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_drain(
    cpu: u32,
    node: u32,
    until: u64,
    drained: *mut Drained,
    size: usize,
) -> c_int {
    let some = |number: u32| Some(number).filter(|&number| number != ALL);
    let page_size = PROCESS.page_size() as u64;
    let until = Some(until).filter(|&bytes| bytes != u64::MAX).map(|bytes| bytes.div_ceil(page_size));
    let scope = Scope { cpu: some(cpu), node: some(node), zone: None, until };
    let Ok(done) = PROCESS.drain(&scope) else { return Error::Argument as c_int };
    let known = Drained {
        page_bytes: done.pages * page_size,
        free_bytes: done.free * page_size,
        objects: done.objects,
        cpus: done.cpus,
        skipped: done.skipped,
    };
    // SAFETY: by the header's contract, `drained` is null, misaligned, or has `size` bytes.
    unsafe { store_known(known, drained, size) };
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_release() -> bool {
    PROCESS.release_all()
}
