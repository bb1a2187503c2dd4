//! Areas of neap's own, for C libraries that register no thread: musl, and glibc before 2.35.
//!
//! # Design
//!
//! 1. Each thread has an area behind neap's thread-local words, at a constant distance from the
//!    thread pointer. Until the area is registered, its second word says that the thread has no
//!    CPU. So the thread's sequences refuse.
//! 2. A thread registers its area at its first slow path. It asks the kernel only once. If another
//!    library has registered another area for the thread, the kernel refuses, and the thread stays
//!    without a CPU.
//! 3. glibc frees the memory of a thread after the kernel has ended the thread. musl does so for
//!    threads that are joined. In both cases the kernel no longer writes to the area.
//! 4. A detached thread of musl unmaps its own memory before it ends. So in musl a thread that
//!    registers also sets a value of a key (`pthread_setspecific`). At the thread's end, musl calls
//!    the key's destructor, which unregisters the area. A thread that is ending must not register
//!    again. Its cancellation is disabled, since musl disables it before it calls destructors.
//!
//! # Concurrency
//!
//! The functions take no lock and never retry. A signal handler may interrupt each step and
//! allocate. Therefore a thread calls `set_asked` before it asks the kernel. Signal handlers and
//! destructors that allocate later then do not ask again.

use super::{cpu_at, registered_offset};
use crate::arch::SIGNATURE;
use crate::syscall::syscall5;
use crate::thread_state::{has_asked, own_area, set_asked};
use core::ffi::{c_int, c_void};
use core::ptr::{null_mut, without_provenance};

/// Length of an area in bytes, as in the first kernels with rseq.
pub(super) const LENGTH: usize = 32;

/// Flag of the system call that unregisters.
pub(super) const UNREGISTER: usize = 1;

type MakeKey = unsafe extern "C" fn(*mut u32, extern "C" fn(*mut c_void)) -> c_int;
type SetValue = unsafe extern "C" fn(u32, *const c_void) -> c_int;
type SetCancel = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;

/// Registers threads for which the C library has no area.
#[derive(Clone, Copy, Debug)]
pub struct OwnAreas {
    offset: isize,
    /// Unregisters a thread's area at its end. `None` if the C library frees a thread's memory only
    /// after the kernel has ended the thread.
    end: Option<ThreadEnd>,
}

/// A key whose destructor musl calls at the end of a thread, and functions of musl.
#[derive(Clone, Copy, Debug)]
struct ThreadEnd {
    key: u32,
    set_value: SetValue,
    set_cancel: SetCancel,
}

impl OwnAreas {
    /// Registers the calling thread. Returns a value by which other threads register. `None` if the
    /// C library has its own areas, even if it does not use them. `None` also if the kernel
    /// refuses, or another library has registered the thread.
    #[inline(never)]
    pub fn open() -> Option<OwnAreas> {
        if crate::weak_variable!("__rseq_offset", address) != 0 || registered_offset().is_some() {
            return None;
        }
        let end = if is_musl() { Some(ThreadEnd::find()?) } else { None };
        let areas = OwnAreas { offset: own_area(), end };
        areas.register();
        cpu_at(areas.offset).is_some().then_some(areas)
    }

    /// Distance of the areas from the thread pointer.
    pub fn offset(&self) -> isize {
        self.offset
    }

    /// Registers the calling thread. Returns its CPU; `None` if it is not registered.
    #[cold]
    pub fn register_for_cpu(&self) -> Option<usize> {
        self.register();
        cpu_at(self.offset)
    }

    /// Registers the calling thread, unless it has asked before, or is ending.
    #[cold]
    #[inline(never)]
    fn register(&self) {
        if has_asked() || self.end.is_some_and(|end| end.has_begun()) {
            return;
        }
        set_asked(true);
        if self.end.is_none_or(|end| end.notice()) {
            call(self.offset, 0);
        }
    }
}

impl ThreadEnd {
    /// Makes the key; `None` if a function or a free key is missing.
    fn find() -> Option<ThreadEnd> {
        let (make_key, set_value, set_cancel) = functions()?;
        let mut key = 0;
        // SAFETY: the key is writable, and the destructor may be called with any value.
        let answer = unsafe { make_key(&raw mut key, ended) };
        (answer == 0).then_some(ThreadEnd { key, set_value, set_cancel })
    }

