//! Draining: emptying per-CPU caches from any thread, while other threads use them.
//!
//! # Design
//! A drain waits for no CPU. It skips a list that another thread holds, and tries it again a few
//! times. It counts lists that were held at each try. A drain releases no memory to the OS; the
//! next tick does. It covers all CPUs that may ever exist: a CPU that has vanished keeps its lists
//! until a drain.
//!
//! # Locking
//! A drain holds each lock briefly. It holds a list's lock while it detaches the list's blocks, the
//! zone's lock for one batch of pages, and a class's lock for one batch of objects.

use crate::mm::{Core, Mm};
use core::fmt;
use core::ops::Range;
use neap_base::Platform;
use neap_base::gate::Inside;
use neap_objects::size_class::Class;
use neap_os::topology::CpuSet;
use neap_pages::{DrainSum, Effort};

/// Maximum number of further tries at skipped lists and stacks.
pub(crate) const RETRIES_MAX: u32 = 8;
/// Nanoseconds between two tries; all of them last for several time slices of the scheduler.
pub(crate) const POLL_SLEEP_NS: u64 = 1_000_000;

/// The fences that a drain may cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fences {
    /// Any fence: the stacks of all CPUs are drained.
    All,
    /// Fences that a call that allocates may make ([`Core::may_take_in_call`]). Other CPUs' stacks
    /// stay.
    OfCall,
}

/// The part of the caches to drain. `None` means no restriction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Only the caches of this CPU: its page lists and stacks. Barns belong to no CPU, and are
    /// drained only if no CPU is named.
    pub cpu: Option<u32>,
    /// Only the caches of this node: those of its CPUs, and its barns.
    pub node: Option<u32>,
    /// Only memory of the zone with this number in its node. Each node has one zone, number 0.
    pub zone: Option<u32>,
    /// Only until the zone has this many free pages. The order is page lists, stacks, barns: the
    /// cheapest first.
    pub until: Option<u64>,
}

impl Scope {
    /// Everything.
    pub const ALL: Scope = Scope { cpu: None, node: None, zone: None, until: None };
}

/// Result of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Drained {
    /// Pages moved from lists to the zone.
    pub pages: u64,
    /// Objects moved from stacks and barns to their slabs. Slabs that became free count among the
    /// pages.
    pub objects: u64,
    /// CPUs of the scope, including those that never cached anything.
    pub cpus: u32,
    /// CPUs whose page lists could not be drained at any try, CPUs whose stacks could not, and
    /// nodes whose barns could not because of a fork. Another thread held a list or stack, or the
    /// system refused a fence.
    pub skipped: u32,
    /// Tries after the first at lists and stacks.
    pub retried: u32,
    /// Pages free in the zone afterwards.
    pub free: u64,
}

/// The scope names an object that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSuch {
    /// A CPU beyond those that may ever exist.
    Cpu(u32),
    /// A node.
    Node(u32),
    /// A zone.
    Zone(u32),
}

impl fmt::Display for NoSuch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoSuch::Cpu(number) => write!(f, "there is no CPU {number}"),
            NoSuch::Node(number) => write!(f, "there is no node {number}"),
            NoSuch::Zone(number) => write!(f, "there is no zone {number}"),
        }
    }
}

/// The rest of a scope.
#[derive(Debug)]
struct Left {
    lists: CpuSet,
    stacks: CpuSet,
    /// Nodes with barns to drain.
    barns: Range<usize>,
}

impl Left {
    fn is_nothing(&self) -> bool {
        self.lists.count() == 0 && self.stacks.count() == 0 && self.barns.is_empty()
    }
}

impl<P: Platform> Core<P> {
    /// Returns all caches in `scope`; [`NoSuch`] if it names an object that does not exist.
    fn scope(&self, scope: &Scope) -> Result<Left, NoSuch> {
        let mut cpus = CpuSet::EMPTY;
        let known = self.objects.cpu_caches.cpus();
        match scope.cpu {
            Some(cpu) if cpu as usize >= known => return Err(NoSuch::Cpu(cpu)),
            Some(cpu) => cpus.insert(cpu as usize),
            None => (0..known).for_each(|cpu| cpus.insert(cpu)),
        }
        if let Some(zone) = scope.zone.filter(|&zone| zone > 0) {
            return Err(NoSuch::Zone(zone));
        }
        let (platform, pages) = (&self.objects.platform, &self.objects.pages);
        if let Some(node) = scope.node {
            if node as usize >= pages.nodes() {
                return Err(NoSuch::Node(node));
            }
            let far = |&cpu: &usize| pages.nearest_to(platform, cpu) != node as usize;
            (0..known).filter(far).for_each(|cpu| cpus.remove(cpu));
        }
        let nodes = scope.node.map_or(0..pages.nodes(), |node| node as usize..node as usize + 1);
        let barns = if scope.cpu.is_none() { nodes } else { 0..0 };
        Ok(Left { lists: cpus, stacks: cpus, barns })
    }

