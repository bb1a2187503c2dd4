//! Computes the most stack that the functions of a library need, with all that they call.
//!
//! It follows direct calls and jumps, and calls by addresses in words that the linker filled. For
//! calls of other addresses, [`Stated`] names the targets.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};

use crate::library::listing::{Instruction, Listing};
use crate::library::rules::Frames;
use crate::library::unwind::{Address, Check, State};
use crate::process::{capture, command};

/// The target of a call.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Callee {
    /// A function of the library.
    Own(u64),
    /// A function of the C library.
    Other(String),
    /// An address that the code computes at run time.
    Unknown,
}

/// One function.
#[derive(Debug, Default)]
pub(crate) struct Function {
    /// Most bytes of its frame, return address included.
    pub(crate) frame: i64,
    /// The functions that it calls, with the bytes on the stack at the call.
    pub(crate) calls: BTreeMap<Callee, i64>,
}

/// All functions, by their addresses.
pub(crate) struct Graph<'a> {
    pub(crate) listing: &'a Listing,
    pub(crate) functions: BTreeMap<u64, Function>,
}

/// Contents of the library's words once it is loaded: the name of a symbol, or an address in it.
fn relocations(path: &str) -> Result<BTreeMap<u64, Callee>> {
    let defined: BTreeMap<String, u64> = capture(command("nm", ["-D", "--defined-only", path]))?
        .lines()
        .filter_map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            Some((words.get(2)?.split('@').next()?.to_string(), u64::from_str_radix(words.first()?, 16).ok()?))
        })
        .collect();
    let text = capture(command("readelf", ["-rW", path]))?;
    let relocation = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let at = u64::from_str_radix(words.first()?, 16).ok()?;
        let callee = match *words.get(2)? {
            "R_X86_64_RELATIVE" => Callee::Own(u64::from_str_radix(words.get(3)?, 16).ok()?),
            "R_X86_64_GLOB_DAT" | "R_X86_64_JUMP_SLOT" | "R_X86_64_64" => {
                let name = words.get(4)?.split('@').next()?;
                defined.get(name).map_or_else(|| Callee::Other(name.to_string()), |address| Callee::Own(*address))
            }
            _ => return None,
        };
        Some((at, callee))
    };
    Ok(text.lines().filter_map(relocation).collect())
}

impl Graph<'_> {
    /// Reads a library.
    pub(crate) fn of<'a>(library: &Path, listing: &'a Listing) -> Result<Graph<'a>> {
        let frames = Frames::of(library)?;
        let words = relocations(&library.to_string_lossy())?;
        let check = Check { listing, frames: &frames };
        let mut functions = BTreeMap::new();
        for frame in frames.0.iter().filter(|frame| frame.rules(frame.start).computed.is_none()) {
            let code = check.code(frame)?;
            let states = check.follow(frame, code, &mut |_, _| {});
            let mut function = Function::default();
            let aligned = aligned(code);
            for (instruction, state) in code.iter().zip(&states) {
                let Some(state) = state else { continue };
                let depth = state.depth.unwrap_or(aligned);
                function.frame = function.frame.max(depth);
                let inside = |target: &u64| (frame.start..frame.end).contains(target);
                let is_call = instruction.name == "call";
                let leaves =
                    is_call || instruction.is_jump() && instruction.target().is_none_or(|target| !inside(&target));
                if !leaves {
                    continue;
                }
                let callee = callee(instruction, state, &words);
                // Code of the function that lies elsewhere.
                let is_outside = |to: u64| frames.covering(to).is_some_and(|frame| frame.rules(to).computed.is_some());
                if matches!(callee, Callee::Own(to) if is_outside(to)) {
                    continue;
                }
                // A jump to a computed address stays in the function, if the stack still has a
                // frame.
                if !is_call && callee == Callee::Unknown && depth > 8 {
                    continue;
                }
                // The target of a jump takes over the return address.
                let depth = if is_call { depth } else { depth - 8 };
                let most = function.calls.entry(callee).or_default();
                *most = depth.max(*most);
            }
            functions.insert(frame.start, function);
        }
        Ok(Graph { listing, functions })
    }

    /// The name of a function.
    pub(crate) fn name(&self, address: u64) -> &str {
        self.listing.name(address)
    }
}

