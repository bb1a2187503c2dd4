//! Bounds that hold for every policy after any events.
//!
//! The tests call only the functions that a list calls. They print a failing case in its smallest
//! form.

use neap_pages::policy::fixed::Still;
use neap_pages::policy::{Adaptive, DOUBLINGS, Limits, MOST_DOUBLINGS, Policy};
use proptest::prelude::*;

use super::test_inputs::{limits, list, supply};
use super::{Depth, DoubleHalve, IdleGuard, Pid, Upstream};

#[derive(Clone, Copy, Debug)]
enum Event {
    Take(u8),
    Give(u8),
    Contended,
    Decay(u32),
    Pressure,
    Free(u32),
    Reclaim(bool),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        12 => (0..4_u8).prop_map(Event::Take),
        12 => (0..4_u8).prop_map(Event::Give),
        2 => Just(Event::Contended),
        2 => (0..9_u32).prop_map(Event::Decay),
        1 => Just(Event::Pressure),
        1 => prop_oneof![0..3000_u32, 0..600_000_u32, Just(u32::MAX)].prop_map(Event::Free),
        1 => any::<bool>().prop_map(Event::Reclaim),
    ]
}

/// Checks bounds that always hold. Each event is repeated as often as its number says, so that runs
/// of one event are long enough to have an effect.
fn holds<T: Policy>(bounds: Limits, events: &[(Event, u16)], strict: bool) -> Result<(), TestCaseError> {
    let mut policy = T::new(&bounds);
    let mut now = supply(&bounds, u32::MAX);
    let (mut count, mut moved) = (0_u32, u32::MAX - 5000);
    let mut lengths = [0_u32; 4];
    let largest = if strict { bounds.largest() } else { bounds.fixed.batch << DOUBLINGS.max(bounds.scale) };
    for &(event, times) in events {
        for _ in 0..times {
            let mut give = 0;
            match event {
                Event::Take(order) => {
                    policy.asked(list(count, moved), order);
                    if let Some(less) = lengths[order as usize].checked_sub(1) {
                        lengths[order as usize] = less;
                        count -= 1 << order;
                        moved = moved.wrapping_add(1 << order);
                    } else {
                        let blocks = policy.refill(list(count, moved), order, &now);
                        prop_assert!(blocks >= 1 && blocks <= largest.max(2));
                        if strict && (now.reclaiming || now.free <= bounds.watermarks.high) {
                            prop_assert!(blocks << order <= bounds.fixed.batch.max(2 << order));
                        }
                        // A list returns blocks for which it has no room.
                        let more = (blocks - 1) << order;
                        prop_assert!(!strict || count > policy.high() || count + more <= policy.high());
                        if count + more <= policy.high() {
                            lengths[order as usize] += blocks - 1;
                            count += more;
                        }
                    }
                }
                Event::Give(order) => {
                    lengths[order as usize] += 1;
                    count += 1 << order;
                    moved = moved.wrapping_add(1 << order);
                    give = policy.put(list(count, moved), order, || now);
                    prop_assert!(give <= count && (!strict || give <= bounds.largest().max(count)));
                }
                Event::Contended => policy.contended(&now),
                Event::Decay(quarters) => give = policy.decay(list(count, moved), &now, quarters),
                Event::Pressure => give = policy.pressure(list(count, moved), &now),
                Event::Free(free) => now.free = free,
                Event::Reclaim(on) => now.reclaiming = on,
            }
            prop_assert!(give <= count);
            let until = count - give;
            while count > until {
                let order = (0..4).max_by_key(|&order| lengths[order] << order).unwrap();
                lengths[order] -= 1;
                count -= 1 << order;
            }
            let told = !matches!(event, Event::Free(_) | Event::Reclaim(_));
            prop_assert!(policy.high() <= bounds.ceiling.max(bounds.fixed.high));
            if strict {
                prop_assert!(policy.batch(&bounds) <= bounds.largest());
                let acted = matches!(event, Event::Decay(_) | Event::Pressure) || give > 0;
                prop_assert!(!(told && acted) || policy.high() <= bounds.cap(&now));
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    #[test]
    fn bounds_hold_for_any_events(
        events in proptest::collection::vec((event(), 1..3000_u16), 1..60),
        managed in prop_oneof![0..3000_u32, 0..(1_u32 << 22), Just(u32::MAX)],
        cpus in prop_oneof![1..4_usize, 1..300_usize],
        size in proptest::option::weighted(0.2, 0..100_000_u32),
        scale in 0..=MOST_DOUBLINGS,
    ) {
        let bounds = limits(managed, cpus).with_scale(scale);
        let bounds = size.map_or(bounds, |size| bounds.with_size(size));
        holds::<Adaptive>(bounds, &events, true)?;
        holds::<Still>(bounds, &events, false)?;
        holds::<Upstream>(bounds, &events, false)?;
        holds::<Depth>(bounds, &events, false)?;
        holds::<DoubleHalve>(bounds, &events, false)?;
        holds::<IdleGuard>(bounds, &events, false)?;
        holds::<Pid>(bounds, &events, false)?;
    }
}

#[test]
fn the_state_of_a_list_is_at_most_a_cache_line() {
    assert!(size_of::<Upstream>() <= 64 && size_of::<Depth>() <= 64);
}
