//! Memory groups of a running process: `neap stat PID --groups`, `neap group`, which sets a bound,
//! and the reports for `neap top`.
//!
//! The reports come from the process's [control channel](crate::look::control_channel), in the
//! format of `crates/neap/src/reports/group_report.rs`. This command does not trust them, and
//! checks sizes and depths. All else in them is text and numbers. The command shows the result as a
//! tree (`tree`), or as one JSON object.
//!
//! The process reads its groups one after the other. So the groups below a group can have more in
//! sum than the group itself. Then the command shows the group with that sum, and
//! [`ReadGroups::raised`] counts the group.

mod bound;
mod in_memory;
mod tree;

use core::ops::Range;
use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use neap::group_report::{GROUP, HEAD, LEFT, REASONS, WAITING};
use neap::groups::{Bound, Event, Kind, UNLIMITED};
use neap_groups::DEEPEST;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::colours::Colours;
use crate::look::allowance::{ALLOCATION, Allowance};
use crate::look::control_channel::Haste;
use crate::look::control_channel::{ControlChannel, GROUPS, name_of};
use crate::look::remote_memory::{MemoryLayout, ask_or_read};
use crate::look::stat_model::{ContainerNumbers, Numbers};
use crate::look::stat_reader::{Page, ProcessStatus};
use crate::look::subject::{Rows, Subject, print, print_json};

pub(crate) use bound::{BoundOptions, bytes_of, change, main as change_bound};

/// A group in a report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReportedGroup {
    pub(crate) id: u64,
    /// 0 for the root.
    pub(crate) parent: u64,
    pub(crate) name: String,
    /// Names of the groups from below the root down to this one, joined by slashes. Empty for the
    /// root.
    pub(crate) path: String,
    /// Number of ancestors.
    pub(crate) depth: usize,
    /// Place in the order of paths, counted from 1. Zero while the group has no place.
    pub(crate) rank: usize,
    /// Charged bytes. They include those of the groups below, and stocks: bytes charged ahead on a
    /// CPU.
    pub(crate) charged: u64,
    pub(crate) peak: u64,
    /// Microseconds in which this group or a group below it was stalled.
    pub(crate) stalled_us: u64,
    pub(crate) bounds: [u64; Bound::ALL.len()],
    /// Bytes of the group itself, by kind.
    pub(crate) kinds: [u64; Kind::ALL.len()],
    /// Counts by kind of event, with the events of the groups below this group.
    pub(crate) events: [u64; Event::ALL.len()],
    pub(crate) local_events: [u64; Event::ALL.len()],
    /// Bytes of the group itself that are not in use, because stocks or caches keep them.
    pub(crate) stocked: u64,
    /// Charged bytes of this group and the groups below it, without unused bytes.
    pub(crate) used: u64,
    /// Number of charges that wait at this group's limit.
    pub(crate) waiting: u64,
}

/// Bytes that are still charged under the id of a deleted group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone {
    pub(crate) id: u64,
    /// The group that has inherited them.
    pub(crate) heir: u64,
    pub(crate) bytes: u64,
}

/// A charge that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitingCharge {
    pub(crate) group: u64,
    /// Id of the group at whose limit the charge waits.
    pub(crate) at: u64,
    pub(crate) reason: &'static str,
    pub(crate) bytes: u64,
    /// Nanoseconds since the wait began (`waited`), and until its deadline (`left`), if it has one.
    pub(crate) waited: u64,
    pub(crate) left: Option<u64>,
}

impl WaitingCharge {
    fn read(words: &[u64]) -> WaitingCharge {
        WaitingCharge {
            group: words[0],
            at: words[1],
            reason: REASONS.get(words[2] as usize).unwrap_or(&"?"),
            bytes: words[3],
            waited: words[4],
            left: Some(words[5]).filter(|left| *left != u64::MAX),
        }
    }
}

