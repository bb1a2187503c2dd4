//! librseq's memory pools for comparison, if the library was built (`cargo xtask peers`): time of
//! an allocation and its free, and memory returned when owners are deleted.
//!
//! Each run of the workload `pool` is a process with the library preloaded.

use anyhow::Result;

use super::script::SIZES;
use super::{STAYS, Session};
use crate::report::number;
use crate::statistics::summary;
use crate::variant::{AllocatorKind, Missing, Variant, locate};
use crate::work::{self, Outcome};

const NAME: &str = "librseq";

/// The library, and its results so far.
pub(super) struct Librseq {
    variant: Variant,
    cpus: usize,
    owners: usize,
    outcomes: Vec<Outcome>,
}

impl Librseq {
    /// Returns the library, if it was built.
    pub(super) fn find(session: &mut Session, cpus: usize, owners: usize) -> Option<Librseq> {
        match locate(&session.executable, NAME) {
            Ok(library) => {
                let (kind, environment) = (AllocatorKind::Peer, Vec::new());
                let variant = Variant { name: NAME, kind, library, environment, release_thread: false };
                Some(Librseq { variant, cpus, owners, outcomes: Vec::new() })
            }
            Err(error) => {
                session.found.missing.push(Missing { name: NAME.to_string(), reason: format!("{error:#}") });
                None
            }
        }
    }

    /// Runs a round: pairs of an allocation and its free, and in the first round also the script.
    pub(super) fn round(&mut self, session: &Session) -> Result<f64> {
        let owners = if self.outcomes.is_empty() { self.owners } else { 0 };
        let [cpus, owners, stays] = [self.cpus, owners, STAYS].map(|number| number.to_string());
        let sizes = SIZES.map(|size| size.to_string()).join(",");
        let arguments = ["pool", "--cpus", &cpus, "--owners", &owners, "--stays", &stays, "--sizes", &sizes];
        let outcome = work::measure(&session.executable, &self.variant, &arguments)?;
        let nanoseconds = outcome.ns_each();
        self.outcomes.push(outcome);
        Ok(nanoseconds)
    }

    /// Adds librseq's figures, given neap's times of the same rounds. Returns its line of the
    /// report.
    pub(super) fn report(&self, session: &mut Session, neap: &[f64]) -> String {
        let own = self.outcomes.iter().map(Outcome::ns_each);
        let median = |values: Vec<f64>| summary(values).map(|summary| summary.median);
        session.figure("librseq_alloc_free_ns", median(own.clone().collect()));
        session
            .figure("alloc_free_ratio_librseq", median(neap.iter().zip(own).map(|(neap, own)| neap / own).collect()));
        let Some([before, rest @ ..]) = self.outcomes.first().map(|outcome| outcome.rss_kib.as_slice()) else {
            return String::new();
        };
        let rest: Vec<f64> = rest.iter().map(|kib| kib.saturating_sub(*before) as f64).collect();
        let &[full, few, none] = rest.as_slice() else { return String::new() };
        let ratio = full / few.max(1.0);
        session.figure("librseq_return_ratio", Some(ratio));
        let [all, some, nothing] = [full, few, none].map(|kib| number(kib, 0));
        let cpus = self.cpus;
        format!(
            "librseq's pools, {cpus} CPUs, resident KiB of all, 1 of 11, none: {all}, {some}, {nothing} ({ratio:.1} x).\n"
        )
    }
}
