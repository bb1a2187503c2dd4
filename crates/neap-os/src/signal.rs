//! A handler of SIGSEGV that runs before the program's own.
//!
//! # Design
//! This module sets the handler by the system call, since a program may wrap the C library's
//! function. The handler runs on the thread's alternative stack if there is one. A handler that the
//! program sets later replaces it.
//!
//! This module has no lock and no state. All functions may be called in a signal handler.

use crate::Errno;
use crate::syscall::syscall5;
use core::ffi::{c_int, c_void};
use core::mem::transmute;
use linux_raw_sys::general::{__NR_rt_sigaction, __NR_tgkill};

/// A function that handles signals, with the signal's information and the interrupted context.
pub type Handler = unsafe extern "C" fn(c_int, *mut c_void, *mut c_void);

const SEGV: usize = 11;
/// Bytes of the kernel's set of signals.
const SET_BYTES: usize = 8;
const DEFAULT: usize = 0;
const IGNORE: usize = 1;
const WITH_INFO: usize = 4;
const ON_STACK: usize = 0x0800_0000;
/// On x86-64 the kernel refuses an action without a function that ends the handler.
const WITH_RESTORER: usize = 0x0400_0000;

/// What a process does at a signal, laid out as the kernel's `struct sigaction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Action {
    handler: usize,
    flags: usize,
    restorer: usize,
    mask: u64,
}

impl Action {
    /// The kernel's own action, which ends the process.
    pub const DEFAULT: Action = Action { handler: DEFAULT, flags: 0, restorer: 0, mask: 0 };

    /// Performs this action for a signal, from within the handler that has replaced the action.
    ///
    /// If the action has a handler, calls it. If the action is to ignore the signal, and another
    /// thread or process sent the signal, does nothing. Otherwise sets the kernel's default action.
    /// The caller must then return. After that, the thread executes the failed instruction again,
    /// or the sent signal arrives again.
    ///
    /// # Safety
    /// The arguments are those of the handler that the kernel has called, and the action is one
    /// that [`handle_faults`] returned.
    pub unsafe fn go_on(self, signal: c_int, info: *mut c_void, context: *mut c_void) {
        // SAFETY: `info` and `context` are those of the kernel (the caller's promise).
        let is_sent = unsafe { Fault::of(info, context) }.is_none();
        match self.handler {
            // The kernel ends a process that ignores a failed instruction.
            IGNORE if is_sent => {}
            DEFAULT | IGNORE => {
                let _ = set(&Action::DEFAULT);
                if is_sent {
                    let (process, thread) = (crate::thread::process_id(), crate::thread::id());
                    // SAFETY: the call has no pointers. The signal is blocked until the handler
                    // returns.
                    let _ = unsafe { syscall5(__NR_tgkill as usize, process as usize, thread as usize, SEGV, 0, 0) };
                }
            }
            handler => {
                // SAFETY: this was the process's handler, as the caller promises. It takes these
                // arguments of the kernel, or only the first of them.
                unsafe { transmute::<usize, Handler>(handler)(signal, info, context) }
            }
        }
    }
}

/// Sets the action for SIGSEGV, and returns the previous one.
fn set(action: &Action) -> Result<Action, Errno> {
    let mut before = Action::DEFAULT;
    let [new, old] = [core::ptr::from_ref(action).expose_provenance(), (&raw mut before).expose_provenance()];
    // SAFETY: both pointers lead to values that are laid out as the kernel's `struct sigaction` and
    // live during the call. The handler is the kernel's default, or one that the caller of
    // `handle_faults` promises to be safe.
    unsafe { syscall5(__NR_rt_sigaction as usize, SEGV, new, old, SET_BYTES, 0)? };
    Ok(before)
}

/// Lets the kernel call `handler` at SIGSEGV. Returns the previous action.
///
/// # Errors
/// The kernel's error if a sandbox refuses the call. The previous action stays.
///
/// # Safety
/// The handler is safe to call anywhere in the program. It passes each signal that it does not
/// handle to the returned action's [`go_on`](Action::go_on).
pub unsafe fn handle_faults(handler: Handler) -> Result<Action, Errno> {
    let restorer = crate::arch::signal_restorer();
    let flags = WITH_INFO | ON_STACK | if restorer == 0 { 0 } else { WITH_RESTORER };
    set(&Action { handler: handler as *const () as usize, flags, restorer, mask: 0 })
}

/// Lets the kernel end the process at the next SIGSEGV.
pub fn end_at_faults() {
    let _ = set(&Action::DEFAULT);
}

/// The context that a signal has interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted {
    /// Address of the instruction.
    pub instruction: usize,
    /// The stack pointer there.
    pub stack_pointer: usize,
    /// The link register, if the processor has one.
    pub link: Option<usize>,
    /// Whether a memory access there was a write; `None` if the processor does not say.
    pub is_write: Option<bool>,
}

/// A memory access that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The address that was accessed; 0 if the processor does not say.
    pub address: usize,
    /// Registers of the code that made the access.
    pub at: Interrupted,
}

impl Fault {
    /// Returns the access for which the kernel called a handler. `None` if another process or
    /// thread has sent the signal.
    ///
    /// # Safety
    /// The arguments are those of a [`Handler`] that the kernel has called.
    pub unsafe fn of(info: *const c_void, context: *const c_void) -> Option<Fault> {
        /// Offsets of `si_code` and `si_addr`.
        const CODE: usize = 8;
        const ADDRESS: usize = 16;
        // SAFETY: the caller promises the kernel's information. It has 128 bytes, so both reads lie
        // inside it.
        let (code, address) =
            unsafe { (info.byte_add(CODE).cast::<c_int>().read(), info.byte_add(ADDRESS).cast::<usize>().read()) };
        // SAFETY: the context is the kernel's (the caller's promise).
        let at = unsafe { crate::arch::interrupted(context) };
        // A signal that a process or thread has sent has a code of 0 or less.
        (code > 0).then_some(Fault { address, at })
    }
}

/// Whether a call may return to an address, which is so if the instruction before it is a call.
///
/// # Safety
/// The address is a multiple of the processor's alignment of code. The 8 bytes before it can be
/// read.
pub unsafe fn is_behind_call(address: usize) -> bool {
    // SAFETY: the bytes can be read (the caller's promise).
    let before = unsafe { core::ptr::with_exposed_provenance::<[u8; 8]>(address - 8).read() };
    crate::arch::ends_in_call(before)
}
