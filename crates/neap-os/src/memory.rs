//! Address space and the memory behind it: `mmap` and its family, as the arena uses them.
//!
//! Most functions make one system call. The module keeps no state. Addresses are numbers, since an
//! arena computes them. Lengths are in bytes. Addresses and lengths are multiples of the page size.
//! Only [`move_pages`] replaces an existing mapping.

use crate::Errno;
use crate::arch;
use crate::syscall::{PROCESS_MADVISE, syscall5};
use core::ffi::c_void;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

/// The maximum number of ranges in one call of [`release_scattered`].
pub const SCATTERED_RANGES: usize = 512;

/// A range of address space, laid out as the kernel's `struct iovec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// Address of the first byte.
    pub start: usize,
    /// Length in bytes.
    pub length: usize,
}

/// The size of a page in bytes: 4096, 16384 or 65536.
pub fn page_size() -> usize {
    // SAFETY: getauxval has no preconditions.
    unsafe { libc::getauxval(libc::AT_PAGESZ) as usize }
}

/// Returns the pointer without the tag that a program may keep in it. On arm64, loads and stores
/// ignore the top byte of an address. On x86-64 they ignore no bit.
#[inline(always)]
pub fn untagged(pointer: *mut u8) -> *mut u8 {
    pointer.map_addr(|address| address & !arch::TAG)
}

fn pointer(address: usize) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(address)
}

/// Maps `length` bytes of zeroes at exactly `address`, without accounting (`MAP_NORESERVE`). With
/// accounting, freed memory that stays mapped could make a `fork` of a large process fail.
///
/// # Errors
/// `EXIST` if the range overlaps a mapping; `NOMEM` at a limit.
pub fn map_at(address: usize, length: usize) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: FIXED_NOREPLACE never replaces a mapping, so no memory in use changes.
    let got =
        unsafe { rustix::mm::mmap_anonymous(pointer(address), length, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
    if got.addr() == address {
        return Ok(());
    }
    // Linux before 4.17 and valgrind treat the address as a hint.
    // SAFETY: the call above made the mapping, and no other code knows its address.
    let _ = unsafe { rustix::mm::munmap(got, length) };
    Err(Errno::EXIST)
}

/// Whether the system's rule for overcommitment would grant a program `length` more bytes. Makes a
/// mapping that is accounted for, and removes it at once.
pub fn is_grantable(length: usize) -> bool {
    // SAFETY: without an address the kernel chooses a free range.
    let got = unsafe {
        rustix::mm::mmap_anonymous(pointer(0), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    // SAFETY: the call above made the mapping, and no other code knows its address.
    got.is_ok_and(|got| unsafe { rustix::mm::munmap(got, length) }.is_ok())
}

/// Maps `length` bytes of zeroes at an address that the kernel chooses, and returns it. In a
/// program that has locked its memory (`mlockall`), the kernel fills pages of a long mapping only
/// when they are touched.
///
/// # Errors
/// `NOMEM` at a limit, `AGAIN` at the limit of locked memory.
pub fn map(length: usize) -> Result<usize, Errno> {
    if length < LONG {
        return map_with(length, ProtFlags::READ | ProtFlags::WRITE);
    }
    let address = reserve(length)?;
    // SAFETY: `reserve` returned this range, as `open` requires. No other code knows its address,
    // so none uses the range when `unmap` removes it.
    unsafe { open(address, length).inspect_err(|_| _ = unmap(address, length))? };
    Ok(address)
}

/// Minimum length in bytes of a long mapping. Such mappings hold tables of which most pages are
/// never used.
const LONG: usize = 16 << 20;

fn map_with(length: usize, rights: ProtFlags) -> Result<usize, Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: without an address the kernel chooses a free range.
    let got = unsafe { rustix::mm::mmap_anonymous(pointer(0), length, rights, flags) }?;
    Ok(got.expose_provenance())
}

/// Reserves `length` bytes of address space without access, and returns its address. Pages that are
/// [`open`]ed later are filled when touched, even in a program that has locked its memory.
///
/// # Errors
/// `NOMEM` at a limit, `AGAIN` at the limit of locked memory.
pub fn reserve(length: usize) -> Result<usize, Errno> {
    let address = map_with(length, ProtFlags::empty())?;
    // SAFETY: the call above made the mapping; it holds no contents and no other code knows its
    // address.
    unsafe {
        // `INVAL` means that the range is locked. It is not filled yet, since it has no access.
        // Locking it again with ONFAULT delays this until a page is touched.
        if rustix::mm::madvise(pointer(address), length, Advice::LinuxDontNeed) == Err(Errno::INVAL) {
            let _ = rustix::mm::mlock_with(pointer(address), length, rustix::mm::MlockFlags::ONFAULT);
        }
    }
    Ok(address)
}

/// Makes a part of a reservation readable and writable. It reads as zeroes. Parts that are already
/// open keep their contents.
///
/// # Errors
/// `NOMEM` at a limit. Some of the range may be open then.
///
/// # Safety
/// The range lies in address space that [`reserve`] returned to the caller.
pub unsafe fn open(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller owns the range, which only gains access rights.
    unsafe { rustix::mm::mprotect(pointer(address), length, MprotectFlags::READ | MprotectFlags::WRITE) }
}

/// Removes the access rights of a part of a reservation. Its contents stay.
///
/// # Errors
/// `NOMEM` at a limit. Some of the range may have lost its access rights then.
///
/// # Safety
/// The range lies in address space that [`reserve`] returned to the caller, and no code accesses it
/// until it is [`open`]ed.
pub unsafe fn seal(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller owns the range, and no code accesses it (the caller's promise).
    unsafe { rustix::mm::mprotect(pointer(address), length, MprotectFlags::empty()) }
}

/// Removes a mapping.
///
/// # Safety
/// No code uses the range any more.
pub unsafe fn unmap(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller promises that no code uses the range any more.
    unsafe { rustix::mm::munmap(pointer(address), length) }
}

/// Releases the memory behind a range, which reads as zeroes afterwards. Releases locked memory
/// (`mlockall`) as well, from Linux 5.18 on.
///
/// # Errors
/// `INVAL` if some of the range is locked and the kernel is older. Pages in front of a locked one
/// may be released.
///
/// # Safety
/// The contents of the range are not needed any more.
pub unsafe fn release(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller promises that the contents are not needed.
    match unsafe { release_unless_locked(address, length) } {
        // SAFETY: the caller promises that the contents are not needed. INVAL means locked pages.
        Err(Errno::INVAL) => unsafe { madvise(address, length, linux_raw_sys::general::MADV_DONTNEED_LOCKED as i32) },
        answer => answer,
    }
}

/// Releases the memory behind a range unless it is locked. The range reads as zeroes after `Ok`.
///
/// # Errors
/// `INVAL` if some of the range is locked. Pages in front of a locked one may be released.
///
/// # Safety
/// The contents of the range are not needed any more.
pub unsafe fn release_unless_locked(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller promises that the contents are not needed.
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxDontNeed) }
}

/// Lets the system take the memory behind a range when the system is short of memory. A page holds
/// its contents until the system takes it, and zeroes afterwards. The system does not take a page
/// that the program writes to after the call. Until the system takes a page, the page counts as
/// resident.
///
/// # Errors
/// `INVAL` if some of the range is locked. The system may take the pages in front of a locked one.
///
/// # Safety
/// The contents of the range are not needed any more.
pub unsafe fn release_lazily(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller promises that the contents are not needed.
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxFree) }
}

