//! Moves objects between a CPU's stacks and the barn, a sheaf at a time. If the barn has no sheaf
//! with objects, a refill takes objects from slabs.
//!
//! # Design
//!
//! A refill moves objects to a stack, and a spill moves objects to the barn. Either moves about
//! half of the objects that the stack has room for, or all of them in a burst.
//!
//! # Locking
//!
//! A thread holds one class's mutex at a time. A spill of a remote stack only tries the mutex. If
//! another thread holds it, the object goes on the local stack of this CPU. In a burst other
//! threads wait for the mutex, so a call takes it few times. A refill takes the mutex once for the
//! objects of a barn or of existing slabs, and again to put sheaves back. A spill takes the mutex
//! once for empty sheaves, or twice if it can bind only some objects, and again to put sheaves
//! back. Threads write the state bytes of objects from slabs without the mutex.

use crate::class_cache::{Direction, Row};
use crate::cpu_caches::Attempt;
use crate::kind_map::KindEntry;
use crate::object_state::CACHED;
use crate::objects::Objects;
use crate::region::StackId;
use crate::sheaf::{STRIDED_RUNS, Sheaf, SheafKind, SheafList};
use crate::size_class::Class;
use crate::strided_run::{self, StridedRun};
use core::sync::atomic::Ordering;
use neap_base::Platform;
use neap_base::gate::Inside;

/// A refill may get a sheaf whose [home](KindEntry) is another CPU. It then looks at every
/// `HOME_SAMPLE_STEP`th object of the sheaf, and makes this CPU the home of the part of a slab
/// where the object lies. If no other CPU uses the objects, all parts soon have this home. If
/// another CPU does, few entries of the kind map change.
const HOME_SAMPLE_STEP: usize = 16;

/// After this number of refills in a row, a refill from the barn gives the stack more room. Each
/// sheaf of remote objects that goes to the barn meanwhile reduces the number by one. The objects
/// that the stack may keep are then few, compared with those that the program took.
const LONG_STREAK_REFILLS: u32 = 64;

/// Number of sheaves that are not bound after an attempt to make a bound sheaf got no memory.
const UNBOUND_AFTER_FAILURE: u32 = 256;

impl<P: Platform> Objects<P> {
    /// Moves a batch of sheaves of objects to this CPU's stack, and returns one of them.
    pub(crate) fn refill(&self, inside: &Inside<'_>, class: Class) -> Option<*mut u8> {
        let (stack, cpu) = (StackId::local(class), self.platform.cpu() as u16);
        let room = self.cpu_caches.room(&self.platform, cpu.into(), stack);
        let (mut full, mut used) = (SheafList::new(), SheafList::new());
        let (streak, empty) = {
            let node = self.pages.nearest(&self.platform);
            let mut cache = self.cache(node, class).lock();
            let streak = cache.streak(Direction::Refill);
            let batch = batch(stack, room, streak);
            take_for(cpu, batch, &mut cache.full, &mut full);
            let mut empty = if full.length() == 0 { cache.empty.pop_for(cpu) } else { None };
            if let Some(sheaf) = &mut empty {
                // Takes objects under this hold of the lock, since other threads wait for the lock
                // in a burst.
                // SAFETY: the class's mutex is held, and `slabs` is the table of its slabs.
                unsafe { cache.take(&self.slabs, sheaf.capacity(), |row| self.load_row(class, &row, sheaf)) };
            }
            (streak, empty)
        };
        if streak >= LONG_STREAK_REFILLS && full.length() > 0 && room < stack.capacity() {
            let _ = self.cpu_caches.raise_capacity(inside, &self.platform, stack, room + stack.first_capacity());
        }
        let mut object = None;
        while let Some(mut sheaf) = full.pop() {
            if sheaf.home() != cpu {
                sheaf.sample(HOME_SAMPLE_STEP).for_each(|object| self.move_home(class, object, cpu));
            }
            object = object.or_else(|| sheaf.pop());
            self.unload(inside, class, &mut sheaf);
            used.push(sheaf);
        }
        if object.is_none() {
            // Without an empty sheaf, takes the caller's object first. Otherwise a new sheaf might
            // take the last memory.
            let sheaf = empty.or_else(|| {
                object = self.take_one(inside, class);
                object.and_then(|_| self.new_sheaf(class, SheafKind::Plain))
            });
            if let Some(mut sheaf) = sheaf {
                self.fill(inside, class, &mut sheaf);
                object = object.or_else(|| sheaf.pop());
                self.unload(inside, class, &mut sheaf);
                used.push(sheaf);
            }
        }
        self.stow(class, used, Direction::Refill);
        object
    }

