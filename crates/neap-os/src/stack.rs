//! Runs rare work on a separate stack, since it may need more than the few kilobytes that a caller
//! may have.
//!
//! Such work runs within a program's calls of neap, once or a few times a second. The calls may
//! come from a coroutine with a small stack. [`apart`] maps a stack for one piece of work, and
//! unmaps it afterwards. So this module has no lock, and work may nest. Below the stack lies a
//! guard range without access rights. Debuggers and profilers find the caller, since the frame of
//! `call_on_stack` has a frame pointer.

use crate::arch::call_on_stack;
use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Bytes of a stack. Untouched pages cost nothing. A signal handler of the program may run on the
/// stack, too. Code that is built without optimisation needs more, since it copies large values at
/// each move.
pub const BYTES: usize = if cfg!(debug_assertions) { 1 << 20 } else { 256 << 10 };

/// Bytes without access below a stack.
const GUARD: usize = 64 << 10;

/// A mapped stack.
struct Stack(*mut c_void);

impl Stack {
    fn map() -> Option<Stack> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::STACK;
        // SAFETY: without an address the kernel chooses a free range.
        let base = unsafe { mmap_anonymous(null_mut(), GUARD + BYTES, ProtFlags::empty(), flags) }.ok()?;
        let stack = Stack(base);
        let usable = base.wrapping_byte_add(GUARD);
        // SAFETY: the range is a part of the mapping above, which no code uses yet.
        unsafe { mprotect(usable, BYTES, MprotectFlags::READ | MprotectFlags::WRITE) }.ok()?;
        Some(stack)
    }

    fn top(&self) -> *mut u8 {
        self.0.wrapping_byte_add(GUARD + BYTES).cast()
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and the work on the stack has ended.
        let _ = unsafe { munmap(self.0, GUARD + BYTES) };
    }
}

/// Work and result, passed from one stack to the other.
struct Errand<F, R> {
    work: Option<F>,
    answer: MaybeUninit<R>,
}

/// Runs `work` on a separate stack and returns its result. If no stack can be mapped, does not run
/// the work and returns `None`.
///
/// The work must end by returning. It must call no function of the program that might leave it
/// otherwise, such as by `longjmp`.
pub fn apart<R>(work: impl FnOnce() -> R) -> Option<R> {
    // Miri does not run assembly.
    if cfg!(miri) { Some(work()) } else { do_apart(work) }
}

#[inline(never)]
fn do_apart<F: FnOnce() -> R, R>(work: F) -> Option<R> {
    let stack = Stack::map()?;
    let mut errand = Errand { work: Some(work), answer: MaybeUninit::uninit() };
    // SAFETY: `top` is a multiple of the page size, and the stack has `BYTES` bytes below it. `run`
    // has the errand's types, and the errand's work has not been done. `run` writes the answer
    // before it returns.
    unsafe {
        call_on_stack(stack.top(), run::<F, R>, (&raw mut errand).cast());
        Some(errand.answer.assume_init())
    }
}

/// Runs the work of an errand on the new stack, and stores the result in the errand.
///
/// # Safety
/// `errand` points to an [`Errand<F, R>`] whose work has not run. No other thread uses it.
unsafe extern "C" fn run<F: FnOnce() -> R, R>(errand: *mut u8) {
    // SAFETY: the caller promises an errand of these types. Its owner waits in `do_apart`, so this
    // is the only reference.
    let errand = unsafe { &mut *errand.cast::<Errand<F, R>>() };
    if let Some(work) = errand.work.take() {
        errand.answer.write(work());
    }
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