/// All groups of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadGroups {
    /// The groups, in the order of their paths after [`ReadGroups::arrange`].
    pub(crate) groups: Vec<ReportedGroup>,
    /// Bytes that are not in use, by group.
    unused: BTreeMap<u64, u64>,
    pub(crate) gone: Vec<Gone>,
    /// Charges that wait. [`ReadGroups::settle`] sorts them by the limiting group, and by reason.
    pub(crate) waiting: Vec<WaitingCharge>,
    pub(crate) dying: u64,
    /// Ids in use.
    pub(crate) ids: u64,
    /// Bytes of memory of the groups, besides per-CPU data.
    pub(crate) metadata: u64,
    pub(crate) fences: u64,
    /// Groups whose own numbers were less than the sum of those below them.
    pub(crate) raised: u64,
    /// Whether this command has read the groups from the [process's memory](in_memory).
    pub(crate) is_from_memory: bool,
}

/// Adds one report. Returns the next slot to request.
fn read(words: &[u64], seen: &mut ReadGroups, allowance: &Allowance) -> Result<Option<Option<u32>>> {
    ensure!(words.len() >= HEAD, "it has {} words", words.len());
    if words[0] == 0 {
        return Ok(None);
    }
    let (count, next, kind) = (words[1], words[2], words[3]);
    (seen.dying, seen.ids, seen.metadata, seen.fences) = (words[5], words[7], words[8], words[9]);
    let size = match kind {
        0 => GROUP,
        1 => LEFT,
        _ => WAITING,
    };
    let body = words[HEAD..].get(..(count as usize).saturating_mul(size));
    let body = body.with_context(|| format!("{count} entries in it"))?;
    for words in body.chunks_exact(size) {
        if kind == 0 {
            let group = read_group(words);
            allowance.take(size_of::<ReportedGroup>() + group.name.len() + 2 * ALLOCATION)?;
            seen.groups.push(group);
        } else if kind > 1 {
            allowance.take(size_of::<WaitingCharge>())?;
            seen.waiting.push(WaitingCharge::read(words));
        } else if words[2] != 0 {
            allowance.take(size_of::<Gone>())?;
            seen.gone.push(Gone { heir: words[0], bytes: words[1], id: words[2] });
        } else {
            allowance.take(ENTRY)?;
            let unused = seen.unused.entry(words[0]).or_default();
            *unused = unused.saturating_add(words[1]);
        }
    }
    Ok(Some(u32::try_from(next).ok()))
}

/// Bytes of an entry of a map of numbers.
const ENTRY: usize = 32;

fn read_group(words: &[u64]) -> ReportedGroup {
    let mut rest = words;
    let mut take = |count: usize| {
        let (taken, after) = rest.split_at(count);
        rest = after;
        taken
    };
    let head = take(5);
    let bounds = take(Bound::ALL.len());
    let kinds = take(Kind::ALL.len());
    let events = take(Event::ALL.len());
    let local_events = take(Event::ALL.len());
    let length = take(1)[0];
    let fill = |from: &[u64], at: usize| from.get(at).copied().unwrap_or_default();
    ReportedGroup {
        id: head[0],
        parent: head[1],
        charged: head[2],
        peak: head[3],
        stalled_us: head[4],
        bounds: core::array::from_fn(|at| fill(bounds, at)),
        kinds: core::array::from_fn(|at| fill(kinds, at)),
        events: core::array::from_fn(|at| fill(events, at)),
        local_events: core::array::from_fn(|at| fill(local_events, at)),
        name: name_of(length, rest),
        ..ReportedGroup::default()
    }
}

impl ReadGroups {
    /// Requests reports of all groups, or reads them in the process's memory where no thread of it
    /// answers. Returns `None` if there are none, or if there were none when the process last
    /// published its text.
    pub(crate) fn ask(process: &ProcessStatus, page: &Page, haste: Haste) -> Result<Option<ReadGroups>> {
        // The text has "groups" from the first group on.
        if page.lacks("groups") {
            return Ok(None);
        }
        let (layout, allowance) = (MemoryLayout::of(page, "groups"), &process.allowance);
        ask_or_read(
            process,
            layout,
            haste,
            |haste| ReadGroups::at(&ControlChannel::of(process, page)?.with_haste(haste), allowance),
            |memory, layout| {
                let seen = in_memory::read(memory, layout, page, allowance)?;
                seen.finished(process.pid, allowance).map(Some)
            },
        )
    }