    /// Moves the objects of a sheaf to this CPU's local stack. Gives the stack its first capacity
    /// if the stack refuses objects. If the stack still refuses objects, or its slot is busy, the
    /// remaining objects stay in the sheaf.
    fn unload(&self, inside: &Inside<'_>, class: Class, sheaf: &mut Sheaf) {
        let stack = StackId::local(class);
        let push = |sheaf: &Sheaf| match sheaf.strided_runs().next() {
            Some(lowest) => self.cpu_caches.push_strided_run(&self.platform, stack, &lowest),
            None => self.cpu_caches.push_many(&self.platform, stack, sheaf.cells()),
        };
        while !sheaf.is_empty() {
            let mut moved = push(sheaf);
            if moved == Attempt::Refused {
                // A drain took the stack, or no thread has used it yet.
                let _ = self.cpu_caches.raise_capacity(inside, &self.platform, stack, stack.first_capacity());
                moved = push(sheaf);
            }
            match moved {
                Attempt::Done(()) if sheaf.is_bound() => sheaf.forget_lowest(),
                Attempt::Done(()) => sheaf.clear(),
                _ => break,
            }
        }
    }

    /// Fills a sheaf with objects from slabs until it is at least half full, and marks them as
    /// cached. Makes new slabs if necessary. Then reverses the sheaf, so that pops from its top
    /// return ascending addresses, which processors prefetch.
    fn fill(&self, inside: &Inside<'_>, class: Class, sheaf: &mut Sheaf) {
        let mut marked = 0;
        loop {
            self.mark_taken(class, &sheaf.cells()[marked..]);
            marked = sheaf.cells().len();
            let rest = sheaf.capacity() - marked;
            if marked >= rest || self.take(inside, class, rest, |row| self.load_row(class, &row, sheaf)) == 0 {
                break;
            }
        }
        sheaf.reverse();
    }

    /// Puts a row that was just taken from its slab on top of a sheaf.
    fn load_row(&self, class: Class, row: &Row, sheaf: &mut Sheaf) {
        let first = self.first_of(class, row);
        sheaf.extend(row.objects.len(), |n| first.wrapping_add(n * class.size()));
    }

    /// Takes one object out of slabs and marks it as cached.
    pub(crate) fn take_one(&self, inside: &Inside<'_>, class: Class) -> Option<*mut u8> {
        let mut object = None;
        self.take(inside, class, 1, |row| object = Some(self.first_of(class, &row)));
        self.mark_taken(class, object.as_slice());
        object
    }

    /// Marks objects that were just taken out of slabs as cached, and makes this CPU their home.
    fn mark_taken(&self, class: Class, objects: &[*mut u8]) {
        let (cpu, mask, mut part) = (self.platform.cpu() as u16, !(class.home_bytes() - 1), usize::MAX);
        for &object in objects {
            // SAFETY: the object was just taken out of a slab, so it lies in the arena and is this
            // thread's alone.
            unsafe { self.states.set(object.addr(), CACHED) };
            if object.addr() & mask != part {
                part = object.addr() & mask;
                self.move_home(class, object, cpu);
            }
        }
    }

    /// Makes a CPU the home of the part of a slab in which an object lies. The caller has the
    /// object.
    fn move_home(&self, class: Class, object: *mut u8, cpu: u16) {
        let bytes = class.home_bytes();
        let start = object.wrapping_sub(object.addr() & (bytes - 1));
        (0..bytes)
            .step_by(1 << KindEntry::SHIFT)
            .for_each(|offset| self.kind_entry(start.wrapping_add(offset)).set_home(cpu));
    }

