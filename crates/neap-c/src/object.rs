//! A value in memory that C gave: the structures of the header that a caller must not look into.
//!
//! Sits between a pointer of C's and a typed value of Rust's. The first word says whether there is a value, and of which kind:
//! all zeroes are none, and so is what was destroyed. No locks: who makes or destroys a value does so alone.

use crate::error::{Error, answer};
use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU64, Ordering};

/// A kind of value, and the number that says so.
pub(crate) trait Kind {
    const MARK: u64;
}

/// Memory for one value, of a layout that the header knows.
#[repr(C)]
pub(crate) struct Object<T> {
    mark: AtomicU64,
    value: MaybeUninit<T>,
}

impl<T: Kind> Object<T> {
    /// What says that there is one.
    #[cfg(test)]
    pub(crate) const MARK: u64 = T::MARK;

    /// The object at an address, if one can be there.
    ///
    /// # Safety
    /// Null, misaligned, or the address of an object in memory of its size, that lives as long as the answer.
    unsafe fn at<'o>(object: *const Object<T>) -> Option<&'o Object<T>> {
        // SAFETY: as the caller promises.
        if object.is_aligned() { unsafe { object.as_ref() } } else { None }
    }

    /// The value at an address, if there is one of this kind.
    ///
    /// # Safety
    /// As for [`Object::at`]; nobody destroys the value while the answer lives.
    #[inline(always)]
    pub(crate) unsafe fn value<'o>(object: *const Object<T>) -> Option<&'o T> {
        // SAFETY: as the caller promises.
        let object = unsafe { Object::at(object) }?;
        // Relaxed: who lets others use the value has made it, and lets them know by means of its own.
        // SAFETY: the mark says that there is one.
        (object.mark.load(Ordering::Relaxed) == T::MARK).then(|| unsafe { object.value.assume_init_ref() })
    }

    /// Makes a value at an address, whatever is there, and answers as C functions do.
    ///
    /// # Safety
    /// As for [`Object::at`]; nobody else uses the object meanwhile.
    pub(crate) unsafe fn make(object: *mut Object<T>, make: impl FnOnce() -> Result<T, Error>) -> c_int {
        if object.is_null() || !object.is_aligned() {
            return Error::Argument as c_int;
        }
        answer(make().map(|value| {
            // SAFETY: as the caller promises.
            unsafe { object.write(Object { mark: AtomicU64::new(T::MARK), value: MaybeUninit::new(value) }) };
            0
        }))
    }

    /// The value at an address, to be changed.
    ///
    /// # Safety
    /// As for [`Object::at`]; nobody else uses the object while the answer lives.
    pub(crate) unsafe fn value_mut<'o>(object: *mut Object<T>) -> Option<&'o mut T> {
        // SAFETY: as the caller promises.
        unsafe { Object::value(object) }?;
        // SAFETY: there is a value, and it is the caller's alone.
        Some(unsafe { (*object).value.assume_init_mut() })
    }

    /// Takes the value from an address, where there is none from then on.
    ///
    /// # Safety
    /// As for [`Object::at`]; nobody else uses the object meanwhile, or its value afterwards.
    pub(crate) unsafe fn take(object: *mut Object<T>) -> Option<T> {
        // SAFETY: as the caller promises.
        unsafe { Object::value(object) }?;
        // SAFETY: there is a value, which nobody finds here any more.
        unsafe {
            let value = (*object).value.assume_init_read();
            object.cast::<u8>().write_bytes(0, size_of::<Object<T>>());
            Some(value)
        }
    }

    /// Drops the value at an address, and answers as C functions do.
    ///
    /// # Safety
    /// As for [`Object::take`].
    pub(crate) unsafe fn destroy(object: *mut Object<T>) -> c_int {
        // SAFETY: as the caller promises.
        answer(unsafe { Object::take(object) }.map(|_| 0).ok_or(Error::Argument))
    }
}
