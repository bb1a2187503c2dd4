//! The screen of `neap top`, as lines. It is a pure function of two readings, of the user's
//! choices, and of a size.
//!
//! Tests can compare every screen as text. No information is in colours alone.

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

use super::listing::{Listing, SortOrder};
use super::panes::Pane;
use super::reading::Pair;
use super::state::View;
use super::summary;

/// Least columns and lines of a useful screen.
const LEAST: (usize, usize) = (60, 16);

/// Least lines of each pane: its title, its heads and one row.
const SHUT: usize = 3;

const KEYS: &str = "q quit  Tab pane  s sort  p profile  d drain  D drain CPU  space freeze  ? help";
const GROUP_KEYS: &str = "q quit  Tab pane  s sort  Enter fold  m max  h high  l low  n min  ? help";

const HELP: &[&str] = &[
    "Tab, left, right     the next pane, or the one before",
    "up, down, page, Home choose a row; Esc chooses none",
    "s, r                 sort by next column; reverse the order",
    "d, D                 empty all CPUs' caches, or the chosen's",
    "Enter                fold the groups below one, or unfold",
    "p                    profile: sample allocations, or end it",
    "m, h, l, n           type a group's max, high, low or min",
    "space                freeze: stop readings, or resume them",
    "+, -                 twice or half the time between readings",
    "q, Ctrl-C            quit",
    "",
    "K, M and G are powers of 1024. Memory is current; neap's",
    "counters are as of the process's last tick. The bar shows",
    "the resident memory. Its letters are those before the names",
    "above it. A blank is other memory of the process.",
];

