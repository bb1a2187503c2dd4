//! The instructions of the sequences, from `objdump`'s text to steps that are the same on both
//! processors.
//!
//! An instruction that does several things has several steps. Values that it only passes on lie in
//! the register [`BETWEEN`]. An instruction that no sequence has today is an error.

use anyhow::{Context, Result, bail};

use super::sum::Sum;

/// A register's name, the same for all its parts: `rax` for `eax`.
type Register = String;

/// A sum of registers.
pub(super) type Operand = Sum<Register>;

/// The result that a comparison must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    Equal,
    Unequal,
    Less,
    AtMost,
    Greater,
    AtLeast,
}

/// A part of an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Set(Register, Operand),
    /// The register becomes some other function of these values.
    Mix(Register, Vec<Operand>),
    /// The register becomes the word at an address.
    Load(Register, Operand),
    /// Stores into the word at an address.
    Store {
        to: Operand,
        value: Operand,
        release: bool,
    },
    Compare(Operand, Operand),
    /// Goes on at an address if the last comparison came out so.
    Branch(Condition, u64),
    /// The register becomes the value if the last comparison came out so.
    SetIf(Condition, Register, Operand),
}

/// The register between two steps of one instruction.
const BETWEEN: &str = "between";

/// The register that holds the start of the thread's own data on x86-64.
pub(super) const THREAD: &str = "fs";

/// The steps of an instruction of `objdump -M intel` at an address.
pub(super) fn x86_64(at: u64, text: &str) -> Result<Vec<Step>> {
    // `objdump` adds the address that an offset from the instruction leads to.
    let (text, address) = text.split_once('#').unwrap_or((text, ""));
    let text = text.trim();
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let parts = operands(rest);
    let part = |index: usize| parts.get(index).copied().context("an operand is missing");
    let mut steps = Vec::new();
    let value = |index: usize, steps: &mut Vec<Step>| -> Result<Operand> {
        let text = part(index)?;
        Ok(match x86_address(text)? {
            Some(address) => {
                steps.push(Step::Load(BETWEEN.into(), address));
                Sum::of(BETWEEN.into())
            }
            None => x86_value(text)?,
        })
    };
    // Sets the first operand.
    let into = |value: Operand, steps: &mut Vec<Step>| -> Result<()> {
        steps.push(match x86_address(part(0)?)? {
            Some(to) => Step::Store { to, value, release: true },
            None => Step::Set(x86_register(part(0)?)?, value),
        });
        Ok(())
    };
    match name {
        "mov" | "movsxd" | "movzx" => {
            let new = value(1, &mut steps)?;
            into(new, &mut steps)?;
        }
        "lea" if rest.contains("[rip") => into(Sum::constant(target(address)? as i64), &mut steps)?,
        "lea" => into(x86_address(part(1)?)?.context("no address")?, &mut steps)?,
        "add" | "sub" => {
            let added = value(1, &mut steps)?;
            let old = value(0, &mut steps)?;
            into(old.plus(&added, if name == "add" { 1 } else { -1 }), &mut steps)?;
        }
        "neg" => into(Sum::constant(0).plus(&value(0, &mut steps)?, -1), &mut steps)?,
        "xor" | "tzcnt" | "shrx" | "shr" => {
            // `xor` and `shr` are functions of their first operand, too.
            let first = usize::from(name == "tzcnt" || name == "shrx");
            let of = (first..parts.len()).map(|index| value(index, &mut steps)).collect::<Result<_>>()?;
            steps.push(Step::Mix(x86_register(part(0)?)?, of));
        }
        "cmp" => {
            let [left, right] = [value(0, &mut steps)?, value(1, &mut steps)?];
            steps.push(Step::Compare(left, right));
        }
        "test" if part(0)? == part(1)? => {
            let tested = value(0, &mut steps)?;
            steps.push(Step::Compare(tested, Sum::constant(0)));
        }
        "rep" if rest.starts_with("movs") => {
            let [from, to] = ["rsi", "rdi"].map(|name| Sum::of(name.to_string()));
            steps.push(Step::Load(BETWEEN.into(), from.clone()));
            steps.push(Step::Store { to: to.clone(), value: Sum::of(BETWEEN.into()), release: true });
            for register in [from, to] {
                let name = register.terms.keys().next().expect("a register").clone();
                steps.push(Step::Set(name, register.plus(&Sum::constant(8), 1)));
            }
            steps.push(Step::Mix("rcx".into(), Vec::new()));
            steps.push(Step::Branch(Condition::Unequal, at));
        }
        _ => {
            if let Some(condition) = name.strip_prefix("cmov").and_then(x86_condition) {
                let new = value(1, &mut steps)?;
                steps.push(Step::SetIf(condition, x86_register(part(0)?)?, new));
            } else if let Some(condition) = name.strip_prefix('j').and_then(x86_condition) {
                steps.push(Step::Branch(condition, target(part(0)?)?));
            } else {
                bail!("no sequence has the instruction `{text}`");
            }
        }
    }
    Ok(steps)
}

