//! Checks malloc and free of a small object in the built library: the number of instructions, and
//! of cache lines, and that no instruction is a barrier, a locked instruction or a call.
//!
//! From its entry to its first return each function runs straight ahead, unless a jump is taken in
//! a rare case. `objdump` of binutils reads the library. If there are fewer instructions than the
//! least, another return comes first. A third cache line costs more than the instructions in it:
//! see docs/design/fast-path.md. Barriers are refused in all of the function's code, so rare cases
//! that it handles itself have none. The calls of other cases are jumps, which leave it.

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

/// Instructions of x86-64 that order memory, but for those with `lock` or an implied one.
const BARRIERS: &[&str] = &["mfence", "lfence", "sfence", "cpuid", "serialize"];

/// First letters of instructions of arm64 that order memory: barriers, loads with acquire, stores
/// with release, exclusive accesses, and atomic changes, which may do both.
const BARRIERS_ARM64: &[&str] = &[
    "dmb", "dsb", "isb", "ssbb", "pssbb", "ldar", "ldap", "ldax", "ldlar", "ldiapp", "stl", "stilp", "ldxr", "ldxp",
    "stxr", "stxp", "cas", "rcw", "swp", "ldadd", "ldclr", "ldeor", "ldset", "ldsmax", "ldsmin", "ldumax", "ldumin",
    "stadd", "stclr", "steor", "stset", "stsmax", "stsmin", "stumax", "stumin",
];

/// Whether an instruction of x86-64, in the notation of AT&T, orders memory or calls a function.
fn is_ordering(text: &str) -> bool {
    // Names of functions follow in brackets, addresses in a comment.
    let text = text.split(['#', '<']).next().unwrap_or_default();
    text.split_whitespace().any(|word| word == "lock" || word.starts_with("call") || BARRIERS.contains(&word))
        || text.trim_start().strip_prefix("xchg").is_some_and(|rest| {
            let operands = rest.split_once(' ').map_or("", |(_, operands)| operands);
            !operands.split(',').all(is_register)
        })
}

/// Whether an operand in the notation of AT&T is a register alone.
fn is_register(operand: &str) -> bool {
    operand.trim().strip_prefix('%').is_some_and(|name| name.chars().all(|letter| letter.is_ascii_alphanumeric()))
}

/// Whether an instruction of arm64 orders memory or calls a function, which may be an atomic change
/// of the compiler's.
fn is_ordering_arm64(text: &str) -> bool {
    let name = text.split_whitespace().next().unwrap_or_default();
    name == "sb" || name.starts_with("bl") || BARRIERS_ARM64.iter().any(|start| name.starts_with(start))
}

/// An error that names the instructions of the first function in a listing which order memory or
/// call.
fn is_free_of_barriers(listing: &str, is_ordering: fn(&str) -> bool) -> Result<()> {
    let is_head = |line: &&str| line.ends_with(">:");
    let function = listing.lines().skip_while(|line| !is_head(line)).skip(1).take_while(|line| !is_head(line));
    let instructions: Vec<_> = function.filter_map(|line| line.trim_start().split_once(":\t")).collect();
    ensure!(!instructions.is_empty(), "objdump lists no instruction");
    let found = instructions.iter().filter(|(_, text)| is_ordering(text));
    let found: Vec<String> = found.map(|(address, text)| format!("{address}: {}", text.trim())).collect();
    ensure!(found.is_empty(), "barriers, locked instructions or calls: {}", found.join("; "));
    Ok(())
}

/// Number of cache lines of a function that starts at `start` and has `bytes` bytes.
fn lines(start: usize, bytes: usize) -> usize {
    (start + bytes) / LINE - start / LINE + 1
}

