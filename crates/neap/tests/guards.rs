//! Threads that are in several groups at once.

use neap::groups::Group;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

#[test]
fn guards_may_be_dropped_in_any_order() {
    let groups = ["a", "b", "c"].map(|name| Group::create(&format!("asking/guards/{name}")).unwrap());
    let used = || groups.map(|group| group.used().unwrap());
    // Returns the group that an allocation is charged to, if any.
    let paying = || {
        let before = used();
        let kept = core::hint::black_box(Vec::<u8>::with_capacity(1 << 20));
        let paid = used().iter().zip(before).position(|(now, before)| *now >= before + (1 << 20));
        drop(kept);
        paid
    };
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut guards = groups.map(|group| Some(group.enter().unwrap()));
        for gone in order {
            guards[gone] = None;
            assert_eq!(paying(), guards.iter().rposition(Option::is_some), "{order:?}");
        }
    }
}
