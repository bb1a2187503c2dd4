//! Creates, joins and configures neap's own threads.
//!
//! # Design
//!
//! 1. The C library's own functions create and join the threads. neap looks these functions up in
//!    the C library first. So it does not call functions with these names that the program, a
//!    profiler or a preloaded library defines.
//! 2. The C library counts the threads as its own. So its set*id functions change the threads'
//!    user, too. A process whose main thread has ended lives until these threads end. Therefore
//!    neap ends its threads when the main thread ends ([`make_key`]).
//! 3. The threads start with every signal blocked except those of the C library and SIGSYS. So no
//!    handler of the program runs on them, except that of SIGSYS. A sandbox may answer a system
//!    call by SIGSYS, and the kernel ends a process whose thread blocks this signal.
//! 4. [`settle`] replaces the scheduling policy, CPUs and priority that a thread has inherited.
//!
//! # Locking
//!
//! This module has no lock. A look-up takes the dynamic linker's lock, and [`make`] allocates.
//! Therefore neap does neither within a call that allocates or frees.

use crate::Errno;
use crate::syscall::syscall5;
use crate::topology::{CpuSet, MAX_CPUS};
use core::ffi::{CStr, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicUsize, Ordering};
use linux_raw_sys::general::{__NR_rt_sigprocmask, __NR_sched_setscheduler, __NR_setpriority};

/// Function that a thread runs.
pub type Body = extern "C" fn(*mut c_void) -> *mut c_void;

/// A thread, as the C library names it.
pub type Id = libc::pthread_t;

type Create = unsafe extern "C" fn(*mut Id, *const libc::pthread_attr_t, Body, *mut c_void) -> i32;
type Join = unsafe extern "C" fn(Id, *mut *mut c_void) -> i32;
type SetStackSize = unsafe extern "C" fn(*mut libc::pthread_attr_t, usize) -> i32;
type MakeKey = unsafe extern "C" fn(*mut u32, extern "C" fn(*mut c_void)) -> i32;
type SetValue = unsafe extern "C" fn(u32, *const c_void) -> i32;

/// Addresses of functions of the C library; 0 before they are found.
///
/// glibc before 2.34 keeps these functions in libpthread. A program with one thread may not load
/// that library.
#[derive(Debug, Default)]
pub struct Functions {
    create: AtomicUsize,
    join: AtomicUsize,
    set_stack_size: AtomicUsize,
    make_key: AtomicUsize,
    set_value: AtomicUsize,
}

/// Returns the address in `known`. If it is 0, first stores the address that `look` finds.
///
/// # Errors
/// `NOSYS` if the look-up does not find the function.
fn found(known: &AtomicUsize, look: fn() -> usize) -> Result<usize, Errno> {
    // Relaxed: the values are addresses of code, which exists already.
    let mut address = known.load(Ordering::Relaxed);
    if address == 0 {
        address = look();
        known.store(address, Ordering::Relaxed);
    }
    if address == 0 { Err(Errno::NOSYS) } else { Ok(address) }
}

impl Functions {
    /// Creates an empty table. [`make`] and the other functions look up an address when they first
    /// need it.
    pub const fn new() -> Functions {
        Functions {
            create: AtomicUsize::new(0),
            join: AtomicUsize::new(0),
            set_stack_size: AtomicUsize::new(0),
            make_key: AtomicUsize::new(0),
            set_value: AtomicUsize::new(0),
        }
    }

    fn create(&self) -> Result<Create, Errno> {
        let address = found(&self.create, look_up::create)?;
        // SAFETY: this is the address of `pthread_create`. `Create` is its type in POSIX.
        Ok(unsafe { core::mem::transmute::<usize, Create>(address) })
    }

    fn join(&self) -> Result<Join, Errno> {
        let address = found(&self.join, look_up::join)?;
        // SAFETY: this is the address of `pthread_join`. `Join` is its type in POSIX.
        Ok(unsafe { core::mem::transmute::<usize, Join>(address) })
    }

