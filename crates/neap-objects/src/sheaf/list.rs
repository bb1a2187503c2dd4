//! A list of sheaves: one of a barn's three lists, or the sheaves that a thread moves.
//!
//! # Design
//!
//! A list has several chains. A sheaf lies on the chain of its [home](crate::kind_map::KindEntry)
//! CPU, so that the first sheaf of a chain usually suits the CPU that takes one. A list owns its
//! sheaves. It reads their objects only to count them and in [`SheafList::look`].
//!
//! # Locking
//!
//! This module has no lock. The mutex of the class cache guards the lists of its barn.

use super::{Head, Sheaf};
use core::mem::offset_of;
use core::ptr::{NonNull, null_mut};

/// The most sheaves that [`SheafList::pop_for`] checks for a home. Each check reads a cache line
/// under the barn's lock.
const EXAMINED_SHEAVES_MAX: usize = 8;

/// Number of chains of a list. A sheaf lies on the chain of its home. With no more CPUs than
/// chains, the first sheaf of a chain has the right home.
const CHAINS: usize = 4;

/// Number of sheaves, by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SheafCounts {
    /// Plain ones.
    pub plain: u32,
    /// Bound ones.
    pub bound: u32,
}

/// A list of sheaves: last in, first out for sheaves of one home.
#[derive(Debug)]
pub struct SheafList {
    chains: [*mut Head; CHAINS],
    length: u32,
    /// Number of bound sheaves on the list.
    bound: u32,
    /// Number of objects in all sheaves. A sheaf does not change while it is on the list.
    objects: u64,
    /// The shortest length since the last [`SheafList::working_set`].
    shortest: u32,
    looked: Look,
}

/// The position of a [`SheafList::look`]: a sheaf of a chain, or null at its end, and the number of
/// its objects that were seen.
#[derive(Debug)]
struct Look {
    chain: usize,
    at: *mut Head,
    seen: usize,
}

/// Offsets in a list and in a sheaf, for readers of this process's memory.
pub(crate) struct SheafLayout {
    pub(crate) chains_at: usize,
    /// Number of chains, words with the first sheaf of each.
    pub(crate) chains: usize,
    pub(crate) next: usize,
    pub(crate) count: usize,
    pub(crate) capacity: usize,
    /// Offset of the cells or strided runs.
    pub(crate) contents: usize,
}

/// Returns the offsets in a list and in a sheaf.
pub(crate) const fn sheaf_layout() -> SheafLayout {
    SheafLayout {
        chains_at: offset_of!(SheafList, chains),
        chains: CHAINS,
        next: offset_of!(Head, next),
        count: offset_of!(Head, count),
        capacity: offset_of!(Head, capacity),
        contents: size_of::<Head>(),
    }
}

// SAFETY: the list owns its sheaves, whose memory belongs to no thread.
unsafe impl Send for SheafList {}

impl SheafList {
    /// An empty list.
    pub const fn new() -> SheafList {
        let looked = Look { chain: CHAINS, at: null_mut(), seen: 0 };
        SheafList { chains: [null_mut(); CHAINS], length: 0, bound: 0, objects: 0, shortest: 0, looked }
    }

    /// Number of sheaves on the list.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Number of sheaves on the list, by kind.
    pub fn lengths(&self) -> SheafCounts {
        SheafCounts { plain: self.length - self.bound, bound: self.bound }
    }

    /// Puts a sheaf on the list, which owns it then.
    pub fn push(&mut self, mut sheaf: Sheaf) {
        let chain = &mut self.chains[usize::from(sheaf.home()) % CHAINS];
        sheaf.head_mut().next = *chain;
        *chain = sheaf.0.as_ptr();
        self.length += 1;
        self.bound += u32::from(sheaf.is_bound());
        self.objects += sheaf.length() as u64;
        debug_assert!(self.has_sound_counts());
    }

    /// Whether the counts can be those of one list.
    fn has_sound_counts(&self) -> bool {
        let has_none = self.objects == 0 && self.chains.iter().all(|chain| chain.is_null());
        self.bound <= self.length && self.shortest <= self.length && (self.length > 0 || has_none)
    }

    /// Takes a sheaf. Successive calls take from different chains.
    pub fn pop(&mut self) -> Option<Sheaf> {
        self.pop_from(self.length as usize % CHAINS)
    }

    /// Takes a plain sheaf if the first sheaf of a chain is plain; `None` otherwise.
    pub fn pop_plain(&mut self) -> Option<Sheaf> {
        // SAFETY: a chain is null or points to a sheaf of the list, which owns it.
        let capacity = |chain: &*mut Head| unsafe { chain.as_ref() }.map_or(0, |head| head.capacity);
        let chain = self.chains.iter().position(|chain| capacity(chain) > 0)?;
        self.pop_from(chain)
    }

    /// Takes the first sheaf of a chain, or of the next chain that has any.
    fn pop_from(&mut self, chain: usize) -> Option<Sheaf> {
        let mut chains = (chain..CHAINS).chain(0..chain);
        let (chain, head) = chains.find_map(|chain| Some((chain, NonNull::new(self.chains[chain])?)))?;
        // SAFETY: the first sheaf of a chain belongs to the list.
        self.chains[chain] = unsafe { head.as_ref() }.next;
        Some(self.taken(head))
    }