    /// Requests reports of all groups of a process that has some.
    pub(crate) fn at(channel: &ControlChannel<'_>, allowance: &Allowance) -> Result<Option<ReadGroups>> {
        let mut seen = ReadGroups::default();
        let is_there = channel.reports(GROUPS, |words| read(words, &mut seen, allowance))?;
        let seen = seen.finished(channel.pid(), allowance)?;
        Ok(is_there.then_some(seen))
    }

    /// Arranges the groups, and adds up their numbers.
    fn finished(mut self, pid: i32, allowance: &Allowance) -> Result<ReadGroups> {
        self.arrange(allowance).with_context(|| format!("cannot read the groups of process {pid}"))?;
        self.settle();
        Ok(self)
    }

    /// Returns the groups of the first manager in the process that has some.
    pub(crate) fn of(process: &ProcessStatus) -> Result<Option<ReadGroups>> {
        for page in process.pages()? {
            if let Some(seen) = ReadGroups::ask(process, &page, Haste::Unhurried)? {
                return Ok(Some(seen));
            }
        }
        Ok(None)
    }

    /// Puts the groups in the order of their paths, from the root down. Leaves out a group that
    /// claims to be its own ancestor, or whose parent is not in the reports.
    pub(crate) fn arrange(&mut self, allowance: &Allowance) -> Result<()> {
        let groups = &mut self.groups;
        groups
            .sort_unstable_by(|one, other| (one.parent, &one.name, one.id).cmp(&(other.parent, &other.name, other.id)));
        let mut families: BTreeMap<u64, Range<usize>> = BTreeMap::new();
        for (at, group) in groups.iter().enumerate() {
            families.entry(group.parent).or_insert(at..at).end = at + 1;
        }
        // Places of groups, each with the place of its parent.
        let mut open: Vec<(usize, Option<usize>)> = Vec::new();
        let family = |open: &mut Vec<_>, range: Option<Range<usize>>, parent: Option<usize>| {
            open.extend(range.into_iter().flatten().rev().map(|at| (at, parent)));
        };
        family(&mut open, families.remove(&0), None);
        let mut count = 0;
        while let Some((at, parent)) = open.pop() {
            if let Some(parent) = parent.map(|parent| &groups[parent]) {
                let depth = parent.depth + 1;
                ensure!(depth <= DEEPEST as usize, "a group lies deeper than {DEEPEST} levels, the most of neap");
                let slash = if parent.path.is_empty() { "" } else { "/" };
                let path = [&parent.path, slash, &groups[at].name].concat();
                allowance.take(path.len())?;
                (groups[at].depth, groups[at].path) = (depth, path);
            }
            count += 1;
            groups[at].rank = count;
            family(&mut open, families.remove(&groups[at].id), Some(at));
        }
        groups.retain(|group| group.rank > 0);
        groups.sort_unstable_by_key(|group| group.rank);
        // Each entry of a deleted group is shown with the path of its heir.
        let lengths: BTreeMap<u64, usize> = groups.iter().map(|group| (group.id, group.path.len())).collect();
        self.gone.iter().try_for_each(|gone| allowance.take(lengths.get(&gone.heir).copied().unwrap_or_default()))
    }

    /// The group at a path.
    pub(crate) fn find(&self, path: &str) -> Option<&ReportedGroup> {
        self.groups.iter().find(|group| group.path == path)
    }

    /// The charges that wait at a group.
    fn waiting_at(&self, group: &ReportedGroup) -> &[WaitingCharge] {
        let start = self.waiting.partition_point(|waiting| waiting.at < group.id);
        &self.waiting[start..start + group.waiting as usize]
    }

