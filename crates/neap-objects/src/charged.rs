//! Charged objects in caches: an object that its owner frees stays charged until another owner
//! takes it.
//!
//! # Design
//!
//! An object that its owner frees gets the state [`PAID`]. If the owner allocates it again, nothing
//! is uncharged or charged. If an allocation of another owner or of none takes the object, or it
//! returns to its slab, the callback of [`Uncharger::open`] pays the owner back. Until then the
//! object's page keeps its vector, since a slab with an object in a cache is not free.
//!
//! # Locking
//!
//! One mutex serialises looks at the charged objects in caches.

use crate::class_cache::{ClassCache, FLUSH_BATCH};
use crate::fast_path::{FastPath, corrupt};
use crate::object_state::{ACCOUNTED, ALLOCATED, CACHED, PAID};
use crate::objects::Objects;
use crate::region::StackId;
use crate::size_class::Class;
pub use crate::uncharger::{GateSide, UnchargeFn, Uncharger};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use neap_base::Platform;
use neap_os::stack;

/// The result of [`FastPath::allocate_grouped`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owned {
    /// An object that the owner has paid for already. It belongs to the caller.
    Again(NonNull<u8>),
    /// An object that belongs to the caller and is still marked as cached. The caller passes it to
    /// [`FastPath::hand_out`] or [`FastPath::put`].
    Another(NonNull<u8>),
    /// No object: the stack is empty, or the size is not served.
    Nothing,
}

impl FastPath {
    /// Pops the topmost object of this CPU's stack. Hands it out at once if a certain owner has
    /// paid for it already. `sole` is [`word_of`](crate::payers::word_of) that owner.
    #[inline(always)]
    pub fn allocate_grouped(&self, size: usize, sole: u64) -> Owned {
        // Acquire pairs with the Release in `FastPath::enable`.
        if size >= self.served.load(Acquire) {
            return Owned::Nothing;
        }
        // `black_box` delays the load of the stack's head by a few cycles. malloc and free in a
        // group are faster with it: an earlier load seems to wait longer for the store of the last
        // push.
        let fast_path = core::hint::black_box(self);
        // SAFETY: the size is below `served`, so it is at most `LARGEST`, and `enable` was called.
        let Some(object) = (unsafe { fast_path.pop(size) }) else { return Owned::Nothing };
        let address = object.addr().get();
        // SAFETY: objects in stacks lie in the arena, which has state bytes. If the object is in
        // state PAID, it is charged, so its page keeps its vector. It is this thread's now; after a
        // double free another thread may have it, too, but its byte stays accessible.
        unsafe {
            if self.states.change(address, PAID, ACCOUNTED) {
                if self.is_of(object.as_ptr(), sole) {
                    return Owned::Again(object);
                }
                self.states.set(address, PAID);
            }
        }
        Owned::Another(object)
    }

    /// Marks a cached object as the program's and not charged. If an owner pays for the object,
    /// pays the owner back.
    ///
    /// # Safety
    /// The object belongs to the instance that this [`FastPath`] was opened for, is marked as
    /// cached, and is the caller's.
    #[inline(always)]
    pub unsafe fn hand_out(&self, object: NonNull<u8>, side: GateSide) -> Option<NonNull<u8>> {
        // SAFETY: the caller says that the object is one of the instance, so it lies in the arena.
        if unsafe { self.states.change(object.addr().get(), CACHED, ALLOCATED) } {
            return Some(object);
        }
        // SAFETY: the caller says that the object is one of the instance, is marked as cached, and
        // is its own.
        unsafe { self.hand_out_paid(object, side) }
    }

    /// [`FastPath::hand_out`] for a charged object.
    ///
    /// # Safety
    /// The object belongs to the instance that this [`FastPath`] was opened for, is marked as
    /// cached, and is the caller's.
    #[cold]
    #[inline(never)]
    unsafe fn hand_out_paid(&self, object: NonNull<u8>, side: GateSide) -> Option<NonNull<u8>> {
        // SAFETY: the object is the caller's and lies in the arena. It is charged, so its page
        // keeps its vector. The uncharger was stored by `FastPath::open` and lives as long as the
        // instance.
        unsafe {
            if !self.states.change(object.addr().get(), PAID, ALLOCATED) {
                return corrupt(object);
            }
            if let (Some(owner), Some(uncharger)) = (self.owner(object.as_ptr()), self.uncharger.load(Relaxed).as_ref())
            {
                uncharger.pay(owner, self.kind(object.as_ptr()).class(), 1, side);
            }
        }
        Some(object)
    }
}

