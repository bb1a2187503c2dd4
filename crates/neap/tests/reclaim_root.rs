//! A process without shrinkers of its own asks for memory, and gets neap's cached memory.

use core::time::Duration;
use neap::groups::Group;
use neap::process::PROCESS;
use neap::reclaim;

#[test]
fn the_root_gives_what_is_free_where_no_shrinker_was_registered() {
    let blocks: Vec<*mut u8> = (0..4000).map(|_| PROCESS.allocate(4000)).collect();
    // SAFETY: the blocks are this test's, and each is written and freed once.
    blocks.into_iter().for_each(|block| unsafe {
        block.write_bytes(1, 4000);
        PROCESS.free(block);
    });
    let got = reclaim::reclaim(Group::ROOT, 8 << 20, Duration::from_secs(10));
    assert!(got.bytes > 0 && got.freed > 0, "{got:?}");
}