    /// Subtracts a sheaf that was taken off its chain from the counts, and returns it.
    fn taken(&mut self, head: NonNull<Head>) -> Sheaf {
        self.length -= 1;
        self.shortest = self.shortest.min(self.length);
        if self.looked.at == head.as_ptr() {
            // SAFETY: the caller took the sheaf off a chain of the list, which owned it until now.
            self.looked = Look { at: unsafe { head.as_ref() }.next, seen: 0, ..self.looked };
        }
        let sheaf = Sheaf(head);
        self.bound -= u32::from(sheaf.is_bound());
        self.objects -= sheaf.length() as u64;
        debug_assert!(self.has_sound_counts());
        sheaf
    }

    /// Shows at most `most` objects of one sheaf to `see`, the ones that follow those of the last
    /// call. If `starts` is true, begins with the list's first sheaf. Returns whether there may be
    /// more objects. The list may change between calls: the look skips a sheaf that was taken, and
    /// may miss a new one. A list keeps one position only.
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
        sheaf.objects().skip(seen).take(most).for_each(see);
        let more = sheaf.length() > seen + most;
        let (at, seen) = if more { (at, seen + most) } else { (sheaf.head().next, 0) };
        self.looked = Look { chain, at, seen };
        true
    }

    /// Takes a sheaf with the home `cpu` if one is among the first few of its chain, otherwise
    /// another one.
    pub fn pop_for(&mut self, cpu: u16) -> Option<Sheaf> {
        let chain = usize::from(cpu) % CHAINS;
        let mut link = &raw mut self.chains[chain];
        for _ in 0..EXAMINED_SHEAVES_MAX {
            // SAFETY: the link is a chain's, or that of a sheaf of the list, which owns it.
            unsafe {
                // Raw pointers, not references: the result gives access to the cells as well.
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

    /// Number of sheaves that no thread needed since the last call: the shortest length since then.
    pub fn working_set(&mut self) -> u32 {
        let idle = self.shortest;
        self.shortest = self.length;
        idle
    }

    /// Number of objects in all sheaves of the list.
    pub fn objects(&self) -> u64 {
        self.objects
    }

    /// The sheaves of all chains, from the first. They stay on the list.
    pub(crate) fn sheaves(&self) -> impl Iterator<Item = &Sheaf> {
        // SAFETY: links point to sheaves of the list, which owns them and is borrowed. A `Sheaf` is
        // a non-null pointer, so a link has the layout of `Option<Sheaf>`.
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
    use crate::sheaf::STRIDED_RUNS;
    use crate::sheaf::tests::{objects, sheaf};
    use crate::strided_run::few;
    use std::vec::Vec;

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
        // All objects, two at a time, the last sheaf first.
        let all = core::iter::successors(look(&mut list, true), |_| look(&mut list, false));
        assert_eq!(all.flatten().collect::<Vec<_>>(), [10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3]);
        // The sheaf that the look is inside is taken, with the one in front of it.
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
    fn objects_are_counted_without_a_look_at_their_sheaves() {
        let objects = objects(12);
        let (made, _memory): (Vec<_>, Vec<_>) = (0..4).map(|_| sheaf(3)).unzip();
        let mut list = SheafList::new();
        for (n, mut sheaf) in made.into_iter().enumerate() {
            sheaf.extend(n, |n| objects[n]);
            list.push(sheaf);
        }
        // The link behind the first sheaf dangles for a moment.
        // SAFETY: the list owns its sheaves, and nothing follows the link until it is restored.
        let next = unsafe { core::mem::replace(&mut (*list.chains[0]).next, NonNull::dangling().as_ptr()) };
        assert_eq!((list.objects(), list.length()), (6, 4));
        // SAFETY: the first sheaf of the chain belongs to the list.
        unsafe { (*list.chains[0]).next = next };
        let counts = core::iter::from_fn(|| list.pop().map(|sheaf| (sheaf.length(), list.objects())));
        assert_eq!(counts.collect::<Vec<_>>(), [(3, 3), (2, 1), (1, 0), (0, 0)]);
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
            // The sheaf that the look is inside is the last of its chain. It is taken, and the look
            // goes on in the next chain.
            if seen.len() == 5 {
                assert_eq!(list.pop_for(0).unwrap().cells(), &objects[..2]);
            }
        }
        seen.sort_unstable();
        assert_eq!((seen[0], &seen[1..]), (objects[0], &objects[2..]), "each once, but the one that went");
        assert_eq!((list.length(), list.sheaves().count()), (9, 9));
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

    #[test]
    fn bound_sheaves_are_seen_and_counted_like_others() {
        let objects = objects(20);
        let ((mut plain, _first), (mut bound, _second)) = (sheaf(6), sheaf(0));
        plain.extend(6, |n| objects[n]);
        let (few, count) = few::<STRIDED_RUNS>(&objects[6..], 16).unwrap();
        assert!(bound.bind(&few[..count]));
        let mut list = SheafList::new();
        list.push(plain);
        list.push(bound);
        assert_eq!((list.lengths(), list.objects()), (SheafCounts { plain: 1, bound: 1 }, 20));
        let (mut seen, mut starts) = (Vec::new(), true);
        while list.look(core::mem::take(&mut starts), 5, &mut |object| seen.push(object)) {}
        assert_eq!([&seen[14..], &seen[..14]].concat(), objects);
        assert_eq!((list.pop().unwrap().is_bound(), list.lengths()), (true, SheafCounts { plain: 1, bound: 0 }));
        assert_eq!(
            (list.pop().unwrap().is_bound(), list.lengths(), list.objects()),
            (false, SheafCounts { plain: 0, bound: 0 }, 0)
        );
    }
}
