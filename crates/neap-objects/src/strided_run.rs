//! Strided runs: objects at equal distances in memory, upward or downward, stored as the first one
//! and their number.
//!
//! # Design
//!
//! Bound sheaves keep objects as strided runs, and a stack takes a strided run with a single
//! commit. Objects come out of slabs in the order of their addresses, and many programs free them
//! in the order of allocation or its reverse. This module computes on addresses. It takes no lock
//! and accesses no object.

/// Objects at equal distances.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StridedRun {
    /// The first object.
    pub first: *mut u8,
    /// Number of objects.
    pub length: u32,
    /// Bytes from one object to the next; negative if they go downward.
    pub step: i32,
}

impl StridedRun {
    /// A strided run without objects.
    pub const NONE: StridedRun = StridedRun { first: core::ptr::null_mut(), length: 0, step: 0 };

    /// The longest strided run that `objects` of `size` bytes begin with.
    #[inline]
    fn leading(objects: &[*mut u8], size: usize) -> StridedRun {
        let Some(&first) = objects.first() else { return StridedRun::NONE };
        let up = objects.get(1).is_none_or(|&second| second.addr() > first.addr());
        let step = if up { size } else { size.wrapping_neg() };
        let (mut length, mut expected) = (0, first.addr());
        // Eight at a time, with one branch.
        for chunk in objects.as_chunks::<8>().0 {
            let differs = |differs, (n, object): (usize, &*mut u8)| {
                differs | (object.addr() ^ expected.wrapping_add(step.wrapping_mul(n)))
            };
            if chunk.iter().enumerate().fold(0, differs) != 0 {
                break;
            }
            (length, expected) = (length + chunk.len(), expected.wrapping_add(step.wrapping_mul(chunk.len())));
        }
        for object in &objects[length..] {
            if object.addr() != expected {
                break;
            }
            (length, expected) = (length + 1, expected.wrapping_add(step));
        }
        StridedRun { first, length: length as u32, step: step as i32 }
    }

    /// The object with the index `n`.
    #[inline]
    pub fn at(&self, n: usize) -> *mut u8 {
        self.first.wrapping_offset(self.step as isize * n as isize)
    }

    /// The last object. There is at least one.
    pub fn last(&self) -> *mut u8 {
        self.at(self.length as usize - 1)
    }

    /// All objects, from the first.
    pub fn objects(self) -> impl DoubleEndedIterator<Item = *mut u8> {
        (0..self.length as usize).map(move |n| self.at(n))
    }
}

/// A strided run in one word, for a known size of objects. The lower `ADDRESS` bits are the first
/// object. The bits above are the length, negative if the objects go downward.
#[derive(Clone, Copy, Debug)]
pub struct Packed(u64);

/// Number of bits of an address. The system gives a program longer addresses only on request.
pub(crate) const ADDRESS: u32 = 48;

impl Packed {
    /// A strided run without objects.
    pub const NONE: Packed = Packed(0);

    /// Packs a strided run; `None` if it does not fit.
    pub fn of(run: &StridedRun) -> Option<Packed> {
        let length = i16::try_from(run.length).ok()?;
        let length = if run.step < 0 { -length } else { length };
        let address = run.first.expose_provenance() as u64;
        (address >> ADDRESS == 0).then_some(Packed(address | (length as u64) << ADDRESS))
    }

    /// Unpacks a strided run of objects of `size` bytes.
    pub fn unpack(self, size: usize) -> StridedRun {
        let address = self.0 & ((1 << ADDRESS) - 1);
        let (first, length) = (core::ptr::with_exposed_provenance_mut(address as usize), self.signed_length());
        StridedRun { first, length: length.unsigned_abs().into(), step: i32::from(length.signum()) * size as i32 }
    }

    fn signed_length(self) -> i16 {
        (self.0 >> ADDRESS) as i16
    }

    /// Number of objects.
    pub fn length(self) -> usize {
        self.signed_length().unsigned_abs().into()
    }

    /// Removes the last object. There is at least one.
    pub fn without_last(self) -> Packed {
        debug_assert!(self.length() > 0, "the last object of an empty strided run");
        Packed(self.0.wrapping_sub((self.signed_length().signum() as u64) << ADDRESS))
    }
}

