//! Recorded page events, and the programs that replay them.
//!
//! The format is described in `crates/neap/src/trace.rs`. The replay covers only events of lists
//! and zone: when, and on which CPU, a block of an order was allocated or freed. Runs, and blocks
//! that are too large for lists, are replayed as the smallest block that is too large. In the
//! library such a block takes the zone's lock once and moves as one, whatever its length. The
//! simulator would charge each page. The replay leaves out the free of a block that was allocated
//! before the recording.

use std::collections::BTreeMap;

use neap_base::Order;

use crate::machine::{SECOND, Setup};
use crate::program::{Op, Program};

const MAGIC: &[u8; 8] = b"neaptrc2";
const HEADER: usize = 64;
const PLACE: usize = 16;
/// Most CPUs that a trace may name.
const MOST_CPUS: u16 = 1024;
/// The smallest order that bypasses the lists.
const PAST_LISTS: u8 = 4;

/// An allocation or a free of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds since the first event.
    pub at: u64,
    /// The CPU.
    pub cpu: u16,
    /// Whether the event is a free, not an allocation.
    pub free: bool,
    /// Pages of the block or run.
    pub pages: u32,
    /// The block's first page.
    pub page: u32,
}

/// A whole recording. The times of its events are below 2^48 - 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// CPUs of the recorded machine.
    pub cpus: u16,
    /// The page size as a power of two.
    pub page_shift: u8,
    /// Whether the file was full before the program ended.
    pub cut_off: bool,
    /// The events, ordered by time.
    pub events: Vec<Event>,
}

/// The `N` bytes at `at`.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    core::array::from_fn(|index| bytes[at + index])
}

impl Event {
    /// The event of a place, if it was written.
    fn read(place: &[u8]) -> Option<Event> {
        let (when, what) = (u64::from_le_bytes(field(place, 0)), u32::from_le_bytes(field(place, 12)));
        let (at, page) = ((when >> 16).checked_sub(1)?, u32::from_le_bytes(field(place, 8)));
        Some(Event { at, cpu: when as u16, free: what >> 31 == 1, pages: what & !(1 << 31), page })
    }

    /// The order of the block that is replayed.
    fn order(&self) -> u8 {
        Order::holding(self.pages).0.min(PAST_LISTS)
    }
}

impl Trace {
    /// Reads a file's bytes.
    ///
    /// Returns an error with a text that describes the damage of the file.
    pub fn read(bytes: &[u8]) -> Result<Trace, String> {
        if !bytes.starts_with(MAGIC) {
            return Err("it does not begin like a trace of neap's".into());
        }
        let Some((header, rest)) = bytes.split_at_checked(HEADER) else {
            return Err("incomplete header: the program has not recorded anything, or the file was cut short".into());
        };
        let word = |at| u32::from_le_bytes(field(header, at));
        let (places, claimed, full) = (word(12), word(16), word(20));
        let (cpus, page_shift) = (u16::from_le_bytes(field(header, 24)), header[26]);
        if cpus == 0 || cpus > MOST_CPUS {
            return Err(format!("it names {cpus} CPUs; a trace may have 1 to {MOST_CPUS}"));
        }
        if !(12..=16).contains(&page_shift) {
            return Err(format!("its page size is 2^{page_shift} bytes; it may be 2^12 to 2^16 bytes"));
        }
        if rest.len() as u64 != u64::from(places) * PLACE as u64 {
            let length = bytes.len();
            return Err(format!(
                "it is {length} bytes long, and should have {places} places of {PLACE} behind {HEADER}"
            ));
        }
        let written = rest.chunks_exact(PLACE).take(claimed as usize);
        let mut events: Vec<Event> = written.filter_map(Event::read).collect();
        // Places were claimed in nearly the order of their times.
        events.sort_by_key(|event| event.at);
        if let Some(event) = events.iter().find(|event| event.cpu >= cpus || event.pages == 0) {
            return Err(format!("it has an event of {} pages on CPU {} of {cpus}", event.pages, event.cpu));
        }
        Ok(Trace { cpus, page_shift, cut_off: full != 0, events })
    }

    /// Pages of all blocks that a replay allocates.
    pub fn taken(&self) -> u64 {
        self.events.iter().filter(|event| !event.free).map(|event| 1 << event.order()).sum()
    }