    /// Computes the usage of each group with the groups below it. The caller has called
    /// [`ReadGroups::arrange`] before.
    fn settle(&mut self) {
        let places: BTreeMap<u64, usize> = self.groups.iter().enumerate().map(|(at, group)| (group.id, at)).collect();
        self.waiting.sort_unstable_by_key(|waiting| (waiting.at, waiting.reason, waiting.group));
        for waits in self.waiting.chunk_by(|one, other| one.at == other.at) {
            if let Some(&at) = places.get(&waits[0].at) {
                self.groups[at].waiting = waits.len() as u64;
            }
        }
        // For each group: unused bytes of the groups below it, and the sums of its children's used
        // and charged bytes.
        let mut sums = vec![[0_u64; 3]; self.groups.len()];
        // Children come after their parents.
        for at in (0..self.groups.len()).rev() {
            let [mut unused, used, charged] = sums[at];
            let group = &mut self.groups[at];
            group.stocked = self.unused.get(&group.id).copied().unwrap_or_default();
            unused = unused.saturating_add(group.stocked);
            group.used = group.charged.saturating_sub(unused);
            if group.used < used || group.charged < charged {
                self.raised += 1;
                (group.used, group.charged) = (group.used.max(used), group.charged.max(charged));
            }
            let own = [unused, group.used, group.charged];
            if group.depth > 0
                && let Some(&parent) = places.get(&group.parent)
            {
                sums[parent].iter_mut().zip(own).for_each(|(sum, own)| *sum = sum.saturating_add(own));
            }
        }
    }

    fn json(&self) -> impl Serialize {
        let group = |group: &ReportedGroup| {
            let bounds: Map<String, Value> = Bound::ALL
                .iter()
                .map(|&bound| (bound.name().into(), bound_json(bound, group.bounds[bound as usize])))
                .collect();
            let kinds: Map<String, Value> =
                Kind::ALL.iter().map(|&kind| (kind.name().into(), group.kinds[kind as usize].into())).collect();
            let events = |counts: &[u64]| -> Map<String, Value> {
                Event::ALL.iter().map(|&event| (event.name().into(), counts[event as usize].into())).collect()
            };
            json!({
                "path": group.path, "id": group.id, "charged": group.charged, "used": group.used, "peak": group.peak,
                "bounds": bounds, "own": kinds, "stocked": group.stocked, "stalled_us": group.stalled_us,
                "events": events(&group.events), "local_events": events(&group.local_events),
            })
        };
        let waiting = |waiting: &WaitingCharge| {
            json!({
                "group": waiting.group, "at": waiting.at, "reason": waiting.reason, "bytes": waiting.bytes,
                "waited_ns": waiting.waited, "left_ns": waiting.left,
            })
        };
        let gone = |gone: &Gone| json!({"id": gone.id, "heir": gone.heir, "bytes": gone.bytes});
        GroupsJson {
            groups: Rows(&self.groups, group),
            gone: Rows(&self.gone, gone),
            waiting: Rows(&self.waiting, waiting),
            dying: self.dying,
            ids: self.ids,
            metadata_bytes: self.metadata,
            fences: self.fences,
            raised: self.raised,
            from_memory: self.is_from_memory,
        }
    }
}

/// The JSON object of groups.
#[derive(Serialize)]
struct GroupsJson<G: Serialize, L: Serialize, W: Serialize> {
    groups: G,
    gone: L,
    waiting: W,
    dying: u64,
    ids: u64,
    metadata_bytes: u64,
    fences: u64,
    /// Groups shown with the sum of those below them.
    raised: u64,
    /// Whether the process did not answer, and its memory was read.
    from_memory: bool,
}

/// A bound, or null if there is none.
fn bound_json(bound: Bound, bytes: u64) -> Value {
    if bytes == UNLIMITED && matches!(bound, Bound::Max | Bound::High) { Value::Null } else { bytes.into() }
}

/// Returns the container that the option `limit` follows, if it follows one. The container bounds
/// the root group.
fn container(process: &ProcessStatus) -> Option<ContainerNumbers> {
    Numbers::read(process, &process.page().ok()?).ok()?.container
}

/// Shows a process's groups. With `dead`, also shows the remains of deleted groups.
pub(crate) fn show(subject: &Subject, json: bool, dead: bool) -> Result<ExitCode> {
    let (process, (seen, container)) = subject.look(|process| Ok((ReadGroups::of(process)?, container(process))))?;
    if json {
        return print_json(&process.named("memory_groups", &seen.as_ref().map(ReadGroups::json)));
    }
    let colours = Colours::of_output();
    print(|output| match &seen {
        Some(seen) => {
            tree::write(output, &process, seen, colours)?;
            if dead {
                tree::write_dead(output, seen)?;
            }
            container.iter().try_for_each(|container| write!(output, "\n{}", container.shown(colours)))
        }
        None => writeln!(output, "Process {} ({}) has no memory groups.", process.pid, process.name),
    })
}

