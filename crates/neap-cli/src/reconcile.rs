//! `neap stat PID --reconcile`: neap's counters of a process beside the kernel's resident memory.
//!
//! The reports on mappings, pages and counters come from the process's [control
//! channel](crate::look::control_channel). This command does not trust them, and checks sizes. The
//! crate `neap` computes the sums, so a process can compute them for itself, too. The process runs
//! meanwhile, so the numbers of a busy process are of slightly different moments.

use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use neap::groups::Kind;
use neap::map_report::{HEAD, RANGE, WORDS};
use neap::reconcile::{Books, Held, Range, Reconciliation, Source, Tally};
use neap_os::mappings::Mappings;
use serde_json::{Map, Value, json};

use crate::colours::Colours;
use crate::look::allowance::Allowance;
use crate::look::control_channel::Haste;
use crate::look::control_channel::{ControlChannel, MAP};
use crate::look::foreign::escaped;
use crate::look::fresh;
use crate::look::live::ArenaSums;
use crate::look::stat_reader::{Page, ProcessStatus};
use crate::look::subject::{SCHEMA, Subject, print, print_json};
use crate::process::parse_rss;

/// The reports of a process.
struct Told {
    books: Books,
    ranges: Vec<Range>,
    page: usize,
    base: usize,
    pieces: Vec<[u64; WORDS]>,
}

/// Reads one report. Returns the next piece to request.
fn read(words: &[u64], told: &mut Told, allowance: &Allowance) -> Result<Option<Option<u32>>> {
    ensure!(words.len() >= HEAD, "it has {} words", words.len());
    let &[is_there, next, page, base, from, pieces, ranges, numbers] = &words[..HEAD] else { bail!("it has no head") };
    if is_there == 0 {
        return Ok(None);
    }
    let mut rest = &words[HEAD..];
    let mut take = |count: u64, size: usize| {
        let length = usize::try_from(count).ok().and_then(|count| count.checked_mul(size));
        let (taken, after) = rest.split_at_checked(length?)?;
        rest = after;
        Some(taken)
    };
    let numbers = take(numbers, 1).with_context(|| format!("{numbers} numbers in it"))?;
    let ranges = take(ranges, RANGE).with_context(|| format!("{ranges} ranges in it"))?;
    let pieces = take(pieces, WORDS).with_context(|| format!("{pieces} pieces in it"))?;
    let least = neap_os::memory::page_size() as u64;
    ensure!(page.is_power_of_two() && (least..=1 << 20).contains(&page), "pages of {page} bytes in it");
    ensure!(base.is_multiple_of(page), "an arena in it begins at {base:#x}, within a page");
    ensure!(from == told.pieces.len() as u64, "it begins at piece {from}");
    if from == 0 {
        let expected = told.books.numbers().count();
        ensure!(numbers.len() == expected, "it has {} numbers, this neap knows {expected}", numbers.len());
        told.books.numbers().zip(numbers).for_each(|(to, number)| *to = *number);
        (told.page, told.base) = (page as usize, base as usize);
    }
    for range in ranges.chunks_exact(RANGE) {
        let of = Source::ALL.get(range[2] as usize).copied();
        let end = range[0].checked_add(range[1]).filter(|end| *end < 1 << 63);
        ensure!(of.is_some() && end.is_some(), "a range in it is {range:x?}");
        allowance.take(size_of::<Range>())?;
        told.ranges.push(Range {
            start: range[0] as usize,
            length: range[1] as usize,
            of: of.unwrap_or(Source::Arena),
        });
    }
    let room = (1_u64 << 47).saturating_sub(told.base as u64) / (told.page * WORDS * 16) as u64;
    ensure!(
        told.pieces.len() as u64 + pieces.len() as u64 / WORDS as u64 <= room,
        "more pages than there are addresses in it"
    );
    allowance.take(size_of_val(pieces))?;
    told.pieces.extend(pieces.chunks_exact(WORDS).filter_map(|words| <[u64; WORDS]>::try_from(words).ok()));
    Ok(Some(u32::try_from(next).ok()))
}

impl Told {
    const BLANK: Told = Told { books: Books::BLANK, ranges: Vec::new(), page: 4096, base: 0, pieces: Vec::new() };

