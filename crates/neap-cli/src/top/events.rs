//! The pane of events: changes between two readings of a process, each with its time. The last
//! event comes first.
//!
//! Events come from the counters in the readings, and from the user's commands. At most [`MOST`]
//! events are kept.

use super::listing::size;
use super::reading::Pair;
use crate::look::stat_model::Numbers;

/// Most events that are kept.
const MOST: usize = 500;

/// An event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct EventRow {
    /// Serial number.
    pub(super) number: u64,
    pub(super) clock: String,
    pub(super) kind: &'static str,
    pub(super) what: String,
}

/// The events so far.
#[derive(Default)]
pub(super) struct Log {
    /// The last one first.
    events: Vec<EventRow>,
    numbers: u64,
}

impl Log {
    pub(super) fn events(&self) -> &[EventRow] {
        &self.events
    }

    pub(super) fn add(&mut self, clock: &str, kind: &'static str, what: String) {
        self.events.insert(0, EventRow { number: self.numbers, clock: clock.to_string(), kind, what });
        self.numbers += 1;
        self.events.truncate(MOST);
    }

    /// Adds the events between two readings.
    pub(super) fn follow(&mut self, pair: Pair<'_>) {
        for (kind, what) in between(pair) {
            self.add(&pair.current.clock, kind, what);
        }
    }
}

/// `1 page`, `2 pages`.
fn count(number: u64, one: &str, more: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { more })
}

fn between(pair: Pair<'_>) -> Vec<(&'static str, String)> {
    let grown = |counter: fn(&Numbers) -> u64| pair.grown(|reading| counter(&reading.numbers));
    let bytes = |pages: u64| size(pair.current.bytes(pages));
    let mut events = Vec::new();

    let [old, new] = [pair.previous, pair.current].map(|reading| reading.numbers.mode.background.as_str());
    if old != new {
        events.push(("thread", format!("neap's thread, {old} before, is {new}")));
    }
    let (cpus, lists) = (grown(|numbers| numbers.drains), grown(|numbers| numbers.lists.drains));
    let drained = [(cpus, "CPU's stacks", "CPUs' stacks"), (lists, "page list", "page lists")];
    let drained = drained.iter().filter(|(number, ..)| *number > 0);
    let drained: Vec<String> = drained.map(|&(number, one, more)| count(number, one, more)).collect();
    if !drained.is_empty() {
        events.push(("drained", drained.join(" and ")));
    }
    let (pages, calls) = (grown(|numbers| numbers.released.pages), grown(|numbers| numbers.released.calls));
    if pages > 0 {
        let calls = count(calls, "call", "calls");
        events.push((
            "released",
            format!("{} ({}) to the system by {calls}", bytes(pages), count(pages, "page", "pages")),
        ));
    }
    let failures = grown(|numbers| numbers.released.failures);
    if failures > 0 {
        events.push(("failed", format!("{} that should have released pages", count(failures, "call", "calls"))));
    }
    let refilled = grown(|numbers| numbers.holes.refilled);
    if refilled > 0 {
        events.push(("refilled", format!("{} of holes in slabs", bytes(refilled))));
    }
    let (needs, pages) = (grown(|numbers| numbers.lists.need_drains), grown(|numbers| numbers.lists.need_pages));
    if needs > 0 {
        let needs = count(needs, "allocation", "allocations");
        events.push(("need", format!("{needs} found no free page until page lists gave {}", bytes(pages))));
    }
    let skipped = grown(|numbers| numbers.skipped);
    if skipped > 0 {
        let stacks = count(skipped, "CPU's stacks", "CPUs' stacks");
        events.push(("skipped", format!("{stacks}, held by a thread or with a failed fence")));
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::reading::tests::{reading, readings};

    #[test]
    fn everything_that_grew_is_told_in_words() {
        let [previous, current] = &readings();
        let expected = [
            ("thread", "neap's thread, awake before, is asleep"),
            ("drained", "4 CPUs' stacks and 2 page lists"),
            ("released", "5.9M (1500 pages) to the system by 15 calls"),
            ("failed", "1 call that should have released pages"),
            ("refilled", "2.9M of holes in slabs"),
            ("need", "2 allocations found no free page until page lists gave 80.0K"),
            ("skipped", "1 CPU's stacks, held by a thread or with a failed fence"),
        ];
        let told = between(Pair { previous, current });
        assert_eq!(told.iter().map(|(kind, what)| (*kind, what.as_str())).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn counters_unchanged_or_restarted_report_no_events() {
        let [before, after] = &readings();
        assert_eq!(between(Pair { previous: after, current: after }), []);
        let told = between(Pair { previous: after, current: before });
        assert_eq!(told, [("thread", "neap's thread, asleep before, is awake".to_string())]);
    }

    #[test]
    fn the_last_events_come_first_and_the_first_are_forgotten() {
        let numbers = |drains: u64| reading(1000 + drains, &serde_json::json!({"drains": drains}));
        let mut log = Log::default();
        let most = MOST as u64;
        for drains in 0..most + 5 {
            log.follow(Pair { previous: &numbers(drains), current: &numbers(drains + 1) });
        }
        log.add("12:00:00", "asked", "to drain everything".to_string());
        let events = log.events();
        assert_eq!((events.len(), events[0].kind, events[0].number), (MOST, "asked", most + 5));
        assert_eq!((events[1].what.as_str(), events[MOST - 1].number), ("1 CPU's stacks", 6));
    }
}
