//! Checks malloc and free of a small object in the built library: the number of instructions, and
//! of cache lines.
//!
//! From its entry to its first return each function runs straight ahead, unless a jump is taken in
//! a rare case. `objdump` of binutils reads the library. If there are fewer instructions than the
//! least, another return comes first. A third cache line costs more than the instructions in it:
//! see docs/design/fast-path.md.

use core::ops::RangeInclusive;

use anyhow::{Context, Result, ensure};

use crate::process::{capture, command};
use crate::report::Report;
use crate::target::Target;

/// Functions, and the number of instructions to their first return.
type Limits = [(&'static str, RangeInclusive<usize>); 2];

const LIMITS: Limits = [("malloc", 25..=27), ("free", 30..=31)];

/// The limits on arm64, whose instructions have no operand in memory, and four bytes each.
const LIMITS_ARM64: Limits = [("malloc", 38..=40), ("free", 41..=43)];

/// Bytes of a cache line, and the number of lines of these functions.
const LINE: usize = 64;
const LINES: usize = 2;
const LINES_ARM64: usize = 4;

/// Instructions from a function's entry to its first return, and their bytes, in the output of
/// `objdump`.
fn straight(listing: &str) -> Option<(usize, usize)> {
    let instructions: Vec<_> = listing.lines().filter_map(|line| line.trim_start().split_once(":\t")).collect();
    let address = |number: usize| usize::from_str_radix(instructions[number].0, 16).ok();
    let (mut at, mut count) = (0, 1);
    while instructions.get(at)?.1.trim() != "ret" {
        // The sequences of arm64 branch around their abort exit.
        let branch = instructions[at].1.strip_prefix("b\t").and_then(|to| to.split(' ').next());
        let to = branch.and_then(|to| instructions.iter().position(|(address, _)| *address == to));
        let next = if branch.is_some() { to? } else { at + 1 };
        (at, count) = (next, count + 1);
    }
    Some((count, address(at)? - address(0)?))
}

/// Number of cache lines of a function that starts at `start` and has `bytes` bytes.
fn lines(start: usize, bytes: usize) -> usize {
    (start + bytes) / LINE - start / LINE + 1
}

/// Checks the built library, counted in a report with other checks.
pub(crate) fn into(report: &mut Report, target: Target) -> Result<()> {
    let library = target.library();
    let (limits, most) = match target {
        Target::Native | Target::Musl => (LIMITS, LINES),
        Target::Arm64 => (LIMITS_ARM64, LINES_ARM64),
    };
    let path = library.to_string_lossy();
    println!("fast paths of {path}");
    let symbols = capture(command(&target.tool("nm"), ["-D", "--defined-only", &path]))?;
    for (name, limits) in limits {
        let counted = || {
            let address = symbols.lines().find(|line| line.split_whitespace().nth(2) == Some(name));
            let address = address.and_then(|line| line.split_whitespace().next()).context("it is not exported")?;
            let start = usize::from_str_radix(address, 16)?;
            let (from, to) = (format!("--start-address={start:#x}"), format!("--stop-address={:#x}", start + 1024));
            let listing = capture(command(&target.tool("objdump"), ["-d", "--no-show-raw-insn", &from, &to, &path]))?;
            let (found, bytes) = straight(&listing).context("it does not return")?;
            ensure!(limits.contains(&found), "{found} instructions, and not {} to {}", limits.start(), limits.end());
            let lines = lines(start, bytes);
            ensure!(lines <= most, "{lines} lines, since it returns {bytes} bytes behind {start:#x}, and not {most}");
            Ok(())
        };
        report.check(&format!("instructions and lines of {name}"), counted());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_counted_up_to_the_first_return() {
        let listing = "lib.so:     file format elf64-x86-64\n\nDisassembly of section .text:\n\n\
            0000000000034300 <cfree>:\n   34300:\tmov    %rdi,%rcx\n   34303:\tje     34310 <cfree+0x10>\n   \
            34308:\tret\n   34309:\tint3\n   34310:\tret\n";
        assert_eq!(straight(listing), Some((3, 8)));
        assert_eq!(
            [(0, 0), (0, 63), (0, 64), (63, 1), (64, 127), (64, 128)].map(|(start, bytes)| lines(start, bytes)),
            [1, 1, 2, 2, 2, 3]
        );
        let around = "0 <f>:\n   0:\tb\tc <f+0xc>\n   4:\tbrk\t#0x1\n   8:\tb\t0 <f>\n   c:\tret\n";
        assert_eq!(straight(around), Some((2, 12)));
        assert_eq!(straight("0 <f>:\n   0:\tjmp    8\n"), None);
    }
}
