//! `neap top` without a process: all processes under neap, live. Enter shows the selected one.
//!
//! A thread looks at the processes, since a look may take seconds. The screen is a pure function of
//! the last survey and of the user's choice.

use core::time::Duration;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use anyhow::{Context, Result};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::style::Modifier;
use ratatui::text::Line;

use super::asking::Asked;
use super::listing::{Cell, Listing};
use super::live::{LOOK, Screen, SessionEnd, ensure_terminal, signal_flag, watch};
use super::reading::{Reading, time_of_day};
use super::screen::{cut, pane_lines};
use super::state::{Choice, View};
use crate::census::{Busy, Chosen, Survey, take, unread_line};
use crate::handle::ProcessHandle;
use crate::ps;
use crate::subject::{print, print_json};
use crate::totals::Totals;

const KEYS: &str = "q quit  up, down choose  Enter show the process  s sort  r reverse";

/// A process, and the time of its start. A later process with the same id has another start.
pub(super) struct ListedProcess {
    totals: Totals,
    start: Option<u64>,
}

/// The time at which a process was started, in ticks of the kernel.
fn start_of(handle: &ProcessHandle) -> Option<u64> {
    handle.state_line()?.split(' ').nth(19)?.parse().ok()
}

fn survey(time: Duration, busy: &Busy) -> Result<Survey<ListedProcess>> {
    let size = |process: &ListedProcess| process.totals.size();
    let mut survey = take(&Chosen::All, Instant::now() + time, busy, size, |process| {
        let totals = Totals::of(process, &process.page()?)?;
        Ok(ListedProcess { totals, start: start_of(&process.handle) })
    })?;
    survey.seen.sort_unstable_by_key(|process| (core::cmp::Reverse(process.totals.resident), process.totals.pid));
    Ok(survey)
}

fn listing(processes: &[ListedProcess]) -> Listing {
    let bytes = |of: fn(&Totals) -> u64| move |process: &ListedProcess| Cell::Bytes(of(&process.totals));
    Listing::of("Processes", "No process runs under neap.", processes, |process| process.totals.pid.to_string())
        .column("pid", "pid", |process| Cell::Number(process.totals.pid as u64))
        .column("user", "user", |process| Cell::Text(process.totals.user.clone()))
        .column("resident", "resident_bytes", bytes(|totals| totals.resident))
        .column("in use", "in_use_bytes", bytes(|totals| totals.in_use))
        .column("cached", "cached_bytes", bytes(Totals::cached))
        .column("free", "free_bytes", bytes(|totals| totals.free))
        .column("limit", "limit_bytes", |process| Cell::Limit(process.totals.limit))
        .column("thread", "thread", |process| Cell::Text(process.totals.background.clone()))
        .column("command", "command", |process| Cell::Text(process.totals.command.clone()))
        .listing
}

/// The list, and the user's choice.
struct AllView {
    survey: Survey<ListedProcess>,
    clock: String,
    choice: Choice,
    message: Option<String>,
}

impl AllView {
    fn listing(&self) -> Listing {
        listing(&self.survey.seen).sorted(self.choice.order)
    }

    fn lines(&self, width: usize, height: usize) -> Vec<Line<'static>> {
        let listing = self.listing();
        let title = format!("neap top, {} processes under neap, {}", self.survey.seen.len(), self.clock);
        let mut lines = vec![Line::styled(cut(&title, width), Modifier::BOLD)];
        let unread = unread_line(&self.survey.unread);
        lines.extend(unread.lines().map(|line| Line::from(cut(line, width))));
        let room = height.saturating_sub(lines.len() + 1);
        lines.extend(pane_lines(&listing, self.choice.order, self.choice.row(&listing), true, room, width));
        lines.resize(height.saturating_sub(1), Line::default());
        lines.push(match &self.message {
            Some(said) => Line::styled(cut(said, width), Modifier::BOLD),
            None => Line::styled(cut(KEYS, width), Modifier::DIM),
        });
        lines
    }

    /// Applies a key.
    fn press(&mut self, key: KeyEvent) -> Pressed {
        self.message = None;
        let listing = self.listing();
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Pressed::Quit,
            KeyCode::Char('q') => return Pressed::Quit,
            KeyCode::Enter => {
                let row = self.choice.row(&listing).and_then(|row| listing.keys().nth(row)?.parse().ok());
                let chosen = self.survey.seen.iter().find(|process| Some(process.totals.pid) == row);
                match chosen {
                    Some(process) => return Pressed::Show { pid: process.totals.pid, start: process.start },
                    None => self.message = Some("Choose a process first: Down.".to_string()),
                }
            }
            KeyCode::Esc => self.choice.forget(),
            KeyCode::Char('s') => self.choice.sort(listing.columns()),
            KeyCode::Char('r') => self.choice.turn_round(),
            code => self.choice.step(code, &listing),
        }
        Pressed::Nothing
    }
}

