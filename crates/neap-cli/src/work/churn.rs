//! Memory groups that are created, filled up to their limit and deleted, while other groups are
//! charged. Some of them are alive at any time.
//!
//! The groups belong to this process, which calls neap as any program would. Ticks are those of
//! neap's thread, and the ones that this workload runs to time them. On each CPU a thread charges
//! live groups, and keeps its charges for a while. Some charges of every deleted group also outlive
//! it. Times are the calling thread's CPU time, so that preemption by those threads is not
//! measured. This module has no lock.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::collections::{BTreeMap, VecDeque};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use clap::Args;
use neap::groups::{self, Bound, Charge, Group, GroupCount, GroupId};
use neap::process::PROCESS;
use neap_base::{Linux, Platform};
use neap_percpu::{Host, Statistics, Wait};

use super::Outcome;
use super::meter::{Meter, Random, cpus, own_rss_kib, pin_to, thread_cpu_ns};

#[derive(Args)]
pub(super) struct ChurnOptions {
    /// Groups in all
    #[arg(long, default_value_t = 11_000)]
    groups: usize,
    /// Groups at a time
    #[arg(long, default_value_t = 64)]
    alive: usize,
    /// Empty groups that are made in the end, at least, to see what one takes
    #[arg(long, default_value_t = 4000)]
    empty: usize,
}

const PAGE: u64 = 4096;
/// Limit of a group, and the size of the charges that fill it.
const MAX: u64 = 1 << 20;
const PART: u64 = 16 * PAGE;
/// Most charges of deleted groups, besides those of the charging threads.
const OUTLIVING: usize = 32;
/// Charges that each charging thread keeps.
const HELD: usize = 8;
/// Time after which the remains of a group are gone.
const REST: Duration = Duration::from_secs(1);
/// Passes, and walks, of which the median counts.
const PASSES: usize = 101;

/// A group, and charges to it.
struct Filled {
    group: Group,
    charges: Vec<Charge>,
}

/// Nanoseconds of processor time of each call.
struct Times {
    create: Vec<u64>,
    fill: Vec<u64>,
    delete: Vec<u64>,
}

impl Times {
    /// Makes room for `count` values, resident at once.
    fn new(count: usize) -> Times {
        let room = || {
            let mut times = vec![1; count];
            times.clear();
            times
        };
        Times { create: room(), fill: room(), delete: room() }
    }
}

/// State at a moment when no thread charges.
struct Moment {
    count: GroupCount,
    /// Bytes of groups' tables and stocks, and of the rows of per-CPU data of groups.
    metadata: u64,
    /// Bytes of populated per-CPU data.
    per_cpu: u64,
    rss_kib: u64,
    /// Nanoseconds of a pass of maintenance, and of a walk over all groups that reads the
    /// information of each.
    pass: u64,
    walk: u64,
}

impl Moment {
    fn look() -> Result<Moment> {
        let Statistics { populated, page, row_bytes, .. } = per_cpu()?;
        let pass = || _ = PROCESS.tick(Linux::probe().now());
        let walk = || above().map_or(0, |above| above.children().filter_map(|group| group.info().ok()).count());
        let [pass, walk] = [median(pass), median(|| _ = core::hint::black_box(walk()))];
        Ok(Moment {
            count: groups::count()?,
            metadata: (tables()? + row_bytes) as u64,
            per_cpu: (populated * page) as u64,
            rss_kib: own_rss_kib()?,
            pass,
            walk,
        })
    }
}

fn median(what: impl Fn()) -> u64 {
    let mut times: Vec<u64> = (0..PASSES).map(|_| timed(&what).1).collect();
    times.sort_unstable();
    times[PASSES / 2]
}

fn timed<R>(what: impl FnOnce() -> R) -> (R, u64) {
    let start = thread_cpu_ns();
    let answer = what();
    (answer, thread_cpu_ns() - start)
}

/// Bytes mapped for groups.
fn tables() -> Result<usize> {
    Ok(PROCESS.groups()?.bytes())
}

