//! neap's own caches as shrinkers: listed, asked and emptied like those of programs, by node, and
//! first because they cost nothing to refill.
//!
//! Method: virtual machines with two nodes, so memory moves only on request and every number is
//! exact.

use crate::program::{OPTIONS, Opened};
use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap::options::Options;
use neap::reclaim::{Asked, Report, ShrinkerError, ShrinkerId, Spec};
use neap_groups::{Bound, GroupId, Kind, OnLimit};
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::{Call, Virtual};

const NAMES: [&str; 5] = ["neap:sheaves", "neap:lists", "neap:holes", "neap:free", "neap:per-cpu"];
const ROOT: GroupId = GroupId::ROOT;

/// Two CPUs on each of two nodes.
fn two_by_two(options: &Options) -> (Shared<Virtual>, Opened<Shared<Virtual>>) {
    let machine = Shared::new(Virtual::new(4096, 4).with_nodes(&[0, 0, 1, 1]));
    let mm = Opened::new(machine.clone(), options).unwrap();
    (machine, mm)
}

fn reports(mm: &Opened<Shared<Virtual>>) -> Vec<Report> {
    let mut reports = Vec::new();
    mm.reclaiming().unwrap().reclaim.shrinkers.each(|report| reports.push(*report));
    reports
}

fn own(mm: &Opened<Shared<Virtual>>, name: &str) -> ShrinkerId {
    reports(mm).iter().find(|report| report.name.as_str() == name).unwrap_or_else(|| panic!("no {name}")).id
}

fn count(mm: &Opened<Shared<Virtual>>, name: &str, node: u32) -> u64 {
    mm.reclaiming().unwrap().count(own(mm, name), ROOT, node).unwrap()
}

/// Allocates and frees objects of some sizes, and a run, on a CPU. Returns every `keep`th object,
/// which stays.
fn use_and_free(mm: &Opened<Shared<Virtual>>, cpu: usize, keep: usize) -> Vec<*mut u8> {
    Virtual::run_on(cpu);
    let run = mm.allocate(100_000);
    let all: Vec<*mut u8> = (0..6000).map(|at| mm.allocate([48, 200, 1000][at % 3])).collect();
    assert!(all.iter().all(|object| !object.is_null()));
    let (kept, freed): (Vec<_>, Vec<_>) = all.into_iter().enumerate().partition(|(at, _)| at % keep == 0);
    // SAFETY: allocated above.
    freed.into_iter().map(|(_, object)| object).chain([run]).for_each(|memory| unsafe { mm.free(memory) });
    kept.into_iter().map(|(_, object)| object).collect()
}

fn free(mm: &Opened<Shared<Virtual>>, objects: Vec<*mut u8>) {
    // SAFETY: allocated by `use_and_free`.
    objects.into_iter().for_each(|object| unsafe { mm.free(object) });
}

#[test]
fn own_caches_register_first_stay_and_reserve_their_names() {
    let (_, mm) = two_by_two(&OPTIONS);
    let seen = reports(&mm);
    assert_eq!(seen.iter().map(|report| report.name.as_str().to_string()).collect::<Vec<_>>(), NAMES);
    assert!(seen.iter().all(|report| report.own && !report.by_group && report.by_node == (report.id.index() < 4)));
    let reclaiming = mm.reclaiming().unwrap();
    // SAFETY: the name is refused, so nothing is called.
    let taken = unsafe { reclaiming.reclaim.shrinkers.prepare(&reclaiming.source, &spec("neap:sheaves", &COUNTS)) };
    assert_eq!(taken, Err(ShrinkerError::BadName));
    for report in seen {
        assert_eq!(reclaiming.unregister(report.id), Err(ShrinkerError::NoSuchShrinker), "{}", report.name.as_str());
    }
    assert_eq!(reports(&mm).len(), NAMES.len());
}

