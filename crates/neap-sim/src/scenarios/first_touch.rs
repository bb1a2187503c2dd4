//! pft: CPUs touch memory for the first time, each its part of some gibibytes, and end; measured is
//! how long that takes.
//!
//! Source 002 compares ways to lock a CPU's list with none at all: with a spin lock that keeps
//! interrupts off pft took 1 to 17 % longer, with an attempt nothing. Here somebody also drains all
//! lists in turn, one each millisecond: with a spin lock the drainer keeps a list for as long as it
//! waits for the zone; with an attempt the owner goes to the zone instead.

use crate::cost;
use crate::machine::{ListLock, SECOND, Setup};
use crate::program::{Op, Program};

/// For so many CPUs whose lists are locked like this.
pub fn setup(cpus: usize, list_lock: ListLock, gibibytes: u32) -> Setup {
    let all = gibibytes << 18;
    let work = cost::page_work() as u32;
    let program = |cpu: usize| -> Program {
        let pages = all / cpus as u32;
        // A little apart: threads do not start at once.
        let mut late = Some(cpu as u64 * 10_000);
        Box::new(move |view| match late.take() {
            Some(late) => Op::Rest(late),
            None if view.held[0] < pages => Op::Take(0, 0, work),
            None => Op::End,
        })
    };
    let drain_every = (list_lock != ListLock::None).then_some(SECOND / 1000);
    // Twice what it takes where nobody waits, and two seconds for the zone's lock to hand out every
    // page.
    let time = 50 * SECOND / cpus as u64 + 2 * SECOND;
    let setup = Setup::new((0..cpus).map(program).collect());
    Setup { managed: setup.managed.max(all / 4 * 5), list_lock, drain_every, warm: 0, time, ..setup }
}
