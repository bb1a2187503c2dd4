//! A shared object as its instructions, by `objdump`, `readelf` and `nm` of binutils: for the
//! checks of unwind information and of stack depths.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::process::{capture, command};

/// An instruction in Intel's notation.
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    /// The instruction's address, and the address of the next one.
    pub(crate) address: u64,
    pub(crate) end: u64,
    /// The instruction's name, without prefixes.
    pub(crate) name: String,
    /// The instruction's operands.
    pub(crate) operands: Vec<String>,
    /// The address of an operand that is relative to the instruction pointer.
    pub(crate) refers_to: Option<u64>,
}

impl Instruction {
    /// The target of a direct jump or call.
    pub(crate) fn target(&self) -> Option<u64> {
        let first = self.operands.first()?.split_whitespace().next()?;
        if self.is_jump() || self.name == "call" { u64::from_str_radix(first, 16).ok() } else { None }
    }

    /// Whether it may continue elsewhere than after itself; a call returns.
    pub(crate) fn is_jump(&self) -> bool {
        self.name.starts_with('j')
    }

    /// Whether the next instruction may follow it.
    pub(crate) fn goes_on(&self) -> bool {
        !matches!(self.name.as_str(), "jmp" | "ret" | "ud2" | "ud1" | "int3" | "hlt")
    }

    /// Whether it only fills the space between functions.
    pub(crate) fn is_padding(&self) -> bool {
        matches!(self.name.as_str(), "int3" | "nop")
            || (self.name == "xchg" && self.operands == ["ax".to_string(), "ax".to_string()])
    }
}

/// A section of the file.
#[derive(Debug)]
struct Section {
    name: String,
    address: u64,
    offset: u64,
    size: u64,
    code: bool,
}

/// All code of a shared object.
#[derive(Debug)]
pub(crate) struct Listing {
    bytes: Vec<u8>,
    sections: Vec<Section>,
    /// Ordered by address.
    pub(crate) instructions: Vec<Instruction>,
    /// Names of functions, without hashes.
    names: BTreeMap<u64, String>,
}

const PREFIXES: &[&str] =
    &["lock", "rep", "repz", "repnz", "repe", "repne", "notrack", "bnd", "data16", "cs", "ds", "es", "ss", "rex.W"];

/// The instruction of a line of `objdump`, without its end.
fn instruction(line: &str) -> Option<Instruction> {
    let (address, text) = line.trim_start().split_once(":\t")?;
    let address = u64::from_str_radix(address, 16).ok()?;
    let (text, comment) = text.split_once('#').unwrap_or((text, ""));
    let refers_to = comment.split_whitespace().next().and_then(|word| u64::from_str_radix(word, 16).ok());
    let mut words = text.trim();
    while let Some(rest) = words.split_once(' ').filter(|(first, _)| PREFIXES.contains(first)) {
        words = rest.1.trim_start();
    }
    let (name, operands) = words.split_once(' ').unwrap_or((words, ""));
    let operands = operands.split(',').map(|operand| operand.trim().to_string()).filter(|text| !text.is_empty());
    Some(Instruction { address, end: 0, name: name.to_string(), operands: operands.collect(), refers_to })
}

/// Sections as `readelf -SW` lists them.
fn sections(text: &str) -> Vec<Section> {
    let section = |line: &str| {
        let (_, rest) = line.trim_start().strip_prefix('[')?.split_once(']')?;
        let words: Vec<_> = rest.split_whitespace().collect();
        let number = |at: usize| u64::from_str_radix(words.get(at)?, 16).ok();
        Some(Section {
            name: (*words.first()?).to_string(),
            address: number(2)?,
            offset: number(3)?,
            size: number(4)?,
            code: words.get(6)?.contains('X'),
        })
    };
    text.lines().filter_map(section).collect()
}

