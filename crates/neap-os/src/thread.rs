//! Threads: this thread's identity, the number of threads, and the CPUs that they run on.
//!
//! The answers come from the C library, the kernel and `/proc/self`. This module has no lock.

use crate::Errno;
use crate::environment::read_file;
use crate::topology::{CpuSet, MAX_CPUS};
use core::arch::global_asm;
use core::ffi::CStr;
use core::mem::MaybeUninit;
use rustix::fs::{CWD, Mode, OFlags, RawDir};

// No instruction. The symbol is weak, since glibc has it only from 2.32 on.
global_asm!(".weak __libc_single_threaded");

/// The thread pointer, an address in this thread's control block. It identifies the thread, and is
/// never 0.
#[inline]
pub fn pointer() -> usize {
    crate::arch::thread_pointer()
}

/// A number below 65536, derived from this thread's pointer. It spreads threads that have no CPU
/// id. A system call for the CPU would cost more.
#[inline]
pub fn number() -> usize {
    // Fibonacci hashing: control blocks lie at multiples of large powers of two.
    pointer().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48
}

/// Lets another thread run.
pub fn yield_now() {
    rustix::thread::sched_yield();
}

/// Sleeps for about `nanoseconds`; a signal may end the sleep early.
pub fn sleep(nanoseconds: u64) {
    // The word is local, so no thread changes it or wakes the sleeper.
    crate::futex::wait(&core::sync::atomic::AtomicU32::new(0), 0, Some(nanoseconds), crate::futex::Sharing::Process);
}

/// This process's id.
pub fn process_id() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get() as u32
}

/// Whether a process with this id exists.
pub fn is_process(id: u32) -> bool {
    let id = i32::try_from(id).ok().and_then(rustix::process::Pid::from_raw);
    id.is_some_and(|id| rustix::process::test_kill_process(id) != Err(Errno::SRCH))
}

/// Number of threads of this process; `None` without `/proc`.
pub fn count() -> Option<usize> {
    // A directory has two links of its own and one per entry. `/proc/PID/task` has one entry per
    // thread.
    let links = rustix::fs::stat(c"/proc/self/task").ok()?.st_nlink as usize;
    links.checked_sub(2).filter(|&threads| threads > 0)
}

/// Whether any thread of this process runs, or last ran, on one of `cpus`; `None` without `/proc`.
pub fn any_on(cpus: &CpuSet) -> Option<bool> {
    const TASKS: &CStr = c"/proc/self/task";
    let folder = rustix::fs::openat(CWD, TASKS, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let mut buffer = [MaybeUninit::uninit(); 512];
    let mut entries = RawDir::new(folder.ok()?, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry.ok()?;
        let name = entry.file_name().to_bytes();
        if name.first().is_some_and(u8::is_ascii_digit) && cpu_of(TASKS, name).is_some_and(|cpu| cpus.contains(cpu)) {
            return Some(true);
        }
    }
    Some(false)
}

/// The CPU that a thread runs or last ran on; `None` if the thread has ended.
fn cpu_of(tasks: &CStr, thread: &[u8]) -> Option<usize> {
    /// Index of the CPU in `stat`, counted from the field after the name. The name may contain
    /// spaces.
    const FIELD: usize = 36;
    let mut path = [0; 48];
    let mut length = 0;
    for part in [tasks.to_bytes(), b"/", thread, b"/stat"] {
        path.get_mut(length..length + part.len())?.copy_from_slice(part);
        length += part.len();
    }
    let mut text = [0; 640];
    let text = read_file(CStr::from_bytes_until_nul(&path).ok()?, &mut text).ok()?;
    let behind = text.iter().rposition(|&byte| byte == b')')? + 2;
    let field = text.get(behind..)?.split(|&byte| byte == b' ').nth(FIELD)?;
    core::str::from_utf8(field).ok()?.parse().ok()
}

/// The CPUs that the calling thread may run on; empty if the kernel refuses the call.
pub fn allowed() -> CpuSet {
    let mut cpus = CpuSet::EMPTY;
    if let Ok(allowed) = rustix::thread::sched_getaffinity(None) {
        let most = MAX_CPUS.min(rustix::thread::CpuSet::MAX_CPU);
        (0..most).filter(|&cpu| allowed.is_set(cpu)).for_each(|cpu| cpus.insert(cpu));
    }
    cpus
}

/// Whether this is the process's only thread, according to the C library. Threads that the bare
/// system call `clone` made do not count. `false` if the C library lacks `__libc_single_threaded`.
pub fn is_alone() -> bool {
    crate::weak_variable!("__libc_single_threaded", u8) != 0
}

/// The bytes of a thread's name, and its length.
pub type Name = ([u8; 16], usize);

/// The calling thread's name. Its length is 0 if the kernel refuses.
pub fn own_name() -> Name {
    let mut name = [0; 16];
    let number = linux_raw_sys::general::__NR_prctl as usize;
    let option = linux_raw_sys::prctl::PR_GET_NAME as usize;
    // SAFETY: the kernel writes at most 16 bytes, the buffer's length.
    let answer = unsafe { crate::syscall::syscall5(number, option, name.as_mut_ptr().expose_provenance(), 0, 0, 0) };
    let length = if answer.is_ok() { name.iter().position(|&byte| byte == 0).unwrap_or(name.len()) } else { 0 };
    (name, length)
}

/// The calling thread's id.
pub fn id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// Whether this process has a thread with the id `id`.
pub fn exists(id: u32) -> bool {
    let number = linux_raw_sys::general::__NR_tgkill as usize;
    // SAFETY: the call has no pointers. The kernel only checks the thread, since signal 0 is no
    // signal.
    let answer = unsafe { crate::syscall::syscall5(number, process_id() as usize, id as usize, 0, 0, 0) };
    answer != Err(crate::Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_a_name_and_an_id_for_as_long_as_it_is_there() {
        let (id, name) = std::thread::spawn(|| {
            rustix::thread::set_name(c"a name").unwrap();
            assert!(exists(id()));
            (id(), own_name())
        })
        .join()
        .unwrap();
        assert_eq!(&name.0[..name.1], b"a name");
        let gone = (0..1000).any(|_| {
            std::thread::sleep(core::time::Duration::from_millis(1));
            !exists(id)
        });
        assert!(gone && exists(super::id()));
    }

    #[test]
    fn threads_are_counted_and_run_on_cpus() {
        std::thread::spawn(|| {
            assert!(count().unwrap() > 1 && !is_alone());
            let all = CpuSet::parse(b"0-1023").unwrap();
            assert_eq!((any_on(&all), any_on(&CpuSet::EMPTY)), (Some(true), Some(false)));
            assert!(allowed().count() > 0 && number() < 1 << 16);
        })
        .join()
        .unwrap();
    }
}
