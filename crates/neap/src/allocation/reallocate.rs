//! Reallocation.
//!
//! # Design
//!
//! An object stays in place if its class suits the new size. Otherwise it moves by an allocation, a
//! copy and a free. Neither case needs more than the fast paths of malloc and free. A run is
//! resized in place, or moved by its page tables (`large.rs`), or copied.

use crate::mm::{Mm, abort_before_init};
use crate::state::in_call::Returned;
use neap_base::Platform;
use neap_objects::size_class::{Class, GRAIN, LARGEST};
use neap_os::memory::untagged;

impl<P: Platform> Mm<P> {
    /// Makes the memory at `pointer` at least `size` bytes large, and moves it if need be. Returns
    /// null, and changes nothing, if there is no memory. With a null pointer, this allocates. A
    /// `size` of 0 counts as 1.
    ///
    /// # Safety
    /// Those of [`Mm::free`], unless this returns null.
    #[inline]
    pub unsafe fn reallocate(&self, pointer: *mut u8, size: usize) -> *mut u8 {
        // SAFETY: the caller fulfils the conditions of `free`, unless this returns null. The
        // address of every allocation is a multiple of `GRAIN`.
        unsafe { self.reallocate_aligned(pointer, size, GRAIN) }
    }

    /// Reallocates as [`Mm::reallocate`] does. The address of the result is a multiple of `align`.
    ///
    /// # Safety
    /// Those of [`Mm::reallocate`]. `pointer` is null, or its address is a multiple of `align`.
    #[inline]
    pub unsafe fn reallocate_aligned(&self, pointer: *mut u8, size: usize, align: usize) -> *mut u8 {
        if pointer.is_null() {
            return self.allocate_aligned(size, align);
        }
        let usable = match self.fast_path.class_of(pointer) {
            Some(class) if class.suits(size) => return pointer,
            Some(class) => class.size(),
            // SAFETY: the caller fulfils the conditions of this function, and `pointer` is not
            // null.
            None => match unsafe { self.reallocate_in_place(pointer, size, align) } {
                Ok(memory) => return memory,
                Err(usable) => usable,
            },
        };
        // SAFETY: the caller fulfils the conditions of this function. The block has `usable` bytes.
        unsafe { self.move_block(pointer, usable, size, align) }
    }

    /// Reallocates a block without a copy, if possible. `pointer` is not null. A pointer to no
    /// allocation ends the process.
    ///
    /// # Errors
    /// Returns the block's usable size if the caller has to copy the block. The block is unchanged
    /// then.
    ///
    /// # Safety
    /// Those of [`Mm::reallocate_aligned`].
    #[inline(never)]
    unsafe fn reallocate_in_place(&self, pointer: *mut u8, size: usize, align: usize) -> Result<*mut u8, usize> {
        let pointer = untagged(pointer);
        let Some(core) = self.core_if_open() else { abort_before_init(pointer) };
        // A guarded block always moves, so that uses of the old pointer are detected.
        if let Some(usable) = core.guarded_size(pointer, "realloc") {
            return Err(usable);
        }
        let class = core.class_of(pointer, "realloc");
        let checks = core.options.check;
        let usable = match checks {
            true => self.usable_checked(core, pointer, "realloc"),
            false => core.usable_size(pointer, "realloc"),
        };
        if checks {
            // A checked block always moves, so that uses of the old pointer are detected.
        } else if class == Class::NONE {
            self.end_sample_of_run(core, pointer);
            let in_place = || {
                let inside = self.gate.enter(core.objects.platform.cpu());
                let resized = size > LARGEST && core.resize_run(&inside, pointer, size);
                let memory = if resized { Some(pointer) } else { core.move_run(&inside, pointer, size, align) };
                memory.inspect(|_| core.count_run(size, usable))
            };
            let resized = match core.run_payer(pointer) {
                None => in_place(),
                Some(payer) => self.resize_paid(payer, usable as u64, core.run_price(size), in_place),
            };
            if let Some(memory) = resized {
                self.count_allocation(memory, size);
                if size < usable {
                    core.after_free(self, Returned::Run(usable - size));
                } else {
                    self.after_allocation(core);
                }
                return Ok(memory);
            }
        } else if class.suits(size) {
            return Ok(pointer);
        }
        Err(usable)
    }

    /// Moves a block of `usable` bytes to a new one of `size` bytes. Returns null, and changes
    /// nothing, if there is no memory.
    ///
    /// # Safety
    /// Those of [`Mm::reallocate_aligned`]. The block has `usable` bytes.
    #[inline(never)]
    unsafe fn move_block(&self, pointer: *mut u8, usable: usize, size: usize, align: usize) -> *mut u8 {
        let memory = self.allocate_aligned(size, align);
        if !memory.is_null() {
            // SAFETY: the old memory has `usable` bytes, the new one has `size`. They do not
            // overlap.
            unsafe { memory.copy_from_nonoverlapping(pointer, usable.min(size)) };
            // SAFETY: this call returns non-null, so no thread uses the old memory (the caller's
            // promise).
            unsafe { self.free(pointer) };
        }
        memory
    }
}
