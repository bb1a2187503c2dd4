//! Verification of a whole manager, at any moment.
//!
//! Verification closes the [fork gate](neap_base::gate) and the restartable sequences of the fast
//! path, as fork does. Then every object and page is in exactly one structure. Afterwards it opens
//! the gate and the sequences again. It allocates nothing.

use crate::mm::Mm;
use core::sync::atomic::Ordering::Relaxed;
use neap_base::Platform;
use neap_objects::size_class::Class;
use neap_objects::verify::Verified;
pub use neap_objects::verify::{Census, Finding};

/// Maximum number of looks at the gate, in about ten seconds, while a thread stays in a slow path.
const POLLS_MAX: u32 = 100_000;

impl<P: Platform> Mm<P> {
    /// Verifies that every object, every page and all per-CPU data is in exactly one place, and
    /// that all counters are right. Returns the number of objects by place. Other threads may run
    /// meanwhile. A thread that needs a slow path waits.
    ///
    /// `in_hands` is the number of other threads; in a forked child, of other threads of the parent
    /// at the fork. Each may have been stopped while an object was on its way between a stack and
    /// the thread.
    ///
    /// # Errors
    /// The first [`Finding`].
    pub fn verify(&self, in_hands: u64) -> Result<Census, Finding> {
        let Some(core) = self.core_if_open() else { return Ok(Census::default()) };
        let (objects, equal) = (&core.objects, |what, found| Finding::unless_equal(what, Class::NONE, 0, 0, found));
        self.close_for_fork(&|looks| looks < POLLS_MAX);
        let answer = equal("thread that stays in a slow path", (!self.gate.is_empty()).into()).and_then(|()| {
            let Verified { census, run_pages } = objects.verify(in_hands)?;
            equal("bytes unaccounted for", core.usage().unaccounted_bytes.unsigned_abs())?;
            let run_bytes = run_pages * objects.pages.page_size() as u64;
            // Relaxed: a thread that changed it has left the gate since.
            Finding::unless_equal("bytes in runs", Class::NONE, 0, run_bytes, core.run_bytes.load(Relaxed))?;
            core.per_cpu.verify()?;
            self.verify_groups(in_hands)?;
            self.verify_lists()?;
            Ok(census)
        });
        self.reopen_after_fork();
        answer
    }
}
