//! A sheaf: a batch of free objects of one class on their way between a CPU's stack and a barn.
//!
//! # Design
//!
//! A sheaf has one owner at a time, a barn or a thread; only the owner accesses it. A plain sheaf
//! has a cell for each object. A bound sheaf keeps objects as a few
//! [strided runs](crate::strided_run). A sheaf's memory is an object of at least [`Sheaf::bytes`]
//! bytes. SLUB calls this a sheaf (Linux 6.18), Bonwick a magazine (2001).

use crate::size_class::{Class, GRAIN};
use crate::strided_run::{Packed, StridedRun};
use core::ptr::{NonNull, null_mut};

mod list;

pub use list::{SheafCounts, SheafList};
pub(crate) use list::{SheafLayout, sheaf_layout};

/// Number of strided runs of a bound sheaf. Together with the head they fill one cache line.
pub const STRIDED_RUNS: usize = 6;

/// The head of a sheaf. Its cells or strided runs follow.
#[repr(C)]
struct Head {
    next: *mut Head,
    /// Number of cells with objects, or of strided runs, none of which is empty.
    count: u16,
    /// Number of cells; 0 for a bound sheaf.
    capacity: u16,
    home: u16,
    /// The size of its objects, in grains.
    grains: u16,
}

/// Exclusive access to one sheaf.
#[derive(PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Sheaf(NonNull<Head>);

impl Sheaf {
    /// Size of the memory of a plain sheaf with `capacity` cells; that of a bound sheaf if
    /// `capacity` is 0.
    pub const fn bytes(capacity: u32) -> usize {
        size_of::<Head>()
            + match capacity {
                0 => STRIDED_RUNS * size_of::<Packed>(),
                _ => capacity as usize * size_of::<usize>(),
            }
    }

    /// Makes an empty sheaf for objects of a class, in memory that belongs to the caller. The sheaf
    /// is plain, or bound if `capacity` is 0.
    ///
    /// # Safety
    /// `memory` is the caller's alone, is [`Sheaf::bytes`] long, and is aligned to 8. The capacity
    /// fits 16 bits.
    pub unsafe fn make(memory: NonNull<u8>, class: Class, capacity: u32) -> Sheaf {
        let head = memory.cast::<Head>();
        // SAFETY: the memory is the caller's alone, is long enough for a head, and is aligned.
        unsafe {
            head.write(Head {
                next: null_mut(),
                count: 0,
                capacity: capacity as u16,
                home: 0,
                grains: (class.size() / GRAIN) as u16,
            })
        };
        let sheaf = Sheaf(head);
        // SAFETY: the memory is as long as `Sheaf::bytes` of the capacity says, so the cells lie in
        // it.
        unsafe { sheaf.contents::<*mut u8>().write_bytes(0, capacity as usize) };
        sheaf
    }

    /// Gives up a sheaf and returns its memory.
    pub fn into_memory(self) -> NonNull<u8> {
        self.0.cast()
    }

    fn head(&self) -> &Head {
        // SAFETY: the value is exclusive access to the sheaf, and `make` initialised its head.
        unsafe { self.0.as_ref() }
    }

    fn head_mut(&mut self) -> &mut Head {
        // SAFETY: the value is exclusive access to the sheaf, and `make` initialised its head.
        unsafe { self.0.as_mut() }
    }

    /// The address of its cells or strided runs.
    fn contents<T>(&self) -> *mut T {
        // SAFETY: the cells or strided runs follow the head in the same memory.
        unsafe { self.0.add(1).as_ptr().cast() }
    }

    /// Whether the sheaf is a bound one.
    pub fn is_bound(&self) -> bool {
        self.kind() == SheafKind::Bound
    }

    /// How the sheaf lists its objects.
    pub(crate) fn kind(&self) -> SheafKind {
        if self.head().capacity == 0 { SheafKind::Bound } else { SheafKind::Plain }
    }

