//! Counts how often charges use counters that CPUs share, on a virtual machine.
//!
//! The charging code itself runs on any number of virtual CPUs, and counts its operations
//! ([`Groups::shared_operations`]). One thread acts as all CPUs. A seed determines their order, so
//! the result is the same each time. A plain atomic makes one such operation for each call.

use std::collections::VecDeque;

use anyhow::{Result, anyhow};
use neap_base::listed_enum;
use neap_groups::{GroupId, Groups, Kind, OnLimit, Payer};
use neap_percpu::{PerCpuData, Shape, Standalone};
use neap_testing::virtual_platform::Virtual;

use super::PAGE;
use crate::work::Outcome;
use crate::work::meter::Random;

listed_enum! {
    /// The action of each CPU, page by page.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(super) enum Pattern {
        /// Each CPU charges a page, or uncharges one of its pages, at random (a random walk).
        Walk = "walk",
        /// One half of the CPUs charges pages, and the other half uncharges them a little later. So
        /// no page can stay in a stock.
        Flow = "flow",
    }
}

/// Pages between a charge and its uncharge by another CPU.
const ON_THE_WAY: usize = 1000;

type Machine<'a> = Standalone<'a, Virtual>;

/// Makes `calls` calls of a pattern to a group at `depth` on `cpus` CPUs, after a tenth as many to
/// warm up. The count `shared` in the result is the number of operations.
pub(super) fn run(pattern: Pattern, cpus: usize, depth: usize, calls: u64) -> Result<Outcome> {
    let machine = Virtual::new(neap_os::memory::page_size(), cpus);
    let shape = Shape { span: 16 << 20, ..Shape::usual(cpus) };
    let data = PerCpuData::open(&machine, &shape, |_| 0, ()).map_err(|error| anyhow!("{error:?}"))?;
    let host = Standalone { data: &data, platform: &machine };
    let groups = Groups::open(&host)?;
    let mut group = GroupId::ROOT;
    for _ in 0..depth {
        group = groups.create(&host, group, "below")?;
    }
    let mut stage = SharedStage {
        groups: &groups,
        host,
        payer: group.payer(Kind::ByHand, 0),
        random: Random::new(1),
        held: vec![0; cpus],
        on_the_way: VecDeque::new(),
    };
    for _ in 0..calls / 10 {
        stage.step(pattern)?;
    }
    let before = groups.shared_operations();
    for _ in 0..calls {
        stage.step(pattern)?;
    }
    let shared = groups.shared_operations() - before;
    // SAFETY: no thread uses the groups or the per-CPU data any more, and `host` has the platform
    // on which the groups were opened.
    unsafe {
        groups.close(&host);
        data.close(&machine);
    }
    let counts = [("shared".to_string(), shared as f64)].into();
    Ok(Outcome { operations: calls, counts, ..Outcome::default() })
}

struct SharedStage<'a> {
    groups: &'a Groups,
    host: Machine<'a>,
    payer: Payer,
    random: Random,
    /// Charged pages of each CPU.
    held: Vec<u32>,
    /// CPUs that have charged a page which a CPU of the other half will uncharge.
    on_the_way: VecDeque<usize>,
}

impl SharedStage<'_> {
    /// Makes one call.
    fn step(&mut self, pattern: Pattern) -> Result<()> {
        let (cpu, half) = (self.random.below(self.held.len()), self.held.len() / 2);
        match pattern {
            Pattern::Walk if self.held[cpu] == 0 || self.random.below(2) == 0 => {
                self.held[cpu] += 1;
                self.charge(cpu)?;
            }
            Pattern::Walk => {
                self.held[cpu] -= 1;
                self.uncharge(cpu);
            }
            Pattern::Flow if self.on_the_way.len() < ON_THE_WAY => {
                self.on_the_way.push_back(cpu % half);
                self.charge(cpu % half)?;
            }
            Pattern::Flow => {
                let from = self.on_the_way.pop_front().unwrap_or(0);
                self.uncharge(from + half);
            }
        }
        Ok(())
    }

    fn charge(&self, cpu: usize) -> Result<()> {
        Virtual::run_on(cpu);
        self.groups.charge(&self.host, self.payer, PAGE, OnLimit::Refuse).map_err(|refusal| anyhow!("{refusal:?}"))?;
        Ok(())
    }

    fn uncharge(&self, cpu: usize) {
        Virtual::run_on(cpu);
        self.groups.uncharge(&self.host, self.payer, PAGE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_counted_level_by_level() {
        let per_call = |pattern, cpus, depth| run(pattern, cpus, depth, 64_000).unwrap().count("shared") / 64_000.0;
        for (cpus, depth) in [(2, 1), (16, 1), (16, 8)] {
            let levels = 1.0 + depth as f64;
            // Of two calls, one charges and one uncharges. Charges reach the shared counters 64
            // pages at a time, uncharges 33 pages at a time.
            let flow = per_call(Pattern::Flow, cpus, depth);
            let expected = ((2.0 * levels + 1.0) / 64.0 + (levels + 1.0) / 33.0) / 2.0;
            assert!(
                (0.98..1.02).contains(&(flow / expected)),
                "{flow} and not {expected} of {cpus} CPUs, {depth} deep"
            );
            let walk = per_call(Pattern::Walk, cpus, depth);
            assert!(0.0 < walk && walk < flow, "{walk} of {cpus} CPUs, {depth} deep");
        }
    }
}
