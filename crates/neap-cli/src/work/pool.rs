//! librseq's memory pool: the time of an allocation and its free, and the memory returned when ten
//! of eleven owners are deleted.
//!
//! The library must be preloaded: it needs static thread-local storage, which is assigned when a
//! process starts. A pool has items of one size, a power of two, so a set of pools serves several
//! sizes.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::hint::black_box;
use core::ptr::{null, null_mut};

use anyhow::{Result, bail, ensure};
use clap::Args;

use super::Outcome;
use super::meter::{median_of_pairs, pin};
use crate::process::rss_kib;

/// Bytes from one CPU's copy to the next one's: the library's default.
const STRIDE: usize = 1 << 16;
/// Items from 8 bytes to 32 KiB.
const SHIFTS: core::ops::RangeInclusive<u32> = 3..=15;
/// Number of pairs in each reported time, so that no fraction of a nanosecond is lost.
const PAIRS: u64 = 1000;

#[derive(Args)]
pub(super) struct PoolOptions {
    /// CPUs that have copies
    #[arg(long)]
    cpus: usize,
    /// Owners; one in `--stays` of them stays
    #[arg(long)]
    owners: usize,
    #[arg(long)]
    stays: usize,
    /// Bytes of each allocation of an owner
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<usize>,
}

/// Times pairs, and then runs the script. Its results are resident KiB: before, with all owners,
/// after most have gone, and without any.
pub(super) fn run(options: &PoolOptions) -> Result<Outcome> {
    pin()?;
    let library = Library::of_process()?;
    let pools = Pools::new(&library, options.cpus)?;
    let nanoseconds = median_of_pairs(|| {
        pools.free(black_box(pools.allocate(64)?));
        Ok(())
    })?;
    drop(pools);
    let wall_ns = (nanoseconds * PAIRS as f64) as u64;
    Ok(Outcome { operations: PAIRS, wall_ns, rss_kib: script(&library, options)?, ..Outcome::default() })
}

fn script(library: &Library, options: &PoolOptions) -> Result<Vec<u64>> {
    let pools = Pools::new(library, options.cpus)?;
    let mut items: Vec<Vec<*mut u8>> = vec![vec![null_mut(); options.sizes.len()]; options.owners];
    let resident = || rss_kib(std::process::id());
    let before = resident()?;
    for items in &mut items {
        for (item, &size) in items.iter_mut().zip(&options.sizes) {
            *item = pools.allocate(size)?;
            for cpu in 0..options.cpus {
                // SAFETY: each CPU's copy has `size` bytes. The copies are written, as neap's are,
                // since a page that was only read has no memory.
                unsafe { item.add(cpu * STRIDE).write_bytes(1, size) };
            }
        }
    }
    let full = resident()?;
    let (staying, going): (Vec<_>, Vec<_>) =
        items.into_iter().enumerate().partition(|(at, _)| at.is_multiple_of(options.stays));
    let close = |owners: Vec<(usize, Vec<*mut u8>)>| {
        owners.into_iter().flat_map(|(_, items)| items).for_each(|item| pools.free(item));
        resident()
    };
    let (few, none) = (close(going)?, close(staying)?);
    Ok(vec![before, full, few, none])
}

/// The functions of the library.
struct Library {
    attr_create: unsafe extern "C" fn() -> *mut c_void,
    attr_destroy: unsafe extern "C" fn(*mut c_void),
    attr_set_percpu: unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int,
    create: unsafe extern "C" fn(*const c_char, usize, *const c_void) -> *mut c_void,
    set_create: unsafe extern "C" fn() -> *mut c_void,
    set_add: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    set_destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    allocate: unsafe extern "C" fn(*mut c_void, usize) -> *mut u8,
    free: unsafe extern "C" fn(*mut u8, usize),
}

impl Library {
    fn of_process() -> Result<Library> {
        /// Returns the function with the name `name`.
        ///
        /// # Safety
        /// The symbol, if it exists, is a function of type `T`.
        unsafe fn symbol<T: Copy>(name: &CStr) -> Result<T> {
            // SAFETY: the name is a C string that lives during the call.
            let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            ensure!(!address.is_null(), "nothing in this process is called {}", name.to_string_lossy());
            // SAFETY: the symbol is a function of type `T` (the caller's promise). A function
            // pointer has the size of the address.
            Ok(unsafe { core::mem::transmute_copy(&address) })
        }
        // SAFETY: each field's type is that of the function in the library's header,
        // rseq/mempool.h.
        unsafe {
            Ok(Library {
                attr_create: symbol(c"rseq_mempool_attr_create")?,
                attr_destroy: symbol(c"rseq_mempool_attr_destroy")?,
                attr_set_percpu: symbol(c"rseq_mempool_attr_set_percpu")?,
                create: symbol(c"rseq_mempool_create")?,
                set_create: symbol(c"rseq_mempool_set_create")?,
                set_add: symbol(c"rseq_mempool_set_add_pool")?,
                set_destroy: symbol(c"rseq_mempool_set_destroy")?,
                allocate: symbol(c"rseq_mempool_set_percpu_zmalloc")?,
                free: symbol(c"librseq_mempool_percpu_free")?,
            })
        }
    }
}

/// A pool for each size, destroyed with this value.
struct Pools<'a> {
    library: &'a Library,
    set: *mut c_void,
}

impl Pools<'_> {
    fn new(library: &Library, cpus: usize) -> Result<Pools<'_>> {
        // SAFETY: the arguments are those that the library's header requires. Attributes may be
        // destroyed once the pools exist.
        unsafe {
            let attributes = (library.attr_create)();
            ensure!(!attributes.is_null(), "no attributes");
            ensure!((library.attr_set_percpu)(attributes, STRIDE, cpus as c_int) == 0, "no pools for {cpus} CPUs");
            let set = (library.set_create)();
            ensure!(!set.is_null(), "no set of pools");
            let pools = Pools { library, set };
            for shift in SHIFTS {
                let pool = (library.create)(null(), 1 << shift, attributes);
                ensure!(!pool.is_null() && (library.set_add)(set, pool) == 0, "no pool for {} bytes", 1 << shift);
            }
            (library.attr_destroy)(attributes);
            Ok(pools)
        }
    }

    /// Allocates zeroes for each CPU.
    fn allocate(&self, size: usize) -> Result<*mut u8> {
        // SAFETY: the set exists as long as this value does.
        let item = unsafe { (self.library.allocate)(self.set, size) };
        if item.is_null() {
            bail!("librseq's pool has no {size} bytes for each CPU");
        }
        Ok(item)
    }

    fn free(&self, item: *mut u8) {
        // SAFETY: the item came from this set, whose pools have this stride, and is not used any
        // more.
        unsafe { (self.library.free)(item, STRIDE) };
    }
}

impl Drop for Pools<'_> {
    fn drop(&mut self) {
        // SAFETY: no item of the set is used any more.
        unsafe { (self.library.set_destroy)(self.set) };
    }
}