    /// The size of its objects, in bytes.
    pub fn size(&self) -> usize {
        usize::from(self.head().grains) * GRAIN
    }

    /// Number of cells with objects.
    fn cell_count(&self) -> usize {
        if self.is_bound() { 0 } else { self.head().count as usize }
    }

    /// Number of strided runs.
    fn run_count(&self) -> usize {
        if self.is_bound() { self.head().count as usize } else { 0 }
    }

    /// The address of its memory.
    pub(crate) fn address(&self) -> usize {
        self.0.as_ptr().addr()
    }

    /// Number of cells; 0 for a bound sheaf.
    pub fn capacity(&self) -> usize {
        self.head().capacity as usize
    }

    /// The objects in the cells of a plain sheaf, bottom first.
    pub fn cells(&self) -> &[*mut u8] {
        // SAFETY: `make` initialised the cells, and the count is at most the capacity.
        unsafe { core::slice::from_raw_parts(self.contents(), self.cell_count()) }
    }

    fn packed(&self) -> &[Packed] {
        // SAFETY: a bound sheaf's memory has room for its strided runs, and `bind` wrote those
        // below the count.
        unsafe { core::slice::from_raw_parts(self.contents(), self.run_count()) }
    }

    fn packed_mut(&mut self) -> &mut [Packed] {
        // SAFETY: a bound sheaf's memory has room for its strided runs, and `bind` wrote those
        // below the count.
        unsafe { core::slice::from_raw_parts_mut(self.contents(), self.run_count()) }
    }

    /// The strided runs of a bound sheaf, bottom first.
    pub fn strided_runs(&self) -> impl Iterator<Item = StridedRun> {
        let size = self.size();
        self.packed().iter().map(move |packed| packed.unpack(size))
    }

    /// Its objects, bottom first.
    pub fn objects(&self) -> impl Iterator<Item = *mut u8> {
        self.cells().iter().copied().chain(self.strided_runs().flat_map(StridedRun::objects))
    }

    /// Every `every`th object of its cells, and of each of its strided runs.
    pub fn sample(&self, every: usize) -> impl Iterator<Item = *mut u8> {
        let bound = self.strided_runs().flat_map(move |run| run.objects().step_by(every));
        self.cells().iter().copied().step_by(every).chain(bound)
    }

    /// Number of objects.
    pub fn length(&self) -> usize {
        self.cells().len() + self.packed().iter().map(|packed| packed.length()).sum::<usize>()
    }

    /// Whether the sheaf has no objects.
    pub fn is_empty(&self) -> bool {
        self.head().count == 0
    }

    /// Stores strided runs, none of them empty, in an empty bound sheaf. Returns `false` and
    /// changes nothing if the sheaf is not an empty bound one, or if they do not fit.
    pub fn bind(&mut self, strided_runs: &[Packed]) -> bool {
        let fits = self.is_bound() && self.is_empty() && strided_runs.len() <= STRIDED_RUNS;
        if fits {
            // SAFETY: the memory of a bound sheaf has room for `STRIDED_RUNS`, and the caller has
            // the sheaf alone.
            unsafe { self.contents::<Packed>().copy_from_nonoverlapping(strided_runs.as_ptr(), strided_runs.len()) };
            self.head_mut().count = strided_runs.len() as u16;
        }
        fits
    }

    /// Removes the lowest strided run of a bound sheaf. The caller has moved its objects elsewhere.
    pub fn forget_lowest(&mut self) {
        let strided_runs = self.packed_mut();
        if !strided_runs.is_empty() {
            strided_runs.rotate_left(1);
            self.head_mut().count -= 1;
        }
    }

    /// The [home](crate::kind_map::KindEntry) of its objects. Single objects may have another one.
    pub fn home(&self) -> u16 {
        self.head().home
    }

    /// Sets the home CPU of its objects.
    pub fn set_home(&mut self, cpu: u16) {
        self.head_mut().home = cpu;
    }