    fn set_stack_size(&self) -> Result<SetStackSize, Errno> {
        let address = found(&self.set_stack_size, look_up::set_stack_size)?;
        // SAFETY: this is the address of `pthread_attr_setstacksize`. `SetStackSize` is its type in
        // POSIX.
        Ok(unsafe { core::mem::transmute::<usize, SetStackSize>(address) })
    }

    fn make_key(&self) -> Result<MakeKey, Errno> {
        let address = found(&self.make_key, look_up::make_key)?;
        // SAFETY: this is the address of `pthread_key_create`. `MakeKey` is its type in POSIX. A
        // key is an `unsigned int` in glibc and musl.
        Ok(unsafe { core::mem::transmute::<usize, MakeKey>(address) })
    }

    fn set_value(&self) -> Result<SetValue, Errno> {
        let address = found(&self.set_value, look_up::set_value)?;
        // SAFETY: this is the address of `pthread_setspecific`. `SetValue` is its type in POSIX. A
        // key is an `unsigned int` in glibc and musl.
        Ok(unsafe { core::mem::transmute::<usize, SetValue>(address) })
    }
}

/// The functions of the dynamically linked C library.
#[cfg(not(target_feature = "crt-static"))]
mod look_up {
    use crate::dynamic_linker::of_c_library;

    pub(super) fn create() -> usize {
        of_c_library(c"pthread_create")
    }

    pub(super) fn join() -> usize {
        of_c_library(c"pthread_join")
    }

    pub(super) fn set_stack_size() -> usize {
        of_c_library(c"pthread_attr_setstacksize")
    }

    pub(super) fn make_key() -> usize {
        of_c_library(c"pthread_key_create")
    }

    pub(super) fn set_value() -> usize {
        of_c_library(c"pthread_setspecific")
    }
}

/// In a static program each name has one definition.
#[cfg(target_feature = "crt-static")]
mod look_up {
    pub(super) fn create() -> usize {
        libc::pthread_create as *const () as usize
    }

    pub(super) fn join() -> usize {
        libc::pthread_join as *const () as usize
    }

    pub(super) fn set_stack_size() -> usize {
        libc::pthread_attr_setstacksize as *const () as usize
    }

    pub(super) fn make_key() -> usize {
        libc::pthread_key_create as *const () as usize
    }

    pub(super) fn set_value() -> usize {
        libc::pthread_setspecific as *const () as usize
    }
}

unsafe extern "C" {
    fn __errno_location() -> *mut i32;
    fn pthread_attr_init(attributes: *mut libc::pthread_attr_t) -> i32;
    fn pthread_attr_setdetachstate(attributes: *mut libc::pthread_attr_t, state: i32) -> i32;
    fn pthread_attr_destroy(attributes: *mut libc::pthread_attr_t) -> i32;
}

/// Bytes of a stack for the deepest call of neap's thread and the C library's own needs. The list
/// of [`release_scattered`](crate::memory::release_scattered) takes 8 KiB. The C library places
/// static thread-local storage on the stack, too.
pub const SMALL_STACK: usize = 256 << 10;
/// Bytes of a stack for a program's functions.
pub const ORDINARY_STACK: usize = 2 << 20;
/// Bytes of a stack in a program whose thread-local variables do not fit [`ORDINARY_STACK`].
const LARGE_STACK: usize = 64 << 20;

/// Whether a thread may be [joined](join).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The thread is joined.
    Joined,
    /// The thread is never joined.
    Detached,
}

