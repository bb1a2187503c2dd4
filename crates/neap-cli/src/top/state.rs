//! The user's choices in `neap top`, and the effect of each key.
//!
//! A key changes only the state here. If it needs more, such as a request to the process,
//! [`View::press`] returns an [`Action`].

use core::str::FromStr;
use core::time::Duration;

use neap::groups::Bound;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::events::Log;
use super::groups::Known;
use super::listing::{Listing, SortOrder};
use super::panes::Pane;
use super::reading::Pair;
use super::sites::ProfilePane;
use crate::groups::bytes_of;

/// Shortest interval of readings that keys can set.
pub(super) const SHORTEST: Duration = Duration::from_millis(50);
pub(super) const LONGEST: Duration = Duration::from_secs(60);

/// Rows that a page key moves by.
const PAGE: usize = 10;

/// Most characters that can be typed for a bound.
const LETTERS: usize = 24;

/// The action that the caller performs after a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Action {
    None,
    Quit,
    /// Drain the caches of a CPU, or of all.
    Drain(Option<u32>),
    Change(Change),
}

/// A change of a bound of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Change {
    /// Id of the group.
    pub(super) group: u64,
    /// Path of the group, as the user sees it.
    pub(super) path: String,
    pub(super) bound: Bound,
    pub(super) bytes: u64,
}

/// A change that the user is typing.
struct Input {
    wanted: Change,
    text: String,
}

/// The selection in a pane.
#[derive(Clone, Default)]
pub(super) struct Choice {
    pub(super) order: SortOrder,
    /// Key and place of the selected row. If no row has the key, the row at the place is selected.
    row: Option<(String, usize)>,
}

impl Choice {
    /// The current place of the selected row.
    pub(super) fn row(&self, listing: &Listing) -> Option<usize> {
        let (key, row) = self.row.as_ref()?;
        let last = listing.keys().len().checked_sub(1)?;
        Some(listing.keys().position(|each| each == key).unwrap_or((*row).min(last)))
    }

    /// The key of the selected row, also if no row has it now.
    pub(super) fn key(&self) -> Option<&String> {
        self.row.as_ref().map(|(key, _)| key)
    }

    /// Selects no row.
    pub(super) fn forget(&mut self) {
        self.row = None;
    }

    /// Sorts by the next of `columns` columns. After the last one, restores the pane's own order.
    pub(super) fn sort(&mut self, columns: usize) {
        let next = self.order.column.map_or(0, |column| column + 1);
        self.order = SortOrder { column: (next < columns).then_some(next), reversed: false };
    }

    pub(super) fn turn_round(&mut self) {
        self.order.reversed = !self.order.reversed;
    }

    /// Applies a key that moves the selection.
    pub(super) fn step(&mut self, code: KeyCode, listing: &Listing) {
        let Some(last) = listing.keys().len().checked_sub(1) else { return };
        let row = self.row(listing);
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
        self.row = listing.keys().nth(to).map(|key| (key.to_string(), to));
    }
}

/// The state of a screen, without readings.
pub(super) struct View {
    pane: Pane,
    choices: [Choice; Pane::ALL.len()],
    /// Whether the screen takes no new readings.
    pub(super) frozen: bool,
    pub(super) help: bool,
    /// Interval between two readings.
    pub(super) interval: Duration,
    /// Message in the last line, until the next key.
    pub(super) message: Option<String>,
    input: Option<Input>,
    pub(super) log: Log,
    pub(super) groups: Known,
    pub(super) profile: ProfilePane,
}

impl View {
    pub(super) fn new(interval: Duration) -> View {
        View {
            pane: Pane::Cpus,
            choices: Default::default(),
            frozen: false,
            help: false,
            interval,
            message: None,
            input: None,
            log: Log::default(),
            groups: Known::default(),
            profile: ProfilePane::default(),
        }
    }

    /// Switches the profile on or off. Selects its pane if the profile is on afterwards.
    pub(super) fn turn_profile(&mut self) {
        self.profile.turn();
        if self.profile.is_on() {
            self.pane = Pane::Profile;
        }
    }

    /// Returns the selected pane. If that pane is not shown, returns the pane of CPUs.
    pub(super) fn pane(&self, pair: Pair<'_>) -> Pane {
        if Pane::shown(pair, self).contains(&self.pane) { self.pane } else { Pane::Cpus }
    }

    /// The text being typed, with its prompt.
    pub(super) fn typed(&self) -> Option<String> {
        let Input { wanted, text } = self.input.as_ref()?;
        let hint = self.message.as_deref().unwrap_or("such as 64m, or none; Enter sends it, Esc cancels");
        Some(format!("{}: {text}_  of {}: {hint}", wanted.bound.name(), wanted.path))
    }

