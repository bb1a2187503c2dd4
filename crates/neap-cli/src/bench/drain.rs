//! `neap bench drain`: how much a thread slows down while another thread drains its CPU's lists a
//! thousand times a second.
//!
//! The *owner* is a thread on one CPU that allocates 64 pages and frees them, in a loop. The
//! drainer, on another CPU, drains the lists of the owner's CPU in one window, and those of an
//! unused instance in the next.
//!
//! Figures, of the workload `pages`:
//!
//! * `throughput_ratio`, `p999_ratio`: operations a second, and the 99.9th percentile of the time
//!   of one operation. Each is the value of a drained window over that of the paired quiet window,
//!   median over pairs;
//! * `fences`: in all drained windows;
//! * `added_interrupts`: interrupts of the owner's CPU for function calls, flushes and reschedules.
//!   The median of the drained windows, less the maximum of the quiet windows;
//! * `added_switches`: involuntary switches of the owner, likewise.
//!
//! Figures with the suffix `_isolated` are of an owner on an isolated CPU. This owner also
//! allocates and frees 64 objects, and the drainer drains its stacks as well. Both threads run in
//! this process and call neap's parts directly, so no malloc is measured.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::fs;
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use neap::drain::Scope;
use neap::mm::{Hooks, Mm};
use neap_base::{Linux, Order, Pfn};
use neap_os::topology::CpuSet;
use neap_pages::{BATCH_SCALE, Pages, Shape, SideTable, TABLES};

use super::{Options, Reading, Session, Workload};
use crate::report::{cell, table};
use crate::statistics::summary;
use crate::work::Outcome;
use crate::work::meter::{cpus, pin_to};

const QUIET: &str = "neap-quiet";
const ISOLATED: &str = "isolated";
/// Most pages, and objects, that the owner holds.
const HELD: usize = 64;
const PERIOD: Duration = Duration::from_millis(1);
/// Longest wait for an owner to begin or to end, on a machine with other work.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads a counter of the processor. It has the same value on all CPUs, and a constant frequency.
#[inline(always)]
fn counter() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the counter. Reading it has no side effect.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // ticks := the virtual counter
        //
        // Registers: ticks: the result.
        // SAFETY: Linux lets every program read this counter. Reading it has no side effect.
        unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags)) };
        ticks
    }
}

/// An instance with drained caches.
struct Instance {
    platform: Linux,
    pages: Pages<Linux>,
    /// The manager whose objects the drainer drains. `None` if it drains pages only.
    mm: Option<Box<Mm<Linux>>>,
}

impl Instance {
    fn open(isolated: Option<usize>) -> Result<Instance> {
        let mut set = CpuSet::EMPTY;
        isolated.iter().for_each(|&cpu| set.insert(cpu));
        let platform = Linux::probe().with_isolated(&set);
        let refused = |error| anyhow!("the page layer was refused memory: {error:?}");
        let tables = [SideTable::default(); TABLES];
        let shape =
            Shape { span: 1 << 40, budget: None, tables, huge: true, list_high: None, batch_scale: BATCH_SCALE };
        let pages = Pages::open(&platform, &shape).map_err(refused)?;
        let mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
        let options = neap::options::Options { stat: false, ..neap::options::Options::DEFAULT };
        // SAFETY: the manager does not move, since it stays in its box, which is never freed.
        unsafe { mm.open(platform, &options) }.map_err(refused)?;
        Ok(Instance { platform, pages, mm: isolated.map(|_| mm) })
    }

    /// Drains the instance's caches of CPU `cpu`. Returns the numbers of drained pages and objects.
    fn drain(&self, cpu: usize) -> (u64, u64) {
        let pages = match self.pages.drain_cpu(&self.platform, cpu) {
            neap_pages::Drain::Drained(pages) => pages.into(),
            neap_pages::Drain::Skipped => 0,
        };
        let scope = Scope { cpu: Some(cpu as u32), ..Scope::ALL };
        let objects = self.mm.as_ref().and_then(|mm| mm.drain(&scope).ok()).map_or(0, |drained| drained.objects);
        (pages, objects)
    }

    fn fences(&self) -> u32 {
        self.mm.as_ref().map_or(0, |mm| mm.fences())
    }
}

/// Times of operations, in cycles: 64 steps to each doubling.
struct Histogram([u32; 64 * 58]);

impl Histogram {
    fn note(&mut self, cycles: u64) {
        let doublings = (cycles | 64).ilog2() - 6;
        let index = u64::from(doublings) * 64 + (cycles >> doublings);
        self.0[(index as usize).min(self.0.len() - 1)] += 1;
    }

