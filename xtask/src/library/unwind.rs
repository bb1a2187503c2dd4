//! Compares unwind information with the instructions of a library, at each of them.
//!
//! It follows every function from its entry, by its jumps. It computes the distance of the stack
//! pointer to the frame's address from pushes, pops and other changes, and the places of registers
//! that belong to the caller. Code that no visible jump reaches is followed from the rules at its
//! start. Code outside its function (abort exits of restartable sequences) has an expression for
//! its return address. The expression must lead to a place with the rules that the target of the
//! code's jump has.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::library::listing::{Instruction, Listing};
use crate::library::rules::{Frame, Frames, Rules, evaluate};
use crate::report::Report;

/// Registers that a function must preserve.
const KEPT: [&str; 6] = ["rbx", "rbp", "r12", "r13", "r14", "r15"];

/// Instructions that change none of their operands.
const ONLY_LOOKS: &[&str] = &["cmp", "test", "call", "ret", "bt", "comiss", "ucomiss", "comisd", "ucomisd", "ptest"];

/// Findings that are printed before the rest is only counted.
const SHOWN: usize = 10;

/// The state at the start of an instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// Distance of the stack pointer below the frame's address; `None` once it has been aligned.
    pub(crate) depth: Option<i64>,
    /// Distance of `rbp` below the frame's address, if it is a frame pointer.
    pointer: Option<i64>,
    /// Distances below the frame's address at which registers are saved.
    saved: BTreeMap<&'static str, i64>,
    /// Registers that may not hold the caller's value.
    changed: BTreeSet<&'static str>,
    /// Addresses that are in registers, and on the stack.
    pub(crate) addresses: BTreeMap<Place, Address>,
}

/// A place of an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Register(&'static str),
    /// At this distance below the frame's address.
    Stack(i64),
}

/// An address that the code computes itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// This address.
    Here(u64),
    /// The address that is stored at this one.
    At(u64),
}

/// The registers, by the names of their parts.
const REGISTERS: [[&str; 5]; 8] = [
    ["rax", "eax", "ax", "al", "ah"],
    ["rbx", "ebx", "bx", "bl", "bh"],
    ["rcx", "ecx", "cx", "cl", "ch"],
    ["rdx", "edx", "dx", "dl", "dh"],
    ["rsi", "esi", "si", "sil", ""],
    ["rdi", "edi", "di", "dil", ""],
    ["rbp", "ebp", "bp", "bpl", ""],
    ["rsp", "esp", "sp", "spl", ""],
];
const NUMBERED: [&str; 8] = ["r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"];

/// Registers that a function may leave changed, and that some instructions change without naming
/// them.
const LENT: [&str; 9] = ["rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11"];

/// The 64-bit register that an operand is a part of.
fn register(operand: &str) -> Option<&'static str> {
    let by_letters = REGISTERS.iter().find(|parts| parts.contains(&operand) && !operand.is_empty());
    let number = operand.trim_end_matches(['d', 'w', 'b']);
    by_letters.map(|parts| parts[0]).or_else(|| NUMBERED.into_iter().find(|name| *name == number))
}

/// The 64-bit register of the caller that an operand is a part of.
fn kept(operand: &str) -> Option<&'static str> {
    register(operand).filter(|name| KEPT.contains(name))
}

fn number(text: &str) -> Option<i64> {
    let digits = text.strip_prefix("0x")?;
    u64::from_str_radix(digits, 16).ok().map(u64::cast_signed)
}

/// The offset in an operand `[register+offset]`.
fn offset(operand: &str, register: &str) -> Option<i64> {
    let rest = operand.strip_prefix('[')?.strip_suffix(']')?.strip_prefix(register)?;
    match rest.split_at_checked(1) {
        None => Some(0),
        Some(("+", digits)) => number(digits),
        Some(("-", digits)) => number(digits).map(|number| -number),
        Some(_) => None,
    }
}

impl State {
    /// The state at a function's entry, with the return address on the stack.
    pub(crate) fn at_entry() -> State {
        State { depth: Some(8), ..State::default() }
    }

