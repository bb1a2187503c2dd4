//! Room for an allocation that has found no memory. This module defines the order in which a
//! manager gives up its caches.
//!
//! # Locking
//! This module has no lock. The thread is outside the gate while reclaim calls shrinkers.

use crate::mm::{Core, Mm};
use crate::returning::drain::{Fences, POLL_SLEEP_NS};
use neap_base::Platform;
use neap_os::stack;
use neap_pages::Effort;

/// Most looks at the container for one allocation. Another thread may use the room that a look has
/// found.
const CONTAINER_LOOKS_MAX: u32 = 4;
/// Most requests to shrinkers for one allocation.
const RECLAIM_REQUESTS_MAX: u32 = 4;

/// Nanoseconds that a failing allocation waits for neap's thread to empty the stacks of all CPUs.
const HELPER_WAIT_NS: u64 = 100_000_000;

/// Most rounds of draining for such an allocation. From the second round on, another one follows
/// only if other threads were inside the gate.
const DRAIN_ROUNDS_MAX: u32 = 4;
/// Most looks for threads inside the gate in each round. A short pause follows each of the first
/// looks, and a nap follows each look from number `POLL_YIELDS_MAX` on. The naps last for many time
/// slices of the scheduler.
const POLLS_MAX: u32 = 64;
const POLL_YIELDS_MAX: u32 = 16;

/// Tries an allocation again.
type Attempt<'a, T> = &'a dyn Fn() -> Option<T>;

impl<P: Platform> Core<P> {
    /// Makes room for an allocation that has found no memory, and tries it again. Returns `None` if
    /// it finds none in the end. The steps are:
    ///
    /// 1. If the limit follows the container, neap looks at the container and may raise the limit.
    /// 2. Reclaim asks shrinkers for memory, outside the gate, while they free something. neap
    ///    tries the allocation after each request, since another thread may have freed memory
    ///    meanwhile.
    /// 3. neap drains every cache into the zones. It does so again after threads that were inside
    ///    the gate have left it.
    /// 4. Under a limit, neap releases the memory of slab pages without objects.
    /// 5. neap releases lazily free pages.
    /// 6. neap raises a limit that follows the container beyond the room in the container.
    /// 7. neap writes a heap profile, if the option `profile_at_limit` is set.
    #[cold]
    pub(crate) fn reclaim_for_allocation<T>(&self, mm: &Mm<P>, bytes: usize, attempt: Attempt<'_, T>) -> Option<T> {
        // This is rare and needs a deep stack, so it runs on a separate stack.
        let apart = stack::apart(|| self.reclaim_on_this_stack(mm, bytes, attempt));
        // If no separate stack can be mapped, it runs on the thread's own.
        apart.unwrap_or_else(|| self.reclaim_on_this_stack(mm, bytes, attempt))
    }

    #[cold]
    #[inline(never)]
    fn reclaim_on_this_stack<T>(&self, mm: &Mm<P>, bytes: usize, attempt: Attempt<'_, T>) -> Option<T> {
        let look = |_| if self.look_for_room(mm, bytes as u64) { Some(attempt()) } else { None };
        let found = (0..CONTAINER_LOOKS_MAX).map_while(look).find_map(|found| found);
        let found = found.or_else(|| self.give_up_caches_for(mm, bytes, attempt));
        let found = found.or_else(|| self.pass_limit(mm, bytes as u64, attempt));
        if found.is_none() && bytes as u64 <= self.largest() {
            self.profile_before_refusal(mm);
        }
        found
    }

    /// Returns the bytes of the limit or, without a limit, of the arena so far. Caches cannot make
    /// room for a larger request.
    fn largest(&self) -> u64 {
        match self.settings.limit() {
            0 => self.objects.pages.limit() as u64,
            limit => limit,
        }
    }

    /// Does steps 2 to 5 of [`Core::reclaim_for_allocation`].
    fn give_up_caches_for<T>(&self, mm: &Mm<P>, bytes: usize, attempt: Attempt<'_, T>) -> Option<T> {
        // Even empty caches would not make room for it.
        if bytes as u64 > self.largest() {
            return None;
        }
        for _ in 0..RECLAIM_REQUESTS_MAX {
            let Some(gave) = self.reclaim_for_budget(mm, bytes as u64) else { break };
            let memory = attempt();
            if memory.is_some() {
                return memory;
            }
            if !gave {
                break;
            }
        }
        self.drain_all_and_retry(mm, attempt).or_else(|| {
            let mut made_room = false;
            if self.settings.limit() > 0 {
                mm.inside_to_the_end(self, |_, stop| made_room |= self.objects.punch(Effort::Full, stop).released > 0);
            }
            if self.objects.pages.lazily_free() > 0 {
                mm.inside_to_the_end(self, |inside, stop| made_room |= self.release_lazily_free(inside, stop) > 0);
            }
            if made_room { attempt() } else { None }
        })
    }

    /// Empties every cache for an allocation that has found no memory, and tries it again (step 3).
    fn drain_all_and_retry<T>(&self, mm: &Mm<P>, attempt: Attempt<'_, T>) -> Option<T> {
        let (mut memory, mut pages) = (None, 0);
        for round in 0..DRAIN_ROUNDS_MAX {
            if !self.objects.platform.may_fence() {
                self.objects.helper.ask(HELPER_WAIT_NS);
            }
            mm.inside_to_the_end(self, |inside, stop| pages += self.drain_everything(inside, Fences::OfCall, stop));
            memory = attempt();
            if memory.is_some() {
                break;
            }
            // A thread inside the gate may hold pages and objects that it puts into lists and
            // stacks before it leaves:
            //
            // | thread A, inside | thread B, here |
            // |---|---|
            // | 1. takes a batch, and is preempted | |
            // | | 2. drains all caches, finds nothing |
            // | 3. puts all but one away, leaves | |
            //
            // A may leave before `outwait` first looks, so there are at least two rounds.
            let mut looks = 0;
            let was_inside = mm.gate.outwait(POLLS_MAX, || {
                looks += 1;
                let platform = &self.objects.platform;
                if looks < POLL_YIELDS_MAX { platform.pause() } else { platform.sleep(POLL_SLEEP_NS) }
            });
            if round > 0 && !was_inside {
                break;
            }
        }
        self.objects.pages.count_need(pages);
        memory
    }
}
