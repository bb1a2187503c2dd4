//! C++'s operators new and delete.
//!
//! # Design
//!
//! A program may replace some forms of these operators. By the standard, certain other forms then
//! call the replaced form. Here each of these other forms jumps to the definition that the dynamic
//! linker chose. The remaining forms call `malloc` and `free` as the dynamic linker chose them, so
//! a profiler loaded in front of this library sees the calls, as it does with the C++ library's own
//! operators.
//!
//! If there is no memory, the C++ library's own operator takes over. It runs the program's
//! new_handler and throws; this library can do neither.
//!
//! The C++ library's operators call malloc and free, too. This library defines operators all the
//! same, since an allocator that a program is linked with may define some that bypass malloc. The
//! program would pass their memory to this library's `free`.
//!
//! Source: C++20 17.6.3; the mangled names of the Itanium C++ ABI.

use crate::arch::own_code;
use crate::family::malloc_grouped;
use core::arch::{global_asm, naked_asm};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};
use neap::NamedSize;
use neap::process::PROCESS;
use neap_os::dynamic_linker;

// No instruction. The linker defines both symbols in each library. Hidden symbols are this
// library's own.
global_asm!(".hidden __ehdr_start", ".hidden _etext");

/// `operator new(size)`.
#[unsafe(no_mangle)]
extern "C" fn _Znwm(size: usize) -> *mut c_void {
    if !is_ours(chosen!("malloc")) {
        return new_grouped(size);
    }
    // As in malloc, the call is the last one, so an exception passes no frame of this function.
    PROCESS.alloc_fast(size, move || new_grouped(size).cast()).cast()
}

/// Forms that the standard defines by another function. Any library may define that function.
macro_rules! ends_in {
    ($($name:ident => $other:literal;)*) => { $(
        /// A form of an operator that jumps to another function.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            // go to the chosen $other
            naked_asm!(
                ".cfi_startproc",
                jump!($other),
                ".cfi_endproc"
            )
        }
    )* };
}

ends_in! {
    _ZdlPv => "free";
    _ZdlPvSt11align_val_t => "free";
    _Znam => "_Znwm";
    _ZnamSt11align_val_t => "_ZnwmSt11align_val_t";
    _ZdaPv => "_ZdlPv";
    _ZdlPvRKSt9nothrow_t => "_ZdlPv";
    _ZdaPvRKSt9nothrow_t => "_ZdaPv";
    _ZdaPvSt11align_val_t => "_ZdlPvSt11align_val_t";
    _ZdlPvSt11align_val_tRKSt9nothrow_t => "_ZdlPvSt11align_val_t";
    _ZdaPvSt11align_val_tRKSt9nothrow_t => "_ZdaPvSt11align_val_t";
}

/// Forms of `operator delete` with a size. Each calls the form without a size. With `check:on` they
/// verify the size, if `malloc`, `free` and all operators that the form stands for are this
/// library's. Otherwise the memory may be another allocator's, of another size.
macro_rules! sized {
    ($($name:ident($($align:ident)?) => $plain:literal, $($asked:literal)*;)*) => { $(
        /// A form of `operator delete` with a size.
        ///
        /// # Safety
        /// `memory` is null, or comes from the form of `operator new` that belongs to this form.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(memory: *mut c_void, size: usize $(, $align: usize)?) {
            /// Verifies the size if this library has allocated the memory.
            ///
            /// # Safety
            /// The condition of the form.
            #[cold]
            #[inline(never)]
            unsafe extern "C" fn checked(memory: *mut c_void, size: usize $(, $align: usize)?) {
                if [chosen!("malloc"), chosen!("free"), chosen!($plain) $(, chosen!($asked))*].into_iter().all(is_ours) {
                    // SAFETY: `malloc`, `free` and the operators are this library's. So `memory` is
                    // null, or comes from this library's `operator new`.
                    unsafe { delete_checked(memory, size) };
                } else {
                    // SAFETY: the caller meets the condition of the form, which is also that of
                    // `plain`.
                    unsafe { plain(memory $(, $align)?) };
                }
            }
            /// Frees by the form without a size.
            ///
            /// # Safety
            /// The condition of the form.
            #[inline(always)]
            unsafe extern "C" fn plain(memory: *mut c_void $(, $align: usize)?) {
                let plain = chosen!($plain);
                // SAFETY: every definition of this name has this type, and this library has one, so
                // the address is not 0. By the standard, the form without a size may free all
                // memory that this form may free.
                unsafe {
                    transmute::<usize, unsafe extern "C" fn(*mut c_void $(, sized!(@word $align))?)>(plain)(
                        memory $(, $align)?
                    );
                }
            }
            if PROCESS.checks_sizes() {
                // SAFETY: the caller meets the condition of the form.
                return unsafe { checked(memory, size $(, $align)?) };
            }
            // SAFETY: the caller meets the condition of the form.
            unsafe { plain(memory $(, $align)?) }
        }
    )* };
    (@word $align:ident) => { usize };
}