    /// The state by the rules at an address.
    fn believed(rules: &Rules) -> State {
        let is_base = |name| (rules.base == name).then_some(rules.above);
        let saved = KEPT.into_iter().filter_map(|name| Some((name, *rules.saved.get(name)?)));
        let (depth, pointer) = (is_base("rsp"), is_base("rbp"));
        State { depth, pointer, saved: saved.collect(), ..State::default() }
    }

    /// The common state where two ways meet; `None` if they disagree.
    fn met(&self, other: &State) -> Option<State> {
        let mut state = self.clone();
        state.saved.retain(|name, below| other.saved.get(name) == Some(below));
        state.changed.extend(&other.changed);
        state.addresses.retain(|place, address| other.addresses.get(place) == Some(address));
        state.pointer = state.pointer.filter(|pointer| other.pointer == Some(*pointer));
        (self.depth == other.depth).then_some(state)
    }

    /// The state after an instruction.
    pub(crate) fn behind(&self, instruction: &Instruction) -> Result<State> {
        let mut next = self.clone();
        let operand = |at: usize| instruction.operands.get(at).map_or("", String::as_str);
        let (to, from) = (operand(0), operand(1));
        next.move_address(self, instruction);
        match (instruction.name.as_str(), to) {
            ("push", _) => {
                next.depth = self.depth.map(|depth| depth + 8);
                if let (Some(name), Some(depth)) = (kept(to).filter(|name| !self.changed.contains(name)), next.depth) {
                    // A second push of the caller's value is an argument.
                    next.saved.entry(name).or_insert(depth);
                }
            }
            ("pop", _) => {
                next.depth = self.depth.map(|depth| depth - 8);
                next.restore(to, self.depth);
            }
            ("leave", _) => {
                next.depth = self.pointer.map(|pointer| pointer - 8);
                next.restore("rbp", self.pointer);
            }
            ("sub" | "add", "rsp") => {
                let bytes = number(from).with_context(|| format!("an unknown step of the stack: {from}"))?;
                let bytes = if instruction.name == "sub" { bytes } else { -bytes };
                next.depth = self.depth.map(|depth| depth + bytes);
            }
            ("and", "rsp") => next.depth = None,
            ("mov", "rsp") if from == "rbp" => next.depth = self.pointer,
            // Another stack; the frame pointer leads back.
            ("mov", "rsp") if self.pointer.is_some() => next.depth = None,
            ("lea", "rsp") => {
                let by_stack = offset(from, "rsp").zip(self.depth).map(|(offset, depth)| depth - offset);
                let by_pointer = offset(from, "rbp").zip(self.pointer).map(|(offset, pointer)| pointer - offset);
                next.depth = by_stack.or(by_pointer);
                ensure!(next.depth.is_some(), "an unknown place of the stack: {from}");
            }
            ("mov", "rbp") if from == "rsp" => next.point(self.depth),
            ("lea", "rbp") if offset(from, "rsp").is_some() => {
                next.point(self.depth.zip(offset(from, "rsp")).map(|(depth, offset)| depth - offset));
            }
            (name, _) if name.starts_with("push") || name.starts_with("pop") && name != "popcnt" => {
                bail!("the check does not know {name}")
            }
            (name, _) if ONLY_LOOKS.contains(&name) || instruction.is_jump() => {}
            (_, "rsp" | "esp" | "sp" | "spl") => bail!("an unknown change of the stack pointer"),
            (name, _) => {
                let exchanged = if name == "xchg" || name == "xadd" { kept(from) } else { None };
                for register in kept(to).into_iter().chain(exchanged) {
                    next.changed.insert(register);
                    next.pointer = next.pointer.filter(|_| register != "rbp");
                }
            }
        }
        Ok(next)
    }

    /// The place of an operand: a register, or a word on the stack.
    pub(crate) fn place(&self, operand: &str) -> Option<Place> {
        let Some(address) = operand.strip_prefix("QWORD PTR ") else { return register(operand).map(Place::Register) };
        let by_stack = offset(address, "rsp").zip(self.depth).map(|(offset, depth)| depth - offset);
        let by_pointer = offset(address, "rbp").zip(self.pointer).map(|(offset, pointer)| pointer - offset);
        by_stack.or(by_pointer).map(Place::Stack)
    }

