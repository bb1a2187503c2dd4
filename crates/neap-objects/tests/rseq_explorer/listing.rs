//! `sequences.txt`: the model's sequences as lines that can be compared with machine code.
//!
//! The model leaves out what does not matter to the protocol: how a sequence learns that a stack is
//! empty, and how a word of a CPU is found. The lines have it, as [`Form`]. Where sequences of
//! different form are one sequence of the model, the file has each. `cargo xtask sequences`
//! compares the file with the built libraries.

use core::fmt::Write;

use crate::protocol::*;

/// What the code of a sequence does and the model leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Plain,
    /// malloc's: it refuses an object that is not marked as cached. Null has no mark.
    OfMarked,
    /// The CPU's word is found by its distance, in a table that may not exist yet. Nothing is
    /// published by the word.
    ByDistance,
    /// Like `ByDistance`, in a table that exists.
    OfKnownTable,
}

/// A section of the file: its name, its form, an operation that has the sequence, and its commit.
const SECTIONS: [(&str, Form, Op, Instr); 12] = [
    ("push", Form::Plain, Op::Push(0), Instr::CountUp),
    ("pop", Form::Plain, Op::Pop(0), Instr::StoreCountDown),
    ("pop, malloc's", Form::OfMarked, Op::Pop(0), Instr::StoreCountDown),
    ("push many", Form::Plain, Op::Fill(0), Instr::StoreCountUp(true)),
    ("pop many", Form::Plain, Op::Flush(0), Instr::StoreCountDown),
    ("set capacity", Form::Plain, Op::Fill(0), Instr::StoreCapacity),
    ("count a reader", Form::Plain, Op::Read, Instr::StoreWordUp(Side::Entered)),
    ("count a reader", Form::Plain, Op::Read, Instr::StoreWordUp(Side::Left)),
    ("count", Form::OfKnownTable, Op::Read, Instr::StoreWordUp(Side::Left)),
    ("count, maybe before there is a table", Form::ByDistance, Op::Read, Instr::StoreWordUp(Side::Left)),
    ("change a stock", Form::Plain, Op::Charge(0), Instr::StoreStock(Change::Take)),
    ("change a stock", Form::Plain, Op::Stock(0), Instr::StoreStock(Change::Put)),
];

/// The lines of a sequence: those of `op` from START to the commit.
fn sequence(form: Form, op: Op, commit: Instr) -> Vec<String> {
    let program = Program::new(Mutant::None, 1, [op].into_iter());
    let is_commit = |line: &Line| line.instr == commit && line.flags & COMMIT != 0;
    let end = program.lines.iter().position(is_commit).expect("the operation has the commit");
    let start = program.lines[..end].iter().rposition(|line| line.flags & SEQ == 0).expect("a sequence is armed");
    assert_eq!(program.lines[start].instr, Instr::Arm);
    let sequence = &program.lines[start + 1..=end];
    let is_of_many = sequence.iter().any(|line| line.instr == Instr::CopyOut);
    let mut lines: Vec<String> =
        sequence.iter().flat_map(|line| words(line.instr, form, is_of_many)).map(|line| line.to_string()).collect();
    let is_published = !matches!(form, Form::ByDistance | Form::OfKnownTable);
    if commit.releases(Mutant::None) && is_published {
        lines.last_mut().expect("a sequence has lines").push_str(", release");
    }
    lines
}

/// A line of the model in words.
fn words(instr: Instr, form: Form, is_of_many: bool) -> &'static [&'static str] {
    match instr {
        Instr::ReadCpu => &["load cpu"],
        Instr::LoadRow => &["load row"],
        Instr::LoadCount => &["load head"],
        Instr::CheckRoom(false) => &["load end", "refuse if head = end"],
        Instr::CheckRoom(true) => &["load end", "refuse if head + n > end"],
        Instr::StoreCell => &["store the cell at head"],
        Instr::CopyIn => &["store cells from head"],
        Instr::CountUp => &["commit head := head + 1"],
        Instr::StoreCountUp(true) => &["commit head := head + n"],
        Instr::LoadCountDown(true) => &["load head", "load bottom", "refuse if head - n < bottom"],
        Instr::CopyOut => &["load cells from head - n", "store private memory"],
        Instr::StoreCountDown if is_of_many => &["commit head := head - n"],
        // It refuses by the null in the cell below the lowest.
        Instr::LoadCountDown(false) => &["load head"],
        Instr::LoadCell if form == Form::OfMarked => &["load the cell at head - 1", "refuse if other != 1"],
        Instr::LoadCell => &["load the cell at head - 1", "refuse if cell = 0"],
        Instr::StoreCountDown => &["commit head := head - 1"],
        Instr::CheckClosed => &["load mark", "refuse if mark = 0"],
        // The model has one capacity.
        Instr::StoreCapacity => &["load bottom", "load end", "commit end := max(bottom + n, end)"],
        Instr::CheckPlace => match form {
            Form::OfKnownTable => &["refuse if cpu >= n", "load row"],
            Form::ByDistance => &["refuse if cpu >= n", "refuse if other = 0", "load row", "refuse if row = -1"],
            _ => &["refuse if cpu >= n", "load row", "refuse if row = 0"],
        },
        Instr::LoadWord(_) => &["load word"],
        Instr::StoreWordUp(_) if form == Form::Plain => &["commit word := word + 1"],
        Instr::StoreWordUp(_) => &["commit word := word + n"],
        Instr::LoadStock => &["load word"],
        Instr::CheckStock(_) => &["refuse if f(word) - n > n"],
        Instr::StoreStock(_) => &["commit word := word + n"],
        other => panic!("no sequence has the line {other:?}"),
    }
}

/// The sections in their order. Sections of one name are the same.
fn listing() -> String {
    let mut text = String::from(HEAD);
    let mut last: Option<(&str, Vec<String>)> = None;
    for (name, form, op, commit) in SECTIONS {
        let lines = sequence(form, op, commit);
        if let Some((earlier, equal)) = &last
            && *earlier == name
        {
            assert_eq!(*equal, lines, "{name}");
            continue;
        }
        writeln!(text, "\n[{name}]\n{}", lines.join("\n")).expect("memory suffices");
        last = Some((name, lines));
    }
    text
}

const HEAD: &str = "\
# What each restartable sequence does, from the CPU's id to the commit: a line for each access of
# shared memory and each check. The explorer proves the protocol of these lines, and compares this
# file with its model. `cargo xtask sequences` finds each sequence of a built library here.
#
# cpu: the thread's CPU; row: the table's entry of that CPU; mark: the first word of its region;
# head, bottom, end: a stack, counted in cells; word: a lone word of the CPU; other: memory that
# sequences only read; n: some number that the sequence gets; f(x): a function of x and such
# numbers. `store private memory` is the caller's buffer. A word that is loaded again has one line.
";

#[test]
fn the_file_has_the_sequences_of_the_model() {
    let listing = listing();
    assert!(include_str!("sequences.txt") == listing, "sequences.txt is another; the model has:\n{listing}");
}
