//! A sheaf: a handful of free objects of one class on their way between a CPU's stack and a barn, and a list of sheaves.
//!
//! Sits between the slots of the CPUs, which take and give objects by the sheaf, and the barns, which hold full and empty
//! ones. A sheaf has one owner at a time (a barn or a thread); only the owner looks inside. The memory is an object of
//! another size class: [`Sheaf::bytes`]. (SLUB's sheaves, Linux 6.18; Bonwick's magazines, 2001.)

use core::ptr::{NonNull, null_mut};

/// How many sheaves are looked at for one that suits: a line of memory each, under the barn's lock.
const LOOKED_AT: usize = 8;

/// Chains of a list: a sheaf is on the one of its home, so where there are no more CPUs than that the first one suits.
const CHAINS: usize = 4;

/// What a sheaf begins with; its cells follow.
#[repr(C)]
struct Head {
    next: *mut Head,
    count: u32,
    capacity: u16,
    home: u16,
}

/// The right to look into one sheaf.
#[derive(PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Sheaf(NonNull<Head>);

impl Sheaf {
    /// Bytes of a sheaf with `capacity` cells.
    pub const fn bytes(capacity: u32) -> usize {
        size_of::<Head>() + capacity as usize * size_of::<usize>()
    }

    /// Makes an empty sheaf in memory of the caller's.
    ///
    /// # Safety
    /// `memory` is [`Sheaf::bytes`] long, aligned to 8, and nobody else's; the capacity fits 16 bits.
    pub unsafe fn make(memory: NonNull<u8>, capacity: u32) -> Sheaf {
        let head = memory.cast::<Head>();
        // SAFETY: as the caller promises.
        unsafe { head.write(Head { next: null_mut(), count: 0, capacity: capacity as u16, home: 0 }) };
        let sheaf = Sheaf(head);
        // SAFETY: as the caller promises.
        unsafe { sheaf.cells().write_bytes(0, capacity as usize) };
        sheaf
    }

    /// The memory of a sheaf that is no more.
    pub fn into_memory(self) -> NonNull<u8> {
        self.0.cast()
    }

    fn head(&self) -> &Head {
        // SAFETY: whoever has the value owns the sheaf, whose head is initialised.
        unsafe { self.0.as_ref() }
    }

    fn head_mut(&mut self) -> &mut Head {
        // SAFETY: as above.
        unsafe { self.0.as_mut() }
    }

    fn cells(&self) -> *mut *mut u8 {
        // SAFETY: the cells follow the head.
        unsafe { self.0.add(1).as_ptr().cast() }
    }

    /// Where its memory is.
    pub(crate) fn address(&self) -> usize {
        self.0.as_ptr().addr()
    }

    /// Objects that fit.
    pub fn capacity(&self) -> usize {
        self.head().capacity as usize
    }

    /// The objects, bottom first.
    pub fn objects(&self) -> &[*mut u8] {
        // SAFETY: the cells below the count are initialised, and the caller owns the sheaf.
        unsafe { core::slice::from_raw_parts(self.cells(), self.head().count as usize) }
    }

    /// Where its objects are at home, most likely all of them.
    pub fn home(&self) -> u16 {
        self.head().home
    }

    /// Says where its objects are at home.
    pub fn set_home(&mut self, cpu: u16) {
        self.head_mut().home = cpu;
    }

    /// Puts `count` objects on top, for all of which there is room: `object` says which.
    pub fn extend(&mut self, count: usize, object: impl Fn(usize) -> *mut u8) {
        let held = self.head().count as usize;
        debug_assert!(count <= self.capacity() - held);
        let count = count.min(self.capacity() - held);
        // SAFETY: below the capacity, initialised when the sheaf was made, and the caller owns the sheaf.
        let cells = unsafe { core::slice::from_raw_parts_mut(self.cells().add(held), count) };
        cells.iter_mut().enumerate().for_each(|(n, cell)| *cell = object(n));
        self.head_mut().count += count as u32;
    }

    /// Turns the order of the objects around.
    pub fn reverse(&mut self) {
        let count = self.objects().len();
        // SAFETY: so many cells hold objects, and the caller owns the sheaf.
        unsafe { core::slice::from_raw_parts_mut(self.cells(), count) }.reverse();
    }

