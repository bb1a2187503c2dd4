//! What somebody goes on paying for while caches have it: an object that is free, and taken again by who paid for it, is neither
//! paid back nor paid for anew.
//!
//! Sits between the caches of objects, and whoever owners are numbers of, who said by [`Payback::open`] how to pay back. An object
//! that its owner frees is in the state [`PAID`]; it is paid back for when somebody else takes it, or when it goes back to its slab.
//! Until then its page keeps its vector, since a slab with an object in a cache is not free. One mutex: looks at what caches have take turns.

use crate::class_cache::{ClassCache, FLUSH_BATCH};
use crate::hot::{Hot, corrupt};
use crate::objects::Objects;
use crate::region::StackId;
use crate::size_class::Class;
use crate::state::{ACCOUNTED, ALLOCATED, CACHED, PAID};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use neap_base::Platform;
use neap_os::stack;

/// Takes back what an owner has paid for so many objects of a class. The last says whether the caller is in a slow path of the
/// objects'; no lock of theirs is held.
pub type Repay = unsafe fn(context: *const (), owner: u64, class: Class, objects: u32, inside: bool);

/// How owners are paid back.
#[derive(Debug)]
pub struct Payback {
    run: AtomicPtr<()>,
    context: AtomicPtr<()>,
}

impl Payback {
    pub(crate) const fn closed() -> Payback {
        Payback { run: AtomicPtr::new(null_mut()), context: AtomicPtr::new(null_mut()) }
    }

    /// Says how, before any object has an owner; again with the same only.
    ///
    /// # Safety
    /// `repay` can be called with `context` from any thread for as long as objects are used.
    pub unsafe fn open(&self, repay: Repay, context: *const ()) {
        self.context.store(context.cast_mut(), Relaxed);
        self.run.store(repay as *mut (), Release); // Pairs with the Acquire in `pay`.
    }

    fn pay(&self, owner: u64, class: Class, objects: u32, inside: bool) {
        let run = self.run.load(Acquire); // Pairs with the Release in `open`.
        if !run.is_null() {
            // SAFETY: only `open` writes it, and promises that it can be called so.
            unsafe {
                core::mem::transmute::<*mut (), Repay>(run)(self.context.load(Relaxed), owner, class, objects, inside)
            };
        }
    }
}

/// What [`Hot::allocate_owned`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owned {
    /// An object that the owner has paid for already: it is the caller's.
    Again(NonNull<u8>),
    /// An object that is still marked as cached, and in the caller's hands: [`Hot::hand_out`] or [`Hot::put`] is next.
    Another(NonNull<u8>),
    /// No object: as [`Hot::allocate`].
    Nothing,
}

impl Hot {
    /// The topmost object of this CPU's stack, and at once if the owner paid for it of which [`word_of`](crate::owners::word_of) says `sole`.
    #[inline(always)]
    pub fn allocate_owned(&self, size: usize, sole: u64) -> Owned {
        // Acquire pairs with the Release in `serve`.
        if size >= self.served.load(Acquire) {
            return Owned::Nothing;
        }
        // A hidden address costs a few cycles before the stack's head is loaded, and malloc and free in a group take 6.0 ns on an AMD EPYC instead of
        // 6.5 (`neap work pair --group`, preloaded): loaded at once, it seems to wait longer for what the last push stored.
        let hot = core::hint::black_box(self);
        // SAFETY: what is served is at most the largest size, and not nothing.
        let Some(object) = (unsafe { hot.pop(size) }) else { return Owned::Nothing };
        let address = object.addr().get();
        // SAFETY: objects in stacks lie in the arena, and this one is this thread's now. Where it has changed hands by mistake it
        // is found out when it is freed twice.
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

    /// Marks an object that was cached as the program's, which nobody pays for: who did is paid back. `inside` as for [`Repay`].
    ///
    /// # Safety
    /// The object is one of the instance that this was opened for, marked as cached, and in the caller's hands.
    #[inline(always)]
    pub unsafe fn hand_out(&self, object: NonNull<u8>, inside: bool) -> Option<NonNull<u8>> {
        // SAFETY: objects lie in the arena.
        if unsafe { self.states.change(object.addr().get(), CACHED, ALLOCATED) } {
            return Some(object);
        }
        // SAFETY: as the caller promises.
        unsafe { self.hand_out_paid(object, inside) }
    }

    /// # Safety
    /// As for [`Hot::hand_out`].
    #[cold]
    #[inline(never)]
    unsafe fn hand_out_paid(&self, object: NonNull<u8>, inside: bool) -> Option<NonNull<u8>> {
        // SAFETY: as above. Without a payback there is no instance, and nothing that anybody paid for.
        unsafe {
            if !self.states.change(object.addr().get(), PAID, ALLOCATED) {
                return corrupt(object);
            }
            if let (Some(owner), Some(payback)) = (self.owner(object.as_ptr()), self.payback.load(Relaxed).as_ref()) {
                payback.pay(owner, self.kind(object.as_ptr()).class(), 1, inside);
            }
        }
        Some(object)
    }
}

impl<P: Platform> Objects<P> {
    /// Pays back for those of some cached objects that somebody has paid for. They are the caller's, in no cache any more.
    pub(crate) fn repay(&self, class: Class, objects: &[*mut u8]) {
        let (mut payer, mut count) = (0, 0);
        for &object in objects {
            // SAFETY: the objects are cached ones of this class, so in the arena.
            if unsafe { self.states.change(object.addr(), PAID, CACHED) } {
                let owner = self.owner_at(object.addr());
                if owner != payer && count > 0 {
                    self.payback.pay(payer, class, count, true);
                    count = 0;
                }
                (payer, count) = (owner, count + 1);
            }
        }
        if count > 0 {
            self.payback.pay(payer, class, count, true);
        }
    }

    /// Calls `each` with class, owner and number of objects in stacks and full sheaves that
    /// somebody has paid for, several times for the same perhaps: exactly while nobody allocates or
    /// frees, else about so. Looks take turns. Takes the class caches' locks, for [`FLUSH_BATCH`]
    /// objects at a time; `each` is called with none of these held, and looks at nothing itself. On
    /// a stack of its own; where none can be had, nothing is seen.
    pub fn each_paid(&self, each: &mut dyn FnMut(Class, u64, u32)) {
        if self.has_owned() {
            let _ = stack::apart(|| self.look_at_paid(each));
        }
    }

    fn look_at_paid(&self, each: &mut dyn FnMut(Class, u64, u32)) {
        let (platform, slots) = (&self.platform, &self.slots);
        let _looking = self.looking.lock();
        for class in Class::all() {
            for node in 0..self.pages.nodes() {
                let mut starts = true;
                while self.tally(class, node, each, |cache, see| {
                    cache.full.look(core::mem::take(&mut starts), FLUSH_BATCH, see)
                }) {}
                for cpu in slots.used().iter() {
                    for id in [StackId::home(class), StackId::guests(class)] {
                        let mut from = 0;
                        while from < slots.count(platform, cpu, id) {
                            let cells = from..from + FLUSH_BATCH;
                            self.tally(class, node, each, |_, see| slots.each_seen(platform, cpu, id, cells, see));
                            from += FLUSH_BATCH;
                        }
                    }
                }
            }
        }
    }

    /// Lets `look` see a few objects under the lock of a class on a node, and then calls `each` with those of them that somebody has paid for.
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
                // SAFETY: the kind map says that the class lies there.
                let paid = unsafe { self.states.is(object.addr(), PAID) };
                // What is in that state while the lock is held stays in its slab until that is dropped, so the page keeps
                // its vector: to go back to the slab takes the lock.
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
