//! Work on a stack of its own, for what is rare and needs more than the few kilobytes that a caller
//! may have.
//!
//! Sits between `mmap` and what is done once, or a few times a second, from within calls of a
//! program's: those may come from a coroutine with a small stack. Each stack is mapped for one
//! piece of work and unmapped behind it, so there is no lock, and a piece of work may begin
//! another. Below it lies a page without access. A debugger and a profiler find the way back to the
//! caller: the frame that stands between has a frame pointer.

use core::arch::naked_asm;
use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Bytes of a stack. Pages that are not touched cost nothing; a signal handler of the program's may
/// run on it. Code without optimisation has room for a copy at each move of a large value.
pub const BYTES: usize = if cfg!(debug_assertions) { 1 << 20 } else { 256 << 10 };

/// The page without access, and some more.
const GUARD: usize = 64 << 10;

/// A mapped stack.
struct Stack(*mut c_void);

impl Stack {
    fn map() -> Option<Stack> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::STACK;
        // SAFETY: a new mapping, where the kernel likes.
        let base = unsafe { mmap_anonymous(null_mut(), GUARD + BYTES, ProtFlags::empty(), flags) }.ok()?;
        let stack = Stack(base);
        let usable = base.wrapping_byte_add(GUARD);
        // SAFETY: a part of the mapping above, which nothing uses yet.
        unsafe { mprotect(usable, BYTES, MprotectFlags::READ | MprotectFlags::WRITE) }.ok()?;
        Some(stack)
    }

    fn top(&self) -> *mut u8 {
        self.0.wrapping_byte_add(GUARD + BYTES).cast()
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and the work on it is done.
        let _ = unsafe { munmap(self.0, GUARD + BYTES) };
    }
}

/// What goes from one stack to the other.
struct Errand<F, R> {
    work: Option<F>,
    answer: MaybeUninit<R>,
}

/// Does the work on a stack of its own, and answers what that does; `None` where none can be
/// mapped, and nothing was done.
///
/// The work must not end otherwise than by returning, and calls no function of a program's that
/// might.
pub fn apart<R>(work: impl FnOnce() -> R) -> Option<R> {
    // Miri knows no assembly.
    if cfg!(miri) { Some(work()) } else { do_apart(work) }
}

#[inline(never)]
fn do_apart<F: FnOnce() -> R, R>(work: F) -> Option<R> {
    let stack = Stack::map()?;
    let mut errand = Errand { work: Some(work), answer: MaybeUninit::uninit() };
    // SAFETY: the stack is mapped, and as large as it says; `run` is of the errand's types, and
    // leaves an answer.
    unsafe {
        switch(stack.top(), run::<F, R>, (&raw mut errand).cast());
        Some(errand.answer.assume_init())
    }
}

/// The first function on a new stack.
///
/// # Safety
/// `errand` is an [`Errand`] of these types, whose work has not been done.
unsafe extern "C" fn run<F: FnOnce() -> R, R>(errand: *mut u8) {
    // SAFETY: as the caller promises; its owner waits.
    let errand = unsafe { &mut *errand.cast::<Errand<F, R>>() };
    if let Some(work) = errand.work.take() {
        errand.answer.write(work());
    }
}

/// Calls a function with the stack pointer at `top`, and comes back with the caller's.
///
/// # Safety
/// Below `top`, a multiple of 16, there is as much memory as the function needs; the function takes
/// `argument`.
#[unsafe(naked)]
unsafe extern "C" fn switch(top: *mut u8, function: unsafe extern "C" fn(*mut u8), argument: *mut u8) {
    naked_asm!(
        ".cfi_startproc",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "mov rsp, rdi",
        "mov rdi, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> usize {
        let local = 0_u8;
        core::hint::black_box(&raw const local).addr()
    }

    #[test]
    fn work_apart_has_its_own_stack_and_an_answer() {
        let outside = here();
        let text = std::string::String::from("moved");
        let (length, inside, nested) = apart(|| {
            let large = core::hint::black_box([1_u8; BYTES / 2]);
            assert_eq!(large.iter().map(|byte| usize::from(*byte)).sum::<usize>(), BYTES / 2);
            (text.len(), here(), apart(here).unwrap())
        })
        .unwrap();
        assert_eq!(length, 5);
        let far = |a: usize, b: usize| a.abs_diff(b) > 4096;
        assert!(far(outside, inside) && far(inside, nested) && far(outside, nested));
        assert!(!far(outside, here()));
    }
}
