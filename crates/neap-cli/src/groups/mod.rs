//! Memory groups of a running process: `neap stat PID --groups`, `neap group`, which sets a bound,
//! and the reports for `neap top`.
//!
//! The reports come from the process's [desk](crate::desk); their format is described in the crate
//! `neap`, `group_report`. They are untrusted: sizes are checked, and all else is text and numbers.
//! The result is shown as a tree (`tree`), or as one JSON object.

mod bound;
mod tree;

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use neap::group_report::{GROUP, HEAD, LEFT, REASONS, WAITING};
use neap::groups::{Bound, Event, Kind, UNLIMITED};
use serde_json::{Map, Value, json};

use crate::desk::{Desk, GROUPS, name_of};
use crate::published::{Page, ProcessStatus};

pub(crate) use bound::main as change_bound;
pub(crate) use bound::{BoundOptions, bytes_of, change};

/// More groups than a process has ids for.
const MOST_GROUPS: usize = 1 << 21;

/// A group in a report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReportedGroup {
    pub(crate) id: u64,
    /// 0 for the root.
    pub(crate) parent: u64,
    pub(crate) name: String,
    /// Bytes, those of the groups below it and of stocks included.
    pub(crate) charged: u64,
    pub(crate) peak: u64,
    /// Microseconds in which it or those below it were stalled.
    pub(crate) stalled_us: u64,
    pub(crate) bounds: [u64; Bound::ALL.len()],
    /// Bytes of its own, by kind.
    pub(crate) kinds: [u64; Kind::ALL.len()],
    /// Those of the groups below it included.
    pub(crate) events: [u64; Event::ALL.len()],
    pub(crate) local_events: [u64; Event::ALL.len()],
    /// Bytes of its own that are not in use: stocked, or kept by caches.
    pub(crate) stocked: u64,
    /// Bytes that it and those below it use: charged bytes without unused ones.
    pub(crate) used: u64,
}

/// Bytes booked under the id of a group that is gone.
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
    /// The group with the limit that it waits at.
    pub(crate) at: u64,
    pub(crate) reason: &'static str,
    pub(crate) bytes: u64,
    /// Nanoseconds since it began, and until its deadline, if it has one.
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
    pub(crate) groups: Vec<ReportedGroup>,
    pub(crate) gone: Vec<Gone>,
    pub(crate) waiting: Vec<WaitingCharge>,
    pub(crate) dying: u64,
    /// Ids in use.
    pub(crate) ids: u64,
    /// Bytes of memory of the groups, besides per-CPU data.
    pub(crate) metadata: u64,
    pub(crate) fences: u64,
}

/// Adds one report. Returns the next slot to request.
fn read(words: &[u64], seen: &mut ReadGroups) -> Result<Option<Option<u32>>> {
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
            seen.groups.push(read_group(words));
        } else if kind > 1 {
            seen.waiting.push(WaitingCharge::read(words));
        } else if words[2] != 0 {
            seen.gone.push(Gone { heir: words[0], bytes: words[1], id: words[2] });
        } else if let Some(group) = seen.groups.iter_mut().find(|group| group.id == words[0]) {
            group.stocked += words[1];
        }
    }
    Ok(Some(u32::try_from(next).ok()))
}

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
    let length = take(1)[0] as usize;
    let name: Vec<u8> = rest.iter().flat_map(|word| word.to_ne_bytes()).take(length).collect();
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
        name: name_of(&name),
        stocked: 0,
        used: 0,
    }
}

impl ReadGroups {
    /// Requests reports of all groups; `None` if there are none, or were none when the process last
    /// published.
    pub(crate) fn ask(process: &ProcessStatus, page: &Page) -> Result<Option<ReadGroups>> {
        let numbers: Value = serde_json::from_slice(&page.text).unwrap_or_default();
        // The numbers have it from the first use on. A process without groups may have no thread
        // that answers.
        if numbers["groups"].is_null() {
            return Ok(None);
        }
        ReadGroups::at(&Desk::of(process, page)?)
    }