impl<P: Platform> Objects<P> {
    /// Pays back the owners of those cached objects that are charged. The caller has taken the
    /// objects out of their caches.
    pub(crate) fn repay(&self, class: Class, objects: &[*mut u8]) {
        let (mut payer, mut count) = (0, 0);
        for &object in objects {
            // SAFETY: the caller has the objects, which are cached ones of this class and lie in
            // the arena.
            if unsafe { self.states.change(object.addr(), PAID, CACHED) } {
                let owner = self.owner_at(object.addr());
                if owner != payer && count > 0 {
                    self.uncharger.pay(payer, class, count, GateSide::Inside);
                    count = 0;
                }
                (payer, count) = (owner, count + 1);
            }
        }
        if count > 0 {
            self.uncharger.pay(payer, class, count, GateSide::Inside);
        }
    }

    /// Calls `each` with class, owner and number of charged objects in stacks and full sheaves.
    /// `each` may get one class and owner several times. The numbers are exact while no thread
    /// allocates or frees.
    ///
    /// One thread looks at a time. It takes the class caches' locks, for [`FLUSH_BATCH`] objects at
    /// a time. `each` is called with none of these held, and must not call this function. The look
    /// runs on a stack of its own; if there is no memory for that, it reports nothing.
    pub fn each_paid(&self, each: &mut dyn FnMut(Class, u64, u32)) {
        if self.has_owned() {
            let _ = stack::apart(|| self.look_at_paid(each));
        }
    }

    fn look_at_paid(&self, each: &mut dyn FnMut(Class, u64, u32)) {
        let (platform, cpu_caches) = (&self.platform, &self.cpu_caches);
        let _looking = self.looking.lock();
        for class in Class::all() {
            for node in 0..self.pages.nodes() {
                let mut starts = true;
                while self.tally(class, node, each, |cache, see| {
                    cache.full.look(core::mem::take(&mut starts), FLUSH_BATCH, see)
                }) {}
                for cpu in cpu_caches.used().iter() {
                    for id in [StackId::local(class), StackId::remote(class)] {
                        let mut from = 0;
                        while from < cpu_caches.count(platform, cpu, id) {
                            let cells = from..from + FLUSH_BATCH;
                            self.tally(class, node, each, |_, see| cpu_caches.each_seen(platform, cpu, id, cells, see));
                            from += FLUSH_BATCH;
                        }
                    }
                }
            }
        }
    }

    /// Lets `look` visit a few objects under the lock of a class on a node, then calls `each` with
    /// the owners of those that are charged.
    fn tally<T>(
        &self,
        class: Class,
        node: usize,
        each: &mut dyn FnMut(Class, u64, u32),
        look: impl FnOnce(&mut ClassCache, &mut dyn FnMut(*mut u8)) -> T,
    ) -> T {
        let (mut payers, mut count) = ([(0, 0); FLUSH_BATCH], 0);
        let mut see = |object: *mut u8| {
            if self.class_at(object) == Some(class) && self.node_of(object) == node {
                // SAFETY: `class_at` found the object in a slab, so in the mapped part of the
                // arena.
                let paid = unsafe { self.states.is(object.addr(), PAID) };
                // An object in this state returns to its slab only under the lock, which is held.
                // So the page keeps its vector.
                let payer = if paid { self.owner_at(object.addr()) } else { 0 };
                let known = payers[..count].iter().rposition(|&(known, _)| known == payer);
                if payer != 0
                    && let Some(entry) = payers.get_mut(known.unwrap_or(count))
                {
                    *entry = (payer, entry.1 + 1);
                    count += usize::from(known.is_none());
                }
            }
        };
        let answer = {
            let mut cache = self.cache(node, class).lock();
            look(&mut cache, &mut see)
        };
        payers[..count].iter().for_each(|&(payer, objects)| each(class, payer, objects));
        answer
    }
}
