//! The arguments of a call: the place where it stores the old value, and the new value.

use core::ffi::{c_char, c_void};
use core::ptr::null;

/// Numbers of errno.h, by jemalloc's meaning.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(crate) enum Error {
    /// `EPERM`: a write to a value that is read-only, a read of a value that is only written, or a
    /// value for a name that has none.
    NotPermitted = 1,
    /// `ENOENT`: the name or numbers are unknown, or neap is not in the process.
    NoSuchName = 2,
    /// `EFAULT`: the work failed.
    Failed = 14,
    /// `EINVAL`: a size is not that of the value.
    Invalid = 22,
}

/// Arguments of a call.
pub(crate) struct Exchange {
    old: *mut u8,
    old_length: *mut usize,
    new: *const u8,
    new_length: usize,
}

impl Exchange {
    /// Takes the arguments of a call.
    ///
    /// # Safety
    /// During the life of the result, `old_length` is null or writable, `old` is null or has
    /// `*old_length` writable bytes, and `new` is null or has `new_length` bytes. For a name that
    /// takes an address, these are null or the address of a C string.
    pub(crate) unsafe fn new(
        old: *mut c_void,
        old_length: *mut usize,
        new: *const c_void,
        new_length: usize,
    ) -> Exchange {
        Exchange { old: old.cast(), old_length, new: new.cast(), new_length }
    }

    /// Stores a value at `old`, if the caller reads one. If the caller's size differs from that of
    /// the value, stores as many bytes as fit, and their number.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the caller's size differs from that of the value.
    pub(crate) fn read<T: Copy>(&mut self, value: T) -> Result<(), Error> {
        if self.old.is_null() || self.old_length.is_null() {
            return Ok(());
        }
        // SAFETY: neither is null, so `old_length` says how many bytes `old` has (the promise of
        // `new`). The value is a number or an address, so all its bytes are initialised.
        unsafe {
            let stored = size_of::<T>().min(*self.old_length);
            self.old.copy_from_nonoverlapping((&raw const value).cast(), stored);
            if *self.old_length == size_of::<T>() {
                return Ok(());
            }
            *self.old_length = stored;
        }
        Err(Error::Invalid)
    }

    /// Does the work of [`Exchange::read`] for a value that is read-only.
    ///
    /// # Errors
    /// [`Error::NotPermitted`]: the caller passes a new value.
    pub(crate) fn read_only<T: Copy>(&mut self, value: T) -> Result<(), Error> {
        if self.is_write() {
            return Err(Error::NotPermitted);
        }
        self.read(value)
    }

    /// Whether the caller writes a value of this type.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the value has another size.
    pub(crate) fn is_write_of<T>(&self) -> Result<bool, Error> {
        match (self.new.is_null(), self.new_length == size_of::<T>()) {
            (false, false) => Err(Error::Invalid),
            (is_null, _) => Ok(!is_null),
        }
    }

    /// Returns the address that the caller writes, or null if the caller writes none.
    ///
    /// # Errors
    /// [`Error::NotPermitted`]: the caller reads a value. [`Error::Invalid`]: the value has another
    /// size than an address.
    pub(crate) fn written_address(&self) -> Result<*const c_char, Error> {
        if self.is_read() {
            return Err(Error::NotPermitted);
        }
        if !self.is_write_of::<*const c_char>()? {
            return Ok(null());
        }
        // SAFETY: `new` is not null and has the bytes of an address (the promise of `new`).
        Ok(unsafe { self.new.cast::<*const c_char>().read_unaligned() })
    }

    /// Checks that no value is read or written.
    ///
    /// # Errors
    /// [`Error::NotPermitted`]: the caller reads or writes a value.
    pub(crate) fn nothing(&self) -> Result<(), Error> {
        if self.is_read() || self.is_write() { Err(Error::NotPermitted) } else { Ok(()) }
    }

    fn is_read(&self) -> bool {
        !self.old.is_null() || !self.old_length.is_null()
    }

    fn is_write(&self) -> bool {
        !self.new.is_null() || self.new_length > 0
    }
}