/// Most bytes of a frame with an aligned stack pointer: all steps of the function, and the most
/// that the alignment takes.
fn aligned(code: &[Instruction]) -> i64 {
    let steps = code.iter().map(|instruction| {
        let operand = |at: usize| instruction.operands.get(at).map_or("", String::as_str);
        let value = || u64::from_str_radix(operand(1).trim_start_matches("0x"), 16).unwrap_or_default().cast_signed();
        match (instruction.name.as_str(), operand(0)) {
            ("push", _) => 8,
            ("sub", "rsp") => value(),
            ("and", "rsp") => -value(),
            _ => 0,
        }
    });
    8 + steps.sum::<i64>()
}

/// The target of a call or jump.
fn callee(instruction: &Instruction, state: &State, words: &BTreeMap<u64, Callee>) -> Callee {
    let at = |slot: u64| words.get(&slot).cloned().unwrap_or(Callee::Unknown);
    if let Some(target) = instruction.target() {
        return Callee::Own(target);
    }
    if let Some(slot) = instruction.refers_to {
        return at(slot);
    }
    let known = instruction.operands.first().and_then(|operand| state.place(operand));
    match known.and_then(|place| state.addresses.get(&place)) {
        Some(Address::Here(address)) => Callee::Own(*address),
        Some(Address::At(slot)) => at(*slot),
        None => Callee::Unknown,
    }
}

/// The deepest path from a function.
#[derive(Clone, Debug, Default)]
pub(crate) struct Depth {
    pub(crate) bytes: i64,
    /// Functions on the path, with the bytes on the stack at the call of the next.
    pub(crate) way: Vec<(u64, i64)>,
}

/// Statements about the code that cannot be derived from it.
pub(crate) struct Stated<'a> {
    /// Parts of names of functions that call computed addresses, and parts, or ends with a `$`, of
    /// the names of the targets. The first match counts.
    pub(crate) unknown: &'a [(&'a str, &'a [&'a str])],
    /// Parts of names of functions that are counted separately.
    pub(crate) left_out: &'a [&'a str],
    /// Parts of names of functions that occur on a path more than once, and how often.
    pub(crate) repeated: &'a [(&'a str, i64)],
}