    /// Requests the reports of a process. If it does not answer, returns the mappings in its page
    /// of numbers, and the reason why it did not answer.
    fn of(process: &ProcessStatus) -> Result<(Told, Option<anyhow::Error>)> {
        let page = process.page()?;
        let mut told = Told::BLANK;
        let asked = ControlChannel::of(process, &page).and_then(|channel| {
            channel.with_haste(Haste::Hurried).reports(MAP, |words| read(words, &mut told, &process.allowance))
        });
        match asked {
            Ok(true) => Ok((told, None)),
            Ok(false) => bail!("process {} has no memory of neap's yet", process.pid),
            Err(reason) => match Told::published(&page) {
                Some(told) => Ok((told, Some(reason))),
                None => Err(reason),
            },
        }
    }

    /// Returns the mappings in the page of numbers; `None` if it has none.
    fn published(page: &Page) -> Option<Told> {
        let range = |mapping: &Value| {
            let of = Source::ALL.into_iter().find(|source| mapping["of"] == format!("{source:?}"))?;
            let number = |key: &str| mapping[key].as_u64().filter(|number| *number < 1 << 62);
            Some(Range { start: number("start")? as usize, length: number("length")? as usize, of })
        };
        let ranges: Vec<Range> = page.object.get("mappings")?.as_array()?.iter().filter_map(range).collect();
        (!ranges.is_empty()).then_some(Told { ranges, ..Told::BLANK })
    }
}

fn compare(process: &ProcessStatus, told: &Told) -> Result<Reconciliation> {
    let path = |file| CString::new(process.handle.path(file).into_os_string().into_vec()).unwrap_or_default();
    let refused = |error: neap_os::Errno| process.refused(error.into());
    let view = Mappings::open(&path("smaps"), &path("pagemap")).map_err(refused)?;
    let mut tally = Tally::new(&told.ranges, told.books);
    tally.look(&view).map_err(refused)?;
    for (piece, uses) in told.pieces.iter().enumerate() {
        process.allowance.ensure_time().with_context(|| format!("process {}", process.pid))?;
        tally.look_at(&view, told.base, told.page, piece as u32, uses);
    }
    Ok(tally.end())
}

/// What is known of a process that did not answer.
struct Unanswered {
    reason: String,
    arena: ArenaSums,
    /// Whether the objects on CPUs' stacks were counted in the process's memory. Otherwise they are
    /// those of the last tick.
    are_stacks_read: bool,
}

impl Unanswered {
    fn of(process: &ProcessStatus, reason: &anyhow::Error) -> Result<Unanswered> {
        let page = fresh::page(process)?;
        let are_stacks_read = page.object.get("cpus_read_now").and_then(Value::as_bool).unwrap_or(false);
        let reason = escaped(format!("{reason:#}").as_bytes());
        Ok(Unanswered { reason, arena: page.live.arena(), are_stacks_read })
    }

    /// Keys in JSON, names and bytes.
    fn rows(&self) -> [(&'static str, &'static str, u64); 8] {
        let ArenaSums { in_use, on_stacks, in_sheaves, in_slabs, ends, holes, runs, listed } = self.arena;
        [
            ("objects_in_use", "objects in use, neap's too", in_use),
            ("objects_on_stacks", Held::InStacks.name(), on_stacks),
            ("objects_in_sheaves", Held::InBarns.name(), in_sheaves),
            ("objects_in_slabs", Held::InSlabs.name(), in_slabs),
            ("ends_of_slabs", Held::Waste.name(), ends),
            ("holes", Held::Holes.name(), holes),
            ("runs", Source::Runs.name(), runs),
            ("page_lists", Source::Listed.name(), listed),
        ]
    }

    fn object(&self) -> Value {
        let rows = self.rows().into_iter().map(|(key, _, bytes)| (key.to_string(), bytes.into()));
        let mut object: Map<String, Value> = rows.collect();
        object.insert("stacks_read_now".to_string(), self.are_stacks_read.into());
        object.into()
    }
}

fn object(process: &ProcessStatus, seen: &Reconciliation, resident: u64, unanswered: Option<&Unanswered>) -> Value {
    let source = |source: Source| {
        json!({
            "source": format!("{source:?}"), "name": source.name(), "resident": seen.resident_of(source),
            "believed": seen.believed_of(source), "unexplained": seen.unexplained_of(source),
        })
    };
    let held: Map<String, Value> =
        Held::ALL.iter().map(|&held| (format!("{held:?}"), seen.held(held).into())).collect();
    let kind =
        |kind: Kind| (kind.name().to_string(), json!({"charged": seen.charged(kind), "is_there": seen.payable(kind)}));
    let groups: Map<String, Value> = Kind::ALL.into_iter().map(kind).collect();
    // Without an answer, the counters are not known.
    let [held, groups] = [held, groups].map(|counters| unanswered.is_none().then_some(counters));
    json!({
        "schema": SCHEMA, "pid": process.pid, "name": process.name, "resident_bytes": resident, "mappings_bytes": seen.resident,
        "explained_bytes": seen.explained(), "explained_percent": 100.0 * seen.explained() as f64 / resident.max(1) as f64,
        "unanswered": unanswered.map(|unanswered| &*unanswered.reason), "in_arena": unanswered.map(Unanswered::object), "only_read_bytes": seen.only_read, "sources": Source::ALL.map(source), "in_slabs": held, "in_groups": groups,
    })
}