/// Calls `madvise` with an advice that rustix has no name for.
///
/// # Safety
/// The caller meets the requirements of the advice.
unsafe fn madvise(address: usize, length: usize, advice: i32) -> Result<(), Errno> {
    let number = linux_raw_sys::general::__NR_madvise as usize;
    // SAFETY: `madvise` accesses no memory of this process by pointer; the caller meets the
    // requirements of the advice.
    unsafe { syscall5(number, address, length, advice as usize, 0, 0) }.map(|_| ())
}

/// Releases many ranges by one call. Returns how many bytes are released, counted from the start of
/// the list.
///
/// # Errors
/// The kernel's error if a sandbox refuses the call, or the kernel is too old. The call needs Linux
/// 5.10. MADV_DONTNEED for the calling process needs 6.13.
///
/// # Safety
/// The contents of the ranges are not needed any more. There are at most [`SCATTERED_RANGES`].
pub unsafe fn release_scattered(ranges: &[Range]) -> Result<usize, Errno> {
    /// `PIDFD_SELF_THREAD_GROUP` of Linux 6.14: this process, without a descriptor.
    const SELF: usize = -10001_isize as usize;
    // SAFETY: the caller promises that the contents are not needed. `Range` is laid out as `struct
    // iovec`, and the pointer and length are those of a slice.
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

/// Releases the memory of a part of a shared file. The part then reads as zeroes in every process.
///
/// # Errors
/// `INVAL` or `ACCESS` if the range is not a mapping of a shared file.
///
/// # Safety
/// No code of this process relies on the contents.
pub unsafe fn release_shared(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: no code relies on the contents (the caller's promise).
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxRemove) }
}

/// Hides a range's contents from forked children. A child reads zeroes there.
///
/// # Errors
/// `INVAL` before Linux 4.14. Children then get the contents.
pub fn keep_from_children(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the advice changes no contents in this process.
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxWipeOnFork) }
}

/// Keeps a range out of core files.
///
/// # Errors
/// `NOMEM` if the range is not mapped.
pub fn keep_from_core_files(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the advice changes no contents.
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxDontDump) }
}

/// Allocates memory for a whole range, as if every page had been written to.
///
/// # Errors
/// `INVAL` before Linux 5.14. `NOMEM`, `FAULT` or `HWPOISON` if the kernel populated only a part of
/// the range.
pub fn populate(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: populating changes no contents.
    unsafe { rustix::mm::madvise(pointer(address), length, Advice::LinuxPopulateWrite) }
}

/// Whether the kernel may back a range with huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// The kernel may use huge pages.
    Allowed,
    /// The kernel may not use huge pages, even if the system's setting is `always`.
    Forbidden,
}

