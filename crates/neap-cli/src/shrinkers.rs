//! Shrinkers of a running process: `neap stat PID --shrinkers`, and `neap shrink`, which makes one
//! of them free objects.
//!
//! The reports come from the process's [control channel](crate::look::control_channel), in the
//! format of `crates/neap/src/reports/shrinker_report.rs`. This command does not trust them, and
//! checks sizes. It requests the counts of shrinkers one after the other. For each count, the
//! process calls the shrinker's `count` callback.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use neap::reclaim::Misbehaviour;
use neap::shrinker_report::{BY_GROUP, BY_NODE, GONE, HEAD, INLINE, MORE, MOST_PLACES, PLACE, SHRINKER};
use serde::Serialize;
use serde_json::{Value, json};

use crate::groups::ReadGroups as Groups;
use crate::look::allowance::{ALLOCATION, Allowance};
use crate::look::control_channel::{Asleep, ChannelRequest, ControlChannel, NO_RECLAIMER, SHRINK, SHRINKERS, name_of};
use crate::look::foreign::escaped;
use crate::look::silence::has_neaps_thread;
use crate::look::stat_reader::{Page, ProcessStatus};
use crate::look::subject::{Rows, Subject, print, print_json};
use crate::report::{number, write_table};

const EXAMPLES: &str = "\
Examples:
  neap shrink 1234 pages 100
                          have the cache \"pages\" of process 1234 scan 100 objects of each group
  neap shrink 1234 pages 100 --group tenant/acme
                          scan 100 objects of one group only
  neap stat 1234 --shrinkers
                          list the shrinkers of process 1234

Only the process's own user and root may have its caches shrink. The callbacks of a cache run on
threads that neap has in the process for this purpose. A callback that has not returned after 100 ms
is written off, and its shrinker is not called for some time. With NEAP=background:off the process
has no such thread, and only neap's own caches (neap:sheaves and others) are asked. A thread of the
program could not run the callback, since it may hold a lock that the callback takes.";

/// Have a cache of a running process free objects.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ShrinkersOptions {
    #[command(flatten)]
    subject: Subject,
    /// Name of the shrinker; all shrinkers with this name are asked
    name: String,
    /// Number of objects to scan, for each group and node
    objects: u64,
    /// Only objects of the memory group at this path
    #[arg(long, value_name = "PATH")]
    group: Option<String>,
    /// Only objects on this NUMA node
    #[arg(long)]
    node: Option<u32>,
}

/// A shrinker's objects of a group on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupNode {
    group: u64,
    node: u32,
    deferred: u64,
    /// Number of objects. `None` if the process has not asked the shrinker yet, or got no answer.
    objects: Option<u64>,
}

/// A shrinker in a report.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ReportedShrinker {
    id: u64,
    flags: u64,
    seeks: u64,
    batch: u64,
    calls: u64,
    scanned: u64,
    freed: u64,
    nanoseconds: u64,
    blames: [u64; Misbehaviour::ALL.len()],
    barred: u64,
    name: String,
    places: Vec<GroupNode>,
}

impl ReportedShrinker {
    /// Requests the groups that did not fit into the first report.
    fn ask_more(&mut self, channel: &ControlChannel<'_>, allowance: &Allowance) -> Result<()> {
        while self.flags & MORE != 0 {
            let (what, from, cpu) = (SHRINKERS, self.id as u32, Some(self.places.len() as u32));
            ensure!(
                channel.ask(&ChannelRequest { what, from, cpu, ..ChannelRequest::default() })? == 0,
                "the process has not reported the groups of shrinker {}",
                self.name
            );
            let mut more = Seen::default();
            read(&channel.report()?, &mut more, allowance)
                .with_context(|| format!("cannot read the shrinkers of process {}", channel.pid()))?;
            // The process may have removed the shrinker meanwhile.
            let Some(found) = more.shrinkers.into_iter().find(|found| found.id == self.id) else { break };
            self.flags = if found.places.is_empty() { found.flags & !MORE } else { found.flags };
            self.places.extend(found.places);
        }
        Ok(())
    }
}

