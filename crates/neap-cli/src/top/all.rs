//! `neap top` without a process: all processes under neap, live. Keys act on the selected one: they
//! show it, drain it, or change its limit.
//!
//! A thread looks at the processes, since a look may take seconds. Another thread makes a request
//! of the user (`Requests`), one at a time. The screen is a pure function of the last survey and of
//! the user's choice. A key acts on a process with the id and the start of the selected row only.

use core::time::Duration;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::Instant;

use anyhow::{Context, Result};
use neap::settings::Setting;
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
use crate::look::allowance::Allowance;
use crate::look::census::{Busy, Chosen, Survey, take, unread_line};
use crate::look::handle::ProcessHandle;
use crate::look::stat_reader::ProcessStatus;
use crate::look::subject::{print, print_json};
use crate::look::totals::Totals;
use crate::{drain, ps, set};

const KEYS: &str = "q quit  Down choose  Enter show  p profile  d drain  m limit  s sort  r reverse";
/// Most characters that can be typed for a limit.
const LETTERS: usize = 24;

/// A process, and the time of its start. A later process with the same id has another start.
pub(super) struct ListedProcess {
    totals: Totals,
    start: Option<u64>,
}

fn survey(time: Duration, busy: &Busy) -> Result<Survey<ListedProcess>> {
    let size = |process: &ListedProcess| process.totals.size();
    let mut survey = take(&Chosen::All, Instant::now() + time, busy, size, |process| {
        let totals = Totals::look(process)?;
        Ok(ListedProcess { totals, start: process.handle.start() })
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

/// A process: its id, and the time of its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Target {
    pid: i32,
    start: Option<u64>,
}

impl Target {
    /// Opens the process. Returns `None` if it has ended, even if a later process has its id.
    fn open(self) -> Result<Option<Arc<ProcessHandle>>> {
        let handle = ProcessHandle::open(self.pid)?;
        Ok((handle.start() == self.start).then(|| Arc::new(handle)))
    }

    fn ended(self) -> String {
        format!("process {} has ended", self.pid)
    }
}

/// A limit that the user is typing.
struct LimitInput {
    target: Target,
    text: String,
    /// The reason why the text is no limit.
    complaint: Option<String>,
}

/// The list, and the user's choice.
struct AllView {
    survey: Survey<ListedProcess>,
    clock: String,
    choice: Choice,
    message: Option<String>,
    input: Option<LimitInput>,
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
        lines.push(match self.typed().as_ref().or(self.message.as_ref()) {
            Some(said) => Line::styled(cut(said, width), Modifier::BOLD),
            None => Line::styled(cut(KEYS, width), Modifier::DIM),
        });
        lines
    }

    /// The limit being typed, with its prompt.
    fn typed(&self) -> Option<String> {
        let LimitInput { target, text, complaint } = self.input.as_ref()?;
        let hint = complaint.as_deref().unwrap_or("such as 64m, 75%, auto or none; Enter sends it, Esc cancels");
        Some(format!("limit: {text}_  of process {}: {hint}", target.pid))
    }

    /// Returns the selected process. Without one, shows a message on how to select one.
    fn chosen(&mut self) -> Option<Target> {
        // Not the row at the place of a process that has gone: the user has not chosen that.
        let key = self.choice.key();
        let chosen =
            self.survey.seen.iter().find(|process| key.is_some_and(|key| *key == process.totals.pid.to_string()));
        if chosen.is_none() {
            let gone = key.map(|key| format!("Process {key} is not in the list now. Choose one: Down."));
            self.message = Some(gone.unwrap_or_else(|| "Choose a process first: Down.".to_string()));
        }
        chosen.map(|process| Target { pid: process.totals.pid, start: process.start })
    }

    /// Applies a key while a limit is typed.
    fn write(&mut self, code: KeyCode) -> Pressed {
        let Some(LimitInput { target, text, complaint }) = &mut self.input else { return Pressed::Nothing };
        *complaint = None;
        match code {
            KeyCode::Char(letter) if text.chars().count() < LETTERS => text.push(letter),
            KeyCode::Backspace => _ = text.pop(),
            KeyCode::Esc => self.input = None,
            KeyCode::Enter => match Setting::parse(Setting::Limit.key(), text) {
                Ok((_, number)) => {
                    let target = *target;
                    self.input = None;
                    return Pressed::Request(target, TargetRequest::Limit(number));
                }
                Err(refused) => *complaint = Some(refused.to_string()),
            },
            _ => {}
        }
        Pressed::Nothing
    }

    /// Applies a key.
    fn press(&mut self, key: KeyEvent) -> Pressed {
        self.message = None;
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let with_chosen =
            |view: &mut AllView, pressed: &dyn Fn(Target) -> Pressed| view.chosen().map_or(Pressed::Nothing, pressed);
        let listing = self.listing();
        match key.code {
            KeyCode::Char('c') if control => return Pressed::Quit,
            _ if control => {}
            code if self.input.is_some() => return self.write(code),
            KeyCode::Char('q') => return Pressed::Quit,
            KeyCode::Enter => return with_chosen(self, &|target| Pressed::Show { target, is_profiled: false }),
            KeyCode::Char('p') => return with_chosen(self, &|target| Pressed::Show { target, is_profiled: true }),
            KeyCode::Char('d') => return with_chosen(self, &|target| Pressed::Request(target, TargetRequest::Drain)),
            KeyCode::Char('m') => {
                self.input = self.chosen().map(|target| LimitInput { target, text: String::new(), complaint: None });
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
    Show { target: Target, is_profiled: bool },
    Request(Target, TargetRequest),
}

/// A request to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetRequest {
    Drain,
    /// The new value of the option `limit`.
    Limit(u64),
}

impl TargetRequest {
    fn words(self) -> String {
        match self {
            TargetRequest::Drain => "to drain everything".to_string(),
            TargetRequest::Limit(number) => format!("for limit {}", Setting::Limit.value(number)),
        }
    }

    /// Makes the request, and waits for the answer. Returns the answer in words.
    fn make(self, target: Target, time: Duration) -> Result<String> {
        let Some(handle) = target.open()? else { return Ok(target.ended()) };
        let process = ProcessStatus::read(&handle, Allowance::new(time))?;
        let done = match self {
            TargetRequest::Drain => drain::drain(&process, None)?,
            TargetRequest::Limit(number) => set::set(&process, &process.page()?, Setting::Limit, number)?,
        };
        Ok(format!("process {}: {}", target.pid, done.trim_end()))
    }
}

/// The request of the user that is under way, if there is one.
struct Requests {
    time: Duration,
    answer: Option<Receiver<String>>,
}

impl Requests {
    /// Makes a request, unless one is under way. Returns a message on that.
    fn ask(&mut self, target: Target, wanted: TargetRequest) -> String {
        if self.answer.is_some() {
            return "The last request has not been answered yet.".to_string();
        }
        let ((sender, answer), time) = (channel(), self.time);
        self.answer = Some(answer);
        std::thread::spawn(move || {
            // If the receiver is gone, the user has quit.
            let _ = sender.send(wanted.make(target, time).unwrap_or_else(|error| format!("{error:#}")));
        });
        format!("asked process {} {}", target.pid, wanted.words())
    }

    /// Takes the answer, if there is one.
    fn hear(&mut self) -> Option<String> {
        let heard = match self.answer.as_ref()?.try_recv() {
            Err(TryRecvError::Empty) => return None,
            heard => heard.unwrap_or_else(|_| "The request was lost.".to_string()),
        };
        self.answer = None;
        Some(heard)
    }
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
    let view =
        AllView { survey, clock: time_of_day(), choice: Choice::default(), message: Some(String::new()), input: None };
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
    let mut view = AllView { survey, clock: time_of_day(), choice: Choice::default(), message: None, input: None };
    let (mut surveyor, mut requests) = (Surveyor::start(time), Requests { time, answer: None });
    loop {
        match list(&mut view, &mut surveyor, &mut requests, interval, &signal)? {
            ListEnd::Quit => return Ok(ExitCode::SUCCESS),
            ListEnd::Signal(number) => signal_hook::low_level::emulate_default_handler(number)?,
            ListEnd::Show { target, is_profiled } => {
                match show(target, time, super::view(interval, is_profiled), &signal) {
                    Ok(SessionEnd::Quit) => {}
                    Ok(SessionEnd::Ended) => view.message = Some(target.ended()),
                    Ok(SessionEnd::Signal(number)) => signal_hook::low_level::emulate_default_handler(number)?,
                    Err(error) => view.message = Some(format!("{error:#}")),
                }
            }
        }
    }
}

/// The reason why the list leaves the screen.
enum ListEnd {
    Quit,
    Signal(i32),
    /// The user wants to see a process, with the profile if `is_profiled`.
    Show {
        target: Target,
        is_profiled: bool,
    },
}

fn list(
    view: &mut AllView,
    surveyor: &mut Surveyor,
    requests: &mut Requests,
    interval: Duration,
    signal: &Arc<AtomicUsize>,
) -> Result<ListEnd> {
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
                    Pressed::Show { target, is_profiled } => {
                        return Ok(ListEnd::Show { target, is_profiled });
                    }
                    Pressed::Request(target, wanted) => view.message = Some(requests.ask(target, wanted)),
                }
            }
        }
        if view.input.is_none()
            && let Some(answer) = requests.hear()
        {
            (view.message, is_stale) = (Some(answer), true);
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

/// Shows a process; `SessionEnd::Ended` if it has ended.
fn show(target: Target, time: Duration, view: View, signal: &AtomicUsize) -> Result<SessionEnd> {
    let Some(handle) = target.open()? else { return Ok(SessionEnd::Ended) };
    let asked = Asked { handle, time };
    let first = Reading::take(&asked.handle, asked.time)?;
    watch(Screen::open()?, &asked, first, view, signal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::census::{Unread, UnreadCount};

    fn view() -> AllView {
        let process = |pid: i32, command: &str, resident: u64| ListedProcess {
            totals: Totals { pid, command: command.into(), user: "0".into(), resident, ..Totals::default() },
            start: Some(pid as u64 * 10),
        };
        let seen = vec![process(7, "server", 3 << 20), process(5, "cache", 2 << 20), process(9, "small", 1 << 20)];
        let count = UnreadCount { processes: 2, example: "why".into() };
        let survey = Survey { seen, unread: [(Unread::NotPermitted, count)].into() };
        AllView { survey, clock: "13:42:11".into(), choice: Choice::default(), message: None, input: None }
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

    fn press(view: &mut AllView, code: KeyCode) -> Pressed {
        view.press(KeyEvent::from(code))
    }

    #[test]
    fn keys_act_on_the_selected_process_wherever_it_stands_now() {
        let mut view = view();
        for code in [KeyCode::Enter, KeyCode::Char('p'), KeyCode::Char('d'), KeyCode::Char('m')] {
            assert_eq!(press(&mut view, code), Pressed::Nothing);
            assert_eq!(view.message.as_deref(), Some("Choose a process first: Down."));
        }
        press(&mut view, KeyCode::Down);
        press(&mut view, KeyCode::Down);
        // In between, the order of the list is reversed, and a process starts.
        press(&mut view, KeyCode::Char('r'));
        view.survey.seen.insert(0, ListedProcess { totals: Totals { pid: 1, ..Totals::default() }, start: None });
        let target = Target { pid: 5, start: Some(50) };
        assert_eq!(press(&mut view, KeyCode::Enter), Pressed::Show { target, is_profiled: false });
        assert_eq!(press(&mut view, KeyCode::Char('p')), Pressed::Show { target, is_profiled: true });
        assert_eq!(press(&mut view, KeyCode::Char('d')), Pressed::Request(target, TargetRequest::Drain));
        let control = |letter| KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL);
        assert_eq!(view.press(control('d')), Pressed::Nothing, "no request by mistake");
        assert_eq!([view.press(control('c')), press(&mut view, KeyCode::Char('q'))], [Pressed::Quit, Pressed::Quit]);
    }

    #[test]
    fn limit_is_typed_and_sent_once_it_is_one() {
        let mut view = view();
        let type_in = |view: &mut AllView, text: &str| {
            text.chars().for_each(|letter| assert_eq!(press(view, KeyCode::Char(letter)), Pressed::Nothing));
            press(view, KeyCode::Enter)
        };
        press(&mut view, KeyCode::Down);
        let target = Target { pid: 7, start: Some(70) };
        assert_eq!(type_in(&mut view, "m64m"), Pressed::Request(target, TargetRequest::Limit(64 << 20)));
        assert!(view.input.is_none());
        // Letters that are keys of the list are text. The selection moves on, the process does not.
        assert_eq!(type_in(&mut view, "mdq"), Pressed::Nothing);
        let last = text(&view)[8].clone();
        assert!(last.starts_with("limit: dq_  of process 7: limit: \"dq\" is not a valid limit (none, auto"), "{last}");
        press(&mut view, KeyCode::Backspace);
        press(&mut view, KeyCode::Backspace);
        view.survey.seen.remove(0);
        assert!(text(&view)[8].starts_with("limit: _  of process 7: such as 64m"));
        assert_eq!(type_in(&mut view, "none"), Pressed::Request(target, TargetRequest::Limit(0)));
        for code in [KeyCode::Enter, KeyCode::Char('p'), KeyCode::Char('d'), KeyCode::Char('m')] {
            assert_eq!(press(&mut view, code), Pressed::Nothing, "the process has gone");
            assert_eq!(view.message.as_deref(), Some("Process 7 is not in the list now. Choose one: Down."));
        }
        press(&mut view, KeyCode::Down);
        assert_eq!(press(&mut view, KeyCode::Char('m')), Pressed::Nothing);
        (0..100).for_each(|_| _ = press(&mut view, KeyCode::Char('9')));
        assert_eq!(view.input.as_ref().unwrap().text.len(), LETTERS);
        press(&mut view, KeyCode::Esc);
        assert_eq!((view.typed(), press(&mut view, KeyCode::Char('q'))), (None, Pressed::Quit));
    }

    #[test]
    fn process_of_another_start_is_neither_shown_nor_asked() {
        let own = std::process::id() as i32;
        let start = ProcessHandle::open(own).unwrap().start();
        assert!(start.is_some());
        let second = Duration::from_secs(1);
        let later = Target { pid: own, start: start.map(|start| start + 1) };
        let end = show(later, second, View::new(second), &AtomicUsize::new(0)).unwrap();
        assert!(matches!(end, SessionEnd::Ended));
        for wanted in [TargetRequest::Drain, TargetRequest::Limit(1)] {
            assert_eq!(wanted.make(later, second).unwrap(), later.ended());
        }
    }
}
