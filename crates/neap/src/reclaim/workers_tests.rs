//! Waiting for reclaimers, and making them: on a virtual machine, where the tests are the
//! reclaimers.

use crate::mm::{Hooks, Mm, Spawn, Task};
use crate::options::Options;
use crate::reclaim::reclaiming::Reclaiming;
use crate::state::reclaim::PASS_MAX_NS;
use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use neap_base::Platform;
use neap_base::platform::Errno;
use neap_groups::{Bound, GroupId, Kind, OnLimit};
use neap_reclaim::reclaim::{BUDGET, Next, ReclaimJob};
use neap_reclaim::{Asked, ShrinkerId, Spec};
use neap_testing::virtual_platform::Virtual;
use std::boxed::Box;
use std::thread;
use std::vec::Vec;

const SECOND: u64 = 1_000_000_000;

type Machine = Mm<Virtual>;

fn manager(spawn: Spawn<Virtual>, options: &Options) -> Box<Machine> {
    let mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: Some(spawn), ticked: None }));
    // SAFETY: the manager stays in its box.
    unsafe { mm.open(Virtual::new(4096, 2), &Options { stat: false, ..*options }) }.unwrap();
    mm
}

fn close(mut mm: Box<Machine>) {
    // SAFETY: nothing of it is used any more.
    unsafe { mm.close() };
}

/// Makes no thread, and reports success.
fn no_thread(_: &Machine, _: Task) -> Result<usize, Errno> {
    Ok(1)
}

unsafe extern "C" fn count(data: *mut c_void, _: *const Asked) -> u64 {
    // SAFETY: registered with a number, which outlives it.
    unsafe { &*data.cast::<AtomicU64>() }.load(Relaxed)
}

/// Scans all that is requested, and never stops early.
unsafe extern "C" fn scan(data: *mut c_void, asked: *mut Asked) -> u64 {
    // SAFETY: registered with a number, which outlives the shrinker; `asked` is valid for the time
    // of the call.
    let (objects, to_scan) = unsafe { (&*data.cast::<AtomicU64>(), (*asked).to_scan) };
    let freed = objects.load(Relaxed).min(to_scan);
    objects.fetch_sub(freed, Relaxed);
    freed
}

fn spec(objects: &AtomicU64) -> Spec<'static> {
    let data = core::ptr::from_ref(objects).cast_mut().cast();
    let (by_node, by_group, inline) = (false, false, false);
    Spec { name: "cache", count, scan, data, gone: None, seeks: 2, batch: 1, by_node, by_group, inline }
}

/// A cache that is in no group.
fn register(reclaiming: &Reclaiming<'_, Virtual>, spec: &Spec<'_>) -> ShrinkerId {
    // SAFETY: tests close their managers before the data of callbacks ends.
    let id = unsafe { reclaiming.reclaim.shrinkers.prepare(&reclaiming.source, spec) }.unwrap();
    reclaiming.start(id).unwrap();
    id
}

#[test]
fn reclaim_request_with_full_job_queue_waits_for_a_slot() {
    const ASKERS: u64 = 40;
    let mm = manager(no_thread, &Options::DEFAULT);
    let (core, reclaiming) = (mm.core_if_open().unwrap(), mm.reclaiming().unwrap());
    let jobs = &reclaiming.reclaim.jobs;
    assert!(core.spawn_worker(&mm, &reclaiming, 1));
    thread::scope(|scope| {
        let ask = |number| {
            let (core, mm, reclaiming) = (&core, &mm, &reclaiming);
            move || {
                core.ask_reclaimers(
                    mm,
                    reclaiming,
                    ReclaimJob::AboveHigh(GroupId::from_bits(number)),
                    Some(1000 * SECOND),
                )
            }
        };
        let askers: Vec<_> = (1..=ASKERS).map(|number| scope.spawn(ask(number))).collect();
        while !askers.iter().all(|asker| asker.is_finished()) {
            let next = jobs.take(&reclaiming.source.enter(), 1);
            match next {
                Next::Job(ReclaimJob::AboveHigh(group)) => {
                    jobs.finish(&reclaiming.source.enter(), 1, group.to_bits(), |_| ())
                }
                _ => thread::yield_now(),
            }
        }
        let answers: Vec<u64> = askers.into_iter().map(|asker| asker.join().unwrap().unwrap()).collect();
        assert_eq!(answers, (1..=ASKERS).collect::<Vec<_>>());
    });
    close(mm);
}

