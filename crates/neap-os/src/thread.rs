//! Threads: which CPU this one is on, how many there are, which CPUs they run on, and a new one.
//!
//! Sits between `pthread_create`, `getcpu` and `/proc/self` and the maintenance thread. Takes no lock of its own.
//! `spawn` runs the C library's thread set-up, which allocates: never call it under a lock of the allocator's.

use crate::Errno;
use crate::environment::read_file;
use crate::topology::{CpuSet, MAX_CPUS};
use core::ffi::{CStr, c_void};
use core::mem::MaybeUninit;
use rustix::fs::{CWD, Mode, OFlags, RawDir};

/// Where this thread's control block is: a number of its own, not 0.
#[inline]
pub fn pointer() -> usize {
    let pointer: usize;
    // SAFETY: the first word of a thread's control block is its own address.
    unsafe {
        core::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) pointer, options(nostack, readonly, preserves_flags))
    };
    pointer
}

/// A small number that stands for this thread, for spreading threads where nobody says which CPU they are on. The kernel
/// would, for the price of a system call.
#[inline]
pub fn number() -> usize {
    // Fibonacci hashing: control blocks lie at multiples of large powers of two.
    pointer().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48
}

/// Lets another thread run.
pub fn yield_now() {
    rustix::thread::sched_yield();
}

/// Sleeps about so many nanoseconds; a signal may end it early.
pub fn sleep(nanoseconds: u64) {
    // Nobody changes the word and nobody wakes.
    crate::futex::wait(&core::sync::atomic::AtomicU32::new(0), 0, Some(nanoseconds), crate::futex::Scope::Process);
}

/// This process's id.
pub fn process_id() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get() as u32
}

/// Whether there is a process with this id.
pub fn is_process(id: u32) -> bool {
    let id = i32::try_from(id).ok().and_then(rustix::process::Pid::from_raw);
    id.is_some_and(|id| rustix::process::test_kill_process(id) != Err(Errno::SRCH))
}

/// How many threads this process has; `None` without `/proc`.
pub fn count() -> Option<usize> {
    // A directory has two links of its own and one per entry: `/proc/PID/task` one per thread.
    let links = rustix::fs::stat(c"/proc/self/task").ok()?.st_nlink as usize;
    links.checked_sub(2).filter(|&threads| threads > 0)
}

/// Whether any thread of this process is on one of `cpus`, or was when it last ran; `None` without `/proc`.
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

/// The CPU that a thread is on, or was when it last ran; `None` for one that has ended.
fn cpu_of(tasks: &CStr, thread: &[u8]) -> Option<usize> {
    /// Where it stands in `stat`, counted from behind the name, which may contain anything.
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

/// Keeps the calling thread off `cpus`, unless it may run on no others.
pub fn leave(cpus: &CpuSet) {
    let Ok(mut allowed) = rustix::thread::sched_getaffinity(None) else { return };
    (0..MAX_CPUS.min(rustix::thread::CpuSet::MAX_CPU))
        .filter(|&cpu| cpus.contains(cpu))
        .for_each(|cpu| allowed.unset(cpu));
    if allowed.count() > 0 {
        // Refused, the thread stays where the program's own threads may be.
        let _ = rustix::thread::sched_setaffinity(None, &allowed);
    }
}

unsafe extern "C" {
    fn pthread_sigmask(how: i32, set: *const libc::sigset_t, old: *mut libc::sigset_t) -> i32;
    fn __errno_location() -> *mut i32;
    fn pthread_attr_init(attributes: *mut libc::pthread_attr_t) -> i32;
    fn pthread_attr_setdetachstate(attributes: *mut libc::pthread_attr_t, state: i32) -> i32;
    fn pthread_attr_setstacksize(attributes: *mut libc::pthread_attr_t, bytes: usize) -> i32;
    fn pthread_attr_destroy(attributes: *mut libc::pthread_attr_t) -> i32;
}

/// Bytes of a stack that is enough for the deepest call of the maintenance thread (ranges for one scattered release: 8 KiB) and the C
/// library's own needs (thread-local storage of every loaded library lies on the stack as well).
pub const SMALL_STACK: usize = 256 << 10;
/// Bytes of one on which a program's functions run.
pub const ORDINARY_STACK: usize = 2 << 20;
/// The same in a program with so many thread-local variables that they do not fit that.
const LARGE_STACK: usize = 64 << 20;

/// Starts a detached thread on a stack of so many bytes, or of more if the program's thread-local variables leave nothing of it, with every signal blocked.
///
/// # Errors
/// What `pthread_create` answered: `AGAIN` at a limit of threads, `PERM`. `NOSYS` where the kernel no longer lets threads
/// register for rseq, though this one is registered: the C library would end the process over it.
///
/// # Safety
/// `body(argument)` is sound on another thread for as long as it runs.
pub unsafe fn spawn(
    body: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
    stack: usize,
) -> Result<(), Errno> {
    const SETMASK: i32 = 2;
    const DETACHED: i32 = 1;
    const INVAL: i32 = Errno::INVAL.raw_os_error();
    if crate::rseq::is_registered() && !crate::rseq::may_register() {
        return Err(Errno::NOSYS);
    }
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut old = MaybeUninit::<libc::sigset_t>::uninit();
    // A new thread inherits the mask: all signals blocked, so that no handler of the program ever runs on it.
    // SAFETY: an all-ones set is a valid set (the kernel ignores the bits of KILL and STOP).
    let all: libc::sigset_t = unsafe { core::mem::transmute([0xff_u8; size_of::<libc::sigset_t>()]) };
    // SAFETY: the attributes are initialised before use and destroyed after; the masks are valid for the calls.
    let answer = unsafe {
        // The calls below may write errno, and whoever frees memory has to keep it.
        let errno = __errno_location().read();
        let answer = pthread_attr_init(attributes.as_mut_ptr());
        if answer != 0 {
            return Err(Errno::from_raw_os_error(answer));
        }
        pthread_attr_setdetachstate(attributes.as_mut_ptr(), DETACHED);
        pthread_sigmask(SETMASK, &raw const all, old.as_mut_ptr());
        let mut id = MaybeUninit::<libc::pthread_t>::uninit();
        let mut answer = INVAL;
        for bytes in [stack, stack.max(ORDINARY_STACK), LARGE_STACK] {
            if answer == INVAL {
                pthread_attr_setstacksize(attributes.as_mut_ptr(), bytes);
                answer = libc::pthread_create(id.as_mut_ptr(), attributes.as_ptr(), body, argument);
            }
        }
        pthread_sigmask(SETMASK, old.as_ptr(), core::ptr::null_mut());
        pthread_attr_destroy(attributes.as_mut_ptr());
        __errno_location().write(errno);
        answer
    };
    if answer == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(answer)) }
}