    /// Returns the number of cycles that all but one in `rarity` operations took at most.
    fn beyond(&self, rarity: u64) -> u64 {
        let all: u64 = self.0.iter().map(|&count| u64::from(count)).sum();
        let mut left = all / rarity;
        for (index, &count) in self.0.iter().enumerate().rev() {
            if u64::from(count) > left {
                let doublings = (index / 64).saturating_sub(1);
                return (index - doublings * 64) as u64 * (1 << doublings);
            }
            left -= u64::from(count);
        }
        0
    }
}

/// The owner's measurements of a window.
#[derive(Clone, Copy, Default)]
struct Felt {
    operations: u64,
    cycles: u64,
    operation_p999: u64,
    round_p999: u64,
}

/// State shared by owner and drainer.
struct DrainStage {
    /// Odd while a window is open.
    window: AtomicU32,
    /// The window that the owner is in.
    entered: AtomicU32,
    over: AtomicBool,
    owner: AtomicU32,
    felt: Mutex<Option<Felt>>,
}

impl DrainStage {
    /// Body of the owner: works in windows, and spins between them.
    fn own(&self, instance: &Instance) {
        // SAFETY: `gettid` takes no argument and cannot fail.
        self.owner.store(unsafe { libc::syscall(libc::SYS_gettid) } as u32, Ordering::Relaxed);
        let mut seen = 0;
        while !self.over.load(Ordering::Relaxed) {
            let window = self.window.load(Ordering::Relaxed);
            if window == seen || window.is_multiple_of(2) {
                core::hint::spin_loop();
                continue;
            }
            seen = window;
            self.entered.store(window, Ordering::Relaxed);
            let felt = self.work(instance, window);
            *self.felt.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(felt);
        }
    }

    fn work(&self, instance: &Instance, window: u32) -> Felt {
        let Instance { platform, pages, mm } = instance;
        let (mut held, mut objects) = ([Pfn::NONE; HELD], [core::ptr::null_mut(); HELD]);
        let (mut each, mut rounds) = (Histogram([0; 64 * 58]), Histogram([0; 64 * 58]));
        let mut felt = Felt::default();
        let now = counter;
        let start = now();
        let mut last = start;
        let mut note = |felt: &mut Felt, each: &mut Histogram| {
            let at = now();
            each.note(at - last);
            felt.operations += 1;
            last = at;
        };
        while self.window.load(Ordering::Relaxed) == window {
            let began = now();
            for pfn in &mut held {
                *pfn = pages.allocate_block(platform, Order(0)).map_or(Pfn::NONE, |block| block.pfn);
                note(&mut felt, &mut each);
            }
            for &pfn in held.iter().filter(|&&pfn| pfn != Pfn::NONE) {
                pages.free_block(platform, pfn, Order(0));
                note(&mut felt, &mut each);
            }
            if let Some(mm) = mm {
                for object in &mut objects {
                    *object = mm.allocate(64);
                    note(&mut felt, &mut each);
                }
                for &object in &objects {
                    // SAFETY: this thread allocated the object above, frees it once, and no thread
                    // uses it any more.
                    unsafe { mm.free(object) };
                    note(&mut felt, &mut each);
                }
            }
            rounds.note(now() - began);
        }
        Felt { cycles: now() - start, operation_p999: each.beyond(1000), round_p999: rounds.beyond(1000), ..felt }
    }