    /// Follows addresses.
    fn move_address(&mut self, before: &State, instruction: &Instruction) {
        let operand = |at: usize| instruction.operands.get(at).map_or("", String::as_str);
        let address = match (instruction.name.as_str(), instruction.refers_to) {
            ("mov", Some(slot)) if operand(1).starts_with("QWORD PTR") => Some(Address::At(slot)),
            ("lea", Some(here)) => Some(Address::Here(here)),
            ("mov", None) => before.place(operand(1)).and_then(|place| before.addresses.get(&place).copied()),
            _ => None,
        };
        let to = before.place(operand(0));
        let is_plain =
            matches!(instruction.name.as_str(), "mov" | "lea" | "push" | "add" | "sub" | "and" | "or" | "xor");
        if !is_plain && !ONLY_LOOKS.contains(&instruction.name.as_str()) || instruction.name == "call" {
            // Some instructions change registers that they do not name.
            self.addresses.retain(|place, _| !matches!(place, Place::Register(name) if LENT.contains(name)));
            if let Some(Place::Register(other)) = before.place(operand(1)).filter(|_| instruction.name.starts_with('x'))
            {
                self.addresses.remove(&Place::Register(other));
            }
        }
        if let Some(to) = to.filter(|_| !ONLY_LOOKS.contains(&instruction.name.as_str()) && !instruction.is_jump()) {
            match address {
                Some(address) => self.addresses.insert(to, address),
                None => self.addresses.remove(&to),
            };
        }
    }

    fn restore(&mut self, register: &str, from: Option<i64>) {
        let Some(name) = kept(register) else { return };
        if from.is_some() && self.saved.get(name).copied() == from {
            self.changed.remove(name);
        } else {
            self.changed.insert(name);
        }
        self.pointer = self.pointer.filter(|_| name != "rbp");
    }

    fn point(&mut self, at: Option<i64>) {
        self.pointer = at;
        self.changed.insert("rbp");
    }

    /// Whether the rules lead to the caller from here.
    fn agrees(&self, rules: &Rules) -> Result<()> {
        let known = match rules.base.as_str() {
            "rsp" => self.depth,
            "rbp" => self.pointer,
            other => bail!("the frame's address is said to be relative to {other}"),
        };
        ensure!(
            known == Some(rules.above),
            "the frame's address is said to be {}{:+}, and it is {known:+?}",
            rules.base,
            rules.above
        );
        for name in KEPT {
            match (rules.saved.get(name), self.saved.get(name)) {
                (Some(said), known) => {
                    ensure!(known == Some(said), "{name} is said to lie at {said}, and it lies at {known:?}");
                }
                (None, _) => ensure!(!self.changed.contains(name), "{name} is said to be the caller's"),
            }
        }
        Ok(())
    }
}

/// A library's instructions and unwind information.
pub(crate) struct Check<'a> {
    pub(crate) listing: &'a Listing,
    pub(crate) frames: &'a Frames,
}

