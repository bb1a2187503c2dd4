//! The arguments of a call: the place where it stores the old value, and the new value.

use core::ffi::c_void;

/// Numbers of errno.h, by jemalloc's meaning.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(crate) enum Error {
    /// `EPERM`: a write to a value that is read-only, or a value for a name that has none.
    NotPermitted = 1,
    /// `ENOENT`: the name or numbers are unknown, or neap is not in the process.
    NoSuchName = 2,
    /// `EINVAL`: a size is not that of the value.
    Invalid = 22,
}

/// Arguments of a call. The bytes of the new value are not kept, since no name needs them.
pub(crate) struct Exchange {
    old: *mut u8,
    old_length: *mut usize,
    writes: bool,
    new_length: usize,
}

impl Exchange {
    /// Takes the arguments of a call.
    ///
    /// # Safety
    /// During the life of the result, `old_length` is null or writable, and `old` is null or has
    /// `*old_length` writable bytes.
    pub(crate) unsafe fn new(
        old: *mut c_void,
        old_length: *mut usize,
        new: *const c_void,
        new_length: usize,
    ) -> Exchange {
        Exchange { old: old.cast(), old_length, writes: !new.is_null(), new_length }
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
        match (self.writes, self.new_length == size_of::<T>()) {
            (true, false) => Err(Error::Invalid),
            (writes, _) => Ok(writes),
        }
    }

    /// Checks that no value is read or written.
    ///
    /// # Errors
    /// [`Error::NotPermitted`]: the caller reads or writes a value.
    pub(crate) fn nothing(&self) -> Result<(), Error> {
        let is_read = !self.old.is_null() || !self.old_length.is_null();
        if is_read || self.is_write() { Err(Error::NotPermitted) } else { Ok(()) }
    }

    fn is_write(&self) -> bool {
        self.writes || self.new_length > 0
    }
}