    /// Moves a batch of sheaves of objects from a stack of this CPU to the barn, then pushes
    /// `object`, whose home is `home`.
    pub(crate) fn spill(&self, inside: &Inside<'_>, stack: StackId, home: u16, object: *mut u8) {
        let class = stack.class();
        let cache = self.near(class);
        let room = self.cpu_caches.room(&self.platform, self.platform.cpu(), stack);
        // Remote objects return to the barn for speed only. If another thread holds the barn's
        // lock, the object goes on the local stack, so that this thread does not wait.
        let Some(mut cache) = (if stack.is_remote() { cache.try_lock() } else { Some(cache.lock()) }) else {
            let here = StackId::local(class);
            if self.cpu_caches.push(&self.platform, here, object) != Attempt::Done(()) {
                // The objects of that stack have this CPU as home.
                self.spill(inside, here, self.platform.cpu() as u16, object);
            }
            return;
        };
        let streak = if stack.is_remote() { 0 } else { cache.streak(Direction::Spill) };
        let batch = batch(stack, room, streak);
        // Prefers the empty sheaves that this CPU emptied last. While `bind` succeeds, one plain
        // sheaf is enough, since it is empty again afterwards. Once `bind` fails, the loop takes
        // all plain sheaves that it may need.
        let (mut empty, mut empty_bound, mut loaded) = (SheafList::new(), SheafList::new(), SheafList::new());
        let cpu = self.platform.cpu() as u16;
        let mut more = binds(class);
        take_for(cpu, if more { 1 } else { batch }, &mut cache.empty, &mut empty);
        take_for(cpu, batch, &mut cache.empty_bound, &mut empty_bound);
        drop(cache);
        for n in 0..batch {
            if n > 0 && more && empty.length() == 0 {
                more = false;
                take_for(cpu, batch - n, &mut self.near(class).lock().empty, &mut empty);
            }
            let Some(mut sheaf) = empty.pop().or_else(|| self.sheaf_for_frees(class)) else { break };
            let done = self.load(inside, stack, home, &mut sheaf);
            if let Some(bound) = self.bind(class, &mut sheaf, &mut empty_bound) {
                loaded.push(bound);
                empty.push(sheaf);
            } else {
                loaded.push(sheaf);
            }
            if !done {
                break;
            }
        }
        while let Some(mut sheaf) = empty.pop().or_else(|| empty_bound.pop()) {
            sheaf.set_home(cpu);
            loaded.push(sheaf);
        }
        self.stow(class, loaded, Direction::Spill);
        if self.cpu_caches.push(&self.platform, stack, object) != Attempt::Done(()) {
            self.free_directly(class, object);
        }
    }

    /// Moves the objects of a plain sheaf into a bound one, and returns that, if a few strided runs
    /// hold all objects and this saves much memory. Most sheaves of a burst then take little
    /// memory, and threads need not read their cells again.
    fn bind(&self, class: Class, sheaf: &mut Sheaf, empty_bound: &mut SheafList) -> Option<Sheaf> {
        if sheaf.is_empty() || !binds(class) {
            return None;
        }
        let (strided_runs, count) = strided_run::few::<STRIDED_RUNS>(sheaf.cells(), class.size())?;
        if self.pages.nodes() > 1 {
            // Segments of a node are longer than the objects of a sheaf. If both ends of a
            // strided run are of one node, all of it is.
            let node = self.node_of(sheaf.cells()[0]);
            let is_there = |of: StridedRun| [of.first, of.last()].iter().all(|&end| self.node_of(end) == node);
            if !strided_runs[..count].iter().all(|packed| is_there(packed.unpack(class.size()))) {
                return None;
            }
        }
        let mut bound = empty_bound.pop().or_else(|| self.new_bound(class))?;
        bound.set_home(sheaf.home());
        if !bound.bind(&strided_runs[..count]) {
            empty_bound.push(bound);
            return None;
        }
        sheaf.clear();
        Some(bound)
    }

