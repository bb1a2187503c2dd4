//! The report on memory groups for another process: words in the page of numbers.
//!
//! # Design
//! The report answers a request (`control/mod.rs`). A report begins at the requested slot and ends
//! where the page does, so many groups take several reports. The numbers of a group are read at one
//! moment. The last reports have other entries. These are charged bytes that are not in use, all
//! read at one moment, then bytes booked under ids of deleted groups, then charges that wait.
//! Reporting allocates nothing.
//!
//! # Format
//! Words of 64 bits:
//!
//! 1. whether there are groups; entries in this report; the next slot to request, all bits set if
//!    there is none; the kind of entries (0: groups, 1: unused bytes, 2: charges that wait);
//! 2. groups in the tree, dying groups, slots, ids in use; bytes of memory for them; fences;
//! 3. for each group: its id; its parent's, 0 for the root; bytes charged, and their maximum;
//!    microseconds in which it was stalled; its bounds, by [`Bound`]; bytes charged to it alone, by
//!    [`Kind`]; events, and those at it alone, by [`Event`]; length of its name, and the name;
//! 4. or for each entry of unused bytes: the group that has them; bytes; the id that they are
//!    booked under if its group is gone, 0 for all bytes of a group that are stocked or kept by
//!    caches;
//! 5. or for each charge that waits: the group to be charged; the group that it waits at; the
//!    reason, an index of [`REASONS`]; bytes; nanoseconds since it began, and until its deadline,
//!    all bits set if it has none.

use crate::groups::memory_groups::Grouped;
use crate::reclaim::reclaiming::Reclaiming;
use crate::reports::writer::{self, ReportWriter};
use core::sync::atomic::AtomicU64;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_groups::{Bound, Event, FOREVER, GoneId, Groups, Info, Kind, LONGEST_NAME, Reason, Waiting};

/// Words before the entries.
pub const HEAD: usize = 10;
/// Words of a group.
pub const GROUP: usize = 6 + Bound::ALL.len() + Kind::ALL.len() + 2 * Event::ALL.len() + LONGEST_NAME / 8;
/// Words of an entry of unused bytes.
pub const LEFT: usize = 3;
/// Added to a slot in a request for unused bytes of the groups from that slot on. `ASK_GONE` is
/// added to an id's index in a request for bytes of deleted groups.
pub const ASK_LEFT: u32 = 1 << 30;
const ASK_GONE: u32 = ASK_LEFT | 1 << 29;
/// Added to an index in a request for waiting charges from that index on.
pub const ASK_WAITING: u32 = 1 << 31;
/// Words of a charge that waits.
pub const WAITING: usize = 6;
/// Names of the reasons for waits:
/// * `turn`: an older charge waits.
/// * `room`: there is no room, and reclaim is under way.
/// * `in vain`: there is no room after reclaim in vain.
/// * `barred`: as `in vain`, and neap does not call a shrinker of the group at present.
/// * `high`: the charge is delayed above a `high`.
pub const REASONS: [&str; 5] = ["turn", "room", "in vain", "barred", "high"];

/// Writes a report on the groups from slot `from` on, or on unused bytes, into `words`, at least
/// [`HEAD`] of them. Takes the tree's locks, one group after the other.
pub(crate) fn write<P: Platform>(
    inside: &Inside<'_>,
    grouped: Option<Grouped<'_, P>>,
    reclaiming: Option<Reclaiming<'_, P>>,
    from: u32,
    words: &[AtomicU64],
) {
    writer::touch(words);
    let Some(grouped) = grouped else { return };
    let mut writer = ReportWriter::new(words, HEAD);
    let (groups, source) = (grouped.groups(), grouped.source());
    let (mut entries, mut next, count) = (0, u64::MAX, groups.count_inside(inside));
    if from < ASK_LEFT {
        let mut slot = from;
        while slot < count.slots && writer.has_room(GROUP) {
            if let Some(info) = groups.info_at(inside, source, slot) {
                write_group(&info, &mut writer);
                entries += 1;
            }
            slot += 1;
        }
        next = if slot < count.slots { slot } else { ASK_LEFT }.into();
    } else if from < ASK_GONE {
        if from == ASK_LEFT {
            groups.add_up_unused(inside, source);
        }
        let mut slot = from - ASK_LEFT;
        while slot < count.slots && writer.has_room(LEFT) {
            if let Some((group, bytes)) = groups.unused_at(inside, slot) {
                writer.write_all([group.to_bits(), bytes, 0]);
                entries += 1;
            }
            slot += 1;
        }
        next = if slot < count.slots { ASK_LEFT + slot } else { ASK_GONE }.into();
    } else if from < ASK_WAITING {
        next = ASK_WAITING.into();
        let mut index = from - ASK_GONE;
        while let Some(GoneId { id, heir, bytes }) = groups.next_gone(inside, index) {
            if !writer.has_room(LEFT) {
                next = (ASK_GONE + index).into();
                break;
            }
            writer.write_all([heir.to_bits(), bytes, id.to_bits()]);
            entries += 1;
            index = id.index() + 1;
        }
    } else {
        let (now, mut index) = (grouped.platform().precise(), from - ASK_WAITING);
        while let Some((at, waiting)) = groups.next_waiting(inside, index) {
            if !writer.has_room(WAITING) {
                next = (ASK_WAITING + at).into();
                break;
            }
            let reason = reason(inside, &waiting, groups, reclaiming.as_ref());
            let left = if waiting.deadline == FOREVER { FOREVER } else { waiting.deadline.saturating_sub(now) };
            writer.write_all([waiting.group.to_bits(), waiting.at.to_bits(), reason, waiting.bytes]);
            writer.write_all([now.saturating_sub(waiting.since), left]);
            entries += 1;
            index = at + 1;
        }
    }
    let kind = match from {
        ..ASK_LEFT => 0,
        ASK_LEFT..ASK_WAITING => 1,
        ASK_WAITING.. => 2,
    };
    let numbers = [count.live, count.dying, count.slots, count.ids].map(u64::from);
    let mut writer = ReportWriter::new(words, 0);
    writer.write_all([1, entries, next, kind]);
    writer.write_all(numbers);
    writer.write_all([grouped.bytes() as u64, grouped.fences().into()]);
    debug_assert!(writer.at() == HEAD);
}