/// The steps of an instruction of arm64.
pub(super) fn aarch64(_at: u64, text: &str) -> Result<Vec<Step>> {
    let text = text.split("//").next().unwrap_or(text).trim();
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let parts = operands(rest);
    let part = |index: usize| parts.get(index).copied().context("an operand is missing");
    let register = |index: usize| part(index).map(arm_register);
    let value = |index: usize| arm_value(&parts[index.min(parts.len())..]);
    let mut steps = Vec::new();
    match name {
        "ldr" | "ldur" | "ldar" | "ldrb" | "ldurb" | "ldp" | "str" | "stur" | "stlr" => {
            let count = if name == "ldp" { 2 } else { 1 };
            let (address, base) = arm_address(&parts[count..])?;
            // A store's value is that before the base moves.
            for index in 0..count {
                let at = address.clone().plus(&Sum::constant(8 * index as i64), 1);
                steps.push(match name.starts_with("ld") {
                    true => Step::Load(register(index)?, at),
                    false => Step::Store { to: at, value: value_of(&register(index)?), release: name == "stlr" },
                });
            }
            steps.extend(base);
        }
        "mov" => steps.push(Step::Set(register(0)?, value(1)?)),
        "adrp" => steps.push(Step::Set(register(0)?, Sum::constant(target(part(1)?)? as i64))),
        "add" => steps.push(Step::Set(register(0)?, value_of(&register(1)?).plus(&value(2)?, 1))),
        "sub" | "subs" => {
            let new = value_of(&register(1)?).plus(&value(2)?, -1);
            steps.push(Step::Set(register(0)?, new));
            if name == "subs" {
                steps.push(Step::Compare(value_of(&register(0)?), Sum::constant(0)));
            }
        }
        "eor" | "rbit" | "clz" | "lsr" => {
            let of = parts.iter().skip(1).map(|part| arm_value(&[*part])).collect::<Result<_>>()?;
            steps.push(Step::Mix(register(0)?, of));
        }
        "cmp" => steps.push(Step::Compare(value_of(&register(0)?), value(1)?)),
        "cmn" => steps.push(Step::Compare(value_of(&register(0)?), Sum::constant(0).plus(&value(1)?, -1))),
        "csel" => {
            let condition = arm_condition(part(3)?).context("no condition")?;
            steps.push(Step::Set(BETWEEN.into(), value_of(&register(2)?)));
            steps.push(Step::SetIf(condition, BETWEEN.into(), value_of(&register(1)?)));
            steps.push(Step::Set(register(0)?, Sum::of(BETWEEN.into())));
        }
        "cbz" | "cbnz" => {
            steps.push(Step::Compare(value_of(&register(0)?), Sum::constant(0)));
            let condition = if name == "cbz" { Condition::Equal } else { Condition::Unequal };
            steps.push(Step::Branch(condition, target(part(1)?)?));
        }
        _ => {
            let condition = name.strip_prefix("b.").and_then(arm_condition);
            let condition = condition.with_context(|| format!("no sequence has the instruction `{text}`"))?;
            steps.push(Step::Branch(condition, target(part(0)?)?));
        }
    }
    Ok(steps)
}