/// Creates a thread with the [signals of programs](signals_of_programs) blocked, on a stack of
/// `stack` bytes. The stack is larger if the program's thread-local variables do not fit.
///
/// # Errors
/// The error of `pthread_create`, such as `AGAIN` at a limit of threads. `NOSYS` if the C library
/// has no such function. `NOSYS` also if the C library registers threads for rseq, but the kernel
/// now refuses to register one. The C library would then end the process.
///
/// # Safety
/// `body(argument)` is sound on another thread for as long as it runs.
pub unsafe fn make(
    functions: &Functions,
    body: Body,
    argument: *mut c_void,
    stack: usize,
    end: End,
) -> Result<Id, Errno> {
    const DETACHED: i32 = 1;
    const INVAL: i32 = Errno::INVAL.raw_os_error();
    let (create, set_stack_size) = (functions.create()?, functions.set_stack_size()?);
    if crate::rseq::is_registered() && !crate::rseq::may_register() {
        return Err(Errno::NOSYS);
    }
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut id = MaybeUninit::<Id>::uninit();
    // SAFETY: `pthread_attr_init` initialises the attributes, and they are destroyed after use. The
    // caller promises that `body(argument)` is sound on another thread. `id` is writable, and
    // `__errno_location` returns the address of this thread's errno.
    let answer = unsafe {
        // The calls below may write errno, which the program's call must preserve.
        let errno = __errno_location().read();
        let answer = pthread_attr_init(attributes.as_mut_ptr());
        if answer != 0 {
            return Err(Errno::from_raw_os_error(answer));
        }
        if end == End::Detached {
            pthread_attr_setdetachstate(attributes.as_mut_ptr(), DETACHED);
        }
        // A new thread inherits the mask.
        let mask = set_mask(signals_of_programs());
        let mut answer = INVAL;
        for bytes in [stack, stack.max(ORDINARY_STACK), LARGE_STACK] {
            if answer == INVAL {
                set_stack_size(attributes.as_mut_ptr(), bytes);
                answer = create(id.as_mut_ptr(), attributes.as_ptr(), body, argument);
            }
        }
        set_mask(mask);
        pthread_attr_destroy(attributes.as_mut_ptr());
        __errno_location().write(errno);
        answer
    };
    if answer != 0 {
        return Err(Errno::from_raw_os_error(answer));
    }
    // SAFETY: `pthread_create` returned 0, so it has written the id.
    Ok(unsafe { id.assume_init() })
}

/// Waits until a thread has ended and the C library no longer counts it.
///
/// # Safety
/// [`make`] created the thread `id` in this process as [`End::Joined`], and it was not joined yet.
pub unsafe fn join(functions: &Functions, id: Id) {
    let Ok(join) = functions.join() else { return };
    // SAFETY: the caller promises a joinable thread of this process that was not joined. A null
    // pointer discards the thread's result.
    unsafe { join(id, core::ptr::null_mut()) };
}

/// Makes a key of thread-local values. At the end of a thread whose value is not null, the C
/// library calls `destructor` with the value. `None` if no key is free, or the C library lacks the
/// function.
pub fn make_key(functions: &Functions, destructor: extern "C" fn(*mut c_void)) -> Option<u32> {
    let (make, mut key) = (functions.make_key().ok()?, 0);
    // SAFETY: the key is writable. The destructor is safe to call with any value.
    (unsafe { make(&raw mut key, destructor) } == 0).then_some(key)
}

/// Sets the calling thread's value of a key that [`make_key`] returned. Ignores an error of the C
/// library.
pub fn set_value(functions: &Functions, key: u32, value: *const c_void) {
    if let Ok(set) = functions.set_value() {
        // SAFETY: the C library refuses a key that it does not have. It does not access the value's
        // memory.
        let _ = unsafe { set(key, value) };
    }
}

/// Returns the set of all signals except SIGSYS and those that the C library reserves, which begin
/// at 32. If a thread blocked a reserved signal, a `setuid` or a cancellation would hang. Signal
/// `n` has bit `n - 1`.
fn signals_of_programs() -> u64 {
    // SIGRTMIN is 34 in glibc and 35 in musl.
    let first = libc::SIGRTMIN().cast_unsigned().clamp(32, 64);
    (!0 << (first - 1) | u64::from(u32::MAX >> 1)) & !(1 << (libc::SIGSYS - 1))
}