    /// Removes CPUs that never used their lists or stacks.
    fn leave_unused(&self, left: &mut Left) {
        left.lists.intersect(&self.objects.pages.listed_cpus());
        left.stacks.intersect(&self.objects.cpu_caches.used());
    }

    /// Tries once to drain the caches in `left`, and updates `left` to those that are still to be
    /// drained. Ends early if `stop` returns true.
    fn drain_once(
        &self,
        _: &Inside<'_>,
        left: &mut Left,
        drained: &mut Drained,
        fences: Fences,
        stop: &dyn Fn() -> bool,
    ) {
        let platform = &self.objects.platform;
        self.drain_lists(left, drained, stop);
        // Slabs that became free went to the lists of the CPUs that this thread was on, whichever
        // CPU is drained.
        let emptied = |left: &mut Left, drained: &mut Drained, before: usize, objects: u64| {
            drained.objects += objects;
            [before, platform.cpu()].into_iter().for_each(|cpu| left.lists.insert(cpu));
            self.drain_lists(left, drained, stop);
        };
        for cpu in left.stacks.iter() {
            let here = platform.cpu();
            if !stop()
                && (fences == Fences::All || self.may_take_in_call(cpu))
                && let Some(objects) = self.objects.drain_cpu(cpu, |_| true)
            {
                left.stacks.remove(cpu);
                emptied(left, drained, here, objects);
            }
        }
        while let Some(node) = left.barns.clone().next() {
            for class in Class::all() {
                let here = platform.cpu();
                let objects = self.objects.trim_barn_on(node, class, Effort::Full, stop).objects;
                emptied(left, drained, here, objects);
            }
            if stop() {
                break;
            }
            left.barns.start += 1;
        }
    }

    fn drain_lists(&self, left: &mut Left, drained: &mut Drained, stop: &dyn Fn() -> bool) {
        for cpu in left.lists.iter() {
            if !stop() {
                let DrainSum { pages, held } = self.objects.pages.drain_cpu(&self.objects.platform, cpu);
                drained.pages += u64::from(pages);
                if held == 0 {
                    left.lists.remove(cpu);
                }
            }
        }
    }

    /// Tries once to drain each cache into the zone. After `stop` has returned true, drains only
    /// the page lists. Returns the number of pages that went from page lists to the zone.
    pub(crate) fn drain_everything(&self, inside: &Inside<'_>, fences: Fences, stop: &dyn Fn() -> bool) -> u64 {
        let Ok(mut left) = self.scope(&Scope::ALL) else { return 0 };
        self.leave_unused(&mut left);
        let mut drained = Drained::default();
        self.drain_once(inside, &mut left, &mut drained, fences, stop);
        // Slabs that became free went to the lists of any CPU that this thread was on.
        drained.pages + u64::from(self.objects.pages.drain_all(&self.objects.platform).pages)
    }
}