/// Sets whether the kernel may back a range with huge pages.
///
/// # Errors
/// `INVAL` if the kernel was built without huge pages.
pub fn huge_pages(address: usize, length: usize, huge: HugePages) -> Result<(), Errno> {
    let advice = match huge {
        HugePages::Allowed => Advice::LinuxHugepage,
        HugePages::Forbidden => Advice::LinuxNoHugepage,
    };
    // SAFETY: the advice changes no contents.
    unsafe { rustix::mm::madvise(pointer(address), length, advice) }
}

/// Splits the huge page that contains `address`, if there is one, into small pages. Without this,
/// the released parts of a huge page count as free but stay in memory until the kernel is short of
/// it.
///
/// # Errors
/// `INVAL` before Linux 5.4, or for locked memory.
pub fn split(address: usize) -> Result<(), Errno> {
    // SAFETY: the advice changes no contents. It tells the kernel that the program will hardly use
    // the page soon.
    unsafe { madvise(address, page_size(), linux_raw_sys::general::MADV_COLD as i32) }
}

/// Moves the pages of a range to another one of equal length. The old range stays mapped and reads
/// as zeroes.
///
/// # Errors
/// `INVAL` before Linux 5.7; `FAULT` if `from` spans several of the kernel's mappings; `NOMEM` at
/// the limit of mappings. Nothing has moved then, and `to` is mapped as before or not at all.
///
/// # Safety
/// The caller owns both ranges. They lie in mappings of [`map_at`] and do not overlap. No code uses
/// the memory behind `to`.
pub unsafe fn move_pages(from: usize, to: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller promises that it owns the range at `from`.
    if !unsafe { is_one_mapping(from, length) } {
        return Err(Errno::FAULT);
    }
    // Some builds of rustix have no name for this flag.
    let leave_mapped = MremapFlags::from_bits_retain(linux_raw_sys::general::MREMAP_DONTUNMAP);
    let flags = MremapFlags::MAYMOVE | leave_mapped;
    // SAFETY: the caller promises that it owns both ranges, that they do not overlap, and that no
    // code uses the memory behind `to`.
    unsafe { rustix::mm::mremap_fixed(pointer(from), length, length, flags, pointer(to)) }.map(|_| ())
}

/// Whether a range lies in one mapping. Since Linux 6.17 the kernel moves several mappings one
/// after the other. If one move fails, the earlier mappings stay moved. The function asks the
/// kernel to grow the range by more than fits. The kernel first checks that the range is one
/// mapping. If it is not, the kernel returns an error other than `NOMEM`.
///
/// # Safety
/// The caller owns the range.
unsafe fn is_one_mapping(address: usize, length: usize) -> bool {
    /// Longer than any gap between mappings: half of a process's address space.
    const FAR: usize = 1 << 46;
    // SAFETY: the caller owns the range. Without MAYMOVE a mapping grows in place, into free
    // addresses only. No code uses the grown part before `unmap` removes it.
    unsafe {
        match rustix::mm::mremap(pointer(address), length, length + FAR, MremapFlags::empty()) {
            Err(error) => error == Errno::NOMEM,
            Ok(_) => unmap(address + length, FAR).is_ok(),
        }
    }
}

/// The maximum address space of this process in bytes: the lower of `RLIMIT_AS`, which counts all
/// mappings, and `RLIMIT_DATA`, which counts writable ones. Untouched address space counts. `None`
/// if neither limit is set.
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

    /// The limit is too large to disturb other tests.
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
        // Far from where the kernel places mappings without a place, such as those of other tests.
        const PLACE: usize = 0x1234_5678 << 16;
        for _ in 0..2 {
            assert_eq!(map_at(PLACE, LENGTH), Ok(()));
            assert_eq!(map_at(PLACE, LENGTH), Err(Errno::EXIST));
            // SAFETY: mapped above, and used by no other code.
            unsafe { unmap(PLACE, LENGTH) }.unwrap();
        }
    }

    #[test]
    fn released_memory_reads_as_zeroes() {
        let here = map(LENGTH).unwrap();
        // SAFETY: every access lies in the mapping made above, and within its rights.
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
        let _ = huge_pages(huge, HUGE, HugePages::Allowed);
        // SAFETY: every access lies in the mapping made above.
        unsafe {
            (0..HUGE).step_by(64).for_each(|at| byte(huge + at).write((at >> 6) as u8 | 1));
            split(huge + 8 * page_size()).unwrap();
            assert!((0..HUGE).step_by(64).all(|at| byte(huge + at).read() == (at >> 6) as u8 | 1));
            unmap(here, 2 * HUGE).unwrap();
        }
    }

    /// From 6.17 on the kernel would move one mapping after the other, and stop in between if one
    /// fails.
    #[test]
    fn what_is_several_mappings_is_not_moved() {
        let [from, to] = [(); 2].map(|()| map(LENGTH).unwrap());
        // SAFETY: every access lies in the mappings made above.
        unsafe {
            byte(from + LENGTH / 2).write(7);
            // A different advice splits the mapping.
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
