//! The search: every state that a scenario can reach, breadth first, and the shortest way to a bad
//! one.
//!
//! Each state is kept once, packed, in one array that is also the queue. A hash table of indexes
//! finds states again. Single threaded. Too many states are a panic.

use core::fmt::Write;

use crate::check::region_name;
use crate::model::*;
use crate::protocol::*;
use crate::steps::*;

const MOST_STATES: usize = 4_000_000;

/// The result of a search.
pub struct Report {
    pub name: &'static str,
    pub states: usize,
    pub steps: usize,
    pub events: u32,
    /// The fault, and the numbered steps that lead there.
    pub violation: Option<(String, String)>,
}

struct Visited {
    states: Vec<Packed>,
    parents: Vec<u32>,
    /// Index plus one; 0 is free. The size is a power of two.
    table: Vec<u32>,
}

fn hash(words: &Packed) -> u64 {
    let mix = |hash: u64, &word: &u64| (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    let hash = words.iter().fold(0, mix);
    hash ^ hash >> 29
}

impl Visited {
    fn new() -> Visited {
        Visited { states: Vec::new(), parents: Vec::new(), table: vec![0; 1 << 12] }
    }

    /// The index of a state, which is added if it was not known.
    fn insert(&mut self, state: Packed, parent: u32) -> u32 {
        if self.states.len() * 2 >= self.table.len() {
            let mut table = vec![0; self.table.len() * 4];
            for (index, known) in self.states.iter().enumerate() {
                let mut at = hash(known) as usize & (table.len() - 1);
                while table[at] != 0 {
                    at = (at + 1) & (table.len() - 1);
                }
                table[at] = index as u32 + 1;
            }
            self.table = table;
        }
        let mut at = hash(&state) as usize & (self.table.len() - 1);
        while self.table[at] != 0 {
            if self.states[self.table[at] as usize - 1] == state {
                return self.table[at] - 1;
            }
            at = (at + 1) & (self.table.len() - 1);
        }
        self.states.push(state);
        self.parents.push(parent);
        self.table[at] = self.states.len() as u32;
        self.table[at] - 1
    }
}

/// The first state from which no way leads to one of `ends`. `leads_to` has for each state its
/// successors; a slice of `starts` says where those of a state are.
fn without_an_end(starts: &[u32], leads_to: &[u32], ends: Vec<u32>) -> Option<usize> {
    let states = starts.len() - 1;
    let follow = |state: usize| &leads_to[starts[state] as usize..starts[state + 1] as usize];
    // The same edges by the state that they lead to: after the last loop those of `state` lie from
    // `from[state]`.
    let mut from = vec![0_u32; states + 1];
    leads_to.iter().for_each(|&to| from[to as usize] += 1);
    let mut sum = 0;
    for count in &mut from {
        sum += *count;
        *count = sum;
    }
    let mut comes_from = vec![0_u32; leads_to.len()];
    for state in 0..states {
        for &to in follow(state) {
            from[to as usize] -= 1;
            comes_from[from[to as usize] as usize] = state as u32;
        }
    }
    let mut good = vec![false; states];
    let mut queue = ends;
    while let Some(state) = queue.pop() {
        let state = state as usize;
        if !core::mem::replace(&mut good[state], true) {
            queue.extend_from_slice(&comes_from[from[state] as usize..from[state + 1] as usize]);
        }
    }
    good.iter().position(|good| !good)
}

/// Explores all states, or stops at the first bad one.
pub fn explore(machine: &Machine) -> Report {
    let mut report = Report { name: machine.scenario.name, states: 0, steps: 0, events: 0, violation: None };
    let mut visited = Visited::new();
    visited.insert(machine.initial().pack(), 0);
    let (mut starts, mut leads_to, mut ends) = (vec![0], Vec::new(), Vec::new());
    let mut wrong = None;
    while wrong.is_none() && starts.len() <= visited.states.len() {
        let index = starts.len() - 1;
        assert!(index < MOST_STATES, "{}: more than {MOST_STATES} states", report.name);
        let state = State::unpack(&visited.states[index]);
        debug_assert_eq!(state.pack(), visited.states[index], "packing loses something");
        wrong = machine.judge(&state).map(|wrong| (wrong, index));
        if wrong.is_none() {
            report.events |= machine.successors(&state, |_, next| {
                leads_to.push(visited.insert(next.pack(), index as u32));
            });
            if machine.at_rest(&state) {
                ends.push(index as u32);
            }
            starts.push(leads_to.len() as u32);
        }
    }
    (report.states, report.steps) = (visited.states.len(), leads_to.len());
    let stuck = || without_an_end(&starts, &leads_to, ends);
    wrong = wrong.or_else(|| stuck().map(|index| ("it can never finish from here".to_string(), index)));
    report.violation = wrong.map(|(wrong, index)| (wrong, trace(machine, &visited, index)));
    report
}

/// The numbered steps from the beginning to state `last`.
fn trace(machine: &Machine, visited: &Visited, last: usize) -> String {
    let mut way = vec![last];
    while way[way.len() - 1] != 0 {
        way.push(visited.parents[way[way.len() - 1]] as usize);
    }
    way.reverse();
    let mut text = String::new();
    for (number, pair) in way.windows(2).enumerate() {
        let before = State::unpack(&visited.states[pair[0]]);
        let mut action = None;
        machine.successors(&before, |candidate, next| {
            if next.pack() == visited.states[pair[1]] {
                action = Some((candidate, *next));
            }
        });
        let (action, after) = action.expect("a parent leads to its child");
        let _ = writeln!(text, "{:4}. {}", number + 1, describe(machine, &before, action, &after));
    }
    text
}

/// The name of a word of readers and retiring threads.
fn count_name(word: usize) -> String {
    for (side, name) in [(Side::Entered, "entered"), (Side::Left, "left")] {
        for (place, phase) in (0..PLACES).flat_map(|place| [(place, 0), (place, 1)]) {
            if word == word_of(side, place, phase) {
                return format!("{name}[{}][{phase}]", if place == LOCKED { "lock".into() } else { place.to_string() });
            }
        }
    }
    ["phase", "object", "alive"][word - PHASE].to_string()
}

fn word_name(machine: &Machine, word: usize) -> String {
    match word {
        PHASE.. if machine.scenario.reads() => count_name(word),
        SPARE..TAKERS if machine.scenario.stocks() => format!("charged[{}]", word - CHARGED),
        REGION.. if machine.scenario.stocks() => {
            format!("{}.word", region_name(CLOSED_REGION + ((word - REGION) / STRIDE) as u8))
        }
        ROW..SPARE => format!("row[{}]", word - ROW),
        SPARE..TAKERS => "spare".to_string(),
        TAKERS => "mutex".to_string(),
        GATE => "gate".to_string(),
        INSIDE => "inside".to_string(),
        _ => {
            let region = CLOSED_REGION + ((word - REGION) / STRIDE) as u8;
            let from = |class: &u8| word >= count_of(region, *class);
            let class = (0..machine.scenario.classes()).rfind(from).expect("a region has a class");
            let name = format!("{}.{class}", region_name(region));
            match word - count_of(region, class) {
                0 => format!("{name}.count"),
                1 => format!("{name}.capacity"),
                cell => format!("{name}.cells[{}]", cell - 2),
            }
        }
    }
}

fn value_name(machine: &Machine, word: usize, value: u8) -> String {
    let pointers = if machine.scenario.stocks() { ROW..SPARE } else { ROW..TAKERS };
    if pointers.contains(&word) { region_name(value).to_string() } else { value.to_string() }
}

/// One step in words: thread, CPU, line, and changes.
fn describe(machine: &Machine, before: &State, action: Action, after: &State) -> String {
    let name = |t: usize| machine.scenario.actors[t].name;
    let mut text = match action {
        Action::Step(t, branch) => {
            let thread = &before.thr[t];
            let line = &machine.program.lines[thread.now.pc as usize];
            let handler = if thread.saved.pc != 0 { " (handler)" } else { "" };
            let outcome = match (line.instr, branch) {
                (Instr::Choice, 0) => " -> the latter",
                (Instr::Choice, _) => " -> the former",
                (Instr::FenceRow, 1) => " -> it fails",
                _ => "",
            };
            format!("{}{handler} on CPU {}: {}{outcome}", name(t), thread.cpu, line.text)
        }
        Action::Drain(cpu, 0) => format!("CPU {cpu} drains its oldest store"),
        Action::Drain(cpu, at) => format!("CPU {cpu} drains a store before {at} earlier ones"),
        Action::Leave(t) => format!("{} is preempted on CPU {}", name(t), before.thr[t].cpu),
        Action::Enter(t, cpu) => format!("{} runs on CPU {cpu}", name(t)),
        Action::Signal(t) => format!("{} on CPU {} is interrupted by a signal", name(t), before.thr[t].cpu),
    };
    let mut notes = Vec::new();
    if let Action::Step(t, _) = action {
        let (old, new) = (before.thr[t].now, after.thr[t].now);
        let numbers = [("c", old.c, new.c), ("n", old.n, new.n), ("t", old.t, new.t)];
        let pointers = [("p", old.p, new.p), ("s", old.s, new.s), ("d", old.d, new.d)];
        let gone = before.thr[t].op != after.thr[t].op;
        for (register, _, new) in numbers.into_iter().filter(|r| r.1 != r.2 && !gone) {
            notes.push(format!("{register} = {new}"));
        }
        for (register, _, new) in pointers.into_iter().filter(|r| r.1 != r.2 && !gone) {
            notes.push(format!("{register} = {}", region_name(new)));
        }
    }
    for word in (0..WORDS).filter(|&word| before.mem[word] != after.mem[word]) {
        notes.push(format!("memory: {} = {}", word_name(machine, word), value_name(machine, word, after.mem[word])));
    }
    for cpu in 0..CPUS {
        let pending = |s: &State| s.buf[cpu].iter().filter(|&&entry| entry != 0).count();
        for &entry in &after.buf[cpu][pending(before).min(pending(after))..pending(after)] {
            let word = stored_word(entry);
            notes.push(format!(
                "pending: {} = {}",
                word_name(machine, word),
                value_name(machine, word, (entry & 15) as u8)
            ));
        }
    }
    for (t, actor) in machine.scenario.actors.iter().enumerate() {
        let (old, new) = (&before.thr[t], &after.thr[t]);
        let frame = if matches!(action, Action::Signal(_)) { new.saved } else { new.now };
        let line = &machine.program.lines[old.now.pc as usize];
        let stepped = matches!(action, Action::Step(by, _) if by == t);
        if !stepped && old.armed && line.flags & SEQ != 0 && frame.pc != old.now.pc {
            notes.push(format!("{}'s sequence is aborted", actor.name));
        }
        for object in (1..8).filter(|object| (old.hand ^ new.hand) >> object & 1 == 1) {
            let verb = if new.hand >> object & 1 == 1 { "now holds" } else { "gave away" };
            notes.push(format!("{} {verb} object {object}", actor.name));
        }
        let copies = !machine.scenario.reads();
        if copies && old.now.m != new.now.m && old.saved.pc == new.saved.pc {
            let held = &new.now.b[..new.now.m as usize];
            notes.push(format!("{}'s private memory has {held:?}", actor.name));
        }
    }
    if before.barn != after.barn {
        let objects: Vec<u8> = (1..8).filter(|object| after.barn >> object & 1 == 1).collect();
        notes.push(format!("the barn has {objects:?}"));
    }
    if !notes.is_empty() {
        let _ = write!(text, "  ({})", notes.join(", "));
    }
    text
}
