//! Per-CPU data by itself as the host of groups, on a virtual machine.

use neap_base::virtual_platform::Virtual;
use neap_groups::Reclaimer;
use neap_percpu::{Alone, PerCpuData};

#[derive(Clone, Copy)]
pub(crate) struct Host<'a>(pub(crate) Alone<'a, Virtual>);

impl neap_percpu::Host for Host<'_> {
    type Platform = Virtual;
    type Charge = ();

    fn platform(&self) -> &Virtual {
        self.0.platform
    }

    fn data(&self) -> &PerCpuData {
        self.0.data
    }
}

impl Reclaimer for Host<'_> {}
