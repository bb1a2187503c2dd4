//! Objects by the sheaf, between a CPU's stacks and the barn of their class, and from slabs where that has none.
//!
//! Sits between `malloc` and `free` of a stack that is empty or full, and barns and slabs. How much goes at once is decided here: half of
//! what fits, or all of it in a burst. Locks: a class cache's mutex at a time, once for a refill from slabs that are there, since in a
//! burst others wait for it, and once to put sheaves back; twice to take some for a spill that can bind only a part. The state bytes of what slabs give are written outside.

use crate::class_cache::{Row, Way};
use crate::hot::KindEntry;
use crate::objects::Objects;
use crate::progression::{self, Progression};
use crate::region::StackId;
use crate::sheaf::{PROGRESSIONS, Sheaf, SheafList};
use crate::size_class::Class;
use crate::slots::Attempt;
use crate::state::CACHED;
use core::sync::atomic::Ordering;
use neap_base::Platform;

/// Of so many objects in a row that come from another CPU by the sheaf, one makes its part of a slab at home here: soon all are if nobody else
/// uses them, and little is written if somebody does.
const SETTLED: usize = 16;

/// After so many refills in a row, less the sheaves that came back from other CPUs meanwhile, a stack that the barn serves gets more room: what
/// it may keep then is little beside what the program took.
const LONG: u32 = 64;

/// Sheaves that stay as they are after there was no memory to bind one with.
const PATIENCE: u32 = 256;

impl<P: Platform> Objects<P> {
    /// Moves a batch of sheaves' worth of objects to this CPU's stack and answers one of them.
    pub(crate) fn refill(&self, class: Class) -> Option<*mut u8> {
        let (stack, cpu) = (StackId::home(class), self.platform.cpu() as u16);
        let room = self.slots.room(&self.platform, cpu.into(), stack);
        let (mut full, mut used) = (SheafList::new(), SheafList::new());
        let (streak, empty) = {
            let node = self.pages.nearest(&self.platform);
            let mut cache = self.cache(node, class).lock();
            let streak = cache.streak(Way::Refill);
            let batch = batch(stack, room, streak);
            take_for(cpu, batch, &mut cache.full, &mut full);
            let mut empty = if full.length() == 0 { cache.empty.pop_for(cpu) } else { None };
            if let Some(sheaf) = &mut empty {
                // At once, and not under the lock a second time: others wait for it in a burst.
                // SAFETY: the lock is held.
                unsafe { cache.take(&self.slabs, sheaf.capacity(), |row| self.load_row(class, &row, sheaf)) };
            }
            (streak, empty)
        };
        if streak >= LONG && full.length() > 0 && room < stack.capacity() {
            let _ = self.slots.widen(&self.platform, stack, room + stack.first_capacity());
        }
        let mut object = None;
        while let Some(mut sheaf) = full.pop() {
            if sheaf.home() != cpu {
                sheaf.sample(SETTLED).for_each(|object| self.move_home(class, object, cpu));
            }
            object = object.or_else(|| sheaf.pop());
            self.unload(class, &mut sheaf);
            used.push(sheaf);
        }
        if object.is_none() {
            // Without a sheaf the caller's object first: it must not lack the memory that a new one takes.
            let sheaf = empty.or_else(|| {
                object = self.take_one(class);
                object.and_then(|_| self.new_sheaf(class, false))
            });
            if let Some(mut sheaf) = sheaf {
                self.fill(class, &mut sheaf);
                object = object.or_else(|| sheaf.pop());
                self.unload(class, &mut sheaf);
                used.push(sheaf);
            }
        }
        self.stow(class, used);
        object
    }