    /// Makes a machine whose CPUs repeat the recorded events, at their recorded times or as soon as
    /// possible afterwards.
    ///
    /// # Errors
    /// Returns an error if an event allocates a page that is already allocated, or if the events
    /// need too many pages. The text describes it.
    pub fn setup(&self) -> Result<Setup, String> {
        // The steps of each CPU: time, order (`None` for a free), and a number that names the
        // block. Each allocation gets a new number.
        let mut steps: Vec<Vec<(u64, Option<u8>, u32)>> = vec![Vec::new(); self.cpus.into()];
        let (mut out, mut used, mut most) = (BTreeMap::new(), 0_u64, 0);
        for (name, event) in (0..).zip(&self.events) {
            let steps = &mut steps[usize::from(event.cpu)];
            if !event.free {
                let order = event.order();
                if out.insert(event.page, (name, event.pages)).is_some() {
                    return Err(format!("event {name} allocates page {}, which is allocated", event.page));
                }
                steps.push((event.at, Some(order), name));
                used += u64::from(event.pages);
                most = most.max(used);
            } else if let Some((name, pages)) = out.remove(&event.page) {
                steps.push((event.at, None, name));
                used -= u64::from(pages);
            }
        }
        let programs: Vec<Program> = steps.into_iter().map(program).collect();
        let setup = Setup::new(programs);
        let managed = setup.managed.max(u32::try_from(most * 2).map_err(|_| format!("{most} pages are too many"))?);
        let time = self.events.last().map_or(0, |event| event.at) + SECOND;
        Ok(Setup { managed, warm: 0, time, ..setup })
    }
}

