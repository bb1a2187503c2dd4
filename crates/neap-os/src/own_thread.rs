//! Creates, joins and configures neap's own threads.
//!
//! # Design
//!
//! 1. The C library's own functions create and join them. They are looked up in that library, so a
//!    function of the program, a profiler or a preloaded library with their names is never called.
//! 2. The C library knows the threads. Its set*id functions change their user, too, and a process
//!    does not end before they do. Therefore [`join`] belongs to the end of the main thread.
//! 3. They start with every signal blocked except those of the C library. No handler of the program
//!    runs on them.
//! 4. [`settle`] resets the inherited policy, CPUs and priority.
//!
//! # Locking
//!
//! No lock of its own. `Functions::find` takes the dynamic linker's lock, and [`make`] allocates.
//! Neither is called from within a call that allocates or frees.

use crate::Errno;
use crate::syscall::syscall5;
use crate::topology::{CpuSet, MAX_CPUS};
use core::ffi::{CStr, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicUsize, Ordering};
use linux_raw_sys::general::{__NR_sched_setscheduler, __NR_setpriority};

/// Function that a thread runs.
pub type Body = extern "C" fn(*mut c_void) -> *mut c_void;

/// A thread, as the C library names it.
pub type Id = libc::pthread_t;

type Create = unsafe extern "C" fn(*mut Id, *const libc::pthread_attr_t, Body, *mut c_void) -> i32;
type Join = unsafe extern "C" fn(Id, *mut *mut c_void) -> i32;

/// Addresses of the C library's `pthread_create` and `pthread_join`; 0 before they are found.
#[derive(Debug)]
pub struct Functions {
    create: AtomicUsize,
    join: AtomicUsize,
}

impl Functions {
    /// Creates the table; the functions are looked up when first needed.
    pub const fn new() -> Functions {
        Functions { create: AtomicUsize::new(0), join: AtomicUsize::new(0) }
    }

    /// Finds both functions. Later calls use the found addresses.
    ///
    /// # Errors
    /// `NOSYS` if there is no dynamic linker that knows the functions.
    fn find(&self) -> Result<(Create, Join), Errno> {
        // Relaxed: the values are addresses of code, which exists already.
        let find = |known: &AtomicUsize, look: fn() -> usize| match known.load(Ordering::Relaxed) {
            0 => {
                let found = look();
                known.store(found, Ordering::Relaxed);
                found
            }
            found => found,
        };
        let (create, join) = (find(&self.create, look_up::create), find(&self.join, look_up::join));
        if create == 0 || join == 0 {
            return Err(Errno::NOSYS);
        }
        // SAFETY: POSIX gives the functions of these names these types.
        Ok(unsafe { (core::mem::transmute::<usize, Create>(create), core::mem::transmute::<usize, Join>(join)) })
    }
}

impl Default for Functions {
    fn default() -> Self {
        Functions::new()
    }
}

#[cfg(not(target_feature = "crt-static"))]
mod look_up {
    use core::arch::global_asm;
    use core::ffi::{CStr, c_char, c_int, c_void};
    use core::mem::transmute;
    use core::ptr::{null_mut, without_provenance_mut};

    // Weak: the C library has it from 2.34 on.
    global_asm!(".weak dlsym");

    pub(super) fn create() -> usize {
        function(c"pthread_create")
    }

    pub(super) fn join() -> usize {
        function(c"pthread_join")
    }

