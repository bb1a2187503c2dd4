//! Finds the kernel's function that returns the time without a system call.
//!
//! The kernel maps a small shared object, the vDSO, into every process, and passes the object's
//! address to the process at its start. This module finds the object's `clock_gettime`, whose name
//! depends on the processor. It does not use the C library's `clock_gettime`: a program may define
//! its own, which may allocate. valgrind hides the object. Then this module finds no function.
//!
//! # Invariants
//!
//! The object is the kernel's, stays mapped at its address, and is a valid shared object of this
//! machine's word size.

use core::ffi::CStr;
use core::mem::size_of;

/// Type of the vDSO's `clock_gettime`, which returns 0 or an error.
pub(crate) type ClockGettime = unsafe extern "C" fn(i32, *mut [u64; 2]) -> i32;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_NULL: usize = 0;
const DT_HASH: usize = 4;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_GNU_HASH: usize = 0x6fff_fef5;

/// A 64-bit shared object in memory.
#[derive(Clone, Copy)]
struct SharedObject(usize);

/// A symbol, with the fields in their order in the file.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

/// A mapped object.
struct Loaded {
    /// The distance from addresses in the file to those in memory.
    base: usize,
    /// The address of the dynamic section.
    dynamic: usize,
}

impl SharedObject {
    /// Reads a number at an address in the object.
    ///
    /// # Safety
    /// There is a `T` at the address.
    unsafe fn read<T: Copy>(at: usize) -> T {
        // SAFETY: the caller promises a `T` at the address; an unaligned read has no other
        // requirement.
        unsafe { core::ptr::with_exposed_provenance::<T>(at).read_unaligned() }
    }

    /// Returns where the object's parts are in memory.
    ///
    /// # Safety
    /// A valid object is mapped at the address.
    unsafe fn loaded(self) -> Option<Loaded> {
        // SAFETY: the caller promises a valid object. Its header has these fields: the offset of
        // the program headers at 32, their length at 54, their number at 56. A program header
        // begins with its kind; its offset in the file is at 8, and its address at 16.
        unsafe {
            let (first, length, count) = (
                SharedObject::read::<usize>(self.0 + 32),
                SharedObject::read::<u16>(self.0 + 54),
                SharedObject::read::<u16>(self.0 + 56),
            );
            let (mut base, mut dynamic) = (None, None);
            for header in (0..usize::from(count)).map(|number| self.0 + first + number * usize::from(length)) {
                let (offset, address) =
                    (SharedObject::read::<usize>(header + 8), SharedObject::read::<usize>(header + 16));
                match SharedObject::read::<u32>(header) {
                    PT_LOAD if base.is_none() => base = Some((self.0 + offset).wrapping_sub(address)),
                    PT_DYNAMIC => dynamic = Some(self.0 + offset),
                    _ => {}
                }
            }
            Some(Loaded { base: base?, dynamic: dynamic? })
        }
    }

    /// The address of a function; `None` if no function has that name.
    ///
    /// # Safety
    /// A valid object is mapped at the address, and stays mapped.
    unsafe fn function(self, name: &CStr) -> Option<usize> {
        // SAFETY: the caller promises a valid object that stays mapped. Its dynamic section is
        // pairs of a tag and an address, up to an empty tag. The tables that it names are mapped,
        // and its names are C strings. `DT_GNU_HASH` holds the address of a GNU hash table.
        unsafe {
            let Loaded { base, dynamic: mut entry } = self.loaded()?;
            let (mut symbols, mut names, mut hash, mut gnu_hash) = (None, None, None, None);
            loop {
                let (tag, address) = (SharedObject::read::<usize>(entry), SharedObject::read::<usize>(entry + 8));
                match tag {
                    DT_NULL => break,
                    DT_SYMTAB => symbols = Some(base.wrapping_add(address)),
                    DT_STRTAB => names = Some(base.wrapping_add(address)),
                    DT_HASH => hash = Some(base.wrapping_add(address)),
                    DT_GNU_HASH => gnu_hash = Some(base.wrapping_add(address)),
                    _ => {}
                }
                entry += 16;
            }
            let (symbols, names) = (symbols?, names?);
            let count = match (hash, gnu_hash) {
                // The table's second number counts its chains, one for each symbol.
                (Some(hash), _) => SharedObject::read::<u32>(hash + 4),
                (None, Some(hash)) => SharedObject::count(hash),
                (None, None) => return None,
            };
            (0..count as usize).find_map(|number| {
                let symbol = symbols + number * size_of::<Symbol>();
                let text = names + SharedObject::read::<u32>(symbol + core::mem::offset_of!(Symbol, name)) as usize;
                let is_defined = SharedObject::read::<u16>(symbol + core::mem::offset_of!(Symbol, section)) != 0;
                let value = SharedObject::read::<usize>(symbol + core::mem::offset_of!(Symbol, value));
                let is_it = is_defined && CStr::from_ptr(core::ptr::with_exposed_provenance(text)) == name;
                is_it.then(|| base.wrapping_add(value))
            })
        }
    }

    /// Number of symbols, from the object's GNU hash table.
    ///
    /// # Safety
    /// `hash` is the address of such a table.
    unsafe fn count(hash: usize) -> u32 {
        // SAFETY: the caller promises such a table: four numbers, the filter's words, a bucket for
        // each chain, and the chains. A bucket holds the number of its chain's first symbol. The
        // word of a chain's last symbol is odd.
        unsafe {
            let [buckets, first, words] = [0, 4, 8].map(|at| SharedObject::read::<u32>(hash + at));
            let start = hash + 16 + words as usize * size_of::<usize>();
            let last =
                (0..buckets as usize).map(|bucket| SharedObject::read::<u32>(start + bucket * 4)).max().unwrap_or(0);
            if last < first {
                return first;
            }
            let chains = start + buckets as usize * 4;
            let end =
                (last..).find(|symbol| SharedObject::read::<u32>(chains + (symbol - first) as usize * 4) & 1 == 1);
            end.map_or(last, |symbol| symbol + 1)
        }
    }
}

/// Finds the kernel's function; `None` if there is none.
pub(crate) fn find() -> Option<ClockGettime> {
    // SAFETY: getauxval has no preconditions.
    let address = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } as usize;
    if address == 0 {
        return None;
    }
    // SAFETY: the kernel has mapped a valid object at this address, and does not unmap it.
    let function = unsafe { SharedObject(address).function(crate::arch::CLOCK) }?;
    // SAFETY: the kernel's function `CLOCK` has the type `ClockGettime`.
    Some(unsafe { core::mem::transmute::<usize, ClockGettime>(function) })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernel_has_a_function_for_the_time() {
        let Some(clock) = super::find() else { return }; // Under valgrind.
        let mut time = [0; 2];
        // SAFETY: the clock exists, and the time has room.
        assert_eq!(unsafe { clock(libc::CLOCK_MONOTONIC, &raw mut time) }, 0);
        assert!(time[0] > 0 && time[1] < 1_000_000_000);
    }
}
