//! Address space and the memory behind it.
//!
//! Sits between `mmap` and its family and the arena. Every function is one system call (`release_scattered`: one per
//! [`SCATTERED_RANGES`] ranges), keeps nothing, and takes addresses, since an arena computes them. Lengths and addresses
//! are bytes and multiples of the page size. Never maps over something that is there.

use crate::Errno;
use crate::environment::read_file;
use crate::syscall::{PROCESS_MADVISE, syscall5};
use core::ffi::c_void;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

/// The most ranges that one call of [`release_scattered`] hands to the kernel.
pub const SCATTERED_RANGES: usize = 512;

/// A piece of address space, laid out as the kernel's `struct iovec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// Address of the first byte.
    pub start: usize,
    /// Bytes.
    pub length: usize,
}

/// The size of a page in bytes: 4096, 16384 or 65536.
pub fn page_size() -> usize {
    // SAFETY: getauxval has no preconditions.
    unsafe { libc::getauxval(libc::AT_PAGESZ) as usize }
}

fn pointer(address: usize) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(address)
}

/// Maps `length` bytes of zeroes at exactly `address`, as address space that is not accounted for: what is accounted for
/// and freed but still mapped would keep a large process from forking.
///
/// # Errors
/// `EXIST` where something is mapped there already; `NOMEM` at a limit.
pub fn map_at(address: usize, length: usize) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: FIXED_NOREPLACE never replaces a mapping, so no memory in use changes.
    let got =
        unsafe { rustix::mm::mmap_anonymous(pointer(address), length, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
    if got.addr() == address {
        return Ok(());
    }
    // A kernel before 4.17, or valgrind, took the address for a hint.
    // SAFETY: the mapping was made by the call above and nobody knows of it.
    let _ = unsafe { rustix::mm::munmap(got, length) };
    Err(Errno::EXIST)
}

/// Whether the system would let a program use `length` bytes more: by its own rule for overcommitment, which refuses what
/// could never be filled. Asks by a mapping that is accounted for and goes away at once.
pub fn is_grantable(length: usize) -> bool {
    // SAFETY: without an address the kernel chooses one that is free.
    let got = unsafe {
        rustix::mm::mmap_anonymous(pointer(0), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    // SAFETY: made a moment ago, used by nobody.
    got.is_ok_and(|got| unsafe { rustix::mm::munmap(got, length) }.is_ok())
}

/// Maps `length` bytes of zeroes wherever the kernel likes, and answers where. Of a long mapping a program that has locked its memory
/// before (`mlockall`) has what was touched, and not all at once.
///
/// # Errors
/// `NOMEM` at a limit, `AGAIN` at that of locked memory.
pub fn map(length: usize) -> Result<usize, Errno> {
    if length < LONG {
        return map_with(length, ProtFlags::READ | ProtFlags::WRITE);
    }
    let address = reserve(length)?;
    // SAFETY: the mapping was made by the call above, and nobody knows of it.
    unsafe { open(address, length).inspect_err(|_| _ = unmap(address, length))? };
    Ok(address)
}

/// From this length on a mapping is tables of which most may never be used.
const LONG: usize = 16 << 20;

fn map_with(length: usize, rights: ProtFlags) -> Result<usize, Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: without an address the kernel chooses one that is free.
    let got = unsafe { rustix::mm::mmap_anonymous(pointer(0), length, rights, flags) }?;
    Ok(got.expose_provenance())
}

/// Keeps `length` bytes of address space free of other mappings, without access, and answers where. What is [`open`]ed of it comes by touch, also to a
/// program that has locked its memory before.
///
/// # Errors
/// `NOMEM` at a limit, `AGAIN` at that of locked memory.
pub fn reserve(length: usize) -> Result<usize, Errno> {
    let address = map_with(length, ProtFlags::empty())?;
    // SAFETY: the mapping was made by the call above, and nobody knows of it.
    unsafe {
        // Memory that is locked is not given back by this call. What may not be touched is not filled, nor is what is locked by touch.
        if rustix::mm::madvise(pointer(address), length, Advice::LinuxDontNeed) == Err(Errno::INVAL) {
            let _ = rustix::mm::mlock_with(pointer(address), length, rustix::mm::MlockFlags::ONFAULT);
        }
    }
    Ok(address)
}

/// Gives a part of a reservation its zeroes: readable and writable from now on. What is so already stays as it is.
///
/// # Errors
/// `NOMEM` at a limit; some of it may be open then.
///
/// # Safety
/// The range lies in a [`reserve`]d piece of the caller's.
pub unsafe fn open(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller owns the range; it only gains rights.
    unsafe { rustix::mm::mprotect(pointer(address), length, MprotectFlags::READ | MprotectFlags::WRITE) }
}

/// Takes a mapping away.
///
/// # Safety
/// Nobody uses the range any more.
pub unsafe fn unmap(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: as the caller promises.
    unsafe { rustix::mm::munmap(pointer(address), length) }
}

/// Gives the memory behind a range back; it reads as zeroes afterwards. Locked memory (`mlockall`) is given back as well,
/// where the kernel knows how (5.18); elsewhere that is an error and nothing changed.
///
/// # Safety
/// The contents of the range are no longer needed.
pub unsafe fn release(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: as the caller promises.
    match unsafe { release_unless_locked(address, length) } {
        // SAFETY: as the caller promises; EINVAL is the answer for locked pages.
        Err(Errno::INVAL) => unsafe { madvise(address, length, linux_raw_sys::general::MADV_DONTNEED_LOCKED as i32) },
        answer => answer,
    }
}

/// Gives the memory behind a range back, but no memory that is locked; the range reads as zeroes afterwards.
///
/// # Errors
/// `INVAL` where some of the range is locked; parts in front of that may be gone.
///
/// # Safety
/// The contents of the range are no longer needed.
pub unsafe fn release_unless_locked(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: as the caller promises.
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxDontNeed) }
}