    pub(super) fn order(&self, pane: Pane) -> SortOrder {
        self.choices[pane as usize].order
    }

    /// The current content of a pane, in the user's order.
    pub(super) fn listing(&self, pane: Pane, pair: Pair<'_>) -> Listing {
        pane.listing(pair, self).sorted(self.order(pane))
    }

    /// The current place of the selected row of a pane.
    pub(super) fn row(&self, pane: Pane, listing: &Listing) -> Option<usize> {
        self.choices[pane as usize].row(listing)
    }

    /// Applies a key.
    pub(super) fn press(&mut self, key: KeyEvent, pair: Pair<'_>) -> Action {
        self.message = None;
        let was_help = core::mem::take(&mut self.help);
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        self.pane = self.pane(pair);
        match key.code {
            KeyCode::Char('c') if control => return Action::Quit,
            _ if control => {}
            code if self.input.is_some() => return self.write(code),
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Esc if !was_help => self.choices[self.pane as usize].forget(),
            KeyCode::Char('m') if self.pane == Pane::Groups => self.begin(Bound::Max, pair),
            KeyCode::Char('h') if self.pane == Pane::Groups => self.begin(Bound::High, pair),
            KeyCode::Char('l') if self.pane == Pane::Groups => self.begin(Bound::Low, pair),
            KeyCode::Char('n') if self.pane == Pane::Groups => self.begin(Bound::Min, pair),
            KeyCode::Enter if self.pane == Pane::Groups => {
                if let Some(group) = self.chosen_group(pair) {
                    self.groups.fold(group);
                }
            }
            KeyCode::Char('?' | 'h') => self.help = !was_help,
            KeyCode::Tab | KeyCode::Right => self.turn(true, pair),
            KeyCode::BackTab | KeyCode::Left => self.turn(false, pair),
            KeyCode::Char('s') => self.sort(pair),
            KeyCode::Char('r') => self.choices[self.pane as usize].turn_round(),
            KeyCode::Char('p') => self.turn_profile(),
            KeyCode::Char(' ') => self.frozen = !self.frozen,
            KeyCode::Char('+') => self.interval = self.interval.saturating_mul(2).min(LONGEST),
            KeyCode::Char('-') => self.interval = (self.interval / 2).max(SHORTEST),
            KeyCode::Char('d') => return Action::Drain(None),
            KeyCode::Char('D') => match self.chosen(Pane::Cpus, pair) {
                Some(cpu) => return Action::Drain(Some(cpu)),
                None => self.message = Some("Choose a CPU first: Tab to the CPU caches, then Down.".to_string()),
            },
            code => self.step(code, pair),
        }
        Action::None
    }

    fn turn(&mut self, forth: bool, pair: Pair<'_>) {
        let shown = Pane::shown(pair, self);
        let at = shown.iter().position(|pane| *pane == self.pane).unwrap_or(0);
        self.pane = shown[(at + if forth { 1 } else { shown.len() - 1 }) % shown.len()];
    }

    fn sort(&mut self, pair: Pair<'_>) {
        let columns = self.listing(self.pane, pair).columns();
        self.choices[self.pane as usize].sort(columns);
    }

    /// Returns the item of the selected row, if the user is in `pane`.
    fn chosen<T: FromStr>(&self, pane: Pane, pair: Pair<'_>) -> Option<T> {
        if self.pane != pane {
            return None;
        }
        let listing = self.listing(pane, pair);
        let row = self.row(pane, &listing)?;
        listing.keys().nth(row)?.parse().ok()
    }

    /// Returns the selected group. Without one, shows a message on how to select one.
    fn chosen_group(&mut self, pair: Pair<'_>) -> Option<u64> {
        let group = self.chosen(Pane::Groups, pair);
        if group.is_none() {
            self.message = Some("Choose a group first: Down.".to_string());
        }
        group
    }

    /// Begins the input of a bound of the selected group.
    fn begin(&mut self, bound: Bound, pair: Pair<'_>) {
        if let Some(group) = self.chosen_group(pair) {
            let path = self.groups.path(group).unwrap_or_default();
            self.input = Some(Input { wanted: Change { group, path, bound, bytes: 0 }, text: String::new() });
        }
    }

