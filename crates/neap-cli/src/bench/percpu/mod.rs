//! `neap bench percpu`: how much memory of per-CPU data is returned, in rows by owner and in the
//! kernel's layout.
//!
//! 11 000 owners make allocations of 1400, 600, 24, 8 and 8 bytes per CPU, one owner after the
//! other. Ten of eleven are deleted, then the rest. After each step populated memory is compared
//! with the kernel's resident memory.
//!
//! Figures:
//!
//! * `return_ratio.rows`, `return_ratio.cpu_major`: populated memory with all owners over that with
//!   the remaining thousand. Suffixes `_random` and `_blocks`: the remaining owners are chosen at
//!   random, or are the first;
//! * `return_bound`: the ratio that the geometry of pages permits;
//! * `waste`: populated memory for the owners over their requests. `waste_random`: the sizes of an
//!   owner are drawn at random, 64 bytes to 16 KiB together. `waste_single`: each owner has one
//!   counter of 8 bytes; over the cache lines that the counters need;
//! * `returned_ms`: from the last free until the last page was released;
//! * `left_kib`: populated memory in the end, less that at the start;
//! * at the machine's number of CPUs: `alloc_free_ns`, `alloc_free_shared_ns`, an allocation and
//!   its free in a new row and in a row with another allocation; `cycle_ns_first`, `cycle_ns_last`,
//!   the first and the last thousand of 11 000 owners that are made and deleted one by one;
//! * with librseq's memory pool, if it was built: `librseq_alloc_free_ns`,
//!   `alloc_free_ratio_librseq` (neap over librseq, in alternating rounds) and
//!   `librseq_return_ratio`.
//!
//! Without `--cpus` and `--page` all of `MACHINES` are measured. Figures of every machine but the
//! first have the suffix `_CPUS_KIB`.

mod librseq;
mod script;

use core::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, anyhow};
use clap::ValueEnum;
use neap_base::{Linux, Platform};
use neap_percpu::{Layout, PerCpuData, Shape, Wait};

use super::{Options, Session};
use crate::report::{number, table};
use crate::statistics::summary;
use crate::work::meter;
use librseq::Librseq;
use script::{SIZES, SplitMix, Trial};

/// CPUs and bytes of a page.
const MACHINES: [(usize, usize); 7] =
    [(2, 4096), (4, 4096), (32, 4096), (224, 4096), (32, 65536), (2, 65536), (4, 65536)];
const OWNERS: usize = 11_000;
/// One owner in this many stays.
const STAYS: usize = 11;
/// Total bytes of owners with random sizes.
const RANDOM_BYTES: usize = 1 << 30;

/// The layout to measure.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Chosen {
    Rows,
    CpuMajor,
}

/// One line of the table.
struct Line {
    machine: String,
    what: &'static str,
    layout: &'static str,
    outcome: Trial,
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let mut session = Session::of_parts("percpu", &["neap"])?;
    let linux = Linux::probe();
    let chosen = match (options.cpus, options.page) {
        (None, None) => MACHINES.to_vec(),
        (cpus, page) => vec![(cpus.map_or(2, usize::from), page.unwrap_or(4096))],
    };
    let owners = options.amount(OWNERS as u64) as usize / STAYS * STAYS;
    let mut lines = Vec::new();
    for (at, &(cpus, page)) in chosen.iter().enumerate() {
        let suffix = if at == 0 { String::new() } else { format!("_{cpus}_{}", page >> 10) };
        measure(&mut session, &linux, options, (cpus, page, owners), &suffix, &mut lines)?;
    }
    let cpus = linux.cpus();
    // On the last CPU, like the peer.
    meter::cpus()?.last().map_or(Ok(()), |&last| meter::pin_to(last))?;
    let mut pool = Librseq::find(&mut session, cpus, owners);
    let (mut own, mut shared) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds(30) {
        own.push(pair(&linux, cpus, PairRow::Own)?);
        shared.push(pair(&linux, cpus, PairRow::Shared)?);
        if let Some(pool) = &mut pool {
            pool.round(&session)?;
        }
    }
    let text = tables(&lines) + &pool.map_or(String::new(), |pool| pool.report(&mut session, &own));
    for (name, rounds) in [("alloc_free_ns", own), ("alloc_free_shared_ns", shared)] {
        session.figure(name, summary(rounds).map(|summary| summary.median));
    }
    let (first, last): (Vec<f64>, Vec<f64>) =
        (0..options.rounds(30)).map(|_| cycles(&linux, cpus, owners)).collect::<Result<Vec<_>>>()?.into_iter().unzip();
    session.figure("cycle_ns_first", summary(first).map(|summary| summary.median));
    session.figure("cycle_ns_last", summary(last).map(|summary| summary.median));
    session.finish(options.json, &text)
}

