//! The place of a manager's per-CPU data. The manager makes the data at first use.

use crate::once::Once;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_base::platform::Errno;
use neap_objects::verify::Finding;
use neap_os::topology::MAX_CPUS;
use neap_percpu::{PerCpuData, PopulatedBytes, Shape, Tick};

/// Bytes of address space for each CPU if address space is scarce. If the system refuses a span,
/// [`PerCpuOnce::open`] tries a quarter of it, as long as the span exceeds [`LEAST_SPAN`].
pub(crate) const SCARCE_SPAN: usize = 16 << 20;
pub(crate) const LEAST_SPAN: usize = 256 << 10;

/// The instance of a manager.
#[derive(Debug)]
pub(crate) struct PerCpuOnce(Once<PerCpuData>);

impl PerCpuOnce {
    pub(crate) const fn new() -> PerCpuOnce {
        PerCpuOnce(Once::new())
    }

    /// The instance, if there is one.
    #[inline]
    pub(crate) fn get(&self) -> Option<&PerCpuData> {
        self.0.get()
    }

    /// Returns the instance. Makes it if need be.
    pub(crate) fn make<P: Platform>(&self, _: &Inside<'_>, platform: &P) -> Result<&PerCpuData, Errno> {
        self.0.get_or_make(|| PerCpuOnce::open(platform))
    }

    pub(crate) fn open<P: Platform>(platform: &P) -> Result<PerCpuData, Errno> {
        let mut homes = [0_u8; MAX_CPUS];
        platform.each_home(&mut |cpu, node| homes.get_mut(cpu).into_iter().for_each(|home| *home = node as u8));
        let home = |cpu: usize| homes.get(cpu).map_or(0, |&home| home.into());
        let mut shape = Shape::usual(platform.cpus());
        if platform.address_space_is_scarce() {
            shape.span = SCARCE_SPAN;
        }
        loop {
            match PerCpuData::open(platform, &shape, home, ()) {
                Err(Errno::NOMEM | Errno::AGAIN) if shape.span > LEAST_SPAN => shape.span /= 4,
                answer => break answer,
            }
        }
    }

    /// Unmaps the per-CPU data, if it was made.
    ///
    /// # Safety
    /// No thread uses the instance or its data any more.
    pub(crate) unsafe fn close<P: Platform>(&self, platform: &P) {
        if let Some(data) = self.get() {
            // SAFETY: no thread uses the instance or its data any more (the caller's promise).
            unsafe { data.close(platform) };
        }
    }

    /// Calls [`PerCpuData::tick_until`], if the data was made.
    pub(crate) fn tick<P: Platform>(&self, _: &Inside<'_>, platform: &P, stop: &dyn Fn() -> bool) -> Tick {
        self.get().map_or(Tick::default(), |data| data.tick_until(platform, stop))
    }

    /// Calls [`PerCpuData::release_all`], if the data was made.
    pub(crate) fn release_all<P: Platform>(&self, _: &Inside<'_>, platform: &P, stop: &dyn Fn() -> bool) -> Tick {
        self.get().map_or(Tick::default(), |data| data.release_all(platform, stop))
    }

    /// Bytes of the populated pages. The caller is inside the gate, or has closed it.
    pub(crate) fn bytes(&self) -> PopulatedBytes {
        self.get().map(PerCpuData::populated_bytes).unwrap_or_default()
    }

    /// Verifies the counters of the data, if it was made.
    pub(crate) fn verify(&self) -> Result<(), Finding> {
        Ok(self.get().map_or(Ok(()), PerCpuData::verify)?)
    }
}
