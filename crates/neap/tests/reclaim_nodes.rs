//! Shrinkers that know nodes, in a process that has two.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use neap::groups::Group;
use neap::reclaim::{self, Asked, STOP, Spec};
use neap_testing::again::{case, succeeds};

/// Nodes that were asked about, as bits.
static ASKED: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn count(_: *mut c_void, asked: *const Asked) -> u64 {
    // SAFETY: `asked` is valid for the time of the call.
    ASKED.fetch_or(1 << unsafe { (*asked).node }, Relaxed);
    1
}

unsafe extern "C" fn scan(_: *mut c_void, _: *mut Asked) -> u64 {
    STOP
}

#[test]
fn asks_every_node() {
    if case().is_none() {
        return;
    }
    let group = Group::create("by node").unwrap();
    let (data, gone, seeks, batch) = (core::ptr::null_mut(), None, 2, 1);
    let spec =
        Spec { name: "near", count, scan, data, gone, seeks, batch, by_node: true, by_group: true, inline: false };
    // SAFETY: the callbacks use no data.
    let id = unsafe { reclaim::register(&spec, Some(group)) }.unwrap();
    reclaim::dry_run(group, 1, |_| ());
    assert_eq!(ASKED.load(Relaxed), 0b11);
    reclaim::unregister(id).unwrap();
}

#[test]
fn a_shrinker_with_a_group_may_have_something_on_every_node() {
    succeeds("asks_every_node", "nodes", "nodes:2,background:off");
}