/// All runs on one machine.
fn measure(
    session: &mut Session,
    linux: &Linux,
    options: &Options,
    (cpus, page, count): (usize, usize, usize),
    suffix: &str,
    lines: &mut Vec<Line>,
) -> Result<()> {
    let alike = vec![SIZES.to_vec(); count];
    let in_order: Vec<bool> = (0..count).map(|at| at % STAYS != 0).collect();
    let in_blocks: Vec<bool> = (0..count).map(|at| at >= count / STAYS).collect();
    let at_random = shuffled(&in_order);
    let mixed = mixed(count.min(RANDOM_BYTES / cpus / 8192));
    let counters = vec![vec![8]; count];
    let of = |goes: &[bool], count: usize| goes[..count].to_vec();
    let rows = options.layout != Some(Chosen::CpuMajor);
    let cpu_major = options.layout != Some(Chosen::Rows);
    for (layout, name, wanted) in [(Layout::Rows, "rows", rows), (Layout::CpuMajor, "cpu_major", cpu_major)] {
        if !wanted {
            continue;
        }
        let shape = Shape { layout, page, ..Shape::usual(cpus) };
        let mut run = |what: &'static str, owners: &[Vec<usize>], goes: &[bool]| -> Result<Trial> {
            eprintln!("neap bench percpu: {cpus} CPUs, {} KiB pages, {name}, {what}", page >> 10);
            let outcome = script::run(linux, &shape, owners, goes)?;
            lines.push(Line { machine: format!("{cpus} x {} KiB", page >> 10), what, layout: name, outcome });
            Ok(outcome)
        };
        let order = run("in order", &alike, &in_order)?;
        let others =
            [("_random", run("at random", &alike, &at_random)?), ("_blocks", run("in blocks", &alike, &in_blocks)?)];
        session.figure(&format!("return_ratio.{name}{suffix}"), Some(order.ratio()));
        for (kind, outcome) in others {
            session.figure(&format!("return_ratio{kind}.{name}{suffix}"), Some(outcome.ratio()));
            session.figure(&format!("return_bound{kind}{suffix}"), Some(outcome.bound));
        }
        session.figure(&format!("return_bound{suffix}"), Some(order.bound));
        if layout == Layout::Rows {
            let random = run("sizes at random", &mixed, &of(&at_random, mixed.len()))?;
            let single = run("counters of 8 bytes", &counters, &in_order)?;
            session.figure(&format!("waste{suffix}"), Some(order.waste));
            session.figure(&format!("waste_random{suffix}"), Some(random.waste));
            session.figure(&format!("waste_single{suffix}"), Some(single.waste_of_lines));
            let all = [order, others[0].1, others[1].1, random, single];
            session.figure(&format!("returned_ms{suffix}"), all.iter().map(|run| run.returned_ms).reduce(f64::max));
            session.figure(&format!("left_kib{suffix}"), all.iter().map(|run| run.after - run.before).reduce(f64::max));
        }
    }
    Ok(())
}

/// Returns `goes` in random order. Equally many owners are deleted first, at random places.
fn shuffled(goes: &[bool]) -> Vec<bool> {
    let (mut random, mut goes) = (SplitMix(1), goes.to_vec());
    for at in (1..goes.len()).rev() {
        goes.swap(at, random.below(at as u64 + 1) as usize);
    }
    goes
}

/// Owners with 64 bytes to 16 KiB each, split as the usual ones are.
fn mixed(count: usize) -> Vec<Vec<usize>> {
    let (mut random, all) = (SplitMix(2), SIZES.iter().sum::<usize>());
    let owner = |_| {
        let total = 64 + random.below(16384 - 64 + 1) as usize;
        let mut sizes: Vec<usize> = SIZES.iter().map(|size| size * total / all).filter(|size| *size > 0).collect();
        sizes[0] += total - sizes.iter().sum::<usize>();
        sizes
    };
    (0..count).map(owner).collect()
}