impl<P: Platform> Mm<P> {
    /// Runs `work`, which may take long, inside the gate. `work` must return soon after its second
    /// argument returns true, because a forking thread waits. In that case, `work` runs again after
    /// the fork.
    pub(crate) fn inside_to_the_end(&self, core: &Core<P>, mut work: impl FnMut(&Inside<'_>, &dyn Fn() -> bool)) {
        let is_stopped = || self.gate.is_closed_to_me();
        loop {
            let inside = self.gate.enter(core.objects.platform.cpu());
            work(&inside, &is_stopped);
            if !is_stopped() {
                break;
            }
        }
    }

    /// Moves the objects of some classes from stacks and barns to their slabs, with one try each.
    pub(crate) fn flush_classes(&self, _: &Inside<'_>, core: &Core<P>, wanted: impl Fn(Class) -> bool) {
        let closing = || self.gate.is_closed();
        for cpu in core.objects.cpu_caches.used().iter().take_while(|_| !closing()) {
            _ = core.objects.drain_cpu(cpu, &wanted);
        }
        Class::all()
            .filter(|&class| wanted(class))
            .for_each(|class| _ = core.objects.trim_barn(class, Effort::Full, &closing));
    }

    /// Drains the caches of CPUs into the zone, from any thread and for any CPU.
    ///
    /// Sends no signal, and waits for no other thread. Draining a CPU's stacks costs at most one
    /// fence, and none for an isolated CPU. Held lists and stacks are tried again for some
    /// milliseconds, with naps in between. Must not be called from a signal handler. Ticks, or
    /// [`Mm::release_all`], release the memory to the OS.
    ///
    /// # Errors
    /// [`NoSuch`] if `scope` names an object that does not exist. Nothing was drained then.
    pub fn drain(&self, scope: &Scope) -> Result<Drained, NoSuch> {
        self.drain_with(scope, RETRIES_MAX)
    }

    /// Drains `scope` with up to `retries` further tries, each after a nap.
    pub(crate) fn drain_with(&self, scope: &Scope, retries: u32) -> Result<Drained, NoSuch> {
        let mut drained = Drained::default();
        let Some(core) = self.core_if_open() else { return Ok(drained) };
        let (platform, pages) = (&core.objects.platform, &core.objects.pages);
        let mut left = core.scope(scope)?;
        drained.cpus = left.lists.count() as u32;
        core.leave_unused(&mut left);
        let free =
            || scope.node.map_or_else(|| pages.free_pages(), |node| pages.node(node as usize).free_pages().into());
        let enough = || scope.until.is_some_and(|wanted| free() >= wanted);
        for attempt in 0..=retries {
            if attempt > 0 {
                platform.sleep(POLL_SLEEP_NS);
                drained.retried += (left.lists.count() + left.stacks.count()) as u32;
            }
            let inside = self.gate.enter(platform.cpu());
            // Stops for a fork, which waits for threads inside.
            let stop = || self.gate.is_closed() || enough();
            core.drain_once(&inside, &mut left, &mut drained, Fences::All, &stop);
            drained.free = free();
            if left.is_nothing() || enough() {
                break;
            }
        }
        if !enough() {
            drained.skipped = (left.lists.count() + left.stacks.count() + left.barns.len()) as u32;
        }
        Ok(drained)
    }
}

#[cfg(test)]
mod tests {
    use crate::mm::{Hooks, Mm};
    use crate::options::Options;
    use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use neap_testing::virtual_platform::Virtual;
    use std::thread;
    use std::vec::Vec;

    /// 1. A thread drains all caches. 2. Another thread forks, and waits for it. 3. The first
    ///    leaves at once, and continues after the fork.
    #[test]
    fn fork_interrupts_drain_of_all_caches_which_then_resumes() {
        let mut mm = Mm::new(Hooks { open: |_| (), spawn: None, ticked: None });
        // SAFETY: the manager is not moved until it is closed.
        unsafe { mm.open(Virtual::new(4096, 1), &Options { stat: false, ..Options::DEFAULT }) }.unwrap();
        let blocks: Vec<_> = (0..30_000).map(|_| mm.allocate(64)).collect();
        // SAFETY: allocated above.
        blocks.into_iter().for_each(|block| unsafe { mm.free(block) });
        let cached = || mm.usage().cached_bytes;
        assert!(cached() > 1 << 20, "{}", cached());
        let (core, begun) = (mm.core_if_open().unwrap(), AtomicBool::new(false));
        let mut times = 0;
        thread::scope(|scope| {
            let fork = scope.spawn(|| {
                while !begun.load(Relaxed) {
                    thread::yield_now();
                }
                let is_empty = mm.gate.close(|| {
                    thread::yield_now();
                    true
                });
                let cached = cached();
                mm.gate.open();
                is_empty && cached > 1 << 20
            });
            mm.inside_to_the_end(core, |inside, stop| {
                times += 1;
                begun.store(true, Relaxed);
                while times == 1 && !stop() {
                    thread::yield_now();
                }
                core.drain_everything(inside, super::Fences::All, stop);
            });
            assert!(fork.join().unwrap(), "the fork found the caches empty");
        });
        assert_eq!((times, cached()), (2, 0));
        // A fork handler may drain while its own thread has the gate closed: it must neither wait
        // for itself nor loop.
        assert!(mm.gate.close(|| false));
        mm.release_all();
        mm.gate.open();
        // SAFETY: all blocks were freed, and this thread is the only user.
        unsafe { mm.close() };
    }
}
