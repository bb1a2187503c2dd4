//! Parts that differ between processors: the unwinder, its registers, the machine of ELF files.
//!
//! The command unwinds only programs of the processor that it was built for.

use super::area::StackCopy;

#[cfg(target_arch = "x86_64")]
mod own {
    use super::StackCopy;
    use framehop::x86_64::UnwindRegsX86_64;
    pub(crate) use framehop::x86_64::{CacheX86_64 as FrameCache, UnwinderX86_64 as FrameUnwinder};

    /// The machine in the head of an ELF file.
    pub(crate) const MACHINE: u16 = object::elf::EM_X86_64;

    /// Whether trampolines of Python need unwind information. Here they do, since they set up no
    /// frame pointer.
    pub(crate) const DESCRIBES_TRAMPOLINES: bool = true;

    /// The registers of a sample.
    pub(crate) fn registers(stack: &StackCopy<'_>) -> UnwindRegsX86_64 {
        UnwindRegsX86_64::new(stack.instruction, stack.stack_pointer, stack.frame_pointer)
    }
}

#[cfg(target_arch = "aarch64")]
mod own {
    use super::StackCopy;
    pub(crate) use framehop::aarch64::{CacheAarch64 as FrameCache, UnwinderAarch64 as FrameUnwinder};
    use framehop::aarch64::{PtrAuthMask, UnwindRegsAarch64};

    /// The machine in the head of an ELF file.
    pub(crate) const MACHINE: u16 = object::elf::EM_AARCH64;

    /// Whether trampolines of Python need unwind information. Here they do not, since they set up a
    /// frame pointer.
    pub(crate) const DESCRIBES_TRAMPOLINES: bool = false;

    /// Mask of the address bits in a return address. The other bits may hold a signature. Linux
    /// gives a program higher addresses only if it asks for them.
    const ADDRESS: PtrAuthMask = PtrAuthMask(neap_os::call_stack::ADDRESS_END - 1);

    /// Returns the registers of a sample. The function that took the sample has called other
    /// functions, so its return address lies on the stack. The link register has no influence.
    pub(crate) fn registers(stack: &StackCopy<'_>) -> UnwindRegsAarch64 {
        UnwindRegsAarch64::new_with_ptr_auth_mask(ADDRESS, 0, stack.stack_pointer, stack.frame_pointer)
    }
}

pub(crate) use own::{DESCRIBES_TRAMPOLINES, FrameCache, FrameUnwinder, MACHINE, registers};