fn program(steps: Vec<(u64, Option<u8>, u32)>) -> Program {
    let (mut next, mut begun) = (0, false);
    Box::new(move |view| {
        let Some(&(at, order, name)) = steps.get(next) else { return Op::End };
        if !begun {
            if view.now < at {
                return Op::Rest(at - view.now);
            }
            begun = true;
            return order.map_or(Op::Claim(1, name), |order| Op::Take(order, 0, 0));
        }
        (begun, next) = (false, next + 1);
        match order {
            Some(_) if view.refused => Op::Work(0),
            Some(_) => Op::Name(0, name),
            None => Op::Give(1, 0),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::{self, Name};
    use crate::random::Random;

    /// A file's bytes, with exactly as many places as events.
    fn bytes(trace: &Trace) -> Vec<u8> {
        let count = trace.events.len() as u32;
        let mut bytes = MAGIC.to_vec();
        [7, count, count, trace.cut_off.into()].iter().for_each(|word: &u32| bytes.extend(word.to_le_bytes()));
        bytes.extend(trace.cpus.to_le_bytes());
        bytes.push(trace.page_shift);
        bytes.resize(HEADER, 0);
        for event in &trace.events {
            bytes.extend(((event.at + 1) << 16 | u64::from(event.cpu)).to_le_bytes());
            bytes.extend(event.page.to_le_bytes());
            bytes.extend((event.pages | u32::from(event.free) << 31).to_le_bytes());
        }
        bytes
    }

    /// Four CPUs that allocate, and free blocks of any of them.
    fn recorded() -> Trace {
        let (mut random, mut out, mut events) = (Random::new(1, 1), Vec::new(), Vec::new());
        for step in 0..20_000_u32 {
            let (at, cpu) = (u64::from(step) * 1000, random.below(4) as u16);
            let free = !out.is_empty() && random.below(1000) < out.len() as u32;
            let (page, order) = if free {
                out.swap_remove(random.below(out.len() as u32) as usize)
            } else {
                (step * 16, random.below(4) as u8)
            };
            if !free {
                out.push((page, order));
            }
            events.push(Event { at, cpu, free, pages: 1 << order, page });
        }
        Trace { cpus: 4, page_shift: 12, cut_off: true, events }
    }

    #[test]
    fn trace_reads_what_was_written_and_skips_unwritten_places() {
        let mut trace = recorded();
        let mut file = bytes(&trace);
        assert_eq!(Trace::read(&file), Ok(trace.clone()));
        // Places that no thread claimed, and one of a thread that was killed before it wrote.
        file.extend([0; 3 * PLACE]);
        file[12..16].copy_from_slice(&20_003_u32.to_le_bytes());
        file[HEADER + 19_999 * PLACE..][..8].fill(0);
        file[20] = 0;
        trace.events.pop();
        trace.cut_off = false;
        assert_eq!(Trace::read(&file), Ok(trace));
    }

    #[test]
    fn events_are_in_the_order_of_time_whatever_places_they_got() {
        let mut trace = recorded();
        let sorted = trace.clone();
        trace.events.chunks_mut(2).for_each(<[Event]>::reverse);
        assert_eq!(Trace::read(&bytes(&trace)), Ok(sorted));
        // Events of the same time are ordered by their places.
        trace.events.iter_mut().for_each(|event| event.at = 0);
        assert_eq!(Trace::read(&bytes(&trace)), Ok(trace));
    }

    #[test]
    fn a_damaged_file_is_refused_and_says_why() {
        let bytes = bytes(&recorded());
        for (change, expected) in [
            (
                Box::new(|bytes: &mut Vec<u8>| bytes.truncate(bytes.len() - 1)) as Box<dyn Fn(&mut Vec<u8>)>,
                "320063 bytes long, and should have 20000 places",
            ),
            (Box::new(|bytes| bytes.push(0)), "320065 bytes long"),
            (Box::new(|bytes| bytes[0] = b'N'), "does not begin"),
            (Box::new(|bytes| bytes.truncate(7)), "does not begin"),
            (Box::new(|bytes| bytes.truncate(12)), "has not recorded anything"),
            (Box::new(|bytes| bytes[24] = 2), "on CPU 3 of 2"),
            (Box::new(|bytes| bytes[24..26].fill(0)), "0 CPUs"),
            (Box::new(|bytes| bytes[26] = 3), "2^3 bytes"),
            (Box::new(|bytes| bytes[HEADER + 12..HEADER + 16].fill(0)), "event of 0 pages"),
        ] {
            let mut damaged = bytes.clone();
            change(&mut damaged);
            let error = Trace::read(&damaged).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused() {
        let (bytes, mut random) = (bytes(&recorded()), Random::new(2, 2));
        for _ in 0..1000 {
            let mut damaged = bytes[..HEADER + 100 * PLACE].to_vec();
            damaged[12..16].copy_from_slice(&100_u32.to_le_bytes());
            let at = random.below(damaged.len() as u32) as usize;
            damaged[at] = random.below(256) as u8;
            if let Ok(trace) = Trace::read(&damaged) {
                let _ = trace.setup();
            }
        }
    }

    #[test]
    fn a_replay_does_every_event_under_every_policy() {
        let trace = recorded();
        let pages =
            |free| trace.events.iter().filter(|event| event.free == free).map(|event| u64::from(event.pages)).sum();
        for policy in policies::ALL {
            let run = policies::run(policy, trace.setup().unwrap());
            assert_eq!((run.costs.taken, run.costs.given), (pages(false), pages(true)), "{policy:?}");
            assert!(run.outcome.counts.ended >= trace.events.last().unwrap().at);
        }
        let outcome = || policies::run(Name::Adaptive, trace.setup().unwrap()).outcome;
        assert_eq!(outcome(), outcome());
    }

    #[test]
    fn setup_drops_frees_of_earlier_pages_and_rejects_double_alloc() {
        let event = |at, free| Event { at, cpu: 0, free, pages: 1, page: 7 };
        let trace = |events: &[Event]| Trace { cpus: 1, page_shift: 12, cut_off: false, events: events.to_vec() };
        let run = policies::run(Name::Fixed, trace(&[event(0, true), event(1, false)]).setup().unwrap());
        assert_eq!((run.costs.taken, run.costs.given), (1, 0));
        assert!(trace(&[event(0, false), event(1, false)]).setup().is_err_and(|error| error.contains("page 7")));
    }

    #[test]
    fn a_run_is_one_visit_to_the_zone_and_may_come_back_longer() {
        let event = |at, pages, free| Event { at, cpu: 0, free, pages, page: 7 };
        for (pages, held) in [(3, 4), (8, 8), (9, 16), (1_000_000, 16)] {
            let events = vec![event(0, pages, false), event(1, pages + 9, true)];
            let trace = Trace { cpus: 1, page_shift: 12, cut_off: false, events };
            let run = policies::run(Name::Fixed, trace.setup().unwrap());
            assert_eq!((run.costs.taken, run.costs.given, trace.taken()), (held, held, held));
        }
    }
}
