//! Opaque structures of the header. Each is memory of the C program that may hold a typed value.
//!
//! The first word holds the kind of the value. Zeroed memory and destroyed objects have no value.
//! This module has no lock. While a thread makes or destroys a value, no other thread may use the
//! value.

use crate::error::{Error, answer};
use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU64, Ordering};

/// A kind of value, and the number that marks it.
pub(crate) trait Kind {
    const MARK: u64;
}

/// Memory for one value, of the size that the header states.
#[repr(C)]
pub(crate) struct Object<T> {
    mark: AtomicU64,
    value: MaybeUninit<T>,
}

impl<T: Kind> Object<T> {
    /// The mark of an object with a value.
    #[cfg(test)]
    pub(crate) const MARK: u64 = T::MARK;

    /// The object at an address; `None` if the address is null or misaligned.
    ///
    /// # Safety
    /// The address is null, misaligned, or that of an object in memory of its size. The object
    /// lives as long as the result.
    unsafe fn at<'o>(object: *const Object<T>) -> Option<&'o Object<T>> {
        // SAFETY: the address is aligned, so the caller promises null or an object in memory of its
        // size.
        if object.is_aligned() { unsafe { object.as_ref() } } else { None }
    }

    /// The value at an address; `None` if there is none of this kind.
    ///
    /// # Safety
    /// The conditions of [`Object::at`] hold, and no thread destroys the value while the result
    /// lives.
    #[inline(always)]
    pub(crate) unsafe fn value<'o>(object: *const Object<T>) -> Option<&'o T> {
        // SAFETY: the caller promises the contract of `Object::at`.
        let object = unsafe { Object::at(object) }?;
        // Relaxed: a program that shares the value among threads synchronises them after making it.
        // SAFETY: the mark is written together with a value, and zeroed when the value is taken.
        (object.mark.load(Ordering::Relaxed) == T::MARK).then(|| unsafe { object.value.assume_init_ref() })
    }

    /// Makes a value at an address, over any contents. Returns 0 or an error's number.
    ///
    /// # Safety
    /// The conditions of [`Object::at`] hold, and no other thread uses the object during the call.
    pub(crate) unsafe fn make(object: *mut Object<T>, make: impl FnOnce() -> Result<T, Error>) -> c_int {
        if object.is_null() || !object.is_aligned() {
            return Error::Argument as c_int;
        }
        answer(make().map(|value| {
            // SAFETY: the address is aligned and not null, so the caller promises memory of the
            // object's size that no other thread uses.
            unsafe { object.write(Object { mark: AtomicU64::new(T::MARK), value: MaybeUninit::new(value) }) };
            0
        }))
    }

    /// The value at an address, for changes.
    ///
    /// # Safety
    /// The conditions of [`Object::at`] hold, and no other thread uses the object while the result
    /// lives.
    pub(crate) unsafe fn value_mut<'o>(object: *mut Object<T>) -> Option<&'o mut T> {
        // SAFETY: the caller promises the contract of `Object::value`.
        unsafe { Object::value(object) }?;
        // SAFETY: there is a value, and the caller promises that no other thread uses it.
        Some(unsafe { (*object).value.assume_init_mut() })
    }

    /// Takes the value from an address, and zeroes the object.
    ///
    /// # Safety
    /// The conditions of [`Object::at`] hold. No other thread uses the object during the call, or
    /// its value afterwards.
    pub(crate) unsafe fn take(object: *mut Object<T>) -> Option<T> {
        // SAFETY: the caller promises the contract of `Object::value`.
        unsafe { Object::value(object) }?;
        // SAFETY: there is a value, which only the caller uses. The object is zeroed, so the value
        // is not found again.
        unsafe {
            let value = (*object).value.assume_init_read();
            object.cast::<u8>().write_bytes(0, size_of::<Object<T>>());
            Some(value)
        }
    }

    /// Drops the value at an address. Returns 0 or an error's number.
    ///
    /// # Safety
    /// As for [`Object::take`].
    pub(crate) unsafe fn destroy(object: *mut Object<T>) -> c_int {
        // SAFETY: the caller promises the contract of `Object::take`.
        answer(unsafe { Object::take(object) }.map(|_| 0).ok_or(Error::Argument))
    }
}
