//! Four thousand groups at their limits, under a storm of charges. Charged bytes never exceed a
//! limit, and exceed used bytes by no more than stated.
//!
//! Method: threads charge and uncharge at random, below parents with limits of their own, while
//! limits are moved. Counters of the test are raised after a charge was granted and lowered before
//! it is uncharged, so they never exceed the charged bytes. At intervals all threads stop, and each
//! group is compared with its counter to the byte.

use crate::host::{Asked, Host};
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use neap_base::{Linux, Platform};
use neap_groups::{Bound, CAP, Event, GroupId, Groups, Kind, OnLimit, Payer, Refusal, UNLIMITED};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::random::{Random, number, seed};
use std::sync::Barrier;

const PARENTS: usize = 40;
const CHILDREN: usize = 100;
const THREADS: usize = 4;
const ROUNDS: usize = 6;
/// Maximum number of charges that a thread has.
const HELD: usize = 4000;

/// A group, and the test's data of it.
struct Watched {
    id: GroupId,
    /// The largest limit that it ever has.
    most: u64,
    held: AtomicU64,
}

impl Watched {
    fn take(&self, bytes: u64) {
        let held = self.held.fetch_add(bytes, SeqCst) + bytes;
        assert!(held <= self.most, "{held} bytes of {} are charged to {:?}", self.most, self.id);
    }

    fn give(&self, bytes: u64) {
        self.held.fetch_sub(bytes, SeqCst);
    }
}

struct Tree {
    parents: Vec<Watched>,
    children: Vec<Watched>,
}

impl Tree {
    fn open(groups: &Groups, host: &Host<'_, Linux>, random: &mut Random) -> Tree {
        let make = |above: GroupId, name: usize, most: u64| {
            let id = groups.create(host, above, &name.to_string()).unwrap();
            groups.set_bound(host, id, Bound::Max, most).unwrap();
            Watched { id, most, held: AtomicU64::new(0) }
        };
        let parents: Vec<Watched> = (0..PARENTS)
            .map(|name| {
                // The last one is for charges that must not fail.
                let most = if name == PARENTS - 1 { UNLIMITED } else { (1 + random.below(8) as u64) << 20 };
                make(GroupId::ROOT, name, most)
            })
            .collect();
        let children = (0..PARENTS * CHILDREN)
            .map(|child| {
                let above = &parents[child / CHILDREN];
                let most = 4096 + random.below(400_000) as u64;
                let mut child = make(above.id, child % CHILDREN, most);
                child.most = if above.most == UNLIMITED { UNLIMITED } else { most };
                child
            })
            .collect();
        Tree { parents, children }
    }

    /// Runs one thread's part of a round.
    fn storm(
        &self,
        groups: &Groups,
        host: &Host<'_, Linux>,
        random: &mut Random,
        held: &mut Vec<(usize, Payer, u64)>,
        steps: usize,
    ) -> usize {
        let mut refused = 0;
        for step in 0..steps {
            // All threads use some groups; most groups are used by one at a time.
            let at = if step % 4 == 0 { random.below(3) * CHILDREN } else { random.below(self.children.len()) };
            let (child, above) = (&self.children[at], &self.parents[at / CHILDREN]);
            match random.below(if held.len() < HELD { 10 } else { 5 }) {
                0..4 if !held.is_empty() => {
                    let (at, payer, bytes) = held.swap_remove(random.below(held.len()));
                    self.children[at].give(bytes);
                    self.parents[at / CHILDREN].give(bytes);
                    groups.uncharge(host, payer, bytes);
                }
                4 if at.is_multiple_of(7) && child.most != UNLIMITED => {
                    let max = 1 + random.below(child.most as usize) as u64;
                    groups.set_bound(host, child.id, Bound::Max, max).unwrap();
                }
                _ => {
                    let most = 1 << random.below(17);
                    let bytes = 1 + random.below(most) as u64;
                    let payer = child.id.payer(Kind::ByHand, 0);
                    let how = if above.most == UNLIMITED { OnLimit::Overcharge } else { OnLimit::Refuse };
                    match groups.charge(host, payer, bytes, how) {
                        Ok(_) => {
                            child.take(bytes);
                            above.take(bytes);
                            held.push((at, payer, bytes));
                        }
                        Err(Refusal::Limit(limit)) => {
                            refused += 1;
                            assert!([child.id, above.id].contains(&limit.group), "{limit:?} of {:?}", child.id);
                            let holders: Vec<u64> = limit.holders.iter().flatten().map(|(_, bytes)| *bytes).collect();
                            assert!(limit.need == bytes && holders.is_sorted_by(|one, next| one >= next), "{limit:?}");
                        }
                        Err(Refusal::Gone) => panic!("no thread deletes groups"),
                    }
                }
            }
        }
        refused
    }

