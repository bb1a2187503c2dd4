//! Describes the accesses of shared memory by a sequence: its loads, checks and stores, in words
//! that do not depend on the processor.
//!
//! The steps are executed once, on sums of unknown values. Each loaded word gets a name by its
//! address. A loop's body is executed once; registers that it changes are unknown after it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};

use super::decode::{Condition, Operand, Step};
use super::sum::Sum;

/// Bytes of a cell.
const CELL: i64 = 8;

/// A word that a sequence loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Word {
    Cpu,
    /// The table's entry of the CPU: the address of its region, or the distance to it.
    Row,
    /// The first word of a region, without a place.
    Mark,
    /// The words at a place in the region.
    Head,
    Bottom,
    End,
    Cell,
    Elsewhere,
}

/// A value that is not known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Value {
    /// The contents of a register before the sequence.
    Register(String),
    Loaded(Word),
    /// A function of these words, and of registers.
    Mixed(BTreeSet<Word>),
    Larger(Box<Sum<Value>>, Box<Sum<Value>>),
}

type Known = Sum<Value>;

/// An access of memory or a check.
#[derive(Debug)]
enum Event {
    Load { word: Word, at: Known, again: bool },
    Store { word: Word, at: Known, value: Known, release: bool, again: bool },
    Refuse(Known, Condition, Known),
}

/// A sequence that is being executed.
struct Trace<'a> {
    /// Addresses of its instructions, up to the end.
    range: core::ops::Range<u64>,
    /// The address of the thread's rseq area.
    area: &'a Known,
    registers: BTreeMap<String, Known>,
    compared: Option<(Known, Known)>,
    events: Vec<Event>,
    /// For each instruction so far: its address, the number of events before it, and the
    /// registers that it sets.
    done: Vec<(u64, usize, BTreeSet<String>)>,
}

/// The lines of a sequence. `before` has the steps of the instructions that make and store the
/// descriptor's address, `code` those of each instruction from START to END.
///
/// # Errors
/// The sequence breaks a rule of `neap_os::rseq`.
pub(super) fn lines(descriptor: u64, before: &[Vec<Step>], code: &[(u64, Vec<Step>)], end: u64) -> Result<Vec<String>> {
    let area = armed_area(descriptor, before)?;
    let start = code.first().context("no instruction")?.0;
    let (registers, compared, events, done) = Default::default();
    let mut trace = Trace { range: start..end, area: &area, registers, compared, events, done };
    for (at, steps) in code {
        trace.done.push((*at, trace.events.len(), BTreeSet::new()));
        for step in steps {
            trace.execute(step)?;
        }
    }
    trace.check()?;
    Ok(trace.spell())
}

/// The address of the thread's rseq area: the last instruction before a sequence stores the
/// descriptor's address there.
fn armed_area(descriptor: u64, before: &[Vec<Step>]) -> Result<Known> {
    let mut constants = BTreeMap::new();
    for step in before.iter().flatten() {
        match step {
            Step::Set(register, sum) => {
                let sum = sum.with(|name| constants.get(name).cloned().unwrap_or_else(|| Sum::of(name.clone())));
                constants.insert(register.clone(), sum);
            }
            Step::Store { .. } => {}
            other => bail!("{other:?} lies between the descriptor's address and its store"),
        }
    }
    let Some([Step::Store { to, value, .. }]) = before.last().map(Vec::as_slice) else {
        bail!("the instruction before the sequence does not store its descriptor's address");
    };
    let stored = value.with(|name| constants.get(name).cloned().unwrap_or_else(|| Sum::of(name.clone())));
    ensure!(stored == Sum::constant(descriptor as i64), "it stores the address of another descriptor");
    // `rseq_cs` is the third word of 32 bits.
    Ok(to.with(|name| Sum::of(Value::Register(name.clone()))).plus(&Sum::constant(8), -1))
}