/// Sets the calling thread's mask of blocked signals, and returns the previous mask.
fn set_mask(mask: u64) -> u64 {
    const SETMASK: usize = 2;
    let (new, mut old) = (mask, 0_u64);
    // SAFETY: the kernel reads and writes one word each, which live across the call.
    let _ = unsafe {
        let (new, old) = ((&raw const new).expose_provenance(), (&raw mut old).expose_provenance());
        syscall5(__NR_rt_sigprocmask as usize, SETMASK, new, old, size_of::<u64>(), 0)
    };
    old
}

/// Sets the name and the CPUs of the calling thread, which is one of neap's own. Resets its policy
/// and priority. If the system refuses a setting, the thread keeps the inherited one.
pub fn settle(name: &CStr, cpus: &CpuSet) {
    const ORDINARY: usize = 0; // SCHED_OTHER
    const THREAD: usize = 0; // PRIO_PROCESS, which names a thread
    let _ = rustix::thread::set_name(name);
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().filter(|&cpu| cpu < MAX_CPUS.min(rustix::thread::CpuSet::MAX_CPU)).for_each(|cpu| set.set(cpu));
    if set.count() > 0 {
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
    let priority = 0_i32;
    // SAFETY: the kernel reads one `i32`, which lives across the call; thread 0 is the caller.
    let _ = unsafe {
        let priority = (&raw const priority).expose_provenance();
        syscall5(__NR_sched_setscheduler as usize, 0, ORDINARY, priority, 0, 0)
    };
    // SAFETY: the call has no pointers.
    let _ = unsafe { syscall5(__NR_setpriority as usize, THREAD, 0, 0, 0, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::futex;
    use core::sync::atomic::AtomicU32;

    static RAN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn body(_: *mut c_void) -> *mut c_void {
        let mut cpus = CpuSet::EMPTY;
        cpus.insert(crate::thread::allowed().iter().next().unwrap());
        settle(c"neap", &cpus);
        let is_settled = crate::thread::allowed() == cpus && crate::thread::own_name().0.starts_with(b"neap\0");
        RAN.store(if is_settled { 1 } else { 2 }, Ordering::Release); // Pairs with the Acquire load in the test.
        futex::wake(&RAN, 1, futex::Sharing::Process);
        core::ptr::null_mut()
    }

    #[test]
    fn signals_of_the_c_library_and_of_sandboxes_are_not_blocked() {
        let all = signals_of_programs();
        let is_blocked = |signal: i32| all & 1 << (signal - 1) != 0;
        assert!((1..32).chain(libc::SIGRTMIN()..65).all(|signal| is_blocked(signal) == (signal != libc::SIGSYS)));
        assert!(!(32..libc::SIGRTMIN()).any(is_blocked), "{all:#x}");
        let before = set_mask(all);
        assert_eq!(set_mask(before) | 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1), all);
    }

    #[test]
    fn value_of_a_key_is_destroyed_with_its_thread() {
        static FUNCTIONS: Functions = Functions::new();
        extern "C" fn destroyed(value: *mut c_void) {
            // SAFETY: the test's atomic, which outlives its thread.
            unsafe { &*value.cast::<AtomicU32>() }.store(3, Ordering::Relaxed);
        }
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let key = make_key(&FUNCTIONS, destroyed).unwrap();
                set_value(&FUNCTIONS, key, (&raw const word).cast());
            });
            thread.join().unwrap();
        });
        // Relaxed: the thread was joined.
        assert_eq!(word.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_thread_starts_settles_and_is_joined() {
        let functions = Functions::new();
        // SAFETY: the body touches an atomic only.
        let id = unsafe { make(&functions, body, core::ptr::null_mut(), SMALL_STACK, End::Joined) }.unwrap();
        // SAFETY: made above.
        unsafe { join(&functions, id) };
        // Pairs with the Release store in `body`.
        assert_eq!(RAN.load(Ordering::Acquire), 1);
    }
}
