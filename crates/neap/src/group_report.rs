//! What another process is told about memory groups: numbers, as words in the page of numbers.
//!
//! Sits between a request ([`requests`](crate::requests)) and the tree. A report begins at the slot that was asked for and ends where the page does,
//! so many groups take several; each group is of one moment. The last report has, instead of groups, what is stocked and what is booked under ids of
//! groups that are gone. Nothing is allocated.
//!
//! A report, in words of 64 bits: whether there are groups; entries in this report; the slot to ask for next, all bits set if there is none;
//! what the entries are (0: groups, 1: what is left); groups in the tree, dying ones, slots, ids in use; bytes of memory for all that; fences.
//! Then for each group its id; its parent's, 0 for the root; bytes charged, and the most there were; its bounds, by
//! [`Bound`]; bytes charged to it alone, by [`Kind`]; events, by [`Event`]; how long its name is, and the name. Or for each entry of what is left the
//! group that has it; bytes; and the id that they are booked under if its group is gone, 0 for bytes that are stocked.

use crate::memory_groups::Grouped;
use crate::pen::{self, Pen};
use core::sync::atomic::AtomicU64;
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
            if pen.has_room(LEFT) {
                pen.write_all([group, bytes, id]);
                entries += 1;
            }
        };
        groups.each_stocked(|group, bytes| left(group.to_bits(), bytes, 0));
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