    /// Takes the topmost object.
    pub fn pop(&mut self) -> Option<*mut u8> {
        let object = *self.objects().last()?;
        self.head_mut().count -= 1;
        Some(object)
    }

    /// Lets `fill` write all cells of an empty sheaf, and keeps them if it says that it did.
    pub fn fill(&mut self, fill: impl FnOnce(&mut [*mut u8]) -> bool) -> bool {
        let capacity = self.head().capacity;
        // SAFETY: the cells are the caller's; a sheaf is made with all of them initialised.
        let cells = unsafe { core::slice::from_raw_parts_mut(self.cells(), capacity as usize) };
        let filled = fill(cells);
        self.head_mut().count = if filled { capacity.into() } else { 0 };
        filled
    }

    /// Moves the objects that `stays` says so of to the bottom, and answers how many they are.
    pub(crate) fn partition(&mut self, stays: impl Fn(*mut u8) -> bool) -> usize {
        let count = self.head().count as usize;
        // SAFETY: the cells below the count are initialised, and the caller owns the sheaf.
        let objects = unsafe { core::slice::from_raw_parts_mut(self.cells(), count) };
        let mut own = 0;
        for at in 0..count {
            if stays(objects[at]) {
                objects.swap(own, at);
                own += 1;
            }
        }
        own
    }

    /// Forgets the objects from the `count`th on: they are somewhere else now.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.head_mut().count = count as u32;
    }

    /// Forgets the objects: they are somewhere else now.
    pub fn clear(&mut self) {
        self.head_mut().count = 0;
    }
}

/// A list of sheaves, those of a home last in first out.
#[derive(Debug)]
pub struct SheafList {
    chains: [*mut Head; CHAINS],
    length: u32,
    /// The shortest the list has been since the last [`SheafList::working_set`].
    shortest: u32,
    looked: Look,
}

/// Where a [`SheafList::look`] goes on: a sheaf of a chain, or null at its end, and how many of its objects were seen.
#[derive(Debug)]
struct Look {
    chain: usize,
    at: *mut Head,
    seen: usize,
}

// SAFETY: the list owns its sheaves.
unsafe impl Send for SheafList {}

impl SheafList {
    /// An empty list.
    pub const fn new() -> SheafList {
        let looked = Look { chain: CHAINS, at: null_mut(), seen: 0 };
        SheafList { chains: [null_mut(); CHAINS], length: 0, shortest: 0, looked }
    }

    /// Sheaves on the list.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Puts a sheaf on the list, which owns it from now on.
    pub fn push(&mut self, mut sheaf: Sheaf) {
        let chain = &mut self.chains[usize::from(sheaf.home()) % CHAINS];
        sheaf.head_mut().next = *chain;
        *chain = sheaf.0.as_ptr();
        self.length += 1;
    }

    /// Takes a sheaf, of one home now and of another next.
    pub fn pop(&mut self) -> Option<Sheaf> {
        self.pop_from(self.length as usize % CHAINS)
    }

    /// Takes the first one of a chain, or of the next that has any.
    fn pop_from(&mut self, chain: usize) -> Option<Sheaf> {
        let mut chains = (chain..CHAINS).chain(0..chain);
        let (chain, head) = chains.find_map(|chain| Some((chain, NonNull::new(self.chains[chain])?)))?;
        // SAFETY: the list owns its sheaves.
        self.chains[chain] = unsafe { head.as_ref() }.next;
        Some(self.taken(head))
    }

    /// A sheaf that is off the list, and counted.
    fn taken(&mut self, head: NonNull<Head>) -> Sheaf {
        self.length -= 1;
        self.shortest = self.shortest.min(self.length);
        if self.looked.at == head.as_ptr() {
            // SAFETY: it was the list's until now.
            self.looked = Look { at: unsafe { head.as_ref() }.next, seen: 0, ..self.looked };
        }
        Sheaf(head)
    }

