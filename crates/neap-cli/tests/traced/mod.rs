//! The system calls of a program, counted by tracing it.
//!
//! Method: the program stops at each system call of its threads. The tracing thread waits for its
//! own children alone, so other tests in this process keep theirs.

use core::ffi::{c_long, c_void};
use core::ptr::{null_mut, without_provenance_mut};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// A stop at a system call, with the option `PTRACE_O_TRACESYSGOOD`.
const AT_CALL: i32 = libc::SIGTRAP | 0x80;

/// Runs a command that starts no other program, and returns the number of its system calls. Waits
/// of its threads for each other do not count, since their number depends on the scheduler.
pub(crate) fn system_calls(mut command: Command) -> u64 {
    #[allow(clippy::zombie_processes, reason = "`traced` waits for it")]
    let trace = move || {
        // SAFETY: between fork and exec only one system call is made. It has no pointers.
        unsafe {
            command.pre_exec(|| {
                match libc::ptrace(libc::PTRACE_TRACEME, 0, null_mut::<c_void>(), null_mut::<c_void>()) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        let program = command.spawn().unwrap();
        traced(program.id() as i32)
    };
    std::thread::spawn(trace).join().unwrap()
}

/// Counts the system calls of a child of this thread, which stops behind exec.
fn traced(pid: i32) -> u64 {
    assert!(libc::WIFSTOPPED(wait(pid).unwrap().1), "the program has not started");
    let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
    request(libc::PTRACE_SETOPTIONS, pid, 0, options as usize);
    request(libc::PTRACE_SYSCALL, pid, 0, 0);
    let (mut count, mut end) = (0, None);
    while let Some((thread, status)) = wait(-1) {
        if !libc::WIFSTOPPED(status) {
            end = if thread == pid { Some(status) } else { end };
            continue;
        }
        let signal = match libc::WSTOPSIG(status) {
            AT_CALL => {
                count += u64::from(enters(thread).is_some_and(|call| call != libc::SYS_futex));
                0
            }
            // The first stop of a thread, and the stop of the thread that made it.
            libc::SIGSTOP | libc::SIGTRAP => 0,
            signal => signal,
        };
        request(libc::PTRACE_SYSCALL, thread, 0, signal as usize);
    }
    assert!(end.is_some_and(|end| libc::WIFEXITED(end) && libc::WEXITSTATUS(end) == 0), "status {end:?}");
    count
}

/// Waits for a child of this thread, or for any of them. `None` if there is none.
fn wait(pid: i32) -> Option<(i32, i32)> {
    let mut status = 0;
    // SAFETY: the call writes to a live local.
    let stopped = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
    (stopped > 0).then_some((stopped, status))
}

/// Returns the number of the system call that a stopped thread begins; `None` if it ends one.
fn enters(thread: i32) -> Option<c_long> {
    // SAFETY: all bytes are a valid value, also of each field of the union. The call writes at most
    // its size to it.
    unsafe {
        let mut info: libc::ptrace_syscall_info = core::mem::zeroed();
        request(libc::PTRACE_GET_SYSCALL_INFO, thread, size_of_val(&info), (&raw mut info).expose_provenance());
        (info.op == libc::PTRACE_SYSCALL_INFO_ENTRY).then_some(info.u.entry.nr as c_long)
    }
}

/// Makes a request to a stopped thread. The thread may have been killed meanwhile.
fn request(request: libc::c_uint, thread: i32, address: usize, data: usize) {
    let [address, data] = [address, data].map(without_provenance_mut::<c_void>);
    // SAFETY: `data` is a number, or leads to a live local as long as `address` says.
    unsafe { libc::ptrace(request, thread, address, data) };
}