#[test]
fn own_cache_scan_frees_about_the_request_on_its_node_only() {
    let (machine, mm) = two_by_two(&OPTIONS);
    let kept: Vec<_> = [0, 2].into_iter().flat_map(|cpu| use_and_free(&mm, cpu, 50)).collect();
    let reclaiming = mm.reclaiming().unwrap();
    for (name, wanted, most) in
        [("neap:sheaves", 500, 2000), ("neap:lists", 4, 1024), ("neap:holes", 10, 10), ("neap:free", 8, 512)]
    {
        let before = [0, 1].map(|node| count(&mm, name, node));
        assert!(before[1] >= wanted, "{name}: {before:?}");
        let released = machine.released_bytes();
        let visited = reclaiming.scan(own(&mm, name), ROOT, 1, wanted).unwrap();
        let after = [0, 1].map(|node| count(&mm, name, node));
        let given = before[1] - after[1];
        // A scanned slab may have nothing to give.
        assert_eq!(after[0], before[0], "{name}: the other node's is not touched");
        assert!(
            (wanted..=most).contains(&given) && visited.freed >= wanted.min(visited.scanned),
            "{name}: {given} of {wanted}, {visited:?}"
        );
        let is_released = machine.released_bytes() > released;
        assert_eq!(is_released, ["neap:holes", "neap:free"].contains(&name), "{name}");
        mm.verify(0).unwrap();
    }
    free(&mm, kept);
}

#[test]
fn per_cpu_data_gives_its_spare_pages() {
    let (machine, mm) = two_by_two(&OPTIONS);
    let source = mm.per_cpu(neap_percpu::Wait::Long).unwrap();
    let owner = source.open_owner().unwrap();
    use neap_percpu::Host as _;
    let rows = (0..200).map(|_| source.allocate(owner, 4096, 8, neap_percpu::Wait::Long).unwrap());
    let rows: Vec<_> = rows.collect();
    // SAFETY: no thread uses the rows, and each is freed once.
    rows.into_iter().for_each(|row| _ = unsafe { source.free(row) }.unwrap());
    let (before, released) = (count(&mm, "neap:per-cpu", 0), machine.released_bytes());
    assert!(before > 8, "{before}");
    mm.reclaiming().unwrap().scan(own(&mm, "neap:per-cpu"), ROOT, 0, before).unwrap();
    assert!(count(&mm, "neap:per-cpu", 0) < before / 4 && machine.released_bytes() > released);
}

#[test]
fn a_pass_over_everything_leaves_nothing_cached() {
    let (_, mm) = two_by_two(&OPTIONS);
    let kept: Vec<_> = (0..4).flat_map(|cpu| use_and_free(&mm, cpu, 50)).collect();
    let got = mm.reclaiming().unwrap().ask(ROOT, u64::MAX, u64::MAX);
    assert!(got.bytes > 1 << 20, "{got:?}");
    for name in ["neap:sheaves", "neap:lists", "neap:free"] {
        let left = [0, 1].map(|node| count(&mm, name, node));
        assert!(left.iter().all(|&count| count < 128), "{name}: {left:?} are left");
    }
    mm.verify(0).unwrap();
    free(&mm, kept);
}

/// Objects that a program's cache has, and has freed.
static COUNTS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

unsafe extern "C" fn have(data: *mut c_void, _: *const Asked) -> u64 {
    // SAFETY: registered with one of the statics.
    let [left, _] = unsafe { &*data.cast::<[AtomicU64; 2]>() };
    left.load(Relaxed)
}

unsafe extern "C" fn give(data: *mut c_void, asked: *mut Asked) -> u64 {
    // SAFETY: registered with one of the statics; `asked` is valid for the time of the call.
    let ([left, gave], wanted) = unsafe { (&*data.cast::<[AtomicU64; 2]>(), (*asked).to_scan) };
    let given = wanted.min(left.load(Relaxed));
    left.fetch_sub(given, Relaxed);
    gave.fetch_add(given, Relaxed);
    given
}

fn spec(name: &'static str, data: &'static [AtomicU64; 2]) -> Spec<'static> {
    let data = core::ptr::from_ref(data).cast_mut().cast();
    Spec {
        name,
        count: have,
        scan: give,
        data,
        gone: None,
        seeks: 2,
        batch: 16,
        by_node: false,
        by_group: false,
        inline: true,
    }
}