/// The bytes of a thread's name, and how many they are.
pub type Name = ([u8; 16], usize);

/// The calling thread's name.
pub fn own_name() -> Name {
    let mut name = [0; 16];
    let number = linux_raw_sys::general::__NR_prctl as usize;
    let option = linux_raw_sys::prctl::PR_GET_NAME as usize;
    // SAFETY: the kernel writes 16 bytes there at most.
    let answer = unsafe { crate::syscall::syscall5(number, option, name.as_mut_ptr().expose_provenance(), 0, 0, 0) };
    let length = if answer.is_ok() { name.iter().position(|&byte| byte == 0).unwrap_or(name.len()) } else { 0 };
    (name, length)
}

/// The calling thread's id.
pub fn id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// Whether a thread of this process has an id.
pub fn exists(id: u32) -> bool {
    let number = linux_raw_sys::general::__NR_tgkill as usize;
    // SAFETY: signal 0 is none; the kernel only looks.
    let answer = unsafe { crate::syscall::syscall5(number, process_id() as usize, id as usize, 0, 0, 0) };
    answer != Err(crate::Errno::SRCH)
}

/// Names the calling thread, as `ps -L` and `/proc` show it.
pub fn name(name: &core::ffi::CStr) {
    let _ = rustix::thread::set_name(name);
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU32, Ordering};

    static RAN: AtomicU32 = AtomicU32::new(0);

    #[test]
    fn a_thread_has_a_name_and_an_id_for_as_long_as_it_is_there() {
        let (id, name) = std::thread::spawn(|| {
            name(c"a name");
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
    fn a_thread_leaves_cpus_if_it_may_run_on_others() {
        std::thread::spawn(|| {
            let before = rustix::thread::sched_getaffinity(None).unwrap();
            let first = (0..MAX_CPUS).find(|&cpu| before.is_set(cpu)).unwrap();
            leave(&CpuSet::parse(b"0-1023").unwrap());
            assert_eq!(rustix::thread::sched_getaffinity(None).unwrap(), before, "there are no others");
            let mut one = CpuSet::EMPTY;
            one.insert(first);
            leave(&one);
            let after = rustix::thread::sched_getaffinity(None).unwrap();
            assert_eq!((after.is_set(first), after.count()), (before.count() == 1, (before.count() - 1).max(1)));
        })
        .join()
        .unwrap();
    }

    extern "C" fn body(_: *mut c_void) -> *mut c_void {
        name(c"neap");
        RAN.store(1, Ordering::Release); // Pairs with the Acquire load in the test.
        crate::futex::wake(&RAN, 1, crate::futex::Scope::Process);
        core::ptr::null_mut()
    }

    #[test]
    fn a_thread_starts_and_ends() {
        // SAFETY: the body touches an atomic only.
        unsafe { spawn(body, core::ptr::null_mut(), SMALL_STACK) }.unwrap();
        // Pairs with the Release store in `body`.
        while RAN.load(Ordering::Acquire) == 0 {
            crate::futex::wait(&RAN, 0, None, crate::futex::Scope::Process);
        }
        assert!(count().unwrap() >= 1);
        let all = CpuSet::parse(b"0-1023").unwrap();
        assert_eq!((any_on(&all), any_on(&CpuSet::EMPTY)), (Some(true), Some(false)));
        assert!(number() < 1 << 16);
    }
}