/// The parts between commas outside brackets.
fn operands(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let parts = text.split(move |c| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// The address of a branch, before the name of its function.
fn target(text: &str) -> Result<u64> {
    let digits = text.split_whitespace().next().unwrap_or_default();
    u64::from_str_radix(digits, 16).with_context(|| format!("`{text}` is no address"))
}

fn number(text: &str) -> Option<i64> {
    let (sign, digits) = text.strip_prefix('-').map_or((1, text), |digits| (-1, digits));
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some((value as i64).wrapping_mul(sign))
}

fn value_of(register: &str) -> Operand {
    if register == "xzr" { Sum::constant(0) } else { Sum::of(register.to_string()) }
}

/// The 64-bit register of a part of it.
fn x86_register(name: &str) -> Result<Register> {
    const OLD: [[&str; 2]; 8] = [
        ["rax", "ax"],
        ["rbx", "bx"],
        ["rcx", "cx"],
        ["rdx", "dx"],
        ["rsi", "si"],
        ["rdi", "di"],
        ["rbp", "bp"],
        ["rsp", "sp"],
    ];
    let old = OLD.iter().find(|[whole, part]| name == *whole || name.trim_start_matches('e') == *part);
    let new = name.trim_end_matches(['d', 'w', 'b']);
    match old {
        Some([whole, _]) => Ok((*whole).to_string()),
        None if new.starts_with('r') && new[1..].parse::<u8>().is_ok() => Ok(new.to_string()),
        None => bail!("`{name}` is no register"),
    }
}

fn x86_value(text: &str) -> Result<Operand> {
    match number(text) {
        Some(number) => Ok(Sum::constant(number)),
        None => Ok(Sum::of(x86_register(text)?)),
    }
}

/// `QWORD PTR fs:[rax+rcx*8-0x10]` or `[rax]`; `None` for another operand.
fn x86_address(text: &str) -> Result<Option<Operand>> {
    let Some((before, rest)) = text.split_once('[') else { return Ok(None) };
    let inside = rest.trim_end_matches(']').replace('-', "+-");
    let start = if before.ends_with("fs:") { Sum::of(THREAD.to_string()) } else { Sum::constant(0) };
    let sum = inside.split('+').try_fold(start, |sum, part| {
        let (name, times) = part.split_once('*').unwrap_or((part, "1"));
        let times = number(times).with_context(|| format!("`{text}` is no address"))?;
        anyhow::Ok(sum.plus(&x86_value(name)?, times))
    })?;
    Ok(Some(sum))
}

fn x86_condition(name: &str) -> Option<Condition> {
    Some(match name {
        "e" => Condition::Equal,
        "ne" => Condition::Unequal,
        "b" | "l" => Condition::Less,
        "be" | "le" => Condition::AtMost,
        "a" | "g" => Condition::Greater,
        "ae" | "ge" => Condition::AtLeast,
        _ => return None,
    })
}

/// The 64-bit register of its lower half.
fn arm_register(name: &str) -> Register {
    if name.starts_with('w') { name.replacen('w', "x", 1) } else { name.to_string() }
}

/// A register or a number, with a shift to the left or an extension behind it.
fn arm_value(parts: &[&str]) -> Result<Operand> {
    let (first, shift) = (*parts.first().context("an operand is missing")?, parts.get(1));
    let value = match first.strip_prefix('#') {
        Some(digits) => Sum::constant(number(digits).with_context(|| format!("`{first}` is no number"))?),
        None => value_of(&arm_register(first)),
    };
    let bits = match shift.map(|shift| shift.split_once('#').unwrap_or((shift, "0"))) {
        None => 0,
        Some((kind, bits)) if ["lsl", "sxtw", "uxtw", "uxth"].contains(&kind.trim()) => {
            number(bits).with_context(|| format!("`{bits}` is no number"))?
        }
        Some((kind, _)) => bail!("no sequence has the operand `{kind}`"),
    };
    Ok(Sum::constant(0).plus(&value, 1 << bits))
}

/// `[x8, x9, lsl #3]`, `[x8, #-8]!` or `[x8], #8`: the address, and the step that moves the base.
fn arm_address(parts: &[&str]) -> Result<(Operand, Option<Step>)> {
    let text = *parts.first().context("an operand is missing")?;
    let before = text.ends_with('!');
    let inside = operands(text.trim_end_matches('!').trim_start_matches('[').trim_end_matches(']'));
    let base = arm_register(inside.first().context("no base")?);
    let offset = if inside.len() > 1 { arm_value(&inside[1..])? } else { Sum::constant(0) };
    let address = value_of(&base).plus(&offset, 1);
    let moved = match parts.get(1) {
        Some(_) => Some(value_of(&base).plus(&arm_value(&parts[1..])?, 1)),
        None => before.then(|| address.clone()),
    };
    // A load of a pair moves nothing in between. The base moves after the access, which uses
    // `address`.
    Ok((address, moved.map(|sum| Step::Set(base, sum))))
}

fn arm_condition(name: &str) -> Option<Condition> {
    Some(match name {
        "eq" => Condition::Equal,
        "ne" => Condition::Unequal,
        "lo" | "cc" | "lt" => Condition::Less,
        "ls" | "le" => Condition::AtMost,
        "hi" | "gt" => Condition::Greater,
        "hs" | "cs" | "ge" => Condition::AtLeast,
        _ => return None,
    })
}
