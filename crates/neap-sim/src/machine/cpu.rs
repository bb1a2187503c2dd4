//! A virtual CPU: it runs its program on its own page list, ahead of the clock.
//!
//! A CPU runs up to the horizon that the machine sets, and stops where it needs a zone or a
//! channel. It also waits for its list if a drainer holds the list's spin lock.

use neap_base::Order;
use neap_pages::policy::Policy;

use super::parts::{Cpu, HeldBlock, Operation, Pending};
use super::{ListLock, Machine};
use crate::program::Op;

impl<T: Policy> Machine<T> {
    /// Runs a CPU's program up to `horizon`.
    pub(super) fn go(&mut self, cpu: usize, horizon: u64) {
        let (home, list_cost) = (self.node(cpu), self.list_cost);
        let Cpu { program: Some(program), hands, view, at, pending, list_held_until, freed, parked, ended } =
            &mut self.cpus[cpu]
        else {
            return;
        };
        let costs = &mut self.costs;
        while *at < horizon {
            view.now = *at;
            view.reclaiming = self.zones[home].reclaiming;
            for (held, hand) in view.held.iter_mut().zip(&*hands) {
                *held = hand.len() as u32;
            }
            let op = program(view);
            let (mut bypass, since) = (false, *at);
            if *list_held_until > *at && matches!(op, Op::Take(..) | Op::Give(..)) {
                bypass = self.list_lock == ListLock::Try;
                costs.counts.list_busy += 1;
                if self.list_lock == ListLock::Blocking {
                    costs.busy_time += *list_held_until - *at;
                    *at = *list_held_until;
                }
            }
            let (visit, operation) = match op {
                Op::Take(order, hand, work) => {
                    let operation = Operation { node: home, order: Order(order), into: Some(hand), work, since };
                    costs.taken += u64::from(operation.order.pages());
                    if let Some(freed) = freed {
                        costs.gaps.take(freed, operation.order.pages(), since);
                    }
                    match self.zones[home].lab.begin_allocate(operation.order, bypass) {
                        Ok(block) => {
                            view.refused = false;
                            hands[hand].push_back(HeldBlock { node: home, order: operation.order, pfn: block.pfn });
                            (None, operation)
                        }
                        Err(visit) => (Some(visit), operation),
                    }
                }
                Op::Give(hand, work) => {
                    let Some(HeldBlock { node, order, pfn }) = hands[hand].pop_front() else { continue };
                    costs.given += u64::from(order.pages());
                    if let Some(freed) = freed {
                        freed.extend((0..order.pages()).map(|_| since));
                    }
                    let visit = self.zones[node].lab.begin_free(pfn, order, bypass);
                    (visit, Operation { node, order, into: None, work, since })
                }
                Op::Send(..) | Op::Receive(..) | Op::Swap(..) | Op::Name(..) | Op::Claim(..) => {
                    *pending = Pending::Channel(op);
                    break;
                }
                Op::Work(time) => {
                    costs.busy_time += time;
                    *at += time;
                    continue;
                }
                Op::Rest(time) => {
                    *at += time;
                    continue;
                }
                Op::Sleep if view.reclaiming => continue,
                Op::Sleep => {
                    *parked = true;
                    return;
                }
                Op::End => {
                    costs.counts.ended = costs.counts.ended.max(*at);
                    (*parked, *ended) = (true, true);
                    return;
                }
            };
            *at += list_cost;
            costs.busy_time += list_cost;
            if let Some(visit) = visit {
                self.zones[operation.node].visiting += 1;
                *pending = Pending::Visit { visit, operation, attempts: 0 };
                break;
            }
            costs.done(&operation, *at);
            *at += u64::from(operation.work);
            costs.busy_time += u64::from(operation.work);
        }
        self.enqueue(cpu);
    }
}
