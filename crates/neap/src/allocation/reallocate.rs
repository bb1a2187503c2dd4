//! Reallocation.
//!
//! # Design
//!
//! An object stays in place if its class suits the new size. Otherwise it moves by an allocation, a
//! copy and a free. Neither case needs more than the fast paths of malloc and free. A run is
//! resized in place, or moved by its page tables (`large.rs`), or copied.

use crate::mm::{Mm, core_less};
use crate::state::in_call::Returned;
use neap_base::Platform;
use neap_objects::size_class::{Class, GRAIN, LARGEST};
use neap_os::memory::untagged;

impl<P: Platform> Mm<P> {
    /// Makes the memory at `pointer` at least `size` bytes large, and moves it if need be. Returns
    /// null, and changes nothing, if there is no memory. A null pointer allocates. A `size` of 0
    /// counts as 1.
    ///
    /// # Safety
    /// Those of [`Mm::free`], unless null is returned.
    #[inline]
    pub unsafe fn reallocate(&self, pointer: *mut u8, size: usize) -> *mut u8 {
        // SAFETY: the caller owes what `free` asks for; every allocation is on a multiple of
        // `GRAIN`.
        unsafe { self.reallocate_aligned(pointer, size, GRAIN) }
    }

    /// Makes the memory at `pointer` at least `size` bytes large, on a multiple of `align`. Unlike
    /// [`Mm::reallocate`], keeps the alignment.
    ///
    /// # Safety
    /// Those of [`Mm::reallocate`]; a non-null `pointer` is on a multiple of `align`.
    #[inline]
    pub unsafe fn reallocate_aligned(&self, pointer: *mut u8, size: usize, align: usize) -> *mut u8 {
        if pointer.is_null() {
            return self.allocate_aligned(size, align);
        }
        let usable = match self.fast_path.class_of(pointer) {
            Some(class) if class.suits(size) => return pointer,
            Some(class) => class.size(),
            // SAFETY: the caller's promise.
            None => match unsafe { self.reallocate_in_place(pointer, size, align) } {
                Ok(memory) => return memory,
                Err(usable) => usable,
            },
        };
        // SAFETY: this call may free the block (the caller's promise), which has `usable` bytes.
        unsafe { self.move_block(pointer, usable, size, align) }
    }

    /// Reallocates a block without a copy, if possible. `pointer` is not null. If it leads to no
    /// allocation, the process ends.
    ///
    /// # Errors
    /// The block's usable size, if the caller has to copy the block. Nothing has changed then.
    ///
    /// # Safety
    /// Those of [`Mm::reallocate_aligned`].
    #[inline(never)]
    unsafe fn reallocate_in_place(&self, pointer: *mut u8, size: usize, align: usize) -> Result<*mut u8, usize> {
        let pointer = untagged(pointer);
        let Some(core) = self.core_if_open() else { core_less(pointer) };
        // Always moved, so that old pointers are found.
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
            // Always moved, so that old pointers are found.
        } else if class == Class::NONE {
            self.end_sample_of_run(core, pointer);
            let in_place = || {
                let _inside = self.gate.enter(core.objects.platform.cpu());
                let resized = size > LARGEST && core.resize_run(pointer, size);
                let memory = if resized { Some(pointer) } else { core.move_run(pointer, size, align) };
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
    /// Those of [`Mm::reallocate_aligned`]; the block has `usable` bytes.
    #[inline(never)]
    unsafe fn move_block(&self, pointer: *mut u8, usable: usize, size: usize, align: usize) -> *mut u8 {
        let memory = self.allocate_aligned(size, align);
        if !memory.is_null() {
            // SAFETY: the old memory has `usable` bytes, the new one `size`; they do not overlap.
            unsafe { memory.copy_from_nonoverlapping(pointer, usable.min(size)) };
            // SAFETY: this call returns non-null, so no thread uses the old memory (the caller's
            // promise).
            unsafe { self.free(pointer) };
        }
        memory
    }
}