impl Listing {
    /// Reads a shared object.
    pub(crate) fn of(library: &Path) -> Result<Listing> {
        let path = library.to_string_lossy();
        let bytes = fs::read(library).with_context(|| path.to_string())?;
        let sections = sections(&capture(command("readelf", ["-SW", &path]))?);
        let text = capture(command("objdump", ["-d", "-w", "-M", "intel", "--no-show-raw-insn", &path]))?;
        let mut instructions: Vec<_> = text.lines().filter_map(instruction).collect();
        for at in 0..instructions.len() {
            let address = instructions[at].address;
            let section = sections.iter().find(|section| section.code && section.holds(address));
            let last = section.map(|section| section.address + section.size).context("an instruction in no section")?;
            instructions[at].end = instructions.get(at + 1).map_or(last, |next| next.address.min(last));
        }
        ensure!(!instructions.is_empty(), "{path}: objdump lists no instruction");
        let names = names(&capture(command("nm", ["-C", "--defined-only", &path]))?);
        Ok(Listing { bytes, sections, instructions, names })
    }

    /// A file with functions of these names, and no code.
    #[cfg(test)]
    pub(crate) fn named(names: &[(u64, &str)]) -> Listing {
        let names = names.iter().map(|(address, name)| (*address, (*name).to_string())).collect();
        Listing { bytes: Vec::new(), sections: Vec::new(), instructions: Vec::new(), names }
    }

    /// The instruction that begins at an address, by number.
    pub(crate) fn at(&self, address: u64) -> Option<usize> {
        self.instructions.binary_search_by_key(&address, |instruction| instruction.address).ok()
    }

    /// The name of the section that holds an address.
    pub(crate) fn section(&self, address: u64) -> &str {
        self.sections.iter().find(|section| section.holds(address)).map_or("", |section| &section.name)
    }

    /// The eight bytes at an address, in the file.
    pub(crate) fn word(&self, address: u64) -> Option<u64> {
        let section = self.sections.iter().find(|section| section.holds(address) && section.holds(address + 7))?;
        let from = (section.offset + (address - section.address)) as usize;
        Some(u64::from_le_bytes(self.bytes.get(from..from + 8)?.try_into().ok()?))
    }

    /// The name of the function at an address, if the file has it.
    pub(crate) fn name(&self, address: u64) -> &str {
        self.names.range(..=address).next_back().map_or("?", |(_, name)| name)
    }
}

impl Section {
    fn holds(&self, address: u64) -> bool {
        self.address > 0 && (self.address..self.address + self.size).contains(&address)
    }
}

/// Functions of `nm -C`. Of several at an address, keeps the longest name: a shorter one may be
/// only an alias for C.
fn names(nm: &str) -> BTreeMap<u64, String> {
    let mut names: BTreeMap<u64, String> = BTreeMap::new();
    for line in nm.lines() {
        let mut words = line.splitn(3, ' ');
        let (Some(address), Some(kind), Some(name)) = (words.next(), words.next(), words.next()) else { continue };
        let Ok(address) = u64::from_str_radix(address, 16) else { continue };
        if !matches!(kind, "T" | "t" | "W" | "w") {
            continue;
        }
        let known = names.entry(address).or_default();
        if name.len() > known.len() {
            *known = name.to_string();
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_an_instruction_with_operands() {
        let found = instruction("   5fd99:\tjae    5fe04 <_ZdlPv+0x84>").unwrap();
        assert_eq!((found.address, found.name.as_str(), found.target()), (0x5fd99, "jae", Some(0x5fe04)));
        let found = instruction("  1f:\tlock cmpxchg DWORD PTR [rsp+0x7e0],ecx").unwrap();
        assert_eq!((found.name.as_str(), found.operands.len(), found.target()), ("cmpxchg", 2, None));
        let found = instruction("  1f:\tcall   QWORD PTR [rip+0x10]        # 40 <memcpy@GLIBC_2.14>").unwrap();
        assert_eq!((found.refers_to, found.target(), found.goes_on()), (Some(0x40), None, true));
        assert!(instruction("0000000000034300 <cfree>:").is_none());
    }

    #[test]
    fn a_section_line_has_an_address_and_flags() {
        let line = "  [12] .text             PROGBITS        0000000000019f80 018f80 114e8c 00  AX  0   0 64";
        let found = &sections(line)[0];
        assert_eq!((found.address, found.offset, found.size, found.code), (0x19f80, 0x18f80, 0x0011_4e8c, true));
        assert!(sections("  [Nr] Name              Type            Address").is_empty());
    }
}