impl Trace<'_> {
    fn value(&self, operand: &Operand) -> Known {
        operand.with(|name| match self.registers.get(name) {
            Some(value) => value.clone(),
            None => Sum::of(Value::Register(name.clone())),
        })
    }

    fn set(&mut self, register: &str, value: Known) {
        self.registers.insert(register.to_string(), value);
        self.done.last_mut().expect("an instruction is executed").2.insert(register.to_string());
    }

    fn execute(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::Set(register, sum) => self.set(register, self.value(sum)),
            Step::Mix(register, of) => {
                let mixed = mixed(of.iter().map(|operand| self.value(operand)));
                self.set(register, mixed);
            }
            Step::Load(register, from) => {
                let at = self.value(from);
                let word = self.word(&at)?;
                self.events.push(Event::Load { word, at, again: false });
                self.set(register, Sum::of(Value::Loaded(word)));
            }
            Step::Store { to, value, release } => {
                let (at, value) = (self.value(to), self.value(value));
                let word = self.word(&at)?;
                self.events.push(Event::Store { word, at, value, release: *release, again: false });
            }
            Step::Compare(left, right) => self.compared = Some((self.value(left), self.value(right))),
            Step::SetIf(condition, register, new) => {
                let (new, old) = (self.value(new), self.value(&Sum::of(register.clone())));
                let value = match (condition, &self.compared) {
                    (Condition::Less, Some((left, right))) if (left, right) == (&old, &new) => {
                        Sum::of(Value::Larger(old.into(), new.into()))
                    }
                    _ => mixed([old, new].into_iter()),
                };
                self.set(register, value);
            }
            Step::Branch(condition, to) if !self.range.contains(to) => {
                let (left, right) = self.compared.clone().context("a branch without a comparison")?;
                self.events.push(Event::Refuse(left, *condition, right));
            }
            Step::Branch(_, to) => self.repeat(*to),
        }
        Ok(())
    }

    /// A branch back to `to`: the code from there on is a loop. A branch ahead skips a loop that
    /// has nothing to do.
    fn repeat(&mut self, to: u64) {
        let body = self.done.partition_point(|(at, ..)| *at < to);
        let Some((_, first, _)) = self.done.get(body) else { return };
        for event in &mut self.events[*first..] {
            if let Event::Load { again, .. } | Event::Store { again, .. } = event {
                *again = true;
            }
        }
        let changed: BTreeSet<String> = self.done[body..].iter().flat_map(|(.., set)| set.clone()).collect();
        for register in changed {
            self.set(&register, mixed(core::iter::empty()));
        }
    }

    /// The word at an address.
    fn word(&self, at: &Known) -> Result<Word> {
        let times = |word| at.terms.get(&Value::Loaded(word)).copied().unwrap_or(0);
        if *at == self.area.clone().plus(&Sum::constant(4), 1) {
            return Ok(Word::Cpu);
        }
        match [Word::Cpu, Word::Row, Word::Head].map(times) {
            [CELL, 0, 0] => Ok(Word::Row),
            [0, 0, 1] => Ok(Word::Cell),
            [0, 1, 0] => match (at.terms.len(), at.constant) {
                (1, 0) => Ok(Word::Mark),
                (2, 0) => Ok(Word::Head),
                (2, 8) => Ok(Word::Bottom),
                (2, 16) => Ok(Word::End),
                _ => bail!("it accesses a word of a region at {at:?}"),
            },
            [0, 0, 0] if at.terms.keys().all(|value| value.is_elsewhere()) => Ok(Word::Elsewhere),
            _ => bail!("it accesses the address {at:?}"),
        }
    }

    /// The rules: it starts with the CPU's id, it ends with the commit, and it stores nothing else
    /// but cells and private memory.
    fn check(&self) -> Result<()> {
        ensure!(
            matches!(self.events.first(), Some(Event::Load { word: Word::Cpu, .. })),
            "it starts without the CPU's id"
        );
        let Some((Event::Store { word: Word::Head | Word::End, again: false, .. }, others)) = self.events.split_last()
        else {
            bail!("its last access is no commit");
        };
        let (last, ..) = self.done.last().expect("events have instructions");
        ensure!(
            self.done.last().is_some_and(|(_, first, _)| *first < self.events.len()),
            "{last:#x} follows the commit"
        );
        for event in others {
            if let Event::Store { word, .. } = event {
                ensure!(matches!(word, Word::Cell | Word::Elsewhere), "it stores {word:?} before the commit");
            }
        }
        Ok(())
    }

    /// The events in words. A word is named when it is first loaded. Loads of memory that is
    /// neither the table's nor a region's are left out: sequences only read it, or it is private.
    fn spell(&self) -> Vec<String> {
        let words: BTreeSet<_> = self.events.iter().filter_map(Event::word).collect();
        let is_stack = words.iter().any(|word| matches!(word, Word::Bottom | Word::End | Word::Cell));
        let speller = Speller { is_stack };
        let mut named = BTreeSet::new();
        let mut lines = Vec::new();
        for (index, event) in self.events.iter().enumerate() {
            let line = match event {
                Event::Load { word: Word::Elsewhere, .. } => continue,
                Event::Load { word: Word::Cell, at, again } => {
                    format!("load {} {}", if *again { "cells from" } else { "the cell at" }, speller.sum(at))
                }
                Event::Load { word, .. } if named.insert(*word) => format!("load {}", speller.name(*word)),
                Event::Load { .. } => continue,
                Event::Refuse(left, condition, right) => {
                    format!("refuse if {} {} {}", speller.sum(left), condition.sign(), speller.sum(right))
                }
                Event::Store { word, value, release, .. } if index + 1 == self.events.len() => {
                    let release = if *release { ", release" } else { "" };
                    format!("commit {} := {}{release}", speller.name(*word), speller.sum(value))
                }
                Event::Store { word: Word::Cell, at, again, .. } => {
                    format!("store {} {}", if *again { "cells from" } else { "the cell at" }, speller.sum(at))
                }
                Event::Store { .. } => "store private memory".to_string(),
            };
            lines.push(line);
        }
        lines
    }
}