/// The row of an allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PairRow {
    /// The row is made and freed with the allocation.
    Own,
    /// The row has another allocation, and stays.
    Shared,
}

/// Nanoseconds of an allocation of 64 bytes and its free.
fn pair(linux: &Linux, cpus: usize, row: PairRow) -> Result<f64> {
    let refused = |refused| anyhow!("an allocation was refused: {refused}");
    let data = PerCpuData::open(linux, &Shape::usual(cpus), |_| 0, ()).map_err(|error| anyhow!("{error:?}"))?;
    let owner = data.open_owner(linux).map_err(refused)?;
    if row == PairRow::Shared {
        // The row of this allocation has room for one more.
        data.allocate(linux, owner, 8, 8, Wait::Long).map_err(refused)?;
    }
    let size = if row == PairRow::Shared { 32 } else { 64 };
    let nanoseconds = meter::median_of_pairs(|| {
        let handle = data.allocate(linux, owner, size, 8, Wait::Long).map_err(refused)?;
        // SAFETY: no thread uses the allocation any more, and this thread frees it once.
        unsafe { data.free(black_box(handle)) }.map_err(|invalid| anyhow!("{invalid}"))?;
        Ok(())
    })?;
    // SAFETY: no thread uses any allocation of `data`.
    unsafe { data.close(linux) };
    Ok(nanoseconds)
}

/// Returns the nanoseconds of a cycle, in the first eleventh of `count` cycles and in the last. A
/// cycle makes an owner with its allocations, and deletes it.
fn cycles(linux: &Linux, cpus: usize, count: usize) -> Result<(f64, f64)> {
    /// Cycles between two ticks.
    const TICK: usize = 50;
    let refused = |refused| anyhow!("an allocation was refused: {refused}");
    let data = PerCpuData::open(linux, &Shape::usual(cpus), |_| 0, ()).map_err(|error| anyhow!("{error:?}"))?;
    let cycle = |number: usize| -> Result<()> {
        let owner = data.open_owner(linux).map_err(refused)?;
        for size in SIZES {
            data.allocate(linux, owner, size, 8, Wait::Long).map_err(refused)?;
        }
        // SAFETY: no thread uses the owner's allocations any more, or allocates for the owner
        // meanwhile.
        unsafe { data.close_owner(owner) }.map_err(refused)?;
        if number.is_multiple_of(TICK) {
            data.tick(linux);
        }
        Ok(())
    };
    // The first touch of pages and tables is not measured.
    (0..TICK).try_for_each(cycle)?;
    let part = (count / STAYS).max(1);
    let mut parts = Vec::with_capacity(STAYS);
    for _ in 0..STAYS {
        let start = Instant::now();
        (0..part).try_for_each(cycle)?;
        parts.push(start.elapsed().as_secs_f64() * 1e9 / part as f64);
    }
    // SAFETY: no thread uses any allocation of `data`.
    unsafe { data.close(linux) };
    Ok((parts[0], parts[STAYS - 1]))
}

fn tables(lines: &[Line]) -> String {
    let row = |line: &Line| {
        let Trial { before, full, few, after, waste, returned_ms, bound, .. } = line.outcome;
        let mut cells = vec![format!("{} {} {}", line.machine, line.layout, line.what)];
        cells.extend([before, full, few, after].map(|kib| number(kib, 0)));
        cells.extend([(line.outcome.ratio(), 2), (bound, 2), (waste, 3), (returned_ms, 0)].map(|(n, d)| number(n, d)));
        cells
    };
    let rows: Vec<Vec<String>> = lines.iter().map(row).collect();
    let header = ["CPUs x page", "KiB before", "all", "1 of 11", "none", "ratio", "bound", "waste", "ms to return"];
    let kernel = "The kernel, memory groups, KiB before, all, 1 of 11: 7488, 481408, 135552 (3.5 x) and 2080, 219712, 72672 \
                  (3.0 x) on x86; 6144, 118272, 119040 (1.0 x) with 64 KiB pages (LKML, April 2021).\n\
                  Linux 6.18, 2 CPUs, another machine: 976, 45976, 17560 (2.6 x); `cargo xtask kernel-percpu` measures this machine's kernel.";
    format!("{}\n{kernel}\n", table(&header, &rows))
}