static ALLOCATED: AtomicU32 = AtomicU32::new(0);

/// Makes a thread as the C library does under preload: allocates from the manager whose thread it
/// makes.
fn allocates(mm: &Machine, _: Task) -> Result<usize, Errno> {
    for size in [100, 1 << 20] {
        let memory = mm.allocate(size);
        ALLOCATED.fetch_add(u32::from(!memory.is_null()), Relaxed);
        // SAFETY: allocated above.
        unsafe { mm.free(memory) };
    }
    // Reclaims as an allocation does that the budget refuses.
    let asks = mm.core_if_open().and_then(|core| core.reclaim_for_budget(mm, 1)).is_some();
    let is_in_group = mm.group_of_thread().is_some();
    ALLOCATED.fetch_add(u32::from(asks) * 100 + u32::from(is_in_group) * 1000, Relaxed);
    Ok(1)
}

/// 1. A thread in a group at its limit makes a reclaimer. 2. That allocates. 3. It is neither
///    refused, nor waits for the thread of step 1.
#[test]
fn reclaimer_made_within_a_full_group_costs_the_group_nothing() {
    let objects = AtomicU64::new(1000);
    let mm = manager(allocates, &Options { refuse: true, ..Options::DEFAULT });
    let (groups, reclaiming) = (mm.groups().unwrap(), mm.reclaiming().unwrap());
    let group = groups.create(GroupId::ROOT, "full").unwrap();
    let id = register(&reclaiming, &Spec { by_group: true, ..spec(&objects) });
    assert!(reclaiming.mark(id, group, 0));
    reclaiming.reclaim.forget_others(&reclaiming.source.enter());
    groups.set_bound(group, Bound::Max, 4096).unwrap();
    groups.charge(group.payer(Kind::Pages, 0), 4096, OnLimit::Refuse).unwrap();
    ALLOCATED.store(0, Relaxed);
    let before = mm.enter(Some(group));
    assert!(mm.core_if_open().unwrap().spawn_worker(&mm, &reclaiming, 1));
    assert_eq!((mm.group_of_thread(), groups.used(group)), (Some(group), Ok(4096)));
    mm.leave(before);
    let reclaimers = reclaiming.reclaim.reclaimers(&reclaiming.source.enter());
    assert_eq!((ALLOCATED.load(Relaxed), reclaimers.working), (2, 1));
    assert_eq!(reclaimers.waits, 0, "what the thread was made with waited for it");
    close(mm);
}

static REFUSED: AtomicU32 = AtomicU32::new(0);

fn refused(_: &Machine, task: Task) -> Result<usize, Errno> {
    REFUSED.fetch_add(u32::from(task != Task::Maintain), Relaxed);
    Err(Errno::AGAIN)
}

#[test]
fn reclaim_request_without_worker_returns_and_delays_respawn() {
    let objects = AtomicU64::new(1000);
    let mm = manager(refused, &Options::DEFAULT);
    let (core, reclaiming) = (mm.core_if_open().unwrap(), mm.reclaiming().unwrap());
    register(&reclaiming, &spec(&objects));
    assert_eq!(REFUSED.load(Relaxed), 1);
    let job = ReclaimJob::Group(GroupId::ROOT, 1);
    (0..10).for_each(|_| assert_eq!(core.ask_reclaimers(&mm, &reclaiming, job, Some(1000 * SECOND)), None));
    assert_eq!((REFUSED.load(Relaxed), reclaiming.reclaim.reclaimers(&reclaiming.source.enter()).working), (1, 0));
    close(mm);
}

static TRIED: AtomicU32 = AtomicU32::new(0);