/// All shrinkers of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    shrinkers: Vec<ReportedShrinker>,
    /// Number of reclaimers, of reclaimers in a callback that does not return, of waits for
    /// reclaimers, and of waits without success.
    threads: [u64; 4],
    /// For direct and for background passes: number of passes, groups asked, objects scanned,
    /// objects freed, and bytes.
    passes: [[u64; 5]; 2],
    /// Paths of the groups of shrinkers.
    paths: BTreeMap<u64, String>,
    /// Whether the time was over before the command had asked each shrinker for its count.
    is_cut: bool,
}

/// Adds one report. Returns the next index to request.
fn read(words: &[u64], seen: &mut Seen, allowance: &Allowance) -> Result<Option<Option<u32>>> {
    ensure!(words.len() >= HEAD, "it has {} words", words.len());
    if words[0] == 0 {
        return Ok(None);
    }
    seen.threads = core::array::from_fn(|at| words[3 + at]);
    seen.passes = core::array::from_fn(|which| core::array::from_fn(|at| words[7 + 5 * which + at]));
    let mut rest = &words[HEAD..];
    for _ in 0..words[1] {
        let (head, more) = rest.split_at_checked(SHRINKER).context("it ends within a shrinker")?;
        let count = head[SHRINKER - 1] as usize;
        ensure!(count <= MOST_PLACES, "{count} groups of a shrinker in it");
        let (places, more) = more.split_at_checked(count * PLACE).context("it ends within a shrinker's groups")?;
        rest = more;
        let place =
            |words: &[u64]| GroupNode { group: words[0], node: words[1] as u32, deferred: words[2], objects: None };
        let name = name_of(head[12], &head[13..SHRINKER - 1]);
        // Each group is kept twice while a table is written.
        let bytes = size_of::<ReportedShrinker>() + name.len() + 2 * count * size_of::<GroupNode>();
        allowance.take(bytes + 2 * ALLOCATION)?;
        seen.shrinkers.push(ReportedShrinker {
            id: head[0],
            flags: head[1],
            seeks: head[2],
            batch: head[3],
            calls: head[4],
            scanned: head[5],
            freed: head[6],
            nanoseconds: head[7],
            blames: core::array::from_fn(|at| head[8 + at]),
            barred: head[11],
            name,
            places: places.chunks_exact(PLACE).map(place).collect(),
        });
    }
    Ok(Some(u32::try_from(words[2]).ok()))
}

/// Makes a request that has a shrinker count its objects, or scan some.
fn request(shrinker: u64, place: &GroupNode, objects: Option<u64>) -> ChannelRequest {
    let (index, rest) = (shrinker as u32, (shrinker >> 32) as u32);
    ChannelRequest {
        what: SHRINK,
        from: index,
        cpu: Some(rest),
        node: Some(place.node),
        until: objects,
        group: place.group,
    }
}

impl Seen {
    /// Requests reports of all shrinkers. On the first request, the process registers neap's own
    /// shrinkers and makes memory groups. Returns `None` if the process has no memory for that.
    fn ask(process: &ProcessStatus, page: &Page) -> Result<Option<Seen>> {
        let (channel, allowance, mut seen) = (ControlChannel::of(process, page)?, &process.allowance, Seen::default());
        if !channel.reports(SHRINKERS, |words| read(words, &mut seen, allowance))? {
            return Ok(None);
        }
        seen.shrinkers.iter_mut().try_for_each(|shrinker| shrinker.ask_more(&channel, allowance))?;
        let Some(groups) = Groups::at(&channel, allowance)? else { return Ok(None) };
        let places = seen.shrinkers.iter().flat_map(|shrinker| &shrinker.places);
        let wanted: BTreeSet<u64> = places.map(|place| place.group).collect();
        let known = groups.groups.into_iter().filter(|group| wanted.contains(&group.id));
        seen.paths = known.map(|group| (group.id, group.path)).collect();
        // Each place is shown with its path.
        for place in seen.shrinkers.iter().flat_map(|shrinker| &shrinker.places) {
            let length = seen.paths.get(&place.group).map_or(0, String::len);
            allowance.take(length).with_context(|| format!("cannot read the shrinkers of process {}", process.pid))?;
        }
        Ok(Some(seen))
    }

    fn path(&self, group: u64) -> String {
        match self.paths.get(&group).map(String::as_str) {
            Some("") => "(all)".to_string(),
            Some(path) => path.to_string(),
            None => format!("group {group}"),
        }
    }