    /// Requests reports of all groups of a process that has some.
    pub(crate) fn at(desk: &Desk<'_>) -> Result<Option<ReadGroups>> {
        let mut seen = ReadGroups::default();
        let is_there = desk.reports(GROUPS, |words| {
            let next = read(words, &mut seen)?;
            ensure!(seen.groups.len() < MOST_GROUPS, "it has {} groups", seen.groups.len());
            Ok(next)
        })?;
        seen.settle();
        Ok(is_there.then_some(seen))
    }

    /// Returns the groups of the first page with any, of all pages that a process has published.
    pub(crate) fn of(process: &ProcessStatus) -> Result<Option<ReadGroups>> {
        for page in process.pages()? {
            if let Some(seen) = ReadGroups::ask(process, &page)? {
                return Ok(Some(seen));
            }
        }
        Ok(None)
    }

    /// The groups in the order of their paths, each with its path and how deep it is.
    pub(crate) fn sorted(&self) -> Vec<(String, usize, &ReportedGroup)> {
        let mut children: BTreeMap<u64, Vec<&ReportedGroup>> = BTreeMap::new();
        self.groups.iter().for_each(|group| children.entry(group.parent).or_default().push(group));
        children.values_mut().for_each(|children| children.sort_by(|one, other| one.name.cmp(&other.name)));
        let mut sorted = Vec::new();
        // From the root down. A group that claims to be its own ancestor is left out.
        let mut open: Vec<(String, usize, &ReportedGroup)> =
            children.remove(&0).into_iter().flatten().map(|root| (String::new(), 0, root)).collect();
        while let Some((path, depth, group)) = open.pop() {
            let below = children.remove(&group.id).into_iter().flatten().rev();
            let join = |name: &str| if path.is_empty() { name.to_string() } else { format!("{path}/{name}") };
            open.extend(below.map(|child| (join(&child.name), depth + 1, child)));
            sorted.push((path, depth, group));
        }
        sorted
    }

    /// The group at a path.
    pub(crate) fn find(&self, path: &str) -> Option<&ReportedGroup> {
        self.sorted().into_iter().find(|(each, ..)| each == path).map(|(.., group)| group)
    }

    /// Number of charges that wait at a group.
    pub(crate) fn waiting_at(&self, id: u64) -> u64 {
        self.waiting.iter().filter(|waiting| waiting.at == id).count() as u64
    }

    /// Computes the usage of each group with those below it, once all are known.
    fn settle(&mut self) {
        let order: Vec<(u64, u64)> = self.sorted().iter().map(|(.., group)| (group.id, group.parent)).collect();
        let mut stocked: BTreeMap<u64, u64> = self.groups.iter().map(|group| (group.id, group.stocked)).collect();
        // Children come after their parents.
        for (id, parent) in order.into_iter().rev() {
            let own = stocked.get(&id).copied().unwrap_or_default();
            *stocked.entry(parent).or_default() += own;
        }
        for group in &mut self.groups {
            group.used = group.charged.saturating_sub(stocked.get(&group.id).copied().unwrap_or_default());
        }
    }

