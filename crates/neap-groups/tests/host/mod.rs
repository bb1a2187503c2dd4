//! A host for tests: a machine, real or virtual, its per-CPU data, and what is asked of it.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap_base::Platform;
use neap_groups::{GroupId, Groups, Reclaimer, Seat};
use neap_percpu::{Alone, PerCpuData};
use std::sync::Mutex;

/// A group that went, and its parent; whether it was there still, and where its things were to be hung.
pub(crate) type Offline = (Seat, Seat, bool, Option<Seat>);

/// What a host was asked for.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// How often to come soon.
    pub(crate) come: AtomicU64,
    /// How often to serve requests soon.
    pub(crate) ask: AtomicU64,
    /// How many bytes to reclaim.
    pub(crate) reclaim: AtomicU64,
    /// Groups that went: see [`Offline`].
    pub(crate) offline: Mutex<Vec<Offline>>,
}

/// The host.
pub(crate) struct Host<'a, P: Platform> {
    pub(crate) alone: Alone<'a, P>,
    pub(crate) asked: &'a Asked,
}

impl<P: Platform> Clone for Host<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Platform> Copy for Host<'_, P> {}

impl<'a, P: Platform> Host<'a, P> {
    pub(crate) fn new(platform: &'a P, data: &'a PerCpuData, asked: &'a Asked) -> Host<'a, P> {
        Host { alone: Alone { data, platform }, asked }
    }
}

impl<P: Platform + Sync> neap_percpu::Host for Host<'_, P> {
    type Platform = P;
    type Charge = ();

    fn platform(&self) -> &P {
        self.alone.platform
    }

    fn data(&self) -> &PerCpuData {
        self.alone.data
    }
}

impl<P: Platform> Reclaimer for Host<'_, P> {
    fn reclaim(&self, _group: GroupId, bytes: u64) -> u64 {
        self.asked.reclaim.fetch_add(bytes, Relaxed);
        0
    }

    fn come_soon(&self) {
        self.asked.come.fetch_add(1, Relaxed);
    }

    fn ask_soon(&self) {
        self.asked.ask.fetch_add(1, Relaxed);
    }

    fn offline(&self, groups: &Groups, child: Seat, parent: Seat) {
        let (there, seat) = (groups.is_there(child.group), groups.seat(&groups.reading(), child.group));
        assert!(groups.parent_of(child.slot) == Some(parent) && groups.is_leaving(child.slot));
        self.asked.offline.lock().unwrap().push((child, parent, there, seat));
    }
}
