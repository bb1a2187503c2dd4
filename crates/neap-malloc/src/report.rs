//! The family's reports: mallinfo, malloc_stats, malloc_info.
//!
//! The functions read the manager's statistics and change nothing.

use core::ffi::{c_int, c_void};
use core::fmt::Write;
use neap::process::PROCESS;

/// `struct mallinfo2` of the GNU C library, or `struct mallinfo` with `int`s.
#[repr(C)]
struct Info<T> {
    arena: T,
    ordblks: T,
    smblks: T,
    hblks: T,
    hblkhd: T,
    usmblks: T,
    fsmblks: T,
    uordblks: T,
    fordblks: T,
    keepcost: T,
}

fn info<T>(number: impl Fn(u64) -> T) -> Info<T> {
    let usage = PROCESS.usage();
    let none = || number(0);
    Info {
        arena: number(usage.mapped_bytes),
        ordblks: none(),
        smblks: none(),
        hblks: none(),
        hblkhd: none(),
        usmblks: none(),
        fsmblks: number(usage.cached_bytes),
        uordblks: number(usage.used_bytes),
        fordblks: number(usage.free_bytes),
        keepcost: number(usage.free_bytes),
    }
}

/// mallinfo2(3). The fields set are `arena`, `fsmblks` (cached bytes), `uordblks`, `fordblks`, and
/// `keepcost` (the most that malloc_trim would release).
#[unsafe(no_mangle)]
extern "C" fn mallinfo2() -> Info<usize> {
    info(|number| number as usize)
}

/// mallinfo(3): mallinfo2 with numbers capped at the largest `int`.
#[unsafe(no_mangle)]
extern "C" fn mallinfo() -> Info<c_int> {
    info(|number| number.min(c_int::MAX as u64) as c_int)
}

/// malloc_stats(3): one line on standard error.
#[unsafe(no_mangle)]
extern "C" fn malloc_stats() {
    let usage = PROCESS.usage();
    neap::say(format_args!(
        "{} bytes used, {} cached, {} free and resident, {} mapped",
        usage.used_bytes, usage.cached_bytes, usage.free_bytes, usage.mapped_bytes
    ));
}

// No instruction. The symbol is weak, since the linker adds `fwrite` to a static program for a
// strong reference only.
#[cfg(not(target_feature = "crt-static"))]
core::arch::global_asm!(".weak fwrite");

/// malloc_info(3): the numbers of mallinfo2 as XML.
///
/// # Safety
/// `stream` is an open `FILE`.
#[unsafe(no_mangle)]
unsafe extern "C" fn malloc_info(options: c_int, stream: *mut c_void) -> c_int {
    unsafe extern "C" {
        fn fwrite(from: *const u8, size: usize, count: usize, stream: *mut c_void) -> usize;
    }
    if options != 0 {
        return 22;
    }
    let usage = PROCESS.usage();
    let mut line = neap::Line::new();
    let _ = writeln!(
        line,
        "<malloc version=\"neap-1\"><total type=\"used\" size=\"{}\"/><total type=\"cached\" size=\"{}\"/>\
         <total type=\"free\" size=\"{}\"/><system type=\"current\" size=\"{}\"/></malloc>",
        usage.used_bytes, usage.cached_bytes, usage.free_bytes, usage.mapped_bytes
    );
    let text = line.as_bytes();
    // SAFETY: the caller says that the stream is an open `FILE`, so there is a C library with
    // fwrite.
    let written = unsafe { fwrite(text.as_ptr(), 1, text.len(), stream) };
    if written == text.len() { 0 } else { -1 }
}