/// All lines of a screen of this size.
pub(super) fn lines(width: usize, height: usize, pair: Pair<'_>, state: &View) -> Vec<Line<'static>> {
    if width < LEAST.0 || height < LEAST.1 {
        let (least_width, least_height) = LEAST;
        let text = format!("{width}x{height} is too small: neap top needs {least_width}x{least_height}. q quits.");
        return wrapped(&text, width.max(1)).into_iter().take(height).map(Line::from).collect();
    }
    let mut lines;
    if state.help {
        lines = HELP.iter().map(|line| Line::from(*line)).collect();
    } else {
        lines = head(pair, state, width);
        lines.extend(panes(width, height - lines.len() - 1, pair, state));
    }
    lines.resize(height - 1, Line::default());
    let keys = if state.pane(pair) == Pane::Groups { GROUP_KEYS } else { KEYS };
    lines.push(match state.typed().as_ref().or(state.message.as_ref()) {
        Some(said) => Line::styled(cut(said, width), Modifier::BOLD),
        None => Line::styled(cut(keys, width), Modifier::DIM),
    });
    lines
}

/// The whole content, without keys, in as many lines and columns as needed.
pub(super) fn text(pair: Pair<'_>, state: &View) -> String {
    let listings: Vec<_> = Pane::shown(pair, state).iter().map(|pane| state.listing(*pane, pair)).collect();
    let width = listings.iter().map(|listing| listing.width()).max().unwrap_or(0).max(WIDTH);
    let height = listings.iter().map(|listing| listing.height(width)).sum();
    let mut lines = head(pair, state, width);
    lines.extend(panes(width, height, pair, state));
    let plain = lines.iter().map(|line| line.spans.iter().map(|span| span.content.as_ref()).collect::<String>());
    plain.map(|line| format!("{}\n", line.trim_end())).collect()
}

/// The least width of text.
const WIDTH: usize = 80;

pub(super) fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

fn wrapped(text: &str, width: usize) -> Vec<String> {
    let letters: Vec<char> = text.chars().collect();
    letters.chunks(width).map(|line| line.iter().collect()).collect()
}

/// The title, and the lines about the whole process.
fn head(pair: Pair<'_>, state: &View, width: usize) -> Vec<Line<'static>> {
    let now = pair.current;
    let (frozen, every) = match state.frozen {
        true => ("FROZEN at ", String::new()),
        false => ("", format!(", every {} ms", state.interval.as_millis())),
    };
    let (pid, name, clock, age) = (now.pid, &now.name, &now.clock, pair.age().as_millis());
    let title = format!("neap top {pid} ({name}), {frozen}{clock}, numbers {age} ms old{every}");
    let mut lines = vec![Line::styled(cut(&title, width), Modifier::BOLD)];
    lines.extend(summary::lines(pair, width).into_iter().map(Line::from));
    let mut bar = vec![Span::raw(format!("{:<9}[", "resident"))];
    for (letter, length) in summary::bar(&summary::parts(pair), width - 11) {
        let colour = match letter {
            '#' | 'p' => Color::Blue,
            'o' | 'l' => Color::Yellow,
            _ => Color::Reset,
        };
        bar.push(Span::styled(String::from(letter).repeat(length), colour));
    }
    bar.push(Span::raw("]"));
    lines.push(Line::from(bar));
    lines
}

/// Returns the number of lines of each pane. `wanted` is the number that each pane could use,
/// `room` the number of all lines, and `user` the pane that the user is in. Each pane first gets at
/// most [`SHUT`] lines. The rest goes to the user's pane, and then to the others from the top down.
/// If there is no room for all panes, the user's pane gets everything.
fn shares(room: usize, wanted: &[usize], user: usize) -> Vec<usize> {
    let mut shares: Vec<usize> = wanted.iter().map(|wanted| SHUT.min(*wanted)).collect();
    let Some(mut rest) = room.checked_sub(shares.iter().sum()) else {
        return (0..wanted.len()).map(|pane| if pane == user { room } else { 0 }).collect();
    };
    for pane in core::iter::once(user).chain(0..wanted.len()) {
        let more = rest.min(wanted[pane] - shares[pane]);
        shares[pane] += more;
        rest -= more;
    }
    shares
}

/// Returns at most `share` lines of a pane: its title, its heads, and rows that include the chosen
/// one.
pub(super) fn pane_lines(
    listing: &Listing,
    order: SortOrder,
    row: Option<usize>,
    is_users: bool,
    share: usize,
    width: usize,
) -> Vec<Line<'static>> {
    let (heads, rows) = listing.lines(width);
    let shown = share.saturating_sub(2);
    // The chosen row is among the shown ones.
    let first = row.map_or(0, |row| (row + 1).saturating_sub(shown));
    let more = match rows.len() - first.min(rows.len()) {
        left if left > shown && shown > 0 => format!(", {} more below", left - shown),
        _ => String::new(),
    };
    let heading = format!("-- {}{more} ", listing.heading(order));
    let heading = cut(&format!("{heading:-<width$}"), width);
    let style = Style::from(if is_users { Modifier::BOLD | Modifier::REVERSED } else { Modifier::BOLD });
    let mut all = vec![Line::styled(heading, style), Line::styled(heads, Modifier::BOLD)];
    for (at, text) in rows.into_iter().enumerate().skip(first) {
        let chosen = row == Some(at);
        all.push(if chosen { Line::styled(format!("{text:<width$}"), Modifier::REVERSED) } else { Line::from(text) });
    }
    all.truncate(share);
    all
}

fn panes(width: usize, room: usize, pair: Pair<'_>, state: &View) -> Vec<Line<'static>> {
    let shown = Pane::shown(pair, state);
    let listings: Vec<_> = shown.iter().map(|pane| state.listing(*pane, pair)).collect();
    let wanted: Vec<usize> = listings.iter().map(|listing| listing.height(width)).collect();
    let user = shown.iter().position(|pane| *pane == state.pane(pair)).unwrap_or(0);
    let mut lines = Vec::new();
    for ((pane, listing), share) in shown.iter().zip(&listings).zip(shares(room, &wanted, user)) {
        let is_users = *pane == state.pane(pair);
        let row = state.row(*pane, listing).filter(|_| is_users);
        lines.extend(pane_lines(listing, state.order(*pane), row, is_users, share, width));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::groups::tests::known;
    use crate::top::live::draw;
    use crate::top::reading::Reading;
    use crate::top::reading::tests::{readings, readings_with_groups};
    use crate::top::sites::tests::pane;
    use core::time::Duration;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent};

    fn state() -> View {
        View::new(Duration::from_secs(1))
    }

    /// The content of a terminal of this size, without spaces at ends of lines.
    fn shown(width: u16, height: u16, state: &View) -> String {
        shown_of(&readings(), width, height, state)
    }

    fn shown_of([previous, current]: &[Reading; 2], width: u16, height: u16, state: &View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, Pair { previous, current }, state)).unwrap();
        let cells = terminal.backend().buffer().content().chunks(width.into());
        let lines = cells.map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>());
        lines.map(|line| format!("{}\n", line.trim_end())).collect()
    }

    fn press(state: &mut View, code: KeyCode) {
        let [previous, current] = &readings();
        state.press(KeyEvent::from(code), Pair { previous, current });
    }

    #[test]
    fn a_usual_terminal_shows_the_essentials_of_everything() {
        let [previous, current] = &readings();
        let mut state = state();
        state.log.follow(Pair { previous, current });
        let expected = "\
neap top 1234 (redis-server), 13:42:11, numbers 120 ms old, every 1000 ms
memory   resident 100.0M  # in use 60.0M  limit 256.0M  counted 93.8M
cached   o objects 10.0M  l page lists 2.3M  . free pages 7.8M
a second faults 3000  populated 7.8M  released 5.9M  fences 20.0  ticks 10.0
neap     slots rseq  thread asleep  holes 308.0K  skipped 1  unaccounted 0
resident [#########################################ppppoooooool......          ]
-- Zones -----------------------------------------------------------------------
node  managed   used   free  resident  in lists  may keep  waits/s     low  high
   0    78.1M  46.9M  31.2M      3.9M      1.2M      2.7M     20.0  800.0K  1.2M
   1    78.1M  46.9M  31.2M      3.9M      1.2M      2.7M     60.0  800.0K  1.2M
-- CPU caches ------------------------------------------------------------------
CPU   cached    change  objects  stacks  page list  may keep  slots
  0    80.0K    +36.0K    40.0K       1      40.0K      2.0M  rseq
  1  1008.3K  +1008.3K      300       2    1008.0K      2.0M  rseq
  2     1000     -7.8K     1000       3          0      2.0M  rseq
-- Events, 1 more below --------------------------------------------------------
time      event     what
13:42:11  skipped   1 CPU's stacks, held by a thread or with a failed fence
13:42:11  need      2 allocations found no free page until page lists gave 80.0K
13:42:11  refilled  2.9M of holes in slabs
13:42:11  failed    1 call that should have released pages
13:42:11  released  5.9M (1500 pages) to the system by 15 calls
13:42:11  drained   4 CPUs' stacks and 2 page lists
q quit  Tab pane  s sort  p profile  d drain  D drain CPU  space freeze  ? help
";
        assert_eq!(shown(80, 24, &state), expected);
    }

    #[test]
    fn focused_pane_is_largest_and_selected_row_stays_visible() {
        let [previous, current] = &readings();
        let mut state = state();
        state.log.follow(Pair { previous, current });
        for key in [KeyCode::Tab, KeyCode::Char('s'), KeyCode::Char('s'), KeyCode::End] {
            press(&mut state, key);
        }
        let expected = "\
neap top 1234 (redis-server), 13:42:11, numbers 120 ms old, every 1000 ms
memory   resident 100.0M  # in use 60.0M  limit 256.0M  counted 93.8M
cached   o objects 10.0M  l page lists 2.3M  . free pages 7.8M
a second faults 3000  populated 7.8M  released 5.9M  fences 20.0  ticks 10.0
neap     slots rseq  thread asleep  holes 308.0K  skipped 1  unaccounted 0
resident [#########################################ppppoooooool......          ]
-- Zones, 1 more below ---------------------------------------------------------
node  managed   used   free  resident  in lists  may keep  waits/s     low  high
   0    78.1M  46.9M  31.2M      3.9M      1.2M      2.7M     20.0  800.0K  1.2M
-- CPU caches, 2 more below ----------------------------------------------------
CPU   cached    change  objects  stacks  page list  may keep  slots
  0    80.0K    +36.0K    40.0K       1      40.0K      2.0M  rseq
-- Events, by event ------------------------------------------------------------
time      event     what
13:42:11  released  5.9M (1500 pages) to the system by 15 calls
13:42:11  skipped   1 CPU's stacks, held by a thread or with a failed fence
13:42:11  thread    neap's thread, awake before, is asleep
q quit  Tab pane  s sort  p profile  d drain  D drain CPU  space freeze  ? help
";
        assert_eq!(shown(80, 18, &state), expected);
    }

    #[test]
    fn groups_are_a_pane_with_keys_of_its_own_and_a_line_to_type_in() {
        let readings = &readings_with_groups();
        let [previous, current] = readings;
        let mut state = state();
        state.groups = known();
        let press = |state: &mut View, code| _ = state.press(KeyEvent::from(code), Pair { previous, current });
        [KeyCode::BackTab, KeyCode::BackTab, KeyCode::End].into_iter().for_each(|key| press(&mut state, key));
        let expected = "\
neap top 1234 (redis-server), 13:42:11, numbers 120 ms old, every 1000 ms
memory   resident 100.0M  # in use 60.0M  limit 256.0M  counted 93.8M
cached   o objects 10.0M  l page lists 2.3M  . free pages 7.8M
a second faults 3000  populated 7.8M  released 5.9M  fences 20.0  ticks 10.0
neap     slots rseq  thread asleep  holes 308.0K  skipped 1  unaccounted 0
resident [#########################################ppppoooooool......          ]
-- Groups ----------------------------------------------------------------------
group    used  change  charged   peak   max  high  refused  at max  at high
(all)   10.0M   +1.0M    10.0M  20.0M  none  none        0       0        0
cache    2.0M   +2.0M     2.0M   4.0M  none  none        0       0        0
tenant   8.0M       0     8.0M  16.0M  none  none        0       0        0
  acme   5.0M   -1.0M     5.0M  10.0M  none  none        0       0        0
  beta   3.0M   +3.0M     3.0M   6.0M  4.0M  3.0M        5      34       12
-- Zones -----------------------------------------------------------------------
node  managed   used   free  resident  in lists  may keep  waits/s     low  high
   0    78.1M  46.9M  31.2M      3.9M      1.2M      2.7M     20.0  800.0K  1.2M
   1    78.1M  46.9M  31.2M      3.9M      1.2M      2.7M     60.0  800.0K  1.2M
-- CPU caches, 1 more below ----------------------------------------------------
CPU   cached    change  objects  stacks  page list  may keep  slots
  0    80.0K    +36.0K    40.0K       1      40.0K      2.0M  rseq
  1  1008.3K  +1008.3K      300       2    1008.0K      2.0M  rseq
-- Events ----------------------------------------------------------------------
Nothing has happened yet.
q quit  Tab pane  s sort  Enter fold  m max  h high  l low  n min  ? help
";
        let screen = shown_of(readings, 80, 24, &state);
        assert_eq!(screen, expected);
        press(&mut state, KeyCode::Char('m'));
        "64q".chars().for_each(|letter| press(&mut state, KeyCode::Char(letter)));
        let last = |state: &View| shown_of(readings, 80, 24, state).lines().last().unwrap().to_string();
        assert_eq!(last(&state), "max: 64q_  of tenant/beta: such as 64m, or none; Enter sends it, Esc cancels");
        press(&mut state, KeyCode::Enter);
        assert_eq!(last(&state), "max: 64q_  of tenant/beta: not a number of bytes");
        // Without room for four panes the user's gets all of it.
        press(&mut state, KeyCode::Esc);
        let small = shown_of(readings, 60, 16, &state);
        assert!(small.contains("-- Groups") && !small.contains("-- Zones"), "{small}");
        assert_eq!(small.lines().filter(|line| line.contains("5.0M")).count(), 1, "{small}");
        let text = text(Pair { previous, current }, &state);
        assert!(text.contains("\n-- Groups --") && text.contains("  over   low\n"), "{text}");
    }

    #[test]
    fn profile_is_a_pane_among_the_others() {
        let [previous, current] = &readings();
        let mut state = state();
        state.turn_profile();
        state.profile = pane();
        let screen = shown(80, 24, &state);
        let lines: Vec<&str> = screen.lines().collect();
        assert!(lines[6].starts_with("-- Profile of 12 s, a sample every 512.0K, 3 lost ---"), "{screen}");
        assert!(lines[8].starts_with("32.0M ") && lines[8].ends_with("  parse (server/parse.c:12)"), "{screen}");
        assert!(lines[12].starts_with("-- Zones ") && screen.contains("-- Events "), "{screen}");
        // Text is cut where there is no room, and numbers are not.
        let narrow = shown(60, 16, &state);
        assert!(narrow.contains("[in no sample: allocated b\n"), "{narrow}");
        let whole = text(Pair { previous, current }, &state);
        assert!(whole.contains("  [in no sample: allocated before sampling]\n"), "{whole}");
    }

    #[test]
    fn a_small_terminal_says_so_and_help_fits_into_the_smallest() {
        let mut state = state();
        let expected = "40x9 is too small: neap top needs 60x16.\n q quits.\n";
        assert_eq!(shown(40, 9, &state).trim_end_matches('\n'), expected.trim_end_matches('\n'));
        assert!(shown(59, 16, &state).contains("too small") && shown(60, 15, &state).contains("too small"));
        assert_eq!(shown(3, 1, &state), "3x1\n");
        assert!(shown(60, 16, &state).contains("-- Events"));
        press(&mut state, KeyCode::Char('?'));
        let help = shown(60, 16, &state);
        for line in HELP {
            assert!(help.contains(&format!("{line}\n")), "{line} is not in\n{help}");
        }
        assert!(KEYS.len().max(GROUP_KEYS.len()) <= 80 && help.contains("q quit"), "{help}");
    }

    #[test]
    fn what_is_frozen_says_so_and_messages_stand_where_keys_do() {
        let mut state = state();
        press(&mut state, KeyCode::Char(' '));
        press(&mut state, KeyCode::Char('+'));
        state.message = Some("Something was said.".to_string());
        let screen = shown(80, 24, &state);
        assert!(
            screen.starts_with("neap top 1234 (redis-server), FROZEN at 13:42:11, numbers 120 ms old\n"),
            "{screen}"
        );
        assert!(screen.ends_with("\nSomething was said.\n") && !screen.contains(KEYS), "{screen}");
    }

    #[test]
    fn text_has_every_row_and_column() {
        let [previous, current] = &readings();
        let mut state = state();
        let pair = Pair { previous, current };
        (0..10).for_each(|_| state.log.follow(pair));
        let text = text(pair, &state);
        assert!(text.contains("  misses\n") && text.contains("  slots\n"), "{text}");
        assert_eq!(text.lines().count(), 6 + (2 + 2) + (2 + 3) + (2 + 70));
        assert!(text.lines().all(|line| line == line.trim_end()) && !text.contains("more below"));
    }

    #[test]
    fn pane_shares_fill_room_and_never_exceed_need() {
        assert_eq!(shares(17, &[3, 5, 20], 1), [3, 5, 9]);
        assert_eq!(shares(17, &[6, 50, 20], 1), [3, 11, 3]);
        assert_eq!(shares(17, &[6, 50, 20], 2), [3, 3, 11]);
        assert_eq!(shares(100, &[6, 50, 20], 0), [6, 50, 20]);
        assert_eq!(shares(8, &[6, 50, 20], 1), [0, 8, 0]);
        for room in 0..60 {
            let shares = shares(room, &[6, 12, 20], room % 3);
            assert_eq!(shares.iter().sum::<usize>(), room.min(38), "{room}: {shares:?}");
        }
    }
}