    /// Whether the calling thread may be ending, which is so if its cancellation is disabled.
    fn has_begun(&self) -> bool {
        const ENABLED: c_int = 0;
        const DISABLED: c_int = 1;
        let mut before = DISABLED;
        // SAFETY: musl's function changes only the state of the calling thread, which the second
        // call restores. `before` is writable, and musl accepts a null pointer.
        unsafe {
            (self.set_cancel)(DISABLED, &raw mut before);
            (self.set_cancel)(before, null_mut());
        }
        before != ENABLED
    }

    /// Sets a value of the key, so that musl calls the destructor at the end of this thread.
    /// Returns `false` if musl refuses.
    fn notice(&self) -> bool {
        // SAFETY: the key exists. Its value is not null, and nothing reads it.
        unsafe { (self.set_value)(self.key, without_provenance(1)) == 0 }
    }
}

/// Ends the registration, before the thread's memory may be unmapped.
extern "C" fn ended(_: *mut c_void) {
    // A signal handler must not register the area again.
    set_asked(true);
    if cpu_at(own_area()).is_some() {
        call(own_area(), UNREGISTER);
    }
}

/// Registers or unregisters the calling thread's area. The kernel may refuse.
fn call(offset: isize, flag: usize) {
    let area = crate::thread::pointer().wrapping_add_signed(offset);
    let number = linux_raw_sys::general::__NR_rseq as usize;
    // SAFETY: the kernel writes to the area, which belongs to this thread. With musl it lives until
    // the thread has called `ended`, otherwise for longer than the thread.
    let _ = unsafe { syscall5(number, area, LENGTH, flag, SIGNATURE, 0) };
}

/// Whether the C library is not glibc.
fn is_musl() -> bool {
    cfg!(target_env = "musl") || crate::weak_variable!("gnu_get_libc_version", address) == 0
}

/// musl's functions. This variant refers to them by name, since a static program contains only
/// functions that it refers to.
#[cfg(all(target_env = "musl", target_feature = "crt-static"))]
fn functions() -> Option<(MakeKey, SetValue, SetCancel)> {
    unsafe extern "C" {
        fn pthread_key_create(key: *mut u32, destructor: extern "C" fn(*mut c_void)) -> c_int;
        fn pthread_setspecific(key: u32, value: *const c_void) -> c_int;
        fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    }
    Some((pthread_key_create, pthread_setspecific, pthread_setcancelstate))
}

/// The C library's functions, if it has them all.
#[cfg(not(all(target_env = "musl", target_feature = "crt-static")))]
fn functions() -> Option<(MakeKey, SetValue, SetCancel)> {
    use core::mem::transmute;
    let make_key = crate::weak_variable!("pthread_key_create", address);
    let set_value = crate::weak_variable!("pthread_setspecific", address);
    let set_cancel = crate::weak_variable!("pthread_setcancelstate", address);
    if make_key == 0 || set_value == 0 || set_cancel == 0 {
        return None;
    }
    // SAFETY: the addresses are those of three functions of POSIX, which have these types.
    Some(unsafe {
        (
            transmute::<usize, MakeKey>(make_key),
            transmute::<usize, SetValue>(set_value),
            transmute::<usize, SetCancel>(set_cancel),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rseq::may_register;
    use std::thread;

    #[test]
    fn threads_get_areas_where_the_c_library_has_none() {
        let areas = thread::spawn(OwnAreas::open).join().unwrap();
        let lacks = crate::weak_variable!("__rseq_offset", address) == 0;
        assert_eq!(areas.is_some(), lacks && may_register());
        let Some(areas) = areas else { return };
        thread::spawn(move || {
            assert_eq!(cpu_at(areas.offset()), None);
            assert!(areas.register_for_cpu().is_some() && cpu_at(areas.offset()).is_some());
            ended(null_mut());
            assert_eq!(areas.register_for_cpu(), None, "it has ended");
        })
        .join()
        .unwrap();
    }
}