/// The effect of a key.
#[derive(Debug, PartialEq, Eq)]
enum Pressed {
    Nothing,
    Quit,
    Show { pid: i32, start: Option<u64> },
}

fn draw(frame: &mut Frame<'_>, view: &AllView) {
    let area = frame.area();
    for (row, line) in area.rows().zip(view.lines(area.width.into(), area.height.into())) {
        frame.render_widget(line, row);
    }
}

/// Prints all processes once, as text or as the JSON object of `neap ps`.
pub(super) fn once(time: Duration, is_json: bool) -> Result<ExitCode> {
    let survey = survey(time, &Busy::default())?;
    if is_json {
        let seen = survey.seen.into_iter().map(|process| process.totals).collect();
        return print_json(&ps::json(&Survey { seen, unread: survey.unread }));
    }
    let height = survey.seen.len() + survey.unread.len() + 4;
    let width = listing(&survey.seen).width().max(80);
    let view = AllView { survey, clock: time_of_day(), choice: Choice::default(), message: Some(String::new()) };
    let lines = view.lines(width, height);
    print(|output| {
        for line in &lines[..height - 1] {
            let text: String = line.spans.iter().map(|span| span.content.as_ref()).collect();
            writeln!(output, "{}", text.trim_end())?;
        }
        Ok(())
    })
}

/// The thread that looks at the processes.
struct Surveyor {
    wanted: Sender<()>,
    surveys: Receiver<Result<Survey<ListedProcess>>>,
    is_asked: bool,
}

impl Surveyor {
    fn start(time: Duration) -> Surveyor {
        let (wanted, requests) = channel::<()>();
        let (sender, surveys) = channel();
        std::thread::spawn(move || {
            let busy = Busy::default();
            for () in requests {
                if sender.send(survey(time, &busy)).is_err() {
                    break;
                }
            }
        });
        Surveyor { wanted, surveys, is_asked: false }
    }

    fn ask(&mut self) {
        if !self.is_asked {
            self.is_asked = self.wanted.send(()).is_ok();
        }
    }
}

/// Shows all processes until the user quits.
pub(super) fn run(time: Duration, interval: Duration) -> Result<ExitCode> {
    ensure_terminal()?;
    let signal = signal_flag()?;
    let survey = survey(time, &Busy::default())?;
    let mut view = AllView { survey, clock: time_of_day(), choice: Choice::default(), message: None };
    let mut surveyor = Surveyor::start(time);
    loop {
        match list(&mut view, &mut surveyor, interval, &signal)? {
            ListEnd::Quit => return Ok(ExitCode::SUCCESS),
            ListEnd::Signal(number) => signal_hook::low_level::emulate_default_handler(number)?,
            ListEnd::Show { pid, start } => match show(pid, start, time, interval, &signal) {
                Ok(SessionEnd::Quit) => {}
                Ok(SessionEnd::Ended) => view.message = Some(format!("process {pid} has ended")),
                Ok(SessionEnd::Signal(number)) => signal_hook::low_level::emulate_default_handler(number)?,
                Err(error) => view.message = Some(format!("{error:#}")),
            },
        }
    }
}

/// The reason why the list leaves the screen.
enum ListEnd {
    Quit,
    Signal(i32),
    Show { pid: i32, start: Option<u64> },
}

