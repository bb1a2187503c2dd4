//! Unwind information of a shared object: the frames of `.eh_frame` and their rules at every
//! address, as printed by `readelf` of binutils.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{capture, command};

/// The rules by which unwinding gets from an instruction to its caller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rules {
    /// The register that the frame's address is this far above.
    pub(crate) base: String,
    pub(crate) above: i64,
    /// Registers that lie this far below the frame's address; `rip` is the return address.
    pub(crate) saved: BTreeMap<String, i64>,
    /// The return address as an expression, if it does not lie on the stack.
    pub(crate) computed: Option<String>,
}

/// A range of code, and the rules from addresses in it on.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) start: u64,
    pub(crate) end: u64,
    rows: Vec<(u64, Rules)>,
}

impl Frame {
    /// The rules at an address.
    pub(crate) fn rules(&self, address: u64) -> &Rules {
        let behind = self.rows.partition_point(|(from, _)| *from <= address);
        &self.rows[behind.saturating_sub(1)].1
    }
}

/// All frames, in the order of their addresses.
#[derive(Debug)]
pub(crate) struct Frames(pub(crate) Vec<Frame>);

impl Frames {
    /// Reads the frames of a shared object.
    pub(crate) fn of(library: &Path) -> Result<Frames> {
        let path = library.to_string_lossy();
        let frames = parsed(&capture(command("readelf", ["--debug-dump=frames", &path]))?)?;
        ensure!(!frames.is_empty(), "{path}: readelf lists no unwind information");
        Ok(Frames(frames))
    }

    /// The frame that covers an address.
    pub(crate) fn covering(&self, address: u64) -> Option<&Frame> {
        let behind = self.0.partition_point(|frame| frame.start <= address);
        self.0[..behind].last().filter(|frame| address < frame.end)
    }
}

/// The register in parentheses behind its number.
fn register(text: &str) -> Option<&str> {
    text.split_once('(')?.1.split_once(')').map(|(name, _)| name)
}

/// Applies one line of `readelf` to the rules.
fn apply(line: &str, initial: &Rules, kept: &mut Vec<Rules>, rules: &mut Rules) -> Result<()> {
    let (operation, operands) = line.split_once(": ").unwrap_or((line, ""));
    let last = || operands.rsplit([' ', ':']).next().unwrap_or_default().parse::<i64>();
    let name = || register(operands).map(str::to_string).context("no register");
    match operation.trim_start_matches("DW_CFA_") {
        "nop" => {}
        "def_cfa" => (rules.base, rules.above) = (name()?, last()?),
        "def_cfa_offset" => rules.above = last()?,
        "def_cfa_register" => rules.base = name()?,
        "offset" => {
            let below = operands.rsplit("cfa-").next().unwrap_or_default();
            rules.saved.insert(name()?, below.parse()?);
        }
        "restore" => {
            let name = name()?;
            match initial.saved.get(&name) {
                Some(below) => rules.saved.insert(name, *below),
                None => rules.saved.remove(&name),
            };
        }
        // The return address while the stack is lent to another process: its register is not
        // checked.
        "register" if name()? == "rip" => _ = rules.saved.remove("rip"),
        "remember_state" => kept.push(rules.clone()),
        "restore_state" => *rules = kept.pop().context("no state is kept")?,
        "val_expression" if name()? == "rip" => {
            rules.computed = operands.split_once("(rip) ").map(|(_, expression)| expression.to_string());
            rules.saved.remove("rip");
        }
        other => bail!("the check does not know {other}"),
    }
    Ok(())
}

