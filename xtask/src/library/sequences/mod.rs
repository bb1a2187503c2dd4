//! Compares every restartable sequence of the built library with those that the explorer proves.
//!
//! `rseq_explorer` of neap-objects runs a model of the sequences. Its file `sequences.txt` has each
//! of the model's sequences as lines: one for each access of shared memory and each check. A test
//! of the explorer compares the file with the model. This check reads the machine code: the
//! descriptors lead to the code of each sequence, which is executed on unknown values (`trace`).
//! Its lines must be those of one of the file's sequences, and each of these must be found.
//!
//! The rules that no listing shows are checked as well: the instruction before the sequence stores
//! its descriptor's address, the commit is the last instruction, and the abort exit has its
//! signature. An instruction that `decode` does not know is an error, such as a call.

mod decode;
mod sum;
mod trace;

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail, ensure};
use object::{Object, ObjectSection, RelocationTarget};

use crate::layout;
use crate::process::{capture, command};
use crate::report::Report;
use crate::target::Target;

/// The file with the sequences that the explorer proves.
const PROVED: &str = "crates/neap-objects/tests/rseq_explorer/sequences.txt";

/// The word before every abort exit.
const SIGNATURE: u32 = 0x5305_3053;
const SIGNATURE_ARM64: u32 = 0xd428_bc00;

/// Most instructions that make and store a descriptor's address.
const BEFORE: usize = 3;

/// The descriptor of a sequence, as the kernel reads it.
#[derive(Debug, PartialEq, Eq)]
struct Descriptor {
    address: u64,
    start: u64,
    end: u64,
    abort: u64,
}

/// `sequences [--target NAME]`.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    let (target, rest) = Target::parse(arguments)?;
    if let [extra, ..] = rest {
        bail!("`sequences` takes no argument but --target, and got `{extra}`");
    }
    let mut report = Report::default();
    into(&mut report, target)?;
    report.close("sequences")
}

/// Checks the built library, counted in a report with other checks.
pub(crate) fn into(report: &mut Report, target: Target) -> Result<()> {
    let library = match target {
        Target::Native => layout::built_library()?,
        Target::Arm64 | Target::Musl => target.library(),
    };
    println!("sequences of {}", library.display());
    let proved = fs::read_to_string(layout::root().join(PROVED)).context(PROVED)?;
    let proved = sections(&proved, target);
    let file = fs::read(&library).with_context(|| library.display().to_string())?;
    let descriptors = descriptors(&file, target)?;
    let mut objdump = command(&target.tool("objdump"), ["-d", "--no-show-raw-insn"]);
    if target.is_of_this_processor() {
        objdump.args(["-M", "intel"]);
    }
    objdump.arg(&library);
    let instructions = instructions(&capture(objdump)?);
    let mut found: BTreeMap<&str, usize> = proved.iter().map(|(name, _)| (*name, 0)).collect();
    for descriptor in &descriptors {
        let name = lines(descriptor, &instructions, target).and_then(|lines| {
            let equal = proved.iter().find(|(_, proved)| *proved == lines);
            Ok(equal.with_context(|| format!("the explorer proves no such sequence:\n  {}", lines.join("\n  ")))?.0)
        });
        match name {
            Ok(name) => *found.entry(name).or_default() += 1,
            Err(error) => report.check(&format!("sequence at {:#x}", descriptor.start), Err(error)),
        }
    }
    for (name, count) in found {
        let result = if count > 0 { Ok(()) } else { Err(anyhow::anyhow!("the library has none")) };
        report.check(&format!("sequence `{name}` ({count} copies)"), result);
    }
    Ok(())
}

/// The sequences of the listing by name. On x86-64 every store is a release.
fn sections(text: &str, target: Target) -> Vec<(&str, Vec<String>)> {
    let mut sections: Vec<(&str, Vec<String>)> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            sections.push((name, Vec::new()));
        } else if let Some((_, lines)) = sections.last_mut() {
            let is_plain = target.is_of_this_processor() && line.starts_with("commit") && !line.ends_with(", release");
            lines.push(if is_plain { format!("{line}, release") } else { line.to_string() });
        }
    }
    sections
}

