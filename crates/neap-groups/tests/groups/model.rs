//! Random histories against a sequential model: the charges of every group, at any moment, to the
//! byte.

use crate::host::{Asked, Host};
use neap_groups::{Bound, CAP, GroupError, GroupId, Groups, Kind, OnLimit, Payer, Refusal, UNLIMITED};
use neap_percpu::{PerCpuData, Shape};
use neap_testing::random::{Random, number, seed};
use neap_testing::virtual_platform::Virtual;
use std::collections::BTreeMap;

struct Node {
    parent: Option<GroupId>,
    max: u64,
    children: u32,
}

struct Held {
    payer: Payer,
    /// The group that pays for it now.
    group: GroupId,
    bytes: u64,
}

struct Model {
    nodes: BTreeMap<GroupId, Node>,
    held: Vec<Held>,
}

impl Model {
    fn path(&self, id: GroupId) -> impl Iterator<Item = GroupId> {
        core::iter::successors(Some(id), |id| self.nodes[id].parent)
    }

    fn used(&self, top: GroupId) -> u64 {
        let below = |held: &&Held| self.path(held.group).any(|id| id == top);
        self.held.iter().filter(below).map(|held| held.bytes).sum()
    }

    fn any(&self, random: &mut Random) -> GroupId {
        *self.nodes.keys().nth(random.below(self.nodes.len())).unwrap()
    }
}

const CPUS: usize = 4;

fn check(groups: &Groups, host: &Host<'_, Virtual>, model: &Model) {
    groups.verify(host).unwrap_or_else(|finding| panic!("{finding:?}"));
    for (&id, node) in &model.nodes {
        let (info, used) = (groups.info(host, id).unwrap(), groups.used(host, id).unwrap());
        assert_eq!((used, info.parent, info.children), (model.used(id), node.parent, node.children), "group {id:?}");
        assert!(info.charged <= used + 8 * CAP * CPUS as u64 && info.peak >= info.charged);
    }
}

#[test]
fn random_charges_match_model() {
    let machine = Virtual::new(4096, CPUS);
    let shape = Shape { span: 16 << 20, ..Shape::usual(CPUS) };
    let data = PerCpuData::open(&machine, &shape, |_| 0, ()).unwrap();
    let asked = Asked::default();
    let host = Host::new(&machine, &data, &asked);
    let groups = Groups::open(&host).unwrap();
    let (mut random, steps) = (Random(seed()), number("NEAP_STEPS", 20_000));
    let root = Node { parent: None, max: UNLIMITED, children: 0 };
    let mut model = Model { nodes: BTreeMap::from([(GroupId::ROOT, root)]), held: Vec::new() };
    let (mut made, mut refused, mut granted) = (0, 0, 0);
    for step in 0..steps {
        Virtual::run_on(random.below(CPUS));
        match random.below(20) {
            0 if model.nodes.len() < 40 => {
                let parent = model.any(&mut random);
                made += 1;
                let id = groups.create(&host, parent, &format!("g{made}")).unwrap();
                assert!(model.nodes.insert(id, Node { parent: Some(parent), max: UNLIMITED, children: 0 }).is_none());
                model.nodes.get_mut(&parent).unwrap().children += 1;
            }
            1 => {
                let id = model.any(&mut random);
                let (children, parent) = (model.nodes[&id].children, model.nodes[&id].parent);
                match parent {
                    None => assert_eq!(groups.delete(&host, id), Err(GroupError::Root)),
                    Some(_) if children > 0 => assert_eq!(groups.delete(&host, id), Err(GroupError::HasChildren)),
                    Some(parent) => {
                        groups.delete(&host, id).unwrap();
                        model.nodes.remove(&id);
                        model.nodes.get_mut(&parent).unwrap().children -= 1;
                        model.held.iter_mut().filter(|held| held.group == id).for_each(|held| held.group = parent);
                        assert_eq!(groups.info(&host, id).err(), Some(GroupError::NoSuchGroup));
                    }
                }
            }
            2..9 => {
                let (group, kind) = (model.any(&mut random), Kind::ALL[random.below(4)]);
                let most = 1 << random.below(20);
                let bytes = 1 + random.below(most) as u64;
                let payer = group.payer(kind, 0);
                let how = if random.below(10) == 0 { OnLimit::Overcharge } else { OnLimit::Refuse };
                let fits = |id: GroupId| model.used(id) + bytes <= model.nodes[&id].max;
                // Bytes that were stocked before the group reached its limit, or exceeded it, can
                // be used.
                let stocked = |id: GroupId| model.used(id) + bytes <= groups.info(&host, id).unwrap().charged;
                let may: Vec<_> = model.path(group).map(|id| fits(id) || stocked(id)).collect();
                match groups.charge(&host, payer, bytes, how) {
                    Ok(_) => {
                        granted += 1;
                        assert!(how == OnLimit::Overcharge || !may.contains(&false), "step {step}: beyond a limit");
                        model.held.push(Held { payer, group, bytes });
                    }
                    Err(Refusal::Limit(limit)) => {
                        refused += 1;
                        assert!(how == OnLimit::Refuse && !fits(limit.group), "step {step}: {limit:?}");
                        assert_eq!(limit.charged, model.used(limit.group), "stocks were not emptied");
                        let holders: Vec<_> = limit.holders.iter().flatten().collect();
                        assert!(holders.is_sorted_by(|one, other| one.1 >= other.1));
                    }
                    Err(Refusal::Gone) => panic!("the group is there"),
                }
            }
            9..16 if !model.held.is_empty() => {
                let held = model.held.swap_remove(random.below(model.held.len()));
                groups.uncharge(&host, held.payer, held.bytes);
            }
            16 => {
                let id = model.any(&mut random);
                let max = if random.below(3) == 0 { UNLIMITED } else { random.below(4 << 20) as u64 };
                let before = groups.set_bound(&host, id, Bound::Max, max).unwrap();
                assert_eq!(before, core::mem::replace(&mut model.nodes.get_mut(&id).unwrap().max, max));
            }
            17 => assert_eq!(groups.drain(&host, model.any(&mut random)), 0),
            18 => _ = groups.tick(&host),
            _ => {}
        }
        if step % 16 == 0 {
            check(&groups, &host, &model);
        }
    }
    assert!(granted > steps / 8 && refused > steps / 500, "{granted} charges, {refused} refused");
    while let Some(held) = model.held.pop() {
        Virtual::run_on(random.below(CPUS));
        groups.uncharge(&host, held.payer, held.bytes);
    }
    assert_eq!(groups.drain(&host, GroupId::ROOT), 0);
    check(&groups, &host, &model);
    while groups.tick(&host).is_some() {}
    let count = groups.count(&host);
    assert_eq!((count.dying, count.ids as usize, count.live as usize), (0, model.nodes.len(), model.nodes.len()));
    for &id in model.nodes.keys() {
        let info = groups.info(&host, id).unwrap();
        assert_eq!((info.charged, info.kinds), (0, [0; 4]), "group {id:?}");
    }
    check(&groups, &host, &model);
}