/// Free memory costs nothing to get again: half of it is taken before a 4096th part of a program's
/// cache.
#[test]
fn what_is_free_is_given_before_what_a_program_caches() {
    static CACHE: [AtomicU64; 2] = [AtomicU64::new(16_000), AtomicU64::new(0)];
    let (_, mm) = two_by_two(&OPTIONS);
    let kept: Vec<_> = (0..4).flat_map(|cpu| use_and_free(&mm, cpu, 50)).collect();
    let reclaiming = mm.reclaiming().unwrap();
    // SAFETY: the callbacks use a static only.
    let id = unsafe { reclaiming.reclaim.shrinkers.prepare(&reclaiming.source, &spec("program", &CACHE)) }.unwrap();
    reclaiming.start(id).unwrap();
    let cached = [0, 1].map(|node| count(&mm, "neap:sheaves", node) + count(&mm, "neap:lists", node));
    let got = reclaiming.ask(ROOT, 256 << 10, u64::MAX);
    assert!(got.bytes >= 256 << 10, "{got:?}");
    assert_eq!(CACHE[1].load(Relaxed), 0, "{got:?}");
    let left = [0, 1].map(|node| count(&mm, "neap:sheaves", node) + count(&mm, "neap:lists", node));
    assert!(left.iter().sum::<u64>() < cached.iter().sum::<u64>(), "{cached:?} {left:?}");
    // If that does not suffice, the program's cache is asked in the same pass.
    reclaiming.ask(ROOT, u64::MAX, u64::MAX);
    assert!(CACHE[1].load(Relaxed) > 12_000);
    free(&mm, kept);
}

/// An allocation at the limit empties other CPUs' caches by the walk, in its own thread.
#[test]
fn an_allocation_at_the_limit_asks_them_in_its_own_thread() {
    let (_, mm) = two_by_two(&Options { limit: 8 << 20, ..OPTIONS });
    assert_eq!(mm.reclaiming().unwrap().reclaim.passes.counts()[0][0], 0);
    let kept: Vec<_> = [0, 2].into_iter().flat_map(|cpu| use_and_free(&mm, cpu, 50)).collect();
    Virtual::run_on(1);
    let mut runs = Vec::new();
    while mm.reclaiming().unwrap().reclaim.passes.counts()[0][0] == 0 {
        let run = mm.allocate(128 << 10);
        assert!(!run.is_null(), "{} runs", runs.len());
        runs.push(run);
    }
    let [passes, _, scanned, freed, bytes] = mm.reclaiming().unwrap().reclaim.passes.counts()[0];
    assert!(
        passes == 1 && scanned > 0 && freed > 0 && bytes >= 128 << 10,
        "{:?}",
        mm.reclaiming().unwrap().reclaim.passes.counts()
    );
    // Before an allocation fails all caches are empty.
    while let Some(run) = Some(mm.allocate(128 << 10)).filter(|run| !run.is_null()) {
        runs.push(run);
    }
    assert!((0..2).all(|node| count(&mm, "neap:sheaves", node) + count(&mm, "neap:lists", node) == 0));
    mm.verify(0).unwrap();
    free(&mm, kept);
    free(&mm, runs);
}

/// A group at its limit does not empty caches of memory that is charged to no group.
#[test]
fn a_group_at_its_limit_does_not_ask_them() {
    let (_, mm) = two_by_two(&OPTIONS);
    let kept = use_and_free(&mm, 0, 50);
    let before = count(&mm, "neap:sheaves", 0);
    let grouped = mm.groups().unwrap();
    let group = grouped.create(ROOT, "full").unwrap();
    grouped.set_bound(group, Bound::Max, 1 << 20).unwrap();
    let payer = group.payer(Kind::Pages, 0);
    assert!(grouped.inline().charge(payer, 2 << 20, OnLimit::Refuse).is_err());
    assert_eq!((count(&mm, "neap:sheaves", 0), mm.reclaiming().unwrap().reclaim.passes.counts()[0][0]), (before, 0));
    free(&mm, kept);
}

/// Counting and scanning allocate nothing.
#[test]
fn they_work_while_the_system_gives_nothing() {
    let (machine, mm) = two_by_two(&OPTIONS);
    let kept: Vec<_> = (0..4).flat_map(|cpu| use_and_free(&mm, cpu, 50)).collect();
    assert_eq!(reports(&mm).len(), NAMES.len());
    const ASKED: [Call; 3] = [Call::Map, Call::Reserve, Call::Open];
    let (mapped, made) = (machine.mapped_bytes(), ASKED.map(|call| machine.made(call)));
    ASKED.iter().for_each(|&call| machine.fail(call, 0, usize::MAX));
    assert!(mm.reclaiming().unwrap().ask(ROOT, u64::MAX, u64::MAX).bytes > 0);
    assert_eq!((ASKED.map(|call| machine.made(call)), machine.mapped_bytes() <= mapped), (made, true));
    ASKED.iter().for_each(|&call| machine.fail(call, 0, 0));
    mm.verify(0).unwrap();
    free(&mm, kept);
}