    /// Applies a key while a bound is typed.
    fn write(&mut self, code: KeyCode) -> Action {
        let Some(Input { wanted, text }) = &mut self.input else { return Action::None };
        match code {
            KeyCode::Char(letter) if text.chars().count() < LETTERS => text.push(letter),
            KeyCode::Backspace => _ = text.pop(),
            KeyCode::Esc => self.input = None,
            KeyCode::Enter => match bytes_of(wanted.bound, text) {
                Ok(bytes) => {
                    let change = Change { bytes, ..wanted.clone() };
                    self.input = None;
                    return Action::Change(change);
                }
                Err(error) => self.message = Some(error),
            },
            _ => {}
        }
        Action::None
    }

    /// Applies a key that moves the selection.
    fn step(&mut self, code: KeyCode, pair: Pair<'_>) {
        let listing = self.listing(self.pane, pair);
        self.choices[self.pane as usize].step(code, &listing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::groups::tests::known;
    use crate::top::reading::tests::{readings, readings_with_groups};
    use crate::top::sites::tests::pane;

    /// Presses keys, each a letter or a name. Returns the action of the last.
    fn press(state: &mut View, pair: Pair<'_>, keys: &str) -> Action {
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
                "Enter" => KeyCode::Enter,
                "Rub" => KeyCode::Backspace,
                "space" => KeyCode::Char(' '),
                letter => KeyCode::Char(letter.chars().next().unwrap()),
            };
            last = state.press(KeyEvent::from(code), pair);
        }
        last
    }

    fn chosen(state: &View, pair: Pair<'_>) -> Option<String> {
        let listing = state.listing(state.pane, pair);
        state.row(state.pane, &listing).map(|row| listing.keys().nth(row).unwrap().to_string())
    }

    #[test]
    fn the_chosen_cpu_is_drained_wherever_it_stands_now() {
        let [previous, current] = &readings();
        let (pair, old) = (Pair { previous, current }, Pair { previous, current: previous });
        let mut state = View::new(Duration::from_secs(1));
        assert_eq!(press(&mut state, pair, "D"), Action::None);
        assert!(state.message.as_ref().unwrap().contains("Choose a CPU"));
        assert_eq!(press(&mut state, old, "Down Down D"), Action::Drain(Some(2)));
        assert_eq!(state.message, None);
        // It is the third row now, and another one when sorted by bytes of objects.
        assert_eq!(press(&mut state, pair, "D"), Action::Drain(Some(2)));
        assert_eq!(press(&mut state, pair, "s s s s D"), Action::Drain(Some(2)));
        assert_eq!(press(&mut state, pair, "Up D"), Action::Drain(Some(0)), "40960 bytes of objects");
        assert_eq!(press(&mut state, pair, "Up Up Up r D"), Action::Drain(Some(0)), "the last now");
        assert_eq!(press(&mut state, pair, "End D"), Action::Drain(Some(0)));
        assert_eq!(press(&mut state, pair, "Home D"), Action::Drain(Some(1)));
        // A row that has gone leaves its place to another, and gets it back.
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
        let mut state = View::new(Duration::from_secs(1));
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
        let mut state = View::new(Duration::from_secs(1));
        let columns = state.listing(Pane::Cpus, pair).columns();
        let mut seen = Vec::new();
        for _ in 0..=columns {
            press(&mut state, pair, "s");
            seen.push(state.order(Pane::Cpus).column);
        }
        assert_eq!(seen, (0..columns).map(Some).chain([None]).collect::<Vec<_>>());
        press(&mut state, pair, "r");
        assert_eq!(state.order(Pane::Cpus), SortOrder { column: None, reversed: true });
        assert_eq!(state.order(Pane::Zones), SortOrder::default());
    }