    /// Moves what is in a sheaf to this CPU's stack of home objects, as far as that can be had.
    fn unload(&self, class: Class, sheaf: &mut Sheaf) {
        let stack = StackId::home(class);
        let push = |sheaf: &Sheaf| match sheaf.progressions().next() {
            Some(lowest) => self.slots.push_progression(&self.platform, stack, &lowest),
            None => self.slots.push_many(&self.platform, stack, sheaf.cells()),
        };
        while !sheaf.is_empty() {
            let mut moved = push(sheaf);
            if moved == Attempt::Refused {
                // It was taken, or never used.
                let _ = self.slots.widen(&self.platform, stack, stack.first_capacity());
                moved = push(sheaf);
            }
            match moved {
                Attempt::Done(()) if sheaf.is_bound() => sheaf.forget_lowest(),
                Attempt::Done(()) => sheaf.clear(),
                _ => break,
            }
        }
    }

    /// Fills a sheaf further from slabs, with new ones until it is at least half full, and marks what is in it, so that what is taken from its
    /// top goes upward in memory, as processors fetch ahead.
    fn fill(&self, class: Class, sheaf: &mut Sheaf) {
        let mut marked = 0;
        loop {
            self.mark_taken(class, &sheaf.cells()[marked..]);
            marked = sheaf.cells().len();
            let rest = sheaf.capacity() - marked;
            if marked >= rest || self.take(class, rest, |row| self.load_row(class, &row, sheaf)) == 0 {
                break;
            }
        }
        sheaf.reverse();
    }

    /// Puts a row that was just taken on top of a sheaf.
    fn load_row(&self, class: Class, row: &Row, sheaf: &mut Sheaf) {
        let first = self.first_of(class, row);
        sheaf.extend(row.objects.len(), |n| first.wrapping_add(n * class.size()));
    }

    /// One object out of slabs, marked as cached.
    pub(crate) fn take_one(&self, class: Class) -> Option<*mut u8> {
        let mut object = None;
        self.take(class, 1, |row| object = Some(self.first_of(class, &row)));
        self.mark_taken(class, object.as_slice());
        object
    }

    /// Marks objects that were just taken out of slabs as cached; they are at home here from now on.
    fn mark_taken(&self, class: Class, objects: &[*mut u8]) {
        let (cpu, mask, mut part) = (self.platform.cpu() as u16, !(class.home_bytes() - 1), usize::MAX);
        for &object in objects {
            // SAFETY: the object lies in the arena and is this thread's.
            unsafe { self.states.set(object.addr(), CACHED) };
            if object.addr() & mask != part {
                part = object.addr() & mask;
                self.move_home(class, object, cpu);
            }
        }
    }

    /// Makes a CPU the home of the pages around an object of the caller's.
    fn move_home(&self, class: Class, object: *mut u8, cpu: u16) {
        let bytes = class.home_bytes();
        let start = object.wrapping_sub(object.addr() & (bytes - 1));
        (0..bytes)
            .step_by(1 << KindEntry::SHIFT)
            .for_each(|offset| self.kind_entry(start.wrapping_add(offset)).set_home(cpu));
    }

    /// Moves a batch of sheaves' worth of objects from a stack of this CPU to the barn, so that there is room for `object`,
    /// which is at home on `home`.
    pub(crate) fn spill(&self, stack: StackId, home: u16, object: *mut u8) {
        let class = stack.class();
        let cache = self.near(class);
        let room = self.slots.room(&self.platform, self.platform.cpu(), stack);
        // Guests go home for the sake of speed: where many CPUs are at the barn, they stay here instead of waiting for it.
        let Some(mut cache) = (if stack.is_for_guests() { cache.try_lock() } else { Some(cache.lock()) }) else {
            let here = StackId::home(class);
            if self.slots.push(&self.platform, here, object) != Attempt::Done(()) {
                // What is in that stack is at home here.
                self.spill(here, self.platform.cpu() as u16, object);
            }
            return;
        };
        let streak = if stack.is_for_guests() { 0 } else { cache.streak(Way::Spill) };
        let batch = batch(stack, room, streak);
        // The last ones that this CPU emptied, if they are there. Of those with cells one, which serves again as long as what was in it can be
        // bound; when it was not, all that may be needed.
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
            let done = self.load(stack, home, &mut sheaf);
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
        self.stow(class, loaded);
        if self.slots.push(&self.platform, stack, object) != Attempt::Done(()) {
            self.free_directly(class, object);
        }
    }

