//! The parts of a machine: CPUs, zones, channels, and the operations between them.

use std::collections::VecDeque;

use neap_base::{Order, Pfn};
use neap_pages::lab::{Laboratory, LockUse, Visit};
use neap_pages::policy::Policy;
use neap_pages::{BATCH_SCALE, Shape, SideTable, TABLES};
use neap_testing::virtual_platform::Virtual;

use crate::program::{HANDS, Op, Program, View};

/// Pages taken at once when a zone is filled.
const RUN: u32 = 1 << 16;

/// The next action of a CPU.
pub(super) enum Pending {
    /// Continues its program.
    Go,
    /// Needs a zone's lock.
    Visit { visit: Visit, operation: Operation, attempts: u32 },
    /// Needs the lock again, for the rest of the pages. After the last hold the operation is
    /// complete. A carrier, which takes pages from lists to a zone, has no operation.
    Holds { node: usize, held: LockUse, operation: Option<Operation> },
    /// Sends or receives.
    Channel(Op),
}

/// An allocation or a free that a list could not serve alone.
#[derive(Clone, Copy)]
pub(crate) struct Operation {
    /// The node to ask.
    pub(super) node: usize,
    pub(crate) order: Order,
    /// The hand that gets an allocated block. `None` for a free.
    pub(crate) into: Option<usize>,
    pub(super) work: u32,
    pub(crate) since: u64,
}

pub(super) struct Cpu {
    pub(super) program: Option<Program>,
    pub(super) hands: [VecDeque<HeldBlock>; HANDS],
    pub(super) view: View,
    pub(super) at: u64,
    pub(super) pending: Pending,
    /// Another CPU holds its list until then.
    pub(super) list_held_until: u64,
    /// Times at which the pages that it might have kept were freed, if gaps are measured.
    pub(super) freed: Option<Vec<u64>>,
    pub(super) parked: bool,
    pub(super) ended: bool,
}

impl Cpu {
    /// Makes a CPU with a program. If `watched`, the machine measures its gaps (see
    /// [`crate::offline`]).
    pub(super) fn with_program(program: Program, watched: bool) -> Cpu {
        Cpu { freed: watched.then(Vec::new), parked: false, program: Some(program), ..Cpu::carrier() }
    }

    /// Makes a CPU without a program. It waits until it has pages to carry to a zone.
    pub(super) fn carrier() -> Cpu {
        Cpu {
            freed: None,
            parked: true,
            program: None,
            hands: Default::default(),
            view: View::default(),
            at: 0,
            pending: Pending::Go,
            list_held_until: 0,
            ended: false,
        }
    }
}

/// A block that was handed out.
#[derive(Clone, Copy)]
pub(super) struct HeldBlock {
    /// The node of the block's zone.
    pub(super) node: usize,
    pub(super) order: Order,
    pub(super) pfn: Pfn,
}

#[derive(Default)]
pub(super) struct Channel {
    pub(super) blocks: VecDeque<HeldBlock>,
    pub(super) receiver: Option<usize>,
}

/// A node's zone and lists.
pub(super) struct Zone<T: Policy> {
    pub(super) lab: Laboratory<Virtual, T>,
    pub(super) managed: u32,
    pub(super) locked_until: u64,
    /// Operations that have left a list for this zone, and have not arrived yet.
    pub(super) visiting: u32,
    pub(super) reclaiming: bool,
    pub(super) reclaimer: Option<usize>,
    pub(super) empty_ticks: u32,
}

impl<T: Policy> Zone<T> {
    /// # Panics
    /// Panics if the system refuses address space for the zone's tables.
    pub(super) fn new(managed: u32, cpus: usize, reclaimer: Option<usize>) -> Zone<T> {
        let span = ((managed as usize) << 12).next_power_of_two() * 2;
        let budget = Some(managed);
        let tables = [SideTable::default(); TABLES];
        let shape = Shape { span, budget, tables, huge: false, list_high: None, batch_scale: BATCH_SCALE };
        let lab = Laboratory::open(Virtual::new(4096, cpus), &shape).expect("address space for the tables of the zone");
        // A simulated machine has all its memory from the start, so growth is not measured.
        let pages = lab.pages();
        let runs = (0..managed).step_by(RUN as usize).map(|start| {
            let length = RUN.min(managed - start);
            (pages.allocate_run(lab.platform(), length, 1).expect("address space for the zone").pfn, length)
        });
        let runs: Vec<(Pfn, u32)> = runs.collect();
        runs.iter().for_each(|&(pfn, length)| pages.free_run(lab.platform(), pfn, length));
        Zone { lab, managed, locked_until: 0, visiting: 0, reclaiming: false, reclaimer, empty_ticks: 0 }
    }

    pub(super) fn listed(&self, cpus: usize) -> u32 {
        (0..cpus).map(|cpu| self.lab.listed_on(cpu)).sum()
    }
}