    /// Compares to the byte, while no thread charges.
    fn check(&self, groups: &Groups, host: &Host<'_, Linux>) {
        let slack = CAP * host.alone.platform.cpus() as u64;
        for (child, watched) in
            self.children.iter().map(|each| (true, each)).chain(self.parents.iter().map(|each| (false, each)))
        {
            let (info, used) = (groups.info(host, watched.id).unwrap(), groups.used(host, watched.id).unwrap());
            assert_eq!(used, watched.held.load(SeqCst), "{:?}", watched.id);
            assert!(info.charged <= watched.most && info.peak <= watched.most, "{info:?}");
            // A child has one payer. A parent has those of its children, as many as fit onto the
            // CPUs.
            let most = if child { slack } else { 8 * slack };
            assert!(info.charged - used <= most, "{} of {used} bytes are stocked for {:?}", info.charged, watched.id);
            let over = info.events[Event::Overcharged as usize];
            assert!(over == 0 || watched.most == UNLIMITED, "{over} charges went beyond {:?}", watched.id);
        }
    }
}

#[test]
fn four_thousand_groups_never_have_more_than_their_limits() {
    let machine = Linux::probe();
    let data = PerCpuData::open(&machine, &Shape::usual(machine.cpus()), |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&machine, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    let (seed, steps) = (seed(), number("NEAP_STEPS", 40_000) as usize);
    let tree = Tree::open(&groups, &host, &mut Random(seed));
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (tree, groups, barrier) = (&tree, &groups, &barrier);
            scope.spawn(move || {
                let (mut random, mut held) = (Random(seed + 1 + thread as u64), Vec::new());
                let mut refused = 0;
                for _ in 0..ROUNDS {
                    refused += tree.storm(groups, &host, &mut random, &mut held, steps);
                    if barrier.wait().is_leader() {
                        tree.check(groups, &host);
                        groups.tick(&host);
                    }
                    barrier.wait();
                }
                assert!(refused > steps / 100, "only {refused} charges were refused");
                held.into_iter().for_each(|(at, payer, bytes)| {
                    tree.children[at].give(bytes);
                    tree.parents[at / CHILDREN].give(bytes);
                    groups.uncharge(&host, payer, bytes);
                });
            });
        }
    });
    tree.check(&groups, &host);
    let over = |each: &Watched| groups.info(&host, each.id).unwrap().events[Event::Overcharged as usize];
    assert!(over(&tree.parents[PARENTS - 1]) > 0, "no charge went beyond a limit");
    assert_eq!(groups.drain(&host, GroupId::ROOT), 0);
    let all = tree.children.iter().chain(&tree.parents);
    all.for_each(|each| assert_eq!(groups.info(&host, each.id).unwrap().charged, 0));
    groups.verify(&host).unwrap_or_else(|finding| panic!("{finding:?}"));
    // SAFETY: no thread uses them any more.
    unsafe {
        groups.close(&host);
        data.close(&machine);
    }
}