    /// Requests the count of each shrinker that is not barred, until the time is over.
    fn count(&mut self, channel: &ControlChannel<'_>, allowance: &Allowance) -> Result<()> {
        for shrinker in self.shrinkers.iter_mut().filter(|shrinker| shrinker.barred == 0) {
            let id = shrinker.id;
            for place in &mut shrinker.places {
                match channel.ask(&request(id, place, None)) {
                    Ok(refusal) => place.objects = (refusal == 0).then(|| channel.number(OBJECTS)),
                    Err(_) if allowance.is_over() => {
                        self.is_cut = true;
                        return Ok(());
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    fn write(&self, output: &mut dyn Write, process: &ProcessStatus) -> io::Result<()> {
        let [threads, lost, waits, late] = self.threads;
        let [direct, background] = self.passes;
        writeln!(
            output,
            "Process {} ({}): {threads} reclaimers, {lost} that do not come back; {waits} waits for them, {late} in vain",
            process.pid, process.name,
        )?;
        for (name, [passes, visits, scanned, freed, bytes]) in [("Direct", direct), ("Background", background)] {
            writeln!(
                output,
                "{name}: {passes} passes asked {visits} groups, looked at {scanned} objects, freed {freed}; {} MiB",
                number(bytes as f64 / f64::from(1 << 20), 1)
            )?;
        }
        let row = |shrinker: &ReportedShrinker| {
            let milliseconds = number(shrinker.nanoseconds as f64 / 1e6, 1);
            let numbers = [shrinker.calls, shrinker.scanned, shrinker.freed].map(|count| count.to_string());
            let state = match (shrinker.flags & GONE != 0, shrinker.barred) {
                (true, _) => "gone",
                (_, 0) => "",
                (_, 1) => "barred",
                _ => "does not come back",
            };
            let blames = shrinker.blames.map(|count| count.to_string());
            [shrinker.name.clone()]
                .into_iter()
                .chain(numbers)
                .chain([milliseconds])
                .chain(blames)
                .chain([state.to_string()])
                .collect()
        };
        let mut heads = vec!["shrinker", "calls", "looked at", "freed", "ms"];
        heads.extend(Misbehaviour::ALL.map(Misbehaviour::name));
        heads.push("state");
        writeln!(output)?;
        write_table(output, &heads, &self.shrinkers, &row)?;
        let places =
            self.shrinkers.iter().flat_map(|shrinker| shrinker.places.iter().map(move |place| (shrinker, place)));
        let places: Vec<(&ReportedShrinker, &GroupNode)> = places.collect();
        writeln!(output)?;
        write_table(output, &["group", "shrinker", "node", "objects", "deferred"], &places, &|(shrinker, place)| {
            let objects = place.objects.map_or("?".to_string(), |objects| objects.to_string());
            let node = if shrinker.flags & BY_NODE != 0 { place.node.to_string() } else { String::new() };
            vec![self.path(place.group), shrinker.name.clone(), node, objects, place.deferred.to_string()]
        })?;
        if self.is_cut {
            let seconds = process.allowance.seconds();
            writeln!(output, "\nNot all shrinkers were asked within {seconds} s; --timeout SECONDS allows more.")?;
        }
        Ok(())
    }

    fn json(&self) -> impl Serialize {
        let pass = |[passes, visits, scanned, freed, bytes]: [u64; 5]| json!({"passes": passes, "groups": visits, "scanned": scanned, "freed": freed, "bytes": bytes});
        let place = |place: &GroupNode| {
            let path = self.paths.get(&place.group);
            json!({"group": place.group, "path": path, "node": place.node, "objects": place.objects, "deferred": place.deferred})
        };
        let shrinker = move |shrinker: &ReportedShrinker| {
            let blames: serde_json::Map<_, _> = Misbehaviour::ALL
                .iter()
                .zip(shrinker.blames)
                .map(|(verdict, count)| (verdict.name().into(), count.into()))
                .collect();
            let is = |flag: u64| shrinker.flags & flag != 0;
            json!({
                "name": shrinker.name, "id": shrinker.id, "by_node": is(BY_NODE), "by_group": is(BY_GROUP), "inline": is(INLINE),
                "gone": is(GONE), "seeks": shrinker.seeks, "batch": shrinker.batch, "calls": shrinker.calls,
                "scanned": shrinker.scanned, "freed": shrinker.freed, "nanoseconds": shrinker.nanoseconds, "blamed": blames,
                "barred": shrinker.barred > 0, "places": shrinker.places.iter().map(place).collect::<Vec<_>>(),
            })
        };
        let [reclaimers, lost, waits, late] = self.threads;
        let [direct, background] = self.passes.map(pass);
        ShrinkersJson {
            reclaimers,
            lost,
            waits,
            late,
            direct,
            background,
            all_asked: !self.is_cut,
            shrinkers: Rows(&self.shrinkers, shrinker),
        }
    }
}

/// The JSON object of shrinkers.
#[derive(Serialize)]
struct ShrinkersJson<S: Serialize> {
    reclaimers: u64,
    lost: u64,
    waits: u64,
    late: u64,
    direct: Value,
    background: Value,
    /// Whether the command had time to ask each shrinker for its count.
    all_asked: bool,
    shrinkers: S,
}

/// Offset of the number of objects in the answer.
const OBJECTS: usize = 56;

/// Whether a process had no shrinkers when it wrote its text, which it does when it makes some.
fn has_none(process: &ProcessStatus, page: &Page) -> bool {
    page.object.get("has_shrinkers") == Some(&Value::Bool(false)) && !has_neaps_thread(&process.handle)
}

/// `neap stat PID --shrinkers`.
pub(crate) fn show(subject: &Subject, is_json: bool) -> Result<ExitCode> {
    let (process, seen) = subject.look(|process| {
        for page in process.pages()? {
            let asked = match Seen::ask(process, &page) {
                Err(error) if error.is::<Asleep>() && has_none(process, &page) => None,
                asked => asked?,
            };
            if let Some(mut seen) = asked {
                seen.count(&ControlChannel::of(process, &page)?, &process.allowance)?;
                return Ok(Some(seen));
            }
        }
        Ok(None)
    })?;
    if is_json {
        return print_json(&process.named("reclaim", &seen.as_ref().map(Seen::json)));
    }
    print(|output| match &seen {
        Some(seen) => seen.write(output, &process),
        None => writeln!(output, "Process {} ({}) has no shrinkers.", process.pid, process.name),
    })
}

/// The scans that `neap shrink` has requested, and their results.
#[derive(Default)]
struct Shrunk {
    asked: usize,
    unanswered: usize,
    /// The answers in words.
    text: String,
}

impl Shrunk {
    /// Requests the wanted scans from the page's manager, until the time is over.
    fn ask(process: &ProcessStatus, page: &Page, wanted: &WantedScan) -> Result<Shrunk> {
        let mut shrunk = Shrunk::default();
        let Some(seen) = Seen::ask(process, page)? else { return Ok(shrunk) };
        let channel = ControlChannel::of(process, page)?;
        for shrinker in seen.shrinkers.iter().filter(|it| it.name == wanted.name && it.flags & GONE == 0) {
            for place in &shrinker.places {
                let path = seen.paths.get(&place.group);
                let is_of_group = wanted.group.as_ref().is_none_or(|group| path == Some(group));
                if !is_of_group || wanted.node.is_some_and(|node| place.node != node) {
                    continue;
                }
                shrunk.asked += 1;
                let said = match channel.ask(&request(shrinker.id, place, Some(wanted.objects))) {
                    Ok(0) => format!("{} objects freed", channel.number(OBJECTS)),
                    Ok(refused) => {
                        shrunk.unanswered += 1;
                        let why = if refused == NO_RECLAIMER {
                            "not asked: the program's caches are asked on threads of neap's, and the process has none \
                             (NEAP=background:off?); only neap's own caches, called neap:..., need no thread"
                        } else {
                            "no answer (the shrinker is barred, gone, or too slow)"
                        };
                        why.to_string()
                    }
                    Err(error) if process.allowance.is_over() => {
                        shrunk.unanswered += 1;
                        shrunk.text += &format!("{}, node {}: {error:#}\n", seen.path(place.group), place.node);
                        return Ok(shrunk);
                    }
                    Err(error) => return Err(error),
                };
                let line = format!("{}, node {}: {said}\n", seen.path(place.group), place.node);
                process.allowance.take(line.len())?;
                shrunk.text += &line;
            }
        }
        Ok(shrunk)
    }
}

/// The scans that the user wants. Names are escaped like those in reports, so that both compare
/// equal.
struct WantedScan {
    name: String,
    objects: u64,
    group: Option<String>,
    node: Option<u32>,
}

/// `neap shrink`.
pub(crate) fn shrink(options: &ShrinkersOptions) -> Result<ExitCode> {
    let group = options.group.as_ref().map(|path| escaped(path.as_bytes()));
    let (name, objects, node) = (escaped(options.name.as_bytes()), options.objects, options.node);
    let wanted = WantedScan { name, objects, group, node };
    let (_, shrunk) = options.subject.look(move |process| {
        for page in process.pages()? {
            let shrunk = Shrunk::ask(process, &page, &wanted)?;
            if shrunk.asked > 0 {
                return Ok(shrunk);
            }
        }
        let of = wanted.group.map_or(String::new(), |path| format!(" with objects of group \"{path}\""));
        bail!("process {} has no shrinker \"{}\"{of}; `neap stat PID --shrinkers` lists them", process.pid, wanted.name)
    })?;
    print(|output| write!(output, "{}", shrunk.text))?;
    Ok(if shrunk.unanswered < shrunk.asked { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use core::time::Duration;

    /// A report of a shrinker with one group.
    pub(crate) fn words() -> Vec<u64> {
        let mut words = vec![0; HEAD];
        words[..3].copy_from_slice(&[1, 1, 7]);
        words[3..7].copy_from_slice(&[2, 1, 30, 4]);
        words[7] = 5;
        words.extend([7 << 32 | 3, BY_GROUP | INLINE, 2, 32, 10, 20, 15, 3_000_000, 1, 0, 2, 1, 5]);
        words.extend([u64::from_ne_bytes(*b"pages\0\0\0"), 0, 0, 0, 0, 0, 0, 1]);
        words.extend([99, 0, 12]);
        words
    }

    /// Reads a report as if it were the whole answer, and shows the result.
    pub(crate) fn show_report(words: &[u64], allowance: &Allowance) -> Result<[String; 2]> {
        let (process, mut seen, mut text) = (crate::look::stat_reader::tests::ended(), Seen::default(), Vec::new());
        read(words, &mut seen, allowance)?;
        seen.write(&mut text, &process)?;
        Ok([String::from_utf8(text)?, serde_json::to_string(&seen.json())?])
    }

    #[test]
    fn shrinker_report_reads_all_fields_and_refuses_damage() {
        let words = words();
        let (mut seen, allowance) = (Seen::default(), &Allowance::new(Duration::from_secs(1000)));
        assert_eq!(read(&words, &mut seen, allowance).unwrap(), Some(Some(7)));
        let [shrinker] = &seen.shrinkers[..] else { panic!("one shrinker") };
        let place = GroupNode { group: 99, node: 0, deferred: 12, objects: None };
        assert_eq!((shrinker.name.as_str(), shrinker.blames, &shrinker.places[..]), ("pages", [1, 0, 2], &[place][..]));
        let object = serde_json::to_value(seen.json()).unwrap();
        assert_eq!((object["direct"]["passes"].as_u64(), object["late"].as_u64()), (Some(5), Some(4)));
        assert_eq!(object["shrinkers"][0]["blamed"]["panicked"].as_u64(), Some(2));
        let asked = request(shrinker.id, &place, Some(5));
        assert_eq!((asked.from, asked.cpu, asked.group, asked.until), (3, Some(7), 99, Some(5)));
        for (at, wrong) in [(1, 2), (HEAD + SHRINKER - 1, 17), (1, u64::MAX)] {
            let mut damaged = words.clone();
            damaged[at] = wrong;
            assert!(read(&damaged, &mut Seen::default(), allowance).is_err(), "{at}");
        }
        assert!(read(&words[..HEAD - 1], &mut Seen::default(), allowance).is_err());
        assert_eq!(read(&[0; HEAD], &mut Seen::default(), allowance).unwrap(), None);
    }
}