fn list(view: &mut AllView, surveyor: &mut Surveyor, interval: Duration, signal: &Arc<AtomicUsize>) -> Result<ListEnd> {
    let mut screen = Screen::open()?;
    let (mut due, mut is_stale) = (Instant::now() + interval, true);
    loop {
        if core::mem::take(&mut is_stale) {
            screen.0.draw(|frame| draw(frame, view)).context("cannot write to the terminal")?;
        }
        // Relaxed: it publishes no other data.
        match signal.load(Ordering::Relaxed) {
            0 => {}
            number => return Ok(ListEnd::Signal(number as i32)),
        }
        if event::poll(LOOK).context("cannot read keys")? {
            is_stale = true;
            if let Event::Key(key) = event::read().context("cannot read keys")?
                && key.kind != KeyEventKind::Release
            {
                match view.press(key) {
                    Pressed::Nothing => {}
                    Pressed::Quit => return Ok(ListEnd::Quit),
                    Pressed::Show { pid, start } => return Ok(ListEnd::Show { pid, start }),
                }
            }
        }
        if let Ok(survey) = surveyor.surveys.try_recv() {
            surveyor.is_asked = false;
            (view.survey, view.clock, is_stale) = (survey?, time_of_day(), true);
        }
        if Instant::now() >= due {
            due = Instant::now() + interval;
            surveyor.ask();
        }
    }
}

/// Shows the process with this id and start; `SessionEnd::Ended` if it has ended.
fn show(pid: i32, start: Option<u64>, time: Duration, interval: Duration, signal: &AtomicUsize) -> Result<SessionEnd> {
    let handle = Arc::new(ProcessHandle::open(pid)?);
    if start_of(&handle) != start {
        return Ok(SessionEnd::Ended);
    }
    let asked = Asked { handle, time };
    let first = Reading::take(&asked.handle, asked.time)?;
    watch(Screen::open()?, &asked, first, View::new(interval), signal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::{Unread, UnreadCount};

    fn view() -> AllView {
        let process = |pid: i32, command: &str, resident: u64| ListedProcess {
            totals: Totals { pid, command: command.into(), user: "0".into(), resident, ..Totals::default() },
            start: Some(pid as u64 * 10),
        };
        let seen = vec![process(7, "server", 3 << 20), process(5, "cache", 2 << 20), process(9, "small", 1 << 20)];
        let count = UnreadCount { processes: 2, example: "why".into() };
        let survey = Survey { seen, unread: [(Unread::NotPermitted, count)].into() };
        AllView { survey, clock: "13:42:11".into(), choice: Choice::default(), message: None }
    }

    fn text(view: &AllView) -> Vec<String> {
        let text = |line: &Line<'_>| line.spans.iter().map(|span| span.content.as_ref()).collect::<String>();
        view.lines(80, 9).iter().map(|line| text(line).trim_end().to_string()).collect()
    }

    #[test]
    fn list_has_every_process_and_those_that_were_not_read() {
        let lines = text(&view());
        assert_eq!(lines[0], "neap top, 3 processes under neap, 13:42:11");
        assert_eq!(lines[1], "Not read: 2 not permitted (why)");
        assert!(lines[2].starts_with("-- Processes --"), "{lines:?}");
        assert!(lines[4].starts_with("  7") && lines[4].ends_with("server") && lines[4].contains("3.0M"), "{lines:?}");
        assert_eq!(lines[8], KEYS);
    }

    #[test]
    fn enter_shows_the_selected_process_wherever_it_stands_now() {
        let mut view = view();
        let press = |view: &mut AllView, code| view.press(KeyEvent::from(code));
        assert_eq!(press(&mut view, KeyCode::Enter), Pressed::Nothing);
        assert_eq!(view.message.as_deref(), Some("Choose a process first: Down."));
        press(&mut view, KeyCode::Down);
        press(&mut view, KeyCode::Down);
        // In between, the order of the list is reversed, and a process starts.
        press(&mut view, KeyCode::Char('r'));
        view.survey.seen.insert(0, ListedProcess { totals: Totals { pid: 1, ..Totals::default() }, start: None });
        assert_eq!(press(&mut view, KeyCode::Enter), Pressed::Show { pid: 5, start: Some(50) });
        assert_eq!(press(&mut view, KeyCode::Char('q')), Pressed::Quit);
    }

    #[test]
    fn process_of_another_start_is_not_shown() {
        let own = std::process::id() as i32;
        let start = start_of(&ProcessHandle::open(own).unwrap());
        assert!(start.is_some());
        let second = Duration::from_secs(1);
        let end = show(own, start.map(|start| start + 1), second, second, &AtomicUsize::new(0)).unwrap();
        assert!(matches!(end, SessionEnd::Ended));
    }
}