/// Packs `objects` of `size` bytes, in their order, into at most `N` strided runs. Returns these
/// and their number; `None` if more runs are necessary, or if one does not fit into a word.
pub fn few<const N: usize>(mut objects: &[*mut u8], size: usize) -> Option<([Packed; N], usize)> {
    let (mut few, mut count) = ([Packed::NONE; N], 0);
    while !objects.is_empty() {
        let place = few.get_mut(count)?;
        let next = StridedRun::leading(objects, size);
        *place = Packed::of(&next)?;
        count += 1;
        objects = &objects[next.length as usize..];
    }
    Some((few, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::vec::Vec;

    const SIZE: usize = 48;

    fn object(number: usize) -> *mut u8 {
        core::ptr::without_provenance_mut((1 << 20) + number * SIZE)
    }

    fn told<const N: usize>(objects: &[*mut u8]) -> Option<Vec<StridedRun>> {
        few::<N>(objects, SIZE).map(|(few, count)| few[..count].iter().map(|packed| packed.unpack(SIZE)).collect())
    }

    #[test]
    fn what_does_not_fit_a_word_is_not_packed() {
        let fits = |address: usize, length| {
            let first = core::ptr::without_provenance_mut(address);
            Packed::of(&StridedRun { first, length, step: -16 }).is_some()
        };
        assert!(fits((1 << 48) - 16, i16::MAX as u32));
        assert!(!fits(1 << 48, 1) && !fits(usize::MAX - 15, 1) && !fits(16, i16::MAX as u32 + 1));
    }

    #[test]
    fn rows_either_way_are_one_each() {
        let parts: [Vec<usize>; 5] =
            [(0..40).collect(), (41..49).rev().collect(), [100].into(), (50..52).collect(), (0..9).rev().collect()];
        let objects: Vec<_> = parts.iter().flatten().map(|&number| object(number)).collect();
        let expected: Vec<_> = parts
            .iter()
            .map(|part| StridedRun {
                first: object(part[0]),
                length: part.len() as u32,
                step: if part.get(1).is_none_or(|&second| second > part[0]) { SIZE as i32 } else { -(SIZE as i32) },
            })
            .collect();
        // A single object gets the direction in which the next one lies.
        let step = |n: usize, step: i32| StridedRun { step, ..expected[n] };
        assert_eq!(told::<5>(&objects).unwrap()[..2], expected[..2]);
        assert_eq!(told::<5>(&objects).unwrap()[2..], [step(2, -(SIZE as i32)), expected[3], expected[4]]);
        assert_eq!(told::<4>(&objects), None);
        assert_eq!(told::<0>(&[]), Some(Vec::new()));
        assert_eq!(told::<2>(&[object(3), object(3)]).unwrap().len(), 2, "one object twice is no strided run");
        assert_eq!(told::<2>(&[object(3), object(5)]).unwrap().len(), 2, "nor are objects with one between them");
    }

    proptest! {
        /// For any objects: the strided runs have all of them, in their order, and each is as long
        /// as possible.
        #[test]
        #[cfg_attr(miri, ignore = "takes it minutes")]
        fn what_is_told_is_what_was_there(parts in vec((0_usize..100, 1_usize..60, any::<bool>()), 0..20)) {
            let row = |&(first, many, up): &(usize, usize, bool)| {
                (0..many).map(move |n| object(if up { 100 + first + n } else { 100 + first - n })).collect::<Vec<_>>()
            };
            let objects: Vec<_> = parts.iter().flat_map(row).collect();
            let told = told::<40>(&objects).unwrap();
            prop_assert_eq!(told.iter().flat_map(|part| part.objects()).collect::<Vec<_>>(), objects);
            for part in &told {
                let shorter = Packed::of(part).unwrap().without_last();
                prop_assert_eq!(shorter.length() + 1, part.length as usize);
                if shorter.length() > 0 {
                    prop_assert_eq!(shorter.unpack(SIZE), StridedRun { length: part.length - 1, ..*part });
                }
            }
            for pair in told.windows(2) {
                prop_assert_ne!(pair[0].at(pair[0].length as usize), pair[1].first);
            }
        }
    }
}
