//! Random histories of waiting in virtual time: one group against a model of the rule, and trees
//! against the rule's guarantees.

use crate::host::{Asked, Host, each_waiting};
use core::future::Future;
use core::ops::Range;
use core::pin::Pin;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use core::task::{Context, Poll, Waker};
use neap_base::Platform;
use neap_groups::{Bound, ChargeAsync, FOREVER, GroupId, Groups, Kind, OnLimit, Reason, Refusal, UNLIMITED, Waiting};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::random::{Random, number, seed};
use neap_testing::virtual_platform::Virtual;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Wake;

const CPUS: usize = 4;

/// A waker that records that it was called.
#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

type Future_<'g> = ChargeAsync<'g, Host<'g, Virtual>>;

/// A future that was polled and waits.
struct Task<'g> {
    future: Future_<'g>,
    flag: Arc<Flag>,
    group: GroupId,
    bytes: u64,
}

fn poll(future: &mut Future_, flag: &Arc<Flag>) -> Poll<Result<u64, Refusal>> {
    let waker = Waker::from(flag.clone());
    Pin::new(future).poll(&mut Context::from_waker(&waker))
}

/// Returns a size from 1 to a power of two with a random number of bits from `bits`.
fn size(random: &mut Random, bits: Range<usize>) -> u64 {
    let most = 1 << (bits.start + random.below(bits.len()));
    1 + random.below(most) as u64
}