    /// Opens a window, drains `target` in it, and returns its cost to the owner.
    fn window(&self, target: &Instance, cpu: usize, length: Duration) -> Result<Outcome> {
        let owner = self.owner.load(Ordering::Relaxed);
        let before = (interrupts(cpu)?, switches(owner)?, target.fences());
        let window = self.window.fetch_add(1, Ordering::Relaxed) + 1;
        // Waits until the owner runs, so that it works from the beginning.
        let asked = Instant::now();
        while self.entered.load(Ordering::Relaxed) != window {
            if asked.elapsed() > PATIENCE {
                bail!(
                    "the worker on CPU {cpu} did not begin within {PATIENCE:?}: the CPU is busy; try again, or name another CPU"
                );
            }
            thread::sleep(PERIOD);
        }
        let (start, ticks) = (Instant::now(), counter());
        let (mut drains, mut pages, mut objects) = (0_u64, 0, 0);
        let mut next = start;
        while start.elapsed() < length {
            let drained = target.drain(cpu);
            (drains, pages, objects) = (drains + 1, pages + drained.0, objects + drained.1);
            next += PERIOD;
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        self.window.fetch_add(1, Ordering::Relaxed);
        let (wall, ticks) = (start.elapsed(), counter() - ticks);
        let felt = loop {
            let felt = self.felt.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            if let Some(felt) = felt {
                break felt;
            }
            if start.elapsed() > length + PATIENCE {
                bail!(
                    "the worker on CPU {cpu} gave no result within {PATIENCE:?} after its time: the CPU is busy; try again"
                );
            }
            thread::sleep(PERIOD);
        };
        let after = (interrupts(cpu)?, switches(owner)?, target.fences());
        let ns = |cycles: u64| cycles as f64 * wall.as_nanos() as f64 / ticks.max(1) as f64;
        let counts = [
            ("p999_ns", ns(felt.operation_p999)),
            ("round_p999_ns", ns(felt.round_p999)),
            ("interrupts", after.0.saturating_sub(before.0) as f64),
            ("switches", after.1.saturating_sub(before.1) as f64),
            ("fences", f64::from(after.2 - before.2)),
            ("drains", drains as f64),
            ("drained_pages", pages as f64),
            ("drained_objects", objects as f64),
        ];
        let counts = counts.iter().map(|&(name, count)| (name.to_string(), count)).collect();
        Ok(Outcome { operations: felt.operations, wall_ns: ns(felt.cycles) as u64, counts, ..Outcome::default() })
    }
}

/// Number of function-call, flush and reschedule interrupts of a CPU so far.
fn interrupts(cpu: usize) -> Result<u64> {
    let text = fs::read_to_string("/proc/interrupts").context("cannot read /proc/interrupts")?;
    sum_of_interrupts(&text, cpu).with_context(|| format!("/proc/interrupts has no CPU {cpu}"))
}

fn sum_of_interrupts(text: &str, cpu: usize) -> Option<u64> {
    let mut lines = text.lines();
    let column = lines.next()?.split_whitespace().position(|name| name == format!("CPU{cpu}"))?;
    let counted = lines.filter_map(|line| {
        let mut words = line.split_whitespace();
        ["CAL:", "TLB:", "RES:"].contains(&words.next()?).then(|| words.nth(column)?.parse::<u64>().ok())?
    });
    Some(counted.sum())
}

/// Number of involuntary switches of a thread of this process so far.
fn switches(thread: u32) -> Result<u64> {
    let path = format!("/proc/self/task/{thread}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let value = text.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    value.and_then(|value| value.trim().parse().ok()).with_context(|| format!("{path} says nothing of switches"))
}

pub(super) fn main(options: &Options) -> Result<ExitCode> {
    let places = cpus()?;
    let [owners, drainers, ..] = places[..] else { bail!("an owner and a drainer need two CPUs") };
    let mut session = Session::of_parts("drain", &["neap", QUIET])?;
    pin_to(drainers)?;
    let length = Duration::from_millis(options.amount(500));
    let rounds = options.rounds(20);
    for (name, isolated) in [("pages", None), (ISOLATED, Some(owners))] {
        // Leaked: both instances are in use until the process ends.
        let mine: &Instance = Box::leak(Box::new(Instance::open(isolated)?));
        let other: &Instance = Box::leak(Box::new(Instance::open(isolated)?));
        let stage = DrainStage {
            window: AtomicU32::new(0),
            entered: AtomicU32::new(0),
            over: AtomicBool::new(false),
            owner: AtomicU32::new(0),
            felt: Mutex::new(None),
        };
        thread::scope(|scope| -> Result<()> {
            let owner = scope.spawn(|| pin_to(owners).map(|()| stage.own(mine)));
            while stage.owner.load(Ordering::Relaxed) == 0 && !owner.is_finished() {
                thread::sleep(PERIOD);
            }
            // Opens one window of each kind to warm up. Its result does not count.
            let warm = stage.window(mine, owners, length).and_then(|_| stage.window(other, owners, length));
            if warm.is_ok() {
                session.measure(&[Workload::timed(name, rounds, &[])], |variant, _, _| {
                    let target = if variant.name == QUIET { other } else { mine };
                    Some(stage.window(target, owners, length))
                });
            }
            stage.over.store(true, Ordering::Relaxed);
            owner.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            warm.map(|_| ())
        })?;
    }
    for (workload, suffix) in [("pages", ""), (ISOLATED, "_isolated")] {
        figures(&mut session, workload, suffix);
    }
    let tables = tables(&session);
    session.finish(options.json, &tables)
}

fn p999(outcome: &Outcome) -> f64 {
    outcome.count("p999_ns")
}

fn throughput(outcome: &Outcome) -> f64 {
    1e9 / outcome.ns_each()
}

fn figures(session: &mut Session, workload: &str, suffix: &str) {
    for (name, reading) in [("throughput_ratio", throughput as Reading), ("p999_ratio", p999)] {
        let ratio = session.ratio_of("neap", QUIET, workload, Some(reading));
        session.figure_of_ratio(&format!("{name}{suffix}"), ratio);
    }
    let drained = session.outcomes("neap", workload);
    if drained.is_empty() {
        return;
    }
    let fences: f64 = drained.iter().map(|outcome| outcome.count("fences")).sum();
    let added = [("added_interrupts", "interrupts"), ("added_switches", "switches")].map(|(figure, count)| {
        let of = |variant| summary(session.outcomes(variant, workload).iter().map(|outcome| outcome.count(count)));
        (figure, of("neap").zip(of(QUIET)).map(|(drained, quiet)| (drained.median - quiet.max).max(0.0)))
    });
    session.figure(&format!("fences{suffix}"), Some(fences));
    added.into_iter().for_each(|(figure, value)| session.figure(&format!("{figure}{suffix}"), value));
}

fn tables(session: &Session) -> String {
    let row = |(workload, variant, what): (&str, &str, &str)| {
        let count = |name: &'static str, decimals| {
            let values = session.outcomes(variant, workload).iter().map(|outcome| outcome.count(name));
            cell(summary(values), decimals)
        };
        vec![
            what.to_string(),
            cell(session.summary_of(variant, workload, |outcome| throughput(outcome) / 1e6), 2),
            count("p999_ns", 0),
            count("round_p999_ns", 0),
            count("interrupts", 0),
            count("switches", 0),
            count("drained_pages", 0),
            count("drained_objects", 0),
        ]
    };
    let rows = [
        ("pages", QUIET, "pages, quiet"),
        ("pages", "neap", "pages, drained"),
        (ISOLATED, QUIET, "isolated, objects as well, quiet"),
        (ISOLATED, "neap", "isolated, objects as well, drained"),
    ];
    let header = [
        "owner",
        "million operations/s",
        "p99.9 ns",
        "p99.9 ns of 64 allocations and frees",
        "interrupts",
        "switches",
        "pages drained",
        "objects drained",
    ];
    table(&header, &rows.map(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_histogram_tells_the_rare_ones_within_two_percent() {
        let mut histogram = Histogram([0; 64 * 58]);
        (0..10_000).for_each(|_| histogram.note(37));
        (0..9).for_each(|_| histogram.note(100_000));
        assert_eq!(histogram.beyond(1000), 37);
        (0..3).for_each(|_| histogram.note(100_000));
        let found = histogram.beyond(1000) as f64;
        assert!((found / 100_000.0 - 1.0).abs() < 0.02, "{found}");
        for cycles in [0, 1, 63, 64, 127, 128, 12_345, u64::MAX >> 1] {
            let mut one = Histogram([0; 64 * 58]);
            one.note(cycles);
            let found = one.beyond(1000);
            assert!(found <= cycles && cycles - found <= cycles / 50, "{cycles} told as {found}");
        }
    }

    #[test]
    fn interrupts_are_those_of_the_cpu_by_its_name() {
        let text = "           CPU0       CPU2\n 24:   7   8  IO-APIC\nCAL:   100   200   Function call interrupts\n\
                    TLB:    10    20   TLB shootdowns\nRES:     1     2   Rescheduling interrupts\nERR:   5\n";
        assert_eq!((sum_of_interrupts(text, 0), sum_of_interrupts(text, 2)), (Some(111), Some(222)));
        assert_eq!(sum_of_interrupts(text, 1), None);
    }

    #[test]
    fn a_window_drains_what_the_owner_uses() {
        let places = cpus().unwrap();
        let mine = Instance::open(Some(places[0])).unwrap();
        let [window, entered, owner] = [(); 3].map(|()| AtomicU32::new(0));
        let stage = DrainStage { window, entered, over: AtomicBool::new(false), owner, felt: Mutex::new(None) };
        thread::scope(|scope| {
            scope.spawn(|| {
                pin_to(places[0]).unwrap();
                stage.own(&mine);
            });
            while stage.owner.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            let outcome = (0..50)
                .map(|_| stage.window(&mine, places[0], Duration::from_millis(20)).unwrap())
                .find(|outcome| outcome.count("drained_pages") > 0.0 && outcome.count("drained_objects") > 0.0);
            stage.over.store(true, Ordering::Relaxed);
            let outcome = outcome.expect("a window in which the owner ran");
            assert!(outcome.operations > 256 && outcome.count("p999_ns") > 0.0, "{outcome:?}");
            assert_eq!(outcome.count("fences"), 0.0);
        });
    }
}