impl Event {
    fn word(&self) -> Option<Word> {
        match self {
            Event::Load { word, .. } | Event::Store { word, .. } => Some(*word),
            Event::Refuse(..) => None,
        }
    }
}

impl Value {
    /// Whether an address of it is neither the table's nor a region's.
    fn is_elsewhere(&self) -> bool {
        match self {
            Value::Register(_) | Value::Loaded(Word::Elsewhere) => true,
            Value::Mixed(of) => of.iter().all(|word| matches!(word, Word::Cell | Word::Elsewhere)),
            Value::Loaded(_) | Value::Larger(..) => false,
        }
    }
}

fn mixed(of: impl Iterator<Item = Known>) -> Known {
    let mut words = BTreeSet::new();
    for value in of.flat_map(|sum| sum.terms.into_keys()) {
        match value {
            Value::Register(_) => {}
            Value::Loaded(word) => _ = words.insert(word),
            Value::Mixed(more) => words.extend(more),
            Value::Larger(..) => _ = words.insert(Word::End),
        }
    }
    Sum::of(Value::Mixed(words))
}

impl Condition {
    fn sign(self) -> &'static str {
        match self {
            Condition::Equal => "=",
            Condition::Unequal => "!=",
            Condition::Less => "<",
            Condition::AtMost => "<=",
            Condition::Greater => ">",
            Condition::AtLeast => ">=",
        }
    }
}

/// Names of words and sums: of a stack, or of a lone word in the region.
struct Speller {
    is_stack: bool,
}

impl Speller {
    fn name(&self, word: Word) -> &'static str {
        match word {
            Word::Cpu => "cpu",
            Word::Row => "row",
            Word::Mark => "mark",
            Word::Head if self.is_stack => "head",
            Word::Head => "word",
            Word::Bottom => "bottom",
            Word::End => "end",
            Word::Cell => "cell",
            Word::Elsewhere => "other",
        }
    }

    /// A sum, in cells if it is an address in a stack. `n` is any number that the sequence gets.
    fn sum(&self, sum: &Known) -> String {
        let is_address = |value: &Value| matches!(value, Value::Loaded(Word::Head | Word::Bottom | Word::End));
        let unit = if self.is_stack && sum.terms.keys().any(is_address) { CELL } else { 1 };
        let mut parts: Vec<(i64, String)> = Vec::new();
        for (value, times) in &sum.terms {
            let name = match value {
                Value::Register(_) => "n".to_string(),
                Value::Loaded(word) => self.name(*word).to_string(),
                Value::Mixed(words) if words.is_empty() => "n".to_string(),
                Value::Mixed(words) => {
                    format!("f({})", words.iter().map(|word| self.name(*word)).collect::<Vec<_>>().join(", "))
                }
                Value::Larger(left, right) => format!("max({}, {})", self.sum(left), self.sum(right)),
            };
            let times = if is_address(value) { *times } else { times / unit };
            parts.push((times, name));
        }
        parts.sort_by_key(|(_, name)| name == "n");
        if sum.constant != 0 || parts.is_empty() {
            parts.push((sum.constant.signum(), (sum.constant / unit).unsigned_abs().to_string()));
        }
        let mut text = String::new();
        for (times, name) in parts {
            text += match (times < 0, text.is_empty()) {
                (true, true) => "-",
                (false, true) => "",
                (true, false) => " - ",
                (false, false) => " + ",
            };
            if times.unsigned_abs() > 1 {
                text += &format!("{} ", times.unsigned_abs());
            }
            text += &name;
        }
        text
    }
}
