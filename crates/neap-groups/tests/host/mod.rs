//! A host for tests: a machine, real or virtual, with per-CPU data, and counts of its calls.
#![allow(dead_code, reason = "not every test file uses every piece")]

pub(crate) mod machine;

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_groups::{GroupId, GroupSlot, Groups, Reclaimer, Waiting};
use neap_percpu::{PerCpuData, Standalone};
use std::sync::Mutex;

/// A group that was deleted, and its parent; whether it still existed, and where its items were to
/// be attached.
pub(crate) type Offline = (GroupSlot, GroupSlot, bool, Option<GroupSlot>);

/// Counts of calls of a host.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// Requests to come soon.
    pub(crate) come: AtomicU64,
    /// Requests to serve requests soon.
    pub(crate) ask: AtomicU64,
    /// Nanoseconds that a reclaim takes.
    pub(crate) reclaim_takes: AtomicU64,
    /// Bytes to reclaim.
    pub(crate) reclaim: AtomicU64,
    /// Deleted groups: see [`Offline`].
    pub(crate) offline: Mutex<Vec<Offline>>,
}

/// A host for tests.
pub(crate) struct Host<'a, P: Platform> {
    pub(crate) alone: Standalone<'a, P>,
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
        Host { alone: Standalone { data, platform }, asked }
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
        match self.asked.reclaim_takes.load(Relaxed) {
            0 => {}
            time => self.alone.platform.sleep(time),
        }
        0
    }

    fn request_tick(&self, _: &Inside<'_>) {
        self.asked.come.fetch_add(1, Relaxed);
    }

    fn ask_soon(&self) {
        self.asked.ask.fetch_add(1, Relaxed);
    }

    fn offline(&self, inside: &Inside<'_>, groups: &Groups, child: GroupSlot, parent: GroupSlot) {
        let (there, seat) = (groups.exists(child.group), groups.attach_target(inside, &groups.reading(), child.group));
        assert!(groups.parent_of(child.slot) == Some(parent) && groups.is_leaving(child.slot));
        self.asked.offline.lock().unwrap().push((child, parent, there, seat));
    }
}

/// Calls `each` with all charges that wait, in no order.
pub(crate) fn each_waiting(groups: &Groups, host: &impl Reclaimer, mut each: impl FnMut(Waiting)) {
    host.inside(|inside| {
        let mut from = 0;
        while let Some((index, waiting)) = groups.next_waiting(inside, from) {
            each(waiting);
            from = index + 1;
        }
    });
}
