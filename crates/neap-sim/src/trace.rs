//! Recorded page events: a compact file format, and the programs that do the same again.
//!
//! Sits between a file and the machine. All numbers are little endian.
//!
//! ```text
//! header, 24 bytes:  "neaptrc1"   u16 CPUs   u8 page shift   u8 flags (1: the file was full)   u32 events   u64 nanoseconds
//! each event:        u8: bit 0 set for a free, bits 1 to 4 the order
//!                    LEB128: the CPU
//!                    LEB128: nanoseconds since the event before
//!                    LEB128, zigzag: the block's first page, less that of the event before
//! ```
//!
//! Five to eight bytes an event. Whoever writes one bounds the file, and sets the flag when it was full; what is in it until
//! then is a whole trace. A free of a block that was allocated before the recording began means nothing and is left out.

use std::collections::BTreeMap;

use crate::machine::{SECOND, Setup};
use crate::program::{Op, Program};

const MAGIC: &[u8; 8] = b"neaptrc1";
const HEADER: usize = 24;
/// The most CPUs that a trace may name.
const MOST_CPUS: u16 = 1024;
/// The largest order.
const LARGEST: u8 = 10;

/// A block was allocated or freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds since the first one.
    pub at: u64,
    /// Where.
    pub cpu: u16,
    /// Freed, not allocated.
    pub free: bool,
    /// Of the block.
    pub order: u8,
    /// The block's first page.
    pub page: u32,
}

/// A whole recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// CPUs of the machine that it is of.
    pub cpus: u16,
    /// The page size as a power of two.
    pub page_shift: u8,
    /// The file was full before the program had ended.
    pub cut_off: bool,
    /// In the order of time.
    pub events: Vec<Event>,
}

fn push_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 128 {
        bytes.push(number as u8 | 128);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// What is left to read, and how much there was.
struct Reader<'a> {
    rest: &'a [u8],
    length: usize,
}

impl Reader<'_> {
    fn byte(&mut self) -> Result<u8, String> {
        let (first, rest) =
            self.rest.split_first().ok_or(format!("it ends within an event, after {} bytes", self.length))?;
        self.rest = rest;
        Ok(*first)
    }

    fn number(&mut self) -> Result<u64, String> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Ok(number);
            }
        }
        Err(format!("the number that ends at byte {} is too long", self.length - self.rest.len()))
    }
}

