//! C++'s operators that free.
//!
//! Sits between C++ programs and [`family`](crate::family). One call less than through libstdc++, which would call `free`.
//! Source: C++20 17.6.3; the mangled names of the Itanium C++ ABI.

use crate::family::free;
use core::ffi::c_void;

/// One symbol per form of `operator delete`; what follows the pointer (size, alignment, nothrow) is not needed.
macro_rules! delete {
    ($($name:ident $(, $argument:ident)*;)*) => { $(
        /// A form of C++'s `operator delete`.
        ///
        /// # Safety
        /// As for `operator delete` in C++.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(memory: *mut c_void $(, $argument: usize)*) {
            // SAFETY: as the caller promises.
            unsafe { free(memory) }
        }
    )* };
}

delete! {
    _ZdlPv;
    _ZdaPv;
    _ZdlPvm, _size;
    _ZdaPvm, _size;
    _ZdlPvSt11align_val_t, _align;
    _ZdaPvSt11align_val_t, _align;
    _ZdlPvmSt11align_val_t, _size, _align;
    _ZdaPvmSt11align_val_t, _size, _align;
    _ZdlPvRKSt9nothrow_t, _nothrow;
    _ZdaPvRKSt9nothrow_t, _nothrow;
    _ZdlPvSt11align_val_tRKSt9nothrow_t, _align, _nothrow;
    _ZdaPvSt11align_val_tRKSt9nothrow_t, _align, _nothrow;
}
