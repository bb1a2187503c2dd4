//! What another process is told about memory groups: numbers, as words in the page of numbers.
//!
//! Sits between a request ([`requests`](crate::requests)) and the tree. A report begins at the slot that was asked for and ends where the page does,
//! so many groups take several; each group is of one moment. The last report has, instead of groups, what is charged and nobody uses, and what is booked under ids of
//! groups that are gone. Nothing is allocated.
//!
//! A report, in words of 64 bits: whether there are groups; entries in this report; the slot to ask for next, all bits set if there is none;
//! what the entries are (0: groups, 1: what is left); groups in the tree, dying ones, slots, ids in use; bytes of memory for all that; fences.
//! Then for each group its id; its parent's, 0 for the root; bytes charged, and the most there were; its bounds, by
//! [`Bound`]; bytes charged to it alone, by [`Kind`]; events, by [`Event`]; how long its name is, and the name. Or for each entry of what is left the
//! group that has it; bytes; and the id that they are booked under if its group is gone, 0 for bytes that are stocked or kept by caches, one entry for
//! all of a group.

use crate::memory_groups::Grouped;
use crate::pen::{self, Pen};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::Platform;
use neap_groups::{Bound, Event, Info, Kind, LONGEST_NAME};

/// Words before the entries.
pub const HEAD: usize = 10;
/// Words of a group.
pub const GROUP: usize = 5 + Bound::ALL.len() + Kind::ALL.len() + Event::ALL.len() + LONGEST_NAME / 8;
/// Words of what is left.
pub const LEFT: usize = 3;
/// The slot to ask for to be told what is left.
pub const ASK_LEFT: u32 = 1 << 30;

/// Writes a report on the groups from slot `from` on, or on what is left, into `words`, of which there are at least [`HEAD`]. Takes the tree's locks,
/// one group after the other. Inside the gate.
pub fn write<P: Platform>(grouped: Option<Grouped<'_, P>>, from: u32, words: &[AtomicU64]) {
    pen::touch(words);
    let Some(grouped) = grouped else { return };
    let mut pen = Pen::new(words, HEAD);
    let (groups, source) = grouped.parts();
    let (mut entries, mut next, count) = (0, u64::MAX, groups.count_inside());
    if from < ASK_LEFT {
        let mut slot = from;
        while slot < count.slots && pen.has_room(GROUP) {
            if let Some(info) = groups.info_at(source, slot) {
                write_group(&info, &mut pen);
                entries += 1;
            }
            slot += 1;
        }
        next = if slot < count.slots { slot } else { ASK_LEFT }.into();
    } else {
        let mut left = |group: u64, bytes: u64, id: u64| {
            let mut written = words[HEAD..].chunks_exact(LEFT).take(entries as usize).rev();
            let is_same = |entry: &&[AtomicU64]| entry[0].load(Relaxed) == group && entry[2].load(Relaxed) == id;
            if let Some(entry) = written.find(is_same) {
                entry[1].fetch_add(bytes, Relaxed);
            } else if pen.has_room(LEFT) {
                pen.write_all([group, bytes, id]);
                entries += 1;
            }
        };
        groups.each_unused(source, |group, bytes| left(group.to_bits(), bytes, 0));
        groups.each_gone(|id, heir, bytes| left(heir.to_bits(), bytes, id.to_bits()));
    }
    let numbers = [count.live, count.dying, count.slots, count.ids].map(u64::from);
    let mut pen = Pen::new(words, 0);
    pen.write_all([1, entries, next, u64::from(from >= ASK_LEFT)]);
    pen.write_all(numbers);
    pen.write_all([grouped.bytes() as u64, grouped.fences().into()]);
    debug_assert!(pen.at() == HEAD);
}

fn write_group(info: &Info, pen: &mut Pen<'_>) {
    let parent = info.parent.map_or(0, |parent| parent.to_bits());
    pen.write_all([info.id.to_bits(), parent, info.charged, info.peak]);
    pen.write_all(info.bounds);
    pen.write_all(info.kinds);
    pen.write_all(info.events);
    let name = info.name.as_str().as_bytes();
    pen.write(name.len() as u64);
    let mut padded = [0; LONGEST_NAME];
    padded[..name.len()].copy_from_slice(name);
    pen.write_all(padded.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::{Hooks, Mm};
    use crate::options::Options;
    use neap_base::virtual_platform::Virtual;
    use neap_groups::GroupId;
    use std::boxed::Box;
    use std::vec::Vec;

    #[test]
    fn what_caches_keep_is_told_as_what_nobody_uses() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(Virtual::new(4096, 2), &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
        let groups = mm.groups().unwrap();
        let tenants = ["one", "two"].map(|name| groups.create(GroupId::ROOT, name).unwrap());
        for tenant in tenants {
            let before = mm.enter(Some(tenant));
            let blocks: Vec<*mut u8> = (0..100).map(|_| mm.allocate(200)).collect();
            mm.leave(before);
            // SAFETY: the blocks are this test's.
            blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
        }
        let words: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        write(Some(groups), ASK_LEFT, &words);
        let words: Vec<u64> = words.iter().map(|word| word.load(Relaxed)).collect();
        let left: Vec<&[u64]> = words[HEAD..].chunks_exact(LEFT).take(words[1] as usize).collect();
        for tenant in tenants {
            let charged = groups.info(tenant).unwrap().charged;
            let told: Vec<u64> =
                left.iter().filter(|entry| entry[0] == tenant.to_bits()).map(|entry| entry[1]).collect();
            assert_eq!((charged > 0, groups.used(tenant), told), (true, Ok(0), [charged].to_vec()), "{left:?}");
        }
        mm.verify(0).unwrap();
        // SAFETY: nobody uses the manager any more.
        unsafe { mm.close() };
    }
}