    fn json(&self) -> Value {
        let group = |(path, _, group): &(String, usize, &ReportedGroup)| {
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
                "path": path, "id": group.id, "charged": group.charged, "used": group.used, "peak": group.peak,
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
        json!({
            "groups": self.sorted().iter().map(group).collect::<Vec<_>>(),
            "gone": self.gone.iter().map(gone).collect::<Vec<_>>(),
            "waiting": self.waiting.iter().map(waiting).collect::<Vec<_>>(),
            "dying": self.dying, "ids": self.ids, "metadata_bytes": self.metadata, "fences": self.fences,
        })
    }
}

/// A bound, or null if there is none.
fn bound_json(bound: Bound, bytes: u64) -> Value {
    if bytes == UNLIMITED && matches!(bound, Bound::Max | Bound::High) { Value::Null } else { bytes.into() }
}

/// Shows a process's groups; with `dead`, also the remains of deleted ones.
pub(crate) fn show(process: &ProcessStatus, json: bool, dead: bool) -> Result<ExitCode> {
    let seen = ReadGroups::of(process)?;
    if json {
        let groups = seen.as_ref().map(ReadGroups::json);
        println!("{}", json!({"pid": process.pid, "name": process.name, "memory_groups": groups}));
    } else if let Some(seen) = &seen {
        print!("{}", tree::report(process, seen, dead));
    } else {
        println!("Process {} ({}) has no memory groups.", process.pid, process.name.escape_debug());
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report of groups as the crate `neap` writes them.
    fn words(groups: &[(u64, u64, &str)], next: u64) -> Vec<u64> {
        let mut words = vec![1, groups.len() as u64, next, 0, groups.len() as u64, 0, 9, 9, 4096, 3];
        assert_eq!(words.len(), HEAD);
        for (id, parent, name) in groups {
            words.extend([*id, *parent, 1000 * id, 2000 * id, 60_000 * id]);
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

    pub(super) fn seen() -> ReadGroups {
        let mut seen = ReadGroups::default();
        let first = words(&[(1, 0, ""), (2, 1, "tenant"), (4, 2, "beta")], 3);
        assert_eq!(read(&first, &mut seen).unwrap(), Some(Some(3)));
        assert_eq!(read(&words(&[(3, 2, "acme")], 1 << 30), &mut seen).unwrap(), Some(Some(1 << 30)));
        let mut left = vec![1, 3, u64::MAX, 1, 4, 0, 9, 5, 4096, 3];
        left.extend([3, 100, 0, 3, 50, 0, 2, 77, 9]);
        assert_eq!(read(&left, &mut seen).unwrap(), Some(None));
        let waiting =
            [1, 2, u64::MAX, 2, 4, 0, 9, 5, 4096, 3, 3, 2, 3, 100, 2_500_000_000, u64::MAX, 4, 2, 0, 50, 7, 9];
        assert_eq!(read(&waiting, &mut seen).unwrap(), Some(None));
        seen.settle();
        seen
    }

    #[test]
    fn a_report_is_read_as_it_was_meant() {
        let seen = seen();
        let paths: Vec<_> = seen.sorted().into_iter().map(|(path, depth, _)| (path, depth)).collect();
        let expected = [("", 0), ("tenant", 1), ("tenant/acme", 2), ("tenant/beta", 2)];
        assert_eq!(paths, expected.map(|(path, depth)| (path.to_string(), depth)));
        let acme = seen.find("tenant/acme").unwrap();
        assert_eq!((acme.id, acme.stocked, acme.used), (3, 150, 2850));
        assert_eq!(seen.find("").unwrap().used, 850);
        assert_eq!(seen.gone, [Gone { id: 9, heir: 2, bytes: 77 }]);
        let barred = WaitingCharge { group: 3, at: 2, reason: "barred", bytes: 100, waited: 2_500_000_000, left: None };
        assert_eq!((seen.waiting[0], seen.waiting[1].left, seen.waiting_at(2)), (barred, Some(9), 2));
        let json = seen.json();
        assert_eq!(json["groups"][2]["path"], "tenant/acme");
        let events = ["events", "local_events"].map(|name| json["groups"][2][name]["refused"].as_u64());
        assert_eq!((events, json["groups"][2]["stalled_us"].as_u64()), ([Some(3), Some(0)], Some(180_000)));
        assert_eq!((json["groups"][2]["bounds"]["max"].clone(), json["ids"].clone()), (Value::Null, 5.into()));
    }

    #[test]
    fn a_report_that_makes_no_sense_is_refused_or_shown_as_it_is() {
        let good = words(&[(1, 0, ""), (2, 1, "a")], 3);
        assert!(read(&good[..HEAD - 1], &mut ReadGroups::default()).is_err());
        for count in [3, 1 << 40, u64::MAX] {
            let mut bad = good.clone();
            bad[1] = count;
            assert!(read(&bad, &mut ReadGroups::default()).is_err());
        }
        // A group below itself, a name longer than there is room for, control characters.
        let mut odd = words(&[(1, 0, "\u{1b}[2J"), (2, 2, "loop"), (3, 4, "x"), (4, 3, "y")], 3);
        odd[HEAD + GROUP - 8] = u64::MAX;
        let mut seen = ReadGroups::default();
        read(&odd, &mut seen).unwrap();
        assert!(!seen.groups[0].name.contains('\u{1b}'));
        assert_eq!(seen.sorted().len(), 1);
        seen.settle();
    }
}
