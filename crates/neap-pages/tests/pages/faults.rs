//! Every system call fails at every position of a fixed program. Contents and sums stay right, and
//! everything works once the system has recovered.

use crate::machine::{Held, Opened, give, shape, take_block, take_run};
use neap_pages::{Exhausted, Shape};
use neap_testing::virtual_platform::{Call, Virtual};

/// Allocates, frees and releases; does without memory that it cannot get.
fn program(o: &Opened<'_, Virtual>, machine: &Virtual) -> Vec<Held> {
    let mut held: Vec<Held> = Vec::new();
    // Enough in use that fresh memory comes as huge pages.
    let ballast = o.pages.allocate_run(machine, 5000, 1);
    let keep = |held: &mut Vec<Held>, got: Result<Held, Exhausted>| held.extend(got.ok());
    for stamp in 0..120 {
        Virtual::run_on(stamp as usize % 2);
        keep(&mut held, take_block(o, (stamp % 8) as u8, stamp));
        if stamp % 10 == 3 {
            keep(&mut held, take_run(o, 20 * stamp as u32 + 1, 1, stamp));
        }
        if stamp % 4 == 3 && !held.is_empty() {
            give(o, held.swap_remove(stamp as usize * 7 % held.len()));
        }
        match stamp % 40 {
            19 => _ = o.pages.tick(machine),
            29 => _ = o.pages.release_all(machine),
            _ => {}
        }
    }
    if let Ok(ballast) = ballast {
        o.pages.free_run(machine, ballast.pfn, 5000);
    }
    held
}

fn after_a_fault(machine: &Virtual, what: &str) {
    let o = match Opened::new(machine, &Shape { huge: true, ..shape(None) }) {
        Ok(o) => o,
        Err(_) => return,
    };
    let held = program(&o, machine);
    o.pages.verify().unwrap_or_else(|finding| panic!("{what}: {finding}"));
    held.iter().for_each(|held| held.check(&o.pages));
    for call in [Call::MapAt, Call::Map, Call::Release, Call::ReleaseScattered, Call::Populate] {
        machine.fail(call, 0, 0);
    }
    let more = take_run(&o, 4000, 1, 5).unwrap_or_else(|_| panic!("{what}: it never recovered"));
    held.into_iter().chain([more]).for_each(|held| give(&o, held));
    assert!(!o.pages.release_all(machine).left, "{what}");
    let statistics = o.pages.statistics();
    assert_eq!((statistics.used, statistics.backed_free), (0, 0), "{what}");
    o.pages.verify().unwrap_or_else(|finding| panic!("{what}: {finding}"));
}

#[test]
fn every_call_fails_at_every_position_once_and_from_then_on() {
    for call in [Call::MapAt, Call::Map, Call::Release, Call::ReleaseScattered, Call::Populate] {
        let calls = {
            let machine = Virtual::new(4096, 2).with_scarce_address_space();
            after_a_fault(&machine, "no fault");
            machine.made(call)
        };
        assert!(calls > 0, "the program makes no {call:?}");
        for position in 0..calls {
            for failures in [1, usize::MAX] {
                let machine = Virtual::new(4096, 2).with_scarce_address_space();
                machine.fail(call, position, failures);
                after_a_fault(&machine, &format!("{call:?} fails {failures} times after {position}"));
            }
        }
    }
}