fn per_cpu() -> Result<Statistics> {
    let source = PROCESS.per_cpu(Wait::Long).map_err(|refused| anyhow!("{refused}"))?;
    Ok(source.inside(|_| source.data().statistics()))
}

/// The parent of all other groups.
fn above() -> Result<Group> {
    Ok(Group::find_or_create("churn")?)
}

/// Makes a group and fills it up.
fn fill(number: usize, times: &mut Times) -> Result<Filled> {
    let path = format!("churn/{number}");
    let (group, time) = timed(|| Group::create(&path));
    let group = group?;
    times.create.push(time);
    group.set(Bound::Max, MAX)?;
    let mut charges = Vec::with_capacity((MAX / PART) as usize);
    let ((), time) = timed(|| charges.extend(core::iter::from_fn(|| group.charge(PART).ok())));
    times.fill.push(time);
    // Leaves room for other threads' charges.
    charges.truncate(charges.len() / 2);
    Ok(Filled { group, charges })
}

/// Charges random live groups until `over` is set.
fn charge(cpu: usize, alive: &[AtomicU64], over: &AtomicBool) -> Result<u64> {
    pin_to(cpu)?;
    let (mut random, mut held, mut granted) = (Random::new(cpu as u64 + 1), VecDeque::with_capacity(HELD), 0);
    while !over.load(Ordering::Relaxed) {
        let id = GroupId::from_bits(alive[random.below(alive.len())].load(Ordering::Relaxed));
        if held.len() == HELD {
            held.pop_front();
        }
        // Refused if the group is full, or was deleted a moment ago.
        if let Ok(charge) = Group::from_id(id).charge(PAGE * (1 + random.below(16)) as u64) {
            granted += 1;
            held.push_back(charge);
        }
    }
    Ok(granted)
}

/// Runs `body` while a thread on each CPU charges. Returns the number of granted charges.
fn under_load(alive: &[AtomicU64], body: impl FnOnce() -> Result<()>) -> Result<u64> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let threads: Vec<_> = cpus()?
            .into_iter()
            .map(|cpu| (cpu, &over))
            .map(|(cpu, over)| scope.spawn(move || charge(cpu, alive, over)))
            .collect();
        let answer = body();
        over.store(true, Ordering::Relaxed);
        let granted = threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?);
        let granted: Result<u64> = granted.sum();
        answer.and(granted)
    })
}

/// Waits until deleted groups should be gone. Returns how many are left.
fn rest() -> Result<u32> {
    thread::sleep(REST);
    Ok(groups::count()?.dying)
}