    /// Puts `count` objects on top; `object` returns each by its index. The sheaf has room for all
    /// of them.
    pub fn extend(&mut self, count: usize, object: impl Fn(usize) -> *mut u8) {
        let held = self.head().count as usize;
        let room = self.capacity().saturating_sub(held);
        debug_assert!(count <= room);
        let count = count.min(room);
        // SAFETY: `make` initialised all cells, the range does not extend beyond the capacity, and
        // the caller has the sheaf alone.
        let cells = unsafe { core::slice::from_raw_parts_mut(self.contents::<*mut u8>().add(held), count) };
        cells.iter_mut().enumerate().for_each(|(n, cell)| *cell = object(n));
        self.head_mut().count += count as u16;
    }

    /// Reverses the order of the objects.
    pub fn reverse(&mut self) {
        self.cells_mut().reverse();
    }

    /// Takes the topmost object.
    pub fn pop(&mut self) -> Option<*mut u8> {
        let (object, last) = match self.strided_runs().last() {
            Some(top) => (top.last(), top.length == 1),
            None => (*self.cells().last()?, true),
        };
        if let Some(top) = self.packed_mut().last_mut() {
            *top = top.without_last();
        }
        self.head_mut().count -= u16::from(last);
        Some(object)
    }

    /// Lets `fill` write all cells of an empty sheaf, and keeps them if it returns `true`.
    pub fn fill(&mut self, fill: impl FnOnce(&mut [*mut u8]) -> bool) -> bool {
        let capacity = self.head().capacity;
        // SAFETY: `make` initialised all cells, and the caller has the sheaf alone.
        let cells = unsafe { core::slice::from_raw_parts_mut(self.contents(), capacity as usize) };
        let filled = fill(cells);
        self.head_mut().count = if filled { capacity } else { 0 };
        filled
    }

    fn cells_mut(&mut self) -> &mut [*mut u8] {
        // SAFETY: `make` initialised the cells, the count is at most the capacity, and the caller
        // has the sheaf alone.
        unsafe { core::slice::from_raw_parts_mut(self.contents(), self.cell_count()) }
    }

    /// Moves the objects for which `stays` returns `true` to the bottom of a plain sheaf. Returns
    /// their number.
    pub(crate) fn partition(&mut self, stays: impl Fn(*mut u8) -> bool) -> usize {
        let objects = self.cells_mut();
        let mut own = 0;
        for at in 0..objects.len() {
            if stays(objects[at]) {
                objects.swap(own, at);
                own += 1;
            }
        }
        own
    }

    /// Removes the objects of a plain sheaf from the index `count` on. The caller has moved them
    /// elsewhere.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.head_mut().count = count.min(self.cells().len()) as u16;
    }

    /// Removes all objects. The caller has moved them elsewhere.
    pub fn clear(&mut self) {
        self.head_mut().count = 0;
    }
}

/// How a sheaf stores its objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SheafKind {
    /// A cell for each object.
    Plain,
    /// A few strided runs.
    Bound,
}

impl SheafKind {
    /// Number of cells of a sheaf of this kind for objects of `class`.
    pub(crate) fn cells(self, class: Class) -> u32 {
        match self {
            SheafKind::Plain => class.sheaf_capacity(),
            SheafKind::Bound => 0,
        }
    }

