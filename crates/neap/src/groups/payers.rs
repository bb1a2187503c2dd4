//! The group that pays for memory, found by an address.
//!
//! # Design
//!
//! A block of up to 32 KiB is an object of a slab. neap computes its start from the start of the
//! slab and the size of the class. Its state byte shows whether a group pays. A larger block is a
//! run, whose payer is in the frame of its first page. The frames of a run's other pages do not
//! lead to the first one. So neap does not find the payer from an address on these pages.
//!
//! This module takes no lock.

use crate::groups::{Group, made};
use crate::mm::Mm;
use crate::process::PROCESS;
use core::ptr::from_ref;
use neap_base::Platform;
use neap_groups::Payer;
use neap_objects::size_class::Class;
use neap_os::memory::untagged;

impl<P: Platform> Mm<P> {
    /// Returns the payer of the block of this manager that an address lies in. Returns `None` if no
    /// group pays for the block, or if the memory is not this manager's. Also returns `None` behind
    /// the first page of a block above 32 KiB.
    ///
    /// # Safety
    /// If `pointer` leads into a block of this manager, the block is not freed during the call.
    pub unsafe fn payer_at(&self, pointer: *const u8) -> Option<Payer> {
        let core = self.core_if_open()?;
        let pointer = untagged(pointer.cast_mut()).cast_const();
        if let Ok(payer) = core.guarded_payer(pointer) {
            return payer;
        }
        let objects = &core.objects;
        match objects.class_at(pointer)? {
            Class::NONE => core.run_payer(pointer.map_addr(|at| at - at % objects.pages.page_size())),
            class => {
                let object = pointer.map_addr(|at| at - objects.offset_in(class, pointer));
                // SAFETY: the kind map says that the address lies in an object of this manager. The
                // object is not freed during the call (the caller's promise), so it has an owner
                // and its page keeps its vector.
                unsafe { self.fast_path.payer(object) }.map(Payer::from_bits)
            }
        }
    }
}

/// Returns the payer of a value's memory, as a part of [`payer_of`]. `None` if the process's
/// manager did not allocate the memory.
pub(crate) fn payer_of_value<T: ?Sized>(value: &T) -> Option<Payer> {
    // A reference to no bytes may have any address, even one of freed memory.
    if size_of_val(value) == 0 {
        return None;
    }
    // SAFETY: the reference covers at least one byte, so the block at its address is not freed
    // while the value is borrowed.
    unsafe { PROCESS.payer_at(from_ref(value).cast()) }
}

/// Returns the group that pays for the memory that a value lies in. That is the group of the thread
/// that allocated the memory, or the heir of that group.
///
/// The value may lie anywhere in a block of up to 32 KiB, and on the first page of a larger one.
/// Returns `None` if no group pays, or if neap did not allocate the memory. Examples are a stack, a
/// static, and a block of another allocator.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: neap::Neap = neap::Neap;
///
/// use neap::groups::{Group, payer_of};
///
/// let tenant = Group::create("payers/acme")?;
/// let inside = tenant.enter()?;
/// let page = Box::new([0_u8; 100]);
/// drop(inside);
/// assert_eq!(payer_of(&page[99]), Some(tenant));
/// assert_eq!(payer_of(&*Box::new(1)), None, "this thread is in no group");
/// tenant.delete()?;
/// assert_eq!(payer_of(&*page), Some(Group::find("payers")?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn payer_of<T: ?Sized>(value: &T) -> Option<Group> {
    living(payer_of_value(value)?)
}

/// Returns the group that pays for the memory at an address, as [`payer_of`] does.
///
/// # Safety
/// If `pointer` leads into a block of neap, the block is not freed during the call.
pub unsafe fn payer_at(pointer: *const u8) -> Option<Group> {
    // SAFETY: the block is not freed during the call (the caller's promise).
    living(unsafe { PROCESS.payer_at(pointer) }?)
}

/// Returns the group of a payer, or its heir.
fn living(payer: Payer) -> Option<Group> {
    made().ok()?.heir(payer.id()).map(Group::from_id)
}