fn not_at_first(_: &Machine, _: Task) -> Result<usize, Errno> {
    if TRIED.fetch_add(1, Relaxed) < 2 { Err(Errno::AGAIN) } else { Ok(1) }
}

#[test]
fn a_limit_of_threads_is_not_one_for_ever() {
    let mm = manager(not_at_first, &Options::DEFAULT);
    let core = mm.core_if_open().unwrap();
    for tried in 1..=3 {
        assert_eq!(core.ensure_thread(&mm), tried == 3);
        assert_eq!((TRIED.load(Relaxed), core.background.has_thread()), (tried, tried == 3));
    }
    assert!(!core.ensure_thread(&mm) && TRIED.load(Relaxed) == 3, "there is one");
    close(mm);
}

static MADE: AtomicU32 = AtomicU32::new(0);

/// Makes reclaimers, but no thread that ticks, so that calls tick.
fn only_reclaimers(_: &Machine, task: Task) -> Result<usize, Errno> {
    if task == Task::Maintain {
        return Err(Errno::AGAIN);
    }
    MADE.fetch_add(1, Relaxed);
    Ok(1)
}

/// Calls make no reclaimer, because the program may hold a lock that making a thread takes.
#[test]
fn calls_make_no_reclaimer_and_the_thread_does() {
    let objects = AtomicU64::new(1000);
    let mm = manager(only_reclaimers, &Options { interval: 1, ..Options::DEFAULT });
    let (core, reclaiming) = (mm.core_if_open().unwrap(), mm.reclaiming().unwrap());
    assert!(!core.ensure_thread(&mm));
    register(&reclaiming, &spec(&objects));
    reclaiming.reclaim.forget_others(&reclaiming.source.enter());
    assert!(reclaiming.reclaim.jobs.post(&reclaiming.source.enter(), ReclaimJob::Group(GroupId::ROOT, 1)));
    let made = MADE.load(Relaxed);
    let ticks = || core.maintenance.ticks.load(Relaxed);
    let runs: Vec<*mut u8> = (0..1000).map(|_| mm.allocate(100 << 10)).collect();
    for run in runs {
        core.objects.platform.advance(SECOND);
        // SAFETY: allocated above.
        unsafe { mm.free(run) };
    }
    assert!(ticks() > 0);
    for _ in 0..200 {
        core.objects.platform.advance(SECOND);
        // SAFETY: allocated here.
        unsafe { mm.free(mm.allocate(100 << 10)) };
    }
    assert_eq!(MADE.load(Relaxed), made, "by a call");
    core.tick(&mm, u64::MAX / 2);
    assert_eq!(MADE.load(Relaxed), made + 1);
    close(mm);
}

unsafe extern "C" fn count_no_end(_: *mut c_void, _: *const Asked) -> u64 {
    1 << 40
}

/// Takes a tenth of a second of the machine's time, and frees nothing.
unsafe extern "C" fn scan_slowly(machine: *mut c_void, _: *mut Asked) -> u64 {
    // SAFETY: registered with a machine, which outlives it.
    unsafe { &*machine.cast::<Virtual>() }.advance(SECOND / 10);
    0
}

#[test]
fn explicit_scan_is_bounded_by_object_count_and_pass_time() {
    let objects = AtomicU64::new(1000);
    let mm = manager(no_thread, &Options::DEFAULT);
    let (core, reclaiming) = (mm.core_if_open().unwrap(), mm.reclaiming().unwrap());
    let id = register(&reclaiming, &spec(&objects));
    let visited = reclaiming.scan(id, GroupId::ROOT, 0, u64::MAX).unwrap();
    assert_eq!((visited.scanned, visited.freed, objects.load(Relaxed)), (1000, 1000, 0));
    assert_eq!(core.shrunk.load(Relaxed), 1000);
    assert_eq!(reclaiming.scan(id, GroupId::ROOT, 0, u64::MAX).unwrap().scanned, 0, "nothing is there");
    let data = core::ptr::from_ref(&core.objects.platform).cast_mut().cast();
    let endless = register(&reclaiming, &Spec { count: count_no_end, scan: scan_slowly, data, ..spec(&objects) });
    assert_eq!(
        reclaiming.scan(endless, GroupId::ROOT, 0, u64::MAX).unwrap().scanned,
        PASS_MAX_NS.div_ceil(SECOND / 10)
    );
    close(mm);
}

