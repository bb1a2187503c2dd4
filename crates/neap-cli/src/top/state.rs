//! What the user of `neap top` has chosen, and what each key does to it.
//!
//! Sits between the keys and the screen, which is a pure function of this and of two readings. It does nothing itself: what a
//! key asks of the process or of the terminal comes back as an [`Action`].

use core::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::events::Log;
use super::listing::{Listing, Order};
use super::panes::Pane;
use super::reading::Pair;

/// Times between two readings that keys lead to.
pub(super) const SHORTEST: Duration = Duration::from_millis(50);
pub(super) const LONGEST: Duration = Duration::from_secs(60);

/// Rows that a page key moves by.
const PAGE: usize = 10;

/// What a key asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    None,
    Quit,
    /// That a CPU's caches go to the free pages, or all.
    Drain(Option<u32>),
}

/// What is chosen in a pane.
#[derive(Clone, Default)]
struct Choice {
    order: Order,
    /// A row, by what it is told from others by, and by where it stood: another one is there if it has gone.
    row: Option<(String, usize)>,
}

/// All that a screen depends on besides readings.
pub(super) struct State {
    pub(super) pane: Pane,
    choices: [Choice; Pane::ALL.len()],
    /// No new readings are taken.
    pub(super) frozen: bool,
    pub(super) help: bool,
    /// From one reading to the next.
    pub(super) interval: Duration,
    /// Said in the last line until the next key.
    pub(super) message: Option<String>,
    pub(super) log: Log,
}

impl State {
    pub(super) fn new(interval: Duration) -> State {
        State {
            pane: Pane::Cpus,
            choices: Default::default(),
            frozen: false,
            help: false,
            interval,
            message: None,
            log: Log::default(),
        }
    }

    pub(super) fn order(&self, pane: Pane) -> Order {
        self.choices[pane as usize].order
    }

    /// What a pane shows now, in the user's order.
    pub(super) fn listing(&self, pane: Pane, pair: Pair<'_>) -> Listing {
        pane.listing(pair, self.log.events()).sorted(self.order(pane))
    }

    /// Where the chosen row of a pane is now.
    pub(super) fn row(&self, pane: Pane, listing: &Listing) -> Option<usize> {
        let (key, row) = self.choices[pane as usize].row.as_ref()?;
        let last = listing.keys().len().checked_sub(1)?;
        Some(listing.keys().position(|each| each == key).unwrap_or((*row).min(last)))
    }