/// Frames in the text of `readelf --debug-dump=frames`.
fn parsed(text: &str) -> Result<Vec<Frame>> {
    let mut heads: BTreeMap<&str, Rules> = BTreeMap::new();
    let mut frames: Vec<Frame> = Vec::new();
    let (mut initial, mut kept, mut rules) = (Rules::default(), Vec::new(), Rules::default());
    let mut head = None;
    for line in text.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        if words.get(3) == Some(&"CIE") {
            head = words.first().copied();
            rules = Rules::default();
        } else if words.get(3) == Some(&"FDE") {
            head = None;
            let named = |key: &str| words.iter().find_map(|word| word.strip_prefix(key));
            initial = named("cie=").and_then(|cie| heads.get(cie)).context("a frame without a head")?.clone();
            let (start, end) = named("pc=").and_then(|range| range.split_once("..")).context("a frame without code")?;
            let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16));
            let (start, end) = (start?, end?);
            (rules, kept) = (initial.clone(), Vec::new());
            frames.push(Frame { start, end, rows: vec![(start, rules.clone())] });
        } else if let Some(line) = line.trim_start().strip_prefix("DW_CFA_") {
            if line.starts_with("advance_loc") {
                let to = line.rsplit(' ').next().unwrap_or_default();
                let to = u64::from_str_radix(to, 16).with_context(|| line.to_string())?;
                frames.last_mut().context("no frame")?.rows.push((to, rules.clone()));
                continue;
            }
            apply(line, &initial, &mut kept, &mut rules).with_context(|| line.to_string())?;
            match head {
                Some(head) => _ = heads.insert(head, rules.clone()),
                None => {
                    let row = frames.last_mut().and_then(|frame| frame.rows.last_mut());
                    row.context("no frame")?.1 = rules.clone();
                }
            }
        }
    }
    frames.sort_by_key(|frame| frame.start);
    Ok(frames)
}

/// The value of an expression as `readelf` prints it, at an instruction; `word` reads memory.
pub(crate) fn evaluate(expression: &str, rip: u64, word: impl Fn(u64) -> Option<u64>) -> Result<u64> {
    let mut stack: Vec<u64> = Vec::new();
    for step in expression.trim_matches(['(', ')']).split("; ") {
        let (operation, operand) = step.split_once(": ").unwrap_or((step, "0"));
        let number = operand.trim().parse::<i64>().with_context(|| step.to_string())?.cast_unsigned();
        let operation = operation.trim_start_matches("DW_OP_");
        let mut pop = || stack.pop().with_context(|| format!("{step}: nothing is left"));
        let value = match operation {
            "breg16 (rip)" => rip.wrapping_add(number),
            "const1s" | "const2s" => number,
            "plus_uconst" => pop()?.wrapping_add(number),
            "plus" => pop()?.wrapping_add(pop()?),
            "and" => pop()? & pop()?,
            "dup" => *stack.last().context("nothing to repeat")?,
            "deref" => {
                let address = pop()?;
                word(address).with_context(|| format!("no memory at {address:#x}"))?
            }
            other => bail!("the check does not know DW_OP_{other}"),
        };
        stack.push(value);
    }
    stack.pop().context("an empty expression")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
00000000 0000000000000014 00000000 CIE
  Version:               1
  DW_CFA_def_cfa: r7 (rsp) ofs 8
  DW_CFA_offset: r16 (rip) at cfa-8
  DW_CFA_nop

00000018 000000000000001c 0000001c FDE cie=00000000 pc=0000000000000010..0000000000000020
  DW_CFA_advance_loc: 1 to 0000000000000011
  DW_CFA_def_cfa_offset: 16
  DW_CFA_offset: r3 (rbx) at cfa-16
  DW_CFA_remember_state
  DW_CFA_advance_loc: 4 to 0000000000000015
  DW_CFA_restore: r3 (rbx)
  DW_CFA_advance_loc: 4 to 0000000000000019
  DW_CFA_restore_state
";

    #[test]
    fn rules_change_from_address_to_address() {
        let frames = Frames(parsed(TEXT).unwrap());
        let frame = frames.covering(0x1f).unwrap();
        assert!(frames.covering(0xf).is_none() && frames.covering(0x20).is_none());
        let at = |address| {
            let rules = frame.rules(address);
            (rules.above, rules.saved.get("rbx").copied(), rules.saved["rip"])
        };
        assert_eq!([0x10, 0x11, 0x14].map(at), [(8, None, 8), (16, Some(16), 8), (16, Some(16), 8)]);
        assert_eq!([0x15, 0x19].map(at), [(16, None, 8), (16, Some(16), 8)]);
    }

    #[test]
    fn an_expression_has_a_value() {
        let text = "(DW_OP_breg16 (rip): 0; DW_OP_const1s: -32; DW_OP_and; DW_OP_dup; DW_OP_plus_uconst: 2; DW_OP_deref; \
                    DW_OP_plus)";
        let word = |address| (address == 0x1042).then_some(0_u64.wrapping_sub(0x100));
        assert_eq!(evaluate(text, 0x1055, word).unwrap(), 0x1040 - 0x100);
        assert!(evaluate(text, 0x1065, word).is_err());
        assert!(evaluate("(DW_OP_lit0)", 0, word).is_err());
    }
}
