//! pft: each CPU touches its part of some gibibytes for the first time, and ends. The measured
//! value is the elapsed time.
//!
//! The scenario compares locks of a CPU's list with no lock. In the published results, a spin lock
//! that keeps interrupts off takes 1 to 17 % more time. A lock that the owner only tries takes no
//! more time. Here a drainer also drains all lists in turn, one each millisecond. With a spin lock
//! the drainer holds a list while it waits for the zone. With a tried lock the owner then bypasses
//! its list.

use crate::cost;
use crate::machine::{ListLock, SECOND, Setup};
use crate::program::{Op, Program};

/// The setup for `cpus` CPUs with this lock of lists.
pub fn setup(cpus: usize, list_lock: ListLock, gibibytes: u32) -> Setup {
    let all = gibibytes << 18;
    let work = cost::page_work() as u32;
    let program = |cpu: usize| -> Program {
        let pages = all / cpus as u32;
        // CPUs start at slightly different times, as threads do.
        let mut late = Some(cpu as u64 * 10_000);
        Box::new(move |view| match late.take() {
            Some(late) => Op::Rest(late),
            None if view.held[0] < pages => Op::Take(0, 0, work),
            None => Op::End,
        })
    };
    let drain_every = (list_lock != ListLock::None).then_some(SECOND / 1000);
    // Twice the time without waits, and two seconds for the zone's lock to hand out every page.
    let time = 50 * SECOND / cpus as u64 + 2 * SECOND;
    let setup = Setup::new((0..cpus).map(program).collect());
    Setup { managed: setup.managed.max(all / 4 * 5), list_lock, drain_every, warm: 0, time, ..setup }
}
