//! Exchange of blocks between CPUs. A CPU can send or receive one block through a channel. It can
//! swap all blocks of one of its [hands](crate::program) for all blocks of a channel. It can also
//! store a block under a number. Any CPU can claim that block by the number.
//!
//! Events happen in the order of the clock. If a CPU waits for a block from a channel, the sender
//! wakes it, which takes as long as waking a thread.

use neap_pages::policy::Policy;

use super::parts::Pending;
use super::{Machine, zone};
use crate::cost;
use crate::program::Op;

impl<T: Policy> Machine<T> {
    /// Sends or receives. Returns whether the CPU goes on.
    pub(super) fn pass_on(&mut self, cpu: usize, op: Op) -> bool {
        let at = self.cpus[cpu].at;
        match op {
            Op::Send(hand, channel, work) => {
                if let Some(block) = self.cpus[cpu].hands[hand].pop_front() {
                    self.channels[channel].blocks.push_back(block);
                }
                self.cpus[cpu].view.waiting = self.channels[channel].blocks.len() as u32;
                self.work(cpu, work);
                if let Some(receiver) = self.channels[channel].receiver.take() {
                    self.wake(receiver, at);
                }
                true
            }
            Op::Receive(hand, channel, work) => match self.channels[channel].blocks.pop_front() {
                Some(block) => {
                    self.cpus[cpu].hands[hand].push_back(block);
                    self.cpus[cpu].view.waiting = self.channels[channel].blocks.len() as u32;
                    self.work(cpu, work);
                    true
                }
                None => {
                    self.channels[channel].receiver = Some(cpu);
                    self.cpus[cpu].pending = Pending::Channel(op);
                    self.cpus[cpu].parked = true;
                    false
                }
            },
            Op::Swap(hand, channel) => {
                core::mem::swap(&mut self.cpus[cpu].hands[hand], &mut self.channels[channel].blocks);
                true
            }
            Op::Name(hand, name) => {
                let block = self.cpus[cpu].hands[hand].pop_front();
                self.named.extend(block.map(|block| (name, block)));
                true
            }
            Op::Claim(hand, name) => match self.named.remove(&name) {
                Some(block) => {
                    self.cpus[cpu].hands[hand].push_back(block);
                    true
                }
                None => {
                    self.cpus[cpu].at += zone::RETRY;
                    self.cpus[cpu].pending = Pending::Channel(op);
                    self.enqueue(cpu);
                    false
                }
            },
            _ => true,
        }
    }

    pub(super) fn work(&mut self, cpu: usize, work: u32) {
        self.cpus[cpu].at += u64::from(work);
        self.costs.busy_time += u64::from(work);
    }

    pub(super) fn wake(&mut self, cpu: usize, now: u64) {
        let sleeper = &mut self.cpus[cpu];
        if core::mem::take(&mut sleeper.parked) {
            sleeper.at = sleeper.at.max(now + cost::WAKE);
            self.enqueue(cpu);
        }
    }
}