    /// Does what a key says.
    pub(super) fn press(&mut self, key: KeyEvent, pair: Pair<'_>) -> Action {
        self.message = None;
        let was_help = core::mem::take(&mut self.help);
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return Action::Quit,
            _ if control => {}
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Esc if !was_help => self.choices[self.pane as usize].row = None,
            KeyCode::Char('?' | 'h') => self.help = !was_help,
            KeyCode::Tab | KeyCode::Right => self.turn(1),
            KeyCode::BackTab | KeyCode::Left => self.turn(Pane::ALL.len() - 1),
            KeyCode::Char('s') => self.sort(pair),
            KeyCode::Char('r') => {
                let order = &mut self.choices[self.pane as usize].order;
                order.reversed = !order.reversed;
            }
            KeyCode::Char(' ') => self.frozen = !self.frozen,
            KeyCode::Char('+') => self.interval = self.interval.saturating_mul(2).min(LONGEST),
            KeyCode::Char('-') => self.interval = (self.interval / 2).max(SHORTEST),
            KeyCode::Char('d') => return Action::Drain(None),
            KeyCode::Char('D') => match self.chosen_cpu(pair) {
                Some(cpu) => return Action::Drain(Some(cpu)),
                None => self.message = Some("Choose a CPU first: Tab to the CPU caches, then Down.".to_string()),
            },
            code => self.step(code, pair),
        }
        Action::None
    }

    fn turn(&mut self, by: usize) {
        self.pane = Pane::ALL[(self.pane as usize + by) % Pane::ALL.len()];
    }

    fn sort(&mut self, pair: Pair<'_>) {
        let columns = self.listing(self.pane, pair).columns();
        let order = &mut self.choices[self.pane as usize].order;
        let next = order.column.map_or(0, |column| column + 1);
        *order = Order { column: (next < columns).then_some(next), reversed: false };
    }

    fn chosen_cpu(&self, pair: Pair<'_>) -> Option<u32> {
        if self.pane != Pane::Cpus {
            return None;
        }
        let listing = self.listing(Pane::Cpus, pair);
        let row = self.row(Pane::Cpus, &listing)?;
        listing.keys().nth(row)?.parse().ok()
    }

    /// Keys that choose a row.
    fn step(&mut self, code: KeyCode, pair: Pair<'_>) {
        let listing = self.listing(self.pane, pair);
        let Some(last) = listing.keys().len().checked_sub(1) else { return };
        let row = self.row(self.pane, &listing);
        let down = |by: usize| row.map_or(0, |row| row + by).min(last);
        let up = |by: usize| row.map_or(last, |row| row.saturating_sub(by));
        let to = match code {
            KeyCode::Down | KeyCode::Char('j') => down(1),
            KeyCode::Up | KeyCode::Char('k') => up(1),
            KeyCode::PageDown => down(PAGE),
            KeyCode::PageUp => up(PAGE),
            KeyCode::Home => 0,
            KeyCode::End => last,
            _ => return,
        };
        self.choices[self.pane as usize].row = listing.keys().nth(to).map(|key| (key.to_string(), to));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::reading::tests::readings;

    /// Presses keys that each are a letter, or a name; answers what the last asked for.
    fn press(state: &mut State, pair: Pair<'_>, keys: &str) -> Action {
        let mut last = Action::None;
        for key in keys.split(' ') {
            let code = match key {
                "Tab" => KeyCode::Tab,
                "Back" => KeyCode::BackTab,
                "Down" => KeyCode::Down,
                "Up" => KeyCode::Up,
                "PgDn" => KeyCode::PageDown,
                "Home" => KeyCode::Home,
                "End" => KeyCode::End,
                "Esc" => KeyCode::Esc,
                "space" => KeyCode::Char(' '),
                letter => KeyCode::Char(letter.chars().next().unwrap()),
            };
            last = state.press(KeyEvent::from(code), pair);
        }
        last
    }

    fn chosen(state: &State, pair: Pair<'_>) -> Option<String> {
        let listing = state.listing(state.pane, pair);
        state.row(state.pane, &listing).map(|row| listing.keys().nth(row).unwrap().to_string())
    }

    #[test]
    fn the_chosen_cpu_is_drained_wherever_it_stands_now() {
        let [previous, current] = &readings();
        let (pair, old) = (Pair { previous, current }, Pair { previous, current: previous });
        let mut state = State::new(Duration::from_secs(1));
        assert_eq!(press(&mut state, pair, "D"), Action::None);
        assert!(state.message.as_ref().unwrap().contains("Choose a CPU"));
        assert_eq!(press(&mut state, old, "Down Down D"), Action::Drain(Some(2)));
        assert_eq!(state.message, None);
        // It is the third row now, and by bytes of objects another one again.
        assert_eq!(press(&mut state, pair, "D"), Action::Drain(Some(2)));
        assert_eq!(press(&mut state, pair, "s s s s D"), Action::Drain(Some(2)));
        assert_eq!(press(&mut state, pair, "Up D"), Action::Drain(Some(0)), "40960 bytes of objects");
        assert_eq!(press(&mut state, pair, "Up Up Up r D"), Action::Drain(Some(0)), "the last now");
        assert_eq!(press(&mut state, pair, "End D"), Action::Drain(Some(0)));
        assert_eq!(press(&mut state, pair, "Home D"), Action::Drain(Some(1)));
        // One that has gone leaves its place to another, and has it again.
        assert_eq!(press(&mut state, old, "D"), Action::Drain(Some(0)));
        assert_eq!(press(&mut state, pair, "D"), Action::Drain(Some(1)));
        assert_eq!(press(&mut state, pair, "Esc D"), Action::None);
        assert_eq!(press(&mut state, pair, "Tab Down D"), Action::None, "a row of another pane is no CPU");
        assert_eq!(press(&mut state, pair, "d"), Action::Drain(None));
    }

    #[test]
    fn panes_go_round_and_each_keeps_its_row() {
        let [previous, current] = &readings();
        let pair = Pair { previous, current };
        let mut state = State::new(Duration::from_secs(1));
        press(&mut state, pair, "End Tab");
        assert_eq!((state.pane, chosen(&state, pair)), (Pane::Events, None));
        press(&mut state, pair, "Down Tab PgDn PgDn");
        assert_eq!((state.pane, chosen(&state, pair).as_deref()), (Pane::Zones, Some("1")));
        press(&mut state, pair, "Back");
        assert_eq!((state.pane, chosen(&state, pair)), (Pane::Events, None), "there is no event");
        press(&mut state, pair, "Back");
        assert_eq!((state.pane, chosen(&state, pair).as_deref()), (Pane::Cpus, Some("2")));
    }

    #[test]
    fn sorting_goes_through_the_columns_and_ends_where_it_began() {
        let [previous, current] = &readings();
        let pair = Pair { previous, current };
        let mut state = State::new(Duration::from_secs(1));
        let columns = state.listing(Pane::Cpus, pair).columns();
        let mut seen = Vec::new();
        for _ in 0..=columns {
            press(&mut state, pair, "s");
            seen.push(state.order(Pane::Cpus).column);
        }
        assert_eq!(seen, (0..columns).map(Some).chain([None]).collect::<Vec<_>>());
        press(&mut state, pair, "r");
        assert_eq!(state.order(Pane::Cpus), Order { column: None, reversed: true });
        assert_eq!(state.order(Pane::Zones), Order::default());
    }

    #[test]
    fn keys_freeze_change_the_interval_explain_themselves_and_end_it() {
        let [previous, current] = &readings();
        let pair = Pair { previous, current };
        let mut state = State::new(Duration::from_secs(1));
        press(&mut state, pair, "+ +");
        assert_eq!(state.interval, Duration::from_secs(4));
        press(&mut state, pair, "+ + + + + +");
        assert_eq!(state.interval, LONGEST);
        (0..20).for_each(|_| assert_eq!(press(&mut state, pair, "-"), Action::None));
        assert_eq!(state.interval, SHORTEST);
        press(&mut state, pair, "space");
        assert!(state.frozen);
        press(&mut state, pair, "space ?");
        assert!(!state.frozen && state.help);
        press(&mut state, pair, "?");
        assert!(!state.help);
        press(&mut state, pair, "Down ? Esc");
        assert!(!state.help && chosen(&state, pair).is_some(), "the help is left first");
        assert_eq!(press(&mut state, pair, "q"), Action::Quit);
        let control = |letter| KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL);
        assert_eq!(state.press(control('c'), pair), Action::Quit);
        assert_eq!(state.press(control('d'), pair), Action::None, "no request by mistake");
    }
}
