//! C++'s operators new and delete.
//!
//! Sits between C++ programs and [`family`](crate::family). A program may replace forms of them,
//! and the standard says which other forms end in those: these go there, by way of the dynamic
//! linker's choice. The others are `malloc` and `free`, as the dynamic linker chose these: a
//! profiler that is loaded in front of this library sees what they do, as it does with the C++
//! library's own. Where there is no memory the C++ library's own operator takes over: it runs the
//! program's new_handler, and throws; this library can do neither.
//!
//! They are here although the C++ library's call malloc and free, because an allocator that a program is linked with has some, too, which go around malloc.
//! What they hand out would come to our `free`.
//! Source: C++20 17.6.3; the mangled names of the Itanium C++ ABI.

use crate::family::malloc_otherwise;
use core::arch::{asm, global_asm, naked_asm};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};
use neap::process::PROCESS;

global_asm!(".hidden __ehdr_start", ".hidden _etext");

/// `operator new(size)`.
#[unsafe(no_mangle)]
extern "C" fn _Znwm(size: usize) -> *mut c_void {
    if !is_ours(chosen!("malloc")) {
        return plain_otherwise(size);
    }
    // As malloc, whose call at the very end leaves no frame that an exception would have to pass.
    PROCESS.allocate_or(size, move || plain_otherwise(size).cast()).cast()
}

/// Forms that are another function with what the standard says, to whom that ever belongs; `first`
/// puts the arguments in their places.
macro_rules! ends_in {
    ($($name:ident => $other:literal $(, $first:literal)?;)*) => { $(
        /// A form of an operator that is another function.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            naked_asm!(
                ".cfi_startproc",
                $($first,)?
                concat!("jmp qword ptr [rip + ", $other, "@GOTPCREL]"),
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
    _ZdlPvm => "_ZdlPv";
    _ZdaPvm => "_ZdaPv";
    _ZdlPvRKSt9nothrow_t => "_ZdlPv";
    _ZdaPvRKSt9nothrow_t => "_ZdaPv";
    _ZdaPvSt11align_val_t => "_ZdlPvSt11align_val_t";
    _ZdlPvmSt11align_val_t => "_ZdlPvSt11align_val_t", "mov rsi, rdx";
    _ZdaPvmSt11align_val_t => "_ZdaPvSt11align_val_t", "mov rsi, rdx";
    _ZdlPvSt11align_val_tRKSt9nothrow_t => "_ZdlPvSt11align_val_t";
    _ZdaPvSt11align_val_tRKSt9nothrow_t => "_ZdaPvSt11align_val_t";
}

/// Forms that take memory, or let the C++ library's take over, with the arguments and the stack as they were: what throws is called by our caller then.
macro_rules! or_standard {
    ($($(#[$attribute:meta])* $name:ident($($argument:ident),*): $take:ident, $mangled:literal, $plain:literal;)*) => { $(
        /// A form of `operator new`.
        $(#[$attribute])*
        #[unsafe(naked)]
        extern "C" fn $name($($argument: usize),*) -> *mut c_void {
            extern "C" fn standard() -> *const c_void {
                // Not in `.bss`: what lies there has a mapping more in every process that loads the library.
                #[unsafe(link_section = ".data")]
                static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
                standard_form($mangled, &FOUND, chosen!($plain))
            }
            naked_asm!(
                ".cfi_startproc",
                "push rdi", ".cfi_adjust_cfa_offset 8",
                "push rsi", ".cfi_adjust_cfa_offset 8",
                "push rdx", ".cfi_adjust_cfa_offset 8",
                "call {take}",
                "test rax, rax",
                "jne 2f",
                "call {standard}",
                "pop rdx", ".cfi_adjust_cfa_offset -8",
                "pop rsi", ".cfi_adjust_cfa_offset -8",
                "pop rdi", ".cfi_adjust_cfa_offset -8",
                "jmp rax",
                "2:",
                ".cfi_adjust_cfa_offset 24",
                "add rsp, 24",
                ".cfi_adjust_cfa_offset -24",
                "ret",
                ".cfi_endproc",
                take = sym $take, standard = sym standard
            )
        }
    )* };
}

or_standard! {
    plain_otherwise(_size): take, c"_Znwm", "_Znwm";
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
        return malloc_otherwise(size);
    }
    // SAFETY: every definition of `malloc` has this type.
    unsafe { transmute::<usize, extern "C" fn(usize) -> *mut c_void>(malloc)(size) }
}

extern "C" fn take_aligned(size: usize, align: usize) -> *mut c_void {
    let aligned_alloc = chosen!("aligned_alloc");
    // SAFETY: every definition of `aligned_alloc` has this type, and this library has one, so the
    // address is not 0.
    unsafe { transmute::<usize, extern "C" fn(usize, usize) -> *mut c_void>(aligned_alloc)(align, size) }
}

/// What forms that do not throw take, if those are ours that they would have to ask, and to catch what these throw: the C++ library's do that.
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

/// Whether an address is one of this library's code.
#[inline(always)]
fn is_ours(address: usize) -> bool {
    let (start, end): (usize, usize);
    // SAFETY: no access to memory; the linker defines both.
    unsafe {
        asm!("lea {}, [rip + __ehdr_start]", "lea {}, [rip + _etext]", out(reg) start, out(reg) end,
            options(nostack, nomem, preserves_flags));
    }
    (start..end).contains(&address)
}

/// The C++ library's own form, which asks ours for memory once more, runs the program's new_handler, and throws or answers null. It is found although the dynamic
/// linker prefers ours, and if it was loaded with a plugin that nobody else sees; once, since that takes the dynamic linker's lock. `plain` is who takes memory where this
/// form asks somebody else.
fn standard_form(name: &CStr, found: &AtomicPtr<c_void>, plain: usize) -> *const c_void {
    // Relaxed: code, which was there before.
    let known = found.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    const LAZY_IF_LOADED: c_int = 1 | 4; // RTLD_LAZY | RTLD_NOLOAD
    // They are the C library's from 2.34 on.
    let (open, find) = (chosen!("dlopen"), chosen!(weak "dlsym"));
    if open != 0 && find != 0 {
        // SAFETY: the C library's functions of these names; a handle that is not null is one.
        let (open, find) = unsafe {
            (
                transmute::<usize, extern "C" fn(*const c_char, c_int) -> *mut c_void>(open),
                transmute::<usize, extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>(find),
            )
        };
        for library in [c"libstdc++.so.6", c"libc++.so.1"] {
            // Never closed: it stays as long as something may be thrown.
            let handle = open(library.as_ptr(), LAZY_IF_LOADED);
            let form = if handle.is_null() { null_mut() } else { find(handle, name.as_ptr()) };
            if !form.is_null() {
                found.store(form, Ordering::Relaxed);
                return form;
            }
        }
    }
    if name.to_bytes().ends_with(b"nothrow_t") {
        // What the program replaced may throw, which nobody catches here; but there is memory, most likely.
        return if is_ours(plain) { nothing as *const c_void } else { core::ptr::with_exposed_provenance(plain) };
    }
    neap::die(format_args!("operator new: there is no memory, and no C++ library that could say so to the program"))
}

extern "C" fn nothing() -> *mut c_void {
    null_mut()
}