    /// Looks at the next few objects, of one sheaf, from the list's first on where it `starts`; whether there may be more. In between the list may
    /// change: a sheaf that is taken is not seen any more, one that is new may not be seen either. A list remembers one look.
    pub(crate) fn look(&mut self, starts: bool, most: usize, see: &mut dyn FnMut(*mut u8)) -> bool {
        if starts {
            self.looked = Look { chain: 0, at: self.chains[0], seen: 0 };
        }
        let Look { mut chain, mut at, seen } = self.looked;
        while at.is_null() && chain + 1 < CHAINS {
            chain += 1;
            at = self.chains[chain];
        }
        let Some(head) = NonNull::new(at) else { return false };
        let sheaf = Sheaf(head);
        let rest = sheaf.objects().get(seen..).unwrap_or(&[]);
        rest.iter().take(most).for_each(|&object| see(object));
        let (at, seen) = if rest.len() > most { (at, seen + most) } else { (sheaf.head().next, 0) };
        self.looked = Look { chain, at, seen };
        true
    }

    /// Takes a sheaf whose objects are at home on `cpu` if one is among the first few of its chain, otherwise another.
    pub fn pop_for(&mut self, cpu: u16) -> Option<Sheaf> {
        let chain = usize::from(cpu) % CHAINS;
        let mut link = &raw mut self.chains[chain];
        for _ in 0..LOOKED_AT {
            // SAFETY: the list owns its sheaves; the link is a chain's or in one of them.
            unsafe {
                // Not by reference: what leaves here leads to the cells as well.
                let Some(head) = NonNull::new(*link) else { break };
                if head.as_ref().home == cpu {
                    *link = head.as_ref().next;
                    return Some(self.taken(head));
                }
                link = &raw mut (*head.as_ptr()).next;
            }
        }
        self.pop_from(chain)
    }

    /// How many sheaves were on the list all the time since this was last asked: nobody needed them.
    pub fn working_set(&mut self) -> u32 {
        let idle = self.shortest;
        self.shortest = self.length;
        idle
    }

    /// Objects in all sheaves of the list.
    pub fn objects(&self) -> u64 {
        self.sheaves().map(|sheaf| u64::from(sheaf.head().count)).sum()
    }