/// Runs `test` with groups on a virtual machine.
fn with_groups(test: impl FnOnce(&Groups, Host<'_, Virtual>, &Virtual)) {
    let machine = Virtual::new(4096, CPUS);
    let shape = Shape { span: 16 << 20, ..Shape::usual(CPUS) };
    let data = PerCpuData::open(&machine, &shape, |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&machine, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    test(&groups, host, &machine);
    groups.verify(&host).unwrap_or_else(|finding| panic!("{finding:?}"));
    let left = groups.info(&host, GroupId::ROOT).unwrap();
    assert_eq!((left.charged, groups.used(&host, GroupId::ROOT)), (0, Ok(0)));
    each_waiting(&groups, &host, |waiting| panic!("{waiting:?}"));
}

/// The rule of admission, for one group.
#[derive(Default)]
struct Model {
    used: u64,
    max: u64,
    /// By age.
    queue: Vec<Waits>,
    /// Waits that are to be answered, and whether they were granted.
    ended: BTreeMap<u64, bool>,
    passes: u64,
    most_passed: u64,
}

struct Waits {
    name: u64,
    bytes: u64,
    deadline: u64,
    passed: u64,
}

impl Model {
    fn fits(&self, bytes: u64) -> bool {
        self.used + bytes <= self.max
    }

    fn let_in(&mut self, at: usize) {
        let waits = self.queue.remove(at);
        self.used += waits.bytes;
        self.ended.insert(waits.name, true);
    }

    fn may_pass(&self, bytes: u64) -> bool {
        bytes < self.queue[0].bytes / 8 && self.queue[0].passed < 8
    }

    fn count_pass(&mut self) {
        self.queue[0].passed += 1;
        self.passes += 1;
        self.most_passed = self.most_passed.max(self.queue[0].passed);
    }

    /// Admits waiters when room may have come.
    fn admit(&mut self) {
        while let Some(oldest) = self.queue.first() {
            if oldest.bytes > self.max {
                let refused = self.queue.remove(0);
                self.ended.insert(refused.name, false);
            } else if self.fits(oldest.bytes) {
                self.let_in(0);
            } else {
                break;
            }
        }
        let mut at = 1;
        while at < self.queue.len() {
            let bytes = self.queue[at].bytes;
            if self.may_pass(bytes) && self.fits(bytes) {
                self.let_in(at);
                self.count_pass();
            } else {
                at += 1;
            }
        }
    }

    /// Asks for room. Returns whether it is granted, if that is known at once.
    fn ask(&mut self, waits: Waits) -> Option<bool> {
        if waits.bytes > self.max {
            return Some(false);
        }
        if (self.queue.is_empty() || self.may_pass(waits.bytes)) && self.fits(waits.bytes) {
            self.used += waits.bytes;
            if !self.queue.is_empty() {
                self.count_pass();
            }
            return Some(true);
        }
        self.queue.push(waits);
        None
    }
}

#[test]
fn single_group_grants_match_the_admission_rule() {
    with_groups(|groups, host, machine| {
        let (mut random, steps) = (Random(seed()), number("NEAP_STEPS", 30_000));
        let id = groups.create(&host, GroupId::ROOT, "g").unwrap();
        let payer = id.payer(Kind::ByHand, 0);
        let mut model = Model { max: 1 << 20, ..Model::default() };
        groups.set_bound(&host, id, Bound::Max, model.max).unwrap();
        let mut tasks: BTreeMap<u64, Task> = BTreeMap::new();
        let mut held: Vec<u64> = Vec::new();
        let (mut granted, mut expired, mut cancelled, mut left) = (0, 0, 0, 0);
        // Bytes uncharged from a group above its limit, while no request waits, are stocked, and
        // may be used again.
        let is_stocked = |model: &Model, bytes: u64| {
            model.queue.is_empty() && model.used + bytes <= groups.info(&host, id).unwrap().charged
        };
        for step in 0..steps {
            Virtual::run_on(random.below(CPUS));
            let drained = step + 1000 > steps;
            match random.below(16) {
                0..5 if model.queue.len() < 40 && !drained => {
                    let bytes = size(&mut random, 0..21);
                    let wait = 1 + random.below(20) as u64 * 100_000_000;
                    let deadline = if random.below(3) == 0 { FOREVER } else { machine.now() + wait };
                    let mut task = Task {
                        future: groups.charge_async(host, payer, bytes, deadline),
                        flag: Arc::default(),
                        group: id,
                        bytes,
                    };
                    let is_stocked = is_stocked(&model, bytes);
                    let said = poll(&mut task.future, &task.flag);
                    if is_stocked && said == Poll::Ready(Ok(0)) {
                        model.used += bytes;
                        held.push(bytes);
                        continue;
                    }
                    match (model.ask(Waits { name: step, bytes, deadline, passed: 0 }), said) {
                        (None, Poll::Pending) => assert!(tasks.insert(step, task).is_none()),
                        (Some(true), Poll::Ready(Ok(0))) => held.push(bytes),
                        (Some(false), Poll::Ready(Err(Refusal::Limit(limit)))) => {
                            assert_eq!((limit.group, limit.need), (id, bytes));
                        }
                        (expected, said) => panic!("step {step}: {said:?}, not {expected:?}"),
                    }
                }
                5..7 if !drained => {
                    let bytes = size(&mut random, 0..18);
                    let (fits, is_stocked) = (model.fits(bytes), is_stocked(&model, bytes));
                    let granted = groups.charge(&host, payer, bytes, OnLimit::Refuse).is_ok();
                    assert!(granted == fits || granted && is_stocked, "step {step}");
                    if granted {
                        model.used += bytes;
                        held.push(bytes);
                    }
                }
                7..12 if !held.is_empty() => {
                    let bytes = held.swap_remove(random.below(held.len()));
                    groups.uncharge(&host, payer, bytes);
                    model.used -= bytes;
                    model.admit();
                }
                12 if !model.queue.is_empty() => {
                    let name = model.queue.remove(random.below(model.queue.len())).name;
                    drop(tasks.remove(&name));
                    cancelled += 1;
                    model.admit();
                }
                13 if random.below(8) == 0 || drained => {
                    model.max = if drained { 1 << 21 } else { size(&mut random, 17..22) };
                    groups.set_bound(&host, id, Bound::Max, model.max).unwrap();
                    model.admit();
                }
                14..16 => {
                    machine.advance(random.below(300_000_000) as u64);
                    let next = groups.tick(&host);
                    let now = machine.now();
                    for waits in model.queue.extract_if(.., |waits| waits.deadline <= now) {
                        model.ended.insert(waits.name, false);
                        expired += 1;
                    }
                    model.admit();
                    let deadline = model.queue.iter().map(|waits| waits.deadline - now).min();
                    if let Some(left) = deadline {
                        assert!(next.unwrap() <= left.min(250_000_000), "step {step}: comes too late");
                    }
                }
                _ => {}
            }
            // Waiters with an answer are woken, and no others; some do not take what they were
            // granted.
            loop {
                groups.deliver(&host);
                let woken: Vec<_> =
                    tasks.iter().filter(|(_, task)| task.flag.0.load(Relaxed)).map(|(n, _)| *n).collect();
                assert_eq!(woken, model.ended.keys().copied().collect::<Vec<_>>(), "step {step}");
                let Some((name, expected)) = model.ended.pop_first() else { break };
                let mut task = tasks.remove(&name).unwrap();
                if expected && random.below(8) == 0 {
                    model.used -= task.bytes;
                    drop(task);
                    model.admit();
                    left += 1;
                    continue;
                }
                match (poll(&mut task.future, &task.flag), expected) {
                    (Poll::Ready(Ok(0)), true) => {
                        granted += 1;
                        held.push(task.bytes);
                    }
                    (Poll::Ready(Err(Refusal::Limit(limit))), false) => {
                        assert_eq!((limit.group, limit.need), (id, task.bytes));
                    }
                    (said, expected) => panic!("step {step}: {said:?}, not {expected}"),
                }
                assert!(poll(&mut task.future, &task.flag).is_pending());
            }
            assert_eq!(groups.used(&host, id), Ok(model.used), "step {step}");
            groups.verify(&host).unwrap_or_else(|finding| panic!("step {step}: {finding:?}"));
        }
        let enough = [granted, expired, cancelled, left, model.passes].map(|count| count > steps / 2000);
        assert_eq!(enough, [true; 5], "{granted} {expired} {cancelled} {left} {}", model.passes);
        assert_eq!(model.most_passed, 8);
        drop(tasks);
        held.iter().for_each(|&bytes| groups.uncharge(&host, payer, bytes));
        groups.drain(&host, GroupId::ROOT);
    });
}

/// Returns all waiters, by age.
fn snapshot(groups: &Groups, host: &Host<Virtual>) -> BTreeMap<u64, Waiting> {
    let mut all = BTreeMap::new();
    each_waiting(groups, host, |waiting| assert!(all.insert(waiting.age, waiting).is_none()));
    all
}

#[test]
fn group_tree_waiters_overtake_only_by_the_admission_rule() {
    with_groups(|groups, host, machine| {
        let (mut random, steps) = (Random(seed()), number("NEAP_STEPS", 20_000));
        let mut parents = BTreeMap::from([(GroupId::ROOT, GroupId::ROOT)]);
        let mut tasks: Vec<Task> = Vec::new();
        let mut held: Vec<(GroupId, u64)> = Vec::new();
        let (mut made, mut granted, mut gone, mut past) = (0, 0, 0, 0);
        for step in 0..steps {
            Virtual::run_on(random.below(CPUS));
            let any = *parents.keys().nth(random.below(parents.len())).unwrap();
            let before = snapshot(groups, &host);
            match random.below(20) {
                0 | 1 if parents.len() < 12 => {
                    made += 1;
                    if let Ok(id) = groups.create(&host, any, &format!("g{made}")) {
                        parents.insert(id, any);
                        groups.set_bound(&host, id, Bound::Max, size(&mut random, 16..21)).unwrap();
                    }
                }
                2 => {
                    let leaves: Vec<_> =
                        parents.keys().filter(|id| !parents.values().any(|above| above == *id)).collect();
                    if let Some(&&id) = leaves.get(random.below(leaves.len().max(1))) {
                        groups.delete(&host, id).unwrap();
                        parents.remove(&id);
                    }
                }
                3..9 if tasks.len() < 60 => {
                    let bytes = size(&mut random, 8..18);
                    let deadline = machine.now() + 1 + random.below(3_000_000_000) as u64;
                    let future = groups.charge_async(host, any.payer(Kind::ByHand, 0), bytes, deadline);
                    let mut task = Task { future, flag: Arc::default(), group: any, bytes };
                    match poll(&mut task.future, &task.flag) {
                        Poll::Pending => tasks.push(task),
                        Poll::Ready(Ok(_)) => {
                            held.push((any, bytes));
                            // As if it had waited: it is younger than all waiters.
                            let (reason, age, passed) = (Reason::Room, u64::MAX, 0);
                            let waiting =
                                Waiting { group: any, at: any, reason, bytes, age, passed, since: 0, deadline };
                            past += overtaken(&before, &snapshot(groups, &host), &[waiting], &parents);
                        }
                        Poll::Ready(Err(_)) => {}
                    }
                }
                9..15 if !held.is_empty() => {
                    let (id, bytes) = held.swap_remove(random.below(held.len()));
                    groups.uncharge(&host, id.payer(Kind::ByHand, 0), bytes);
                }
                15 => {
                    let max = if random.below(4) == 0 { UNLIMITED } else { size(&mut random, 16..21) };
                    groups.set_bound(&host, any, Bound::Max, max).unwrap();
                }
                16 if !tasks.is_empty() => drop(tasks.swap_remove(random.below(tasks.len()))),
                17 => {
                    machine.advance(random.below(400_000_000) as u64);
                    groups.tick(&host);
                }
                _ => {}
            }
            while host.asked.come.swap(0, Relaxed) > 0 {
                groups.tick(&host);
            }
            groups.deliver(&host);
            let mut in_now = Vec::new();
            for index in (0..tasks.len()).rev() {
                if !tasks[index].flag.0.load(Relaxed) {
                    continue;
                }
                let mut task = tasks.swap_remove(index);
                match poll(&mut task.future, &task.flag) {
                    Poll::Pending => panic!("step {step}: woken for nothing"),
                    Poll::Ready(Ok(_)) => {
                        granted += 1;
                        held.push((task.group, task.bytes));
                        in_now.push((task.group, task.bytes));
                    }
                    Poll::Ready(Err(Refusal::Gone)) => {
                        gone += 1;
                        assert!(!parents.contains_key(&task.group), "step {step}");
                    }
                    Poll::Ready(Err(Refusal::Limit(limit))) => assert_eq!(limit.need, task.bytes),
                }
            }
            let after = snapshot(groups, &host);
            let let_in: Vec<Waiting> = before
                .values()
                .filter(|old| !after.contains_key(&old.age) && in_now.contains(&(old.group, old.bytes)))
                .copied()
                .collect();
            past += overtaken(&before, &after, &let_in, &parents);
            groups.verify(&host).unwrap_or_else(|finding| panic!("step {step}: {finding:?}"));
            let used: u64 = held.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(groups.used(&host, GroupId::ROOT), Ok(used), "step {step}");
        }
        let enough = [granted > steps / 200, past > steps / 200, gone > 0];
        assert_eq!(enough, [true; 3], "{granted} were let in, {gone} gone, {past} passed");
        drop(tasks);
        held.iter().for_each(|&(id, bytes)| groups.uncharge(&host, id.payer(Kind::ByHand, 0), bytes));
        groups.drain(&host, GroupId::ROOT);
    });
}

/// Checks admitted waiters against older ones that were the oldest of a queue on their path before
/// and after. Returns how many were overtaken.
fn overtaken(
    before: &BTreeMap<u64, Waiting>,
    after: &BTreeMap<u64, Waiting>,
    let_in: &[Waiting],
    parents: &BTreeMap<GroupId, GroupId>,
) -> u64 {
    let mut count = 0;
    let oldest = |all: &BTreeMap<u64, Waiting>, at: GroupId| all.values().find(|waits| waits.at == at).copied();
    for young in let_in {
        let mut at = young.group;
        while let Some(&above) = parents.get(&at) {
            if let (Some(old), Some(still)) = (oldest(before, at), oldest(after, at))
                && old.age == still.age
                && old.age < young.age
            {
                count += 1;
                assert!(still.passed <= 8, "{still:?}");
                // A still older and larger waiter may have been the oldest here for a moment, on
                // its way between groups without room.
                if !before.values().any(|head| head.age < old.age && young.bytes < head.bytes / 8) {
                    assert!(young.bytes < old.bytes / 8, "{young:?} was let in past {old:?}");
                    assert!(still.passed > old.passed, "{young:?}, {still:?}");
                }
            }
            if above == at {
                break;
            }
            at = above;
        }
    }
    count
}