/// The descriptors in a library: entries of the section that is read-only after relocation.
fn descriptors(file: &[u8], target: Target) -> Result<Vec<Descriptor>> {
    let signature = if target.is_of_this_processor() { SIGNATURE } else { SIGNATURE_ARM64 };
    let file = object::File::parse(file)?;
    let relocations: BTreeMap<u64, u64> = file
        .dynamic_relocations()
        .context("it has no relocations")?
        .filter(|(_, relocation)| relocation.target() == RelocationTarget::Absolute)
        .map(|(at, relocation)| (at, relocation.addend() as u64))
        .collect();
    let section = file.section_by_name(".data.rel.ro").context("it has no section .data.rel.ro")?;
    let (base, data) = (section.address(), section.data()?);
    let text = file.section_by_name(".text").context("it has no section .text")?;
    let text = text.address()..text.address() + text.size();
    let word_before = |address: u64| {
        let sections = file.sections();
        let bytes = sections.filter_map(|section| section.data_range(address - 4, 4).ok().flatten()).next();
        bytes.and_then(|bytes| Some(u32::from_le_bytes(bytes.try_into().ok()?)))
    };
    let mut found = Vec::new();
    for address in (base.next_multiple_of(32)..base + data.len() as u64).step_by(32) {
        let word = |index: u64| {
            let at = (address - base + 8 * index) as usize;
            data.get(at..at + 8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
        };
        let relocated = |index: u64| relocations.get(&(address + 8 * index)).copied();
        let (Some(0), Some(start), Some(length), Some(abort)) = (word(0), relocated(1), word(2), relocated(3)) else {
            continue;
        };
        // Other constants of this section may look alike up to here.
        if text.contains(&start) && word_before(abort) == Some(signature) {
            found.push(Descriptor { address, start, end: start + length, abort });
        }
    }
    ensure!(!found.is_empty(), "it has no descriptor of a sequence");
    Ok(found)
}

/// The text of each instruction in a listing of `objdump`, by address.
fn instructions(listing: &str) -> BTreeMap<u64, String> {
    let line = |line: &str| {
        let (address, text) = line.trim_start().split_once(":\t")?;
        Some((u64::from_str_radix(address, 16).ok()?, text.trim().to_string()))
    };
    listing.lines().filter_map(line).collect()
}

/// The lines that describe a sequence.
fn lines(descriptor: &Descriptor, instructions: &BTreeMap<u64, String>, target: Target) -> Result<Vec<String>> {
    let steps = |at: u64, text: &str| match target {
        Target::Native | Target::Musl => decode::x86_64(at, text),
        Target::Arm64 => decode::aarch64(at, text),
    };
    let Descriptor { address, start, end, abort } = *descriptor;
    if (start..end).contains(&abort) {
        bail!("its abort exit lies inside");
    }
    // `lea` and `mov`; `adrp`, `add` and `str`.
    let count = if target.is_of_this_processor() { BEFORE - 1 } else { BEFORE };
    let mut before: Vec<_> = instructions.range(..start).rev().take(count).collect();
    before.reverse();
    let before = before.into_iter().map(|(at, text)| steps(*at, text)).collect::<Result<Vec<_>>>()?;
    let code =
        instructions.range(start..end).map(|(at, text)| Ok((*at, steps(*at, text)?))).collect::<Result<Vec<_>>>()?;
    trace::lines(address, &before, &code, end)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DESCRIPTOR: Descriptor = Descriptor { address: 0x900, start: 0x110, end: 0x140, abort: 0x500 };

    /// A push on x86-64.
    const PUSH: &str = "\
        100:\tlea    r9,[rip+0x11ca49]        # 900 <_etext+0x2e5>\n\
        108:\tmov    QWORD PTR fs:[rcx+0x8],r9\n\
        110:\tmovsxd r9,DWORD PTR fs:[rcx+0x4]\n\
        112:\tcmp    r9w,r8w\n\
        114:\tlea    r8d,[rsi+0x18]\n\
        116:\tcmovne esi,r8d\n\
        118:\tmov    r9,QWORD PTR [rax+r9*8+0x50]\n\
        11a:\tadd    rsi,r9\n\
        11c:\tmov    r9,QWORD PTR [rsi]\n\
        11e:\tcmp    r9,QWORD PTR [rsi+0x10]\n\
        120:\tje     300 <f>\n\
        122:\tmov    QWORD PTR [r9],rdi\n\
        124:\tadd    QWORD PTR [rsi],0x8\n\
        140:\tret\n";

    const PUSHED: [&str; 7] = [
        "load cpu",
        "load row",
        "load head",
        "load end",
        "refuse if head = end",
        "store the cell at head",
        "commit head := head + 1, release",
    ];

    fn lines_of(listing: &str, target: Target) -> Result<Vec<String>> {
        lines(&DESCRIPTOR, &instructions(listing), target)
    }

    /// The lines, or the error, of the push with another text in place of a part.
    fn changed(part: &str, other: &str) -> String {
        assert_eq!(PUSH.matches(part).count(), 1, "{part}");
        let lines = lines_of(&PUSH.replace(part, other), Target::Native);
        lines.map_or_else(|error| error.to_string(), |lines| lines.join("; "))
    }

    #[test]
    fn a_push_is_read_as_what_it_does() {
        assert_eq!(lines_of(PUSH, Target::Native).unwrap(), PUSHED);
    }

    #[test]
    fn broken_sequences_are_found() {
        let gap = changed("110:\tmovsxd", "109:\tlea    r10,[r9+0x0]\n110:\tmovsxd");
        assert!(gap.contains("does not store its descriptor's address"), "{gap}");
        let other = changed("# 900", "# 940");
        assert!(other.contains("another descriptor"), "{other}");
        let behind = changed("140:\tret", "130:\tlea    rdi,[rdi+0x8]\n140:\tret");
        assert!(behind.contains("0x130 follows the commit"), "{behind}");
        let call = changed("lea    r8d,[rsi+0x18]", "call   700 <g>");
        assert!(call.contains("no sequence has the instruction `call   700 <g>`"), "{call}");
        let early = changed("mov    QWORD PTR [r9],rdi", "mov    QWORD PTR [rsi],rdi");
        assert!(early.contains("it stores Head before the commit"), "{early}");
        let unchecked = changed("je     300 <f>", "lea    rdx,[rdx]");
        assert!(!unchecked.contains("refuse"), "{unchecked}");
        let start = changed("fs:[rcx+0x4]", "fs:[rcx]");
        assert!(start.contains("it starts without the CPU's id"), "`cpu_id_start` is not the CPU's id: {start}");
        let beyond = changed("mov    QWORD PTR [r9],rdi", "mov    QWORD PTR [r9+0x8],rdi");
        assert!(beyond.contains("store the cell at head + 1"), "{beyond}");
        let far = changed("add    QWORD PTR [rsi],0x8", "add    QWORD PTR [rsi],0x10");
        assert!(far.contains("commit head := head + 2"), "{far}");
        let none = changed("add    QWORD PTR [rsi],0x8", "mov    QWORD PTR [rdi],rsi");
        assert!(none.contains("its last access is no commit"), "{none}");
    }

    #[test]
    fn copies_and_loops_are_read_as_many_cells() {
        let copy = "\
            100:\tlea    r10,[rip+0x0]        # 900 <x>\n\
            108:\tmov    QWORD PTR fs:[rax+0x8],r10\n\
            110:\tmovsxd r10,DWORD PTR fs:[rax+0x4]\n\
            114:\tmov    r10,QWORD PTR [rcx+r10*8+0x50]\n\
            118:\tadd    r10,rdx\n\
            11a:\tmov    rdi,QWORD PTR [r10]\n\
            11c:\tlea    rbp,[rdi+rcx*8]\n\
            120:\tcmp    rbp,QWORD PTR [r10+0x10]\n\
            124:\tjg     300 <f>\n\
            126:\trep movs QWORD PTR es:[rdi],QWORD PTR ds:[rsi]\n\
            12a:\tmov    QWORD PTR [r10],rbp\n";
        let lines = lines_of(copy, Target::Native).unwrap();
        assert_eq!(
            lines[4..],
            ["refuse if head + n > end", "store cells from head", "commit head := head + n, release"]
        );
        // A commit may not store a value that a copy left in its registers.
        let left = lines_of(&copy.replace("[r10],rbp", "[r10],rdi"), Target::Native).unwrap();
        assert_eq!(left.last().unwrap(), "commit head := n, release");
    }

    #[test]
    fn arm64_is_read_in_the_same_words() {
        let pop = "\
            100:\tadrp\tx9, 0 <f>\n\
            104:\tadd\tx9, x9, #0x900\n\
            108:\tstr\tx9, [x10, #8]\n\
            110:\tldr\tw9, [x10, #4]\n\
            114:\tldr\tx9, [x11, w9, sxtw #3]\n\
            118:\tadd\tx8, x8, x9\n\
            11c:\tldr\tx12, [x8]\n\
            120:\tldr\tx0, [x12, #-8]!\n\
            124:\tcbz\tx0, 300 <f+0x1>\n\
            128:\tstr\tx12, [x8]\n";
        let lines = |listing: &str| lines_of(listing, Target::Arm64).unwrap();
        assert_eq!(
            lines(pop)[2..],
            ["load head", "load the cell at head - 1", "refuse if cell = 0", "commit head := head - 1"]
        );
        assert_eq!(lines(&pop.replace("128:\tstr", "128:\tstlr")).last().unwrap(), "commit head := head - 1, release");
    }

    #[test]
    fn stores_of_x86_64_are_releases() {
        let text = "# a head\n[count]\nload word\ncommit word := word + n\n\n[pop]\nload row\n";
        let commit = |target| sections(text, target)[0].1[1].clone();
        assert_eq!(commit(Target::Native), "commit word := word + n, release");
        assert_eq!(commit(Target::Arm64), "commit word := word + n");
        assert_eq!(sections(text, Target::Native)[1], ("pop", vec!["load row".to_string()]));
    }
}
