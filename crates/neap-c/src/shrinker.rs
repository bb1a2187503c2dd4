//! Shrinkers and reclaim for C: neap calls a cache's callbacks before it refuses a charge.
//!
//! C functions over [`neap::reclaim`]. Later versions add fields to the structure that describes a
//! cache, so the caller passes its size; missing fields are 0. neap calls the callbacks, which are
//! C functions, while it holds no lock of this crate.

use crate::error::{Error, answer, into, store_known, time};
use crate::group::group;
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr::copy_nonoverlapping;
use neap::reclaim::{self, CountFn, GoneFn, ScanFn, ShrinkerError, ShrinkerId, Spec, Unregistered};

/// The default of `seeks`. `NO_SEEKS` marks objects that cost nothing to recreate.
const SEEKS: c_uint = 2;
pub(crate) const NO_SEEKS: c_uint = c_uint::MAX;
pub(crate) const BY_NODE: c_uint = 1;
pub(crate) const BY_GROUP: c_uint = 2;
pub(crate) const INLINE: c_uint = 4;

/// `neap_shrinker_spec`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Said {
    pub(crate) name: *const c_char,
    pub(crate) count: Option<CountFn>,
    pub(crate) scan: Option<ScanFn>,
    pub(crate) gone: Option<GoneFn>,
    pub(crate) data: *mut c_void,
    pub(crate) group: u64,
    pub(crate) batch: u64,
    pub(crate) seeks: c_uint,
    pub(crate) flags: c_uint,
}

/// `neap_reclaimed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Reclaimed {
    pub(crate) bytes: u64,
    pub(crate) scanned: u64,
    pub(crate) freed: u64,
    pub(crate) late: u64,
}

impl From<ShrinkerError> for Error {
    fn from(error: ShrinkerError) -> Error {
        match error {
            ShrinkerError::NoSuchShrinker => Error::Shrinker,
            ShrinkerError::NoSuchGroup => Error::Group,
            ShrinkerError::BadName => Error::Name,
            ShrinkerError::Full => Error::Full,
            ShrinkerError::NoMemory => Error::Memory,
            ShrinkerError::InCallback => Error::Callback,
            ShrinkerError::Fence(_) => Error::Fence,
        }
    }
}

/// Copies a description of `size` bytes; missing fields are 0.
///
/// # Safety
/// `said` is null, misaligned, or has at least `size` bytes.
unsafe fn said(said: *const Said, size: usize) -> Result<Said, Error> {
    if said.is_null() || !said.is_aligned() {
        return Err(Error::Argument);
    }
    let null = core::ptr::null_mut();
    let mut own = Said {
        name: null,
        count: None,
        scan: None,
        gone: None,
        data: null.cast(),
        group: 0,
        batch: 0,
        seeks: 0,
        flags: 0,
    };
    // SAFETY: `said` is neither null nor misaligned, so the caller promises `size` bytes. Any bits
    // are valid numbers and data pointers, and C's function pointers are functions or null.
    unsafe { copy_nonoverlapping(said.cast::<u8>(), (&raw mut own).cast(), size.min(size_of::<Said>())) };
    Ok(own)
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_shrinker_register(place: *mut u64, spec: *const Said, size: usize) -> c_int {
    let register = || {
        // SAFETY: by the header's contract, `spec` is null, misaligned, or has at least `size`
        // bytes.
        let said = unsafe { said(spec, size) }?;
        let (Some(count), Some(scan)) = (said.count, said.scan) else { return Err(Error::Argument) };
        if said.name.is_null() || said.flags & !(BY_NODE | BY_GROUP | INLINE) != 0 {
            return Err(Error::Argument);
        }
        let of = if said.group == 0 { None } else { Some(group(said.group)?) };
        // SAFETY: the name is not null, so it is a C string by the header's contract.
        let name = unsafe { CStr::from_ptr(said.name) }.to_str().map_err(|_| Error::Name)?;
        let seeks = match said.seeks {
            0 => SEEKS,
            NO_SEEKS => 0,
            seeks => seeks,
        };
        let is = |flag: c_uint| said.flags & flag != 0;
        let Said { data, gone, batch, .. } = said;
        let (by_node, by_group, inline) = (is(BY_NODE), is(BY_GROUP), is(INLINE));
        let spec = Spec { name, count, scan, data, gone, seeks, batch, by_node, by_group, inline };
        // SAFETY: by the header's contract, the callbacks accept `data` from any thread until
        // `gone` is called.
        Ok(unsafe { reclaim::register(&spec, of) }?.to_bits())
    };
    // SAFETY: by the header's contract, `place` is null, misaligned or writable.
    unsafe { into(place, register) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_shrinker_unregister(number: u64) -> c_int {
    let ended = reclaim::unregister(ShrinkerId::from_bits(number)).map_err(Error::from);
    answer(ended.map(|ended| (ended == Unregistered::Later).into()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_shrinker_mark(number: u64, of: u64, node: c_uint) -> c_int {
    let mark = || {
        let group = group(of)?;
        if reclaim::mark(ShrinkerId::from_bits(number), group, node) { Ok(0) } else { Err(Error::Group) }
    };
    answer(mark())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_shrinkers_synchronize() -> c_int {
    answer(reclaim::synchronize().map(|()| 0).map_err(Error::from))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn neap_share(to_scan: u64, count: u64, total: u64) -> u64 {
    reclaim::share(to_scan, count, total)
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_reclaim(
    of: u64,
    bytes: u64,
    nanoseconds: i64,
    reclaimed: *mut Reclaimed,
    size: usize,
) -> c_int {
    let ask = || {
        let group = group(of)?;
        group.info()?;
        let time = time(nanoseconds)?;
        let got = reclaim::reclaim(group, bytes, time);
        let known = Reclaimed { bytes: got.bytes, scanned: got.scanned, freed: got.freed, late: got.late.into() };
        // SAFETY: by the header's contract, `reclaimed` is null, misaligned, or has `size` bytes.
        unsafe { store_known(known, reclaimed, size) };
        Ok(got.is_something().into())
    };
    answer(ask())
}