/// Returns the index of a wait's reason in [`REASONS`].
fn reason<P: Platform>(
    inside: &Inside<'_>,
    waiting: &Waiting,
    groups: &Groups,
    reclaiming: Option<&Reclaiming<'_, P>>,
) -> u64 {
    match waiting.reason {
        Reason::Turn => 0,
        Reason::Room => 1,
        Reason::Backoff => {
            let is_barred = |reclaiming: &Reclaiming<'_, P>| {
                [waiting.at, waiting.group].iter().any(|&id| {
                    let seat = groups.attach_target(inside, &groups.reading(), id);
                    seat.is_some_and(|seat| reclaiming.is_any_barred(seat.slot))
                })
            };
            2 + u64::from(reclaiming.is_some_and(is_barred))
        }
        Reason::High => 4,
    }
}

fn write_group(info: &Info, writer: &mut ReportWriter<'_>) {
    let parent = info.parent.map_or(0, |parent| parent.to_bits());
    writer.write_all([info.id.to_bits(), parent, info.charged, info.peak, info.stalled_us]);
    writer.write_all(info.bounds);
    writer.write_all(info.kinds);
    writer.write_all(info.events);
    writer.write_all(info.local_events);
    let name = info.name.as_str().as_bytes();
    writer.write(name.len() as u64);
    let mut padded = [0; LONGEST_NAME];
    padded[..name.len()].copy_from_slice(name);
    writer.write_all(padded.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::{Hooks, Mm};
    use crate::options::Options;
    use core::sync::atomic::Ordering::Relaxed;
    use neap_groups::GroupId;
    use neap_testing::virtual_platform::Virtual;
    use std::boxed::Box;
    use std::string::ToString;
    use std::vec::Vec;

    #[test]
    fn group_report_counts_cached_bytes_as_unused() {
        let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        // SAFETY: the manager stays in its box.
        unsafe { mm.open(Virtual::new(4096, 2), &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
        let groups = mm.groups().unwrap();
        let make = |name: usize| groups.create(GroupId::ROOT, &name.to_string()).unwrap();
        let mut tenants: Vec<GroupId> = (0..16).map(make).collect();
        let mut blocks: Vec<*mut u8> = Vec::new();
        for &tenant in &tenants {
            let before = mm.enter(Some(tenant));
            blocks.extend((0..100).map(|_| mm.allocate(200)));
            mm.leave(before);
        }
        // SAFETY: the blocks are this test's.
        blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
        let gone = tenants.split_off(8);
        gone.iter().for_each(|&tenant| groups.delete(tenant).unwrap());
        // Three entries a report, as for more groups than fit one.
        let words: Vec<AtomicU64> = (0..HEAD + 3 * LEFT).map(|_| AtomicU64::new(0)).collect();
        let (mut left, mut from) = (Vec::new(), ASK_LEFT);
        while from != u32::MAX {
            write(&groups.source().enter(), Some(groups), None, from, &words);
            let words: Vec<u64> = words.iter().map(|word| word.load(Relaxed)).collect();
            if from < ASK_WAITING {
                left.extend(words[HEAD..].chunks_exact(LEFT).take(words[1] as usize).map(<[u64]>::to_vec));
            }
            let next = u32::try_from(words[2]).unwrap_or(u32::MAX);
            assert!(next > from);
            from = next;
        }
        let of =
            |at: usize, id: GroupId| left.iter().filter(move |entry| entry[at] == id.to_bits()).map(|entry| entry[1]);
        for &tenant in &tenants {
            let charged = groups.info(tenant).unwrap().charged;
            let told: Vec<u64> = of(0, tenant).collect();
            assert_eq!((charged > 0, groups.used(tenant), told), (true, Ok(0), [charged].to_vec()), "{left:?}");
        }
        // Bytes booked under deleted groups are their parent's, and also unused.
        let inherited: u64 = gone.iter().map(|&id| of(2, id).sum::<u64>()).sum();
        assert!(gone.iter().all(|&id| of(2, id).count() == 1) && inherited >= 8 * 100 * 208, "{left:?}");
        let charged = |id| groups.info(id).unwrap().charged;
        let own = charged(GroupId::ROOT) - tenants.iter().map(|&tenant| charged(tenant)).sum::<u64>();
        assert_eq!((of(0, GroupId::ROOT).next(), groups.used(GroupId::ROOT)), (Some(own), Ok(0)), "{left:?}");
        mm.verify(0).unwrap();
        // SAFETY: no thread uses the manager any more.
        unsafe { mm.close() };
    }
}