/// Checks the built library, counted in a report with other checks.
pub(crate) fn into(report: &mut Report, target: Target) -> Result<()> {
    let library = target.library();
    let (limits, most, is_ordering): (_, _, fn(&str) -> bool) = match target {
        Target::Native | Target::Musl => (LIMITS, LINES, is_ordering),
        Target::Arm64 => (LIMITS_ARM64, LINES_ARM64, is_ordering_arm64),
    };
    let path = library.to_string_lossy();
    println!("fast paths of {path}");
    let symbols = capture(command(&target.tool("nm"), ["-D", "--defined-only", &path]))?;
    for (name, limits) in limits {
        let listing = || {
            let address = symbols.lines().find(|line| line.split_whitespace().nth(2) == Some(name));
            let address = address.and_then(|line| line.split_whitespace().next()).context("it is not exported")?;
            let start = usize::from_str_radix(address, 16)?;
            let (from, to) = (format!("--start-address={start:#x}"), format!("--stop-address={:#x}", start + 1024));
            let listing = capture(command(&target.tool("objdump"), ["-d", "--no-show-raw-insn", &from, &to, &path]))?;
            anyhow::Ok((start, listing))
        };
        let counted = || {
            let (start, listing) = listing()?;
            let (found, bytes) = straight(&listing).context("it does not return")?;
            ensure!(limits.contains(&found), "{found} instructions, and not {} to {}", limits.start(), limits.end());
            let lines = lines(start, bytes);
            ensure!(lines <= most, "{lines} lines, since it returns {bytes} bytes behind {start:#x}, and not {most}");
            Ok(())
        };
        report.check(&format!("instructions and lines of {name}"), counted());
        let ordered = listing().and_then(|(_, listing)| is_free_of_barriers(&listing, is_ordering));
        report.check(&format!("{name} has no barrier"), ordered);
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

    /// Puts an instruction into the middle of a function, before another function with a barrier.
    fn around(instruction: &str) -> String {
        format!(
            "lib.so:     file format elf64\n\nDisassembly of section .text:\n\n0000000000034300 <malloc>:\n   \
             34300:\tmov    x9, x0\n   34304:\t{instruction}\n   34308:\tret\n   3430c:\tb      34400 <slow>\n\n\
             0000000000034310 <next>:\n   34310:\tmfence\n   34314:\tdmb\tish\n"
        )
    }

    #[test]
    fn barriers_and_locked_instructions_of_x86_64_are_refused() {
        let free = |instruction: &str| is_free_of_barriers(&around(instruction), is_ordering);
        for instruction in [
            "mfence",
            "lock cmpxchg %rcx,(%rdx)",
            "lock addq $0x8,(%rdx)",
            "xchg   %rax,(%rdx)",
            "xchg   %rax,%fs:0x8(%rcx)",
            "xchg   %al,0x110832(%rip)        # 15ae80 <_ZN4neap7process7PROCESS17hE+0xe80>",
            "call   30640 <slow>",
            "notrack call *%rax",
        ] {
            let error = free(instruction).expect_err(instruction).to_string();
            assert!(error.contains("34304: ") && !error.contains("34310"), "{error}");
        }
        for instruction in [
            "mov    %r8,%fs:0x8(%rcx)",
            "addq   $0x8,(%rdx)",
            "xchg   %ax,%ax",
            "cmpxchg %rcx,%rdx",
            "jmp    34400 <lock call>",
            "lea    0x8(%rip),%rax        # 34310 <call>",
        ] {
            free(instruction).expect(instruction);
        }
        assert!(is_free_of_barriers("lib.so:     file format elf64\n", is_ordering).is_err());
    }

    #[test]
    fn barriers_and_ordered_accesses_of_arm64_are_refused() {
        let free = |instruction: &str| is_free_of_barriers(&around(instruction), is_ordering_arm64);
        for instruction in [
            "dmb\tish",
            "dsb\tsy",
            "isb",
            "sb",
            "ldar\tx11, [x13]",
            "ldarb\tw11, [x13]",
            "ldapr\tx11, [x13]",
            "ldapur\tx11, [x13, #8]",
            "ldaxr\tx11, [x13]",
            "ldxr\tx11, [x13]",
            "stlr\tx11, [x13]",
            "stlur\tx11, [x13, #8]",
            "stlxr\tw1, x11, [x13]",
            "stxr\tw1, x11, [x13]",
            "casal\tx8, x9, [x10]",
            "swpa\tx8, x9, [x10]",
            "ldadd\tx8, x9, [x10]",
            "ldsetl\tx8, x9, [x10]",
            "stadd\tx8, [x10]",
            "bl\t30640 <__aarch64_cas8_acq_rel>",
            "blr\tx8",
        ] {
            let error = free(instruction).expect_err(instruction).to_string();
            assert!(error.contains("34304: ") && !error.contains("34314"), "{error}");
        }
        for instruction in [
            "ldr\tx11, [x13]",
            "ldurb\tw11, [x12, #-6]",
            "str\tx13, [x9]",
            "sturb\tw11, [x12, #-6]",
            "strb\tw11, [x12]",
            "stp\tx29, x30, [sp, #-32]!",
            "ldp\tx29, x30, [sp], #32",
            "ldrh\tw9, [x12, #48]",
            "ldrsw\tx9, [x12]",
            "csel\tx10, x10, x11, eq",
            "sub\tx9, x9, x8",
            "brk\t#0x45e0",
            "b.eq\t42190 <__libc_free+0x50>",
        ] {
            free(instruction).expect(instruction);
        }
    }
}