    #[test]
    fn top_keys_freeze_help_interval_and_quit() {
        let [previous, current] = &readings();
        let pair = Pair { previous, current };
        let mut state = View::new(Duration::from_secs(1));
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

    #[test]
    fn a_group_s_bounds_are_typed_and_sent_once_they_are_numbers() {
        let [previous, current] = &readings_with_groups();
        let pair = Pair { previous, current };
        let mut state = View { groups: known(), pane: Pane::Groups, ..View::new(Duration::from_secs(1)) };
        assert_eq!(press(&mut state, pair, "m"), Action::None);
        assert!(state.typed().is_none() && state.message.as_ref().unwrap().contains("Choose a group"));
        let change =
            |group, path: &str, bound, bytes| Action::Change(Change { group, path: path.into(), bound, bytes });
        let acme = |bound, bytes| change(3, "tenant/acme", bound, bytes);
        assert_eq!(
            press(&mut state, pair, "Down Down Down Down m 6 4 m Enter"),
            acme(Bound::Max, 64 << 20),
            "the fourth row, and an m that is typed"
        );
        assert_eq!((state.typed(), &state.message), (None, &None));
        assert_eq!(press(&mut state, pair, "h n o n e Enter"), acme(Bound::High, u64::MAX));
        assert_eq!(press(&mut state, pair, "n n o n e Enter"), acme(Bound::Min, 0));
        assert_eq!(press(&mut state, pair, "l 4 k q"), Action::None, "a letter and no key");
        assert_eq!(press(&mut state, pair, "Enter"), Action::None);
        assert_eq!(state.typed().unwrap(), "low: 4kq_  of tenant/acme: not a number of bytes");
        assert_eq!(press(&mut state, pair, "Rub Enter"), acme(Bound::Low, 4096));
        // The root too, and no change after the input was cancelled.
        press(&mut state, pair, "Home m 1 Tab");
        assert!(state.typed().unwrap().starts_with("max: 1_  of (all): such as 64m"), "{:?}", state.typed());
        assert_eq!(press(&mut state, pair, "Enter"), change(1, "(all)", Bound::Max, 1));
        assert_eq!(press(&mut state, pair, "m 1 Esc Enter"), Action::None);
        assert_eq!((state.typed(), chosen(&state, pair).as_deref()), (None, Some("1")));
        press(&mut state, pair, "m");
        (0..100).for_each(|_| _ = press(&mut state, pair, "9"));
        assert_eq!(state.typed().unwrap().matches('9').count(), LETTERS);
        press(&mut state, pair, "Enter");
        assert!(state.typed().unwrap().contains("not a number"), "{:?}", state.typed());
        let control = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(state.press(control, pair), Action::Quit);
    }

    #[test]
    fn groups_fold_and_are_chosen_wherever_they_stand() {
        let [previous, current] = &readings_with_groups();
        let pair = Pair { previous, current };
        let mut state = View { groups: known(), pane: Pane::Groups, ..View::new(Duration::from_secs(1)) };
        let rows = |state: &View| state.listing(Pane::Groups, pair).keys().collect::<Vec<_>>().join(" ");
        assert_eq!(rows(&state), "1 5 2 3 4");
        press(&mut state, pair, "Down Down Down Enter");
        assert_eq!((rows(&state).as_str(), chosen(&state, pair).as_deref()), ("1 5 2", Some("2")));
        press(&mut state, pair, "Enter s s");
        assert_eq!((rows(&state).as_str(), chosen(&state, pair).as_deref()), ("1 2 3 4 5", Some("2")), "by use");
        let listing = state.listing(Pane::Groups, pair);
        assert!(listing.lines(200).1[3].starts_with("tenant/beta "), "no tree, so paths");
    }

    #[test]
    fn profile_has_a_pane_while_the_user_wants_it() {
        let [previous, current] = &readings();
        let pair = Pair { previous, current };
        let mut state = View::new(Duration::from_secs(1));
        press(&mut state, pair, "p");
        assert_eq!((state.profile.turn, state.pane(pair)), (1, Pane::Profile));
        state.profile = pane();
        press(&mut state, pair, "Down Down s");
        assert_eq!(chosen(&state, pair).as_deref(), Some("[in no sample: allocated before sampling]"));
        press(&mut state, pair, "Tab p");
        assert_eq!((state.profile.turn, state.pane(pair)), (2, Pane::Zones), "it is off, and the user elsewhere");
        press(&mut state, pair, "p p");
        assert_eq!((state.profile.turn, state.pane(pair)), (4, Pane::Cpus));
        assert!(!Pane::shown(pair, &state).contains(&Pane::Profile));
    }

    #[test]
    fn groups_have_a_pane_only_where_there_are_groups() {
        let [previous, current] = &readings_with_groups();
        let with = Pair { previous, current };
        let [previous, current] = &readings();
        let without = Pair { previous, current };
        let mut state = View { groups: known(), ..View::new(Duration::from_secs(1)) };
        press(&mut state, with, "Back Back");
        assert_eq!((state.pane(with), state.pane(without)), (Pane::Groups, Pane::Cpus));
        press(&mut state, with, "Back");
        assert_eq!(state.pane(with), Pane::Events);
        press(&mut state, with, "Tab");
        assert_eq!(state.pane(with), Pane::Groups);
        // The process has executed another program.
        press(&mut state, without, "h");
        assert!(state.help && state.pane == Pane::Cpus, "a key of this pane");
        press(&mut state, without, "Back Back");
        assert_eq!(state.pane(with), Pane::Events);
        assert_eq!(press(&mut state, with, "m"), Action::None);
        assert!(state.typed().is_none() && state.message.is_none());
    }
}
