//! `neap top` in a terminal: readings, keys, requests and the end.
//!
//! This module restores the terminal at the end, after an error, at a panic, and at SIGHUP, SIGINT,
//! SIGQUIT or SIGTERM. Such a signal still ends this program. At a panic the panic hook restores
//! the terminal, since a panic that aborts drops no value. Another thread makes the requests
//! (`asking`), since an answer may take seconds.

use core::time::Duration;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::execute;
use ratatui::crossterm::style::force_color_output;
use ratatui::{DefaultTerminal, Frame};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::asking::{Asked, Asking, Query};
use super::profiling::Profiling;
use super::reading::{Kernel, Pair, Reading};
use super::screen;
use super::state::{Action, View};
use crate::colours::Colours;

/// Longest delay until a signal or an answer is noticed.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// The terminal while this program has it.
pub(super) struct Screen(pub(super) DefaultTerminal);

impl Screen {
    pub(super) fn open() -> Result<Screen> {
        force_color_output(Colours::of_output().are_on());
        let terminal = ratatui::try_init().inspect_err(|_| restore()).context("cannot take over the terminal")?;
        // Ratatui's hook, which runs next, leaves the cursor hidden.
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            next(panic);
        }));
        Ok(Screen(terminal))
    }

    fn draw(&mut self, pair: Pair<'_>, state: &View) -> Result<()> {
        self.0.draw(|frame| draw(frame, pair, state)).context("cannot write to the terminal")?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal, if it still exists.
fn restore() {
    let _ = ratatui::try_restore();
    let _ = execute!(std::io::stdout(), Show);
}

/// Fills a frame.
pub(super) fn draw(frame: &mut Frame<'_>, pair: Pair<'_>, state: &View) {
    let area = frame.area();
    let lines = screen::lines(area.width.into(), area.height.into(), pair, state);
    for (row, line) in area.rows().zip(&lines) {
        frame.render_widget(line, row);
    }
}

/// The end of a session without an error.
pub(super) enum SessionEnd {
    Quit,
    /// The process has ended.
    Ended,
    Signal(i32),
}

pub(super) fn ensure_terminal() -> Result<()> {
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    ensure!(is_terminal, "neap top needs a terminal; --once prints one screen as text, --json one object");
    Ok(())
}

/// Returns a number that is 0 until SIGHUP, SIGINT, SIGQUIT or SIGTERM comes, and then the signal's
/// number.
pub(super) fn signal_flag() -> Result<Arc<AtomicUsize>> {
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        signal_hook::flag::register_usize(number, Arc::clone(&signal), number as usize)
            .with_context(|| format!("cannot handle signal {number}"))?;
    }
    Ok(signal)
}

/// Shows a process until it ends or the user quits.
pub(super) fn run(asked: Asked, first: Reading, view: View) -> Result<ExitCode> {
    ensure_terminal()?;
    let signal = signal_flag()?;
    let (pid, name) = (first.pid, first.name.clone());
    let screen = Screen::open()?;
    let end = watch(screen, &asked, first, view, &signal);
    match end? {
        SessionEnd::Quit => {}
        SessionEnd::Ended => println!("process {pid} ({name}) has ended"),
        SessionEnd::Signal(number) => signal_hook::low_level::emulate_default_handler(number)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the session. At the end, restores the terminal. Then restores the sampling option of the
/// process, if the session has changed it.
pub(super) fn watch(
    screen: Screen,
    asked: &Asked,
    first: Reading,
    state: View,
    signal: &AtomicUsize,
) -> Result<SessionEnd> {
    let mut profiling = Profiling::new(asked.clone());
    let end = look(screen, asked, first, state, signal, &mut profiling);
    match (end, profiling.finish()) {
        (end @ (Ok(SessionEnd::Signal(_)) | Err(_)), Err(left)) => {
            eprintln!("neap: {left:#}");
            end
        }
        (Ok(_), Err(left)) => Err(left),
        (end, Ok(())) => end,
    }
}

/// Most readings in a row that may fail. A process that executes another program has no page of
/// numbers until that program allocates.
const MOST_FAILED: u32 = 3;

/// Runs the session, and restores the terminal at the end.
fn look(
    mut screen: Screen,
    asked: &Asked,
    first: Reading,
    mut state: View,
    signal: &AtomicUsize,
    profiling: &mut Profiling,
) -> Result<SessionEnd> {
    let (mut previous, mut current): (Option<Reading>, Reading) = (None, first);
    let mut due = Instant::now() + state.interval;
    let mut asking = Asking::start(asked.clone());
    asking.follow(&current);
    let (mut stale, mut failed) = (true, 0);
    loop {
        let pair = Pair { previous: previous.as_ref().unwrap_or(&current), current: &current };
        if core::mem::take(&mut stale) {
            screen.draw(pair, &state)?;
        }
        // Relaxed: it publishes no other data.
        match signal.load(Ordering::Relaxed) {
            0 => {}
            number => return Ok(SessionEnd::Signal(number as i32)),
        }
        if event::poll(due.saturating_duration_since(Instant::now()).min(LOOK)).context("cannot read keys")? {
            // The terminal's size may have changed.
            stale = true;
            if let Event::Key(key) = event::read().context("cannot read keys")?
                && key.kind != KeyEventKind::Release
            {
                let interval = state.interval;
                match state.press(key, pair) {
                    Action::None => {}
                    Action::Quit => return Ok(SessionEnd::Quit),
                    Action::Drain(cpu) => asking.ask(Query::Drain(cpu), &mut state),
                    Action::Change(change) => asking.ask(Query::Change(change), &mut state),
                }
                if state.interval != interval {
                    due = Instant::now() + state.interval;
                }
            }
        }
        profiling.follow(state.profile.turn);
        stale |= asking.hear(&mut state);
        stale |= !state.frozen && profiling.hear(&mut state);
        if Instant::now() < due {
            continue;
        }
        due = Instant::now() + state.interval;
        if state.frozen && Kernel::read(&asked.handle).is_some() {
            continue;
        }
        match Reading::take(&asked.handle, asked.time) {
            Ok(next) => {
                if core::mem::take(&mut failed) > 0 {
                    state.message = None;
                }
                state.log.follow(Pair { previous: &current, current: &next });
                asking.follow(&next);
                previous = Some(core::mem::replace(&mut current, next));
            }
            Err(error) => match Kernel::read(&asked.handle) {
                None => return Ok(SessionEnd::Ended),
                Some(now) if now.headless => state.message = Some("The process's main thread has ended.".to_string()),
                Some(_) if failed == MOST_FAILED => return Err(error),
                Some(_) => {
                    failed += 1;
                    state.message = Some(format!("{error:#}"));
                }
            },
        }
        stale = true;
    }
}