    /// Makes an empty bound sheaf. After a failure, the next `UNBOUND_AFTER_FAILURE` calls fail at
    /// once. The search for a page may take long then, and a free does not need a bound sheaf.
    fn new_bound(&self, class: Class) -> Option<Sheaf> {
        // Relaxed: heuristic; it publishes no other data.
        let left_unbound = self.left_unbound.load(Ordering::Relaxed);
        if left_unbound > 0 {
            self.left_unbound.store(left_unbound - 1, Ordering::Relaxed);
            return None;
        }
        let sheaf = self.new_sheaf(class, SheafKind::Bound);
        if sheaf.is_none() {
            self.left_unbound.store(UNBOUND_AFTER_FAILURE, Ordering::Relaxed);
        }
        sheaf
    }

    /// Fills an empty sheaf from a stack of this CPU. Returns `false` and leaves the sheaf empty if
    /// the stack is busy, has no room, or has too few objects.
    fn load(&self, inside: &Inside<'_>, stack: StackId, home: u16, sheaf: &mut Sheaf) -> bool {
        sheaf.set_home(home);
        let filled = sheaf.fill(|cells| self.cpu_caches.pop_many(&self.platform, stack, cells) == Attempt::Done(()));
        if !filled {
            // A stack that is not full and refuses was taken by a drain, or never used. Give it
            // room.
            let _ = self.cpu_caches.raise_capacity(inside, &self.platform, stack, stack.first_capacity());
        }
        filled
    }
}

/// Whether sheaves of a class may be bound. They may if a plain sheaf takes more than twice the
/// memory of a bound one.
fn binds(class: Class) -> bool {
    2 * Sheaf::bytes(0) < Sheaf::bytes(class.sheaf_capacity())
}

/// Moves up to `most` sheaves from one list to another, preferring those whose home is `cpu`.
fn take_for(cpu: u16, most: u32, from: &mut SheafList, to: &mut SheafList) {
    (0..most).map_while(|_| from.pop_for(cpu)).for_each(|sheaf| to.push(sheaf));
}

/// Number of sheaves that a call moves between the barn and a stack with room for `room` objects.
/// It is half of the sheaves that fit, so that the next call may go in either direction. In a
/// burst, when the previous call moved sheaves in the same direction, it is all of them.
fn batch(stack: StackId, room: u32, streak: u32) -> u32 {
    let fit = room.max(stack.first_capacity()) / stack.class().sheaf_capacity();
    if streak > 0 { fit } else { (fit / 2).max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance::{CONFIG, Opened, machine};
    use std::vec::Vec;

    #[test]
    fn what_of_a_bound_sheaf_does_not_fit_stays_in_it() {
        let o = Opened::new(machine(1), &CONFIG).unwrap();
        let class = Class::of_size(64);
        let mut held = Vec::from(o.take_many(class, 3000));
        held.sort_unstable();
        // Rows of five, eight and two.
        let objects: Vec<_> = [0..5, 10..18, 30..32].iter().flat_map(|row| held[row.clone()].to_vec()).collect();
        held.retain(|object| !objects.contains(object));
        objects.iter().for_each(|&object| assert!(o.disown(object)));
        let (few, count) = strided_run::few::<STRIDED_RUNS>(&objects, class.size()).unwrap();
        let mut sheaf = o.new_sheaf(class, SheafKind::Bound).unwrap();
        assert!(sheaf.bind(&few[..count]));
        let stack = StackId::local(class);
        let room = |o: &Opened<_>| o.cpu_caches.room(&o.platform, 0, stack) - o.stacked(0, class);
        while room(&o) != 7 {
            o.give(class, held.pop().unwrap());
        }
        Inside::assume(|inside| o.unload(inside, class, &mut sheaf));
        assert_eq!((room(&o), sheaf.objects().collect::<Vec<_>>()), (2, objects[5..].to_vec()));
        assert_eq!(o.take(class), Some(objects[4]), "the last that went");
        o.give(class, objects[4]);
        let mut list = SheafList::new();
        list.push(sheaf);
        o.stow(class, list, Direction::Refill);
        assert_eq!(o.prove().allocated as usize, held.len());
        held.into_iter().for_each(|object| o.give(class, object));
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}