impl Check<'_> {
    /// The rules at an address. For code outside its function, those of the place in the function
    /// that appears as its caller.
    fn rules(&self, address: u64) -> Result<&Rules> {
        let rules = self.frames.covering(address).context("no unwind information")?.rules(address);
        let Some(expression) = &rules.computed else { return Ok(rules) };
        ensure!(
            (rules.base.as_str(), rules.above) == ("rsp", 0),
            "the return address is computed, but the frame's address is not rsp"
        );
        let caller = evaluate(expression, address, |at| self.listing.word(at))?;
        let rules = |at: u64| {
            let frame = self
                .frames
                .covering(at)
                .with_context(|| format!("the computed return address {at:#x} has no unwind information"))?;
            Ok::<_, anyhow::Error>(frame.rules(at))
        };
        let behind = rules(caller)?;
        // An unwinder uses the byte before a return address.
        ensure!(
            behind == rules(caller - 1)? && behind.computed.is_none(),
            "the rules at the computed return address {caller:#x} are computed, or differ one byte before"
        );
        Ok(behind)
    }

    /// Follows one function, and names each place where it and its rules differ.
    fn function(&self, frame: &Frame, found: &mut dyn FnMut(u64, anyhow::Error)) -> Result<()> {
        let code = self.code(frame)?;
        if frame.rules(frame.start).computed.is_some() {
            for instruction in code {
                let outside = self.rules(instruction.address).and_then(|rules| {
                    let depth = State::at_entry().behind(instruction)?.depth;
                    ensure!(depth == State::at_entry().depth, "the instruction changes the stack pointer");
                    match instruction.target() {
                        Some(target) if !(frame.start..frame.end).contains(&target) => {
                            ensure!(
                                self.rules(target)? == rules,
                                "the jump leads to {target:#x}, whose unwind rules differ"
                            );
                        }
                        _ => {}
                    }
                    Ok(())
                });
                outside.unwrap_or_else(|error| found(instruction.address, error));
            }
            return Ok(());
        }
        let states = self.follow(frame, code, found);
        for (instruction, state) in code.iter().zip(&states) {
            if let Some(state) = state {
                state
                    .agrees(frame.rules(instruction.address))
                    .unwrap_or_else(|error| found(instruction.address, error));
            }
        }
        Ok(())
    }

    /// The instructions of a function.
    pub(crate) fn code(&self, frame: &Frame) -> Result<&[Instruction]> {
        let first = self.listing.at(frame.start).context("the function's unwind range begins within an instruction")?;
        let code = &self.listing.instructions[first..];
        let code = &code[..code.partition_point(|instruction| instruction.address < frame.end)];
        ensure!(
            code.last().is_some_and(|last| last.end == frame.end || last.is_padding()),
            "the function's unwind range ends within an instruction"
        );
        Ok(code)
    }

    /// The states at the start of all instructions of a function.
    pub(crate) fn follow(
        &self,
        frame: &Frame,
        code: &[Instruction],
        found: &mut dyn FnMut(u64, anyhow::Error),
    ) -> Vec<Option<State>> {
        let mut states: Vec<Option<State>> = vec![None; code.len()];
        let mut next = vec![(0, State::at_entry())];
        loop {
            while let Some((at, state)) = next.pop() {
                let met = match &states[at] {
                    Some(known) => known.met(&state),
                    None => Some(state),
                };
                let Some(state) = met else {
                    found(code[at].address, anyhow::anyhow!("two ways lead here with different stacks"));
                    continue;
                };
                if states[at].as_ref() != Some(&state) {
                    states[at] = Some(state.clone());
                    match state.behind(&code[at]) {
                        Ok(behind) => self.go_on(frame, code, at, behind, &mut next, found),
                        Err(error) => found(code[at].address, error),
                    }
                }
            }
            let Some(unknown) = (0..code.len()).find(|at| states[*at].is_none() && !code[*at].is_padding()) else {
                break;
            };
            let mut state = State::believed(frame.rules(code[unknown].address));
            if state.depth.is_none() {
                // With a frame pointer the rules do not say it: use the distance at computed jumps.
                let computed = |at: &usize| code[*at].name == "jmp" && code[*at].target().is_none();
                let mut known = (0..code.len()).filter(computed).filter_map(|at| states[at].as_ref());
                state.depth = known.find(|known| known.pointer == state.pointer).and_then(|known| known.depth);
            }
            next.push((unknown, state));
        }
        states
    }

    /// The targets of an instruction.
    fn go_on(
        &self,
        frame: &Frame,
        code: &[Instruction],
        at: usize,
        state: State,
        next: &mut Vec<(usize, State)>,
        found: &mut dyn FnMut(u64, anyhow::Error),
    ) {
        let instruction = &code[at];
        if let Some(target) = instruction.target().filter(|_| instruction.is_jump()) {
            match code.binary_search_by_key(&target, |instruction| instruction.address) {
                Ok(target) => next.push((target, state.clone())),
                Err(_) if (frame.start..frame.end).contains(&target) => {
                    found(instruction.address, anyhow::anyhow!("the jump leads into the middle of an instruction"));
                }
                Err(_) => {
                    let same = self.rules(target).and_then(|rules| state.agrees(rules));
                    same.unwrap_or_else(|error| found(instruction.address, error.context("where it jumps to")));
                }
            }
        }
        if instruction.name == "ret" && state.depth != Some(8) {
            found(instruction.address, anyhow::anyhow!("the function returns at stack depth {:?}, not 8", state.depth));
        }
        if instruction.goes_on() && at + 1 < code.len() {
            next.push((at + 1, state));
        }
    }
}

