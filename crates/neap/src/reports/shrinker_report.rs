//! The report on shrinkers for another process: words in the page of numbers.
//!
//! # Design
//! The report answers a request (`control/mod.rs`). It takes no lock of the registry, so
//! unregistering waits for no report. The process gathers the report on the stack, outside the
//! gate, and then copies it into the page. A report begins at the requested index, so many
//! shrinkers take several reports. If a shrinker has many groups, the asking process requests those
//! that do not fit separately. Reporting allocates nothing, and calls no callback. For counts,
//! there is another request.
//!
//! # Format
//! Words of 64 bits:
//!
//! 1. whether there are shrinkers; entries in this report; the next index to request, all bits set
//!    if there is none;
//! 2. reclaimers at work; reclaimers that were written off, and do not return; waits for
//!    reclaimers; waits that reached their deadline;
//! 3. for direct, then for background passes: passes, groups asked, objects scanned, objects freed,
//!    bytes;
//! 4. how often shrinkers were blamed, by [`Misbehaviour`];
//! 5. for each shrinker: its id; flags (1: by node, 2: by group, 4: inline, 8: it was unregistered,
//!    and was blamed, 16: it has more groups than follow); seeks; batch; calls; objects scanned,
//!    and freed; nanoseconds; how often it was blamed, by [`Misbehaviour`]; whether it is barred, 2
//!    if a call of it does not return; length of its name, and the name; number of groups that
//!    follow, and for each its id, the node, and deferred work.

use crate::reclaim::reclaiming::Reclaiming;
use crate::state::reclaim::ReclaimerCounts;
use neap_base::Platform;
use neap_groups::{GroupId, LONGEST_NAME};
use neap_percpu::Host as _;
use neap_reclaim::reclaim::{Culprit, Misbehaviour};
use neap_reclaim::{Report, ShrinkerId};

/// Words before the entries.
pub const HEAD: usize = 17 + Misbehaviour::ALL.len();
/// Words of a shrinker without its groups.
pub const SHRINKER: usize = 11 + Misbehaviour::ALL.len() + LONGEST_NAME / 8;
/// Words of each group of a shrinker.
pub const PLACE: usize = 3;
/// Most groups of a shrinker in one report.
pub const MOST_PLACES: usize = 16;
/// Words of a report.
pub(crate) const WORDS: usize = 512;

/// Flag: neap calls the shrinker for each node.
pub const BY_NODE: u64 = 1;
/// Flag: neap calls the shrinker for groups.
pub const BY_GROUP: u64 = 2;
/// Flag: inline charges may call the shrinker.
pub const INLINE: u64 = 4;
/// Flag: the shrinker was blamed, and is unregistered.
pub const GONE: u64 = 8;
/// Flag: the shrinker has more groups than follow.
pub const MORE: u64 = 16;

/// Words written one after the other. Those beyond the end are lost.
struct Draft<'w>(&'w mut [u64; WORDS], usize);

impl Draft<'_> {
    fn write(&mut self, words: impl IntoIterator<Item = u64>) {
        for word in words {
            self.0.get_mut(self.1).into_iter().for_each(|place| *place = word);
            self.1 += 1;
        }
    }

    fn write_name(&mut self, name: &str) {
        let mut padded = [0; LONGEST_NAME];
        let length = name.len().min(LONGEST_NAME);
        padded[..length].copy_from_slice(&name.as_bytes()[..length]);
        self.write([length as u64]);
        self.write(padded.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())));
    }

    fn has_room(&self) -> bool {
        self.1 + SHRINKER + PLACE * MOST_PLACES <= WORDS
    }
}