/// A charge that waits inline, at a full group, with callbacks that each take a tenth of a second.
#[test]
fn inline_wait_begins_no_callback_after_its_deadline() {
    for (time, callbacks) in [(0, 0), (SECOND / 20, 1)] {
        let objects = AtomicU64::new(0);
        let mm = manager(no_thread, &Options::DEFAULT);
        let (groups, reclaiming) = (mm.groups().unwrap(), mm.reclaiming().unwrap());
        let machine = &mm.core_if_open().unwrap().objects.platform;
        let data = core::ptr::from_ref(machine).cast_mut().cast();
        let slow =
            Spec { count: count_no_end, scan: scan_slowly, data, by_group: true, inline: true, ..spec(&objects) };
        let id = register(&reclaiming, &slow);
        let group = groups.create(GroupId::ROOT, "full").unwrap();
        assert!(reclaiming.mark(id, group, 0));
        groups.set_bound(group, Bound::Max, 4096).unwrap();
        groups.charge(group.payer(Kind::Pages, 0), 4096, OnLimit::Refuse).unwrap();
        let begun = machine.precise();
        reclaiming.make_room_inline(group, 4096, begun + time);
        assert_eq!(machine.precise() - begun, callbacks * SECOND / 10);
        close(mm);
    }
}

#[test]
fn a_childs_page_lists_are_not_those_of_background_reclaim() {
    let mm = manager(no_thread, &Options { limit: 64 << 20, ..Options::DEFAULT });
    let (core, reclaiming) = (mm.core_if_open().unwrap(), mm.reclaiming().unwrap());
    let jobs = &reclaiming.reclaim.jobs;
    assert!(core.spawn_worker(&mm, &reclaiming, 1));
    let inside = reclaiming.source.enter();
    assert!(jobs.post(&inside, ReclaimJob::Node(0)) && jobs.take(&inside, 1) == Next::Job(ReclaimJob::Node(0)));
    core.objects.pages.set_reclaiming(true);
    drop(inside);
    mm.close_for_fork(&|looks| looks < 10);
    mm.reopen_in_child();
    assert!(!core.objects.pages.is_reclaiming());
    let inside = reclaiming.source.enter();
    assert_eq!((jobs.take(&inside, 1), jobs.threads(&inside).working), (Next::End, 0));
    drop(inside);
    close(mm);
}

static LOCKED_OUT: AtomicU32 = AtomicU32::new(0);

/// Closes the gate for longer than a callback may take, as a fork of another thread might while
/// this one waits at the gate.
unsafe extern "C" fn count_while_a_thread_forks(mm: *mut c_void, _: *const Asked) -> u64 {
    // SAFETY: registered with a manager, which outlives it.
    let mm = unsafe { &*mm.cast::<Machine>() };
    mm.close_for_fork(&|looks| looks < 10);
    thread::sleep(Duration::from_nanos(BUDGET + BUDGET / 2));
    mm.reopen_after_fork();
    LOCKED_OUT.fetch_add(1, Relaxed);
    0
}

#[test]
fn a_callback_is_not_blamed_for_a_gate_that_is_closed() {
    let objects = AtomicU64::new(0);
    let mm = manager(no_thread, &Options::DEFAULT);
    let reclaiming = mm.reclaiming().unwrap();
    let data = core::ptr::from_ref(&*mm).cast_mut().cast();
    let id = register(&reclaiming, &Spec { count: count_while_a_thread_forks, data, ..spec(&objects) });
    assert_eq!((reclaiming.count(id, GroupId::ROOT, 0), LOCKED_OUT.load(Relaxed)), (Some(0), 1));
    assert_eq!(reclaiming.reclaim.watchdog.counts(), [0; 3]);
    close(mm);
}