sized! {
    _ZdlPvm() => "_ZdlPv", "_Znwm";
    _ZdaPvm() => "_ZdaPv", "_Znam" "_Znwm" "_ZdlPv";
    _ZdlPvmSt11align_val_t(align) => "_ZdlPvSt11align_val_t", "_ZnwmSt11align_val_t";
    _ZdaPvmSt11align_val_t(align) => "_ZdaPvSt11align_val_t", "_ZnamSt11align_val_t" "_ZnwmSt11align_val_t" "_ZdlPvSt11align_val_t";
}

/// Verifies the size of memory and frees it.
///
/// # Safety
/// `memory` is null, or comes from this library's `operator new`.
#[inline(never)]
unsafe extern "C" fn delete_checked(memory: *mut c_void, size: usize) {
    // SAFETY: the caller's promise.
    unsafe { PROCESS.free_named(memory.cast(), NamedSize::Exact(size)) }
}

/// Forms that allocate. If there is no memory, they jump to the C++ library's own form with the
/// same arguments and stack. So an exception of that form goes directly to the caller of this form.
macro_rules! or_standard {
    ($($(#[$attribute:meta])* $name:ident($($argument:ident),*): $take:ident, $mangled:literal, $plain:literal;)*) => { $(
        /// A form of `operator new`.
        $(#[$attribute])*
        #[unsafe(naked)]
        extern "C" fn $name($($argument: usize),*) -> *mut c_void {
            extern "C" fn standard() -> *const c_void {
                // Not in `.bss`, which would take another mapping in every process that loads the
                // library.
                #[unsafe(link_section = ".data")]
                static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
                standard_form($mangled, &FOUND, chosen!($plain))
            }
            or_other!($take, standard)
        }
    )* };
}

or_standard! {
    new_grouped(_size): take, c"_Znwm", "_Znwm";
    #[unsafe(no_mangle)]
    _ZnwmSt11align_val_t(_size, _align): take_aligned, c"_ZnwmSt11align_val_t", "_ZnwmSt11align_val_t";
    #[unsafe(no_mangle)]
    _ZnwmRKSt9nothrow_t(_size, _tag): take_plain, c"_ZnwmRKSt9nothrow_t", "_Znwm";
    #[unsafe(no_mangle)]
    _ZnamRKSt9nothrow_t(_size, _tag): take_plain_array, c"_ZnamRKSt9nothrow_t", "_Znam";
    #[unsafe(no_mangle)]
    _ZnwmSt11align_val_tRKSt9nothrow_t(_size, _align, _tag): take_aligned_plain, c"_ZnwmSt11align_val_tRKSt9nothrow_t", "_ZnwmSt11align_val_t";
    #[unsafe(no_mangle)]
    _ZnamSt11align_val_tRKSt9nothrow_t(_size, _align, _tag): take_aligned_array, c"_ZnamSt11align_val_tRKSt9nothrow_t", "_ZnamSt11align_val_t";
}

extern "C" fn take(size: usize) -> *mut c_void {
    let malloc = chosen!("malloc");
    if is_ours(malloc) {
        return malloc_grouped(size);
    }
    // SAFETY: every definition of `malloc` has this type, and this library has one, so the address
    // is not 0.
    unsafe { transmute::<usize, extern "C" fn(usize) -> *mut c_void>(malloc)(size) }
}

extern "C" fn take_aligned(size: usize, align: usize) -> *mut c_void {
    let aligned_alloc = chosen!("aligned_alloc");
    // SAFETY: every definition of `aligned_alloc` has this type, and this library has one, so the
    // address is not 0.
    unsafe { transmute::<usize, extern "C" fn(usize, usize) -> *mut c_void>(aligned_alloc)(align, size) }
}

/// Allocations for the forms that do not throw. By the standard, such a form calls a throwing form.
/// If that is this library's, the functions allocate. If the program replaced it, some code must
/// catch its exceptions. The C++ library's own forms do that, so the result here is null then.
macro_rules! unless_replaced {
    ($($name:ident($($argument:ident),*) = $take:ident, $($asked:literal)*;)*) => { $(
        extern "C" fn $name($($argument: usize),*) -> *mut c_void {
            if [$(chosen!($asked)),*].into_iter().all(is_ours) { $take($($argument),*) } else { null_mut() }
        }
    )* };
}

unless_replaced! {
    take_plain(size) = take, "_Znwm";
    take_plain_array(size) = take, "_Znwm" "_Znam";
    take_aligned_plain(size, align) = take_aligned, "_ZnwmSt11align_val_t";
    take_aligned_array(size, align) = take_aligned, "_ZnwmSt11align_val_t" "_ZnamSt11align_val_t";
}

/// Whether an address lies in this library's code.
#[inline(always)]
fn is_ours(address: usize) -> bool {
    own_code().contains(&address)
}

/// Finds the C++ library's own form of an operator. That form asks this library for memory once
/// more, runs the program's new_handler, and throws or returns null.
///
/// The search finds that form although the dynamic linker prefers this library's. It also finds it
/// if a plugin loaded the C++ library in a scope of its own. `found` keeps the result, since the
/// search takes the dynamic linker's lock. `plain` is the throwing form that this form stands for.
fn standard_form(name: &CStr, found: &AtomicPtr<c_void>, plain: usize) -> *const c_void {
    // Relaxed: the address of code that was loaded before.
    let known = found.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    const LAZY_IF_LOADED: c_int = 1 | 4; // RTLD_LAZY | RTLD_NOLOAD
    let open = chosen!("dlopen");
    if let Some(find) = dynamic_linker::dlsym().filter(|_| open != 0) {
        // SAFETY: every definition of this name has this type.
        let open = unsafe { transmute::<usize, extern "C" fn(*const c_char, c_int) -> *mut c_void>(open) };
        for library in [c"libstdc++.so.6", c"libc++.so.1"] {
            // The handle is never closed: the library is needed as long as a form may throw.
            let handle = open(library.as_ptr(), LAZY_IF_LOADED);
            let form = if handle.is_null() { null_mut() } else { find(handle, name.as_ptr()) };
            if !form.is_null() {
                found.store(form, Ordering::Relaxed);
                return form;
            }
        }
    }
    if name.to_bytes().ends_with(b"nothrow_t") {
        // If the program replaced the throwing form, returns the replacement. It may throw, and no
        // code here catches the exception. But it probably finds memory.
        return if is_ours(plain) { nothing as *const c_void } else { core::ptr::with_exposed_provenance(plain) };
    }
    neap::die(format_args!("operator new: there is no memory, and no C++ library was found that could throw"))
}

extern "C" fn nothing() -> *mut c_void {
    null_mut()
}
