//! Costs and limits that no other test would show.

use crate::host::{Cache, Stage, with};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use neap_reclaim::shrinkers::bits::{Bit, set_bits};

#[test]
fn indexes_of_all_that_have_gone_are_used_again() {
    with(&Stage::with_nodes(&[0]), |host, shrinkers| {
        let cache = Cache::of(0);
        for _ in 0..3 {
            // SAFETY: it outlives its registration.
            let made = (0..20).map(|_| unsafe { shrinkers.register(host, &cache.by_group()) }.unwrap());
            let ids: Vec<_> = made.collect();
            let mut indexes: Vec<_> = ids.iter().map(|id| id.index()).collect();
            indexes.sort_unstable();
            assert_eq!(indexes, (0..20).collect::<Vec<_>>());
            ids.into_iter().for_each(|id| _ = shrinkers.unregister(host, id).unwrap());
        }
    });
}

#[test]
fn set_bits_stops_at_a_set_bit_without_writing() {
    let words = [0b100, 0].map(AtomicUsize::new);
    let bits = || words.each_ref().map(|word| Bit { word, bit: 2 });
    assert_eq!((set_bits(bits()), words[1].load(Relaxed)), (0, 0), "the thread that set it is on the way");
    words[0].store(0, Relaxed);
    assert_eq!((set_bits(bits()), words.each_ref().map(|word| word.load(Relaxed))), (2, [0b100; 2]));
    assert_eq!(set_bits(bits()), 0);
}