impl Trace {
    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.cpus.to_le_bytes());
        bytes.extend([self.page_shift, u8::from(self.cut_off)]);
        bytes.extend((self.events.len() as u32).to_le_bytes());
        bytes.extend(self.events.last().map_or(0, |event| event.at).to_le_bytes());
        let (mut at, mut page) = (0, 0_u32);
        for event in &self.events {
            bytes.push(u8::from(event.free) | event.order << 1);
            push_number(&mut bytes, event.cpu.into());
            push_number(&mut bytes, event.at - at);
            let difference = i64::from(event.page) - i64::from(page);
            push_number(&mut bytes, (difference << 1 ^ difference >> 63) as u64);
            (at, page) = (event.at, event.page);
        }
        bytes
    }

    /// Reads a file's bytes.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn read(bytes: &[u8]) -> Result<Trace, String> {
        let Some((header, rest)) = bytes.split_at_checked(HEADER).filter(|(header, _)| header.starts_with(MAGIC))
        else {
            return Err("it does not begin like a trace of neap's".into());
        };
        let cpus = u16::from_le_bytes([header[8], header[9]]);
        if cpus == 0 || cpus > MOST_CPUS {
            return Err(format!("it is of {cpus} CPUs, and may be of 1 to {MOST_CPUS}"));
        }
        let count = u32::from_le_bytes([header[12], header[13], header[14], header[15]]);
        let mut reader = Reader { rest, length: bytes.len() };
        let (mut at, mut page, mut events) = (0_u64, 0_i64, Vec::new());
        for index in 0..count {
            let kind = reader.byte()?;
            let (free, order) = (kind & 1 == 1, kind >> 1);
            let cpu = reader.number()?;
            if order > LARGEST || cpu >= u64::from(cpus) {
                return Err(format!("event {index} is of order {order} on CPU {cpu}"));
            }
            at = at.checked_add(reader.number()?).ok_or(format!("event {index} is too late"))?;
            let zigzag = reader.number()?;
            page = page.wrapping_add((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64));
            let page = u32::try_from(page).map_err(|_| format!("event {index} is of page {page}"))?;
            events.push(Event { at, cpu: cpu as u16, free, order, page });
        }
        if !(12..=16).contains(&header[10]) {
            return Err(format!("its pages are of 2^{} bytes", header[10]));
        }
        Ok(Trace { cpus, page_shift: header[10], cut_off: header[11] & 1 == 1, events })
    }

    /// A machine whose CPUs do what was recorded, at the times that were recorded or as soon as they can.
    ///
    /// # Errors
    /// The event that allocates what is allocated already.
    pub fn setup(&self) -> Result<Setup, String> {
        // What each CPU does: when, which order (none: a free), and a name for the block, another one each time that a page
        // is allocated.
        let mut steps: Vec<Vec<(u64, Option<u8>, u32)>> = vec![Vec::new(); self.cpus.into()];
        let (mut out, mut used, mut most) = (BTreeMap::new(), 0_u64, 0);
        for (name, event) in (0..).zip(&self.events) {
            let steps = &mut steps[usize::from(event.cpu)];
            if !event.free {
                if out.insert(event.page, name).is_some() {
                    return Err(format!("event {name} allocates page {}, which is allocated", event.page));
                }
                steps.push((event.at, Some(event.order), name));
                used += 1 << event.order;
                most = most.max(used);
            } else if let Some(name) = out.remove(&event.page) {
                steps.push((event.at, None, name));
                used = used.saturating_sub(1 << event.order);
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

    /// Four CPUs that allocate and free what any of them allocated.
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
            events.push(Event { at, cpu, free, order, page });
        }
        Trace { cpus: 4, page_shift: 12, cut_off: true, events }
    }

    #[test]
    fn what_was_written_is_read() {
        let trace = recorded();
        let bytes = trace.bytes();
        assert!(bytes.len() < 8 * trace.events.len());
        assert_eq!(Trace::read(&bytes), Ok(trace));
    }

    #[test]
    fn a_damaged_file_is_refused_and_says_why() {
        let bytes = recorded().bytes();
        for (change, expected) in [
            (
                Box::new(|bytes: &mut Vec<u8>| bytes.truncate(bytes.len() - 1)) as Box<dyn Fn(&mut Vec<u8>)>,
                "ends within",
            ),
            (Box::new(|bytes| bytes[0] = b'N'), "does not begin"),
            (Box::new(|bytes| bytes.truncate(10)), "does not begin"),
            (Box::new(|bytes| bytes[8] = 2), "on CPU"),
            (Box::new(|bytes| bytes[8..10].fill(0)), "0 CPUs"),
            (Box::new(|bytes| bytes[HEADER] |= 0x1e), "order 15"),
        ] {
            let mut damaged = bytes.clone();
            change(&mut damaged);
            let error = Trace::read(&damaged).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused() {
        let (bytes, mut random) = (recorded().bytes(), Random::new(2, 2));
        for _ in 0..300 {
            let mut damaged = bytes[..2000].to_vec();
            damaged[12..16].copy_from_slice(&200_u32.to_le_bytes());
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
            |free| trace.events.iter().filter(|event| event.free == free).map(|event| 1_u64 << event.order).sum();
        for policy in policies::ALL {
            let run = policies::run(policy, trace.setup().unwrap());
            assert_eq!((run.costs.taken, run.costs.given), (pages(false), pages(true)), "{policy:?}");
            assert!(run.outcome.ended >= trace.events.last().unwrap().at);
        }
        let outcome = || policies::run(Name::Adaptive, trace.setup().unwrap()).outcome;
        assert_eq!(outcome(), outcome());
    }

    #[test]
    fn frees_of_what_was_there_before_are_left_out_and_a_page_is_not_allocated_twice() {
        let event = |at, free| Event { at, cpu: 0, free, order: 0, page: 7 };
        let trace = |events: &[Event]| Trace { cpus: 1, page_shift: 12, cut_off: false, events: events.to_vec() };
        let run = policies::run(Name::Fixed, trace(&[event(0, true), event(1, false)]).setup().unwrap());
        assert_eq!((run.costs.taken, run.costs.given), (1, 0));
        assert!(trace(&[event(0, false), event(1, false)]).setup().is_err_and(|error| error.contains("page 7")));
    }
}
