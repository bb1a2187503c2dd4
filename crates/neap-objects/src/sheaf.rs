//! A sheaf: a small stack of free objects of one class, and a list of sheaves.
//!
//! Sits between the slots of the CPUs, which push and pop, and the barns, which hold full and empty ones. A sheaf has one
//! owner at a time (a slot, a barn, or a thread that just took it out of one); only the owner looks inside. The memory
//! is an object of another size class: [`Sheaf::bytes`]. (SLUB's sheaves, Linux 6.18; Bonwick's magazines, 2001.)

use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicPtr, AtomicU32};
use neap_os::rseq::Stack;

/// The right to look into one sheaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Sheaf(NonNull<Stack>);

impl Sheaf {
    /// Bytes of a sheaf with `capacity` cells.
    pub const fn bytes(capacity: u32) -> usize {
        size_of::<Stack>() + capacity as usize * size_of::<usize>()
    }

    /// Makes an empty sheaf in memory of the caller's.
    ///
    /// # Safety
    /// `memory` is [`Sheaf::bytes`] long, aligned to 8, and nobody else's.
    pub unsafe fn make(memory: NonNull<u8>, capacity: u32) -> Sheaf {
        let stack = memory.cast::<Stack>();
        let head = Stack { next: AtomicPtr::default(), count: AtomicU32::new(0), capacity: AtomicU32::new(capacity) };
        // SAFETY: as the caller promises.
        unsafe { stack.write(head) };
        Sheaf(stack)
    }

    /// The sheaf behind a pointer that came out of a slot; `None` for null.
    ///
    /// # Safety
    /// The caller has become the owner of what is behind a non-null `stack`.
    pub unsafe fn from_slot(stack: *mut Stack) -> Option<Sheaf> {
        NonNull::new(stack).map(Sheaf)
    }

    /// What a slot holds: gives ownership away.
    pub fn into_slot(self) -> *mut Stack {
        self.0.as_ptr()
    }

    /// The memory of the sheaf.
    pub fn memory(self) -> NonNull<u8> {
        self.0.cast()
    }

    fn head(&self) -> &Stack {
        // SAFETY: whoever has the value owns the sheaf, whose head is initialised.
        unsafe { self.0.as_ref() }
    }

    /// Objects in the sheaf.
    pub fn count(self) -> u32 {
        self.head().count.load(Relaxed)
    }

    /// Objects that fit.
    pub fn capacity(self) -> u32 {
        self.head().capacity.load(Relaxed)
    }

    fn cell(self, index: u32) -> *mut *mut u8 {
        // SAFETY: callers stay below the capacity, and the cells follow the head.
        unsafe { self.0.as_ptr().add(1).cast::<*mut u8>().add(index as usize) }
    }

    /// Puts an object on top; `false` if there is no room.
    pub fn push(self, object: *mut u8) -> bool {
        let count = self.count();
        if count >= self.capacity() {
            return false;
        }
        // SAFETY: below the capacity, and the caller owns the sheaf.
        unsafe { self.cell(count).write(object) };
        self.head().count.store(count + 1, Relaxed);
        true
    }

    /// Takes the topmost object.
    pub fn pop(self) -> Option<*mut u8> {
        let count = self.count().checked_sub(1)?;
        self.head().count.store(count, Relaxed);
        // SAFETY: below the count, and the caller owns the sheaf.
        Some(unsafe { self.cell(count).read() })
    }

    /// The objects, bottom first.
    pub fn objects(&self) -> &[*mut u8] {
        // SAFETY: the cells below the count are initialised, and the caller owns the sheaf.
        unsafe { core::slice::from_raw_parts(self.cell(0), self.count() as usize) }
    }

    /// Forgets the objects: they are somewhere else now.
    pub fn clear(self) {
        self.head().count.store(0, Relaxed);
    }
}

/// A list of sheaves, last in first out.
#[derive(Debug)]
pub struct SheafList {
    head: *mut Stack,
    length: u32,
    /// The shortest the list has been since the last [`SheafList::working_set`].
    shortest: u32,
}

// SAFETY: the list owns its sheaves.
unsafe impl Send for SheafList {}

impl SheafList {
    /// An empty list.
    pub const fn new() -> SheafList {
        SheafList { head: core::ptr::null_mut(), length: 0, shortest: 0 }
    }

    /// Sheaves on the list.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Puts a sheaf on the list, which owns it from now on.
    pub fn push(&mut self, sheaf: Sheaf) {
        sheaf.head().next.store(self.head, Relaxed);
        self.head = sheaf.into_slot();
        self.length += 1;
    }

    /// Takes the sheaf that was put there last.
    pub fn pop(&mut self) -> Option<Sheaf> {
        // SAFETY: the list owns its sheaves and gives this one away.
        let sheaf = unsafe { Sheaf::from_slot(self.head) }?;
        self.head = sheaf.head().next.load(Relaxed);
        self.length -= 1;
        self.shortest = self.shortest.min(self.length);
        Some(sheaf)
    }

    /// How many sheaves were on the list all the time since this was last asked: nobody needed them.
    pub fn working_set(&mut self) -> u32 {
        let idle = self.shortest;
        self.shortest = self.length;
        idle
    }

    /// Goes through the sheaves.
    pub fn each(&self, mut each: impl FnMut(Sheaf)) {
        let mut next = self.head;
        // SAFETY: the list owns its sheaves, and is borrowed.
        while let Some(sheaf) = unsafe { Sheaf::from_slot(next) } {
            next = sheaf.head().next.load(Relaxed);
            each(sheaf);
        }
    }
}

impl Default for SheafList {
    fn default() -> Self {
        SheafList::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn sheaf(capacity: u32) -> (Sheaf, Vec<u64>) {
        let mut memory = std::vec![0_u64; Sheaf::bytes(capacity) / 8];
        // SAFETY: the vector is long enough and outlives the sheaf in every test.
        (unsafe { Sheaf::make(NonNull::new(memory.as_mut_ptr().cast()).unwrap(), capacity) }, memory)
    }

    #[test]
    fn a_sheaf_is_a_bounded_stack() {
        let (sheaf, _memory) = sheaf(3);
        let objects: Vec<*mut u8> = (1..=3).map(|n| core::ptr::without_provenance_mut(n * 16)).collect();
        assert!(objects.iter().all(|&object| sheaf.push(object)) && !sheaf.push(objects[0]));
        assert_eq!(sheaf.objects(), objects);
        assert_eq!((sheaf.pop(), sheaf.count()), (Some(objects[2]), 2));
        sheaf.clear();
        assert_eq!(sheaf.pop(), None);
    }

    #[test]
    fn the_working_set_is_what_was_needed() {
        let sheaves: Vec<_> = (0..4).map(|_| sheaf(1)).collect();
        let mut list = SheafList::new();
        sheaves.iter().for_each(|(sheaf, _)| list.push(*sheaf));
        assert_eq!(list.working_set(), 0, "before now the list was empty once");
        assert_eq!(list.working_set(), 4, "nothing was needed");
        let two = [list.pop().unwrap(), list.pop().unwrap()];
        two.into_iter().for_each(|sheaf| list.push(sheaf));
        assert_eq!((list.working_set(), list.length()), (2, 4));
    }
}