#[cfg(test)]
impl ReadGroups {
    /// Returns groups as if they came from reports.
    pub(crate) fn of_groups(groups: Vec<ReportedGroup>) -> ReadGroups {
        let mut seen = ReadGroups { groups, ..ReadGroups::default() };
        seen.arrange(&Allowance::new(core::time::Duration::from_secs(1000))).unwrap();
        seen
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use core::time::Duration;

    /// A report of groups as the crate `neap` writes them.
    pub(crate) fn words(groups: &[(u64, u64, &str)], next: u64) -> Vec<u64> {
        let mut words = vec![1, groups.len() as u64, next, 0, groups.len() as u64, 0, 9, 9, 4096, 3];
        assert_eq!(words.len(), HEAD);
        for (id, parent, name) in groups {
            // A parent's charge includes the groups below it.
            let charged = [20_000, 9000, 3000, 4000].get(*id as usize - 1).copied().unwrap_or(1000 * id);
            words.extend([*id, *parent, charged, 2 * charged, 60_000 * id]);
            words.extend([UNLIMITED, UNLIMITED, 0, 0]);
            words.extend([1, 2, 3, 4]);
            words.extend(Event::ALL.map(|event| if event == Event::Refused { *id } else { 0 }));
            words.extend([0; Event::ALL.len()]);
            words.push(name.len() as u64);
            let mut padded = name.as_bytes().to_vec();
            padded.resize(neap_groups_name(), 0);
            words.extend(padded.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap())));
        }
        words
    }

    fn neap_groups_name() -> usize {
        8 * (GROUP - 6 - Bound::ALL.len() - Kind::ALL.len() - 2 * Event::ALL.len())
    }

    /// Reads reports as if they were the whole answer, and shows the result.
    pub(crate) fn show_reports(reports: &[Vec<u64>], allowance: &Allowance) -> Result<[String; 2]> {
        let (process, mut seen, mut text) =
            (crate::look::stat_reader::tests::ended(), ReadGroups::default(), Vec::new());
        for words in reports {
            read(words, &mut seen, allowance)?;
        }
        seen.arrange(allowance)?;
        seen.settle();
        tree::write(&mut text, &process, &seen, Colours::NONE)?;
        tree::write_dead(&mut text, &seen)?;
        Ok([String::from_utf8(text)?, serde_json::to_string(&seen.json())?])
    }

    /// Reports of unused bytes, and of charges that wait.
    pub(crate) fn other_words() -> [Vec<u64>; 2] {
        let left = [1, 3, u64::MAX, 1, 4, 0, 9, 5, 4096, 3, 3, 100, 0, 3, 50, 0, 2, 77, 9];
        let waiting =
            [1, 2, u64::MAX, 2, 4, 0, 9, 5, 4096, 3, 3, 2, 3, 100, 2_500_000_000, u64::MAX, 4, 2, 0, 50, 7, 9];
        [left.to_vec(), waiting.to_vec()]
    }

    pub(super) fn seen() -> ReadGroups {
        let mut seen = ReadGroups::default();
        let first = words(&[(1, 0, ""), (2, 1, "tenant"), (4, 2, "beta")], 3);
        let allowance = &Allowance::new(Duration::from_secs(1000));
        assert_eq!(read(&first, &mut seen, allowance).unwrap(), Some(Some(3)));
        assert_eq!(read(&words(&[(3, 2, "acme")], 1 << 30), &mut seen, allowance).unwrap(), Some(Some(1 << 30)));
        for words in other_words() {
            assert_eq!(read(&words, &mut seen, allowance).unwrap(), Some(None));
        }
        seen.arrange(allowance).unwrap();
        seen.settle();
        seen
    }

    #[test]
    fn a_report_is_read_as_it_was_meant() {
        let seen = seen();
        let paths: Vec<_> = seen.groups.iter().map(|group| (group.path.clone(), group.depth)).collect();
        let expected = [("", 0), ("tenant", 1), ("tenant/acme", 2), ("tenant/beta", 2)];
        assert_eq!(paths, expected.map(|(path, depth)| (path.to_string(), depth)));
        let acme = seen.find("tenant/acme").unwrap();
        assert_eq!((acme.id, acme.stocked, acme.used), (3, 150, 2850));
        assert_eq!((seen.find("").unwrap().used, seen.raised), (19_850, 0));
        assert_eq!(seen.gone, [Gone { id: 9, heir: 2, bytes: 77 }]);
        let barred = WaitingCharge { group: 3, at: 2, reason: "barred", bytes: 100, waited: 2_500_000_000, left: None };
        assert_eq!((seen.waiting[0], seen.waiting[1].left, seen.groups[1].waiting), (barred, Some(9), 2));
        let json = serde_json::to_value(seen.json()).unwrap();
        assert_eq!(json["groups"][2]["path"], "tenant/acme");
        let events = ["events", "local_events"].map(|name| json["groups"][2][name]["refused"].as_u64());
        assert_eq!((events, json["groups"][2]["stalled_us"].as_u64()), ([Some(3), Some(0)], Some(180_000)));
        assert_eq!((json["groups"][2]["bounds"]["max"].clone(), json["ids"].clone()), (Value::Null, 5.into()));
    }

    #[test]
    fn group_grown_after_parent_read_raises_parent_sum() {
        let mut seen = ReadGroups::default();
        let allowance = &Allowance::new(Duration::from_secs(1000));
        let mut late = words(&[(1, 0, ""), (2, 1, "tenant"), (3, 2, "acme"), (4, 1, "beta")], u64::MAX);
        late[HEAD + 2] = 30;
        late[HEAD + GROUP + 2] = 2000;
        read(&late, &mut seen, allowance).unwrap();
        seen.arrange(allowance).unwrap();
        seen.settle();
        let numbers = |path: &str| seen.find(path).map(|group| (group.used, group.charged)).unwrap();
        let sums = [numbers(""), numbers("tenant"), numbers("tenant/acme"), numbers("beta")];
        assert_eq!((sums, seen.raised), ([(7000, 7000), (3000, 3000), (3000, 3000), (4000, 4000)], 2));
        let mut text = Vec::new();
        tree::write(&mut text, &crate::look::stat_reader::tests::ended(), &seen, Colours::NONE).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("2 of them are shown with the sum") && text.contains("beta"), "{text}");
        for percent in text.lines().filter_map(|line| line.strip_suffix(" %")?.rsplit(' ').next()) {
            assert!(percent.parse::<u64>().is_ok_and(|percent| percent <= 100), "{text}");
        }
    }

    #[test]
    fn group_deeper_than_any_can_be_is_refused() {
        let allowance = &Allowance::new(Duration::from_secs(1000));
        let names: Vec<String> = (0..34).map(|depth| format!("g{depth}")).collect();
        for (groups, is_right) in [(33, true), (34, false)] {
            let mut seen = ReadGroups::default();
            let chain: Vec<_> = (0..groups).map(|at| (at as u64 + 1, at as u64, names[at].as_str())).collect();
            read(&words(&chain, u64::MAX), &mut seen, allowance).unwrap();
            assert_eq!(seen.arrange(allowance).is_ok(), is_right, "{groups} groups");
        }
    }

    #[test]
    fn a_report_that_makes_no_sense_is_refused_or_shown_as_it_is() {
        let allowance = &Allowance::new(Duration::from_secs(1000));
        let good = words(&[(1, 0, ""), (2, 1, "a")], 3);
        assert!(read(&good[..HEAD - 1], &mut ReadGroups::default(), allowance).is_err());
        for count in [3, 1 << 40, u64::MAX] {
            let mut bad = good.clone();
            bad[1] = count;
            assert!(read(&bad, &mut ReadGroups::default(), allowance).is_err());
        }
        // A group below itself, a name longer than there is room for, control characters.
        let mut odd = words(&[(1, 0, "\u{1b}[2J"), (2, 2, "loop"), (3, 4, "x"), (4, 3, "y")], 3);
        odd[HEAD + GROUP - 8] = u64::MAX;
        let mut seen = ReadGroups::default();
        read(&odd, &mut seen, allowance).unwrap();
        assert!(!seen.groups[0].name.contains('\u{1b}'));
        seen.arrange(allowance).unwrap();
        assert_eq!(seen.groups.len(), 1);
        seen.settle();
    }
}