    /// Moves what is in a plain sheaf into a bound one if a few progressions are all of it and that saves much: most of a burst's sheaves need
    /// no memory to speak of then, and what is in them is not read from there again.
    fn bind(&self, class: Class, sheaf: &mut Sheaf, empty_bound: &mut SheafList) -> Option<Sheaf> {
        if sheaf.is_empty() || !binds(class) {
            return None;
        }
        let (progressions, count) = progression::few::<PROGRESSIONS>(sheaf.cells(), class.size())?;
        if self.pages.nodes() > 1 {
            // Segments of a node are longer than what a sheaf holds: if the ends of a progression are of one, so is the rest.
            let node = self.node_of(sheaf.cells()[0]);
            let is_there = |of: Progression| [of.first, of.last()].iter().all(|&end| self.node_of(end) == node);
            if !progressions[..count].iter().all(|packed| is_there(packed.unpack(class.size()))) {
                return None;
            }
        }
        let mut bound = empty_bound.pop().or_else(|| self.new_bound(class))?;
        bound.set_home(sheaf.home());
        if !bound.bind(&progressions[..count]) {
            empty_bound.push(bound);
            return None;
        }
        sheaf.clear();
        Some(bound)
    }

    /// An empty bound sheaf. Where there was no memory for one, the next few go without: asking the pages then may take long, and a free has
    /// another way.
    fn new_bound(&self, class: Class) -> Option<Sheaf> {
        // Relaxed: a number that nothing hangs on.
        let patience = self.patience.load(Ordering::Relaxed);
        if patience > 0 {
            self.patience.store(patience - 1, Ordering::Relaxed);
            return None;
        }
        let sheaf = self.new_sheaf(class, true);
        if sheaf.is_none() {
            self.patience.store(PATIENCE, Ordering::Relaxed);
        }
        sheaf
    }

    /// Fills an empty sheaf from a stack of this CPU; `false` if that cannot be had.
    fn load(&self, stack: StackId, home: u16, sheaf: &mut Sheaf) -> bool {
        sheaf.set_home(home);
        let filled = sheaf.fill(|cells| self.slots.pop_many(&self.platform, stack, cells) == Attempt::Done(()));
        if !filled {
            // A stack that is not full has no room because it was taken, or never used: give it some.
            let _ = self.slots.widen(&self.platform, stack, stack.first_capacity());
        }
        filled
    }
}

/// Whether sheaves of a class may be bound: those that take more than twice as much with cells.
fn binds(class: Class) -> bool {
    2 * Sheaf::bytes(0) < Sheaf::bytes(class.sheaf_capacity())
}

/// Moves up to `most` sheaves from one list to another, those first that a CPU had last.
fn take_for(cpu: u16, most: u32, from: &mut SheafList, to: &mut SheafList) {
    (0..most).map_while(|_| from.pop_for(cpu)).for_each(|sheaf| to.push(sheaf));
}

/// Sheaves that a call moves between barn and a stack with so much room: half of what fits, so that the next call may go
/// either way; all of it in a burst, where calls before it moved some the same way.
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
        let (few, count) = progression::few::<PROGRESSIONS>(&objects, class.size()).unwrap();
        let mut sheaf = o.new_sheaf(class, true).unwrap();
        assert!(sheaf.bind(&few[..count]));
        let stack = StackId::home(class);
        let room = |o: &Opened<_>| o.slots.room(&o.platform, 0, stack) - o.stacked(0, class);
        while room(&o) != 7 {
            o.give(class, held.pop().unwrap());
        }
        o.unload(class, &mut sheaf);
        assert_eq!((room(&o), sheaf.objects().collect::<Vec<_>>()), (2, objects[5..].to_vec()));
        assert_eq!(o.take(class), Some(objects[4]), "the last that went");
        o.give(class, objects[4]);
        let mut list = SheafList::new();
        list.push(sheaf);
        o.stow(class, list);
        assert_eq!(o.prove().allocated as usize, held.len());
        held.into_iter().for_each(|object| o.give(class, object));
        o.drain();
        assert_eq!(o.prove().slabs, 0);
    }
}