/// Checks a built library, counted in a report with other checks.
pub(crate) fn into(report: &mut Report, library: &Path, listing: &Listing) -> Result<()> {
    println!("unwind information of {}", library.display());
    let frames = Frames::of(library)?;
    let check = Check { listing, frames: &frames };
    let mut uncovered = Vec::new();
    for instruction in &listing.instructions {
        // The signature of an abort exit, and the distance before it, are no code.
        let is_data = matches!(instruction.name.as_str(), "ud1" | "movabs")
            && listing.section(instruction.address) == "__rseq_failure";
        // Unwinders know the end of a signal handler by its bytes.
        let is_known = listing.section(instruction.address) == "__signal_return";
        if !is_data && !is_known && !instruction.is_padding() && frames.covering(instruction.address).is_none() {
            uncovered.push(format!("{:#x} in {}", instruction.address, listing.name(instruction.address)));
        }
    }
    report.check("every instruction has some", none(&uncovered));
    let mut wrong = Vec::new();
    for frame in &frames.0 {
        let mut found = |address: u64, error: anyhow::Error| {
            wrong.push(format!("{address:#x} in {}: {error:#}", listing.name(address)));
        };
        check.function(frame, &mut found).unwrap_or_else(|error| found(frame.start, error));
    }
    report.check("it is what the instructions do", none(&wrong));
    Ok(())
}

/// An error that shows the first findings.
fn none(found: &[String]) -> Result<()> {
    let shown = found.iter().take(SHOWN).fold(String::new(), |text, line| text + "\n    " + line);
    ensure!(found.is_empty(), "{} places, of which the first are:{shown}", found.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(name: &str, operands: &[&str]) -> Instruction {
        let operands = operands.iter().map(|operand| (*operand).to_string()).collect();
        Instruction { address: 0, end: 1, name: name.to_string(), operands, refers_to: None }
    }

    fn after(code: &[(&str, &[&str])]) -> State {
        code.iter()
            .fold(State::at_entry(), |state, (name, operands)| state.behind(&instruction(name, operands)).unwrap())
    }

    #[test]
    fn pushes_and_steps_are_counted() {
        let state = after(&[("push", &["rbx"]), ("sub", &["rsp", "0x28"]), ("xor", &["ebx", "ebx"])]);
        assert_eq!((state.depth, state.saved.get("rbx"), state.changed.contains("rbx")), (Some(56), Some(&16), true));
        let state = ["add", "pop"]
            .into_iter()
            .zip([&["rsp", "0x28"][..], &["rbx"]])
            .fold(state, |state, (name, of)| state.behind(&instruction(name, of)).unwrap());
        assert_eq!((state.depth, state.changed.len()), (Some(8), 0));
        let state = after(&[("push", &["rbp"]), ("mov", &["rbp", "rsp"]), ("and", &["rsp", "0xffffffffffffff80"])]);
        assert_eq!((state.depth, state.pointer), (None, Some(16)));
        let state = state.behind(&instruction("lea", &["rsp", "[rbp-0x28]"])).unwrap();
        assert_eq!(state.depth, Some(0x38));
        assert!(state.behind(&instruction("xchg", &["rsp", "rax"])).is_err());
    }

    #[test]
    fn rules_that_say_something_else_are_found() {
        let rules = |above, saved: &[(&str, i64)]| Rules {
            base: "rsp".to_string(),
            above,
            saved: saved.iter().map(|(name, below)| ((*name).to_string(), *below)).collect(),
            computed: None,
        };
        let state = after(&[("push", &["rbx"]), ("mov", &["rbx", "rdi"])]);
        assert!(state.agrees(&rules(16, &[("rbx", 16)])).is_ok());
        for wrong in [rules(8, &[("rbx", 16)]), rules(16, &[]), rules(16, &[("rbx", 24)])] {
            assert!(state.agrees(&wrong).is_err(), "{wrong:?}");
        }
        assert!(after(&[]).agrees(&rules(8, &[])).is_ok());
    }
}
