//! Charges by hand: the program charges a group for bytes, until it uncharges them.
//!
//! C functions over [`Charge`]. A charge lies in the caller's memory. A function that uncharges a
//! charge, or merges it into another, zeroes it. So it detects a second uncharge.

use crate::error::{Error, answer, time};
use crate::group::group;
use crate::object::{Kind, Object};
use core::ffi::{c_int, c_uint};
use core::ptr::eq;
use neap::groups::{Charge, ChargeError, Group, GroupId};

/// `neap_charge`.
pub(crate) type Charged = Object<Charge>;

impl Kind for Charge {
    const MARK: u64 = u64::from_ne_bytes(*b"neapChrg");
}

pub(crate) const AT_LIMIT: u64 = 0;
pub(crate) const AT_DEADLINE: u64 = 1;
pub(crate) const TOO_LARGE: u64 = 2;

/// `neap_holder`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Holder {
    pub(crate) group: u64,
    pub(crate) bytes: u64,
}

/// `neap_refusal`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Refusal {
    pub(crate) group: u64,
    pub(crate) max_bytes: u64,
    pub(crate) charged_bytes: u64,
    pub(crate) need_bytes: u64,
    pub(crate) holders: [Holder; 3],
    pub(crate) reason: u64,
    pub(crate) reserved: [u64; 5],
}

/// Translates a refusal into an error, and describes the limit at `place` if there is one.
///
/// # Safety
/// `place` is null, misaligned or writable.
unsafe fn told(refused: ChargeError, place: *mut Refusal) -> Error {
    let Some(limit) = refused.limit() else { return Error::Group };
    if !place.is_null() && place.is_aligned() {
        let holder = |(id, bytes): (GroupId, u64)| Holder { group: id.to_bits(), bytes };
        let refusal = Refusal {
            group: limit.group.to_bits(),
            max_bytes: limit.max,
            charged_bytes: limit.charged,
            need_bytes: limit.need,
            holders: limit.holders.map(|held| held.map_or(Holder::default(), holder)),
            reason: match refused {
                ChargeError::Timeout(_) => AT_DEADLINE,
                ChargeError::TooLarge(_) => TOO_LARGE,
                _ => AT_LIMIT,
            },
            reserved: [0; 5],
        };
        // SAFETY: `place` is neither null nor misaligned, so the caller promises that it is
        // writable.
        unsafe { place.write(refusal) };
    }
    Error::Charge
}

/// Charges a group; `flags` select the behaviour at a limit.
fn charge_by(flags: c_uint, group: Group, bytes: u64) -> Result<Result<Charge, ChargeError>, Error> {
    let request = group.request(bytes);
    match flags {
        0 => Ok(request.now()),
        1 => Ok(request.overcharge().now()),
        4 => Ok(request.inline().now()),
        _ => Err(Error::Argument),
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_charge(
    charge: *mut Charged,
    number: u64,
    bytes: u64,
    flags: c_uint,
    refusal: *mut Refusal,
) -> c_int {
    let make = || {
        let charged = charge_by(flags, group(number)?, bytes)?;
        // SAFETY: by the header's contract, `refusal` is null, misaligned or writable.
        charged.map_err(|refused| unsafe { told(refused, refusal) })
    };
    // SAFETY: by the header's contract, `charge` is null, misaligned, or memory of the object's
    // size that no other thread uses during the call.
    unsafe { Object::make(charge, make) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_charge_wait(
    charge: *mut Charged,
    number: u64,
    bytes: u64,
    wait_ns: i64,
    refusal: *mut Refusal,
) -> c_int {
    let make = || {
        let time = time(wait_ns)?;
        // SAFETY: by the header's contract, `refusal` is null, misaligned or writable.
        group(number)?.charge_or_wait(bytes, time).map_err(|refused| unsafe { told(refused, refusal) })
    };
    // SAFETY: by the header's contract, `charge` is null, misaligned, or memory of the object's
    // size that no other thread uses during the call.
    unsafe { Object::make(charge, make) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_group_uncharge(charge: *mut Charged) -> c_int {
    // SAFETY: by the header's contract, `charge` is null, misaligned, or an object that no other
    // thread uses any more.
    unsafe { Object::destroy(charge) }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_charge_bytes(charge: *const Charged) -> u64 {
    // SAFETY: by the header's contract, `charge` is null, misaligned, or an object that no thread
    // destroys during the call.
    unsafe { Object::value(charge) }.map_or(0, Charge::bytes)
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_charge_group(charge: *const Charged) -> u64 {
    // SAFETY: by the header's contract, `charge` is null, misaligned, or an object that no thread
    // destroys during the call.
    unsafe { Object::value(charge) }.map_or(0, |charge: &Charge| Group::id(charge.group()).to_bits())
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_charge_split(charge: *mut Charged, part: *mut Charged, bytes: u64) -> c_int {
    // SAFETY: by the header's contract, `charge` is null, misaligned, or an object that no other
    // thread uses during the call.
    match unsafe { Object::value_mut(charge) } {
        // SAFETY: by the header's contract, `part` is null, misaligned, or memory that no other
        // thread uses during the call. It is not the object that is split.
        Some(whole) if !eq(charge, part) => unsafe { Object::make(part, || whole.split(bytes).ok_or(Error::Argument)) },
        _ => Error::Argument as c_int,
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_charge_merge(charge: *mut Charged, other: *mut Charged) -> c_int {
    if eq(charge, other) {
        return Error::Argument as c_int;
    }
    // SAFETY: by the header's contract, `charge` is null, misaligned, or an object that no other
    // thread uses during the call.
    let Some(charge): Option<&mut Charge> = (unsafe { Object::value_mut(charge) }) else {
        return Error::Argument as c_int;
    };
    // SAFETY: by the header's contract, `other` is null, misaligned, or an object that no other
    // thread uses during the call. It differs from `charge`.
    let Some(more) = (unsafe { Object::take(other) }) else { return Error::Argument as c_int };
    let merged = charge.merge(more).map_err(|more| {
        // SAFETY: `other` held the charge until `take`, and no other thread uses it during the
        // call.
        unsafe { Object::make(other, || Ok(more)) };
        Error::Argument
    });
    answer(merged.map(|()| 0))
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn neap_charge_move(charge: *mut Charged, to: u64, refusal: *mut Refusal) -> c_int {
    let moved = || {
        // SAFETY: by the header's contract, `charge` is null, misaligned, or an object that no
        // other thread uses during the call.
        let charge: &mut Charge = unsafe { Object::value_mut(charge) }.ok_or(Error::Argument)?;
        // SAFETY: by the header's contract, `refusal` is null, misaligned or writable.
        charge.move_to(group(to)?).map_err(|refused| unsafe { told(refused, refusal) })
    };
    answer(moved().map(|()| 0))
}