/// Lets the system take the memory behind a range when it is short of any. Until then every page
/// holds what it held, and zeroes afterwards; what is written from now on stays. The range counts
/// as resident as long as the system has not taken it.
///
/// # Errors
/// `INVAL` where some of the range is locked.
///
/// # Safety
/// The contents of the range are no longer needed.
pub unsafe fn release_lazily(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: as the caller promises.
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxFree) }
}

/// `madvise` with an advice that rustix has no name for.
///
/// # Safety
/// Whatever the advice asks.
unsafe fn madvise(address: usize, length: usize, advice: i32) -> Result<(), Errno> {
    let number = linux_raw_sys::general::__NR_madvise as usize;
    // SAFETY: as the caller promises.
    unsafe { syscall5(number, address, length, advice as usize, 0, 0) }.map(|_| ())
}

/// Gives many ranges back by one call, and answers how many bytes from the start of the list are done.
///
/// # Errors
/// Where the kernel (before 5.10 for this, 6.13 for MADV_DONTNEED on oneself) or a sandbox refuses.
///
/// # Safety
/// Nobody needs the contents of the ranges; at most [`SCATTERED_RANGES`] of them.
pub unsafe fn release_scattered(ranges: &[Range]) -> Result<usize, Errno> {
    /// `PIDFD_SELF_THREAD_GROUP` of 6.14: this process, without opening a descriptor.
    const SELF: usize = -10001_isize as usize;
    // SAFETY: as the caller promises; `Range` is laid out as `struct iovec`.
    unsafe {
        syscall5(
            PROCESS_MADVISE,
            SELF,
            ranges.as_ptr().expose_provenance(),
            ranges.len(),
            linux_raw_sys::general::MADV_DONTNEED as usize,
            0,
        )
    }
}

/// Keeps what is in a range from children: a forked one, however it is forked, finds zeroes there.
///
/// # Errors
/// `INVAL` before 4.14.
pub fn keep_from_children(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: nothing changes in this process.
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxWipeOnFork) }
}

/// Puts memory behind a whole range at once, as if every page had been written to.
///
/// # Errors
/// `INVAL` before 5.14; `NOMEM`, `FAULT` or `HWPOISON` with an unknown part of the range done.
pub fn populate(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: populating changes no contents.
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxPopulateWrite) }
}