pub(super) fn run(options: &ChurnOptions) -> Result<Outcome> {
    ensure!(0 < options.alive && options.alive < options.groups, "--alive must be above 0 and below --groups");
    let meter = Meter::start();
    let mut times = Times::new(options.groups);
    let mut alive = VecDeque::with_capacity(options.alive);
    let ids: Vec<AtomicU64> = (0..options.alive).map(|_| AtomicU64::new(GroupId::ROOT.to_bits())).collect();
    let tell = |number: usize, group: Group| ids[number % ids.len()].store(group.id().to_bits(), Ordering::Relaxed);
    above()?;

    let mut granted = under_load(&ids, || {
        for number in 0..options.alive {
            let filled = fill(number, &mut times)?;
            tell(number, filled.group);
            alive.push_back(filled);
        }
        Ok(())
    })?;
    rest()?;
    let before = Moment::look()?;

    let mut outliving = VecDeque::with_capacity(OUTLIVING);
    let start = Instant::now();
    granted += under_load(&ids, || {
        for number in options.alive..options.groups {
            if let Some(Filled { group, mut charges }) = alive.pop_front() {
                if outliving.len() == OUTLIVING {
                    outliving.pop_front();
                }
                outliving.extend(charges.pop());
                drop(charges);
                let (deleted, time) = timed(|| group.delete());
                deleted?;
                times.delete.push(time);
            }
            let filled = fill(number, &mut times)?;
            tell(number, filled.group);
            alive.push_back(filled);
        }
        Ok(())
    })?;
    let churned = start.elapsed();
    drop(outliving);
    let peak_dying = groups::count()?.dying;
    let mut dying = rest()?;
    let after = Moment::look()?;

    for Filled { group, charges } in alive.drain(..) {
        drop(charges);
        group.delete()?;
    }
    dying = dying.max(rest()?);
    let one = Empty::measure(options.empty)?;
    dying = dying.max(rest()?);
    above()?.drain()?;
    ensure!(above()?.used()? == 0, "{} bytes are used when all was given back", above()?.used()?);
    PROCESS.verify(0).map_err(|finding| anyhow!("{finding}"))?;

    let operations = (options.groups - options.alive) as u64;
    let mut outcome = Outcome { wall_ns: churned.as_nanos() as u64, ..meter.stop().outcome(operations) };
    let counts = [
        ("metadata_before", before.metadata as f64),
        ("metadata_after", after.metadata as f64),
        ("per_cpu_bytes_before", before.per_cpu as f64),
        ("per_cpu_bytes_after", after.per_cpu as f64),
        ("slots_before", before.count.slots.into()),
        ("slots_after", after.count.slots.into()),
        ("rss_kib_before", before.rss_kib as f64),
        ("rss_kib_after", after.rss_kib as f64),
        ("pass_ns_before", before.pass as f64),
        ("pass_ns_after", after.pass as f64),
        ("walk_ns_before", before.walk as f64),
        ("walk_ns_after", after.walk as f64),
        ("dying_at_end", peak_dying.into()),
        ("dying_after_1s", dying.into()),
        ("charges_granted", granted as f64),
        ("bytes_per_group", one.bytes),
        ("per_cpu_bytes_per_group", one.per_cpu),
    ];
    outcome.counts = counts.into_iter().map(|(name, count)| (name.to_string(), count)).collect();
    for (name, times) in [("create", times.create), ("fill", times.fill), ("delete", times.delete)] {
        percentiles(name, times, &mut outcome.counts);
    }
    Ok(outcome)
}

/// Adds the percentiles of nanoseconds, in microseconds.
fn percentiles(name: &str, mut times: Vec<u64>, counts: &mut BTreeMap<String, f64>) {
    times.sort_unstable();
    let at = |percent: usize| times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)));
    for (what, percent) in [("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)] {
        counts.extend(at(percent).map(|&time| (format!("{name}_{what}_us"), time as f64 / 1e3)));
    }
}

/// Memory of an empty group.
struct Empty {
    /// Bytes of tables and stocks, right after they have grown.
    bytes: f64,
    /// Bytes of per-CPU data, the copies of all CPUs.
    per_cpu: f64,
}

impl Empty {
    /// Makes at least `least` groups, and more until the tables grow, and deletes them again.
    fn measure(least: usize) -> Result<Empty> {
        let (first, rows) = (groups::count()?.live, per_cpu()?.row_bytes);
        let mut made = Vec::new();
        let mut size = tables()?;
        loop {
            made.push(Group::create(&format!("churn/empty-{}", made.len()))?);
            let now = tables()?;
            if made.len() >= least && now > size {
                break;
            }
            size = now;
        }
        let rows = per_cpu()?.row_bytes - rows;
        let answer = Empty {
            bytes: tables()? as f64 / (first as usize + made.len()) as f64,
            per_cpu: rows as f64 / made.len() as f64,
        };
        made.into_iter().try_for_each(Group::delete)?;
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_sorted_times_in_microseconds() {
        let mut counts = BTreeMap::new();
        percentiles("delete", (1..=1000).rev().map(|time| time * 1000).collect(), &mut counts);
        percentiles("create", Vec::new(), &mut counts);
        let expected =
            [("delete_max_us", 1000.0), ("delete_p50_us", 501.0), ("delete_p90_us", 901.0), ("delete_p99_us", 991.0)];
        assert_eq!(counts.iter().map(|(name, &time)| (name.as_str(), time)).collect::<Vec<_>>(), expected);
    }
}