    /// The sheaves, from the first; they stay the list's.
    pub(crate) fn sheaves(&self) -> impl Iterator<Item = &Sheaf> {
        // SAFETY: the list owns its sheaves, and is borrowed; a sheaf is a pointer that is not null.
        let at = |link: &*mut Head| unsafe { &*core::ptr::from_ref(link).cast::<Option<Sheaf>>() }.as_ref();
        self.chains.iter().flat_map(move |first| core::iter::successors(at(first), move |sheaf| at(&sheaf.head().next)))
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

    fn objects(count: usize) -> Vec<*mut u8> {
        (1..=count).map(|n| core::ptr::without_provenance_mut(n * 16)).collect()
    }

    #[test]
    fn a_look_goes_on_behind_sheaves_that_are_taken_meanwhile() {
        let objects = objects(12);
        let (made, _memory): (Vec<_>, Vec<_>) = (0..4).map(|_| sheaf(3)).unzip();
        let mut list = SheafList::new();
        for (mut sheaf, objects) in made.into_iter().zip(objects.chunks(3)) {
            sheaf.extend(objects.len(), |n| objects[n]);
            list.push(sheaf);
        }
        let look = |list: &mut SheafList, starts| {
            let mut seen = Vec::new();
            let more = list.look(starts, 2, &mut |object| seen.push(object.addr() / 16));
            more.then_some(seen)
        };
        // All of it, two at a time, the last sheaf first.
        let all = core::iter::successors(look(&mut list, true), |_| look(&mut list, false));
        assert_eq!(all.flatten().collect::<Vec<_>>(), [10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3]);
        // The one that it is in the midst of is taken, with the one in front of it.
        assert_eq!(
            [look(&mut list, true), look(&mut list, false), look(&mut list, false)].map(Option::unwrap).concat(),
            [10, 11, 12, 7, 8]
        );
        let taken = [list.pop().unwrap(), list.pop().unwrap()];
        assert_eq!((look(&mut list, false), look(&mut list, false)), (Some([4, 5].to_vec()), Some([6].to_vec())));
        let [first, second] = taken;
        list.push(second);
        list.push(first);
        assert_eq!(look(&mut list, false), Some([1, 2].to_vec()), "what is new is not seen");
        while list.pop().is_some() {}
        assert_eq!((look(&mut list, false), look(&mut list, true)), (None, None));
    }

    #[test]
    fn a_look_sees_sheaves_of_every_home_once() {
        let objects = objects(20);
        let (made, _memory): (Vec<_>, Vec<_>) = (0..10).map(|_| sheaf(2)).unzip();
        let mut list = SheafList::new();
        for (home, (mut sheaf, objects)) in (0..).zip(made.into_iter().zip(objects.chunks(2))) {
            sheaf.set_home(home * 5);
            sheaf.extend(objects.len(), |n| objects[n]);
            list.push(sheaf);
        }
        let (mut seen, mut starts) = (Vec::new(), true);
        while list.look(core::mem::take(&mut starts), 1, &mut |object| seen.push(object)) {
            // The one that it is in the midst of, the last of its chain, goes: the next chain is next.
            if seen.len() == 5 {
                assert_eq!(list.pop_for(0).unwrap().objects(), &objects[..2]);
            }
        }
        seen.sort_unstable();
        assert_eq!((seen[0], &seen[1..]), (objects[0], &objects[2..]), "each once, but the one that went");
        assert_eq!((list.length(), list.sheaves().count()), (9, 9));
    }

    #[test]
    fn a_sheaf_is_a_stack() {
        let (mut sheaf, _memory) = sheaf(3);
        let objects = objects(3);
        for (count, objects) in [(0, &objects[..0]), (1, &objects[..1]), (2, &objects[1..])] {
            sheaf.extend(count, |n| objects[n]);
        }
        assert_eq!(sheaf.objects(), objects);
        assert_eq!((sheaf.pop(), sheaf.objects().len()), (Some(objects[2]), 2));
        sheaf.clear();
        assert_eq!(sheaf.pop(), None);
    }

    #[test]
    fn a_sheaf_is_parted_and_cut() {
        let (mut sheaf, _memory) = sheaf(6);
        let objects = objects(6);
        sheaf.extend(objects.len(), |n| objects[n]);
        assert_eq!(sheaf.partition(|object| object.addr() % 32 == 16), 3);
        let mut parts: Vec<Vec<usize>> =
            sheaf.objects().chunks(3).map(|part| part.iter().map(|p| p.addr()).collect()).collect();
        parts.iter_mut().for_each(|part| part.sort_unstable());
        assert_eq!(parts, [[16, 48, 80], [32, 64, 96]]);
        sheaf.truncate(3);
        assert_eq!(sheaf.objects().len(), 3);
    }

    #[test]
    fn a_filled_sheaf_keeps_its_cells_only_if_they_were_written() {
        let (mut sheaf, _memory) = sheaf(3);
        let objects = objects(3);
        assert!(!sheaf.fill(|_| false) && sheaf.objects().is_empty());
        assert!(sheaf.fill(|cells| {
            cells.copy_from_slice(&objects);
            true
        }));
        assert_eq!(sheaf.objects(), objects);
    }

    #[test]
    fn a_sheaf_that_is_at_home_is_taken_first() {
        let (mut list, mut memories) = (SheafList::new(), Vec::new());
        for home in [2, 1, 2, 3, 1, 3] {
            let (mut sheaf, memory) = sheaf(1);
            sheaf.set_home(home);
            list.push(sheaf);
            memories.push(memory);
        }
        let taken: Vec<u16> = [2, 1, 7, 1, 1].map(|cpu| list.pop_for(cpu).unwrap().home()).into();
        assert_eq!(
            taken,
            [2, 1, 3, 1, 2],
            "the one that suits, wherever it is; or else one of the same chain, or of the next"
        );
        assert_eq!((list.length(), list.pop_for(9).unwrap().home()), (1, 3));
        assert_eq!((list.length(), list.pop_for(9)), (0, None));
    }

    #[test]
    fn the_working_set_is_what_was_needed() {
        let mut list = SheafList::new();
        let mut memories = Vec::new();
        for _ in 0..4 {
            let (sheaf, memory) = sheaf(1);
            list.push(sheaf);
            memories.push(memory);
        }
        assert_eq!(list.working_set(), 0, "before now the list was empty once");
        assert_eq!(list.working_set(), 4, "nothing was needed");
        let two = [list.pop().unwrap(), list.pop().unwrap()];
        two.into_iter().for_each(|sheaf| list.push(sheaf));
        assert_eq!((list.working_set(), list.length(), list.objects()), (2, 4, 0));
    }
}