    /// The size class of the memory of a sheaf of this kind for objects of `class`.
    pub(crate) fn memory(self, class: Class) -> Class {
        Class::of_size(Sheaf::bytes(self.cells(class)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strided_run::few;
    use std::vec::Vec;

    /// Makes a sheaf for objects of the smallest class, and returns it and its memory.
    pub(super) fn sheaf(capacity: u32) -> (Sheaf, Vec<u64>) {
        let mut memory = std::vec![0_u64; Sheaf::bytes(capacity) / 8];
        let start = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
        // SAFETY: the vector is long enough and outlives the sheaf in every test.
        (unsafe { Sheaf::make(start, Class::of_size(1), capacity) }, memory)
    }

    pub(super) fn objects(count: usize) -> Vec<*mut u8> {
        (1..=count).map(|n| core::ptr::without_provenance_mut(n * 16)).collect()
    }

    #[test]
    fn a_sheaf_is_a_stack() {
        let (mut sheaf, _memory) = sheaf(3);
        let objects = objects(3);
        for (count, objects) in [(0, &objects[..0]), (1, &objects[..1]), (2, &objects[1..])] {
            sheaf.extend(count, |n| objects[n]);
        }
        assert_eq!(sheaf.cells(), objects);
        assert_eq!((sheaf.pop(), sheaf.length()), (Some(objects[2]), 2));
        sheaf.clear();
        assert_eq!(sheaf.pop(), None);
    }

    #[test]
    fn a_bound_sheaf_has_the_same_objects_as_a_plain_one() {
        let (all, mut expected) = (objects(40), Vec::new());
        [&all[3..20], &all[30..31], &all[1..3]].iter().for_each(|part| expected.extend_from_slice(part));
        expected.extend(all[20..28].iter().rev());
        let (few, count) = few::<STRIDED_RUNS>(&expected, 16).unwrap();
        let (mut sheaf, _memory) = sheaf(0);
        assert_eq!((count, sheaf.is_bound(), sheaf.is_empty(), sheaf.pop()), (4, true, true, None));
        assert!(sheaf.bind(&few[..count]) && !sheaf.bind(&few[..count]));
        assert_eq!(sheaf.objects().collect::<Vec<_>>(), expected);
        assert_eq!((sheaf.length(), sheaf.cells().len()), (expected.len(), 0));
        // One in four of each row.
        let sample = [3, 7, 11, 15, 19, 30, 1, 27, 23].map(|n| all[n]);
        assert_eq!(sheaf.sample(4).collect::<Vec<_>>(), sample);
        // From below by the strided run, from above one by one.
        sheaf.forget_lowest();
        assert_eq!(sheaf.objects().collect::<Vec<_>>(), expected[17..]);
        let taken: Vec<_> = core::iter::from_fn(|| sheaf.pop()).collect();
        assert!(taken.iter().eq(expected[17..].iter().rev()) && sheaf.is_empty());
        // As many as fit.
        let six: Vec<_> = all.chunks(7).map(|part| part[0]).collect();
        assert!(sheaf.bind(&few_of(&six)));
        assert_eq!((sheaf.strided_runs().count(), sheaf.length()), (STRIDED_RUNS, 6));
        sheaf.clear();
        assert!(sheaf.is_empty() && sheaf.objects().next().is_none());
    }

    fn few_of(objects: &[*mut u8]) -> [Packed; STRIDED_RUNS] {
        few(objects, 16).unwrap().0
    }

    #[test]
    fn a_sheaf_is_parted_and_cut() {
        let (mut sheaf, _memory) = sheaf(6);
        let objects = objects(6);
        sheaf.extend(objects.len(), |n| objects[n]);
        assert_eq!(sheaf.partition(|object| object.addr() % 32 == 16), 3);
        let mut parts: Vec<Vec<usize>> =
            sheaf.cells().chunks(3).map(|part| part.iter().map(|p| p.addr()).collect()).collect();
        parts.iter_mut().for_each(|part| part.sort_unstable());
        assert_eq!(parts, [[16, 48, 80], [32, 64, 96]]);
        sheaf.truncate(3);
        assert_eq!(sheaf.length(), 3);
    }

    #[test]
    fn a_filled_sheaf_keeps_its_cells_only_if_they_were_written() {
        let (mut sheaf, _memory) = sheaf(3);
        let objects = objects(3);
        assert!(!sheaf.fill(|_| false) && sheaf.is_empty());
        assert!(sheaf.fill(|cells| {
            cells.copy_from_slice(&objects);
            true
        }));
        assert_eq!(sheaf.cells(), objects);
    }
}
