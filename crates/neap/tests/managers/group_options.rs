//! Groups of managers of a test's own: the option `refuse`, and a thread that is in a group of
//! another manager.

use neap::groups::{Bound, GroupId};
use neap::mm::{Hooks, Mm};
use neap::options::{Options, ThreadGroups};
use neap_testing::virtual_platform::Virtual;

/// A manager on a machine with two CPUs.
fn opened(refuse: bool) -> Box<Mm<Virtual>> {
    let mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
    // SAFETY: the manager stays in its box.
    unsafe { mm.open(Virtual::new(4096, 2), &Options { refuse, stat: false, ..Options::DEFAULT }) }.unwrap();
    mm
}

fn closed(mut mm: Box<Mm<Virtual>>) {
    mm.verify(0).unwrap();
    // SAFETY: no thread uses the manager any more.
    unsafe { mm.close() };
}

#[test]
fn at_a_limit_malloc_fails_only_if_it_is_to() {
    for refuse in [true, false] {
        let mm = opened(refuse);
        let groups = mm.groups().unwrap();
        let group = groups.create(GroupId::ROOT, "small").unwrap();
        groups.set_bound(group, Bound::Max, 1 << 20).unwrap();
        let before = mm.enter(Some(group));
        for size in [500, 100_000] {
            let blocks: Vec<*mut u8> = (0..3 << 20).step_by(size).map(|_| mm.allocate(size)).collect();
            let had = blocks.iter().filter(|block| !block.is_null()).count();
            let used = groups.used(group).unwrap();
            assert_eq!((had == blocks.len(), used <= 1 << 20), (!refuse, refuse), "{had} of {size} bytes, {used} used");
            assert!(used >= (had * size) as u64);
            // SAFETY: the blocks are this test's, or null.
            blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
            assert_eq!(groups.used(group), Ok(0));
        }
        if refuse {
            let run = mm.allocate(500_000);
            // SAFETY: the run is this test's, and stays so where it cannot grow.
            unsafe {
                assert!(mm.reallocate(run, 2_000_000).is_null(), "growing is charged, too");
                mm.free(run);
            }
        }
        mm.leave(before);
        closed(mm);
    }
}

#[test]
fn a_group_of_another_manager_pays_for_nothing_here() {
    let (here, there) = (opened(true), opened(true));
    let [mine, other] = [&here, &there].map(|mm| mm.groups().unwrap().create(GroupId::ROOT, "same").unwrap());
    assert_eq!(mine, other, "ids are those of a manager");
    there.groups().unwrap().set_bound(other, Bound::Max, 0).unwrap();
    let before = there.enter(Some(other));
    let blocks = [10, 5000, 200_000].map(|size| here.allocate(size));
    assert!(blocks.iter().all(|block| !block.is_null()));
    assert!([10, 200_000].iter().all(|&size| there.allocate(size).is_null()));
    there.leave(before);
    let used = |mm: &Mm<Virtual>| mm.groups().unwrap().used(GroupId::ROOT);
    assert_eq!((used(&here), used(&there)), (Ok(0), Ok(0)));
    // SAFETY: the blocks are this test's.
    blocks.into_iter().for_each(|block| unsafe { here.free(block) });
    closed(here);
    closed(there);
}

#[test]
fn thread_group_ends_with_thread_and_named_lookalike_stays() {
    let mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
    let options = Options { groups: ThreadGroups::ByThread, stat: false, ..Options::DEFAULT };
    // SAFETY: the manager stays in its box.
    unsafe { mm.open(Virtual::new(4096, 2), &options) }.unwrap();
    let groups = mm.groups().unwrap();
    // No thread has this id: there are at most 2^22.
    let own = groups.create(GroupId::ROOT, "worker:99999999").unwrap();
    let work = || {
        // SAFETY: the call reads this thread's id; the memory was allocated here and is freed once.
        unsafe {
            mm.free(mm.allocate(100));
            libc::gettid()
        }
    };
    let thread = std::thread::scope(|scope| {
        std::thread::Builder::new().name("first".into()).spawn_scoped(scope, work).unwrap().join().unwrap()
    });
    let path = format!("first:{thread}");
    assert!(groups.find(GroupId::ROOT, &path).is_ok());
    // The kernel sees the end of the thread a moment after its creator.
    let mut ticks = 0..;
    while groups.find(GroupId::ROOT, &path).is_ok() {
        mm.tick(ticks.next().unwrap());
        std::thread::yield_now();
    }
    assert_eq!(groups.find(GroupId::ROOT, "worker:99999999"), Ok(own));
    closed(mm);
}