/// Whether the kernel may put huge pages behind a range.
///
/// # Errors
/// `INVAL` where the kernel was built without them.
pub fn huge_pages(address: usize, length: usize, allowed: bool) -> Result<(), Errno> {
    let advice = if allowed { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
    // SAFETY: the advice changes no contents.
    unsafe { rustix::mm::madvise(pointer(address), length, advice) }
}

/// Whether the system gives huge pages to everybody who does not refuse them (`always`), and not to who asks, or to nobody.
pub fn gives_huge_pages() -> bool {
    let mut text = [0; 16];
    read_file(c"/sys/kernel/mm/transparent_hugepage/enabled", &mut text).is_ok_and(|text| text.starts_with(b"[always]"))
}

/// Makes small pages of the huge page that a small one is part of, if it is; a page whose contents are not needed any more.
/// Parts of a huge page that are given back are otherwise counted as free and stay where they are, until the kernel is
/// short of memory.
///
/// # Errors
/// `INVAL` before 5.4, or for locked memory.
pub fn split(address: usize) -> Result<(), Errno> {
    // SAFETY: the advice changes no contents: it says that a part of a page is not likely to be used.
    unsafe { madvise(address, page_size(), linux_raw_sys::general::MADV_COLD as i32) }
}

/// Moves the pages of one range to another of the same length; the old range stays mapped and reads as zeroes.
///
/// # Errors
/// `INVAL` before 5.7; `FAULT` where `from` is several mappings, as the kernel counts them; `NOMEM` at the limit of mappings. Nothing has moved then, and
/// `to` is mapped as it was or not at all.
///
/// # Safety
/// Both ranges are the caller's, lie in mappings of [`map_at`], do not overlap, and nobody uses what is behind `to`.
pub unsafe fn move_pages(from: usize, to: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: as the caller promises.
    if !unsafe { is_one_mapping(from, length) } {
        return Err(Errno::FAULT);
    }
    // Not all builds of rustix have a name for it.
    let leave_mapped = MremapFlags::from_bits_retain(linux_raw_sys::general::MREMAP_DONTUNMAP);
    let flags = MremapFlags::MAYMOVE | leave_mapped;
    // SAFETY: as the caller promises.
    unsafe { rustix::mm::mremap_fixed(pointer(from), length, length, flags, pointer(to)) }.map(|_| ())
}

/// Whether a range lies in one mapping. Since 6.17 the kernel moves several one after the other, and where a later one fails the earlier have gone. Nothing
/// says so but an attempt to grow where there is no room: the kernel looks first whether it is one that is to grow.
///
/// # Safety
/// The range is the caller's.
unsafe fn is_one_mapping(address: usize, length: usize) -> bool {
    /// More than there is between any address and the next that is taken: half of what a process can have.
    const FAR: usize = 1 << 46;
    // SAFETY: a mapping that grows takes only what nobody has, and is cut back.
    unsafe {
        match rustix::mm::mremap(pointer(address), length, length + FAR, MremapFlags::empty()) {
            Err(error) => error == Errno::NOMEM,
            Ok(_) => unmap(address + length, FAR).is_ok(),
        }
    }
}

/// The most address space this process may have in bytes, all of it (`RLIMIT_AS`) or such as it may write to (`RLIMIT_DATA`), touched or not; `None`
/// without such a limit.
pub fn address_space_limit() -> Option<u64> {
    [Resource::As, Resource::Data].into_iter().filter_map(|resource| getrlimit(resource).current).min()
}

/// Whether the system refuses address space that it could not fill (`vm.overcommit_memory` = 2).
pub fn overcommit_refused() -> bool {
    let mut text = [0; 8];
    crate::environment::read_file(c"/proc/sys/vm/overcommit_memory", &mut text)
        .is_ok_and(|text| text.first() == Some(&b'2'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::Rlimit;

    /// So large a limit stands in nobody's way.
    #[test]
    fn a_limit_of_data_is_one_of_address_space() {
        const DATA: u64 = 1 << 46;
        let before = getrlimit(Resource::Data);
        if before.current.is_some() || address_space_limit().is_some() {
            return;
        }
        rustix::process::setrlimit(Resource::Data, Rlimit { current: Some(DATA), ..before }).unwrap();
        assert_eq!(address_space_limit(), Some(DATA));
        rustix::process::setrlimit(Resource::Data, before).unwrap();
    }

    const LENGTH: usize = 1 << 20;

    fn byte(address: usize) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(address)
    }

    #[test]
    fn map_at_refuses_a_place_that_is_taken() {
        let here = map(LENGTH).unwrap();
        assert_eq!(map_at(here, LENGTH), Err(Errno::EXIST));
        // SAFETY: mapped above, used by nobody else.
        unsafe { unmap(here, LENGTH) }.unwrap();
        assert_eq!(map_at(here, LENGTH), Ok(()));
        // SAFETY: mapped above, used by nobody else.
        unsafe { unmap(here, LENGTH) }.unwrap();
    }

    #[test]
    fn released_memory_reads_as_zeroes() {
        let here = map(LENGTH).unwrap();
        // SAFETY: every access lies in the mapping made above.
        unsafe {
            byte(here).write(7);
            byte(here + LENGTH - 1).write(7);
            release(here, LENGTH).unwrap();
            assert_eq!((byte(here).read(), byte(here + LENGTH - 1).read()), (0, 0));
            unmap(here, LENGTH).unwrap();
        }
    }

    #[test]
    fn scattered_ranges_go_together_where_the_kernel_can() {
        let (here, page) = (map(LENGTH).unwrap(), page_size());
        let ranges = [Range { start: here, length: page }, Range { start: here + 4 * page, length: page }];
        // SAFETY: every access lies in the mapping made above.
        unsafe {
            for page_number in 0..8 {
                byte(here + page_number * page).write(7);
            }
            if let Ok(done) = release_scattered(&ranges) {
                assert_eq!(done, 2 * page);
                let left: std::vec::Vec<u8> = (0..8).map(|n| byte(here + n * page).read()).collect();
                assert_eq!(left, [0, 7, 7, 7, 0, 7, 7, 7]);
            }
            unmap(here, LENGTH).unwrap();
        }
    }

    #[test]
    fn a_huge_page_that_is_made_small_pages_keeps_what_is_in_it() {
        const HUGE: usize = 2 << 20;
        let here = map(2 * HUGE).unwrap();
        let huge = here.next_multiple_of(HUGE);
        let _ = huge_pages(huge, HUGE, true);
        // SAFETY: every access lies in the mapping made above.
        unsafe {
            (0..HUGE).step_by(64).for_each(|at| byte(huge + at).write((at >> 6) as u8 | 1));
            split(huge + 8 * page_size()).unwrap();
            assert!((0..HUGE).step_by(64).all(|at| byte(huge + at).read() == (at >> 6) as u8 | 1));
            unmap(here, 2 * HUGE).unwrap();
        }
    }

    /// Since 6.17 the kernel would, and leave half of it where a later one fails.
    #[test]
    fn what_is_several_mappings_is_not_moved() {
        let [from, to] = [(); 2].map(|()| map(LENGTH).unwrap());
        // SAFETY: every access lies in the mappings made above.
        unsafe {
            byte(from + LENGTH / 2).write(7);
            // Another advice makes another mapping.
            keep_from_children(from, LENGTH / 2).unwrap();
            assert_eq!(move_pages(from, to, LENGTH), Err(Errno::FAULT));
            assert_eq!((byte(from + LENGTH / 2).read(), byte(to + LENGTH / 2).read()), (7, 0));
            assert_eq!(move_pages(from + LENGTH / 2, to, LENGTH / 2), Ok(()));
            assert_eq!((byte(from + LENGTH / 2).read(), byte(to).read()), (0, 7));
            [from, to].into_iter().for_each(|range| unmap(range, LENGTH).unwrap());
        }
    }

    #[test]
    fn moved_pages_leave_zeroes_behind() {
        let (from, to) = (map(LENGTH).unwrap(), map(LENGTH).unwrap());
        // SAFETY: every access lies in the mappings made above.
        unsafe {
            byte(from + 5).write(9);
            if move_pages(from, to, LENGTH).is_ok() {
                assert_eq!((byte(from + 5).read(), byte(to + 5).read()), (0, 9));
            }
            unmap(from, LENGTH).unwrap();
            unmap(to, LENGTH).unwrap();
        }
    }
}