    /// The address of a function of the C library, or of the next library that has one if the C
    /// library has another name; 0 if there is none.
    fn function(name: &CStr) -> usize {
        const LAZY_IF_LOADED: c_int = 1 | 4; // RTLD_LAZY | RTLD_NOLOAD
        const NEXT: *mut c_void = without_provenance_mut(usize::MAX); // RTLD_NEXT
        let find = crate::weak_variable!("dlsym", address);
        if find == 0 {
            return 0;
        }
        // SAFETY: the dynamic linker's function of this name has this type; RTLD_NEXT stands for a
        // handle.
        let find = unsafe { transmute::<usize, extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>(find) };
        // RTLD_NEXT, since the preload library has a `dlopen` of its own.
        let open = find(NEXT, c"dlopen".as_ptr());
        let library = if open.is_null() {
            null_mut()
        } else {
            // SAFETY: the dynamic linker's function of this name has this type.
            let open = unsafe { transmute::<*mut c_void, extern "C" fn(*const c_char, c_int) -> *mut c_void>(open) };
            open(c"libc.so.6".as_ptr(), LAZY_IF_LOADED)
        };
        let found = if library.is_null() { null_mut() } else { find(library, name.as_ptr()) };
        let found = if found.is_null() { find(NEXT, name.as_ptr()) } else { found };
        found.expose_provenance()
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
}

unsafe extern "C" {
    fn pthread_sigmask(how: i32, set: *const libc::sigset_t, old: *mut libc::sigset_t) -> i32;
    fn __errno_location() -> *mut i32;
    fn pthread_attr_init(attributes: *mut libc::pthread_attr_t) -> i32;
    fn pthread_attr_setdetachstate(attributes: *mut libc::pthread_attr_t, state: i32) -> i32;
    fn pthread_attr_setstacksize(attributes: *mut libc::pthread_attr_t, bytes: usize) -> i32;
    fn pthread_attr_destroy(attributes: *mut libc::pthread_attr_t) -> i32;
}

/// Bytes of a stack for the deepest call of neap's thread and the C library's own needs. The ranges
/// of a scattered release take 8 KiB. Thread-local storage of every loaded library lies on the
/// stack.
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

/// Creates a thread with every signal blocked, on a stack of `stack` bytes. The stack is larger if
/// the program's thread-local variables do not fit.
///
/// # Errors
/// The error of `pthread_create`: `AGAIN` at a limit of threads, `PERM`. `NOSYS` if this thread is
/// registered for rseq, but the kernel no longer lets threads register: the C library would end the
/// process.
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
    const SETMASK: i32 = 2;
    const DETACHED: i32 = 1;
    const INVAL: i32 = Errno::INVAL.raw_os_error();
    let (create, _) = functions.find()?;
    if crate::rseq::is_registered() && !crate::rseq::may_register() {
        return Err(Errno::NOSYS);
    }
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut old = MaybeUninit::<libc::sigset_t>::uninit();
    // A new thread inherits the mask. The C library removes its own signals from it.
    // SAFETY: a set with every bit is valid (the kernel ignores KILL and STOP).
    let all: libc::sigset_t = unsafe { core::mem::transmute([0xff_u8; size_of::<libc::sigset_t>()]) };
    let mut id = MaybeUninit::<Id>::uninit();
    // SAFETY: the attributes are initialised before use and destroyed after; the masks are valid
    // for the calls.
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
        pthread_sigmask(SETMASK, &raw const all, old.as_mut_ptr());
        let mut answer = INVAL;
        for bytes in [stack, stack.max(ORDINARY_STACK), LARGE_STACK] {
            if answer == INVAL {
                pthread_attr_setstacksize(attributes.as_mut_ptr(), bytes);
                answer = create(id.as_mut_ptr(), attributes.as_ptr(), body, argument);
            }
        }
        pthread_sigmask(SETMASK, old.as_ptr(), core::ptr::null_mut());
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

/// Waits until a thread has ended, also in the C library's count of threads.
///
/// # Safety
/// [`make`] created the thread `id` in this process as [`End::Joined`], and it was not joined yet.
pub unsafe fn join(functions: &Functions, id: Id) {
    let Ok((_, join)) = functions.find() else { return };
    // SAFETY: the caller promises a joinable thread of this process that was not joined. A null
    // pointer discards the thread's result.
    unsafe { join(id, core::ptr::null_mut()) };
}

/// Sets the name and the CPUs of the calling thread, one of neap's own, and resets its policy and
/// priority. Settings that the system refuses stay as inherited.
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