/// Gathers a report on the shrinkers from index `from` on. If `skip` is above 0, reports only the
/// shrinker at `from`, without its first `skip` groups.
pub(crate) fn gather<P: Platform>(reclaiming: Option<Reclaiming<'_, P>>, from: u32, skip: u32) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    let Some(reclaiming) = reclaiming else { return words };
    let mut draft = Draft(&mut words, HEAD);
    let (mut entries, mut next) = (0, u64::MAX);
    let now = reclaiming.reclaim.clock.now();
    reclaiming.reclaim.shrinkers.each(|report| {
        let index = report.id.index();
        if index < from || next != u64::MAX || skip > 0 && index > from {
            return;
        }
        if !draft.has_room() {
            next = index.into();
            return;
        }
        let blamed = culprit(&reclaiming, |culprit| culprit.shrinker == report.id.to_bits());
        let flags = draft.1 + 1;
        write_shrinker(&mut draft, report, blamed, now);
        if write_places(&mut draft, &reclaiming, report, skip) {
            draft.0[flags] |= MORE;
        }
        entries += 1;
    });
    if next == u64::MAX && skip == 0 {
        // Adds blamed shrinkers that are unregistered, while there is room.
        reclaiming.reclaim.watchdog.each_culprit(|gone| {
            let mut is_there = false;
            reclaiming.reclaim.shrinkers.each(|report| is_there |= report.id.to_bits() == gone.shrinker);
            if !is_there && draft.has_room() {
                draft.write([gone.shrinker, GONE, 0, 0, 0, 0, 0, 0]);
                draft.write(gone.counts.map(u64::from));
                draft.write([0]);
                draft.write_name(gone.name());
                draft.write([0]);
                entries += 1;
            }
        });
    }
    let ReclaimerCounts { working, lost, waits, late } = reclaiming.reclaim.reclaimers(&reclaiming.source.enter());
    let mut head = Draft(&mut words, 0);
    head.write([1, entries, next, working.into(), lost.into(), waits, late]);
    head.write(reclaiming.reclaim.passes.counts().into_iter().flatten());
    head.write(reclaiming.reclaim.watchdog.counts().map(u64::from));
    words
}

impl<P: Platform> Reclaiming<'_, P> {
    /// Returns whether a shrinker that is marked for the group in a slot is barred now.
    pub(crate) fn is_any_barred(&self, slot: u32) -> bool {
        let (now, mut is_barred) = (self.reclaim.clock.now(), false);
        self.reclaim.watchdog.each_culprit(|culprit| {
            let id = ShrinkerId::from_bits(culprit.shrinker);
            let is_marked = |node| self.reclaim.shrinkers.is_marked(id, slot, node);
            is_barred |= culprit.until > now && (0..self.source.platform().nodes() as u32).any(is_marked);
        });
        is_barred
    }
}

fn culprit<P: Platform>(reclaiming: &Reclaiming<'_, P>, is_it: impl Fn(&Culprit) -> bool) -> Option<Culprit> {
    let mut found = None;
    reclaiming.reclaim.watchdog.each_culprit(|culprit| found = found.or(Some(culprit).filter(&is_it)));
    found
}

fn write_shrinker(draft: &mut Draft<'_>, report: &Report, blamed: Option<Culprit>, now: u64) {
    let flag = |is: bool, flag: u64| if is { flag } else { 0 };
    let flags = flag(report.by_node, BY_NODE) | flag(report.by_group, BY_GROUP) | flag(report.inline, INLINE);
    draft.write([report.id.to_bits(), flags, report.seeks.into(), report.batch, report.calls]);
    draft.write([report.scanned, report.freed, report.nanoseconds]);
    draft.write(blamed.map_or([0; Misbehaviour::ALL.len()], |culprit| culprit.counts).map(u64::from));
    let barred = match blamed.map_or(0, |culprit| culprit.until) {
        u64::MAX => 2,
        until => u64::from(until > now),
    };
    draft.write([barred]);
    draft.write_name(report.name.as_str());
}

/// Writes the groups of a shrinker after the first `skip`. Returns whether it has more than fit.
fn write_places<P: Platform>(
    draft: &mut Draft<'_>,
    reclaiming: &Reclaiming<'_, P>,
    report: &Report,
    skip: u32,
) -> bool {
    let (count, skip) = (draft.1, skip as usize);
    draft.write([0]);
    let mut met = 0;
    reclaiming.each_place(report, |group: GroupId, node, deferred| {
        if (skip..skip + MOST_PLACES).contains(&met) {
            draft.write([group.to_bits(), node.into(), deferred]);
        }
        met += 1;
    });
    let behind = met.saturating_sub(skip);
    draft.0[count] = behind.min(MOST_PLACES) as u64;
    behind > MOST_PLACES
}