/// Shows resident memory by source, beside neap's counters and group charges.
pub(crate) fn show(subject: &Subject, json: bool) -> Result<ExitCode> {
    let (process, (seen, unanswered, resident)) = subject.look(|process| {
        let (told, unanswered) = Told::of(process)?;
        let seen = compare(process, &told)?;
        let unanswered = unanswered.map(|reason| Unanswered::of(process, &reason)).transpose()?;
        // The kernel's own sum over all mappings, which is read separately.
        let rollup = process.handle.read("smaps_rollup").map_err(|error| process.refused(error))?;
        let resident = parse_rss(&rollup).context("the kernel tells no Rss in smaps_rollup")? << 10;
        Ok((seen, unanswered, resident))
    })?;
    if json {
        return print_json(&object(&process, &seen, resident, unanswered.as_ref()));
    }
    print(|output| {
        writeln!(output, "Process {} ({}): {resident} bytes are resident\n", process.pid, process.name)?;
        // The first line of each part is its head.
        let (text, colours) = (seen.to_string(), Colours::of_output());
        // Without an answer, these tables have resident bytes only.
        let known = if unanswered.is_some() { 1 } else { usize::MAX };
        for (at, part) in text.trim_end().split("\n\n").take(known).enumerate() {
            let (head, rows) = part.split_once('\n').unwrap_or((part, ""));
            writeln!(output, "{}{}\n{rows}", if at > 0 { "\n" } else { "" }, colours.heading(head))?;
        }
        match unanswered {
            None => Ok(()),
            Some(unanswered) => {
                let head = format!("{:<28} {:>15}", "in the arena", "bytes");
                writeln!(output, "\n{}", colours.heading(&head))?;
                for (_, name, bytes) in unanswered.rows() {
                    writeln!(output, "{name:<28} {bytes:>15}")?;
                }
                if !unanswered.are_stacks_read {
                    writeln!(output, "The objects on CPUs' stacks are those of the last tick.")?;
                }
                let what = "neap's other counters are not known, nor which pages of the arena are resident";
                writeln!(output, "\n{what}: {}", unanswered.reason)
            }
        }
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use core::time::Duration;

    /// A report of two ranges and two pieces.
    pub(crate) fn words() -> Vec<u64> {
        let mut blank = Books::BLANK;
        let numbers = blank.numbers().count() as u64;
        let mut words = vec![1, u64::MAX, 4096, 1 << 40, 0, 2, 2, numbers];
        words.extend((0..numbers).map(|at| at << 12));
        words.extend([1 << 40, 1 << 30, Source::Arena as u64, 3 << 40, 1 << 20, Source::Numbers as u64]);
        words.extend([0x1234_5678_9abc_def0; 2 * WORDS]);
        words
    }

    /// Reads a report as if it were the whole answer, and shows the result for this process.
    pub(crate) fn show_report(words: &[u64], allowance: &Allowance) -> Result<[String; 2]> {
        let (process, mut told) = (crate::look::stat_reader::tests::ended(), Told::BLANK);
        read(words, &mut told, allowance)?;
        let seen = compare(&process, &told)?;
        Ok([seen.to_string(), object(&process, &seen, 1 << 20, None).to_string()])
    }

    #[test]
    fn a_report_is_read_or_refused_with_its_first_wrong_number() {
        let allowance = &Allowance::new(Duration::from_secs(1000));
        let mut told = Told::BLANK;
        assert_eq!(read(&words(), &mut told, allowance).unwrap(), Some(None));
        assert_eq!((told.page, told.ranges.len(), told.pieces.len()), (4096, 2, 2));
        show_report(&words(), allowance).unwrap();
        // An arena that begins within a page, or has pages that are parts of the machine's.
        for (at, wrong) in
            [(2, 0), (2, 1), (2, 4095), (2, 1 << 21), (3, 1), (3, 1 << 62), (4, 1), (5, 1 << 60), (6, 999), (7, 1)]
        {
            let mut damaged = words();
            damaged[at] = wrong;
            let mut told = Told::BLANK;
            assert!(read(&damaged, &mut told, allowance).is_err(), "word {at} is {wrong}");
        }
    }
}