/// Follows all paths from functions.
pub(crate) struct Walk<'a> {
    graph: &'a Graph<'a>,
    stated: &'a Stated<'a>,
    known: BTreeMap<u64, Depth>,
    /// Functions on the current path, with the bytes on the stack at the call of the next.
    under_way: Vec<(u64, i64)>,
    /// The first of them that the path has led back to.
    lowest: usize,
    /// Bytes that functions need for paths back to them.
    again: BTreeMap<u64, i64>,
    /// Errors in the statements.
    pub(crate) wrong: BTreeSet<String>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(graph: &'a Graph<'a>, stated: &'a Stated<'a>) -> Walk<'a> {
        let (known, under_way, lowest, again) = (BTreeMap::new(), Vec::new(), usize::MAX, BTreeMap::new());
        Walk { graph, stated, known, under_way, lowest, again, wrong: BTreeSet::new() }
    }

    /// Returns the targets of calls of computed addresses.
    fn unknown(&mut self, from: u64) -> Vec<u64> {
        let (graph, name) = (self.graph, self.graph.name(from));
        let Some((_, callees)) = self.stated.unknown.iter().find(|(caller, _)| name.contains(caller)) else {
            self.wrong.insert(format!("{name} calls an address that nothing is said of"));
            return Vec::new();
        };
        let is_named = |name: &str, part: &str| match part.strip_suffix('$') {
            Some(end) => name.ends_with(end),
            None => name.contains(part),
        };
        let leads = |at: &u64| callees.iter().any(|callee| is_named(graph.name(*at), callee));
        let targets: Vec<u64> = graph.functions.keys().copied().filter(leads).collect();
        if targets.is_empty() && !callees.is_empty() {
            self.wrong.insert(format!("{name} calls {}, and no function has such a name", callees.join(" or ")));
        }
        targets
    }

    /// Handles a path back into a function on the current path: its bytes are added to that
    /// function's.
    fn circle(&mut self, from: usize) {
        self.lowest = self.lowest.min(from);
        let names: Vec<_> = self.under_way[from..].iter().map(|(at, _)| self.graph.name(*at)).collect();
        let times = self.stated.repeated.iter().find(|(part, _)| names.iter().any(|name| name.contains(part)));
        let once: i64 = self.under_way[from..].iter().map(|(_, bytes)| bytes).sum();
        match times {
            Some((_, times)) => {
                let again = self.again.entry(self.under_way[from].0).or_default();
                *again = (*again).max((times - 1) * once);
            }
            None => _ = self.wrong.insert(format!("a circle: {}", names.join(" > "))),
        }
    }

    /// Returns the most bytes of a function, with its return address and all that it calls.
    pub(crate) fn depth(&mut self, address: u64) -> Result<Depth> {
        if let Some(known) = self.known.get(&address) {
            return Ok(known.clone());
        }
        if let Some(from) = self.under_way.iter().position(|(other, _)| *other == address) {
            self.circle(from);
            return Ok(Depth::default());
        }
        let (graph, name) = (self.graph, self.graph.name(address));
        if self.stated.left_out.iter().any(|part| name.contains(part)) {
            return Ok(Depth::default());
        }
        let function = graph.functions.get(&address).with_context(|| format!("{address:#x} is no function"))?;
        let (own, before) = (self.under_way.len(), core::mem::replace(&mut self.lowest, usize::MAX));
        let mut deepest = Depth { bytes: function.frame, way: vec![(address, function.frame)] };
        for (callee, at) in &function.calls {
            let callees = match callee {
                Callee::Own(callee) => vec![*callee],
                Callee::Other(_) => continue,
                Callee::Unknown => self.unknown(address),
            };
            for callee in callees {
                self.under_way.push((address, *at));
                let below = self.depth(callee)?;
                self.under_way.pop();
                if at + below.bytes > deepest.bytes {
                    deepest.bytes = at + below.bytes;
                    deepest.way = vec![(address, *at)];
                    deepest.way.extend(below.way);
                }
            }
        }
        deepest.bytes += self.again.remove(&address).unwrap_or(0);
        // A callee that leads back to a function on the path needs more when called elsewhere.
        if self.lowest >= own {
            self.known.insert(address, deepest.clone());
            self.lowest = usize::MAX;
        }
        self.lowest = self.lowest.min(before);
        Ok(deepest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_as_deep_as_its_calls() {
        let line = |calls: &[(Callee, i64)], frame| Function { frame, calls: calls.iter().cloned().collect() };
        let listing = Listing::named(&[(1, "first"), (2, "second"), (3, "third"), (4, "closure")]);
        let functions = BTreeMap::from([
            (1, line(&[(Callee::Own(2), 40), (Callee::Other("memcpy".to_string()), 56)], 56)),
            (2, line(&[(Callee::Own(3), 0), (Callee::Unknown, 24)], 24)),
            (3, line(&[(Callee::Own(2), 16)], 16)),
            (4, line(&[], 100)),
        ]);
        let graph = Graph { listing: &listing, functions };
        let depth = |stated: &Stated<'_>| {
            let mut walk = Walk::new(&graph, stated);
            (walk.depth(1).unwrap().bytes, walk.wrong.len())
        };
        let unknown: &[(&str, &[&str])] = &[("second", &["closure"])];
        // Second and third take 16 bytes together, once more where they are said to repeat.
        assert_eq!(depth(&Stated { unknown, left_out: &[], repeated: &[("third", 2)] }), (40 + 16 + 24 + 100, 0));
        assert_eq!(
            depth(&Stated { unknown, left_out: &["closure"], repeated: &[("third", 5)] }),
            (40 + 4 * 16 + 24, 0)
        );
        assert_eq!(depth(&Stated { unknown: &[], left_out: &[], repeated: &[] }), (64, 2));
        let renamed: &[(&str, &[&str])] = &[("second", &["closed"])];
        assert_eq!(depth(&Stated { unknown: renamed, left_out: &[], repeated: &[("third", 2)] }), (40 + 16 + 24, 1));
    }
}
